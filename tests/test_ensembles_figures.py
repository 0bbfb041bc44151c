"""ensembles/figures.py: what is read, drawn and judged, against hand-made runs and hand-computed numbers."""

import importlib.util
import itertools
import json
import statistics
import sys
from pathlib import Path

import pandas
import pytest
from matplotlib.figure import Figure

SCRIPT = Path(__file__).resolve().parents[1] / "ensembles" / "figures.py"
spec = importlib.util.spec_from_file_location("ensembles_figures", SCRIPT)  # eval/figures.py has the same name
figures = sys.modules["ensembles_figures"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(figures)

BASE = (25, "nano-s", 100)  # label noise, size and pairs of most runs
SETTINGS = [BASE, (0, "nano-s", 100), (25, "nano-xs", 100), (25, "nano-s", 50)]
WHERE = {"noise": 25, "size": "nano-s", "pairs": 100, "bases": 1, "setup": ""}
STANDARD = {"value_start": "sft", "standardise_members": True, "lam": 0.95, "cliprange_value": 0.2}
NS, UPDATES = (1, 4, 16), (0, 2, 5)  # of the curves; 44 episodes in batches of 8 are 5 updates


def level(setting, method, uwo_lambda=None, members=1, member=0, kl=0.0, seed=0) -> float:
    """How much gold a hand-made curve gains from one of its points to the next: another number for every run."""
    noise, size, pairs = setting
    found = (
        {"single": 1, "mean": 2, "wco": 3, "uwo": 4, "warm": 5}[method]
        + noise / 100
        + (size == "nano-xs") / 2
        - pairs / 1000
    )
    return found + (uwo_lambda or 0) / 7 + members / 90 + member / 30 - kl * 3 + seed / 50


def write_json(file: Path, settings: dict):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(settings))


def make_members(setting, count: int = 3) -> list[str]:
    """Reward models of a setting, relative to the working directory; their paths. All are of the base b."""
    noise, size, pairs = setting
    paths = [f"models/{noise}_{size}_{pairs}/{i}" for i in range(count)]
    data = {
        "preference_dataset": f"data/labelled/noise_{noise}",
        "total_episodes": 2 * pairs + 1,
        "sft_model_path": "b",
    }
    for path in paths:
        write_json(Path(path, "args.json"), data | {"stage": "reward", "model": f"x/{size}", "num_train_epochs": 2})
    return paths


def make_bon(setting, lambdas=(0.1, 0.5), name: str | None = None, count: int = 3) -> Path:
    """A folder of best_of_n.py: gold 10 + level x (0, 1, 2), band 0.3 below to 0.1 above, proxy 2 x gold."""
    paths, folder = make_members(setting, count), Path("runs/bon", name or "_".join(map(str, setting)))
    write_json(folder / "args.json", {"reward_model_paths": paths, "gold": "g", "samples": 16, "prompts": 9} | STANDARD)
    curves, wins = [], []

    def add(method, members, uwo_lambda, gain):
        row = {"method": method, "members": members, "uwo_lambda": uwo_lambda}
        for i, n in reversed(list(enumerate(NS))):
            gold = 10 + i * gain
            columns = {"n": n, "kl": i * 1.5, "gold": gold, "gold_low": gold - 0.3, "gold_high": gold + 0.1}
            curves.append(row | columns | {"proxy": 2 * gold, "variance": 0})
        if members > 1:
            wins.append(row | {"n": 16, "win_rate": 0.5 + gain / 100, "win_rate_sd": members / 100})

    add("single", 1, "", 99)
    for i in range(count):
        add(f"single_{i + 1}", 1, "", level(setting, "single", member=i))
    for k in range(2, count + 1):
        for method, x in [("mean", ""), ("wco", ""), *(("uwo", x) for x in lambdas)]:
            add(method, k, x, level(setting, method, x or 0, k))
    pandas.DataFrame(curves).to_csv(folder / "best_of_n.csv", index=False)
    header = ["method", "members", "uwo_lambda", "n", "win_rate", "win_rate_sd"]
    pandas.DataFrame(wins, columns=header).to_csv(folder / "win_rates.csv", index=False)
    return folder


def make_ppo(name: str, setting, paths, combination="mean", uwo_lambda=None, kl=0.0, seed=1, gain=1.0, **more) -> Path:
    """A run of ppo.py --gold: gold 10 + gain x (0, 1, 2), KL 4 and 9 + seed, proxy 3 x gold, se 0.25, variance the
    update times the gain, score of member i: i x update x gain. more: golds, updates; samples {id: gold} or None; other
    settings."""
    folder = Path("runs/ppo", name)
    settings = {"stage": "ppo", "gold": "g", "reward_model_paths": paths, "reward_combination": combination}
    settings |= {"uwo_lambda": uwo_lambda, "kl_coef": kl, "seed": seed, "total_episodes": 44, "batch_size": 8}
    write_json(folder / "args.json", settings | STANDARD | {key: more[key] for key in STANDARD if key in more})
    golds = more.get("golds") or dict(zip(UPDATES, (10 + i * gain for i in range(3)), strict=True))
    lines = []
    for update in range(more.get("updates", 5) + 1):
        line = {"update": update, "episode": 8 * update}
        line |= {"objective/reward_model_variance": update * gain} if update else {}
        line |= {f"objective/reward_model_{i + 1}": i * update * gain for i in range(len(paths)) if update}
        if update in golds:
            distance = {0: 0, 2: 4}.get(update, 9 + seed)
            line |= {
                "gold/score": golds[update],
                "gold/proxy": 3 * golds[update],
                "gold/kl_k2": distance,
                "gold/se": 0.25,
            }
        lines.append(json.dumps(line) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    if samples := more.get("samples", {"p": 0.0}):
        rows = [{"id": name, "response": "x", "kl_k2": 1, "tokens": 2, "gold": x} for name, x in samples.items()]
        for i in range(len(paths)):
            rows = [row | {f"score_{i + 1}": (3 - i) * gain + row["gold"]} for row in rows]
        pandas.DataFrame(rows).to_csv(folder / "gold_samples.csv", index=False)
    return folder


def make_all_ppo(setting, penalties, seeds, lambdas=(0.1,), sizes=(3,)):
    """PPO runs of all methods and members of a setting."""
    paths, start = make_members(setting), "_".join(map(str, setting))
    for kl in penalties:
        for seed in seeds:
            for i, path in enumerate(paths):
                gain = level(setting, "single", member=i, kl=kl, seed=seed)
                make_ppo(f"{start}_single_{i}_{kl}_{seed}", setting, [path], kl=kl, seed=seed, gain=gain)
            for k in sizes:
                for method, x in [("mean", None), ("wco", None), *(("uwo", x) for x in lambdas)]:
                    gain, name = level(setting, method, x, k, kl=kl, seed=seed), f"{start}_{method}_{x}_{k}_{kl}_{seed}"
                    make_ppo(name, setting, paths[:k], method, x, kl, seed, gain)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(runs, the figures' panels by number) of best of n and PPO in four settings; in the first there are two seeds,
    three KL penalties, two lambdas and ensembles of two and three."""
    root = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for setting in SETTINGS:
            make_bon(setting)
            extended = setting == BASE
            penalties = (0.0, 0.05, 0.2) if extended else (0.0, 0.05)
            make_all_ppo(setting, penalties, *(((1, 2), (0.1, 0.4), (2, 3)) if extended else ((1,),)))
        runs, problems = figures.read_runs("runs")
    assert problems == []
    found = figures.paper_figures(runs, WHERE, 0.05, figures.Args())
    return runs, {int(name[7:]): plots for name, (_, plots) in found.items()}


def rows_of(plot) -> pandas.DataFrame:
    return pandas.DataFrame(plot.rows)


def finals(plot) -> dict:
    """{(series, x): the height of the bar}."""
    return {(row["series"], row["x"]): row["y"] for row in plot.rows}


def end(*key, **more) -> float:
    """The last gold score of a hand-made curve."""
    return 10 + 2 * level(*key, **more)


def single_end(setting, kl=0.0, seeds=(0,)) -> float:
    """Mean of it over three single members and seeds."""
    return statistics.mean(end(setting, "single", member=i, kl=kl, seed=seed) for i in range(3) for seed in seeds)


# ---- reading -----------------------------------------------------------------------------------------------------


def test_the_setting_is_read_from_the_members(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {"model": "EleutherAI/pythia-70m", "total_episodes": 231, "num_train_epochs": 5}
    for name, base in (("rm", "runs/a"), ("other", "runs/b")):
        settings |= {"preference_dataset": "data/noise_12.5/", "sft_model_path": base}
        write_json(Path(name, "args.json"), settings)
    write_json(Path("warm/args.json"), {"stage": "average", "reward_model_paths": ["rm", "other"]})
    setting = (12.5, "pythia-70m", 46)
    assert figures.member_setting("rm") == (setting, {"runs/a"}, {"rm"})
    assert figures.member_setting("rm/model") == (setting, {"runs/a"}, {"rm/model"})
    assert figures.member_setting("warm") == (setting, {"runs/a", "runs/b"}, {"rm", "other"})
    replaced("other/args.json", "noise_12.5", "noise_0")
    with pytest.raises(figures.LeftOut, match="warm/args.json: its members differ in label noise, size or pairs"):
        figures.member_setting("warm")


def test_what_a_run_does_otherwise_is_its_setup():
    """A run that does not say is of the time when the value model started from the first reward model."""
    found = {figures.setup_of(STANDARD | change) for change in ({}, {"standardise_members": False}, {"lam": 1.0})}
    assert found == {"", "not standardised", "λ of GAE 1"}
    old = "value model from the first reward model, not standardised"
    assert figures.setup_of({}) == figures.setup_of({"lam": 0.95, "cliprange_value": 0.2}) == old
    found = {figures.setup_of({"lam": 1.0, "cliprange_value": x}) for x in (0.1, float("inf"))}
    assert found == {f"{old}, λ of GAE 1, {x}" for x in ("value clipping 0.1", "no value clipping")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda p: Path(p[1], "args.json").unlink(),
            "reward model models/25_nano-s_100/1 has no models/25_nano-s_100/1/args.json",
        ),
        (
            lambda p: write_json(Path(p[0], "args.json"), {"preference_dataset": "data/tldr"}),
            "models/25_nano-s_100/0/args.json: preference_dataset data/tldr is no folder noise_N",
        ),
        (
            lambda p: write_json(
                Path(p[0], "args.json"),
                {"preference_dataset": "noise_0", "model": "nano-s", "total_episodes": 201, "num_train_epochs": 2}
                | {"sft_model_path": "b"},
            ),
            "differ in label noise, size or pairs",
        ),
    ],
)
def test_a_run_whose_members_do_not_tell_their_setting_is_left_out(tmp_path, monkeypatch, change, message):
    monkeypatch.chdir(tmp_path)
    paths = make_members(BASE)
    make_ppo("alone", BASE, paths[2:])
    make_ppo("all", BASE, paths)
    change(paths)
    runs, problems = figures.read_runs("runs")
    assert [run.folder for run in runs] == ["runs/ppo/alone"]
    assert len(problems) == 1 and problems[0].startswith("runs/ppo/all: ") and message in problems[0]


def test_what_a_run_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = make_members(BASE)
    make_ppo("one", BASE, paths[:1], seed=4)
    make_ppo("uwo", BASE, paths, "uwo", 0.2, 0.3, samples={"b": 2.5, "a": 1.5})
    write_json(Path("warm/args.json"), {"stage": "average", "reward_model_paths": paths})
    make_ppo("warm", BASE, ["warm"], standardise_members=False)
    make_bon(BASE, (0.5,))
    replaced(f"{paths[2]}/args.json", '"b"', '"c"')
    write_json(Path("runs/no_gold/args.json"), {"stage": "ppo", "gold": None})
    write_json(Path("runs/sft/args.json"), {"stage": "sft"})
    runs, problems = figures.read_runs("runs")
    names = ("method", "uwo_lambda", "members", "paths", "seed")
    found = {figures.fields(run, names) for run in figures.pick(runs, procedure="BoN")}
    expected = {("single", None, 1, path, 0) for path in paths}
    for k in (2, 3):
        first = " ".join(paths[:k])
        expected |= {("mean", None, k, first, 0), ("wco", None, k, first, 0), ("uwo", 0.5, k, first, 0)}
    assert found == expected
    ends = {run.paths: figures.final(run) for run in figures.pick(runs, procedure="BoN", method="single")}
    assert ends == pytest.approx({path: end(BASE, "single", member=i) for i, path in enumerate(paths)})
    one, uwo, warm = figures.pick(runs, procedure="PPO")
    assert one[:12] == ("PPO", *BASE, 1, "", 0.0, "single", None, 1, paths[0], 4) and one.made_of == {paths[0]}
    assert uwo[:12] == ("PPO", *BASE, 2, "", 0.3, "uwo", 0.2, 3, " ".join(paths), 1) and uwo.made_of == set(paths)
    assert warm[:12] == ("PPO", *BASE, 2, "not standardised", 0.0, "warm", None, 1, "warm", 1)
    assert warm.made_of == set(paths) and one.likings.empty and warm.likings.empty
    assert list(uwo.likings["y"]) == [-1.5 * x for x in (1, 2, 3, 4, 5)]  # 0 less the mean of 1 and 2
    assert uwo.samples.to_dict() == {"a": 1.5, "b": 2.5} and list(uwo.variance["y"]) == [1, 2, 3, 4, 5]
    assert uwo.curve.to_dict("list") == {
        "step": [0, 2, 5], "x": [0, 4, 10], "y": [10, 11, 12], "se": [0.25] * 3, "proxy": [30, 33, 36]
    }  # fmt: skip
    curve = figures.pick(runs, procedure="BoN", method="wco", members=2)[0].curve
    gain = level(BASE, "wco", members=2)
    assert list(curve["step"]) == [1, 4, 16] and list(curve["x"]) == [0, 1.5, 3]
    assert list(curve["y"]) == pytest.approx([10, 10 + gain, 10 + 2 * gain])
    assert list(curve["se"]) == pytest.approx([0.4 / 3.92] * 3)
    assert problems == []


def test_numbers_of_pairs_that_are_near_are_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed, pairs in enumerate((100, 109, 115, 126, 127)):
        setting = (25, "nano-s", pairs)
        make_ppo(f"{pairs}", setting, make_members(setting)[:1], seed=seed)
    runs, _ = figures.read_runs("runs")
    assert [run.pairs for run in sorted(runs, key=lambda run: run.seed)] == [100, 100, 116, 116, 128]


def test_incomplete_runs_and_runs_of_the_same_settings_are_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = make_members(BASE)
    make_ppo("a", BASE, paths)
    make_ppo("again", BASE, paths)
    make_ppo("killed", BASE, paths, "wco", updates=4)
    make_ppo("old", BASE, paths, "uwo", 0.1, samples=None)
    make_ppo("other_seed", BASE, paths, seed=2)
    make_bon(BASE)
    make_bon(BASE, name="twice")
    Path(make_bon(SETTINGS[1]), "best_of_n.csv").unlink()
    runs, problems = figures.read_runs("runs")
    there = {run.folder for run in runs}
    assert there == {"runs/bon/25_nano-s_100", "runs/ppo/a", "runs/ppo/old", "runs/ppo/other_seed"}
    assert problems == [
        "runs/bon/0_nano-s_100: no tables; "
        "`python ensembles/best_of_n.py --output-dir runs/bon/0_nano-s_100 --estimate`",
        "runs/bon/twice: runs/bon/25_nano-s_100 is a run of the same settings",
        "runs/ppo/again: runs/ppo/a is a run of the same settings",
        "runs/ppo/killed: it is not complete (update 4 of 5, 2 gold scores)",
        "runs/ppo/old: no gold_samples.csv, and so no win rates of it; all else is there",
    ]


def replaced(name: str, old: str, new: str):
    """Replace every `old` in a file."""
    text = Path(name).read_text()
    assert old in text
    Path(name).write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("runs/ppo/a/metrics.jsonl", '"update": 3', '"update" 3', "JSONDecodeError"),
        ("runs/ppo/a/metrics.jsonl", "gold/se", "gold/SE", "gold/se"),
        ("runs/ppo/a/args.json", '"seed"', '"Seed"', "has no seed"),
        ("runs/ppo/a/args.json", "{", "", "JSONDecodeError"),
        ("runs/ppo/a/gold_samples.csv", ",gold", ",golden", "no column gold"),
        ("runs/ppo/a/gold_samples.csv", "q,x,1", "p,x,1", "two rows of post p"),
        ("runs/ppo/a/gold_samples.csv", "0.25", "", "a number is missing"),
        ("runs/bon/25_nano-s_100/best_of_n.csv", "gold_low", "low", "no column gold_low"),
        ("runs/bon/25_nano-s_100/best_of_n.csv", "single_2", "single_4", "IndexError"),
        ("runs/bon/25_nano-s_100/win_rates.csv", "win_rate_sd", "sd", "no column win_rate_sd"),
        ("models/25_nano-s_100/2/args.json", "num_train_epochs", "epochs", "num_train_epochs"),
    ],
)
def test_a_damaged_file_is_named_and_nothing_written(tmp_path, monkeypatch, name, old, new, message):
    monkeypatch.chdir(tmp_path)
    make_ppo("a", BASE, make_members(BASE), samples={"p": 0.5, "q": 0.25})
    make_bon(BASE)
    replaced(name, old, new)
    with pytest.raises(SystemExit) as error:
        figures.main(figures.Args(runs="runs", output_dir="out"))
    assert str(error.value).startswith(f"error: {name}") and message in str(error.value)
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"runs": "nowhere"}, "nowhere: no best-of-n or PPO runs with gold scores there"),
        ({"noise": 35}, "--noise 35: no such runs; there are 0, 25"),
        ({"size": "nano-m"}, "--size nano-m: no such runs; there are nano-xs, nano-s"),
        ({"pairs": 7}, "--pairs 7: no such runs; there are 50, 100"),
    ],
)
def test_what_is_asked_for_must_be_there(tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    for setting in SETTINGS:
        make_bon(setting)
    with pytest.raises(SystemExit, match=message):
        figures.main(figures.Args(**{"runs": "runs", "output_dir": "out"} | args))


def test_size_and_pairs_are_those_of_most_run_folders(world):
    runs = figures.pick(world[0], noise=25)
    assert figures.most_common(runs, "size", None) == "nano-s"
    assert figures.most_common(runs, "pairs", None) == 100
    assert figures.most_common(runs, "pairs", 50) == 50
    few = [run._replace(folder="one") for run in figures.pick(runs, size="nano-s")]  # many curves, one folder
    assert figures.most_common([*few, *figures.pick(runs, size="nano-xs")], "size", None) == "nano-xs"


def test_sizes_are_sorted_by_parameters():
    names = ["pythia-1.4b", "nano-m", "pythia-70m", "other", "nano-xs", "pythia-410m", "nano-s"]
    found = sorted(names, key=figures.size_order)
    assert found == ["pythia-70m", "pythia-410m", "pythia-1.4b", "nano-xs", "nano-s", "nano-m", "other"]


# ---- figures -----------------------------------------------------------------------------------------------------


def test_best_of_n_curves(world):
    plots = world[1][3]
    assert [plot.title for plot in plots] == ["0 % label noise", "25 % label noise"]
    for plot, setting in zip(plots, (SETTINGS[1], BASE), strict=True):
        rows = rows_of(plot)
        assert list(rows["series"].unique()) == ["single", "mean", "wco", "uwo, λ 0.5"]
        for method, uwo_lambda in (("mean", None), ("wco", None), ("uwo", 0.5)):
            mine = rows[rows["series"].str.startswith(method)]
            gold = [10 + i * level(setting, method, uwo_lambda, 3) for i in range(3)]
            assert list(mine["step"]) == [1, 4, 16] and list(mine["x"]) == [0, 1.5, 3]
            assert list(mine["y"]) == pytest.approx(gold)
            assert list(mine["low"]) == pytest.approx([x - 0.3 for x in gold])
            assert list(mine["high"]) == pytest.approx([x + 0.1 for x in gold])
            assert list(mine["proxy"]) == pytest.approx([2 * x for x in gold])
        single, gains = rows[rows["series"] == "single"], [level(setting, "single", member=i) for i in range(3)]
        gold, sd = 10 + 2 * statistics.mean(gains), 2 * statistics.stdev(gains)
        assert list(single.iloc[-1][["y", "low", "high", "proxy", "runs"]]) == pytest.approx(
            [gold, gold - sd, gold + sd, 2 * gold, 3]
        )


def test_ppo_curves_are_means_over_seeds_and_members_at_equal_updates(world):
    rows = rows_of(world[1][5][1])
    assert list(rows["series"].unique()) == ["single", "mean", "wco", "uwo, λ 0.1"]
    both = {"wco": [level(BASE, "wco", members=3, seed=seed) for seed in (1, 2)]}
    both["single"] = [level(BASE, "single", member=i, seed=seed) for i in range(3) for seed in (1, 2)]
    for method, gains in both.items():
        mine = rows[rows["series"] == method]
        assert list(mine["step"]) == [0, 2, 5] and list(mine["x"]) == [0, 4, 10.5] and set(mine["runs"]) == {len(gains)}
        gold = [10 + i * statistics.mean(gains) for i in range(3)]
        sd = [i * statistics.stdev(gains) for i in range(3)]
        assert list(mine["y"]) == pytest.approx(gold)
        assert list(mine["proxy"]) == pytest.approx([3 * x for x in gold])
        assert list(mine["low"]) == pytest.approx([x - y for x, y in zip(gold, sd, strict=True)])
        assert list(mine["high"]) == pytest.approx([x + y for x, y in zip(gold, sd, strict=True)])
    alone = rows_of(world[1][5][0])  # one seed at label noise 0: no band
    alone = alone[alone["series"] == "wco"]
    assert list(alone["low"]) == list(alone["high"]) == list(alone["y"])


def test_only_common_steps_are_averaged_and_curves_end_at_max_kl():
    first = pandas.DataFrame({"step": [0, 2, 5], "x": [0.0, 4, 8], "y": [1.0, 2, 3], "proxy": [0.0, 0, 6]})
    second = pandas.DataFrame({"step": [0, 5], "x": [0.0, 16], "y": [2.0, 7], "proxy": [0.0, 2]})
    row = {"series": "s", "runs": 2, "step": 5, "x": 12, "y": 5, "low": 5 - 8**0.5, "high": 5 + 8**0.5, "proxy": 4}
    found = figures.curve_rows("s", [first, second])
    assert [x["step"] for x in found] == [0, 5] and found[1] == pytest.approx(row)
    assert [x["step"] for x in figures.curve_rows("s", [first], 4)] == [0, 2]


def test_single_reward_models_by_penalty_size_and_pairs(world):
    def ends(plot):
        return {row["series"]: row["y"] for row in plot.rows}  # the last row of each

    (plot,) = world[1][6]
    expected = {f"KL penalty {kl:g}": single_end(BASE, kl, (1, 2)) for kl in (0, 0.05, 0.2)}
    assert ends(plot) == pytest.approx(expected) and plot.by == "series"
    by_size, by_pairs = world[1][13]
    assert ends(by_size) == pytest.approx({"nano-xs": single_end(SETTINGS[2]), "nano-s": single_end(BASE)})
    assert ends(by_pairs) == pytest.approx({"50 pairs": single_end(SETTINGS[3]), "100 pairs": single_end(BASE)})
    for plot, kl in zip(world[1][14], (0, 0.05), strict=True):
        assert plot.title == f"PPO, KL penalty {kl:g}"
        few = single_end(SETTINGS[3], kl, (1,))
        assert ends(plot) == pytest.approx({"50 pairs": few, "100 pairs": single_end(BASE, kl, (1, 2))})


def bar(series: str, setting=BASE, members: int = 3, kl: float = 0.0, seeds=(0,)) -> float:
    """The height of a bar of hand-made runs, by the name of its series."""
    if series == "single":
        return single_end(setting, kl, seeds)
    method, _, uwo_lambda = series.partition(", λ ")
    found = [end(setting, method, float(uwo_lambda or 0), members, kl=kl, seed=seed) for seed in seeds]
    return statistics.mean(found)


def test_bars_by_kl_penalty(world):
    (plot,) = world[1][7]
    keys = itertools.product(("single", "mean", "wco", "uwo, λ 0.1"), (0, 0.05, 0.2))
    assert finals(plot) == pytest.approx({(name, kl): bar(name, kl=kl, seeds=(1, 2)) for name, kl in keys})
    row = next(row for row in plot.rows if row["series"] == "wco" and row["x"] == 0.05)
    sd = statistics.stdev(end(BASE, "wco", members=3, kl=0.05, seed=s) for s in (1, 2))
    assert [row["low"], row["high"], row["start"], row["runs"]] == pytest.approx([row["y"] - sd, row["y"] + sd, 10, 2])


def test_bars_of_each_procedure(world):
    """By size (figure 8), pairs (9), members (11) and lambda (12)."""
    bon = ("BoN", 0, (0,), 0.5, (0.1, 0.5))
    ppo = [(f"PPO, KL penalty {kl:g}", kl, (1, 2), 0.1, (0.1, 0.4)) for kl in (0, 0.05)]
    for i, (title, kl, seeds, uwo_lambda, lambdas) in enumerate([bon, *ppo]):
        names = ("mean", "wco", f"uwo, λ {uwo_lambda}")
        by_size, by_pairs = {}, {}
        for name in ("single", *names):
            by_size[name, "nano-s"] = by_pairs[name, 100] = bar(name, BASE, 3, kl, seeds)
            by_size[name, "nano-xs"] = bar(name, SETTINGS[2], 3, kl, seeds[:1])
            by_pairs[name, 50] = bar(name, SETTINGS[3], 3, kl, seeds[:1])
        by_members = {(name, k): bar(name, BASE, k, kl, seeds) for name in names for k in (2, 3)}
        by_lambda = {(f"{k} members", x): bar(f"uwo, λ {x}", BASE, k, kl, seeds) for x in lambdas for k in (2, 3)}
        for number, expected in {8: by_size, 9: by_pairs, 11: by_members, 12: by_lambda}.items():
            plot = world[1][number][i]
            assert (plot.title, len(world[1][number])) == (title, 3)
            assert finals(plot) == pytest.approx(expected), (number, title)
    band = next(row for row in world[1][8][0].rows if row["series"] == "mean")
    assert [band["low"], band["high"]] == pytest.approx([band["y"] - 0.3, band["y"] + 0.1])


def test_by_pairs_only_members_that_are_everywhere_are_compared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few = (BASE[0], BASE[1], BASE[2] // 2)
    for setting, members in ((BASE, (0, 1)), (few, (0,))):
        paths = make_members(setting)
        for i in members:
            make_ppo(f"{setting[2]}_{i}", setting, [paths[i]], gain=1 + 10 * i)
        make_ppo(f"{setting[2]}_mean", setting, paths, gain=5)
    runs, _ = figures.read_runs("runs")
    base = WHERE
    found = figures.paper_figures(runs, base, None, figures.Args(runs="runs"))
    by_pairs = next(plot for plot in found["figure_9"][1] if plot.title.startswith("PPO"))
    assert {(row["series"], row["x"], row["runs"], row["y"]) for row in by_pairs.rows} == {
        ("single", few[2], 1, 12), ("single", BASE[2], 1, 12), ("mean", few[2], 1, 20), ("mean", BASE[2], 1, 20),
    }  # fmt: skip
    assert {row["runs"] for row in found["figure_14"][1][0].rows} == {1}
    wins = figures.pick(runs, method="single")
    assert len(wins) == 3  # the second member is still there for all else


def test_variance_over_updates(world):
    for plot, setting, seeds in zip(world[1][10], (SETTINGS[1], BASE), ((1,), (1, 2)), strict=True):
        rows = rows_of(plot)
        names = {("mean", None): "mean", ("uwo", 0.1): "uwo, λ 0.1"}
        assert set(rows["series"]) == {f"{name}, KL penalty {kl}" for name in names.values() for kl in ("0", "0.05")}
        for (method, x), name in names.items():
            for kl in (0, 0.05):
                mine = rows[rows["series"] == f"{name}, KL penalty {kl:g}"]
                gain = statistics.mean(level(setting, method, x, 3, kl=kl, seed=seed) for seed in seeds)
                assert list(mine["x"]) == [1, 2, 3, 4, 5]
                assert list(mine["y"]) == pytest.approx([update * gain for update in range(1, 6)])


def a_run(method, *golds, procedure="PPO", kl=0.0, se=0.25, uwo_lambda=None, members=None, **more):
    """A run with this curve of gold scores; its variance grows `grown` times."""
    members = members or (1 if method in ("single", "warm") else 5)
    uwo_lambda = uwo_lambda or ({"PPO": 0.1, "BoN": 0.5}[procedure] if method == "uwo" else None)
    curve = pandas.DataFrame({"step": range(len(golds)), "x": range(len(golds)), "y": golds, "se": se, "proxy": 0.0})
    curve = curve.assign(low=curve["y"] - 1, high=curve["y"] + 3) if procedure == "BoN" else curve
    variance = pandas.DataFrame({"step": range(20), "x": range(20), "y": [1.0] * 10 + [more.get("grown", 1.0)] * 10})
    setting = *more.get("setting", BASE), more.get("bases", 1), more.get("setup", "")
    start = procedure, *setting, kl, method, uwo_lambda, members, more.get("paths", "a"), more.get("seed", 1), "folder"
    liked = pandas.DataFrame({"step": range(20), "x": range(20), "y": [9.0] * 18 + [more.get("liked", 0.0)] * 2})
    made_of = frozenset(more.get("made_of", more.get("paths", "a")))
    more = {"samples": more.get("samples", pandas.Series()), "made_of": made_of, "likings": liked}
    return figures.Run(*start, curve, variance, **more)


def test_figure_4_takes_each_methods_best_final_penalty():
    runs = [a_run("single", 0, 9, 1), a_run("single", 0, 1, 2, kl=0.1), a_run("single", 0, 2, 2.5, kl=0.1, seed=2)]
    runs += [a_run("single", 0, 1, 2.75, kl=0.2, seed=1), a_run("single", 0, 1, 1, kl=0.2, seed=2)]  # mean 1.875
    runs += [a_run("wco", 0, 4, 3), a_run("wco", 0, 2.5, 2.75, kl=0.1)]
    base = WHERE
    _, (plot, _) = figures.paper_figures(runs, base, 0.1, figures.Args())["figure_4"]
    found = {row["series"]: (row["y"], row["runs"]) for row in plot.rows}
    assert found == {"single, KL penalty 0.1": (2.25, 2), "wco, KL penalty 0": (3, 1)}


# ---- win rates ---------------------------------------------------------------------------------------------------


def test_ppo_win_rates_count_ties_half_and_average_over_seeds_then_members():
    def scores(**golds):
        return pandas.Series(golds)

    runs = [
        a_run("wco", 0, seed=1, made_of="abcd", samples=scores(p=1.0, q=2.0, r=3.0, s=4.0)),
        a_run("wco", 0, seed=2, made_of="abcd", samples=scores(p=1.0, q=1.0)),
        a_run("single", 0, paths="a", seed=1, samples=scores(s=0.0, r=3.0, q=5.0, p=0.0, t=9.0)),  # 1 1/2 0 1
        a_run("single", 0, paths="a", seed=2, samples=scores(p=2.0, q=2.0)),  # 0 0
        a_run("single", 0, paths="b", seed=1, samples=scores(p=0.0, q=0.0, r=0.0, s=0.0)),  # 1 1 1 1
        a_run("single", 0, paths="c", seed=1),  # no samples
        a_run("single", 0, paths="d", seed=3, samples=scores(p=0.0)),  # no such seed
        a_run("single", 0, paths="b", seed=1, kl=0.1, samples=scores(p=9.0)),  # another penalty
        a_run("single", 0, paths="e", seed=1, samples=scores(p=9.0)),  # no member
    ]
    (row,) = figures.win_rate_rows(runs, figures.Args())
    rates = [(0.625 + 0.0) / 2, 1.0]
    assert row["win_rate"] == statistics.mean(rates) and row["win_rate_sd"] == pytest.approx(statistics.stdev(rates))
    assert (row["method"], row["kl_coef"], row["against"]) == ("wco", 0, 2)
    assert row["paper"] == "62.2 ± 2.9 (44M)"  # 25 % label noise


def test_win_rates_of_replicates_are_against_their_own_members():
    def scores(*golds):
        return pandas.Series(golds, index=list("pqrs"))

    runs = []
    for i, golds in ((1, (1, 1, 1, 0)), (2, (1, 0, 0, 0))):  # of four posts won: 3 and 1
        runs += [a_run("mean", 0, seed=i, made_of=[f"a{i}", f"b{i}"], samples=scores(*golds))]
        runs += [a_run("single", 0, seed=i, paths=f"a{i}", made_of=[f"a{i}"], samples=scores(0.5, 0.5, 0.5, 0.5))]
    (row,) = figures.win_rate_rows(runs, figures.Args())
    assert (row["win_rate"], row["win_rate_sd"], row["against"]) == (0.5, pytest.approx(0.125**0.5), 2)
    bon = [run._replace(procedure="BoN", seed=0) for run in runs]
    bon = [run._replace(wins=(0.6 + 0.1 * i, 0.01)) if run.method == "mean" else run for i, run in enumerate(bon)]
    (row,) = figures.win_rate_rows(bon, figures.Args())
    assert (row["win_rate"], row["win_rate_sd"], row["against"]) == pytest.approx((0.7, 0.02**0.5, 2))


def test_win_rates_of_best_of_n_beside_the_papers(world):
    rows = figures.win_rate_rows(figures.pick(world[0], procedure="BoN"), figures.Args())
    rows = {(row["noise"], row["size"], row["pairs"], row["method"], row["uwo_lambda"]): row for row in rows}
    methods = [("mean", None), ("wco", None), ("uwo", 0.1), ("uwo", 0.5)]
    assert set(rows) == {(*setting, *method) for setting in SETTINGS for method in methods}
    for (*setting, method, x), row in rows.items():
        rate = 0.5 + level(setting, method, x, 3) / 100
        assert (row["win_rate"], row["win_rate_sd"], row["members"]) == pytest.approx((rate, 0.03, 3))
    found = {method: rows[*SETTINGS[1], *method]["paper"] for method in methods}
    expected = ["54.9 ± 0.9 (44M)", "57.1 ± 0.6 (44M)", "", "57.2 ± 0.9 (44M)"]
    assert list(found.values()) == expected
    small = [run._replace(size="pythia-14m") for run in figures.pick(world[0], procedure="BoN", noise=25, pairs=50)]
    assert [row["paper"] for row in figures.win_rate_rows(small, figures.Args())][:1] == ["57.7 ± 1.4 (7M)"]
    other = [run._replace(noise=35.0) for run in small]
    assert {row["paper"] for row in figures.win_rate_rows(other, figures.Args())} == {""}


# ---- claims ------------------------------------------------------------------------------------------------------


def test_gold_at_a_kl_distance_is_where_the_curve_first_reaches_it():
    curve = pandas.DataFrame({"x": [0.0, 4, 8, 2, 12], "y": [1.0, 2, 6, 0, 3]})
    found = {kl: figures.at_kl(curve, kl) for kl in (0, 1, 4, 5, 8, 10, 12, 13)}
    assert found == {0: 1, 1: 1.25, 4: 2, 5: 3, 8: 6, 10: 2.4, 12: 3, 13: None}


@pytest.mark.parametrize(("df", "quantile"), [(1, 12.7062), (2, 4.3027), (9, 2.2622), (10, 2.2281), (30, 2.0423)])
def test_the_interval_of_any_number_of_replicates(df, quantile):
    """Against a printed table of t, two-sided 95 %."""
    values = [0.0] * df + [1.0]  # of n = df + 1 values mean 1 / n and sample sd n ** -0.5
    center = 1 / (df + 1)
    half = quantile / (df + 1)
    assert figures.interval(values) == pytest.approx((center, center - half, center + half), abs=1e-4)


def test_paired_differences_and_their_interval_by_hand():
    """Of five replicates; what has another seed, no reward model in common or no such KL is no pair."""
    single = [a_run("single", 1, 2, seed=i, paths=str(i)) for i in range(1, 6)]
    wco = [a_run("wco", 1, 2 + x, seed=i, made_of=[str(i), "z"]) for i, x in enumerate((0.1, 0.3, 0.2, 0.5, 0.4), 1)]
    others = [a_run("single", 1, 9, seed=1, paths="y"), a_run("single", 1, 9, seed=6, paths="1")]
    differences = figures.paired(wco, single + others, "final")
    assert differences == pytest.approx([0.1, 0.3, 0.2, 0.5, 0.4])
    # sd of 0.1, ..., 0.5: sqrt(0.1 / 4); times t of 4 degrees of freedom, 2.7764, over sqrt(5)
    half = 2.776445 * (0.1 / 4) ** 0.5 / 5**0.5
    assert figures.interval(differences) == pytest.approx((0.3, 0.3 - half, 0.3 + half))
    assert figures.interval([1.0]) == (1.0, -float("inf"), float("inf"))
    far = [a_run("wco", 1, *[0.0] * 4, 2, seed=i, made_of=str(i)) for i in (1, 2)]  # KL 5; single ones reach 1
    assert figures.paired(far, single, "at KL 5") == [] and figures.paired(far, far, "at KL 5") == [0, 0]
    assert figures.paired(far, None, "at KL 5") == [2, 2]


def test_quantities_by_hand():
    run = a_run("uwo", 0, 4, 3, 3.25, se=0.25, grown=2.0, liked=1.5)
    found = {name: value(run) for name, value in figures.QUANTITIES.items()}
    assert found.pop("log growth of the variance") == pytest.approx(0.6931472)
    assert found == {
        "final": 3.25, "best": 4, "drop": 0.75, "at KL 5": None, "at KL 10": None, "at KL 20": None, "at KL 50": None,
        "at update 3": 3.25, "at update 6": None, "fall beyond noise": -0.25, "first member's liking": 8.25,
    }  # fmt: skip
    calm = a_run("uwo", 0, 4, 3.75, seed=1)
    assert figures.paired([run], [calm], "drop") == [-0.5] and figures.paired([run], [calm], "best") == [0]
    assert figures.paired([run], [calm], "first member's liking") == pytest.approx([-0.15])  # less is better
    assert figures.paired([run], [calm], "log growth of the variance") == pytest.approx([-0.6931472])


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.01, 0.5, "better"), (-0.5, -0.01, "worse"), (-0.04, 0.1, "no worse"), (-0.06, 0.1, "these runs cannot tell"),
        (-0.04, -0.01, "worse"), (-9, 9, "these runs cannot tell"),
    ],
)  # fmt: skip
def test_verdicts(low, high, verdict):
    assert figures.verdict_of(low, high, "final") == verdict
    of_scores = verdict if verdict in ("better", "worse") else "these runs cannot tell"  # 0.05 of gold is no measure
    assert figures.verdict_of(low, high, "first member's liking") == of_scores


def replicates(method, *golds, **more):
    """Three of one curve, with a little of their own; members a to e of each seed."""
    made_of = [f"{x}%s" for x in ("a" if method == "single" else "abcde")]
    runs = []
    for i in (1, 2, 3):
        mine = {"made_of": [x % i for x in made_of], "paths": " ".join(x % i for x in made_of)} | more
        runs.append(a_run(method, *(gold + 0.01 * i * j for j, gold in enumerate(golds)), seed=i, **mine))
    return runs


def judged(runs) -> dict:
    """{(claim, what, quantity): (verdict, whether the claim holds)}"""
    table = figures.claims_table(figures.claims_of(runs, WHERE, figures.Args()))
    return {(row["claim"], row["what"], row["quantity"]): (row["verdict"], row["holds"]) for row in table}


def test_claims_of_a_hand_made_study():
    many = [r for m, x in (("mean", 4.5), ("wco", 3.5), ("uwo", 1.0)) for r in replicates(m, 1, 5, x, bases=5)]
    runs = replicates("single", 1, 5, 2) + replicates("mean", 1, 5, 2.02, grown=3.0) + many
    runs += replicates("wco", 1, 5, 4) + replicates("uwo", 1, 5, 4.8, grown=2.0) + replicates("warm", 1, 5, 1)
    for method, end in (("single", 4.0), ("mean", 4.0), ("wco", 4.97), ("uwo", 4.98)):
        runs += replicates(method, 1, 5, end, kl=0.1)
    runs += replicates("wco", 1, 5, 4, setup="not standardised") + replicates("uwo", 1, 5, 4, setup="not standardised")
    leak = "value model from the first reward model, not standardised"
    for setup, end, liked in ((leak, 0.0, 4.0), (f"{leak}, λ of GAE 1", 1.0, 5.0)):
        runs += replicates("wco", 1, 5, end, setup=setup, liked=liked)
    found = judged(runs)
    assert found["1", "single", "fall beyond noise"] == ("worse", "yes")
    assert found["2", "wco to single", "final"] == found["2", "wco to single", "drop"] == ("better", "yes")
    assert found["3a", "wco at 0.1", "fall beyond noise"] == ("better", "yes")  # 0.03 of a noise of 0.5
    assert found["3b", "uwo at 0.1 to 0", "best"] == ("no worse", "yes")
    assert found["4", "wco to single at 0.1", "final"] == ("better", "yes")
    assert found["5a", "mean", "fall beyond noise"] == found["5b", "mean to wco", "final"] == ("worse", "yes")
    assert found["6", "mean to single at 0", "final"] == ("better", "these runs cannot tell")
    assert found["6", "mean to single at 0.1", "final"] == ("no worse", "these runs cannot tell")
    assert found["7", "uwo to mean", "log growth of the variance"] == ("better", "yes")
    assert found["8", "warm to single at 0", "final"] == ("worse", "no runs")
    assert found["8", "warm to single at 0.1", "final"] == ("no runs", "no runs")
    assert found["9a", "wco of several bases to one", "final"] == ("worse", "no")
    assert found["9a", "mean of several bases to one", "final"] == ("better", "no")
    assert found["9b", "mean of several bases", "fall beyond noise"] == ("no worse", "no")  # 0.5, its noise, and 0.01 i
    assert found["9b", "uwo of several bases", "fall beyond noise"] == ("worse", "no")
    assert found["10", "wco standardised to not", "final"] == ("no worse", "asked")
    assert found["10", "uwo standardised to not", "final"] == ("better", "asked")
    where = "value model from member 1, λ 1 to from member 1"
    assert found["11", where, "final"] == ("better", "asked")
    assert found["11", where, "first member's liking"] == ("worse", "asked")
    assert found["11", where, "at KL 5"] == ("no runs", "asked")  # these curves end at 2
    # what member sets of other replicates would be is not compared
    elsewhere = [run._replace(made_of=frozenset("xyz")) for run in replicates("wco", 1, 5, 4, setup="not standardised")]
    kept = [run for run in runs if run.setup != "not standardised"]
    assert judged(kept + elsewhere)["10", "wco standardised to not", "final"][0] == "no runs"


def test_table_of_methods():
    runs = replicates("single", 1, 3, 2) + replicates("wco", 1, 3, 2.5, 1, 1, 1, 1)
    rows = {(row["method"], row["quantity"]): row for row in figures.methods_table(runs, figures.Args())}
    single, wco = rows["single", "final"], rows["wco", "final"]
    assert (single["mean"], single["n"], single["to single"]) == (pytest.approx(2.04), 3, "")
    # differences -1 + 0.04 i: mean -0.92, sd 0.04, 4.303 x 0.04 / sqrt(3) = 0.0994
    assert (wco["mean"], wco["to single"], wco["pairs"]) == (pytest.approx(1.12), "-0.920 (-1.019 to -0.821)", 3)
    assert (rows["wco", "at KL 5"]["n"], rows["wco", "at KL 5"]["pairs"]) == (3, 0)  # single ones end at 2


def test_holm_by_hand():
    """Sorted 0.01, 0.02, 0.03, 0.5 are times 4, 3, 2, 1, and none is below the one before it: 0.06 stays."""
    assert figures.holm([0.5, 0.02, 0.01, 0.03]) == pytest.approx([0.5, 0.06, 0.04, 0.06])
    assert figures.holm([0.9, 0.8]) == [1.0, 1.0]
    assert figures.holm([]) == []


def test_p_value_and_interval_end_together():
    """Mean half of t(2) = 4.3027 of the standard error 1 / sqrt(3) away from 0: p is 5 % where the interval ends."""
    end = 4.302653 / 3**0.5
    assert figures.p_value([end - 1, end, end + 1]) == pytest.approx(0.05, abs=1e-5)


def test_replicates_for_a_power_against_printed_tables():
    """Two-sided t test of one sample at 5 %: with power 80 %, 34 for an effect of 0.5 and 10 for one of 1."""
    for effect, needed in ((0.5, 34), (1.0, 10), (-1.0, 10)):
        values = [effect - 1, effect, effect + 1]  # sample standard deviation 1
        assert figures.replicates_for(values, 0.8) == needed
    assert figures.replicates_for([-0.999, 0.001, 1.001], 0.8) is None


def later_rows(runs) -> dict:
    """{(question, what, quantity): row}"""
    table = figures.later_table(runs, WHERE, figures.Args())
    return {(row["question"], row["what"], row["quantity"]): row for row in table}


def test_what_the_penalty_does_by_hand():
    """Final gold of replicate i is its end and 0.01 i for each step after the first."""
    runs = replicates("single", 1, 5, 2, 2, 2) + replicates("wco", 1, 5, 3, 3) + replicates("mean", 1, 5, 2)
    runs += replicates("single", 1, 5, 3, kl=0.02)  # not the largest penalty
    runs += replicates("single", 1, 5, 4, kl=0.1) + replicates("wco", 1, 5, 4, kl=0.1)
    found = later_rows(runs)
    single = found["KL penalty 0.1 to 0", "single", "final"]
    half = 4.302653 * 0.02 / 3**0.5  # of 2 - 0.02 i: mean 1.96, sd 0.02
    values = [single[key] for key in ("n", "difference", "low", "high")]
    assert values == pytest.approx([3, 1.96, 1.96 - half, 1.96 + half])
    assert found["KL penalty 0.1 to 0", "wco", "final"]["difference"] == pytest.approx(0.98)
    assert ("KL penalty 0.1 to 0", "mean", "final") not in found  # has no run with the penalty
    over_methods = found["KL penalty 0.1 to 0", "mean over methods", "final"]
    assert (over_methods["n"], over_methods["difference"]) == (3, pytest.approx(1.47))
    # claim 6: two comparisons that vary, so Holm doubles the smaller p
    mean_row, wco_row = [found["claim 6", f"{method} to single at 0", "final"] for method in ("mean", "wco")]
    assert mean_row["difference"] == pytest.approx(-0.04)
    assert wco_row["holm"] == pytest.approx(2 * wco_row["p"])
    assert mean_row["holm"] == pytest.approx(mean_row["p"])
    assert not [row for row in found.values() if row["question"] != "claim 6" and "holm" in row]


def test_a_replicate_without_one_of_the_comparisons_is_left_out():
    wco, single = replicates("wco", 1, 5, 4), replicates("single", 1, 5, 2)
    assert figures.averaged([(wco, single)], "final") == pytest.approx([2, 2, 2])
    assert figures.averaged([(wco, single), (wco[1:], single)], "final") == pytest.approx([2, 2])


def test_the_leak_early_and_without_clipping_by_hand():
    """Clipping off costs 1 with lambda 0.95 and 2 with lambda 1: 1.5; lambda 1 gives 3 and 2."""
    leak = "value model from the first reward model, not standardised"
    off = "no value clipping"
    ends = {leak: 5, f"{leak}, {off}": 4, f"{leak}, λ of GAE 1": 8, f"{leak}, λ of GAE 1, {off}": 6}
    runs = replicates("single", 1, 2)
    for setup, end in ends.items():
        mine = replicates("wco", 0, 0, 0, 1, 0, 0, 2, end, setup=setup)
        runs += [run._replace(curve=run.curve.assign(y=run.curve["y"] + run.seed * (end - 5) / 50)) for run in mine]
    start = replicates("wco", 0, 0, 0, 1.5, 0, 0, 4, 3, setup="not standardised")
    runs += [run._replace(curve=run.curve.assign(y=run.curve["y"] + run.seed / 10)) for run in start]
    found = later_rows(runs)
    what = "value model from SFT to from member 1"
    assert found["leak", what, "at update 3"]["difference"] == pytest.approx(0.5 + 0.2)
    assert found["leak", what, "at update 6"]["difference"] == pytest.approx(2 + 0.2)
    # seeds add (end - 5) / 50 each, 2 in the mean: to -1 and -2 that is -0.04 and -0.08, to 3 and 2 0.12 and 0.08
    assert found["leak", "no clipping, mean over both λ", "final"]["difference"] == pytest.approx(-1.5 - 0.06)
    assert found["leak", "λ 1, mean over both clippings", "final"]["difference"] == pytest.approx(2.5 + 0.10)


def test_question_figures_compare_equal_members_only():
    leak = "value model from the first reward model, not standardised"
    runs = (
        replicates("wco", 1, 2) + replicates("wco", 1, 4, bases=5) + replicates("wco", 1, 3, setup="not standardised")
    )
    runs += [run._replace(made_of=frozenset("a1")) for run in replicates("wco", 1, 7, setup="not standardised")][1:]
    runs += [run._replace(made_of=frozenset("a1")) for run in replicates("wco", 1, 8, setup=leak, liked=2.0)]
    figure = figures.question_figures(runs, WHERE, figures.Args())
    ends = {name: [(x["series"], x["runs"], round(x["y"], 6)) for plot in plots for x in plot.rows if x["x"]]
            for name, (_, plots) in figure.items()}  # fmt: skip
    assert ends["bases"] == [("one base", 3, 2.02), ("several bases", 3, 4.02)]
    assert ends["standardised"] == [("standardised", 3, 2.02), ("not standardised", 3, 3.02)]
    start = ends["leak"][:2]
    assert start == [("from SFT", 2, 7.025), ("from member 1", 3, 8.02)]
    assert ends["leak"][-1] == ("from member 1", 3, 2.0)


# ---- drawing, the whole command ----------------------------------------------------------------------------------


def drawn(plot, order=None):
    axis = Figure().subplots()
    figures.draw_plot(axis, plot, order or list(dict.fromkeys(row["series"] for row in plot.rows)))
    return axis


def test_curves_as_drawn(world):
    plot = world[1][3][1]
    axis = drawn(plot)
    right = next(other for other in axis.figure.axes if other is not axis)
    rows = rows_of(plot)
    for name, line, dashed, band in zip(
        rows["series"].unique(), axis.lines, right.lines, axis.collections, strict=True
    ):
        mine = rows[rows["series"] == name]
        color, marker = figures.METHODS[name.partition(",")[0]]
        assert (line.get_label(), line.get_color(), line.get_marker()) == (name, color, marker)
        assert (dashed.get_color(), dashed.get_linestyle()) == (color, "--")
        assert list(line.get_xdata()) == list(dashed.get_xdata()) == list(mine["x"])
        assert list(line.get_ydata()) == list(mine["y"]) and list(dashed.get_ydata()) == list(mine["proxy"])
        corners = {tuple(point) for point in band.get_paths()[0].vertices}
        assert corners == {*zip(mine["x"], mine["low"], strict=True), *zip(mine["x"], mine["high"], strict=True)}
    assert axis.get_xscale() == "function"
    assert [axis.transScale.transform((x, 0))[0] for x in (0, 4, 9)] == [0, 2, 3]
    assert [text.get_text() for text in axis.get_legend().get_texts()] == list(rows["series"].unique())


def test_bars_as_drawn():
    rows = [
        figures.bar("single", x, [a_run("single", 1, y), a_run("single", 1, y + 2)]) for x, y in ((50, 0), (1000, 4))
    ]
    rows += [figures.bar("mean", 1000, [a_run("mean", 3, 6, procedure="BoN")])]
    axis = drawn(figures.Plot("", "bars", "pairs", rows, "x"))
    found = [(round(bar.get_x() + bar.get_width() / 2, 6), bar.get_y(), bar.get_height()) for bar in axis.patches]
    start = 5 / 3  # mean of 1, 1 and 3
    expected = [(-0.2, start, 1 - start), (0.8, start, 5 - start), (1.2, start, 6 - start)]
    assert found == [pytest.approx(bar) for bar in expected]
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["50", "1,000"]
    whiskers = [container.lines[2][0].get_segments() for container in axis.containers if hasattr(container, "lines")]
    spread = 2**0.5
    heights = [[list(segment[:, 1]) for segment in segments] for segments in whiskers]
    assert heights == [[pytest.approx([1 - spread, 1 + spread]), pytest.approx([5 - spread, 5 + spread])], [[5, 9]]]


def test_the_command(tmp_path, monkeypatch, capsys):
    """Of one best-of-n folder and three PPO runs: what is drawn, what is written beside it and what is missing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ensembles/figures.py", "--runs", "runs"])
    paths = make_bon(BASE, (0.1,)).parent and make_members(BASE)
    make_ppo("single", BASE, paths[:1], golds={0: 1.0, 2: 9.0, 5: 3.0}, samples={"p": 1.0, "q": 0.0})
    make_ppo("mean", BASE, paths, golds={0: 1.0, 2: 3.0, 5: 4.0}, samples={"p": 1.0, "q": 2.0})
    make_ppo("killed", BASE, paths, "wco", updates=3)
    figures.main(figures.Args(runs="runs", output_dir="out/here", max_kl=5, pdf=True))
    kinds = ("png", "pdf", "csv")
    there = {f"figure_{number}.{kind}" for number in (3, 5, 4, 10, 11) for kind in kinds}
    assert {path.name for path in Path("out/here").iterdir()} == {
        *there, "claims.csv", "methods.csv", "win_rates.csv", "ppo_runs.csv", "figures.md", "runs.jsonl"
    }  # fmt: skip
    ppo_runs = pandas.read_csv("out/here/ppo_runs.csv")
    columns = ["method", "members", "paths", "seed", "first", "best", "final"]
    assert ppo_runs[columns].values.tolist() == [
        ["single", 1, paths[0], 1, 1, 9, 3],
        ["mean", 3, " ".join(paths), 1, 1, 4, 4],
    ]
    for name in there:
        start = {"png": b"\x89PNG", "pdf": b"%PDF", "csv": b"panel,series"}[name[-3:]]
        assert Path("out/here", name).read_bytes().startswith(start)
    frame = pandas.read_csv("out/here/figure_5.csv")
    assert frame[["panel", "series", "x", "y"]].values.tolist() == [
        [panel, method, x, y]
        for panel, places in (("25 % label noise", (0, 4)), ("25 % label noise, by update", (0, 2, 5)))
        for method, golds in (("single", (1, 9, 3)), ("mean", (1, 3, 4)))
        for x, y in zip(places, golds, strict=False)  # KL ends at 5, updates are all there
    ]
    wins = pandas.read_csv("out/here/win_rates.csv")
    assert wins[wins["procedure"] == "PPO"][["method", "win_rate", "against"]].values.tolist() == [["mean", 0.75, 1]]
    methods = pandas.read_csv("out/here/methods.csv").set_index(["method", "quantity"])["mean"]
    assert (methods["single", "drop"], methods["mean", "final"], methods["single", "at KL 5"]) == (6, 4, 8)
    text = Path("out/here/figures.md").read_text()
    assert capsys.readouterr().out.strip() == text.strip()
    assert "| PPO | 25 | nano-s | 100 | 1 |  | 0.0 | mean |  | 3 | 1 | 75.0 ± 0.0 | 60.2 ± 3.5 (44M) |" in text.replace(
        "| 0 |", "| 0.0 |"
    )
    missing, left_out = text.partition("## Missing")[2].split("## Left out")
    named = {line.partition(":")[0].removeprefix("- ") for line in missing.strip().splitlines()}
    assert {f"figure_{number}" for number in (6, 7, 8, 9, 12, 13, 14)} <= named
    assert not {f"figure_{number}" for number in (3, 4, 5, 10, 11)} & named
    assert {"claim 1", "claim 2", "leak", "bases", "standardised"} <= named  # one replicate has no interval
    assert "bash benchmark/ensembles.sh" in missing and "ensembles/study.py" in missing
    assert "runs/ppo/killed: it is not complete" in left_out
    assert "--bon-lambda 0.5: of uwo there is λ 0.1" in left_out and "--ppo-lambda" not in left_out
    monkeypatch.setattr(figures, "read_ppo", None)  # the runs' folders are not looked at again
    figures.main(figures.Args(runs="out/here/runs.jsonl", output_dir="out/again", max_kl=5, pdf=True))
    for path in Path("out/again").iterdir():
        if path.suffix in (".png", ".csv", ".jsonl"):
            assert path.read_bytes() == Path("out/here", path.name).read_bytes(), path.name
    assert Path("out/again/figures.md").read_text() == text.partition("\n## Left out")[0] + "\n## Left out" + "".join(
        line + "\n" for line in left_out.splitlines() if "killed" not in line
    )


def test_committed_tables_are_those_of_the_committed_runs(tmp_path):
    """benchmark/results/ensembles: every table is what this script makes of runs.jsonl there."""
    folder = SCRIPT.parents[1] / "benchmark" / "results" / "ensembles"
    figures.main(figures.Args(runs=str(folder / "runs.jsonl"), output_dir=str(tmp_path)))
    made = {path.name for path in tmp_path.iterdir()}
    assert made | {"pilot.csv", "pilot.png", "rounding.csv"} == {path.name for path in folder.iterdir()}
    for name in sorted(name for name in made if name.endswith(".csv")):
        pandas.testing.assert_frame_equal(pandas.read_csv(tmp_path / name), pandas.read_csv(folder / name), rtol=1e-5)
