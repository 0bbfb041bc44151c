"""llama2/reward.py: without its options it is reward.py to the byte; margins, weights and safety labels, their losses,
gradients and trained weights against plain computations. And the two reward models of ensembles/ppo.py."""

import math
from types import SimpleNamespace

import pandas
import pytest
import torch
from accelerate.state import AcceleratorState
from conftest import close, read_metrics, record, script
from datasets import Dataset, DatasetDict, load_from_disk
from test_ensembles import without

import dpo
import reward

graded_reward, ppo = script("llama2/reward.py"), script("ensembles/ppo.py")
BATCH, SEED, LEARNING_RATE = 8, 3, 3e-4
GRADES = ["significantly", "better", "slightly", "negligibly", "none"]
SMALL, LARGE = [1, 2 / 3, 1 / 3, 0, 0], [3, 2, 1, 0, 0]
SAFE = [(True, False), (True, True), (False, False), (None, True), (None, None), (False, True)]
SIDES = ("chosen", "rejected")


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# ---- losses ------------------------------------------------------------------------------------------------------


def test_grade_of_a_confidence():
    found = {confidence: graded_reward.confidence_grade(confidence) for confidence in (None, *range(1, 10))}
    by_hand = {1: 0, 9: 0, 2: 1, 8: 1, 3: 2, 7: 2, 4: 3, 6: 3, 5: 3, None: 4}
    assert found == {confidence: GRADES[place] for confidence, place in by_hand.items()}


def test_accuracy_and_gap_by_grade_and_safety():
    safe = [True, None, True]
    data = Dataset.from_dict({"grade": ["better", "better", "none"], "chosen_safe": safe, "rejected_safe": safe})
    rewards, tie = torch.tensor([[1.0, 0.5], [0.0, 2.0], [3.0, 0.0]]), torch.zeros(5, dtype=torch.bool)
    table = graded_reward.accuracy_table("d", graded_reward.pair_table(data, rewards, tie[:3]))
    table = [row for row in table if row["group"] != "confidence"]
    assert [tuple(row.values()) for row in table] == [
        ("d", "overall", "all", 3, pytest.approx(2 / 3), pytest.approx(0.5)),
        ("d", "grade", "better", 2, 0.5, -0.75),
        ("d", "grade", "none", 1, 1.0, 3.0),
        ("d", "safety", "both safe", 2, 1.0, 1.75),
        ("d", "safety", "null", 1, 0.0, -2.0),
    ]
    labels = {"chosen_safe": [safe for safe, _ in SAFE[:5]], "rejected_safe": [safe for _, safe in SAFE[:5]]}
    graded = graded_reward.pair_table(Dataset.from_dict(labels | {"grade": GRADES}), torch.zeros(5, 2), tie)
    assert graded["safety"].tolist() == ["chosen alone safe", "both safe", "both unsafe", None, None]


def pairs(**columns) -> Dataset:
    return Dataset.from_dict(columns).with_format("torch")


def test_margins_and_weights_of_pairs():
    data = pairs(grade=GRADES, margin=[0.0, 0.25, 1.5, 3.0, 2.0], weight=[1.0, 0.5, 0.5, 1.0, 1.0])
    expected = {"none": [0] * 5, "small": SMALL, "large": LARGE, "column": [0, 0.25, 1.5, 3, 2]}
    for margin, margins in expected.items():
        assert close(graded_reward.pair_margins("here", data, margin), margins, 1e-7)
    assert graded_reward.pair_weights(data).tolist() == [1, 0.5, 0.5, 1, 1]
    extra = [{"confidence": confidence} for confidence in (1, 4, None, 8, 7)]  # of TL;DR, which has no grades
    assert graded_reward.pair_margins("here", pairs(extra=extra), "large").tolist() == [3, 0, 0, 2, 1]
    assert graded_reward.pair_weights(pairs(extra=extra)).tolist() == [1] * 5


@pytest.mark.parametrize(
    ("margin", "columns", "named"),
    [
        ("small", {"grade": ["better", "huge"]}, "row 1: grade 'huge'"),
        ("small", {"grade": ["better", None]}, "row 1: grade None"),
        ("column", {"margin": [0.0, -0.5]}, "row 1: margin -0.5"),
        ("column", {"margin": [None, 0.5]}, "row 0: margin nan"),
        ("column", {"grade": ["better"]}, "margin"),
        ("large", {"margin": [0.5]}, "grade"),
        ("large", {"grade": ["none", "none"]}, "no pair"),
    ],
)
def test_bad_margins(margin, columns, named):
    with pytest.raises(SystemExit, match=f"^error: .*{named}"):
        graded_reward.pair_margins("here", pairs(**columns), margin)


# ---- training ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def graded(world, tmp_path_factory) -> SimpleNamespace:
    """The generated pairs with grades, margins, weights and safety labels, all by row number: .root, .folder, .data and
    .train (without those whose chosen response alone is unsafe)."""
    folder = tmp_path_factory.mktemp("graded")

    def labels(row: dict, i: int) -> dict:
        chosen_safe, rejected_safe = SAFE[i % len(SAFE)]
        found = {"grade": GRADES[i % 5], "margin": i / 10, "weight": 0.5 if i % 3 == 0 else 1.0}
        return found | {"chosen_safe": chosen_safe, "rejected_safe": rejected_safe}

    data = load_from_disk(str(world.preference_dataset))
    data = DatasetDict({split: data[split].map(labels, with_indices=True) for split in ("train", "validation")})
    data.save_to_disk(folder / "data")
    kept = [row for i, row in enumerate(data["train"]) if SAFE[i % len(SAFE)] != (False, True)]
    return SimpleNamespace(root=folder, folder=folder / "data", train=kept, data=data)


def run(world, graded, name: str, module=graded_reward, **changes) -> SimpleNamespace:
    """One run in this process: .folder .metrics .orders .start (weights before the first update)."""
    folder, starts = graded.root / name, []
    arguments = {"model": "nano", "sft_model_path": str(world.model), "dataset": str(world.dataset), "seed": SEED}
    arguments |= {"preference_dataset": str(graded.folder), "output_dir": str(folder), "batch_size": BATCH}
    arguments |= {"micro_batch_size": 4, "learning_rate": LEARNING_RATE, "total_episodes": 3 * BATCH, "run_eval": True}
    AcceleratorState._reset_state(True)
    with pytest.MonkeyPatch.context() as patch:
        orders, new = record(patch, module, "data_order"), module.new_reward_model

        def keep(*args):
            model = new(*args)
            starts.append({key: value.clone() for key, value in model.model.state_dict().items()})
            return model

        patch.setattr(module, "new_reward_model", keep)
        module.main(module.Args(**(arguments | changes)))
    orders = [call.result.tolist() for call in orders]
    return SimpleNamespace(folder=folder, metrics=read_metrics(folder), orders=orders, start=starts[0])


def test_without_its_options_it_is_reward_py_to_the_byte(world, graded):
    plain = {"preference_dataset": str(world.preference_dataset), "eval_every": 2, "max_grad_norm": 0.5}
    ours, theirs = run(world, graded, "ours", **plain), run(world, graded, "theirs", reward, **plain)
    models = [(found.folder / "model" / "model.safetensors").read_bytes() for found in (ours, theirs)]
    assert models[0] == models[1] and without(ours.metrics, "time/") == without(theirs.metrics, "time/")
    files = sorted(path.name for path in (theirs.folder / "eval").iterdir())
    assert files == sorted(path.name for path in (ours.folder / "eval").iterdir()) and "accuracy.csv" in files
    for name in files:
        found, expected = (pandas.read_csv(x.folder / "eval" / name, dtype=str) for x in (ours, theirs))
        if name == "accuracy.csv":  # it adds a gap to every row, and rows of grades
            found = found[found["group"] != "grade"].reset_index(drop=True)
        assert {*found} - {*expected} == ({"gap"} if name == "accuracy.csv" else {"grade"} & {*found})
        assert found[list(expected)].equals(expected), name


def test_tables_by_grade_and_safety(world, graded):
    """Pairs whose chosen response alone is unsafe are left out. (The training: test_gradients.py.)"""
    found = run(world, graded, "tables", margin="column")
    table = pandas.read_csv(found.folder / "eval" / "accuracy.csv").set_index(["data", "group", "value"])
    rows = pandas.read_csv(found.folder / "eval" / "pairs_validation.csv", keep_default_na=False)
    kept = [i for i in range(len(graded.data["validation"])) if SAFE[i % 6] != (False, True)]
    assert rows["grade"].tolist() == [GRADES[i % 5] for i in kept]
    rows["gap"] = rows["chosen_reward"].astype(float) - rows["rejected_reward"].astype(float)
    for place, name in enumerate(("chosen alone safe", "both safe", "both unsafe")):
        gaps = [gap for i, gap in zip(kept, rows["gap"], strict=True) if i % 6 == place]
        own = table.loc["validation", "safety", name]
        assert own["pairs"] == len(gaps) and close(own["gap"], sum(gaps) / len(gaps))
        assert close(own["accuracy"], sum(gap > 0 for gap in gaps) / len(gaps))


@pytest.mark.parametrize("coef", [1.0, -1.0])
def test_a_bad_safety_coefficient_leaves_nothing_behind(world, graded, coef):
    """Above 0 it needs labels, and the plain pairs have none."""
    data = {"preference_dataset": str(world.preference_dataset if coef > 0 else graded.folder)}
    with pytest.raises(SystemExit, match=f"--safety-coef {coef}( must be|: .* chosen_safe)"):
        run(world, graded, "bad", **data, safety_coef=coef)
    assert not (graded.root / "bad").exists()


@pytest.mark.parametrize("module", [reward, dpo], ids=["reward.py", "dpo.py"])
def test_what_reads_no_weights_refuses_halved_ties_alone(world, graded, monkeypatch, module):
    monkeypatch.setattr(module, "begin_run", lambda *_: module.fail("far enough"))
    graded.data.map(lambda row: {"weight": 1.0}).save_to_disk(graded.root / f"whole_{module.__name__}")
    for folder, message in ((graded.folder, "llama2/reward.py"), (None, "far enough")):
        args = {"model": "nano", "sft_model_path": str(world.model), "output_dir": str(graded.root / "refused")}
        args |= {"preference_dataset": str(folder or graded.root / f"whole_{module.__name__}"), "batch_size": BATCH}
        args |= {"dataset": str(world.dataset)} if module is reward else {}
        AcceleratorState._reset_state(True)
        with pytest.raises(SystemExit, match=message):
            module.main(module.Args(**args))
        assert not (graded.root / "refused").exists()


# ---- two reward models in PPO ------------------------------------------------------------------------------------


def test_safety_gate_by_hand():
    helpful = [2.0, -3.0, 1.0, 0.5, 4.0]
    border = math.log(0.15 / 0.85)
    safety = [1.0, -4.0, border + 1e-4, border - 1e-4, 3.0]
    tagged = ppo.safety_tags({"tag": ["helpfulness", None, "x", "helpfulness", "safety"], "query_token": [0] * 5})
    assert tagged.tolist() == [False] * 4 + [True] and not ppo.safety_tags({"query_token": [0] * 5}).any()
    scores = torch.tensor([helpful, safety])
    found = ppo.combine(scores, "safety_gate", None, tagged)
    expected = []
    for h, s, t in zip(helpful, safety, tagged.tolist(), strict=True):
        p = sigmoid(s) if t or sigmoid(s) < 0.15 else sigmoid(h)
        expected.append(math.log(p / (1 - p)))
    assert close(found, expected, 1e-6) and close(found, [2.0, -4.0, 1.0, border - 1e-4, 3.0], 1e-6)
