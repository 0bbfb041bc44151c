"""tldr_dataset.py: whole runs, statistics, and errors against hand-made cases. Templates, tokens and labels are
tested in test_details.py and test_properties.py."""

import random
from pathlib import Path

import numpy as np
import pandas
import pytest
from conftest import files, read_csv, record, write_jsonl
from datasets import DatasetDict, load_from_disk
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import tldr_dataset
from tldr_dataset import Args, encode, main, process_split

EOS = "<|endoftext|>"
WORDS = (
    "the cat sat on a mat and was then seen by Anna's café neighbours in 1999 , who said : why not ?! ünïcödé".split()
)


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


def sft_row(seed: int = 0, **changes) -> dict:
    row = {"id": f"t{seed}", "subreddit": "cats", "title": sentence(seed + 1, 5), "post": sentence(seed + 2, 30)}
    return row | {"summary": sentence(seed + 3, 6)} | changes


def pair(seed: int = 0, policies=("ref", "sup2"), article: str | None = None, info: dict | None = None, **changes):
    tldr = {"subreddit": "cats", "title": sentence(seed + 1, 5), "post": sentence(seed + 2, 30), "article": None}
    tldr["site"] = None
    news = {"subreddit": None, "title": None, "post": None, "site": "news", "article": article}
    summaries = [
        {"text": " " + sentence(seed + 3 + i, 6 + i), "policy": policy, "note": None}
        for i, policy in enumerate(policies)
    ]
    row = {"info": {"id": f"t{seed}", **(news if article else tldr), **(info or {})}, "summaries": summaries}
    row |= {"choice": seed % 2, "worker": "w", "batch": "batch3", "split": "train", "extra": {"confidence": 5}}
    return row | changes


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
    return Args(**{name: str(path) for name, path in paths.items()} | changes)


# ---- Detail 2: queries -----------------------------------------------------------------------------


def naive_truncation(prefix: str, body: str, suffix: str, tokenizer, max_length: int) -> str:
    """The rule of Detail 2 word for word: one cut at a time, each one tokenised."""
    while len(encode(tokenizer, prefix + body + suffix)) > max_length:
        if "\n" in body:
            body = body[: len(body) - 1 - body[::-1].index("\n")]
        else:
            body = body[:-1]
    return prefix + body + suffix


@pytest.mark.parametrize("text", ["cat ", "狗"])
def test_a_large_surplus_goes_at_once(tokenizer, monkeypatch, text):
    """The result is that of one character at a time, with a tenth of the work."""
    post = text * (1_600 // len(text))
    prefix, suffix = "SUBREDDIT: r/s\n\nTITLE: t\n\nPOST: ", "\n\nTL;DR:"
    expected = naive_truncation(prefix, post, suffix, tokenizer, 64)
    encoded = record(monkeypatch, tldr_dataset, "encode")
    query, _ = tldr_dataset.truncate_query({"subreddit": "s", "title": "t", "post": post}, tokenizer, 64)
    assert query == expected and len(encoded) < 0.25 * len(post)


# ---- whole runs ------------------------------------------------------------------------------------------


def test_whole_run(folder):
    """Posts as Parquet, CNN/DM pairs in two files, and a tokenizer with a padding token of its own."""
    (folder / "posts/train.jsonl").unlink()
    pandas.DataFrame([sft_row(i) for i in range(6)]).to_parquet(folder / "posts/train.parquet")
    write_jsonl(folder / "comparisons/validation_cnndm.jsonl", [pair(30, article="the cat")])
    byte_level_tokenizer("<pad>").save_pretrained(folder / "tokenizer")
    main(arguments(folder))
    out = folder / "out"
    assert sorted(path.name for path in folder.iterdir()) == ["comparisons", "out", "posts", "tokenizer"]
    assert sorted(path.name for path in out.iterdir()) == ["preference", "sft", "statistics"]
    sft, preference = load_from_disk(str(out / "sft")), load_from_disk(str(out / "preference"))
    assert sft["train"]["id"][:] == [f"t{i}" for i in range(6)] and sft["validation"]["subreddit"][:] == [""] * 3
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    assert sft["train"][0]["query_token"][0] == len(tokenizer) != tokenizer.pad_token_id  # Detail 3: always [PAD]
    assert preference["train"]["id"][:] == ["t0", "t1", "t2", "t3", "t9", "t10"]
    assert preference["validation"]["id"][:] == ["t20", "t21"]
    assert preference["validation_cnndm"]["id"][:] == ["t22", "t23", "t30"]
    assert preference["validation_cnndm"]["batch"][:2] == ["cnndm0", "some_other_batch"]
    assert len({str(data.features) for data in preference.values()}) == 1
    assert preference.with_format("numpy")["train"][:]["query_token"].dtype == np.int64

    statistics = out / "statistics"
    counts = [(row["policies"], int(row["count"])) for row in read_csv(statistics / "policy_pairs_validation.csv")]
    assert counts == [("null, ref", 1), ("ref, sup2", 1)]
    lengths = {(row["dataset"], row["split"], row["text"]): row for row in read_csv(statistics / "lengths.csv")}
    measured = sorted(sft["train"]["reference_response_token_len"][:])
    row = lengths["sft", "train", "reference_response"]
    assert [row["min"], row["max"], row["limit"]] == [str(measured[0]), str(measured[-1]), "53"]
    assert float(row["median"]) == (measured[2] + measured[3]) / 2
    limits = [lengths["preference", split, "rejected"]["limit"] for split in ("train", "validation_cnndm")]
    assert limits == ["169", "155"]


# ---- what is there and what is not ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dangling symlink", "empty folder", "~"])
def test_an_output_folder_of_any_kind(folder, kind, monkeypatch):
    """The folder keeps its kind, and nothing is left beside it. These data have no train split."""
    monkeypatch.setattr(tldr_dataset, "write_statistics", lambda args, data, at: (at / "statistics").mkdir())
    monkeypatch.setenv("HOME", str(folder))
    for file in (folder / "posts/train.jsonl", folder / "comparisons/train.jsonl"):
        file.unlink()
    output = folder / "out"
    if kind == "dangling symlink":
        output.symlink_to(folder / "elsewhere")
    if kind == "empty folder":
        output.mkdir()
    monkeypatch.chdir(folder)
    given = "~/new/out" if kind == "~" else "out"
    output = Path(given).expanduser().absolute()
    before = {path.name for path in folder.iterdir()} | {"elsewhere"}
    main(arguments(folder, output_dir=given))
    assert {path.name for path in output.iterdir()} == {"sft", "preference", "statistics"}
    assert load_from_disk(output / "sft").keys() == {"validation"}
    assert load_from_disk(output / "preference").keys() == {"validation", "validation_cnndm"}
    assert output.is_symlink() == (kind == "dangling symlink")
    made = {path.name for path in folder.iterdir()} - before
    assert len(made) <= 1 and not any("tmp-" in str(path) for path in folder.rglob("*"))


# ---- several processes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sft", "preference"])
def test_two_processes_write_the_bytes_of_one(tmp_path, tokenizer, name):
    # 1,130 rows: more than the 1,000 of a batch on disk; policies without null in the first process's half
    bare = {"post": "the cat", "title": "a"}
    rows = [sft_row(i, **bare) for i in range(1130)]
    if name == "preference":
        rows = [pair(i, policies=("ref", "sup2" if i < 900 else None), info=bare) for i in range(1130)]
    raw, written = [(f"row {i}", row) for i, row in enumerate(rows)], {}
    for num_proc in (1, 2):
        args = Args(max_query_length=60, num_proc=num_proc)
        data = process_split(name, "train", raw, tokenizer, args, tmp_path / f"cache{num_proc}")
        assert len(data.cache_files) == num_proc  # there were as many processes
        assert data["id"][:] == [f"t{i}" for i in range(1130)]
        DatasetDict(train=data).save_to_disk(tmp_path / str(num_proc))
        written[num_proc] = files(tmp_path / str(num_proc))
    assert written[1] == written[2] and "train/data-00000-of-00001.arrow" in written[1]


def test_the_first_bad_row_of_two_processes_is_named(folder):
    """Each has 100 rows; the second process is at row 101 long before the first is at row 100."""
    path, rows = folder / "posts/train.jsonl", [sft_row(i) for i in range(200)]
    for number in (100, 101):
        rows[number - 1]["summary"] = " "
    write_jsonl(path, rows)
    before = sorted(folder.iterdir())
    with pytest.raises(SystemExit) as error:
        main(arguments(folder, num_proc=2))
    assert error.value.code == f"error: {path}, row 100: summary is empty"
    assert sorted(folder.iterdir()) == before


# ---- bad files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("posts/train.jsonl", b'{"id": "1", "headline": "t"}\n', "1 rows without post, subreddit, summary, title"),
        ("posts/train.jsonl", b"\n \n", "0 rows"),
        ("posts/train.parquet", b"x", "both train.jsonl and train.parquet"),
        ("posts/test.parquet", b"x", "not a parquet file"),
    ],
)
def test_bad_files(folder, file, content, named):
    (folder / file).write_bytes(content)
    with pytest.raises(SystemExit, match=f"^error: .*{named}"):
        main(arguments(folder))
    assert not list(folder.glob("out*"))


def test_absent_splits_and_files_that_are_not_read_are_named(folder, capsys):
    (folder / "posts/validation.jsonl").rename(folder / "posts/valid.jsonl")
    raw = tldr_dataset.read_raw(str(folder / "posts"), tldr_dataset.SFT_SPLITS, tldr_dataset.SFT_COLUMNS)
    said = capsys.readouterr().out
    assert raw.keys() == {"train"} and "absent splits: validation, test" in said and "valid.jsonl" in said
    for split in ("validation", "test"):
        write_jsonl(folder / f"posts/{split}.jsonl", [sft_row(1)])
    (folder / "posts/valid.jsonl").unlink()
    tldr_dataset.read_raw(str(folder / "posts"), tldr_dataset.SFT_SPLITS, tldr_dataset.SFT_COLUMNS)
    assert capsys.readouterr().out == ""


# ---- Hub -------------------------------------------------------------------------------------------------


def test_push_without_a_hub_keeps_the_data_and_says_so(folder, monkeypatch):
    def refuse(*_, **__):
        raise ConnectionError("no route to the Hub")

    monkeypatch.setattr(DatasetDict, "push_to_hub", refuse)
    with pytest.raises(SystemExit, match="no route to the Hub") as error:
        main(arguments(folder, push_to_hub=True, hub_id_sft="me/a", hub_id_preference="me/b"))
    assert f"push later with load_from_disk('{folder}/out/sft').push_to_hub('me/a'" in error.value.code
    assert len(load_from_disk(str(folder / "out/sft"))["train"]) == 6


def test_published_sets_stand_beside_the_papers_numbers():
    """Hand-made tables: of the published sets each number has its verdict, of other data sets there is none."""
    rows = [("sft", "train", "reference_response", 116_722, 40.0), ("sft", "test", "reference_response", 5, 1.0)]
    rows += [("preference", "train", "chosen", 92_858, 32.0), ("preference", "train", "rejected", 92_858, 31.0)]
    lengths = pandas.DataFrame(rows, columns=["dataset", "split", "text", "rows", "median"])
    pairs = pandas.DataFrame({"split": ["train", "validation", "test"], "unique pairs": [47, 240, 1]})
    table = tldr_dataset.beside_paper(Args(), lengths, pairs)
    found = [tuple(row) for row in table[["split", "text", "number", "paper", "here", ""]].to_numpy().tolist()]
    agrees, differs = "as in the paper", "differs from the paper"
    assert found == [
        ("train", "reference_response", "rows", 116_722, 116_722, agrees),
        ("train", "chosen", "rows", 92_858, 92_858, agrees),
        ("train", "chosen", "median", 32, 32, agrees),
        ("train", "rejected", "median", 30, 31, differs),
        ("train", "policies", "unique pairs", 47, 47, agrees),
        ("validation", "policies", "unique pairs", 241, 240, differs),
    ]
    of_sft = tldr_dataset.beside_paper(Args(preference_dataset="data/mine"), lengths, pairs)
    assert of_sft["dataset"].tolist() == ["sft"]
    assert tldr_dataset.beside_paper(Args(sft_dataset="a", preference_dataset="b"), lengths, pairs).empty
