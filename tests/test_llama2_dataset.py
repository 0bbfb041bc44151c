"""llama2/preference_dataset.py: readers, grades, splits, mixture, tokens and statistics against hand-made cases. In
most tests, each word is one token, so that tokens can be counted by hand."""

import gzip
import json
import shlex

import check_data
import pandas
import pytest
import torch
import tyro
from conftest import ROOT, read_csv, script, write_jsonl
from datasets import load_from_disk
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

preference_dataset = script("llama2/preference_dataset.py")
READERS, MARGINS, Args = preference_dataset.READERS, preference_dataset.MARGINS, preference_dataset.Args

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
LEVELS = {"id": "1", "prompt": "a", "completion_a": "b", "completion_b": "c", "preference": "b-is-better"}
STRENGTH = {"preference_strength": 3, "chosen": chat("a", "b", "c", "d"), "rejected": chat("a", "b", "c", "e")}


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
        ("shp", SHP, chat("a"), "c", "b", "better"),
        ("shp", SHP | {"labels": 1, "score_A": 90}, chat("a"), "b", "c", "slightly"),
        ("gptj", {"prompt": "a", "chosen": "b", "rejected": "c"}, chat("a"), "b", "c", "none"),
        ("helpsteer2", STEER, chat("a"), "c", "b", "better"),
        ("helpsteer2", STEER | {"preference_strength": -1}, chat("a"), "b", "c", "slightly"),
        ("helpsteer2", STEER | {"prompt": "a\n\n<extra_id_1>Assistant\nb\n\nc\n\n<extra_id_1>User\nd\n"},
         chat("a", "b\n\nc", "d\n"), "c", "b", "better"),
        ("strength", STRENGTH, chat("a", "b", "c"), "d", "e", "significantly"),
        ("five_levels", LEVELS, chat("a"), "c", "b", "better"),
        ("five_levels", LEVELS | {"preference": "a-is-slightly-better"}, chat("a"), "b", "c", "slightly"),
        ("pairs", pair(("a", "b", "c"), rating="Negligibly better / unsure"), chat("a", "b", "c"), "x", "y",
         "negligibly"),
    ],
)  # fmt: skip
def test_a_row_of_each_published_form(reader, row, messages, chosen, rejected, grade):
    found = READERS[reader](row)
    assert found.get("messages") == messages and found["grade"] == grade
    assert (found["chosen"], found["rejected"]) == (chosen, rejected)
    if messages is None:
        assert {key: value for key, value in found["post"].items() if value} == row["info"]
    preference_dataset.check_pair(found)


ANSWER = [{"role": "assistant", "content": "b"}]
OTHER = [{"role": "assistant", "content": "c"}]
SYSTEM = [{"role": "system", "content": "s"}]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": chat("a"), "chosen": "b", "rejected": "c"},
        {"prompt": chat("a"), "chosen": ANSWER, "rejected": OTHER},  # TRL, explicit prompt
        {"chosen": chat("a", "b"), "rejected": chat("a", "c")},  # implicit
        {"prompt": "a", "chosen": chat("a", "b"), "rejected": chat("a", "c"), "score_chosen": 8.5},  # UltraFeedback
        {"prompt": "a", "chosen": ANSWER, "rejected": OTHER},
    ],
)
def test_conversations_in_the_forms_of_trl(row):
    expected = {"messages": chat("a"), "chosen": "b", "rejected": "c", "grade": "none"}
    assert expected.items() <= READERS["pairs"](row).items()
    with_system = {"messages": chat("s\n\na")}
    assert with_system.items() <= READERS["pairs"](row | {"system": "s"}).items()
    row = {name: SYSTEM + x if isinstance(x, list) and x[0]["role"] == "user" else x for name, x in row.items()}
    if any(isinstance(x, list) and x[0] == SYSTEM[0] for x in row.values()):
        assert with_system.items() <= READERS["pairs"](row).items()


def test_plain_texts_stay_as_they_are(prepare, tokenizer):
    rows = [{"prompt": f"{x} {y}", "chosen": "u v", "rejected": "w"} for x in WORDS[:8] for y in WORDS[:8]]
    data, _, _ = prepare({"n=pairs": rows})
    row = data["train"][0]
    assert row["query"] in [x["prompt"] for x in rows] and row["query_chosen"] == row["query"] + "u v<|endoftext|>"
    tokens = tokenizer(f"{row['query']} u v <|endoftext|>", add_special_tokens=False).input_ids
    assert [x for x in row["query_token"] if x != tokenizer.pad_token_id] == tokens[:2]
    assert [x for x in row["chosen_token"] if x != tokenizer.pad_token_id] == tokens[2:]


def test_own_pairs_from_a_file_to_policies(world, tmp_path, monkeypatch):
    """The commands of docs/runs.md, at nano size; then the chat template asks with the tokens of training."""
    rows = [chat(f"say {i}", f"{i} is what I say") for i in range(200)]
    rows = [{"chosen": SYSTEM + x, "rejected": [*SYSTEM, x[0], x[1] | {"content": "no"}]} for x in rows]
    write_jsonl(tmp_path / "pairs.jsonl", rows)
    page = (ROOT / "docs/runs.md").read_text().partition("### Preference pairs")[2]
    commands = page.partition("```bash\n")[2].partition("```")[0].splitlines()
    monkeypatch.chdir(tmp_path)
    small = "--batch-size 8 --micro-batch-size 8 --total-episodes 16 --learning-rate 1e-3".split()
    for command in commands:
        _, name, *flags = shlex.split(command.replace("EleutherAI/pythia-1b-deduped", str(world.model)))
        flags += small if "llama2" not in name else ["--max-query-length", "40", "--max-response-length", "24"]
        module = script(name)
        module.main(tyro.cli(module.Args, args=flags + ["--response-length", "8"] * (name == "ppo.py")))
    policy = AutoTokenizer.from_pretrained("runs/mine/ppo/model")
    for row in load_from_disk("data/mine/sft")["validation"]:
        number = row["query"].split("say ")[1].partition("<")[0]
        asked = policy.apply_chat_template([*SYSTEM, *chat(f"say {number}")], add_generation_prompt=True)["input_ids"]
        assert [x for x in row["query_token"] if x != policy.pad_token_id] == asked
        answer = policy.apply_chat_template([*SYSTEM, *chat(f"say {number}", f"{number} is what I say")])["input_ids"]
        assert [x for x in row["query_reference_response_token"] if x != policy.pad_token_id] == answer


def grades(reader: str, rows) -> list[str]:
    return [READERS[reader](row)["grade"] for row in rows]


def test_grade_rules():
    four, short = ["significantly", "better", "slightly", "negligibly"], "negligibly"
    steps = ["tie", short, short, "slightly", "slightly", "better", "better", "significantly", "significantly"]
    assert grades("tldr", (post(extra={"confidence": x}) for x in range(1, 10))) == [*four, short, *four[::-1]]
    scores = (10, 11, 19, 20, 39, 40, 79, 80, 900)
    assert grades("shp", (SHP | {"score_A": 10, "score_B": score} for score in scores)) == steps
    assert grades("shp", [SHP | {"score_A": -3, "score_B": 2}]) == ["slightly"]  # below 1 counts as 1
    scores = (0, 0.1, 0.24, 0.25, 0.49, 0.5, 0.74, 0.75, 1)
    for sign in (1, -1):
        assert grades("webgpt", (WEBGPT | {"score_0": sign * x, "score_1": -sign * x} for x in scores)) == steps
    strengths = (STEER | {"preference_strength": strength} for strength in range(-3, 4))
    assert grades("helpsteer2", strengths) == [*four[:3], "tie", *four[2::-1]]
    answers = [[{"pm_score": score, "text": x} for x, score in (("a", 1), ("b", 1 + gap))] for gap in range(4)]
    assert grades("stack_exchange", ({"question": "q", "answers": two} for two in answers)) == ["tie", *four[2::-1]]
    assert {"significantly": 1, "better": 2 / 3, "slightly": 1 / 3, "negligibly": 0, "none": 0} == MARGINS


def test_files_of_every_kind_hold_the_same_rows(tmp_path):
    rows = [pair("a", rating=0.5), pair(("b\u2028", "c", "d"), rating=1.0)]
    kinds = {"a.jsonl": [json.dumps(row).encode() + b"\n" for row in rows], "b.json": [json.dumps(rows).encode()]}
    kinds["c.json"] = [b"\xef\xbb\xbf\n", *kinds["a.jsonl"]]  # JSON Lines, a byte order mark and an empty line
    kinds["e.json"] = [b"\xef\xbb\xbf", *kinds["b.json"]]
    for name, parts in kinds.items():
        (tmp_path / name).write_bytes(b"".join(parts))
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(b"".join(parts)))
    pandas.DataFrame(rows).to_parquet(tmp_path / "d.parquet")
    files = preference_dataset.parse_source(f"n=pairs:{tmp_path}")["files"]
    assert len(files) == 9
    for file in files:
        found = list(preference_dataset.stream_rows(file))
        assert [json.loads(row) if isinstance(row, str) else row for row in found] == rows, file


def test_tokens_of_a_dialogue(prepare, tokenizer):
    """Responses and labels: test_the_base_gets_the_turns_that_it_lacks, where eval/check_data.py checks them."""
    row = pair(("a b", "b", "c d"), chosen="e f", rejected="g", rating="slightly", rejected_safe=False)
    data, _, _ = prepare({"n=pairs:train:safety": [row], "v=pairs:validation": [pair("z", rating=0.375)]})
    assert (data["validation"][0]["margin"], data["validation"][0]["grade"]) == (0.375, "none")
    row, ids, pad, eos = data["train"][0], tokenizer.get_vocab(), tokenizer.pad_token_id, 0
    user, assistant = ids["<|prompter|>"], ids["<|assistant|>"]
    assert len(data["train"]) == 1 and len({pad, eos, user, assistant}) == 4
    query = [user, ids["a"], ids["b"], eos, assistant, ids["b"], eos, user, ids["c"], ids["d"], eos, assistant]
    text = "<|prompter|>a b<|endoftext|><|assistant|>b<|endoftext|><|prompter|>c d<|endoftext|><|assistant|>"
    assert row["query"] == text and row["query_token_len"] == 12
    assert row["query_token"] == [pad] * 20 + query
    expected = {"source": "n", "batch": "n", "tag": "safety", "split": "train", "grade": "slightly", "turns": 2}
    expected |= {"margin": 1 / 3, "weight": 1, "chosen_safe": None, "rejected_safe": False, "choice": None}
    assert {key: row[key] for key in expected} == expected


def test_prompts_and_chosen_responses_are_sft_data(prepare):
    """Each query of a split once, with its first response that is not labelled unsafe."""
    talks = [
        pair("a b", "c", "d", chosen_safe=False, rejected_safe=False),
        pair("a b", "e", "f", chosen_safe=True, rejected_safe=False),
        pair("i", "j", "k", chosen_safe=False, rejected_safe=False),
        pair("l", "m", "n", rating="tie"),
        pair("a b", "g", "h"),
    ]
    sources = {"posts=tldr:train": [post()], "talk=pairs:train:safety": talks, "held=tldr:validation": [post("z z")]}
    pairs, _, statistics = prepare(sources, ties="half")
    sft = load_from_disk(str(statistics.parent / "sft"))
    assert set(sft) == {"train", "validation"} and sft["validation"]["id"][:] == ["held_0000001"]
    first = {}
    for row in pairs["train"]:
        if row["chosen_safe"] is not False:
            first.setdefault(row["query"], row)
    assert sft["train"]["query"][:] == list(first) and len(first) == 3
    for row in sft["train"]:
        source = first[row["query"]]
        assert row == {column: source[column.replace("reference_response", "chosen")] for column in row}


def test_the_base_gets_the_turns_that_it_lacks(prepare, capsys):
    bare = ROOT / "quickstart" / "bases" / "nano-xs"
    sources = {"n=pairs": [pair((x, "b", "c")) for x in WORDS[:10]], "p=tldr:train": [post()]}
    data, _, statistics = prepare(sources, base=str(bare))
    for name in ("sft", "preference"):
        check_data.main(check_data.Args(str(statistics.parent / name), str(statistics.parent / "base")))
    assert capsys.readouterr().out.count("rows, no damage") == 4
    tokenizer = AutoTokenizer.from_pretrained(statistics.parent / "base")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    row = data["train"][0]
    first = len(row["query_token"]) - row["query_token_len"]
    assert tokenizer.decode(row["query_token"][first - 1 : first + 1]) == "[PAD]<|prompter|>"
    _, _, statistics = prepare({"n=pairs": [pair(x) for x in WORDS[:10]]}, base=str(statistics.parent / "base"))
    assert not (statistics.parent / "base").exists()


def test_a_new_turn_is_not_likelier_than_the_real_tokens(prepare, tmp_path):
    """A base whose own tokens all have a logit of -33, as in pretrained models: 0 would be e^33 times as likely."""
    bare, low = ROOT / "quickstart" / "bases" / "nano-xs", tmp_path / "low"
    model = AutoModelForCausalLM.from_pretrained(bare, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(bare)
    model.resize_token_embeddings(len(tokenizer))  # no spare rows
    hidden = model.base_model(torch.arange(5)[None])[0][0, -1].detach()
    weight = model.get_output_embeddings().weight.data
    weight -= torch.outer(weight @ hidden + 33, hidden) / (hidden @ hidden)
    model.save_pretrained(low)
    tokenizer.save_pretrained(low)
    _, _, statistics = prepare({"n=pairs": [pair((x, "b", "c")) for x in WORDS[:10]]}, base=str(low))
    logits = AutoModelForCausalLM.from_pretrained(statistics.parent / "base")(torch.arange(5)[None]).logits[0, -1]
    assert len(logits) > len(weight) and logits.tolist() == pytest.approx([-33] * len(logits), abs=1e-3)


def test_a_prompt_is_on_one_side_and_files_of_a_split_decide_which(prepare):
    """Prompts with later stages of their dialogue and posts, and files that are of one split as a whole."""
    turns = [f"{x} {y}" for x in WORDS[:12] for y in WORDS[:10]]
    free = [pair(turn + end, chosen=x) for turn in turns for x, end in (("u", ""), ("v", " "))]
    sources = {"n=pairs": free, "m=pairs": [pair((turn, "w", "z")) for turn in turns]}
    sources |= {"p=tldr": [post(turn, chosen) for turn in turns for chosen in (" u", " v")]}
    sources |= {"t=pairs:train": [pair(turn, "w") for turn in turns]}
    sources |= {"v=pairs:validation": [pair(turn, "z") for turn in turns[:5]]}
    data, counts, _ = prepare(sources)
    first = {split: {query.split("<|endoftext|>")[0].strip() for query in data[split]["query"]} for split in data}
    assert not first["train"] & first["validation"]
    for name in "nmp":
        share = counts[name]["validation"] / (counts[name]["train"] + counts[name]["validation"])
        assert 0.1 < share < 0.35  # a fifth of the prompts by their hash, and the five
    assert counts["v"]["validation"] == 5 and counts["v"]["train"] == 0 == counts["t"]["validation"]
    assert {f"<|prompter|>{turn}" for turn in turns[:5]} <= first["validation"]
    assert counts["t"]["prompt in validation"] == counts["n"]["validation"] / 2


def test_stages_of_a_shortened_dialogue_stay_together(prepare):
    turns = [f"{x} {y}" for x in WORDS[:12] for y in WORDS[:10]]
    stages = [pair((turn, "w", f"z {turn}"), chosen=x) for turn in turns for x in "uv"]  # 16 tokens
    later = [pair((turn, "w", f"z {turn}", "q", "w w w w w w"), chosen=x) for turn in turns for x in "uv"]
    same = [pair((turn, "w " * 14, "q q"), chosen=turn.replace(" ", "")) for turn in turns]  # alike once they are short
    data, counts, _ = prepare({"n=pairs": later + same + stages}, max_query_length=20)
    assert not set(data["train"]["query"]) & set(data["validation"]["query"]) and counts["n"]["shortened"] > 150
    of = {split: {query.split("z ")[1][:3] for query in set(data[split]["query"]) if "z " in query} for split in data}
    assert not of["train"] & of["validation"] and len(of["validation"]) > 5 and counts["n"]["prompt in validation"] > 24


def test_ties_are_dropped_or_halved(prepare):
    rows = [pair(x, rating="tie", chosen_safe=True, rejected_safe=True) for x in WORDS[:20]]
    sure = [pair(x, "u", "v", rating="better") for x in WORDS[:20]]
    data, counts, _ = prepare({"n=pairs": rows + sure})
    assert counts["n"]["ties"] == 20 and sum(map(len, data.values())) == 20
    data, counts, _ = prepare({"n=pairs": rows + sure}, ties="half")
    held_out = len(data["validation"])
    assert counts["n"]["ties"] == held_out and counts["n"]["ties halved"] == 20 - held_out  # no ties in validation
    tied = [row for row in data["train"] if row["weight"] == 0.5]
    both = {(row["query"], row["chosen"], row["rejected"]) for row in tied}
    assert len(both) == len(tied) == 2 * (20 - held_out)
    for row in tied:
        assert (row["query"], row["rejected"], row["chosen"]) in both
        assert row["margin"] == 0 and row["grade"] == "negligibly" and row["chosen_safe"] is True


def test_shares_are_exact_and_the_seed_decides(prepare):
    many = {
        "n=pairs:train": [pair(f"{x} {y}", rating="tie" if x == "a" else None) for x in "abcdefgh" for y in WORDS[:10]],
        "m=pairs:train": [pair(f"a {x} {y}") for x in "abcd" for y in WORDS[:10]],
        "o=pairs:validation": [pair("z z")],
        "o=pairs:train": [pair(f"c c {x}") for x in WORDS[:20]],
    }
    mix = {"mix": ("n=0.5", "m=3/8", "o=0.125"), "ties": "half"}
    data, counts, _ = prepare(many, **mix)
    # 80 / 0.5, 40 / (3/8) = 106.7 and 20 / 0.125: m is the first to run out; the shares are exact in multiples of 8
    weights = data["train"].to_pandas().groupby("source")["weight"].sum()
    assert weights.to_dict() == {"n": 52, "m": 39, "o": 13}
    assert [counts[name]["mixed"] for name in "nmo"] == [52, 39, 13]
    assert [counts[name]["share"] for name in "nmo"] == [0.5, 0.375, 0.125]
    rows = [(row["query"], row["chosen"]) for row in data["train"]]
    again, other = (prepare(many, **mix, seed=seed)[0] for seed in (1, 2))
    assert [(row["query"], row["chosen"]) for row in again["train"]] == rows
    assert sorted((row["query"], row["chosen"]) for row in other["train"]) != sorted(rows)


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
    grades = [list(row.values()) for row in read_csv(statistics / "grades.csv")]
    assert grades == [["talk", *"00013"], ["posts", *"01000"], ["v", *"00001"]]


def test_every_row_is_counted_once(prepare):
    bad = ['{"prompt"\n', pair("a", "x", "x")]  # no JSON, equal responses
    rows = [pair(x, rating="better") for x in WORDS[:10]]
    once = [pair("a", rating="slightly"), pair("a", "x", "z", rating="better"), pair("a", "y", "x", rating="better")]
    once += [pair(("a", "b", "c"), rating="better")]  # no duplicates: another grade, response, order, or dialogue
    long = [pair("a b", "x " * 7), pair("a c", "x", "y " * 8), pair("a d", "x " * 8)]  # 8, 9 and 9 with EOS
    long += [pair("b " * 29), pair("b " * 30), pair(("b " * 40, "c", "e f"))]  # 32 with its turns, 33, and cut
    labels = [{"chosen_safe": a, "rejected_safe": b} for a in (True, False, None) for b in (True, False, None)]
    safe = [pair(f"{rating} {i}", rating=rating, **x) for i, x in enumerate(labels) for rating in ("better", "tie")]
    posts = [post("a " * 40), post(info={"title": "a " * 40}), post("a", "x " * 8), post(), post()]
    sources = {"n=pairs:train": [*bad, *rows, rows[0], *once, *long, *safe], "m=pairs:train": rows[:4]}
    sources |= {"p=tldr:train": posts, "v=pairs:validation": [pair("z"), pair("y", rating="tie")]}
    data, counts, _ = prepare(sources, bad_rows="skip", ties="half")
    # of the 9 labels, 1 is against the rule in one order and 2 in either, as for ties
    expected = {"rows": 41, "bad rows": 2, "unsafe chosen": 1 + 2, "duplicates": 1, "prompt too long": 1}
    expected |= {"response too long": 2, "train": 10 + 4 + 3 + 15, "mixed": 32, "ties halved": 7, "shortened": 1}
    of_posts = {"rows": 5, "prompt too long": 1, "response too long": 1, "duplicates": 1}
    of_posts |= {"train": 2, "mixed": 2, "shortened": 1}
    of_all = {"n": expected, "m": {"rows": 4, "duplicates": 4}, "p": of_posts}
    for name, own in (of_all | {"v": {"rows": 2, "ties": 1, "validation": 1}}).items():
        assert {fate: count for fate, count in counts[name].items() if count and fate != "share"} == own
    assert len(data["train"]) == 32 + 7 + 2 and "<|prompter|>e f<|endoftext|><|assistant|>" in data["train"]["query"]
    assert (False, True) not in zip(data["train"]["chosen_safe"], data["train"]["rejected_safe"], strict=True)


@pytest.mark.parametrize(
    ("reader", "row", "named"),
    [
        ("pairs", pair("a", rating="great"), "rating"),
        ("pairs", pair("a", " "), "chosen is empty"),
        ("pairs", pair("a", "b <|prompter|> c"), r"holds <\|prompter\|>"),
        ("pairs", pair(("a", "b")), "last turn"),
        ("pairs", pair("a") | {"messages": [*chat("a"), *chat("b")]}, "turn 2"),
        ("hh", {"chosen": f"{HH} a", "rejected": f"\n\nHuman: z{HH} b"}, "not the same"),
        ("webgpt", WEBGPT | {"score_1": 0.25}, "add up to 0"),
        ("pairs", {"chosen": chat("a", "b"), "rejected": chat("x", "c")}, "do not begin with the same"),
        ("pairs", {"prompt": "a", "chosen": chat("b"), "rejected": chat("c")}, "should end with a message of the ass"),
    ],
)
def test_a_bad_row_is_named(reader, row, named):
    with pytest.raises(SystemExit, match=f"^error: here: the reader {reader} cannot use it .*{named}"):
        preference_dataset.read_pair("here", row, {"reader": reader}, Args(()))


@pytest.mark.parametrize(
    ("source", "settings", "named"),
    [
        ("n=csv:{file}", {}, "readers"),
        ("n=hh:{file}", {}, r"\S*x\.jsonl, row 1: the reader hh cannot use it .*--bad-rows skip"),
        ("n=pairs:{root}/y.jsonl.gz", {}, r"y\.jsonl\.gz.* cannot be read"),
        ("n=pairs:{file}", {"mix": ("n=1/2",)}, "--mix n=1/2.* add up to 1"),
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
