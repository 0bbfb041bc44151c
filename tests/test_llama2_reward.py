"""llama2/reward.py: without its options it is reward.py to the byte; margins, weights and safety labels, their losses,
gradients and trained weights against plain computations. And the two reward models of ensembles/ppo.py."""

import math
from pathlib import Path
from types import SimpleNamespace

import pandas
import pytest
import torch
from conftest import close, read_metrics, script
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


# ---- losses ------------------------------------------------------------------------------------------------------


def pairs(**columns) -> Dataset:
    return Dataset.from_dict(columns).with_format("torch")


def test_margins_and_weights_of_pairs():
    data = pairs(grade=GRADES, margin=[0.0, 0.25, 1.5, 3.0, 2.0], weight=[1.0, 0.5, 0.5, 1.0, 1.0])
    expected = {"none": [0] * 5, "small": SMALL, "large": LARGE, "column": [0, 0.25, 1.5, 3, 2]}
    for margin, margins in expected.items():
        assert close(graded_reward.pair_margins("here", data, margin), margins, 1e-7)
    assert graded_reward.pair_weights(data).tolist() == [1, 0.5, 0.5, 1, 1]
    extra = pairs(extra=[{"confidence": confidence} for confidence in (None, *range(1, 10))])  # of TL;DR: no grades
    assert graded_reward.pair_margins("here", extra, "large").tolist() == [0, 3, 2, 1, 0, 0, 0, 1, 2, 3]
    assert graded_reward.pair_grades("here", extra, "large")[:6] == ["none", *GRADES[:4], "negligibly"]
    assert graded_reward.pair_weights(extra).tolist() == [1] * 10


def test_the_learning_rate_by_hand():
    """105 updates: 3 % are 4, so 5 warm up. Then 100 of a cosine from 2 to 0.2, which is at 1.1 halfway."""
    args = SimpleNamespace(learning_rate=2.0, warmup_share=0.03, final_learning_rate=0.2)
    rates = [graded_reward.warmed_up(args, update, 105) for update in range(1, 107)]
    assert close(torch.tensor(rates[:6]), [0.4, 0.8, 1.2, 1.6, 2.0, 2.0], 1e-6)
    assert [rates[55], rates[105]] == pytest.approx([1.1, 0.2])
    assert [graded_reward.warmed_up(args, update, 1000) for update in (29, 30)] == pytest.approx([2 * 29 / 30, 2.0])


@pytest.mark.parametrize(
    ("margin", "columns", "named"),
    [
        ("small", {"grade": ["better", "huge"]}, "row 1: grade 'huge'"),
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
    """The generated pairs with grades, margins, weights and safety labels, all by row number: .root, .folder, .data."""
    folder = tmp_path_factory.mktemp("graded")

    def labels(row: dict, i: int) -> dict:
        chosen_safe, rejected_safe = SAFE[i % len(SAFE)]
        found = {"grade": GRADES[i % 5], "margin": i / 10, "weight": 0.5 if i % 3 == 0 else 1.0}
        return found | {"chosen_safe": chosen_safe, "rejected_safe": rejected_safe}

    data = load_from_disk(str(world.preference_dataset))
    data = DatasetDict({split: data[split].map(labels, with_indices=True) for split in ("train", "validation")})
    data.save_to_disk(folder / "data")
    return SimpleNamespace(root=folder, folder=folder / "data", data=data)


def run(world, graded, name: str, module=graded_reward, **changes) -> Path:
    """The folder of one run in this process."""
    folder = graded.root / name
    arguments = {"model": "nano", "sft_model_path": str(world.model), "dataset": str(world.dataset), "seed": SEED}
    arguments |= {"preference_dataset": str(graded.folder), "output_dir": str(folder), "batch_size": BATCH}
    arguments |= {"micro_batch_size": 4, "learning_rate": LEARNING_RATE, "total_episodes": 3 * BATCH, "run_eval": True}
    module.main(module.Args(**(arguments | changes)))
    return folder


def test_without_its_options_it_is_reward_py_to_the_byte(world, graded):
    """Weights of 1 change nothing."""
    data = load_from_disk(str(world.preference_dataset)).map(lambda row: {"weight": 1.0})
    data.save_to_disk(graded.root / "plain")
    plain = {"preference_dataset": str(graded.root / "plain"), "eval_every": 2, "max_grad_norm": 0.5}
    ours, theirs = run(world, graded, "ours", **plain), run(world, graded, "theirs", reward, **plain)
    models = [(folder / "model" / "model.safetensors").read_bytes() for folder in (ours, theirs)]
    assert models[0] == models[1]
    assert without(read_metrics(ours), "time/") == without(read_metrics(theirs), "time/")
    files = sorted(path.name for path in (theirs / "eval").iterdir())
    assert files == sorted(path.name for path in (ours / "eval").iterdir()) and "accuracy.csv" in files
    for name in files:
        found, expected = (pandas.read_csv(x / "eval" / name, dtype=str) for x in (ours, theirs))
        if name == "accuracy.csv":  # it adds a gap to every row, and rows of grades
            found = found[found["group"] != "grade"].reset_index(drop=True)
        assert {*found} - {*expected} == ({"gap"} if name == "accuracy.csv" else {"grade"} & {*found})
        assert found[list(expected)].equals(expected), name


def test_tables_by_grade_and_safety(world, graded):
    """Pairs whose chosen response alone is unsafe are left out. (The training: test_gradients.py.)"""
    folder = run(world, graded, "tables", margin="column")
    table = pandas.read_csv(folder / "eval" / "accuracy.csv", keep_default_na=False)
    found = {tuple(row[:3]): row[3:] for row in table.itertuples(index=False) if row.data == "validation"}
    rows = pandas.read_csv(folder / "eval" / "pairs_validation.csv", keep_default_na=False)
    kept = [i for i in range(len(graded.data["validation"])) if SAFE[i % 6] != (False, True)]
    assert rows["grade"].tolist() == [GRADES[i % 5] for i in kept]
    gaps = rows["chosen_reward"].astype(float) - rows["rejected_reward"].astype(float)
    loss = sum(math.log1p(math.exp(-gap)) for gap in gaps) / len(gaps)  # without margins and weights
    assert close(read_metrics(folder)[-1]["eval/loss"], loss)
    bins = ["chosen alone safe", "both safe", "both unsafe", "null", "null"]
    groups = {"overall": ["all" for _ in kept], "grade": rows["grade"], "safety": [bins[i % 6] for i in kept]}
    for group, values in groups.items():
        assert {value for _, own, value in found if own == group} == set(values)
        for value in set(values):
            own = gaps[[other == value for other in values]]
            pairs, accuracy, gap = found["validation", group, value]
            assert pairs == len(own) and close(accuracy, (own > 0).mean()) and close(gap, own.mean())


@pytest.mark.parametrize("module", [reward, dpo], ids=["reward.py", "dpo.py"])
def test_what_reads_no_weights_refuses_halved_ties(world, graded, module):
    args = {"model": "nano", "sft_model_path": str(world.model), "output_dir": str(graded.root / "refused")}
    args |= {"preference_dataset": str(graded.folder), "batch_size": BATCH}
    args |= {"dataset": str(world.dataset)} if module is reward else {}
    with pytest.raises(SystemExit, match="pairs with weights other than 1"):
        module.main(module.Args(**args))
    assert not (graded.root / "refused").exists()


def test_safety_gate_by_hand():
    border = math.log(0.15 / 0.85)
    helpful = [2.0, -3.0, 1.0, 0.5, 4.0]
    safety = [1.0, -4.0, border + 1e-4, border - 1e-4, 3.0]
    tagged = ppo.safety_tags({"tag": ["helpfulness", None, "x", "helpfulness", "safety"], "query_token": [0] * 5})
    assert tagged.tolist() == [False] * 4 + [True] and not ppo.safety_tags({"query_token": [0] * 5}).any()
    found = ppo.combine(torch.tensor([helpful, safety]), "safety_gate", None, tagged)
    assert close(found, [2.0, -4.0, 1.0, border - 1e-4, 3.0], 1e-6)
