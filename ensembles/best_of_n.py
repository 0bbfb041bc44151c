"""Best-of-n sampling against reward models and their ensembles: sections 2.1, 3 and 4 and appendix B of "Reward Model
Ensembles Help Mitigate Overoptimization".

    python ensembles/best_of_n.py --policy runs/sft/1b/44413 --reward-model-paths runs/reward/1b/{1,2,3,4,5} \
        --gold runs/reward/6.9b/44413 --output-dir runs/best_of_n/1b    # gold: or path.py:function of (post, summary)
    torchrun --nproc_per_node 8 ensembles/best_of_n.py ...              # splits the prompts over processes
    python ensembles/best_of_n.py --output-dir runs/best_of_n/1b --estimate    # makes the tables again

The script draws N samples for each prompt and scores them with k reward models (the proxies) and the gold reward, each
at the response's last token. OUTPUT/samples_{prompt}.npz holds scores (N, k), gold (N,) and has_eos (N,), and
second_gold (N,), if there is one. After a kill, the same command makes the files that are missing. scales.json holds
mean and standard deviation of each proxy over samples of the policy, which standardise the scores, as in
ensembles/ppo.py --standardise-members.

best_of_n.csv holds, for every n and method, the gold rewards and the method's own objective, expected over the best of
n (equation 8) and averaged over the prompts, and wins, the share of prompts where this gold is above a single proxy's
(a tie is half), mean and standard deviation over the proxies (table 6). best_of_n.md shows its rows of the largest n.
The methods are single_i, the i-th proxy; single, the mean over these; and mean, wco and uwo (equations 3 to 5) of all
proxies.

Deviation from the paper: 53 new tokens, as for TL;DR, not Alpaca's 256 (--response-length 256).
"""

import copy
import hashlib
import io
import json
import os
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy
import pandas
import torch
import torch.nn.functional as F
import tyro
from rich.console import Console
from rich.progress import track
from transformers import DynamicCache

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in (".", "eval")]

from eval_helpers import (  # noqa: E402
    at_least,
    fail,
    load_function,
    markdown,
    nucleus,
    or_fail,
    same_tokenizer,
    tied,
    wins,
)

from ppo import (  # noqa: E402
    RewardModel,
    content_digest,
    gumbel_noise,
    load_policy,
    load_reward_model,
    load_splits,
    load_tokenizer,
    local_checkpoint,
    noise_keys,
    similar_lengths,
)

FREE = ["output_dir", "micro_batch_size", "estimate", "members", "tables", "uwo_lambda"]  # may differ in one folder


@dataclass
class Args:
    output_dir: str
    """folder of the samples and the tables"""
    policy: str | None = None
    """run folder, checkpoint folder or Hub id[@revision]; required without --estimate, like the next two"""
    reward_model_paths: list[str] | None = None
    """the k proxies, likewise; they need the policy's tokenizer"""
    gold: str | None = None
    """gold reward: a reward model of the same tokenizer, or path.py:function of the texts (post, summary)"""
    second_gold: str | None = None
    """another gold reward, likewise, with columns of its own: where the first is a model, it may be overoptimised"""
    dataset: str = "data/tldr/sft"
    """SFT data whose validation posts are the prompts: folder or Hub id[@revision]"""
    prompts: int = 1000
    """number of prompts, from the start of the split (section 4.3)"""
    samples: int = 12_500
    """N, samples of each prompt (section 4.3)"""
    seed: int = 1
    """seed of the samples"""
    temperature: float = 1.0
    """sampling temperature (table 4)"""
    top_p: float = 0.9
    """the smallest set of tokens with this probability is sampled from (table 4); 1: all"""
    response_length: int = 53
    """tokens sampled at most (table 4: 256)"""
    micro_batch_size: int = 64
    """samples in a forward pass: memory and speed, and rounding"""
    mixed_precision: Literal["no", "bf16"] | None = None
    """autocast over float32 weights; default bf16 on a GPU, none on a CPU"""
    standardise_posts: int = 256
    """number of training posts, with a sample each, that the scale of the proxies is measured on"""

    estimate: bool = False
    """only make the tables, of the prompts that output_dir holds"""
    members: tuple[int, ...] = ()
    """with --estimate: only of these reward models, counted from 1; default: all"""
    tables: str | None = None
    """with --estimate: folder of the tables, if it is not output_dir"""
    uwo_lambda: float = 0.5
    """weight of the variance in uwo (section 5.1)"""


def put(path: Path, content: bytes):
    """Write a file under a temporary name, then rename it, so that it is complete or absent."""
    partial = path.with_name(f"{path.name}.tmp")
    partial.write_bytes(content)
    os.replace(partial, path)


# ---- sampling and scoring ----------------------------------------------------------------------------------------


def repeated(cache: DynamicCache, count: int) -> DynamicCache:
    """Return a copy of the keys and values of one row, repeated to `count` rows."""
    cache = copy.deepcopy(cache)
    cache.batch_repeat_interleave(count)
    return cache


@torch.no_grad()
def sample_many(model, query: torch.Tensor, keys: torch.Tensor, eos_id: int, pad_id: int, args) -> torch.Tensor:
    """Return responses (N, R) to one query (Q,) without padding, with [PAD] after the first EOS. Tokens are sampled by
    Gumbel-max with the noise of `keys` (N, R, 2). The head bans [PAD] and ids beyond the tokenizer."""
    responses, cache = torch.full((len(keys), args.response_length), pad_id, device=query.device), DynamicCache()
    first = model(query[None], past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]  # (1, V)
    for rows in torch.arange(len(keys), device=query.device).split(args.micro_batch_size):
        logits, going = first.expand(len(rows), -1), repeated(cache, len(rows))
        for t in range(args.response_length):
            scaled = logits.float() / args.temperature
            noise = gumbel_noise(keys[rows, t], scaled.shape[1])
            token = (nucleus(scaled, args.top_p) + noise).argmax(1)
            responses[rows, t] = token
            open_rows = token != eos_id
            rows = rows[open_rows]
            if len(rows) == 0 or t == args.response_length - 1:
                break
            going.batch_select_indices(open_rows)  # responses that have ended cost no more
            logits = model(token[open_rows, None], past_key_values=going, use_cache=True).logits[:, -1]
    return responses


def rewards_after(model: RewardModel, tokens: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    """Return RewardModel's rewards (b, T) of tokens (b, T) that follow those in the cache; they are added to it."""
    hidden = model.model.base_model(tokens, past_key_values=cache, use_cache=True).last_hidden_state
    head = model.model.score
    with torch.autocast(hidden.device.type, enabled=False):
        rewards = F.linear(hidden.float(), head.weight.float(), model.bias.float()) - model.reward_mean
    return rewards.squeeze(-1)


@torch.no_grad()
def response_scores(model: RewardModel, query: torch.Tensor, responses: torch.Tensor, pad_id: int, size: int):
    """Return the rewards (m,) of right-padded responses (m, R) to one query (Q,) without padding, each at its last
    token, with `size` responses in a forward pass."""
    cache, lengths = DynamicCache(), (responses != pad_id).sum(1)
    scores = torch.empty(len(responses), device=query.device)
    rewards_after(model, query[None], cache)
    for index in similar_lengths(lengths, size):
        rewards = rewards_after(model, responses[index, : int(lengths[index].max())], repeated(cache, len(index)))
        scores[index] = rewards.gather(1, lengths[index, None] - 1).squeeze(1)  # (b, W) -> (b,)
    return scores


def proxy_scales(policy, members: list, posts: list[torch.Tensor], eos_id: int, pad_id: int, args) -> dict:
    """Return {path: mean and standard deviation (/ n)} of each proxy's scores of one sample to each post (Q,)."""
    scores, scales = [], {}
    for i, query in enumerate(track(posts, "scale of the proxies", console=Console(stderr=True))):
        keys = noise_keys(args.seed, -2, [i], args.response_length).to(query.device)  # no prompt has the number -2
        response = sample_many(policy, query, keys, eos_id, pad_id, args)
        scores.append([response_scores(model, query, response, pad_id, 1).item() for model in members])
    for path, column in zip(args.reward_model_paths, torch.tensor(scores, dtype=torch.float64).T, strict=True):
        mean, sd = column.mean().item(), column.std(unbiased=False).item()
        if not sd > 1e-6 * max(1, abs(mean)):
            fail(f"{path}: its scores of samples have mean {mean:.4g} and standard deviation {sd:.4g}; leave it out")
        scales[path] = {"mean": mean, "sd": sd}
    return scales


def load_judge(flag: str, value: str, tokenizer, width: int, device):
    """Return what --gold or --safety names: a function of (post, summary), or a reward model of the policy's
    tokenizer."""
    if re.fullmatch(r".+\.py:\w+", value):
        return load_function(flag, value)
    path = local_checkpoint(flag, value)
    if not same_tokenizer(load_tokenizer(path), tokenizer):
        fail(f"{flag} {value} has another tokenizer or EOS than --policy: it cannot score that model's tokens")
    return load_reward_model(path, tokenizer, width).to(device).eval()


def gold_digest(flag: str, value: str) -> str:
    """Return a hash of a gold reward: of a function's file, or of a reward model."""
    if re.fullmatch(r".+\.py:\w+", value):
        return hashlib.sha256(Path(value.rpartition(":")[0]).read_bytes()).hexdigest()
    return content_digest(local_checkpoint(flag, value))


def sample_prompts(args: Args, settings: dict, device, rank: int, world: int):
    """Write samples_{prompt}.npz for those of this process's prompts that have none yet. Samples that are there have to
    come from the same settings and inputs."""
    # ---- data and models -------------------------------------------------------------------------
    policy_folder = local_checkpoint("--policy", args.policy)
    folders = [local_checkpoint("--reward-model-paths", path) for path in args.reward_model_paths]
    golds = {"--gold": args.gold} | ({"--second-gold": args.second_gold} if args.second_gold else {})
    names = [*args.reward_model_paths, *(" ".join(gold) for gold in golds.items())]
    tokenizer = load_tokenizer(policy_folder)
    for folder in folders:
        if not same_tokenizer(load_tokenizer(folder), tokenizer):
            fail(f"{folder} has another tokenizer or EOS than {policy_folder}, so it cannot score that model's tokens")
    data = load_splits("--dataset", args.dataset, ["id", "query", "query_token"], tokenizer)
    if len(data["validation"]) < args.prompts:
        fail(f"--prompts {args.prompts}: the validation split of {args.dataset} has {len(data['validation'])} rows")
    digests = [content_digest(source) for source in (policy_folder, *folders, data["train"], data["validation"])]
    digests += [gold_digest(*gold) for gold in golds.items()]
    settings, output = settings | {"inputs": digests}, Path(args.output_dir)
    if (output / "args.json").exists():
        old = json.loads((output / "args.json").read_text())
        if changed := [key for key in settings if old.get(key) != settings[key]]:
            fail(f"{output} has samples with other {', '.join(changed)}: choose another --output-dir")
    width = max(len(data[split][0]["query_token"]) for split in ("train", "validation")) + args.response_length
    policy = load_policy(policy_folder, tokenizer, width).to(device).eval()
    models = [load_reward_model(folder, tokenizer, width).to(device).eval() for folder in folders]
    models += [load_judge(flag, value, tokenizer, width, device) for flag, value in golds.items()]
    eos_id, pad_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    with or_fail(f"--output-dir {output} cannot be written"):
        output.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        put(output / "args.json", (json.dumps(settings, indent=2) + "\n").encode())
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.mixed_precision == "bf16")

    # ---- scales of the proxies -------------------------------------------------------------------
    if rank == 0 and not (output / "scales.json").exists():
        rows = data["train"][: args.standardise_posts]["query_token"]
        posts = [row[row != pad_id].to(device) for row in rows]
        with autocast:
            scales = proxy_scales(policy, models[: len(folders)], posts, eos_id, pad_id, args)
        put(output / "scales.json", (json.dumps(scales, indent=2) + "\n").encode())

    # ---- samples and scores, prompt by prompt ----------------------------------------------------
    files = {i: output / f"samples_{i:06d}.npz" for i in range(rank, args.prompts, world)}
    missing = [i for i in files if not files[i].exists()]
    with autocast:
        for i in track(missing, "prompts", console=Console(stderr=True)):
            row = data["validation"][i]
            query = row["query_token"][row["query_token"] != pad_id].to(device)
            keys = noise_keys(args.seed, i, range(args.samples), args.response_length).to(device)
            responses = sample_many(policy, query, keys, eos_id, pad_id, args)  # (N, R)
            distinct, places = responses.unique(dim=0, return_inverse=True)  # (m, R), (N,)
            scores = []
            for name, model in zip(names, models, strict=True):
                if isinstance(model, RewardModel):
                    scored = response_scores(model, query, distinct, pad_id, args.micro_batch_size)
                else:
                    texts = tokenizer.batch_decode(distinct, skip_special_tokens=True)
                    with or_fail(f"prompt {i} ({row['id']}): {name} failed to score a response"):
                        scored = torch.tensor([float(model(row["query"], text)) for text in texts], device=device)
                if not scored.isfinite().all():
                    fail(f"prompt {i} ({row['id']}): {name} gives a response no finite score")
                scores.append(scored[places].float().cpu().numpy())
            file, has_eos = io.BytesIO(), (responses == eos_id).any(1).cpu().numpy()
            columns = dict(zip(("gold", "second_gold"), scores[len(folders) :], strict=False))
            numpy.savez(file, scores=numpy.stack(scores[: len(folders)], 1), has_eos=has_eos, **columns)
            put(files[i], file.getvalue())


# ---- estimation --------------------------------------------------------------------------------------------------


def bon_weights(n: int, N: int) -> numpy.ndarray:
    """Return equation 8's weights (N,), C(i-1, n-1) / C(N, n) for i = 1..N: the probability that the i-th worst of N
    samples is the best of n. The last is n / N, and each of the others is the next one times (i - n + 1) / i, which
    needs no binomials and cannot overflow."""
    i = numpy.arange(N - 1, 0, -1.0)
    return numpy.concatenate([[n / N], n / N * numpy.cumprod(numpy.maximum(i - n + 1, 0) / i)])[::-1]


def bon_values(objective: numpy.ndarray, values: list[numpy.ndarray], weights: numpy.ndarray) -> list[numpy.ndarray]:
    """Return, for each of `values` (P, N), its expectation (P, n) at the best of n samples by `objective` (P, N), for
    the n whose `weights` (n, N) are given. Samples with the same objective are equally likely to be chosen, so each of
    them counts with the mean of their values."""
    order = objective.argsort(1)
    ordered = numpy.take_along_axis(objective, order, 1)
    new = numpy.ones(ordered.shape, bool)  # differs from the sample before it
    new[:, 1:] = ~tied(ordered[:, 1:], ordered[:, :-1])
    group = new.ravel().cumsum() - 1
    expected = []
    for value in values:
        value = numpy.take_along_axis(value, order, 1)
        means = numpy.bincount(group, value.ravel()) / numpy.bincount(group)
        expected.append(means[group].reshape(value.shape) @ weights.T)
    return expected


def make_tables(args: Args, settings: dict):
    """Write the tables of the prompts that are sampled in output_dir; `settings` are the arguments of the sampling."""
    folder, N, paths = Path(args.output_dir), settings["samples"], settings["reward_model_paths"]
    if not set(args.members) <= set(range(1, len(paths) + 1)):
        fail(f"--members {args.members}: from 1 to {len(paths)}, the number of reward models of {folder}")
    members = [member - 1 for member in args.members] or list(range(len(paths)))
    k = len(members)
    files = [file for i in range(settings["prompts"]) if (file := folder / f"samples_{i:06d}.npz").exists()]
    if not files:
        fail(f"{folder}: no prompt is sampled there yet; without --estimate the command samples them")
    with or_fail(f"{folder}/scales.json cannot be read. The command that sampled makes it; it keeps the samples"):
        scales = json.loads((folder / "scales.json").read_text()).values()  # in the order of the proxies
    middle, spread = (numpy.array([scale[key] for scale in scales])[members] for key in ("mean", "sd"))  # (k,) each
    ns = numpy.unique(numpy.geomspace(1, N, 30).round().astype(int))  # evenly spaced in log n
    weights = numpy.stack([bon_weights(int(n), N) for n in ns])  # (n, N)
    methods = [*(f"single_{i + 1}" for i in range(k)), *(("mean", "wco", "uwo") if k > 1 else ())]
    values, ended = [], []
    for file in track(files, "estimating", console=Console(stderr=True)):
        shard = numpy.load(file)
        ended.append(shard["has_eos"].mean())
        golds = [shard[name].astype(float)[None] for name in ("gold", "second_gold") if name in shard]  # (1, N) each
        scores = (shard["scores"].astype(float)[:, members] - middle) / spread  # (N, k)
        uwo = scores.mean(1) - args.uwo_lambda * scores.var(1)
        objectives = [*scores.T, scores.mean(1), scores.min(1), uwo][: len(methods)]
        values.append([numpy.concatenate(bon_values(x[None], [*golds, x[None]], weights)) for x in objectives])
    names = ["gold", "second_gold"][: len(golds)] + ["proxy", "wins", "wins_sd"]
    values = numpy.stack(values)  # (P, methods, names but wins, n)
    gold = values[:, :, 0]
    win_rates = wins(gold[:, :, None], gold[:, None, :k]).mean(0)  # (P, methods, k, n) -> (methods, k, n)
    win_rates = numpy.stack([win_rates.mean(1), win_rates.std(1)], 1)  # (methods, 2, n)
    means = numpy.concatenate([values.mean(0), win_rates], 1)  # (methods, names, n)
    curves = {"single": means[:k].mean(0)} | dict(zip(methods, means, strict=True))
    columns = {"n": ns, "kl": numpy.log(ns) - (ns - 1) / ns}  # equation 1, nats
    tables = [pandas.DataFrame({"method": x} | columns | dict(zip(names, y, strict=True))) for x, y in curves.items()]
    table = pandas.concat(tables)
    eos = f"{numpy.mean(ended):.1%}"
    text = f"""# Best of {N:,}: {len(files):,} of {settings["prompts"]:,} prompts

{k} reward models, gold {settings["gold"]}, uwo with λ {args.uwo_lambda:g}; {eos} of the responses have EOS.

{markdown(table[table["n"] == N].to_dict("records"))}"""
    if args.tables:
        folder = Path(args.tables)
        folder.mkdir(parents=True, exist_ok=True)
        settings = settings | {"samples_of": args.output_dir, "reward_model_paths": [paths[i] for i in members]}
        put(folder / "args.json", (json.dumps(settings, indent=2) + "\n").encode())
    table.to_csv(folder / "best_of_n.csv", index=False)
    (folder / "best_of_n.md").write_text(text, encoding="utf-8")
    print(text)


def main(args: Args):
    saved = Path(args.output_dir, "args.json")
    if args.estimate:
        with or_fail(f"--estimate: {saved}, which the sampling writes, cannot be read"):
            settings = json.loads(saved.read_text())
        return make_tables(args, settings)
    if not (args.policy and args.reward_model_paths and args.gold):
        fail("--policy, --reward-model-paths and --gold are required without --estimate")
    at_least(1, args, "prompts", "samples", "response_length", "micro_batch_size", "standardise_posts")
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
    sample_prompts(args, settings, device, rank, world)
    if world == 1:
        make_tables(args, settings)
    else:
        print(f"process {rank} of {world} is done; after the others, make the tables with --estimate")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    main(tyro.cli(Args))
