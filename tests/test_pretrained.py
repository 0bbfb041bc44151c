"""benchmark/pretrained.*: the numbers of its page, and what a pretrained Llama brings that the nano bases lack: tied
embeddings, a vocabulary without a row for [PAD], an EOS that is its padding, bfloat16 on a CPU."""

import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pandas
import pretrained
import pytest
import torch
from accelerate.state import AcceleratorState
from conftest import REPOSITORY, read_metrics, script
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import dpo
import ppo
import reward
import sft
import tldr_dataset


def test_copied_words_and_runs_of_words():
    source = "My dog ate the cake. Then the dog slept, and I ate the cake"
    assert pretrained.copied("The DOG ate a cake!", source, 1) == 4 / 5
    assert pretrained.copied("then the dog slept and snored", source, 4) == 2 / 3
    assert pretrained.copied("dog ate the", source, 4) is None


def test_the_first_page_has_the_committed_rows():
    rows = pandas.read_csv(REPOSITORY / "benchmark/results/pretrained/policies.csv").set_index("policy")
    page = (REPOSITORY / "README.md").read_text()
    for name, row in rows.drop(index="zero_shot").iterrows():
        shown = [pretrained.with_interval(row, "rougeL"), f"{row['words']:.1f}"]
        shown += [f"{row['questions']:.2f}", f"{row['eos_rate']:.2f}", pretrained.with_interval(row, "score", 2)]
        assert f"| {' | '.join([name.upper(), *shown])} |\n" in page


def test_what_a_query_keeps_of_its_post():
    query = tldr_dataset.format_query({"subreddit": "x", "title": "POST: a", "post": "b\nPOST: c"})
    assert pretrained.source_of(query) == "b\nPOST: c"


@pytest.fixture(autouse=True)
def other_tests_run_in_float32():
    yield
    AcceleratorState._reset_state(True)


def run(module, args):
    AcceleratorState._reset_state(True)  # accelerate keeps one state a process
    logging.getLogger("accelerate.utils.other").setLevel(logging.NOTSET)  # as in a new process
    module.main(args)


@pytest.fixture(scope="module")
def tied(world, tmp_path_factory) -> dict[str, Path]:
    """Checkpoint folders of a tied Llama that ends some responses, without a row for [PAD], and of its reward model."""
    root = tmp_path_factory.mktemp("tied")
    tokenizer = AutoTokenizer.from_pretrained(world.tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=64,
        vocab_size=len(tokenizer),
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(root / "base")
    tokenizer.save_pretrained(root / "base")
    shared = {"model": "tied", "sft_model_path": str(root / "base"), "total_episodes": 16, "batch_size": 8}
    pairs = shared | {"preference_dataset": str(world.preference_dataset)}
    args = reward.Args(**pairs, dataset=str(world.dataset), output_dir=str(root / "reward"), learning_rate=1e-2)
    run(reward, args)
    return {"base": root / "base", "reward": root / "reward"}


STAGES = {"sft": sft, "reward": reward, "dpo": dpo, "ppo": ppo, "rloo": script("variants/rloo.py")}


@pytest.mark.parametrize("stage", STAGES)
def test_a_tied_model_in_bfloat16_resumes_to_the_same_bytes(world, tied, tmp_path, stage):
    module, base = STAGES[stage], str(tied["base"])
    own = {"sft": {"model": base, "dataset": str(world.dataset)}}
    own["dpo"] = {"model": "tied", "sft_model_path": base, "preference_dataset": str(world.preference_dataset)}
    own["reward"] = own["dpo"] | {"dataset": str(world.dataset)}
    own["ppo"] = {"model": "tied", "sft_model_path": base, "dataset": str(world.dataset), "response_length": 8}
    own["ppo"] |= {"reward_model_path": str(tied["reward"]), "sample_every": 0, "eval_rows": 4}
    own["rloo"] = own["ppo"]
    args = module.Args(
        **own[stage],
        output_dir=str(tmp_path / "whole"),
        batch_size=8,
        total_episodes=32,
        learning_rate=1e-2,
        mixed_precision="bf16",
        save_every=2,
    )
    run(module, args)
    resumed = Path(shutil.copytree(tmp_path / "whole", tmp_path / "resumed"))
    for left in ("model", "value_model", "checkpoints/update_000004"):
        shutil.rmtree(resumed / left, ignore_errors=True)
    text = (resumed / "args.json").read_text()
    (resumed / "args.json").write_text(text.replace(str(tmp_path / "whole"), str(resumed)))
    run(module, replace(args, output_dir=str(resumed), resume=True))
    for file in tmp_path.glob("whole/*model/model.safetensors"):
        assert file.read_bytes() == (resumed / file.relative_to(tmp_path / "whole")).read_bytes(), file
    assert load_file(resumed / "model" / "model.safetensors")
    metrics = [
        [{k: v for k, v in line.items() if not k.startswith("time/")} for line in read_metrics(tmp_path / name)]
        for name in ("whole", "resumed")
    ]
    assert metrics[0] == metrics[1]
    if stage in ("ppo", "rloo"):
        assert metrics[0][0]["objective/kl"] == 0.0 and metrics[0][-1]["objective/kl"] != 0.0
