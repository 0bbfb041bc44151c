"""benchmark/plan.py against transformers, peft, torch and the stages: parameters, and bytes that are allocated."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import plan
import pytest
import torch
from conftest import read_csv, script
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPTNeoXConfig,
    StaticCache,
)

import dpo
import ppo
import reward
import sft

STAGES = {"sft": sft, "reward": reward, "dpo": dpo, "ppo": ppo}
WIDTH, LAYERS, VOCAB, PAD = 192, 6, 2000, 0  # small, but with matrices that outweigh what grows with neither


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A small Pythia among the sizes of plan.py."""
    monkeypatch.setitem(plan.SHAPES, "tiny", (WIDTH, LAYERS, VOCAB))


def language_model(model: str):
    return AutoModelForCausalLM.from_config(config(model))


def classifier(model: str):
    return reward.RewardModel(AutoModelForSequenceClassification.from_config(config(model))).model


def config(model: str):
    width, layers, vocab = plan.SHAPES[model]
    shape = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 4, "vocab_size": vocab}
    return GPTNeoXConfig(**shape, intermediate_size=4 * width, rotary_pct=0.25, pad_token_id=PAD, num_labels=1)


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


@pytest.mark.parametrize("zero", [0, 2])
def test_frozen_models_are_in_bfloat16_where_the_scripts_cast_them(zero):
    """Linear layers in bfloat16, under DeepSpeed the rest, too, but the score head in float32."""
    expected = []
    for model in on_meta("2.8b"):
        expected.append(0)
        for name, module in model.named_modules():
            numbers = sum(x.numel() for x in module.parameters(recurse=False))
            short = isinstance(module, torch.nn.Linear) or zero
            expected[-1] += numbers * (2 if short and name != "score" else 4)
    args = plan.Args("ppo", model="2.8b", zero=zero, reward_models=2)
    assert plan.frozen_models(args) == [*expected, expected[1]]
    assert plan.plan(args)["terms"]["sampling"]["frozen models"] == expected[0] + 2 * expected[1]


def test_machine_memory_by_hand():
    """6.9b, width 4096 and 32 layers: the frozen models' page-locked copies, each tensor rounded up to a power of two,
    and beside them the policy in float32."""
    kib, mib = 2**10, 2**20
    matrices = (128 + 32 + 128 + 128) * mib  # queries, keys and values have 96 MiB
    vectors = (32 + 8 + 32 + 8) * kib + 4 * 8 * kib  # biases (the first has 24 KiB), two norms
    body = 32 * (matrices + vectors) + 512 * mib + 2 * 8 * kib  # the embedding has 394 MiB
    reward_model, reference = body + 16 * kib + 4, body + 512 * mib
    language = 4 * 6_857_302_016
    host = 8 * (reward_model + reference + language)
    assert plan.plan(plan.Args("ppo", model="6.9b", gpus=16))["host"] == pytest.approx(host, rel=5e-3)
    assert plan.plan(plan.Args("ppo", model="6.9b", offload=False))["host"] == 8 * language
    # Adam's states and float32 weights over all devices, and one copy of both models in bfloat16 when it saves
    numbers = sum(each.num_parameters() for each in on_meta("2.8b"))
    args = plan.Args("ppo", model="2.8b", offload_optimizer=True, gpus=4)
    assert plan.plan(args)["host"] == (12 + 2) * numbers


# ---- what is allocated ----------------------------------------------------------------------------------------------


def tokens(*shape) -> torch.Tensor:
    return torch.randint(1, VOCAB, shape)


def peak_bytes(call) -> int:
    """The most that a call had allocated at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events))


def with_gradients(model):
    """The model with gradients of zero, which are counted apart from a pass."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def test_adapters_are_those_of_peft():
    policy, value = language_model("tiny"), classifier("tiny")
    counts = [x.get_nb_trainable_parameters()[0] for x in (add_adapters(policy), add_adapters(value))]
    assert plan.trained_size(plan.Args("ppo", "tiny", lora_r=8)) == sum(counts) + value.score.weight.numel() + 1


def add_adapters(model):
    return script("ppo_lora.py").add_adapters(model, SimpleNamespace(lora_r=8, lora_alpha=8))


def test_activations_of_adapters_under_autocast():
    """Of frozen layers in bfloat16, policy and value model."""
    both, loss, (rows, width), columns = losses("ppo")
    for model in (both.policy, both.value_model.model):
        model.requires_grad_(False)
        for layer in model.modules():
            layer.to(torch.bfloat16 if isinstance(layer, torch.nn.Linear) else None)
        add_adapters(model)
    head = both.value_model.model.score.float().requires_grad_(True)
    for parameter in [x for x in both.parameters() if x.requires_grad]:
        parameter.grad = torch.zeros_like(parameter)

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            found = loss()
        found.backward()

    expected = plan.activation_bytes(plan.Args("ppo", "tiny", lora_r=8), rows, width, 2)
    expected += plan.LOGIT["ppo"] * 4 * columns * VOCAB
    assert expected == pytest.approx(peak_bytes(step), rel=0.07) and head.weight.grad.abs().sum() > 0


def losses(stage: str):
    """The modules and a call of a stage's forward pass on four long rows, its (rows, columns), and the columns with
    logits."""
    language, value = language_model("tiny"), reward.RewardModel(classifier("tiny"))
    query, pairs = tokens(4, 257), {}
    for side, width in (("chosen", 60), ("rejected", 52)):
        response = tokens(4, width)
        pairs[f"query_{side}_token"] = torch.cat([query, response], 1)
        pairs[f"query_{side}_token_response_label"] = torch.cat([torch.full_like(query, PAD), response], 1)
    pairs = reward.pair_rows(pairs, PAD)
    if stage == "sft":
        batch = {"query_reference_response_token": tokens(4, 320)}
        labels = sft.next_tokens(batch, "query_response", PAD)
        loss = lambda: sft.sft_loss(language, batch["query_reference_response_token"], labels, PAD)  # noqa: E731
        return language, loss, (4, 320), 320
    if stage == "reward":
        return value, lambda: reward.pair_rewards(value, pairs)[0].sum(), (4, 384), 0
    if stage == "dpo":
        return language, lambda: sum(dpo.pair_logprobs(language, pairs)).sum(), (4, 384), 128
    both = ppo.PolicyAndValue(language, value)
    responses = tokens(4, 53)
    [mb] = ppo.micro_batches(ppo.make_batch(tokens(4, 267), responses, PAD), torch.arange(4), 4)

    def loss():
        logits, values = both(mb["tokens"], mb["columns"])
        return ppo.token_logprobs(logits, responses, 0.7).sum() + values.sum()

    return both, loss, (4, 320), 53


@pytest.mark.parametrize("stage", STAGES)
def test_activations_and_logits_are_what_a_pass_allocates(stage):
    model, loss, (rows, width), columns = losses(stage)
    with_gradients(model)
    logits = plan.LOGIT[stage] * 4 * columns * VOCAB
    expected = plan.activation_bytes(plan.Args(stage, "tiny"), rows, width, 4) + logits
    assert expected == pytest.approx(peak_bytes(lambda: loss().backward()), rel=0.07)
    assert logits > 0.1 * expected or stage in ("reward", "ppo")


def test_sampling_allocates_what_the_plan_says():
    rows, model = 4, language_model("tiny")
    queries = tokens(rows, plan.QUERY)

    def prefill():
        cache = StaticCache(model.config, max_cache_len=plan.QUERY + plan.RESPONSE)
        model.base_model(queries, past_key_values=cache, use_cache=True)

    expected = plan.sampling_bytes("tiny", rows)
    with torch.no_grad():
        in_float32 = 2 * (expected["keys and values"] + expected["pass"])
        assert in_float32 == pytest.approx(peak_bytes(prefill), rel=0.05)


def test_states_of_a_plain_run_are_what_torch_allocates():
    model = language_model("tiny")
    optimizer = torch.optim.AdamW(model.parameters())
    model(tokens(1, 4)).logits.sum().backward()
    optimizer.step()
    adam = sum(x.nbytes for state in optimizer.state.values() for x in state.values())
    expected = plan.state_bytes(model.num_parameters(), plan.Args("sft", gpus=1, zero=0))
    assert expected["buckets"] == 0 and expected["weights"] == sum(x.nbytes for x in model.parameters())
    assert sum(x.grad.nbytes for x in model.parameters()) == expected["gradients"]
    assert adam == pytest.approx(expected["optimizer"], rel=1e-3)  # and counts of steps


# ---- what one H100 measured -----------------------------------------------------------------------------------------

# columns of the longest micro-batch that it trained on
H100_COLUMNS = {"sft": (496, 496), "reward": (688, 0), "dpo": (688, 384), "ppo": (464 + 53, 53)}
H100 = {row["stage"]: row for row in read_csv(Path(plan.__file__).parent / "results/h100/stages.csv")}


@pytest.mark.parametrize("stage", STAGES)
def test_memory_is_the_h100s_and_less_than_a_term_more(stage, monkeypatch):
    """Without any term the plan would be below the peak; only PPO's logits are smaller than what the plan has over."""
    monkeypatch.setitem(plan.COLUMNS, stage, H100_COLUMNS[stage])
    micro = int(H100[stage]["micro-batch"])  # for pairs, the default was 8 then
    found = plan.plan(plan.Args(stage, gpus=1, zero=0, reserve=0, micro_batch_size=micro))
    measured = float(H100[stage]["peak GiB"]) * 2**30
    assert measured <= found["peak"] <= 1.08 * measured
    terms = {name: size for name, size in found["terms"]["training"].items() if size}
    assert set(terms) >= {"weights", "gradients", "optimizer", "bfloat16 weights", "activations"}
    for name, size in terms.items():
        assert found["peak"] - size < measured or (stage, name) == ("ppo", "logits")


@pytest.mark.parametrize("stage", STAGES)
def test_hours_are_the_h100s(stage):
    assert plan.SPEEDS[stage] == float(H100[stage]["items/s"])
    seconds = {"sft": 116_722, "reward": 92_858, "dpo": 92_858, "ppo": 1_000_000}[stage] / plan.SPEEDS[stage]
    assert plan.plan(plan.Args(stage, gpus=2))["hours"] == pytest.approx(seconds / 2 / 3600)
    assert plan.plan(plan.Args(stage, "6.9b", gpus=2))["hours"] == pytest.approx(
        6.857 / 1.012 * seconds / 7200, rel=1e-3
    )


# ---- what is printed ------------------------------------------------------------------------------------------------


def test_the_page_is_what_the_plan_prints(capsys):
    plan.main(plan.Args())
    assert capsys.readouterr().out == (Path(plan.__file__).parent / "results/plan.md").read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus": 7}, "--gpus 7: must divide the batch of 128"),
        ({"gpus": 0}, "--gpus 0: must divide the batch of 128"),
        ({"zero": 0, "offload_optimizer": True}, "--offload-optimizer needs DeepSpeed"),
        ({"lora_r": 4}, "--lora-r works only for ppo"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changes, message):
    with pytest.raises(SystemExit, match=f"^error: {message}"):
        plan.plan(plan.Args("sft", **changes))


def test_a_micro_batch_is_at_most_a_device_s_share():
    found = plan.plan(plan.Args("sft", gpus=8, micro_batch_size=64))
    assert (found["micro_batch_size"], found["micro_batches"]) == (16, 1)
