"""Reward model of "The N+ Implementation Details of RLHF with PPO" (section 6, Details 10 to 16, tables 4 and 5).

One process, after `bash quickstart/run.sh --fast` and sft.py's:

    python reward.py --model nano-xs --dataset data/quickstart/posts-1-fast/tldr/sft \
        --preference-dataset data/quickstart/posts-1-fast/tldr/preference \
        --batch-size 16 --learning-rate 1e-3 --run-eval

N processes:    torchrun --nproc_per_node 8 reward.py --model 1b --seed 44413 --run-eval
Paper scale:    accelerate launch reward.py --model 6.9b --seed 44413

Training starts from the SFT model with the same name and seed. The run folder (docs/runs.md) holds model/, a sequence
classifier with one label whose config has `reward_mean`, which our scripts subtract, and eval/ with table 5.

Shapes: n is the number of rows of a split, b of the pairs or rows in a function's input; T is the width of a row.

The script deviates from the paper and the authors' code on purpose:
- A pair is one row `query + chosen + rejected` (pair_rows), for nearly half the work. The authors run two rows.
- The head's bias is not trained: it cancels in the loss, and Adam would only amplify rounding. The authors train it.
- The head runs in float32. The authors run it under bf16 autocast, which keeps only three digits of a reward.
- An epoch shows every pair once. The authors' released runs shuffled differently on every rank, so they showed 65.8 %.
- The rows left over after the last whole batch are not trained on. The authors also trained on 92,832 of 92,858 pairs.
"""

import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from math import cos, inf, pi
from pathlib import Path
from typing import Literal

import pandas
import pyarrow.compute as pc
import torch
import torch.nn.functional as F
import tyro
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.tracking import WandBTracker
from accelerate.utils import DeepSpeedPlugin, gather_object, set_seed
from datasets import DatasetDict, load_dataset, load_from_disk
from filelock import FileLock
from huggingface_hub import snapshot_download
from rich.progress import track
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging as transformers_logging

STAGE = "reward"
MICRO_BATCH_SIZES = {"1b": 32, "2.8b": 4, "6.9b": 1}  # per Pythia size: pairs that fit on one 80 GB device
DATASET = "vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144"
PREFERENCE_DATASET = "vwxyzjn/summarize_from_feedback_oai_preprocessing_1706381144"
COLUMNS = ["query", "query_token", "query_reference_response_token"]
ROUNDING = {"no": 1e-6, "bf16": 1e-3}  # relative, of a sum of log-probabilities or of a reward
PAIR_COLUMNS = ["query_chosen_token", "query_chosen_token_response_label"]
PAIR_COLUMNS += ["query_rejected_token", "query_rejected_token_response_label"]
PREFERENCE_COLUMNS = ["query", "query_token", *PAIR_COLUMNS]
QUERY, CHOSEN, REJECTED, PADDING = range(4)  # segments of a pair's row


@dataclass
class Args:
    model: str = "1b"
    """name of the run, for {model} in the paths: 1b, 2.8b, 6.9b or any other (weights: --sft-model-path)"""
    seed: int = 44413
    """seed of the head and the data order (the paper uses 44413, 55513, 66613 and 77713)"""
    sft_model_path: str = "runs/sft/{model}/{seed}"
    """SFT model to start from: run folder, checkpoint folder or Hub id[@revision]"""
    dataset: str = "data/tldr/sft" if Path("data/tldr/sft").exists() else DATASET
    """SFT data, whose reference summaries centre the rewards (Detail 15): folder or Hub id[@revision]"""
    preference_dataset: str = "data/tldr/preference" if Path("data/tldr/preference").exists() else PREFERENCE_DATASET
    """pre-tokenised preference data: folder or Hub id[@revision]"""
    output_dir: str = "runs/reward/{model}/{seed}"
    """run folder to write, which must not hold a run yet (unless you pass --resume)"""

    num_train_epochs: float = 1
    """passes over the train split (table 4)"""
    total_episodes: int | None = None
    """number of pairs to train on; default: num_train_epochs passes (table 4: 92,858)"""
    batch_size: int = 64
    """pairs per optimiser step over all devices (table 4)"""
    learning_rate: float = 3e-6
    """peak learning rate; decays to 0 over the run by a cosine (table 4)"""
    max_grad_norm: float = 0.0
    """clip gradients to this global norm; 0: no clipping (as in the paper)"""

    eval_every: int = 0
    """compute the validation accuracy every so many updates; 0: only after the last update"""
    run_eval: bool = False
    """after training, write table 5: accuracy per batch, confidence, split and policy pair of every validation split"""
    micro_batch_size: int | None = None
    """pairs per device in one forward/backward pass; affects memory, speed, rounding; default: fits 80 GB, or 8"""
    forward_batch_size: int | None = None
    """pairs or rows per device in passes without gradient (evaluation, centring); default: 4 micro-batches, up to 32"""
    mixed_precision: Literal["no", "bf16"] | None = None
    """autocast type, while weights stay in float32; default: bf16 on a GPU (Detail 8), none on a CPU"""
    save_every: int = 0
    """write a checkpoint for --resume every so many updates; 0: never"""
    resume: bool = False
    """continue the run in --output-dir from its newest checkpoint"""
    track: bool = False
    """also log to Weights & Biases (set WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE in the environment)"""


# ==== the algorithm ===============================================================================


def preference_loss(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Return the loss per pair (b,), -log sigmoid(chosen - rejected) (equation 1), from rewards (b,)."""
    return -F.logsigmoid(chosen - rejected)


def pair_rewards(model, pairs: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the rewards (b,) of the chosen and rejected responses, each read at its last token (Detail 12), and the
    logits at all other response tokens, flattened, which are only logged (Detail 13). `pairs` comes from pair_rows."""
    logits = model(**pair_inputs(model, pairs))  # (b, T)
    segments = pairs["segments"]
    chosen_last = (segments < REJECTED).sum(1, keepdim=True) - 1  # (b, 1)
    rejected_last = (segments < PADDING).sum(1, keepdim=True) - 1
    chosen = logits.gather(1, chosen_last).squeeze(1)
    rejected = logits.gather(1, rejected_last).squeeze(1)
    rejected = torch.where(pairs["is_same"], chosen, rejected)  # equal, whatever their rounding
    is_other = (segments == CHOSEN) | (segments == REJECTED)
    is_other = is_other.scatter(1, chosen_last, False).scatter(1, rejected_last, False)
    return chosen, rejected, logits.detach()[is_other]


def is_tie(chosen: torch.Tensor, rejected: torch.Tensor, size: torch.Tensor, precision: str) -> torch.Tensor:
    """Return which scores (b,) differ by no more than the rounding of the sums they come from, whose magnitude is
    `size` (b,). Such a difference depends on the micro-batch, so it is no preference."""
    return (chosen - rejected).abs() <= ROUNDING[precision] * size


def data_order(n: int, seed: int, start: int, stop: int) -> torch.Tensor:
    """Return the row indices (stop - start,) at positions start..stop-1 of an endless stream over n rows, reshuffled
    without replacement on each pass (Detail 21). They depend only on (seed, position), so all processes agree."""
    first = start // n
    passes = [permutation(n, seed, epoch) for epoch in range(first, (stop - 1) // n + 1)]
    return torch.cat(passes)[start - first * n : stop - first * n]


def permutation(n: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the numbers 0..n-1 in a random order (n,) that depends only on seed and epoch."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(n, generator=generator)


# ==== main ========================================================================================


def main(args: Args):
    # ---- data and model --------------------------------------------------------------------------
    check_args(args)
    accelerator = make_accelerator(args)
    world = accelerator.num_processes
    args.micro_batch_size = args.micro_batch_size or min(MICRO_BATCH_SIZES.get(args.model, 8), args.batch_size // world)
    args.forward_batch_size = args.forward_batch_size or min(4 * args.micro_batch_size, 32)
    sft_folder = checkpoint_folder("--sft-model-path", args.sft_model_path)
    tokenizer = load_tokenizer(sft_folder)
    pad_id = tokenizer.pad_token_id
    references = load_splits("--dataset", args.dataset, COLUMNS, tokenizer)["train"]
    data = load_splits("--preference-dataset", args.preference_dataset, PREFERENCE_COLUMNS, tokenizer)
    if "weight" in data["train"].column_names and data["train"].unique("weight") != [1.0]:
        fail(f"--preference-dataset {args.preference_dataset}: pairs with weights other than 1 need llama2/reward.py")
    train = data.pop("train").select_columns(PAIR_COLUMNS)  # all other splits are for validation
    if not args.run_eval:
        data = {"validation": data["validation"]}
    args.total_episodes = args.total_episodes or int(args.num_train_epochs * len(train))
    num_updates = args.total_episodes // args.batch_size
    if num_updates == 0 or args.batch_size % world:
        fail(f"--batch-size {args.batch_size}: use a multiple of {world} processes, up to {args.total_episodes} pairs")
    widths = [len(rows[0][key]) for rows in (train, *data.values()) for key in PAIR_COLUMNS]
    widths.append(len(references[0]["query_reference_response_token"]))
    reward_model = new_reward_model(sft_folder, tokenizer, max(widths))
    check_pairs(reward_model.model.to(accelerator.device), sft_folder, train[:1], pad_id)
    reward_model.model.score.bias.requires_grad_(False)  # it cancels in the loss
    model, optimizer = prepare(accelerator, reward_model, args)
    # Register state of your own here (accelerator.register_for_checkpointing). After --resume it is on the CPU.
    finished_updates = begin_run(accelerator, args)
    tables = {}  # split: its pairs with their rewards, from the latest evaluation
    run_start = time.time()
    for update in updates(accelerator, args, finished_updates, num_updates):
        # ---- 1. pairs ----------------------------------------------------------------------------
        update_start = time.time()
        episodes = range((update - 1) * args.batch_size, update * args.batch_size)
        order = data_order(len(train), args.seed, episodes.start, episodes.stop)
        rows = order.chunk(world)[accelerator.process_index]  # this process's share
        mbs = pair_micro_batches(train[rows.tolist()], args.micro_batch_size, pad_id, accelerator.device)

        # ---- 2. one step of the optimiser --------------------------------------------------------
        learning_rate = args.learning_rate * 0.5 * (1 + cos(pi * (update - 1) / num_updates))  # cosine to 0 (table 4)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        sums = defaultdict(float)
        for mb in mbs:
            last = mb is mbs[-1]  # devices exchange gradients with the last micro-batch
            accelerator.sync_gradients = last  # for DeepSpeed
            model.require_backward_grad_sync = last  # for DDP
            chosen, rejected, other_logits = pair_rewards(model, mb)
            loss = preference_loss(chosen, rejected).sum()
            accelerator.backward(loss * world / args.batch_size)  # x world: DDP and DeepSpeed average over devices
            sums["loss/train"] += loss.detach()
            tie = is_tie(chosen, rejected, chosen.abs() + rejected.abs(), accelerator.mixed_precision)
            sums["accuracy/train"] += ((chosen > rejected) & ~tie).sum()
            sums["rewards/margin"] += (chosen - rejected).detach().sum()
            sums["rewards/chosen"] += chosen.detach().sum()
            sums["rewards/rejected"] += rejected.detach().sum()
            sums["other_logits/share_negative"] += (other_logits < 0).sum()
            sums["other_logits/mean"] += other_logits.sum()
            sums["other_count"] += torch.ones_like(other_logits).sum()
        grad_norm = optimizer_step(accelerator, model, optimizer, args.max_grad_norm, f"update {update}")

        # ---- 3. log ------------------------------------------------------------------------------
        sums = {key: accelerator.reduce(value, "sum").item() for key, value in sums.items()}
        other_count = max(sums.pop("other_count"), 1)
        metrics = {key: value / args.batch_size for key, value in sums.items()}
        metrics["other_logits/share_negative"] = sums["other_logits/share_negative"] / other_count
        metrics["other_logits/mean"] = sums["other_logits/mean"] / other_count
        metrics |= {
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "episode": episodes.stop,
            "time/update": time.time() - update_start,
            "time/total": time.time() - run_start,
        }
        if update == num_updates or (args.eval_every and update % args.eval_every == 0):
            tables["validation"] = evaluate_pairs(accelerator, reward_model, data, args, pad_id, "validation")
            metrics["eval/accuracy"] = tables["validation"]["hit"].mean()
        write_metrics(accelerator, args, metrics, update, num_updates)

    # ---- centre (Detail 15), evaluate (table 5), save --------------------------------------------
    rewards = reference_rewards(accelerator, reward_model, references, args, pad_id)  # (n,)
    statistics = {"max": rewards.max(), "mean": rewards.mean(), "min": rewards.min(), "std": rewards.std()}
    rows = [{"statistic": key, "value": value.item()} for key, value in statistics.items()]
    write_table(accelerator, args, "reference_rewards", rows, "rewards of the references, uncentred (table 5)")
    reward_mean = rewards.mean().item()
    if args.run_eval:
        rows = []
        for split in data:
            if split not in tables:  # validation has been evaluated with the last update
                tables[split] = evaluate_pairs(accelerator, reward_model, data, args, pad_id, split)
            table = tables[split].drop(columns="hit")
            for side in ("chosen_reward", "rejected_reward"):
                table[side] = table[side] - reward_mean
            write_table(accelerator, args, f"pairs_{split}", table)
            rows += accuracy_table(split, tables[split])
        write_table(accelerator, args, "accuracy", rows, "validation accuracy (table 5)")
    reward_model.reward_mean = reward_mean  # it was 0
    save_model(accelerator, args, "model", reward_model.finished(), tokenizer)
    accelerator.print(f"done in {time.time() - run_start:.0f} s: {args.output_dir}", flush=True)
    accelerator.end_training()


# ==== forward passes ==============================================================================


def pair_micro_batches(batch: dict, size: int, pad_id: int, device) -> list[dict]:
    """Split a batch of stored pairs into micro-batches of `size` pairs of similar length, which saves padding. Each
    holds the columns of its pairs, the output of pair_rows and `index` (b,), the rows of its pairs in the batch."""
    lengths = (batch["query_chosen_token"] != pad_id).sum(1)
    lengths += (batch["query_rejected_token_response_label"] != pad_id).sum(1)
    mbs = []
    for index in lengths.argsort(descending=True, stable=True).split(size):
        mb = {key: value[index] for key, value in batch.items()}
        mb |= pair_rows(mb, pad_id) | {"index": index}
        mbs.append({key: value.to(device) for key, value in mb.items()})
    return mbs


def pair_rows(batch: dict, pad_id: int) -> dict:
    """Combine stored pairs, PAIR_COLUMNS (b, T), into right-padded rows `query + chosen + rejected` (b, T). The figure
    shows the row of a query q1 q2 with the responses c1 c2 and r1. Below it, x marks what each token sees:

        tokens         q1  q2  c1  c2  r1  [PAD]
        segments        0   0   1   1   2    3       QUERY, CHOSEN, REJECTED, PADDING
        position_ids    0   1   2   3   2    0       rejected continues from the query, too
        q1              x
        q2              x   x
        c1              x   x   x
        c2              x   x   x   x
        r1              x   x           x            rejected does not see chosen

    Also returns `in_response` (b, T), true where a token has a label, and `is_same` (b,), true where both responses are
    equal. A segment's first token has no label if it belongs to the query, but differs because it merged with more."""
    chosen, chosen_labels, rejected, rejected_labels = (batch[key] for key in PAIR_COLUMNS)
    width = min(chosen.shape[1], rejected.shape[1])
    is_equal = chosen[:, :width] == rejected[:, :width]
    has_label = (chosen_labels[:, :width] != pad_id) | (rejected_labels[:, :width] != pad_id)
    is_query = is_equal & ~has_label & (chosen[:, :width] != pad_id)
    query_end = is_query.long().cumprod(1).sum(1, keepdim=True)  # (b, 1)
    chosen_end = (chosen != pad_id).sum(1, keepdim=True)
    rejected_end = (rejected != pad_id).sum(1, keepdim=True)  # in a row of its own
    without_query = rejected.masked_fill(torch.arange(rejected.shape[1]) < query_end, pad_id)
    tokens = torch.cat([chosen, without_query], 1)
    longest = int((chosen_end + rejected_end - query_end).max())
    width = -(-longest // 16) * 16  # rounded up: each new shape costs memory and, on a GPU, time
    real_first = (tokens == pad_id).int().argsort(dim=1, stable=True)[:, :width]
    tokens = tokens.gather(1, real_first)
    labels = torch.cat([chosen_labels, rejected_labels], 1).gather(1, real_first)
    t = torch.arange(tokens.shape[1])
    segments = (t >= query_end).long() + (t >= chosen_end) + (tokens == pad_id)
    positions = torch.where(segments == REJECTED, t - chosen_end + query_end, t)
    return {
        "tokens": tokens,
        "segments": segments,
        "position_ids": positions.masked_fill(segments == PADDING, 0),
        "in_response": labels != pad_id,
        "is_same": is_equal.all(1) & (chosen_end == rejected_end).squeeze(1),
    }


def pair_inputs(model, pairs: dict) -> dict:
    """Return a model's inputs for the rows of pair_rows: tokens, mask (b, 1, T, T) and position ids. A layer with a
    sliding window sees no position further back than its window, just as in a row with a single response."""
    segments = pairs["segments"]
    positions = pairs["position_ids"]
    same_text = (segments == QUERY)[:, None] | (segments[:, :, None] == segments[:, None])  # (b, T, T)
    mask = same_text.tril()[:, None]  # (b, 1, T, T), causal
    config = getattr(model, "module", model).config  # DDP and DeepSpeed keep the model in `module`
    window = getattr(config, "sliding_window", None)
    if window is not None:
        distances = positions[:, :, None] - positions[:, None]
        windowed = mask & (distances < window)[:, None]
        every_layer = getattr(config, "layer_types", None) is None
        mask = windowed if every_layer else {"full_attention": mask, "sliding_attention": windowed}
    return {"input_ids": pairs["tokens"], "attention_mask": mask, "position_ids": positions}


@torch.no_grad()
def check_pairs(model, path: str, pairs: dict, pad_id: int):
    """End with an error if a model gives the rejected response of a stored pair other states in the pair's row than
    alone, because its attention ignores our mask or position ids."""
    [pair] = pair_micro_batches(pairs, 1, pad_id, model.device)
    problem = f"{path}: {type(model).__name__} cannot process a pair in one row, as {STAGE}.py does"
    with or_fail(problem):
        states = model.base_model(**pair_inputs(model, pair), use_cache=False).last_hidden_state
        alone = model.base_model(pair["query_rejected_token"], use_cache=False).last_hidden_state
    is_rejected = pair["segments"] == REJECTED
    expected = alone[0, pair["position_ids"][is_rejected]]
    difference = (states[is_rejected] - expected).norm() / expected.norm()
    if not difference < 1e-3:
        fail(f"{problem}: its states differ by {difference:.1e}")


def response_rewards(model, tokens: torch.Tensor, pad_id: int) -> torch.Tensor:
    """Return the rewards (b,) of right-padded rows (b, T), read at the last token before the first [PAD] (Detail 12).
    Left padding would give the same numbers up to rounding (Detail 14)."""
    last = (tokens != pad_id).long().cumprod(1).sum(1, keepdim=True) - 1
    return model(tokens).gather(1, last).squeeze(1)


# ==== models ======================================================================================


class RewardModel(nn.Module):
    """A transformers sequence classifier with one label that returns its scalar at every position, less the constant
    `reward_mean` (Detail 15). The head is in float32, even under autocast or in a bfloat16 model. In training it has a
    bias that starts at 0."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.config = model.config
        self.reward_mean = getattr(model.config, "reward_mean", 0.0)
        model.score.bias = nn.Parameter(torch.zeros(1))  # the head, an nn.Linear without bias

    def forward(self, input_ids, **inputs):
        """Return the rewards (b, T) of right-padded rows (b, T), which need no mask, because the model is causal. For
        pairs in one row, also pass attention_mask (b, 1, T, T) and position_ids (b, T)."""
        hidden = self.model.base_model(input_ids, use_cache=False, **inputs).last_hidden_state
        head = self.model.score
        with torch.autocast(hidden.device.type, enabled=False):
            rewards = F.linear(hidden.float(), head.weight.float(), head.bias.float()) - self.reward_mean
        return rewards.squeeze(-1)

    def finished(self):
        """Return the transformers model to save. Its head has a weight alone, because the bias becomes part of the
        config's `reward_mean`. Do not use this RewardModel afterwards."""
        self.config.reward_mean = self.reward_mean - self.model.score.bias.item()
        self.model.score.bias = None
        return self.model


def new_reward_model(path: str, tokenizer, width: int = 0) -> RewardModel:
    """Return the SFT model of a checkpoint folder, for rows of up to `width` tokens, with a new scalar head: normal
    weights with standard deviation 1 / sqrt(d + 1), and bias 0 (Detail 11). It stays in evaluation mode even while it
    is trained, so it has no dropout (Detail 7)."""
    settings = {"dtype": torch.float32, "trust_remote_code": False}
    with or_fail(f"the model in {path} cannot be read"):
        model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, **settings)
    check_model(model, path, width)
    rows = model.get_input_embeddings().num_embeddings
    if rows < len(tokenizer) - 1:  # it may lack one for [PAD]
        fail(f"{path}: {rows} embeddings, but the tokenizer has {len(tokenizer) - 1} ids. Use its own tokenizer")
    model.resize_token_embeddings(max(rows, len(tokenizer)), mean_resizing=False)
    model.config.update({"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id})
    model.config.problem_type = "regression"  # a text-classification pipeline then returns the bare score
    model.score = nn.Linear(model.score.in_features, 1)
    nn.init.normal_(model.score.weight, std=1 / (model.score.in_features + 1) ** 0.5)
    return RewardModel(model)


@torch.no_grad()
def check_model(model, path: str, width: int):
    """End with an error if a model cannot be trained or sampled from here because of its attention, because it scales
    or caps the logits of its head, or because it has fewer positions than `width`, the tokens of the widest row."""
    name = f"{path}: {type(model).__name__}"
    if model.config._attn_implementation != "sdpa":
        fail(f"{name} has no scaled dot-product attention in transformers. Choose another model")
    other = set(getattr(model.config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if other:
        fail(f"{name} has {', '.join(sorted(other))} layers; only full and sliding attention are supported")
    positions = getattr(model.config, "max_position_embeddings", None) or inf
    if width > positions:
        fail(f"{name} has {positions} positions, but rows need {width}. Make the data with shorter queries")
    head = model.get_output_embeddings()  # None in a reward model
    tokens = torch.arange(4)[None]
    if head and not torch.allclose(head(model.base_model(tokens)[0]), model(tokens).logits, atol=1e-4):
        fail(f"{name} scales or caps the logits of its head. Choose another model")


# ==== evaluation ==================================================================================


@torch.no_grad()
def reference_rewards(accelerator: Accelerator, model, data, args, pad_id: int) -> torch.Tensor:
    """Return the rewards (n,) of a split's reference summaries, in order."""
    rewards = []
    for _, batch in shares(accelerator, data, args.forward_batch_size, "rewards of references"):
        tokens = batch["query_reference_response_token"]
        longest = int((tokens != pad_id).sum(1).max())
        tokens = tokens[:, :longest].to(accelerator.device)
        with accelerator.autocast():
            rewards += response_rewards(model, tokens, pad_id).tolist()
    return torch.tensor(gather_object(rewards), dtype=torch.float64)


@torch.no_grad()
def evaluate_pairs(accelerator: Accelerator, model, data: dict, args, pad_id: int, split: str) -> pandas.DataFrame:
    """Return the pair_table of a split."""
    found = []
    pairs = data[split].select_columns(PAIR_COLUMNS)
    for _, batch in shares(accelerator, pairs, args.forward_batch_size, f"rewards of {split}"):
        rows = {key: value.to(accelerator.device) for key, value in pair_rows(batch, pad_id).items()}
        with accelerator.autocast():
            chosen, rejected, _ = pair_rewards(model, rows)
        found += torch.stack([chosen, rejected], 1).tolist()
    rewards = torch.tensor(gather_object(found))  # (n, 2)
    tie = is_tie(rewards[:, 0], rewards[:, 1], rewards.abs().sum(1), accelerator.mixed_precision)
    return pair_table(data[split], rewards, tie)


def pair_table(data, rewards: torch.Tensor, tie: torch.Tensor) -> pandas.DataFrame:
    """Return one row per pair of a split: what table 5 groups by (batch, split, policies, confidence; None if unknown),
    both rewards (n, 2), whether they are a tie (n,), and `hit`, whether chosen's is higher and no tie."""
    data = data.with_format(None).flatten()
    groups = ("batch", "split", "policies", "extra.confidence")
    columns = {key: data[key][:] for key in groups if key in data.column_names}
    columns["confidence"] = columns.pop("extra.confidence", len(data) * [None])
    columns["chosen_reward"] = rewards[:, 0].tolist()
    columns["rejected_reward"] = rewards[:, 1].tolist()
    columns["tie"] = tie.tolist()
    columns["hit"] = ((rewards[:, 0] > rewards[:, 1]) & ~tie).tolist()
    return pandas.DataFrame(columns, dtype=object)  # otherwise a null would turn integers into floats


def accuracy_table(name: str, pairs: pandas.DataFrame) -> list[dict]:
    """Return one split's rows of table 5: the share of hits in its pair_table, overall and per batch, confidence, split
    and policy pair (Detail 16). Null values form a group of their own."""
    pairs = pairs.assign(overall="all")
    table = []
    for group in ("overall", "batch", "confidence", "split", "policies"):
        if group in pairs:
            values = pairs[group].where(pairs[group].notna(), "null")
            for value, members in pairs.groupby(values):
                row = {"data": name, "group": group, "value": value, "pairs": len(members)}
                table.append(row | {"accuracy": members["hit"].mean()})
    return table


def write_table(accelerator: Accelerator, args, name: str, rows, title: str = ""):
    """Write rows as a CSV file in eval/ and, if there is a title, print them. Call it on every process."""
    frame = pandas.DataFrame(rows)
    with writing(accelerator, Path(args.output_dir, "eval", f"{name}.csv")) as partial:
        if accelerator.is_main_process:
            frame.to_csv(partial, index=False)
    if title:
        accelerator.print(f"\n{title}\n{frame.to_string(index=False)}\n")


def shares(accelerator: Accelerator, data, size: int, description: str):
    """Yield (row indices, rows) of this process's share of a split, up to `size` rows at a time. gather_object puts the
    results of all processes back into the order of the rows."""
    first = len(data) * accelerator.process_index // accelerator.num_processes
    last = len(data) * (accelerator.process_index + 1) // accelerator.num_processes
    for start in track(range(first, last, size), description, disable=not accelerator.is_main_process):
        index = list(range(start, min(start + size, last)))
        yield index, data[index]


# ==== plumbing: identical in every stage script; read it once, then skip it =======================

POSITIVE = {"batch_size", "micro_batch_size", "forward_batch_size", "sample_batch_size", "num_mini_batches"}
POSITIVE |= {"total_episodes", "num_ppo_epochs", "response_length", "temperature", "beta", "eval_rows"}
LARGEST = {"seed": 2**32 - 1, "gamma": 1, "lam": 1, "label_smoothing": 1}
# Settings that --resume may change: they affect memory, speed, rounding, evaluation, logging and saving only.
MAY_CHANGE = {"micro_batch_size", "forward_batch_size", "sample_batch_size", "mixed_precision", "offload", "processes"}
MAY_CHANGE |= {"eval_every", "eval_rows", "run_eval", "sample_every", "track", "save_every", "resume", "output_dir"}
MAY_CHANGE |= {"dataset", "preference_dataset"}  # their contents are compared
CONTENTS = {}  # for --resume: digests of data sets, and of configs and file sizes of a flag's models
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
    name = Path(os.path.abspath(args.model)).name.partition("@")[0]  # sft.py takes a path or an id@revision
    for key, value in vars(args).items():
        if isinstance(value, str):
            value = value.replace("{model}", name).replace("{seed}", str(args.seed))
            setattr(args, key, os.path.expanduser(value))
        if isinstance(value, int | float) and key != "penalty_reward_value":
            largest = LARGEST.get(key, inf)
            if not 0 <= value <= largest or (value == 0 and key in POSITIVE):
                bounds = "above 0" if key in POSITIVE else f"between 0 and {largest}"
                fail(f"--{key.replace('_', '-')} {value} must be {bounds}")
    folder = Path(args.output_dir)
    if args.resume and (folder / "model").exists():  # a run writes this last
        print(f"--resume: the run in {folder} has ended, so there is nothing left to do", flush=True)
        raise SystemExit(0)
    if not args.resume and any((folder / name).exists() for name in ("args.json", "checkpoints", "model")):
        fail(f"{folder} already holds a run: choose another --output-dir, delete it, or continue it with --resume")


def make_accelerator(args) -> Accelerator:
    """Return the Accelerator that the launcher asked for. Ends with an error if accelerate started something else."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # less fragmentation
    os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "1"  # or it divides the loss
    torch.backends.cuda.enable_cudnn_sdp(False)  # slow with new shapes, and has given NaN
    transformers_logging.set_verbosity_error()  # it warns about a new head
    set_seed(args.seed)
    CONTENTS.clear()  # another run in this process may have filled it
    world = int(os.environ.get("WORLD_SIZE", "1"))
    configured = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    chosen = args.model in ("2.8b", "6.9b") and world > 1 and not configured  # DDP would need too much memory
    deepspeed = configured or chosen
    on_cpu = not torch.accelerator.is_available()
    process_group = InitProcessGroupKwargs(timeout=timedelta(hours=2))  # large checkpoints
    if on_cpu and deepspeed:
        process_group.backend = "gloo"
    settings = {"log_with": "tensorboard", "project_dir": args.output_dir, "kwargs_handlers": [process_group]}
    settings["mixed_precision"] = args.mixed_precision or ("bf16" if torch.cuda.is_available() else "no")
    if chosen:
        settings["deepspeed_plugin"] = DeepSpeedPlugin(zero_stage=2)
    accelerator = Accelerator(cpu=on_cpu and not deepspeed, **settings)  # cpu=True would switch DeepSpeed off
    plugin = accelerator.state.deepspeed_plugin
    if accelerator.num_processes != world or bool(plugin) != deepspeed or (plugin and plugin.zero_stage == 3):
        fail("accelerate did not start what was asked for, or ZeRO-3: use a configuration of benchmark/accelerate/")
    if chosen:
        accelerator.print(f"no DeepSpeed configuration was given: {args.model} trains under ZeRO-2, as with zero2.yaml")
    return accelerator


def checkpoint_folder(flag: str, path: str) -> str:
    """Return the local folder of a checkpoint given as a run folder, checkpoint folder or Hub id[@revision]."""
    folder = Path(path, "model") if Path(path, "model/config.json").exists() else Path(path)
    if not (folder / "config.json").exists():
        name, _, revision = path.partition("@")
        wanted = {"repo_id": name, "revision": revision or None, "ignore_patterns": "*/*"}  # no subfolders
        with or_fail(f"{flag} {path}: no checkpoint there, in its model/ or on the Hub. Run the earlier stage first"):
            folder = Path(snapshot_download(**wanted, allow_patterns=["*.json", "*.safetensors", "*.txt"]))
            if not list(folder.glob("*.safetensors")):
                folder = Path(snapshot_download(**wanted))  # with its pytorch_model.bin
    weights = [(file.name, file.stat().st_size) for file in sorted(folder.glob("*model*"))]
    content = f"{(folder / 'config.json').read_text()}{weights}".encode()
    CONTENTS.setdefault(f"{flag[2:]} content", []).append(hashlib.sha256(content).hexdigest()[:16])
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
            data[split].select_columns(columns)[0]  # fails where something is missing
    keys = [column for column in columns if "_token" in column]
    content = hashlib.sha256(str(data.num_rows).encode())
    for split, rows in data.items():
        largest = 0
        for column in rows.data.select(keys).columns:
            if len(pc.unique(pc.list_value_length(column))) != 1:
                fail(f"{flag} {path}: {split}: rows differ in width. Pad them, as tldr_dataset.py does")
            for tokens in pc.list_flatten(column).chunks:
                largest = max(largest, pc.max(tokens).as_py())
                content.update(tokens.to_numpy())
        matches = []
        for row in rows.select(range(0, len(rows), -(-len(rows) // 16))):
            tokens = {key: [token for token in row[key] if token != tokenizer.pad_token_id] for key in keys}
            is_query = tokens.pop("query_token") == tokenizer(row["query"], add_special_tokens=False).input_ids
            has_eos = all(ids[-1:] == [tokenizer.eos_token_id] for ids in tokens.values())  # in the other columns
            matches.append(is_query and has_eos)
        if 2 * sum(matches) <= len(matches) or largest >= len(tokenizer):  # another tokenizer matches next to none
            found = f"{sum(matches)} of {len(matches)} rows match the model's tokenizer; largest id {largest}"
            fail(f"{flag} {path}: {split}: {found}. Make it with tldr_dataset.py; eval/check_data.py shows the rows")
    CONTENTS[f"{flag[2:]} content"] = content.hexdigest()[:16]
    return data.with_format("torch")


@contextmanager
def writing(accelerator: Accelerator, path: Path):
    """Yield a temporary path for the new content of `path` (file or folder) and rename it into place when it is on the
    disk, so that `path` is always complete or absent. All processes call it, because each may write a part."""
    partial = path.with_suffix(".tmp")  # one that a killed run has left is written over
    with or_fail(f"{path} could not be written: make room, then continue with --resume"):
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            os.sync()
            shutil.rmtree(path, ignore_errors=True)  # a file is replaced, a folder has to go first
            os.replace(partial, path)
        accelerator.wait_for_everyone()


def begin_run(accelerator: Accelerator, args) -> int:
    """Make the run folder or, with --resume, load its newest checkpoint, and start the trackers. Returns the number of
    finished updates. Call it right before training, so that a wrong command leaves nothing behind."""
    folder = Path(args.output_dir)
    if accelerator.is_main_process:
        with or_fail(f"{folder}: another run still writes there, or nothing can be written there"):
            folder.mkdir(parents=True, exist_ok=True)
            accelerator.lock = FileLock(folder / ".lock", is_singleton=True)  # held until the process ends
            accelerator.lock.acquire(timeout=120)  # a requeued job may meet the old one still ending
    accelerator.wait_for_everyone()
    check_args(args)  # again, because another run may have been here since
    settings = {"stage": STAGE, "processes": accelerator.num_processes} | asdict(args) | CONTENTS
    old = {}
    if (folder / "args.json").exists():
        old = json.loads((folder / "args.json").read_text())
    for key, value in settings.items():
        if old.get(key, value) != value:
            change = f"--resume {folder}: --{key.replace('_', '-')} {old[key]} -> {value}"
            if key not in MAY_CHANGE:
                fail(f"{change} would change the run. If a model has only moved, write its new path into args.json")
            accelerator.print(change)
    finished = 0
    metrics = ""
    newest = max(folder.glob("checkpoints/update_??????"), default=None)
    if newest:
        with or_fail(f"--resume: {newest} cannot be loaded. Launch the run as before, or delete that checkpoint"):
            metrics = (newest / "metrics.jsonl").read_text()
            accelerator.load_state(str(newest))
        finished = int(newest.name.removeprefix("update_"))
    if args.resume:
        accelerator.print(f"--resume: {folder} continues after update {finished}")
    settings["wandb_id"] = old.get("wandb_id", os.urandom(8).hex())
    if args.track:  # accelerate's own tracker would override WANDB_PROJECT
        run = {"name": "__".join(folder.parts[-3:]), "id": settings["wandb_id"], "resume": "allow"}
        accelerator.log_with.append(WandBTracker(None, config=asdict(args), dir=args.output_dir, **run))
    tensorboard = {"purge_step": finished + 1 if finished else 0}  # drops what a killed run logged later
    with or_fail("the trackers could not start (with WANDB_MODE=offline, W&B only writes to the run folder)"):
        accelerator.init_trackers("tensorboard", init_kwargs={"tensorboard": tensorboard})
    for name, content in {"args.json": json.dumps(settings, indent=2) + "\n", "metrics.jsonl": metrics}.items():
        with writing(accelerator, folder / name) as partial:
            if accelerator.is_main_process:
                partial.write_text(content)
    return finished


def updates(accelerator: Accelerator, args, first: int, last: int):
    """Yield the updates first + 1 to last under a progress bar, and write a checkpoint after each update where one is
    due. After SIGTERM or SIGUSR1, which schedulers send as a notice, write one and end the run with exit code 75."""
    folder = Path(args.output_dir)
    caught = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: caught.append(number))  # the update still ends
    for update in track(range(first + 1, last + 1), STAGE, disable=not accelerator.is_main_process):
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


def write_metrics(accelerator: Accelerator, args, metrics: dict, update: int, last: int):
    """Append a line to metrics.jsonl and log it to the trackers. Print its first five numbers about 20 times a run."""
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
    settings = {"lr": args.learning_rate, "eps": ADAM_EPS, "weight_decay": WEIGHT_DECAY}
    optimizer = torch.optim.AdamW(model.parameters(), **settings, fused=True)
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
    norm = float(accelerator.clip_grad_norm_(model.parameters(), max_grad_norm or inf))
    if not norm < inf:  # also true for nan
        fail(f"{where}: the gradient norm is {norm}; this update was not saved. Try a lower --learning-rate")
    optimizer.step()
    optimizer.zero_grad()
    return norm


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # print ? where the terminal cannot show a character
    signal.signal(signal.SIGINT, lambda *_: fail("stopped by Ctrl-C"))
    main(tyro.cli(Args))
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":  # its threads can crash a normal exit
        os._exit(0)  # everything has been written
