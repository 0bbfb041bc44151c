"""The paper's figures, and a table "paper / ours", from run folders.

    python eval/figures.py --judge gpt-3.5-turbo                    # runs/, the paper's sizes and seeds
    python eval/figures.py --models nano-xs nano-s nano-m --runs runs/quickstart/posts-1 \\
        --judge quickstart/truth.py:score --output-dir quickstart/results/nano

Reads {runs}/{stage}/{model}/{seed}: metrics.jsonl and the tables that --run-eval and samples.py wrote to eval/. Calls
rm_report.py, visualize_tokens.py and, with --judge, judge.py, whose answers are kept, so a second call costs nothing.
Writes figure_1, 4, 5 and 7 to 13 as PNG (with --pdf also as PDF) and CSV, rm_report* and tokens*, and figures.md: the
paper's numbers beside ours where the sizes match, win rates, and each missing run with the command that trains it.
Lines are means over seeds; bands and error bars are one sample standard deviation.
"""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import exp
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

import numpy
import pandas
import tyro
from eval_helpers import fail, markdown
from matplotlib.figure import Figure
from run_metrics import read_metrics

STAGES = {"sft": "SFT", "reward": "reward model", "ppo": "PPO", "ppo_whiten": "PPO, whitened rewards", "dpo": "DPO"}
POLICIES = ("sft", "dpo", "ppo", "ppo_whiten")
POINTS = 100  # of a learning curve
COLORS = {"SFT": "C0", "DPO": "C2", "PPO": "C3", "PPO, whitened rewards": "C4"}
MARKERS = dict(zip((STAGES[stage] for stage in POLICIES), "so^v", strict=True))

# what the paper says in numbers (table 5, Detail 17, section 7.1): stage, column of run_numbers(), {model: mean, sd}
BEST, AGREEMENT = "best PPO win rate", "agreement with the judge"
VALIDATION, CNNDM = "RM accuracy, validation", "RM accuracy, validation_cnndm"
PAPER = {
    VALIDATION: ("reward", "TL;DR", {"1b": (0.628, 0.002), "2.8b": (0.669, 0.003), "6.9b": (0.689, 0.004)}),
    CNNDM: ("reward", "CNN/DM", {"1b": (0.627, 0.013), "2.8b": (0.665, 0.010), "6.9b": (0.686, 0.003)}),
    AGREEMENT: ("reward", "agreement", {"1b": (0.4, None), "2.8b": (0.726, None), "6.9b": (0.767, None)}),
    BEST: ("ppo", "win rate", {"6.9b": (0.8, None)}),
}


@dataclass
class Args:
    models: tuple[str, ...] = ("1b", "2.8b", "6.9b")
    """{model} of the run folders, small to large"""
    seeds: tuple[int, ...] = (44413, 55513, 66613, 77713)
    """of the run folders"""
    runs: str = "runs"
    """folder with {stage}/{model}/{seed}"""
    output_dir: str = "runs/figures"
    """folder for everything that is written"""
    judge: str | None = None
    """what judge.py takes: an endpoint's model, path.py:function, or a reward model; without it no win rates"""
    base_url: str | None = None
    """address of the judge's endpoint"""
    pdf: bool = False
    """write each figure as PDF, too"""


class Panel(NamedTuple):
    """One panel of a figure: `draw` is one of the draw_ functions, and rows are dicts with the series, x and y that it
    describes. The rows are the figure's CSV file."""

    title: str
    draw: Callable
    xlabel: str
    ylabel: str
    rows: list[dict]


class Study(NamedTuple):
    """What the figures show. Keys are (stage, model, seed)."""

    args: Args
    metrics: dict[tuple, list[dict]]  # a dict per update; [] for a run without metrics
    numbers: pandas.DataFrame  # a row per run: stage, model, seed and the columns of run_numbers()
    bins: dict[tuple, pandas.DataFrame]  # judge.py's win rates by length ratio


# ---- reading -----------------------------------------------------------------------------------------------------


def training_command(args: Args, stage: str, model: str, seed: int) -> str:
    """The command that trains a run with the paper's hyperparameters."""
    command = f"python {stage.removesuffix('_whiten')}.py --model {model} --seed {seed}"
    command += " --run-eval" * (stage in ("reward", "dpo"))
    return command + f" --whiten-rewards --output-dir {args.runs}/{stage}/{model}/{seed}" * (stage == "ppo_whiten")


def rows_of(file: Path) -> list[dict]:
    """The rows of a CSV file; [] where it is not there."""
    return pandas.read_csv(file).to_dict("records") if file.exists() else []


def run_numbers(folder: Path, stem: str) -> dict[str, float]:
    """What the tables in a run's eval/ say of it; NaN where there is no table. Those of judge.py begin with `stem`."""

    def cell(name: str, column: str, **where) -> float:
        rows = [row for row in rows_of(folder / "eval" / name) if all(row[key] == where[key] for key in where)]
        return rows[0][column] if rows else numpy.nan

    return {
        "win rate": cell(f"{stem}_rates.csv", "win_rate"),
        "at equal length": cell(f"{stem}_rates.csv", "length_controlled_win_rate"),
        "tokens": cell("rouge.csv", "response_tokens", split="validation"),
        "ROUGE-L": cell("rouge.csv", "rougeL", split="validation"),
        "TL;DR": cell("accuracy.csv", "accuracy", data="validation", group="overall"),
        "CNN/DM": cell("accuracy.csv", "accuracy", data="validation_cnndm", group="overall"),
    }


def mean_and_sd(values: Iterable[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (n - 1); 0 for a single value."""
    values = list(values)
    return mean(values), stdev(values) if len(values) > 1 else 0.0


def with_sd(values: Iterable[float], none: str) -> str:
    """`mean ± sample standard deviation`, the latter with two values or more; `none` without values."""
    values = list(values)
    if not values:
        return none
    center, sd = mean_and_sd(values)
    return f"{center:.3f}" + (f" ± {sd:.3f}" if len(values) > 1 else "")


# ---- drawing -----------------------------------------------------------------------------------------------------
# draw_*(axis, name, rows, i, args) adds one series to a panel: its rows (a data frame), the i-th of the panel


def draw_learning_curves(axis, name: str, rows: pandas.DataFrame, i: int, args: Args):
    """x episodes, y and sd over seeds; the series is a model."""
    color = f"C{args.models.index(name)}"
    axis.plot(rows["x"], rows["y"], color=color, label=name)
    axis.fill_between(rows["x"], rows["y"] - rows["sd"], rows["y"] + rows["sd"], color=color, alpha=0.2, linewidth=0)


def draw_sizes(axis, name: str, rows: pandas.DataFrame, i: int, args: Args):
    """x model, y of one seed, drawn as mean and standard deviation beside the seeds; or the paper's y and sd."""
    axis.set_xticks(range(len(args.models)), args.models)
    axis.set_xlim(-0.5, len(args.models) - 0.5)
    if name.startswith("paper"):
        places = [args.models.index(model) for model in rows["x"]]
        sd = rows["sd"].astype(float).fillna(0)
        axis.errorbar(places, rows["y"], sd, color="black", marker="_", ms=16, ls=":", label=name)
        return
    groups = {args.models.index(model) + 0.08 * i: list(y) for model, y in rows.groupby("x", sort=False)["y"]}
    color = COLORS.get(name, f"C{i + 5}")
    centers, spreads = zip(*map(mean_and_sd, groups.values()), strict=True)
    axis.errorbar(list(groups), centers, spreads, color=color, marker="o", capsize=3, label=name)
    for place, group in groups.items():
        axis.plot([place + 0.03] * len(group), group, ".", color=color, alpha=0.4)


def draw_win_rates(axis, name: str, rows: pandas.DataFrame, i: int, args: Args):
    """As draw_sizes, with a line where summaries are as good as what they are compared to."""
    draw_sizes(axis, name, rows, i, args)
    if i == 0:
        axis.axhline(0.5, color="gray", linewidth=0.8, linestyle="--")


def draw_points(axis, name: str, rows: pandas.DataFrame, i: int, args: Args):
    """x and y of a run; the series is `stage, model`."""
    stage, model = name.rsplit(" ", 1)
    axis.plot(rows["x"], rows["y"], MARKERS[stage], color=f"C{args.models.index(model)}", alpha=0.7, label=name)


def draw_steps(axis, name: str, rows: pandas.DataFrame, i: int, args: Args):
    """x and y with an error sd where there is one, drawn as a line with points; the ideal calibration as a line."""
    color = COLORS.get(name, f"C{args.models.index(name) if name in args.models else i + 5}")
    style = {"color": "black"} if name.startswith("1 / (1") else {"color": color, "marker": "o", "ms": 3, "capsize": 2}
    axis.errorbar(rows["x"], rows["y"], rows["sd"].fillna(0) if "sd" in rows else None, label=name, **style)


def draw_tokens(axis, name: str, rows: pandas.DataFrame, i: int, args: Args):
    """x position, y a value, label the token."""
    axis.plot(rows["x"], rows["y"], marker="o", ms=3, label=name)
    axis.set_xticks(list(rows["x"]), list(rows["label"]), rotation=90, fontsize=7)
    axis.axhline(0, color="gray", linewidth=0.5)


def draw_panel(axis, panel: Panel, args: Args):
    """Draw a panel; one without rows says so."""
    axis.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
    if not panel.rows:
        axis.text(0.5, 0.5, "no runs", ha="center", transform=axis.transAxes)
        axis.set(xticks=[], yticks=[])
        return
    for i, (name, rows) in enumerate(pandas.DataFrame(panel.rows).groupby("series", sort=False)):
        panel.draw(axis, name, rows, i, args)
    place = {}
    if panel.draw is draw_points:
        place = {"loc": "upper left", "bbox_to_anchor": (1, 1)}  # beside the panel, where it hides no points
    elif panel.draw is draw_win_rates:
        place = {"loc": "lower right"}
    axis.legend(fontsize=7, **place)


def write_figure(args: Args, name: str, title: str, columns: int, panels: list[Panel]) -> bool:
    """Write a figure and its CSV file; nothing, and False, where no panel has a row."""
    if not any(panel.rows for panel in panels):
        return False
    lines = -(-len(panels) // columns)
    width = {1: 6.5}.get(columns, 4.4 * columns) + 3 * any(panel.draw is draw_tokens for panel in panels)
    figure = Figure(figsize=(width, 3.3 * lines), layout="constrained")
    for axis, panel in zip(figure.subplots(lines, columns, squeeze=False).flat, panels, strict=False):
        draw_panel(axis, panel, args)
    figure.suptitle(title, size=10)
    target = Path(args.output_dir) / name
    for ending in ("png", "pdf") if args.pdf else ("png",):
        figure.savefig(f"{target}.{ending}", dpi=75)
    rows = [{"panel": panel.title} | row for panel in panels for row in panel.rows]
    pandas.DataFrame(rows).to_csv(f"{target}.csv", index=False, float_format="%.6g")
    return True


# ---- panels ------------------------------------------------------------------------------------------------------


def stage_curves(study: Study, stage: str, titles: dict[str, str]) -> list[Panel]:
    """A panel for each of a stage's metrics, {metric: title}."""
    return [curves_panel(study.metrics, stage, study.args, key, title) for key, title in titles.items()]


def curves_panel(metrics: dict, stage: str, args: Args, key: str, title: str) -> Panel:
    """A metric over episodes, a line per model: the moving mean over a twentieth of the updates, at up to POINTS."""
    rows, window = [], 1
    for model in args.models:
        found = [{x.get("episode", 0): x.get(key) for x in metrics[stage, model, seed]} for seed in args.seeds]
        found = [pandas.Series(line, dtype=float).dropna() for line in found]
        found = [line for line in found if len(line)]
        if not found:
            continue
        window = max(1, len(found[0]) // 20)
        smooth = pandas.concat([line.rolling(window, 1).mean() for line in found], axis=1, join="inner").sort_index()
        for i in sorted(set(numpy.linspace(0, len(smooth) - 1, POINTS).round().astype(int))) if len(smooth) else []:
            y, sd = mean_and_sd(smooth.iloc[i].tolist())
            rows.append({"series": model, "x": int(smooth.index[i]), "y": y, "sd": sd, "n": len(found)})
    note = f", moving mean over {window} updates" if window > 1 else ""
    return Panel(title, draw_learning_curves, f"episodes{note}", key, rows)


def sizes_panel(study: Study, title: str, ylabel: str, values: dict[str, tuple[str, str]], *paper: str) -> Panel:
    """{series: (stage, column of the numbers)} over models, with the paper's numbers of these names."""
    rows = []
    for series, (stage, column) in values.items():
        found = study.numbers[study.numbers["stage"] == stage].dropna(subset=column)
        rows += [{"series": series, "x": m, "seed": s, "y": y} for m, s, y in found[["model", "seed", column]].values]
    for name in paper:
        for model, (y, sd) in PAPER[name][2].items():
            if model in study.args.models:
                rows.append({"series": f"paper, {name}", "x": model, "y": y, "sd": sd})
    return Panel(title, draw_sizes, "model", ylabel, rows)


def win_rate_panel(study: Study, stages: tuple[str, ...], *paper: str) -> Panel:
    values = {STAGES[stage]: (stage, "win rate") for stage in stages}
    return sizes_panel(study, "", "win rate", values, *paper)._replace(draw=draw_win_rates)


def calibration_panel(study: Study) -> Panel:
    found = [
        {"series": row["model"], "x": row["difference"], "y": row["accuracy"], "n": row["pairs"]}
        for row in rows_of(Path(study.args.output_dir, "rm_report_calibration.csv"))
    ]
    xs = numpy.linspace(0, max((row["x"] for row in found), default=0.0), 50)
    ideal = [{"series": "1 / (1 + exp(-x))", "x": x, "y": 1 / (1 + exp(-x))} for x in xs] if found else []
    return Panel("calibration", draw_steps, "score difference", "accuracy", [*ideal, *found])


def by_token(study: Study, title: str, ylabel: str, *keys: str) -> Panel:
    """Numbers of each token of the first PPO response that visualize_tokens.py shows."""
    tokens = rows_of(Path(study.args.output_dir, "tokens_tokens.csv"))
    tokens = [row for row in tokens if row["model"] == "ppo"]
    rows = [
        {"series": key, "x": row["position"], "y": row[key], "label": repr(row["token"])[1:-1]}
        for key in keys
        for row in tokens
        if row["id"] == tokens[0]["id"] and not pandas.isna(row[key])
    ]
    return Panel(title, draw_tokens, "", ylabel, rows)


def by_length(study: Study, *stages: str) -> Panel:
    """Win rate over the mean summary length of each run."""
    columns = ["stage", "model", "seed", "tokens", "win rate"]
    found = pandas.concat([study.numbers[study.numbers["stage"] == stage] for stage in stages])
    found = found.dropna(subset=columns)[columns].values
    rows = [{"series": f"{STAGES[stage]} {m}", "seed": seed, "x": x, "y": y} for stage, m, seed, x, y in found]
    return Panel("", draw_points, "mean summary length (tokens)", "win rate", rows)


def by_length_ratio(study: Study, model: str, seed: int) -> Panel:
    """Win rate by log length ratio of the policies of one model and seed (figures 12 and 13)."""
    rows = []
    for stage in POLICIES:
        found = study.bins.get((stage, model, seed), pandas.DataFrame())
        for row in found.to_dict("records"):
            start, end = max(row["from"], -1.5), min(row["to"], 1.5)  # the outer bins have no end
            point = {"series": STAGES[stage], "x": (start + end) / 2, "y": row["win_rate"]}
            rows.append(point | {"sd": row["se"], "n": row["examples"]})
    return Panel(f"{model}, seed {seed}", draw_steps, "log(summary / reference length)", "win rate", rows)


# ---- figures -----------------------------------------------------------------------------------------------------

SFT = {"loss/train": "training loss"}
PAIRS = {"accuracy/train": "training accuracy", "loss/train": "training loss"}
PPO = {"objective/rlhf_reward": "RLHF reward", "objective/kl": "KL, summed over tokens", "objective/score": "score"}
PPO |= {"response/length": "response length (tokens)"}
RM_ACCURACY = {"TL;DR": ("reward", "TL;DR"), "CNN/DM": ("reward", "CNN/DM")}
DPO_ACCURACY = {"reward model": ("reward", "TL;DR"), "DPO, implicit": ("dpo", "TL;DR")}
OVER_SEEDS = ": mean ± standard deviation over up to {seeds} seeds"


def figure_4(s: Study) -> list[Panel]:
    rouge = sizes_panel(s, "ROUGE-L, validation", "F-measure", {"SFT": ("sft", "ROUGE-L")})
    return [*stage_curves(s, "sft", SFT), rouge]


def figure_5(s: Study) -> list[Panel]:
    panels = stage_curves(s, "reward", PAIRS | {"rewards/chosen": "reward of the chosen response"})
    return [*panels, sizes_panel(s, "accuracy", "accuracy", RM_ACCURACY, VALIDATION, CNNDM)]


def figure_7(s: Study) -> list[Panel]:
    agreement = {"reward model": ("reward", "agreement")}
    return [sizes_panel(s, AGREEMENT, "share of pairs", agreement, AGREEMENT), calibration_panel(s)]


def figure_8(s: Study) -> list[Panel]:
    panels = stage_curves(s, "dpo", PAIRS | {"rewards/chosen": "implicit reward of the chosen response"})
    return [*panels, sizes_panel(s, "accuracy, validation", "accuracy", DPO_ACCURACY)]


def figure_9(s: Study) -> list[Panel]:
    rewards = by_token(s, "rewards: -kl_coef x KL per token, and the score", "reward", "token_reward")
    return [rewards, by_token(s, "values, and the reward model's logits (figure 6)", "", "value", "reward_logit")]


def figure_11(s: Study) -> list[Panel]:
    return [win_rate_panel(s, ("ppo", "ppo_whiten")), by_length(s, "ppo", "ppo_whiten")]


def figure_12(s: Study) -> list[Panel]:
    judged = [(m, n) for m in reversed(s.args.models) for n in s.args.seeds if ("ppo", m, n) in s.bins]
    return [by_length(s, *POLICIES), *(by_length_ratio(s, *run) for run in judged[:1])]  # of the largest model


def figure_13(s: Study) -> list[Panel]:
    return [by_length_ratio(s, model, seed) for model in s.args.models for seed in s.args.seeds]


FIGURES = {  # title, columns of panels (None: one per seed), panels
    "figure_1": (f"Win rate against the references{OVER_SEEDS}", 1, lambda s: [win_rate_panel(s, POLICIES[:3], BEST)]),
    "figure_4": (f"SFT{OVER_SEEDS}", 2, figure_4),
    "figure_5": (f"Reward model{OVER_SEEDS}", 2, figure_5),
    "figure_7": (f"Reward models: agreement with the judge, calibration{OVER_SEEDS}", 2, figure_7),
    "figure_8": (f"DPO's implicit reward model{OVER_SEEDS}", 2, figure_8),
    "figure_9": ("Rewards and values of a PPO completion", 1, figure_9),
    "figure_10": (f"PPO{OVER_SEEDS}", 2, lambda s: stage_curves(s, "ppo", PPO)),
    "figure_11": (f"PPO with and without whitened rewards{OVER_SEEDS}", 2, figure_11),
    "figure_12": ("Win rate and length", 2, figure_12),
    "figure_13": ("Win rate by summary length", None, figure_13),
}


# ---- what the other scripts work out -----------------------------------------------------------------------------


def tool(problems: list[str], script: str, *arguments) -> bool:
    """Run a script beside this one with its output shown, and return whether it succeeded; if not, it is a problem."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *map(str, arguments)]
    print(f"$ python eval/{script} {' '.join(map(str, arguments))}", flush=True)
    failed = subprocess.run(command).returncode != 0
    problems += [f"{script} stopped with an error"] * failed
    return not failed


def judge_all(args: Args, folders: dict, stem: str, problems: list[str]) -> list:
    """Let judge.py judge all samples, and the pairs that the first reward model was trained on; returns rm_report.py's
    flag for the judged pairs."""
    samples = [run / "eval" / "samples_validation.csv" for key, run in folders.items() if key[0] in POLICIES]
    problems += [f"{file}, of eval/samples.py" for file in samples if not file.exists()]
    found, pairs = [file for file in samples if file.exists()], Path(args.runs, "pairs_validation.csv")
    rewards = [json.loads((run / "args.json").read_text()) for key, run in folders.items() if key[0] == "reward"]
    trained_on = rewards[0]["preference_dataset"] if rewards else ""
    if trained_on and Path(trained_on).exists():
        found += [pairs] * tool(problems, "rm_report.py", "--preference-dataset", trained_on, "--write-pairs", pairs)
    if found:
        endpoint = ["--base-url", args.base_url] if args.base_url else []
        tool(problems, "judge.py", *found, "--judge", args.judge, *endpoint)
    judged = pairs.with_name(f"{stem}_of_{pairs.stem}.csv")
    return ["--judged", judged] if pairs in found and judged.exists() else []


def work_out(args: Args, folders: dict, stem: str) -> list[str]:
    """Let the other scripts of this folder make what the figures need of them. Returns what is missing."""
    problems, out = [], Path(args.output_dir)
    options = judge_all(args, folders, stem, problems) if args.judge else []
    command = ["--models", *args.models, "--seeds", *args.seeds, "--runs", args.runs]
    tool(problems, "rm_report.py", *command, *options, "--output", out / "rm_report")
    # figures 6 and 9, tables 8 and 10 to 20: the largest model with all three
    seeds = [(model, seed) for model in reversed(args.models) for seed in args.seeds]
    for key in [key for key in seeds if all((stage, *key) in folders for stage in ("sft", "reward", "ppo"))][:1]:
        settings = json.loads((folders["sft", *key] / "args.json").read_text())
        base = {size: f"EleutherAI/pythia-{size}-deduped" for size in ("1b", "2.8b", "6.9b")}
        command = ["--base", base.get(settings["model"], settings["model"]), "--dataset", settings["dataset"]]
        for stage, flag in (("sft", "--sft"), ("ppo", "--ppo"), ("dpo", "--dpo"), ("reward", "--reward-model")):
            command += [flag, folders[stage, *key]] if (stage, *key) in folders else []
        tool(problems, "visualize_tokens.py", *command, "--output", out / "tokens")
    return problems


def read_study(args: Args, metrics: dict, folders: dict, stem: str) -> Study:
    """What there is in the run folders, and rm_report.py's agreement of reward models and judge."""
    agreement = rows_of(Path(args.output_dir, "rm_report_agreement.csv"))
    agreement = {("reward", row["model"], row["seed"]): row["agreement"] for row in agreement}
    numbers = []
    for key, run in folders.items():
        row = dict(zip(("stage", "model", "seed"), key, strict=True)) | run_numbers(run, stem)
        numbers.append(row | {"agreement": agreement.get(key, numpy.nan)})
    bins = {key: run / "eval" / f"{stem}_bins.csv" for key, run in folders.items()}
    bins = {key: pandas.read_csv(file) for key, file in bins.items() if file.exists()}
    return Study(args, metrics, pandas.DataFrame(numbers), bins)


# ---- figures.md --------------------------------------------------------------------------------------------------


def policies_table(study: Study) -> list[dict]:
    """A row per stage and model: mean ± sample standard deviation over seeds."""
    rows = []
    for stage in POLICIES:
        for model in study.args.models:
            found = study.numbers[(study.numbers["stage"] == stage) & (study.numbers["model"] == model)]
            row = {"stage": STAGES[stage], "model": model, "seeds": len(found)}
            for name in ("win rate", "at equal length", "tokens", "ROUGE-L"):
                row[name] = with_sd(found[name].dropna(), "")
            rows += [row] if len(found) else []
    return rows


def paper_table(study: Study) -> list[dict]:
    """The paper's numbers beside those of the runs, for models of the paper's sizes."""
    rows = []
    for name, (stage, column, paper) in PAPER.items():
        for model in (model for model in study.args.models if model in paper):
            mine = study.numbers[(study.numbers["stage"] == stage) & (study.numbers["model"] == model)][column].dropna()
            ours = with_sd(mine.nlargest(1) if name == BEST else mine, "no runs")
            theirs = " ± ".join(f"{x:.3f}" for x in paper[model] if x is not None)
            rows.append({"": name, "model": model, "paper": theirs, "ours": ours, "seeds": len(mine)})
    return rows


def main(args: Args):
    keys = [(stage, model, seed) for stage in STAGES for model in args.models for seed in args.seeds]
    folders = {key: Path(args.runs, *map(str, key)) for key in keys}
    folders = {key: run for key, run in folders.items() if (run / "args.json").exists()}
    metrics = {key: [] for key in keys}
    for key, run in folders.items():
        if (run / "metrics.jsonl").exists():
            metrics[key] = read_metrics(run, may_be_empty=True)
    if not folders:
        fail(f"{args.runs}: no runs of {', '.join(args.models)} there ({{stage}}/{{model}}/{{seed}})")
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    stem = f"judge_{re.sub('[^A-Za-z0-9.-]+', '-', args.judge or '')}"
    problems = work_out(args, folders, stem)
    study = read_study(args, metrics, folders, stem)
    for name, (title, columns, panels) in FIGURES.items():
        title, columns = title.format(seeds=len(args.seeds)), columns or len(args.seeds)
        if not write_figure(args, name, title, columns, panels(study)):
            problems.append(f"{name}: nothing to draw")
    missing = []
    for stage in STAGES:
        for model in args.models:
            if seeds := [seed for seed in args.seeds if not metrics[stage, model, seed]]:
                names = f"{Path(args.runs, stage, model)}: seeds {', '.join(map(str, seeds))}"
                missing.append(f"{names}; the first: `{training_command(args, stage, model, seeds[0])}`")

    judge = f", judged by {args.judge}" if args.judge else ""
    tables = {"Paper / ours": paper_table(study)}
    tables[f"Policies: mean ± sample standard deviation over seeds{judge}"] = policies_table(study)
    text = f"# Figures\n\n`python eval/figures.py {shlex.join(sys.argv[1:])}`\n\n"
    text += "".join(f"## {title}\n\n{markdown(rows)}\n" for title, rows in tables.items() if rows)
    for title, rows in (("Missing", problems), ("Runs that are not there", missing)):
        text += f"## {title}\n\n" * bool(rows) + "".join(f"- {row}\n" for row in rows) + "\n" * bool(rows)
    (Path(args.output_dir) / "figures.md").write_text(text.rstrip() + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    main(tyro.cli(Args))
