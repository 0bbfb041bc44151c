"""Memory and time of a stage: the bytes of one device, term by term, those of the machine, and the hours.

    python benchmark/plan.py ppo --model 6.9b --gpus 8 --gpu-memory 80
    python benchmark/plan.py ppo --model 1b --gpus 1 --zero 0 --lora-r 16 --gpu-memory 24
    python benchmark/plan.py > benchmark/results/plan.md              # every stage and size of the paper

It needs neither network nor weights. tests/test_plan.py compares the memory of training with the peaks of 1b on one
H100 (benchmark/results/h100). --reserve stands for what the terms leave out: the CUDA context, NCCL
and the gaps of the allocator. Evaluation and PPO's scoring need less memory than sampling or training, and dpo.py's
reference has left the device before training. The hours are those of 1b on that H100 (random weights, few updates), in
proportion to the parameters and divided by the number of GPUs. They ignore micro-batch, offloading and the number of
reward models.
"""

import sys
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

import pandas
import tyro

sys.path.append(str(Path(__file__).resolve().parents[1] / "eval"))

from eval_helpers import at_least, fail, markdown  # noqa: E402

# width, layers, rows of the embedding and of the head (config.json of EleutherAI/pythia-*-deduped)
SHAPES = {"1b": (2048, 16, 50304), "2.8b": (2560, 32, 50304), "6.9b": (4096, 32, 50432)}
SHAPES |= {"70m": (512, 6, 50304), "1.4b": (2048, 24, 50304)}  # the ensemble paper's
PAPER = ("1b", "2.8b", "6.9b")
# batch size, items of a run (tables 3, 4, 6 and 7), and the micro-batch that the script chooses
STAGES = {
    "sft": (128, 116_722, {"1b": 16, "2.8b": 8, "6.9b": 2}),
    "reward": (64, 92_858, {"1b": 32, "2.8b": 4, "6.9b": 1}),
    "dpo": (64, 92_858, {"1b": 32, "2.8b": 4, "6.9b": 1}),
    "ppo": (512, 1_000_000, {"1b": 16, "2.8b": 8, "6.9b": 2}),
}
SPEEDS = {"sft": 143.73, "reward": 76.51, "dpo": 80.37, "ppo": 16.01}  # items/s at 1b (results/h100/stages.csv)
# columns of the longest item (Detail 4, rounded up to 16), and how many of them get logits. dpo.py keeps those of the
# shortest query's response on, so their number depends on the pairs of a micro-batch: about 384 on one H100
COLUMNS = {"sft": (576, 576), "reward": (816, 0), "dpo": (816, 512), "ppo": (576, 53)}
QUERY, RESPONSE = 512, 53  # columns of a query, and --response-length of ppo.py
SAMPLE_ROWS = {"1b": 256, "2.8b": 128, "6.9b": 64}  # --sample-batch-size of ppo.py; 32 for other models
# bytes of a logit with its softmax and gradients, in float32: three at a time, in dpo almost 5
LOGIT = {"sft": 12.0, "reward": 0.0, "dpo": 19.0, "ppo": 12.0}
PINNED = 1.1  # torch rounds each page-locked tensor up to a power of two: 1.09 to 1.10 times as much at 6.9b


@dataclass
class Args:
    stage: Annotated[Literal["sft", "reward", "dpo", "ppo"] | None, tyro.conf.Positional] = None
    """the script; without it, tables of every stage and size on 8 GPUs of 80 GB, and of what fits one GPU"""
    model: Literal["70m", "1b", "1.4b", "2.8b", "6.9b"] = "1b"
    """size of every model of the stage"""
    gpus: int = 8
    """number of devices; up to eight are in one machine"""
    gpu_memory: float = 80
    """GB (10^9 bytes) of one device"""
    zero: Literal[0, 2] = 2
    """stage of DeepSpeed's ZeRO in bfloat16; 0: DDP or one process, autocast over float32 weights"""
    micro_batch_size: int | None = None
    """rows, pairs or episodes per device and pass; default: as the script chooses"""
    sample_batch_size: int | None = None
    """ppo: episodes that a device samples at a time; default: as the script chooses"""
    lora_r: int = 0
    """ppo: rank of the adapters of ppo_lora.py (ablations/lora.diff); 0: all weights are trained"""
    reward_models: int = 1
    """reward models that score: several in ensembles/ppo.py"""
    offload: bool | None = None
    """ppo: frozen models wait in the machine's memory; default: at 6.9b, without LoRA"""
    offload_optimizer: bool = False
    """Adam's states in the machine's memory (zero2_offload.yaml)"""
    reserve: float = 4
    """GB for what is not counted"""


def parameters(model: str, head: bool) -> tuple[int, int, int]:
    """Return the number of parameters in linear layers, in embedding and norms, and in the scalar head, of a language
    model (head) or of a reward model."""
    width, layers, vocab = SHAPES[model]
    linear = layers * (12 * width**2 + 9 * width)  # attention's 3 + 1 and the MLP's 4 + 4 matrices, and their biases
    other = vocab * width + (4 * layers + 2) * width
    return (linear + vocab * width, other, 0) if head else (linear, other, width)


def trained_size(args: Args) -> int:
    """Return the number of parameters that are trained. With LoRA, these are the value model's head and the adapters of
    all linear layers but the heads, rank x (inputs + outputs) each; the other weights are the frozen models'."""
    language, reward = (sum(parameters(args.model, head)) for head in (True, False))
    if args.lora_r:
        width, layers, _ = SHAPES[args.model]
        return 2 * layers * args.lora_r * (4 + 2 + 5 + 5) * width + width + 1
    return {"sft": language, "reward": reward, "dpo": language, "ppo": language + reward}[args.stage]


def frozen_models(args: Args) -> list[float]:
    """Return the bytes of PPO's reference and of each reward model. Linear layers are in bfloat16. Under DeepSpeed, the
    rest is, too, but for the scalar head."""
    bytes_of = []
    for head in (True, False):
        linear, other, score = parameters(args.model, head)
        bytes_of.append(2.0 * linear + (2 if args.zero else 4) * other + 4 * score)
    return bytes_of[:1] + bytes_of[1:] * args.reward_models


def state_bytes(trained: int, args: Args) -> dict[str, float]:
    """Return the bytes that a device holds all the time. Adam keeps two float32 numbers a weight. DeepSpeed also keeps
    float32 weights beside its 16-bit ones, shards these (ZeRO-1) and the gradients (2), which it sums over
    micro-batches in float32, and has a bucket of 5e8 gradients. DDP has the gradients a second time, in its buckets,
    and autocast keeps a bfloat16 copy of what it casts."""
    if args.zero:
        adam = 0 if args.offload_optimizer else 12 * trained / args.gpus
        return {"weights": 2 * trained, "gradients": 4 * trained / args.gpus, "optimizer": adam, "buckets": 1e9}
    states = {"weights": 4 * trained, "gradients": 4 * trained, "optimizer": 8 * trained}
    buckets = 4 * trained if args.gpus > 1 else 0
    return states | {"buckets": buckets, "bfloat16 weights": 2 * trained}


def activation_bytes(args: Args, rows: int, columns: int, size: int) -> float:
    """Return the bytes kept for a backward pass, with `size` bytes a number. A layer keeps 18 numbers per token and
    unit of width: its input, two layer norms' outputs (1 + 2), queries, keys and values (3), rotated queries and keys
    (2), attention's output (1) twice over in the head's and in the model's order, and the MLP's two inner ones (8).
    Adapters make it 20 (measured). PPO trains two models. Pairs have a mask (rows, columns, columns) of a byte each,
    which attention keeps once a layer, as numbers."""
    width, layers, _ = SHAPES[args.model]
    numbers = ((20 if args.lora_r else 18) * layers + 1) * width * (2 if args.stage == "ppo" else 1)
    mask = columns * (1 + layers * size) if args.stage in ("reward", "dpo") else 0
    return float(rows * columns * (numbers * size + mask))


def sampling_bytes(model: str, rows: int) -> dict[str, float]:
    """Return the bytes of sampling: a static cache in bfloat16 for query and response; 12 numbers per token and unit of
    width for the queries' pass, of one layer at a time; and six float32 arrays (rows, vocab) for the logits, scaled and
    masked, and the noise with its hashes."""
    width, layers, vocab = SHAPES[model]
    return {
        "keys and values": float(rows * (QUERY + RESPONSE) * 2 * layers * width * 2),
        "pass": 12.0 * rows * QUERY * width * 2,
        "logits": 6 * 4.0 * rows * vocab,
    }


def phases_of(args: Args, micro: int, sample_rows: int, offload: bool) -> dict[str, dict[str, float]]:
    """Return {phase: {term: bytes of a device}} of a stage, with `micro` rows a pass and `sample_rows` in sampling."""
    states = state_bytes(trained_size(args), args)
    columns, logits = COLUMNS[args.stage]
    training = states | {"activations": activation_bytes(args, micro, columns, 2)}
    training["logits"] = LOGIT[args.stage] * micro * logits * SHAPES[args.model][2]
    if args.stage != "ppo":
        return {"training": training}
    kept = {key: value for key, value in states.items() if key != "gradients"}
    waiting = 0.0 if offload else sum(frozen_models(args))
    sampling = kept | {"frozen models": waiting} | sampling_bytes(args.model, sample_rows)
    return {"sampling": sampling, "training": training | {"frozen models": waiting}}


def host_bytes(args: Args, offload: bool) -> float:
    """Return the most that the processes of a machine hold in its memory: when they start, each with one model at a
    time in float32 and the page-locked copies of offloaded ones, or when one of them copies the weights to save them.
    Checkpoint files are mapped and do not count."""
    language, reward = (4.0 * sum(parameters(args.model, head)) for head in (True, False))
    stays = PINNED * sum(frozen_models(args)) if offload else 0.0
    loading = stays + (reward if args.stage == "reward" else language)
    trained = trained_size(args)
    if args.zero and args.offload_optimizer:
        stays += 12 * trained / args.gpus  # Adam's states with the float32 weights
    processes = min(args.gpus, 8)
    return max(processes * max(loading, stays), processes * stays + trained * (2 if args.zero else 4))


def disk_bytes(args: Args) -> dict[str, float]:
    """Return the bytes of a "checkpoint" for --resume, with float32 weights and Adam's two numbers a weight, and of the
    saved "models". Under DeepSpeed, a checkpoint also has the 16-bit weights, and the models are of these. With LoRA, a
    checkpoint has what is trained, and the saved model is whole."""
    trained = trained_size(args)
    saved = sum(parameters(args.model, True)) if args.lora_r else trained
    return {"checkpoint": (14.0 if args.zero else 12.0) * trained, "models": (2.0 if args.zero else 4.0) * saved}


def plan(args: Args) -> dict:
    """Return the sizes of a stage: "micro_batch_size", "micro_batches" (of a device and batch), "sample_batch_size",
    "terms" {phase: {term: bytes}}, "peak" (bytes of a device), "host" (bytes of a machine), "disk" (what disk_bytes
    returns) and "hours" (None with LoRA, whose speed was not measured)."""
    batch, items, chosen = STAGES[args.stage]
    at_least(1, args, "gpus", "micro_batch_size", "sample_batch_size", "reward_models")
    at_least(0, args, "gpu_memory", "lora_r", "reserve")
    if args.offload_optimizer and not args.zero:
        fail("--offload-optimizer needs DeepSpeed: --zero 2")
    if batch % args.gpus:
        fail(f"--gpus {args.gpus}: must divide the batch of {batch}")
    if args.lora_r and (args.stage != "ppo" or args.zero or args.offload):
        fail("--lora-r works only for ppo with --zero 0 and without --offload")
    share = batch // args.gpus
    micro = min(args.micro_batch_size or chosen.get(args.model, 8), share)
    sample_rows = min(args.sample_batch_size or SAMPLE_ROWS.get(args.model, 32), share)
    offload = args.model == "6.9b" and not args.lora_r if args.offload is None else args.offload
    offload = offload and args.stage == "ppo"
    phases = phases_of(args, micro, sample_rows, offload)
    times_1b = sum(parameters(args.model, True)) / sum(parameters("1b", True))
    return {
        "micro_batch_size": micro,
        "micro_batches": -(-share // micro),
        "sample_batch_size": sample_rows,
        "terms": phases,
        "peak": max(sum(terms.values()) for terms in phases.values()) + args.reserve * 1e9,
        "host": host_bytes(args, offload),
        "disk": disk_bytes(args),
        "hours": None if args.lora_r else items / SPEEDS[args.stage] * times_1b / args.gpus / 3600,
    }


def largest_micro_batch(args: Args) -> int | None:
    """Return the largest micro-batch, of a power of two, that fits the device, or None if not even one row does."""
    share = STAGES[args.stage][0] // args.gpus
    sizes = [2**power for power in range(share.bit_length())]
    fits = [size for size in sizes if plan(replace(args, micro_batch_size=size))["peak"] <= args.gpu_memory * 1e9]
    return max(fits, default=None)


def first_that_fits(args: Args) -> str:
    """Return the largest micro-batch on one device, plain or with Adam's states in the machine's memory, if need be
    with fewer episodes sampled at a time; "no" if nothing fits."""
    rows = plan(args)["sample_batch_size"]
    sampled = [rows >> n for n in range(rows.bit_length())] if args.stage == "ppo" else [rows]
    ways = [("", {"zero": 0})] + [(", zero2_offload", {"zero": 2, "offload_optimizer": True})] * (not args.lora_r)
    for (way, changes), size in product(ways, sampled):
        if micro := largest_micro_batch(replace(args, sample_batch_size=size, **changes)):
            return f"{micro}{way}" + ("" if size == rows else f", --sample-batch-size {size}")
    return "no"


def table() -> str:
    """Return Markdown tables: memory and time of every stage and size on 8 GPUs of 80 GB, and what one GPU takes."""
    rows, lora = [], []
    for stage, model in product(STAGES, PAPER):
        args = Args(stage, model)
        fit = plan(args)
        row = {"stage": stage, "model": model, "micro-batch": fit["micro_batch_size"]}
        row["GB per GPU, 8 with ZeRO-2"] = f"{fit['peak'] / 1e9:.0f}"
        row["largest micro-batch in 80 GB"] = largest_micro_batch(args) or "none"
        row |= {"hours": f"{fit['hours']:.2f}", "GB of the machine": f"{fit['host'] / 1e9:.0f}"}
        row["GB of a checkpoint"] = f"{fit['disk']['checkpoint'] / 1e9:.0f}"
        for memory, title in ((80, "one GPU of 80 GB: micro-batch"), (24, "one of 24 GB")):
            row[title] = first_that_fits(replace(args, gpus=1, gpu_memory=memory))
        rows.append(row)
    for model in PAPER:
        args = Args("ppo", model, gpus=1, zero=0, lora_r=16)
        sizes = {f"{memory} GB": first_that_fits(replace(args, gpu_memory=memory)) for memory in (24, 40, 80)}
        lora.append({"PPO on one GPU with LoRA of rank 16: micro-batch": model} | sizes)
    return f"{markdown(rows)}\n{markdown(lora)}"


def main(args: Args):
    if args.stage is None:
        print("# Memory and time by the arithmetic of benchmark/plan.py\n\nNo run in this table was measured.", end=" ")
        return print(f"The hours are those of 1b on one H100, in proportion to the parameters.\n\n{table()}", end="")
    fit = plan(args)
    terms = pandas.DataFrame(fit["terms"]) / 1e9
    terms.loc["reserve"] = args.reserve
    terms.loc["sum"] = terms.sum()
    print(f"{args.stage} {args.model}, {args.gpus} GPU(s), ZeRO-{args.zero}: GB per GPU")
    print(terms.to_string(na_rep="", float_format="%.2f"))
    print(f"micro-batches of a device: {fit['micro_batches']} of up to {fit['micro_batch_size']}")
    fits = "fits" if fit["peak"] <= args.gpu_memory * 1e9 else "does NOT fit"
    print(f"{fit['peak'] / 1e9:.1f} GB {fits} {args.gpu_memory:g} GB; largest: {largest_micro_batch(args) or 'none'}")
    print(f"a machine's memory: {fit['host'] / 1e9:.0f} GB (to load the models and to save the trained ones)")
    checkpoint, models = (f"{size / 1e9:.3g}" for size in fit["disk"].values())
    print(f"on disk: a checkpoint has {checkpoint} GB, and the two newest stay when the run has ended", end=" ")
    print(f"(three while one is written); the saved models have {models} GB")
    if fit["hours"]:
        print(f"{fit['hours']:.2f} h for {STAGES[args.stage][1]:,} items, in proportion to 1b on one H100")


if __name__ == "__main__":
    main(tyro.cli(Args))
