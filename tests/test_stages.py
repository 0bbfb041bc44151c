"""The stages one after another on four architectures, found by their default paths: what a run folder holds, and that
other programs can read it."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import nano
import pandas
import pytest
import torch
from accelerate.state import AcceleratorState
from datasets import load_from_disk
from safetensors.torch import save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

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
    "dpo": "evaluate_implicit",
    "ppo": "sample_and_score",
}
DAY = 86_400


def run(stage: str, **arguments):
    AcceleratorState._reset_state(True)  # accelerate keeps one state a process
    STAGES[stage].main(STAGES[stage].Args(**arguments))


def take_a_day(patch, module, function: str):
    """By the clock of the module, each call of the function takes a day."""
    original, days = getattr(module, function), []

    def longer(*args):
        days.append(DAY)
        return original(*args)

    patch.setattr(module, "time", SimpleNamespace(time=lambda: time.time() + sum(days)))
    patch.setattr(module, function, longer)


@pytest.fixture(scope="module", params=["gpt_neox", "gpt2", "llama", "qwen3"])
def chain(request, world, tmp_path_factory) -> SimpleNamespace:
    """.name of the architecture, .base model folder, .run[stage] run folders; two updates a stage, all paths but the
    base model's by default."""
    root = tmp_path_factory.mktemp("chain")
    nano.main(
        nano.Args(tokenizer=str(world.tokenizer), architecture=request.param, output_dir=str(root / request.param))
    )
    (root / "data").mkdir()
    (root / "data" / "tldr").symlink_to(world.dataset.parent)
    common = {"seed": SEED, "batch_size": 8, "total_episodes": 16, "learning_rate": 1e-3, "run_eval": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for stage, evaluation in EVALUATIONS.items():
            take_a_day(patch, STAGES[stage], evaluation)
        run("sft", model=str(root / request.param), response_length=8, **common)
        run("reward", model=request.param, **common)
        for stage in ("dpo", "ppo"):
            run(stage, model=request.param, response_length=8, **common)
    runs = {stage: root / "runs" / stage / request.param / str(SEED) for stage in STAGES}
    return SimpleNamespace(name=request.param, base=root / request.param, root=root, run=runs)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# ---- what must hold on every architecture -----------------------------------------------------------------------


def test_ratios_are_one_before_the_first_step(chain):
    assert all(line["policy/first_ratio_deviation"] <= 1e-5 for line in lines(chain.run["ppo"]))


def test_the_time_of_an_update_is_without_its_evaluation(chain):
    for stage, folder in chain.run.items():
        last = lines(folder)[-1]
        assert {key for key in last if key.startswith("eval/")}, stage
        assert last["time/update"] < DAY and last["time/total"] < DAY, stage


@torch.no_grad()
def test_padding_on_either_side_gives_the_same_reward(chain, world):
    folder = str(chain.run["reward"] / "model")
    tokenizer = reward.load_tokenizer(folder)
    model, pad_id = reward.load_reward_model(folder, tokenizer).eval(), tokenizer.pad_token_id
    rows = load_from_disk(str(world.dataset))["validation"].with_format("torch")[:8]
    plain = []
    for query, response in zip(rows["query_token"], rows["reference_response_token"], strict=True):
        row = torch.cat([query[query != pad_id], response[response != pad_id]])[None]
        plain.append(model(row, torch.ones_like(row), torch.arange(row.shape[1])[None])[0, -1].item())
    left = torch.cat([rows["query_token"], rows["reference_response_token"]], 1)
    right = torch.stack([torch.cat([row[row != pad_id], row[row == pad_id]]) for row in left])
    assert left[:, 0].eq(pad_id).all() and right[:, -1].eq(pad_id).all()
    for found in (
        reward.response_rewards(model, left, rows["query_token"].shape[1], pad_id),
        reward.response_rewards(model, right, 0, pad_id),
        reward.response_rewards(model, reward.trim(right, pad_id, "right"), 0, pad_id),
    ):
        assert found.tolist() == pytest.approx(plain, abs=1e-5)
    table = pandas.read_csv(chain.run["reward"] / "eval" / "reference_rewards.csv").set_index("statistic")["value"]
    assert abs(table["left_minus_right_padding_max_abs"]) <= 1e-5
    assert abs(table["mean_after_centring"]) <= 1e-5


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
        assert set(loading["unexpected_keys"]) == ({"score.bias"} if scalar else set())
        # only GPT-2 has no row to spare: its table grows by the one that [PAD] needs
        rows = model.get_input_embeddings().num_embeddings
        assert rows == model.config.vocab_size == (tokens + 1 if chain.name == "gpt2" else base) > tokens
        assert list(folder.glob("*.safetensors")) and not list(folder.glob("*.bin"))


@torch.no_grad()
def test_stages_train_what_they_should(chain):
    """Every stage's weights differ from those it started from, and each stage started from the stage before."""
    sft_folder, reward_folder = str(chain.run["sft"] / "model"), str(chain.run["reward"] / "model")
    start = AutoModelForCausalLM.from_pretrained(sft_folder).state_dict()
    base = AutoModelForCausalLM.from_pretrained(chain.base).state_dict()

    def distance(one: dict, other: dict) -> float:
        keys = [key for key in one if key in other and one[key].shape == other[key].shape]
        assert len(keys) > 10
        return max((one[key] - other[key]).abs().max().item() for key in keys)

    # a step of AdamW moves a weight by the learning rate at most, and a little more for the weight decay
    steps = {"sft": 2, "dpo": 2, "ppo": 8}  # PPO: four epochs an update
    assert 1e-5 < distance(start, base) < 1.1e-3 * steps["sft"]
    for stage in ("dpo", "ppo"):
        trained = AutoModelForCausalLM.from_pretrained(chain.run[stage] / "model").state_dict()
        assert 1e-5 < distance(trained, start) < 1.1e-3 * steps[stage]
    tokenizer = ppo.load_tokenizer(reward_folder)
    rewards = ppo.load_reward_model(reward_folder, tokenizer).state_dict()
    values = ppo.load_reward_model(str(chain.run["ppo"] / "value_model"), tokenizer).state_dict()
    assert 1e-5 < distance(values, rewards) < 1.1e-3 * steps["ppo"]


# ---- run folders ------------------------------------------------------------------------------------------------

SAMPLES = ["id", "query", "response", "reference", "response_tokens", "has_eos"]
ROUGE = ["rouge1", "rouge2", "rougeL"]
PAIRS = ["batch", "split", "policies", "confidence", "chosen_reward", "rejected_reward"]
ACCURACY = ["data", "group", "value", "pairs", "accuracy", "gap"]
TABLES = {
    "sft": {"samples_validation.csv": SAMPLES + ROUGE, "samples_test.csv": SAMPLES + ROUGE},
    "reward": {"accuracy.csv": ACCURACY, "reference_rewards.csv": ["statistic", "value"]},
    "dpo": {"accuracy.csv": ACCURACY, "samples_validation.csv": SAMPLES + ROUGE},
    "ppo": {"samples_validation.csv": [*SAMPLES, "score", "reference_score", *ROUGE]},
}


@pytest.mark.parametrize("stage", STAGES)
def test_run_folder(chain, world, stage):
    folder = chain.run[stage]
    names = {path.name for path in folder.iterdir()}
    expected = {"model", "metrics.jsonl", "args.json", "tensorboard", "eval"}
    assert names == expected | ({"value_model"} if stage == "ppo" else set())
    args = json.loads((folder / "args.json").read_text())
    assert set(args) == {*vars(STAGES[stage].Args()), "stage", "command"} and args["stage"] == stage
    assert args["seed"] == SEED and args["micro_batch_size"] == 8 and args["command"].startswith("python ")
    assert Path(args["output_dir"]) == Path("runs") / stage / chain.name / str(SEED)

    updates = [line["update"] for line in lines(folder)]
    assert updates == ([0, 1, 2] if stage in ("sft", "dpo") else [1, 2])
    logged = EventAccumulator(str(folder / "tensorboard")).Reload()
    for line in lines(folder):
        for key in set(line) - {"update"}:
            value = {event.step: event.value for event in logged.Scalars(key)}[line["update"]]
            assert value == pytest.approx(line[key], rel=1e-6, abs=1e-30)
    assert set(logged.Tags()["scalars"]) == {key for line in lines(folder) for key in line} - {"update"}

    for name, columns in TABLES[stage].items():
        assert list(pandas.read_csv(folder / "eval" / name).columns) == columns
    for path in (folder / "eval").glob("samples_*.csv"):
        split = load_from_disk(str(world.dataset))[path.stem.removeprefix("samples_")]
        samples = pandas.read_csv(path, keep_default_na=False)
        assert samples["id"].tolist() == split["id"][:] and samples["query"].tolist() == split["query"][:]
        assert samples["response_tokens"].between(1, 8).all()
        assert samples["reference"].tolist() == [x.removesuffix("<|endoftext|>") for x in split["reference_response"]]
    pairs = {path.stem for path in (folder / "eval").glob("pairs_*.csv")}
    assert pairs == ({"pairs_validation", "pairs_validation_cnndm"} if stage in ("reward", "dpo") else set())
    for path in (folder / "eval").glob("pairs_*.csv"):
        assert set(PAIRS) <= set(pandas.read_csv(path).columns)
        assert len(pandas.read_csv(path)) == len(
            load_from_disk(str(world.preference_dataset))[path.stem.removeprefix("pairs_")]
        )


def test_a_missing_earlier_stage_is_named_with_the_command_that_makes_it(chain, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "tldr").symlink_to(chain.root / "data" / "tldr")
    common = {"model": chain.name, "seed": SEED, "batch_size": 8, "total_episodes": 8}
    for stage in ("reward", "dpo", "ppo"):
        with pytest.raises(SystemExit) as error:
            run(stage, **common)
        assert str(error.value).startswith(f"error: --sft-model-path runs/sft/{chain.name}/{SEED}")
        assert f"python sft.py --model {chain.name} --seed {SEED}" in str(error.value)
    shutil.copytree(chain.run["sft"], tmp_path / "runs" / "sft" / chain.name / str(SEED))
    with pytest.raises(SystemExit) as error:
        run("ppo", **common)
    assert str(error.value).startswith(f"error: --reward-model-paths runs/reward/{chain.name}/{SEED}")
    assert f"python reward.py --model {chain.name} --seed {SEED}" in str(error.value)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["sft"]


# ---- reward models, ours and the paper's ------------------------------------------------------------------------


def texts(world) -> list[str]:
    return load_from_disk(str(world.dataset))["validation"]["query_reference_response"][:6]


@torch.no_grad()
def test_plain_transformers_scores_are_off_by_the_heads_bias(chain, world):
    folder = str(chain.run["reward"] / "model")
    tokenizer = reward.load_tokenizer(folder)
    ours = reward.load_reward_model(folder, tokenizer).eval()
    plain = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    bias = ours.model.score.bias.item()
    assert abs(bias) > 1e-3 and plain.config.num_labels == 1
    for text in texts(world):
        row = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        score = reward.response_rewards(ours, row, 0, tokenizer.pad_token_id).item()
        assert score - plain(row).logits.item() == pytest.approx(bias, abs=1e-5)
    padded = tokenizer(texts(world), return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
    scores = reward.response_rewards(ours, padded.input_ids, 0, tokenizer.pad_token_id)
    differences = (scores - plain(**padded).logits.squeeze(1)).tolist()
    assert differences == pytest.approx([bias] * len(differences), abs=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])  # the paper's are .bin
def test_the_papers_released_format_loads(chain, world, tmp_path, file):
    torch.manual_seed(5)
    tokenizer = sft.load_tokenizer(str(chain.run["sft"] / "model"))
    backbone = AutoModel.from_pretrained(chain.run["sft"] / "model", dtype=torch.float32).eval()
    hidden = backbone.config.hidden_size
    head, bias, offset = torch.randn(1, hidden), torch.tensor([0.25]), 0.75
    state = {f"lm_backbone.{key}": value for key, value in backbone.state_dict().items()}
    state |= {"scalar_head.weight": head, "scalar_head.bias": bias}
    folder = tmp_path / "released"
    tokenizer.save_pretrained(folder)
    save = torch.save if file.endswith(".bin") else save_file
    save({key: value.contiguous() for key, value in state.items()}, folder / file)
    config = {"base_config": backbone.config.to_dict(), "base_model": "EleutherAI/pythia-1b-deduped", "bias": offset}
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": hidden, "model_type": "scalar"}))

    # the same weights in our own format: the offset is in the head's bias
    ours = reward.new_reward_model(str(chain.run["sft"] / "model"), tokenizer)
    ours.model.score.weight.copy_(head)
    ours.model.score.bias.fill_(0.25 - 0.75)
    ours.model.save_pretrained(tmp_path / "ours")
    tokenizer.save_pretrained(tmp_path / "ours")
    for module in (reward, ppo):
        model = module.load_reward_model(str(folder), tokenizer).eval()
        own = module.load_reward_model(str(tmp_path / "ours"), tokenizer).eval().state_dict()
        assert all(torch.equal(value, own[key]) for key, value in model.state_dict().items())
        for text in texts(world):
            row = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
            last = backbone(row).last_hidden_state[0, -1].double()
            expected = sum((last * head[0].double()).tolist()) + 0.25 - 0.75
            found = module.response_rewards(model, row, 0, tokenizer.pad_token_id).item()
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


# ---- importing --------------------------------------------------------------------------------------------------

LOOK = """
import contextlib, io, os, runpy, sys
sys.path.insert(0, sys.argv[1])
for name in ("tldr_dataset", "sft", "reward", "ppo", "dpo"):
    __import__(name)
import torch
assert "deepspeed" not in sys.modules, "deepspeed is imported"
assert "wandb" not in sys.modules, "wandb is imported"
assert not torch.distributed.is_initialized()
assert os.listdir() == [], os.listdir()
for name in ("tldr_dataset", "sft", "reward", "ppo", "dpo"):
    sys.argv = [f"{name}.py", "--help"]
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            runpy.run_path(f"{sys.path[0]}/{name}.py", run_name="__main__")
    except SystemExit as end:
        assert end.code in (0, None), end.code
        assert "--output-dir" in text.getvalue()
        print("help of", name)
assert os.listdir() == []
"""


def test_importing_a_script_does_nothing_and_help_works(tmp_path):
    command = [sys.executable, "-c", LOOK, str(ROOT)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n") == [f"help of {n}" for n in "tldr_dataset sft reward ppo dpo".split()] + [""]
