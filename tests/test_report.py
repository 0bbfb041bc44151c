"""quickstart/report.py: every number of the report against hand-made cases and an independent computation."""

import csv
import itertools
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pandas
import pytest
import report
import truth
from conftest import files, read_jsonl, write_csv, write_jsonl
from datasets import Dataset, DatasetDict

EOS = "<|endoftext|>"
OUTPUTS = {"table.csv", "table.md", "times.csv", "samples.md", "learning_curves.png"}
PERSON, EVENT, OBJECT, FEELING = (list(truth.FACTS[kind])[0] for kind in ("person", "event", "object", "feeling"))
OTHER_PERSON = list(truth.FACTS["person"])[1]
POST = f"Well.\nMy {PERSON} {EVENT} my {OBJECT}.\nI feel {FEELING}."  # four facts
ONE, TWO, THREE = OBJECT, f"{EVENT} {OBJECT}", f"My {PERSON} {EVENT} my {OBJECT}"
FOUR, WRONG = f"{THREE}, {FEELING}", f"My {OTHER_PERSON} {EVENT} my {OBJECT}"  # truth 1 and 0.25


# ---- worlds: a raw folder, a preference data set and four run folders ------------------------------------------------


def write_metrics(runs: Path, clock: float = 1.0):
    """metrics.jsonl of the four stages: 40 updates of 8 episodes; SFT's begins with its validation loss."""
    rng = random.Random(3)
    keys = {"sft": ["loss/train"], "reward": ["accuracy/train"], "dpo": ["accuracy/train"]}
    keys["ppo"] = ["objective/rlhf_reward", "objective/kl", "objective/score", "response/eos_rate", "response/length"]
    for i, stage in enumerate(("sft", "reward", "ppo", "dpo")):
        rows = [{"update": 0, "eval/loss": 5.0}] if stage == "sft" else []
        for update in range(1, 41):
            row = {"update": update, "episode": 8 * update} | {key: rng.random() for key in keys[stage]}
            rows.append(row | {"time/update": clock, "time/total": clock * (update + i)})
        write_jsonl(runs / stage / "nano-s" / "1" / "metrics.jsonl", rows)


def sample_rows(rows: list[dict], responses: list[str], rng: random.Random) -> list[dict]:
    """What a stage writes into eval/samples_validation.csv; ROUGE is made up: no other source has it."""
    found = []
    for row, response in zip(rows, responses, strict=True):
        each = {"id": row["id"], "query": f"POST: {row['post']}\n\nTL;DR:", "response": response}
        each |= {"reference": f" {row['summary']}", "response_tokens": rng.randint(1, 53)}
        found.append(each | {"has_eos": rng.random() < 0.7, "rouge1": 0.1, "rouge2": 0.2, "rougeL": rng.random()})
    return found


def folders(root: Path) -> SimpleNamespace:
    found = SimpleNamespace(root=root, raw=root / "raw", preference=root / "tldr" / "preference", runs=root / "runs")
    for stage in ("sft", "reward", "ppo", "dpo"):
        setattr(found, stage, found.runs / stage / "nano-s" / "1")
    found.output = found.runs / "report" / "nano-s" / "1"
    found.args = report.Args(raw=str(found.raw), preference_dataset=str(found.preference), runs=str(found.runs))
    return found


def reported(world: SimpleNamespace) -> SimpleNamespace:
    """The world with its report, of which .files are the files."""
    report.main(world.args)
    world.files = files(world.output)
    return world


@pytest.fixture
def small(small_told, tmp_path) -> SimpleNamespace:
    """A copy of the small world, to break, without its report."""
    shutil.copytree(small_told.root, tmp_path / "small", ignore=shutil.ignore_patterns("report"))
    return folders(tmp_path / "small")


@pytest.fixture(scope="module")
def small_told(tmp_path_factory) -> SimpleNamespace:
    """Four posts and eight pairs whose numbers a person can work out, and their report."""
    world = folders(tmp_path_factory.mktemp("small"))
    rows = [{"id": f"p{i}", "title": "t", "post": POST, "summary": THREE} for i in range(4)]  # references: 0.75
    write_jsonl(world.raw / "posts/validation.jsonl", [*rows, {"id": "p4", "post": POST, "summary": "not sampled"}])
    yardsticks = [{"id": row["id"], "near_perfect": FOUR, "copied_title": f"the {OBJECT}s"} for row in rows]
    yardsticks[0]["near_perfect"] = TWO
    write_jsonl(world.raw / "yardsticks/validation.jsonl", yardsticks[::-1])
    responses = {"sft": [FOUR, THREE, TWO, ONE], "ppo": [FOUR, FOUR, THREE, FOUR], "dpo": [WRONG, "NA", TWO, FOUR]}
    for stage, texts in responses.items():
        samples = sample_rows(rows, texts, random.Random(1))
        for i, row in enumerate(samples):
            row |= {"response_tokens": 10 + 2 * i, "has_eos": i > 0, "rougeL": 0.2 * i}
        write_csv(getattr(world, stage) / "eval/samples_validation.csv", samples)
    write_metrics(world.runs)
    filler = " ".join(f"w{i}" for i in range(truth.FREE_WORDS - 2))
    pairs = [  # chosen, rejected, gap of the rewards                        noisy  clean
        (FOUR, ONE, 1.0),  #                                                 hit    hit
        (FOUR, TWO, -1.0),  #                                                miss   miss
        (ONE, TWO, -0.5),  # a wrong label                                   miss   hit
        (WRONG, THREE, 1e-9),  # a wrong label                               hit    miss
        (f"{TWO} {filler}", TWO, 2.0),  # free words, but for EOS: a tie     hit    left out
        (TWO, ONE, 0.0),  #                                                  miss   miss
        (TWO, f"{TWO} {filler}", 0.0),  # the same on the other side         miss   left out
        ("", THREE, -3.0),  # a wrong label                                  miss   hit
    ]
    rows = [{"query": f"POST: {POST}", "chosen": f" {a}{EOS}", "rejected": f" {b}{EOS}"} for a, b, _ in pairs]
    data = {"train": rows[:1], "validation": rows, "validation_cnndm": rows[2:5]}
    DatasetDict({split: Dataset.from_list(rows) for split, rows in data.items()}).save_to_disk(str(world.preference))
    for stage, sign in (("reward", 1), ("dpo", -1)):
        rewards = [{"chosen_reward": sign * gap, "rejected_reward": 0.0} for _, _, gap in pairs]
        write_csv(getattr(world, stage) / "eval/pairs_validation.csv", rewards)
        write_csv(getattr(world, stage) / "eval/pairs_validation_cnndm.csv", rewards[2:5])
    return reported(world)


def table(world) -> dict[tuple[str, str], float]:
    """table.csv as {(row, metric): value}."""
    with (world.output / "table.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["row", "metric", "value"]
    found = {(row, metric): float(value) for row, metric, value in rows}
    assert len(found) == len(rows) and all(repr(float(value)) == value for _, _, value in rows)  # not rounded
    return found


# ---- numbers --------------------------------------------------------------------------------------------------------


def test_policies_worked_out_by_hand(small_told):
    found = table(small_told)
    expected = {
        "SFT": {"truth": (1 + 0.75 + 0.5 + 0.25) / 4, "win_rate": (1 + 0.5) / 4, "words": (6 + 5 + 2 + 1) / 4},
        "PPO": {"truth": (1 + 1 + 0.75 + 1) / 4, "win_rate": 3.5 / 4, "words": (6 + 6 + 5 + 6) / 4},
        "DPO": {"truth": (0.25 + 0 + 0.5 + 1) / 4, "win_rate": 1 / 4, "words": (5 + 1 + 2 + 6) / 4},
        "near_perfect": {"truth": (0.5 + 3) / 4, "win_rate": 3 / 4, "words": (2 + 6 + 6 + 6) / 4},
        "copied_title": {"truth": 0.0, "win_rate": 0.0, "words": 2.0},  # a plural is another word
        "reference": {"truth": 0.75, "win_rate": 0.5, "words": 5.0, "rougeL": 1.0},
    }
    wins = {"SFT": [1, 0.5, 0, 0], "PPO": [1, 1, 0.5, 1], "DPO": [0, 0, 0, 1]}
    wins |= {"near_perfect": [0, 1, 1, 1], "copied_title": [0] * 4, "reference": [0.5] * 4}
    for name, values in wins.items():
        low, high = report.bootstrap_interval(values, 2000)
        expected[name] |= {"win_rate_low": low, "win_rate_high": high}
    for name in ("SFT", "PPO", "DPO"):
        expected[name] |= {"rougeL": 0.3, "tokens": 13.0, "eos_rate": 0.75}
    # words in common, in order, over 5 words of the reference: 5 of 6 or 2 of 2; "laptops" is another word
    expected["near_perfect"]["rougeL"] = (2 * 1 * (2 / 5) / (1 + 2 / 5) + 3 * (2 * (5 / 6) * 1 / (5 / 6 + 1))) / 4
    expected["copied_title"]["rougeL"] = 0.0
    expected["PPO"]["share_of_near_perfect"] = 3.75 / 3.5
    gains = {"PPO-SFT": [0, 0.25, 0.25, 0.75], "DPO-SFT": [-0.75, -0.75, 0, 0.75]}
    for name, values in gains.items():
        low, high = report.bootstrap_interval(values, 10_000)
        difference = {"truth_difference": sum(values) / 4, "truth_difference_low": low, "truth_difference_high": high}
        expected[name] = difference
    for row, metrics in expected.items():
        for metric, value in metrics.items():
            assert found[row, metric] == pytest.approx(value, abs=1e-12), (row, metric)


def test_facts_by_kind_worked_out_by_hand(small_told):
    """The shares of right facts of each kind; a share of no posts is left out."""
    found = table(small_told)
    rights = {"person": [0.5, 1, 0.25], "event": [0.75, 1, 0.75], "object": [1, 1, 0.75], "feeling": [0.25, 0.75, 0.25]}
    for kind, shares in rights.items():
        assert [found[name, f"{kind}_right"] for name in ("SFT", "PPO", "DPO")] == shares
    assert (found["PPO", "person_wrong"], found["DPO", "person_wrong"], found["PPO", "age_wrong"]) == (0, 0.25, 0)
    assert ("PPO", "age_right") not in found


def test_accuracies_worked_out_by_hand(small_told):
    found = table(small_told)
    expected = {("reward", "accuracy_noisy"): 3 / 8, ("reward", "accuracy_clean"): 3 / 6}
    expected |= {("reward", "accuracy_noisy_cnndm"): 2 / 3, ("reward", "accuracy_clean_cnndm"): 1 / 2}
    # DPO's gaps are the others, upside down; a gap of 0 agrees with neither
    expected |= {("dpo_implicit", "accuracy_noisy"): 3 / 8, ("dpo_implicit", "accuracy_clean"): 2 / 6}
    expected |= {("dpo_implicit", "accuracy_noisy_cnndm"): 1 / 3, ("dpo_implicit", "accuracy_clean_cnndm"): 1 / 2}
    assert {key: value for key, value in found.items() if "accuracy" in key[1]} == pytest.approx(expected)


# ---- intervals ------------------------------------------------------------------------------------------------------


def test_interval_of_few_values_is_that_of_all_resamples():
    values = [0.0, 0.1, 0.5, 1.7]
    means = sorted(sum(draw) / 4 for draw in itertools.product(values, repeat=4))  # all 256 alike
    low, high = report.bootstrap_interval(values, 20_000)
    assert means[4] <= low <= means[8] and means[247] <= high <= means[251]  # 2.5 % of 256 are 6.4
    assert report.bootstrap_interval([0.25] * 7, 2000) == (0.25, 0.25)
    assert report.bootstrap_interval([1.0], 2000) == (1.0, 1.0)
    low, high = report.bootstrap_interval([0.0] * 30 + [1.0] * 70, 2000)
    assert 0.59 < low < 0.63 and 0.77 < high < 0.81  # 0.7 +- 1.96 x 0.0458
    assert (low, high) == report.bootstrap_interval([0.0] * 30 + [1.0] * 70, 2000)


def test_neither_a_second_call_nor_the_order_of_the_raw_files_changes_a_file_and_the_clock_times_alone(
    small_told, small
):
    assert small_told.files.keys() == OUTPUTS
    assert small_told.files["times.csv"].decode().splitlines() == [
        "stage,seconds", "sft,40.0", "reward,41.0", "ppo,42.0", "dpo,43.0"
    ]  # fmt: skip
    for kind in ("posts", "yardsticks"):
        path = small.raw / kind / "validation.jsonl"
        write_jsonl(path, read_jsonl(path)[::-1])
    write_metrics(small.runs, clock=2.5)
    report.main(small.args)
    after = files(small.output)
    assert {name for name in OUTPUTS if small_told.files[name] != after[name]} == {"times.csv"}


def test_an_interrupted_report_has_no_table_csv(small_told, small, monkeypatch):
    shutil.copytree(small_told.output, small.output)  # nor that of an earlier one

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(report.Figure, "savefig", interrupt)
    with pytest.raises(KeyboardInterrupt):
        report.main(small.args)
    assert not (small.output / "table.csv").exists()


# ---- what may not be missing ----------------------------------------------------------------------------------------


def change_csv(path: Path, change):
    frame = pandas.read_csv(path, dtype=str, keep_default_na=False)
    changed = change(frame)
    (frame if changed is None else changed).to_csv(path, index=False)


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        ("ppo/nano-s/1/eval/samples_validation.csv", lambda f: f[::-1], "other posts than"),
        ("dpo/nano-s/1/eval/samples_validation.csv", lambda f: f.assign(reference="else"), "p0 with that reference"),
        ("dpo/nano-s/1/eval/samples_validation.csv", lambda f: f.drop(columns="has_eos"), "has_eos"),
        ("reward/nano-s/1/eval/pairs_validation.csv", lambda f: f[:-1], "7 rows, "),
    ],
)
def test_a_table_of_other_data_is_refused(small, path, change, message):
    change_csv(small.runs / path, change)
    with pytest.raises(SystemExit, match=f"^error: .*{small.runs / path}.*{message}"):
        report.main(small.args)
    assert not small.output.exists()
