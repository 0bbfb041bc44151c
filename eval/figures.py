"""The paper's figures, and a table "paper / ours", from run folders and the tables of the other tools.

    python eval/figures.py --judge gpt-3.5-turbo                    # runs/, the paper's sizes and seeds
    python eval/figures.py --models nano-xs nano-s nano-m --runs runs/quickstart/posts-1 \\
        --judge quickstart/truth.py:score --output-dir quickstart/results/nano

figures.sh calls judge.py, rm_report.py and visualize_tokens.py first, and then this script. It reads
{runs}/{stage}/{model}/{seed}: metrics.jsonl and the tables in eval/; and rm_report* and tokens* in the output folder.
It writes figure_1, 4, 5 and 7 to 13 as PNG and CSV, and figures.md: the paper's numbers beside ours where the sizes
match, win rates, and runs that are missing or short. Learning curves are moving means over a twentieth of the updates.
Bands and error bars are one sample standard deviation over the seeds, or the standard error of a win rate by length.
"""

import os
import shlex
import sys
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

os.environ["MPLBACKEND"] = "agg"  # the backend that a notebook chooses may not be installed here

import numpy
import pandas
import tyro
from eval_helpers import digest_of, fail, markdown, read_metrics, result_name, with_sd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

STAGES = {"sft": "SFT", "reward": "reward model", "dpo": "DPO", "ppo": "PPO", "ppo_whiten": "PPO, whitened rewards"}
POLICIES = ["sft", "dpo", "ppo", "ppo_whiten"]
OF_PAIRS = {"accuracy/train": "training accuracy", "loss/train": "training loss", "rewards/chosen": "chosen reward"}
CURVES = {  # {stage: {metric: title}}
    "sft": {"loss/train": "training loss"},
    "reward": OF_PAIRS,
    "dpo": OF_PAIRS,  # with implicit rewards
    "ppo": {
        "objective/rlhf_reward": "RLHF reward",
        "objective/kl": "KL, summed over tokens",
        "objective/score": "score",
        "response/length": "response length (tokens)",
    },
}
POINTS = 100  # of a learning curve
LINES, MARKERS = ["-", "--", ":", "-."], "os^vDPX"

# the paper's means and standard deviations (table 5, Detail 17, section 7.1)
BEST, AGREEMENT = "best PPO win rate", "agreement with the judge"
VALIDATION, CNNDM = "RM accuracy, validation", "RM accuracy, validation_cnndm"
PAPER = {
    VALIDATION: {"1b": (0.628, 0.002), "2.8b": (0.669, 0.003), "6.9b": (0.689, 0.004)},
    CNNDM: {"1b": (0.627, 0.013), "2.8b": (0.665, 0.010), "6.9b": (0.686, 0.003)},
    AGREEMENT: {"1b": (0.4, numpy.nan), "2.8b": (0.726, numpy.nan), "6.9b": (0.767, numpy.nan)},
    BEST: {"6.9b": (0.8, numpy.nan)},
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


def read_judged(run: Path, judge: str | None, name: str) -> pandas.DataFrame:
    """Return the table `name` that judge.py made of a run's samples, empty if there is none or it is of other samples
    than those there now. A table of older versions, which does not say, counts as one of other samples."""
    file, samples = run / "eval" / f"{result_name(judge or '')}_{name}.csv", run / "eval/samples_validation.csv"
    table = read_table(file)
    digest = digest_of(samples) if samples.exists() else "none"
    if len(table) and ("samples" not in table or table["samples"].iloc[0] != digest):
        print(f"{file} is stale, because it is not of the samples there now, so it is left out: run judge.py again")
        return table[:0]
    return table


def number_of(table: pandas.DataFrame, column: str, rows: str = "index >= 0") -> float:
    """Return a column of a table in the first row that a pandas query selects, NaN if there is none."""
    values = table.query(rows)[column] if len(table) else []
    return values.iloc[0] if len(values) else numpy.nan


def read_table(file: Path) -> pandas.DataFrame:
    """Return a table, empty if there is no such file."""
    return pandas.read_csv(file) if file.exists() else pandas.DataFrame()


def read_results(args: Args, folders: dict[tuple, Path]) -> pandas.DataFrame:
    """Return a row per run: its stage, model, seed and the results of its evaluation."""
    agreement = read_table(Path(args.output_dir, "rm_report_agreement.csv"))
    results = []
    for (stage, model, seed), run in folders.items():
        rates = read_judged(run, args.judge, "rates")
        rouge, accuracy = read_table(run / "eval/rouge.csv"), read_table(run / "eval/accuracy.csv")
        row = {"stage": stage, "model": model, "seed": seed}
        row["win rate"] = number_of(rates, "win_rate")
        row["at equal length"] = number_of(rates, "length_controlled_win_rate")
        row["tokens"] = number_of(rouge, "response_tokens", "split == 'validation'")
        row["ROUGE-L"] = number_of(rouge, "rougeL", "split == 'validation'")
        row[VALIDATION] = number_of(accuracy, "accuracy", "data == 'validation' and group == 'overall'")
        row[CNNDM] = number_of(accuracy, "accuracy", "data == 'validation_cnndm' and group == 'overall'")
        row[AGREEMENT] = number_of(agreement, "agreement", f"model == '{model}' and seed == {seed}")
        results.append(row)
    return pandas.DataFrame(results)


def draw_series(axis: Axes, rows: pandas.DataFrame, i: int, name: str, xlabel: str, models: tuple[str, ...]):
    """Draw y over x in the i-th color, line style and marker: a line with a band of one standard deviation, a point per
    run, or, if x is the name of a model, means with one standard deviation beside the runs. xlabel is that of lines."""
    style = {"color": f"C{i}", "linestyle": LINES[i % len(LINES)], "marker": MARKERS[i % len(MARKERS)], "label": name}
    if rows["x"].isin(models).all():
        rows = rows.assign(x=rows["x"].map(models.index) + 0.04 * i)  # so that no series hides another
        if "seed" in rows:
            axis.plot(rows["x"], rows["y"], ".", color=style["color"], alpha=0.4)
            rows = rows.groupby("x")["y"].agg(y="mean", sd="std").reset_index()
        axis.errorbar(rows["x"], rows["y"], rows["sd"].fillna(0), capsize=3, **style)
        axis.set_xticks(range(len(models)), models)
        axis.set_xlabel("model")
    elif "seed" in rows:
        axis.set_xlabel("mean summary length (tokens)")
        axis.plot(rows["x"], rows["y"], **style | {"linestyle": ""})
    else:
        axis.set_xlabel(xlabel)
        axis.plot(rows["x"], rows["y"], markevery=max(1, len(rows) // 10), **style)
        if "sd" in rows:
            low, high = rows["y"] - rows["sd"], rows["y"] + rows["sd"]
            axis.fill_between(rows["x"], low, high, color=style["color"], alpha=0.2, linewidth=0)
        if "label" in rows:  # a token such as $$ is no formula
            axis.set_xticks(rows["x"], rows["label"], rotation=90, fontsize=7, parse_math=False)


def write_figure(path: Path, title: str, xlabel: str, panels: dict[str, dict], models: tuple[str, ...]) -> bool:
    """Draw panels {title: {name of a series: table}} and write path.png and path.csv. The columns of a table are x, y
    and, where they apply, seed, sd, n and label. If all tables are empty, returns False and removes
    what an earlier call wrote."""
    tables = {(panel, name): rows for panel in panels for name, rows in panels[panel].items() if len(rows)}
    if not tables:
        for suffix in ("png", "csv"):
            Path(f"{path}.{suffix}").unlink(missing_ok=True)
        return False
    titles, names = [list(dict.fromkeys(level)) for level in zip(*tables, strict=True)]
    columns = 1 if len(titles) < 3 else 2
    lines = -(-len(titles) // columns)
    figure = Figure(figsize=(7 * columns, 3.3 * lines), layout="constrained")
    figure.suptitle(title)
    axes = {panel: figure.add_subplot(lines, columns, i, title=panel) for i, panel in enumerate(titles, 1)}
    for (panel, name), rows in tables.items():
        draw_series(axes[panel], rows, names.index(name), name, xlabel, models)
        axes[panel].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))  # where it hides nothing
    figure.savefig(f"{path}.png", dpi=75)
    table = pandas.concat(tables, names=["panel", "series"]).reset_index(["panel", "series"])
    table.to_csv(f"{path}.csv", index=False, float_format="%.6g")
    return True


def learning_curves(args: Args, metrics: dict[tuple, list[dict]], stage: str) -> dict[str, dict]:
    """Return a panel for each metric of a stage. A curve is the mean over seeds of the moving means over a twentieth of
    the updates, at up to POINTS of the episodes that all seeds have."""
    panels = {title: {} for title in CURVES[stage].values()}
    for (metric, title), model in product(CURVES[stage].items(), args.models):
        runs = [metrics.get((stage, model, seed), []) for seed in args.seeds]
        runs = [{update.get("episode", 0): update.get(metric) for update in run} for run in runs]
        runs = [pandas.Series(run, dtype=float).dropna() for run in runs]
        runs = [run for run in runs if len(run)]
        if runs:
            window = max(1, len(runs[0]) // 20)
            means = [run.rolling(window, min_periods=1).mean() for run in runs]
            means = pandas.concat(means, axis=1, join="inner").sort_index()
            means = means.iloc[numpy.linspace(0, len(means) - 1, min(POINTS, len(means))).round().astype(int)]
            columns = {"x": means.index, "y": means.mean(axis=1), "sd": means.std(axis=1).fillna(0), "n": len(runs)}
            panels[title][model] = pandas.DataFrame(columns)
    return panels


def by_model(args: Args, results: pandas.DataFrame, column: str, *stages: str) -> dict[str, dict]:
    """Return a panel of a column of the results over models, for some stages and the paper."""
    series = {}
    for stage in stages:
        runs = results[results["stage"] == stage].dropna(subset=column)
        series[STAGES[stage]] = runs.rename(columns={"model": "x", column: "y"})[["x", "seed", "y"]]
    name = BEST if column == "win rate" else column
    paper = [(model, *PAPER[name][model]) for model in args.models if model in PAPER.get(name, {})]
    series[f"paper, {name}"] = pandas.DataFrame(paper, columns=["x", "y", "sd"])
    return {column: series}


def by_length(results: pandas.DataFrame, *stages: str) -> dict[str, dict]:
    """Return a panel with the win rate of each run over the mean length of its summaries."""
    runs = results[results["stage"].isin(stages)].rename(columns={"tokens": "x", "win rate": "y"})
    groups = runs.dropna(subset=["x", "y"]).groupby(["stage", "model"], sort=False)
    series = {f"{STAGES[stage]} {model}": rows[["seed", "x", "y"]] for (stage, model), rows in groups}
    return {"win rate by length": series}


def by_length_ratio(args: Args, folders: dict[tuple, Path]) -> dict[str, dict]:
    """Return a panel for each model and seed: the policies' win rate over log(summary length / reference length)."""
    panels = {f"{model}, seed {seed}": {} for model in args.models for seed in args.seeds}
    for (stage, model, seed), run in folders.items():
        bins = read_judged(run, args.judge, "bins").rename(columns={"win_rate": "y", "se": "sd", "examples": "n"})
        if len(bins):
            bins["x"] = (bins["from"].clip(lower=-1.5) + bins["to"].clip(upper=1.5)) / 2  # the outer bins have no end
            panels[f"{model}, seed {seed}"][STAGES[stage]] = bins[["x", "y", "sd", "n"]]
    return panels


def calibration(folder: str) -> dict[str, dict]:
    """Return a panel of rm_report.py's accuracy by score difference, with the ideal calibration."""
    file = Path(folder, "rm_report_calibration.csv")
    if not file.exists():
        return {}
    table = pandas.read_csv(file).rename(columns={"difference": "x", "accuracy": "y", "pairs": "n"})
    x = numpy.linspace(0, table["x"].max(), 50)
    series = {"1 / (1 + exp(-x))": pandas.DataFrame({"x": x, "y": 1 / (1 + numpy.exp(-x))})}
    series |= {model: rows[["x", "y", "n"]] for model, rows in table.groupby("model", sort=False)}
    return {"accuracy by score difference": series}


def by_token(folder: str) -> dict[str, dict]:
    """Return panels with visualize_tokens.py's numbers over the tokens of its first PPO response."""
    file = Path(folder, "tokens_tokens.csv")
    if not file.exists():
        return {}
    numbers = {name: "" for name in ("token_reward", "value", "reward_logit")}  # how a missing number is written
    tokens = pandas.read_csv(file, dtype={"token": str}, keep_default_na=False, na_values=numbers)
    tokens = tokens[tokens["model"] == "ppo"].rename(columns={"position": "x"})
    if tokens.empty:
        return {}
    tokens = tokens[tokens["id"] == tokens["id"].iloc[0]]
    tokens["label"] = [repr(token)[1:-1] for token in tokens["token"]]
    series = {name: tokens.assign(y=tokens[name]).dropna(subset="y")[["x", "y", "label"]] for name in numbers}
    rewards = {"token_reward": series.pop("token_reward")}
    return {"-kl_coef x KL per token, and the score": rewards, "value, and logit of the reward model": series}


def figures(args: Args, folders: dict[tuple, Path], metrics: dict, results: pandas.DataFrame) -> dict[str, tuple]:
    """Return {file name: (title, x label of lines, panels)}, as write_figure takes them."""
    over_models = partial(by_model, args, results)
    accuracy = over_models(VALIDATION, "reward") | over_models(CNNDM, "reward")
    agreement = over_models(AGREEMENT, "reward") | calibration(args.output_dir)
    whitened = over_models("win rate", "ppo", "ppo_whiten") | by_length(results, "ppo", "ppo_whiten")
    ratios = by_length_ratio(args, folders)
    largest = f"{args.models[-1]}, seed {args.seeds[0]}"
    curves = {stage: learning_curves(args, metrics, stage) for stage in CURVES}
    ratio, of_rewards = "log(summary length / reference length)", "Reward models: agreement, and calibration"
    return {
        "figure_1": ("Win rate against the references", "", over_models("win rate", "sft", "dpo", "ppo")),
        "figure_4": ("SFT", "episodes", curves["sft"] | over_models("ROUGE-L", "sft")),
        "figure_5": ("Reward model", "episodes", curves["reward"] | accuracy),
        "figure_7": (of_rewards, "score difference", agreement),
        "figure_8": ("DPO", "episodes", curves["dpo"] | over_models(VALIDATION, "reward", "dpo")),
        "figure_9": ("Rewards and values of a PPO response", "token", by_token(args.output_dir)),
        "figure_10": ("PPO", "episodes", curves["ppo"]),
        "figure_11": ("PPO with and without whitened rewards", "", whitened),
        "figure_12": ("Win rate by length", ratio, by_length(results, *POLICIES) | {largest: ratios[largest]}),
        "figure_13": ("Win rate by length", ratio, ratios),
    }


def mean_of(runs: pandas.Series) -> str:
    """Return mean ± sample standard deviation of the runs that have a number, and how many if others have none."""
    some = f" ({runs.count()} of {len(runs)})" if 0 < runs.count() < len(runs) else ""
    return with_sd(runs.dropna()) + some


def policies_table(results: pandas.DataFrame) -> list[dict]:
    """Return a row per stage and model: mean ± sample standard deviation over seeds."""
    policies = results[results["stage"].isin(POLICIES)].replace({"stage": STAGES})
    groups = policies.groupby(["stage", "model"], sort=False)
    table = groups[["win rate", "at equal length", "tokens", "ROUGE-L"]].agg(mean_of)
    table.insert(0, "seeds", groups.size())
    return table.reset_index().to_dict("records")


def paper_table(results: pandas.DataFrame, models: tuple[str, ...]) -> list[dict]:
    """Return the paper's numbers beside those of the runs, for models of the paper's sizes."""
    table = []
    for name, numbers in PAPER.items():
        stage, column = ("ppo", "win rate") if name == BEST else ("reward", name)
        for model in [model for model in models if model in numbers]:
            runs = results[(results["stage"] == stage) & (results["model"] == model)][column].dropna()
            ours = with_sd(runs.nlargest(1) if name == BEST else runs) or "no runs"
            paper = " ± ".join(f"{x:.3f}" for x in numbers[model] if not numpy.isnan(x))
            table.append({"": name, "model": model, "paper": paper, "ours": ours, "seeds": len(runs)})
    return table


def missing_runs(args: Args, metrics: dict[tuple, list[dict]]) -> list[str]:
    """Name the runs without metrics, and those with fewer updates than the longest of their stage and model."""
    missing = []
    for stage, model in product(STAGES, args.models):
        runs = {seed: metrics.get((stage, model, seed), []) for seed in args.seeds}
        updates = {seed: rows[-1]["update"] for seed, rows in runs.items() if rows}
        for seed in args.seeds:
            run, longest = Path(args.runs, stage, model, str(seed)), max(updates.values(), default=0)
            if seed not in updates:
                missing.append(f"no run {run}")
            elif updates[seed] < longest:
                missing.append(f"{run} ends after {updates[seed]} of {longest} updates, so the mean curves end there")
    return missing


def main(args: Args):
    keys = product(STAGES, args.models, args.seeds)
    folders = {key: Path(args.runs, *map(str, key)) for key in keys}
    folders = {key: run for key, run in folders.items() if (run / "args.json").exists()}
    if not folders:
        fail(f"{args.runs}: no runs of {', '.join(args.models)} there ({{stage}}/{{model}}/{{seed}})")
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    with_metrics = {key: run for key, run in folders.items() if (run / "metrics.jsonl").exists()}
    metrics = {key: read_metrics(run, may_be_empty=True) for key, run in with_metrics.items()}
    results = read_results(args, folders)
    missing = missing_runs(args, metrics)
    for name, figure in figures(args, folders, metrics, results).items():
        if not write_figure(Path(args.output_dir, name), *figure, args.models):
            missing.append(f"{name}: nothing to draw")
    judge = f", judged by {args.judge}" if args.judge else ""
    tables = {"Paper / ours": paper_table(results, args.models)}
    tables[f"Policies: mean ± sample standard deviation over seeds{judge}"] = policies_table(results)
    text = f"# Figures\n\n`python eval/figures.py {shlex.join(sys.argv[1:])}`\n\n"
    text += "".join(f"## {title}\n\n{markdown(rows)}\n" for title, rows in tables.items() if rows)
    text += "## Missing\n\n" + "".join(f"- {row}\n" for row in missing or ["nothing"])
    Path(args.output_dir, "figures.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    main(tyro.cli(Args))
