"""Helpers that the tools share. The stage scripts have copies of their own."""

import glob
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from contextlib import contextmanager
from math import inf
from multiprocessing.pool import ThreadPool
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from rich.console import Console
from rich.progress import track

# relative; float32 forward passes in other batches and sums in another order differ by less, scores that mean more
TIE = 1e-6
# scripts without spaces between words: Thai, Lao, Burmese, Khmer, Japanese, Chinese
SPACELESS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff"


def fail(message: str):
    """End the process with one clear message on standard error and exit code 1."""
    raise SystemExit(f"error: {message}")


@contextmanager
def or_fail(message: str):
    """Run a block that depends on files, disk or network, and turn any exception there into one clear error message."""
    try:
        yield
    except Exception as error:  # each file format raises its own kinds of error
        fail(f"{message} ({error!r:.300})")


def at_least(least: float, args, *names: str):
    """End with an error if one of these arguments is below `least` or not finite. None stands for a default."""
    for name in names:
        value = getattr(args, name)
        if value is not None and not least <= value < inf:
            fail(f"--{name.replace('_', '-')} {value}: at least {least}")


def one_line(error: Exception) -> str:
    """Return the kind and the first line of an exception."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def markdown(rows: list[dict]) -> str:
    """Return a Markdown table of rows with equal keys."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    cells = [[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def with_sd(values, digits: int = 3) -> str:
    """Return `mean ± sample standard deviation`, the latter with two values or more; nothing without values."""
    values = list(values)
    if not values:
        return ""
    return f"{mean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


def load_function(flag: str, value: str):
    """Return the function that a flag's value path.py:function names. As under `python path.py`, its file can import
    neighbours, and dataclasses find their module."""
    path, _, name = value.rpartition(":")
    with or_fail(f"{flag} {value}: no function there"):
        sys.path.insert(0, str(Path(path).resolve().parent))
        spec = importlib.util.spec_from_file_location(f"file_{Path(path).stem}", path)
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, name)


def read_metrics(run: Path, may_be_empty: bool = False) -> list[dict]:
    """Return one dict per line of a run's metrics.jsonl. The rest behind the last newline is left out, because a run
    that was killed, or that still writes, can end in half a line. A damaged line before it ends the process with a
    message, and so does a missing file, or one without any line unless it `may_be_empty`."""
    file, rows = run / "metrics.jsonl", []
    if not file.exists():
        fail(f"{run} has no metrics.jsonl, which training writes: name a run folder, or train it.")
    for number, line in enumerate(file.read_bytes().split(b"\n")[:-1], 1):
        try:
            rows.append(json.loads(line))
            rows[-1]["update"]
        except (ValueError, TypeError, KeyError):
            fail(
                f"{file}, line {number} is damaged: it is not the metrics of an update. Restore the file, or delete "
                "the line to go on without that update."
            )
    if not rows and not may_be_empty:
        fail(f"{file} has no complete line yet. Wait for the run's first update, or train it anew.")
    return rows


def digest_of(path: Path) -> str:
    """Return a short digest of a file's bytes. It begins with h, so that pandas does not read it as a number."""
    return f"h{hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]}"


def words(text: str) -> list[str]:
    """Return the words of a text, or its characters where they belong to a script without spaces."""
    return re.findall(f"[{SPACELESS}]|[^\\s{SPACELESS}]+", text)


def result_name(judge: str, rest: str = "") -> str:
    """Return what the names of judge.py's files begin with. It is shortened to what file systems take."""
    name = f"judge_{re.sub('[^A-Za-z0-9.-]+', '-', judge)}{rest}"
    return name if len(name.encode()) <= 200 else f"{name[:40]}_{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def tied(a, b):
    """Return whether two scores (numbers, arrays or tensors) are equal but for rounding."""
    return abs(a - b) <= TIE * (1 + abs(a) + abs(b))


def wins(a, b):
    """Return 1, 0.5 or 0 where the score a is above, as or below the score b (numbers, arrays or tensors)."""
    tie = 1.0 * tied(a, b)
    return 0.5 * tie + (1 - tie) * (a > b)


def wilson(hits, n):
    """Return Wilson's 95 % interval of a share of `hits` in n independent trials (numbers or arrays). It has a width at
    0 and 1, where a bootstrap interval has none. Ties that count as half a hit make it wider than necessary."""
    z = 1.96
    middle, width = 2 * hits + z * z, z * (z * z + 4 * hits * (1 - hits / n)) ** 0.5
    return (middle - width) / (2 * (n + z * z)), (middle + width) / (2 * (n + z * z))


def nucleus(logits, top_p: float):
    """Return logits (b, V) with -inf for all but the smallest set of tokens that has a probability of at least top_p.
    Of equal logits, the first counts as the larger."""
    ordered, order = logits.sort(dim=1, descending=True, stable=True)
    if top_p < 1:
        probs = ordered.softmax(1)
        ordered = ordered.masked_fill(probs.cumsum(1) - probs >= top_p, -float("inf"))
    return logits.new_empty(logits.shape).scatter_(1, order, ordered)


def files_below(folder: str | Path, pattern: str) -> list[Path]:
    """Return the sorted paths below a folder that match a pattern such as **/args.json, also behind symbolic links."""
    return sorted(Path(folder, name) for name in glob.glob(pattern, root_dir=folder, recursive=True))


def cores() -> int:
    """Return the number of cores that this process may use, which on a cluster are fewer than the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


class Job(NamedTuple):
    """A command, the log that it appends to, and the file that it leaves behind (None for data)."""

    name: str
    command: list[str]
    log: Path
    result: Path | None


def run_jobs(jobs: Iterable[Job], side_by_side: int, root: Path):
    """Run jobs in the folder `root`, each with its share of the cores. Ends with an error that names those that failed,
    once the others have run."""
    if side_by_side < 1:
        fail(f"--jobs {side_by_side}: at least 1")
    jobs, environment = list(jobs), os.environ | {"OMP_NUM_THREADS": str(max(1, cores() // side_by_side))}

    def exit_code(job: Job) -> int:
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with job.log.open("a") as log:
            options = {"stdout": log, "stderr": subprocess.STDOUT}
            return subprocess.run(job.command, cwd=root, env=environment, **options).returncode

    with ThreadPool(side_by_side) as pool:
        codes = list(track(pool.imap(exit_code, jobs), "runs", len(jobs), console=Console(stderr=True)))
    if failed := [f"{job.name} ({job.log})" for job, code in zip(jobs, codes, strict=True) if code]:
        fail(f"failed, with these logs: {', '.join(failed)}; repeat the command after a repair")


def same_tokenizer(one, other) -> bool:
    """Return whether two tokenizers have one vocabulary and one EOS. A base model and its chat model often share the
    vocabulary, but end their texts with different tokens."""
    return (one.get_vocab(), one.eos_token) == (other.get_vocab(), other.eos_token)


def last_rewards(model, tokens, pad_id: int):
    """Return the rewards (b,) of right-padded rows (b, T), read at their last token (Detail 12)."""
    from ppo import rounded_width  # here, because most tools need no models

    lengths = (tokens != pad_id).sum(1)
    return model(tokens[:, : rounded_width(lengths)]).gather(1, lengths[:, None] - 1).squeeze(1)


def log_ratios(policy, reference, batch: dict, temperature: float, size: int = 32):
    """Return log pi - log pi_reference (n,), summed over each response of a batch (EOS counted): over responses sampled
    at this temperature, its mean is the KL. size: rows in a forward pass."""
    import torch

    from ppo import micro_batches, response_logits, token_logprobs

    ratios = torch.zeros(len(batch["responses"]), device=batch["responses"].device)
    for mb in micro_batches(batch, torch.arange(len(ratios), device=ratios.device), size):
        logprobs = []
        for model in (policy, reference):
            logits = response_logits(model, mb["tokens"], mb["columns"])
            logprobs.append(token_logprobs(logits, mb["responses"], temperature))
        ratios[mb["rows"]] = ((logprobs[0] - logprobs[1]) * mb["response_mask"]).sum(1)
    return ratios


def save_checkpoint(model, tokenizer, folder: Path):
    """Save a model and its tokenizer as the stages do: transformers 4 and whom the umask lets read can read them."""
    from ppo import add_old_names

    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    add_old_names(folder)
    umask = os.umask(0)
    os.umask(umask)
    for file in folder.iterdir():
        file.chmod(0o666 & ~umask)
