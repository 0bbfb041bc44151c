"""What a training script takes in and gives out: weights, configs, rows and numbers that would make a run worthless end
it in one line, and what it saves is right for others. Bad input with a flag of its own is in test_bad_input.py."""

import json
import os
import shutil
import signal
import stat
from math import inf, nan
from pathlib import Path

import pytest
import torch
import transformers
from conftest import (
    changed_weights,
    edit_config,
    give_other_eos,
    make_reward_model,
    random_model,
    read_metrics,
    single_process,
)
from datasets import DatasetDict, load_from_disk
from test_faults import toy, toy_args
from test_saved_models import GROUPED
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import dpo
import ppo
import reward
import sft


def base_without_pad(world, folder: Path, config) -> tuple[str, torch.nn.Module]:
    """A random model with a row for each id of the tokenizer but [PAD], all of whose logits are near -30, so that a new
    row with a logit of 0 would take the whole softmax."""
    tokenizer = AutoTokenizer.from_pretrained(world.tokenizer)
    model = random_model(config, tokenizer).eval()
    with torch.no_grad():
        norm = model.base_model.ln_f if hasattr(model.base_model, "ln_f") else model.base_model.norm
        if hasattr(norm, "bias"):
            norm.weight[0] = 0
            norm.bias[0] = 10
            model.get_output_embeddings().weight[:, 0] = -3
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder), model


GPT2 = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64)  # a tied head, and a norm with a bias
LLAMA = transformers.LlamaConfig(**GROUPED)  # a head of its own


# ---- weights ------------------------------------------------------------------------------------------------------


def test_weights_that_do_not_fit_end_every_stage(world, tmp_path):
    """transformers would fill in random ones, and say so only in a report."""
    tokenizer = sft.load_tokenizer(str(world.model))
    compiled = changed_weights(world.model, tmp_path / "compiled", lambda x: {f"_orig_mod.{k}": x[k] for k in x})
    headless = changed_weights(
        world.model, tmp_path / "headless", lambda x: {k: x[k] for k in x if k != "embed_out.weight"}
    )
    scores = make_reward_model(world.model, tmp_path / "scores")
    wrong = {compiled: "gpt_neox.embed_in.weight", headless: "lm_head.weight", scores: "lm_head.weight"}
    for load in (sft.load_policy, dpo.load_policy, ppo.load_policy):
        for folder, key in wrong.items():
            with pytest.raises(
                SystemExit, match=f"^error: {folder}: GPTNeoXForCausalLM and the weights .* fit: .*{key}"
            ):
                load(folder, tokenizer)
    with pytest.raises(SystemExit, match="fit: gpt_neox.embed_in.weight"):
        reward.new_reward_model(compiled, tokenizer)
    for folder in (headless, scores):  # a new head needs none
        assert reward.new_reward_model(folder, tokenizer).reward_mean == 0
    more = changed_weights(scores, tmp_path / "more", lambda x: x | {"score.bias": torch.zeros(1)})
    for folder, key in ((str(world.model), ".*, score.weight"), (more, ".*score.bias")):  # one is of an older version
        with pytest.raises(SystemExit, match=f"^error: {folder}: .* fit: {key}"):
            ppo.load_reward_model(folder, tokenizer)


@torch.no_grad()
@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=lambda config: config.model_type)
def test_a_new_row_for_pad_changes_no_probability(world, tmp_path, config):
    folder, base = base_without_pad(world, tmp_path / "base", config)
    tokenizer = sft.load_tokenizer(folder)
    rows = len(tokenizer) - 1
    tokens = torch.tensor([[5, 6, 7, 8, 9, 0]])
    expected = base(tokens).logits.log_softmax(2)
    for load in (sft.load_policy, dpo.load_policy, ppo.load_policy):
        model = load(folder, tokenizer)
        assert torch.allclose(model(tokens).logits.log_softmax(2)[:, :, :rows], expected, atol=1e-5)
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):  # what other programs read
            assert torch.equal(layer.weight[rows], layer.weight[:rows].mean(0))
    labels = torch.tensor([[6, 7, 8, 9, 0, -100]])
    loss = sft.sft_loss(sft.load_policy(folder, tokenizer), tokens, labels, tokenizer.pad_token_id).item()
    assert loss == pytest.approx(base(tokens, labels=tokens).loss.item() * 5, rel=1e-5)
    found = reward.new_reward_model(folder, tokenizer).model.get_input_embeddings().weight
    assert torch.equal(found[rows], found[:rows].mean(0))


# ---- what a config carries over -----------------------------------------------------------------------------------


def test_statistics_and_padding_of_an_earlier_training_are_not_inherited(world, tmp_path):
    shutil.copytree(world.model, tmp_path / "base")
    tokenizer = sft.load_tokenizer(str(world.model))
    edit_config(tmp_path / "base", reward_mean=5.0, pad_token_id=tokenizer.eos_token_id)
    assert reward.new_reward_model(str(tmp_path / "base"), tokenizer).reward_mean == 0
    _, llama = base_without_pad(world, tmp_path / "llama", transformers.LlamaConfig(**GROUPED))
    edit_config(tmp_path / "llama", pad_token_id=tokenizer.eos_token_id)  # makes it nn.Embedding's padding_idx
    model = sft.load_policy(str(tmp_path / "llama"), sft.load_tokenizer(str(tmp_path / "llama")))
    model(torch.tensor([[0, 5, 6]])).logits[0, -1, 7].backward()
    assert model.get_input_embeddings().weight.grad[0].abs().sum() > 0


def test_a_reward_model_with_another_eos_is_refused(world, tmp_path):
    folder = give_other_eos(make_reward_model(world.model, tmp_path / "reward"))
    paths = {"sft_model_path": str(world.model), "reward_model_path": str(folder), "dataset": str(world.dataset)}
    with pytest.raises(SystemExit, match=f"^error: --reward-model-path {folder}: another tokenizer or EOS than in"):
        ppo.main(ppo.Args(**paths, output_dir=str(tmp_path / "run"), batch_size=8, total_episodes=8))
    assert not (tmp_path / "run").exists()


def test_a_model_with_a_vision_tower_is_refused(world, tmp_path):
    tokenizer = sft.load_tokenizer(str(world.model))
    text = transformers.Gemma3TextConfig(**GROUPED, head_dim=16, vocab_size=512, sliding_window=20)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision | {"image_size": 28, "patch_size": 14})
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path / "base")
    with pytest.raises(SystemExit, match="^error: .*Gemma3ForConditionalGeneration is more than a language model"):
        sft.load_policy(str(tmp_path / "base"), tokenizer)


# ---- rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["query_token", "query_reference_response_token"])
def test_rows_that_are_padded_on_the_other_side_are_refused(world, tmp_path, column):
    tokenizer = sft.load_tokenizer(str(world.model))
    data = load_from_disk(str(world.dataset))

    def other_side(row, i):
        real = [token for token in row[column] if token != tokenizer.pad_token_id]
        padding = [tokenizer.pad_token_id] * (len(row[column]) - len(real))
        return {column: real + padding if column == "query_token" else padding + real} if i == 3 else {}

    DatasetDict(dict(data) | {"train": data["train"].map(other_side, with_indices=True)}).save_to_disk(
        tmp_path / "data"
    )
    with pytest.raises(SystemExit, match=f"^error: --dataset .*: train: {column} of row 3 is padded on the other side"):
        sft.load_splits("--dataset", str(tmp_path / "data"), ["query", "query_token", *sft.TOKEN_COLUMNS], tokenizer)


# ---- resuming -----------------------------------------------------------------------------------------------------


def test_a_digest_sees_weights_and_every_column_of_the_rows(world, tmp_path):
    """A model that was trained again has files of the same names and sizes."""
    digest = sft.content_digest(str(world.model))
    shutil.copytree(world.model, tmp_path / "copy")
    assert sft.content_digest(str(tmp_path / "copy")) == digest
    other = changed_weights(world.model, tmp_path / "other", lambda x: {k: 1.001 * v for k, v in x.items()})
    assert sft.content_digest(str(other)) != digest
    data = load_from_disk(str(world.preference_dataset))["train"]
    digests = set()
    for i, margin in enumerate((1.0, 2.0)):
        data.add_column("margin", [margin] * len(data)).save_to_disk(tmp_path / str(i))
        digests.add(sft.content_digest(load_from_disk(tmp_path / str(i))))
    assert len(digests) == 2


def test_processes_that_see_other_checkpoints_end(tmp_path, monkeypatch):
    def stop(update):
        if update == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        toy(toy_args(tmp_path / "run"), at=stop)
    monkeypatch.setattr(sft, "gather_object", lambda seen: [*seen, "None"])
    with pytest.raises(SystemExit, match="^error: --resume .*update_000002', 'None'.*They need one shared disk"):
        toy(toy_args(tmp_path / "run", resume=True))


# ---- what others read ---------------------------------------------------------------------------------------------


SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"original_max_position_embeddings": 512, "rope_theta": 500000.0}


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 500000.0}, SCALED], ids=["plain", "scaled"])
def test_a_saved_model_has_what_transformers_4_reads(world, tmp_path, rope):
    tokenizer = sft.load_tokenizer(str(world.model))
    config = transformers.LlamaConfig(**GROUPED, vocab_size=512, rope_parameters=dict(rope))
    model = AutoModelForCausalLM.from_config(config)
    accelerator = single_process(is_main_process=True, wait_for_everyone=lambda: None)
    sft.save_model(accelerator, sft.Args(output_dir=str(tmp_path)), "model", model, tokenizer)
    saved = json.loads((tmp_path / "model/config.json").read_text())
    assert saved["rope_theta"] == 500000.0
    assert (saved["rope_scaling"] or {}).get("factor") == rope.get("factor")
    found = AutoConfig.from_pretrained(tmp_path / "model").rope_parameters
    assert {key: found[key] for key in rope} == rope
    saved = json.loads((tmp_path / "model/tokenizer_config.json").read_text())
    assert saved["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert AutoTokenizer.from_pretrained(tmp_path / "model").get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_files_are_readable_for_whom_the_umask_lets_read(tmp_path, umask):
    before = os.umask(umask)
    try:
        toy(toy_args(tmp_path / "run"))
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "run" / "checkpoints").rglob("*") if path.is_file()]
    assert len(files) > 5 and {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o666 & ~umask}


# ---- signals ------------------------------------------------------------------------------------------------------


def test_a_second_ctrl_c_ends_a_run_at_once(tmp_path):
    for _ in sft.updates(single_process(is_main_process=True), sft.Args(output_dir=str(tmp_path)), 0, 3):
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        break


# ---- numbers and names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "changes"),
    [
        (ppo, {"penalty_reward_value": -inf}),
        (ppo, {"cliprange": nan}),
        (ppo, {"cliprange_value": -0.1}),
        (sft, {"num_train_epochs": inf}),
        (sft, {"max_grad_norm": -1.0}),
    ],
)
def test_a_number_that_is_not_finite_is_named(tmp_path, stage, changes):
    [(key, value)] = changes.items()
    with pytest.raises(SystemExit, match=f"^error: --{key.replace('_', '-')} {value} must be a finite number"):
        stage.check_args(stage.Args(output_dir=str(tmp_path), **changes))


def test_inf_means_no_clipping_and_values_above_the_scores_are_named(world, tmp_path, capsys):
    """inf is valid JSON, too. Few responses of four tokens end, so the scores are about the penalty."""
    folder = make_reward_model(world.model, tmp_path / "reward")
    paths = {"sft_model_path": str(world.model), "reward_model_path": str(folder), "dataset": str(world.dataset)}
    sizes = {"batch_size": 8, "total_episodes": 16, "response_length": 4, "eval_rows": 2, "learning_rate": 1e-2}
    ranges = {"cliprange": inf, "cliprange_value": inf, "penalty_reward_value": -100.0}
    ppo.main(ppo.Args(**paths, **sizes, **ranges, output_dir=str(tmp_path / "run"), sample_every=0))
    assert capsys.readouterr().out.count("warning: values lie more than 1 above the scores") == 1
    args = json.loads((tmp_path / "run/args.json").read_text(), parse_constant=pytest.fail)
    assert args["cliprange"] == args["cliprange_value"] == "inf"
    lines = read_metrics(tmp_path / "run")
    assert {line["policy/clip_fraction"] for line in lines} == {line["value/clip_fraction"] for line in lines} == {0.0}


NAMES = {"org/nano": "nano", "org/nano@main": "nano", "org/nano@refs/pr/1": "nano", "bases/nano-xs/": "nano-xs"}


@pytest.mark.parametrize("model", [*NAMES, "~/x/nano"])
def test_a_run_is_named_after_its_model(model):
    args = sft.Args(model, seed=3)
    sft.check_args(args)
    assert args.output_dir == f"runs/sft/{NAMES.get(model, 'nano')}/3" and args.model == os.path.expanduser(model)


def test_a_local_folder_may_have_an_at_in_its_path(tmp_path):
    (tmp_path / "a@b" / "nano").mkdir(parents=True)
    args = sft.Args(str(tmp_path / "a@b" / "nano"), seed=3)
    sft.check_args(args)
    assert args.output_dir == "runs/sft/nano/3"
