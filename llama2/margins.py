"""Accuracy and score gap per grade of reward models trained with no, small and large margins (Llama 2, table 28).

    python llama2/margins.py --runs runs/llama2_margins       # what llama2/margins.sh has trained

RUNS/{noisy,true}/{none,small,large}/{seed}/eval/accuracy.csv are llama2/reward.py's. Writes OUTPUT_DIR/margins.csv (a
row per labels, margin and grade: runs, pairs, mean and standard deviation over seeds of accuracy and gap), margins.md
and margins.png.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import pandas
import tyro
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppo import fail  # noqa: E402

MARGINS = ("none", "small", "large")
GRADES = ("significantly", "better", "slightly", "negligibly", "all")
LABELS = {"noisy": "a quarter of the training labels wrong", "true": "all training labels right"}


@dataclass
class Args:
    runs: str = "runs/llama2_margins"
    """folder of the runs"""
    output_dir: str = "llama2/results"
    """folder of the table and the figure"""


def margin_runs(runs: Path) -> pandas.DataFrame:
    """Validation accuracy and gap of every run: labels, margin, seed, grade, pairs, accuracy, gap."""
    rows = []
    for labels in LABELS:
        for margin in MARGINS:
            for file in sorted(runs.glob(f"{labels}/{margin}/*/eval/accuracy.csv")):
                table = pandas.read_csv(file)
                table = table[(table["data"] == "validation") & table["group"].isin(["overall", "grade"])]
                for row in table.to_dict("records"):
                    found = {"labels": labels, "margin": margin, "seed": file.parts[-3], "grade": row["value"]}
                    rows.append(found | {key: row[key] for key in ("pairs", "accuracy", "gap")})
    if not rows:
        fail(f"no run in {runs}/noisy/none and its like: bash llama2/margins.sh trains them")
    return pandas.DataFrame(rows)


def over_seeds(frame: pandas.DataFrame) -> pandas.DataFrame:
    """A row per labels, margin and grade: runs, pairs, and mean and standard deviation (n - 1) over seeds."""
    rows = []
    for (labels, margin, grade), group in frame.groupby(["labels", "margin", "grade"]):
        row = {"labels": labels, "margin": margin, "grade": grade, "runs": len(group), "pairs": group["pairs"].iloc[0]}
        for key in ("accuracy", "gap"):
            row |= {key: group[key].mean(), f"{key}_sd": group[key].std()}
        rows.append(row)
    keys = {"labels": list(LABELS), "margin": MARGINS, "grade": GRADES}
    order = [[list(keys[column]).index(row[column]) for column in keys] for row in rows]
    return pandas.DataFrame([row for _, row in sorted(zip(order, rows, strict=True), key=lambda pair: pair[0])])


def margin_tables(table: pandas.DataFrame) -> str:
    """One Markdown table per labels: a row per margin, a column per grade, mean ± sd of accuracy, then of the gap."""
    text = ""
    for labels, title in LABELS.items():
        own = table[table["labels"] == labels]
        for key, what in (("accuracy", "accuracy"), ("gap", "score gap")):
            if own.empty:
                continue
            columns = [grade for grade in GRADES if grade in set(own["grade"])]
            pairs = own.drop_duplicates("grade").set_index("grade")["pairs"]
            text += f"{what}, {title}\n\n| margin | {' | '.join(f'{g} ({pairs[g]})' for g in columns)} |\n"
            text += "|---" * (len(columns) + 1) + "|\n"
            for margin, group in own.groupby("margin", sort=False):
                group = group.set_index("grade")
                cells = [f"{group[key][g]:.3f} ± {group[f'{key}_sd'][g]:.3f}" for g in columns]
                text += f"| {margin} ({group['runs'].iloc[0]} seeds) | {' | '.join(cells)} |\n"
            text += "\n"
    return text


def draw_margins(table: pandas.DataFrame, path: Path):
    """Accuracy (above) and score gap (below) by grade, a line with error bars per margin, a column per labels."""
    there = [labels for labels in LABELS if labels in set(table["labels"])]
    figure = Figure(figsize=(1.5 + 4.3 * len(there), 6.5), layout="constrained")
    axes = figure.subplots(2, len(there), squeeze=False, sharex=True, sharey="row")
    for column, labels in enumerate(there):
        for row, key in enumerate(("accuracy", "gap")):
            axis = axes[row][column]
            for shift, (margin, color) in enumerate(zip(MARGINS, ("#777777", "#1f77b4", "#d62728"), strict=True)):
                own = table[(table["labels"] == labels) & (table["margin"] == margin)].set_index("grade")
                found = [grade for grade in GRADES if grade in own.index]
                place = [GRADES.index(grade) + 0.12 * (shift - 1) for grade in found]
                values = [own[key][grade] for grade in found]
                error = [own[f"{key}_sd"][grade] for grade in found]
                axis.errorbar(place, values, error, marker="o", capsize=3, linestyle="", color=color, label=margin)
            axis.set_xticks(range(len(GRADES)), GRADES)
            axis.set_ylabel({"accuracy": "accuracy", "gap": "chosen − rejected reward"}[key])
            axis.grid(alpha=0.3)
        axes[0][column].set_title(LABELS[labels], fontsize=10)
    axes[0][0].legend(title="margin")
    figure.suptitle("Llama 2's margins: mean ± sd over seeds,\nvalidation pairs with the truth's labels")
    figure.savefig(path, dpi=120)


def main(args: Args):
    table, output = over_seeds(margin_runs(Path(args.runs))), Path(args.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    table.round(4).to_csv(output / "margins.csv", index=False)
    text = margin_tables(table)
    (output / "margins.md").write_text(text, encoding="utf-8")
    draw_margins(table, output / "margins.png")
    print(text)


if __name__ == "__main__":
    main(tyro.cli(Args))
