"""The variants: details against plain Python or by enumeration of a small world (the numbers of whole runs are in
test_gradients.py), and each run on two processes, or killed, as if nothing had happened (behind -m long)."""

import ast
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from conftest import (
    ROOT,
    close,
    files,
    free_port,
    make_constant,
    make_reward_model,
    make_talker,
    read_csv,
    read_metrics,
    record,
    script,
    script_path,
    single_process,
)
from datasets import Dataset, load_from_disk
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoConfig

import ppo

rloo, grpo, online_dpo = (script(f"variants/{name}.py") for name in ("rloo", "grpo", "online_dpo"))
ABLATIONS = ("ppo_function", "simpo", "ppo_value", "ppo_compile", "ppo_lora")
ppo_function, simpo, ppo_value, ppo_compile, ppo_lora = (script(f"{name}.py") for name in ABLATIONS)
COPIES = ("rloo", "grpo", "online_dpo")
SEED, BATCH, K, LENGTH = 3, 24, 4, 6


@pytest.mark.parametrize("name", COPIES)
def test_the_readme_has_the_lines_and_hunks_of_the_diff(name, tmp_path):
    """Lines added and removed without the docstring, and hunks with it."""

    def diff(*flags) -> str:
        return subprocess.run(["git", "diff", "--no-index", *flags], cwd=ROOT, capture_output=True, text=True).stdout

    parent, variant = (ROOT / "ppo.py").read_text(), (ROOT / f"variants/{name}.py").read_text()
    for file, text in (("parent", parent), ("variant", variant)):
        (tmp_path / file).write_text("\n".join(text.splitlines()[ast.parse(text).body[0].end_lineno :]) + "\n")
    added, removed, _ = diff("--numstat", str(tmp_path / "parent"), str(tmp_path / "variant")).split("\t")
    hunks = len(re.findall(r"^@@ ", diff("ppo.py", f"variants/{name}.py"), re.MULTILINE))
    row = re.search(rf"^\| \[`{name}.py`\].* \| (\d+) \| (\d+) \| ", (ROOT / "variants/README.md").read_text(), re.M)
    assert row.groups() == (str(int(added) + int(removed)), str(hunks))


# ---- online DPO: pairs --------------------------------------------------------------------------------------------


def test_a_pair_of_equal_scores_is_tied_rounding_aside():
    """The last pair has equal responses. test_gradients.py checks that a pair is the best and the worst response."""
    scores = torch.tensor([0.5, 2.0, -1.0, -1.0, 0.3, 0.3 + 3e-7, 0.3, 0.3 + 3e-6, 0.3, 0.4])
    responses = torch.arange(10)[:, None].clamp(max=8)
    pairs, untied = online_dpo.best_and_worst(scores, responses, 2, "no")
    assert pairs[0].tolist() == [1, 0] and untied.tolist() == [True, False, False, True, False]


@pytest.mark.parametrize("labels", ["hard", "soft"])
def test_where_online_dpo_ends(labels):
    """We repeat the exact expected step over all pairs that a policy over five responses samples; its logits are the
    weights. Hard labels end at the best response alone, soft ones at the optimum of score - beta KL."""
    beta, scores = 0.5, torch.tensor([0.0, 2.0, 1.0, 0.5, 1.0], dtype=torch.float64)
    reference = torch.tensor([0.3, 0.15, 0.25, 0.2, 0.1], dtype=torch.float64).log()
    both = torch.cartesian_prod(torch.arange(5), torch.arange(5))  # (25, 2) responses
    pairs, untied = online_dpo.best_and_worst(scores[both].flatten(), both.flatten()[:, None], 2, "no")
    chosen, rejected = both.flatten()[pairs].T
    flip = online_dpo.flip_probability(torch.cat([scores[chosen], scores[rejected]]), labels)
    logits, kls = reference.clone().requires_grad_(), []
    for _ in range(1_000):
        logprobs = logits.log_softmax(0)
        kls.append((logprobs.exp() * (logprobs - reference)).sum().item())
        of_policy = [logprobs[chosen], logprobs[rejected], reference[chosen], reference[rejected]]
        probabilities = logprobs.detach().exp()[both].prod(1) * untied
        losses = online_dpo.online_dpo_loss(*of_policy, beta, "sigmoid", flip)
        [gradient] = torch.autograd.grad((losses * probabilities).sum() / probabilities.sum(), logits)
        logits = (logits - 10 * gradient).detach().requires_grad_()
    optimum = [0.3, 0.15 * math.exp(4), 0.25 * math.exp(2), 0.2 * math.exp(1), 0.1 * math.exp(2)]
    optimum = [x / sum(optimum) for x in optimum]
    kl = sum(x * math.log(x / y) for x, y in zip(optimum, [0.3, 0.15, 0.25, 0.2, 0.1], strict=True))
    print(f"KL {kls[-1]:.6f}; of the optimum {kl:.6f}, of the best response alone {-math.log(0.15):.6f}")
    if labels == "hard":
        assert kls == sorted(kls) and 0 < -math.log(0.15) - kls[-1] < 1e-4
    else:
        assert abs(kls[-1] - kl) < 1e-9 and close(logits.detach().softmax(0), optimum, 1e-9)


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


@pytest.mark.parametrize("on_policy", [True, False])
def test_the_gradient_is_that_of_the_expected_return(on_policy):
    """Summed over all pairs of responses, weighted by probability, it is exactly minus the gradient of E[score] - beta
    KL(pi || ref), for REINFORCE and, before the first step, for the ratio."""
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


def of_states(logits: torch.Tensor, old: torch.Tensor, kl) -> torch.Tensor:
    """The sum of kl(state's logits) over the three states, each by the old policy's probability to come there."""
    reached = torch.cat([torch.ones(1), old[0].softmax(0)[:2]])  # the start, after 0, after 1
    return sum(reached[state] * kl(logits[state], state) for state in range(3))


@pytest.mark.parametrize("form", ["k3", "k2", "k3_ratio"])
@pytest.mark.parametrize("on_policy", [True, False])
def test_each_kl_has_its_value_and_gradient(form, on_policy):
    """Summed over tokens and over all responses, weighted by the old policy's probability, with the visited states held
    constant: k3 has the value of KL(pi || ref) and the gradient of KL(ref || pi), k2 has the gradient of KL(pi || ref),
    and k3 x ratio has both, also if another policy drew the samples."""
    generator = torch.Generator().manual_seed(4)
    logits, reference, other = (torch.randn(3, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    logits.requires_grad_()
    old = logits.detach() if on_policy else other
    args = SimpleNamespace(cliprange=0.2, cliprange_high=0.2, kl_estimator=form, kl_coef=1.0, ratio="token")
    value, gradient = 0.0, torch.zeros(3, 3, dtype=torch.float64)
    for y in SEQUENCES:
        mask = torch.tensor([[True, len(y) == 2]])
        mb = {"response_mask": mask, "token_weights": torch.ones(1).double(), "advantages": torch.zeros(1, 2).double()}
        for key, policy in (("logprobs", old), ("ref_logprobs", reference)):
            mb[key] = tokens_of(policy, y)[None].masked_fill(~mask, 0.0)
        loss, sums = grpo.grpo_loss(tokens_of(logits, y)[None], mb, args)
        assert sums["loss/kl"].item() == loss.item()
        probability = log_probability(old, y).exp().item()
        value += probability * loss.item()
        gradient += probability * torch.autograd.grad(loss, logits)[0]

    def reverse(x, state):  # KL(pi || ref)
        return (x.softmax(0) * (x.log_softmax(0) - reference[state].log_softmax(0))).sum()

    def forward(x, state):  # KL(ref || pi)
        return (reference[state].softmax(0) * (reference[state].log_softmax(0) - x.log_softmax(0))).sum()

    [of_reverse] = torch.autograd.grad(of_states(logits, old, reverse), logits)
    [of_forward] = torch.autograd.grad(of_states(logits, old, forward), logits)
    assert (of_reverse - of_forward).abs().max() > 0.05
    is_value = abs(value - of_states(logits, old, reverse).item()) < 1e-6
    assert is_value == (form == "k3_ratio" or (form == "k3" and on_policy))
    assert torch.allclose(gradient, of_reverse, atol=1e-6) == (form == "k3_ratio" or (form == "k2" and on_policy))
    assert torch.allclose(gradient, of_forward, atol=1e-6) == (form == "k3" and on_policy)


# ---- a run --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def start(world, tmp_path_factory) -> SimpleNamespace:
    """.args of a run of the copies of ppo.py with a reward model; .root"""
    root = tmp_path_factory.mktemp("variants")
    policy = make_talker(world, root / "policy", eos=0.1)
    paths = {"sft_model_path": str(policy), "reward_model_path": str(make_reward_model(policy, root / "reward", 0.3))}
    paths |= {"dataset": str(world.dataset), "model": "nano", "seed": SEED}
    sizes = {"batch_size": BATCH, "total_episodes": 3 * BATCH, "micro_batch_size": 5, "response_length": LENGTH}
    return SimpleNamespace(
        args=paths | sizes | {"eval_rows": 3, "learning_rate": 1e-3, "sample_every": 0}, root=root, world=world
    )


FUNCTIONS = """
def of_lists(posts, summaries):
    return [len(post) % 7 / 7 - len(summary) / 100 for post, summary in zip(posts, summaries)]
def of_one(post: str, summary: str) -> float:
    return len(post) % 7 / 7 - len(summary) / 100
def raises(posts, summaries):
    if any("{post}" in post for post in posts):
        raise ValueError("cannot score this")
    return of_lists(posts, summaries)
def nan(posts, summaries):
    return [float("nan") if "{post}" in post else 1 for post in posts]
def too_few(posts, summaries):
    return of_lists(posts, summaries)[:-1]
class JudgeOfOne:
    def __call__(self, post: str, summary: "str"):
        return of_one(post, summary)
an_object_of_one = JudgeOfOne()
def of_three(posts, summaries, references):
    return of_lists(posts, summaries)
"""


def args_of(start, name: str) -> dict:
    """The arguments of a short run of a variant."""
    args = dict(start.args)
    if name == "ppo_function":
        (start.root / "mine.py").write_text(FUNCTIONS)
        del args["reward_model_path"]
        args["reward_function"] = f"{start.root}/mine.py:of_lists"
    if name == "ppo_value":
        args |= {"lam_value": 1.0, "value_warmup": 1}
    if name == "simpo":
        args = {key: x for key, x in args.items() if key in simpo.Args.__dataclass_fields__}
        args |= {"preference_dataset": str(start.world.preference_dataset)}
    return args


def run(start, folder: Path, module=rloo, **changes) -> list[dict]:
    module.main(module.Args(**args_of(start, module.STAGE) | changes, output_dir=str(folder)))
    return read_metrics(folder)


def test_the_first_ratio_is_a_responses(start, tmp_path, monkeypatch):
    """If old log-probabilities are off by 0.01 per token, it deviates by exp(0.01 x the longest response) - 1."""
    original, lengths = rloo.forward_passes, []

    def shifted(*args):
        outputs, batch = original(*args), args[3]
        lengths.append(batch["lengths"].max().item())
        return outputs | {"logprobs": outputs["logprobs"] - 0.01 * batch["response_mask"]}

    monkeypatch.setattr(rloo, "forward_passes", shifted)
    [line] = run(start, tmp_path / "run", total_episodes=BATCH)
    assert lengths[0] > 1 and close(line["policy/first_ratio_deviation"], math.exp(0.01 * lengths[0]) - 1, 1e-5)


@pytest.mark.parametrize("module", [grpo, online_dpo])
def test_no_preference_is_no_step(start, tmp_path, module):
    """A reward model that gives everything the same score: all gradients are zero, online DPO makes no step, and an
    update has the same metrics as any other."""
    constant = make_constant(Path(start.args["reward_model_path"]), tmp_path / "constant")
    settings = {"kl_coef": 0.0} if module is not online_dpo else {}
    settings |= {"reward_model_path": str(constant), "penalty_reward_value": None, "total_episodes": 2 * BATCH}
    lines = run(start, tmp_path / "run", module, **settings)
    assert [line["grad_norm"] for line in lines] == [0, 0]
    if module is online_dpo:
        assert [line["objective/tied_pairs"] for line in lines] == [1, 1] and lines[1]["objective/kl"] == 0
    [other] = run(start, tmp_path / "other", module, total_episodes=BATCH)
    assert other["grad_norm"] > 0 and list(other) == list(lines[-1])
    assert all(math.isfinite(value) for line in lines for value in line.values())


@pytest.mark.parametrize("penalty", [-1.0, None])
def test_validation_scores_with_and_without_the_penalty(monkeypatch, penalty):
    """Of three responses, the second has no EOS."""
    eos, pad = 0, 9
    responses = torch.tensor([[3, eos, pad], [3, 4, 5], [3, 4, eos]])
    monkeypatch.setattr(ppo, "sample", lambda *args: (responses, None))
    monkeypatch.setattr(ppo, "reward_scores", lambda *args: torch.tensor([2.0, 4.0, 0.5]))
    data = Dataset.from_dict({"query_token": [[1, 2]] * 3}).with_format("torch")
    tokenizer = SimpleNamespace(eos_token_id=eos, pad_token_id=pad)
    args = SimpleNamespace(seed=1, response_length=3, penalty_reward_value=penalty)
    found = ppo.validation_scores(single_process(), None, None, data, tokenizer, args)
    assert close(found["eval/score_without_penalty"], 6.5 / 3)
    assert close(found["eval/score"], (6.5 if penalty is None else 1.5) / 3)


def test_samples_are_text_in_tensorboard_as_printed(start, tmp_path, capsys):
    tokenizer = ppo.load_tokenizer(str(start.world.model))
    queries = torch.tensor([[tokenizer.pad_token_id, 5], [6, 7]])
    batch = ppo.make_batch(queries, torch.tensor([[8, 9], [10, tokenizer.eos_token_id]]), tokenizer.pad_token_id)
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=str(tmp_path))
    accelerator.init_trackers("tensorboard")
    ppo.show_samples(accelerator, batch, torch.tensor([0.25, -1.0]), torch.tensor([3.0, 4.5]), tokenizer, 7)
    accelerator.end_training()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    [event] = events.Tensors("samples/training/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert event.step == 7 and [*map(text.count, ("score 0.250, KL 3.000", "score -1.000, KL 4.500"))] == [1, 1]
    assert tokenizer.decode([8, 9]) in text and f"\n{text.split(chr(10) * 2 + '----')[0]}" in capsys.readouterr().out


def test_a_function_of_one_or_of_lists(start, tmp_path, monkeypatch):
    """A function of one post, here a callable object, and one of lists give the same bytes. The evaluation scores the
    first validation posts. test_gradients.py checks what a function is given and how its scores are used."""
    calls = record(monkeypatch, ppo_function, "function_scores")
    lines = run(start, tmp_path / "lists", ppo_function, total_episodes=BATCH)
    assert close(lines[-1]["eval/score_without_penalty"], calls[-1].result.mean().item(), 1e-6)
    assert calls[-1].args[1] == load_from_disk(start.args["dataset"])["validation"]["query"][:3]
    of_one = f"{start.root}/mine.py:an_object_of_one"
    run(start, tmp_path / "one", ppo_function, total_episodes=BATCH, reward_function=of_one)
    both = [files(tmp_path / name / "model")["model.safetensors"] for name in ("lists", "one")]
    assert both[0] == both[1]
    for folder, of_policy in (("model", True), ("value_model", False)):  # one has a head of one number
        config = AutoConfig.from_pretrained(tmp_path / "one" / folder)
        assert (config.num_labels == 1) != of_policy


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", "mine.py:raises failed .*cannot score this"),
        ("nan", "update 1: a score of .*mine.py:nan is not finite"),
        ("too_few", "23 scores for 24 summaries"),
        ("of_three", r"f\(posts, summaries\).*'references'"),
    ],
)
def test_a_function_that_gives_no_score_is_named(start, tmp_path, name, message):
    data = load_from_disk(start.args["dataset"])["train"]
    post = data[int(ppo_function.data_order(len(data), SEED, 0, BATCH)[7])]["query"][:60].replace("\n", "\\n")
    (tmp_path / "mine.py").write_text(FUNCTIONS.replace("{post}", post.replace('"', '\\"')))
    with pytest.raises(SystemExit) as raised:
        run(start, tmp_path / "run", ppo_function, reward_function=f"{tmp_path}/mine.py:{name}")
    assert re.search(message, str(raised.value), re.DOTALL)


def test_simpos_rewards_are_means_in_the_evaluation_too(start, tmp_path, monkeypatch):
    """beta x the mean over a response's tokens with EOS, without query and padding. For training: test_gradients.py."""
    sums = record(monkeypatch, simpo, "pair_logprobs")
    run(start, tmp_path / "run", simpo, beta=2.5, gamma_beta_ratio=0.4, run_eval=True)
    pad, expected = simpo.load_tokenizer(start.args["sft_model_path"]).pad_token_id, {}
    for call in [call for call in sums if not call.result[0].requires_grad]:
        for side, of_side in zip(("chosen", "rejected"), call.result, strict=True):
            rows, labels = (call.args[1][f"query_{side}_token{x}"].tolist() for x in ("", "_response_label"))
            for row, label, total in zip(rows, labels, of_side.tolist(), strict=True):
                expected[side, str(row)] = 2.5 * total / sum(token != pad for token in label)
    data = load_from_disk(str(start.world.preference_dataset))["validation"]
    written = read_csv(tmp_path / "run" / "eval" / "pairs_validation.csv")
    for row, pair in zip(data, written, strict=True):
        for side in ("chosen", "rejected"):
            assert close(float(pair[f"{side}_reward"]), expected[side, str(row[f"query_{side}_token"])], 1e-4)


@pytest.mark.long
def test_compiled_layers_keep_the_first_ratio_at_1(start, tmp_path):
    """In bfloat16. Sampling is not compiled, so the first samples and their scores are the same as in ppo.py."""
    lines = run(start, tmp_path / "compiled", ppo_compile, mixed_precision="bf16")
    plain = run(start, tmp_path / "plain", ppo, mixed_precision="bf16")
    assert [line["policy/first_ratio_deviation"] for line in lines] == [0, 0, 0] and lines[0]["objective/kl"] == 0
    assert lines[0]["response/length"] == plain[0]["response/length"]
    assert lines[0]["policy/sampling_logprob_difference_max"] != plain[0]["policy/sampling_logprob_difference_max"]


# ---- two processes, and kill -9 -----------------------------------------------------------------------------------


def command(start, name: str, folder: Path, *flags) -> list[str]:
    words = [f"--{key.replace('_', '-')}={value}" for key, value in args_of(start, name).items()]
    path = f"variants/{name}.py" if name in COPIES else f"{name}.py"
    return [str(script_path(path)), *words, f"--output-dir={folder}", "--save-every=1", *flags]


@pytest.mark.long
@pytest.mark.parametrize("name", [*COPIES, *ABLATIONS])
def test_two_processes_are_one(start, tmp_path, name):
    rate = 2e-4  # at 1e-3 the policy moves by so much that rounding grows within two updates
    expected = run(start, tmp_path / "one", globals()[name], micro_batch_size=8, learning_rate=rate)
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    words = command(start, name, tmp_path / "two", f"--learning-rate={rate}")
    subprocess.run([sys.executable, *launch, *words], cwd=ROOT, env=environment, check=True)
    differences = {}
    for line, other in zip(expected, read_metrics(tmp_path / "two"), strict=True):
        for key, value in line.items():
            if not key.startswith(("time/", "policy/sampling")):
                # the variance of the ratios squares them, and their rounding with them
                relative, floor = (4e-5, 2e-6) if key == "policy/ratio_variance" else (1e-5, 1e-6)
                if name == "ppo_compile" and line["update"] > 1:  # its kernels round more, and rounding grows
                    relative, floor = 5e-4, 1e-5
                assert abs(other[key] - value) <= max(relative * abs(value), floor), key
                differences[key] = max(differences.get(key, 0.0), abs(other[key] - value) / max(abs(value), 0.1))
    worst = max(differences, key=differences.get)
    print(f"{name}: largest relative difference {differences[worst]:.1e} ({worst})")


@pytest.mark.long
@pytest.mark.parametrize("name", [*COPIES, *ABLATIONS])
def test_a_killed_run_resumes_to_the_same_bytes(start, tmp_path, name):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    whole, killed = (command(start, name, tmp_path / folder) for folder in ("whole", "killed"))
    subprocess.run([sys.executable, *whole], cwd=ROOT, env=environment, check=True)
    child = subprocess.Popen([sys.executable, *killed], cwd=ROOT, env=environment)
    while not list((tmp_path / "killed").glob("checkpoints/update_000001/metrics.jsonl")):
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    subprocess.run([sys.executable, *killed, "--resume"], cwd=ROOT, env=environment, check=True)
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert weights[0] == weights[1]
    print(f"{name}: {len(weights[0]):,} bytes, the same")
