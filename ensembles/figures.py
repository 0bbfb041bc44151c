"""Figures 3, 4, 5 and 10 of "Reward Model Ensembles Help Mitigate Overoptimization", and tables that compare every
method with a single reward model.

    python ensembles/figures.py --runs runs/ensembles/ppo runs/ensembles/best_of_n --output-dir runs/ensembles/figures
    python ensembles/figures.py --runs ensembles/results/study.jsonl --output-dir /tmp/figures    # the committed study

The script reads the runs of ensembles/ppo.py that eval/gold.py has scored, and those of ensembles/best_of_n.py. It
writes a figure_N.png for each figure that has runs, table.md and, of run folders, their curves as runs.jsonl. Runs of
study.py have an arm: the figures of arms other than `centre` are figure_N_ARM.png, factors.png compares best of n in
all, and so does table.md, which then tells how the second half of each curve goes and what the members' losses say.

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
from math import isnan, nan
from pathlib import Path

os.environ["MPLBACKEND"] = "agg"  # the backend that a notebook chooses may not be installed here

import numpy
import pandas
import tyro
from matplotlib.figure import Figure
from scipy import stats

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("eval", "quickstart")]

from eval_helpers import fail, files_below, markdown, or_fail  # noqa: E402
from paired import summarise  # noqa: E402
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
    arms: tuple[str, ...] = ()
    """arms to draw; default: all. The tables have all"""


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
            run |= {x: rows[x].tolist() if x in rows else [] for x in ("second_gold", "wins")}
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
    for column in (*COLUMNS, "wins"):  # rows of earlier versions lack some
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


# ---- tables ----------------------------------------------------------------------------------------------------------

KEY = ["procedure", "kl_coef", "arm", "method"]


def last_values(runs: pandas.DataFrame) -> pandas.DataFrame:
    """Return a row for each KEY and seed with gold, second_gold, KL and win rate at the end of the curves, and with
    `judged`, the second gold where there is one, and else the gold."""
    columns = ["gold", "second_gold", "kl", "wins"]
    ends = runs[columns].map(lambda values: values[-1] if values else nan)
    ends["judged"] = ends["second_gold"].fillna(ends["gold"])
    return pandas.concat([runs[[*KEY, "seed"]], ends], axis=1).groupby([*KEY, "seed"]).mean()


def family_of(key: tuple, to: str) -> str:
    """Return what a difference is in study.py: a primary contrast, chosen before its first row (mean, WCO and UWO less
    a single reward model, in best of n and in PPO with a KL penalty of 0.1); shown but not tested, as PPO without a
    penalty, whose draws differ too much; or one of the others."""
    procedure, kl_coef, arm, method = key
    if procedure == "PPO" and kl_coef == 0:
        return "shown"
    is_there = arm == "centre" and (procedure == "BoN" or kl_coef == 0.1)
    return "primary" if is_there and to == "single" and method in ("mean", "wco", "uwo") else "other"


def comparisons(runs: pandas.DataFrame) -> pandas.DataFrame:
    """Return the differences in what judges the last policies, paired by draw: of each method to a single reward model;
    and, to the same in the arm `centre`, of single and mean, or of all methods of an arm without single. Arms
    X_members_N are compared with X. Columns: key, to, family, and those of paired.summarise; holm is corrected over the
    six primary contrasts, and over all others."""
    ends, pairs = last_values(runs)["judged"].unstack("seed"), {}
    for key in ends.index:
        procedure, kl_coef, arm, method = key
        others = {"single": (*key[:3], "single")}
        if arm != "centre" and (method in ("single", "mean") or others["single"] not in ends.index):
            others["centre"] = (
                procedure,
                kl_coef,
                arm.partition("_members")[0] if "_members" in arm else "centre",
                method,
            )
        pairs |= {(key, to): ends.loc[key] - ends.loc[x] for to, x in others.items() if x in ends.index and x != key}
    rows = []
    for family, tries in {"primary": 6, "other": 0, "shown": 0}.items():
        own = [pair for pair in pairs if family_of(*pair) == family]
        table = pandas.DataFrame({i: pairs[pair] for i, pair in enumerate(own)})
        for i, summary in summarise(table, [], tries).items():
            rows.append({"key": own[i][0], "to": own[i][1], "family": family} | summary)
    return pandas.DataFrame(rows, columns=["key", "to", "family", "count", "mean", "low", "high", "holm", "power"])


def difference(row: dict, with_p: bool) -> str:
    """Return a difference with its interval and, if wanted, p; bold if p is below 0.05 after the correction."""
    text = "{mean:+.3f} ({low:+.3f} to {high:+.3f})".format(**row)
    text += f", p {row['holm']:.3f}" if with_p else ""
    return f"**{text}**" if with_p and row["holm"] < 0.05 else text


def methods_table(runs: pandas.DataFrame) -> str:
    """Return Markdown tables of the last policies of each setting and method and of the primary contrasts."""
    ends, compared = last_values(runs), comparisons(runs)
    found = {(x["key"], x["to"]): difference(x, x["family"] == "other") for x in compared.to_dict("records")}
    lines = []
    for key, own in ends.groupby(KEY, sort=False):
        procedure, kl_coef, arm, method = key
        step = runs.loc[runs["procedure"] == "BoN", "step"].str[-1].max()
        line = {"runs": f"PPO, KL {kl_coef:g}" if procedure == "PPO" else f"best of {step:,.0f}"}
        line |= {"arm": arm, "method": METHODS.get(method, (method,))[0], "draws": len(own)}
        for name, digits in {"gold": 3, "second_gold": 3, "kl": 2, "wins": 2}.items():
            if ends[name].notna().any():
                mean = own[name].mean()
                line[name.replace("_", " ")] = "" if isnan(mean) else f"{mean:.{digits}f}"
        shown = [to for to in ("single", "centre") if to in set(compared["to"])]
        lines.append((key, line | {f"to {to}, 95 %": found.get((key, to), "") for to in shown}))
    arms, methods = [*runs["arm"].unique()], [*METHODS, *runs["method"].unique()]
    lines.sort(key=lambda x: (*x[0][:2], arms.index(x[0][2]), methods.index(x[0][3])))
    text = markdown([line for _, line in lines])
    contrasts = [
        {
            "primary contrast": ("PPO, KL 0.1: " if row["key"][0] == "PPO" else "best of n: ")
            + METHODS[row["key"][3]][0],
            "draws": f"{row['count']:.0f}",
            "to single, 95 %": difference(row, True),
            "would have shown": f"{row['power']:.3f}",
        }
        for row in compared[compared["family"] == "primary"].to_dict("records")
    ]
    return text + ("\n" + markdown(contrasts) if contrasts else "")


def with_interval(values: pandas.Series, digits: int) -> str:
    """Return the mean of values and, of two or more, their 95 % t interval."""
    middle, low, high = t_interval(values)
    return f"{middle:+.{digits}f}" + (f" ({low:+.{digits}f} to {high:+.{digits}f})" if len(values) > 1 else "")


def drift_table(runs: pandas.DataFrame) -> str:
    """Return a Markdown table of how proxy, gold and second gold change from the middle measurement of the curves to
    the last, with 95 % t intervals over draws: of PPO, and of best of n with a second gold."""
    lines = []
    has_drift = (runs["procedure"] == "PPO") | (runs["second_gold"].str.len() > 0)
    for (procedure, kl_coef, arm, method), own in runs[has_drift].groupby(KEY, sort=False):
        line = {"runs": f"PPO, KL {kl_coef:g}" if procedure == "PPO" else "best of n", "arm": arm}
        middle = len(own["step"].iloc[0]) // 2
        line |= {"method": METHODS.get(method, (method,))[0], "draws": len(own)}
        line |= {"from": own["step"].iloc[0][middle], "to": own["step"].iloc[0][-1]}
        for name in ("proxy", "gold", "second_gold"):
            is_there = own[name].str.len().min() > 0
            changes = own[name].str[-1] - own[name].str[middle] if is_there else None
            line[name.replace("_", " ")] = with_interval(changes, 3) if is_there else ""
        lines.append(line)
    return markdown(lines) if lines else ""


def members_table(runs: pandas.DataFrame) -> str:
    """Return a Markdown table of what the members' validation loss says about the gold of the best of n by each alone
    (figures 15 and 16): their spread within a draw and their correlation, means over draws with 95 % t intervals."""
    lines = []
    for arm, own in runs[runs["member_gold"].notna()].groupby("arm", sort=False) if "member_gold" in runs else ():
        members = zip(own["member_loss"], own["member_gold"], strict=True)
        both = [pandas.DataFrame({"loss": loss, "gold": gold}) for loss, gold in members]
        line = {"arm": arm, "draws": len(own), "pairs": f"{own['pairs'].mean():.0f}"}
        for name in ("loss", "gold"):
            mean, sd = (numpy.mean([getattr(x[name], y)() for x in both]) for y in ("mean", "std"))
            line[name] = f"{mean:.3f} ± {sd:.3f}"
        correlations = pandas.Series([x["loss"].corr(x["gold"]) for x in both])
        lines.append(line | {"correlation": with_interval(correlations, 2)})
    return markdown(lines) if lines else ""


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
    axis.set_xticks(range(len(arms)), [arm.replace("_", "\n", arm.count("_") - 1) for arm in arms], fontsize=8)
    axis.set(ylabel="truth", title="best of n: draws' mean and 95 % interval")
    axis.grid(alpha=0.3, axis="y")
    axis.legend(fontsize=9)
    return figure


def main(args: Args):
    runs, folder = read_runs(args.runs), Path(args.output_dir)
    text = "\n".join(filter(None, [methods_table(runs), drift_table(runs), members_table(runs)]))
    with or_fail(f"--output-dir {folder} cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        if not all(Path(source).is_file() for source in args.runs):
            (folder / "runs.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs.to_dict("records")))
        (folder / "table.md").write_text(text)
        for arm in args.arms or runs["arm"].unique():
            for name, (title, lines) in figures(runs[runs["arm"] == arm]).items():
                if lines:
                    suffix, title = ("", title) if arm == "centre" else (f"_{arm}", f"{title} ({arm})")
                    figure = draw_lines(title, lines, name == "figure_10")
                    figure.savefig(folder / f"{name}{suffix}.png", dpi=100)
        if runs.loc[runs["procedure"] == "BoN", "arm"].nunique() > 1:
            draw_factors(runs).savefig(folder / "factors.png", dpi=100)
    print(text)


if __name__ == "__main__":
    main(tyro.cli(Args))
