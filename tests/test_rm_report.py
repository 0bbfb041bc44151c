"""eval/rm_report.py against numbers worked out by hand."""

import json
from pathlib import Path

import numpy
import pandas
import pytest
import rm_report
from conftest import write_csv
from datasets import Dataset, DatasetDict

import ppo


def pairs(differences: list[float]) -> list[dict]:
    return [{"batch": "b", "chosen_reward": 1.0 + x, "rejected_reward": 1.0, "tie": abs(x) < 1e-6} for x in differences]


def test_the_tables(tmp_path, capsys):
    """Reward models of two sizes and two seeds, with four pairs each."""
    for size, seed, differences, accuracy in (
        ("xs", 1, [1, -1, 2, -3], 0.5),
        ("xs", 2, [1, 1, 1, 1e-7], 0.75),
        ("s", 1, [1, 2, 3, 4], 1.0),
        ("s", 2, [1, 2, 3, -4], 0.75),
    ):
        folder = tmp_path / "reward" / size / str(seed) / "eval"
        write_csv(folder / "pairs_validation.csv", pairs(differences))
        row = {"data": "validation", "group": "overall", "value": "all", "pairs": 4, "accuracy": accuracy}
        write_csv(folder / "accuracy.csv", [row, row | {"group": "policies", "value": "a--b"}])
        write_csv(folder / "reference_rewards.csv", [{"statistic": "mean", "value": seed + 0.5}])
    output = tmp_path / "out" / "rm"
    rm_report.main(rm_report.Args(("xs", "s"), (1, 2, 3), str(tmp_path), output=str(output)))
    lines = Path(f"{output}.md").read_text().splitlines()
    assert "| validation | overall | all | 0.625 ± 0.177 | 0.875 ± 0.177 |" in lines  # (0.75 - 0.5) / sqrt 2
    assert "| rewards of references |  | mean | 2.000 ± 0.707 | 2.000 ± 0.707 |" in lines
    assert not any("policies" in line for line in lines)
    accuracies = {(name, 1): pandas.read_csv(tmp_path / f"reward/{name}/1/eval/accuracy.csv") for name in ("xs", "s")}
    assert rm_report.table_5(accuracies, {}, ("xs",), True)[1]["value"] == "a--b"
    assert "2 of 6 are not there" in capsys.readouterr().out  # the runs of seed 3
    curve = pandas.read_csv(f"{output}_calibration.csv")
    assert curve[curve["model"] == "s"]["pairs"].sum() == 8  # of both seeds
    assert (curve["accuracy"] * curve["pairs"])[curve["model"] == "xs"].sum() == 5  # a tie by rounding is no hit
    by_hand = [numpy.array(x, float) for x in ([1, 2, 3, 4], [1, 2, 3, -4])]
    each = [rm_report.calibration(x)[1] for x in by_hand]
    assert f" | {numpy.mean(each):.3f} ± {numpy.std(each, ddof=1):.3f} |" in lines[-1]


def test_the_pairs_are_the_data_s_texts_without_eos_and_its_tokens(tmp_path):
    """The EOS is what most texts end with, whatever it is called. Data of texts alone have no tokens."""
    columns = {"query": ["q", "r"], "chosen": [" good.[EOS]", " a < b[EOS]"], "rejected": [" [sic] bad.[EOS]", " cut"]}
    columns |= {"query_token": [[0, 7], [8, 9]], "chosen_token": [[5, 1], [1, 0]], "rejected_token": [[6, 1], [3, 4]]}
    columns |= {"query_token_len": [1, 2], "chosen_token_len": [2, 1], "rejected_token_len": [2, 2]}
    data, file = Dataset.from_dict(columns), str(tmp_path / "pairs.csv")
    tokens = [["[7]", "[5, 1]", "[6, 1]"], ["[8, 9]", "[1]", "[3, 4]"]]
    for rows, ids in ((data, tokens), (data.select_columns(["query", "chosen", "rejected"]), [[], []])):
        DatasetDict(train=rows, validation=rows).save_to_disk(str(tmp_path / "data"))
        rm_report.main(rm_report.Args(write_pairs=file, preference_dataset=str(tmp_path / "data")))
        expected = [[0, "q", " good.", " [sic] bad.", *ids[0]], [1, "r", " a < b", " cut", *ids[1]]]
        assert pandas.read_csv(file).values.tolist() == expected


def test_judged_pairs_are_those_of_the_reward_models(tmp_path, monkeypatch):
    """By the digest that a run has of its data, or by their path; and by how many there are."""
    monkeypatch.chdir(tmp_path)
    rows = Dataset.from_dict({name: [f"{name} {i}." for i in range(3)] for name in ("query", "chosen", "rejected")})
    DatasetDict(train=rows, validation=rows).save_to_disk("data")
    DatasetDict(train=rows.select([2, 1]), validation=rows).save_to_disk("other")
    digest = {"preference_dataset digest": ppo.content_digest(rm_report.load_from_disk("data")["train"])}
    folder = tmp_path / "reward/xs/1"
    write_csv(folder / "eval/pairs_validation.csv", pairs([1, -1, 2]))
    overall = {"data": "validation", "group": "overall", "value": "all", "pairs": 3, "accuracy": 0.5}
    write_csv(folder / "eval/accuracy.csv", [overall])
    write_csv(folder / "eval/reference_rewards.csv", [{"statistic": "mean", "value": 0.5}])
    judged = [{"id": i, "win": win} for i, win in enumerate((1, 1, 0.5))]

    def agreement(settings: dict, data: str, judged: list | None = judged) -> list:
        (folder / "args.json").write_text(json.dumps(settings))
        write_csv(tmp_path / "judged.csv", judged or [])
        flags = {"judged": "judged.csv" if judged else None, "preference_dataset": data, "output": "rm"}
        rm_report.main(rm_report.Args(("xs",), (1,), ".", **flags))
        file = tmp_path / "rm_agreement.csv"
        return pandas.read_csv(file)[["pairs", "agreement"]].values.tolist() if file.exists() else []

    for settings in (digest | {"preference_dataset": "moved"}, {"preference_dataset": f"{tmp_path}/data"}):
        assert agreement(settings, "data") == [[2, 0.5]]
        with pytest.raises(SystemExit, match="^error: reward/xs/1 was trained on other data"):
            agreement(settings, "other")
        with pytest.raises(SystemExit, match="^error: judged.csv has 2 pairs, and data 3"):
            agreement(settings, "data", judged[:2])
        with pytest.raises(SystemExit, match="^error: --preference-dataset nobody/nothing: no data set"):
            agreement(settings, "nobody/nothing")
    assert agreement(settings, "data", None) == []  # and the earlier table is gone
