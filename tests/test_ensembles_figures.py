"""ensembles/figures.py: what it reads, averages, compares and draws, against hand-made runs and plain numbers."""

import json
import shutil
import statistics
from pathlib import Path

import pandas
import pytest
from conftest import script, write_jsonl

figures = script("ensembles/figures.py")  # eval/figures.py has the same name
NS, UPDATES = (1, 4, 16), (0, 2, 5)  # of the curves; 44 episodes in batches of 8 are 5 updates


def write_json(file: Path, settings: dict):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(settings))


def make_best_of_n(name: str, paths: list[str], methods: dict[str, float], seed: int = 1):
    """A folder of best_of_n.py, its rows not sorted: gold of a method 10, 11 and 12 times its factor."""
    folder = Path("runs/best_of_n", name)
    write_json(folder / "args.json", {"reward_model_paths": paths, "gold": "g", "seed": seed})
    rows = [{"method": m, "n": n, "kl": i * 1.5, "gold": (10 + i) * x, "proxy": -i} for m, x in methods.items()
            for i, n in reversed(list(enumerate(NS)))]  # fmt: skip
    pandas.DataFrame(rows).to_csv(folder / "best_of_n.csv", index=False)


def make_ppo(name: str, paths, combination="mean", kl=0.0, seed=1, golds=(1.0, 2.0, 3.0), last: int = 5) -> Path:
    """A run of ppo.py that stops after update `last`; KL is twice, the variance three times the update."""
    folder = Path("runs/ppo", name)
    settings = {"stage": "ppo", "reward_model_paths": paths, "reward_combination": combination}
    settings |= {"kl_coef": kl, "seed": seed, "total_episodes": 44, "batch_size": 8}
    write_json(folder / "args.json", settings)
    updates = range(1, last + 1)
    write_jsonl(folder / "metrics.jsonl", [{"update": x, "objective/reward_model_variance": 3 * x} for x in updates])
    gold = [{"update": x, "gold": y, "score": -x, "kl_k2": 2 * x} for x, y in zip(UPDATES, golds, strict=True)]
    if combination == "uwo":
        gold = [row | {"second_gold": 7 * row["gold"]} for row in gold]
    gold = [row for row in gold if row["update"] <= last]
    pandas.DataFrame(gold).to_csv(folder / "gold.csv", index=False)
    return folder


def a_run(method: str, *golds: float, kl=0.0, seed=1, steps=None, procedure="PPO", variance=()) -> dict:
    steps = list(steps or range(len(golds)))
    run = {"procedure": procedure, "method": method, "kl_coef": kl, "seed": seed, "folder": "folder", "step": steps}
    run |= {"kl": [2.0 * x for x in steps], "gold": [*golds], "variance": [*variance]}
    return run | {"proxy": [-x for x in golds], "second_gold": [], "wins": [], "arm": "centre"}


# ---- reading ---------------------------------------------------------------------------------------------------------


def test_what_is_read(tmp_path, monkeypatch):
    """Three members, their average, PPO of each kind, two tables of best of n; and folders that are none of these."""
    monkeypatch.chdir(tmp_path)
    write_json(Path("warm/args.json"), {"stage": "average"})
    write_json(Path("a/args.json"), {"stage": "reward"})
    make_ppo("single/4", ["a"], seed=4)
    make_ppo("warm", ["warm/model"], kl=0.5)
    folder = make_ppo("uwo", ["a", "b", "c"], "uwo", golds=(3.0, 2.0, 1.0))
    shutil.move(folder, "disk")  # another one
    folder.symlink_to(Path("disk").resolve())
    make_best_of_n("five", ["a", "b"], {"single_1": 7, "single": 1, "mean": 2, "wco": 3, "uwo": 4}, seed=2)
    make_best_of_n("warm", ["warm"], {"single_1": 5, "single": 5}, seed=2)
    write_json(Path("runs/sft/args.json"), {"stage": "sft"})
    write_json(Path("runs/one/args.json"), {"stage": "ppo"})
    found = figures.read_runs(("runs/ppo", "runs/best_of_n", "runs/sft", "runs/one")).itertuples()
    runs = {(run.procedure, run.method): run for run in found}
    methods = ("single", "mean", "wco", "uwo", "warm")
    assert set(runs) == {("PPO", x) for x in ("single", "warm", "uwo")} | {("BoN", x) for x in methods}
    single, warm, uwo = (runs["PPO", x] for x in ("single", "warm", "uwo"))
    assert (single.seed, single.kl_coef, single.variance) == (4, 0, []) and (warm.seed, warm.kl_coef) == (1, 0.5)
    assert (uwo.step, uwo.kl, uwo.gold, uwo.variance) == ([0, 2, 5], [0, 4, 10], [3, 2, 1], [3, 6, 9, 12, 15])
    assert (uwo.second_gold, single.second_gold) == ([21, 14, 7], [])
    assert uwo.proxy == [0, -2, -5] and {run.arm for run in runs.values()} == {"centre"}
    for method, factor in zip(methods, (1, 2, 3, 4, 5), strict=True):
        run = runs["BoN", method]
        assert (run.step, run.kl, run.seed, run.proxy) == ([*NS], [0, 1.5, 3], 2, [0, -1, -2])
        assert run.gold == [10 * factor, 11 * factor, 12 * factor]


def test_an_incomplete_run_is_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_ppo("whole", ["a", "b"])
    make_ppo("killed", ["a", "b"], "wco", last=4)
    (make_ppo("empty", ["a", "b"], "uwo") / "gold.csv").unlink()
    assert figures.read_runs(("runs",))["folder"].tolist() == ["runs/ppo/whole"]


def test_runs_of_two_settings_are_an_error_and_several_single_reward_models_are_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, paths in (("a", ["a"]), ("b", ["b"]), ("mean", ["a", "b"])):
        make_ppo(name, paths)
    make_ppo("other_seed", ["a", "b"], seed=2)
    make_ppo("other_penalty", ["a", "b"], kl=0.1)
    assert len(figures.read_runs(("runs",))) == 5
    make_ppo("again", ["a", "c"])
    with pytest.raises(SystemExit, match="mean, KL penalty 0, seed 1: runs/ppo/again and runs/ppo/mean"):
        figures.read_runs(("runs",))


# ---- means and intervals ---------------------------------------------------------------------------------------------


def test_curves_are_means_over_replicates_at_common_steps():
    runs = [a_run("single", 1, 2, 3, seed=1), a_run("single", 1, 4, 5, seed=1)]  # two members, with mean 1, 3, 4
    runs += [a_run("single", 0, 1, 8, seed=2, steps=(0, 1, 2)), a_run("single", 5, 6, seed=3, steps=(0, 2))]
    line = figures.line_of(pandas.DataFrame(runs))
    assert line["gold"]["mean"].to_dict() == {0: 2, 2: 6}  # (1 + 0 + 5) / 3, (4 + 8 + 6) / 3
    assert line["proxy"]["mean"].to_dict() == {0: -2, 2: -6} and line["kl"]["mean"].to_dict() == {0: 0, 2: 4}
    half = 4.302653 * statistics.stdev([4, 8, 6]) / 3**0.5
    assert line["gold"].loc[2].tolist() == pytest.approx((6, 6 - half, 6 + half))
    assert "second_gold" not in line and "variance" not in line


def test_which_runs_each_figure_has():
    runs = [a_run("single", 1, 9, 1), a_run("single", 1, 1, 4, kl=0.2), a_run("single", 1, 1, 3, kl=0.2, seed=2)]
    runs += [a_run("mean", 1, 5, 3, variance=[1, 7]), a_run("mean", 1, 1, 2, kl=0.1, variance=[2, 3])]
    runs += [a_run("mean", 1, 1, 9, kl=0.1, variance=[2, 3], seed=2)]  # a draw that others lack chooses no penalty
    runs += [a_run("mean", 1, 1, 2.5, kl=0.2, variance=[9, 9]), a_run("uwo", 1, 1, 2, variance=[4, 4])]
    runs += [a_run("mean", 2, 4, 3, procedure="BoN", steps=(1, 2, 4))]
    found = {}
    for name, (_, lines) in figures.figures(pandas.DataFrame(runs)).items():
        shown = [line["variance" if name == "figure_10" else "gold"]["mean"] for line in lines]
        found[name] = [(x["method"], x["dashed"], [*y.index], [*y]) for x, y in zip(lines, shown, strict=True)]
    updates = [0, 1, 2]
    assert found["figure_3"] == [("mean", False, [1, 2, 4], [2, 4, 3])]
    best = [("single", False, updates, [1, 1, 3.5]), ("mean", False, updates, [1, 5, 3])]
    assert found["figure_4"] == [*best, ("uwo", False, updates, [1, 1, 2])]
    free = [("single", False, updates, [1, 9, 1]), ("mean", False, updates, [1, 5, 3])]
    assert found["figure_5"] == [*free, ("uwo", False, updates, [1, 1, 2])]
    assert found["figure_6"] == [("single", False, updates, [1, 9, 1]), ("single", False, updates, [1, 1, 3.5])]
    variances = [("mean", False, [1, 2], [1, 7]), ("mean", True, [1, 2], [9, 9])]  # 0 and the largest penalty
    assert found["figure_10"] == [*variances, ("uwo", False, [1, 2], [4, 4])]


# ---- the table, the whole command ------------------------------------------------------------------------------------


def test_the_table():
    """Differences are paired by seed; single reward models of one seed count as their mean. Without a penalty there is
    an interval and no p."""
    runs = [a_run("single", 1, 3, 2, seed=i, kl=0.2) for i in (1, 2, 3)] + [a_run("single", 9, 9, 9, seed=4, kl=0.2)]
    changed = enumerate((1.04, 1.08, 1.12), 1)
    runs += [a_run("wco", 1, 3, x, seed=i, kl=0.2) | {"wins": [i == 3]} for i, x in changed]
    runs += [run | {"kl_coef": 0.0} for run in runs if run["seed"] < 4]
    runs += [a_run("mean", 0, 4, seed=1, procedure="BoN", steps=(1, 1024))]
    runs += [a_run("single", 0, x, seed=1, kl=0.5) for x in (2, 3)] + [a_run("uwo", 7, 5.5, seed=1, kl=0.5)]
    # differences -0.96, -0.92, -0.88: standard deviation 0.04, 4.3027 x 0.04 / sqrt(3) = 0.0994, t = -39.84 with 2
    # degrees of freedom, so p = 0.00063. Of one seed there is none
    assert figures.methods_table(pandas.DataFrame(runs)).splitlines()[2:] == [
        "| best of 1,024 | centre | mean | 1 | 4.000 | 2048.00 |  |  |",
        "| PPO, KL 0 | centre | single | 3 | 2.000 | 4.00 |  |  |",
        "| PPO, KL 0 | centre | WCO | 3 | 1.080 | 4.00 | 0.33 | -0.920 (-1.019 to -0.821) |",
        "| PPO, KL 0.2 | centre | single | 4 | 3.750 | 4.00 |  |  |",
        "| PPO, KL 0.2 | centre | WCO | 3 | 1.080 | 4.00 | 0.33 | **-0.920 (-1.019 to -0.821), p 0.001** |",
        "| PPO, KL 0.5 | centre | single | 1 | 2.500 | 2.00 |  |  |",
        "| PPO, KL 0.5 | centre | UWO | 1 | 5.500 | 2.00 |  |  |",
    ]


def contrast_runs(method: str, changes: tuple[float, ...], **more) -> list[dict]:
    """Runs of draws 1, 2, …: single ends at the draw's number, and the method so much above it."""
    runs = [a_run("single", 0, i, seed=i, **more) for i, _ in enumerate(changes, 1)]
    return runs + [a_run(method, 9, i + x, seed=i, **more) for i, x in enumerate(changes, 1)]


def test_the_primary_contrasts_have_a_correction_of_their_own():
    """0.01, 0.02 and 0.06 have the mean 0.03 and, with t = 1.964 on 2 degrees of freedom, p = 0.1885."""
    runs = contrast_runs("mean", (0.01, 0.02, 0.06), kl=0.1) + contrast_runs("uwo", (0.01, 0.02, 0.06), kl=0.02)
    runs += [a_run("wco", 0, i + x, seed=i, kl=0.1) for i, x in ((1, 0.3), (2, -0.3), (3, 0.1))]
    found = {row["key"]: row for row in figures.comparisons(pandas.DataFrame(runs)).to_dict("records")}
    half = 4.302653 * statistics.stdev([0.01, 0.02, 0.06]) / 3**0.5
    for key, p in {("PPO", 0.1, "centre", "mean"): 1, ("PPO", 0.02, "centre", "uwo"): 0.18854}.items():
        row = found[key]  # of six primary contrasts, two of which are there: 6 x 0.18854
        assert (row["mean"], row["low"], row["high"]) == pytest.approx((0.03, 0.03 - half, 0.03 + half))
        assert row["holm"] == pytest.approx(p, rel=1e-3)
        assert row["family"] == ("primary" if p == 1 else "other")
    assert len(found) == 3


def test_arms_are_compared_by_what_judges_them():
    """The second gold judges where there is one. noise_0 is paired with the centre by single and mean, lambda_2 by what
    it has, three members with four and four with the rest's five by all but single, and gold_model with none."""
    runs = contrast_runs("mean", (0.5, 0.5, 0.8), procedure="BoN", steps=(1, 8))
    other = [run | {"arm": "gold_model", "gold": [0, 7]} for run in runs]
    for i, run in enumerate(other):
        run["second_gold"] = [0, run["seed"] + (1, 2, 3, 9, 9, 9)[i]]

    def arm(name: str, gold: float, method: str = "mean"):
        return [run | {"arm": name, "gold": [0, gold]} for run in runs if run["method"] == method]

    other += arm("noise_0", 1, "single") + arm("noise_0", 4) + arm("noise_0_members_4", 9) + arm("members_4", 5)
    other += arm("members_3", 3) + arm("members_3", 0, "single") + arm("lambda_2", 6)
    found = {(*row["key"][2:], row["to"]): row["mean"] for row in
             figures.comparisons(pandas.DataFrame(runs + other)).to_dict("records")}  # fmt: skip
    expected = {("noise_0", "single", "centre"): -1.0, ("noise_0", "mean", "centre"): 1.4}  # the centre's: 2 and 2.6
    expected |= {("lambda_2", "mean", "centre"): 3.4, ("members_4", "mean", "centre"): 2.4}
    expected |= {("members_3", "mean", "members_4"): -2, ("noise_0_members_4", "mean", "noise_0"): 5}
    expected |= {("centre", "mean", "single"): 0.6, ("gold_model", "mean", "single"): 7.0}
    expected |= {("noise_0", "mean", "single"): 3, ("members_3", "mean", "single"): 3}
    assert found == pytest.approx(expected)


def test_only_differences_of_ten_draws_are_tested():
    """0.1 ± 0.1 in ten draws is significant alone, and so it is beside two that are only shown."""
    ten = contrast_runs("mean", 5 * (0.0, 0.2), kl=0.02) + contrast_runs("mean", 5 * (0.0, 0.2))
    nine = contrast_runs("uwo", (0.1, 0.2, 0.3), kl=0.5)
    found = {row["key"][1]: row for row in figures.comparisons(pandas.DataFrame(ten + nine)).to_dict("records")}
    assert {kl: row["family"] for kl, row in found.items()} == {0.02: "other", 0: "shown", 0.5: "shown"}
    assert found[0.02]["holm"] == pytest.approx(0.01496, abs=1e-5)  # t = 0.1 / (0.10541 / sqrt(10)) = 3, 9 degrees


def test_the_drift_is_that_from_the_middle_measurement():
    runs = [a_run("wco", 1, 5, x, seed=i) | {"arm": "gold_model"} for i, x in ((1, 6), (2, 9))]
    runs[0]["second_gold"], runs[1]["second_gold"] = [0, 4, 3], [0, 4, 1]
    runs += [a_run("single", 1, 2, x, seed=i) | {"arm": "gold_model"} for i, x in ((1, 9), (2, 0), (3, 8))]
    runs += [
        a_run("mean", 1, 2, 4, 1, 9, variance=[2, 8, 3]),
        a_run("mean", 1, 2, procedure="BoN"),
    ]  # no second gold, and no single
    lines = figures.drift_table(pandas.DataFrame(runs)).splitlines()[2:]
    wco, _, mean, best = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    assert wco[:6] == ["PPO, KL 0", "gold_model", "WCO", "2", "1", "2"]
    assert [cell.split()[0] for cell in wco[6:9]] == ["-2.500", "+2.500", "-2.000"]  # gold -1, -4; 1, 4; -1, -3
    assert wco[9].startswith("+0.000 (-76.237 to")  # 1 - 7 and 4 - -2: -6 and 6, and 12.7062 times 6
    assert mean == ["PPO, KL 0", "centre", "mean", "1", "2", "4", "-5.000", "+5.000", "", "", "2.00 to 3.00"]
    assert best == ["best of n", "centre", "mean", "1", "1", "1", "+0.000", "+0.000", "", "", ""]


def test_wins_against_each_member():
    """WCO wins 3 of 4 and 1.5 of 4 posts against the two members."""
    runs = [
        a_run(method, 1, kl=0.1, seed=1) | {"arm": arm, "post_gold": golds}
        for arm, method, golds in (
            ("members", "single", [0, 0, 0, 9]),
            ("members", "single_2", [5, 9, 1, 9]),
            ("centre", "wco", [1, 2, 3, 9][::-1]),
        )
    ]
    runs[-1]["post_gold"] = [5, 1, 2, 3]
    runs += [a_run("wco", 1, kl=0.1, seed=2) | {"post_gold": [0, 0, 0, 0]}]  # a draw without members
    best = a_run("mean", 1, 2, procedure="BoN")
    runs += [best | {"seed": i, "wins": [0, x], "wins_sd": [0, y]} for i, x, y in ((1, 0.5, 0.1), (2, 0.7, 0.2))]
    lines = figures.wins_table(pandas.DataFrame(figures.with_lists(runs))).splitlines()[2:]
    assert lines == [
        "| best of n | centre | mean | 2 | 0.60 | 0.15 |",
        "| PPO, KL 0.1 | centre | WCO | draw 1 | 0.56 | 0.19 |",
    ]


def test_what_the_members_losses_say():
    """Gold falls by twice the loss in draw 1 and rises with it in draw 2: correlations -1 and 1. Its change since the
    middle falls with the loss in both."""
    run = a_run("single", 1, 2, procedure="BoN")

    def curves(*last: float, middle: float = 0.5):
        return [[7, middle, x] for x in last]

    draws = [run | {"member_loss": curves(0.5, 0.6, 0.7), "member_gold": curves(0.6, 0.4, 0.2), "pairs": 10}]
    draws += [run | {"seed": 2, "member_loss": curves(0.4, 0.8), "pairs": 20}]
    draws[1]["member_gold"] = curves(0.1, middle=0.1) + curves(0.3, middle=0.5)
    runs = figures.with_lists([*draws, a_run("mean", 1, 2)])
    [line] = figures.members_table(runs).splitlines()[2:]
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    spread = (0.1 + 0.08**0.5) / 2  # standard deviations within the draws: 0.1 and 0.4 / sqrt(2)
    assert cells[:4] == ["centre", "2", "15", f"0.600 ± {spread:.3f}"]
    assert cells[5].lstrip("+-").startswith("0.00 (-12.71 to")  # 0, but for rounding
    assert cells[6] == "-1.00 (-1.00 to -1.00)"


def test_each_arm_has_its_figures(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [a_run(x, 1, 2, procedure="BoN", seed=i) | {"arm": arm, "proxy": [0, 0]} for arm in ("centre", "noise_0")
            for x in ("single", "mean") for i in (1, 2)]  # fmt: skip
    rows[0] |= {"member_steps": [60, 120], "member_loss": [[0.7, 0.6]], "member_gold": [[1, 2]], "pairs": 9}
    rows += [a_run("uwo", 1, 2, kl=kl, seed=i, variance=[1, 2]) for kl in (0, 0.1) for i in (1, 2)]
    rows += [a_run("single_2", 1, 2, kl=0.1) | {"arm": "members"}]
    write_jsonl(Path("study.jsonl"), rows)
    figures.main(figures.Args(runs=("study.jsonl",), output_dir="out"))
    names = {path.name for path in Path("out").iterdir()}
    expected = {"figure_3", "figure_3_noise_0", "members", "figure_4", "figure_5", "figure_7", "figure_10", "factors"}
    assert names == {f"{name}.png" for name in expected | {"figure_4_members"}} | {"table.md"}


def test_the_command_draws_the_same_from_what_it_wrote(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed in (1, 2):
        make_ppo(f"single_{seed}", ["a"], seed=seed)
        make_ppo(f"wco_{seed}", ["a", "b"], "wco", seed=seed, golds=(1.0, 2.0, 3.0 + seed))
    figures.main(figures.Args(runs=("runs",), output_dir="out/here"))
    figures.main(figures.Args(runs=("out/here/runs.jsonl",), output_dir="out/again"))
    contents = [{path.name: path.read_bytes() for path in Path("out", name).iterdir()} for name in ("here", "again")]
    del contents[0]["runs.jsonl"]
    assert contents[0] == contents[1] and set(contents[0]) == {"figure_4.png", "figure_5.png", "table.md"}
