"""PPO against several reward models, a copy of ../ppo.py. The score is their mean, worst case or uncertainty-weighted
mean (uwo) as in "Reward Model Ensembles Help Mitigate Overoptimization", or Llama 2's safety gate.

One process:    python ensembles/ppo.py --model nano-xs --reward-model-paths runs/reward/nano-xs/{1,2,3} \
                    --reward-combination uwo --uwo-lambda 0.1 --eval-every 10
Gold reward:    python eval/gold.py runs/ppo/nano-xs/44413 --gold quickstart/truth.py:score
Paper scale:    bash ensembles/run.sh --dry-run

Training starts from the SFT model (policy, reference and value model) with the same name and seed. The run folder
(default runs/ppo/{model}/{seed}) holds model/ (the policy, a plain transformers checkpoint), value_model/,
metrics.jsonl, args.json, members.json (scale of each reward model), samples/ (of validation posts, for eval/gold.py),
TensorBoard files and, with --save-every, checkpoints/.

The algorithm comes first: arguments, losses and main. Helpers follow, and plumbing comes last.
To see what differs from ppo.py, run `git diff --no-index ppo.py ensembles/ppo.py`.

Shapes: B is the number of episodes of an update, b the number of rows in a function's input, Q the width of the
queries, R the response length, W the width of a micro-batch's responses, T the width of query and response together, V
the vocabulary size, D the size of a hidden state and k the number of reward models. A batch is a dict of tensors:

    tokens (B, Q + R) query and response, right-padded; responses (B, R) right-padded
    query_lengths, lengths (of the responses, EOS included) and row_lengths (of both) (B,); member_scores (B, k)
    response_mask (B, R) through EOS: logprobs, ref_logprobs, entropy and advantages are 0 outside of it
    value_mask (B, R) through one past EOS, where the score lies: values are 0 outside of it
    in a micro-batch also `rows` (b,) of the batch, and `columns` (b, W) of `tokens` that predict the response tokens

docs/details.md lists the paper's Details. The script deviates from the paper and the authors' code on purpose:
- The score is added one position past EOS, as in the authors' code and in OpenAI's. The text of figure 9 says at EOS.
- Whitening and loss means are taken over the whole batch. The authors take them per device and micro-batch, so their
  objective changes with the hardware.
- The policy loss is divided by the number of response tokens (through EOS), and the value loss by the number of value
  positions (through one past EOS).
- Sampling is Gumbel-max with noise keyed by (seed, update, episode, position), not multinomial. A row stops at its EOS,
  with the same result as sampling to the full length and truncating. [PAD] and ids beyond the tokenizer have
  probability 0, both in sampling and in every log-probability.
- Old log-probabilities come from a forward pass over the finished response, not from the scores of generation.
- Weight decay applies to all weights, as in the authors' code.
- Validation samples are drawn as in training, and not with the top-p of 0.9 of the ensemble paper's table 4.
- uwo's variance is over k models, as in equation 5. The ensemble paper's code divides by k - 1 in PPO.
"""

import csv
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
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    StaticCache,
)
from transformers.utils import logging as transformers_logging

STAGE = "ppo"
MICRO_BATCH_SIZES = {"1b": 16, "2.8b": 8, "6.9b": 2}  # per Pythia size: fits on one 80 GB device
SAMPLE_BATCH_SIZES = {"1b": 256, "2.8b": 128, "6.9b": 64}  # 19 to 24 GB of cached keys and values
TEMPERATURE_EPS = 1e-7  # added to the temperature before dividing by it, as in the authors' code
DATASET = "vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144"


@dataclass
class Args:
    model: str = "1b"
    """name of the run, for {model} in the paths; 1b, 2.8b and 6.9b also set batch and offload defaults for 80 GB"""
    seed: int = 44413
    """seed of the query order and the sampling noise (the paper uses 44413, 55513, 66613 and 77713)"""
    sft_model_path: str = "runs/sft/{model}/{seed}"
    """SFT model for policy and reference: run folder, checkpoint folder or Hub id[@revision]"""
    reward_model_paths: list[str] | None = None
    """one or more reward models (required): run folders, checkpoint folders or Hub ids[@revision]"""
    reward_combination: Literal["mean", "wco", "uwo", "safety_gate"] = "mean"
    """how the rewards become one score: mean, worst case (wco), mean minus uwo_lambda times variance (uwo), or Llama
    2's safety_gate. That one takes a helpfulness and a safety model: it uses the safety score if that is low or the
    post's column `tag` says safety, the helpfulness score otherwise, and whitens the result over the batch"""
    uwo_lambda: float | None = None
    """weight of the variance in uwo, at least 0; required with uwo, which has no default"""
    standardise_members: bool = True
    """standardise each reward model to (score - mean) / standard deviation over samples of the SFT policy, as the
    ensemble paper's authors say they did, so a KL coefficient means the same for any reward; not for safety_gate"""
    standardise_posts: int = 256
    """number of training posts (the first ones) to sample for that"""
    value_start: Literal["sft", "reward"] = "sft"
    """what the value model starts from: the SFT model with a head of zeros (the ensemble paper's code puts a new head
    on the policy's trunk), or the first reward model (Detail 22), whose blind spots it inherits"""
    dataset: str = "data/tldr/sft" if Path("data/tldr/sft").exists() else DATASET
    """SFT data, whose posts are the queries: folder or Hub id[@revision]"""
    output_dir: str = "runs/ppo/{model}/{seed}"
    """run folder to write, which must not hold a run yet (unless you pass --resume)"""

    total_episodes: int = 1_000_000
    """total number of responses to sample (table 7)"""
    batch_size: int = 512
    """episodes per update over all devices (table 7)"""
    num_ppo_epochs: int = 4
    """passes over the batch per update (table 7, K)"""
    num_mini_batches: int = 1
    """optimiser steps per pass over the batch (table 7, N_mb)"""
    learning_rate: float = 3e-6
    """learning rate of the first update (table 7)"""
    lr_schedule: Literal["linear", "cosine"] = "linear"
    """shape of the decay, which reaches final_learning_rate one update after the last (table 7: linear)"""
    final_learning_rate: float = 0.0
    """learning rate at the end of the schedule (ensemble paper, table 3: cosine from 1e-6 to 1e-7)"""
    max_grad_norm: float = 0.0
    """clip gradients to this global norm; 0: no clipping (as in the paper)"""
    response_length: int = 53
    """maximum number of tokens to sample per response (Detail 23)"""
    temperature: float = 0.7
    """sampling temperature; all log-probabilities are computed at it (table 7)"""
    penalty_reward_value: float | None = -1.0
    """score that replaces a response's score if it has no EOS (Detail 23); None: keep its score (ensemble paper)"""
    kl_coef: float = 0.05
    """beta, the weight of the KL penalty in the reward (table 7)"""
    whiten_rewards: bool = False
    """scale token rewards to unit variance, keeping their mean (Detail 24)"""
    gamma: float = 1.0
    """discount factor (table 7)"""
    lam: float = 0.95
    """lambda of generalised advantage estimation (table 7)"""
    cliprange: float = 0.2
    """clip the policy ratio to 1 ± this (table 7)"""
    cliprange_value: float = 0.2
    """clip the value to its old value ± this (table 7)"""
    vf_coef: float = 0.1
    """weight of the value loss (table 7, c_1)"""

    sample_every: int = 50
    """print a table of samples every so many updates; 0: never"""
    eval_every: int = 0
    """write a sample to each of --eval-rows fixed validation posts to samples/ every so many updates, before the first
    and after the last; 0: only after the last"""
    eval_rows: int = 64
    """number of these posts"""
    micro_batch_size: int | None = None
    """episodes per device in one forward/backward pass; affects memory, speed, rounding; default: fits 80 GB, or 8"""
    forward_batch_size: int = 32
    """episodes per device that a reward model scores at a time"""
    sample_batch_size: int | None = None
    """episodes per device to sample at a time; affects memory, speed, rounding; default: fits 80 GB, or 32"""
    mixed_precision: Literal["no", "bf16"] | None = None
    """autocast type, while weights stay in float32; default: bf16 on a GPU (Detail 8), none on a CPU"""
    offload: bool | None = None
    """keep reference and reward models in CPU memory except while they are used; default: only for 6.9b"""
    save_every: int = 0
    """write a checkpoint for --resume every so many updates; 0: never"""
    resume: bool = False
    """continue the run in --output-dir from its newest checkpoint"""
    track: bool = False
    """also log to Weights & Biases (set WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE in the environment)"""


# ==== the algorithm ===============================================================================


def combine(scores: torch.Tensor, method: str = "mean", uwo_lambda: float | None = None, safety=None) -> torch.Tensor:
    """Combine the scores of k reward models (k, b) into one score (b,): the mean, the worst case (wco), or mean -
    lambda x variance (uwo), with the variance over k, not k - 1 (Reward model ensembles, equations 3 to 5). safety_gate
    takes helpfulness and safety scores. It uses the safety score where its sigmoid is below 0.15 or the prompt's tag
    says safety (`safety`, (b,) bool), and the helpfulness score elsewhere (Llama 2, section 3.2.3, where the logit of
    the sigmoid is the score itself)."""
    if method == "wco":
        return scores.min(0).values
    if method == "safety_gate":
        return torch.where(safety | (scores[1].sigmoid() < 0.15), scores[1], scores[0])
    mean = scores.mean(0)
    if method == "uwo":
        variance = (scores - mean).square().mean(0)
        return mean - uwo_lambda * variance
    return mean


def scheduled(args, done: float) -> float:
    """Return the learning rate after this share (0 to 1) of the updates."""
    remaining = 1 - done  # linear (table 7)
    if args.lr_schedule == "cosine":
        remaining = 0.5 * (1 + cos(pi * done))
    return args.final_learning_rate + (args.learning_rate - args.final_learning_rate) * remaining


def token_rewards(scores: torch.Tensor, kl: torch.Tensor, lengths: torch.Tensor, kl_coef: float) -> torch.Tensor:
    """Return the rewards (b, R): -kl_coef x kl at each token (equation 3), plus the score (b,) one position past EOS,
    or at the last position if there is no room (Detail 23). kl (b, R) is log pi - log pi_ref (k1), 0 after the
    response's end. lengths (b,) counts the tokens of each response, EOS included."""
    rewards = -kl_coef * kl
    score_position = lengths.clamp(max=kl.shape[1] - 1)
    return rewards.scatter_add(1, score_position[:, None], scores[:, None].to(rewards))


def gae(rewards: torch.Tensor, values: torch.Tensor, gamma: float, lam: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages (b, R) by generalised advantage estimation, and returns (b, R) = advantages + values. rewards
    and values (b, R) are 0 outside the value mask."""
    deltas = rewards + gamma * F.pad(values[:, 1:], (0, 1)) - values
    advantages = torch.zeros_like(rewards)
    advantage = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        advantage = deltas[:, t] + gamma * lam * advantage
        advantages[:, t] = advantage
    return advantages, advantages + values


def whiten(values: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True) -> torch.Tensor:
    """Return (values - mean) / sqrt(var + 1e-8) of values (b, R), with the biased variance over the mask (b, R), and 0
    outside of it. If not shift_mean, the mean is added back (Details 24 and 25)."""
    count = mask.sum()
    mean = (values * mask).sum() / count
    variance = ((values - mean).square() * mask).sum() / count
    whitened = (values - mean) * torch.rsqrt(variance + 1e-8)
    if not shift_mean:
        whitened = whitened + mean
    return whitened * mask


def policy_loss(logprobs: torch.Tensor, mb: dict, cliprange: float) -> tuple[torch.Tensor, dict]:
    """Return the clipped surrogate summed over the response mask, and sums to log. logprobs (b, W) has a gradient. The
    micro-batch holds the old logprobs, advantages and response_mask (b, W)."""
    mask = mb["response_mask"]
    logratio = (logprobs - mb["logprobs"]).masked_fill(~mask, 0.0)  # a [PAD] has about -1e9
    ratio = logratio.exp()
    unclipped = -mb["advantages"] * ratio
    clipped = -mb["advantages"] * ratio.clamp(1 - cliprange, 1 + cliprange)
    loss = (torch.max(unclipped, clipped) * mask).sum()
    sums = {
        "loss/policy": loss,
        "policy/clip_fraction": ((clipped > unclipped) & mask).sum(),
        "policy/approx_kl": 0.5 * logratio.square().sum(),
        "policy/ratio": (ratio * mask).sum(),
        "policy/ratio_square": (ratio.square() * mask).sum(),
    }
    return loss, sums


def value_loss(values: torch.Tensor, mb: dict, cliprange: float) -> tuple[torch.Tensor, dict]:
    """Return half the larger of the clipped and unclipped squared errors, summed over the value mask, and sums to log.
    values (b, W) has a gradient. The micro-batch holds the old values, returns and value_mask (b, W)."""
    mask = mb["value_mask"]
    clipped_values = values.clamp(mb["values"] - cliprange, mb["values"] + cliprange)
    unclipped = (values - mb["returns"]).square()
    clipped = (clipped_values - mb["returns"]).square()
    loss = 0.5 * (torch.max(unclipped, clipped) * mask).sum()
    sums = {"loss/value": loss, "value/clip_fraction": ((clipped > unclipped) & mask).sum()}
    return loss, sums


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
    # ---- data and models -------------------------------------------------------------------------
    check_args(args)
    accelerator = make_accelerator(args)
    device = accelerator.device
    rank = accelerator.process_index
    world = accelerator.num_processes
    num_updates = fill_sizes(args, world)
    check_combination(args)

    sft_folder = checkpoint_folder("--sft-model-path", args.sft_model_path)
    reward_folders = [checkpoint_folder("--reward-model-paths", path) for path in args.reward_model_paths]
    tokenizer = load_tokenizer(sft_folder)
    for path in reward_folders:
        if load_tokenizer(path).get_vocab() != tokenizer.get_vocab():
            fail(f"--reward-model-paths {path}: another tokenizer than in {sft_folder}")
    data = load_splits("--dataset", args.dataset, ["id", "query", "query_token", "reference_response_token"], tokenizer)
    train = data["train"].select_columns([key for key in ("query_token", "tag") if key in data["train"].column_names])
    validation = data["validation"].take(min(args.eval_rows, len(data["validation"])))
    width = max(len(rows[0]["query_token"]) for rows in (train, validation)) + args.response_length

    # Each model moves to the device before the next is loaded, so host memory holds only one (without --offload).
    loaded = (load_reward_model(path, tokenizer, width) for path in reward_folders)  # each when it is asked for
    reward_models = [frozen_model(accelerator, reward_model, args.offload) for reward_model in loaded]
    ref_policy = frozen_model(accelerator, load_policy(sft_folder, tokenizer, width), args.offload)
    policy = load_policy(sft_folder, tokenizer, width).to(device)
    # Detail 22: the value model is a network of its own.
    if args.value_start == "reward":
        value_model = load_reward_model(reward_folders[0], tokenizer, width)
    else:
        value_model = new_reward_model(sft_folder, tokenizer, width)
        nn.init.zeros_(value_model.model.score.weight)
    value_model.to(device)
    kept = Path(args.output_dir, "members.json")  # measured again on another machine, they would round differently
    scales = json.loads(kept.read_text()) if args.resume and kept.exists() else {}
    if args.standardise_members:
        if scales.keys() != set(args.reward_model_paths):
            scales = member_scales(accelerator, ref_policy, reward_models, data["train"], tokenizer, args)
        for path, reward_model in zip(args.reward_model_paths, reward_models, strict=True):
            accelerator.print(f"{path}: mean {scales[path]['mean']:.4g}, standard deviation {scales[path]['sd']:.4g}")
            standardise(reward_model, **scales[path])
        if args.value_start == "reward":
            standardise(value_model, **scales[args.reward_model_paths[0]])
    model, optimizer = prepare(accelerator, PolicyAndValue(policy, value_model), args)
    # Register state of your own here (accelerator.register_for_checkpointing). After --resume it is on the CPU.
    finished_updates = begin_run(accelerator, args)
    if scales:
        with writing(accelerator, kept) as partial:
            if accelerator.is_main_process:
                partial.write_text(json.dumps(scales, indent=2) + "\n")

    models = policy, value_model, ref_policy, reward_models
    if args.eval_every and finished_updates == 0:
        eval_samples(accelerator, *models, validation, tokenizer, args, 0)
    run_start = time.time()
    for update in updates(accelerator, args, finished_updates, num_updates):
        # ---- 1. sample: each process its share of the episodes -----------------------------------
        update_start = time.time()
        episodes = range((update - 1) * args.batch_size, update * args.batch_size)
        order = data_order(len(train), args.seed, episodes.start, episodes.stop)  # Detail 21
        # This process samples the rows of the batch that it will train on in epoch 0, so that section 2 can pass the
        # same micro-batches through the policy as that epoch. Kernels round differently for other shapes, so this is
        # what makes the ratios before the first step exactly 1, even in bfloat16.
        rows = torch.cat([mini_batch.chunk(world)[rank] for mini_batch in mini_batches(args, update, 0, "cpu")])
        posts = train[order[rows].tolist()]
        queries = posts["query_token"].to(device)  # (b, Q)
        keys = noise_keys(args.seed, update, (episodes.start + rows).tolist())
        responses, logprobs = sample(accelerator, policy, queries, keys, tokenizer, args, args.temperature)
        sampling_seconds = time.time() - update_start

        # ---- 2. scores, log-probabilities, values ------------------------------------------------
        batch = make_batch(queries, responses, tokenizer.pad_token_id)
        batch["sampling_logprobs"] = logprobs
        batch["member_scores"] = member_scores(accelerator, reward_models, batch, args)  # (b, k)
        batch["safety"] = safety_tags(posts).to(device)
        batch |= forward_passes(accelerator, policy, value_model, ref_policy, batch, args)
        # From here on every process holds the whole batch, in the order of its episodes.
        batch["rows"] = rows.to(device)
        batch = {key: accelerator.gather(value) for key, value in batch.items()}
        by_episode = batch.pop("rows").argsort()
        batch = {key: value[by_episode] for key, value in batch.items()}

        # ---- 3. rewards --------------------------------------------------------------------------
        where = [f"update {update}, episode {i}" for i in episodes]
        check_scores(batch["member_scores"], args.reward_model_paths, where)
        has_eos = (batch["responses"] == tokenizer.eos_token_id).any(1)  # (B,)
        raw_scores = combine(batch["member_scores"].T, args.reward_combination, args.uwo_lambda, batch["safety"])
        scores = raw_scores
        if args.reward_combination == "safety_gate":
            scores = whiten(scores, torch.ones_like(scores, dtype=torch.bool))
        if args.penalty_reward_value is not None:
            scores = scores.where(has_eos, args.penalty_reward_value)  # Detail 23
        kl = batch["logprobs"] - batch["ref_logprobs"]  # (B, R)
        rewards = token_rewards(scores, kl, batch["lengths"], args.kl_coef)
        if args.whiten_rewards:
            rewards = whiten(rewards, batch["value_mask"], shift_mean=False)  # Detail 24

        # ---- 4. advantages -----------------------------------------------------------------------
        advantages, batch["returns"] = gae(rewards, batch["values"], args.gamma, args.lam)
        batch["advantages"] = whiten(advantages, batch["response_mask"])  # Detail 25
        rollout_seconds = time.time() - update_start

        # ---- 5. K epochs of clipped updates ------------------------------------------------------
        learning_rate = scheduled(args, (update - 1) / num_updates)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        logs = defaultdict(float)  # sums over the micro-batches of all optimiser steps
        grad_norms = []
        deviations = []
        for epoch in range(args.num_ppo_epochs):
            for mini_batch in mini_batches(args, update, epoch, device):
                policy_count = batch["response_mask"][mini_batch].sum()
                value_count = batch["value_mask"][mini_batch].sum()
                mbs = micro_batches(batch, mini_batch.chunk(world)[rank], args.micro_batch_size)
                for mb in mbs:
                    last = mb is mbs[-1]  # devices exchange gradients with the last micro-batch
                    accelerator.sync_gradients = last  # for DeepSpeed, whose backward then also takes the step
                    model.require_backward_grad_sync = last  # for DDP
                    logits, values = model(mb["tokens"], mb["columns"])
                    logprobs = token_logprobs(logits, mb["responses"], args.temperature)
                    del logits  # the largest tensor, not needed for the backward pass
                    pg_loss, pg_sums = policy_loss(logprobs, mb, args.cliprange)
                    vf_loss, vf_sums = value_loss(values, mb, args.cliprange_value)
                    loss = pg_loss / policy_count + args.vf_coef * vf_loss / value_count
                    accelerator.backward(loss * world)  # DDP and DeepSpeed average over devices
                    if not grad_norms:  # before the first step, every ratio should be exactly 1
                        ratio = (logprobs.detach() - mb["logprobs"]).exp()
                        deviations.append((ratio - 1).abs()[mb["response_mask"]].max())
                    for key, value in pg_sums.items():
                        logs[key] += value.detach() / policy_count
                    for key, value in vf_sums.items():
                        logs[key] += value.detach() / value_count
                grad_norms.append(optimizer_step(accelerator, model, optimizer, args.max_grad_norm, f"update {update}"))
        steps = len(grad_norms)
        means = {key: accelerator.reduce(value, "sum").item() / steps for key, value in logs.items()}

        # ---- 6. log, samples ---------------------------------------------------------------------
        sampling_difference = (batch["sampling_logprobs"] - batch["logprobs"]).abs()[batch["response_mask"]]
        ratio_square = means.pop("policy/ratio_square")
        metrics = {  # the first five are also printed
            "objective/score": scores.mean(),
            "objective/kl": kl.sum(1).mean(),
            "response/length": batch["lengths"].float().mean(),
            "response/eos_rate": has_eos.float().mean(),
            "objective/entropy": batch["entropy"].sum(1).mean(),
            "objective/rlhf_reward": (scores - args.kl_coef * kl.sum(1)).mean(),
            "objective/score_without_penalty": raw_scores.mean(),
            "objective/reward_model_variance": batch["member_scores"].var(1, unbiased=False).mean(),
            "policy/first_ratio_deviation": accelerator.gather(torch.stack(deviations).max()).max(),
            "value/mean": batch["values"].sum() / batch["value_mask"].sum(),
            **means,  # averaged over the update's optimiser steps
            "grad_norm": sum(grad_norms) / steps,
            "learning_rate": learning_rate,
            "episode": episodes.stop,
            "time/sampling": sampling_seconds,
            "time/rollout": rollout_seconds,
            "time/update": time.time() - update_start,
            "time/total": time.time() - run_start,
            # diagnostics: look here when the numbers above look wrong
            "objective/kl_k2": (0.5 * kl.square()).sum(1).mean(),
            "objective/kl_k3": ((-kl).exp() - 1 + kl).sum(1).mean(),
            "policy/ratio_variance": ratio_square - means["policy/ratio"] ** 2,
            "policy/sampling_logprob_difference_mean": sampling_difference.mean(),
            "policy/sampling_logprob_difference_max": sampling_difference.max(),
        }
        for i, mean in enumerate(batch["member_scores"].mean(0)):
            metrics[f"objective/reward_model_{i + 1}"] = mean
        if args.reward_combination == "safety_gate":
            metrics["objective/safety_share"] = (raw_scores == batch["member_scores"][:, 1]).float().mean()
        if update == num_updates or (args.eval_every and update % args.eval_every == 0):
            metrics["eval/score"] = eval_samples(accelerator, *models, validation, tokenizer, args, update)
        write_metrics(accelerator, args, metrics, update, num_updates)
        if accelerator.is_main_process and args.sample_every and update % args.sample_every == 0:
            show_samples(accelerator, batch, scores, kl.sum(1), tokenizer, update)

    # ---- save ------------------------------------------------------------------------------------
    save_model(accelerator, args, "value_model", value_model.finished(), tokenizer)
    save_model(accelerator, args, "model", policy, tokenizer)  # last: it marks the run as complete
    accelerator.print(f"done in {time.time() - run_start:.0f} s: {args.output_dir}", flush=True)
    accelerator.end_training()


# ==== rollout =====================================================================================


@torch.no_grad()
def sample(accelerator: Accelerator, policy, queries, keys, tokenizer, args, temperature: float) -> tuple:
    """Sample a response (b, R) to each left-padded query (b, Q), with [PAD] after its EOS (Detail 23). Also returns the
    log-probabilities (b, R) of its tokens at sampling time, meaningless after EOS. keys (b, 2) come from noise_keys."""
    keys = keys.to(queries.device)
    lengths = (queries != tokenizer.pad_token_id).sum(1)
    responses = queries.new_zeros((len(queries), args.response_length))
    logprobs = torch.zeros(responses.shape, device=queries.device)
    for rows in similar_lengths(lengths, args.sample_batch_size):
        cache = KeyValueCache(policy.config, rounded_width(lengths[rows]) + args.response_length)
        with accelerator.autocast():
            found = generate(policy, queries[rows], tokenizer, args.response_length, temperature, keys[rows], cache)
        responses[rows], logprobs[rows] = found
    return responses, logprobs


@torch.no_grad()
def forward_passes(accelerator: Accelerator, policy, value_model, ref_policy, batch: dict, args) -> dict:
    """Return logprobs, ref_logprobs, values and entropy (b, R) of the responses in a process's batch (make_batch), 0
    outside their masks. Its chunks are the process's parts of the mini-batches of epoch 0."""
    zeros = torch.zeros(batch["responses"].shape, device=accelerator.device)
    outputs = {key: zeros.clone() for key in ("logprobs", "ref_logprobs", "values", "entropy")}
    mbs = []
    for rows in torch.arange(len(batch["responses"]), device=accelerator.device).chunk(args.num_mini_batches):
        mbs += micro_batches(batch, rows, args.micro_batch_size)
    for mb in mbs:
        rows, width = mb["rows"], mb["responses"].shape[1]
        with accelerator.autocast():
            logits = response_logits(policy, mb["tokens"], mb["columns"])
            logprobs = token_logprobs(logits, mb["responses"], args.temperature)
            entropy = token_entropy(logits, args.temperature)
            values = value_model(mb["tokens"]).gather(1, mb["columns"])
        outputs["logprobs"][rows, :width] = logprobs * mb["response_mask"]
        outputs["entropy"][rows, :width] = entropy * mb["response_mask"]
        outputs["values"][rows, :width] = values * mb["value_mask"]
    with on_device(accelerator, ref_policy):
        for mb in mbs:
            with accelerator.autocast():
                logits = response_logits(ref_policy, mb["tokens"], mb["columns"])
                logprobs = token_logprobs(logits, mb["responses"], args.temperature)
            width = logprobs.shape[1]
            outputs["ref_logprobs"][mb["rows"], :width] = logprobs * mb["response_mask"]
    return outputs


@torch.no_grad()
def reward_scores(accelerator: Accelerator, reward_model, batch: dict, args) -> torch.Tensor:
    """Return the reward model's score (b,) of each response in a batch, read at its last token (Detail 12)."""
    rows = torch.arange(len(batch["responses"]), device=accelerator.device)
    scores = torch.zeros(len(rows), device=accelerator.device)
    with on_device(accelerator, reward_model):
        for mb in micro_batches(batch, rows, args.forward_batch_size):
            with accelerator.autocast():
                rewards = reward_model(mb["tokens"])  # (b, T)
            last = mb["row_lengths"] - 1
            scores[mb["rows"]] = rewards.gather(1, last[:, None]).squeeze(1)
    return scores


def member_scores(accelerator: Accelerator, reward_models, batch: dict, args) -> torch.Tensor:
    """Return the scores (b, k) of all reward models."""
    scores = [reward_scores(accelerator, reward_model, batch, args) for reward_model in reward_models]
    return torch.stack(scores, 1)


def safety_tags(posts: dict) -> torch.Tensor:
    """Return which posts have `safety` in their column `tag`, (b,) bool."""
    tags = posts.get("tag", [None] * len(posts["query_token"]))
    return torch.tensor([tag == "safety" for tag in tags])


def check_scores(scores: torch.Tensor, names: list[str], where: list[str]):
    """End with an error if one of the scores (b, k) is not finite, naming its model (k,) and its row (b,)."""
    for row, k in (~scores.isfinite()).nonzero().tolist():
        fail(f"{where[row]}: the score of {names[k]} is {scores[row, k].item()}; check that model")


@contextmanager
def on_device(accelerator: Accelerator, model):
    """Keep a frozen model on the device while it is used (Detail 8). An offloaded model keeps its copy in host memory,
    so nothing is copied back."""
    tensors = [*model.parameters(), *model.buffers()]
    in_host_memory = [tensor.data for tensor in tensors]
    for tensor in tensors:
        tensor.data = tensor.data.to(accelerator.device, non_blocking=True)
    yield
    for tensor, data in zip(tensors, in_host_memory, strict=True):
        tensor.data = data


def make_batch(queries: torch.Tensor, responses: torch.Tensor, pad_id: int) -> dict:
    """Return the part of a batch that follows from the tokens of left-padded queries (b, Q) and responses (b, R): see
    "Shapes" at the top of the file."""
    joined = torch.cat([queries, responses], 1)
    real_first = (joined == pad_id).int().argsort(dim=1, stable=True)
    query_lengths = (queries != pad_id).sum(1)
    lengths = (responses != pad_id).sum(1)
    positions = torch.arange(responses.shape[1], device=responses.device)
    return {
        "tokens": joined.gather(1, real_first),  # moves padding to the right
        "responses": responses,
        "query_lengths": query_lengths,
        "lengths": lengths,
        "row_lengths": query_lengths + lengths,
        "response_mask": positions < lengths[:, None],
        "value_mask": positions <= lengths[:, None],
    }


def mini_batches(args, update: int, epoch: int, device) -> tuple[torch.Tensor, ...]:
    """Return the rows (B / num_mini_batches,) of each mini-batch of an epoch. They are the same on every process."""
    shuffled = permutation(args.batch_size, args.seed + update, epoch)
    return shuffled.to(device).chunk(args.num_mini_batches)


def micro_batches(batch: dict, rows: torch.Tensor, size: int) -> list[dict]:
    """Split these rows (b,) of a batch into micro-batches of `size` rows of similar length, which saves padding. Tokens
    are cropped to the longest row (b, T), and per-token tensors to one position past the longest response (b, W). A
    micro-batch also has `rows`, its rows in the batch, and `columns` (b, W): for each response token the column of the
    token before it, where the policy predicts it and the value model values the state."""
    mbs = []
    for group in similar_lengths(batch["row_lengths"][rows], size):
        mb = {key: value[rows[group]] for key, value in batch.items()}
        width = int(mb["lengths"].max()) + 1
        for key, value in mb.items():
            if value.ndim == 2 and key != "tokens":
                mb[key] = value[:, :width]
        mb["rows"] = rows[group]
        mb["tokens"] = mb["tokens"][:, : rounded_width(mb["row_lengths"])]
        columns = mb["query_lengths"][:, None] - 1 + torch.arange(mb["responses"].shape[1], device=rows.device)
        mb["columns"] = columns.clamp(max=mb["tokens"].shape[1] - 1)  # past a response's end, any column will do
        mbs.append(mb)
    return mbs


def similar_lengths(lengths: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Return row indices in groups of `size` rows of similar length, which saves padding. lengths: (b,)."""
    order = lengths.argsort(descending=True, stable=True)
    return list(order.split(size))


def rounded_width(lengths: torch.Tensor) -> int:
    """Return the width that rows of these lengths (b,) are cropped to: the longest, rounded up to a multiple of 16.
    Rounding keeps the number of different shapes small, because each new shape costs memory and, on a GPU, time."""
    return -(-int(lengths.max()) // 16) * 16


class PolicyAndValue(nn.Module):
    """Policy and value model: separate networks (Detail 22) in one module, as DDP and DeepSpeed require."""

    def __init__(self, policy, value_model):
        super().__init__()
        self.policy = policy
        self.value_model = value_model

    def forward(self, tokens, columns):
        """Return logits (b, W, V) and values (b, W) at the columns (b, W) of right-padded rows (b, T)."""
        return response_logits(self.policy, tokens, columns), self.value_model(tokens).gather(1, columns)


def response_logits(policy, tokens: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return the logits (b, W, V) at the columns (b, W) of right-padded rows (b, T), which need no mask,
    because the model is causal. The head only runs on these columns. Banned ids get -1e9, so mask the huge
    log-probability of a [PAD] after the end before taking exp."""
    hidden = policy.base_model(tokens, use_cache=False).last_hidden_state  # (b, T, D)
    states = hidden.gather(1, columns[:, :, None].expand(-1, -1, hidden.shape[2]))
    return policy.get_output_embeddings()(states).masked_fill_(policy.banned, -1e9)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return log softmax(logits / (temperature + 1e-7)) at the tokens (Detail 20): (b, W, V), (b, W) -> (b, W)."""
    scaled = logits.float() / (temperature + TEMPERATURE_EPS)
    return -F.cross_entropy(scaled.flatten(0, 1), tokens.flatten(), reduction="none").view_as(tokens)


def token_entropy(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the entropy (nats) of softmax(logits / (temperature + 1e-7)) per position: (b, W, V) -> (b, W)."""
    scaled = logits.float() / (temperature + TEMPERATURE_EPS)
    logprobs = scaled.log_softmax(2)
    return -(logprobs.exp() * logprobs).sum(2)


# ==== sampling ====================================================================================


def noise_keys(seed: int, update: int, episodes: Iterable[int]) -> torch.Tensor:
    """Return two 32-bit keys (b, 2) per episode, hashed from (seed, update, episode)."""
    digests = [hashlib.blake2b(f"{seed} {update} {i}".encode(), digest_size=8).digest() for i in episodes]
    return torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.int32).reshape(-1, 2)


def mix(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return a bijective hash of int32 x, in which each bit changes about half of all bits: Wellons's lowbias32, with
    key xored in after each product. It is meant for unsigned numbers, but torch multiplies only signed ones. Products
    wrap around all the same, masks make >> unsigned, and - 2**32 brings a large constant into the range of int32."""
    x = ((x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D) ^ key
    x = ((x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)) ^ key
    return x ^ ((x >> 16) & 0xFFFF)


def gumbel_noise(keys: torch.Tensor, position: int | torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return Gumbel(0, 1) noise (b, V) that depends only on (key, position, token), not on batch, device or rank: the
    hash of all three, as a uniform number u in (0, 1), becomes -log(-log(1 - u)). The largest noise comes from u near
    0, where float32 is finest."""
    # odd factors spread consecutive positions and tokens over the 32 bits
    step = torch.as_tensor(position, dtype=torch.int32, device=keys.device) * 0x3C6EF35F
    # two keys (b, 1) for this position; each hashes the other in, so that it depends on all 64 bits of the row's keys
    key_0 = mix(keys[:, 0, None] + step, keys[:, 1, None])
    key_1 = mix(keys[:, 1, None] + step, keys[:, 0, None])
    token = torch.arange(vocab_size, dtype=torch.int32, device=keys.device) * (0x9E3779B9 - 2**32)
    bits = mix(token + key_0, key_1)  # (b, V)
    unsigned = torch.where(bits < 0, bits + 2.0**32, bits.float())
    uniform = ((unsigned + 0.5) / 2**32).clamp(max=1 - 2**-24)  # 1 would give an infinite number
    return -torch.log(-torch.log1p(-uniform))


def sample_tokens(logits, keys, position, temperature: float, banned) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample a token (b,) per row of logits (b, V), and return its log-probability (b,) too. The arg max of log
    softmax(logits / (temperature + 1e-7)) plus keyed Gumbel noise samples that softmax. `banned` (V,) are excluded."""
    scaled = (logits.float() / (temperature + TEMPERATURE_EPS)).masked_fill(banned, -torch.inf)
    tokens = (scaled + gumbel_noise(keys, position, scaled.shape[1])).argmax(1)
    logprobs = scaled.gather(1, tokens[:, None]).squeeze(1) - scaled.logsumexp(1)
    return tokens, logprobs


class KeyValueCache(StaticCache):
    """A StaticCache with keys in the type of the values. Under autocast, rotary embeddings make keys float32, while
    values are bfloat16. Attention would cast all keys again at every step."""

    def update(self, keys, values, *args, **kwargs):
        return super().update(keys.to(values.dtype), values, *args, **kwargs)


@torch.no_grad()
def generate(model, queries, tokenizer, response_length: int, temperature: float, keys, cache):
    """Sample responses (b, R) to left-padded queries (b, Q) and return them with their tokens' log-probabilities (b,
    R). Rows are filled with [PAD] after EOS (Detail 23). cache is a new KeyValueCache with room for the longest query
    (rounded_width) and R tokens. All steps but the first have the same shapes. Only every eighth step waits for the
    device, to check whether all rows have ended."""
    pad_id = tokenizer.pad_token_id
    is_query = queries != pad_id
    width = rounded_width(is_query.sum(1))
    inputs = queries[:, -width:]
    is_token = F.pad(is_query[:, -width:], (0, response_length), value=True)  # later columns are hidden by causality
    position_ids = (is_query[:, -width:].cumsum(1) - 1).clamp(min=0)
    responses = queries.new_full((len(queries), response_length), pad_id)
    logprobs = torch.zeros(responses.shape, device=queries.device)
    ended = torch.zeros(len(queries), dtype=torch.bool, device=queries.device)
    positions = torch.arange(response_length, dtype=torch.int32, device=queries.device)  # copied only once
    for t in range(response_length):
        states = model.base_model(
            inputs, attention_mask=is_token, position_ids=position_ids, past_key_values=cache, use_cache=True
        ).last_hidden_state
        logits = model.get_output_embeddings()(states[:, -1])
        tokens, logprobs[:, t] = sample_tokens(logits, keys, positions[t], temperature, model.banned)
        responses[:, t] = tokens.masked_fill(ended, pad_id)
        ended |= tokens == tokenizer.eos_token_id
        if t % 8 == 7 and ended.all():
            break
        inputs = tokens[:, None]
        position_ids = position_ids[:, -1:] + 1
    return responses, logprobs


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

    def forward(self, tokens):
        """Return the rewards (b, T) of right-padded rows (b, T), which need no mask, because the model is causal."""
        hidden = self.model.base_model(tokens, use_cache=False).last_hidden_state
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


def load_reward_model(path: str, tokenizer, width: int = 0) -> RewardModel:
    """Return a trained reward model for rows of up to `width` tokens, in float32 and without dropout (see load_policy).
    To use the paper's released models, convert them with benchmark/convert_released.py."""
    settings = {"dtype": torch.float32, "trust_remote_code": False, "output_loading_info": True}
    with or_fail(f"{path} holds no reward model that can be read; make one with reward.py"):
        model, found = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, **settings)
    wrong = {kind: sorted(keys)[:3] for kind, keys in found.items() if keys}
    if wrong:  # transformers would go on, with a random head where there is none
        fail(f"{path} holds no reward model as reward.py saves it: {wrong}")
    check_model(model, path, width)
    model.config.pad_token_id = tokenizer.pad_token_id
    return RewardModel(model)


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


def standardise(model, mean: float, sd: float):
    """Make a reward model return (score - mean) / sd, by changing its head's weight and `reward_mean`."""
    with torch.no_grad():
        model.model.score.weight.div_(sd)  # the bias is still 0
    model.reward_mean = (model.reward_mean + mean) / sd


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


def frozen_model(accelerator: Accelerator, model, offload: bool):
    """Freeze a model and move it to the device, or with `offload` into page-locked host memory. Under bf16 the weights
    of linear layers are cast here once, because autocast would cast them at every use (not those that an embedding
    shares). Under DeepSpeed, which trains in bfloat16, all weights but a reward model's head are cast.
    Buffers, such as rotary frequencies, stay in float32."""
    model.requires_grad_(False)
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, module in model.named_modules():
        is_linear = isinstance(module, nn.Linear) and module.weight not in embeddings
        is_cast = (is_linear or accelerator.state.deepspeed_plugin) and name != "model.score"  # RewardModel's head
        for parameter in module.parameters(recurse=False):
            if is_cast and accelerator.mixed_precision == "bf16":
                parameter.data = parameter.data.bfloat16()
            if offload and accelerator.device.type == "cuda":
                parameter.data = parameter.data.pin_memory()
    return model if offload else model.to(accelerator.device)


def fill_sizes(args, world: int) -> int:
    """Fill in the sizes left open and return the number of updates. Ends with an error if the batch does not fit."""
    args.micro_batch_size = args.micro_batch_size or MICRO_BATCH_SIZES.get(args.model, 8)
    args.sample_batch_size = args.sample_batch_size or SAMPLE_BATCH_SIZES.get(args.model, 32)
    if args.offload is None:
        args.offload = args.model == "6.9b"
    if args.total_episodes < args.batch_size:
        fail(f"--total-episodes {args.total_episodes} must be at least --batch-size {args.batch_size}")
    if args.batch_size % (args.num_mini_batches * world):
        fail(f"--batch-size {args.batch_size}: no multiple of {args.num_mini_batches} mini-batches x {world} processes")
    return args.total_episodes // args.batch_size


def check_combination(args):
    """End with an error if --reward-combination does not fit the other arguments."""
    if (args.reward_combination == "uwo") != (args.uwo_lambda is not None):
        fail("--reward-combination uwo needs --uwo-lambda (the paper's PPO: 0.1); nothing else takes it")
    if args.reward_combination == "safety_gate" and args.standardise_members:
        fail("--reward-combination safety_gate needs --no-standardise-members: its threshold is a probability")
    if not args.reward_model_paths or (args.reward_combination == "safety_gate" and len(args.reward_model_paths) != 2):
        fail("--reward-model-paths needs one or more paths; safety_gate needs two, helpfulness, then safety")


# ==== evaluation ==================================================================================


@torch.no_grad()
def eval_samples(accelerator, policy, value_model, ref_policy, reward_models, data, tokenizer, args, update) -> float:
    """Sample a response to each post of `data` as in training, with noise that is the same at every update, and write
    them to samples/update_{update}.csv with their KL to the reference (k2, the ensemble paper's equation 10) and their
    combined and single scores. Returns the mean of the combined score, without EOS penalty."""
    samples = []
    for index, posts in shares(accelerator, data, len(data), "validation samples"):
        queries = posts["query_token"].to(accelerator.device)
        keys = noise_keys(args.seed, -1, index)
        responses, _ = sample(accelerator, policy, queries, keys, tokenizer, args, args.temperature)
        batch = make_batch(queries, responses, tokenizer.pad_token_id)
        batch |= forward_passes(accelerator, policy, value_model, ref_policy, batch, args)
        members = member_scores(accelerator, reward_models, batch, args).cpu()  # (b, k)
        check_scores(members, args.reward_model_paths, [f"update {update}, validation post {i}" for i in posts["id"]])
        columns = {
            "id": posts["id"],
            "query": posts["query"],
            "response": tokenizer.batch_decode(responses, skip_special_tokens=True),
            "has_eos": (responses == tokenizer.eos_token_id).any(1).tolist(),
            "tokens": batch["lengths"].tolist(),
            "kl_k2": (0.5 * (batch["logprobs"] - batch["ref_logprobs"]).square()).sum(1).tolist(),
            "score": combine(members.T, args.reward_combination, args.uwo_lambda, safety_tags(posts)).tolist(),
        }
        columns |= {f"score_{k + 1}": scores.tolist() for k, scores in enumerate(members.T)}
        samples += pandas.DataFrame(columns).to_dict("records")
    table = pandas.DataFrame(gather_object(samples))
    with writing(accelerator, Path(args.output_dir, "samples", f"update_{update:06d}.csv")) as partial:
        if accelerator.is_main_process:
            table.to_csv(partial, index=False, quoting=csv.QUOTE_NONNUMERIC)  # texts can contain \r
    return table["score"].mean()


@torch.no_grad()
def member_scales(accelerator: Accelerator, policy, reward_models, data, tokenizer, args) -> dict:
    """Return {path of a reward model: mean and standard deviation (/ n)} of its scores of one SFT sample to each of the
    first --standardise-posts posts, drawn as in training but with their own noise. Ends with an error if a model gives
    all samples the same score."""
    data = data.take(min(args.standardise_posts, len(data)))
    scores = []
    for index, posts in shares(accelerator, data, args.forward_batch_size, "scale of the reward models"):
        queries = posts["query_token"].to(accelerator.device)
        keys = noise_keys(args.seed, -2, index)
        with on_device(accelerator, policy):
            responses, _ = sample(accelerator, policy, queries, keys, tokenizer, args, args.temperature)
        batch = make_batch(queries, responses, tokenizer.pad_token_id)
        found = member_scores(accelerator, reward_models, batch, args)
        check_scores(found, args.reward_model_paths, [f"training post {i}" for i in index])
        scores += found.tolist()
    scores = torch.tensor(gather_object(scores), dtype=torch.float64)  # (n, k)
    scales = {}
    for k, path in enumerate(args.reward_model_paths):
        mean = scores[:, k].mean().item()
        sd = scores[:, k].std(unbiased=False).item()
        if sd < 1e-6 * max(1, abs(mean)):
            fail(f"{path} scores all samples {mean:.4g}: it cannot be standardised; fix that model or leave it out")
        scales[path] = {"mean": mean, "sd": sd}
    return scales


def show_samples(accelerator: Accelerator, batch: dict, scores, kl, tokenizer, update: int):
    """Print the first four episodes of a batch as a table that wraps long texts, and log them to W&B. scores and kl
    (B,) belong to the batch's episodes."""
    columns = ["query (end)", "response", "score", "kl"]
    table = Table(*columns, title=f"samples of update {update}", show_lines=True)
    samples = []
    for i in range(min(4, len(scores))):
        query = tokenizer.decode(batch["tokens"][i, : batch["query_lengths"][i]].tolist())
        response = tokenizer.decode(batch["responses"][i, : batch["lengths"][i]].tolist())
        samples.append([query[-200:], response, f"{scores[i]:.3f}", f"{kl[i]:.3f}"])
        table.add_row(*samples[-1])
    Console(width=160, markup=False, emoji=False).print(table)
    for tracker in accelerator.trackers:
        if tracker.name == "wandb":
            tracker.log_table("samples/training", columns, samples, step=update)


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
