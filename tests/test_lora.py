"""ablations/lora.diff: twins that share their weights, adapters that plain peft loads, and what is refused."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from conftest import make_reward_model, read_metrics, script
from peft import PeftModel
from safetensors.torch import load_file
from test_other_models import make_model
from test_saved_models import TRAINED
from transformers import AutoModelForCausalLM, AutoTokenizer

ppo_lora = script("ppo_lora.py")
ARCHITECTURES = ["gpt_neox", "llama", "smollm2", "qwen2_moe"]  # smollm2 is a Llama with tied embeddings


@pytest.fixture(scope="module", params=ARCHITECTURES)
def start(request, world, tmp_path_factory) -> SimpleNamespace:
    """.sft and .reward, folders of random models of an architecture; .args of a short run; .root"""
    root = tmp_path_factory.mktemp("lora")
    sft = make_model(TRAINED[request.param], AutoTokenizer.from_pretrained(world.tokenizer), root / "sft")
    reward = make_reward_model(root / "sft", root / "reward", 0.3)
    args = {"model": "nano", "sft_model_path": sft, "reward_model_path": str(reward)}
    args |= {"dataset": str(world.dataset), "batch_size": 8, "micro_batch_size": 4, "total_episodes": 16}
    args |= {"learning_rate": 1e-2, "eval_rows": 2, "response_length": 6, "sample_every": 0, "lora_r": 4}
    return SimpleNamespace(root=root, args=args, sft=sft, reward=str(reward))


def run(start, name: str, **changes) -> Path:
    args = ppo_lora.Args(**start.args | {"output_dir": str(start.root / name)} | changes)
    ppo_lora.main(args)
    return Path(args.output_dir)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_twins_share_every_tensor_and_start_equal(start, precision):
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    tokenizer = ppo_lora.load_tokenizer(start.sft)
    tokens = torch.arange(3, 30)[None]
    for load, path in ((ppo_lora.load_policy, start.sft), (ppo_lora.load_reward_model, start.reward)):
        base = ppo_lora.frozen_model(accelerator, load(path, tokenizer), False)
        twin = ppo_lora.twin(base)
        ppo_lora.add_adapters(twin.model if path == start.reward else twin, ppo_lora.Args())
        shared = {id(x) for x in [*base.parameters(), *base.buffers()]}
        added = {name: x for name, x in twin.named_parameters() if id(x) not in shared}
        assert len(shared) == len([x for x in [*twin.parameters(), *twin.buffers()] if id(x) in shared])
        assert added and all("lora_" in name and x.dtype == torch.float32 for name, x in added.items())
        assert {name for name, x in twin.named_parameters() if x.requires_grad} == added.keys()
        with accelerator.autocast():
            found, expected = (getattr(x, "logits", x) for x in (twin(tokens), base(tokens)))
        assert torch.equal(found, expected)


IN_BF16 = [pytest.param(name, "bf16", marks=pytest.mark.long) for name in ARCHITECTURES]  # seconds each on a CPU


@pytest.mark.parametrize(("start", "precision"), [("gpt_neox", "no"), *IN_BF16], indirect=["start"])
def test_plain_peft_loads_the_adapters_that_the_saved_model_has_merged(start, precision):
    """And a checkpoint holds what trains: adapters, and the value model's head."""
    folder = run(start, precision, mixed_precision=precision, save_every=2)
    saved = load_file(folder / "checkpoints/update_000002/model.safetensors")
    assert {key for key in saved if "lora_" not in key} == {"value_model.model.score.weight", "value_model.bias"}
    assert sum("lora_B" in key for key in saved) == sum("lora_A" in key for key in saved) > 0
    lines = read_metrics(folder)
    assert lines[0]["objective/kl"] == 0 and lines[1]["objective/kl"] != 0
    assert all(line["policy/first_ratio_deviation"] == 0 for line in lines)
    tokens = torch.arange(3, 30)[None]
    base = AutoModelForCausalLM.from_pretrained(start.sft, dtype=torch.float32)
    before = base(tokens).logits
    adapted = PeftModel.from_pretrained(base, folder / "adapters")(tokens).logits
    merged = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)(tokens).logits
    words = before.shape[2]  # and a row for [PAD]
    assert (adapted - merged[:, :, :words]).abs().max() < 1e-5 * before.abs().max()
    assert (adapted - before).abs().max() > 1e-2 * before.abs().max()


@pytest.mark.parametrize("start", ["gpt_neox"], indirect=True)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_alpha": 0}, "--lora-alpha 0 must be above 0"),
        ({"offload": True}, "works neither with --offload nor with DeepSpeed"),
    ],
)
def test_what_cannot_be_is_refused(start, changes, message):
    with pytest.raises(SystemExit, match=f"^error: .*{message}"):
        run(start, "refused", **changes)
    assert not (start.root / "refused").exists()
