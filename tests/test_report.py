"""quickstart/report.py: its table, intervals and files, with policies whose summaries are known; and curves.py."""

import random
from pathlib import Path

import curves
import metric
import pytest
import report
from conftest import files, read_csv, write_jsonl

KEYS = {"sft": ["loss/train"], "reward": ["accuracy/train"], "dpo": ["accuracy/train"]}
KEYS["ppo"] = ["objective/rlhf_reward", "objective/kl", "objective/score", "response/eos_rate", "response/length"]


@pytest.fixture
def args(tmp_path, monkeypatch) -> report.Args:
    """Four runs of 40 updates; SFT repeats the reference, PPO is nearly perfect, DPO knows the title alone."""
    rng = random.Random(3)
    for stage, keys in KEYS.items():
        lines = [{"update": i, "episode": 8 * i} | {key: rng.random() for key in keys} for i in range(1, 41)]
        start = [{"update": 0, "eval/loss": 5.0}] if stage == "sft" else []  # SFT's begins with its validation loss
        write_jsonl(tmp_path / "runs" / stage / "nano-s" / "1" / "metrics.jsonl", [*start, *lines])

    def measure(args):
        rows, _ = metric.fresh_posts(args.posts)
        column = {"sft": "summary", "ppo": "near_perfect", "dpo": "copied_title"}[Path(args.policy).parts[-3]]
        summaries = [row[column] for row in rows]
        return metric.text_numbers(rows, summaries) | {"kl": 1.5}, rows, summaries

    monkeypatch.setattr(metric, "measure", measure)
    return report.Args(runs=str(tmp_path / "runs"), posts=12)


def test_the_table_has_the_policies_beside_the_summaries_that_need_no_model(args):
    report.main(args)
    folder = Path(args.runs, "report/nano-s/1")
    assert set(files(folder)) == {"table.csv", "table.md", "samples.md", "learning_curves.png"}
    table = {(row["row"], row["metric"]): float(row["value"]) for row in read_csv(folder / "table.csv")}
    for policy, yardstick in (("SFT", "reference"), ("PPO", "nearly perfect"), ("DPO", "title")):
        for key in ("truth", "win_rate", "wrong_facts", "words", "rougeL"):
            assert table[policy, key] == table[yardstick, key]
    assert table["SFT", "rougeL"] == 1 and table["SFT", "win_rate"] == 0.5 and table["SFT", "kl"] == 1.5
    difference = table["PPO", "truth"] - table["SFT", "truth"]
    assert table["PPO", "above_sft"] == pytest.approx(difference)
    assert table["PPO", "above_sft_low"] < difference < table["PPO", "above_sft_high"]
    text = (folder / "table.md").read_text()
    assert f"PPO's truth is {difference:+.3f} above SFT's" in text
    assert "DPO did not improve on SFT" in text and "PPO did not" not in text
    assert (folder / "samples.md").read_text().count("\n## ") == 10


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
