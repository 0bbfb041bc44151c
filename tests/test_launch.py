"""What benchmark/ launches: the committed commands are those that submit.sh makes, and the scripts take them."""

import re
import shlex
import subprocess
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import tyro
import yaml
from accelerate.commands.config import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import DistributedType
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, GPTNeoXForSequenceClassification

import dpo
import ppo
import reward
import sft
import tldr_dataset

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {"tldr_dataset": tldr_dataset, "sft": sft, "reward": reward, "ppo": ppo, "dpo": dpo}
COMMANDS = (ROOT / "benchmark" / "commands.md").read_text()
SIZES, SEEDS = ("1b", "2.8b", "6.9b"), (44413, 55513, 66613, 77713)


def test_the_committed_commands_are_those_that_submit_prints():
    done = subprocess.run(["bash", "benchmark/submit.sh", "--dry-run"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == COMMANDS, "bash benchmark/submit.sh --dry-run > benchmark/commands.md"
    done = subprocess.run(["bash", "benchmark/submit.sh", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "error: --help" in done.stderr


def test_the_scripts_take_every_command():
    runs = set()
    for line in [line for line in COMMANDS.splitlines() if line.startswith("accelerate launch")]:
        launch, _ = launch_command_parser().parse_known_args(shlex.split(line)[2:])
        assert yaml.safe_load((ROOT / launch.config_file).read_text())["deepspeed_config"]["zero_stage"] == 2
        stage = launch.training_script.removesuffix(".py")
        args = tyro.cli(SCRIPTS[stage].Args, args=launch.training_script_args)
        assert args.model in SCRIPTS[stage].PRESETS and args.run_eval and args.save_every
        whiten = stage == "ppo" and args.whiten_rewards
        assert args.output_dir == (f"runs/ppo_whiten/{args.model}/{args.seed}" if whiten else None)
        runs.add((stage, whiten, args.model, args.seed))
    assert runs == set(product(("sft", "reward", "ppo", "dpo"), [False], SIZES, SEEDS)) | set(
        product(["ppo"], [True], SIZES, SEEDS)
    )
    [line] = [line for line in COMMANDS.splitlines() if line.startswith("python tldr_dataset.py")]
    assert tyro.cli(tldr_dataset.Args, args=shlex.split(line)[2:]).output_dir == "data/tldr"


def test_each_array_waits_for_the_stage_before_it():
    waits = {}
    for line in [line for line in COMMANDS.splitlines() if line.startswith("sbatch")]:
        found = dict(re.findall(r"'--([\w-]+)=([^']*)'", line))
        waits[found["job-name"]] = found.get("dependency")
        assert found.get("array") == (None if found["job-name"] == "tldr_dataset" else "0-3")
        assert {"mem", "time"} <= set(found)
    before = {"reward": "sft", "ppo": "reward", "ppo_whiten": "reward", "dpo": "sft"}
    expected = {f"{stage}_{size}": f"aftercorr:<{other}_{size}>" for stage, other in before.items() for size in SIZES}
    expected |= {f"sft_{size}": "afterok:<tldr_dataset>" for size in SIZES} | {"tldr_dataset": None}
    assert waits == expected


@pytest.mark.parametrize("name", ["cpu", "ddp", "zero2", "zero2_offload", "zero3"])
def test_accelerate_reads_the_configurations(name):
    config = load_config_from_file(str(ROOT / "benchmark" / "accelerate" / f"{name}.yaml"))  # fails on unknown keys
    assert (config.distributed_type == "DEEPSPEED") == name.startswith("zero")
    if name.startswith("zero"):
        assert config.deepspeed_config["zero_stage"] == int(name[4])
        assert ("offload_optimizer_device" in config.deepspeed_config) == (name == "zero2_offload")


# ---- where earlier models come from, and where frozen ones wait -------------------------------------------------


@pytest.mark.parametrize("module", [reward, ppo, dpo])
def test_earlier_stages_are_ours_or_the_papers(module):
    args = module.Args(model="2.8b", seed=66613)
    assert module.earlier(args, "sft") == "runs/sft/2.8b/66613"
    args.from_released = True
    expected = "vwxyzjn/EleutherAI_pythia-2.8b-deduped__{0}__tldr@{0}__66613__"
    for stage in ("sft", "reward"):
        assert re.fullmatch(re.escape(expected.format(stage)) + r"\d+", module.earlier(args, stage))
    for model, seed in (("2.8b", 1), ("nano-xs", 66613)):
        args.model, args.seed = model, seed
        with pytest.raises(SystemExit, match=f"no sft model of size {model} and seed {seed}"):
            module.earlier(args, "sft")


def accelerator(stage: int | None, mixed_precision: str):
    kind = DistributedType.NO if stage is None else DistributedType.DEEPSPEED
    state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=stage))
    return SimpleNamespace(
        device=torch.device("cpu"), distributed_type=kind, state=state, mixed_precision=mixed_precision
    )


def test_frozen_models_are_of_the_trained_ones_precision():
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    for stage, precision in ((None, "no"), (None, "bf16"), (2, "no"), (2, "bf16"), (3, "bf16")):
        half = stage is not None and precision == "bf16"
        for kind in (GPTNeoXForCausalLM, GPTNeoXForSequenceClassification):
            model = kind(GPTNeoXConfig(**shape, vocab_size=8, num_labels=1))
            found = ppo.frozen(accelerator(stage, precision), model)
            dtypes = {name: parameter.dtype for name, parameter in found.named_parameters()}
            head = {name for name in dtypes if name.startswith("score.")}
            assert {dtypes[name] for name in head} <= {torch.float32}
            assert {dtypes[name] for name in set(dtypes) - head} == {torch.bfloat16 if half else torch.float32}
            assert {buffer.dtype for buffer in found.buffers()} == {torch.float32}  # rotary frequencies
            assert not any(x.requires_grad for x in found.parameters()) and not found.training


def test_an_offloaded_model_is_on_the_device_while_it_works_alone():
    calls = []
    model = SimpleNamespace(to=calls.append)
    with ppo.on_device(model, "cuda:0", offload=True):
        assert calls == ["cuda:0"]
    assert calls == ["cuda:0", "cpu"]
    with ppo.on_device(model, "cuda:1", offload=False):
        pass
    assert calls == ["cuda:0", "cpu", "cuda:1"]
