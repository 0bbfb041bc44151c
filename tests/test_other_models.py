"""Models and tokenizers other than Pythia's: a pair in one row has the numbers of two rows, or the model is refused
before anything is written."""

import check_data
import pytest
import torch
from conftest import close, make_reward_model, random_model
from datasets import Dataset
from test_saved_models import TRAINED
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, GPT2Config, OPTConfig, PreTrainedTokenizerFast

import dpo
import ppo
import reward
import sft
import tldr_dataset

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIGS = {name: TRAINED[name] for name in ("mistral", "gemma3", "llama")}
CONFIGS["gpt2"] = GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64)
CONFIGS["opt"] = OPTConfig(**SMALL, ffn_dim=64)
PAIRS = [reward, dpo]  # the other scripts have copies of pair_inputs and check_pairs: test_copies.py


def make_model(config, tokenizer, folder) -> str:
    """A random model with weights so large that every token matters."""
    model = random_model(config, tokenizer)
    for parameter in model.parameters():
        parameter.data *= 4 if parameter.ndim > 1 else 1
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def models(world, tmp_path_factory) -> dict[str, str]:
    """{name: checkpoint folder}"""
    root, tokenizer = tmp_path_factory.mktemp("models"), AutoTokenizer.from_pretrained(world.tokenizer)
    return {name: make_model(config, tokenizer, root / name) for name, config in CONFIGS.items()}


# ---- pairs in one row -------------------------------------------------------------------------------------------

QUERIES = [list(range(20, 60)), list(range(90, 112)), [9, 8, 7]]
RESPONSES = {"chosen": [[61, 62, *range(120, 138), 0], [*range(200, 211), 0], [5, 0]]}
RESPONSES["rejected"] = [[*range(70, 90), 0], [99, 0], [*range(300, 317), 0]]


def stored_pairs(pad_id: int) -> Dataset:
    """The pairs above as tldr_dataset.py stores them."""
    columns = {column: [] for column in reward.PAIR_COLUMNS}
    for side, responses in RESPONSES.items():
        for query, response in zip(QUERIES, responses, strict=True):
            padding = [pad_id] * (62 - len(query + response))
            columns[f"query_{side}_token"].append(query + response + padding)
            columns[f"query_{side}_token_response_label"].append([pad_id] * len(query) + response + padding)
    return Dataset.from_dict(columns).with_format("torch")


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt2", "llama", "opt"])
@pytest.mark.parametrize("module", PAIRS, ids=lambda module: module.__name__)
def test_a_pair_in_one_row_has_the_numbers_of_two_rows(models, name, module):
    """Sliding windows of 20, and GPT-2's 64 positions, fewer than a padded pair takes (82) but not than a response
    with its query does."""
    tokenizer = sft.load_tokenizer(models[name])
    pad_id = tokenizer.pad_token_id
    is_reward = hasattr(module, "new_reward_model")
    if is_reward:
        model = module.new_reward_model(models[name], tokenizer).eval()
    else:
        model = module.load_policy(models[name], tokenizer).eval()
    with torch.no_grad():
        pairs = module.pair_rows(stored_pairs(pad_id)[:], pad_id)
        found = (module.pair_rewards if is_reward else module.pair_logprobs)(model, pairs)
        for side, numbers in zip(RESPONSES, found, strict=False):
            for query, response, number in zip(QUERIES, RESPONSES[side], numbers, strict=True):
                row = torch.tensor([query + response])
                if is_reward:
                    expected = model.model.score(model.model.base_model(row).last_hidden_state)[0, -1, 0]
                else:
                    logprobs = model(row).logits[0].double().log_softmax(1)  # [PAD] is banned by the head
                    expected = sum(logprobs[len(query) + i - 1, token] for i, token in enumerate(response))
                assert close(number, expected, 1e-4)
        module.check_pairs(model.model if is_reward else model, "here", 64, pad_id)


@pytest.mark.parametrize("ignored", ["attention_mask", "position_ids"])
def test_a_model_that_ignores_the_mask_or_the_positions_is_refused(models, monkeypatch, ignored):
    tokenizer = sft.load_tokenizer(models["llama"])
    model = reward.new_reward_model(models["llama"], tokenizer).model.eval()
    forward = model.base_model.forward

    def without(*args, **inputs):
        inputs.pop(ignored, None)
        return forward(*args, **inputs)

    monkeypatch.setattr(model.base_model, "forward", without)
    with pytest.raises(SystemExit, match="^error: here: .* its states differ by"):
        reward.check_pairs(model, "here", 64, tokenizer.pad_token_id)


def test_a_row_longer_than_the_models_positions_is_refused_before_the_run_folder(world, models, tmp_path):
    """GPT-2 of 64 positions, and posts of more; ppo.py counts what is sampled, too."""
    reward_model = make_reward_model(models["gpt2"], tmp_path / "reward")
    common = {"dataset": str(world.dataset), "output_dir": str(tmp_path / "run"), "batch_size": 8, "total_episodes": 8}
    of_ppo = {"sft_model_path": models["gpt2"], "reward_model_path": str(reward_model)}
    for module, paths, needed in ((sft, {"model": models["gpt2"]}, 562), (ppo, of_ppo, 512 + 53)):
        with pytest.raises(SystemExit, match=rf"^error: .* GPT2\w+ has 64 positions, but rows need {needed}\."):
            module.main(module.Args(**common, **paths))
        assert not (tmp_path / "run").exists()


def test_rows_that_just_fit_the_models_positions_are_taken(models):
    model = sft.load_policy(models["gpt2"], sft.load_tokenizer(models["gpt2"]), 64)
    with pytest.raises(SystemExit, match="^error: here: GPT2LMHeadModel has 64 positions, but rows need 65"):
        sft.check_model(model, "here", 65, [])


# ---- tokenizers -------------------------------------------------------------------------------------------------


POST = {"id": "1", "subreddit": "x", "title": "t", "post": "p", "summary": "my dog"}


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that puts a space before every text, as Llama 2's does."""
    made = Tokenizer(BPE(unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special)
    made.train_from_iterator(["SUBREDDIT: r/x\n\nTITLE: t\n\nPOST: p\n\nTL;DR: my dog ran"] * 9, trainer)
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, **tokens)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    return tokenizer


def test_a_responses_tokens_are_those_behind_its_query():
    metaspace = metaspace_tokenizer()
    row = tldr_dataset.process_sft_row(tldr_dataset.post_fields(POST), metaspace, tldr_dataset.Args())
    lengths = [row[f"{name}_token_len"] for name in ("query", "reference_response", "query_reference_response")]
    query = row["query_token"][-lengths[0] :]
    response = row["reference_response_token"][: lengths[1]]
    assert query + response == row["query_reference_response_token"][: lengths[2]]
    assert response == metaspace.convert_tokens_to_ids(["▁my", "▁dog", "</s>"])
    alone = tldr_dataset.encode(metaspace, " my dog")
    assert alone != response[:-1]  # this tokenizer's answer for the response by itself has one space more
    widths = {key: len(value) for key, value in row.items() if key.endswith("_token")}
    assert check_data.find_damage(row, metaspace, widths) == {"damage": ""}
    wrong = row | {"reference_response_token": [*response[1:], *[metaspace.pad_token_id] * (54 - lengths[1])]}
    assert "reference_response_token" in check_data.find_damage(wrong, metaspace, widths)["damage"]


def test_a_bos_that_the_tokenizer_adds_is_left_out(world):
    tokenizer = AutoTokenizer.from_pretrained(world.tokenizer)
    tokenizer.add_special_tokens({"bos_token": "<|bos|>", "pad_token": "[PAD]"})
    template = TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = template
    assert tokenizer("my dog").input_ids[0] == tokenizer.bos_token_id
    row = tldr_dataset.process_sft_row(tldr_dataset.post_fields(POST), tokenizer, tldr_dataset.Args())
    assert all(tokenizer.bos_token_id not in row[key] for key in row if key.endswith("_token"))
