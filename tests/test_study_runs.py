"""eval/study_runs.py: jobs side by side, failures, and what a signal ends."""

import itertools
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import study_runs
from conftest import REPOSITORY


def job(root: Path, name: str, script: str) -> study_runs.Job:
    return study_runs.Job(name, ["bash", "-ec", script], root / "logs" / f"{name}.log", None)


def test_jobs_run_side_by_side_each_with_its_share_of_the_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(study_runs.os, "cpu_count", lambda: 7)
    script = "echo begin $OMP_NUM_THREADS $PWD >>calls; sleep 0.5; echo end >>calls"
    assert study_runs.run_jobs([job(tmp_path, name, script) for name in "abcd"], 2, tmp_path) == {}
    calls = (tmp_path / "calls").read_text().splitlines()
    running = list(itertools.accumulate(-1 if line == "end" else 1 for line in calls))
    assert max(running) == 2 and running[-1] == 0 and len(calls) == 8
    assert {line for line in calls if line != "end"} == {f"begin 3 {tmp_path}"}


def test_a_failing_job_stops_no_other(tmp_path):
    jobs = [job(tmp_path, "a", "echo broken; exit 3"), job(tmp_path, "b", "touch b")]
    assert study_runs.run_jobs(jobs, 1, tmp_path) == {"a": jobs[0].log} and (tmp_path / "b").exists()
    assert jobs[0].log.read_text() == "broken\n"


STUDY = f"""
import sys
from pathlib import Path
sys.path.append("{REPOSITORY}/eval")
import study_runs
script = "sleep 300 & echo $! >>children; wait"
study_runs.run_jobs([study_runs.Job(x, ["bash", "-c", script], Path(x), None) for x in "abc"], 2, Path("."))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_jobs_and_their_children(tmp_path, number):
    def default():  # tests in the background may ignore SIGINT
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    process = subprocess.Popen([sys.executable, "-c", STUDY], cwd=tmp_path, preexec_fn=default)
    children, end = tmp_path / "children", time.monotonic() + 30
    while not children.exists() or children.read_text().count("\n") < 2:
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(timeout=30) != 0
    time.sleep(0.5)
    numbers = children.read_text().split()  # of two jobs: the third was not started
    states = subprocess.run(["ps", "-o", "stat=", "-p", ",".join(numbers)], capture_output=True, text=True).stdout
    assert len(numbers) == 2 and all(state[0] == "Z" for state in states.split())
