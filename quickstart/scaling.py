"""The paper's scaling experiment at laptop size: the whole pipeline for every size and seed, then a table.

    python quickstart/scaling.py                    # three sizes x four seeds -> quickstart/results/nano
    python quickstart/scaling.py --sizes s --seeds 1 --posts-seeds 2 3 --output-dir runs/scaling
    python quickstart/scaling.py --dry-run          # only print the commands that are left to run

One run is `bash quickstart/run.sh --continue --size SIZE --seed SEED --posts-seed POSTS_SEED`. It is finished when its
report has a table.csv. A finished run is not started again, so the same command continues after an interruption. The
data of all posts seeds are made first, then the runs of each posts seed, largest size first, so that no long run is
left to the end. A failing run stops no other. The table is written once all runs are finished.

OUTPUT_DIR/  runs.csv      posts_seed, size, seed, row, metric, value: the reports of all runs
             table.md      mean ± sample standard deviation over seeds, gains from size to size, and each run
             times.csv     seconds of each stage, summed over the runs of a size

eval/figures.sh draws the paper's figures of these runs, with the command that is printed last.
"""

import os
import platform
import shlex
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import mean, stdev
from typing import Literal

import pandas
import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "eval"))
from eval_helpers import fail, markdown, or_fail  # noqa: E402
from study_runs import Job, run_jobs  # noqa: E402

RUNS = "runs/quickstart"  # where run.sh writes
SIZES = ("xs", "s", "m")  # small to large

# the quantities of the table: "row metric" of a run's report
MEASURES = ("rougeL", "truth", "win_rate", "words")
POLICIES = [f"{row} {measure}" for measure in (*MEASURES, "tokens") for row in ("SFT", "PPO", "DPO")]
REWARDS = ["reward accuracy_clean", "reward accuracy_noisy", "reward accuracy_clean_cnndm"]
YARDSTICKS = [f"{row} {measure}" for row in ("near_perfect", "copied_title") for measure in MEASURES]
FACT_SHARES = [
    f"{row} {kind}_{x}" for kind in ("age", "feeling", "question") for x in ("right", "wrong") for row in ("PPO", "DPO")
]
QUANTITIES = [*POLICIES, *FACT_SHARES, "PPO eos_rate", "PPO share_of_near_perfect", *REWARDS, *YARDSTICKS]
EACH_RUN = ["SFT rougeL", *POLICIES[3:9], "PPO tokens", "PPO eos_rate", "PPO share_of_near_perfect", *REWARDS]
RISING = ["SFT rougeL", "reward accuracy_clean", "reward accuracy_noisy", "PPO win_rate"]  # with size in the paper


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
    output_dir: str = "quickstart/results/nano"
    """folder for the table, below the repository; files from before are replaced"""
    dry_run: bool = False
    """print the commands that would run, and nothing else"""


def shown(name: str, values: pandas.Series) -> str:
    """Return mean ± sample standard deviation of a quantity, without deviation for a single value."""
    digits = 1 if name.split()[1] in ("tokens", "words") else 3
    numbers = [mean(values)] if len(values) == 1 else [mean(values), stdev(values)]
    return " ± ".join(f"{x:.{digits}f}" for x in numbers)


def read_reports(reports: dict, name: str) -> pandas.DataFrame:
    """Return a file of all reports (text), with the columns posts_seed, size and seed before its own."""
    tables = []
    for (posts, size, seed), folder in reports.items():
        with or_fail(f"{folder / name} cannot be read; remove {folder} and start again"):
            table = pandas.read_csv(folder / name, dtype=str, keep_default_na=False)
        for column, value in (("seed", seed), ("size", size), ("posts_seed", posts)):
            table.insert(0, column, value)
        tables.append(table)
    return pandas.concat(tables)


def main(args: Args):
    # ---- arguments --------------------------------------------------------------------------------------------------
    for flag in ("sizes", "seeds", "posts_seeds"):
        values = getattr(args, flag)
        if not values or len(set(values)) < len(values):
            fail(f"--{flag.replace('_', '-')} is {values}; it must name one or more, each once")
    if args.jobs < 1:
        fail(f"--jobs is {args.jobs}; it must be 1 or more")
    runs_folder, output_dir = ROOT / RUNS, ROOT / args.output_dir
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

    # ---- tables -----------------------------------------------------------------------------------------------------
    runs, times = read_reports(reports, "table.csv"), read_reports(reports, "times.csv")
    long = runs.assign(quantity=runs["row"] + " " + runs["metric"], value=pandas.to_numeric(runs["value"]))
    wide = long.pivot(index=["posts_seed", "size", "seed"], columns="quantity", values="value")
    for key, folder in reports.items():
        if lacking := [name for name in QUANTITIES if name not in wide or pandas.isna(wide.loc[key, name])]:
            fail(f"{folder / 'table.csv'} does not have {lacking[0]}; remove {folder} and start again")
    text = f"`{shlex.join(['python', 'quickstart/scaling.py', *sys.argv[1:]])}`\n\n"
    text += f"{platform.machine()}, {os.cpu_count()} cores, {args.jobs} runs side by side; torch {version('torch')}.\n"
    text += "± is the sample standard deviation over seeds.\n"
    steps = list(zip(sizes, sizes[1:], strict=False))
    if len(sizes) == 3:
        steps.append((sizes[0], sizes[2]))
    for posts in args.posts_seeds:
        by_size = {size: wide.loc[posts, size] for size in sizes}
        means = {f"{size} (n = {len(args.seeds)})": by_size[size] for size in sizes}
        gains = {f"{b} − {a}": by_size[b] - by_size[a] for a, b in steps}  # seed by seed
        text += f"\n## Posts seed {posts}\n"
        for first, names, tables in (("", QUANTITIES, means), ("gain, seed by seed", RISING, gains)):
            if tables:
                rows = [{first: name} | {x: shown(name, table[name]) for x, table in tables.items()} for name in names]
                text += f"\n{markdown(rows)}"
        rows = []
        for size in sizes:
            for seed in args.seeds:
                values = {name: shown(name, by_size[size].loc[[seed], name]) for name in EACH_RUN}
                rows.append({"size": size, "seed": seed} | values)
        text += f"\n{markdown(rows)}"
    print(text)
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / "table.md").write_text(text, encoding="utf-8")
    runs.to_csv(output_dir / "runs.csv", index=False)
    rows = []
    for (posts, size), group in times.groupby(["posts_seed", "size"], sort=False):
        seconds = group["seconds"].astype(float).groupby(group["stage"], sort=False).sum()
        seconds["all stages"] = seconds.sum()
        rows += [[posts, size, stage, len(args.seeds), f"{value:.1f}"] for stage, value in seconds.items()]
    times = pandas.DataFrame(rows, columns=["posts_seed", "size", "stage", "runs", "seconds"])
    times.to_csv(output_dir / "times.csv", index=False)
    posts, models = f"posts-{args.posts_seeds[0]}", [f"nano-{size}" for size in sizes]
    settings = {"MODELS": " ".join(models), "SEEDS": " ".join(map(str, args.seeds)), "RUNS": f"{RUNS}/{posts}"}
    settings |= {"DATA": f"data/quickstart/{posts}/tldr", "BASE": f"quickstart/bases/{models[-1]}"}
    settings |= {"JUDGE": "quickstart/truth.py:score", "OUTPUT": str(args.output_dir)}
    print("figures:", *(f"{name}={shlex.quote(value)}" for name, value in settings.items()), "bash eval/figures.sh")


if __name__ == "__main__":
    main(tyro.cli(Args))
