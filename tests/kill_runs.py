"""kill -9 at random instants, then --resume: does every run end as if nothing had happened?

    python tests/kill_runs.py                              # 20 kills per stage -> benchmark/results/faults.md
    python tests/kill_runs.py --kills 2 --stages ppo --output /tmp/faults.md

Each stage trains a nano model for six updates with a checkpoint every second one, TensorBoard, W&B (offline) and the
evaluation, once to its end and then once per kill. The first half of the kills aims at a moment inside the writing of
a checkpoint, the others at any between the first update and the end. Where one fell is read from a log that the run
writes as it enters and leaves its helpers. The resumed run has to leave the same weights, metrics.jsonl (but for the
times), tables, TensorBoard events and W&B history as the run that nobody killed.
"""

import json
import multiprocessing
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent))
import conftest  # noqa: E402  (first: it puts the scripts on the path)
import torch  # noqa: E402
import tyro  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader  # noqa: E402
from wandb.proto import wandb_internal_pb2  # noqa: E402

import dpo  # noqa: E402
import ppo  # noqa: E402
import reward  # noqa: E402
import sft  # noqa: E402

STAGES = {"sft": sft, "reward": reward, "dpo": dpo, "ppo": ppo}
PHASES = {  # helper -> what a run does inside
    "rollout": "rollout",
    "accumulate": "forward and backward",
    "optimizer_step": "optimiser step",
    "save_checkpoint": "checkpoint",
    "save_model": "saving the model",
    **dict.fromkeys(("validation_loss", "evaluate_pairs", "reference_rewards", "evaluate_implicit"), "evaluation"),
    **dict.fromkeys(("sample_split", "sample_and_score", "write_table"), "evaluation"),
}


@dataclass
class Args:
    stages: tuple[Literal["sft", "reward", "dpo", "ppo"], ...] = ("sft", "reward", "dpo", "ppo")
    """stages to kill"""
    kills: int = 20
    """kills per stage"""
    seed: int = 1
    """seed of the instants"""
    jobs: int = 2
    """stages side by side"""
    output: str = "benchmark/results/faults.md"
    """Markdown file for the table of kills"""


# ---- one run in a child process ----------------------------------------------------------------------------------


def trace(module, path: Path):
    """From now on the helpers of a stage write `enter NAME seconds` and `leave NAME seconds` to a file, unbuffered."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(word: str, name: str):
        os.write(file, f"{word} {time.monotonic():.6f} {name}\n".encode())

    def traced(call, name: str):
        def inner(*args, **kwargs):
            note("enter", name)
            try:
                return call(*args, **kwargs)
            finally:
                note("leave", name)

        return inner

    accumulate, on_signals = module.accumulate, module.on_signals

    @contextmanager
    def traced_accumulate(*args, **kwargs):
        note("enter", "accumulate")
        with accumulate(*args, **kwargs):
            yield
        note("leave", "accumulate")

    def begin(handler):
        if handler != signal.SIG_DFL:
            note("begin", "training")
        on_signals(handler)

    for name in PHASES:
        if hasattr(module, name):
            setattr(module, name, traced(getattr(module, name), name))
    module.accumulate, module.on_signals = traced_accumulate, begin
    module.MetricsLog.write = traced(module.MetricsLog.write, "metrics")


def start(stage: str, args, log: Path | None = None) -> int:
    """Process id of a child that runs the stage, silently; with `log` it writes its phases there."""
    child = os.fork()
    if child == 0:
        try:
            output = os.open(f"{args.output_dir}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1), os.dup2(output, 2)
            sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1)
            if log:
                trace(STAGES[stage], log)
            AcceleratorState._reset_state(True)
            STAGES[stage].main(args)
            if "wandb" in sys.modules:  # as at a normal exit: its service writes the file to its end
                sys.modules["wandb"].teardown()
            if log:
                with log.open("a") as file:
                    file.write(f"end {time.monotonic():.6f} training\n")
            os._exit(0)
        except SystemExit as end:
            print(end, flush=True)
            os._exit(end.code if isinstance(end.code, int) else 1)
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
    return child


def finish(child: int) -> int:
    """Exit code of a child (negative: the signal that ended it)."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def read_phases(log: Path) -> list[tuple[str, float, str]]:
    """The whole lines of a log of phases as (word, seconds, name)."""
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    rows = [line.split(maxsplit=2) for line in lines if line.endswith("\n")]
    return [(word, float(seconds), name.strip()) for word, seconds, name in rows]


def where_it_fell(phases: list[tuple[str, float, str]]) -> str:
    """What a run was doing when its log of phases ends: the innermost helper that it had not left."""
    inside, updates = [], 0
    for word, _, name in phases:
        if word == "enter":
            inside.append(name)
        elif word == "leave":
            inside.remove(name)
            updates += name == "metrics"
    return f"{PHASES.get(inside[-1], inside[-1]) if inside else 'between'}, {updates} lines of metrics written"


# ---- what a run leaves behind ------------------------------------------------------------------------------------


def wandb_history(path: Path) -> dict[int, dict]:
    """{step: metrics} of an offline W&B file: a LevelDB log of 32 KiB blocks behind seven bytes, records with a header
    of checksum, length and type (1 whole, 2 first, 3 middle, 4 last). An error where a step is there twice."""
    data, place, text, found = path.read_bytes(), 7, b"", {}
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        if kind not in (1, 2, 3, 4):
            break
        text = (b"" if kind in (1, 2) else text) + data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record.FromString(text)
            if record.WhichOneof("record_type") == "history":
                step = record.history.step.num
                assert step not in found, f"{path}: step {step} twice"
                items = {x.key or "/".join(x.nested_key): json.loads(x.value_json) for x in record.history.item}
                found[step] = {key: value for key, value in items.items() if not key.startswith(("_", "samples/"))}
    return found


def tensorboard_events(folder: Path) -> list[tuple[int, str, float]]:
    """(step, key, value) of all scalars in all event files of a folder, sorted, repeated ones included."""
    found = []
    for path in sorted(folder.glob("events.*")):
        for event in EventFileLoader(str(path)).Load():
            found += [(event.step, value.tag, value.tensor.float_val[0]) for value in event.summary.value]
    return sorted(found)


def without_times(row: dict) -> dict:
    return {key: value for key, value in row.items() if not key.startswith("time/")}


def metrics(folder: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl, without its clock."""
    return [without_times(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder: Path) -> dict[str, bytes]:
    """The weights that a run saved at its end, byte for byte, by file."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.glob("*/*.safetensors"))}


def left_behind(folder: Path) -> dict:
    """What a run left, without its clock: weights (bytes), metrics, tables (text), TensorBoard, W&B, stray files."""
    tracked = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    history = [wandb_history(path) for path in tracked]
    return {
        "weights": weights(folder),
        "metrics": metrics(folder),
        "tables": {x.name: x.read_text() for x in sorted((folder / "eval").iterdir())},
        "TensorBoard": [row for row in tensorboard_events(folder / "tensorboard") if not row[1].startswith("time/")],
        "W&B": [{step: without_times(row) for step, row in run.items()} for run in history],
        "stray files": sorted(str(x.relative_to(folder)) for x in folder.rglob("*.tmp")),
    }


def complete(found: dict) -> str:
    """What is wrong with what an uninterrupted run left: each line of metrics.jsonl is once in TensorBoard and W&B."""
    expected = {
        line["update"]: {key: value for key, value in line.items() if key != "update"} for line in found["metrics"]
    }
    events = [(step, key) for step, row in sorted(expected.items()) for key in sorted(row)]
    if [row[:2] for row in found["TensorBoard"]] != events:
        return "TensorBoard lacks or repeats an update"
    if found["W&B"] != [expected]:
        return "W&B lacks or repeats an update"
    return "" if found["weights"] and found["tables"] and not found["stray files"] else "weights, tables or stray files"


# ---- the kills ---------------------------------------------------------------------------------------------------


def settings(root: Path) -> dict:
    """Arguments of each stage on the data in `root`, with the SFT and reward model that this makes there."""
    world = conftest.make_world(root / "world")
    common = {"model": "nano", "dataset": str(world.dataset), "batch_size": 8, "total_episodes": 48, "seed": 7}
    common |= {"learning_rate": 1e-3, "run_eval": True, "eval_every": 3, "save_every": 2, "track": True}
    pairs = {"preference_dataset": str(world.preference_dataset), "sft_model_path": str(root / "sft")}
    models = {"sft_model_path": str(root / "sft"), "reward_model_paths": [str(root / "reward")]}
    own = {"sft": {"model": str(world.model)}, "reward": pairs, "dpo": pairs | {"learning_rate": 1e-4}, "ppo": models}
    for stage in ("sft", "dpo", "ppo"):
        own[stage]["response_length"] = 10
    arguments = {stage: STAGES[stage].Args(**(common | own[stage])) for stage in STAGES}
    for stage in ("sft", "reward"):
        first = replace(arguments[stage], output_dir=str(root / stage), run_eval=False, track=False, save_every=0)
        if finish(start(stage, first)):
            raise SystemExit(f"error: {first.output_dir}.log")
    return arguments


def kill_stage(stage: str, arguments, root: Path, args: Args) -> list[dict]:
    """A row per kill: the instant, where it fell, what --resume continued from, and whether all ended the same."""
    chance = random.Random(f"{args.seed} {stage}")
    log = root / f"{stage}.whole.phases"
    whole = replace(arguments, output_dir=str(root / f"{stage}.whole"))
    if finish(start(stage, whole, log)):
        raise SystemExit(f"error: {whole.output_dir}.log")
    expected, phases = left_behind(Path(whole.output_dir)), read_phases(log)
    wrong = complete(expected)
    if wrong:
        raise SystemExit(f"error: {stage}, not killed: {wrong}")
    begin = next(seconds for word, seconds, _ in phases if word == "begin")
    duration = phases[-1][1] - begin
    saves = [seconds for _, seconds, name in phases if name == "save_checkpoint"]
    saves = [after - before for before, after in zip(saves[::2], saves[1::2], strict=True)]
    rows = []
    for kill in range(args.kills):
        aimed = kill < args.kills // 2
        number, part = chance.randrange(len(saves)), chance.random()
        run = replace(arguments, output_dir=str(root / f"{stage}.{kill}"))
        log = root / f"{stage}.{kill}.phases"
        child = start(stage, run, log)
        event = ("enter", "save_checkpoint") if aimed else ("begin", "training")
        while True:  # until the event has come
            came = [seconds for word, seconds, name in read_phases(log) if (word, name) == event]
            if len(came) > (number if aimed else 0):
                break
            time.sleep(0.0005)
        moment = came[number if aimed else 0] + part * (0.8 * saves[number] if aimed else duration)
        time.sleep(max(0.0, moment - time.monotonic()))
        os.kill(child, signal.SIGKILL)
        survived = finish(child) == 0
        phases = read_phases(log)
        folder = Path(run.output_dir)
        partial = [x.name for x in folder.glob("checkpoints/*.tmp")]
        again = finish(start(stage, replace(run, resume=True)))
        said = [line for line in Path(f"{folder}.log").read_text().splitlines() if line.startswith("--resume:")]
        found = left_behind(folder) if again == 0 else {}
        different = [key for key in expected if found.get(key) != expected[key]]
        at = next(seconds for word, seconds, _ in phases if word == "begin")
        row = {"stage": stage, "kill": kill + 1, "seconds after the start": f"{moment - at:.3f}"}
        row["where it fell"] = "the run had ended" if survived else where_it_fell(phases)
        row["half-written"] = ", ".join(partial) or "-"
        row["continued from"] = said[-1].split("/")[-1] if "continuing" in said[-1] else "the beginning"
        row["exit code"] = again
        row["different"] = ", ".join(different) or "nothing"
        rows.append(row)
        if not different:
            shutil.rmtree(folder)
    return rows


def markdown(rows: list[dict]) -> list[str]:
    header = list(rows[0])
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return lines + ["| " + " | ".join(str(row[key]) for key in header) + " |" for row in rows]


def main(args: Args):
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(prefix="kill_runs_"))
    arguments = settings(root)
    jobs = [(stage, arguments[stage], root, args) for stage in args.stages]
    with multiprocessing.get_context("fork").Pool(args.jobs) as pool:
        rows = sum(pool.starmap(kill_stage, jobs, chunksize=1), [])
    summary = []
    for stage in args.stages:
        own = [row for row in rows if row["stage"] == stage]
        inside = sum(row["where it fell"].startswith("checkpoint") for row in own)
        fine = sum(row["exit code"] == 0 for row in own)
        identical = sum(row["different"] == "nothing" for row in own)
        summary.append(
            {"stage": stage, "kills": len(own), "inside a save": inside, "survived": fine, "identical": identical}
        )
    lines = ["# kill -9, then --resume", "", f"`python tests/kill_runs.py --kills {args.kills} --seed {args.seed}`", ""]
    lines += [*markdown(summary), "", *markdown(rows)]
    print("\n".join(lines))
    Path(args.output).write_text("\n".join(lines) + "\n")
    if any(row["different"] != "nothing" for row in rows):
        raise SystemExit(f"error: a resumed run ended elsewhere; the folders are in {root}")
    shutil.rmtree(root)


if __name__ == "__main__":
    main(tyro.cli(Args))
