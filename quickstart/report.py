"""Report on one chain of the quick start: SFT, PPO and DPO, measured by metric.py on posts that no stage has seen.

    python quickstart/report.py --runs runs/quickstart/posts-1 --model nano-s --seed 1

reads the run folders {runs}/{sft,reward,ppo,dpo}/{model}/{seed} and writes
    table.csv              row, metric, value: every number of the report, not rounded
    table.md               the same as a table
    samples.md             ten posts with the summary of each policy and its true score
    learning_curves.png    PPO against episodes (figure 10 of the paper), SFT, reward model and DPO

Beside the policies stand three summaries that need no model: the reference, a nearly perfect one, and the title. The
intervals are bootstrap intervals over the posts, so they say nothing about other seeds.
The same runs give the same table.csv, to the last digit.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

os.environ["MPLBACKEND"] = "agg"  # the backend that a notebook chooses may not be installed here

import metric
import numpy
import pandas
import tyro
from matplotlib.figure import Figure
from scipy import stats
from truth import score

sys.path.append(str(Path(__file__).resolve().parents[1] / "eval"))

from eval_helpers import fail, markdown, read_metrics  # noqa: E402

STAGES = {"SFT": "sft", "reward": "reward", "PPO": "ppo", "DPO": "dpo"}
YARDSTICKS = {"reference": "summary", "nearly perfect": "near_perfect", "title": "copied_title"}
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
    runs: str = "runs"
    """folder of the run folders {stage}/{model}/{seed}"""
    model: str = "nano-s"
    """the {model} of the run folders"""
    seed: int = 1
    """the {seed} of the run folders"""
    posts: int = 500
    """number of posts that the policies are measured on"""
    output_dir: str = "{runs}/report/{model}/{seed}"
    """folder to write; files of an earlier report are replaced"""


def bootstrap_interval(values: list[float], resamples: int) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the mean of values (n,). Every call draws the same positions."""
    if len(values) == 1:  # scipy wants two
        return values[0], values[0]
    draws = {"n_resamples": resamples, "method": "percentile", "rng": numpy.random.default_rng(1)}
    low, high = stats.bootstrap((values,), numpy.mean, **draws).confidence_interval
    return float(low), float(high)


def samples_text(title: str, posts: list[dict], summaries: dict[str, list[str]]) -> str:
    """Return samples.md: ten evenly spaced posts, or all if there are fewer, with their summaries and true scores."""
    text, count = f"# {title}\n", min(10, len(posts))
    for n in range(count):
        i = n * len(posts) // count
        quoted = posts[i]["post"].replace("\n", "\n> ")
        rows = []
        for name in summaries:
            one_line = " ".join(summaries[name][i].split()).replace("|", "\\|")  # a cell of the table
            rows.append({"": name, "summary": one_line, "truth": score(posts[i]["post"], summaries[name][i])})
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
    metrics = {name: read_metrics(folder) for name, folder in folders.items()}
    values, summaries = {}, {}
    for name in ("SFT", "PPO", "DPO"):
        print(f"measuring {name} on {args.posts} posts", flush=True)
        run = metric.Args(str(folders[name]), str(folders["SFT"]), str(folders["reward"]), args.posts)
        values[name], posts, summaries[name] = metric.measure(run)
    for name, column in YARDSTICKS.items():
        values[name] = metric.text_numbers(posts, [row[column] for row in posts])
    truths = {
        name: [score(row["post"], text) for row, text in zip(posts, summaries[name], strict=True)] for name in summaries
    }
    gains = []
    for name in ("PPO", "DPO"):
        differences = numpy.subtract(truths[name], truths["SFT"]).tolist()
        low, high = bootstrap_interval(differences, 10_000)
        values[name] |= {"above_sft": fmean(differences), "above_sft_low": low, "above_sft_high": high}
        gains.append(f"{name}'s truth is {fmean(differences):+.3f} above SFT's ({low:+.3f} to {high:+.3f})")

    # ---- files: table.csv last, so that a report that has it is complete ------------------------
    shown = [{"": name} | {key: values[name].get(key, "") for key in list(values["SFT"])} for name in values]
    text = f"{args.model}, one training seed ({args.seed}), {args.posts} new posts:\n\n{markdown(shown)}\n"
    text += f"{'; '.join(gains)}. The 95 % intervals cover other posts, not other seeds.\n"
    for name in ("PPO", "DPO"):
        if values[name]["above_sft"] < 0 or values[name].get("eos_rate", 1) < 0.9:
            text += f"\n{name} did not improve on SFT here, or lost EOS. What to look at: docs/kl.md\n"
    print(text)
    output_dir = Path(args.output_dir.format(**vars(args)))
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / "table.csv").unlink(missing_ok=True)
    (output_dir / "table.md").write_text(text, encoding="utf-8")
    samples = {"reference": [row["summary"] for row in posts]} | summaries
    samples = samples_text(f"Samples of {args.model}, seed {args.seed}", posts, samples)
    (output_dir / "samples.md").write_text(samples, encoding="utf-8")
    draw_curves(metrics).savefig(output_dir / "learning_curves.png", dpi=80)
    long = [(row, key, value) for row, each in values.items() for key, value in each.items()]
    pandas.DataFrame(long, columns=["row", "metric", "value"]).to_csv(output_dir / "table.csv", index=False)
    print(f"table, samples of ten posts and learning curves: {output_dir}")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    main(tyro.cli(Args))
