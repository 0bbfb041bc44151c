"""ensembles/gold_label.py: answers, labels and flips, against plain computations and hand-made cases."""

import shutil
from pathlib import Path

import gold_label
import pytest
import torch
from conftest import give_other_eos, make_reward_model, make_talker, record, sample_by_hand
from datasets import load_from_disk
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

SHORT = "def score(post, summary):\n    return -float(len(summary))\n"  # the gold reward of most tests: fewer letters


@pytest.fixture(scope="module")
def policy(world, tmp_path_factory) -> Path:
    """A random policy that is far from uniform and ends most of its answers."""
    return make_talker(world, tmp_path_factory.mktemp("policy") / "model", eos=0.15)


def run(policy: Path | list[Path], world, root: Path, **settings) -> Path:
    root.mkdir(exist_ok=True)
    (root / "short.py").write_text(SHORT)
    settings = {"gold": f"{root}/short.py:score", "response_length": 20, "micro_batch_size": 8} | settings
    out = root / "out"
    shutil.rmtree(out, ignore_errors=True)
    policies = [str(path) for path in (policy if isinstance(policy, list) else [policy])]
    gold_label.main(gold_label.Args(policies, dataset=str(world.dataset), output_dir=str(out), **settings))
    return out


@pytest.fixture(scope="module")
def labelled(policy, world, tmp_path_factory) -> Path:
    return run(policy, world, tmp_path_factory.mktemp("labelled"), label_noise=(0.0, 0.25, 0.35, 1.0), prompts=32)


def test_answers_and_labels(policy, labelled, world):
    tokenizer = AutoTokenizer.from_pretrained(policy)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    model = AutoModelForCausalLM.from_pretrained(policy).eval()
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    data, expected = load_from_disk(str(world.dataset))["train"], {}
    for i, row in enumerate(data.select(range(14))):
        query = row["query_token"][-row["query_token_len"] :]
        keys = [gold_label.noise_keys(1, which, [f"train {i}"], 20)[0] for which in (0, 1)]
        pair = [sample_by_hand(model, query, tokenizer, key, 20, top_p=0.9) for key in keys]
        golds = [-len(tokenizer.decode(tokens, skip_special_tokens=True)) for tokens in pair]
        if golds[0] != golds[1] and all(tokens[-1] == eos for tokens in pair):
            choice = int(golds[1] > golds[0])
            expected[row["id"]] = query, choice, pair[choice], pair[1 - choice], golds[choice], golds[1 - choice]
    assert 5 < len(expected) < 14
    found = {row["id"]: row for row in load_from_disk(str(labelled / "noise_0"))["train"]}
    assert expected.keys() == found.keys() & set(data["id"][:14])
    for name, (query, choice, chosen, rejected, *golds) in expected.items():
        row = found[name]
        assert row["query_token"] == data[data["id"][:].index(name)]["query_token"]
        assert (row["choice"], row["batch"], [row["gold_chosen"], row["gold_rejected"]]) == (choice, "kept", golds)
        assert (row["chosen_policy"], row["rejected_policy"]) == (f"sample_{choice}", f"sample_{1 - choice}")
        width = len(row["query_token"])
        for side, tokens in (("chosen", chosen), ("rejected", rejected)):
            assert row[side] == tokenizer.decode(tokens) and row[f"query_{side}"] == row["query"] + row[side]
            assert row[f"{side}_token"] == tokens + [pad] * (20 - len(tokens))
            both = query + tokens
            assert row[f"query_{side}_token"] == both + [pad] * (width + 20 - len(both))
            label = [pad] * len(query) + tokens + [pad] * (width + 20 - len(both))
            assert row[f"query_{side}_token_response_label"] == label
            assert (row[f"{side}_token_len"], row[f"query_{side}_token_len"]) == (len(tokens), len(both))


def test_exactly_that_share_is_flipped_and_nothing_else_changes(labelled):
    clean = load_from_disk(str(labelled / "noise_0"))
    before: dict[str, set] = {"train": set(), "validation": set()}
    for share, name in ((0.25, "noise_25"), (0.35, "noise_35"), (1.0, "noise_100")):
        data = load_from_disk(str(labelled / name))
        for split in ("train", "validation"):
            rows, other = list(data[split]), list(clean[split])
            flips = {row["id"] for row in rows if row["batch"] == "flipped"}
            assert len(flips) == int(share * len(rows) + 0.5) and before[split] <= flips
            before[split] = flips
            for row, pure in zip(rows, other, strict=True):
                if row["id"] in flips:
                    swap = {"chosen": "rejected", "rejected": "chosen"}
                    for key, value in pure.items():
                        side = next((x for x in swap if x in key), None)
                        key = key.replace(side, swap[side]) if side else key
                        assert row[key] == (1 - value if key == "choice" else "flipped" if key == "batch" else value)
                else:
                    assert row == pure
                assert (row["gold_chosen"] > row["gold_rejected"]) == (row["id"] not in flips)
    assert [gold_label.flipped(7, 0.5, 1, "train").count(True), gold_label.flipped(7, 0.0, 1, "x")] == [4, [False] * 7]
    assert gold_label.flipped(99, 0.5, 1, "train") != gold_label.flipped(99, 0.5, 1, "validation")
    assert gold_label.flipped(99, 0.5, 1, "train") != gold_label.flipped(99, 0.5, 2, "train")


def test_two_policies_and_two_temperatures(policy, world, tmp_path):
    """The first policy always gives answer 0. The temperatures are exchanged from one prompt to the next."""
    other = make_talker(world, tmp_path / "other" / "model", eos=0.2)
    model = AutoModelForCausalLM.from_pretrained(other)
    words = model.get_output_embeddings().weight.data[1:]  # all but EOS
    words.copy_(words.flip(0))
    model.save_pretrained(other)
    settings = {"temperature": (0.5, 1.5), "label_noise": (0.0,), "prompts": 14, "skip_prompts": 3}
    out = run([policy, other], world, tmp_path, **settings)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    models = [AutoModelForCausalLM.from_pretrained(path).eval() for path in (policy, other)]
    data = load_from_disk(str(world.dataset))["train"]
    found = list(load_from_disk(str(out / "noise_0"))["train"])
    ids = data["id"][:]
    assert len(found) > 5 and {row["id"] for row in found} <= set(ids[3:17])
    for row in found:
        i = ids.index(row["id"])
        query = data[i]["query_token"][-data[i]["query_token_len"] :]
        expected = {}
        for which, model in enumerate(models):
            temperature = (0.5, 1.5)[(which + i) % 2]
            keys = gold_label.noise_keys(1, which, [f"train {i}"], 20)[0]
            tokens = sample_by_hand(model, query, tokenizer, keys, 20, temperature=temperature, top_p=0.9)
            expected[f"policy_{which}_at_{temperature:g}"] = tokens
        got = {
            row[f"{side}_policy"]: row[f"{side}_token"][: row[f"{side}_token_len"]] for side in ("chosen", "rejected")
        }
        assert got == expected and row["policies"] == "--".join(sorted(expected))


def test_grades_and_safety_by_hand(policy, world, tmp_path):
    """Gold is minus the number of letters, and answers with an odd number of them are unsafe."""
    (tmp_path / "odd.py").write_text("def safe(post, summary):\n    return len(summary) % 2 == 0\n")
    settings = {"grade_bounds": (2, 6, 12), "safety": f"{tmp_path}/odd.py:safe"}
    shared = {"label_noise": (0.0, 0.25), "prompts": 32}
    out = run(policy, world, tmp_path, **settings, **shared)
    plain = run(policy, world, tmp_path / "plain", **shared)
    seen = set()
    for name in ("noise_0", "noise_25"):
        graded = {row["id"]: row for row in load_from_disk(str(out / name))["train"]}
        for row in load_from_disk(str(plain / name))["train"]:
            gap = abs(row["gold_chosen"] - row["gold_rejected"])
            grade = "negligibly" if gap < 2 else "slightly" if gap < 6 else "better" if gap < 12 else "significantly"
            margin = {"negligibly": 0.0, "slightly": 1 / 3, "better": 2 / 3, "significantly": 1.0}[grade]
            safe = {f"{side}_safe": row[f"gold_{side}"] % 2 == 0 for side in ("chosen", "rejected")}
            bin_ = tuple(safe.values())
            seen.add((grade, bin_))
            if bin_ == (False, True):
                assert row["id"] not in graded
            else:
                assert graded[row["id"]] == row | safe | {"grade": grade, "margin": margin}
    assert len({grade for grade, _ in seen}) == len({bin_ for _, bin_ in seen}) == 4


@pytest.mark.parametrize("gap", [1 - 0.8, 0.6 - 0.4, 0.8 - 0.6, 0.2, -0.2])
def test_a_gap_of_a_fifth_reaches_a_bound_of_a_fifth(gap):
    """1 - 0.8 is 0.19999999999999996."""
    assert gold_label.grade_of(gap, (0.2, 0.35, 0.55)) == "slightly"
    assert gold_label.grade_of(gap * 0.999, (0.2, 0.35, 0.55)) == "negligibly"


def test_a_reward_model_as_gold(policy, world, tmp_path, monkeypatch):
    """No attention mask hides all keys from a position: on a GPU that gives NaN, which the next layer spreads."""
    calls = record(monkeypatch, torch.nn.functional, "scaled_dot_product_attention")
    gold = make_reward_model(world.model, tmp_path / "gold" / "model", bias=0.5)
    out = run(policy, world, tmp_path, gold=str(tmp_path / "gold"), label_noise=(0.0,), prompts=16)
    rows = list(load_from_disk(str(out / "noise_0"))["train"])
    model = AutoModelForSequenceClassification.from_pretrained(gold, dtype=torch.float32).eval()  # without its bias
    assert 3 < len(rows) <= 16
    for row in rows:
        for side in ("chosen", "rejected"):
            tokens = torch.tensor([row[f"query_{side}_token"][: row[f"query_{side}_token_len"]]])
            with torch.no_grad():
                assert row[f"gold_{side}"] == pytest.approx(model(tokens).logits.item() + 0.5, rel=1e-4, abs=1e-5)
    masks = [call.kwargs["attn_mask"] for call in calls]
    assert masks and all(mask is None or mask.dtype == torch.bool and mask.any(-1).all() for mask in masks)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"gold": "nan.py:score"}, "train, prompt 0 .* the score nan"),
        ({"label_noise": (1.5,)}, "--label-noise"),
        ({"prompts": 0}, "--prompts 0: at least 1"),
        ({"response_length": 1}, "no pair is left"),
        ({"temperature": (1.0, 0.0)}, "--temperature"),
        ({"grade_bounds": (0.1, 0.6, 0.3)}, "--grade-bounds"),
    ],
)
def test_bad_input_is_one_message(policy, world, tmp_path, monkeypatch, settings, named):
    monkeypatch.chdir(tmp_path)
    Path("nan.py").write_text("def score(post, summary):\n    return float('nan')\n")
    with pytest.raises(SystemExit, match=f"^error: .*{named}"):
        run(policy, world, tmp_path, **{"prompts": 1} | settings)
    assert not (tmp_path / "out").exists() and not [*tmp_path.glob("*tmp-*")]


def test_two_policies_with_two_eos(policy, world, tmp_path):
    other = give_other_eos(shutil.copytree(policy, tmp_path / "other"))
    with pytest.raises(SystemExit, match=f"^error: --policy: {other} has another tokenizer or EOS than {policy}"):
        run([policy, other], world, tmp_path, prompts=1)
    assert not (tmp_path / "out").exists()
