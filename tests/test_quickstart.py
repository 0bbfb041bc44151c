"""quickstart/: generated posts with a known truth, nano models, their pretraining, and the commands of run.sh."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import nano
import pandas
import posts
import pretrain
import pytest
import torch
import truth
import tyro
from conftest import ROOT, ablations, files, read_csv, read_jsonl, write_program
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

SPLITS = ("train", "validation", "test")
MEDIUM = {"num_train": 2000, "num_validation": 300, "num_test": 300, "num_comparisons": 2000}
MEDIUM |= {"num_validation_comparisons": 400, "num_cnndm_comparisons": 300, "num_pretraining": 80}
SMALL = {"num_train": 60, "num_validation": 12, "num_test": 12, "num_comparisons": 40}
SMALL |= {"num_validation_comparisons": 30, "num_cnndm_comparisons": 30, "num_pretraining": 20, "vocab_size": 400}


def close(values: list[float], mean: float) -> bool:
    """Is the mean of the values within four standard errors of the expected mean?"""
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
        ("carpets this morning: sisterly, broken laptops, sadly 240, 1243, a24, moved out, bring a cart", 0),
        ("aged 17, 60, 05 and 99", 0),  # no ages of this world
        (" ".join(["sister", *WORDS[:23]]), 1 / 6),  # 24 words
        (" ".join(["sister", *WORDS[:24]]), 1 / 6 - 0.02),
        ("He did that! he, DID, that; he did-that", -0.4),  # seven runs, three different ones
    ],
)
def test_score_by_hand(summary, expected):
    assert truth.score(POST, summary) == pytest.approx(expected, abs=1e-12)


def test_each_value_names_itself_only():
    for kind, values in truth.FACTS.items():
        assert len(values) == len(set(values)) >= 20
        for value in values:
            for text in (value, f"so, {value.upper()}.", f"({value})"):
                assert truth.find_facts(text) == {k: ({value} if k == kind else set()) for k in truth.FACTS}, text


# ---- posts ----------------------------------------------------------------------------------------------------------


def test_bytes_depend_on_the_seed_and_not_on_the_process(tmp_path):
    (tmp_path / "here.tmp/posts").mkdir(parents=True)  # as a killed run leaves it
    (tmp_path / "here.tmp/posts/stray").write_text("broken")
    for name, seed in (("here", 1), ("other", 2)):
        posts.main(posts.Args(output_dir=str(tmp_path / name), seed=seed, **SMALL))
    # set order and string hashes differ between processes
    flags = [part for name, value in SMALL.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, str(ROOT / "quickstart/posts.py"), "--output-dir", str(tmp_path / "there"), *flags]
    environment = os.environ | {"PYTHONHASHSEED": "7", "TOKENIZERS_PARALLELISM": "true"}
    subprocess.run(command, check=True, env=environment, capture_output=True)
    here, there, other = (files(tmp_path / name) for name in ("here", "there", "other"))
    assert here == there and here.keys() == other.keys()
    assert not [name for name in here if here[name] == other[name] and name.endswith((".jsonl", "tokenizer.json"))]


def test_no_post_is_in_two_splits(all_posts):
    assert len(all_posts) == 2600 == len({row["post"] for row in all_posts}) == len({row["id"] for row in all_posts})
    assert not any("{" in row["title"] + row["post"] + row["summary"] for row in all_posts)  # templates are filled


# ---- comparisons ----------------------------------------------------------------------------------------------------


def test_pairs_are_about_posts_of_their_split(raw):
    validation = read_jsonl(raw / "comparisons/validation.jsonl")
    tables = {
        "train": read_jsonl(raw / "comparisons/train.jsonl"),
        "validation": [row for row in validation if row["info"]["article"] is None],
        "cnndm": [row for row in validation if row["info"]["article"] is not None],
    }
    assert {name: len(rows) for name, rows in tables.items()} == {"train": 2000, "validation": 400, "cnndm": 300}
    for split in ("train", "validation"):
        sources = {row["id"]: row for row in read_jsonl(raw / f"posts/{split}.jsonl")}
        for row in tables[split]:
            source = sources[row["info"]["id"]]
            assert row["info"] == {key: source.get(key) for key in row["info"]}


def test_choice_follows_the_truth_with_the_noise_share(pairs):
    gaps = [abs(scores[0] - scores[1]) for _, _, scores in pairs]
    assert 0.25 - 1e-6 <= min(gaps) < 0.27  # no pair without a right choice
    assert close([scores[1] > scores[0] for _, _, scores in pairs], 0.5)  # the better one is as often the second
    for about_articles in (False, True):
        rows = [pair for pair in pairs if bool(pair[0]["info"]["article"]) == about_articles]
        assert close([row["choice"] != (scores[1] > scores[0]) for row, _, scores in rows], 0.25)


# ---- nano, pretrain -------------------------------------------------------------------------------------------------


def test_pretraining_learns(raw, tmp_path):
    nano.main(nano.Args(output_dir=str(tmp_path / "base"), tokenizer=str(raw / "tokenizer")))
    paths = {"model": str(tmp_path / "base"), "documents": str(raw), "output_dir": str(tmp_path / "nano")}
    pretrain.main(pretrain.Args(**paths, steps=20, batch_size=8, held_out=20, eval_every=10))
    first, last = (float(row["held_out_loss"]) for row in read_csv(tmp_path / "nano/pretraining.csv"))
    assert last < first - 0.05 and AutoModelForCausalLM.from_pretrained(tmp_path / "nano").dtype == torch.bfloat16


# 12 h^2 + 13 h a layer and 2 h for the last norm: h = 64, 96, 128 and 2, 4, 4 layers
@pytest.mark.parametrize(("size", "parameters"), [("xs", 100_096), ("s", 447_552), ("m", 793_344)])
def test_the_bases_of_the_repository_can_copy(raw, size, parameters):
    folder = ROOT / "quickstart/bases" / f"nano-{size}"
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert nano.count_parameters(base)[0] == parameters
    tokenizer = AutoTokenizer.from_pretrained(folder)
    other = AutoTokenizer.from_pretrained(ROOT / "quickstart/bases/nano-xs")  # they share their tokenised data
    assert tokenizer.get_vocab() == other.get_vocab() and tokenizer.pad_token is None and tokenizer.eos_token_id == 0
    assert len(tokenizer) < base.config.vocab_size  # room for [PAD]
    texts = [row["text"] for row in read_jsonl(raw / "pretraining.jsonl")[:40]]  # of another seed than it has read
    documents = [torch.tensor([*ids, 0]) for ids in tokenizer(texts)["input_ids"]]
    masks = [pretrain.restated_words(tokenizer, *pair) for pair in zip(texts, documents, strict=True)]
    assert pretrain.evaluate(base, documents, masks)["copying_accuracy"] > 0.9


# ---- run.sh: the commands that it gives, recorded by a stand-in for python -------------------------------------------

STAND_IN = """
import json, os, sys
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
"""


def make_clone(folder: Path) -> Path:
    """A copy of run.sh with a virtual environment whose python only records how it is called."""
    scripts = [f"quickstart/{name}" for name in ("run.sh", "setup.sh", "posts.py", "truth.py", "sentences.json")]
    for name in ("requirements.txt", *scripts):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    write_program(folder / "venv/bin/python", f"#!{sys.executable}{STAND_IN}")
    return folder


def quickstart(clone: Path, *args: str, code: int = 0) -> list[list[str]]:
    """The argument lists that python gets, without the installation, in a run that ends with an exit code."""
    (clone / "calls").write_text("")
    environment = os.environ | {"VIRTUAL_ENV": str(clone / "venv"), "CALLS": str(clone / "calls")}
    command = ["bash", str(clone / "quickstart/run.sh"), *args]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=clone.parent)
    assert done.returncode == code, done.stderr
    return [call for call in read_jsonl(clone / "calls") if call[:2] != ["-m", "pip"]]


DATA, SAMPLES, REPORT = ["quickstart/posts.py", "tldr_dataset.py"], "eval/samples.py", "quickstart/report.py"
STAGES = ["sft", "reward", "ppo", "dpo"]
SCRIPTS = [*DATA, "sft.py", SAMPLES, "reward.py", "ppo.py", SAMPLES, "dpo.py", SAMPLES, REPORT]


def names(calls: list[list[str]]) -> list[str]:
    return [call[0] for call in calls]


def test_folders_and_seeds_of_a_run(tmp_path):
    """Every command uses the folders of its posts seed, size and seed; posts.py alone gets the posts seed."""
    calls = quickstart(make_clone(tmp_path), "--size", "m", "--seed", "3", "--posts-seed", "2")
    text = " ".join(sum(calls, []))
    assert names(calls) == SCRIPTS
    assert set(re.findall(r"(?:data|runs)/quickstart/([\w-]+)", text)) == {"posts-2"}
    assert set(re.findall(r"nano-(\w+)", text)) == {"m"} and set(re.findall(r"runs/\S*/nano-m/(\d+)", text)) == {"3"}
    for call in [call for call in calls if "--seed" in call]:
        assert call[call.index("--seed") + 1] == ("2" if call[0] == "quickstart/posts.py" else "3"), call


def test_continue_keeps_what_is_there(tmp_path):
    """A stage's --resume leaves a finished run as it is (test_faults.py)."""
    clone = make_clone(tmp_path)
    sft = clone / "runs/quickstart/posts-1/sft/nano-s/1"
    (sft / "eval").mkdir(parents=True)
    (sft / "eval/rouge.csv").touch()
    (clone / "data/quickstart/posts-1/raw").mkdir(parents=True)
    calls = quickstart(clone, "--continue")
    assert names(calls) == [name for name in SCRIPTS if name != DATA[0]][:2] + SCRIPTS[4:] and sft.exists()
    assert all(("--resume" in call) == (call[0] in [f"{stage}.py" for stage in STAGES]) for call in calls)
    assert names(quickstart(clone)) == SCRIPTS[1:] and not sft.exists()


def test_posts_of_another_version_are_not_trained_on(tmp_path):
    """Policies are measured on posts of today's."""
    clone = make_clone(tmp_path)
    assert names(quickstart(clone, "--data-only")) == DATA
    (clone / "data/quickstart/posts-1/raw").mkdir(parents=True)
    assert names(quickstart(clone, "--data-only")) == DATA[1:]
    with open(clone / "quickstart/truth.py", "a") as file:
        file.write("# another one")
    assert quickstart(clone, "--data-only", code=1) == []


@pytest.mark.parametrize("arguments", ["--size xl", "--seed 1 --posts-seed", "--seed ../.."])
def test_run_refuses_bad_arguments(tmp_path, arguments):
    clone = make_clone(tmp_path)
    assert quickstart(clone, *arguments.split(), code=1) == [] and not (clone / "runs").exists()


# ---- the quickstart itself ------------------------------------------------------------------------------------------


def run_here(command: list[str], **changes):
    """Run a command `SCRIPT FLAGS` in this process and folder, with other values for some arguments."""
    path, *words = command
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # tyro looks for the types of Args there
    spec.loader.exec_module(module)
    args = replace(tyro.cli(module.Args, args=words), **changes)
    module.main(args)
    return args


@pytest.fixture(scope="module")
def fast_work(tmp_path_factory):
    """The folder in which the commands of `bash quickstart/run.sh --fast --size xs` have run, one after another, with
    fewer posts and pairs and shorter PPO and DPO runs. The tests that ask for it run in it."""
    calls = quickstart(make_clone(tmp_path_factory.mktemp("clone")), "--fast", "--size", "xs")
    assert names(calls) == SCRIPTS
    work = tmp_path_factory.mktemp("work")
    for path in ("quickstart", "eval", "variants", *(f"{stage}.py" for stage in ("tldr_dataset", *STAGES))):
        (work / path).symlink_to(ROOT / path)
    fewer = {"num_train": 1000, "num_comparisons": 1200}
    fewer |= {"num_validation": 100, "num_test": 4, "num_validation_comparisons": 100, "num_cnndm_comparisons": 20}
    less = {
        "quickstart/posts.py": fewer,
        "ppo.py": {"total_episodes": 320},
        "dpo.py": {"total_episodes": 64},
        REPORT: {"posts": 50},
    }
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
    """SFT copies facts of the post, the reward model tells summaries apart, and PPO learns the values and moves away.
    So few pairs do not make a reward model with which PPO improves the truth on every seed."""
    work = fast_work
    rows = read_csv(work / "runs/quickstart/posts-1-fast/report/nano-xs/1/table.csv")
    table = {(row["row"], row["metric"]): float(row["value"]) for row in rows}
    metrics = read_jsonl(work / "runs/quickstart/posts-1-fast/ppo/nano-xs/1/metrics.jsonl")
    assert metrics[-1]["loss/value"] < metrics[0]["loss/value"] / 2 and metrics[-1]["objective/kl"] > 0.1
    # seen: 0.51, 0.18 and 0.70; with facts at random the truth would be below 0
    assert table["SFT", "truth"] > table["title", "truth"] + 0.15 and table["SFT", "rougeL"] > 0.5
    assert table["SFT", "accuracy"] > 0.7  # seen: 0.84; 0.5 would be chance
    assert table["SFT", "eos_rate"] > 0.95 and table["PPO", "eos_rate"] > 0.95
    assert table["nearly perfect", "win_rate"] > 0.85 and table["reference", "win_rate"] == 0.5


def test_the_hunks_of_the_readme_are_those_of_its_diff():
    """And its command is that of the diff's header."""
    readme = (ROOT / "README.md").read_text()
    section = readme[readme.index("## Make an ablation") :]
    edit, command = re.findall(r"^```(?:diff|bash)\n(.*?)^```", section, re.MULTILINE | re.DOTALL)[:2]
    diff = (ROOT / "ablations/short.diff").read_text()
    shown, changed = ([line for line in text.splitlines() if line.startswith(("+", "-"))] for text in (edit, diff))
    assert [line for line in changed if line[:3] not in ("+++", "---") and "output_dir" not in line] == shown
    words = [" ".join(text.replace("\\\n", " ").split()) for text in (command, diff)]
    assert words[0][words[0].index("python ppo_short.py") :] in words[1]


LONG = {"compile": pytest.mark.long}  # takes a minute
DIFFS = [pytest.param(path.stem, marks=LONG.get(path.stem, ())) for path in sorted((ROOT / "ablations").glob("*.diff"))]


@pytest.mark.parametrize("name", DIFFS)
def test_the_command_of_an_ablation_runs(fast_work, name):
    """The command in its header, for two updates of eight episodes, with the script that the diff makes and the models
    of this file."""
    head = (ROOT / "ablations" / f"{name}.diff").read_text().partition("\ndiff --git")[0]
    command = head[head.index("    python ") :].partition("\n\n")[0].replace("\\\n", " ")
    [_, script, *flags] = shlex.split(command.replace("nano-s", "nano-xs"))
    if not Path(script).exists():
        Path(script).symlink_to(ablations() / script)
    assert f"git apply ablations/{name}.diff" in head
    sizes = {"batch_size": 8, "total_episodes": 16}
    args = run_here([script, *flags], **sizes)
    lines = read_jsonl(Path(args.output_dir, "metrics.jsonl"))
    assert lines[-1]["update"] == 2 and Path(args.output_dir, "model/config.json").exists()


def test_the_page_has_the_rows_of_fast():
    """And on every seed PPO and DPO end above SFT, as it says."""
    table = pandas.read_csv(ROOT / "quickstart/results/fast.csv").set_index(["seed", "row", "metric"])["value"]
    page = (ROOT / "quickstart/README.md").read_text()
    gains = []
    for seed in table.index.unique("seed"):
        truths = [table[seed, row, "truth"] for row in ("SFT", "PPO", "DPO")]
        cells = [f"{x:.3f}" for x in truths] + [f"{table[seed, 'PPO', 'kl']:.2f}"]
        cells += [f"{table[seed, row, metric]:.3f}" for row, metric in (("PPO", "eos_rate"), ("SFT", "accuracy"))]
        assert f"| {seed} | {' | '.join(cells)} |\n" in page
        assert truths[2] > truths[0]
        gains.append(truths[1] - truths[0])
    assert f"PPO by\n{min(gains):.2f} to {max(gains):.2f} of truth" in page
