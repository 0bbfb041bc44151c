"""Reads the metrics.jsonl of a run folder, for the tools that draw or print it."""

import json
from pathlib import Path


def read_metrics(run: Path, may_be_empty: bool = False) -> list[dict]:
    """Return one dict per line of a run's metrics.jsonl. The rest behind the last newline is left out, because a run
    that was killed, or that still writes, can end in half a line. A damaged line before it ends the process with a
    message, and so does a missing file, or one without any line unless it `may_be_empty`."""
    file, rows = run / "metrics.jsonl", []
    if not file.exists():
        raise SystemExit(f"error: {run} has no metrics.jsonl, which training writes: name a run folder, or train it.")
    for number, line in enumerate(file.read_bytes().split(b"\n")[:-1], 1):
        try:
            rows.append(json.loads(line))
            rows[-1]["update"]
        except (ValueError, TypeError, KeyError):
            raise SystemExit(
                f"error: {file}, line {number} is damaged: it is not the metrics of an update. Restore the file, or "
                "delete the line to go on without that update."
            ) from None
    if not rows and not may_be_empty:
        raise SystemExit(f"error: {file} has no complete line yet. Wait for the run's first update, or train it anew.")
    return rows
