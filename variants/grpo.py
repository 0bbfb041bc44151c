"""GRPO (Shao et al. 2024, "DeepSeekMath", section 4.1) and, by flags, Dr. GRPO (Liu et al. 2025), DAPO's loss (Yu et
al. 2025) and GSPO (Zheng et al. 2025), a copy of ../ppo.py without value model. To see what differs, run
`git diff --no-index ppo.py variants/grpo.py`.

One process, after `bash quickstart/run.sh --fast` and the first commands of sft.py and reward.py:

    python variants/grpo.py --model nano-xs --dataset data/quickstart/posts-1-fast/tldr/sft \
        --batch-size 64 --total-episodes 960 --learning-rate 1e-4

N processes:    torchrun --nproc_per_node 8 variants/grpo.py --model 1b --seed 44413
Dr. GRPO:       ... --no-scale-by-std --length-norm constant --kl-coef 0
DAPO's loss:    ... --length-norm tokens --cliprange-high 0.28 --kl-coef 0
GSPO:           ... --ratio response --cliprange 3e-4 --cliprange-high 4e-4 --num-mini-batches 4

Each prompt gets --samples-per-prompt k responses. All tokens of a response have the same advantage: its score minus the
mean of its prompt's k scores, divided by their standard deviation. The loss of a token is the clipped surrogate plus
beta times an estimate of the KL to the reference, computed from that token's d = log pi - log pi_ref:

    k3        e^-d - 1 + d, as published: its value is unbiased, its gradient is that of the forward KL(pi_ref || pi)
    k2        d^2 / 2: the gradient of KL(pi || pi_ref)
    k3_ratio  pi / pi_old x k3: value and gradient of KL(pi || pi_ref), with old samples, too

Each of these gradients only covers the states that were sampled. No form of this loss accounts for the effect of an
earlier token on later states, as the KL in the return of ppo.py and rloo.py does.

The metric loss/policy starts at about 0, which is expected. Before an update's first step every ratio is 1 and the
advantages of a prompt sum to 0, so with the default flags only beta x KL is left. The gradient is not 0. Follow
objective/score and objective/kl instead.

Training starts from the SFT model (policy and reference) and the reward model with the same name and seed. The run
folder (default runs/grpo/{model}/{seed}) holds model/ (the policy, a plain transformers checkpoint), metrics.jsonl,
args.json, TensorBoard files and, with --save-every, checkpoints/.

Shapes: B is the number of episodes of an update, b the number of rows in a function's input, Q the width of the
queries, R the response length, W the width of a micro-batch's responses (one past the longest, up to R), T the width of
query and response together, V the vocabulary size and D the size of a hidden state. A batch is a dict of tensors:

    tokens (B, Q + R) query and response, right-padded; responses (B, R) right-padded
    query_lengths, lengths (of the responses, EOS included), row_lengths (of both) and raw_scores (B,)
    token_weights (B,): the weight of each token of a response in its mini-batch's loss
    response_mask (B, R): logprobs, ref_logprobs, entropy and advantages are 0 outside of it
    sampling_logprobs (B, R), only for diagnostics: meaningless after EOS
    A micro-batch also has `rows` (b,), its rows in the batch, and `columns` (b, W), the columns of `tokens` where the
    policy predicts the response tokens.

A prompt's k episodes are consecutive. The script deviates from other implementations on purpose:
- Standard deviations are unbiased (ddof 1, as in TRL and OpenRLHF), plus 1e-4. Groups are centred in float64, so that k
  equal scores give exactly 0. In float32, a small epsilon would blow up the rounding error.
- Every normaliser is a constant or a count over the whole mini-batch, so it does not depend on processes or
  micro-batches.
- `--length-norm constant` divides by --response-length, not by the longest response of a batch.
- k3 uses d = log pi - log pi_ref with pi on top. The other way round, its expected value is chi^2 - KL.
- `--length-norm tokens` divides by the tokens of the whole mini-batch, so a prompt with longer responses counts more.
  DAPO's equation 8 divides by the tokens of a prompt's group and averages over prompts.
- The learning rate decays linearly to 0, as in ppo.py. DeepSeekMath gives 1e-6 and no schedule.
- A response without EOS gets score -1 (Detail 23) and is trained on. DAPO's filter leaves it out.
- Total episodes and batch size count responses, of which each prompt has k.
- Sampling, padding, temperature and old log-probabilities are the same as in ppo.py.
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

STAGE = "grpo"
MICRO_BATCH_SIZES = {"1b": 16, "2.8b": 8, "6.9b": 2}  # per Pythia size: fits on one 80 GB device
SAMPLE_BATCH_SIZES = {"1b": 256, "2.8b": 128, "6.9b": 64}  # 19 to 24 GB of cached keys and values
TEMPERATURE_EPS = 1e-7  # added to the temperature before dividing by it, as in the authors' code
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
    output_dir: str = "runs/grpo/{model}/{seed}"
    """run folder to write, which must not hold a run yet (unless you pass --resume)"""

    total_episodes: int = 1_000_000
    """total number of responses to sample (table 7)"""
    batch_size: int = 512
    """episodes per update over all devices (table 7)"""
    samples_per_prompt: int = 4
    """k, the number of responses to each prompt (as in rloo.py; DeepSeekMath uses 64)"""
    num_ppo_epochs: int = 1
    """passes over the batch per update (DeepSeekMath, section 4.2: a single update)"""
    num_mini_batches: int = 1
    """optimiser steps per pass over the batch (table 7, N_mb)"""
    learning_rate: float = 1e-6
    """learning rate of the first update; decays linearly to 0 as in ppo.py (DeepSeekMath, section 4.2: 1e-6)"""
    max_grad_norm: float = 0.0
    """clip gradients to this global norm; 0: no clipping (as in the paper)"""
    response_length: int = 53
    """maximum number of tokens to sample per response (Detail 23)"""
    temperature: float = 0.7
    """sampling temperature; all log-probabilities are computed at it (table 7)"""
    penalty_reward_value: float | None = -1.0
    """score that replaces a response's score if it has no EOS (Detail 23); None: keep its score"""
    scale_by_std: bool = True
    """divide a group's advantages by its standard deviation (Dr. GRPO does not)"""
    length_norm: Literal["response", "tokens", "constant"] = "response"
    """how token losses are averaged. response: over each response, then over responses (DeepSeekMath); tokens: over all
    tokens of the mini-batch (DAPO does this per prompt); constant: summed over each response, divided by
    --response-length and averaged over responses (Dr. GRPO)"""
    kl_estimator: Literal["k3", "k2", "k3_ratio"] = "k3"
    """estimator of the KL in the loss (k3: DeepSeekMath, equation 4)"""
    kl_coef: float = 0.04
    """beta, the weight of the KL in the loss (DeepSeekMath, section 4.2)"""
    cliprange: float = 0.2
    """clip the policy ratio from below at 1 - this (table 7)"""
    cliprange_high: float | None = None
    """clip the policy ratio from above at 1 + this (DAPO: 0.28); default: the same as --cliprange"""
    ratio: Literal["token", "response"] = "token"
    """probability ratio in the surrogate: one per token, or the geometric mean over a response's tokens (GSPO)"""

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


def group_advantages(scores: torch.Tensor, k: int, scale_by_std: bool) -> torch.Tensor:
    """Return advantages (B,) of scores (B,) in groups of k consecutive ones: (score - mean) / (standard deviation +
    1e-4), without the division if not scale_by_std. Uses ddof 1 and float64, so that equal scores give exactly 0."""
    groups = scores.cpu().double().view(-1, k)  # Apple's GPUs have no float64
    advantages = groups - groups.mean(1, keepdim=True)
    if scale_by_std:
        advantages = advantages / (groups.std(1, keepdim=True) + 1e-4)
    return advantages.flatten().to(scores)


def weigh_tokens(lengths: torch.Tensor, length_norm: str, response_length: int) -> torch.Tensor:
    """Return the loss weight (n,) of each token of a mini-batch's responses, from their lengths (n,) in tokens."""
    if length_norm == "response":
        return 1 / (len(lengths) * lengths)
    if length_norm == "tokens":
        return torch.ones_like(lengths) / lengths.sum()
    return torch.ones_like(lengths) / (len(lengths) * response_length)


def kl_estimate(d: torch.Tensor, ratio: torch.Tensor, form: str) -> torch.Tensor:
    """Return an estimate (b, W), with gradient, of the KL to the reference at each token, from d = log pi - log pi_ref
    and ratio = pi / pi_old (b, W). The module docstring says which gradient each form has."""
    if form == "k2":
        return 0.5 * d.square()
    k3 = torch.expm1(-d) + d
    return k3 * ratio if form == "k3_ratio" else k3


def grpo_loss(logprobs: torch.Tensor, mb: dict, args) -> tuple[torch.Tensor, dict]:
    """Return the loss weighted by token_weights, and sums over tokens to log. logprobs (b, W) has a gradient. The
    micro-batch holds the old logprobs, ref_logprobs, advantages and response_mask (b, W), and token_weights (b,)."""
    mask = mb["response_mask"]
    logratio = (logprobs - mb["logprobs"]).masked_fill(~mask, 0.0)  # past the end, [PAD]s near -1e9 swamp approx_kl
    ratio = logratio.exp()
    surrogate_ratio = ratio
    if args.ratio == "response":  # (b, 1): one for all tokens (GSPO, equation 5)
        surrogate_ratio = (logratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True)).exp()
    unclipped = -mb["advantages"] * surrogate_ratio
    clipped = -mb["advantages"] * surrogate_ratio.clamp(1 - args.cliprange, 1 + args.cliprange_high)
    d = (logprobs - mb["ref_logprobs"]).masked_fill(~mask, 0.0)
    penalty = kl_estimate(d, ratio, args.kl_estimator)
    losses = torch.max(unclipped, clipped) + args.kl_coef * penalty
    loss = (losses * mb["token_weights"][:, None]).sum()
    sums = {
        "loss/kl": penalty.sum(),
        "policy/clip_fraction": ((clipped > unclipped) & mask).sum(),
        "policy/approx_kl": 0.5 * logratio.square().sum(),
        "policy/ratio": (ratio * mask).sum(),
        "policy/ratio_square": (ratio.square() * mask).sum(),
    }
    return loss, sums


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
    if args.cliprange_high is None:
        args.cliprange_high = args.cliprange
    k = args.samples_per_prompt
    if k < 2 or args.batch_size % k:
        fail(f"--batch-size {args.batch_size} must be a multiple of --samples-per-prompt {k}, which must be 2 or more")

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
        # The models see the same micro-batches as in epoch 0 of step 5. In other shapes, kernels would round
        # differently, and the ratios before the first optimiser step would not be exactly 1.
        first_mini_batches = mini_batches(args, update, 0, device)
        batch |= forward_passes(accelerator, model, ref_policy, batch, first_mini_batches, args)

        # ---- 3. rewards --------------------------------------------------------------------------
        has_eos = (batch["responses"] == tokenizer.eos_token_id).any(1)  # (B,)
        scores = batch["raw_scores"]  # change here
        if args.penalty_reward_value is not None:
            scores = scores.where(has_eos, args.penalty_reward_value)  # Detail 23
        kl = batch["logprobs"] - batch["ref_logprobs"]  # (B, R)

        # ---- 4. advantages -----------------------------------------------------------------------
        advantages = group_advantages(scores, k, args.scale_by_std)  # (B,)
        batch["advantages"] = advantages[:, None] * batch["response_mask"]  # the same for each of a response's tokens
        group_sd = scores.view(-1, k).std(1)
        rollout_seconds = time.time() - update_start

        # ---- 5. K epochs of clipped updates ------------------------------------------------------
        learning_rate = args.learning_rate * (1 - (update - 1) / num_updates)  # linear (table 7)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        logs = defaultdict(float)  # sums over the micro-batches of all optimiser steps
        grad_norms = []
        deviations = []
        batch["token_weights"] = torch.zeros_like(scores)  # those of the current mini-batch
        for epoch in range(args.num_ppo_epochs):
            for mini_batch in mini_batches(args, update, epoch, device):
                lengths = batch["lengths"][mini_batch]
                batch["token_weights"][mini_batch] = weigh_tokens(lengths, args.length_norm, args.response_length)
                mbs = micro_batches(batch, own_share(accelerator, mini_batch), args.micro_batch_size)
                for mb in accumulate(accelerator, model, mbs):  # exchanges gradients in the last backward pass only
                    # One column before each response token. Rows are right-padded, so they need no mask.
                    logits = model(mb["tokens"], mb["columns"])  # (b, W, V)
                    logprobs = token_logprobs(logits, mb["responses"], args.temperature)
                    del logits  # the largest tensor; the backward pass does not need it
                    loss, sums = grpo_loss(logprobs, mb, args)
                    accelerator.backward(loss * accelerator.num_processes)  # DDP and DeepSpeed average over devices
                    if not grad_norms:  # before the first optimiser step, when every ratio should be exactly 1
                        ratio = (logprobs.detach() - mb["logprobs"]).exp()
                        deviations.append((ratio - 1).abs()[mb["response_mask"]].max())
                    logs["loss/policy"] += loss.detach()
                    for key, value in sums.items():
                        logs[key] += value.detach() / lengths.sum()
                grad_norms.append(optimizer_step(accelerator, model, optimizer, args.max_grad_norm, f"update {update}"))
        steps = len(grad_norms)
        means = {key: accelerator.reduce(value, "sum").item() / steps for key, value in logs.items()}
        means["policy/ratio_variance"] = means.pop("policy/ratio_square") - means["policy/ratio"] ** 2
        first_deviation = accelerator.gather(torch.stack(deviations).max()).max()

        # ---- 6. log, samples ---------------------------------------------------------------------
        metrics = {  # change here; the first five are also printed
            "objective/score": scores.mean(),
            "objective/kl": kl.sum(1).mean(),
            "response/length": batch["lengths"].float().mean(),
            "response/eos_rate": has_eos.float().mean(),
            "objective/entropy": batch["entropy"].sum(1).mean(),
            "objective/group_sd": group_sd.mean(),
            "objective/group_sd_10": group_sd.quantile(0.1),
            "objective/group_sd_90": group_sd.quantile(0.9),
            "objective/score_without_penalty": batch["raw_scores"].mean(),
            "policy/first_ratio_deviation": first_deviation,
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


def mini_batches(args, update: int, epoch: int, device) -> tuple[torch.Tensor, ...]:
    """Return the rows (B / num_mini_batches,) of each mini-batch of an epoch. They are the same on every process."""
    shuffled = permutation(args.batch_size, args.seed, update * args.num_ppo_epochs + epoch)
    return shuffled.to(device).chunk(args.num_mini_batches)


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
