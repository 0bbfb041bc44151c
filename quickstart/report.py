"""Report on one chain of the quickstart: SFT, PPO and DPO judged by the truth, and how well the reward model knows it.

    python quickstart/report.py --raw data/quickstart/raw --preference-dataset data/quickstart/tldr/preference \
        --runs runs --model nano-s --seed 1

reads the run folders {runs}/{sft,reward,ppo,dpo}/{model}/{seed}, made with --run-eval and eval/samples.py, and writes
    table.csv              row, metric, value: every number of the report, not rounded
    table.md               the same as tables
    times.csv              seconds of training of each stage; no other file depends on the clock
    samples.md             ten posts with the summary of each policy and its true score
    learning_curves.png    PPO against episodes (figure 10 of the paper), SFT, reward model and DPO

The judge is the truth of `truth.py`, which no training stage has seen. Intervals are bootstrap intervals over posts.
The same runs give the same table.csv, to the last digit.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy
import pandas
import tyro
from datasets import load_from_disk
from matplotlib.figure import Figure
from rouge_score.rouge_scorer import RougeScorer
from scipy import stats
from truth import FACTS, find_facts, judge, score

sys.path.append(str(Path(__file__).resolve().parents[1] / "eval"))

from eval_helpers import fail, markdown, or_fail  # noqa: E402
from run_metrics import read_metrics  # noqa: E402

STAGES = {"SFT": "sft", "reward": "reward", "PPO": "ppo", "DPO": "dpo"}
POLICIES = ("SFT", "PPO", "DPO")
YARDSTICKS = ("near_perfect", "copied_title")  # a good and a lazy policy that need no training
EOS = "<|endoftext|>"  # ends the summaries of the preference data set
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
    """Return these columns of the rows of a .jsonl or .csv file; of a .csv file, every value is text."""
    with or_fail(f"{path} cannot be read; is it cut off, or of another version?"):
        if path.suffix == ".jsonl":
            return pandas.read_json(path, lines=True, dtype=False)[columns].to_dict("records")
        return pandas.read_csv(path, dtype=str, keep_default_na=False)[columns].to_dict("records")


def bootstrap_interval(values: list[float], resamples: int) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the mean of values (n,). Every call draws the same positions."""
    if len(values) == 1:  # scipy wants two
        return values[0], values[0]
    draws = {"n_resamples": resamples, "method": "percentile", "rng": numpy.random.default_rng(1)}
    low, high = stats.bootstrap((values,), numpy.mean, **draws).confidence_interval
    return float(low), float(high)


def agreement(gaps: list[float], better: list[float]) -> float:
    """Return the share of the reward gaps (n,) that are above 0 where `better` (n,) is 1, and below 0 where it is 0. A
    gap of 0 agrees with neither, and pairs whose `better` is 0.5 are left out."""
    hits = [gap > 0 if side == 1 else gap < 0 for gap, side in zip(gaps, better, strict=True) if side != 0.5]
    return fmean(hits) if hits else float("nan")


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_policies(args: Args, folders: dict[str, Path]) -> tuple[list[dict], dict, dict]:
    """Return the posts that were sampled, {policy: rows of its samples_validation.csv} and {policy, yardstick or
    reference: summaries}, all in the order of the posts."""
    rows = read_rows(Path(args.raw, "posts", "validation.jsonl"), ["id", "post", "summary"])
    all_posts = {row["id"]: row for row in rows}
    rows = read_rows(Path(args.raw, "yardsticks", "validation.jsonl"), ["id", *YARDSTICKS])
    yardsticks = {row["id"]: row for row in rows}
    samples = {}
    for name in POLICIES:
        path = folders[name] / "eval" / "samples_validation.csv"
        samples[name] = read_rows(path, ["id", "response", "reference", "response_tokens", "has_eos", "rougeL"])
        ids = [row["id"] for row in samples["SFT"]]
        if [row["id"] for row in samples[name]] != ids:
            fail(f"{path} has other posts than the samples of SFT; run both stages on one --dataset")
        for row in samples[name]:
            known = row["id"] in all_posts and row["id"] in yardsticks
            if not known or row["reference"].strip() != all_posts[row["id"]]["summary"].strip():
                fail(f"{path}: {row['id']} with that reference is no post of {args.raw}; run the stages on its posts")
    posts = [all_posts[i] for i in ids]
    texts = {name: [row["response"] for row in rows] for name, rows in samples.items()}
    texts |= {name: [yardsticks[i][name] for i in ids] for name in YARDSTICKS}
    texts["reference"] = [post["summary"] for post in posts]
    return posts, samples, texts


def read_accuracies(args: Args, folders: dict[str, Path]) -> tuple[dict[str, dict], str]:
    """Return the agreement of the rewards of the reward model and of DPO with the labels as given (noisy) and with the
    truth (clean), by split, and a description of the splits."""
    found, notes = {"reward": {}, "dpo_implicit": {}}, []
    with or_fail(f"--preference-dataset {args.preference_dataset} cannot be read"):
        data = load_from_disk(args.preference_dataset)
    for split in ("validation", "validation_cnndm"):
        pairs = data[split].select_columns(["query", "chosen", "rejected"]).to_list()
        # 1 where the truth prefers the chosen response, 0 where the rejected one, 0.5 where neither
        better = [judge(p["query"], p["chosen"].removesuffix(EOS), p["rejected"].removesuffix(EOS)) for p in pairs]
        notes.append(f"{len(pairs)} pairs of {split} ({better.count(0.5)} of equal truth left out of clean)")
        for name, stage in (("reward", "reward"), ("dpo_implicit", "DPO")):
            path = folders[stage] / "eval" / f"pairs_{split}.csv"
            rows = read_rows(path, ["chosen_reward", "rejected_reward"])
            if len(rows) != len(pairs):
                fail(f"{path} has {len(rows)} rows, {args.preference_dataset} has {len(pairs)} pairs of {split}")
            gaps = [float(row["chosen_reward"]) - float(row["rejected_reward"]) for row in rows]
            suffix = split.removeprefix("validation")
            found[name][f"accuracy_noisy{suffix}"] = agreement(gaps, [1] * len(pairs))
            found[name][f"accuracy_clean{suffix}"] = agreement(gaps, better)
    return found, "; ".join(notes)


# ---- numbers ---------------------------------------------------------------------------------------------------------


def policy_values(posts: list[dict], summaries: list[str], samples: list[dict] | None) -> dict[str, float]:
    """Return means over the posts for the summaries of a policy, of a yardstick or of the reference. `samples` are a
    policy's rows; ROUGE-L is taken from them or computed here."""
    wins = [judge(post["post"], summary, post["summary"]) for post, summary in zip(posts, summaries, strict=True)]
    low, high = bootstrap_interval(wins, 2_000)
    if samples:
        rouge = [float(row["rougeL"]) for row in samples]
    else:
        scorer, both = RougeScorer(["rougeL"]), zip(posts, summaries, strict=True)
        rouge = [scorer.score(post["summary"], summary)["rougeL"].fmeasure for post, summary in both]
    found = {"rougeL": fmean(rouge), "truth": fmean(true_scores(posts, summaries))}
    found |= {"win_rate": fmean(wins), "win_rate_low": low, "win_rate_high": high}
    found["words"] = fmean(len(re.findall(r"\w+", summary)) for summary in summaries)  # as the truth counts
    if samples:
        found["tokens"] = fmean(int(row["response_tokens"]) for row in samples)
        found["eos_rate"] = fmean(row["has_eos"] == "True" for row in samples)
    return found


def true_scores(posts: list[dict], summaries: list[str]) -> list[float]:
    """Return the true score of each post's summary."""
    return [score(post["post"], summary) for post, summary in zip(posts, summaries, strict=True)]


def truth_difference(posts: list[dict], summaries: list[str], sft: list[str]) -> dict[str, float]:
    """Return the mean of a policy's true scores above SFT's, paired by post, with its interval."""
    gains = numpy.subtract(true_scores(posts, summaries), true_scores(posts, sft)).tolist()
    low, high = bootstrap_interval(gains, 10_000)
    return {"truth_difference": fmean(gains), "truth_difference_low": low, "truth_difference_high": high}


def fact_shares(posts: list[dict], summaries: list[str]) -> dict[str, float]:
    """Return, for each kind of fact, the share of the posts with such a fact whose summary states it (absent if no post
    has one), and the share of all posts whose summary states another."""
    held = [find_facts(post["post"]) for post in posts]
    both = list(zip([find_facts(text) for text in summaries], held, strict=True))
    found = {}
    for kind in FACTS:
        right = [bool(ours[kind] & facts[kind]) for ours, facts in both if facts[kind]]
        if right:
            found[f"{kind}_right"] = fmean(right)
        found[f"{kind}_wrong"] = fmean(bool(ours[kind] - facts[kind]) for ours, facts in both)
    return found


# ---- tables and figures ----------------------------------------------------------------------------------------------


def value_table(title: str, values: dict[str, dict], names: list[str], metrics: list[str]) -> str:
    """Return a table of these rows as Markdown."""
    rows = [{"": name} | {metric: values[name].get(metric, "") for metric in metrics} for name in names]
    return f"{title}:\n\n{markdown(rows)}"


def samples_text(title: str, posts: list[dict], texts: dict[str, list[str]]) -> str:
    """Return samples.md: ten evenly spaced posts, or all if there are fewer, with their summaries and true scores."""
    text, count = f"# {title}\n", min(10, len(posts))
    for n in range(count):
        i = n * len(posts) // count
        quoted = posts[i]["post"].replace("\n", "\n> ")
        rows = []
        for name in ("reference", *POLICIES):
            one_line = " ".join(texts[name][i].split()).replace("|", "\\|")  # a cell of the table
            rows.append({"": name, "summary": one_line, "true score": score(posts[i]["post"], texts[name][i])})
        text += f"\n## {posts[i]['id']}\n\n> {quoted}\n\n{markdown(rows)}"
    return text


def draw_curves(metrics: dict[str, list[dict]]) -> Figure:
    """Return a figure of every panel's metric against episodes, and its running mean over a 20th of the curve."""
    figure = Figure(figsize=(14, 6), layout="tight")
    for axis, (name, key, title) in zip(figure.subplots(2, 4).flat, PANELS, strict=True):
        points = pandas.Series({row["episode"]: row[key] for row in metrics[name] if key in row})
        if points.empty:
            fail(f"the metrics.jsonl of {name} has no {key}")
        axis.plot(points, alpha=0.35, linewidth=0.8)
        axis.plot(points.rolling(max(1, len(points) // 20), min_periods=1).mean(), color="C0")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("episodes")
    return figure


def main(args: Args):
    # ---- numbers --------------------------------------------------------------------------------
    folders = {name: Path(args.runs, stage, args.model, str(args.seed)) for name, stage in STAGES.items()}
    posts, samples, texts = read_policies(args, folders)
    accuracies, splits = read_accuracies(args, folders)
    metrics = {name: read_metrics(folder) for name, folder in folders.items()}
    values = {name: policy_values(posts, summaries, samples.get(name)) for name, summaries in texts.items()}
    values["PPO"]["share_of_near_perfect"] = values["PPO"]["truth"] / values["near_perfect"]["truth"]
    for name in ("PPO", "DPO"):
        values[f"{name}-SFT"] = truth_difference(posts, texts[name], texts["SFT"])
    for name in POLICIES:
        values[name] |= fact_shares(posts, texts[name])
    values |= accuracies

    # ---- tables ---------------------------------------------------------------------------------
    share = f"PPO has {values['PPO']['share_of_near_perfect']:.3f} of the truth of near_perfect"
    shown_metrics = ["rougeL", "truth", "win_rate", "win_rate_low", "win_rate_high", "words", "tokens", "eos_rate"]
    kinds = [f"{kind}_{x}" for kind in FACTS for x in ("right", "wrong")]
    title = "True score above SFT, with its 95 % interval"
    tables = [
        value_table(f"{len(posts)} posts of validation; {share}", values, list(texts), shown_metrics),
        value_table(title, values, ["PPO-SFT", "DPO-SFT"], list(values["PPO-SFT"])),
        value_table(f"Accuracy on {splits}", values, ["reward", "dpo_implicit"], list(values["reward"])),
        value_table("Shares of right and wrong facts, by kind", values, list(POLICIES), kinds),
    ]
    times = [rows[-1].get("time/total") for rows in metrics.values()]
    seconds = pandas.DataFrame({"stage": list(STAGES.values()), "seconds": times})
    print("\n".join(tables), seconds.to_string(index=False), sep="\n")

    # ---- files: table.csv last, so that a report that has it is complete ------------------------
    output_dir = Path(args.output_dir or Path(args.runs, "report", args.model, str(args.seed)))
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / "table.csv").unlink(missing_ok=True)
    (output_dir / "table.md").write_text("\n".join(tables), encoding="utf-8")
    text = samples_text(f"Samples of {args.model}, seed {args.seed}", posts, texts)
    (output_dir / "samples.md").write_text(text, encoding="utf-8")
    draw_curves(metrics).savefig(output_dir / "learning_curves.png", dpi=80)
    seconds.to_csv(output_dir / "times.csv", index=False)
    long = [(row, metric, value) for row, each in values.items() for metric, value in each.items()]
    pandas.DataFrame(long, columns=["row", "metric", "value"]).to_csv(output_dir / "table.csv", index=False)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    main(tyro.cli(Args))
