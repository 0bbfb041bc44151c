"""What the stages save, read by plain transformers: generate() gives the tokens of our sampler, and a sequence
classifier or a pipeline gives our rewards but for the constant `reward_mean`. What we cannot train is refused at load.

`python -m pytest -m "long or not long" tests/test_saved_models.py` does it for all architectures. Its last output is in
benchmark/results/saved_models.txt.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import close, random_model
from datasets import load_from_disk
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import dpo
import ppo
import reward
import sft
import tldr_dataset

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
GROUPED = SIZES | {"num_key_value_heads": 1}
EXPERTS = GROUPED | {"num_experts_per_tok": 2}
QWEN2_MOE = EXPERTS | {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
WINDOWS = {"sliding_window": 20, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]}
SMOLLM2 = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True}
TRAINED = {
    "gpt_neox": transformers.GPTNeoXConfig(**SIZES),
    "llama": transformers.LlamaConfig(**GROUPED),
    "qwen2": transformers.Qwen2Config(**GROUPED),
    "mistral": transformers.MistralConfig(**GROUPED, sliding_window=20),
    "smollm2": transformers.LlamaConfig(**(SIZES | SMOLLM2)),
    "gemma3": transformers.Gemma3TextConfig(**GROUPED, **WINDOWS),
    "gpt2": transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=1024),
    "mixtral": transformers.MixtralConfig(**EXPERTS, num_local_experts=4),
    "qwen2_moe": transformers.Qwen2MoeConfig(**QWEN2_MOE),
}
LINEAR = {"linear_num_value_heads": 2, "linear_num_key_heads": 2}
LINEAR |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2}
REFUSED = {
    "lfm2": (transformers.Lfm2Config(**GROUPED, layer_types=["conv", "full_attention"]), "conv layers"),
    "falcon_h1": (transformers.FalconH1Config(**GROUPED, mamba_d_ssm=64, **MAMBA), "hybrid layers"),
    "qwen3_next": (transformers.Qwen3NextConfig(**QWEN2_MOE, **LINEAR, head_dim=16), "linear_attention layers"),
    "granite": (transformers.GraniteConfig(**GROUPED, logits_scaling=8.0), "scales or caps the logits"),
    "gemma2": (transformers.Gemma2Config(**GROUPED, head_dim=16), "no scaled dot-product attention"),
}
IN_SUITE = "qwen2_moe"
RESPONSE = 24


def make_base(config, tokenizer, folder: Path) -> Path:
    """A random model whose own files name another EOS, no padding, and settings of generate() that save_pretrained
    refuses (a temperature without sampling) or that change its text."""
    random_model(config, tokenizer, 5).save_pretrained(folder)
    own = {"temperature": 0.6, "repetition_penalty": 5.0, "eos_token_id": 5, "min_new_tokens": 20, "bos_token_id": 5}
    Path(folder, "generation_config.json").write_text(json.dumps(own))
    tokenizer.save_pretrained(folder)
    return folder


def run(module, folder: Path, **arguments) -> Path:
    defaults = {"model": "m", "batch_size": 8, "learning_rate": 3e-3, "output_dir": str(folder)}
    module.main(module.Args(**(defaults | arguments)))
    return folder / "model"


@pytest.fixture(
    scope="module",
    params=[name if name == IN_SUITE else pytest.param(name, marks=pytest.mark.long) for name in TRAINED],
)
def saved(request, world, tmp_path_factory) -> SimpleNamespace:
    """The checkpoint folders of sft, reward, ppo and dpo of an architecture, trained from a tokenizer with a BOS."""
    root = tmp_path_factory.mktemp(request.param)
    tokenizer = AutoTokenizer.from_pretrained(world.tokenizer)
    template = transformers.tokenization_utils_tokenizers.processors.TemplateProcessing
    begin = template(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.eos_token_id)])
    tokenizer.backend_tokenizer.post_processor = begin
    base = make_base(TRAINED[request.param], tokenizer, root / "base")
    data, pairs = {"dataset": str(world.dataset)}, {"preference_dataset": str(world.preference_dataset)}
    found = SimpleNamespace(name=request.param, root=root)
    until_it_ends = data | {"loss_on": "response", "total_episodes": 400 if found.name == IN_SUITE else 800}
    found.sft = run(sft, root / "sft", model=str(base), learning_rate=1e-2, **until_it_ends)
    of_sft = {"sft_model_path": str(found.sft)}
    found.reward = run(reward, root / "reward", total_episodes=64, **of_sft, **data, **pairs)
    found.dpo = run(dpo, root / "dpo", total_episodes=16, learning_rate=1e-4, **of_sft, **pairs)
    rollout = {"reward_model_path": str(found.reward), "response_length": RESPONSE, "sample_every": 0, "eval_rows": 8}
    found.ppo = run(ppo, root / "ppo", total_episodes=16, learning_rate=1e-4, **rollout, **of_sft, **data)
    found.value = root / "ppo" / "value_model"
    return found


def test_generate_gives_the_tokens_of_our_sampler(saved, world, record_property):
    posts = load_from_disk(str(world.dataset))["validation"][:16]
    differ, ended = 0, 0
    for folder in (saved.sft, saved.dpo, saved.ppo):
        tokenizer = ppo.load_tokenizer(str(folder))
        ours = ppo.load_policy(str(folder), tokenizer).eval()
        plain = AutoTokenizer.from_pretrained(folder, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        inputs = plain(posts["query"], return_tensors="pt", padding=True)
        width = inputs.input_ids.shape[1]
        without_bos = plain(posts["query"], add_special_tokens=False, padding=True).input_ids
        assert inputs.input_ids.tolist() == without_bos
        keys = ppo.noise_keys(1, 1, range(16), RESPONSE)
        expected, _ = ppo.generate(ours, inputs.input_ids, tokenizer, RESPONSE, 1e-6, keys)
        found = model.generate(**inputs, do_sample=False, max_new_tokens=RESPONSE)[:, width:]
        found = torch.nn.functional.pad(found, (0, RESPONSE - found.shape[1]), value=plain.pad_token_id)
        differ += (found != expected).any(1).sum().item()
        ended += (expected == tokenizer.eos_token_id).any(1).sum().item()
        ids = [model.config.eos_token_id, model.config.pad_token_id]
        assert ids == [tokenizer.eos_token_id, tokenizer.pad_token_id] != [5, None]
    assert differ == 0 and ended > 0
    row = {"architecture": saved.name, "responses of sft, dpo and ppo": 48, "with EOS": ended}
    record_property("generate", row | {"that differ from generate()'s": differ})


@torch.no_grad()
def test_plain_transformers_gives_our_rewards_but_for_a_constant(saved, world, record_property):
    data = load_from_disk(str(world.preference_dataset))
    rows = [data[split][key] for split in data for key in ("query_chosen_token", "query_rejected_token")]
    rows = [tokens for column in rows for tokens in column][:200]
    width = max(map(len, rows))
    for folder in (saved.reward, saved.value):
        tokenizer = ppo.load_tokenizer(str(folder))
        pad_id = tokenizer.pad_token_id
        tokens = torch.tensor([row + [pad_id] * (width - len(row)) for row in rows])
        tokens = tokens[:, : ppo.rounded_width((tokens != pad_id).sum(1))]
        ours = reward.response_rewards(ppo.load_reward_model(str(folder), tokenizer).eval(), tokens, pad_id)
        plain = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
        theirs = plain(tokens, attention_mask=(tokens != pad_id).long()).logits[:, 0]
        difference = (theirs - ours - plain.config.reward_mean).abs().max().item()
        assert difference <= 1e-6 * max(1, theirs.abs().max().item()) and ours.std() > 1e-3
        if folder == saved.reward:
            texts = [row["query"] + row["chosen"] for row in data["validation"].select(range(8))]
            scores = [found["score"] for found in transformers.pipeline("text-classification", str(folder))(texts)]
            ids = [torch.tensor([tokenizer(text).input_ids]) for text in texts]
            assert close(scores, [plain(row).logits[0, 0] for row in ids], 1e-5)
            row = {"architecture": saved.name, "rows": len(rows), "reward_mean": f"{plain.config.reward_mean:.4f}"}
            record_property("rewards", row | {"largest other difference to plain transformers": f"{difference:.0e}"})


# ---- refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_sampled_from_is_refused_by_every_loader(name, world, tmp_path):
    config, reason = REFUSED[name]
    tokenizer = AutoTokenizer.from_pretrained(world.tokenizer)
    folder = str(make_base(config, tokenizer, tmp_path / name))
    for module in (sft, dpo, ppo):
        with pytest.raises(SystemExit) as caught:
            module.load_policy(folder, ppo.load_tokenizer(folder))
        assert reason in str(caught.value)


def test_a_tokenizer_that_leaves_ids_out_is_refused(world, tmp_path):
    shutil.copytree(world.tokenizer, tmp_path / "gap")
    file = tmp_path / "gap" / "tokenizer.json"
    settings = json.loads(file.read_text())
    last = max(settings["model"]["vocab"], key=settings["model"]["vocab"].get)
    settings["model"]["vocab"][last] += 3
    file.write_text(json.dumps(settings))
    with pytest.raises(SystemExit, match="leaves ids out"):
        ppo.load_tokenizer(str(tmp_path / "gap"))
    with pytest.raises(SystemExit, match="leaves ids out"):
        tldr_dataset.main(tldr_dataset.Args(sft_dataset=str(world.raw / "posts"), tokenizer=str(tmp_path / "gap")))
