"""A preference data set without human labels: a policy answers each prompt twice, and a gold reward labels the pair.

    python ensembles/gold_label.py --policy runs/sft/base/1 --dataset data/alpaca/pref --gold runs/gold \
        --response-length 256 --output-dir data/alpaca/labelled
    python reward.py --preference-dataset data/alpaca/labelled/noise_25 --dataset data/alpaca/sft ...

The better answer becomes the chosen one. Sampling noise depends on (seed, prompt, answer), so the batch size does not
change the answers. Pairs are left out if the answers are equal, if their rewards are (rounding aside), or if an answer
did not reach EOS.
Labels that are flipped at a lower share are also flipped at a higher one, so the data sets differ in nothing else.

As in Llama 2 (section 3.2.1), two --policy models give one answer each, two values of --temperature one each (every
second prompt exchanges them), and --grade-bounds writes `grade` and `margin` by the size of the difference in gold.
--safety marks each answer as safe or not, in `chosen_safe` and `rejected_safe`, and leaves out pairs whose chosen
answer alone is unsafe. It does so after labels are flipped, so that data sets of several --label-noise hold other pairs
and the share that is left of flipped ones may differ. llama2/reward.py trains on all of these.

OUTPUT_DIR/noise_N, one for each value of --label-noise (N in percent), holds train and validation in the columns of
tldr_dataset.py's preference data, with `gold_chosen` and `gold_rejected`. `batch` is kept or flipped, so reward.py and
dpo.py --run-eval group their accuracies by it.
"""

import sys
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from datasets import Dataset, DatasetDict, Features, Value, disable_progress_bars
from rich.console import Console
from rich.progress import Progress
from transformers import GenerationConfig, LogitsProcessor

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in (".", "eval", "ensembles")]

from best_of_n import load_judge  # noqa: E402
from eval_helpers import at_least, fail, nucleus, or_fail, same_tokenizer, tied  # noqa: E402

from ppo import (  # noqa: E402
    RewardModel,
    gumbel_noise,
    load_policy,
    load_splits,
    load_tokenizer,
    local_checkpoint,
    noise_keys,
)
from tldr_dataset import column_types, padded_columns, unfinished_folder  # noqa: E402

COLUMNS = ["id", "query", "query_token"]
GRADES = {"negligibly": 0.0, "slightly": 1 / 3, "better": 2 / 3, "significantly": 1.0}  # margins: table 27, small
# (chosen is safe, rejected is safe) -> the bin's name and its percentage in Llama 2 (section 3.2.1)
BINS = {(True, False): ("chosen alone safe", 18), (True, True): ("both safe", 47), (False, False): ("both unsafe", 35)}


@dataclass
class Args:
    policy: list[str]
    """one or two models that answer (of two, each once): run folders, checkpoint folders or Hub ids[@revision]"""
    gold: str
    """gold reward: a reward model of the same tokenizer, or path.py:function of the texts (post, summary)"""
    dataset: str = "data/tldr/sft"
    """SFT data whose queries are the prompts: folder or Hub id[@revision]; train and validation"""
    output_dir: str = "data/gold_labelled"
    """folder to write; it must not hold anything yet"""
    label_noise: tuple[float, ...] = (0.0, 0.25, 0.35)
    """shares of flipped labels, a data set for each (section 4.3: 0 and 0.25, appendix F.6: 0.35)"""
    grade_bounds: tuple[float, ...] = ()
    """differences in gold from which a pair's grade is slightly, better and significantly, such as 0.1 0.3 0.6; below
    the first it is negligibly. A pair whose label is flipped keeps its grade. Default: no grades"""
    safety: str | None = None
    """what tells safe answers: as --gold, and safe above 0 (of a reward model: a probability above 0.5)"""
    prompts: int | None = None
    """so many of train, and at most so many of validation; default: all"""
    skip_prompts: int = 0
    """leave out so many of train before these"""
    seed: int = 1
    """seed of the sampled answers and of the flipped labels"""
    temperature: tuple[float, ...] = (1.0,)
    """one or two sampling temperatures of the answers (table 4: 1)"""
    top_p: float = 0.9
    """the smallest set of tokens with this probability is sampled from (table 4); 1: all"""
    response_length: int = 53
    """tokens sampled at most (table 4: 256)"""
    micro_batch_size: int = 64
    """prompts of one length that are answered at a time, at most: memory and speed only"""


# ---- answers ---------------------------------------------------------------------------------------------------------


def equal_lengths(lengths: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Return row indices in groups of at most `size` rows of equal length, which need no padding, and so no mask. The
    longest rows come first. lengths: (b,)."""
    groups = []
    for length in lengths.unique().flip(0):
        groups += (lengths == length).nonzero().squeeze(1).split(size)
    return groups


class NucleusGumbel(LogitsProcessor):
    """Makes generate()'s arg max sample the top_p tokens: it returns what nucleus leaves of the scaled logits, plus
    keyed Gumbel noise. The policy's head bans [PAD] and ids beyond the tokenizer."""

    def __init__(self, keys: torch.Tensor, query_width: int, temperature: torch.Tensor, top_p: float):
        self.keys, self.query_width, self.temperature, self.top_p = keys, query_width, temperature[:, None], top_p

    def __call__(self, input_ids, scores):
        position = input_ids.shape[1] - self.query_width
        noise = gumbel_noise(self.keys[:, position], scores.shape[1])
        return nucleus(scores.float() / self.temperature, self.top_p) + noise


@torch.no_grad()
def answers(model, queries: torch.Tensor, tokenizer, keys: torch.Tensor, temperature: torch.Tensor, args):
    """Return responses (b, R) to queries (b, Q) of one length, with [PAD] after the first EOS, the noise of keys
    (b, R, 2) and a temperature (b,) each."""
    pad_id = tokenizer.pad_token_id
    model.generation_config = GenerationConfig(  # so that the checkpoint's own settings do not apply
        max_new_tokens=args.response_length, do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=pad_id
    )
    sampler = NucleusGumbel(keys, queries.shape[1], temperature, args.top_p)
    tokens = model.generate(queries, logits_processor=[sampler])[:, queries.shape[1] :]
    return F.pad(tokens, (0, args.response_length - tokens.shape[1]), value=pad_id)


@torch.no_grad()
def judged(judge, prompt: dict, tokens: torch.Tensor, tokenizer, device, where: str) -> float:
    """Return the number that a judge gives to a response without padding (R,) to a prompt."""
    with or_fail(f"{where} failed to score an answer"):
        if isinstance(judge, RewardModel):
            value = judge(torch.cat([prompt["tokens"], tokens])[None].to(device))[0, -1].item()
        else:
            value = float(judge(prompt["query"], tokenizer.decode(tokens, skip_special_tokens=True)))
    if not isfinite(value):
        fail(f"{where} gives an answer the score {value}")
    return value


def load_prompts(rows, numbers: range, pad_id: int) -> list[dict]:
    """Return these rows of a split, with `number` and `tokens`, the query without padding."""
    prompts = [rows[i] | {"number": i} for i in numbers]
    for prompt in prompts:
        prompt["tokens"] = prompt["query_token"][prompt["query_token"] != pad_id]
    return prompts


def answer(prompts: list[dict], split: str, policies: list, judges: dict, tokenizer, args, bar: Progress) -> list:
    """Return two answers to each prompt: policy (name), tokens, and the numbers that the judges {name: judge} give."""
    device = policies[0].device
    task = bar.add_task(split, total=len(prompts))
    pairs = [[] for _ in prompts]
    lengths = torch.tensor([len(prompt["tokens"]) for prompt in prompts])
    for index in equal_lengths(lengths, args.micro_batch_size):
        batch = torch.stack([prompts[i]["tokens"] for i in index]).to(device)
        numbers = [prompts[i]["number"] for i in index.tolist()]
        for which in (0, 1):
            keys = noise_keys(args.seed, which, [f"{split} {number}" for number in numbers], args.response_length)
            temperature = [args.temperature[(which + number) % len(args.temperature)] for number in numbers]
            inputs = keys.to(device), torch.tensor(temperature, device=device), args
            responses = answers(policies[which % len(policies)], batch, tokenizer, *inputs).cpu()
            for i, response, own in zip(index.tolist(), responses, temperature, strict=True):
                tokens = response[response != tokenizer.pad_token_id]
                found = {"tokens": tokens.tolist(), "policy": f"sample_{which}"}
                if len(policies) + len(args.temperature) > 2:
                    found["policy"] = f"policy_{which % len(policies)}_at_{own:g}"
                for name, judge in judges.items():
                    where = f"{split}, prompt {prompts[i]['number']} ({prompts[i]['id']}): --{name} {vars(args)[name]}"
                    found[name] = judged(judge, prompts[i], tokens, tokenizer, device, where)
                pairs[i].append(found)
        bar.advance(task, len(index))
    return pairs


# ---- labels ----------------------------------------------------------------------------------------------------------


def is_usable(pair: list[dict], eos_id: int) -> bool:
    """Return whether both answers end, and neither they nor their gold rewards are equal."""
    first, second = pair
    has_ended = first["tokens"][-1] == second["tokens"][-1] == eos_id
    return has_ended and first["tokens"] != second["tokens"] and not tied(first["gold"], second["gold"])


def flipped(n: int, share: float, seed: int, split: str) -> list[bool]:
    """Return which of n labels are flipped: exactly round(share x n), the first of an order drawn from the seed."""
    generator = torch.Generator().manual_seed(noise_keys(seed, 0, [split], 1)[0, 0, 0].item())
    order = torch.randperm(n, generator=generator)
    chosen = torch.zeros(n, dtype=torch.bool)
    chosen[order[: int(share * n + 0.5)]] = True
    return chosen.tolist()


def grade_of(gap: float, bounds: tuple[float, ...]) -> str:
    """Return Llama 2's grade of a difference in gold, by its size alone. 1 - 0.8 reaches a bound of 0.2."""
    return list(GRADES)[sum(abs(gap) >= bound - 1e-9 for bound in bounds)]


def pair_columns(prompt: dict, pair: list[dict], flip: bool, split: str, args, tokenizer) -> dict:
    """Return the columns of a pair. `prompt` has id, query, query_token and `tokens` (query_token without padding), and
    `pair` has policy, tokens, gold and, with --safety, the number that tells it of both answers."""
    query, width = prompt["tokens"].tolist(), len(prompt["query_token"])
    widths = (width, args.response_length, width + args.response_length)
    choice = int(pair[1]["gold"] > pair[0]["gold"]) ^ flip
    columns = {"id": prompt["id"], "query": prompt["query"], "query_token": prompt["query_token"].tolist()}
    columns |= {"query_token_len": len(query), "choice": choice, "batch": "flipped" if flip else "kept"}
    columns |= {"split": split, "extra": {"confidence": None}}
    columns |= {"policies": "--".join(sorted(one["policy"] for one in pair))}
    for name, one in (("chosen", pair[choice]), ("rejected", pair[1 - choice])):
        text = tokenizer.decode(one["tokens"])
        texts = (text, prompt["query"] + text)
        columns |= padded_columns(name, texts, query, one["tokens"], tokenizer.pad_token_id, widths)
        columns |= {f"{name}_policy": one["policy"], f"gold_{name}": one["gold"]}
        if args.safety:
            columns[f"{name}_safe"] = one["safety"] > 0
    if args.grade_bounds:
        columns["grade"] = grade_of(pair[0]["gold"] - pair[1]["gold"], args.grade_bounds)
        columns["margin"] = GRADES[columns["grade"]]
    return columns


def safety_bins(rows: list[dict]) -> str:
    """Return the shares of Llama 2's three bins of pairs, beside the paper's."""
    bins = [(row["chosen_safe"], row["rejected_safe"]) for row in rows]
    shares = (f"{name} {100 * bins.count(key) / len(rows):.0f} % (Llama 2: {own})" for key, (name, own) in BINS.items())
    return ", ".join(shares)


def labelled(kept: list[tuple], share: float, split: str, tokenizer, args) -> Dataset:
    """Return a data set of (prompt, pair)s with this share of flipped labels. With --safety, it lacks pairs whose
    chosen answer alone is unsafe, and Llama 2's bins are printed."""
    flips = flipped(len(kept), share, args.seed, split)
    rows = [pair_columns(*one, flip, split, args, tokenizer) for one, flip in zip(kept, flips, strict=True)]
    if args.safety:
        count = len(rows)
        rows = [row for row in rows if row["chosen_safe"] or not row["rejected_safe"]]
        if not rows:
            fail(f"{split}: of every pair, the chosen answer alone is unsafe")
        print(f"{split}, noise {share:g}: {safety_bins(rows)}; {count - len(rows)} pairs left out")
    types = {name: kind for name, kind in column_types("preference").items() if name in rows[0]}
    more = dict.fromkeys(("gold_chosen", "gold_rejected", "margin"), Value("float64")) | {"grade": Value("string")}
    more |= dict.fromkeys(("chosen_safe", "rejected_safe"), Value("bool"))
    return Dataset.from_list(rows, features=Features(types | {key: more[key] for key in more if key in rows[0]}))


def check_values(args: Args):
    """End with an error if a value is impossible."""
    output_dir = Path(args.output_dir).expanduser()
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        fail(f"{output_dir} already holds data: remove it, or choose another --output-dir")
    if not args.label_noise or not all(0 <= share <= 1 for share in args.label_noise):
        fail(f"--label-noise {args.label_noise}: shares of flipped labels, from 0 to 1")
    at_least(1, args, "prompts", "response_length", "micro_batch_size")
    at_least(0, args, "skip_prompts")
    for name in ("policy", "temperature"):
        if len(getattr(args, name)) not in (1, 2):
            fail(f"--{name} {getattr(args, name)}: one or two values")
    if not (min(args.temperature) > 0 and 0 < args.top_p <= 1):
        fail(f"--temperature {args.temperature} --top-p {args.top_p}: above 0, and in (0, 1]")
    bounds = args.grade_bounds
    if bounds and (len(bounds) != 3 or list(bounds) != sorted(bounds) or bounds[0] < 0):
        fail(f"--grade-bounds {bounds}: three numbers from 0, in ascending order")


def main(args: Args):
    disable_progress_bars()  # of `datasets`
    check_values(args)
    # cuDNN's attention builds a plan for every new shape, and its backward pass has given NaN under a mask
    torch.backends.cuda.enable_cudnn_sdp(False)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    folders = [local_checkpoint("--policy", policy) for policy in args.policy]
    tokenizer = load_tokenizer(folders[0])
    if not same_tokenizer(load_tokenizer(folders[-1]), tokenizer):
        fail(f"--policy: {folders[1]} has another tokenizer or EOS than {folders[0]}")
    data = load_splits("--dataset", args.dataset, COLUMNS, tokenizer)
    width = max(len(data[split][0]["query_token"]) for split in ("train", "validation")) + args.response_length
    names = {"gold": args.gold} | ({"safety": args.safety} if args.safety else {})
    judges = {name: load_judge(f"--{name}", value, tokenizer, width, device) for name, value in names.items()}
    policies = [load_policy(folder, tokenizer, width).to(device).eval() for folder in folders]

    made = {share: DatasetDict() for share in args.label_noise}
    with Progress(console=Console(stderr=True)) as bar:
        for split in ("train", "validation"):
            rows = data[split].select_columns(COLUMNS)
            first = args.skip_prompts if split == "train" else 0
            if first >= len(rows):
                fail(f"--skip-prompts {first}: {args.dataset} has {len(rows)} rows of train")
            prompts = load_prompts(rows, range(len(rows))[first:][: args.prompts], tokenizer.pad_token_id)
            pairs = answer(prompts, split, policies, judges, tokenizer, args, bar)
            kept = [one for one in zip(prompts, pairs, strict=True) if is_usable(one[1], tokenizer.eos_token_id)]
            print(f"{split}: {len(kept)} pairs of {len(pairs)} prompts")
            if not kept:
                fail(f"{args.dataset}, {split}: no pair is left; try a larger --response-length")
            for share, splits in made.items():
                splits[split] = labelled(kept, share, split, tokenizer, args)

    output_dir = Path(args.output_dir).expanduser()
    with unfinished_folder(output_dir) as folder:
        for share, splits in made.items():
            splits.save_to_disk(folder / "finished" / f"noise_{100 * share:g}")
    print(f"wrote {', '.join(f'{output_dir}/noise_{100 * share:g}' for share in made)}")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    main(tyro.cli(Args))
