"""llama2/reward.py: without its options it is reward.py to the byte; margins, weights and safety labels, their losses,
gradients and trained weights against plain computations. And the two reward models of ensembles/ppo.py."""

import math
import random
from types import SimpleNamespace

import pandas
import pytest
import torch
from accelerate.state import AcceleratorState
from conftest import close, make_talker, read_metrics, record, script
from datasets import Dataset, DatasetDict, load_from_disk
from test_ensembles import save_reward, without
from test_helpers import sigmoid

import dpo
import reward

graded_reward, ppo = script("llama2/reward.py"), script("ensembles/ppo.py")
BATCH, SEED, LEARNING_RATE = 8, 3, 3e-4
GRADES = ["significantly", "better", "slightly", "negligibly", "none"]
SMALL, LARGE = [1, 2 / 3, 1 / 3, 0, 0], [3, 2, 1, 0, 0]
SAFE = [(True, False), (True, True), (False, False), (None, True), (None, None), (False, True)]
SIDES = ("chosen", "rejected")


# ---- losses ------------------------------------------------------------------------------------------------------


def test_margin_loss_and_gradient():
    rng = random.Random(1)
    rows = [(rng.gauss(0, 2), rng.gauss(0, 2), margin) for margin in (*SMALL, *LARGE, 0.7)]
    chosen, rejected, margin = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    chosen.requires_grad_(), rejected.requires_grad_()
    loss = graded_reward.margin_loss(chosen, rejected, margin)
    loss.sum().backward()
    assert close(loss.detach(), [-math.log(sigmoid(c - r - m)) for c, r, m in rows], 1e-12)
    slopes = [sigmoid(c - r - m) - 1 for c, r, m in rows]  # d/dx -log sigmoid(x)
    assert close(chosen.grad, slopes, 1e-12) and close(rejected.grad, [-x for x in slopes], 1e-12)


def test_margin_0_is_the_loss_of_equation_1_to_the_bit():
    chosen, rejected = torch.randn(2, 4096, generator=torch.Generator().manual_seed(2)) * 5
    found = graded_reward.margin_loss(chosen, rejected, torch.zeros(4096))
    assert torch.equal(found, reward.preference_loss(chosen, rejected))


def test_safety_loss_and_gradient():
    rewards = torch.tensor([0.3, -1.2, 2.5, 0.8, 90.0, -90.0], dtype=torch.float32, requires_grad=True)
    safe = [1.0, 0.0, 0.0, float("nan"), 1.0, 0.0]
    loss = graded_reward.safety_loss(rewards, torch.tensor(safe))
    loss.sum().backward()
    expected, slopes = [], []
    for r, s in zip(rewards.tolist(), safe, strict=True):
        known = s == s
        expected.append(-(s * math.log(sigmoid(r)) + (1 - s) * math.log(sigmoid(-r))) if known and abs(r) < 50 else 0)
        slopes.append(sigmoid(r) - s if known else 0)
    assert close(loss.detach(), expected, 1e-6) and close(rewards.grad, slopes, 1e-6)


def test_grade_of_a_confidence():
    found = {confidence: graded_reward.confidence_grade(confidence) for confidence in (None, *range(1, 10))}
    by_hand = {1: 0, 9: 0, 2: 1, 8: 1, 3: 2, 7: 2, 4: 3, 6: 3, 5: 3, None: 4}
    assert found == {confidence: GRADES[place] for confidence, place in by_hand.items()}


def test_accuracy_and_gap_by_grade_and_safety():
    columns = ("chosen_reward", "rejected_reward", "grade", "safety")
    rows = [(1.0, 0.5, "better", "both safe"), (0.0, 2.0, "better", None), (3.0, 0.0, "none", "both safe")]
    table = graded_reward.accuracy_table("d", [dict(zip(columns, row, strict=True)) for row in rows])
    assert [tuple(row.values()) for row in table] == [
        ("d", "overall", "all", 3, pytest.approx(2 / 3), pytest.approx(0.5)),
        ("d", "grade", "better", 2, 0.5, -0.75),
        ("d", "grade", "none", 1, 1.0, 3.0),
        ("d", "safety", "both safe", 2, 1.0, 1.75),
        ("d", "safety", "null", 1, 0.0, -2.0),
    ]
    labels = {"chosen_safe": [safe for safe, _ in SAFE[:5]], "rejected_safe": [safe for _, safe in SAFE[:5]]}
    graded = graded_reward.pair_table(labels | {"grade": GRADES}, torch.zeros(5, 2))
    bins = [pair["safety"] for pair in graded]
    assert bins == ["chosen alone safe", "both safe", "both unsafe", None, None]


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
    ("margin", "columns", "message"),
    [
        ("small", {"grade": ["better", "huge"]}, "here, train, row 1: grade 'huge' is none of"),
        ("small", {"grade": ["better", None]}, "here, train, row 1: grade None is none of"),
        ("column", {"margin": [0.0, -0.5]}, "here, train, row 1: margin -0.5 is not a number"),
        ("column", {"margin": [None, 0.5]}, "here, train, row 0: margin nan is not a number"),
        ("column", {"grade": ["better"]}, "here has no column margin; it has"),
        ("large", {"margin": [0.5]}, "here has no column grade or extra.confidence"),
        ("large", {"grade": ["none", "none"]}, "no pair of here has a grade, so that no margin would be above 0"),
    ],
)
def test_bad_margins(margin, columns, message):
    with pytest.raises(SystemExit) as error:
        graded_reward.pair_margins("here", pairs(**columns), margin)
    assert message in str(error.value)


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


def test_tables_by_grade_and_safety(world, graded, capsys):
    """And what is printed of pairs left out and ties; test_gradients.py holds the training against numbers by hand."""
    found = run(world, graded, "tables", margin="column")
    # the unsafe chosen are left out of every split, and counted; the safety bins and grades are in the table
    printed = capsys.readouterr().out
    for split, rows in graded.data.items():
        count = sum(SAFE[i % 6] == (False, True) for i in range(len(rows)))
        assert count and f"{split}: {count} pairs left out, because only the chosen response is unsafe" in printed
    ties = sum(row["weight"] != 1 for row in graded.train)
    assert f"{ties} of the {len(graded.train)} train pairs have a weight other than 1" in printed
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
    with pytest.raises(SystemExit, match=f"--safety-coef {coef}: use at least 0, and data with chosen_safe and rej"):
        run(world, graded, "bad", **data, safety_coef=coef)
    assert not (graded.root / "bad").exists()


@pytest.mark.parametrize("module", [reward, dpo], ids=["reward.py", "dpo.py"])
def test_what_reads_no_weights_refuses_halved_ties_alone(world, graded, monkeypatch, module):
    monkeypatch.setattr(module, "begin_run", lambda *_: module.fail("far enough"))
    graded.data.map(lambda row: {"weight": 1.0}).save_to_disk(graded.root / f"whole_{module.__name__}")
    for folder, message in ((graded.folder, "pairs with weights other than 1 need llama2"), (None, "far enough")):
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


def test_ppo_with_a_safety_gate(world, tmp_path, monkeypatch):
    base, batch, updates = make_talker(world, tmp_path / "sft", eos=0.12), 16, 2
    members = [save_reward(tmp_path / f"member_{seed}", base, seed) for seed in (1, 2)]
    data = load_from_disk(str(world.dataset))
    data = data.map(lambda row, i: {"tag": ("helpfulness", "safety")[i % 2]}, with_indices=True)
    data.save_to_disk(tmp_path / "data")
    scored, placed = record(monkeypatch, ppo, "member_scores"), record(monkeypatch, ppo, "token_rewards")
    orders = record(monkeypatch, ppo, "data_order")
    AcceleratorState._reset_state(True)
    args = {"model": "nano", "seed": SEED, "sft_model_path": str(base), "sample_every": 0, "response_length": 12}
    args |= {"dataset": str(tmp_path / "data"), "batch_size": batch, "total_episodes": batch * updates, "eval_rows": 4}
    args |= {"reward_model_paths": [str(x) for x in members], "reward_combination": "safety_gate"}
    args |= {"learning_rate": 3e-6, "final_learning_rate": 1e-6}
    args |= {"value_start": "reward", "standardise_members": False}
    ppo.main(ppo.Args(**args, output_dir=str(tmp_path / "run")))
    eos = reward.load_tokenizer(str(base)).eos_token_id
    streams = [call.result.tolist() for call in orders if call.args[1] == SEED]
    lines, ruled = read_metrics(tmp_path / "run"), []
    assert len(placed) == len(streams) == len(lines) == updates == len(scored) - 1
    for line, seen, given, order in zip(lines, scored[:-1], placed, streams, strict=True):
        helpful, safety = seen.result.T.tolist()
        gates = [sigmoid(s) < 0.15 or i % 2 == 1 for s, i in zip(safety, order, strict=True)]
        ruled += [(gate, i % 2 == 1) for gate, i in zip(gates, order, strict=True)]
        rows = [s if gate else h for h, s, gate in zip(helpful, safety, gates, strict=True)]
        mean = sum(rows) / len(rows)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in rows) / len(rows) + 1e-8)
        assert close(line["objective/score_without_penalty"], mean)  # as the two said, before whitening
        assert close(line["objective/safety_share"], sum(gates) / batch, 1e-6)
        ended = (seen.args[2]["responses"] == eos).any(1).tolist()
        expected = [(x - mean) / deviation if end else -1.0 for x, end in zip(rows, ended, strict=True)]
        assert close(given.args[0], expected)
    assert {(False, False), (True, True)} <= set(ruled) and 0 < sum(ended) < batch
    helpful, safety = scored[-1].result.T.tolist()  # of the validation posts
    rows = [s if sigmoid(s) < 0.15 or i % 2 == 1 else h for i, (h, s) in enumerate(zip(helpful, safety, strict=True))]
    assert close(lines[-1]["eval/score"], sum(rows) / 4)
    assert [line["learning_rate"] for line in lines] == pytest.approx([3e-6, 2e-6], rel=1e-12)  # linear to 1e-6
