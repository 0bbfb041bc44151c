"""Our side of parity.py: the stage scripts run as whole programs, and what they find under the names of the comparison.

The one file that knows how our functions are called. A renamed function is one line in FUNCTIONS; a deviation from the
authors' code that has a number is one entry in DEVIATIONS, with what undoes it.
"""

import importlib.util
import json
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from accelerate.state import AcceleratorState
from datasets import load_from_disk
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "eval")]  # for best_of_n.py, which is loaded from a copy elsewhere
FUNCTIONS = {
    "samples responses": "generate",
    "log-probabilities and values": "forward_passes",
    "puts the score into token rewards": "token_rewards",
    "advantages and returns": "gae",
    "whitens": "whiten",
    "one step": "optimizer_step",
    "a new reward model": "new_reward_model",
    "a trained reward model": "load_reward_model",
    "order of the rows": "data_order",
    "order within an update": "permutation",
}


@dataclass
class Deviation:
    quantities: str
    """regular expression of the quantities that it moves"""
    script: str
    told: str
    """what the script's docstring says of it: the beginning of a sentence there"""
    undone: list[tuple[str, str]]
    """texts of the script and what takes their place where the deviation is undone"""


TIDY = """
def tidy(text):
    for old, new in ((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
                     (" 's", "'s"), (" 've", "'ve"), (" 're", "'re")):
        text = text.replace(old, new)
    return text


def query_columns("""  # what decode() of the old library does to a text
DEVIATIONS = [
    Deviation(
        "PPO.*(policy clip fraction|approximate KL)",
        "ppo.py",
        "The policy loss is divided by the size of the response mask",
        [
            (
                "logs[key] += value.detach() / policy_count",
                'every = policy_count if key == "loss/policy" else mini_batch.numel() * args.response_length\n'
                "                        logs[key] += value.detach() / every",
            )
        ],
    ),
    Deviation(
        "ensembles: UWO in PPO",
        "ensembles/ppo.py",
        "uwo's variance is over k models",
        [
            (
                "variance = (scores - mean).square().mean(0)",
                "variance = (scores - mean).square().sum(0) / (len(scores) - 1)",
            )
        ],
    ),
    Deviation(
        "tokens.*(query_reference_response|query_chosen|query_rejected)",
        "tldr_dataset.py",
        "`query` is the formatted text",
        [
            ("def query_columns(", TIDY.strip("\n")),
            ('        "query": query,\n', '        "query": tidy(query),\n'),
        ],
    ),
    Deviation(
        "tokens.*CNN/DM.*response_label",
        "tldr_dataset.py",
        "The response label hides the tokens",
        [("shared = len(os.path.commonprefix([query_token, joined_tokens]))", "shared = len(query_token)")],
    ),
]


def load(script: str, folder: Path, patches=()):
    """A script as a module of its own, with these texts replaced; each must be there once."""
    text = (ROOT / script).read_text()
    for old, new in patches:
        if text.count(old) != 1:
            raise SystemExit(f"error: {script} does not hold this text once, which ours.py replaces: {old}")
        text = text.replace(old, new)
    path = folder / "scripts" / f"{Path(script).stem}_{abs(hash(text)):x}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where dataclasses look for annotations
    spec.loader.exec_module(module)
    return module


def wrap(module, role: str, make):
    """Put make(function) in the place of the function that has this role."""
    name = FUNCTIONS[role]
    setattr(module, name, make(getattr(module, name)))


def run(module, folder: Path, **arguments):
    """One run of a script in this process, into an empty folder; the lines of its metrics."""
    shutil.rmtree(folder, ignore_errors=True)
    AcceleratorState._reset_state(True)  # accelerate keeps one state a process
    module.main(module.Args(output_dir=str(folder), mixed_precision="no", **arguments))
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def flat(state: dict) -> torch.Tensor:
    """One vector of a state in the order of its names, without the bias of a reward's head."""
    state = {key.replace("embed_out.", "lm_head.").removeprefix("model."): x for key, x in state.items()}
    kept = sorted(key for key in state if key != "score.bias")
    return torch.cat([state[key].detach().double().flatten() for key in kept])


def reward_mean(folder: Path) -> torch.Tensor:
    """The constant (1,) that is subtracted from the output of a saved head."""
    return torch.tensor([json.loads((folder / "config.json").read_text())["reward_mean"]], dtype=torch.float64)


def column(lines: list[dict], key: str) -> torch.Tensor:
    return torch.tensor([line[key] for line in lines if key in line], dtype=torch.float64)


def watch_first_gradient(module) -> list[torch.Tensor]:
    """A list that gets the gradient of the first step."""
    found = []

    def make(step):
        def watched(accelerator, model, optimizer, *more):
            if not found:
                trained = accelerator.unwrap_model(model).named_parameters()
                found.append(flat({key: x.grad for key, x in trained if x.grad is not None}))
            return step(accelerator, model, optimizer, *more)

        return watched

    wrap(module, "one step", make)
    return found


def rows_of(data: Path, indices: torch.Tensor) -> dict:
    return load_from_disk(str(data))["train"].with_format("torch")[indices.tolist()]


def batches(script: str, work: Path, data: Path, batch_size: int, updates: int, columns: list[str]) -> list[dict]:
    """The rows that a stage trains on in each update."""
    module = load(script, work)
    n = len(load_from_disk(str(data))["train"])
    order = getattr(module, FUNCTIONS["order of the rows"])(n, 1, 0, batch_size * updates)
    return [{key: rows_of(data, part)[key] for key in columns} for part in order.split(batch_size)]


# ---- SFT, reward model, DPO ---------------------------------------------------------------------------------------


def sft(work: Path, patches, job: dict) -> dict:
    module = load("sft.py", work, patches)
    gradient = watch_first_gradient(module)
    lines = run(module, work / "run_sft", model=job["model"], dataset=job["sft_data"], **job["arguments"])
    return {
        "loss": column(lines, "loss/train"),
        "learning rate": column(lines, "learning_rate"),
        "gradient of the first update": gradient[0],
        "weights after the last update": flat(load_file(work / "run_sft/model/model.safetensors")),
    }


def reward(work: Path, patches, job: dict) -> dict:
    module = load("reward.py", work, patches)

    def make(new):
        def with_their_head(*arguments):
            model = new(*arguments)
            model.model.score.weight.data.copy_(job["head"])
            return model

        return with_their_head

    wrap(module, "a new reward model", make)
    gradient = watch_first_gradient(module)
    arguments = job["arguments"] | {"model": "small", "sft_model_path": job["model"], "dataset": job["sft_data"]}
    lines = run(module, work / "run_reward", preference_dataset=job["pair_data"], **arguments)
    return {
        "loss": column(lines, "loss/train"),
        "accuracy": column(lines, "accuracy/train"),
        "margin of the rewards": column(lines, "rewards/margin"),
        "learning rate": column(lines, "learning_rate"),
        "gradient of the first update": gradient[0],
        "weights after the last update": flat(load_file(work / "run_reward/model/model.safetensors")),
        "centred rewards of the references": rewards(work, work / "run_reward/model", job["references"]),
    }


@torch.no_grad()
def rewards(work: Path, folder: Path, references: torch.Tensor) -> torch.Tensor:
    """Rewards of right-padded rows by a checkpoint folder, as ppo.py loads it."""
    module = load("ppo.py", work)
    tokenizer = module.load_tokenizer(str(folder))
    model = getattr(module, FUNCTIONS["a trained reward model"])(str(folder), tokenizer).eval()
    found = []
    for row in references:
        tokens = row[row != tokenizer.pad_token_id][None]
        found.append(model(tokens)[0, -1].item())
    return torch.tensor(found, dtype=torch.float64)


def head_initialisation(work: Path, model: str) -> dict:
    """The standard deviation that the new head is drawn with."""
    module = load("reward.py", work)
    found, normal = [], torch.nn.init.normal_
    torch.nn.init.normal_ = lambda tensor, mean=0.0, std=1.0, **more: (
        found.append(std) or normal(tensor, mean, std, **more)
    )
    getattr(module, FUNCTIONS["a new reward model"])(model, module.load_tokenizer(model))
    torch.nn.init.normal_ = normal
    return {"standard deviation of a new head": torch.tensor([found[-1]], dtype=torch.float64)}


def dpo(work: Path, patches, job: dict) -> dict:
    module = load("dpo.py", work, patches)
    gradient = watch_first_gradient(module)
    arguments = job["arguments"] | {"model": "small", "sft_model_path": job["model"]}
    arguments |= {"loss_type": "ipo" if job["ipo"] else "sigmoid", "label_smoothing": job["label_smoothing"]}
    lines = run(module, work / "run_dpo", preference_dataset=job["pair_data"], **arguments)
    return {
        "loss": column(lines, "loss/train"),
        "learning rate": column(lines, "learning_rate"),
        "log-probability of chosen": column(lines, "logprobs/chosen"),
        "log-probability of rejected": column(lines, "logprobs/rejected"),
        "implicit reward of chosen": column(lines, "rewards/chosen"),
        "gradient of the first update": gradient[0],
        "weights after the last update": flat(load_file(work / "run_dpo/model/model.safetensors")),
    }


# ---- PPO ----------------------------------------------------------------------------------------------------------


def truncated(responses: torch.Tensor, eos_id: int, pad_id: int) -> torch.Tensor:
    """Responses (b, R) with [PAD] after their first EOS, as ppo.py samples them."""
    is_eos = (responses == eos_id).int()
    return responses.masked_fill(is_eos.cumsum(1) - is_eos > 0, pad_id)


def ppo_permutations(work: Path, batch_size: int, update: int, epochs: int) -> list[torch.Tensor]:
    module = load("ppo.py", work)
    return [getattr(module, FUNCTIONS["order within an update"])(batch_size, 1 + update, i) for i in range(epochs)]


def ppo(work: Path, patches, job: dict) -> dict:
    module = load("ppo.py", work, patches)
    tokenizer = module.load_tokenizer(job["model"])
    pad_id = tokenizer.pad_token_id
    given = {}  # (update, tokens of a query) -> its response
    for update, (queries, responses) in enumerate(zip(job["queries"], job["responses"], strict=True)):
        for query, response in zip(queries, responses, strict=True):
            given[update, tuple(query[query != pad_id].tolist())] = response
    calls = []  # of each update: what its functions returned
    any_response = job["responses"][0][0]  # for the validation score after the last update

    def replay(generate):
        def sampled(model, queries, *more):
            keys = [(len(calls), tuple(row[row != pad_id].tolist())) for row in queries]
            found = torch.stack([given.get(key, any_response) for key in keys])
            found = truncated(found, tokenizer.eos_token_id, pad_id)
            return found, torch.zeros(found.shape)  # what the sampler's log-probabilities were is not compared

        return sampled

    def begin(passes):
        def watched(accelerator, model, ref_policy, batch, *more):
            outputs = passes(accelerator, model, ref_policy, batch, *more)
            calls.append({"batch": batch, "outputs": outputs})
            return outputs

        return watched

    def keep(name: str):
        def make(function):
            def watched(*arguments, **more):
                result = function(*arguments, **more)
                calls[-1].setdefault(name, []).append((arguments, result))
                return result

            return watched

        return make

    wrap(module, "samples responses", replay)
    wrap(module, "log-probabilities and values", begin)
    for role in ("puts the score into token rewards", "advantages and returns", "whitens"):
        wrap(module, role, keep(role))
    arguments = job["arguments"] | {"model": "small", "sft_model_path": job["model"], "dataset": job["sft_data"]}
    arguments |= {"reward_model_path": job["converted_reward_model"], "sample_every": 0, "eval_rows": 1}
    lines = run(module, work / "run_ppo", **arguments)
    quantities = {}
    for update, (call, line) in enumerate(zip(calls, lines, strict=False), 1):
        [(given_to, rewards)] = call["puts the score into token rewards"]
        if job["arguments"]["whiten_rewards"]:
            rewards = call["whitens"][0][1]
        [(_, (_, returns))] = call["advantages and returns"]
        found = {
            "responses after truncation": call["batch"]["responses"],
            "log-probabilities": call["outputs"]["logprobs"],
            "log-probabilities of the reference": call["outputs"]["ref_logprobs"],
            "values": call["outputs"]["values"],
            "scores": given_to[0],
            "token rewards": rewards,
            "returns": returns * call["batch"]["value_mask"],
            "advantages": call["whitens"][-1][1],
            "objective/kl": [line["objective/kl"]],
            "objective/score": [line["objective/score"]],
            "RLHF reward": [line["objective/rlhf_reward"]],
            "policy loss": [line["loss/policy"]],
            "value loss": [line["loss/value"]],
            "policy clip fraction": [line["policy/clip_fraction"]],
            "value clip fraction": [line["value/clip_fraction"]],
            "approximate KL to the old policy": [line["policy/approx_kl"]],
            "learning rate": [line["learning_rate"]],
        }
        quantities |= {f"update {update}: {key}": torch.as_tensor(x).double() for key, x in found.items()}
    policy, value = (load_file(work / f"run_ppo/{name}/model.safetensors") for name in ("model", "value_model"))
    quantities["weights of the policy after the last update"] = flat(policy)
    quantities["weights of the value model after the last update"] = flat(value)
    quantities["bias of the value model after the last update"] = -reward_mean(work / "run_ppo/value_model")
    return quantities


# ---- tokens -------------------------------------------------------------------------------------------------------


def tokenise(work: Path, patches, posts: list[dict], pairs: list[dict], tokenizer) -> dict:
    """Our columns of raw posts and pairs; None where a row is refused."""
    module = load("tldr_dataset.py", work, patches)
    args = module.Args(tokenizer="-")
    rows = {"sft": [], "preference": []}
    for name, raw, process in (
        ("sft", posts, lambda row, *rest: module.process_sft_row(module.post_fields(row), *rest)),
        ("preference", pairs, lambda row, *rest: module.process_preference_row(module.pair_fields(row), *rest)),
    ):
        for row in raw:
            try:
                rows[name].append(process(row, tokenizer, args))
            except ValueError:
                rows[name].append(None)
    return rows


def make_data(work: Path, posts: Path, pairs: Path, tokenizer: str, limits: dict) -> tuple[str, str]:
    """The two data sets of the runs: folders of SFT and preference data."""
    module = load("tldr_dataset.py", work)
    shutil.rmtree(work / "data", ignore_errors=True)
    arguments = {"sft_dataset": str(posts), "preference_dataset": str(pairs), "tokenizer": tokenizer, **limits}
    module.main(module.Args(output_dir=str(work / "data"), num_proc=1, **arguments))
    return str(work / "data/sft"), str(work / "data/preference")


def line_of(deviation: Deviation) -> str:
    """Where the script's docstring tells of a deviation: file#Lnumber."""
    lines = (ROOT / deviation.script).read_text().splitlines()
    for number, line in enumerate(lines, 1):
        if re.sub(r"\s+", " ", deviation.told)[:40] in re.sub(r"\s+", " ", line):
            return f"{deviation.script}#L{number}"
    raise SystemExit(f"error: the docstring of {deviation.script} does not say: {deviation.told}")


# ---- ensembles -------------------------------------------------------------------------------------------------------


def ensembles(work: Path, patches, scores: torch.Tensor, gold: torch.Tensor, numbers: tuple[int, ...]) -> dict:
    """Scores of k models (k, b) as one; and of these, best of n of the b samples: the objective and `gold` (b,)."""
    combine = load("ensembles/ppo.py", work, patches).combine
    best = load("ensembles/best_of_n.py", work)
    uwo = combine(scores, "uwo", 0.5)
    found = {
        "mean": combine(scores),
        "WCO": combine(scores, "wco"),
        "UWO": combine(scores, "uwo", 0.5),
        "UWO in PPO": uwo,
    }
    weights = numpy.stack([best.bon_weights(n, scores.shape[1]) for n in numbers])
    objective = combine(scores)[None].numpy()
    values = best.bon_values(objective, [objective, gold[None].numpy()], weights)
    for name, value in zip(("objective", "gold"), values, strict=True):
        found[f"best of n, {name}"] = torch.tensor(value[0])
    return found


# ---- findings beyond the comparison ---------------------------------------------------------------------------------

# of their launch scripts: devices, rows of a micro-batch, micro-batches of a device, rows of a rollout's forward pass
LAUNCHES = {"1b": (8, 16, 4, 64), "2.8b": (8, 4, 16, 32), "6.9b": (8, 1, 64, 4)}


def episodes(work: Path, job: dict, rows: int, length: int):
    """ppo.py, its model, and a batch of episodes with random responses of which four in five end with EOS."""
    module = load("ppo.py", work)
    tokenizer = module.load_tokenizer(job["model"])
    policy = module.load_policy(job["model"], tokenizer)
    value_model = getattr(module, FUNCTIONS["a trained reward model"])(str(work / "converted"), tokenizer)
    model = module.PolicyAndValue(policy, value_model)
    generator = torch.Generator().manual_seed(3)
    queries = rows_of(Path(job["sft_data"]), torch.arange(rows) % 96)["query_token"]
    responses = torch.randint(1, tokenizer.eos_token_id + 200, (rows, length), generator=generator)
    responses[responses == tokenizer.eos_token_id] = 5
    ends = torch.randint(4, length, (rows,), generator=generator)
    ended = torch.rand(rows, generator=generator) < 0.8
    responses[ended, ends[ended]] = tokenizer.eos_token_id
    responses = truncated(responses, tokenizer.eos_token_id, tokenizer.pad_token_id)
    batch = module.make_batch(queries, responses, tokenizer.pad_token_id)
    scores = torch.randn(rows, generator=generator)
    return module, model, batch, scores


def forward(module, model, mb: dict):
    logits, values = model(mb["tokens"], mb["columns"])
    return module.token_logprobs(logits, mb["responses"], 0.7), values


def gradients(model) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of policy and value model, which are then 0 again."""
    found = []
    for part in (model.policy, model.value_model):
        found.append(torch.cat([x.grad.flatten() for x in part.parameters() if x.grad is not None]))
    model.zero_grad()
    return tuple(found)


def per_device_gradients(work: Path, job: dict, size: str) -> tuple[float, float]:
    """Cosines of the first step's gradient of policy and value model, of 512 episodes: with whitening per device and
    means per micro-batch, as the authors' launch of this size has them, against those of the whole batch."""
    devices, micro, accumulation, _ = LAUNCHES[size]
    module, model, batch, scores = episodes(work, job, devices * micro * accumulation, 24)
    rows = torch.arange(len(scores))
    for key in ("logprobs", "values"):
        batch[key] = torch.zeros(batch["responses"].shape)
    with torch.no_grad():
        for mb in module.micro_batches(batch, rows, 32):
            logprobs, values = forward(module, model, mb)
            width = logprobs.shape[1]
            batch["logprobs"][mb["rows"], :width] = logprobs * mb["response_mask"]
            batch["values"][mb["rows"], :width] = values * mb["value_mask"]
    rewards = module.token_rewards(scores, torch.zeros(batch["responses"].shape), batch["lengths"], 0.05)
    advantages, batch["returns"] = module.gae(rewards, batch["values"], 1.0, 0.95)
    found = []
    for per_device in (False, True):
        batch["advantages"] = module.whiten(advantages, batch["response_mask"])
        if per_device:
            parts = zip(advantages.chunk(devices), batch["response_mask"].chunk(devices), strict=True)
            batch["advantages"] = torch.cat([module.whiten(part, mask) for part, mask in parts])
        groups = rows.split(micro if per_device else 32)
        for group in groups:
            [mb] = module.micro_batches(batch, group, len(group))
            logprobs, values = forward(module, model, mb)
            pg_loss, _ = module.policy_loss(logprobs, mb, 0.2)
            vf_loss, _ = module.value_loss(values, mb, 0.2)
            masks = mb if per_device else batch
            share = len(groups) if per_device else 1
            loss = pg_loss / masks["response_mask"].sum() + 0.1 * vf_loss / masks["value_mask"].sum()
            (loss / share).backward()
        found.append(gradients(model))
    return tuple(torch.cosine_similarity(a, b, 0).item() for a, b in zip(*found, strict=True))


@torch.no_grad()
def bfloat16_ratios(work: Path, job: dict, size: str) -> dict:
    """|ratio - 1| before the first step under bfloat16 autocast on a CPU: old log-probabilities in the groups of the
    authors' rollout, new ones in their micro-batches, of 64 episodes."""
    _, micro, _, rollout = LAUNCHES[size]
    module, model, batch, _ = episodes(work, job, 64, 24)
    found = []
    for group_size in (rollout, micro):
        logprobs = torch.zeros(batch["responses"].shape)
        for group in torch.arange(64).split(group_size):
            [mb] = module.micro_batches(batch, group, len(group))
            with torch.autocast("cpu", torch.bfloat16):
                new, _ = forward(module, model, mb)
            logprobs[mb["rows"], : new.shape[1]] = new
        found.append(logprobs)
    off = ((found[1] - found[0]).exp() - 1).abs()[batch["response_mask"]]
    return {"mean": off.mean().item(), "largest": off.max().item(), "over 0.2": (off > 0.2).float().mean().item()}
