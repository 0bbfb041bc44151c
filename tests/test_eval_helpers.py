"""eval/eval_helpers.py: jobs side by side, and failures; ties."""

import itertools
from pathlib import Path

import eval_helpers
import numpy
import pandas
import pytest
import torch


def job(root: Path, name: str, script: str) -> eval_helpers.Job:
    return eval_helpers.Job(name, ["bash", "-ec", script], root / "logs" / f"{name}.log", None)


def test_jobs_run_side_by_side_each_with_its_share_of_the_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(eval_helpers, "cores", lambda: 7)
    script = "echo begin $OMP_NUM_THREADS $PWD >>calls; sleep 0.5; echo end >>calls"
    eval_helpers.run_jobs([job(tmp_path, name, script) for name in "abcd"], 2, tmp_path)
    calls = (tmp_path / "calls").read_text().splitlines()
    running = list(itertools.accumulate(-1 if line == "end" else 1 for line in calls))
    assert max(running) == 2 and running[-1] == 0 and len(calls) == 8
    assert {line for line in calls if line != "end"} == {f"begin 3 {tmp_path}"}


def test_scores_that_differ_by_rounding_tie():
    a, b = [0.1 + 0.2, 1e6, 1.0, 2.0, -3.0], [0.3, 1e6 + 0.1, 1.0001, 1.0, -3.0]
    assert [*map(eval_helpers.wins, a, b)] == [0.5, 0.5, 0, 1, 0.5]
    for kind in (numpy.array, torch.tensor, pandas.Series):
        assert eval_helpers.wins(kind(a), kind(b)).tolist() == [0.5, 0.5, 0, 1, 0.5]


def test_a_failing_job_stops_no_other(tmp_path):
    jobs = [job(tmp_path, "a", "echo broken; exit 3"), job(tmp_path, "b", "touch b")]
    with pytest.raises(SystemExit, match=f"^error: .*: a \\({jobs[0].log}\\);"):
        eval_helpers.run_jobs(jobs, 1, tmp_path)
    assert (tmp_path / "b").exists() and jobs[0].log.read_text() == "broken\n"
