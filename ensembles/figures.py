"""Figures 3 to 7, 10 and 15 to 17 of "Reward Model Ensembles Help Mitigate Overoptimization", and tables that compare
every method with a single reward model.

    python ensembles/figures.py --runs runs/ensembles/ppo runs/ensembles/best_of_n --output-dir runs/ensembles/figures
    python ensembles/figures.py --runs ensembles/results/study.jsonl --output-dir /tmp/figures    # the committed study

The script reads the runs of ensembles/ppo.py that eval/gold.py has scored, and those of ensembles/best_of_n.py. It
writes a figure_N.png for each figure that has runs, table.md and, of run folders, their curves as runs.jsonl. Runs of
study.py have an arm: the figures of arms other than `centre` are figure_N_ARM.png, factors.png compares best of n in
all, and so does table.md. It also tells how the second half of each curve goes, what the members' losses say, and how
often PPO with an ensemble wins against PPO with each member.

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

from eval_helpers import fail, files_below, markdown, or_fail, read_metrics, wins  # noqa: E402
from paired import summarise  # noqa: E402

METHODS = {  # name, color, marker
    "single": ("single", "C7", "o"),
    "mean": ("mean", "C1", "s"),
    "wco": ("WCO", "C2", "^"),
    "uwo": ("UWO", "C0", "D"),
    "warm": ("WARM", "C3", "v"),
}
MEMBERS = {f"single_{i}": (f"member {i}", f"C{i - 1}", ".") for i in range(2, 6)}  # of study.py; member 1 is `single`
COLUMNS = ("kl", "gold", "proxy", "second_gold", "variance")  # of a run: its curves
LISTS = (*COLUMNS, "wins", "wins_sd", "post_gold", "member_steps", "member_loss", "member_gold")  # rows may lack some
TESTED = 10  # draws of a difference that is tested, or as many as there are, if no difference has so many


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
            run |= {x: rows[x].tolist() if x in rows else [] for x in ("second_gold", "wins", "wins_sd")}
            runs_read.append(run | {"proxy": rows["proxy"].tolist(), "variance": []})
    return runs_read


def with_lists(runs: list[dict]) -> pandas.DataFrame:
    """Return runs as a table, with [] in place of LISTS that some of them lack."""
    runs = pandas.DataFrame(runs)
    for column in LISTS:
        runs[column] = [x if isinstance(x, list) else [] for x in runs.get(column, [[]] * len(runs))]
    return runs


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
    runs = with_lists(runs)
    runs["arm"] = runs["arm"].fillna("centre") if "arm" in runs else "centre"
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


def line_of(runs: pandas.DataFrame, suffix: str = "", dashed: bool = False, color: str = "") -> dict:
    """Return the lines of the runs of one method: for each column that all of them have, its mean over the replicates
    and the ends of its interval, at the steps that all runs have; `kl` is what they are drawn over."""
    method = runs.iloc[0]["method"]
    name, own_color, marker = (METHODS | MEMBERS)[method]
    line = {"method": method, "label": name + suffix, "dashed": dashed, "color": color or own_color, "marker": marker}
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
        "figure_6": ("PPO with a single reward model", []),
        "figure_10": ("PPO: variance within the ensemble", []),
    }
    ppo = runs[runs["procedure"] == "PPO"].assign(final=runs["gold"].str[-1])
    for method in METHODS | MEMBERS:
        best_of_n = runs[(runs["procedure"] == "BoN") & (runs["method"] == method)]
        if len(best_of_n):
            lines["figure_3"][1].append(line_of(best_of_n))
        own = ppo[ppo["method"] == method]
        groups = dict(list(own.groupby("kl_coef")))
        if groups:
            finals = own.groupby(["seed", "kl_coef"])["final"].mean().unstack()  # a penalty is chosen by draws that all
            kl = finals.dropna().mean().idxmax() if len(finals.dropna()) else min(groups)  # of them have
            lines["figure_4"][1].append(line_of(groups[kl], f", KL penalty {kl:g}"))
        if 0 in groups:
            lines["figure_5"][1].append(line_of(groups[0]))
        if method == "single" and len(groups) > 1:
            penalties = [
                line_of(own, f", KL penalty {kl:g}", color=f"C{i}") for i, (kl, own) in enumerate(groups.items())
            ]
            lines["figure_6"][1].extend(penalties)
        for kl in dict.fromkeys([min(groups), max(groups)] if method in ("mean", "uwo") and groups else []):
            is_higher = kl > ppo["kl_coef"].min()
            lines["figure_10"][1].append(line_of(groups[kl], f", KL penalty {kl:g}", dashed=is_higher))
    return lines


def draw_lines(title: str, lines: list[dict], over_updates: bool) -> Figure:
    """Return a figure of the lines with their intervals: a panel for each column, over KL; or the variance over
    updates."""
    columns = ["variance"] if over_updates else [x for x in ("gold", "proxy", "second_gold") if x in lines[0]]
    figure = Figure(figsize=(7.2 if len(columns) == 1 else 4.6 * len(columns), 4.0), layout="constrained")
    for axis, column in zip(figure.subplots(1, len(columns), squeeze=False)[0], columns, strict=True):
        for line in lines:
            y = line[column]
            x = y.index if over_updates else line["kl"]["mean"]
            style = {"marker": line["marker"], "ms": 4, "ls": "--" if line["dashed"] else "-", "lw": 1.6}
            axis.plot(x, y["mean"], label=line["label"], color=line["color"], **style)
            axis.fill_between(x, y["low"], y["high"], color=line["color"], alpha=0.12, linewidth=0)
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


def is_primary(key: tuple, to: str) -> bool:
    """Return whether a difference is one of the six that were chosen before the first row of study.py: mean, WCO and
    UWO less a single reward model, in best of n and in PPO with a KL penalty of 0.1."""
    procedure, kl_coef, arm, method = key
    is_there = arm == "centre" and (procedure == "BoN" or kl_coef == 0.1)
    return is_there and to == "single" and method in ("mean", "wco", "uwo")


def reference_of(arm: str, method: str, has_single: bool) -> str:
    """Return the arm that a method of an arm is compared with, "" if with none: three members with four, and four with
    five, by all methods but single; of the other arms single and mean with `centre`, or what an arm without single has.
    The members one by one, longer runs, and another gold reward, which gives more pairs, have none."""
    plain, is_fewer, count = arm.rpartition("members_")
    if is_fewer:
        return "" if method == "single" else f"{plain}members_4" if count == "3" else plain.strip("_") or "centre"
    is_left_out = arm in ("centre", "members", "long", "gold_model") or (
        has_single and method not in ("single", "mean")
    )
    return "" if is_left_out else "centre"


def comparisons(runs: pandas.DataFrame) -> pandas.DataFrame:
    """Return the differences in what judges the last policies, paired by draw: of each method to a single reward model,
    and to the same method in another arm (`reference_of`). Columns: key, to (single or an arm), family, and those of
    paired.summarise. holm is corrected over the six primary contrasts, and over all others that are tested. Those of
    PPO without a penalty, whose draws differ too much, and of fewer draws than TESTED are `shown` and not tested."""
    ends, pairs = last_values(runs)["judged"].unstack("seed"), {}
    for key in ends.index:
        single, arm = (*key[:3], "single"), reference_of(key[2], key[3], (*key[:3], "single") in ends.index)
        for to, other in {"single": single, arm: (*key[:2], arm, key[3])}.items():
            if to and other in ends.index and other != key:
                pairs[key, to] = ends.loc[key] - ends.loc[other]
    counts = {pair: values.count() for pair, values in pairs.items()}
    least, families = min(TESTED, max(counts.values(), default=0)), {"primary": [], "other": [], "shown": []}
    for pair, count in counts.items():
        is_tested = count >= least and (pair[0][0] == "BoN" or pair[0][1] > 0)
        families["primary" if is_primary(*pair) else "other" if is_tested else "shown"].append(pair)
    rows = []
    for family, own in families.items():
        table = pandas.DataFrame({i: pairs[pair] for i, pair in enumerate(own)})
        for i, summary in summarise(table, [], 6 if family == "primary" else 0).items():
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
    to_single, to_arms, lines = {}, {}, []
    for row in compared.to_dict("records"):
        text = difference(row, row["family"] == "other")
        if row["to"] == "single":
            to_single[row["key"]] = text
        else:
            to_arms[row["key"]] = f"{row['to']}: {text}"
    for key, own in ends.groupby(KEY, sort=False):
        procedure, kl_coef, arm, method = key
        step = runs.loc[runs["procedure"] == "BoN", "step"].str[-1].max()
        line = {"runs": f"PPO, KL {kl_coef:g}" if procedure == "PPO" else f"best of {step:,.0f}"}
        line |= {"arm": arm, "method": (METHODS | MEMBERS)[method][0], "draws": len(own)}
        for name, digits in {"gold": 3, "second_gold": 3, "kl": 2, "wins": 2}.items():
            if ends[name].notna().any():
                mean = own[name].mean()
                line[name.replace("_", " ")] = "" if isnan(mean) else f"{mean:.{digits}f}"
        for name, found in {"to single": to_single, "to another arm": to_arms}.items():
            line |= {f"{name}, 95 %": found.get(key, "")} if found else {}
        lines.append((key, line))
    arms, methods = [*runs["arm"].unique()], [*METHODS, *MEMBERS]
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
    the last, with 95 % t intervals over draws, of the change in gold less that of a single reward model, and of the
    mean variance within the ensemble at the first and the last update (figure 10)."""
    lines, changes = [], {}
    for key, own in runs.groupby(KEY, sort=False):
        procedure, kl_coef, arm, method = key
        middle = len(own["step"].iloc[0]) // 2
        line = {"runs": f"PPO, KL {kl_coef:g}" if procedure == "PPO" else "best of n", "arm": arm}
        line |= {"method": (METHODS | MEMBERS)[method][0], "draws": own["seed"].nunique()}
        line |= {"from": own["step"].iloc[0][middle], "to": own["step"].iloc[0][-1]}
        for name in ("proxy", "gold", "second_gold"):
            is_there = own[name].str.len().min() > 0
            change = (own[name].str[-1] - own[name].str[middle]).groupby(own["seed"]).mean() if is_there else None
            changes[(*key, name)] = change
            line[name.replace("_", " ")] = with_interval(change, 3) if is_there else ""
        variances = own["variance"][own["variance"].str.len() > 0]
        ends = [variances.str[i].mean() for i in (0, -1)]
        lines.append((key, line, "{:.2f} to {:.2f}".format(*ends) if len(variances) else ""))
    for key, line, variance in lines:
        own, single = changes[(*key, "gold")], changes.get((*key[:3], "single", "gold"))
        less = (own - single).dropna() if single is not None and key[3] != "single" else ()
        line |= {"gold, less single's": with_interval(less, 3) if len(less) else "", "variance": variance}
    return markdown([line for _, line, _ in lines])


def wins_table(runs: pandas.DataFrame) -> str:
    """Return a Markdown table of how often each method wins against each single reward model alone (tables 6 and 7):
    the mean over these and their standard deviation. Of PPO with the penalty and the draws of the arm `members`."""
    lines = []
    for (arm, method), own in runs[runs["wins_sd"].str.len() > 0].groupby(["arm", "method"], sort=False):
        if method in ("mean", "wco", "uwo"):
            rate, spread = own["wins"].str[-1].mean(), own["wins_sd"].str[-1].mean()
            lines.append(
                {"runs": "best of n", "arm": arm, "method": METHODS[method][0], "draws": len(own), "wins": rate}
            )
            lines[-1]["±"] = spread
    ppo = runs[runs["post_gold"].str.len() > 0]
    members = ppo[ppo["arm"] == "members"]
    for (kl_coef, seed), singles in members.groupby(["kl_coef", "seed"]):
        own = ppo[(ppo["arm"] == "centre") & (ppo["kl_coef"] == kl_coef) & (ppo["seed"] == seed)]
        for row in own.to_dict("records"):
            rates = [wins(numpy.array(row["post_gold"]), numpy.array(x)).mean() for x in singles["post_gold"]]
            line = {"runs": f"PPO, KL {kl_coef:g}", "arm": "centre", "method": METHODS[row["method"]][0]}
            lines.append(line | {"draws": f"draw {seed}", "wins": numpy.mean(rates), "±": numpy.std(rates)})
    return markdown([line | {x: f"{line[x]:.2f}" for x in ("wins", "±")} for line in lines]) if lines else ""


def members_table(runs: pandas.DataFrame) -> str:
    """Return a Markdown table of what the members' validation loss says about the gold of the best of n by each alone
    (figures 15 and 16): their spread within a draw, and the loss's correlation with gold at the end of its curve and
    with its change since the middle, means over draws with 95 % t intervals."""
    lines = []
    for arm, own in runs[runs["member_gold"].str.len() > 0].groupby("arm", sort=False):
        draws = []
        for losses, golds in zip(own["member_loss"], map(numpy.array, own["member_gold"]), strict=True):
            change = golds[:, -1] - golds[:, golds.shape[1] // 2]
            draws.append(pandas.DataFrame({"loss": [x[-1] for x in losses], "gold": golds[:, -1], "change": change}))
        line = {"arm": arm, "draws": len(own), "pairs": f"{own['pairs'].mean():.0f}"}
        for name in ("loss", "gold"):
            mean, sd = (numpy.mean([getattr(x[name], y)() for x in draws]) for y in ("mean", "std"))
            line[name] = f"{mean:.3f} ± {sd:.3f}"
        for name, title in {"gold": "correlation", "change": "with gold's change"}.items():
            line[title] = with_interval(pandas.Series([x["loss"].corr(x[name]) for x in draws]), 2)
        lines.append(line)
    return markdown(lines) if lines else ""


# ---- figures of the study --------------------------------------------------------------------------------------------


def draw_finals(runs: pandas.DataFrame, by: str, title: str) -> Figure:
    """Return a figure of the truth at the end of the curves, for every arm or every KL penalty (`by`) and every method,
    with 95 % t intervals over draws. The truth is the second gold where there is one."""
    runs = runs.assign(final=[(row["second_gold"] or row["gold"])[-1] for row in runs.to_dict("records")])
    runs = runs.groupby([by, "method", "seed"], sort=False)["final"].mean().reset_index()
    places = sorted(runs[by].unique()) if by == "kl_coef" else list(runs[by].unique())
    figure = Figure(figsize=(1.5 + 1.1 * len(places), 4.2), layout="constrained")
    axis = figure.subplots()
    for i, (method, (name, color, marker)) in enumerate(METHODS.items()):
        own = runs[runs["method"] == method].groupby(by)["final"].apply(t_interval).reindex(places).dropna()
        for place, (middle, low, high) in own.items():
            style = {"color": color, "marker": marker, "ms": 5, "capsize": 3}
            label, x = name if place == own.index[0] else None, places.index(place) + 0.12 * (i - 2)
            axis.errorbar(x, middle, [[middle - low], [high - middle]], label=label, **style)
    names = [place.replace("_", "\n", place.count("_") - 1) if by == "arm" else f"{place:g}" for place in places]
    axis.set_xticks(range(len(places)), names, fontsize=8)
    axis.set(xlabel="KL penalty" if by == "kl_coef" else "", ylabel="truth", title=title)
    axis.grid(alpha=0.3, axis="y")
    axis.legend(fontsize=9)
    return figure


def draw_members(runs: pandas.DataFrame) -> Figure:
    """Return figures 15 and 16 of runs with the curves of their members, a line for each member, a color for each draw:
    validation loss over updates, and gold of the best of n by this member alone over KL."""
    figure = Figure(figsize=(9.2, 4.0), layout="constrained")
    for axis, (over, name) in zip(figure.subplots(1, 2), {"member_steps": "loss", "kl": "gold"}.items(), strict=True):
        for i, row in enumerate(runs.to_dict("records")):
            for curve in row[f"member_{name}"]:
                axis.plot(row[over], curve, "o-", color=f"C{i}", ms=2, lw=0.8)
        axis.set(xlabel="update" if name == "loss" else "KL, nats", title=name)
        axis.grid(alpha=0.3)
    figure.suptitle("members one by one: validation loss, and best of n by each alone", fontsize=10)
    return figure


def main(args: Args):
    runs, folder = read_runs(args.runs), Path(args.output_dir)
    text = "\n".join(table for of in (methods_table, drift_table, wins_table, members_table) if (table := of(runs)))
    with or_fail(f"--output-dir {folder} cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        if not all(Path(source).is_file() for source in args.runs):
            (folder / "runs.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs.to_dict("records")))
        (folder / "table.md").write_text(text)
        for arm in args.arms or runs["arm"].unique():
            own = runs[runs["arm"] == arm]
            suffix, of_arm = ("", "") if arm == "centre" else (f"_{arm}", f" ({arm})")
            drawn = {}
            for name, (title, lines) in figures(own).items():
                if lines:
                    drawn[name] = draw_lines(title + of_arm, lines, name == "figure_10")
            if (ppo := own[own["procedure"] == "PPO"])["kl_coef"].nunique() > 1:
                drawn["figure_7"] = draw_finals(ppo, "kl_coef", f"PPO: last policies, 95 % intervals{of_arm}")
            if len(one_by_one := own[own["member_gold"].str.len() > 0]):
                drawn["members"] = draw_members(one_by_one)
            for name, figure in drawn.items():
                figure.savefig(folder / f"{name}{suffix}.png", dpi=100)
        if (best := runs[runs["procedure"] == "BoN"])["arm"].nunique() > 1:
            title = "best of n: draws' mean and 95 % interval"
            draw_finals(best, "arm", title).savefig(folder / "factors.png", dpi=100)
    print(text)


if __name__ == "__main__":
    main(tyro.cli(Args))
