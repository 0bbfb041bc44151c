"""Supervised fine-tuning on the TL;DR reference summaries: the first stage of "The N+ Implementation Details of RLHF
with PPO" (section 5, Detail 9, table 3).

One process:    python sft.py --model data/nano-xs --batch-size 32 --learning-rate 5e-3
N processes:    torchrun --nproc_per_node 8 sft.py --model 1b --seed 44413
Paper scale:    accelerate launch --config_file benchmark/accelerate/zero2.yaml sft.py --model 6.9b --seed 44413
Samples, ROUGE: python eval/samples.py runs/sft/nano-xs/44413

The run folder (default runs/sft/{model}/{seed}) holds model/ (a plain transformers checkpoint), metrics.jsonl,
args.json, TensorBoard files and, with --save-every, checkpoints/. The file goes from the algorithm outwards: arguments,
loss, main, evaluation, padding, models, plumbing.

Deviations from the paper and its code, each on purpose:
- the loss is a mean over the target tokens of the whole batch, whatever devices share it; the released runs had one row
  a micro-batch, so a mean of row means (cosine of the two gradients: 0.9995).
- the rows left over after the last whole batch are not trained on (116,722 = 911 x 128 + 114); the count is logged.
"""

import json
import os
import shlex
import shutil
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
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
from rich.progress import Progress, TextColumn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

STAGE = "sft"
PRESETS = {"1b": 16, "2.8b": 8, "6.9b": 2}  # Pythia's sizes: rows of a micro-batch that fit one 80 GB device
DATASET = "vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144"
TOKEN_COLUMNS = ["query_reference_response_token", "query_reference_response_token_response_label"]


@dataclass
class Args:
    model: str = "1b"
    """base model: 1b, 2.8b, 6.9b (Pythia deduped), a Hub id (`id@revision` allowed) or a local folder"""
    seed: int = 44413
    """seed of the data order (paper: 44413, 55513, 66613, 77713)"""
    dataset: str = "data/tldr/sft" if Path("data/tldr/sft").exists() else DATASET
    """pre-tokenised SFT data: folder of one DatasetDict or Hub id[@revision]"""
    output_dir: str = "runs/sft/{model}/{seed}"
    """run folder"""

    loss_on: Literal["query_response", "response"] = "query_response"
    """tokens in the loss: query and response without padding (the paper's code), or the response alone"""
    num_train_epochs: float = 1
    """passes over the train split (table 3)"""
    total_episodes: int | None = None
    """rows to train on; default num_train_epochs passes (table 3: 116,722)"""
    batch_size: int = 128
    """rows per optimiser step over all devices (table 3)"""
    learning_rate: float = 3e-6
    """peak learning rate, cosine to 0 over the run (table 3)"""
    adam_eps: float = 1e-5
    """AdamW's epsilon (table 3)"""
    weight_decay: float = 0.01
    """AdamW's weight decay (torch's default, as in the paper's code)"""
    max_grad_norm: float = 0.0
    """gradient norm to clip at; 0: no clipping (paper)"""

    eval_every: int = 0
    """updates between validation losses; 0: before the first update and after the last only"""
    micro_batch_size: int | None = None
    """rows per device and forward/backward pass: memory only, never the result; default: what fits 80 GB, or 8"""
    mixed_precision: Literal["no", "bf16"] | None = None
    """autocast over float32 weights; default bf16 on a GPU (Detail 8), none on a CPU"""
    save_every: int = 0
    """updates between checkpoints for --resume; 0: none"""
    keep_checkpoints: int = 2
    """newest checkpoints kept"""
    resume: bool = False
    """continue the run in output_dir from its newest checkpoint"""
    track: bool = False
    """log to Weights & Biases as well (WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE in the environment apply)"""


# ==== the algorithm ===============================================================================


def sft_loss(logits: torch.Tensor, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Sum over the tokens marked in `target` of -log p(token | tokens before it). logits (b, T, V), tokens (b, T),
    target (b, T) bool; a row's first token has nothing before it and never counts."""
    labels = F.pad(tokens.masked_fill(~target, -100)[:, 1:], (0, 1), value=-100)  # not logits[:, :-1]: that would copy
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def target_mask(batch: dict, loss_on: str, pad_id: int) -> torch.Tensor:
    """(b, T) bool: the tokens that the loss counts. Padding never is one, EOS is (Detail 3)."""
    column = "query_reference_response_token" + ("_response_label" if loss_on == "response" else "")
    return batch[column] != pad_id


def loss_and_count(model, batch: dict, loss_on: str, pad_id: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed loss and number of targets of one micro-batch, cut to its longest row."""
    tokens = trim(batch["query_reference_response_token"], pad_id, "right").to(device)  # (b, T)
    target = target_mask(batch, loss_on, pad_id)[:, : tokens.shape[1]].to(device)
    logits = model(tokens, use_cache=False).logits  # no mask: right-padded, and no token sees what comes after it
    return sft_loss(logits, tokens, target), target[:, 1:].sum()


def data_order(n: int, seed: int, start: int, stop: int) -> torch.Tensor:
    """Rows (stop - start,) at the positions start..stop-1 of an endless stream over n rows: each pass is a new shuffle
    without replacement (Detail 21). A function of (seed, position) alone: every process can name every batch."""
    passes = []
    for epoch in range(start // n, (stop - 1) // n + 1):
        shuffled = torch.randperm(n, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
        passes.append(shuffled[max(start - epoch * n, 0) : stop - epoch * n])
    return torch.cat(passes)


# ==== main ========================================================================================


def main(args: Args):
    # ---- data and model --------------------------------------------------------------------------
    accelerator = make_accelerator(args)
    args.micro_batch_size = args.micro_batch_size or PRESETS.get(args.model, 8)
    world, per_rank = accelerator.num_processes, args.batch_size // accelerator.num_processes
    preset = f"EleutherAI/pythia-{args.model}-deduped"
    base = checkpoint_folder("--model", preset if args.model in PRESETS else args.model)
    tokenizer = load_tokenizer(base)
    pad_id = tokenizer.pad_token_id
    data = load_splits("--dataset", args.dataset, ["query", "query_token", *TOKEN_COLUMNS], tokenizer)
    train = data["train"].select_columns(TOKEN_COLUMNS)
    if args.total_episodes is None:
        args.total_episodes = int(args.num_train_epochs * len(train))
    num_updates = args.total_episodes // args.batch_size
    if num_updates == 0 or args.batch_size % world:
        fail(f"--batch-size {args.batch_size}: above {args.total_episodes} rows, or no multiple of {world} processes")
    policy = load_policy(base, tokenizer)
    model, optimizer = prepare(accelerator, policy, args)
    # state that an edit carries from update to update: accelerator.register_for_checkpointing(it) before this line
    first = begin_run(accelerator, args)

    # ---- train -----------------------------------------------------------------------------------
    if first == 0:
        loss = validation_loss(accelerator, policy, data["validation"], args, pad_id)
        write_metrics(accelerator, args, {"eval/loss": loss}, 0, num_updates)
    begin = time.time()
    for update in updates(accelerator, args, first, num_updates):
        start = time.time()
        learning_rate = args.learning_rate * 0.5 * (1 + cos(pi * (update - 1) / num_updates))  # cosine to 0 (table 3)
        for group in optimizer.param_groups:  # a resumed optimiser has those of its checkpoint
            group |= {"lr": learning_rate, "eps": args.adam_eps, "weight_decay": args.weight_decay}
        order = data_order(len(train), args.seed, (update - 1) * args.batch_size, update * args.batch_size)
        batch = train[order[accelerator.process_index * per_rank :][:per_rank].tolist()]
        lengths = (batch["query_reference_response_token"] != pad_id).sum(1)  # (b,)
        # the loss of the whole batch is a sum over its targets divided by their global number
        targets = target_mask(batch, args.loss_on, pad_id)[:, 1:].sum().to(accelerator.device)
        targets = accelerator.reduce(targets, "sum")
        loss_sum = torch.zeros((), device=accelerator.device)
        groups = lengths.argsort(descending=True, stable=True).split(args.micro_batch_size)  # of similar lengths
        for i, index in enumerate(groups):
            accelerator.sync_gradients = model.require_backward_grad_sync = i == len(groups) - 1  # exchange gradients
            micro_batch = {column: batch[column][index] for column in TOKEN_COLUMNS}
            loss, _ = loss_and_count(model, micro_batch, args.loss_on, pad_id, accelerator.device)
            accelerator.backward(loss * world / targets)  # x world: DDP and DeepSpeed average over devices
            loss_sum += loss.detach()
        grad_norm = optimizer_step(accelerator, model, optimizer, args.max_grad_norm, f"update {update}")

        # ---- log ---------------------------------------------------------------------------------
        metrics = {
            "loss/train": accelerator.reduce(loss_sum, "sum") / targets,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "episode": update * args.batch_size,
            "tokens/batch": accelerator.reduce(lengths.sum().to(accelerator.device), "sum"),
        }
        metrics |= {"time/update": time.time() - start, "time/total": time.time() - begin}
        if update == num_updates or (args.eval_every and update % args.eval_every == 0):
            metrics["eval/loss"] = validation_loss(accelerator, policy, data["validation"], args, pad_id)
        write_metrics(accelerator, args, metrics, update, num_updates)

    # ---- save ------------------------------------------------------------------------------------
    save_model(accelerator, args, "model", policy, accelerator.get_state_dict(model), "", tokenizer)
    accelerator.print(f"done in {time.time() - begin:.0f} s: {args.output_dir}", flush=True)
    accelerator.end_training()


# ==== evaluation ==================================================================================


@torch.no_grad()
def validation_loss(accelerator: Accelerator, model, data, args, pad_id: int) -> float:
    """Mean loss per target token of a whole split (nats)."""
    sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    mine = data.shard(accelerator.num_processes, accelerator.process_index, contiguous=False)
    for start in progress(accelerator, range(0, len(mine), args.micro_batch_size), "validation loss"):
        batch = mine[start : start + args.micro_batch_size]
        sums += torch.stack(loss_and_count(model, batch, args.loss_on, pad_id, accelerator.device)).double()
    loss, targets = accelerator.reduce(sums, "sum").tolist()
    return loss / targets


# ==== padding and models ==========================================================================


def trim(tokens: torch.Tensor, pad_id: int, side: Literal["left", "right"]) -> torch.Tensor:
    """Cut the columns that are padding in every row, but for a width of a multiple of 16 (or all): widths that differ
    at every call leave the heap in pieces, so that memory grows with the run. (b, T) -> (b, up to T)."""
    columns = (tokens != pad_id).any(0).nonzero().flatten()
    if len(columns) == 0:
        return tokens[:, :0]
    used = int(tokens.shape[1] - columns[0] if side == "left" else columns[-1] + 1)
    width = -(-used // 16) * 16
    return tokens[:, -width:] if side == "left" else tokens[:, :width]


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


# ==== plumbing: one text in every stage script; read it once, then skip it ========================
# launch, loading, run folder, checkpoints, trackers, optimiser. Nothing here changes a loss or a sample.


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


def make_accelerator(args) -> Accelerator:
    """Fill {model} and {seed} into the arguments' templates. Returns the Accelerator that the launcher asked for, or an
    error where accelerate would silently run something else."""
    for key, value in vars(args).items():
        if isinstance(value, str):
            name = Path(args.model.partition("@")[0]).name
            setattr(args, key, value.replace("{model}", name).replace("{seed}", str(args.seed)))
    if Path(args.output_dir, "args.json").exists() and not args.resume:
        fail(f"{args.output_dir} already holds a run: another --output-dir, delete it, or continue it with --resume")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    gloo = world > 1 and not torch.accelerator.is_available()  # what accelerate must be told, in one of two ways
    accelerator = Accelerator(
        cpu=gloo and not deepspeed,
        mixed_precision=args.mixed_precision or ("bf16" if torch.cuda.is_available() else "no"),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] if gloo and deepspeed else [],
        log_with="tensorboard",
        project_dir=args.output_dir,
    )
    if (accelerator.num_processes, accelerator.state.deepspeed_plugin is not None) != (world, deepspeed):
        fail(f"accelerate does not run {world} processes, DeepSpeed {deepspeed}: launch by benchmark/accelerate/*.yaml")
    set_seed(args.seed)
    return accelerator


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


def begin_run(accelerator: Accelerator, args) -> int:
    """Make the run folder or, with --resume, load its newest checkpoint that can be loaded, and start the trackers.
    Returns the update to go on from. Comes last before the training: a bad command leaves nothing behind."""
    folder, first, lines, old = Path(args.output_dir), 0, "", {}
    if (folder / "args.json").exists():
        old = json.loads((folder / "args.json").read_text())
        changed = [f"{key} {old.get(key)} -> {value}" for key, value in vars(args).items() if value != old.get(key)]
        accelerator.print(f"--resume {folder}, changed: {', '.join(changed) or 'nothing'}")
    for checkpoint in sorted(folder.glob("checkpoints/update_??????"), reverse=True):
        try:
            lines, problem = (checkpoint / "metrics.jsonl").read_text(), None
            accelerator.load_state(str(checkpoint))
        except Exception as error:
            problem = f"{error!r:.300}"
        problems = [problem for problem in gather_object([problem]) if problem]
        accelerator.print(f"--resume: {checkpoint} {f'cannot be loaded: {problems}' if problems else 'is loaded'}")
        if not problems:
            first = int(checkpoint.name.removeprefix("update_"))
            break
    if lines and not first:
        fail(f"--resume: no checkpoint in {folder} can be loaded; launch it as before, or delete it")
    about = {"stage": STAGE, "command": shlex.join(["python", *sys.argv]), "processes": accelerator.num_processes}
    about["wandb_id"] = old.get("wandb_id", os.urandom(8).hex())
    if args.track:
        run = {"dir": args.output_dir, "name": "__".join(folder.parts[-3:]), "id": about["wandb_id"], "resume": "allow"}
        run["settings"] = {"finish_timeout": float(os.environ.get("WANDB_FINISH_TIMEOUT", 300))}  # seconds
        accelerator.log_with.append(WandBTracker(None, config=asdict(args), **run))
    with or_fail("the trackers do not start (WANDB_MODE=offline keeps what W&B gets in the run folder)"):
        accelerator.init_trackers("tensorboard", init_kwargs={"tensorboard": {"purge_step": first + 1 if first else 0}})
    for name, text in (("args.json", json.dumps(about | asdict(args), indent=2) + "\n"), ("metrics.jsonl", lines)):
        with writing(accelerator, folder / name) as partial:
            if accelerator.is_main_process:
                partial.write_text(text)
    return first


def updates(accelerator: Accelerator, args, first: int, last: int):
    """Yield the updates first + 1 to last under a progress bar. After each comes a checkpoint where one is due, or
    where SIGTERM or SIGUSR1, a scheduler's notice, has come: then the run ends there, with exit code 75."""
    caught, folder, left_over = [], Path(args.output_dir), args.total_episodes - last * args.batch_size
    accelerator.print(f"{STAGE}: {last:,} updates of {args.batch_size}, {left_over} left over, on {accelerator.device}")
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: caught.append(number))  # and no more: it ends between two updates
    for update in progress(accelerator, range(first + 1, last + 1), STAGE):
        yield update
        stop = accelerator.reduce(torch.tensor(len(caught), device=accelerator.device), "sum") > 0
        if stop or (args.save_every and update % args.save_every == 0):
            path = folder / "checkpoints" / f"update_{update:06d}"
            with writing(accelerator, path) as partial:
                accelerator.save_state(str(partial))
                if accelerator.is_main_process:
                    shutil.copy(folder / "metrics.jsonl", partial)
            written = sorted(old for old in path.parent.glob("update_??????") if old <= path)
            for old in written[: -max(args.keep_checkpoints, 1)]:
                shutil.rmtree(old, ignore_errors=True)  # every process may
        if stop:
            accelerator.print(f"stopped by a signal after update {update}; {folder} continues with --resume")
            accelerator.end_training()
            raise SystemExit(75)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)


def progress(accelerator: Accelerator, items, description: str):
    """Yield `items` under a rich progress bar with the rate and the time left, shown by the main process only."""
    columns = *Progress.get_default_columns(), TextColumn("{task.completed:.0f}/{task.total:.0f}, {task.speed!s:.4}/s")
    with Progress(*columns, console=Console(stderr=True), disable=not accelerator.is_main_process) as bar:
        yield from bar.track(items, len(items), description=description)


def write_metrics(accelerator: Accelerator, args, metrics: dict, update: int, last: int):
    """One line of metrics.jsonl, the same to the trackers; at each twentieth of the run the first five are printed."""
    metrics = {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in metrics.items()}
    if accelerator.is_main_process:
        with or_fail("metrics.jsonl could not be written"), Path(args.output_dir, "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"update": update, **metrics}) + "\n")
    accelerator.log(metrics, step=update)
    if update % max(1, last // 20) == 0:
        accelerator.print(f"update {update}/{last}", *(f" {key} {metrics[key]:.4g}" for key in list(metrics)[:5]))


def save_model(accelerator: Accelerator, args, name: str, model, state: dict, prefix: str, tokenizer):
    """Write a transformers checkpoint into the run folder: the weights in `state` whose names begin with `prefix`."""
    with writing(accelerator, Path(args.output_dir, name)) as partial:
        if accelerator.is_main_process:
            own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            model.save_pretrained(partial, state_dict=own)
            tokenizer.save_pretrained(partial)


def prepare(accelerator: Accelerator, model, args):
    """Model and AdamW as the launcher asked for them (plain, DDP, DeepSpeed)."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    settings = {"lr": args.learning_rate, "eps": args.adam_eps, "weight_decay": args.weight_decay, "fused": True}
    if accelerator.state.deepspeed_plugin:  # what DeepSpeed would else default to, or take from a data loader
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        config |= {"train_micro_batch_size_per_gpu": args.micro_batch_size, "gradient_clipping": args.max_grad_norm}
        config |= {"gradient_accumulation_steps": 1, "zero_force_ds_cpu_optimizer": False}  # offloaded, it is torch's
        config["data_types"] = {"grad_accum_dtype": "fp32"}  # else the micro-batches' gradients are summed in bfloat16
        if config["zero_optimization"]["stage"] == 3:
            fail("ZeRO-3 is not supported: benchmark/accelerate/zero2_offload.yaml takes every size")
    return accelerator.prepare(model, torch.optim.AdamW(parameters, **settings))


def optimizer_step(accelerator: Accelerator, model, optimizer, max_grad_norm: float, where: str) -> float:
    """One step from the gradients summed so far; returns their global norm before clipping, an error if not finite."""
    norm = float(accelerator.clip_grad_norm_(model.parameters(), max_grad_norm or float("inf")))
    if not norm < float("inf"):  # or nan
        fail(f"{where}: the gradient norm is {norm}; nothing of this update was saved")
    optimizer.step()
    optimizer.zero_grad()
    return norm


if __name__ == "__main__":
    main(tyro.cli(Args))
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":  # it leaves threads that can abort the interpreter's end
        os._exit(0)  # all is written
