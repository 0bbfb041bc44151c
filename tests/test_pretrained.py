"""benchmark/pretrained.*: the numbers of its page, and what a pretrained Llama brings that the nano bases lack: tied
embeddings, a vocabulary without a row for [PAD], an EOS that is its padding, bfloat16 on a CPU."""

import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pandas
import pretrained
import pytest
from conftest import REPOSITORY, script
from datasets import Dataset, DatasetDict, load_from_disk
from kill_runs import complete, left_behind
from test_saved_models import TRAINED, make_base
from transformers import AutoTokenizer

import dpo
import ppo
import reward


def test_copied_words_and_runs_of_words():
    source = "My dog ate the cake. Then the dog slept, and I ate the cake"
    assert pretrained.copied("The DOG ate a cake!", source, 1) == 4 / 5
    assert pretrained.copied("then the dog slept and snored", source, 4) == 2 / 3
    assert pretrained.copied("dog ate the", source, 4) is None


def test_the_first_page_has_the_committed_rows():
    rows = pandas.read_csv(REPOSITORY / "benchmark/results/pretrained/policies.csv").set_index("policy")
    page = " ".join((REPOSITORY / "README.md").read_text().split())
    rouge, score = rows["rougeL"].map("{:.3f}".format), rows["score"].map("{:.2f}".format)
    assert f"SFT raises ROUGE-L from {rouge['zero_shot']} to {rouge['sft']}" in page
    assert f"raises the score from {score['sft']} to {score['rloo']}, and four of five" in page
    assert f"after 256 responses ({score['sft']} to {score['ppo']})" in page
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


STAGES = {"dpo": dpo, "ppo": ppo, "rloo": script("variants/rloo.py")}


@pytest.mark.parametrize("stage", STAGES)
def test_a_tied_model_in_bfloat16_resumes_to_the_same_bytes(world, tied, tmp_path, stage):
    module, base = STAGES[stage], str(tied["base"])
    own = {"dpo": {"model": "tied", "sft_model_path": base, "preference_dataset": str(world.preference_dataset)}}
    own["ppo"] = {"model": "tied", "sft_model_path": base, "dataset": str(world.dataset), "response_length": 8}
    own["ppo"] |= {"reward_model_path": str(tied["reward"]), "sample_every": 0, "eval_rows": 4}
    own["rloo"] = own["ppo"]
    args = module.Args(
        **own[stage],
        output_dir=str(tmp_path / "run"),
        batch_size=8,
        total_episodes=32,
        learning_rate=1e-2,
        mixed_precision="bf16",
        save_every=2,
    )
    run(module, args)
    expected = left_behind(tmp_path / "run")
    for left in ("model", "value_model", "checkpoints/update_000004"):
        shutil.rmtree(tmp_path / "run" / left, ignore_errors=True)
    run(module, replace(args, resume=True))
    found, metrics = left_behind(tmp_path / "run"), expected["metrics"]
    assert [key for key in expected if found[key] != expected[key]] == [] and complete(found) == ""
    if stage in ("ppo", "rloo"):
        assert metrics[0]["objective/kl"] == 0.0 and metrics[-1]["objective/kl"] != 0.0


def test_the_page_of_the_gpu_has_the_committed_rows(capsys):
    """Each line of the tables that pretrained.py prints of these results, without the empty column of the KL."""
    pretrained.print_page(REPOSITORY / "benchmark/results/pretrained_gpu")
    page = (REPOSITORY / "benchmark/pretrained.md").read_text().partition("## On an H100")[2]
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
