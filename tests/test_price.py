"""ablations/price.py: every patch applies to today's scripts and first changes the number that it says, and the table
of a ledger by hand; and ablations/refresh.sh."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from math import isclose
from pathlib import Path
from types import SimpleNamespace

import numpy
import price
import pytest
import score
from conftest import ROOT, make_reward_model, make_talker, read_jsonl, read_metrics
from scipy import stats

PATCHES = price.read_patches(price.PATCHES)
# in the order in which an update computes them; what changes first is what a patch is about
ORDER = ["response/length", "response/eos_rate", "objective/score_without_penalty", "objective/score"]
ORDER += ["policy/sampling_logprob_difference_mean", "objective/entropy", "objective/kl", "objective/rlhf_reward"]
ORDER += ["value/mean", "learning_rate", "loss/policy", "loss/value", "loss/train", "rewards/margin", "grad_norm"]
OWN_DATA = {name for name, patch in PATCHES.items() if any("posts" in x or "tldr" in x for x, *_ in patch.scripts)}


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_applies_and_compiles(name):
    patch = PATCHES[name]
    assert patch.stage in price.STAGES and patch.expected in ("worse", "better", "no difference", "breaks")
    assert patch.undoes and patch.because and patch.first and patch.baseline in {*PATCHES, f"{patch.stage}.py"}
    for script, _, pieces in patch.scripts:
        compile(price.patched(script, pieces), script, "exec")


def test_every_detail_has_rows_or_a_reason():
    reasons = {line.partition(": ")[0] for line in price.WITHOUT_ROW.splitlines()}
    assert {patch.detail for patch in PATCHES.values()} | reasons == {str(detail) for detail in range(1, 26)}


@pytest.fixture(scope="module")
def bench(world, tmp_path_factory) -> SimpleNamespace:
    """Models for the stages, and .metrics(path, flags), the numbers of two updates of a script, kept."""
    folder, kept = tmp_path_factory.mktemp("price"), {}
    talker = make_talker(world, folder / "talker", eos=0.15)
    reward = make_reward_model(talker, folder / "reward")
    paths = {"dataset": world.dataset, "preference_dataset": world.preference_dataset, "sft_model_path": talker}
    paths |= {"reward_model_path": reward}
    shared = {"batch_size": "32", "micro_batch_size": "32", "learning_rate": "1e-3"}
    ppo = {"total_episodes": "64", "response_length": "16", "sample_every": "0", "sample_batch_size": "32"}

    def metrics(path: Path, flags: list[str], dataset: Path | None = None, model: Path = world.model) -> list[dict]:
        key = (str(path), tuple(flags), dataset)
        if key not in kept:
            spec = importlib.util.spec_from_file_location(f"price_{len(kept)}", path)
            module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            stage = score.stage_of(path)
            given = shared | (ppo if stage == "ppo" else {"total_episodes": "64"})
            given |= {name: str(paths[name]) for name in score.fields_of(path) & set(paths)}
            given |= {"dataset": str(dataset)} if dataset else {}
            given |= {"model": str(model), "seed": "1", "output_dir": str(folder / f"run_{len(kept)}")}
            words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)]
            module.main(price.tyro.cli(module.Args, args=[*words, *flags]))
            kept[key] = read_metrics(Path(given["output_dir"]))
        return kept[key]

    return SimpleNamespace(metrics=metrics, folder=folder)


def first_difference(before: list[dict], after: list[dict]) -> str:
    """Return the first number that differs by more than rounding, and its update."""
    for old, new in zip(before, after, strict=True):
        differ = {key for key in old.keys() & new.keys() if not isclose(old[key], new[key], rel_tol=1e-5, abs_tol=1e-6)}
        differ = {key for key in differ if not key.startswith("time/")}
        if differ:
            return f"{next((key for key in ORDER if key in differ), min(differ))} {old['update']}"
    return "nothing"


FAST = {"EOS not in the loss"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[] if x in FAST else pytest.mark.long) for x in PATCHES if x not in OWN_DATA],
)
def test_the_first_number_that_a_patch_changes(name, bench):
    """On two updates of a random model. A patch that only changes how many updates there are runs on as many here."""
    patch = PATCHES[name]
    path, *flags = price.candidate_of(patch, price.Args(runs=bench.folder, data=bench.folder)).command
    if patch.detail == "10":  # half as many pairs, or twice as many: here three updates
        flags = ["--total-episodes", "96"]
    before = bench.metrics(ROOT / f"{patch.stage}.py", [])
    assert first_difference(before, bench.metrics(Path(path), flags)[: len(before)]) == patch.first


def test_rewards_that_are_not_centred(bench):
    """No number of training changes, but the mean in the saved config."""
    one = price.candidate_of(PATCHES["rewards not centred"], price.Args(runs=bench.folder, data=bench.folder))
    bench.metrics(Path(one.command[0]), [])
    configs = [json.loads(path.read_text()) for path in sorted(bench.folder.glob("run_*/model/config.json"))]
    assert any(config.get("reward_mean") == 0.0 for config in configs)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(OWN_DATA - {"correct labels"}))
def test_data_of_its_own(name, bench, world):
    """They are made by the patched script from the same raw rows, and SFT reads them."""
    patch, args = PATCHES[name], price.Args(runs=bench.folder, data=world.raw.parent, size="xs")
    one = price.candidate_of(patch, args)
    price.make_data(patch, one, args)
    base = bench.folder / "base"
    if not base.exists():
        plain = price.Patch("plain", "sft", "", "", [("sft.py", [], []), ("tldr_dataset.py", [], [])], "", "", "")
        made = price.candidate_of(plain, args)
        price.make_data(plain, made, args)
        shutil.copytree(made.data, base)
    nano = ROOT / "quickstart/bases/nano-xs"
    before = bench.metrics(ROOT / "sft.py", [], base / "tldr/sft", nano)
    assert first_difference(before, bench.metrics(Path(one.command[0]), [], one.data / "tldr/sft", nano)) == patch.first


def test_correct_labels_change_only_labels(tmp_path):
    import posts

    counts = {"num_train": 40, "num_validation": 5, "num_test": 5, "num_comparisons": 200}
    counts |= {"num_validation_comparisons": 5, "num_cnndm_comparisons": 5, "vocab_size": 300}
    rows = []
    for noise in (posts.Args.label_noise, 0.0):
        posts.main(posts.Args(str(tmp_path / str(noise)), label_noise=noise, **counts))
        rows.append(read_jsonl(tmp_path / str(noise) / "comparisons/train.jsonl"))
    flipped = [old["choice"] != new["choice"] for old, new in zip(*rows, strict=True)]
    assert 0.15 < numpy.mean(flipped) < 0.35
    for old, new in zip(*rows, strict=True):
        assert {**old, "choice": 0, "extra": 0} == {**new, "choice": 0, "extra": 0}


@pytest.fixture
def ledger(tmp_path) -> Path:
    """A ledger of four seeds of made-up rows."""
    rows, rng = [], numpy.random.default_rng(1)

    def add(candidate, note, truth, failed=""):
        for seed, value in enumerate(truth, 1):
            row = dict.fromkeys(score.NUMBERS, 1.0) | {"truth": value, "failed": failed, "seed": seed, "note": note}
            row |= {"key": f"{candidate} {note} {seed}", "bed": "a", "version": candidate, "commit": "c"}
            row |= {"candidate": candidate, "stage": "ppo", "size": "s", "cpu": f"cpu {seed}", "threads": 1}
            rows.append(row)

    base = 0.8 + 0.02 * rng.standard_normal(4)
    add("ppo.py", "", base)
    add("ppo.py", "A/A 16", base + [0.004, -0.005, 0.006, -0.003])
    add("sft.py", "SFT", [0.65] * 4)
    add("lambda of 0", "", base - [0.05, 0.06, 0.055, 0.052])
    add("lambda of 1", "", base + [0.001, -0.002, 0.003, -0.004])
    add("four mini-batches", "", base + [0.04, 0.05, 0.047, 0.043])
    add("dropout of 0.1", "", base - [0.3, 0.4, 0.35, 0.31])
    add("one epoch per batch", "", base - [0.1, -0.05, 0.12, 0.0])
    add("shared backbone", "", [numpy.nan] * 4, failed="diverged")
    for row in rows:
        score.append(tmp_path / "price.csv", row)
    return tmp_path / "price.csv"


def test_the_table_by_hand(ledger, capsys, tmp_path):
    table = price.differences(PATCHES, score.read_ledger(ledger), last=True)
    rows = (
        score.read_ledger(ledger)
        .query("note == '' and failed == ''")
        .pivot(index="seed", columns="candidate", values="truth")
    )
    alike = rows[["ppo.py", "lambda of 0", "lambda of 1", "four mini-batches"]]  # dropout and "one epoch" are wild
    left = alike.sub(alike.mean(axis=1), axis=0).sub(alike.mean()) + alike.to_numpy().mean()
    error = numpy.sqrt((left**2).to_numpy().sum() / 9 * 2 / 4)  # (4 - 1)(4 - 1) degrees of freedom
    row = table.loc["lambda of 0"]
    assert row["mean"] == pytest.approx(-numpy.mean([0.05, 0.06, 0.055, 0.052]), abs=1e-6)
    assert row["low"] == pytest.approx(row["mean"] - stats.t.ppf(0.975, 9) * error, abs=1e-5)
    own = stats.ttest_1samp(rows["one epoch per batch"] - rows["ppo.py"], 0)
    assert table.loc["one epoch per batch", "p"] == pytest.approx(own.pvalue, rel=1e-4)
    p = table["p"].dropna().astype(float).sort_values()
    corrected, largest = {}, 0.0
    for rank, (name, value) in enumerate(p.items()):
        largest = max(largest, min(1, value * (len(p) - rank)))
        corrected[name] = largest
    assert table["holm"].dropna().to_dict() == pytest.approx(corrected)
    verdicts = {name: price.verdict(row, True) for name, row in table.iterrows()}
    expected = {"lambda of 0": "worse", "lambda of 1": "no difference of 0.03", "four mini-batches": "better"}
    expected |= {"dropout of 0.1": "breaks", "one epoch per batch": "cannot be told"}
    assert verdicts == expected | {"shared backbone": "fails on 4 of 4 seeds"}
    assert table["below"].to_dict() == dict.fromkeys(table.index, 0) | {"dropout of 0.1": 4}  # SFT: 0.65
    first = price.differences(PATCHES, score.read_ledger(ledger), last=False)
    assert first.loc["lambda of 1", "low"] < table.loc["lambda of 1", "low"]  # 99 %, not 95 %
    assert price.wanted_seeds(first) == ["one epoch per batch"]  # the others are decided
    price.main(price.Args(show=True, rows=ledger, figure=tmp_path / "price.png"))
    said = capsys.readouterr().out
    assert re.search(r"\| lambda of 0 \| 20 \| 4 \| -0\.054 \(.*\| worse \| worse \|", said)
    assert "--seeds 5 6 7 8" in said and (tmp_path / "price.png").exists()


def test_a_patch_is_compared_on_its_own_processor(tmp_path):
    """Seed 1 on two processors: the patch is 0.1 below the baseline of its own, which is not the last of the ledger."""
    for candidate, note, seed, cpu, truth in [
        ("sft.py", "SFT", 1, "A", 0.5),
        ("ppo.py", "", 1, "A", 0.8),
        ("ppo.py", "", 2, "B", 0.7),
        ("lambda of 0", "", 1, "A", 0.7),
        ("lambda of 0", "", 2, "B", 0.4),
        ("ppo.py", "", 1, "B", 0.9),
        ("sft.py", "SFT", 1, "B", 0.9),
        ("sft.py", "SFT", 2, "B", 0.5),
    ]:
        row = dict.fromkeys(score.NUMBERS, 1.0) | {"truth": truth, "seed": seed, "note": note, "cpu": cpu}
        row |= {"key": f"{candidate} {note} {seed}", "bed": "a", "version": candidate, "candidate": candidate}
        score.append(tmp_path / "price.csv", row | {"stage": "ppo", "size": "s", "failed": ""})
    row = price.differences(PATCHES, score.read_ledger(tmp_path / "price.csv"), last=False).loc["lambda of 0"]
    assert row["each"] == pytest.approx([-0.1, -0.3]) and (row["below"], row["sft"]) == (1, 0.5)
    for seed in (1, 2, 3):  # without a baseline of its own, a patch has no difference, and changes no one's interval
        other = {"truth": -5.0 * seed**2, "seed": seed, "note": "", "cpu": "C", "key": f"other {seed}", "version": "v"}
        other |= {"candidate": "lambda of 1", "bed": "a", "stage": "ppo", "size": "s", "failed": ""}
        score.append(tmp_path / "price.csv", dict.fromkeys(score.NUMBERS, 1.0) | other)
    table = price.differences(PATCHES, score.read_ledger(tmp_path / "price.csv"), last=False)
    assert table.loc["lambda of 0", "low"] == pytest.approx(row["low"]) and table.loc["lambda of 1", "count"] == 0


def test_a_run_of_another_processor_serves_and_needs_no_baseline_here():
    ones = {name: SimpleNamespace(text=name) for name in PATCHES}
    last = list(PATCHES)[-4]  # beside the patch before it
    args = price.Args(["lambda of 0", last], seeds=[1, 2])
    elsewhere = frozenset({("lambda of 0", 1), ("lambda of 0", 2), (last, 1), (PATCHES[last].beside, 1)})
    jobs = [(one.text, seed, note) for one, seed, note in price.jobs_of(PATCHES, ones, args, elsewhere)]
    noise = f"A/A {score.NOISE['sft'][0]}"
    expected = [
        ("sft.py", 2, "SFT"),
        ("sft.py", 2, ""),
        ("sft.py", 2, noise),
        (PATCHES[last].beside, 2, ""),
        (last, 2, ""),
    ]
    assert jobs == expected


def test_baselines_come_first_and_a_patch_has_whole_sets(monkeypatch):
    ones = {name: SimpleNamespace(text=name) for name in PATCHES}
    jobs = [(one.text, seed, note) for one, seed, note in price.jobs_of(PATCHES, ones, price.Args(seeds=[1, 2]))]
    assert jobs[0] == ("sft.py", 1, "SFT") and ("ppo.py", 2, "A/A 16") in jobs[:18]
    assert [job[0] for job in jobs[18:]] == [name for name in PATCHES for _ in (1, 2)]
    some = price.jobs_of(PATCHES, ones, price.Args(["queries of 96 tokens cut anywhere"], seeds=[1]))
    assert [one.text for one, _, note in some if not note][1:] == list(PATCHES)[-5:-3]


def test_refresh_takes_only_what_it_left_in_the_root(tmp_path):
    """A copy that the user made is neither read nor removed. One that refresh.sh left for mending has every later mend
    of its source, too."""
    (tmp_path / "ablations").mkdir()
    shutil.copy(ROOT / "ablations/refresh.sh", tmp_path / "ablations")
    source, target, diff = tmp_path / "ppo.py", tmp_path / "ppo_x.py", tmp_path / "ablations/x.diff"

    def shell(command: str) -> int:
        return subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True).returncode

    def write(path: Path, **changed: str):
        path.write_text("".join(f"{changed.get(f'line_{i}', f'line {i}')}\n" for i in range(30)))

    refresh = "bash ablations/refresh.sh x"
    made = "git -c diff.noprefix=false diff -C --find-copies-harder --full-index"
    write(source)
    write(target, line_2="idea")
    assert shell(f"git init -q && git add ppo.py && git add -N ppo_x.py && {made} >ablations/x.diff") == 0
    stale, old = target.read_text(), diff.read_text()
    write(source, line_20="a mend")
    assert shell(refresh) == 1 and (target.read_text(), diff.read_text()) == (stale, old)
    target.unlink()
    assert shell(refresh) == 0 and not target.exists()
    assert "a mend" not in diff.read_text() and shell("git apply ablations/x.diff") == 0
    assert "a mend" in target.read_text() and "idea" in target.read_text()
    target.unlink()
    write(source, line_2="where they meet", line_20="a mend")
    assert shell(refresh) == 1 and "<<<<<<< " in target.read_text() and shell(refresh) == 1
    write(target, line_2="idea and where they meet", line_20="a mend")
    write(source, line_2="where they meet", line_20="a mend", line_27="another")
    assert shell(refresh) == 0 and not target.exists() and shell("git apply ablations/x.diff") == 0
    assert "idea and" in target.read_text() and "another" in target.read_text()
    assert shell(refresh) == 1 and target.exists()
