"""Reward-model ensembles against overoptimisation, at laptop size: the arms of README.md's study, draw by draw. The
gold reward is the truth.

    python ensembles/study.py                      # what is missing of draws 1 to 10: best of n, PPO, then gold_model
    python ensembles/study.py --draws 11 12 --parts ppo --methods single uwo
    python ensembles/study.py --draws 1 2 3 --parts gold_model    # the arm whose gold reward is a reward model
    python ensembles/study.py --fast               # each arm once, with little of everything: about ten minutes
    python ensembles/study.py --dry-run            # prints the commands that are left to run

A draw has pairs, reward models and a seed of its own, and all arms share the SFT policy. In the arm gold_model, as in
the paper, a larger reward model labels the pairs and judges the policies, and the truth is the second gold.

A run whose row is in results/study.jsonl is not made again, and a finished run folder is kept: empty the folder after a
change of code. Runs and logs are in runs/ensembles. ensembles/figures.py
makes tables and figures of the rows.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / folder) for folder in ("eval", "quickstart")]

from eval_helpers import Job, run_jobs  # noqa: E402
from score import commit_of  # noqa: E402

spec = importlib.util.spec_from_file_location("ensembles_figures", ROOT / "ensembles/figures.py")  # eval/ has one, too
figures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(figures)

POSTS = "--dataset data/quickstart/posts-1/tldr/sft"
GOLD = "--gold quickstart/truth.py:score"


@dataclass(frozen=True)
class Arm:
    """What the five reward models of a draw are: their size, the percentage of flipped labels, and whether they learn
    from all prompts' pairs or from those of a few (640 pairs)."""

    size: str = "xs"
    noise: int = 25
    few: bool = False


# one factor at a time around the centre
ARMS = {"centre": Arm(), "noise_0": Arm(noise=0), "noise_35": Arm(noise=35), "size_s": Arm(size="s")}
ARMS |= {"pairs_640": Arm(few=True)}
MEMBERS = {"members_3": 3, "members_4": 4}  # best of n with the first of the centre's reward models
PPO = [("centre", "0.02"), ("centre", "0.1"), ("noise_0", "0.1")]  # arm and KL coefficient
PARTS = ("best_of_n", "ppo", "gold_model")
GOLD_MODEL = ("gold_model", "0")  # an arm with best of n and PPO, and its KL coefficient
METHODS = {"single": "", "mean": "--reward-combination mean", "wco": "--reward-combination wco"}
METHODS |= {"uwo": "--reward-combination uwo --uwo-lambda 0.1", "warm": ""}  # WARM: at the centre


@dataclass(frozen=True)
class Scale:
    """How much of everything: reward models of an arm, prompts with pairs, those of the arm with few, epochs of the
    reward models; posts and samples of best of n; episodes of PPO."""

    members: int = 5
    prompts: int = 4000
    few: int = 1000
    epochs: int = 3
    posts: int = 64
    samples: int = 512
    episodes: int = 1152


FAST = Scale(members=2, prompts=300, few=100, epochs=1, posts=8, samples=64, episodes=192)


@dataclass
class Args:
    draws: list[int] = field(default_factory=lambda: list(range(1, 11)))
    """draws to make"""
    parts: list[Literal["best_of_n", "ppo", "gold_model"]] = field(default_factory=lambda: list(PARTS))
    """what to make of them"""
    methods: list[str] = field(default_factory=lambda: list(METHODS))
    """methods of PPO"""
    jobs: int = 2
    """runs side by side, each with its share of the cores"""
    fast: bool = False
    """one draw with little of everything, in runs/ensembles_fast; its numbers mean nothing"""
    dry_run: bool = False
    """only print the commands that are left"""
    rows: Path = ROOT / "ensembles/results/study.jsonl"
    """the rows that are there"""

    @property
    def runs(self) -> str:
        return "runs/ensembles_fast" if self.fast else "runs/ensembles"

    @property
    def scale(self) -> Scale:
        return FAST if self.fast else Scale()


def job(args: Args, name: str, result: str, command: str) -> Job:
    """Return a job whose output folder is RUNS/name."""
    words = [sys.executable, *command.split(), "--output-dir", f"{args.runs}/{name}"]
    log = ROOT / args.runs / "logs" / f"{name.replace('/', '_')}.log"
    return Job(name, words, log, ROOT / args.runs / name / result)


# ---- commands --------------------------------------------------------------------------------------------------------


def members_of(args: Args, arm: str, draw: int) -> list[str]:
    """Return the run folders of an arm's reward models."""
    return [f"{args.runs}/reward/{arm}/{draw}/{member}" for member in range(1, args.scale.members + 1)]


def sft(args: Args, *sizes: str) -> list[Job]:
    """Return the SFT models of these sizes, which all draws share."""
    jobs = []
    for size in sizes:
        command = f"sft.py --model quickstart/bases/nano-{size} --seed 1 {POSTS} --learning-rate 1e-3 --batch-size 32"
        command += f" --micro-batch-size 8 --resume --num-train-epochs {3 if size == 'm' else 1}"
        jobs.append(job(args, f"sft/{size}", "model/config.json", command))
    return jobs


def labels(args: Args, name: str, gold: str, seed: int, prompts: int) -> Job:
    """Return the pairs by the SFT policy of size s, labelled by a gold reward with each noise."""
    command = f"ensembles/gold_label.py --policy {args.runs}/sft/s {gold} {POSTS} --seed {seed} --prompts {prompts}"
    return job(args, name, "noise_25/dataset_dict.json", f"{command} --label-noise 0 0.25 0.35")


def reward_model(args: Args, name: str, size: str, pairs: str, seed: int) -> Job:
    command = f"reward.py --model quickstart/bases/nano-{size} --seed {seed} {POSTS}"
    command += f" --preference-dataset {args.runs}/{pairs} --sft-model-path {args.runs}/sft/{size} --resume"
    command += f" --num-train-epochs {args.scale.epochs} --learning-rate 1e-3 --batch-size 16"
    return job(args, name, "eval/accuracy.csv", f"{command} --micro-batch-size 8 --run-eval")


def reward_models(args: Args, arms: list[str], draw: int) -> list[list[Job]]:
    """Return the steps that make the reward models of some arms: SFT, pairs, members, and their average."""
    pairs, members, average = [], [], []
    for name, prompts in {"labelled": args.scale.prompts, "labelled_few": args.scale.few}.items():
        if any(ARMS[arm].few == (name == "labelled_few") for arm in arms):
            pairs.append(labels(args, f"{name}/{draw}", GOLD, draw, prompts))
    for arm in arms:
        settings = ARMS[arm]
        source = f"labelled{'_few' if settings.few else ''}/{draw}/noise_{settings.noise}"
        for member in range(1, args.scale.members + 1):
            name, seed = f"reward/{arm}/{draw}/{member}", 5 * draw - 5 + member
            members.append(reward_model(args, name, settings.size, source, seed))
        if arm == "centre":
            command = f"ensembles/average.py --preference-dataset {args.runs}/{source}"
            command += f" --reward-model-paths {' '.join(members_of(args, arm, draw))}"
            average.append(job(args, f"reward/warm/{draw}", "args.json", command))
    return [sft(args, "s", "xs"), pairs, members, average]


def best_of_n_samples(args: Args, name: str, paths: list[str], gold: str, draw: int) -> Job:
    command = f"ensembles/best_of_n.py --policy {args.runs}/sft/s {gold} {POSTS} --seed {draw}"
    command += f" --reward-model-paths {' '.join(paths)} --prompts {args.scale.posts} --samples {args.scale.samples}"
    return job(args, name, "best_of_n.md", f"{command} --micro-batch-size 256 --standardise-posts 64")


def best_of_n(args: Args, draw: int) -> list[list[Job]]:
    """Return the steps of best of n: the policy's samples with the scores of all reward models, then each arm's
    tables."""
    paths = [path for arm in ARMS for path in members_of(args, arm, draw)] + [f"{args.runs}/reward/warm/{draw}"]
    samples = best_of_n_samples(args, f"samples/{draw}", paths, GOLD, draw)
    count = args.scale.members
    used = {arm: range(count * i + 1, count * i + count + 1) for i, arm in enumerate(ARMS)} | {"warm": [len(paths)]}
    used |= {name: range(1, min(own, count) + 1) for name, own in MEMBERS.items()}
    tables = []
    for arm, members in used.items():
        name = f"best_of_n/{arm}/{draw}"
        words = ["ensembles/best_of_n.py", "--estimate", "--members", *map(str, members)]
        words += ["--tables", f"{args.runs}/{name}", "--output-dir", f"{args.runs}/samples/{draw}"]
        log = ROOT / args.runs / "logs" / f"{name.replace('/', '_')}.log"
        tables.append(Job(name, [sys.executable, *words], log, ROOT / args.runs / name / "best_of_n.md"))
    return [*reward_models(args, list(ARMS), draw), [samples], tables]


def ppo_runs(args: Args, arm: str, kl_coef: str, methods: list[str], gold: str, draw: int) -> tuple[list, list]:
    """Return the PPO runs of an arm and a penalty, and the scoring of their samples by the gold."""
    runs, golds = [], []
    five = members_of(args, arm, draw)
    models = dict.fromkeys(METHODS, five) | {"single": five[:1], "warm": [f"{args.runs}/reward/warm/{draw}"]}
    for method in methods:
        command = f"ensembles/ppo.py --model nano-s --seed {draw} --sft-model-path {args.runs}/sft/s {POSTS} --resume"
        command += f" --reward-model-paths {' '.join(models[method])} {METHODS[method]} --kl-coef {kl_coef}"
        command += " --standardise-posts 128 --penalty-reward-value None --eval-every 3 --eval-rows 64"
        command += f" --sample-every 0 --total-episodes {args.scale.episodes} --batch-size 64 --micro-batch-size 16"
        command += " --num-ppo-epochs 2 --num-mini-batches 4 --learning-rate 1e-4"
        command += " --final-learning-rate 1e-4 --save-every 10"
        runs.append(job(args, f"ppo/{arm}/{method}_kl_{kl_coef}/{draw}", "model/config.json", command))
        words = [sys.executable, "eval/gold.py", f"{args.runs}/{runs[-1].name}", *gold.split()]
        golds.append(Job(f"gold of {runs[-1].name}", words, runs[-1].log, runs[-1].result.parents[1] / "gold.csv"))
    return runs, golds


def without_warm(args: Args) -> list[str]:
    return [method for method in args.methods if method != "warm"]


def ppo(args: Args, draw: int) -> list[list[Job]]:
    """Return the steps of PPO: the runs of each arm and penalty, then their gold."""
    runs, golds = [], []
    for arm, kl_coef in PPO:
        methods = args.methods if arm == "centre" else without_warm(args)
        both = ppo_runs(args, arm, kl_coef, methods, GOLD, draw)
        runs, golds = runs + both[0], golds + both[1]
    return [*reward_models(args, list(dict(PPO)), draw), runs, golds]


def gold_model(args: Args, draw: int) -> list[list[Job]]:
    """Return the steps of the arm whose gold is a reward model of size m, trained on pairs of its own with the true
    labels: that model, the draw's pairs and reward models, best of n and PPO, with the truth as second gold."""
    arm, kl_coef = GOLD_MODEL
    first = labels(args, "labelled_gold", GOLD, 0, args.scale.prompts)
    model = reward_model(args, "gold", "m", "labelled_gold/noise_0", 1)
    gold = f"--gold {args.runs}/gold"
    both = f"{gold} {GOLD.replace('--gold', '--second-gold')}"
    pairs = labels(args, f"labelled_model/{draw}", gold, draw, args.scale.prompts)
    members = []
    for i, path in enumerate(members_of(args, arm, draw), 1):
        name = path.removeprefix(f"{args.runs}/")
        members.append(reward_model(args, name, "xs", f"labelled_model/{draw}/noise_25", 5 * draw - 5 + i))
    samples = best_of_n_samples(args, f"best_of_n/{arm}/{draw}", members_of(args, arm, draw), both, draw)
    runs, golds = ppo_runs(args, arm, kl_coef, without_warm(args), both, draw)
    return [sft(args, "s", "xs", "m"), [first], [model], [pairs], members, [samples, *runs], golds]


# ---- rows ------------------------------------------------------------------------------------------------------------


def read_rows(file: Path) -> list[dict]:
    """Return the rows that are there."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def new_rows(args: Args, draw: int) -> Iterator[dict]:
    """Yield the rows of a draw's finished runs that the file lacks, with commit and date."""
    known = {(row["arm"], row["procedure"], row["method"], row["kl_coef"], row["seed"]) for row in read_rows(args.rows)}
    runs = ROOT / args.runs
    for folder in sorted([*(runs / "best_of_n").glob(f"*/{draw}"), *(runs / "ppo").glob(f"*/*/{draw}")]):
        procedure, arm = folder.relative_to(runs).parts[:2]
        settings = json.loads((folder / "args.json").read_text())
        read = figures.read_best_of_n if procedure == "best_of_n" else figures.read_ppo
        for row in read(folder, settings):
            row |= {"arm": "centre" if arm == "warm" else arm, "folder": str(folder.relative_to(ROOT))}
            row |= {"commit": commit_of(), "date": time.strftime("%Y-%m-%d")}
            if (row["arm"], row["procedure"], row["method"], row["kl_coef"], row["seed"]) not in known:
                yield row


def is_made(args: Args, part: str, draw: int) -> bool:
    """Return whether the rows of a part of a draw are there."""
    rows = [row for row in read_rows(args.rows) if row["seed"] == draw]
    best = {(row["arm"], row["method"]) for row in rows if row["procedure"] == "BoN"}
    runs = {(row["arm"], f"{row['kl_coef']:g}", row["method"]) for row in rows if row["procedure"] == "PPO"}
    if part == "best_of_n":
        return {(arm, "mean") for arm in (*ARMS, *MEMBERS)} | {("centre", "warm")} <= best
    if part == "gold_model":
        return (GOLD_MODEL[0], "mean") in best and {(*GOLD_MODEL, method) for method in without_warm(args)} <= runs
    return all((arm, kl, x) in runs for arm, kl in PPO for x in args.methods if x != "warm" or arm == "centre")


def main(args: Args):
    args.rows = args.rows.resolve()
    os.chdir(ROOT)  # commands, and so the paths in runs' settings, are relative to it
    if args.fast:
        args.draws, args.rows = [1], ROOT / args.runs / "study.jsonl"
        if not args.dry_run and all(is_made(args, part, 1) for part in args.parts):  # a finished trial is made again
            shutil.rmtree(ROOT / args.runs)
    posts = Job("posts", ["bash", "quickstart/run.sh", "--data-only"], ROOT / args.runs / "logs/posts.log", None)
    if not args.dry_run:
        run_jobs([posts], 1, ROOT)
    for part in args.parts:
        for draw in args.draws:
            if is_made(args, part, draw):
                continue
            for step in {"best_of_n": best_of_n, "ppo": ppo, "gold_model": gold_model}[part](args, draw):
                left = [job for job in step if not job.result.exists()]
                if args.dry_run:
                    print("".join(f"{' '.join(job.command)}\n" for job in left), end="")
                else:
                    run_jobs(left, args.jobs, ROOT)
            if not args.dry_run:
                args.rows.parent.mkdir(parents=True, exist_ok=True)
                rows = list(new_rows(args, draw))
                with args.rows.open("a") as file:
                    file.write("".join(json.dumps(row) + "\n" for row in rows))
                print(f"{part}, draw {draw}: {len(rows)} rows", flush=True)
    if not args.dry_run:
        words = ["ensembles/figures.py", "--runs", str(args.rows), "--output-dir", f"{args.runs}/figures"]
        subprocess.run([sys.executable, *words], cwd=ROOT, check=True)


if __name__ == "__main__":
    main(tyro.cli(Args))
