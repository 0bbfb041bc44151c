"""ensembles/best_of_n.py against exact sums over all subsets, full forward passes and hand-made cases."""

import itertools
import json
import math
import os
import shutil
import statistics
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import best_of_n
import numpy
import pandas
import pytest
import torch
import truth
from conftest import files, give_other_eos, make_reward_model, make_talker, sample_by_hand
from datasets import load_from_disk

import ppo
import reward

R = 9  # tokens sampled at most: enough for some of the samples to end, and not for others
PROMPTS, N = 4, 12
GOLD = f"{Path(truth.__file__)}:score"


@pytest.fixture(scope="module")
def made(world, tmp_path_factory) -> SimpleNamespace:
    """A policy that ends some responses early, and three reward models."""
    root = tmp_path_factory.mktemp("best_of_n")
    tokenizer = reward.load_tokenizer(str(world.tokenizer))
    data = load_from_disk(str(world.dataset))["validation"].with_format("torch")
    policy = make_talker(world, root / "policy", eos=0.15)
    torch.manual_seed(1)
    rewards = [str(make_reward_model(policy, root / f"reward_{i}", i / 10)) for i in range(3)]
    args = {"policy": str(policy), "reward_model_paths": rewards, "gold": GOLD, "prompts": PROMPTS}
    args |= {"dataset": str(world.dataset), "samples": N, "response_length": R, "micro_batch_size": 5, "top_p": 0.8}
    args |= {"standardise_posts": 5, "second_gold": rewards[1]}
    return SimpleNamespace(policy=str(policy), rewards=rewards, tokenizer=tokenizer, data=data, args=args)


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
    keys = best_of_n.noise_keys(args.seed, i, range(count), args.response_length)
    ids = made.tokenizer.eos_token_id, made.tokenizer.pad_token_id
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
        arrays |= {"has_eos": numpy.arange(5) > 0, "second_gold": 2 * arrays["gold"] + 1}
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
    assert list(table.columns) == ["method", "n", "kl", "gold", "second_gold", "proxy", "wins", "wins_sd"]
    assert table["second_gold"].tolist() == pytest.approx((2 * table["gold"] + 1).tolist())
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
        pairs = [zip(best["gold"], found[x, key[1]]["gold"], strict=True) for x in methods[:3]]
        rates = [float(sum((a > b) + Fraction(a == b, 2) for a, b in member) / 3) for member in pairs]
        assert rows[key]["wins"] == pytest.approx(sum(rates) / 3, abs=1e-12)
        assert rows[key]["wins_sd"] == pytest.approx(statistics.pstdev(rates), abs=1e-12)
    for n in ns:  # the mean over the members
        for column in ("gold", "proxy"):
            single = sum(sum(found[method, n][column]) / 3 for method in methods[:3]) / 3
            assert rows["single", n][column] == pytest.approx(float(single), abs=1e-12)


# ---- sampling ----------------------------------------------------------------------------------------------------


def test_tables_of_some_members_are_those_of_samples_with_their_scores_alone(tmp_path):
    write_shards(tmp_path / "all")
    best_of_n.main(
        best_of_n.Args(output_dir=f"{tmp_path}/all", estimate=True, members=(3, 1), tables=f"{tmp_path}/some")
    )
    write_shards(tmp_path / "alone")
    for file in (tmp_path / "alone").glob("*.npz"):
        arrays = dict(numpy.load(file))
        numpy.savez(file, **arrays | {"scores": arrays["scores"][:, [2, 0]]})
    for name, keep in (("args.json", lambda x: x | {"reward_model_paths": ["C", "A"]}), ("scales.json", lambda x: x)):
        content = keep(json.loads((tmp_path / "alone" / name).read_text()))
        content = {key: content[key] for key in "CA"} if name == "scales.json" else content
        (tmp_path / "alone" / name).write_text(json.dumps(content))
    best_of_n.main(best_of_n.Args(output_dir=f"{tmp_path}/alone", estimate=True))
    some, alone = (pandas.read_csv(tmp_path / name / "best_of_n.csv") for name in ("some", "alone"))
    pandas.testing.assert_frame_equal(some, alone)
    assert json.loads((tmp_path / "some/args.json").read_text())["reward_model_paths"] == ["C", "A"]
    assert not (tmp_path / "all/best_of_n.csv").exists()
    with pytest.raises(SystemExit, match=r"--members \(4,\): from 1 to 3"):
        best_of_n.main(best_of_n.Args(output_dir=f"{tmp_path}/all", estimate=True, members=(4,)))


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
        assert {key: x.shape for key, x in shard.items()} == {"scores": (N, 3), "gold": (N,), "second_gold": (N,),
                                                             "has_eos": (N,)}  # fmt: skip
        assert shard["second_gold"].tolist() == shard["scores"][:, 1].tolist()
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


def test_an_infinite_gold_is_named_and_no_sample_is_written(made, tmp_path):
    (tmp_path / "gold.py").write_text("def huge(*_):\n    return 1e999\n")
    changes = {"gold": f"{tmp_path}/gold.py:huge", "output_dir": str(tmp_path / "x"), "samples": 2}
    with pytest.raises(SystemExit, match=r"^error: .*prompt 0 \("):
        best_of_n.main(best_of_n.Args(**made.args | changes))
    assert not list(tmp_path.glob("x/samples_*"))


def test_a_reward_model_with_another_eos(made, tmp_path):
    other = str(give_other_eos(shutil.copytree(made.rewards[0], tmp_path / "other")))
    for changes in ({"reward_model_paths": [made.rewards[1], other]}, {"gold": other}, {"second_gold": other}):
        with pytest.raises(SystemExit, match=f"^error: .*{other} has another tokenizer or EOS than"):
            best_of_n.main(best_of_n.Args(**made.args | changes, output_dir=str(tmp_path / "x")))
    assert not (tmp_path / "x").exists()


def test_samples_without_their_scales(tmp_path):
    write_shards(tmp_path / "x")
    (tmp_path / "x/scales.json").unlink()
    with pytest.raises(SystemExit, match=f"^error: {tmp_path}/x/scales.json cannot be read"):
        best_of_n.main(best_of_n.Args(output_dir=f"{tmp_path}/x", estimate=True))
    assert not [*tmp_path.glob("x/best_of_n.*")]


def test_other_settings_or_inputs_in_the_same_folder(made, written, tmp_path):
    before, args = files(written), made.args | {"output_dir": str(written)}
    with pytest.raises(SystemExit, match="has samples with other top_p"):
        best_of_n.main(best_of_n.Args(**args | {"top_p": 0.7}))
    gold = tmp_path / "gold.py"
    for length in ("len(text)", "-len(text)"):  # an edited gold is another one, and so is a model trained again
        gold.write_text(f"def score(post, text):\n    return {length}\n")
        changes = {"output_dir": str(tmp_path / "x"), "gold": f"{gold}:score"}
        if length[0] == "l":
            best_of_n.main(best_of_n.Args(**made.args | changes))
    with pytest.raises(SystemExit, match="has samples with other inputs"):
        best_of_n.main(best_of_n.Args(**made.args | changes))
    assert files(written) == before
