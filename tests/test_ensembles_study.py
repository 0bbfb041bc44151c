"""quickstart/ensembles.py: a matrix whose commands the scripts understand; its steps read what earlier ones wrote."""

import shlex
from collections import Counter

import pytest
import tyro
from conftest import read_csv, script, write_jsonl

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


def own(replicate: int) -> list[str]:
    """The five reward models of a replicate, of base 1."""
    return [f"{RUNS}/reward/base_1/{replicate}/{5 * replicate + k}" for k in range(-4, 1)]


def test_the_matrix_is_that_of_the_docstring(steps):
    assert {step: len(jobs) for step, jobs in steps.items()} == {
        "corpus": 1, "bases": 4, "pretraining": 4, "SFT": 6, "labels": 5, "members": 45, "averages": 5, "PPO": 124,
        "best of n": 5, "tables": 10,
    }  # fmt: skip
    found = Counter()
    for _, _, args in steps["PPO"]:
        how = args.value_start, args.standardise_members, args.lam, args.cliprange_value
        objective = args.reward_combination, args.uwo_lambda
        found[*how, *objective, args.kl_coef, args.seed, *args.reward_model_paths] += 1
    usual, raw, leaky = ("sft", True, 0.95, 0.2), ("sft", False, 0.95, 0.2), ("reward", False)
    mean, wco, uwo, expected = ("mean", None), ("wco", None), ("uwo", 0.1), []
    for seed in (1, 2, 3, 4, 5):
        members, others = own(seed), [f"{RUNS}/reward/base_{x}/{seed}/{5 * seed - 4}" for x in (1, 2, 3, 4, 5)]
        for kl in (0.0, 0.02, 0.1):
            expected += [(*usual, *objective, kl, seed, *members) for objective in (mean, wco, uwo)]
            expected += [(*usual, *mean, kl, seed, x) for x in (members[0], f"{RUNS}/reward/warm/{seed}")]
        expected += [(*usual, *objective, 0.0, seed, *others) for objective in (mean, wco, uwo)]
        expected += [(*raw, *objective, 0.0, seed, *members) for objective in (wco, uwo)]
        channels = [(lam, clip) for lam in (0.95, 1.0) for clip in (0.2, float("inf"))]
        expected += [(*leaky, *channel, *wco, 0.0, seed, *own(1)) for channel in channels]
        expected += [(*raw, *wco, 0.0, seed, *own(1))] * (seed > 1)  # that of seed 1 is there already
    assert found == Counter(expected) and max(found.values()) == 1
    assert all(args.penalty_reward_value is None and args.gold for _, _, args in steps["PPO"])


def test_reward_models_differ_as_they_should(steps):
    """Seed, label noise and base; one tokenizer; replicate 1 has seeds 1 to 5, as the study before."""
    names = {job.name: args for job, _, args in steps["members"]}
    for name, args in names.items():
        _, base, replicate, seed = name.split("/")
        base, folder = base.removeprefix("base_"), f"{RUNS}/labelled/{replicate}"
        assert args.seed == int(seed) and args.preference_dataset == f"{folder}/noise_25"
        assert args.sft_model_path == f"{RUNS}/sft/xs/{base}"
        assert args.model == ("quickstart/bases/nano-xs" if base == "1" else f"{RUNS}/base/{base}/nano-xs")
    assert {f"{RUNS}/{name}" for name in names if "base_1" in name} == {path for i in range(1, 6) for path in own(i)}
    assert [(args.seed, args.label_noise) for _, _, args in steps["labels"]] == [(i, (0.25,)) for i in range(1, 6)]
    assert [args.reward_model_paths for _, _, args in steps["averages"]] == [own(i) for i in range(1, 6)]
    assert [(args.seed, args.size) for _, _, args in steps["bases"]] == [(i, "xs") for i in (2, 3, 4, 5)]
    assert [args.seed for _, _, args in steps["pretraining"]] == [2, 3, 4, 5]
    assert len({args.tokenizer for _, _, args in steps["bases"]}) == 1


def test_tables_are_of_the_members_of_their_name(steps):
    samples = {args.output_dir: args for _, _, args in steps["best of n"]}
    for job, _, args in steps["tables"]:
        *_, name, i = job.name.split("/")
        paths = samples[args.output_dir].reward_model_paths
        expected = {"five": own(int(i)), "warm": [f"{RUNS}/reward/warm/{i}"]}
        assert args.estimate and [paths[k - 1] for k in args.members] == expected[name]


def test_the_pilot_is_of_a_replicate_of_its_own():
    jobs = ensembles.steps_of(ensembles.Args(pilot=True))
    assert {step: len(x) for step, x in jobs.items() if x} == {"SFT": 2, "labels": 1, "members": 2, "PPO": 6}
    found = [parsed(job)[1] for job in jobs["PPO"]]
    assert {(x.seed, x.kl_coef, x.value_start, x.standardise_members) for x in found} == {(6, 0.0, "sft", True)}
    assert Counter((*x.reward_model_paths, x.learning_rate) for x in found) == Counter(
        (path, size) for path in own(6)[:2] for size in (5e-5, 1e-4, 2e-4)
    )
    assert all(x.learning_rate == x.final_learning_rate for x in found)


def test_steps_read_what_earlier_ones_wrote_and_name_what_they_write(steps):
    written = set()
    for jobs in steps.values():
        for job, _, args in jobs:
            flags = ("sft_model_path", "policy", "preference_dataset", "model", "documents")
            read = [str(getattr(args, flag)) for flag in flags if getattr(args, flag, None)]
            read += getattr(args, "reward_model_paths", None) or []
            read = [path for path in read if not path.startswith(("quickstart/bases", "nano-s"))]
            assert all(any(path == x or path.startswith(f"{x}/") for x in written) for path in read), job.name
            folder = getattr(args, "tables_dir", None) or args.output_dir
            assert ensembles.ROOT / folder in job.result.parents
            assert folder == (ensembles.CORPUS if job.name == "corpus" else f"{RUNS}/{job.name}")
        written |= {args.output_dir for _, _, args in jobs}


def test_finished_runs_are_not_left_and_the_cost_follows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ensembles, "ROOT", tmp_path)
    args = ensembles.Args(dry_run=True, replicates=(1,), kl_coefs=(0.0,))
    for job in [job for jobs in ensembles.steps_of(args).values() for job in jobs if not job.name.endswith("1/5")]:
        job.result.parent.mkdir(parents=True, exist_ok=True)
        job.result.touch()
    ensembles.main(args)
    *table, left = capsys.readouterr().out.split("OMP_NUM_THREADS=")[0].splitlines()
    assert [line.split(" left")[0].split() for line in table[4:7]] == [
        ["labels", "1", "runs,", "0"],
        ["members", "9", "runs,", "1"],
        ["averages", "1", "runs,", "0"],
    ]
    assert left == f"left: about {ensembles.SECONDS['members'] / 60 / 2:.0f} minutes with 2 side by side"
    ensembles.main(ensembles.Args(dry_run=True, replicates=(2,), kl_coefs=(0.1,)))
    commands = [shlex.split(line) for line in capsys.readouterr().out.splitlines() if "ppo.py" in line]
    names = [*(f"bases/{x}_kl_0" for x in ("mean", "wco", "uwo")), "raw/wco_kl_0", "raw/uwo_kl_0"]
    names += [f"leak/lambda_{x}_clip_{y}_kl_0" for x in (0.95, 1) for y in (0.2, "inf")]
    names += [f"claims/{x}_kl_0.1" for x in ensembles.METHODS]
    assert [command[-1] for command in commands] == [f"{RUNS}/curves/ppo/{name}/2" for name in names]


def test_a_failing_run_ends_after_its_step_and_is_named(tmp_path, monkeypatch):
    """The scripts replaced by one that leaves its result but for one member."""
    monkeypatch.setattr(ensembles, "ROOT", tmp_path)
    for folder in ("quickstart", "ensembles"):
        (tmp_path / folder).mkdir()
    (tmp_path / "quickstart/run.sh").write_text("exit 0")
    others = [f"ensembles/{name}.py" for name in ("gold_label", "average", "best_of_n", "ppo", "figures")]
    others += [f"quickstart/{name}.py" for name in ("posts", "nano", "pretrain")]
    for path in ("sft.py", "reward.py", *others):
        (tmp_path / path).write_text(
            "import pathlib, sys\n"
            "line = ' '.join(sys.argv)\n"
            f"open('{tmp_path}/calls', 'a').write(line + chr(10))\n"
            "flag = '--tables-dir' if '--tables-dir' in line else '--output-dir'\n"
            "if 'base_1/2/8' in line and 'reward.py' in line: raise SystemExit('no room')\n"
            "names = 'eval/accuracy.csv noise_25/dataset_dict.json model/config.json config.json args.json '\n"
            "for name in (names + 'best_of_n.md pretraining.jsonl').split():\n"
            "    path = pathlib.Path(sys.argv[sys.argv.index(flag) + 1], name)\n"
            "    path.parent.mkdir(parents=True, exist_ok=True), path.touch()\n"
        )
    with pytest.raises(SystemExit, match="members: reward/base_1/2/8 failed; the same command(.|\n)*no room"):
        ensembles.main(ensembles.Args())
    calls = (tmp_path / "calls").read_text().splitlines()
    assert Counter(call.split()[0] for call in calls) == {
        "quickstart/posts.py": 1, "quickstart/nano.py": 4, "quickstart/pretrain.py": 4, "sft.py": 6,
        "ensembles/gold_label.py": 5, "reward.py": 45,
    }  # fmt: skip
    (tmp_path / "reward.py").write_text((tmp_path / "sft.py").read_text().replace("base_1/2/8", "nothing"))
    (tmp_path / "calls").unlink()
    ensembles.main(ensembles.Args())
    calls = (tmp_path / "calls").read_text().splitlines()
    counts = Counter(call.split()[0] for call in calls)
    assert counts == {"reward.py": 1, "ensembles/average.py": 5, "ensembles/ppo.py": 124, "ensembles/figures.py": 1} | {
        "ensembles/best_of_n.py": 15
    }
    assert calls[-1].startswith(
        "ensembles/figures.py --runs runs/ensembles/curves --output-dir benchmark/results/ensembles"
    )


def test_bad_numbers():
    with pytest.raises(SystemExit, match="--jobs and --updates are at least 1"):
        ensembles.main(ensembles.Args(updates=0))


def test_the_curves_of_the_pilot(tmp_path, monkeypatch):
    monkeypatch.setattr(ensembles, "ROOT", tmp_path)
    jobs = ensembles.steps_of(ensembles.Args(pilot=True))["PPO"][1:3]
    for i, job in enumerate(jobs):
        lines = [{"update": 0, "gold/score": 0.5, "gold/kl_k2": 0.0}, {"update": 1}]
        lines += [{"update": 2, "gold/score": 0.6 + i, "gold/kl_k2": 3.0 + i}]
        write_jsonl(job.result.parents[1] / "metrics.jsonl", lines)
    ensembles.draw_pilot(jobs, tmp_path / "out")
    assert read_csv(tmp_path / "out/pilot.csv") == [
        {"step_size": size, "member": member, "update": update, "gold": gold, "kl": kl}
        for size, member, end in (("5e-05", "27", ("2", "0.6", "3.0")), ("0.0001", "26", ("2", "1.6", "4.0")))
        for update, gold, kl in (("0", "0.5", "0.0"), end)
    ]
    assert (tmp_path / "out/pilot.png").read_bytes().startswith(b"\x89PNG")
