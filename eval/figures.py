"""The paper's figures, and a table "paper / ours", from run folders: one call for all.

    python eval/figures.py --judge gpt-3.5-turbo                    # runs/, the paper's sizes and seeds
    python eval/figures.py --models nano-xs nano-s nano-m --runs runs/quickstart/posts-1 \\
        --judge quickstart/truth.py:score --output-dir quickstart/results/nano
    python eval/figures.py --wandb entity/project                   # learning curves of runs that are not here

Reads {runs}/{stage}/{model}/{seed}: metrics.jsonl and what --run-eval and samples.py left in eval/. Lets rm_report.py,
judge.py (with --judge; an endpoint's answers are kept, a second call costs nothing) and visualize_tokens.py work out
what the figures need of theirs. Writes figure_1, 4, 5, 7, 8, 9, 10, 11, 12 and 13 as PNG (--pdf: as PDF, too) and
CSV, rm_report* and tokens*, and figures.md: the paper's numbers beside ours where the sizes match, win rates, and every
run and every file that was missing, with the command that makes it. Lines are means over seeds in a band of one sample
standard deviation.
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
from matplotlib.figure import Figure

STAGES = {"sft": "SFT", "reward": "reward model", "ppo": "PPO", "ppo_whiten": "PPO, whitened rewards", "dpo": "DPO"}
POLICIES = ("sft", "dpo", "ppo", "ppo_whiten")
BINS = [-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0]  # edges of log(summary length / reference length), figure 12
POINTS = 100  # of a learning curve
COLORS = {"SFT": "C0", "DPO": "C2", "PPO": "C3", "PPO, whitened rewards": "C4"}
SINGLE = ("figure_9", "figure_12", "figure_13")  # of single runs

# what the paper says in numbers: table 5, Detail 17, section 7.1
PAPER = {
    "RM accuracy, validation": {"1b": (0.628, 0.002), "2.8b": (0.669, 0.003), "6.9b": (0.689, 0.004)},
    "RM accuracy, validation_cnndm": {"1b": (0.627, 0.013), "2.8b": (0.665, 0.010), "6.9b": (0.686, 0.003)},
    "agreement with the judge": {"1b": (0.4, None), "2.8b": (0.726, None), "6.9b": (0.767, None)},
    "best PPO win rate": {"6.9b": (0.8, None)},
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
    preference_dataset: str | None = None
    """pairs for the agreement of reward models and judge; default: what the first reward model was trained on"""
    split: str = "validation"
    """of the preference data: accuracy, calibration, agreement"""
    wandb: str | None = None
    """entity/project with the learning curves of runs that have no metrics.jsonl here"""
    pdf: bool = False
    """write each figure as PDF, too"""


class Panel(NamedTuple):
    """One panel of a figure. Rows are dicts of series, x, y and, by kind:
    curves   x episodes, y mean and sd over seeds
    sizes    x model, y of one seed: drawn as mean and sample standard deviation, with the seeds as points
    points   x and y of one run, drawn as points; series is `stage, model`
    steps    x and y with sd where there is one (a bin's standard error), drawn as a line with points
    tokens   x position, label its token, y a value"""

    title: str
    kind: str
    xlabel: str
    ylabel: str
    rows: list[dict]


# ---- helpers: reading ------------------------------------------------------------------------------------------------


def fail(message: str):
    """End the process with one clear message on standard error and exit code 1."""
    raise SystemExit(f"error: {message}")


def run_folder(args: Args, stage: str, model: str, seed: int) -> Path:
    return Path(args.runs) / stage / model / str(seed)


def training_command(args: Args, stage: str, model: str, seed: int) -> str:
    """The command that makes a run; of a whitened one that of the plain run where it is there, so that all else is
    equal."""
    plain = run_folder(args, "ppo", model, seed) / "args.json"
    command = f"python {stage.removesuffix('_whiten')}.py --model {model} --seed {seed}"
    command += " --run-eval" * (stage in ("reward", "dpo"))
    if stage == "ppo_whiten":
        command = json.loads(plain.read_text()).get("command", command) if plain.exists() else command
        command += f" --whiten-rewards --output-dir {run_folder(args, stage, model, seed)}"
    return command


def wandb_metrics(project: str, stage: str, model: str, seed: int) -> list[dict]:
    """The metrics of the newest W&B run of that name, a dict per update; [] where there is none."""
    import wandb

    filters = {"display_name": f"{stage}__{model}__{seed}"}
    found = next(iter(wandb.Api().runs(project, filters=filters, order="-created_at")), None)
    return list(found.scan_history()) if found else []


def run_metrics(args: Args, stage: str, model: str, seed: int) -> list[dict]:
    """The metrics of a run, a dict per update: metrics.jsonl, or else W&B's; [] where there are neither."""
    file = run_folder(args, stage, model, seed) / "metrics.jsonl"
    if file.exists():
        return [json.loads(line) for line in file.read_text().splitlines()]
    return wandb_metrics(args.wandb, stage, model, seed) if args.wandb else []


def read_eval(args: Args, stage: str, model: str, seed: int, name: str) -> pandas.DataFrame | None:
    """A table in a run's eval/, None where it is not there."""
    file = run_folder(args, stage, model, seed) / "eval" / name
    return pandas.read_csv(file, keep_default_na=False) if file.exists() else None


def moving_mean(values: list[float], window: int) -> list[float]:
    """Mean of each value and the window - 1 before it, as far as there are any."""
    return [mean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def mean_and_sd(values: Iterable[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (n - 1); 0 for a single value."""
    values = list(values)
    return mean(values), stdev(values) if len(values) > 1 else 0.0


def mean_and_deviation(values) -> str:
    """`mean ± sample standard deviation`, the latter with two values or more."""
    values = numpy.asarray(values, float)
    return f"{values.mean():.3f}" + (f" ± {values.std(ddof=1):.3f}" if len(values) > 1 else "")


def length_controlled(wins: numpy.ndarray, ratios: numpy.ndarray) -> tuple[float, float]:
    """(win rate at equal length, slope) of the logistic regression of wins (n,) in [0, 1] on log length ratios (n,), by
    Newton's method; a ridge of 1e-6 keeps it finite where the lengths tell all wins apart."""
    design, weights = numpy.stack([numpy.ones_like(ratios), ratios], 1), numpy.zeros(2)
    for _ in range(100):
        chances = 1 / (1 + numpy.exp(-numpy.clip(design @ weights, -30, 30)))
        gradient = design.T @ (wins - chances) - 1e-6 * weights
        curvature = (design * (chances * (1 - chances))[:, None]).T @ design + 1e-6 * numpy.eye(2)
        step = numpy.linalg.solve(curvature, gradient)
        weights = weights + step / max(1.0, numpy.abs(step).max())
        if numpy.abs(step).max() < 1e-10:
            break
    return 1 / (1 + exp(-weights[0])), float(weights[1])


def length_bins(wins: numpy.ndarray, ratios: numpy.ndarray) -> list[dict]:
    """Win rate and its standard error in each bin of log length ratios that has any: wins, ratios (n,) (figure 12)."""
    edges = [-numpy.inf, *BINS, numpy.inf]
    bins = []
    for start, end in zip(edges, edges[1:], strict=False):
        inside = wins[(ratios >= start) & (ratios < end)]
        if len(inside):
            deviation = inside.std(ddof=1) / len(inside) ** 0.5 if len(inside) > 1 else numpy.nan
            bins.append({"from": start, "to": end, "examples": len(inside), "win_rate": inside.mean(), "se": deviation})
    return bins


def markdown(rows: list[dict]) -> str:
    """A Markdown table of rows with equal keys."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    cells = [[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


# ---- helpers: panels -------------------------------------------------------------------------------------------------


def curves_panel(metrics: dict, stage: str, args: Args, key: str, title: str) -> Panel:
    """A metric over episodes, a line per model: the moving mean over a twentieth of the updates, at up to POINTS."""
    rows, window = [], 1
    for model in args.models:
        found = [metrics[stage, model, seed] for seed in args.seeds]
        found = [{line["episode"]: line[key] for line in lines if line.get(key) is not None} for lines in found]
        found = [line for line in found if line]
        if not found:
            continue
        window = max(1, len(found[0]) // 20)
        smooth = [dict(zip(line, moving_mean(list(line.values()), window), strict=True)) for line in found]
        episodes = sorted(set.intersection(*map(set, smooth)))
        for i in sorted({round(i) for i in numpy.linspace(0, len(episodes) - 1, POINTS)} if episodes else []):
            y, sd = mean_and_sd(line[episodes[i]] for line in smooth)
            rows.append({"series": model, "x": episodes[i], "y": y, "sd": sd, "n": len(smooth)})
    note = f", moving mean over {window} updates" if window > 1 else ""
    return Panel(title, "curves", f"episodes{note}", key, rows)


def sizes_panel(
    title: str, ylabel: str, values: dict[str, dict[tuple[str, int], float]], args: Args, *paper: str
) -> Panel:
    """{series: {(model, seed): value}} over models, with the paper's numbers of these names where the models match."""
    rows = [
        {"series": series, "x": model, "seed": seed, "y": y}
        for series, found in values.items()
        for (model, seed), y in found.items()
    ]
    for name in paper:
        for model, (y, sd) in PAPER[name].items():
            if model in args.models:
                rows.append({"series": f"paper, {name}", "x": model, "y": y, "sd": sd})
    return Panel(title, "sizes", "model", ylabel, rows)


def bins_panel(judged: dict, args: Args, model: str, seed: int) -> Panel:
    """Win rate by log length ratio of the policies of one model and seed (figures 12 and 13)."""
    rows = []
    for stage in POLICIES:
        if (stage, model, seed) in judged:
            frame = judged[stage, model, seed]
            for found in length_bins(frame["win"].to_numpy(), frame["length_ratio"].to_numpy()):
                start, end = max(found["from"], -1.5), min(found["to"], 1.5)  # the outer bins have no end
                row = {"series": STAGES[stage], "x": (start + end) / 2, "y": found["win_rate"]}
                rows.append(row | {"sd": found["se"], "n": found["examples"]})
    return Panel(f"{model}, seed {seed}", "steps", "log(summary / reference length)", "win rate", rows)


# ---- helpers: drawing ------------------------------------------------------------------------------------------------


def draw_panel(axis, panel: Panel, models: tuple[str, ...]):
    """Draw a panel; one without rows says so."""
    frame = pandas.DataFrame(panel.rows)
    axis.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
    if frame.empty:
        axis.text(0.5, 0.5, "no runs", ha="center", transform=axis.transAxes)
        axis.set(xticks=[], yticks=[])
        return
    series = list(dict.fromkeys(frame["series"]))
    for i, name in enumerate(series):
        mine = frame[frame["series"] == name]
        x, y, color = mine["x"], mine["y"], COLORS.get(name, f"C{models.index(name) if name in models else i + 5}")
        if panel.kind == "curves":
            axis.plot(x, y, color=color, label=name)
            axis.fill_between(x, y - mine["sd"], y + mine["sd"], color=color, alpha=0.2, linewidth=0)
        elif panel.kind == "sizes" and name.startswith("paper"):
            places = [models.index(model) for model in x]
            axis.errorbar(places, y, mine["sd"].fillna(0), color="black", marker="_", ms=16, ls=":", label=name)
        elif panel.kind == "sizes":
            groups = [list(y[x == model]) for model in models]
            places = [place + 0.08 * (i - (len(series) - 1) / 2) for place, group in enumerate(groups) if group]
            centers, spreads = zip(*(mean_and_sd(group) for group in groups if group), strict=True)
            axis.errorbar(places, centers, spreads, color=color, marker="o", capsize=3, label=name)
            for place, group in zip(places, (group for group in groups if group), strict=True):
                axis.plot([place + 0.03] * len(group), group, ".", color=color, alpha=0.4)
        elif panel.kind == "points":
            stage, model = name.rsplit(" ", 1)
            marker = "so^v"[[STAGES[stage] for stage in POLICIES].index(stage)]
            axis.plot(x, y, marker, color=f"C{models.index(model)}", alpha=0.7, label=name)
        elif panel.kind == "steps":
            spread = mine["sd"].fillna(0) if "sd" in mine else None
            black = name.startswith("1 / (1")
            style = {"color": "black"} if black else {"color": color, "marker": "o", "ms": 3, "capsize": 2}
            axis.errorbar(x, y, spread, label=name, **style)
        else:
            axis.plot(x, y, marker="o", ms=3, label=name)
            axis.set_xticks(list(x), list(mine["label"]), rotation=90, fontsize=7)
    if panel.kind == "sizes":
        axis.set_xticks(range(len(models)), models)
        axis.set_xlim(-0.5, len(models) - 0.5)
    if panel.kind == "tokens":
        axis.axhline(0, color="gray", linewidth=0.5)
    beside = {"loc": "upper left", "bbox_to_anchor": (1, 1)} if panel.kind == "points" else {}  # else it hides points
    axis.legend(fontsize=7, **beside)


def write_figure(args: Args, name: str, title: str, panels: list[Panel], columns: int) -> bool:
    """Write a figure and its CSV; nothing, and False, where no panel has a row."""
    if not any(panel.rows for panel in panels):
        return False
    lines = -(-len(panels) // columns)
    width = {1: 6.5}.get(columns, 4.4 * columns) + 3 * any(panel.kind == "tokens" for panel in panels)
    figure = Figure(figsize=(width, 3.3 * lines), layout="constrained")
    for axis, panel in zip(figure.subplots(lines, columns, squeeze=False).flat, panels, strict=False):
        draw_panel(axis, panel, args.models)
    figure.suptitle(title, size=10)
    target = Path(args.output_dir) / name
    figure.savefig(f"{target}.png", dpi=75)
    if args.pdf:
        figure.savefig(f"{target}.pdf")
    rows = [{"panel": panel.title} | row for panel in panels for row in panel.rows]
    pandas.DataFrame(rows).to_csv(f"{target}.csv", index=False, float_format="%.6g")
    return True


def tool(script: str, *arguments) -> bool:
    """Run a script beside this one, its output for all to see; whether it ended well."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *map(str, arguments)]
    print(f"$ python eval/{script} {' '.join(map(str, arguments))}", flush=True)
    return subprocess.run(command).returncode == 0


def work_out(args: Args, folders: dict) -> tuple[dict, list[str]]:
    """Let the other scripts of this folder make what the figures need of them: {(stage, model, seed): judge.py's table,
    valid answers only}, and what was missing or went wrong. `folders`: {(stage, model, seed): run folder} of the runs
    that are there."""
    out, missing = Path(args.output_dir), []
    samples = {key: folder / "eval" / "samples_validation.csv" for key, folder in folders.items() if key[0] in POLICIES}
    pairs, options = Path(args.runs) / f"pairs_{args.split}.csv", []
    rewards = [folder for key, folder in folders.items() if key[0] == "reward"]
    trained_on = json.loads((rewards[0] / "args.json").read_text())["preference_dataset"] if rewards else None
    preference_dataset = args.preference_dataset or trained_on
    missing += [f"{file}, of eval/samples.py" for file in samples.values() if not file.exists()]
    judged_files = {}
    if args.judge:
        name = re.sub("[^A-Za-z0-9.-]+", "-", args.judge)
        judge = ["--judge", args.judge, *(["--base-url", args.base_url] if args.base_url else [])]
        judged_files = {key: file.with_name(f"judge_{name}.csv") for key, file in samples.items() if file.exists()}
        runs = [folders[key] for key in judged_files]
        if not runs or not tool("judge.py", *runs, *judge):
            missing.append(f"win rates: judge.py {'stopped with an error' if runs else 'has no samples to judge'}")
        written = preference_dataset and Path(preference_dataset).exists()
        command = ["--preference-dataset", preference_dataset, "--split", args.split, "--write-pairs", pairs]
        if written and tool("rm_report.py", *command) and tool("judge.py", pairs, *judge):
            options = ["--judged", pairs.with_name(f"judge_{name}_of_{pairs.stem}.csv")]
        else:
            missing.append(f"agreement of reward models and judge: no pairs judged of {preference_dataset}")
    else:
        missing.append(
            "win rates and the agreement of reward models and judge (figures 1, 7 left, 11, 12, 13): --judge"
        )
    command = ["--models", *args.models, "--seeds", *args.seeds, "--runs", args.runs, "--split", args.split]
    if not tool("rm_report.py", *command, *options, "--output", out / "rm_report"):
        missing.append("table 5, calibration (figure 7, right): rm_report.py stopped with an error")
    # figures 6 and 9, tables 8 and 10 to 20: of the largest model with all that they take
    seeds = [(model, seed) for model in reversed(args.models) for seed in args.seeds]
    whole = [key for key in seeds if all((stage, *key) in folders for stage in ("sft", "reward", "ppo"))]
    if whole:
        model, seed = whole[0]
        settings = json.loads((folders["sft", model, seed] / "args.json").read_text())
        base = {size: f"EleutherAI/pythia-{size}-deduped" for size in ("1b", "2.8b", "6.9b")}
        command = ["--base", base.get(settings["model"], settings["model"]), "--dataset", settings["dataset"]]
        for stage, flag in (("sft", "--sft"), ("ppo", "--ppo"), ("dpo", "--dpo"), ("reward", "--reward-model")):
            command += [flag, folders[stage, model, seed]] if (stage, model, seed) in folders else []
        if not tool("visualize_tokens.py", *command, "--output", out / "tokens"):
            missing.append("rewards and values of a completion (figure 9): visualize_tokens.py stopped with an error")
    else:
        missing.append("rewards and values of a completion (figure 9): a model with SFT, reward model and PPO")
    judged = {}
    for key, file in judged_files.items():
        if file.exists():
            frame = pandas.read_csv(file, usecols=["id", "win", "length_ratio"])
            judged[key] = frame.dropna(subset="win")
    return judged, missing


def make_figures(args: Args, folders: dict, metrics: dict, judged: dict) -> dict[str, tuple[str, int, list[Panel]]]:
    """{file name: (title, columns, panels)} of the paper's figures."""
    out = Path(args.output_dir)

    def per_seed(stage: str, value: Callable) -> dict[tuple[str, int], float]:
        """{(model, seed): value(key)} of a stage's runs, without those where it is None."""
        found = {key[1:]: value(key) for key in folders if key[0] == stage}
        return {key: x for key, x in found.items() if x is not None}

    def measure(key, name: str, column: str, **where) -> float | None:
        """A cell of a table in eval/, of its first row with these values."""
        frame = read_eval(args, *key, name)
        for field, value in where.items() if frame is not None else ():
            frame = frame[frame[field] == value]
        return None if frame is None or frame.empty else float(frame[column].iloc[0])

    def win_rate(key) -> float | None:
        return float(judged[key]["win"].mean()) if key in judged and len(judged[key]) else None

    def rates(stages) -> dict[str, dict[tuple[str, int], float]]:
        return {STAGES[stage]: per_seed(stage, win_rate) for stage in stages}

    def against_tokens(stages) -> list[dict]:
        """Win rate and mean summary length (tokens) of each run."""
        rows = []
        for stage in stages:
            for (model, seed), y in per_seed(stage, win_rate).items():
                x = measure((stage, model, seed), "rouge.csv", "response_tokens", split="validation")
                rows.append({"series": f"{STAGES[stage]} {model}", "seed": seed, "x": x, "y": y})
        return rows

    def accuracy(stage: str, data: str) -> dict[tuple[str, int], float]:
        return per_seed(stage, lambda key: measure(key, "accuracy.csv", "accuracy", data=data, group="overall"))

    def read(name: str) -> list[dict]:
        return pandas.read_csv(out / name).to_dict("records") if (out / name).exists() else []

    rouge = {"SFT": per_seed("sft", lambda key: measure(key, "rouge.csv", "rougeL", split="validation"))}
    agreement = {
        "reward model": {(row["model"], row["seed"]): row["agreement"] for row in read("rm_report_agreement.csv")}
    }
    calibration = [
        {"series": row["model"], "x": row["difference"], "y": row["accuracy"], "n": row["pairs"]}
        for row in read("rm_report_calibration.csv")
    ]
    widest = max((row["x"] for row in calibration), default=0.0)
    ideal = [{"series": "1 / (1 + exp(-x))", "x": x, "y": 1 / (1 + exp(-x))} for x in numpy.linspace(0, widest, 50)]
    tokens = [row for row in read("tokens_tokens.csv") if row["model"].lower() == "ppo"]
    tokens = [row for row in tokens if row["id"] == tokens[0]["id"]]
    by_token = [
        [
            {"series": key, "x": row["position"], "y": row[key], "label": repr(row["token"])[1:-1]}
            for row in tokens
            if not pandas.isna(row[key])
        ]
        for key in ("token_reward", "value", "reward_logit")
    ]
    kinds = {"validation": "TL;DR", "validation_cnndm": "CNN/DM"}
    accuracies = {kind: accuracy("reward", data) for data, kind in kinds.items()}
    both = {"reward model": accuracy("reward", args.split), "DPO, implicit": accuracy("dpo", args.split)}
    largest = next(((m, s) for m in reversed(args.models) for s in args.seeds if ("ppo", m, s) in judged), None)
    found = {
        "figure_1": (
            "Win rate against the references",
            1,
            [sizes_panel("", "win rate", rates(("sft", "dpo", "ppo")), args, "best PPO win rate")],
        ),
        "figure_4": (
            "SFT",
            2,
            [
                curves_panel(metrics, "sft", args, "loss/train", "training loss"),
                sizes_panel("ROUGE-L, validation", "F-measure", rouge, args),
            ],
        ),
        "figure_5": (
            "Reward model",
            2,
            [
                curves_panel(metrics, "reward", args, "accuracy/train", "training accuracy"),
                curves_panel(metrics, "reward", args, "loss/train", "training loss"),
                curves_panel(metrics, "reward", args, "rewards/chosen", "reward of the chosen response"),
                sizes_panel("accuracy", "accuracy", accuracies, args, *(f"RM accuracy, {data}" for data in kinds)),
            ],
        ),
        "figure_7": (
            "Reward models: agreement with the judge, calibration",
            2,
            [
                sizes_panel("agreement with the judge", "share of pairs", agreement, args, "agreement with the judge"),
                Panel(
                    "calibration",
                    "steps",
                    "score difference",
                    "accuracy",
                    [*ideal, *calibration] if calibration else [],
                ),
            ],
        ),
        "figure_8": (
            "DPO's implicit reward model",
            2,
            [
                curves_panel(metrics, "dpo", args, "accuracy/train", "training accuracy"),
                curves_panel(metrics, "dpo", args, "loss/train", "training loss"),
                curves_panel(metrics, "dpo", args, "rewards/chosen", "implicit reward of the chosen response"),
                sizes_panel(f"accuracy, {args.split}", "accuracy", both, args),
            ],
        ),
        "figure_9": (
            "Rewards and values of a PPO completion",
            1,
            [
                Panel("rewards: -kl_coef x KL per token, and the score", "tokens", "", "reward", by_token[0]),
                Panel("values, and the reward model's logits (figure 6)", "tokens", "", "", by_token[1] + by_token[2]),
            ],
        ),
        "figure_10": (
            "PPO",
            2,
            [
                curves_panel(metrics, "ppo", args, "objective/rlhf_reward", "RLHF reward"),
                curves_panel(metrics, "ppo", args, "objective/kl", "KL, summed over tokens"),
                curves_panel(metrics, "ppo", args, "objective/score", "score"),
                curves_panel(metrics, "ppo", args, "response/length", "response length (tokens)"),
            ],
        ),
        "figure_11": (
            "PPO with and without whitened rewards",
            2,
            [
                sizes_panel("", "win rate", rates(("ppo", "ppo_whiten")), args),
                Panel("", "points", "mean summary length (tokens)", "win rate", against_tokens(("ppo", "ppo_whiten"))),
            ],
        ),
        "figure_12": (
            "Win rate and length",
            2,
            [
                Panel("", "points", "mean summary length (tokens)", "win rate", against_tokens(POLICIES)),
                *([bins_panel(judged, args, *largest)] if largest else []),
            ],
        ),
        "figure_13": (
            "Win rate by summary length",
            len(args.seeds),
            [bins_panel(judged, args, model, seed) for model in args.models for seed in args.seeds],
        ),
    }
    return found


def policies_table(args: Args, folders: dict, judged: dict) -> list[dict]:
    """A row per stage and model: mean ± sample standard deviation over seeds."""
    rows = []
    for stage in POLICIES:
        for model in args.models:
            seeds = [key for key in folders if key[:2] == (stage, model)]
            tables = [read_eval(args, *key, "rouge.csv") for key in seeds]
            tables = [table[table["split"] == "validation"].iloc[0] for table in tables if table is not None]
            wins = [judged[key] for key in seeds if key in judged and len(judged[key])]
            columns = {
                "win rate": [frame["win"].mean() for frame in wins],
                "at equal length": [
                    length_controlled(frame["win"].to_numpy(), frame["length_ratio"].to_numpy())[0] for frame in wins
                ],
                "tokens": [float(table["response_tokens"]) for table in tables],
                "ROUGE-L": [float(table["rougeL"]) for table in tables],
            }
            if seeds:
                row = {"stage": STAGES[stage], "model": model, "seeds": len(seeds)}
                rows.append(
                    row | {name: mean_and_deviation(values) if values else "" for name, values in columns.items()}
                )
    return rows


def paper_table(args: Args, figures: dict) -> list[dict]:
    """The paper's numbers beside those of the runs, for the models that are the paper's."""
    panels = {
        "RM accuracy, validation": ("figure_5", 3, "TL;DR"),
        "RM accuracy, validation_cnndm": ("figure_5", 3, "CNN/DM"),
        "agreement with the judge": ("figure_7", 0, "reward model"),
        "best PPO win rate": ("figure_1", 0, "PPO"),
    }
    rows = []
    for name, (figure, panel, series) in panels.items():
        for model in (model for model in args.models if model in PAPER[name]):
            found = [x for x in figures[figure][2][panel].rows if x["series"] == series and x["x"] == model]
            values = [row["y"] for row in found]
            values = [max(values)] if values and name.startswith("best") else values
            ours = mean_and_deviation(values) if values else "no runs"
            paper = " ± ".join(f"{x:.3f}" for x in PAPER[name][model] if x is not None)
            rows.append({"": name, "model": model, "paper": paper, "ours": ours, "seeds": len(found)})
    return rows


def main(args: Args):
    keys = [(stage, model, seed) for stage in STAGES for model in args.models for seed in args.seeds]
    folders = {key: run_folder(args, *key) for key in keys if (run_folder(args, *key) / "args.json").exists()}
    metrics = {key: run_metrics(args, *key) for key in keys}
    if not folders and not any(metrics.values()):
        fail(f"{args.runs}: no runs of {', '.join(args.models)} there ({{stage}}/{{model}}/{{seed}})")
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    judged, problems = work_out(args, folders)
    figures = make_figures(args, folders, metrics, judged)
    for name, (title, columns, panels) in figures.items():
        seeds = f": mean ± standard deviation over up to {len(args.seeds)} seeds" if name not in SINGLE else ""
        if not write_figure(args, name, title + seeds, panels, columns):
            problems.append(f"{name}: nothing to draw")
    missing = []
    for stage in STAGES:
        for model in args.models:
            if seeds := [seed for seed in args.seeds if not metrics[stage, model, seed]]:
                command = training_command(args, stage, model, seeds[0])
                names = f"{run_folder(args, stage, model, seeds[0]).parent}: seeds {', '.join(map(str, seeds))}"
                missing.append(f"{names}; the first: `{command}`")

    text = f"# Figures\n\n`python eval/figures.py {shlex.join(sys.argv[1:])}`\n\n"
    if table := paper_table(args, figures):
        text += f"## Paper / ours\n\n{markdown(table)}\n"
    if table := policies_table(args, folders, judged):
        judge = f", judged by {args.judge}" if args.judge else ""
        text += f"## Policies: mean ± sample standard deviation over seeds{judge}\n\n{markdown(table)}\n"
    for title, rows in (("Missing", problems), ("Runs that are not there", missing)):
        if rows:
            text += f"## {title}\n\n" + "".join(f"- {row}\n" for row in rows) + "\n"
    (Path(args.output_dir) / "figures.md").write_text(text.rstrip() + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    main(tyro.cli(Args))
