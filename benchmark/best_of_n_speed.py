"""Seconds that ensembles/best_of_n.py takes to estimate the best of all n once the scores exist.

    python benchmark/best_of_n_speed.py

Writes made-up scores of --samples samples of --prompts prompts by --members reward models and a gold in a temporary
folder, and times `best_of_n.py --estimate`: the curve of one member, and all of its table (every member, and the mean,
worst case and UWO with three λ of the first 2 to k members). What the process takes to start is told apart.
"""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy
import tyro

SCRIPT = Path(__file__).resolve().parents[1] / "ensembles" / "best_of_n.py"


@dataclass
class Args:
    prompts: int = 1000
    """prompts"""
    samples: int = 12_500
    """samples of each"""
    members: int = 5
    """reward models"""


def write_scores(folder: Path, args: Args):
    """Made-up samples as best_of_n.py leaves them: members that err on their own around the gold."""
    paths = [f"member_{i + 1}" for i in range(args.members)]
    settings = {
        "samples": args.samples,
        "prompts": args.prompts,
        "seed": 1,
        "gold": "gold",
        "reward_model_paths": paths,
    }
    (folder / "args.json").write_text(json.dumps(settings))
    for i in range(args.prompts):
        rng = numpy.random.default_rng(i)
        gold = rng.standard_normal(args.samples)
        scores = gold[:, None] + rng.standard_normal((args.samples, args.members))
        arrays = {"gold": gold.astype("float32"), "scores": scores.astype("float32")}
        arrays |= {"lengths": numpy.full(args.samples, 30), "has_eos": numpy.ones(args.samples, bool)}
        numpy.savez(folder / f"samples_{i:06d}.npz", **arrays)


def seconds(*options: str) -> float:
    """Of a call of the script, its output thrown away."""
    start = time.perf_counter()
    subprocess.run([sys.executable, str(SCRIPT), *options], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main(args: Args):
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "samples"
        folder.mkdir()
        write_scores(folder, args)
        tables = str(Path(temporary) / "tables")
        start = seconds("--help")
        one = seconds("--output-dir", str(folder), "--estimate", "--members", "1", "--tables-dir", tables)
        whole = seconds("--output-dir", str(folder), "--estimate")
    methods = args.members + 5 * (args.members - 1)
    print(f"{args.prompts:,} prompts x {args.samples:,} samples, {args.members} reward models; start {start:.1f} s")
    print(f"one curve: {one - start:.1f} s; a table of {methods} curves: {whole - start:.1f} s beside that")


if __name__ == "__main__":
    main(tyro.cli(Args))
