"""Every launch line in the repository goes through benchmark/plan.py: it fits its devices of 80 GB. And what a pass
without gradient allocates is what the plan says."""

import math
import re
import shlex
import subprocess
from pathlib import Path

import plan
import pytest
import torch
import yaml
from test_plan import LAYERS, PAD, STAGES, VOCAB, WIDTH, config, peak_bytes, tokens
from torch.profiler import ProfilerActivity, profile
from transformers import GPTNeoXForCausalLM, GPTNeoXForSequenceClassification, StaticCache

import dpo
import ppo
import reward

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), ROOT / "benchmark" / "commands.md"]
SCRIPTS = [*(ROOT / f"{stage}.py" for stage in STAGES), ROOT / "ensembles/ppo.py", ROOT / "llama2/reward.py"]
SCRIPTS += [ROOT / "eval/samples.py"]


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
    if words[0] == "accelerate":  # without --config_file by accelerate's default, which README.md makes this one
        settings = yaml.safe_load((ROOT / flags.get("--config_file", "benchmark/accelerate/zero2.yaml")).read_text())
        deepspeed = settings.get("deepspeed_config", {})
        given = {"zero": deepspeed.get("zero_stage", 0), "offload_optimizer": "offload_optimizer_device" in deepspeed}
        given["gpus"] = int(flags.get("--num_processes", settings["num_processes"]))
    members = where.partition("--reward-model-paths ")[2].partition(" --")[0].split()
    given["reward_models"] = (len(members) or 1) + ("--gold " in where)
    if stage == "samples":
        given["reward_models"] = int("--reward-model-path" in where)
    return plan.Args(stage, model=next(filter(None, size.groups())), **given)


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
    of every size take what the largest needs."""
    dry = subprocess.run(["bash", "benchmark/submit.sh", "--dry-run"], cwd=ROOT, capture_output=True, text=True)
    found = dict(re.findall(r"--job-name=(\w+_[\d.]+b)\b.*--mem=(\d+)G", dry.stdout))
    for name, memory in found.items():
        stage, _, model = name.rpartition("_")
        args = plan.Args(stage.removesuffix("_whiten"), model=model)
        if stage.endswith("_samples"):
            args = plan.Args("samples", model="6.9b")
        assert int(memory) == 50 * math.ceil((1.25 * plan.plan(args)["host"] / 1e9 + 8 * 8) / 50), name
    assert len(found) == 9 * 3


def test_what_cannot_fit_is_noticed():
    """The lines that stood in the scripts' heads: float32 weights of 6.9b on every device."""
    config = "benchmark/accelerate/ddp.yaml"
    for stage in STAGES:
        args = planned(
            f"accelerate launch --config_file {config} --num_processes 8 {stage}.py --model 6.9b --seed 44413"
        )
        assert plan.plan(args)["peak"] > 150e9
    args = planned(f"accelerate launch --config_file {config} ppo.py --model 2.8b")
    assert plan.plan(args)["peak"] > 80e9


@pytest.mark.parametrize("stage", ["reward", "dpo", "ppo"])
def test_a_pass_without_gradient_allocates_what_the_plan_says(stage):
    rows, columns = 4, 512
    pairs = {"query": tokens(rows, 449), "chosen": tokens(rows, 31), "rejected": tokens(rows, 32)}
    if stage == "reward":
        model = GPTNeoXForSequenceClassification(config(WIDTH, LAYERS, 4, VOCAB))
        model.score = reward.ScalarHead(WIDTH, 1)
        model = reward.RewardModel(model)
    else:
        model = GPTNeoXForCausalLM(config(WIDTH, LAYERS, 4, VOCAB))
    if stage == "dpo":
        pairs |= {"chosen_start": torch.zeros(rows).long(), "rejected_start": torch.zeros(rows).long()}
    if stage == "ppo":
        queries, responses, banned = tokens(rows, 460), tokens(rows, 53), torch.zeros(VOCAB, dtype=torch.bool)
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        if stage == "reward":
            reward.pair_rewards(model, pairs, PAD)
        elif stage == "dpo":
            dpo.pair_logprobs(model, pairs, PAD)
        else:
            ppo.response_logits(model, *ppo.episode_rows(queries, responses, PAD), banned)
    peak = peak_bytes(profiled)
    expected = plan.forward_bytes(rows, columns, WIDTH, 4) + plan.mask_bytes(stage, rows, columns, 0, 4)
    assert expected == pytest.approx(peak, rel=0.05)


def test_sampling_allocates_what_the_plan_says():
    rows = 4
    model = GPTNeoXForCausalLM(config(WIDTH, LAYERS, 4, VOCAB))
    queries = tokens(rows, plan.QUERY)
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        cache = StaticCache(model.config, max_cache_len=plan.QUERY + plan.RESPONSE)
        model.base_model(queries, past_key_values=cache, use_cache=True)
    peak = peak_bytes(profiled)
    expected = plan.sampling_bytes(rows, WIDTH, LAYERS, VOCAB)
    in_float32 = 2 * (expected["keys and values"] + expected["prefill"])
    assert in_float32 == pytest.approx(peak, rel=0.05)
