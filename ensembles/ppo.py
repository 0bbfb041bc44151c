"""PPO against several reward models, a copy of ../ppo.py: their mean, worst case or uncertainty-weighted score as in
"Reward Model Ensembles Help Mitigate Overoptimization", or Llama 2's safety gate. A gold reward looks on.

One process:    python ensembles/ppo.py --model nano-xs --reward-model-paths runs/reward/nano-xs/{1,2,3} \
                    --reward-combination uwo --uwo-lambda 0.1 --gold quickstart/truth.py:score
Paper scale:    bash benchmark/ensembles.sh --dry-run

Starts from the SFT model (policy, reference, value) of the same name and seed. The run folder (default
runs/ppo/{model}/{seed}) holds model/ (the policy, a plain transformers checkpoint), value_model/, metrics.jsonl,
args.json, members.json (mean and standard deviation of each reward model), TensorBoard files, with --gold
gold_samples.csv and, with --save-every, checkpoints/.

The file goes from the algorithm outwards: arguments, losses, rollout, main, evaluation, sampling, padding and forward
passes, models, plumbing. What differs from the first paper's: `git diff --no-index ppo.py ensembles/ppo.py`.

Deviations from the paper and its code, each on purpose:
- the score is added one position past EOS, as in the authors' and OpenAI's code; the text of figure 9 says at EOS.
- whitening and loss means are over the whole batch; the authors' code takes them per device and micro-batch, so that
  their objective changes with the hardware. The policy loss is divided by the number of response tokens (through EOS),
  the value loss by that of value positions (through one past EOS).
- sampling is Gumbel-max with noise keyed by (seed, update, episode, position); a row stops at its EOS, which equals
  sampling on and truncating. [PAD] and ids beyond the tokenizer have probability 0 in sampling and in every
  log-probability.
- old log-probabilities come from a forward pass over the finished response; the authors' are the generation's scores.
- the value head's bias is decayed with all other weights, as torch's AdamW does by default.
- validation samples are drawn at temperature 0.01, as in the authors' code.
- the ensemble paper's batches of 32 out of 256 rollouts (table 3) are --batch-size 256 --num-mini-batches 8; --gold
  samples as training does, and not with table 4's top-p 0.9.
- uwo's variance is over k models, as in equation 5; the ensemble paper's code divides by k - 1 in PPO.
"""

import csv
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import struct
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
from rich.table import Table
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
)

STAGE = "ppo"
PRESETS = {"1b": 16, "2.8b": 8, "6.9b": 2}  # Pythia's sizes: episodes of a micro-batch that fit one 80 GB device
DATASET = "vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144"


@dataclass
class Args:
    model: str = "1b"
    """name of the run: 1b, 2.8b, 6.9b or any other; the weights come from the two paths below"""
    seed: int = 44413
    """seed of the query order and the sampling noise (paper: 44413, 55513, 66613, 77713)"""
    sft_model_path: str = "runs/sft/{model}/{seed}"
    """policy and reference: run folder, checkpoint folder or Hub id[@revision]"""
    reward_model_paths: list[str] | None = None
    """one or more reward models; needed"""
    reward_combination: Literal["mean", "wco", "uwo", "safety_gate"] = "mean"
    """how several rewards become one score: mean, worst case, or mean minus uwo_lambda times variance; safety_gate, of
    a helpfulness and a safety model: safety's where it finds little of it or the post's column `tag` says safety, else
    helpfulness's, whitened over the batch (Llama 2)"""
    uwo_lambda: float | None = None
    """weight of the variance in uwo, at least 0; has no default"""
    standardise_members: bool = True
    """of each reward model (score - mean) / standard deviation, both over samples of the SFT policy and measured before
    the first update (as the ensemble paper's authors say they did): a KL coefficient then means the same whatever is
    trained against; not for safety_gate"""
    standardise_posts: int = 256
    """so many training posts, the first ones, have a sample for that"""
    value_start: Literal["sft", "reward"] = "sft"
    """what the value model starts from: the SFT model with a head of zeros (the ensemble paper's code has a new head on
    the policy's trunk), or the first reward model (Detail 22), with whose blind spots it begins"""
    gold: str | None = None
    """reward model (folder or Hub id[@revision]) or path.py:function of (post, summary) that scores samples of
    --eval-rows fixed validation posts; changes nothing in the training"""
    gold_every: int = 10
    """updates between gold scores, beside those before the first and after the last update; 0: those alone"""
    dataset: str = "data/tldr/sft" if Path("data/tldr/sft").exists() else DATASET
    """SFT data, whose posts are the queries: folder or Hub id[@revision]"""
    output_dir: str = "runs/ppo/{model}/{seed}"
    """run folder"""

    total_episodes: int = 1_000_000
    """responses sampled in all (table 7)"""
    batch_size: int = 512
    """episodes per update over all devices (table 7)"""
    num_ppo_epochs: int = 4
    """passes over the batch per update (table 7, K)"""
    num_mini_batches: int = 1
    """optimiser steps per pass (table 7, N_mb)"""
    learning_rate: float = 3e-6
    """learning rate of the first update (table 7)"""
    lr_schedule: Literal["linear", "cosine"] = "linear"
    """how it falls, to reach final_learning_rate one update after the last (table 7: linear)"""
    final_learning_rate: float = 0.0
    """where the schedule ends (ensemble paper, table 3: cosine from 1e-6 to 1e-7)"""
    adam_eps: float = 1e-5
    """AdamW's epsilon (table 7)"""
    weight_decay: float = 0.01
    """AdamW's weight decay (torch's default, as in the paper's code)"""
    max_grad_norm: float = 0.0
    """gradient norm to clip at; 0: no clipping (paper)"""
    response_length: int = 53
    """tokens sampled at most (Detail 23)"""
    temperature: float = 0.7
    """sampling temperature; every log-probability is taken at it (table 7)"""
    penalty_reward_value: float | None = -1.0
    """score of a response without EOS (Detail 23); None: what the reward models say, as in the ensemble paper"""
    kl_coef: float = 0.05
    """beta, the weight of the KL penalty in the reward (table 7)"""
    whiten_rewards: bool = False
    """scale token rewards to unit variance, keeping their mean (Detail 24)"""
    gamma: float = 1.0
    """discount factor (table 7)"""
    lam: float = 0.95
    """lambda of generalised advantage estimation (table 7)"""
    cliprange: float = 0.2
    """clipping of the policy ratio (table 7)"""
    cliprange_value: float = 0.2
    """clipping of the value around its old value (table 7)"""
    vf_coef: float = 0.1
    """weight of the value loss (table 7, c_1)"""

    sample_every: int = 50
    """updates between printed tables of samples; 0: none"""
    eval_every: int = 0
    """updates between validation scores on a fixed batch; 0: after the last update only"""
    eval_rows: int = 64
    """validation posts in that batch"""
    micro_batch_size: int | None = None
    """episodes per device and forward/backward pass: memory only, never the result; default: what fits 80 GB, or 8"""
    forward_batch_size: int = 32
    """episodes per device in passes without gradient (sampling, scoring)"""
    mixed_precision: Literal["no", "bf16"] | None = None
    """autocast over float32 weights; default bf16 on a GPU (Detail 8), none on a CPU"""
    offload: bool | None = None
    """keep reference and reward models in the machine's memory except while they score; default at 6.9b"""
    save_every: int = 0
    """updates between checkpoints for --resume; 0: none"""
    keep_checkpoints: int = 2
    """newest checkpoints kept"""
    resume: bool = False
    """continue the run in output_dir from its newest checkpoint"""
    track: bool = False
    """log to Weights & Biases as well (WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE in the environment apply)"""


# ==== the algorithm ===============================================================================


class PolicyAndValue(nn.Module):
    """Policy and value model, separate networks (Detail 22) in one module for DDP's and DeepSpeed's sake."""

    def __init__(self, policy, value_model):
        super().__init__()
        self.policy, self.value_model = policy, value_model

    def forward(self, queries, responses, pad_id: int, banned: torch.Tensor, temperature: float):
        """queries (b, Q) left-padded, responses (b, W) -> log-probabilities (b, W) of the response tokens, values (b,
        W) of the states before them, and, without gradient, the policy's entropy (b, W) there (nats; else None)."""
        rows, before = episode_rows(queries, responses, pad_id)
        logits = response_logits(self.policy, rows, before, banned)  # (b, W, V)
        entropy = None if torch.is_grad_enabled() else token_entropy(logits, temperature)
        values = self.value_model.model.score(states_at(self.value_model.model, rows, before)).squeeze(-1)  # (b, W)
        return token_logprobs(logits, responses, temperature), values, entropy


def combine(scores: torch.Tensor, method: str = "mean", uwo_lambda: float | None = None, safety=None) -> torch.Tensor:
    """Scores of k reward models (k, b) -> one score (b,): mean, worst case (wco), or mean - lambda x variance (uwo; the
    variance over k, not k - 1). Reward model ensembles, equations 3 to 5. safety_gate, of the scores of helpfulness and
    safety: safety's where its sigmoid is below 0.15, or the prompt's tag says so (`safety`, (b,) bool), helpfulness's
    elsewhere. Llama 2, section 3.2.3, whose logit of the sigmoid is the score itself."""
    if method == "wco":
        return scores.min(0).values
    if method == "safety_gate":
        return torch.where(safety | (scores[1].sigmoid() < 0.15), scores[1], scores[0])
    mean = scores.mean(0)
    return mean if method == "mean" else mean - uwo_lambda * (scores - mean).square().mean(0)


def safety_tags(batch: dict) -> torch.Tensor:
    """Of which prompts of a batch the column `tag` says safety: (b,) bool."""
    return torch.tensor([tag == "safety" for tag in batch.get("tag", [None] * len(batch["query_token"]))])


def token_rewards(scores: torch.Tensor, logratio: torch.Tensor, lengths: torch.Tensor, kl_coef: float) -> torch.Tensor:
    """Rewards (b, R): -kl_coef x (log pi - log pi_ref) at each token (k1, equation 3), and the score (b,) one position
    past EOS, or on the last position where there is no room (Detail 23). logratio (b, R), 0 after a response's end;
    lengths (b,) of the responses in tokens, EOS counted."""
    rewards = -kl_coef * logratio
    place = lengths.clamp(max=logratio.shape[1] - 1)
    return rewards.scatter_add(1, place[:, None], scores[:, None].to(rewards))


def gae(rewards: torch.Tensor, values: torch.Tensor, gamma: float, lam: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation: rewards and values (b, R), 0 outside the value mask -> advantages (b, R) and
    returns = advantages + values."""
    advantages, last = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        next_values = values[:, t + 1] if t + 1 < rewards.shape[1] else 0.0
        last = rewards[:, t] + gamma * next_values - values[:, t] + gamma * lam * last
        advantages[:, t] = last
    return advantages, advantages + values


def whiten(values: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True) -> torch.Tensor:
    """(values - mean) / sqrt(var + 1e-8) with biased variance over the mask, the mean added back if not shift_mean
    (Details 24 and 25); 0 outside the mask. (b, R), (b, R) bool -> (b, R), or (b,), (b,) -> (b,)."""
    count = mask.sum()
    mean = (values * mask).sum() / count
    variance = ((values - mean).square() * mask).sum() / count
    whitened = (values - mean) * torch.rsqrt(variance + 1e-8)
    return (whitened if shift_mean else whitened + mean) * mask


def ppo_loss(
    logprobs: torch.Tensor,
    values: torch.Tensor,
    old_logprobs: torch.Tensor,
    old_values: torch.Tensor,
    advantages: torch.Tensor,
    returns: torch.Tensor,
    response_mask: torch.Tensor,
    value_mask: torch.Tensor,
    cliprange: float,
    cliprange_value: float,
) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Clipped losses of a micro-batch, all arguments (b, W): the policy loss summed over the response mask, the value
    loss (half the larger of the clipped and the unclipped square) summed over the value mask, and sums for the log:
    over the value mask where the name has value in it, else over the response mask."""
    logratio = (logprobs - old_logprobs).masked_fill(~response_mask, 0.0)
    ratio = logratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    policy_loss = (torch.max(unclipped, clipped) * response_mask).sum()
    near = torch.clamp(values, old_values - cliprange_value, old_values + cliprange_value)
    square, clipped_square = (values - returns).square(), (near - returns).square()
    value_loss = 0.5 * (torch.max(square, clipped_square) * value_mask).sum()
    logs = {
        "loss/policy": policy_loss,
        "loss/value": value_loss,
        "policy/clip_fraction": ((clipped > unclipped) & response_mask).sum(),
        "policy/approx_kl": 0.5 * logratio.square().sum(),
        "policy/ratio": (ratio * response_mask).sum(),
        "policy/ratio_square": (ratio.square() * response_mask).sum(),
        "value/clip_fraction": ((clipped_square > square) & value_mask).sum(),
    }
    return policy_loss, value_loss, {key: value.detach().float() for key, value in logs.items()}


@torch.no_grad()
def rollout(accelerator: Accelerator, model, ref_policy, reward_models, queries, keys, tokenizer, banned, args) -> dict:
    """Sample a response to each left-padded query (b, Q) and look at it with every model. Returns responses, logprobs,
    ref_logprobs, values, entropy (b, R), 0 where the position is outside its mask, scores (b, k), and sampling_seconds
    (1,)."""
    pad_id, R = tokenizer.pad_token_id, args.response_length
    found = {"responses": torch.full((len(queries), R), pad_id, device=accelerator.device)}
    for key in ("logprobs", "ref_logprobs", "values", "entropy"):
        found[key] = torch.zeros(len(queries), R, device=accelerator.device)
    found["scores"] = torch.zeros(len(queries), len(reward_models), device=accelerator.device)
    query_lengths, start = (queries != pad_id).sum(1), time.time()
    for index in micro_batches(query_lengths, args.forward_batch_size):
        query = trim(queries[index].to(accelerator.device), pad_id, "left")
        with accelerator.autocast():
            response = generate(model.policy, query, tokenizer, R, args.temperature, keys[index])
        found["responses"][index] = truncate_response(response, tokenizer.eos_token_id, pad_id)  # Detail 23
    found["sampling_seconds"] = torch.full((1,), time.time() - start, device=accelerator.device)
    response_lengths = (found["responses"] != pad_id).sum(1)
    # grouped anew: rows that sampled alike are now of other lengths
    batches = []
    for index in micro_batches(query_lengths + response_lengths.cpu(), args.forward_batch_size):
        lengths = response_lengths[index]
        width = min(int(lengths.max()) + 1, R)  # through one past the longest response's EOS
        query, response = trim(queries[index].to(accelerator.device), pad_id, "left"), found["responses"][index, :width]
        batches.append((index, query, response, *episode_masks(lengths, width)))
    for index, query, response, response_mask, value_mask in batches:
        with accelerator.autocast():
            logprobs, values, entropy = model(query, response, pad_id, banned, args.temperature)
        width = response.shape[1]
        found["logprobs"][index, :width] = logprobs * response_mask
        found["entropy"][index, :width] = entropy * response_mask
        found["values"][index, :width] = values * value_mask
    home = "cpu" if args.offload else accelerator.device  # where a frozen model waits
    ref_policy.to(accelerator.device)
    for index, query, response, response_mask, _ in batches:
        with accelerator.autocast():
            logits = response_logits(ref_policy, *episode_rows(query, response, pad_id), banned)
            logprobs = token_logprobs(logits, response, args.temperature)
        found["ref_logprobs"][index, : response.shape[1]] = logprobs * response_mask
    ref_policy.to(home)
    for k, reward_model in enumerate(reward_models):
        reward_model.to(accelerator.device)
        for index, query, response, *_ in batches:
            rows = right_padded(torch.cat([query, response], 1), pad_id)
            with accelerator.autocast():
                found["scores"][index, k] = response_rewards(reward_model, rows, 0, pad_id)
        reward_model.to(home)
    return found


def episode_masks(lengths: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Response mask (through EOS) and value mask (through one past EOS, where the score lies), both (b, width) bool,
    of responses of `lengths` (b,) tokens, EOS counted."""
    place = torch.arange(width, device=lengths.device)
    return place < lengths[:, None], place <= lengths[:, None]


def truncate_response(responses: torch.Tensor, eos_id: int, pad_id: int) -> torch.Tensor:
    """Detail 23: everything after the first EOS becomes [PAD]; a row without EOS stays. (b, R) -> (b, R)."""
    ended = (responses == eos_id).int().cumsum(1) - (responses == eos_id).int() > 0  # an EOS lies before
    return responses.masked_fill(ended, pad_id)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """log softmax(logits / (temperature + 1e-7)) at the tokens (Detail 20): (b, R, V), (b, R) -> (b, R)."""
    scaled = logits.float() / (temperature + 1e-7)
    return -F.cross_entropy(scaled.flatten(0, 1), tokens.flatten(), reduction="none").view_as(tokens)


def token_entropy(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Entropy (nats) of softmax(logits / (temperature + 1e-7)) at each position: (b, R, V) -> (b, R)."""
    logprobs = (logits.float() / (temperature + 1e-7)).log_softmax(2)
    return -(logprobs.exp() * logprobs).sum(2)


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
    # ---- data and models -------------------------------------------------------------------------
    accelerator = make_accelerator(args)
    args.micro_batch_size = args.micro_batch_size or PRESETS.get(args.model, 8)
    args.offload = args.model == "6.9b" if args.offload is None else args.offload
    world, rank = accelerator.num_processes, accelerator.process_index
    num_updates, mini_batch_size = args.total_episodes // args.batch_size, args.batch_size // args.num_mini_batches
    if num_updates == 0 or args.batch_size % (args.num_mini_batches * world):
        split = f"{args.num_mini_batches} mini-batches x {world} process(es)"
        fail(f"--batch-size {args.batch_size} does not split into {split}, or is more than --total-episodes")
    if (args.reward_combination == "uwo") != (args.uwo_lambda is not None) or (args.uwo_lambda or 0) < 0:
        fail("--reward-combination uwo needs --uwo-lambda of at least 0 (the paper's PPO: 0.1); nothing else takes it")
    if args.reward_combination == "safety_gate" and args.standardise_members:
        fail("--reward-combination safety_gate needs --no-standardise-members: its threshold is a probability")
    if not args.reward_model_paths or args.reward_combination == "safety_gate" and len(args.reward_model_paths) != 2:
        fail("--reward-model-paths needs one or more; safety_gate needs two, helpfulness, then safety")
    sft_folder = checkpoint_folder("--sft-model-path", args.sft_model_path)
    reward_folders = [checkpoint_folder("--reward-model-paths", path) for path in args.reward_model_paths]
    gold_is_code = args.gold and re.fullmatch(r".+\.py:\w+", args.gold)
    gold_folders = [checkpoint_folder("--gold", args.gold)] if args.gold and not gold_is_code else []
    tokenizer = load_tokenizer(sft_folder)
    for path in reward_folders + gold_folders:
        if load_tokenizer(path).get_vocab() != tokenizer.get_vocab():
            fail(f"{path}: a reward model of another tokenizer than {sft_folder}")
    pad_id, eos_id, R = tokenizer.pad_token_id, tokenizer.eos_token_id, args.response_length
    data = load_splits("--dataset", args.dataset, ["query", "query_token", "reference_response_token"], tokenizer)
    train = data["train"].select_columns([x for x in ("query_token", "tag") if x in data["train"].column_names])
    fixed = data["validation"].select(range(min(args.eval_rows, len(data["validation"]))))
    reward_models = [frozen(accelerator, load_reward_model(path, tokenizer), args.offload) for path in reward_folders]
    gold = gold_function(args.gold) if gold_is_code else None
    with or_fail(f"--gold {args.gold}: a post has no score"):  # told now, not in the run
        [float(gold(post, "")) for post in fixed["query"] if gold]
    for path in gold_folders:
        gold = frozen(accelerator, load_reward_model(path, tokenizer), args.offload)
        if Path(path).resolve() in [Path(folder).resolve() for folder in reward_folders]:
            accelerator.print(f"warning: --gold {args.gold} is also trained against, as one of --reward-model-paths")
    ref_policy = frozen(accelerator, load_policy(sft_folder, tokenizer), args.offload)
    policy = load_policy(sft_folder, tokenizer)
    if args.value_start == "reward":
        value_model = load_reward_model(reward_folders[0], tokenizer)  # Detail 22: all weights, the head included
    else:
        value_model = new_reward_model(sft_folder, tokenizer)
        nn.init.zeros_(value_model.model.score.weight)
    check_head(policy, sft_folder)
    banned = banned_ids(policy, tokenizer).to(accelerator.device)
    kept, scales = Path(args.output_dir, "members.json"), {}
    if args.standardise_members:
        scales = json.loads(kept.read_text()) if kept.exists() else {}  # of the run that --resume continues
        if scales.keys() != set(args.reward_model_paths):
            posts = data["train"].select(range(min(args.standardise_posts, len(data["train"]))))
            scales = member_scales(accelerator, ref_policy, reward_models, posts, tokenizer, args)
        pairs = list(zip(args.reward_model_paths, reward_models, strict=True))
        for path, model in pairs + [(args.reward_model_paths[0], value_model)] * (args.value_start == "reward"):
            accelerator.print(f"{path}: mean {scales[path]['mean']:.4g}, standard deviation {scales[path]['sd']:.4g}")
            standardise(model, **scales[path])
    both = PolicyAndValue(policy, value_model)
    model, optimizer = prepare(accelerator, both, args)
    # state that an edit carries from update to update: accelerator.register_for_checkpointing(it) before this line
    first = begin_run(accelerator, args)
    if scales:
        with writing(accelerator, kept) as partial:
            if accelerator.is_main_process:
                partial.write_text(json.dumps(scales, indent=2) + "\n")

    looked = accelerator, both, ref_policy, reward_models, gold, fixed, tokenizer, banned, args
    if gold and first == 0:
        write_metrics(accelerator, args, {"episode": 0} | gold_metrics(*looked, 0), 0, num_updates)
    begin = time.time()
    for update in updates(accelerator, args, first, num_updates):
        # ---- rollout: sample, then score (no gradient) -------------------------------------------
        start = time.time()
        episodes = range((update - 1) * args.batch_size, update * args.batch_size)
        order = data_order(len(train), args.seed, episodes.start, episodes.stop)  # Detail 21
        batch = train[order.tolist()]
        queries, safety = batch["query_token"], safety_tags(batch).to(accelerator.device)  # (B, Q), the same everywhere
        mine = slice(rank * args.batch_size // world, (rank + 1) * args.batch_size // world)
        keys = noise_keys(args.seed, update, list(episodes[mine]))
        found = rollout(accelerator, both, ref_policy, reward_models, queries[mine], keys, tokenizer, banned, args)
        # from here on every process holds the whole batch, so that no number depends on how it was split
        found = {key: accelerator.gather(value) for key, value in found.items()}
        responses, logprobs, values = found["responses"], found["logprobs"], found["values"]  # (B, R)
        queries = queries.to(accelerator.device)
        lengths = (responses != pad_id).sum(1)  # (B,)
        response_mask, value_mask = episode_masks(lengths, R)  # (B, R)
        named = [f"update {update}, episode {i} (query {row})" for i, row in zip(episodes, order.tolist(), strict=True)]
        check_scores(found["scores"], args.reward_model_paths, named)
        raw_scores = combine(found["scores"].T, args.reward_combination, args.uwo_lambda, safety)  # (B,)
        scores, has_eos = raw_scores, (responses == eos_id).any(1)  # (B,)
        if args.reward_combination == "safety_gate":
            scores = whiten(scores, torch.ones_like(scores, dtype=torch.bool))
        if args.penalty_reward_value is not None:
            scores = torch.where(has_eos, scores, args.penalty_reward_value)  # Detail 23

        # ---- rewards and advantages --------------------------------------------------------------
        logratio = logprobs - found["ref_logprobs"]
        rewards = token_rewards(scores, logratio, lengths, args.kl_coef)
        if args.whiten_rewards:
            rewards = whiten(rewards, value_mask, shift_mean=False)  # Detail 24
        advantages, returns = gae(rewards, values, args.gamma, args.lam)
        advantages = whiten(advantages, response_mask)  # Detail 25
        rollout_seconds = time.time() - start

        # ---- K epochs of clipped updates ---------------------------------------------------------
        linear, cosine = 1 - (update - 1) / num_updates, 0.5 * (1 + cos(pi * (update - 1) / num_updates))
        fall = (args.learning_rate - args.final_learning_rate) * (linear if args.lr_schedule == "linear" else cosine)
        learning_rate = args.final_learning_rate + fall
        for group in optimizer.param_groups:  # a resumed optimiser has those of its checkpoint
            group |= {"lr": learning_rate, "eps": args.adam_eps, "weight_decay": args.weight_decay}
        logs, grad_norms, deviations = defaultdict(float), [], []
        per_rank, size, row_lengths = mini_batch_size // world, args.batch_size, (queries != pad_id).sum(1) + lengths
        for epoch in range(args.num_ppo_epochs):
            # a shuffle of the whole batch per epoch, the same on every process
            shuffled = data_order(size, args.seed + update, epoch * size, (epoch + 1) * size)
            for mini_batch in shuffled.to(accelerator.device).split(mini_batch_size):
                policy_count, value_count = response_mask[mini_batch].sum(), value_mask[mini_batch].sum()
                rows = mini_batch[rank * per_rank : (rank + 1) * per_rank]
                groups = [rows[index] for index in micro_batches(row_lengths[rows], args.micro_batch_size)]
                for i, row in enumerate(groups):
                    query = trim(queries[row], pad_id, "left")
                    width = min(int(lengths[row].max()) + 1, R)
                    old, values_old, advantage, target, counted, value_counted = (
                        x[row, :width] for x in (logprobs, values, advantages, returns, response_mask, value_mask)
                    )
                    # gradients are exchanged with the last micro-batch
                    accelerator.sync_gradients = model.require_backward_grad_sync = i == len(groups) - 1
                    new, values_new, _ = model(query, responses[row, :width], pad_id, banned, args.temperature)
                    policy_sum, value_sum, sums = ppo_loss(
                        new, values_new, old, values_old, advantage, target, counted, value_counted,
                        args.cliprange, args.cliprange_value,
                    )  # fmt: skip
                    loss = policy_sum / policy_count + args.vf_coef * value_sum / value_count
                    accelerator.backward(loss * world)  # x world: DDP and DeepSpeed average over devices
                    for key, value in sums.items():
                        logs[key] += value / (value_count if "value" in key else policy_count)
                    if not grad_norms:  # before the first step every ratio is 1
                        deviations.append((new.detach() - old).exp().sub(1).abs()[counted].max())
                grad_norms.append(optimizer_step(accelerator, model, optimizer, args.max_grad_norm, f"update {update}"))

        # ---- log, samples ------------------------------------------------------------------------
        kl = logratio.sum(1)
        logs = {key: (accelerator.reduce(value, "sum") / len(grad_norms)).item() for key, value in logs.items()}
        metrics = {
            "objective/rlhf_reward": (scores - args.kl_coef * kl).mean(),
            "objective/score": scores.mean(),
            "objective/score_without_penalty": raw_scores.mean(),
            "objective/kl": kl.mean(),
            "objective/kl_k2": (0.5 * logratio.square()).sum(1).mean(),
            "objective/kl_k3": ((-logratio).exp() - 1 + logratio).sum(1).mean(),
            "objective/entropy": found["entropy"].sum(1).mean(),
            "objective/reward_model_spread": found["scores"].std(1, unbiased=False).mean(),
            "objective/reward_model_variance": found["scores"].var(1, unbiased=False).mean(),
            "response/eos_rate": has_eos.float().mean(),
            "response/length": lengths.float().mean(),
            "policy/ratio_variance": logs.pop("policy/ratio_square") - logs["policy/ratio"] ** 2,
            "policy/first_ratio_deviation": accelerator.gather(torch.stack(deviations).max()).max(),
            "value/mean": values.sum() / value_mask.sum(),
            **logs,  # means over the update's optimiser steps
            "grad_norm": sum(grad_norms) / len(grad_norms),
            "learning_rate": learning_rate,
            "episode": episodes.stop,
        }
        names = [f"objective/reward_model_{i + 1}" for i in range(len(reward_models))]
        metrics |= dict(zip(names, found["scores"].mean(0), strict=True))
        if args.reward_combination == "safety_gate":
            metrics["objective/safety_share"] = (raw_scores == found["scores"][:, 1]).float().mean()
        metrics |= {"time/sampling": found["sampling_seconds"].max(), "time/rollout": rollout_seconds}
        metrics |= {"time/update": time.time() - start, "time/total": time.time() - begin}
        if update == num_updates or (args.eval_every and update % args.eval_every == 0):
            metrics["eval/score"] = validation_score(accelerator, policy, reward_models, fixed, tokenizer, args)
        if gold and (update == num_updates or (args.gold_every and update % args.gold_every == 0)):
            metrics |= gold_metrics(*looked, update)
        write_metrics(accelerator, args, metrics, update, num_updates)
        if args.sample_every and update % args.sample_every == 0 and accelerator.is_main_process:
            texts = [[tokenizer.decode(row[row != pad_id]) for row in rows[:4]] for rows in (queries, responses)]
            columns = zip(*texts, scores.tolist(), kl.tolist(), strict=False)
            samples = [{"query (end)": q[-200:], "response": r, "score": s, "kl": k} for q, r, s, k in columns]
            show_samples(accelerator, samples, update)

    # ---- save ------------------------------------------------------------------------------------
    state = accelerator.get_state_dict(model)
    save_model(accelerator, args, "model", policy, state, "policy.", tokenizer)
    save_model(accelerator, args, "value_model", value_model.model, state, "value_model.model.", tokenizer)
    accelerator.print(f"done in {time.time() - begin:.0f} s: {args.output_dir}", flush=True)
    accelerator.end_training()


# ==== evaluation ==================================================================================


@torch.no_grad()
def validation_score(accelerator: Accelerator, policy, reward_models, data, tokenizer, args) -> float:
    """Mean score of a summary sampled to each post of `data`, at temperature 0.01, with no penalty for no EOS."""
    pad_id, found = tokenizer.pad_token_id, []
    for index, batch in shares(accelerator, data, args.forward_batch_size, "validation score"):
        query, keys = batch["query_token"].to(accelerator.device), noise_keys(args.seed, 0, index)
        with accelerator.autocast():
            responses = generate(policy, query, tokenizer, args.response_length, 0.01, keys)
            rows, scores = trim(torch.cat([query, responses], 1), pad_id, "left"), []
            for reward_model in reward_models:
                reward_model.to(accelerator.device)
                scores.append(response_rewards(reward_model, rows, rows.shape[1] - responses.shape[1], pad_id).cpu())
                reward_model.to("cpu" if args.offload else accelerator.device)
        check_scores(torch.stack(scores, 1), args.reward_model_paths, [f"validation post {i}" for i in index])
        found += combine(torch.stack(scores), args.reward_combination, args.uwo_lambda, safety_tags(batch)).tolist()
    return sum(gather_object(found)) / len(data)


@torch.no_grad()
def member_scales(accelerator: Accelerator, policy, reward_models, posts, tokenizer, args) -> dict:
    """{path of a reward model: mean and standard deviation (/ n) of its scores of a sample of the policy to each post},
    drawn as in training with noise of its own. An error where one says the same of all."""
    pad_id, found = tokenizer.pad_token_id, []
    for index, batch in shares(accelerator, posts, args.forward_batch_size, "scale of the reward models"):
        queries = trim(batch["query_token"].to(accelerator.device), pad_id, "left")
        policy.to(accelerator.device)
        with accelerator.autocast():
            keys = noise_keys(args.seed, -2, index)
            responses = generate(policy, queries, tokenizer, args.response_length, args.temperature, keys)
            rows, scores = right_padded(torch.cat([queries, responses], 1), pad_id), []
            for reward_model in reward_models:
                reward_model.to(accelerator.device)
                scores.append(response_rewards(reward_model, rows, 0, pad_id).cpu())
                reward_model.to("cpu" if args.offload else accelerator.device)
        check_scores(torch.stack(scores, 1), args.reward_model_paths, [f"training post {i}" for i in index])
        found += torch.stack(scores, 1).tolist()
    policy.to("cpu" if args.offload else accelerator.device)
    scores = torch.tensor(gather_object(found), dtype=torch.float64)  # (n, k)
    scales = torch.stack([scores.mean(0), scores.std(0, unbiased=False)], 1).tolist()
    for path, (mean, sd) in zip(args.reward_model_paths, scales, strict=True):
        if sd < 1e-6 * max(1, abs(mean)):
            fail(f"{path} scores all samples {mean:.4g}: it cannot be standardised; mend that model or leave it out")
    return {path: {"mean": m, "sd": s} for path, (m, s) in zip(args.reward_model_paths, scales, strict=True)}


@torch.no_grad()
def standardise(model, mean: float, sd: float):
    """Make a reward model say (score - mean) / sd: its head w, b becomes w / sd, (b - mean) / sd."""
    head = model.model.score
    head.weight.div_(sd)
    head.bias.sub_(mean).div_(sd)


def check_scores(scores: torch.Tensor, names: list[str], where: list[str]):
    """An error that names the first of the scores (b, k) that is not finite by its model (k,) and its row (b,)."""
    for row, k in (~scores.isfinite()).nonzero().tolist():
        fail(f"{where[row]}: the score of {names[k]} is {scores[row, k].item()}; mend that model or leave it out")


def gold_function(gold: str):
    """The function that path.py:function names."""
    path, _, name = gold.rpartition(":")
    with or_fail(f"--gold {gold}: no function there"):
        spec = importlib.util.spec_from_file_location("gold_function", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, name)


def gold_metrics(accelerator, model, ref_policy, reward_models, gold, posts, tokenizer, banned, args, update) -> dict:
    """How far the policy is from the reference and what that is worth: a response to each of the first --eval-rows
    posts, sampled as in training with noise of its own, the same at every update, and scored by the reward models and
    by `gold`, a reward model or a function of (post, summary). Returns the metrics gold/..., means over the posts, and
    leaves the responses, texts and numbers, in the run folder's gold_samples.csv, in place of those before."""
    scorers, found = [*reward_models, gold] if isinstance(gold, nn.Module) else reward_models, []
    for index, batch in shares(accelerator, posts, len(posts), "gold"):  # there may be more processes than posts
        keys, queries = noise_keys(args.seed, -1, index), batch["query_token"]
        seen = rollout(accelerator, model, ref_policy, scorers, queries, keys, tokenizer, banned, args)
        kl = (0.5 * (seen["logprobs"] - seen["ref_logprobs"]).square()).sum(1)  # k2: the ensemble paper's eq. 10
        lengths = (seen["responses"] != tokenizer.pad_token_id).sum(1)
        rows = torch.cat([torch.stack([kl, lengths], 1), seen["scores"]], 1).tolist()
        texts = tokenizer.batch_decode(seen["responses"], skip_special_tokens=True)
        if scorers is reward_models:
            with or_fail(f"--gold {args.gold}: no score"):
                rows = [[*r, float(gold(q, t))] for r, q, t in zip(rows, batch["query"], texts, strict=True)]
        found += zip(texts, rows, strict=True)
    texts, rows = zip(*gather_object(found), strict=True)
    rows = torch.tensor(rows)  # (n, 2 + k + 1)
    members, score, kl = rows[:, 2:-1], rows[:, -1], rows[:, 0].mean()
    where = [f"update {update}, gold samples, post {name}" for name in posts["id"]]
    check_scores(rows[:, 2:], [*args.reward_model_paths, args.gold], where)
    names = ["kl_k2", "tokens", *(f"score_{i + 1}" for i in range(members.shape[1])), "gold"]
    samples = pandas.DataFrame(
        {"id": posts["id"][:], "response": texts} | dict(zip(names, rows.T.tolist(), strict=True))
    )
    with writing(accelerator, Path(args.output_dir, "gold_samples.csv")) as partial:
        if accelerator.is_main_process:
            samples.to_csv(partial, index=False, quoting=csv.QUOTE_NONNUMERIC)  # a text may hold a carriage return
    proxy = combine(members.T, args.reward_combination, args.uwo_lambda, safety_tags(posts[:])).mean()
    error = score.std(unbiased=len(rows) > 1) / len(rows) ** 0.5
    found = {"score": score.mean(), "se": error, "proxy": proxy, "kl_k2": kl, "sqrt_kl": kl.sqrt()}
    found |= {"reward_model_spread": members.std(1, unbiased=False).mean(), "length": rows[:, 1].mean()}
    return {f"gold/{key}": value for key, value in found.items()}


def show_samples(accelerator: Accelerator, rows: list[dict], update: int):
    """Print samples (dicts of equal keys) as a table that wraps long texts, and give them to W&B; main process only."""
    table = Table(*rows[0], title=f"samples of update {update}", show_lines=True)
    for row in rows:
        table.add_row(*(f"{value:.3f}" if isinstance(value, float) else value for value in row.values()))
    Console(width=160, markup=False, emoji=False).print(table)
    for tracker in [tracker for tracker in accelerator.trackers if tracker.name == "wandb"]:
        tracker.log_table("samples/training", list(rows[0]), [list(row.values()) for row in rows], step=update)


def shares(accelerator: Accelerator, data, size: int, description: str):
    """Yield (row indices, rows) of this process's share of a split, up to `size` rows at a time; gather_object puts
    what the processes find into the order of the rows."""
    first, last = (len(data) * (accelerator.process_index + i) // accelerator.num_processes for i in (0, 1))
    for start in progress(accelerator, range(first, last, size), description):
        index = list(range(start, min(start + size, last)))
        yield index, data[index]


# ==== sampling ====================================================================================


def noise_keys(seed: int, update: int, rows: list[int]) -> torch.Tensor:
    """Two 32-bit keys (b, 2) per row, a hash of (seed, update, row)."""
    digests = [hashlib.blake2b(f"{seed} {update} {row}".encode(), digest_size=8).digest() for row in rows]
    return torch.tensor([struct.unpack("<ii", digest) for digest in digests], dtype=torch.int32).reshape(-1, 2)


def gumbel_noise(keys: torch.Tensor, position: int, vocab_size: int) -> torch.Tensor:
    """Gumbel(0, 1) noise (b, V) that depends on (key, position, token) alone, not on batch, device or rank: a 32-bit
    integer hash (int32 products wrap), read as a uniform with 32 bits near 0, where the largest noise comes from."""

    def mix(x, key):
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
            x = (x ^ ((x >> shift) & (2 ** (32 - shift) - 1))) * factor ^ key
        return x ^ ((x >> 16) & 0xFFFF)

    step = torch.tensor(position, dtype=torch.int32, device=keys.device)
    key = [mix(keys[:, i, None] + step * 0x3C6EF35F, keys[:, 1 - i, None]) for i in (0, 1)]  # 2 x (b, 1)
    token = torch.arange(vocab_size, dtype=torch.int32, device=keys.device)
    bits = mix(token * (0x9E3779B9 - 2**32) + key[0], key[1])  # (b, V)
    uniform = (torch.where(bits < 0, bits + 2.0**32, bits.float()) + 0.5) / 2**32
    return -torch.log(-torch.log1p(-uniform.clamp(max=1 - 2**-24)))


class GumbelMax(LogitsProcessor):
    """Turns generate()'s arg max into a sample from softmax(logits / temperature): arg max of scaled logits plus keyed
    Gumbel noise. `banned` (V,) marks ids that are never sampled: [PAD] and ids beyond the tokenizer."""

    def __init__(self, keys: torch.Tensor, query_width: int, temperature: float, banned: torch.Tensor):
        self.keys, self.query_width, self.temperature, self.banned = keys, query_width, temperature, banned

    def __call__(self, input_ids, scores):
        noise = gumbel_noise(self.keys, input_ids.shape[1] - self.query_width, scores.shape[1])
        return (scores / (self.temperature + 1e-7) + noise).masked_fill(self.banned, -torch.inf)


def banned_ids(model, tokenizer) -> torch.Tensor:
    """(V,) bool: [PAD] and the ids beyond the tokenizer, which no sample may hold."""
    ids = torch.arange(model.get_input_embeddings().num_embeddings)
    return (ids == tokenizer.pad_token_id) | (ids >= len(tokenizer))


@torch.no_grad()
def generate(model, queries, tokenizer, response_length: int, temperature: float, keys: torch.Tensor) -> torch.Tensor:
    """Sample responses (b, response_length) to left-padded queries (b, Q); a row that reached EOS is filled with [PAD],
    which equals sampling on and truncating after the first EOS (Detail 23)."""
    pad_id, device = tokenizer.pad_token_id, queries.device
    queries = trim(queries, pad_id, "left")
    sampler = GumbelMax(keys.to(device), queries.shape[1], temperature, banned_ids(model, tokenizer).to(device))
    config = GenerationConfig(
        max_new_tokens=response_length, do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=pad_id
    )
    was_training, defaults = model.training, model.generation_config
    model.generation_config = config  # else generate() fills what ours leaves open from the checkpoint's own
    model.eval()  # in train mode, gradient checkpointing would switch the cache off
    tokens = model.generate(
        queries, attention_mask=(queries != pad_id).long(), generation_config=config, logits_processor=[sampler]
    )
    model.train(was_training)
    model.generation_config = defaults
    responses = tokens[:, queries.shape[1] :]
    return F.pad(responses, (0, response_length - responses.shape[1]), value=pad_id)


# ==== padding and forward passes ==================================================================


def trim(tokens: torch.Tensor, pad_id: int, side: Literal["left", "right"]) -> torch.Tensor:
    """Cut the columns that are padding in every row, but for a width of a multiple of 16 (or all): widths that differ
    at every call leave the heap in pieces, so that memory grows with the run. (b, T) -> (b, up to T)."""
    columns = (tokens != pad_id).any(0).nonzero().flatten()
    if len(columns) == 0:
        return tokens[:, :0]
    used = int(tokens.shape[1] - columns[0] if side == "left" else columns[-1] + 1)
    width = -(-used // 16) * 16
    return tokens[:, -width:] if side == "left" else tokens[:, :width]


def micro_batches(lengths: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Groups of `size` rows of similar length: less padding, the same batch. lengths (b,) -> row indices."""
    return list(torch.argsort(lengths, descending=True, stable=True).split(size))


def right_padded(tokens: torch.Tensor, pad_id: int) -> torch.Tensor:
    """Rows (b, T) with their padding moved to the right, wherever it was, and cut to the longest row."""
    return trim(tokens.gather(1, (tokens == pad_id).int().argsort(dim=1, stable=True)), pad_id, "right")


def episode_rows(queries: torch.Tensor, responses: torch.Tensor, pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded queries (b, Q) and responses (b, W) -> right-padded rows (b, T), and the columns (b, W) of the token
    before each response token, where its log-probability and its value are read (past a response's end: any)."""
    rows = right_padded(torch.cat([queries, responses[:, :-1]], 1), pad_id)  # nothing is asked of the last token
    before = (queries != pad_id).sum(1, keepdim=True) - 1 + torch.arange(responses.shape[1], device=rows.device)
    return rows, before.clamp(max=rows.shape[1] - 1)


def states_at(model, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """A transformers model's last hidden states (b, W, D) at the `columns` (b, W) of right-padded rows (b, T). The
    columns before all of these go first, as keys and values for the rest: nobody reads their last layer's output, so
    that no gradient passes through it."""
    cache, split = DynamicCache(), int(columns.min())
    if split:
        model.base_model(rows[:, :split], past_key_values=cache, use_cache=True)
    hidden = model.base_model(rows[:, split:], past_key_values=cache, use_cache=True).last_hidden_state
    return hidden.gather(1, (columns - split)[:, :, None].expand(-1, -1, hidden.shape[2]))


def response_logits(policy, rows: torch.Tensor, before: torch.Tensor, banned: torch.Tensor) -> torch.Tensor:
    """Logits (b, W, V) at the columns `before` (b, W) of rows (b, T), as made by episode_rows; impossible ids at -1e9.
    The head sees these columns alone."""
    return policy.get_output_embeddings()(states_at(policy, rows, before)).masked_fill_(banned, -1e9)


@torch.no_grad()
def check_head(policy, path: str):
    """An error where a model does more to its logits (a soft cap, a scale) than its head, which alone we take."""
    tokens = torch.arange(4)[None]
    own = response_logits(policy, tokens, tokens, torch.zeros(1, dtype=torch.bool))
    if not torch.allclose(own, policy(tokens).logits, atol=1e-4):
        fail(f"{path}: the logits of {type(policy).__name__} are not those of its head; ppo.py cannot train it")


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


def load_reward_model(path: str, tokenizer) -> RewardModel:
    """A trained reward model in float32 without dropout, the head's bias in `score.bias`. The paper's released ones
    become such a folder by benchmark/convert_released.py."""
    with or_fail(f"{path} holds no reward model that can be read; reward.py makes one"):
        config = without_dropout(AutoConfig.from_pretrained(path, num_labels=1, trust_remote_code=False))
        config.pad_token_id = tokenizer.pad_token_id
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        model.score = ScalarHead(model.score.weight.shape[1], 1)
        model.load_state_dict(
            {key: x for file in Path(path).glob("*.safetensors") for key, x in load_file(file).items()}
        )
    return RewardModel(model)


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


def frozen(accelerator: Accelerator, model, offload: bool = False):
    """A model that is never trained, on the device (offload: in the machine's memory), with weights as those of the
    trained model: under DeepSpeed's bf16 in bfloat16, but for a reward's head; else in float32 (under autocast)."""
    model.to("cpu" if offload else accelerator.device).eval().requires_grad_(False)
    if accelerator.state.deepspeed_plugin and accelerator.mixed_precision == "bf16":
        for name, parameter in model.named_parameters():  # and no buffer: rotary frequencies need their digits
            parameter.data = parameter.data if "score." in name else parameter.data.bfloat16()
    return model


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
