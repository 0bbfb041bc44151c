"""Reward-model ensembles against overoptimisation, at laptop size: a matrix of PPO runs whose gold reward is the truth.

    python ensembles/study.py                # runs what is not there yet, then draws the figures and the table
    python ensembles/study.py --dry-run      # prints the cost and the commands that are left to run

A policy of size s answers each post twice, and quickstart/truth.py says which answer is better. 25 % of these labels
are flipped, and reward models of size xs are trained on the pairs. A replicate has answers, flipped labels, five reward
models and a seed of PPO of its own. Its single reward model is the first of its five; average.py makes one of all five
(WARM). Each replicate has a run of PPO for each method and KL penalty, and best of n up to 512 of 64 posts.

A response without EOS keeps its score: Detail 23's fixed -1 would reward it wherever the worst case scores less. Each
step of the matrix waits for the one before; within a step, --jobs runs go side by side, each with its share of the
cores. A stopped run continues from its last checkpoint, and a finished one is not started again. A failing run stops no
other of its step.

RUNS/       sft/{size}, labelled/{replicate}, reward/{replicate}/{seed or warm}, best_of_n/{five or warm}/{replicate},
            ppo/{method}_kl_{kl}/{replicate}, logs/
OUTPUT_DIR/ what ensembles/figures.py writes
"""

import itertools
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "eval"))
from study_runs import Job, fail, fail_of, left_of, minutes, print_commands, run_jobs, runs_bar  # noqa: E402

POSTS = "data/quickstart/posts-1/tldr/sft"
GOLD = "quickstart/truth.py:score"
METHODS = {
    "single": "",
    "mean": "--reward-combination mean",
    "wco": "--reward-combination wco",
    "uwo": "--reward-combination uwo --uwo-lambda 0.1",
    "warm": "",
}
# of a run of each step, on one core of an AMD EPYC, two side by side
SECONDS = {"SFT": 30, "labels": 110, "members": 50, "averages": 12, "best of n": 100, "PPO": 115}


@dataclass
class Args:
    replicates: tuple[int, ...] = (1, 2, 3, 4, 5)
    """seeds, each with reward models of its own"""
    kl_coefs: tuple[float, ...] = (0.0, 0.02, 0.1)
    """KL penalties of PPO"""
    updates: int = 18
    """of a PPO run, 64 episodes each"""
    jobs: int = 2
    """runs side by side, each with OMP_NUM_THREADS = cores / jobs"""
    runs: str = "runs/ensembles"
    """folder of the runs, below the repository"""
    output_dir: str = "runs/ensembles/figures"
    """folder of the figures and the table, below the repository"""
    dry_run: bool = False
    """print the cost and the commands that are left, and nothing else"""


def steps_of(args: Args) -> dict[str, list[Job]]:
    """All jobs, step by step; jobs of one step do not depend on one another."""
    runs = args.runs
    steps = {step: [] for step in SECONDS}

    def add(step: str, name: str, result: str, command: str) -> str:
        """Add a job whose output folder is named after it; returns that folder."""
        folder = f"{runs}/{name}"
        log = ROOT / runs / "logs" / f"{name.replace('/', '_')}.log"
        words = [sys.executable, *command.split(), "--output-dir", folder]
        steps[step].append(Job(name, words, log, ROOT / folder / result, SECONDS[step]))
        return folder

    # ---- SFT, reward models ----------------------------------------------------------------------
    sft = {}
    for size in ("s", "xs"):
        command = f"sft.py --model quickstart/bases/nano-{size} --seed 1 --dataset {POSTS} --learning-rate 1e-3"
        command += " --batch-size 32 --micro-batch-size 8 --resume"
        sft[size] = add("SFT", f"sft/{size}", "model/config.json", command)
    members, warm = {}, {}  # {replicate: paths}
    for i in args.replicates:
        command = f"ensembles/gold_label.py --policy {sft['s']} --gold {GOLD} --dataset {POSTS} --seed {i}"
        command += " --prompts 4000 --label-noise 0.25"
        pairs = add("labels", f"labelled/{i}", "noise_25/dataset_dict.json", command) + "/noise_25"
        members[i] = []
        for seed in range(5 * i - 4, 5 * i + 1):
            command = f"reward.py --model quickstart/bases/nano-xs --seed {seed} --sft-model-path {sft['xs']}"
            command += f" --dataset {POSTS} --preference-dataset {pairs} --num-train-epochs 3 --learning-rate 1e-3"
            command += " --batch-size 16 --micro-batch-size 8 --run-eval --resume"
            members[i].append(add("members", f"reward/{i}/{seed}", "eval/accuracy.csv", command))
        command = f"ensembles/average.py --reward-model-paths {' '.join(members[i])} --preference-dataset {pairs}"
        warm[i] = add("averages", f"reward/{i}/warm", "args.json", command)

    # ---- best of n, PPO --------------------------------------------------------------------------
    for i in args.replicates:
        for name, paths in (("five", members[i]), ("warm", [warm[i]])):
            command = f"ensembles/best_of_n.py --policy {sft['s']} --reward-model-paths {' '.join(paths)} --gold {GOLD}"
            command += f" --dataset {POSTS} --seed {i} --prompts 64 --samples 512 --micro-batch-size 256"
            command += " --standardise-posts 64"
            add("best of n", f"best_of_n/{name}/{i}", "best_of_n.md", command)
    for i, kl_coef, (method, flags) in itertools.product(args.replicates, args.kl_coefs, METHODS.items()):
        paths = {"single": members[i][:1], "warm": [warm[i]]}.get(method, members[i])
        command = f"ensembles/ppo.py --model nano-s --seed {i} --sft-model-path {sft['s']} --dataset {POSTS}"
        command += f" --reward-model-paths {' '.join(paths)} {flags} --kl-coef {kl_coef:g} --standardise-posts 128"
        command += f" --penalty-reward-value None --gold {GOLD} --gold-every 3 --eval-rows 64 --sample-every 0"
        command += f" --total-episodes {64 * args.updates} --batch-size 64 --micro-batch-size 16"
        command += " --forward-batch-size 64 --num-ppo-epochs 2 --num-mini-batches 4 --learning-rate 1e-4"
        command += " --final-learning-rate 1e-4 --save-every 10 --resume"
        add("PPO", f"ppo/{method}_kl_{kl_coef:g}/{i}", "model/config.json", command)
    return steps


def main(args: Args):
    if args.jobs < 1 or args.updates < 1:
        fail("--jobs and --updates are at least 1")
    steps = steps_of(args)
    left = {step: left_of(jobs) for step, jobs in steps.items()}
    posts_log = ROOT / args.runs / "logs" / "posts.log"
    posts = [Job("posts", ["bash", "quickstart/run.sh", "--data-only"], posts_log, None)]

    # ---- what it costs ----------------------------------------------------------------------------------------------
    for step, jobs in steps.items():
        seconds = SECONDS[step] * len(left[step])
        print(f"{step:<10} {len(jobs):>3} runs, {len(left[step]):>3} left, about {seconds:>6,} seconds of one core")
    all_left = [job for jobs in left.values() for job in jobs]
    print(f"left: about {minutes(all_left, args.jobs):,.0f} minutes with {args.jobs} side by side")
    if args.dry_run:
        print_commands(posts, 1)
        print_commands(all_left, args.jobs)
        return

    # ---- run --------------------------------------------------------------------------------------------------------
    total = sum(map(len, steps.values()))
    with runs_bar(total, total - len(all_left)) as progress:
        fail_of(run_jobs(posts, 1, ROOT, progress), "posts: ")
        for step, jobs in left.items():
            fail_of(run_jobs(jobs, args.jobs, ROOT, progress), f"{step}: ")
    command = [sys.executable, "ensembles/figures.py", "--output-dir", args.output_dir]
    command += ["--runs", f"{args.runs}/ppo", f"{args.runs}/best_of_n"]
    if code := subprocess.run(command, cwd=ROOT).returncode:
        fail(f"ensembles/figures.py ended with exit code {code}: {shlex.join(command)}")


if __name__ == "__main__":
    main(tyro.cli(Args))
