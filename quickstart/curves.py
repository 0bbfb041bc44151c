"""Learning curves of PPO with the truth beside the reward model's score, from one run of ensembles/ppo.py.

    python quickstart/curves.py runs/quickstart/posts-1/ppo_gold/nano-s/1    # writes the table and the picture
    python quickstart/curves.py                                              # redraws the picture from the table

The reward model's score and the truth, which eval/gold.py wrote to gold.csv, are means over the same validation posts,
every --eval-every updates. The KL is the mean over the responses of each update.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

os.environ["MPLBACKEND"] = "agg"  # the backend that a notebook chooses may not be installed here

import pandas
import tyro
from matplotlib.figure import Figure
from tyro.conf import Positional

sys.path.append(str(Path(__file__).resolve().parents[1] / "eval"))

from eval_helpers import fail, or_fail, read_metrics  # noqa: E402

TRUTH = "quickstart/truth.py:score"  # the --gold of eval/gold.py
PANELS = {"score": "reward model's score", "gold": "truth", "objective/kl": "KL to the SFT model, nats"}


@dataclass
class Args:
    run: Annotated[Path | None, Positional] = None
    """run folder; default: draw what --output has"""
    output: Path = Path(__file__).resolve().parent / "results"
    """folder of learning_curves.csv and learning_curves.png"""


def read_curves(run: Path) -> pandas.DataFrame:
    """Return rows (metric, episode, value) of the metrics that are drawn."""
    metrics = pandas.DataFrame(read_metrics(run)).melt("episode", "objective/kl", var_name="metric")
    with or_fail(f"{run}/gold.csv, which eval/gold.py writes, cannot be read"):
        gold = pandas.read_csv(run / "gold.csv")
    judges = set(gold.get("judge", ["unknown"]))  # older files do not say who made them
    if not all(judge.endswith(TRUTH) for judge in judges):
        fail(f"{run}/gold.csv is of {', '.join(judges)}, not of the truth: python eval/gold.py {run} --gold {TRUTH}")
    gold["episode"] = gold["update"] * metrics["episode"][0]
    curves = pandas.concat([gold.melt("episode", ["score", "gold"], var_name="metric"), metrics])
    return curves[["metric", "episode", "value"]]


def draw(curves: pandas.DataFrame, path: Path):
    """Draw one panel per metric over the episodes."""
    figure = Figure(figsize=(10.5, 3), layout="constrained")
    for i, (axis, (metric, title)) in enumerate(zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True)):
        own = curves[curves["metric"] == metric]
        axis.plot(own["episode"], own["value"], color=f"C{i}", marker="o", markersize=3)
        axis.set(title=title, xlabel="episodes")
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=90)


def main(args: Args):
    table = args.output / "learning_curves.csv"
    if args.run:
        read_curves(args.run).to_csv(table, index=False, float_format="%.6g")
    draw(pandas.read_csv(table), args.output / "learning_curves.png")
    print(table.with_suffix(".png"))


if __name__ == "__main__":
    main(tyro.cli(Args))
