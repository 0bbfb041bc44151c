"""Tabulate accuracy and score gap per grade of reward models with no, small and large margins (Llama 2, table 28).

    python llama2/margins.py --runs runs/llama2_margins       # the runs of llama2/margins.sh

This reads RUNS/{noisy,true}/{none,small,large}/{seed}/eval/accuracy.csv, which llama2/reward.py wrote, and writes
OUTPUT_DIR/margins.csv (mean and sample standard deviation over seeds), margins.md and margins.png.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import pandas
import tyro
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "eval"))

from eval_helpers import fail, markdown  # noqa: E402

GRADES = ("significantly", "better", "slightly", "negligibly", "all")
COLORS = {"none": "#777777", "small": "#1f77b4", "large": "#d62728"}
LABELS = {"noisy": "a quarter of the training labels wrong", "true": "all training labels right"}
ORDER = {"labels": list(LABELS), "margin": list(COLORS), "grade": list(GRADES)}


@dataclass
class Args:
    runs: str = "runs/llama2_margins"
    """folder of the runs"""
    output_dir: str = "llama2/results"
    """folder of the tables and the figure"""


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
    groups = frame.groupby(list(ORDER), observed=True)
    table = groups.agg(runs=("pairs", "size"), pairs=("pairs", "first"))
    for key in ("accuracy", "gap"):
        table[key] = groups[key].mean()
        table[f"{key}_sd"] = groups[key].std()
    return table.reset_index()


def margin_text(table: pandas.DataFrame) -> str:
    """Return Markdown tables of mean ± sd per labels, of accuracy and gap: a row per margin, a column per grade."""
    text = ""
    for labels, own in table.groupby("labels", observed=True):
        for key, what in (("accuracy", "accuracy"), ("gap", "score gap")):
            rows = []
            for margin, group in own.groupby("margin", observed=True):
                row = {"margin": f"{margin} ({group['runs'].iloc[0]} seeds)"}
                for cell in group.to_dict("records"):
                    row[f"{cell['grade']} ({cell['pairs']})"] = f"{cell[key]:.3f} ± {cell[f'{key}_sd']:.3f}"
                rows.append(row)
            text += f"{what}, {LABELS[labels]}\n\n{markdown(rows)}\n"
    return text


def draw_margins(table: pandas.DataFrame, path: Path):
    """Draw accuracy (above) and score gap (below) by grade: error bars per margin, a column of axes per labels."""
    columns = [labels for labels in LABELS if labels in set(table["labels"])]
    figure = Figure(figsize=(1.5 + 4.3 * len(columns), 6.5), layout="constrained")
    axes = figure.subplots(2, len(columns), squeeze=False, sharex=True, sharey="row")
    for column, labels in enumerate(columns):
        for axis, key in zip(axes[:, column], ("accuracy", "gap"), strict=True):
            for shift, (margin, color) in enumerate(COLORS.items()):
                own = table[(table["labels"] == labels) & (table["margin"] == margin)]
                place = own["grade"].cat.codes + 0.12 * (shift - 1)
                style = {"marker": "o", "capsize": 3, "linestyle": "", "color": color, "label": margin}
                axis.errorbar(place, own[key], own[f"{key}_sd"], **style)
            axis.set_xticks(range(len(GRADES)), GRADES)
            axis.set_ylabel({"accuracy": "accuracy", "gap": "chosen − rejected reward"}[key])
            axis.grid(alpha=0.3)
        axes[0][column].set_title(LABELS[labels], fontsize=10)
    axes[0][0].legend(title="margin")
    figure.suptitle("Llama 2's margins: mean ± sd over seeds,\nvalidation pairs with the truth's labels")
    figure.savefig(path, dpi=120)


def main(args: Args):
    table = margin_table(Path(args.runs))
    output = Path(args.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    table.round(4).to_csv(output / "margins.csv", index=False)
    text = margin_text(table)
    (output / "margins.md").write_text(text, encoding="utf-8")
    draw_margins(table, output / "margins.png")
    print(text)


if __name__ == "__main__":
    main(tyro.cli(Args))
