"""Win rate of sampled summaries against the references, or against another run's summaries of the same posts.

    python eval/judge.py runs/ppo/1b/* --judge gpt-3.5-turbo                        # any OpenAI-compatible endpoint
    python eval/judge.py runs/ppo/1b/44413 --judge runs/reward/6.9b/44413           # a reward model
    python eval/judge.py runs/quickstart/.../44413 --judge quickstart/truth.py:score    # a function of post and summary

An endpoint gets the paper's prompt (appendix B); OPENAI_API_KEY holds its key. The order of the two summaries is drawn
per example. An answer that does not end with A or B in the requested form is invalid and enters no win rate. With a
reward model, which reads EOS after every summary, or a function, the higher score wins.

Reads eval/samples_validation.csv of a run, or any CSV file with its columns id, query, response, reference. Writes
beside it judge_NAME.csv (a row per example), judge_NAME_rates.csv, judge_NAME_bins.csv and judge_NAME.jsonl (answers,
which are kept for the next call). For a file with another name, the names begin with judge_NAME_of_FILE.
"""

import contextlib
import csv
import json
import os
import random
import re
import sys
from dataclasses import dataclass
from math import isfinite
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Annotated

import numpy
import pandas
import torch
import tyro
from openai import OpenAI
from rich.console import Console
from rich.progress import track
from scipy import optimize, special, stats

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval_helpers import fail, load_function, markdown, or_fail  # noqa: E402

from ppo import load_reward_model, load_tokenizer, local_checkpoint  # noqa: E402
from tldr_dataset import encode, pad_right  # noqa: E402

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
CONCURRENCY, RETRIES, TIMEOUT, TEMPERATURE = 8, 6, 60, 0.0  # of requests; the timeout in seconds
BINS = [-numpy.inf, -1, -0.5, -0.25, 0, 0.25, 0.5, 1, numpy.inf]  # of log(summary length / reference length), figure 12


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
    seed: int = 1
    """seed of the order in which the judge sees two summaries, and of the bootstrap"""


# ---- examples ----------------------------------------------------------------------------------------------------


def samples_file(path: str) -> Path:
    """Return the CSV file of samples that a run folder or a path names."""
    for file in (Path(path) / "eval" / "samples_validation.csv", Path(path)):
        if file.is_file():
            return file
    fail(f"{path}: neither a CSV file nor a run folder with eval/samples_validation.csv (made by eval/samples.py)")


def read_samples(path: str) -> pandas.DataFrame:
    """Return the columns id, query, summary and other (the reference) of a file of samples, all of them text."""
    file = samples_file(path)
    with or_fail(f"{file} does not have the columns {', '.join(COLUMNS)}"):
        frame = pandas.read_csv(file, keep_default_na=False, dtype=str, usecols=COLUMNS)[COLUMNS]
    if frame.empty or frame["id"].duplicated().any():
        fail(f"{file}: no rows, or an id twice")
    return frame.rename(columns={"response": "summary", "reference": "other"})


def read_examples(args: Args, samples: str) -> pandas.DataFrame:
    """Return the columns id, query, summary and other (the reference, or the --against run's summary of that post)."""
    frame = read_samples(samples)
    if not args.against:
        return frame
    theirs = read_samples(args.against)[["id", "query", "summary"]].rename(columns={"summary": "other"})
    both = frame.drop(columns="other").merge(theirs, on=["id", "query"])
    if len(both) < len(frame):
        fail(f"--against {args.against}: {len(frame) - len(both)} of {len(frame)} posts are not there")
    return both


def first_is_a(seed: int, identity: str) -> bool:
    """Return whether the summary is A and the other B, drawn for an example."""
    return random.Random(f"{seed} {identity}").random() < 0.5


# ---- judges ------------------------------------------------------------------------------------------------------


def verdict(answer: str) -> str | None:
    """Return A or B where the last line of an answer, and no other one, is `Preferred: A` or `Preferred: B`."""
    lines = [line.strip() for line in answer.strip().splitlines()] or [""]
    matches = [re.fullmatch(r"Preferred:\s*\"?([AB])\"?\.?", line) for line in lines]
    return matches[-1][1] if matches[-1] and sum(map(bool, matches)) == 1 else None


def ask(args: Args, prompts: list[str], file: Path) -> dict[str, str]:
    """Return {prompt: answer} of the endpoint. Answers in `file` are not asked for again, and new ones are appended as
    they arrive, so that a stopped run continues. An answer without content (cut off or filtered) is an empty one."""
    api_key = os.environ.get("OPENAI_API_KEY", "none")  # a local endpoint needs none
    client = OpenAI(base_url=args.base_url, max_retries=RETRIES, timeout=TIMEOUT, api_key=api_key)
    endpoint, known = f"{client.base_url} {args.judge} {TEMPERATURE}", {}
    for line in file.read_text().splitlines() if file.exists() else []:
        with contextlib.suppress(ValueError, KeyError):  # a stopped run can leave half a line
            row = json.loads(line)
            if row["endpoint"] == endpoint:
                known[row["prompt"]] = row["answer"]
    wanted = [prompt for prompt in dict.fromkeys(prompts) if prompt not in known]
    print(f"{len(wanted):,} questions to ask {args.judge}, about {sum(map(len, wanted)) / 4:,.0f} tokens")

    def one(prompt: str) -> tuple[str, str]:
        messages = [{"role": "user", "content": prompt}]
        response = client.chat.completions.create(model=args.judge, messages=messages, temperature=TEMPERATURE)
        return prompt, response.choices[0].message.content or ""

    failed = f"--judge {args.judge}: a request failed. The same command continues with the answers so far"
    with or_fail(failed), ThreadPool(CONCURRENCY) as pool, file.open("a") as answers:
        answered = pool.imap_unordered(one, wanted)
        for prompt, answer in track(answered, args.judge, len(wanted), console=Console(stderr=True)):
            known[prompt] = answer
            answers.write("\n" + json.dumps({"endpoint": endpoint, "prompt": prompt, "answer": answer}))
            answers.flush()
    return known


def by_endpoint(args: Args, frame: pandas.DataFrame, file: Path) -> numpy.ndarray:
    """Return (n,): 1 where the summary is preferred, 0 where the other one is, NaN where an answer is invalid."""
    if not args.base_url and not os.environ.get("OPENAI_API_KEY"):
        fail(f"--judge {args.judge}: set OPENAI_API_KEY to your key, or --base-url to an endpoint that needs none")
    prompts = []
    for row in frame.itertuples():
        a, b = (row.summary, row.other) if row.summary_is_a else (row.other, row.summary)
        prompts.append(PROMPT.format(post=row.query, a=a, b=b))
    answers = ask(args, prompts, file)
    preferred = pandas.Series([verdict(answers[prompt]) for prompt in prompts], index=frame.index)
    return numpy.where(preferred.isna(), numpy.nan, (preferred == "A") == frame["summary_is_a"])


@torch.no_grad()
def model_scores(flag: str, path: str, tokens_of, size: int = 16) -> list[float]:
    """Return a reward model's scores of the rows (tuples of tokens) that tokens_of(tokenizer) returns, read at their
    last token (Detail 12); on a GPU under autocast in bfloat16. Equal rows are scored once, because another batch may
    round them differently."""
    # cuDNN's attention builds a plan for every new shape, and its backward pass has given NaN under a mask
    torch.backends.cuda.enable_cudnn_sdp(False)
    folder = local_checkpoint(flag, path)
    tokenizer = load_tokenizer(folder)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    rows = tokens_of(tokenizer)
    distinct = sorted(dict.fromkeys(rows), key=len, reverse=True)
    model = load_reward_model(folder, tokenizer, len(distinct[0])).to(device).eval()
    scores = {}
    for start in track(range(0, len(distinct), size), path, console=Console(stderr=True)):
        batch = distinct[start : start + size]
        ends = torch.tensor([len(row) - 1 for row in batch])
        tokens = torch.tensor([pad_right(list(row), tokenizer.pad_token_id, len(batch[0])) for row in batch])
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            rewards = model(tokens.to(device))  # (b, T)
        scores |= zip(batch, rewards.cpu().gather(1, ends[:, None]).squeeze(1).tolist(), strict=True)
    return [scores[row] for row in rows]


def scores_of(flag: str, judge: str, texts, names: list[str], tokens_of) -> numpy.ndarray:
    """Return the scores (n,) that `judge`, given by a flag, gives n summaries: a function of their `texts` (post,
    summary), or a reward model of what tokens_of(tokenizer) returns. Ends with an error that has a summary's name where
    a score is not a finite number."""
    if is_function(judge):
        function = load_function(flag, judge)
        scores = []
        for name, text in zip(names, texts, strict=True):
            with or_fail(f"{name}: {flag} {judge} does not return a number"):
                scores.append(float(function(*text)))
    else:
        scores = model_scores(flag, judge, tokens_of)
    for name, score in zip(names, scores, strict=True):
        if not isfinite(score):
            fail(f"{name}: {flag} {judge} gives the score {score}")
    return numpy.array(scores)


def by_scores(args: Args, frame: pandas.DataFrame, file: Path) -> numpy.ndarray:
    """Return (n,): 1, 0.5 or 0 where a reward model, or a function of post and summary, scores the summary above, as or
    below the other one."""
    texts = [*zip(frame["query"], frame["summary"], strict=True), *zip(frame["query"], frame["other"], strict=True)]
    names = [f"{file}, id {name}" for name in frame["id"]] * 2

    def tokens_of(tokenizer) -> list[tuple[int, ...]]:
        # a summary begins with a space, as in training, whether its column kept it or not
        return [(*encode(tokenizer, f"{q.strip()} {s.strip()}"), tokenizer.eos_token_id) for q, s in texts]

    scores = scores_of("--judge", args.judge, texts, names, tokens_of).reshape(2, -1)
    difference = scores[0] - scores[1]
    return numpy.where(abs(difference) <= 1e-9, 0.5, difference > 0)  # sums of equal terms tie in any order


def is_function(judge: str) -> bool:
    """Return whether --judge names a function as path.py:function."""
    return re.fullmatch(r".+\.py:\w+", judge) is not None


# ---- win rates ---------------------------------------------------------------------------------------------------


def length_controlled(wins: numpy.ndarray, ratios: numpy.ndarray) -> tuple[float, float]:
    """Return (win rate at equal length, slope) of the logistic regression of wins (n,) in [0, 1] on log length ratios
    (n,); a ridge of 1e-6 keeps it finite where the lengths separate wins from losses."""
    design = numpy.stack([numpy.ones_like(ratios), ratios], 1)

    def gradient(weights):
        return design.T @ (special.expit(design @ weights) - wins) + 1e-6 * weights

    intercept, slope = optimize.root(gradient, numpy.zeros(2), method="lm", options={"xtol": 1e-12, "ftol": 1e-12}).x
    return float(special.expit(intercept)), float(slope)


def win_rates(frame: pandas.DataFrame, seed: int) -> tuple[dict, pandas.DataFrame]:
    """Return the numbers over all examples, with the 95 % bootstrap interval of the win rate, and the win rate and its
    standard error by log length ratio (figure 12)."""
    valid = frame.dropna(subset="win").astype({"win": float})
    if len(valid) < 2:
        fail(f"{len(valid)} valid answers: read the answers, the judge does not keep to the form")
    wins, ratios = valid["win"].to_numpy(), valid["length_ratio"].to_numpy()
    draws = {"n_resamples": 10_000, "batch": 100, "method": "percentile", "rng": numpy.random.default_rng(seed)}
    low, high = stats.bootstrap((wins,), numpy.mean, **draws).confidence_interval
    controlled, slope = length_controlled(wins, ratios)
    summary = {"examples": len(frame), "invalid": len(frame) - len(valid), "ties": int((wins == 0.5).sum())}
    summary |= {"win_rate": wins.mean(), "win_rate_low": low, "win_rate_high": high}
    summary |= {"length_controlled_win_rate": controlled, "log_odds_per_log_ratio": slope}
    summary |= {"mean_length_ratio": ratios.mean()}
    groups = valid.groupby(pandas.cut(valid["length_ratio"], BINS, right=False), observed=True)["win"]
    bins = groups.agg(examples="size", win_rate="mean", se="sem")
    bins.insert(0, "from", [interval.left for interval in bins.index])
    bins.insert(1, "to", [interval.right for interval in bins.index])
    return summary, bins


def judge_samples(args: Args, samples: str) -> dict:
    """Judge one run's samples and write its files. Returns the numbers over all examples."""
    file = samples_file(samples)
    frame = read_examples(args, samples)
    against = f"_vs_{'_'.join(Path(args.against).parts[-3:])}" if args.against else ""  # stage, model, seed
    of = "" if file.stem == "samples_validation" else f"_of_{file.stem}"
    stem = file.with_name(f"judge_{re.sub('[^A-Za-z0-9.-]+', '-', args.judge)}{against}{of}")
    frame["summary_is_a"] = [first_is_a(args.seed, identity) for identity in frame["id"]]
    is_model = not args.base_url and (Path(args.judge).is_dir() or "@" in args.judge)
    if is_function(args.judge) or is_model:
        frame["win"] = by_scores(args, frame, file)
    else:
        frame["win"] = by_endpoint(args, frame, Path(f"{stem}.jsonl"))
    words = frame[["summary", "other"]].map(lambda text: max(len(text.split()), 1))  # an empty text counts as a word
    frame["length_ratio"] = numpy.log(words["summary"] / words["other"])
    summary, bins = win_rates(frame, args.seed)
    frame.drop(columns="query").to_csv(f"{stem}.csv", index=False, quoting=csv.QUOTE_NONNUMERIC)
    pandas.DataFrame([summary]).to_csv(f"{stem}_rates.csv", index=False)
    bins.to_csv(f"{stem}_bins.csv", index=False)
    return summary


def main(args: Args):
    for samples in args.samples:  # an error in one now, and not after the requests of those before it
        read_examples(args, samples)
    rates = [{"samples": samples} | judge_samples(args, samples) for samples in args.samples]
    print(f"# Win rates against {args.against or 'the references'}, judged by {args.judge}\n\n{markdown(rates)}")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    main(tyro.cli(Args))
