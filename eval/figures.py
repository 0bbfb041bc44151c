"""The paper's figures, and a table "paper / ours", from run folders and the tables of the other tools.

    python eval/figures.py --judge gpt-3.5-turbo                    # runs/, the paper's sizes and seeds
    python eval/figures.py --models nano-xs nano-s nano-m --runs runs/quickstart/posts-1 \\
        --judge quickstart/truth.py:score --output-dir quickstart/results/nano

figures.sh calls judge.py, rm_report.py and visualize_tokens.py first, and then this script. It reads
{runs}/{stage}/{model}/{seed}: metrics.jsonl and the tables in eval/; and rm_report* and tokens* in the output folder.
Writes figure_1, 4, 5 and 7 to 13 as PNG and CSV, and figures.md: the paper's numbers beside ours where the sizes match,
win rates, and missing runs. Lines are means over seeds; bands and error bars are one sample standard deviation.
"""

import re
import shlex
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
    """{seed} of the run folders"""
    runs: str = "runs"
    """folder with {stage}/{model}/{seed}"""
    output_dir: str = "runs/figures"
    """folder of the figures, their CSV files and figures.md"""
    judge: str | None = None
    """the --judge of the judge.py calls whose win rates are shown; without it none are"""


class Panel(NamedTuple):
    """One panel of a figure: `draw` is one of the draw_ functions, and `lines` has a table with the columns x and y for
    each series. The tables are the figure's CSV file."""

    title: str
    draw: Callable
    xlabel: str
    ylabel: str
    lines: dict[str, pandas.DataFrame]


class Study(NamedTuple):
    """What the figures show. Keys are (stage, model, seed)."""

    args: Args
    metrics: dict[tuple, list[dict]]  # a dict per update; only runs with metrics
    numbers: pandas.DataFrame  # a row per run: stage, model, seed and its numbers
    bins: dict[tuple, pandas.DataFrame]  # judge.py's win rates by length ratio


# ---- reading -----------------------------------------------------------------------------------------------------


def cell(file: Path, column: str, rows: str = "index >= 0") -> float:
    """Return a number of a CSV file: its column in the first row that a pandas query selects, NaN if there is none."""
    found = pandas.read_csv(file).query(rows)[column] if file.exists() else []
    return found.iloc[0] if len(found) else numpy.nan


def read_study(args: Args, folders: dict[tuple, Path]) -> Study:
    """Read the tables in eval/ of the run folders, and the agreement in rm_report.py's."""
    judged = f"judge_{re.sub('[^A-Za-z0-9.-]+', '-', args.judge or '')}"
    agreement = Path(args.output_dir, "rm_report_agreement.csv")  # of the reward model with this model and seed
    metrics, numbers, bins = {}, [], {}
    for key, run in folders.items():
        (stage, model, seed), tables = key, run / "eval"
        row = {"stage": stage, "model": model, "seed": seed}
        row |= {
            "win rate": cell(tables / f"{judged}_rates.csv", "win_rate"),
            "at equal length": cell(tables / f"{judged}_rates.csv", "length_controlled_win_rate"),
            "tokens": cell(tables / "rouge.csv", "response_tokens", "split == 'validation'"),
            "ROUGE-L": cell(tables / "rouge.csv", "rougeL", "split == 'validation'"),
            "TL;DR": cell(tables / "accuracy.csv", "accuracy", "data == 'validation' and group == 'overall'"),
            "CNN/DM": cell(tables / "accuracy.csv", "accuracy", "data == 'validation_cnndm' and group == 'overall'"),
            "agreement": cell(agreement, "agreement", f"model == '{model}' and seed == {seed}"),
        }
        numbers.append(row)
        if (run / "metrics.jsonl").exists():
            metrics[key] = read_metrics(run, may_be_empty=True)
        if (file := tables / f"{judged}_bins.csv").exists():
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
    panels = [panel._replace(lines={k: rows for k, rows in panel.lines.items() if len(rows)}) for panel in panels]
    tables = {(panel.title, series): rows for panel in panels for series, rows in panel.lines.items()}
    if not tables:
        return False
    has_labels = "label" in next(iter(tables.values()))
    size = (6.5 if columns == 1 else 4.4 * columns) + 3 * has_labels, 3.3 * -(-len(panels) // columns)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(-(-len(panels) // columns), columns, squeeze=False).flat
    for axis, panel in zip(axes, panels, strict=False):
        axis.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
        if not panel.lines:
            axis.text(0.5, 0.5, "no runs", ha="center", transform=axis.transAxes)
            continue
        for i, (series, rows) in enumerate(panel.lines.items()):
            panel.draw(axis, series, rows, i, args)
        beside = {"loc": "upper left", "bbox_to_anchor": (1, 1)}  # where it hides no points
        axis.legend(fontsize=7, **(beside if panel.draw is draw_points else {}))
    figure.suptitle(title, size=10)
    figure.savefig(Path(args.output_dir, f"{name}.png"), dpi=75)
    table = pandas.concat(tables, names=["panel", "series"]).reset_index(["panel", "series"])
    table.to_csv(Path(args.output_dir, f"{name}.csv"), index=False, float_format="%.6g")
    return True


# ---- panels ------------------------------------------------------------------------------------------------------


def curves_panel(metrics: dict, stage: str, args: Args, key: str, title: str) -> Panel:
    """Return a metric over episodes, a line per model: the moving mean over a twentieth of the updates, at up to
    POINTS."""
    lines, window = {}, 1
    for model in args.models:
        found = [metrics.get((stage, model, seed), []) for seed in args.seeds]
        found = [pandas.Series({x.get("episode", 0): x.get(key) for x in run}, dtype=float).dropna() for run in found]
        found = [line for line in found if len(line)]
        if not found:
            continue
        window = max(1, len(found[0]) // 20)
        smooth = pandas.concat([line.rolling(window, 1).mean() for line in found], axis=1, join="inner").sort_index()
        smooth = smooth.iloc[numpy.unique(numpy.linspace(0, len(smooth) - 1, min(POINTS, len(smooth))).round())]
        means = {"x": smooth.index, "y": smooth.mean(axis=1), "sd": smooth.std(axis=1).fillna(0), "n": len(found)}
        lines[model] = pandas.DataFrame(means)
    note = f", moving mean over {window} updates" if window > 1 else ""
    return Panel(title, draw_lines, f"episodes{note}", key, lines)


def sizes_panel(study: Study, title: str, ylabel: str, values: dict[str, tuple[str, str]], *paper: str) -> Panel:
    """Return {series: (stage, column of the numbers)} over models, with the paper's numbers of these names."""
    lines = {}
    for series, (stage, column) in values.items():
        found = study.numbers[study.numbers["stage"] == stage].dropna(subset=column)
        lines[series] = found.rename(columns={"model": "x", column: "y"})[["x", "seed", "y"]]
    for name in paper:
        rows = [(model, *numbers) for model, numbers in PAPER[name][2].items() if model in study.args.models]
        lines[f"paper, {name}"] = pandas.DataFrame(rows, columns=["x", "y", "sd"])
    return Panel(title, draw_sizes, "model", ylabel, lines)


def calibration_panel(study: Study) -> Panel:
    """Return rm_report.py's accuracy by score difference, and the ideal calibration."""
    lines, file = {}, Path(study.args.output_dir, "rm_report_calibration.csv")
    if file.exists():
        found = pandas.read_csv(file).rename(columns={"difference": "x", "accuracy": "y", "pairs": "n"})
        xs = numpy.linspace(0, found["x"].max(), 50)
        lines["1 / (1 + exp(-x))"] = pandas.DataFrame({"x": xs, "y": expit(xs)})
        lines |= {model: rows[["x", "y", "n"]] for model, rows in found.groupby("model", sort=False)}
    return Panel("calibration", draw_lines, "score difference", "accuracy", lines)


def by_token(study: Study, title: str, ylabel: str, *keys: str) -> Panel:
    """Return numbers of each token of the first PPO response that visualize_tokens.py shows."""
    lines, file = {}, Path(study.args.output_dir, "tokens_tokens.csv")
    if file.exists():
        tokens = pandas.read_csv(file, dtype={"token": str}, keep_default_na=False, na_values={key: "" for key in keys})
        tokens = tokens[tokens["model"] == "ppo"]
        tokens = tokens[tokens["id"] == tokens["id"].iloc[0]].rename(columns={"position": "x"})
        tokens["label"] = [repr(token)[1:-1] for token in tokens["token"]]
        lines = {key: tokens.assign(y=tokens[key]).dropna(subset=key)[["x", "y", "label"]] for key in keys}
    return Panel(title, draw_lines, "", ylabel, lines)


def by_length(study: Study, *stages: str) -> Panel:
    """Return the win rate over the mean summary length of each run."""
    found = study.numbers[study.numbers["stage"].isin(stages)].rename(columns={"tokens": "x", "win rate": "y"})
    groups = found.dropna(subset=["x", "y"]).groupby(["stage", "model"], sort=False)
    lines = {f"{STAGES[stage]} {model}": rows[["seed", "x", "y"]] for (stage, model), rows in groups}
    return Panel("", draw_points, "mean summary length (tokens)", "win rate", lines)


def by_length_ratio(study: Study, model: str, seed: int) -> Panel:
    """Return the win rate by log length ratio of the policies of one model and seed (figures 12 and 13)."""
    lines = {}
    for stage in [stage for stage in POLICIES if (stage, model, seed) in study.bins]:
        found = study.bins[stage, model, seed]
        x = (found["from"].clip(lower=-1.5) + found["to"].clip(upper=1.5)) / 2  # the outer bins have no end
        rows = {"x": x, "y": found["win_rate"], "sd": found["se"], "n": found["examples"]}
        lines[STAGES[stage]] = pandas.DataFrame(rows)
    return Panel(f"{model}, seed {seed}", draw_lines, "log(summary / reference length)", "win rate", lines)


# ---- figures and tables ------------------------------------------------------------------------------------------

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

    def curves(stage: str, titles: dict[str, str]) -> list[Panel]:
        return [curves_panel(s.metrics, stage, s.args, key, title) for key, title in titles.items()]

    def win_rates(stages: tuple[str, ...], *paper: str) -> Panel:
        return sizes_panel(s, "", "win rate", {STAGES[stage]: (stage, "win rate") for stage in stages}, *paper)

    over_seeds = f": mean ± standard deviation over up to {len(seeds)} seeds"
    rouge = sizes_panel(s, "ROUGE-L, validation", "F-measure", ROUGE)
    accuracy = sizes_panel(s, "accuracy", "accuracy", RM_ACCURACY, VALIDATION, CNNDM)
    implicit = sizes_panel(s, "accuracy, validation", "accuracy", DPO_ACCURACY)
    agreement = sizes_panel(s, AGREEMENT, "share of pairs", RM_AGREEMENT, AGREEMENT)
    rewards = by_token(s, "rewards: -kl_coef x KL per token, and the score", "reward", "token_reward")
    values = by_token(s, "values, and the reward model's logits (figure 6)", "", "value", "reward_logit")
    calibration = calibration_panel(s)
    whitened = [win_rates(POLICIES[2:]), by_length(s, *POLICIES[2:])]
    ratios = [by_length_ratio(s, model, seed) for model in models for seed in seeds]
    largest = [by_length_ratio(s, m, seed) for m in reversed(models) for seed in seeds if ("ppo", m, seed) in s.bins]
    return {
        "figure_1": (f"Win rate against the references{over_seeds}", 1, [win_rates(POLICIES[:3], BEST)]),
        "figure_4": (f"SFT{over_seeds}", 2, [*curves("sft", SFT), rouge]),
        "figure_5": (f"Reward model{over_seeds}", 2, [*curves("reward", REWARD), accuracy]),
        "figure_7": (f"Reward models: {AGREEMENT}, calibration{over_seeds}", 2, [agreement, calibration]),
        "figure_8": (f"DPO's implicit reward model{over_seeds}", 2, [*curves("dpo", DPO), implicit]),
        "figure_9": ("Rewards and values of a PPO completion", 1, [rewards, values]),
        "figure_10": (f"PPO{over_seeds}", 2, curves("ppo", PPO)),
        "figure_11": (f"PPO with and without whitened rewards{over_seeds}", 2, whitened),
        "figure_12": ("Win rate and length", 2, [by_length(s, *POLICIES), *largest[:1]]),
        "figure_13": ("Win rate by summary length", len(seeds), ratios),
    }


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
    study = read_study(args, folders)
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
