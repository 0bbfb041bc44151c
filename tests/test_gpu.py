"""What PPO has to show on a GPU: ratios before a first step, micro-batches, kill and resume, and the CPU's tokens."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, make_reward_model, read_metrics
from safetensors.torch import load_file

import ppo

pytestmark = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def run(world, tmp_path_factory):
    """Starts ppo.py in a process of its own for four updates of 16 episodes, in a folder of this name."""
    root = tmp_path_factory.mktemp("gpu")
    reward = make_reward_model(world.model, root / "reward")

    def start(name: str, *flags) -> tuple[Path, subprocess.Popen]:
        command = [sys.executable, "ppo.py", "--model", "nano-xs", "--output-dir", root / name, "--save-every", 1]
        command += ["--sft-model-path", world.model, "--reward-model-path", reward, "--dataset", world.dataset]
        command += ["--batch-size", 16, "--total-episodes", 64, "--learning-rate", 1e-3, "--eval-rows", 8, *flags]
        return root / name, subprocess.Popen(list(map(str, command)), cwd=ROOT)

    return start


def metrics_of(folder: Path, child: subprocess.Popen) -> list[dict]:
    assert child.wait() == 0
    return read_metrics(folder)


def test_in_bfloat16_the_first_ratio_is_1_and_the_first_kl_is_0(run):
    lines = metrics_of(*run("bf16", "--mixed-precision", "bf16", "--micro-batch-size", 4))
    assert max(line["policy/first_ratio_deviation"] for line in lines) == 0
    assert lines[0]["objective/kl"] == 0


def test_micro_batches_change_rounding_alone(run):
    flags = ["--mixed-precision", "no", "--micro-batch-size"]
    lines = metrics_of(*run("four", *flags, 4))
    others = metrics_of(*run("eight", *flags, 8, "--sample-batch-size", 5))
    assert max(line["policy/first_ratio_deviation"] for line in lines) == 0
    for key in ("objective/score", "objective/kl", "loss/value", "grad_norm", "objective/entropy"):
        assert [x[key] for x in lines] == pytest.approx([x[key] for x in others], rel=1e-3, abs=1e-6), key


def test_a_killed_run_ends_with_the_same_weights(run):
    """Bit for bit on a CPU; on a GPU, within the rounding of sums whose order may change."""
    flags = ["--mixed-precision", "no", "--micro-batch-size", 4]
    whole, child = run("whole", *flags)
    metrics_of(whole, child)
    killed, child = run("killed", *flags)
    while not list(killed.glob("checkpoints/update_??????")):
        assert child.poll() is None
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL and not (killed / "model").exists()
    metrics_of(*run("killed", *flags, "--resume"))
    weights, resumed = (load_file(folder / "model" / "model.safetensors") for folder in (whole, killed))
    for name in weights:
        torch.testing.assert_close(resumed[name], weights[name], rtol=0, atol=0 if DEVICE == "cpu" else 1e-6)


def test_tokens_sampled_in_float32_are_the_cpus(world):
    tokenizer = ppo.load_tokenizer(str(world.model))
    model = ppo.load_policy(str(world.model), tokenizer).eval()
    generator = torch.Generator().manual_seed(1)
    queries = torch.randint(1, tokenizer.pad_token_id, (64, 96), generator=generator)
    lengths = torch.linspace(24, 96, 64).long()
    queries[torch.arange(96) < 96 - lengths[:, None]] = tokenizer.pad_token_id
    keys = ppo.noise_keys(1, 1, range(64), 53)
    sampled = []
    for device in ("cpu", DEVICE):
        model.to(device)
        tokens, _ = ppo.generate(model, queries.to(device), tokenizer, 53, 0.7, keys.to(device))
        sampled.append(tokens.cpu())
    assert (sampled[0] != sampled[1]).any(1).sum() <= 1  # a tie of two tokens may fall either way
