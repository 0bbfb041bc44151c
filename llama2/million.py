"""Speed and memory of llama2/preference_dataset.py on generated dialogues.

    python llama2/million.py --rows 1000000 --base data/alpaca/base

Writes --rows made-up pairs (1 to 4 turns of random words, four grades) as JSON Lines in a temporary folder beside
--folder, prepares them, and prints rows per second of wall time, and the peak memory of the process: all of it, and the
part that is not pages of files (which the system takes back when it needs them). Linux only (/proc).
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

SCRIPT = Path(__file__).resolve().parent / "preference_dataset.py"
GRADES = ("significantly", "better", "slightly", "negligibly")


@dataclass
class Args:
    rows: int = 1_000_000
    """pairs"""
    words: int = 30
    """random words of a turn and of a response"""
    base: str = "quickstart/bases/nano-xs"
    """model whose tokenizer is used"""
    folder: str | None = None
    """where the temporary folder is made; default: the system's"""
    max_query_length: int = 1024
    """as in llama2/preference_dataset.py"""
    max_response_length: int = 512
    """as in llama2/preference_dataset.py"""


def made_up_pair(i: int, words: int) -> dict:
    """Pair i, of random words, so many a text."""
    rng = random.Random(i)

    def said() -> str:
        return " ".join(rng.choices(("car", "house", "it", "was", "never", "good", "for", "two", "weeks"), k=words))

    turns = 2 * rng.randint(1, 4) - 1
    messages = [{"role": ("user", "assistant")[k % 2], "content": said()} for k in range(turns)]
    messages[0]["content"] += f" {i}"
    return {"messages": messages, "chosen": said(), "rejected": said(), "rating": rng.choice(GRADES)}


def memory(pid: int) -> dict[str, float]:
    """GB of the process: VmHWM, the peak so far of all, and RssAnon, now and without pages of files."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        lines = []
    fields = dict(line.split(":", 1) for line in lines)
    return {key: int(fields[key].split()[0]) / 2**20 for key in ("VmHWM", "RssAnon") if key in fields}


def main(args: Args):
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        rows, output = Path(folder) / "rows.jsonl", Path(folder) / "out"
        with open(rows, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(made_up_pair(i, args.words)) + "\n" for i in range(args.rows))
        command = [sys.executable, str(SCRIPT), "--sources", f"made=pairs:{rows}", "--base", args.base]
        command += ["--output-dir", str(output), "--max-query-length", str(args.max_query_length)]
        command += ["--max-response-length", str(args.max_response_length)]
        start, peak = time.time(), {"VmHWM": 0.0, "RssAnon": 0.0}
        process = subprocess.Popen(command)
        while process.poll() is None:
            peak = {key: max(value, memory(process.pid).get(key, 0)) for key, value in peak.items()}
            time.sleep(0.1)
        seconds = time.time() - start
        if process.returncode:
            raise SystemExit(f"error: {' '.join(command)} ended with {process.returncode}")
        size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file()) / 1e9
    speed = f"{args.rows:,} rows in {seconds:.0f} s, {args.rows / seconds:.0f} rows/s"
    print(f"{speed}; {size:.2f} GB written")
    print(f"peak memory {peak['VmHWM']:.2f} GiB, without pages of files {peak['RssAnon']:.2f} GiB")


if __name__ == "__main__":
    main(tyro.cli(Args))
