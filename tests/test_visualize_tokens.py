"""eval/visualize_tokens.py against hand counts and rows without padding."""

import json
import shutil
import statistics
from pathlib import Path
from types import SimpleNamespace

import pandas
import pytest
import torch
import visualize_tokens
from conftest import close, give_other_eos, give_other_tokenizer, make_reward_model, random_base
from datasets import load_from_disk
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GenerationConfig, GPT2Config

import reward

R = 14  # tokens generated at most: enough for some of the summaries that the models know, and not for others
MODELS = ["base", "sft", "ppo", "dpo", "reference"]


@pytest.fixture(scope="module")
def made(world, tmp_path_factory) -> SimpleNamespace:
    """GPT-2 models (absolute positions: padding must not shift them) that have learnt four summaries, with embeddings
    for [PAD] and ids beyond the tokenizer that would win if they were allowed; a reward model of another architecture;
    .root, .folders, .tokenizer, .data (the validation split), .plain (transformers' models) and .args."""
    root = tmp_path_factory.mktemp("tokens")
    tokenizer = reward.load_tokenizer(str(world.tokenizer))
    random_base(GPT2Config(n_embd=64, n_layer=2, n_head=2, n_positions=2048), world, root / "gpt2")
    model = AutoModelForCausalLM.from_pretrained(root / "gpt2", dtype=torch.float32)
    model.resize_token_embeddings(len(tokenizer) + 5, mean_resizing=False)
    data, pad_id = load_from_disk(str(world.dataset))["validation"].with_format("torch"), tokenizer.pad_token_id
    rows = [data[i]["query_reference_response_token"] for i in range(4)]
    rows, starts = [row[row != pad_id] for row in rows], [(data[i]["query_token"] != pad_id).sum() for i in range(4)]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(120):
        row, start = rows[step % 4], starts[step % 4]
        logits = model(row[None]).logits[0, start - 1 : -1]
        torch.nn.functional.cross_entropy(logits, row[start:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    folders = {"ppo": root / "ppo" / "model", "value_model": root / "ppo" / "value_model"}
    folders |= {name: root / name for name in ("base", "sft", "dpo", "reward_model")}
    generator, weights = torch.Generator().manual_seed(1), {k: v.clone() for k, v in model.state_dict().items()}
    for name, noise in {"ppo": 0.0, "sft": 0.01, "dpo": 0.02, "base": 0.06}.items():
        model.load_state_dict(weights)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += noise * torch.randn(parameter.shape, generator=generator)
            embeddings = model.get_input_embeddings().weight
            embeddings[pad_id:] = 1.5 * embeddings[rows[0][starts[0]]]  # in the place of a summary's first token
            assert name == "base" or model(rows[0][None, : starts[0]]).logits[0, -1].argmax() >= pad_id
        model.save_pretrained(folders[name])
        tokenizer.save_pretrained(folders[name])
    # the checkpoint's own settings of generate() must have no effect
    GenerationConfig(repetition_penalty=5.0, max_new_tokens=2, do_sample=True).save_pretrained(folders["ppo"])
    make_reward_model(root / "gpt2", folders["value_model"], bias=0.7)
    make_reward_model(world.model, folders["reward_model"], bias=0.7)
    plain = {x: AutoModelForCausalLM.from_pretrained(folders[x]).eval() for x in ("base", "sft", "ppo", "dpo")}
    for name in ("value_model", "reward_model"):
        plain[name] = AutoModelForSequenceClassification.from_pretrained(folders[name], num_labels=1).eval()
    given = {name: str(folders[name]) for name in ("base", "sft", "dpo", "reward_model")}
    given |= {"ppo": str(root / "ppo"), "dataset": str(world.dataset), "response_length": R}
    given |= {"rows": 5, "counted": 7}
    return SimpleNamespace(root=root, folders=folders, tokenizer=tokenizer, data=data, plain=plain, args=given)


@pytest.fixture(scope="module", params=[-0.9, None])
def written(request, made, tmp_path_factory) -> SimpleNamespace:
    """The output of a run: .tokens (a table) and .page (text); and the .penalty for a response without EOS."""
    output = tmp_path_factory.mktemp("written") / "new" / "x"
    settings = {"model": "x", "kl_coef": 0.2, "temperature": 0.5, "seed": 1, "penalty_reward_value": request.param}
    (made.root / "ppo" / "args.json").write_text(json.dumps(settings))
    visualize_tokens.main(visualize_tokens.Args(**made.args, output=str(output)))
    tokens = pandas.read_csv(f"{output}_tokens.csv", keep_default_na=False, dtype={"token": str})
    return SimpleNamespace(tokens=tokens, page=Path(f"{output}.html").read_text("utf-8"), penalty=request.param)


def test_shares_by_place_by_hand():
    ranks = [(5, [1, 9]), (0, [2]), (5, [4]), (0, [1]), (5, [3, 1, 1, 1]), (0, [7])]  # (token, ranks): 0 is EOS
    rows = [(token, rank) for token, of_place in ranks for rank in of_place]
    tokens = pandas.DataFrame(rows, columns=["token_id", "rank"]).assign(model="m")
    tokens["kind"] = ["unshifted" if rank == 1 else "marginal" if rank < 4 else "shifted" for rank in tokens["rank"]]
    tokens["position"] = [0, 1, 2, 0, 1, 0, 1, 2, 3, 0]
    [found] = visualize_tokens.place_shares(tokens, 0)
    assert found == {
        "model": "m",
        "all": "0.500 / 0.200 / 0.300",
        "first": "0.333 / 0.333 / 0.333",  # 1, 4, 3; the 7 is an EOS
        "between": "0.750 / 0.000 / 0.250",  # 9; 1, 1, 1
        "EOS": "0.333 / 0.333 / 0.333",
    }
    assert visualize_tokens.place_shares(tokens[:2], 0)[0]["EOS"] == ""


def test_logits_before_the_last_and_values_by_hand():
    rows = [  # model, row, reward logit, value
        ("sft", 0, 9.0, None), ("ppo", 0, -1.0, 3.0), ("ppo", 0, 2.0, 1.0), ("ppo", 0, 4.0, 0.0),
        ("ppo", 1, -3.0, 5.0), ("ppo", 1, 1.0, 0.5), ("ppo", 2, 5.0, 4.0), ("ppo", 2, -2.0, 7.0), ("ppo", 2, 7.0, 2.0),
    ]  # fmt: skip
    tokens = pandas.DataFrame(rows, columns=["model", "row", "reward_logit", "value"])
    [found] = visualize_tokens.logits_before_the_last(tokens)  # -1, 2; -3; 5, -2
    assert found == {"model": "ppo", "logits": 5, "mean": pytest.approx(0.2), "share negative": 0.6}
    first, _, last = visualize_tokens.values_and_scores(tokens)  # scores 4, 1, 7
    for row, values in ((first, (3, 5, 4)), (last, (0, 0.5, 2))):
        expected = statistics.correlation((4, 1, 7), values)
        assert row["correlation with the score"] == pytest.approx(expected)


def outputs(made, name: str, i: int, tokens: list[int]) -> torch.Tensor:
    """Logits (T, V) or scalars (T,) of one row without padding by plain transformers, and where its response begins."""
    model, query = made.plain[name], made.data[i]["query_token"]
    query = query[query != made.tokenizer.pad_token_id]
    row, start = torch.cat([query, torch.tensor(tokens)])[None], len(query)
    with torch.no_grad():
        if not name.endswith("_model"):
            return model(row).logits[0, :, : made.tokenizer.pad_token_id], start  # [PAD] and what is beyond come last
        return (model.base_model(row).last_hidden_state @ model.score.weight.T + 0.7)[0, :, 0], start


def test_every_number_is_that_of_a_single_row(made, written):
    eos_id, ends = made.tokenizer.eos_token_id, set()
    assert made.tokenizer.pad_token_id == len(made.tokenizer) - 1
    for (identity, name), rows in written.tokens.groupby(["id", "model"]):
        i = list(made.data["id"]).index(identity)
        past = rows[rows["rank"] == ""]
        rows = rows[rows["rank"] != ""]
        tokens = rows["token_id"].tolist()
        assert rows["position"].tolist() == [*range(len(tokens))]
        if name == "reference":
            stored = made.data[i]["reference_response_token"]
            assert tokens == stored[stored != made.tokenizer.pad_token_id].tolist()
        else:  # greedy, through the first EOS
            logits, start = outputs(made, name, i, tokens)
            chosen = logits[start - 1 : -1].gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
            assert (chosen >= logits[start - 1 : -1].max(1).values - 1e-5).all()
            assert eos_id not in tokens[:-1] and (len(tokens) == R or tokens[-1] == eos_id)
        assert "".join(rows["token"]) == made.tokenizer.decode(tokens)
        base, start = outputs(made, "base", i, tokens)
        for t, (token, rank, kind) in enumerate(zip(tokens, rows["rank"], rows["kind"], strict=True)):
            logits, own = base[start + t - 1], base[start + t - 1, token]
            assert (logits > own + 1e-5).sum() + 1 <= int(rank) <= (logits > own - 1e-5).sum()  # but for rounding
            assert kind == ("unshifted" if int(rank) == 1 else "marginal" if int(rank) <= 3 else "shifted")
        scalars, start = outputs(made, "reward_model", i, tokens)
        assert close(rows["reward_logit"].astype(float).tolist(), scalars[start:], 2e-5)
        if name != "ppo":
            assert past.empty and set(rows[["value", "logratio", "token_reward"]].to_numpy().flatten()) == {""}
            continue
        score, has_room = scalars[-1].item(), len(tokens) < R
        if written.penalty is not None and tokens[-1] != eos_id:
            score = written.penalty
        ends.add((tokens[-1] == eos_id, has_room))
        values, start = outputs(made, "value_model", i, tokens)
        found = [float(x) for x in (*rows["value"], *past["value"])]
        assert close(found, values[start - 1 : None if has_room else -1], 2e-5)
        chosen = torch.arange(len(tokens)), torch.tensor(tokens)
        logits = [outputs(made, x, i, tokens)[0][start - 1 : -1] / 0.5 for x in ("ppo", "sft")]
        policy, sft = (x.log_softmax(1)[chosen] for x in logits)
        assert close(rows["logratio"].astype(float).tolist(), policy - sft, 2e-5)
        expected = [-0.2 * x for x in (policy - sft).tolist()] + [0.0] * has_room
        expected[-1] += score
        assert close([float(x) for x in (*rows["token_reward"], *past["token_reward"])], expected, 2e-5)
        assert past["token"].tolist() == ["[PAD]"] * has_room and set(past["reward_logit"]) <= {""}
    assert ends >= {(True, True), (False, False)}  # some ended, some were cut off
    assert set(written.tokens["kind"]) == {"unshifted", "marginal", "shifted", ""}
    assert all(name in written.page for name in MODELS)
    order = list(dict.fromkeys(zip(written.tokens["id"], written.tokens["model"], strict=True)))
    assert order == [(made.data[i]["id"], name) for i in range(5) for name in MODELS]


def test_bad_input_is_one_message(made, world, tmp_path):
    give_other_tokenizer(world, Path(shutil.copytree(made.folders["sft"], tmp_path / "other")))
    give_other_eos(shutil.copytree(made.folders["dpo"], tmp_path / "eos"))
    for changes, named in (
        ({"reward_model": f"{tmp_path}/other"}, f"--reward-model {tmp_path}/other"),
        ({"dpo": f"{tmp_path}/eos"}, f"--dpo {tmp_path}/eos"),
        ({"counted": 17}, "--counted 17"),
    ):
        with pytest.raises(SystemExit, match=named):
            visualize_tokens.main(visualize_tokens.Args(**made.args | {"output": str(tmp_path / "x")} | changes))
    assert {path.name for path in tmp_path.iterdir()} == {"other", "eos"}
