"""What benchmark/ launches: the committed commands are those that submit.sh makes, and the scripts take them."""

import os
import re
import shlex
import subprocess
import sys
from itertools import product
from types import SimpleNamespace

import pandas
import plan
import pytest
import samples
import torch
import tyro
import yaml
from accelerate import Accelerator, DistributedType
from accelerate.commands.launch import launch_command_parser
from conftest import ROOT, write_program
from transformers import (
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GPTNeoXForSequenceClassification,
    Qwen2ForCausalLM,
)

import dpo
import ppo
import reward
import sft
import tldr_dataset

SCRIPTS = {"tldr_dataset": tldr_dataset, "sft": sft, "reward": reward, "ppo": ppo, "dpo": dpo}
SCRIPTS |= {"eval/samples": samples}
COMMANDS = (ROOT / "benchmark" / "commands.md").read_text()
SIZES, SEEDS = ("1b", "2.8b", "6.9b"), (44413, 55513, 66613, 77713)


def test_the_committed_commands_are_those_that_submit_prints():
    done = subprocess.run(["bash", "benchmark/submit.sh", "--dry-run"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == COMMANDS, "bash benchmark/submit.sh --dry-run > benchmark/commands.md"
    done = subprocess.run(["bash", "benchmark/submit.sh", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "error: --help" in done.stderr


def test_checkpoints_are_at_most_about_two_hours_apart():
    for line in [line for line in COMMANDS.splitlines() if "--save-every" in line and line.startswith("accelerate")]:
        flags = dict(zip(shlex.split(line), shlex.split(line)[1:], strict=False))
        stage = re.search(r" (\w+)\.py ", line)[1]
        batch, items, _ = plan.STAGES[stage]
        hours = plan.plan(plan.Args(stage, flags["--model"]))["hours"] * batch / items
        assert int(flags["--save-every"]) * hours < 2 and int(flags["--save-every"]) < items // batch


def test_the_scripts_take_every_command():
    runs, sampled = set(), set()
    for line in [line for line in COMMANDS.splitlines() if line.startswith("accelerate launch")]:
        launch, _ = launch_command_parser().parse_known_args(shlex.split(line)[2:])
        config, stage = yaml.safe_load((ROOT / launch.config_file).read_text()), launch.training_script[:-3]
        args = tyro.cli(SCRIPTS[stage].Args, args=launch.training_script_args)
        if stage == "eval/samples":
            assert config["distributed_type"] == "MULTI_GPU"
            _, stage, model, seed = args.checkpoint.split("/")
            scored = stage.startswith("ppo")
            assert args.reward_model_path == (f"runs/reward/{model}/{seed}" if scored else None)
            assert args.splits == (("validation",) if scored else ("validation", "test"))
            sampled.add((stage, model, int(seed)))
            continue
        assert config["deepspeed_config"]["zero_stage"] == 2
        assert args.model in SCRIPTS[stage].MICRO_BATCH_SIZES and args.save_every
        assert getattr(args, "run_eval", None) == (None if stage in ("sft", "ppo") else True)
        name = "ppo_whiten" if stage == "ppo" and args.whiten_rewards else stage
        assert args.output_dir.format(model=args.model, seed=args.seed) == f"runs/{name}/{args.model}/{args.seed}"
        runs.add((name, args.model, args.seed))
    assert runs == set(product(("sft", "reward", "ppo", "ppo_whiten", "dpo"), SIZES, SEEDS))
    assert sampled == {run for run in runs if run[0] != "reward"}
    [line] = [line for line in COMMANDS.splitlines() if line.startswith("python tldr_dataset.py")]
    assert tyro.cli(tldr_dataset.Args, args=shlex.split(line)[2:]).output_dir == "data/tldr"


def test_each_array_waits_for_the_stage_before_it():
    waits = {}
    for line in [line for line in COMMANDS.splitlines() if line.startswith("sbatch")]:
        found = dict(re.findall(r"--([\w-]+)=(\S*)", line.replace("\\", "")))
        waits[found["job-name"]] = found.get("dependency")
        assert found.get("array") == (None if found["job-name"] == "tldr_dataset" else "0-3")
        assert {"mem", "time"} <= set(found)
    before = {"reward": "sft", "ppo": "reward", "ppo_whiten": "reward", "dpo": "sft"}
    before |= {f"{stage}_samples": stage for stage in ("sft", "ppo", "ppo_whiten", "dpo")}
    expected = {f"{stage}_{size}": f"aftercorr:<{other}_{size}>" for stage, other in before.items() for size in SIZES}
    expected |= {f"sft_{size}": "afterok:<tldr_dataset>" for size in SIZES} | {"tldr_dataset": None}
    assert waits == expected


def test_the_step_of_a_task_has_its_cores_and_environment(tmp_path):
    write_program(tmp_path / "srun", f'#!/usr/bin/env bash\necho "$SRUN_CPUS_PER_TASK $*" >{tmp_path}/call\n')
    write_program(tmp_path / "scontrol", "#!/usr/bin/env bash\necho node1\n")
    job = {"JOB_NODELIST": "n", "JOB_NUM_NODES": "1", "JOB_ID": "7", "ARRAY_TASK_ID": "1", "CPUS_PER_TASK": "32"}
    settings = {f"SLURM_{name}": value for name, value in (job | {"EXPORT_ENV": "NONE"}).items()}
    settings["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    command = ["bash", ROOT / "benchmark/stage.sbatch", "c.yaml", "8", "1 2", "sft.py", "--seed", "{seed}"]
    subprocess.run(command, cwd=tmp_path, env=os.environ | settings, check=True)
    call = (tmp_path / "call").read_text()
    assert call.startswith("32 --export=ALL ") and call.endswith("sft.py --seed 2 --resume\n")


def test_data_of_other_flags_are_not_taken(tmp_path):
    """The flags stand in the data card. Data that were made by hand with the same flags serve."""
    folder = tmp_path / "data/tldr/sft"
    folder.mkdir(parents=True)
    table = pandas.DataFrame({"dataset": ["sft"], "rows": [1]})

    def code(made: list[str], *flags: str) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["tldr_dataset.py", *made])
            (folder / "README.md").write_text(tldr_dataset.card_text("sft", tldr_dataset.Args(), table))
        command = ["bash", ROOT / "benchmark/tldr_dataset.sbatch", "--output-dir", "data/tldr", *flags]
        environment = os.environ | {"VIRTUAL_ENV": sys.prefix}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True).returncode

    tokenizer = ["--tokenizer", "a b"]
    for made, flags in product(([], tokenizer), repeat=2):
        assert code(made, *flags) == (made != flags) == code(["--output-dir", "data/tldr", *made], *flags)
    (folder / "README.md").unlink()  # published data
    command = ["bash", ROOT / "benchmark/tldr_dataset.sbatch", "--output-dir", "data/tldr"]
    subprocess.run(command, cwd=tmp_path, env=os.environ | {"VIRTUAL_ENV": sys.prefix}, check=True)


# ---- where frozen models wait, and as what -----------------------------------------------------------------------


SHAPE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def accelerator(deepspeed: bool, mixed_precision: str):
    state = SimpleNamespace(deepspeed_plugin=SimpleNamespace() if deepspeed else None)
    return SimpleNamespace(device=torch.device("cpu"), state=state, mixed_precision=mixed_precision)


def test_frozen_models_are_of_the_trained_ones_precision():
    for deepspeed, precision in product((False, True), ("no", "bf16")):
        half = precision == "bf16"
        for kind in (GPTNeoXForCausalLM, GPTNeoXForSequenceClassification):
            model = kind(GPTNeoXConfig(**SHAPE, vocab_size=8, num_labels=1))
            if kind is GPTNeoXForSequenceClassification:
                model = ppo.RewardModel(model)
            found = ppo.frozen_model(accelerator(deepspeed, precision), model, False)
            dtypes = {name: parameter.dtype for name, parameter in found.named_parameters()}
            head = {name for name in dtypes if name == "model.score.weight"}
            assert {dtypes[name] for name in head} <= {torch.float32}
            # what a forward pass looks up or normalises with is float32 under autocast; the rest would be cast there
            kept = set() if deepspeed else {name for name in dtypes if "norm" in name or "embed_in" in name}
            assert {dtypes[name] for name in kept} <= {torch.float32}
            others = {dtypes[name] for name in set(dtypes) - head - kept - {"bias"}}  # a frozen head's, which is 0
            assert others == {torch.bfloat16 if half else torch.float32}
            assert {buffer.dtype for buffer in found.buffers()} == {torch.float32}  # rotary frequencies
            assert not any(x.requires_grad for x in found.parameters())


@pytest.mark.parametrize("kind", [GPTNeoXForCausalLM, GPT2LMHeadModel, Qwen2ForCausalLM])
def test_a_frozen_model_in_bfloat16_says_the_same_under_autocast(kind):
    """To the bit, with a head of its own or one that shares the embedding's weights (GPT-2, Qwen2 here)."""
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    torch.manual_seed(1)
    config = kind.config_class(**shape, vocab_size=50, tie_word_embeddings=kind is not GPTNeoXForCausalLM)
    model = kind(config).eval()
    tokens = torch.arange(48).reshape(4, 12)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(tokens).logits
        before = sum(x.nbytes for x in model.parameters())
        found = ppo.frozen_model(accelerator(False, "bf16"), model, False)(tokens).logits
    assert torch.equal(found, expected)
    after = sum(x.nbytes for x in model.parameters())
    assert after < 0.9 * before or kind is GPT2LMHeadModel  # whose layers are no nn.Linear


@pytest.mark.parametrize("given", [{}, {"PYTORCH_ALLOC_CONF": "garbage_collection_threshold:0.8"}])
def test_what_a_run_sets_for_a_gpu(given, tmp_path, monkeypatch):
    """cuDNN's attention is off; the allocator's segments grow, unless the user has settings of their own."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    torch.backends.cuda.enable_cudnn_sdp(True)
    sft.make_accelerator(sft.Args(output_dir=str(tmp_path)))
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert os.environ["PYTORCH_ALLOC_CONF"] == given.get("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def test_fsdp_is_refused(tmp_path, monkeypatch):
    """ZeRO-3 is refused in test_deepspeed.py."""
    monkeypatch.setattr(Accelerator, "distributed_type", property(lambda _: DistributedType.FSDP))
    with pytest.raises(SystemExit, match="FSDP"):
        sft.make_accelerator(sft.Args(output_dir=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


def test_an_offloaded_model_is_on_the_device_while_it_works_and_is_never_copied_back():
    model = ppo.frozen_model(accelerator(False, "no"), GPTNeoXForCausalLM(GPTNeoXConfig(**SHAPE, vocab_size=8)), True)

    def tensors():
        return [*model.parameters(), *model.buffers()]

    there, contents = [x.data_ptr() for x in tensors()], [x.clone() for x in tensors()]
    with ppo.on_device(SimpleNamespace(device=torch.float64), model):  # a type for a device: there is but one here
        assert {x.dtype for x in tensors()} == {torch.float64}
    assert [x.data_ptr() for x in tensors()] == there  # the same memory
    assert all(torch.equal(x, y) for x, y in zip(tensors(), contents, strict=True))
