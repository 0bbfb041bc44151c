"""ensembles/study.py: its scripts understand its commands, its steps read what earlier ones wrote, and its rows."""

import json
from collections import Counter
from pathlib import Path

import pytest
import study
import tyro
from conftest import script

RUNS = "runs/ensembles"
DRAW = 2


def parsed(steps: list) -> list:
    """[(job, script, Args)] of each step; an unknown flag or a value of the wrong type would exit."""
    jobs = [[(job, job.command[1], job.command[2:]) for job in step] for step in steps]
    return [[(job, path, tyro.cli(script(path).Args, args=words)) for job, path, words in step] for step in jobs]


@pytest.fixture(scope="module")
def parts() -> dict[str, list]:
    args = study.Args()
    return {name: parsed(getattr(study, name)(args, DRAW)) for name in ("best_of_n", "ppo", "gold_model")}


def five(arm: str) -> list[str]:
    return [f"{RUNS}/reward/{arm}/{DRAW}/{i}" for i in range(1, 6)]


def test_each_arm_has_its_own_reward_models(parts):
    pairs = {"centre": "labelled/2/noise_25", "noise_0": "labelled/2/noise_0", "noise_35": "labelled/2/noise_35"}
    pairs |= {"size_s": "labelled/2/noise_25", "pairs_640": "labelled_few/2/noise_25"}
    made = {args.output_dir: args for step in parts["best_of_n"] for _, path, args in step if path == "reward.py"}
    assert len(made) == 25
    for arm, name in pairs.items():
        for member, folder in enumerate(five(arm), 1):
            args = made[folder]
            size = "s" if arm == "size_s" else "xs"
            assert (args.preference_dataset, args.seed) == (f"{RUNS}/{name}", 5 + member)
            assert (args.model, args.sft_model_path) == (f"quickstart/bases/nano-{size}", f"{RUNS}/sft/{size}")
    labels = [args for step in parts["best_of_n"] for _, path, args in step if path.endswith("gold_label.py")]
    assert [(args.prompts, args.seed) for args in labels] == [(4000, DRAW), (1000, DRAW)]


def test_tables_of_best_of_n_use_the_members_of_their_arm(parts):
    (_, _, samples), *_ = parts["best_of_n"][-2]
    paths = {}
    for job, _, args in parts["best_of_n"][-1]:
        assert args.estimate and args.output_dir == samples.output_dir and args.tables == f"{RUNS}/{job.name}"
        paths[job.name.split("/")[1]] = [samples.reward_model_paths[i - 1] for i in args.members]
    expected = {arm: five(arm) for arm in study.ARMS} | {"warm": [f"{RUNS}/reward/warm/{DRAW}"]}
    assert paths == expected | {"members_3": five("centre")[:3], "members_4": five("centre")[:4]}


def test_each_ppo_run_has_the_settings_and_models_of_its_name(parts):
    groups = Counter()
    for job, _, args in parts["ppo"][-2]:
        _, arm, name, draw = job.name.split("/")
        method, _, kl_coef = name.partition("_kl_")
        expected = {"single": five(arm)[:1], "warm": [f"{RUNS}/reward/warm/{DRAW}"]}.get(method, five(arm))
        assert args.seed == int(draw) == DRAW and args.reward_model_paths == expected
        combination = method if method in ("wco", "uwo") else "mean"
        assert (args.kl_coef, args.reward_combination) == (float(kl_coef), combination)
        assert args.uwo_lambda == (0.1 if method == "uwo" else None) and args.penalty_reward_value is None
        groups[arm, kl_coef] += 1
    assert groups == {("centre", "0.02"): 5, ("centre", "0.1"): 5, ("noise_0", "0.1"): 4}
    assert [args.runs for _, _, args in parts["ppo"][-1]] == [(args.output_dir,) for _, _, args in parts["ppo"][-2]]


def test_the_gold_model_learns_from_the_truth_and_all_else_from_the_model(parts):
    made = {args.output_dir: args for step in parts["gold_model"] for _, _, args in step if hasattr(args, "output_dir")}
    model, truth = f"{RUNS}/gold", "quickstart/truth.py:score"
    assert (made[model].model, made[model].preference_dataset) == (
        "quickstart/bases/nano-m",
        f"{RUNS}/labelled_gold/noise_0",
    )
    assert (made[f"{RUNS}/labelled_gold"].gold, made[f"{RUNS}/labelled_model/2"].gold) == (truth, model)
    assert made[f"{RUNS}/labelled_gold"].seed != made[f"{RUNS}/labelled_model/2"].seed
    assert {made[path].preference_dataset for path in five("gold_model")} == {f"{RUNS}/labelled_model/2/noise_25"}
    scored = [made[f"{RUNS}/best_of_n/gold_model/2"], *(args for _, _, args in parts["gold_model"][-1])]
    assert {(args.gold, args.second_gold) for args in scored} == {(model, truth)} and len(scored) == 5
    runs = {path.split("/")[4]: args for path, args in made.items() if "/ppo/" in path}
    assert set(runs) == {f"{method}_kl_0" for method in ("single", "mean", "wco", "uwo")}
    assert all(set(args.reward_model_paths) <= set(five("gold_model")) and args.kl_coef == 0 for args in runs.values())


@pytest.mark.parametrize("part", ["best_of_n", "ppo", "gold_model"])
def test_steps_read_what_earlier_ones_wrote_and_name_what_they_write(parts, part):
    written = set()
    for step in parts[part]:
        for job, _, args in step:
            read = [getattr(args, flag, None) for flag in ("sft_model_path", "policy", "preference_dataset")]
            read = [path for one in read if one for path in (one if isinstance(one, list) else [one])]
            read += getattr(args, "reward_model_paths", None) or []
            read += [path for path in (getattr(args, "gold", None),) if path and ":" not in path]
            assert all(any(path == x or path.startswith(f"{x}/") for x in written) for path in read), job.name
            folder = getattr(args, "tables", None) or getattr(args, "output_dir", None) or args.runs[0]
            assert study.ROOT / folder in job.result.parents
        written |= {args.output_dir for _, _, args in step if hasattr(args, "output_dir")}


def test_rows_are_added_once_and_a_part_with_all_of_them_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "ROOT", tmp_path)
    args = study.Args(rows=tmp_path / "study.jsonl")
    for arm in (*study.ARMS, *study.MEMBERS, "warm"):
        folder = tmp_path / RUNS / f"best_of_n/{arm}/3"
        folder.mkdir(parents=True)
        paths = ["warm"] if arm == "warm" else ["a", "b"]
        (folder / "args.json").write_text(json.dumps({"reward_model_paths": paths, "seed": 3}))
        lines = [f"{method},1,0.0,0.5,0.1" for method in (("single",) if arm == "warm" else ("single", "mean"))]
        (folder / "best_of_n.csv").write_text("method,n,kl,gold,proxy\n" + "\n".join(lines) + "\n")
    monkeypatch.setattr(study.figures, "method_of", lambda paths, name: "warm" if paths == ["warm"] else name)
    assert not study.is_made(args, "best_of_n", 3)
    rows = list(study.new_rows(args, 3))
    assert len(rows) == 7 * 2 + 1 and sum(row["arm"] == "centre" for row in rows) == 3
    assert {row["folder"].split("/")[0] for row in rows} == {"runs"}
    args.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert study.is_made(args, "best_of_n", 3) and not study.is_made(args, "best_of_n", 4)
    assert not list(study.new_rows(args, 3))
    ppo = [{"arm": arm, "procedure": "PPO", "method": x, "kl_coef": float(kl), "seed": 3}
           for arm, kl in study.PPO for x in study.METHODS if x != "warm" or arm == "centre"]  # fmt: skip
    Path(args.rows).write_text("".join(json.dumps(row) + "\n" for row in ppo[:-1]))
    assert not study.is_made(args, "ppo", 3) and not study.is_made(args, "gold_model", 3)
    Path(args.rows).write_text("".join(json.dumps(row) + "\n" for row in ppo))
    assert study.is_made(args, "ppo", 3)
