"""Best-of-n sampling against reward models and their ensembles: sections 2.1, 3 and 4 and appendix B of "Reward Model
Ensembles Help Mitigate Overoptimization".

    python ensembles/best_of_n.py --policy runs/sft/1b/44413 --reward-model-paths runs/reward/1b/{1,2,3,4,5} \
        --gold runs/reward/6.9b/44413 --output-dir runs/best_of_n/1b    # gold: or path.py:function of (post, summary)
    torchrun --nproc_per_node 8 ensembles/best_of_n.py ...              # splits the prompts over processes
    python ensembles/best_of_n.py --output-dir runs/best_of_n/1b --estimate    # makes the tables again

1. The script draws N samples for each prompt, and k reward models (the proxies) and the gold reward score every
   distinct one. OUTPUT/samples_{prompt}.npz holds scores (N, k), gold (N,) float32, lengths (N,) in tokens (EOS
   counted) and has_eos (N,). Each file is renamed into place once complete, so that after a kill the same command makes
   what is missing. A sample depends on (seed, prompt, its number) alone, not on the micro-batch. All models are held in
   memory at once. A response without EOS is scored as it stands, at its last token; the summary tells their share.
   scales.json holds mean and standard deviation of each proxy over a sample of the policy to each of the first training
   posts. The tables use (score - mean) / sd, as ppo.py --standardise-members does.
2. It estimates the tables from these files, of as many prompts as are there. --estimate does only this.
   best_of_n.csv  for every n and method the expected gold reward of the best of n (equation 8) with its 95 % band over
                  prompts, the method's own objective, and the variance (/ k) of the k scores of that response
   best_of_n.md   a summary of the largest n
   The methods are single_i, the i-th proxy; single, the mean over these; and mean, wco and uwo (equations 3 to 5) of
   all proxies. Where several responses have the same objective, the mean of their gold rewards stands for each of them.

Deviation from the paper: 53 new tokens, as for TL;DR, not Alpaca's 256 (--response-length 256).
"""

import copy
import io
import json
import os
import re
import sys
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Literal

import numpy
import pandas
import torch
import torch.nn.functional as F
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import (
    DynamicCache,
)

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in (".", "eval")]

from eval_helpers import fail, load_function, markdown, nucleus, one_line, or_fail  # noqa: E402

from ppo import (  # noqa: E402
    RewardModel,
    checkpoint_folder,
    gumbel_noise,
    load_policy,
    load_reward_model,
    load_splits,
    load_tokenizer,
    noise_keys,
    similar_lengths,
)

FREE = ["output_dir", "micro_batch_size", "estimate", "uwo_lambda"]  # may differ in one folder
DRAWS = 1000  # of prompts, for the bands
BLOCK = 1_000_000  # samples estimated at once


@dataclass
class Args:
    output_dir: str
    """folder of the samples and the tables"""
    policy: str | None = None
    """run folder, checkpoint folder or Hub id[@revision]; this and the next two are needed, but for --estimate"""
    reward_model_paths: list[str] | None = None
    """the k proxies, likewise; their tokenizer is the policy's"""
    gold: str | None = None
    """gold reward: a reward model of the same tokenizer, or path.py:function of the texts (post, summary)"""
    dataset: str = "data/tldr/sft"
    """SFT data whose posts are the prompts: folder or Hub id[@revision]"""
    split: str = "validation"
    prompts: int = 1000
    """the first so many of the split (section 4.3)"""
    samples: int = 12_500
    """N, samples of each prompt (section 4.3)"""
    seed: int = 1
    """of the samples and the bootstrap"""
    temperature: float = 1.0
    """of sampling (table 4)"""
    top_p: float = 0.9
    """the smallest set of tokens with this probability is sampled from (table 4); 1: all"""
    response_length: int = 53
    """tokens sampled at most (table 4: 256)"""
    micro_batch_size: int = 64
    """samples in a forward pass: memory and speed, and rounding"""
    mixed_precision: Literal["no", "bf16"] | None = None
    """autocast over float32 weights; default bf16 on a GPU, none on a CPU"""
    standardise_posts: int = 256
    """training posts, the first so many, with a sample each for the scale of the proxies"""

    estimate: bool = False
    """sample nothing: make the tables of what output_dir holds"""
    uwo_lambda: float = 0.5
    """weight of the variance in uwo (section 5.1)"""


def put(path: Path, content: bytes):
    """Write a file beside its place, then rename it: it is there whole or not at all."""
    partial = path.with_name(f"{path.name}.tmp")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        fail(f"{path} could not be written ({one_line(error)}): make room, then give the same command again")


@contextmanager
def progress_bar(description: str, total: int):
    """A bar with the rate and the time left; what it yields is called with the number of items that are done."""
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}")]
    columns += [TimeElapsedColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(description, total=total, rate="")
        yield lambda count: bar.update(task, advance=count, rate=f"{bar.tasks[0].speed or 0:.1f}/s")


# ---- data and models ---------------------------------------------------------------------------------------------


# ---- sampling and scoring ----------------------------------------------------------------------------------------


def repeated(cache: DynamicCache, count: int) -> DynamicCache:
    """Keys and values of one row -> those of `count` equal rows, to be added to."""
    cache = copy.deepcopy(cache)
    cache.batch_repeat_interleave(count)
    return cache


@torch.no_grad()
def sample_many(
    model, query: torch.Tensor, banned: torch.Tensor, keys: torch.Tensor, eos_id: int, pad_id: int, args, done
):
    """Responses (N, R) to one query (Q,) without padding, [PAD] after the first EOS, by Gumbel-max with the noise of
    `keys` (N, 2); `banned` (V,) marks ids that are never sampled. Calls done(count) after each micro-batch."""
    responses, cache = torch.full((len(keys), args.response_length), pad_id, device=query.device), DynamicCache()
    first = model(query[None], past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]  # (1, V)
    for rows in torch.arange(len(keys), device=query.device).split(args.micro_batch_size):
        logits, going, size = first.expand(len(rows), -1), repeated(cache, len(rows)), len(rows)
        for t in range(args.response_length):
            scaled = (logits.float() / args.temperature).masked_fill(banned, -torch.inf)
            noise = gumbel_noise(keys[rows], t, scaled.shape[1])
            token = (nucleus(scaled, args.top_p) + noise).argmax(1)
            responses[rows, t] = token
            open_rows = token != eos_id
            rows = rows[open_rows]
            if len(rows) == 0 or t == args.response_length - 1:
                break
            going.batch_select_indices(open_rows)  # what has ended costs nothing more
            logits = model(token[open_rows, None], past_key_values=going, use_cache=True).logits[:, -1]
        done(size)
    return responses


def rewards_after(model: RewardModel, tokens: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    """RewardModel's forward (b, T) for tokens (b, T) that follow those whose keys and values are in the cache, which
    theirs are added to."""
    hidden = model.model.base_model(tokens, past_key_values=cache, use_cache=True).last_hidden_state
    head = model.model.score
    with torch.autocast(hidden.device.type, enabled=False):
        rewards = F.linear(hidden.float(), head.weight.float(), head.bias.float()) - model.reward_mean
    return rewards.squeeze(-1)


@torch.no_grad()
def response_scores(model: RewardModel, query: torch.Tensor, responses: torch.Tensor, pad_id: int, size: int):
    """Rewards (m,) of right-padded responses (m, R) to one query (Q,) without padding, read at the last token, `size`
    responses in a forward pass."""
    cache, lengths = DynamicCache(), (responses != pad_id).sum(1)
    scores = torch.empty(len(responses), device=query.device)
    rewards_after(model, query[None], cache)
    for index in similar_lengths(lengths, size):
        rewards = rewards_after(model, responses[index, : int(lengths[index].max())], repeated(cache, len(index)))
        scores[index] = rewards.gather(1, lengths[index, None] - 1).squeeze(1)  # (b, W) -> (b,)
    return scores


def proxy_scales(policy, models: dict, posts: list[torch.Tensor], banned, eos_id: int, pad_id: int, args) -> dict:
    """{path of a proxy: mean and standard deviation (/ n) of its scores of a sample of the policy to each post (Q,)},
    with noise of its own. An error where one says the same of all."""
    found, scales = [], {}
    with progress_bar("scale of the proxies", len(posts)) as done:
        for i, query in enumerate(posts):
            keys = noise_keys(args.seed, -2, [i]).to(query.device)
            response = sample_many(policy, query, banned, keys, eos_id, pad_id, args, done)
            found.append([response_scores(model, query, response, pad_id, 1).item() for model in models.values()])
            for path, score in zip(models, found[-1], strict=True):
                if not isfinite(score):
                    fail(f"training post {i}: {path} scores a sample {score}; mend it or leave it out")
    for path, scores in zip(models, torch.tensor(found, dtype=torch.float64).T, strict=True):
        scales[path] = {"mean": scores.mean().item(), "sd": scores.std(unbiased=False).item()}
        if not scales[path]["sd"] > 1e-6 * max(1, abs(scales[path]["mean"])):
            fail(f"{path} scores all samples {scores[0]:.4g}: it cannot be standardised; mend it or leave it out")
    return scales


# ---- estimation --------------------------------------------------------------------------------------------------


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
    if method == "uwo":
        variance = (scores - mean).square().mean(0)
        return mean - uwo_lambda * variance
    return mean


def bon_kl(n):
    """Equation 1, nats: the KL distance of the best of n from the policy."""
    return numpy.log(n) - (n - 1) / n


def bon_weights(n: int, N: int) -> numpy.ndarray:
    """Equation 8's weights (N,), C(i-1, n-1) / C(N, n) for i = 1..N: the chance that the i-th worst of N samples is
    the best of n. From the last, n / N, each is the one behind it times (i - n + 1) / i: no binomial, no overflow."""
    i = numpy.arange(N - 1, 0, -1.0)
    return numpy.concatenate([[n / N], n / N * numpy.cumprod(numpy.maximum(i - n + 1, 0) / i)])[::-1]


def bon_values(objective: numpy.ndarray, values: list[numpy.ndarray], weights: numpy.ndarray) -> list[numpy.ndarray]:
    """Return, for each of `values` (P, N), its expectation (P, n) at the best of n samples by `objective` (P, N), for
    the n whose `weights` (n, N) are given. Samples with the same objective are equally likely to be chosen, so each of
    them counts with the mean of their values."""
    order = objective.argsort(1)
    ordered = numpy.take_along_axis(objective, order, 1)
    new = numpy.ones(ordered.shape, bool)  # unlike the sample before it
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    group, found = None if new.all() else new.ravel().cumsum() - 1, []
    for value in values:
        value = numpy.take_along_axis(value, order, 1)
        if group is not None:
            means = numpy.bincount(group, value.ravel()) / numpy.bincount(group)
            value = means[group].reshape(value.shape)
        found.append(value @ weights.T)
    return found


def bands(values: numpy.ndarray, seed: int) -> numpy.ndarray:
    """Ends (2, m) of the 95 % percentile intervals of the column means of `values` (P, m), prompts drawn anew."""
    P = len(values)
    counts = numpy.random.default_rng(seed).multinomial(P, numpy.full(P, 1 / P), size=DRAWS)  # (draws, P)
    return numpy.quantile(counts @ values / P, [0.025, 0.975], axis=0)


def grid(N: int) -> numpy.ndarray:
    """About 30 values of n from 1 to N, evenly spaced in log n."""
    return numpy.unique(numpy.geomspace(1, N, 30).round().astype(int))


def make_tables(args: Args, settings: dict):
    """Make the tables of the prompts that are done in output_dir; `settings` are those of its samples."""
    folder, N, k = Path(args.output_dir), settings["samples"], len(settings["reward_model_paths"])
    with or_fail(f"{folder}/scales.json, which the command that sampled makes, cannot be read"):
        known = json.loads((folder / "scales.json").read_text())
        scales = [tuple(known[path].values()) for path in settings["reward_model_paths"]]
    middle, spread = torch.tensor(scales, dtype=torch.float64).T[:, :, None, None]  # (k, 1, 1) each
    files = [file for i in range(settings["prompts"]) if (file := folder / f"samples_{i:06d}.npz").exists()]
    if not files:
        fail(f"{folder}: not one prompt is sampled there; without --estimate the command samples them")
    ns = grid(N)
    weights = numpy.stack([bon_weights(int(n), N) for n in ns])  # (n, N)
    methods = [*(f"single_{i + 1}" for i in range(k)), *(("mean", "wco", "uwo") if k > 1 else ())]
    found = {method: numpy.empty((3, len(files), len(ns))) for method in methods}  # gold, objective, variance
    lengths, ended, size = [], [], max(1, BLOCK // N)
    with progress_bar("estimating", len(files)) as done:
        for start in range(0, len(files), size):
            shards = []
            for file in files[start : start + size]:
                with or_fail(f"{file} (delete it, and the command that sampled it makes it anew) cannot be read"):
                    shards.append(dict(numpy.load(file)))
            lengths += [shard["lengths"].mean() for shard in shards]
            ended += [shard["has_eos"].mean() for shard in shards]
            gold = numpy.stack([shard["gold"] for shard in shards]).astype(float)  # (P, N)
            scores = numpy.stack([shard["scores"].T for shard in shards], 1)
            scores = (torch.from_numpy(scores).double() - middle) / spread  # (k, P, N)
            variance, part = scores.var(0, correction=0).numpy(), slice(start, start + len(shards))
            for i, method in enumerate(methods):
                used = (scores[i] if i < k else combine(scores, method, args.uwo_lambda)).numpy()
                found[method][:, part] = bon_values(used, [gold, used, variance], weights)
            done(len(shards))
    singles = numpy.mean([found[method] for method in methods[:k]], 0)  # (3, P, n)
    curves, short = [], []
    for method, curve in ({"single": singles} | found).items():
        low, high = bands(curve[0], settings["seed"])
        gold, objective, variance = curve.mean(1)  # (n,) each
        columns = {"n": ns, "kl": bon_kl(ns), "gold": gold, "gold_low": low, "gold_high": high}
        curves.append(pandas.DataFrame({"method": method} | columns | {"proxy": objective, "variance": variance}))
        row = {"method": method, "gold": gold[-1], "95 %": f"{low[-1]:.4g} to {high[-1]:.4g}", "proxy": objective[-1]}
        short.append(row | {"variance": variance[-1], "best gold": gold.max(), "at n": ns[gold.argmax()]})
    text = f"# Best of {ns[-1]:,}: {len(files):,} of {settings['prompts']:,} prompts, {N:,} samples each\n\n"
    text += f"{k} reward models, gold {settings['gold']}, uwo with λ {args.uwo_lambda:g}; {numpy.mean(lengths):.1f} "
    text += f"tokens a response, {numpy.mean(ended):.1%} of the responses with EOS.\n\n{markdown(short)}"
    put(folder / "best_of_n.csv", pandas.concat(curves).to_csv(index=False).encode())
    put(folder / "best_of_n.md", text.encode())
    print(text)


def main(args: Args):
    # ---- input -----------------------------------------------------------------------------------
    folder, saved = Path(args.output_dir), Path(args.output_dir) / "args.json"
    if not 0 <= args.uwo_lambda < float("inf"):
        fail(f"--uwo-lambda {args.uwo_lambda}: the variance is a penalty, so that its weight is at least 0")
    if args.estimate:
        with or_fail(f"--estimate: {saved}, which the sampling writes, cannot be read"):
            settings = json.loads(saved.read_text())
        return make_tables(args, settings)
    if not (args.policy and args.reward_model_paths and args.gold):
        fail("--policy, --reward-model-paths and --gold are needed to sample; without sampling: --estimate")
    if min(args.prompts, args.samples, args.response_length, args.micro_batch_size, args.standardise_posts) < 1:
        fail("--prompts, --samples, --response-length, --micro-batch-size and --standardise-posts are at least 1")
    if not (args.temperature > 0 and 0 < args.top_p <= 1):
        fail(f"--temperature {args.temperature} --top-p {args.top_p}: above 0, and in (0, 1]")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)))
    # cuDNN's attention builds a plan for every new shape, and its backward pass has given NaN under a mask
    torch.backends.cuda.enable_cudnn_sdp(False)
    args.mixed_precision = args.mixed_precision or ("bf16" if device.type == "cuda" else "no")
    settings = {key: value for key, value in asdict(args).items() if key not in FREE}
    if saved.exists() and any(folder.glob("samples_*.npz")):
        with or_fail(f"{saved} cannot be read"):
            before = json.loads(saved.read_text())
        if changed := [key for key in settings if settings[key] != before.get(key)]:
            lines = "\n".join(f"  {key}: {before.get(key)} -> {settings[key]}" for key in changed)
            fail(f"{folder} has samples of other settings; choose another --output-dir:\n{lines}")

    # ---- data and models -------------------------------------------------------------------------
    policy_folder = checkpoint_folder("--policy", args.policy)
    paths = {path: checkpoint_folder("--reward-model-paths", path) for path in args.reward_model_paths}
    if len(paths) < len(args.reward_model_paths):
        fail(f"--reward-model-paths {' '.join(args.reward_model_paths)}: one of them twice")
    by_function = re.fullmatch(r".+\.py:\w+", args.gold)
    gold_folder = None if by_function else checkpoint_folder("--gold", args.gold)
    tokenizer = load_tokenizer(policy_folder)
    for path in [*paths.values(), *filter(None, [gold_folder])]:
        if load_tokenizer(path).get_vocab() != tokenizer.get_vocab():
            fail(f"{path} has another tokenizer than {policy_folder}: it cannot score that model's tokens")
    if gold_folder and Path(gold_folder).resolve() in [Path(path).resolve() for path in paths.values()]:
        print(f"warning: --gold {args.gold} is one of the proxies, too: what exploits it counts as good")
    data = load_splits("--dataset", args.dataset, ["id", "query", "query_token"], tokenizer)
    if args.split not in data or len(data[args.split]) < args.prompts:
        there = ", ".join(f"{name} ({len(data[name])} rows)" for name in data)
        fail(f"--split {args.split} --prompts {args.prompts}: {args.dataset} has {there}")
    policy = load_policy(policy_folder, tokenizer).to(device).eval()
    members = [load_reward_model(path, tokenizer).to(device).eval() for path in paths.values()]
    if by_function:
        gold = load_function("--gold", args.gold)
    else:
        gold = load_reward_model(gold_folder, tokenizer).to(device).eval()
    banned, eos_id, pad_id = policy.banned, tokenizer.eos_token_id, tokenizer.pad_token_id
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--output-dir {folder} cannot be made ({one_line(error)})")
    if rank == 0:
        put(saved, (json.dumps(settings, indent=2) + "\n").encode())

    # ---- sample and score, prompt by prompt ------------------------------------------------------
    files = {i: folder / f"samples_{i:06d}.npz" for i in range(rank, args.prompts, world)}
    missing = [i for i in files if not files[i].exists()]
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.mixed_precision == "bf16")
    if rank == 0 and not (folder / "scales.json").exists():
        rows = data["train"][: args.standardise_posts]["query_token"]
        posts, models = [row[row != pad_id].to(device) for row in rows], dict(zip(paths, members, strict=True))
        with autocast:
            scales = proxy_scales(policy, models, posts, banned, eos_id, pad_id, args)
        put(folder / "scales.json", (json.dumps(scales, indent=2) + "\n").encode())
    with progress_bar("samples", len(missing) * args.samples) as done, autocast:
        for i in missing:
            row, where = data[args.split][i], f"prompt {i} ({data[args.split][i]['id']})"
            query = row["query_token"][row["query_token"] != pad_id].to(device)
            keys = noise_keys(args.seed, i, list(range(args.samples))).to(device)
            responses = sample_many(policy, query, banned, keys, eos_id, pad_id, args, done)  # (N, R)
            distinct, places = responses.unique(dim=0, return_inverse=True)  # (m, R), (N,)
            texts, scores = tokenizer.batch_decode(distinct, skip_special_tokens=True), {}
            for path, model in [*zip(paths, members, strict=True), (f"gold {args.gold}", gold)]:
                if isinstance(model, RewardModel):
                    scores[path] = response_scores(model, query, distinct, pad_id, args.micro_batch_size).cpu()
                else:
                    try:
                        scores[path] = torch.tensor([float(model(row["query"], text)) for text in texts])
                    except Exception as error:
                        fail(f"{where}: {path} does not score it ({one_line(error)})")
                if not scores[path].isfinite().all():
                    fail(f"{where}: {path} scores a response {scores[path][~scores[path].isfinite()][0]}")
            *found, golds = (each[places.cpu()].float().numpy() for each in scores.values())  # (N,) each
            arrays = {"scores": numpy.stack(found, 1), "gold": golds}
            arrays |= {"lengths": (responses != pad_id).sum(1).int().cpu().numpy()}
            arrays |= {"has_eos": (responses == eos_id).any(1).cpu().numpy()}
            file = io.BytesIO()
            numpy.savez(file, **arrays)
            put(files[i], file.getvalue())
    if world == 1:
        make_tables(args, settings)
    else:
        print(f"process {rank} of {world} is done; once all are: --output-dir {folder} --estimate")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    main(tyro.cli(Args))
