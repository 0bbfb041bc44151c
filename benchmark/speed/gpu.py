"""What one GPU has to show beside the speed of the stages: `python benchmark/speed/gpu.py PART --output-dir FOLDER`.

    device          versions, and the rate of a matrix product -> device.csv
    correctness     ppo.py on a tiny model: ratios before a first step, micro-batch sizes, kill and resume, and sampled
                    tokens beside the CPU's -> correctness.csv
    decoding        milliseconds of a token for 32 to 512 rows at Pythia 1B's shape -> decoding.csv

It needs no Hub and no data. With --device cpu, decoding takes the tiny model. A number that is not finite, or a run
that fails, ends the part with exit code 1; earlier rows are in its table.
"""

import json
import math
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal

import pandas
import throughput
import torch
import transformers
import tyro
from eval_helpers import fail  # throughput puts it on the path
from safetensors.torch import load_file
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import ppo

ROOT = Path(__file__).resolve().parents[2]
TINY = (64, 2, 4, 600)  # width, layers, heads, words
RESPONSE = 53


@dataclass
class Args:
    part: Annotated[Literal["device", "correctness", "decoding"], tyro.conf.Positional]
    """what to measure"""
    output_dir: str
    """folder of the tables"""
    device: Literal["cpu", "cuda"] = "cuda"
    """where"""
    work: str = "data/gpu"
    """folder of the tiny model and its data, made where it is missing"""


def write(args: Args, name: str, rows: list[dict]):
    """Write a table, and print its last row."""
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    pandas.DataFrame(rows).to_csv(folder / f"{name}.csv", index=False)
    print(rows[-1], flush=True)


def device(args: Args):
    """Measure a product of square bfloat16 matrices (float32 on a CPU)."""
    size, dtype = (512, torch.float32) if args.device == "cpu" else (8192, torch.bfloat16)
    a, b = (torch.randn(size, size, device=args.device, dtype=dtype) for _ in range(2))
    rate = 2 * size**3 / throughput.seconds_of(lambda: a @ b, args.device, 20)
    row = {"machine": throughput.machine(args.device), "python": platform.python_version()}
    row |= {"transformers": transformers.__version__, "TFLOP/s of a product": f"{rate / 1e12:.4g}"}
    write(args, "device", [row | {"command": shlex.join(sys.argv)}])


# ---- correctness ----------------------------------------------------------------------------------------------------


def tiny_work(args: Args) -> Path:
    """Return the folder of data, policy and reward model of the tiny shape."""
    work = ROOT / args.work
    if not (work / "reward" / "config.json").exists():
        work.mkdir(parents=True, exist_ok=True)
        throughput.SHAPES["cpu"] = TINY
        throughput.make_work(throughput.Args("ppo", device="cpu", raw="nowhere"), work)
    return work


def tiny_run(args: Args, name: str, *flags, resume: bool = False, kill_after: int = 0) -> tuple[Path, list[dict]]:
    """Run ppo.py on the tiny model; `kill_after`: kill it after so many updates. Returns its folder and metrics."""
    work = tiny_work(args)
    folder = work / "runs" / name
    if not resume:
        shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "ppo.py", "--model", "tiny", "--output-dir", folder, "--sft-model-path", work / "model"]
    command += ["--reward-model-path", work / "reward", "--dataset", work / "sft", "--batch-size", 16]
    command += ["--total-episodes", 64, "--learning-rate", 1e-3, "--eval-rows", 8, "--save-every", 1, *flags]
    if resume:
        command.append("--resume")
    folder.parent.mkdir(parents=True, exist_ok=True)
    log, metrics = folder.with_suffix(".log"), folder / "metrics.jsonl"
    with log.open("w") as output:
        child = subprocess.Popen([*map(str, command)], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        while kill_after and child.poll() is None:
            done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
            if done >= kill_after and list(folder.glob("checkpoints/update_??????")):
                child.send_signal(signal.SIGKILL)
                kill_after = 0
            time.sleep(0.01)
        if child.wait() not in (0, -signal.SIGKILL):
            fail(f"{shlex.join(map(str, command))}\n{log.read_text()[-2000:]}")
    lines = [json.loads(line) for line in metrics.read_text().split("\n")[:-1]]
    throughput.check_finite(name, lines)
    return folder, lines


def same_tokens(args: Args) -> tuple[int, int]:
    """Return in how many rows the tokens that are sampled in float32 are the same on the device and on the CPU, and the
    number of rows."""
    folder = str(tiny_work(args) / "model")
    tokenizer = ppo.load_tokenizer(folder)
    model = ppo.load_policy(folder, tokenizer).eval()
    queries = random_queries(64, 96, tokenizer.pad_token_id)
    keys = ppo.noise_keys(1, 1, range(64), RESPONSE)
    found = []
    for where in ("cpu", args.device):
        model.to(where)
        tokens, _ = ppo.generate(model, queries.to(where), tokenizer, RESPONSE, 0.7, keys.to(where))
        found.append(tokens.cpu())
    return int((found[0] == found[1]).all(1).sum()), len(queries)


def random_queries(rows: int, width: int, pad_id: int) -> torch.Tensor:
    """Return left-padded queries (rows, width) of words 1 to pad_id - 1, a quarter of the width to all of it long."""
    queries = torch.randint(1, pad_id, (rows, width), generator=torch.Generator().manual_seed(1))
    lengths = torch.linspace(width // 4, width, rows).long()
    return queries.masked_fill(torch.arange(width) < width - lengths[:, None], pad_id)


def correctness(args: Args):
    rows = []

    def add(what: str, found: float, asked: str):
        rows.append({"what": what, "found": f"{found:.3g}", "asked": asked})
        write(args, "correctness", rows)
        if not math.isfinite(found):
            fail(f"{what}: {found}")

    def largest(lines: list[dict], key: str) -> float:
        return max(line[key] for line in lines)

    _, lines = tiny_run(args, "bf16", "--mixed-precision", "bf16", "--micro-batch-size", 4)
    add("bfloat16: largest abs(ratio - 1) before a first step", largest(lines, "policy/first_ratio_deviation"), "0")
    add("bfloat16: KL of the first update", lines[0]["objective/kl"], "0")
    for key in ("policy/sampling_logprob_difference_mean", "policy/sampling_logprob_difference_max"):
        add(f"bfloat16: {key}, largest of the updates", largest(lines, key), "rounding")

    flags = ["--mixed-precision", "no", "--micro-batch-size"]
    whole, lines = tiny_run(args, "float32", *flags, 4)
    add("float32: largest abs(ratio - 1) before a first step", largest(lines, "policy/first_ratio_deviation"), "0")
    _, others = tiny_run(args, "float32_micro", *flags, 8, "--sample-batch-size", 5)
    keys = ("objective/score", "objective/kl", "loss/value", "grad_norm", "objective/entropy")
    pairs = [(a[key], b[key]) for a, b in zip(lines, others, strict=True) for key in keys]
    difference = max(abs(a - b) / max(abs(a), 1e-3) for a, b in pairs)
    add("float32: micro-batches of 4 and 8, largest relative difference of a metric", difference, "below 1e-3")

    tiny_run(args, "killed", *flags, 4, kill_after=2)
    resumed, _ = tiny_run(args, "killed", *flags, 4, resume=True)
    weights = [load_file(folder / "model" / "model.safetensors") for folder in (whole, resumed)]
    difference = max((a - b).abs().max().item() for a, b in zip(*(x.values() for x in weights), strict=True))
    update = resumed.with_suffix(".log").read_text().partition(" continues after update ")[2].split()[0]
    add(f"killed, resumed from update {update} of 4: largest difference of a weight", difference, "0 on a CPU")

    same, count = same_tokens(args)
    what = f"float32: rows of {count} whose tokens are those of the same loop on the CPU"
    add(what, same, f"{count}, but for ties")


# ---- decoding -------------------------------------------------------------------------------------------------------


def decoding(args: Args):
    """Measure a step of ppo.generate() for several numbers of rows, all of the full length."""
    on_gpu = args.device == "cuda"
    shape, query, counts = ((2048, 16, 8, 50304), 512, (32, 128, 256, 512)) if on_gpu else (TINY, 96, (8, 16))
    width, layers, heads, words = shape
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": words}
    config = GPTNeoXConfig(**sizes, intermediate_size=4 * width, rotary_pct=0.25, attn_implementation="sdpa")
    state = SimpleNamespace(deepspeed_plugin=None)
    precision = "bf16" if on_gpu else "no"
    accelerator = SimpleNamespace(device=torch.device(args.device), state=state, mixed_precision=precision)
    torch.manual_seed(1)
    with torch.device(args.device):
        model = GPTNeoXForCausalLM(config).eval()
    model = ppo.frozen_model(accelerator, model, False)  # matrices in bfloat16: nothing is cast in a captured step
    tokenizer = ppo.load_tokenizer(str(tiny_work(args) / "model"))
    ids = torch.arange(words, device=args.device)
    model.get_output_embeddings().register_forward_hook(  # as load_policy does
        lambda _head, _, logits: logits.masked_fill_((ids == tokenizer.pad_token_id) | (ids >= len(tokenizer)), -1e9)
    )
    tokenizer.eos_token = tokenizer.pad_token  # which is never sampled: every row takes all steps
    table = []
    for count in counts:
        queries = random_queries(count, query, tokenizer.pad_token_id).to(args.device)
        keys = ppo.noise_keys(1, 1, range(count), RESPONSE).to(args.device)

        def generate(length: int, queries=queries, keys=keys):
            with torch.autocast(args.device, torch.bfloat16, enabled=on_gpu):
                return ppo.generate(model, queries, tokenizer, length, 0.7, keys)

        prefill = throughput.seconds_of(lambda: generate(1), args.device, 3)
        seconds = throughput.seconds_of(lambda: generate(RESPONSE), args.device, 3) - prefill
        seconds /= RESPONSE - 1
        if not generate(RESPONSE)[1].isfinite().all():
            fail(f"decoding: log-probabilities of tokens sampled for {count} rows are not finite")
        row = {"rows": count, "ms a step": f"{1000 * seconds:.3f}", "tokens/s": f"{count / seconds:.0f}"}
        table.append(row | {"prefill ms": f"{1000 * prefill:.1f}"})
        write(args, "decoding", table)


def main(args: Args):
    if args.device == "cuda" and not torch.cuda.is_available():
        fail("--device cuda: torch finds no GPU; --device cpu tries all parts on a CPU")
    torch.backends.cuda.enable_cudnn_sdp(False)  # as in the stage scripts: cuDNN builds a plan for every new shape
    {"device": device, "correctness": correctness, "decoding": decoding}[args.part](args)


if __name__ == "__main__":
    main(tyro.cli(Args))
