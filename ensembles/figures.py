"""Figures 3, 4, 5 and 10 of "Reward Model Ensembles Help Mitigate Overoptimization", and a table that compares every
method with a single reward model.

    python ensembles/figures.py --runs runs/ensembles/ppo runs/ensembles/best_of_n --output-dir runs/ensembles/figures
    python ensembles/figures.py --runs ensembles/results/runs.jsonl --output-dir /tmp/figures    # the committed study

The script reads every run of ensembles/ppo.py --gold (args.json, metrics.jsonl) and of ensembles/best_of_n.py
(args.json, best_of_n.csv) below --runs. All of them should have one setting: the same data, the same label noise, and
reward models of one size. Two runs of one method, KL penalty and seed are therefore an error. Single reward models are
the exception: a seed may have one run for each member.

A method is `single` (one reward model), `warm` (one that average.py made), `mean`, `wco` or `uwo`. A replicate is a
seed; several runs of one seed count as their mean. Lines are means over the replicates, at the steps that all of them
have. Beside the lines stand the means of the last values with 95 % t intervals over the replicates (n - 1 degrees of
freedom; a single replicate has no interval). Differences to a single reward model are paired by replicate.

OUTPUT_DIR/  figure_3.png    best of n: gold over KL (equation 1)
             figure_4.png    PPO, each method at the KL penalty with the best mean of final gold: gold over updates
             figure_5.png    PPO without a KL penalty: gold over updates
             figure_10.png   PPO: variance within the ensemble of mean and uwo, without and with the smallest KL penalty
             table.md        final and best gold, and their paired differences to a single reward model
             runs.jsonl      the curves that were read; --runs accepts it in place of the folders

The paper draws figures 4 and 5 over KL, and the proxy scores with them. Here they are drawn over updates, because
replicates of one method end at very different KL, and the proxy scores are left out.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

import pandas
import tyro
from matplotlib.figure import Figure
from scipy import stats

sys.path.append(str(Path(__file__).resolve().parents[1] / "eval"))

from eval_helpers import fail, or_fail  # noqa: E402
from run_metrics import read_metrics  # noqa: E402

METHODS = {"single": ("C7", "o"), "mean": ("C1", "s"), "wco": ("C2", "^"), "uwo": ("C0", "D"), "warm": ("C3", "v")}
NAMES = {"single": "single", "mean": "mean", "wco": "WCO", "uwo": "UWO", "warm": "WARM"}


@dataclass
class Args:
    runs: tuple[str, ...] = ("runs/ensembles/ppo", "runs/ensembles/best_of_n")
    """folders with runs, at any depth, or a runs.jsonl of an earlier call"""
    output_dir: str = "runs/ensembles/figures"
    """folder to write"""


class Run(NamedTuple):
    """One curve: a run of PPO, or best of n by one method."""

    procedure: str  # BoN or PPO
    method: str
    kl_coef: float  # 0 of best of n
    seed: int
    folder: str
    step: list[int]  # n, or updates, rising
    kl: list[float]  # nats, one for each step
    gold: list[float]
    variance: list[float]  # within an ensemble, one for each update of PPO from 1 on; empty with one reward model


class Line(NamedTuple):
    """A line of a figure: its points, and mean and interval of the last values over the replicates."""

    method: str
    label: str
    x: list[float]
    y: list[float]
    end: tuple[float, float, float]
    dashed: bool = False


# ---- reading ---------------------------------------------------------------------------------------------------------


def method_of(paths: list[str], combination: str) -> str:
    """The method of a run with these reward models. A single one is `warm` where its args.json says so."""
    if len(paths) > 1:
        return combination
    folder = Path(paths[0])
    file = (folder.parent if folder.name == "model" else folder) / "args.json"
    with or_fail(f"{file} cannot be read"):
        averaged = file.exists() and json.loads(file.read_text()).get("stage") == "average"
    return "warm" if averaged else "single"


def read_ppo(folder: Path, settings: dict) -> Run | None:
    """A run of ppo.py; None where it is not complete."""
    file = folder / "metrics.jsonl"
    if not file.exists():
        return None
    with or_fail(f"{file} cannot be read"):
        lines = read_metrics(folder, may_be_empty=True)
        scored = [line for line in lines if "gold/score" in line]
        if not scored or scored[-1]["update"] < settings["total_episodes"] // settings["batch_size"]:
            return None
        paths = settings["reward_model_paths"]
        variance = [line["objective/reward_model_variance"] for line in lines if line["update"] > 0]
        return Run(
            procedure="PPO",
            method=method_of(paths, settings["reward_combination"]),
            kl_coef=settings["kl_coef"],
            seed=settings["seed"],
            folder=str(folder),
            step=[line["update"] for line in scored],
            kl=[line["gold/kl_k2"] for line in scored],
            gold=[line["gold/score"] for line in scored],
            variance=variance if len(paths) > 1 else [],
        )


def read_best_of_n(folder: Path, settings: dict) -> list[Run]:
    """A curve for each method in a folder of best_of_n.py, of which `single` is the mean over the members."""
    file = folder / "best_of_n.csv"
    with or_fail(f"{file} cannot be read"):
        table = pandas.read_csv(file).sort_values("n")
        runs = []
        for method in (x for x in METHODS if x in set(table["method"])):
            rows = table[table["method"] == method]
            name = method_of(settings["reward_model_paths"], method) if method == "single" else method
            columns = [rows[column].tolist() for column in ("n", "kl", "gold")]
            runs.append(Run("BoN", name, 0.0, settings["seed"], str(folder), *columns, variance=[]))
        return runs


def read_runs(sources: tuple[str, ...]) -> list[Run]:
    """The curves of all complete runs below the folders, or of a runs.jsonl. Incomplete runs are named and left out.
    Two runs of one method, KL penalty and seed are an error."""
    runs = []
    for source in map(Path, sources):
        if source.is_file():
            with or_fail(f"{source} cannot be read"):
                runs += [Run(**json.loads(line)) for line in source.read_text().splitlines()]
            continue
        for file in sorted(source.rglob("args.json")):
            with or_fail(f"{file} cannot be read"):
                settings = json.loads(file.read_text())
            if settings.get("stage") == "ppo" and settings.get("gold"):
                run = read_ppo(file.parent, settings)
                runs += [run] if run else []
                if not run:
                    print(f"left out, because it is not complete: {file.parent}")
            elif (file.parent / "best_of_n.csv").exists():
                runs += read_best_of_n(file.parent, settings)
    runs = [run for run in runs if run.method in METHODS]
    seen = {}
    for run in runs:
        key = run[:4]
        if key in seen and (run.method != "single" or run.procedure == "BoN"):
            what = f"{run.procedure}, {run.method}, KL penalty {run.kl_coef:g}, seed {run.seed}"
            fail(f"two runs of {what}: {seen[key]} and {run.folder}; name folders of one setting in --runs")
        seen[key] = run.folder
    if not runs:
        fail(f"--runs {' '.join(sources)}: no complete run with gold scores there; ensembles/study.py makes some")
    return runs


# ---- means and intervals ---------------------------------------------------------------------------------------------


def final(run: Run) -> float:
    """Its last gold score."""
    return run.gold[-1]


def best(run: Run) -> float:
    """Its largest gold score."""
    return max(run.gold)


def by_seed(runs: list[Run], quantity) -> dict[int, float]:
    """{seed: mean of a quantity over the runs with this seed}"""
    return {seed: mean(quantity(x) for x in runs if x.seed == seed) for seed in sorted({run.seed for run in runs})}


def t_interval(values: list[float]) -> tuple[float, float, float]:
    """Mean and ends of its 95 % t interval; without ends (nan) for one value."""
    middle = mean(values)
    if len(values) == 1:
        return middle, float("nan"), float("nan")
    half = float(stats.t.ppf(0.975, len(values) - 1)) * stdev(values) / len(values) ** 0.5
    return middle, middle - half, middle + half


def differences(mine: list[Run], others: list[Run], quantity) -> list[float]:
    """Paired differences in a quantity, one for each seed that both have."""
    left, right = by_seed(mine, quantity), by_seed(others, quantity)
    return [left[seed] - right[seed] for seed in left if seed in right]


def mean_curve(runs: list[Run], of) -> tuple[list[int], list[float]]:
    """Steps that all runs have, and there the means over the replicates; `of(run)` is {step: value}."""
    curves = {id(run): of(run) for run in runs}
    steps = sorted(set.intersection(*map(set, curves.values())))
    means = [mean(by_seed(runs, lambda run, step=step: curves[id(run)][step]).values()) for step in steps]
    return steps, means


def pick(runs: list[Run], **where) -> list[Run]:
    """The runs with these values."""
    return [run for run in runs if all(getattr(run, key) == value for key, value in where.items())]


# ---- figures ---------------------------------------------------------------------------------------------------------


def gold_by_step(run: Run) -> dict[int, float]:
    """{n or update: gold}"""
    return dict(zip(run.step, run.gold, strict=True))


def variance_by_update(run: Run) -> dict[int, float]:
    """{update: variance within the ensemble}"""
    return dict(enumerate(run.variance, 1))


def line_of(runs: list[Run], of=gold_by_step, label: str = "", dashed: bool = False) -> Line:
    """The line of runs of one method."""
    x, y = mean_curve(runs, of)
    method = runs[0].method
    if runs[0].procedure == "BoN":  # n says the KL
        kl = dict(zip(runs[0].step, runs[0].kl, strict=True))
        x = [kl[n] for n in x]
    end = t_interval(list(by_seed(runs, lambda run: list(of(run).values())[-1]).values()))
    return Line(method, label or NAMES[method], x, y, end, dashed)


def figures(runs: list[Run]) -> dict[str, tuple[str, str, str, list[Line]]]:
    """{file name: (title, label of the x axis, label of the y axis, lines)}; no lines where there are no runs."""
    ppo = pick(runs, procedure="PPO")
    penalties = sorted({run.kl_coef for run in ppo})
    found = {}

    lines = [line_of(mine) for method in METHODS if (mine := pick(runs, procedure="BoN", method=method))]
    found["figure_3"] = "Best of n", "KL, nats", "gold", lines

    lines = []
    for method in METHODS:
        groups = {kl: group for kl in penalties if (group := pick(ppo, method=method, kl_coef=kl))}
        if groups:
            kl = max(groups, key=lambda kl: mean(by_seed(groups[kl], final).values()))
            lines.append(line_of(groups[kl], label=f"{NAMES[method]}, KL penalty {kl:g}"))
    found["figure_4"] = "PPO, each method at its best KL penalty", "update", "gold", lines

    lines = [line_of(mine) for method in METHODS if (mine := pick(ppo, method=method, kl_coef=0.0))]
    found["figure_5"] = "PPO without a KL penalty", "update", "gold", lines

    lines = []
    for method in ("mean", "uwo"):
        for kl in penalties[:2]:
            if mine := pick(ppo, method=method, kl_coef=kl):
                lines.append(line_of(mine, variance_by_update, f"{NAMES[method]}, KL penalty {kl:g}", kl > 0))
    found["figure_10"] = "PPO: variance within the ensemble", "update", "variance", lines
    return found


def draw_lines(title: str, xlabel: str, ylabel: str, lines: list[Line]) -> Figure:
    """One axis: the lines, and to the right of their ends, side by side, the intervals of their last values."""
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axis = figure.subplots()
    last = max(line.x[-1] for line in lines)
    axis.axvline(1.02 * last, color="gray", linewidth=0.6)
    for i, line in enumerate(lines):
        color, marker = METHODS[line.method]
        style = {"color": color, "marker": marker, "ms": 5}
        axis.plot(line.x, line.y, ls="--" if line.dashed else "-", lw=1.6, label=line.label, **style)
        middle, low, high = line.end
        axis.errorbar((1.05 + 0.035 * i) * last, middle, [[middle - low], [high - middle]], capsize=3, ls="", **style)
    axis.set(title=title, xlabel=f"{xlabel}; right: the last values, 95 % interval over replicates", ylabel=ylabel)
    axis.locator_params(axis="x", integer=True)
    axis.set_xticks([tick for tick in axis.get_xticks() if 0 <= tick <= last])
    axis.set_xlim(-0.02 * last, (1.08 + 0.035 * (len(lines) - 1)) * last)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=9)
    return figure


# ---- table -----------------------------------------------------------------------------------------------------------


def decimals(value: float) -> str:
    """Three decimals, with a minus sign."""
    return f"{value:.3f}".replace("-", "−")


def difference_text(values: list[float]) -> str:
    """Mean and interval of paired differences, bold where the interval excludes 0; empty without a pair."""
    if not values:
        return ""
    middle, low, high = t_interval(values)
    if len(values) == 1:
        return decimals(middle)
    text = f"{decimals(middle)} ({decimals(low)} to {decimals(high)})"
    return f"**{text}**" if low > 0 or high < 0 else text


def methods_table(runs: list[Run]) -> str:
    """Markdown: of each method final and best gold, and their paired differences to a single reward model."""
    lines = ["| runs | method | final gold | to single | best gold | to single |", "|" + "---|" * 6]
    for procedure, kl in sorted({(run.procedure, run.kl_coef) for run in runs}):
        group = pick(runs, procedure=procedure, kl_coef=kl)
        name = f"PPO, KL {kl:g}" if procedure == "PPO" else f"best of {group[0].step[-1]:,}"
        single = pick(group, method="single")
        for method in METHODS:
            if mine := pick(group, method=method):
                cells = [name, NAMES[method]]
                for quantity in (final, best):
                    cells.append(decimals(mean(by_seed(mine, quantity).values())))
                    cells.append("" if method == "single" else difference_text(differences(mine, single, quantity)))
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(args: Args):
    runs = read_runs(args.runs)
    folder = Path(args.output_dir)
    text = methods_table(runs)
    with or_fail(f"--output-dir {folder} cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "runs.jsonl").write_text("".join(json.dumps(run._asdict()) + "\n" for run in runs))
        (folder / "table.md").write_text(text)
        for name, figure in figures(runs).items():
            if figure[-1]:
                draw_lines(*figure).savefig(folder / f"{name}.png", dpi=100)
            else:
                print(f"{name}: no runs for it")
    print(text)


if __name__ == "__main__":
    main(tyro.cli(Args))
