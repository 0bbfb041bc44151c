"""Reward-model ensembles against overoptimisation, at laptop size: a matrix of runs whose gold reward is the truth.

    python quickstart/ensembles.py                # everything that is not there yet, then the figures and the claims
    python quickstart/ensembles.py --dry-run      # its cost and the commands that are left to run
    python quickstart/ensembles.py --ppo-seeds    # best-of-n alone

After sections 4 and 5 of "Reward Model Ensembles Help Mitigate Overoptimization": a policy (size s) answers the posts
twice, the truth of truth.py says which answer is better, a share of these labels is flipped, and five reward models,
alike but for their seed, are trained on each set of pairs:

    noise 25 %, size xs, all posts    the setting of all PPO runs
    noise 0 and 35 %                  figures 3 and 10
    size s; half and a quarter of the posts    figures 8, 9 and 13

Best-of-n samples once and lets all of them score; tables are made for each five. PPO runs against two single members,
their mean, the worst case and the uncertainty-weighted score, without and with a KL penalty, on --ppo-seeds, and,
without penalty, the ensembles with their second member first, from which the value model then starts, another lambda,
and single members of fewer posts (figures 12 and 14). A response without EOS keeps its score: Detail 23's fixed -1
would reward it wherever the worst case says less. A stopped run continues from its last checkpoint. Steps of the matrix
wait for the ones before; --jobs runs go side by side, each with its share of the cores. What is finished is not started
again; a failing run stops no other of its step.

RUNS/       sft/{size}/1, labelled/{posts}, reward/{noise}_{size}_{posts}/{seed}, samples, best_of_n/{...},
            ppo/{method}_kl_{kl}/{seed}, logs/
OUTPUT_DIR/ what ensembles/figures.py writes
"""

import itertools
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

ROOT = Path(__file__).resolve().parents[1]
DATA = "data/quickstart/posts-1/tldr"
GOLD = "quickstart/truth.py:score"
POSTS = 4000  # of the quickstart's train split
BASELINE = (25, "xs", POSTS)  # noise in percent, size of the members, posts that were answered
SETTINGS = [
    BASELINE,
    (0, "xs", POSTS),
    (35, "xs", POSTS),
    (25, "s", POSTS),
    (25, "xs", POSTS // 2),
    (25, "xs", POSTS // 4),
]
MEMBERS = (1, 2, 3, 4, 5)  # seeds
OTHER_FIRST = (2, 1, 3, 4, 5)
EPOCHS = 3  # of the members
# of a run of each step, of one core of an AMD EPYC, two side by side
SECONDS = {"SFT": 52, "labels": 65, "members": 62, "best of n": 733, "PPO": 210, "tables": 10}
METHODS = {  # of PPO: where the members are from, which, flags
    "single_1": (BASELINE, (1,), ""),
    "single_2": (BASELINE, (2,), ""),
    "mean": (BASELINE, MEMBERS, "--reward-combination mean"),
    "wco": (BASELINE, MEMBERS, "--reward-combination wco"),
    "uwo": (BASELINE, MEMBERS, "--reward-combination uwo --uwo-lambda 0.1"),
}
SWEEPS = {  # without a KL penalty only: the value model from another member; figures 12 and 14
    "wco_2_first": (BASELINE, OTHER_FIRST, "--reward-combination wco"),
    "uwo_2_first": (BASELINE, OTHER_FIRST, "--reward-combination uwo --uwo-lambda 0.1"),
    "mean_2_first": (BASELINE, OTHER_FIRST, "--reward-combination mean"),
    "uwo_0.5": (BASELINE, MEMBERS, "--reward-combination uwo --uwo-lambda 0.5"),
    "single_1_2000": ((25, "xs", POSTS // 2), (1,), ""),
    "single_1_1000": ((25, "xs", POSTS // 4), (1,), ""),
}


@dataclass
class Args:
    ppo_seeds: tuple[int, ...] = (1, 2, 3)
    """seeds of the PPO runs; none: no PPO"""
    kl_coefs: tuple[float, ...] = (0.0, 0.05)
    """KL penalties of the PPO runs"""
    updates: int = 28
    """of a PPO run, 64 episodes each"""
    bon_prompts: int = 128
    """validation posts that are sampled for best-of-n"""
    bon_samples: int = 1000
    """samples of each"""
    jobs: int = 2
    """runs side by side, each with OMP_NUM_THREADS = cores / jobs"""
    runs: str = "runs/ensembles"
    """folder of the runs, below the repository"""
    output_dir: str = "benchmark/results/ensembles"
    """folder of figures and tables, below the repository"""
    dry_run: bool = False
    """print the cost and the commands that are left, and nothing else"""


class Job(NamedTuple):
    """A command, the log that it appends to and the file that it has to leave behind (none where it makes data)."""

    posts_seed: int
    name: str
    command: list[str]
    log: Path
    result: Path | None


def fail(message: str):
    """End the process with one clear message on standard error and exit code 1."""
    raise SystemExit(f"error: {message}")


def end_groups(processes: Iterable[subprocess.Popen], patience: float = 10):
    """End the process groups of `processes`: SIGTERM, and SIGKILL for those that are left after `patience` seconds."""
    groups, number, begin = {process.pid: process for process in processes}, signal.SIGTERM, time.monotonic()
    while groups:
        for group, process in list(groups.items()):
            process.poll()  # an ended process that nobody waits for would keep its group alive
            try:
                os.killpg(group, number)
            except (ProcessLookupError, PermissionError):
                del groups[group]
        if number == signal.SIGKILL:
            break
        number = signal.SIGKILL if time.monotonic() - begin > patience else 0  # 0: is anyone left?
        time.sleep(0.05)


def run_jobs(jobs: list[Job], at_once: int, threads: int, progress: Progress, bar) -> dict[str, str]:
    """Run every job, `at_once` side by side; a job that fails stops no other. {name: what went wrong} of the failures.
    A signal to end this process ends the jobs first."""
    waiting, running, failures, signals = list(jobs), {}, {}, []
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    handlers = {number: old for number, old in handlers.items() if old not in (signal.SIG_IGN, None)}  # nohup
    for number in handlers:
        signal.signal(number, lambda number, _: signals.append(signal.Signals(number).name))
    try:
        while (waiting or running) and not signals:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                job.log.parent.mkdir(parents=True, exist_ok=True)
                with job.log.open("a") as log:
                    print(f"\n# {time.strftime('%F %T')}  {shlex.join(job.command)}", file=log, flush=True)
                    streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
                    where = {"cwd": ROOT, "env": environment, "start_new_session": True}
                    process = subprocess.Popen(job.command, **streams, **where)
                running[job.name] = job, process, time.monotonic()
                progress.update(bar, description=" and ".join(running))
            time.sleep(0.1)
            for job, process, begin in list(running.values()):
                code = process.poll()
                if code is None:
                    continue
                del running[job.name]
                problem = f"exit code {code}" if code else f"no {job.result} at its end"
                if code or (job.result and not job.result.exists()):
                    tail = "".join(f"\n    {line}" for line in job.log.read_text(errors="replace").splitlines()[-8:])
                    failures[job.name] = f"{job.name}: {problem}; {job.log} ends with{tail}"
                state = "failed" if job.name in failures else "finished"
                progress.console.print(f"{job.name}: {state} after {time.monotonic() - begin:.0f} s", highlight=False)
                done = int(state == "finished" and job.result is not None)
                progress.update(bar, advance=done, description=" and ".join(running))
    finally:
        end_groups(process for _, process, _ in running.values())
        for number, old in handlers.items():
            signal.signal(number, old)
    if signals:
        fail(f"stopped by {signals[0]}, and with it {' and '.join(running) or 'no run'}; the same command continues")
    return failures


# ---- the matrix -----------------------------------------------------------------------------------------------------


def member_set(setting: tuple[int, str, int]) -> str:
    noise, size, posts = setting
    return f"noise_{noise}_{size}_{posts}"


def steps_of(args: Args) -> dict[str, list[Job]]:
    """All jobs, step by step; those of a step need nothing of one another."""
    runs, rewards, steps = args.runs, {}, {step: [] for step in SECONDS}

    def add(step: str, name: str, result: str, command: str):
        log = ROOT / runs / "logs" / f"{name.replace('/', '_')}.log"
        steps[step].append(Job(1, name, [sys.executable, *command.split()], log, ROOT / runs / name / result))

    for size in ("s", "xs"):
        name = f"sft/{size}/1"
        command = f"sft.py --model quickstart/bases/nano-{size} --seed 1 --dataset {DATA}/sft --learning-rate 1e-3"
        command += f" --batch-size 32 --micro-batch-size 8 --resume --output-dir {runs}/{name}"
        add("SFT", name, "model/config.json", command)
    for posts in sorted({posts for _, _, posts in SETTINGS}, reverse=True):
        name = f"labelled/{posts}"
        command = f"ensembles/gold_label.py --policy {runs}/sft/s/1 --gold {GOLD} --dataset {DATA}/sft"
        command += f" --prompts {posts} --label-noise 0 0.25 0.35 --output-dir {runs}/{name}"
        add("labels", name, "noise_35/dataset_dict.json", command)
    for setting in SETTINGS:
        for seed in MEMBERS:
            (noise, size, posts), name = setting, f"reward/{member_set(setting)}/{seed}"
            command = (
                f"reward.py --model quickstart/bases/nano-{size} --seed {seed} --sft-model-path {runs}/sft/{size}/1"
            )
            command += f" --dataset {DATA}/sft --preference-dataset {runs}/labelled/{posts}/noise_{noise}"
            command += f" --num-train-epochs {EPOCHS} --learning-rate 1e-3 --batch-size 16 --micro-batch-size 8"
            add("members", name, "eval/accuracy.csv", f"{command} --run-eval --resume --output-dir {runs}/{name}")
            rewards[setting, seed] = f"{runs}/{name}"
    command = f"ensembles/best_of_n.py --policy {runs}/sft/s/1 --reward-model-paths {' '.join(rewards.values())}"
    command += f" --gold {GOLD} --dataset {DATA}/sft --prompts {args.bon_prompts} --samples {args.bon_samples}"
    add("best of n", "samples", "best_of_n.md", f"{command} --micro-batch-size 250 --output-dir {runs}/samples")
    runs_of_ppo = [(kl_coef, name, method) for kl_coef in args.kl_coefs for name, method in METHODS.items()]
    sweeps = [(0.0, name, method) for name, method in SWEEPS.items()]
    for group, seed in itertools.product((runs_of_ppo, sweeps), args.ppo_seeds):
        for kl_coef, method, (setting, used, flags) in group:
            name, members = f"ppo/{method}_kl_{kl_coef:g}/{seed}", [rewards[setting, i] for i in used]
            command = (
                f"ensembles/ppo.py --model nano-s --seed {seed} --sft-model-path {runs}/sft/s/1 --dataset {DATA}/sft"
            )
            command += f" --reward-model-paths {' '.join(members)} {flags} --kl-coef {kl_coef:g}"
            command += f" --penalty-reward-value None --gold {GOLD} --gold-every 2 --eval-rows 128 --sample-every 0"
            command += f" --total-episodes {64 * args.updates} --batch-size 64 --micro-batch-size 16"
            command += f" --learning-rate 3e-5 --save-every 20 --keep-checkpoints 1 --resume --output-dir {runs}/{name}"
            add("PPO", name, "model/config.json", command)
    for setting in SETTINGS:
        name = f"best_of_n/{member_set(setting)}"
        places = [str(1 + list(rewards).index((setting, seed))) for seed in MEMBERS]
        command = f"ensembles/best_of_n.py --output-dir {runs}/samples --estimate --members {' '.join(places)}"
        add("tables", name, "best_of_n.md", f"{command} --tables-dir {runs}/{name}")
    return steps


def main(args: Args):
    if args.jobs < 1 or args.updates < 1 or args.bon_prompts < 1 or args.bon_samples < 1:
        fail("--jobs, --updates, --bon-prompts and --bon-samples are at least 1")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = max(1, cores // args.jobs)
    steps = steps_of(args)
    left = {step: [job for job in jobs if not job.result.exists()] for step, jobs in steps.items()}
    data = Job(1, "posts", ["bash", "quickstart/run.sh", "--data-only"], ROOT / args.runs / "logs" / "posts.log", None)

    # ---- what it costs ----------------------------------------------------------------------------------------------
    seconds = {step: SECONDS[step] * len(jobs) for step, jobs in left.items()}
    for step, jobs in steps.items():
        print(
            f"{step:<10} {len(jobs):>3} runs, {len(left[step]):>3} left, about {seconds[step]:>6,} seconds of one core"
        )
    print(
        f"left: about {sum(seconds.values()) / 60 / min(args.jobs, cores):,.0f} minutes with {args.jobs} side by side"
    )
    if args.dry_run:
        for job in [data, *(job for jobs in left.values() for job in jobs)]:
            print(f"OMP_NUM_THREADS={threads if job.result else cores} {shlex.join(job.command)}")
        return

    # ---- run --------------------------------------------------------------------------------------------------------
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("runs")]
    columns += [TimeElapsedColumn(), TimeRemainingColumn()]
    everything = sum(map(len, steps.values()))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=everything, completed=everything - sum(map(len, left.values())))
        left["PPO"] = left.pop("best of n") + left["PPO"]  # side by side
        for step, jobs in {"posts": [data], **left}.items():
            if failures := run_jobs(jobs, args.jobs, threads, progress, bar):
                names = f"{step}: {', '.join(failures)} failed; the same command keeps what is finished and tries again"
                fail("\n".join([names, *failures.values()]))
    command = [sys.executable, "ensembles/figures.py", "--runs", args.runs, "--output-dir", args.output_dir]
    if code := subprocess.run(command, cwd=ROOT).returncode:
        fail(f"ensembles/figures.py ended with exit code {code}: {shlex.join(command)}")


if __name__ == "__main__":
    main(tyro.cli(Args))
