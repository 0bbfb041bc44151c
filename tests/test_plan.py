"""benchmark/plan.py against transformers, peft, the stages, and the peaks of one H100."""

from pathlib import Path
from types import SimpleNamespace

import plan
import pytest
import torch
from conftest import read_csv, script
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GPTNeoXConfig

import dpo
import ppo
import reward
import sft

STAGES = {"sft": sft, "reward": reward, "dpo": dpo, "ppo": ppo}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A small Pythia among the sizes of plan.py."""
    monkeypatch.setitem(plan.SHAPES, "tiny", (192, 6, 2000))


def language_model(model: str):
    return AutoModelForCausalLM.from_config(config(model))


def classifier(model: str):
    return reward.RewardModel(AutoModelForSequenceClassification.from_config(config(model))).model


def config(model: str):
    width, layers, vocab = plan.SHAPES[model]
    shape = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 4, "vocab_size": vocab}
    return GPTNeoXConfig(**shape, intermediate_size=4 * width, rotary_pct=0.25, num_labels=1)


def on_meta(model: str):
    """A language model and a reward model, without their numbers."""
    with torch.device("meta"):
        return language_model(model), classifier(model)


# ---- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "billions"), [("1b", 1.012), ("2.8b", 2.775), ("6.9b", 6.857)])
def test_parameters_are_those_of_transformers(model, billions):
    language, scalar = (each.num_parameters() for each in on_meta(model))
    assert round(language / 1e9, 3) == billions
    trained = {stage: plan.trained_size(plan.Args(stage, model)) for stage in STAGES}
    assert trained == {"sft": language, "dpo": language, "reward": scalar, "ppo": language + scalar}


@pytest.mark.parametrize("stage", STAGES)
def test_batches_are_those_of_the_scripts(stage):
    args, presets = STAGES[stage].Args(), STAGES[stage].MICRO_BATCH_SIZES
    batch, items, largest = plan.STAGES[stage]
    assert batch == args.batch_size and largest == presets
    if stage == "ppo":  # the others go over their data once
        assert items == args.total_episodes
        assert plan.RESPONSE == args.response_length
        assert plan.SAMPLE_ROWS == ppo.SAMPLE_BATCH_SIZES


def test_machine_memory():
    """Of processes that start with one model each, and of Adam's states with float32 weights over all devices beside
    one copy of both models in bfloat16."""
    assert plan.plan(plan.Args("ppo", model="6.9b", offload=False))["host"] == 8 * 4 * 6_857_302_016
    numbers = sum(each.num_parameters() for each in on_meta("2.8b"))
    args = plan.Args("ppo", model="2.8b", offload_optimizer=True, gpus=4)
    assert plan.plan(args)["host"] == (12 + 2) * numbers


def test_disk_is_what_the_stages_save():
    """14 or 12 bytes for each trained parameter, as checkpoint_bytes of the stages counts them (test_faults.py)."""
    for stage, deepspeed in (("reward", None), ("ppo", None), ("ppo", True)):
        models = on_meta("tiny")[0 if stage == "ppo" else 1 :]
        state = SimpleNamespace(deepspeed_plugin=deepspeed)
        expected = STAGES[stage].checkpoint_bytes(SimpleNamespace(state=state, _models=models))
        found = plan.plan(plan.Args(stage, "tiny", zero=2 if deepspeed else 0))["disk"]
        assert found["checkpoint"] == expected
        assert found["models"] == (2 if deepspeed else 4) * sum(model.num_parameters() for model in models)
    found = plan.plan(plan.Args("ppo", "tiny", gpus=1, zero=0, lora_r=8))["disk"]
    assert found["models"] == 4 * on_meta("tiny")[0].num_parameters() and found["checkpoint"] < found["models"]


def test_adapters_are_those_of_peft():
    policy, value = language_model("tiny"), classifier("tiny")
    add_adapters, settings = script("ppo_lora.py").add_adapters, SimpleNamespace(lora_r=8, lora_alpha=8)
    counts = [add_adapters(model, settings).get_nb_trainable_parameters()[0] for model in (policy, value)]
    assert plan.trained_size(plan.Args("ppo", "tiny", lora_r=8)) == sum(counts) + value.score.weight.numel() + 1


# ---- what one H100 measured -----------------------------------------------------------------------------------------

# columns of the longest micro-batch that it trained on
H100_COLUMNS = {"sft": (496, 496), "reward": (688, 0), "dpo": (688, 384), "ppo": (464 + 53, 53)}
H100 = {row["stage"]: row for row in read_csv(Path(plan.__file__).parent / "results/h100/stages.csv")}


@pytest.mark.parametrize("stage", STAGES)
def test_memory_is_the_h100s_and_less_than_a_term_more(stage, monkeypatch):
    """Without any term the plan would be below the peak; only PPO's logits are smaller than what the plan has over."""
    assert plan.SPEEDS[stage] == float(H100[stage]["items/s"])
    monkeypatch.setitem(plan.COLUMNS, stage, H100_COLUMNS[stage])
    micro = int(H100[stage]["micro-batch"])  # for pairs, the default was 8 then
    found = plan.plan(plan.Args(stage, gpus=1, zero=0, reserve=0, micro_batch_size=micro))
    measured = float(H100[stage]["peak GiB"]) * 2**30
    assert measured <= found["peak"] <= 1.08 * measured
    terms = {name: size for name, size in found["terms"]["training"].items() if size}
    assert set(terms) >= {"weights", "gradients", "optimizer", "bfloat16 weights", "activations"}
    for name, size in terms.items():
        assert found["peak"] - size < measured or (stage, name) == ("ppo", "logits")


# ---- what is printed ------------------------------------------------------------------------------------------------


def test_the_page_is_what_the_plan_prints(capsys):
    plan.main(plan.Args())
    assert capsys.readouterr().out == (Path(plan.__file__).parent / "results/plan.md").read_text()
