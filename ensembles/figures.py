"""Figures 3 to 14 of "Reward Model Ensembles Help Mitigate Overoptimization", its win rates (appendix F.9), figures of
what else ensembles/study.py asks, and verdicts on what is claimed, with intervals, from whatever runs are there.

    python ensembles/figures.py --runs runs/ensembles --output-dir benchmark/results/ensembles

Reads, in every folder below --runs:
- args.json, best_of_n.csv and win_rates.csv of ensembles/best_of_n.py;
- args.json, metrics.jsonl and gold_samples.csv of ensembles/ppo.py --gold: the last gold-scored samples, for win rates.
A run's setting is that of its reward models, whose args.json lie where its own says, relative to the working directory:
label noise (of the folder noise_N that gold_label.py wrote), model size (the name of --model), number of pairs (of
numbers that differ by less than a tenth the smallest: equal answers are left out), number of bases (SFT models that
they were trained from). One that average.py wrote is the method warm. What else a run does
otherwise than by default (where its value model starts, members not standardised, lambda, value clipping) is its setup.

Writes runs.jsonl, every curve as it was read, from which --runs draws the same again without the runs' folders;
figure_3 to figure_14, leak, bases and standardised as PNG (--pdf: as PDF, too) and as CSV of exactly what is
drawn; claims.csv and methods.csv; later.csv, what was asked after the runs; win_rates.csv; ppo_runs.csv, the first,
best and final gold score of each PPO run;
figures.md: the tables, win rates beside the paper's, what is missing, what was left out. Gold is drawn on the left
axis, solid, the proxy on the right one, dashed; figures 4 and 5 have panels over updates, too. Lines are means over
runs at equal updates in a band of one sample standard deviation: over seeds, of `single` over members and seeds. A
best-of-n ensemble has best_of_n.py's 95 % band over prompts. Bars begin at the gold score before optimisation. By size
and by pairs, single reward models are those whose member, by its folder's name, is there at each. Final is the last
gold score of a run, of best of n that of the largest n. Ensembles are those with the most members, where members are
not compared.

Verdicts are of PPO. A replicate is a seed; two runs are compared that have the seed and a reward model in common. Of
the paired differences the mean has a 95 % t interval over the replicates (n - 1 degrees of freedom): `better` and
`worse` where it excludes 0, `no worse` where its lower end is above -0.05, else `these runs cannot tell`.
"""

import json
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

import numpy
import pandas
import tyro
from matplotlib.figure import Figure
from scipy import stats

METHODS = {
    "single": ("C0", "o"),
    "mean": ("C1", "s"),
    "wco": ("C2", "^"),
    "uwo": ("C3", "D"),
    "warm": ("C4", "v"),
}  # color, marker

BON_CURVE = ["step", "x", "y", "se", "proxy", "low", "high"]
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
    "leak": "PPO runs of wco whose value model starts from a reward model (python ensembles/study.py)",
    "bases": "PPO runs of ensembles whose members have several bases (python ensembles/study.py)",
    "standardised": "PPO runs with --no-standardise-members and --value-start sft (python ensembles/study.py)",
}
COMMANDS = (
    "`bash benchmark/ensembles.sh` makes the runs, with NOISE=0, 25 or 35, PROXY=..., PROMPTS=..., KL=..., MEMBERS=... "
    "and LAMBDAS=... in its environment for other label noise, reward models, numbers of pairs, KL penalties, members "
    "and lambdas; `python ensembles/study.py` makes those of a nano study."
)

NO_WORSE = -0.05  # gold: an interval that ends above this is `no worse`
EQUAL_KL = (5, 10, 20, 50)  # nats at which gold scores are compared
EARLY = (3, 6)  # updates at which the gold scores of the leak are compared
# what a run of PPO does otherwise than by default, in the text of its setup
VALUE_FROM_REWARD, RAW = "value model from the first reward model", "not standardised"


@dataclass
class Args:
    runs: str = "runs/ensembles"
    """folder with the runs, at any depth, or the runs.jsonl of an earlier call"""
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
    """KL distance at which curves over KL are cut off (section 5)"""
    pdf: bool = False
    """write each figure as PDF, too"""


class Run(NamedTuple):
    """One curve: a PPO run, or best of n against one objective. COMPARED fields say in what methods are compared,
    AVERAGED ones what is averaged over seeds or members. curve has the columns step (n or update, rising), x (KL), y
    (gold), se (of gold, over posts), proxy and, of best of n, low and high (95 %)."""

    procedure: str  # BoN or PPO
    noise: float  # flipped labels, percent
    size: str  # the reward models' name
    pairs: int
    bases: int  # from which the reward models were trained
    setup: str  # what is not as by default
    kl_coef: float  # 0 for BoN
    method: str  # single, mean, wco, uwo, warm
    uwo_lambda: float | None
    members: int
    paths: str  # of the members
    seed: int
    folder: str
    curve: pandas.DataFrame
    variance: pandas.DataFrame | None = None  # of PPO: step and x (update), y (variance within the ensemble)
    samples: pandas.Series = pandas.Series()  # of PPO: the last gold scores by post, where they are there
    wins: tuple[float, float] | None = None  # of BoN: win rate against the single members, mean and sd
    made_of: frozenset[str] = frozenset()  # the reward models, of warm those that were averaged
    likings: pandas.DataFrame | None = None  # of PPO: step and x (update), y (score by member 1 less the others' mean)


COMPARED, AVERAGED = Run._fields[:7], Run._fields[:10]


def fields(run: Run, names: Iterable[str]) -> tuple:
    """These fields of a run."""
    return tuple(getattr(run, name) for name in names)


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


def member_setting(path: str) -> tuple[tuple[float, str, int], set[str], frozenset[str]]:
    """(label noise in percent, model size, pairs) of a reward model, the SFT models that it was trained from, and the
    reward models that were averaged, or its own path; LeftOut where its run does not tell."""
    file = Path(path).parent / "args.json" if Path(path).name == "model" else Path(path) / "args.json"
    if not file.exists():
        raise LeftOut(f"its reward model {path} has no {file}")
    settings = read_settings(file)
    if settings.get("stage") == "average":
        found = [member_setting(member) for member in settings["reward_model_paths"]]
        if len({setting for setting, _, _ in found}) > 1:
            raise LeftOut(f"{file}: its members differ in label noise, size or pairs")
        return found[0][0], set.union(*(x for _, x, _ in found)), frozenset().union(*(x for _, _, x in found))
    noise = re.fullmatch(r"noise_(\d+\.?\d*)", Path(str(settings.get("preference_dataset"))).name)
    if not noise:
        data = settings.get("preference_dataset")
        raise LeftOut(f"{file}: preference_dataset {data} is no folder noise_N of gold_label.py")
    with reading(str(file)):
        pairs = round(settings["total_episodes"] / settings["num_train_epochs"])
        setting = float(noise[1]), Path(settings["model"]).name, pairs
        return setting, {settings["sft_model_path"]}, frozenset([path])


def setup_of(settings: dict) -> str:
    """What a run of ppo.py does otherwise than by default. One that does not say is of the time before these flags."""
    parts = [VALUE_FROM_REWARD] * (settings.get("value_start", "reward") == "reward")
    parts += [RAW] * (not settings.get("standardise_members", False))
    lam, clip = settings.get("lam", 0.95), settings.get("cliprange_value", 0.2)
    parts += [f"λ of GAE {lam:g}"] * (lam != 0.95)
    parts += ["no value clipping" if clip > 1e9 else f"value clipping {clip:g}"] * (clip != 0.2)
    return ", ".join(parts)


def read_bon(folder: Path, settings: dict, setting: tuple, made_of: frozenset[str]) -> list[Run]:
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
            curve = curve.assign(se=(curve["high"] - curve["low"]) / (2 * 1.96))[BON_CURVE]
            name = method.partition("_")[0]
            name = "warm" if name == "single" and made_of != set(paths) else name
            what = name, float(strength) if strength else None, len(members), " ".join(members)
            win = tuple(wins.loc[key, ["win_rate", "win_rate_sd"]]) if key in wins.index else None
            setup = "" if settings.get("standardise_members") else RAW
            runs.append(Run("BoN", *setting, setup, 0.0, *what, 0, str(folder), curve, wins=win, made_of=made_of))
    return runs


def read_ppo(folder: Path, settings: dict, setting: tuple, made_of: frozenset[str]) -> Run:
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
        names = [f"objective/reward_model_{i + 1}" for i in range(len(paths))]
        told = [line for line in lines if names[0] in line] if len(names) > 1 else []
        likings = [(line["update"], line[names[0]] - mean(line[name] for name in names[1:])) for line in told]
    if last < num_updates or not curve or curve[-1]["step"] < num_updates:
        raise LeftOut(f"it is not complete (update {last} of {num_updates}, {len(curve)} gold scores)")
    samples, method = pandas.Series(), "single" if len(paths) == 1 else settings["reward_combination"]
    method = "warm" if len(paths) == 1 and made_of != set(paths) else method
    if (file := folder / "gold_samples.csv").exists():
        samples = read_numbers(file, ["id"], ["gold"]).set_index("id")["gold"]
        if not samples.index.is_unique:
            fail(f"{file}: two rows of post {samples.index[samples.index.duplicated()][0]}")
    which = "PPO", *setting, setup_of(settings), settings["kl_coef"], method, settings["uwo_lambda"], len(paths)
    curve, variance = pandas.DataFrame(curve), pandas.DataFrame(variance, columns=["step", "x", "y"])
    likings = pandas.DataFrame([(step, step, y) for step, y in likings], columns=["step", "x", "y"])
    where = " ".join(paths), settings["seed"], str(folder)
    return Run(*which, *where, curve, variance, samples, made_of=made_of, likings=likings)


def as_line(run: Run) -> str:
    """A run as a line of runs.jsonl: its frames as {column: values}, its samples as {post: gold}."""
    frames = {key: x.to_dict("list") for key, x in run._asdict().items() if isinstance(x, pandas.DataFrame)}
    others = {"samples": run.samples.to_dict(), "made_of": sorted(run.made_of)}
    return json.dumps(run._asdict() | frames | others) + "\n"


def from_line(line: str) -> Run:
    """The run of a line of runs.jsonl."""
    found = json.loads(line)
    frames = {key: pandas.DataFrame(found[key]) for key in ("curve", "variance", "likings") if found[key] is not None}
    samples = pandas.Series(found["samples"], dtype=float)
    others = {"wins": found["wins"] and tuple(found["wins"]), "made_of": frozenset(found["made_of"])}
    return Run(**found | frames | others | {"samples": samples})


def read_runs(root: str) -> tuple[list[Run], list[str]]:
    """The curves of all complete runs below a folder or in a runs.jsonl, and what was left out, with the reason."""
    if Path(root).is_file():
        with reading(root):
            return [from_line(line) for line in Path(root).read_text().splitlines()], []
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
            found = [member_setting(path) for path in settings["reward_model_paths"]]
            if len({setting for setting, _, _ in found}) > 1:
                raise LeftOut("its reward models differ in label noise, size or pairs")
            setting = *found[0][0], len(set().union(*(bases for _, bases, _ in found)))
            made_of = frozenset().union(*(members for _, _, members in found))
            if bon and not ((folder / "best_of_n.csv").exists() and (folder / "win_rates.csv").exists()):
                raise LeftOut(f"no tables; `python ensembles/best_of_n.py --output-dir {folder} --estimate`")
            what = folder, settings, setting, made_of
            new = read_bon(*what) if bon else [read_ppo(*what)]
            key = (
                (setting, new[0].setup, *settings["reward_model_paths"])
                if bon
                else fields(new[0], (*AVERAGED, "paths", "seed"))
            )
            if key in seen:
                raise LeftOut(f"{seen[key]} is a run of the same settings")
        except LeftOut as error:
            problems.append(f"{folder}: {error.args[0]}")
            continue
        seen[key] = folder
        runs += new
        if ppo and new[0].samples.empty:
            problems.append(f"{folder}: no gold_samples.csv, and so no win rates of it; all else is there")
    levels: dict[int, int] = {}
    for pairs in sorted({run.pairs for run in runs}):
        near = [level for level in levels.values() if pairs < 1.1 * level]
        levels[pairs] = max(near, default=pairs)
    runs = [run._replace(pairs=levels[run.pairs]) for run in runs]
    return runs, problems


# ---- helpers: choosing, averaging --------------------------------------------------------------------------------


def pick(runs: list[Run], **where) -> list[Run]:
    """The runs with these values."""
    return [run for run in runs if all(getattr(run, key) == value for key, value in where.items())]


def of_method(runs: list[Run], method: str, args: Args) -> list[Run]:
    """Of one procedure's runs those of a method, uwo at --bon-lambda or --ppo-lambda, ensembles with most members."""
    most = max((run.members for run in runs), default=1) if method not in ("single", "warm") else 1
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

    def curves(groups: dict[str, list[Run]], max_kl: float = args.max_kl) -> list[dict]:
        return [row for name, mine in groups.items() for row in curve_rows(name, [run.curve for run in mine], max_kl)]

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
        """The panels of by_noise with updates along the x axis, whole: KL need not rise from one to the next."""
        plots = by_noise(found, group, lambda groups: curves(groups, float("inf")), "steps", "update")
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


def question_figures(everything: list[Run], base: dict, args: Args) -> dict[str, tuple[str, list[Plot]]]:
    """{file name: (title, panels)} of what the paper has no figures of, all of PPO without a KL penalty."""
    fixed = {key: base[key] for key in ("noise", "size", "pairs")}
    here = pick(everything, procedure="PPO", kl_coef=0.0, **fixed)

    def panels(groups: dict[str, list[Run]], title: str = "") -> list[Plot]:
        """Gold over KL and over updates."""
        rows = [row for name, mine in groups.items() if mine for row in curve_rows(name, [run.curve for run in mine])]
        plots = [Plot(title, "kl", "KL", [row for row in rows if row["x"] <= args.max_kl], "series")]
        return [*plots, Plot(f"{title}, by update", "steps", "update", [x | {"x": x["step"]} for x in rows], "series")]

    def meeting(runs: list[Run], others: list[Run]) -> list[Run]:
        return [run for run in runs if any(met(run, other) for other in others)]

    bases, standard = [], []
    for method in ("mean", "wco", "uwo"):
        usual = of_method(pick(here, bases=1, setup=base["setup"]), method, args)
        many = of_method([run for run in pick(here, setup=base["setup"]) if run.bases > 1], method, args)
        raw = meeting(of_method(pick(here, bases=1, setup=RAW), method, args), usual)
        bases += panels({"one base": usual, "several bases": many} if many else {}, method)[1:]
        standard += panels({"standardised": usual, "not standardised": raw} if raw else {}, method)[1:]
    leaky = pick(here, bases=1, setup=f"{VALUE_FROM_REWARD}, {RAW}", method="wco")
    leaks = {}
    for run in meeting(pick(here, bases=1, method="wco"), leaky):
        if RAW in run.setup:
            leaks.setdefault(channel(run.setup), []).append(run)
    likings = [row for name, mine in leaks.items() for row in curve_rows(name, [run.likings for run in mine])]
    liked = Plot("score of member 1 less the others' mean", "updates", "update", likings, "series")
    found = {"leak": ("WCO without KL penalty, not standardised", [*panels(leaks, "value model")[1:], liked])}
    found["bases"] = "Ensembles of one base and of several, without KL penalty", bases
    found["standardised"] = "Members standardised or not, without KL penalty", standard
    return found


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
    axis.set(xlabel=plot.xlabel, ylabel="" if plot.kind == "updates" else "gold")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=1 + (max(map(len, names)) < 25), fontsize=8)


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
    """To sort AVERAGED fields."""
    procedure, noise, size, pairs, bases, setup, kl_coef, method, uwo_lambda, members = key
    order = list(METHODS).index(method), uwo_lambda or 0.0, members
    return procedure, noise, size_order(size), pairs, bases, setup, kl_coef, *order


def share_won(mine: pandas.Series, other: pandas.Series) -> float:
    """Share of the posts of both on which `mine` is higher, a tie half."""
    posts = mine.index.intersection(other.index)
    mine, other = mine[posts].to_numpy(), other[posts].to_numpy()
    return float(numpy.where(numpy.isclose(mine, other, rtol=1e-6, atol=1e-6), 0.5, mine > other).mean())


def win_rate_rows(runs: list[Run], args: Args) -> list[dict]:
    """Win rates of ensembles against single members (appendix F.9): mean and sample sd over the members. PPO: of runs
    that met, with the same KL penalty, of each member the mean over seeds. BoN: of several ensembles over these."""
    rows = []
    for key in sorted({fields(run, AVERAGED) for run in runs if run.method != "single"}, key=setting_order):
        mine = [run for run in runs if fields(run, AVERAGED) == key]
        # the same procedure, setting and KL penalty; single members have one base
        there = [run for run in runs if fields(run, COMPARED) == fields(mine[0], COMPARED)]
        singles = [run for run in runs if run.method == "single" and run[:4] == key[:4] and run[5:7] == key[5:7]]
        singles = [single for single in singles if any(single.made_of & run.made_of for run in mine)]
        fewer = mine[0].method != "warm" and mine[0].members < max(run.members for run in there)
        if fewer or key[0] == "BoN" and mine[0].wins is None:
            continue
        if key[0] == "BoN":
            (rate, sd), against = mine[0].wins, len(singles)
            if len(mine) > 1:  # ensembles of several replicates
                rate, sd = mean_and_sd(run.wins[0] for run in mine)
        else:
            shares: dict[str, list[float]] = {}
            for run, single in [(run, single) for run in mine for single in singles if met(run, single)]:
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


def growth(run: Run) -> float:
    """Mean variance of the last tenth of the updates over that of the first."""
    y, tenth = run.variance["y"], -(-len(run.variance) // 10)
    return float(y.iloc[-tenth:].mean() / y.iloc[:tenth].mean())


# ---- claims ------------------------------------------------------------------------------------------------------


def at_kl(curve: pandas.DataFrame, kl: float) -> float | None:
    """Gold where the curve first reaches a KL distance, on the line between two points; None where it does not."""
    x, y = curve["x"].to_numpy(), curve["y"].to_numpy()
    after = int(numpy.argmax(x >= kl))
    if x[after] < kl:
        return None
    if after == 0:
        return float(y[0])
    return float(y[after - 1] + (y[after] - y[after - 1]) * (kl - x[after - 1]) / (x[after] - x[after - 1]))


def beyond_noise(run: Run) -> float:
    """Final gold and 2 of its standard errors (over posts), less the best: below 0 where a run falls by more."""
    return 2 * error(run) - drop(run)


def liking(run: Run) -> float | None:
    """By how much the first reward model likes the responses better than the others do, mean over the updates."""
    return None if run.likings.empty else float(run.likings["y"].mean())


def at_update(run: Run, update: int) -> float | None:
    """Gold at an update; None where it was not taken there."""
    found = run.curve.loc[run.curve["step"] == update, "y"]
    return float(found.iloc[0]) if len(found) else None


def channel(setup: str) -> str:
    """A setup of the question where the first reward model leaks, in short."""
    words = {VALUE_FROM_REWARD: "from member 1", RAW: "", "λ of GAE 1": "λ 1", "no value clipping": "no clipping"}
    return ", ".join(x for part in setup.split(", ") if (x := words.get(part, part))) or "from SFT"


QUANTITIES: dict[str, Callable[[Run], float | None]] = {
    "final": final,
    "best": lambda run: float(run.curve["y"].max()),
    "drop": drop,
    **{f"at KL {kl}": lambda run, kl=kl: at_kl(run.curve, kl) for kl in EQUAL_KL},
    **{f"at update {update}": lambda run, update=update: at_update(run, update) for update in EARLY},
    "fall beyond noise": beyond_noise,
    "log growth of the variance": lambda run: float(numpy.log(growth(run))),
    "first member's liking": liking,
}
NOT_GOLD = {"log growth of the variance", "first member's liking"}
LESS_IS_BETTER = {"drop"} | NOT_GOLD


class Claim(NamedTuple):
    """A claim as rows of (what, runs, others, quantity): the paired differences of the runs to the others; without
    others the quantity itself. It holds where every verdict is one of `expected`; asked where that is empty."""

    number: str
    text: str
    expected: tuple[str, ...]
    rows: list[tuple[str, list[Run], list[Run] | None, str]]


def met(run: Run, other: Run) -> bool:
    """Whether two runs are compared: one seed, a reward model in common."""
    return run.seed == other.seed and bool(run.made_of & other.made_of)


def paired(mine: list[Run], others: list[Run] | None, quantity: str) -> list[float]:
    """Differences in a quantity between runs that met, the sign turned where less is better; the quantity of `mine`
    where there are no others. What has no value for one of two is left out."""
    value, sign = QUANTITIES[quantity], -1 if quantity in LESS_IS_BETTER else 1
    found = [(run, other) for run in mine for other in others or [None]]
    found = [(run, x) for run, x in found if x is None or met(run, x)]
    numbers = [(value(run), 0.0 if x is None else value(x)) for run, x in found]
    return [sign * (a - b) for a, b in numbers if a is not None and b is not None]


def interval(differences: list[float]) -> tuple[float, float, float]:
    """(mean, lower end, upper end) of the 95 % t interval; of less than two values it is everything."""
    n = len(differences)
    if n < 2:
        return (differences[0] if n else float("nan")), -float("inf"), float("inf")
    quantile = float(stats.t.ppf(0.975, n - 1))
    half = quantile * stdev(differences) / n**0.5
    center = mean(differences)
    return center, center - half, center + half


def verdict_of(low: float, high: float, quantity: str) -> str:
    """`better` or `worse` where the interval excludes 0, `no worse` where it is of gold and ends above NO_WORSE."""
    if low > 0 or high < 0:
        return "better" if low > 0 else "worse"
    return "no worse" if low > NO_WORSE and quantity not in NOT_GOLD else "these runs cannot tell"


def claims_of(everything: list[Run], base: dict, args: Args) -> list[Claim]:
    """The claims, with the runs that each is about. base: noise, size and pairs, one base, the setup of most runs."""
    here = pick(everything, procedure="PPO", noise=base["noise"], size=base["size"], pairs=base["pairs"])
    usual = pick(here, bases=1, setup=base["setup"])
    penalties = values(usual, "kl_coef")
    small = min((kl for kl in penalties if kl > 0), default=None)
    methods = {(kl, m): of_method(pick(usual, kl_coef=kl), m, args) for kl in penalties for m in METHODS}
    free = {method: methods.get((0.0, method), []) for method in METHODS}
    ensembles, penalised = ("mean", "wco", "uwo"), {m: methods.get((small, m), []) for m in METHODS}
    many = pick([run for run in here if run.bases > 1], setup=base["setup"], kl_coef=0)
    many = {method: of_method(many, method, args) for method in ensembles}
    raw = {m: of_method(pick(here, bases=1, setup=RAW, kl_coef=0), m, args) for m in ("wco", "uwo")}
    setups = {setup: pick(here, bases=1, setup=setup, kl_coef=0, method="wco") for setup in values(here, "setup")}
    leaky = setups.get(f"{VALUE_FROM_REWARD}, {RAW}", [])
    better, matched, single = ("better",), ("better", "no worse"), free["single"]
    rows = [
        Claim("1", "A single reward model overoptimises.", ("worse",), [("single", single, None, "fall beyond noise")]),
        Claim("2", "WCO and UWO reduce overoptimisation.", better, [
            (f"{m} to single", free[m], single, quantity) for quantity in ("final", "drop") for m in ("wco", "uwo")]),
        Claim("3a", "With a small KL penalty WCO and UWO prevent overoptimisation …", matched, [
            (f"{m} at {small}", penalised[m], None, "fall beyond noise") for m in ("wco", "uwo")]),
        Claim("3b", "… at no cost.", matched, [
            (f"{m} at {small} to 0", penalised[m], free[m], "best") for m in ("wco", "uwo")]),
        Claim("4", "WCO and UWO match or outperform a single reward model at every KL penalty.", matched, [
            (f"{m} to single at {kl:g}", methods[kl, m], methods[kl, "single"], "final")
            for kl in penalties for m in ("wco", "uwo")]),
        Claim("5a", "Mean optimisation is not conservative: it overoptimises …", ("worse",), [
            ("mean", free["mean"], None, "fall beyond noise")]),
        Claim("5b", "… and ends below WCO and UWO.", ("worse",), [
            (f"mean to {m}", free["mean"], free[m], "final") for m in ("wco", "uwo")]),
        Claim("6", "Ensembles almost always beat a single reward model.", better, [
            (f"{m} to single at {kl:g}", methods[kl, m], methods[kl, "single"], "final")
            for kl in penalties for m in ensembles]),
        Claim("7", "The variance within the ensemble grows under mean, and less under UWO.", better, [
            ("uwo to mean", free["uwo"], free["mean"], "log growth of the variance")]),
        Claim("8", "WARM: one average of the weights is more robust than a single reward model.", better, [
            (f"warm to single at {kl:g}", methods[kl, "warm"], methods[kl, "single"], "final") for kl in penalties]),
        Claim("9a", "Eisenstein et al.: an ensemble of several bases beats one of one base …", better, [
            (f"{m} of several bases to one", many[m], free[m], "final") for m in ensembles]),
        Claim("9b", "… and does not remove hacking.", ("worse",), [
            (f"{m} of several bases", many[m], None, "fall beyond noise") for m in ensembles]),
        Claim("10", "Does standardising the members matter?", (), [
            (f"{m} standardised to not", free[m], raw[m], "final") for m in ("wco", "uwo")]),
        Claim("11", "Through which channel does the first reward model leak?", (), [
            (f"value model {channel(setup)} to from member 1", runs, leaky, quantity)
            for quantity in ("best", *(f"at KL {kl}" for kl in EQUAL_KL), "final", "first member's liking")
            for setup, runs in setups.items() if RAW in setup and runs is not leaky]),
    ]  # fmt: skip
    return [claim for claim in rows if claim.rows]


def claims_table(claims: list[Claim]) -> list[dict]:
    """A row for each comparison: mean and interval over replicates, its verdict, and whether the claim holds in all."""
    table = []
    for claim in claims:
        mine = []
        for what, runs, others, quantity in claim.rows:
            found = paired(runs, others, quantity) if runs and (others is None or others) else []
            middle, low, high = interval(found)
            verdict = verdict_of(low, high, quantity) if len(found) > 1 else "no runs"
            row = {"claim": claim.number, "text": claim.text, "what": what, "quantity": quantity, "n": len(found)}
            mine.append(row | {"difference": middle, "low": low, "high": high, "verdict": verdict})
        verdicts = {row["verdict"] for row in mine}
        contrary = {"worse"} if "better" in claim.expected else {"better", "no worse"}
        holds = "yes" if verdicts <= set(claim.expected) else "no" if verdicts & contrary else "these runs cannot tell"
        if not claim.expected:
            holds = "asked"
        elif "no runs" in verdicts:
            holds = "no runs"
        table += [row | {"holds": holds} for row in mine]
    return table


def most_common(runs: list[Run], field: str, wanted):
    """The value of a field that was asked for, else that of most run folders."""
    counts = Counter(value for _, value in sorted({(run.folder, getattr(run, field)) for run in runs}))
    if wanted is not None and wanted not in counts:
        there = ", ".join(str(x).removesuffix(".0") for x in values(runs, field))
        fail(f"--{field} {wanted}: no such runs; there are {there}")
    return counts.most_common(1)[0][0] if wanted is None else wanted


def methods_table(runs: list[Run], args: Args) -> list[dict]:
    """Of each method and KL penalty gold at its best, at the end, the drop and gold at equal KL: the mean over
    replicates and the paired difference to the single reward model with its interval; n: how many replicates reach it,
    pairs: of both."""
    table = []
    for kl in values(runs, "kl_coef"):
        groups = {method: of_method(pick(runs, kl_coef=kl), method, args) for method in METHODS}
        for method, mine in groups.items():
            for quantity in [x for x in QUANTITIES if mine and x in ("best", "final", "drop") or x.startswith("at KL")]:
                found = [x for run in mine if (x := QUANTITIES[quantity](run)) is not None]
                row = {"KL penalty": kl, "method": method, "quantity": quantity, "n": len(found)}
                row |= {"mean": mean(found) if found else float("nan"), "to single": "", "pairs": 0}
                differences = paired(mine, groups["single"], quantity) if method != "single" else []
                if len(differences) > 1:
                    middle, low, high = interval(differences)
                    row |= {"to single": f"{middle:.3f} ({low:.3f} to {high:.3f})", "pairs": len(differences)}
                table += [row] * bool(mine)
    return table


# ---- asked after the runs ------------------------------------------------------------------------------------------


class Later(NamedTuple):
    """A comparison that was thought of after the runs: its paired differences, one a replicate."""

    question: str
    what: str
    quantity: str
    differences: list[float]


def averaged(comparisons: list[tuple[list[Run], list[Run]]], quantity: str) -> list[float]:
    """Of each replicate the mean difference over several comparisons; one that lacks a comparison is left out."""
    seeds = sorted({run.seed for mine, _ in comparisons for run in mine})
    found = [[paired(pick(mine, seed=seed), others, quantity) for mine, others in comparisons] for seed in seeds]
    return [mean(map(mean, of_seed)) for of_seed in found if all(of_seed)]


def p_value(differences: list[float]) -> float:
    """Of the two-sided t test that belongs to `interval`."""
    return float(stats.ttest_1samp(differences, 0).pvalue)


def holm(p_values: list[float]) -> list[float]:
    """Holm's adjusted p values: one below 0.05 stands when all of these questions are asked at once."""
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    for rank, i in enumerate(order):
        largest = max(largest, (len(p_values) - rank) * p_values[i])
        adjusted[i] = min(1.0, largest)
    return adjusted


def replicates_for(differences: list[float], power: float) -> int | None:
    """How many replicates the two-sided t test at 5 % needs to tell a difference as large as the one seen with this
    probability, its standard deviation being the one seen; None above 1,000."""
    effect = abs(mean(differences)) / stdev(differences)
    n = numpy.arange(2, 1001)
    limit = stats.t.ppf(0.975, n - 1)
    above = stats.nct.sf(limit, n - 1, effect * numpy.sqrt(n))  # the other side's share is below 0.025
    enough = n[above >= power]
    return int(enough[0]) if len(enough) else None


def penalty_comparisons(usual: list[Run], args: Args) -> list[Later]:
    """What the largest KL penalty does to final gold, of each method and in the mean over the methods."""
    largest = max(values(usual, "kl_coef"), default=0.0)
    comparisons = {}
    for method in METHODS:
        penalised = of_method(pick(usual, kl_coef=largest), method, args)
        free = of_method(pick(usual, kl_coef=0), method, args)
        if largest > 0 and penalised and free:
            comparisons[method] = (penalised, free)
    question = f"KL penalty {largest:g} to 0"
    rows = [Later(question, method, "final", averaged([pair], "final")) for method, pair in comparisons.items()]
    return [*rows, Later(question, "mean over methods", "final", averaged(list(comparisons.values()), "final"))]


def leak_comparisons(here: list[Run]) -> list[Later]:
    """Early gold of the setups of the leak against that of the first; what clipping and lambda do to final gold."""
    setups = {setup: pick(here, setup=setup, kl_coef=0, method="wco") for setup in values(here, "setup")}
    from_reward = f"{VALUE_FROM_REWARD}, {RAW}"
    leaky = setups.get(from_reward, [])
    rows = []
    for update in EARLY:
        quantity = f"at update {update}"
        for setup, runs in setups.items():
            if RAW in setup and runs is not leaky:
                what = f"value model {channel(setup)} to from member 1"
                rows.append(Later("leak", what, quantity, paired(runs, leaky, quantity)))
    unclipped = setups.get(f"{from_reward}, no value clipping", [])
    long = setups.get(f"{from_reward}, λ of GAE 1", [])
    both = setups.get(f"{from_reward}, λ of GAE 1, no value clipping", [])
    clipping = averaged([(unclipped, leaky), (both, long)], "final") if leaky and long else []
    lam = averaged([(long, leaky), (both, unclipped)], "final") if leaky and unclipped else []
    rows.append(Later("leak", "no clipping, mean over both λ", "final", clipping))
    rows.append(Later("leak", "λ 1, mean over both clippings", "final", lam))
    return rows


def later_table(everything: list[Run], base: dict, args: Args) -> list[dict]:
    """A row for each comparison of two replicates or more, with its interval and p value. Claim 6's nine have Holm's p
    and the replicates that would tell the difference seen with a probability of 50 and of 80 %."""
    here = pick(everything, procedure="PPO", bases=1, **{key: base[key] for key in ("noise", "size", "pairs")})
    usual = pick(here, setup=base["setup"])
    claim_6 = []
    for claim in claims_of(everything, base, args):
        if claim.number == "6":
            claim_6 += [Later("claim 6", what, x, paired(a, b, x)) for what, a, b, x in claim.rows if a and b]
    comparisons = claim_6 + penalty_comparisons(usual, args) + leak_comparisons(here)
    table = []
    for comparison in comparisons:
        differences = comparison.differences
        if len(differences) < 2 or stdev(differences) == 0:
            continue
        middle, low, high = interval(differences)
        row = {"question": comparison.question, "what": comparison.what, "quantity": comparison.quantity}
        row |= {"n": len(differences), "difference": middle, "low": low, "high": high, "p": p_value(differences)}
        if comparison.question == "claim 6":
            row["replicates_50"] = replicates_for(differences, 0.5)
            row["replicates_80"] = replicates_for(differences, 0.8)
        table.append(row)
    several = [row for row in table if row["question"] == "claim 6"]
    for row, adjusted in zip(several, holm([row["p"] for row in several]), strict=True):
        row["holm"] = adjusted
    return table


def main(args: Args):
    # ---- runs ------------------------------------------------------------------------------------
    runs, problems = read_runs(args.runs)
    if not runs:
        why = "".join(f"\n  {problem}" for problem in problems)
        fail(f"{args.runs}: no best-of-n or PPO runs with gold scores there. {COMMANDS.replace('`', '')}{why}")
    everything, lines = runs, "".join(map(as_line, runs))
    base = {"noise": most_common(runs, "noise", args.noise)}
    for field in ("size", "pairs"):
        base[field] = most_common(pick(runs, **base), field, getattr(args, field))
    base |= {"bases": 1, "setup": most_common(pick(runs, **base), "setup", None)}
    runs = [run for run in runs if run.bases == 1 and run.setup == base["setup"]]
    here = pick(runs, **base)
    small = min((run.kl_coef for run in here if run.kl_coef > 0), default=None)
    for procedure, flag, wanted in (("BoN", "bon", args.bon_lambda), ("PPO", "ppo", args.ppo_lambda)):
        there = values(pick(here, procedure=procedure, method="uwo"), "uwo_lambda")
        if there and wanted not in there:
            problems.append(f"--{flag}-lambda {wanted:g}: of uwo there is λ {', '.join(f'{x:g}' for x in there)}")

    # ---- figures and tables ----------------------------------------------------------------------
    figures = paper_figures(runs, base, small, args) | question_figures(everything, base, args)
    wins, claims = win_rate_rows(everything, args), claims_table(claims_of(everything, base, args))
    methods = methods_table(pick(here, procedure="PPO"), args)
    later = pandas.DataFrame(later_table(everything, base, args))
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    put(folder / "runs.jsonl", lines.encode())
    missing = [f"{name}: {NEEDS[name]}" for name, figure in figures.items() if not save_figure(args, name, *figure)]
    missing += [] if wins else ["win rates: best of n, or PPO runs with gold_samples.csv"]
    missing += [
        f"claim {row['claim']}: {row['what']}, {row['quantity']}" for row in claims if row["verdict"] == "no runs"
    ]
    for name, rows in (("claims", claims), ("methods", methods), ("win_rates", wins)):
        put(folder / f"{name}.csv", pandas.DataFrame(rows).to_csv(index=False, float_format="%.6g").encode())
    if not later.empty:
        put(folder / "later.csv", later.to_csv(index=False, float_format="%.6g").encode())
    ppo = pick(everything, procedure="PPO")
    ppo = sorted(ppo, key=lambda run: setting_order(fields(run, AVERAGED)) + (run.seed, run.paths))
    if ppo:
        golds = [run.curve["y"] for run in ppo]
        golds = [{"first": gold.iloc[0], "best": gold.max(), "final": gold.iloc[-1]} for gold in golds]
        kls = [{"final_kl": run.curve["x"].iloc[-1], "largest_kl": run.curve["x"].max()} for run in ppo]
        names = (*AVERAGED, "seed", "paths")
        rows = [dict(zip(names, fields(run, names), strict=True)) for run in ppo]
        rows = [row | gold | kl for row, gold, kl in zip(rows, golds, kls, strict=True)]
        put(folder / "ppo_runs.csv", pandas.DataFrame(rows).to_csv(index=False, float_format="%.6g").encode())

    # ---- figures.md ------------------------------------------------------------------------------
    text = f"# Reward model ensembles\n\n`python ensembles/figures.py {shlex.join(sys.argv[1:])}`\n\n"
    text += f"Where nothing else is said: {base['noise']:g} % label noise, reward models {base['size']} trained on "
    text += f"{base['pairs']:,} pairs. ± is one sample standard deviation, se the standard error over posts.\n\n"
    said = (
        f"{len(values(pick(here, procedure='PPO'), 'seed'))} replicates, runs paired by seed; ( ) is a 95 % t interval"
    )
    text += f"## Claims\n\nPPO, setup: {base['setup'] or 'default'}; {said}. A positive difference is better.\n\n"
    shown = [row | {"difference": f"{row['difference']:.3f} ({row['low']:.3f} to {row['high']:.3f})"} for row in claims]
    columns = "claim text what quantity n difference verdict holds".split()
    text += markdown([{key: row[key] for key in columns} for row in shown if row["verdict"] != "no runs"] or shown[:1])
    text += "\n"
    if methods:
        text += f"## Methods\n\n{markdown(methods)}\n"
    if not later.empty:
        text += "## Asked after the runs\n\nPaired differences, a 95 % t interval, p of its test. Holm's p and the "
        text += "replicates that tell the difference seen in half and in 80 % of studies are of claim 6.\n\n"
        text += markdown(later.astype(object).where(later.notna(), "").to_dict("records")) + "\n"
    if wins:
        shown = [row | {"win rate, %": f"{100 * row['win_rate']:.1f} ± {100 * row['win_rate_sd']:.1f}"} for row in wins]
        columns = "procedure noise size pairs bases setup kl_coef method uwo_lambda members against".split()
        columns += ["win rate, %", "paper"]
        shown = [{key: "" if row[key] is None else row[key] for key in columns} for row in shown]
        text += "## Win rates against single reward models\n\nMean ± standard deviation over the single reward models, "
        text += "as many as `against` says. The paper's: "
        text += "table 6 (44M reward models) and 7 (7M and 1.3B), uwo with λ 0.5, PPO at the KL penalties of figure 4."
        text += f"\n\n{markdown(shown)}\n"
    for title, lines in (("Missing", [*missing, COMMANDS] if missing else []), ("Left out", problems)):
        text += f"## {title}\n\n" + "".join(f"- {line}\n" for line in lines) + "\n" if lines else ""
    put(folder / "figures.md", (text.rstrip() + "\n").encode())
    print(text)


if __name__ == "__main__":
    main(tyro.cli(Args))
