"""eval/samples.py: the numbers of its tables against plain forward passes and hand-made cases, its folders, one process
against two, and bad input."""

import json
import os
import shutil
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pandas
import pytest
import samples
import torch
from accelerate import Accelerator
from conftest import edit_config, files, free_port, give_other_eos, make_reward_model, make_talker, sample_by_hand
from datasets import Dataset, load_from_disk
from kill_runs import finish, start
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import dpo
import reward

SEED, LENGTH, TEMPERATURE = 5, 10, 0.7
COLUMNS = ["id", "query", "response", "reference", "response_tokens", "has_eos", "rouge1", "rouge2", "rougeL"]
COLUMNS += ["query_token", "response_token", "reference_token"]
SCORED = [*COLUMNS[:6], "score", "reference_score", *COLUMNS[6:]]


def run(checkpoint, **arguments):
    samples.main(samples.Args(str(checkpoint), **arguments))


def table(folder: Path, name: str) -> pandas.DataFrame:
    return pandas.read_csv(folder / "eval" / f"{name}.csv", keep_default_na=False)


@pytest.fixture(scope="module")
def made(world, tmp_path_factory) -> SimpleNamespace:
    """.run, the folder of a run whose policy ends some responses early, with the tables of its validation split, warm
    and scored by .reward, a checkpoint folder; .flags, of that evaluation; .before, the files of .run without it."""
    root = tmp_path_factory.mktemp("samples")
    run_folder = root / "runs" / "ppo" / "nano" / str(SEED)
    make_talker(world, run_folder / "model", eos=0.05)
    tokenizer = reward.load_tokenizer(str(world.model))
    policy = AutoModelForCausalLM.from_pretrained(run_folder / "model", dtype=torch.float32)
    with torch.no_grad():  # [PAD] and the ids beyond the tokenizer would win if they were let
        policy.get_output_embeddings().weight[tokenizer.pad_token_id :] += 0.5
    policy.save_pretrained(run_folder / "model")
    torch.manual_seed(1)
    make_reward_model(world.model, root / "scorer", bias=0.25)
    about = {"stage": "ppo", "seed": SEED, "dataset": str(world.dataset), "response_length": LENGTH}
    (run_folder / "args.json").write_text(json.dumps(about | {"wandb_id": "abc123"}))
    before = files(run_folder)
    flags = {"reward_model_path": str(root / "scorer"), "temperature": TEMPERATURE, "batch_size": 7}
    run(run_folder, **flags, splits=("validation", "none"))
    return SimpleNamespace(root=root, run=run_folder, reward=root / "scorer", flags=flags, before=before)


@torch.no_grad()
def test_samples_and_scores_are_those_of_plain_forward_passes(made, world):
    """One row at a time, without padding, cache or our sampler; the noise alone is the script's."""
    tokenizer = samples.load_tokenizer(str(made.run / "model"))
    policy = AutoModelForCausalLM.from_pretrained(made.run / "model").eval()
    scorer = AutoModelForSequenceClassification.from_pretrained(made.reward).eval()  # without the head's bias

    def score(ids: list[int]) -> float:
        return scorer(torch.tensor([ids])).logits.item() + 0.25

    data, found = load_from_disk(str(world.dataset))["validation"], table(made.run, "samples_validation")
    assert list(found.columns) == SCORED and found["id"].tolist() == data["id"]
    assert found["has_eos"].nunique() == 2 and found["response"].nunique() == len(found)
    for i, (row, ours) in enumerate(zip(data, found.to_dict("records"), strict=True)):
        query = [x for x in row["query_token"] if x != tokenizer.pad_token_id]
        key = samples.noise_keys(SEED, 0, [i], LENGTH)[0]
        response = sample_by_hand(policy, query, tokenizer, key, LENGTH, TEMPERATURE)
        ended = response[-1] == tokenizer.eos_token_id
        assert (ours["response_tokens"], ours["has_eos"]) == (len(response), ended)
        assert ours["response"] == tokenizer.decode(response[: len(response) - ended])
        assert [json.loads(ours[name]) for name in COLUMNS[9:11]] == [query, response]
        assert ours["query"] == row["query"] and f"{ours['reference']}<|endoftext|>" == row["reference_response"]
        assert ours["score"] == pytest.approx(score(query + response), abs=1e-5)
        reference = tokenizer(row["reference_response"], add_special_tokens=False).input_ids
        assert json.loads(ours["reference_token"]) == reference
        assert ours["reference_score"] == pytest.approx(score(query + reference), abs=1e-5)


@torch.no_grad()
def test_kl_is_that_of_plain_forward_passes(made, world, tmp_path):
    """Each row by itself, without padding, in float64, at the sampling temperature; 0 to the policy itself."""
    tokenizer = samples.load_tokenizer(str(made.run / "model"))
    reference = make_talker(world, tmp_path / "reference", eos=0.2)
    flags = {"temperature": TEMPERATURE, "batch_size": 7, "splits": ("validation",), "output_dir": str(tmp_path)}
    run(made.run, **flags, reference=str(reference))
    found = table(tmp_path, "samples_validation")
    assert found[COLUMNS].equals(table(made.run, "samples_validation")[COLUMNS])  # the samples are the same
    models = [AutoModelForCausalLM.from_pretrained(x).double().eval() for x in (made.run / "model", reference)]
    for row in found.to_dict("records"):
        query, response = (json.loads(row[f"{name}_token"]) for name in ("query", "response"))
        sums = []
        for model in models:
            logits = model(torch.tensor([query + response])).logits[0, len(query) - 1 : -1]
            logits[:, len(tokenizer) :] = logits[:, tokenizer.pad_token_id] = -torch.inf  # are never drawn
            sums.append((logits / TEMPERATURE).log_softmax(1).gather(1, torch.tensor(response)[:, None]).sum().item())
        assert row["kl"] == pytest.approx(sums[0] - sums[1], abs=1e-4)
    assert found["has_eos"].nunique() == 2 and found["kl"].abs().min() > 1e-3
    [means] = table(tmp_path, "rouge").to_dict("records")
    assert means["kl"] == pytest.approx(found["kl"].mean())
    run(made.run, **flags, reference=str(made.run))
    assert table(tmp_path, "samples_validation")["kl"].eq(0).all()


def test_rouge_takes_words_as_they_are_and_its_means(made, world, monkeypatch):
    """By hand: of 5 and 6 words two are the same, one pair of neighbours is; stems would make it four. Of 3 and 4 words
    two are the same, in another order. And rouge.csv has the means of the columns."""
    tokenizer = samples.load_tokenizer(str(world.model))
    references = [" I feel sad about my laptop<|endoftext|>", " my sister, my sister<|endoftext|>"]
    rows = {"id": ["a", "b"], "query": ["q", "r"], "query_token": [[1, 2]] * 2, "reference_response": references}
    data = Dataset.from_dict(rows | {"reference_response_token": [[3, 0]] * 2}).with_format("torch")
    responses = [" He feels sad, about laptops!", " Sister! My SISTER2<|endoftext|>"]
    tokens = tokenizer(responses, padding=True, padding_side="right", return_tensors="pt").input_ids
    monkeypatch.setattr(samples, "generate", lambda *_: (tokens, None))
    args = samples.Args("x", seed=1, response_length=9)
    found = samples.sampled(Accelerator(), SimpleNamespace(config=None), None, None, data, tokenizer, args, "test")
    measures = [[row[key] for key in ("rouge1", "rouge2", "rougeL")] for row in found]
    assert measures[0] == pytest.approx([4 / 11, 2 / 9, 4 / 11])
    assert measures[1] == pytest.approx([4 / 7, 2 / 5, 4 / 7])  # "sister my" is in both
    assert [row["has_eos"] for row in found] == [False, True] and found[1]["response"] == " Sister! My SISTER2"
    assert found[0]["reference"] == " I feel sad about my laptop" and "score" not in found[0]

    rows, [means] = table(made.run, "samples_validation"), table(made.run, "rouge").to_dict("records")
    expected = rows[["response_tokens", "has_eos", *SCORED[6:11]]].astype(float).mean().to_dict()
    expected["score_above_reference"] = (rows["score"] > rows["reference_score"]).mean()
    assert (means.pop("split"), means.pop("rows")) == ("validation", 16) and means == pytest.approx(expected)
    assert 0 < means["score_above_reference"] < 1
    tied = [{"score": score, "reference_score": 0.3} for score in (0.1 + 0.2, 0.4, 0.2, 0.2)]
    assert samples.sample_summary("test", tied)["score_above_reference"] == 1.5 / 4


def test_a_run_gets_its_tables_and_nothing_else_of_it_changes(made, tmp_path):
    """Without a reward model the samples are the same; both splits at temperature 0.01 are the default."""
    assert samples.Args("x").temperature == 0.01
    assert {name: content for name, content in files(made.run).items() if not name.startswith("eval/")} == made.before
    run(made.run, output_dir=str(tmp_path), batch_size=3, temperature=TEMPERATURE)
    assert [*files(tmp_path)] == [f"eval/{name}.csv" for name in ("rouge", "samples_test", "samples_validation")]
    plain, scored = table(tmp_path, "samples_validation"), table(made.run, "samples_validation")
    assert list(plain.columns) == COLUMNS and plain.equals(scored[COLUMNS])
    assert len(table(tmp_path, "samples_test")) == 8
    Path(tmp_path, "eval/samples_mine.csv").write_text("")
    run(made.run, output_dir=str(tmp_path), splits=("validation",))  # its rouge.csv has no row of the test split
    assert [*files(tmp_path)] == [f"eval/{name}.csv" for name in ("rouge", "samples_mine", "samples_validation")]


def test_a_checkpoint_that_is_no_run_gets_a_folder_of_its_name(made, world, tmp_path, monkeypatch):
    """With the run's seed, data and length it gets the run's tables."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made.run / "model", "somewhere/my-policy")
    flags = made.flags | {"seed": SEED, "dataset": str(world.dataset), "response_length": LENGTH}
    run("somewhere/my-policy/", **flags, splits=("validation",))
    assert files(tmp_path / "runs/samples/my-policy/5/eval") == files(made.run / "eval")


def test_a_folder_in_a_run_is_the_run_and_each_revision_has_a_folder(made, tmp_path, monkeypatch):
    """A Hub id that is not there is asked for before its folder is made: the name alone is looked at."""
    shutil.copytree(made.run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/eval")
    run(tmp_path / "run/model", **made.flags, splits=("validation",))  # with the run's seed, data and length
    assert files(tmp_path / "run/eval") == files(made.run / "eval")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(samples, "local_checkpoint", lambda *_: pytest.fail("the folder's name is known by now"))
    names = []
    for checkpoint in ("me/policy", "me/policy@one", "me/policy@refs/pr/2"):
        args = samples.Args(checkpoint, dataset="x", seed=3)
        with pytest.raises(pytest.fail.Exception):
            samples.main(args)
        names.append(args.output_dir)
    assert names == [f"runs/samples/policy{x}/3" for x in ("", "@one", "@refs-pr-2")]


def test_no_older_means_stay_beside_the_samples_of_a_stopped_call(made, tmp_path, monkeypatch):
    shutil.copytree(made.run / "eval", tmp_path / "eval")
    shutil.copy(tmp_path / "eval/samples_validation.csv", tmp_path / "eval/samples_test.csv")
    monkeypatch.setattr(samples, "sampled", lambda *_: pytest.fail("stopped"))
    with pytest.raises(pytest.fail.Exception):
        run(made.run, output_dir=str(tmp_path), splits=("validation",))
    assert [*files(tmp_path)] == ["eval/samples_validation.csv"]


def test_two_processes_write_the_same_tables(made, tmp_path):
    """Scores differ by the rounding of other batches."""
    launch = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    launch["ACCELERATE_USE_CPU"] = "true"

    def main(args, rank: str):
        os.environ.update(launch | {"RANK": rank, "LOCAL_RANK": rank})
        samples.main(args)

    args = samples.Args(str(made.run), **made.flags, output_dir=str(tmp_path / "two"), splits=("validation", "none"))
    children = [start("samples", args, partial(main, rank=rank)) for rank in "01"]
    assert [finish(child) for child in children] == [0, 0]
    for name in ("rouge", "samples_validation"):
        pandas.testing.assert_frame_equal(table(tmp_path / "two", name), table(made.run, name), rtol=1e-6, atol=1e-6)


def test_a_run_on_pairs_has_the_posts_of_its_sft_run(tmp_path, monkeypatch):
    """Its args.json names no posts, and names the SFT model by its run folder or by the model/ in it."""
    monkeypatch.chdir(tmp_path)
    about = asdict(dpo.Args(model="n", seed=SEED))
    assert "dataset" not in about
    Path("runs/sft/model").mkdir(parents=True)
    Path("runs/sft/args.json").write_text(json.dumps({"dataset": "posts"}))
    for path in ("runs/sft", "runs/sft/model"):
        assert samples.dataset_of("runs/pairs", about | {"sft_model_path": path}) == "posts"
    Path("runs/sft/args.json").unlink()
    Path("data/tldr/sft").mkdir(parents=True)  # which the run may never have seen
    with pytest.raises(SystemExit, match="^error: runs/pairs/args.json names no SFT data, .* with --dataset$"):
        samples.dataset_of("runs/pairs", about | {"sft_model_path": "runs/sft"})
    assert samples.dataset_of("runs/pairs", {}) == "data/tldr/sft"


def test_bad_input_is_one_message(made, world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for source, folder in ((made.run / "model", "policy"), (made.reward, "reward")):
        edit_config(Path(shutil.copytree(source, folder)), max_position_embeddings=64)
    give_other_eos(shutil.copytree(made.run / "model", "ends otherwise"))
    monkeypatch.setattr(samples, "last_rewards", lambda _, tokens, pad_id: torch.full((len(tokens),), torch.nan))
    for checkpoint, flags, named in (
        (made.run, {"splits": ("tset",)}, "--splits tset"),
        (made.run, {"reward_model_path": str(made.reward)}, f"validation, row 0, id .*: .* {made.reward} gives"),
        ("policy", {"dataset": str(world.dataset), "track": True}, "--track"),
        (made.run, {"reward_model_path": "ends otherwise"}, "--reward-model-path ends otherwise: .* tokenizer or EOS"),
        (made.run, {"reference": "ends otherwise"}, "--reference ends otherwise: .* tokenizer or EOS"),
        (made.run, {"temperature": -0.7}, "--temperature -0.7: at least 0"),
        (made.run, {"batch_size": 0}, "--batch-size 0: at least 1"),
        ("policy", {"dataset": str(world.dataset)}, "policy: .* has 64 positions, but rows need 565"),
        (made.run, {"reward_model_path": "reward"}, "reward: .* has 64 positions, but rows need 565"),
    ):
        with pytest.raises(SystemExit, match=f"^error: {named}"):
            run(checkpoint, **flags, output_dir=str(tmp_path / "out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ends otherwise", "policy", "reward"]
