"""Does a stage fit, and how long does it take? Its batch split, the memory of one device term by term, the memory of
the machine, and the time.

    python benchmark/plan.py ppo --model 6.9b --gpus 8 --gpu-memory 80
    python benchmark/plan.py samples --model 6.9b --reward-models 1
    python benchmark/plan.py ppo --model 135m --gpus 1 --zero 0
    python benchmark/plan.py --table        # every stage and size of the paper: benchmark/results/plan.md

Needs neither network nor weights: the shapes stand below. The memory is held against what nano runs allocate and
against the peaks of 1b on one H100 (tests/test_plan.py). What it cannot know, the buffers of NCCL and the gaps of the
allocator, is --reserve. The hours divide all arithmetic of a stage by the rate that its training phase, forward and
backward passes with the optimiser's steps, reached at 1b on one H100 (benchmark/results/h100). PPO's sampling and
scoring, other sizes and several GPUs are assumed to reach the same rate. 135m is SmolLM2-135M, a Llama: its parameters
and cache are exact, its activations are those of a small Llama on a CPU, and its tokenizer is taken to make as many
tokens as Pythia's.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import pandas
import tyro

# width, layers, heads, rows of the embedding and of the head (config.json of EleutherAI/pythia-*-deduped)
SHAPES = {"1b": (2048, 16, 8, 50304), "2.8b": (2560, 32, 32, 50304), "6.9b": (4096, 32, 32, 50432)}
SHAPES |= {"70m": (512, 6, 8, 50304), "1.4b": (2048, 24, 16, 50304)}  # the ensemble paper's
SHAPES |= {"135m": (576, 30, 9, 49153)}  # SmolLM2-135M and its [PAD]
# of a Llama, whose head is its embedding: the width of keys and of values, and that of the MLP
LLAMA = {"135m": (192, 1536)}
PAPER = ("1b", "2.8b", "6.9b")
# batch size, items of a run (tables 3, 4, 6, 7), and the micro-batch that the stage takes by itself; samples.py has no
# batch: the rows that a device takes at a time, of the validation split
STAGES = {
    "sft": (128, 116_722, {"1b": 16, "2.8b": 8, "6.9b": 2}),
    "reward": (64, 92_858, {"1b": 32, "2.8b": 4, "6.9b": 1}),
    "dpo": (64, 92_858, {"1b": 32, "2.8b": 4, "6.9b": 1}),
    "ppo": (512, 1_000_000, {"1b": 16, "2.8b": 8, "6.9b": 2}),
    "samples": (0, 6_447, {"1b": 32, "2.8b": 32, "6.9b": 32}),
}
# the longest item as stored (Detail 4), in columns of a row: all of them, and those that get logits
COLUMNS = {"sft": (576, 576), "reward": (816, 0), "dpo": (816, 352), "ppo": (576, 53)}
# the longest item of an evaluation: CNN/DM's pairs are longer than those that are trained on
EVALUATED = {"sft": (576, 576), "reward": (2240, 0), "dpo": (2240, 336)}
# mean real tokens of an item, from which the time follows: of its query and of each response
LENGTHS = {"sft": (352, 33), "reward": (350, 40, 40), "dpo": (350, 40, 40), "ppo": (353, 37), "samples": (0,)}
QUERY = 512  # columns of a query as stored
RESPONSE, FORWARD_ROWS = 53, 32  # --response-length and --forward-batch-size of ppo.py and samples.py
SAMPLE_ROWS = {"1b": 256, "2.8b": 128, "6.9b": 64}  # --sample-batch-size of ppo.py, 32 for other models
PPO_EPOCHS = 4  # --num-ppo-epochs, of one optimiser step each
# TFLOP/s of training at 1b on one H100: PFLOP by seconds in results/h100/stages.csv (samples: no time is estimated)
RATES = {"sft": 314, "reward": 176, "dpo": 190, "ppo": 326, "samples": 326}


@dataclass
class Args:
    stage: Annotated[Literal["sft", "reward", "dpo", "ppo", "samples"] | None, tyro.conf.Positional] = None
    """the script"""
    model: Literal["70m", "135m", "1b", "1.4b", "2.8b", "6.9b"] = "1b"
    """size of every model of the stage"""
    gpus: int = 8
    """devices of all machines"""
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
    """as in ppo.py: frozen models wait in the machine's memory; default at 6.9b"""
    offload_optimizer: bool = False
    """Adam's states in the machine's memory (zero2_offload.yaml)"""
    reserve: float = 4
    """GB for what is not counted: CUDA context, NCCL, kernels' workspaces, gaps of the allocator"""
    gpus_per_machine: int = 8
    """devices, and so processes, of one machine"""
    table: bool = False
    """instead: every stage and size on 8 GPUs of 80 GB, and what fits one GPU of 80 and of 24 GB: plan.md"""
    output_dir: str = "benchmark/results"
    """folder of the page that --table writes"""


# ==== models ======================================================================================


def tensors(model: str, head: bool) -> list[tuple[str, int, int]]:
    """(kind, numbers, how many) of the tensors of a language model (head) or of a reward model. Kinds: "linear" layers,
    "other" (embedding and norms), and the "score" head."""
    width, layers, _, vocab = SHAPES[model]
    if model in LLAMA:
        keys, inner = LLAMA[model]
        layer = [
            ("linear", width * width, 2),  # queries, attention's output
            ("linear", width * keys, 2),  # keys, values
            ("linear", width * inner, 3),  # MLP: gate, in, out
            ("other", width, 2),  # two norms
        ]
        rest = [("other", vocab * width, 1), ("other", width, 1)]  # a tied head is an embedding
    else:
        layer = [
            ("linear", 3 * width * width, 1),  # queries, keys and values
            ("linear", 3 * width, 1),
            ("linear", width * width, 1),  # attention's output
            ("linear", 4 * width * width, 2),  # MLP, in and out
            ("linear", 4 * width, 1),
            ("linear", width, 2),  # biases of the two outputs
            ("other", width, 4),  # two norms
        ]
        rest = [("other", vocab * width, 1), ("other", width, 2)] + [("linear", vocab * width, 1)] * head
    rest += [] if head else [("score", width, 1), ("score", 1, 1)]
    return [(kind, numbers, layers * count) for kind, numbers, count in layer] + rest


def size_of(model: str, head: bool) -> int:
    """Parameters of a language model (head) or of a reward model."""
    return sum(numbers * count for _, numbers, count in tensors(model, head))


def adapter_size(model: str, rank: int) -> int:
    """Parameters of LoRA adapters of all linear layers but the head: rank for each input and output."""
    width, layers, _, _ = SHAPES[model]
    if model in LLAMA:
        keys, inner = LLAMA[model]
        return layers * rank * (4 * width + 2 * (width + keys) + 3 * (width + inner))
    return layers * rank * (4 + 2 + 5 + 5) * width


def parameters(stage: str, model: str, reward_models: int, lora_r: int = 0) -> tuple[int, int]:
    """(trained, frozen) parameters of a stage. ppo: policy and value model, reference and reward models; with LoRA,
    adapters and the value model's head are trained; the reference of dpo has left memory before training begins;
    samples: the policy and reward models."""
    language, reward = size_of(model, True), size_of(model, False)
    trained = {"sft": language, "reward": reward, "dpo": language, "ppo": language + reward, "samples": 0}[stage]
    if lora_r:
        trained = 2 * adapter_size(model, lora_r) + SHAPES[model][0] + 1
    return trained, (language + reward_models * reward if stage in ("ppo", "samples") else 0)


# ==== memory ======================================================================================


def frozen_bytes(found: list[tuple[str, int, int]], zero: int, pinned: bool = False) -> float:
    """Bytes of a frozen model. Linear layers are bfloat16; the rest is, too, under DeepSpeed, but for the score head.
    pinned: of its page-locked copy."""
    total = 0
    for kind, numbers, count in found:
        size = numbers * (2 if kind == "linear" or (zero and kind == "other") else 4)
        # torch's allocator of page-locked memory rounds each tensor up to a power of two (CachingHostAllocator.h)
        total += count * (1 << (size - 1).bit_length() if pinned else size)
    return float(total)


def frozen_models(args: Args) -> list[float]:
    """Bytes of ppo's reference and of each reward model."""
    reference, reward = (frozen_bytes(tensors(args.model, head), args.zero) for head in (True, False))
    return [reference] + [reward] * args.reward_models


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


def activation_bytes(model: str, passes: list[tuple[int, int]], size: int, lora: bool = False) -> float:
    """Bytes kept for the backward pass of passes over (rows, columns); size: 4 in float32, 2 in bfloat16. A layer of
    GPT-NeoX keeps 18 numbers per token and unit of width: its input, two layer norms' outputs (1 + 2), queries, keys
    and values (3), rotated queries and keys (2), attention's output (1) twice over in the head's and in the model's
    order, and the MLP's two inner ones (8). A Llama's gated MLP and norms make it 20, and 28 under autocast,
    where the norms keep float32 (both measured). Adapters of a GPT-NeoX under autocast make it 20 (measured)."""
    width, layers, _, _ = SHAPES[model]
    kept = (20 if lora else 18) if model not in LLAMA else 20 if size == 4 else 28
    return float(sum(rows * columns * (kept * layers + 1) for rows, columns in passes) * width * size)


def mask_bytes(stage: str, rows: int, columns: int, layers: int, size: int) -> float:
    """Bytes of the mask of pairs (rows, columns, columns), a byte each. For the backward pass attention keeps it once a
    layer, as numbers; without gradient layers is 0. The other stages have no mask."""
    return float(rows * columns**2 * (1 + layers * size)) if stage in ("reward", "dpo") else 0.0


def logit_bytes(stage: str, rows: int, columns: int, vocab: int) -> float:
    """Bytes of the logits with their softmax and gradients in float32, three at a time, in dpo almost five."""
    return {"sft": 12.0, "reward": 0.0, "dpo": 19.0, "ppo": 12.0}[stage] * rows * columns * vocab


def forward_bytes(model: str, rows: int, columns: int, size: int) -> float:
    """Bytes of a pass without gradient: for one layer at a time 12 numbers per token and unit of width, eight of them
    the MLP's inner ones (two of four widths, or a Llama's three of 8/3)."""
    return 12.0 * rows * columns * SHAPES[model][0] * size


def key_value_bytes(model: str) -> int:
    """Bytes of a token's keys and values in every layer, in bfloat16."""
    width, layers, _, _ = SHAPES[model]
    return 2 * layers * LLAMA.get(model, (width,))[0] * 2


def sampling_bytes(model: str, rows: int) -> dict[str, float]:
    """Bytes of sampling: a static cache for query and response; the prefill of the queries; six float32 arrays
    (rows, vocab): logits, scaled logits, noise and its hash."""
    return {
        "keys and values": float(rows * (QUERY + RESPONSE) * key_value_bytes(model)),
        "prefill": forward_bytes(model, rows, QUERY, 2),
        "logits": 6 * 4.0 * rows * SHAPES[model][3],
    }


def phases_of(args: Args, micro: int, sample_rows: int, offload: bool) -> dict[str, dict[str, float]]:
    """{phase: {term: bytes of a device}} of a stage; `micro` rows of a pass, `sample_rows` of sampling."""
    _, layers, _, vocab = SHAPES[args.model]
    trained, frozen = parameters(args.stage, args.model, args.reward_models, args.lora_r)
    if args.stage == "samples":  # bfloat16 weights; a response is sampled, then scored
        return {"sampling and scoring": {"weights": 2.0 * frozen} | sampling_bytes(args.model, micro)}
    states = state_bytes(trained, args.gpus, args.zero, 16 if args.zero else 32, args.offload_optimizer)
    if not args.zero:  # autocast keeps a bfloat16 copy of what it casts
        states["bfloat16 weights"] = 2.0 * trained
    columns, logits = COLUMNS[args.stage]
    passes = [(micro, columns)] * (2 if args.stage == "ppo" else 1)  # policy and value model
    training = states | {"activations": activation_bytes(args.model, passes, 2, args.lora_r > 0)}
    training["activations"] += mask_bytes(args.stage, micro, columns, layers, 2)
    training["logits"] = logit_bytes(args.stage, micro, logits, vocab)
    kept = {key: value for key, value in states.items() if key != "gradients"}
    if args.stage in EVALUATED:
        rows = micro if args.stage == "sft" else min(4 * micro, FORWARD_ROWS)  # --forward-batch-size
        columns, logits = EVALUATED[args.stage]
        in_pass = forward_bytes(args.model, rows, columns, 2) + mask_bytes(args.stage, rows, columns, 0, 2)
        return {"training": training, "evaluation": kept | {"pass": in_pass, "logits": 10.0 * rows * logits * vocab}}
    reference, one_reward_model, *_ = frozen_models(args)
    all_frozen = sum(frozen_models(args))
    waiting = {} if offload else {"frozen models": all_frozen}
    passing = kept | {"frozen models": reference if offload else all_frozen}  # offloaded, one at a time
    passing["pass"] = forward_bytes(args.model, micro, columns, 2)
    passing["logits"] = 8.0 * micro * RESPONSE * vocab
    scoring = kept | {"frozen models": one_reward_model if offload else all_frozen}
    scoring["pass"] = forward_bytes(args.model, min(FORWARD_ROWS, STAGES["ppo"][0] // args.gpus), columns, 2)
    return {
        "sampling": kept | waiting | sampling_bytes(args.model, sample_rows),
        "rollout passes": passing,
        "scoring": scoring,
        "training": training | waiting,
    }


def host_bytes(args: Args, offload: bool) -> float:
    """The most that the processes of a machine hold in its memory: when they start, each with one model at a time in
    float32 and the page-locked copies of the offloaded ones, or when the main process copies the trained weights to
    save them. Checkpoint files are mapped and do not count."""
    trained, _ = parameters(args.stage, args.model, args.reward_models, args.lora_r)
    language, reward = (4.0 * size_of(args.model, head) for head in (True, False))
    pinned = [frozen_bytes(tensors(args.model, head), args.zero, True) * offload for head in (True, False)]
    models = {  # (bytes in float32, bytes that stay) in the order in which they are loaded
        "sft": [(language, 0)],
        "reward": [(reward, 0)],
        "dpo": [(language, 0)],  # the reference has gone before
        "ppo": [*[(reward, pinned[1])] * args.reward_models, (language, pinned[0]), (language, 0), (reward, 0)],
        "samples": [(language, 0), *[(reward, 0)] * args.reward_models],
    }[args.stage]
    stays = most = 0.0
    for loaded, stay in models:
        most = max(most, stays + loaded)
        stays += stay
    if args.zero and args.offload_optimizer:
        stays += 12 * trained / args.gpus  # Adam's states with the float32 weights
    processes = min(args.gpus, args.gpus_per_machine)
    return max(processes * max(most, stays), processes * stays + trained * (2 if args.zero else 4))


# ==== time ========================================================================================


def item_flop(stage: str, model: str, reward_models: int, lora_r: int = 0) -> float:
    """FLOP of an item's real tokens, as benchmark/speed/throughput.py counts them: 2 for each weight of a matrix and
    token, 4 for each unit of width, token and key that attention sees, and the head where a loss or a sample reads it.
    A backward pass costs two forward ones, with LoRA one, as frozen weights get no gradient. dpo: also the reference's
    pass. ppo: 4 epochs and a look with both models, the reference, sampling, the reward models."""
    width, layers, _, vocab = SHAPES[model]
    keys_width, inner = LLAMA.get(model, (width, 4 * width))
    matrices = 2 * width * (width + keys_width) + (3 if model in LLAMA else 2) * width * inner
    query, *responses = LENGTHS[stage]
    tokens = query + sum(responses)
    keys = query**2 / 2 + sum(length * (query + length / 2) for length in responses)  # no response sees the other
    body = 2 * layers * matrices * tokens + 4 * layers * width * keys
    head = 2 * vocab * width
    if stage == "ppo":
        epoch = 2 if lora_r else 3
        passes = 2 * (epoch * PPO_EPOCHS + 1) + 1 + 1 + reward_models
        return passes * body + (epoch * PPO_EPOCHS + 1 + 1 + 1) * head * sum(responses)  # policy, reference, sampling
    passes = {"sft": 3, "reward": 3, "dpo": 4, "samples": 0}[stage]
    read = {"sft": tokens, "reward": 0, "dpo": sum(responses), "samples": 0}[stage]
    return float(passes * (body + head * read))


def fail(message: str):
    """End the process with one clear message on standard error and exit code 1."""
    raise SystemExit(f"error: {message}")


def plan(args: Args) -> dict:
    """{"micro_batch_size", "micro_batches" (of a device and batch), "sample_batch_size", "terms" {phase: {term:
    bytes}}, "peak" (bytes), "travel" (bytes of offloaded models that come to a device in an update), "host" (bytes of a
    machine's memory), "hours" (without that travel)} of a stage."""
    batch, items, chosen = STAGES[args.stage]
    if batch % args.gpus:
        fail(f"a batch of {batch} does not split over {args.gpus} devices")
    if args.lora_r and (args.stage != "ppo" or args.zero or args.offload):
        fail("--lora-r is of ppo alone, with --zero 0 and without --offload")
    share = batch // args.gpus or FORWARD_ROWS
    micro = args.micro_batch_size or min(chosen.get(args.model, 8), share)
    sample_rows = min(args.sample_batch_size or SAMPLE_ROWS.get(args.model, 32), share)
    offload = args.stage == "ppo" and (
        args.model == "6.9b" and not args.lora_r if args.offload is None else args.offload
    )
    phases = phases_of(args, micro, sample_rows, offload)
    flop = item_flop(args.stage, args.model, args.reward_models, args.lora_r) * items
    return {
        "micro_batch_size": micro,
        "micro_batches": -(-batch // args.gpus // micro) or 1,
        "sample_batch_size": sample_rows,
        "terms": phases,
        "peak": max(sum(terms.values()) for terms in phases.values()) + args.reserve * 1e9,
        "travel": sum(frozen_models(args)) if offload else 0.0,
        "host": host_bytes(args, offload),
        "hours": flop / (args.gpus * 1e12 * RATES[args.stage]) / 3600,
    }


def largest_micro_batch(args: Args) -> int | None:
    """The largest micro-batch, of a power of two, that fits the device; None if not even one row does."""
    local = STAGES[args.stage][0] // args.gpus or 1024
    sizes = [2**power for power in range(local.bit_length()) if 2**power <= local]
    fits = [size for size in sizes if plan(replace(args, micro_batch_size=size))["peak"] <= args.gpu_memory * 1e9]
    return max(fits, default=None)


def first_that_fits(args: Args) -> str:
    """For a cell of the table: the largest micro-batch on one device, plain or with Adam's states in the machine's
    memory, if need be with fewer episodes sampled at a time; "no" if nothing fits."""
    ways = {"plain": {"zero": 0}, "zero2_offload": {"zero": 2, "offload_optimizer": True}}
    if args.lora_r:
        ways = {"LoRA": {"zero": 0}}
    chosen = plan(args)["sample_batch_size"]
    for way, changes in ways.items():
        for halved in range(chosen.bit_length() if args.stage == "ppo" else 1):
            rows = chosen >> halved
            size = largest_micro_batch(replace(args, sample_batch_size=rows, **changes))
            if size:
                return f"{size}, {way}" + f", --sample-batch-size {rows}" * (halved > 0)
    return "no"


def table() -> str:
    """Markdown: memory and time of every stage and size on 8 GPUs of 80 GB, and what one of 80 and of 24 GB takes."""
    text = "| stage | model | micro-batch | GB per GPU, 8 with ZeRO-2 | largest micro-batch in 80 GB | hours |"
    text += " GB of the machine | GB to a GPU per update |"
    text += " one GPU of 80 GB: micro-batch | one of 24 GB |\n" + "|---" * 10 + "|\n"
    for stage in STAGES:
        for model in PAPER:
            args = Args(stage=stage, model=model)
            found = plan(args)
            hours = f"{found['hours']:.2f}" * (stage != "samples")
            travel = f"{found['travel'] / 1e9:.0f}" * (found["travel"] > 0)
            cells = [stage, model, found["micro_batch_size"], f"{found['peak'] / 1e9:.0f}"]
            cells += [largest_micro_batch(args) or "none", hours, f"{found['host'] / 1e9:.0f}", travel]
            cells += [first_that_fits(replace(args, gpus=1, gpu_memory=memory)) for memory in (80, 24)]
            text += f"| {' | '.join(map(str, cells))} |\n"
    text += "\n| PPO on one GPU with LoRA of rank 16: micro-batch | 24 GB | 40 GB | 80 GB |\n" + "|---" * 4 + "|\n"
    for model in PAPER:
        args = Args("ppo", model, gpus=1, zero=0, lora_r=16)
        cells = [first_that_fits(replace(args, gpu_memory=memory)) for memory in (24, 40, 80)]
        text += f"| {' | '.join([model, *cells])} |\n"
    return text


def main(args: Args):
    if args.table:
        text = "# Memory and time by the arithmetic of benchmark/plan.py\n\nNo run in this table was measured. "
        text += "The hours assume that each GPU keeps up the rate at which one H100 trained Pythia 1B.\n\n" + table()
        return Path(args.output_dir, "plan.md").write_text(text, encoding="utf-8")
    if args.stage is None:
        fail("which stage? sft, reward, dpo, ppo or samples; or --table for all")
    found = plan(args)
    peak, memory = found["peak"] / 1e9, args.gpu_memory
    terms = pandas.DataFrame(found["terms"]) / 1e9
    terms.loc["reserve"] = args.reserve
    terms.loc["sum"] = terms.sum()
    zero = f", ZeRO-{args.zero}" * (args.stage != "samples")
    print(f"{args.stage} {args.model}, {args.gpus} GPU(s){zero}: GB per GPU")
    print(terms.to_string(na_rep="", float_format="%.2f"))
    batch, items, _ = STAGES[args.stage]
    if batch:
        print(f"batch of {batch} = {args.gpus} x {found['micro_batches']} micro-batches of {found['micro_batch_size']}")
    largest = largest_micro_batch(args) or "none"
    print(f"{peak:.1f} GB {'fits' if peak <= memory else 'does NOT fit'} {memory:g} GB; largest micro-batch: {largest}")
    if found["travel"]:
        print(f"{found['travel'] / 1e9:.1f} GB of offloaded models come to each device in an update")
    print(f"a machine's memory: {found['host'] / 1e9:.0f} GB (to load the models and to save the trained ones)")
    if args.stage != "samples":  # whose time is that of reading weights, not of arithmetic
        seconds = 3600 * found["hours"] * batch / items
        print(f"{found['hours']:.2f} h for {items:,} items, {seconds:.2f} s an update of {batch}, at the H100's rate")


if __name__ == "__main__":
    main(tyro.cli(Args))
