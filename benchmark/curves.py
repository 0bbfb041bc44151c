"""Learning curves of the four stages from their run folders: one PNG, and a Markdown table of what moved.

python benchmark/curves.py --model nano-xs --seeds 44413 55513 --output benchmark/results/chain

Writes OUTPUT.png and OUTPUT.md and prints the table. A PPO run counts as rising when the mean RLHF reward of its last
ten updates exceeds that of its first ten by two standard errors of the difference.
"""

import json
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import mean, variance

import matplotlib
import pandas
import tyro

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

# stage -> metrics to draw, one panel each
PANELS = {
    "sft": ["loss/train"],
    "reward": ["loss/train", "accuracy/train"],
    "ppo": ["objective/rlhf_reward", "objective/score", "objective/kl", "response/eos_rate", "response/length"],
    "dpo": ["loss/train", "rewards/margin"],
}


@dataclass
class Args:
    output: str
    """where to write, without ending: OUTPUT.png and OUTPUT.md"""
    model: str = "nano-xs"
    """the {model} of the run folders"""
    seeds: tuple[int, ...] = (44413, 55513, 66613, 77713)
    """seeds of the run folders"""
    runs: str = "runs"
    """folder of the run folders"""


def fail(message: str):
    """End the process with one clear message on standard error and exit code 1."""
    raise SystemExit(f"error: {message}")


def read_metrics(folder: Path) -> dict[str, list]:
    """metrics.jsonl as {metric: [(update, value), ...]}."""
    if not (folder / "metrics.jsonl").exists():
        fail(f"no metrics.jsonl in {folder}: run {folder.parts[-3]}.py with this model and seed first")
    found = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for key, value in row.items():
            found.setdefault(key, []).append((row["update"], value))
    return found


def rise(values: list[float]) -> tuple[float, float, float]:
    """Mean of the first ten values, of the last ten, and their difference in standard errors of the difference."""
    first, last = values[:10], values[-10:]
    error = sqrt(variance(first) / len(first) + variance(last) / len(last))
    return mean(first), mean(last), (mean(last) - mean(first)) / error


def summary(stage: str, folder: Path, metrics: dict[str, list]) -> list[dict]:
    """Rows (quantity, before, after, note) of one run."""
    values = {key: [value for _, value in pairs] for key, pairs in metrics.items()}
    rows = []
    if stage == "sft":
        rows += [
            {
                "quantity": "validation loss (nats per token)",
                "from": values["eval/loss"][0],
                "to": values["eval/loss"][-1],
            }
        ]
    if stage in ("reward", "dpo"):
        third = len(values["accuracy/train"]) // 3
        accuracy = [mean(values["accuracy/train"][:third]), mean(values["accuracy/train"][-third:])]
        rows += [{"quantity": "train accuracy, first and last third", "from": accuracy[0], "to": accuracy[1]}]
        rows += [{"quantity": "validation accuracy after training", "to": values["eval/accuracy"][-1]}]
    if stage == "ppo":
        first, last, errors = rise(values["objective/rlhf_reward"])
        rows += [
            {
                "quantity": "RLHF reward, first and last ten updates",
                "from": first,
                "to": last,
                "note": f"{errors:.1f} standard errors",
            }
        ]
        for key in ("objective/score", "objective/kl", "response/eos_rate", "response/length"):
            first, last, _ = rise(values[key])
            rows += [{"quantity": f"{key}, first and last ten", "from": first, "to": last}]
        rows += [
            {
                "quantity": "largest abs(ratio - 1) before a first step",
                "to": max(values["policy/first_ratio_deviation"]),
            }
        ]
    if (folder / "eval" / "rouge.csv").exists():
        rows += [{"quantity": "ROUGE-L, validation", "to": pandas.read_csv(folder / "eval" / "rouge.csv")["rougeL"][0]}]
    return rows + [{"quantity": "seconds of training", "to": values["time/total"][-1]}]


def main(args: Args):
    # ---- read --------------------------------------------------------------------------------------
    runs = {(stage, seed): Path(args.runs, stage, args.model, str(seed)) for stage in PANELS for seed in args.seeds}
    metrics = {key: read_metrics(folder) for key, folder in runs.items()}

    # ---- draw --------------------------------------------------------------------------------------
    panels = [(stage, key) for stage, keys in PANELS.items() for key in keys]
    figure, axes = plt.subplots(2, (len(panels) + 1) // 2, figsize=(20, 7))
    for (stage, key), axis in zip(panels, axes.flat, strict=False):
        for seed in args.seeds:
            axis.plot(*zip(*metrics[stage, seed][key], strict=True), label=str(seed))
        axis.set(title=f"{stage}: {key}", xlabel="update")
        axis.legend()
    figure.tight_layout()
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(f"{args.output}.png", dpi=70)

    # ---- table -------------------------------------------------------------------------------------
    lines = ["| stage | seed | quantity | from | to | |", "|---|---|---|---|---|---|"]
    for (stage, seed), folder in runs.items():
        for row in summary(stage, folder, metrics[stage, seed]):
            numbers = [f"{row[key]:.4g}" if key in row else "" for key in ("from", "to")]
            lines.append(f"| {stage} | {seed} | {row['quantity']} | {' | '.join(numbers)} | {row.get('note', '')} |")
    Path(f"{args.output}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main(tyro.cli(Args))
