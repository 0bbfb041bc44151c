"""benchmark/submit.sh on a real Slurm: two pretended machines on this one (tests/slurm.sh). Minutes, and as root:

    apt-get install -y --no-install-recommends slurmctld slurmd slurm-client
    python -m pytest -m slurm tests/test_slurm.py     (last output: benchmark/results/slurm.txt)

Two sizes and two seeds from the data to PPO and DPO, each run on both machines, one process on each. One PPO run is
preempted in the middle; one reward model cannot be trained.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import make_world
from kill_runs import metrics, weights
from test_invariance import assert_same_metrics

ROOT = Path(__file__).resolve().parents[1]
SIZES, SEEDS = ("nano-xs", "nano-s"), ("1", "2")
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
    import nano

    world, checkout = make_world(root / "world"), root / "checkout"
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, **SAID).stdout.splitlines()
    for name in names:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    nano.main(nano.Args(tokenizer=str(world.tokenizer), size="s", output_dir=str(root / "world" / "nano-s")))
    raw, run = world.raw, "--batch-size 8 --save-every 2 --total-episodes"
    os.environ |= {
        "DS_ACCELERATOR": "cpu",
        "VIRTUAL_ENV": sys.prefix,
        "OMP_NUM_THREADS": "1",
        "MASTER": "127.0.0.1",  # nobody resolves the names of machines that are pretended
        "SIZES": " ".join(str(root / "world" / size) for size in SIZES),
        "SEEDS": " ".join(SEEDS),
        "CONFIG": "benchmark/accelerate/cpu.yaml",
        "PROCESSES": "1",
        "RESOURCES": "--nodes=2 --gpus-per-node=1 --cpus-per-task=2 --mem=3000 --time=1:00:00",
        "FLAGS_tldr_dataset": f"--sft-dataset {raw}/posts --preference-dataset {raw}/comparisons --tokenizer "
        f"{world.tokenizer}",
        "FLAGS_sft": f"{run} 32 --learning-rate 1e-3 --response-length 10",
        "FLAGS_reward": f"{run} 32 --learning-rate 1e-3",
        "FLAGS_dpo": f"{run} 32 --response-length 10",
        "FLAGS_ppo": f"{run} 160 --response-length 10 --sample-every 0",
    }
    blocked = checkout / "runs" / "reward" / "nano-s" / "2"
    blocked.parent.mkdir(parents=True)
    blocked.write_text("a file where the run needs a folder")
    print(subprocess.run(["bash", "benchmark/submit.sh"], cwd=checkout, **SAID).stdout)
    preempted, began, shown = False, time.time(), ""
    while not all(state in ENDED for state, _ in jobs().values()):
        assert time.time() - began < 1500, jobs()
        log = checkout / "runs" / "ppo" / "nano-xs" / "1" / "metrics.jsonl"
        if not preempted and log.exists() and len(log.read_text().splitlines()) >= 5:
            task = subprocess.run(["squeue", "-h", "-r", "-n", "ppo_nano-xs", "-t", "R", "-o", "%i %K"], **SAID).stdout
            task = next(line.split()[0] for line in task.splitlines() if line.split()[1] == "0")
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
    stopped = {"reward_nano-s 1", "ppo_nano-s 1", "ppo_whiten_nano-s 1"}
    assert len(states) == 1 + 5 * len(SIZES) * len(SEEDS)
    assert {name for name, (state, _) in states.items() if state != "COMPLETED"} == stopped
    assert states["reward_nano-s 1"][0] == "FAILED"
    assert {states[f"{stage}_nano-s 1"] for stage in ("ppo", "ppo_whiten")} == {
        ("CANCELLED", "DependencyNeverSatisfied")
    }
    for stage in ("sft", "reward", "ppo", "ppo_whiten", "dpo"):
        for size in SIZES:
            for i, seed in enumerate(SEEDS):
                made = (checkout / "runs" / stage / size / seed / "model" / "model.safetensors").exists()
                assert made == (f"{stage}_{size} {i}" not in stopped), (stage, size, seed)


def test_a_preempted_run_continues_to_the_same_end(cluster):
    checkout, _ = cluster
    (log,) = (checkout / "logs").glob("ppo_nano-xs_*_0.out")
    text = log.read_text()
    assert (
        "2 process(es)" in text and "stopped by a signal after update" in text and "--resume: continuing from" in text
    )
    run = checkout / "runs" / "ppo" / "nano-xs"
    undisturbed = checkout / "undisturbed"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "benchmark/accelerate/cpu.yaml"]
    command += ["ppo.py", "--model", "nano-xs", "--seed", "1", "--run-eval", "--output-dir", str(undisturbed)]
    flags = "--batch-size 8 --save-every 2 --total-episodes 160 --response-length 10 --sample-every 0"
    subprocess.run([*command, *flags.split()], cwd=checkout, **SAID)
    assert metrics(run / "1") == metrics(undisturbed) and weights(run / "1") == weights(undisturbed)
    assert metrics(run / "2") != metrics(undisturbed)


def test_zero3_over_two_machines(cluster):
    checkout, _ = cluster
    environment = os.environ | {"STAGES": "sft", "SEEDS": "3", "CONFIG": "benchmark/accelerate/zero3.yaml"}
    environment["SIZES"] = os.environ["SIZES"].split()[0]
    subprocess.run(["bash", "benchmark/submit.sh"], cwd=checkout, env=environment, check=True)
    while subprocess.run(["squeue", "-h"], **SAID).stdout:  # pending or running
        time.sleep(3)
    [log] = [x for x in (checkout / "logs").glob("sft_nano-xs_*_0.out") if "runs/sft/nano-xs/3" in x.read_text()]
    assert "2 process(es)" in log.read_text()
    plain = checkout / "one_process"
    command = [sys.executable, "sft.py", "--model", environment["SIZES"], "--seed", "3", "--output-dir", str(plain)]
    subprocess.run([*command, *os.environ["FLAGS_sft"].split(), "--run-eval"], cwd=checkout, **SAID)
    assert_same_metrics(plain, checkout / "runs" / "sft" / "nano-xs" / "3")
