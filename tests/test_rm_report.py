"""eval/rm_report.py against numbers worked out by hand."""

from pathlib import Path

import numpy
import pandas
import pytest
import rm_report
from conftest import write_csv


def pairs(differences: list[float]) -> list[dict]:
    return [{"batch": "b", "chosen_reward": 1.0 + x, "rejected_reward": 1.0} for x in differences]


def test_the_tables(tmp_path, capsys):
    """Reward models of two sizes and two seeds, with four pairs each."""
    for size, seed, differences, accuracy in (
        ("xs", 1, [1, -1, 2, -3], 0.5),
        ("xs", 2, [1, 1, 1, -1], 0.75),
        ("s", 1, [1, 2, 3, 4], 1.0),
        ("s", 2, [1, 2, 3, -4], 0.75),
    ):
        folder = tmp_path / "reward" / size / str(seed) / "eval"
        write_csv(folder / "pairs_validation.csv", pairs(differences))
        row = {"data": "validation", "group": "overall", "value": "all", "pairs": 4, "accuracy": accuracy}
        write_csv(folder / "accuracy.csv", [row, row | {"group": "policies", "value": "a--b"}])
        write_csv(folder / "reference_rewards.csv", [{"statistic": "mean", "value": seed + 0.5}])
    output = tmp_path / "out" / "rm"
    rm_report.main(rm_report.Args(("xs", "s"), (1, 2, 3), str(tmp_path), bins=2, output=str(output)))
    lines = Path(f"{output}.md").read_text().splitlines()
    assert "| validation | overall | all | 0.625 ± 0.177 | 0.875 ± 0.177 |" in lines  # (0.75 - 0.5) / sqrt 2
    assert "| rewards of references |  | mean | 2.000 ± 0.707 | 2.000 ± 0.707 |" in lines
    assert not any("policies" in line for line in lines)
    assert "2 of 6 are not there" in capsys.readouterr().out  # the runs of seed 3
    curve = pandas.read_csv(f"{output}_calibration.csv")
    assert curve[curve["model"] == "s"]["pairs"].sum() == 8  # of both seeds
    by_hand = [numpy.array(x, float) for x in ([1, 2, 3, 4], [1, 2, 3, -4])]
    each = [rm_report.calibration(x, 2)[1] for x in by_hand]
    assert f" | {numpy.mean(each):.3f} ± {numpy.std(each, ddof=1):.3f} |" in lines[-1]


def test_a_tie_is_no_hit():
    frame = pandas.DataFrame(pairs([1, 1e-7, -1])).assign(tie=[False, True, False])
    judged = pandas.DataFrame({"id": range(3), "win": 1.0})
    assert rm_report.judge_agreement({("m", 1): frame}, judged) == {("m", 1): (3, pytest.approx(1 / 3))}
