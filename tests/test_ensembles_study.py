"""ensembles/study.py: its commands are understood by their scripts, and its steps read what earlier ones wrote."""

from collections import Counter

import pytest
import study
import tyro
from conftest import script

RUNS = "runs/ensembles"


@pytest.fixture(scope="module")
def steps() -> list:
    """[(job, Args)] of each step; an unknown flag or a value of the wrong type would exit."""
    parse = [[(job, job.command[1:]) for job in jobs] for jobs in study.steps_of()]
    return [[(job, tyro.cli(script(words[0]).Args, args=words[1:])) for job, words in jobs] for jobs in parse]


def test_each_run_has_the_settings_and_models_of_its_name(steps):
    groups = Counter()
    for job, args in steps[-1]:
        kind, name, seed = job.name.split("/")
        method, _, kl_coef = name.partition("_kl_")
        five = [f"{RUNS}/reward/{seed}/{5 * int(seed) + k}" for k in range(-4, 1)]
        paths = {"single": five[:1], "warm": [f"{RUNS}/reward/{seed}/warm"]}.get(method, five)
        assert args.seed == int(seed) and args.reward_model_paths == paths
        groups[kind, method, kl_coef] += 1
        if kind == "ppo":
            combination = method if method in ("wco", "uwo") else "mean"
            assert (args.kl_coef, args.reward_combination) == (float(kl_coef), combination)
            assert args.uwo_lambda == (0.1 if method == "uwo" else None) and args.penalty_reward_value is None
    assert set(groups.values()) == {5} and len(groups) == 5 * 3 + 2


def test_steps_read_what_earlier_ones_wrote_and_name_what_they_write(steps):
    written = set()
    for jobs in steps:
        for job, args in jobs:
            read = [getattr(args, flag, None) for flag in ("sft_model_path", "policy", "preference_dataset")]
            read = [path for one in read if one for path in (one if isinstance(one, list) else [one])]
            read += getattr(args, "reward_model_paths", None) or []
            assert all(any(path == x or path.startswith(f"{x}/") for x in written) for path in read), job.name
            assert args.output_dir == f"{RUNS}/{job.name}" and study.ROOT / args.output_dir in job.result.parents
        written |= {args.output_dir for _, args in jobs}
    assert len(written) == 122
    assert [args.preference_dataset for _, args in steps[2]] == [
        f"{RUNS}/labelled/{i}/noise_25" for i in range(1, 6) for _ in range(5)
    ]
