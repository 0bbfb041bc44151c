"""What value.diff does on the quick start: PPO with the reward model and with the truth as the reward, each as it is,
with --lam-value 1, and with --value-warmup 5 as well, on the same seeds.

    python ablations/value_study.py             # table and figure of the committed rows
    python ablations/value_study.py --run 1 2   # make the runs of these seeds whose row is missing, ten minutes each

The runs need `bash quickstart/run.sh --seed N` of each seed, and take the thread count from OMP_NUM_THREADS. Truth, KL
and words come from ../variants/compare.py (temperature 0.01, KL at 0.7). A row is added to results/value.csv as soon as
its run has ended, and its curve to results/value_curves.csv. Intervals are 95 % t intervals over the seeds.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib.pyplot as plt
import pandas
import tyro
from scipy import stats

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
DATA = "data/quickstart/posts-1"
RUNS = "runs/quickstart/posts-1"
SETTINGS = {"as it is": [], "lam-value 1": ["--lam-value", "1"]}
SETTINGS["lam-value 1, warm-up 5"] = ["--lam-value", "1", "--value-warmup", "5"]
REWARDS = ("reward model", "truth")
NUMBERS = {"truth": "truth", "kl": "KL", "value_loss_10": "value loss at update 10"}


@dataclass
class Args:
    run: list[int] = field(default_factory=list)
    """seeds to run; without any, only table and figure are made"""


def make_scripts(folder: Path) -> dict[str, Path]:
    """Make ppo_value.py and its counterpart for ppo_function.py in a folder. Returns them by their kind of reward."""
    shutil.copy(ROOT / "ppo.py", folder)
    for name in ("value", "function"):
        subprocess.run(["git", "apply", ROOT / "ablations" / f"{name}.diff"], cwd=folder, check=True)
    shutil.copy(folder / "ppo_function.py", folder / "ppo_function_value.py")
    merge = ["git", "merge-file", "--ours", "ppo_function_value.py", "ppo.py", "ppo_value.py"]
    subprocess.run(merge, cwd=folder, check=True)
    return {"reward model": folder / "ppo_value.py", "truth": folder / "ppo_function_value.py"}


def append(path: Path, rows: list[dict]):
    """Add rows to a CSV file, with a header if it is new."""
    path.parent.mkdir(exist_ok=True)
    pandas.DataFrame(rows).to_csv(path, mode="a", header=not path.exists(), index=False, float_format="%.6g")


def make_run(script: Path, reward: str, setting: str, seed: int):
    """Train, sample and compare one run, and add its row and its curve to the results."""
    name = f"{reward} {setting}".replace(" ", "_").replace(",", "")
    run = ROOT / "runs" / "value_study" / name / str(seed)
    sft = f"{RUNS}/sft/nano-s/{seed}"
    command = [script, "--model", "nano-s", "--seed", seed, "--output-dir", run, "--sft-model-path", sft]
    command += ["--dataset", f"{DATA}/tldr/sft", "--learning-rate", "1e-4", "--batch-size", 64, "--sample-every", 0]
    command += ["--micro-batch-size", 16, "--total-episodes", 3840, "--save-every", 10, *SETTINGS[setting]]
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
    append(RESULTS / "value_curves.csv", [row | line for line in curve.to_dict("records")])
    append(RESULTS / "value.csv", [row | numbers | {"value_loss_10": value_loss[10]}])


def interval(values: pandas.Series) -> str:
    """Return the mean of differences over seeds with its 95 % t interval."""
    if len(values) < 2:
        return f"{values.mean():+.3f}"
    low, high = stats.t.interval(0.95, len(values) - 1, values.mean(), stats.sem(values))
    return f"{values.mean():+.3f} ({low:+.3f} to {high:+.3f})"


def table(rows: pandas.DataFrame) -> list[str]:
    """Return a Markdown table: means over seeds, and paired differences to PPO as it is."""
    lines = ["| reward | value model | seeds | " + " | ".join(f"{x} | difference" for x in NUMBERS.values()) + " |"]
    lines.append("|" + "---|" * (3 + 2 * len(NUMBERS)))
    for reward in REWARDS:
        plain = rows[(rows["reward"] == reward) & (rows["setting"] == "as it is")].set_index("seed")
        for setting in SETTINGS:
            found = rows[(rows["reward"] == reward) & (rows["setting"] == setting)].set_index("seed")
            cells = [reward, setting, str(len(found))]
            for key in NUMBERS:
                difference = (found[key] - plain[key]).dropna()
                compared = interval(difference) if setting != "as it is" and len(difference) else ""
                cells += [f"{found[key].mean():.3f}" if len(found) else "", compared]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def draw(curves: pandas.DataFrame, path: Path):
    """Draw value loss and KL over the updates: a thin line for each seed, a thick one for their mean."""
    figure, plots = plt.subplots(2, 2, figsize=(10, 7), sharex=True, layout="constrained")
    for plots_of_reward, reward in zip(plots, REWARDS, strict=True):
        for plot, (column, label) in zip(
            plots_of_reward, {"loss/value": "value loss", "objective/kl": "KL (nats)"}.items(), strict=True
        ):
            for color, setting in enumerate(SETTINGS):
                found = curves[(curves["reward"] == reward) & (curves["setting"] == setting)]
                runs = found.pivot(index="update", columns="seed", values=column)
                plot.plot(runs, color=f"C{color}", alpha=0.3, linewidth=0.8)
                plot.plot(runs.mean(axis=1), color=f"C{color}", linewidth=2, label=setting)
            plot.set(title=f"reward: {reward}", xlabel="update", ylabel=label)
            if column == "loss/value":
                plot.set_yscale("log")
    plots[0][0].legend()
    figure.savefig(path, dpi=100)


def main(args: Args):
    path = RESULTS / "value.csv"
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.run:
            scripts = make_scripts(Path(tempfile.mkdtemp(dir=folder)))
            for reward in REWARDS:
                for setting in SETTINGS:
                    done = pandas.read_csv(path) if path.exists() else pandas.DataFrame(columns=["reward"])
                    is_done = (done["reward"] == reward) & (done.get("setting") == setting) & (done.get("seed") == seed)
                    if not is_done.any():
                        make_run(scripts[reward], reward, setting, seed)
    rows = pandas.read_csv(path)
    print("\n".join(table(rows)))
    draw(pandas.read_csv(RESULTS / "value_curves.csv"), RESULTS / "value.png")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main(tyro.cli(Args))
