"""Reward-model ensembles against overoptimisation, at laptop size: a matrix of PPO runs whose gold reward is the truth.

    python quickstart/ensembles.py                # everything that is not there yet, then the figures and the claims
    python quickstart/ensembles.py --dry-run      # its cost and the commands that are left to run
    python quickstart/ensembles.py --pilot        # the pilot alone, by which STEP_SIZE and UPDATES were fixed

After "Reward Model Ensembles Help Mitigate Overoptimization", and after "Helping or Herding?" (Eisenstein et al. 2023)
and WARM (Rame et al. 2024) where it says so. A policy (size s) answers the posts twice, the truth of truth.py says
which answer is better, 25 % of these labels are flipped, and reward models (size xs) are trained on the pairs.

A replicate is a seed of everything: of the answers, of the flipped labels, of five reward models of its own, and of
PPO. Its single reward model is the first of its five. Replicate 1 has the members of the study before this one. The
pilot is replicate 6, which no other run uses.

bases      five of size xs, by nano.py --seed and pretrain.py --seed, with one tokenizer: the repository's and four
           more; SFT of each
members    of each replicate: five of base 1, which average.py also makes one (WARM), and one of each other base
best of n  of each replicate's five and of their average, up to 512 of 64 posts
PPO        claims  single, mean, WCO, UWO, WARM x KL penalty 0, 0.02, 0.1; value model from SFT, members standardised
           bases   mean, WCO, UWO of five bases, no penalty
           raw     WCO, UWO of members that are not standardised, no penalty
           leak    WCO of replicate 1's members on five seeds, value model from member 1, not standardised: lambda of
                   GAE 0.95 and 1 x value clipping 0.2 and off; and with the value model from SFT

A response without EOS keeps its score: Detail 23's fixed -1 would reward it wherever the worst case says less. A
stopped run continues from its last checkpoint. Steps of the matrix wait for the ones before; --jobs runs go side by
side, each with its share of the cores. What is finished is not started again; a failing run stops no other of its step.

RUNS/       base/{base}/nano-xs, sft/{size}/{base}, labelled/{replicate}, reward/base_{base}/{replicate}/{seed},
            reward/warm/{replicate}, curves/ppo/{group}/{method}_kl_{kl}/{replicate}, samples/{replicate},
            curves/best_of_n/{five or warm}/{replicate}, pilot/{step size}_{member}/6, logs/
OUTPUT_DIR/ what ensembles/figures.py writes of curves/; of the pilot pilot.csv and pilot.png
"""

import csv
import itertools
import json
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
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

ROOT = Path(__file__).resolve().parents[1]
POSTS = "data/quickstart/posts-1/tldr/sft"
CORPUS = "data/quickstart/pretraining"
GOLD = "quickstart/truth.py:score"
PILOT = 6
BASES = (1, 2, 3, 4, 5)  # the first is quickstart/bases/nano-xs
STEP_SIZE, UPDATES = 1e-4, 18  # of PPO, fixed by the pilot
METHODS = {
    "single": "",
    "mean": "--reward-combination mean",
    "wco": "--reward-combination wco",
    "uwo": "--reward-combination uwo --uwo-lambda 0.1",
    "warm": "",
}
# of a run of each step, of one core of an AMD EPYC, two side by side
SECONDS = {
    "corpus": 20, "bases": 10, "pretraining": 500, "SFT": 30, "labels": 110, "members": 50, "averages": 12,
    "best of n": 100, "tables": 5, "PPO": 115,
}  # fmt: skip


@dataclass
class Args:
    replicates: tuple[int, ...] = (1, 2, 3, 4, 5)
    """seeds, each with reward models of its own"""
    kl_coefs: tuple[float, ...] = (0.0, 0.02, 0.1)
    """KL penalties of the claims"""
    updates: int = UPDATES
    """of a PPO run, 64 episodes each"""
    pilot: bool = False
    """run the pilot alone: single reward models that no other run uses, at three step sizes"""
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
    environment.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")  # as quickstart/setup.sh
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


def steps_of(args: Args) -> dict[str, list[Job]]:
    """All jobs, step by step; those of a step need nothing of one another."""
    runs, steps = args.runs, {step: [] for step in SECONDS}

    def add(step: str, name: str, result: str, command: str) -> str:
        """A job whose output folder is named as it is; returns that folder."""
        log = ROOT / runs / "logs" / f"{name.replace('/', '_')}.log"
        command = f"{command} --output-dir {runs}/{name}"
        steps[step].append(Job(1, name, [sys.executable, *command.split()], log, ROOT / runs / name / result))
        return f"{runs}/{name}"

    # ---- bases, SFT ------------------------------------------------------------------------------
    bases = BASES[:1] if args.pilot else BASES
    models = {1: "quickstart/bases/nano-xs"}
    if bases[1:]:
        command = f"quickstart/posts.py --seed 0 --num-pretraining 100000 --output-dir {CORPUS}"
        log, result = ROOT / runs / "logs" / "corpus.log", ROOT / CORPUS / "pretraining.jsonl"
        steps["corpus"].append(Job(1, "corpus", [sys.executable, *command.split()], log, result))
    for base in bases[1:]:
        command = f"quickstart/nano.py --size xs --seed {base} --tokenizer quickstart/bases/nano-s"
        random = add("bases", f"random/{base}", "config.json", command)
        command = f"quickstart/pretrain.py --model {random} --seed {base} --steps 2000 --documents {CORPUS}"
        models[base] = add("pretraining", f"base/{base}/nano-xs", "config.json", command)
    sft = {}
    for size, base, model in [("s", 1, "quickstart/bases/nano-s"), *(("xs", base, models[base]) for base in bases)]:
        command = f"sft.py --model {model} --seed 1 --dataset {POSTS} --learning-rate 1e-3"
        command += " --batch-size 32 --micro-batch-size 8 --resume"
        sft[size, base] = add("SFT", f"sft/{size}/{base}", "model/config.json", command)

    # ---- reward models ---------------------------------------------------------------------------
    replicates = (PILOT,) if args.pilot else args.replicates
    own, other, warm = {}, {}, {}  # {replicate: paths}

    def reward_model(name: str, base: int, seed: int, pairs: str) -> str:
        command = f"reward.py --model {models[base]} --seed {seed} --sft-model-path {sft['xs', base]} --dataset {POSTS}"
        command += f" --preference-dataset {pairs} --num-train-epochs 3 --learning-rate 1e-3 --batch-size 16"
        return add("members", name, "eval/accuracy.csv", f"{command} --micro-batch-size 8 --run-eval --resume")

    for i in replicates:
        command = f"ensembles/gold_label.py --policy {sft['s', 1]} --gold {GOLD} --dataset {POSTS} --seed {i}"
        command += " --prompts 4000 --label-noise 0.25"
        labelled = add("labels", f"labelled/{i}", "noise_25/dataset_dict.json", command)
        seeds = range(5 * i - 4, 5 * i - 2 if args.pilot else 5 * i + 1)
        own[i] = [reward_model(f"reward/base_1/{i}/{seed}", 1, seed, f"{labelled}/noise_25") for seed in seeds]
        if args.pilot:
            continue
        others = [
            reward_model(f"reward/base_{x}/{i}/{seeds[0]}", x, seeds[0], f"{labelled}/noise_25") for x in BASES[1:]
        ]
        other[i] = own[i][:1] + others
        command = f"ensembles/average.py --reward-model-paths {' '.join(own[i])}"
        warm[i] = add(
            "averages", f"reward/warm/{i}", "args.json", f"{command} --preference-dataset {labelled}/noise_25"
        )

    # ---- PPO -------------------------------------------------------------------------------------
    def ppo(name: str, seed: int, members: list[str], flags: str, kl_coef: float = 0.0, step_size: float = STEP_SIZE):
        name = f"pilot/{name}/{seed}" if args.pilot else f"curves/ppo/{name}_kl_{kl_coef:g}/{seed}"
        command = f"ensembles/ppo.py --model nano-s --seed {seed} --sft-model-path {sft['s', 1]} --dataset {POSTS}"
        command += f" --reward-model-paths {' '.join(members)} {flags} --kl-coef {kl_coef:g} --standardise-posts 128"
        command += f" --penalty-reward-value None --gold {GOLD} --gold-every 3 --eval-rows 64 --sample-every 0"
        command += f" --total-episodes {64 * args.updates} --batch-size 64 --micro-batch-size 16"
        command += f" --forward-batch-size 64 --num-ppo-epochs 2 --num-mini-batches 4 --learning-rate {step_size:g}"
        command += f" --final-learning-rate {step_size:g} --save-every 10 --keep-checkpoints 1 --resume"
        add("PPO", name, "model/config.json", command)

    if args.pilot:
        for step_size, member in itertools.product((5e-5, 1e-4, 2e-4), own[PILOT]):
            ppo(f"{step_size:g}_{Path(member).name}", PILOT, [member], "", 0.0, step_size)
        return steps
    for kl_coef, i, (method, flags) in itertools.product(args.kl_coefs, replicates, METHODS.items()):
        members = {"single": own[i][:1], "warm": [warm[i]]}.get(method, own[i])
        ppo(f"claims/{method}", i, members, flags, kl_coef)
    for i, method in itertools.product(replicates, ("mean", "wco", "uwo")):
        ppo(f"bases/{method}", i, other[i], METHODS[method])
    for i, method in itertools.product(replicates, ("wco", "uwo")):
        ppo(f"raw/{method}", i, own[i], f"{METHODS[method]} --no-standardise-members")
    raw = f"{METHODS['wco']} --no-standardise-members"
    for i in replicates:
        for lam, clip in itertools.product((0.95, 1), (0.2, float("inf"))):
            flags = f"{raw} --value-start reward --lam {lam} --cliprange-value {clip}"
            ppo(f"leak/lambda_{lam}_clip_{clip}", i, own[replicates[0]], flags)
        if i != replicates[0]:  # whose run is raw/wco
            ppo("leak/sft", i, own[replicates[0]], raw)
    for i in replicates:
        command = f"ensembles/best_of_n.py --policy {sft['s', 1]} --reward-model-paths {' '.join([*own[i], warm[i]])}"
        command += f" --gold {GOLD} --dataset {POSTS} --seed {i} --prompts 64 --samples 512 --micro-batch-size 256"
        add("best of n", f"samples/{i}", "best_of_n.md", f"{command} --standardise-posts 64")
        for name, members in (("five", "1 2 3 4 5"), ("warm", "6")):
            command = f"ensembles/best_of_n.py --estimate --members {members} --tables-dir"
            command += f" {runs}/curves/best_of_n/{name}/{i} --output-dir {runs}/samples/{i}"
            log, result = ROOT / runs / "logs" / f"tables_{name}_{i}.log", f"curves/best_of_n/{name}/{i}/best_of_n.md"
            job = [sys.executable, *command.split()]
            steps["tables"].append(Job(1, f"curves/best_of_n/{name}/{i}", job, log, ROOT / runs / result))
    # each question first where it is sharpest, then one replicate after the other
    steps["PPO"].sort(key=lambda job: 0 if "_kl_0/" in job.name else int(Path(job.name).name))
    return steps


def draw_pilot(jobs: list[Job], folder: Path):
    """Gold and KL (equation 10) over the updates of the pilot's runs: pilot.csv, pilot.png."""
    rows, figure = [], Figure(figsize=(8.8, 4.2), layout="constrained")
    axes = figure.subplots(1, 2)
    for job in jobs:
        lines = [json.loads(line) for line in (job.result.parents[1] / "metrics.jsonl").read_text().splitlines()]
        step_size, member = Path(job.name).parts[1].split("_")
        found = [(x["update"], x["gold/score"], x["gold/kl_k2"]) for x in lines if "gold/score" in x]
        rows += [{"step_size": step_size, "member": member, "update": u, "gold": g, "kl": k} for u, g, k in found]
        style = {
            "label": f"step size {step_size}, member {member}",
            "ls": "-" if float(step_size) == STEP_SIZE else ":",
        }
        for axis, column, name in zip(axes, (1, 2), ("gold", "KL, nats"), strict=True):
            axis.plot([x[0] for x in found], [x[column] for x in found], **style)
            axis.set(xlabel="update", ylabel=name)
    axes[1].set_yscale("symlog")
    axes[1].axhline(150, color="gray", linewidth=0.8)
    axes[0].legend(fontsize=7)
    figure.suptitle("Pilot: single reward models, without KL penalty", size=9.5)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "pilot.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    figure.savefig(folder / "pilot.png", dpi=90)


def main(args: Args):
    if args.jobs < 1 or args.updates < 1:
        fail("--jobs and --updates are at least 1")
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
        for step, jobs in {"posts": [data], **left}.items():
            if failures := run_jobs(jobs, args.jobs, threads, progress, bar):
                names = f"{step}: {', '.join(failures)} failed; the same command keeps what is finished and tries again"
                fail("\n".join([names, *failures.values()]))
    if args.pilot:
        return draw_pilot(steps["PPO"], ROOT / args.output_dir)
    command = [sys.executable, "ensembles/figures.py", "--runs", f"{args.runs}/curves", "--output-dir", args.output_dir]
    if code := subprocess.run(command, cwd=ROOT).returncode:
        fail(f"ensembles/figures.py ended with exit code {code}: {shlex.join(command)}")


if __name__ == "__main__":
    main(tyro.cli(Args))
