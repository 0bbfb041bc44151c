"""Report on one chain of the quickstart: SFT, PPO and DPO judged by the truth, and how far the reward model has it.

    python quickstart/report.py --raw data/quickstart/raw --preference-dataset data/quickstart/tldr/preference \
        --runs runs --model nano-s --seed 1

reads the run folders {runs}/{sft,reward,ppo,dpo}/{model}/{seed}, made with --run-eval and eval/samples.py, and writes
    table.csv              row, metric, value: every number of the report, not rounded
    table.md               the same as tables
    times.csv              seconds of training of each stage; no other file depends on the clock
    samples.md             ten posts with what each policy wrote about them and its true score
    learning_curves.png    PPO against episodes (figure 10 of the paper), SFT, reward model and DPO

The judge is the truth of `truth.py`, which no training stage has seen. Intervals are bootstrap intervals over posts.
Runs of one seed give one table.csv, to the last digit.
"""

import csv
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import matplotlib
import numpy
import pandas
import tyro
from datasets import load_from_disk
from PIL import Image
from rich.console import Console
from rich.table import Table
from rouge_score.rouge_scorer import RougeScorer
from truth import FACTS, find_facts, judge, score

sys.path.append(str(Path(__file__).resolve().parents[1] / "eval"))

from eval_helpers import fail  # noqa: E402
from run_metrics import read_metrics  # noqa: E402

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

STAGES = {"SFT": "sft", "reward": "reward", "PPO": "ppo", "DPO": "dpo"}
POLICIES = ("SFT", "PPO", "DPO")
YARDSTICKS = ("near_perfect", "copied_title")  # a good and a lazy policy, known without training
EOS = "<|endoftext|>"  # ends the summaries of the preference data set; it is no word
PANELS = [  # stage, metric, what it shows
    ("PPO", "objective/rlhf_reward", "PPO: RLHF reward"),
    ("PPO", "objective/kl", "PPO: KL to SFT (nats)"),
    ("PPO", "objective/score", "PPO: score of the reward model"),
    ("PPO", "response/eos_rate", "PPO: share of responses with EOS"),
    ("PPO", "response/length", "PPO: response length (tokens)"),
    ("SFT", "loss/train", "SFT: loss (nats per token)"),
    ("reward", "accuracy/train", "reward model: accuracy, noisy labels"),
    ("DPO", "accuracy/train", "DPO: accuracy, noisy labels"),
]


@dataclass
class Args:
    raw: str = "data/quickstart/raw"
    """folder of the raw posts and yardsticks, from quickstart/posts.py"""
    preference_dataset: str = "data/quickstart/tldr/preference"
    """folder of the pre-tokenised comparisons, from tldr_dataset.py"""
    runs: str = "runs"
    """folder of the run folders {stage}/{model}/{seed}"""
    model: str = "nano-s"
    """the {model} of the run folders"""
    seed: int = 1
    """the {seed} of the run folders"""
    output_dir: str | None = None
    """folder to write, files of an earlier report are replaced; default {runs}/report/{model}/{seed}"""


# ---- helpers --------------------------------------------------------------------------------------------------------


def read_rows(path: Path, columns: list[str]) -> list[dict]:
    """The rows of a .jsonl or .csv file (there every value is text), of which each must have the columns."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [json.loads(line) for line in file] if path.suffix == ".jsonl" else list(csv.DictReader(file))
    if not rows:
        fail(f"{path} has no row")
    for column in columns:
        if any(row.get(column) is None for row in rows):
            fail(f"{path} has a row without {column}; is it cut off, or of another version?")
    return rows


def bootstrap_interval(values: list[float], resamples: int) -> tuple[float, float]:
    """95 % interval of the mean of values (n,): 2.5 and 97.5 % quantiles of the means of `resamples` draws of n values
    with replacement. Every call draws the same places."""
    places = numpy.random.default_rng(1).integers(len(values), size=(resamples, len(values)))
    low, high = numpy.quantile(numpy.array(values)[places].mean(1), [0.025, 0.975])
    return float(low), float(high)


def agreement(gaps: list[float], better: list[float]) -> float:
    """Share of the reward gaps (n,) that are above 0 where `better` (n,) is 1 and below 0 where it is 0; those where it
    is 0.5 are left out. A gap of 0 agrees with neither."""
    hits = [gap > 0 if side == 1 else gap < 0 for gap, side in zip(gaps, better, strict=True) if side != 0.5]
    return fmean(hits) if hits else float("nan")


def running_mean(values: list[float]) -> list[float]:
    """Mean of each value and those before it, over a 20th of the curve (over fewer at its start)."""
    width = max(1, len(values) // 20)
    return [fmean(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]


def shown(value) -> str:
    """A cell of a table: 3 digits of a float, nothing for None."""
    return "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def markdown_table(header: list[str], rows: list[list]) -> str:
    """A Markdown table; line breaks become spaces and bars are escaped, so that no cell breaks it."""
    lines = [header, ["---"] * len(header), *([shown(value) for value in row] for row in rows)]
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


# ---- reading: everything is checked before anything is written ------------------------------------------------------


class Chain(NamedTuple):
    """What the report is about. Lists by post have one order, lists by pair as well."""

    posts: list[dict]  # that were answered
    samples: dict[str, list[dict]]  # by policy: its rows by post
    texts: dict[str, list[str]]  # by policy, yardstick and "reference": its summaries by post
    pairs: dict[str, list[dict]]  # by split
    gaps: dict[tuple[str, str], list[float]]  # by stage and split: chosen less rejected reward, by pair
    curves: dict[str, list[tuple]]  # by title of its panel: (episode, value)
    seconds: list[dict]  # stage, seconds of training


def check_files(args: Args, folders: dict[str, Path], splits: list[str]):
    """An error that names every missing file and the command that makes it."""
    made_by = {}
    for kind in ("posts", "yardsticks"):
        path = Path(args.raw, kind, "validation.jsonl")
        made_by[path] = f"python quickstart/posts.py --output-dir {args.raw}"
    made_by[Path(args.preference_dataset, "dataset_dict.json")] = "python tldr_dataset.py --preference-dataset ..."
    for name, folder in folders.items():
        command = f"python {STAGES[name]}.py --seed {args.seed} --output-dir {folder} ..."
        made_by[folder / "metrics.jsonl"] = command
        if name in POLICIES:
            made_by[folder / "eval" / "samples_validation.csv"] = f"python eval/samples.py {folder}"
        else:
            for split in splits:
                made_by[folder / "eval" / f"pairs_{split}.csv"] = f"{command} --run-eval"
    missing = [f"\n  {path}, made by  {command}" for path, command in made_by.items() if not path.exists()]
    if missing:
        fail(f"{len(missing)} of {len(made_by)} files are missing:{''.join(missing)}")


def read_policies(args: Args, folders: dict[str, Path]) -> tuple[list[dict], dict, dict]:
    """(posts, samples, texts) of a Chain."""
    all_posts = read_rows(Path(args.raw, "posts", "validation.jsonl"), ["id", "post", "summary"])
    all_posts = {row["id"]: row for row in all_posts}
    yardsticks = read_rows(Path(args.raw, "yardsticks", "validation.jsonl"), ["id", *YARDSTICKS])
    yardsticks = {row["id"]: row for row in yardsticks}
    samples = {}
    for name in POLICIES:
        path = folders[name] / "eval" / "samples_validation.csv"
        samples[name] = read_rows(path, ["id", "response", "reference", "response_tokens", "has_eos", "rougeL"])
        ids = [row["id"] for row in samples["SFT"]]
        if [row["id"] for row in samples[name]] != ids:
            fail(f"{path} is about other posts than the samples of SFT; run both stages on one --dataset")
        for row in samples[name]:
            post = all_posts.get(row["id"])
            if post is None or row["id"] not in yardsticks or row["reference"].strip() != post["summary"].strip():
                fail(f"{path}: {row['id']} with that reference is no post of {args.raw}; run the stages on its posts")
    posts = [all_posts[i] for i in ids]
    texts = {name: [row["response"] for row in rows] for name, rows in samples.items()}
    for name in YARDSTICKS:
        texts[name] = [yardsticks[i][name] for i in ids]
    texts["reference"] = [post["summary"] for post in posts]
    return posts, samples, texts


def read_gaps(args: Args, path: Path, split: str, pairs: list[dict]) -> list[float]:
    """Chosen less rejected reward of each pair, from a stage's table of the pairs of a split."""
    rows = read_rows(path, ["chosen_reward", "rejected_reward"])
    if len(rows) != len(pairs):
        fail(f"{path} has {len(rows)} rows, {args.preference_dataset} has {len(pairs)} pairs of {split}")
    for row, pair in zip(rows, pairs, strict=True):
        if row.get("policies") and row["policies"] != pair.get("policies"):
            fail(f"{path} is about other pairs than {args.preference_dataset}; run the stage on that data")
    return [float(row["chosen_reward"]) - float(row["rejected_reward"]) for row in rows]


def read_pair_rewards(args: Args, folders: dict[str, Path], splits: list[str]) -> tuple[dict, dict]:
    """(pairs, gaps) of a Chain."""
    data = load_from_disk(args.preference_dataset)
    pairs, gaps = {}, {}
    for split in splits:
        columns = [column for column in ("query", "chosen", "rejected", "policies") if column in data[split].features]
        pairs[split] = data[split].select_columns(columns).to_list()
        for stage in ("reward", "DPO"):
            path = folders[stage] / "eval" / f"pairs_{split}.csv"
            if stage == "reward" or path.exists():  # DPO may have none
                gaps[stage, split] = read_gaps(args, path, split, pairs[split])
    return pairs, gaps


def read_panels(folders: dict[str, Path]) -> tuple[dict, list[dict]]:
    """(curves, seconds) of a Chain."""
    metrics = {name: read_metrics(folder) for name, folder in folders.items()}
    seconds = [{"stage": STAGES[name], "seconds": rows[-1].get("time/total")} for name, rows in metrics.items()]
    curves = {}
    for name, key, title in PANELS:
        curves[title] = [(row["episode"], row[key]) for row in metrics[name] if key in row]
        if not curves[title]:
            fail(f"{folders[name] / 'metrics.jsonl'} has no {key}")
    return curves, seconds


def read_chain(args: Args) -> Chain:
    folders = {name: Path(args.runs, stage, args.model, str(args.seed)) for name, stage in STAGES.items()}
    splits = ["validation"]
    if Path(args.preference_dataset, "validation_cnndm").exists():
        splits.append("validation_cnndm")
    check_files(args, folders, splits)
    return Chain(*read_policies(args, folders), *read_pair_rewards(args, folders, splits), *read_panels(folders))


# ---- numbers: {row: {metric: value}} of table.csv -------------------------------------------------------------------


def rouge_l(chain: Chain, name: str) -> list[float]:
    """ROUGE-L of a row's summaries by post: what eval/samples.py found, or of the yardsticks our own."""
    if name in chain.samples:
        return [float(row["rougeL"]) for row in chain.samples[name]]
    scorer = RougeScorer(["rougeL"])
    told = zip(chain.texts["reference"], chain.texts[name], strict=True)
    return [scorer.score(reference, summary)["rougeL"].fmeasure for reference, summary in told]


def true_scores(chain: Chain, name: str) -> list[float]:
    """The truth's scores of a row's summaries by post."""
    return [score(post["post"], summary) for post, summary in zip(chain.posts, chain.texts[name], strict=True)]


def policy_values(chain: Chain, name: str) -> dict[str, float]:
    """Means over the posts of what one policy, a yardstick or the reference wrote."""
    summaries = chain.texts[name]
    told = zip(chain.posts, summaries, strict=True)
    wins = [judge(post["post"], summary, post["summary"]) for post, summary in told]
    low, high = bootstrap_interval(wins, 2_000)
    found = {"rougeL": fmean(rouge_l(chain, name)), "truth": fmean(true_scores(chain, name))}
    found |= {"win_rate": fmean(wins), "win_rate_low": low, "win_rate_high": high}
    found["words"] = fmean(len(re.findall(r"\w+", summary)) for summary in summaries)  # as the truth counts
    if name in chain.samples:
        found["tokens"] = fmean(int(row["response_tokens"]) for row in chain.samples[name])
        found["eos_rate"] = fmean(row["has_eos"] == "True" for row in chain.samples[name])
    return found


def truth_difference(chain: Chain, name: str) -> dict[str, float]:
    """True score of a policy above SFT's, paired: both wrote about the same posts."""
    both = zip(true_scores(chain, name), true_scores(chain, "SFT"), strict=True)
    gains = [ours - sft for ours, sft in both]
    low, high = bootstrap_interval(gains, 10_000)
    return {"truth_difference": fmean(gains), "truth_difference_low": low, "truth_difference_high": high}


def fact_shares(chain: Chain, name: str) -> dict[str, float]:
    """Of each kind of fact the share of the posts that have it whose summary says it (left out where no post has it),
    and the share of all posts whose summary says another."""
    held = [find_facts(post["post"]) for post in chain.posts]
    said = [find_facts(text) for text in chain.texts[name]]
    both = list(zip(said, held, strict=True))
    found = {}
    for kind in FACTS:
        right = [bool(ours[kind] & facts[kind]) for ours, facts in both if facts[kind]]
        wrong = [bool(ours[kind] - facts[kind]) for ours, facts in both]
        if right:
            found[f"{kind}_right"] = fmean(right)
        found[f"{kind}_wrong"] = fmean(wrong)
    return found


def truly_better(pairs: list[dict]) -> list[float]:
    """1 where the truth prefers the chosen response, 0 where the rejected one, 0.5 where neither, by pair."""
    return [judge(p["query"], p["chosen"].removesuffix(EOS), p["rejected"].removesuffix(EOS)) for p in pairs]


def reward_accuracies(chain: Chain, stage: str) -> dict[str, float]:
    """Agreement of a stage's rewards with the labels as given (noisy) and with the truth (clean), by split."""
    found = {}
    for split, pairs in chain.pairs.items():
        suffix = split.removeprefix("validation")
        if (stage, split) in chain.gaps:
            gaps = chain.gaps[stage, split]
            found[f"accuracy_noisy{suffix}"] = agreement(gaps, [1] * len(pairs))
            found[f"accuracy_clean{suffix}"] = agreement(gaps, truly_better(pairs))
    return found


def values_of(chain: Chain) -> dict[str, dict[str, float]]:
    """Every number of the report."""
    values = {name: policy_values(chain, name) for name in chain.texts}
    values["PPO"]["share_of_near_perfect"] = values["PPO"]["truth"] / values["near_perfect"]["truth"]
    for name in ("PPO", "DPO"):
        values[f"{name}-SFT"] = truth_difference(chain, name)
    for name in POLICIES:
        values[name] |= fact_shares(chain, name)
    values["reward"] = reward_accuracies(chain, "reward")
    implicit = reward_accuracies(chain, "DPO")
    if implicit:
        values["dpo_implicit"] = implicit
    return values


# ---- tables: (title, header, rows) ----------------------------------------------------------------------------------


def value_table(title: str, values: dict[str, dict], names: list[str], metrics: list[str]) -> tuple:
    """A table of these rows, where they are there."""
    rows = [[name, *(values[name].get(metric) for metric in metrics)] for name in names if name in values]
    return title, ["", *metrics], rows


def kinds_table(chain: Chain, values: dict[str, dict]) -> tuple:
    title = "Facts by kind: share of the posts that have it whose summary says it, of all whose summary says another"
    header = ["kind", "posts"]
    for name in POLICIES:
        header += [f"{name} right", f"{name} wrong"]
    held = [find_facts(post["post"]) for post in chain.posts]
    rows = []
    for kind in FACTS:
        row = [kind, sum(bool(facts[kind]) for facts in held)]
        for name in POLICIES:
            row += [values[name].get(f"{kind}_right"), values[name][f"{kind}_wrong"]]
        rows.append(row)
    return title, header, rows


def tables_of(chain: Chain, values: dict[str, dict]) -> list[tuple]:
    """The tables of table.md."""
    share = f"PPO has {shown(values['PPO']['share_of_near_perfect'])} of the truth of near_perfect"
    metrics = ["rougeL", "truth", "win_rate", "win_rate_low", "win_rate_high", "words", "tokens", "eos_rate"]
    tables = [value_table(f"{len(chain.posts)} posts of validation; {share}", values, list(chain.texts), metrics)]
    title = "True score above SFT, with its 95 % interval"
    tables.append(value_table(title, values, ["PPO-SFT", "DPO-SFT"], list(values["PPO-SFT"])))
    notes = []
    for split, pairs in chain.pairs.items():
        ties = truly_better(pairs).count(0.5)
        notes.append(f"{len(pairs)} pairs of {split} ({ties} of equal truth left out of clean)")
    title = f"Accuracy on {'; '.join(notes)}"
    tables.append(value_table(title, values, ["reward", "dpo_implicit"], list(values["reward"])))
    return [*tables, kinds_table(chain, values)]


def print_tables(tables: list[tuple]):
    for title, header, rows in tables:
        table = Table(*header, title=title, title_justify="left")
        for row in rows:
            table.add_row(*(shown(value) for value in row))
        Console(width=140).print(table)


def samples_text(args: Args, chain: Chain) -> str:
    """samples.md: ten evenly spaced posts, or all where there are fewer."""
    names = ("reference", *POLICIES)
    truths = {name: true_scores(chain, name) for name in names}
    text = f"# Samples of {args.model}, seed {args.seed}\n"
    count = min(10, len(chain.posts))
    for n in range(count):
        i = n * len(chain.posts) // count
        post = chain.posts[i]
        rows = [[name, chain.texts[name][i], truths[name][i]] for name in names]
        quoted = post["post"].replace("\n", "\n> ")
        text += f"\n## {post['id']}\n\n> {quoted}\n\n{markdown_table(['', 'summary', 'true score'], rows)}"
    return text


# ---- figures --------------------------------------------------------------------------------------------------------


def draw_curves(curves: dict[str, list[tuple]]):
    """Every panel's metric against episodes, as it is and as a running mean."""
    figure, axes = plt.subplots(2, 4, figsize=(14, 6))
    for axis, (title, points) in zip(axes.flat, curves.items(), strict=True):
        episodes, heights = zip(*points, strict=True)
        axis.plot(episodes, heights, alpha=0.35, linewidth=0.8)
        axis.plot(episodes, running_mean(heights), color="C0")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("episodes")
    return figure


def finish_figure(figure, path: Path):
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    Image.open(path).quantize(64).save(path)  # a third of the size
    plt.close(figure)
    print(path)


def main(args: Args):
    chain = read_chain(args)
    values = values_of(chain)
    tables = tables_of(chain, values)
    timing = ("Seconds of training", ["stage", "seconds"], [list(row.values()) for row in chain.seconds])
    print_tables([*tables, timing])

    # ---- write: table.csv last, so that a report that has it is whole -----------------------------------------------
    output_dir = Path(args.output_dir or Path(args.runs, "report", args.model, str(args.seed)))
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / "table.csv").unlink(missing_ok=True)
    parts = [f"{title}:\n\n{markdown_table(header, rows)}" for title, header, rows in tables]
    (output_dir / "table.md").write_text("\n".join(parts), encoding="utf-8")
    (output_dir / "samples.md").write_text(samples_text(args, chain), encoding="utf-8")
    finish_figure(draw_curves(chain.curves), output_dir / "learning_curves.png")
    pandas.DataFrame(chain.seconds).to_csv(output_dir / "times.csv", index=False)
    long = [(row, metric, value) for row, each in values.items() for metric, value in each.items()]
    pandas.DataFrame(long, columns=["row", "metric", "value"]).to_csv(output_dir / "table.tmp", index=False)
    (output_dir / "table.tmp").rename(output_dir / "table.csv")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    main(tyro.cli(Args))
