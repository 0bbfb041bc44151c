"""Bad input of the stages: one clear message that names the flag, the path or the field, and no run folder."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import nano
import posts
import pytest
import torch
from accelerate.state import AcceleratorState
from datasets import Dataset, DatasetDict, load_from_disk
from transformers import AutoModelForCausalLM, AutoTokenizer, GraniteConfig, GraniteForCausalLM

import dpo
import ppo
import reward
import sft

STAGES = {"sft": sft, "reward": reward, "dpo": dpo, "ppo": ppo}
PREFERENCE = ("reward", "dpo")
# which flag each stage's main data set comes from
FLAGS = [(stage, "dataset") for stage in STAGES] + [(stage, "preference_dataset") for stage in PREFERENCE]


@pytest.fixture(scope="module")
def made(world, tmp_path_factory) -> SimpleNamespace:
    """.root, .model and .reward (folders), and .other: a tokenizer folder that made none of the data."""
    root = tmp_path_factory.mktemp("bad")
    tokenizer = reward.load_tokenizer(str(world.model))
    model = reward.new_reward_model(str(world.model), tokenizer).model
    model.save_pretrained(root / "reward", state_dict=model.state_dict())
    tokenizer.save_pretrained(root / "reward")
    texts = load_from_disk(str(world.dataset))["train"]["query"][:10]
    posts.train_tokenizer(texts, 300).save_pretrained(root / "other")
    return SimpleNamespace(root=root, model=world.model, reward=root / "reward", other=root / "other")


@pytest.fixture
def stage_args(world, made, tmp_path):
    """Arguments that are good, but for what is changed."""

    def args(stage: str, **changes):
        common = {"model": "nano", "dataset": str(world.dataset), "batch_size": 8, "total_episodes": 8}
        common |= {"output_dir": str(tmp_path / "runs" / "out"), "run_eval": True}
        own = {"model": str(made.model)} if stage == "sft" else {"sft_model_path": str(made.model)}
        if stage in PREFERENCE:
            own["preference_dataset"] = str(world.preference_dataset)
        if stage == "ppo":
            own |= {"reward_model_paths": [str(made.reward)], "response_length": 4}
        return STAGES[stage].Args(**(common | own | changes))

    return args


def message(stage: str, args) -> str:
    """The error that the stage ends with, having written nothing."""
    AcceleratorState._reset_state(True)  # accelerate keeps one state a process
    with pytest.raises(SystemExit) as error:
        STAGES[stage].main(args)
    text = str(error.value)
    assert text.startswith("error: ") and len(text) < 1000
    assert "\n\n" not in text and "Traceback" not in text  # one paragraph
    assert not Path(args.output_dir).exists() and not Path(args.output_dir).parent.exists()
    return text


def expect(stage: str, args, *parts: str):
    text = message(stage, args)
    for part in parts:
        assert part in text, text


def flag(field: str) -> str:
    return "--" + field.replace("_", "-")


@pytest.mark.parametrize("stage", STAGES)
def test_the_arguments_are_good_when_nothing_is_changed(stage_args, stage):
    """Else the messages below could come from something else."""
    AcceleratorState._reset_state(True)
    args = stage_args(stage)
    STAGES[stage].main(args)
    assert (Path(args.output_dir) / "model").exists()


# ---- data -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "field"), FLAGS)
def test_missing_folder(stage_args, tmp_path, stage, field):
    nowhere = str(tmp_path / "nowhere")
    expect(stage, stage_args(stage, **{field: nowhere}), f"{flag(field)} {nowhere}:", "tldr_dataset.py")


@pytest.mark.parametrize(("stage", "field"), FLAGS)
def test_a_hub_id_that_cannot_be_reached(stage_args, stage, field):
    expect(stage, stage_args(stage, **{field: "nobody/nothing@main"}), f"{flag(field)} nobody/nothing@main:")


@pytest.mark.parametrize(("stage", "field"), FLAGS)
def test_a_dataset_without_splits(stage_args, world, tmp_path, stage, field):
    load_from_disk(str(getattr(world, field)))["train"].save_to_disk(str(tmp_path / "plain"))
    args = stage_args(stage, **{field: str(tmp_path / "plain")})
    expect(stage, args, f"{flag(field)} {tmp_path / 'plain'}:", "DatasetDict", "train", "validation")


@pytest.mark.parametrize(("stage", "field"), FLAGS)
@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_missing_and_an_empty_split(stage_args, world, monkeypatch, tmp_path, stage, field, split):
    data = load_from_disk(str(getattr(world, field)))
    DatasetDict({k: v for k, v in data.items() if k != split}).save_to_disk(str(tmp_path / "without"))
    expect(stage, stage_args(stage, **{field: str(tmp_path / "without")}), f"{flag(field)} ", "without", split)
    # as a folder, datasets 5 writes no file for an empty split and then cannot read it; from the Hub it comes as it is
    empty = DatasetDict({k: v.select([]) if k == split else v for k, v in data.items()})
    empty.save_to_disk(str(tmp_path / "empty"))
    args = stage_args(stage, **{field: str(tmp_path / "empty")})
    expect(stage, args, f"{flag(field)} {tmp_path / 'empty'}:", "tldr_dataset.py")
    read = STAGES[stage].load_from_disk
    monkeypatch.setattr(STAGES[stage], "load_from_disk", lambda path: empty if path.endswith("empty") else read(path))
    expect(stage, args, f"{flag(field)} {tmp_path / 'empty'}:", f"split {split} is empty")


COLUMNS = [(stage, "dataset", column) for stage in STAGES for column in STAGES[stage].COLUMNS]
COLUMNS += [
    (stage, "preference_dataset", column)
    for stage in PREFERENCE
    for column in ["query", "query_token", *STAGES[stage].PAIR_COLUMNS]
]


@pytest.mark.parametrize(("stage", "field", "column"), COLUMNS)
def test_a_missing_column(stage_args, world, tmp_path, stage, field, column):
    load_from_disk(str(getattr(world, field))).remove_columns(column).save_to_disk(str(tmp_path / "lacking"))
    args = stage_args(stage, **{field: str(tmp_path / "lacking")})
    expect(stage, args, f"{flag(field)} {tmp_path / 'lacking'}:", f"'{column}'", "split")


@pytest.mark.parametrize(("stage", "field"), FLAGS)
def test_a_corrupted_file(stage_args, world, tmp_path, stage, field):
    folder = tmp_path / "corrupted"
    shutil.copytree(getattr(world, field), folder)
    for broken in (b"", b"no arrow file", None):
        file = next((folder / "train").glob("data-*.arrow"))
        content = next((Path(getattr(world, field)) / "train").glob("data-*.arrow")).read_bytes()
        file.write_bytes(content[: len(content) // 2] if broken is None else broken)
        expect(stage, stage_args(stage, **{field: str(folder)}), f"{flag(field)} {folder}:")
    (folder / "dataset_dict.json").write_text("{")
    expect(stage, stage_args(stage, **{field: str(folder)}), f"{flag(field)} {folder}:")


@pytest.mark.parametrize("stage", STAGES)
def test_data_of_another_tokenizer(stage_args, made, tmp_path, stage):
    """The model has another tokenizer than the data, with embeddings enough for either."""
    model = tmp_path / "model"
    shutil.copytree(made.model, model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(made.other / name, model / name)
    changes = {"model": str(model)} if stage == "sft" else {"sft_model_path": str(model)}
    if stage == "ppo":
        shutil.copytree(made.reward, tmp_path / "reward")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(made.other / name, tmp_path / "reward" / name)
        changes["reward_model_paths"] = [str(tmp_path / "reward")]
    expect(stage, stage_args(stage, **changes), "--dataset ", "split train, row 0", "another tokenizer", "--tokenizer")


@pytest.mark.parametrize(("stage", "field"), FLAGS)
def test_a_post_that_spells_a_special_token_is_no_error(stage_args, world, tmp_path, stage, field):
    """tldr_dataset.py leaves such text as text; the check of the tokenizer must read it likewise."""
    tokenizer = AutoTokenizer.from_pretrained(world.tokenizer)
    data = load_from_disk(str(getattr(world, field)))

    def spell(row, i):
        if i:
            return {}
        query = "SUBREDDIT: r/tifu\n\nTITLE: what <|endoftext|> means\n\nPOST: a post\n\nTL;DR:"
        tokens = tokenizer(query, add_special_tokens=False, split_special_tokens=True).input_ids
        width = len(row["query_token"])
        return {"query": query, "query_token": [len(tokenizer)] * (width - len(tokens)) + tokens}

    data.map(spell, with_indices=True).save_to_disk(str(tmp_path / "spelling"))
    AcceleratorState._reset_state(True)
    STAGES[stage].main(stage_args(stage, run_eval=field == "dataset", **{field: str(tmp_path / "spelling")}))


# ---- models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["reward", "dpo", "ppo"])
def test_missing_sft_model(stage_args, tmp_path, stage):
    nowhere = str(tmp_path / "nowhere")
    text = message(stage, stage_args(stage, sft_model_path=nowhere))
    assert f"--sft-model-path {nowhere}" in text and "python sft.py --model nano" in text
    (tmp_path / "bare").mkdir()
    assert "config.json" in message(stage, stage_args(stage, sft_model_path=str(tmp_path / "bare")))
    assert "Hub" in message(stage, stage_args(stage, sft_model_path="nobody/nothing"))


def test_missing_base_and_reward_model(stage_args, tmp_path):
    nowhere = str(tmp_path / "nowhere")
    expect("sft", stage_args("sft", model=nowhere), f"--model {nowhere}")
    args = stage_args("ppo", reward_model_paths=[nowhere])
    expect("ppo", args, f"--reward-model-paths {nowhere}", "python reward.py --model nano")


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_without_tokenizer(stage_args, made, tmp_path, stage):
    shutil.copytree(made.model, tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*", "special*"))
    field = "model" if stage == "sft" else "sft_model_path"
    expect(stage, stage_args(stage, **{field: str(tmp_path / "model")}), str(tmp_path / "model"), "tokenizer")


@pytest.mark.parametrize("stage", STAGES)
def test_a_tokenizer_larger_than_the_models_embeddings(stage_args, world, tmp_path, stage):
    folder, tokenizer = tmp_path / "small", AutoTokenizer.from_pretrained(world.tokenizer)
    config = nano.nano_config("gpt_neox", "xs", 100, 0, 0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    field = "model" if stage == "sft" else "sft_model_path"
    expect(stage, stage_args(stage, **{field: str(folder)}), str(folder), "128 embeddings", f"{len(tokenizer)}")


@pytest.mark.parametrize("stage", ["reward"])
def test_an_sft_model_without_a_row_for_pad_is_no_error(stage_args, world, tmp_path, stage):
    """A base model of the Hub, such as GPT-2, in the place of a run of sft.py: [PAD] needs one row more."""
    folder = tmp_path / "gpt2"
    nano.main(nano.Args(tokenizer=str(world.tokenizer), architecture="gpt2", output_dir=str(folder)))
    AcceleratorState._reset_state(True)
    STAGES[stage].main(stage_args(stage, sft_model_path=str(folder)))


def test_a_reward_model_of_another_tokenizer(stage_args, made, tmp_path):
    shutil.copytree(made.reward, tmp_path / "reward")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(made.other / name, tmp_path / "reward" / name)
    args = stage_args("ppo", reward_model_paths=[str(made.reward), str(tmp_path / "reward")])
    expect("ppo", args, f"--reward-model-paths {tmp_path / 'reward'}", "another tokenizer")


def test_a_language_model_in_the_place_of_a_reward_model(stage_args, made):
    args = stage_args("ppo", reward_model_paths=[str(made.model)])
    expect("ppo", args, str(made.model), "score.weight", "reward.py")


def test_a_policy_that_scales_its_logits(stage_args, world, tmp_path):
    tokenizer = reward.load_tokenizer(str(world.model))
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = GraniteConfig(**shape, num_key_value_heads=1, vocab_size=len(tokenizer), logits_scaling=4.0)
    GraniteForCausalLM(config).save_pretrained(tmp_path / "granite")
    tokenizer.save_pretrained(tmp_path / "granite")
    args = stage_args("ppo", sft_model_path=str(tmp_path / "granite"))
    expect("ppo", args, f"{tmp_path / 'granite'}: the logits of GraniteForCausalLM are not those of its head")


# ---- numbers and folders ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_micro_batches_that_do_not_divide(stage_args, stage):
    args = stage_args(stage, batch_size=12, total_episodes=12, micro_batch_size=5)
    expect(stage, args, "--micro-batch-size 5", "--batch-size 12", "nearest: 4 or 6")


def test_mini_batches_that_do_not_divide(stage_args):
    expect("ppo", stage_args("ppo", num_mini_batches=3), "--batch-size 8", "--num-mini-batches 3")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("size", [0, -8])
def test_a_batch_of_nothing(stage_args, stage, size):
    expect(stage, stage_args(stage, batch_size=size), "--batch-size")


@pytest.mark.parametrize("stage", STAGES)
def test_fewer_episodes_than_a_batch(stage_args, stage):
    expect(stage, stage_args(stage, total_episodes=7), "7", "less than one batch", "--batch-size 8")


def test_uwo_and_its_lambda_need_each_other(stage_args):
    expect("ppo", stage_args("ppo", reward_combination="uwo"), "--reward-combination uwo", "--uwo-lambda")
    expect("ppo", stage_args("ppo", uwo_lambda=0.1), "--reward-combination uwo", "--uwo-lambda")


@pytest.mark.parametrize("stage", STAGES)
def test_a_folder_that_holds_a_run(stage_args, tmp_path, stage):
    args = stage_args(stage, output_dir=str(tmp_path / "held"))
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "args.json").write_text("{}")
    AcceleratorState._reset_state(True)
    with pytest.raises(SystemExit, match=f"^error: {tmp_path / 'held'} already holds a run: .*--output-dir.*--resume"):
        STAGES[stage].main(args)
    assert [path.name for path in (tmp_path / "held").iterdir()] == ["args.json"]


def test_a_dataset_made_by_hand_is_judged_by_the_same_rules(stage_args, tmp_path):
    rows = Dataset.from_dict({"query": ["text"], "query_token": [[1, 2]]})
    DatasetDict(train=rows, validation=rows).save_to_disk(str(tmp_path / "own"))
    expect("sft", stage_args("sft", dataset=str(tmp_path / "own")), "--dataset", "lacks the columns", "query_token")
