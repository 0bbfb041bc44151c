"""eval/figures.py: every number that a figure shows, against hand-made runs."""

import os
import subprocess
import sys
from pathlib import Path

import eval_helpers
import figures
import judge
import numpy
import pandas
import pytest
import rm_report
import tyro
import visualize_tokens
from conftest import ROOT, write_csv, write_jsonl, write_program
from matplotlib.figure import Figure

KEYS = {
    "sft": ["loss/train"],
    "reward": ["accuracy/train", "loss/train", "rewards/chosen"],
    "ppo": ["objective/rlhf_reward", "objective/kl", "objective/score", "response/length"],
    "dpo": ["accuracy/train", "loss/train", "rewards/chosen"],
}
MODELS, SEEDS = ("6.9b", "s"), (1, 2)
ACCURACY = {("6.9b", 1): 0.5, ("6.9b", 2): 0.75, ("s", 1): 0.75, ("s", 2): 1.0}
AGREEMENT = {("6.9b", 1): 0.75, ("6.9b", 2): 1.0, ("s", 1): 1.0, ("s", 2): 0.8}
# per model and seed, of each stage
RATES = {"sft": [0.5, 0.5, 0.4, 0.6], "ppo": [0.7, 0.8, 0.6, 0.6], "dpo": [0.55, 0.65], "ppo_whiten": [0.9]}


def make_run(root: Path, stage: str, model: str, seed: int):
    folder, kind = root / stage / model / str(seed), stage.removesuffix("_whiten")
    folder.mkdir(parents=True)
    (folder / "args.json").write_text("{}")
    keys, start = KEYS[kind], 10 * MODELS.index(model)
    rows = [{"update": u, "episode": 8 * u} | {x: start + seed * u + len(x) for x in keys} for u in (1, 2, 3)]
    write_jsonl(folder / "metrics.jsonl", rows)
    if stage != "reward":
        rate = RATES[stage][0 if stage == "ppo_whiten" else 2 * MODELS.index(model) + seed - 1]
        write_csv(folder / "eval/samples_validation.csv", [{"id": 1}])
        judged = {"samples": eval_helpers.digest_of(folder / "eval/samples_validation.csv")}
        rows = [{"win_rate": rate, "length_controlled_win_rate": rate / 2} | judged]
        write_csv(folder / "eval" / "judge_a-b.py-score_rates.csv", rows)
        tokens = 10.0 * MODELS.index(model) + seed
        rows = [{"split": "test", "rougeL": -1, "response_tokens": -1}]
        rows.append({"split": "validation", "rougeL": 0.1 * seed, "response_tokens": tokens})
        write_csv(folder / "eval" / "rouge.csv", rows)
    if kind in ("reward", "dpo"):
        less = {("validation", "overall"): 0, ("validation", "batch"): 0.3, ("validation_cnndm", "overall"): 0.25}
        rows = [{"data": data, "group": group, "value": "all"} for data, group in less]
        rows = [row | {"accuracy": ACCURACY[model, seed] - x} for row, x in zip(rows, less.values(), strict=True)]
        write_csv(folder / "eval" / "accuracy.csv", rows)
    if (stage, model, seed) == ("ppo", "6.9b", 1):
        ends = [(-numpy.inf, -1, 0.1), (-1, -0.5, 0.2), (1, numpy.inf, 0.3)]
        rows = [{"from": a, "to": b, "win_rate": win, "se": win / 10, "examples": 7} | judged for a, b, win in ends]
        write_csv(folder / "eval" / "judge_a-b.py-score_bins.csv", rows)


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
    rows = [{"model": m, "seed": s, "agreement": x} for (m, s), x in AGREEMENT.items()]
    write_csv(root / "out" / "rm_report_agreement.csv", rows)
    rows = [{"model": m, "pairs": 3, "difference": x, "accuracy": 0.5 + x / 9} for m in MODELS for x in (1.0, 2.0)]
    write_csv(root / "out" / "rm_report_calibration.csv", rows)
    shown = [(3, "sft", "x", 0.5), (3, "ppo", " $$\n", 1.5), (4, "ppo", "y", 2.5)]
    rows = [{"id": i, "model": m, "position": 0, "token": t, "value": x, "token_reward": -x} for i, m, t, x in shown]
    rows = [row | {"reward_logit": ""} for row in rows]
    write_csv(root / "out" / "tokens_tokens.csv", rows)
    args = figures.Args(MODELS, SEEDS, str(root / "runs"), str(root / "out"), "a/b.py:score")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "Figure", lambda layout, **settings: Figure(**settings))  # the layout takes most time
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
            start = 10 * MODELS.index(model) + len(key)
            assert rows["x"].astype(float).tolist() == [8, 16, 24] and rows["n"].tolist() == [2] * 3
            assert rows["y"].tolist() == [start + 1.5 * u for u in (1, 2, 3)]
            assert rows["sd"].tolist() == pytest.approx([u / 2**0.5 for u in (1, 2, 3)], rel=1e-5)


def test_a_long_curve_is_a_moving_mean_at_few_points_and_ends_with_the_shorter_run():
    lines = [{"episode": 2 * u, "loss/train": float(u % 7)} for u in range(1, 1001)]
    lines = [{"update": 0, "loss/eval": 1.0}, *lines]  # before the first update, as sft.py
    args = figures.Args(("m",), (1, 2, 3))  # no seed 3
    rows = figures.learning_curves(args, {("sft", "m", 1): lines}, "sft")["training loss"]["m"].to_dict("records")
    assert len(rows) == figures.POINTS and rows[0] | {"y": 0} == {"x": 2, "y": 0, "sd": 0.0, "n": 1}
    assert rows[-1]["x"] == 2000 and rows[-1]["y"] == pytest.approx(sum(u % 7 for u in range(951, 1001)) / 50)
    row = rows[1]  # before there are 50 updates, of those that there are
    assert row["y"] == pytest.approx(numpy.mean([u % 7 for u in range(1, row["x"] // 2 + 1)]))
    rows = [{"update": u, "episode": u, "loss/train": 1.0} for u in range(1, 9)]
    runs = {("sft", "m", 1): rows[:3], ("sft", "m", 2): [row | {"loss/train": 2.0} for row in rows]}
    table = figures.learning_curves(args, runs, "sft")["training loss"]["m"]
    assert table[["x", "y", "n"]].values.tolist() == [[1, 1.5, 2], [2, 1.5, 2], [3, 1.5, 2]]
    missing = figures.missing_runs(args, runs)[:2]
    assert missing == ["runs/sft/m/1 ends after 3 of 8 updates, so the mean curves end there", "no run runs/sft/m/3"]


def test_accuracies_and_rouge_by_size_with_the_paper_s_where_it_has_them(drawn):
    frame = read(drawn, 5)
    for panel, less, paper in ((figures.VALIDATION, 0, [0.689, 0.004]), (figures.CNNDM, 0.25, [0.686, 0.003])):
        rows = frame[(frame["panel"] == panel) & (frame["series"] == "reward model")]
        found = {(row.x, int(row.seed)): row.y for row in rows.itertuples()}
        assert found == {key: accuracy - less for key, accuracy in ACCURACY.items()}
        rows = frame[frame["series"] == f"paper, {panel}"]
        assert rows[["x", "y", "sd"]].to_numpy().tolist() == [["6.9b", *paper]]
    rouge = read(drawn, 4)
    rouge = rouge[rouge["panel"] == "ROUGE-L"]
    assert rouge["x"].tolist() == ["6.9b"] * 2 + ["s"] * 2 and rouge["y"].tolist() == [0.1, 0.2] * 2
    seventh = read(drawn, 7)
    assert seventh[seventh["series"] == "reward model"]["y"].tolist() == [*AGREEMENT.values()]
    curve = seventh[(seventh["series"] == "s") & (seventh["panel"] == "accuracy by score difference")]
    assert curve[["x", "y", "n"]].astype(float).values.tolist() == [[1.0, 0.611111, 3], [2.0, 0.722222, 3]]
    implicit = read(drawn, 8)
    implicit = implicit[(implicit["series"] == "DPO") & (implicit["panel"] == figures.VALIDATION)]
    assert implicit["y"].tolist() == [0.5, 0.75] and set(implicit["x"]) == {"6.9b"}


def test_win_rates_by_size_length_and_length_ratio_and_tokens(drawn):
    first = read(drawn, 1)
    for stage, name in (("sft", "SFT"), ("ppo", "PPO"), ("dpo", "DPO")):
        assert first[first["series"] == name]["y"].tolist() == RATES[stage]
    eleventh = read(drawn, 11)
    points = eleventh[eleventh["series"] == "PPO, whitened rewards s"]
    assert points[["x", "y"]].astype(float).to_numpy().tolist() == [[12.0, 0.9]]
    assert eleventh[eleventh["series"] == "PPO 6.9b"]["x"].astype(float).tolist() == [1.0, 2.0]
    rows = read(drawn, 13)  # the outer bins have no end
    assert set(rows["panel"]) == {"6.9b, seed 1"} and set(rows["series"]) == {"PPO"}
    found = rows[["x", "y", "sd", "n"]].to_numpy().tolist()
    assert found == [[-1.25, 0.1, 0.01, 7], [-0.75, 0.2, 0.02, 7], [1.25, 0.3, 0.03, 7]]
    ninth = read(drawn, 9)  # the tokens of the first PPO response
    found = ninth[["series", "x", "y", "label"]].values.tolist()
    assert found == [["token_reward", 0, -1.5, " $$\\n"], ["value", 0, 1.5, " $$\\n"]]


def test_the_numbers_of_the_table(drawn):
    lines = (drawn[1] / "figures.md").read_text().splitlines()
    assert "| RM accuracy, validation | 6.9b | 0.689 ± 0.004 | 0.625 ± 0.177 | 2 |" in lines  # 0.25 / sqrt 2
    assert "| agreement with the judge | 6.9b | 0.767 | 0.875 ± 0.177 | 2 |" in lines
    assert "| best PPO win rate | 6.9b | 0.800 | 0.800 | 2 |" in lines
    assert "| PPO | s | 2 | 0.600 ± 0.000 | 0.300 ± 0.000 | 11.500 ± 0.707 | 0.150 ± 0.071 |" in lines
    missing = {line.removeprefix(f"- no run {drawn[0].runs}/") for line in lines if line.startswith("- no run")}
    assert missing == {"dpo/s/1", "dpo/s/2", "ppo_whiten/6.9b/1", "ppo_whiten/6.9b/2", "ppo_whiten/s/1"}


def test_figures_sh_calls_the_tools_with_flags_that_they_know(tmp_path):
    """python is a stand-in that logs its arguments. Of two models, the last one's tokens are shown."""
    for run in ("sft/a", "sft/b", "ppo/b", "reward/b"):
        write_csv(tmp_path / "runs" / run / "1" / "eval" / "samples_validation.csv", [{"id": 1}])
    write_program(tmp_path / "python", '#!/bin/sh\nfor x; do printf "%s\\t" "$x"; done >> log\necho >> log\n')
    environment = {"MODELS": "a b", "SEEDS": "1 2", "DATA": "d", "JUDGE": "x/y.py:score"}
    environment["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run(["bash", ROOT / "eval/figures.sh"], cwd=tmp_path, env=os.environ | environment, check=True)
    calls = [line.split("\t")[:-1] for line in (tmp_path / "log").read_text().splitlines()]
    tools = {"judge": judge, "rm_report": rm_report, "visualize_tokens": visualize_tokens, "figures": figures}
    stems = [Path(call[0]).stem for call in calls]
    assert stems == ["rm_report", "judge", "rm_report", "visualize_tokens", "figures"]
    args = [tyro.cli(tools[stem].Args, args=call[1:]) for stem, call in zip(stems, calls, strict=True)]
    samples = [f"runs/{x}/1/eval/samples_validation.csv" for x in ("sft/a", "sft/b", "ppo/b")]
    assert args[1] == judge.Args((*samples, "runs/pairs_validation.csv"), "x/y.py:score")
    assert args[2].judged == "runs/judge_x-y.py-score_of_pairs_validation.csv"
    assert args[2].preference_dataset == args[0].preference_dataset == "d/preference"
    assert (args[3].ppo, args[3].dpo) == ("runs/ppo/b/1", None)
    assert args[4] == figures.Args(("a", "b"), (1, 2), "runs", "runs/figures", "x/y.py:score")


def test_win_rates_of_older_samples_are_left_out(tmp_path, capsys):
    samples = tmp_path / "eval/samples_validation.csv"
    samples.parent.mkdir()
    samples.write_text("id\n1\n")
    write_csv(tmp_path / "eval/judge_j_rates.csv", [{"win_rate": 0.7, "samples": eval_helpers.digest_of(samples)}])
    assert figures.read_judged(tmp_path, "j", "rates")["win_rate"].tolist() == [0.7]
    samples.write_text("id\n2\n")
    assert figures.read_judged(tmp_path, "j", "rates").empty and "judge_j_rates.csv is stale" in capsys.readouterr().out
    write_csv(tmp_path / "eval/judge_j_rates.csv", [{"win_rate": 0.7}])  # of an older version: it does not say
    assert figures.read_judged(tmp_path, "j", "rates").empty and "judge_j_rates.csv is stale" in capsys.readouterr().out
    assert figures.read_judged(tmp_path, "k", "rates").empty and not capsys.readouterr().out  # there is none


def test_a_figure_without_data_does_not_stay(tmp_path):
    table = pandas.DataFrame({"x": [1, 2], "y": [3, 4]})
    assert figures.write_figure(tmp_path / "figure_1", "", "", {"a": {"b": table}}, ())
    assert {path.name for path in tmp_path.iterdir()} == {"figure_1.png", "figure_1.csv"}
    assert not figures.write_figure(tmp_path / "figure_1", "", "", {"a": {"b": table[:0]}}, ())
    assert not [*tmp_path.iterdir()]
