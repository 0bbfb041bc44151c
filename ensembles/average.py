"""Weight-averaged reward models: one reward model whose weights are the mean of several members' weights.

    python ensembles/average.py --reward-model-paths runs/reward/1b/{1,2,3,4,5} \
        --preference-dataset data/labelled/noise_25 --output-dir runs/reward/1b/average

After "WARM: On the Benefits of Weight Averaged Reward Models" (Rame et al. 2024), equation 2: the weights are
1/k x (theta_1 + ... + theta_k), so that you train against one model in place of k. Only models that were fine-tuned
from one base can be averaged, because they stay linearly connected. WARM also trains all members from one head, whereas
reward.py draws a new head for each seed (Detail 11), to which a member's body adapts. The script therefore prints the
validation accuracy of the average beside those of its members, and warns where it is below the worst of them.

OUTPUT_DIR/ model/, a folder like reward.py's; args.json; and accuracy.csv: for each member and the average, the share
            of the validation pairs whose chosen response scores higher (ties half), of all pairs and of each value of
            their column `batch` (kept and flipped labels of gold_label.py)
"""

import json
import os
import shutil
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas
import pyarrow.compute as pc
import torch
import torch.nn.functional as F
import tyro
from datasets import DatasetDict, load_dataset, load_from_disk
from huggingface_hub import snapshot_download
from rich.console import Console
from rich.progress import track
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

COLUMNS = ["query", "query_token", "query_chosen_token", "query_rejected_token"]
ONE_BASE = 0.5  # cosine of two members' weights: above 0.9 after training from one base, about 0 between two bases


@dataclass
class Args:
    reward_model_paths: list[str]
    """two or more reward models that were trained from one SFT model: run folders, checkpoint folders or Hub
    ids[@revision]"""
    output_dir: str
    """run folder to write; it must not exist yet"""
    preference_dataset: str = "data/tldr/preference"
    """pairs whose validation split tells the accuracies: folder or Hub id[@revision]"""
    micro_batch_size: int = 32
    """pairs in a forward pass: memory and speed, and rounding"""


def fail(message: str):
    """End the process with one clear message on standard error and exit code 1."""
    raise SystemExit(f"error: {message}")


@contextmanager
def or_fail(message: str):
    """Around what goes wrong outside of the script (a damaged file, a full disk): the run ends with one message."""
    try:
        yield
    except Exception as error:  # of as many kinds as there are formats
        fail(f"{message} ({error!r:.300})")


def checkpoint_folder(flag: str, path: str) -> str:
    """The local folder of a checkpoint given as run folder, checkpoint folder or Hub id[@revision] (downloaded)."""
    for folder in (Path(path) / "model", Path(path)):
        if (folder / "config.json").exists():
            return str(folder)
    name, _, revision = path.partition("@")
    if name.count("/") != 1 or name.startswith((".", "/")):
        runs, *run = path.split("/")
        if runs == "runs" and len(run) == 3 and run[1] in ("1b", "2.8b", "6.9b"):
            stage, model, seed = run
            fail(f"{flag} {path}: no checkpoint there. This makes it: python {stage}.py --model {model} --seed {seed}")
        fail(f"{flag} {path}: no checkpoint there, neither in that folder nor in its model/, and this is no Hub id")
    wanted = {"repo_id": name, "revision": revision or None, "ignore_patterns": "*/*"}  # no value_model/ of PPO's
    with or_fail(f"{flag} {path}: no checkpoint folder, and not on the Hub"):
        folder = snapshot_download(**wanted, allow_patterns=["*.json", "*.safetensors", "*.txt"])
        if not list(Path(folder).glob("*.safetensors")):
            folder = snapshot_download(**wanted)  # pytorch_model.bin
        return folder


def load_tokenizer(path: str):
    """The tokenizer of a checkpoint folder, with `[PAD]` added (Detail 3: never EOS)."""
    with or_fail(f"the tokenizer in {path} cannot be read"):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    return tokenizer


def load_splits(flag: str, path: str, columns: list[str], tokenizer) -> DatasetDict:
    """The DatasetDict in a folder written by tldr_dataset.py, or of a Hub id[@revision]. An error where a split or a
    column is missing, an id is too large, or most of 16 rows are another tokenizer's (eval/check_data.py: all)."""
    name, _, revision = path.partition("@")
    with or_fail(f"{flag} {path}: no data set with train, validation and the columns {columns}; see tldr_dataset.py"):
        data = load_from_disk(path) if Path(path).exists() else load_dataset(name, revision=revision or None)
        for split in ("train", "validation", *data):
            data[split].select_columns(columns)[0]
    keys = [column for column in columns if "_token" in column]
    for split, rows in data.items():
        largest = max(pc.max(pc.list_flatten(rows.data.column(key))).as_py() for key in keys)
        looked_at = rows.select(range(0, len(rows), -(-len(rows) // 16)))
        same = sum(is_of_tokenizer(row, keys, tokenizer) for row in looked_at)
        if 2 * same <= len(looked_at) or largest >= len(tokenizer):
            found = f"{same} of {len(looked_at)} rows are as the model's tokenizer makes them; largest id {largest}"
            fail(f"{flag} {path}: {split}: {found}. Make it with tldr_dataset.py; eval/check_data.py tells more")
    return data.with_format("torch")


def is_of_tokenizer(row: dict, keys: list[str], tokenizer) -> bool:
    """Whether a row's query is the tokens that the tokenizer makes of its text, and the rest end in its EOS."""
    tokens = {key: [token for token in row[key] if token != tokenizer.pad_token_id] for key in keys}
    query = tokens.pop("query_token", None)
    if query is not None and query != tokenizer(row["query"], add_special_tokens=False).input_ids:
        return False
    return all(ids[-1:] == [tokenizer.eos_token_id] for ids in tokens.values())


def without_dropout(config):
    """The config with every dropout at 0 (Detail 7), attention dropout included, which is no nn.Dropout."""
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, int | float):
            setattr(config, key, 0.0)
    return config


class ScalarHead(nn.Linear):
    """The head of a reward model, (b, T, d) -> (b, T, 1), in float32 under autocast and in a bfloat16 model, too."""

    def forward(self, hidden):
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.float(), self.weight.float(), self.bias.float())


class RewardModel(nn.Module):
    """A transformers sequence classifier with one label that returns its scalar at every position."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.config = model.config

    def forward(self, input_ids, **inputs):
        """Right-padded rows (b, T) -> rewards (b, T), in float32. They need no mask, because no token of a causal model
        sees what comes after it."""
        hidden = self.model.base_model(input_ids, use_cache="past_key_values" in inputs, **inputs).last_hidden_state
        return self.model.score(hidden).squeeze(-1)


def load_reward_model(path: str, tokenizer) -> RewardModel:
    """A trained reward model in float32 without dropout, the head's bias in `score.bias`. The paper's released ones
    become such a folder by benchmark/convert_released.py."""
    with or_fail(f"{path} holds no reward model that can be read; reward.py makes one"):
        config = without_dropout(AutoConfig.from_pretrained(path, num_labels=1, trust_remote_code=False))
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        model.config.pad_token_id = tokenizer.pad_token_id
        model.score = ScalarHead(model.score.weight.shape[1], 1)
        weights = {}
        for file in weight_files(path):
            weights |= load_file(file)
        model.load_state_dict(weights)
    return RewardModel(model)


def weight_files(path: str) -> list[Path]:
    """The safetensors files of a checkpoint folder: model.safetensors, or else those that its index names."""
    if Path(path, "model.safetensors").exists():
        return [Path(path, "model.safetensors")]
    index = json.loads(Path(path, "model.safetensors.index.json").read_text())
    return [Path(path, name) for name in sorted(set(index["weight_map"].values()))]


def trimmed_width(tokens: torch.Tensor, pad_id: int) -> int:
    """The width to which rows (b, T) can be trimmed: that of the longest row, rounded up to a multiple of 16 (at most
    T). Rounding keeps the number of different shapes small: each new one costs memory and, on a GPU, time."""
    longest = int((tokens != pad_id).sum(1).max())
    return min(-(-longest // 16) * 16, tokens.shape[1])


def last_rewards(model, tokens: torch.Tensor, pad_id: int) -> torch.Tensor:
    """Rewards (b,) of right-padded rows (b, T), read at their last token (Detail 12)."""
    tokens = tokens[:, : trimmed_width(tokens, pad_id)]
    last = (tokens != pad_id).sum(1) - 1
    return model(tokens).gather(1, last[:, None]).squeeze(1)


# ---- the average ---------------------------------------------------------------------------------------------------


def mean_weights(states: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The mean of k models' weights, summed in float64: {name: float32 tensor}."""
    return {name: torch.stack([state[name].double() for state in states]).mean(0).float() for name in states[0]}


def same_base(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Cosine of two models' weight matrices, all as one vector, without the head."""
    names = [name for name, tensor in one.items() if tensor.dim() > 1 and not name.startswith("score.")]
    flat = [torch.cat([state[name].flatten().double() for name in names]) for state in (one, other)]
    return F.cosine_similarity(*flat, dim=0).item()


@torch.no_grad()
def accuracies(model, pairs, pad_id: int, size: int, name: str) -> dict[str, float]:
    """{"all" or a value of the column `batch`: share of the pairs whose chosen response scores higher, ties half}."""
    wins, device = defaultdict(list), next(model.parameters()).device
    for start in track(range(0, len(pairs), size), name, console=Console(stderr=True), transient=True):
        batch = pairs[start : start + size]
        chosen = last_rewards(model, batch["query_chosen_token"].to(device), pad_id)
        rejected = last_rewards(model, batch["query_rejected_token"].to(device), pad_id)
        tied = (chosen - rejected).abs() <= 1e-5  # equal but for rounding
        won = torch.where(tied, 0.5, (chosen > rejected).float()).tolist()
        for label, win in zip(batch.get("batch", []), won, strict=False):
            wins[label].append(win)
        wins["all"] += won
    return {label: sum(wins[label]) / len(wins[label]) for label in sorted(wins)}


def main(args: Args):
    # ---- input -----------------------------------------------------------------------------------
    output_dir = Path(args.output_dir)
    if output_dir.exists():
        fail(f"{output_dir} exists; remove it (rm -r {output_dir}) or name another --output-dir")
    folders = {path: checkpoint_folder("--reward-model-paths", path) for path in args.reward_model_paths}
    members = {Path(folder).resolve() for folder in folders.values()}  # X and X/model are one
    if len(members) < max(2, len(args.reward_model_paths)):
        fail(f"--reward-model-paths {' '.join(args.reward_model_paths)}: two or more, each once, make an average")
    first = args.reward_model_paths[0]
    tokenizer = load_tokenizer(folders[first])
    for path, folder in folders.items():
        if load_tokenizer(folder).get_vocab() != tokenizer.get_vocab():
            fail(f"{path} has another tokenizer than {first}: their weights do not mean the same")
    pairs = load_splits("--preference-dataset", args.preference_dataset, COLUMNS, tokenizer)["validation"]
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    models = {path: load_reward_model(folder, tokenizer).eval() for path, folder in folders.items()}
    states = {path: model.model.state_dict() for path, model in models.items()}
    for path, state in states.items():
        shapes, wanted = ({name: tensor.shape for name, tensor in x.items()} for x in (state, states[first]))
        cosine = same_base(state, states[first]) if shapes == wanted else float("nan")
        if not cosine > ONE_BASE:
            why = "other shapes" if shapes != wanted else f"a cosine of {cosine:.2f} of their weights"
            fail(f"{path} is of another base than {first} ({why}): their average is nothing; an ensemble takes both")

    # ---- average, accuracies ---------------------------------------------------------------------
    mean = load_reward_model(folders[first], tokenizer).eval()
    mean.model.load_state_dict(mean_weights(list(states.values())))
    rows = []
    for path, model in [*models.items(), ("average", mean)]:
        found = accuracies(model.to(device), pairs, tokenizer.pad_token_id, args.micro_batch_size, path)
        model.to("cpu")
        rows.append({"model": path, "pairs": len(pairs)} | found)
        print(f"{path}: accuracy", ", ".join(f"{label} {share:.4f}" for label, share in found.items()), flush=True)
    worst = min(rows[:-1], key=lambda row: row["all"])
    if rows[-1]["all"] < worst["all"]:
        print(f"warning: the average is below its worst member, {worst['model']}: were all trained from one head?")

    # ---- save: beside, then renamed, so that the folder is whole or absent -----------------------
    unfinished = output_dir.with_name(output_dir.name + ".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    with or_fail(f"{output_dir} could not be written"):
        mean.model.save_pretrained(unfinished / "model")
        tokenizer.save_pretrained(unfinished / "model")
        pandas.DataFrame(rows).to_csv(unfinished / "accuracy.csv", index=False)
        settings = {"stage": "average"} | asdict(args)
        (unfinished / "args.json").write_text(json.dumps(settings, indent=2) + "\n")
        os.replace(unfinished, output_dir)
    print(f"wrote {output_dir}")


if __name__ == "__main__":
    main(tyro.cli(Args))
