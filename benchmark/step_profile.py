"""What a micro-batch of PPO's training pays beyond its matrix products, and the most memory it takes meanwhile.

    python benchmark/step_profile.py
    git show 010ca96:ppo.py >/tmp/old.py; python benchmark/step_profile.py --script /tmp/old.py     # as it was

On a CPU, under bfloat16 autocast over float32 weights as on a GPU: policy and value model of random weights, queries
of 250 to 511 tokens, 20 to 52 response tokens, 50,304 words. One forward and backward pass, without the optimiser.
"""

import importlib.util
import itertools
import time
from dataclasses import dataclass

import torch
import tyro
from accelerate import Accelerator
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, GPTNeoXForSequenceClassification

PAD = 50277
# what an operation of torch's is for; what is not here is counted as "the rest"
KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm"),
    "attention": ("aten::_scaled_dot_product", "aten::_flash", "aten::_efficient"),
    "casts and copies": ("aten::copy_", "aten::cat"),
    "filling with zeros (gradients of embeddings and slices)": ("aten::fill_", "aten::zero_"),
    "softmax over the vocabulary, temperature": (
        "aten::_log_softmax",
        "aten::div",
        "aten::nll_loss",
        "aten::masked_fill",
    ),
    "GELU, layer norms, sums": ("aten::gelu", "aten::native_layer_norm", "aten::add", "aten::mul", "aten::sum"),
}


@dataclass
class Args:
    script: str = "ppo.py"
    """ppo.py, of this or another commit"""
    width: int = 1024
    """of the models; at 1,024 matrix products outweigh the rest on a CPU"""
    layers: int = 4
    """of the models"""
    rows: int = 8
    """episodes of the micro-batch"""


def load(path: str):
    spec = importlib.util.spec_from_file_location("ppo_script", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_models(ppo, args: Args):
    torch.manual_seed(0)
    shape = {"hidden_size": args.width, "num_hidden_layers": args.layers, "num_attention_heads": args.width // 256}
    shape |= {"intermediate_size": 4 * args.width, "vocab_size": 50304, "rotary_pct": 0.25, "pad_token_id": PAD}
    policy = GPTNeoXForCausalLM(GPTNeoXConfig(**shape, attn_implementation="sdpa"))
    classifier = GPTNeoXForSequenceClassification(GPTNeoXConfig(**shape, num_labels=1, attn_implementation="sdpa"))
    classifier.score = ppo.ScalarHead(args.width, 1)
    return ppo.PolicyAndValue(policy, ppo.RewardModel(classifier))


def make_micro_batch(ppo, args: Args) -> dict:
    generator = torch.Generator().manual_seed(1)
    queries, responses = torch.full((args.rows, 512), PAD), torch.full((args.rows, 53), PAD)
    for query, response in zip(queries, responses, strict=True):
        length, tokens = (
            int(torch.randint(low, high, (), generator=generator)) for low, high in ((250, 512), (20, 53))
        )
        query[512 - length :] = torch.randint(1, 50000, (length,), generator=generator)
        response[:tokens] = torch.randint(1, 50000, (tokens,), generator=generator)
    batch = ppo.make_batch(queries, responses, PAD)
    for key in ("logprobs", "values", "advantages", "returns"):
        batch[key] = torch.randn(responses.shape, generator=generator) * batch["response_mask"]
    return ppo.micro_batches(batch, torch.arange(args.rows), args.rows)[0]


def main(args: Args):
    ppo = load(args.script)
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    model = accelerator.prepare(make_models(ppo, args))
    mb = make_micro_batch(ppo, args)
    banned = torch.zeros(50304, dtype=torch.bool)
    banned[PAD:] = True

    def step():
        """As in main."""
        logits, values = model(mb["queries"], mb["responses"], PAD, banned)
        logprobs = ppo.token_logprobs(logits, mb["responses"], 0.7)
        if frees_logits:
            del logits
        policy_sum, _ = ppo.policy_loss(logprobs, mb, 0.2)
        value_sum, _ = ppo.value_loss(values, mb, 0.2)
        accelerator.backward(policy_sum / 100 + 0.1 * value_sum / 100)

    with open(args.script) as file:
        frees_logits = "del logits" in file.read()
    step()  # gradients are there from here on
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    memory = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    memory.sort(key=lambda event: event.start_ns())
    peak = max(itertools.accumulate(event.nbytes() for event in memory))
    spent = dict.fromkeys([*KINDS, "the rest"], 0.0)
    for event in profiled.key_averages():
        kind = next((kind for kind, names in KINDS.items() if event.key.startswith(names)), "the rest")
        spent[kind] += event.self_cpu_time_total
    total = sum(spent.values())
    logits = args.rows * mb["responses"].shape[1] * 50304 * 4
    table = Table("kind of operation", "share of the time", title=f"a micro-batch of {args.script}")
    for kind, microseconds in spent.items():
        table.add_row(kind, f"{microseconds / total:.1%}")
    Console().print(table)
    print(f"seconds of a pass forward and backward: {', '.join(f'{x:.2f}' for x in sorted(seconds))}")
    print(
        f"most memory above weights and gradients: {peak / 2**20:.0f} MiB; logits in float32: {logits / 2**20:.0f} MiB"
    )


if __name__ == "__main__":
    main(tyro.cli(Args))
