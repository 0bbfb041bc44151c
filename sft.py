"""Supervised fine-tuning on the TL;DR reference summaries: the first stage of "The N+ Implementation Details of RLHF
with PPO" (section 5, Detail 9, table 3).

One process, after `bash quickstart/run.sh --fast`:

    python sft.py --model quickstart/bases/nano-xs --dataset data/quickstart/posts-1-fast/tldr/sft \
        --batch-size 32 --learning-rate 1e-3

N processes:    torchrun --nproc_per_node 8 sft.py --model 1b --seed 44413
Paper scale:    accelerate launch --config_file benchmark/accelerate/zero2.yaml sft.py --model 6.9b --seed 44413
Samples, ROUGE: python eval/samples.py runs/sft/nano-xs/44413

The run folder (default runs/sft/{model}/{seed}) holds model/ (a plain transformers checkpoint), metrics.jsonl,
args.json, TensorBoard files and, with --save-every, checkpoints/. The file starts with the algorithm: arguments, loss
and main. Helpers follow, and plumbing comes last. Shapes: b is the number of rows in a function's input, T the width of
the tokens and V the vocabulary size.

The script deviates from the authors' code on purpose in two points (docs/details.md lists the paper's Details):
- The loss is a mean over the target tokens of the whole batch, however devices share it. The authors' released runs had
  one row per micro-batch, so their loss is a mean of row means. The two gradients have a cosine of 0.9995.
- The rows left over after the last whole batch are not trained on (116,722 = 911 x 128 + 114).
"""

import fcntl
import hashlib
import json
import logging
import os
import shlex
import shutil
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from math import cos, pi
from pathlib import Path
from typing import Literal

import pyarrow.compute as pc
import torch
import torch.nn.functional as F
import tyro
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.tracking import WandBTracker
from accelerate.utils import gather_object, set_seed
from datasets import DatasetDict, load_dataset, load_from_disk
from huggingface_hub import snapshot_download
from rich.console import Console
from rich.progress import track
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

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
    """autocast type, while weights stay in float32; default: bf16 on a GPU (Detail 8), none on a CPU"""
    save_every: int = 0
    """write a checkpoint for --resume every so many updates; 0: never"""
    resume: bool = False
    """continue the run in --output-dir from its newest checkpoint"""
    track: bool = False
    """also log to Weights & Biases (set WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE in the environment)"""


# ==== the algorithm ===============================================================================


def sft_loss(logits: torch.Tensor, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the sum of -log p(token | previous tokens) over the tokens marked in `target`. logits (b, T, V), tokens
    (b, T), target (b, T) bool. A row's first token has no previous tokens and never counts."""
    labels = F.pad(tokens.masked_fill(~target, -100)[:, 1:], (0, 1), value=-100)  # logits[:, :-1] would copy
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def target_mask(batch: dict, loss_on: str, pad_id: int) -> torch.Tensor:
    """Return which tokens count in the loss, (b, T) bool. Padding never counts, EOS does (Detail 3)."""
    if loss_on == "response":
        return batch["query_reference_response_token_response_label"] != pad_id
    return batch["query_reference_response_token"] != pad_id


def loss_and_count(model, mb: dict, loss_on: str, pad_id: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss and the number of target tokens of a micro-batch, trimmed to its longest row."""
    tokens = mb["query_reference_response_token"]
    tokens = tokens[:, : trimmed_width(tokens, pad_id)].to(device)  # (b, T)
    target = target_mask(mb, loss_on, pad_id)[:, : tokens.shape[1]].to(device)
    logits = model(tokens, use_cache=False).logits  # right-padded rows need no mask
    return sft_loss(logits, tokens, target), target[:, 1:].sum()


def data_order(n: int, seed: int, start: int, stop: int) -> torch.Tensor:
    """Return the row indices (stop - start,) at positions start..stop-1 of an endless stream over n rows, reshuffled
    without replacement on each pass (Detail 21). They depend only on (seed, position), so all processes agree."""
    passes = []
    for epoch in range(start // n, (stop - 1) // n + 1):
        shuffled = permutation(n, seed, epoch)
        passes.append(shuffled[max(start - epoch * n, 0) : stop - epoch * n])
    return torch.cat(passes)


def permutation(n: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the numbers 0..n-1 in a random order (n,) that depends only on seed and epoch."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(n, generator=generator)


# ==== main ========================================================================================


def main(args: Args):
    # ---- data and model --------------------------------------------------------------------------
    check_args(args)
    accelerator = make_accelerator(args)
    device = accelerator.device
    world = accelerator.num_processes
    args.micro_batch_size = args.micro_batch_size or MICRO_BATCH_SIZES.get(args.model, 8)
    preset = f"EleutherAI/pythia-{args.model}-deduped"
    base_folder = checkpoint_folder("--model", preset if args.model in MICRO_BATCH_SIZES else args.model)
    tokenizer = load_tokenizer(base_folder)
    pad_id = tokenizer.pad_token_id
    data = load_splits("--dataset", args.dataset, ["query", "query_token", *TOKEN_COLUMNS], tokenizer)
    train = data["train"].select_columns(TOKEN_COLUMNS)
    if args.total_episodes is None:
        args.total_episodes = int(args.num_train_epochs * len(train))
    num_updates = args.total_episodes // args.batch_size
    if num_updates == 0 or args.batch_size % world:
        fail(
            f"--batch-size {args.batch_size} must be at most the {args.total_episodes} rows to train on, and a "
            f"multiple of the {world} processes"
        )
    policy = load_policy(base_folder, tokenizer)
    for rows in (train, data["validation"]):
        check_positions(policy, base_folder, len(rows[0]["query_reference_response_token"]))
    model, optimizer = prepare(accelerator, policy, args)
    # register state of your own here: accelerator.register_for_checkpointing(it). --resume restores its tensors on the
    # CPU, so move them to the device yourself.
    finished_updates = begin_run(accelerator, args)
    if finished_updates == 0:
        loss = validation_loss(accelerator, policy, data["validation"], args, pad_id)
        write_metrics(accelerator, args, {"eval/loss": loss}, 0, num_updates)

    run_start = time.time()
    for update in updates(accelerator, args, finished_updates, num_updates):
        # ---- 1. the batch, each process its share ------------------------------------------------
        update_start = time.time()
        order = data_order(len(train), args.seed, (update - 1) * args.batch_size, update * args.batch_size)
        batch = train[order.chunk(world)[accelerator.process_index].tolist()]
        lengths = (batch["query_reference_response_token"] != pad_id).sum(1)  # (b,)
        # the loss of the whole batch is a sum over its targets divided by their global number
        target_count = target_mask(batch, args.loss_on, pad_id)[:, 1:].sum().to(device)
        target_count = accelerator.reduce(target_count, "sum")

        # ---- 2. one optimiser step ---------------------------------------------------------------
        learning_rate = args.learning_rate * 0.5 * (1 + cos(pi * (update - 1) / num_updates))  # cosine to 0 (table 3)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        loss_sum = torch.zeros((), device=device)
        groups = similar_lengths(lengths, args.micro_batch_size)
        for index in groups:
            mb = {column: batch[column][index] for column in TOKEN_COLUMNS}
            last = index is groups[-1]  # gradients are exchanged between devices with the last micro-batch
            accelerator.sync_gradients = last  # for DeepSpeed
            model.require_backward_grad_sync = last  # for DDP
            mb_sum, _ = loss_and_count(model, mb, args.loss_on, pad_id, device)
            accelerator.backward(mb_sum * world / target_count)  # x world: DDP and DeepSpeed average over devices
            loss_sum += mb_sum.detach()
        grad_norm = optimizer_step(accelerator, model, optimizer, args.max_grad_norm, f"update {update}")

        # ---- 3. log ------------------------------------------------------------------------------
        metrics = {
            "loss/train": accelerator.reduce(loss_sum, "sum") / target_count,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "episode": update * args.batch_size,
            "tokens/batch": accelerator.reduce(lengths.sum().to(device), "sum"),
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


# ==== padding =====================================================================================


def trimmed_width(tokens: torch.Tensor, pad_id: int) -> int:
    """Return the width to which rows (b, T) can be trimmed: the longest row, rounded up to a multiple of 16, at most T.
    Rounding keeps the number of different shapes small, because each new shape costs memory and, on a GPU, time."""
    longest = int((tokens != pad_id).sum(1).max())
    return min(-(-longest // 16) * 16, tokens.shape[1])


def similar_lengths(lengths: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Return row indices in groups of `size` rows of similar length, which saves padding. lengths: (b,)."""
    order = lengths.argsort(descending=True, stable=True)
    return list(order.split(size))


# ==== models ======================================================================================


def load_policy(path: str, tokenizer):
    """Return a causal language model in float32, without dropout, with an embedding for every id of the tokenizer. Its
    generation config is what transformers' generate() needs to sample as ppo.py does."""
    with or_fail(f"the model in {path} cannot be read"):
        config = without_dropout(AutoConfig.from_pretrained(path, trust_remote_code=False))
        settings = {"dtype": torch.float32, "trust_remote_code": False}
        model = AutoModelForCausalLM.from_pretrained(path, config=config, **settings)
    check_layers(model, path)
    check_head(model, path)
    fit_tokenizer(model, tokenizer, path)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    never = [tokenizer.pad_token_id, *range(len(tokenizer), model.get_input_embeddings().num_embeddings)]
    model.generation_config = GenerationConfig(**ids, suppress_tokens=never)
    return model


def fit_tokenizer(model, tokenizer, path: str):
    """Give a model an embedding for every id of the tokenizer, and its config the tokenizer's EOS and [PAD]."""
    rows = model.get_input_embeddings().num_embeddings
    if rows < len(tokenizer) - 1:
        fail(f"{path}: {rows} embeddings, but the tokenizer has {len(tokenizer) - 1} ids. Use its own tokenizer")
    model.resize_token_embeddings(max(rows, len(tokenizer)), mean_resizing=False)
    model.config.eos_token_id = tokenizer.eos_token_id
    model.config.pad_token_id = tokenizer.pad_token_id  # after resizing: some models check that the id has a row


def check_layers(model, path: str):
    """End with an error if a model has layers that cannot be trained or sampled from here."""
    name = type(model).__name__
    if model.config._attn_implementation != "sdpa":
        fail(f"{path}: {name} has no scaled dot-product attention in transformers. Choose another model")
    other = set(getattr(model.config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if other:
        fail(f"{path}: {name} has {', '.join(sorted(other))} layers; only full and sliding attention are supported")


@torch.no_grad()
def check_head(model, path: str):
    """End with an error if a model scales or caps the logits of its head, because we use the head alone."""
    tokens = torch.arange(4)[None]
    logits = model.get_output_embeddings()(model.base_model(tokens).last_hidden_state)
    if not torch.allclose(logits, model(tokens).logits, atol=1e-4):
        fail(f"{path}: {type(model).__name__} scales or caps the logits of its head. Choose another model")


def check_positions(model, path: str, width: int):
    """End with an error if a model has fewer positions than the rows of the data are wide."""
    positions = getattr(model.config, "max_position_embeddings", None) or width  # some models have no limit
    if width > positions:
        name = type(model).__name__
        fail(f"{path}: rows need {width} positions, but {name} has {positions}. Make the data with shorter queries")


def without_dropout(config):
    """Return the config with every dropout at 0 (Detail 7), even attention dropout, which is not an nn.Dropout."""
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, int | float):
            setattr(config, key, 0.0)
    return config


# ==== evaluation ==================================================================================


@torch.no_grad()
def validation_loss(accelerator: Accelerator, model, data, args, pad_id: int) -> float:
    """Return the mean loss per target token of a whole split, in nats."""
    sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    share = data.shard(accelerator.num_processes, accelerator.process_index, contiguous=False)
    for start in progress(accelerator, range(0, len(share), args.micro_batch_size), "validation loss"):
        batch = share[start : start + args.micro_batch_size]
        sums += torch.stack(loss_and_count(model, batch, args.loss_on, pad_id, accelerator.device))
    loss_sum, count = accelerator.reduce(sums, "sum").tolist()
    return loss_sum / count


# ==== plumbing: identical in every stage script; read it once, then skip it =======================
# Launch, loading, run folder, checkpoints, trackers, optimiser. Nothing here changes a loss or a sample.

# Settings that --resume may change, because they affect memory, speed, evaluation, logging and saving only.
MAY_CHANGE = {"micro_batch_size", "forward_batch_size", "sample_batch_size", "mixed_precision", "offload", "processes"}
MAY_CHANGE |= {"eval_every", "eval_rows", "run_eval", "sample_every", "track", "save_every", "resume", "output_dir"}
MAY_CHANGE |= {"dataset", "preference_dataset"}  # their rows are compared; of a model only its config and sizes
CONTENTS = {}  # digests of the models and data sets that a run starts from, for --resume
POSITIVE = {"batch_size", "micro_batch_size", "forward_batch_size", "sample_batch_size", "num_mini_batches"}
POSITIVE |= {"num_ppo_epochs", "response_length", "temperature", "beta", "eval_rows"}
NOT_NEGATIVE = {"seed", "total_episodes", "num_train_epochs", "learning_rate", "max_grad_norm", "kl_coef", "vf_coef"}
NOT_NEGATIVE |= {"cliprange", "cliprange_value", "gamma", "lam", "label_smoothing"}
NOT_NEGATIVE |= {"eval_every", "save_every", "sample_every"}
LARGEST = {"seed": 2**32 - 1, "gamma": 1, "lam": 1, "label_smoothing": 1}
ADAM_EPS = 1e-5  # the paper's tables
WEIGHT_DECAY = 0.01  # torch's default for AdamW, as in the authors' code


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
    name = Path(os.path.abspath(args.model)).name.partition("@")[0]
    for key, value in vars(args).items():
        flag = f"--{key.replace('_', '-')} {value}"
        largest = LARGEST.get(key, float("inf"))
        if key in POSITIVE and value is not None and not value > 0:
            fail(f"{flag} must be above 0")
        if key in NOT_NEGATIVE and value is not None and not 0 <= value <= largest:
            fail(f"{flag} must be between 0 and {largest}")
        if isinstance(value, str):
            value = value.replace("{model}", name).replace("{seed}", str(args.seed))
            setattr(args, key, os.path.expanduser(value))
    folder = Path(args.output_dir)
    if args.resume and (folder / "model").exists():  # a run writes this last
        print(f"--resume: the run in {folder} has ended, so there is nothing left to do", flush=True)
        raise SystemExit(0)
    if not args.resume and any((folder / name).exists() for name in ("args.json", "checkpoints", "model")):
        fail(f"{folder} already holds a run: choose another --output-dir, delete it, or continue it with --resume")


def make_accelerator(args) -> Accelerator:
    """Return the Accelerator that the launcher asked for. Ends with an error if accelerate started something else."""
    CONTENTS.clear()  # another run in this process may have filled it
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # against memory fragmentation
    os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "1"  # otherwise accelerate divides the loss by it
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every shape, and has given NaN under a mask
    transformers_logging.set_verbosity_error()  # its warnings are about intended things, such as a new head
    transformers_logging.disable_progress_bar()
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)  # it warns that tied weights are saved once
    set_seed(args.seed)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    on_cpu = not torch.accelerator.is_available()
    settings = {"mixed_precision": args.mixed_precision or ("bf16" if torch.cuda.is_available() else "no")}
    if world > 1:
        process_group = InitProcessGroupKwargs(timeout=timedelta(hours=2))  # writing a large checkpoint takes long
        if on_cpu and deepspeed:
            process_group.backend = "gloo"
        settings |= {"kwargs_handlers": [process_group], "cpu": on_cpu and not deepspeed}  # it must be told to use CPUs
    accelerator = Accelerator(log_with="tensorboard", project_dir=args.output_dir, **settings)
    if accelerator.num_processes != world or bool(accelerator.state.deepspeed_plugin) != deepspeed:
        fail(f"accelerate did not start {world} processes, DeepSpeed {deepspeed}: use one of benchmark/accelerate/")
    return accelerator


def checkpoint_folder(flag: str, path: str) -> str:
    """Return the local folder of a checkpoint given as a run folder, checkpoint folder or Hub id[@revision]."""
    folder = Path(path, "model") if Path(path, "model/config.json").exists() else Path(path)
    if not (folder / "config.json").exists():
        name, _, revision = path.partition("@")
        wanted = {"repo_id": name, "revision": revision or None, "ignore_patterns": "*/*"}  # skips PPO's value_model/
        with or_fail(f"{flag} {path}: no checkpoint there, in its model/ or on the Hub. Run the earlier stage first"):
            folder = Path(snapshot_download(**wanted, allow_patterns=["*.json", "*.safetensors", "*.txt"]))
            if not list(folder.glob("*.safetensors")):
                folder = Path(snapshot_download(**wanted))  # there may be a pytorch_model.bin instead
    weights = [(file.name, file.stat().st_size) for file in sorted(folder.glob("*model*"))]
    content = f"{(folder / 'config.json').read_text()}{weights}".encode()
    key = f"the content of {flag}"
    CONTENTS[key] = CONTENTS.get(key, "") + hashlib.sha256(content).hexdigest()[:16]
    return str(folder)


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
    split or column is missing, or rows are ragged or were made with another tokenizer (looks at 16 of each split)."""
    name, _, revision = path.partition("@")
    with or_fail(f"{flag} {path}: no data set with train, validation and the columns {columns}; see tldr_dataset.py"):
        data = load_from_disk(path) if Path(path).exists() else load_dataset(name, revision=revision or None)
        for split in ("train", "validation", *data):
            data[split].select_columns(columns)[0]
    keys = [column for column in columns if "_token" in column]
    content = hashlib.sha256(str(data.num_rows).encode())
    for split, rows in data.items():
        largest = 0
        for key in keys:
            column = rows.data.column(key)
            if len(pc.unique(pc.list_value_length(column))) != 1:
                fail(f"{flag} {path}: {split}: the rows of {key} differ in width. Pad them, as tldr_dataset.py does")
            for tokens in pc.list_flatten(column).chunks:
                largest = max(largest, pc.max(tokens).as_py())
                content.update(tokens.to_numpy())
        looked_at = rows.select(range(0, len(rows), -(-len(rows) // 16)))
        same = sum(is_of_tokenizer(row, keys, tokenizer) for row in looked_at)
        if 2 * same <= len(looked_at) or largest >= len(tokenizer):
            found = f"{same} of {len(looked_at)} rows match the model's tokenizer; largest id {largest}"
            fail(f"{flag} {path}: {split}: {found}. Make it with tldr_dataset.py; eval/check_data.py shows the rows")
    CONTENTS[f"the content of {flag}"] = content.hexdigest()[:16]
    return data.with_format("torch")


def is_of_tokenizer(row: dict, keys: list[str], tokenizer) -> bool:
    """Return whether this tokenizer made a row: its query tokens match its text, and its other columns end in EOS."""
    tokens = {key: [token for token in row[key] if token != tokenizer.pad_token_id] for key in keys}
    query = tokens.pop("query_token", None)
    if query is not None and query != tokenizer(row["query"], add_special_tokens=False).input_ids:
        return False
    return all(ids[-1:] == [tokenizer.eos_token_id] for ids in tokens.values())


@contextmanager
def writing(accelerator: Accelerator, path: Path):
    """Yield a temporary path for the new content of `path` (file or folder), sync it to disk and rename it into place,
    so that `path` is always complete or absent. All processes call it."""
    partial = path.with_suffix(".tmp")
    with or_fail(f"{path} could not be written: make room, then continue with --resume"):
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)  # a killed run may have left one
        accelerator.wait_for_everyone()
        yield partial
        accelerator.wait_for_everyone()  # each process writes its part
        if accelerator.is_main_process:
            os.sync()
            shutil.rmtree(path, ignore_errors=True)
            os.replace(partial, path)
        accelerator.wait_for_everyone()


def begin_run(accelerator: Accelerator, args) -> int:
    """Make the run folder or, with --resume, load its newest checkpoint, and start the trackers. Returns the number of
    finished updates. Call it right before training, so that a wrong command leaves nothing behind."""
    folder = Path(args.output_dir)
    if accelerator.is_main_process:
        lock(folder)
    accelerator.wait_for_everyone()
    check_args(args)  # again, because another run may have been here since
    settings = {"stage": STAGE, "processes": accelerator.num_processes} | asdict(args) | CONTENTS
    settings["wandb_id"] = os.urandom(8).hex()
    if (folder / "args.json").exists():
        old = json.loads((folder / "args.json").read_text())
        settings["wandb_id"] = old.get("wandb_id", settings["wandb_id"])
        check_settings(accelerator, folder, old, settings)
    finished, metrics = load_newest(accelerator, folder)
    if args.resume and not finished:
        accelerator.print(f"--resume: {folder} has no checkpoint, so the run starts anew")
    if args.track:  # accelerate's own tracker would override WANDB_PROJECT
        run = {"name": "__".join(folder.parts[-3:]), "id": settings["wandb_id"], "resume": "allow"}
        accelerator.log_with.append(WandBTracker(None, config=asdict(args), dir=args.output_dir, **run))
    tensorboard = {"purge_step": finished + 1 if finished else 0}  # a resumed run continues its curves
    with or_fail("the trackers could not start (with WANDB_MODE=offline, W&B only writes to the run folder)"):
        accelerator.init_trackers("tensorboard", init_kwargs={"tensorboard": tensorboard})
    settings["command"] = shlex.join(["python", *sys.argv])
    with writing(accelerator, folder / "args.json") as partial:
        if accelerator.is_main_process:
            partial.write_text(json.dumps(settings, indent=2) + "\n")
    with writing(accelerator, folder / "metrics.jsonl") as partial:
        if accelerator.is_main_process:
            partial.write_text(metrics)
    return finished


def lock(folder: Path):
    """Lock the run folder for this process, so that no other run writes there. The kernel frees the lock when the
    process ends, however it ends. Waits up to two minutes, because a requeued job may meet the old one still ending."""
    with or_fail(f"{folder} cannot be made"):
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR)  # stays open: closing it would free the lock
    for _ in range(120):
        try:
            return fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # another process holds it
            time.sleep(1)
        except OSError as error:
            return print(f"{folder} is on a file system without locks ({error}): start no second run there", flush=True)
    fail(f"{folder}: another run still writes there. Wait until it has ended, or choose another --output-dir")


def check_settings(accelerator: Accelerator, folder: Path, old: dict, settings: dict):
    """Print what --resume changes. Ends with an error if a change would affect the training (see MAY_CHANGE)."""
    changed = {}
    for key, value in settings.items():
        if old.get(key, value) != value:
            name = key if key in CONTENTS else f"--{key.replace('_', '-')}"
            changed[key] = f"{name} {old[key]} -> {value}"
    refused = [change for key, change in changed.items() if key not in MAY_CHANGE]
    if refused:
        fail(
            f"--resume {folder}: {', '.join(refused)} would change the run. Undo it, or use another --output-dir. "
            f"If a model has only moved, write its new path into {folder}/args.json"
        )
    accelerator.print(f"--resume {folder}, changed: {', '.join(changed.values()) or 'nothing'}")


def load_newest(accelerator: Accelerator, folder: Path) -> tuple[int, str]:
    """Load the newest checkpoint and return its update and its metrics.jsonl, or 0 and "" if there is none."""
    checkpoints = sorted(folder.glob("checkpoints/update_??????"))
    if not checkpoints:
        return 0, ""
    with or_fail(f"--resume: {checkpoints[-1]} cannot be loaded. Launch the run as before, or delete that checkpoint"):
        metrics = (checkpoints[-1] / "metrics.jsonl").read_text()
        accelerator.load_state(str(checkpoints[-1]))
    accelerator.print(f"--resume: {checkpoints[-1]} is loaded")
    return int(checkpoints[-1].name.removeprefix("update_")), metrics


def updates(accelerator: Accelerator, args, first: int, last: int):
    """Yield the updates first + 1 to last under a progress bar, and write a checkpoint after each update where one is
    due. After SIGTERM or SIGUSR1, which schedulers send as a notice, write one and end the run with exit code 75."""
    folder = Path(args.output_dir)
    caught = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: caught.append(number))  # only noted: the run ends after the update
    for update in progress(accelerator, range(first + 1, last + 1), STAGE):
        yield update
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
            raise SystemExit(75)


def progress(accelerator: Accelerator, items, description: str):
    """Return `items` to iterate over under a progress bar, shown by the main process."""
    return track(items, description, console=Console(stderr=True), disable=not accelerator.is_main_process)


def write_metrics(accelerator: Accelerator, args, metrics: dict, update: int, last: int):
    """Append a line to metrics.jsonl and log it to the trackers. Print its first five numbers 20 times per run."""
    metrics = {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in metrics.items()}
    line = json.dumps({"update": update, **metrics})
    if accelerator.is_main_process:
        with or_fail("metrics.jsonl could not be written"), Path(args.output_dir, "metrics.jsonl").open("a") as file:
            file.write(line + "\n")
    accelerator.log(metrics, step=update)
    if update % max(1, last // 20) == 0:
        numbers = [f" {key} {metrics[key]:.4g}" for key in list(metrics)[:5]]
        accelerator.print(f"{STAGE}: update {update} of {last}", *numbers)


def save_model(accelerator: Accelerator, args, name: str, model, tokenizer):
    """Write a model's weights and its tokenizer into the run folder as a transformers checkpoint."""
    with writing(accelerator, Path(args.output_dir, name)) as partial:
        if accelerator.is_main_process:  # every process has all weights, under ZeRO-2 as well
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)


def prepare(accelerator: Accelerator, model, args):
    """Return the model and its AdamW optimiser, wrapped as the launcher asked for (plain, DDP or DeepSpeed)."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    settings = {"lr": args.learning_rate, "eps": ADAM_EPS, "weight_decay": WEIGHT_DECAY}
    optimizer = torch.optim.AdamW(parameters, **settings, fused=True)
    if accelerator.state.deepspeed_plugin:  # DeepSpeed has other defaults for these
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        config["train_micro_batch_size_per_gpu"] = args.micro_batch_size
        config["gradient_clipping"] = args.max_grad_norm
        config["gradient_accumulation_steps"] = 1
        config["zero_force_ds_cpu_optimizer"] = False  # when offloaded, use torch's AdamW
        config["data_types"] = {"grad_accum_dtype": "fp32"}  # otherwise gradients are summed in bfloat16
        if config["zero_optimization"]["stage"] == 3:
            fail("ZeRO-3 is not supported; use benchmark/accelerate/zero2_offload.yaml, which fits every size")
    return accelerator.prepare(model, optimizer)


def optimizer_step(accelerator: Accelerator, model, optimizer, max_grad_norm: float, where: str) -> float:
    """Take one step with the accumulated gradients and return their norm before clipping, which must be finite."""
    norm = float(accelerator.clip_grad_norm_(model.parameters(), max_grad_norm or float("inf")))
    if not norm < float("inf"):  # also true for nan
        fail(f"{where}: the gradient norm is {norm}; this update was not saved. Try a lower --learning-rate")
    optimizer.step()
    optimizer.zero_grad()
    return norm


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # print ? where the terminal cannot show a character
    try:
        main(tyro.cli(Args))
    except KeyboardInterrupt:
        fail("stopped by Ctrl-C")
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":  # its threads can crash a normal exit
        os._exit(0)  # everything has been written
