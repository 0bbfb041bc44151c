"""Every stage under DeepSpeed ZeRO-2 and ZeRO-3, in float32 and bfloat16, as accelerate launches it: two processes on a
CPU. A killed run resumes to the same bytes; losses in bfloat16 stay near those of float32 (in float32 they are equal to
those of one process: test_invariance.py). Minutes, so it runs on demand only:

python -m pytest -m long tests/test_deepspeed.py     (last output: benchmark/results/deepspeed.txt)
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import kill_runs
import psutil
import pytest
import yaml
from conftest import free_port
from kill_runs import STAGES, left_behind, metrics
from test_faults import wait_for_update

ROOT = Path(__file__).resolve().parents[1]


def write_config(folder: Path, stage: int) -> Path:
    """The launch configuration of a stage of ZeRO for two processes on a CPU, with all of DeepSpeed's settings in a
    file of their own, as far as they are not those of the run."""
    config = yaml.safe_load((ROOT / "benchmark" / "accelerate" / f"zero{stage}.yaml").read_text())
    del config["mixed_precision"]  # of a file of DeepSpeed's own
    # by default weights as small as these are not sharded
    settings = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    settings |= {"bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto", "steps_per_print": 10**6}
    (folder / f"zero{stage}.json").write_text(json.dumps(settings))
    config |= {"num_processes": 2, "deepspeed_config": {"deepspeed_config_file": str(folder / f"zero{stage}.json")}}
    (folder / f"zero{stage}.yaml").write_text(yaml.safe_dump(config))
    return folder / f"zero{stage}.yaml"


def start(stage: str, args, config: Path | None = None) -> subprocess.Popen:
    """A run of the stage: one plain process, or what accelerate launches from a config file."""
    launch = ["-m", "accelerate.commands.launch", "--config_file", config, "--main_process_port", free_port()]
    command = [sys.executable, *(launch if config else []), ROOT / f"{stage}.py"]
    for name, value in asdict(args).items():
        if value is not None and value is not False:
            values = [] if value is True else value if isinstance(value, list) else [value]
            command += [f"--{name.replace('_', '-')}", *values]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "WORLD_SIZE", "RANK"))}
    environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    with open(f"{args.output_dir}.log", "a") as log:
        return subprocess.Popen([*map(str, command)], env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    root = tmp_path_factory.mktemp("deepspeed")
    arguments = kill_runs.settings(root)
    return root, {stage: replace(args, track=False, micro_batch_size=2) for stage, args in arguments.items()}


@pytest.fixture(scope="module")
def in_float32(settings):
    """The losses of a stage in one process, {stage: [{key: loss} of an update]}."""
    root, arguments = settings
    found = {}
    for stage, args in arguments.items():
        plain = replace(args, output_dir=str(root / f"{stage}.plain"), run_eval=False)
        assert start(stage, plain).wait() == 0, Path(f"{plain.output_dir}.log").read_text()[-3000:]
        found[stage] = losses(Path(plain.output_dir))
    return found


def losses(folder: Path) -> list[dict]:
    keys = ("loss/", "eval/loss")
    return [{key: value for key, value in line.items() if key.startswith(keys)} for line in metrics(folder)]


@pytest.mark.long
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_zero_resumes_to_the_same_end_and_one_process_cannot(
    settings, in_float32, stage, zero, precision, record_property
):
    root, arguments = settings
    config, name = write_config(root, zero), f"{stage}.zero{zero}.{precision}"
    whole = replace(arguments[stage], output_dir=str(root / f"{name}.whole"), mixed_precision=precision)
    said = Path(f"{whole.output_dir}.log")
    assert start(stage, whole, config).wait() == 0, said.read_text()[-3000:]
    assert "2 process(es)" in said.read_text()

    killed = replace(whole, output_dir=str(root / f"{name}.killed"))
    folder, run = Path(killed.output_dir), start(stage, killed, config)
    wait_for_update(folder, 3)
    for process in psutil.Process(run.pid).children(recursive=True):
        process.kill()
    assert run.wait() != 0 and not (folder / "model").exists()

    resumed, said = replace(killed, resume=True), Path(f"{killed.output_dir}.log")
    assert start(stage, resumed).wait() == 1  # by one plain process
    assert f"was written by DeepSpeed ZeRO-{zero}, 2 process(es); plain or DDP cannot read it" in said.read_text()
    assert start(stage, resumed, config).wait() == 0, said.read_text()[-3000:]
    assert "--resume: continuing from" in said.read_text()
    found, expected = left_behind(folder), left_behind(Path(whole.output_dir))
    assert [key for key in expected if found[key] != expected[key]] == [] and expected["weights"]

    pairs = list(zip(losses(Path(whole.output_dir)), in_float32[stage], strict=True))
    off, largest = max((abs(line[key] - other[key]), other[key]) for line, other in pairs for key in other)
    record_property("deepspeed", [stage, f"ZeRO-{zero}", precision, f"{off:.1e}", f"{largest:.4f}"])
    for line, other in pairs:
        for key, loss in other.items():
            assert abs(line[key] - loss) <= (2e-2 * abs(loss) + 1e-2 if precision == "bf16" else 1e-4), (line, other)
    if stage == "ppo":  # policy and reference are the same model in the same precision
        assert metrics(folder)[0]["objective/kl"] == 0
