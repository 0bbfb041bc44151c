"""The throughput benchmark: its arithmetic, its data, and that what it prints is what the run took."""

import importlib
import sys
from itertools import count
from pathlib import Path

import authors_peer
import pytest
import speed
import torch
import tyro
from conftest import read_csv, read_metrics, write_program
from datasets import Dataset, DatasetDict, load_from_disk
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

WORDS = 40


def args(**changes) -> speed.Args:
    return speed.Args(**{"stages": ("sft",), "device": "cpu", "batch_size": 2, "updates": 1, "warmup": 0} | changes)


@pytest.fixture
def work(tmp_path) -> Path:
    """Two posts and two pairs in numbered words, and a model of width 4 with 1 layer: 192 weights and a head of 160."""
    shape = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
    GPTNeoXConfig(**shape, vocab_size=WORDS).save_pretrained(tmp_path / "model")
    speed.word_tokenizer(WORDS).save_pretrained(tmp_path / "model")
    pad = WORDS - 1
    posts = {"query_token": [[pad, 1, 2, 3], [1, 2, 3, 4]], "reference_response_token": [[5, 0, pad], [5, 6, 0]]}
    pairs = {"query_token": posts["query_token"]}
    for side, (first, second) in (("chosen", (2, 1)), ("rejected", (1, 3))):
        labels = [[pad] * 4 + [5] * n + [pad] * (4 - n) for n in (first, second)]
        pairs[f"query_{side}_token_response_label"] = labels
    for name, rows in (("sft", posts), ("preference", pairs)):
        DatasetDict({"train": Dataset.from_dict(rows)}).save_to_disk(str(tmp_path / name))
    return tmp_path


def test_work_done_by_hand(work):
    # forward: 2 x weights x tokens, attention 4 x width x (token, key) pairs, half of a square of own keys
    one = 2 * 192 * 5 + 16 * (9 / 2 + 2 * (3 + 1))  # 3 and 2 tokens
    two = 2 * 192 * 7 + 16 * (16 / 2 + 3 * (4 + 1.5))  # 4 and 3
    assert speed.work_done("sft", args(), work, 0) == (6, (one + two + 2 * 160 * 12) / 2)
    second = args(batch_size=1, updates=2, warmup=1)  # the rows of a warm-up are not timed
    tokens = [5, 7][speed.row_order("sft", second, work)[1]]
    assert speed.work_done("sft", second, work, 0) == (tokens, {5: one, 7: two}[tokens] + 2 * 160 * tokens)
    one = 2 * 192 * 6 + 16 * (9 / 2 + 2 * (3 + 1) + 1 * (3 + 0.5))  # 3, 2 and 1
    two = 2 * 192 * 8 + 16 * (16 / 2 + 1 * (4 + 0.5) + 3 * (4 + 1.5))  # 4, 1 and 3
    assert speed.work_done("reward", args(), work, 0) == (7, (one + two) / 2)
    assert speed.work_done("dpo", args(), work, 0) == (7, (one + two + 2 * 160 * 7) / 2)
    one, two = 2 * 192 * 5 + 16 * (9 / 2 + 2 * (3 + 1)), 2 * 192 * 6 + 16 * (16 / 2 + 2 * (4 + 1))  # responses of 2
    assert speed.work_done("ppo", args(), work, 2) == (5.5, (2 * (one + two) + 2 * 160 * 4) / 2)


def test_matmul_rate_counts_two_operations_per_multiplication(work, monkeypatch):
    """(micro-batch of 8 x 5 tokens, width 4) x (4, 16) in one second of a clock that goes by seconds."""
    monkeypatch.setattr(speed.time, "perf_counter", count().__next__)
    assert speed.matmul_rate(args(micro_batch_size=8), work, 5) == 2 * 40 * 4 * 16


def test_the_authors_loop_steps_once_per_batch():
    """Micro-batches with losses w, 3 w, 5 w, 9 w of one weight, two to a batch: gradients 2 and 7."""
    weight = torch.nn.Parameter(torch.tensor(1.0))
    both = authors_peer.Accumulating(torch.optim.SGD([weight], lr=0.1), 2)
    after = []
    for factor in (1, 3, 5, 9):
        with both.accumulate(None):
            both.backward(factor * weight)
            both.step()
            both.zero_grad()
        after.append(round(weight.item(), 6))
    assert after == [1.0, 0.8, 0.8, 0.1]
    assert both.losses == pytest.approx([2.0, 5.6]) and len(both.ends) == 3


@pytest.mark.parametrize("width", [256, 1024])
def test_end_chance(width):
    torch.manual_seed(1)
    shape = {"hidden_size": width, "num_hidden_layers": 1, "num_attention_heads": 8, "vocab_size": 6_100}
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**shape, intermediate_size=width))
    speed.set_end_chance(model, 1 / 70)
    with torch.no_grad():
        chances = (model(torch.randint(6_100, (4, 50))).logits / 0.7).softmax(-1)[..., 0]
    assert chances.mean().item() == pytest.approx(1 / 70, rel=0.05)


def test_in_words_keeps_lengths_pads_and_ends(world):
    tokenizer = speed.with_pad(world.model)
    data = load_from_disk(str(world.dataset))
    for stretch in (1, 3):
        found = speed.in_words(data, tokenizer, WORDS, stretch)
        for old, new in zip(data["train"], found["train"], strict=True):
            for column in ("query_token", "reference_response_token", "query_reference_response_token"):
                pads = [token == tokenizer.pad_token_id for token in old[column] for _ in range(stretch)]
                assert [token == WORDS - 1 for token in new[column]] == pads
                assert new[column].count(0) == old[column].count(tokenizer.eos_token_id)
            assert speed.word_tokenizer(WORDS)(new["query"]).input_ids == [
                token for token in new["query_token"] if token != WORDS - 1
            ]


def test_the_peers_seconds_are_between_the_ends_of_its_counted_updates(work, tmp_path):
    """TRL's environment replaced by a program that answers with its settings and with fixed times."""
    (tmp_path / "runs").mkdir()
    found = {"ends": [10.0, 15.0, 16.0, 18.0], "losses": [3.0, 2.0, 1.0, None]}
    stand_in = f"""#!{sys.executable}
import json, sys
settings = json.load(open(sys.argv[2]))
json.dump({found!r} | {{"arguments": settings}}, open(settings["output"], "w"))
"""
    write_program(tmp_path / "peers/trl-1.16.0/bin/python", stand_in)
    changed = args(updates=3, warmup=1, peer="trl-1.16.0", peers=str(tmp_path / "peers"))
    answer = speed.peer("sft", changed, work, "sequential", learning_rate=1e-3)
    assert answer["seconds"] == (18 - 15) / 2 and answer["loss"] == 1.0
    settings = {"rows": speed.row_order("sft", changed, work).tolist(), "flags": ["sequential"], "learning_rate": 1e-3}
    assert settings.items() <= answer["arguments"].items()


def in_process(command: list, log=None) -> float:
    """A command line of ours without the seconds that a process of its own takes to begin; GiB that it never took."""
    module = importlib.import_module(Path(command[1]).stem)
    module.main(tyro.cli(module.Args, args=[*map(str, command[2:])]))
    return 1.5


def test_what_is_printed_is_what_the_runs_took(tmp_path, monkeypatch):
    """Ours alone on generated posts, two stages: the table's numbers again from the run's own metrics."""
    monkeypatch.chdir(tmp_path)  # main goes elsewhere
    monkeypatch.setattr(speed, "run", in_process)
    few = {512: 32}  # posts and comparisons
    monkeypatch.setattr(speed, "call", lambda script, *flags: in_process(["", script, *(few.get(x, x) for x in flags)]))
    monkeypatch.setitem(speed.SHAPES, "cpu", (16, 1, 2, 300))
    monkeypatch.setattr(sys, "argv", ["speed.py"])
    common = {"updates": 2, "warmup": 1, "batch_size": 4, "micro_batch_size": 2}
    common |= {"raw": "", "work": str(tmp_path / "work")}
    monkeypatch.setattr(speed, "matmul_rate", lambda args, work, tokens: 1e6)
    speed.main(args(stages=("sft", "ppo"), **common, output=str(tmp_path / "speed.csv")))
    table = {row["who"] + " " + row["stage"]: row for row in read_csv(tmp_path / "speed.csv")}
    assert list(table) == ["ours sft", "ours ppo"]
    passes = {"sft": 3, "ppo": 4 * 3}  # backward as two forward, four epochs
    for stage in passes:
        lines = read_metrics(tmp_path / "work/cpu/generated/runs" / stage)
        first, second = [line for line in lines if line["update"]]
        seconds = second["time/total"] - first["time/total"]
        assert table[f"ours {stage}"]["items/s"] == f"{4 / seconds:.3f} {speed.ITEMS[stage]}"
        small, length = args(updates=2, warmup=1, batch_size=4), second.get("response/length", 0)
        operations = passes[stage] * 4 * speed.work_done(stage, small, tmp_path / "work/cpu/generated", length)[1]
        assert table[f"ours {stage}"]["peak GiB"] == "1.50"
        if stage == "ppo":
            seconds = second["time/update"] - second["time/rollout"]
        assert table[f"ours {stage}"]["of a matrix product"] == f"{operations / seconds / 1e6:.2f}"
    queries = load_from_disk(tmp_path / "work/cpu/generated/sft")["train"]["query_token"]
    lengths = [speed.real_length(ids, 299) for ids in queries]
    assert 200 < sum(lengths) / len(lengths) < 512  # stretched to the length of real posts

    with pytest.raises(SystemExit, match="sft: grad_norm of update 2 is nan"):
        speed.check_finite("sft", [{"update": 1, "grad_norm": 1.0}, {"update": 2, "grad_norm": float("nan")}])
    with pytest.raises(SystemExit, match="trl-1.16.0/bin/python is missing"):
        speed.main(args(**common, peer="trl-1.16.0", peers=str(tmp_path), output=str(tmp_path / "speed.csv")))
