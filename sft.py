"""Supervised fine-tuning on the TL;DR reference summaries: the first stage of "The N+ Implementation Details of RLHF
with PPO" (section 5, Detail 9, table 3).

One process, after `bash quickstart/run.sh --fast`:

    python sft.py --model quickstart/bases/nano-xs --dataset data/quickstart/posts-1-fast/tldr/sft \
        --batch-size 32 --learning-rate 1e-3

N processes:    torchrun --nproc_per_node 8 sft.py --model 1b --seed 44413
Paper scale:    accelerate launch sft.py --model 6.9b --seed 44413
Samples, ROUGE: python eval/samples.py runs/sft/nano-xs/44413

The run folder (default runs/sft/{model}/{seed}) holds model/ (a plain transformers checkpoint), metrics.jsonl,
args.json, TensorBoard files and, with --save-every, checkpoints/. The algorithm comes first, plumbing last. Shapes: b
is the number of rows in a function's input, T the width of the tokens and V the vocabulary size.

The script deviates from the authors' code on purpose in two points (docs/details.md lists the paper's Details):
- The loss is a mean over the target tokens of the whole batch, however devices share it. The authors' released runs had
  one row per micro-batch, so their loss is a mean of row means. The two gradients have a cosine of 0.9995.
- The rows left over after the last whole batch are not trained on (116,722 = 911 x 128 + 114).
"""

import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from math import ceil, cos, inf, pi
from pathlib import Path
from typing import Literal

import pyarrow.compute as pc
import torch
import torch.nn.functional as F
import tyro
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.tracking import WandBTracker
from accelerate.utils import DeepSpeedPlugin, gather_object, set_seed
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from huggingface_hub import snapshot_download
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

STAGE = "sft"
MICRO_BATCH_SIZES = {"1b": 16, "2.8b": 8, "6.9b": 2}  # per Pythia size: what fits on one 80 GB device
DATASET = "vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144"
TOKEN_COLUMNS = ["query_reference_response_token", "query_reference_response_token_response_label"]


@dataclass
class Args:
    model: str = "1b"
    """base model: 1b, 2.8b or 6.9b (Pythia deduped), a Hub id (`id@revision` allowed) or a local folder"""
    seed: int = 44413
    """seed of the data order (the paper uses 44413, 55513, 66613 and 77713)"""
    dataset: str = "data/tldr/sft" if Path("data/tldr/sft").exists() else DATASET
    """pre-tokenised SFT data: folder of a DatasetDict (see tldr_dataset.py) or Hub id[@revision]"""
    output_dir: str = "runs/sft/{model}/{seed}"
    """run folder to write, which must not hold a run yet (unless you pass --resume)"""

    loss_on: Literal["query_response", "response"] = "query_response"
    """tokens in the loss: query and response (the authors' code), or only the response; padding never counts"""
    num_train_epochs: float = 1
    """passes over the train split (table 3)"""
    total_episodes: int | None = None
    """number of rows to train on; default: num_train_epochs passes (table 3: 116,722)"""
    batch_size: int = 128
    """rows per optimiser step over all devices (table 3)"""
    learning_rate: float = 3e-6
    """peak learning rate; decays to 0 over the run by a cosine (table 3)"""
    max_grad_norm: float = 0.0
    """clip gradients to this global norm; 0: no clipping (as in the paper)"""

    eval_every: int = 0
    """compute the validation loss every so many updates; 0: only before the first and after the last update"""
    micro_batch_size: int | None = None
    """rows per device in one forward/backward pass; affects memory, speed, rounding; default: fits 80 GB, or 8"""
    mixed_precision: Literal["no", "bf16"] | None = None
    """autocast type; weights in training are float32 (DeepSpeed: a copy); default: bf16 on a GPU (Detail 8)"""
    save_every: int = 0
    """write a checkpoint for --resume every so many updates; 0: never"""
    resume: bool = False
    """continue the run in --output-dir from its newest checkpoint"""
    track: bool = False
    """also log to Weights & Biases (set WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE in the environment)"""


# ==== the algorithm ===============================================================================


def sft_loss(model, tokens: torch.Tensor, labels: torch.Tensor, pad_id: int) -> torch.Tensor:
    """Return the sum of -log p(label | tokens so far) over all labels but -100, for right-padded tokens (b, T) and
    labels (b, T) from next_tokens. The rows need no mask, because the model is causal."""
    width = trimmed_width(tokens, pad_id)
    logits = model(tokens[:, :width], use_cache=False).logits.float()  # (b, width, V)
    return F.cross_entropy(logits.flatten(0, 1), labels[:, :width].flatten(), ignore_index=-100, reduction="sum")


def next_tokens(batch: dict, loss_on: str, pad_id: int) -> torch.Tensor:
    """Return the label of each position (b, T): the next token, or -100 if that does not count in the loss. Padding
    never counts, EOS does (Detail 3)."""
    tokens = batch["query_reference_response_token"]
    if loss_on == "response":
        tokens = batch["query_reference_response_token_response_label"]  # the same row with [PAD] for the query
    labels = tokens.masked_fill(tokens == pad_id, -100)
    return F.pad(labels[:, 1:], (0, 1), value=-100)


def data_order(n: int, seed: int, start: int, stop: int) -> torch.Tensor:
    """Return the row indices (stop - start,) at positions start..stop-1 of an endless stream over n rows, reshuffled
    without replacement on each pass (Detail 21). They depend only on (seed, position), so all processes agree."""
    first = start // n
    passes = torch.cat([permutation(n, seed, number) for number in range(first, stop // n + 1)])
    return passes[start - first * n : stop - first * n]


def permutation(n: int, seed: int, number: int) -> torch.Tensor:
    """Return the numbers 0..n-1 in a random order (n,) that depends only on seed and number."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    return torch.randperm(n, generator=generator)


# ==== main ========================================================================================


def main(args: Args):
    # ---- data and model --------------------------------------------------------------------------
    check_args(args)
    accelerator = make_accelerator(args)
    device = accelerator.device
    args.micro_batch_size = args.micro_batch_size or MICRO_BATCH_SIZES.get(args.model, 8)
    preset = f"EleutherAI/pythia-{args.model}-deduped"
    base_folder = local_checkpoint("--model", preset if args.model in MICRO_BATCH_SIZES else args.model)
    tokenizer = load_tokenizer(base_folder)
    pad_id = tokenizer.pad_token_id
    data = load_splits("--dataset", args.dataset, ["query", "query_token", *TOKEN_COLUMNS], tokenizer)
    train = data["train"].select_columns(TOKEN_COLUMNS)
    args.total_episodes = args.total_episodes or int(args.num_train_epochs * len(train))
    num_updates = args.total_episodes // args.batch_size
    if num_updates == 0:
        fail(f"--batch-size {args.batch_size} is more than the {args.total_episodes} rows to train on")
    if args.batch_size % accelerator.num_processes:
        fail(f"--batch-size {args.batch_size} is no multiple of {accelerator.num_processes} processes")
    width = max(len(rows[0]["query_reference_response_token"]) for rows in (train, data["validation"]))
    policy = load_policy(base_folder, tokenizer, width)
    # `model` is the policy or a wrapper of it. Both run under autocast from here on: accelerate replaces their forward.
    model, optimizer = prepare(accelerator, policy, args)
    # change here: pass state of your own to accelerator.register_for_checkpointing. --resume restores it on the CPU.
    finished_updates = start_or_resume(accelerator, args, {"model": base_folder, "dataset": train})
    if finished_updates == 0:
        loss = validation_loss(accelerator, policy, data["validation"], args, pad_id)
        write_metrics(accelerator, args, {"eval/loss": loss}, 0, num_updates)

    run_start = time.time()
    # After each update, updates() writes a checkpoint if one is due, and ends the run if a signal has come.
    for update in updates(accelerator, args, finished_updates, num_updates):
        # ---- 1. the batch, each process its share ------------------------------------------------
        update_start = time.time()
        order = data_order(len(train), args.seed, (update - 1) * args.batch_size, update * args.batch_size)
        batch = train[own_share(accelerator, order).tolist()]
        tokens = batch["query_reference_response_token"].to(device)  # (b, T)
        labels = next_tokens(batch, args.loss_on, pad_id).to(device)
        lengths = (tokens != pad_id).sum(1)  # (b,)
        label_count = accelerator.reduce((labels != -100).sum(), "sum")  # of the whole batch, on all devices

        # ---- 2. one optimiser step ---------------------------------------------------------------
        learning_rate = args.learning_rate * 0.5 * (1 + cos(pi * (update - 1) / num_updates))  # cosine to 0 (table 3)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        loss_sum = torch.zeros((), device=device)
        for rows in accumulate(accelerator, model, similar_lengths(lengths, args.micro_batch_size)):
            mb_sum = sft_loss(model, tokens[rows], labels[rows], pad_id)  # change here
            loss = mb_sum / label_count
            accelerator.backward(loss * accelerator.num_processes)  # DDP and DeepSpeed average over devices
            loss_sum += mb_sum.detach()
        grad_norm = optimizer_step(accelerator, model, optimizer, args.max_grad_norm, f"update {update}")

        # ---- 3. log ------------------------------------------------------------------------------
        metrics = {
            "loss/train": accelerator.reduce(loss_sum, "sum") / label_count,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "episode": update * args.batch_size,
            "tokens/batch": accelerator.reduce(lengths.sum(), "sum"),
            "time/update": time.time() - update_start,
            "time/total": time.time() - run_start,
        }
        if update == num_updates or (args.eval_every and update % args.eval_every == 0):
            metrics["eval/loss"] = validation_loss(accelerator, policy, data["validation"], args, pad_id)
        write_metrics(accelerator, args, metrics, update, num_updates)

    # ---- save ------------------------------------------------------------------------------------
    save_model(accelerator, args, "model", policy, tokenizer)
    accelerator.print(f"done in {time.time() - run_start:.0f} s: {args.output_dir}", flush=True)
    accelerator.end_training()


# ==== helpers ======================================================================================


def own_share(accelerator: Accelerator, rows: torch.Tensor) -> torch.Tensor:
    """Return this process's part of rows (n,), which are split into one part of about equal size per process."""
    return rows.tensor_split(accelerator.num_processes)[accelerator.process_index]


def accumulate(accelerator: Accelerator, model, mbs: list):
    """Yield the micro-batches of an optimiser step. Devices exchange gradients only with the last one. (accelerate's
    own accumulate() goes with a fixed number of micro-batches, and its no_sync() fails under ZeRO-2.)"""
    for number, mb in enumerate(mbs, 1):
        is_last = number == len(mbs)
        model.require_backward_grad_sync = is_last  # for DDP, which reads it in the forward pass
        accelerator.sync_gradients = is_last  # for DeepSpeed, whose backward then also takes the step
        yield mb


def trimmed_width(tokens: torch.Tensor, pad_id: int) -> int:
    """Return the width to which rows (b, T) can be trimmed: the longest row, rounded up to a multiple of 16, at most T.
    Rounding keeps the number of different shapes small, because each new shape costs memory and, on a GPU, time."""
    longest = int((tokens != pad_id).sum(1).max())
    return min(ceil(longest / 16) * 16, tokens.shape[1])


def similar_lengths(lengths: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Return positions in `lengths` (b,), in groups of `size` rows of similar length, which saves padding."""
    groups = lengths.argsort(descending=True, stable=True).split(size)
    return [rows for rows in groups if len(rows)]  # no group if there are no rows


def load_policy(path: str, tokenizer, width: int = 0):
    """Return a causal language model for rows of up to `width` tokens, in float32, with an embedding for every id of
    the tokenizer. It stays in evaluation mode even while it is trained, so it has no dropout (Detail 7). Its head bans
    [PAD] and the ids beyond the tokenizer: no softmax here gives them probability, nor does generate() sample them."""
    settings = {"dtype": torch.float32, "trust_remote_code": False, "output_loading_info": True}
    with or_fail(f"the model in {path} cannot be read"):
        model, report = AutoModelForCausalLM.from_pretrained(path, **settings)
    check_model(model, path, width, report["missing_keys"])
    fit_embeddings(model, path, tokenizer)
    head = model.get_output_embeddings()
    tokens = torch.arange(4)[None]
    with torch.no_grad():  # ppo.py calls the head by itself, and all stages take the same models
        if not torch.allclose(head(model.base_model(tokens)[0]), model(tokens).logits, atol=1e-4):  # Granite
            fail(f"{path}: {type(model).__name__} scales or caps the logits of its head. Choose another model")
    ids = torch.arange(len(head.weight))
    head.register_buffer("banned", (ids == tokenizer.pad_token_id) | (ids >= len(tokenizer)), persistent=False)
    head.register_forward_hook(lambda head, _, logits: logits.masked_fill_(head.banned, -1e9))  # -inf x 0 would be nan
    settings = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = GenerationConfig(**settings, suppress_tokens=ids[head.banned].tolist())
    return model


def check_model(model, path: str, width: int, wrong: Iterable[str]):
    """End with an error if weights are `wrong`, if a model's attention does not let it be trained or sampled from here,
    or if it has fewer positions than `width`, the tokens of the widest row."""
    name = f"{path}: {type(model).__name__}"
    if wrong:  # transformers goes on, with random weights where some are missing
        fail(f"{name} and the weights in this folder do not fit: {', '.join(sorted(wrong)[:3])}")
    if model.config.get_text_config() is not model.config:  # a vision tower would have no gradient
        fail(f"{name} is more than a language model. Choose a model for text alone")
    if model.config._attn_implementation != "sdpa":  # MPT, Gemma 2
        fail(f"{name} has no scaled dot-product attention in transformers. Choose another model")
    other = set(getattr(model.config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if other:  # recurrent or hybrid: Qwen3-Next, Granite 4, LFM2, Falcon H1
        fail(f"{name} has {', '.join(sorted(other))} layers; only full and sliding attention are supported")
    positions = getattr(model.config, "max_position_embeddings", None) or inf
    if width > positions:  # GPT-2 has learned positions
        fail(f"{name} has {positions} positions, but rows need {width}. Make the data with shorter queries")


def fit_embeddings(model, path: str, tokenizer):
    """Give a model a row for every id of its tokenizer, whose EOS and [PAD] its config then names."""
    rows = model.get_input_embeddings().num_embeddings
    if rows == len(tokenizer) - 1:  # none for [PAD]
        rows += 1
        model.resize_token_embeddings(rows, mean_resizing=False)
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            for weight in layer.parameters() if layer else []:
                weight.data[-1] = weight.data[:-1].mean(0)  # an average logit, in programs that do not ban [PAD]
    if rows < len(tokenizer):
        fail(f"{path}: {rows} embeddings, but the tokenizer has {len(tokenizer) - 1} ids. Use its own tokenizer")
    model.get_input_embeddings().padding_idx = None  # if the config names EOS, EOS would not be trained
    model.config.update({"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id})


@torch.no_grad()
def validation_loss(accelerator: Accelerator, model, data, args, pad_id: int) -> float:
    """Return the mean loss per target token of a whole split, in nats."""
    loss_sum, label_count = 0.0, 0  # in Python, because Apple's GPUs have no float64
    share = data.shard(accelerator.num_processes, accelerator.process_index, contiguous=False)
    starts = range(0, len(share), args.micro_batch_size)
    for start in track(starts, "validation loss", disable=not accelerator.is_main_process):
        batch = share[start : start + args.micro_batch_size]
        tokens = batch["query_reference_response_token"].to(accelerator.device)
        labels = next_tokens(batch, args.loss_on, pad_id).to(accelerator.device)
        loss_sum += sft_loss(model, tokens, labels, pad_id).item()
        label_count += (labels != -100).sum().item()
    losses, counts = zip(*gather_object([(loss_sum, label_count)]), strict=True)
    return sum(losses) / sum(counts)


# ==== data: the same code in every stage script ===================================================


def load_tokenizer(path: str):
    """Return the tokenizer of a checkpoint folder, with `[PAD]` added so that padding is never EOS (Detail 3)."""
    with or_fail(f"the tokenizer in {path} cannot be read"):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    if max(tokenizer.get_vocab().values()) != len(tokenizer) - 1:
        fail(f"the tokenizer in {path} leaves ids out, so [PAD] would get the id of another token")
    if tokenizer("a").input_ids != tokenizer("a", add_special_tokens=False).input_ids:
        tokenizer.add_bos_token = False  # as in the data: no row begins with a BOS
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    return tokenizer


def load_splits(flag: str, path: str, columns: list[str], tokenizer) -> DatasetDict:
    """Load a DatasetDict from a folder written by tldr_dataset.py or from a Hub id[@revision]. Ends with an error if a
    split or column is missing, or if rows are ragged, padded on the other side or made with another tokenizer."""
    name, _, revision = path.partition("@")
    with or_fail(f"{flag} {path}: no data set with train, validation and the columns {columns}; see tldr_dataset.py"):
        data = load_from_disk(path) if Path(path).exists() else load_dataset(name, revision=revision or None)
        for split in {"train", "validation", *data}:
            data[split].select_columns(columns)[0]  # fails where something is missing
    keys = [column for column in columns if "_token" in column]
    for split, rows in data.items():
        for key in keys:
            column = rows.data.column(key)
            widths = pc.unique(pc.list_value_length(column))
            if len(widths) != 1:
                fail(f"{flag} {path}: {split}: rows differ in width in {key}. Pad them, as tldr_dataset.py does")
            # queries are padded on the left, and all else on the right; a label begins with the query's [PAD]
            inner = widths[0].as_py() - 1 if key == "query_token" else 0
            row = pc.index(pc.list_element(column, inner), tokenizer.pad_token_id).as_py()
            if row >= 0 and not key.endswith("_label"):
                fail(f"{flag} {path}: {split}: {key} of row {row} is padded on the other side. Use tldr_dataset.py")
        looked_at = rows.select(range(0, len(rows), ceil(len(rows) / 16)))
        matches = sum(is_of_tokenizer(row, keys, tokenizer) for row in looked_at)
        if 2 * matches <= len(looked_at):  # of another tokenizer's rows, hardly one matches
            how = "Make it with tldr_dataset.py or llama2/preference_dataset.py; eval/check_data.py shows the rows"
            fail(f"{flag} {path}: {split}: {matches} of {len(looked_at)} rows match the model's tokenizer. {how}")
    return data.with_format("torch")


def is_of_tokenizer(row: dict, keys: list[str], tokenizer) -> bool:
    """Return whether a row's `query_token` decodes to its query, spaces aside (the published texts lack some), and its
    other token columns end in EOS."""
    pad_id = tokenizer.pad_token_id  # a slow look-up, so once
    tokens = {key: [token for token in row[key] if token != pad_id] for key in keys}
    decoded = tokenizer.decode(tokens.pop("query_token"), clean_up_tokenization_spaces=False)
    if "".join(decoded.split()) != "".join(row["query"].split()):
        return False
    return all(ids[-1:] == [tokenizer.eos_token_id] for ids in tokens.values())


# ==== plumbing: the same code in every stage script; read it once, then skip it ===================

# Flags of all stage scripts: those that must be above 0, and those that --resume may change (at most, rounding differs)
POSITIVE = {"batch_size", "num_mini_batches", "num_ppo_epochs", "response_length", "eval_rows", "temperature", "beta"}
POSITIVE |= {"total_episodes", "micro_batch_size", "sample_batch_size", "eval_temperature"}  # None: the default
MAY_CHANGE = {"micro_batch_size", "sample_batch_size", "mixed_precision", "offload", "processes", "eval_every"}
MAY_CHANGE |= {"eval_rows", "run_eval", "sample_every", "save_every", "track", "resume", "output_dir"}
MAY_CHANGE |= {"dataset", "preference_dataset", "sft_model_path", "reward_model_path"}  # their contents are compared


def fail(message: str):
    """End the process with one clear message on standard error and exit code 1."""
    raise SystemExit(f"error: {message}")


@contextmanager
def or_fail(message: str):
    """Run a block that depends on files, disk or network, and turn any exception there into one clear error message."""
    try:
        yield
    except Exception as error:  # each file format raises its own kinds of error
        fail(f"{message} ({error!r:.300})")


def check_args(args):
    """Replace {model} and {seed} in the arguments. Ends with an error if a number is out of its range or the output
    folder already holds a run. With --resume, ends the process successfully if that run is complete."""
    path = args.model if Path(args.model).exists() else args.model.partition("@")[0]  # sft.py takes an id@revision
    name = Path(os.path.abspath(path)).name
    for key, value in vars(args).items():
        if isinstance(value, str):
            value = value.replace("{model}", name).replace("{seed}", str(args.seed))
            setattr(args, key, os.path.expanduser(value))
        elif isinstance(value, int | float):
            lowest = -sys.float_info.max if key == "penalty_reward_value" else 0
            highest = inf if key in ("cliprange", "cliprange_value") else sys.float_info.max
            if not lowest <= value <= highest or (value == 0 and key in POSITIVE):
                wanted = "above 0" if value == 0 else "a finite number that is not negative"
                fail(f"--{key.replace('_', '-')} {value} must be {wanted}")
    folder = Path(args.output_dir)
    if args.resume and (folder / "model").exists():  # a run writes this last
        print(f"--resume: the run in {folder} has ended, so there is nothing left to do", flush=True)
        raise SystemExit(0)
    if not args.resume and any((folder / name).exists() for name in ("args.json", "checkpoints", "model")):
        fail(f"{folder} already holds a run: choose another --output-dir, delete it, or continue it with --resume")


def make_accelerator(args) -> Accelerator:
    """Return the Accelerator that the launcher asked for. Ends with an error if accelerate started something else."""
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # the shell of stage.sbatch ignores it, and so would its children
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # less fragmentation
    os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "1"  # or it divides the loss
    torch.backends.cuda.enable_cudnn_sdp(False)  # slow with new shapes, and has given NaN
    set_seed(args.seed)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    process_group = InitProcessGroupKwargs(timeout=timedelta(hours=2))  # large checkpoints
    settings = {"log_with": "tensorboard", "project_dir": args.output_dir, "kwargs_handlers": [process_group]}
    settings["mixed_precision"] = args.mixed_precision or ("bf16" if torch.cuda.is_available() else "no")
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"  # by the launcher
    if args.model in ("2.8b", "6.9b") and world > 1 and not deepspeed:  # DDP would need too much memory
        deepspeed = True
        settings["deepspeed_plugin"] = DeepSpeedPlugin(zero_stage=2)  # as in benchmark/accelerate/zero2.yaml
    if not torch.accelerator.is_available():
        settings["cpu"] = not deepspeed  # accelerate needs it on CPUs, but it would switch DeepSpeed off
        if deepspeed:
            process_group.backend = "gloo"
    accelerator = Accelerator(**settings)
    plugin = accelerator.state.deepspeed_plugin
    is_sharded = accelerator.distributed_type == "FSDP" or (plugin and plugin.zero_stage == 3)
    if accelerator.num_processes != world or bool(plugin) != deepspeed or is_sharded:
        how = "Use a configuration of benchmark/accelerate/"
        fail(f"accelerate did not start what was asked for, or it shards the weights (FSDP, ZeRO-3). {how}")
    return accelerator


def local_checkpoint(flag: str, path: str) -> str:
    """Return the folder of a checkpoint given as a run folder, a checkpoint folder or a Hub id[@revision]."""
    for folder in (Path(path, "model"), Path(path)):
        if (folder / "config.json").exists():
            return str(folder)
    name, _, revision = path.partition("@")
    wanted = {"repo_id": name, "revision": revision or None, "ignore_patterns": "*/*"}  # no subfolders
    with or_fail(f"{flag} {path}: no checkpoint there, in its model/ or on the Hub. Run the earlier stage first"):
        folder = snapshot_download(**wanted, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model"])
        if not list(Path(folder).glob("*.safetensors")):
            folder = snapshot_download(**wanted)  # with its pytorch_model.bin
    return folder


def prepare(accelerator: Accelerator, model, args):
    """Return the model and its AdamW optimiser (the paper's eps), wrapped as the launcher asked for."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, eps=1e-5, weight_decay=0.01, fused=True)
    if accelerator.state.deepspeed_plugin:  # DeepSpeed has other defaults for these
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        config["train_micro_batch_size_per_gpu"] = args.micro_batch_size
        config["gradient_clipping"] = args.max_grad_norm
        config["gradient_accumulation_steps"] = 1
        config["zero_force_ds_cpu_optimizer"] = False  # when offloaded, use torch's AdamW
        config["data_types"] = {"grad_accum_dtype": "fp32"}  # not in bfloat16
    return accelerator.prepare(model, optimizer)


def optimizer_step(accelerator: Accelerator, model, optimizer, max_grad_norm: float, where: str) -> float:
    """Take one step with the accumulated gradients and return their norm before clipping, which must be finite."""
    norm = float(accelerator.clip_grad_norm_(model.parameters(), max_grad_norm or inf))  # inf: only measure
    if not norm < inf:  # also true for nan
        fail(f"{where}: the gradient norm is {norm}; this update was not saved. Try a lower --learning-rate")
    optimizer.step()  # does nothing under DeepSpeed, whose last backward pass has already taken the step
    optimizer.zero_grad()
    return norm


@contextmanager
def writing(accelerator: Accelerator, path: Path):
    """Yield a temporary path for the new content of `path` (file or folder) and rename it into place when it is on the
    disk, so that `path` is always complete or absent. All processes call it, because each may write a part."""
    partial = path.with_suffix(".tmp")
    with or_fail(f"{path} could not be written: make room, then continue with --resume"):
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            umask = os.umask(0)  # safetensors writes files that only the owner can read
            os.umask(umask)
            for file in partial.rglob("*"):
                file.chmod((0o777 if file.is_dir() else 0o666) & ~umask)
            os.sync()
            shutil.rmtree(path, ignore_errors=True)  # a file is replaced, a folder has to go first
            os.replace(partial, path)
        accelerator.wait_for_everyone()


def start_or_resume(accelerator: Accelerator, args, inputs: dict) -> int:
    """Start a run or, with --resume, continue it from its newest checkpoint. Returns the number of finished updates.
    --resume compares the content of `inputs`, a dict from flags to checkpoint folders and train splits."""
    folder = Path(args.output_dir)
    settings = {"stage": STAGE, "processes": accelerator.num_processes, "wandb_id": os.urandom(8).hex()} | asdict(args)
    settings |= {f"{key} digest": content_digest(source) for key, source in inputs.items()}
    settings = {key: str(value) if value == inf else value for key, value in settings.items()}  # JSON has no inf
    if (folder / "args.json").exists():
        old = json.loads((folder / "args.json").read_text())
        if old["output_dir"] == args.output_dir:  # a copy of a run gets a page of its own
            settings["wandb_id"] = old["wandb_id"]
        for key in [key for key in settings if old.get(key) != settings[key]]:
            change = f"--resume {folder}: --{key.replace('_', '-')} {old.get(key, 'unknown')} -> {settings[key]}"
            if key in old and key not in MAY_CHANGE | {"wandb_id"}:
                fail(f"{change} would change the run")
            accelerator.print(change)
    finished = 0
    metrics = ""
    newest = max(folder.glob("checkpoints/update_??????"), default=None)
    if len(set(gather_object([str(newest)]))) > 1:
        fail(f"--resume {folder}: the processes see {gather_object([str(newest)])}. They need one shared disk")
    for torn in folder.glob("checkpoints/*.tmp"):  # of a run that was killed
        shutil.rmtree(torn, ignore_errors=True)  # harmless if several processes try
    if newest:
        with or_fail(f"--resume: {newest} cannot be loaded. Launch the run as before, or delete that checkpoint"):
            metrics = (newest / "metrics.jsonl").read_text()
            accelerator.load_state(str(newest))
        finished = int(newest.name.removeprefix("update_"))
    if args.resume:
        accelerator.print(f"--resume: {folder} continues after update {finished}")

    if args.track:  # made here, because init_trackers would use TensorBoard's folder name as W&B's project
        run = {"name": "__".join(folder.parts[-3:]), "id": settings["wandb_id"], "resume": "allow", "dir": folder}
        accelerator.log_with.append(WandBTracker(None, config=asdict(args), **run))  # None: WANDB_PROJECT
    tensorboard = {"purge_step": finished + 1 if finished else 0}  # drops what a killed run logged later
    with or_fail("the trackers could not start (with WANDB_MODE=offline, W&B only writes to the run folder)"):
        accelerator.init_trackers("tensorboard", init_kwargs={"tensorboard": tensorboard})
    for name, content in {"args.json": json.dumps(settings, indent=2) + "\n", "metrics.jsonl": metrics}.items():
        with writing(accelerator, folder / name) as partial:
            if accelerator.is_main_process:
                partial.write_text(content)
    return finished


def content_digest(source: str | Dataset) -> str:
    """Return a hash of a checkpoint folder's config and weights, or of a train split: 1,024 pieces of each file."""
    if isinstance(source, Dataset):
        files = [Path(file["filename"]) for file in source.cache_files]
    else:
        folder = Path(source)
        weights = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
        files = [folder / "config.json", *weights]
    content = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        with path.open("rb") as file:
            for start in range(0, size, size // 1024 + 1):
                file.seek(start)
                content.update(file.read(4096))
    return content.hexdigest()[:16]


def updates(accelerator: Accelerator, args, finished: int, last: int):
    """Yield the updates finished + 1 to last under a progress bar, and write a checkpoint after each one where it is
    due. After SIGTERM or SIGUSR1, which schedulers send as a notice, write one and end the run with exit code 75. After
    Ctrl-C, write one and end the run as Ctrl-C does; a second Ctrl-C ends it at once."""
    folder = Path(args.output_dir)
    caught = []

    def note(received, _):  # the update finishes first
        caught.append(received)
        if received == signal.SIGINT:
            os.write(1, b"Ctrl-C: saving a checkpoint after this update; press again to end at once\n")  # not print
            signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    start = time.time()
    for update in track(range(finished + 1, last + 1), STAGE, disable=not accelerator.is_main_process):
        yield update
        if update == finished + 1 and not args.save_every:
            note_missing_checkpoints(accelerator, (time.time() - start) * (last - finished))
        stop = gather_object(caught)  # by any process
        if stop or (args.save_every and update % args.save_every == 0):
            with writing(accelerator, folder / "checkpoints" / f"update_{update:06d}") as partial:
                accelerator.save_state(str(partial))
                if accelerator.is_main_process:
                    shutil.copy(folder / "metrics.jsonl", partial)
            for old in sorted(folder.glob("checkpoints/update_??????"))[:-2]:
                shutil.rmtree(old, ignore_errors=True)  # harmless if several processes try
        if stop:
            accelerator.print(f"stopped by a signal after update {update}; continue {folder} with --resume")
            accelerator.end_training()
            sys.tracebacklimit = 0
            raise KeyboardInterrupt if signal.SIGINT in stop else SystemExit(75)  # a shell's loop ends with Ctrl-C, too
    for number, handler in before.items():  # from here on, a signal ends the run at once
        signal.signal(number, handler or signal.SIG_DFL)


def note_missing_checkpoints(accelerator: Accelerator, seconds: float):
    """Say what a run of about this many seconds risks without --save-every, unless it takes less than ten minutes."""
    if seconds >= 600:
        lost = f"no checkpoints: a run that dies loses up to about {seconds / 3600:.1f} hours"
        size = checkpoint_bytes(accelerator) / 1e9
        accelerator.print(f"{lost}; --save-every K keeps two and writes a third ({size:.2g} GB each)", flush=True)


def checkpoint_bytes(accelerator: Accelerator) -> int:
    """Return the size of a checkpoint: float32 weights, and two moments of Adam for those that are trained. DeepSpeed
    adds the weights in bfloat16."""
    weight = 6 if accelerator.state.deepspeed_plugin else 4
    parameters = [parameter for model in accelerator._models for parameter in model.parameters()]
    return sum(parameter.numel() * (weight + 8 * parameter.requires_grad) for parameter in parameters)


def save_model(accelerator: Accelerator, args, name: str, model, tokenizer):
    """Write a model's weights and its tokenizer into the run folder as a transformers checkpoint."""
    with writing(accelerator, Path(args.output_dir, name)) as partial:
        if accelerator.is_main_process:  # every process has all weights, under ZeRO-2 as well
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            add_old_names(partial)


def add_old_names(folder: Path):
    """Add what transformers 4 reads to a saved model: old names of rotary settings and of the tokenizer's class."""
    config = json.loads((folder / "config.json").read_text())
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)  # some models have one per type of layer
    if "rope_theta" in rope:
        scaling = None if rope["rope_type"] == "default" else {**rope}
        config |= {"rope_theta": rope["rope_theta"], "rotary_emb_base": rope["rope_theta"], "rope_scaling": scaling}
        if "partial_rotary_factor" in rope:
            config["partial_rotary_factor"] = config["rotary_pct"] = rope["partial_rotary_factor"]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    text = (folder / "tokenizer_config.json").read_text()
    (folder / "tokenizer_config.json").write_text(text.replace("TokenizersBackend", "PreTrainedTokenizerFast"))


def write_metrics(accelerator: Accelerator, args, metrics: dict, update: int, last: int):
    """Append a line to metrics.jsonl and log it to the trackers. Print its first five numbers every 5 % of a run."""
    metrics = {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in metrics.items()}
    if accelerator.is_main_process:
        with or_fail("metrics.jsonl could not be written"), Path(args.output_dir, "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"update": update, **metrics}) + "\n")
    accelerator.log(metrics, step=update)
    if update % ceil(last / 20) == 0 or update == last:
        numbers = [f" {key} {metrics[key]:.4g}" for key in list(metrics)[:5]]
        accelerator.print(f"{STAGE}: update {update} of {last}", *numbers)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # print ? where the terminal cannot show a character
    main(tyro.cli(Args))
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":  # its threads can crash a normal exit
        os._exit(0)  # everything has been written
