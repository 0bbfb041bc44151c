"""A run depends only on its hyperparameters and seed, not on processes, micro-batches, padding or interruptions."""

import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pandas
import pytest
import torch
from conftest import ROOT, free_port, make_talker, script
from datasets import Sequence, Value, load_from_disk
from kill_runs import STAGES, complete, finish, left_behind, metrics, start

import sft

SCRIPTS = STAGES | {"ensembles": script("ensembles/ppo.py")}
# Relative 1e-5 with a floor for values near 0. Sums in float32 carry errors of 1e-7 times their largest term, so a
# key whose value is a small difference of larger numbers needs a floor of its own:
FLOORS = {
    "policy/sampling_logprob_difference_mean": 1.0,  # it and the maximum are nothing but rounding
    "policy/sampling_logprob_difference_max": 1.0,
    "policy/ratio_variance": 2e-6,  # mean of squares minus squared mean, both near 1
    # a reward is a sum over hidden units that largely cancel; DPO's is beta times a difference of sums of
    # log-probabilities, each of the order of 100
    **dict.fromkeys(("rewards/chosen", "rewards/rejected", "rewards/margin", "other_logits/mean"), 1e-5),
}
FLOOR = 1e-6
SQUARES = {"policy/ratio_variance"}  # a square has twice the relative error of what is squared


def run(stage: str, args) -> Path:
    """One stage in this process; returns its run folder."""
    SCRIPTS[stage].main(replace(args))
    return Path(args.output_dir)


def roots(line: dict) -> dict:
    """Return a line of metrics with the roots of the squares that are in it, where they are above 1."""
    return {key: value**0.5 if key in SQUARES and value > 1 else value for key, value in line.items()}


def assert_same_metrics(folder: Path, other: Path) -> tuple[float, str]:
    """Check that all metrics are equal within 1e-5. Returns the largest difference, relative to the value or to its
    floor, whichever is larger, and where it is."""
    found, expected = metrics(other), metrics(folder)
    assert [list(line) for line in found] == [list(line) for line in expected]
    differences = [
        (abs(value - there[key]) / max(abs(value), FLOORS.get(key, FLOOR) / 1e-5), f"{key}, update {line['update']}")
        for line, there in zip(map(roots, expected), map(roots, found), strict=True)
        for key, value in line.items()
    ]
    off = [f"{where}: {difference:.1e}" for difference, where in differences if not difference <= 1e-5]
    assert not off, "\n".join(off)
    return max(differences)


def assert_same_tables(folder: Path, other: Path):
    names, others = (sorted(x.relative_to(run) for x in run.glob("*/*.csv")) for run in (folder, other))
    assert names == others
    for name in names:  # rewards as above, and their gaps; the difference that padding makes is itself rounding
        tables = [pandas.read_csv(x / name, keep_default_na=False) for x in (folder, other)]
        pandas.testing.assert_frame_equal(*tables, rtol=1e-5, atol=1e-5)


def assert_same(case: str, split: str, folder: Path, other: Path, record_property):
    """Compare metrics and tables of two runs, and add a line to the summary that conftest.py prints."""
    difference, where = assert_same_metrics(folder, other)
    assert_same_tables(folder, other)
    row = [case, split, len(metrics(folder)), f"{difference:.1e}", where if difference else "-"]
    record_property("invariance", row)


@pytest.fixture(scope="module")
def setting(world, tmp_path_factory) -> SimpleNamespace:
    """Arguments of every stage, .args[stage](name, **changes), over a common SFT and reward model, and .root."""
    root = tmp_path_factory.mktemp("invariance")
    base = make_talker(world, root / "base", eos=0.1)
    common = {"batch_size": 8, "total_episodes": 24, "seed": 7, "learning_rate": 1e-3, "eval_every": 2}
    pairs = {"model": "nano", "preference_dataset": str(world.preference_dataset), "run_eval": True}
    pairs["sft_model_path"] = str(base)
    own = {
        "sft": {"model": str(base), "dataset": str(world.dataset)},
        # what chosen and rejected share has no gradient but rounding, which Adam's division makes much of
        "reward": pairs | {"dataset": str(world.dataset), "learning_rate": 2e-5},
        "dpo": pairs | {"learning_rate": 1e-4},
        "ppo": {
            "model": "nano",
            "dataset": str(world.dataset),
            "sft_model_path": str(base),
            "reward_model_path": str(root / "start_reward"),
            "whiten_rewards": True,
            "eval_rows": 8,
            "kl_coef": 0.5,
            "response_length": 10,
            "sample_every": 0,
        },
    }
    own["ensembles"] = {key: value for key, value in own["ppo"].items() if key != "reward_model_path"}
    own["ensembles"] |= {"reward_model_paths": [str(root / "start_reward")] * 2, "reward_combination": "uwo"}
    own["ensembles"] |= {"uwo_lambda": 0.5, "eval_every": 2}

    def args(stage: str, name: str, **changes):
        return SCRIPTS[stage].Args(**(common | own[stage] | {"output_dir": str(root / name)} | changes))

    run("reward", args("reward", "start_reward", learning_rate=1e-3, run_eval=False))
    return SimpleNamespace(root=root, args=args)


# ---- interrupted runs: made before the launch of two processes, which continues one of them ---------------------


def killed(stage: str, args, point: str) -> Path:
    """The run in a child process that ends at `point` by SIGKILL, as a scheduler would end it."""
    module, write, swap = STAGES[stage], STAGES[stage].write_metrics, os.replace

    def kill():
        os.kill(os.getpid(), signal.SIGKILL)

    def write_or_die(accelerator, args, metrics, update, last):
        write(accelerator, args, metrics, update, last)
        if point == "update 3 after its metrics" and update == 3:
            kill()
        if point == "update 3 amid its metrics" and update == 3:
            path = Path(args.output_dir, "metrics.jsonl")
            text = path.read_text()
            path.write_text(text[: -len(text.splitlines()[-1]) // 2])
            kill()

    def swap_or_die(source, target):
        if point == "checkpoint 2 before its name" and str(target).endswith("update_000002"):
            kill()
        swap(source, target)

    def main(args):
        module.write_metrics, os.replace = write_or_die, swap_or_die
        run(stage, args)

    assert finish(start(stage, args, main)) == -signal.SIGKILL, f"the run ended before {point}"
    return Path(args.output_dir)


POINTS = [("sft", "update 3 amid its metrics"), ("reward", "update 3 after its metrics")]
POINTS += [("dpo", "checkpoint 2 before its name"), ("ppo", "update 3 after its metrics")]
SAVED = {"save_every": 2}


@pytest.fixture(scope="module")
def written():
    """What each run of `whole` wrote whole, in order: {run folder: paths in it}."""
    return defaultdict(list)


@pytest.fixture(scope="module")
def whole(setting, written):
    """Run folders of runs of three updates that nothing interrupted, by stage."""
    swap = os.replace

    def swap_and_note(source, target):
        swap(source, target)
        folder = next(folder for folder in Path(target).parents if folder.parent == setting.root)
        written[folder].append(Path(target).relative_to(folder))

    with mock.patch.object(os, "replace", swap_and_note):
        return {stage: run(stage, setting.args(stage, f"whole_{stage}", **SAVED)) for stage in STAGES}


@pytest.mark.parametrize(("stage", "point"), POINTS)
def test_resume_ends_with_the_same_bytes(setting, whole, stage, point):
    args = setting.args(stage, f"killed_{stage}_{point.replace(' ', '_')}", **SAVED)
    folder = killed(stage, args, point)
    assert not (folder / "model").exists()
    run(stage, replace(args, resume=True))
    found, expected = left_behind(folder), left_behind(whole[stage])
    assert [key for key in expected if found[key] != expected[key]] == [] and complete(found) == ""


# what is written after the last update; `model` comes last, because --resume takes a folder that has one as complete
LAST = {"sft": ["model"], "ppo": ["value_model", "model"]}
LAST["dpo"] = ["eval/pairs_validation.csv", "eval/pairs_validation_cnndm.csv", "eval/accuracy.csv", "model"]
LAST["reward"] = ["eval/reference_rewards.csv", *LAST["dpo"]]


def test_the_model_is_written_last(whole, written):
    for stage, folder in whole.items():
        assert [str(path) for path in written[folder][-len(LAST[stage]) :]] == LAST[stage]


# ---- hardware split ---------------------------------------------------------------------------------------------

CASES = {
    "sft": ("sft", {}),
    "reward": ("reward", {}),
    "dpo": ("dpo", {}),
    "ppo": ("ppo", {}),
    # twice the optimiser steps: Adam's division makes much of the rounding in small gradients, at each of them
    "ppo_mini_batches": ("ppo", {"num_mini_batches": 2, "whiten_rewards": False, "learning_rate": 3e-4}),
    "ensembles": ("ensembles", {"eval_rows": 1}),  # one of the two processes has no validation post
}


@pytest.fixture(scope="module")
def one_process(setting):
    """Run folders of one process with one micro-batch, by case."""
    return {
        case: run(stage, setting.args(stage, f"{case}_one", micro_batch_size=8, **changes))
        for case, (stage, changes) in CASES.items()
    }


@pytest.fixture(scope="module")
def two_processes(setting):
    """Run folders of one launch of two processes with micro-batches of 3 (and as many rows in each pass without
    gradients): the same cases, the stages under DeepSpeed ("zero2 sft"), a PPO run that one process began and two ended
    ("resumed"), and an SFT run of which a signal reaches one process ("stopped")."""
    jobs = {}
    for stage in STAGES:
        jobs[f"zero2 {stage}"] = stage, setting.args(stage, f"zero2_{stage}", micro_batch_size=3), "none"
    jobs["zero2_offload sft"] = "sft", setting.args("sft", "zero2_offload_sft", micro_batch_size=3), "cpu"
    for case, (stage, changes) in CASES.items():
        sizes = {"micro_batch_size": 3}
        sizes |= {"sample_batch_size": 3} if stage in ("ppo", "ensembles") else {}
        jobs[case] = stage, setting.args(stage, f"{case}_two", **sizes, **changes), ""
    begun = setting.args("ppo", "resumed_by_two", **SAVED)
    killed("ppo", begun, "update 3 after its metrics")
    jobs["resumed"] = "ppo", replace(begun, resume=True, micro_batch_size=4), ""
    jobs["stopped"] = "sft", setting.args("sft", "stopped", micro_batch_size=3), ""
    launch(setting.root, list(jobs.values()))
    return {case: Path(args.output_dir) for case, (_, args, _) in jobs.items()}


def launch(folder: Path, jobs: list):
    """Run jobs (stage, arguments, "" for DDP or DeepSpeed's offload device) one after another in two processes.
    test_deepspeed.py launches runs with accelerate's own configuration files."""
    (folder / "jobs.json").write_text(json.dumps([(stage, vars(args), offload) for stage, args, offload in jobs]))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE_")}
    environment |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmark'}"}
    environment |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": str(free_port()), "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
    children, command = [], [sys.executable, __file__, str(folder / "jobs.json")]
    for rank in "01":
        with (folder / f"rank{rank}.log").open("w") as log:
            own = environment | {"RANK": rank, "LOCAL_RANK": rank}
            children.append(subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT))
    codes = [child.wait(500) for child in children]
    assert codes == [0, 0], "".join((folder / f"rank{rank}.log").read_text()[-3000:] for rank in "01")


@pytest.mark.parametrize("case", CASES)
def test_two_processes_change_nothing(one_process, two_processes, case, record_property):
    assert_same(case, "2 processes, micro-batches of 3", one_process[case], two_processes[case], record_property)


@pytest.mark.parametrize("case", [f"zero2 {stage}" for stage in STAGES] + ["zero2_offload sft"])
def test_zero_changes_nothing(one_process, two_processes, case, record_property):
    name, stage = case.split()
    assert_same(stage, f"2 processes, {name}", one_process[stage], two_processes[case], record_property)


def test_two_processes_can_continue_what_one_began(whole, two_processes, record_property):
    assert_same("ppo", "begun by 1, ended by 2 processes", whole["ppo"], two_processes["resumed"], record_property)


def test_a_signal_to_one_process_stops_both_and_one_process_can_continue(setting, one_process, two_processes):
    folder = two_processes["stopped"]
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["update_000002"]
    assert len(metrics(folder)) == 3 and not (folder / "model").exists()
    run("sft", setting.args("sft", "stopped", micro_batch_size=3, resume=True))
    assert_same_metrics(one_process["sft"], folder)


def test_the_compared_runs_learn_and_their_responses_differ_in_length(one_process):
    """Otherwise the comparisons above would show nothing."""
    for case, folder in one_process.items():
        assert all(line["grad_norm"] > 1e-3 for line in metrics(folder) if line["update"]), case
    lines = metrics(one_process["ppo"])
    assert any(0 < line["response/eos_rate"] < 1 for line in lines)
    assert lines[-1]["objective/kl"] > 0.01 and lines[0]["value/clip_fraction"] > 0


# ---- padding ----------------------------------------------------------------------------------------------------


def padded_more(source: Path, target: Path, pad_id: int):
    """The same data stored wider: queries have 7 more columns on the left, all else 9 more on the right."""
    data = load_from_disk(str(source))
    columns = [c for c in data["train"].column_names if c.endswith(("_token", "_response_label"))]
    features = data["train"].features.copy()
    for column in columns:
        features[column] = Sequence(Value("int64"))

    def widen(row):
        return {c: [pad_id] * 7 + row[c] if c == "query_token" else row[c] + [pad_id] * 9 for c in columns}

    data.map(widen, features=features).save_to_disk(str(target))


@pytest.mark.parametrize("stage", STAGES)
def test_more_padding_in_the_data_changes_nothing(setting, world, one_process, tmp_path, stage, record_property):
    pad_id = sft.load_tokenizer(str(world.tokenizer)).pad_token_id
    changes = {}
    for field in ("dataset", "preference_dataset"):
        if hasattr(setting.args(stage, "any"), field):
            padded_more(getattr(world, field), tmp_path / field, pad_id)
            changes[field] = str(tmp_path / field)
    folder = run(stage, setting.args(stage, f"{stage}_padded", micro_batch_size=8, **changes))
    assert_same(stage, "more padding in the data", one_process[stage], folder, record_property)


def watch(module):
    """Make a stage check that it saves the weights that it trained, and send rank 1 of the run "stopped" a signal."""
    save_model, write_metrics = module.save_model, module.write_metrics

    def save_and_compare(accelerator, args, name, model, *rest):
        save_model(accelerator, args, name, model, *rest)
        expected = model.state_dict()
        for key, value in type(model).from_pretrained(Path(args.output_dir, name)).state_dict().items():
            assert torch.equal(value, expected[key]), key  # without a head's bias

    def write_and_stop(accelerator, args, metrics, update, last):
        write_metrics(accelerator, args, metrics, update, last)
        if Path(args.output_dir).name == "stopped" and update == 2 and accelerator.process_index == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    module.save_model, module.write_metrics = save_and_compare, write_and_stop


if __name__ == "__main__":  # one of the two processes: the runs of a list, one after another
    import deepspeed  # noqa: F401

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # spares two minutes of compiling; gloo does it
    destroy, torch.distributed.destroy_process_group = torch.distributed.destroy_process_group, lambda group=None: None
    for module in SCRIPTS.values():
        watch(module)
    for name, arguments, offload in json.loads(Path(sys.argv[1]).read_text()):
        os.environ |= {"ACCELERATE_USE_DEEPSPEED": str(bool(offload)).lower()}
        os.environ |= {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": offload or "none"}
        try:  # in the one process group: the store serves no second one
            run(name, SCRIPTS[name].Args(**arguments))
        except SystemExit as end:
            assert Path(arguments["output_dir"]).name == "stopped" and end.code == 75
    destroy()
