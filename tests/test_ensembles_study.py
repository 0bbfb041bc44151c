"""ensembles/study.py: a matrix whose commands the scripts understand; its steps read what earlier ones wrote."""

import itertools
import sys
from collections import Counter
from pathlib import Path

import pytest
import study
import tyro
from conftest import read_csv, script, write_jsonl

RUNS = "runs/ensembles"


def parsed(job):
    """(script, its Args) of a job's command; an unknown flag or a value of the wrong type exits."""
    path, *arguments = job.command[1:]
    return path, tyro.cli(script(path).Args, args=arguments)


@pytest.fixture(scope="module")
def steps() -> dict:
    """{step: [(job, script, Args)]} of the default matrix."""
    return {step: [(job, *parsed(job)) for job in jobs] for step, jobs in study.steps_of(study.Args()).items()}


def own(replicate: int) -> list[str]:
    """The five reward models of a replicate, of base 1."""
    return [f"{RUNS}/reward/base_1/{replicate}/{5 * replicate + k}" for k in range(-4, 1)]


def test_each_run_of_ppo_is_what_its_name_says(steps):
    groups = Counter()
    for job, _, args in steps["PPO"]:
        *_, group, name, seed = job.name.split("/")
        method, kl_coef = name.split("_kl_")
        members = own(1 if group == "leak" else args.seed)
        if group == "bases":
            members = [f"{RUNS}/reward/base_{base}/{seed}/{5 * args.seed - 4}" for base in study.BASES]
        members = {"single": members[:1], "warm": [f"{RUNS}/reward/warm/{seed}"]}.get(method, members)
        combination = {"mean": "mean", "uwo": "uwo", "single": "mean", "warm": "mean"}.get(method, "wco")
        from_reward = method.startswith("lambda")
        channel = f"lambda_{args.lam:g}_clip_{args.cliprange_value:g}"
        assert (args.seed, args.kl_coef) == (int(seed), float(kl_coef)) and args.reward_model_paths == members
        assert (args.reward_combination, args.uwo_lambda) == (combination, 0.1 if method == "uwo" else None)
        assert args.standardise_members == (group in ("claims", "bases"))
        assert args.value_start == ("reward" if from_reward else "sft")
        assert channel == (method if from_reward else "lambda_0.95_clip_0.2")
        assert args.penalty_reward_value is None and args.gold
        groups[group, float(kl_coef)] += 1
    # five replicates; leak/sft of replicate 1 is raw/wco of replicate 1
    assert groups == {("claims", x): 25 for x in (0, 0.02, 0.1)} | {("bases", 0): 15, ("raw", 0): 10, ("leak", 0): 24}
    assert len({job.name for job, _, _ in steps["PPO"]}) == 124
    # first what has no penalty, then one replicate after the other
    order = [0 if "_kl_0/" in job.name else args.seed for job, _, args in steps["PPO"]]
    assert order == sorted(order)


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


def calls_of(folder: Path) -> list[str]:
    """The steps of the stand-in's calls since this was asked last."""
    calls = (folder / "calls").read_text().splitlines()
    (folder / "calls").unlink()
    return calls


def test_the_pilot_is_of_a_replicate_of_its_own():
    jobs = study.steps_of(study.Args(pilot=True))
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
            assert study.ROOT / folder in job.result.parents
            assert folder == (study.CORPUS if job.name == "corpus" else f"{RUNS}/{job.name}")
        written |= {args.output_dir for _, _, args in jobs}


def test_finished_runs_are_not_left_and_the_cost_follows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study, "ROOT", tmp_path)
    args = study.Args(dry_run=True, replicates=(1,), kl_coefs=(0.0,))
    steps = study.steps_of(args)
    assert len(steps["PPO"]) == 5 + 3 + 2 + 4  # claims, bases, raw, which is leak/sft as well, leak
    for job in itertools.chain(*steps.values()):
        if job.name != "reward/base_1/1/5":
            job.result.parent.mkdir(parents=True, exist_ok=True)
            job.result.touch()
    study.main(args)
    *table, left, data, command = capsys.readouterr().out.splitlines()
    found = [line.split(" left")[0].rsplit(maxsplit=3) for line in table]
    expected = [[step, str(len(jobs)), "runs,", str(int(step == "members"))] for step, jobs in steps.items()]
    assert found == expected
    assert left == f"left: about {study.SECONDS['members'] / 60 / 2:.0f} minutes with 2 side by side"
    assert data.endswith("run.sh --data-only") and command.endswith("reward/base_1/1/5")


def test_a_failing_step_is_the_last(tmp_path, monkeypatch):
    """The scripts replaced by one that leaves its job's result, but for one member as long as `broken` is there."""
    monkeypatch.setattr(study, "ROOT", tmp_path)
    (tmp_path / "quickstart").mkdir()
    (tmp_path / "quickstart/run.sh").write_text("echo posts >>calls")
    (tmp_path / "ensembles").mkdir()
    (tmp_path / "ensembles/figures.py").write_text("import sys\nprint(*sys.argv, file=open('calls', 'a'))")
    stand_in = tmp_path / "stand_in.py"
    stand_in.write_text(
        "import pathlib, sys\n"
        "name, step, result = sys.argv[1:]\n"
        "print(step, file=open('calls', 'a'))\n"
        "if name == 'reward/base_1/2/8' and pathlib.Path('broken').exists(): raise SystemExit('no room')\n"
        "pathlib.Path(result).parent.mkdir(parents=True, exist_ok=True)\n"
        "pathlib.Path(result).touch()\n"
    )
    steps = study.steps_of(study.Args(replicates=(2,), kl_coefs=(0.0,)))
    for step, jobs in steps.items():
        command = [sys.executable, str(stand_in)]
        steps[step] = [job._replace(command=[*command, job.name, step, str(job.result)]) for job in jobs]
    monkeypatch.setattr(study, "steps_of", lambda args: steps)
    (tmp_path / "broken").touch()
    with pytest.raises(SystemExit, match="members: reward/base_1/2/8 failed; the same command(.|\n)*no room"):
        study.main(study.Args(jobs=2))
    until = ["corpus", "bases", "pretraining", "SFT", "labels", "members"]
    counts = {step: len(jobs) for step, jobs in steps.items()}
    assert Counter(calls_of(tmp_path)) == {"posts": 1} | {step: counts[step] for step in until}
    (tmp_path / "broken").unlink()
    study.main(study.Args(jobs=2))
    rest = {step: count for step, count in counts.items() if step not in until}
    *calls, last = calls_of(tmp_path)
    assert Counter(calls) == {"posts": 1, "members": 1} | rest
    assert last == f"ensembles/figures.py --runs {RUNS}/curves --output-dir benchmark/results/ensembles"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"updates": 0}, "--jobs and --updates are at least 1"),
        ({"jobs": 0}, "--jobs and --updates are at least 1"),
        ({"replicates": (1, 6)}, "--replicates: 6 is the pilot's"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(SystemExit, match=f"^error: {message}"):
        study.main(study.Args(**arguments, dry_run=True))


def test_the_curves_of_the_pilot(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "ROOT", tmp_path)
    jobs = study.steps_of(study.Args(pilot=True))["PPO"][1:3]
    for i, job in enumerate(jobs):
        lines = [{"update": 0, "gold/score": 0.5, "gold/kl_k2": 0.0}, {"update": 1}]
        lines += [{"update": 2, "gold/score": 0.6 + i, "gold/kl_k2": 3.0 + i}]
        write_jsonl(job.result.parents[1] / "metrics.jsonl", lines)
    study.draw_pilot(jobs, tmp_path / "out")
    assert read_csv(tmp_path / "out/pilot.csv") == [
        {"step_size": size, "member": member, "update": update, "gold": gold, "kl": kl}
        for size, member, end in (("5e-05", "27", ("2", "0.6", "3.0")), ("0.0001", "26", ("2", "1.6", "4.0")))
        for update, gold, kl in (("0", "0.5", "0.0"), end)
    ]
    assert (tmp_path / "out/pilot.png").read_bytes().startswith(b"\x89PNG")
