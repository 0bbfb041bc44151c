"""Tabulate accuracy and score gap per grade of reward models with no, small and large margins (Llama 2, table 28).

    python llama2/margins.py --runs runs/llama2_margins       # the runs of llama2/margins.sh

This reads RUNS/{noisy,true}/{none,small,large}/{seed}/eval/accuracy.csv, which llama2/reward.py wrote, and writes
OUTPUT_DIR/margins.csv (mean and sample standard deviation over seeds) and margins.png.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

os.environ["MPLBACKEND"] = "agg"  # the backend that a notebook chooses may not be installed here

import pandas
import tyro
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "eval"))

from eval_helpers import fail  # noqa: E402

GRADES = ["significantly", "better", "slightly", "negligibly", "all"]
COLORS = {"none": "#777777", "small": "#1f77b4", "large": "#d62728"}
LABELS = {"noisy": "a quarter of the training labels wrong", "true": "all training labels right"}
YLABELS = {"accuracy": "accuracy", "gap": "chosen − rejected reward"}
ORDER = {"labels": list(LABELS), "margin": list(COLORS), "grade": GRADES}


@dataclass
class Args:
    runs: str = "runs/llama2_margins"
    """folder of the runs"""
    output_dir: str = "llama2/results"
    """folder of the table and the figure"""


def margin_table(runs: Path) -> pandas.DataFrame:
    """Return a row per labels, margin and grade: runs, pairs, and mean and standard deviation (n - 1) over seeds of
    validation accuracy and gap."""
    tables = []
    for file in sorted(runs.glob("*/*/*/eval/accuracy.csv")):
        table = pandas.read_csv(file).rename(columns={"value": "grade"})
        table = table[(table["data"] == "validation") & table["group"].isin(["overall", "grade"])]
        labels, margin = file.parts[-5:-3]
        tables.append(table.assign(labels=labels, margin=margin))
    if not tables:
        fail(f"no run in {runs}/noisy/none and its like: bash llama2/margins.sh trains them")
    frame = pandas.concat(tables)
    for column, order in ORDER.items():
        frame[column] = pandas.Categorical(frame[column], order)
    columns = {"runs": ("pairs", "size"), "pairs": ("pairs", "first")}
    for key in ("accuracy", "gap"):
        columns |= {key: (key, "mean"), f"{key}_sd": (key, "std")}
    return frame.groupby(list(ORDER), observed=True).agg(**columns).reset_index()


def draw_margins(table: pandas.DataFrame, path: Path):
    """Draw accuracy (above) and score gap (below) by grade: error bars per margin, a column of axes per labels."""
    figure = Figure(figsize=(10.1, 6.5), layout="constrained")
    axes = figure.subplots(2, len(LABELS), sharex=True, sharey="row")
    panels = [(key, labels) for key in YLABELS for labels in LABELS]
    for axis, (key, labels) in zip(axes.flat, panels, strict=True):
        for shift, (margin, color) in enumerate(COLORS.items()):
            own = table[(table["labels"] == labels) & (table["margin"] == margin)]
            place = own["grade"].cat.codes + 0.12 * (shift - 1)
            axis.errorbar(place, own[key], own[f"{key}_sd"], fmt="o", capsize=3, color=color, label=margin)
        axis.set_xticks(range(len(GRADES)), GRADES)
        axis.set_ylabel(YLABELS[key])
        axis.grid(alpha=0.3)
    for axis, title in zip(axes[0], LABELS.values(), strict=True):
        axis.set_title(title, fontsize=10)
    axes[0, 0].legend(title="margin")
    figure.suptitle("Llama 2's margins: mean ± sd over seeds,\nvalidation pairs with the truth's labels")
    figure.savefig(path, dpi=120)


def main(args: Args):
    table = margin_table(Path(args.runs))
    output = Path(args.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    table.round(4).to_csv(output / "margins.csv", index=False)
    draw_margins(table, output / "margins.png")
    print(table.round(3).to_string(index=False))


if __name__ == "__main__":
    main(tyro.cli(Args))
