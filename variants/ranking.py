"""The variants over several seeds: mean and standard deviation of each, and differences to PPO paired by seed.

    bash variants/quickstart.sh --seeds 1 2 3 4 5 6 7 8       # makes the runs and calls it
    python variants/ranking.py --output variants/results      # the same from the rows that are there

Each seed has its own SFT and reward model. Reads {tables}/{seed}/variants.csv (compare.py) and writes to --output:
seeds.csv, one row per policy and seed, in which rows of other seeds are kept, and truth_over_kl.png. Differences have
95 % t intervals over seeds; p is that of the paired t test, with Holm's correction over the compared policies. Seconds
are in seeds.csv, but not in the table, because they only mean something if nothing else ran.
"""

from dataclasses import dataclass
from math import sqrt
from pathlib import Path

import pandas
import tyro
from matplotlib.figure import Figure
from scipy.stats import t

NAMES = {"sft": "SFT", "ppo": "PPO", "dpo": "DPO", "rloo": "RLOO", "grpo": "GRPO", "online_dpo": "online DPO"}
NAMES |= {"ppo_function": "PPO with the truth", "simpo": "SimPO"}
COLUMNS = {"truth": 3, "win_rate": 3, "wrong_facts": 2, "words": 1, "kl": 2}  # digits of each
HEADS = ["truth", "win rate", "wrong facts", "words", "KL to SFT"]


@dataclass
class Args:
    output: Path
    """folder of seeds.csv and truth_over_kl.png"""
    tables: Path | None = None
    """folder of {seed}/variants.csv; default: only show what seeds.csv has"""
    seeds: tuple[int, ...] = ()
    """seeds to read"""


def paired(rows: pandas.DataFrame, policy: str, other: str = "ppo") -> dict[str, float]:
    """Return the mean over seeds of a policy's truth less the other's on the same seed, its 95 % t interval and p
    (two-sided)."""
    truth = rows.pivot(index="seed", columns="policy", values="truth")
    differences = (truth[policy] - truth[other]).dropna()
    n, mean, error = len(differences), differences.mean(), differences.std() / sqrt(len(differences))
    half = t.ppf(0.975, n - 1) * error
    return {"difference": mean, "low": mean - half, "high": mean + half, "p": 2 * t.sf(abs(mean) / error, n - 1)}


def holm(p: dict[str, float]) -> dict[str, float]:
    """Return Holm's corrected p values: the i-th smallest of m times m - i (i from 0), and never below one before
    it."""
    corrected, last = {}, 0.0
    for i, (name, value) in enumerate(sorted(p.items(), key=lambda item: item[1])):
        last = corrected[name] = max(last, min(1.0, value * (len(p) - i)))
    return corrected


def draw(rows: pandas.DataFrame, path: Path):
    """Draw truth over KL: a point a seed, and a larger one for the median of each policy. The axis ends a little below
    SFT; a seed below that is a triangle at its end, with its truth."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axis = figure.subplots()
    sft = rows[rows["policy"] == "sft"]["truth"].mean()
    floor = sft - 0.03
    for i, (policy, own) in enumerate((name, rows[rows["policy"] == name]) for name in NAMES if name != "sft"):
        axis.scatter(own["kl"], own["truth"], s=14, alpha=0.45, color=f"C{i}")
        axis.scatter(
            own["kl"].median(), own["truth"].median(), s=110, color=f"C{i}", edgecolor="black", label=NAMES[policy]
        )
        for _, row in own[own["truth"] < floor].iterrows():
            axis.scatter(row["kl"], floor, s=40, marker="v", color=f"C{i}", clip_on=False)
            axis.annotate(f"{row['truth']:.2f}", (row["kl"], floor), (8, 4), textcoords="offset points", color=f"C{i}")
    axis.axhline(sft, color="grey", linewidth=0.8, label="SFT")
    axis.set(xlabel="KL to SFT, nats a response", ylabel="truth, mean over 500 posts")
    axis.set_ylim(bottom=floor)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=90)


def write_rows(path: Path, rows: pandas.DataFrame):
    """Put rows (policy, seed, ...) into a table, in place of those that it has of the same seeds."""
    if path.exists():
        kept = pandas.read_csv(path)
        rows = pandas.concat([kept[~kept["seed"].isin(rows["seed"])], rows])
    rows.sort_values("seed", kind="stable").to_csv(path, index=False, float_format="%.6g")


def table(rows: pandas.DataFrame) -> list[str]:
    """Return Markdown lines: two of head, then one for each policy with mean ± standard deviation over seeds, and the
    difference of its truth to PPO's."""
    policies = [name for name in NAMES if name in set(rows["policy"])]
    compared = {name: paired(rows, name) for name in policies if name not in ("sft", "ppo")}
    corrected = holm({name: found["p"] for name, found in compared.items()})
    lines = ["| | " + " | ".join([*HEADS, "truth less PPO's, 95 %", "p, Holm"]) + " |", "|" + "---|" * 8]
    for name in policies:
        own, difference = rows[rows["policy"] == name], ["", ""]
        if name in compared:
            found = compared[name]
            interval = f"({found['low']:+.3f} to {found['high']:+.3f})"
            difference = [f"{found['difference']:+.3f} {interval}", f"{corrected[name]:.3f}"]
        cells = [f"{own[key].mean():.{digits}f} ± {own[key].std():.{digits}f}" for key, digits in COLUMNS.items()]
        if name == "sft":
            cells[-1] = ""  # its KL to itself
        lines.append(f"| {' | '.join([NAMES[name], *cells, *difference])} |")
    return lines


def main(args: Args):
    args.output.mkdir(parents=True, exist_ok=True)
    if args.tables:
        tables = [pandas.read_csv(args.tables / str(seed) / "variants.csv").assign(seed=seed) for seed in args.seeds]
        write_rows(args.output / "seeds.csv", pandas.concat(tables))
    rows = pandas.read_csv(args.output / "seeds.csv")
    print(f"{rows['seed'].nunique()} seeds, mean ± standard deviation over seeds\n")
    print(*table(rows), sep="\n")
    draw(rows, args.output / "truth_over_kl.png")


if __name__ == "__main__":
    main(tyro.cli(Args))
