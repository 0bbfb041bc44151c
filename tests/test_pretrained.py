"""benchmark/pretrained.*: the numbers of its page, and what a pretrained Llama brings that the nano bases lack: tied
embeddings, a vocabulary without a row for [PAD], an EOS that is its padding, bfloat16 on a CPU."""

import logging
import os
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pandas
import pretrained
import pytest
from conftest import ROOT, write_program
from datasets import Dataset, DatasetDict, load_from_disk
from kill_runs import complete, left_behind
from test_saved_models import TRAINED, make_base
from transformers import AutoTokenizer

import ppo
import reward


def test_copied_words_and_runs_of_words():
    source = "My dog ate the cake. Then the dog slept, and I ate the cake"
    assert pretrained.copied("The DOG ate a cake!", source, 1) == 4 / 5
    assert pretrained.copied("then the dog slept and snored", source, 4) == 2 / 3
    assert pretrained.copied("dog ate the", source, 4) is None


def test_the_first_page_has_the_committed_rows():
    rows = pandas.read_csv(ROOT / "benchmark/results/pretrained/policies.csv").set_index("policy")
    page = " ".join((ROOT / "README.md").read_text().split())
    rouge = rows["rougeL"].map("{:.3f}".format)
    assert f"SFT raises ROUGE-L from {rouge['zero_shot']} to {rouge['sft']}" in page
    assert "RLOO raises the score most, but four of five" in page and rows["score"].idxmax() == "rloo"
    assert 0.75 < rows["questions"]["rloo"] < 0.85


def run(module, args):
    logging.getLogger("accelerate.utils.other").setLevel(logging.NOTSET)  # as in a new process
    module.main(args)


@pytest.fixture(scope="module")
def tied(world, tmp_path_factory) -> dict[str, Path]:
    """Checkpoint folders of a tied Llama that ends some responses, without a row for [PAD], and of its reward model."""
    root = tmp_path_factory.mktemp("tied")
    tokenizer = AutoTokenizer.from_pretrained(world.tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    base = make_base(TRAINED["smollm2"], tokenizer, root / "base")
    shared = {"model": "tied", "sft_model_path": str(base), "total_episodes": 16, "batch_size": 8}
    pairs = shared | {"preference_dataset": str(world.preference_dataset)}
    args = reward.Args(**pairs, dataset=str(world.dataset), output_dir=str(root / "reward"), learning_rate=1e-2)
    run(reward, args)
    return {"base": base, "reward": root / "reward"}


def test_a_tied_model_in_bfloat16_resumes_to_the_same_bytes(world, tied, tmp_path):
    args = ppo.Args(
        model="tied",
        sft_model_path=str(tied["base"]),
        dataset=str(world.dataset),
        response_length=8,
        reward_model_path=str(tied["reward"]),
        sample_every=0,
        eval_rows=4,
        output_dir=str(tmp_path / "run"),
        batch_size=4,
        total_episodes=16,
        learning_rate=1e-2,
        mixed_precision="bf16",
        save_every=2,
    )
    run(ppo, args)
    expected = left_behind(tmp_path / "run")
    for left in ("model", "value_model", "checkpoints/update_000004"):
        shutil.rmtree(tmp_path / "run" / left, ignore_errors=True)
    run(ppo, replace(args, resume=True))
    found, metrics = left_behind(tmp_path / "run"), expected["metrics"]
    assert [key for key in expected if found[key] != expected[key]] == [] and complete(found) == ""
    assert metrics[0]["objective/kl"] == 0.0 and metrics[-1]["objective/kl"] != 0.0


def test_the_page_of_the_gpu_has_the_committed_rows(capsys):
    """Each line of the tables that pretrained.py prints of these results, without the empty column of the KL."""
    pretrained.print_page(ROOT / "benchmark/results/pretrained_gpu")
    page = (ROOT / "benchmark/pretrained.md").read_text().partition("## On an H100")[2]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("| SFT", "| DPO", "| RLOO"))]
    found = [line.replace(" |  | ", " | ", 1) if line.count("|") == 13 else line for line in lines]
    assert len([line for line in found if line in page]) == 6  # and the five invented posts


def test_training_pairs_are_on_other_posts_than_the_evaluation(tmp_path):
    rows = {"train": ["a", "b", "c"], "validation": ["b"], "test": ["d"]}
    posts = DatasetDict({split: Dataset.from_dict({"query": queries}) for split, queries in rows.items()})
    pairs = DatasetDict(
        {split: Dataset.from_dict({"query": ["a", "b", "d", "a"]}) for split in ("train", "validation")}
    )
    posts.save_to_disk(tmp_path / "data/sft")
    pairs.save_to_disk(tmp_path / "data/preference")
    pretrained.main(pretrained.Args(data=tmp_path / "data", held_out=tmp_path / "pairs"))
    found = load_from_disk(tmp_path / "pairs")
    assert (found["train"]["query"][:], found["validation"]["query"][:]) == (["a", "a"], ["a", "b", "d", "a"])


def test_a_summary_of_openai_is_without_the_eos_of_the_tokenizer(tmp_path):
    """SmolLM2's EOS, and a summary on each side."""
    post = {"id": "1", "title": "t", "post": "One. Two.", "summary": "s"}
    posts = [post | {"query": query} for query in ("a", "b", "without")]
    DatasetDict(validation=Dataset.from_list(posts)).save_to_disk(tmp_path / "sft")
    pairs = []
    for query, sides in (("a", ("chosen", "rejected")), ("b", ("rejected", "chosen"))):
        policies = {f"{sides[0]}_policy": pretrained.OPENAI, f"{sides[1]}_policy": "ref"}
        texts = {"chosen": " one<|im_end|>", "rejected": " two<|im_end|>"}
        pairs.append({"query": query, "summaries": [{"text": "two"}, {"text": "one"}], "choice": 1} | texts | policies)
    DatasetDict(train=Dataset.from_list(pairs)).save_to_disk(tmp_path / "preference")
    table = pretrained.texts_without_a_policy(pretrained.Args(data=tmp_path))
    assert table[["query", "openai", "lead_1"]].values.tolist() == [["a", "one", "One."], ["b", "two", "One."]]


# notes each command and makes what the real one would. A stage named in $SLOW waits for TERM: ppo.py with a handler and
# a checkpoint, as in training, another one without, as in its first seconds
STAND_IN = """#!/usr/bin/env bash
[[ $1 == -m ]] && exit 0
words="$*"
for ((i = 1; i <= $#; i++)); do
    [[ ${!i} != --output-dir && ${!i} != --output ]] || { next=$((i + 1)) && folder=${!next}; }
done
stage=$(basename "${folder:-none}")
echo "$1 $stage" >>"$LOG"
if [[ $1 == *.py && $1 != eval/* && " $SLOW " == *" $stage "* ]]; then
    if [[ $stage == ppo ]]; then trap 'mkdir -p "$folder/checkpoints/update_000002"; exit 75' TERM; fi
    for ((i = 0; i < 300; i++)); do sleep 0.1; done
fi
case $1 in
    eval/samples.py) mkdir -p "$folder/eval" && sleep 1 && touch "$folder/eval/rouge.csv" ;;
    benchmark/pretrained.py) [[ $words != *--newest* ]] || mkdir -p runs/pretrained/base-gpu/ppo/checkpoints/policy ;;
    *) mkdir -p "$folder/model" ;;
esac
"""


def copy_chain(folder: Path, stand_in: str):
    """Put the chain, raw data and a stand-in for python into a folder."""
    for file in (
        "benchmark/pretrained.sh",
        "quickstart/setup.sh",
        "requirements.txt",
        "benchmark/invented_posts.jsonl",
    ):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, folder / file)
    (folder / "raw/tldr_posts").mkdir(parents=True)
    write_program(folder / "venv/bin/python", stand_in)


@pytest.mark.parametrize("slow", ["ppo", "dpo"])
def test_a_chain_that_the_clock_stops_ends_in_good_order(tmp_path, slow):
    """TERM goes to the whole group, as that of `timeout`. Training ends, what has been trained is sampled, and the same
    command continues."""
    copy_chain(tmp_path, STAND_IN)
    log = tmp_path / "log"

    def start(slow: str) -> tuple[int, list[str]]:
        log.write_text("")
        environment = os.environ | {"VIRTUAL_ENV": str(tmp_path / "venv"), "LOG": str(log), "SLOW": slow}
        command = ["bash", str(tmp_path / "benchmark/pretrained.sh"), "--gpu", "--model", "base", "raw"]
        chain = subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True)
        if slow:
            until(lambda: f".py {slow}\n" in log.read_text())
            until(lambda: slow != "dpo" or (tmp_path / "runs/pretrained/base-gpu/reward/model").exists())
            os.killpg(chain.pid, signal.SIGTERM)
        return chain.wait(60), log.read_text().splitlines()

    code, commands = start(slow)
    if slow == "ppo":
        assert code == 0 and "eval/samples.py ppo" in commands and "variants/rloo.py rloo" not in commands
        assert commands[-1] == "benchmark/pretrained.py pretrained_gpu"  # the tables
    else:  # without the reward model and DPO, nothing can follow
        assert code == 143 and not [line for line in commands if line.startswith(("ppo.py", "eval/"))]
    code, commands = start("")
    assert code == 0 and commands[-1] == "benchmark/pretrained.py pretrained_gpu"
    assert "variants/rloo.py rloo" in commands and "eval/samples.py rloo" in commands


def test_data_of_another_folder_are_not_taken(tmp_path):
    """A folder is named as seen from where the chain is called."""
    copy_chain(tmp_path, '#!/usr/bin/env bash\n[[ $1 == -m ]] || { echo "$*" >>"$LOG" && [[ $1 != sft.py ]]; }\n')
    (tmp_path / "elsewhere/raw/tldr_posts").mkdir(parents=True)
    log = tmp_path / "log"

    def start(raw: str, place: Path) -> str:
        log.write_text("")
        environment = os.environ | {"VIRTUAL_ENV": str(tmp_path / "venv"), "LOG": str(log)}
        command = ["bash", str(tmp_path / "benchmark/pretrained.sh"), "--small", "--model", "base", raw]
        assert subprocess.run(command, cwd=place, env=environment, capture_output=True).returncode == 1
        return log.read_text()

    elsewhere = tmp_path / "elsewhere"
    commands = start("raw", elsewhere)
    assert f"--sft-dataset {elsewhere}/raw/tldr_posts" in commands and "\nsft.py" in commands
    assert start("raw", tmp_path) == "" and start("elsewhere/raw", tmp_path) == commands


def until(is_so):
    """Wait, for at most a minute."""
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)
