"""What stands between the loss and the optimiser: every optimiser step of a short run of each script, by hand.

A run records, before each optimiser step, the weights, their gradients and the learning rate, and on-policy scripts
record their samples. From the tokens and the recorded weights alone, the test computes the same gradient in float64
with plain transformers models, one unpadded row at a time. It works out for itself which rows belong to a step, so a
gradient that agrees also shows that exactly these rows were trained on. Then it runs AdamW on the recorded gradients,
with the learning rates of its own schedule, and expects the weights that the next step starts from.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from conftest import close, edit_config, make_reward_model, make_talker, read_metrics, record, script, without_pad
from datasets import Dataset, DatasetDict, load_from_disk
from peft import LoraConfig, inject_adapter_in_model
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

BATCH, UPDATES, SEED = 12, 3, 5
ROWS = 20  # training rows, so that the second update takes rows of the first pass and of the next
LEARNING_RATE = 2e-4
# micro-batches of 5 divide neither 12 nor 6 rows; some of the gradients are clipped
OPTIMISER = {"learning_rate": LEARNING_RATE, "max_grad_norm": 5.0, "micro_batch_size": 5}
ADAM_EPS, WEIGHT_DECAY = 1e-5, 0.01  # the paper's, and torch's default
SIZES = {"seed": SEED, "model": "nano", "batch_size": BATCH, "total_episodes": UPDATES * BATCH + 1}  # one is left over
SIDES = ("chosen", "rejected")
GRADES = {"significantly": 1, "better": 2 / 3, "slightly": 1 / 3, "negligibly": 0, "none": 0}
# chosen_safe, rejected_safe; None: without a label
SAFE = [(True, False), (True, True), (False, False), (None, True), (None, None), (False, True)]


# ---- data --------------------------------------------------------------------------------------------------------


def padded(tokens: list[int], width: int, pad: int, left: bool = False) -> list[int]:
    padding = [pad] * (width - len(tokens))
    return padding + tokens if left else tokens + padding


def with_label(name: str, query: list[int], response: list[int], pad: int) -> dict:
    """The two stored columns of a query and its response."""
    label = [pad] * len(query) + response
    return {name: padded(query + response, 80, pad), f"{name}_response_label": padded(label, 80, pad)}


@pytest.fixture(scope="module")
def start(world, tmp_path_factory) -> SimpleNamespace:
    """.sft .reward .other (two reward models), .dataset .preference_dataset .graded_dataset (folders with short rows),
    .rows and .pairs (their train splits as token lists), .more_dataset and .more_pairs (twice as many pairs, more than
    a run sees), .pad .eos .banned"""
    root = tmp_path_factory.mktemp("gradients")
    sft = make_talker(world, root / "sft", eos=0.1)
    torch.manual_seed(1)
    members = [make_reward_model(sft, root / name, bias) for name, bias in (("reward", 0.3), ("other", -0.2))]
    for folder in (sft, *members):  # which no stage may use (Detail 7)
        edit_config(folder, attention_dropout=0.1, hidden_dropout=0.1)
    tokenizer = AutoTokenizer.from_pretrained(sft)
    pad, eos = len(tokenizer), tokenizer.eos_token_id
    posts, comparisons = (load_from_disk(str(x))["train"] for x in (world.dataset, world.preference_dataset))
    rows, pairs = [], []
    for i in range(2 * ROWS):
        text = tokenizer.decode([x for x in posts[i]["query_token"] if x != pad][-(12 + i % 9) :])
        query = tokenizer(text).input_ids
        reference = [x for x in posts[i]["reference_response_token"] if x != pad]
        if i % 4 == 1:  # without EOS
            reference = reference[:-1]
        tag = ("helpfulness", "safety")[i % 3 == 0]
        rows.append(SimpleNamespace(text=text, query=query, response=reference, tag=tag))
        chosen, rejected = (comparisons[i][f"{side}_token"][:20] for side in SIDES)
        chosen, rejected = ([x for x in tokens if x not in (pad, eos)] + [eos] for tokens in (chosen, rejected))
        other_query = list(query)
        if i % 5 == 1:  # a tie
            rejected = chosen
        if i % 5 == 2:  # the query's last token joins with the response in another way
            other_query[-1] = query[0]
        if i % 5 == 3:
            chosen = chosen[:-1]
        pair = SimpleNamespace(text=text, query=query, chosen=query + chosen, rejected=other_query + rejected)
        pair.responses = {"chosen": chosen, "rejected": rejected}
        pair.grade, pair.margin, pair.weight = list(GRADES)[i % 5], i / 10, 0.5 if i % 3 == 0 else 1.0
        pair.chosen_safe, pair.rejected_safe = SAFE[i % len(SAFE)]
        pairs.append(pair)

    def save(name: str, columns) -> str:
        splits = {"train": Dataset.from_list(columns), "validation": Dataset.from_list(columns[:3])}
        DatasetDict(splits).save_to_disk(root / name)
        return str(root / name)

    posts = []
    for row in rows:
        columns = {"id": "", "query": row.text, "query_token": padded(row.query, 40, pad, left=True), "tag": row.tag}
        columns |= {"reference_response_token": padded(row.response[:-1] + [eos], 60, pad)}
        posts.append(columns | with_label("query_reference_response_token", row.query, row.response, pad))
    stored, graded = [], []
    for pair in pairs:
        columns = {"query": pair.text, "query_token": padded(pair.query, 40, pad, left=True)}
        for side in SIDES:
            response = pair.responses[side]
            query = getattr(pair, side)[: -len(response)]
            columns |= with_label(f"query_{side}_token", query, response, pad)
        stored.append(columns)
        grades = ("grade", "margin", "weight", "chosen_safe", "rejected_safe")
        graded.append(columns | {key: getattr(pair, key) for key in grades})
    vocabulary = AutoModelForCausalLM.from_pretrained(sft).get_input_embeddings().num_embeddings
    return SimpleNamespace(
        root=root,
        sft=str(sft),
        reward=str(members[0]),
        other=str(members[1]),
        dataset=save("dataset", posts[:ROWS]),
        preference_dataset=save("preference", stored[:ROWS]),
        graded_dataset=save("graded", graded[:ROWS]),
        more_dataset=save("more", stored),
        rows=rows[:ROWS],
        pairs=pairs[:ROWS],
        more_pairs=pairs,
        tokenizer=tokenizer,
        pad=pad,
        eos=eos,
        banned=list(range(pad, vocabulary)),
    )


def shuffled(n: int, seed: int, epoch: int) -> list[int]:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)).tolist()


def batch_of(rows: list, update: int, size: int = BATCH) -> list:
    """The rows of an update: the stream of all rows, shuffled anew in each pass."""
    places = range((update - 1) * size, update * size)
    return [rows[shuffled(len(rows), SEED, i // len(rows))[i % len(rows)]] for i in places]


def cosine(update: float) -> float:
    return LEARNING_RATE * (1 + math.cos(math.pi * (update - 1) / UPDATES)) / 2


def linear(update: float) -> float:
    return LEARNING_RATE * (UPDATES + 1 - update) / UPDATES


# ---- runs --------------------------------------------------------------------------------------------------------


def train(start, path: str, label: str, **settings) -> SimpleNamespace:
    """A run of the script at `path`: its settings, .name and .steps: the .weights and .gradients by name and the
    .learning_rates of every optimiser step, the number of its .micro_batches, and the .samples (responses, in the order
    of their episodes) of all calls of `sample` before it."""
    module, name = script(path), f"{path} {label}".strip()
    settings = SIZES | OPTIMISER | {"output_dir": str(start.root / name.replace("/", " "))} | settings
    steps, samples = [], []
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(module, "sample"):
            samples = record(patch, module, "sample")
        optimizer_step = module.optimizer_step
        backwards = record(patch, Accelerator, "backward")

        def recorded(accelerator, model, optimizer, max_grad_norm, where):
            parameters = dict(model.named_parameters())
            step = SimpleNamespace(micro_batches=len(backwards))
            step.samples = [call.result[0] for call in samples]
            backwards.clear()
            step.weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
            step.gradients = {name: None if p.grad is None else p.grad.clone() for name, p in parameters.items()}
            step.learning_rates = [group["lr"] for group in optimizer.param_groups]
            steps.append(step)
            return optimizer_step(accelerator, model, optimizer, max_grad_norm, where)

        patch.setattr(module, "optimizer_step", recorded)
        module.main(module.Args(**settings))
    run = SimpleNamespace(**settings, name=name, steps=steps, start=start)
    run.micro_batches = math.ceil(BATCH / settings.get("num_mini_batches", 1) / run.micro_batch_size)
    return run


def plain(folder: str, with_head: bool = False):
    """A causal language model in float64, or a sequence classifier with a bias of 0 and .mean, to be subtracted."""
    if not with_head:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    settings = {"dtype": torch.float64, "num_labels": 1, "output_loading_info": True}
    model, found = AutoModelForSequenceClassification.from_pretrained(folder, **settings)
    if found["missing_keys"]:
        torch.nn.init.zeros_(model.score.weight)
    model.score.bias = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    model.mean = getattr(model.config, "reward_mean", 0.0)
    return model


def rewards_at(model, tokens: list[int]) -> torch.Tensor:
    """What the head of a sequence classifier says at each token."""
    return model.score(model.base_model(torch.tensor([tokens])).last_hidden_state)[0, :, 0] - model.mean


def logprobs_of(policy, query: list[int], response: list[int], banned=(), temperature: float = 1.0) -> torch.Tensor:
    """The log-probability of each response token."""
    logits = policy(torch.tensor([query + response])).logits[0, len(query) - 1 : -1] / (temperature + 1e-7)
    logits = logits.index_fill(1, torch.tensor(banned, dtype=torch.long), -torch.inf)
    return logits.log_softmax(1)[torch.arange(len(response)), response]


def hold(run, models: dict, by_hand, record_property, saved=("model",), changed_after=()) -> None:
    """Hold every step of a run against `by_hand`, a generator that calls backward on the losses of each step and yields
    its update, its learning rate and {metric: value}, of which metrics.jsonl has the means over the steps of an update.
    models: {prefix of their parameters' names: the float64 model} as the run should start with, and which get the
    weights of each step. saved: the folders that the run leaves these models in, where the parameters named in
    changed_after were changed after the training."""
    parameters = {}
    for prefix, model in models.items():
        for name, parameter in model.named_parameters():
            parameters[(prefix + name).replace("model.score.bias", "bias")] = parameter  # RewardModel's own
    weights = {name: weight.clone() for name, weight in run.steps[0].weights.items()}
    optimizer = torch.optim.AdamW(weights.values(), eps=ADAM_EPS, weight_decay=WEIGHT_DECAY, fused=True)
    worst, clipped, logged = (0.0, ""), 0, defaultdict(lambda: defaultdict(list))
    for number, step in enumerate(run.steps, 1):
        run.now = step  # rollout() reads its samples
        assert parameters.keys() == step.weights.keys() and step.micro_batches == run.micro_batches
        for name, parameter in parameters.items():
            if number == 1:  # where the run should start
                assert torch.allclose(parameter.float(), weights[name], rtol=0, atol=1e-5), name
            assert torch.allclose(weights[name], step.weights[name], rtol=0, atol=1e-7), (number, name)
            parameter.data.copy_(step.weights[name])
            parameter.grad = None
        update, learning_rate, logs = next(by_hand)
        for key, value in (logs | {"learning_rate": learning_rate, "episode": update * BATCH}).items():
            logged[update][key].append(float(value))
        assert step.learning_rates == pytest.approx([learning_rate], rel=1e-9), number
        expected = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        assert {name for name, gradient in step.gradients.items() if gradient is not None} == expected.keys(), number
        floor = 1e-2 * max(gradient.abs().max() for gradient in expected.values()) + 1e-6
        for name, gradient in expected.items():
            error = (step.gradients[name] - gradient).abs().max() / max(gradient.abs().max(), floor)
            assert error < 1e-4, (number, name)
            worst = max(worst, (error.item(), f"step {number}, {name}"))
        for name, weight in weights.items():
            weight.grad = step.gradients[name]
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), run.max_grad_norm).item()
        logged[update]["grad_norm"].append(norm)
        clipped += norm > run.max_grad_norm
        optimizer.param_groups[0]["lr"] = learning_rate
        optimizer.step()
    assert next(by_hand, None) is None  # there are as many steps
    check_metrics(run, logged)
    check_saved(run, models, weights, saved, changed_after)
    record_property("gradients", (run.name, len(run.steps), clipped, f"{worst[0]:.1e}", worst[1]))


def check_metrics(run, logged: dict[int, dict[str, list[float]]]):
    """Compare metrics.jsonl with the means of {update: {metric: a value of each step}}."""
    metrics = {line["update"]: line for line in read_metrics(Path(run.output_dir))}
    for update, logs in logged.items():
        means = {key: statistics.fmean(values) for key, values in logs.items()}
        if "policy/ratio_square" in means:
            means["policy/ratio_variance"] = means.pop("policy/ratio_square") - means["policy/ratio"] ** 2
            assert metrics[update]["policy/first_ratio_deviation"] == 0
        for key, mean in means.items():
            assert close(metrics[update][key], mean, 1e-4), (update, key)


def check_saved(run, models: dict, weights: dict[str, torch.Tensor], saved: tuple[str, ...], changed_after: tuple):
    """Compare the saved models with the weights after the last step. saved is empty for adapters, which are merged."""
    for (prefix, model), folder in zip(models.items(), saved, strict=bool(saved)):
        left = plain(f"{run.output_dir}/{folder}", hasattr(model, "score"))
        for name, weight in left.named_parameters():
            trained, tolerance = weights[(prefix + name).replace("model.score.bias", "bias")].double(), 1e-7
            if name == "score.bias":  # it has become part of the mean, which reward.py measures in float32
                trained, weight, tolerance = model.mean - trained, torch.tensor([left.mean]).double(), 1e-6
            if name not in changed_after:
                assert torch.allclose(trained, weight, rtol=0, atol=tolerance), name


# ---- SFT, reward models, DPO, SimPO ------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_on", ["query_response", "response"])
def test_sft(start, record_property, loss_on):
    run = train(start, "sft.py", loss_on, model=start.sft, dataset=start.dataset, loss_on=loss_on)
    policy = plain(start.sft)

    def by_hand():
        for update in range(1, UPDATES + 1):
            rows = batch_of(start.rows, update)
            inputs = [(row.query, row.response) for row in rows]
            if loss_on == "query_response":
                inputs = [(row.query[:1], row.query[1:] + row.response) for row in rows]
            count = sum(len(targets) for _, targets in inputs)
            logs = defaultdict(float)
            for before, targets in inputs:
                loss = -logprobs_of(policy, before, targets, start.banned).sum() / count
                loss.backward()
                logs["loss/train"] += loss.item()
            yield update, cosine(update), logs

    hold(run, {"": policy}, by_hand(), record_property)


def with_drawn_head(start, run):
    """The SFT model with the head that a run of reward.py has drawn, whose bias is 0."""
    model = plain(start.sft, with_head=True)
    model.score.weight.data.copy_(run.steps[0].weights["model.score.weight"])
    return model


def log_pair(logs: dict, loss, chosen, rejected):
    """Add a pair's loss, rewards and accuracy, of which a tie has none, to the means over a batch."""
    logs["loss/train"] += loss.item() / BATCH
    logs["rewards/chosen"] += chosen.item() / BATCH
    logs["rewards/rejected"] += rejected.item() / BATCH
    logs["rewards/margin"] += (chosen - rejected).item() / BATCH
    logs["accuracy/train"] += (chosen - rejected > 1e-5).item() / BATCH


def test_reward(start, record_property):
    settings = {"sft_model_path": start.sft, "dataset": start.dataset, "preference_dataset": start.preference_dataset}
    run = train(start, "reward.py", "", **settings)
    model = with_drawn_head(start, run)
    model.score.bias.requires_grad_(False)

    def by_hand():
        for update in range(1, UPDATES + 1):
            logs, others = defaultdict(float), []
            for pair in batch_of(start.pairs, update):
                sides = [rewards_at(model, getattr(pair, side)) for side in SIDES]
                chosen, rejected = (rewards[-1] for rewards in sides)
                loss = -logsigmoid(chosen - rejected)
                (loss / BATCH).backward()
                log_pair(logs, loss, chosen, rejected)
                end = len(pair.query) - 1  # a last token of the query that the sides do not share counts as theirs
                first = end + (pair.chosen[end] == pair.rejected[end])
                others += [reward.item() for rewards in sides for reward in rewards[first:-1]]
            logs["other_logits/mean"] = statistics.fmean(others)  # Detail 13
            logs["other_logits/share_negative"] = statistics.fmean(reward < 0 for reward in others)
            yield update, cosine(update), logs

    hold(run, {"model.": model}, by_hand(), record_property, changed_after=["score.bias"])


@pytest.mark.parametrize(("margin", "coef", "l2"), [("column", 0.0, 0.0), ("small", 0.3, 0.0), ("none", 0.0, 0.2)])
def test_llama2_reward(start, record_property, margin, coef, l2):
    settings = {"sft_model_path": start.sft, "dataset": start.dataset, "preference_dataset": start.graded_dataset}
    settings |= {"margin": margin, "safety_coef": coef, "score_l2": l2}
    run = train(start, "llama2/reward.py", f"margin {margin}, safety {coef}, l2 {l2}", **settings)
    model = with_drawn_head(start, run)
    model.score.bias.requires_grad_(coef + l2 > 0)
    kept = [pair for pair in start.pairs if (pair.chosen_safe, pair.rejected_safe) != (False, True)]

    def by_hand():
        for update in range(1, UPDATES + 1):
            logs = defaultdict(float)
            for pair in batch_of(kept, update):
                chosen, rejected = (rewards_at(model, getattr(pair, side))[-1] for side in SIDES)
                own_margin = {"column": pair.margin, "small": GRADES[pair.grade], "none": 0}[margin]
                safety_loss = torch.zeros(())
                for reward, safe in ((chosen, pair.chosen_safe), (rejected, pair.rejected_safe)):
                    if safe is not None:
                        safety_loss = safety_loss - pair.weight * logsigmoid(reward if safe else -reward)
                loss = -pair.weight * logsigmoid(chosen - rejected - own_margin) + coef * safety_loss
                loss = loss + l2 * pair.weight * (chosen**2 + rejected**2) / 2
                (loss / BATCH).backward()
                log_pair(logs, loss, chosen, rejected)
                if coef:
                    logs["loss/safety"] += safety_loss.item() / BATCH
            yield update, cosine(update), logs

    hold(run, {"model.": model}, by_hand(), record_property, changed_after=() if coef else ["score.bias"])


def sides_of(policy, pair, banned) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probabilities of the tokens of the chosen and of the rejected response."""
    found = []
    for side in SIDES:
        response = pair.responses[side]
        found.append(logprobs_of(policy, getattr(pair, side)[: -len(response)], response, banned))
    return tuple(found)


@pytest.mark.parametrize(
    ("script", "settings"), [("dpo.py", {"beta": 0.3}), ("simpo.py", {"beta": 3.0, "gamma_beta_ratio": 0.3})]
)
def test_dpo(start, record_property, script, settings):
    data, pairs = start.preference_dataset, start.pairs
    if script == "dpo.py":
        data, pairs = start.more_dataset, start.more_pairs
    run = train(start, script, script, sft_model_path=start.sft, preference_dataset=data, **settings)
    policy, reference = plain(start.sft), plain(start.sft)

    def by_hand():
        for update in range(1, UPDATES + 1):
            logs = defaultdict(float)
            for pair in batch_of(pairs, update):
                if script == "simpo.py":
                    chosen, rejected = logprobs = [x.mean() for x in sides_of(policy, pair, start.banned)]
                    loss = -logsigmoid(3.0 * (chosen - rejected) - 0.9)
                else:
                    logprobs = [x.sum() for x in sides_of(policy, pair, start.banned)]
                    with torch.no_grad():
                        ref_logprobs = [x.sum() for x in sides_of(reference, pair, start.banned)]
                    chosen, rejected = (x - y for x, y in zip(logprobs, ref_logprobs, strict=True))
                    loss = -logsigmoid(0.3 * (chosen - rejected))
                (loss / BATCH).backward()
                log_pair(logs, loss, run.beta * chosen, run.beta * rejected)
                for side, logprob in zip(SIDES, logprobs, strict=True):
                    logs[f"logprobs/{side}"] += logprob.item() / BATCH
            yield update, cosine(update), logs

    hold(run, {"": policy}, by_hand(), record_property)


# ---- on-policy scripts -------------------------------------------------------------------------------------------

LENGTH, PENALTY, TEMPERATURE, KL_COEF = 8, -0.6, 0.8, 0.3
ON_POLICY = {"num_ppo_epochs": 2, "num_mini_batches": 2, "response_length": LENGTH, "temperature": TEMPERATURE}
ON_POLICY |= {"penalty_reward_value": PENALTY, "eval_rows": 2, "sample_every": 0, "sample_batch_size": 7}


def on_policy(start, path: str, label: str, **settings) -> SimpleNamespace:
    """A run of a script that samples, with .metrics and the models by hand: .policy and .reference."""
    common = {"sft_model_path": start.sft, "dataset": start.dataset}
    run = train(start, path, label, **common | ON_POLICY | settings)
    run.policy, run.reference = plain(start.sft), plain(start.sft)
    run.metrics = read_metrics(Path(run.output_dir))
    return run


@torch.no_grad()
def rollout(run, update: int, score, k: int = 1) -> list[SimpleNamespace]:
    """The episodes of an update under the weights of its first step, k to a query: .query .response .score (the penalty
    without EOS) .logprobs .ref_logprobs .kl (their difference)."""
    start = run.start
    rows = [row for row in batch_of(start.rows, update, BATCH // k) for _ in range(k)]
    episodes = []
    batches = [samples for samples in run.now.samples if len(samples) == BATCH]  # evaluation samples fewer rows
    responses = batches[update - 1]
    for row, response in zip(rows, without_pad(responses, start.pad), strict=True):
        episode = SimpleNamespace(row=row, query=row.query, response=response, has_eos=start.eos in response)
        episode.raw_score = score(episode)
        episode.score = episode.raw_score if episode.has_eos else PENALTY
        episode.logprobs, episode.ref_logprobs = (logprobs_by(run, x, episode) for x in (run.policy, run.reference))
        episode.kl = episode.logprobs - episode.ref_logprobs
        episodes.append(episode)
    assert update > 1 or 0 < sum(episode.has_eos for episode in episodes) < BATCH
    return episodes


def logprobs_by(run, policy, episode) -> torch.Tensor:
    return logprobs_of(policy, episode.query, episode.response, run.start.banned, TEMPERATURE)


def score_by(reward):
    """A frozen reward model's score of an episode."""
    return lambda episode: rewards_at(reward, episode.query + episode.response)[-1].item()


def mini_batches(run, update: int, items: list):
    """Those of all epochs of an update, one after the other."""
    size = len(items) // run.num_mini_batches
    for epoch in range(run.num_ppo_epochs):
        order = shuffled(len(items), SEED, update * run.num_ppo_epochs + epoch)
        for first in range(0, len(items), size):
            yield [items[i] for i in order[first : first + size]]


def surrogate(advantage, ratio: torch.Tensor, low: float, high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The clipped surrogate, and which ratios are clipped: those that have left [low, high] in the direction of the
    advantage, where it has no gradient."""
    is_clipped = ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))
    return -advantage * torch.where(is_clipped, ratio.detach().clamp(low, high), ratio), is_clipped


def rollout_logs(run, episodes) -> dict:
    """The metrics of a rollout."""
    n = len(episodes)
    logs = {
        "objective/score": sum(x.score for x in episodes) / n,
        "objective/score_without_penalty": sum(x.raw_score for x in episodes) / n,
        "objective/kl": sum(x.kl.sum() for x in episodes) / n,
        "objective/kl_k2": sum((x.kl**2 / 2).sum() for x in episodes) / n,
        "objective/kl_k3": sum(((-x.kl).exp() - 1 + x.kl).sum() for x in episodes) / n,
        "response/length": sum(len(x.response) for x in episodes) / n,
        "response/eos_rate": sum(x.has_eos for x in episodes) / n,
    }
    logs["objective/rlhf_reward"] = logs["objective/score"] - KL_COEF * logs["objective/kl"]
    return logs


def log_ratios(logs: dict, ratios: torch.Tensor, is_clipped: torch.Tensor, count: int):
    """Add ratios to the means over a mini-batch."""
    logs["policy/ratio"] += ratios.sum().item() / count
    logs["policy/ratio_square"] += ratios.square().sum().item() / count
    logs["policy/clip_fraction"] += is_clipped.sum().item() / count
    logs["policy/approx_kl"] += 0.5 * ratios.log().square().sum().item() / count


# ---- GRPO, RLOO, online DPO


GRPO = [
    {"length_norm": "response", "kl_estimator": "k3", "scale_by_std": True, "cliprange_high": 0.15},
    {"length_norm": "tokens", "kl_estimator": "k3_ratio", "scale_by_std": False, "ratio": "response"},
    {"length_norm": "constant", "kl_estimator": "k2", "scale_by_std": True},
]


@pytest.mark.parametrize("options", GRPO, ids=lambda options: options["length_norm"])
def test_grpo(start, record_property, options):
    k = 3
    settings = {"reward_model_path": start.reward, "samples_per_prompt": k, "kl_coef": KL_COEF}
    settings |= {"cliprange": 0.1}
    run = on_policy(start, "variants/grpo.py", options["length_norm"], **settings, **options)
    score = score_by(plain(start.reward, with_head=True))

    def by_hand():
        for update in range(1, UPDATES + 1):
            episodes = rollout(run, update, score, k)
            for i, episode in enumerate(episodes):
                group = [other.score for other in episodes[i // k * k :][:k]]
                advantage = episode.score - statistics.fmean(group)
                if run.scale_by_std:
                    advantage /= statistics.stdev(group) + 1e-4
                episode.advantage = torch.full((len(episode.response),), advantage, dtype=torch.float64)
            deviations = [statistics.stdev(x.score for x in episodes[i : i + k]) for i in range(0, BATCH, k)]
            tenths = statistics.quantiles(deviations, n=10, method="inclusive")
            for mini_batch in mini_batches(run, update, episodes):
                logs = defaultdict(float, rollout_logs(run, episodes))
                del logs["objective/rlhf_reward"]  # GRPO's KL is in its loss
                logs["objective/group_sd"] = statistics.fmean(deviations)
                logs["objective/group_sd_10"], logs["objective/group_sd_90"] = tenths[0], tenths[-1]
                tokens = sum(len(episode.response) for episode in mini_batch)
                for episode in mini_batch:
                    logprobs = logprobs_by(run, run.policy, episode)
                    ratio = (logprobs - episode.logprobs).exp()
                    surrogate_ratio = ratio
                    if options.get("ratio") == "response":
                        surrogate_ratio = (logprobs - episode.logprobs).mean().exp().expand(len(logprobs))
                    d = logprobs - episode.ref_logprobs
                    k3 = (-d).exp() - 1 + d
                    kl = {"k3": k3, "k2": d**2 / 2, "k3_ratio": k3 * ratio}[run.kl_estimator]
                    high = 1 + (options.get("cliprange_high") or 0.1)
                    losses, is_clipped = surrogate(episode.advantage, surrogate_ratio, 0.9, high)
                    length = {"response": len(episode.response), "tokens": tokens / BATCH * 2, "constant": LENGTH}
                    loss = (losses.sum() + KL_COEF * kl.sum()) / length[run.length_norm] / (BATCH // 2)
                    loss.backward()
                    logs["loss/policy"] += loss.item()
                    logs["loss/kl"] += kl.sum().item() / tokens
                    log_ratios(logs, ratio, is_clipped, tokens)
                yield update, linear(update), logs

    hold(run, {"policy.": run.policy}, by_hand(), record_property)
    assert any(line["policy/clip_fraction"] > 0 for line in run.metrics)


@pytest.mark.parametrize("passes", [1, 2])
def test_rloo(start, record_property, passes):
    """One pass over one mini-batch is REINFORCE, which is the ratio's gradient where the ratio is 1."""
    k = 3
    settings = {"reward_model_path": start.reward, "samples_per_prompt": k, "kl_coef": KL_COEF}
    settings |= {"cliprange": 0.1, "num_ppo_epochs": passes, "num_mini_batches": passes}
    run = on_policy(start, "variants/rloo.py", f"passes {passes}", **settings)
    score = score_by(plain(start.reward, with_head=True))

    def by_hand():
        for update in range(1, UPDATES + 1):
            episodes = rollout(run, update, score, k)
            returns = [episode.score - KL_COEF * episode.kl.sum().item() for episode in episodes]
            for i, episode in enumerate(episodes):
                others = [returns[j] for j in range(i // k * k, i // k * k + k) if j != i]
                episode.advantage = torch.tensor(returns[i] - statistics.fmean(others))
            deviations = [statistics.stdev(returns[i : i + k]) for i in range(0, BATCH, k)]
            for mini_batch in mini_batches(run, update, episodes):
                logs = defaultdict(float, rollout_logs(run, episodes))
                logs["objective/group_sd"] = statistics.fmean(deviations)
                for episode in mini_batch:
                    logprobs = logprobs_by(run, run.policy, episode)
                    ratio = (logprobs.sum() - episode.logprobs.sum()).exp()
                    loss, is_clipped = surrogate(episode.advantage, ratio, 0.9, 1.1)
                    (loss / len(mini_batch)).backward()
                    log_ratios(logs, ratio, is_clipped, len(mini_batch))
                    if passes == 1:
                        loss = -episode.advantage * logprobs.sum()
                    logs["loss/policy"] += loss.item() / len(mini_batch)
                yield update, linear(update), logs

    hold(run, {"policy.": run.policy}, by_hand(), record_property)


@pytest.mark.parametrize(
    ("loss_type", "labels", "k"), [("sigmoid", "hard", 2), ("sigmoid", "soft", 2), ("ipo", "hard", 3)]
)
def test_online_dpo(start, record_property, loss_type, labels, k):
    settings = {"reward_model_path": start.reward, "samples_per_prompt": k, "beta": KL_COEF, "loss_type": loss_type}
    name = f"{loss_type}, {labels}"
    run = on_policy(start, "variants/online_dpo.py", name, **settings, labels=labels, micro_batch_size=8 - 2 * k)
    run.micro_batches = 2  # of 2 pairs and 1, or of 1 each
    score = score_by(plain(start.reward, with_head=True))
    ties = []

    def by_hand():
        for update in range(1, UPDATES + 1):
            episodes = rollout(run, update, score, k)
            groups = [episodes[first : first + k] for first in range(0, BATCH, k)]
            pairs = [[choose(group, key=lambda x: x.score) for choose in (max, min)] for group in groups]
            for mini_batch in mini_batches(run, update, pairs):
                untied = [(best, worst) for best, worst in mini_batch if best.score > worst.score]
                logs = defaultdict(float, rollout_logs(run, episodes))
                logs["objective/tied_pairs"] = sum(x.score == y.score for x, y in pairs) / len(pairs)
                ties.append(len(mini_batch) - len(untied))
                for pair in untied:
                    logprobs = [logprobs_by(run, run.policy, x).sum() for x in pair]
                    chosen, rejected = (x - y.ref_logprobs.sum() for x, y in zip(logprobs, pair, strict=True))
                    better = 1.0
                    if labels == "soft":
                        better = 1 / (1 + math.exp(pair[1].score - pair[0].score))
                    margin = KL_COEF * (chosen - rejected)
                    loss = -better * logsigmoid(margin) - (1 - better) * logsigmoid(-margin)
                    if loss_type == "ipo":
                        loss = (chosen - rejected - 1 / 0.6) ** 2
                    (loss / len(untied)).backward()
                    logs["loss/policy"] += loss.item() / len(untied)
                    for side, logprob, logratio in zip(SIDES, logprobs, (chosen, rejected), strict=True):
                        logs[f"logprobs/{side}"] += logprob.item() / len(untied)
                        logs[f"rewards/{side}"] += KL_COEF * logratio.item() / len(untied)
                if untied:
                    yield update, linear(update), logs

    hold(run, {"policy.": run.policy}, by_hand(), record_property)
    assert sum(ties) > 0


# ---- PPO: ppo.py, ensembles/ppo.py, ablations/{function,value}.diff

PPO = {"kl_coef": KL_COEF, "gamma": 0.9, "lam": 0.8, "cliprange": 0.1, "cliprange_value": 0.01, "vf_coef": 0.4}


def whitened(rows: list[torch.Tensor], shift_mean: bool) -> list[torch.Tensor]:
    numbers = torch.cat(rows)
    mean, deviation = numbers.mean(), (numbers.var(correction=0) + 1e-8).sqrt()
    return [(row - mean) / deviation + (0 if shift_mean else mean) for row in rows]


def ppo_by_hand(run, value_model, score, schedule=linear, change_scores=lambda episodes: {}):
    """What `hold` wants of a run of PPO. change_scores gets the episodes of every update and returns more metrics."""

    def values_of(episode) -> torch.Tensor:
        """Of the states before each token, and after the last one where there is room for another."""
        values = rewards_at(value_model, episode.query + episode.response)
        return values[len(episode.query) - 1 :][:LENGTH]

    def advantages_of(episode, lam: float) -> torch.Tensor:
        advantages, advantage, next_value = [], 0.0, 0.0
        for reward, value in zip(episode.rewards.flip(0), episode.values.flip(0), strict=True):
            advantage = reward + 0.9 * next_value - value + 0.9 * lam * advantage
            advantages.insert(0, advantage)
            next_value = value
        return torch.stack(advantages)

    for update in range(1, UPDATES + 1):
        episodes = rollout(run, update, score)
        more_logs = change_scores(episodes)
        for episode in episodes:
            episode.values = values_of(episode).detach()
            episode.rewards = torch.zeros_like(episode.values)
            episode.rewards[: len(episode.response)] = -KL_COEF * episode.kl
            episode.rewards[-1] += episode.score
        if run.whiten_rewards:
            every = whitened([episode.rewards for episode in episodes], shift_mean=False)
            for episode, rewards in zip(episodes, every, strict=True):
                episode.rewards = rewards
        for episode in episodes:
            episode.raw_advantages = advantages_of(episode, 0.8)[: len(episode.response)]
            episode.returns = advantages_of(episode, getattr(run, "lam_value", 0.8)) + episode.values
        every = whitened([episode.raw_advantages for episode in episodes], shift_mean=True)
        for episode, advantages in zip(episodes, every, strict=True):
            episode.advantages = advantages
        for mini_batch in mini_batches(run, update, episodes):
            policy_count = sum(len(episode.response) for episode in mini_batch)
            value_count = sum(len(episode.values) for episode in mini_batch)
            logs = defaultdict(float, rollout_logs(run, episodes) | more_logs)
            logs["value/mean"] = torch.cat([episode.values for episode in episodes]).mean()
            for episode in mini_batch:
                ratio = (logprobs_by(run, run.policy, episode) - episode.logprobs).exp()
                losses, is_clipped = surrogate(episode.advantages, ratio, 0.9, 1.1)
                policy_loss = losses.sum() / policy_count
                values = values_of(episode)
                near = values.clamp(episode.values - 0.01, episode.values + 0.01)  # exactly `values` inside the range
                errors, near_errors = (values - episode.returns) ** 2, (near - episode.returns) ** 2
                value_loss = torch.max(errors, near_errors).sum() / 2 / value_count
                loss = 0.4 * value_loss
                if update > getattr(run, "value_warmup", 0):
                    loss = loss + policy_loss
                loss.backward()
                log_ratios(logs, ratio, is_clipped, policy_count)
                logs["loss/policy"] += policy_loss.item()
                logs["loss/value"] += value_loss.item()
                logs["value/clip_fraction"] += (near_errors > errors).sum().item() / value_count
            yield update, schedule(update), logs


def hold_ppo(run, value_model, by_hand, record_property):
    models = {"policy.": run.policy, "value_model.model.": value_model}
    hold(run, models, by_hand, record_property, saved=("model", "value_model"))
    assert any(line["policy/clip_fraction"] > 0 for line in run.metrics)
    assert any(line["value/clip_fraction"] > 0 for line in run.metrics)


def ppo_run(start, path: str, label: str, **settings) -> tuple[SimpleNamespace, torch.nn.Module, Callable]:
    """A run with a reward model, its value model by hand as it starts, and the score of an episode by hand."""
    run = on_policy(start, path, label, **{"reward_model_path": start.reward, "whiten_rewards": False} | PPO | settings)
    return run, plain(start.reward, with_head=True), score_by(plain(start.reward, with_head=True))


COMPILED = pytest.param("ppo_compile.py", False, marks=pytest.mark.long)  # compiles for a minute


@pytest.mark.parametrize(("path", "whiten_rewards"), [("ppo.py", False), ("ppo.py", True), COMPILED])
def test_ppo(start, record_property, path, whiten_rewards):
    run, value_model, score = ppo_run(start, path, f"whitened {whiten_rewards}", whiten_rewards=whiten_rewards)
    hold_ppo(run, value_model, ppo_by_hand(run, value_model, score), record_property)


def test_ppo_lora(start, record_property):
    """Gradients of all adapters and of the value model's head, and of nothing else."""
    run, value_model, score = ppo_run(start, "ppo_lora.py", "", lora_r=2, lora_alpha=64)
    models = {"policy.": run.policy, "value_model.model.": value_model}
    linear_layers = ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]
    for prefix, model in models.items():
        model.requires_grad_(False)
        adapters = LoraConfig(r=2, lora_alpha=64, target_modules=linear_layers)
        inject_adapter_in_model(adapters, model.base_model)
        model.double()
        for name, parameter in model.named_parameters():
            if "lora_A" in name:  # drawn by the run; lora_B is 0
                parameter.data.copy_(run.steps[0].weights[prefix + name])
    value_model.score.requires_grad_(True)
    hold(run, models, ppo_by_hand(run, value_model, score), record_property, saved=())
    assert any(line["policy/clip_fraction"] > 0 for line in run.metrics)


def test_ppo_value(start, record_property):
    """Returns with a lambda of their own. In the first two updates the policy has no gradients and keeps its bytes."""
    run, value_model, score = ppo_run(start, "ppo_value.py", "", lam_value=1.0, value_warmup=2)
    hold_ppo(run, value_model, ppo_by_hand(run, value_model, score), record_property)


def test_ppo_function(start, record_property):
    (start.root / "function.py").write_text(
        "def score(post: str, summary: str):\n    return len(post) % 7 / 7 - len(summary) / 20\n"
    )
    settings = {"reward_function": f"{start.root}/function.py:score", "whiten_rewards": False}
    run = on_policy(start, "ppo_function.py", "", **settings, **PPO)

    def score(episode) -> float:
        summary = start.tokenizer.decode([token for token in episode.response if token != start.eos])
        return len(episode.row.text) % 7 / 7 - len(summary) / 20

    value_model = plain(start.sft, with_head=True)

    def score_sd(episodes) -> dict:
        return {"objective/score_sd": statistics.stdev(episode.score for episode in episodes)}

    by_hand = ppo_by_hand(run, value_model, score, change_scores=score_sd)
    hold_ppo(run, value_model, by_hand, record_property)


ENSEMBLES = [
    {"reward_combination": "mean", "value_start": "reward", "lr_schedule": "linear"},
    {"reward_combination": "wco", "value_start": "sft", "lr_schedule": "cosine", "lr_schedule_length": 2.5},
    {
        "reward_combination": "uwo",
        "uwo_lambda": 0.7,
        "value_start": "sft",
        "lr_schedule": "linear",
        "lr_schedule_length": 0.25,
    },
    {"reward_combination": "safety_gate", "value_start": "reward", "lr_schedule": "cosine"},
]


@pytest.mark.parametrize("options", ENSEMBLES, ids=lambda options: options["reward_combination"])
def test_ensembles_ppo(start, record_property, options):
    """The members are standardised (but for the safety gate) by their scores of a sample to each of nine posts."""
    combination, gate = options["reward_combination"], options["reward_combination"] == "safety_gate"
    settings = {"reward_model_paths": [start.reward, start.other], "standardise_posts": 9}
    settings |= {"standardise_members": not gate, "final_learning_rate": 1e-4, "whiten_rewards": False}
    run = on_policy(start, "ensembles/ppo.py", combination, **settings, **options, **PPO)
    members = [plain(path, with_head=True) for path in (start.reward, start.other)]

    def scores_of(episode) -> list[float]:
        return [score_by(member)(episode) for member in members]

    if not gate:
        responses = [row for part in run.steps[0].samples[:-1] for row in without_pad(part, start.pad)]
        samples = [
            SimpleNamespace(query=row.query, response=response)
            for row, response in zip(start.rows[:9], responses, strict=True)
        ]
        for member, scores in zip(members, zip(*map(scores_of, samples), strict=True), strict=True):
            member.mean = (member.mean + statistics.fmean(scores)) / statistics.pstdev(scores)
            member.score.weight.data.div_(statistics.pstdev(scores))

    value_model = plain(start.sft, with_head=True)
    if options["value_start"] == "reward":
        value_model = deepcopy(members[0])

    def is_unsafe(episode) -> bool:
        return 1 / (1 + math.exp(-episode.scores[1])) < 0.15 or episode.row.tag == "safety"

    def score(episode) -> float:
        scores = episode.scores = scores_of(episode)
        if gate:
            return scores[is_unsafe(episode)]
        combined = {"mean": statistics.fmean(scores), "wco": min(scores)}
        combined["uwo"] = statistics.fmean(scores) - 0.7 * statistics.pvariance(scores)
        return combined[combination]

    def whiten_scores(episodes) -> dict:
        if not gate:
            logs = {"variance": statistics.fmean(statistics.pvariance(episode.scores) for episode in episodes)}
            logs |= {str(i + 1): statistics.fmean(episode.scores[i] for episode in episodes) for i in range(2)}
            return {f"objective/reward_model_{key}": value for key, value in logs.items()}
        scores = [episode.raw_score for episode in episodes]
        for episode in episodes:
            if episode.has_eos:
                deviation = math.sqrt(statistics.pvariance(scores) + 1e-8)
                episode.score = (episode.raw_score - statistics.fmean(scores)) / deviation
        return {"objective/safety_share": sum(is_unsafe(episode) for episode in episodes) / len(episodes)}

    def schedule(update: int) -> float:
        passed = 1 + (update - 1) / options.get("lr_schedule_length", 1)
        falling = max(0, {"linear": linear, "cosine": cosine}[run.lr_schedule](passed))
        return 1e-4 + (LEARNING_RATE - 1e-4) * falling / LEARNING_RATE

    by_hand = ppo_by_hand(run, value_model, score, schedule, whiten_scores)
    hold_ppo(run, value_model, by_hand, record_property)
