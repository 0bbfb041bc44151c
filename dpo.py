"""Direct preference optimisation, as in "The N+ Implementation Details of RLHF with PPO" (Detail 19, table 6).

One process, after `bash quickstart/run.sh --fast` and sft.py's:

    python dpo.py --model nano-xs --preference-dataset data/quickstart/posts-1-fast/tldr/preference \
        --batch-size 32 --total-episodes 2000 --learning-rate 2e-5 --run-eval

N processes:    torchrun --nproc_per_node 8 dpo.py --model 1b --seed 44413 --run-eval
Paper scale:    accelerate launch dpo.py --model 6.9b --seed 44413
Samples, ROUGE: python eval/samples.py runs/dpo/nano-xs/44413

Training starts from the SFT model with the same name and seed, which is also the reference. The run folder
(docs/runs.md) holds model/, a plain transformers checkpoint, and eval/ with table 5 for the implicit reward.

Shapes: n is the number of rows of a split, b of the pairs in a function's input; T is the width of a pair's row.

The script deviates from the paper and the authors' code on purpose:
- A pair is one row `query + chosen + rejected` (pair_rows), for nearly half the work. The authors run two rows.
- An epoch shows every pair once. The authors' released runs shuffled differently on every rank, so they showed 65.8 %.
- The rows left over after the last whole batch are not trained on, as in reward.py, whose data order this script uses.
- Samples (eval/samples.py) have up to 53 tokens, as in the other stages. The authors' DPO samples had up to 128.
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
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

STAGE = "dpo"
MICRO_BATCH_SIZES = {"1b": 32, "2.8b": 4, "6.9b": 1}  # per Pythia size: pairs that fit on one 80 GB device
PREFERENCE_DATASET = "vwxyzjn/summarize_from_feedback_oai_preprocessing_1706381144"
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
    """seed of the data order (the paper uses 44413, 55513, 66613 and 77713)"""
    sft_model_path: str = "runs/sft/{model}/{seed}"
    """SFT model, which is the reference: run folder, checkpoint folder or Hub id[@revision]"""
    preference_dataset: str = "data/tldr/preference" if Path("data/tldr/preference").exists() else PREFERENCE_DATASET
    """pre-tokenised preference data: folder or Hub id[@revision]"""
    output_dir: str = "runs/dpo/{model}/{seed}"
    """run folder to write, which must not hold a run yet (unless you pass --resume)"""

    beta: float = 0.05
    """scale of the implicit reward and strength of the implied KL penalty (table 6)"""
    loss_type: Literal["sigmoid", "ipo"] = "sigmoid"
    """sigmoid: DPO's loss (equation 4); ipo: the squared loss of IPO (Azar et al., 2023)"""
    label_smoothing: float = 0.0
    """assumed share of flipped labels (conservative DPO); 0 in the paper; only for --loss-type sigmoid"""
    num_train_epochs: float = 1
    """passes over the train split (table 6)"""
    total_episodes: int | None = None
    """number of pairs to train on; default: num_train_epochs passes (table 6: 92,858)"""
    batch_size: int = 64
    """pairs per optimiser step over all devices (table 6)"""
    learning_rate: float = 3e-6
    """peak learning rate; decays to 0 over the run by a cosine (table 6)"""
    max_grad_norm: float = 0.0
    """clip gradients to this global norm; 0: no clipping (as in the paper)"""

    eval_every: int = 0
    """compute the validation accuracy every so many updates; 0: only after the last update"""
    run_eval: bool = False
    """after training, write table 5 for the implicit reward of every validation split (figure 8)"""
    micro_batch_size: int | None = None
    """pairs per device in one forward/backward pass; affects memory, speed, rounding; default: fits 80 GB, or 8"""
    forward_batch_size: int | None = None
    """pairs per device in passes without gradient; default: 4 micro-batches, up to 32"""
    mixed_precision: Literal["no", "bf16"] | None = None
    """autocast type, while weights stay in float32; default: bf16 on a GPU (Detail 8), none on a CPU"""
    save_every: int = 0
    """write a checkpoint for --resume every so many updates; 0: never"""
    resume: bool = False
    """continue the run in --output-dir from its newest checkpoint"""
    track: bool = False
    """also log to Weights & Biases (set WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE in the environment)"""


# ==== the algorithm ===============================================================================


def dpo_loss(
    policy_chosen: torch.Tensor,
    policy_rejected: torch.Tensor,
    ref_chosen: torch.Tensor,
    ref_rejected: torch.Tensor,
    beta: float,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Return the loss per pair (b,) from the summed log-probabilities (b,) of the responses under policy and reference.

    sigmoid: equation 4, -log sigmoid(beta h), where h is the log-ratio of chosen minus the log-ratio of rejected. With
    label smoothing e, it is (1 - e) times that plus e times the loss of the flipped pair. ipo: (h - 1 / (2 beta))^2."""
    h = (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)
    if loss_type == "ipo":
        return (h - 1 / (2 * beta)) ** 2
    return -(1 - label_smoothing) * F.logsigmoid(beta * h) - label_smoothing * F.logsigmoid(-beta * h)


def pair_logprobs(model, pairs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed log-probabilities (b,) of the chosen and the rejected response, EOS included. `pairs` comes
    from pair_rows."""
    tokens = pairs["tokens"]
    segments = pairs["segments"]
    query_end = (segments < CHOSEN).sum(1, keepdim=True)  # (b, 1)
    chosen_end = (segments < REJECTED).sum(1, keepdim=True)
    width = tokens.shape[1]
    first = max(int(query_end.min()) - 1, 0) // 16 * 16  # the head skips columns that are query in every row
    logits = model(**pair_inputs(model, pairs), use_cache=False, logits_to_keep=width - first).logits.float()
    t = torch.arange(first, width, device=tokens.device)
    before = torch.where(t == chosen_end, query_end, t) - 1  # (b, T - first), where a token is predicted
    before = (before - first).clamp(min=0)
    row = torch.arange(len(tokens), device=tokens.device)[:, None]
    logprobs = logits[row, before, tokens[:, first:]] - logits.logsumexp(2).gather(1, before)
    logprobs = logprobs.masked_fill(~pairs["in_response"][:, first:], 0.0)
    is_rejected = (segments == REJECTED)[:, first:]
    chosen = logprobs.masked_fill(is_rejected, 0.0).sum(1)
    rejected = logprobs.masked_fill(~is_rejected, 0.0).sum(1)
    return chosen, torch.where(pairs["is_same"], chosen, rejected)  # equal, whatever their rounding


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
    # ---- data ------------------------------------------------------------------------------------
    check_args(args)
    accelerator = make_accelerator(args)
    world = accelerator.num_processes
    args.micro_batch_size = args.micro_batch_size or min(MICRO_BATCH_SIZES.get(args.model, 8), args.batch_size // world)
    args.forward_batch_size = args.forward_batch_size or min(4 * args.micro_batch_size, 32)
    sft_folder = checkpoint_folder("--sft-model-path", args.sft_model_path)
    tokenizer = load_tokenizer(sft_folder)
    if args.label_smoothing and args.loss_type == "ipo":
        fail(f"--label-smoothing {args.label_smoothing} has no effect on --loss-type ipo; leave it at 0")
    pad_id = tokenizer.pad_token_id
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

    # ---- reference log-probabilities, of all pairs to train on or to evaluate; policy ------------
    reference_start = time.time()
    order = data_order(len(train), args.seed, 0, num_updates * args.batch_size)  # Detail 19: as in reward.py
    width = max(len(rows[0][key]) for rows in (train, *data.values()) for key in PAIR_COLUMNS)
    ref_policy = load_policy(sft_folder, tokenizer, width).to(accelerator.device)
    check_pairs(ref_policy, sft_folder, train[:1], pad_id)
    if accelerator.state.deepspeed_plugin and accelerator.mixed_precision == "bf16":
        for parameter in ref_policy.parameters():  # like the policy's; not buffers: rotary frequencies need float32
            parameter.data = parameter.data.bfloat16()
    seen = order.unique()  # rows of train, sorted
    ref_logprobs = {}  # split: (n, 2), of train only the rows in `seen`
    for split, rows in {"train": train.select(seen.tolist()), **data}.items():
        ref_logprobs[split] = split_logprobs(accelerator, ref_policy, rows, args, pad_id, split)
    del ref_policy
    reference_seconds = time.time() - reference_start
    policy = load_policy(sft_folder, tokenizer, width)
    model, optimizer = prepare(accelerator, policy, args)
    # Register state of your own here (accelerator.register_for_checkpointing). After --resume it is on the CPU.
    finished_updates = begin_run(accelerator, args)
    tables = {}  # split: its pairs with their implicit rewards, from the latest evaluation
    run_start = time.time()
    if finished_updates == 0:
        write_metrics(accelerator, args, {"time/reference": reference_seconds}, 0, num_updates)
    for update in updates(accelerator, args, finished_updates, num_updates):
        # ---- 1. pairs: each process takes its share ----------------------------------------------
        update_start = time.time()
        episodes = range((update - 1) * args.batch_size, update * args.batch_size)
        rows = order[episodes.start : episodes.stop].chunk(world)[accelerator.process_index]
        batch = train[rows.tolist()]
        places = torch.searchsorted(seen, rows)
        batch["ref_chosen"], batch["ref_rejected"] = ref_logprobs["train"][places].unbind(1)
        mbs = pair_micro_batches(batch, args.micro_batch_size, pad_id, accelerator.device)

        # ---- 2. one step of the optimiser --------------------------------------------------------
        learning_rate = args.learning_rate * 0.5 * (1 + cos(pi * (update - 1) / num_updates))  # cosine to 0 (table 6)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        sums = defaultdict(float)
        for mb in mbs:
            last = mb is mbs[-1]  # devices exchange gradients with the last micro-batch
            accelerator.sync_gradients = last  # for DeepSpeed
            model.require_backward_grad_sync = last  # for DDP
            chosen, rejected = pair_logprobs(model, mb)
            ref = mb["ref_chosen"], mb["ref_rejected"]
            loss = dpo_loss(chosen, rejected, *ref, args.beta, args.loss_type, args.label_smoothing).sum()
            accelerator.backward(loss * world / args.batch_size)  # x world: DDP and DeepSpeed average over devices
            chosen_reward = args.beta * (chosen.detach() - mb["ref_chosen"])  # equation 5
            rejected_reward = args.beta * (rejected.detach() - mb["ref_rejected"])
            sums["loss/train"] += loss.detach()
            size = args.beta * sum(logprobs.detach().abs() for logprobs in (chosen, rejected, *ref))
            tie = is_tie(chosen_reward, rejected_reward, size, accelerator.mixed_precision)
            sums["accuracy/train"] += ((chosen_reward > rejected_reward) & ~tie).float().sum()
            sums["rewards/margin"] += (chosen_reward - rejected_reward).sum()
            sums["rewards/chosen"] += chosen_reward.sum()
            sums["rewards/rejected"] += rejected_reward.sum()
            sums["logprobs/chosen"] += chosen.detach().sum()
            sums["logprobs/rejected"] += rejected.detach().sum()
        grad_norm = optimizer_step(accelerator, model, optimizer, args.max_grad_norm, f"update {update}")

        # ---- 3. log ------------------------------------------------------------------------------
        metrics = {key: (accelerator.reduce(value, "sum") / args.batch_size).item() for key, value in sums.items()}
        metrics |= {
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "episode": episodes.stop,
            "time/update": time.time() - update_start,
            "time/total": time.time() - run_start,
        }
        if update == num_updates or (args.eval_every and update % args.eval_every == 0):
            tables["validation"] = implicit_rewards(accelerator, policy, ref_logprobs, data, args, pad_id, "validation")
            metrics["eval/accuracy"] = tables["validation"]["hit"].mean()
        write_metrics(accelerator, args, metrics, update, num_updates)

    # ---- evaluate (table 5 for the implicit reward), save ----------------------------------------
    if args.run_eval:
        rows = []
        for split in data:
            if split not in tables:  # validation has been evaluated with the last update
                tables[split] = implicit_rewards(accelerator, policy, ref_logprobs, data, args, pad_id, split)
            write_table(accelerator, args, f"pairs_{split}", tables[split].drop(columns="hit"))
            rows += accuracy_table(split, tables[split])
        write_table(accelerator, args, "accuracy", rows, "accuracy of the implicit reward (figure 8)")
    save_model(accelerator, args, "model", policy, tokenizer)
    accelerator.print(f"done in {time.time() - run_start:.0f} s: {args.output_dir}", flush=True)
    accelerator.end_training()


# ==== forward passes ==============================================================================


@torch.no_grad()
def split_logprobs(accelerator: Accelerator, model, data, args, pad_id: int, name: str) -> torch.Tensor:
    """Return log-probabilities (n, 2) of chosen and rejected for a split's pairs, in order, without gradient."""
    found = []
    pairs = data.select_columns(PAIR_COLUMNS)
    at_once = 8 * args.forward_batch_size  # so that each forward pass gets pairs of similar length
    for index, batch in shares(accelerator, pairs, at_once, f"log-probabilities of {name}"):
        logprobs = torch.empty(len(index), 2, device=accelerator.device)
        for mb in pair_micro_batches(batch, args.forward_batch_size, pad_id, accelerator.device):
            with accelerator.autocast():
                logprobs[mb["index"]] = torch.stack(pair_logprobs(model, mb), 1)
        found += logprobs.tolist()
    return torch.tensor(gather_object(found))


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


# ==== models ======================================================================================


def load_policy(path: str, tokenizer, width: int = 0):
    """Return a causal language model for rows of up to `width` tokens, in float32, with an embedding for every id of
    the tokenizer. It stays in evaluation mode even while it is trained, so it has no dropout (Detail 7). Its buffer
    `banned` (V,) marks [PAD] and the ids beyond the tokenizer, which transformers' generate() avoids as well."""
    with or_fail(f"the model in {path} cannot be read"):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, trust_remote_code=False)
    check_model(model, path, width)
    rows = model.get_input_embeddings().num_embeddings
    if rows < len(tokenizer) - 1:  # it may lack one for [PAD]
        fail(f"{path}: {rows} embeddings, but the tokenizer has {len(tokenizer) - 1} ids. Use its own tokenizer")
    model.resize_token_embeddings(max(rows, len(tokenizer)), mean_resizing=False)
    ids = torch.arange(max(rows, len(tokenizer)))
    model.register_buffer("banned", (ids == tokenizer.pad_token_id) | (ids >= len(tokenizer)), persistent=False)
    settings = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.config.update(settings)  # after resizing: some models check that the id has a row
    model.generation_config = GenerationConfig(**settings, suppress_tokens=ids[model.banned].tolist())
    return model


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


def implicit_rewards(accelerator, model, ref_logprobs: dict, data, args, pad_id: int, split: str) -> pandas.DataFrame:
    """Return the pair_table of a split with implicit rewards (equation 5, Detail 19). ref_logprobs: {split: (n, 2)}."""
    logprobs = split_logprobs(accelerator, model, data[split], args, pad_id, split)
    rewards = args.beta * (logprobs - ref_logprobs[split])
    size = args.beta * (logprobs.abs() + ref_logprobs[split].abs()).sum(1)
    tie = is_tie(rewards[:, 0], rewards[:, 1], size, accelerator.mixed_precision)
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
