"""dpo.py beside the reference: differences of rounding."""

import json

import pytest
import torch
from accelerate.state import AcceleratorState

import dpo


def arguments(world, tmp_path, **changes) -> dpo.Args:
    common = {"model": "nano", "sft_model_path": str(world.model), "output_dir": str(tmp_path / "run")}
    common |= {"preference_dataset": str(world.preference_dataset), "batch_size": 8, "total_episodes": 8}
    return dpo.Args(**common | changes)


@pytest.mark.parametrize(("shift", "accuracy"), [(1e-4, 0.0), (1e-2, 1.0)])
def test_a_difference_of_rounding_is_no_hit(world, tmp_path, monkeypatch, shift, accuracy):
    """Before the first step both rewards are 0 but for rounding. Of sums of some hundred nats, 1e-4 counts as that."""
    AcceleratorState._reset_state(True)  # accelerate keeps one state a process
    original = dpo.split_logprobs
    monkeypatch.setattr(dpo, "split_logprobs", lambda *args: original(*args) - torch.tensor([shift, 0.0]))
    dpo.main(arguments(world, tmp_path))
    line = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[1])
    assert line["accuracy/train"] == accuracy
    assert line["rewards/margin"] == pytest.approx(0.05 * shift, abs=2e-6)
