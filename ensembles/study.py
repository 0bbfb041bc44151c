"""Reward-model ensembles against overoptimisation, at laptop size: the study of README.md, draw by draw.

    python ensembles/study.py --show                           # tables and figures of the rows that are there
    python ensembles/study.py                                  # makes what is missing, unit by unit: hours
    python ensembles/study.py --units bon_centre ppo_kl_0.1 --draws 1 2
    python ensembles/study.py --fast                           # everything once, with little of each
    python ensembles/study.py --dry-run                        # prints the commands that are left to run

UNITS says what is made of a draw, which has pairs, reward models and a seed of its own; all draws share the SFT policy.
The gold reward is the truth. In the arm gold_model it is a larger reward model, as in the paper, and the truth is the
second gold.

A draw of a unit whose rows are in results/study.jsonl is not made again. Runs and logs are in runs/ensembles_study. All
rows and runs are of one commit, of one number of threads, which --jobs sets, and of the same libraries. Later commits
that only change results or pages count as the same; for work on the code beside a study, run it in a clone:

    git clone . ../study && cd ../study && python ensembles/study.py --rows ../REPOSITORY/ensembles/results/study.jsonl
"""

import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pandas
import tyro
from datasets import load_from_disk

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / folder) for folder in ("eval", "quickstart")]

from eval_helpers import Job, cores, fail, read_metrics, run_jobs, wins  # noqa: E402
from score import machine, one_commit  # noqa: E402

spec = importlib.util.spec_from_file_location("ensembles_figures", ROOT / "ensembles/figures.py")  # eval/ has one, too
figures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(figures)

POSTS = "--dataset data/quickstart/posts-1/tldr/sft"
TRUTH = "quickstart/truth.py:score"


# ==== the study ===================================================================================


@dataclass(frozen=True)
class Models:
    """The five reward models of a draw: their size, the percentage of flipped labels, whether they learn from the pairs
    of a quarter of the prompts alone (about 640), and whether a reward model is the gold reward."""

    size: str = "xs"
    noise: int = 25
    is_few: bool = False
    has_gold_model: bool = False


@dataclass(frozen=True)
class BestOfN:
    """Best of n with the reward models of an arm, and {arm: (number of members, lambda of UWO)} of the tables that are
    made of the same samples."""

    models: str
    tables: dict[str, tuple[int, float]] = field(default_factory=dict)
    draws: range = range(1, 11)


@dataclass(frozen=True)
class Ppo:
    """PPO with the reward models of an arm (single_2 is the second alone). arm: the name in the rows; default: that of
    the reward models. length: times the usual number of episodes."""

    models: str
    kl_coef: str
    methods: str = "single mean wco uwo"
    draws: range = range(1, 6)
    uwo_lambda: float = 0.1
    length: int = 1
    arm: str = ""


MODELS = {  # one factor at a time around the centre
    "centre": Models(),
    "noise_0": Models(noise=0),
    "noise_35": Models(noise=35),
    "size_s": Models(size="s"),
    "pairs_640": Models(is_few=True),
    "gold_model": Models(has_gold_model=True),
}
OF_CENTRE = {"members_3": (3, 0.5), "members_4": (4, 0.5), "lambda_0.1": (5, 0.1), "lambda_2": (5, 2.0)}
OF_NOISE_0 = {"noise_0_members_3": (3, 0.5), "noise_0_members_4": (4, 0.5)}
FIVE = "single mean wco uwo warm"  # warm: the average of the five reward models' weights
UNITS = {  # in the order in which they are made
    "bon_centre": BestOfN("centre", OF_CENTRE),
    "ppo_kl_0.1": Ppo("centre", "0.1", FIVE, range(1, 11)),
    "ppo_uwo": Ppo("centre", "0.1", "single uwo", range(11, 18)),  # more draws, as its differences vary most
    "bon_noise_0": BestOfN("noise_0", OF_NOISE_0),
    "bon_gold_model": BestOfN("gold_model"),
    "ppo_gold_model": Ppo("gold_model", "0", draws=range(1, 4)),
    "bon_noise_35": BestOfN("noise_35"),
    "bon_pairs_640": BestOfN("pairs_640"),
    "bon_size_s": BestOfN("size_s"),
    "ppo_noise_0": Ppo("noise_0", "0.1"),
    "ppo_kl_0.02": Ppo("centre", "0.02", FIVE),
    "ppo_kl_0": Ppo("centre", "0", draws=range(1, 4)),
    "ppo_lambda_0.5": Ppo("centre", "0.1", "uwo", range(1, 4), uwo_lambda=0.5, arm="lambda_0.5"),
    "ppo_members": Ppo("centre", "0.1", "single single_2 single_3 single_4 single_5", range(1, 2), arm="members"),
    "ppo_long": Ppo("centre", "0.02", "single uwo", range(1, 2), length=3, arm="long"),
}


@dataclass(frozen=True)
class Scale:
    """How much of everything: reward models of an arm, prompts with pairs, and epochs of the reward models; epochs of
    SFT, and of the gold model's SFT; validation posts; samples of best of n; episodes of PPO."""

    members: int = 5
    prompts: int = 4000
    epochs: int = 3
    sft_epochs: float = 1
    gold_sft_epochs: float = 3
    posts: int = 64
    samples: int = 512
    episodes: int = 1152


FAST = Scale(2, prompts=160, epochs=1, sft_epochs=0.25, gold_sft_epochs=0.25, posts=8, samples=64, episodes=64)


@dataclass
class Args:
    units: list[str] = field(default_factory=lambda: list(UNITS))
    """what to make"""
    draws: list[int] = field(default_factory=list)
    """draws to make; default: those of the unit"""
    jobs: int = 2
    """runs side by side, each with its share of the cores"""
    fast: bool = False
    """one draw with little of everything, anew, in runs/ensembles_study_fast; its numbers mean nothing"""
    dry_run: bool = False
    """only print the commands that are left"""
    show: bool = False
    """only print the tables and draw the figures, into the folder of the rows"""
    rows: Path = ROOT / "ensembles/results/study.jsonl"
    """the rows that are there"""

    @property
    def runs(self) -> str:
        return "runs/ensembles_study_fast" if self.fast else "runs/ensembles_study"

    @property
    def scale(self) -> Scale:
        return FAST if self.fast else Scale()


# ==== commands ====================================================================================


def job(args: Args, name: str, result: str, command: str) -> Job:
    """Return a job whose output folder is RUNS/name, and which leaves RUNS/name/result behind."""
    words = [sys.executable, *command.split(), "--output-dir", f"{args.runs}/{name}"]
    log = ROOT / args.runs / "logs" / f"{name.replace('/', '_')}.log"
    return Job(name, words, log, ROOT / args.runs / name / result)


def sft(args: Args, size: str) -> Job:
    command = f"sft.py --model quickstart/bases/nano-{size} --seed 1 {POSTS} --learning-rate 1e-3 --batch-size 32"
    epochs = args.scale.gold_sft_epochs if size == "m" else args.scale.sft_epochs
    command += f" --micro-batch-size 8 --resume --num-train-epochs {epochs}"
    return job(args, f"sft/{size}", "model/config.json", command)


def labels(args: Args, name: str, gold: str, seed: int, prompts: int) -> Job:
    """Return the pairs by the SFT policy of size s, labelled by a gold reward with each noise."""
    command = f"ensembles/gold_label.py --policy {args.runs}/sft/s --gold {gold} {POSTS} --seed {seed}"
    command += f" --prompts {prompts} --label-noise 0 0.25 0.35"
    return job(args, name, "noise_25/dataset_dict.json", command)


def reward_model(args: Args, name: str, size: str, pairs: str, seed: int) -> Job:
    command = f"reward.py --model quickstart/bases/nano-{size} --seed {seed} {POSTS}"
    command += f" --preference-dataset {args.runs}/{pairs} --sft-model-path {args.runs}/sft/{size} --resume"
    command += f" --num-train-epochs {args.scale.epochs} --learning-rate 1e-3 --batch-size 16 --micro-batch-size 8"
    command += " --eval-every 60" if pairs.endswith("/noise_0") else ""  # for figure 15
    return job(args, name, "model/config.json", command)


def members_of(args: Args, arm: str, draw: int) -> list[str]:
    """Return the run folders of an arm's reward models."""
    return [f"{args.runs}/reward/{arm}/{draw}/{member}" for member in range(1, args.scale.members + 1)]


def pairs_of(arm: str, draw: int) -> str:
    """Return the folder of an arm's pairs with each noise, in RUNS."""
    models = MODELS[arm]
    return f"labelled{'_few' * models.is_few}{'_by_model' * models.has_gold_model}/{draw}"


def golds_of(args: Args, arm: str) -> str:
    """Return the flags of the gold rewards that judge the policies of an arm."""
    return f"--gold {args.runs}/gold --second-gold {TRUTH}" if MODELS[arm].has_gold_model else f"--gold {TRUTH}"


def reward_models(args: Args, arm: str, draw: int) -> list[list[Job]]:
    """Return the steps that make the reward models of an arm: SFT, the gold model's pairs and the gold model (or
    nothing), pairs, members, their average (or nothing)."""
    models, gold, gold_model = MODELS[arm], TRUTH, [[], []]
    sizes = dict.fromkeys(("s", models.size))
    if models.has_gold_model:  # trained on pairs of its own, with the true labels
        sizes["m"], gold = None, f"{args.runs}/gold"
        gold_model = [
            [labels(args, "labelled_gold", TRUTH, 0, args.scale.prompts)],
            [reward_model(args, "gold", "m", "labelled_gold/noise_0", 1)],
        ]
    pairs, folders = pairs_of(arm, draw), members_of(args, arm, draw)
    prompts = args.scale.prompts // (4 if models.is_few else 1)
    members = [
        reward_model(args, f"reward/{arm}/{draw}/{i}", models.size, f"{pairs}/noise_{models.noise}", 5 * draw - 5 + i)
        for i in range(1, len(folders) + 1)
    ]
    command = f"ensembles/average.py --preference-dataset {args.runs}/{pairs}/noise_{models.noise}"
    average = job(args, f"reward/warm/{draw}", "args.json", f"{command} --reward-model-paths {' '.join(folders)}")
    steps = [[sft(args, size) for size in sizes], *gold_model, [labels(args, pairs, gold, draw, prompts)], members]
    return [*steps, [average] * (arm == "centre")]


def tables_of(args: Args, unit: BestOfN) -> dict[str, tuple[list[int], float]]:
    """Return {arm: (reward models of the samples, counted from 1, and UWO's lambda)} of the tables of a unit."""
    count = args.scale.members
    tables = {unit.models: (count, 0.5)} | unit.tables
    chosen = {arm: ([*range(1, min(own, count) + 1)], weight) for arm, (own, weight) in tables.items()}
    return chosen | ({"warm": ([count + 1], 0.5)} if unit.models == "centre" else {})


def best_of_n(args: Args, unit: BestOfN, draw: int) -> list[list[Job]]:
    """Return the steps of best of n: the samples with the scores of all reward models, then tables of some of them."""
    paths, name = members_of(args, unit.models, draw), f"samples/{unit.models}/{draw}"
    paths += [f"{args.runs}/reward/warm/{draw}"] if unit.models == "centre" else []
    command = f"ensembles/best_of_n.py --policy {args.runs}/sft/s {golds_of(args, unit.models)} {POSTS} --seed {draw}"
    command += f" --reward-model-paths {' '.join(paths)} --prompts {args.scale.posts} --samples {args.scale.samples}"
    command += f" --standardise-posts {args.scale.posts} --micro-batch-size 256"
    samples = job(args, name, "best_of_n.md", command)
    tables = []
    for arm, (members, weight) in tables_of(args, unit).items():
        words = ["ensembles/best_of_n.py", "--estimate", "--members", *map(str, members), "--uwo-lambda", str(weight)]
        words += ["--tables", f"{args.runs}/best_of_n/{arm}/{draw}", "--output-dir", f"{args.runs}/{name}"]
        result = ROOT / args.runs / f"best_of_n/{arm}/{draw}/best_of_n.md"
        tables.append(Job(f"best_of_n/{arm}/{draw}", [sys.executable, *words], samples.log, result))
    return [[samples], tables]


def ppo_folder(args: Args, unit: Ppo, method: str, draw: int) -> str:
    return f"{args.runs}/ppo/{unit.arm or unit.models}/{method}_kl_{unit.kl_coef}/{draw}"


def methods_of(args: Args, unit: Ppo) -> list[str]:
    """Return the methods of a unit whose reward model there is: --fast trains less than five."""
    return [x for x in unit.methods.split() if int(x.partition("_")[2] or 1) <= args.scale.members]


def ppo(args: Args, unit: Ppo, draw: int) -> list[list[Job]]:
    """Return the steps of PPO: the runs, then the scoring of all their samples by the gold."""
    runs, folders, five = [], [], members_of(args, unit.models, draw)
    for method in methods_of(args, unit):
        models, combination = five, f"--reward-combination {method}"
        if method == "warm":
            models, combination = [f"{args.runs}/reward/warm/{draw}"], ""
        elif method.startswith("single"):
            models, combination = [five[int(method.partition("_")[2] or 1) - 1]], ""
        elif method == "uwo":
            combination += f" --uwo-lambda {unit.uwo_lambda}"
        folders.append(ppo_folder(args, unit, method, draw))
        command = f"ensembles/ppo.py --model nano-s --seed {draw} --sft-model-path {args.runs}/sft/s {POSTS} --resume"
        command += f" --reward-model-paths {' '.join(models)} {combination} --kl-coef {unit.kl_coef}"
        command += f" --standardise-posts {2 * args.scale.posts} --eval-rows {args.scale.posts} --eval-every 3"
        command += f" --penalty-reward-value None --sample-every 0 --total-episodes {args.scale.episodes * unit.length}"
        command += " --batch-size 64 --micro-batch-size 16 --num-ppo-epochs 2 --num-mini-batches 4 --learning-rate 1e-4"
        command += " --final-learning-rate 1e-4 --save-every 10"
        runs.append(job(args, folders[-1].removeprefix(f"{args.runs}/"), "model/config.json", command))
    words = [sys.executable, "eval/gold.py", *folders, *golds_of(args, unit.models).split()]
    last = ROOT / max(folders) / "gold.csv"  # eval/gold.py writes them in the order of their names
    return [runs, [Job(f"gold of {unit.arm or unit.models}/{draw}", words, runs[0].log, last)]]


def steps_of(args: Args, unit: BestOfN | Ppo, draw: int) -> list[list[Job]]:
    """Return the eight steps of a unit in a draw: jobs that need those of the steps before."""
    own = best_of_n(args, unit, draw) if isinstance(unit, BestOfN) else ppo(args, unit, draw)
    return [*reward_models(args, unit.models, draw), *own]


# ==== rows ========================================================================================


def read_rows(file: Path) -> list[dict]:
    """Return the rows that are there."""
    return list(map(json.loads, file.read_text().splitlines())) if file.exists() else []


def is_made(args: Args, name: str, draw: int) -> bool:
    """Return whether the rows of a unit's draw, which come at once, are in the file."""
    return any((row["unit"], row["seed"]) == (name, draw) for row in read_rows(args.rows))


def member_facts(args: Args, arm: str, draw: int) -> dict:
    """Return {member_steps: updates with an evaluation, member_loss, member_accuracy: a list for each of an arm's
    reward models, of its validation pairs at these updates, pairs: the number of pairs that it was trained on}."""
    lines = [read_metrics(ROOT / path) for path in members_of(args, arm, draw)]
    lines = [[line for line in own if "eval/loss" in line] for own in lines]
    pairs = load_from_disk(str(ROOT / args.runs / pairs_of(arm, draw) / f"noise_{MODELS[arm].noise}"))["train"]
    columns = {f"member_{x}": [[line[f"eval/{x}"] for line in own] for own in lines] for x in ("loss", "accuracy")}
    return {"member_steps": [line["update"] for line in lines[0]], "pairs": len(pairs)} | columns


def best_of_n_rows(args: Args, unit: BestOfN, draw: int) -> Iterator[dict]:
    """Yield the rows of a unit's tables. That of single has the curves of each member. Another lambda changes UWO
    alone, and WARM has no other reward model of its samples to win against."""
    for arm in tables_of(args, unit):
        folder = ROOT / args.runs / f"best_of_n/{arm}/{draw}"
        golds = pandas.read_csv(folder / "best_of_n.csv").pivot(index="n", columns="method", values="gold").sort_index()
        for row in figures.read_best_of_n(folder, json.loads((folder / "args.json").read_text())):
            if arm.startswith("lambda") and row["method"] != "uwo":
                continue
            if arm == "warm":
                row["wins"] = row["wins_sd"] = []
            if row["method"] == "single" and arm == unit.models:
                row |= member_facts(args, arm, draw)
                row["member_gold"] = [golds[f"single_{i}"].tolist() for i in range(1, args.scale.members + 1)]
            yield row | {"arm": "centre" if arm == "warm" else arm}


def ppo_rows(args: Args, unit: Ppo, draw: int) -> Iterator[dict]:
    """Yield the rows of a unit's runs, with the gold of the last policy's sample on each validation post, one of these
    samples, and wins, how often this gold is above that of PPO against the first reward model alone."""
    base = None
    for method in methods_of(args, unit):
        folder = ROOT / ppo_folder(args, unit, method, draw)
        [row] = figures.read_ppo(folder, json.loads((folder / "args.json").read_text()))
        samples = pandas.read_csv(folder / "gold_samples.csv")
        last = samples[samples["update"] == samples["update"].max()].sort_values("id")
        row |= {"post_gold": last["gold"].tolist(), "sample": last[["query", "response"]].iloc[0].to_dict()}
        base = last["gold"].to_numpy() if method == "single" else base
        row["wins"] = [] if base is None else [wins(last["gold"].to_numpy(), base).mean()]
        yield row | {"arm": unit.arm or unit.models, "method": method}


def settings_of(args: Args) -> dict:
    """Return what rounding depends on: the threads of a run, the processor and the versions of libraries."""
    return machine() | {"threads": max(1, cores() // args.jobs)}


def add_rows(args: Args, name: str, draw: int, commit: str):
    """Add the rows of a unit's draw to the file, with commit, settings_of and date, and five digits of each number."""
    unit, lines = UNITS[name], []
    rows = best_of_n_rows(args, unit, draw) if isinstance(unit, BestOfN) else ppo_rows(args, unit, draw)
    for row in rows:
        row |= {"unit": name, "folder": os.path.relpath(row["folder"], ROOT)}
        row |= {"commit": commit, "date": time.strftime("%Y-%m-%d")} | settings_of(args)
        short = json.loads(json.dumps(row), parse_float=lambda digits: float(f"{float(digits):.5g}"))
        lines.append(json.dumps(short) + "\n")
    args.rows.parent.mkdir(parents=True, exist_ok=True)
    with args.rows.open("a") as file:
        file.write("".join(lines))


def begin(args: Args) -> str:
    """Make the posts, and return the commit of the study. Ends with an error if the rows or runs that are there are of
    another, or the rows of other settings."""
    commit = one_commit(ROOT / args.runs, (row["commit"] for row in read_rows(args.rows)))
    for row in read_rows(args.rows):
        if changed := {x: y for x, y in settings_of(args).items() if x != "cpu" and row[x] != y}:
            fail(f"{changed} differ from those of {args.rows}: set --jobs, or install what was there")
    posts = Job("posts", ["bash", "quickstart/run.sh", "--data-only"], ROOT / args.runs / "logs/posts.log", None)
    run_jobs([posts], 1, ROOT)
    return commit


def batches_of(args: Args) -> list[list[tuple[str, int]]]:
    """Return the pairs of unit and draw that are left, in batches whose runs are made side by side, so that no core
    waits: as many draws of a unit as there are jobs, or with --fast the first draw of all units."""
    if args.fast:
        return [[(name, UNITS[name].draws[0]) for name in args.units]]
    batches = []
    for name in args.units:
        left = [(name, draw) for draw in args.draws or UNITS[name].draws if not is_made(args, name, draw)]
        batches += [left[start : start + args.jobs] for start in range(0, len(left), args.jobs)]
    return batches


def main(args: Args):
    if unknown := set(args.units) - set(UNITS):
        fail(f"--units {unknown.pop()} is none of {', '.join(UNITS)}")
    args.rows = ROOT / args.runs / "study.jsonl" if args.fast else args.rows.resolve()
    os.chdir(ROOT)  # commands, and so the paths in runs' settings, are relative to it
    is_trained, printed = not (args.dry_run or args.show), set()
    if args.fast and is_trained:
        shutil.rmtree(args.runs, ignore_errors=True)
    commit = begin(args) if is_trained else ""
    for batch in [] if args.show else batches_of(args):
        for steps in zip(*(steps_of(args, UNITS[name], draw) for name, draw in batch), strict=True):
            jobs = {job.result: job for step in steps for job in step if not job.result.exists()}
            if is_trained:
                run_jobs(jobs.values(), args.jobs, ROOT)
            else:
                print("".join(f"{' '.join(jobs[x].command)}\n" for x in jobs if x not in printed), end="")
                printed |= jobs.keys()
        for name, draw in batch if is_trained else []:
            one_commit(ROOT / args.runs, [commit])  # still
            add_rows(args, name, draw, commit)
            print(f"{name}, draw {draw}: its rows are in {args.rows}", flush=True)
    if not args.dry_run:
        drawn = (*MODELS, *(unit.arm for unit in UNITS.values() if isinstance(unit, Ppo) and unit.arm))
        figures.main(figures.Args((str(args.rows),), str(args.rows.parent), drawn))


if __name__ == "__main__":
    main(tyro.cli(Args))
