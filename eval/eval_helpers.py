"""Helpers that the tools share. The stage scripts have copies of their own."""

import importlib.util
from contextlib import contextmanager
from statistics import mean, stdev


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


def one_line(error: Exception) -> str:
    """Return the kind and the first line of an exception."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def markdown(rows: list[dict]) -> str:
    """Return a Markdown table of rows with equal keys."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    cells = [[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def with_sd(values) -> str:
    """Return `mean ± sample standard deviation`, the latter with two values or more; nothing without values."""
    values = list(values)
    if not values:
        return ""
    return f"{mean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def load_function(flag: str, value: str):
    """Return the function that a flag's value path.py:function names."""
    path, _, name = value.rpartition(":")
    with or_fail(f"{flag} {value}: no function there"):
        spec = importlib.util.spec_from_file_location("named_function", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, name)


def nucleus(logits, top_p: float):
    """Return logits (b, V) with -inf for all but the smallest set of tokens that has a probability of at least top_p.
    Of equal logits, the first counts as the larger."""
    ordered, order = logits.sort(dim=1, descending=True, stable=True)
    if top_p < 1:
        probs = ordered.softmax(1)
        ordered = ordered.masked_fill(probs.cumsum(1) - probs >= top_p, -float("inf"))
    return logits.new_empty(logits.shape).scatter_(1, order, ordered)
