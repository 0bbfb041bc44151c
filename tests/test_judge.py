"""eval/judge.py: openai's client in front of answers made here, scores by hand, and win rates by hand."""

import csv
import hashlib
import json
import math
import re
from collections import Counter
from functools import partial
from pathlib import Path

import httpx
import judge
import numpy
import pandas
import pytest
import torch
from conftest import make_reward_model, record
from datasets import load_from_disk
from transformers import AutoModelForSequenceClassification

import ppo

URL = "http://judge/v1"


class Endpoint:
    """A judge that prefers the summary with more words, or Summary A if both have as many. .asked has the prompts that
    got an answer; the post .failing gets an error 500, and those in .changes other fields or another HTTP status."""

    def __init__(self):
        self.asked, self.failing, self.changes = [], None, {}

    def answer(self, request: httpx.Request) -> httpx.Response:
        prompt = json.loads(request.content)["messages"][0]["content"]
        if f"POST {self.failing}:" in prompt:
            return httpx.Response(500)
        self.asked.append(prompt)
        a, b = re.search(r"Summary A:\n(.*)\n\nSummary B:\n(.*)\n\nFIRST provide", prompt, re.DOTALL).groups()
        preferred = "A" if len(a.split()) >= len(b.split()) else "B"
        text = f"Comparison: one has more.\nPreferred: {preferred}"
        change = next((x for post, x in self.changes.items() if f"POST {post}:" in prompt), {})
        message = {"role": "assistant", "content": change.get("content", text)}
        choices = [{"index": 0, "finish_reason": change.get("end", "stop"), "message": message}]
        answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": choices}
        return httpx.Response(change.get("status", 200), json=answer | change)


@pytest.fixture
def endpoint(monkeypatch):
    found = Endpoint()
    client = httpx.Client(transport=httpx.MockTransport(found.answer))
    monkeypatch.setattr(judge, "OpenAI", partial(judge.OpenAI, http_client=client))
    return found


def write_samples(path: Path, lengths: list[tuple[int, int]]) -> Path:
    """Examples whose summary and reference have so many words."""
    rows = [(f"v{i}", f"POST {i}: x", " ".join("s" * m), " ".join("r" * n)) for i, (m, n) in enumerate(lengths)]
    path.parent.mkdir(parents=True, exist_ok=True)
    pandas.DataFrame(rows, columns=judge.COLUMNS).to_csv(path, index=False, quoting=csv.QUOTE_NONNUMERIC)
    return path


def write_judge(path: Path, returned: str) -> str:
    """A judge whose function returns an expression of post and summary, as --judge takes it; its file imports a
    neighbour and has a dataclass whose annotations are read late."""
    path.with_name("neighbour_of_it.py").write_text("from dataclasses import dataclass\n")
    text = (
        "from __future__ import annotations\nfrom neighbour_of_it import dataclass\n@dataclass\nclass A:\n    x: int\n"
    )
    path.write_text(f"{text}def score(post, summary):\n    return {returned}\n")
    return f"{path}:score"


def judged_by(by: str, file: Path, **settings) -> pandas.DataFrame:
    """The rows that judge.py writes for a file of samples, or for another run's first."""
    for old in file.parent.glob("judge_*.csv"):
        old.unlink()
    judge.main(judge.Args((str(file),), by, **settings))
    [bins] = file.parent.glob("judge_*_bins.csv")
    return pandas.read_csv(str(bins).replace("_bins", ""), keep_default_na=False, na_values={"win": ""})


LENGTHS = [(1 + i % 7, 1 + (i * 3) % 5) for i in range(40)]


def test_the_places_of_the_summaries_and_the_win_rate(endpoint, tmp_path, monkeypatch):
    file = write_samples(tmp_path / "run" / "eval" / "samples_validation.csv", LENGTHS)
    found = judged_by("m", file, base_url=URL)
    first = [judge.first_is_a(1, f"v{i}") for i in range(40)]
    assert 10 < sum(first) < 30 and found["summary_is_a"].tolist() == first
    wins = [float(m > n or (m == n and a)) for (m, n), a in zip(LENGTHS, first, strict=True)]
    assert found["win"].tolist() == wins
    assert found["log_length_ratio"].tolist() == pytest.approx([math.log(m / n) for m, n in LENGTHS])
    prompt = next(prompt for prompt in endpoint.asked if "POST 3:" in prompt)  # the whole of it: test_details.py
    a, b = ("s s s s", "r r r r r")[:: 1 if first[3] else -1]
    assert f"Summary A:\n{a}\n\nSummary B:\n{b}\n" in prompt
    assert pandas.read_csv(file.with_name("judge_m_rates.csv"))["win_rate"].tolist() == [sum(wins) / 40]
    # answers are kept; another address, which the environment names, is another endpoint and is asked again
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://other/v1")
    for url, times in ((URL + "/", 1), (None, 2), (URL, 2)):
        judge.main(judge.Args((str(tmp_path / "run"),), "m", base_url=url))
        asked = Counter(endpoint.asked)
        assert set(asked.values()) == {times} and len(asked) == 40


def test_an_answer_that_is_none_is_counted_and_never_guessed(endpoint, tmp_path):
    """Empty, cut, without choices or refused, with the reason in the file; they are not asked for again."""
    file = write_samples(tmp_path / "samples_validation.csv", LENGTHS[:10])
    endpoint.changes = {1: {"content": None}, 3: {"end": "length"}, 5: {"choices": []}, 7: {"status": 400}}
    for _ in range(2):
        found = judged_by("a@b", file, base_url=URL)  # a name, and no revision
        assert found["win"].isna().tolist() == [i in endpoint.changes for i in range(10)]
        assert pandas.read_csv(tmp_path / "judge_a-b_rates.csv")["invalid"].tolist() == [4]
        assert len(endpoint.asked) == 10
    kept = [json.loads(line) for line in (tmp_path / "judge_a-b.jsonl").read_text().splitlines()[1:]]
    reasons = {row["prompt"].split("POST ")[1][0]: row["reason"] for row in kept if row["reason"]}
    assert reasons.pop("7").startswith("Error code: 400") and reasons.pop("3").startswith("length, ")
    assert reasons == {"1": "stop, 0 characters", "5": "no choices, 0 characters"}
    for text, expected in (
        ("Comparison: A is good.\nPreferred: A", "A"),
        ("Comparison: x\n\nPreferred:  B.\n", "B"),
        ("Comparison: I prefer A", None),
        ("Preferred: A or B", None),
        ("Preferred: A\nbut B is shorter", None),
    ):
        assert judge.verdict(text) == expected, text


def test_a_stopped_run_continues_with_the_answers_so_far(endpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(judge, "RETRIES", 0)
    monkeypatch.setattr(judge, "CONCURRENCY", 1)  # so that no answer is on its way when the last question fails
    file, answers = write_samples(tmp_path / "samples_validation.csv", LENGTHS[:16]), tmp_path / "judge_m.jsonl"
    endpoint.failing = 15
    with pytest.raises(SystemExit, match="a request failed. The same command continues"):
        judged_by("m", file, base_url=URL)
    assert not (tmp_path / "judge_m.csv").exists()
    kept = [json.loads(line)["prompt"] for line in answers.read_text().splitlines()[1:]]
    endpoint.failing, endpoint.asked = None, []
    expected = judged_by("m", file, base_url=URL)
    assert len(kept) == 15 and len(endpoint.asked) == 1 and endpoint.asked[0] not in kept
    answers.write_text(answers.read_text()[:-40])  # as a kill leaves it
    for _ in range(2):  # what was asked again is kept
        pandas.testing.assert_frame_equal(judged_by("m", file, base_url=URL), expected)
    assert len(endpoint.asked) == 2


def test_ids_count_only_where_every_row_has_them(world):
    tokenizer = ppo.load_tokenizer(str(world.model))
    query = tokenizer("POST a", add_special_tokens=False).input_ids
    rows = [("POST a", text, json.dumps(query), "") for text in ("", "", " b")]  # two of three decode to their text
    expected = tokenizer("POST a b", add_special_tokens=False).input_ids
    assert judge.row_tokens(tokenizer, rows)[2] == (*expected, tokenizer.eos_token_id)


def test_one_run_against_another(tmp_path):
    """0.1 + 0.2, above 0.3 in floating point, ties with it. The second summary has a carriage return, which breaks no
    row, and the last other one is Chinese, whose length is in characters. No two results have one name."""
    ours = write_samples(tmp_path / "ppo" / "eval" / "samples_validation.csv", [(3, 9), (2, 9), (1, 9), (1, 9)])
    ours.write_bytes(ours.read_bytes().replace(b'"s s"', b'"s\rs"'))
    theirs = write_samples(tmp_path / "sft" / "eval" / "samples_validation.csv", [(1, 5), (4, 5), (3, 5), (5, 5)])
    theirs.write_text(theirs.read_text().replace('"s s s s s"', '"我喜欢猫狗"'))
    (tmp_path / ("x" * 120) / ("y" * 120)).mkdir(parents=True)
    words = write_judge(
        tmp_path / ("x" * 120) / ("y" * 120) / "words.py", "[None, 0.2, 0.3, 0.5, 0.1 + 0.2][len(summary.split())]"
    )
    judged = judged_by(words, ours, against=str(tmp_path / "sft"))
    assert judged["win"].tolist() == [1, 0.5, 0, 0.5] and judged["summary"].tolist() == ["s s s", "s\rs", "s", "s"]
    assert judged["log_length_ratio"].tolist() == pytest.approx([math.log(x) for x in (3, 2 / 4, 1 / 3, 1 / 5)])
    other = tmp_path / "study" / "sft" / "eval" / "samples_validation.csv"
    write_samples(other, [(1, 5), (4, 5), (3, 5), (2, 5)])
    for against, seed in ((other, 1), (theirs, 1), (theirs, 2)):
        judge.main(judge.Args((str(ours),), words, str(against), seed=seed))
    digest = "h" + hashlib.sha256(ours.read_bytes()).hexdigest()[:12]
    for ending in ("rates", "bins"):
        found = [pandas.read_csv(file) for file in ours.parent.glob(f"judge_*_{ending}.csv")]
        assert len(found) == 4 and {x for rows in found for x in rows["samples"]} == {digest}


def test_a_score_that_is_no_finite_number_and_a_missing_key_are_errors(tmp_path, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    file = write_samples(tmp_path / "samples_validation.csv", [(1, 1), (2, 3)])
    for returned in ("1 / (summary != 's s')", "None", "float('nan') if summary == 's s' else 1"):
        by = write_judge(tmp_path / "judge.py", returned)
        with pytest.raises(SystemExit, match=rf"^error: {file}, id v\d: --judge {by} .*\Z"):
            judge.main(judge.Args((str(file),), by))
    with pytest.raises(SystemExit, match="^error: --judge m: set OPENAI_API_KEY"):
        judge.main(judge.Args((str(file),), "m"))
    assert not list(tmp_path.glob("judge_*"))


@pytest.mark.parametrize("kind", ["posts", "dialogues", "tokens"])
def test_a_reward_model_s_verdicts_are_those_of_its_rewards(world, tmp_path, monkeypatch, kind):
    """Plain transformers score the tokens of query and summary, one row at a time: the stored ones of posts; EOS in the
    query and answers without a space; or one token per character, as no tokenizer makes them. Equal summaries are
    scored once: in two batches their scores could differ by rounding, and a tie would be a win."""
    folder = make_reward_model(world.model, tmp_path / "reward" / "model")
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32).eval()
    model.config.pad_token_id = None  # the last token, and one row at a time
    tokenizer, rows, rewards = ppo.load_tokenizer(str(folder)), [], []
    eos, eos_id, turns = tokenizer.eos_token, tokenizer.eos_token_id, kind == "dialogues"
    for i, row in enumerate(load_from_disk(world.preference_dataset)["validation"]):
        rows.append({"id": i, "query": row["query"] + eos * turns})
        query = row["query_token"][-row["query_token_len"] :] + [eos_id] * turns
        for side, name in (("chosen", "response"), ("rejected", "reference")):
            text, tokens = row[side].removesuffix(eos), row[f"{side}_token"][: row[f"{side}_token_len"]]
            if turns:
                text, tokens = text.strip(), tokenizer(text.strip() + eos).input_ids
            if kind == "tokens":
                letters = [x for token in tokenizer.convert_ids_to_tokens(tokens[:-1]) for x in token]
                tokens = [*tokenizer.convert_tokens_to_ids(letters), eos_id]
                rows[-1] |= {"query_token": query, f"{name}_token": tokens}
            with torch.no_grad():
                rewards.append(model(torch.tensor([query + tokens])).logits.item())
            rows[-1][name] = text
    wins = [float(chosen > rejected) for chosen, rejected in zip(rewards[::2], rewards[1::2], strict=True)]
    assert 3 < sum(wins) < len(wins) - 3
    same = [{key: row[key.replace("reference", "response")] for key in row} | {"id": -1 - row["id"]} for row in rows]
    pandas.DataFrame(rows + same).to_csv(tmp_path / "a.csv", index=False)
    torch.backends.cuda.enable_cudnn_sdp(True)
    calls = record(monkeypatch, ppo.RewardModel, "forward")
    assert judged_by(str(tmp_path / "reward"), tmp_path / "a.csv")["win"].tolist() == wins + [0.5] * len(rows)
    distinct = {(row["query"], row[side]) for row in rows for side in ("response", "reference")}
    assert sum(len(call.args[1]) for call in calls) == len(distinct)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_win_rates_by_hand():
    """Wilson's interval, the roots of (p - share)^2 = 1.96^2 p (1 - p) / n, and bins of the log length ratio."""
    for wins in ([1] * 20, [0] * 24, [1] * 88 + [0.5] + [0] * 40):
        found, _ = judge.win_rates(pandas.DataFrame({"win": wins, "log_length_ratio": 0.0}))
        share = sum(wins) / len(wins)
        for p in (found["win_rate_low"], found["win_rate_high"]):
            assert abs((p - share) ** 2 - 1.96**2 * p * (1 - p) / len(wins)) < 1e-12
        assert found["win_rate_high"] - found["win_rate_low"] > 0.1
    frame = pandas.DataFrame({"win": [1, 0, 1, 0.5, None], "log_length_ratio": [-2.0, 0.0, 0.1, 0.25, 3.0]})
    summary, bins = judge.win_rates(frame)
    assert summary["examples"] == 5 and summary["invalid"] == 1 and summary["ties"] == 1
    assert (summary["win_rate"], summary["mean_log_length_ratio"]) == pytest.approx((2.5 / 4, -1.65 / 4))
    found = bins[["from", "to", "examples", "win_rate"]].values.tolist()
    assert found == [[-math.inf, -1.0, 1, 1.0], [0.0, 0.25, 2, 0.5], [0.25, 0.5, 1, 0.5]]
    assert bins["se"].tolist() == pytest.approx([0.2024, 0.2069, 0.2272], abs=5e-5)  # Wilson's width / 3.92


def test_length_control_by_hand():
    # two lengths of the same distance: the logistic regression goes through both groups' log-odds, 3:1 and 1:4
    ratios, wins = numpy.array([1.0] * 4 + [-1.0] * 5), numpy.array([1, 1, 1, 0] + [1, 0, 0, 0, 0], float)
    middle = (math.log(3) + math.log(1 / 4)) / 2
    controlled, slope = judge.length_controlled(wins, ratios)
    assert controlled == pytest.approx(1 / (1 + math.exp(-middle)), abs=1e-5)
    assert slope == pytest.approx((math.log(3) - math.log(1 / 4)) / 2, abs=1e-5)
    controlled, far = judge.length_controlled(wins, ratios + 2)  # no summary is as short as the other one
    assert math.isnan(controlled) and far == pytest.approx(slope)
    for wins, ratios in (([0, 1], [-1, 1]), ([1, 0.5, 0], [-1, 0, 1]), ([1, 1], [-1, 1]), ([1, 0, 1], [0.7] * 3)):
        found = judge.length_controlled(numpy.array(wins, float), numpy.array(ratios, float))
        assert numpy.isnan(found).all(), (wins, ratios)
