"""The paper's details 1 to 7 and 9 to 20, against numbers that are computed here independently. What an optimiser step
does, and so all of the details 13 and 21 to 25, is tested in test_gradients.py.

The reference computations run plain transformers models on unpadded or right-padded rows, without masks or position
ids: under causal attention no token sees what lies to its right. `tests/undo_details.py` undoes every detail in a copy
of the scripts and checks that its test fails.
"""

import hashlib
import math
import struct
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import judge
import numpy
import pandas
import pytest
import rm_report
import torch
from conftest import (
    close,
    edit_config,
    head_of,
    make_talker,
    read_csv,
    read_jsonl,
    record,
    sample_by_hand,
    single_process,
    without_pad,
    write_jsonl,
)
from datasets import Dataset, load_from_disk
from test_tldr_dataset import naive_truncation, pair
from test_tldr_dataset import sentence as words
from test_tldr_dataset import sft_row as post
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
from undo_details import PATCHES, ROOT, read_patches

import dpo
import ppo
import reward
import sft
import tldr_dataset

EOS = "<|endoftext|>"
BATCH = 12  # rows per update of the runs below: 64 rows are five updates and four rows left over
MICRO_BATCH = 5  # which divides none of the batches
LEARNING_RATE = 3e-4
SEED = 7


# ---- helpers -----------------------------------------------------------------------------------------


def padded_tokenizer(folder: Path):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    return tokenizer


def right_padded(rows: list[list[int]]) -> torch.Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def plain_rewards(folder: Path, rows: list[list[int]]) -> torch.Tensor:
    """The rewards (b,) of unpadded rows by the reward model of a checkpoint folder, by plain transformers."""
    weight, bias = head_of(folder)
    with torch.no_grad():
        rewards = AutoModel.from_pretrained(folder).eval()(right_padded(rows)).last_hidden_state @ weight[0] + bias
    return torch.stack([rewards[i, len(row) - 1] for i, row in enumerate(rows)])


def trained_reward(stage, folder: Path):
    """A reward model of a checkpoint folder, with the forward pass of a stage."""
    return stage.RewardModel(ppo.load_reward_model(str(folder), padded_tokenizer(folder)).model).eval()


# ---- fixtures: hand-made data --------------------------------------------------------------------------


def without_figures(args):
    """tldr_dataset.py without drawing, which takes most of its time on few rows."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: None)
        monkeypatch.setattr("matplotlib.axes.Axes.hist", lambda *_, **__: None)
        tldr_dataset.main(args)


LONG_POSTS = [
    words(1, 500),
    words(2, 120) + "\n" + words(3, 400) + "\n\n" + words(4, 900),
    "\n" + words(5, 2000),
]


@pytest.fixture(scope="module")
def hand_made(world, tmp_path_factory) -> SimpleNamespace:
    """A few raw rows, written and tokenised; the tokenizer pads with EOS, as many do."""
    root = tmp_path_factory.mktemp("hand_made")
    tokenizer = AutoTokenizer.from_pretrained(world.tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(root / "tokenizer")
    posts = [
        post(10),
        *(post(20 + i, post=text) for i, text in enumerate(LONG_POSTS)),
        post(30, summary=" a cat sat"),
    ]
    tldr = [pair(40), pair(41, extra={"confidence": 8}), pair(42, extra={"confidence": None})]
    validation = [pair(50, split="valid1", extra={"confidence": 3}), pair(51, batch="batch9", extra={"confidence": 1})]
    batches = ("cnndm0", "batch0_cnndm", "cnndm2")
    news = [pair(60 + i, article=words(60 + i, 40), batch=batch) for i, batch in enumerate(batches)]
    news.append(pair(63, article="\n".join(words(70 + i, 10) for i in range(300)), batch="cnndm2"))
    write_jsonl(root / "posts/train.jsonl", posts)
    write_jsonl(root / "comparisons/train.jsonl", tldr)
    write_jsonl(root / "comparisons/validation.jsonl", [news[0], validation[0], *news[1:], validation[1]])
    arguments = {"sft_dataset": str(root / "posts"), "preference_dataset": str(root / "comparisons")}
    arguments |= {"tokenizer": str(root / "tokenizer"), "output_dir": str(root / "out")}
    without_figures(tldr_dataset.Args(**arguments))
    return SimpleNamespace(
        root=root,
        arguments=arguments,
        posts=posts,
        pairs={"train": tldr, "validation": validation, "validation_cnndm": news},
        sft=load_from_disk(str(root / "out/sft")),
        preference=load_from_disk(str(root / "out/preference")),
        tokenizer=padded_tokenizer(root / "tokenizer"),
    )


# ---- fixtures: one small run of each stage -----------------------------------------------------------------


@pytest.fixture(scope="module")
def short(world, tmp_path_factory) -> SimpleNamespace:
    """.model .dataset .preference_dataset: the world with queries of 64 tokens at most."""
    root = tmp_path_factory.mktemp("short")
    arguments = {"sft_dataset": str(world.raw / "posts"), "preference_dataset": str(world.raw / "comparisons")}
    arguments |= {"tokenizer": str(world.tokenizer), "output_dir": str(root / "out")}
    with mock.patch.object(tldr_dataset, "MAX_QUERY_LENGTH_CNNDM", 64):
        without_figures(tldr_dataset.Args(**arguments, max_query_length=64))
    return SimpleNamespace(model=world.model, dataset=root / "out/sft", preference_dataset=root / "out/preference")


PAIRS = {"model": "nano", "seed": SEED, "run_eval": True, "batch_size": BATCH, "micro_batch_size": MICRO_BATCH}
PAIRS["learning_rate"] = LEARNING_RATE


@pytest.fixture(scope="module")
def reward_run(short, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reward") / "run"
    paths = {"sft_model_path": str(short.model), "dataset": str(short.dataset), "output_dir": str(folder)}
    reward.main(reward.Args(**PAIRS, **paths, preference_dataset=str(short.preference_dataset)))
    return folder


def run_dpo(short, folder: Path, **changes) -> list[dict]:
    """The metrics of a run of dpo.py."""
    paths = {"sft_model_path": str(short.model), "preference_dataset": str(short.preference_dataset)}
    dpo.main(dpo.Args(**PAIRS | paths | changes, output_dir=str(folder)))
    return read_jsonl(folder / "metrics.jsonl")


@pytest.fixture(scope="module")
def dpo_run(short, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dpo") / "run"
    run_dpo(short, folder)
    return folder


PPO_BATCH, PPO_UPDATES, RESPONSE_LENGTH = 24, 3, 12  # 72 episodes: one pass over 64 queries, and 8 of the next


@pytest.fixture(scope="module")
def talker(world, tmp_path_factory) -> Path:
    """A random policy that is far from uniform and ends about one response in ten tokens with EOS."""
    return make_talker(world, tmp_path_factory.mktemp("talker") / "model", eos=0.1)


def run_ppo(short, talker, reward_run, folder: Path, **changes) -> SimpleNamespace:
    """A run of ppo.py: .metrics, .evaluations (their calls of `sample`), and .episodes: the queries, keys and responses
    of each update."""
    arguments = {"model": "nano", "sft_model_path": str(talker), "reward_model_path": str(reward_run)}
    arguments |= {"dataset": str(short.dataset), "output_dir": str(folder), "seed": SEED, "batch_size": PPO_BATCH}
    arguments |= {"response_length": RESPONSE_LENGTH, "micro_batch_size": MICRO_BATCH, "sample_every": 0}
    arguments |= {"total_episodes": PPO_BATCH * PPO_UPDATES, "learning_rate": LEARNING_RATE, "eval_rows": 5}
    tokenizer = padded_tokenizer(talker)
    with pytest.MonkeyPatch.context() as monkeypatch:
        samples = record(monkeypatch, ppo, "sample")
        ppo.main(ppo.Args(**arguments | changes))
    episodes = []
    for call in [call for call in samples if call.args[6] == 0.7]:
        queries, responses = (without_pad(x, tokenizer.pad_token_id) for x in (call.args[2], call.result[0]))
        episodes.append(SimpleNamespace(queries=queries, responses=responses, keys=call.args[3]))
    return SimpleNamespace(
        folder=folder,
        tokenizer=tokenizer,
        episodes=episodes,
        evaluations=[call for call in samples if call.args[6] != 0.7],
        metrics=read_jsonl(folder / "metrics.jsonl"),
    )


@pytest.fixture(scope="module")
def ppo_run(short, talker, reward_run, tmp_path_factory) -> SimpleNamespace:
    return run_ppo(short, talker, reward_run, tmp_path_factory.mktemp("ppo") / "run", eval_every=PPO_UPDATES)


# ---- Details 1 to 6: data -------------------------------------------------------------------------------


def test_detail_01_columns_and_splits(hand_made):
    for stored, raw in zip(hand_made.sft["train"], hand_made.posts, strict=True):
        assert {column: stored[column] for column in ("id", "subreddit", "title", "post", "summary")} == raw
    assert list(hand_made.preference) == ["train", "validation", "validation_cnndm"]
    for split, pairs in hand_made.pairs.items():
        for stored, raw in zip(hand_made.preference[split], pairs, strict=True):
            for column in ("info", "summaries", "batch", "split", "choice", "extra"):
                assert stored[column] == raw[column]
            chosen, rejected = raw["summaries"][raw["choice"]], raw["summaries"][1 - raw["choice"]]
            assert (stored["chosen_policy"], stored["rejected_policy"]) == (chosen["policy"], rejected["policy"])
            assert stored["chosen"] == chosen["text"] + EOS and stored["rejected"] == rejected["text"] + EOS
    assert [row["extra"]["confidence"] for row in hand_made.preference["train"]] == [5, 8, None]
    assert set(hand_made.preference["validation_cnndm"]["batch"]) == {"batch0_cnndm", "cnndm0", "cnndm2"}
    # the batch alone is enough: such a row is never taken for a TL;DR pair
    with pytest.raises(ValueError, match="article"):
        tldr_dataset.pair_fields(pair(1, batch="cnndm2"))


def test_detail_02_template_and_truncation(hand_made):
    tokenizer = hand_made.tokenizer
    prefix = "SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: "
    for stored, raw in zip(hand_made.sft["train"], hand_made.posts, strict=True):
        query = naive_truncation(prefix.format(**raw), raw["post"], "\n\nTL;DR:", tokenizer, 512)
        assert stored["query"] == query
        tokens = tokenizer.encode(query, add_special_tokens=False)
        assert len(tokens) <= 512 and stored["query_token"][-len(tokens) :] == tokens
    for stored, raw in zip(hand_made.preference["validation_cnndm"], hand_made.pairs["validation_cnndm"], strict=True):
        query = naive_truncation("Article:\n", raw["info"]["article"], "\n\nTL;DR:\n", tokenizer, 1919)
        assert stored["query"] == query and stored["query_token_len"] <= 1919


def test_detail_03_space_eos_and_pad(hand_made):
    """Of pairs: test_properties.py. That the loss counts EOS and no padding: test_gradients.py::test_sft."""
    tokenizer = hand_made.tokenizer
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    assert pad != eos and pad == len(tokenizer) - 1
    for row, raw in zip(hand_made.sft["train"], hand_made.posts, strict=True):
        expected = tokenizer.encode(" " + raw["summary"].removeprefix(" "), add_special_tokens=False) + [eos]
        assert row["reference_response"] == " " + raw["summary"].removeprefix(" ") + EOS
        response = row["reference_response_token"]
        assert response == expected + [pad] * (len(response) - len(expected))
        label = [token for token in row["query_reference_response_token_response_label"] if token != pad]
        assert label == expected  # EOS is a target
    for stage in (sft, reward, ppo, dpo):
        own = stage.load_tokenizer(str(hand_made.root / "tokenizer"))
        assert (own.pad_token, own.pad_token_id, own.eos_token_id) == ("[PAD]", pad, eos)


def test_detail_04_length_limits(hand_made):
    """The other limits: the widths of Detail 5. The lengths that are reported: test_tldr_dataset.py::test_whole_run."""
    posts = [post(1, summary=" a" * 52), post(2, summary=" a" * 53)]  # 53 and 54 tokens with EOS
    write_jsonl(hand_made.root / "long/train.jsonl", posts)
    changes = {"sft_dataset": str(hand_made.root / "long"), "output_dir": str(hand_made.root / "refused")}
    with pytest.raises(SystemExit, match="row 2: reference_response has 54 tokens .* --max-sft-response-length by 1"):
        tldr_dataset.main(tldr_dataset.Args(**hand_made.arguments | changes))


def test_detail_05_shapes_and_padding_sides(world):
    pad = padded_tokenizer(world.model).pad_token_id
    tldr, news = (512, 169, 638), (1919, 155, 2021)
    widths = {"sft": dict.fromkeys(("train", "validation", "test"), (512, 53, 562))}
    widths["preference"] = {"train": tldr, "validation": tldr, "validation_cnndm": news}
    for name, split_widths in widths.items():
        data = load_from_disk(str(world.dataset.parent / name))
        assert set(data) == set(split_widths)
        for split, (query, response, both) in split_widths.items():
            expected = {"query_token": query}
            for column in ("reference_response",) if name == "sft" else ("chosen", "rejected"):
                expected |= {f"{column}_token": response, f"query_{column}_token": both}
                expected[f"query_{column}_token_response_label"] = both
            for column, width in expected.items():
                rows = torch.tensor(data[split][column][:])
                assert rows.shape == (len(data[split]), width), (split, column)
                real = (rows != pad).int()
                if column == "query_token":
                    assert (real.diff(dim=1) >= 0).all() and real[:, -1].all()  # left-padded
                elif not column.endswith("label"):
                    assert (real.diff(dim=1) <= 0).all() and real[:, 0].all()  # right-padded


def test_detail_06_policy_pairs(world):
    expected, groups = defaultdict(Counter), Counter()
    for file in ("train", "validation"):
        for row in read_jsonl(world.raw / "comparisons" / f"{file}.jsonl"):
            split = "validation_cnndm" if row["batch"] in ("batch0_cnndm", "cnndm0", "cnndm2") else file
            expected[split][", ".join(sorted(s["policy"] or "null" for s in row["summaries"]))] += 1
            values = {"batch": row["batch"], "split": row["split"], "extra.confidence": row["extra"]["confidence"]}
            for column, value in values.items():
                groups[split, column, "null" if value is None else str(value)] += 1
    folder = world.dataset.parent / "statistics"
    table = read_csv(folder / "groups.csv")
    found = [((row["split"], row["column"], row["value"]), int(row["pairs"])) for row in table]
    assert dict(found) == groups and len(found) == len(groups)
    unique = {row["split"]: int(row["unique pairs"]) for row in read_csv(folder / "policy_pairs.csv")}
    assert unique == {split: len(counts) for split, counts in expected.items()}
    for split, counts in expected.items():
        found = [(row["policies"], int(row["count"])) for row in read_csv(folder / f"policy_pairs_{split}.csv")]
        assert dict(found) == counts and len(found) == len(counts)
        assert [count for _, count in found] == sorted(counts.values(), reverse=True)


# ---- Detail 7: every stage's models ------------------------------------------------------------------------


def test_detail_07_no_dropout(world, tmp_path):
    """As models are loaded. The models that test_gradients.py trains have dropout in their configs, too."""
    tokenizer = padded_tokenizer(world.model)
    tokens = torch.randint(0, len(tokenizer) - 1, (2, 40), generator=torch.Generator().manual_seed(0))
    folder, trained = tmp_path / "model", tmp_path / "reward"
    AutoModelForCausalLM.from_pretrained(world.model).save_pretrained(folder)
    edit_config(folder, attention_dropout=0.1, hidden_dropout=0.1)
    plain = AutoModelForCausalLM.from_pretrained(folder).train()
    assert not torch.equal(plain(tokens).logits, plain(tokens).logits)  # there is something to switch off
    for stage in (sft, dpo, ppo):
        policy = stage.load_policy(str(folder), tokenizer)
        assert torch.equal(policy(tokens).logits, policy(tokens).logits), stage
    new = reward.new_reward_model(str(folder), tokenizer)
    reward.new_reward_model(str(folder), tokenizer).to_transformers().save_pretrained(trained)
    for model in (new, ppo.load_reward_model(str(trained), tokenizer)):
        assert torch.equal(model(tokens), model(tokens))


# ---- Details 9 to 16: SFT and reward model -----------------------------------------------------------------


def test_tables_3_4_6_and_7():
    """What these settings do in a run: test_gradients.py."""
    for stage, batch_size in ((sft, 128), (reward, 64), (dpo, 64)):
        args = stage.Args()
        assert (args.learning_rate, args.batch_size, args.num_train_epochs) == (3e-6, batch_size, 1), stage
    assert dpo.Args().beta == 0.05
    args = vars(ppo.Args())
    table_7 = {"total_episodes": 1_000_000, "batch_size": 512, "num_mini_batches": 1, "num_ppo_epochs": 4}
    table_7 |= {"kl_coef": 0.05, "gamma": 1.0, "lam": 0.95, "cliprange": 0.2, "cliprange_value": 0.2, "vf_coef": 0.1}
    table_7 |= {"temperature": 0.7, "learning_rate": 3e-6, "response_length": 53}
    table_7 |= {"penalty_reward_value": -1.0, "whiten_rewards": False}
    assert {key: args[key] for key in table_7} == table_7


def test_detail_11_reward_model_start(world, tmp_path, monkeypatch):
    """That its backbone is the SFT model's: test_gradients.py::test_reward."""
    tokenizer = padded_tokenizer(world.model)
    assert reward.new_reward_model(str(world.model), tokenizer).bias.item() == 0

    # 4,000 weights of heads for d = 4: 1 / sqrt(5) and 1 / sqrt(4) are ten standard errors apart
    config = AutoConfig.from_pretrained(world.model)
    config.hidden_size, config.num_attention_heads, config.intermediate_size, config.num_hidden_layers = 4, 1, 4, 1
    config.rotary_pct = config.rope_parameters["partial_rotary_factor"] = 0.5
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "tiny")
    kind = reward.AutoModelForSequenceClassification
    loaded = kind.from_pretrained(tmp_path / "tiny", num_labels=1, output_loading_info=True)
    monkeypatch.setattr(kind, "from_pretrained", lambda *_, **__: loaded)
    torch.manual_seed(0)
    heads = []
    for _ in range(1000):
        heads.append(reward.new_reward_model(str(tmp_path / "tiny"), tokenizer).model.score.weight.detach().clone())
        loaded[0].score = torch.nn.Linear(4, 1, bias=False)
    heads = torch.cat(heads).flatten().double()
    assert abs(heads.std().item() * math.sqrt(5) - 1) < 0.04 and abs(heads.mean()) < 0.03
    assert abs((heads * math.sqrt(5)).pow(4).mean().item() - 3) < 0.4  # normal: uniform weights would have 1.8


def test_detail_12_reward_at_the_last_token(world, reward_run):
    """Before the first pad: what lies behind it does not count."""
    p = padded_tokenizer(world.model).pad_token_id
    rows = [[5, 6, 7, 8, 0, p, p, p], [5, 6, 7, 8, 9, 10, 11, 12], [5, 6, 7, p, 8, 9, p, p], [0, p, p, p, p, p, p, p]]
    own = trained_reward(reward, reward_run / "model")
    expected = plain_rewards(reward_run / "model", [rows[0][:5], rows[1], rows[2][:3], rows[3][:1]])
    assert close(reward.response_rewards(own, torch.tensor(rows), p).detach(), expected)


def test_detail_14_padding_does_not_change_a_reward(world, reward_run):
    """Architectures with absolute positions: test_helpers.py::test_policy_and_value_equal_plain_rows."""
    pad, folder = padded_tokenizer(world.model).pad_token_id, reward_run / "model"
    queries, responses = [[5, 6, 7, 8, 9], [10, 11, 12]], [[13, 14, 0], [15, 16, 17, 18, 0]]
    rows = [q + r for q, r in zip(queries, responses, strict=True)]
    model, scorer = trained_reward(reward, folder), trained_reward(ppo, folder)
    with torch.no_grad():
        expected = plain_rewards(folder, rows)
        whole = torch.tensor([row + [pad] * (20 - len(row)) for row in rows])
        assert (reward.response_rewards(model, whole, pad) - expected).abs().max() < 1e-5
        for width, length in ((5, 5), (30, 12)):
            left = torch.tensor([[pad] * (width - len(q)) + q for q in queries])
            right = torch.tensor([r + [pad] * (length - len(r)) for r in responses])
            batch = ppo.make_batch(left, right, pad)
            found = ppo.reward_scores(single_process(), scorer, batch, ppo.Args(micro_batch_size=1))
            assert (found - expected).abs().max() < 1e-5, width


def test_detail_15_rewards_are_centred(short, reward_run):
    data, column = load_from_disk(str(short.dataset))["train"], "query_reference_response_token"
    rows = [row[column][: row[f"{column}_len"]] for row in data]
    centred = plain_rewards(reward_run / "model", rows).double()
    assert abs(centred.mean()) < 1e-6
    before = centred - head_of(reward_run / "model")[1]
    assert abs(before.mean()) > 0.01  # there was something to centre
    table = read_csv(reward_run / "eval/reference_rewards.csv")
    reported = {row["statistic"]: float(row["value"]) for row in table}
    expected = {"max": before.max(), "mean": before.mean(), "min": before.min(), "std": before.std()}
    assert all(close(reported[key], value) for key, value in expected.items())


def test_detail_16_a_tie_is_no_hit():
    """The tolerance follows the sums that are compared: of sums of 200 nats, 1.5e-4 is rounding in float32."""
    scores = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0]), torch.tensor([1.0, 1.0 - 1.5e-6, 1.0 - 1e-5, 1.0 + 1e-5, 0.0])
    assert reward.is_tie(*scores, torch.tensor(2.0), "no").tolist() == [True, True, False, False, False]
    assert dpo.is_tie(*scores, torch.tensor(200.0), "no").tolist() == [True, True, True, True, False]
    assert reward.is_tie(*scores, torch.tensor(2.0), "bf16").tolist() == [True, True, True, True, False]
    extra = [{"confidence": value} for value in (3, None, 3)]
    data, tie = Dataset.from_dict({"batch": [None, "b", "b"], "extra": extra}), torch.tensor([False, True, False])
    table = reward.pair_table(data, torch.tensor([[2.0, 1.0], [2.0, 1.0], [1.0, 2.0]]), tie)
    assert table["hit"].tolist() == [True, False, False]
    found = {(row["group"], row["value"]): row["accuracy"] for row in reward.accuracy_table("d", table)}
    batches, confidences = {("batch", "b"): 0.0, ("batch", "null"): 1.0}, {("confidence", 3): 0.5}
    assert found == {("overall", "all"): 1 / 3, ("confidence", "null"): 0.0} | batches | confidences


def test_detail_16_accuracy_by_group(short, reward_run):
    data, sides, expected = load_from_disk(str(short.preference_dataset)), ("chosen", "rejected"), defaultdict(list)
    for split in ("validation", "validation_cnndm"):
        pairs = read_csv(reward_run / "eval" / f"pairs_{split}.csv")
        columns = [
            [row[f"query_{side}_token"][: row[f"query_{side}_token_len"]] for row in data[split]] for side in sides
        ]
        rewards = torch.stack([plain_rewards(reward_run / "model", rows) for rows in columns], 1)
        assert close([[float(found[f"{side}_reward"]) for side in sides] for found in pairs], rewards)
        if split == "validation":
            loss = sum(math.log1p(math.exp(rejected - chosen)) for chosen, rejected in rewards.tolist()) / len(rewards)
            assert close(read_jsonl(reward_run / "metrics.jsonl")[-1]["eval/loss"], loss)
        for row, found in zip(data[split], rewards, strict=True):
            first, second = sorted((row["chosen_policy"], row["rejected_policy"]))
            groups = {"overall": "all", "batch": row["batch"], "split": row["split"]}
            groups |= {"policies": f"{first}--{second}", "confidence": str(row["extra"]["confidence"])}
            for group in groups.items():
                expected[split, *group].append((found[0] > found[1]).item())
    table = read_csv(reward_run / "eval/accuracy.csv")
    found = {(row["data"], row["group"], row["value"]): row for row in table}
    assert found.keys() == expected.keys()
    for key, hits in expected.items():
        assert int(found[key]["pairs"]) == len(hits), key
        assert close(float(found[key]["accuracy"]), sum(hits) / len(hits)), key


# ---- Details 17 and 18: the reward model beside a judge, calibration -------------------------------------------


def test_detail_17_agreement_with_a_judge():
    """Which summary is A: test_judge.py. Files of pairs and of answers: test_rm_report.py."""
    assert judge.PROMPT.format(post="P", a="1", b="2").startswith(
        "Which of the following summaries does a better job of summarizing the most important points in the given "
        "forum post, without including unimportant or irrelevant details? Judge based on accuracy, coverage, and "
        "coherence.\n\nPost:\nP\n\nSummary A:\n1\n\nSummary B:\n2\n\nFIRST provide a one-sentence comparison"
    )
    judged = pandas.DataFrame({"id": [0, 1, 2, 3, 4], "win": ["1.0", "0.5", "", "0.0", "1.0"]})
    rewards = pandas.DataFrame({"chosen_reward": [1.0, 1, 1, 1, 1], "rejected_reward": 0.0})
    # a tie of the judge and a missing answer are left out, and a tie of the reward model is no hit
    assert rm_report.judge_agreement({1: rewards.assign(tie=False)}, judged) == {1: (3, 2 / 3)}
    assert rm_report.judge_agreement({1: rewards.assign(tie=rewards.index == 4)}, judged) == {1: (3, 1 / 3)}


def test_detail_18_calibration():
    """Accuracy by score difference, in bins of as many pairs, beside 1 / (1 + e^-difference), and the mean distance of
    the two. The files of a run: test_rm_report.py::test_the_tables."""
    # three pairs at a chance of 3/4, two hits; one pair at 1/2, a tie, which is no hit
    log3 = math.log(3)
    rows, error = rm_report.calibration(numpy.array([log3, -log3, log3, 0.0]), 2)
    assert [row["pairs"] for row in rows] == [2, 2] and [row["accuracy"] for row in rows] == [0.5, 0.5]
    assert close(error, (abs(0.5 - 0.625) * 2 + abs(0.5 - 0.75) * 2) / 4)


# ---- Detail 19: DPO ----------------------------------------------------------------------------------------


def summed_logprobs(model, rows: list[dict], side: str, pad: int) -> torch.Tensor:
    """Log-probability (b,) of each stored response, at temperature 1 over the ids of the tokenizer but [PAD]."""
    tokens = [row[f"query_{side}_token"][: row[f"query_{side}_token_len"]] for row in rows]
    logits, found = model(right_padded(tokens)).logits, []
    logprobs = logits[:, :, :pad].log_softmax(2)  # [PAD] is the last one
    for i, row in enumerate(rows):
        places = [t for t, token in enumerate(row[f"query_{side}_token_response_label"]) if token != pad]
        found.append(sum(logprobs[i, t - 1, tokens[i][t]] for t in places))
    return torch.stack(found)


def test_detail_19_implicit_rewards(short, dpo_run):
    """The implicit rewards and their accuracy on the reward model's evaluation splits. The training, in the reward
    model's order of the data: test_gradients.py::test_dpo."""
    data, pad = load_from_disk(str(short.preference_dataset)), padded_tokenizer(short.model).pad_token_id
    reference, saved = (AutoModelForCausalLM.from_pretrained(x) for x in (short.model, dpo_run / "model"))

    table = {(row["data"], row["group"]): row for row in read_csv(dpo_run / "eval/accuracy.csv")}
    for split in ("validation", "validation_cnndm"):
        rows = list(data[split])
        with torch.no_grad():
            expected = [
                0.05 * (summed_logprobs(saved, rows, side, pad) - summed_logprobs(reference, rows, side, pad))
                for side in ("chosen", "rejected")
            ]
        pairs = read_csv(dpo_run / "eval" / f"pairs_{split}.csv")
        for side, own in zip(("chosen", "rejected"), expected, strict=True):
            assert close([float(row[f"{side}_reward"]) for row in pairs], own, 1e-4)
        accuracy = (expected[0] > expected[1]).float().mean()
        assert close(float(table[split, "overall"]["accuracy"]), accuracy)


@pytest.mark.parametrize(("shift", "accuracy"), [(1e-4, 0.0), (1e-2, 1.0)])
def test_detail_19_a_difference_of_rounding_is_no_hit(short, tmp_path, monkeypatch, shift, accuracy):
    """Before the first step both rewards are 0 but for rounding. Of sums of some hundred nats, 1e-4 counts as that."""
    original = dpo.split_logprobs
    monkeypatch.setattr(dpo, "split_logprobs", lambda *args: original(*args) - torch.tensor([shift, 0.0]))
    line = run_dpo(short, tmp_path / "run", run_eval=False, total_episodes=BATCH)[1]
    assert line["accuracy/train"] == accuracy
    assert close(line["rewards/margin"], 0.05 * shift, 2e-6)


# ---- Details 20 to 25: PPO ---------------------------------------------------------------------------------


def test_detail_20_sampling_has_noise_of_its_own_for_every_seed_update_and_episode(ppo_run):
    """What is drawn with the noise: the next test, and test_sampling.py::test_the_tokens_are_those_of_generate."""
    for update, episode in enumerate(ppo_run.episodes, 1):
        for i, keys in enumerate(episode.keys.tolist()):
            text = f"{SEED} {update} {(update - 1) * PPO_BATCH + i}"
            expected = hashlib.shake_128(text.encode()).digest(8 * RESPONSE_LENGTH)
            assert b"".join(struct.pack("<II", *pair) for pair in keys) == expected


def test_detail_20_validation_score_on_a_fixed_batch(short, reward_run, ppo_run):
    """Here after the last update, sampled at temperature 0.01."""
    [call], tokenizer = ppo_run.evaluations, ppo_run.tokenizer
    assert call.args[6] == 0.01
    validation = load_from_disk(str(short.dataset))["validation"]
    queries = [row["query_token"][-row["query_token_len"] :] for row in validation.select(range(5))]
    assert without_pad(call.args[2], tokenizer.pad_token_id) == queries
    policy = AutoModelForCausalLM.from_pretrained(ppo_run.folder / "model").eval()
    responses = without_pad(call.result[0], tokenizer.pad_token_id)
    for i, (query, response) in enumerate(zip(queries, responses, strict=True)):
        assert sample_by_hand(policy, query, tokenizer, call.args[3][i], RESPONSE_LENGTH, 0.01) == response
    scores = plain_rewards(reward_run / "model", [q + r for q, r in zip(queries, responses, strict=True)])
    assert close(ppo_run.metrics[-1]["eval/score_without_penalty"], scores.mean())
    assert all(response[-1] == tokenizer.eos_token_id for response in responses)  # without: test_variants.py
    assert close(ppo_run.metrics[-1]["eval/score"], scores.mean())


def test_detail_20_first_ratios_that_are_not_1(short, talker, reward_run, tmp_path, monkeypatch):
    """With wrong old log-probabilities, the alarm shows the largest deviation of a ratio in the first step, here in its
    last micro-batch. It ignores what lies behind a response's end."""
    original = ppo.forward_passes

    def shifted(accelerator, model, ref_policy, batch, mini_batches, args):
        outputs = original(accelerator, model, ref_policy, batch, mini_batches, args)
        for rank, i in enumerate(batch["row_lengths"].argsort(descending=True).tolist()):
            end = batch["lengths"][i]
            outputs["logprobs"][i, end - 1] += 0.01 * rank
            outputs["logprobs"][i, end:] += 2.0
        return outputs

    monkeypatch.setattr(ppo, "forward_passes", shifted)
    changes = {"num_ppo_epochs": 1, "total_episodes": PPO_BATCH}
    [row] = run_ppo(short, talker, reward_run, tmp_path / "run", **changes).metrics
    expected = 1 - math.exp(-0.01 * (PPO_BATCH - 1))
    assert math.isclose(row["policy/first_ratio_deviation"], expected, abs_tol=1e-5)


def test_whitening_of_small_numbers():
    """Details 24 and 25, of a size where epsilon counts. In runs: test_gradients.py::test_ppo."""
    numbers, mask = torch.tensor([[1e-4, -2e-4, 1e-2], [4e-4, 5e-5, 3e-4]]), torch.ones(2, 3, dtype=torch.bool)
    mask[0, 2] = False  # padding
    real = numbers[mask].double()
    expected = (real - real.mean()) / (real.var(correction=0) + 1e-8).sqrt()
    assert close(ppo.whiten(numbers, mask)[mask], expected, 1e-5)
    assert close(ppo.whiten(numbers, mask, shift_mean=False)[mask], expected + real.mean(), 1e-5)


def test_every_patch_of_undo_details_fits():
    for detail, file, what, old, _ in read_patches(PATCHES):
        assert (ROOT / file).read_text().count(old) == 1, f"Detail {detail}, {file}: {what}"
