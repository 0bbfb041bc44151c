"""eval/judge.py against a local server that answers like the API, fails like it, and counts requests."""

import csv
import json
import math
import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import judge
import numpy
import pandas
import pytest
import torch
from conftest import make_reward_model, record
from datasets import load_from_disk
from transformers import AutoModelForSequenceClassification

import ppo


class Endpoint:
    """A judge that prefers the summary with more words, or Summary A if both have as many: .url, .asked (Counter of
    prompts that got an answer), .failing and .empty (posts that get an error 500 and an answer without content)."""

    def __init__(self):
        endpoint = self
        self.asked, self.failing, self.empty, self.lock = Counter(), None, None, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_POST(self):
                prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
                error, empty = (f"POST {i}:" in prompt for i in (endpoint.failing, endpoint.empty))
                with endpoint.lock:
                    endpoint.asked[prompt] += not error
                text = f"Comparison: one has more.\nPreferred: {endpoint.prefers(prompt)}" if not empty else None
                choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
                answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
                body = json.dumps(answer).encode()
                self.send_response(500 if error else 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    @staticmethod
    def prefers(prompt: str) -> str:
        a, b = re.search(r"Summary A:\n(.*)\n\nSummary B:\n(.*)\n\nFIRST provide", prompt, re.DOTALL).groups()
        return 'C, both are "good"' if "unsure" in a + b else "A" if len(a.split()) >= len(b.split()) else "B"


@pytest.fixture
def endpoint():
    found = Endpoint()
    yield found
    found.http.shutdown()
    found.http.server_close()


def write_samples(path: Path, lengths: list[tuple[int, int]]) -> Path:
    """Examples whose summary and reference have so many words."""
    rows = [(f"v{i}", f"POST {i}: x", " ".join("s" * m), " ".join("r" * n)) for i, (m, n) in enumerate(lengths)]
    path.parent.mkdir(parents=True, exist_ok=True)
    pandas.DataFrame(rows, columns=judge.COLUMNS).to_csv(path, index=False, quoting=csv.QUOTE_NONNUMERIC)
    return path


def write_judge(path: Path, returned: str) -> str:
    """A judge whose function returns an expression of post and summary, as --judge takes it."""
    path.write_text(f"def score(post, summary):\n    return {returned}\n")
    return f"{path}:score"


def judged_by(by: str, file: Path, **settings) -> pandas.DataFrame:
    """The rows that judge.py writes for a file of samples, or for another run's first."""
    for old in file.parent.glob("judge_*.csv"):
        old.unlink()
    judge.main(judge.Args((str(file),), by, **settings))
    [bins] = file.parent.glob("judge_*_bins.csv")
    return pandas.read_csv(str(bins).replace("_bins", ""), keep_default_na=False, na_values={"win": ""})


LENGTHS = [(1 + i % 7, 1 + (i * 3) % 5) for i in range(40)]


def test_the_places_of_the_summaries_and_the_win_rate(endpoint, tmp_path):
    file = write_samples(tmp_path / "run" / "eval" / "samples_validation.csv", LENGTHS)
    found = judged_by("m", file, base_url=endpoint.url)
    first = [judge.first_is_a(1, f"v{i}") for i in range(40)]
    assert 10 < sum(first) < 30 and found["summary_is_a"].tolist() == first
    wins = [float(m > n or (m == n and a)) for (m, n), a in zip(LENGTHS, first, strict=True)]
    assert found["win"].tolist() == wins
    assert found["length_ratio"].tolist() == pytest.approx([math.log(m / n) for m, n in LENGTHS])
    prompt = next(prompt for prompt in endpoint.asked if "POST 3:" in prompt)  # the whole of it: test_details.py
    a, b = ("s s s s", "r r r r r")[:: 1 if first[3] else -1]
    assert f"Summary A:\n{a}\n\nSummary B:\n{b}\n" in prompt
    assert pandas.read_csv(file.with_name("judge_m_rates.csv"))["win_rate"].tolist() == [sum(wins) / 40]
    judge.main(judge.Args((str(tmp_path / "run"),), "m", base_url=endpoint.url))  # answers are kept
    assert set(endpoint.asked.values()) == {1} and len(endpoint.asked) == 40


def test_an_answer_that_is_none_is_counted_and_never_guessed(endpoint, tmp_path):
    file, endpoint.empty = write_samples(tmp_path / "samples_validation.csv", LENGTHS[:10]), 5
    frame = pandas.read_csv(file)
    frame.loc[2, "response"] = "unsure"
    frame.to_csv(file, index=False)
    wins = judged_by("m", file, base_url=endpoint.url)["win"]
    assert wins.isna().tolist() == [i in (2, 5) for i in range(10)]
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
    file, answers = write_samples(tmp_path / "samples_validation.csv", LENGTHS[:16]), tmp_path / "judge_m.jsonl"
    endpoint.failing = 15
    with pytest.raises(SystemExit, match="a request failed. The same command continues"):
        judged_by("m", file, base_url=endpoint.url)
    assert not (tmp_path / "judge_m.csv").exists()
    kept = [json.loads(line)["prompt"] for line in answers.read_text().splitlines()[1:]]
    endpoint.failing, endpoint.asked = None, Counter()
    expected = judged_by("m", file, base_url=endpoint.url)
    assert kept and not endpoint.asked.keys() & set(kept) and len(endpoint.asked) == 16 - len(kept)
    answers.write_text(answers.read_text()[:-40])  # as a kill leaves it
    for _ in range(2):  # what was asked again is kept
        pandas.testing.assert_frame_equal(judged_by("m", file, base_url=endpoint.url), expected)
    assert sum(endpoint.asked.values()) == 16 - len(kept) + 1


def test_an_answer_is_kept_for_its_endpoint_alone(endpoint, tmp_path, monkeypatch):
    """The same endpoint under another address, which the environment names, is another one and is asked again."""
    file = write_samples(tmp_path / "samples_validation.csv", LENGTHS[:10])
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("OPENAI_BASE_URL", endpoint.url.replace("127.0.0.1", "localhost"))
    for url, times in ((endpoint.url, 1), (None, 2), (endpoint.url + "/", 2), (None, 2)):
        judged_by("m", file, base_url=url)
        assert set(endpoint.asked.values()) == {times} and len(endpoint.asked) == 10


def test_one_run_against_another(tmp_path):
    """The second summary has a carriage return, which breaks no row."""
    ours = write_samples(tmp_path / "ppo" / "eval" / "samples_validation.csv", [(3, 9), (2, 9), (1, 9)])
    ours.write_bytes(ours.read_bytes().replace(b'"s s"', b'"s\rs"'))
    write_samples(tmp_path / "sft" / "eval" / "samples_validation.csv", [(1, 5), (2, 5), (3, 5)])
    words = write_judge(tmp_path / "words.py", "len(summary.split())")
    judged = judged_by(words, ours, against=str(tmp_path / "sft"))
    assert judged["win"].tolist() == [1.0, 0.5, 0.0] and judged["summary"].tolist() == ["s s s", "s\rs", "s"]


def test_scores_that_differ_by_rounding_tie(tmp_path):
    """0.1 + 0.2 is above 0.3 in floating point; 1.0 is above both."""
    file = write_samples(tmp_path / "samples_validation.csv", [(3, 1), (1, 3), (3, 2), (2, 1)])
    sums = write_judge(tmp_path / "sums.py", "[None, 0.3, 1.0, 0.1 + 0.2][len(summary.split())]")
    assert judged_by(sums, file)["win"].tolist() == [0.5, 0.5, 0.0, 1.0]


def test_a_score_that_is_no_finite_number_is_an_error(tmp_path):
    file = write_samples(tmp_path / "samples_validation.csv", [(1, 1), (2, 3)])
    for returned in ("1 / (summary != 's s')", "None", "float('nan') if summary == 's s' else 1"):
        by = write_judge(tmp_path / "judge.py", returned)
        with pytest.raises(SystemExit, match=rf"^error: {file}, id v\d: --judge {by} .*\Z"):
            judge.main(judge.Args((str(file),), by))
    assert not list(tmp_path.glob("judge_*"))


def test_a_reward_model_s_verdicts_are_those_of_its_rewards(world, tmp_path, monkeypatch):
    """Plain transformers score the stored tokens of query and summary, one row at a time. Equal summaries are scored
    once: in two batches their scores could differ by rounding, and a tie would be a win. The rewards themselves are
    tested in test_ensembles.py."""
    folder = make_reward_model(world.model, tmp_path / "reward" / "model")
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32).eval()
    model.config.pad_token_id = None  # the last token, and one row at a time
    data, rewards = load_from_disk(world.preference_dataset)["validation"], []
    for row in data:
        for side in ("chosen", "rejected"):
            tokens = torch.tensor([row["query_token"][-row["query_token_len"] :] + row[f"{side}_token"]])
            tokens = tokens[:, : row["query_token_len"] + row[f"{side}_token_len"]]
            with torch.no_grad():
                rewards.append(model(tokens).logits.item())
    wins = [float(chosen > rejected) for chosen, rejected in zip(rewards[::2], rewards[1::2], strict=True)]
    assert 3 < sum(wins) < len(wins) - 3
    texts = [[text.removesuffix("<|endoftext|>") for text in data[side]] for side in ("chosen", "rejected")]
    frame = pandas.DataFrame({"id": range(len(data)), "query": data["query"], "response": texts[0]})
    frame["reference"] = [text.strip() for text in texts[1]]  # without the space, as a file from elsewhere may be
    same = frame.assign(id=frame["id"] + len(data), reference=frame["response"])
    pandas.concat([frame, same]).to_csv(tmp_path / "a.csv", index=False)
    torch.backends.cuda.enable_cudnn_sdp(True)
    calls = record(monkeypatch, ppo.RewardModel, "forward")
    assert judged_by(str(tmp_path / "reward"), tmp_path / "a.csv")["win"].tolist() == wins + [0.5] * len(data)
    distinct = {(query, text) for side in texts for query, text in zip(data["query"], side, strict=True)}
    assert sum(len(call.args[1]) for call in calls) == len(distinct)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_bad_input_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    (tmp_path / "x.csv").write_text("id,query\n1,2\n")
    file = write_samples(tmp_path / "samples_validation.csv", [(1, 2)])
    for path, message in (
        (tmp_path / "x.csv", "x.csv does not have the columns .*reference"),
        (file, "^error: --judge m: set OPENAI_API_KEY"),
    ):
        with pytest.raises(SystemExit, match=message):
            judge.main(judge.Args((str(path),), "m"))


# ---- win rates --------------------------------------------------------------------------------------------------


def test_bootstrap_interval_is_that_of_the_binomial():
    frame = pandas.DataFrame({"win": [1.0] * 60 + [0.0] * 40, "length_ratio": 0.0})
    low, high = (judge.win_rates(frame, 1)[0][f"win_rate_{end}"] for end in ("low", "high"))
    chances = [math.comb(100, k) * 0.6**k * 0.4 ** (100 - k) for k in range(101)]
    below = numpy.cumsum(chances)
    assert low == pytest.approx(numpy.searchsorted(below, 0.025) / 100, abs=0.0101)
    assert high == pytest.approx(numpy.searchsorted(below, 0.975) / 100, abs=0.0101)


def test_length_control_by_hand():
    # two lengths of the same distance: the logistic regression goes through both groups' log-odds, 3:1 and 1:4
    ratios, wins = numpy.array([1.0] * 4 + [-1.0] * 5), numpy.array([1, 1, 1, 0] + [1, 0, 0, 0, 0], float)
    middle = (math.log(3) + math.log(1 / 4)) / 2
    controlled, slope = judge.length_controlled(wins, ratios)
    assert controlled == pytest.approx(1 / (1 + math.exp(-middle)), abs=1e-5)
    assert slope == pytest.approx((math.log(3) - math.log(1 / 4)) / 2, abs=1e-5)
    assert judge.length_controlled(numpy.array([0.0, 1.0]), numpy.array([-1.0, 1.0]))[0] == pytest.approx(0.5)


def test_bins_of_the_length_ratio():
    frame = pandas.DataFrame({"win": [1, 0, 1, 0.5, None], "length_ratio": [-2.0, 0.0, 0.1, 0.25, 3.0]})
    summary, bins = judge.win_rates(frame, 1)
    assert summary["examples"] == 5 and summary["invalid"] == 1 and summary["ties"] == 1
    assert summary["win_rate"] == pytest.approx(2.5 / 4)
    found = bins[["from", "to", "examples", "win_rate"]].values.tolist()
    assert found == [[-math.inf, -1.0, 1, 1.0], [0.0, 0.25, 2, 0.5], [0.25, 0.5, 1, 0.5]]
