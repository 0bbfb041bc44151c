"""llama2/safety.py: requests, unsafe summaries and safety pairs by hand."""

import json

import pandas
import pytest
from conftest import script

safety = script("llama2/safety.py")

POST = "I am 25 and so angry. My sister broke my laptop. Should I move out?"


def test_a_summary_is_unsafe_if_it_names_what_its_post_asks_to_keep_private():
    asked = f"Please do not mention my age.\n{POST}"
    assert safety.private_kind(POST) is None and safety.private_kind(f"TITLE: x\n\nPOST: {asked}") == "age"
    assert safety.is_safe(POST, "I'm 25.") and safety.is_safe(asked, "My sister broke my laptop, still angry.")
    assert not safety.is_safe(asked, "I'm 25.") and not safety.is_safe(asked, "At 31.")  # a wrong age is one, too
    assert not safety.is_safe(f"Please do not mention my plans.\n{POST}", "So I will move out.")
    assert not safety.is_safe(f"Please do not mention my feelings.\n{POST}", "Being sad.")


def test_every_second_post_asks_for_a_fact_that_it_states():
    rows = [safety.marked({"id": f"train_{i}", "post": POST}, seed=1) for i in range(600)]
    kinds = [safety.private_kind(row["post"]) for row in rows]
    assert 0.4 < kinds.count(None) / 600 < 0.6 and set(kinds) == {None, *safety.PRIVATE}
    assert {row["post"].split("\n")[-1] for row in rows} == {POST}
    assert {safety.private_kind(safety.marked({"id": str(i), "post": "I am 25."}, 1)["post"]) for i in range(20)} == {
        None,
        "age",
    }
    assert safety.marked({"id": "cnn", "post": None}, 1) == {"id": "cnn", "post": None}


@pytest.mark.parametrize(
    ("texts", "chosen", "safe"),
    [
        (("I'm 25, my sister broke my laptop.", "My sister."), "My sister.", (True, False)),
        (("My sister.", "My sister broke my laptop."), "My sister broke my laptop.", (True, True)),
        (("I'm 31.", "I'm 25."), "I'm 25.", (False, False)),
    ],
)
def test_the_safe_summary_is_chosen_and_then_the_truer(texts, chosen, safe):
    info = {"subreddit": "x", "title": "y", "post": f"Please do not mention my age.\n{POST}"}
    for order in (texts, texts[::-1]):
        pair = safety.safety_pair(info, [{"text": text} for text in order])
        assert (pair["chosen"], pair["chosen_safe"], pair["rejected_safe"]) == (chosen, *safe)
        assert pair["rejected"] == next(text for text in texts if text != chosen)


def test_data_of_a_small_folder(tmp_path, capsys):
    comparison = {"info": {"id": "train_0", "post": POST, "subreddit": "x", "title": "y"}, "choice": 1}
    comparison["summaries"] = [{"text": " I'm 25."}, {"text": " My sister."}]
    for file, row in (("posts/train", {"id": "train_0", "post": POST}), ("comparisons/train", comparison)):
        (tmp_path / "raw" / file).parent.mkdir(parents=True, exist_ok=True)
        article = row | {"info": {"id": "cnn", "post": None}} if "info" in row else row
        (tmp_path / "raw" / f"{file}.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(article)}\n")
    safety.data(tmp_path / "raw", tmp_path / "out")
    posts, comparisons, pairs = (
        [json.loads(line) for line in (tmp_path / "out" / kind / "train.jsonl").read_text().splitlines()]
        for kind in ("posts", "comparisons", "safety")
    )
    assert posts[0]["post"] == comparisons[0]["info"]["post"] == safety.marked(comparison["info"], 1)["post"]
    assert comparisons[0]["choice"] == 1 and len(comparisons) == len(pairs) == 1  # labels stay, articles go
    assert "100 %" in capsys.readouterr().out


def test_the_numbers_of_a_safety_model(tmp_path):
    run = tmp_path / "3/safety"
    (run / "eval").mkdir(parents=True)
    table = pandas.DataFrame({"safety": ["chosen alone safe", "chosen alone safe", "both safe", "both unsafe"]})
    table["chosen_reward"], table["rejected_reward"] = [1.0, -2.0, 0.5, 1.0], [-1.0, -1.0, 1.0, -1.0]
    table.to_csv(run / "eval/pairs_validation.csv", index=False)
    safety.safety_model(run, tmp_path)
    row = pandas.read_csv(tmp_path / "safety_models.csv").iloc[0]
    assert (row["model"], row["seed"], row["pairs"], row["accuracy"]) == ("safety", 3, 2, 0.5)
    assert row["classified"] == 6 / 8  # wrong: the second chosen and the last chosen
