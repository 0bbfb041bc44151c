"""What a stage needs before it runs: how its batch splits, the memory of one device term by term, and the time.

    python benchmark/plan.py ppo --model 6.9b --gpus 8 --gpu-memory 80
    python benchmark/plan.py sft --model 1b --gpus 1 --gpu-memory 24 --zero 0
    python benchmark/plan.py samples --model 6.9b --reward-models 1
    python benchmark/plan.py --table        # every stage and size: benchmark/results/plan.md

Needs neither network nor weights: Pythia's shapes stand below. The arithmetic is held against what nano runs allocate
(tests/test_plan.py); what it cannot know, the buffers of NCCL and the gaps of the allocator, is --reserve.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

# width, layers, heads, rows of the embedding and of the head (config.json of EleutherAI/pythia-*-deduped)
SHAPES = {"1b": (2048, 16, 8, 50304), "2.8b": (2560, 32, 32, 50304), "6.9b": (4096, 32, 32, 50432)}
SHAPES |= {"70m": (512, 6, 8, 50304), "1.4b": (2048, 24, 16, 50304)}  # the ensemble paper's
PAPER = ("1b", "2.8b", "6.9b")
# batch size, items of a run (tables 3, 4, 6, 7), and the micro-batch that the stage takes by itself; samples.py has no
# batch: the rows that a device takes at a time, of the validation split
STAGES = {
    "sft": (128, 116_722, {"1b": 16, "2.8b": 8, "6.9b": 2}),
    "reward": (64, 92_858, {"1b": 8, "2.8b": 4, "6.9b": 1}),
    "dpo": (64, 92_858, {"1b": 8, "2.8b": 4, "6.9b": 1}),
    "ppo": (512, 1_000_000, {"1b": 16, "2.8b": 8, "6.9b": 2}),
    "samples": (0, 6_447, {"1b": 32, "2.8b": 32, "6.9b": 32}),
}
# the longest item as stored (Detail 4), in columns of a row: all, those of the query that go first, and how many of the
# rest get logits; and the mean number of real tokens of an item, from which the time follows
COLUMNS = {"sft": (576, 0, 576), "reward": (816, 464, 0), "dpo": (816, 464, 352), "ppo": (576, 496, 53)}
TOKENS = {"sft": 385, "reward": 430, "dpo": 430, "ppo": 390, "samples": 0}
# the longest item of an evaluation: CNN/DM's pairs are longer than those that are trained on
EVALUATED = {"sft": (576, 0, 576), "reward": (2240, 1904, 0), "dpo": (2240, 1904, 336)}
RESPONSE, FORWARD_ROWS = 53, 32  # --response-length and --forward-batch-size of ppo.py and samples.py
FORWARD_GROUP = 4  # --forward-batch-size of reward.py and dpo.py, in micro-batches
GIB = 2**30


@dataclass
class Args:
    stage: Annotated[Literal["sft", "reward", "dpo", "ppo", "samples"] | None, tyro.conf.Positional] = None
    """the script"""
    model: Literal["70m", "1b", "1.4b", "2.8b", "6.9b"] = "1b"
    """size of every model of the stage"""
    gpus: int = 8
    """devices of all machines"""
    gpu_memory: float = 80
    """GB (10^9 bytes) of one device"""
    zero: Literal[0, 2] = 2
    """stage of DeepSpeed's ZeRO in bfloat16; 0: DDP or one process, autocast over float32 weights"""
    micro_batch_size: int | None = None
    """rows, pairs or episodes per device and pass; default: as the script chooses"""
    reward_models: int = 1
    """reward models that score: of ensembles/ppo.py its members, and one more for a --gold that is a model"""
    offload: bool | None = None
    """as in ppo.py: frozen models stay in the machine's memory while the policy trains; default at 6.9b"""
    offload_optimizer: bool = False
    """Adam's states in the machine's memory (zero2_offload.yaml)"""
    reserve: float = 4
    """GB for what is not counted: CUDA context, NCCL, kernels' workspaces, gaps of the allocator"""
    flops: float = 400
    """TFLOP/s that a device keeps up on real tokens, for the time (an assumption: 40 % of an H100's peak)"""
    table: bool = False
    """instead: every stage and size on 8 GPUs of 80 GB, and what fits one GPU of 80 and of 24 GB, as Markdown"""
    output: str = "benchmark/results/plan.md"
    """file of --table"""


def body_parameters(width: int, layers: int, vocab: int) -> int:
    """Of GPT-NeoX without its head: the embedding, per layer attention (4h^2 + 4h), MLP (8h^2 + 5h) and two layer norms
    (4h), and the last layer norm."""
    return vocab * width + layers * (12 * width**2 + 13 * width) + 2 * width


def parameters(stage: str, width: int, layers: int, vocab: int, reward_models: int) -> tuple[int, int]:
    """(trained, frozen) parameters of a stage. ppo: policy and value model, reference and reward models; the reference
    of dpo has left memory before training begins; samples: the policy and reward models."""
    body = body_parameters(width, layers, vocab)
    language, reward = body + vocab * width, body + width + 1
    trained = {"sft": language, "reward": reward, "dpo": language, "ppo": language + reward, "samples": 0}[stage]
    return trained, (language + reward_models * reward if stage in ("ppo", "samples") else 0)


def state_bytes(trained: int, gpus: int, zero: int, bits: int, offload_optimizer: bool) -> dict[str, float]:
    """Bytes a device holds all the time. Adam keeps two float32 numbers a weight; DeepSpeed also float32 weights beside
    its 16-bit ones, shards these (ZeRO-1) and the gradients (2), which it sums over micro-batches in float32, and has a
    bucket of 5e8 gradients; DDP has the gradients a second time, in its buckets."""
    shards, size = (gpus if zero else 1), bits // 8
    return {
        "weights": size * trained,
        "gradients": 4 * trained / shards,
        "optimizer": (0 if offload_optimizer else 12 if zero else 8) * trained / shards,
        "buckets": 5e8 * size if zero else 4.0 * trained * (gpus > 1),
    }


def activation_bytes(passes: list[tuple[int, int, int]], width: int, layers: int, size: int) -> float:
    """Bytes kept for the backward pass: `passes` are (rows, columns, prefix), of which the first `prefix` columns go
    through the model beforehand. A layer keeps 18 numbers per token and unit of width: its input, two layer norms'
    outputs (1 + 2), queries, keys and values (3), rotated queries and keys (2), attention's output (1) twice over in
    the head's and in the model's order, and the MLP's two inner ones (8); of the prefix' last layer all but 6 go at
    once. size: 4 in float32, 2 in bfloat16."""
    numbers = sum(rows * (columns * (18 * layers + 1) - 12 * prefix) for rows, columns, prefix in passes)
    return float(numbers * width * size)


def logit_bytes(stage: str, rows: int, columns: int, vocab: int) -> float:
    """Bytes of the logits with their softmax and gradients in float32, three at a time, in dpo almost five."""
    return {"sft": 12.0, "reward": 0.0, "dpo": 19.0, "ppo": 12.0}[stage] * rows * columns * vocab


def forward_bytes(rows: int, columns: int, prefix: int, width: int, layers: int, size: int) -> float:
    """Bytes of a pass without gradient over a cache, the first `prefix` columns beforehand: keys and values of every
    layer, and of one layer at a time 12 numbers per token and unit of width, eight of them the MLP's inner ones."""
    first, second = prefix * (2 * layers + 12), columns * 2 * layers + (columns - prefix) * 12
    return float(rows * width * size * max(first, second))


def fail(message: str):
    """End the process with one clear message on standard error and exit code 1."""
    raise SystemExit(f"error: {message}")


def plan(args: Args) -> dict:
    """{"micro_batch_size", "micro_batches" (of a device and batch), "terms" {phase: {term: bytes}}, "peak" (bytes),
    "hours"} of a stage."""
    width, layers, _, vocab = SHAPES[args.model]
    batch, items, chosen = STAGES[args.stage]
    if batch % args.gpus:
        fail(f"a batch of {batch} does not split over {args.gpus} devices")
    micro = args.micro_batch_size or min(chosen.get(args.model, 8), batch // args.gpus or FORWARD_ROWS)
    trained, frozen = parameters(args.stage, width, layers, vocab, args.reward_models)
    offload = args.model == "6.9b" if args.offload is None else args.offload
    bits = 16 if args.zero else 32
    if args.stage == "samples":  # bfloat16 weights; a response is sampled, then scored
        held = {"weights": 2.0 * frozen, "keys and values": forward_bytes(micro, 512 + RESPONSE, 512, width, layers, 2)}
        phases = {"sampling and scoring": held | {"logits": 8.0 * micro * vocab}}
    else:
        states = state_bytes(trained, args.gpus, args.zero, bits, args.offload_optimizer)
        if not args.zero:  # autocast keeps a bfloat16 copy of what it casts
            states["bfloat16 weights"] = 2.0 * trained
        columns, prefix, logits = COLUMNS[args.stage]
        passes = [(micro, columns, prefix)] * (2 if args.stage == "ppo" else 1)  # policy and value model
        training = states | {"activations": activation_bytes(passes, width, layers, 2)}
        training["logits"] = logit_bytes(args.stage, micro, logits, vocab)
        kept = {key: value for key, value in states.items() if key != "gradients"}
    if args.stage in EVALUATED:
        rows = micro if args.stage == "sft" else FORWARD_GROUP * micro
        columns, prefix, logits = EVALUATED[args.stage]
        kept_layers = 0 if args.stage == "sft" else layers  # whose keys and values nobody asks for again
        looking = kept | {"keys and values": forward_bytes(rows, columns, prefix, width, kept_layers, 2)}
        phases = {"training": training, "evaluation": looking | {"logits": 10.0 * rows * logits * vocab}}
    if args.stage == "ppo":
        waiting = {} if offload else {"frozen models": bits / 8 * frozen}
        cache = forward_bytes(FORWARD_ROWS, columns - 1, 512, width, layers, 2)
        sampling = kept | waiting | {"keys and values": cache}
        one = frozen / (1 + args.reward_models) if offload else frozen  # on the device at a time
        scoring = kept | {"frozen models": bits / 8 * one, "keys and values": cache}
        scoring["logits"] = 8.0 * FORWARD_ROWS * RESPONSE * vocab
        phases = {"sampling": sampling, "scoring": scoring, "training": training | waiting}
    # a backward pass costs two; dpo: and the reference's; ppo: 4 epochs and a look with both models, sampling, scoring
    passes = {"sft": 3, "reward": 3, "dpo": 4, "ppo": 2 * (3 * 4 + 1) + 2 + args.reward_models, "samples": 0}
    arithmetic = (
        2 * body_parameters(width, layers, vocab) * TOKENS[args.stage] * items * passes[args.stage]
    )  # with head
    return {
        "micro_batch_size": micro,
        "micro_batches": -(-batch // args.gpus // micro) or 1,
        "terms": phases,
        "peak": max(sum(terms.values()) for terms in phases.values()) + args.reserve * 1e9,
        "hours": arithmetic / (args.gpus * args.flops * 1e12) / 3600,
    }


def largest_micro_batch(args: Args) -> int | None:
    """The largest micro-batch, of a power of two, that fits the device; None if not even one row does."""
    local = STAGES[args.stage][0] // args.gpus or 1024
    sizes = [2**power for power in range(local.bit_length()) if 2**power <= local]
    fits = [size for size in sizes if plan(replace(args, micro_batch_size=size))["peak"] <= args.gpu_memory * 1e9]
    return max(fits, default=None)


# what one device can do, in the order in which a table tries it
WAYS = {
    "plain": {"zero": 0},
    "ZeRO-2": {"zero": 2},
    "zero2_offload": {"zero": 2, "offload_optimizer": True},
    "zero2_offload, --offload": {"zero": 2, "offload_optimizer": True, "offload": True},
}


def table() -> str:
    """Markdown: memory and time of every stage and size on 8 GPUs of 80 GB, and what one of 80 and of 24 GB takes."""
    text = "| stage | model | micro-batch | GB per GPU, 8 with ZeRO-2 | largest micro-batch in 80 GB | hours |"
    text += " one GPU of 80 GB: micro-batch | one of 24 GB |\n" + "|---" * 8 + "|\n"
    for stage in STAGES:
        for model in PAPER:
            args = Args(stage=stage, model=model)
            found, alone = plan(args), []
            for memory in (80, 24):
                tried = {way: replace(args, gpus=1, gpu_memory=memory, **changes) for way, changes in WAYS.items()}
                fits = [f"{size}, {way}" for way, one in tried.items() if (size := largest_micro_batch(one))]
                alone.append(fits[0] if fits else "no")
            peak, hours = f"{found['peak'] / 1e9:.0f}", f"{found['hours']:.2f}" if stage != "samples" else ""
            cells = [stage, model, found["micro_batch_size"], peak, largest_micro_batch(args) or "none", hours, *alone]
            text += f"| {' | '.join(map(str, cells))} |\n"
    return text


def main(args: Args):
    if args.table:
        text = "# Memory and time by the arithmetic of benchmark/plan.py: nothing here was run on a GPU\n\n" + table()
        Path(args.output).write_text(text)
        print(text)
        return
    if args.stage is None:
        fail("which stage? sft, reward, dpo, ppo or samples; or --table for all")
    found = plan(args)
    peak, memory = found["peak"] / 1e9, args.gpu_memory
    zero = f", ZeRO-{args.zero}" * (args.stage != "samples")
    shown = Table("GB per GPU", title=f"{args.stage} {args.model}, {args.gpus} GPU(s){zero}")
    for phase in found["terms"]:
        shown.add_column(phase, justify="right")
    for name in dict.fromkeys(name for terms in found["terms"].values() for name in terms):
        sizes = [terms.get(name) for terms in found["terms"].values()]
        shown.add_row(name, *("" if size is None else f"{size / 1e9:.2f}" for size in sizes))
    shown.add_row("reserve", *[f"{args.reserve:.2f}"] * len(found["terms"]), end_section=True)
    shown.add_row("sum", *(f"{sum(terms.values()) / 1e9 + args.reserve:.2f}" for terms in found["terms"].values()))
    Console().print(shown)
    batch, items, _ = STAGES[args.stage]
    if batch:
        print(f"batch of {batch} = {args.gpus} x {found['micro_batches']} micro-batches of {found['micro_batch_size']}")
    largest = largest_micro_batch(args) or "none"
    print(f"{peak:.1f} GB {'fits' if peak <= memory else 'does NOT fit'} {memory:g} GB; largest micro-batch: {largest}")
    if args.stage != "samples":  # whose time is that of reading weights, not of arithmetic
        print(
            f"about {found['hours']:.1f} h for {items:,} items at {args.flops:g} TFLOP/s, without evaluation and saving"
        )


if __name__ == "__main__":
    main(tyro.cli(Args))
