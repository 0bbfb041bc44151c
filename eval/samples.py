"""Summaries of a checkpoint: sampled, with their ROUGE and, with a reward model, its scores. Of any stage's policy.

    python eval/samples.py runs/sft/1b/44413
    python eval/samples.py runs/ppo/1b/44413 --reward-model-path runs/reward/1b/44413 --splits validation
    torchrun --nproc_per_node 8 eval/samples.py EleutherAI/pythia-1b-deduped --output-dir runs/samples/1b

A checkpoint is a run folder, a checkpoint folder or a Hub id[@revision]. Of a run folder seed, data and response length
are the run's, and the tables go into its eval/: samples_{split}.csv, a row a post in the order of the data, and
rouge.csv, their means. Nothing else of a run is touched. Sampling is Gumbel-max with noise keyed by (seed, row,
position) at temperature 0.01, as in the authors' code: the number of processes and the batch size change nothing.
"""

import csv
import hashlib
import json
import os
import shutil
import struct
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pandas
import pyarrow.compute as pc
import torch
import torch.nn.functional as F
import tyro
from accelerate import Accelerator
from accelerate.tracking import WandBTracker
from accelerate.utils import gather_object
from datasets import DatasetDict, load_dataset, load_from_disk
from huggingface_hub import snapshot_download
from rich.console import Console
from rich.progress import Progress, TextColumn
from rouge_score.rouge_scorer import RougeScorer
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessor,
)

DATASET = "vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144"
COLUMNS = ["id", "query", "query_token", "reference_response", "reference_response_token"]


@dataclass
class Args:
    checkpoint: Annotated[str, tyro.conf.Positional]
    """policy: run folder, checkpoint folder or Hub id[@revision]"""
    reward_model_path: str | None = None
    """reward model that scores the samples and the references, likewise"""
    splits: tuple[str, ...] = ("validation", "test")
    """splits whose posts are summarised; one that the data lack is left out"""
    dataset: str | None = None
    """SFT data: folder or Hub id[@revision]; default the run's, else data/tldr/sft if there, else the published set"""
    output_dir: str | None = None
    """folder in which eval/ is written; default the run folder, else runs/samples/{its name}/{seed}"""
    seed: int | None = None
    """seed of the sampling noise; default the run's, else 44413"""
    response_length: int | None = None
    """tokens sampled at most; default the run's, else 53 (Detail 4)"""
    temperature: float = 0.01
    """sampling temperature (the paper's code)"""
    forward_batch_size: int = 32
    """rows per device at a time: memory only"""
    mixed_precision: Literal["no", "bf16"] | None = None
    """bf16: bfloat16 weights but for a reward's head; default bf16 on a GPU (Detail 8), no on a CPU"""
    track: bool = False
    """give the first 64 samples of a split to the W&B run of the run folder, as a table"""


@torch.no_grad()
def sampled(accelerator: Accelerator, policy, reward_model, data, tokenizer, args, split: str) -> list[dict]:
    """Sampled summaries of every row of a split, in order: dicts of id, query, response, reference, response_tokens
    (EOS counted), has_eos, with a reward model score (whether there is an EOS or not) and reference_score, and the
    F-measures rouge1, rouge2, rougeL (no stemming, as the authors)."""
    pad_id, found = tokenizer.pad_token_id, []
    rouge = RougeScorer(["rouge1", "rouge2", "rougeL"])
    for index, batch in shares(accelerator, data, args.forward_batch_size, f"sampling {split}"):
        query, keys = batch["query_token"].to(accelerator.device), noise_keys(args.seed, 0, index)
        with accelerator.autocast():
            responses = generate(policy, query, tokenizer, args.response_length, args.temperature, keys)
            scores = {}
            for name, tokens in (("score", responses), ("reference_score", batch["reference_response_token"])):
                rows = trim(torch.cat([query, tokens.to(accelerator.device)], 1), pad_id, "left")
                if reward_model:
                    width = rows.shape[1] - tokens.shape[1]
                    scores[name] = response_rewards(reward_model, rows, width, pad_id).tolist()
        for i, tokens in enumerate(responses.tolist()):
            row = {"id": batch["id"][i], "query": batch["query"][i]}
            row["response"] = tokenizer.decode(tokens, skip_special_tokens=True)
            row["reference"] = batch["reference_response"][i].removesuffix(tokenizer.eos_token)
            row["response_tokens"] = sum(token != pad_id for token in tokens)
            row["has_eos"] = tokenizer.eos_token_id in tokens
            row |= {name: values[i] for name, values in scores.items()}
            measures = rouge.score(row["reference"], row["response"])
            found.append(row | {metric: score.fmeasure for metric, score in measures.items()})
    return gather_object(found)


def sample_summary(split: str, rows: list[dict]) -> dict:
    """Means over the rows of a split: ROUGE, length in tokens (EOS counted), share that ended with EOS, and scores."""
    keys = ("rouge1", "rouge2", "rougeL", "response_tokens", "has_eos", "score", "reference_score")
    means = {key: sum(float(row[key]) for row in rows) / len(rows) for key in keys if key in rows[0]}
    if "score" in means:
        means["score_above_reference"] = sum(row["score"] > row["reference_score"] for row in rows) / len(rows)
    return {"split": split, "rows": len(rows)} | means


def main(args: Args):
    run, known = Path(args.checkpoint, "args.json"), {}
    if run.exists():
        with or_fail(f"{run} cannot be read"):
            known = json.loads(run.read_text())
    args.seed = known.get("seed", 44413) if args.seed is None else args.seed
    args.response_length = args.response_length or known.get("response_length", 53)
    args.dataset = args.dataset or known.get("dataset")
    args.dataset = args.dataset or ("data/tldr/sft" if Path("data/tldr/sft").exists() else DATASET)
    name = Path(args.checkpoint.partition("@")[0]).name
    args.output_dir = args.output_dir or (args.checkpoint if known else f"runs/samples/{name}/{args.seed}")
    if args.track and "wandb_id" not in known:
        fail(f"--track: {args.checkpoint} is no run folder that knows its W&B run")
    world, precision = int(os.environ.get("WORLD_SIZE", "1")), "bf16" if torch.cuda.is_available() else "no"
    accelerator = Accelerator(
        cpu=world > 1 and not torch.accelerator.is_available(), mixed_precision=args.mixed_precision or precision
    )
    if accelerator.num_processes != world:
        fail(
            f"{world} processes were launched, accelerate sees {accelerator.num_processes}: benchmark/accelerate/*.yaml"
        )
    folder = checkpoint_folder("checkpoint", args.checkpoint)
    tokenizer = load_tokenizer(folder)
    data = load_splits("--dataset", args.dataset, COLUMNS, tokenizer)
    if not [split for split in args.splits if split in data]:
        fail(f"--splits {' '.join(args.splits)}: {args.dataset} has {', '.join(data)}")
    policy, reward_model = load_policy(folder, tokenizer).to(accelerator.device).eval(), None
    if args.reward_model_path:
        reward_folder = checkpoint_folder("--reward-model-path", args.reward_model_path)
        if load_tokenizer(reward_folder).get_vocab() != tokenizer.get_vocab():
            fail(f"--reward-model-path {reward_folder}: a reward model of another tokenizer than {folder}")
        reward_model = load_reward_model(reward_folder, tokenizer).to(accelerator.device).eval()
    if accelerator.mixed_precision == "bf16":  # half the memory; autocast would keep a copy of the weights beside them
        for name, parameter in [*policy.named_parameters(), *(reward_model or nn.Module()).named_parameters()]:
            parameter.data = parameter.data if "score." in name else parameter.data.bfloat16()
    tracker = WandBTracker(None, dir=args.output_dir, id=known.get("wandb_id"), resume="allow")
    if args.track and accelerator.is_main_process:
        tracker.start()
    table = []
    for split in [split for split in args.splits if split in data]:
        rows = sampled(accelerator, policy, reward_model, data[split], tokenizer, args, split)
        table.append(sample_summary(split, rows))
        write_quoted(accelerator, args, f"samples_{split}", rows)
        if args.track and accelerator.is_main_process:
            tracker.log_table(f"samples/{split}", dataframe=pandas.DataFrame(rows[:64]))
    write_quoted(accelerator, args, "rouge", table, f"samples of {folder}")
    if args.track and accelerator.is_main_process:
        tracker.finish()
    accelerator.end_training()


def write_quoted(accelerator: Accelerator, args, name: str, rows: list[dict], title: str = ""):
    """Write rows as a CSV file in eval/, called by all processes; print them too where there is a title. Texts are
    quoted: one that is not may hold no carriage return, which a model can sample."""
    frame = pandas.DataFrame(rows)
    with writing(accelerator, Path(args.output_dir, "eval", f"{name}.csv")) as partial:
        if accelerator.is_main_process:
            frame.to_csv(partial, index=False, quoting=csv.QUOTE_NONNUMERIC)
    if title:
        accelerator.print(f"\n{title}\n{frame.to_string(index=False)}\n")


def shares(accelerator: Accelerator, data, size: int, description: str):
    """Yield (row indices, rows) of this process's share of a split, up to `size` rows at a time; gather_object puts
    what the processes find into the order of the rows."""
    first, last = (len(data) * (accelerator.process_index + i) // accelerator.num_processes for i in (0, 1))
    for start in progress(accelerator, range(first, last, size), description):
        index = list(range(start, min(start + size, last)))
        yield index, data[index]


def noise_keys(seed: int, update: int, rows: list[int]) -> torch.Tensor:
    """Two 32-bit keys (b, 2) per row, a hash of (seed, update, row)."""
    digests = [hashlib.blake2b(f"{seed} {update} {row}".encode(), digest_size=8).digest() for row in rows]
    return torch.tensor([struct.unpack("<ii", digest) for digest in digests], dtype=torch.int32).reshape(-1, 2)


def gumbel_noise(keys: torch.Tensor, position: int, vocab_size: int) -> torch.Tensor:
    """Gumbel(0, 1) noise (b, V) that depends on (key, position, token) alone, not on batch, device or rank: a 32-bit
    integer hash (int32 products wrap), read as a uniform with 32 bits near 0, where the largest noise comes from."""

    def mix(x, key):
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
            x = (x ^ ((x >> shift) & (2 ** (32 - shift) - 1))) * factor ^ key
        return x ^ ((x >> 16) & 0xFFFF)

    step = torch.tensor(position, dtype=torch.int32, device=keys.device)
    key = [mix(keys[:, i, None] + step * 0x3C6EF35F, keys[:, 1 - i, None]) for i in (0, 1)]  # 2 x (b, 1)
    token = torch.arange(vocab_size, dtype=torch.int32, device=keys.device)
    bits = mix(token * (0x9E3779B9 - 2**32) + key[0], key[1])  # (b, V)
    uniform = (torch.where(bits < 0, bits + 2.0**32, bits.float()) + 0.5) / 2**32
    return -torch.log(-torch.log1p(-uniform.clamp(max=1 - 2**-24)))


class GumbelMax(LogitsProcessor):
    """Turns generate()'s arg max into a sample from softmax(logits / temperature): arg max of scaled logits plus keyed
    Gumbel noise. `banned` (V,) marks ids that are never sampled: [PAD] and ids beyond the tokenizer."""

    def __init__(self, keys: torch.Tensor, query_width: int, temperature: float, banned: torch.Tensor):
        self.keys, self.query_width, self.temperature, self.banned = keys, query_width, temperature, banned

    def __call__(self, input_ids, scores):
        noise = gumbel_noise(self.keys, input_ids.shape[1] - self.query_width, scores.shape[1])
        return (scores / (self.temperature + 1e-7) + noise).masked_fill(self.banned, -torch.inf)


def banned_ids(model, tokenizer) -> torch.Tensor:
    """(V,) bool: [PAD] and the ids beyond the tokenizer, which no sample may hold."""
    ids = torch.arange(model.get_input_embeddings().num_embeddings)
    return (ids == tokenizer.pad_token_id) | (ids >= len(tokenizer))


@torch.no_grad()
def generate(model, queries, tokenizer, response_length: int, temperature: float, keys: torch.Tensor) -> torch.Tensor:
    """Sample responses (b, response_length) to left-padded queries (b, Q); a row that reached EOS is filled with [PAD],
    which equals sampling on and truncating after the first EOS (Detail 23)."""
    pad_id, device = tokenizer.pad_token_id, queries.device
    queries = trim(queries, pad_id, "left")
    sampler = GumbelMax(keys.to(device), queries.shape[1], temperature, banned_ids(model, tokenizer).to(device))
    config = GenerationConfig(
        max_new_tokens=response_length, do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=pad_id
    )
    was_training, defaults = model.training, model.generation_config
    model.generation_config = config  # else generate() fills what ours leaves open from the checkpoint's own
    model.eval()  # in train mode, gradient checkpointing would switch the cache off
    tokens = model.generate(
        queries, attention_mask=(queries != pad_id).long(), generation_config=config, logits_processor=[sampler]
    )
    model.train(was_training)
    model.generation_config = defaults
    responses = tokens[:, queries.shape[1] :]
    return F.pad(responses, (0, response_length - responses.shape[1]), value=pad_id)


def trim(tokens: torch.Tensor, pad_id: int, side: Literal["left", "right"]) -> torch.Tensor:
    """Cut the columns that are padding in every row, but for a width of a multiple of 16 (or all): widths that differ
    at every call leave the heap in pieces, so that memory grows with the run. (b, T) -> (b, up to T)."""
    columns = (tokens != pad_id).any(0).nonzero().flatten()
    if len(columns) == 0:
        return tokens[:, :0]
    used = int(tokens.shape[1] - columns[0] if side == "left" else columns[-1] + 1)
    width = -(-used // 16) * 16
    return tokens[:, -width:] if side == "left" else tokens[:, :width]


def position_ids(mask: torch.Tensor) -> torch.Tensor:
    """Positions that count real tokens only, whatever the padding (Detail 14): mask (b, T) -> (b, T)."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def last_token(tokens: torch.Tensor, query_width: int, pad_id: int) -> torch.Tensor:
    """Index (b,) of the last token before the first [PAD] at or after column `query_width`; the last column where there
    is none (Detail 12). Padding to the left of the query does not count. tokens (b, T)."""
    return query_width - 1 + (tokens[:, query_width:] != pad_id).long().cumprod(1).sum(1)


def response_rewards(model, tokens: torch.Tensor, query_width: int, pad_id: int) -> torch.Tensor:
    """Rewards (b,) of rows `query + response` (b, T): query padded on either side to `query_width` columns (0 where the
    whole row is right-padded), response on the right."""
    mask = tokens != pad_id
    inputs = {"attention_mask": mask.long(), "position_ids": position_ids(mask)} if query_width else {}
    logits = model(tokens, **inputs)  # (b, T)
    return logits.gather(1, last_token(tokens, query_width, pad_id)[:, None]).squeeze(1)


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

    def forward(self, input_ids, **inputs):
        """(b, T), and as inputs attention_mask (b, T) or (b, 1, T, earlier + T), position_ids (b, T), a cache, which is
        added to -> reward logits (b, T) in float32. Rows that are padded on the right alone need no mask: no token of
        a causal model sees what comes after it."""
        hidden = self.model.base_model(input_ids, use_cache="past_key_values" in inputs, **inputs).last_hidden_state
        return self.model.score(hidden).squeeze(-1)


def load_reward_model(path: str, tokenizer) -> RewardModel:
    """A trained reward model in float32 without dropout, the head's bias in `score.bias`. The paper's released ones
    become such a folder by benchmark/convert_released.py."""
    with or_fail(f"{path} holds no reward model that can be read; reward.py makes one"):
        config = without_dropout(AutoConfig.from_pretrained(path, num_labels=1, trust_remote_code=False))
        config.pad_token_id = tokenizer.pad_token_id
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        model.score = ScalarHead(model.score.weight.shape[1], 1)
        model.load_state_dict(
            {key: x for file in Path(path).glob("*.safetensors") for key, x in load_file(file).items()}
        )
    return RewardModel(model)


def load_policy(path: str, tokenizer):
    """A causal language model in float32, without dropout, whose embeddings hold every id of the tokenizer."""
    settings = {"dtype": torch.float32, "attn_implementation": "sdpa", "trust_remote_code": False}
    with or_fail(f"the model in {path} cannot be read"):
        config = without_dropout(AutoConfig.from_pretrained(path, trust_remote_code=False))
        model = AutoModelForCausalLM.from_pretrained(path, config=config, **settings)
    rows = model.get_input_embeddings().num_embeddings
    if rows < len(tokenizer) - 1:
        fail(f"{path}: {rows} embeddings do not fit its tokenizer of {len(tokenizer) - 1} ids and [PAD]: not a pair")
    if rows < len(tokenizer):
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    return model


def without_dropout(config):
    """The config with every dropout at 0 (Detail 7), attention dropout included, which is no nn.Dropout."""
    config.update({k: 0.0 for k, v in config.to_dict().items() if "drop" in k and isinstance(v, int | float)})
    return config


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
        stage, model, seed = ["sft", "MODEL", "SEED", *path.split("/") * path.startswith("runs/")][-3:]
        fail(f"{flag} {path}: no checkpoint there. Train it first: python {stage}.py --model {model} --seed {seed}")
    wanted = {"repo_id": name, "revision": revision or None, "ignore_patterns": "*/*"}  # no value_model/ of PPO's
    with or_fail(f"{flag} {path}: no checkpoint folder, and not on the Hub"):
        folder = snapshot_download(**wanted, allow_patterns=["*.json", "*.safetensors", "*.txt"])
        return folder if [*Path(folder).glob("*.safetensors")] else snapshot_download(**wanted)


def load_tokenizer(path: str):
    """The tokenizer of a checkpoint folder, with `[PAD]` added (Detail 3: never EOS)."""
    with or_fail(f"the tokenizer in {path} cannot be read"):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    return tokenizer


def load_splits(flag: str, path: str, columns: list[str], tokenizer) -> DatasetDict:
    """The DatasetDict in a folder written by tldr_dataset.py, or of a Hub id[@revision]. An error where a split or a
    column is missing, an id is too large, or most of 16 rows are another tokenizer's (tldr_dataset.py --check: all)."""
    name, _, revision = path.partition("@")
    with or_fail(f"{flag} {path}: no data set with train, validation and the columns {columns}; see tldr_dataset.py"):
        data = load_from_disk(path) if Path(path).exists() else load_dataset(name, revision=revision or None)
        for split in ("train", "validation", *data):
            data[split].select_columns(columns)[0]
    keys, eos_id = [column for column in columns if "_token" in column], tokenizer.eos_token_id
    for split, rows in data.items():
        same, largest = [], max(pc.max(pc.list_flatten(rows.data.column(key))).as_py() for key in keys)
        for row in rows.select(range(0, len(rows), -(-len(rows) // 16))):
            query = tokenizer(row["query"], add_special_tokens=False).input_ids
            real = {key: [x for x in row[key] if x != tokenizer.pad_token_id] for key in keys}
            same.append(all(x == query if key == "query_token" else x[-1:] == [eos_id] for key, x in real.items()))
        if 2 * sum(same) <= len(same) or largest >= len(tokenizer):
            found = f"{sum(same)} of {len(same)} rows are as the model's tokenizer makes them; largest id {largest}"
            fail(f"{flag} {path}: {split}: {found}. Make it with tldr_dataset.py --tokenizer MODEL; --check finds more")
    return data.with_format("torch")


@contextmanager
def writing(accelerator: Accelerator, path: Path):
    """Yield a name beside `path` for its new content, a file or folder; then that is synced to disk and renamed: `path`
    is whole or not there. Where this fails what is half-written goes. Called by all processes."""
    partial = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        accelerator.wait_for_everyone()
        yield partial
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            os.sync()
            shutil.rmtree(path, ignore_errors=True)
            os.replace(partial, path)
        accelerator.wait_for_everyone()
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        partial.unlink(missing_ok=True)
        fail(f"{path} could not be written ({error!r:.300}): make room, then continue with --resume")


def progress(accelerator: Accelerator, items, description: str):
    """Yield `items` under a rich progress bar with the rate and the time left, shown by the main process only."""
    columns = *Progress.get_default_columns(), TextColumn("{task.completed:.0f}/{task.total:.0f}, {task.speed!s:.4}/s")
    with Progress(*columns, console=Console(stderr=True), disable=not accelerator.is_main_process) as bar:
        yield from bar.track(items, len(items), description=description)


if __name__ == "__main__":
    main(tyro.cli(Args))
