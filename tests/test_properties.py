"""Properties of the data script that hold for any input, tried on generated inputs.

    HYPOTHESIS_PROFILE=long python -m pytest tests/test_properties.py --hypothesis-show-statistics    # 1,600 cases

tests/run.sh tries 40 cases of each."""

import json
import os

import pytest
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st
from test_tldr_dataset import EOS, byte_level_tokenizer, naive_truncation

import tldr_dataset

common = {"deadline": None, "derandomize": True, "print_blob": True}
common["suppress_health_check"] = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
settings.register_profile("short", max_examples=40, **common)
settings.register_profile("long", max_examples=400, **common)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))

TOKENIZER = byte_level_tokenizer()
TOKENIZER.add_special_tokens({"pad_token": "[PAD]"})

# any text that UTF-8 can hold, and texts that are awkward on purpose
unicode_text = st.text(st.characters(exclude_categories=("Cs",)), max_size=80)
pieces = st.sampled_from(
    ["the", "cat", " ", "  ", "\n", "\n\n", "\r\n", "\u2028", "\x00", "e\u0301", "🙂", EOS, "[PAD]", "{post}"]
)
awkward_text = st.lists(pieces, max_size=40).map("".join)
repeated = st.integers(0, 60).map("\n".__mul__) | st.integers(0, 300).map("a ".__mul__)
repeated |= st.integers(0, 60).map("neighbours今天".__mul__)
text = unicode_text | awkward_text | repeated | st.text("ab今天狗🙂\n", max_size=150)
plain_text = st.lists(st.sampled_from("the cat sat on a mat .".split()), min_size=1, max_size=8).map(" ".join)
filled_text = st.tuples(text, plain_text, text).map("".join)
anything = text | st.none() | st.integers() | st.floats() | st.booleans() | st.lists(st.integers(), max_size=2)
# of query and response: tight ones, down to a single token, and such as plain text fits into
widths = st.tuples(st.integers(1, 90), st.integers(1, 60)) | st.just((400, 100)) | st.just((90, 50))


def arguments(query: int, response: int) -> tldr_dataset.Args:
    """Limits of the data script, the same for all its data."""
    tldr_dataset.MAX_QUERY_LENGTH_CNNDM = query
    limits = dict.fromkeys(("max_sft_response_length", "max_rm_response_length"), response)
    return tldr_dataset.Args(max_query_length=query, max_rm_response_length_cnndm=response, **limits)


@pytest.fixture(autouse=True)
def cnndm_length(monkeypatch):
    monkeypatch.setattr(tldr_dataset, "MAX_QUERY_LENGTH_CNNDM", tldr_dataset.MAX_QUERY_LENGTH_CNNDM)


# ---- the data script --------------------------------------------------------------------------------------------


@given(title=plain_text | text, post=text, share=st.floats(-0.2, 1.1))
@example(title="", post="\n" * 50, share=0.0)
@example(title="t", post="the cat\nsat  on \n a    mat\n\n  !!!", share=0.7)
@example(title="t", post="the  cat   sat     on a mat", share=0.6)
@example(title="t", post="neighbours" * 20, share=0.5)  # a longer word can have fewer tokens
def test_truncation_is_the_naive_rule(title, post, share):
    """share: of the post's tokens, roughly, which the limit leaves room for."""
    row = {"subreddit": None, "title": title, "post": post}
    prefix, suffix = f"SUBREDDIT: r/\n\nTITLE: {title}\n\nPOST: ", "\n\nTL;DR:"
    shortest, full = (len(tldr_dataset.encode(TOKENIZER, prefix + body + suffix)) for body in ("", post))
    limit = round(shortest + share * (full - shortest) + min(share, 0))
    try:
        query, tokens = tldr_dataset.truncate_query(row, TOKENIZER, limit)
    except ValueError as error:
        assert shortest > limit and str(error).startswith(f"post: the query has {shortest} tokens without it")
        event("even an empty post does not fit")
        return
    assert query == naive_truncation(prefix, post, suffix, TOKENIZER, limit)
    assert tokens == tldr_dataset.encode(TOKENIZER, query) and len(tokens) <= limit
    kept = query[len(prefix) : len(query) - len(suffix)]
    event("whole" if kept == post else "cut at a newline" if post[len(kept)] == "\n" else "cut by characters")


def check_padding(columns: dict, name: str, width: int, side: str):
    """Return the tokens of a column without [PAD], after checking their number, the column's width and that [PAD] is on
    one side only."""
    tokens, length, pad_id = columns[f"{name}_token"], columns[f"{name}_token_len"], TOKENIZER.pad_token_id
    assert len(tokens) == max(width, length) and length >= 1  # check_widths ends a run with longer ones
    kept, padding = (tokens[-length:], tokens[:-length]) if side == "left" else (tokens[:length], tokens[length:])
    assert set(padding) <= {pad_id} and pad_id not in kept
    return kept


def check_response(columns: dict, name: str, summary: str, widths: tuple[int, int]):
    """A response and query + response: a space before, EOS behind, labels that hide what the query shares."""
    eos_id, pad_id = TOKENIZER.eos_token_id, TOKENIZER.pad_token_id
    assert columns[name] == (summary if summary[0] == " " else " " + summary) + EOS
    tokens = check_padding(columns, name, widths[0], "right")
    assert tokens == tldr_dataset.encode(TOKENIZER, columns[name].removesuffix(EOS)) + [eos_id]
    joined = check_padding(columns, f"query_{name}", widths[1], "right")
    assert columns[f"query_{name}"] == columns["query"].strip() + columns[name]
    assert joined == tldr_dataset.encode(TOKENIZER, columns[f"query_{name}"].removesuffix(EOS)) + [eos_id]
    assert eos_id not in joined[:-1]
    query, label = columns["query_token"][-columns["query_token_len"] :], columns[f"query_{name}_token_response_label"]
    shared = next(
        (i for i, (a, b) in enumerate(zip(query, joined, strict=False)) if a != b), min(len(query), len(joined))
    )
    assert label == [pad_id] * shared + columns[f"query_{name}_token"][shared:]


sft_rows = st.fixed_dictionaries({"id": plain_text, "title": plain_text, "post": filled_text, "summary": plain_text})
sft_rows |= st.fixed_dictionaries({field: text for field in tldr_dataset.SFT_COLUMNS})
sft_rows |= st.dictionaries(st.sampled_from(tldr_dataset.SFT_COLUMNS), anything)


@given(row=sft_rows, limits=widths)
@example(row={"id": "1", "title": "t", "post": "\n", "summary": " "}, limits=(1, 1))
@example(row={"id": "1", "title": "t", "post": f"a {EOS} b [PAD]", "summary": f" a {EOS} [PAD] mat"}, limits=(400, 100))
def test_an_sft_row_becomes_columns_or_a_message_that_names_the_field(row, limits):
    args = arguments(*limits)
    try:
        columns = tldr_dataset.process_sft_row(tldr_dataset.post_fields(row), TOKENIZER, args)
    except ValueError as error:
        assert str(error).startswith(tldr_dataset.SFT_COLUMNS), error
        event("refused")
        return
    event("taken")
    assert columns["query_token_len"] <= limits[0]
    query = check_padding(columns, "query", limits[0], "left")
    assert query == tldr_dataset.encode(TOKENIZER, columns["query"])
    check_response(columns, "reference_response", row["summary"], (limits[1], sum(limits)))


summaries = st.fixed_dictionaries(
    {"text": plain_text | text}, optional={"policy": text | st.none(), "note": text | st.none()}
)
two_summaries = st.lists(summaries, min_size=2, max_size=2)
info = st.fixed_dictionaries(
    {"title": plain_text, "post": filled_text}, optional={"id": text, "subreddit": text | st.none()}
)
confidence = st.fixed_dictionaries({"confidence": st.integers(1, 9) | st.none()})
good = st.lists(st.fixed_dictionaries({"text": plain_text, "policy": plain_text}), min_size=2, max_size=2)
good_pairs = st.fixed_dictionaries({"info": info, "summaries": good, "choice": st.integers(0, 1), "extra": confidence})
pairs = good_pairs | st.fixed_dictionaries(
    {
        "info": info | st.fixed_dictionaries({"article": text}) | anything,
        "summaries": two_summaries | st.lists(summaries | anything, max_size=3) | anything,
        "choice": st.integers(0, 1) | anything,
        "extra": confidence | anything,
    },
    optional={"batch": st.sampled_from(["batch3", "cnndm0"]) | anything, "margin": anything, "worker": anything},
)


@given(row=pairs, limits=widths)
def test_a_pair_becomes_columns_or_a_message_that_names_the_field(row, limits):
    args = arguments(*limits)
    try:
        columns = tldr_dataset.process_preference_row(tldr_dataset.pair_fields(row), TOKENIZER, args)
    except ValueError as error:
        fields = "info summaries choice extra batch split worker margin title post article".split()
        assert str(error).startswith(tuple(fields)), error
        event("refused")
        return
    event("taken")
    check_padding(columns, "query", limits[0], "left")
    for name, place in (("chosen", row["choice"]), ("rejected", 1 - row["choice"])):
        check_response(columns, name, row["summaries"][place]["text"], (limits[1], sum(limits)))
        assert columns[f"{name}_policy"] == row["summaries"][place].get("policy")


@given(
    content=st.binary(max_size=200)
    | st.lists(anything | sft_rows, max_size=6).map(lambda rows: "\n".join(map(json.dumps, rows)).encode())
)
@example(content=b'\xef\xbb\xbf{"id": 1}\n\n{"id": 2}')
@example(content='{"post": "a\u2028b"}\n'.encode())
def test_a_file_is_read_line_by_line_or_refused(tmp_path, content):
    path = tmp_path / "train.jsonl"
    path.write_bytes(content)
    try:
        rows = tldr_dataset.read_file(path)
    except SystemExit as error:
        assert str(error).startswith(f"error: {path}"), error
        event("refused")
        return
    lines = content.removeprefix(b"\xef\xbb\xbf").decode().split("\n")
    filled = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    assert [where for where, _ in rows] == [f"{path}, row {number}" for number, _ in filled]
    assert [json.dumps(row) for _, row in rows] == [json.dumps(json.loads(line)) for _, line in filled]
    event(f"{min(len(rows), 3)} rows or more" if rows else "no rows")
