"""Win rate of sampled summaries against the references, or against another run's summaries of the same posts.

    python eval/judge.py runs/ppo/1b/* --judge gpt-3.5-turbo                        # any OpenAI-compatible endpoint
    python eval/judge.py runs/ppo/1b/44413 --judge runs/reward/6.9b/44413           # a reward model
    python eval/judge.py runs/quickstart/.../44413 --judge quickstart/truth.py:score    # a function of post and summary

An endpoint gets the paper's prompt (appendix B); OPENAI_API_KEY holds its key. The order of the two summaries is drawn
per example. An answer that does not end with A or B in the requested form is invalid and enters no win rate. With a
reward model, which reads EOS after every summary, or a function, the higher score wins.

Reads eval/samples_validation.csv of a run, or any CSV file with its columns id, query, response, reference. A reward
model reads its columns *_token if they are its tokenizer's, else the texts and special tokens in them. Writes beside it
judge_NAME.csv (a row per example), judge_NAME_rates.csv and judge_NAME_bins.csv (with a digest of the samples), and
judge_NAME.jsonl (answers, which the next call reuses). NAME has --against, --seed and another file's name, too.
"""

import contextlib
import csv
import json
import os
import random
import re
import sys
from dataclasses import dataclass
from functools import partial
from math import isfinite, isnan, nan
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Annotated

import numpy
import pandas
import torch
import tyro
from openai import APIStatusError, OpenAI
from rich.console import Console
from rich.progress import track
from scipy import optimize, special

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval_helpers import digest_of, fail, load_function, markdown, or_fail, result_name, wilson, wins, words  # noqa: E402

from ppo import load_reward_model, load_tokenizer, local_checkpoint  # noqa: E402
from tldr_dataset import pad_right  # noqa: E402

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
    """seed of the order in which the judge sees two summaries"""


# ---- examples ----------------------------------------------------------------------------------------------------


def samples_file(path: str) -> Path:
    """Return the CSV file of samples that a run folder or a path names."""
    for file in (Path(path) / "eval" / "samples_validation.csv", Path(path)):
        if file.is_file():
            return file
    fail(f"{path}: neither a CSV file nor a run folder with eval/samples_validation.csv (made by eval/samples.py)")


def read_samples(path: str) -> pandas.DataFrame:
    """Return the columns id, query, summary, other (the reference) and *_token ("" if absent) of a file, all texts."""
    file = samples_file(path)
    with or_fail(f"{file} does not have the columns {', '.join(COLUMNS)}"):
        frame = pandas.read_csv(file, keep_default_na=False, dtype=str)
        frame = frame[COLUMNS].join(frame.reindex(columns=[f"{x}_token" for x in COLUMNS[1:]], fill_value=""))
    if frame.empty or frame["id"].duplicated().any():
        fail(f"{file}: no rows, or an id twice")
    return frame.rename(columns=lambda name: name.replace("response", "summary").replace("reference", "other"))


def read_examples(args: Args, samples: str) -> pandas.DataFrame:
    """Return read_samples' columns. With --against, `other` is that run's summary of the post."""
    frame = read_samples(samples)
    if not args.against:
        return frame
    theirs = read_samples(args.against)[["id", "query", "summary", "summary_token"]]
    theirs.columns = ["id", "query", "other", "other_token"]
    both = frame.drop(columns=["other", "other_token"]).merge(theirs, on=["id", "query"])
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
    they arrive, so that a stopped run continues. A refused, empty or cut answer is ""; `file` has the reason."""
    api_key = os.environ.get("OPENAI_API_KEY", "none")  # a local endpoint needs none
    client = OpenAI(base_url=args.base_url, max_retries=RETRIES, timeout=TIMEOUT, api_key=api_key)
    endpoint, known = f"{client.base_url} {args.judge} {TEMPERATURE}", {}
    for line in file.read_text().splitlines() if file.exists() else []:
        with contextlib.suppress(ValueError, KeyError):  # a stopped run can leave half a line
            row = json.loads(line)
            if row["endpoint"] == endpoint:
                known[row["prompt"]] = "" if row.get("reason") else row["answer"]
    wanted = [prompt for prompt in dict.fromkeys(prompts) if prompt not in known]
    print(f"{len(wanted):,} questions to ask {args.judge}, about {sum(map(len, wanted)) / 4:,.0f} tokens")

    def one(prompt: str) -> dict:
        row, messages = {"endpoint": endpoint, "prompt": prompt}, [{"role": "user", "content": prompt}]
        try:
            response = client.chat.completions.create(model=args.judge, messages=messages, temperature=TEMPERATURE)
        except APIStatusError as error:
            if error.status_code not in (400, 413, 422):  # refused by a content filter, or too long
                raise
            return row | {"answer": "", "reason": str(error)}
        choice = next(iter(response.choices or []), None)
        text, end = (choice.message.content or "", choice.finish_reason) if choice else ("", "no choices")
        whole = text and end not in ("length", "content_filter")
        return row | {"answer": text, "reason": None if whole else f"{end}, {len(text)} characters"}

    failed = f"--judge {args.judge}: a request failed. The same command continues with the answers so far"
    with or_fail(failed), ThreadPool(CONCURRENCY) as pool, file.open("a") as answers:
        answered = pool.imap_unordered(one, wanted)
        for row in track(answered, args.judge, len(wanted), console=Console(stderr=True)):
            known[row["prompt"]] = "" if row["reason"] else row["answer"]
            answers.write("\n" + json.dumps(row))
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
    preferred = pandas.Series([verdict(answers[prompt]) for prompt in prompts], index=frame.index, dtype=object)
    return numpy.where(preferred.isna(), numpy.nan, (preferred == "A") == frame["summary_is_a"])


def row_tokens(tokenizer, rows: list[tuple[str, str, str, str]]) -> list[tuple[int, ...]]:
    """Return what a reward model reads of rows (query, response, ids of both or ""), with EOS at the end. The ids count
    if most of them decode to the response; else they are another tokenizer's, and the texts are read."""
    eos, ids = tokenizer.eos_token_id, [[json.loads(cell or "[]") for cell in row[2:]] for row in rows]
    same = [tokenizer.decode(x, skip_special_tokens=True) == row[1] for row, (_, x) in zip(rows, ids, strict=True)]
    if 2 * sum(same) <= len(rows) or not all(row[3] for row in rows):
        texts = [row[0] + row[1].removesuffix(tokenizer.eos_token) for row in rows]
        ids = [(tokens, []) for tokens in tokenizer(texts, add_special_tokens=False, verbose=False).input_ids]
    return [(*query, *(x for x in response if x != eos), eos) for query, response in ids]


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
    """Return (n,): 1, 0.5 or 0 where a reward model or a function scores the summary above, as or below the other."""
    rows = []
    for side in ("summary", "other"):
        rows += frame[["query", side, "query_token", f"{side}_token"]].itertuples(index=False, name=None)
    texts, names = [row[:2] for row in rows], [f"{file}, id {name}" for name in frame["id"]] * 2
    return wins(*scores_of("--judge", args.judge, texts, names, partial(row_tokens, rows=rows)).reshape(2, -1))


def is_function(judge: str) -> bool:
    """Return whether --judge names a function as path.py:function."""
    return re.fullmatch(r".+\.py:\w+", judge) is not None


# ---- win rates ---------------------------------------------------------------------------------------------------


def length_controlled(wins: numpy.ndarray, ratios: numpy.ndarray) -> tuple[float, float]:
    """Return (win rate at equal length, slope) of the logistic regression of wins (n,) in [0, 1] on log length ratios
    (n,). Both are nan if all ratios are equal or one separates wins from losses, because no weights fit best then. The
    win rate is also nan if all summaries are longer, or all shorter, than the other ones."""
    won, lost = ratios[wins > 0], ratios[wins < 1]  # a tie is half of each
    if not (won.size and lost.size and won.min() < lost.max() and lost.min() < won.max()):
        return nan, nan
    design = numpy.stack([numpy.ones_like(ratios), ratios], 1)
    solve = partial(optimize.root, x0=numpy.zeros(2), method="lm", options={"xtol": 1e-12, "ftol": 1e-12})
    intercept, slope = solve(lambda weights: design.T @ (special.expit(design @ weights) - wins)).x
    return float(special.expit(intercept)) if ratios.min() <= 0 <= ratios.max() else nan, float(slope)


def win_rates(frame: pandas.DataFrame) -> tuple[dict, pandas.DataFrame]:
    """Return the numbers over all examples, with Wilson's 95 % interval of the win rate, and the win rate by log length
    ratio (figure 12) with a standard error, which is a share of Wilson's interval and so never 0."""
    valid = frame.dropna(subset="win").astype({"win": float})
    if len(valid) < 2:
        fail(f"{len(valid)} valid answers: read the others in judge_*.jsonl. A line that you remove is asked for again")
    wins, ratios = valid["win"].to_numpy(), valid["log_length_ratio"].to_numpy()
    low, high = wilson(wins.sum(), len(wins))
    summary = {"examples": len(frame), "invalid": len(frame) - len(valid), "ties": int((wins == 0.5).sum())}
    summary |= {"win_rate": wins.mean(), "win_rate_low": low, "win_rate_high": high}
    summary["length_controlled_win_rate"], summary["log_odds_per_log_ratio"] = length_controlled(wins, ratios)
    summary["mean_log_length_ratio"] = ratios.mean()
    groups = valid.groupby(pandas.cut(valid["log_length_ratio"], BINS, right=False), observed=True)["win"]
    bins = groups.agg(examples="size", win_rate="mean")
    ends = wilson(groups.sum(), bins["examples"])
    bins["se"] = (ends[1] - ends[0]) / (2 * 1.96)
    bins.insert(0, "from", [interval.left for interval in bins.index])
    bins.insert(1, "to", [interval.right for interval in bins.index])
    return summary, bins


def judge_samples(args: Args, samples: str) -> dict:
    """Judge one run's samples and write its files. Returns the numbers over all examples."""
    file = samples_file(samples)
    frame, digest = read_examples(args, samples), digest_of(file)
    rest = "" if file.stem == "samples_validation" else f"_of_{file.stem}"
    if args.against:  # stage, model, seed, and a digest, because another study has them too
        parts = [*Path(args.against).parts[-3:], digest_of(samples_file(args.against))]
        rest = f"_vs_{'_'.join(parts).lstrip('/_')}{rest}"
    stem = file.with_name(result_name(args.judge, rest + f"_seed{args.seed}" * (args.seed != 1)))
    frame["summary_is_a"] = [first_is_a(args.seed, identity) for identity in frame["id"]]
    has_endpoint = args.base_url or os.environ.get("OPENAI_BASE_URL")  # whose model can have an @ in its name
    is_model = not args.base_url and Path(args.judge).is_dir() or not has_endpoint and "@" in args.judge
    if is_function(args.judge) or is_model:
        frame["win"] = by_scores(args, frame, file)
    else:
        frame["win"] = by_endpoint(args, frame, Path(f"{stem}.jsonl"))
    lengths = frame[["summary", "other"]].map(lambda text: max(len(words(text)), 1))  # an empty text counts as a word
    frame["log_length_ratio"] = numpy.log(lengths["summary"] / lengths["other"])
    summary, bins = win_rates(frame)
    columns = ["id", "summary", "other", "summary_is_a", "win", "log_length_ratio"]
    frame[columns].to_csv(f"{stem}.csv", index=False, quoting=csv.QUOTE_NONNUMERIC)
    pandas.DataFrame([summary | {"samples": digest}]).to_csv(f"{stem}_rates.csv", index=False)
    bins.assign(samples=digest).to_csv(f"{stem}_bins.csv", index=False)
    return summary


def main(args: Args):
    for samples in args.samples:  # an error in one now, and not after the requests of those before it
        read_examples(args, samples)
    rates = [{"samples": samples} | judge_samples(args, samples) for samples in args.samples]
    print(f"# Win rates against {args.against or 'the references'}, judged by {args.judge}\n\n{markdown(rates)}")
    if any(isnan(row["length_controlled_win_rate"]) for row in rates):
        print(
            "nan: no win rate at equal length, because all summaries are longer, all shorter, or length decides alone"
        )


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    main(tyro.cli(Args))
