"""quickstart/: generated posts with a known truth, nano models, and the commands of run.sh."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import tyro
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
PYTHIA_TOKENIZER = Path(__file__).resolve().parents[2] / "shared/data/tokenizer"


def load(path: str):
    """Import one of our scripts by its path below the repository root."""
    name = "tested_" + Path(path).stem
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


posts = load("quickstart/posts.py")
nano = load("quickstart/nano.py")

SMALL = {"num_train": 60, "num_validation": 12, "num_test": 12, "num_comparisons": 40}
SMALL |= {"num_validation_comparisons": 30, "num_cnndm_comparisons": 30, "vocab_size": 400}


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def files(folder: Path) -> dict[str, bytes]:
    """Relative path -> bytes of every file in a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def raw(tmp_path_factory) -> Path:
    """A folder of the default sizes, made once."""
    folder = tmp_path_factory.mktemp("posts") / "raw"
    posts.main(posts.Args(output_dir=str(folder)))
    return folder


# ---- posts ----------------------------------------------------------------------------------------------------------


def test_same_seed_same_bytes_other_seed_other_bytes(tmp_path):
    made = []
    for name, seed in (("first", 1), ("again", 1), ("other", 2)):
        posts.main(posts.Args(output_dir=str(tmp_path / name), seed=seed, **SMALL))
        made.append(files(tmp_path / name))
    assert made[0] == made[1]
    assert made[0].keys() == made[2].keys()
    for name in made[0]:
        if name.endswith((".jsonl", "tokenizer.json")):
            assert made[0][name] != made[2][name], name


def test_bytes_do_not_depend_on_the_process(raw, tmp_path):
    # set order and string hashes differ between processes
    command = [sys.executable, str(ROOT / "quickstart/posts.py"), "--output-dir", str(tmp_path / "raw")]
    environment = os.environ | {"PYTHONHASHSEED": "7", "TOKENIZERS_PARALLELISM": "true"}
    subprocess.run(command, check=True, env=environment, capture_output=True)
    assert files(tmp_path / "raw") == files(raw)


def test_post_schema_and_splits(raw):
    splits = {split: read(raw / f"posts/{split}.jsonl") for split in ("train", "validation", "test")}
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 2000, "validation": 200, "test": 200}
    rows = sum(splits.values(), [])
    for row in rows:
        assert list(row) == ["id", "subreddit", "title", "post", "summary"]
        assert all(isinstance(value, str) and value and value == value.strip() for value in row.values())
        assert row["post"].count("\n") == 2
    assert len({row["id"] for row in rows}) == len({row["post"] for row in rows}) == len(rows)


def test_post_lengths(raw):
    tokenizer = AutoTokenizer.from_pretrained(raw / "tokenizer")
    rows = read(raw / "posts/train.jsonl")
    lengths = sorted(len(tokenizer(row["post"])["input_ids"]) for row in rows)
    assert lengths[0] >= 40 and 60 <= lengths[len(lengths) // 2] <= 120 and lengths[-1] <= 160
    # the response of SFT is at most 53 tokens, of a preference pair 169; the leading space and EOS included
    assert max(len(tokenizer(" " + row["summary"])["input_ids"]) + 1 for row in rows) <= 53
    for row in read(raw / "comparisons/train.jsonl"):
        assert max(len(tokenizer(summary["text"])["input_ids"]) + 1 for summary in row["summaries"]) <= 169


def test_every_post_holds_one_value_of_each_fact_and_the_reference_only_true_ones(raw):
    told = []
    for row in read(raw / "posts/train.jsonl"):
        truth, said = posts.find_facts(row["post"]), posts.find_facts(row["summary"])
        assert all(len(values) == 1 for values in truth.values()), row["id"]
        assert all(said[kind] <= truth[kind] for kind in truth), row["id"]
        told.append(sum(len(values) for values in said.values()))
        for kind, values in said.items():  # in other words, but for the age
            assert kind == "age" or not any(f" {value} " in f" {row['summary']} " for value in values), row["id"]
    assert min(told) >= 3 and 4.5 < sum(told) / len(told) < 5.2 and max(told) == 6


def test_filler_states_no_fact():
    for text in posts.FILLER + posts.ARTICLE_FILLER + posts.SUBREDDITS + posts.DAYS:
        assert not any(posts.find_facts(text).values()), text


def test_words_of_a_fact_name_one_value():
    for kind, values in posts.FACTS.items():
        for value, said in values.items():
            for words in (value, said):
                expected = {k: ({value} if k == kind else set()) for k in posts.FACTS}
                assert posts.find_facts(f"so, {words}.") == expected, (kind, words)


def test_quality_on_hand_written_summaries():
    post = "I (24F) am new.\nLast Friday my sister broke my laptop.\nI feel really sad. Should I move out?"
    assert posts.quality(post, "24yo, sis wrecked my computer, unhappy, should I find a new place?") == 6
    assert posts.quality(post, "My SISTER broke my laptop") == 3  # the words of the post count as well
    assert posts.quality(post, "my bro wrecked my computer") == 1  # two covered, one wrong
    assert posts.quality(post, "42yo and feeling mad") == -2
    assert posts.quality(post, "the vehicles are scary") == 0  # parts of words are no facts
    assert posts.quality(post, "") == 0
    assert posts.quality(post, " ".join(["sis"] + ["word"] * 19)) == 1
    assert posts.quality(post, " ".join(["sis"] + ["word"] * 24)) == pytest.approx(1 - 0.5)


# ---- comparisons ----------------------------------------------------------------------------------------------------


def test_comparison_schema(raw):
    by_id = {split: {r["id"]: r for r in read(raw / f"posts/{split}.jsonl")} for split in ("train", "validation")}
    rows = {split: read(raw / f"comparisons/{split}.jsonl") for split in ("train", "validation")}
    cnndm = [row for row in rows["validation"] if row["info"]["article"] is not None]
    assert [len(rows["train"]), len(rows["validation"]) - len(cnndm), len(cnndm)] == [1000, 200, 60]
    for split in rows:
        for row in rows[split]:
            assert list(row) == ["info", "summaries", "choice", "worker", "batch", "split", "extra"]
            info = row["info"]
            assert list(info) == ["id", "post", "title", "subreddit", "site", "article"]
            assert [list(summary) for summary in row["summaries"]] == [["text", "policy", "note"]] * 2
            assert all(s["text"].startswith(" ") and s["text"][1] != " " for s in row["summaries"])
            assert row["summaries"][0]["policy"] != row["summaries"][1]["policy"]
            assert row["choice"] in (0, 1) and list(row["extra"]) == ["confidence"]
            if info["article"] is None:
                source = by_id[split][info["id"]]  # train pairs are about train posts, validation about validation
                assert all(info[key] == source[key] for key in ("post", "title", "subreddit"))
                assert row["batch"] in ("batch6", "batch7", "batch8")
                assert row["split"] in (("train",) if split == "train" else ("valid1", "valid2"))
            else:
                assert split == "validation" and row["split"] == "valid2"
                assert info["post"] is info["title"] is info["subreddit"] is None and info["site"] == "cnn"
                assert row["batch"] in ("cnndm0", "cnndm2", "batch0_cnndm")


def test_every_table_has_rows(raw):
    train, validation = read(raw / "comparisons/train.jsonl"), read(raw / "comparisons/validation.jsonl")
    cnndm = [row for row in validation if row["info"]["article"]]
    validation = [row for row in validation if not row["info"]["article"]]
    levels = {1, 2, 3, 4, 6, 7, 8, 9}
    assert {row["extra"]["confidence"] for row in train} == levels | {None}
    assert {row["extra"]["confidence"] for row in validation} == levels
    assert 5 not in {row["extra"]["confidence"] for row in cnndm}
    assert 0.4 < sum(row["extra"]["confidence"] is None for row in train) / len(train) < 0.6
    assert {row["batch"] for row in train} == {row["batch"] for row in validation} == {"batch6", "batch7", "batch8"}
    assert {row["batch"] for row in cnndm} == {"cnndm0", "cnndm2", "batch0_cnndm"}
    assert {row["split"] for row in validation} == {"valid1", "valid2"}
    policies = Counter(summary["policy"] for row in train for summary in row["summaries"])
    assert set(policies) == {"terse", "long", "copied_title", "invented", "reference", "complete"}
    assert min(policies.values()) > 200


def share_of_wrong_choices(rows: list[dict]) -> float:
    """The share of the pairs whose choice is the summary of lower quality."""
    wrong = 0
    for row in rows:
        text = row["info"]["article"] or row["info"]["post"]
        first, second = (posts.quality(text, summary["text"]) for summary in row["summaries"])
        assert first != second
        wrong += row["choice"] != (second > first)
    return wrong / len(rows)


def test_choice_follows_the_truth_with_the_noise_share(raw, tmp_path):
    rows = read(raw / "comparisons/train.jsonl") + read(raw / "comparisons/validation.jsonl")
    bound = 4 * (0.25 * 0.75 / len(rows)) ** 0.5  # four standard deviations of a binomial share
    assert abs(share_of_wrong_choices(rows) - 0.25) < bound < 0.05
    posts.main(posts.Args(output_dir=str(tmp_path / "clean"), label_noise=0, **SMALL))
    for split in ("train", "validation"):
        assert share_of_wrong_choices(read(tmp_path / f"clean/comparisons/{split}.jsonl")) == 0


def test_the_better_summary_is_as_often_first_as_second(raw):
    rows = read(raw / "comparisons/train.jsonl")
    assert abs(sum(row["choice"] for row in rows) / len(rows) - 0.5) < 4 * (0.25 / len(rows)) ** 0.5


def test_confidence_is_on_the_side_of_the_choice_and_follows_the_gap(raw):
    gaps = {1: [], 2: [], 3: [], 4: []}
    for row in read(raw / "comparisons/train.jsonl") + read(raw / "comparisons/validation.jsonl"):
        confidence = row["extra"]["confidence"]
        if confidence is not None:
            assert (confidence > 5) == (row["choice"] == 1)
            text = row["info"]["article"] or row["info"]["post"]
            first, second = (posts.quality(text, summary["text"]) for summary in row["summaries"])
            gaps[abs(confidence - 5)].append(abs(first - second))
    for level in (1, 2, 3):
        assert max(gaps[level]) <= min(gaps[level + 1]) + 1e-5


def test_policies_have_the_quality_that_their_names_promise(raw):
    scores = {}
    for row in read(raw / "comparisons/train.jsonl"):
        for summary in row["summaries"]:
            score = posts.quality(row["info"]["post"], summary["text"])
            scores.setdefault(summary["policy"], []).append(score)
            if summary["policy"] == "copied_title":
                assert summary["text"] == " " + row["info"]["title"]
    mean = {policy: sum(values) / len(values) for policy, values in scores.items()}
    assert min(scores["complete"]) == max(scores["complete"]) == 6
    assert mean["complete"] > mean["reference"] > mean["long"] > mean["terse"] > mean["invented"]


# ---- tokenizer ------------------------------------------------------------------------------------------------------


def test_tokenizer(raw):
    tokenizer = AutoTokenizer.from_pretrained(raw / "tokenizer")
    assert tokenizer.convert_tokens_to_ids("<|endoftext|>") == 0
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == tokenizer.unk_token_id == 0
    assert tokenizer.pad_token is None and tokenizer.model_max_length == 2048
    assert 900 <= len(tokenizer) <= 1024
    for text in (" résumé — 日本\n\t\x00 ok", "SUBREDDIT: r/tifu\n\nTL;DR:", "a  b"):  # bytes: nothing is unknown
        ids = tokenizer(text)["input_ids"]
        assert 0 not in ids and tokenizer.decode(ids) == text
    assert tokenizer("a<|endoftext|>")["input_ids"][-1] == 0
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer.pad_token_id == len(tokenizer) - 1


# ---- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_test": 0}, "--num-test is 0; it must be 1 or more"),
        ({"num_comparisons": -1}, "--num-comparisons is -1"),
        ({"num_cnndm_comparisons": -1}, "--num-cnndm-comparisons is -1"),
        ({"label_noise": 1.5}, "--label-noise is 1.5"),
        ({"vocab_size": 256}, "--vocab-size is 256"),
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
    ]
    for call in calls:
        with pytest.raises(SystemExit, match="^error: .* exists; remove it .* or name another --output-dir"):
            call()
    assert files(tmp_path) == {"mine/note": b"keep"}


def test_leftovers_of_a_killed_run_do_not_get_in(tmp_path):
    leftover = tmp_path / "raw.tmp/posts/train.jsonl"
    leftover.parent.mkdir(parents=True)
    leftover.write_text("broken")
    (leftover.parent / "stray").write_text("broken")
    posts.main(posts.Args(output_dir=str(tmp_path / "raw"), **SMALL))
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]
    assert sorted(path.name for path in (tmp_path / "raw/posts").iterdir()) == [
        "test.jsonl",
        "train.jsonl",
        "validation.jsonl",
    ]


# ---- nano -----------------------------------------------------------------------------------------------------------


def make_nano(folder: Path, tokenizer: Path, **kwargs) -> Path:
    nano.main(nano.Args(output_dir=str(folder), tokenizer=str(tokenizer), **kwargs))
    return folder


@pytest.mark.parametrize(
    ("size", "parameters"),
    # 12 h^2 + 13 h a layer and 2 h for the last norm: h = 64, 96, 192 and 2, 4, 5 layers
    [("xs", 100_096), ("s", 447_552), ("m", 2_224_704)],
)
def test_parameter_counts(raw, tmp_path, capsys, size, parameters):
    folder = make_nano(tmp_path / "nano", raw / "tokenizer", size=size)
    model = AutoModelForCausalLM.from_pretrained(folder)
    inner, total = nano.count_parameters(model)
    assert inner == parameters
    assert total == inner + 2 * 1024 * model.config.hidden_size  # untied: input and output embeddings
    assert f"{parameters:,} parameters without embeddings" in capsys.readouterr().out


def test_shape_choices_are_those_of_pythia(raw, tmp_path):
    folder = make_nano(tmp_path / "nano", raw / "tokenizer")
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = model.config
    assert (config.model_type, config.hidden_act, config.use_parallel_residual) == ("gpt_neox", "gelu", True)
    assert config.rope_parameters["partial_rotary_factor"] == 0.25
    assert config.attention_dropout == config.hidden_dropout == 0
    assert config.max_position_embeddings == 2048 and config.intermediate_size == 4 * config.hidden_size
    assert model.get_input_embeddings().weight.data_ptr() != model.get_output_embeddings().weight.data_ptr()
    assert config.bos_token_id == config.eos_token_id == 0 and config.pad_token_id is None


def test_vocabulary_leaves_room_for_the_pad_token(raw, tmp_path):
    assert [nano.padded_vocab_size(n) for n in (62, 63, 64, 50_277)] == [64, 64, 128, 50_304]
    folder = make_nano(tmp_path / "nano", raw / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    original = AutoTokenizer.from_pretrained(raw / "tokenizer")
    assert tokenizer.pad_token is None and tokenizer.get_vocab() == original.get_vocab()
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    config = AutoModelForCausalLM.from_pretrained(folder).config
    assert config.vocab_size % 64 == 0 and tokenizer.pad_token_id < config.vocab_size


@pytest.mark.skipif(not PYTHIA_TOKENIZER.exists(), reason="needs the tokenizer of Pythia in ../shared/data")
def test_vocabulary_with_the_tokenizer_of_pythia(tmp_path):
    folder = make_nano(tmp_path / "nano", PYTHIA_TOKENIZER)
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 50_304
    assert len(AutoTokenizer.from_pretrained(folder)) == 50_277
    gpt2 = make_nano(tmp_path / "gpt2", PYTHIA_TOKENIZER, architecture="gpt2")
    assert json.loads((gpt2 / "config.json").read_text())["vocab_size"] == 50_277


@pytest.mark.parametrize("architecture", ["gpt_neox", "gpt2", "llama", "qwen3"])
def test_folder_loads_and_runs_in_float32(raw, tmp_path, architecture):
    folder = make_nano(tmp_path / "nano", raw / "tokenizer", architecture=architecture)
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"F32"}
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == architecture and config["dtype"] == "float32"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # like the real GPT-2, that one has no room for [PAD]; the others have
    assert config["vocab_size"] == (len(tokenizer) if architecture == "gpt2" else 1024)
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


# ---- run.sh: the commands that it gives, recorded by a stand-in for python -------------------------------------------

STAND_IN = """#!{python}
import json, os, pathlib, sys
args = sys.argv[1:]
if args[0] == "-":  # the table of results at the end
    os.execv("{python}", ["{python}", *args])
with open("{log}", "a") as log:
    log.write(json.dumps(args) + "\\n")
flags = dict(zip(args[1::2], args[2::2]))
if "--output-dir" in flags:
    pathlib.Path(flags["--output-dir"]).mkdir(parents=True)
elif args[0].endswith(".py"):
    run = pathlib.Path("runs", args[0][:-3], pathlib.Path(flags["--model"]).name, flags["--seed"])
    (run / "eval").mkdir(parents=True)
    (run / "eval/table.csv").write_text("a")
    (run / "metrics.jsonl").write_text(json.dumps({{"loss": 0.123456, "time/step": 9}}) + "\\n")
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
        (self.venv / "bin/python").write_text(STAND_IN.format(python=sys.executable, log=self.log))
        (self.venv / "bin/ruff").write_text(f'#!/bin/sh\necho "[\\"ruff\\", \\"$1\\", \\"$2\\"]" >>{self.log}\n')
        for path in (self.venv / "bin").iterdir():
            path.chmod(0o755)

    def run(self, script: str, *args: str):
        """(finished process, the argument lists that python and ruff got), started from another folder."""
        self.log.write_text("")
        environment = os.environ | {"VIRTUAL_ENV": str(self.venv)}
        command = ["bash", str(self.root / script), *args]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=self.root.parent)
        return done, [json.loads(line) for line in self.log.read_text().splitlines()]


SCRIPTS = ["quickstart/posts.py", "tldr_dataset.py", "quickstart/nano.py", "sft.py", "reward.py", "ppo.py", "dpo.py"]


def test_run_makes_data_once_and_installs_once(tmp_path):
    clone = Clone(tmp_path)
    done, calls = clone.run("quickstart/run.sh")
    assert done.returncode == 0, done.stderr
    assert calls[0][:3] == ["-m", "pip", "install"] and calls[0][-2:] == ["-r", "requirements.txt"]
    assert [call[0] for call in calls[1:]] == SCRIPTS
    assert "runs/ppo/nano-xs/1" in done.stdout and "eval/table.csv" in done.stdout and "0.1235" in done.stdout
    assert "removing" not in done.stdout

    kept = clone.root / "runs/sft/other/1/model"
    kept.mkdir(parents=True)
    done, calls = clone.run("quickstart/run.sh")
    assert done.returncode == 0, done.stderr
    assert [call[0] for call in calls] == SCRIPTS[3:]
    for stage in ("sft", "reward", "ppo", "dpo"):
        assert f"removing runs/{stage}/nano-xs/1" in done.stdout
    assert kept.exists()

    done, calls = clone.run("quickstart/run.sh", "s", "7")
    assert [call[0] for call in calls] == SCRIPTS[2:] and "removing" not in done.stdout
    assert (clone.root / "runs/dpo/nano-s/7").exists() and (clone.root / "runs/dpo/nano-xs/1").exists()

    (clone.root / "requirements.txt").write_text("torch\n")  # other requirements are installed
    _, calls = clone.run("quickstart/run.sh")
    assert calls[0][:3] == ["-m", "pip", "install"]


@pytest.mark.parametrize("args", [["xl"], ["xs", "../.."], ["xs", "1", "2"], ["xs", "01"]])
def test_run_refuses_bad_arguments(tmp_path, args):
    done, calls = Clone(tmp_path).run("quickstart/run.sh", *args)
    assert done.returncode == 1 and done.stderr.startswith("error: usage") and calls == []


def test_a_failing_stage_ends_the_run(tmp_path):
    clone = Clone(tmp_path)
    python = clone.venv / "bin/python"
    python.write_text(python.read_text().replace("flags =", 'sys.exit(3) if args[0] == "reward.py" else None\nflags ='))
    done, calls = clone.run("quickstart/run.sh")
    assert done.returncode == 3 and calls[-1][0] == "reward.py"


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_know_the_flags_of_run(tmp_path, script):
    if not (ROOT / script).exists():
        pytest.skip(f"{script} does not exist")
    _, calls = Clone(tmp_path).run("quickstart/run.sh")
    flags = next(call[1:] for call in calls if call[0] == script)
    tyro.cli(load(script).Args, args=flags)  # an unknown flag or a value of the wrong type exits


@pytest.mark.parametrize("script", ["tests/run.sh", ".ci/run"])
def test_test_command(tmp_path, script):
    clone = Clone(tmp_path)
    done, calls = clone.run(script, "-k", "some test")
    assert done.returncode == 0, done.stderr
    assert calls[0][:3] == ["-m", "pip", "install"] and calls[0][-1] == "tests/requirements.txt"
    assert calls[1:3] == [["ruff", "check", "."], ["ruff", "format", "--check"]]
    assert calls[3] == ["-m", "pytest", "-n", "2", "tests", "-k", "some test"]
    assert [call[0] for call in clone.run(script)[1]] == ["ruff", "ruff", "-m"]  # nothing to install again
