"""Reward-model ensembles against overoptimisation, at laptop size: a matrix of PPO runs whose gold reward is the truth.

    python ensembles/study.py                # runs what is not finished, then draws the figures and the table
    python ensembles/study.py --dry-run      # prints the commands that are left to run

README.md describes the study and its results. Runs and logs are in runs/ensembles, and what ensembles/figures.py writes
in runs/ensembles/figures.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "eval"))
from eval_helpers import Job, run_jobs  # noqa: E402

RUNS = "runs/ensembles"
POSTS = "--dataset data/quickstart/posts-1/tldr/sft"
GOLD = "--gold quickstart/truth.py:score"
METHODS = {"single": "", "mean": "--reward-combination mean", "wco": "--reward-combination wco"}
METHODS |= {"uwo": "--reward-combination uwo --uwo-lambda 0.1", "warm": ""}


@dataclass
class Args:
    jobs: int = 2
    """runs side by side, each with its share of the cores"""
    dry_run: bool = False
    """only print the commands that are left"""


def job(name: str, result: str, command: str) -> Job:
    """Return a job whose output folder is RUNS/name."""
    words = [sys.executable, *command.split(), "--output-dir", f"{RUNS}/{name}"]
    return Job(name, words, ROOT / RUNS / "logs" / f"{name.replace('/', '_')}.log", ROOT / RUNS / name / result)


def steps_of() -> list[list[Job]]:
    """Return the jobs of each step; a step needs the results of those before."""
    sft, labels, members, averages, ppo = [], [], [], [], []
    for size in ("s", "xs"):
        command = f"sft.py --model quickstart/bases/nano-{size} --seed 1 {POSTS} --learning-rate 1e-3 --batch-size 32"
        sft.append(job(f"sft/{size}", "model/config.json", f"{command} --micro-batch-size 8 --resume"))
    for i in range(1, 6):
        pairs = f"--preference-dataset {RUNS}/labelled/{i}/noise_25"
        five = [f"{RUNS}/reward/{i}/{seed}" for seed in range(5 * i - 4, 5 * i + 1)]
        command = f"ensembles/gold_label.py --policy {RUNS}/sft/s {GOLD} {POSTS} --seed {i}"
        command += " --prompts 4000 --label-noise 0.25"
        labels.append(job(f"labelled/{i}", "noise_25/dataset_dict.json", command))
        for folder in five:
            command = f"reward.py --model quickstart/bases/nano-xs --seed {Path(folder).name} {POSTS} {pairs} --resume"
            command += f" --sft-model-path {RUNS}/sft/xs --num-train-epochs 3 --learning-rate 1e-3 --batch-size 16"
            command += " --micro-batch-size 8 --run-eval"
            members.append(job(folder.removeprefix(f"{RUNS}/"), "eval/accuracy.csv", command))
        command = f"ensembles/average.py {pairs} --reward-model-paths {' '.join(five)}"
        averages.append(job(f"reward/{i}/warm", "args.json", command))
        models = dict.fromkeys(METHODS, five) | {"single": five[:1], "warm": [f"{RUNS}/reward/{i}/warm"]}
        for name, paths in {"five": five, "warm": models["warm"]}.items():
            command = f"ensembles/best_of_n.py --policy {RUNS}/sft/s --reward-model-paths {' '.join(paths)} {GOLD}"
            command += f" {POSTS} --seed {i} --prompts 64 --samples 512 --micro-batch-size 256 --standardise-posts 64"
            ppo.append(job(f"best_of_n/{name}/{i}", "best_of_n.md", command))
        for kl_coef in ("0", "0.02", "0.1"):
            for method, flags in METHODS.items():
                command = f"ensembles/ppo.py --model nano-s --seed {i} --sft-model-path {RUNS}/sft/s {POSTS} --resume"
                command += f" --reward-model-paths {' '.join(models[method])} {flags} --kl-coef {kl_coef}"
                command += " --standardise-posts 128 --penalty-reward-value None --eval-every 3 --eval-rows 64"
                command += " --sample-every 0 --total-episodes 1152 --batch-size 64 --micro-batch-size 16"
                command += " --num-ppo-epochs 2 --num-mini-batches 4 --learning-rate 1e-4"
                command += " --final-learning-rate 1e-4 --save-every 10"
                ppo.append(job(f"ppo/{method}_kl_{kl_coef}/{i}", "model/config.json", command))
    return [sft, labels, members, averages, ppo]


def main(args: Args):
    posts = Job("posts", ["bash", "quickstart/run.sh", "--data-only"], ROOT / RUNS / "logs" / "posts.log", None)
    for step in [[posts], *steps_of()]:
        left = [job for job in step if not job.result or not job.result.exists()]
        if args.dry_run:
            print("\n".join(" ".join(job.command) for job in left))
        else:
            run_jobs(left, args.jobs, ROOT)
    gold = f"eval/gold.py {RUNS}/ppo {GOLD}"
    figures = f"ensembles/figures.py --output-dir {RUNS}/figures --runs {RUNS}/ppo {RUNS}/best_of_n"
    for command in [] if args.dry_run else [gold, figures]:
        subprocess.run([sys.executable, *command.split()], cwd=ROOT, check=True)


if __name__ == "__main__":
    main(tyro.cli(Args))
