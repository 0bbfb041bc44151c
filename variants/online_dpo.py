"""Online DPO with the reward model as the judge (Guo et al. 2024, "Direct Language Model Alignment from Online AI
Feedback"), a copy of ../ppo.py without value model. To see what differs, run `git diff --no-index ppo.py
variants/online_dpo.py`.

One process, after `bash quickstart/run.sh --fast` and the first commands of sft.py and reward.py:

    python variants/online_dpo.py --model nano-xs --dataset data/quickstart/posts-1-fast/tldr/sft \
        --batch-size 64 --total-episodes 960 --learning-rate 1e-4

N processes:    torchrun --nproc_per_node 8 variants/online_dpo.py --model 1b --seed 44413

Each prompt gets --samples-per-prompt k responses, two by default. The response with the highest score and the one with
the lowest form its pair. The loss is DPO's, averaged over the untied pairs of the whole mini-batch. A tied pair (for
example, two responses without EOS) is counted and has weight 0. If all pairs are tied, the step is skipped.

--labels decides where training converges, because every update samples new pairs from the policy:

    hard  the response with the larger score is always the chosen one, as published. DPO's loss never stops widening the
          margin, so the policy converges to the highest-scoring response. Beta only changes the pace.
          (IPO's loss aims at a margin of 1 / (2 beta) in every pair.)
    soft  the expected loss under Bradley-Terry labels: with p = sigma(score of chosen - score of rejected), p times the
          loss plus (1 - p) times the loss of the flipped pair. It settles at the policy that maximises score - beta KL,
          pi_ref x exp(score / beta), normalised.

tests/test_variants.py iterates both exactly over five responses. The KL to the reference converges to 1.897 with hard
labels, which is -log pi_ref of the best response, and to 0.859 with soft labels, which is the KL of the optimum.

Training starts from the SFT model (policy and reference) and the reward model with the same name and seed. The run
folder (default runs/online_dpo/{model}/{seed}) holds model/ (the policy, a plain transformers checkpoint),
metrics.jsonl, args.json, TensorBoard files and, with --save-every, checkpoints/.

Shapes: B is the number of episodes of an update, b the number of rows in a function's input, Q the width of the
queries, R the response length, W the width of a micro-batch's responses (one past the longest, up to R), T the width of
query and response together, V the vocabulary size and D the size of a hidden state. A batch is a dict of tensors:

    tokens (B, Q + R) query and response, right-padded; responses (B, R) right-padded
    query_lengths, lengths (of the responses, EOS included), row_lengths (of both) and raw_scores (B,)
    response_mask (B, R): logprobs, ref_logprobs and entropy are 0 outside of it
    sampling_logprobs (B, R), only for diagnostics: meaningless after EOS
    A micro-batch also has `rows` (b,), its rows in the batch, and `columns` (b, W), the columns of `tokens` where the
    policy predicts the response tokens.

A prompt's k episodes are consecutive. The script deviates from other implementations on purpose:
- The log-probabilities of policy and reference are both taken at the sampling temperature. TRL samples at 0.9 and takes
  both at 1.
- The reward model reads the sampled ids, including EOS. TRL decodes them without EOS and tokenises the text again.
- A response without EOS gets score -1 (Detail 23) before the pair is chosen.
- Ties are left out. Other implementations take the first response as the better one.
- A pair is never split over processes or micro-batches, so the batch size must be a multiple of k x mini-batches x
  processes.
- Total episodes and batch size count responses, of which each prompt has k.
- Sampling and padding are the same as in ppo.py.
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
from math import ceil, inf
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
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    StaticCache,
)

STAGE = "online_dpo"
MICRO_BATCH_SIZES = {"1b": 16, "2.8b": 8, "6.9b": 2}  # per Pythia size: fits on one 80 GB device
SAMPLE_BATCH_SIZES = {"1b": 256, "2.8b": 128, "6.9b": 64}  # 19 to 24 GB of cached keys and values
TEMPERATURE_EPS = 1e-7  # added to the temperature before dividing by it, as in the authors' code
ROUNDING = {"no": 1e-6, "bf16": 1e-3}  # relative, of a score
DATASET = "vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144"


@dataclass
class Args:
    model: str = "1b"
    """name of the run, for {model} in the paths; 1b, 2.8b and 6.9b also set memory defaults for 80 GB devices"""
    seed: int = 44413
    """seed of the query order and the sampling noise (the paper uses 44413, 55513, 66613 and 77713)"""
    sft_model_path: str = "runs/sft/{model}/{seed}"
    """SFT model for policy and reference: run folder, checkpoint folder or Hub id[@revision]"""
    reward_model_path: str = "runs/reward/{model}/{seed}"
    """reward model: run folder, checkpoint folder or Hub id[@revision]"""
    dataset: str = "data/tldr/sft" if Path("data/tldr/sft").exists() else DATASET
    """SFT data, whose posts are the queries: folder or Hub id[@revision]"""
    output_dir: str = "runs/online_dpo/{model}/{seed}"
    """run folder to write, which must not hold a run yet (unless you pass --resume)"""

    total_episodes: int = 1_000_000
    """total number of responses to sample (table 7)"""
    batch_size: int = 512
    """episodes per update over all devices (table 7)"""
    samples_per_prompt: int = 2
    """k, the number of responses to each prompt; the best and the worst form a pair (Guo et al. 2024)"""
    num_ppo_epochs: int = 1
    """passes over the batch per update; with one pass and one mini-batch, training is on-policy"""
    num_mini_batches: int = 1
    """optimiser steps per pass over the batch (table 7, N_mb)"""
    learning_rate: float = 3e-6
    """learning rate of the first update; decays linearly to 0 (async_rlhf's online DPO on TL;DR; the same as PPO's)"""
    max_grad_norm: float = 0.0
    """clip gradients to this global norm; 0: no clipping (as in the paper)"""
    response_length: int = 53
    """maximum number of tokens to sample per response (Detail 23)"""
    temperature: float = 0.7
    """sampling temperature; all log-probabilities are computed at it (table 7)"""
    penalty_reward_value: float | None = -1.0
    """score that replaces a response's score if it has no EOS (Detail 23); None: keep its score"""
    beta: float = 0.1
    """scale of the implicit reward; with soft labels, also the weight of the KL (async_rlhf's online DPO on TL;DR:
    0.1)"""
    labels: Literal["hard", "soft"] = "hard"
    """hard: the response with the larger score is chosen (Guo et al. 2024), which converges to the best response alone;
    soft: Bradley-Terry probabilities of the two scores, which converge to the optimum of score - beta KL"""
    loss_type: Literal["sigmoid", "ipo"] = "sigmoid"
    """sigmoid: DPO's loss; ipo: the squared loss of IPO (both in Guo et al. 2024)"""

    sample_every: int = 50
    """print four samples every so many updates; 0: never"""
    eval_every: int = 0
    """score a fixed validation batch every so many updates; 0: only after the last update"""
    eval_rows: int = 64
    """number of validation posts in that batch"""
    micro_batch_size: int | None = None
    """episodes per device in one pass of a model; affects memory, speed, rounding; default: fits 80 GB, or 8"""
    sample_batch_size: int | None = None
    """episodes per device to sample at a time; affects memory, speed, rounding; default: fits 80 GB, or 32"""
    mixed_precision: Literal["no", "bf16"] | None = None
    """autocast type; weights in training are float32 (DeepSpeed: a copy); default: bf16 on a GPU (Detail 8)"""
    offload: bool | None = None
    """keep reference and reward model in CPU memory except while they are used; default: only for 6.9b"""
    save_every: int = 0
    """write a checkpoint for --resume every so many updates; 0: never"""
    resume: bool = False
    """continue the run in --output-dir from its newest checkpoint"""
    track: bool = False
    """also log to Weights & Biases (set WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE in the environment)"""


# ==== the algorithm ===============================================================================


def best_and_worst(scores: torch.Tensor, responses, k: int, precision: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows (P, 2) of the highest- and the lowest-scoring of each prompt's k consecutive responses (B, R),
    from scores (B,), and whether their scores differ (P,). A tie is no preference."""
    groups = scores.view(-1, k)
    first_rows = torch.arange(0, len(scores), k, device=scores.device)
    pairs = torch.stack([first_rows + groups.argmax(1), first_rows + groups.argmin(1)], 1)
    best, worst = pairs.unbind(1)
    same = (responses[best] == responses[worst]).all(1)
    tie = is_tie(scores[best], scores[worst], scores[best].abs() + scores[worst].abs(), precision)
    return pairs, ~(same | tie)


def is_tie(chosen: torch.Tensor, rejected: torch.Tensor, size: torch.Tensor, precision: str) -> torch.Tensor:
    """Return (b,) whether two scores are too close to call: another micro-batch size could swap them by rounding alone.
    `size` (b,) sums the magnitudes that were rounded."""
    return (chosen - rejected).abs() <= ROUNDING[precision] * size


def flip_probability(scores: torch.Tensor, labels: str) -> torch.Tensor:
    """Return the probability (n,) that a pair's label prefers the rejected response: sigma(rejected - chosen) for soft
    labels, 0 for hard ones. scores (2n,) holds n chosen, then n rejected responses."""
    chosen, rejected = scores.chunk(2)
    return torch.sigmoid(rejected - chosen) if labels == "soft" else torch.zeros_like(chosen)


def online_dpo_loss(
    policy_chosen: torch.Tensor,
    policy_rejected: torch.Tensor,
    ref_chosen: torch.Tensor,
    ref_rejected: torch.Tensor,
    beta: float,
    loss_type: str,
    flip: torch.Tensor,
) -> torch.Tensor:
    """Return the loss per pair (b,) from the summed log-probabilities (b,) of the responses under policy and reference.
    h is the log-ratio of the chosen response minus that of the rejected one.

    sigmoid: DPO's -log sigmoid(beta h), in expectation over a label that is flipped with probability `flip` (b,).
    ipo: (h - 1 / (2 beta))^2."""
    h = (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)
    if loss_type == "ipo":
        return (h - 1 / (2 * beta)) ** 2
    return -(1 - flip) * F.logsigmoid(beta * h) - flip * F.logsigmoid(-beta * h)


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
    # ---- data and models -------------------------------------------------------------------------
    check_args(args)
    accelerator = make_accelerator(args)
    device = accelerator.device
    fill_defaults(args, accelerator.num_processes)
    num_updates = args.total_episodes // args.batch_size
    if args.labels == "soft" and args.loss_type == "ipo":
        fail("--labels soft needs --loss-type sigmoid: IPO's loss takes no label probabilities")
    k = args.samples_per_prompt
    if k < 2 or args.batch_size % (k * args.num_mini_batches * accelerator.num_processes):
        per_prompt = f"--samples-per-prompt {k} (2 or more)"
        fail(f"--batch-size {args.batch_size} must be a multiple of {per_prompt} x mini-batches x processes")

    sft_folder = local_checkpoint("--sft-model-path", args.sft_model_path)
    reward_folder = local_checkpoint("--reward-model-path", args.reward_model_path)
    tokenizer = load_tokenizer(sft_folder)
    other = load_tokenizer(reward_folder)
    if (other.get_vocab(), other.eos_token) != (tokenizer.get_vocab(), tokenizer.eos_token):
        fail(f"--reward-model-path {reward_folder}: another tokenizer or EOS than in {sft_folder}")
    data = load_splits("--dataset", args.dataset, ["query", "query_token", "reference_response_token"], tokenizer)
    train = data["train"].select_columns(["query_token"])
    validation = data["validation"].take(min(args.eval_rows, len(data["validation"])))
    width = max(len(rows[0]["query_token"]) for rows in (train, validation)) + args.response_length

    # Each model moves to the device before the next is loaded, so host memory holds only one (without --offload).
    reward_model = frozen_model(accelerator, load_reward_model(reward_folder, tokenizer, width), args.offload)
    ref_policy = frozen_model(accelerator, load_policy(sft_folder, tokenizer, width), args.offload)
    policy = load_policy(sft_folder, tokenizer, width).to(device)
    model, optimizer = prepare(accelerator, PolicyLogits(policy), args)
    # change here: pass state of your own to accelerator.register_for_checkpointing. --resume restores it on the CPU.
    inputs = {"sft_model_path": sft_folder, "reward_model_path": reward_folder, "dataset": train}  # for --resume
    finished_updates = start_or_resume(accelerator, args, inputs)

    run_start = time.time()
    # After each update, updates() writes a checkpoint if one is due, and ends the run if a signal has come.
    for update in updates(accelerator, args, finished_updates, num_updates):
        # ---- 1. sample (in steps 1 and 2 each process does its share; all get the whole batch) ---
        update_start = time.time()
        episodes = range((update - 1) * args.batch_size, update * args.batch_size)
        order = data_order(len(train), args.seed, episodes.start // k, episodes.stop // k)  # Detail 21
        queries = train[order.tolist()]["query_token"].repeat_interleave(k, 0).to(device)  # (B, Q)
        keys = noise_keys(args.seed, update, episodes, args.response_length).to(device)  # of the sampling noise
        responses, sampling_logprobs = sample(accelerator, policy, queries, keys, tokenizer, args, args.temperature)
        batch = make_batch(queries, responses, tokenizer.pad_token_id)
        batch["sampling_logprobs"] = sampling_logprobs
        sampling_seconds = time.time() - update_start

        # ---- 2. scores, log-probabilities, values ------------------------------------------------
        batch["raw_scores"] = reward_scores(accelerator, reward_model, batch, args)
        if not batch["raw_scores"].isfinite().all():
            fail(f"update {update}: a score of {args.reward_model_path} is not finite; check that model")
        everything = torch.arange(args.batch_size, device=device)
        batch |= forward_passes(accelerator, model, ref_policy, batch, [everything], args)

        # ---- 3. rewards --------------------------------------------------------------------------
        has_eos = (batch["responses"] == tokenizer.eos_token_id).any(1)  # (B,)
        scores = batch["raw_scores"]  # change here
        if args.penalty_reward_value is not None:
            scores = scores.where(has_eos, args.penalty_reward_value)  # Detail 23
        kl = batch["logprobs"] - batch["ref_logprobs"]  # (B, R)

        # ---- 4. pairs ----------------------------------------------------------------------------
        batch["scores"] = scores
        batch["ref_sums"] = batch["ref_logprobs"].sum(1)  # (B,)
        pairs, untied = best_and_worst(scores, batch["responses"], k, accelerator.mixed_precision)
        rollout_seconds = time.time() - update_start

        # ---- 5. DPO's loss -----------------------------------------------------------------------
        learning_rate = args.learning_rate * (1 - (update - 1) / num_updates)  # linear (table 7)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        # sums over the micro-batches of all optimiser steps; 0 where no step is made
        names = ("loss/policy", "logprobs/chosen", "logprobs/rejected", "rewards/chosen", "rewards/rejected")
        logs = {name: torch.zeros((), device=device) for name in names}
        grad_norms = []
        for epoch in range(args.num_ppo_epochs):
            shuffled = permutation(len(pairs), args.seed, update * args.num_ppo_epochs + epoch).to(device)
            for mini_batch in shuffled.chunk(args.num_mini_batches):
                count = untied[mini_batch].sum()
                if count == 0:
                    continue  # all pairs are tied, so skip the step
                own = own_share(accelerator, mini_batch)
                mbs = pair_batches(batch, pairs[own], untied[own] / count, args.micro_batch_size)
                for mb in accumulate(accelerator, model, mbs):  # exchanges gradients in the last backward pass only
                    # One column before each response token. Rows are right-padded, so they need no mask.
                    logits = model(mb["tokens"], mb["columns"])  # (b, W, V)
                    logprobs = token_logprobs(logits, mb["responses"], args.temperature)
                    del logits  # the largest tensor; the backward pass does not need it
                    chosen, rejected = logprobs.masked_fill(~mb["response_mask"], 0.0).sum(1).chunk(2)
                    ref = mb["ref_sums"].chunk(2)
                    flip = flip_probability(mb["scores"], args.labels)
                    losses = online_dpo_loss(chosen, rejected, *ref, args.beta, args.loss_type, flip)
                    loss = (losses * mb["weights"]).sum()
                    accelerator.backward(loss * accelerator.num_processes)  # DDP and DeepSpeed average over devices
                    logs["loss/policy"] += loss.detach()
                    for name, logprob, ref_logprob in zip(("chosen", "rejected"), (chosen, rejected), ref, strict=True):
                        logs[f"logprobs/{name}"] += (logprob.detach() * mb["weights"]).sum()
                        logs[f"rewards/{name}"] += args.beta * ((logprob.detach() - ref_logprob) * mb["weights"]).sum()
                grad_norms.append(optimizer_step(accelerator, model, optimizer, args.max_grad_norm, f"update {update}"))
        steps = max(len(grad_norms), 1)
        means = {key: accelerator.reduce(value, "sum").item() / steps for key, value in logs.items()}

        # ---- 6. log, samples ---------------------------------------------------------------------
        metrics = {  # change here; the first five are also printed
            "objective/score": scores.mean(),
            "objective/kl": kl.sum(1).mean(),
            "response/length": batch["lengths"].float().mean(),
            "response/eos_rate": has_eos.float().mean(),
            "objective/entropy": batch["entropy"].sum(1).mean(),
            "objective/rlhf_reward": (scores - args.beta * kl.sum(1)).mean(),
            "objective/tied_pairs": 1 - untied.float().mean(),
            "objective/score_without_penalty": batch["raw_scores"].mean(),
            **means,  # averaged over the update's optimiser steps
            "grad_norm": sum(grad_norms) / steps,
            "learning_rate": learning_rate,
            "episode": episodes.stop,
            "time/sampling": sampling_seconds,
            "time/rollout": rollout_seconds,
            "time/update": time.time() - update_start,
            "time/total": time.time() - run_start,
        }
        metrics |= diagnostics(batch, kl)
        if update == num_updates or (args.eval_every and update % args.eval_every == 0):
            metrics |= validation_scores(accelerator, policy, reward_model, validation, tokenizer, args)
        write_metrics(accelerator, args, metrics, update, num_updates)
        if accelerator.is_main_process and args.sample_every and update % args.sample_every == 0:
            show_samples(accelerator, batch, scores, kl.sum(1), tokenizer, update)

    # ---- save ------------------------------------------------------------------------------------
    save_model(accelerator, args, "model", policy, tokenizer)
    accelerator.print(f"done in {time.time() - run_start:.0f} s: {args.output_dir}", flush=True)
    accelerator.end_training()


# ==== rollout =====================================================================================


@torch.no_grad()
def sample(accelerator: Accelerator, policy, queries, keys, tokenizer, args, temperature: float) -> tuple:
    """Sample a response (B, R) to each left-padded query (B, Q), with [PAD] after its EOS (Detail 23). Also returns the
    log-probabilities (B, R) of its tokens at sampling time, meaningless after EOS. keys (B, R, 2): see noise_keys."""
    lengths = (queries != tokenizer.pad_token_id).sum(1)
    responses = queries.new_zeros((len(queries), args.response_length))
    logprobs = torch.zeros(responses.shape, device=queries.device)
    own = own_share(accelerator, torch.arange(len(queries), device=queries.device))
    for group in similar_lengths(lengths[own], args.sample_batch_size):
        rows = own[group]
        with accelerator.autocast():
            sampled = generate(policy, queries[rows], tokenizer, args.response_length, temperature, keys[rows])
        responses[rows], logprobs[rows] = sampled
    return accelerator.reduce((responses, logprobs), "sum")  # the rows of other processes are still 0


@torch.no_grad()
def forward_passes(accelerator: Accelerator, model, ref_policy, batch: dict, mini_batch_rows: tuple, args) -> dict:
    """Return logprobs, ref_logprobs and entropy (B, R) of the responses in a batch, 0 outside their masks. The
    models see the same micro-batches as in training on mini-batches with these rows, (n,) each."""
    mbs = []
    for mini_batch in mini_batch_rows:
        mbs += micro_batches(batch, own_share(accelerator, mini_batch), args.micro_batch_size)
    zeros = torch.zeros(batch["responses"].shape, device=accelerator.device)
    outputs = {key: zeros.clone() for key in ("logprobs", "ref_logprobs", "entropy")}
    policy_logits = accelerator.unwrap_model(model)  # DDP and DeepSpeed are only needed for gradients
    for mb in mbs:
        with accelerator.autocast():
            logits = policy_logits(mb["tokens"], mb["columns"])
        logprobs = token_logprobs(logits, mb["responses"], args.temperature)
        width = logprobs.shape[1]
        outputs["logprobs"][mb["rows"], :width] = logprobs * mb["response_mask"]
        outputs["entropy"][mb["rows"], :width] = token_entropy(logits, args.temperature) * mb["response_mask"]
    with on_device(accelerator, ref_policy):
        for mb in mbs:
            with accelerator.autocast():
                logits = response_logits(ref_policy, mb["tokens"], mb["columns"])
            logprobs = token_logprobs(logits, mb["responses"], args.temperature)
            outputs["ref_logprobs"][mb["rows"], : logprobs.shape[1]] = logprobs * mb["response_mask"]
    return accelerator.reduce(outputs, "sum")  # the rows of other processes are still 0


@torch.no_grad()
def reward_scores(accelerator: Accelerator, reward_model, batch: dict, args) -> torch.Tensor:
    """Return the reward model's score (B,) of each response in a batch, read at its last token (Detail 12)."""
    scores = torch.zeros(len(batch["responses"]), device=accelerator.device)
    own = own_share(accelerator, torch.arange(len(scores), device=accelerator.device))
    with on_device(accelerator, reward_model):
        for mb in micro_batches(batch, own, args.micro_batch_size):
            with accelerator.autocast():
                rewards = reward_model(mb["tokens"])  # (b, T)
            last = mb["row_lengths"] - 1
            scores[mb["rows"]] = rewards.gather(1, last[:, None]).squeeze(1)
    return accelerator.reduce(scores, "sum")  # the rows of other processes are still 0


@contextmanager
def on_device(accelerator: Accelerator, model):
    """Keep a frozen model on the device while it is used (Detail 8)."""
    tensors = [*model.parameters(), *model.buffers()]
    originals = [tensor.data for tensor in tensors]  # in host memory, if the model is offloaded
    for tensor in tensors:
        tensor.data = tensor.data.to(accelerator.device, non_blocking=True)
    yield
    for tensor, original in zip(tensors, originals, strict=True):
        tensor.data = original  # frees the copy on the device; nothing is copied back


def make_batch(queries: torch.Tensor, responses: torch.Tensor, pad_id: int) -> dict:
    """Return a batch with the joined tokens, lengths and masks (see "Shapes" at the top of the file) of left-padded
    queries (b, Q) and right-padded responses (b, R)."""
    joined = torch.cat([queries, responses], 1)
    real_first = (joined == pad_id).int().argsort(dim=1, stable=True)  # moves padding to the right
    query_lengths = (queries != pad_id).sum(1)
    lengths = (responses != pad_id).sum(1)
    positions = torch.arange(responses.shape[1], device=responses.device)
    return {
        "tokens": joined.gather(1, real_first),
        "responses": responses,
        "query_lengths": query_lengths,
        "lengths": lengths,
        "row_lengths": query_lengths + lengths,
        "response_mask": positions < lengths[:, None],
        "value_mask": positions <= lengths[:, None],
    }


def pair_batches(batch: dict, pairs: torch.Tensor, weights: torch.Tensor, size: int) -> list[dict]:
    """Split pairs (p, 2) of rows of a batch, with weights (p,), into micro-batches of `size` rows (at least one pair).
    Each is a micro-batch of 2n rows, n chosen and then the n rejected responses, with their `weights` (n,)."""
    mbs = []
    for group in similar_lengths(batch["row_lengths"][pairs].amax(1), max(size // 2, 1)):
        rows = pairs[group].T.flatten()
        episodes = {key: value[rows] for key, value in batch.items()}
        [mb] = micro_batches(episodes, torch.arange(len(rows), device=rows.device), len(rows))
        by_pair = mb["rows"].argsort()  # undoes the sorting by length
        mb = {key: value[by_pair] for key, value in mb.items()}
        mb["weights"] = weights[group]
        mbs.append(mb)
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


def micro_batches(batch: dict, rows: torch.Tensor, size: int) -> list[dict]:
    """Split these rows (b,) of a batch into micro-batches of `size` rows of similar length, and crop them to their
    longest row. Every 2-D tensor but `tokens` is cropped to its first W columns, so one that you add to the batch must
    be (B, R). Adds `rows` and `columns` (see "Shapes" at the top of the file)."""
    mbs = []
    for group in similar_lengths(batch["row_lengths"][rows], size):
        mb = {key: value[rows[group]] for key, value in batch.items()}
        width = int(mb["lengths"].max()) + 1  # + 1 for the value after EOS; a slice stops at R by itself
        for key, value in mb.items():
            if value.ndim == 2 and key != "tokens":
                mb[key] = value[:, :width]
        mb["rows"] = rows[group]
        mb["tokens"] = mb["tokens"][:, : rounded_width(mb["row_lengths"])]
        # Response token t is in column query_length + t, so the policy predicts it in the column before.
        columns = mb["query_lengths"][:, None] + torch.arange(mb["responses"].shape[1], device=rows.device) - 1
        mb["columns"] = columns.clamp(max=mb["tokens"].shape[1] - 1)  # clamps only columns that both masks leave out
        mbs.append(mb)
    return mbs


def similar_lengths(lengths: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Return positions in `lengths` (b,), in groups of `size` rows of similar length, which saves padding."""
    groups = lengths.argsort(descending=True, stable=True).split(size)
    return [rows for rows in groups if len(rows)]  # no group if there are no rows


def rounded_width(lengths: torch.Tensor) -> int:
    """Return the width that rows of these lengths (b,) are cropped to: the longest, rounded up to a multiple of 16.
    Rounding keeps the number of different shapes small, because each new shape costs memory and, on a GPU, time."""
    return ceil(int(lengths.max()) / 16) * 16


class PolicyLogits(nn.Module):
    """A policy that returns the logits of the response tokens only, in a module that DDP and DeepSpeed can wrap."""

    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    def forward(self, tokens, columns):
        """Return the logits (b, W, V) at the columns (b, W) of right-padded rows (b, T)."""
        return response_logits(self.policy, tokens, columns)


def response_logits(policy, tokens: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return the logits (b, W, V) at the columns (b, W) of right-padded rows (b, T), which need no mask,
    because the model is causal. The head only runs on these columns."""
    hidden = policy.base_model(tokens, use_cache=False).last_hidden_state  # (b, T, D)
    states = hidden.gather(1, columns[:, :, None].expand(-1, -1, hidden.shape[2]))
    return policy.get_output_embeddings()(states)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return log softmax(logits / (temperature + 1e-7)) at the tokens (Detail 20): (b, W, V), (b, W) -> (b, W)."""
    scaled = logits.float() / (temperature + TEMPERATURE_EPS)
    return -F.cross_entropy(scaled.flatten(0, 1), tokens.flatten(), reduction="none").view_as(tokens)


def token_entropy(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the entropy (nats) of softmax(logits / (temperature + 1e-7)) per position: (b, W, V) -> (b, W)."""
    logprobs = (logits.float() / (temperature + TEMPERATURE_EPS)).log_softmax(2)
    return -(logprobs.exp() * logprobs).sum(2)


# ==== sampling ====================================================================================


def noise_keys(seed: int, update: int, episodes: Iterable[int], length: int) -> torch.Tensor:
    """Return two 32-bit keys (b, length, 2) for each position of each episode, hashed from (seed, update, episode)."""
    digests = [hashlib.shake_128(f"{seed} {update} {i}".encode()).digest(8 * length) for i in episodes]
    return torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint32).long().view(-1, length, 2)


def gumbel_noise(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return Gumbel(0, 1) noise (b, V) that depends only on a position's two keys (b, 2) and the token, not on batch,
    device or rank. Token and keys are hashed by Wellons's lowbias32 to a uniform number u, and -log(-log(1 - u)) is the
    noise. Numbers of 32 bits are kept in int64: a product may overflow, but its last 32 bits are right."""
    tokens = torch.arange(vocab_size, device=keys.device)
    bits = (tokens * 0x9E3779B9 + keys[:, :1]) & 0xFFFFFFFF  # (b, V)
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    bits = bits ^ keys[:, 1:]  # between the two rounds, so that all 64 bits of the keys count
    bits = ((bits ^ (bits >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    bits = bits ^ (bits >> 16)
    uniform = ((bits.float() + 0.5) / 2**32).clamp(max=1 - 2**-24)  # float32 can round up to 1, whose noise is -inf
    # Not -log(-log(u)): its large values, which decide the arg max, come from u near 1, where float32 is coarse.
    return -torch.log(-torch.log1p(-uniform))


def sample_tokens(logits, keys, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample a token (b,) per row of logits (b, V) from softmax(logits / (temperature + 1e-7)), and return its
    log-probability (b,) too. The arg max of logits plus Gumbel noise is such a sample. keys (b, 2) are those of this
    position."""
    scaled = logits.float() / (temperature + TEMPERATURE_EPS)
    tokens = (scaled + gumbel_noise(keys, scaled.shape[1])).argmax(1)
    logprobs = scaled.gather(1, tokens[:, None]).squeeze(1) - scaled.logsumexp(1)
    return tokens, logprobs


class KeyValueCache(StaticCache):
    """A StaticCache with keys in the type of the values. Under autocast, rotary embeddings make keys float32, while
    values are bfloat16. Attention would cast all keys again at every step."""

    def update(self, keys, values, *args, **kwargs):
        return super().update(keys.to(values.dtype), values, *args, **kwargs)


@torch.no_grad()
def generate(model, queries, tokenizer, response_length: int, temperature: float, keys):
    """Sample responses (b, R) to left-padded queries (b, Q) and return them with their tokens' log-probabilities (b,
    R). Rows are filled with [PAD] after EOS (Detail 23). keys (b, R, 2) come from noise_keys. All steps but the first
    have the same shapes. Only every eighth step waits for the device, to check whether all rows have ended."""
    pad_id = tokenizer.pad_token_id
    is_query = queries != pad_id
    width = rounded_width(is_query.sum(1))
    inputs = queries[:, -width:]
    # Columns that have no token yet are True as well, because causality hides them until they have one.
    may_attend = F.pad(is_query[:, -width:], (0, response_length), value=True)
    position_ids = (is_query[:, -width:].cumsum(1) - 1).clamp(min=0)
    cache = KeyValueCache(model.config, may_attend.shape[1])
    responses = queries.new_full((len(queries), response_length), pad_id)
    logprobs = torch.zeros(responses.shape, device=queries.device)
    ended = torch.zeros(len(queries), dtype=torch.bool, device=queries.device)
    for t in range(response_length):
        states = model.base_model(
            inputs, attention_mask=may_attend, position_ids=position_ids, past_key_values=cache, use_cache=True
        ).last_hidden_state
        logits = model.get_output_embeddings()(states[:, -1])
        tokens, logprobs[:, t] = sample_tokens(logits, keys[:, t], temperature)
        responses[:, t] = tokens.masked_fill(ended, pad_id)
        ended |= tokens == tokenizer.eos_token_id
        if t % 8 == 7 and ended.all():
            break
        inputs = tokens[:, None]  # ended rows go on, but their tokens are masked above
        position_ids = position_ids[:, -1:] + 1
    return responses, logprobs


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


def load_reward_model(path: str, tokenizer, width: int = 0) -> RewardModel:
    """Return a trained reward model for rows of up to `width` tokens, in float32 and without dropout (see load_policy).
    To use the paper's released models, convert them with benchmark/convert_released.py."""
    settings = {"dtype": torch.float32, "trust_remote_code": False, "output_loading_info": True}
    with or_fail(f"{path} holds no reward model that can be read; make one with reward.py"):
        model, report = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, **settings)
    check_model(model, path, width, {*report["missing_keys"], *report["unexpected_keys"]})  # such as a head's bias
    fit_embeddings(model, path, tokenizer)
    return RewardModel(model)


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


def frozen_model(accelerator: Accelerator, model, offload: bool):
    """Freeze a model, cast its weights under bf16 so that it computes as the trained policy does, and move it to the
    device, or with `offload` into page-locked host memory."""
    model.requires_grad_(False)
    if accelerator.mixed_precision == "bf16":
        cast_weights(model, everything=accelerator.state.deepspeed_plugin is not None)
    if not offload:
        return model.to(accelerator.device)
    if accelerator.device.type == "cuda":
        for parameter in model.parameters():
            parameter.data = parameter.data.pin_memory()
    return model


def cast_weights(model, everything: bool):
    """Cast the weights of linear layers to bfloat16 once, which autocast would do at every use. With `everything`, cast
    embeddings and norms as well, as in models that DeepSpeed trains. Buffers, such as rotary frequencies, stay."""
    kept = set()
    if not everything:  # a head may share its weight with the embeddings
        kept = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, module in model.named_modules():
        is_reward_head = name == "model.score"  # of ppo.py's RewardModel
        if (everything or isinstance(module, nn.Linear)) and not is_reward_head:
            for weight in module.parameters(recurse=False):
                if weight not in kept:
                    weight.data = weight.data.bfloat16()


def fill_defaults(args, world: int):
    """Fill in the sizes and --offload where left open. Ends with an error if the batch cannot be split as asked."""
    args.micro_batch_size = args.micro_batch_size or MICRO_BATCH_SIZES.get(args.model, 8)
    args.sample_batch_size = args.sample_batch_size or SAMPLE_BATCH_SIZES.get(args.model, 32)
    if args.offload is None:
        args.offload = args.model == "6.9b"
    if args.total_episodes < args.batch_size:
        fail(f"--total-episodes {args.total_episodes} must be at least --batch-size {args.batch_size}")
    if args.batch_size % (args.num_mini_batches * world):
        fail(f"--batch-size {args.batch_size}: no multiple of {args.num_mini_batches} mini-batches x {world} processes")


# ==== evaluation ==================================================================================


def diagnostics(batch: dict, kl: torch.Tensor) -> dict:
    """Return metrics to look at when others look wrong: the KL by the estimators k2 and k3 (kl (B, R) is k1), and how
    far the log-probabilities at sampling time are from those of the forward pass, which should be rounding alone."""
    difference = (batch["sampling_logprobs"] - batch["logprobs"]).abs()[batch["response_mask"]]
    return {
        "objective/kl_k2": (0.5 * kl.square()).sum(1).mean(),
        "objective/kl_k3": ((-kl).exp() - 1 + kl).sum(1).mean(),
        "policy/sampling_logprob_difference_mean": difference.mean(),
        "policy/sampling_logprob_difference_max": difference.max(),
    }


@torch.no_grad()
def validation_scores(accelerator: Accelerator, policy, reward_model, data, tokenizer, args) -> dict:
    """Return the mean score, with and without the EOS penalty, of one summary per post of `data`, sampled at
    temperature 0.01."""
    queries = data[:]["query_token"].to(accelerator.device)
    keys = noise_keys(args.seed, 0, range(len(data)), args.response_length)  # training never has an update 0
    responses, _ = sample(accelerator, policy, queries, keys.to(queries.device), tokenizer, args, 0.01)
    raw_scores = reward_scores(accelerator, reward_model, make_batch(queries, responses, tokenizer.pad_token_id), args)
    scores = raw_scores
    if args.penalty_reward_value is not None:
        has_eos = (responses == tokenizer.eos_token_id).any(1)
        scores = scores.where(has_eos, args.penalty_reward_value)  # Detail 23
    return {"eval/score": scores.mean(), "eval/score_without_penalty": raw_scores.mean()}


def show_samples(accelerator: Accelerator, batch: dict, scores, kl, tokenizer, update: int):
    """Print the first four episodes of a batch, and log them to TensorBoard and W&B. scores and kl: (B,)."""
    samples = []
    texts = []
    for i in range(min(4, len(scores))):
        query = tokenizer.decode(batch["tokens"][i, : batch["query_lengths"][i]].tolist())[-200:]
        response = tokenizer.decode(batch["responses"][i, : batch["lengths"][i]].tolist())
        samples.append([query, response, f"{scores[i]:.3f}", f"{kl[i]:.3f}"])
        texts.append(f"---- update {update}: score {scores[i]:.3f}, KL {kl[i]:.3f}\n{query} >>>{response}")
        print(f"\n{texts[-1]}", flush=True)
    for tracker in accelerator.trackers:
        if tracker.name == "tensorboard":
            tracker.log({"samples/training": "\n\n".join(texts)}, step=update)
        if tracker.name == "wandb":
            tracker.log_table("samples/training", ["query (end)", "response", "score", "kl"], samples, step=update)


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
