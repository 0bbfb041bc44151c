"""Figures 3 to 14 of "Reward Model Ensembles Help Mitigate Overoptimization", its win rates (appendix F.9) and a table
of what it claims, from whatever runs are there.

    python ensembles/figures.py --runs runs/ensembles --output-dir benchmark/results/ensembles

Reads, in every folder below --runs:
- args.json, best_of_n.csv and win_rates.csv of ensembles/best_of_n.py;
- args.json, metrics.jsonl and gold_samples.csv of ensembles/ppo.py --gold: the last gold-scored samples, for win rates.
A run's setting is that of its reward models, whose args.json lie where its own says, relative to the working directory:
label noise (of the folder noise_N that gold_label.py wrote), model size (the name of --model) and number of pairs.

Writes figure_3 to figure_14 as PNG (--pdf: as PDF, too) and as CSV of exactly what is drawn; win_rates.csv; claims.csv;
first_member.csv, where ensembles have several orders (the value model starts from the first member); ppo_runs.csv, the
first, best and final gold score of each PPO run; figures.md: the other tables, win rates beside the paper's, what is
missing, what was left out. Gold is drawn on the left axis, solid, the proxy on the right one, dashed; figures 4 and 5
have panels over updates, too. Lines are means over runs at equal updates in a band of one sample standard deviation:
over seeds, of `single` over members and seeds. A best-of-n ensemble has best_of_n.py's 95 % band over prompts. Bars
begin at the gold score before optimisation. By size and by pairs, single reward models are those whose member, by its
folder's name, is there at each. Final is the last gold score of a run, of best of n that of the largest n. Ensembles
are those with the most members, where members are not compared.
"""

import json
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

import numpy
import pandas
import tyro
from matplotlib.figure import Figure

METHODS = {"single": ("C0", "o"), "mean": ("C1", "s"), "wco": ("C2", "^"), "uwo": ("C3", "D")}  # color, marker

PPO_SETTINGS = "reward_model_paths reward_combination uwo_lambda kl_coef seed total_episodes batch_size"

# win rates in percent: table 6 (44M) and, by the model, table 7; of PPO at the penalties of figure 4; uwo: lambda 0.5
TABLE_7 = {"pythia-14m": "7M", "pythia-1.4b": "1.3B"}
PAPER = {
    ("BoN", 0, "44M"): {"mean": "54.9 ± 0.9", "wco": "57.1 ± 0.6", "uwo": "57.2 ± 0.9"},
    ("BoN", 25, "44M"): {"mean": "57.8 ± 1.3", "wco": "58.3 ± 0.8", "uwo": "58.2 ± 1.0"},
    ("BoN", 25, "7M"): {"mean": "57.7 ± 1.4", "wco": "58.8 ± 1.4", "uwo": "61.3 ± 1.4"},
    ("BoN", 25, "1.3B"): {"mean": "72.3 ± 1.0", "wco": "71.2 ± 1.2", "uwo": "73.8 ± 0.8"},
    ("PPO", 0, "44M"): {"mean": "58.1 ± 3.3", "wco": "59.4 ± 3.3", "uwo": "60.2 ± 3.4"},
    ("PPO", 25, "44M"): {"mean": "60.2 ± 3.5", "wco": "62.2 ± 2.9", "uwo": "63.0 ± 3.1"},
    ("PPO", 25, "7M"): {"mean": "50.8 ± 3.4", "wco": "57.9 ± 3.7", "uwo": "59.0 ± 3.7"},
    ("PPO", 25, "1.3B"): {"mean": "56.2 ± 3.5", "wco": "62.9 ± 2.9", "uwo": "63.1 ± 3.2"},
}

NEEDS = {
    "figure_3": "best of n",
    "figure_4": "PPO runs",
    "figure_5": "PPO runs with KL penalty 0",
    "figure_6": "PPO runs of single reward models with two KL penalties or more",
    "figure_7": "PPO runs with two KL penalties or more",
    "figure_8": "best of n or PPO runs with reward models of two sizes or more (PROXY=...)",
    "figure_9": "best of n or PPO runs with reward models of two numbers of pairs or more",
    "figure_10": "PPO runs of mean and uwo",
    "figure_11": "best of n with three reward models or more, or PPO runs with ensembles of two sizes or more",
    "figure_12": "best of n (--uwo-lambdas) or PPO runs of uwo with two lambdas or more",
    "figure_13": "best of n with reward models of two sizes or two numbers of pairs or more",
    "figure_14": "PPO runs of single reward models of two numbers of pairs or more",
}
COMMANDS = (
    "`bash benchmark/ensembles.sh` makes the runs, with NOISE=0, 25 or 35, PROXY=..., PROMPTS=..., KL=..., MEMBERS=... "
    "and LAMBDAS=... in its environment for other label noise, reward models, numbers of pairs, KL penalties, members "
    "and lambdas; `python quickstart/ensembles.py` makes those of a nano study."
)

# number: (what the paper claims, the rule by which it holds here, what must be there); 1, 2, 4, 7: at KL penalty 0
CLAIMS = {
    1: (
        "A single reward model overoptimises.",
        "In more than half of the runs the best gold score of the curve is above the final one by more than 2 standard "
        "errors (over posts) of the final one.",
        "single reward models at KL penalty 0",
    ),
    2: (
        "WCO and UWO reduce overoptimisation.",
        "Of both the mean drop (best minus final gold score) is smaller than that of single runs, and the mean final "
        "gold score is higher. Told: the final one minus that of single runs, of PPO over seeds, of best of n over "
        "members.",
        "single, wco and uwo at KL penalty 0",
    ),
    3: (
        "With a small KL penalty WCO and UWO prevent overoptimisation at no cost.",
        "At the smallest KL penalty above 0, of both the mean drop is at most 2 standard errors of the final gold "
        "score, which is not below the one at penalty 0 by more than 2 standard errors.",
        "wco and uwo at KL penalty 0 and at a small one",
    ),
    4: (
        "Mean optimisation is not conservative.",
        "More than half of its runs overoptimise as in claim 1, and its mean final gold score is below that of WCO and "
        "that of UWO.",
        "mean, wco and uwo at KL penalty 0",
    ),
    5: (
        "Four or five members are enough.",
        "Of mean, WCO and UWO each the fifth member adds to the final gold score at most a tenth of what five members "
        "gain over the single ones' mean.",
        "five reward models",
    ),
    6: (
        "UWO's λ hardly matters.",
        "Over λ the final gold score of UWO differs (largest minus smallest) by less than half of its mean gain over "
        "single runs; of PPO at the KL penalty with the most λ.",
        "single, and uwo with two λ or more",
    ),
    7: (
        "The variance within the ensemble grows under mean, and little under UWO.",
        "From the first tenth of the updates to the last its mean grows under mean by more than half, and under UWO by "
        "less than half of the share by which it grows under mean.",
        "mean and uwo at KL penalty 0",
    ),
    8: (
        "Ensembles almost always beat a single reward model.",
        "In at least 90 % of all settings, KL penalties and objectives the mean final gold score is above that of the "
        "single runs.",
        "ensembles and single reward models",
    ),
    9: (
        "WCO and UWO match or outperform a single reward model at every KL penalty.",
        "At every KL penalty of which all three are there, the mean final gold score of both is not below that of "
        "single runs by more than 2 standard errors.",
        "single, wco and uwo",
    ),
}


@dataclass
class Args:
    runs: str = "runs/ensembles"
    """folder with the runs, at any depth"""
    output_dir: str = "runs/ensembles/figures"
    """folder for everything that is written"""
    noise: float = 25
    """label noise in percent of the figures of one noise level (6 to 9, 11 to 14)"""
    size: str | None = None
    """reward models of the figures that do not compare sizes; default: that of most runs with this noise"""
    pairs: int | None = None
    """pairs that they were trained on in figures that do not compare these; default: that of most such runs"""
    bon_lambda: float = 0.5
    """uwo's weight of the variance that best of n is drawn with (section 5.1)"""
    ppo_lambda: float = 0.1
    """likewise of PPO (section 5.5)"""
    max_kl: float = 150.0
    """KL distance at which curves are cut off (section 5)"""
    pdf: bool = False
    """write each figure as PDF, too"""


class Run(NamedTuple):
    """One curve: a PPO run, or best of n against one objective. The first five fields say in what methods are compared,
    the first eight what is averaged over seeds or members. curve has the columns step (n or update, rising), x (KL), y
    (gold), se (of gold, over posts), proxy and, of best of n, low and high (95 %)."""

    procedure: str  # BoN or PPO
    noise: float  # flipped labels, percent
    size: str  # the reward models' name
    pairs: int
    kl_coef: float  # 0 for BoN
    method: str  # single, mean, wco, uwo
    uwo_lambda: float | None
    members: int
    paths: str  # of the members
    seed: int
    folder: str
    curve: pandas.DataFrame
    variance: pandas.DataFrame | None = None  # of PPO: step and x (update), y (variance within the ensemble)
    samples: pandas.Series = pandas.Series()  # of PPO: the last gold scores by post, where they are there
    wins: tuple[float, float] | None = None  # of BoN: win rate against the single members, mean and sd
    scores: tuple[float, ...] = ()  # of PPO: what each member says of the samples, mean


class Plot(NamedTuple):
    """One panel. Rows are dicts of series, x, y, low and high (the band), by kind:
    kl       x the KL distance, on a square root scale, and proxy, on an axis of its own
    steps    the same over updates
    updates  x the update
    bars     x a category, start where the bars begin
    Of by, where it is not y, there must be two values or more: else there is nothing to compare, and nothing drawn."""

    title: str
    kind: str
    xlabel: str
    rows: list[dict]
    by: str = "y"


# ---- helpers: reading ------------------------------------------------------------------------------------------------


def fail(message: str):
    """End the process with one clear message on standard error and exit code 1."""
    raise SystemExit(f"error: {message}")


def one_line(error: Exception) -> str:
    """Kind and first line of an exception."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


@contextmanager
def reading(what: str):
    """Around the reading of `what`: a damaged file, or code where there should be data, ends the run with a message."""
    try:
        yield
    except Exception as error:  # of as many kinds as there are formats
        fail(f"{what} cannot be read ({one_line(error)})")


def put(path: Path, content: bytes):
    """Write a file beside its place, then rename it: it is there whole or not at all."""
    partial = path.with_name(f"{path.name}.tmp")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        fail(f"{path} could not be written ({one_line(error)}): make room, then give the same command again")


class LeftOut(Exception):
    """Says why a run cannot be used."""


def read_settings(file: Path) -> dict:
    """An args.json."""
    with reading(str(file)):
        return dict(json.loads(file.read_text()))


def read_numbers(file: Path, texts: list[str], numbers: list[str]) -> pandas.DataFrame:
    """These columns of a CSV; an error where one is missing or a number is none."""
    with reading(str(file)):
        frame = pandas.read_csv(file, dtype=dict.fromkeys(texts, str))
        if missing := [column for column in texts + numbers if column not in frame]:
            raise ValueError(f"no column {', '.join(missing)}")
        if not numpy.isfinite(frame[numbers].astype(float)).all(axis=None):
            raise ValueError("a number is missing")
    return frame


def member_setting(path: str) -> tuple[float, str, int]:
    """(label noise in percent, model size, pairs) of a reward model; LeftOut where its run does not tell."""
    file = Path(path).parent / "args.json" if Path(path).name == "model" else Path(path) / "args.json"
    if not file.exists():
        raise LeftOut(f"its reward model {path} has no {file}")
    settings = read_settings(file)
    noise = re.fullmatch(r"noise_(\d+\.?\d*)", Path(str(settings.get("preference_dataset"))).name)
    if not noise:
        data = settings.get("preference_dataset")
        raise LeftOut(f"{file}: preference_dataset {data} is no folder noise_N of gold_label.py")
    with reading(str(file)):
        pairs = round(settings["total_episodes"] / settings["num_train_epochs"])
        return float(noise[1]), Path(settings["model"]).name, pairs


def read_bon(folder: Path, settings: dict, setting: tuple) -> list[Run]:
    """The curves of one folder of best_of_n.py, without the mean over single members, which the figures take."""
    paths, numbers = settings["reward_model_paths"], ["members", "n", "kl", "gold", "gold_low", "gold_high", "proxy"]
    curves = read_numbers(folder / "best_of_n.csv", ["method", "uwo_lambda"], numbers).fillna({"uwo_lambda": ""})
    numbers = ["members", "win_rate", "win_rate_sd"]
    wins, runs = read_numbers(folder / "win_rates.csv", ["method", "uwo_lambda"], numbers), []
    names = ["method", "members", "uwo_lambda"]
    wins = wins.fillna({"uwo_lambda": ""}).set_index(names)
    with reading(str(folder / "best_of_n.csv")):
        for key, frame in curves[curves["method"] != "single"].groupby(names):
            method, k, strength = key
            members = [paths[int(method[7:]) - 1]] if method.startswith("single_") else paths[:k]
            curve = frame.sort_values("n", ignore_index=True)
            curve = curve.rename(columns={"n": "step", "kl": "x", "gold": "y", "gold_low": "low", "gold_high": "high"})
            curve["se"] = (curve["high"] - curve["low"]) / (2 * 1.96)
            what = method.partition("_")[0], float(strength) if strength else None, len(members), " ".join(members)
            win = tuple(wins.loc[key, ["win_rate", "win_rate_sd"]]) if key in wins.index else None
            runs.append(Run("BoN", *setting, 0.0, *what, 0, str(folder), curve, wins=win))
    return runs


def read_ppo(folder: Path, settings: dict, setting: tuple) -> Run:
    """A run of ensembles/ppo.py --gold; LeftOut where it is not complete."""
    paths, file = settings["reward_model_paths"], folder / "metrics.jsonl"
    if not file.exists():
        raise LeftOut("it has no metrics.jsonl")
    with reading(str(file)):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        last, num_updates = lines[-1]["update"] if lines else 0, settings["total_episodes"] // settings["batch_size"]
        keys = {"x": "gold/kl_k2", "y": "gold/score", "se": "gold/se", "proxy": "gold/proxy"}
        curve = [line for line in lines if "gold/score" in line]
        curve = [{"step": line["update"]} | {name: float(line[key]) for name, key in keys.items()} for line in curve]
        key = "objective/reward_model_variance"
        variance = [(line["update"], line["update"], line[key]) for line in lines if line["update"] > 0]
    if last < num_updates or not curve or curve[-1]["step"] < num_updates:
        raise LeftOut(f"it is not complete (update {last} of {num_updates}, {len(curve)} gold scores)")
    samples, scores, method = pandas.Series(), (), "single" if len(paths) == 1 else settings["reward_combination"]
    if (file := folder / "gold_samples.csv").exists():
        names = [f"score_{i + 1}" for i in range(len(paths))]
        table = read_numbers(file, ["id"], ["gold", *names]).set_index("id")
        samples, scores = table["gold"], tuple(table[names].mean())
        if not samples.index.is_unique:
            fail(f"{file}: two rows of post {samples.index[samples.index.duplicated()][0]}")
    which = "PPO", *setting, settings["kl_coef"], method, settings["uwo_lambda"], len(paths), " ".join(paths)
    curve, variance = pandas.DataFrame(curve), pandas.DataFrame(variance, columns=["step", "x", "y"])
    return Run(*which, settings["seed"], str(folder), curve, variance, samples, scores=scores)


def read_runs(root: str) -> tuple[list[Run], list[str]]:
    """The curves of all complete runs below a folder, and what was left out, with the reason."""
    runs, problems, seen = [], [], {}
    for file in sorted(Path(root).rglob("args.json")):
        settings, folder = read_settings(file), file.parent
        ppo = settings.get("stage") == "ppo" and settings.get("gold") is not None
        bon = "stage" not in settings and {"reward_model_paths", "samples", "prompts"} <= set(settings)
        if not ppo and not bon:
            continue
        if lacking := [key for key in PPO_SETTINGS.split() if ppo and key not in settings]:
            fail(f"{file} has no {', '.join(lacking)}")
        try:
            found = {member_setting(path) for path in settings["reward_model_paths"]}
            if len(found) > 1:
                raise LeftOut("its reward models differ in label noise, size or pairs")
            setting = found.pop()
            if bon and not ((folder / "best_of_n.csv").exists() and (folder / "win_rates.csv").exists()):
                raise LeftOut(f"no tables; `python ensembles/best_of_n.py --output-dir {folder} --estimate`")
            new = read_bon(folder, settings, setting) if bon else [read_ppo(folder, settings, setting)]
            key = setting if bon else new[0][:10]
            if key in seen:
                raise LeftOut(f"{seen[key]} is a run of the same settings")
        except LeftOut as error:
            problems.append(f"{folder}: {error.args[0]}")
            continue
        seen[key] = folder
        runs += new
        if ppo and new[0].samples.empty:
            problems.append(f"{folder}: no gold_samples.csv, and so no win rates of it; all else is there")
    return runs, problems


# ---- helpers: choosing, averaging --------------------------------------------------------------------------------


def pick(runs: list[Run], **where) -> list[Run]:
    """The runs with these values."""
    return [run for run in runs if all(getattr(run, key) == value for key, value in where.items())]


def of_method(runs: list[Run], method: str, args: Args) -> list[Run]:
    """Of one procedure's runs those of a method, uwo at --bon-lambda or --ppo-lambda, ensembles with most members."""
    most = max((run.members for run in runs), default=1) if method != "single" else 1
    strength = {"BoN": args.bon_lambda, "PPO": args.ppo_lambda}
    found = pick(runs, method=method, members=most)
    return [run for run in found if method != "uwo" or run.uwo_lambda == strength[run.procedure]]


def values(runs: list[Run], field: str) -> list:
    """What there is of a field, sorted; names of models by size."""
    return sorted({getattr(run, field) for run in runs}, key=size_order if field == "size" else None)


def size_order(name: str) -> tuple:
    """To sort names of models by the size in them: pythia-70m, pythia-1.4b, nano-xs, nano-s, nano-m, others."""
    found, last = re.search(r"([\d.]+)([kmb])\b", name.lower()), re.split(r"\W", name.lower())[-1]
    if found:
        return 0, float(found[1]) * {"k": 1e3, "m": 1e6, "b": 1e9}[found[2]], name
    return 1, {"xs": 0, "s": 1, "m": 2, "l": 3, "xl": 4}.get(last, 5), name


def mean_and_sd(values: Iterable[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (n - 1); 0 for a single value."""
    values = list(values)
    return mean(values), stdev(values) if len(values) > 1 else 0.0


def mean_and_deviation(values) -> str:
    """`mean ± sample standard deviation`, the latter with two values or more."""
    values = numpy.asarray(values, float)
    return f"{values.mean():.3f}" + (f" ± {values.std(ddof=1):.3f}" if len(values) > 1 else "")


def average(curves: list[pandas.DataFrame]) -> pandas.DataFrame:
    """Mean of curves at the steps that all have: x, y with low and high, one sample sd (n - 1) away, and the proxy; a
    single curve keeps its own band, where it has one."""
    if len(curves) == 1:
        return curves[0] if "low" in curves[0] else curves[0].assign(low=curves[0]["y"], high=curves[0]["y"])
    steps = sorted(set.intersection(*(set(curve["step"]) for curve in curves)))
    columns = [column for column in ("x", "y", "proxy") if column in curves[0]]
    stacked = numpy.stack([curve.set_index("step").loc[steps, columns] for curve in curves])  # (runs, steps, columns)
    found, sd = pandas.DataFrame(stacked.mean(0), columns=columns), stacked[:, :, 1].std(0, ddof=1)
    return found.assign(step=steps, low=found["y"] - sd, high=found["y"] + sd)


def curve_rows(series: str, curves: list[pandas.DataFrame], max_x: float = float("inf")) -> list[dict]:
    """Rows of the mean of curves, up to max_x."""
    found = average(curves)
    found = found.loc[found["x"] <= max_x, found.columns.intersection(["step", "x", "y", "low", "high", "proxy"])]
    return [{"series": series, "runs": len(curves)} | row for row in found.to_dict("records")]


def final(run: Run) -> float:
    """Its last gold score."""
    return float(run.curve["y"].iloc[-1])


def error(run: Run) -> float:
    """Standard error (over posts) of its last gold score."""
    return float(run.curve["se"].iloc[-1])


def drop(run: Run) -> float:
    """From its best gold score to its last."""
    return float(run.curve["y"].max()) - final(run)


def bar(series: str, x, runs: list[Run]) -> dict:
    """The final gold score of runs: mean ± sd; of best of n against one ensemble with its 95 % band."""
    y, sd = mean_and_sd(map(final, runs))
    own = len(runs) == 1 and runs[0].procedure == "BoN"
    low, high = runs[0].curve[["low", "high"]].iloc[-1] if own else (y - sd, y + sd)
    start = mean(float(run.curve["y"].iloc[0]) for run in runs)
    return {"series": series, "runs": len(runs), "x": x, "y": y, "low": low, "high": high, "start": start}


def label(run: Run) -> str:
    """A method's name in legends."""
    return f"uwo, λ {run.uwo_lambda:g}" if run.method == "uwo" else run.method


def markdown(rows: list[dict]) -> str:
    """A Markdown table of rows with equal keys."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    cells = [[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


# ---- figures -----------------------------------------------------------------------------------------------------


def paper_figures(runs: list[Run], base: dict, small: float | None, args: Args) -> dict[str, tuple[str, list[Plot]]]:
    """{file name: (title, panels)}. base: noise, size and pairs of what does not compare these; small: the smallest KL
    penalty above 0. A group is {name in the legend: runs}."""
    bon, ppo = pick(runs, procedure="BoN"), pick(runs, procedure="PPO")
    penalties = [0.0, *([small] if small else [])]
    parts = {"BoN": bon} | {f"PPO, KL penalty {kl:g}": pick(ppo, kl_coef=kl) for kl in penalties}

    def by_method(found: list[Run], methods=tuple(METHODS)) -> dict[str, list[Run]]:
        groups = [of_method(found, method, args) for method in methods]
        return {label(mine[0]): mine for mine in groups if mine}

    def at_best_penalty(found: list[Run]) -> dict[str, list[Run]]:
        """Of each method the runs at the KL penalty with the best mean final gold score."""
        groups = {}
        for name, mine in by_method(found).items():
            by_kl = {kl: pick(mine, kl_coef=kl) for kl in values(mine, "kl_coef")}
            scores = {kl: mean(map(final, group)) for kl, group in by_kl.items()}
            best = max(scores, key=scores.get)
            groups[f"{name}, KL penalty {best:g}"] = by_kl[best]
        return groups

    def at_penalties(found: list[Run]) -> dict[str, list[Run]]:
        """Mean and uwo at the penalties 0 and small."""
        groups = {kl: by_method(pick(found, kl_coef=kl), ("mean", "uwo")) for kl in penalties}
        return {f"{name}, KL penalty {kl:g}": mine for kl, group in groups.items() for name, mine in group.items()}

    def comparable(found: list[Run], field: str) -> list[Run]:
        """Of single reward models those alone whose member, by its folder's name, there is at every value of field."""
        singles = pick(found, method="single")
        members = [{Path(run.paths).name for run in pick(singles, **{field: x})} for x in values(singles, field)]
        everywhere = set.intersection(*members) if members else set()
        return [run for run in found if run.method != "single" or not everywhere or Path(run.paths).name in everywhere]

    def single_by(found: list[Run], field: str, name: str) -> dict[str, list[Run]]:
        singles = comparable(pick(found, method="single"), field)
        return {name.format(value): pick(singles, **{field: value}) for value in values(singles, field)}

    def curves(groups: dict[str, list[Run]]) -> list[dict]:
        return [
            row for name, mine in groups.items() for row in curve_rows(name, [run.curve for run in mine], args.max_kl)
        ]

    def variances(groups: dict[str, list[Run]]) -> list[dict]:
        return [row for name, mine in groups.items() for row in curve_rows(name, [run.variance for run in mine])]

    def bars(found: list[Run], field: str, methods=tuple(METHODS)) -> list[dict]:
        """A bar for each method and value of a field."""
        found = comparable(found, field)
        groups = {value: by_method(pick(found, **{field: value}), methods) for value in values(found, field)}
        rows = [bar(name, value, mine) for value, group in groups.items() for name, mine in group.items()]
        return sorted(rows, key=lambda row: list(METHODS).index(row["series"].partition(",")[0]))

    def lambda_bars(found: list[Run]) -> list[dict]:
        """A bar for each number of members and lambda of uwo."""
        found = pick(found, method="uwo")
        keys = [(k, x) for k in values(found, "members") for x in values(pick(found, members=k), "uwo_lambda")]
        return [bar(f"{k} members", x, pick(found, members=k, uwo_lambda=x)) for k, x in keys]

    def by_noise(found: list[Run], group, rows=curves, kind="kl", xlabel="KL") -> list[Plot]:
        """A panel for each noise level."""
        found = {noise: pick(found, **base | {"noise": noise}) for noise in values(runs, "noise")}
        return [Plot(f"{noise:g} % label noise", kind, xlabel, rows(group(mine))) for noise, mine in found.items()]

    def over_updates(found: list[Run], group) -> list[Plot]:
        """The panels of by_noise with updates along the x axis: KL need not rise from one to the next."""
        plots = by_noise(found, group, kind="steps", xlabel="update")
        rows = [[row | {"x": row["step"]} for row in plot.rows] for plot in plots]
        return [plot._replace(title=f"{plot.title}, by update", rows=x) for plot, x in zip(plots, rows, strict=True)]

    def by_part(rows, xlabel: str, free: str = "") -> list[Plot]:
        """A panel of bars for best of n and for PPO at the penalties 0 and small; `free`: what is compared."""
        fixed = {key: value for key, value in base.items() if key != free}
        return [Plot(title, "bars", xlabel, rows(pick(found, **fixed)), "x") for title, found in parts.items()]

    noise, size, pairs = base["noise"], base["size"], base["pairs"]
    flips, amount = f"{noise:g} % label noise", f"{pairs:,} pairs"
    by_size = curves(single_by(pick(bon, noise=noise, pairs=pairs), "size", "{}"))
    by_pairs = {
        key: single_by(pick(found, noise=noise, size=size), "pairs", "{:,} pairs") for key, found in parts.items()
    }
    by_pairs = [Plot(key, "kl", "KL", curves(group), "series") for key, group in by_pairs.items()]
    by_kl = Plot("", "kl", "KL", curves(single_by(pick(ppo, **base), "kl_coef", "KL penalty {:g}")), "series")
    found, some = {}, f"{size}, {amount}"
    found[3] = f"Best of n, {some}", by_noise(bon, by_method)
    plots = by_noise(ppo, at_best_penalty) + over_updates(ppo, at_best_penalty)
    found[4] = f"PPO at each method's best KL penalty, {some}", plots
    plots = by_noise(pick(ppo, kl_coef=0), by_method) + over_updates(pick(ppo, kl_coef=0), by_method)
    found[5] = f"PPO without KL penalty, {some}", plots
    found[6] = f"PPO, single reward models, {flips}, {some}", [by_kl]
    by_kl = Plot("", "bars", "KL penalty", bars(pick(ppo, **base), "kl_coef"), "x")
    found[7] = f"PPO: final gold by KL penalty, {flips}, {some}", [by_kl]
    plots = by_part(lambda x: bars(x, "size"), "reward models", "size")
    found[8] = f"Final gold by size of the reward models, {flips}, {amount}", plots
    found[9] = f"Final gold by number of pairs, {flips}, {size}", by_part(lambda x: bars(x, "pairs"), "pairs", "pairs")
    plots = by_noise(ppo, at_penalties, variances, "updates", "update")
    found[10] = f"PPO: variance within the ensemble, {some}", plots
    plots = by_part(lambda x: bars(x, "members", ("mean", "wco", "uwo")), "members")
    found[11] = f"Final gold by number of members, {flips}, {some}", plots
    found[12] = f"Final gold of uwo by λ, {flips}, {some}", by_part(lambda_bars, "λ")
    plots = [Plot(f"by size, {amount}", "kl", "KL", by_size, "series"), by_pairs[0]._replace(title=f"by pairs, {size}")]
    found[13] = f"Best of n, single reward models, {flips}", plots
    found[14] = f"PPO, single reward models by number of pairs, {flips}, {size}", by_pairs[1:]
    return {f"figure_{number}": figure for number, figure in found.items()}


def draw_plot(axis, plot: Plot, order: list[str]):
    """Draw a panel. Series whose first words are methods, each once, have the methods' colors and markers, others those
    of their place in `order`."""
    frame = pandas.DataFrame(plot.rows)
    names = list(dict.fromkeys(frame["series"]))
    places = sorted(set(frame["x"]), key=lambda x: size_order(x) if isinstance(x, str) else x)
    words = [name.partition(",")[0] for name in names]
    methods = set(words) <= set(METHODS) and len(set(words)) == len(words)
    right = axis.twinx() if plot.kind in ("kl", "steps") else None
    for i, (name, word) in enumerate(zip(names, words, strict=True)):
        place = order.index(name) % 10
        color, marker = METHODS[word] if methods else (f"C{place}", "os^Dv<>Pp*"[place])
        mine = frame[frame["series"] == name]
        x, y, low, high = (mine[column].to_numpy() for column in ("x", "y", "low", "high"))
        if plot.kind == "bars":
            x = [places.index(place) + 0.8 * ((i + 0.5) / len(names) - 0.5) for place in x]
            start = frame["start"].mean()
            axis.bar(x, y - start, 0.8 / len(names), bottom=start, color=color, alpha=0.5)
            style = {"color": color, "marker": marker, "ms": 5, "mec": "black", "ecolor": "black"}
            axis.errorbar(x, y, [y - low, high - y], ls="", label=name, **style)
        else:
            every = max(1, len(x) // 10)
            axis.plot(x, y, color=color, marker=marker, ms=4, markevery=(i % every, every), label=name)
            axis.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
        if right:
            right.plot(x, mine["proxy"], color=color, ls="--", lw=1)
            right.set_ylabel("proxy (dashed)")
    if plot.kind == "bars":
        axis.axhline(frame["start"].mean(), color="gray", linewidth=0.8)
        axis.set_xticks(range(len(places)), [x if isinstance(x, str) else f"{x:,.10g}" for x in places])
        axis.set_xlim(-0.6, len(places) - 0.4)
    if plot.kind == "kl":
        ticks = [float(f"{x:.2g}") for x in numpy.linspace(0, max(places) ** 0.5, 6) ** 2]
        axis.set_xscale("function", functions=(lambda x: numpy.sqrt(numpy.maximum(x, 0)), numpy.square))
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_xlim(0, 1.02 * max(max(places), ticks[-1]) or 1)
    axis.set_title(plot.title, size=9)
    axis.set(xlabel=plot.xlabel, ylabel="variance" if plot.kind == "updates" else "gold")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2, fontsize=8)


def save_figure(args: Args, name: str, title: str, plots: list[Plot]) -> bool:
    """Write a figure and its CSV; nothing, and False, where no panel has anything to show."""
    plots = [plot for plot in plots if len({row[plot.by] for row in plot.rows}) > (plot.by != "y")]
    if not plots:
        return False
    figure = Figure(figsize=(max(6.0, 4.4 * len(plots)), 4.6), layout="constrained")
    order = list(dict.fromkeys(row["series"] for plot in plots for row in plot.rows))
    for axis, plot in zip(figure.subplots(1, len(plots), squeeze=False)[0], plots, strict=True):
        draw_plot(axis, plot, order)
    figure.suptitle(title, size=9.5)
    for kind in ("png", "pdf") if args.pdf else ("png",):
        figure.savefig(Path(args.output_dir) / f"{name}.{kind}", dpi=90)
    rows = [{"panel": plot.title} | row for plot in plots for row in plot.rows]
    put(Path(args.output_dir) / f"{name}.csv", pandas.DataFrame(rows).to_csv(index=False, float_format="%.6g").encode())
    return True


# ---- win rates, claims -------------------------------------------------------------------------------------------


def setting_order(key: tuple) -> tuple:
    """To sort what Run begins with: procedure, noise, size, pairs, kl_coef, method, uwo_lambda, members."""
    return *key[:2], size_order(key[2]), *key[3:5], list(METHODS).index(key[5]), key[6] or 0.0, key[7]


def share_won(mine: pandas.Series, other: pandas.Series) -> float:
    """Share of the posts of both on which `mine` is higher, a tie half."""
    posts = mine.index.intersection(other.index)
    mine, other = mine[posts].to_numpy(), other[posts].to_numpy()
    return float(numpy.where(numpy.isclose(mine, other, rtol=1e-6, atol=1e-6), 0.5, mine > other).mean())


def win_rate_rows(runs: list[Run], args: Args) -> list[dict]:
    """Win rates of ensembles against single members (appendix F.9): mean and sample sd over the members. PPO: of runs
    of the same setting, KL penalty and seed, of each member the mean over seeds."""
    rows = []
    for key in sorted({run[:8] for run in runs if run.method != "single"}, key=setting_order):
        there = [run for run in runs if run[:5] == key[:5]]  # the same procedure, setting and KL penalty
        mine, singles = [run for run in there if run[:8] == key], pick(there, method="single")
        if mine[0].members < max(run.members for run in there) or key[0] == "BoN" and mine[0].wins is None:
            continue
        if key[0] == "BoN":
            (rate, sd), against = mine[0].wins, len(singles)
        else:
            shares: dict[str, list[float]] = {}
            met = [(run, single) for run in mine for single in singles if run.seed == single.seed]
            for run, single in met:
                if set(run.samples.index) & set(single.samples.index):
                    shares.setdefault(single.paths, []).append(share_won(run.samples, single.samples))
            if not shares:
                continue
            (rate, sd), against = mean_and_sd(map(mean, shares.values())), len(shares)
        row = dict(zip(Run._fields, key, strict=False)) | {"win_rate": rate, "win_rate_sd": sd, "against": against}
        model = TABLE_7.get(row["size"], "44M")
        paper = PAPER.get((key[0], row["noise"], model), {}).get(row["method"])
        drawn = paper and mine[0] in of_method(there, row["method"], args)  # uwo at the lambda of the figures
        rows.append(row | {"paper": f"{paper} ({model})" if drawn else ""})
    return rows


def gains(mine: list[Run], singles: list[Run]) -> list[float]:
    """Final gold of an ensemble's runs minus that of single runs: of PPO for each seed that both have, of the means; of
    best of n for each member."""
    if mine[0].procedure == "BoN":
        return [final(mine[0]) - final(single) for single in singles]
    seeds = [seed for seed in values(mine, "seed") if pick(singles, seed=seed)]
    return [mean(map(final, pick(mine, seed=seed))) - mean(map(final, pick(singles, seed=seed))) for seed in seeds]


def growth(run: Run) -> float:
    """Mean variance of the last tenth of the updates over that of the first."""
    y, tenth = run.variance["y"], -(-len(run.variance) // 10)
    return float(y.iloc[-tenth:].mean() / y.iloc[:tenth].mean())


class Group(NamedTuple):
    """What the claims compare: means over runs."""

    final: float
    drop: float
    noise: float  # 2 standard errors of the final gold score
    share: float  # of the runs whose drop is above their own noise
    short: str  # name and final gold score, mean ± sd
    text: str  # and all else


def group_of(runs: list[Run]) -> Group:
    """The numbers of runs of one method."""
    finals, drops, noises = [final(run) for run in runs], [drop(run) for run in runs], [2 * error(run) for run in runs]
    count = sum(fall > noise for fall, noise in zip(drops, noises, strict=True))
    name = label(runs[0]) + (f", {runs[0].members} members" if runs[0].members > 1 else "")
    name += f", KL penalty {runs[0].kl_coef:g}" if runs[0].procedure == "PPO" else ""
    short = f"{name}: final {mean_and_deviation(finals)}"
    text = f"{short}, drop {mean_and_deviation(drops)} (2 se {mean(noises):.3f}; {count} of {len(runs)} above)"
    return Group(mean(finals), mean(drops), mean(noises), count / len(runs), short, text)


def verdicts(here: list[Run], small: float | None, args: Args) -> dict[int, tuple[bool, str]]:
    """{number: (whether it holds, the numbers)} of the claims of which there are runs. here: the runs of one procedure
    and setting; small: the smallest KL penalty above 0."""
    penalties, found, gain = values(here, "kl_coef"), {}, ""
    runs = {(kl, method): of_method(pick(here, kl_coef=kl), method, args) for kl in penalties for method in METHODS}
    sizes, at_0 = [(m, k) for m in ("mean", "wco", "uwo") for k in (3, 4, 5)], pick(here, kl_coef=0)
    runs |= {(0, method, k): of_method(pick(at_0, members=k), method, args) for method, k in sizes}
    most = max((run.members for run in here), default=0)
    uwo = {kl: pick(here, kl_coef=kl, method="uwo", members=most) for kl in penalties if runs[kl, "single"]}
    widest = max(uwo, key=lambda kl: len(values(uwo[kl], "uwo_lambda")), default=0)  # the penalty with most lambdas
    runs |= {("λ", x): pick(uwo[widest], uwo_lambda=x) for x in values(uwo.get(widest, []), "uwo_lambda")}

    def have(*keys) -> list[Group]:
        """The groups with these keys; [] where one has no runs."""
        return [group_of(runs[key]) for key in keys] if all(runs.get(key) for key in keys) else []

    def whole(groups: list[Group]) -> str:
        return "; ".join(group.text for group in groups)

    if x := have((0, "single")):
        found[1] = x[0].share > 0.5, whole(x)
    if x := have((0, "single"), (0, "wco"), (0, "uwo")):
        for method in ("wco", "uwo"):
            above = gains(runs[0, method], runs[0, "single"])
            gain += f"; {method} minus single: {mean_and_deviation(above) if above else 'no seed in common'}"
        found[2] = all(e.drop < x[0].drop and e.final > x[0].final for e in x[1:]), whole(x) + gain
    if x := have((small, "wco"), (small, "uwo"), (0, "wco"), (0, "uwo")):
        pairs = list(zip(x[:2], x[2:], strict=True))
        found[3] = all(e.drop <= e.noise and e.final >= free.final - e.noise for e, free in pairs), whole(x)
    if x := have((0, "mean"), (0, "wco"), (0, "uwo")):
        found[4] = x[0].share > 0.5 and all(x[0].final < e.final for e in x[1:]), whole(x)
    if x := have((0, "single"), *((0, *size) for size in sizes)):
        fours, fives = x[2::3], x[3::3]  # of mean, wco, uwo
        enough = [b.final - a.final <= 0.1 * (b.final - x[0].final) for a, b in zip(fours, fives, strict=True)]
        found[5] = all(enough), "; ".join(group.short for group in x)
    if x := have((widest, "single"), *(key for key in runs if key[0] == "λ")):
        finals = [group.final for group in x[1:]]
        if len(finals) > 1:
            hardly = max(finals) - min(finals) < 0.5 * (mean(finals) - x[0].final)
            found[6] = hardly, "; ".join(group.short for group in x)
    both = {method: [run for run in runs.get((0, method), []) if run.procedure == "PPO"] for method in ("mean", "uwo")}
    if all(both.values()):
        grown = {method: [growth(run) for run in group] for method, group in both.items()}
        under_mean, under_uwo = mean(grown["mean"]), mean(grown["uwo"])
        text = "; ".join(f"{method}: times {mean_and_deviation(grown[method])}" for method in both)
        found[7] = under_mean > 1.5 and under_uwo - 1 < 0.5 * (under_mean - 1), text
    if x := [x for kl in penalties if (x := have((kl, "single"), (kl, "wco"), (kl, "uwo")))]:
        matched = all(e.final >= single.final - e.noise for single, *both in x for e in both)
        found[9] = matched, "; ".join(whole(groups) for groups in x)
    return found


def claims_table(runs: list[Run], base: dict, small: float | None, args: Args) -> list[dict]:
    """A row for each claim, procedure and noise level, at the size and number of pairs of `base`."""
    rows = []

    def add(number: int, procedure: str, noise: str, holds: bool | None, numbers: str):
        verdict = {True: "holds", False: "does not hold", None: "no runs"}[holds]
        row = {"claim": number, "text": CLAIMS[number][0], "procedure": procedure, "label noise, %": noise}
        rows.append(row | {"numbers": numbers, "verdict": verdict, "rule": CLAIMS[number][1]})

    for procedure, numbers in (("BoN", (1, 2, 4, 5, 6)), ("PPO", (1, 2, 3, 4, 6, 7, 9))):
        for noise in values(runs, "noise"):
            here = pick(runs, procedure=procedure, **base | {"noise": noise})
            found = verdicts(here, small, args)
            for number in numbers:
                add(number, procedure, f"{noise:g}", *found.get(number, (None, "")))
        above, against = 0, 0
        for key in dict.fromkeys(run[:5] for run in runs if run.procedure == procedure):
            there = [run for run in runs if run[:5] == key]
            single, *groups = [of_method(there, method, args) for method in METHODS]
            met = [group for group in groups if group and single]
            above += sum(mean(map(final, group)) > mean(map(final, single)) for group in met)
            against += len(met)
        text = f"{above} of {against} above" if against else ""
        add(8, procedure, "all", above >= 0.9 * against if against else None, text)
    return sorted(rows, key=lambda row: row["claim"])


def by_first_member(runs: list[Run]) -> tuple[list[Run], list[dict]]:
    """(the runs without those of PPO that have their members in a rarer order, a table that compares the orders). The
    value model starts from the first member (Detail 22): the order is a setting. Kept is the one with most runs, of
    equally many the first by name. A row for each objective and order where there are two, with the mean scores that
    the first member and the one of the others who likes them most give to the last samples."""
    kept, rows, ensembles = [], [], {}
    for run in runs:
        if run.procedure == "PPO":
            ensembles.setdefault(" ".join(sorted(run.paths.split())), []).append(run)
        else:
            kept.append(run)
    for group in ensembles.values():
        orders = [
            paths for paths, _ in sorted(Counter(run.paths for run in group).items(), key=lambda x: (-x[1], x[0]))
        ]
        kept += pick(group, paths=orders[0])
        for key in dict.fromkeys(run[:8] for run in group):
            there = [[run for run in group if run[:8] == key and run.paths == paths] for paths in orders]
            there = [mine for mine in there if mine]
            for mine in there if len(there) > 1 else []:
                row = {"objective": label(mine[0]), "KL penalty": mine[0].kl_coef, "runs": len(mine)}
                row |= {"first member": mine[0].paths.split()[0], "its score": "", "the others' best": ""}
                numbers = {"final gold": map(final, mine), "drop": map(drop, mine)}
                numbers |= {"final KL": (run.curve["x"].iloc[-1] for run in mine)}
                if told := [run.scores for run in mine if run.scores]:
                    numbers |= {"its score": (x[0] for x in told), "the others' best": (max(x[1:]) for x in told)}
                rows.append(row | {name: mean_and_deviation(list(found)) for name, found in numbers.items()})
    return kept, rows


def most_common(runs: list[Run], field: str, wanted):
    """The value of a field that was asked for, else that of most run folders."""
    counts = Counter(value for _, value in sorted({(run.folder, getattr(run, field)) for run in runs}))
    if wanted is not None and wanted not in counts:
        there = ", ".join(str(x).removesuffix(".0") for x in values(runs, field))
        fail(f"--{field} {wanted}: no such runs; there are {there}")
    return counts.most_common(1)[0][0] if wanted is None else wanted


def main(args: Args):
    # ---- runs ------------------------------------------------------------------------------------
    runs, problems = read_runs(args.runs)
    if not runs:
        why = "".join(f"\n  {problem}" for problem in problems)
        fail(f"{args.runs}: no best-of-n or PPO runs with gold scores there. {COMMANDS.replace('`', '')}{why}")
    (runs, orders), everything = by_first_member(runs), runs
    rarer = {run.folder for run in everything} - {run.folder for run in runs}
    problems += [f"{x}: in the table by first member only; its members are in a rarer order" for x in sorted(rarer)]
    base = {"noise": most_common(runs, "noise", args.noise)}
    for field in ("size", "pairs"):
        base[field] = most_common(pick(runs, **base), field, getattr(args, field))
    here = pick(runs, **base)
    small = min((run.kl_coef for run in here if run.kl_coef > 0), default=None)
    for procedure, flag, wanted in (("BoN", "bon", args.bon_lambda), ("PPO", "ppo", args.ppo_lambda)):
        there = values(pick(here, procedure=procedure, method="uwo"), "uwo_lambda")
        if there and wanted not in there:
            problems.append(f"--{flag}-lambda {wanted:g}: of uwo there is λ {', '.join(f'{x:g}' for x in there)}")

    # ---- figures and tables ----------------------------------------------------------------------
    figures, wins = paper_figures(runs, base, small, args), win_rate_rows(runs, args)
    claims = claims_table(runs, base, small, args)
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    missing = [f"{name}: {NEEDS[name]}" for name, figure in figures.items() if not save_figure(args, name, *figure)]
    missing += [] if wins else ["win rates: best of n, or PPO runs with gold_samples.csv"]
    for row in claims:
        if row["verdict"] == "no runs":
            what = f"claim {row['claim']}, {row['procedure']}, label noise {row['label noise, %']} %"
            missing.append(f"{what}: {CLAIMS[row['claim']][2]}")
    put(folder / "claims.csv", pandas.DataFrame(claims).to_csv(index=False).encode())
    if orders:
        put(folder / "first_member.csv", pandas.DataFrame(orders).to_csv(index=False).encode())
    ppo = sorted(pick(everything, procedure="PPO"), key=lambda run: setting_order(run[:8]) + (run.paths, run.seed))
    if ppo:
        golds = [run.curve["y"] for run in ppo]
        golds = [{"first": gold.iloc[0], "best": gold.max(), "final": gold.iloc[-1]} for gold in golds]
        rows = [dict(zip(Run._fields, run, strict=False)) for run in ppo]
        rows = [{key: row[key] for key in Run._fields[:10]} | gold for row, gold in zip(rows, golds, strict=True)]
        put(folder / "ppo_runs.csv", pandas.DataFrame(rows).to_csv(index=False, float_format="%.6g").encode())
    put(folder / "win_rates.csv", pandas.DataFrame(wins).to_csv(index=False, float_format="%.6g").encode())

    # ---- figures.md ------------------------------------------------------------------------------
    text = f"# Reward model ensembles\n\n`python ensembles/figures.py {shlex.join(sys.argv[1:])}`\n\n"
    text += f"Where nothing else is said: {base['noise']:g} % label noise, reward models {base['size']} trained on "
    text += f"{base['pairs']:,} pairs. ± is one sample standard deviation, se the standard error over posts.\n\n"
    text += "## Claims\n\n"
    text += "".join(f"{number}. {claim} *Holds if:* {rule}\n" for number, (claim, rule, _) in CLAIMS.items()) + "\n"
    text += markdown([{key: row[key] for key in row if key not in ("text", "rule")} for row in claims]) + "\n"
    if wins:
        shown = [row | {"win rate, %": f"{100 * row['win_rate']:.1f} ± {100 * row['win_rate_sd']:.1f}"} for row in wins]
        columns = "procedure noise size pairs kl_coef method uwo_lambda members against".split()
        columns += ["win rate, %", "paper"]
        shown = [{key: "" if row[key] is None else row[key] for key in columns} for row in shown]
        text += "## Win rates against single reward models\n\nMean ± standard deviation over the single reward models, "
        text += "as many as `against` says. The paper's: "
        text += "table 6 (44M reward models) and 7 (7M and 1.3B), uwo with λ 0.5, PPO at the KL penalties of figure 4."
        text += f"\n\n{markdown(shown)}\n"
    if orders:
        text += "## By first member\n\nPPO's value model starts from the first reward model. Figures and claims are of "
        text += f"the order with most runs.\n\n{markdown(orders)}\n"
    for title, lines in (("Missing", [*missing, COMMANDS] if missing else []), ("Left out", problems)):
        text += f"## {title}\n\n" + "".join(f"- {line}\n" for line in lines) + "\n" if lines else ""
    put(folder / "figures.md", (text.rstrip() + "\n").encode())
    print(text)


if __name__ == "__main__":
    main(tyro.cli(Args))
