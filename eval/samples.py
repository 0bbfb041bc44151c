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
import re
import shutil
import struct
import sys
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
    StaticCache,
)
from transformers.masking_utils import create_masks_for_generate

DATASET = "vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144"
TEMPERATURE_EPS = 1e-7  # added to a temperature before it divides, as in the authors' code
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
    """rows per device at a time: memory and speed, and rounding"""
    mixed_precision: Literal["no", "bf16"] | None = None
    """bf16: bfloat16 weights but for a reward's head; default bf16 on a GPU (Detail 8), no on a CPU"""
    track: bool = False
    """give the first 64 samples of a split to the W&B run of the run folder, as a table"""


@torch.no_grad()
def sampled(accelerator: Accelerator, policy, reward_model, data, tokenizer, args, split: str) -> list[dict]:
    """Sampled summaries of every row of a split, in order: dicts of id, query, response, reference, response_tokens
    (EOS counted), has_eos, with a reward model score (whether there is an EOS or not) and reference_score, and the
    F-measures rouge1, rouge2, rougeL (no stemming, as the authors)."""
    pad_id = tokenizer.pad_token_id
    rouge = RougeScorer(["rouge1", "rouge2", "rougeL"])
    samples = []
    for index, posts in shares(accelerator, data, args.forward_batch_size, f"sampling {split}"):
        queries = posts["query_token"].to(accelerator.device)
        keys = noise_keys(args.seed, 0, index).to(accelerator.device)
        with accelerator.autocast():
            cache = KeyValueCache(policy.config, trimmed_width(queries, pad_id) + args.response_length)
            responses, _ = generate(policy, queries, tokenizer, args.response_length, args.temperature, keys, cache)
        scores = {}
        if reward_model:
            references = posts["reference_response_token"].to(accelerator.device)
            scores["score"] = end_rewards(accelerator, reward_model, queries, responses, pad_id)
            scores["reference_score"] = end_rewards(accelerator, reward_model, queries, references, pad_id)
        for i, tokens in enumerate(responses.tolist()):
            row = {"id": posts["id"][i], "query": posts["query"][i]}
            row["response"] = tokenizer.decode(tokens, skip_special_tokens=True)
            row["reference"] = posts["reference_response"][i].removesuffix(tokenizer.eos_token)
            row["response_tokens"] = sum(token != pad_id for token in tokens)
            row["has_eos"] = tokenizer.eos_token_id in tokens
            for name, values in scores.items():
                row[name] = values[i]
            for name, measure in rouge.score(row["reference"], row["response"]).items():
                row[name] = measure.fmeasure
            samples.append(row)
    return gather_object(samples)


def end_rewards(accelerator: Accelerator, reward_model, queries, responses, pad_id: int) -> list[float]:
    """The rewards of responses (b, R) to left-padded queries (b, Q), read at their last token (Detail 12)."""
    tokens = right_padded(torch.cat([queries, responses], 1), pad_id)
    last = (tokens != pad_id).sum(1) - 1
    with accelerator.autocast():
        rewards = reward_model(tokens)  # (b, T)
    return rewards.gather(1, last[:, None]).squeeze(1).tolist()


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
    local = Path(args.checkpoint).exists()
    name = Path(args.checkpoint if local else args.checkpoint.partition("@")[0]).name
    args.output_dir = args.output_dir or (args.checkpoint if known else f"runs/samples/{name}/{args.seed}")
    if args.track and "wandb_id" not in known:
        fail(f"--track: {args.checkpoint} is no run folder that knows its W&B run")
    # cuDNN's attention builds a plan for every new shape, and its backward pass has given NaN under a mask
    torch.backends.cuda.enable_cudnn_sdp(False)
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
        unread = sum(re.search("[a-z0-9]", row["reference"].lower()) is None for row in rows)
        if unread:
            what = f"{unread} of {len(rows)} references have no Latin letter or digit"
            accelerator.print(f"{split}: {what}; rouge-score reads nothing else, so their ROUGE is always 0")
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
    first = len(data) * accelerator.process_index // accelerator.num_processes
    last = len(data) * (accelerator.process_index + 1) // accelerator.num_processes
    for start in progress(accelerator, range(first, last, size), description):
        index = list(range(start, min(start + size, last)))
        yield index, data[index]


def noise_keys(seed: int, update: int, rows: list[int]) -> torch.Tensor:
    """Two 32-bit keys (b, 2) per row, a hash of (seed, update, row)."""
    keys = []
    for row in rows:
        digest = hashlib.blake2b(f"{seed} {update} {row}".encode(), digest_size=8).digest()
        keys.append(struct.unpack("<ii", digest))
    return torch.tensor(keys, dtype=torch.int32).reshape(-1, 2)


def mix(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A bijection of 32-bit integers in which each bit of x changes about half of all bits (the shifts and factors are
    those of Wellons's lowbias32), the key xored in after each product. int32 products wrap; masks make >> unsigned."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D ^ key
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32) ^ key
    return x ^ ((x >> 16) & 0xFFFF)


def gumbel_noise(keys: torch.Tensor, position: int, vocab_size: int) -> torch.Tensor:
    """Gumbel(0, 1) noise (b, V) that depends on (key, position, token) alone, not on batch, device or rank: a 32-bit
    integer hash, read as a uniform with 32 bits near 0, where the largest noise comes from."""
    step = torch.as_tensor(position, dtype=torch.int32, device=keys.device) * 0x3C6EF35F
    key_0 = mix(keys[:, 0, None] + step, keys[:, 1, None])  # (b, 1)
    key_1 = mix(keys[:, 1, None] + step, keys[:, 0, None])
    token = torch.arange(vocab_size, dtype=torch.int32, device=keys.device) * (0x9E3779B9 - 2**32)  # golden ratio
    bits = mix(token + key_0, key_1)  # (b, V)
    unsigned = torch.where(bits < 0, bits + 2.0**32, bits.float())
    uniform = (unsigned + 0.5) / 2**32
    return -torch.log(-torch.log1p(-uniform.clamp(max=1 - 2**-24)))


def sample_tokens(logits, keys, position, temperature: float, banned) -> tuple[torch.Tensor, torch.Tensor]:
    """A token (b,) for each row of logits (b, V), and its log-probability (b,): the arg max of log softmax(logits /
    (temperature + 1e-7)) plus keyed Gumbel noise is a sample of that softmax. `banned` (V,) is never sampled."""
    scaled = (logits.float() / (temperature + TEMPERATURE_EPS)).masked_fill(banned, -torch.inf)
    tokens = (scaled + gumbel_noise(keys, position, scaled.shape[1])).argmax(1)
    logprobs = scaled.gather(1, tokens[:, None]).squeeze(1) - scaled.logsumexp(1)
    return tokens, logprobs


class KeyValueCache(StaticCache):
    """A StaticCache whose keys are in the type of its values, to which attention would cast them under autocast."""

    def update(self, keys, values, *args, **kwargs):
        return super().update(keys.to(values.dtype), values, *args, **kwargs)


def banned_ids(model, tokenizer) -> torch.Tensor:
    """(V,) bool: [PAD] and the ids beyond the tokenizer, which no sample may hold."""
    ids = torch.arange(model.get_input_embeddings().num_embeddings)
    return (ids == tokenizer.pad_token_id) | (ids >= len(tokenizer))


def truncate_response(responses: torch.Tensor, eos_id: int, pad_id: int) -> torch.Tensor:
    """Detail 23: everything after the first EOS becomes [PAD]; a row without EOS stays. (b, R) -> (b, R)."""
    is_eos = (responses == eos_id).int()
    eos_before = is_eos.cumsum(1) - is_eos
    return responses.masked_fill(eos_before > 0, pad_id)


def prefill_mask(model, inputs: torch.Tensor, is_token: torch.Tensor, cache):
    """The model's own attention mask (causal, or with sliding windows; a dict where its layers differ) for left-padded
    inputs (b, Q), in which a padding position sees itself as well: attention over no key at all is NaN in some kernels,
    and in the next layer 0 x NaN spreads to every token. is_token (b, Q + R)."""
    embeddings = model.get_input_embeddings()(inputs)
    masks = create_masks_for_generate(model.config, embeddings, is_token, cache)

    def with_diagonal(mask):  # (b, 1, Q, K), or None where nothing but the causal order is masked
        return None if mask is None else mask | torch.eye(*mask.shape[2:], dtype=torch.bool, device=mask.device)

    if isinstance(masks, dict):
        return {kind: with_diagonal(mask) for kind, mask in masks.items()}
    return with_diagonal(masks)


@torch.no_grad()
def generate(model, queries, tokenizer, response_length: int, temperature: float, keys, cache):
    """Sample responses (b, R) to left-padded queries (b, Q); a row that reached EOS is filled with [PAD], which equals
    sampling on and truncating after the first EOS (Detail 23). Returns them and their tokens' log-probabilities (b, R).
    cache: a KeyValueCache of at least Q + R columns, new or of b rows. All steps but the first have the same shapes,
    and wait for the device at every eighth token only, to see whether all rows have ended."""
    pad_id = tokenizer.pad_token_id
    inputs = queries[:, -trimmed_width(queries, pad_id) :]
    banned = banned_ids(model, tokenizer).to(queries.device)
    responses = queries.new_full((len(queries), response_length), pad_id)
    logprobs = torch.zeros(responses.shape, device=queries.device)
    ended = torch.zeros(len(queries), dtype=torch.bool, device=queries.device)
    positions = torch.arange(response_length, dtype=torch.int32, device=queries.device)
    cache.reset()
    position_ids = ((inputs != pad_id).cumsum(1) - 1).clamp(min=0)
    is_token = F.pad(inputs != pad_id, (0, response_length), value=True)  # (b, Q + R)
    mask = prefill_mask(model, inputs, is_token, cache)
    for t in range(response_length):
        states = model.base_model(
            inputs, attention_mask=mask, position_ids=position_ids, past_key_values=cache, use_cache=True
        ).last_hidden_state
        logits = model.get_output_embeddings()(states[:, -1])
        tokens, logprobs[:, t] = sample_tokens(logits, keys, positions[t], temperature, banned)
        responses[:, t] = tokens
        ended |= tokens == tokenizer.eos_token_id
        if t % 8 == 7 and ended.all():
            break
        inputs = tokens[:, None]
        mask = is_token
        position_ids = position_ids[:, -1:] + 1
    return truncate_response(responses, tokenizer.eos_token_id, pad_id), logprobs


def trimmed_width(tokens: torch.Tensor, pad_id: int) -> int:
    """The width to which rows (b, T) can be trimmed: that of the longest row, rounded up to a multiple of 16 (at most
    T). Rounding keeps the number of different shapes small: each new one costs memory and, on a GPU, time."""
    longest = int((tokens != pad_id).sum(1).max())
    return min(-(-longest // 16) * 16, tokens.shape[1])


def right_padded(tokens: torch.Tensor, pad_id: int) -> torch.Tensor:
    """Rows (b, T) with their padding moved to the right, wherever it was, and cut to the longest row."""
    real_first = (tokens == pad_id).int().argsort(dim=1, stable=True)
    return tokens.gather(1, real_first)[:, : trimmed_width(tokens, pad_id)]


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
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, int | float):
            setattr(config, key, 0.0)
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
    rate = TextColumn("{task.completed:.0f}/{task.total:.0f}, {task.speed!s:.4}/s")
    columns = [*Progress.get_default_columns(), rate]
    with Progress(*columns, console=Console(stderr=True), disable=not accelerator.is_main_process) as bar:
        yield from bar.track(items, len(items), description=description)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    main(tyro.cli(Args))
