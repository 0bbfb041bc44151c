"""Every stage under DeepSpeed ZeRO-2 in bfloat16, as accelerate launches it: two processes on a CPU. A stopped run
resumes to the same bytes; losses stay near those of float32 (where DeepSpeed equals one process: test_invariance.py).
Minutes, so it runs on demand only:

python -m pytest -m long tests/test_deepspeed.py     (last output: benchmark/results/deepspeed.txt)
"""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import kill_runs
import pytest
import torch
import yaml
from conftest import ROOT, free_port
from kill_runs import STAGES, left_behind, metrics
from test_faults import toy, toy_args

import sft


def launch(folder: Path, jobs: list, configured: bool = True, **changes) -> tuple[int, str]:
    """Exit code and output of jobs, [(what, arguments)], that two processes of a launch of accelerate (or without a
    configuration, of torchrun) do one after another."""
    config = yaml.safe_load((ROOT / "benchmark" / "accelerate" / "zero2.yaml").read_text())
    (folder / "zero2.yaml").write_text(yaml.safe_dump(config | {"num_processes": 2} | changes))
    (folder / "jobs.json").write_text(json.dumps([(what, vars(args)) for what, args in jobs]))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(folder / "zero2.yaml")]
    command += ["--main_process_port", str(free_port()), __file__, str(folder / "jobs.json")]
    if not configured:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
        command += ["--master_port", str(free_port()), __file__, str(folder / "jobs.json")]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "WORLD_SIZE", "RANK"))}
    environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900)
    return done.returncode, done.stdout + done.stderr[-4000:]


@pytest.mark.long
def test_zero2_in_bfloat16_resumes_to_the_same_end(tmp_path, record_property):
    arguments, jobs, again = kill_runs.settings(tmp_path), [], []
    for stage, args in arguments.items():
        args = replace(args, track=False, micro_batch_size=2, mixed_precision="bf16", total_episodes=32)
        whole = replace(args, output_dir=str(tmp_path / f"{stage}.zero2"))
        stopped = replace(args, output_dir=str(tmp_path / f"{stage}.stopped"))
        jobs += [(stage, whole), (f"{stage} to 3", stopped)]
        again.append((stage, replace(stopped, resume=True)))
        plain = replace(whole, output_dir=str(tmp_path / f"{stage}.plain"), mixed_precision="no")
        assert kill_runs.finish(kill_runs.start(stage, plain)) == 0
    code, output = launch(tmp_path, jobs)
    assert code == 0, output[-6000:]
    code, output = launch(tmp_path, again)
    assert code == 0 and output.count("continues after update 3") == len(STAGES), output[-6000:]
    for stage in STAGES:
        found, expected = left_behind(tmp_path / f"{stage}.stopped"), left_behind(tmp_path / f"{stage}.zero2")
        assert [key for key in expected if found[key] != expected[key]] == [] and expected["weights"], stage
        off = []
        for line, other in zip(expected["metrics"], metrics(tmp_path / f"{stage}.plain"), strict=True):
            for key in [key for key in other if key.startswith(("loss/", "eval/loss"))]:
                assert abs(line[key] - other[key]) <= 2e-2 * abs(other[key]) + 1e-2, (stage, line, other)
                off.append((abs(line[key] - other[key]), other[key]))
        record_property("deepspeed", [stage, "ZeRO-2", "bf16", f"{max(off)[0]:.1e}", f"{max(off)[1]:.4f}"])
    # policy and reference are the same model in the same precision
    assert metrics(tmp_path / "ppo.zero2")[0]["objective/kl"] == 0


@pytest.mark.long
def test_the_plumbing_under_zero2(tmp_path):
    """Gradients are summed in float32, and no other launch continues."""
    args = toy_args(tmp_path / "run", mixed_precision="bf16")
    code, output = launch(tmp_path, [("toy", args)])
    assert code == 0, output[-6000:]
    assert output.count("norm 1.5\n") == 2
    assert kill_runs.finish(kill_runs.start("toy", replace(args, resume=True), toy)) == 1
    assert "update_000006 cannot be loaded" in Path(f"{args.output_dir}.log").read_text()


@pytest.mark.long
def test_large_presets_train_under_zero2_without_a_configuration(tmp_path):
    """The same metrics and weights as with zero2.yaml."""
    args = replace(kill_runs.settings(tmp_path)["ppo"], track=False, micro_batch_size=2, mixed_precision="bf16")
    runs = []
    for configured in (True, False):
        args = replace(args, model="6.9b", output_dir=str(tmp_path / str(configured)))
        code, output = launch(tmp_path, [("ppo", args)], configured)
        assert code == 0, output[-6000:]
        runs.append(left_behind(Path(args.output_dir)))
    assert runs[0] == runs[1] and runs[0]["weights"]


@pytest.mark.long
def test_zero3_is_refused(tmp_path):
    settings = {"deepspeed_config": {"zero_stage": 3, "deepspeed_multinode_launcher": "standard"}}
    code, output = launch(tmp_path, [("prepare", toy_args(tmp_path / "run"))], **settings)
    assert code != 0 and "shards the weights (FSDP, ZeRO-3)" in output
    assert not (tmp_path / "run").exists()


# ---- inside the two processes -----------------------------------------------------------------------------------


def summed_in_float32(args):
    """The gradient of 1 and of 256 times 2^-9, one micro-batch each: in bfloat16 the sum would stay 1."""
    accelerator = sft.make_accelerator(replace(args, output_dir=args.output_dir + ".sum"))
    model, _ = sft.prepare(accelerator, torch.nn.Linear(1, 1, bias=False), args)
    for i, x in enumerate([1.0] + [2**-9] * 256):
        accelerator.sync_gradients = model.require_backward_grad_sync = i == 256
        accelerator.backward(model(torch.full((1, 1), x, dtype=torch.bfloat16)).sum())
    norm = float(accelerator.clip_grad_norm_(model.parameters(), float("inf")))
    print(f"norm {norm}\n", end="", flush=True)


def do(what: str, arguments: dict):
    stage, _, until = what.partition(" to ")
    if stage == "toy":
        args = sft.Args(**arguments)
        summed_in_float32(args)
        toy(args)
    elif stage == "prepare":
        args = sft.Args(**arguments)
        sft.prepare(sft.make_accelerator(args), torch.nn.Linear(8, 8), args)
    elif not until:
        STAGES[stage].main(STAGES[stage].Args(**arguments))
    else:
        module, write = STAGES[stage], STAGES[stage].write_metrics

        def write_and_stop(accelerator, args, metrics, update, last):
            write(accelerator, args, metrics, update, last)
            if update == int(until) and accelerator.is_main_process:
                os.kill(os.getpid(), signal.SIGUSR1)

        module.write_metrics = write_and_stop
        try:
            module.main(module.Args(**arguments))
        except SystemExit as end:
            assert end.code == 75
        module.write_metrics = write


if __name__ == "__main__":
    import deepspeed  # noqa: F401

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # spares two minutes of compiling; gloo does it
    destroy, torch.distributed.destroy_process_group = torch.distributed.destroy_process_group, lambda group=None: None
    for job in json.loads(Path(sys.argv[1]).read_text()):
        do(*job)
    destroy()
