"""benchmark/convert_released.py: a model in the format of the paper's released reward models becomes a checkpoint
folder whose rewards are worked out here from the backbone and the head themselves."""

import json

import convert_released
import pytest
import torch
from datasets import load_from_disk
from safetensors.torch import save_file
from transformers import AutoModel, AutoTokenizer

import ppo


@pytest.fixture
def released(world, tmp_path):
    """Function of a file name: a folder with the world's backbone and a random head in it, as released; and both."""

    def make(file: str):
        torch.manual_seed(5)
        backbone = AutoModel.from_pretrained(world.model, dtype=torch.float32).eval()
        head, folder = torch.randn(1, backbone.config.hidden_size), tmp_path / "released"
        AutoTokenizer.from_pretrained(world.tokenizer).save_pretrained(folder)
        state = {f"lm_backbone.{key}": value.contiguous() for key, value in backbone.state_dict().items()}
        state |= {"scalar_head.weight": head, "scalar_head.bias": torch.tensor([0.25])}
        (torch.save if file.endswith(".bin") else save_file)(state, folder / file)
        config = {"base_config": backbone.config.to_dict(), "base_model": "EleutherAI/pythia-1b-deduped", "bias": 0.75}
        (folder / "config.json").write_text(json.dumps(config | {"hidden_size": head.shape[1], "model_type": "scalar"}))
        return folder, backbone, head

    return make


@torch.no_grad()
@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])  # the paper's are .bin
def test_its_rewards_are_the_heads_less_the_offset(world, released, tmp_path, monkeypatch, file):
    monkeypatch.chdir(tmp_path)
    folder, backbone, head = released(file)
    if file.endswith(".bin"):  # from the Hub, here pretended, into the default folder
        asked = []
        monkeypatch.setattr(convert_released, "snapshot_download", lambda *id, **of: asked.append((id, of)) or folder)
        convert_released.main(convert_released.Args(model="2.8b", seed=66613))
        name = "vwxyzjn/EleutherAI_pythia-2.8b-deduped__reward__tldr"
        assert asked[0][0] == (name,) and asked[0][1]["revision"].startswith("reward__66613__") and len(asked) == 1
        made = tmp_path / "released" / "reward" / "2.8b" / "66613"
    else:
        convert_released.main(convert_released.Args(source=str(folder), output_dir="made"))
        made = tmp_path / "made"
    assert not [*made.parent.glob("*.tmp")]
    tokenizer = ppo.load_tokenizer(str(made))
    assert tokenizer.get_vocab() == ppo.load_tokenizer(str(world.tokenizer)).get_vocab()
    model = ppo.load_reward_model(str(made), tokenizer).eval()
    for text in load_from_disk(str(world.dataset))["validation"]["query_reference_response"][:4]:
        row = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        last = backbone(row).last_hidden_state[0, -1].double()
        expected = sum((last * head[0].double()).tolist()) + 0.25 - 0.75
        found = model(row)[0, -1].item()
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_what_cannot_be_converted_is_one_message(world, released, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, _, head = released("model.safetensors")
    torn = {"scalar_head.weight": head, "scalar_head.bias": torch.zeros(1)}
    save_file(torn, folder / "model.safetensors")
    before = {path.name for path in tmp_path.iterdir()}
    for flags, named in (
        ({"output_dir": str(folder)}, f"{folder} is there already"),
        ({"source": str(folder), "output_dir": convert_released.Args.output_dir}, f"{folder} needs --output-dir"),
        ({"model": "12b"}, "no reward model of size 12b"),
        ({"seed": 1}, "no reward model of size 1b and seed 1"),
        ({"source": str(world.model)}, f"{world.model}: no released reward model"),
        ({"source": "nobody/nothing@main"}, "nobody/nothing@main: no released reward model"),
        ({"source": str(folder)}, f"{folder}: these weights are missing: .'gpt_neox.embed_in.weight'"),
    ):
        with pytest.raises(SystemExit, match=f"^error: .*{named}"):
            convert_released.main(convert_released.Args(**{"output_dir": "new"} | flags))
        assert {path.name for path in tmp_path.iterdir()} == before
