"""What a stage needs before it runs: how its batch splits, the memory of one device term by term, the memory of the
machine, and the time.

    python benchmark/plan.py ppo --model 6.9b --gpus 8 --gpu-memory 80
    python benchmark/plan.py sft --model 1b --gpus 1 --gpu-memory 24 --zero 0
    python benchmark/plan.py samples --model 6.9b --reward-models 1
    python benchmark/plan.py --table        # every stage and size: benchmark/results/plan.md
    python benchmark/plan.py --scale        # the whole study on 1, 8 and 64 GPUs: benchmark/results/scale.md

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
# the longest item as stored (Detail 4), in columns of a row: all of them, and those that get logits
COLUMNS = {"sft": (576, 576), "reward": (816, 0), "dpo": (816, 352), "ppo": (576, 53)}
# the longest item of an evaluation: CNN/DM's pairs are longer than those that are trained on
EVALUATED = {"sft": (576, 576), "reward": (2240, 0), "dpo": (2240, 336)}
# mean real tokens of an item, from which the time follows: of its query and of each response
LENGTHS = {"sft": (352, 33), "reward": (350, 40, 40), "dpo": (350, 40, 40), "ppo": (353, 37), "samples": (0,)}
TOKENS = {stage: sum(lengths) for stage, lengths in LENGTHS.items()}
QUERY = 512  # columns of a query as stored
RESPONSE, FORWARD_ROWS = 53, 32  # --response-length and --forward-batch-size of ppo.py and samples.py
SAMPLE_ROWS = {"1b": 256, "2.8b": 128, "6.9b": 64}  # --sample-batch-size of ppo.py, 32 for other models
PPO_EPOCHS = 4  # --num-ppo-epochs, of one optimiser step each
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
    sample_batch_size: int | None = None
    """ppo: episodes that a device samples at a time; default: as the script chooses"""
    reward_models: int = 1
    """reward models that score: of ensembles/ppo.py its members, and one more for a --gold that is a model"""
    offload: bool | None = None
    """as in ppo.py: frozen models wait in the machine's memory, and each comes to the device once an update; default at
    6.9b"""
    offload_optimizer: bool = False
    """Adam's states in the machine's memory (zero2_offload.yaml)"""
    reserve: float = 4
    """GB for what is not counted: CUDA context, NCCL, kernels' workspaces, gaps of the allocator"""
    flops: float = 400
    """TFLOP/s that a device keeps up on real tokens, for the time (an assumption: 40 % of an H100's peak)"""
    link: float = 25
    """GB/s from page-locked memory to a device (an assumption: PCIe 5 that neighbours share)"""
    gpus_per_machine: int = 8
    """devices, and so processes, of one machine"""
    table: bool = False
    """instead: every stage and size on 8 GPUs of 80 GB, and what fits one GPU of 80 and of 24 GB: plan.md"""
    scale: bool = False
    """instead: the whole study on 1, 8 and 64 H100s, and where it stops scaling: scale.md"""
    output_dir: str = "benchmark/results"
    """folder of the pages that --table and --scale write"""


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


def tensors(width: int, layers: int, vocab: int, head: bool) -> list[tuple[str, int, int]]:
    """(kind, numbers, how many) of the tensors of a language model (head) or of a reward model. Kinds: "linear" layers,
    "other" (embedding and norms), and the "score" head."""
    layer = [
        ("linear", 3 * width * width, 1),  # queries, keys and values
        ("linear", 3 * width, 1),
        ("linear", width * width, 1),  # attention's output
        ("linear", 4 * width * width, 2),  # MLP, in and out
        ("linear", 4 * width, 1),
        ("linear", width, 2),  # biases of the two outputs
        ("other", width, 4),  # two norms
    ]
    found = [(kind, numbers, layers * count) for kind, numbers, count in layer]
    found += [("other", vocab * width, 1), ("other", width, 2)]
    if head:
        return [*found, ("linear", vocab * width, 1)]
    return [*found, ("score", width, 1), ("score", 1, 1)]


def frozen_bytes(found: list[tuple[str, int, int]], zero: int, pinned: bool = False) -> float:
    """Bytes of a frozen model. Linear layers are bfloat16; the rest is, too, under DeepSpeed, but for the score head.
    pinned: of its page-locked copy."""
    total = 0
    for kind, numbers, count in found:
        size = numbers * (2 if kind == "linear" or (zero and kind == "other") else 4)
        # torch's allocator of page-locked memory rounds each tensor up to a power of two (CachingHostAllocator.h)
        total += count * (1 << (size - 1).bit_length() if pinned else size)
    return float(total)


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


def activation_bytes(passes: list[tuple[int, int]], width: int, layers: int, size: int) -> float:
    """Bytes kept for the backward pass of passes over (rows, columns). A layer keeps 18 numbers per token and unit of
    width: its input, two layer norms' outputs (1 + 2), queries, keys and values (3), rotated queries and keys (2),
    attention's output (1) twice over in the head's and in the model's order, and the MLP's two inner ones (8). size: 4
    in float32, 2 in bfloat16."""
    numbers = sum(rows * columns * (18 * layers + 1) for rows, columns in passes)
    return float(numbers * width * size)


def mask_bytes(stage: str, rows: int, columns: int, layers: int, size: int) -> float:
    """Bytes of the mask of pairs (rows, columns, columns), a byte each. For the backward pass attention keeps it once a
    layer, as numbers; without gradient layers is 0. The other stages have no mask."""
    return float(rows * columns**2 * (1 + layers * size)) if stage in ("reward", "dpo") else 0.0


def logit_bytes(stage: str, rows: int, columns: int, vocab: int) -> float:
    """Bytes of the logits with their softmax and gradients in float32, three at a time, in dpo almost five."""
    return {"sft": 12.0, "reward": 0.0, "dpo": 19.0, "ppo": 12.0}[stage] * rows * columns * vocab


def forward_bytes(rows: int, columns: int, width: int, size: int) -> float:
    """Bytes of a pass without gradient: for one layer at a time 12 numbers per token and unit of width, eight of them
    the MLP's inner ones."""
    return 12.0 * rows * columns * width * size


def key_value_bytes(width: int, layers: int) -> int:
    """Bytes of a token's keys and values in every layer, in bfloat16."""
    return 2 * layers * width * 2


def sampling_bytes(rows: int, width: int, layers: int, vocab: int) -> dict[str, float]:
    """Bytes of sampling: a static cache for query and response; of one layer at a time 12 numbers per token of the
    queries and unit of width; six float32 arrays (rows, vocab): logits, scaled logits, noise and its hash."""
    return {
        "keys and values": float(rows * (QUERY + RESPONSE) * key_value_bytes(width, layers)),
        "prefill": 2.0 * rows * QUERY * 12 * width,
        "logits": 6 * 4.0 * rows * vocab,
    }


def host_bytes(models: list[tuple[float, float]], states: float, copy: float, processes: int) -> float:
    """The most that the processes of a machine hold in its memory: when they start, or when the main process copies the
    trained weights to save them. models: (bytes in float32, bytes that stay there) in the order in which they are
    loaded, one at a time; states: the optimiser's, which come last. Checkpoint files are mapped and do not count."""
    stays = most = 0.0
    for loaded, pinned in models:
        most = max(most, stays + loaded)
        stays += pinned
    stays += states
    return max(processes * max(most, stays), processes * stays + copy)


def item_flop(stage: str, model: str, reward_models: int) -> float:
    """FLOP of an item's real tokens, as benchmark/throughput.py counts them: 2 for each weight of a matrix and token, 4
    for each unit of width, token and key that attention sees, and the head where a loss or a sample reads it. A
    backward pass costs two forward ones. dpo: also the reference's pass. ppo: 4 epochs and a look with both models, the
    reference, sampling, the reward models."""
    width, layers, _, vocab = SHAPES[model]
    query, *responses = LENGTHS[stage]
    tokens = query + sum(responses)
    keys = query**2 / 2 + sum(length * (query + length / 2) for length in responses)  # no response sees the other
    body = 2 * 12 * layers * width**2 * tokens + 4 * layers * width * keys
    head = 2 * vocab * width
    if stage == "ppo":
        passes = 2 * (3 * PPO_EPOCHS + 1) + 1 + 1 + reward_models
        return passes * body + (3 * PPO_EPOCHS + 1 + 1 + 1) * head * sum(responses)  # policy, reference, sampling
    passes = {"sft": 3, "reward": 3, "dpo": 4, "samples": 0}[stage]
    read = {"sft": tokens, "reward": 0, "dpo": sum(responses), "samples": 0}[stage]
    return float(passes * (body + head * read))


def fail(message: str):
    """End the process with one clear message on standard error and exit code 1."""
    raise SystemExit(f"error: {message}")


def plan(args: Args) -> dict:
    """{"micro_batch_size", "micro_batches" (of a device and batch), "sample_batch_size", "terms" {phase: {term:
    bytes}}, "peak" (bytes), "travel" (bytes of offloaded models that come to a device in an update), "travel_seconds",
    "host" (bytes of a machine's memory), "hours"} of a stage."""
    width, layers, _, vocab = SHAPES[args.model]
    batch, items, chosen = STAGES[args.stage]
    if batch % args.gpus:
        fail(f"a batch of {batch} does not split over {args.gpus} devices")
    share = batch // args.gpus or FORWARD_ROWS
    micro = args.micro_batch_size or min(chosen.get(args.model, 8), share)
    sample_rows = min(args.sample_batch_size or SAMPLE_ROWS.get(args.model, 32), share)
    trained, frozen = parameters(args.stage, width, layers, vocab, args.reward_models)
    language, reward = (tensors(width, layers, vocab, head) for head in (True, False))
    offload = args.stage == "ppo" and (args.model == "6.9b" if args.offload is None else args.offload)
    bits = 16 if args.zero else 32
    if args.stage == "samples":  # bfloat16 weights; a response is sampled, then scored
        phases = {"sampling and scoring": {"weights": 2.0 * frozen} | sampling_bytes(micro, width, layers, vocab)}
    else:
        states = state_bytes(trained, args.gpus, args.zero, bits, args.offload_optimizer)
        if not args.zero:  # autocast keeps a bfloat16 copy of what it casts
            states["bfloat16 weights"] = 2.0 * trained
        columns, logits = COLUMNS[args.stage]
        passes = [(micro, columns)] * (2 if args.stage == "ppo" else 1)  # policy and value model
        training = states | {"activations": activation_bytes(passes, width, layers, 2)}
        training["activations"] += mask_bytes(args.stage, micro, columns, layers, 2)
        training["logits"] = logit_bytes(args.stage, micro, logits, vocab)
        kept = {key: value for key, value in states.items() if key != "gradients"}
    if args.stage in EVALUATED:
        rows = micro if args.stage == "sft" else FORWARD_GROUP * micro
        columns, logits = EVALUATED[args.stage]
        in_pass = forward_bytes(rows, columns, width, 2) + mask_bytes(args.stage, rows, columns, 0, 2)
        looking = kept | {"pass": in_pass}
        phases = {"training": training, "evaluation": looking | {"logits": 10.0 * rows * logits * vocab}}
    travel = 0.0
    if args.stage == "ppo":
        reference = frozen_bytes(language, args.zero)
        one_reward_model = frozen_bytes(reward, args.zero)
        all_frozen = reference + args.reward_models * one_reward_model
        waiting = {} if offload else {"frozen models": all_frozen}
        passing = kept | {"frozen models": reference if offload else all_frozen}  # offloaded, one at a time
        passing["pass"] = forward_bytes(micro, columns, width, 2)
        passing["logits"] = 8.0 * micro * RESPONSE * vocab
        scoring = kept | {"frozen models": one_reward_model if offload else all_frozen}
        scoring["pass"] = forward_bytes(min(FORWARD_ROWS, share), columns, width, 2)
        phases = {
            "start": {"weights": 4.0 * trained} | waiting,  # they come in float32
            "sampling": kept | waiting | sampling_bytes(sample_rows, width, layers, vocab),
            "rollout passes": passing,
            "scoring": scoring,
            "training": training | waiting,
        }
        travel = all_frozen if offload else 0.0
    adam = 12 * trained / args.gpus if args.zero and args.offload_optimizer else 0.0  # with the float32 weights
    processes = min(args.gpus, args.gpus_per_machine)
    copy = trained * bits / 8
    arithmetic = item_flop(args.stage, args.model, args.reward_models) * items / (args.gpus * args.flops * 1e12)
    updates = items // batch if batch else 0
    travel_seconds = travel / (args.link * 1e9)
    return {
        "micro_batch_size": micro,
        "micro_batches": -(-batch // args.gpus // micro) or 1,
        "sample_batch_size": sample_rows,
        "terms": phases,
        "peak": max(sum(terms.values()) for terms in phases.values()) + args.reserve * 1e9,
        "travel": travel,
        "travel_seconds": travel_seconds,
        "host": host_bytes(loaded_models(args, offload), adam, copy, processes),
        "hours": (arithmetic + travel_seconds * updates) / 3600,
    }


def loaded_models(args: Args, offload: bool) -> list[tuple[float, float]]:
    """For host_bytes the models of a stage in the order in which they are loaded. Only offloaded ones stay."""
    width, layers, _, vocab = SHAPES[args.model]
    language, reward = (tensors(width, layers, vocab, head) for head in (True, False))
    float32 = {}
    pinned = {}
    for name, found in (("language", language), ("reward", reward)):
        float32[name] = 4.0 * sum(numbers * count for _, numbers, count in found)
        pinned[name] = frozen_bytes(found, args.zero, pinned=True) if offload else 0.0
    frozen_reward, reference = (float32["reward"], pinned["reward"]), (float32["language"], pinned["language"])
    policy, value_model = (float32["language"], 0.0), (float32["reward"], 0.0)
    return {
        "sft": [policy],
        "reward": [value_model],
        "dpo": [policy],  # the reference has gone before
        "ppo": [*[frozen_reward] * args.reward_models, reference, policy, value_model],
        "samples": [policy, *[value_model] * args.reward_models],
    }[args.stage]


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


def fitting(args: Args) -> tuple[str, Args] | None:
    """The first of WAYS that fits the device, and `args` with it: the largest micro-batch, and where nothing else fits
    fewer episodes sampled at a time. None if no way does."""
    rows = [plan(args)["sample_batch_size"]]
    while args.stage == "ppo" and rows[-1] > 1:
        rows.append(rows[-1] // 2)
    for way, changes in WAYS.items():
        for sample_rows in rows:
            tried = replace(args, sample_batch_size=sample_rows, **changes)
            size = largest_micro_batch(tried)
            if size:
                return way, replace(tried, micro_batch_size=size)
    return None


def words(found: tuple[str, Args] | None) -> str:
    """What `fitting` finds, for a cell of a table."""
    if found is None:
        return "no"
    way, args = found
    chosen = plan(replace(args, sample_batch_size=None))["sample_batch_size"]
    fewer = f", --sample-batch-size {args.sample_batch_size}" if args.sample_batch_size < chosen else ""
    return f"{args.micro_batch_size}, {way}{fewer}"


def table() -> str:
    """Markdown: memory and time of every stage and size on 8 GPUs of 80 GB, and what one of 80 and of 24 GB takes."""
    text = "| stage | model | micro-batch | GB per GPU, 8 with ZeRO-2 | largest micro-batch in 80 GB | hours |"
    text += " GB of the machine | GB to a GPU per update |"
    text += " one GPU of 80 GB: micro-batch | one of 24 GB |\n" + "|---" * 10 + "|\n"
    for stage in STAGES:
        for model in PAPER:
            args = Args(stage=stage, model=model)
            found = plan(args)
            hours = f"{found['hours']:.2f}" if stage != "samples" else ""
            travel = f"{found['travel'] / 1e9:.0f}" if found["travel"] else ""
            cells = [stage, model, found["micro_batch_size"], f"{found['peak'] / 1e9:.0f}"]
            cells += [largest_micro_batch(args) or "none", hours, f"{found['host'] / 1e9:.0f}", travel]
            cells += [words(fitting(replace(args, gpus=1, gpu_memory=memory))) for memory in (80, 24)]
            text += f"| {' | '.join(map(str, cells))} |\n"
    return text


# ==== the study at scale ==========================================================================
# Assumptions, none of them measured here.

SEEDS = 4
PEAK = 989e12  # FLOP/s of an H100 in bfloat16, dense
SHARES = (0.3, 0.5)  # of the peak, that arithmetic keeps up
MEMORY_SPEED = 3.35e12 * 0.5  # bytes/s: half of what an H100's memory can, for decoding
WITHIN = 300e9  # bytes/s that a device sends in an all-reduce within a machine (NVLink: 450 GB/s each way)
BETWEEN = 40e9  # the same between machines (one network card of 400 Gb/s, 50 GB/s, for each device)
# bytes of an episode that every process gathers: tokens, two masks, four float32 numbers a token, three numbers a row
GATHERED = (QUERY + RESPONSE) * 8 + 2 * RESPONSE + 4 * 4 * RESPONSE + 20
TRAINING = ("sft", "reward", "dpo", "ppo")


def run_of_study(stage: str, model: str, gpus: int) -> tuple[str, Args] | None:
    """The first of WAYS in which a run fits GPUs of 80 GB, and the run in it: the script's micro-batch, or the largest
    that fits. None if none does."""
    args = Args(stage, model=model, gpus=gpus)
    found = fitting(args)
    if found is None:
        return None
    way, fits = found
    return way, replace(fits, micro_batch_size=min(fits.micro_batch_size, plan(args)["micro_batch_size"]))


def decoding_bytes(args: Args) -> dict[str, float]:
    """Bytes that a device reads in an update's decoding: for each token the weights once for a group of rows, and the
    keys and values of all columns of the static cache for each row. The embedding is looked up, the head is read."""
    width, layers, _, vocab = SHAPES[args.model]
    share = STAGES["ppo"][0] // args.gpus
    groups = -(-share // plan(args)["sample_batch_size"])
    weights = 2 * body_parameters(width, layers, vocab)
    cached = (QUERY + RESPONSE) * key_value_bytes(width, layers)
    return {"weights": float(RESPONSE * groups * weights), "keys and values": float(RESPONSE * share * cached)}


def exchange_bytes(args: Args) -> float:
    """Bytes that a device sends in an update. DDP: an all-reduce of float32 gradients at every optimiser step, each
    number twice. DeepSpeed's ZeRO-2: an all-reduce in bfloat16 at every micro-batch, since no device keeps all
    gradients (allreduce_and_scatter in its stage_1_and_2.py, 0.19.8), and the new weights at every step."""
    width, layers, _, vocab = SHAPES[args.model]
    trained, _ = parameters(args.stage, width, layers, vocab, args.reward_models)
    steps = PPO_EPOCHS if args.stage == "ppo" else 1
    numbers = 2 * plan(args)["micro_batches"] + 1 if args.zero else 2
    size = 2 if args.zero else 4
    return steps * numbers * size * trained * (args.gpus - 1) / args.gpus


def update_seconds(args: Args, share: float) -> dict[str, float]:
    """Seconds of an update, one thing after the other: {"arithmetic", "exchange", "decoding", "travel"}. share: of the
    peak, that arithmetic keeps up."""
    batch = STAGES[args.stage][0]
    flop = item_flop(args.stage, args.model, args.reward_models) * batch
    speed = WITHIN if args.gpus <= args.gpus_per_machine else BETWEEN
    return {
        "arithmetic": flop / (args.gpus * PEAK * share),
        "exchange": exchange_bytes(args) / speed,
        "decoding": sum(decoding_bytes(args).values()) / MEMORY_SPEED if args.stage == "ppo" else 0.0,
        "travel": plan(args)["travel_seconds"],
    }


def study_hours(model: str, gpus: int, share: float) -> dict[str, float] | None:
    """Hours of a run of each stage on this many devices; None if one of the stages fits in no way."""
    hours = {}
    for stage in TRAINING:
        found = run_of_study(stage, model, gpus)
        if found is None:
            return None
        batch, items, _ = STAGES[stage]
        hours[stage] = sum(update_seconds(found[1], share).values()) * (items // batch) / 3600
    return hours


def one_after_another(hours: dict[str, float]) -> float:
    """Hours of all runs of a size, 5 for each seed: PPO twice, the second with whitened rewards."""
    return SEEDS * (hours["sft"] + hours["reward"] + hours["dpo"] + 2 * hours["ppo"])


def side_by_side(hours: dict[str, float]) -> float:
    """Hours with two places for each seed: SFT, then reward and DPO at a time, then both PPOs at a time."""
    return hours["sft"] + max(hours["reward"], hours["dpo"]) + hours["ppo"]


def percent(share: float) -> str:
    """A share as a whole number of percent."""
    return f"{100 * share:.0f} %"


def plain_table(header: list[str], rows: list[list]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def fits_table() -> str:
    """What each run of the study needs on 1, 8 and 64 GPUs."""
    rows = []
    for model in PAPER:
        for gpus in (1, 8, 64):
            cells, found = [], []
            for stage in TRAINING:
                run = run_of_study(stage, model, gpus)
                cells.append(words(run))
                found += [plan(run[1])] if run else []
            peak = max(one["peak"] for one in found) / 1e9
            host = max(one["host"] for one in found) / 1e9
            rows.append([model, gpus, *cells, f"{peak:.0f}", f"{host:.0f}"])
    header = ["model", "GPUs of a run", *TRAINING, "GB of a GPU, at most", "GB of a machine, at most"]
    return plain_table(header, rows)


def hours_table() -> str:
    """The study's hours on 1, 8 and 64 GPUs, a size at a time and all of them."""
    ways = [
        ("1", 1, one_after_another),
        ("8, a run at a time", 8, one_after_another),
        ("64, a run at a time", 64, one_after_another),
        ("64, 8 runs of 8", 8, side_by_side),
    ]
    rows = []
    for name, gpus, together in ways:
        cells = []
        for share in SHARES:
            sizes = [study_hours(model, gpus, share) for model in PAPER]
            hours = [together(found) if found else None for found in sizes]
            cells += [f"{one:.1f}" if one else "does not fit" for one in hours]
            cells.append(f"{sum(hours):.1f}" if all(hours) else "does not fit")
        rows.append([name, *cells])
    header = ["GPUs"]
    for share in SHARES:
        header += [f"{name}, {percent(share)}" for name in (*PAPER, "all three")]
    return plain_table(header, rows)


def update_table() -> str:
    """An update of PPO, term by term."""
    rows = []
    for model in PAPER:
        for gpus in (1, 8, 64):
            run = run_of_study("ppo", model, gpus)
            if run is None:
                continue
            low, high = (update_seconds(run[1], share) for share in SHARES)
            larger = replace(run[1], micro_batch_size=largest_micro_batch(run[1]))
            exchange = update_seconds(larger, SHARES[0])["exchange"]
            cells = [f"{seconds['arithmetic']:.2f}" for seconds in (low, high)]
            cells += [f"{high[term]:.2f}" for term in ("decoding", "travel", "exchange")]
            cells += [f"{larger.micro_batch_size}: {exchange:.2f}", *(f"{sum(x.values()):.1f}" for x in (low, high))]
            rows.append([model, gpus, run[1].micro_batch_size, *cells])
    header = ["model", "GPUs", "micro-batch", "arithmetic, 30 %", "50 %", "decoding", "travel", "exchange"]
    header += ["exchange with the largest micro-batch", "sum, 30 %", "50 %"]
    return plain_table(header, rows)


def limits(model: str) -> dict[str, str]:
    """What stops a run of PPO from scaling, with its number; two numbers are those of 8 and of 64 GPUs."""
    runs = [run_of_study("ppo", model, gpus)[1] for gpus in (8, 64)]
    seconds = [update_seconds(run, SHARES[1]) for run in runs]
    sums = [sum(one.values()) for one in seconds]
    batch = STAGES["ppo"][0]
    gathered = GATHERED * batch
    read = [decoding_bytes(run) for run in runs]
    micro, pairs = (run_of_study(stage, model, 64)[1].micro_batch_size for stage in ("ppo", "reward"))
    width, layers, _, vocab = SHAPES[model]
    trained, _ = parameters("ppo", width, layers, vocab, 1)

    def shares(term: str) -> str:
        return ", ".join(percent(one[term] / total) for one, total in zip(seconds, sums, strict=True))

    return {
        "gathering the whole batch: MB an update": f"{gathered / 1e6:.1f}",
        "the same between machines, ms": f"{gathered / BETWEEN * 1e3:.2f}",
        "travel of frozen models: share of an update": shares("travel"),
        "episodes of a device": ", ".join(str(batch // run.gpus) for run in runs),
        "weights' share of what decoding reads": ", ".join(percent(x["weights"] / sum(x.values())) for x in read),
        "decoding: share of an update": shares("decoding"),
        "decoding: times faster on 64 than on 8": f"{seconds[0]['decoding'] / seconds[1]['decoding']:.1f}",
        "tokens of a micro-batch on 64: PPO's": str(micro * TOKENS["ppo"]),
        "tokens of a micro-batch on 64: reward.py's": str(pairs * TOKENS["reward"]),
        "exchange: GB sent by a device at an optimiser step": ", ".join(
            f"{exchange_bytes(run) / PPO_EPOCHS / 1e9:.0f}" for run in runs
        ),
        "exchange: share of an update": shares("exchange"),
        "GB of a device's own gradients in bfloat16": f"{2 * trained / 1e9:.0f}",
        "an update: times faster on 64 than on 8": f"{sums[0] / sums[1]:.1f}",
    }


def limits_table() -> str:
    """The limits of every size."""
    found = [limits(model) for model in PAPER]
    return plain_table(["PPO, 50 % of the peak", *PAPER], [[name, *(one[name] for one in found)] for name in found[0]])


def serial_table() -> str:
    """What is serial in the study: one seed's SFT, reward model and PPO, on 8 GPUs."""
    rows = []
    for model in PAPER:
        for share in SHARES:
            hours = study_hours(model, 8, share)
            serial = hours["sft"] + hours["reward"] + hours["ppo"]
            cells = [f"{hours[stage]:.2f}" for stage in TRAINING]
            rows.append([model, percent(share), *cells, f"{serial:.1f}", f"{side_by_side(hours):.1f}"])
    return plain_table(["model", "share of the peak", *TRAINING, "SFT, reward, PPO", "the study on 64"], rows)


def scale() -> str:
    """Markdown: the whole study on 1, 8 and 64 H100s, and where it stops scaling."""
    hours = {share: {model: study_hours(model, 8, share) for model in PAPER} for share in SHARES}
    together = [sum(side_by_side(one) for one in hours[share].values()) for share in SHARES]
    over_64 = [sum(one_after_another(study_hours(model, 64, share)) for model in PAPER) for share in SHARES]
    faster = "8 runs of 8 GPUs side by side are" if together[0] < over_64[0] else "one run at a time over all 64 is"
    against, longest = [], []
    for share, pair in zip(SHARES, zip(together, over_64, strict=True), strict=True):
        times = f"{max(pair) / min(pair):.1f} times"
        against.append(f"- at {percent(share)} of the peak {min(pair):.0f} h against {max(pair):.0f} h, {times}")
        most = max(side_by_side(one) for one in hours[share].values())
        longest.append(f"- at {percent(share)} of the peak {most:.1f} h")
    ridge = PEAK * SHARES[1] / MEMORY_SPEED  # tokens whose 2 FLOP a weight take as long as reading its 2 bytes
    slow = update_seconds(run_of_study("ppo", "6.9b", 8)[1], SHARES[1])
    exchange, update = f"{slow['exchange']:.0f}", f"{sum(slow.values()):.0f}"
    line = "\n"
    assumptions = [
        ["arithmetic", f"{percent(SHARES[0])} and {percent(SHARES[1])} of {PEAK / 1e12:.0f} TFLOP/s (bfloat16, dense)"],
        ["tokens of an item, padding not counted", ", ".join(f"{stage} {TOKENS[stage]}" for stage in TRAINING)],
        ["the head", "counted at the tokens where a loss or a sample reads it"],
        ["decoding", f"bound by bytes, at half of 3.35 TB/s; {RESPONSE} steps in every update"],
        ["what a step reads", f"the weights once a group, keys and values of {QUERY + RESPONSE} columns a row"],
        ["page-locked memory to a GPU", f"{Args().link:g} GB/s (PCIe 5 that neighbours share)"],
        ["all-reduce within a machine of 8", f"{WITHIN / 1e9:.0f} GB/s sent by each GPU (NVLink)"],
        ["all-reduce between machines", f"{BETWEEN / 1e9:.0f} GB/s sent by each GPU (a card of 400 Gb/s each)"],
        ["overlap", "none: arithmetic, decoding, travel and exchange come one after the other"],
        ["memory", f"80 GB a GPU, of which {Args().reserve:g} GB for what is not counted; one reward model"],
        [
            "not counted",
            "Adam's step in the machine's memory (zero2_offload), evaluation, saving, start, data, samples",
        ],
    ]
    return f"""# The study at scale, by the arithmetic of benchmark/plan.py: nothing here was run on a GPU

`python benchmark/plan.py --scale` writes this page. Every speed on it is an assumption: nobody has measured which share
of the peak these scripts keep up on a GPU.

{plain_table(["assumption", "value"], assumptions)}
## What a run needs

The configuration is the first that fits of plain (one process, or DDP), ZeRO-2, zero2_offload, and that with --offload.
Before it stands the micro-batch: the script's, or the largest that fits. At 6.9b PPO's frozen models are offloaded by
default.

{fits_table()}
## Hours of the study

A size is 20 runs: SFT, reward model, PPO, PPO with whitened rewards and DPO, with {SEEDS} seeds. "A run at a time" adds
them up. "8 runs of 8" gives each seed two places of 8 GPUs: SFT, then reward model and DPO, then both PPOs. The sizes
follow each other.

{hours_table()}
On 64 GPUs **{faster} faster** for the study of all sizes:

{line.join(against)}

One run at a time would draw level if an update were about 8 times faster on 64 GPUs than on 8. The last line of the
limits says what it is.

## An update of PPO, in seconds

{update_table()}
## Where a run stops scaling

Two numbers are those of 8 and of 64 GPUs.

{limits_table()}
- **Exchange of gradients** is the first limit. Under ZeRO-2 no device keeps all gradients. So DeepSpeed 0.19.8 sums
  them over the devices at every micro-batch, not at every optimiser step (`allreduce_and_scatter` in its
  `stage_1_and_2.py`: read, not measured). At 6.9b on 8 GPUs that is {exchange} s of an update of {update} s.
  A larger micro-batch is the remedy where memory allows it: the table of an update has its number. DeepSpeed's
  `coalesce_grad_reduction` would sum once a step, and hold a device's own gradients until then.
- **Decoding** reads all weights for each token, however few rows a device has. With 8 rows it is bound by the weights.
- **Travel** of the frozen models takes the same time on any number of GPUs.
- **Micro-batches** have a floor. With fewer than {ridge:.0f} tokens a pass is bound by reading the weights, at
  {percent(SHARES[1])} of the peak and half of the memory's speed. A mean episode of {TOKENS["ppo"]} tokens goes through
  a model in one pass, so even a micro-batch of a single episode is above the floor.
- **Gathering the batch** costs nothing: every process holds tokens and numbers of all episodes, no hidden states.
- **Batches** end it: reward.py and dpo.py split over 64 GPUs at most, sft.py over 128, ppo.py over 512.

## The Slurm array

`benchmark/submit.sh` submits an array for each stage and size, whose tasks are the seeds. Seeds, sizes, both PPOs, and
DPO beside the reward model need not wait for each other. Serial is one seed's SFT, reward model, PPO. Hours on 8 GPUs:

{serial_table()}
Three sizes of {SEEDS} seeds with two places are {3 * SEEDS * 2} runs at a time on {3 * SEEDS * 2 * 8} GPUs. The study
then takes as long as 6.9b alone:

{line.join(longest)}

More GPUs help only within a run, where the limits above hold.
"""


def main(args: Args):
    if args.table:
        text = "# Memory and time by the arithmetic of benchmark/plan.py: nothing here was run on a GPU\n\n" + table()
        Path(args.output_dir, "plan.md").write_text(text, encoding="utf-8")
        print(text)
        return
    if args.scale:
        text = scale()
        Path(args.output_dir, "scale.md").write_text(text, encoding="utf-8")
        print(text)
        return
    if args.stage is None:
        fail("which stage? sft, reward, dpo, ppo or samples; or --table, --scale for all")
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
    if found["travel"]:
        seconds = f"{found['travel_seconds']:.2f} s at {args.link:g} GB/s (an assumption)"
        print(f"travel: {found['travel'] / 1e9:.1f} GB of offloaded models to each device in an update, {seconds}")
    else:
        print("travel: none, no model is offloaded")
    print(f"a machine's memory: {found['host'] / 1e9:.0f} GB (to load the models and to save the trained ones)")
    if args.stage != "samples":  # whose time is that of reading weights, not of arithmetic
        print(
            f"about {found['hours']:.1f} h for {items:,} items at {args.flops:g} TFLOP/s, without evaluation and saving"
        )


if __name__ == "__main__":
    main(tyro.cli(Args))
