"""dpo.py's reference log-probabilities: computed once, kept on disk, never mistaken for others."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from datasets import load_from_disk
from transformers import AutoModelForCausalLM

import dpo


@pytest.fixture
def arguments(world, tmp_path) -> dict:
    return {
        "model": "nano",
        "sft_model_path": str(world.model),
        "preference_dataset": str(world.preference_dataset),
        "batch_size": 8,
        "total_episodes": 16,
        "learning_rate": 1e-4,
        "output_dir": str(tmp_path / "runs" / "first"),
    }


def run(arguments: dict, **changes) -> list[dict]:
    """One run; its metrics but for the times."""
    args = dpo.Args(**arguments | changes)
    dpo.main(args)
    with open(f"{args.output_dir}/metrics.jsonl") as file:
        return [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in file]


def test_reference_logprobs_are_those_of_plain_rows_and_are_read_again(arguments, world, tmp_path, monkeypatch):
    first = run(arguments)
    files = sorted((tmp_path / "runs/reference_logprobs").iterdir())
    assert len(files) == 2  # train and validation

    # what is kept, against one plain row at a time; train's rows are those of the run, in their order in the data
    tokenizer = dpo.load_tokenizer(str(world.model))
    pad, model = tokenizer.pad_token_id, AutoModelForCausalLM.from_pretrained(world.model).double().eval()
    data, kept = load_from_disk(str(world.preference_dataset)), [json.loads(file.read_text()) for file in files]
    used = sorted(dpo.data_order(len(data["train"]), 44413, 0, 16).tolist())
    for rows in (data["train"].select(used), data["validation"]):
        expected = []
        for row in rows:
            expected.append([])
            for side in ("chosen", "rejected"):
                tokens = [token for token in row[f"query_{side}_token"] if token != pad]
                with torch.no_grad():
                    logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(1)
                places = [t for t, x in enumerate(row[f"query_{side}_token_response_label"]) if x != pad]
                expected[-1].append(sum(logprobs[t - 1, tokens[t]].item() for t in places))
        found = [table for table in kept if len(table) == len(expected)]
        assert len(found) == 1 and torch.allclose(torch.tensor(found[0]), torch.tensor(expected), rtol=1e-5)

    # another run reads them: the reference is never loaded, and the numbers are the same to the last bit
    loaded, original = [], dpo.load_policy
    monkeypatch.setattr(dpo, "load_policy", lambda *args: loaded.append(args) or original(*args))
    assert run(arguments, output_dir=str(tmp_path / "runs" / "second")) == first and len(loaded) == 1
    run(arguments, output_dir=str(tmp_path / "runs" / "beta"), beta=0.5, reference_cache=None)
    assert len(loaded) == 2 and sorted((tmp_path / "runs/reference_logprobs").iterdir()) == files

    # what is kept is what is used
    shifted = [[[chosen + 1, rejected - 1] for chosen, rejected in table] for table in kept]
    for file, table in zip(files, shifted, strict=True):
        file.write_text(json.dumps(table))
    assert run(arguments, output_dir=str(tmp_path / "runs" / "third"))[1]["rewards/margin"] == pytest.approx(
        first[1]["rewards/margin"] - 2 * 0.05, abs=1e-5
    )


def test_other_weights_or_rows_have_other_keys(arguments, world, tmp_path):
    run(arguments)
    cache = tmp_path / "runs/reference_logprobs"
    run(arguments, output_dir=str(tmp_path / "runs" / "seed"), seed=1)  # other pairs of train, the same validation
    assert len(list(cache.iterdir())) == 3
    model = AutoModelForCausalLM.from_pretrained(world.model)
    shutil.copytree(world.model, tmp_path / "other")
    with torch.no_grad():
        model.get_output_embeddings().weight[5, 5] += 1e-3
    model.save_pretrained(tmp_path / "other")
    run(arguments, output_dir=str(tmp_path / "runs" / "weights"), sft_model_path=str(tmp_path / "other"))
    assert len(list(cache.iterdir())) == 5


def test_another_precision_or_another_text_of_the_script_has_another_key(world, tmp_path, monkeypatch):
    rows = load_from_disk(str(world.preference_dataset))["validation"].with_format("torch")

    def key(device: str = "cpu", precision: str = "no", zero: int | None = None) -> str:
        kind = DistributedType.DEEPSPEED if zero else DistributedType.NO
        state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=zero))
        settings = {"device": torch.device(device), "mixed_precision": precision, "state": state}
        return dpo.reference_key(SimpleNamespace(distributed_type=kind, **settings), str(world.model), rows)

    keys = [key(), key("cuda"), key(precision="bf16"), key(precision="bf16", zero=2)]
    assert key() == keys[0] and key(precision="bf16", zero=3) == keys[3]
    (tmp_path / "dpo.py").write_text("another")
    monkeypatch.setattr(dpo, "__file__", str(tmp_path / "dpo.py"))
    assert len({*keys, key()}) == 5


def test_a_difference_of_rounding_is_no_hit(arguments, tmp_path):
    """Before the first step both rewards are 0 but for rounding: margins of 5e-6 count as none, of 5e-5 do."""
    for shift, accuracy in ((1e-4, 0.0), (1e-3, 1.0)):
        run(arguments, output_dir=str(tmp_path / "runs" / f"kept{shift}"))
        for file in (tmp_path / "runs/reference_logprobs").iterdir():
            file.write_text(
                json.dumps([[chosen - shift, rejected] for chosen, rejected in json.loads(file.read_text())])
            )
        lines = run(arguments, output_dir=str(tmp_path / "runs" / f"shifted{shift}"))
        assert lines[1]["accuracy/train"] == accuracy
        shutil.rmtree(tmp_path / "runs/reference_logprobs")


def test_a_damaged_cache_is_named(arguments, tmp_path):
    run(arguments)
    for file in (tmp_path / "runs/reference_logprobs").iterdir():
        file.write_text(file.read_text()[:20])
    with pytest.raises(SystemExit, match=r"reference_logprobs/\w+.json \(delete it: .* cannot be read"):
        run(arguments, output_dir=str(tmp_path / "runs" / "second"))
