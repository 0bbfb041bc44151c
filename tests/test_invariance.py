"""A run is a function of its hyperparameters and seed: not of processes, micro-batches, padding or interruptions."""

import gc
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas
import plan
import pytest
import torch
from accelerate.state import AcceleratorState
from conftest import free_port
from datasets import Sequence, Value, load_from_disk
from kill_runs import STAGES, metrics, weights
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from transformers import AutoModelForCausalLM

import reward
import sft

ROOT = Path(__file__).resolve().parents[1]
# Relative 1e-5 with a floor for values near 0. Sums in float32 carry errors of 1e-7 times their largest term, so a
# key whose value is a small difference of larger numbers needs a floor of its own:
FLOORS = {
    "policy/first_ratio_deviation": 1e-5,  # is nothing but rounding; its bound is tested apart
    "policy/ratio_variance": 2e-6,  # mean of squares minus squared mean, both near 1
    # a reward is a sum over hidden units that largely cancel; DPO's is beta times a difference of sums of
    # log-probabilities, each of the order of 100
    **dict.fromkeys(("rewards/chosen", "rewards/rejected", "rewards/margin", "other_logits/mean"), 1e-5),
}
FLOOR = 1e-6


def run(stage: str, args) -> Path:
    """One stage in this process; returns its run folder."""
    AcceleratorState._reset_state(True)  # accelerate keeps one state a process
    STAGES[stage].main(replace(args))
    return Path(args.output_dir)


def assert_same_metrics(folder: Path, other: Path) -> tuple[float, str]:
    """Both runs say the same; returns the largest relative difference (to the floor where a value is below it) and
    where it is."""
    found, expected = metrics(other), metrics(folder)
    assert [list(line) for line in found] == [list(line) for line in expected]
    differences = [
        (abs(value - there[key]) / max(abs(value), FLOORS.get(key, FLOOR) / 1e-5), f"{key}, update {line['update']}")
        for line, there in zip(expected, found, strict=True)
        for key, value in line.items()
    ]
    off = [f"{where}: {difference:.1e}" for difference, where in differences if not difference <= 1e-5]
    assert not off, "\n".join(off)
    return max(differences)


def assert_same_tables(folder: Path, other: Path):
    names = sorted(path.name for path in (folder / "eval").iterdir())
    assert names == sorted(path.name for path in (other / "eval").iterdir()) and names
    for name in names:
        # implicit rewards as above, and their gaps; and the difference that padding makes is itself rounding
        floor = 1e-5 if name.startswith(("pairs_", "reference_rewards", "accuracy")) else FLOOR
        tables = [pandas.read_csv(x / "eval" / name, keep_default_na=False) for x in (folder, other)]
        pandas.testing.assert_frame_equal(*tables, rtol=1e-5, atol=floor)  # texts, thus samples, are equal


def assert_same(case: str, split: str, folder: Path, other: Path, record_property):
    """Metrics and tables of both runs; a line for the summary that conftest.py prints."""
    difference, where = assert_same_metrics(folder, other)
    assert_same_tables(folder, other)
    record_property(
        "invariance", [case, split, len(metrics(folder)), f"{difference:.1e}", where if difference else "-"]
    )


def eager(source: Path, folder: Path) -> Path:
    """A copy of a nano model that ends its responses soon: about every tenth token is EOS, so that lengths differ."""
    model = AutoModelForCausalLM.from_pretrained(source)
    tokenizer = sft.AutoTokenizer.from_pretrained(source)
    with torch.no_grad():
        model.base_model.final_layer_norm.bias.fill_(0.5)
        model.get_output_embeddings().weight[tokenizer.eos_token_id] = 0.08
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def setting(world, tmp_path_factory) -> SimpleNamespace:
    """Arguments of every stage, .args[stage](name, **changes), over a common SFT and reward model, and .root."""
    root = tmp_path_factory.mktemp("invariance")
    base = eager(world.model, root / "base")
    common = {"model": "nano", "dataset": str(world.dataset), "batch_size": 8, "total_episodes": 40, "seed": 7}
    common |= {"learning_rate": 1e-3, "run_eval": True, "eval_every": 2}
    pairs = {"preference_dataset": str(world.preference_dataset), "sft_model_path": str(root / "start_sft")}
    sampling = {"response_length": 10, "eval_temperature": 0.7}  # at 0.01 this model's first token would be EOS always
    own = {
        "sft": {"model": str(base)} | sampling,
        # what chosen and rejected share has no gradient but rounding, which Adam's division makes much of: see below,
        # test_without_rounding_both_rewards_stay
        "reward": pairs | {"learning_rate": 2e-5},
        "dpo": pairs | sampling | {"learning_rate": 1e-4},
        "ppo": {
            "sft_model_path": str(root / "start_sft"),
            "reward_model_paths": [str(root / "start_reward")],
            "whiten_rewards": True,
            "eval_rows": 8,
            "kl_coef": 0.5,
        }
        | sampling,
    }

    def args(stage: str, name: str, **changes):
        return STAGES[stage].Args(**(common | own[stage] | {"output_dir": str(root / name)} | changes))

    for stage in ("sft", "reward"):
        run(stage, args(stage, f"start_{stage}", run_eval=False))
    return SimpleNamespace(root=root, args=args)


# ---- interrupted runs: made before the launch of two processes, which continues one of them ---------------------


def killed(stage: str, args, point: str) -> Path:
    """The run in a child process that ends at `point` by SIGKILL, as a scheduler would end it."""
    child = os.fork()
    if child == 0:
        try:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 1), os.dup2(nowhere.fileno(), 2)
            module, kill = STAGES[stage], lambda: os.kill(os.getpid(), signal.SIGKILL)
            write, swap, save = module.MetricsLog.write, os.replace, module.save_model

            def write_or_die(log, update, values):
                if point == "update 3 before its metrics" and update == 3:
                    kill()
                write(log, update, values)
                if point == "update 3 after its metrics" and update == 3:
                    kill()
                if point == "update 3 amid its metrics" and update == 3:
                    text = log.path.read_text()
                    log.path.write_text(text[: -len(text.splitlines()[-1]) // 2])
                    kill()

            def swap_or_die(source, target):
                if point == "checkpoint 4 before its name" and str(target).endswith("update_000004"):
                    kill()
                swap(source, target)
                if point == "checkpoint 2 after its name" and str(target).endswith("update_000002"):
                    kill()

            def save_or_die(*arguments):
                kill() if point == "all updates before the model" else save(*arguments)

            module.MetricsLog.write, module.save_model, os.replace = write_or_die, save_or_die, swap_or_die
            run(stage, args)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, f"the run ended before {point}"
    return Path(args.output_dir)


POINTS = [("sft", "update 3 before its metrics"), ("sft", "update 3 amid its metrics")]
POINTS += [("sft", "all updates before the model"), ("reward", "update 3 after its metrics")]
POINTS += [("reward", "all updates before the model"), ("dpo", "checkpoint 4 before its name")]
POINTS += [("ppo", "update 3 after its metrics"), ("ppo", "checkpoint 2 after its name")]
SAVED = {"total_episodes": 32, "save_every": 2}


@pytest.fixture(scope="module")
def whole(setting):
    """Run folders of runs of four updates that nothing interrupted, by stage."""
    return {stage: run(stage, setting.args(stage, f"whole_{stage}", **SAVED)) for stage in STAGES}


@pytest.mark.parametrize(("stage", "point"), POINTS)
def test_resume_ends_with_the_same_bytes(setting, whole, stage, point):
    args = setting.args(stage, f"killed_{stage}_{point.replace(' ', '_')}", **SAVED)
    folder = killed(stage, args, point)
    assert not (folder / "model").exists()
    run(stage, replace(args, resume=True))
    assert weights(folder) == weights(whole[stage]) and weights(folder)
    assert metrics(folder) == metrics(whole[stage])
    assert_same_tables(folder, whole[stage])
    assert not list(folder.rglob("*.tmp"))


def test_a_killed_process_is_what_makes_the_difference(setting, whole):
    """With Adam's moments at 0 a resumed run ends elsewhere: the comparison above can fail."""
    args = setting.args("sft", "forgetful", **SAVED)
    folder = killed("sft", args, "update 3 after its metrics")
    state = folder / "checkpoints" / "update_000002" / "optimizer.bin"
    content = torch.load(state, weights_only=False)
    for moments in content["state"].values():
        moments["exp_avg"].zero_()
    torch.save(content, state)
    run("sft", replace(args, resume=True))
    assert weights(folder) != weights(whole["sft"])


@pytest.mark.parametrize("stage", STAGES)
def test_resume_with_other_hyperparameters_lists_them(setting, whole, stage):
    before = {path: path.read_bytes() for path in whole[stage].rglob("*") if path.is_file()}
    changes = {"adam_eps": 1e-6, "seed": 8}
    with pytest.raises(SystemExit) as error:
        run(stage, replace(setting.args(stage, f"whole_{stage}", **SAVED), resume=True, **changes))
    message = str(error.value)
    assert message.startswith("error: --resume") and "adam_eps: 1e-05 -> 1e-06" in message
    assert "seed: 7 -> 8" in message and "batch_size" not in message
    assert {path: path.read_bytes() for path in whole[stage].rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("stage", STAGES)
def test_a_folder_with_a_run_is_not_overwritten(setting, whole, stage):
    before = {path: path.read_bytes() for path in whole[stage].rglob("*") if path.is_file()}
    with pytest.raises(SystemExit, match="^error: .*already holds a run.*--resume"):
        run(stage, setting.args(stage, f"whole_{stage}", **SAVED))
    assert {path: path.read_bytes() for path in whole[stage].rglob("*") if path.is_file()} == before


# ---- hardware split ---------------------------------------------------------------------------------------------

CASES = {
    "sft": ("sft", {}),
    "sft_response": ("sft", {"loss_on": "response", "max_grad_norm": 0.5}),
    "reward": ("reward", {}),
    "dpo": ("dpo", {}),
    "ppo": ("ppo", {}),
    # twice the optimiser steps: Adam's division makes much of the rounding in small gradients, at each of them
    "ppo_mini_batches": ("ppo", {"num_mini_batches": 2, "whiten_rewards": False, "learning_rate": 3e-4}),
    "ppo_gold": ("ppo", {"gold": f"{ROOT / 'quickstart' / 'truth.py'}:score", "gold_every": 2, "eval_rows": 5}),
}


@pytest.fixture(scope="module")
def one_process(setting):
    """Run folders with micro-batches of 8 and of 2 (and other batches without gradient), by case."""
    found = {}
    for case, (stage, changes) in CASES.items():
        largest = 8 // changes.get("num_mini_batches", 1)
        big = setting.args(stage, f"{case}_big", micro_batch_size=largest, **changes)
        small = setting.args(stage, f"{case}_small", micro_batch_size=2, forward_batch_size=3, **changes)
        found[case] = run(stage, big), run(stage, small)
    return found


@pytest.fixture(scope="module")
def two_processes(setting):
    """Run folders of the same runs on two processes, all from one launch, and "resumed": a PPO run that one process
    began and two ended."""
    jobs = {}
    for case, (stage, changes) in CASES.items():
        jobs[case] = stage, setting.args(stage, f"{case}_two", micro_batch_size=2, **changes)
    begun = setting.args("ppo", "resumed_by_two", **SAVED)
    killed("ppo", begun, "update 3 after its metrics")
    jobs["resumed"] = "ppo", replace(begun, resume=True, micro_batch_size=4)
    output = launch(setting.root, jobs, "cpu")
    assert output.count("2 process(es)") == len(jobs)
    return {case: Path(args.output_dir) for case, (_, args) in jobs.items()}


@pytest.fixture(scope="module", params=["zero2", "zero3", "zero2_offload"])
def zero(setting, request):
    """Name of a configuration, and run folders of the stages' runs on two processes under it, by stage."""
    folder = setting.root / request.param
    folder.mkdir()
    stages = ["sft"] if request.param == "zero2_offload" else STAGES
    jobs = {stage: (stage, setting.args(stage, f"{folder.name}/{stage}", micro_batch_size=2)) for stage in stages}
    output = launch(folder, jobs, request.param)
    assert output.count("2 process(es)") == len(jobs)
    return request.param, {stage: Path(args.output_dir) for stage, (_, args) in jobs.items()}


def launch(folder: Path, jobs: dict, config: str) -> str:
    """Run the jobs (stage, arguments), one after another, in the two processes that accelerate starts from a config of
    benchmark/accelerate; returns what they print."""
    (folder / "jobs.json").write_text(json.dumps([(stage, vars(args)) for stage, args in jobs.values()]))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", 2]
    command += ["--config_file", ROOT / "benchmark" / "accelerate" / f"{config}.yaml"]
    command += ["--main_process_port", free_port(), __file__, folder / "jobs.json"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE_")}
    environment |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmark'}"}
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("case", CASES)
def test_micro_batches_change_nothing(one_process, case, record_property):
    assert_same(case, "1 process, micro-batches of 2", *one_process[case], record_property)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_change_nothing(one_process, two_processes, case, record_property):
    assert_same(case, "2 processes, micro-batches of 2", one_process[case][0], two_processes[case], record_property)


def test_zero_changes_nothing(one_process, zero, record_property):
    name, folders = zero
    for stage, folder in folders.items():
        assert_same(stage, f"2 processes, {name}", one_process[stage][0], folder, record_property)


def test_zero_holds_the_bytes_that_the_plan_says(zero, world):
    name, folders = zero
    if name == "zero2_offload":
        pytest.skip("on a CPU there is no other memory to offload to")
    parameters = AutoModelForCausalLM.from_pretrained(world.model).num_parameters()
    expected = plan.state_bytes(parameters, 2, int(name[4]), 32, offload_optimizer=False)
    bucket = 4 * 500_000_000 if name == "zero3" else 0
    assert expected.pop("buckets") == 4 * 500_000_000
    if name == "zero2":  # which frees its gradients and its bucket at each step
        expected.pop("gradients")
    for rank in (0, 1):
        found = int((folders["sft"] / f"bytes_{rank}").read_text())
        assert found - bucket == pytest.approx(sum(expected.values()), rel=0.05)


def test_without_rounding_both_rewards_stay(setting, monkeypatch):
    """At 50 times the learning rate of the comparison above, where in float32 the rewards of a pair drift together by
    5e-5 between micro-batches of 8 and 2 while their margin stays: in float64 none of it is left."""
    new = reward.new_reward_model
    monkeypatch.setattr(reward, "new_reward_model", lambda *args: new(*args).double())
    monkeypatch.setattr(torch.Tensor, "float", lambda tensor: tensor)  # the head runs in what it is given
    changes = {"learning_rate": 1e-3, "run_eval": False}
    found = [run("reward", setting.args("reward", f"double_{n}", micro_batch_size=n, **changes)) for n in (8, 2)]
    for line, other in zip(*map(metrics, found), strict=True):
        assert other == pytest.approx(line, rel=1e-6, abs=2e-7)  # metrics are written from float32


def test_gradients_are_exchanged_once_per_optimiser_step(two_processes):
    found = {case: int((two_processes[case] / "synchronisations").read_text()) for case in CASES}
    ppo = {"ppo": 20, "ppo_mini_batches": 40, "ppo_gold": 20}
    assert found == {"sft": 5, "sft_response": 5, "reward": 5, "dpo": 5} | ppo


def test_two_processes_can_continue_what_one_began(whole, two_processes, record_property):
    assert_same("ppo", "begun by 1, ended by 2 processes", whole["ppo"], two_processes["resumed"], record_property)


def test_the_compared_runs_learn_and_their_responses_differ_in_length(one_process):
    """What the comparisons above would miss if nothing moved."""
    for case, (folder, _) in one_process.items():
        assert all(line["grad_norm"] > 1e-3 for line in metrics(folder) if line["update"]), case
    lines = metrics(one_process["ppo"][0])
    assert any(0 < line["response/eos_rate"] < 1 for line in lines)
    assert lines[-1]["objective/kl"] > 0.01 and lines[0]["value/clip_fraction"] > 0
    samples = pandas.read_csv(one_process["ppo"][0] / "eval" / "samples_validation.csv")
    assert samples["response_tokens"].nunique() > 1 and samples["has_eos"].nunique() == 2


def test_ratios_are_one_before_the_first_step_of_an_update(one_process, two_processes):
    for case in ("ppo", "ppo_mini_batches"):
        for folder in (*one_process[case], two_processes[case]):
            assert all(line["policy/first_ratio_deviation"] <= 1e-5 for line in metrics(folder))


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
    assert_same(stage, "more padding in the data", one_process[stage][0], folder, record_property)


def live_bytes() -> int:
    """Bytes of all tensors that Python knows of, those that share memory counted once."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if isinstance(x, torch.Tensor) and not x.is_meta]
    tensors += [x.grad for x in tensors if x.is_leaf and x.grad is not None]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def watch(module) -> SimpleNamespace:
    """From now on what a stage saves is compared with what it trained. Returns .exchanges, which a DDP model increases
    whenever its gradients have been exchanged, and .bytes, what model and optimizer held after the last step."""
    found, engines = SimpleNamespace(exchanges=0, bytes=0), []
    prepare, save_model, optimizer_step = module.prepare, module.save_model, module.optimizer_step

    def hook(_, bucket):
        found.exchanges += bucket.is_last()
        return allreduce_hook(None, bucket)

    def prepare_watched(accelerator, model, args):
        if module.zero_stage(accelerator) == 3:
            settings = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
            settings["stage3_param_persistence_threshold"] = 0  # by default weights as small as these are not sharded
        found.before = live_bytes() - sum(parameter.nbytes for parameter in model.parameters())
        model, optimizer = prepare(accelerator, model, args)
        engines[:] = [model]
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model.register_comm_hook(None, hook)
        if module.zero_stage(accelerator) == 3:
            assert {parameter.numel() for parameter in model.parameters()} == {0}
        return model, optimizer

    def save_and_compare(accelerator, model, state, tokenizer, folder):
        save_model(accelerator, model, state, tokenizer, folder)
        trained = accelerator.unwrap_model(engines[0])
        name = next(name for name, part in trained.named_modules() if part is model)
        with module.whole(accelerator, engines[0]) as copy:
            expected = copy.get_submodule(name).state_dict()
            for key, value in type(model).from_pretrained(folder).state_dict().items():  # without a head's bias
                assert torch.equal(value, expected[key]), key

    def step_and_count(accelerator, model, *args):
        norm = optimizer_step(accelerator, model, *args)
        found.bytes = live_bytes() - found.before
        return norm

    module.prepare, module.save_model, module.optimizer_step = prepare_watched, save_and_compare, step_and_count
    return found


if __name__ == "__main__":  # one of the two processes: the runs of a list, one after another
    import deepspeed  # noqa: F401

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # spares two minutes of compiling; gloo does it
    destroy, torch.distributed.destroy_process_group = torch.distributed.destroy_process_group, lambda group=None: None
    watched = {stage: watch(module) for stage, module in STAGES.items()}
    for name, arguments in json.loads(Path(sys.argv[1]).read_text()):
        watched[name].exchanges = 0
        folder = run(name, STAGES[name].Args(**arguments))  # in the one process group: the store serves no second one
        (folder / "synchronisations").write_text(str(watched[name].exchanges))
        (folder / f"bytes_{os.environ['RANK']}").write_text(str(watched[name].bytes))
    destroy()
