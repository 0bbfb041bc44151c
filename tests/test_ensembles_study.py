"""quickstart/ensembles.py: a matrix whose commands the scripts understand; its steps read what earlier ones wrote."""

import shlex
from collections import Counter

import pytest
import tyro
from conftest import script

import ensembles

RUNS = "runs/ensembles"


def parsed(job):
    """(script, its Args) of a job's command; an unknown flag or a value of the wrong type exits."""
    path, *arguments = job.command[1:]
    return path, tyro.cli(script(path).Args, args=arguments)


@pytest.fixture(scope="module")
def steps() -> dict:
    """{step: [(job, script, Args)]} of the default matrix."""
    return {step: [(job, *parsed(job)) for job in jobs] for step, jobs in ensembles.steps_of(ensembles.Args()).items()}


def test_the_matrix_is_that_of_the_docstring(steps):
    assert {step: len(jobs) for step, jobs in steps.items()} == {
        "SFT": 2, "labels": 3, "members": 30, "best of n": 1, "PPO": 48, "tables": 6,
    }  # fmt: skip
    members = Counter((args.model[-2:], args.preference_dataset) for _, _, args in steps["members"])
    data = f"{RUNS}/labelled"
    sets = [("xs", f"{data}/4000/noise_{noise}") for noise in (25, 0, 35)] + [("-s", f"{data}/4000/noise_25")]
    sets += [("xs", f"{data}/{posts}/noise_25") for posts in (2000, 1000)]
    assert members == dict.fromkeys(sets, 5)
    ppo = Counter()
    for _, _, args in steps["PPO"]:
        paths = tuple(path.removeprefix(f"{RUNS}/reward/") for path in args.reward_model_paths)
        ppo[paths, args.reward_combination, args.uwo_lambda, args.kl_coef, args.seed] += 1
    base = tuple(f"noise_25_xs_4000/{i}" for i in range(1, 6))
    used = [(base[:1], "mean", None), (base[1:2], "mean", None), (base, "mean", None), (base, "wco", None)]
    used = [(*method, kl) for method in [*used, (base, "uwo", 0.1)] for kl in (0.0, 0.05)]
    other = (base[1], base[0], *base[2:])
    used += [(other, "mean", None, 0.0), (other, "wco", None, 0.0), (other, "uwo", 0.1, 0.0)]
    used += [((f"noise_25_xs_{posts}/1",), "mean", None, 0.0) for posts in (2000, 1000)] + [(base, "uwo", 0.5, 0.0)]
    assert ppo == dict.fromkeys([(*method, seed) for method in used for seed in (1, 2, 3)], 1)
    assert all(args.penalty_reward_value is None for _, _, args in steps["PPO"])


def test_each_set_of_members_has_a_seed_each(steps):
    for setting in ensembles.SETTINGS:
        folder = f"{RUNS}/reward/{ensembles.member_set(setting)}"
        mine = [args for _, _, args in steps["members"] if args.output_dir.startswith(f"{folder}/")]
        assert [(args.seed, args.output_dir) for args in mine] == [(seed, f"{folder}/{seed}") for seed in range(1, 6)]
        noise, size, posts = setting
        assert {args.preference_dataset for args in mine} == {f"{RUNS}/labelled/{posts}/noise_{noise}"}
        assert {(args.model, args.sft_model_path) for args in mine} == {
            (f"quickstart/bases/nano-{size}", f"{RUNS}/sft/{size}/1")
        }


def test_steps_read_what_earlier_ones_wrote_and_name_what_they_write(steps):
    written = set()
    for jobs in steps.values():
        for job, _, args in jobs:
            flags = ("sft_model_path", "policy", "preference_dataset")
            read = [getattr(args, flag) for flag in flags if getattr(args, flag, None)]
            read += getattr(args, "reward_model_paths", None) or []
            assert read or job.name.startswith(("sft", "best_of_n"))
            assert all(any(path == x or path.startswith(f"{x}/") for x in written) for path in read), job.name
            folder = getattr(args, "tables_dir", None) or args.output_dir
            assert ensembles.ROOT / folder in job.result.parents and folder == f"{RUNS}/{job.name}"
            assert args.output_dir in written or folder == args.output_dir
        written |= {f"{RUNS}/{job.name}" for job, _, _ in jobs}


def test_tables_are_of_the_members_of_their_name(steps):
    ((_, _, samples),) = steps["best of n"]
    for setting, (job, _, args) in zip(ensembles.SETTINGS, steps["tables"], strict=True):
        assert job.name == f"best_of_n/{ensembles.member_set(setting)}"
        found = [samples.reward_model_paths[i - 1] for i in args.members]
        assert found == [f"{RUNS}/reward/{ensembles.member_set(setting)}/{seed}" for seed in range(1, 6)]


def test_finished_runs_are_not_left_and_the_cost_follows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ensembles, "ROOT", tmp_path)
    args = ensembles.Args(dry_run=True, ppo_seeds=(1,), kl_coefs=(0.0,))
    for job in [job for jobs in ensembles.steps_of(args).values() for job in jobs if not job.name.endswith("/5")]:
        job.result.parent.mkdir(parents=True)
        job.result.touch()
    ensembles.main(args)
    *table, left = capsys.readouterr().out.split("OMP_NUM_THREADS=")[0].splitlines()
    assert [line.split(" left")[0].split() for line in table[1:3]] == [
        ["labels", "3", "runs,", "0"],
        ["members", "30", "runs,", "6"],
    ]
    assert left == f"left: about {6 * ensembles.SECONDS['members'] / 60 / 2:.0f} minutes with 2 side by side"
    ensembles.main(ensembles.Args(dry_run=True, ppo_seeds=(2,), kl_coefs=(0.0,)))
    commands = [shlex.split(line) for line in capsys.readouterr().out.splitlines() if "ppo.py" in line]
    assert [command[-1] for command in commands] == [
        f"{RUNS}/ppo/{x}_kl_0/2" for x in ("single_1", "single_2", "mean", "wco", "uwo", *ensembles.SWEEPS)
    ]


def test_a_failing_run_ends_after_its_step_and_is_named(tmp_path, monkeypatch):
    """The scripts replaced by one that leaves its result but for one member."""
    monkeypatch.setattr(ensembles, "ROOT", tmp_path)
    for folder in ("quickstart", "ensembles"):
        (tmp_path / folder).mkdir()
    (tmp_path / "quickstart/run.sh").write_text("exit 0")
    others = [f"ensembles/{name}.py" for name in ("gold_label", "best_of_n", "ppo", "figures")]
    for path in ("sft.py", "reward.py", *others):
        (tmp_path / path).write_text(
            "import pathlib, sys\n"
            "line = ' '.join(sys.argv)\n"
            f"open('{tmp_path}/calls', 'a').write(line + chr(10))\n"
            "if 'noise_0_xs_4000/3' in line and 'reward.py' in line: raise SystemExit('no room')\n"
            "names = 'eval/rouge.csv eval/accuracy.csv noise_35/dataset_dict.json best_of_n.md model/config.json'\n"
            "flag = '--tables-dir' if '--tables-dir' in line else '--output-dir'\n"
            "for name in names.split():\n"
            "    path = pathlib.Path(sys.argv[sys.argv.index(flag) + 1], name)\n"
            "    path.parent.mkdir(parents=True, exist_ok=True), path.touch()\n"
        )
    with pytest.raises(SystemExit, match="members: reward/noise_0_xs_4000/3 failed; the same command(.|\n)*no room"):
        ensembles.main(ensembles.Args())
    calls = (tmp_path / "calls").read_text().splitlines()
    assert Counter(call.split()[0] for call in calls) == {"sft.py": 2, "ensembles/gold_label.py": 3, "reward.py": 30}
    (tmp_path / "reward.py").write_text((tmp_path / "sft.py").read_text().replace("noise_0_xs_4000/3", "nothing"))
    (tmp_path / "calls").unlink()
    ensembles.main(ensembles.Args())
    calls = (tmp_path / "calls").read_text().splitlines()
    counts = Counter(call.split()[0] for call in calls)
    assert counts == {"reward.py": 1, "ensembles/best_of_n.py": 7, "ensembles/ppo.py": 48, "ensembles/figures.py": 1}
    assert calls[-1].startswith("ensembles/figures.py --runs runs/ensembles --output-dir benchmark/results/ensembles")


def test_bad_numbers():
    with pytest.raises(SystemExit, match="--jobs, --updates, --bon-prompts and --bon-samples are at least 1"):
        ensembles.main(ensembles.Args(updates=0))
