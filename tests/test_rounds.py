"""llama2/rounds.sh and rounds.py: the order of the loop and its resuming with a stand-in for Python, and the numbers by
hand."""

import os
import shutil
import subprocess

import pandas
import pytest
import torch
from conftest import ROOT, make_reward_model, script, write_program
from datasets import DatasetDict, load_from_disk

rounds = script("llama2/rounds.py")

# notes each command, and makes the folder or the row that the real one would; command number $DIES_AT of those of the
# loop fails
BEFORE = ("quickstart/", "tldr_dataset", "llama2/rounds.py one-commit")  # commands before the loop
STAND_IN = """#!/usr/bin/env bash
[[ $1 != -m ]] || exit 0
echo "$*" >>"$LOG"
(($(grep -Ecv "^(quickstart/|tldr_dataset|llama2/rounds.py one-commit)" "$LOG") != DIES_AT)) || exit 9
while (($#)); do
    case $1 in
        --output-dir) mkdir -p "$2/model" ;;
        --to) mkdir -p "$2" ;;
        --run) IFS=/ read -r size seed arm round <<<"${2#runs/llama2_rounds/}" ;;
        --trained) file=accuracy ;;
        --output) [[ -z ${arm:-} ]] || echo "$arm,$size,$seed,${round:-1},1" >>"$2/${file:-rounds}.csv" ;;
    esac
    shift
done
"""


@pytest.fixture
def run(tmp_path):
    """rounds.sh in a copy of the scripts that it calls, with the stand-in. Returns its commands."""
    for folder in ("llama2", "quickstart"):
        (tmp_path / folder).mkdir()
        for file in (ROOT / folder).glob("*.*"):
            shutil.copy(file, tmp_path / folder)
    (tmp_path / "llama2/results").mkdir()
    (tmp_path / "requirements.txt").touch()
    write_program(tmp_path / "venv/bin/python", STAND_IN)

    def start(*words: str, dies_at: int = 0) -> list[str]:
        log = tmp_path / "log"
        log.write_text("")
        environment = os.environ | {
            "VIRTUAL_ENV": str(tmp_path / "venv"),
            "LOG": str(log),
            "DIES_AT": str(dies_at or -1),
        }
        command = ["bash", str(tmp_path / "llama2/rounds.sh"), *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert (done.returncode != 0) == (dies_at > 0), done.stderr
        return [line for line in log.read_text().splitlines() if not line.startswith(BEFORE)]

    return start


def values(command: str, flag: str) -> list[str]:
    """The values of a flag."""
    words = command.split(f" {flag} ")[1].split()
    return words[: next((i for i, word in enumerate(words) if word.startswith("--")), len(words))]


def test_each_round_asks_the_two_newest_policies(run):
    commands = run("--seeds", "1", "graded")
    labelled = [line for line in commands if line.startswith("ensembles/gold_label.py")]
    home = "runs/llama2_rounds/s/1/"
    newest = [home + "sft", *(home + f"graded/{i}/ppo" for i in (1, 2, 3, 4))]
    asked = [values(line, "--policy") for line in labelled]
    assert asked == [newest[:1], *([newest[i], newest[i - 1]] for i in (1, 2, 3, 4))]
    assert [values(line, "--skip-prompts") for line in labelled] == [[str(800 * i)] for i in range(5)]
    merged = [values(line, "--labelled") for line in commands if " merge " in line]
    assert merged == [[home + f"graded/{i}/labelled" for i in range(1, t + 1)] for t in (1, 2, 3, 4, 5)]
    for name in ("llama2/reward.py", "ppo.py"):
        starts = [values(line, "--sft-model-path") for line in commands if line.startswith(f"{name} ")]
        assert starts == [[home + "sft"]] * 5


def test_the_other_arms_have_as_many_labels(run, tmp_path):
    commands = run("--seeds", "1")
    merged = [line for line in commands if " merge " in line]
    totals = [len(values(line, "--labelled")) * int(values(line, "--count")[0]) for line in merged]
    assert totals == [320, 640, 960, 1280, 1600] * 2 + [1600, 1600]
    trained = [line for line in commands if line.startswith("llama2/reward.py")]
    assert [values(line, "--margin")[0] for line in trained] == ["small"] * 5 + ["none"] * 5 + ["small"] * 6
    assert sum("--skip-prompts 0 --prompts 4000" in line for line in commands) == 1  # the ensemble's are once's
    [ensemble] = [line for line in commands if line.startswith("ensembles/ppo.py")]
    assert len(set(values(ensemble, "--reward-model-paths"))) == 5


@pytest.mark.parametrize("kind", ["llama2/reward.py", "llama2/rounds.py measure", "llama2/rounds.py accuracies"])
def test_a_stopped_loop_goes_on(run, tmp_path, kind):
    """It is stopped at the third reward model, at the last row of truth, and at the rows of accuracy."""
    whole = run("--seeds", "1", "graded")
    numbers = [i for i, line in enumerate(whole) if line.startswith(kind)]
    stop = numbers[2] if kind == "llama2/reward.py" else numbers[-1]
    shutil.rmtree(tmp_path / "runs")
    for name in ("rounds", "accuracy"):
        (tmp_path / f"llama2/results/{name}.csv").unlink()
    assert run("--seeds", "1", "graded", dies_at=stop + 1) == whole[: stop + 1]
    assert run("--seeds", "1", "graded") == whole[stop:]
    assert run("--seeds", "1", "graded") == whole[-1:]  # the tables


def test_a_flag_without_its_value_is_named():
    done = subprocess.run(["bash", str(ROOT / "llama2/rounds.sh"), "--seeds"], capture_output=True, text=True)
    assert done.returncode != 0 and "--seeds needs a value" in done.stderr and done.stdout == ""


# ---- rounds.py ---------------------------------------------------------------------------------------------------


@pytest.fixture
def arm(world, tmp_path):
    """Two rounds of an arm: the preference data as pairs of either, and two reward models."""
    data = load_from_disk(str(world.preference_dataset))
    folder = tmp_path / "xs/3/graded"
    for number in (1, 2):
        own = data["validation"].select(range(4 * number, 4 * number + 6))
        own = own.add_column("grade", ["better", "slightly"] * 3)
        for noise in (0, 25):
            splits = DatasetDict(train=own.select(range(number, 6)), validation=own)
            splits.save_to_disk(str(folder / str(number) / f"labelled/noise_{noise}"))
        make_reward_model(world.model, folder / str(number) / "reward/model", bias=0.5)
    return folder


def test_merging_by_hand(arm, tmp_path):
    labelled = [arm / "1/labelled", arm / "2/labelled"]
    rounds.merge(labelled, tmp_path / "all", count=4)
    joined = load_from_disk(str(tmp_path / "all/preference"))
    own = [load_from_disk(str(folder / "noise_25"))["train"]["id"][:] for folder in labelled]
    assert joined["train"]["id"][:] == own[0][:4] + own[1] and (len(own[0]), len(own[1])) == (5, 4)
    assert joined["validation"]["id"][:] == load_from_disk(str(arm / "2/labelled/noise_0"))["validation"]["id"][:]
    with pytest.raises(SystemExit):
        rounds.merge(labelled, tmp_path / "many", count=5)
    assert not (tmp_path / "many").exists()


def test_runs_and_rows_of_another_commit_are_refused(tmp_path, monkeypatch):
    """A commit of digits alone, such as 1234567, is no number."""
    rows, runs = [tmp_path / "rounds.csv", tmp_path / "absent.csv"], tmp_path / "runs"
    pandas.DataFrame([{"arm": "once", "commit": "1234567"}]).to_csv(rows[0], index=False)
    monkeypatch.setattr(rounds.score, "commit_of", lambda: "1234567")
    rounds.one_commit(runs, rows)
    rounds.one_commit(runs, rows)
    monkeypatch.setattr(rounds.score, "commit_of", lambda: "abc")
    for others in (rows, []):
        with pytest.raises(SystemExit, match="1234567"):
            rounds.one_commit(runs, others)
    monkeypatch.setattr(rounds.score, "commit_of", lambda: "1234567-dirty")
    with pytest.raises(SystemExit, match="commit your changes"):
        rounds.one_commit(tmp_path / "other", [])


def test_outside_git_a_loop_goes_on(tmp_path, monkeypatch):
    """Its rows have no commit, which is not another one."""
    monkeypatch.setattr(rounds.score, "commit_of", lambda: "")
    rounds.append([{"arm": "once"}], tmp_path / "rounds.csv")
    rounds.one_commit(tmp_path / "runs", [tmp_path / "rounds.csv"])
    assert (tmp_path / "runs/commit").read_text() == ""


def test_the_sft_policy_is_measured_once(tmp_path, world, monkeypatch):
    """Round 1 of a seed adds it as round 0; the next arm does not."""
    monkeypatch.setattr(rounds.metric, "measure", lambda args: ({"truth": len(args.policy), "score": 1.0}, 0, 0))
    for arm in ("graded", "once"):
        run = tmp_path / "xs/3" / arm / "1"
        (run / "reward").mkdir(parents=True)
        load_from_disk(str(world.preference_dataset)).save_to_disk(str(run / "pairs/preference"))
        rounds.measure(run, tmp_path)
    table = pandas.read_csv(tmp_path / "rounds.csv")
    assert table["arm"].tolist() == ["graded", "sft", "once"] and table["round"].tolist() == [1, 0, 1]
    assert table["truth"].tolist() == [
        len(str(tmp_path / x)) for x in ("xs/3/graded/1/ppo", "xs/3/sft", "xs/3/once/1/ppo")
    ]
    assert table["labels"][1] == 0 and table["score"].isna().tolist() == [False, True, False]


def test_accuracies_by_hand(arm, world):
    """Rewards of single rows without padding, from the saved classifiers."""
    from transformers import AutoModelForSequenceClassification

    rows = rounds.accuracy_rows(arm, 2, 2)
    assert len(rows) == 2 * 2 * 2
    for row in rows:
        assert (row["arm"], row["size"], row["seed"]) == ("graded", "xs", 3)
        folder = arm / str(row["reward_model"]) / "reward/model"
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
        hits, chances = [], []
        for pair in load_from_disk(str(arm / str(row["pairs_of"]) / "labelled/noise_0"))["validation"]:
            if pair["grade"] == row["grade"]:
                ids = [pair[f"query_{x}_token"][: pair[f"query_{x}_token_len"]] for x in ("chosen", "rejected")]
                with torch.no_grad():
                    gap = model(torch.tensor([ids[0]])).logits.item() - model(torch.tensor([ids[1]])).logits.item()
                hits.append(float(gap > 0))
                chances.append(1 / (1 + torch.tensor(-abs(gap)).exp().item()))
        assert (row["pairs"], row["hits"]) == (3, sum(hits))
        assert row["chance"] == pytest.approx(sum(chances) / 3, abs=1e-5)


def test_the_tables(tmp_path, capsys):
    runs = [("graded", 1, 100, 0.6), ("sft", 0, 0, 0.55), ("graded", 2, 200, 0.7), ("once", 1, 200, 0.65)]
    rows = [
        dict.fromkeys(rounds.NUMBERS, 1.0)
        | {"arm": arm, "size": "s", "seed": seed, "round": number, "labels": labels, "truth": truth + seed / 100}
        for arm, number, labels, truth in runs
        for seed in (1, 2)
    ]
    pandas.DataFrame(rows).to_csv(tmp_path / "rounds.csv", index=False)
    accuracies = [
        {"arm": "graded", "size": "s", "chance": 0.6, "seed": seed, "reward_model": i, "pairs_of": j, "grade": grade}
        | {"pairs": 10, "hits": 4 + 2 * (i == j) + k}
        for seed in (1, 2)
        for i in (1, 2)
        for j in (1, 2)
        for k, grade in enumerate(["better", "slightly"])
    ]
    accuracies += [row | {"arm": "once", "hits": 3} for row in accuracies if row["reward_model"] == 1]
    pandas.DataFrame(accuracies).to_csv(tmp_path / "accuracy.csv", index=False)
    rounds.show(tmp_path)
    said = capsys.readouterr().out
    assert "| rounds, margins by grade | 2 | 2 | 200 | 0.715 ± 0.007 |" in said  # 0.71 and 0.72
    assert "truth of round 1 less SFT's, 95 %: +0.050" in said
    assert "truth of the last round less SFT's, 95 %: +0.150" in said
    assert "all pairs from the SFT policy, less the last round's, 95 %: -0.050" in said
    assert "| round 1 | 0.650 ± 0.000 | 0.450 ± 0.000 |" in said  # 6 + 7 of 20, and 4 + 5
    assert "round 1's model, pairs of round 2 less round 1, 95 %: -0.200" in said
    assert "on the pairs of round 2, round 2's model less round 1's, 95 %: +0.200" in said
    assert "on the pairs of round 2, round 2's model less once's, 95 %: +0.350" in said  # 0.65 less 0.3
    assert "| better | 40 | 0.600 | 0.600 |" in said and "| slightly | 40 | 0.600 | 0.700 |" in said
    assert (tmp_path / "rounds.png").exists()
