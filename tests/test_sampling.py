"""Sampling draws the tokens that transformers' generate() draws with the same noise, and the ratio before the first
step of an update is exactly 1, also in bfloat16."""

from dataclasses import replace

import pytest
import torch
from conftest import make_reward_model, make_talker, read_metrics, single_process
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    LogitsProcessor,
    MistralConfig,
    Qwen2Config,
)

import ppo

VOCAB, PAD, EOS, RESPONSE, WIDTH = 600, 599, 0, 53, 160
LLAMA = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
CONFIGS = {
    "gpt_neox": GPTNeoXConfig(**LLAMA, rotary_pct=0.25, vocab_size=VOCAB, bos_token_id=0, eos_token_id=0),
    "gpt2": GPT2Config(n_embd=64, n_layer=3, n_head=4, n_positions=WIDTH + RESPONSE, vocab_size=VOCAB),
    "llama": LlamaConfig(**LLAMA, num_key_value_heads=2, vocab_size=VOCAB, bos_token_id=0, eos_token_id=0),
    "qwen2": Qwen2Config(**LLAMA, num_key_value_heads=2, vocab_size=VOCAB, bos_token_id=0, eos_token_id=0),
    # each token sees 20 tokens, itself among them: fewer than most queries have
    "mistral": MistralConfig(**LLAMA, num_key_value_heads=2, vocab_size=VOCAB, eos_token_id=0, sliding_window=20),
}


class Tokenizer:
    """What sampling asks of a tokenizer: ids up to 589 and [PAD]."""

    pad_token_id, eos_token_id = PAD, EOS

    def __len__(self):
        return VOCAB


class Noise(LogitsProcessor):
    """Turns generate()'s arg max into the same sample; keeps by how much the best noisy logit leads in each step."""

    def __init__(self, keys, width: int):
        self.keys, self.width, self.leads = keys, width, []

    def __call__(self, input_ids, scores):
        noise = ppo.gumbel_noise(self.keys[:, input_ids.shape[1] - self.width], scores.shape[1])
        noisy = scores / (0.7 + 1e-7) + noise
        noisy[:, PAD] = -torch.inf
        best = noisy.topk(2, 1).values
        self.leads.append(best[:, 0] - best[:, 1])
        return noisy


def by_transformers(model, queries, keys, groups) -> tuple[torch.Tensor, torch.Tensor]:
    """Responses (b, R), and the least lead (b,) of a drawn token over the next best."""
    responses, leads = torch.full((len(queries), RESPONSE), PAD), torch.zeros(len(queries))
    for index in groups:
        group = queries[index][:, -ppo.rounded_width((queries[index] != PAD).sum(1)) :]
        noise = Noise(keys[index], group.shape[1])
        config = GenerationConfig(max_new_tokens=RESPONSE, do_sample=False, eos_token_id=EOS, pad_token_id=PAD)
        mask = (group != PAD).long()
        with torch.no_grad():
            found = model.generate(group, attention_mask=mask, generation_config=config, logits_processor=[noise])
        found = found[:, group.shape[1] :]
        drawn = (found != PAD).int()
        responses[index, : found.shape[1]] = found
        leads[index] = torch.stack(noise.leads, 1).masked_fill(drawn == 0, torch.inf).min(1).values
    return responses, leads


def new_model(name: str):
    """A random model in the form of load_policy's."""
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32, attn_implementation="sdpa").eval()
    banned = torch.arange(VOCAB) == PAD
    model.get_output_embeddings().register_forward_hook(lambda _head, _, logits: logits.masked_fill(banned, -1e9))
    return model


def compare(name: str, rows: int) -> dict:
    """Sample responses to the same queries in the same groups with ppo.py and with transformers, and return how many
    differ."""
    torch.manual_seed(1)
    model = new_model(name)
    model.get_output_embeddings().weight.data.mul_(8)  # logits that are far from uniform
    generator = torch.Generator().manual_seed(3)
    queries = torch.full((rows, WIDTH), PAD)
    for row in queries:
        length = int(torch.randint(1, 150, (), generator=generator))
        row[WIDTH - length :] = torch.randint(1, 590, (length,), generator=generator)
    keys = ppo.noise_keys(1, 1, range(rows), RESPONSE)
    args = ppo.Args(response_length=RESPONSE, sample_batch_size=40)
    found, logprobs = ppo.sample(single_process(), model, queries, keys, Tokenizer(), args, 0.7)
    expected, leads = by_transformers(model, queries, keys, ppo.similar_lengths((queries != PAD).sum(1), 40))
    differ = (found != expected).any(1)
    return {
        "architecture": name,
        "rows": rows,
        "tokens": int((found != PAD).sum()),
        "rows with EOS": int((found == EOS).any(1).sum()),
        "rows that differ": int(differ.sum()),
        "of these ties": int((differ & (leads < 1e-5)).sum()),
        "rows with two best within 1e-5": int((leads < 1e-5).sum()),
    }


@pytest.mark.parametrize("rows", [60, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_tokens_are_those_of_generate(name, rows, record_property):
    found = compare(name, rows)
    if rows == 1000:
        record_property("sampling", found)
    assert found["rows that differ"] == found["of these ties"] and found["tokens"] > rows * 40
    assert found["rows with EOS"] > 0 or name == "gpt2"


@pytest.mark.parametrize("name", ["gpt_neox", "mistral"])  # a cache of all tokens, and one of a window
def test_a_step_reads_nothing_back_from_the_device(name, monkeypatch):
    """Tensors without content: whatever asks for a value, which on a GPU would wait for it, fails. The first that asks
    is the look for the end after the eighth token."""
    monkeypatch.setattr(ppo, "rounded_width", lambda lengths: 10)  # once a group
    with FakeTensorMode():
        model = new_model(name)
        queries, keys = torch.zeros(4, 10, dtype=torch.long), torch.zeros(4, 8, 2, dtype=torch.long)
        found, _ = ppo.generate(model, queries, Tokenizer(), 7, 0.7, keys)
        assert found.shape == (4, 7)
        with pytest.raises(DataDependentOutputException):
            ppo.generate(model, queries, Tokenizer(), 8, 0.7, keys)


# ---- the ratio before the first step ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def start(world, tmp_path_factory) -> ppo.Args:
    root = tmp_path_factory.mktemp("ratio")
    policy = make_talker(world, root / "policy", eos=0.1)
    paths = {"sft_model_path": str(policy), "reward_model_path": str(make_reward_model(policy, root / "reward"))}
    paths |= {"dataset": str(world.dataset), "output_dir": str(root / "run"), "model": "nano"}
    sizes = {"batch_size": 12, "total_episodes": 24, "micro_batch_size": 5, "response_length": 12, "eval_rows": 2}
    return ppo.Args(**paths, **sizes, learning_rate=1e-3, num_ppo_epochs=2, sample_every=0)


@pytest.mark.parametrize(("mixed_precision", "num_mini_batches"), [("no", 2), ("bf16", 1)])
def test_it_is_exactly_1_and_the_first_kl_exactly_0(start, tmp_path, mixed_precision, num_mini_batches):
    changes = {"mixed_precision": mixed_precision, "num_mini_batches": num_mini_batches, "output_dir": str(tmp_path)}
    ppo.main(replace(start, **changes))
    lines = read_metrics(tmp_path)
    assert [line["policy/first_ratio_deviation"] for line in lines] == [0, 0]
    assert lines[0]["objective/kl"] == 0 == lines[0]["objective/kl_k3"] and lines[1]["objective/kl"] > 1e-3
    assert all(line["policy/ratio_variance"] > 1e-6 for line in lines)  # ratios of later steps do move
    # the sampler's kernels see other shapes: nothing in float32, more in bfloat16 where the processor computes in it
    rounding = [line["policy/sampling_logprob_difference_max"] for line in lines]
    assert 0 < max(rounding) < (1e-4 if mixed_precision == "no" else 0.5)
    assert all(line["policy/sampling_logprob_difference_mean"] <= x for line, x in zip(lines, rounding, strict=True))


def test_noise_in_the_rollouts_pass_shows(start, tmp_path, monkeypatch):
    """The old log-probabilities come from a pass of their own, not from that of the first step, but over the same
    micro-batches."""
    original = ppo.response_logits
    passes = {True: [], False: []}  # of the policy, with gradient or without: the tokens of each call

    def noisy(policy, tokens, columns):
        logits = original(policy, tokens, columns)
        if next(policy.parameters()).requires_grad:  # not the reference
            passes[torch.is_grad_enabled()].append(tokens.tolist())
        if not torch.is_grad_enabled():
            logits = logits.clone()
            logits[:, :, ::2] += 0.07  # at temperature 0.7 as much as 0.1 in the log-probability, or less
        return logits

    monkeypatch.setattr(ppo, "response_logits", noisy)
    ppo.main(replace(start, mixed_precision="bf16", output_dir=str(tmp_path)))
    assert all(0.03 < line["policy/first_ratio_deviation"] < 0.11 for line in read_metrics(tmp_path))
    calls = len(passes[False]) // 2  # an update; with gradient there are two epochs of them
    first_epochs = passes[True][:calls] + passes[True][2 * calls : 3 * calls]
    assert passes[False] == first_epochs and calls == 3
