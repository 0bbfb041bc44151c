"""The parts of benchmark/speed/gpu.sh, one at a time: `python benchmark/speed/gpu.py PART --output-dir FOLDER`.

    data                    rows of about real length and models with random weights, in data/gpu
    device                  versions; rate of a matrix product and of copying memory -> device.csv
    correctness             a tiny model: ratios before a first step, micro-batch sizes, kill and resume, sampled tokens
                            beside the CPU's -> correctness.csv
    decoding                one token for 32 to 512 rows -> decoding.csv
    ppo, sft, reward, dpo   the stage scripts: speed, share of the matrix product's rate, memory -> stages.csv
    trl                     TRL's trainers but PPO's, which takes minutes, on the same rows, where
                            benchmark/speed/peers.sh has put them -> trl.csv
    page                    all of it as Markdown, beside what the arithmetic asks for -> page.md; needs no GPU

Needs no Hub. Every part but `page` ends with writing the page. A part fails, with exit code 1 and a line on the page,
when a number is not finite or when a stage's run fails or is cut off at --limit. What a run has written until then is
in the table.
"""

import json
import math
import os
import platform
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # ppo.py
import pandas
import throughput
import torch
import transformers
import tyro
from eval_helpers import markdown  # throughput puts it on the path
from safetensors.torch import load_file
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import ppo

ROOT = Path(__file__).resolve().parents[2]
TINY = (64, 2, 4, 600)  # width, layers, heads, words
QUERY, RESPONSE = 512, 53  # columns that decoding takes
# batch and micro-batch of a stage, at 1b on 80 GB and tiny
SIZES = {
    "ppo": ((512, 16), (16, 4)),
    "sft": ((128, 16), (16, 4)),
    "reward": ((64, 32), (16, 4)),
    "dpo": ((64, 32), (16, 4)),
}
UPDATES = {"ppo": (2, 1), "sft": (4, 1), "reward": (4, 1), "dpo": (4, 1)}  # of a run, and those that do not count
# training of an update of 512 episodes with queries of 512 tokens, and the seconds that the whole update may take
TRAINING_PFLOP, UPDATE_SECONDS = 11.5, 30
SPARE = 15  # seconds of a part's limit that are not for its run: Python's start, the arithmetic, the page


@dataclass
class Args:
    part: Annotated[
        Literal["data", "device", "correctness", "decoding", "ppo", "sft", "reward", "dpo", "trl", "page"],
        tyro.conf.Positional,
    ]
    """what to do"""
    output_dir: str
    """folder of the tables"""
    device: Literal["cpu", "cuda"] = "cuda"
    """where"""
    tiny: bool = False
    """a model of width 64, few rows"""
    work: str = "data/gpu"
    """folder of data and models"""
    limit: int = 600
    """seconds that the part may take"""


# ---- data, device ---------------------------------------------------------------------------------------------------


def settings(args: Args, stage: str, tiny: bool) -> tuple[throughput.Args, Path]:
    """What throughput.py is asked for a stage, and the folder of its data and models."""
    throughput.SHAPES[args.device] = TINY if tiny else (2048, 16, 8, 50304)
    batch, micro = SIZES[stage][tiny]
    updates, warmup = UPDATES[stage]
    asked = {"stage": stage, "device": args.device, "batch_size": batch, "micro_batch_size": micro}
    asked |= {"updates": updates, "warmup": warmup, "forward_batch_size": 32, "raw": "nowhere"}
    return throughput.Args(**asked), ROOT / args.work / ("tiny" if tiny else "1b")


def data(args: Args):
    for tiny in {True, args.tiny}:
        asked, work = settings(args, "ppo", tiny)
        if not (work / "reward").exists():
            work.mkdir(parents=True, exist_ok=True)
            throughput.make_work(asked, work)


def synchronise(device: str):
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(function, device: str, repeats: int) -> float:
    """Median seconds of a call, after three that do not count."""
    taken = []
    for _ in range(repeats + 3):
        synchronise(device)
        start = time.perf_counter()
        function()
        synchronise(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[3:])


def device(args: Args):
    """The rate of a product of square bfloat16 matrices (float32 on a CPU), and of copying memory, read and written."""
    size, elements = (512, 2**22) if args.tiny else (8192, 2**30)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=args.device, dtype=dtype) for _ in range(2))
    source = torch.randn(elements, device=args.device, dtype=dtype)
    target = torch.empty_like(source)
    rate = 2 * size**3 / seconds_of(lambda: a @ b, args.device, 20)
    bandwidth = 2 * source.nbytes / seconds_of(lambda: target.copy_(source), args.device, 20)
    row = {"machine": throughput.machine(args.device), "python": platform.python_version()}
    row |= {"transformers": transformers.__version__, "TFLOP/s of a product": f"{rate / 1e12:.4g}"}
    write(args, "device", [row | {"GB/s of a copy": f"{bandwidth / 1e9:.4g}", "command": shlex.join(sys.argv)}])


# ---- correctness ----------------------------------------------------------------------------------------------------


def tiny_run(args: Args, name: str, *flags, resume: bool = False, kill_after: int = 0) -> tuple[Path, list[dict]]:
    """A run of ppo.py on the tiny model, its folder and metrics; `kill_after`: killed after so many updates."""
    _, work = settings(args, "ppo", True)
    folder = work / "runs" / name
    if not resume:
        shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "ppo.py", "--model", "tiny", "--output-dir", folder, "--sft-model-path", work / "model"]
    command += ["--reward-model-path", work / "reward", "--dataset", work / "sft", "--batch-size", 16]
    command += ["--total-episodes", 64, "--learning-rate", 1e-3, "--eval-rows", 8, "--save-every", 1, *flags]
    command += ["--resume"] * resume
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".log").open("w") as log:
        child = subprocess.Popen([*map(str, command)], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        while kill_after and child.poll() is None:
            if len(list(folder.glob("checkpoints/update_??????"))) and len(metrics_of(folder)) >= kill_after:
                child.send_signal(signal.SIGKILL)
                kill_after = 0
            time.sleep(0.01)
        if child.wait() not in (0, -signal.SIGKILL):
            raise SystemExit(
                f"error: {shlex.join(map(str, command))}\n{folder.with_suffix('.log').read_text()[-2000:]}"
            )
    lines = metrics_of(folder)
    check_metrics(args, f"correctness, {name}", lines)
    return folder, lines


def metrics_of(folder: Path) -> list[dict]:
    """The lines of metrics.jsonl; one that was not written to its end does not count."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def check_metrics(args: Args, name: str, lines: list[dict]):
    for line in lines:
        for key, value in line.items():
            if not math.isfinite(value):
                report(args, f"{name}: {key} of update {line['update']} is {value}")


def report(args: Args, failure: str):
    """Add a line to what failed: the part ends with exit code 1, and the page shows the line."""
    with Path(args.output_dir, "failed.txt").open("a") as file:
        file.write(failure + "\n")
    print(failure, flush=True)


def failures(args: Args) -> list[str]:
    file = Path(args.output_dir, "failed.txt")
    return file.read_text().splitlines() if file.exists() else []


def largest(values) -> float:
    """The largest number, or nan if one is nan: Python's max() may pass over it."""
    return torch.tensor(list(values), dtype=torch.float64).max().item()


def correctness(args: Args):
    rows = []

    def tell(what: str, found, asked: str):
        rows.append({"what": what, "found": found if isinstance(found, str) else f"{found:.3g}", "asked": asked})
        write(args, "correctness", rows)
        if not math.isfinite(float(found)):
            report(args, f"{what}: {found}")

    _, lines = tiny_run(args, "bf16", "--mixed-precision", "bf16", "--micro-batch-size", 4)
    tell("bfloat16: largest abs(ratio - 1) before a first step", most(lines, "policy/first_ratio_deviation"), "0")
    tell("bfloat16: KL of the first update", lines[0]["objective/kl"], "0")
    tell("bfloat16: KL of the last update (it moves)", lines[-1]["objective/kl"], "above 0")
    for kind in ("mean", "max"):
        key = f"policy/sampling_logprob_difference_{kind}"
        tell(f"bfloat16: {key}, largest of the updates", most(lines, key), "rounding")

    flags = ["--mixed-precision", "no", "--micro-batch-size"]
    whole, lines = tiny_run(args, "float32", *flags, 4)
    tell("float32: largest abs(ratio - 1) before a first step", most(lines, "policy/first_ratio_deviation"), "0")
    _, others = tiny_run(args, "float32_micro", *flags, 8, "--sample-batch-size", 5)
    keys = ("objective/score", "objective/kl", "loss/value", "grad_norm", "objective/entropy")
    pairs = [(a[key], b[key]) for a, b in zip(lines, others, strict=True) for key in keys]
    differences = [abs(a - b) / max(abs(a), 1e-3) for a, b in pairs]
    what = "float32: micro-batches of 4 and 8, largest relative difference of a metric"
    tell(what, largest(differences), "below 1e-3")

    tiny_run(args, "killed", *flags, 4, kill_after=2)
    resumed, _ = tiny_run(args, "killed", *flags, 4, resume=True)
    weights = [load_file(folder / "model" / "model.safetensors") for folder in (whole, resumed)]
    differences = [(a - b).abs().max().item() for a, b in zip(*(x.values() for x in weights), strict=True)]
    said = resumed.with_suffix(".log").read_text()
    update = int(said.partition(" continues after update ")[2].split()[0])
    what = f"killed, resumed from update {update} of 4: largest difference of a weight"
    tell(what, largest(differences), "0 on a CPU")

    same, count = same_tokens(args)
    tell(
        f"float32: rows of {count} whose tokens are those of the same loop on the CPU",
        f"{same}",
        f"{count}, but for ties",
    )


def most(lines: list[dict], key: str) -> float:
    return largest(line[key] for line in lines)


def same_tokens(args: Args) -> tuple[int, int]:
    """Rows whose sampled tokens are the same on the device and on the CPU, in float32, of how many."""
    _, work = settings(args, "ppo", True)
    tokenizer = ppo.load_tokenizer(str(work / "model"))
    model = ppo.load_policy(str(work / "model"), tokenizer).eval()
    queries, keys = random_queries(64, 96, tokenizer.pad_token_id), ppo.noise_keys(1, 1, list(range(64)))
    found = []
    for where in ("cpu", args.device):
        cache = ppo.KeyValueCache(model.config, 96 + RESPONSE)
        model.to(where)
        tokens, logprobs = ppo.generate(model, queries.to(where), tokenizer, RESPONSE, 0.7, keys.to(where), cache)
        if not logprobs.isfinite().all():
            report(args, f"correctness: log-probabilities of tokens sampled in float32 on {where} are not finite")
        found.append(tokens.cpu())
    return int((found[0] == found[1]).all(1).sum()), len(queries)


def random_queries(rows: int, width: int, pad_id: int) -> torch.Tensor:
    """Left-padded queries (rows, width) of words 1 to pad_id - 1, a quarter of the width to all of it long."""
    queries = torch.randint(1, pad_id, (rows, width), generator=torch.Generator().manual_seed(1))
    lengths = torch.linspace(width // 4, width, rows).long()
    return queries.masked_fill(torch.arange(width) < width - lengths[:, None], pad_id)


# ---- decoding -------------------------------------------------------------------------------------------------------


def step_bytes(rows: int, columns: int, shape: tuple[int, int, int, int], size: int) -> float:
    """What one decoding step has to read: every weight but the embedding's, and keys and values of all columns of the
    static cache, `size` bytes a number."""
    width, layers, _, words = shape
    weights = 12 * layers * width**2 + width * words
    return float(size * (weights + 2 * layers * width * rows * columns))


def decoding(args: Args):
    """Measure milliseconds of a step of generate()."""
    shape = TINY if args.tiny else (2048, 16, 8, 50304)
    query = 96 if args.tiny else QUERY
    bandwidth = float(read(args, "device")[0]["GB/s of a copy"]) * 1e9
    width, layers, heads, words = shape
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": words}
    config = GPTNeoXConfig(**sizes, intermediate_size=4 * width, rotary_pct=0.25, attn_implementation="sdpa")
    precision = "bf16" if args.device == "cuda" else "no"
    state = SimpleNamespace(deepspeed_plugin=None)
    accelerator = SimpleNamespace(device=torch.device(args.device), state=state, mixed_precision=precision)
    torch.manual_seed(1)
    with torch.device(args.device):
        model = GPTNeoXForCausalLM(config).eval()
    model = ppo.frozen_model(accelerator, model, False)  # matrices in bfloat16: nothing is cast in a captured step
    tokenizer = ppo.load_tokenizer(str(settings(args, "ppo", args.tiny)[1] / "model"))
    ids = torch.arange(words, device=args.device)
    model.register_buffer("banned", (ids == tokenizer.pad_token_id) | (ids >= len(tokenizer)))  # as load_policy does
    tokenizer.eos_token = tokenizer.pad_token  # which is never sampled: every row takes all steps
    table = []
    for count in (8, 16) if args.tiny else (32, 128, 256, 512):
        queries = random_queries(count, query, tokenizer.pad_token_id).to(args.device)
        keys = ppo.noise_keys(1, 1, list(range(count))).to(args.device)
        cache = ppo.KeyValueCache(model.config, query + RESPONSE)

        def generate(length: int, cache=cache, queries=queries, keys=keys):
            cache.reset()
            with torch.autocast(args.device, torch.bfloat16, enabled=precision == "bf16"):
                return ppo.generate(model, queries, tokenizer, length, 0.7, keys, cache)

        prefill = seconds_of(lambda: generate(1), args.device, 3)
        _, logprobs = generate(RESPONSE)
        if not logprobs.isfinite().all():
            report(args, f"decoding: log-probabilities of tokens sampled for {count} rows are not finite")
        whole = seconds_of(lambda: generate(RESPONSE), args.device, 1 if args.tiny else 3)
        seconds = (whole - prefill) / (RESPONSE - 1)
        needed = step_bytes(count, query + RESPONSE, shape, 2 if args.device == "cuda" else 4)
        row = {"rows": count, "ms a step": f"{1000 * seconds:.3f}", "tokens/s": f"{count / seconds:.0f}"}
        row |= {"share of the bandwidth": f"{needed / seconds / bandwidth:.2f}", "asked": "0.5 or more"}
        table.append(row | {"prefill ms": f"{1000 * prefill:.1f}"})
        write(args, "decoding", table)


# ---- stages ---------------------------------------------------------------------------------------------------------


def run_until(command: list[str], log: Path, seconds: float) -> tuple[int | None, float]:
    """Run a command, its output in a file. Returns its exit code, None if it was cut off after so many seconds, and its
    peak memory in GiB."""
    start = time.monotonic()
    with log.open("w") as output:
        child = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    timer = threading.Timer(seconds, child.kill)
    timer.start()
    _, status, usage = os.wait4(child.pid, 0)
    timer.cancel()
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGKILL and time.monotonic() - start >= seconds:
        code = None
    return code, throughput.peak_memory(command, log.read_text(), usage)


def timings(lines: list[dict], warmup: int) -> dict[str, float]:
    """Mean seconds of an update, and for PPO of its phases and the tokens of a response, of a run's metrics. The first
    `warmup` updates do not count, unless there are no others."""
    lines = [line for line in lines if line["update"]]
    counted = lines[warmup:] or lines
    before = lines[-len(counted) - 1]["time/total"] if len(counted) < len(lines) else 0.0
    found = {"seconds": (counted[-1]["time/total"] - before) / len(counted)}
    if "time/rollout" in counted[0]:
        sampling, rollout, update, tokens = (
            statistics.fmean(line[key] for line in counted)
            for key in ("time/sampling", "time/rollout", "time/update", "response/length")
        )
        found |= {"sampling": sampling, "scoring": rollout - sampling, "update": update - rollout, "tokens": tokens}
    return found


def stage(args: Args, name: str):
    asked, work = settings(args, name, args.tiny)
    folder = work / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = throughput.stage_command(asked, work) + ["--sample-batch-size", "256"] * (name == "ppo")
    code, peak = run_until(command, folder.with_suffix(".log"), args.limit - SPARE)
    lines = metrics_of(folder)
    check_metrics(args, name, lines)
    done = sum(line["update"] > 0 for line in lines)
    if code is None:
        report(args, f"{name} was cut off after {args.limit - SPARE} s with {done} of {asked.updates} updates")
    elif code:
        print(folder.with_suffix(".log").read_text()[-2000:])
        report(args, f"{name}.py ended with exit code {code} after {done} of {asked.updates} updates")
    if not done:
        return
    found = timings(lines, asked.warmup)
    rate = float(read(args, "device")[0]["TFLOP/s of a product"]) * 1e12
    tokens, operations = throughput.work_done(asked, work, found.get("tokens", 0.0))
    seconds = found["seconds"]
    passes = 3 if name == "dpo" else throughput.PASSES[name]  # the reference's pass is before the updates
    flop = passes * operations * asked.batch_size
    row = {"stage": name, "items of an update": asked.batch_size, "micro-batch": asked.micro_batch_size}
    row |= {"updates": f"{done} of {asked.updates}", "seconds": f"{seconds:.2f}"}
    row |= {"items/s": f"{asked.batch_size / seconds:.2f}"}
    row |= {"tokens/s": f"{asked.batch_size * tokens / seconds:.0f}", "PFLOP of training": f"{flop / 1e15:.3g}"}
    row["share of a matrix product in training"] = f"{flop / found.get('update', seconds) / rate:.2f}"
    row |= {"peak GiB": f"{peak:.2f}"}
    row["phases, s"] = ", ".join(f"{x} {found[x]:.2f}" for x in throughput.PHASES if x in found)
    row["asked"] = ""
    if name == "ppo":
        row["phases, s"] += f"; abs(ratio - 1) {most(lines, 'policy/first_ratio_deviation'):.3g}"
        row["phases, s"] += f", first KL {lines[0]['objective/kl']:.3g}"
        row["asked"] = f"at most {UPDATE_SECONDS * flop / 1e15 / TRAINING_PFLOP:.3g} s" * (not args.tiny)
    write(args, "stages", [x for x in read(args, "stages") if x["stage"] != name] + [row])


def trl(args: Args):
    table = []
    for name in ("sft", "reward", "dpo"):
        asked, work = settings(args, name, args.tiny)
        version = "1.16.0"
        if not (ROOT / asked.peers / f"trl-{version}").exists():
            table.append({"stage": name, "TRL": version, "items/s": "not installed", "peak GiB": ""})
            continue
        (work / "runs").mkdir(exist_ok=True)
        found = throughput.peer(replace(asked, updates=2), work)
        speed = f"{asked.batch_size / found['seconds']:.2f}"
        table.append({"stage": name, "TRL": version, "items/s": speed, "peak GiB": f"{found['peak']:.2f}"})
        write(args, "trl", table)
    write(args, "trl", table)


# ---- tables ---------------------------------------------------------------------------------------------------------


def read(args: Args, name: str) -> list[dict]:
    file = Path(args.output_dir, f"{name}.csv")
    return pandas.read_csv(file, dtype=str, keep_default_na=False).to_dict("records") if file.exists() else []


def write(args: Args, name: str, rows: list[dict]):
    partial = Path(args.output_dir, f"{name}.tmp")  # renamed when complete: a kill loses no earlier row
    pandas.DataFrame(rows).to_csv(partial, index=False)
    os.replace(partial, partial.with_suffix(".csv"))


def page(args: Args):
    """page.md of the tables that are there."""
    titles = {
        "device": "Device",
        "correctness": "Correctness, a tiny model",
        "decoding": "Decoding: one token for all rows",
        "stages": "Stages",
        "trl": "TRL on the same rows",
    }
    flags = ["--device", args.device] * (args.device != "cuda") + ["--tiny"] * args.tiny
    text = f"# One GPU, everything\n\n`{shlex.join(['bash', 'benchmark/speed/gpu.sh', *flags, 'FOLDER'])}`\n"
    if args.tiny:
        text += (
            "\nA tiny model: its speed says nothing, and what is asked for is asked of Pythia 1B's shape on an H100.\n"
        )
    for name, title in titles.items():
        rows = read(args, name)
        if rows:
            text += f"\n## {title}\n\n{markdown(rows)}"
    if read(args, "decoding"):
        shown = "weights, keys and values that a step reads, by its time and the copy's rate"
        text += f"\nShare of the bandwidth: {shown}.\n"
    if failures(args):
        text += "\n## Failed\n\n" + "".join(f"- {line}\n" for line in failures(args))
    Path(args.output_dir, "page.md").write_text(text, encoding="utf-8")


def main(args: Args):
    os.chdir(ROOT)
    if args.part != "page" and args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("error: --device cuda: torch finds no GPU; --device cpu --tiny tries all parts on a CPU")
    torch.backends.cuda.enable_cudnn_sdp(False)  # as in the stage scripts: cuDNN builds a plan for every new shape
    failed = failures(args)
    if args.part in SIZES:
        stage(args, args.part)
    else:
        {"data": data, "device": device, "correctness": correctness, "decoding": decoding, "trl": trl, "page": page}[
            args.part
        ](args)
    page(args)
    if args.part == "page":
        print(Path(args.output_dir, "page.md").read_text())
    if failures(args) != failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main(tyro.cli(Args))
