"""eval/samples.py: each number of its tables again from plain forward passes and by hand, where it puts them, that the
number of processes changes nothing, and one message for bad input."""

import json
import os
import shutil
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import pandas
import pytest
import samples
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from conftest import files, free_port, make_reward_model, make_talker
from datasets import Dataset, DatasetDict, load_from_disk
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import ppo
import reward

SEED, LENGTH, TEMPERATURE = 5, 10, 0.7
COLUMNS = ["id", "query", "response", "reference", "response_tokens", "has_eos", "rouge1", "rouge2", "rougeL"]
SCORED = [*COLUMNS[:6], "score", "reference_score", *COLUMNS[6:]]


def run(checkpoint, **arguments):
    AcceleratorState._reset_state(True)  # accelerate keeps one state a process
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
    flags = {"reward_model_path": str(root / "scorer"), "temperature": TEMPERATURE, "forward_batch_size": 7}
    run(run_folder, **flags, splits=("validation", "none"))
    return SimpleNamespace(root=root, run=run_folder, reward=root / "scorer", flags=flags, before=before)


def test_texts_that_rouge_cannot_read_are_told(made, world, tmp_path, capsys):
    """rouge-score's tokens are Latin letters and digits: two equal texts without any have 0."""
    data = load_from_disk(str(world.dataset))
    texts = [" 我的狗跑了<|endoftext|>", " Собака бежит.<|endoftext|>", " my dog ran<|endoftext|>"]
    rows = [row | {"reference_response": text} for row, text in zip(data["validation"].take(3), texts, strict=True)]
    few = Dataset.from_list(rows, features=data["validation"].features)
    DatasetDict(train=few, validation=few).save_to_disk(tmp_path / "data")
    arguments = {"dataset": str(tmp_path / "data"), "output_dir": str(tmp_path / "out"), "splits": ("validation",)}
    run(made.run, **arguments)
    [told] = [line for line in capsys.readouterr().out.splitlines() if "rouge-score" in line]
    assert told.startswith("validation: 2 of 3 references have no Latin letter or digit")
    assert samples.RougeScorer(["rouge1"]).score(texts[0][:-13], texts[0][:-13])["rouge1"].fmeasure == 0
    run(made.run, **arguments | {"dataset": str(world.dataset), "output_dir": str(tmp_path / "other")})
    assert "rouge-score" not in capsys.readouterr().out


# ---- the numbers ----------------------------------------------------------------------------------------------------


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
        query, response = [x for x in row["query_token"] if x != tokenizer.pad_token_id], []
        key = samples.noise_keys(SEED, 0, [i])
        while len(response) < LENGTH and tokenizer.eos_token_id not in response:
            scaled = policy(torch.tensor([query + response])).logits[0, -1] / TEMPERATURE
            noisy = scaled + ppo.gumbel_noise(key, len(response), len(scaled))[0]
            response.append(noisy[: tokenizer.pad_token_id].argmax().item())  # ids up to [PAD], the last
        ended = response[-1] == tokenizer.eos_token_id
        assert (ours["response_tokens"], ours["has_eos"]) == (len(response), ended)
        assert ours["response"] == tokenizer.decode(response[: len(response) - ended])
        assert ours["query"] == row["query"] and f"{ours['reference']}<|endoftext|>" == row["reference_response"]
        assert ours["score"] == pytest.approx(score(query + response), abs=1e-5)
        reference = tokenizer(row["reference_response"], add_special_tokens=False).input_ids
        assert ours["reference_score"] == pytest.approx(score(query + reference), abs=1e-5)


def test_rouge_takes_words_as_they_are_and_its_means(made, world, monkeypatch):
    """By hand: of 5 and 6 words two are the same, one pair of neighbours is; stems would make it four. Of 3 and 4 words
    two are the same, in another order. And rouge.csv has the means of the columns."""
    tokenizer = samples.load_tokenizer(str(world.model))
    references = [" I feel sad about my laptop<|endoftext|>", " my sister, my sister<|endoftext|>"]
    rows = {"id": ["a", "b"], "query": ["q", "r"], "query_token": [[1, 2]] * 2, "reference_response": references}
    data = Dataset.from_dict(rows | {"reference_response_token": [[3, 0]] * 2}).with_format("torch")
    told = [tokenizer(text).input_ids for text in (" He feels sad, about laptops!", " Sister! My SISTER2<|endoftext|>")]
    width = max(map(len, told))
    told = torch.tensor([ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids in told])
    monkeypatch.setattr(samples, "generate", lambda *_: (told, None))
    monkeypatch.setattr(samples, "KeyValueCache", lambda *_: None)
    AcceleratorState._reset_state(True)
    args = samples.Args("x", seed=1, response_length=9)
    found = samples.sampled(Accelerator(), SimpleNamespace(config=None), None, data, tokenizer, args, "test")
    measures = [[row[key] for key in ("rouge1", "rouge2", "rougeL")] for row in found]
    assert measures[0] == pytest.approx([4 / 11, 2 / 9, 4 / 11])
    assert measures[1] == pytest.approx([4 / 7, 2 / 5, 4 / 7])  # "sister my" is in both
    assert [row["has_eos"] for row in found] == [False, True] and found[1]["response"] == " Sister! My SISTER2"
    assert found[0]["reference"] == " I feel sad about my laptop" and "score" not in found[0]

    rows, [means] = table(made.run, "samples_validation"), table(made.run, "rouge").to_dict("records")
    expected = rows[["response_tokens", "has_eos", *SCORED[6:]]].astype(float).mean().to_dict()
    expected["score_above_reference"] = (rows["score"] > rows["reference_score"]).mean()
    assert (means.pop("split"), means.pop("rows")) == ("validation", 16) and means == pytest.approx(expected)
    assert 0 < means["score_above_reference"] < 1


# ---- of what, and where ---------------------------------------------------------------------------------------------


def test_a_run_gets_its_tables_and_nothing_else_of_it_changes(made, world, tmp_path, monkeypatch, capsys):
    """Without a reward model the samples are the same; the defaults are both splits at temperature 0.01."""
    monkeypatch.chdir(tmp_path)
    assert {name: content for name, content in files(made.run).items() if not name.startswith("eval/")} == made.before
    names = [name for name in files(made.run) if name.startswith("eval/")]
    assert names == ["eval/rouge.csv", "eval/samples_validation.csv"]
    run(made.run, output_dir="new", forward_batch_size=3, temperature=TEMPERATURE)
    assert [*files(tmp_path)] == [f"new/eval/{name}.csv" for name in ("rouge", "samples_test", "samples_validation")]
    plain, scored = table(tmp_path / "new", "samples_validation"), table(made.run, "samples_validation")
    assert list(plain.columns) == COLUMNS and plain.equals(scored[COLUMNS])
    assert len(table(tmp_path / "new", "samples_test")) == 8 and "rougeL" in capsys.readouterr().out
    assert table(tmp_path / "new", "rouge")["split"].tolist() == ["validation", "test"]

    run(made.run, output_dir="cold", splits=("validation",))
    tokens = load_from_disk(str(world.dataset)).with_format("torch")["validation"]["query_token"][:]
    tokenizer = samples.load_tokenizer(str(made.run / "model"))
    keys = samples.noise_keys(SEED, 0, [*range(16)])
    policy = samples.load_policy(str(made.run / "model"), tokenizer)
    cache = samples.KeyValueCache(policy.config, tokens.shape[1] + LENGTH)
    expected, _ = samples.generate(policy, tokens, tokenizer, LENGTH, 0.01, keys, cache)
    cold = table(tmp_path / "cold", "samples_validation")["response"].tolist()
    assert cold == tokenizer.batch_decode(expected, skip_special_tokens=True)


def test_a_checkpoint_that_is_no_run_gets_a_folder_of_its_name(made, world, tmp_path, monkeypatch):
    """A folder, and the Hub, here pretended: with the run's seed, data and length the run's tables; then with what they
    are by default."""
    monkeypatch.chdir(tmp_path)
    asked = []
    shutil.copytree(made.run / "model", "somewhere/my-policy")

    def download(repo_id, revision, **_):
        asked.append((repo_id, revision))
        return "somewhere/my-policy"

    monkeypatch.setattr(ppo, "snapshot_download", download)
    flags = made.flags | {"seed": SEED, "dataset": str(world.dataset), "response_length": LENGTH}
    for path, name in (("me/released@branch_7", "released"), ("somewhere/my-policy/", "my-policy")):
        run(path, **flags, splits=("validation",))
        assert files(tmp_path / f"runs/samples/{name}/5/eval") == files(made.run / "eval")
    assert asked == [("me/released", "branch_7")]
    shutil.rmtree("runs")

    few = DatasetDict({split: rows.select(range(2)) for split, rows in load_from_disk(str(world.dataset)).items()})
    few.save_to_disk("data/tldr/sft")
    run("somewhere/my-policy", temperature=TEMPERATURE)
    other = table(tmp_path / "runs/samples/my-policy/44413", "samples_validation")
    assert len(other) == 2 and other["response_tokens"].max() > LENGTH  # of at most 53
    run(made.run, output_dir="seed_6", seed=6, dataset="data/tldr/sft", response_length=4, temperature=TEMPERATURE)
    third = table(tmp_path / "seed_6", "samples_validation")
    assert len(third) == 2 and third["response_tokens"].max() <= 4
    firsts = {tuple(text[:4] for text in table(path, "samples_validation")["response"][:2])
              for path in (made.run, tmp_path / "runs/samples/my-policy/44413", tmp_path / "seed_6")}  # fmt: skip
    assert len(firsts) == 3


def test_two_processes_write_the_same_tables(made, tmp_path):
    """Of 16 and 8 rows, seven at a time: what one process writes, scores but for the rounding of other batches."""
    children, port = [], free_port()
    for rank in range(2):
        child = os.fork()
        if child == 0:
            try:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
                run(made.run, **made.flags, output_dir=str(tmp_path / "two"))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            finally:
                sys.stderr.flush()
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    run(made.run, **made.flags, output_dir=str(tmp_path / "one"))
    assert [*files(tmp_path / "two")] == [*files(tmp_path / "one")] and len(files(tmp_path / "one")) == 3
    for name in ("rouge", "samples_validation", "samples_test"):
        tables = [table(tmp_path / count, name) for count in ("one", "two")]
        pandas.testing.assert_frame_equal(*tables, rtol=1e-6, atol=1e-6)


def test_bfloat16_weights_but_for_a_rewards_head(made, tmp_path, monkeypatch):
    seen, whole = {}, samples.sampled

    def look(accelerator, policy, reward_model, *rest):
        for model in (policy, reward_model):
            seen.update({name: parameter.dtype for name, parameter in model.named_parameters()})
            assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}  # rotary frequencies
        return whole(accelerator, policy, reward_model, *rest)

    monkeypatch.setattr(samples, "sampled", look)
    run(made.run, **made.flags, mixed_precision="bf16", splits=("test",), output_dir=str(tmp_path))
    heads = {name for name in seen if "score." in name}
    assert len(heads) == 2 and {seen[name] for name in heads} == {torch.float32}
    assert {seen[name] for name in seen.keys() - heads} == {torch.bfloat16}
    assert table(tmp_path, "samples_test")["score"].notna().all()


def test_track_adds_a_table_to_the_runs_own_wandb_run(made, tmp_path, monkeypatch):
    """Offline: the table lies in the folder of W&B's run of that id."""
    copy = tmp_path / "copy"
    shutil.copytree(made.run, copy)
    run(copy, temperature=TEMPERATURE, splits=("test",), track=True)
    [offline] = (copy / "wandb").glob("offline-run-*-abc123")
    [file] = (offline / "files" / "media" / "table" / "samples").glob("test_*.table.json")
    logged = json.loads(file.read_text())
    assert (
        logged["columns"] == COLUMNS
        and [row[2] for row in logged["data"]] == table(copy, "samples_test")["response"].tolist()
    )


# ---- bad input ------------------------------------------------------------------------------------------------------


def test_bad_input(made, world, tmp_path, monkeypatch):
    """One message each, before anything is written or asked of the Hub."""
    monkeypatch.chdir(tmp_path)
    data, own, before = {"dataset": str(world.dataset)}, str(made.run), files(made.root)
    shutil.copytree(made.run / "model", "torn", ignore=shutil.ignore_patterns("*.safetensors"))
    Path("torn/model.safetensors").write_bytes(b"torn")
    shutil.copytree(made.reward, "other")
    tokenizer = samples.load_tokenizer("other")
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained("other")
    Path("unreadable").mkdir()
    Path("unreadable/args.json").write_text("{")
    there = {path.name for path in tmp_path.iterdir()}
    cases = [
        (f"{tmp_path}/nowhere", {}, f"checkpoint {tmp_path}/nowhere: no checkpoint there, neither in"),
        ("runs/ppo/1b/44413", {}, "checkpoint runs/ppo/1b/44413: no checkpoint there. Make it with: "),
        ("nobody/nothing@main", {}, "checkpoint nobody/nothing@main: no checkpoint folder, and not on the Hub"),
        ("torn", data, "the model in torn cannot be read"),
        ("unreadable", {}, "unreadable/args.json cannot be read"),
        (own, {"dataset": "nowhere"}, "--dataset nowhere: no data set with train, validation"),
        (own, {"dataset": str(world.preference_dataset)}, f"--dataset {world.preference_dataset}: no data set with"),
        (own, {"splits": ("tset",)}, f"--splits tset: {world.dataset} has train, validation, test"),
        (own, {"reward_model_path": "other"}, "--reward-model-path other: a reward model of another tokenizer than"),
        (own, {"reward_model_path": own}, f"{own}/model holds no reward model that can be read"),
        (f"{own}/model", data | {"track": True}, f"--track: {own}/model is no run folder that knows its W&B run"),
    ]  # fmt: skip
    for checkpoint, flags, message in cases:
        with pytest.raises(SystemExit) as error:
            run(checkpoint, **flags)
        assert str(error.value).startswith(f"error: {message}") and "\n" not in str(error.value), error.value
        assert {path.name for path in tmp_path.iterdir()} == there and files(made.root) == before
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(samples, "Accelerator", lambda **_: SimpleNamespace(num_processes=1))
    with pytest.raises(SystemExit, match="^error: 3 processes were launched, accelerate sees 1"):
        run(own)
