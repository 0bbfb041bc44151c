"""A queue of commands for studies: each command has a file that it must leave behind.

A job whose file exists is finished and is not started again, so that the same command continues after a stop. Jobs run
side by side, each with its share of the cores and a log of its own. A job that fails does not stop the others. A study
is a script that lists its jobs, runs what is left and makes its tables (ensembles/study.py, quickstart/scaling.py):

    sys.path.append(str(ROOT / "eval"))
    import study_runs
"""

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from eval_helpers import fail
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TAIL = 8  # lines of a failed job's log that are told


class Job(NamedTuple):
    """A command, the log that it appends to, the file that it has to leave behind (none where it makes data) and the
    seconds of one core that it takes."""

    name: str
    command: list[str]
    log: Path
    result: Path | None
    seconds: float = 0.0


class Running(NamedTuple):
    """A job that runs, its process and when it began (time.monotonic)."""

    job: Job
    process: subprocess.Popen
    begin: float


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def threads(side_by_side: int) -> int:
    """Threads of a job's share of the cores."""
    return max(1, cores() // side_by_side)


# ---- what is left ---------------------------------------------------------------------------------------------------


def left_of(jobs: list[Job]) -> list[Job]:
    """The jobs that are not finished, in their order."""
    return [job for job in jobs if job.result is None or not job.result.exists()]


def minutes(jobs: list[Job], side_by_side: int) -> float:
    """What jobs take: each on one core, no more of them at once than there are cores."""
    seconds = sum(job.seconds for job in jobs)
    return seconds / 60 / min(side_by_side, cores())


def print_commands(jobs: Iterable[Job], side_by_side: int):
    """The jobs as lines of a shell."""
    for job in jobs:
        print(f"OMP_NUM_THREADS={threads(side_by_side)} {shlex.join(job.command)}")


# ---- running --------------------------------------------------------------------------------------------------------


def runs_bar(total: int, finished: int) -> Progress:
    """The bar of run_jobs, on standard error: how many of `total` runs are finished."""
    counts = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("runs")]
    progress = Progress(*counts, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True))
    progress.add_task("", total=total, completed=finished)
    return progress


def end_groups(processes: list[subprocess.Popen], patience: float = 10):
    """End the process groups of `processes`: SIGTERM, and SIGKILL for those that are left after `patience` seconds."""
    groups = {process.pid: process for process in processes}
    number = signal.SIGTERM
    begin = time.monotonic()
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


@contextmanager
def noted_signals():
    """Inside, a signal to end this process only puts its name into the list that is yielded. A signal that is ignored,
    as SIGHUP under nohup, stays so."""
    found = []
    handlers = {number: signal.getsignal(number) for number in STOPPING}
    handled = [number for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)]
    for number in handled:
        signal.signal(number, lambda number, _: found.append(signal.Signals(number).name))
    try:
        yield found
    finally:
        for number in handled:
            signal.signal(number, handlers[number])


def start(job: Job, root: Path, side_by_side: int) -> Running:
    """Start a job in the folder `root`, in a process group of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads(side_by_side))}
    environment.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")  # as quickstart/setup.sh
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("a") as log:
        print(f"\n# {time.strftime('%F %T')}  {shlex.join(job.command)}", file=log, flush=True)
        process = subprocess.Popen(
            job.command,
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Running(job, process, time.monotonic())


def problem_of(job: Job, code: int) -> str | None:
    """What went wrong with a job that ended with this exit code, and the end of its log; None where nothing did."""
    if code:
        problem = f"exit code {code}"
    elif job.result and not job.result.exists():
        problem = f"no {job.result} at its end"
    else:
        return None
    lines = job.log.read_text(errors="replace").splitlines()
    tail = "".join(f"\n    {line}" for line in lines[-TAIL:])
    return f"{job.name}: {problem}; {job.log} ends with{tail}"


def run_jobs(jobs: Iterable[Job], side_by_side: int, root: Path, progress: Progress) -> dict[str, str]:
    """Run every job in the folder `root`; a job that fails stops no other. {name: what went wrong} of the failures.
    A signal to end this process ends the jobs first."""
    waiting = list(jobs)
    running = {}  # by name
    failures = {}
    bar = progress.task_ids[0]
    with noted_signals() as signals:
        try:
            while (waiting or running) and not signals:
                while waiting and len(running) < side_by_side:
                    job = waiting.pop(0)
                    running[job.name] = start(job, root, side_by_side)
                    progress.update(bar, description=" and ".join(running))
                time.sleep(0.1)
                for job, process, begin in list(running.values()):
                    code = process.poll()
                    if code is None:
                        continue
                    del running[job.name]
                    problem = problem_of(job, code)
                    state = "finished"
                    if problem:
                        state = "failed"
                        failures[job.name] = problem
                    elif job.result:
                        progress.advance(bar)
                    progress.update(bar, description=" and ".join(running))
                    seconds = time.monotonic() - begin
                    progress.console.print(f"{job.name}: {state} after {seconds:.0f} s", highlight=False)
        finally:
            end_groups([each.process for each in running.values()])
    if signals:
        fail(f"stopped by {signals[0]}, and with it {' and '.join(running) or 'no run'}; the same command continues")
    return failures


def fail_of(failures: dict[str, str], before: str = "", after: str = ""):
    """End the process where jobs have failed: their names, then what went wrong with each."""
    if failures:
        names = f"{before}{', '.join(failures)} failed{after}; the same command keeps what is finished and tries again"
        fail("\n".join([names, *failures.values()]))
