"""--resume under DeepSpeed ZeRO-2, launched for real: two processes on a CPU. Minutes, so it runs on demand only:

python -m pytest -m long tests/test_deepspeed.py     (last output: benchmark/results/deepspeed.txt)
"""

import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import kill_runs
import psutil
import pytest
from conftest import free_port
from kill_runs import STAGES, left_behind
from test_faults import wait_for_update

ROOT = Path(__file__).resolve().parents[1]
ZERO2 = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config: {zero_stage: 2}
num_machines: 1
machine_rank: 0
num_processes: 2
rdzv_backend: static
use_cpu: true
"""


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
    (root / "zero2.yaml").write_text(ZERO2)
    return root, kill_runs.settings(root)


@pytest.mark.long
@pytest.mark.parametrize("stage", STAGES)
def test_zero2_resumes_to_the_same_end_and_one_process_cannot(settings, stage):
    root, arguments = settings
    config = root / "zero2.yaml"
    whole = replace(arguments[stage], output_dir=str(root / f"{stage}.whole"), track=False)
    said = Path(f"{whole.output_dir}.log")
    assert start(stage, whole, config).wait() == 0, said.read_text()[-3000:]
    assert "2 process(es)" in said.read_text()

    killed = replace(whole, output_dir=str(root / f"{stage}.killed"))
    folder, run = Path(killed.output_dir), start(stage, killed, config)
    wait_for_update(folder, 3)
    for process in psutil.Process(run.pid).children(recursive=True):
        process.kill()
    assert run.wait() != 0 and not (folder / "model").exists()

    resumed, said = replace(killed, resume=True), Path(f"{killed.output_dir}.log")
    assert start(stage, resumed).wait() == 1  # by one plain process
    assert "was written by DeepSpeed ZeRO-2, 2 process(es); plain or DDP cannot read it" in said.read_text()
    assert start(stage, resumed, config).wait() == 0, said.read_text()[-3000:]
    assert "--resume: continuing from" in said.read_text()
    found, expected = left_behind(folder), left_behind(Path(whole.output_dir))
    assert [key for key in expected if found[key] != expected[key]] == [] and expected["weights"]
