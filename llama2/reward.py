"""Reward model with Llama 2's margins, pair weights and safety labels, a copy of ../reward.py ("Llama 2: Open
Foundation and Fine-Tuned Chat Models", sections 3.2.1 and 3.2.2, tables 27 to 29).

One process:    python llama2/reward.py --model helpful --sft-model-path runs/sft/base/1 --dataset data/llama2/sft \
                    --preference-dataset data/llama2/preference --margin small --run-eval
N processes:    torchrun --nproc_per_node 8 llama2/reward.py --model helpful ... --margin small --run-eval

Training starts from the SFT model with the same name and seed. The run folder (docs/runs.md) holds model/, a sequence
classifier with one label whose config has `reward_mean`, which our scripts subtract, and eval/ with table 5. To see
what differs from reward.py, run `git diff --no-index reward.py llama2/reward.py`.

Shapes: n is the number of rows of a split, b of the pairs or rows in a function's input; T is the width of a row.

The script deviates from the paper and the authors' code on purpose:
- A pair is one row `query + chosen + rejected` (pair_rows), for nearly half the work. The authors run two rows.
- The head's bias is not trained: it cancels in the loss, and Adam would only amplify rounding. The authors train it.
  --safety-coef and --score-l2 do train it.
- The head runs in float32. The authors run it under bf16 autocast, which keeps only three digits of a reward.
- An epoch shows every pair once. In the authors' released runs, every rank shuffled differently, so that their shares
  overlapped and an epoch covered 65.8 % of the pairs.
- The rows left over after the last whole batch are not trained on (92,858 = 1,450 x 64 + 58).
"""

import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from math import ceil, cos, inf, pi
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
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from huggingface_hub import snapshot_download
from rich.progress import track
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

STAGE = "reward_graded"
MICRO_BATCH_SIZES = {"1b": 32, "2.8b": 4, "6.9b": 1}  # per Pythia size: pairs that fit on one 80 GB device
DATASET = "vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144"
PREFERENCE_DATASET = "vwxyzjn/summarize_from_feedback_oai_preprocessing_1706381144"
COLUMNS = ["query", "query_token", "query_reference_response_token"]
ROUNDING = {"no": 1e-6, "bf16": 1e-3}  # of a sum of log-probabilities or of a reward, relative; a rule of thumb
# a label column repeats the tokens of the response, and holds [PAD] everywhere else
PAIR_COLUMNS = ["query_chosen_token", "query_chosen_token_response_label"]
PAIR_COLUMNS += ["query_rejected_token", "query_rejected_token_response_label"]
PREFERENCE_COLUMNS = ["query", "query_token", *PAIR_COLUMNS]
QUERY, CHOSEN, REJECTED, PADDING = range(4)  # segments of a pair's row

# margin of equation 2 by grade (Llama 2, table 27)
MARGINS = {
    "small": {"significantly": 1.0, "better": 2 / 3, "slightly": 1 / 3, "negligibly": 0.0, "none": 0.0},
    "large": {"significantly": 3.0, "better": 2.0, "slightly": 1.0, "negligibly": 0.0, "none": 0.0},
}
# (chosen is safe, rejected is safe) -> Llama 2's safety bin (section 3.2.1); None where a label is missing
SAFETY = {(True, False): "chosen alone safe", (True, True): "both safe", (False, False): "both unsafe"}


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
    output_dir: str = "runs/reward_graded/{model}/{seed}"
    """run folder to write, which must not hold a run yet (unless you pass --resume)"""

    num_train_epochs: float = 1
    """passes over the train split (table 4)"""
    total_episodes: int | None = None
    """number of pairs to train on; default: num_train_epochs passes (table 4: 92,858)"""
    batch_size: int = 64
    """pairs per optimiser step over all devices (table 4)"""
    learning_rate: float = 3e-6
    """peak learning rate; decays over the run by a cosine (table 4)"""
    warmup_share: float = 0.0
    """share of the updates, and then at least 5, over which the learning rate rises to its peak (Llama 2: 0.03)"""
    final_learning_rate: float = 0.0
    """learning rate that the cosine reaches one update after the last (Llama 2: a tenth of the peak)"""
    max_grad_norm: float = 0.0
    """clip gradients to this global norm; 0: no clipping (as in the paper)"""
    margin: Literal["none", "small", "large", "column"] = "none"
    """Llama 2's margin of a pair in the loss (equation 2), by its grade: 1, 2/3, 1/3, 0 (small) or 3, 2, 1, 0 (large);
    column: the number in its column `margin`"""
    score_l2: float = 0.0
    """weight of half the squares of a pair's rewards in the loss (0.001 in the ensemble paper's released code); above
    0, the head's bias is trained"""
    safety_coef: float = 0.0
    """weight of Llama 2's auxiliary loss, which trains the sigmoid of a reward to predict whether a labelled response
    is safe; above 0, the head's bias is trained and the rewards are not centred"""

    eval_every: int = 0
    """compute the validation loss and accuracy every so many updates; 0: only after the last update"""
    run_eval: bool = False
    """after training, write table 5: accuracy per batch, confidence, split and policy pair of every validation split"""
    micro_batch_size: int | None = None
    """pairs per device in one pass of the model; affects memory, speed, rounding; default: fits 80 GB, or 8"""
    mixed_precision: Literal["no", "bf16"] | None = None
    """autocast type; weights in training are float32 (DeepSpeed: a copy); default: bf16 on a GPU (Detail 8)"""
    save_every: int = 0
    """write a checkpoint for --resume every so many updates; 0: never"""
    resume: bool = False
    """continue the run in --output-dir from its newest checkpoint"""
    track: bool = False
    """also log to Weights & Biases (set WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE in the environment)"""


# ==== the algorithm ===============================================================================


def margin_loss(chosen: torch.Tensor, rejected: torch.Tensor, margin: torch.Tensor) -> torch.Tensor:
    """Return the loss per pair (b,), -log sigmoid(chosen - rejected - margin) (equation 2), from rewards and margins
    (b,)."""
    return -F.logsigmoid(chosen - rejected - margin)


def safety_loss(rewards: torch.Tensor, safe: torch.Tensor) -> torch.Tensor:
    """Return Llama 2's auxiliary loss per response (b,) (table 29): the binary cross-entropy of sigmoid(reward) as the
    probability that it is safe, or 0 without a label. rewards (b,); safe (b,) is 1, 0 or nan."""
    known = ~safe.isnan()
    loss = F.binary_cross_entropy_with_logits(rewards.float(), safe.nan_to_num(), reduction="none")
    return loss.masked_fill(~known, 0.0)


def pair_rewards(model, pairs: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the rewards (b,) of the chosen and rejected responses, each read at its last token (Detail 12), and the
    logits at all other response tokens, flattened, which are only logged (Detail 13). `pairs` comes from pair_rows."""
    logits = model(**pair_inputs(model, pairs))  # (b, T)
    chosen_last = pairs["chosen_end"] - 1  # (b, 1)
    rejected_last = pairs["rejected_end"] - 1
    chosen = logits.gather(1, chosen_last).squeeze(1)
    rejected = logits.gather(1, rejected_last).squeeze(1)
    rejected = torch.where(pairs["is_same"], chosen, rejected)  # equal, whatever their rounding
    t = torch.arange(logits.shape[1], device=logits.device)
    is_response = (t >= pairs["query_end"]) & (t <= rejected_last)
    is_other = is_response & (t != chosen_last) & (t != rejected_last)
    return chosen, rejected, logits.detach()[is_other]


def pair_margins(path: str, data, margin: str) -> torch.Tensor:
    """Return the margin (n,) of every pair: 0, the one of its grade, or its column `margin`. Ends with an error if a
    margin is missing, negative or not finite."""
    if margin == "none":
        return torch.zeros(len(data))
    if margin == "column":
        if "margin" not in data.column_names:
            fail(f"--margin column: {path} has no column margin; it has {data.column_names}")
        column = data.with_format(None)["margin"][:]
        margins = pandas.Series(column, dtype="float32").to_list()  # a null becomes nan
    else:
        margins = [MARGINS[margin][grade] for grade in pair_grades(path, data, margin)]
    margins = torch.tensor(margins, dtype=torch.float32)
    is_margin = margins.isfinite() & (margins >= 0)
    for i in (~is_margin).nonzero().flatten().tolist():
        fail(f"--margin {margin}: {path}, train, row {i}: margin {margins[i].item()} is not a number of at least 0")
    return margins


def pair_grades(path: str, data, margin: str) -> list[str]:
    """Return the grade (n,) of every pair: its column `grade`, or the grade of its confidence. Ends with an error if
    the data have neither, if a grade has no margin, or if no pair has a grade."""
    if "grade" in data.column_names:
        grades = data.with_format(None)["grade"][:]
    elif "extra" in data.column_names:
        grades = [confidence_grade(extra["confidence"]) for extra in data.with_format(None)["extra"][:]]
    else:
        fail(f"--margin {margin}: {path} has no column grade or extra.confidence (llama2/preference_dataset.py)")
    for i, grade in enumerate(grades):
        if grade not in MARGINS[margin]:
            known = ", ".join(MARGINS[margin])
            fail(f"--margin {margin}: {path}, train, row {i}: grade {grade!r} is none of {known}")
    if set(grades) == {"none"}:
        fail(f"--margin {margin}: no pair of {path} has a grade, so that no margin would be above 0")
    return grades


def confidence_grade(confidence: int | None) -> str:
    """Return Llama 2's grade for a confidence of TL;DR, which runs from 1 (surely the first) to 9 (surely the second).
    A distance to 5 of 4 is significantly, 3 better, 2 slightly, less negligibly; an unknown confidence is none."""
    if confidence is None:
        return "none"
    distance = abs(int(confidence) - 5)
    return ("negligibly", "negligibly", "slightly", "better", "significantly")[distance]


def pair_weights(data) -> torch.Tensor:
    """Return the weight (n,) of every pair, or 1 if there is no such column. A tie stored in both orders has weight 0.5
    in each (llama2/preference_dataset.py)."""
    if "weight" not in data.column_names:
        return torch.ones(len(data))
    return torch.tensor(data.with_format(None)["weight"][:], dtype=torch.float32)


def safety_labels(data) -> torch.Tensor:
    """Return whether chosen and rejected are safe, (n, 2) of 1, 0 and nan. It is nan if there is no label or no such
    column."""
    sides = [f"{side}_safe" for side in ("chosen", "rejected")]
    if not set(sides) <= set(data.column_names):
        return torch.full((len(data), 2), torch.nan)
    labels = data.with_format("pandas").select_columns(sides)[:]
    return torch.tensor(labels.astype("float32").to_numpy())


def warmed_up(args, update: int, num_updates: int) -> float:
    """Return the learning rate of an update, which begins at 1: a linear rise, then a cosine (section 3.2.2)."""
    warmup = max(5, ceil(args.warmup_share * num_updates)) if args.warmup_share else 0
    if update <= warmup:
        return args.learning_rate * update / warmup
    done = (update - 1 - warmup) / (num_updates - warmup)
    decaying = args.learning_rate - args.final_learning_rate
    return args.final_learning_rate + decaying * 0.5 * (1 + cos(pi * done))


def is_tie(chosen: torch.Tensor, rejected: torch.Tensor, size: torch.Tensor, precision: str) -> torch.Tensor:
    """Return (b,) whether two scores are too close to call: another micro-batch size could swap them by rounding alone.
    `size` (b,) sums the magnitudes that were rounded."""
    return (chosen - rejected).abs() <= ROUNDING[precision] * size


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
    world = accelerator.num_processes
    args.micro_batch_size = args.micro_batch_size or min(MICRO_BATCH_SIZES.get(args.model, 8), args.batch_size // world)
    sft_folder = local_checkpoint("--sft-model-path", args.sft_model_path)
    tokenizer = load_tokenizer(sft_folder)
    pad_id = tokenizer.pad_token_id
    references = load_splits("--dataset", args.dataset, COLUMNS, tokenizer)["train"]
    data = load_splits("--preference-dataset", args.preference_dataset, PREFERENCE_COLUMNS, tokenizer)
    terms = {"margin": pair_margins(args.preference_dataset, data["train"], args.margin)}  # (n,)
    terms["weight"] = pair_weights(data["train"])  # (n,)
    terms["safe"] = safety_labels(data["train"])  # (n, 2)
    for split in data:  # drop pairs whose chosen response is unsafe and the other safe (Llama 2, section 3.2.1)
        is_wrong = (safety_labels(data[split]) == torch.tensor([0.0, 1.0])).all(1)
        if split == "train":
            terms = {key: value[~is_wrong] for key, value in terms.items()}
        if is_wrong.any():
            accelerator.print(f"{split}: {is_wrong.sum()} pairs left out, because only the chosen response is unsafe")
            data[split] = data[split].select((~is_wrong).nonzero().flatten().tolist())
    if args.safety_coef and terms["safe"].isnan().all():
        fail(f"--safety-coef {args.safety_coef}: use 0, or data with chosen_safe and rejected_safe")
    ties = int((terms["weight"] != 1).sum())
    if ties:
        count = f"{ties} of the {len(terms['weight']):,} train pairs"
        accelerator.print(f"{count} have a weight other than 1 (a tie is stored twice, with 0.5 each)")
    train = data.pop("train").select_columns(PAIR_COLUMNS)  # all other splits are for validation
    if not args.run_eval:
        data = {"validation": data["validation"]}
    args.total_episodes = args.total_episodes or int(args.num_train_epochs * len(train))
    num_updates = args.total_episodes // args.batch_size
    if num_updates == 0:
        fail(f"--batch-size {args.batch_size} is more than the {args.total_episodes} pairs to train on")
    if args.batch_size % world:
        fail(f"--batch-size {args.batch_size} is no multiple of {world} processes")
    # In a pair's row, the position ids of rejected restart behind the query, so it needs no more than the wider column.
    widths = [len(rows[0][key]) for rows in (train, *data.values()) for key in PAIR_COLUMNS]
    widths.append(len(references[0]["query_reference_response_token"]))
    reward_model = new_reward_model(sft_folder, tokenizer, max(widths))
    check_pairs(reward_model.model.to(accelerator.device), sft_folder, max(widths), pad_id)
    reward_model.bias.requires_grad_(args.safety_coef > 0 or args.score_l2 > 0)  # else it cancels
    # `model` is `reward_model` or wraps it. Both run under autocast from here on, because accelerate replaces their
    # forward (under DeepSpeed, the weights themselves are bfloat16).
    model, optimizer = prepare(accelerator, reward_model, args)
    # change here: pass state of your own to accelerator.register_for_checkpointing. --resume restores it on the CPU.
    inputs = {"sft_model_path": sft_folder, "dataset": references, "preference_dataset": train}
    finished_updates = start_or_resume(accelerator, args, inputs)
    tables = {}  # split: its pairs with their rewards, from the latest evaluation
    run_start = time.time()
    # After each update, updates() writes a checkpoint if one is due, and ends the run if a signal has come.
    for update in updates(accelerator, args, finished_updates, num_updates):
        # ---- 1. pairs ----------------------------------------------------------------------------
        update_start = time.time()
        episodes = range((update - 1) * args.batch_size, update * args.batch_size)
        order = data_order(len(train), args.seed, episodes.start, episodes.stop)
        rows = own_share(accelerator, order)
        batch = train[rows.tolist()] | {key: value[rows] for key, value in terms.items()}
        mbs = pair_micro_batches(batch, args.micro_batch_size, pad_id, accelerator.device)

        # ---- 2. one step of the optimiser --------------------------------------------------------
        learning_rate = warmed_up(args, update, num_updates)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        sums = defaultdict(float)
        for mb in accumulate(accelerator, model, mbs):
            chosen, rejected, other_logits = pair_rewards(model, mb)
            loss = (mb["weight"] * margin_loss(chosen, rejected, mb["margin"])).sum()
            if args.score_l2:
                loss = loss + args.score_l2 * (mb["weight"] * 0.5 * (chosen.square() + rejected.square())).sum()
            if args.safety_coef:
                safety = safety_loss(chosen, mb["safe"][:, 0]) + safety_loss(rejected, mb["safe"][:, 1])
                safety_sum = (mb["weight"] * safety).sum()
                loss = loss + args.safety_coef * safety_sum
                sums["loss/safety"] += safety_sum.detach()
            accelerator.backward(loss * world / args.batch_size)  # DDP and DeepSpeed average over devices
            sums["loss/train"] += loss.detach()
            tie = is_tie(chosen, rejected, chosen.abs() + rejected.abs(), accelerator.mixed_precision)
            sums["accuracy/train"] += ((chosen > rejected) & ~tie).sum()
            sums["rewards/margin"] += (chosen - rejected).detach().sum()
            sums["rewards/chosen"] += chosen.detach().sum()
            sums["rewards/rejected"] += rejected.detach().sum()
            sums["other_logits/share_negative"] += (other_logits < 0).sum()
            sums["other_logits/mean"] += other_logits.sum()
            sums["other_logits/count"] += torch.tensor(len(other_logits), device=accelerator.device)
        grad_norm = optimizer_step(accelerator, model, optimizer, args.max_grad_norm, f"update {update}")

        # ---- 3. log ------------------------------------------------------------------------------
        totals = {key: accelerator.reduce(value, "sum").item() for key, value in sums.items()}
        other_logits = totals.pop("other_logits/count") or 1
        counts = {"other_logits/share_negative": other_logits, "other_logits/mean": other_logits}
        metrics = {key: total / counts.get(key, args.batch_size) for key, total in totals.items()}
        metrics |= {
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "episode": episodes.stop,
            "time/update": time.time() - update_start,
            "time/total": time.time() - run_start,
        }
        if update == num_updates or (args.eval_every and update % args.eval_every == 0):
            tables["validation"] = evaluate_pairs(accelerator, reward_model, data, args, pad_id, "validation")
            metrics["eval/loss"] = mean_pair_loss(tables["validation"])
            metrics["eval/accuracy"] = tables["validation"]["hit"].mean()
        write_metrics(accelerator, args, metrics, update, num_updates)

    # ---- centre (Detail 15), evaluate (table 5), save --------------------------------------------
    rewards = reference_rewards(accelerator, reward_model, references, args, pad_id)  # (n,)
    statistics = {"max": rewards.max(), "mean": rewards.mean(), "min": rewards.min(), "std": rewards.std()}
    rows = [{"statistic": key, "value": value.item()} for key, value in statistics.items()]
    write_table(accelerator, args, "reference_rewards", rows, "rewards of the references, uncentred (table 5)")
    reward_mean = rewards.mean().item()
    if args.safety_coef:  # training has put safe responses above 0 and others below
        reward_mean = 0.0
    if args.run_eval:
        rows = []
        for split in data:
            if split not in tables:  # the last update has evaluated validation
                tables[split] = evaluate_pairs(accelerator, reward_model, data, args, pad_id, split)
            table = tables[split].drop(columns="hit")
            for side in ("chosen_reward", "rejected_reward"):
                table[side] = table[side] - reward_mean
            write_table(accelerator, args, f"pairs_{split}", table)
            rows += accuracy_table(split, tables[split])
        write_table(accelerator, args, "accuracy", rows, "validation accuracy (table 5)")
    reward_model.reward_mean = reward_mean  # last, because all that is above needs uncentred rewards
    save_model(accelerator, args, "model", reward_model.to_transformers(), tokenizer)
    accelerator.print(f"done in {time.time() - run_start:.0f} s: {args.output_dir}", flush=True)
    accelerator.end_training()


# ==== forward passes ==============================================================================


def pair_micro_batches(batch: dict, size: int, pad_id: int, device) -> list[dict]:
    """Split a batch of stored pairs into micro-batches of `size` pairs of similar length, which saves padding. Each
    holds the columns of its pairs, the output of pair_rows and `index` (b,), the rows of its pairs in the batch."""
    chosen_lengths = (batch["query_chosen_token"] != pad_id).sum(1)  # with the query, once
    rejected_lengths = (batch["query_rejected_token_response_label"] != pad_id).sum(1)  # the response alone
    longest_first = (chosen_lengths + rejected_lengths).argsort(descending=True, stable=True)
    mbs = []
    for index in longest_first.split(size):
        mb = {key: value[index] for key, value in batch.items()}
        mb |= pair_rows(mb, pad_id) | {"index": index}
        mbs.append({key: value.to(device) for key, value in mb.items()})
    return mbs


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

    Returns
        tokens, segments, position_ids (b, T)
        has_label (b, T): whether a token has a response label; the loss of dpo.py counts these tokens
        query_end, chosen_end, rejected_end (b, 1): the column behind the last token of each
        is_same (b,): whether both responses are equal

    A tokenizer may merge the end of the query with the start of a response. Such a token has no label. If both rows
    have the same one, it is the last token of the query, and else the first token of each response."""
    chosen, chosen_labels, rejected, rejected_labels = (batch[key] for key in PAIR_COLUMNS)
    # the query: the tokens that both rows begin with, as far as they have no label
    width = min(chosen.shape[1], rejected.shape[1])
    is_equal = chosen[:, :width] == rejected[:, :width]
    is_labelled = (chosen_labels[:, :width] != pad_id) | (rejected_labels[:, :width] != pad_id)
    is_query = is_equal & ~is_labelled & (chosen[:, :width] != pad_id)
    query_end = is_query.long().cumprod(1).sum(1, keepdim=True)
    chosen_end = (chosen != pad_id).sum(1, keepdim=True)
    rejected_alone = (rejected != pad_id).sum(1, keepdim=True)  # the length of its own row, query included
    rejected_end = chosen_end + rejected_alone - query_end

    # the row: chosen's, then rejected's without the query. A stable sort by "is it [PAD]" moves all [PAD] to the end.
    without_query = rejected.masked_fill(torch.arange(rejected.shape[1]) < query_end, pad_id)
    tokens = torch.cat([chosen, without_query], 1)
    labels = torch.cat([chosen_labels, rejected_labels], 1)
    rounded = ceil(int(rejected_end.max()) / 16) * 16  # each new shape costs memory and, on a GPU, time
    columns = (tokens == pad_id).int().argsort(dim=1, stable=True)[:, :rounded]
    tokens = tokens.gather(1, columns)
    labels = labels.gather(1, columns)
    t = torch.arange(tokens.shape[1])
    segments = (t >= query_end).long() + (t >= chosen_end) + (t >= rejected_end)
    positions = torch.where(segments == REJECTED, t - chosen_end + query_end, t)
    return {
        "tokens": tokens,
        "segments": segments,
        "position_ids": positions.masked_fill(segments == PADDING, 0),
        "has_label": labels != pad_id,
        "query_end": query_end,
        "chosen_end": chosen_end,
        "rejected_end": rejected_end,
        "is_same": is_equal.all(1) & (chosen_end == rejected_alone).squeeze(1),
    }


def pair_inputs(model, pairs: dict) -> dict:
    """Return a model's inputs for the rows of pair_rows: tokens, mask (b, 1, T, T) and position ids. A layer with a
    sliding window sees no position further back than its window, just as in a row with a single response."""
    segments = pairs["segments"]
    positions = pairs["position_ids"]
    # (b, T, T): may the row's token see the column's? transformers hands a 4-D mask to SDPA as it is, True is visible.
    same_text = (segments == QUERY)[:, None] | (segments[:, :, None] == segments[:, None])
    mask = same_text.tril()[:, None]  # (b, 1, T, T), causal
    config = getattr(model, "module", model).config  # DDP and DeepSpeed keep the model in `module`
    window = getattr(config, "sliding_window", None)
    if window is not None:
        distances = positions[:, :, None] - positions[:, None]
        windowed = mask & (distances < window)[:, None]
        if getattr(config, "layer_types", None) is None:  # every layer has the window, as in Mistral
            mask = windowed
        else:  # some have, as in Gemma 3: transformers takes one mask per type of layer
            mask = {"full_attention": mask, "sliding_attention": windowed}
    return {"input_ids": pairs["tokens"], "attention_mask": mask, "position_ids": positions}


@torch.no_grad()
def check_pairs(model, path: str, width: int, pad_id: int):
    """End with an error unless a model gives a rejected response the same states in its pair's row as in a row of its
    own, for rows of up to `width` tokens. They differ if its attention ignores our mask or position ids."""
    problem = f"{path}: {type(model).__name__} cannot process a pair in one row, as {Path(__file__).name} does"
    ids = torch.tensor([i for i in range(101) if i != pad_id])
    chosen = ids[torch.arange(width) % 100][None]  # (1, width); the first half is the query
    rejected = chosen.clone()
    rejected[:, width // 2 :] = chosen[:, width // 2 :].flip(1)
    is_query = torch.arange(width) < width // 2
    columns = [chosen, chosen.masked_fill(is_query, pad_id), rejected, rejected.masked_fill(is_query, pad_id)]
    [pair] = pair_micro_batches(dict(zip(PAIR_COLUMNS, columns, strict=True)), 1, pad_id, model.device)
    with or_fail(problem):
        states = model.base_model(**pair_inputs(model, pair), use_cache=False).last_hidden_state
        alone = model.base_model(rejected.to(model.device), use_cache=False).last_hidden_state
    is_rejected = pair["segments"] == REJECTED
    expected = alone[0, pair["position_ids"][is_rejected]]  # a position is a column in the row of its own
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
    `reward_mean` of its config (Detail 15). The head computes in float32, even under autocast or in a bfloat16
    model. It has a bias that starts at 0 (Detail 11), which transformers' own head lacks."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.config = model.config
        # A float, and not part of the trained bias, which a bfloat16 model would round.
        self.reward_mean = getattr(model.config, "reward_mean", 0.0)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, input_ids, **inputs):
        """Return the rewards (b, T) of right-padded rows (b, T), which need no mask, because the model is causal. For
        pairs in one row (reward.py), also pass attention_mask (b, 1, T, T) and position_ids (b, T)."""
        hidden = self.model.base_model(input_ids, use_cache=False, **inputs).last_hidden_state
        with torch.autocast(hidden.device.type, enabled=False):
            rewards = F.linear(hidden.float(), self.model.score.weight.float(), self.bias.float())
        return rewards.squeeze(-1) - self.reward_mean

    def to_transformers(self):
        """Return the transformers model to save, with the bias as part of its config's `reward_mean`."""
        self.config.reward_mean = self.reward_mean - self.bias.item()
        return self.model


def new_reward_model(path: str, tokenizer, width: int = 0) -> RewardModel:
    """Return the SFT model of a checkpoint folder, for rows of up to `width` tokens, with a new scalar head: normal
    weights with standard deviation 1 / sqrt(d + 1), and bias 0 (Detail 11). It stays in evaluation mode even while it
    is trained, so it has no dropout (Detail 7)."""
    settings = {"dtype": torch.float32, "trust_remote_code": False, "output_loading_info": True}
    with or_fail(f"the model in {path} cannot be read"):
        model, report = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, **settings)
    check_model(model, path, width, set(report["missing_keys"]) - {"score.weight"})
    fit_embeddings(model, path, tokenizer)
    # a text-classification pipeline then returns the bare score; the base may have been a reward model itself
    model.config.update({"problem_type": "regression", "reward_mean": 0.0})
    nn.init.normal_(model.score.weight, std=1 / (model.score.in_features + 1) ** 0.5)
    return RewardModel(model)


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


# ==== evaluation ==================================================================================


@torch.no_grad()
def reference_rewards(accelerator: Accelerator, model, data, args, pad_id: int) -> torch.Tensor:
    """Return the rewards (n,) of a split's reference summaries, in order."""
    rewards = []
    for _, batch in own_batches(accelerator, data, args.micro_batch_size, "rewards of references"):
        tokens = batch["query_reference_response_token"]
        longest = int((tokens != pad_id).sum(1).max())
        tokens = tokens[:, :longest].to(accelerator.device)
        rewards += response_rewards(model, tokens, pad_id).tolist()
    return torch.tensor(gather_object(rewards), dtype=torch.float64)


@torch.no_grad()
def evaluate_pairs(accelerator: Accelerator, model, data: dict, args, pad_id: int, split: str) -> pandas.DataFrame:
    """Return the pair_table of a split."""
    rewards = []
    pairs = data[split].select_columns(PAIR_COLUMNS)
    for _, batch in own_batches(accelerator, pairs, args.micro_batch_size, f"rewards of {split}"):
        rows = {key: value.to(accelerator.device) for key, value in pair_rows(batch, pad_id).items()}
        chosen, rejected, _ = pair_rewards(model, rows)
        rewards += torch.stack([chosen, rejected], 1).tolist()
    rewards = torch.tensor(gather_object(rewards))  # (n, 2)
    tie = is_tie(rewards[:, 0], rewards[:, 1], rewards.abs().sum(1), accelerator.mixed_precision)
    return pair_table(data[split], rewards, tie)


def pair_table(data, rewards: torch.Tensor, tie: torch.Tensor) -> pandas.DataFrame:
    """Return one row per pair of a split: what table 5 groups by (batch, split, policies, confidence; None if unknown),
    Llama 2's grade (from the confidence if there is no such column), its safety bin (section 3.2.1), both rewards
    (n, 2), whether they are a tie (n,), and `hit`, whether chosen's is higher and no tie."""
    data = data.with_format(None).flatten()  # makes extra["confidence"] a column
    groups = ("batch", "split", "policies", "extra.confidence")
    columns = {key: data[key][:] for key in groups if key in data.column_names}
    columns["confidence"] = columns.pop("extra.confidence", len(data) * [None])
    columns["grade"] = [confidence_grade(confidence) for confidence in columns["confidence"]]
    if "grade" in data.column_names:
        columns["grade"] = data["grade"][:]
    if "chosen_safe" in data.column_names:
        labels = zip(data["chosen_safe"][:], data["rejected_safe"][:], strict=True)
        columns["safety"] = [SAFETY.get(pair) for pair in labels]
    columns["chosen_reward"] = rewards[:, 0].tolist()
    columns["rejected_reward"] = rewards[:, 1].tolist()
    columns["tie"] = tie.tolist()
    columns["hit"] = ((rewards[:, 0] > rewards[:, 1]) & ~tie).tolist()
    return pandas.DataFrame(columns, dtype=object)  # otherwise a null would turn integers into floats


def mean_pair_loss(pairs: pandas.DataFrame) -> float:
    """Return the mean of -log sigmoid(chosen - rejected) (equation 1) over the pairs of a pair_table."""
    differences = pairs["chosen_reward"] - pairs["rejected_reward"]
    return -F.logsigmoid(torch.tensor(differences.tolist())).mean().item()


def accuracy_table(name: str, pairs: pandas.DataFrame) -> list[dict]:
    """Return one split's rows of table 5: the share of hits in its pair_table, and the mean gap between both rewards,
    overall and per batch, confidence, grade, safety bin, split and policy pair (Detail 16). Null values form a group of
    their own."""
    gap = (pairs["chosen_reward"] - pairs["rejected_reward"]).astype(float)
    pairs = pairs.assign(overall="all", gap=gap)
    table = []
    for group in ("overall", "batch", "confidence", "grade", "safety", "split", "policies"):
        if group in pairs:
            values = pairs[group].where(pairs[group].notna(), "null")
            for value, members in pairs.groupby(values):
                row = {"data": name, "group": group, "value": value, "pairs": len(members)}
                table.append(row | {"accuracy": members["hit"].mean(), "gap": members["gap"].mean()})
    return table


def write_table(accelerator: Accelerator, args, name: str, rows, title: str = ""):
    """Write rows as a CSV file in eval/ and, if there is a title, print them. Call it on every process."""
    frame = pandas.DataFrame(rows)
    with writing(accelerator, Path(args.output_dir, "eval", f"{name}.csv")) as partial:
        if accelerator.is_main_process:
            frame.to_csv(partial, index=False)
    if title:
        accelerator.print(f"\n{title}\n{frame.to_string(index=False)}\n")


def own_batches(accelerator: Accelerator, data, size: int, description: str):
    """Yield (row indices, rows) of this process's part of a split, up to `size` rows at a time. The parts follow each
    other, so gather_object returns the results of all processes in the order of the rows."""
    first = len(data) * accelerator.process_index // accelerator.num_processes
    last = len(data) * (accelerator.process_index + 1) // accelerator.num_processes
    for start in track(range(first, last, size), description, disable=not accelerator.is_main_process):
        index = list(range(start, min(start + size, last)))
        yield index, data[index]


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
