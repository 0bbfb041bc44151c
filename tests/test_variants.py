"""The variants: each detail against plain Python or by enumeration of a small world, and each run on two processes, or
killed, as if nothing had happened (behind -m long)."""

import itertools
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from conftest import close, free_port, make_reward_model, make_talker, read_metrics, record, script
from test_sizes import diff_lines, without_docstring

rloo = script("variants/rloo.py")
ROOT = Path(__file__).resolve().parents[1]
LINES = {"rloo": ("ppo.py", 180)}
SEED, BATCH, K = 3, 24, 4


@pytest.mark.parametrize("name", LINES)
def test_a_variant_is_a_short_diff(name, tmp_path):
    parent, limit = LINES[name]
    paths = [tmp_path / "parent.py", tmp_path / "variant.py"]
    for path, source in zip(paths, (parent, f"variants/{name}.py"), strict=True):
        path.write_text(without_docstring((ROOT / source).read_text()))
    assert 0 < diff_lines(*map(str, paths)) <= limit


# ---- the leave-one-out baseline -----------------------------------------------------------------------------------


def test_an_advantage_is_the_return_minus_the_mean_of_the_others():
    generator = torch.Generator().manual_seed(1)
    for k in (2, 3, 5, 8):
        returns = torch.randn(4 * k, generator=generator) * 3 + 1
        found = rloo.leave_one_out(returns, k)
        groups = [returns.tolist()[i : i + k] for i in range(0, 4 * k, k)]
        expected = [x - statistics.fmean(g[:i] + g[i + 1 :]) for g in groups for i, x in enumerate(g)]
        assert close(found, expected, 1e-6) and found.dtype == torch.float32
        assert all(abs(group.double().sum()) < 1e-5 for group in found.split(k))
        order = [2, 0, 3, 1]  # of the prompts
        rows = [k * i + j for i in order for j in range(k)]
        assert torch.equal(rloo.leave_one_out(returns[rows], k), found[rows])
        for value in (0.1, -0.7, 3.3):
            assert torch.equal(rloo.leave_one_out(torch.full((2 * k,), value), k), torch.zeros(2 * k))


# ---- the gradient, over all sequences of a small world ---------------------------------------------------------------

END = 2  # of tokens 0, 1 and EOS, two at most
SEQUENCES = [(END,), *((x, y) for x in (0, 1) for y in (0, 1, END))]
SCORES = {y: 0.3 * i - 0.5 for i, y in enumerate(SEQUENCES)}


def log_probability(logits: torch.Tensor, sequence: tuple) -> torch.Tensor:
    """Of logits (3, 3): of the first token, and of the second after 0 and after 1."""
    total = logits[0].log_softmax(0)[sequence[0]]
    return total + logits[1 + sequence[0]].log_softmax(0)[sequence[1]] if len(sequence) == 2 else total


def tokens_of(logits: torch.Tensor, sequence: tuple) -> torch.Tensor:
    """Log-probabilities (2,) of its tokens; one past EOS is whatever it is."""
    first = logits[0].log_softmax(0)[sequence[0]]
    second = logits[1 + sequence[0]].log_softmax(0)[sequence[1]] if len(sequence) == 2 else torch.tensor(-1e9)
    return torch.stack([first, second.to(first)])


@pytest.mark.parametrize(("on_policy", "old_is_new"), [(True, True), (False, True)])
def test_the_gradient_is_that_of_the_expected_return(on_policy, old_is_new):
    """Summed over all pairs of responses by their probability: minus the gradient of E[score] - beta KL(pi || ref),
    exactly; of the ratio as of REINFORCE before the first step."""
    beta, generator = 0.3, torch.Generator().manual_seed(2)
    logits, reference = (torch.randn(3, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    expected = sum(
        log_probability(logits, y).exp()
        * (SCORES[y] - beta * (log_probability(logits, y) - log_probability(reference, y)))
        for y in SEQUENCES
    )
    [exact] = torch.autograd.grad(expected, logits)
    total = torch.zeros(3, 3, dtype=torch.float64)
    for pair in itertools.product(SEQUENCES, repeat=2):
        logprobs = torch.stack([tokens_of(logits, y) for y in pair])
        mask = torch.tensor([[True, len(y) == 2] for y in pair])
        ref_logprobs = torch.stack([tokens_of(reference, y) for y in pair]).masked_fill(~mask, 0.0)
        old = logprobs.detach().masked_fill(~mask, 0.0)
        returns = torch.tensor([SCORES[y] for y in pair]) - beta * (old - ref_logprobs).sum(1)
        mb = {"logprobs": old, "response_mask": mask, "advantages": rloo.leave_one_out(returns, 2)}
        loss, sums = rloo.rloo_loss(logprobs, mb, 0.2, on_policy)
        assert sums["policy/clip_fraction"] == 0 and sums["policy/ratio"] == 2
        [gradient] = torch.autograd.grad(loss / 2, logits)
        probability = math.exp(sum(log_probability(logits, y).item() for y in pair))
        total += probability * gradient
    assert exact.abs().max() > 0.05 and torch.allclose(total, -exact, atol=1e-9)


def test_the_ratio_is_the_responses_and_clipped():
    logprobs = torch.tensor([[-1.0, -2.0, -5.0], [-1.0, -1.0, -1.0]], requires_grad=True)
    old = torch.tensor([[-1.1, -2.1, 0.0], [-0.7, -0.9, -0.9]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    for advantages in ([2.0, -1.0], [-2.0, 1.0]):  # both clipped, none
        mb = {"logprobs": old, "response_mask": mask, "advantages": torch.tensor(advantages)}
        loss, sums = rloo.rloo_loss(logprobs, mb, 0.2, False)
        ratios = [math.exp(0.2), math.exp(-0.5)]
        limited = [1.2, 0.8]
        expected = sum(max(-a * r, -a * c) for a, r, c in zip(advantages, ratios, limited, strict=True))
        assert close(loss.detach(), expected, 1e-5)
        clipped = sum(-a * c > -a * r for a, r, c in zip(advantages, ratios, limited, strict=True))
        assert sums["policy/clip_fraction"] == clipped
        [gradient] = torch.autograd.grad(loss, logprobs)
        for row, (a, r) in enumerate(zip(advantages, ratios, strict=True)):
            moves = -a * r >= -a * limited[row]
            assert close(gradient[row], [-a * r * moves * m for m in mask[row].tolist()], 1e-5)


# ---- a run --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def start(world, tmp_path_factory) -> SimpleNamespace:
    root = tmp_path_factory.mktemp("variants")
    policy = make_talker(world, root / "policy", eos=0.1)
    paths = {"sft_model_path": str(policy), "reward_model_path": str(make_reward_model(policy, root / "reward"))}
    paths |= {"dataset": str(world.dataset), "model": "nano", "seed": SEED}
    sizes = {"batch_size": BATCH, "total_episodes": 3 * BATCH, "micro_batch_size": 5, "response_length": 6}
    return SimpleNamespace(args=paths | sizes | {"eval_rows": 3, "learning_rate": 1e-3, "sample_every": 0}, root=root)


def run(start, folder: Path, **changes) -> list[dict]:
    AcceleratorState._reset_state(True)
    rloo.main(rloo.Args(**start.args | changes, output_dir=str(folder)))
    return read_metrics(folder)


def test_a_run_has_its_groups_together(start, tmp_path, monkeypatch):
    """K responses to a prompt follow each other, the penalty comes before the baseline, the KL is in the return."""
    passes, losses = record(monkeypatch, rloo, "both_policies"), record(monkeypatch, rloo, "rloo_loss")
    lines = run(start, tmp_path / "run", samples_per_prompt=K)
    assert [line["policy/first_ratio_deviation"] for line in lines] == [0, 0, 0]
    assert lines[0]["objective/kl"] == 0 and lines[2]["objective/kl"] > 1e-3
    assert all(line["policy/clip_fraction"] == 0 for line in lines) and lines[-1]["episode"] == 3 * BATCH
    eos = rloo.load_tokenizer(start.args["sft_model_path"]).eos_token_id
    for update, call in enumerate(passes):
        batch, outputs = call.args[3], call.result
        rows = [tuple(row) for row in batch["queries"].tolist()]
        prompts = [rows[i] for i in range(0, BATCH, K)]
        assert rows == [prompt for prompt in prompts for _ in range(K)] and len(set(prompts)) == BATCH // K
        scores = []
        for score, response in zip(batch["raw_scores"].tolist(), batch["responses"].tolist(), strict=True):
            scores.append(score if eos in response else -1.0)
        assert update or 0 < scores.count(-1.0) < BATCH
        kl = (outputs["logprobs"] - outputs["ref_logprobs"]).double().sum(1).tolist()
        returns = [score - 0.05 * x for score, x in zip(scores, kl, strict=True)]
        given = {}
        for other in losses:
            for row, advantage in zip(
                other.args[1]["rows"].tolist(), other.args[1]["advantages"].tolist(), strict=True
            ):
                given.setdefault(row, []).append(advantage)
        for i in range(BATCH):
            group = returns[i // K * K : i // K * K + K]
            others = [x for j, x in enumerate(group) if j != i % K]
            assert close(given[i][update], group[i % K] - statistics.fmean(others), 1e-5)
        assert math.isclose(lines[update]["objective/rlhf_reward"], statistics.fmean(returns), abs_tol=1e-5)
        spread = statistics.fmean(statistics.stdev(returns[i : i + K]) for i in range(0, BATCH, K))
        assert math.isclose(lines[update]["objective/group_sd"], spread, rel_tol=1e-4)


def test_more_than_one_step_takes_the_ratio(start, tmp_path):
    lines = run(start, tmp_path / "run", samples_per_prompt=2, num_ppo_epochs=2, num_mini_batches=2)
    assert [line["policy/first_ratio_deviation"] for line in lines] == [0, 0, 0]
    assert all(line["policy/ratio_variance"] > 1e-6 for line in lines)


@pytest.mark.parametrize(("samples", "batch"), [(1, 24), (5, 24)])
def test_groups_that_cannot_be_are_refused(start, tmp_path, samples, batch):
    with pytest.raises(SystemExit, match=rf"--batch-size {batch} must be a multiple of --samples-per-prompt {samples}"):
        run(start, tmp_path / "run", samples_per_prompt=samples, batch_size=batch)
    assert not (tmp_path / "run").exists()


# ---- two processes, and kill -9 -----------------------------------------------------------------------------------


def command(start, folder: Path, *flags) -> list[str]:
    words = [f"--{key.replace('_', '-')}={value}" for key, value in start.args.items()]
    return ["variants/rloo.py", *words, f"--output-dir={folder}", "--save-every=1", *flags]


@pytest.mark.long
def test_two_processes_are_one(start, tmp_path):
    expected = run(start, tmp_path / "one", micro_batch_size=8)
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *launch, *command(start, tmp_path / "two")], cwd=ROOT, env=environment, check=True)
    for line, other in zip(expected, read_metrics(tmp_path / "two"), strict=True):
        for key, value in line.items():
            if not key.startswith(("time/", "policy/sampling")):
                floor = 2e-6 if key == "policy/ratio_variance" else 1e-6
                assert abs(other[key] - value) <= max(1e-5 * abs(value), floor), key


@pytest.mark.long
def test_a_killed_run_resumes_to_the_same_bytes(start, tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *command(start, tmp_path / "whole")], cwd=ROOT, env=environment, check=True)
    child = subprocess.Popen([sys.executable, *command(start, tmp_path / "killed")], cwd=ROOT, env=environment)
    while not list((tmp_path / "killed").glob("checkpoints/update_000001/metrics.jsonl")):
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    subprocess.run(
        [sys.executable, *command(start, tmp_path / "killed", "--resume")], cwd=ROOT, env=environment, check=True
    )
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert weights[0] == weights[1]
