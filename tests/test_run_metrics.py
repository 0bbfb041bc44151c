"""eval/run_metrics.py: the lines of metrics.jsonl as every tool reads them."""

import re

import curves
import pytest
from conftest import write_jsonl
from run_metrics import read_metrics

ROWS = [{"update": 0, "eval/loss": 5.0}, {"update": 1, "episode": 8, "objective/kl": 0.5}]


def test_half_a_line_at_the_end_is_left_out(tmp_path):
    write_jsonl(tmp_path / "metrics.jsonl", [*ROWS, '{"update": 2, "episode": 16, "objective/kl": 0.'])
    assert read_metrics(tmp_path) == ROWS


def test_learning_curves_have_score_and_gold_at_their_episodes(tmp_path):
    write_jsonl(tmp_path / "metrics.jsonl", [{"update": i, "episode": 8 * i, "objective/kl": i / 2} for i in (1, 2)])
    rows = [f"{row},quickstart/truth.py:score" for row in ("0,0.1,0,0.2", "2,0.3,0,0.4")]
    (tmp_path / "gold.csv").write_text("\n".join(["update,gold,gold_se,score,judge", *rows]))
    expected = [["score", 0, 0.2], ["score", 16, 0.4], ["gold", 0, 0.1], ["gold", 16, 0.3]]
    expected += [["objective/kl", 8, 0.5], ["objective/kl", 16, 1.0]]
    assert curves.read_curves(tmp_path).to_numpy().tolist() == expected
    for header, judge in (("judge", "runs/reward/1b/1"), ("other", "quickstart/truth.py:score")):
        (tmp_path / "gold.csv").write_text(f"update,gold,gold_se,score,{header}\n0,0.1,0,0.2,{judge}\n")
        with pytest.raises(SystemExit, match=f"^error: {tmp_path}/gold.csv is of .*, not of the truth"):
            curves.read_curves(tmp_path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(SystemExit, match=rf"^error: {re.escape(str(tmp_path))} has no metrics.jsonl"):
        read_metrics(tmp_path)


@pytest.mark.parametrize("damaged", ['{"update": 1, "epi{"update": 2}\n', "\0\0\n", "[1]\n", '{"episode": 8}\n'])
def test_a_damaged_line_is_named(tmp_path, damaged):
    file = write_jsonl(tmp_path / "metrics.jsonl", [ROWS[0], damaged, ROWS[1]])
    with pytest.raises(SystemExit, match=rf"^error: {re.escape(str(file))}, line 2 is damaged: .*\Z"):
        read_metrics(tmp_path)
