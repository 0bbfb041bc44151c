"""Every launch line in the repository goes through benchmark/plan.py: it fits its devices of 80 GB."""

import math
import re
import shlex
import subprocess
from pathlib import Path

import plan
import yaml
from conftest import ROOT

STAGES = ("sft", "reward", "dpo", "ppo")
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), ROOT / "benchmark" / "commands.md"]
SCRIPTS = [*(ROOT / f"{stage}.py" for stage in STAGES), ROOT / "ensembles/ppo.py", ROOT / "llama2/reward.py"]


def launch_lines() -> set[str]:
    """Commands that start several processes, of documents, the scripts' heads and the ensemble paper's script."""
    text = "\n".join(path.read_text() for path in [*DOCUMENTS, *SCRIPTS])
    shown = ["bash", "ensembles/run.sh", "--dry-run"]
    text += subprocess.run(shown, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    text = text.replace("\\\n", " ")
    return {line.group() for line in re.finditer(r"(accelerate launch|torchrun) .*?\.py .*", text)}


def planned(line: str) -> plan.Args | None:
    """What plan.py is asked about a launch line; None for one of a nano model or of a script that trains nothing."""
    words = shlex.split(line, comments=True)
    script = next(word for word in words if word.endswith(".py"))
    stage = Path(script).stem
    flags = dict(zip(words, [*words[1:], ""], strict=True))
    where = " ".join(words[words.index(script) + 1 :])
    model = flags.get("--model", where.split()[0])
    size = re.search(r"pythia-([\d.]+[bm])|\b([\d.]+[bm])\b", model)
    if stage not in plan.STAGES or not size:
        return None
    given = {"zero": 0, "gpus": int(flags.get("--nproc_per_node", 1))}
    if words[0] == "accelerate":
        settings = yaml.safe_load((ROOT / flags.get("--config_file", "benchmark/accelerate/zero2.yaml")).read_text())
        deepspeed = settings.get("deepspeed_config", {})
        given = {"zero": deepspeed.get("zero_stage", 0), "offload_optimizer": "offload_optimizer_device" in deepspeed}
        given["gpus"] = int(flags.get("--num_processes", settings["num_processes"]))
    model = next(filter(None, size.groups()))
    if model in ("2.8b", "6.9b") and given["gpus"] > 1:
        given["zero"] = given["zero"] or 2  # which the scripts ask for
    members = where.partition("--reward-model-paths ")[2].partition(" --")[0].split()
    given["reward_models"] = len(members) or 1
    return plan.Args(stage, model=model, **given)


def test_every_launch_line_fits():
    lines = launch_lines()
    asked = {line: planned(line) for line in lines}
    told = {args.stage for args in asked.values() if args}
    assert told == set(plan.STAGES) and sum(args is not None for args in asked.values()) > 110
    for line, args in asked.items():
        if args:
            peak = plan.plan(args)["peak"] / 1e9
            assert peak <= 80, f"{peak:.0f} GB: {line}"


def test_slurm_s_memory_is_the_plan_s_and_a_margin():
    """The plan's memory of the machine, a quarter more, and 8 GB for each of 8 processes, up to the next 50 GB; samples
    of every size take what SFT needs at the largest, to load one model a process."""
    dry = subprocess.run(["bash", "benchmark/submit.sh", "--dry-run"], cwd=ROOT, capture_output=True, text=True)
    found = dict(re.findall(r"--job-name=(\w+_[\d.]+b)\b.*--mem=(\d+)G", dry.stdout))
    for name, memory in found.items():
        stage, _, model = name.rpartition("_")
        args = plan.Args(stage.removesuffix("_whiten"), model=model)
        if stage.endswith("_samples"):
            args = plan.Args("sft", model="6.9b")
        assert int(memory) == 50 * math.ceil((1.25 * plan.plan(args)["host"] / 1e9 + 8 * 8) / 50), name
    assert len(found) == 9 * 3


def test_what_cannot_fit_is_noticed():
    """Float32 weights of 6.9b, and of PPO's models at 2.8b, on one device."""
    launched = "torchrun --nproc_per_node 1"
    for script in [*(f"{stage}.py --model 6.9b" for stage in STAGES), "ppo.py --model 2.8b"]:
        assert plan.plan(planned(f"{launched} {script}"))["peak"] > 80e9
