"""Figures 3, 4, 5 and 10 of "Reward Model Ensembles Help Mitigate Overoptimization", and a table that compares every
method with a single reward model.

    python ensembles/figures.py --runs runs/ensembles/ppo runs/ensembles/best_of_n --output-dir runs/ensembles/figures
    python ensembles/figures.py --runs ensembles/results/runs.jsonl --output-dir /tmp/figures    # the committed study
    python ensembles/figures.py --runs ensembles/results/study.jsonl --arm noise_0 --output-dir /tmp/figures

The script reads the runs of ensembles/ppo.py that eval/gold.py has scored, and those of ensembles/best_of_n.py. It
writes a figure_N.png for each figure that has runs, table.md, and runs.jsonl, which holds the curves that it read. Runs
of study.py have an arm: figures and table are of one arm, and factors.png compares the best of n of all.

A method is `single` (one reward model), `warm` (one that average.py made), `mean`, `wco` or `uwo`. A replicate is a
seed. Several runs of one seed, such as one for each single reward model, count as their mean. Lines are means over the
replicates, at the steps that all of them have; bands are 95 % t intervals over the replicates. Figures 3, 4 and 5 are
drawn over KL on a square root scale, as in the paper, with a panel each for gold, for the standardised scores that the
policy was trained or chosen by, and for a second gold reward. A point of PPO is an update: the mean of the replicates'
KL and of their scores, which may lie far apart.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

os.environ["MPLBACKEND"] = "agg"  # the backend that a notebook chooses may not be installed here

import numpy
import pandas
import tyro
from matplotlib.figure import Figure
from scipy import stats

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("eval", "quickstart")]

from eval_helpers import fail, files_below, or_fail  # noqa: E402
from paired import holm, summarise  # noqa: E402
from run_metrics import read_metrics  # noqa: E402

METHODS = {  # name, color, marker
    "single": ("single", "C7", "o"),
    "mean": ("mean", "C1", "s"),
    "wco": ("WCO", "C2", "^"),
    "uwo": ("UWO", "C0", "D"),
    "warm": ("WARM", "C3", "v"),
}
COLUMNS = ("kl", "gold", "proxy", "second_gold", "variance")  # of a run: its curves


@dataclass
class Args:
    runs: tuple[str, ...] = ("runs/ensembles/ppo", "runs/ensembles/best_of_n")
    """folders with runs, at any depth, or a runs.jsonl of an earlier call"""
    output_dir: str = "runs/ensembles/figures"
    """folder to write"""
    arm: str = "centre"
    """arm of study.py whose figures and table are made; runs without an arm are in this one"""


# ---- reading ---------------------------------------------------------------------------------------------------------


def method_of(paths: list[str], combination: str) -> str:
    """Return the method of a run with these reward models. A single one is `warm` if average.py made it."""
    if len(paths) > 1:
        return combination
    folder = Path(paths[0])
    file = (folder.parent if folder.name == "model" else folder) / "args.json"
    averaged = file.exists() and json.loads(file.read_text()).get("stage") == "average"
    return "warm" if averaged else "single"


def read_ppo(folder: Path, settings: dict) -> list[dict]:
    """Return the curve of a run of ensembles/ppo.py in a list, which is empty if the run is not complete."""
    gold = pandas.read_csv(folder / "gold.csv") if (folder / "gold.csv").exists() else pandas.DataFrame({"update": [0]})
    if gold["update"].max() < settings["total_episodes"] // settings["batch_size"]:
        print(f"left out, because it is not complete, or eval/gold.py has not scored it: {folder}")
        return []
    paths = settings["reward_model_paths"]
    variance = [line["objective/reward_model_variance"] for line in read_metrics(folder)]
    return [
        {
            "procedure": "PPO",
            "method": method_of(paths, settings["reward_combination"]),
            "kl_coef": settings["kl_coef"],
            "seed": settings["seed"],
            "folder": str(folder),
            "step": gold["update"].tolist(),
            "kl": gold["kl_k2"].tolist(),
            "gold": gold["gold"].tolist(),
            "proxy": gold["score"].tolist(),
            "second_gold": gold["second_gold"].tolist() if "second_gold" in gold else [],
            "variance": variance if len(paths) > 1 else [],  # one value for each update, from 1 on
        }
    ]


def read_best_of_n(folder: Path, settings: dict) -> list[dict]:
    """Return a curve for each method in a folder of best_of_n.py; `single` is the mean over the members."""
    runs_read = []
    for method, rows in pandas.read_csv(folder / "best_of_n.csv").sort_values("n").groupby("method"):
        if method in METHODS:
            name = method_of(settings["reward_model_paths"], method) if method == "single" else method
            run = {"procedure": "BoN", "method": name, "kl_coef": 0.0, "seed": settings["seed"], "folder": str(folder)}
            run |= {"step": rows["n"].tolist(), "kl": rows["kl"].tolist(), "gold": rows["gold"].tolist()}
            run |= {"second_gold": rows["second_gold"].tolist() if "second_gold" in rows else []}
            runs_read.append(run | {"proxy": rows["proxy"].tolist(), "variance": []})
    return runs_read


def read_runs(sources: tuple[str, ...]) -> pandas.DataFrame:
    """Return the curves of all complete runs below the folders, or of a runs.jsonl, one a row."""
    runs = []
    for source in map(Path, sources):
        if source.is_file():
            with or_fail(f"{source} cannot be read"):
                runs += map(json.loads, source.read_text().splitlines())
        for file in files_below(source, "**/args.json"):
            with or_fail(f"the run in {file.parent} cannot be read"):
                settings = json.loads(file.read_text())
                if (file.parent / "best_of_n.csv").exists():
                    runs += read_best_of_n(file.parent, settings)
                elif "reward_combination" in settings:
                    runs += read_ppo(file.parent, settings)
    if not runs:
        fail(f"--runs {' '.join(sources)}: no complete run with gold scores there; ensembles/study.py makes some")
    runs = pandas.DataFrame(runs)
    runs["arm"] = runs["arm"].fillna("centre") if "arm" in runs else "centre"
    for column in COLUMNS:  # rows of earlier versions lack some
        runs[column] = [x if isinstance(x, list) else [] for x in runs.get(column, [[]] * len(runs))]
    members = (runs["procedure"] == "PPO") & (runs["method"] == "single")
    for key, group in runs[~members].groupby(["procedure", "method", "kl_coef", "seed", "arm"]):
        if len(group) > 1:
            what = "{}, {}, KL penalty {:g}, seed {}".format(*key[:-1])
            fail(f"two runs of {what}: {' and '.join(group['folder'][:2])}; name folders of one setting in --runs")
    return runs


# ---- means and intervals ---------------------------------------------------------------------------------------------


def t_interval(values: pandas.Series) -> tuple[float, float, float]:
    """Return the mean of values and the ends of its 95 % t interval, which are nan for a single value."""
    middle, half = values.mean(), stats.t.ppf(0.975, len(values) - 1) * values.sem()
    return middle, middle - half, middle + half


def line_of(runs: pandas.DataFrame, suffix: str = "", dashed: bool = False) -> dict:
    """Return the lines of the runs of one method: for each column that all of them have, its mean over the replicates
    and the ends of its interval, at the steps that all runs have; `kl` is what they are drawn over."""
    first = runs.iloc[0]
    line = {"method": first["method"], "label": METHODS[first["method"]][0] + suffix, "dashed": dashed}
    for column in COLUMNS:
        if not runs[column].map(len).all():
            continue
        curves = []
        for values, steps in zip(runs[column], runs["step"], strict=True):
            curves.append(pandas.Series(values, range(1, len(values) + 1) if column == "variance" else steps))
        replicates = pandas.DataFrame(curves, runs["seed"]).dropna(axis=1).groupby(level=0).mean()
        line[column] = replicates.apply(t_interval).T.set_axis(["mean", "low", "high"], axis=1)
    return line


# ---- figures and table -----------------------------------------------------------------------------------------------


def figures(runs: pandas.DataFrame) -> dict[str, tuple[str, list[dict]]]:
    """Return {file name: (title, lines)}; lines are [] without runs."""
    lines = {
        "figure_3": ("Best of n", []),
        "figure_4": ("PPO, each method at its best KL penalty", []),
        "figure_5": ("PPO without a KL penalty", []),
        "figure_10": ("PPO: variance within the ensemble", []),
    }
    ppo = runs[runs["procedure"] == "PPO"].assign(final=runs["gold"].str[-1])
    for method in METHODS:
        best_of_n = runs[(runs["procedure"] == "BoN") & (runs["method"] == method)]
        if len(best_of_n):
            lines["figure_3"][1].append(line_of(best_of_n))
        groups = dict(list(ppo[ppo["method"] == method].groupby("kl_coef")))
        if groups:
            kl = max(groups, key=lambda kl: groups[kl].groupby("seed")["final"].mean().mean())
            lines["figure_4"][1].append(line_of(groups[kl], f", KL penalty {kl:g}"))
        if 0 in groups:
            lines["figure_5"][1].append(line_of(groups[0]))
        for kl in sorted(ppo["kl_coef"].unique())[:2]:
            if kl in groups and method in ("mean", "uwo"):
                is_higher = kl > min(groups)
                lines["figure_10"][1].append(line_of(groups[kl], f", KL penalty {kl:g}", dashed=is_higher))
    return lines


def draw_lines(title: str, lines: list[dict], over_updates: bool) -> Figure:
    """Return a figure of the lines with their intervals: a panel for each column, over KL; or the variance over
    updates."""
    columns = ["variance"] if over_updates else [x for x in ("gold", "proxy", "second_gold") if x in lines[0]]
    figure = Figure(figsize=(7.2 if len(columns) == 1 else 4.6 * len(columns), 4.0), layout="constrained")
    for axis, column in zip(figure.subplots(1, len(columns), squeeze=False)[0], columns, strict=True):
        for line in lines:
            y, (_, color, marker) = line[column], METHODS[line["method"]]
            x = y.index if over_updates else line["kl"]["mean"]
            style = {"color": color, "marker": marker, "ms": 4, "ls": "--" if line["dashed"] else "-", "lw": 1.6}
            axis.plot(x, y["mean"], label=line["label"], **style)
            axis.fill_between(x, y["low"], y["high"], color=color, alpha=0.12, linewidth=0)
        axis.set(xlabel="update" if over_updates else "KL, nats", title=column.replace("_", " "))
        if not over_updates:
            axis.set_xscale("function", functions=(lambda x: numpy.sqrt(numpy.maximum(x, 0)), numpy.square))
            axis.set_xlim(0)
        axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.suptitle(f"{title}; bands: 95 % over replicates", fontsize=10)
    return figure


def methods_table(runs: pandas.DataFrame) -> str:
    """Return a Markdown table of each method's final and best gold and the paired differences to a single model. p is
    corrected for all differences of the table by Holm's method, and those below 0.05 are bold."""
    runs = runs.assign(final=runs["gold"].str[-1], best=runs["gold"].map(max))
    rows, differences = [], {}
    for (procedure, kl), group in runs.groupby(["procedure", "kl_coef"]):
        name = f"PPO, KL {kl:g}" if procedure == "PPO" else f"best of {group.iloc[0]['step'][-1]:,}"
        # means over the runs of a seed, by seed and method
        tables = {x: group.pivot_table(x, "seed", "method").reindex(columns=[*METHODS]) for x in ("final", "best")}
        for method in METHODS:
            if method in set(group["method"]):
                rows.append((name, method, {key: table[method].mean() for key, table in tables.items()}))
                for key, table in tables.items() if method != "single" else ():
                    differences[name, method, key] = (table[method] - table["single"]).dropna()
    p = {key: stats.ttest_1samp(values, 0).pvalue for key, values in differences.items() if len(values) > 1}
    p = holm(pandas.Series(p, dtype=float).fillna(1.0), 0) if p else {}
    lines = ["| runs | method | final gold | to single | p | best gold | to single | p |", "|" + "---|" * 8]
    for name, method, means in rows:
        cells = [name, METHODS[method][0]]
        for key, mean in means.items():
            values = differences.get((name, method, key), pandas.Series(dtype=float))
            middle, low, high = t_interval(values) if len(values) > 1 else (values.mean(), None, None)
            text = "" if values.empty else f"{middle:.3f}" if low is None else f"{middle:.3f} ({low:.3f} to {high:.3f})"
            corrected = p.get((name, method, key), 1.0)
            known = f"{corrected:.3f}" if len(values) > 1 else ""
            cells += [f"{mean:.3f}", f"**{text}**" if corrected < 0.05 else text, known]
        lines.append(f"| {' | '.join(cells)} |".replace("-", "−"))
    return "\n".join(lines) + "\n"


def contrasts_table(runs: pandas.DataFrame) -> str:
    """Return a Markdown table of the primary contrasts, chosen before study.py's first row: the final gold of mean, WCO
    and UWO less that of a single reward model, in best of n and in PPO with a KL penalty of 0.1."""
    runs = runs.assign(final=runs["gold"].str[-1])
    differences = {}
    for name, procedure, kl in (("best of n", "BoN", 0), ("PPO, KL 0.1", "PPO", 0.1)):
        own = runs[(runs["procedure"] == procedure) & (runs["kl_coef"] == kl)]
        table = own.pivot_table("final", "seed", "method").reindex(columns=[*METHODS])
        for method in ("mean", "wco", "uwo"):
            differences[f"{name}: {METHODS[method][0]}"] = table[method] - table["single"]
    lines = [
        "| primary contrast | draws | final gold less single's, 95 % | p, Holm | would have shown |",
        "|" + "---|" * 5,
    ]
    for name, row in summarise(pandas.DataFrame(differences), [], 0).items():
        interval = "{mean:+.3f} ({low:+.3f} to {high:+.3f})".format(**row)
        lines.append(f"| {name} | {row['count']:.0f} | {interval} | {row['holm']:.3f} | {row['power']:.3f} |")
    return "\n".join(lines) + "\n" if len(lines) > 2 else ""


def draw_factors(runs: pandas.DataFrame) -> Figure:
    """Return a figure of the truth of the best of n in every arm and by every method, with 95 % t intervals over
    draws. The truth is the second gold where there is one."""
    runs = runs[runs["procedure"] == "BoN"]
    runs = runs.assign(final=[(row["second_gold"] or row["gold"])[-1] for row in runs.to_dict("records")])
    arms = list(runs["arm"].unique())
    figure = Figure(figsize=(1.5 + 1.1 * len(arms), 4.2), layout="constrained")
    axis = figure.subplots()
    for i, (method, (name, color, marker)) in enumerate(METHODS.items()):
        own = runs[runs["method"] == method].groupby("arm")["final"].apply(t_interval).reindex(arms).dropna()
        for arm, (middle, low, high) in own.items():
            style = {"color": color, "marker": marker, "ms": 5, "capsize": 3}
            label = name if arm == own.index[0] else None
            axis.errorbar(
                arms.index(arm) + 0.12 * (i - 2), middle, [[middle - low], [high - middle]], label=label, **style
            )
    axis.set_xticks(range(len(arms)), arms)
    axis.set(ylabel="truth", title="best of n: draws' mean and 95 % interval")
    axis.grid(alpha=0.3, axis="y")
    axis.legend(fontsize=9)
    return figure


def main(args: Args):
    every_arm = read_runs(args.runs)
    runs = every_arm[every_arm["arm"] == args.arm]
    if runs.empty:
        fail(f"--arm {args.arm}: the runs have {', '.join(every_arm['arm'].unique())}")
    folder = Path(args.output_dir)
    text = methods_table(runs) + ("\n" + contrasts_table(runs) if args.arm == "centre" else "")
    with or_fail(f"--output-dir {folder} cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "runs.jsonl").write_text("".join(json.dumps(run) + "\n" for run in every_arm.to_dict("records")))
        (folder / "table.md").write_text(text)
        for name, figure in figures(runs).items():
            if figure[-1]:
                draw_lines(*figure, name == "figure_10").savefig(folder / f"{name}.png", dpi=100)
            else:
                print(f"{name}: no runs for it")
        if every_arm["arm"].nunique() > 1:
            draw_factors(every_arm).savefig(folder / "factors.png", dpi=100)
    print(text)


if __name__ == "__main__":
    main(tyro.cli(Args))
