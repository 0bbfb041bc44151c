"""What a stage needs before it runs: how its batch splits, the memory of one device term by term, and the time.

    python benchmark/plan.py ppo --model 6.9b --gpus 8 --gpu-memory 80
    python benchmark/plan.py sft --model 1b --gpus 1 --gpu-memory 24 --zero 0
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
# batch size, items of a run (tables 3, 4, 6, 7), and the largest micro-batch that the stage takes by itself
STAGES = {
    "sft": (128, 116_722, {"1b": 16, "2.8b": 8, "6.9b": 2}),
    "reward": (64, 92_858, {"1b": 8, "2.8b": 4, "6.9b": 1}),
    "dpo": (64, 92_858, {"1b": 8, "2.8b": 4, "6.9b": 1}),
    "ppo": (512, 1_000_000, {"1b": 16, "2.8b": 8, "6.9b": 2}),
}
# the longest item as stored (Detail 4), in columns of a row: all, those of the query that go first, and how many of the
# rest get logits; and the mean number of real tokens of an item, from which the time follows
COLUMNS = {"sft": (576, 0, 576), "reward": (816, 464, 0), "dpo": (816, 464, 352), "ppo": (576, 496, 53)}
TOKENS = {"sft": 385, "reward": 430, "dpo": 430, "ppo": 390}
RESPONSE, FORWARD_ROWS = 53, 32  # --response-length and --forward-batch-size
GIB = 2**30


@dataclass
class Args:
    stage: Annotated[Literal["sft", "reward", "dpo", "ppo"] | None, tyro.conf.Positional] = None
    """the script"""
    model: Literal["1b", "2.8b", "6.9b"] = "1b"
    """size of every model of the stage"""
    gpus: int = 8
    """devices of all machines"""
    gpu_memory: float = 80
    """GB (10^9 bytes) of one device"""
    zero: Literal[0, 2, 3] = 2
    """stage of DeepSpeed's ZeRO in bfloat16; 0: DDP or one process, autocast over float32 weights"""
    micro_batch_size: int | None = None
    """rows, pairs or episodes per device and pass; default: as the script chooses"""
    reward_models: int = 1
    """members of the ensemble that ppo.py scores with, and one more for a --gold that is a model"""
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
    of dpo has left memory before training begins."""
    body = body_parameters(width, layers, vocab)
    language, reward = body + vocab * width, body + width + 1
    trained = {"sft": language, "reward": reward, "dpo": language, "ppo": language + reward}[stage]
    return trained, (language + reward_models * reward if stage == "ppo" else 0)


def state_bytes(trained: int, gpus: int, zero: int, bits: int, offload_optimizer: bool) -> dict[str, float]:
    """Bytes a device holds all the time. Adam keeps two float32 numbers a weight; DeepSpeed also float32 weights beside
    its 16-bit ones, shards all of these (ZeRO-1), the gradients (2) and the weights (3), and has a bucket of 5e8
    gradients; DDP has the gradients a second time, in its buckets."""
    shards, size = (gpus if zero else 1), bits // 8
    return {
        "weights": size * trained / (gpus if zero == 3 else 1),
        "gradients": size * trained / shards,
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


def fail(message: str):
    """End the process with one clear message on standard error and exit code 1."""
    raise SystemExit(f"error: {message}")


def split_batch(batch_size: int, micro_batch_size: int | None, world: int, largest: int) -> int:
    """Rows per device and forward pass: `micro_batch_size` if it splits the batch evenly (if not, an error that names
    the nearest sizes that do), by default the largest such size up to `largest`."""
    if batch_size < 1:
        fail(f"--batch-size {batch_size}: it must be at least 1")
    if batch_size % world:
        near = sorted({max(1, batch_size // world) * world, (batch_size // world + 1) * world})
        fail(f"--batch-size {batch_size} does not split over {world} processes; nearest: {' or '.join(map(str, near))}")
    local = batch_size // world
    fits = [size for size in range(1, local + 1) if local % size == 0]
    if micro_batch_size is None:
        return max(size for size in fits if size <= largest)
    if micro_batch_size not in fits:
        near = sorted(fits, key=lambda size: abs(size - micro_batch_size))[:2]
        fail(
            f"--micro-batch-size {micro_batch_size} does not divide the {local} rows of a device (--batch-size "
            f"{batch_size} over {world} processes); nearest: {' or '.join(map(str, sorted(near)))}"
        )
    return micro_batch_size


def plan(args: Args) -> dict:
    """{"micro_batch_size", "micro_batches" (of a device and batch), "terms" {phase: {term: bytes}}, "peak" (bytes),
    "hours"} of a stage."""
    width, layers, _, vocab = SHAPES[args.model]
    batch, items, largest = STAGES[args.stage]
    micro = split_batch(batch, args.micro_batch_size, args.gpus, largest[args.model])
    trained, frozen = parameters(args.stage, width, layers, vocab, args.reward_models)
    offload = args.model == "6.9b" if args.offload is None else args.offload
    bits = 16 if args.zero else 32
    states = state_bytes(trained, args.gpus, args.zero, bits, args.offload_optimizer)
    columns, prefix, logits = COLUMNS[args.stage]
    passes = [(micro, columns, prefix)] * (2 if args.stage == "ppo" else 1)  # policy and value model
    training = states | {"activations": activation_bytes(passes, width, layers, 2)}
    if not args.zero:  # autocast keeps a bfloat16 copy of what it casts
        training["bfloat16 weights"] = 2.0 * trained
    training["logits"] = logit_bytes(args.stage, micro, logits, vocab)
    phases = {"training": training}
    if args.stage == "ppo":
        waiting = {} if offload else {"frozen models": bits / 8 * frozen}
        kept = {key: value for key, value in states.items() if key in ("weights", "optimizer")}
        if args.zero == 3:
            kept["gathered weights"] = 2.0 * trained
        cache = 2 * FORWARD_ROWS * (columns - 1) * width * layers * 2.0
        sampling = kept | waiting | {"keys and values": cache}
        one = frozen / (1 + args.reward_models) if offload else frozen  # on the device at a time
        scoring = kept | {"frozen models": bits / 8 * one, "keys and values": cache}
        scoring["logits"] = 8.0 * FORWARD_ROWS * RESPONSE * vocab
        phases = {"sampling": sampling, "scoring": scoring, "training": training | waiting}
    # a backward pass costs two; dpo: and the reference's; ppo: 4 epochs and a look with both models, sampling, scoring
    passes = {"sft": 3, "reward": 3, "dpo": 4, "ppo": 2 * (3 * 4 + 1) + 2 + args.reward_models}[args.stage]
    arithmetic = (
        2 * body_parameters(width, layers, vocab) * TOKENS[args.stage] * items * passes
    )  # the head, no embedding
    return {
        "micro_batch_size": micro,
        "micro_batches": batch // args.gpus // micro,
        "terms": phases,
        "peak": max(sum(terms.values()) for terms in phases.values()) + args.reserve * 1e9,
        "hours": arithmetic / (args.gpus * args.flops * 1e12) / 3600,
    }


def largest_micro_batch(args: Args) -> int | None:
    """The largest micro-batch that splits the batch evenly and fits the device, None if not even one row does."""
    local = STAGES[args.stage][0] // args.gpus
    sizes = [size for size in range(1, local + 1) if local % size == 0]
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
        for model in SHAPES:
            args = Args(stage=stage, model=model)
            found, alone = plan(args), []
            for memory in (80, 24):
                tried = {way: replace(args, gpus=1, gpu_memory=memory, **changes) for way, changes in WAYS.items()}
                fits = [f"{size}, {way}" for way, one in tried.items() if (size := largest_micro_batch(one))]
                alone.append(fits[0] if fits else "no")
            peak, hours = f"{found['peak'] / 1e9:.0f}", f"{found['hours']:.2f}"
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
        fail("which stage? sft, reward, dpo or ppo; or --table for all")
    found = plan(args)
    peak, memory = found["peak"] / 1e9, args.gpu_memory
    shown = Table("GB per GPU", title=f"{args.stage} {args.model}, {args.gpus} GPU(s), ZeRO-{args.zero}")
    for phase in found["terms"]:
        shown.add_column(phase, justify="right")
    for name in dict.fromkeys(name for terms in found["terms"].values() for name in terms):
        sizes = [terms.get(name) for terms in found["terms"].values()]
        shown.add_row(name, *("" if size is None else f"{size / 1e9:.2f}" for size in sizes))
    shown.add_row("reserve", *[f"{args.reserve:.2f}"] * len(found["terms"]), end_section=True)
    shown.add_row("sum", *(f"{sum(terms.values()) / 1e9 + args.reserve:.2f}" for terms in found["terms"].values()))
    Console().print(shown)
    batch, items, _ = STAGES[args.stage]
    print(f"batch of {batch} = {args.gpus} x {found['micro_batches']} micro-batches of {found['micro_batch_size']}")
    largest = largest_micro_batch(args) or "none"
    print(f"{peak:.1f} GB {'fits' if peak <= memory else 'does NOT fit'} {memory:g} GB; largest micro-batch: {largest}")
    print(f"about {found['hours']:.1f} h for {items:,} items at {args.flops:g} TFLOP/s, without evaluation and saving")


if __name__ == "__main__":
    main(tyro.cli(Args))
