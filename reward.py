"""Reward model on pairwise preferences: the second stage of "The N+ Implementation Details of RLHF with PPO" (section
6, Details 10 to 16, tables 4 and 5).

One process, after `bash quickstart/run.sh --fast` and sft.py's:

    python reward.py --model nano-xs --dataset data/quickstart/posts-1-fast/tldr/sft \
        --preference-dataset data/quickstart/posts-1-fast/tldr/preference \
        --batch-size 16 --learning-rate 1e-3 --run-eval

N processes:    torchrun --nproc_per_node 8 reward.py --model 1b --seed 44413 --run-eval
Paper scale:    accelerate launch --config_file benchmark/accelerate/zero2.yaml reward.py --model 6.9b --seed 44413

Training starts from the SFT model with the same name and seed. The run folder holds model/ (a sequence classifier with
one label, and in its config `reward_mean`, which our scripts subtract), metrics.jsonl, args.json, TensorBoard files,
eval/ (table 5) and checkpoints/. The algorithm comes first and plumbing last. Llama 2's reward model is a copy of this
file; for the changes, run `git diff --no-index reward.py llama2/reward.py`.

Shapes: n is the number of rows of a split, b the number of pairs or rows in a function's input, Q the width of the
queries, C and R the widths of the chosen and rejected responses, and T the width of a row of query and response(s).

The script deviates from the paper and the authors' code on purpose:
- A pair is one row `query + chosen + rejected`, in which `rejected` does not see `chosen` and its positions restart
  after the query. This gives the same rewards for nearly half the work. The authors run two rows.
- The head's bias is not trained, because it cancels in the loss and Adam would only amplify rounding; the authors train
  it.
- The head runs in float32. The authors run it under bf16 autocast, which keeps only three digits of a reward.
- An epoch shows every pair once. The authors' released runs shuffled differently on every rank, so they showed 65.8 %.
- The rows left over after the last whole batch are not trained on. The authors also trained on 92,832 of 92,858 pairs.
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
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from math import cos, pi
from pathlib import Path
from typing import Literal

import pandas
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
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging as transformers_logging

STAGE = "reward"
MICRO_BATCH_SIZES = {"1b": 8, "2.8b": 4, "6.9b": 1}  # per Pythia size: pairs that fit on one 80 GB device
DATASET = "vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144"
PREFERENCE_DATASET = "vwxyzjn/summarize_from_feedback_oai_preprocessing_1706381144"
COLUMNS = ["query", "query_token", "query_reference_response_token"]
ROUNDING = {"no": 1e-6, "bf16": 1e-3}  # relative, of a sum of log-probabilities or of a reward
PAIR_COLUMNS = ["query_chosen_token", "query_chosen_token_response_label"]
PAIR_COLUMNS += ["query_rejected_token", "query_rejected_token_response_label"]
PREFERENCE_COLUMNS = ["query", "query_token", *PAIR_COLUMNS]


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
    """pairs or rows per device in passes without gradient (evaluation, centring); default: four micro-batches"""
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


def pair_rewards(model, pairs: dict, pad_id: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the rewards (b,) of the chosen and rejected responses, each read at its last token (Detail 12), and the
    logits at all other response tokens, flattened, which are only logged (Detail 13). `pairs` comes from pair_rows."""
    inputs, columns = pair_inputs(pairs["query"], pairs["chosen"], pairs["rejected"], pad_id)
    inputs["attention_mask"] = windowed_mask(model, inputs)
    logits = model(**inputs)  # (b, T)
    rewards = {}
    other_logits = []
    for side in ("chosen", "rejected"):
        side_logits = logits.gather(1, columns[side])  # (b, 1 + C), those of the query's last token first
        last = last_token(pairs[side], pad_id)[:, None] + 1  # (b, 1), 0 where the response is empty
        rewards[side] = side_logits.gather(1, last).squeeze(1)
        positions = torch.arange(side_logits.shape[1], device=logits.device)
        is_other = (positions > 0) & (positions < last)
        other_logits.append(side_logits.detach()[is_other])
    same = same_tokens(pairs["chosen"], pairs["rejected"], pad_id)  # equal, whatever their rounding
    rewards["rejected"] = torch.where(same, rewards["chosen"], rewards["rejected"])
    return rewards["chosen"], rewards["rejected"], torch.cat(other_logits)


def is_tie(chosen: torch.Tensor, rejected: torch.Tensor, size: torch.Tensor, precision: str) -> torch.Tensor:
    """Return which scores (b,) differ by no more than the rounding of the sums they come from, whose magnitude is
    `size` (b,). Such a difference depends on the micro-batch, so it is no preference."""
    return (chosen - rejected).abs() <= ROUNDING[precision] * size


def same_tokens(chosen: torch.Tensor, rejected: torch.Tensor, pad_id: int) -> torch.Tensor:
    """Return which right-padded responses (b, C) and (b, R) consist of the same tokens, (b,) bool."""
    width = max(chosen.shape[1], rejected.shape[1])
    padded = [F.pad(side, (0, width - side.shape[1]), value=pad_id) for side in (chosen, rejected)]
    return (padded[0] == padded[1]).all(1)


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
    world = accelerator.num_processes
    args.micro_batch_size = args.micro_batch_size or MICRO_BATCH_SIZES.get(args.model, 8)
    args.forward_batch_size = args.forward_batch_size or 4 * args.micro_batch_size
    sft_folder = checkpoint_folder("--sft-model-path", args.sft_model_path)
    tokenizer = load_tokenizer(sft_folder)
    pad_id = tokenizer.pad_token_id
    references = load_splits("--dataset", args.dataset, COLUMNS, tokenizer)["train"]
    data = load_splits("--preference-dataset", args.preference_dataset, PREFERENCE_COLUMNS, tokenizer)
    if "weight" in data["train"].column_names and data["train"].unique("weight") != [1.0]:
        fail(f"--preference-dataset {args.preference_dataset}: pairs with weights other than 1 need llama2/reward.py")
    train = data.pop("train").select_columns(PAIR_COLUMNS)  # all other splits are for validation
    if args.total_episodes is None:
        args.total_episodes = int(args.num_train_epochs * len(train))
    num_updates = args.total_episodes // args.batch_size
    if num_updates == 0 or args.batch_size % world:
        fail(
            f"--batch-size {args.batch_size} must be at most the {args.total_episodes} pairs to train on, and a "
            f"multiple of the {world} processes"
        )
    reward_model = new_reward_model(sft_folder, tokenizer)
    compared = [train] + [data[split] for split in data if split == "validation" or args.run_eval]
    check_pairs(reward_model.model.to(accelerator.device), sft_folder, compared, pad_id)
    check_positions(reward_model.model, sft_folder, len(references[0]["query_reference_response_token"]))
    reward_model.model.score.bias.requires_grad_(False)  # it cancels in the loss
    model, optimizer = prepare(accelerator, reward_model, args)
    # register state of your own here: accelerator.register_for_checkpointing(it). --resume restores its tensors on the
    # CPU, so move them to the device yourself.
    finished_updates = begin_run(accelerator, args)
    pairs = {}  # split: both rewards of each pair, from the latest evaluation
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
            last = mb is mbs[-1]  # gradients are exchanged between devices with the last micro-batch
            accelerator.sync_gradients = last  # for DeepSpeed
            model.require_backward_grad_sync = last  # for DDP
            chosen, rejected, other_logits = pair_rewards(model, mb, pad_id)
            loss = preference_loss(chosen, rejected).sum()
            accelerator.backward(loss * world / args.batch_size)  # x world: DDP and DeepSpeed average over devices
            sums["loss/train"] += loss.detach()
            tie = is_tie(chosen, rejected, chosen.abs() + rejected.abs(), accelerator.mixed_precision)
            sums["accuracy/train"] += ((chosen > rejected) & ~tie).sum()
            sums["rewards/chosen"] += chosen.detach().sum()
            sums["rewards/rejected"] += rejected.detach().sum()
            sums["other_logits/share_negative"] += (other_logits < 0).sum()
            sums["other_logits/mean"] += other_logits.sum()
            sums["other_count"] += torch.ones_like(other_logits).sum()
        grad_norm = optimizer_step(accelerator, model, optimizer, args.max_grad_norm, f"update {update}")

        # ---- 3. log ------------------------------------------------------------------------------
        sums = {key: accelerator.reduce(value, "sum").item() for key, value in sums.items()}
        other_count = max(sums["other_count"], 1)
        metrics = {
            "loss/train": sums["loss/train"] / args.batch_size,
            "accuracy/train": sums["accuracy/train"] / args.batch_size,
            "rewards/margin": (sums["rewards/chosen"] - sums["rewards/rejected"]) / args.batch_size,
            "rewards/chosen": sums["rewards/chosen"] / args.batch_size,
            "rewards/rejected": sums["rewards/rejected"] / args.batch_size,
            "other_logits/share_negative": sums["other_logits/share_negative"] / other_count,
            "other_logits/mean": sums["other_logits/mean"] / other_count,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "episode": episodes.stop,
            "time/update": time.time() - update_start,
            "time/total": time.time() - run_start,
        }
        if update == num_updates or (args.eval_every and update % args.eval_every == 0):
            pairs["validation"] = evaluate_pairs(accelerator, reward_model, data, args, pad_id, "validation")
            metrics["eval/accuracy"] = accuracy_table("validation", pairs["validation"])[0]["accuracy"]
        write_metrics(accelerator, args, metrics, update, num_updates)

    # ---- evaluate (table 5) ----------------------------------------------------------------------
    if args.run_eval:
        for split in data:
            if split not in pairs:  # validation has been evaluated with the last update
                pairs[split] = evaluate_pairs(accelerator, reward_model, data, args, pad_id, split)
    rewards = reference_rewards(accelerator, reward_model, references, args, pad_id)  # (n,)
    title = "rewards of the references, uncentred (table 5)"
    write_table(accelerator, args, "reference_rewards", reference_table(rewards), title)

    # ---- centre (Detail 15) and save -------------------------------------------------------------
    reward_mean = rewards.mean().item()
    reward_model.model.score.reward_mean = reward_mean  # it was 0
    if args.run_eval:
        table = []
        for split in data:
            for pair in pairs[split]:
                pair["chosen_reward"] -= reward_mean
                pair["rejected_reward"] -= reward_mean
            write_table(accelerator, args, f"pairs_{split}", pairs[split])
            table += accuracy_table(split, pairs[split])
        write_table(accelerator, args, "accuracy", table, "validation accuracy (table 5)")
    save_model(accelerator, args, "model", reward_model.finished(), tokenizer)
    accelerator.print(f"done in {time.time() - run_start:.0f} s: {args.output_dir}", flush=True)
    accelerator.end_training()


# ==== forward passes ==============================================================================


def pair_micro_batches(batch: dict, size: int, pad_id: int, device) -> list[dict]:
    """Split a batch of stored pairs into micro-batches of `size` pairs of similar length, which saves padding. Each
    holds the columns of its pairs, the output of pair_rows and `index` (b,), the rows of its pairs in the batch."""
    query_and_chosen = (batch["query_chosen_token"] != pad_id).sum(1)
    rejected = (batch["query_rejected_token_response_label"] != pad_id).sum(1)
    mbs = []
    for index in similar_lengths(query_and_chosen + rejected, size):
        mb = {key: value[index] for key, value in batch.items()}
        mb |= pair_rows(mb, pad_id) | {"index": index}
        mbs.append({key: value.to(device) for key, value in mb.items()})
    return mbs


def pair_rows(batch: dict, pad_id: int) -> dict:
    """Split stored pairs, PAIR_COLUMNS (b, T), into the tokens that both sides share and the rest: query (b, Q)
    left-padded, chosen (b, C) and rejected (b, R) right-padded. chosen_start and rejected_start (b,) count the first
    tokens that still belong to the query, which is 0 unless a template's last token merges with the response."""
    width = min(batch[f"query_{side}_token"].shape[1] for side in ("chosen", "rejected"))
    chosen = batch["query_chosen_token"][:, :width]
    in_response = batch["query_chosen_token_response_label"][:, :width] != pad_id
    in_response |= batch["query_rejected_token_response_label"][:, :width] != pad_id
    is_shared = (chosen == batch["query_rejected_token"][:, :width]) & (chosen != pad_id) & ~in_response
    shared = is_shared.long().cumprod(1).sum(1)  # (b,) number of identical first tokens
    queries = [row[:length] for row, length in zip(chosen, shared, strict=True)]
    pairs = {"query": pad_sequence(queries, batch_first=True, padding_value=pad_id, padding_side="left")}
    for side in ("chosen", "rejected"):
        tokens = batch[f"query_{side}_token"]
        lengths = (tokens != pad_id).sum(1)
        response_lengths = (batch[f"query_{side}_token_response_label"] != pad_id).sum(1)
        responses = [row[start:end] for row, start, end in zip(tokens, shared, lengths, strict=True)]
        pairs[side] = pad_sequence(responses, batch_first=True, padding_value=pad_id)
        pairs[f"{side}_start"] = lengths - response_lengths - shared
    return pairs


def pair_inputs(query, chosen, rejected, pad_id: int) -> tuple[dict, dict]:
    """Combine each pair into one right-padded row `query + chosen + rejected` (b, T). Returns a model's inputs: the
    tokens (b, T), a mask (b, 1, T, T) that hides chosen from rejected, and position ids (b, T) that continue from the
    query in both. Also returns the columns of the query's last token and the response's tokens, for chosen (b, 1 + C)
    and rejected (b, 1 + R)."""
    tokens = right_padded(torch.cat([query, chosen, rejected], 1), pad_id)  # (b, T)
    query_length = (query != pad_id).sum(1, keepdim=True)  # (b, 1)
    chosen_length = (chosen != pad_id).sum(1, keepdim=True)
    t = torch.arange(tokens.shape[1], device=tokens.device)
    is_query = t < query_length  # (b, T)
    is_rejected = t >= query_length + chosen_length
    same_response = is_rejected[:, :, None] == is_rejected[:, None]  # (b, T, T)
    causal = t[:, None] >= t  # (T, T)
    mask = causal & (is_query[:, None] | same_response)
    positions = (t - is_rejected * chosen_length).masked_fill(tokens == pad_id, 0)  # padding gets 0
    inputs = {"input_ids": tokens, "attention_mask": mask[:, None], "position_ids": positions}
    query_end = query_length - 1  # (b, 1), the query's last token, which comes before either response
    columns = {}
    for side, response, start in (("chosen", chosen, 0), ("rejected", rejected, chosen_length)):
        response_columns = query_length + start + torch.arange(response.shape[1], device=tokens.device)
        columns[side] = torch.cat([query_end, response_columns], 1)
        columns[side].clamp_(max=tokens.shape[1] - 1)  # past a response's end, any column will do
    return inputs, columns


def windowed_mask(model, inputs: dict):
    """Return pair_inputs' mask in the form that the model's layers take. A layer with a sliding window sees no position
    further back than its window, just as in a row with a single response."""
    config = getattr(model, "module", model).config  # DDP and DeepSpeed keep the model in `module`
    mask = inputs["attention_mask"]
    window = getattr(config, "sliding_window", None)
    if window is None:
        return mask
    positions = inputs["position_ids"]
    distances = positions[:, :, None] - positions[:, None, :]
    windowed = mask & (distances < window)[:, None]
    if getattr(config, "layer_types", None) is None:  # every layer has the window
        return windowed
    return {"full_attention": mask, "sliding_attention": windowed}


@torch.no_grad()
def check_pairs(model, path: str, splits: list, pad_id: int):
    """End with an error if a pair is too wide for the model (check_positions), or if the model gives a pair in one row
    other states than in two rows because its attention ignores our mask or position ids."""
    widths = [len(rows[0][f"query_{side}_token"]) for rows in splits for side in ("chosen", "rejected")]
    check_positions(model, path, max(widths))
    length = widths[0]
    ids = min(model.get_input_embeddings().num_embeddings, 1000) - 1
    tokens = torch.arange(length + 8, device=model.device)[None] % ids
    tokens += tokens >= pad_id  # every id but [PAD]
    query = tokens[:, : length - 8]
    responses = {"chosen": tokens[:, length - 8 : length], "rejected": tokens[:, length:]}
    inputs, columns = pair_inputs(query, responses["chosen"], responses["rejected"], pad_id)
    inputs["attention_mask"] = windowed_mask(model, inputs)
    problem = f"{path}: {type(model).__name__} cannot process a pair in one row, as {STAGE}.py does"
    with or_fail(problem):
        states = model.base_model(**inputs, use_cache=False).last_hidden_state
        for side, response in responses.items():
            expected = model.base_model(torch.cat([query, response], 1), use_cache=False).last_hidden_state[:, -8:]
            difference = (states[:, columns[side][0, 1:]] - expected).norm() / expected.norm()
            if not difference < 1e-3:
                fail(f"{problem}: its states differ by {difference:.1e}")


def response_rewards(model, tokens: torch.Tensor, pad_id: int) -> torch.Tensor:
    """Return the rewards (b,) of right-padded rows (b, T), read at their last token (Detail 12). Left padding would
    give the same numbers up to rounding (Detail 14)."""
    last = last_token(tokens, pad_id)
    return model(tokens).gather(1, last[:, None]).squeeze(1)


def last_token(tokens: torch.Tensor, pad_id: int) -> torch.Tensor:
    """Return the index (b,) of the last token before the first [PAD] of right-padded rows (b, T), or -1 for an empty
    row (Detail 12)."""
    return (tokens != pad_id).long().cumprod(1).sum(1) - 1


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


def right_padded(tokens: torch.Tensor, pad_id: int) -> torch.Tensor:
    """Return the rows (b, T) with all padding moved to the right, trimmed to the longest row."""
    real_first = (tokens == pad_id).int().argsort(dim=1, stable=True)
    return tokens.gather(1, real_first)[:, : trimmed_width(tokens, pad_id)]


# ==== models ======================================================================================


class ScalarHead(nn.Linear):
    """A reward model's head, (b, T, d) -> (b, T, 1), in float32 even under autocast or in a bfloat16 model. It
    subtracts the constant `reward_mean` (Detail 15)."""

    def forward(self, hidden):
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.float(), self.weight.float(), self.bias.float()) - self.reward_mean


class RewardModel(nn.Module):
    """A transformers sequence classifier with one label that returns its scalar at every position. In training, its
    head has a bias that starts at 0."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.config = model.config
        head = model.score  # a plain nn.Linear without bias
        head.__class__ = ScalarHead
        head.bias = nn.Parameter(torch.zeros(1))
        head.reward_mean = getattr(model.config, "reward_mean", 0.0)

    def forward(self, input_ids, **inputs):
        """Return the reward logits (b, T) of rows (b, T), in float32. For pairs, also pass attention_mask (b, 1, T, T)
        and position_ids (b, T). Right-padded rows need no mask, because no token of a causal model sees what comes
        after it."""
        hidden = self.model.base_model(input_ids, use_cache="past_key_values" in inputs, **inputs).last_hidden_state
        return self.model.score(hidden).squeeze(-1)

    def finished(self):
        """Return the transformers model to save. Its head has a weight alone, because the bias becomes part of the
        config's `reward_mean`. Do not use this RewardModel afterwards."""
        head = self.model.score
        self.config.reward_mean = head.reward_mean - head.bias.item()
        head.bias = None
        return self.model


def new_reward_model(path: str, tokenizer) -> RewardModel:
    """Return the SFT model of a checkpoint folder with a new scalar head: normal weights with standard deviation 1 /
    sqrt(d + 1), and bias 0 (Detail 11)."""
    with or_fail(f"the model in {path} cannot be read"):
        config = without_dropout(AutoConfig.from_pretrained(path, num_labels=1, trust_remote_code=False))
        settings = {"dtype": torch.float32, "trust_remote_code": False}
        model = AutoModelForSequenceClassification.from_pretrained(path, config=config, **settings)
    check_layers(model, path)
    fit_tokenizer(model, tokenizer, path)
    model.config.problem_type = "regression"  # a text-classification pipeline then returns the bare score
    model.score = ScalarHead(model.score.in_features, 1)
    nn.init.normal_(model.score.weight, std=1 / (model.score.in_features + 1) ** 0.5)
    return RewardModel(model)


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
def reference_rewards(accelerator: Accelerator, model, data, args, pad_id: int) -> torch.Tensor:
    """Return the rewards (n,) of a split's reference summaries, in order."""
    rewards = []
    for _, batch in shares(accelerator, data, args.forward_batch_size, "rewards of references"):
        tokens = batch["query_reference_response_token"]
        tokens = tokens[:, : trimmed_width(tokens, pad_id)].to(accelerator.device)
        with accelerator.autocast():
            rewards += response_rewards(model, tokens, pad_id).tolist()
    return torch.tensor(gather_object(rewards), dtype=torch.float64)


def reference_table(rewards: torch.Tensor) -> list[dict]:
    """Return statistics of the rewards (n,) of the references."""
    statistics = {"max": rewards.max(), "mean": rewards.mean(), "min": rewards.min(), "std": rewards.std()}
    return [{"statistic": key, "value": value.item()} for key, value in statistics.items()]


@torch.no_grad()
def evaluate_pairs(accelerator: Accelerator, model, data: DatasetDict, args, pad_id: int, split: str) -> list[dict]:
    """Return both rewards of every pair of a split, in order, with the columns that table 5 groups by."""
    pairs = []
    for _, batch in shares(accelerator, data[split], args.forward_batch_size, f"rewards of {split}"):
        rows = {key: value.to(accelerator.device) for key, value in pair_rows(batch, pad_id).items()}
        with accelerator.autocast():
            chosen, rejected, _ = pair_rewards(model, rows, pad_id)
        tie = is_tie(chosen, rejected, chosen.abs() + rejected.abs(), accelerator.mixed_precision)
        pairs += pair_table(batch, torch.stack([chosen, rejected], 1), tie)
    return gather_object(pairs)


def pair_table(batch: dict, rewards: torch.Tensor, tie: torch.Tensor) -> list[dict]:
    """Return one row per pair: the columns that table 5 groups by (batch, split, policies, confidence; None if
    unknown), both rewards (b, 2) and whether they are a tie (b,)."""
    pairs = []
    for i, (chosen, rejected) in enumerate(rewards.tolist()):
        pair = {key: batch[key][i] for key in ("batch", "split", "policies") if key in batch}
        confidence = batch["extra"][i]["confidence"] if "extra" in batch else None
        pair["confidence"] = None if confidence is None else int(confidence)
        pairs.append(pair | {"chosen_reward": chosen, "rejected_reward": rejected, "tie": tie[i].item()})
    return pairs


def accuracy_table(name: str, pairs: list[dict]) -> list[dict]:
    """Return one split's rows of table 5: the share of pairs whose chosen reward is higher, overall and per batch,
    confidence, split and policy pair (Detail 16). Null values form a group of their own."""
    frame = pandas.DataFrame(pairs, dtype=object)  # otherwise a null would turn integers into floats
    frame["hit"] = (frame["chosen_reward"] > frame["rejected_reward"]) & ~frame["tie"].astype(bool)
    frame["overall"] = "all"
    table = []
    for group in ("overall", "batch", "confidence", "split", "policies"):
        if group not in frame:
            continue
        for value, members in frame.groupby(group, dropna=False):
            if pandas.isna(value):
                value = "null"
            row = {"data": name, "group": group, "value": value, "pairs": len(members)}
            table.append(row | {"accuracy": members["hit"].mean()})
    return table


def write_table(accelerator: Accelerator, args, name: str, rows: list[dict], title: str = ""):
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
    for start in progress(accelerator, range(first, last, size), description):
        index = list(range(start, min(start + size, last)))
        yield index, data[index]


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
