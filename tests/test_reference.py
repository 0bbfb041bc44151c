"""dpo.py beside the reference: the evaluation of another policy, and differences of rounding."""

import json

import pandas
import pytest
import torch
from conftest import make_talker
from datasets import load_from_disk
from transformers import AutoModelForCausalLM

import dpo


def arguments(world, tmp_path, **changes) -> dpo.Args:
    common = {"model": "nano", "sft_model_path": str(world.model), "output_dir": str(tmp_path / "run")}
    common |= {"preference_dataset": str(world.preference_dataset), "batch_size": 8, "total_episodes": 8}
    return dpo.Args(**common | changes)


@torch.no_grad()
def plain_logprobs(model, data, pad: int) -> torch.Tensor:
    """(n, 2) by one unpadded row at a time, in double precision."""
    found = []
    for row in data.with_format(None):
        for side in ("chosen", "rejected"):
            tokens = [token for token in row[f"query_{side}_token"] if token != pad]
            logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(1)
            places = [t for t, x in enumerate(row[f"query_{side}_token_response_label"]) if x != pad]
            found.append(sum(logprobs[t - 1, tokens[t]].item() for t in places))
    return torch.tensor(found).reshape(-1, 2)


def test_another_policy_is_evaluated_as_it_is(world, tmp_path):
    """--policy-path and no episodes: implicit rewards against the reference, no update, the policy as it was."""
    policy = make_talker(world, tmp_path / "talker", eos=0.1)
    changes = {"policy_path": str(policy), "total_episodes": 0, "run_eval": True, "beta": 0.2}
    dpo.main(arguments(world, tmp_path, **changes))
    assert [json.loads(x)["update"] for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()] == [0]
    pad, data = dpo.load_tokenizer(str(world.model)).pad_token_id, load_from_disk(str(world.preference_dataset))
    one, other = (AutoModelForCausalLM.from_pretrained(path).double().eval() for path in (policy, world.model))
    for split in ("validation", "validation_cnndm"):
        data[split] = data[split].select(range(5))
        expected = 0.2 * (plain_logprobs(one, data[split], pad) - plain_logprobs(other, data[split], pad))
        table = pandas.read_csv(tmp_path / f"run/eval/pairs_{split}.csv")[["chosen_reward", "rejected_reward"]]
        torch.testing.assert_close(torch.tensor(table.to_numpy())[:5].float(), expected, rtol=1e-4, atol=1e-4)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model").state_dict()
    assert all(torch.equal(saved[key].double(), value) for key, value in one.state_dict().items())


@pytest.mark.parametrize(("shift", "accuracy"), [(1e-4, 0.0), (1e-2, 1.0)])
def test_a_difference_of_rounding_is_no_hit(world, tmp_path, monkeypatch, shift, accuracy):
    """Before the first step both rewards are 0 but for rounding. Of sums of some hundred nats, 1e-4 counts as that."""
    original = dpo.split_logprobs
    monkeypatch.setattr(dpo, "split_logprobs", lambda *args: original(*args) - torch.tensor([shift, 0.0]))
    dpo.main(arguments(world, tmp_path))
    line = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[1])
    assert line["accuracy/train"] == accuracy
    assert line["rewards/margin"] == pytest.approx(0.05 * shift, abs=2e-6)
