"""ensembles/average.py: the weights and accuracies against plain computations, and what cannot be averaged."""

import json
import shutil
from pathlib import Path

import average
import pandas
import pytest
import torch
from conftest import give_other_eos, give_other_tokenizer, head_of, make_constant
from datasets import DatasetDict, load_from_disk
from safetensors.torch import load_file
from test_ensembles import save_reward

import ppo
import reward


@pytest.fixture(scope="module")
def made(world, tmp_path_factory):
    """(three members of one base, pairs whose validation split has the column batch)"""
    root = tmp_path_factory.mktemp("average")
    members = [str(save_reward(root / f"member_{seed}", world.model, seed, away=0.02)) for seed in (1, 2, 3)]
    pairs = load_from_disk(str(world.preference_dataset))
    batches = [("kept", "flipped")[i % 3 == 0] for i in range(len(pairs["validation"]))]
    changed = pairs["validation"].remove_columns([x for x in ("batch",) if x in pairs["validation"].column_names])
    pairs = DatasetDict(pairs | {"validation": changed.add_column("batch", batches)})
    pairs.save_to_disk(root / "pairs")
    return members, str(root / "pairs")


def test_weights_and_accuracies(made, tmp_path):
    members, pairs = made
    out = tmp_path / "new" / "average"
    average.main(average.Args(members, str(out), pairs, micro_batch_size=7))
    states = [load_file(Path(path, "model.safetensors")) for path in members]
    found = load_file(out / "model/model.safetensors")
    assert found.keys() == states[0].keys() and len(found) > 10
    for name, tensor in found.items():
        expected = sum(state[name].numpy().astype("float64") for state in states) / 3
        assert tensor.numpy() == pytest.approx(expected, rel=1e-6, abs=1e-9), name
    assert head_of(out / "model")[1] == pytest.approx(0.2)
    tokenizer = reward.load_tokenizer(str(out / "model"))
    assert tokenizer.get_vocab() == reward.load_tokenizer(members[0]).get_vocab()
    settings = json.loads((out / "args.json").read_text())
    assert (settings["stage"], settings["reward_model_paths"]) == ("average", members)

    table = pandas.read_csv(out / "accuracy.csv").set_index("model")
    rows, pad_id = load_from_disk(pairs)["validation"], tokenizer.pad_token_id
    for path in (*members, "average"):
        model = ppo.load_reward_model(str(out / "model") if path == "average" else path, tokenizer).eval()
        wins = {"kept": [], "flipped": []}
        for row in rows:
            query, scores = [x for x in row["query_token"] if x != pad_id], []
            for side in ("chosen", "rejected"):
                response = row[f"{side}_token"][: row[f"{side}_token_len"]]
                with torch.no_grad():
                    scores.append(model(torch.tensor([query + response]))[0, -1].item())
            wins[row["batch"]].append(float(scores[0] > scores[1]))
        for batch, mine in wins.items():
            assert table.loc[path, batch] == pytest.approx(sum(mine) / len(mine)), (path, batch)
        everything = wins["kept"] + wins["flipped"]
        assert table.loc[path, "all"] == pytest.approx(sum(everything) / len(everything)) and len(everything) > 20
    assert table["all"].nunique() > 1 and (table["pairs"] == len(rows)).all()


def test_ties_count_half(made, tmp_path):
    members, pairs = made
    constant = make_constant(members[0], tmp_path / "constant")
    average.main(average.Args([str(constant), members[1]], str(tmp_path / "x"), pairs))
    assert pandas.read_csv(tmp_path / "x/accuracy.csv").loc[0, ["all", "kept", "flipped"]].tolist() == [0.5] * 3


def test_pairs_without_a_batch_and_a_batch_called_all(made):
    """The batches all, none, x, all, ...: each share is that of its own pairs."""
    members, pairs = made
    tokenizer = reward.load_tokenizer(members[0])
    model, rows = ppo.load_reward_model(members[0], tokenizer).eval(), load_from_disk(pairs)["validation"]
    names = [("all", None, "x")[i % 3] for i in range(len(rows))]
    data = rows.remove_columns("batch").add_column("batch", names).with_format("torch")
    found = average.accuracies(model, data, tokenizer.pad_token_id, 8, "")
    parts = {"all": rows, "batch all": rows.select(range(0, len(rows), 3)), "x": rows.select(range(2, len(rows), 3))}
    expected = {}
    for name, part in parts.items():
        part = part.remove_columns("batch").with_format("torch")
        expected[name] = average.accuracies(model, part, tokenizer.pad_token_id, 8, "")["all"]
    assert found == pytest.approx(expected) and len(set(found.values())) > 1


def test_what_cannot_be_averaged(world, made, tmp_path):
    (first, second, _), pairs = made
    other_base = tmp_path / "other_base"  # of the same shapes, with other weights
    model = reward.new_reward_model(str(world.model), reward.load_tokenizer(first))
    torch.manual_seed(5)
    model.apply(lambda x: x.weight.data.normal_(std=0.02) if getattr(x, "weight", None) is not None else None)
    model.to_transformers().save_pretrained(other_base)
    reward.load_tokenizer(first).save_pretrained(other_base)
    give_other_tokenizer(world, Path(shutil.copytree(first, tmp_path / "other_tokenizer")))
    give_other_eos(shutil.copytree(first, tmp_path / "other_eos"))
    shutil.copytree(second, tmp_path / "run" / "model")
    for paths, named in (
        ([first, f"{tmp_path}/other_base"], "other_base is of another base"),
        ([first, f"{tmp_path}/other_tokenizer"], "other_tokenizer has another tokenizer"),
        ([first, f"{tmp_path}/other_eos"], "other_eos has another tokenizer or EOS"),
        ([first], "two or more, each once"),
        ([first, f"{tmp_path}/run", f"{tmp_path}/run/model"], "two or more, each once"),
        ([first, str(world.model)], f"{world.model}: .*do not fit: embed_out.weight, score.weight"),
    ):
        with pytest.raises(SystemExit, match=f"^error: .*{named}"):
            average.main(average.Args(paths, str(tmp_path / "runs" / "x"), pairs))
        assert not (tmp_path / "runs").exists()
    with pytest.raises(SystemExit, match="exists; remove it"):
        average.main(average.Args([first, second], str(tmp_path), pairs))
