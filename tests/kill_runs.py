"""Kill runs with SIGKILL at random instants, resume them, and compare them with a run that was not killed.

    python tests/kill_runs.py                              # 20 kills per stage -> benchmark/results/faults.md
    python tests/kill_runs.py --kills 2 --stages ppo --output /tmp/faults.md

Each stage trains a nano model for six updates with a checkpoint after every second one, TensorBoard and the
evaluation: once to its end, and then once per kill. The first half of the kills aims at the writing of a checkpoint,
the others at any moment. The resumed run must leave the same weights, metrics.jsonl (except for times), tables and
TensorBoard events as the complete run.
"""

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Literal

import conftest
import torch
import tyro
from eval_helpers import markdown
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.event_pb2 import SessionLog
from tqdm import tqdm

import dpo
import ppo
import reward
import sft

STAGES = {"sft": sft, "reward": reward, "dpo": dpo, "ppo": ppo}


@dataclass
class Args:
    stages: tuple[Literal["sft", "reward", "dpo", "ppo"], ...] = ("sft", "reward", "dpo", "ppo")
    """stages to kill"""
    kills: int = 20
    """kills per stage"""
    seed: int = 1
    """seed of the instants"""
    output: str = "benchmark/results/faults.md"
    """Markdown file for the table of kills"""


# ---- one run in a child process ----------------------------------------------------------------------------------


def start(stage: str, args, main=None) -> int:
    """Process id of a child that runs the stage, or `main`, silently, and ends as a script would."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            file = os.open(f"{args.output_dir}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, 1), os.dup2(file, 2)
            sys.stdout = sys.stderr = os.fdopen(file, "w", buffering=1)
            (main or STAGES[stage].main)(args)
            code = 0
        except SystemExit as end:
            print(end, flush=True)
            code = end.code if isinstance(end.code, int) else 1  # 0 where --resume finds a complete run
        except BaseException as error:
            print(repr(error), flush=True)
        os._exit(code)
    return child


def finish(child: int) -> int:
    """Exit code of a child (negative: the signal that ended it)."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# ---- what a run leaves behind ------------------------------------------------------------------------------------


def tensorboard_events(folder: Path) -> list[tuple[int, str, float | bytes]]:
    """Return the sorted (step, key, value) of all scalars and texts that TensorBoard shows. The file of a resumed run
    names the step from which it replaces earlier files."""
    files = [list(EventFileLoader(str(path)).Load()) for path in folder.glob("events.*")]
    found = []
    for event in chain.from_iterable(sorted(files, key=lambda x: [e.wall_time for e in x[:1]])):  # names: whole seconds
        if event.session_log.status == SessionLog.START:
            found = [row for row in found if row[0] < event.step]
        for value in event.summary.value:
            found.append((event.step, value.tag, *value.tensor.float_val, *value.tensor.string_val))
    return sorted(found)


def without_times(row: dict) -> dict:
    return {key: value for key, value in row.items() if not key.startswith("time/")}


def metrics(folder: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl, without its clock."""
    return [without_times(line) for line in conftest.read_metrics(folder)]


def weights(folder: Path) -> dict[str, bytes]:
    """The weights that a run saved at its end, byte for byte, by file."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.glob("*/*.safetensors"))}


def left_behind(folder: Path) -> dict:
    """Return what a run left, without times: weights (bytes), metrics, tables (text), TensorBoard, stray files."""
    return {
        "weights": weights(folder),
        "metrics": metrics(folder),
        "tables": {x.name: x.read_text() for x in sorted(folder.glob("eval/*"))},
        "TensorBoard": [row for row in tensorboard_events(folder / "tensorboard") if not row[1].startswith("time/")],
        "stray files": sorted(str(x.relative_to(folder)) for x in folder.rglob("*.tmp")),
    }


def complete(found: dict) -> str:
    """Return what is wrong with what a complete run left, or "". Each line of metrics.jsonl must be in TensorBoard
    exactly once."""
    expected = {
        line["update"]: {key: value for key, value in line.items() if key != "update"} for line in found["metrics"]
    }
    events = [(step, key) for step, row in sorted(expected.items()) for key in sorted(row)]
    if [row[:2] for row in found["TensorBoard"] if isinstance(row[2], float)] != events:
        return "TensorBoard lacks or repeats an update"
    return "" if found["weights"] and not found["stray files"] else "weights or stray files"


# ---- the kills ---------------------------------------------------------------------------------------------------


def arguments(stage: str, world, sft_model: Path, reward_model: Path):
    """Arguments of six updates of a stage on a small world, with checkpoints and evaluation."""
    common = {"batch_size": 8, "total_episodes": 48, "seed": 7, "learning_rate": 1e-3, "eval_every": 3}
    common["save_every"] = 2
    pairs = {"model": "nano", "preference_dataset": str(world.preference_dataset), "sft_model_path": str(sft_model)}
    pairs["run_eval"] = True
    own = {"sft": {"model": str(sft_model), "dataset": str(world.dataset)}}
    own["reward"] = pairs | {"dataset": str(world.dataset)}
    own["dpo"] = pairs | {"learning_rate": 1e-4}
    own["ppo"] = {"model": "nano", "dataset": str(world.dataset), "sft_model_path": str(sft_model), "sample_every": 2}
    own["ppo"] |= {"reward_model_path": str(reward_model), "response_length": 10}
    return STAGES[stage].Args(**(common | own[stage]))


def settings(root: Path) -> dict:
    """Arguments of each stage on the data in `root`, with the SFT and reward model that this makes there."""
    world = conftest.make_world(root / "world")
    for stage, start_from in (("sft", world.model), ("reward", root / "sft")):
        first = arguments(stage, world, start_from, root / "reward")
        first = replace(first, output_dir=str(root / stage), save_every=0)
        if finish(start(stage, first)):
            raise SystemExit(f"error: {first.output_dir}.log")
    return {stage: arguments(stage, world, root / "sft" / "model", root / "reward") for stage in STAGES}


def kill_stage(stage: str, whole, root: Path, args: Args) -> list[dict]:
    """Return a row per kill: whether a checkpoint was half-written, and what differs at the resumed run's end."""
    chance = random.Random(f"{args.seed} {stage}")
    whole = replace(whole, output_dir=str(root / f"{stage}.whole"))
    if finish(start(stage, whole)):
        raise SystemExit(f"error: {whole.output_dir}.log")
    expected, rows = left_behind(Path(whole.output_dir)), []
    wrong = complete(expected)
    if wrong:
        raise SystemExit(f"error: {stage}, not killed: {wrong}")
    duration = conftest.read_metrics(Path(whole.output_dir))[-1]["time/total"]
    for kill in tqdm(range(args.kills), desc=stage):
        run = replace(whole, output_dir=str(root / f"{stage}.{kill}"))
        folder, wait = Path(run.output_dir), chance.random() * duration
        events = [folder / "args.json"]
        if kill < args.kills // 2:  # as a checkpoint is begun, or up to 5 ms later
            save, wait = folder / "checkpoints" / f"update_{chance.choice((2, 4, 6)):06d}", chance.random() * 0.005
            events = [save.with_name(f"{save.name}.tmp"), save]
        child = start(stage, run)
        while not any(event.exists() for event in events):
            time.sleep(0.0005)
        time.sleep(wait)
        os.kill(child, signal.SIGKILL)
        finish(child)
        row = {"stage": stage, "kill": kill + 1, "inside a save": any(folder.glob("checkpoints/*.tmp"))}
        row["exit code"] = finish(start(stage, replace(run, resume=True)))
        found = left_behind(folder) if row["exit code"] == 0 else {}
        different = [key for key in expected if found.get(key) != expected[key]]
        row["different"] = ", ".join(different) or "nothing"
        rows.append(row)
        if not different:
            shutil.rmtree(folder)
    return rows


def main(args: Args):
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(prefix="kill_runs_"))
    runs = settings(root)
    rows = []
    for stage in args.stages:
        rows += kill_stage(stage, runs[stage], root, args)
    summary = []
    for stage in args.stages:
        own = [row for row in rows if row["stage"] == stage]
        counts = {"stage": stage, "kills": len(own)}
        counts["inside a save"] = sum(row["inside a save"] for row in own)
        counts["survived"] = sum(row["exit code"] == 0 for row in own)
        counts["identical"] = sum(row["different"] == "nothing" for row in own)
        summary.append(counts)
    text = f"# kill -9, then --resume\n\n`python tests/kill_runs.py --kills {args.kills} --seed {args.seed}`\n\n"
    text += markdown(summary)
    print(text)
    Path(args.output).write_text(text)
    if any(row["different"] != "nothing" for row in rows):
        print(markdown(rows))
        raise SystemExit(f"error: a resumed run left other files. See the folders in {root}")
    shutil.rmtree(root)


if __name__ == "__main__":
    main(tyro.cli(Args))
