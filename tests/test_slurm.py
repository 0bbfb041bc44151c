"""benchmark/submit.sh on a real Slurm: two pretended machines on this one (tests/slurm.sh). Minutes, and as root:

    apt-get install -y --no-install-recommends slurmctld slurmd slurm-client
    python -m pytest -m slurm tests/test_slurm.py     (last output: benchmark/results/slurm.txt)

Three seeds from the data to PPO and DPO and their samples, each run on both machines, one process on each. The PPO run
of the last seed is preempted in the middle; the reward model of the second seed cannot be trained.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, make_world
from kill_runs import metrics, weights

SIZE, SEEDS = "nano-xs", ("1", "2", "3")
SAMPLED = ["sft", "ppo", "ppo_whiten", "dpo"]
STAGES = ["reward", *SAMPLED, *(f"{stage}_samples" for stage in SAMPLED)]
ENDED = "COMPLETED FAILED CANCELLED TIMEOUT NODE_FAIL OUT_OF_MEMORY".split()
SAID = {"capture_output": True, "text": True, "check": True}
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(not shutil.which("slurmctld") or os.getuid() != 0, reason="no Slurm here, or not root"),
]


def jobs() -> dict[str, tuple[str, str]]:
    """{name of the job and index of the task: (state, what it waits for)}."""
    found = subprocess.run(["squeue", "-h", "-a", "-t", "all", "-r", "-o", "%j|%a|%K|%T|%r|%E"], **SAID).stdout
    rows = [line.split("|") for line in found.splitlines()]
    return {name if task == "N/A" else f"{name} {task}": (state, reason) for name, _, task, state, reason, _ in rows}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Folder of a checkout whose study has been run through Slurm, and the states of its jobs at the end."""
    root = tmp_path_factory.mktemp("slurm")
    subprocess.run(["bash", ROOT / "tests" / "slurm.sh", "start", root / "slurm"], check=True)
    os.environ["SLURM_CONF"] = str(root / "slurm" / "slurm.conf")
    try:
        yield study(root)
    finally:
        subprocess.run(["scancel", "--user=root"], check=False)
        subprocess.run(["bash", ROOT / "tests" / "slurm.sh", "stop", root / "slurm"], check=False)


def study(root: Path) -> tuple[Path, dict]:
    world, checkout = make_world(root / "world"), root / "checkout"
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, **SAID).stdout.splitlines()
    for name in names:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    raw, run = world.raw, "--batch-size 8 --save-every 2 --total-episodes"
    os.environ |= {
        "DS_ACCELERATOR": "cpu",
        "VIRTUAL_ENV": sys.prefix,
        "OMP_NUM_THREADS": "1",
        "MASTER": "127.0.0.1",  # nobody resolves the names of machines that are pretended
        "SIZES": str(world.model),
        "SEEDS": " ".join(SEEDS),
        "CONFIG": "benchmark/accelerate/cpu.yaml",
        "SAMPLES_CONFIG": "benchmark/accelerate/cpu.yaml",
        "PROCESSES": "1",
        "RESOURCES": "--nodes=2 --gpus-per-node=1 --cpus-per-task=2 --mem=3000 --time=1:00:00",
        "FLAGS_tldr_dataset": f"--sft-dataset {raw}/posts --preference-dataset {raw}/comparisons --tokenizer "
        f"{world.tokenizer}",
        "FLAGS_sft": f"{run} 32 --learning-rate 1e-3",
        "FLAGS_reward": f"{run} 32 --learning-rate 1e-3",
        "FLAGS_dpo": f"{run} 32",
        "FLAGS_samples": "--response-length 10",
        "FLAGS_ppo": f"{run} 160 --response-length 10 --sample-every 0",
    }
    blocked = checkout / "runs" / "reward" / SIZE / "2"
    blocked.parent.mkdir(parents=True)
    blocked.write_text("a file where the run needs a folder")
    print(subprocess.run(["bash", "benchmark/submit.sh"], cwd=checkout, **SAID).stdout)
    preempted, began, shown = False, time.time(), ""
    while not all(state in ENDED for state, _ in jobs().values()):
        assert time.time() - began < 3000, jobs()
        log = checkout / "runs" / "ppo" / SIZE / "3" / "metrics.jsonl"
        if not preempted and log.exists() and len(log.read_text().splitlines()) >= 5:
            task = subprocess.run(["squeue", "-h", "-r", "-n", f"ppo_{SIZE}", "-t", "R", "-o", "%i %K"], **SAID).stdout
            task = next(line.split()[0] for line in task.splitlines() if line.split()[1] == "2")
            subprocess.run(["scancel", "--batch", "--signal=USR1", task], check=True)
            print(f"USR1 to {task}")
            preempted = True
        queue = subprocess.run(["squeue", "-a", "-r", "-S", "i", "-o", "%8i %20j %10T %r"], **SAID).stdout
        if queue != shown:
            shown = queue
            print(f"{time.time() - began:.0f} s\n{queue}")
        time.sleep(3)
    return checkout, jobs()


def test_the_chain_ends_and_a_failed_stage_stops_what_depends_on_it_alone(cluster):
    checkout, states = cluster
    print("ended, in this order:")
    for line in (Path(os.environ["SLURM_CONF"]).parent / "log" / "jobcomp.txt").read_text().splitlines():
        field = dict(re.findall(r"(\w+)=(\S+)", line))
        print(*(field[key] for key in ("JobId", "Name", "JobState", "StartTime", "EndTime", "NodeList")))
    stopped = {f"{stage}_{SIZE} 1" for stage in STAGES if stage.startswith(("reward", "ppo"))}
    assert len(states) == 1 + len(STAGES) * len(SEEDS)
    assert {name for name, (state, _) in states.items() if state != "COMPLETED"} == stopped
    assert states[f"reward_{SIZE} 1"][0] == "FAILED"
    waited = {states[name] for name in stopped - {f"reward_{SIZE} 1"}}
    assert waited == {("CANCELLED", "DependencyNeverSatisfied")}
    for stage in STAGES:
        for i, seed in enumerate(SEEDS):
            left = "eval/rouge.csv" if stage.endswith("_samples") else "model/model.safetensors"
            made = (checkout / "runs" / stage.removesuffix("_samples") / SIZE / seed / left).exists()
            assert made == (f"{stage}_{SIZE} {i}" not in stopped), (stage, seed)


def test_no_other_task_is_started_again(cluster):
    """The id of the last task of an array is that of the whole array."""
    said = subprocess.run(["scontrol", "show", "job", "--oneliner"], **SAID).stdout.splitlines()
    fields = [dict(re.findall(r"(\w+)=(\S+)", line)) for line in said]
    again = {f"{row['JobName']} {row['ArrayTaskId']}": row["Restarts"] for row in fields if row["Restarts"] != "0"}
    assert again == {f"ppo_{SIZE} 2": "1"}


def processes(run: Path) -> int:
    return json.loads((run / "args.json").read_text())["processes"]


def test_a_preempted_run_continues_to_the_same_end(cluster):
    checkout, _ = cluster
    (log,) = (checkout / "logs").glob(f"ppo_{SIZE}_*_2.out")
    assert "stopped by a signal after update" in log.read_text() and " continues after update " in log.read_text()
    run, undisturbed = checkout / "runs" / "ppo" / SIZE / "3", checkout / "undisturbed"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "benchmark/accelerate/cpu.yaml"]
    command += ["ppo.py", "--model", SIZE, "--seed", "3", "--output-dir", str(undisturbed)]
    subprocess.run([*command, *os.environ["FLAGS_ppo"].split()], cwd=checkout, **SAID)
    assert metrics(run) == metrics(undisturbed) and weights(run) == weights(undisturbed) and processes(run) == 2
    assert metrics(checkout / "runs" / "ppo_whiten" / SIZE / "3") != metrics(undisturbed)


NO_COMPILING = """# DeepSpeed without its operation for shared memory, which takes two minutes to compile; gloo does it
import importlib.util, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "deepspeed.comm.torch":
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (load(module), setattr(module, "build_shm_op", lambda: None))
            return spec
sys.meta_path.insert(0, Finder())
"""


def test_zero2_over_two_machines(cluster):
    """DeepSpeed's float32 run is that of one process without it, but for the rounding of sums."""
    checkout, _ = cluster
    (checkout / "sitecustomize.py").write_text(NO_COMPILING)
    environment = os.environ | {"STAGES": "sft", "SEEDS": "3", "CONFIG": "benchmark/accelerate/zero2.yaml"}
    environment["PYTHONPATH"] = str(checkout)
    subprocess.run(["bash", "benchmark/submit.sh"], cwd=checkout, env=environment, check=True)
    while subprocess.run(["squeue", "-h"], **SAID).stdout:  # pending or running
        time.sleep(3)
    run, plain = checkout / "runs" / "sft" / SIZE / "3", checkout / "one_process"
    command = [sys.executable, "sft.py", "--model", os.environ["SIZES"], "--seed", "3", "--output-dir", str(plain)]
    subprocess.run([*command, *os.environ["FLAGS_sft"].split()], cwd=checkout, **SAID)
    assert (processes(run), processes(plain)) == (2, 1) and len(metrics(run)) == len(metrics(plain)) == 5
    for line, expected in zip(metrics(run), metrics(plain), strict=True):
        assert line == pytest.approx(expected, rel=1e-5, abs=1e-6)
