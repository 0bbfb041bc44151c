"""A preference data set without human labels: a policy answers each prompt twice, and a gold reward labels the pair.

    python ensembles/gold_label.py --policy runs/sft/base/1 --dataset data/alpaca/pref --gold runs/gold \
        --response-length 256 --output-dir data/alpaca/labelled
    python reward.py --preference-dataset data/alpaca/labelled/noise_25 --dataset data/alpaca/sft ...

The gold reward is a reward model, or path.py:function of (post, summary). The better answer becomes the chosen one.
Sampling noise depends on (seed, prompt, answer), so the batch size does not change the answers. Three kinds of pairs
are left out and counted: equal answers, equal rewards, and pairs with an answer that did not reach EOS, where a reward
would be read. Then the script flips exactly the share --label-noise of the labels in each split, rounded and drawn from
the seed. Labels that are flipped at a lower share are also flipped at a higher one, so that the data sets differ in
nothing else.

OUTPUT_DIR/noise_N, one for each value of --label-noise (N in percent), holds train and validation of the prompts' data
set, in the columns of tldr_dataset.py's preference data. `gold_chosen` and `gold_rejected` are added, and `batch` is
kept or flipped. reward.py and dpo.py --run-eval group their accuracies by it, so that you can read the accuracy on the
labels that were kept.
"""

import re
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from datasets import Dataset, DatasetDict, Features, List, Value, disable_progress_bars
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
)

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in (".", "eval")]

from eval_helpers import fail, load_function, nucleus, one_line  # noqa: E402

from ppo import (  # noqa: E402
    RewardModel,
    checkpoint_folder,
    gumbel_noise,
    load_policy,
    load_reward_model,
    load_splits,
    load_tokenizer,
    noise_keys,
)

COLUMNS = ["id", "query", "query_token"]


@dataclass
class Args:
    policy: str
    """model that answers: run folder, checkpoint folder or Hub id[@revision]"""
    gold: str
    """gold reward: a reward model of the same tokenizer, or path.py:function of the texts (post, summary)"""
    dataset: str = "data/tldr/sft"
    """SFT data whose queries are the prompts: folder or Hub id[@revision]; train and validation"""
    output_dir: str = "data/gold_labelled"
    """folder to write; it must not hold anything yet"""
    label_noise: tuple[float, ...] = (0.0, 0.25, 0.35)
    """shares of flipped labels, a data set for each (section 4.3: 0 and 0.25, appendix F.6: 0.35)"""
    prompts: int | None = None
    """the first so many of train; default: all"""
    seed: int = 1
    """of answers and flips"""
    temperature: float = 1.0
    """of sampling (table 4)"""
    top_p: float = 0.9
    """the smallest set of tokens with this probability is sampled from (table 4); 1: all"""
    response_length: int = 53
    """tokens sampled at most (table 4: 256)"""
    micro_batch_size: int = 64
    """prompts of one length that are answered at a time, at most: memory and speed only"""


# ---- data and models ---------------------------------------------------------------------------------------------


# ---- answers ---------------------------------------------------------------------------------------------------------


def equal_lengths(lengths: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Rows in groups of one length, at most `size` in each: no padding, which would need a mask. lengths (b,) -> row
    indices, the longest rows first."""
    groups = []
    for length in lengths.unique().flip(0):
        groups += (lengths == length).nonzero().squeeze(1).split(size)
    return groups


class NucleusGumbel(LogitsProcessor):
    """Turns generate()'s arg max into a sample of the top_p tokens: arg max of what nucleus leaves of the scaled logits
    plus keyed Gumbel noise. `banned` (V,) marks ids that are never sampled: [PAD] and ids beyond the tokenizer."""

    def __init__(self, keys: torch.Tensor, query_width: int, banned: torch.Tensor, args):
        self.keys, self.query_width, self.banned, self.args = keys, query_width, banned, args

    def __call__(self, input_ids, scores):
        noise = gumbel_noise(self.keys, input_ids.shape[1] - self.query_width, scores.shape[1])
        scaled = (scores.float() / self.args.temperature).masked_fill(self.banned, -torch.inf)
        return nucleus(scaled, self.args.top_p) + noise


@torch.no_grad()
def answers(model, queries: torch.Tensor, tokenizer, keys: torch.Tensor, args) -> torch.Tensor:
    """Responses (b, R) to queries (b, Q) of one length, [PAD] after the first EOS, with the noise of keys (b, 2)."""
    pad_id = tokenizer.pad_token_id
    model.generation_config = GenerationConfig(  # else generate() fills what ours leaves open from the checkpoint's own
        max_new_tokens=args.response_length, do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=pad_id
    )
    sampler = NucleusGumbel(keys, queries.shape[1], model.banned, args)
    tokens = model.generate(queries, logits_processor=[sampler])
    tokens = tokens[:, queries.shape[1] :]
    return F.pad(tokens, (0, args.response_length - tokens.shape[1]), value=pad_id)


@torch.no_grad()
def gold_scores(gold, name: str, queries, texts, responses, where: list[str], tokenizer, device) -> list[float]:
    """Gold rewards of responses (b, R) to queries without padding (each (Q,)) and of their `texts`. An error names the
    gold and, by `where`, the prompt of a response that it does not score or whose score is no finite number."""
    pad_id, found = tokenizer.pad_token_id, []
    for query, text, response, prompt in zip(queries, texts, responses, where, strict=True):
        if isinstance(gold, RewardModel):
            row = torch.cat([query, response[response != pad_id]])
            found.append(gold(row[None].to(device))[0, -1].item())
        else:
            try:
                found.append(float(gold(text, tokenizer.decode(response, skip_special_tokens=True))))
            except Exception as error:
                fail(f"{prompt}: --gold {name} does not score an answer ({one_line(error)})")
        if not isfinite(found[-1]):
            fail(f"{prompt}: --gold {name} scores an answer {found[-1]}")
    return found


# ---- labels ----------------------------------------------------------------------------------------------------------


def flipped(n: int, share: float, seed: int, split: str) -> list[bool]:
    """Which of n labels are flipped: exactly round(share x n), the first so many of an order drawn from the seed."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(noise_keys(seed, 0, [split])[0, 0].item()))
    chosen = torch.zeros(n, dtype=torch.bool)
    chosen[order[: int(share * n + 0.5)]] = True
    return chosen.tolist()


def pair_columns(row: dict, pair: list[dict], flip: bool, split: str, args, tokenizer) -> dict:
    """The columns of one pair: `row` has id, query and query_token, `pair` two dicts of tokens (list) and gold."""
    pad_id, width = tokenizer.pad_token_id, len(row["query_token"])
    query = [token for token in row["query_token"] if token != pad_id]
    choice = int(pair[1]["gold"] > pair[0]["gold"]) ^ flip
    columns = {key: row[key] for key in ("id", "query", "query_token")} | {"query_token_len": len(query)}
    columns |= {"choice": choice, "batch": "flipped" if flip else "kept", "split": split, "extra": {"confidence": None}}
    columns |= {"chosen_policy": f"sample_{choice}", "rejected_policy": f"sample_{1 - choice}"}
    columns["policies"] = "sample_0--sample_1"
    for name, side in (("chosen", pair[choice]), ("rejected", pair[1 - choice])):
        tokens, both = side["tokens"], query + side["tokens"]
        padding = [pad_id] * (args.response_length - len(tokens))
        after = padding + [pad_id] * (width - len(query))
        text = tokenizer.decode(tokens)
        columns |= {name: text, f"{name}_token": tokens + padding, f"{name}_token_len": len(tokens)}
        columns |= {f"query_{name}": row["query"] + text, f"query_{name}_token": both + after}
        columns[f"query_{name}_token_len"] = len(both)
        columns[f"query_{name}_token_response_label"] = [pad_id] * len(query) + tokens + after
        columns[f"gold_{name}"] = side["gold"]
    return columns


def pair_features() -> Features:
    """Names and types of the columns."""
    text, number, tokens = Value("string"), Value("int64"), List(Value("int64"))
    features = {"id": text, "choice": Value("int32"), "batch": text, "split": text}
    features |= {
        "extra": {"confidence": Value("int32")},
        "chosen_policy": text,
        "rejected_policy": text,
        "policies": text,
    }
    for name in ("query", "chosen", "query_chosen", "rejected", "query_rejected"):
        features |= {name: text, f"{name}_token": tokens, f"{name}_token_len": number}
    for name in ("chosen", "rejected"):
        features |= {f"query_{name}_token_response_label": tokens, f"gold_{name}": Value("float64")}
    return Features(features)


@contextmanager
def unfinished_folder(output_dir: Path):
    """Yield a temporary folder, and rename its subfolder `finished` to output_dir at the end if nothing fails."""
    target = output_dir.resolve()  # of a symlink, so that it stays one
    if target.is_mount() or target == Path.cwd():
        fail(f"{output_dir} cannot be replaced: choose a folder in it")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.tmp-", dir=target.parent) as folder:
        yield Path(folder)
        Path(folder, "finished").rename(target)  # replaces an empty folder


def main(args: Args):
    disable_progress_bars()  # of `datasets`; ours shows rate and time left
    # ---- input -----------------------------------------------------------------------------------
    output_dir = Path(args.output_dir).expanduser()
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        fail(f"{output_dir} already holds data: remove it, or choose another --output-dir")
    names = {share: f"noise_{100 * share:g}" for share in args.label_noise}
    if not names or not all(0 <= share <= 1 for share in names):
        fail(f"--label-noise {args.label_noise}: shares of flipped labels, from 0 to 1")
    if not (args.temperature > 0 and 0 < args.top_p <= 1 and args.response_length > 0):
        fail("--temperature and --response-length are above 0, --top-p in (0, 1]")
    folder = checkpoint_folder("--policy", args.policy)
    tokenizer = load_tokenizer(folder)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    # cuDNN's attention builds a plan for every new shape, and its backward pass has given NaN under a mask
    torch.backends.cuda.enable_cudnn_sdp(False)
    if re.fullmatch(r".+\.py:\w+", args.gold):
        gold = load_function("--gold", args.gold)
    else:
        path = checkpoint_folder("--gold", args.gold)
        if load_tokenizer(path).get_vocab() != tokenizer.get_vocab():
            fail(f"--gold {args.gold} has another tokenizer than {folder}: it cannot score that model's tokens")
        gold = load_reward_model(path, tokenizer).to(device).eval()
    data = load_splits("--dataset", args.dataset, COLUMNS, tokenizer)
    policy = load_policy(folder, tokenizer).to(device).eval()
    pad_id, eos_id = tokenizer.pad_token_id, tokenizer.eos_token_id

    # ---- two answers to each prompt --------------------------------------------------------------
    console, made = Console(markup=False, highlight=False), {name: {} for name in names.values()}
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}")]
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        for split in ("train", "validation"):
            rows = data[split].select(range(min(args.prompts or len(data[split]), len(data[split]))))
            rows = rows.select_columns(COLUMNS)[:]
            queries = [tokens[tokens != pad_id] for tokens in rows["query_token"]]
            task = bar.add_task(split, total=len(queries), rate="")
            pairs: list[list[dict]] = [[] for _ in queries]
            for index in equal_lengths(torch.tensor([len(query) for query in queries]), args.micro_batch_size):
                texts, mine = [rows["query"][i] for i in index], [queries[i] for i in index]
                batch = torch.stack(mine).to(device)
                where = [f"{args.dataset}, {split}, prompt {i} ({rows['id'][i]})" for i in index.tolist()]
                for which in (0, 1):
                    keys = noise_keys(args.seed, which, [f"{split} {i}" for i in index.tolist()]).to(device)
                    found = answers(policy, batch, tokenizer, keys, args).cpu()
                    golds = gold_scores(gold, args.gold, mine, texts, found, where, tokenizer, device)
                    for i, tokens, score in zip(index.tolist(), found, golds, strict=True):
                        pairs[i].append({"tokens": tokens[tokens != pad_id].tolist(), "gold": score})
                bar.update(task, advance=len(index), rate=f"{bar.tasks[task].speed or 0:.1f}/s")

            # ---- labels ------------------------------------------------------------------------------
            equal = [a["tokens"] == b["tokens"] for a, b in pairs]
            cut = [not all(x["tokens"][-1] == eos_id for x in pair) for pair in pairs]
            cut = [short and not same for short, same in zip(cut, equal, strict=True)]
            tied = [a["gold"] == b["gold"] for a, b in pairs]
            tied = [tie and not (same or short) for tie, same, short in zip(tied, equal, cut, strict=True)]
            kept = [i for i in range(len(pairs)) if not (equal[i] or tied[i] or cut[i])]
            if not kept:
                fail(f"{args.dataset}, {split}: not one pair of {len(pairs):,} is left; more --response-length?")
            console.print(
                f"{split}: {len(kept):,} pairs of {len(pairs):,} prompts; left out: {sum(equal):,} with equal answers, "
                f"{sum(tied):,} with equal rewards, {sum(cut):,} without EOS"
            )
            for share, name in names.items():
                flips = flipped(len(kept), share, args.seed, split)
                lists = rows["query_token"].tolist()
                found = [
                    pair_columns(
                        {"id": rows["id"][i], "query": rows["query"][i], "query_token": lists[i]},
                        pairs[i],
                        flip,
                        split,
                        args,
                        tokenizer,
                    )
                    for i, flip in zip(kept, flips, strict=True)
                ]
                made[name][split] = Dataset.from_list(found, features=pair_features())

    # ---- save ------------------------------------------------------------------------------------
    with unfinished_folder(output_dir) as folder:
        for name, splits in made.items():
            DatasetDict(splits).save_to_disk(folder / "finished" / name)
    console.print(f"wrote {', '.join(f'{output_dir}/{name}' for name in made)}")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    main(tyro.cli(Args))
