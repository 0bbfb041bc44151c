"""benchmark/plan.py against what transformers, torch and the stages make: parameters, and bytes that are allocated."""

import itertools
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import plan
import pytest
import throughput
import torch
from conftest import read_csv, script
from datasets import Dataset, DatasetDict
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPTNeoXConfig,
    LlamaConfig,
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
    """A small Pythia and a small Llama among the sizes of plan.py."""
    monkeypatch.setitem(plan.SHAPES, "pythia", (WIDTH, LAYERS, 4, VOCAB))
    monkeypatch.setitem(plan.SHAPES, "llama", (WIDTH, 2 * LAYERS, 3, VOCAB))
    monkeypatch.setitem(plan.LLAMA, "llama", (64, 512))


def language_model(model: str):
    return AutoModelForCausalLM.from_config(config(model))


def classifier(model: str):
    return reward.RewardModel(AutoModelForSequenceClassification.from_config(config(model))).model


def config(model: str):
    width, layers, heads, vocab = plan.SHAPES[model]
    shape = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": vocab}
    shape |= {"pad_token_id": PAD, "num_labels": 1}
    if model not in plan.LLAMA:
        return GPTNeoXConfig(**shape, intermediate_size=4 * width, rotary_pct=0.25)
    keys, inner = plan.LLAMA[model]
    grouped = {"num_key_value_heads": keys * heads // width, "intermediate_size": inner}
    return LlamaConfig(**shape, **grouped, tie_word_embeddings=True)


def on_meta(model: str):
    """A language model and a reward model, without their numbers."""
    with torch.device("meta"):
        return language_model(model), classifier(model)


# ---- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "billions"), [("1b", 1.012), ("2.8b", 2.775), ("6.9b", 6.857), ("135m", 0.135)])
def test_parameters_are_those_of_transformers(model, billions):
    language, scalar = (each.num_parameters() for each in on_meta(model))
    assert round(language / 1e9, 3) == billions
    counts = {stage: plan.parameters(stage, model, 3) for stage in STAGES}
    assert counts["sft"] == counts["dpo"] == (language, 0) and counts["reward"] == (scalar, 0)
    assert counts["ppo"] == (language + scalar, language + 3 * scalar)


@pytest.mark.parametrize("stage", STAGES)
def test_batches_are_those_of_the_scripts(stage):
    args, presets = STAGES[stage].Args(), STAGES[stage].MICRO_BATCH_SIZES
    batch, items, largest = plan.STAGES[stage]
    assert batch == args.batch_size and largest == presets
    if stage == "ppo":  # the others go over their data once
        assert items == args.total_episodes
        assert (plan.RESPONSE, plan.FORWARD_ROWS) == (args.response_length, args.forward_batch_size)
        assert plan.PPO_EPOCHS == args.num_ppo_epochs and args.num_mini_batches == 1
        assert plan.SAMPLE_ROWS == ppo.SAMPLE_BATCH_SIZES


@pytest.mark.parametrize("zero", [0, 2])
def test_travel_is_the_frozen_models_once_an_update(zero):
    """Linear layers in bfloat16, under DeepSpeed the rest, too, but the score head in float32."""
    bodies = 0
    for model, copies in zip(on_meta("2.8b"), (1, 2), strict=True):
        for name, module in model.named_modules():
            numbers = sum(x.numel() for x in module.parameters(recurse=False))
            short = isinstance(module, torch.nn.Linear) or zero
            bodies += copies * numbers * (2 if short and name != "score" else 4)
    args = plan.Args("ppo", model="2.8b", zero=zero, reward_models=2, offload=True)
    found, here = plan.plan(args), plan.plan(replace(args, offload=False))
    assert found["travel"] == bodies == here["terms"]["sampling"]["frozen models"] and here["travel"] == 0


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
    assert plan.plan(plan.Args("ppo", model="6.9b", gpus=16))["host"] == host
    assert plan.plan(plan.Args("ppo", model="6.9b", gpus=16, gpus_per_machine=4))["host"] == host / 2
    assert plan.plan(plan.Args("ppo", model="6.9b", offload=False))["host"] == 8 * language
    # Adam's states and float32 weights over all devices, and one copy of both models in bfloat16 when it saves
    numbers = sum(each.num_parameters() for each in on_meta("2.8b"))
    args = plan.Args("ppo", model="2.8b", offload_optimizer=True, gpus=4)
    assert plan.plan(args)["host"] == (12 + 2) * numbers


# ---- time -----------------------------------------------------------------------------------------------------------


def test_an_update_of_ppo_by_hand():
    """An episode of 353 + 37 tokens at 1b, width 2048, 16 layers, 50304 words: 29 passes of a body (13 each of policy
    and value model, reference, reward model, sampling), 15 of the head. And at 135m a layer of 3,538,944 weights."""
    body = 2 * 12 * 16 * 2048**2 * 390 + 4 * 16 * 2048 * 390**2 / 2
    head = 2 * 50304 * 2048 * 37
    assert plan.item_flop("ppo", "1b", 1) == 29 * body + 15 * head
    assert plan.item_flop("ppo", "1b", 3) == 31 * body + 15 * head
    assert plan.item_flop("ppo", "1b", 1, lora_r=8) == 21 * body + 11 * head  # no gradients of frozen weights
    body = 2 * 3_538_944 * 30 * 390 + 4 * 30 * 576 * 390**2 / 2
    assert plan.item_flop("ppo", "135m", 1) == 29 * body + 15 * 2 * 49153 * 576 * 37


@pytest.mark.parametrize(("stage", "model"), [("sft", "1b"), ("reward", "1b"), ("dpo", "1b"), ("dpo", "135m")])
def test_arithmetic_agrees_with_throughput(stage, model, tmp_path):
    """The plan's passes over one item of mean length are those that throughput.py counts in a data set."""
    config(model).save_pretrained(tmp_path / "model")
    words = plan.SHAPES[model][3]
    throughput.word_tokenizer(words).save_pretrained(tmp_path / "model")
    pad = words - 1
    query, *responses = plan.LENGTHS[stage]
    row = {"query_token": [[pad] * 5 + [1] * query], "reference_response_token": [[1] * responses[0] + [pad] * 3]}
    for side, length in (("chosen", responses[0]), ("rejected", responses[-1])):
        row[f"query_{side}_token_response_label"] = [[pad] * query + [1] * length]
    for name in ("sft", "preference"):
        DatasetDict({"train": Dataset.from_dict(row)}).save_to_disk(str(tmp_path / name))
    asked = throughput.Args(stage, device="cpu", batch_size=1, updates=1)
    tokens, flop = throughput.work_done(asked, tmp_path, responses[0])
    assert tokens == sum(plan.LENGTHS[stage])
    assert plan.item_flop(stage, model, 1) == pytest.approx(throughput.PASSES[stage] * flop)


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
    for model in ("pythia", "llama"):
        policy, value = language_model(model), classifier(model)
        counts = [x.get_nb_trainable_parameters()[0] for x in (add_adapters(policy), add_adapters(value))]
        assert counts == [plan.adapter_size(model, 8)] * 2
        assert plan.parameters("ppo", model, 1, 8)[0] == sum(counts) + value.score.weight.numel() + 1


def add_adapters(model):
    return script("ppo_lora.py").add_adapters(model, SimpleNamespace(lora_r=8, lora_alpha=8))


def test_activations_of_adapters_under_autocast():
    """Of frozen layers in bfloat16, policy and value model."""
    both, loss, passes, columns = losses("ppo")
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

    expected = plan.activation_bytes("pythia", passes, 2, lora=True) + plan.logit_bytes("ppo", 4, columns, VOCAB)
    assert expected == pytest.approx(peak_bytes(step), rel=0.07) and head.weight.grad.abs().sum() > 0


def losses(stage: str):
    """The modules and a call of a stage's forward pass on four long rows, and the passes and logits that this makes:
    [(rows, columns)], columns with logits."""
    language, value = language_model("pythia"), reward.RewardModel(classifier("pythia"))
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
        return language, loss, [(4, 320)], 320
    if stage == "reward":
        return value, lambda: reward.pair_rewards(value, pairs)[0].sum(), [(4, 384)], 0
    if stage == "dpo":
        return language, lambda: sum(dpo.pair_logprobs(language, pairs)).sum(), [(4, 384)], 128
    both = ppo.PolicyAndValue(language, value)
    language.register_buffer("banned", torch.zeros(VOCAB, dtype=torch.bool), persistent=False)
    responses = tokens(4, 53)
    [mb] = ppo.micro_batches(ppo.make_batch(tokens(4, 267), responses, PAD), torch.arange(4), 4)

    def loss():
        logits, values = both(mb["tokens"], mb["columns"])
        return ppo.token_logprobs(logits, responses, 0.7).sum() + values.sum()

    return both, loss, [(4, 320)] * 2, 53


@pytest.mark.parametrize("stage", STAGES)
def test_activations_and_logits_are_what_a_pass_allocates(stage):
    model, loss, passes, columns = losses(stage)
    with_gradients(model)
    expected = plan.activation_bytes("pythia", passes, 4) + plan.logit_bytes(stage, 4, columns, VOCAB)
    expected += plan.mask_bytes(stage, *passes[0], LAYERS, 4)
    assert expected == pytest.approx(peak_bytes(lambda: loss().backward()), rel=0.07)
    assert plan.logit_bytes(stage, 4, columns, VOCAB) > 0.1 * expected or stage in ("reward", "ppo")


@pytest.mark.parametrize("size", [4, 2])
def test_activations_of_a_llama_in_float32_and_under_autocast(size):
    model, row = with_gradients(language_model("llama").base_model), tokens(4, 320)

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=size == 2):
            hidden = model(row, use_cache=False).last_hidden_state
        hidden[:, -1].sum().backward()

    assert plan.activation_bytes("llama", [(4, 320)], size) == pytest.approx(peak_bytes(step), rel=0.07)


@pytest.mark.parametrize("stage", ["reward", "dpo", "ppo"])
def test_a_pass_without_gradient_allocates_what_the_plan_says(stage):
    model, loss, [(rows, columns), *_], _ = losses(stage)
    expected = plan.forward_bytes("pythia", rows, columns, 4) + plan.mask_bytes(stage, rows, columns, 0, 4)
    row, one_model = tokens(rows, columns), getattr(model, "policy", None)  # of ppo's two, which run one at a time
    with torch.no_grad():
        found = peak_bytes(lambda: one_model.base_model(row, use_cache=False) if one_model else loss())
    assert expected == pytest.approx(found, rel=0.05)


@pytest.mark.parametrize("name", ["pythia", "llama"])
def test_sampling_allocates_what_the_plan_says(name):
    rows, model = 4, language_model(name)
    queries = tokens(rows, plan.QUERY)

    def prefill():
        cache = StaticCache(model.config, max_cache_len=plan.QUERY + plan.RESPONSE)
        model.base_model(queries, past_key_values=cache, use_cache=True)

    expected = plan.sampling_bytes(name, rows)
    with torch.no_grad():
        in_float32 = 2 * (expected["keys and values"] + expected["prefill"])
        assert in_float32 == pytest.approx(peak_bytes(prefill), rel=0.05)


def test_states_of_a_plain_run_are_what_torch_allocates():
    model = language_model("pythia")
    optimizer = torch.optim.AdamW(model.parameters())
    model(tokens(1, 4)).logits.sum().backward()
    optimizer.step()
    adam = sum(x.nbytes for state in optimizer.state.values() for x in state.values())
    expected = plan.state_bytes(model.num_parameters(), 1, 0, 32, offload_optimizer=False)
    assert expected["buckets"] == 0 and expected["weights"] == sum(x.nbytes for x in model.parameters())
    assert sum(x.grad.nbytes for x in model.parameters()) == expected["gradients"]
    assert adam == pytest.approx(expected["optimizer"], rel=1e-3)  # and counts of steps


# ---- what one H100 measured -----------------------------------------------------------------------------------------

# of the rows that it trained on: mean real tokens as in LENGTHS, and the longest micro-batch as in COLUMNS
H100_ROWS = {
    "sft": ((366, 29), (496, 496)),
    "reward": ((366, 47, 54), (688, 0)),
    "dpo": ((366, 47, 54), (688, 384)),
    "ppo": ((366, 47), (464 + 53, 53)),
}


@pytest.fixture(params=STAGES)
def h100(request, monkeypatch):
    """What plan.py is asked about a stage at 1b on one GPU, with the rows of the measurement, and what was measured."""
    lengths, columns = H100_ROWS[request.param]
    monkeypatch.setitem(plan.LENGTHS, request.param, lengths)
    monkeypatch.setitem(plan.COLUMNS, request.param, columns)
    rows = read_csv(Path(plan.__file__).parent / "results/h100/stages.csv")
    [row] = [row for row in rows if row["stage"] == request.param]
    micro = int(row["micro-batch"])  # for pairs, the default was 8 then
    return plan.Args(request.param, gpus=1, zero=0, reserve=0, micro_batch_size=micro), row


def test_memory_is_the_h100s_and_less_than_a_term_more(h100):
    """Without any term the plan would be below the peak; only PPO's logits are smaller than what the plan has over."""
    args, row = h100
    found, measured = plan.plan(args), float(row["peak GiB"]) * 2**30
    assert measured <= found["peak"] <= 1.08 * measured
    terms = {name: size for name, size in found["terms"]["training"].items() if size}
    assert set(terms) >= {"weights", "gradients", "optimizer", "bfloat16 weights", "activations"}
    for name, size in terms.items():
        assert found["peak"] - size < measured or (args.stage, name) == ("ppo", "logits")


def test_rates_and_arithmetic_are_the_h100s(h100):
    args, row = h100
    batch, items, _ = plan.STAGES[args.stage]
    training = re.search(r"update ([\d.]+)", row["phases, s"])
    seconds = float(training[1]) if training else batch / float(row["items/s"])
    assert plan.RATES[args.stage] == round(float(row["PFLOP of training"]) * 1e3 / seconds)
    planned = plan.plan(args)["hours"] * 3600 * batch / items
    if args.stage == "dpo":
        planned *= 3 / 4  # the measured updates come after the reference's pass
    measured = batch / float(row["items/s"])  # ppo: with sampling and scoring, which are slower for their arithmetic
    assert planned == pytest.approx(measured, rel=0.01) or args.stage == "ppo" and 0.95 * measured < planned < measured


# ---- what is printed ------------------------------------------------------------------------------------------------


def test_the_page_is_what_the_plan_writes(tmp_path):
    plan.main(plan.Args(table=True, output_dir=str(tmp_path)))
    assert (tmp_path / "plan.md").read_text() == (Path(plan.__file__).parent / "results/plan.md").read_text()
    with pytest.raises(SystemExit, match="a batch of 128 does not split over 7 devices"):
        plan.main(plan.Args("sft", gpus=7))
