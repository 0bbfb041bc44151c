"""Pretrain a nano base model, which stands where Pythia stands: it has read posts with edits and replies that restate
their facts, so that it can copy before it is fine-tuned. It has seen no summary.

    python quickstart/posts.py --seed 0 --num-pretraining 100000 --output-dir data/quickstart/pretraining
    python quickstart/nano.py --size m --tokenizer quickstart/bases/nano-s --output-dir data/quickstart/random-m
    OMP_NUM_THREADS=1 python quickstart/pretrain.py --model data/quickstart/random-m --steps 2000 \
        --documents data/quickstart/pretraining --output-dir nano-m

Writes a transformers checkpoint in bfloat16 (the stages load it as float32) with its tokenizer, and pretraining.csv:
the training loss, and on held-out documents the loss and the share of the words of the post that the model guesses
right where edits and replies repeat them: what it copies. The bases of the repository:
quickstart/bases/README.md.
"""

import csv
import json
import re
import shutil
import sys
import time
from dataclasses import dataclass
from math import cos, pi
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from rich.console import Console
from rich.progress import track
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.append(str(Path(__file__).resolve().parents[1] / "eval"))

from eval_helpers import at_least, fail  # noqa: E402


@dataclass
class Args:
    model: str = "data/quickstart/random-s"
    """folder of a model with random weights and its tokenizer, as nano.py writes it"""
    documents: str = "data/quickstart/pretraining"
    """folder that posts.py --num-pretraining wrote"""
    output_dir: str = "quickstart/bases/nano-s"
    """folder to write; it must not exist yet"""
    steps: int = 2000
    """optimiser steps"""
    batch_size: int = 32
    """documents per step"""
    learning_rate: float = 2e-3
    """peak learning rate of AdamW: 100 steps up, then cosine to 0"""
    held_out: int = 256
    """documents that are not trained on"""
    eval_every: int = 100
    """steps between lines of pretraining.csv"""
    seed: int = 0
    """seed of the order of the documents; the same seed and thread count write the same weights"""


# ---- helpers --------------------------------------------------------------------------------------------------------


def batches_of(documents: list[torch.Tensor], batch_size: int, seed: int) -> list[list[torch.Tensor]]:
    """Return whole batches of documents of similar length (each pool of 50 batches is sorted), in a random order."""
    generator = torch.Generator().manual_seed(seed)
    order, batches = torch.randperm(len(documents), generator=generator).tolist(), []
    for start in range(0, len(order), 50 * batch_size):
        pool = sorted((documents[i] for i in order[start : start + 50 * batch_size]), key=len)
        batches += [pool[i : i + batch_size] for i in range(0, len(pool) - batch_size + 1, batch_size)]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator)]


def document_loss(model, documents: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the mean loss in nats per token, whether each next token (b, T - 1) is guessed right, and the next
    tokens."""
    tokens = pad_sequence(documents, batch_first=True)
    targets = pad_sequence(documents, batch_first=True, padding_value=-100)[:, 1:]
    logits = model(tokens[:, :-1]).logits  # (b, T - 1, V)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    return loss, logits.argmax(-1) == targets, targets


@torch.no_grad()
def evaluate(model, documents: list[torch.Tensor], restated: list[torch.Tensor]) -> dict[str, float]:
    """Return the held-out loss per token, and the share of repeated words (a mask per document) that are guessed
    right."""
    loss, count, right, words = 0.0, 0, 0, 0
    for start in range(0, len(documents), 32):
        part = documents[start : start + 32]
        mean, hits, targets = document_loss(model, part)
        masks = pad_sequence(restated[start : start + 32], batch_first=True)[:, 1:]
        tokens = (targets != -100).sum().item()
        loss, count = loss + mean.item() * tokens, count + tokens
        right, words = right + (hits & masks).sum().item(), words + masks.sum().item()
    return {"held_out_loss": loss / count, "copying_accuracy": right / words}


def restated_words(tokenizer, text: str, tokens: torch.Tensor) -> torch.Tensor:
    """Return a mask (T,) of the tokens behind the post that are a word of the post, of four letters or more."""
    post, _, rest = text.partition("\n\nPOST: ")[2].partition("\n\n")
    start = len(tokens) - 1 - len(tokenizer(rest)["input_ids"])
    known = set(re.findall(r"\w{4,}", post))
    words = [tokenizer.decode(token).strip() for token in tokens]
    return torch.tensor([i >= start and word in known for i, word in enumerate(words)])


def main(args: Args):
    # ---- arguments --------------------------------------------------------------------------------------------------
    output_dir, corpus = Path(args.output_dir), Path(args.documents, "pretraining.jsonl")
    if output_dir.exists():
        fail(f"{output_dir} exists; remove it (rm -r {output_dir}) or name another --output-dir")
    if not corpus.exists():
        fail(f"{corpus} is missing; write it with posts.py --num-pretraining 100000 --output-dir {args.documents}")
    if not (Path(args.model) / "config.json").exists():
        fail(f"--model {args.model} holds no config.json; make the model with quickstart/nano.py")
    at_least(1, args, "steps", "batch_size", "held_out", "eval_every")

    # ---- data and model ---------------------------------------------------------------------------------------------
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    texts = [json.loads(line)["text"] for line in corpus.read_text(encoding="utf-8").splitlines()]
    if len(texts) < args.held_out + args.batch_size:
        fail(f"{corpus} has {len(texts)} documents; --held-out and one batch need {args.held_out + args.batch_size}")
    documents = [torch.tensor([*ids, tokenizer.eos_token_id]) for ids in tokenizer(texts)["input_ids"]]
    held_out, train = documents[: args.held_out], documents[args.held_out :]
    restated = [restated_words(tokenizer, *pair) for pair in zip(texts, held_out, strict=False)]
    batches = batches_of(train, args.batch_size, args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    print(f"{args.model}: {len(train):,} documents, {sum(map(len, train)):,} tokens, {args.steps:,} steps", flush=True)

    # ---- train ------------------------------------------------------------------------------------------------------
    begin, losses, lines = time.time(), [], []
    shown = track(
        range(1, args.steps + 1), "pretraining", console=Console(stderr=True), disable=not sys.stderr.isatty()
    )
    for step in shown:
        decay = 0.5 + 0.5 * cos(pi * step / args.steps)
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * min(1, step / 100) * decay
        loss, _, _ = document_loss(model, batches[(step - 1) % len(batches)])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % args.eval_every == 0 or step == args.steps:
            line = {"step": step, "loss": sum(losses) / len(losses)} | evaluate(model, held_out, restated)
            losses = []
            lines.append(line)
            print("  ".join(f"{k} {v:.4g}" for k, v in line.items()), f" {time.time() - begin:.0f} s", flush=True)

    # ---- save: beside, then renamed, so that the folder is whole or absent ------------------------------------------
    unfinished = output_dir.with_name(output_dir.name + ".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    with (unfinished / "pretraining.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, lines[0])
        writer.writeheader()
        writer.writerows(lines)
    unfinished.rename(output_dir)
    print(
        f"{output_dir}: {(output_dir / 'model.safetensors').stat().st_size / 1e6:.2f} MB, {time.time() - begin:.0f} s"
    )


if __name__ == "__main__":
    main(tyro.cli(Args))
