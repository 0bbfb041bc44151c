"""The paper's scaling experiment at laptop size: the whole pipeline for every size and seed, then a table.

    python quickstart/scaling.py                    # three sizes x four seeds -> quickstart/results/nano
    python quickstart/scaling.py --sizes s --seeds 1 --posts-seeds 2 3 --output-dir quickstart/results/nano_posts
    python quickstart/scaling.py --dry-run          # only print the commands that are left to run

One run is `bash quickstart/run.sh --continue --size SIZE --seed SEED --posts-seed POSTS_SEED`. It is finished when its
report has a table.csv; a finished run is not started again, so that the same command continues after an interruption.
Order: the data of each posts seed, one at a time; then posts seed by posts seed, the largest size first (no long run is
left to the end, alone on the machine), its seeds as given. A failing run stops no other. The table is written once all
runs are finished; one of other runs in the same folder is replaced.

OUTPUT_DIR/  runs.csv      posts_seed, size, seed, row, metric, value: the reports of all runs below one another
             table.md      mean ± sample standard deviation over seeds, gains from size to size, each run and its checks
             times.csv     seconds of each stage, summed over the runs of a size

The paper's figures of these runs are made by eval/figures.py, with the command that is printed last.
"""

import csv
import os
import platform
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import mean, stdev
from typing import Literal

import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "eval"))
from eval_helpers import fail  # noqa: E402
from study_runs import Job, run_jobs  # noqa: E402

SIZES = ("xs", "s", "m")  # small to large

# the quantities of the table: "row metric" of a run's report
MEASURES = ("rougeL", "truth", "win_rate", "words")
POLICIES = [f"{row} {measure}" for measure in (*MEASURES, "tokens") for row in ("SFT", "PPO", "DPO")]
REWARDS = ["reward accuracy_clean", "reward accuracy_noisy", "reward accuracy_clean_cnndm"]
YARDSTICKS = [f"{row} {measure}" for row in ("near_perfect", "copied_title") for measure in MEASURES]
TOLD = [
    f"{row} {kind}_{x}" for kind in ("age", "feeling", "question") for x in ("right", "wrong") for row in ("PPO", "DPO")
]
QUANTITIES = [*POLICIES, *TOLD, "PPO eos_rate", "PPO share_of_near_perfect", *REWARDS, *YARDSTICKS]
EACH_RUN = ["SFT rougeL", *POLICIES[3:9], "PPO tokens", "PPO eos_rate", "PPO share_of_near_perfect", *REWARDS]
RISING = ["SFT rougeL", "reward accuracy_clean", "reward accuracy_noisy", "PPO win_rate"]  # with size in the paper

CHECKS = {  # what each run should show, as a function of its quantities
    "PPO win rate ≥ 0.65": lambda run: run["PPO win_rate"] >= 0.65,
    "≥ 10 points above SFT's": lambda run: run["PPO win_rate"] - run["SFT win_rate"] >= 0.1 - 1e-9,
    "PPO − SFT truth: interval > 0": lambda run: run["PPO-SFT truth_difference_low"] > 0,
    "PPO share of near-perfect ≥ 0.8": lambda run: run["PPO share_of_near_perfect"] >= 0.8,
    "RM clean accuracy ≥ 0.85": lambda run: run["reward accuracy_clean"] >= 0.85,
    "PPO EOS rate ≥ 0.95": lambda run: run["PPO eos_rate"] >= 0.95,
    "DPO truth > SFT's": lambda run: run["DPO truth"] > run["SFT truth"],
}


@dataclass
class Args:
    sizes: tuple[Literal["xs", "s", "m"], ...] = SIZES
    """sizes of the models"""
    seeds: tuple[int, ...] = (44413, 55513, 66613, 77713)
    """seeds of the stages; the default is the paper's four"""
    posts_seeds: tuple[int, ...] = (1,)
    """seeds of the generated posts and comparisons; each has its own section of the table"""
    jobs: int = 2
    """runs side by side, each with OMP_NUM_THREADS = cores / jobs"""
    runs: str = "runs/quickstart"
    """folder of the runs, below the repository; run.sh writes to the default only: another holds finished runs"""
    output_dir: str = "quickstart/results/nano"
    """folder for the table, below the repository; files from before are replaced"""
    dry_run: bool = False
    """print the commands that would run, and nothing else"""


# ---- helpers: numbers -----------------------------------------------------------------------------------------------


def read_report(path: Path) -> list[list[str]]:
    """The rows of a CSV file of a report, without the header."""
    if not path.exists():
        fail(f"{path} is missing; remove {path.parent} and start again, which writes this report anew")
    with path.open(newline="") as file:
        return list(csv.reader(file))[1:]


def write_csv(path: Path, header: list[str], rows: list[list]):
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows])


def mean_and_sd(values: Iterable[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (n - 1); 0 for a single value."""
    values = list(values)
    return mean(values), stdev(values) if len(values) > 1 else 0.0


def shown_values(name: str, values: list[float]) -> str:
    """mean ± sample standard deviation of a quantity; the bare value where there is one."""
    digits = 1 if name.split()[1] in ("tokens", "words") else 3
    return " ± ".join(f"{x:.{digits}f}" for x in mean_and_sd(values)[: len(values)])


def markdown_lines(header: list[str], rows: list[list]) -> list[str]:
    """A table in Markdown, an empty line before it."""
    return ["", *(f"| {' | '.join(map(str, row))} |" for row in (header, ["---"] * len(header), *rows))]


def main(args: Args):
    # ---- arguments --------------------------------------------------------------------------------------------------
    for flag in ("sizes", "seeds", "posts_seeds"):
        values = getattr(args, flag)
        if not values or len(set(values)) < len(values):
            fail(f"--{flag.replace('_', '-')} is {values}; it must name one or more, each once")
    if args.jobs < 1:
        fail(f"--jobs is {args.jobs}; it must be 1 or more")
    runs_folder, output_dir = ROOT / args.runs, ROOT / args.output_dir
    sizes = [size for size in SIZES if size in args.sizes]

    # ---- what is left to run ----------------------------------------------------------------------------------------
    reports = {  # (posts seed, size, seed) -> folder
        (posts, size, seed): runs_folder / f"posts-{posts}" / "report" / f"nano-{size}" / str(seed)
        for posts in args.posts_seeds
        for size in sizes
        for seed in args.seeds
    }
    jobs = {}  # posts seed -> its runs, the largest size first
    data_jobs = {}  # posts seed -> what makes its data, where a run is left
    for posts in args.posts_seeds:
        logs = runs_folder / f"posts-{posts}" / "logs"
        of_posts = []
        for size in reversed(sizes):
            for seed in args.seeds:
                flags = ["--continue", "--size", size, "--seed", str(seed), "--posts-seed", str(posts)]
                command = ["bash", "quickstart/run.sh", *flags]
                result = reports[posts, size, seed] / "table.csv"
                log = logs / f"nano-{size}-{seed}.log"
                of_posts.append(Job(f"posts-{posts} nano-{size} {seed}", command, log, result))
        jobs[posts] = [job for job in of_posts if not job.result.exists()]
        if jobs[posts]:
            command = ["bash", "quickstart/run.sh", "--data-only", "--posts-seed", str(posts)]
            data_jobs[posts] = Job(f"posts-{posts} data", command, logs / "data.log", None)
    left = [job for of_posts in jobs.values() for job in of_posts]
    finished = len(reports) - len(left)
    if left and runs_folder != ROOT / Args.runs:
        fail(f"{left[0].result} is missing, and run.sh writes to {Args.runs} only; leave --runs out to run it")
    if args.dry_run:
        print(f"# {finished} of {len(reports)} runs are finished")
        print("\n".join(shlex.join(job.command) for job in [*data_jobs.values(), *left]))
        return

    # ---- run: data first, as the runs of a posts seed share them ----------------------------------------------------
    failures = run_jobs(data_jobs.values(), 1, ROOT)
    with_data = [posts for posts, job in data_jobs.items() if job.name not in failures]
    failures |= run_jobs([job for posts in with_data for job in jobs[posts]], args.jobs, ROOT)
    if failures:
        logs = ", ".join(map(str, failures.values()))
        fail(f"{', '.join(failures)} failed, so that no table is written; read {logs}, and repeat the command")

    # ---- collect ----------------------------------------------------------------------------------------------------
    found, long, seconds = {}, [], {}  # run -> {quantity: value}; rows of runs.csv; (posts seed, size, stage) -> sum
    for key, folder in reports.items():
        rows = read_report(folder / "table.csv")
        long += [[*key, *row] for row in rows]
        found[key] = {f"{row} {metric}": float(value or "nan") for row, metric, value in rows}
        if lacking := sorted({*QUANTITIES, "PPO-SFT truth_difference_low"} - set(found[key])):
            fail(f"{folder / 'table.csv'} does not have {lacking[0]}; remove {folder} and start again")
        times = [(stage, float(value)) for stage, value in read_report(folder / "times.csv")]
        for stage, value in [*times, ("all stages", sum(value for _, value in times))]:
            seconds[*key[:2], stage] = seconds.get((*key[:2], stage), 0) + value

    def over_seeds(name: str, posts: int) -> list[list[float]]:
        """Values of a quantity: for each size those of its seeds."""
        return [[found[posts, size, seed][name] for seed in args.seeds] for size in sizes]

    # ---- tables -----------------------------------------------------------------------------------------------------
    cpuinfo, cpu = Path("/proc/cpuinfo"), platform.processor() or platform.machine()
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else []:
        cpu = line.partition(":")[2].strip() if line.startswith("model name") else cpu
    lines = [f"`{shlex.join(['python', 'quickstart/scaling.py', *sys.argv[1:]])}`", ""]
    lines += [f"{cpu}, {os.cpu_count()} cores, {args.jobs} runs side by side; torch {version('torch')}."]
    lines += ["± is the sample standard deviation over seeds."]
    for posts in args.posts_seeds:
        lines += ["", f"## Posts seed {posts}"]
        rows = [[name, *(shown_values(name, values) for values in over_seeds(name, posts))] for name in QUANTITIES]
        lines += markdown_lines(["", *(f"{size} (n = {len(args.seeds)})" for size in sizes)], rows)
        steps = dict.fromkeys([*zip(sizes, sizes[1:], strict=False), (sizes[0], sizes[-1])] if len(sizes) > 1 else [])
        rows = []
        for name in RISING:
            of = dict(zip(sizes, over_seeds(name, posts), strict=True))
            gains = [[after - before for before, after in zip(of[a], of[b], strict=True)] for a, b in steps]
            rows.append([name, *(shown_values(name, values) for values in gains)])
        if steps:
            lines += markdown_lines(["gain, seed by seed", *(f"{b} − {a}" for a, b in steps)], rows)
        keys = [key for key in reports if key[0] == posts]
        rows = [[*key[1:], *(shown_values(name, [found[key][name]]) for name in EACH_RUN)] for key in keys]
        lines += markdown_lines(["size", "seed", *EACH_RUN], rows)
        checks = [[check(found[key]) for check in CHECKS.values()] for key in keys]
        rows = [[*key[1:], *("yes" if x else "no" for x in row)] for key, row in zip(keys, checks, strict=True)]
        rows.append(["yes", "", *(f"{sum(column)} of {len(keys)}" for column in zip(*checks, strict=True))])
        lines += markdown_lines(["size", "seed", *CHECKS], rows)
    print("\n".join(lines))
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    write_csv(output_dir / "runs.csv", ["posts_seed", "size", "seed", "row", "metric", "value"], long)
    rows = [[*key, len(args.seeds), f"{total:.1f}"] for key, total in seconds.items()]
    write_csv(output_dir / "times.csv", ["posts_seed", "size", "stage", "runs", "seconds"], rows)
    command = ["python", "eval/figures.py", "--models", *(f"nano-{size}" for size in sizes), "--seeds", *args.seeds]
    command += ["--runs", f"{args.runs}/posts-{args.posts_seeds[0]}", "--judge", "quickstart/truth.py:score"]
    print(f"\nfigures: {shlex.join(map(str, [*command, '--output-dir', args.output_dir]))}")


if __name__ == "__main__":
    main(tyro.cli(Args))
