"""variants/ranking.py: paired differences and Holm's correction against scipy and by hand."""

import sys

import pandas
import pytest
from conftest import REPOSITORY
from scipy import stats

sys.path.insert(0, str(REPOSITORY / "variants"))

import ranking  # noqa: E402

TRUTHS = {"ppo": [0.80, 0.70, 0.75, 0.90], "rloo": [0.82, 0.78, 0.74, 0.99], "dpo": [0.80, 0.71, 0.74, 0.90]}


def rows() -> pandas.DataFrame:
    """In an order of seeds that differs between the policies."""
    found = [(name, seed, truth) for name, truths in TRUTHS.items() for seed, truth in enumerate(truths)]
    return pandas.DataFrame(found[::-1] + [], columns=["policy", "seed", "truth"]).sort_values(["truth"])


def test_differences_are_paired_by_seed():
    test = stats.ttest_rel(TRUTHS["rloo"], TRUTHS["ppo"])
    found = ranking.paired(rows(), "rloo")
    interval = test.confidence_interval(0.95)
    expected = {"difference": 0.045, "low": interval.low, "high": interval.high, "p": test.pvalue}
    assert found == pytest.approx(expected)


def test_holm_by_hand():
    found = ranking.holm({"a": 0.02, "b": 0.01, "c": 0.9, "d": 0.03})
    assert found == pytest.approx({"b": 0.04, "a": 0.06, "d": 0.06, "c": 0.9})
    assert ranking.holm({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0}


def test_rows_of_a_seed_replace_those_before_and_others_stay(tmp_path):
    first = rows().assign(truth=0.0)
    ranking.write_rows(tmp_path / "seeds.csv", first)
    ranking.write_rows(tmp_path / "seeds.csv", rows()[rows()["seed"].isin([1, 3])])
    found = pandas.read_csv(tmp_path / "seeds.csv").pivot(index="seed", columns="policy", values="truth")
    assert found["rloo"].tolist() == [0.0, 0.78, 0.0, 0.99] and found["dpo"].tolist() == [0.0, 0.71, 0.0, 0.90]


@pytest.mark.parametrize("page", ["README.md", "quickstart/README.md", "variants/README.md"])
def test_pages_show_the_table_of_the_committed_rows(page):
    """The first columns of SFT, PPO and DPO, or the whole table. No page has another row of these methods' truth."""
    lines = ranking.table(pandas.read_csv(REPOSITORY / "variants/results/seeds.csv"))
    if not page.startswith("variants"):
        lines = ["|".join(line.split("|")[:7]) + "|" for line in [*lines[:2], *lines[2:5]]]
    assert "\n".join(lines) + "\n\n" in (REPOSITORY / page).read_text()
