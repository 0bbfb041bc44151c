"""The stages one after another on two architectures, with their default paths: the contents of a run folder, and that
other programs can read it."""

import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import nano
import pandas
import pytest
from conftest import files, read_metrics, record
from datasets import DatasetDict, load_from_disk
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import dpo
import ppo
import reward
import sft

ROOT = Path(__file__).resolve().parents[1]
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


@pytest.fixture(scope="module", params=["gpt2", "qwen3"])
def chain(request, world, few, tmp_path_factory) -> SimpleNamespace:
    """.name of the architecture, .base model folder, .run[stage] run folders; two updates a stage, all models but
    the base by their default paths."""
    root = tmp_path_factory.mktemp("chain")
    nano.main(
        nano.Args(tokenizer=str(world.tokenizer), architecture=request.param, output_dir=str(root / request.param))
    )
    (root / "data").mkdir()
    (root / "data" / "tldr").symlink_to(few.dataset.parent)
    common = {"seed": SEED, "batch_size": 4, "total_episodes": 8, "learning_rate": 1e-3}
    data, pairs = {"dataset": "data/tldr/sft"}, {"preference_dataset": "data/tldr/preference"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for stage, evaluation in EVALUATIONS.items():
            take_a_day(patch, STAGES[stage], evaluation)
        run("sft", model=str(root / request.param), **data, **common)
        run("reward", model=request.param, run_eval=True, **data, **pairs, **common)
        run("dpo", model=request.param, run_eval=True, **pairs, **common)
        run("ppo", model=request.param, response_length=8, eval_rows=4, **data, **common)
    runs = {stage: root / "runs" / stage / request.param / str(SEED) for stage in STAGES}
    return SimpleNamespace(name=request.param, base=root / request.param, root=root, run=runs)


# ---- what must hold on every architecture -----------------------------------------------------------------------


def test_the_time_of_an_update_is_without_its_evaluation(chain):
    for stage, folder in chain.run.items():
        last = read_metrics(folder)[-1]
        assert {key for key in last if key.startswith("eval/")}, stage
        assert last["time/update"] < DAY and last["time/total"] < DAY, stage


def test_checkpoints_load_with_plain_transformers_and_hold_pad(chain):
    base = AutoModelForCausalLM.from_pretrained(chain.base).get_input_embeddings().num_embeddings
    tokens = len(AutoTokenizer.from_pretrained(chain.base))
    for folder in [chain.run[stage] / "model" for stage in STAGES] + [chain.run["ppo"] / "value_model"]:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.pad_token == "[PAD]" and tokenizer.pad_token_id == tokens != tokenizer.eos_token_id
        assert len(tokenizer) == tokens + 1
        scalar = folder.parent == chain.run["reward"] or folder.name == "value_model"
        kind = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
        model, loading = kind.from_pretrained(folder, output_loading_info=True)
        assert not loading["missing_keys"] and not loading["mismatched_keys"]
        assert not loading["unexpected_keys"]
        # only GPT-2 has no row to spare: its table grows by the one that [PAD] needs
        rows = model.get_input_embeddings().num_embeddings
        assert rows == model.config.vocab_size == (tokens + 1 if chain.name == "gpt2" else base) > tokens
        assert list(folder.glob("*.safetensors")) and not list(folder.glob("*.bin"))


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
    folder = chain.run[stage]
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
