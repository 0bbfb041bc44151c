"""Reward model on pairwise preferences: the second stage of "The N+ Implementation Details of RLHF with PPO" (section
6, Details 10 to 16, tables 4 and 5).

One process:    python reward.py --model nano-xs --batch-size 32 --learning-rate 1e-3 --run-eval
N processes:    torchrun --nproc_per_node 8 reward.py --model 1b --seed 44413 --run-eval
Paper scale:    accelerate launch --config_file benchmark/accelerate/zero2.yaml reward.py --model 6.9b --seed 44413

Starts from the SFT model of the same name and seed. The run folder holds model/ (a sequence classifier with one label,
whose head has a bias that plain transformers ignores), metrics.jsonl, args.json, TensorBoard files, eval/ (table 5) and
checkpoints/. The algorithm comes first, plumbing last. Another paper: `git diff --no-index reward.py llama2/reward.py`.

Deviations from the paper and its code, each on purpose:
- a pair is one row `query + chosen + rejected` in which `rejected` does not see `chosen` and its positions restart
  after the query: the same rewards for nearly half the work.
- the head's bias is not trained: it cancels in the loss, so that Adam would only amplify rounding; it is set once,
  after training, by Detail 15 (the paper's code stores it in the config and subtracts it).
- the head runs in float32 under bf16 autocast, which would keep three digits of a reward.
- an epoch shows every pair once; the released runs shuffled differently on every rank, and showed 65.8 % of them.
- the rows left over after the last whole batch are not trained on (the authors trained on 92,832 of 92,858 pairs too).
"""

import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import asdict, dataclass
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
from rich.progress import Progress, TextColumn
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, DynamicCache

STAGE = "reward"
PRESETS = {"1b": 8, "2.8b": 4, "6.9b": 1}  # Pythia's sizes: pairs of a micro-batch that fit one 80 GB device
DATASET = "vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144"
PREFERENCE_DATASET = "vwxyzjn/summarize_from_feedback_oai_preprocessing_1706381144"
COLUMNS = ["query", "query_token", "query_reference_response_token", "reference_response_token"]
PAIR_COLUMNS = [f"query_{side}_token{suffix}" for side in ("chosen", "rejected") for suffix in ("", "_response_label")]
PREFERENCE_COLUMNS = ["query", "query_token", *PAIR_COLUMNS]


@dataclass
class Args:
    model: str = "1b"
    """name of the run: 1b, 2.8b, 6.9b or any other; the weights come from --sft-model-path"""
    seed: int = 44413
    """seed of the head and the data order (paper: 44413, 55513, 66613, 77713)"""
    sft_model_path: str = "runs/sft/{model}/{seed}"
    """SFT model: run folder, checkpoint folder or Hub id[@revision]"""
    dataset: str = "data/tldr/sft" if Path("data/tldr/sft").exists() else DATASET
    """SFT data, whose reference summaries centre the rewards (Detail 15): folder or Hub id[@revision]"""
    preference_dataset: str = "data/tldr/preference" if Path("data/tldr/preference").exists() else PREFERENCE_DATASET
    """preference data: folder or Hub id[@revision]"""
    output_dir: str = "runs/reward/{model}/{seed}"
    """run folder"""

    num_train_epochs: float = 1
    """passes over the train split (table 4)"""
    total_episodes: int | None = None
    """pairs to train on; default num_train_epochs passes (table 4: 92,858)"""
    batch_size: int = 64
    """pairs per optimiser step over all devices (table 4)"""
    learning_rate: float = 3e-6
    """peak learning rate, cosine to 0 over the run (table 4)"""
    adam_eps: float = 1e-5
    """AdamW's epsilon (table 4)"""
    weight_decay: float = 0.01
    """AdamW's weight decay (torch's default, as in the paper's code)"""
    max_grad_norm: float = 0.0
    """gradient norm to clip at; 0: no clipping (paper)"""

    eval_every: int = 0
    """updates between validation accuracies; 0: after the last update only"""
    run_eval: bool = False
    """after training, write table 5: accuracy per batch, confidence, split and policy pair of every validation split"""
    micro_batch_size: int | None = None
    """pairs per device and forward/backward pass: memory only, never the result; default: what fits 80 GB, or 8"""
    forward_batch_size: int | None = None
    """pairs or rows per device in passes without gradient (evaluation, centring); default: four micro-batches"""
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


def preference_loss(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Equation 1 per pair: -log sigmoid(chosen - rejected). Rewards (b,) -> (b,)."""
    return -F.logsigmoid(chosen - rejected)


def pair_rewards(model, query, chosen, rejected, pad_id: int):
    """Rewards of both responses (right-padded) to a shared query (left-padded), which is run once: chosen (b,),
    rejected (b,), and the logits (n,) at the responses' other tokens, which are only looked at (Detail 13)."""
    prefix, inputs, columns = pair_inputs(query, chosen, rejected, pad_id)
    cache = DynamicCache()
    if prefix.shape[1]:
        model(prefix, past_key_values=cache)
    logits = model(**inputs, past_key_values=cache)  # (b, S)
    rewards, others = [], []
    for response, at in zip((chosen, rejected), columns, strict=True):
        own, last = logits.gather(1, at), 1 + last_token(response, 0, pad_id)[:, None]  # 0 where the response is empty
        rewards.append(own.gather(1, last).squeeze(1))
        place = torch.arange(own.shape[1], device=own.device)
        others.append(own.detach()[(place > 0) & (place < last)])
    return rewards[0], rewards[1], torch.cat(others)


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


def new_reward_model(path: str, tokenizer) -> RewardModel:
    """The SFT model of a checkpoint folder with a new scalar head: weights normal with standard deviation
    1 / sqrt(d + 1), bias 0 (Detail 11)."""
    settings = {"dtype": torch.float32, "attn_implementation": "sdpa", "trust_remote_code": False}
    with or_fail(f"the model in {path} cannot be read"):
        config = without_dropout(AutoConfig.from_pretrained(path, num_labels=1, trust_remote_code=False))
        config.pad_token_id = tokenizer.pad_token_id
        model = AutoModelForSequenceClassification.from_pretrained(path, config=config, **settings)
    if (rows := model.get_input_embeddings().num_embeddings) < len(tokenizer) - 1:
        fail(f"{path}: {rows} embeddings do not fit its tokenizer of {len(tokenizer) - 1} ids and [PAD]: not a pair")
    model.resize_token_embeddings(max(rows, len(tokenizer)), mean_resizing=False)
    model.score = ScalarHead(model.score.in_features, 1)
    nn.init.normal_(model.score.weight, std=1 / (model.score.in_features + 1) ** 0.5)
    nn.init.zeros_(model.score.bias)
    return RewardModel(model)


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
    args.forward_batch_size = args.forward_batch_size or 4 * args.micro_batch_size
    world, per_rank = accelerator.num_processes, args.batch_size // accelerator.num_processes
    sft_folder = checkpoint_folder("--sft-model-path", args.sft_model_path)
    tokenizer = load_tokenizer(sft_folder)
    pad_id = tokenizer.pad_token_id
    references = load_splits("--dataset", args.dataset, COLUMNS, tokenizer)["train"]
    data = load_splits("--preference-dataset", args.preference_dataset, PREFERENCE_COLUMNS, tokenizer)
    if "weight" in data["train"].column_names and data["train"].unique("weight") != [1.0]:
        fail(f"--preference-dataset {args.preference_dataset}: pairs of other weights than 1 are for llama2/reward.py")
    train = data["train"].select_columns(PAIR_COLUMNS)
    if args.total_episodes is None:
        args.total_episodes = int(args.num_train_epochs * len(train))
    num_updates = args.total_episodes // args.batch_size
    if num_updates == 0 or args.batch_size % world:
        fail(f"--batch-size {args.batch_size}: above {args.total_episodes} pairs, or no multiple of {world} processes")
    reward_model = new_reward_model(sft_folder, tokenizer)
    reward_model.model.score.bias.requires_grad_(False)  # cancels in the loss; set by Detail 15 below
    model, optimizer = prepare(accelerator, reward_model, args)
    # state that an edit carries from update to update: accelerator.register_for_checkpointing(it) before this line
    first = begin_run(accelerator, args)

    # ---- train -----------------------------------------------------------------------------------
    begin = time.time()
    for update in updates(accelerator, args, first, num_updates):
        start = time.time()
        learning_rate = args.learning_rate * 0.5 * (1 + cos(pi * (update - 1) / num_updates))  # cosine to 0 (table 4)
        for group in optimizer.param_groups:  # a resumed optimiser has those of its checkpoint
            group |= {"lr": learning_rate, "eps": args.adam_eps, "weight_decay": args.weight_decay}
        order = data_order(len(train), args.seed, (update - 1) * args.batch_size, update * args.batch_size)
        batch = train[order[accelerator.process_index * per_rank :][:per_rank].tolist()]
        groups = pair_micro_batches(batch, args.micro_batch_size, pad_id, accelerator.device)
        sums = defaultdict(float)
        for i, (_, pairs) in enumerate(groups):
            accelerator.sync_gradients = model.require_backward_grad_sync = i == len(groups) - 1  # exchange gradients
            rows = pairs["query"], pairs["chosen"], pairs["rejected"]
            chosen, rejected, others = pair_rewards(model, *rows, pad_id)
            loss = preference_loss(chosen, rejected).sum()
            accelerator.backward(loss * world / args.batch_size)  # x world: DDP and DeepSpeed average over devices
            sums["loss/train"] += loss.detach()
            sums["accuracy/train"] += (chosen > rejected).sum()
            sums["rewards/chosen"] += chosen.detach().sum()
            sums["rewards/rejected"] += rejected.detach().sum()
            sums["other_logits/share_negative"] += (others < 0).sum()
            sums["other_logits/mean"] += others.sum()
            sums["other_logits/count"] += torch.ones_like(others).sum()
        grad_norm = optimizer_step(accelerator, model, optimizer, args.max_grad_norm, f"update {update}")

        # ---- log ---------------------------------------------------------------------------------
        sums = {key: accelerator.reduce(value, "sum").item() for key, value in sums.items()}
        counts = {"other_logits": max(sums.pop("other_logits/count"), 1)}
        metrics = {key: value / counts.get(key.partition("/")[0], args.batch_size) for key, value in sums.items()}
        metrics["rewards/margin"] = (sums["rewards/chosen"] - sums["rewards/rejected"]) / args.batch_size
        metrics |= {"grad_norm": grad_norm, "learning_rate": learning_rate, "episode": update * args.batch_size}
        metrics |= {"time/update": time.time() - start, "time/total": time.time() - begin}
        if update == num_updates or (args.eval_every and update % args.eval_every == 0):
            rows = evaluate_pairs(accelerator, reward_model, data["validation"], args, pad_id, "validation")
            metrics["eval/accuracy"] = accuracy_table("validation", rows)[0]["accuracy"]
        write_metrics(accelerator, args, metrics, update, num_updates)

    # ---- centre (Detail 15), save, evaluate (table 5) --------------------------------------------
    rewards = reference_rewards(accelerator, reward_model, references, args, pad_id, left=False)
    reward_model.model.score.bias.data = -rewards.mean(0, keepdim=True).float().to(accelerator.device)
    save_model(accelerator, args, "model", reward_model.model, accelerator.get_state_dict(model), "model.", tokenizer)
    centred = reference_rewards(accelerator, reward_model, references, args, pad_id, left=False)
    sample = references.take(min(256, len(references)))
    difference = reference_rewards(accelerator, reward_model, sample, args, pad_id, left=True) - centred[: len(sample)]
    statistics = {"max": rewards.max(), "mean": rewards.mean(), "min": rewards.min(), "std": rewards.std()}
    statistics |= {"mean_after_centring": centred.mean(), "left_minus_right_padding_mean": difference.mean()}
    statistics |= {"left_minus_right_padding_max_abs": difference.abs().max()}
    statistics = [{"statistic": key, "value": value.item()} for key, value in statistics.items()]
    write_table(accelerator, args, "reference_rewards", statistics, "rewards of the references, uncentred (table 5)")
    table = []
    for split in [split for split in data if split != "train" and args.run_eval]:
        rows = evaluate_pairs(accelerator, reward_model, data[split], args, pad_id, split)
        table += accuracy_table(split, rows)
        write_table(accelerator, args, f"pairs_{split}", rows)
    if args.run_eval:
        write_table(accelerator, args, "accuracy", table, "validation accuracy (table 5)")
    accelerator.print(f"done in {time.time() - begin:.0f} s: {args.output_dir}", flush=True)
    accelerator.end_training()


# ==== evaluation ==================================================================================


def pair_groups(batch: dict, i: int) -> dict:
    """What table 5 groups pair i of a batch by: batch, split, policies, confidence (None where unknown)."""
    groups = {key: batch[key][i] for key in ("batch", "split", "policies") if key in batch}
    confidence = batch["extra"][i]["confidence"] if "extra" in batch else None
    return groups | {"confidence": None if confidence is None else int(confidence)}


@torch.no_grad()
def evaluate_pairs(accelerator: Accelerator, model, data, args, pad_id: int, name: str) -> list[dict]:
    """Both rewards of every pair of a split, in order, with what table 5 groups the pair by."""
    found = []
    for _, batch in shares(accelerator, data, args.forward_batch_size, f"rewards of {name}"):
        pairs = pair_rows(batch, pad_id)
        rows = [pairs[key].to(accelerator.device) for key in ("query", "chosen", "rejected")]
        with accelerator.autocast():
            chosen, rejected, _ = pair_rewards(model, *rows, pad_id)
        for i, rewards in enumerate(zip(chosen.tolist(), rejected.tolist(), strict=True)):
            found.append(pair_groups(batch, i) | {"chosen_reward": rewards[0], "rejected_reward": rewards[1]})
    return gather_object(found)


def accuracy_table(name: str, rows: list[dict]) -> list[dict]:
    """Table 5's rows of one split: the share of pairs whose chosen reward is the higher one, over all and per batch,
    confidence, split and policy pair (Detail 16). Null values are a group of their own."""
    frame = pandas.DataFrame(rows)
    frame["hit"] = frame["chosen_reward"] > frame["rejected_reward"]
    frame["overall"], table = "all", []
    for group in [key for key in ("overall", "batch", "confidence", "split", "policies") if key in frame]:
        for value, pairs in frame.groupby(frame[group].astype(object), dropna=False):
            value = "null" if pandas.isna(value) else int(value) if group == "confidence" else value
            row = {"data": name, "group": group, "value": value, "pairs": len(pairs)}
            table.append(row | {"accuracy": pairs["hit"].mean()})
    return table


@torch.no_grad()
def reference_rewards(accelerator: Accelerator, model, data, args, pad_id: int, left: bool) -> torch.Tensor:
    """Rewards (n,) of a split's references, in order: rows right-padded, or the query left-padded (PPO; Detail 14)."""
    found = []
    for _, batch in shares(accelerator, data, args.forward_batch_size, "rewards of references"):
        tokens, width = trim(batch["query_reference_response_token"], pad_id, "right"), 0
        if left:
            tokens = torch.cat([batch["query_token"], batch["reference_response_token"]], 1)
            width = batch["query_token"].shape[1]
        with accelerator.autocast():
            rewards = response_rewards(model, tokens.to(accelerator.device), width, pad_id)
        found += rewards.tolist()
    return torch.tensor(gather_object(found), dtype=torch.float64)


def write_table(accelerator: Accelerator, args, name: str, rows: list[dict], title: str = ""):
    """Write rows as a CSV file in eval/, called by all processes; print them too where there is a title."""
    frame = pandas.DataFrame(rows)
    with writing(accelerator, Path(args.output_dir, "eval", f"{name}.csv")) as partial:
        if accelerator.is_main_process:
            frame.to_csv(partial, index=False)
    if title:
        accelerator.print(f"\n{title}\n{frame.to_string(index=False)}\n")


def shares(accelerator: Accelerator, data, size: int, description: str):
    """Yield (row indices, rows) of this process's share of a split, up to `size` rows at a time; gather_object puts
    what the processes find into the order of the rows."""
    first, last = (len(data) * (accelerator.process_index + i) // accelerator.num_processes for i in (0, 1))
    for start in progress(accelerator, range(first, last, size), description):
        index = list(range(start, min(start + size, last)))
        yield index, data[index]


# ==== padding and shared queries ==================================================================


def trim(tokens: torch.Tensor, pad_id: int, side: Literal["left", "right"]) -> torch.Tensor:
    """Cut the columns that are padding in every row, but for a width of a multiple of 16 (or all): widths that differ
    at every call leave the heap in pieces, so that memory grows with the run. (b, T) -> (b, up to T)."""
    columns = (tokens != pad_id).any(0).nonzero().flatten()
    if len(columns) == 0:
        return tokens[:, :0]
    used = int(tokens.shape[1] - columns[0] if side == "left" else columns[-1] + 1)
    width = -(-used // 16) * 16
    return tokens[:, -width:] if side == "left" else tokens[:, :width]


def pair_rows(batch: dict, pad_id: int) -> dict:
    """Split stored pairs, the PAIR_COLUMNS (b, T), into what both sides share and what they do not: query (b, Q)
    left-padded, chosen (b, C) and rejected (b, R) right-padded, and chosen_start, rejected_start (b,): how many of
    their first tokens still belong to the query (0 but for templates whose last token joins with the response)."""
    chosen, chosen_label, rejected, rejected_label = (batch[column] for column in PAIR_COLUMNS)
    query = (chosen == rejected) & (chosen != pad_id) & (chosen_label == pad_id) & (rejected_label == pad_id)
    shared = query.long().cumprod(1).sum(1)  # (b,) tokens of both
    queries = [row[:length] for row, length in zip(chosen, shared, strict=True)]
    found = {"query": pad_sequence(queries, batch_first=True, padding_value=pad_id, padding_side="left")}
    for name, tokens, label in (("chosen", chosen, chosen_label), ("rejected", rejected, rejected_label)):
        lengths = (tokens != pad_id).sum(1)
        rows = [row[start:end] for row, start, end in zip(tokens, shared, lengths, strict=True)]
        found[name] = pad_sequence(rows, batch_first=True, padding_value=pad_id)
        found[f"{name}_start"] = lengths - (label != pad_id).sum(1) - shared
    return found


def pair_micro_batches(batch: dict, size: int, pad_id: int, device) -> list[tuple[torch.Tensor, dict]]:
    """Stored pairs in groups of `size` of similar length: row indices, and what pair_rows makes of the rows."""
    lengths = sum((batch[column] != pad_id).sum(1) for column in (PAIR_COLUMNS[0], PAIR_COLUMNS[3]))  # query, both once
    groups = []
    for index in lengths.argsort(descending=True, stable=True).split(size):
        pairs = pair_rows({column: batch[column][index] for column in PAIR_COLUMNS}, pad_id)
        groups.append((index, {key: value.to(device) for key, value in pairs.items()}))
    return groups


def pair_inputs(query, chosen, rejected, pad_id: int) -> tuple[torch.Tensor, dict, list[torch.Tensor]]:
    """A pair as one row `query + chosen + rejected`, all padding on the right, for two passes. Returns (b, P): the
    columns that are query in every row but for its last token, to be run first and cached; the inputs of a second pass
    on that cache: tokens (b, S) of the other columns, a mask (b, 1, S, P + S) in which rejected does not see chosen,
    position ids (b, S) that go on from the query in both; and where in S stand the query's last token and those of
    chosen (b, 1 + C), the query's last token and those of rejected (b, 1 + R). P and P + S are multiples of 16 if
    there is room, as in trim."""
    parts = (query, chosen, rejected)
    tokens = torch.cat(parts, 1)
    part = torch.cat([torch.full((x.shape[1],), i) for i, x in enumerate(parts)]).to(tokens.device).expand_as(tokens)
    lengths = [(x != pad_id).sum(1, keepdim=True) for x in parts]  # 3 x (b, 1)
    split = max(int(lengths[0].min()) - 1, 0)
    split = split // 16 * 16 or split
    real_first = (tokens == pad_id).int().argsort(dim=1, stable=True)
    tokens = trim(tokens.gather(1, real_first), pad_id, "right")
    width = tokens.shape[1]
    part, place = part.gather(1, real_first)[:, :width], torch.arange(width).to(query.device)
    visible = (part[:, None] == 0) | (part[:, split:, None] == part[:, None])  # (b, S, T)
    positions = place - (part == 2) * lengths[1]
    inputs = {"input_ids": tokens[:, split:], "position_ids": positions[:, split:]}
    inputs["attention_mask"] = ((place[split:, None] >= place) & visible)[:, None]
    last = lengths[0] - 1 - split  # (b, 1), the query's last token, which comes before either response
    columns = [last + 1 + torch.arange(x.shape[1]).to(x.device) for x in parts[1:]]
    columns = [torch.cat([last, x], 1).clamp(max=width - split - 1) for x in (columns[0], columns[1] + lengths[1])]
    return tokens[:, :split], inputs, columns


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


# ==== models ======================================================================================


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
