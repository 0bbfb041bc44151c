"""quickstart/: generated posts with a known truth, nano models, their pretraining, and the commands of run.sh."""

import importlib.util
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from math import cos, pi
from pathlib import Path
from statistics import fmean, stdev

import nano
import posts
import pretrain
import pytest
import torch
import truth
import tyro
from accelerate.state import AcceleratorState
from conftest import files, read_csv, read_jsonl
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
CORE, EXTRA = {"person", "event", "object"}, {"age", "feeling", "question"}
# the world as posts.py describes it: shares of the posts (and of the pretraining documents) with so many facts, of the
# core facts that a reference summary tells, of the authors who tell an extra one with so much chance, of the references
# and near-perfect summaries with a flaw
POST_FACTS, DOCUMENT_FACTS = {4: 1 / 6, 5: 2 / 6, 6: 3 / 6}, {4: 1 / 4, 5: 2 / 4, 6: 1 / 4}
TOLD_CORE, AUTHORS, FLAWED = 0.9, {0.8: 0.25, 0.1: 0.75}, 0.1
SPLITS = ("train", "validation", "test")
MEDIUM = {"num_train": 2000, "num_validation": 300, "num_test": 300, "num_comparisons": 2000}
MEDIUM |= {"num_validation_comparisons": 400, "num_cnndm_comparisons": 300, "num_pretraining": 400}
SMALL = {"num_train": 60, "num_validation": 12, "num_test": 12, "num_comparisons": 40}
SMALL |= {"num_validation_comparisons": 30, "num_cnndm_comparisons": 30, "num_pretraining": 20, "vocab_size": 400}


def close(values: list[float], mean: float) -> bool:
    """Whether the mean of values is within four of its standard errors of the expected one."""
    return abs(fmean(values) - mean) < 4 * stdev(values) / len(values) ** 0.5


@pytest.fixture(scope="module")
def raw(tmp_path_factory) -> Path:
    """A folder with every file, made once."""
    folder = tmp_path_factory.mktemp("posts") / "raw"
    posts.main(posts.Args(output_dir=str(folder), **MEDIUM))
    return folder


@pytest.fixture(scope="module")
def all_posts(raw) -> list[dict]:
    return [row for split in SPLITS for row in read_jsonl(raw / f"posts/{split}.jsonl")]


@pytest.fixture(scope="module")
def pairs(raw) -> list[tuple[dict, str, list[float]]]:
    """All comparisons, each with the text that it is about and the true scores of its two summaries."""
    found = []
    for row in read_jsonl(raw / "comparisons/train.jsonl") + read_jsonl(raw / "comparisons/validation.jsonl"):
        text = row["info"]["article"] or row["info"]["post"]
        found.append((row, text, [truth.score(text, summary["text"]) for summary in row["summaries"]]))
    return found


# ---- truth ----------------------------------------------------------------------------------------------------------

POST = "I (24F) am new here.\nLast Friday my sister broke my laptop.\nI feel sad. Should I move out?"  # six facts
WORDS = "the of it a and so then they we you he she who what when where why how if or but not no yes only".split()


@pytest.mark.parametrize(
    ("summary", "expected"),
    [
        ("", 0),
        ("I'm 24, my sister broke my laptop, feeling sad, should I move out?", 1),
        ("24yo: SISTER Broke lapTOP", 4 / 6),  # upper or lower case, and letters behind the age
        ("I am 24, or 25?", (1 - 1) / 6),  # a contradiction: one right, one wrong
        ("sad, angry, tired, move out, stay quiet", (2 - 3) / 6),
        ("carpets this morning: sisterly, broken laptops, sadly 240, 1243, a24, moved out, bring a cart", 0),
        ("aged 17, 60, 05 and 99", 0),  # no ages of this world
        (" ".join(["sister", *WORDS[:23]]), 1 / 6),  # 24 words
        (" ".join(["sister", *WORDS[:24]]), 1 / 6 - 0.02),
        ("He did that! he, DID, that; he did-that", -0.4),  # seven runs, three different ones
    ],
)
def test_score_by_hand(summary, expected):
    assert truth.score(POST, summary) == pytest.approx(expected, abs=1e-12)


def test_score_counts_the_facts_of_the_post():
    assert truth.score("My car.", "The car") == 1
    assert truth.score("My car. Or the bike of a wife?", "The car") == pytest.approx(1 / 3)
    assert truth.score("I was 24 when I turned 25.", "24 and 31") == 0  # one of two, and one wrong
    for text in ("", "The carpenter was 17 this morning."):
        with pytest.raises(ValueError, match="no fact in the post"):
            truth.score(text, "my sister")


def test_each_value_names_itself_only():
    assert set(truth.FACTS) == CORE | EXTRA
    for kind, values in truth.FACTS.items():
        assert len(values) == len(set(values)) >= 20
        for value in values:
            for text in (value, f"so, {value.upper()}.", f"({value})"):
                assert truth.find_facts(text) == {k: ({value} if k == kind else set()) for k in truth.FACTS}, text


# ---- posts ----------------------------------------------------------------------------------------------------------


def test_bytes_depend_on_the_seed_and_not_on_the_process(tmp_path):
    for name, seed in (("here", 1), ("other", 2)):
        posts.main(posts.Args(output_dir=str(tmp_path / name), seed=seed, **SMALL))
    # set order and string hashes differ between processes
    flags = [part for name, value in SMALL.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, str(ROOT / "quickstart/posts.py"), "--output-dir", str(tmp_path / "there"), *flags]
    environment = os.environ | {"PYTHONHASHSEED": "7", "TOKENIZERS_PARALLELISM": "true"}
    subprocess.run(command, check=True, env=environment, capture_output=True)
    here, there, other = (files(tmp_path / name) for name in ("here", "there", "other"))
    assert here == there and here.keys() == other.keys()
    same = {name for name in here if here[name] == other[name]}
    assert not {name for name in same if name.endswith((".jsonl", "tokenizer.json"))}


def test_post_schema_and_splits(raw, all_posts):
    assert [len(read_jsonl(raw / f"posts/{split}.jsonl")) for split in SPLITS] == [2000, 300, 300]
    for row in all_posts:
        assert list(row) == ["id", "subreddit", "title", "post", "summary"]
        assert all(isinstance(value, str) and value and value == value.strip() for value in row.values())
        assert row["post"].count("\n") == 2
        assert "{" not in row["title"] + row["post"] + row["summary"]
        assert row["subreddit"] in posts.SUBREDDITS
    assert len({row["id"] for row in all_posts}) == len(all_posts)


def test_no_post_is_in_two_splits(all_posts, tmp_path, monkeypatch):
    assert len({row["post"] for row in all_posts}) == len(all_posts)
    # in a world of 40 texts, of which the splits need 30
    facts = {"person": "boss", "age": "30", "event": "hid", "object": "tent"}
    monkeypatch.setattr(posts, "draw_facts", lambda *_: facts)
    monkeypatch.setattr(posts, "write_text", lambda *args: "At 30, my boss hid my tent" + "!" * args[-1].randrange(40))
    counts = {"num_train": 20, "num_validation": 5, "num_test": 5, "num_cnndm_comparisons": 0, "num_pretraining": 0}
    posts.main(posts.Args(output_dir=str(tmp_path / "raw"), **(SMALL | counts)))
    assert len({row["post"] for split in SPLITS for row in read_jsonl(tmp_path / f"raw/posts/{split}.jsonl")}) == 30


def kinds_told(text: str) -> dict[str, str]:
    """Kind -> value of the facts in a text that has no kind twice."""
    found = truth.find_facts(text)
    assert all(len(values) <= 1 for values in found.values()), (text, found)
    return {kind: value for kind, values in found.items() for value in values}


def test_every_post_holds_one_value_of_four_to_six_kinds(all_posts, pairs):
    articles = [text for row, text, _ in pairs if row["info"]["article"]]
    for texts in ([row["post"] for row in all_posts], articles):
        told = [kinds_told(text) for text in texts]
        assert all(CORE <= set(facts) for facts in told)
        assert {len(facts) for facts in told} == set(POST_FACTS)
        for n, share in POST_FACTS.items():
            assert close([len(facts) == n for facts in told], share)
        values = {(kind, value) for facts in told for kind, value in facts.items()}
        assert texts is articles or values == {(kind, v) for kind in truth.FACTS for v in truth.FACTS[kind]}


# ---- comparisons ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tables(raw) -> dict[str, list[dict]]:
    """The comparisons of posts for training and validation, and those of articles."""
    validation = read_jsonl(raw / "comparisons/validation.jsonl")
    return {
        "train": read_jsonl(raw / "comparisons/train.jsonl"),
        "validation": [row for row in validation if row["info"]["article"] is None],
        "cnndm": [row for row in validation if row["info"]["article"] is not None],
    }


def test_pairs_are_about_posts_of_their_split(raw, tables):
    assert {name: len(rows) for name, rows in tables.items()} == {"train": 2000, "validation": 400, "cnndm": 300}
    for split in ("train", "validation"):
        sources = {row["id"]: row for row in read_jsonl(raw / f"posts/{split}.jsonl")}
        for row in tables[split]:
            source = sources[row["info"]["id"]]
            copied = {"reference": source["summary"], "copied_title": source["title"]}
            assert row["info"] == {key: source.get(key) for key in row["info"]}
            for summary in row["summaries"]:
                assert summary["text"] == f" {copied.get(summary['policy'], summary['text'][1:])}"
    articles = {(row["info"]["id"], row["info"]["article"]) for row in tables["cnndm"]}
    assert len({name for name, _ in articles}) == len({text for _, text in articles}) == len(tables["cnndm"])


def test_choice_follows_the_truth_with_the_noise_share(pairs, tmp_path):
    gaps = [abs(scores[0] - scores[1]) for _, _, scores in pairs]
    assert 0.25 - 1e-6 <= min(gaps) < 0.27  # no pair without a right choice
    assert close([scores[1] > scores[0] for _, _, scores in pairs], 0.5)  # the better one is as often the second
    for about_articles in (False, True):
        rows = [pair for pair in pairs if bool(pair[0]["info"]["article"]) == about_articles]
        assert close([row["choice"] != (scores[1] > scores[0]) for row, _, scores in rows], 0.25)
    for share in (0, 1):
        posts.main(posts.Args(output_dir=str(tmp_path / str(share)), label_noise=share, **SMALL))
        for split in ("train", "validation"):
            for row in read_jsonl(tmp_path / f"{share}/comparisons/{split}.jsonl"):
                text = row["info"]["article"] or row["info"]["post"]
                first, second = (truth.score(text, summary["text"]) for summary in row["summaries"])
                assert (row["choice"] == (second > first)) == (share == 0)


def test_confidence_is_on_the_side_of_the_choice_and_follows_the_gap(pairs):
    gaps = {1: [], 2: [], 3: [], 4: []}
    for row, _, scores in pairs:
        confidence = row["extra"]["confidence"]
        if confidence is not None:
            assert (confidence > 5) == (row["choice"] == 1)
            gaps[abs(confidence - 5)].append(abs(scores[0] - scores[1]))
    for level in (1, 2, 3):
        assert max(gaps[level]) <= min(gaps[level + 1]) + 1e-5


# ---- yardsticks and pretraining documents ---------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["validation", "test"])
def test_yardsticks(raw, split):
    rows, of = read_jsonl(raw / f"posts/{split}.jsonl"), read_jsonl(raw / f"yardsticks/{split}.jsonl")
    assert [row["id"] for row in of] == [row["id"] for row in rows]
    complete = []
    for row, yardstick in zip(rows, of, strict=True):
        assert yardstick["copied_title"] == row["title"]
        facts, said = kinds_told(row["post"]), kinds_told(yardstick["near_perfect"])
        assert said.items() <= facts.items() and len(said) >= len(facts) - 1
        complete.append(said == facts)
    assert close(complete, 1 - FLAWED)


DOCUMENT = re.compile(r"SUBREDDIT: r/(\w+)\n\nTITLE: (.+)\n\nPOST: (.+\n.+\n.+)\n\n([^\0]+)")


def test_pretraining_documents_restate_their_own_post(raw, all_posts):
    """And it is no post of the data set."""
    texts = [row["text"] for row in read_jsonl(raw / "pretraining.jsonl")]
    assert len(texts) == 400 == len(set(texts))
    known, numbers = {row["post"] for row in all_posts}, []
    for text in texts:
        assert "TL;DR" not in text and "{" not in text
        _, title, post, rest = DOCUMENT.fullmatch(text).groups()
        facts = kinds_told(post)
        assert post not in known and CORE <= set(facts)
        numbers.append(len(facts))
        for line in [title, *rest.split("\n\n")]:
            assert kinds_told(line).items() <= facts.items(), line
    for n, share in DOCUMENT_FACTS.items():
        assert close([number == n for number in numbers], share)


# ---- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_test": 0}, "--num-test is 0; it must be 1 or more"),
        ({"label_noise": 1.5}, "--label-noise is 1.5"),
    ],
)
def test_posts_errors_leave_nothing_behind(tmp_path, change, words):
    with pytest.raises(SystemExit, match="^error: ") as error:
        posts.main(posts.Args(output_dir=str(tmp_path / "raw"), **(SMALL | change)))
    assert words in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_existing_folders_are_left_alone(raw, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "note").write_text("keep")
    calls = [
        lambda: posts.main(posts.Args(output_dir=str(folder), **SMALL)),
        lambda: nano.main(nano.Args(output_dir=str(folder), tokenizer=str(raw / "tokenizer"))),
        lambda: pretrain.main(pretrain.Args(output_dir=str(folder), documents=str(raw))),
    ]
    for call in calls:
        with pytest.raises(SystemExit, match="^error: .* exists; remove it .* or name another --output-dir"):
            call()
    assert files(tmp_path) == {"mine/note": b"keep"}


def test_leftovers_of_a_killed_run_do_not_get_in(raw, tmp_path):
    for name in ("raw", "nano"):
        (tmp_path / f"{name}.tmp/posts").mkdir(parents=True)
        (tmp_path / f"{name}.tmp/posts/stray").write_text("broken")
    posts.main(posts.Args(output_dir=str(tmp_path / "raw"), **SMALL))
    make_nano(tmp_path / "nano", raw / "tokenizer")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nano", "raw"] and not list(tmp_path.rglob("stray"))


# ---- nano -----------------------------------------------------------------------------------------------------------


def make_nano(folder: Path, tokenizer: Path, **kwargs) -> Path:
    nano.main(nano.Args(output_dir=str(folder), tokenizer=str(tokenizer), **kwargs))
    return folder


def padded(raw: Path) -> int:
    """The vocabulary of a model for the tokenizer: its tokens and one more, up to a multiple of 64."""
    size = len(AutoTokenizer.from_pretrained(raw / "tokenizer")) + 1
    while size % 64:
        size += 1
    return size


# 12 h^2 + 13 h a layer and 2 h for the last norm: h = 64, 96, 128 and 2, 4, 4 layers
PARAMETERS = {"xs": 100_096, "s": 447_552, "m": 793_344}


@pytest.mark.parametrize("size", PARAMETERS)
def test_sizes_and_shapes_are_those_of_pythia(raw, tmp_path, capsys, size):
    folder = make_nano(tmp_path / "nano", raw / "tokenizer", size=size)
    model = AutoModelForCausalLM.from_pretrained(folder)
    inner, total = nano.count_parameters(model)
    assert inner == PARAMETERS[size]
    assert total == inner + 2 * padded(raw) * model.config.hidden_size  # untied: input and output embeddings
    assert model.config.hidden_size == 32 * model.config.num_attention_heads
    assert f"{inner:,} parameters without embeddings" in capsys.readouterr().out
    config = model.config  # Pythia's choices
    assert (config.model_type, config.hidden_act, config.use_parallel_residual) == ("gpt_neox", "gelu", True)
    assert config.rope_parameters["partial_rotary_factor"] == 0.25
    assert config.attention_dropout == config.hidden_dropout == 0
    assert config.max_position_embeddings == 2048 and config.intermediate_size == 4 * config.hidden_size
    assert config.bos_token_id == config.eos_token_id == 0 and config.pad_token_id is None


@pytest.mark.parametrize("architecture", ["gpt_neox", "gpt2", "llama", "qwen3"])
def test_folder_loads_and_runs_in_float32(raw, tmp_path, architecture):
    folder = make_nano(tmp_path / "nano", raw / "tokenizer", architecture=architecture)
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"F32"}
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == architecture and config["dtype"] == "float32"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    original = AutoTokenizer.from_pretrained(raw / "tokenizer")
    assert tokenizer.pad_token is None and tokenizer.get_vocab() == original.get_vocab()
    # like the real GPT-2, that one has no room for [PAD]; the others have
    assert config["vocab_size"] == (len(tokenizer) if architecture == "gpt2" else padded(raw))
    model = AutoModelForCausalLM.from_pretrained(folder)
    inner, _ = nano.count_parameters(model)
    assert 85_000 < inner < 105_000
    ids = tokenizer("My sister broke my bike.", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = model(ids).logits
    assert logits.shape == (*ids.shape, config["vocab_size"]) and logits.isfinite().all()


def test_weights_follow_the_seed(raw, tmp_path):
    weights = []
    for name, seed in (("first", 1), ("again", 1), ("other", 2)):
        folder = make_nano(tmp_path / name, raw / "tokenizer", seed=seed)
        weights.append((folder / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


def test_a_missing_tokenizer_is_one_clear_error(tmp_path):
    with pytest.raises(SystemExit, match="^error: --tokenizer .*/nowhere is neither") as error:
        make_nano(tmp_path / "nano", tmp_path / "nowhere")
    assert "\n" not in str(error.value) and list(tmp_path.iterdir()) == []


# ---- pretrain -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(raw, tmp_path_factory) -> Path:
    """A model of size xs with random weights for the tokenizer of `raw`."""
    return make_nano(tmp_path_factory.mktemp("base") / "nano-xs", raw / "tokenizer")


@pytest.fixture(scope="module")
def model(base):
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def random_documents(lengths: list[int], seed: int = 0) -> list[torch.Tensor]:
    """Documents of random tokens that end with EOS, id 0; the first token numbers the document."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(1, 1000, (length,), generator=generator) for length in lengths]
    for i, row in enumerate(rows):
        row[0], row[-1] = i, 0
    return rows


def test_batches_are_whole_and_hold_every_document_once():
    rng = random.Random(1)
    documents = random_documents([rng.randint(2, 300) for _ in range(50 * 4 + 30)])  # a whole pool, and 7 batches and 2
    batches = pretrain.batches_of(documents, 4, seed=3)
    assert [len(batch) for batch in batches] == [4] * 57
    numbers = [document[0].item() for batch in batches for document in batch]
    assert len(set(numbers)) == 4 * 57
    assert all(document.equal(documents[document[0]]) for batch in batches for document in batch)
    again, other = pretrain.batches_of(documents, 4, seed=3), pretrain.batches_of(documents, 4, seed=4)
    assert [d[0].item() for batch in again for d in batch] == numbers
    assert sorted(d[0].item() for batch in other for d in batch) != sorted(numbers)  # others are left over
    assert sum(map(len, pretrain.batches_of(documents[:200], 4, seed=3))) == 200


def own_loss(model, documents: list[torch.Tensor]) -> tuple[float, int, list[torch.Tensor]]:
    """Summed loss, number of predicted tokens and hits (T - 1,) of each document, one by one and without padding."""
    total, count, hits = 0.0, 0, []
    for document in documents:
        with torch.no_grad():
            logprobs = model(document[None, :]).logits[0, :-1].log_softmax(-1)
        nexts = document[1:]
        total -= sum(logprobs[t, token].item() for t, token in enumerate(nexts.tolist()))
        count += len(nexts)
        hits.append(logprobs.argmax(-1) == nexts)
    return total, count, hits


def test_document_loss_is_a_mean_over_tokens_that_padding_does_not_change(model):
    documents = random_documents([9, 30, 2, 17])
    with torch.no_grad():  # some guesses of a random model must be right, to see them
        documents[1][5] = model(documents[1][None, :5]).logits[0, -1].argmax()
    total, count, own_hits = own_loss(model, documents)
    loss, hits, targets = pretrain.document_loss(model, documents)
    assert loss.item() == pytest.approx(total / count, rel=1e-5) and loss.requires_grad
    assert hits.shape == targets.shape == (4, 29) and own_hits[1][4]
    for document, hit, target, own in zip(documents, hits, targets, own_hits, strict=True):
        n = len(document) - 1
        assert target[:n].equal(document[1:]) and (target[n:] == -100).all()
        assert hit[:n].equal(own) and not hit[n:].any()


def test_pretraining_is_the_documented_loop(raw, base, tmp_path):
    (tmp_path / "nano.tmp").mkdir()
    (tmp_path / "nano.tmp/stray").write_text("broken")  # of a killed run
    folder = tmp_path / "nano"
    settings = {"steps": 3, "batch_size": 8, "held_out": 40, "eval_every": 2, "learning_rate": 0.2, "seed": 5}
    pretrain.main(pretrain.Args(model=str(base), documents=str(raw), output_dir=str(folder), **settings))
    assert [path.name for path in tmp_path.iterdir()] == ["nano"] and "stray" not in files(folder)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    texts = [row["text"] for row in read_jsonl(raw / "pretraining.jsonl")]
    documents = [torch.tensor([*ids, 0]) for ids in tokenizer(texts)["input_ids"]]
    batches = pretrain.batches_of(documents[40:], 8, seed=5)  # the first 40 are held out
    masks = [pretrain.restated_words(tokenizer, *pair) for pair in zip(texts[:40], documents[:40], strict=True)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.1)
    losses, lines = [], []
    for step in (1, 2, 3):
        optimizer.param_groups[0]["lr"] = 0.2 * step / 100 * (1 + cos(pi * step / 3)) / 2  # 100 steps up, cosine to 0
        loss, _, _ = pretrain.document_loss(model, batches[step - 1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step > 1:  # a line of the mean since the line before
            lines.append({"step": step, "loss": fmean(losses)} | pretrain.evaluate(model, documents[:40], masks))
            losses = []
    found = [{key: float(value) for key, value in row.items()} for row in read_csv(folder / "pretraining.csv")]
    assert found == [pytest.approx(line, rel=1e-5) for line in lines]
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == tokenizer.get_vocab()
    written = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    assert all(written[name].equal(weight.to(torch.bfloat16)) for name, weight in model.state_dict().items())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"steps": 0}, "--steps is 0; it must be 1 or more"),
        ({"held_out": 393}, "has 400 documents; --held-out and one batch need 401"),
        ({"documents": "nowhere"}, "nowhere/pretraining.jsonl is missing; write it with posts.py --num-pretraining"),
        ({"model": "nowhere"}, "--model nowhere holds no config.json; make the model with quickstart/nano.py"),
    ],
)
def test_pretrain_errors_leave_nothing_behind(raw, base, tmp_path, change, words):
    arguments = {"model": str(base), "documents": str(raw), "batch_size": 8, "output_dir": str(tmp_path / "nano")}
    with pytest.raises(SystemExit, match="^error: ") as error:
        pretrain.main(pretrain.Args(**(arguments | change)))
    assert words in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", PARAMETERS)
def test_the_bases_of_the_repository_can_copy(raw, size):
    """And what they are measured by is an own loop over documents without padding."""
    folder = ROOT / "quickstart/bases" / f"nano-{size}"
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert nano.count_parameters(base)[0] == PARAMETERS[size]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    other = AutoTokenizer.from_pretrained(ROOT / "quickstart/bases/nano-xs")  # they share their tokenised data
    assert tokenizer.get_vocab() == other.get_vocab() and tokenizer.pad_token is None and tokenizer.eos_token_id == 0
    assert len(tokenizer) < base.config.vocab_size  # room for [PAD]
    for values in truth.FACTS.values():
        assert all(len(tokenizer(f" {value}")["input_ids"]) == len(value.split()) for value in values)
    # of another seed than what it has read; two batches, of 32 and 8
    texts = [row["text"] for row in read_jsonl(raw / "pretraining.jsonl")[:40]]
    documents = [torch.tensor([*ids, 0]) for ids in tokenizer(texts)["input_ids"]]
    masks = [pretrain.restated_words(tokenizer, *pair) for pair in zip(texts, documents, strict=True)]
    found = pretrain.evaluate(base, documents, masks)
    total, count, hits = own_loss(base, documents)
    right = sum((hit & mask[1:]).sum().item() for hit, mask in zip(hits, masks, strict=True))
    words = sum(mask[1:].sum().item() for mask in masks)
    assert found == pytest.approx({"held_out_loss": total / count, "copying_accuracy": right / words}, rel=1e-5)
    assert found["copying_accuracy"] > 0.9


# ---- run.sh: the commands that it gives, recorded by a stand-in for python -------------------------------------------

STAND_IN = """#!{python}
import json, pathlib, sys
args = ["ruff"] * sys.argv[0].endswith("ruff") + sys.argv[1:]
with open("{log}", "a") as log:
    log.write(json.dumps(args) + "\\n")
if "{dies}" in args:
    sys.exit(3)
made = {{"reward.py": "accuracy", "dpo.py": "accuracy", "eval/samples.py": "rouge"}}
if args[0] == "eval/samples.py" or "--output-dir" in args:  # what a finished command leaves, stages in a new folder
    folder = pathlib.Path(args[args.index("--output-dir") + 1] if "--output-dir" in args else args[1])
    if args[0] != "eval/samples.py":
        folder.mkdir(parents=True)
    (folder / "eval").mkdir(exist_ok=True)
    if args[0] in made:
        (folder / "eval" / (made[args[0]] + ".csv")).touch()
"""


class Clone:
    """A copy of the shell scripts with a virtual environment whose python only records how it is called."""

    def __init__(self, folder: Path):
        self.root, self.log = folder / "clone", folder / "log"
        for name in ("quickstart/run.sh", "quickstart/setup.sh", "tests/run.sh", "tests/requirements.txt", ".ci/run"):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)
        shutil.copy(ROOT / "requirements.txt", self.root)
        self.venv = folder / "venv"
        (self.venv / "bin").mkdir(parents=True)
        self.stand_in()

    def stand_in(self, dies: str = "nothing"):
        """Python and ruff record how they are called; python fails at the command that has `dies` in it."""
        for name in ("python", "ruff"):
            path = self.venv / "bin" / name
            path.write_text(STAND_IN.format(python=sys.executable, log=self.log, dies=dies))
            path.chmod(0o755)

    def run(self, script: str, *args: str):
        """(finished process, the argument lists that python and ruff got), started from another folder."""
        self.log.write_text("")
        environment = os.environ | {"VIRTUAL_ENV": str(self.venv)}
        command = ["bash", str(self.root / script), *args]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=self.root.parent)
        return done, [json.loads(line) for line in self.log.read_text().splitlines()]

    def quickstart(self, *args: str) -> tuple[list[list[str]], str]:
        """The calls of a run.sh that has to succeed, without the installation, and what it printed."""
        done, calls = self.run("quickstart/run.sh", *args)
        assert done.returncode == 0, done.stderr
        return [call for call in calls if call[:2] != ["-m", "pip"]], done.stdout


DATA, SAMPLES, REPORT = ["quickstart/posts.py", "tldr_dataset.py"], "eval/samples.py", "quickstart/report.py"
STAGES = ["sft", "reward", "ppo", "dpo"]
SCRIPTS = [*DATA, "sft.py", SAMPLES, "reward.py", "ppo.py", SAMPLES, "dpo.py", SAMPLES, REPORT]


def names(calls: list[list[str]]) -> list[str]:
    return [call[0] for call in calls]


def test_a_runs_folders_and_seeds(tmp_path):
    """All commands work in the folders of their world (posts-N), size and seed, and posts.py alone has the world's
    seed. (That each finds what the one before has made: fast_work, below.)"""
    calls, _ = Clone(tmp_path).quickstart("--size", "m", "--seed", "3", "--posts-seed", "2")
    text = " ".join(sum(calls, []))
    assert names(calls) == SCRIPTS
    assert set(re.findall(r"(?:data|runs)/quickstart/([\w-]+)", text)) == {"posts-2"}
    assert set(re.findall(r"nano-(\w+)", text)) == {"m"} and set(re.findall(r"runs/\S*/nano-m/(\d+)", text)) == {"3"}
    for call in [call for call in calls if "--seed" in call]:
        assert call[call.index("--seed") + 1] == ("2" if call[0] == "quickstart/posts.py" else "3"), call


def test_run_makes_data_once_and_installs_once(tmp_path):
    clone = Clone(tmp_path)
    done, calls = clone.run("quickstart/run.sh")
    assert done.returncode == 0, done.stderr
    assert calls[0][:3] == ["-m", "pip", "install"] and calls[0][-2:] == ["-r", "requirements.txt"]
    assert names(calls[1:]) == SCRIPTS
    assert "removing" not in done.stdout and done.stdout.endswith(" s] done\n")
    assert not {"--num-train", "--num-validation"} & set(calls[1])  # the sizes that posts.py has by default

    kept = clone.root / "runs/quickstart/posts-1/sft/other/1/model"
    kept.mkdir(parents=True)
    done, calls = clone.run("quickstart/run.sh")
    assert done.returncode == 0, done.stderr
    assert names(calls) == SCRIPTS[2:]
    for stage in STAGES:
        assert f"removing runs/quickstart/posts-1/{stage}/nano-s/1 " in done.stdout
    assert kept.exists()

    (clone.root / "requirements.txt").write_text("torch\n")  # other requirements are installed
    _, calls = clone.run("quickstart/run.sh")
    assert calls[0][:3] == ["-m", "pip", "install"]


def test_continue_keeps_finished_stages(tmp_path):
    clone = Clone(tmp_path)
    runs = clone.root / "runs/quickstart/posts-1"
    assert names(clone.quickstart("--continue")[0]) == SCRIPTS  # nothing to keep yet
    calls, printed = clone.quickstart("--continue")
    assert names(calls) == [REPORT] and "removing" not in printed
    for stage in STAGES:
        assert f"keeping runs/quickstart/posts-1/{stage}/nano-s/1, " in printed

    (runs / "ppo/nano-s/1/eval/rouge.csv").unlink()  # killed before its evaluation
    (runs / "dpo/nano-s/1/eval/rouge.csv").unlink()  # and in the midst of it
    calls, printed = clone.quickstart("--continue")
    assert names(calls) == ["ppo.py", SAMPLES, "dpo.py", SAMPLES, REPORT]
    assert "removing runs/quickstart/posts-1/ppo/nano-s/1 " in printed and "keeping runs" in printed

    shutil.rmtree(runs / "dpo/nano-s/1")
    assert names(clone.quickstart("--continue")[0]) == ["dpo.py", SAMPLES, REPORT]
    (runs / "reward/nano-s/1/eval/accuracy.csv").unlink()  # and what was made from it
    assert names(clone.quickstart("--continue")[0]) == SCRIPTS[SCRIPTS.index("reward.py") :]
    assert names(clone.quickstart("--continue", "--seed", "2")[0]) == SCRIPTS[2:]  # another run is not finished
    assert names(clone.quickstart()[0]) == SCRIPTS[2:]  # without the flag everything runs again


def test_run_refuses_bad_arguments(tmp_path):
    clone = Clone(tmp_path)
    for args, words in (
        (["--size", "xl"], "--size is xl, not xs, s or m; "),
        (["--seed", "1", "--posts-seed"], "--posts-seed needs a value; "),
        (["--seed", "../.."], "--seed is ../.., not a whole number; "),
        (["--fast", "xs"], "unknown argument xs; "),
    ):
        done, calls = clone.run("quickstart/run.sh", *args)
        assert done.returncode == 1 and calls == [] and done.stdout == ""
        assert done.stderr.startswith(f"error: {words}usage: bash quickstart/run.sh [--size xs|s|m] ")
        assert not (clone.root / "data").exists() and not (clone.root / "runs").exists()


@pytest.mark.parametrize("script", ["tldr_dataset.py", REPORT])
def test_a_failing_command_ends_the_run_and_continue_goes_on_there(tmp_path, script):
    clone = Clone(tmp_path)
    report = clone.root / "runs/quickstart/posts-1/report/nano-s/1/table.csv"
    report.parent.mkdir(parents=True)
    report.write_text("of a run before")
    clone.stand_in(dies=script)
    done, calls = clone.run("quickstart/run.sh")
    assert done.returncode == 3 and names(calls[1:]) == SCRIPTS[: SCRIPTS.index(script) + 1]
    assert "done" not in done.stdout and report.exists() == (script == "tldr_dataset.py")  # it is still up to date
    clone.stand_in()
    assert names(clone.quickstart("--continue")[0]) == SCRIPTS[SCRIPTS.index(script) :]  # where it stopped


@pytest.mark.parametrize("script", ["tests/run.sh", ".ci/run"])
def test_test_command(tmp_path, script):
    """The linter gets the repository's own files alone: a user's are not looked at."""
    clone = Clone(tmp_path)
    for name in ("ours.py", "theirs.py"):
        (clone.root / name).write_text("")
    subprocess.run("git init -q . && git add ours.py", shell=True, cwd=clone.root, check=True)
    done, calls = clone.run(script, "-k", "some test")
    assert done.returncode == 0, done.stderr
    assert calls[0][:3] == ["-m", "pip", "install"] and calls[0][-1] == "tests/requirements.txt"
    assert calls[1:3] == [["ruff", "check", "ours.py"], ["ruff", "format", "--check", "ours.py"]]
    assert calls[3] == ["-m", "pytest", "-n", "2", "--dist", "loadfile", "tests", "-k", "some test"]
    assert [call[0] for call in clone.run(script)[1]] == ["ruff", "ruff", "-m"]  # nothing to install again


# ---- the quickstart itself ------------------------------------------------------------------------------------------


def run_here(command: list[str], **changes):
    """Run a command `SCRIPT FLAGS` in this process and folder, with other values for some arguments."""
    path, *words = command
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # tyro looks for the types of Args there
    spec.loader.exec_module(module)
    AcceleratorState._reset_state(True)  # accelerate keeps one state a process
    args = tyro.cli(module.Args, args=words)
    if "updates" in changes:
        changes = {"total_episodes": changes["updates"] * args.batch_size}
    args = replace(args, **changes)
    module.main(args)
    return args


@pytest.fixture(scope="module")
def fast_work(tmp_path_factory):
    """The folder in which the commands of `bash quickstart/run.sh --fast` have run, one after another, with fewer posts
    to judge by and a short DPO. The tests that ask for it run in it."""
    calls, _ = Clone(tmp_path_factory.mktemp("clone")).quickstart("--fast")
    assert names(calls) == SCRIPTS
    work = tmp_path_factory.mktemp("work")
    for path in ("quickstart", "eval", "variants", *(f"{stage}.py" for stage in ("tldr_dataset", *STAGES))):
        (work / path).symlink_to(ROOT / path)
    fewer = {"num_validation": 100, "num_test": 4, "num_validation_comparisons": 100, "num_cnndm_comparisons": 20}
    less = {"quickstart/posts.py": fewer, "dpo.py": {"total_episodes": 64}}
    loaded = dict(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work)
        for call in calls:
            run_here(call, **less.get(call[0], {}))
        yield work
    for name in set(sys.modules) - set(loaded):
        del sys.modules[name]
    sys.modules.update(loaded)


def test_fast_run_learns(fast_work):
    """SFT copies facts of the post, the reward model tells summaries apart, and PPO's summaries are better than SFT's
    by the truth, by a paired bootstrap."""
    work = fast_work
    rows = read_csv(work / "runs/quickstart/posts-1-fast/report/nano-xs/1/table.csv")
    table = {(row["row"], row["metric"]): float(row["value"]) for row in rows}
    # the interval seen: 0.109 to 0.197; of 200 posts with posts.py --label-noise 0.5: -0.020 to 0.024
    assert table["PPO-SFT", "truth_difference_low"] > 0.05
    assert table["PPO", "win_rate"] > table["SFT", "win_rate"] + 0.1  # seen: 0.675 and 0.405
    # seen: 0.55, 0.15 and 0.68; with facts at random the truth would be below 0
    assert table["SFT", "truth"] > table["copied_title", "truth"] + 0.15 and table["SFT", "rougeL"] > 0.5
    assert table["reward", "accuracy_clean"] > 0.7  # seen: 0.83 on 300 pairs; 0.5 would be chance
    assert table["SFT", "eos_rate"] > 0.95 and table["PPO", "eos_rate"] > 0.95
    assert table["near_perfect", "win_rate"] > 0.85 and table["reference", "win_rate"] == 0.5


VARIANTS = [f"variants/{name}.py" for name in ("rloo", "grpo", "online_dpo", "ppo_function", "simpo")]


def bash_commands(text: str) -> list[list[str]]:
    """The words of every command in a text, one a line or wrapped, without comments."""
    lines = text.replace("\\\n", " ").splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def test_the_first_commands_of_the_scripts_run(fast_work):
    """As they stand in the docstrings, in this order, for two updates each."""
    for script in ("sft.py", "reward.py", "ppo.py", "dpo.py", *VARIANTS):
        source = (ROOT / script).read_text()
        [python, *command] = bash_commands(source[source.index("    python ") :].partition("\n\n")[0])[0]
        assert (python, command[0]) == ("python", script)
        args = run_here(command, updates=2)
        assert args.output_dir == f"runs/{Path(script).stem}/nano-xs/44413"
        assert read_jsonl(Path(args.output_dir, "metrics.jsonl"))[-1]["update"] == 2
        assert Path(args.output_dir, "model/config.json").exists()


def test_the_ablation_of_the_readme_runs(fast_work):
    """Its commands and its edit as the page shows them, for two updates. The edit does what it says."""
    readme = (ROOT / "README.md").read_text()
    section = readme[readme.index("## Make an ablation") :]
    before, edit, after = re.findall(r"^```(?:bash|diff)\n(.*?)^```", section, re.MULTILINE | re.DOTALL)[:3]
    assert bash_commands(before)[-1] == ["cp", "ppo.py", "ppo_short.py"]
    source = (ROOT / "ppo.py").read_text()
    for hunk in re.split(r"^@@.*\n", edit, flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        assert source.count(old) == 1, old
        source = source.replace(old, "".join(line[1:] for line in lines if line[0] in " +"))
    Path("ppo_short.py").write_text(source)
    diff, train, *evaluate = bash_commands(after)
    assert diff == ["git", "diff", "--no-index", "ppo.py", "ppo_short.py"] and train[:2] == ["python", "ppo_short.py"]
    args = run_here(train[1:], updates=2)
    first = read_jsonl(Path(args.output_dir, "metrics.jsonl"))[0]
    plain = run_here(["ppo.py", *train[2:-1], "runs/plain"], updates=2)
    [without, _] = read_jsonl(Path(plain.output_dir, "metrics.jsonl"))
    shorter = without["objective/score"] - 0.01 * without["response/length"]  # the first samples are the same
    assert first["objective/score"] == pytest.approx(shorter, abs=1e-5)
    for command in evaluate:
        run_here(command[1:])
    assert json.loads(Path(args.output_dir, "args.json").read_text())["stage"] == "ppo_short"
    assert sorted(path.name for path in Path(args.output_dir, "eval").glob("*.csv"))[-1].startswith("samples")
