"""Win rate of sampled summaries against the references, or against another run's summaries of the same posts.

    python eval/judge.py runs/ppo/1b/* --judge gpt-3.5-turbo                        # any OpenAI-compatible endpoint
    python eval/judge.py runs/ppo/1b/44413 --judge local --base-url http://localhost:8000/v1 --against runs/sft/1b/44413
    python eval/judge.py runs/ppo/1b/44413 --judge runs/reward/6.9b/44413           # a reward model
    python eval/judge.py runs/quickstart/.../44413 --judge quickstart/truth.py:score    # a function of post and summary

An endpoint is asked with the paper's prompt (appendix B); OPENAI_API_KEY holds its key. Which summary comes first is
drawn per example from the seed. With --both-orders both orders are asked, and a judge whose choice depends on the order
has seen a tie. An answer that does not end with A or B in the requested form counts as invalid and enters no
win rate. Every answer is appended to a JSON Lines file under a hash of endpoint, judge and prompt, and is never asked
for again. A request whose answer has no content has failed, and the same command asks it again.
A reward model or a function scores both summaries, and the higher score wins.

Reads eval/samples_validation.csv of a run, or any CSV file with its columns id, query, response, reference. Writes
beside it judge_NAME.csv (a row per example), judge_NAME_rates.csv and judge_NAME_bins.csv (the tables that it prints)
and judge_NAME.jsonl (the answers). For a file with another name, they begin with judge_NAME_of_FILE.
"""

import asyncio
import csv
import hashlib
import json
import os
import random
import re
import sys
from dataclasses import dataclass
from math import exp, isfinite, log
from pathlib import Path
from typing import Annotated

import numpy
import pandas
import torch
import tyro
from openai import AsyncOpenAI, OpenAIError
from rich.console import Console
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval_helpers import fail, load_function, markdown, or_fail  # noqa: E402

from ppo import checkpoint_folder, load_reward_model, load_tokenizer  # noqa: E402
from tldr_dataset import encode  # noqa: E402

# appendix B
PROMPT = """Which of the following summaries does a better job of summarizing the most \\
important points in the given forum post, without including unimportant or \\
irrelevant details? Judge based on accuracy, coverage, and coherence.

Post:
{post}

Summary A:
{a}

Summary B:
{b}

FIRST provide a one-sentence comparison of the two summaries, explaining which \\
you prefer and why. SECOND, on a new line, state only "A" or "B" to indicate your \\
choice. Your response should use the format:
Comparison: <one-sentence comparison and explanation>
Preferred: <"A" or "B">"""
PROMPT = PROMPT.replace("\\\n", "")
COLUMNS = ["id", "query", "response", "reference"]
ANSWER_TOKENS = 60  # of an answer, for the estimate
BINS = [-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0]  # edges of log(summary length / reference length), figure 12


@dataclass
class Args:
    samples: Annotated[tuple[str, ...], tyro.conf.Positional]
    """run folders, or CSV files with the columns id, query, response and reference"""
    judge: str
    """name of the endpoint's model; or path.py:function that scores (post, summary); or, without --base-url, a reward
    model: its folder, or id@revision"""
    against: str | None = None
    """run folder or CSV file whose responses take the references' place"""
    base_url: str | None = None
    """address of the endpoint; default OpenAI's, or OPENAI_BASE_URL"""
    rows: int | None = None
    """the first so many examples; default: all"""
    seed: int = 1
    """of the orders and of the bootstrap"""
    both_orders: bool = False
    """ask for each example in both orders"""
    temperature: float = 0.0
    """of the judge"""
    concurrency: int = 8
    """requests under way at once"""
    retries: int = 6
    """of a request after 429, 5xx, a timeout or a lost connection, with growing pauses"""
    timeout: float = 60.0
    """seconds until a request counts as lost"""
    input_price: float | None = None
    """dollars per million tokens of prompts, for the estimate"""
    output_price: float | None = None
    """dollars per million tokens of answers, for the estimate"""
    name: str | None = None
    """NAME in the file names; default: the judge's, and that of --against"""


# ---- examples ----------------------------------------------------------------------------------------------------


def samples_file(path: str) -> Path:
    """The CSV file of samples that a run folder or a path names."""
    for file in (Path(path) / "eval" / "samples_validation.csv", Path(path)):
        if file.is_file():
            return file
    fail(f"{path}: neither a CSV file nor a run folder with eval/samples_validation.csv (made by eval/samples.py)")


def read_samples(path: str) -> pandas.DataFrame:
    """Its rows with text in COLUMNS, by id; an error names what is missing."""
    file = samples_file(path)
    frame = pandas.read_csv(file, keep_default_na=False, dtype=dict.fromkeys(COLUMNS, str))
    if missing := [column for column in COLUMNS if column not in frame]:
        fail(f"{file}: no columns {missing}; it has {list(frame.columns)}")
    if frame.empty or frame["id"].duplicated().any():
        fail(f"{file}: " + ("no rows" if frame.empty else f"id {frame['id'][frame['id'].duplicated()].iloc[0]} twice"))
    return frame[COLUMNS]


def read_examples(args: Args, samples: str) -> pandas.DataFrame:
    """Columns id, query, summary, other (the reference, or what the run in --against said of the same post)."""
    frame = read_samples(samples).rename(columns={"response": "summary", "reference": "other"})
    if args.against:
        theirs = read_samples(args.against).set_index("id")
        if missing := [i for i in frame["id"] if i not in theirs.index]:
            fail(f"--against {args.against}: {len(missing)} of {len(frame)} ids are not there, {missing[0]} the first")
        theirs = theirs.loc[frame["id"]]
        if (theirs["query"].to_numpy() != frame["query"].to_numpy()).any():
            fail(f"--against {args.against}: the same ids are of other posts")
        frame["other"] = theirs["response"].to_numpy()
    return frame.head(args.rows) if args.rows else frame


def first_is_a(seed: int, identity: str) -> bool:
    """Whether the summary is A and the other B, drawn for an example."""
    return random.Random(f"{seed} {identity}").random() < 0.5


# ---- judges ------------------------------------------------------------------------------------------------------


def verdict(answer: str) -> str | None:
    """A or B as the last line of an answer says in the form asked for, `Preferred: A`; else None, never a guess."""
    lines = [line.strip() for line in answer.strip().splitlines() if line.strip()]
    found = [re.fullmatch(r"Preferred:\s*\"?([AB])\"?\.?", line) for line in lines]
    return found[-1][1] if lines and found[-1] and sum(map(bool, found)) == 1 else None


def key(args: Args, prompt: str) -> str:
    """What an answer is kept under: a hash of the endpoint, the judge and the whole question."""
    endpoint = args.base_url or os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1"
    asked = f"{endpoint.rstrip('/')}\n{args.judge}\n{args.temperature}\n{prompt}"
    return hashlib.blake2b(asked.encode(), digest_size=16).hexdigest()


def read_answers(file: Path) -> dict[str, str]:
    """{key: answer} of the lines that were written whole; what a kill or a full disk has left of another is cut off the
    file, so that the next answer begins a line."""
    if not file.exists():
        return {}
    found = {}
    with or_fail(f"{file}: the answers kept there cannot be read"), file.open("rb+") as opened:
        *lines, rest = opened.read().split(b"\n")
        if rest:
            opened.truncate(opened.tell() - len(rest))
            print(f"{file}: a half-written answer is cut off its end")
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                found[row["key"]] = row["answer"]
            except (ValueError, TypeError, KeyError):  # asked again
                print(f"{file}, row {number}: no answer that can be read")
    return found


async def ask(args: Args, prompts: list[str], file: Path, known: dict[str, str]) -> list[str]:
    """Ask for what is not known, several at once; each answer goes into the file as it comes. Returns the errors."""
    wanted = {key(args, prompt): prompt for prompt in prompts if key(args, prompt) not in known}
    gate, failed = asyncio.Semaphore(args.concurrency), []
    settings = {"base_url": args.base_url, "max_retries": args.retries, "timeout": args.timeout}
    client = AsyncOpenAI(**settings, api_key=os.environ.get("OPENAI_API_KEY", "none" if args.base_url else None))
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(args.judge, total=len(wanted))

        async def one(name: str, prompt: str):
            async with gate:
                try:
                    said = await client.chat.completions.create(
                        model=args.judge,
                        messages=[{"role": "user", "content": prompt}],
                        temperature=args.temperature,
                    )
                    answer = said.choices[0].message.content
                    if not answer:  # cut off, or filtered
                        raise ValueError(f"an answer without content, finish_reason {said.choices[0].finish_reason}")
                except (OpenAIError, ValueError, TypeError, IndexError, AttributeError) as error:  # nothing to keep
                    failed.append(f"{error!r:.300}")
                    return
            known[name] = answer
            row = {"key": name, "answer": answer, "usage": said.usage.model_dump() if said.usage else None}
            with or_fail(f"{file}: an answer could not be written; make room, and the same command goes on"):
                with file.open("a") as answers:
                    answers.write(json.dumps(row) + "\n")
            bar.advance(task)

        await asyncio.gather(*(one(name, prompt) for name, prompt in wanted.items()))
    return failed


def by_endpoint(args: Args, frame: pandas.DataFrame, file: Path) -> list[list[float | None]]:
    """Per example and order asked: 1 where the summary is preferred, 0 where the other, None where the answer is no
    answer."""
    orders = [[first, not first] if args.both_orders else [first] for first in frame["summary_is_a"]]
    prompts = [
        [PROMPT.format(post=q, a=s if first else o, b=o if first else s) for first in wanted]
        for (q, s, o), wanted in zip(frame[["query", "summary", "other"]].to_numpy(), orders, strict=True)
    ]
    known, flat = read_answers(file), [prompt for pair in prompts for prompt in pair]
    print(estimate(args, [prompt for prompt in flat if key(args, prompt) not in known], len(flat)))
    if failed := asyncio.run(ask(args, flat, file, known)):
        fail(
            f"{len(failed)} of {len(flat)} requests got no answer, the first: {failed[0]}. The others are in {file}: "
            "the same command asks for what is missing"
        )
    verdicts = [[verdict(known[key(args, prompt)]) for prompt in pair] for pair in prompts]
    return [
        [None if said is None else float((said == "A") == first) for said, first in zip(row, wanted, strict=True)]
        for row, wanted in zip(verdicts, orders, strict=True)
    ]


def estimate(args: Args, prompts: list[str], total: int) -> str:
    """What the requests will cost, by four characters a token, and take, by two seconds an answer."""
    tokens, answers = sum(map(len, prompts)) / 4, ANSWER_TOKENS * len(prompts)
    text = (
        f"{len(prompts):,} of {total:,} questions to ask {args.judge}: about {tokens:,.0f} tokens in, {answers:,} out, "
    )
    text += f"{2 * len(prompts) / args.concurrency / 60:.1f} minutes at 2 s an answer"
    if args.input_price is not None and args.output_price is not None:
        text += f", ${(tokens * args.input_price + answers * args.output_price) / 1e6:.2f}"
    return text


@torch.no_grad()
def model_scores(judge: str, texts: list[tuple[str, str]], size: int = 16) -> list[float]:
    """Rewards of (query, summary) pairs, each as the tokens of the query, then of the summary and EOS; on a GPU under
    autocast in bfloat16. Equal pairs are scored once, because another batch may round the same score differently."""
    folder = checkpoint_folder("--judge", judge)
    tokenizer = load_tokenizer(folder)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    model, scores = load_reward_model(folder, tokenizer).to(device).eval(), {}
    # a summary begins with a space, as in training, whether its column kept it or not
    rows = [(*encode(tokenizer, f"{q.strip()} {s.strip()}"), tokenizer.eos_token_id) for q, s in texts]
    distinct = sorted(dict.fromkeys(rows), key=len, reverse=True)
    with Progress(console=Console(stderr=True)) as bar:
        for start in bar.track(range(0, len(distinct), size), description=judge):
            batch = distinct[start : start + size]
            ends = torch.tensor([len(row) - 1 for row in batch])
            width = len(batch[0])
            tokens = torch.tensor([[*row, *[tokenizer.pad_token_id] * (width - len(row))] for row in batch])
            with autocast:
                rewards = model(tokens.to(device))  # (b, T)
            found = rewards.cpu().gather(1, ends[:, None]).squeeze(1)  # Detail 12: at EOS
            scores |= zip(batch, found.tolist(), strict=True)
    return [scores[row] for row in rows]


def by_scores(args: Args, kind: str, frame: pandas.DataFrame, file: Path) -> list[list[float | None]]:
    """Per example: 1, 0.5 or 0 as a reward model, or a function of post and summary, scores the summary above, as or
    below the other. An exception in the function, or a score that is not finite, is an error that names `file` and
    id."""
    rows = [f"{file}, id {identity}: --judge {args.judge}" for identity in [*frame["id"], *frame["id"]]]
    texts = [*zip(frame["query"], frame["summary"], strict=True), *zip(frame["query"], frame["other"], strict=True)]
    if kind == "function":
        score = load_function("--judge", args.judge)
        scores = []
        for row, (query, summary) in zip(rows, texts, strict=True):
            with or_fail(f"{row} does not return a number for this row"):
                scores.append(float(score(query, summary)))
    else:
        scores = model_scores(args.judge, texts)
    for row, value in zip(rows, scores, strict=True):
        if not isfinite(value):
            fail(f"{row} gives a summary the score {value}. Only finite scores can be compared: correct the judge")
    differences = [mine - others for mine, others in zip(scores[: len(frame)], scores[len(frame) :], strict=True)]
    return [[0.5 + 0.5 * ((x > 1e-9) - (x < -1e-9))] for x in differences]  # sums of equal terms tie in any order


def judge_kind(args: Args) -> str:
    """`function`, `reward model` or `endpoint`, by what --judge names."""
    if re.fullmatch(r".+\.py:\w+", args.judge):
        return "function"
    return "reward model" if not args.base_url and (Path(args.judge).is_dir() or "@" in args.judge) else "endpoint"


# ---- what it comes to --------------------------------------------------------------------------------------------


def bootstrap(values: numpy.ndarray, seed: int, draws: int = 10_000) -> tuple[float, float]:
    """Ends of the 95 % percentile interval of the mean of `values` (n,)."""
    generator = numpy.random.default_rng(seed)
    means = [values[generator.integers(len(values), size=len(values))].mean() for _ in range(draws)]
    low, high = numpy.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def length_controlled(wins: numpy.ndarray, ratios: numpy.ndarray) -> tuple[float, float]:
    """(win rate at equal length, slope) of the logistic regression of wins (n,) in [0, 1] on log length ratios (n,), by
    Newton's method; a ridge of 1e-6 keeps it finite where the lengths tell all wins apart."""
    design, weights = numpy.stack([numpy.ones_like(ratios), ratios], 1), numpy.zeros(2)
    for _ in range(100):
        chances = 1 / (1 + numpy.exp(-numpy.clip(design @ weights, -30, 30)))
        gradient = design.T @ (wins - chances) - 1e-6 * weights
        curvature = (design * (chances * (1 - chances))[:, None]).T @ design + 1e-6 * numpy.eye(2)
        step = numpy.linalg.solve(curvature, gradient)
        weights = weights + step / max(1.0, numpy.abs(step).max())
        if numpy.abs(step).max() < 1e-10:
            break
    return 1 / (1 + exp(-weights[0])), float(weights[1])


def length_ratio(summary: str, other: str) -> float:
    """log(summary length / reference length) in words, an empty text counted as one word (figure 12)."""
    return log(max(len(summary.split()), 1) / max(len(other.split()), 1))


def length_bins(wins: numpy.ndarray, ratios: numpy.ndarray) -> list[dict]:
    """Win rate and its standard error in each bin of log length ratios that has any: wins, ratios (n,) (figure 12)."""
    edges = [-numpy.inf, *BINS, numpy.inf]
    bins = []
    for start, end in zip(edges, edges[1:], strict=False):
        inside = wins[(ratios >= start) & (ratios < end)]
        if len(inside):
            deviation = inside.std(ddof=1) / len(inside) ** 0.5 if len(inside) > 1 else numpy.nan
            bins.append({"from": start, "to": end, "examples": len(inside), "win_rate": inside.mean(), "se": deviation})
    return bins


def win_rates(frame: pandas.DataFrame, seed: int) -> tuple[dict, list[dict]]:
    """Win rate with its interval, invalid answers, ties, length control; and the win rate by length ratio."""
    valid = frame.dropna(subset="win")
    if valid.empty:
        fail("not one valid answer: read the answers, the judge does not keep to the form")
    wins, ratios = valid["win"].to_numpy(float), valid["length_ratio"].to_numpy(float)
    low, high = bootstrap(wins, seed)
    controlled, slope = length_controlled(wins, ratios)
    summary = {"examples": len(frame), "invalid": len(frame) - len(valid), "ties": int((wins == 0.5).sum())}
    summary |= {"win_rate": wins.mean(), "win_rate_low": low, "win_rate_high": high}
    summary |= {"length_controlled_win_rate": controlled, "log_odds_per_log_ratio": slope}
    summary |= {"mean_length_ratio": ratios.mean()}
    return summary, length_bins(wins, ratios)


def judge_samples(args: Args, samples: str) -> dict:
    """Judge one run's samples, write its files and print its tables; returns the numbers of its whole."""
    file, kind = samples_file(samples), judge_kind(args)
    frame = read_examples(args, samples)
    against = f"_vs_{'_'.join(Path(args.against).parts[-3:])}" if args.against else ""  # stage, model, seed
    of = "" if file.stem == "samples_validation" else f"_of_{file.stem}"
    stem = file.with_name(f"judge_{args.name or re.sub('[^A-Za-z0-9.-]+', '-', args.judge) + against}{of}")
    frame["summary_is_a"] = [first_is_a(args.seed, identity) for identity in frame["id"]]
    wins = by_endpoint(args, frame, Path(f"{stem}.jsonl")) if kind == "endpoint" else by_scores(args, kind, frame, file)
    # both orders: an example counts where both answers are valid, half where they contradict each other
    frame["win"] = [None if None in row else sum(row) / len(row) for row in wins]
    frame["length_ratio"] = [length_ratio(a, b) for a, b in zip(frame["summary"], frame["other"], strict=True)]
    summary, bins = win_rates(frame, args.seed)
    text = f"# {samples} against {args.against or 'the references'}, judged by {args.judge}\n\n"
    text += markdown([summary]) + "\n## by log(summary length / reference length), in words\n\n" + markdown(bins)
    with or_fail(f"{stem}*.csv could not be written"):
        frame.drop(columns="query").to_csv(f"{stem}.csv", index=False, quoting=csv.QUOTE_NONNUMERIC)
        pandas.DataFrame([summary]).to_csv(f"{stem}_rates.csv", index=False)
        pandas.DataFrame(bins).to_csv(f"{stem}_bins.csv", index=False)
    print(text)
    return summary


def main(args: Args):
    # cuDNN's attention builds a plan for every new shape, and its backward pass has given NaN under a mask
    torch.backends.cuda.enable_cudnn_sdp(False)
    for samples in args.samples:  # an error in one now, and not after the requests of those before it
        read_examples(args, samples)
    found = [{"samples": samples} | judge_samples(args, samples) for samples in args.samples]
    if len(found) > 1:
        print(f"# all, judged by {args.judge}\n\n{markdown(found)}")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    main(tyro.cli(Args))
