"""quickstart/score.py and metric.py: which stage a script replaces, what a key depends on, the statistics by hand, and
a ledger that keeps what is there. The training itself is the stages' own and is not run here."""

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import metric
import numpy
import paired
import pandas
import pytest
import score
import torch
import tyro
from conftest import ROOT, make_constant, make_reward_model, single_process
from scipy import stats

import ppo


@pytest.mark.parametrize(
    ("script", "stage"),
    [("sft.py", "sft"), ("reward.py", "reward"), ("ppo.py", "ppo"), ("dpo.py", "dpo"), ("llama2/reward.py", "reward")]
    + [(f"variants/{name}.py", "ppo") for name in ("rloo", "grpo", "online_dpo")],
)
def test_the_stage_that_a_script_replaces(script, stage):
    assert score.stage_of(ROOT / script) == stage


def test_a_script_that_replaces_none_is_refused():
    with pytest.raises(SystemExit, match="tldr_dataset.py is no copy of sft.py"):
        score.candidate(str(ROOT / "tldr_dataset.py"))
    with pytest.raises(SystemExit, match="nowhere.py does not exist"):
        score.candidate("nowhere.py --lam 1")


def test_only_code_and_flags_make_another_candidate(tmp_path):
    text = (ROOT / "ppo.py").read_text()
    said = text.replace("# change here", "# changed").replace('"""Return the rewards (b, R)', '"""Return what')
    other = text.replace("gamma * lam * advantage", "lam * gamma * advantage")
    assert said != text != other
    codes = []
    for name, source in (("one", text), ("said", said), ("other", other)):
        (tmp_path / f"{name}.py").write_text(source)
        codes.append(score.code_of(tmp_path / f"{name}.py"))
    assert codes[0] == codes[1] != codes[2]


def test_files_that_a_script_uses_make_another_candidate(tmp_path):
    """Those beside it that it imports, and those that its flags name."""
    helper, mine = tmp_path / "my_loss.py", tmp_path / "ppo_mine.py"
    mine.write_text((ROOT / "ppo.py").read_text().replace("import torch\n", "import my_loss\nimport torch\n", 1))
    commands = [str(mine), f"{ROOT / 'ppo.py'} --reward-function {helper}:score"]
    found = []
    for text in ("x = 1", "x = 2"):
        helper.write_text(text)
        found.append([score.candidate(command).version for command in commands])
    assert found[0][0] != found[1][0] and found[0][1] != found[1][1]


def test_a_changed_upstream_model_is_noticed(tmp_path, monkeypatch):
    """And flags of a candidate cannot change seed, models or data."""
    sft, commands = tmp_path / "sft", []
    (sft / "model").mkdir(parents=True)
    (sft / "model" / "model.safetensors").write_bytes(b"one")
    args = score.Args(rows=tmp_path / "rows.csv", data=tmp_path / "data")
    monkeypatch.setattr(score, "run", lambda command, log: commands.append(list(map(str, command))))
    one = score.candidate(f"{ROOT / 'dpo.py'} --seed 9 --sft-model-path elsewhere")
    folder = score.trained(one, {"sft": sft}, 1, args)
    score.trained(score.candidate("sft.py --num-train-epochs 1"), {}, 1, replace(args, size="m"))
    last, of_m = (dict(zip(command, command[1:], strict=False)) for command in commands)  # the last one of a flag
    assert of_m["--num-train-epochs"] == "1" and of_m["--model"].endswith("nano-m")
    assert last["--seed"] == "1" and last["--sft-model-path"] == str(sft) and last["--output-dir"] == str(folder)
    monkeypatch.setattr(score, "run", lambda *_: (sft / "model" / "model.safetensors").write_bytes(b"two"))
    with pytest.raises(RuntimeError, match="it changed the sft model that it starts from"):
        score.trained(one, {"sft": sft}, 2, args)


def test_differences_by_hand():
    """The paired t test, the floor of the A/A runs, and Holm's correction. A copy that changes nothing has p 1."""
    columns = {"wide": [0.1, 0.5, -0.2, 0.3], "narrow": [0.01, 0.02, 0.00, 0.01], "other": [-0.03, -0.01, -0.02, -0.04]}
    noise = [0.01, -0.01, 0.012, -0.008]
    found = paired.summarise(pandas.DataFrame(columns), noise, 3)
    for name, values in columns.items():
        expected = stats.ttest_1samp(values, 0)
        interval = expected.confidence_interval(0.95)
        assert found[name]["p"] == pytest.approx(expected.pvalue)
        assert (found[name]["low"], found[name]["high"]) == pytest.approx((interval.low, interval.high))
    error = stats.sem(columns["narrow"])
    assert found["narrow"]["power"] == pytest.approx((stats.t.ppf(0.975, 3) + stats.t.ppf(0.8, 3)) * error)
    assert found["narrow"]["floor"] == pytest.approx(stats.t.ppf(0.975, 3) * numpy.std(noise, ddof=1) / 2)
    copied = paired.summarise(pandas.DataFrame(columns | {"copied": [0.0] * 4}), noise, 4)
    assert copied["narrow"]["p"] == found["narrow"]["p"] and copied["copied"]["p"] == 1
    for tries in (3, 7):  # Holm: x 3, x 2, x 1, or more if more has been tried
        found = paired.summarise(pandas.DataFrame(columns), noise, tries)
        smallest, middle, largest = sorted(found, key=lambda name: found[name]["p"])
        assert found[smallest]["holm"] == pytest.approx(min(1, tries * found[smallest]["p"]))
        expected = max(found[smallest]["holm"], (tries - 1) * found[middle]["p"])
        assert found[middle]["holm"] == pytest.approx(min(1, expected))
        assert found[largest]["holm"] >= found[largest]["p"]


def test_one_standard_deviation_for_the_candidates_of_a_study():
    """By hand, with two candidates: the residuals of a two-way table are those of the three columns' double centring.
    A candidate of more than three times the median spread keeps its own t test, and seeds may be missing."""
    rng = numpy.random.default_rng(0)
    runs = pandas.DataFrame(rng.normal(size=(5, 3)) + rng.normal(size=(5, 1)), columns=["base", "a", "b"])
    centred = runs.sub(runs.mean(axis=1), axis=0).sub(runs.mean()) + runs.to_numpy().mean()
    spread = numpy.sqrt((centred**2).to_numpy().sum() / 8)  # (3 - 1)(5 - 1) degrees of freedom
    assert paired.residual_spread(runs) == (pytest.approx(spread), 8)
    differences = runs[["a", "b"]].sub(runs["base"], axis=0)
    found = paired.summarise(differences, [], 0, 0.95, runs)
    half = stats.t.ppf(0.975, 8) * spread * numpy.sqrt(2 / 5)
    for name in differences:
        assert found[name]["high"] == pytest.approx(differences[name].mean() + half)
    wild = runs.assign(wild=runs["base"] + 100 * rng.normal(size=5), c=runs["a"] + rng.normal(size=5))
    few = wild.mask(wild.index.to_numpy()[:, None] + (wild.columns == "b") * 5 >= 8)  # b has three seeds
    differences = few[["a", "b", "c", "wild"]].sub(few["base"], axis=0)
    found = paired.summarise(differences, [], 0, 0.95, few)
    assert found["wild"]["p"] == pytest.approx(stats.ttest_1samp(differences["wild"], 0).pvalue)
    spread, freedom = paired.residual_spread(few.drop(columns="wild"))
    assert freedom == 18 - (4 + 4)  # four candidates' runs, less two of b; their effects, and those of four seeds
    half = stats.t.ppf(0.975, freedom) * spread * numpy.sqrt(2 / 3)
    assert found["b"]["low"] == pytest.approx(differences["b"].mean() - half)


@pytest.mark.parametrize(
    ("numbers", "confirm", "words"),
    [
        ({"mean": 0.02, "holm": 0.002}, 0, "below the noise floor"),
        ({"mean": 0.2, "holm": 0.002}, 0, "promising"),
        ({"mean": 0.2, "holm": 0.2}, 0, "cannot be told: an effect of 0.250"),
        ({"mean": -0.2, "holm": 0.002}, 0, "worse"),
        ({"mean": 0.2, "holm": 0.002, "noise_runs": 1}, 0, "cannot be told: fewer than two A/A runs"),
        ({"mean": 0.01, "holm": 0.002, "floor": 0.0}, 0, "promising"),  # rounding changes nothing
        ({"mean": 0.2, "holm": 0.2}, 8, "cannot be told: an effect"),
        ({"mean": 0.2, "holm": 0.02}, 8, "better"),
        ({"mean": 0.2, "holm": 0.02, "count": 5}, 8, "cannot be told: 5 of 8 seeds"),
    ],
)
def test_the_verdict(numbers, confirm, words):
    assert words in paired.verdict(
        {"power": 0.25, "floor": 0.03, "noise_runs": 8, "p": 0.001, "count": 8} | numbers, confirm
    )


@pytest.fixture
def rows(tmp_path, monkeypatch) -> SimpleNamespace:
    """score.main with made-up numbers: .args, and .made, the runs that it asked for."""
    (tmp_path / "data" / "tldr").mkdir(parents=True)
    made = []

    def make_row(one, seed, note, args):
        made.append((one.text, seed, note))
        row = {"candidate": one.text, "note": note, "stage": one.stage, "size": args.size, "seed": seed}
        if "--lam" in one.text and seed == 2:
            return row | score.machine() | {"failed": "out of luck", "seconds": 1}
        truth = 0.5 + seed / 100 + 0.001 * note.startswith("A/A") * (-1) ** seed + 0.2 * ("kl-coef" in one.text)
        return row | score.machine() | dict.fromkeys(score.NUMBERS, 1.0) | {"truth": truth, "kl": 2.0, "seconds": 1}

    monkeypatch.setattr(score, "make_row", make_row)
    monkeypatch.setattr(score, "draw", lambda tables, path: path.touch())
    args = {"rows": tmp_path / "rows.csv", "data": tmp_path / "data", "seeds": [1, 2, 3]}
    return SimpleNamespace(args=args, made=made)


def test_a_row_that_is_there_is_not_made_again(rows, tmp_path, capsys):
    score.main(score.Args(["ppo.py", "ppo.py --kl-coef 0"], **rows.args))
    assert len(rows.made) == 12
    assert rows.made.count(("ppo.py", 1, "A/A 16")) == rows.made.count(("sft.py", 1, "SFT")) == 1
    assert "ppo.py --kl-coef 0 beside ppo.py: promising: now --confirm" in capsys.readouterr().out
    rows.made.clear()
    score.main(score.Args(["ppo.py --kl-coef 0"], **rows.args))  # its baseline is ppo.py
    assert rows.made == []
    score.main(score.Args(["ppo.py", "ppo.py --lam 1"], **rows.args))
    assert {text for text, _, _ in rows.made} == {"ppo.py --lam 1"}
    out = capsys.readouterr().out
    assert "ppo.py --lam 1 beside ppo.py: cannot be told: 1 of 3 seeds failed\n    seed 2: out of luck" in out
    assert rows.args["rows"].with_suffix(".png").exists()
    table = pandas.read_csv(rows.args["rows"], dtype=str)
    assert len(table) == 15 and table["key"].nunique() == 15
    table.assign(commit="6e96385", bed="000123456789").to_csv(tmp_path / "digits.csv", index=False)
    ledger = score.read_ledger(tmp_path / "digits.csv")  # whose hashes are no numbers
    assert set(ledger["commit"]) == {"6e96385"} and set(ledger["bed"]) == {"000123456789"}
    rows.made.clear()
    score.main(score.Args(show=True, **rows.args))
    assert rows.made == [] and "| `ppo.py --kl-coef 0` | 3 | 0.720 ± 0.010 |" in capsys.readouterr().out


def test_another_processor_has_runs_of_its_own(rows, monkeypatch, capsys):
    """Truth is 0.3 higher on the second one. Differences are 0.2 on both, and so is their mean."""
    made_there = score.machine() | {"cpu": "another"}
    score.main(score.Args(["ppo.py", "ppo.py --kl-coef 0"], **rows.args))
    rows.made.clear()
    monkeypatch.setattr(score, "machine", lambda: made_there)
    make_row = score.make_row
    monkeypatch.setattr(score, "make_row", lambda *job: (row := make_row(*job)) | {"truth": row["truth"] + 0.3})
    score.main(score.Args(["ppo.py", "ppo.py --kl-coef 0"], **(rows.args | {"seeds": [3, 4]})))
    assert rows.made.count(("ppo.py --kl-coef 0", 3, "")) == rows.made.count(("ppo.py", 3, "")) == 1
    said = capsys.readouterr().out.rpartition("size s, seeds")[2]
    assert said.startswith(" 1, 2, 3, 4;") and "+0.200 (+0.200 to +0.200)" in said


def test_a_run_of_another_processor_is_another_run(tmp_path, monkeypatch):
    """Otherwise a folder that was moved would give a row of this processor."""
    folder_of = lambda words: words[words.index("--output-dir") + 1]  # noqa: E731
    monkeypatch.setattr(score, "run", lambda words, _: Path(folder_of(words), "model").mkdir(parents=True))
    one, args = score.original("sft"), score.Args(rows=tmp_path / "rows.csv", data=tmp_path / "data")
    here = score.trained(one, {}, 1, args)
    assert score.trained(one, {}, 1, args) == here
    monkeypatch.setattr(score, "machine", lambda: {"cpu": "another"})
    assert score.trained(one, {}, 1, args) != here


def test_rows_with_other_columns_are_not_added_to(rows):
    pandas.DataFrame([{"key": "1", "seed": 1, "failed": ""}]).to_csv(rows.args["rows"], index=False)
    before = rows.args["rows"].read_bytes()
    with pytest.raises(SystemExit, match="columns"):
        score.main(score.Args(["ppo.py"], **rows.args))
    assert rows.made == [] and rows.args["rows"].read_bytes() == before


def test_an_edited_script_is_another_try(rows, tmp_path, monkeypatch, capsys):
    """Its earlier rows are not mixed into the table, but count in Holm's correction."""
    monkeypatch.chdir(tmp_path)
    text, mine = (ROOT / "ppo.py").read_text(), "ppo_mine.py --kl-coef 0"
    for lam in (0.9, 0.8, 0.9):
        Path("ppo_mine.py").write_text(text.replace("lam: float = 0.95", f"lam: float = {lam}"))
        score.main(score.Args(["ppo.py", mine], **rows.args))
        assert capsys.readouterr().out.count(f"| `{mine}` | 3 |") == 1
    assert len(rows.made) == 15  # ppo.py, its A/A runs, the SFT policy and two versions; the third call makes none
    ledger = score.read_ledger(rows.args["rows"])
    assert ledger[ledger["stage"] == "ppo"].groupby(["candidate", "note"])["version"].nunique().to_list() == [1, 1, 2]
    score.main(score.Args([mine], show=True, **rows.args))
    assert " as of " not in capsys.readouterr().out
    score.main(score.Args(show=True, **rows.args))
    assert capsys.readouterr().out.count(" as of ") == 2  # its row and its verdict


def test_the_mean_that_centres_rewards_is_part_of_a_model(tmp_path):
    """Reward models that differ in it alone are two, because PPO's clipping and penalty see it."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model.safetensors").write_bytes(b"weights")
    found = set()
    for config in ({}, {"reward_mean": 0.0}, {"reward_mean": 3.4}):
        (tmp_path / "model/config.json").write_text(json.dumps(config))
        found.add(score.weights_of(tmp_path))
    assert len(found) == 3


def test_tries_of_another_stage_count(rows, tmp_path, monkeypatch):
    """p of dpo_mine.py beside ppo.py is corrected for all of its versions, and for the candidates of ppo.py's stage."""
    monkeypatch.chdir(tmp_path)
    tries, text = [], (ROOT / "dpo.py").read_text()
    monkeypatch.setattr(score, "summarise", lambda *inputs: tries.append(inputs[-1]) or {})
    for beta in (0.05, 0.06, 0.07):
        Path("dpo_mine.py").write_text(text.replace("beta: float = 0.05", f"beta: float = {beta}"))
        score.main(score.Args(["ppo.py", "dpo_mine.py"], **rows.args))
    score.main(score.Args(["ppo.py", "ppo.py --kl-coef 0"], **rows.args))
    assert tries == [1, 2, 3, 1]


def test_confirmation_uses_seeds_of_its_own(rows, capsys):
    score.main(score.Args(["ppo.py --kl-coef 0"], confirm=True, **rows.args))
    assert "cannot be told: fewer than two A/A runs" in capsys.readouterr().out
    score.main(score.Args(["ppo.py"], **rows.args))
    rows.made.clear()
    table = pandas.read_csv(rows.args["rows"], dtype={"note": str})  # a call that was cut short
    table[table["seed"] != 108].to_csv(rows.args["rows"], index=False)
    score.main(score.Args(["ppo.py --kl-coef 0"], confirm=True, show=True, **rows.args))
    assert "cannot be told: 7 of 8 seeds" in capsys.readouterr().out
    table[table["seed"] < 100].to_csv(rows.args["rows"], index=False)
    score.main(score.Args(["ppo.py --kl-coef 0"], confirm=True, **rows.args))
    assert {seed for _, seed, _ in rows.made} == set(range(101, 109))
    with pytest.raises(SystemExit, match="seeds 101 to 108 are kept for --confirm"):
        score.main(score.Args(["ppo.py"], **rows.args | {"seeds": [1, 104]}))
    assert "ppo.py --kl-coef 0 beside ppo.py: better" in capsys.readouterr().out


def test_the_metrics_posts_are_its_own(world):
    told, pairs = metric.fresh_posts(20)
    again, _ = metric.fresh_posts(20)
    seen = {json.loads(line)["post"] for path in (world.raw / "posts").iterdir() for line in path.open()}
    assert told == again and len(told) == len(pairs) == 20 and not seen & {row["post"] for row in told}


@torch.no_grad()
def test_the_metric_by_hand(world, tmp_path, monkeypatch):
    """A summary that is the reference's has a ROUGE-L of 1 and half of the wins; the SFT policy has no KL to itself."""
    folder = make_reward_model(world.model, tmp_path / "reward")
    tokenizer = ppo.load_tokenizer(str(world.model))
    told, pairs = metric.fresh_posts(6)
    references = [f" {row['summary']}<|endoftext|>" for row in told]
    responses = tokenizer(references, padding=True, padding_side="right", return_tensors="pt").input_ids
    monkeypatch.setattr(ppo, "sample", lambda *_: (responses, None))
    found, rows, _ = metric.measure(metric.Args(str(world.model), str(world.model), str(folder), posts=6))
    assert rows == told
    expected = {"rougeL": 1.0, "win_rate": 0.5, "eos_rate": 1.0, "kl": 0.0, "wrong_facts": 0.0}
    assert {key: found[key] for key in expected} == pytest.approx(expected)
    constant = ppo.load_reward_model(str(make_constant(folder, tmp_path / "constant")), tokenizer)
    settings = ppo.Args(micro_batch_size=4)
    assert metric.accuracy(single_process(), constant, pairs, tokenizer, settings) == 0.5


def test_the_noise_floor_is_that_of_all_beds(rows, capsys):
    """A/A pairs of older scripts count, those of another size do not."""
    for size, seeds in (("s", [1, 2, 3]), ("s", [4, 5]), ("xs", [1, 2])):
        score.main(score.Args(["ppo.py"], size=size, **rows.args | {"seeds": seeds}))
    table = pandas.read_csv(rows.args["rows"], dtype={"note": str})
    table.loc[table["seed"].isin([4, 5]), "bed"] = "older"
    table.to_csv(rows.args["rows"], index=False)
    baseline = score.read_ledger(rows.args["rows"]).query("candidate == 'ppo.py' and size == 's'").iloc[0]
    noise = paired.noise_pairs(score.read_ledger(rows.args["rows"]), baseline, "truth")
    assert sorted(noise) == pytest.approx([-0.001, -0.001, -0.001, 0.001, 0.001])
    score.main(score.Args(["ppo.py --kl-coef 0"], **rows.args))
    floor = stats.t.ppf(0.975, 4) * numpy.std(noise, ddof=1) / numpy.sqrt(3)
    assert f"noise floor of a difference in truth: {floor:.3f} (5 A/A runs)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "page", ["README.md", *(f"{name}/README.md" for name in ("quickstart", "variants", "ablations"))]
)
def test_pages_show_the_tables_of_the_committed_rows(page, tmp_path, monkeypatch, capsys):
    """Each table under a command of score.py, or its first columns; the first page has that of the quick start's."""
    monkeypatch.chdir(ROOT)
    text = (ROOT / page).read_text()
    source = text if page != "README.md" else (ROOT / "quickstart/README.md").read_text()
    commands = re.findall(r"^ *python (quickstart/score.py --show .*--commit .*)$", source, re.MULTILINE)
    assert commands
    for command in commands if page != "README.md" else [command for command in commands if "017875b" in command]:
        for size in ("xs", "s", "m") if "$size" in command else ["s"]:
            words = shlex.split(command.replace("$size", size))[1:]
            score.main(tyro.cli(score.Args, args=[*words, "--figure", str(tmp_path / "figure.png")]))
            lines = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
            columns = 8 if page == "README.md" else len(lines[0]) - 1
            cut = "\n".join("|".join(line[:columns]) + "|" for line in lines)
            assert f"\n{cut}\n\n" in text, command


def test_wrong_facts_by_hand():
    post = "My sister (24F) broke my laptop and I am angry."
    assert metric.wrong_facts(post, "sister broke laptop, 24, angry") == 0
    assert metric.wrong_facts(post, "sister broke laptop and bike, 25, sad, move out?") == 4


def test_the_page_has_the_noise_that_was_measured():
    """Its table of the A/A runs of PPO at commit 6e96385: mean differences in truth, with p of the paired t test."""
    rows = score.read_ledger(ROOT / "quickstart/results/rows.csv").query("commit == '6e96385'")
    truth = rows.pivot(index="seed", columns="note", values="truth")
    lines = ["| seeds | 16 less 64 | 32 less 64 | 16 less 32 |", "|---|---|---|---|"]
    for seeds in ([1, 2, 3, 4], [5, 6, 7, 8]):
        cells = []
        for one, other in (("A/A 16", ""), ("A/A 32", ""), ("A/A 16", "A/A 32")):
            difference = (truth[one] - truth[other]).loc[seeds]
            cells.append(f"{difference.mean():+.4f}, p {stats.ttest_1samp(difference, 0).pvalue:.2f}")
        lines.append(f"| {seeds[0]} to {seeds[-1]} | {' | '.join(cells)} |")
    gains = truth[""] - truth["SFT"]
    noise = paired.noise_pairs(rows, rows[rows["note"] == ""].iloc[0], "truth")
    floor = paired.summarise(pandas.DataFrame({"": gains}), noise, 1)[""]["floor"]
    said = f"PPO gains {gains.min():.3f} to {gains.max():.3f} of truth over its SFT model."
    expected = "\n".join([*lines, "", f"{said} The noise floor of eight seeds is {floor:.3f}."])
    assert expected in (ROOT / "quickstart/README.md").read_text()


def test_the_page_has_the_numbers_of_the_summaries_that_need_no_model():
    rows, _ = metric.fresh_posts(500)
    page = (ROOT / "quickstart/README.md").read_text()
    for name, column in (
        ("the reference", "summary"),
        ("a nearly perfect summary", "near_perfect"),
        ("the title", "copied_title"),
    ):
        found = metric.text_numbers(rows, [row[column] for row in rows])
        line = "| {truth:.3f} | {win_rate:.3f} | {wrong_facts:.2f} | {words:.1f} | {rougeL:.3f} |".format(**found)
        assert f"| {name} {line}" in page


def test_one_version_has_one_row_whatever_it_is_called(rows, tmp_path, monkeypatch, capsys):
    """Seeds on which it did badly stay, and a baseline by another name is the baseline."""
    monkeypatch.chdir(tmp_path)
    Path("ppo_mine.py").write_text((ROOT / "ppo.py").read_text())
    Path("copy.py").write_text((ROOT / "ppo.py").read_text())
    score.main(score.Args(["ppo.py", "ppo_mine.py --lam 1"], **rows.args))
    made = len(rows.made)
    score.main(score.Args(["copy.py", "./ppo_mine.py --lam 1"], **rows.args | {"seeds": [1, 3]}))
    said = capsys.readouterr().out.rpartition("size s")[2]
    assert len(rows.made) == made
    assert "./ppo_mine.py --lam 1 beside copy.py: cannot be told: 1 of 3 seeds failed" in said
    score.main(score.Args(["ppo.py", "copy.py"], **rows.args))
    assert "copy.py beside ppo.py: the same code and flags" in capsys.readouterr().out


def test_a_run_that_saved_a_model_and_failed_is_made_again(tmp_path, monkeypatch):
    args, one = score.Args(rows=tmp_path / "rows.csv", data=tmp_path / "data"), score.original("sft")

    def fails(command, log):
        folder = Path(command[command.index("--output-dir") + 1])
        assert not folder.exists()
        (folder / "model").mkdir(parents=True)
        raise RuntimeError("diverged")

    for _ in range(2):
        monkeypatch.setattr(score, "run", fails)
        with pytest.raises(RuntimeError, match="diverged"):
            score.trained(one, {}, 1, args)
    made = []

    def works(command, log):
        folder = Path(command[command.index("--output-dir") + 1])
        (folder / "model").mkdir(parents=True)
        made.append(folder)

    monkeypatch.setattr(score, "run", works)
    for _ in range(2):
        folder = score.trained(one, {}, 1, args)
    assert made == [folder]
    shutil.rmtree(folder)  # as is done with a model that a later run has changed
    score.trained(one, {}, 1, args)
    assert made == [folder] * 2


def test_a_script_that_is_edited_meanwhile_has_no_row(tmp_path, monkeypatch):
    mine = tmp_path / "sft_mine.py"
    mine.write_text((ROOT / "sft.py").read_text())
    one, args = score.candidate(str(mine)), score.Args(rows=tmp_path / "rows.csv", data=tmp_path / "data")
    for edit, message in (("x = 1\n", "the script was edited"), ("x = (\n", "'\\(' was never closed")):
        monkeypatch.setattr(score, "run", lambda *_, edit=edit: mine.write_text((ROOT / "sft.py").read_text() + edit))
        assert re.search(message, score.make_row(one, 1, "", args)["failed"])
        mine.write_text((ROOT / "sft.py").read_text())


def test_only_truth_has_a_verdict(rows, capsys):
    score.main(score.Args(["ppo.py --kl-coef 0"], of="kl", **rows.args))
    assert "promising" not in capsys.readouterr().out
