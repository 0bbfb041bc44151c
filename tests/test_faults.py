"""A signal, a full disk or a damaged file ends a run with an error of one line, or does no harm, and nothing that was
saved is lost.

All stages have copies of the same helpers (test_copies.py), so most of these are tested with `toy`, a stage that
consists of nothing else. Stages that are killed and resumed: test_invariance.py and kill_runs.py."""

import os
import resource
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import kill_runs
import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import WandBTracker
from conftest import changed_weights, edit_config, files, make_reward_model, read_jsonl, record
from datasets import DatasetDict, load_from_disk
from kill_runs import left_behind
from safetensors.torch import load_file

import ppo
import sft

LAST = 6


def toy(args, at=None) -> list[int]:
    """Run a stage of six updates in which a linear model learns to return 0, and return the updates that it made. It
    calls `at` with the number of each update before the step, and multiplies the loss by what that returns."""
    sft.check_args(args)
    accelerator = sft.make_accelerator(args)
    torch.manual_seed(1)
    model, optimizer = sft.prepare(accelerator, torch.nn.Linear(300, 300), args)
    first = sft.start_or_resume(accelerator, args, {})
    done = []
    if first == 0:
        sft.write_metrics(accelerator, args, {"eval/loss": 1.0}, 0, LAST)
    for update in sft.updates(accelerator, args, first, LAST):
        rows = torch.randn(8, 300, generator=torch.Generator().manual_seed(update))
        loss = model(rows.to(next(model.parameters()).dtype)).float().square().mean()
        factor = None if at is None else at(update)
        loss = loss if factor is None else loss * factor
        accelerator.backward(loss)
        norm = sft.optimizer_step(accelerator, model, optimizer, args.max_grad_norm, f"update {update}")
        metrics = {"loss/train": loss, "grad_norm": norm, "time/update": time.time()}
        sft.write_metrics(accelerator, args, metrics, update, LAST)
        done.append(update)
    accelerator.end_training()
    return done


def toy_args(folder: Path, **changes):
    common = {"batch_size": 8, "micro_batch_size": 8, "total_episodes": 8 * LAST, "save_every": 2, "learning_rate": 0.1}
    return sft.Args(**(common | {"output_dir": str(folder)} | changes))


def newest(folder: Path) -> Path:
    return sorted((folder / "checkpoints").iterdir())[-1]


def end_of(folder: Path) -> list:
    """Return the weights and the state of AdamW in a toy's last checkpoint, and what kill_runs.left_behind finds."""
    last, found = folder / "checkpoints" / f"update_{LAST:06d}", kill_runs.left_behind(folder)
    optimizer = torch.load(last / "optimizer.bin")["state"]
    state = [x.tolist() for moments in optimizer.values() for x in moments.values()]
    return [(last / "model.safetensors").read_bytes(), state, found]


@pytest.fixture(autouse=True)
def default_signals():
    yield
    for number in (signal.SIGTERM, signal.SIGUSR1):  # a run that ends early leaves its own
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> list:
    folder = tmp_path_factory.mktemp("toy") / "whole"
    assert toy(toy_args(folder)) == [1, 2, 3, 4, 5, 6]
    found = end_of(folder)
    assert kill_runs.complete(found[2] | {"weights": 1}) == ""
    assert [line["update"] for line in found[2]["metrics"]] == [0, 1, 2, 3, 4, 5, 6]
    return found


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """The folder of a toy that failed in the last update, with the checkpoints 2 and 4."""
    folder = tmp_path_factory.mktemp("toy") / "stopped"
    with pytest.raises(ZeroDivisionError):
        toy(toy_args(folder), lambda update: 1 / 0 if update == 6 else None)
    assert [x.name for x in sorted((folder / "checkpoints").iterdir())] == ["update_000002", "update_000004"]
    assert (folder / "metrics.jsonl").read_text().count("\n") == 6
    return folder


# ---- signals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "save_every"), [(signal.SIGTERM, 0), (signal.SIGUSR1, 3), (signal.SIGINT, 0)])
def test_a_signal_saves_after_the_update_and_ends_with_75(tmp_path, whole, number, save_every):
    """After Ctrl-C with KeyboardInterrupt, of which Python dies as a shell's loop expects."""
    args = toy_args(tmp_path / "run", save_every=save_every)
    with pytest.raises((SystemExit, KeyboardInterrupt)) as end:
        toy(args, lambda update: os.kill(os.getpid(), number) if update == 3 else None)
    assert end.type is KeyboardInterrupt if number == signal.SIGINT else end.value.code == 75
    assert [x.name for x in (tmp_path / "run" / "checkpoints").iterdir()] == ["update_000003"]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4
    torn = tmp_path / "run" / "checkpoints" / "update_000005.tmp"  # of a run that was killed while it saved
    (torn / "weights").mkdir(parents=True)
    assert toy(replace(args, resume=True, save_every=6)) == [4, 5, 6]
    assert end_of(tmp_path / "run") == whole and not torn.exists()


def test_after_the_last_update_a_signal_ends_the_run_at_once(tmp_path):
    """Nobody would read a note of it."""
    toy(toy_args(tmp_path / "run"))
    after = [signal.getsignal(x) for x in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    assert after == [signal.SIG_DFL, signal.SIG_DFL, signal.default_int_handler]


# ---- checkpoints that are not what was written ------------------------------------------------------------------


@pytest.fixture
def halfway(stopped, tmp_path) -> Path:
    """A copy of `stopped`."""
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def cut_short(path: Path):
    os.truncate(path, path.stat().st_size - 1)


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def put_code(path: Path):
    torch.save(torch.load(path, weights_only=False) | {"more": Payload(path.parents[2] / "ran")}, path)


DAMAGES = {  # of the newest checkpoint's files
    "optimiser cut short": lambda x: cut_short(x / "optimizer.bin"),
    "optimiser with code": lambda x: put_code(x / "optimizer.bin"),
    "weights cut short": lambda x: cut_short(x / "model.safetensors"),
    "metrics missing": lambda x: (x / "metrics.jsonl").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_nothing_changes(halfway, whole, damage):
    DAMAGES[damage](newest(halfway))
    before = files(halfway)
    with pytest.raises(SystemExit, match="^error: --resume: .*update_000004 cannot be loaded"):
        toy(toy_args(halfway, resume=True))
    assert files(halfway) == before
    shutil.rmtree(newest(halfway))  # as the message says
    assert toy(toy_args(halfway, resume=True)) == [3, 4, 5, 6] and end_of(halfway) == whole


@pytest.mark.parametrize("left", ["args.json", "checkpoints", "model"])
def test_no_run_is_overwritten(halfway, left):
    (halfway / "model").mkdir()
    for name in {"args.json", "checkpoints", "model"} - {left}:
        (halfway / name).rename(halfway / f"other_{name}")
    before = files(halfway)
    with pytest.raises(SystemExit, match="already holds a run"):
        toy(toy_args(halfway))
    assert files(halfway) == before


@pytest.mark.parametrize("changes", [{"seed": 8}, {"learning_rate": 0.2}, {"model": "runs/of_another_seed"}])
def test_resume_refuses_what_would_change_an_update(halfway, changes):
    before, [(key, value)] = files(halfway), changes.items()
    with pytest.raises(SystemExit, match=f"^error: --resume .*--{key.replace('_', '-')} .* -> {value}"):
        toy(toy_args(halfway, resume=True, **changes))
    assert files(halfway) == before


def test_resume_takes_what_changes_no_update(halfway, whole):
    changes = {"micro_batch_size": 4, "save_every": 3, "eval_every": 2}
    assert toy(toy_args(halfway, resume=True, **changes)) == [5, 6] and end_of(halfway) == whole


def test_resume_compares_data_and_model_by_content(world, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(world.dataset, tmp_path / "data")
    shutil.copytree(world.model, tmp_path / "nano")
    paths = {"dataset": str(tmp_path / "data"), "model": str(tmp_path / "nano"), "output_dir": str(folder)}
    args = sft.Args(**paths, batch_size=8, total_episodes=32, save_every=1)

    def train(**changes):
        sft.main(replace(args, **changes))

    train()
    expected = left_behind(folder)
    shutil.rmtree(folder / "model")
    shutil.rmtree(folder / "checkpoints" / "update_000004")
    before = files(folder)
    edit_config(tmp_path / "nano", use_cache=False)
    with pytest.raises(SystemExit, match="^error: --resume .*: --model digest .* would change the run"):
        train(resume=True)
    shutil.rmtree(tmp_path / "nano")
    shutil.copytree(world.model, tmp_path / "nano")
    shutil.rmtree(tmp_path / "data")
    data = load_from_disk(str(world.dataset))
    swapped = data["train"].select([1, 0, *range(2, 64)])  # as many rows and tokens
    DatasetDict({**data, "train": swapped}).save_to_disk(str(tmp_path / "data"))
    with pytest.raises(SystemExit, match="^error: --resume .*: --dataset digest .* would change the run"):
        train(resume=True)
    assert files(folder) == before
    shutil.copytree(world.dataset, tmp_path / "moved")
    train(resume=True, dataset=str(tmp_path / "moved"))
    assert left_behind(folder) == expected


def test_resume_leaves_a_complete_run_as_it_is(halfway):
    (halfway / "model").mkdir()
    before = files(halfway)
    with pytest.raises(SystemExit) as end:
        toy(toy_args(halfway, resume=True, seed=8, dataset="none"))
    assert end.value.code == 0 and files(halfway) == before


def test_resume_without_a_checkpoint_starts_anew_and_says_so(halfway, whole, capsys):
    shutil.rmtree(halfway / "checkpoints")
    assert toy(toy_args(halfway, resume=True)) == [1, 2, 3, 4, 5, 6] and end_of(halfway) == whole
    assert capsys.readouterr().out.count("continues after update 0") == 1


def test_accumulation_by_accelerate_divides_no_loss(tmp_path, whole, monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    toy(toy_args(tmp_path / "run"))
    assert end_of(tmp_path / "run") == whole


# ---- full disk --------------------------------------------------------------------------------------------------


def test_a_full_disk_while_saving(tmp_path, whole):
    """From the third update on, files cannot grow beyond 100,000 bytes; the weights need 360,000."""
    folder, limits = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill_disk(update: int):
        if update == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))

    try:
        with pytest.raises(SystemExit) as end:
            toy(toy_args(folder), fill_disk)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(end.value).startswith(f"error: {folder}/checkpoints/update_000004 ") and "\n" not in str(end.value)
    assert [x.name for x in (folder / "checkpoints").glob("update_??????")] == ["update_000002"]
    assert toy(toy_args(folder, resume=True)) == [3, 4, 5, 6] and end_of(folder) == whole


# ---- the size of a checkpoint -----------------------------------------------------------------------------------


def test_the_size_of_a_checkpoint_is_that_on_disk(world, tmp_path, monkeypatch):
    """Of a policy with a value model. What is left out are headers and a few small files."""
    sizes, save_state = [], Accelerator.save_state

    def measured(self, folder):
        saved = save_state(self, folder)
        on_disk = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        sizes.append((ppo.checkpoint_bytes(self), on_disk))
        return saved

    monkeypatch.setattr(Accelerator, "save_state", measured)
    folder = make_reward_model(world.model, tmp_path / "reward")
    args = {"model": "nano", "sft_model_path": str(world.model), "output_dir": str(tmp_path / "run"), "save_every": 1}
    args |= {"dataset": str(world.dataset), "batch_size": 8, "total_episodes": 8}
    args |= {"reward_model_path": str(folder), "response_length": 4, "eval_rows": 2}
    ppo.main(ppo.Args(**args))
    [(expected, found)] = sizes
    assert expected == pytest.approx(found, rel=0.03)


# ---- losses that are no numbers ---------------------------------------------------------------------------------


def test_a_gradient_that_is_no_number_stops_before_the_step(tmp_path):
    with pytest.raises(SystemExit) as end:
        toy(toy_args(tmp_path / "run", save_every=1), lambda update: float("inf") if update == 5 else None)
    assert str(end.value).startswith("error: update 5: the gradient norm is ")
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 2  # only the two newest are kept
    assert newest(tmp_path / "run").name == "update_000004"
    assert all(x.isfinite().all() for x in load_file(newest(tmp_path / "run") / "model.safetensors").values())
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 5


def test_a_score_that_is_no_number_names_its_model(world, tmp_path):
    whole = make_reward_model(world.model, tmp_path / "whole")
    folder = changed_weights(whole, tmp_path / "reward", lambda x: x | {"score.weight": x["score.weight"] * torch.nan})
    arguments = {"model": "nano", "sft_model_path": str(world.model), "reward_model_path": str(folder)}
    arguments |= {"dataset": str(world.dataset), "output_dir": str(tmp_path / "run"), "response_length": 4}
    with pytest.raises(SystemExit) as end:
        ppo.main(ppo.Args(**arguments, batch_size=8, total_episodes=8, eval_rows=2))
    assert str(end.value).startswith(f"error: update 1: a score of {folder} is not finite;")
    assert read_jsonl(tmp_path / "run" / "metrics.jsonl") == []


# ---- trackers ---------------------------------------------------------------------------------------------------


def test_each_update_is_once_in_metrics_tensorboard_and_wandb_after_a_stop(tmp_path, whole, monkeypatch):
    """No file of the run contains a secret from its environment."""
    secrets = {"HF_TOKEN": "hf_" + "qWeRtZuI" * 4, "WANDB_API_KEY": "9f8e" * 10}
    for name, secret in secrets.items():
        monkeypatch.setenv(name, secret)
    calls = record(monkeypatch, WandBTracker, "log")
    args, folder = toy_args(tmp_path / "run", track=True), tmp_path / "run"
    with pytest.raises(SystemExit):
        toy(args, lambda update: os.kill(os.getpid(), signal.SIGUSR1) if update == 5 else None)
    toy(replace(args, resume=True))
    logged = [{"update": call.kwargs["step"]} | call.args[1] for call in calls]
    assert logged == read_jsonl(folder / "metrics.jsonl") and [row["update"] for row in logged] == [*range(7)]
    assert len([*(folder / "wandb").glob("offline-run-*/*.wandb")]) == 2 and end_of(folder) == whole
    for content in files(folder).values():
        assert not any(secret.encode() in content for secret in secrets.values())
