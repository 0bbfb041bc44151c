"""The pure helpers of the stages against plain Python, and against unpadded rows on four architectures. Step by step in
whole runs: test_gradients.py. Sampling: test_sampling.py."""

import gc
import math
import random
import weakref

import pytest
import torch
from conftest import close, random_base, single_process
from test_saved_models import GROUPED, TRAINED
from transformers import Qwen3Config

import ppo
import reward
import sft

PAD = 0
CONFIGS = {name: TRAINED[name] for name in ("gpt_neox", "gpt2", "llama")}
CONFIGS["qwen3"] = Qwen3Config(**GROUPED, head_dim=16, tie_word_embeddings=True)


# ---- micro-batches of PPO ---------------------------------------------------------------------------------------


def test_micro_batches_are_the_batch_cut():
    """Rows of similar length together; what is per token through one past the longest response, the tokens through the
    longest row, and the columns those before each token of the response."""
    lengths = [1, 3, 5, 2, 1]
    responses = torch.tensor([[3] * n + [PAD] * (5 - n) for n in lengths])
    queries = torch.tensor([[PAD] * n + [2] * (14 - n) for n in lengths])  # all rows have 14 tokens, of 19 columns
    batch = ppo.make_batch(queries, responses, PAD)
    assert batch["tokens"].tolist() == [[2] * (14 - n) + [3] * n + [PAD] * 5 for n in lengths]
    batch |= {"values": torch.arange(25.0).reshape(5, 5), "scores": torch.arange(5.0)}
    mbs = ppo.micro_batches(batch, torch.tensor([0, 1, 3, 4]), 2)
    assert [mb["rows"].tolist() for mb in mbs] == [[0, 1], [3, 4]]  # all are equally long
    assert [mb["values"].shape[1] for mb in mbs] == [4, 3] == [mb["value_mask"].shape[1] for mb in mbs]
    for mb in mbs:
        width = mb["values"].shape[1]
        for i, row in enumerate(mb["rows"].tolist()):
            assert mb["values"][i].tolist() == batch["values"][row, :width].tolist()
            assert mb["tokens"][i].tolist() == batch["tokens"][row, :16].tolist() and mb["scores"][i] == row
            before = [14 - lengths[row] - 1 + t for t in range(width)]
            assert mb["columns"][i].tolist() == [min(column, 15) for column in before]
    assert ppo.micro_batches(batch, torch.arange(5), 5)[0]["values"].shape == (5, 5)  # no more than the responses have


def test_what_lies_behind_a_responses_end_is_in_neither_loss_nor_gradient():
    """exp(800) is inf, and inf x 0 is no 0: the mask must act before the ratio. (The rest: test_gradients.py.)"""
    logprobs, mask = torch.tensor([[0.1, 800.0]], requires_grad=True), torch.tensor([[True, False]])
    loss, sums = ppo.policy_loss(
        logprobs, {"logprobs": torch.zeros(1, 2), "advantages": torch.ones(1, 2), "response_mask": mask}, 0.2
    )
    loss.backward()
    assert close(loss.detach(), -math.exp(0.1), 1e-6)
    assert all(value.isfinite() for value in sums.values()) and logprobs.grad[0, 1] == 0


# ---- pairs that share their query -------------------------------------------------------------------------------

# stored rows (right-padded) with the length of the masked start of each label, and what must become of them
PAIRS = [
    # the plain case: query 1 2 3, responses 4 5 and 6 7 8
    (([1, 2, 3, 4, 5, 0], 3), ([1, 2, 3, 6, 7, 8], 3), ([1, 2, 3], [4, 5], [6, 7, 8], 0, 0)),
    # the query's last token joins with the chosen response (30) and not with the rejected one, each label starting
    # where its own row leaves the query: rejected begins with a token of the query
    (([1, 2, 30, 4, 0, 0], 2), ([1, 2, 3, 6, 0, 0], 3), ([1, 2], [30, 4], [3, 6], 0, 1)),
    # as in the published data, labels masked by the query's own length: both first tokens belong to the query
    (([1, 2, 30, 4, 0, 0], 3), ([1, 2, 31, 6, 7, 0], 3), ([1, 2], [30, 4], [31, 6, 7], 1, 1)),
    # responses that begin alike do not lengthen the query
    (([1, 2, 8, 4, 5, 0], 2), ([1, 2, 8, 6, 0, 0], 2), ([1, 2], [8, 4, 5], [8, 6], 0, 0)),
]


def stored_pairs(pairs) -> dict:
    batch = {column: [] for column in reward.PAIR_COLUMNS}
    for chosen, rejected, _ in pairs:
        for side, (row, start) in (("chosen", chosen), ("rejected", rejected)):
            batch[f"query_{side}_token"].append(row)
            batch[f"query_{side}_token_response_label"].append([PAD] * start + row[start:])
    return {column: torch.tensor(rows) for column, rows in batch.items()}


@pytest.mark.parametrize("more_columns", [0, 2])
def test_pair_rows_has_the_query_once(more_columns):
    """Also if the columns of the rejected rows are wider."""
    batch = stored_pairs(PAIRS)
    for column in ("query_rejected_token", "query_rejected_token_response_label"):
        batch[column] = torch.nn.functional.pad(batch[column], (0, more_columns), value=PAD)
    found = {key: value.tolist() for key, value in reward.pair_rows(batch, PAD).items()}
    for i, (_, _, (query, chosen, rejected, *starts)) in enumerate(PAIRS):
        row = query + chosen + rejected
        padding = [0] * (12 + more_columns - len(row))  # all columns, which are fewer than 16
        positions = list(range(len(query + chosen))) + list(range(len(query), len(query + rejected)))
        segments = [reward.QUERY] * len(query) + [reward.CHOSEN] * len(chosen) + [reward.REJECTED] * len(rejected)
        has_label = [False] * len(query)
        for response, start in zip((chosen, rejected), starts, strict=True):
            has_label += [place >= start for place in range(len(response))]
        assert found["tokens"][i] == row + padding and found["position_ids"][i] == positions + padding
        assert found["segments"][i] == segments + [reward.PADDING] * len(padding)
        assert found["has_label"][i] == has_label + [False] * len(padding)
    assert not any(found["is_same"])


def test_equal_responses_are_found():
    long, short = ([1, 2, 8, 4, 5, 0], 2), ([1, 2, 8, 4, 0, 0], 2)
    rows = reward.pair_rows(stored_pairs([(long, long, None), (long, short, None), (short, long, None)]), PAD)
    assert rows["is_same"].tolist() == [True, False, False]


@pytest.fixture(scope="module", params=CONFIGS)
def small(request, world, tmp_path_factory):
    """Policy, tokenizer with [PAD], and checkpoint folder of one architecture. Larger weights than at initialisation,
    so that what a token sees and where it stands shows in the logits."""
    folder = random_base(CONFIGS[request.param], world, tmp_path_factory.mktemp("base") / request.param)
    tokenizer = sft.load_tokenizer(str(folder))
    policy = sft.load_policy(str(folder), tokenizer).eval()
    policy.save_pretrained(folder)  # as the SFT stage does: with a row for [PAD]
    tokenizer.save_pretrained(folder)
    strengthen(policy)
    return policy, tokenizer, folder


def strengthen(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5)


@torch.no_grad()
def test_policy_and_value_equal_plain_rows(small):
    policy, tokenizer, folder = small
    torch.manual_seed(1)
    value_model = ppo.RewardModel(reward.new_reward_model(str(folder), tokenizer).model).eval()
    strengthen(value_model)
    rng, pad_id, temperature = random.Random(3), tokenizer.pad_token_id, 0.7
    queries, responses = ([[rng.randrange(pad_id) for _ in range(n)] for n in ns] for ns in ((3, 9, 6), (4, 1, 7)))
    left = torch.tensor([[pad_id] * (12 - len(row)) + row for row in queries])
    right = torch.tensor([row + [pad_id] * (8 - len(row)) for row in responses])
    [mb] = ppo.micro_batches(ppo.make_batch(left, right, pad_id), torch.arange(3), 3)
    back = mb["rows"].argsort()
    logits, values = (x[back] for x in ppo.PolicyAndValue(policy, value_model)(mb["tokens"], mb["columns"]))
    right = right[:, : logits.shape[1]]
    logprobs, entropy = ppo.token_logprobs(logits, right, temperature), ppo.token_entropy(logits, temperature)
    for i, (query, response) in enumerate(zip(queries, responses, strict=True)):
        row, start, n = torch.tensor([query + response]), len(query), len(response)
        logits = policy(row).logits[0].double() / temperature
        expected = logits.log_softmax(1)[start - 1 : start - 1 + n]
        assert torch.allclose(logprobs[i, :n].double(), expected[range(n), response], rtol=1e-4, atol=1e-4)
        assert torch.allclose(entropy[i, :n].double(), -(expected.exp() * expected).sum(1), rtol=1e-4, atol=1e-4)
        hidden = value_model.model.base_model(row).last_hidden_state[0, start - 1 :]  # through the state after the last
        assert torch.allclose(values[i, : n + 1], value_model.model.score(hidden)[:, 0], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_rewards_and_values_are_float32_under_autocast(small):
    policy, tokenizer, folder = small
    torch.manual_seed(1)
    model = reward.new_reward_model(str(folder), tokenizer).eval()
    hidden, rows = [], torch.randint(tokenizer.pad_token_id, (2, 5))
    model.model.base_model.register_forward_hook(lambda _module, _inputs, output: hidden.append(output[0]))
    with torch.autocast("cpu", torch.bfloat16):
        found = model(rows)
        columns = torch.tensor([[2, 3], [2, 3]])
        values = ppo.PolicyAndValue(policy, ppo.RewardModel(model.model))(rows, columns)[1]
    head = model.model.score
    assert close(found, (hidden[0].double() @ head.weight.double().T)[:, :, 0], 1e-6)
    assert close(values, (hidden[-1].double() @ head.weight.double().T)[:, 2:4, 0], 1e-6)


# ---- sampling ---------------------------------------------------------------------------------------------------


def test_noise_is_gumbel_and_independent_across_rows_positions_and_tokens():
    keys = ppo.noise_keys(5, 1, range(100), 40)
    noise = torch.stack([ppo.gumbel_noise(keys[:, t], 500) for t in range(40)]).double()  # (40, 100, 500)
    n = noise.numel()  # two million: the standard error of the mean is 0.0009, of the variance 0.0024
    assert noise.mean().item() == pytest.approx(0.5772157, abs=0.004)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.012)
    for quantile in (1e-4, 1e-3, 0.1, 0.5, 0.9, 0.999, 0.9999):  # both tails: exp(-exp(-x)) below x
        below = (noise < -math.log(-math.log(quantile))).sum().item()
        assert abs(below - n * quantile) < 5 * math.sqrt(n * quantile * (1 - quantile)) + 1
    pairs = [(noise[1:], noise[:-1]), (noise[:, 1:], noise[:, :-1]), (noise[:, :, 1:], noise[:, :, :-1])]
    for a, b in [*pairs, (noise[1:, 1:], noise[:-1, :-1]), (noise[1:, :, 1:], noise[:-1, :, :-1])]:
        correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].item()
        assert abs(correlation) < 5 / math.sqrt(a.numel())
    assert noise.unique().numel() > 0.9 * n


def test_each_cache_of_a_rollout_is_gone_before_the_next(small, monkeypatch):
    model, tokenizer, _ = small
    made, alive, original = [], [], ppo.KeyValueCache

    def watched(*args, **kwargs):
        alive.append(sum(layer() is not None for layer in made))
        cache = original(*args, **kwargs)
        made.append(weakref.ref(cache.layers[-1]))
        return cache

    monkeypatch.setattr(ppo, "KeyValueCache", watched)
    queries = torch.randint(1, 300, (7, 20), generator=torch.Generator().manual_seed(1))
    args = ppo.Args(response_length=4, sample_batch_size=3)
    gc.disable()  # nothing waits for the collector
    try:
        ppo.sample(single_process(), model, queries, ppo.noise_keys(1, 1, range(7), 4), tokenizer, args, 0.7)
        assert [layer() for layer in made] == [None, None, None] and max(alive) <= 1  # it has no tensors yet
    finally:
        gc.enable()
