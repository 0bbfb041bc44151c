"""ensembles/study.py: a matrix whose commands the scripts understand; its steps read what earlier ones wrote."""

from collections import Counter

import pytest
import study
import tyro
from conftest import script

RUNS = "runs/ensembles"


def parsed(job):
    """The Args of a job's command; an unknown flag or a value of the wrong type exits."""
    path, *arguments = job.command[1:]
    return tyro.cli(script(path).Args, args=arguments)


@pytest.fixture(scope="module")
def steps() -> dict:
    """{step: [(job, Args)]} of the default matrix."""
    return {step: [(job, parsed(job)) for job in jobs] for step, jobs in study.steps_of(study.Args()).items()}


def members(replicate: int) -> list[str]:
    """The five reward models of a replicate."""
    return [f"{RUNS}/reward/{replicate}/{5 * replicate + k}" for k in range(-4, 1)]


def test_each_run_of_ppo_is_what_its_name_says(steps):
    groups = Counter()
    for job, args in steps["PPO"]:
        _, name, seed = job.name.split("/")
        method, kl_coef = name.split("_kl_")
        five = members(args.seed)
        paths = {"single": five[:1], "warm": [f"{RUNS}/reward/{seed}/warm"]}.get(method, five)
        assert (args.seed, args.kl_coef) == (int(seed), float(kl_coef)) and args.reward_model_paths == paths
        combination = {"wco": "wco", "uwo": "uwo"}.get(method, "mean")
        assert (args.reward_combination, args.uwo_lambda) == (combination, 0.1 if method == "uwo" else None)
        assert args.standardise_members and args.value_start == "sft"
        assert args.penalty_reward_value is None and args.gold
        groups[method, args.kl_coef] += 1
    assert groups == {(method, kl): 5 for method in study.METHODS for kl in (0, 0.02, 0.1)}
    assert len({job.name for job, _ in steps["PPO"]}) == 75


def test_a_replicate_has_seeds_and_labels_of_its_own(steps):
    for job, args in steps["members"]:
        _, replicate, seed = job.name.split("/")
        assert args.seed == int(seed) and args.preference_dataset == f"{RUNS}/labelled/{replicate}/noise_25"
    assert [args.output_dir for _, args in steps["members"]] == [path for i in range(1, 6) for path in members(i)]
    assert [(args.seed, args.label_noise) for _, args in steps["labels"]] == [(i, (0.25,)) for i in range(1, 6)]
    assert [args.reward_model_paths for _, args in steps["averages"]] == [members(i) for i in range(1, 6)]
    found = {job.name: (args.seed, args.reward_model_paths) for job, args in steps["best of n"]}
    expected = {f"best_of_n/five/{i}": (i, members(i)) for i in range(1, 6)}
    assert found == expected | {f"best_of_n/warm/{i}": (i, [f"{RUNS}/reward/{i}/warm"]) for i in range(1, 6)}


def test_steps_read_what_earlier_ones_wrote_and_name_what_they_write(steps):
    written = set()
    for jobs in steps.values():
        for job, args in jobs:
            flags = ("sft_model_path", "policy", "preference_dataset")
            read = [str(getattr(args, flag)) for flag in flags if getattr(args, flag, None)]
            read += getattr(args, "reward_model_paths", None) or []
            assert all(any(path == x or path.startswith(f"{x}/") for x in written) for path in read), job.name
            assert args.output_dir == f"{RUNS}/{job.name}" and study.ROOT / args.output_dir in job.result.parents
        written |= {args.output_dir for _, args in jobs}


def test_a_failing_step_is_the_last_and_what_is_finished_is_not_run_again(tmp_path, monkeypatch):
    """The commands replaced by one that leaves its job's result, but for one member as long as `broken` is there."""

    def calls() -> list[str]:
        """What was called since this was asked last."""
        found = (tmp_path / "calls").read_text().splitlines()
        (tmp_path / "calls").unlink()
        return found

    monkeypatch.setattr(study, "ROOT", tmp_path)
    for folder in ("quickstart", "ensembles"):
        (tmp_path / folder).mkdir()
    (tmp_path / "quickstart/run.sh").write_text("echo posts >>calls")
    (tmp_path / "ensembles/figures.py").write_text("print('figures', file=open('calls', 'a'))")
    steps = study.steps_of(study.Args(replicates=(2,), kl_coefs=(0.0,)))
    for step, jobs in steps.items():
        for i, job in enumerate(jobs):
            script = f"echo '{step}' >>calls; mkdir -p '{job.result.parent}'; touch '{job.result}'"
            broken = "[[ ! -e broken ]]; " if job.name == "reward/2/8" else ""
            jobs[i] = job._replace(command=["bash", "-ec", broken + script])
    monkeypatch.setattr(study, "steps_of", lambda args: steps)
    (tmp_path / "broken").touch()
    with pytest.raises(SystemExit, match="members: reward/2/8 failed"):
        study.main(study.Args())
    counts = {step: len(jobs) for step, jobs in steps.items()}
    first = {"posts": 1} | {step: counts.pop(step) for step in ("SFT", "labels", "members")}
    assert Counter(calls()) == first | {"members": first["members"] - 1}
    (tmp_path / "broken").unlink()
    study.main(study.Args())
    *found, last = calls()
    assert Counter(found) == {"posts": 1, "members": 1} | counts and last == "figures"


@pytest.mark.parametrize("arguments", [{"updates": 0}, {"jobs": 0}])
def test_bad_arguments(arguments):
    with pytest.raises(SystemExit, match="^error: --jobs and --updates are at least 1"):
        study.main(study.Args(**arguments, dry_run=True))
