"""eval/figures.py: every number that a figure shows, against hand-made runs."""

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
    settings = {
        "model": "x",
        "dataset": "nowhere",
        "preference_dataset": str(root / "pairs"),
        "command": f"python {kind}.py -x",
    }
    (folder / "args.json").write_text(json.dumps(settings))
    lines = [
        {"update": u, "episode": 8 * u} | {key: value(kind, model, seed, key, u) for key in KEYS[kind]}
        for u in (1, 2, 3)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if kind in WORDS:
        longer = stage == "ppo_whiten" or (stage, model, seed) == ("ppo", "6.9b", 2)
        words = [(m + longer, n) for m, n in WORDS[kind]]
        rows = [
            {"id": f"v{i}", "query": "q", "response": " s" * m, "reference": " r" * n, "response_tokens": m + 1}
            for i, (m, n) in enumerate(words)
        ]
        write_csv(folder / "eval" / "samples_validation.csv", rows)
        tokens = 10.0 * MODELS.index(model) + seed
        write_csv(
            folder / "eval" / "rouge.csv",
            [
                {"split": "test", "rougeL": -1, "response_tokens": -1},
                {"split": "validation", "rougeL": 0.1 * seed, "response_tokens": tokens},
            ],
        )
    if kind in ("reward", "dpo"):
        rows = [
            {"data": data, "group": group, "value": "all", "accuracy": ACCURACY[model, seed] - less}
            for data, group, less in (
                ("validation", "overall", 0),
                ("validation", "batch", 0.3),
                ("validation_cnndm", "overall", 0.25),
            )
        ]
        write_csv(folder / "eval" / "accuracy.csv", rows)
        right = round(4 * ACCURACY[model, seed])
        rows = [{"batch": "b", "chosen_reward": 1.0 if i < right else -1.0, "rejected_reward": 0} for i in range(4)]
        write_csv(folder / "eval" / "pairs_validation.csv", rows)


def in_process(command: list[str]) -> SimpleNamespace:
    """A script of ours by its command line, without the seconds that a process of its own takes to begin."""
    module = importlib.import_module(Path(command[1]).stem)
    try:
        module.main(tyro.cli(module.Args, args=command[2:]))
    except SystemExit:
        return SimpleNamespace(returncode=1)
    return SimpleNamespace(returncode=0)


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
    args = figures.Args(MODELS, SEEDS, str(root / "runs"), str(root / "out"), f"{root}/words.py:score", pdf=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "Figure", lambda layout, **settings: Figure(**settings))  # the layout takes most time
        patch.setattr(figures, "subprocess", SimpleNamespace(run=in_process))
        patch.setattr(sys, "argv", ["eval/figures.py", "--models", "6.9b", "s"])
        figures.main(args)
    return args, root / "out"


def read(drawn, number: int) -> pandas.DataFrame:
    return pandas.read_csv(drawn[1] / f"figure_{number}.csv", keep_default_na=False, na_values=[""])


def test_each_figure_is_there_as_png_pdf_and_csv(drawn):
    names = {path.name for path in drawn[1].glob("figure_*")}
    there = [f"figure_{i}.{kind}" for i in (1, 4, 5, 7, 8, 10, 11, 12, 13) for kind in ("png", "pdf", "csv")]
    assert names == set(there)  # figure 9 needs models, which these runs lack
    for name in there:
        start = {"png": b"\x89PNG", "pdf": b"%PDF", "csv": b"panel,series"}[name[-3:]]
        assert (drawn[1] / name).read_bytes().startswith(start)


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
    rows = figures.curves_panel({("sft", "m", 1): lines}, "sft", figures.Args(("m",), (1,)), "k", "t").rows
    assert len(rows) == figures.POINTS and rows[0] | {"y": 0} == {"series": "m", "x": 2, "y": 0, "sd": 0.0, "n": 1}
    assert rows[-1]["x"] == 2000 and rows[-1]["y"] == pytest.approx(sum(u % 7 for u in range(951, 1001)) / 50)
    row = rows[1]  # before there are 50 updates, of those that there are
    assert row["y"] == pytest.approx(numpy.mean([u % 7 for u in range(1, row["x"] // 2 + 1)]))


def test_curves_of_runs_of_different_length_end_with_the_shorter():
    runs = {("sft", "m", seed): [{"episode": u, "k": 1.0 * seed} for u in range(1, n)] for seed, n in ((1, 4), (2, 9))}
    rows = figures.curves_panel(runs | {("sft", "m", 3): []}, "sft", figures.Args(("m",), (1, 2, 3)), "k", "t").rows
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
    bars = eleventh[eleventh["series"] == "PPO, whitened rewards"]
    assert bars[["x", "y"]].to_numpy().tolist() == [["s", pytest.approx(whitened, rel=1e-5)]]
    points = eleventh[eleventh["series"] == "PPO, whitened rewards s"]
    assert points[["x", "y"]].astype(float).to_numpy().tolist() == [[12.0, pytest.approx(whitened, rel=1e-5)]]
    points = eleventh[eleventh["series"] == "PPO 6.9b"]
    assert points["x"].astype(float).tolist() == [1.0, 2.0]
    twelfth = read(drawn, 12)
    expected = {"SFT": 4, "DPO": 2, "PPO": 4, "PPO, whitened rewards": 1}
    left = twelfth[twelfth["panel"].isna()]["series"].str.rsplit(" ", n=1).str[0]
    assert left.value_counts().to_dict() == expected
    assert set(twelfth["panel"].dropna()) == {"s, seed 1"}  # one run of the largest model


def test_win_rates_by_length_ratio(drawn):
    """Log ratios of PPO's three examples: log 2, log 3, log 1/2; of three bins, the outer ones have no end."""
    frame = read(drawn, 13)
    assert list(dict.fromkeys(frame["panel"])) == [f"{m}, seed {s}" for m in MODELS for s in SEEDS]
    rows = frame[(frame["panel"] == "6.9b, seed 1") & (frame["series"] == "PPO")]
    assert math.log(2) > 0.5 and math.log(3) > 1 and -1 < math.log(1 / 2) < -0.5
    assert rows[["x", "y", "n"]].to_numpy().tolist() == [[-0.75, 0.0, 1], [0.75, 1.0, 1], [1.25, 1.0, 1]]
    assert rows["sd"].isna().all()


def test_the_table_and_what_is_missing(drawn):
    text = (drawn[1] / "figures.md").read_text()
    lines = text.splitlines()
    assert lines[2] == "`python eval/figures.py --models 6.9b s`"
    sd = statistics.stdev([0.5, 0.75])
    assert f"| RM accuracy, validation | 6.9b | 0.689 ± 0.004 | 0.625 ± {sd:.3f} | 2 |" in lines
    assert f"| RM accuracy, validation_cnndm | 6.9b | 0.686 ± 0.003 | 0.375 ± {sd:.3f} | 2 |" in lines
    assert f"| agreement with the judge | 6.9b | 0.767 | 0.875 ± {sd:.3f} | 2 |" in lines
    assert "| best PPO win rate | 6.9b | 0.800 | 0.833 | 2 |" in lines
    assert not [line for line in lines if line.startswith("| RM accuracy") and "| s |" in line]
    ppo = next(line for line in lines if line.startswith("| PPO | s |"))
    cells = [cell.strip() for cell in ppo.strip("|").split("|")]
    assert cells[2:4] == ["2", "0.667 ± 0.000"] and cells[5:] == ["11.500 ± 0.707", "0.150 ± 0.071"]
    runs = drawn[0].runs
    assert f"- {runs}/dpo/s: seeds 1, 2; the first: `python dpo.py --model s --seed 1 --run-eval`" in lines
    whiten = f"`python ppo.py --model s --seed 1 --whiten-rewards --output-dir {runs}/ppo_whiten/s/1`"
    assert f"- {runs}/ppo_whiten/s: seeds 1; the first: {whiten}" in lines
    assert len([line for line in lines if line.startswith(f"- {runs}")]) == 3
    for problem in ("- visualize_tokens.py stopped", "- figure_9: nothing to draw"):
        assert problem in text


def test_win_rate_at_equal_length(drawn):
    """SFT wins 0, 1, 1/2 at -log 2, log 2, 0: the curve is symmetric, 1/2."""
    lines = (drawn[1] / "figures.md").read_text().splitlines()
    sft = next(line for line in lines if line.startswith("| SFT | 6.9b |"))
    assert sft.split("|")[5].strip() == "0.500 ± 0.000"


def test_a_script_beside_it_ends_well_or_not(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(figures, "__file__", str(tmp_path / "figures.py"))
    (tmp_path / "other.py").write_text("import sys; print('told', sys.argv[1:]); sys.exit(len(sys.argv) - 2)")
    problems = []
    assert figures.tool(problems, "other.py", 1) and not figures.tool(problems, "other.py", 1, Path("x"))
    assert "told ['1', 'x']\n" in capfd.readouterr().out and problems == ["other.py stopped with an error"]


def test_figure_1_has_a_line_at_a_half():
    axis = Figure().subplots()
    rows = [{"series": "PPO", "x": "s", "y": 0.7}, {"series": "PPO", "x": "s", "y": 0.9}]
    study = figures.Study(
        figures.Args(("s",)), {}, pandas.DataFrame(columns=["stage", "model", "seed", "win rate"]), {}
    )
    [panel] = figures.FIGURES["figure_1"][2](study)
    figures.draw_panel(axis, panel._replace(rows=rows), study.args)
    lines = [list(line.get_ydata()) for line in axis.lines]
    assert [0.5, 0.5] in lines and [pytest.approx(0.8)] in lines  # and the mean of the seeds


def test_no_runs_at_all_is_an_error(tmp_path):
    with pytest.raises(SystemExit, match="no runs of 6.9b, s there"):
        figures.main(figures.Args(MODELS, SEEDS, str(tmp_path), str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()
