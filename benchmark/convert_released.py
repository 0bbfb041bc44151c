"""One of the paper's released reward models as a checkpoint folder that the stages take.

    python benchmark/convert_released.py --model 1b --seed 44413      # -> released/reward/1b/44413
    python benchmark/convert_released.py --source ID@REVISION --output-dir released/another

The paper's 12 are named in released_checkpoints.csv; the released SFT, PPO and DPO policies are plain transformers
checkpoints, which the stages take as id@revision. A released reward model has its weights under other names
(`lm_backbone.*`, `scalar_head.*`) in .bin or .safetensors files, the shape of its backbone in `base_config`, and a
`bias` in its config that is subtracted from every reward. Here that number less the head's bias is `reward_mean`.
"""

import csv
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in (".", "eval")]

from eval_helpers import fail, or_fail, save_checkpoint  # noqa: E402


@dataclass
class Args:
    model: str = "1b"
    """size of the model: 1b, 2.8b or 6.9b"""
    seed: int = 44413
    """its seed: 44413, 55513, 66613 or 77713"""
    source: str | None = None
    """instead: a folder, or a Hub id[@revision], of that format; needs --output-dir"""
    output_dir: str = "released/reward/{model}/{seed}"
    """checkpoint folder to write; it must not be there yet"""


def released(model: str, seed: int) -> str:
    """Return id@revision of the paper's reward model of a size and seed."""
    base = f"EleutherAI/pythia-{model}-deduped"
    with (Path(__file__).parent / "released_checkpoints.csv").open() as file:
        for row in csv.DictReader(file):
            if (row["base_model"], row["stage"], row["seed"]) == (base, "reward", str(seed)):
                return f"{row['hub_repo_id']}@{row['revision']}"
    fail(f"the paper released no reward model of size {model} and seed {seed}")


def weight_files(path: str) -> list[Path]:
    """Return the safetensors files of a checkpoint folder: model.safetensors, or the files that its index names."""
    if Path(path, "model.safetensors").exists():
        return [Path(path, "model.safetensors")]
    index = json.loads(Path(path, "model.safetensors.index.json").read_text())
    return [Path(path, name) for name in sorted(set(index["weight_map"].values()))]


def convert(folder: str, output: Path):
    """Write the reward model in `folder` as an AutoModelForSequenceClassification with one label, in float32, with
    `reward_mean` in its config, and its tokenizer."""
    settings = json.loads(Path(folder, "config.json").read_text())
    config = AutoConfig.for_model(**settings["base_config"])
    config.num_labels = 1
    config.problem_type = "regression"  # a text-classification pipeline then returns the bare score
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    state, base = {}, model.base_model_prefix
    if list(Path(folder).glob("model.safetensors*")):
        for file in weight_files(folder):
            state |= load_file(file)
    else:
        for file in sorted(Path(folder).glob("pytorch_model*.bin")):  # as the paper's were released
            state |= torch.load(file, map_location="cpu", weights_only=True)  # numbers, never code
    state = {key.replace("lm_backbone.", f"{base}.").replace("scalar_head.", "score."): state[key] for key in state}
    model.config.reward_mean = settings.get("bias", 0.0) - state.pop("score.bias").item()
    missing = model.load_state_dict(state, strict=False).missing_keys
    if missing:
        fail(f"{folder}: these weights are missing: {missing[:4]}")
    save_checkpoint(model, AutoTokenizer.from_pretrained(folder, trust_remote_code=False), output)


def main(args: Args):
    if args.source and args.output_dir == Args.output_dir:
        fail(f"--source {args.source} needs --output-dir: {Args.output_dir} is for the paper's models")
    output = Path(args.output_dir.format(model=args.model, seed=args.seed))
    if output.exists():
        fail(f"{output} is there already: delete it, or choose another --output-dir")
    source = args.source or released(args.model, args.seed)
    name, _, revision = source.partition("@")
    with or_fail(f"{source}: no released reward model that can be read"):
        folder = source if Path(source).exists() else snapshot_download(name, revision=revision or None)
        partial = output.with_name(f"{output.name}.tmp")
        shutil.rmtree(partial, ignore_errors=True)
        convert(folder, partial)
    os.replace(partial, output)
    print(f"{source} -> {output}")


if __name__ == "__main__":
    main(tyro.cli(Args))
