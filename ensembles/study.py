"""Reward-model ensembles against overoptimisation, at laptop size: a matrix of PPO runs whose gold reward is the truth.

    python ensembles/study.py                # everything that is not there yet, then the figures and the claims
    python ensembles/study.py --dry-run      # its cost and the commands that are left to run
    python ensembles/study.py --pilot        # the pilot alone, by which STEP_SIZE and UPDATES were fixed

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
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmark"))
from study_runs import Job, fail, fail_of, left_of, minutes, print_commands, run_jobs, runs_bar  # noqa: E402

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


# ---- the matrix -----------------------------------------------------------------------------------------------------


def steps_of(args: Args) -> dict[str, list[Job]]:
    """All jobs, step by step; those of a step need nothing of one another."""
    runs = args.runs
    logs = ROOT / runs / "logs"
    steps = {step: [] for step in SECONDS}

    def add_job(step: str, name: str, command: str, log: str, result: Path):
        steps[step].append(Job(name, [sys.executable, *command.split()], logs / log, result, SECONDS[step]))

    def add(step: str, name: str, result: str, command: str) -> str:
        """A job whose output folder is named as it is; returns that folder."""
        folder = f"{runs}/{name}"
        log = f"{name.replace('/', '_')}.log"
        add_job(step, name, f"{command} --output-dir {folder}", log, ROOT / folder / result)
        return folder

    # ---- bases, SFT ------------------------------------------------------------------------------
    bases = BASES[:1] if args.pilot else BASES
    models = {1: "quickstart/bases/nano-xs"}
    if bases[1:]:
        command = f"quickstart/posts.py --seed 0 --num-pretraining 100000 --output-dir {CORPUS}"
        add_job("corpus", "corpus", command, "corpus.log", ROOT / CORPUS / "pretraining.jsonl")
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
            table = f"curves/best_of_n/{name}/{i}"
            command = f"ensembles/best_of_n.py --estimate --members {members} --tables-dir {runs}/{table}"
            command += f" --output-dir {runs}/samples/{i}"
            add_job("tables", table, command, f"tables_{name}_{i}.log", ROOT / runs / table / "best_of_n.md")
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
    if PILOT in args.replicates:
        fail(f"--replicates: {PILOT} is the pilot's, by which the step size was chosen; leave it out")
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
    if args.pilot:
        return draw_pilot(steps["PPO"], ROOT / args.output_dir)
    command = [sys.executable, "ensembles/figures.py", "--runs", f"{args.runs}/curves", "--output-dir", args.output_dir]
    if code := subprocess.run(command, cwd=ROOT).returncode:
        fail(f"ensembles/figures.py ended with exit code {code}: {shlex.join(command)}")


if __name__ == "__main__":
    main(tyro.cli(Args))
