"""The stages one after another with their default paths: the contents of a run folder, and what is evaluated when. That
other programs can read what it holds: test_saved_models.py."""

import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pandas
import pytest
from conftest import files, random_base, read_metrics, record
from datasets import DatasetDict, load_from_disk
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import GPT2Config

import dpo
import ppo
import reward
import sft

STAGES = {"sft": sft, "reward": reward, "dpo": dpo, "ppo": ppo}
SEED = 3
EVALUATIONS = {
    "sft": "validation_loss",
    "reward": "evaluate_pairs",
    "dpo": "implicit_reward_table",
    "ppo": "validation_scores",
}
DAY = 86_400


def run(stage: str, **arguments):
    STAGES[stage].main(STAGES[stage].Args(**arguments))


def few_rows(world, root: Path) -> SimpleNamespace:
    """.dataset .preference_dataset: the first rows of the world's, 16 of train and 8 of the others."""
    for name in ("sft", "preference"):
        data = load_from_disk(str(world.dataset.parent / name))
        few = {split: rows.select(range(16 if split == "train" else 8)) for split, rows in data.items()}
        DatasetDict(few).save_to_disk(str(root / name))
    return SimpleNamespace(dataset=root / "sft", preference_dataset=root / "preference")


@pytest.fixture(scope="module")
def few(world, tmp_path_factory) -> SimpleNamespace:
    return few_rows(world, tmp_path_factory.mktemp("few"))


def take_a_day(patch, module, function: str):
    """By the clock of the module, each call of the function takes a day."""
    original, days = getattr(module, function), []

    def longer(*args):
        days.append(DAY)
        return original(*args)

    patch.setattr(module, "time", SimpleNamespace(time=lambda: time.time() + sum(days)))
    patch.setattr(module, function, longer)


@pytest.fixture(scope="module")
def chain(world, few, tmp_path_factory) -> dict[str, Path]:
    """The run folders by stage; two updates a stage, all models but the base by their default paths."""
    root = tmp_path_factory.mktemp("chain")
    random_base(GPT2Config(n_embd=64, n_layer=2, n_head=2, n_positions=2048), world, root / "gpt2")
    (root / "data").mkdir()
    (root / "data" / "tldr").symlink_to(few.dataset.parent)
    common = {"seed": SEED, "batch_size": 4, "total_episodes": 8, "learning_rate": 1e-3}
    data, pairs = {"dataset": "data/tldr/sft"}, {"preference_dataset": "data/tldr/preference"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for stage, evaluation in EVALUATIONS.items():
            take_a_day(patch, STAGES[stage], evaluation)
        run("sft", model=str(root / "gpt2"), **data, **common)
        run("reward", model="gpt2", run_eval=True, **data, **pairs, **common)
        run("dpo", model="gpt2", run_eval=True, **pairs, **common)
        run("ppo", model="gpt2", response_length=8, eval_rows=4, **data, **common)
    return {stage: root / "runs" / stage / "gpt2" / str(SEED) for stage in STAGES}


# ---- evaluations ------------------------------------------------------------------------------------------------


def test_the_time_of_an_update_is_without_its_evaluation(chain):
    for stage, folder in chain.items():
        last = read_metrics(folder)[-1]
        assert {key for key in last if key.startswith("eval/")}, stage
        assert last["time/update"] < DAY and last["time/total"] < DAY, stage


@pytest.mark.parametrize("stage", ["reward", "dpo"])
def test_each_split_is_evaluated_once(world, few, tmp_path, monkeypatch, stage):
    """With the last update or after it. A run that is resumed from its last checkpoint does not train, but writes the
    same tables and model again."""
    passes = record(monkeypatch, STAGES[stage], EVALUATIONS[stage])
    arguments = {"model": "nano", "seed": SEED, "sft_model_path": str(world.model), "output_dir": str(tmp_path / "run")}
    arguments |= {"preference_dataset": str(few.preference_dataset), "run_eval": True, "batch_size": 8}
    arguments |= {"learning_rate": 1e-3, "save_every": 1}
    if stage == "reward":
        arguments["dataset"] = str(few.dataset)
    run(stage, **arguments)
    assert [call.args[-1] for call in passes] == ["validation", "validation_cnndm"]
    written = {name: files(tmp_path / "run" / name) for name in ("eval", "model")}
    for name in written:
        shutil.rmtree(tmp_path / "run" / name)
    run(stage, **arguments, resume=True)
    assert [call.args[-1] for call in passes[2:]] == ["validation", "validation_cnndm"]
    assert {name: files(tmp_path / "run" / name) for name in written} == written and len(written["eval"]) >= 3


# ---- run folders ------------------------------------------------------------------------------------------------

PAIRS = ["batch", "split", "policies", "confidence", "chosen_reward", "rejected_reward", "tie"]
ACCURACY = ["data", "group", "value", "pairs", "accuracy"]
TABLES = {f"pairs_{split}.csv": PAIRS for split in ("validation", "validation_cnndm")} | {"accuracy.csv": ACCURACY}
TABLES = {"reward": TABLES | {"reference_rewards.csv": ["statistic", "value"]}, "dpo": TABLES}


@pytest.mark.parametrize("stage", STAGES)
def test_run_folder(chain, few, stage):
    folder = chain[stage]
    names = {path.name for path in folder.iterdir()}
    own = {"ppo": {"value_model"}, "reward": {"eval"}, "dpo": {"eval"}}
    assert names == {"model", "metrics.jsonl", "args.json", "tensorboard"} | own.get(stage, set())
    args = json.loads((folder / "args.json").read_text())
    contents = {key for key in args if key.endswith(" digest")}
    assert len(contents) == {"sft": 2, "reward": 3, "ppo": 3, "dpo": 2}[stage]
    assert set(args) - contents == {*vars(STAGES[stage].Args()), "stage", "processes", "wandb_id"}
    assert args["stage"] == stage and args["seed"] == SEED
    capped = stage in ("reward", "dpo")  # by the process's share of the batch
    assert args["micro_batch_size"] == (min(8, args["batch_size"]) if capped else 8)
    lines = read_metrics(folder)
    assert [line["update"] for line in lines] == ([0, 1, 2] if stage in ("sft", "dpo") else [1, 2])
    logged = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert set(logged.Tags()["scalars"]) == {key for line in lines for key in line} - {"update"}
    tables = TABLES.get(stage, {})
    assert {path.name for path in folder.glob("eval/*")} == set(tables)
    for name, columns in tables.items():
        table = pandas.read_csv(folder / "eval" / name)
        assert list(table.columns) == columns
        if name.startswith("pairs_"):
            split = name.removeprefix("pairs_").removesuffix(".csv")
            assert len(table) == len(load_from_disk(str(few.preference_dataset))[split])
