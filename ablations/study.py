"""What value.diff and lora.diff do on the quick start, on the same seeds.

    python ablations/study.py value             # table and figure of the committed rows
    python ablations/study.py lora --run 1 2    # make the runs of these seeds whose row is missing, seven minutes each

value: PPO with the reward model and with the truth as the reward, each as it is, with --lam-value 1, and with
--value-warmup 5 as well. lora: ranks 1, 4 and 16 at ten times the learning rate, beside PPO as it is.

The runs need `bash quickstart/run.sh --seed N` of each seed, and take the thread count from OMP_NUM_THREADS. Truth, KL
and words come from ../variants/compare.py (temperature 0.01, KL at 0.7). A row is added to results/STUDY.csv as soon as
its run has ended, and its curve to results/STUDY_curves.csv. Intervals are 95 % t intervals over the seeds.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import matplotlib.pyplot as plt
import pandas
import tyro
from scipy import stats

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
DATA = "data/quickstart/posts-1"
RUNS = "runs/quickstart/posts-1"
VALUE = {"as it is": [], "lam-value 1": ["--lam-value", "1"]}
VALUE["lam-value 1, warm-up 5"] = ["--lam-value", "1", "--value-warmup", "5"]
RANKS = {f"rank {rank}": ["--lora-r", str(rank), "--learning-rate", "1e-3"] for rank in (1, 4, 16)}
STUDIES = {"value": [("reward model", VALUE), ("truth", VALUE)], "lora": [("reward model", RANKS)]}
NUMBERS = {"truth": "truth", "kl": "KL", "value_loss_10": "value loss at update 10"}


@dataclass
class Args:
    study: Annotated[Literal["value", "lora"], tyro.conf.Positional]
    """what to compare"""
    run: list[int] = field(default_factory=list)
    """seeds to run; without any, only table and figure are made"""


def make_scripts(study: str, folder: Path) -> dict[str, Path]:
    """Make the scripts of a study in a folder. Returns them by their kind of reward; for value, that with the truth
    joins two diffs."""
    shutil.copy(ROOT / "ppo.py", folder)
    for name in ("value", "function", "lora"):
        subprocess.run(["git", "apply", ROOT / "ablations" / f"{name}.diff"], cwd=folder, check=True)
    if study == "lora":
        return {"reward model": folder / "ppo_lora.py"}
    shutil.copy(folder / "ppo_function.py", folder / "ppo_function_value.py")
    merge = ["git", "merge-file", "--ours", "ppo_function_value.py", "ppo.py", "ppo_value.py"]
    subprocess.run(merge, cwd=folder, check=True)
    return {"reward model": folder / "ppo_value.py", "truth": folder / "ppo_function_value.py"}


def append(path: Path, rows: list[dict]):
    """Add rows to a CSV file, with a header if it is new."""
    path.parent.mkdir(exist_ok=True)
    pandas.DataFrame(rows).to_csv(path, mode="a", header=not path.exists(), index=False, float_format="%.6g")


def make_run(study: str, script: Path, reward: str, setting: str, flags: list[str], seed: int):
    """Train, sample and compare one run, and add its row and its curve to the results."""
    name = f"{reward} {setting}".replace(" ", "_").replace(",", "")
    run = ROOT / "runs" / "study" / name / str(seed)
    sft = f"{RUNS}/sft/nano-s/{seed}"
    command = [script, "--model", "nano-s", "--seed", seed, "--output-dir", run, "--sft-model-path", sft]
    command += ["--dataset", f"{DATA}/tldr/sft", "--batch-size", 64, "--micro-batch-size", 16, "--sample-every", 0]
    command += ["--total-episodes", 3840, "--save-every", 10, "--learning-rate", "1e-4", *flags]  # the last one counts
    source = ["--reward-model-path", f"{RUNS}/reward/nano-s/{seed}"]
    if reward == "truth":
        source = ["--reward-function", "quickstart/truth.py:score"]
    resume = ["--resume"] if (run / "args.json").exists() else []
    table = run / "comparison.csv"
    steps = [] if (run / "model").exists() else [[*command, *source, *resume]]
    steps += [["eval/samples.py", run, "--dataset", f"{DATA}/tldr/sft", "--splits", "validation"]]
    steps += [["variants/compare.py", "--raw", f"{DATA}/raw", "--sft", sft, "--runs", run, "--output", table]]
    for step in steps:
        subprocess.run([sys.executable, *map(str, step)], cwd=ROOT, check=True)
    metrics = pandas.read_json(run / "metrics.jsonl", lines=True)
    found = pandas.read_csv(table).iloc[1]
    row = {"reward": reward, "setting": setting, "seed": seed}
    numbers = {key: found[key] for key in ("truth", "win_rate", "wrong_facts", "words", "kl", "seconds")}
    value_loss = metrics.set_index("update")["loss/value"]
    curve = metrics[["update", "loss/value", "objective/kl", "objective/score"]]
    numbers |= {"value_loss_10": value_loss[10]}
    if study == "lora":
        numbers["checkpoint_mb"] = sum(x.stat().st_size for x in (run / "checkpoints/update_000060").iterdir()) / 1e6
    append(RESULTS / f"{study}_curves.csv", [row | line for line in curve.to_dict("records")])
    append(RESULTS / f"{study}.csv", [row | numbers])


def interval(values: pandas.Series) -> str:
    """Return the mean of differences over seeds with its 95 % t interval."""
    if len(values) < 2:
        return f"{values.mean():+.3f}"
    low, high = stats.t.interval(0.95, len(values) - 1, values.mean(), stats.sem(values))
    return f"{values.mean():+.3f} ({low:+.3f} to {high:+.3f})"


def table(study: str, rows: pandas.DataFrame) -> list[str]:
    """Return a Markdown table: means over seeds, and paired differences to PPO as it is."""
    lines = ["| reward | setting | seeds | " + " | ".join(f"{x} | difference" for x in NUMBERS.values()) + " |"]
    lines.append("|" + "---|" * (3 + 2 * len(NUMBERS)))
    for reward, settings in STUDIES[study]:
        runs = {name: found.set_index("seed") for name, found in rows[rows["reward"] == reward].groupby("setting")}
        plain = runs["as it is"]
        for setting in {"as it is": [], **settings}:
            found = runs.get(setting, plain[:0])
            cells = [reward, setting, str(len(found))]
            for key in NUMBERS:
                difference = (found[key] - plain[key]).dropna()
                compared = interval(difference) if setting != "as it is" and len(difference) else ""
                cells += [f"{found[key].mean():.3f}" if len(found) else "", compared]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def draw(study: str, curves: pandas.DataFrame, path: Path):
    """Draw value loss and KL over the updates: a thin line for each seed, a thick one for their mean."""
    kinds = len(STUDIES[study])
    figure, plots = plt.subplots(kinds, 2, figsize=(10, 3.5 * kinds), sharex=True, layout="constrained", squeeze=False)
    for (reward, settings), row in zip(STUDIES[study], plots, strict=True):
        for plot, (column, label) in zip(
            row, {"loss/value": "value loss", "objective/kl": "KL (nats)"}.items(), strict=True
        ):
            for color, setting in enumerate({"as it is": [], **settings}):
                found = curves[(curves["reward"] == reward) & (curves["setting"] == setting)]
                runs = found.pivot(index="update", columns="seed", values=column)
                plot.plot(runs, color=f"C{color}", alpha=0.3, linewidth=0.8)
                plot.plot(runs.mean(axis=1), color=f"C{color}", linewidth=2, label=setting)
            plot.set(title=f"reward: {reward}", xlabel="update", ylabel=label)
            if column == "loss/value":
                plot.set_yscale("log")
    plots[0][0].legend()
    figure.savefig(path, dpi=100)


def read(study: str, name: str = "") -> pandas.DataFrame:
    """Return the rows of a study, and of value's runs with nothing changed, or with name="_curves" their curves."""
    files = [path for key in ("value", study) if (path := RESULTS / f"{key}{name}.csv").exists()]
    return pandas.concat(map(pandas.read_csv, dict.fromkeys(files)))


def main(args: Args):
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.run:
            scripts = make_scripts(args.study, Path(tempfile.mkdtemp(dir=folder)))
            for reward, settings in STUDIES[args.study]:
                for setting, flags in settings.items():
                    done = read(args.study)
                    is_done = (done["reward"] == reward) & (done["setting"] == setting) & (done["seed"] == seed)
                    if not is_done.any():
                        make_run(args.study, scripts[reward], reward, setting, flags, seed)
    print("\n".join(table(args.study, read(args.study))))
    draw(args.study, read(args.study, "_curves"), RESULTS / f"{args.study}.png")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main(tyro.cli(Args))
