"""ensembles/study.py: its scripts understand its commands, its steps read what earlier ones wrote, and its rows."""

import json
from pathlib import Path

import pandas
import pytest
import study
import tyro
from conftest import script, write_jsonl
from datasets import Dataset, DatasetDict

RUNS = "runs/ensembles_study"
DRAW = 2
TRUTH = "quickstart/truth.py:score"


def parsed(steps: list) -> list:
    """[(job, script, Args)] of each step; an unknown flag or a value of the wrong type would exit."""
    jobs = [[(job, job.command[1], job.command[2:]) for job in step] for step in steps]
    return [[(job, path, tyro.cli(script(path).Args, args=words)) for job, path, words in step] for step in jobs]


@pytest.fixture(scope="module")
def units() -> dict[str, list]:
    return {name: parsed(study.steps_of(study.Args(), unit, DRAW)) for name, unit in study.UNITS.items()}


def five(arm: str) -> list[str]:
    return [f"{RUNS}/reward/{arm}/{DRAW}/{i}" for i in range(1, 6)]


def outputs(steps: list) -> dict:
    """{output folder: Args} of all jobs that train or label."""
    return {args.output_dir: args for step in steps for _, _, args in step if hasattr(args, "output_dir")}


def test_each_arm_has_its_own_reward_models(units):
    pairs = {"centre": "labelled/2/noise_25", "noise_0": "labelled/2/noise_0", "noise_35": "labelled/2/noise_35"}
    pairs |= {"size_s": "labelled/2/noise_25", "pairs_640": "labelled_few/2/noise_25"}
    for arm, name in (pairs | {"gold_model": "labelled_by_model/2/noise_25"}).items():
        made = outputs(units[f"bon_{arm}"])
        for member, folder in enumerate(five(arm), 1):
            args = made[folder]
            size = "s" if arm == "size_s" else "xs"
            assert (args.preference_dataset, args.seed) == (f"{RUNS}/{name}", 5 + member)
            assert (args.model, args.sft_model_path) == (f"quickstart/bases/nano-{size}", f"{RUNS}/sft/{size}")
            assert args.eval_every == (60 if arm == "noise_0" else 0)
        labels = made[f"{RUNS}/{name.rpartition('/')[0]}"]
        assert (labels.prompts, labels.seed) == (1000 if arm == "pairs_640" else 4000, DRAW)
        assert labels.gold == (f"{RUNS}/gold" if arm == "gold_model" else TRUTH)


def test_the_gold_model_learns_from_the_truth_and_pairs_of_its_own(units):
    made = outputs(units["bon_gold_model"])
    model, labels = made[f"{RUNS}/gold"], made[f"{RUNS}/labelled_gold"]
    assert (model.model, model.preference_dataset) == ("quickstart/bases/nano-m", f"{RUNS}/labelled_gold/noise_0")
    assert (labels.gold, labels.seed) == (TRUTH, 0)
    scored = [args for step in (units["bon_gold_model"][-2], units["ppo_gold_model"][-1]) for _, _, args in step]
    assert {(args.gold, args.second_gold) for args in scored} == {(f"{RUNS}/gold", TRUTH)} and len(scored) == 2
    assert {args.gold for _, _, args in units["ppo_kl_0.1"][-1]} == {TRUTH}


def test_tables_of_best_of_n_use_the_members_of_their_arm(units):
    found = {}
    for name in (name for name in units if name.startswith("bon_")):
        [(_, _, samples)] = units[name][-2]
        for job, _, args in units[name][-1]:
            assert args.estimate and args.output_dir == samples.output_dir and args.tables == f"{RUNS}/{job.name}"
            models = [samples.reward_model_paths[i - 1] for i in args.members]
            found[job.name.split("/")[1]] = models, args.uwo_lambda
    expected = {arm: (five(arm), 0.5) for arm in study.MODELS}
    expected |= {"warm": ([f"{RUNS}/reward/warm/{DRAW}"], 0.5)}
    for arm, prefix in (("centre", ""), ("noise_0", "noise_0_")):
        expected |= {f"{prefix}members_{i}": (five(arm)[:i], 0.5) for i in (3, 4)}
    assert found == expected | {f"lambda_{x:g}": (five("centre"), x) for x in (0.1, 2.0)}


def test_each_ppo_run_has_the_settings_and_models_of_its_name(units):
    runs = {}
    for name in (name for name in units if name.startswith("ppo_")):
        for job, _, args in units[name][-2]:
            _, arm, method_and_kl, draw = job.name.split("/")
            method, _, kl_coef = method_and_kl.partition("_kl_")
            models = five(study.UNITS[name].models)
            if method.startswith("single"):
                models = [models[int(method[-1]) - 1 if method[-1].isdigit() else 0]]
            elif method == "warm":
                models = [f"{RUNS}/reward/warm/{DRAW}"]
            assert args.seed == int(draw) == DRAW and args.reward_model_paths == models
            combination = method if method in ("wco", "uwo") else "mean"
            assert (args.kl_coef, args.reward_combination) == (float(kl_coef), combination)
            assert args.penalty_reward_value is None and args.output_dir == f"{RUNS}/{job.name}"
            assert args.total_episodes == (3456 if arm == "long" else 1152)
            if method == "uwo":
                assert args.uwo_lambda == (0.5 if arm == "lambda_0.5" else 0.1)
            if name != "ppo_uwo":
                runs.setdefault((arm, kl_coef), []).append(method)
        assert [x.runs for _, _, x in units[name][-1]] == [tuple(x.output_dir for _, _, x in units[name][-2])]
    four, members = ["single", "mean", "wco", "uwo"], ["single_2", "single_3", "single_4", "single_5"]
    expected = {("centre", "0.1"): [*four, "warm"], ("gold_model", "0"): four, ("noise_0", "0.1"): four}
    expected[("members", "0.1")] = ["single", *members]
    expected |= {("centre", "0.02"): [*four, "warm"], ("centre", "0"): four}
    assert runs == expected | {("lambda_0.5", "0.1"): ["uwo"], ("long", "0.02"): ["single", "uwo"]}


def test_no_two_units_make_one_run():
    """UWO's other draws come after those of all methods."""
    made = [(unit.arm or unit.models, unit.kl_coef, method, draw) for unit in study.UNITS.values()
            if isinstance(unit, study.Ppo) for method in unit.methods.split() for draw in unit.draws]  # fmt: skip
    assert len(made) == len(set(made)) and ("centre", "0.1", "uwo", 17) in made


@pytest.mark.parametrize("name", list(study.UNITS))
def test_steps_read_what_earlier_ones_wrote_and_name_what_they_write(units, name):
    written = set()
    for step in units[name]:
        for job, _, args in step:
            read = [getattr(args, flag, None) for flag in ("sft_model_path", "policy", "preference_dataset")]
            read = [path for one in read if one for path in (one if isinstance(one, list) else [one])]
            read += getattr(args, "reward_model_paths", None) or []
            read += [path for path in (getattr(args, "gold", None),) if path and ":" not in path]
            assert all(any(path == x or path.startswith(f"{x}/") for x in written) for path in read), job.name
            folder = getattr(args, "tables", None) or getattr(args, "output_dir", None) or max(args.runs)
            assert study.ROOT / folder in job.result.parents
        written |= {args.output_dir for _, _, args in step if hasattr(args, "output_dir")}


def make_tables(root: Path, draw: int):
    """The tables of bon_noise_0 with two members: gold 1 and 3 of each alone, and 2 of the others."""
    for arm, paths in {"noise_0": ["a", "b"], "noise_0_members_3": ["a"], "noise_0_members_4": ["a"]}.items():
        folder = root / RUNS / f"best_of_n/{arm}/{draw}"
        folder.mkdir(parents=True)
        (folder / "args.json").write_text(json.dumps({"reward_model_paths": paths, "seed": draw}))
        golds = {"single": 2, "single_1": 1, "single_2": 3, "mean": 2, "wco": 2, "uwo": 2}
        rows = [{"method": x, "n": n, "kl": 0, "gold": y / 3 * n / 8, "proxy": 0, "wins": 0.5, "wins_sd": 0.1}
                for x, y in golds.items() for n in (8, 1)]  # fmt: skip
        pandas.DataFrame(rows).to_csv(folder / "best_of_n.csv", index=False)
    for i in (1, 2):
        write_jsonl(root / RUNS / f"reward/noise_0/{draw}/{i}/metrics.jsonl", [{"update": 1},
                    {"update": 2, "eval/loss": 0.1 * i, "eval/accuracy": 0.9},
                    {"update": 4, "eval/loss": 0.3 * i, "eval/accuracy": 0.8}])  # fmt: skip
    data = DatasetDict({"train": Dataset.from_dict({"x": [1, 2, 3]})})
    data.save_to_disk(str(root / RUNS / f"labelled/{draw}/noise_0"))


def test_rows_of_best_of_n(tmp_path, monkeypatch):
    """A unit's rows come at once, and its draw is made then. Numbers have five digits."""
    monkeypatch.setattr(study, "ROOT", tmp_path)
    monkeypatch.setattr(study.Args, "scale", study.Scale(members=2))
    args = study.Args(rows=tmp_path / "study.jsonl")
    make_tables(tmp_path, 3)
    assert not study.is_made(args, "bon_noise_0", 3)
    study.add_rows(args, "bon_noise_0", 3, "abc")
    rows = [json.loads(line) for line in args.rows.read_text().splitlines()]
    assert len(rows) == 3 * 4 and {(row["unit"], row["commit"]) for row in rows} == {("bon_noise_0", "abc")}
    [own] = [row for row in rows if row["arm"] == "noise_0" and row["method"] == "single"]
    assert (own["gold"], own["wins"], own["pairs"]) == ([0.083333, 0.66667], [0.5, 0.5], 3)
    assert own["member_gold"] == [[0.041667, 0.33333], [0.125, 1.0]] and own["wins_sd"] == [0.1, 0.1]
    assert (own["member_steps"], own["member_loss"]) == ([2, 4], [[0.1, 0.3], [0.2, 0.6]])
    assert own["folder"] == f"{RUNS}/best_of_n/noise_0/3"
    assert {row["threads"] for row in rows} == {max(1, study.cores() // 2)} and own["cpu"]
    assert study.is_made(args, "bon_noise_0", 3) and not study.is_made(args, "bon_noise_0", 4)
    with pytest.raises(SystemExit, match="threads"):  # another share of the cores would round differently
        monkeypatch.setattr(study, "cores", lambda: 64)
        monkeypatch.setattr(study, "one_commit", lambda *_: "abc")
        monkeypatch.setattr(study, "run_jobs", lambda *_: None)
        study.main(args)


def test_rows_of_ppo(tmp_path, monkeypatch):
    """Wins are counted post by post against the first member's policy, after the last update."""
    monkeypatch.setattr(study, "ROOT", tmp_path)
    args = study.Args(rows=tmp_path / "study.jsonl")
    settings = {"reward_model_paths": ["a"], "reward_combination": "mean", "kl_coef": 0.1, "seed": 13}
    settings |= {"total_episodes": 16, "batch_size": 8}
    for method, golds in {"single": [0, 0, 5, 5], "uwo": [9, 9, 7, 5]}.items():
        folder = tmp_path / RUNS / f"ppo/centre/{method}_kl_0.1/13"
        write_jsonl(folder / "metrics.jsonl", [{"update": i, "objective/reward_model_variance": 0} for i in (1, 2)])
        (folder / "args.json").write_text(json.dumps(settings))
        curve = {"update": [0, 2], "gold": [1, 2], "kl_k2": [0, 1], "score": [0, 3]}
        pandas.DataFrame(curve).to_csv(folder / "gold.csv", index=False)
        samples = pandas.DataFrame({"id": ["x", "y", "y", "x"], "update": [0, 0, 2, 2], "gold": golds})
        samples.assign(query="post", response=list("abcd")).to_csv(folder / "gold_samples.csv", index=False)
    study.add_rows(args, "ppo_uwo", 13, "abc")
    single, uwo = [json.loads(line) for line in args.rows.read_text().splitlines()]
    assert (single["method"], single["wins"], single["post_gold"]) == ("single", [0.5], [5, 5])
    assert (uwo["method"], uwo["wins"], uwo["gold"], uwo["unit"]) == ("uwo", [0.75], [1, 2], "ppo_uwo")
    assert uwo["post_gold"] == [5, 7] and uwo["sample"] == {"query": "post", "response": "d"}
    assert study.is_made(args, "ppo_uwo", 13) and not study.is_made(args, "ppo_members", 13)  # another unit
