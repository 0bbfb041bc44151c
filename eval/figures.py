"""The paper's figures, and a table "paper / ours", from run folders.

    python eval/figures.py --judge gpt-3.5-turbo                    # runs/, the paper's sizes and seeds
    python eval/figures.py --models nano-xs nano-s nano-m --runs runs/quickstart/posts-1 \\
        --judge quickstart/truth.py:score --output-dir quickstart/results/nano

Reads {runs}/{stage}/{model}/{seed}: metrics.jsonl and the tables that --run-eval and samples.py wrote to eval/. Calls
rm_report.py, visualize_tokens.py and, with --judge, judge.py, whose answers are kept, so a second call costs nothing.
Writes figure_1, 4, 5 and 7 to 13 as PNG and CSV, rm_report* and tokens*, and figures.md: the paper's numbers beside
ours where the sizes match, win rates, and missing runs. Lines are means over seeds; bands and error bars are one sample
standard deviation.
"""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy
import pandas
import tyro
from eval_helpers import fail, markdown, with_sd
from matplotlib.figure import Figure
from run_metrics import read_metrics
from scipy.special import expit

STAGES = {"sft": "SFT", "reward": "reward model", "dpo": "DPO", "ppo": "PPO", "ppo_whiten": "PPO, whitened rewards"}
POLICIES = ("sft", "dpo", "ppo", "ppo_whiten")
POINTS = 100  # of a learning curve
COLORS = {"SFT": "C0", "DPO": "C2", "PPO": "C3", "PPO, whitened rewards": "C4", "1 / (1 + exp(-x))": "black"}
MARKERS = {"SFT": "s", "DPO": "o", "PPO": "^", "PPO, whitened rewards": "v"}

# the paper's numbers (table 5, Detail 17, section 7.1): stage, column of run_numbers(), {model: mean, sd}
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
    metrics: dict[tuple, list[dict]]  # a dict per update; only runs with metrics
    numbers: pandas.DataFrame  # a row per run: stage, model, seed and the columns of run_numbers()
    bins: dict[tuple, pandas.DataFrame]  # judge.py's win rates by length ratio


# ---- reading -----------------------------------------------------------------------------------------------------


def rows_of(file: Path) -> list[dict]:
    """Return the rows of a CSV file, or [] if there is none."""
    return pandas.read_csv(file).to_dict("records") if file.exists() else []


def run_numbers(folder: Path, stem: str) -> dict[str, float]:
    """Return the numbers in the tables of a run's eval/, NaN without a table. `stem` begins the names of judge.py's."""

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


def read_study(args: Args, folders: dict[tuple, Path], stem: str) -> Study:
    """Read the run folders, and rm_report.py's agreement of reward models and judge."""
    agreement = rows_of(Path(args.output_dir, "rm_report_agreement.csv"))
    agreement = {("reward", row["model"], row["seed"]): row["agreement"] for row in agreement}
    metrics, numbers, bins = {}, [], {}
    for key, run in folders.items():
        row = dict(zip(("stage", "model", "seed"), key, strict=True)) | run_numbers(run, stem)
        numbers.append(row | {"agreement": agreement.get(key, numpy.nan)})
        if (run / "metrics.jsonl").exists():
            metrics[key] = read_metrics(run, may_be_empty=True)
        if (file := run / "eval" / f"{stem}_bins.csv").exists():
            bins[key] = pandas.read_csv(file)
    return Study(args, metrics, pandas.DataFrame(numbers), bins)


# ---- drawing -----------------------------------------------------------------------------------------------------
# draw_*(axis, name, rows, i, args) adds one series to a panel: its rows (a data frame), the i-th of the panel


def draw_lines(axis, name: str, rows: pandas.DataFrame, i: int, args: Args):
    """Draw y over x with a band of one sd where there is one, and the labels of x where it has them."""
    color = COLORS.get(name, f"C{args.models.index(name) if name in args.models else i + 5}")
    axis.plot(rows["x"], rows["y"], color=color, marker="." if len(rows) < 30 else None, label=name)
    if "sd" in rows:
        sd = rows["sd"].fillna(0)
        axis.fill_between(rows["x"], rows["y"] - sd, rows["y"] + sd, color=color, alpha=0.2, linewidth=0)
    if "label" in rows:
        axis.set_xticks(list(rows["x"]), list(rows["label"]), rotation=90, fontsize=7)


def draw_sizes(axis, name: str, rows: pandas.DataFrame, i: int, args: Args):
    """Draw y over models x: mean and standard deviation beside the seeds, or the paper's y and sd."""
    axis.set_xticks(range(len(args.models)), args.models)
    axis.set_xlim(-0.5, len(args.models) - 0.5)
    places = rows["x"].map(args.models.index)
    if name.startswith("paper"):
        sd = rows["sd"].astype(float).fillna(0)
        axis.errorbar(places, rows["y"], sd, color="black", marker="_", ms=16, ls=":", label=name)
        return
    color = COLORS.get(name, f"C{i + 5}")
    groups = rows["y"].groupby(places + 0.08 * i, sort=False).agg(["mean", "std"]).fillna(0)
    axis.errorbar(groups.index, groups["mean"], groups["std"], color=color, marker="o", capsize=3, label=name)
    axis.plot(places + 0.08 * i + 0.03, rows["y"], ".", color=color, alpha=0.4)


def draw_points(axis, name: str, rows: pandas.DataFrame, i: int, args: Args):
    """Draw a point per run; the series is `stage model`."""
    stage, model = name.rsplit(" ", 1)
    axis.plot(rows["x"], rows["y"], MARKERS[stage], color=f"C{args.models.index(model)}", alpha=0.7, label=name)


def write_figure(args: Args, name: str, title: str, columns: int, panels: list[Panel]) -> bool:
    """Write a figure and its CSV file. Returns False, and writes nothing, if no panel has rows."""
    if not any(panel.rows for panel in panels):
        return False
    lines = -(-len(panels) // columns)
    width = {1: 6.5}.get(columns, 4.4 * columns) + 3 * ("label" in panels[0].rows[0] if panels[0].rows else 0)
    figure = Figure(figsize=(width, 3.3 * lines), layout="constrained")
    for axis, panel in zip(figure.subplots(lines, columns, squeeze=False).flat, panels, strict=False):
        axis.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
        if not panel.rows:
            axis.text(0.5, 0.5, "no runs", ha="center", transform=axis.transAxes)
            continue
        for i, (series, rows) in enumerate(pandas.DataFrame(panel.rows).groupby("series", sort=False)):
            panel.draw(axis, series, rows, i, args)
        beside = {"loc": "upper left", "bbox_to_anchor": (1, 1)}  # where it hides no points
        axis.legend(fontsize=7, **(beside if panel.draw is draw_points else {}))
    figure.suptitle(title, size=10)
    figure.savefig(Path(args.output_dir, f"{name}.png"), dpi=75)
    rows = [{"panel": panel.title} | row for panel in panels for row in panel.rows]
    pandas.DataFrame(rows).to_csv(Path(args.output_dir, f"{name}.csv"), index=False, float_format="%.6g")
    return True


# ---- panels ------------------------------------------------------------------------------------------------------


def stage_curves(study: Study, stage: str, titles: dict[str, str]) -> list[Panel]:
    """Return a panel for each of a stage's metrics, {metric: title}."""
    return [curves_panel(study.metrics, stage, study.args, key, title) for key, title in titles.items()]


def curves_panel(metrics: dict, stage: str, args: Args, key: str, title: str) -> Panel:
    """Return a metric over episodes, a line per model: the moving mean over a twentieth of the updates, at up to
    POINTS."""
    rows, window = [], 1
    for model in args.models:
        found = [metrics.get((stage, model, seed), []) for seed in args.seeds]
        found = [pandas.Series({x.get("episode", 0): x.get(key) for x in run}, dtype=float).dropna() for run in found]
        found = [line for line in found if len(line)]
        if not found:
            continue
        window = max(1, len(found[0]) // 20)
        smooth = pandas.concat([line.rolling(window, 1).mean() for line in found], axis=1, join="inner").sort_index()
        smooth = smooth.iloc[numpy.unique(numpy.linspace(0, len(smooth) - 1, min(POINTS, len(smooth))).round())]
        for x, y, sd in zip(smooth.index, smooth.mean(axis=1), smooth.std(axis=1).fillna(0), strict=True):
            rows.append({"series": model, "x": x, "y": y, "sd": sd, "n": len(found)})
    note = f", moving mean over {window} updates" if window > 1 else ""
    return Panel(title, draw_lines, f"episodes{note}", key, rows)


def sizes_panel(study: Study, title: str, ylabel: str, values: dict[str, tuple[str, str]], *paper: str) -> Panel:
    """Return {series: (stage, column of the numbers)} over models, with the paper's numbers of these names."""
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
    """Return the win rates of stages over models."""
    return sizes_panel(study, "", "win rate", {STAGES[stage]: (stage, "win rate") for stage in stages}, *paper)


def calibration_panel(study: Study) -> Panel:
    """Return rm_report.py's accuracy by score difference, and the ideal calibration."""
    found = rows_of(Path(study.args.output_dir, "rm_report_calibration.csv"))
    xs = numpy.linspace(0, max((row["difference"] for row in found), default=0.0), 50) if found else []
    rows = [{"series": "1 / (1 + exp(-x))", "x": x, "y": expit(x)} for x in xs]
    for row in found:
        rows.append({"series": row["model"], "x": row["difference"], "y": row["accuracy"], "n": row["pairs"]})
    return Panel("calibration", draw_lines, "score difference", "accuracy", rows)


def by_token(study: Study, title: str, ylabel: str, *keys: str) -> Panel:
    """Return numbers of each token of the first PPO response that visualize_tokens.py shows."""
    tokens = rows_of(Path(study.args.output_dir, "tokens_tokens.csv"))
    tokens = [row for row in tokens if row["model"] == "ppo"]
    tokens = [row | {"label": repr(row["token"])[1:-1]} for row in tokens if row["id"] == tokens[0]["id"]]
    found = [(key, row) for key in keys for row in tokens if not pandas.isna(row[key])]
    rows = [{"series": key, "x": row["position"], "y": row[key], "label": row["label"]} for key, row in found]
    return Panel(title, draw_lines, "", ylabel, rows)


def by_length(study: Study, *stages: str) -> Panel:
    """Return the win rate over the mean summary length of each run."""
    columns = ["stage", "model", "seed", "tokens", "win rate"]
    found = pandas.concat([study.numbers[study.numbers["stage"] == stage] for stage in stages])
    found = found.dropna(subset=columns)[columns].values
    rows = [{"series": f"{STAGES[stage]} {m}", "seed": seed, "x": x, "y": y} for stage, m, seed, x, y in found]
    return Panel("", draw_points, "mean summary length (tokens)", "win rate", rows)


def by_length_ratio(study: Study, model: str, seed: int) -> Panel:
    """Return the win rate by log length ratio of the policies of one model and seed (figures 12 and 13)."""
    rows = []
    for stage in POLICIES:
        found = study.bins.get((stage, model, seed), pandas.DataFrame())
        for row in found.to_dict("records"):
            start, end = max(row["from"], -1.5), min(row["to"], 1.5)  # the outer bins have no end
            point = {"series": STAGES[stage], "x": (start + end) / 2, "y": row["win_rate"]}
            rows.append(point | {"sd": row["se"], "n": row["examples"]})
    return Panel(f"{model}, seed {seed}", draw_lines, "log(summary / reference length)", "win rate", rows)


# ---- figures -----------------------------------------------------------------------------------------------------

SFT = {"loss/train": "training loss"}
PAIRS = {"accuracy/train": "training accuracy", "loss/train": "training loss"}
REWARD = PAIRS | {"rewards/chosen": "reward of the chosen response"}
DPO = PAIRS | {"rewards/chosen": "implicit reward of the chosen response"}
PPO = {"objective/rlhf_reward": "RLHF reward", "objective/kl": "KL, summed over tokens", "objective/score": "score"}
PPO |= {"response/length": "response length (tokens)"}
ROUGE = {"SFT": ("sft", "ROUGE-L")}
RM_ACCURACY = {"TL;DR": ("reward", "TL;DR"), "CNN/DM": ("reward", "CNN/DM")}
RM_AGREEMENT = {"reward model": ("reward", "agreement")}
DPO_ACCURACY = {"reward model": ("reward", "TL;DR"), "DPO, implicit": ("dpo", "TL;DR")}


def figures(s: Study) -> dict[str, tuple[str, int, list[Panel]]]:
    """Return {file name: (title, columns of panels, panels)}."""
    models, seeds = s.args.models, s.args.seeds
    over_seeds = f": mean ± standard deviation over up to {len(seeds)} seeds"
    rouge = sizes_panel(s, "ROUGE-L, validation", "F-measure", ROUGE)
    accuracy = sizes_panel(s, "accuracy", "accuracy", RM_ACCURACY, VALIDATION, CNNDM)
    implicit = sizes_panel(s, "accuracy, validation", "accuracy", DPO_ACCURACY)
    agreement = sizes_panel(s, AGREEMENT, "share of pairs", RM_AGREEMENT, AGREEMENT)
    rewards = by_token(s, "rewards: -kl_coef x KL per token, and the score", "reward", "token_reward")
    values = by_token(s, "values, and the reward model's logits (figure 6)", "", "value", "reward_logit")
    calibration = calibration_panel(s)
    whitened = [win_rate_panel(s, POLICIES[2:]), by_length(s, *POLICIES[2:])]
    ratios = [by_length_ratio(s, model, seed) for model in models for seed in seeds]
    largest = [by_length_ratio(s, m, seed) for m in reversed(models) for seed in seeds if ("ppo", m, seed) in s.bins]
    return {
        "figure_1": (f"Win rate against the references{over_seeds}", 1, [win_rate_panel(s, POLICIES[:3], BEST)]),
        "figure_4": (f"SFT{over_seeds}", 2, [*stage_curves(s, "sft", SFT), rouge]),
        "figure_5": (f"Reward model{over_seeds}", 2, [*stage_curves(s, "reward", REWARD), accuracy]),
        "figure_7": (f"Reward models: {AGREEMENT}, calibration{over_seeds}", 2, [agreement, calibration]),
        "figure_8": (f"DPO's implicit reward model{over_seeds}", 2, [*stage_curves(s, "dpo", DPO), implicit]),
        "figure_9": ("Rewards and values of a PPO completion", 1, [rewards, values]),
        "figure_10": (f"PPO{over_seeds}", 2, stage_curves(s, "ppo", PPO)),
        "figure_11": (f"PPO with and without whitened rewards{over_seeds}", 2, whitened),
        "figure_12": ("Win rate and length", 2, [by_length(s, *POLICIES), *largest[:1]]),
        "figure_13": ("Win rate by summary length", len(seeds), ratios),
    }


# ---- the other tools ---------------------------------------------------------------------------------------------


def tool(script: str, *arguments):
    """Run a script beside this one. An error there is shown, and does not stop the other figures."""
    print(f"$ python eval/{script} {' '.join(map(str, arguments))}", flush=True)
    subprocess.run([sys.executable, str(Path(__file__).with_name(script)), *map(str, arguments)])


def judge_all(args: Args, folders: dict[tuple, Path]):
    """Let judge.py judge all samples, and the pairs that the first reward model was trained on."""
    files = [run / "eval" / "samples_validation.csv" for key, run in folders.items() if key[0] in POLICIES]
    pairs = Path(args.runs, "pairs_validation.csv")
    for run in [run for key, run in folders.items() if key[0] == "reward"][:1]:
        trained_on = json.loads((run / "args.json").read_text())["preference_dataset"]
        tool("rm_report.py", "--preference-dataset", trained_on, "--write-pairs", pairs)
    found = [file for file in [*files, pairs] if file.exists()]
    endpoint = ["--base-url", args.base_url] if args.base_url else []
    tool("judge.py", *found, "--judge", args.judge, *endpoint)


def call_tools(args: Args, folders: dict[tuple, Path], stem: str):
    """Let the other scripts of this folder write what the figures need."""
    out, judged = Path(args.output_dir), Path(args.runs, f"{stem}_of_pairs_validation.csv")
    if args.judge:
        judge_all(args, folders)
    command = ["--models", *args.models, "--seeds", *args.seeds, "--runs", args.runs, "--output", out / "rm_report"]
    tool("rm_report.py", *command, *(["--judged", judged] if args.judge and judged.exists() else []))
    # figures 6 and 9, tables 8 and 10 to 20: the largest model with all three
    runs = [(model, seed) for model in reversed(args.models) for seed in args.seeds]
    for key in [key for key in runs if all((stage, *key) in folders for stage in ("sft", "reward", "ppo"))][:1]:
        settings = json.loads((folders["sft", *key] / "args.json").read_text())
        base = {size: f"EleutherAI/pythia-{size}-deduped" for size in ("1b", "2.8b", "6.9b")}
        command = ["--base", base.get(settings["model"], settings["model"]), "--dataset", settings["dataset"]]
        for stage, flag in (("sft", "--sft"), ("ppo", "--ppo"), ("dpo", "--dpo"), ("reward", "--reward-model")):
            command += [flag, folders[stage, *key]] if (stage, *key) in folders else []
        tool("visualize_tokens.py", *command, "--output", out / "tokens")


# ---- figures.md --------------------------------------------------------------------------------------------------


def policies_table(study: Study) -> list[dict]:
    """Return a row per stage and model: mean ± sample standard deviation over seeds."""
    columns = ["win rate", "at equal length", "tokens", "ROUGE-L"]
    rows = []
    for (stage, model), found in study.numbers.groupby(["stage", "model"], sort=False):
        if stage in POLICIES:
            row = {"stage": STAGES[stage], "model": model, "seeds": len(found)}
            rows.append(row | {name: with_sd(found[name].dropna()) for name in columns})
    return rows


def paper_table(study: Study) -> list[dict]:
    """Return the paper's numbers beside those of the runs, for models of the paper's sizes."""
    rows = []
    for name, (stage, column, paper) in PAPER.items():
        for model in (model for model in study.args.models if model in paper):
            mine = study.numbers[(study.numbers["stage"] == stage) & (study.numbers["model"] == model)][column].dropna()
            ours = with_sd(mine.nlargest(1) if name == BEST else mine) or "no runs"
            theirs = " ± ".join(f"{x:.3f}" for x in paper[model] if x is not None)
            rows.append({"": name, "model": model, "paper": theirs, "ours": ours, "seeds": len(mine)})
    return rows


def main(args: Args):
    keys = [(stage, model, seed) for stage in STAGES for model in args.models for seed in args.seeds]
    folders = {key: Path(args.runs, *map(str, key)) for key in keys}
    folders = {key: run for key, run in folders.items() if (run / "args.json").exists()}
    if not folders:
        fail(f"{args.runs}: no runs of {', '.join(args.models)} there ({{stage}}/{{model}}/{{seed}})")
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    stem = f"judge_{re.sub('[^A-Za-z0-9.-]+', '-', args.judge or '')}"
    call_tools(args, folders, stem)
    study = read_study(args, folders, stem)
    missing = [f"no run {Path(args.runs, *map(str, key))}" for key in keys if not study.metrics.get(key)]
    for name, (title, columns, panels) in figures(study).items():
        if not write_figure(args, name, title, columns, panels):
            missing.append(f"{name}: nothing to draw")
    judge = f", judged by {args.judge}" if args.judge else ""
    tables = {"Paper / ours": paper_table(study)}
    tables[f"Policies: mean ± sample standard deviation over seeds{judge}"] = policies_table(study)
    text = f"# Figures\n\n`python eval/figures.py {shlex.join(sys.argv[1:])}`\n\n"
    text += "".join(f"## {title}\n\n{markdown(rows)}\n" for title, rows in tables.items() if rows)
    text += "## Missing\n\n" + "".join(f"- {row}\n" for row in missing or ["nothing"])
    Path(args.output_dir, "figures.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    main(tyro.cli(Args))
