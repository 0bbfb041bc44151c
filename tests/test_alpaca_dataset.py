"""ensembles/alpaca_dataset.py: the format, the columns and the splits, against hand-made rows."""

import json

import alpaca_dataset
import check_data
import pytest
import torch
from conftest import write_jsonl
from datasets import load_from_disk
from safetensors.torch import load_file
from transformers import AutoTokenizer

import ppo

ROWS = [
    {"instruction": "Name a fruit.", "input": "", "output": "An apple."},
    {"instruction": "Add these.", "input": "1\n2", "output": "3"},
    {"instruction": "Spell <|endoftext|> out.", "output": "It is [PAD] text."},  # text, and not the tokens
    {"instruction": "word " * 40, "input": "", "output": "Too long a prompt."},
    {"instruction": "Say it all.", "input": "", "output": "word " * 40},
    {"instruction": "Say nothing.", "input": "", "output": " "},
    {"instruction": "Break\u2028here.", "input": "", "output": "The line\x85goes on."},
]


@pytest.fixture(scope="module")
def made(world, tmp_path_factory):
    """Folder written of ROWS in each split, with narrow limits."""
    root = tmp_path_factory.mktemp("alpaca")
    rows = [{"split": split} | row for split in ("sft", "pref", "unlabeled", "val") for row in ROWS]
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    (root / "raw.jsonl").write_text("".join(lines), encoding="utf-8")
    args = alpaca_dataset.Args(str(root / "raw.jsonl"), str(world.model), str(root / "out"), 40, 24)
    alpaca_dataset.main(args)
    return root / "out"


def test_prompts_and_answers_in_the_paper_s_format(made):
    """Lengths, labels and both in one row: the next test, where eval/check_data.py checks them."""
    tokenizer = AutoTokenizer.from_pretrained(made / "base")
    data = load_from_disk(str(made / "sft"))["train"]
    assert data["id"][:] == ["sft_000000", "sft_000001", "sft_000002", "sft_000006"]  # two too long, one empty
    prompts = ["Name a fruit.", "Add these.\n1\n2", "Spell <|endoftext|> out.", "Break\u2028here."]
    texts = [f"<|prompter|>{prompt}<|endoftext|><|assistant|>" for prompt in prompts]
    answers = [f"{row['output']}<|endoftext|>" for row in (*ROWS[:3], ROWS[6])]
    assert data["query"][:] == texts and data["reference_response"][:] == answers
    assert data["query_reference_response"][:] == [a + b for a, b in zip(texts, answers, strict=True)]
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    turns = tokenizer.convert_tokens_to_ids(["<|prompter|>", "<|assistant|>"])
    assert len({pad, eos, *turns}) == 4 and turns == [len(tokenizer) - 3, len(tokenizer) - 2] and pad == turns[1] + 1
    for row, prompt, answer in zip(data, prompts, answers, strict=True):
        # piece by piece, without the special tokens, whose text stays text
        def plain(text):
            return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

        query = [turns[0], *plain(prompt), eos, turns[1]]
        said = [*plain(answer.removesuffix("<|endoftext|>")), eos]
        assert row["query_token"] == [pad] * (40 - len(query)) + query
        assert row["reference_response_token"] == said + [pad] * (24 - len(said))
        assert query.count(eos) == 1 and said.count(pad) == 0
    whole = tokenizer(texts[1], add_special_tokens=False)["input_ids"]  # the whole text with its special tokens
    assert whole == [token for token in data[1]["query_token"] if token != pad]


def test_the_checks_and_the_stages_accept_it_though_a_prompt_spells_eos(made, world, capsys):
    tokenizer = ppo.load_tokenizer(str(made / "base"))
    for name in ("sft", "pref", "unlabeled"):
        check_data.main(check_data.Args(str(made / name), str(made / "base")))
        assert "train: 4 rows, no damage" in capsys.readouterr().out
        data = ppo.load_splits("--dataset", str(made / name), ["query_token"], tokenizer)
        assert [len(data[split]) for split in ("train", "validation")] == [4, 4]
    with pytest.raises(SystemExit, match="train: 0 of 4 rows "):  # a tokenizer without turns
        ppo.load_splits("--dataset", str(made / "sft"), ["query_token"], ppo.load_tokenizer(str(world.model)))


def test_the_base_is_as_it_was_but_for_two_tokens(made, world):
    before, after = (load_file(folder / "model.safetensors") for folder in (world.model, made / "base"))
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert torch.equal(weight, after[name][: len(weight)]), name
    old, new = (AutoTokenizer.from_pretrained(folder) for folder in (world.model, made / "base"))
    assert new.get_vocab() == old.get_vocab() | {"<|prompter|>": len(old), "<|assistant|>": len(old) + 1}
    text = "a <|prompter|>b<|assistant|> c"
    assert new.decode(new(text, add_special_tokens=False)["input_ids"], skip_special_tokens=True) == text


def test_splits_of_rows_without_any(tmp_path):
    rows = [(f"row {i}", {"n": i, "instruction": str(i)}) for i in range(520)]
    found = alpaca_dataset.deal_out(rows, 3)
    assert [len(x) for x in found.values()] == [100, 100, 200, 20, 100]  # sft, pref, unlabeled, val, unused
    dealt = [row["n"] for split in found.values() for _, row in split]
    assert sorted(dealt) == list(range(520)) and dealt != list(range(520))
    assert alpaca_dataset.deal_out(rows, 3) == found != alpaca_dataset.deal_out(rows, 4)
    answers = alpaca_dataset.deal_out([(where, row | {"n": n}) for where, row in rows for n in (0, 1)], 3)  # two each
    for split, items in found.items():
        prompts = [row["instruction"] for _, row in items for _ in (0, 1)]
        assert [row["instruction"] for _, row in answers[split]] == prompts
    named = [("a", {"split": "val"}), ("b", {"split": "sft"}), ("c", {"split": "val"})]
    assert [*alpaca_dataset.deal_out(named, 1).values()] == [named[1:2], [], [], [named[0], named[2]], []]
    with pytest.raises(SystemExit, match="c: `split` must be one of sft, pref"):
        alpaca_dataset.deal_out([*named[:2], ("c", {"split": "test"})], 1)


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"instruction": " ", "output": "x"}, r"x\.jsonl, row 1: instruction"),
        (ROWS[0] | {"input": "a <|assistant|>b"}, r"x\.jsonl, row 1: input holds"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(world, tmp_path, row, named):
    file = write_jsonl(tmp_path / "x.jsonl", [row | {"split": "sft"}])
    with pytest.raises(SystemExit, match=f"^error: .*{named}"):
        alpaca_dataset.main(alpaca_dataset.Args(str(file), str(world.model), str(tmp_path / "out")))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.jsonl"]
