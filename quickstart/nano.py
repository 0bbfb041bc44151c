"""Make a nano language model with random weights, and its tokenizer beside it: small enough to train on a laptop.

    python quickstart/nano.py --tokenizer data/quickstart/raw/tokenizer --size xs --output-dir data/quickstart/nano-xs

The shape choices are Pythia's (GPT-NeoX: rotary embeddings on a quarter of each head, parallel residual, GELU, untied
embeddings, no dropout). The three sizes have about 0.1, 0.4 and 0.8 million parameters besides the embeddings.
The folder loads with `AutoModelForCausalLM` and `AutoTokenizer`. The tokenizer is saved as it came, without [PAD]: the
stages add that themselves, as they do for Pythia.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer, GPTNeoXConfig

SIZES = {"xs": (64, 2, 2), "s": (96, 4, 3), "m": (128, 4, 4)}  # hidden size, layers, heads (each of 32 dimensions)


@dataclass
class Args:
    tokenizer: str = "data/quickstart/raw/tokenizer"
    """tokenizer: a local folder or a Hub id; it sets the vocabulary and the ids of BOS and EOS"""
    size: Literal["xs", "s", "m"] = "xs"
    """about 0.1, 0.4 or 0.8 million parameters without embeddings"""
    output_dir: str = "data/quickstart/nano-xs"
    """folder to write; it must not exist yet"""
    seed: int = 1
    """the same seed writes the same weights"""


# ---- helpers --------------------------------------------------------------------------------------------------------


def fail(message: str):
    """End the process with one clear message on standard error and exit code 1."""
    raise SystemExit(f"error: {message}")


def padded_vocab_size(num_tokens: int) -> int:
    """Return num_tokens and a [PAD], rounded up to a multiple of 64: 50,277 tokens of Pythia's tokenizer give its
    50,304."""
    return -(-(num_tokens + 1) // 64) * 64


def nano_config(size: str, num_tokens: int, bos_id: int | None, eos_id: int) -> GPTNeoXConfig:
    """Return the configuration of a nano model for a tokenizer of num_tokens tokens."""
    hidden, layers, heads = SIZES[size]
    return GPTNeoXConfig(
        bos_token_id=bos_id,
        eos_token_id=eos_id,
        max_position_embeddings=2048,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        vocab_size=padded_vocab_size(num_tokens),
        intermediate_size=4 * hidden,
        hidden_act="gelu",
        rotary_pct=0.25,
        use_parallel_residual=True,
        tie_word_embeddings=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )


def count_parameters(model: torch.nn.Module) -> tuple[int, int]:
    """Return the number of parameters without and with embeddings (token and position tables and the output layer);
    tied ones count once."""
    total = sum(p.numel() for p in model.parameters())
    embeddings = {id(m.weight): m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    embeddings[id(model.get_output_embeddings().weight)] = model.get_output_embeddings().weight
    return total - sum(weight.numel() for weight in embeddings.values()), total


def main(args: Args):
    # ---- arguments and tokenizer ------------------------------------------------------------------------------------
    output_dir = Path(args.output_dir)
    if output_dir.exists():
        fail(f"{output_dir} exists; remove it (rm -r {output_dir}) or name another --output-dir")
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        fail(f"--tokenizer {args.tokenizer} is neither a tokenizer folder nor a Hub id that can be read: {reason}")
    if tokenizer.eos_token_id is None:
        fail(f"--tokenizer {args.tokenizer} has no EOS token; the stages end every response with it")

    # ---- model ------------------------------------------------------------------------------------------------------
    config = nano_config(args.size, len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id)
    torch.manual_seed(args.seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    # ---- save: beside, then renamed, so that the folder is whole or absent ------------------------------------------
    unfinished = output_dir.with_name(output_dir.name + ".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(output_dir)
    inner, total = count_parameters(model)
    print(
        f"{output_dir}: {inner:,} parameters without embeddings, {total:,} with them; vocabulary {config.vocab_size:,}"
    )


if __name__ == "__main__":
    main(tyro.cli(Args))
