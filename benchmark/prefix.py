"""Is it worth it to run the common prefix of a micro-batch first and keep it in a cache?

    python benchmark/prefix.py          # prints the tables, writes benchmark/results/prefix.csv and prefix.md

Two passes, forward and backward, in float32 on a CPU, 8 rows with queries of 350 tokens and responses of 40, GPT-NeoX:

    ppo      right-padded rows `query + response`; the loss reads the response's columns
    pairs    rows `query + chosen + rejected` under a mask in which `rejected` does not see `chosen`

plain: the whole row at once. cached: the columns before all responses first, into a cache, then the rest on it; no
gradient passes through the last layer of the first part. Both give the same numbers up to rounding, which is checked.
Runs alternate; a ratio is the median over the runs. ppo.py has been plain since it was measured here.
"""

import csv
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table
from throughput import machine
from transformers import DynamicCache, GPTNeoXConfig, GPTNeoXModel

ROWS, QUERY, RESPONSE, WORDS = 8, 350, 40, 6_100


@dataclass
class Args:
    layers: tuple[int, ...] = (4, 8, 16, 30)
    """depths"""
    widths: tuple[int, ...] = (256, 576)
    """widths of the models; ppo has the first alone"""
    runs: int = 3
    """of each way"""
    output_dir: str = "benchmark/results"
    """folder of prefix.csv and prefix.md"""


def ppo_inputs(tokens: torch.Tensor) -> tuple[dict, int, slice]:
    """Inputs of the plain pass, width of the prefix, and the columns that the loss reads."""
    return {}, QUERY - 1, slice(QUERY - 1, QUERY + RESPONSE - 1)


def pair_inputs(tokens: torch.Tensor) -> tuple[dict, int, slice]:
    """The same for pairs: mask and position ids, the prefix cut to a multiple of 16."""
    t = torch.arange(tokens.shape[1])
    is_rejected = t >= QUERY + RESPONSE
    mask = (t[:, None] >= t) & ((t < QUERY) | (is_rejected[:, None] == is_rejected))
    positions = (t - is_rejected * RESPONSE).expand(ROWS, -1)
    inputs = {"attention_mask": mask.expand(ROWS, 1, -1, -1), "position_ids": positions}
    return inputs, (QUERY - 1) // 16 * 16, slice(QUERY - 1, None)


def plain(model, head, tokens: torch.Tensor, inputs: dict, prefix: int, read: slice) -> torch.Tensor:
    """Logits (b, W, V) of the columns in `read`, all in one pass."""
    return head(model(tokens, use_cache=False, **inputs).last_hidden_state[:, read])


def cached(model, head, tokens: torch.Tensor, inputs: dict, prefix: int, read: slice) -> torch.Tensor:
    """The same in two passes."""
    embeddings = model.get_input_embeddings()(tokens)
    cache = DynamicCache()
    model(inputs_embeds=embeddings[:, :prefix], past_key_values=cache, use_cache=True)
    rest = {}
    if inputs:
        rest = {"attention_mask": inputs["attention_mask"][:, :, prefix:]}
        rest["position_ids"] = inputs["position_ids"][:, prefix:]
    hidden = model(inputs_embeds=embeddings[:, prefix:], past_key_values=cache, use_cache=True, **rest)
    return head(hidden.last_hidden_state[:, read.start - prefix :])


def measure(args: Args, kind: str, width: int, layers: int) -> dict:
    """One row of the table."""
    torch.manual_seed(1)
    shape = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": width // 64, "vocab_size": WORDS}
    model = GPTNeoXModel(GPTNeoXConfig(**shape, intermediate_size=4 * width, attn_implementation="sdpa"))
    head = torch.nn.Linear(width, WORDS if kind == "ppo" else 1, bias=False)
    columns = QUERY + RESPONSE - 1 if kind == "ppo" else QUERY + 2 * RESPONSE
    tokens = torch.randint(1, WORDS, (ROWS, columns))
    inputs = {"ppo": ppo_inputs, "pairs": pair_inputs}[kind](tokens)
    seconds = {plain: [], cached: []}
    sums = {}
    for _ in range(args.runs + 1):  # the first does not count
        for way in seconds:
            start = time.perf_counter()
            loss = way(model, head, tokens, *inputs).logsumexp(2).sum() / ROWS
            loss.backward()
            seconds[way].append(time.perf_counter() - start)
            sums[way] = loss.item()
    assert abs(sums[plain] / sums[cached] - 1) < 1e-5, f"{kind}: the two ways differ: {sums}"
    ratios = [x / y for x, y in zip(seconds[plain][1:], seconds[cached][1:], strict=True)]
    row = {"pass": kind, "width": width, "layers": layers}
    row |= {f"{way.__name__}, s": f"{statistics.median(seconds[way][1:]):.3f}" for way in seconds}
    row["plain / cached"] = f"{statistics.median(ratios):.2f}"
    return row | {"least, most": f"{min(ratios):.2f}, {max(ratios):.2f}"}


def main(args: Args):
    cases = [("ppo", args.widths[0], layers) for layers in args.layers]
    cases += [("pairs", width, layers) for width in args.widths for layers in args.layers]
    rows = [measure(args, *case) for case in track(cases, "passes", console=Console(stderr=True))]
    table = Table(*rows[0], title="one pass over one with a cached prefix")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    with Path(args.output_dir, "prefix.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    lines = ["# One pass over one with a cached prefix", ""]
    lines += [f"`python benchmark/prefix.py`, {torch.get_num_threads()} threads, {machine('cpu')},"]
    lines += [f"float32; median of {args.runs} runs in turn.", ""]
    lines += [f"| {' | '.join(rows[0])} |", "|" + " --- |" * len(rows[0])]
    lines += [f"| {' | '.join(map(str, row.values()))} |" for row in rows]
    Path(args.output_dir, "prefix.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(Args))
