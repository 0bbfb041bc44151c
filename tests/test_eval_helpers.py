"""eval/eval_helpers.py: jobs side by side, and failures; ties; the lines of metrics.jsonl as every tool reads them."""

import itertools
import re
from pathlib import Path

import eval_helpers
import numpy
import pandas
import pytest
import torch
from conftest import write_jsonl


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


ROWS = [{"update": 0, "eval/loss": 5.0}, {"update": 1, "episode": 8, "objective/kl": 0.5}]


def test_half_a_line_at_the_end_is_left_out(tmp_path):
    write_jsonl(tmp_path / "metrics.jsonl", [*ROWS, '{"update": 2, "episode": 16, "objective/kl": 0.'])
    assert eval_helpers.read_metrics(tmp_path) == ROWS


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(SystemExit, match=rf"^error: {re.escape(str(tmp_path))} has no metrics.jsonl"):
        eval_helpers.read_metrics(tmp_path)


@pytest.mark.parametrize("damaged", ['{"update": 1, "epi{"update": 2}\n', "\0\0\n", "[1]\n", '{"episode": 8}\n'])
def test_a_damaged_line_is_named(tmp_path, damaged):
    file = write_jsonl(tmp_path / "metrics.jsonl", [ROWS[0], damaged, ROWS[1]])
    with pytest.raises(SystemExit, match=rf"^error: {re.escape(str(file))}, line 2 is damaged: .*\Z"):
        eval_helpers.read_metrics(tmp_path)
