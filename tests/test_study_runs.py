"""eval/study_runs.py: jobs side by side, what failed, what a signal ends."""

import itertools
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import study_runs
from conftest import REPOSITORY


def job(root: Path, name: str, script: str, result: str | None = None, seconds: float = 0.0) -> study_runs.Job:
    """A job of bash, which leaves `result` where the script does not fail."""
    script += f"; touch {result}" if result else ""
    file = root / result if result else None
    return study_runs.Job(name, ["bash", "-ec", script], root / "logs" / f"{name}.log", file, seconds)


def run(jobs: list[study_runs.Job], side_by_side: int, root: Path) -> dict[str, str]:
    with study_runs.runs_bar(total=4, finished=1) as progress:
        return study_runs.run_jobs(jobs, side_by_side, root, progress)


def wait_for(condition, seconds: float = 30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def alive(number: int) -> bool:
    """Whether a process runs; a zombie does not."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(number)], capture_output=True, text=True).stdout
    return state.strip()[:1] not in ("", "Z")


def test_jobs_run_side_by_side_each_with_its_share_of_the_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(study_runs.os, "sched_getaffinity", lambda _: set(range(7)), raising=False)
    # a job waits for a second one
    wait = "for i in {1..100}; do (($(grep -c begin calls) > 1)) && break; sleep 0.1; done"
    script = f"echo begin $OMP_NUM_THREADS $PWD >>calls; {wait}; sleep 0.3; echo end >>calls"
    jobs = [job(tmp_path, "data", script)] + [job(tmp_path, name, script, name) for name in "abc"]
    assert run(jobs, 2, tmp_path) == {}
    calls = lines_of(tmp_path / "calls")
    running = list(itertools.accumulate(-1 if line == "end" else 1 for line in calls))
    assert max(running) == 2 and running[-1] == 0
    assert {line for line in calls if line != "end"} == {f"begin 3 {tmp_path}"}


def test_what_is_left_and_its_cost(tmp_path, monkeypatch):
    monkeypatch.setattr(study_runs.os, "sched_getaffinity", lambda _: set(range(7)), raising=False)
    jobs = [job(tmp_path, name, "true", name, 90) for name in "abc"]
    (tmp_path / "b").touch()
    left = study_runs.left_of(jobs)
    assert left == [jobs[0], jobs[2]]
    assert study_runs.left_of([job(tmp_path, "data", "true")])  # data are looked at by their own script
    assert study_runs.minutes(left, 2) == 1.5 and study_runs.minutes(left, 100) == pytest.approx(3 / 7)


def test_a_failing_job_stops_no_other(tmp_path):
    jobs = [job(tmp_path, "a", "exit 3", "a"), job(tmp_path, "b", "true", "b")]
    jobs += [job(tmp_path, "c", "exit 0", "c"), job(tmp_path, "d", "true", "d")]  # c leaves no result
    failures = run(jobs, 1, tmp_path)
    assert list(failures) == ["a", "c"] and (tmp_path / "b").exists() and (tmp_path / "d").exists()
    assert "exit code 3" in failures["a"] and f"no {tmp_path}/c" in failures["c"]
    study_runs.fail_of({})
    with pytest.raises(SystemExit, match="^error: step: a, c failed"):
        study_runs.fail_of(failures, "step: ")


STUDY = f"""
import sys
from pathlib import Path
sys.path.append("{REPOSITORY}/eval")
import study_runs
script = "sleep 300 & echo $! >>children; wait"
jobs = [study_runs.Job(name, ["bash", "-c", script], Path(name + ".log"), None) for name in "abc"]
with study_runs.runs_bar(3, 0) as progress:
    study_runs.run_jobs(jobs, 2, Path("."), progress)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_jobs_and_their_children(tmp_path, number):
    def set_signals():  # as under nohup; a test in the background may have been told to ignore SIGINT
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    command = [sys.executable, "-c", STUDY]
    process = subprocess.Popen(command, cwd=tmp_path, preexec_fn=set_signals, stderr=subprocess.PIPE, text=True)
    children = tmp_path / "children"
    wait_for(lambda: len(lines_of(children)) == 2)
    numbers = [int(line) for line in lines_of(children)]
    assert all(map(alive, numbers))
    process.send_signal(signal.SIGHUP)  # ignored
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert f"error: stopped by {number.name}" in errors.splitlines()[-1] and "Traceback" not in errors
    wait_for(lambda: not any(map(alive, numbers)), 5)
    assert len(lines_of(children)) == 2  # the third was not started


def test_a_process_that_ignores_sigterm_is_killed(tmp_path):
    script = f"trap '' TERM; sleep 300 & echo $! >{tmp_path}/child; wait; wait"
    process = subprocess.Popen(["bash", "-c", script], start_new_session=True)
    wait_for(lambda: lines_of(tmp_path / "child"))
    study_runs.end_groups([process], patience=0.5)
    wait_for(lambda: not alive(int(lines_of(tmp_path / "child")[0])), 5)
    assert process.wait() == -signal.SIGKILL
