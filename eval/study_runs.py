"""Runs the commands of a study side by side, for ensembles/study.py and quickstart/scaling.py."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import Progress


class Job(NamedTuple):
    """A command, the log that it appends to, and the file that it leaves behind (None for data)."""

    name: str
    command: list[str]
    log: Path
    result: Path | None


def run_jobs(jobs: Iterable[Job], side_by_side: int, root: Path) -> dict[str, Path]:
    """Run jobs in the folder `root`, each with its share of the cores. Returns {name: log} of those that failed, which
    stop no other. Ctrl-C and SIGTERM end the running jobs, too."""
    waiting, running, failed = list(jobs), [], {}
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, os.cpu_count() // side_by_side))}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("error: stopped by SIGTERM; the same command continues"))
    try:
        with Progress(console=Console(stderr=True)) as progress:
            bar = progress.add_task("", total=len(waiting))
            while waiting or running:
                while waiting and len(running) < side_by_side:
                    job = waiting.pop(0)
                    job.log.parent.mkdir(parents=True, exist_ok=True)
                    options = {"stdout": job.log.open("a"), "stderr": subprocess.STDOUT, "start_new_session": True}
                    running.append((job, subprocess.Popen(job.command, cwd=root, env=environment, **options)))
                time.sleep(0.1)
                ended = [pair for pair in running if pair[1].poll() is not None]
                running = [pair for pair in running if pair not in ended]
                failed |= {job.name: job.log for job, process in ended if process.returncode}
                progress.update(bar, advance=len(ended), description=" and ".join(job.name for job, _ in running))
    finally:
        for _, process in running:
            os.killpg(process.pid, signal.SIGTERM)
    return failed
