"""Bad input of the stages: one clear message that names the flag, the path or the field, and no run folder.
Weights that no stage can use are tested in test_saved_models.py, damaged files in test_faults.py."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import nano
import pytest
import torch
from conftest import give_other_tokenizer, make_reward_model
from datasets import DatasetDict, load_from_disk
from test_stages import few_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

import dpo
import ppo
import reward
import sft

STAGES = {"sft": sft, "reward": reward, "dpo": dpo, "ppo": ppo}
PREFERENCE = ("reward", "dpo")


@pytest.fixture(scope="module")
def made(world, tmp_path_factory) -> SimpleNamespace:
    """.root, .model and .reward (folders), and .dataset and .preference_dataset of few rows."""
    root = tmp_path_factory.mktemp("bad")
    make_reward_model(world.model, root / "reward")
    folders = {"root": root, "model": world.model, "reward": root / "reward"}
    return SimpleNamespace(**folders, **vars(few_rows(world, root / "data")))


@pytest.fixture
def stage_args(made, tmp_path):
    """Arguments that are good, but for what is changed."""

    def args(stage: str, **changes):
        own = {"model": "nano", "sft_model_path": str(made.model)} if stage != "sft" else {"model": str(made.model)}
        own |= {"batch_size": 8, "total_episodes": 8, "output_dir": str(tmp_path / "runs" / "out")}
        if stage in PREFERENCE:
            own["preference_dataset"] = str(made.preference_dataset)
        if stage != "dpo":
            own["dataset"] = str(made.dataset)
        if stage == "ppo":
            own |= {"reward_model_path": str(made.reward), "response_length": 4, "eval_rows": 2}
        return STAGES[stage].Args(**(own | changes))

    return args


def expect(stage: str, args, *parts: str):
    """The stage ends with an error of these parts, having written nothing."""
    with pytest.raises(SystemExit) as error:
        STAGES[stage].main(args)
    text = str(error.value)
    assert text.startswith("error: ") and len(text) < 1000
    assert "\n\n" not in text and "Traceback" not in text  # one paragraph
    assert not Path(args.output_dir).exists() and not Path(args.output_dir).parent.exists()
    for part in parts:
        assert part in text, text


def flag(field: str) -> str:
    return "--" + field.replace("_", "-")


# ---- data -------------------------------------------------------------------------------------------------------


def test_data_that_cannot_be_read(stage_args, made, tmp_path):
    """No folder, no Hub, no splits, a split or column missing, damaged files: one message that names the flag."""
    data, columns = load_from_disk(str(made.preference_dataset)), dpo.PREFERENCE_COLUMNS
    small = DatasetDict({split: rows.select(range(4)) for split, rows in data.items()}).select_columns(columns)
    for column in columns:
        small.remove_columns(column).save_to_disk(str(tmp_path / f"without {column}"))
    for split in ("train", "validation"):
        DatasetDict({k: v for k, v in small.items() if k != split}).save_to_disk(str(tmp_path / f"without {split}"))
        # as a folder, datasets 5 writes no file for an empty split and then cannot read it
        empty = DatasetDict({k: v.select([]) if k == split else v for k, v in small.items()})
        empty.save_to_disk(str(tmp_path / f"empty {split}"))
    small["train"].save_to_disk(str(tmp_path / "no splits"))
    (shutil.copytree(made.preference_dataset, tmp_path / "no json") / "dataset_dict.json").write_text("{")
    torn = shutil.copytree(made.preference_dataset, tmp_path / "torn")
    os.truncate(next((torn / "train").glob("data-*.arrow")), 4096)
    for folder in [*map(str, tmp_path.iterdir()), f"{tmp_path}/nowhere", "nobody/nothing@main"]:
        expect("dpo", stage_args("dpo", preference_dataset=folder), f"--preference-dataset {folder}:")


@pytest.mark.parametrize(("stage", "field"), [("sft", "dataset"), ("ppo", "dataset"), ("reward", "preference_dataset")])
def test_data_like_the_authors_and_data_that_no_stage_can_use(world, monkeypatch, stage, field):
    """The authors' `query` lacks some of the spaces of `query_token`, and tldr_dataset.py would have cut some of them
    elsewhere: such data are accepted, and so are a few rows that do not match. Data are refused if most rows disagree,
    as they do with another tokenizer, if rows do not end in EOS, or if rows differ in width."""
    module = STAGES[stage]
    columns = {
        "sft": ["query", "query_token", *sft.TOKEN_COLUMNS],
        "ppo": ["query", "query_token", "reference_response_token"],
        "reward": reward.PREFERENCE_COLUMNS,
    }[stage]
    tokenizer = module.load_tokenizer(str(world.model))
    pad_id, eos_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    path, data = getattr(world, field), load_from_disk(str(getattr(world, field))).select_columns(columns)
    data = DatasetDict({split: data[split] for split in ("train", "validation")})
    keys = [column for column in columns if column.endswith(("_token", "_label"))]

    def other_query(rows: list[int]):
        return lambda row, i: {"query": row["query"] + " and more"} if i in rows else {}

    def no_eos(row, i):
        ids = {key: [x for x in row[key] if x != eos_id] for key in keys}
        return {key: ids[key] + [pad_id] * (len(row[key]) - len(ids[key])) for key in keys if key != "query_token"}

    def ragged(row, i):
        return {"query_token": row["query_token"][i == 3 :]}

    def load(split: str, change):
        rows = data[split].map(change, with_indices=True)
        monkeypatch.setattr(module, "load_from_disk", lambda _: DatasetDict({**data, split: rows}))
        return module.load_splits(flag(field), str(path), columns, tokenizer)

    load("validation", lambda row, i: {"query": " ".join(row["query"].split()) + " "})
    taken = load("train", other_query([0, 4, 17]))  # of the 16 rows looked at 0 and 4
    assert {split: len(rows) for split, rows in taken.items()} == {split: len(rows) for split, rows in data.items()}
    assert torch.is_tensor(taken["train"][0]["query_token"])
    for split, change, text in (
        ("train", other_query(range(0, 64, 2)), "train: 0 of 16 rows"),  # those looked at
        ("validation", other_query(range(64)), "validation: 0 of"),
        ("train", no_eos, "train: 0 of 16 rows"),
        ("train", ragged, "train: rows differ in width"),
    ):
        with pytest.raises(SystemExit) as error:
            load(split, change)
        message = str(error.value)
        assert message.startswith(f"error: {flag(field)} {path}: {split}: ") and text in message, message
        assert message.count("\n") == 0 and len(message) < 500


# ---- models, numbers ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wrong_models(world, made) -> dict[str, str]:
    """Folders by what is wrong with the model."""
    found = {name: made.root / name for name in ("nowhere", "bare", "torn", "untokenized", "small", "other reward")}
    found["bare"].mkdir()
    shutil.copytree(made.model, found["torn"])
    os.truncate(found["torn"] / "model.safetensors", 4096)
    shutil.copytree(made.model, found["untokenized"], ignore=shutil.ignore_patterns("tokenizer*", "special*"))
    config = nano.nano_config("xs", 100, 0, 0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(found["small"])
    AutoTokenizer.from_pretrained(world.tokenizer).save_pretrained(found["small"])
    shutil.copytree(made.reward, found["other reward"])
    give_other_tokenizer(world, found["other reward"])
    return {name: str(folder) for name, folder in found.items()}


@pytest.mark.parametrize(
    ("stage", "changes", "parts"),
    [
        ("sft", {"model": "{nowhere}"}, ["--model {nowhere}"]),
        ("dpo", {"sft_model_path": "{bare}"}, ["no checkpoint there"]),
        ("dpo", {"sft_model_path": "{torn}"}, ["the model in {torn} cannot be read"]),
        ("dpo", {"sft_model_path": "nobody/nothing"}, ["Hub"]),
        ("ppo", {"reward_model_path": "{nowhere}"}, ["--reward-model-path {nowhere}", "no checkpoint there"]),
        ("sft", {"model": "{untokenized}"}, ["tokenizer"]),  # transformers makes one up, which made none of the data
        ("sft", {"model": "{small}"}, ["{small}", "128 embeddings"]),
        ("ppo", {"reward_model_path": "{other reward}"}, ["--reward-model-path {other reward}", "another tokenizer"]),
        ("ppo", {"num_mini_batches": 3}, ["--batch-size 8: no multiple of 3"]),
        ("ppo", {"total_episodes": 7}, ["--batch-size 8", "--total-episodes"]),
        ("sft", {"batch_size": 0}, ["--batch-size 0 must be above 0"]),
        ("reward", {"total_episodes": 0}, ["--total-episodes 0 must be above 0"]),  # and not a whole epoch
        ("ppo", {"micro_batch_size": 0}, ["--micro-batch-size 0 must be above 0"]),
    ],
)
def test_a_model_or_a_number_that_cannot_be(stage_args, wrong_models, stage, changes, parts):
    changes = {key: x.format(**wrong_models) if isinstance(x, str) else x for key, x in changes.items()}
    expect(stage, stage_args(stage, **changes), *(part.format(**wrong_models) for part in parts))
