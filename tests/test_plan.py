"""benchmark/plan.py against what transformers, torch and the stages make: parameters, and bytes that are allocated."""

import itertools
from dataclasses import replace
from pathlib import Path

import plan
import pytest
import throughput
import torch
from datasets import Dataset, DatasetDict
from torch.profiler import ProfilerActivity, profile
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, GPTNeoXForSequenceClassification

import dpo
import ppo
import reward
import sft

STAGES = {"sft": sft, "reward": reward, "dpo": dpo, "ppo": ppo}
WIDTH, LAYERS, VOCAB, PAD = 192, 6, 2000, 0  # small, but with matrices that outweigh what grows with neither


def config(width: int, layers: int, heads: int, vocab: int) -> GPTNeoXConfig:
    shape = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": vocab}
    return GPTNeoXConfig(**shape, intermediate_size=4 * width, rotary_pct=0.25, pad_token_id=PAD, num_labels=1)


@pytest.mark.parametrize(("model", "billions"), [("1b", 1.012), ("2.8b", 2.775), ("6.9b", 6.857)])
def test_parameters_are_those_of_pythia(model, billions):
    with torch.device("meta"):
        language = GPTNeoXForCausalLM(config(*plan.SHAPES[model])).num_parameters()
        scalar = GPTNeoXForSequenceClassification(config(*plan.SHAPES[model])).num_parameters() + 1  # the head's bias
    width, layers, _, vocab = plan.SHAPES[model]
    assert round(language / 1e9, 3) == billions
    counts = {stage: plan.parameters(stage, width, layers, vocab, 3) for stage in STAGES}
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
        expected = {"1b": 256, "2.8b": 128, "6.9b": 64}
        assert plan.SAMPLE_ROWS == expected == getattr(ppo, "SAMPLE_BATCH_SIZES", expected)


def frozen_by_module(model, zero: int) -> int:
    """Bytes of a frozen model, counted over its modules: linear layers in bfloat16, under DeepSpeed the rest, too, but
    the score head in float32."""
    total = 0
    for name, module in model.named_modules():
        numbers = sum(x.numel() for x in module.parameters(recurse=False))
        short = isinstance(module, torch.nn.Linear) or zero
        total += numbers * (2 if short and name != "score" else 4)
    return total


def models_of(model: str):
    """A language model and a reward model, without their numbers."""
    with torch.device("meta"):
        language = GPTNeoXForCausalLM(config(*plan.SHAPES[model]))
        classifier = GPTNeoXForSequenceClassification(config(*plan.SHAPES[model]))
        classifier.score = reward.ScalarHead(plan.SHAPES[model][0], 1)
    return language, classifier


@pytest.mark.parametrize("model", ["1b", "2.8b", "6.9b"])
@pytest.mark.parametrize("zero", [0, 2])
def test_travel_is_the_frozen_models_once_an_update(model, zero):
    language, classifier = models_of(model)
    expected = frozen_by_module(language, zero) + 2 * frozen_by_module(classifier, zero)
    args = plan.Args("ppo", model=model, zero=zero, reward_models=2, offload=True, link=10)
    found = plan.plan(args)
    assert found["travel"] == expected
    assert found["travel_seconds"] == pytest.approx(expected / 1e10)
    here = plan.plan(replace(args, offload=False))
    assert here["travel"] == 0 and here["terms"]["sampling"]["frozen models"] == expected
    assert found["hours"] - here["hours"] == pytest.approx(1953 * expected / 1e10 / 3600)


def test_a_travel_of_27_gb_takes_a_second():
    found = plan.plan(plan.Args("ppo", model="6.9b"))
    assert round(found["travel"] / 1e9, 1) == 27.0 and round(found["travel_seconds"], 2) == 1.08
    assert plan.plan(plan.Args("sft", model="6.9b"))["travel"] == 0


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
    assert round(host / 1e9) == 456
    assert plan.plan(plan.Args("ppo", model="6.9b", gpus=16, gpus_per_machine=4))["host"] == host / 2
    assert plan.plan(plan.Args("ppo", model="6.9b", offload=False))["host"] == 8 * language


def test_machine_memory_with_the_optimizer_there():
    """2.8b: Adam's states and float32 weights, 12 bytes for each parameter of policy and value model over all devices,
    and when it saves one copy of both models in bfloat16."""
    language, classifier = models_of("2.8b")
    trained = language.num_parameters() + classifier.num_parameters()
    args = plan.Args("ppo", model="2.8b", offload_optimizer=True)
    for gpus in (1, 4):
        assert plan.plan(replace(args, gpus=gpus))["host"] == (12 + 2) * trained
    assert plan.plan(args)["host"] == 8 * 4 * language.num_parameters()  # of eight models in float32, which are more
    plain = plan.plan(plan.Args("ppo", model="1b", gpus=1, zero=0))
    assert plain["host"] == 4 * sum(model.num_parameters() for model in models_of("1b"))


def test_an_update_of_ppo_by_hand(monkeypatch):
    """512 episodes of 353 + 37 tokens at 1b, width 2048, 16 layers, 50304 words: 29 passes of a body (13 each of policy
    and value model, reference, reward model, sampling), 15 of the head."""
    body = 2 * 12 * 16 * 2048**2 * 390 + 4 * 16 * 2048 * 390**2 / 2
    head = 2 * 50304 * 2048 * 37
    assert plan.item_flop("ppo", "1b", 1) == 29 * body + 15 * head
    assert plan.item_flop("ppo", "1b", 3) == 31 * body + 15 * head
    assert round(512 * plan.item_flop("ppo", "1b", 1) / 1e15, 1) == 9.5
    monkeypatch.setitem(plan.LENGTHS, "ppo", (512, 53))
    assert round(512 * plan.item_flop("ppo", "1b", 1) / 1e15, 1) == 13.9


@pytest.mark.parametrize("stage", STAGES)
def test_arithmetic_agrees_with_throughput(stage, tmp_path, monkeypatch):
    """The plan's passes over one item of mean length are those that benchmark/throughput.py counts in a data set."""
    monkeypatch.setitem(throughput.SHAPES, "cpu", plan.SHAPES["1b"])
    pad = plan.SHAPES["1b"][3] - 1
    query, *responses = plan.LENGTHS[stage]
    row = {"query_token": [[pad] * 5 + [1] * query], "reference_response_token": [[1] * responses[0] + [pad] * 3]}
    for side, length in (("chosen", responses[0]), ("rejected", responses[-1])):
        row[f"query_{side}_token_response_label"] = [[pad] * query + [1] * length]
    for name in ("sft", "preference"):
        DatasetDict({"train": Dataset.from_dict(row)}).save_to_disk(str(tmp_path / name))
    asked = throughput.Args(stage, device="cpu", batch_size=1, updates=1)
    tokens, flop = throughput.work_done(asked, tmp_path, responses[0])
    assert tokens == plan.TOKENS[stage]
    if stage == "ppo":  # policy and value model; the plan's passes without gradient are held by hand above
        monkeypatch.setattr(plan, "PPO_EPOCHS", 5)
        five = plan.item_flop(stage, "1b", 1)
        monkeypatch.setattr(plan, "PPO_EPOCHS", 4)
        assert five - plan.item_flop(stage, "1b", 1) == pytest.approx(3 * flop)
    else:
        assert plan.item_flop(stage, "1b", 1) == pytest.approx(throughput.PASSES[stage] * flop)


def tokens(*shape) -> torch.Tensor:
    return torch.randint(1, VOCAB, shape)


def peak_bytes(profiled) -> int:
    """The most that was allocated at once, of a profile with memory."""
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events))


def losses(stage: str):
    """The modules and a call of a stage's forward pass on four long rows, and the passes and logits that this makes:
    [(rows, columns)], columns with logits."""
    language = GPTNeoXForCausalLM(config(WIDTH, LAYERS, 4, VOCAB))
    classifier = GPTNeoXForSequenceClassification(config(WIDTH, LAYERS, 4, VOCAB))
    classifier.score = torch.nn.Linear(WIDTH, 1)
    value = reward.RewardModel(classifier)
    pairs = {"query": tokens(4, 257), "chosen": tokens(4, 60), "rejected": tokens(4, 52)}
    if stage == "sft":
        batch = {"query_reference_response_token": tokens(4, 320)}
        return language, lambda: sft.loss_and_count(language, batch, "all", PAD, "cpu")[0], [(4, 320)], 320
    if stage == "reward":
        return value, lambda: reward.pair_rewards(value, pairs, PAD)[0].sum(), [(4, 384)], 0
    if stage == "dpo":
        pairs |= {"chosen_start": torch.zeros(4), "rejected_start": torch.zeros(4)}
        pairs = {key: value.long() for key, value in pairs.items()}
        return language, lambda: sum(dpo.pair_logprobs(language, pairs, PAD)).sum(), [(4, 384)], 128
    both = ppo.PolicyAndValue(language, value)
    queries, responses, banned = tokens(4, 268), tokens(4, 53), torch.zeros(VOCAB, dtype=torch.bool)

    def loss():
        logits, values = both(queries, responses, PAD, banned)
        return ppo.token_logprobs(logits, responses, 0.7).sum() + values.sum()

    return both, loss, [(4, 320)] * 2, 53


@pytest.mark.parametrize("stage", STAGES)
def test_activations_and_logits_are_what_a_pass_allocates(stage):
    model, loss, passes, columns = losses(stage)
    for parameter in model.parameters():  # gradients are counted apart
        parameter.grad = torch.zeros_like(parameter)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        loss().backward()
    peak = peak_bytes(profiled)
    expected = plan.activation_bytes(passes, WIDTH, LAYERS, 4) + plan.logit_bytes(stage, 4, columns, VOCAB)
    expected += plan.mask_bytes(stage, *passes[0], LAYERS, 4)
    assert expected == pytest.approx(peak, rel=0.07)
    assert plan.logit_bytes(stage, 4, columns, VOCAB) > 0.1 * expected or stage in ("reward", "ppo")


def test_states_of_a_plain_run_are_what_torch_allocates():
    model = GPTNeoXForCausalLM(config(WIDTH, LAYERS, 4, VOCAB))
    optimizer = torch.optim.AdamW(model.parameters())
    model(tokens(1, 4)).logits.sum().backward()
    optimizer.step()
    weights = sum(x.nbytes for x in model.parameters())
    adam = sum(x.nbytes for state in optimizer.state.values() for x in state.values())
    expected = plan.state_bytes(model.num_parameters(), 1, 0, 32, offload_optimizer=False)
    assert expected["buckets"] == 0 and weights == expected["weights"]
    assert sum(x.grad.nbytes for x in model.parameters()) == expected["gradients"]
    assert adam == pytest.approx(expected["optimizer"], rel=1e-3)  # and counts of steps


def test_keys_and_values_of_a_token():
    sizes = [plan.key_value_bytes(*plan.SHAPES[model][:2]) for model in plan.PAPER]
    assert sizes == [128 * 2**10, 320 * 2**10, 512 * 2**10]


def test_ppo_at_6_9b_in_the_scale_page_by_hand():
    """8 GPUs at half of the peak: 64 episodes each, in 32 micro-batches of 2 and one group of samples."""
    language, classifier = models_of("6.9b")
    trained = language.num_parameters() + classifier.num_parameters()
    read = language.num_parameters() - 50432 * 4096  # without the embedding, which is looked up
    arithmetic = 512 * plan.item_flop("ppo", "6.9b", 1) / (8 * 989e12 / 2)
    decoding = 53 * (2 * read + 64 * 565 * 512 * 2**10) / (3.35e12 / 2)
    travel = 27.016e9 / 25e9
    exchange = 4 * (32 * 2 + 1) * 2 * trained * 7 / 8 / 300e9  # 32 all-reduces and the new weights, a step
    expected = {"arithmetic": arithmetic, "decoding": decoding, "travel": travel, "exchange": exchange}
    way, run = plan.run_of_study("ppo", "6.9b", 8)
    assert way == "ZeRO-2"
    assert plan.update_seconds(run, 0.5) == pytest.approx(expected, rel=1e-3)
    hours = plan.study_hours("6.9b", 8, 0.5)
    assert hours["ppo"] == pytest.approx(1953 * sum(expected.values()) / 3600, rel=1e-3)
    assert plan.one_after_another(hours) == pytest.approx(185.0, abs=0.1)
    assert plan.side_by_side(hours) == pytest.approx(23.3, abs=0.1)


def test_a_run_over_two_groups_and_ddp():
    """1b on one GPU samples 512 episodes in two groups and exchanges nothing. On 8, DDP sends float32 gradients."""
    language, classifier = models_of("1b")
    trained = language.num_parameters() + classifier.num_parameters()
    read = language.num_parameters() - 50304 * 2048
    way, alone = plan.run_of_study("ppo", "1b", 1)
    assert way == "plain" and plan.exchange_bytes(alone) == 0
    cached = 512 * 565 * 128 * 2**10
    assert plan.decoding_bytes(alone) == {"weights": 53 * 2 * 2 * read, "keys and values": 53 * cached}
    way, run = plan.run_of_study("ppo", "1b", 8)
    assert way == "plain" and plan.exchange_bytes(run) == 4 * 2 * 4 * trained * 7 / 8
    assert plan.study_hours("6.9b", 1, 0.5) is None  # PPO does not fit


@pytest.mark.parametrize("page", ["plan", "scale"])
def test_pages_are_what_the_plan_writes(page, tmp_path):
    plan.main(plan.Args(table=page == "plan", scale=page == "scale", output_dir=str(tmp_path)))
    written = Path(plan.__file__).parent / "results" / f"{page}.md"
    assert (tmp_path / f"{page}.md").read_text() == written.read_text()


def test_what_fits_and_what_does_not(capsys):
    plan.main(plan.Args("ppo", model="6.9b"))
    said = capsys.readouterr().out
    assert "batch of 512 = 8 x 32 micro-batches of 2" in said and "GB fits 80 GB" in said
    assert "travel: 27.0 GB" in said and "1.08 s at 25 GB/s (an assumption)" in said
    assert "a machine's memory: 456 GB" in said
    plan.main(plan.Args("ppo", model="6.9b", offload=False))
    assert "GB does NOT fit 80 GB; largest micro-batch: none" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="a batch of 128 does not split over 7 devices"):
        plan.main(plan.Args("sft", gpus=7))
    with pytest.raises(SystemExit, match="which stage"):
        plan.main(plan.Args())
