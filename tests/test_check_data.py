"""eval/check_data.py against data sets that tldr_dataset.py made, whole and damaged in one place each."""

import re
from collections.abc import Callable
from pathlib import Path

import check_data
import pytest
from conftest import files
from datasets import Dataset, DatasetDict, load_from_disk
from test_tldr_dataset import EOS, byte_level_tokenizer, pair, sft_row

import tldr_dataset
from tldr_dataset import encode


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    return tokenizer


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tokenizer) -> Path:
    """Both data sets, of few and narrow rows."""
    root = tmp_path_factory.mktemp("finished")
    for name in ("sft", "preference"):
        data = DatasetDict()
        for split, count in (("train", 6), ("validation", 3), ("test", 3), ("validation_cnndm", 3)):
            short, article = {"post": "the cat sat", "title": "a mat"}, "a cat" if split == "validation_cnndm" else None
            rows = [
                sft_row(i, **short) if name == "sft" else pair(i, info=short | {"article": article})
                for i in range(count)
            ]
            rows = [(str(i), row) for i, row in enumerate(rows)]
            args = tldr_dataset.Args(max_query_length=60, num_proc=1)
            data[split] = tldr_dataset.process_split(name, split, rows, tokenizer, args, root / "cache")
        data.save_to_disk(root / name)
    return root


def damaged(finished: Path, folder: Path, name: str, change, split: str = "test", row: int = 1) -> Path:
    """A copy of a data set in `folder` after `change` of the dict of one row, in place; folder/name is returned."""
    data = load_from_disk(str(finished / name))
    rows = data[split].to_list()
    change(rows[row])
    data[split] = data[split].from_list(rows, features=data[split].features)
    data.save_to_disk(folder / name)
    return folder / name


def check(path: Path, tokenizer):
    tokenizer.save_pretrained(path.parent / "T")
    check_data.main(check_data.Args(str(path), tokenizer=str(path.parent / "T"), num_proc=1))


def refused(path: Path, tokenizer) -> str:
    with pytest.raises(SystemExit) as error:
        check(path, tokenizer)
    return error.value.code


def put(column: str, place: int, value) -> Callable:
    def change(row):
        row[column][place] = value

    return change


def one_pad_more(row):
    row["chosen_token"].append(row["chosen_token"][-1])


def pad_on_the_right(row):
    row["query_token"].reverse()


def no_eos(row):
    row["chosen_token"][row["chosen_token"].index(0)] = 5


def hide_one_more(row):
    """Move the border between the query and the response of a label by one token."""
    tokens, label = row["query_chosen_token"], row["query_chosen_token_response_label"]
    pad = tokens[-1]
    label[next(place for place, token in enumerate(label) if token != pad)] = pad


ROW_DAMAGE = {  # (data set, what is done to row 1 of the split test, message)
    "id too large": ("sft", put("reference_response_token", 0, 9999), "reference_response_token needs .*wrong .9999."),
    "null id": ("sft", put("query_token", 59, None), "query_token needs .*wrong .None."),
    "one [PAD] more": ("preference", one_pad_more, "chosen_token needs 169 ids .* it has 170"),
    "query padded on the right": ("sft", pad_on_the_right, "query_token needs 60 ids .* on the left alone;"),
    "no EOS": ("preference", no_eos, r"chosen_token needs .* EOS before; it has 169, wrong \[\], last \[5\]"),
    "another token": ("preference", put("chosen_token", 0, 7), "chosen_token is not what the tokenizer makes of"),
    "length": ("sft", lambda row: row.update(query_token_len=7), r"query_token_len is 7, not \d+"),
    "label hides the response": ("preference", hide_one_more, "query_chosen_token_response_label is not"),
}


@pytest.mark.parametrize("case", ROW_DAMAGE)
def test_it_finds_a_damaged_row(finished, tmp_path, tokenizer, case):
    name, change, message = ROW_DAMAGE[case]
    path = damaged(finished, tmp_path, name, change)
    said = refused(tmp_path, tokenizer)
    assert re.match(f"error: {path}: test, row 1: {message}.*\\(1 of 3 rows are damaged\\)", said), said


def test_it_finds_query_and_response_of_another_row(finished, tmp_path, tokenizer):
    """Text and tokens agree, but the response is that of another pair."""
    other = load_from_disk(str(finished / "preference"))["test"][2]
    same = [name for name in other if name.startswith("query_chosen")]
    damaged(finished, tmp_path, "preference", lambda row: row.update({name: other[name] for name in same}))
    assert "test, row 1: query_chosen is not query and chosen" in refused(tmp_path, tokenizer)


def test_it_passes_what_is_whole_and_leaves_nothing_behind(finished, tmp_path, tokenizer, capsys, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    before = files(finished) | files(tmp_path)
    check_data.main(check_data.Args(str(finished), tokenizer=str(tmp_path / "tokenizer"), num_proc=2))
    said = " ".join(capsys.readouterr().out.split())  # it is printed in lines of 120 characters
    for name in ("sft", "preference"):
        for split, rows in (("train", 6), ("validation", 3), ("test", 3), ("validation_cnndm", 3)):
            assert f"{finished}/{name} {split}: no damage; in 0 of {rows} rows" in said
    assert before == files(finished) | files(tmp_path)


def test_it_finds_damaged_folders_splits_and_columns(finished, tmp_path, tokenizer):
    data = load_from_disk(str(finished / "preference"))
    column = "query_chosen_token"
    DatasetDict({"train": data["train"]}).save_to_disk(tmp_path / "split")
    DatasetDict(data | {"validation": data["validation"].remove_columns(column)}).save_to_disk(tmp_path / "column")
    data.save_to_disk(tmp_path / "cut")
    [arrow] = (tmp_path / "cut").glob("train/*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:-3000])
    for name in ("absent", "split", "cut"):
        assert f"{name}: no data set" in refused(tmp_path / name, tokenizer)
    assert f"validation has 3 rows and lacks the columns ['{column}']" in refused(tmp_path / "column", tokenizer)


def test_it_knows_another_tokenizer(finished):
    other = byte_level_tokenizer("<pad>")
    other.add_special_tokens({"pad_token": "[PAD]"})
    said = refused(finished, other)
    assert "sft: train, row 0: reference_response_token needs" in said and "6 of 6 rows are damaged" in said


def as_published(row: dict, tokenizer) -> dict:
    """A row as the authors stored it: `query` is decoded by a tokenizer that cleans up spaces; query and response are
    tokenised from that; a label hides as many tokens as query_token has; query_token_len is that of `query`."""
    query = re.sub(r" ([.,?!])", r"\1", row["query"]).lstrip()
    tokens = encode(tokenizer, query.strip() + row["reference_response"].removesuffix(EOS)) + [tokenizer.eos_token_id]
    pad, column = tokenizer.pad_token_id, "query_reference_response_token"
    ids, hidden = tokens + [pad] * (113 - len(tokens)), row["query_token_len"]
    row |= {"query": query, "query_reference_response": query.strip() + row["reference_response"], column: ids}
    row |= {f"{column}_len": len(tokens), f"{column}_response_label": [pad] * hidden + ids[hidden:]}
    return row | {"query_token_len": len(encode(tokenizer, query))}


@pytest.mark.parametrize("count", [1, 10, 11])
def test_it_counts_the_rows_of_published_data_whose_query_was_cleaned(tmp_path, tokenizer, capsys, count):
    args = tldr_dataset.Args(max_query_length=60)
    posts = ["the cat , was ! seen" if i < count else "the cat was seen" for i in range(20)]
    raw = [sft_row(i, title="a", post=post) for i, post in enumerate(posts)]
    rows = [tldr_dataset.process_sft_row(row, tokenizer, args) for row in raw]
    rows = [as_published(row, tokenizer) for row in rows]
    assert sum(row["query"] != tokenizer.decode(row["query_token"]).replace("[PAD]", "") for row in rows) == count
    data = DatasetDict({split: Dataset.from_list(rows) for split in ("train", "validation")})
    if count == 1:  # their SFT data have none
        data = data.remove_columns("query_token_len")
    data.save_to_disk(tmp_path / "published")
    if count <= 10:
        check(tmp_path / "published", tokenizer)
        said = " ".join(capsys.readouterr().out.split())
        assert f"published train: no damage; in {count} of 20 rows `query` does not" in said
    else:
        said = refused(tmp_path / "published", tokenizer)
        assert "published: train: in 11 of 20 rows `query` does not tokenise back to query_token" in said
