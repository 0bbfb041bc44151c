"""ensembles/best_of_n.py against exact sums over all subsets, full forward passes and hand-made cases."""

import itertools
import json
import math
import os
import random
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import best_of_n
import nano
import numpy
import pandas
import pytest
import torch
import truth
from conftest import files, make_constant, sample_by_hand
from datasets import load_from_disk
from transformers import AutoModelForCausalLM

import ppo
import reward

R = 9  # tokens sampled at most: enough for some of the samples to end, and not for others
PROMPTS, N = 4, 12
GOLD = f"{Path(truth.__file__)}:score"


@pytest.fixture(scope="module")
def made(world, tmp_path_factory) -> SimpleNamespace:
    """A GPT-2 that ends some responses early and likes ids beyond the tokenizer (its positions are absolute, so a
    cached prompt must not shift them), and three reward models, the first one a GPT-2."""
    root = tmp_path_factory.mktemp("best_of_n")
    tokenizer = reward.load_tokenizer(str(world.tokenizer))
    data = load_from_disk(str(world.dataset))["validation"].with_format("torch")
    nano.main(nano.Args(tokenizer=str(world.tokenizer), architecture="gpt2", output_dir=str(root / "gpt2")))
    model = AutoModelForCausalLM.from_pretrained(root / "gpt2", dtype=torch.float32).eval()
    model.resize_token_embeddings(len(tokenizer) + 5, mean_resizing=False)
    query = data[9]["query_token"]
    with torch.no_grad():  # tied embeddings: the logits grow with them, and EOS is likely after any query
        model.get_input_embeddings().weight *= 6
        for name, parameter in model.named_parameters():  # what was said before the last token matters
            parameter *= 10 if "attn.c" in name else 1
        hidden = model.transformer(query[query != tokenizer.pad_token_id][None]).last_hidden_state[0].mean(0)
        model.get_input_embeddings().weight[tokenizer.eos_token_id] = 5 * hidden / hidden.square().sum()
        model.get_input_embeddings().weight[tokenizer.pad_token_id :] = 50 * hidden / hidden.square().sum()
    model.save_pretrained(root / "policy")
    tokenizer.save_pretrained(root / "policy")
    rewards, generator = [str(root / f"reward_{i}") for i in range(3)], torch.Generator().manual_seed(1)
    for folder, base in zip(rewards, (root / "gpt2", world.model, world.model), strict=True):
        model = reward.new_reward_model(str(base), tokenizer)
        with torch.no_grad():
            for name, parameter in model.model.named_parameters():
                scale = 1.0 if "score" in name else 0.1
                parameter += scale * torch.randn(parameter.shape, generator=generator)
        model.to_transformers().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    args = {"policy": str(root / "policy"), "reward_model_paths": rewards, "gold": GOLD, "prompts": PROMPTS}
    args |= {"dataset": str(world.dataset), "samples": N, "response_length": R, "micro_batch_size": 5, "top_p": 0.8}
    args |= {"standardise_posts": 5}
    return SimpleNamespace(policy=str(root / "policy"), rewards=rewards, tokenizer=tokenizer, data=data, args=args)


@pytest.fixture(scope="module")
def written(made, tmp_path_factory) -> Path:
    """What a run wrote."""
    output = tmp_path_factory.mktemp("written") / "new" / "x"
    best_of_n.main(best_of_n.Args(**made.args, output_dir=str(output)))
    return output


def shards(folder: Path) -> list[dict]:
    return [dict(numpy.load(file)) for file in sorted(folder.glob("samples_*.npz"))]


def query_of(made, i: int, last: int = 0) -> torch.Tensor:
    """The tokens of a prompt without padding, or the last few of them."""
    tokens = made.data[i]["query_token"]
    return tokens[tokens != made.tokenizer.pad_token_id][-last:]


def drawn(made, i: int, count: int, last: int = 0, **changes) -> torch.Tensor:
    """Responses (count, R) to prompt i, by best_of_n.sample_many."""
    model = best_of_n.load_policy(made.policy, made.tokenizer).eval()
    args = best_of_n.Args(**(made.args | {"output_dir": ""} | changes))
    keys, ids = (
        best_of_n.noise_keys(args.seed, i, range(count), args.response_length),
        (made.tokenizer.eos_token_id, made.tokenizer.pad_token_id),
    )
    return best_of_n.sample_many(model, query_of(made, i, last), keys, *ids, args)


# ---- the estimator -----------------------------------------------------------------------------------------------


def over_subsets(objective: list, value: list, n: int) -> Fraction:
    """The mean value of the best sample over all subsets of n samples; ties within a subset share equally."""
    total, count = Fraction(0), 0
    for subset in itertools.combinations(range(len(objective)), n):
        top = max(objective[i] for i in subset)
        best = [Fraction(value[i]) for i in subset if objective[i] == top]
        total, count = total + sum(best) / len(best), count + 1
    return total / count


def test_the_estimator_is_the_mean_over_all_subsets():
    draw = random.Random(1)
    for levels, size in itertools.product((2, 4, 1000), (1, 2, 5, 8)):  # many ties, some, none
        objective = [[draw.randrange(levels) for _ in range(size)] for _ in range(3)]
        values = [[[draw.randrange(-50, 50) for _ in range(size)] for _ in range(3)] for _ in range(2)]
        ns = range(1, size + 1)
        weights = numpy.stack([best_of_n.bon_weights(n, size) for n in ns])
        found = best_of_n.bon_values(numpy.array(objective, float), [numpy.array(v, float) for v in values], weights)
        for value, means in zip(values, found, strict=True):
            exact = [[float(over_subsets(o, v, n)) for n in ns] for o, v in zip(objective, value, strict=True)]
            assert means == pytest.approx(numpy.array(exact), abs=1e-12)


def test_weights_against_exact_binomials_at_the_papers_size():
    size = 12_500
    for n in (1, 2, 100, 6000, size):
        weights, total = best_of_n.bon_weights(n, size), math.comb(size, n)
        assert weights.shape == (size,) and weights.sum() == pytest.approx(1, abs=1e-11)
        for i in [*range(1, size, 997), size - 5000, size - 100, size - 1, size]:
            exact = float(Fraction(math.comb(i - 1, n - 1), total))
            assert weights[i - 1] == pytest.approx(exact, rel=1e-9, abs=1e-300)


SCORES = [  # three prompts, five samples, three members; of the first prompt two samples tie in every objective
    [[1, 2, 0], [3, 3, 3], [3, 3, 3], [6, 0, 4], [-1, 5, 2]],
    [[0, 1, 5], [2, 2, 1], [7, -4, 4], [1, 1, 1], [2, 3, 0]],
    [[1, 0, 0], [0, 1, 0], [0, 0, 1], [4, 4, -3], [2, 2, 8]],
]
SCALES = {"A": (1.0, 2.0), "B": (0.5, 4.0), "C": (-1.0, 0.5)}  # mean and standard deviation of the members
GOLDS = [[5, 1, 3, -2, 0], [1, 4, -3, 2, 2], [0, 1, 2, -1, 7]]


def write_shards(folder: Path):
    """What the sampling of these three prompts leaves."""
    folder.mkdir(parents=True)
    for i, (scores, gold) in enumerate(zip(SCORES, GOLDS, strict=True)):
        arrays = {"scores": numpy.array(scores, "float32"), "gold": numpy.array(gold, "float32")}
        arrays |= {"has_eos": numpy.arange(5) > 0}
        numpy.savez(folder / f"samples_{i:06d}.npz", **arrays)
    settings = {"samples": 5, "prompts": 3, "seed": 1, "gold": "G", "reward_model_paths": list(SCALES)}
    (folder / "args.json").write_text(json.dumps(settings))
    (folder / "scales.json").write_text(json.dumps({x: {"mean": m, "sd": d} for x, (m, d) in SCALES.items()}))


def objective_by_hand(name: str, uwo_lambda, scores: list) -> Fraction:
    scores = [(x - Fraction(mean)) / Fraction(sd) for x, (mean, sd) in zip(scores, SCALES.values(), strict=True)]
    if name.startswith("single_"):
        return Fraction(scores[int(name[7:]) - 1])
    mean = Fraction(sum(scores), len(scores))
    variance = sum((x - mean) ** 2 for x in scores) / len(scores)
    return {"mean": mean, "wco": min(scores), "uwo": mean - Fraction(uwo_lambda) * variance}[name]


def test_the_tables_of_a_hand_made_case(tmp_path):
    folder = tmp_path / "x"
    write_shards(folder)
    best_of_n.main(best_of_n.Args(output_dir=str(folder), estimate=True, uwo_lambda=0.25))
    table = pandas.read_csv(folder / "best_of_n.csv")
    assert list(table.columns) == ["method", "n", "kl", "gold", "proxy"]
    methods, found = ["single_1", "single_2", "single_3", "mean", "wco", "uwo"], {}
    ns = range(1, 6)
    for method in methods:
        for n in ns:
            best = {"gold": [], "proxy": []}
            for scores, gold in zip(SCORES, GOLDS, strict=True):
                objective = [objective_by_hand(method, 0.25, row) for row in scores]
                for column, value in zip(best, (gold, objective), strict=True):
                    best[column].append(over_subsets(objective, value, n))
            found[method, n] = best
    rows = {(row["method"], row["n"]): row for row in table.to_dict("records")}
    assert set(rows) == set(found) | {("single", n) for n in ns} and len(table) == len(rows)
    for key, best in found.items():
        for column, values in best.items():
            assert rows[key][column] == pytest.approx(float(sum(values) / 3), abs=1e-12), (key, column)
        assert rows[key]["kl"] == pytest.approx(math.log(key[1]) - 1 + 1 / key[1])
    for n in ns:  # the mean over the members
        for column in ("gold", "proxy"):
            single = sum(sum(found[method, n][column]) / 3 for method in methods[:3]) / 3
            assert rows["single", n][column] == pytest.approx(float(single), abs=1e-12)
    (folder / "samples_000001.npz").unlink()  # tables of the prompts that there are, with a penalty of 0
    best_of_n.main(best_of_n.Args(output_dir=str(folder), estimate=True, uwo_lambda=0.0))
    table = pandas.read_csv(folder / "best_of_n.csv").set_index("method")
    assert (table.loc["mean"].to_numpy() == table.loc["uwo"].to_numpy()).all()
    golds = [float(found["mean", 5]["gold"][i]) for i in (0, 2)]
    assert table.loc["mean"]["gold"].iloc[-1] == pytest.approx(sum(golds) / 2)


# ---- sampling ----------------------------------------------------------------------------------------------------


def test_top_p_by_hand():
    for probs, top_p, kept in (
        ([0.05, 0.5, 0.15, 0.3], 0.9, [1, 2, 3]),  # 0.8 is not enough
        ([0.125, 0.5, 0.125, 0.25], 0.75, [1, 3]),  # exactly enough
        ([0.25] * 4, 0.5, [0, 1]),  # the first of equals
    ):
        found = best_of_n.nucleus(torch.tensor([probs]).log(), top_p)[0]
        assert found.isfinite().nonzero().flatten().tolist() == kept


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 0.8), (1.4, 1.0)])
@torch.no_grad()
def test_samples_are_those_of_full_forward_passes(made, temperature, top_p):
    settings = {"temperature": temperature, "top_p": top_p, "seed": 5, "micro_batch_size": 7}
    # a short prompt, so that the response is much of the context
    found, model = drawn(made, 2, 20, last=5, **settings), best_of_n.load_policy(made.policy, made.tokenizer).eval()
    eos_id, pad_id = made.tokenizer.eos_token_id, made.tokenizer.pad_token_id
    query = query_of(made, 2, last=5).tolist()
    for i in range(20):
        expected = sample_by_hand(model, query, made.tokenizer, ppo.noise_keys(5, 2, [i], R)[0], R, temperature, top_p)
        assert found[i].tolist() == expected + [pad_id] * (R - len(expected))
    ended = (found == eos_id).any(1)
    assert top_p == 1 or (2 < ended.sum() < 17 and len(found.unique(dim=0)) > 15)  # there is something to see


# ---- scores ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_shards_hold_what_single_rows_score(made, written):
    eos_id, pad_id = made.tokenizer.eos_token_id, made.tokenizer.pad_token_id
    models = [ppo.load_reward_model(path, made.tokenizer).eval() for path in made.rewards]
    ended, found = [], shards(written)
    assert len(found) == PROMPTS
    for i, shard in enumerate(found):
        assert {key: x.shape for key, x in shard.items()} == {"scores": (N, 3), "gold": (N,), "has_eos": (N,)}
        for j, response in enumerate(drawn(made, i, N)):
            response = response[: int((response != pad_id).sum())]
            row = torch.cat([query_of(made, i), response])[None]
            expected = [model(row)[0, -1].item() for model in models]
            assert shard["scores"][j].tolist() == pytest.approx(expected, abs=1e-5)
            text = made.tokenizer.decode(response, skip_special_tokens=True)
            assert shard["gold"][j] == pytest.approx(truth.score(made.data[i]["query"], text), abs=1e-6)
            assert shard["has_eos"][j] == (eos_id in response)
            ended.append(eos_id in response)
        assert (shard["scores"].std(0) > 0.01).all()
    assert 0 < sum(ended) < len(ended)


def test_a_reward_model_as_gold(made, tmp_path):
    changes = {"gold": made.rewards[1], "prompts": 1, "output_dir": str(tmp_path)}
    best_of_n.main(best_of_n.Args(**made.args | changes))
    (shard,) = shards(tmp_path)
    assert (shard["gold"] == shard["scores"][:, 1]).all()


@torch.no_grad()
def test_scales_are_of_a_sample_to_each_of_the_first_training_posts(made, written, world):
    scales = json.loads((written / "scales.json").read_text())
    policy = best_of_n.load_policy(made.policy, made.tokenizer).eval()
    eos_id, pad_id = made.tokenizer.eos_token_id, made.tokenizer.pad_token_id
    args = best_of_n.Args(**made.args, output_dir="")
    models, found = [ppo.load_reward_model(path, made.tokenizer).eval() for path in made.rewards], []
    for i, row in enumerate(load_from_disk(str(world.dataset))["train"].select(range(5))):
        query = torch.tensor([x for x in row["query_token"] if x != pad_id])
        keys = best_of_n.noise_keys(1, -2, [i], R)
        (response,) = best_of_n.sample_many(policy, query, keys, eos_id, pad_id, args)
        both = torch.cat([query, response[response != pad_id]])[None]
        found.append([model(both)[0, -1].item() for model in models])
    assert list(scales) == made.rewards
    for scale, scores in zip(scales.values(), zip(*found, strict=True), strict=True):
        mean, sd = sum(scores) / 5, math.sqrt(sum((x - sum(scores) / 5) ** 2 for x in scores) / 5)
        assert (scale["mean"], scale["sd"]) == pytest.approx((mean, sd), rel=1e-4) and sd > 0.01


# ---- one folder, several commands --------------------------------------------------------------------------------


def test_killed_it_goes_on_to_the_same_bytes(made, written, tmp_path, monkeypatch):
    """Killed while it writes a shard, which stays behind half-written under another name."""
    args, folder = best_of_n.Args(**made.args, output_dir=str(tmp_path / "x")), tmp_path / "x"
    replace = os.replace

    def killed(partial, path):
        if len(list(folder.glob("samples_*.npz"))) == 2 and "samples_" in str(path):
            os.truncate(partial, 100)
            raise KeyboardInterrupt
        replace(partial, path)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(best_of_n.os, "replace", killed)
        best_of_n.main(args)
    best_of_n.main(args)
    assert files(folder) == files(written)


def test_processes_share_the_prompts(made, written, tmp_path, monkeypatch):
    args = best_of_n.Args(**made.args, output_dir=str(tmp_path / "x"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, count in ((1, 2), (0, 6)):  # two prompts each, args.json and scales.json, and no table
        monkeypatch.setenv("RANK", str(rank))
        best_of_n.main(args)
        assert len(files(tmp_path / "x")) == count
    monkeypatch.delenv("WORLD_SIZE")
    best_of_n.main(best_of_n.Args(output_dir=str(tmp_path / "x"), estimate=True))
    assert files(tmp_path / "x") == files(written)


# ---- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"top_p": 1.1}, "--top-p 1.1"),
        ({"reward_model_paths": ["constant"]}, "constant: its scores"),
        ({"gold": "gold.py:huge"}, r"prompt 0 \("),
    ],
)
def test_bad_input_is_named_and_no_sample_is_written(made, tmp_path, monkeypatch, changes, named):
    monkeypatch.chdir(tmp_path)
    Path("gold.py").write_text("def huge(*_):\n    return 1e999\n")
    make_constant(Path(made.rewards[1]), Path("constant"))
    with pytest.raises(SystemExit, match=f"^error: .*{named}"):
        best_of_n.main(best_of_n.Args(**made.args | {"output_dir": "x", "samples": 2} | changes))
    assert not list(tmp_path.glob("x/samples_*"))


def test_other_settings_in_the_same_folder(made, written):
    before = files(written)
    with pytest.raises(SystemExit, match="has other settings"):
        best_of_n.main(best_of_n.Args(**made.args | {"output_dir": str(written), "top_p": 0.7}))
    assert files(written) == before
