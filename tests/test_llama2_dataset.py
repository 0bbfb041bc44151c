"""llama2/preference_dataset.py: readers, grades, splits, mixture, tokens and statistics against hand-made cases. In
most tests, each word is one token, so that tokens can be counted by hand."""

import collections
import gzip
import json
from pathlib import Path

import check_data
import pandas
import pytest
from conftest import read_csv, script, write_jsonl
from datasets import load_from_disk
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import tldr_dataset

ROOT = Path(__file__).resolve().parents[1]
preference_dataset = script("llama2/preference_dataset.py")
READERS, Args = preference_dataset.READERS, preference_dataset.Args

WORDS = "a b c d e f g h i j k l m n o p q r s t u v w x y z".split()
WORDS += "SUBREDDIT: TITLE: POST: TL;DR: r/ r/x Article:".split()


def chat(*texts: str) -> list[dict]:
    """A dialogue that begins with the user."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def pair(prompt, chosen: str = "x", rejected: str = "y", **more) -> dict:
    """A row for the reader `pairs`; prompt is a text or the texts of a dialogue."""
    return {"messages": chat(*([prompt] if isinstance(prompt, str) else prompt))} | more | {
        "chosen": chosen, "rejected": rejected,
    }  # fmt: skip


def post(text: str = "a b c", chosen: str = " d e", rejected: str = " f", **more) -> dict:
    info = {"id": "1", "title": "t u", "post": text, "subreddit": "x"} | more.pop("info", {})
    summaries = [{"text": rejected, "policy": "p1", "note": None}, {"text": chosen, "policy": "p0", "note": None}]
    row = {"info": info, "summaries": summaries, "choice": 1, "worker": "w", "batch": "b", "split": "train"}
    return row | {"extra": {"confidence": 8}} | more


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> str:
    """A folder with a tokenizer of words, EOS 0, and both turns."""
    folder = tmp_path_factory.mktemp("words")
    words = {word: i for i, word in enumerate(["<|endoftext|>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", unk_token="<unk>")
    tokenizer.add_tokens([AddedToken(turn, normalized=False) for turn in preference_dataset.TURNS])
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    return str(folder)


@pytest.fixture(scope="session")
def tokenizer(base):
    found = AutoTokenizer.from_pretrained(base)
    found.add_special_tokens({"pad_token": "[PAD]"})
    return found


@pytest.fixture
def prepare(base, tmp_path):
    """prepare({"name=reader[:split][:tag]": rows}, …) -> (DatasetDict, {source: counts of counts.csv}, statistics)."""

    def run(sources: dict[str, list[dict]], **args):
        texts = []
        for i, (source, rows) in enumerate(sources.items()):
            name, _, rest = source.partition("=")
            reader, *labels = rest.split(":")
            file = write_jsonl(tmp_path / f"{i}.jsonl", rows)
            texts.append(":".join([f"{name}={reader}", str(file), *labels]))
        output = tmp_path / f"out_{len([*tmp_path.iterdir()])}"
        settings = {"base": base, "max_query_length": 32, "max_response_length": 8, "validation_share": 0.2} | args
        preference_dataset.main(Args(tuple(texts), output_dir=str(output), **settings))
        rows = read_csv(output / "statistics" / "counts.csv")
        counts = {row.pop("source"): {k: float(v) for k, v in row.items()} for row in rows}
        return load_from_disk(str(output / "preference")), counts, output / "statistics"

    return run


# ---- readers and grades ---------------------------------------------------------------------------

HH = "\n\nHuman: a b\n\nAssistant: c\n\nHuman: d \n\nAssistant:"
ANSWERS = [{"answer_id": 1, "author": "m", "pm_score": score, "selected": False, "text": x} for score, x in
           (("2", "<p>a</p>"), ("5", "<p>b</p>"), ("-1", "<p>c</p>"), ("5", "<p>d</p>"))]  # fmt: skip
SHP = {"post_id": "1", "domain": "d", "history": "a", "human_ref_A": "b", "human_ref_B": "c", "labels": 0}
SHP |= {"score_A": 10, "score_B": 45, "score_ratio": 4.5, "seconds_difference": 1.0}
WEBGPT = {"question": {"dataset": "d", "id": "1", "full_text": "a ?"}, "quotes_0": {}, "quotes_1": {}}
WEBGPT |= {"answer_0": "b", "answer_1": "c", "score_0": -0.5, "score_1": 0.5, "tokens_0": {}, "tokens_1": {}}
RECORDS = [{"question": WEBGPT["question"], "answer": x, "score": y} for x, y in (("b", -0.5), ("c", 0.5))]
STEER = {"split": "train", "prompt": "a", "response_1": "b", "response_2": "c", "preference_strength": 2}
STEER |= {"preference_statement": "s", "preference_elaboration": "e"}
LEVELS = {"id": "1", "prompt": "a", "completion_a": "b", "completion_b": "c", "preference": "b-is-slightly-better"}
STRENGTH = {"preference_strength": 3, "chosen": chat("a", "b", "c", "d"), "rejected": chat("a", "b", "c", "e")}
STRENGTH |= {"chosen_reward": 1.0, "rejected_reward": 2.0}


@pytest.mark.parametrize(
    ("reader", "row", "messages", "chosen", "rejected", "grade"),
    [
        ("hh", {"chosen": f"{HH} e f", "rejected": f"{HH} g "}, chat("a b", "c", "d"), "e f", "g", "none"),
        ("tldr", post(), None, " d e", " f", "better"),
        ("tldr", post(choice=0, extra={}), None, " f", " d e", "none"),
        ("webgpt", WEBGPT, chat("a ?"), "c", "b", "better"),
        ("webgpt", RECORDS, chat("a ?"), "c", "b", "better"),
        ("webgpt", WEBGPT | {"score_0": 1, "score_1": -1}, chat("a ?"), "b", "c", "significantly"),
        ("stack_exchange", {"qid": 1, "question": "<p>q</p>", "answers": ANSWERS, "metadata": [], "date": "d"},
         chat("<p>q</p>"), "<p>b</p>", "<p>c</p>", "significantly"),
        ("stack_exchange", {"question": "q", "answers": ANSWERS[1::2]}, chat("q"), "<p>b</p>", "<p>d</p>", "tie"),
        ("shp", SHP, chat("a"), "c", "b", "better"),
        ("shp", SHP | {"labels": 1, "score_A": 90}, chat("a"), "b", "c", "slightly"),
        ("gptj", {"prompt": "a", "chosen": "b", "rejected": "c"}, chat("a"), "b", "c", "none"),
        ("helpsteer2", STEER, chat("a"), "c", "b", "better"),
        ("helpsteer2", STEER | {"preference_strength": -1}, chat("a"), "b", "c", "slightly"),
        ("helpsteer2", STEER | {"prompt": "a\n\n<extra_id_1>Assistant\nb\n\nc\n\n<extra_id_1>User\nd\n"},
         chat("a", "b\n\nc", "d\n"), "c", "b", "better"),
        ("strength", STRENGTH, chat("a", "b", "c"), "d", "e", "significantly"),
        ("five_levels", LEVELS, chat("a"), "c", "b", "slightly"),
        ("five_levels", LEVELS | {"preference": "a-is-better"}, chat("a"), "b", "c", "better"),
        ("pairs", {"prompt": "a", "chosen": "b", "rejected": "c"}, chat("a"), "b", "c", "none"),
        ("pairs", pair(("a", "b", "c"), rating="Negligibly better / unsure"), chat("a", "b", "c"), "x", "y",
         "negligibly"),
        ("pairs", pair("a", rating="tie"), chat("a"), "x", "y", "tie"),
    ],
)  # fmt: skip
def test_a_row_of_each_published_form(reader, row, messages, chosen, rejected, grade):
    found = READERS[reader](row)
    assert found.get("messages") == messages and found["grade"] == grade
    assert (found["chosen"], found["rejected"]) == (chosen, rejected)
    if messages is None:
        assert {key: value for key, value in found["post"].items() if value} == row["info"]
    preference_dataset.check_pair(found)


def grade(reader: str, row: dict) -> str:
    return READERS[reader](row)["grade"]


def test_grade_rules():
    four, short = ["significantly", "better", "slightly", "negligibly"], "negligibly"
    found = [grade("tldr", post(extra={"confidence": confidence})) for confidence in range(1, 10)]
    assert found == [*four, short, *four[::-1]]
    found = [grade("shp", SHP | {"score_A": 10, "score_B": score}) for score in (10, 11, 19, 20, 39, 40, 79, 80, 900)]
    assert found == ["tie", short, short, "slightly", "slightly", "better", "better", "significantly", "significantly"]
    assert grade("shp", SHP | {"score_A": -3, "score_B": 2}) == "slightly"  # below 1 counts as 1
    scores = (0, 0.1, 0.24, 0.25, 0.49, 0.5, 0.74, 0.75, 1)
    expected = ["tie", short, short, "slightly", "slightly", "better", "better", "significantly", "significantly"]
    for sign in (1, -1):
        rows = [WEBGPT | {"score_0": sign * score, "score_1": -sign * score} for score in scores]
        assert [grade("webgpt", row) for row in rows] == expected
    found = [grade("helpsteer2", STEER | {"preference_strength": strength}) for strength in range(-3, 4)]
    assert found == [*four[:3], "tie", *four[2::-1]]
    answers = [[{"pm_score": score, "text": x} for x, score in (("a", 1), ("b", 1 + gap))] for gap in range(5)]
    found = [grade("stack_exchange", {"question": "q", "answers": two}) for two in answers]
    assert found == ["tie", "slightly", "better", "significantly", "significantly"]
    margins = {"significantly": 1, "better": 2 / 3, "slightly": 1 / 3, "negligibly": 0, "none": 0}
    assert margins == preference_dataset.MARGINS


def test_files_of_every_kind_hold_the_same_rows(tmp_path):
    rows = [pair("a", rating=0.5), pair(("b\u2028", "c", "d"), rating=1.0)]
    kinds = {"a.jsonl": [json.dumps(row).encode() + b"\n" for row in rows], "b.json": [json.dumps(rows).encode()]}
    kinds["c.json"] = [b"\xef\xbb\xbf", *kinds["a.jsonl"]]  # JSON Lines by another name, with a byte order mark
    kinds["e.json"] = [b"\xef\xbb\xbf", *kinds["b.json"]]
    for name, parts in kinds.items():
        (tmp_path / name).write_bytes(b"".join(parts))
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(b"".join(parts)))
    pandas.DataFrame(rows).to_parquet(tmp_path / "d.parquet")
    files = preference_dataset.parse_source(f"n=pairs:{tmp_path}")["files"]
    assert len(files) == 9
    for file in files:
        found = [
            (where, json.loads(row) if isinstance(row, str) else row)
            for where, row in preference_dataset.stream_rows(file)
        ]
        assert found == [(f"{file}, row {i}", row) for i, row in enumerate(rows, 1)]


# ---- tokens ------------------------------------------------------------------------------------------


def test_tokens_of_a_dialogue(prepare, tokenizer):
    rows = [pair((f"a {x}", "b", "c d"), chosen="e f", rejected="g", rating="slightly", rejected_safe=False)
            for x in WORDS[:10]]  # fmt: skip
    data, _, _ = prepare({"n=pairs:safety": rows})
    assert len(data["train"]) + len(data["validation"]) == 10 and len(data["train"]) > 0
    ids, pad, eos = tokenizer.get_vocab(), tokenizer.pad_token_id, 0
    user, assistant = ids["<|prompter|>"], ids["<|assistant|>"]
    assert len({pad, eos, user, assistant}) == 4
    for split in data:
        for row in data[split]:
            word = row["query"].split("<|endoftext|>")[0][-1]
            query = [user, ids["a"], ids[word], eos, assistant, ids["b"], eos, user, ids["c"], ids["d"], eos, assistant]
            text = (
                f"<|prompter|>a {word}<|endoftext|><|assistant|>b<|endoftext|><|prompter|>c d<|endoftext|><|assistant|>"
            )
            assert row["query"] == text and row["query_token_len"] == 12
            assert row["query_token"] == [pad] * 20 + query
            for side, said in (("chosen", "e f"), ("rejected", "g")):
                answer = [*(ids[x] for x in said.split()), eos]
                n = len(answer)
                assert row[side] == f"{said}<|endoftext|>" and row[f"query_{side}"] == text + row[side]
                assert row[f"{side}_token"] == answer + [pad] * (8 - n) and row[f"{side}_token_len"] == n
                assert row[f"query_{side}_token"] == query + answer + [pad] * (28 - n)
                assert row[f"query_{side}_token_len"] == 12 + n
                assert row[f"query_{side}_token_response_label"] == [pad] * 12 + answer + [pad] * (28 - n)
            expected = {"source": "n", "batch": "n", "tag": "safety", "split": split, "grade": "slightly", "turns": 2}
            expected |= {"margin": 1 / 3, "weight": 1, "chosen_safe": None, "rejected_safe": False, "choice": None}
            assert {key: row[key] for key in expected} == expected


def test_posts_are_those_of_tldr_dataset(prepare, tokenizer):
    long = "\n".join(" ".join(WORDS[:12]) for _ in range(4))
    rows = [post(f"{x} b", chosen=" d" if x < "e" else "d e", choice=i % 2) for i, x in enumerate(WORDS[:8])]
    rows += [post(long, summaries=[{"text": "a", "policy": None}, {"text": "b", "policy": "q"}], extra={})]
    data, counts, _ = prepare({"posts=tldr": rows}, validation_share=0.5)
    assert counts["posts"]["shortened"] == 1
    found = {row["id"]: row for split in data for row in data[split]}
    assert len(found) == len(rows)
    limits = tldr_dataset.Args(max_query_length=32, max_rm_response_length=8)
    for i, row in enumerate(rows, 1):
        expected = tldr_dataset.process_preference_row(row, tokenizer, limits)
        same = set(expected) - {"id", "info", "summaries", "worker", "batch", "split"}
        assert {x: found[f"posts_{i:07d}"][x] for x in same} == {x: expected[x] for x in same}


def test_prompts_and_chosen_responses_are_sft_data(prepare, tokenizer):
    """Each query of a split once, with its first response that nobody calls unsafe, as tldr_dataset.py stores posts."""
    posts = [post(f"{x} b", chosen=" d" if x < "e" else "d e", extra={}) for x in WORDS[:8]]
    talks = [
        pair("a b", "c", "d", chosen_safe=False, rejected_safe=False),
        pair("a b", "e", "f", chosen_safe=True, rejected_safe=False),
        pair("i", "j", "k", chosen_safe=False, rejected_safe=False),
        pair("l", "m", "n", rating="tie"),
    ]
    sources = {"posts=tldr:train": posts, "talk=pairs:train:safety": talks, "held=tldr:validation": [post("z z")]}
    _, _, statistics = prepare(sources, ties="half")
    sft = load_from_disk(str(statistics.parent / "sft"))
    found = {row["id"]: row for row in sft["train"]}
    assert set(sft) == {"train", "validation"} and sft["validation"]["id"][:] == ["held_0000001"]
    limits = tldr_dataset.Args(max_query_length=32, max_sft_response_length=8)
    for i, row in enumerate(posts, 1):
        raw = row["info"] | {"summary": row["summaries"][1]["text"]}
        expected = tldr_dataset.process_sft_row(raw, tokenizer, limits)
        same = set(expected) - {"id", "subreddit", "title", "post", "summary"}
        assert {x: found[f"posts_{i:07d}"][x] for x in same} == {x: expected[x] for x in same}
    spoken = {row["query"]: (row["reference_response"], row["tag"]) for row in sft["train"] if row["source"] == "talk"}
    said = {"a b": "e", "l": "m"}
    assert len(sft["train"]) == len(posts) + len(said) and spoken == {
        f"<|prompter|>{x}<|endoftext|><|assistant|>": (f"{y}<|endoftext|>", "safety") for x, y in said.items()
    }


def test_the_oldest_turns_go_first_and_the_response_never(tokenizer):
    turns = ("a", "b b", "c c c", "d", "e e")
    for width, kept in ((20, 0), (19, 2), (13, 2), (12, 4), (5, 4)):  # 9 words, 5 x 2 of the turns, and the last turn's
        limits = Args((), max_query_length=width, max_response_length=60)
        found = preference_dataset.dialogue_columns(pair(turns, chosen="x " * 50), tokenizer, limits)
        left = [f"{preference_dataset.TURNS[i % 2]}{x}<|endoftext|>" for i, x in enumerate(turns)][kept:]
        assert found["query"] == "".join(left) + "<|assistant|>" and found["shortened"] == (kept > 0), width
        words = "".join(left).replace("<|", " <|").replace("|>", "|> ").split()
        expected = tokenizer.convert_tokens_to_ids([*words, "<|assistant|>"])
        length = len(expected)
        assert found["query_token"] == [tokenizer.pad_token_id] * (width - length) + expected
        assert found["query_token_len"] == length <= width < length + (7 if kept == 2 else 8 if kept else 99)
        assert found["query_chosen_token"][length : length + 51] == found["chosen_token"][:51]
        assert found["turns"] == 3 - kept // 2
    with pytest.raises(preference_dataset.LeftOut, match="prompt too long"):
        preference_dataset.dialogue_columns(pair(turns), tokenizer, Args((), max_query_length=4))


def test_what_is_too_long_is_left_out_and_counted(prepare):
    rows = [pair(x) for x in WORDS[:10]]
    rows += [pair("a b", "x " * 7), pair("a c", "x", "y " * 8), pair("a d", "x " * 8)]  # 8, 9 and 9 with EOS
    rows += [pair("b " * 29), pair("b " * 30), pair(("b " * 40, "c", "e f"))]  # 32 with its turns, 33, and cut
    posts = [post("a " * 40), post(info={"title": "a " * 40}), post("a", "x " * 8)]
    data, counts, _ = prepare({"n=pairs": rows, "p=tldr": posts})
    fates = ("rows", "prompt too long", "response too long", "shortened")
    assert [counts["n"][fate] for fate in fates] == [16, 1, 2, 1]
    assert [counts["p"][fate] for fate in fates] == [3, 1, 1, 1]
    assert sum(map(len, data.values())) == 16 - 3 + 1
    queries = {row["query"] for split in data for row in data[split]}
    assert "<|prompter|>e f<|endoftext|><|assistant|>" in queries


def test_the_base_gets_the_turns_that_it_lacks(prepare, capsys):
    bare = ROOT / "quickstart" / "bases" / "nano-xs"
    sources = {"n=pairs": [pair((x, "b", "c")) for x in WORDS[:10]], "p=tldr:train": [post()]}
    data, _, statistics = prepare(sources, base=str(bare))
    check_data.main(check_data.Args(str(statistics.parent), tokenizer=str(statistics.parent / "base"), num_proc=1))
    assert " ".join(capsys.readouterr().out.split()).count(": no damage; in 0 of ") == 4
    before, after = (AutoTokenizer.from_pretrained(x) for x in (bare, statistics.parent / "base"))
    before = {k: v for k, v in before.get_vocab().items() if k != "[PAD]"}
    assert set(after.get_vocab()) - set(before) - {"[PAD]"} == {"<|prompter|>", "<|assistant|>"}
    assert before.items() <= after.get_vocab().items() and (statistics.parent / "base" / "model.safetensors").exists()
    after.add_special_tokens({"pad_token": "[PAD]"})
    ids = after.convert_tokens_to_ids(["[PAD]", "<|prompter|>"])
    row = data["train"][0]
    first = len(row["query_token"]) - row["query_token_len"]
    assert row["query_token"][first - 1 : first + 1] == ids
    _, _, statistics = prepare({"n=pairs": [pair(x) for x in WORDS[:10]]}, base=str(statistics.parent / "base"))
    assert not (statistics.parent / "base").exists()


# ---- splits, duplicates, ties, safety --------------------------------------------------------------------


def test_a_prompt_is_on_one_side_and_files_of_a_split_decide_which(prepare):
    """Prompts with later stages of their dialogue and posts, and files that are of one split as a whole."""
    turns = [f"{x} {y}" for x in WORDS[:12] for y in WORDS[:10]]
    free = [pair(turn, chosen=x) for turn in turns for x in "uv"]
    sources = {"n=pairs": free, "m=pairs": [pair((turn, "w", "z")) for turn in turns]}
    sources |= {"p=tldr": [post(turn, chosen) for turn in turns for chosen in (" u", " v")]}
    sources |= {"t=pairs:train": [pair(turn, "w") for turn in turns]}
    sources |= {"v=pairs:validation": [pair(turn, "z") for turn in turns[:5]]}
    data, counts, _ = prepare(sources)
    first = {split: {query.split("<|endoftext|>")[0] for query in data[split]["query"]} for split in data}
    assert not first["train"] & first["validation"]
    for name in "nmp":
        share = counts[name]["validation"] / (counts[name]["train"] + counts[name]["validation"])
        assert 0.1 < share < 0.35  # a fifth of the prompts by their hash, and the five
    assert counts["v"]["validation"] == 5 and counts["v"]["train"] == 0 == counts["t"]["validation"]
    assert {f"<|prompter|>{turn}" for turn in turns[:5]} <= first["validation"]
    assert counts["t"]["prompt in validation"] == counts["n"]["validation"] / 2
    other, _, _ = prepare({"n=pairs": free}, seed=2)
    assert not set(other["validation"]["query"]) <= set(data["validation"]["query"])


def test_stages_of_a_shortened_dialogue_stay_together(prepare):
    turns = [f"{x} {y}" for x in WORDS[:12] for y in WORDS[:10]]
    stages = [pair((turn, "w", f"z {turn}"), chosen=x) for turn in turns for x in "uv"]  # 16 tokens
    later = [pair((turn, "w", f"z {turn}", "q", "w w w w w w"), chosen=x) for turn in turns for x in "uv"]
    same = [pair((turn, "w " * 14, "q q"), chosen=turn.replace(" ", "")) for turn in turns]  # alike once they are short
    data, counts, _ = prepare({"n=pairs": later + same + stages}, max_query_length=20)
    assert not set(data["train"]["query"]) & set(data["validation"]["query"]) and counts["n"]["shortened"] > 150
    of = {split: {query.split("z ")[1][:3] for query in set(data[split]["query"]) if "z " in query} for split in data}
    assert not of["train"] & of["validation"] and len(of["validation"]) > 5 and counts["n"]["prompt in validation"] > 24


def test_duplicates_are_removed_and_counted(prepare):
    a = [pair(x, rating="better") for x in WORDS[:10]]
    again = [a[0], a[1], a[0], a[2] | {"rating": "slightly"}, a[3] | {"rejected": "z"}, pair(("a", "b", "c"))]
    swapped = [pair(x, "y", "x", rating="better") for x in WORDS[:2]]
    data, counts, _ = prepare({"n=pairs": a + again, "m=pairs": [*a[:4], *swapped], "p=tldr": [post(), post()]})
    assert [counts[name]["duplicates"] for name in "nmp"] == [3, 4, 1]
    assert sum(map(len, data.values())) == 13 + 2 + 1


def test_ties_are_dropped_or_halved(prepare):
    rows = [pair(x, rating="tie", chosen_safe=True, rejected_safe=True) for x in WORDS[:20]]
    rows += [pair(WORDS[0], "y", "x", rating="tie", chosen_safe=True, rejected_safe=True)]  # the other order
    rows += [pair(x, "x", "x", rating="tie") for x in WORDS[20:22]]  # equal, but dropped before they could be an error
    sure = [pair(x, "u", "v", rating="better") for x in WORDS[:20]]
    data, counts, _ = prepare({"n=pairs": rows + sure})
    assert counts["n"]["ties"] == 23 and sum(map(len, data.values())) == 20
    assert {row["weight"] for split in data for row in data[split]} == {1.0}
    data, counts, statistics = prepare({"n=pairs": rows[:-2] + sure}, ties="half")
    held_out = len(data["validation"])
    assert counts["n"]["ties"] == held_out and counts["n"]["duplicates"] == 1  # no ties in validation
    assert counts["n"]["ties halved"] == 20 - held_out
    assert len(data["train"]) == 3 * (20 - held_out) and counts["n"]["train"] == 2 * (20 - held_out)
    tied = [row for row in data["train"] if row["weight"] == 0.5]
    both = collections.Counter((row["query"], row["chosen"], row["rejected"]) for row in tied)
    assert set(both.values()) == {1} and len(both) == 2 * (20 - held_out)
    for row in tied:
        assert (row["query"], row["rejected"], row["chosen"]) in both
        assert row["margin"] == 0 and row["grade"] == "negligibly" and row["chosen_safe"] is True
        for side in ("chosen", "rejected"):
            assert row[f"query_{side}_token"][row["query_token_len"] :][:8] == row[f"{side}_token"]
    table = read_csv(statistics / "table_6.csv")
    assert [row["Num. of Comparisons"] for row in table] == [str(40 - held_out)] * 2


def test_unsafe_chosen_beside_safe_rejected_is_left_out(prepare):
    labels = [(True, True), (True, False), (False, False), (False, True), (None, True), (False, None), (None, None)]
    safe = [{"chosen_safe": a, "rejected_safe": b} for a, b in labels]
    rows = [pair(f"{x} {i}", **safe[i]) for x in WORDS[:5] for i in range(7)]
    rows += [pair(f"h {i}", rating="tie", **safe[i]) for i in range(7)]
    data, counts, _ = prepare({"n=pairs:safety": rows}, ties="half", validation_share=0.4)
    assert counts["n"]["unsafe chosen"] == 5 + 2  # of the ties, either order would be against the rule
    found = {(row["chosen_safe"], row["rejected_safe"]) for split in data for row in data[split]}
    assert (False, True) not in found and found >= {x for x in labels if x != (False, True)}


def test_a_number_is_the_margin_itself(prepare):
    rows = [pair(x, rating=i / 8) for i, x in enumerate(WORDS[:16])]
    data, _, statistics = prepare({"n=pairs": rows})
    found = {row["query"][12]: (row["margin"], row["grade"]) for split in data for row in data[split]}
    assert found == {x: (i / 8, "none") for i, x in enumerate(WORDS[:16])}
    expected = {"source": "n", **dict.fromkeys(preference_dataset.MARGINS, "0"), "none": "16"}
    assert read_csv(statistics / "grades.csv") == [expected]


# ---- mixture -----------------------------------------------------------------------------------------------

MANY = {
    "n=pairs:train": [pair(f"{x} {y}", rating="tie" if x == "a" else "better") for x in WORDS[:8] for y in WORDS[:10]],
    "m=pairs:train": [pair(f"a {x} {y}") for x in WORDS[:4] for y in WORDS[:10]],
    "o=pairs:validation": [pair("z z")],
    "o=pairs:train": [pair(f"c c {x}") for x in WORDS[:20]],
}


def weights(data) -> dict[str, float]:
    found = collections.Counter()
    for row in data["train"].select_columns(["source", "weight"]):
        found[row["source"]] += row["weight"]
    return dict(found)


def test_shares_are_exact_and_the_seed_decides(prepare):
    mix = {"mix": ("n=0.5", "m=3/8", "o=0.125"), "ties": "half"}
    data, counts, _ = prepare(MANY, **mix)
    # 80 / 0.5, 40 / (3/8) = 106.7 and 20 / 0.125: m is the first to run out; the shares are exact in multiples of 8
    assert weights(data) == {"n": 52, "m": 39, "o": 13}
    assert [counts[name]["mixed"] for name in "nmo"] == [52, 39, 13]
    assert [counts[name]["share"] for name in "nmo"] == [0.5, 0.375, 0.125]
    assert set(data["validation"]["source"]) == {"o"}
    rows = [(row["query"], row["chosen"]) for row in data["train"]]
    again, other = (prepare(MANY, **mix, seed=seed)[0] for seed in (1, 2))
    assert [(row["query"], row["chosen"]) for row in again["train"]] == rows
    assert sorted((row["query"], row["chosen"]) for row in other["train"]) != sorted(rows)
    assert weights(other) == weights(data)
    every, _, _ = prepare(MANY, ties="half")  # without a mix train has all pairs
    assert weights(every) == {"n": 80, "m": 40, "o": 20}
    ties = [i for i, weight in enumerate(data["train"]["weight"]) if weight == 0.5]
    assert ties and len(ties) % 2 == 0  # each with its other order behind it
    for i, j in zip(ties[::2], ties[1::2], strict=True):
        a, b = data["train"][i], data["train"][j]
        assert j == i + 1 and (a["query"], a["chosen"]) == (b["query"], b["rejected"]) and a["chosen"] != b["chosen"]


# ---- statistics ---------------------------------------------------------------------------------------------


def test_table_6_is_a_hand_count(prepare):
    talk = [
        pair("a b c", "d", "e f g"),  # 1 turn; examples 3 + 1 and 3 + 3 tokens; prompt 3; responses 1 and 3
        pair(("a", "b b", "c c c c"), "d d", "e e"),  # 2 turns; 1 + 2 + 4 + 2, twice; 4; 2 and 2
        pair(("a", "b", "c", "d", "e e"), "f", "g"),  # 3 turns; 4 + 2 + 1, twice; 2; 1 and 1
        pair("z " * 12, "d d d", "e e e", rating="tie"),  # 1 turn; 12 + 3, twice; 12; 3 and 3
        pair("z z z", "x " * 8),  # too long: not counted
    ]
    # SUBREDDIT: r/x TITLE: t u POST: a b c TL;DR: is 10 tokens; responses 2 and 1
    data, _, statistics = prepare(
        {"talk=pairs:train": talk, "posts=tldr:train": [post()], "v=pairs:validation": [pair("q q", "r", "s")]},
        ties="half",
    )
    assert len(data["train"]) == 6
    columns = ["Dataset", "Num. of Comparisons", "Avg. # Turns per Dialogue", "Avg. # Tokens per Example"]
    columns += ["Avg. # Tokens in Prompt", "Avg. # Tokens in Response"]
    expected = [
        # turns (1 + 2 + 3 + 1) / 4; examples (5 + 9 + 7 + 15) / 4; prompts (3 + 4 + 2 + 12) / 4 = 5.25;
        # responses (2 + 2 + 1 + 3) / 4
        ["talk", "4", "1.8", "9.0", "5.2", "2.0"],
        ["posts", "1", "1.0", "11.5", "10.0", "1.5"],
        ["v", "1", "1.0", "3.0", "2.0", "1.0"],
        # (7 + 1 + 1) / 6; (36 + 11.5 + 3) / 6 = 8.417; (21 + 10 + 2) / 6; (8 + 1.5 + 1) / 6
        ["Total", "6", "1.5", "8.4", "5.5", "1.8"],
    ]
    assert read_csv(statistics / "table_6.csv") == [dict(zip(columns, row, strict=True)) for row in expected]


def test_every_row_is_counted_once(prepare):
    """Bad rows, too, where --bad-rows skip leaves them out: one is no JSON, one has equal responses."""
    rows = [
        '{"prompt"\n',
        *MANY["n=pairs:train"],
        pair("a", "x", "x"),
        pair("b " * 50),
        pair("c", "x " * 9),
        pair("d", rating="tie"),
    ]
    rows += [rows[-5], pair("e", chosen_safe=False, rejected_safe=True)]
    _, counts, _ = prepare({"n=pairs": rows}, bad_rows="skip", ties="half")
    fates = {k: v for k, v in counts["n"].items() if k not in ("rows", "ties halved", "shortened", "mixed", "share")}
    assert sum(fates.values()) == counts["n"]["rows"] == len(rows)
    one = {k: fates[k] for k in ("bad rows", "unsafe chosen", "duplicates", "prompt too long", "response too long")}
    assert one == dict.fromkeys(one, 1) | {"bad rows": 2}


# ---- bad input -------------------------------------------------------------------------------------------------


GOOD = {"hh": {"chosen": f"{HH} a", "rejected": f"{HH} b"}, "tldr": post(), "webgpt": WEBGPT, "shp": SHP}
GOOD |= {"helpsteer2": STEER, "five_levels": LEVELS, "strength": STRENGTH, "pairs": pair("a")}


@pytest.mark.parametrize(
    ("reader", "row", "named"),
    [
        ("pairs", pair("a", rating="great"), "rating"),
        ("pairs", pair("a", "x ", " x"), "equal"),
        ("pairs", pair("a", " "), "chosen is empty"),
        ("pairs", pair("a", "b <|prompter|> c"), r"holds <\|prompter\|>"),
        ("pairs", pair(("a", "b")), "last turn"),
        ("pairs", pair("a") | {"messages": [*chat("a"), *chat("b")]}, "turn 2"),
        ("pairs", pair("a", chosen_safe=1), "chosen_safe"),
        ("pairs", [1], "AttributeError"),
        ("pairs", "{broken\n", "JSONDecodeError"),
        ("hh", {"chosen": f"{HH} a", "rejected": f"\n\nHuman: z{HH} b"}, "not the same"),
        ("tldr", post(choice=2), "choice"),
        ("tldr", post(extra={"confidence": 10}), "confidence"),
        ("webgpt", WEBGPT | {"score_1": 0.25}, "add up to 0"),
        ("webgpt", [RECORDS[0], RECORDS[1] | {"question": {}}], "different questions"),
        ("shp", SHP | {"labels": 1}, "lower score"),
        ("helpsteer2", STEER | {"preference_strength": 4}, "preference_strength"),
        ("five_levels", LEVELS | {"preference": ["tie"]}, "preference"),
        ("strength", STRENGTH | {"chosen": "a"}, "chosen"),
    ],
)
def test_a_bad_row_is_named_and_leaves_nothing_behind(base, tmp_path, reader, row, named):
    file = write_jsonl(tmp_path / "x.jsonl", [GOOD[reader], row])
    with pytest.raises(SystemExit, match=rf"^error: \S*x\.jsonl, row 2.*{named}"):
        preference_dataset.main(Args((f"n={reader}:{file}",), base=base, output_dir=str(tmp_path / "out")))
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


@pytest.mark.parametrize(
    ("source", "settings", "named"),
    [
        ("n=csv:{file}", {}, "readers"),
        ("n=pairs:{root}/y.jsonl.gz", {}, r"y\.jsonl\.gz.* cannot be read"),
        ("n=pairs:{file}", {"mix": ("n=1/0",)}, "--mix n=1/0"),
        ("n=pairs:{file}", {"mix": ("m=1",)}, "every source"),
        ("n=pairs:{file}", {"validation_share": 1.0}, "--validation-share"),
        ("n=pairs:{file}", {"validation_share": 0.0}, "validation"),
        ("n=pairs:{file}", {"base": "nowhere/x"}, "--base nowhere/x"),
        ("n=pairs:{file}", {"output_dir": "{root}"}, "already holds data"),
    ],
)
def test_a_bad_flag_is_named_and_leaves_nothing_behind(base, tmp_path, source, settings, named):
    file = write_jsonl(tmp_path / "x.jsonl", [pair(x) for x in WORDS[:20]])
    (tmp_path / "y.jsonl.gz").write_bytes(gzip.compress(file.read_bytes())[:-20])
    common = {"base": base, "output_dir": str(tmp_path / "out"), "max_query_length": 32, "validation_share": 0.2}
    settings = {k: v.format(root=tmp_path) if isinstance(v, str) else v for k, v in settings.items()}
    with pytest.raises(SystemExit, match=f"^error: .*{named}"):
        preference_dataset.main(Args((source.format(file=file, root=tmp_path),), **common | settings))
    assert sorted(x.name for x in tmp_path.iterdir()) == ["x.jsonl", "y.jsonl.gz"]
