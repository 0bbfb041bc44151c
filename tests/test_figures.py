"""eval/figures.py: every number that a figure shows, against hand-made runs."""

import contextlib
import importlib
import json
import math
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import figures
import numpy
import pandas
import pytest
import tyro
from conftest import write_csv
from datasets import Dataset, DatasetDict
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
KEYS = {
    "sft": ["loss/train"],
    "reward": ["accuracy/train", "loss/train", "rewards/chosen"],
    "ppo": ["objective/rlhf_reward", "objective/kl", "objective/score", "response/length"],
    "dpo": ["accuracy/train", "loss/train", "rewards/chosen"],
}
MODELS, SEEDS = ("6.9b", "s"), (1, 2)
ACCURACY = {("6.9b", 1): 0.5, ("6.9b", 2): 0.75, ("s", 1): 0.75, ("s", 2): 1.0}
# words of summary and reference, example by example; the judge of the tests prefers more words
WORDS = {"sft": [(1, 2), (2, 1), (3, 3)], "ppo": [(2, 1), (3, 1), (1, 2)], "dpo": [(1, 2), (1, 3), (4, 1)]}


def value(stage: str, model: str, seed: int, key: str, update: int) -> float:
    """Of a metric in the hand-made runs."""
    return KEYS[stage].index(key) * 100 + MODELS.index(model) * 10 + seed * update


def make_run(root: Path, stage: str, model: str, seed: int):
    folder, kind = root / stage / model / str(seed), stage.removesuffix("_whiten")
    folder.mkdir(parents=True)
    settings = {"model": "x", "dataset": "nowhere", "preference_dataset": str(root / "pairs")}
    (folder / "args.json").write_text(json.dumps(settings))
    lines = [
        {"update": u, "episode": 8 * u} | {key: value(kind, model, seed, key, u) for key in KEYS[kind]}
        for u in (1, 2, 3)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if kind in WORDS:
        longer = stage == "ppo_whiten" or (stage, model, seed) == ("ppo", "6.9b", 2)
        words = [(m + longer, n) for m, n in WORDS[kind]]
        rows = [{"id": i, "query": "q", "response": " s" * m, "reference": " r" * n} for i, (m, n) in enumerate(words)]
        write_csv(folder / "eval" / "samples_validation.csv", rows)
        tokens = 10.0 * MODELS.index(model) + seed
        rows = [{"split": "test", "rougeL": -1, "response_tokens": -1}]
        rows.append({"split": "validation", "rougeL": 0.1 * seed, "response_tokens": tokens})
        write_csv(folder / "eval" / "rouge.csv", rows)
    if kind in ("reward", "dpo"):
        less = {("validation", "overall"): 0, ("validation", "batch"): 0.3, ("validation_cnndm", "overall"): 0.25}
        rows = [{"data": data, "group": group, "value": "all"} for data, group in less]
        rows = [row | {"accuracy": ACCURACY[model, seed] - x} for row, x in zip(rows, less.values(), strict=True)]
        write_csv(folder / "eval" / "accuracy.csv", rows)
        right = round(4 * ACCURACY[model, seed])
        rows = [{"batch": "b", "chosen_reward": 1.0 if i < right else -1.0, "rejected_reward": 0} for i in range(4)]
        write_csv(folder / "eval" / "pairs_validation.csv", rows)


def in_process(command: list[str]):
    """A script of ours by its command line, without the seconds that a process of its own takes to begin."""
    module = importlib.import_module(Path(command[1]).stem)
    with contextlib.suppress(SystemExit):
        module.main(tyro.cli(module.Args, args=command[2:]))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """(Args, folder of what figures.py wrote) of runs of two models and two seeds; of whitened ones there is one, and
    of DPO none of model s."""
    root = tmp_path_factory.mktemp("figures")
    for stage in ("sft", "reward", "ppo", "dpo"):
        for model in MODELS[: 1 if stage == "dpo" else 2]:
            for seed in SEEDS:
                make_run(root / "runs", stage, model, seed)
    make_run(root / "runs", "ppo_whiten", "s", 2)
    lengths = [(3, 2), (2, 1), (5, 1), (1, 4)]  # of chosen and rejected, in words: the judge would have it so thrice
    rows = [{"query": "q", "chosen": " c" * m, "rejected": " r" * n} for m, n in lengths]
    DatasetDict({"validation": Dataset.from_list(rows)}).save_to_disk(root / "runs" / "pairs")
    (root / "words.py").write_text("def score(post, summary):\n    return len(summary.split())\n")
    args = figures.Args(MODELS, SEEDS, str(root / "runs"), str(root / "out"), f"{root}/words.py:score")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "Figure", lambda layout, **settings: Figure(**settings))  # the layout takes most time
        patch.setattr(figures, "subprocess", SimpleNamespace(run=in_process))
        patch.setattr(sys, "argv", ["eval/figures.py", "--models", "6.9b", "s"])
        figures.main(args)
    return args, root / "out"


def read(drawn, number: int) -> pandas.DataFrame:
    return pandas.read_csv(drawn[1] / f"figure_{number}.csv", keep_default_na=False, na_values=[""])


@pytest.mark.parametrize(("number", "stage"), [(4, "sft"), (5, "reward"), (8, "dpo"), (10, "ppo")])
def test_learning_curves(drawn, number, stage):
    frame = read(drawn, number)
    panels = list(dict.fromkeys(frame["panel"]))[: len(KEYS[stage])]
    for panel, key in zip(panels, KEYS[stage], strict=True):
        for model in MODELS[: 1 if stage == "dpo" else 2]:
            rows = frame[(frame["panel"] == panel) & (frame["series"] == model)]
            each = [[value(stage, model, seed, key, update) for seed in SEEDS] for update in (1, 2, 3)]
            assert rows["x"].astype(float).tolist() == [8, 16, 24] and rows["n"].tolist() == [2] * 3
            assert rows["y"].tolist() == [statistics.mean(values) for values in each]
            assert rows["sd"].tolist() == pytest.approx([statistics.stdev(values) for values in each], rel=1e-5)


def test_a_long_curve_is_a_moving_mean_at_few_points():
    lines = [{"episode": 2 * u, "k": float(u % 7)} for u in range(1, 1001)]
    lines = [{"update": 0, "loss/eval": 1.0}, *lines]  # before the first update, as sft.py
    rows = figures.curves_panel({("sft", "m", 1): lines}, "sft", figures.Args(("m",), (1,)), "k", "t").rows
    assert len(rows) == figures.POINTS and rows[0] | {"y": 0} == {"series": "m", "x": 2, "y": 0, "sd": 0.0, "n": 1}
    assert rows[-1]["x"] == 2000 and rows[-1]["y"] == pytest.approx(sum(u % 7 for u in range(951, 1001)) / 50)
    row = rows[1]  # before there are 50 updates, of those that there are
    assert row["y"] == pytest.approx(numpy.mean([u % 7 for u in range(1, row["x"] // 2 + 1)]))


def test_curves_of_runs_of_different_length_end_with_the_shorter():
    runs = {("sft", "m", seed): [{"episode": u, "k": 1.0 * seed} for u in range(1, n)] for seed, n in ((1, 4), (2, 9))}
    rows = figures.curves_panel(runs, "sft", figures.Args(("m",), (1, 2, 3)), "k", "t").rows  # seed 3 has no metrics
    assert [(row["x"], row["y"], row["n"]) for row in rows] == [(1, 1.5, 2), (2, 1.5, 2), (3, 1.5, 2)]


def win(m: int, n: int) -> float:
    return (m > n) + 0.5 * (m == n)


def test_accuracies_and_rouge_by_size_with_the_paper_s_where_it_has_them(drawn):
    frame = read(drawn, 5)
    frame = frame[frame["panel"] == "accuracy"]
    for series, less in (("TL;DR", 0), ("CNN/DM", 0.25)):
        rows = frame[frame["series"] == series]
        found = {(row.x, int(row.seed)): row.y for row in rows.itertuples()}
        assert found == {key: accuracy - less for key, accuracy in ACCURACY.items()}
    papers = frame[frame["series"].str.startswith("paper")]
    assert papers[["x", "y", "sd"]].to_numpy().tolist() == [["6.9b", 0.689, 0.004], ["6.9b", 0.686, 0.003]]
    rouge = read(drawn, 4)
    rouge = rouge[rouge["panel"] == "ROUGE-L, validation"]
    assert [(row.x, int(row.seed), row.y) for row in rouge.itertuples()] == [
        (model, seed, pytest.approx(0.1 * seed)) for model in MODELS for seed in SEEDS
    ]
    agreement = read(drawn, 7)
    agreement = agreement[agreement["series"] == "reward model"]
    assert agreement["y"].tolist() == [0.75, 1.0, 1.0, 0.75]  # of the judge's 1, 1, 1, 0
    implicit = read(drawn, 8)
    implicit = implicit[implicit["series"] == "DPO, implicit"]
    assert implicit["y"].tolist() == [0.5, 0.75] and set(implicit["x"]) == {"6.9b"}


def test_win_rates_by_size_and_length(drawn):
    rates = {stage: sum(win(*pair) for pair in words) / 3 for stage, words in WORDS.items()}
    whitened = sum(win(m + 1, n) for m, n in WORDS["ppo"]) / 3
    assert rates["ppo"] == pytest.approx(2 / 3) and whitened == pytest.approx(5 / 6)
    first = read(drawn, 1)
    for stage, name in (("sft", "SFT"), ("ppo", "PPO"), ("dpo", "DPO")):
        mine, expected = first[first["series"] == name]["y"].tolist(), [rates[stage]] * (2 if stage == "dpo" else 4)
        if stage == "ppo":
            expected[1] = whitened  # its responses are as long
        assert mine == pytest.approx(expected, rel=1e-5)
    eleventh = read(drawn, 11)
    points = eleventh[eleventh["series"] == "PPO, whitened rewards s"]
    assert points[["x", "y"]].astype(float).to_numpy().tolist() == [[12.0, pytest.approx(whitened, rel=1e-5)]]
    assert eleventh[eleventh["series"] == "PPO 6.9b"]["x"].astype(float).tolist() == [1.0, 2.0]


def test_win_rates_by_length_ratio(drawn):
    """Log ratios of PPO's three examples: log 2, log 3, log 1/2; of three bins, the outer ones have no end."""
    frame = read(drawn, 13)
    assert list(dict.fromkeys(frame["panel"])) == [f"{m}, seed {s}" for m in MODELS for s in SEEDS]
    rows = frame[(frame["panel"] == "6.9b, seed 1") & (frame["series"] == "PPO")]
    assert math.log(2) > 0.5 and math.log(3) > 1 and -1 < math.log(1 / 2) < -0.5
    assert rows[["x", "y", "n"]].to_numpy().tolist() == [[-0.75, 0.0, 1], [0.75, 1.0, 1], [1.25, 1.0, 1]]
    assert rows["sd"].isna().all()


def test_the_numbers_of_the_table(drawn):
    lines = (drawn[1] / "figures.md").read_text().splitlines()
    sd = statistics.stdev([0.5, 0.75])
    assert f"| RM accuracy, validation | 6.9b | 0.689 ± 0.004 | 0.625 ± {sd:.3f} | 2 |" in lines
    assert f"| agreement with the judge | 6.9b | 0.767 | 0.875 ± {sd:.3f} | 2 |" in lines
    assert "| best PPO win rate | 6.9b | 0.800 | 0.833 | 2 |" in lines
    found = {tuple(row[:2]): row for row in ([x.strip() for x in line.strip("|").split("|")] for line in lines)}
    ppo, sft = found["PPO", "s"], found["SFT", "6.9b"]
    assert ppo[2:4] == ["2", "0.667 ± 0.000"] and ppo[5:] == ["11.500 ± 0.707", "0.150 ± 0.071"]
    assert sft[4] == "0.500 ± 0.000"  # at equal length: SFT wins 0, 1, 1/2 at -log 2, log 2, 0
    missing = {line.removeprefix(f"- no run {drawn[0].runs}/") for line in lines if line.startswith("- no run")}
    assert missing == {"dpo/s/1", "dpo/s/2", "ppo_whiten/6.9b/1", "ppo_whiten/6.9b/2", "ppo_whiten/s/1"}
    assert "- figure_9: nothing to draw" in lines


def test_no_runs_at_all_is_an_error(tmp_path):
    with pytest.raises(SystemExit, match="no runs of 6.9b, s there"):
        figures.main(figures.Args(MODELS, SEEDS, str(tmp_path), str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()
