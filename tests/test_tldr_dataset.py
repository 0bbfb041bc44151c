"""tldr_dataset.py: templates, truncation, tokens, labels, statistics and errors against hand-made cases."""

import csv
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from datasets import load_from_disk
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
sys.path.insert(0, str(ROOT))

from tldr_dataset import (  # noqa: E402
    Args,
    encode,
    format_query,
    main,
    mask_query,
    policy_pair_counts,
    process_preference_row,
    process_sft_row,
    truncate_query,
    truncation,
)

EOS = "<|endoftext|>"
WORDS = (
    "the cat sat on a mat and was then seen by Anna's café neighbours in 1999 , who said : why not ?! ünïcödé".split()
)
real_data = pytest.mark.skipif(not (SHARED / "data/tokenizer").exists(), reason="needs ../shared/data")


def sentence(seed: int, words: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def byte_level_tokenizer(pad_token: str | None = None) -> PreTrainedTokenizerFast:
    """A small byte-level BPE tokenizer of the same kind as Pythia's."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [EOS] + ([pad_token] if pad_token else [])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    backend.train_from_iterator([sentence(0, 2000)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS, bos_token=EOS, pad_token=pad_token)


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    return tokenizer


@pytest.fixture(scope="module")
def pythia():
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "data/tokenizer")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    return tokenizer


def sft_row(seed: int = 0, **changes) -> dict:
    row = {"id": f"t{seed}", "subreddit": "cats", "title": sentence(seed + 1, 5), "post": sentence(seed + 2, 30)}
    return row | {"summary": sentence(seed + 3, 6)} | changes


def pair(seed: int = 0, policies=("ref", "sup2"), article: str | None = None, info: dict | None = None, **changes):
    tldr = {"subreddit": "cats", "title": sentence(seed + 1, 5), "post": sentence(seed + 2, 30), "article": None}
    news = {"subreddit": None, "title": None, "post": None, "site": "news", "article": article}
    summaries = [
        {"text": " " + sentence(seed + 3 + i, 6 + i), "policy": policy, "note": None}
        for i, policy in enumerate(policies)
    ]
    row = {"info": {"id": f"t{seed}", **(news if article else tldr), **(info or {})}, "summaries": summaries}
    row |= {"choice": seed % 2, "worker": "w", "batch": "batch3", "split": "train", "extra": {"confidence": 5}}
    return row | changes


def write_jsonl(path: Path, rows: list):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path):
    """Raw inputs: posts and comparisons (with CNN/DM pairs in the validation split) and a tokenizer."""
    write_jsonl(tmp_path / "posts/train.jsonl", [sft_row(i) for i in range(6)])
    write_jsonl(tmp_path / "posts/validation.jsonl", [sft_row(i, subreddit=None) for i in range(3)])
    train = [pair(i) for i in range(4)] + [pair(9, ("sup2", "sup2")), pair(10, ("sup2", "ref"))]
    validation = [pair(20, batch=None, split="valid1", extra={"confidence": None}), pair(21, (None, "ref"))]
    validation[1:1] = [pair(22, ("a", "b"), article=sentence(1, 40), batch="cnndm0")]
    validation += [pair(23, ("a", "b"), article=sentence(2, 40), batch="some_other_batch")]
    write_jsonl(tmp_path / "comparisons/train.jsonl", train)
    write_jsonl(tmp_path / "comparisons/validation.jsonl", validation)
    byte_level_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return tmp_path


def arguments(folder: Path, **changes) -> Args:
    paths = {"sft_dataset": folder / "posts", "preference_dataset": folder / "comparisons"}
    paths |= {"tokenizer": folder / "tokenizer", "output_dir": folder / "out"}
    return Args(**{name: str(path) for name, path in paths.items()}, **changes)


def test_the_limits_are_the_papers():
    limits = {field: value for field, value in vars(Args()).items() if field.startswith("max_")}
    assert limits == {
        "max_query_length": 512,
        "max_query_length_cnndm": 1919,
        "max_sft_response_length": 53,
        "max_sft_query_response_length": 562,
        "max_rm_response_length": 169,
        "max_rm_query_response_length": 638,
        "max_rm_response_length_cnndm": 155,
        "max_rm_query_response_length_cnndm": 2021,
    }


# ---- Detail 2: queries -----------------------------------------------------------------------------


def naive_truncation(prefix: str, body: str, suffix: str, tokenizer, max_length: int) -> str:
    """The rule of Detail 2 word for word: one cut at a time, each one tokenised."""
    while len(encode(tokenizer, prefix + body + suffix)) > max_length:
        if "\n" in body:
            body = body[: len(body) - 1 - body[::-1].index("\n")]
        else:
            body = body[:-1]
    return prefix + body + suffix


def test_templates():
    row = {"subreddit": "cats", "title": "T {x}", "post": "P\n\nQ"}
    assert format_query(row) == "SUBREDDIT: r/cats\n\nTITLE: T {x}\n\nPOST: P\n\nQ\n\nTL;DR:"
    assert format_query({**row, "subreddit": None}).startswith("SUBREDDIT: r/\n\nTITLE")
    assert format_query({**row, "article": "A\nB"}) == "Article:\nA\nB\n\nTL;DR:\n"


def test_truncation_cuts_at_newlines_then_characters(tokenizer):
    title, first = "a title that stays", "the cat sat on a mat"
    row = {"subreddit": "cats", "title": title, "post": f"{first}\nand was then seen\n\nby Anna"}

    def length(post):
        return len(encode(tokenizer, format_query({**row, "post": post})))

    cases = [
        (row["post"], "none"),
        (f"{first}\nand was then seen\n", "newline"),  # of two newlines only the last one goes
        (f"{first}\nand was then seen", "newline"),
        (first, "newline"),
        ("the cat sat on", "character"),
        ("the", "character"),
    ]
    for post, how in cases:
        query, tokens = truncate_query(row, tokenizer, length(post))
        prefix = f"SUBREDDIT: r/cats\n\nTITLE: {title}\n\nPOST: "
        assert query == naive_truncation(prefix, row["post"], "\n\nTL;DR:", tokenizer, length(post))
        assert tokens == tokenizer.encode(query, add_special_tokens=False) and len(tokens) <= length(post)
        assert truncation(row, query) == how
        if how != "character":  # a character cut may fit a little longer than the text that set the limit
            assert query == f"{prefix}{post}\n\nTL;DR:"
    assert row["post"].endswith("Anna")  # the row itself is unchanged


def test_truncation_of_an_article_and_of_a_post_starting_with_a_newline(tokenizer):
    row = {"article": "the cat sat\non a mat", "post": None, "title": None}
    limit = len(encode(tokenizer, "Article:\nthe cat sat\n\nTL;DR:\n"))
    assert truncate_query(row, tokenizer, limit)[0] == "Article:\nthe cat sat\n\nTL;DR:\n"
    row = {"subreddit": "s", "title": "t", "post": "\nthe cat sat"}
    limit = len(encode(tokenizer, format_query({**row, "post": ""})))
    assert truncate_query(row, tokenizer, limit)[0] == "SUBREDDIT: r/s\n\nTITLE: t\n\nPOST: \n\nTL;DR:"
    with pytest.raises(ValueError, match="post.* more than"):
        truncate_query(row, tokenizer, limit - 1)


def messy_text(rng: random.Random) -> str:
    pieces = WORDS + [
        "\n",
        "\n\n",
        "\n \n",
        "  ",
        "     ",
        "\t",
        "\r\n",
        "日本語",
        "🙂🙂",
        "aaaaaaaa",
        "!!!",
        "\u2028",
        EOS,
    ]
    separators = rng.choice([[" "], [" ", "\n"], ["", " ", "  ", "\n", "\n\n"]])
    return "".join(rng.choice(pieces) + rng.choice(separators) for _ in range(rng.randrange(1, 60)))


def check_against_naive(tokenizer, rounds: int):
    rng = random.Random(7)
    kinds = Counter()
    for _ in range(rounds):
        row = {"subreddit": "s", "title": "t", "post": messy_text(rng).replace(EOS, "")}
        full = len(encode(tokenizer, format_query(row)))
        empty = len(encode(tokenizer, format_query({**row, "post": ""})))
        limit = rng.randrange(empty, full + 2)
        query, _ = truncate_query(row, tokenizer, limit)
        prefix = "SUBREDDIT: r/s\n\nTITLE: t\n\nPOST: "
        assert query == naive_truncation(prefix, row["post"], "\n\nTL;DR:", tokenizer, limit), repr(row["post"])
        kinds[truncation(row, query)] += 1
    assert min(kinds[kind] for kind in ("none", "newline", "character")) > 0


def test_truncation_equals_the_naive_rule_on_random_text(tokenizer):
    check_against_naive(tokenizer, 150)


@real_data
def test_truncation_equals_the_naive_rule_with_the_pythia_tokenizer(pythia):
    check_against_naive(pythia, 150)


@pytest.mark.parametrize("separator", [" ", "\n"])
def test_truncation_of_a_megabyte_ends_soon(tokenizer, separator):
    row = {"subreddit": "s", "title": "t", "post": separator.join(["cat"] * 250_000)}
    start = time.monotonic()
    query, tokens = truncate_query(row, tokenizer, 512)
    assert time.monotonic() - start < 60 and 505 < len(tokens) <= 512 and query.endswith("cat\n\nTL;DR:")


@real_data
def test_truncation_of_all_real_posts(pythia):
    kinds = Counter()
    for path in sorted((SHARED / "data/tldr_posts").glob("*.jsonl")):
        for line in path.read_text().split("\n")[:-1]:
            row = json.loads(line)
            prefix = f"SUBREDDIT: r/{row['subreddit']}\n\nTITLE: {row['title']}\n\nPOST: "
            full = len(pythia.encode(f"{prefix}{row['post']}\n\nTL;DR:", add_special_tokens=False))
            query, tokens = truncate_query(row, pythia, 512)
            kind = truncation(row, query)
            kinds[kind] += 1
            assert (kind != "none") == (full > 512) and len(tokens) <= 512
            if kind == "none":
                assert query == f"{prefix}{row['post']}\n\nTL;DR:"
                continue
            assert query == naive_truncation(prefix, row["post"], "\n\nTL;DR:", pythia, 512)
            kept = query.removeprefix(prefix).removesuffix("\n\nTL;DR:")
            assert row["post"].startswith(kept) and (kind == "character" or row["post"][len(kept)] == "\n")
    assert kinds == {"none": 1985, "newline": 14, "character": 1}


# ---- Details 3-5: tokens -----------------------------------------------------------------------------


def test_sft_row(tokenizer):
    args = Args(max_query_length=200, max_sft_response_length=40, max_sft_query_response_length=230)
    row = sft_row(summary="who was seen")
    columns = process_sft_row(row, tokenizer, args)
    pad, eos = tokenizer.convert_tokens_to_ids(["[PAD]", EOS])
    assert pad != eos
    query = tokenizer.encode(format_query(row), add_special_tokens=False)
    response = tokenizer.encode(" who was seen" + EOS, add_special_tokens=False)
    assert response[-1] == eos
    assert columns["query_token"] == [pad] * (200 - len(query)) + query
    assert columns["query_token_len"] == len(query)
    assert columns["reference_response"] == " who was seen" + EOS
    assert columns["reference_response_token"] == response + [pad] * (40 - len(response))
    assert columns["reference_response_token_len"] == len(response)
    assert columns["query_reference_response"] == format_query(row) + " who was seen" + EOS
    joined = query + response  # a byte-level tokenizer joins nothing over ": w"
    assert columns["query_reference_response_token"] == joined + [pad] * (230 - len(joined))
    assert columns["query_reference_response_token_len"] == len(joined)
    label = [pad] * len(query) + response + [pad] * (230 - len(joined))
    assert columns["query_reference_response_token_response_label"] == label
    assert [columns[field] for field in row] == list(row.values())


def test_preference_row(tokenizer):
    args = Args(max_query_length=200, max_rm_response_length=70, max_rm_query_response_length=260)
    row = pair(1, ("sup2", "ref"), choice=1, extra={"confidence": 8})
    row["summaries"][0]["text"], row["summaries"][1]["text"] = " the cat", "no space before"
    columns = process_preference_row(row, tokenizer, args)
    assert (columns["rejected"], columns["chosen"]) == (" the cat" + EOS, " no space before" + EOS)
    assert (columns["chosen_policy"], columns["rejected_policy"], columns["policies"]) == ("ref", "sup2", "ref--sup2")
    assert columns["id"] == row["info"]["id"] and columns["extra"] == {"confidence": 8}
    pad = tokenizer.pad_token_id
    for name in ("chosen", "rejected"):
        response = tokenizer.encode(columns[name], add_special_tokens=False)
        query = tokenizer.encode(format_query(row["info"]), add_special_tokens=False)
        assert columns[f"{name}_token"] == response + [pad] * (70 - len(response))
        assert columns[f"{name}_token_len"] == len(response)
        rest = [pad] * (260 - len(query) - len(response))
        assert columns[f"query_{name}_token"] == query + response + rest
        assert columns[f"query_{name}_token_len"] == len(query) + len(response)
        assert columns[f"query_{name}_token_response_label"] == [pad] * len(query) + response + rest
        assert columns[f"query_{name}"] == format_query(row["info"]) + columns[name]
    swapped = process_preference_row({**row, "choice": 0}, tokenizer, args)
    assert (swapped["chosen_token"], swapped["rejected_token"]) == (columns["rejected_token"], columns["chosen_token"])
    nameless = process_preference_row(pair(1, (None, "zeta")), tokenizer, Args())
    assert (nameless["policies"], nameless["rejected_policy"]) == ("null--zeta", None)


def test_cnndm_row_uses_its_own_template_widths_and_label(tokenizer):
    row = pair(2, article=sentence(3, 50), choice=0)
    columns = process_preference_row(row, tokenizer, Args())
    widths = {name: len(columns[f"{name}_token"]) for name in ("query", "chosen", "rejected", "query_chosen")}
    assert widths == {"query": 1919, "chosen": 155, "rejected": 155, "query_chosen": 2021}
    # the query ends in a newline that the joined text does not have: masking by the query's length would hide the
    # first token of the response
    pad = tokenizer.pad_token_id
    response = tokenizer.encode(columns["chosen"], add_special_tokens=False)
    label = columns["query_chosen_token_response_label"]
    assert [token for token in label if token != pad] == response
    assert label.index(response[0]) == columns["query_token_len"] - 1


def test_label_masks_the_common_prefix_only():
    pad = 99
    assert mask_query([1, 2, 3], [1, 2, 3, 4, 5, pad], pad) == [pad, pad, pad, 4, 5, pad]
    assert mask_query([1, 2, 3], [1, 2, 34, 5, pad], pad) == [pad, pad, 34, 5, pad]  # 3 and 4 join into 34
    assert mask_query([1, 2, 3], [7, 2, 3, 4], pad) == [7, 2, 3, 4]

    class Joining:
        """One token per character, except that ":" and a space behind it are a single token."""

        pad_token_id, eos_token, eos_token_id = pad * 1000, "<eos>", 3

        def __call__(self, text, **_):
            return {"input_ids": [sum(map(ord, piece)) for piece in re.findall(r": (?=w)|.", text, re.DOTALL)]}

    columns = process_sft_row(sft_row(summary="why"), Joining(), Args(max_sft_query_response_length=900))
    shared = columns["query_token_len"] - 1
    expected = [pad * 1000] * shared + [ord(":") + ord(" "), ord("w"), ord("h"), ord("y"), 3]
    assert columns["query_reference_response_token_response_label"][: shared + 5] == expected


def test_a_leading_space_is_added_once_and_other_text_kept(tokenizer):
    for summary, expected in [("a cat ", " a cat "), (" a cat", " a cat"), ("  a cat", "  a cat"), ("\na", " \na")]:
        columns = process_sft_row(sft_row(summary=summary), tokenizer, Args())
        assert columns["reference_response"] == expected + EOS


def test_text_that_spells_special_tokens_stays_text(tokenizer):
    row = sft_row(post=f"the {EOS} cat [PAD] sat", summary=f"a {EOS} mat")
    columns = process_sft_row(row, tokenizer, Args())
    joined = columns["query_reference_response_token"][: columns["query_reference_response_token_len"]]
    assert joined.count(tokenizer.eos_token_id) == 1 and joined[-1] == tokenizer.eos_token_id
    assert tokenizer.pad_token_id not in joined


def test_unicode_survives(tokenizer):
    post = "日本語 🙂 e\u0301 \u2028 \u00a0 \u200d"
    columns = process_sft_row(sft_row(post=post), tokenizer, Args(max_query_length=600))
    assert post in columns["query"] and columns["post"] == post
    assert tokenizer.decode(columns["query_token"][-columns["query_token_len"] :]) == columns["query"]


# ---- Detail 6 --------------------------------------------------------------------------------------------


def test_policy_pair_counts():
    policies = ["b--c", "a--b", "a--a", "b--c", "a--a", "b--c"]
    assert policy_pair_counts(policies) == [("b--c", 3), ("a--a", 2), ("a--b", 1)]
    assert policy_pair_counts(["z", "y"]) == [("y", 1), ("z", 1)]


# ---- whole runs ------------------------------------------------------------------------------------------


def read_csv(path: Path) -> list[dict]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_whole_run(folder, capsys):
    main(arguments(folder))
    printed = capsys.readouterr().out
    assert "absent and left out: test" in printed
    out = folder / "out"
    assert sorted(path.name for path in folder.iterdir()) == ["comparisons", "out", "posts", "tokenizer"]
    assert sorted(path.name for path in out.iterdir()) == ["preference", "sft", "statistics"]
    sft, preference = load_from_disk(str(out / "sft")), load_from_disk(str(out / "preference"))
    assert {split: len(data) for split, data in sft.items()} == {"train": 6, "validation": 3}
    assert {split: len(data) for split, data in preference.items()} == {
        "train": 6,
        "validation": 2,
        "validation_cnndm": 2,
    }
    assert len({str(data.features) for data in preference.values()}) == 1
    assert preference["validation_cnndm"]["batch"][:] == ["cnndm0", "some_other_batch"]
    assert preference["validation"]["id"][:] == ["t20", "t21"]
    assert sft["validation"]["subreddit"][:] == [""] * 3

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    expected = process_preference_row(pair(1), tokenizer, Args())
    expected["info"] |= {"site": None}
    assert preference["train"][1] == expected
    arrays = preference.with_format("numpy")
    assert arrays["train"][:]["query_chosen_token"].shape == (6, 638)
    assert arrays["validation_cnndm"][:]["query_rejected_token"].shape == (2, 2021)
    assert arrays["train"][:]["query_token"].dtype == np.int64

    statistics = out / "statistics"
    pairs = {row["split"]: int(row["unique pairs"]) for row in read_csv(statistics / "policy_pairs.csv")}
    assert pairs == {"train": 2, "validation": 2, "validation_cnndm": 1}
    counts = [(row["policies"], int(row["count"])) for row in read_csv(statistics / "policy_pairs_train.csv")]
    assert counts == [("ref, sup2", 5), ("sup2, sup2", 1)]
    counts = [(row["policies"], int(row["count"])) for row in read_csv(statistics / "policy_pairs_validation.csv")]
    assert counts == [("null, ref", 1), ("ref, sup2", 1)]
    rows = [list(row.values()) for row in read_csv(statistics / "groups.csv") if row["split"] == "validation"]
    assert rows == [
        ["validation", "batch", "batch3", "1"],
        ["validation", "batch", "null", "1"],
        ["validation", "split", "train", "1"],
        ["validation", "split", "valid1", "1"],
        ["validation", "confidence", "5", "1"],
        ["validation", "confidence", "null", "1"],
    ]
    nulls = [(row["dataset"], row["split"], row["null subreddit"]) for row in read_csv(statistics / "truncation.csv")]
    assert nulls[:2] == [("sft", "train", "0"), ("sft", "validation", "3")] and nulls[-1][2] == "0"
    lengths = {(row["dataset"], row["split"], row["text"]): row for row in read_csv(statistics / "lengths.csv")}
    measured = sorted(sft["train"]["reference_response_token_len"][:])
    row = lengths["sft", "train", "reference_response"]
    assert [row["min"], row["max"], row["limit"]] == [str(measured[0]), str(measured[-1]), "53"]
    assert float(row["median"]) == (measured[2] + measured[3]) / 2
    assert lengths["preference", "validation_cnndm", "query_chosen"]["limit"] == "2021"
    assert lengths["preference", "validation_cnndm", "query"]["limit"] == "1919"
    assert lengths["preference", "train", "rejected"]["limit"] == "169"
    assert all((statistics / f"lengths_{name}.png").stat().st_size > 5000 for name in ("sft", "preference"))

    with pytest.raises(SystemExit, match="out already holds data: remove it"):
        main(arguments(folder))


def test_parquet_cnndm_file_graded_columns_and_another_pad_token(folder):
    from pandas import DataFrame

    byte_level_tokenizer("<pad>").save_pretrained(folder / "tokenizer")
    (folder / "posts/train.jsonl").unlink()
    rows = [sft_row(i) | {"tag": tag} for i, tag in enumerate(("safety", None, "helpfulness", "safety"))]
    DataFrame(rows).to_parquet(folder / "posts/train.parquet")
    write_jsonl(folder / "comparisons/validation_cnndm.jsonl", [pair(30, article="the cat")])
    train = [pair(0, margin=1, grade="a", tag=None), pair(1, margin=0.5, grade=None), pair(2)]
    write_jsonl(folder / "comparisons/train.jsonl", train)
    main(arguments(folder))
    sft, tokenizer = load_from_disk(str(folder / "out/sft")), AutoTokenizer.from_pretrained(folder / "tokenizer")
    assert len(sft["train"]) == 4 and sft["train"]["tag"][:] == ["safety", None, "helpfulness", "safety"]
    assert sft["train"][0]["query_token"][0] == len(tokenizer) != tokenizer.pad_token_id  # Detail 3: always [PAD]
    preference = load_from_disk(str(folder / "out/preference"))
    assert preference["validation_cnndm"]["id"][:] == ["t22", "t23", "t30"]
    assert preference["train"]["margin"][:] == [1.0, 0.5, None]
    assert preference["train"]["grade"][:] == ["a", None, None]
    assert "tag" not in preference["train"].column_names and "margin" in preference["validation"].column_names


BAD_INPUTS = {
    "empty summary": ("posts/train", sft_row(summary="  "), "row 3: summary is empty"),
    "null post": ("posts/train", sft_row(post=None), "row 3: post should be text, not None"),
    "number as title": ("posts/validation", sft_row(title=7), "row 3: title should be text, not 7"),
    "number as subreddit": ("posts/train", sft_row(subreddit=7), "row 3: subreddit should be text"),
    "half a surrogate pair": ("posts/train", sft_row(post="\ud83d"), "row 3: post holds half a surrogate"),
    "invalid JSON": ("posts/train", '{"id": \n', "row 3: invalid JSON"),
    "no object": ("posts/train", "[1]\n", "row 3: not a JSON object"),
    "long title": ("posts/train", sft_row(title="?" * 600), r"row 3: post: the query has \d+ tokens without it"),
    "long summary": (
        "posts/train",
        sft_row(summary="?" * 60),
        "row 3: reference_response_token has 6[12] tokens, more than the limit of 53: raise --max-sft-response-length",
    ),
    "choice true": ("comparisons/train", pair(choice=True), "row 3: choice should be 0 or 1, not True"),
    "choice 2": ("comparisons/train", pair(choice=2), "row 3: choice should be 0 or 1, not 2"),
    "choice text": ("comparisons/train", pair(choice="1"), "row 3: choice should be 0 or 1, not '1'"),
    "choice null": ("comparisons/validation", pair(choice=None), "row 3: choice should be 0 or 1, not None"),
    "one summary": ("comparisons/train", pair(policies=("a",)), "row 3: summaries should be a list of two"),
    "three summaries": ("comparisons/train", pair(policies="abc"), "row 3: summaries should be a list of two"),
    "empty text": (
        "comparisons/train",
        pair(summaries=[{"text": " a"}, {"text": " "}]),
        r"row 3: summaries\[1\].text is empty",
    ),
    "no text": ("comparisons/train", pair(summaries=[{"txt": " a"}, {}]), r"row 3: summaries\[0\].text is missing"),
    "null title": ("comparisons/train", pair(info={"title": None}), "row 3: info.title should be text, not None"),
    "info null": ("comparisons/train", {**pair(), "info": None}, "row 3: info.title is missing"),
    "confidence": (
        "comparisons/train",
        pair(extra={"confidence": "5"}),
        "row 3: extra.confidence should be an integer",
    ),
    "margin": ("comparisons/train", pair(margin=[1]), "row 3: margin should be a number or text"),
    "article in train": ("comparisons/train", pair(article="the cat"), "row 3: info.article: a CNN/DM row in train"),
    "cnndm without article": ("comparisons/validation", pair(batch="cnndm2"), "row 3: info.article should be text"),
    "long article summary": (
        "comparisons/validation",
        pair(article="a", summaries=[{"text": "?" * 180}, {"text": "a"}]),
        r"row 3: (chosen|rejected)_token has .* limit of 155: raise --max-rm-response-length-cnndm",
    ),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_input_names_file_row_and_field(folder, case):
    file, bad, message = BAD_INPUTS[case]
    path = folder / f"{file}.jsonl"
    rows = path.read_text().splitlines(keepends=True)
    write_jsonl(path, [*rows[:2], bad, *rows[2:], bad])  # the second bad row must not be the one that is named
    before = sorted(folder.iterdir())
    with pytest.raises(SystemExit) as error:
        main(arguments(folder))
    assert re.match(f"error: {re.escape(str(path))}, {message}", error.value.code), error.value.code
    assert sorted(folder.iterdir()) == before  # neither output nor temporary folder is left


def test_a_long_row_passes_when_its_flag_is_raised(folder):
    write_jsonl(folder / "posts/train.jsonl", [sft_row(summary="?" * 60)])
    with pytest.raises(SystemExit, match="raise --max-sft-response-length"):
        main(arguments(folder))
    main(arguments(folder, max_sft_response_length=70))
    assert len(load_from_disk(str(folder / "out/sft"))["train"][0]["reference_response_token"]) == 70


def test_bad_files(folder):
    def expect(message: str, **changes):
        with pytest.raises(SystemExit, match=message):
            main(Args(**(vars(arguments(folder)) | changes)))
        assert not list(folder.glob("out*"))

    train = folder / "posts/train.jsonl"
    good = train.read_text()
    renamed = [{"headline" if key == "title" else key: value for key, value in sft_row().items()}]
    write_jsonl(train, renamed)
    expect(r"posts/train.jsonl has no column title; found headline, id, post, subreddit, summary")
    train.write_text("\n \n")
    expect(r"posts/train.jsonl is empty")
    train.write_bytes(b'{"id": "\xff"}\n')
    expect(r"posts/train.jsonl.*not UTF-8")
    train.write_text(good)
    (folder / "posts/train.parquet").write_text("x")
    expect("both train.jsonl and train.parquet")
    (folder / "posts/train.parquet").unlink()
    (folder / "posts/test.parquet").write_text("x")
    expect("test.parquet: not a parquet file")
    (folder / "posts/test.parquet").unlink()
    (folder / "nothing").mkdir()
    expect("has none of the files train.jsonl", preference_dataset=str(folder / "nothing"))
    expect("is not a folder", sft_dataset=str(folder / "absent"))
    expect("--tokenizer .* cannot be loaded", tokenizer=str(folder / "absent"))
    expect("--push-to-hub needs --hub-id-sft", push_to_hub=True)
    tokenizer = byte_level_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder / "endless")
    expect("has no EOS token", tokenizer=str(folder / "endless"))


def test_the_command_reports_errors_on_stderr(folder):
    command = [sys.executable, ROOT / "tldr_dataset.py", "--sft-dataset", folder / "absent", "--tokenizer"]
    command += [folder / "tokenizer", "--preference-dataset", folder / "comparisons", "--output-dir", folder / "out"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and "absent is not a folder" in done.stderr
    assert "Traceback" not in done.stderr and not (folder / "out").exists()


# ---- Hub -------------------------------------------------------------------------------------------------


def test_push_without_a_hub_keeps_the_data_and_says_so(folder, monkeypatch):
    from datasets import DatasetDict

    def refuse(*_, **__):
        raise ConnectionError("no route to the Hub")

    monkeypatch.setattr(DatasetDict, "push_to_hub", refuse)
    with pytest.raises(SystemExit, match="no route to the Hub") as error:
        main(arguments(folder, push_to_hub=True, hub_id_sft="me/a", hub_id_preference="me/b"))
    assert (
        f"complete in {folder}/out" in error.value.code and "push_to_hub('me/a', revision='main')" in error.value.code
    )
    assert len(load_from_disk(str(folder / "out/sft"))["train"]) == 6


@pytest.mark.skipif(not (SHARED / "tools/loopback_hub.py").exists(), reason="needs ../shared/tools")
def test_push_to_a_hub_on_the_loopback(folder):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, SHARED / "tools/loopback_hub.py", "--root", folder / "hub", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    environment = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
    environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "hf_fake"}
    environment |= {"HF_HOME": str(folder / "home")}
    command = [sys.executable, ROOT / "tldr_dataset.py", "--tokenizer", folder / "tokenizer", "--push-to-hub"]
    command += ["--hub-id-sft", "me/sft", "--hub-id-preference", "me/preference"]
    try:
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        local = ["--sft-dataset", folder / "posts", "--preference-dataset", folder / "comparisons"]
        done = subprocess.run(
            [*map(str, command + local), "--output-dir", str(folder / "out")],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        url = f"http://127.0.0.1:{port}/datasets/me/preference/resolve/main/README.md"
        with urllib.request.urlopen(url) as response:
            card = response.read().decode()
        assert re.findall(r"name: (\w+)\n +num_bytes: \d+\n +num_examples: (\d+)", card) == [
            ("train", "6"),
            ("validation", "2"),
            ("validation_cnndm", "2"),
        ]
        for text in ("| `query_chosen_token_response_label` |", "--push-to-hub", "| train | query_chosen |"):
            assert text in card
    finally:
        server.terminate()
        server.wait()
