"""ensembles/figures.py: what is read, drawn and judged, against hand-made runs and hand-computed numbers."""

import importlib.util
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
NS, UPDATES = (1, 4, 16), (0, 2, 5)  # of the curves; 44 episodes in batches of 8 are 5 updates


def level(setting, method, uwo_lambda=None, members=1, member=0, kl=0.0, seed=0) -> float:
    """How much gold a hand-made curve gains from one of its points to the next: another number for every run."""
    noise, size, pairs = setting
    found = {"single": 1, "mean": 2, "wco": 3, "uwo": 4}[method] + noise / 100 + (size == "nano-xs") / 2 - pairs / 1000
    return found + (uwo_lambda or 0) / 7 + members / 90 + member / 30 - kl * 3 + seed / 50


def write_json(file: Path, settings: dict):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(settings))


def make_members(setting, count: int = 3) -> list[str]:
    """Reward models of a setting, relative to the working directory; their paths."""
    noise, size, pairs = setting
    paths = [f"models/{noise}_{size}_{pairs}/{i}" for i in range(count)]
    data = {"preference_dataset": f"data/labelled/noise_{noise}", "total_episodes": 2 * pairs + 1}
    for path in paths:
        write_json(Path(path, "args.json"), data | {"stage": "reward", "model": f"x/{size}", "num_train_epochs": 2})
    return paths


def make_bon(setting, lambdas=(0.1, 0.5), name: str | None = None, count: int = 3) -> Path:
    """A folder of best_of_n.py: gold 10 + level x (0, 1, 2), band 0.3 below to 0.1 above, proxy 2 x gold."""
    paths, folder = make_members(setting, count), Path("runs/bon", name or "_".join(map(str, setting)))
    write_json(folder / "args.json", {"reward_model_paths": paths, "gold": "g", "samples": 16, "prompts": 9})
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
    update times the gain. more: golds, updates; samples {id: gold} or None."""
    folder = Path("runs/ppo", name)
    settings = {"stage": "ppo", "gold": "g", "reward_model_paths": paths, "reward_combination": combination}
    settings |= {"uwo_lambda": uwo_lambda, "kl_coef": kl, "seed": seed, "total_episodes": 44, "batch_size": 8}
    write_json(folder / "args.json", settings)
    golds = more.get("golds") or dict(zip(UPDATES, (10 + i * gain for i in range(3)), strict=True))
    lines = []
    for update in range(more.get("updates", 5) + 1):
        line = {"update": update, "episode": 8 * update}
        line |= {"objective/reward_model_variance": update * gain} if update else {}
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
        rows = [
            {"id": name, "response": "x", "kl_k2": 1, "tokens": 2, "score_1": 9, "gold": x}
            for name, x in samples.items()
        ]
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
    base = dict(zip(("noise", "size", "pairs"), BASE, strict=True))
    found = figures.paper_figures(runs, base, 0.05, figures.Args())
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
    write_json(Path("rm/args.json"), settings | {"preference_dataset": "data/noise_12.5/"})
    assert figures.member_setting("rm") == figures.member_setting("rm/model") == (12.5, "pythia-70m", 46)


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
                {"preference_dataset": "noise_0", "model": "nano-s", "total_episodes": 201, "num_train_epochs": 2},
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
    make_bon(BASE, (0.5,), count=2)
    write_json(Path("runs/no_gold/args.json"), {"stage": "ppo", "gold": None})
    write_json(Path("runs/sft/args.json"), {"stage": "sft"})
    runs, problems = figures.read_runs("runs")
    found = {run[5:10] for run in figures.pick(runs, procedure="BoN")}
    both = " ".join(paths[:2])
    singles = {("single", None, 1, path, 0) for path in paths[:2]}
    assert found == singles | {("mean", None, 2, both, 0), ("wco", None, 2, both, 0), ("uwo", 0.5, 2, both, 0)}
    one, uwo = figures.pick(runs, procedure="PPO")
    assert one[:10] == ("PPO", *BASE, 0.0, "single", None, 1, paths[0], 4)
    assert uwo[:10] == ("PPO", *BASE, 0.3, "uwo", 0.2, 3, " ".join(paths), 1)
    assert uwo.samples.to_dict() == {"a": 1.5, "b": 2.5} and list(uwo.variance["y"]) == [1, 2, 3, 4, 5]
    assert uwo.curve.to_dict("list") == {
        "step": [0, 2, 5], "x": [0, 4, 10], "y": [10, 11, 12], "se": [0.25] * 3, "proxy": [30, 33, 36]
    }  # fmt: skip
    curve = figures.pick(runs, procedure="BoN", method="wco")[0].curve
    gain = level(BASE, "wco", members=2)
    assert list(curve["step"]) == [1, 4, 16] and list(curve["x"]) == [0, 1.5, 3]
    assert list(curve["y"]) == pytest.approx([10, 10 + gain, 10 + 2 * gain])
    assert list(curve["se"]) == pytest.approx([0.4 / 3.92] * 3)
    assert problems == []


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
        "runs/bon/0_nano-s_100: no tables; `python ensembles/best_of_n.py --output-dir runs/bon/0_nano-s_100 --estimate`",
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
