"""Our side of parity.py: runs our scripts as whole programs and returns their quantities, tensors with the same names
as in theirs.py. No other file of this folder calls our functions.

A deviation from the authors' code that changes a quantity has an entry in DEVIATIONS, with the patches that undo it.
"""

import importlib.util
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from accelerate.state import AcceleratorState
from datasets import load_from_disk
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
LEARNING_RATE = 1e-3  # large, so that the weights move
BATCH = 8  # rows of an update of SFT, reward model and DPO
PPO_BATCH = 16


@dataclass
class Deviation:
    """A deliberate difference from the authors' code."""

    quantities: str
    """regular expression of the quantities that it changes"""
    script: str
    sentence: str
    """the beginning of the sentence in the script's docstring that names it"""
    undone: list[tuple[str, str]]
    """texts of the script, and what replaces them where the deviation is undone"""


TIDY = """def tidy(text):
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
        "tokens: query_(reference_response|chosen|rejected)",
        "tldr_dataset.py",
        "`query` is the formatted text",
        [("def query_columns(", TIDY), ('        "query": query,\n', '        "query": tidy(query),\n')],
    ),
    Deviation(
        "tokens: .*response_label of .*CNN/DM",
        "tldr_dataset.py",
        "The response label hides the tokens",
        [("shared = len(os.path.commonprefix([query_token, joined_tokens]))", "shared = len(query_token)")],
    ),
]


def line_of(deviation: Deviation) -> str:
    """Return where the script's docstring names a deviation, as file#Lnumber."""
    for number, line in enumerate((ROOT / deviation.script).read_text().splitlines(), 1):
        if deviation.sentence[:40] in line:
            return f"{deviation.script}#L{number}"
    raise SystemExit(f"error: the docstring of {deviation.script} does not say: {deviation.sentence}")


# ---- scripts ------------------------------------------------------------------------------------------------------


def load(script: str, work: Path, patches=()):
    """Return a script as a module of its own, with each (old, new) of `patches` replaced. `old` must occur once."""
    text = (ROOT / script).read_text()
    for old, new in patches:
        if text.count(old) != 1:
            raise SystemExit(f"error: {script} does not hold this text once, which ours.py replaces: {old}")
        text = text.replace(old, new)
    path = work / "scripts" / f"{Path(script).stem}_{abs(hash(text)):x}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where dataclasses look for annotations
    spec.loader.exec_module(module)
    return module


def record(module, name: str, what=lambda *arguments: arguments) -> list:
    """Return a list that collects what(*arguments) of every later call of a module's function."""
    calls, function = [], getattr(module, name)

    def recorded(*arguments):
        calls.append(what(*arguments))
        return function(*arguments)

    setattr(module, name, recorded)
    return calls


def run(module, folder: Path, **arguments) -> list[dict]:
    """Run a script's main into an empty folder, and return the lines of its metrics."""
    shutil.rmtree(folder, ignore_errors=True)
    AcceleratorState._reset_state(True)  # accelerate keeps one state per process
    settings = {"seed": 1, "model": "small", "learning_rate": LEARNING_RATE, "mixed_precision": "no"}
    module.main(module.Args(output_dir=str(folder), **(settings | arguments)))
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def vector(state: dict) -> torch.Tensor:
    """Return a state as one vector, in the order of its names and without the bias of a reward model's head."""
    state = {key.replace("embed_out.", "lm_head.").removeprefix("model."): x for key, x in state.items()}
    return torch.cat([state[key].detach().double().flatten() for key in sorted(state) if key != "score.bias"])


def numbers(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def train_split(work: Path, data: str):
    """Return the training rows of work/data/sft or work/data/preference."""
    return load_from_disk(str(work / "data" / data))["train"].with_format("torch")


def first_rows(work: Path, script: str, data: str, columns: list[str], size: int, updates: int) -> list[dict]:
    """Return the rows that each update of a script trains on, `size` in each."""
    rows = train_split(work, data)
    order = load(script, work).data_order(len(rows), 1, 0, size * updates)
    return [{key: rows[part.tolist()][key] for key in columns} for part in order.split(size)]


# ---- data ---------------------------------------------------------------------------------------------------------


def make_data(work: Path, tokenizer: str):
    """Make the data of all runs, work/data/sft and work/data/preference, from work/posts and work/pairs."""
    module = load("tldr_dataset.py", work)
    shutil.rmtree(work / "data", ignore_errors=True)
    widths = {"max_query_length": 96, "max_sft_response_length": 40, "max_rm_response_length": 48}
    raw = {"sft_dataset": str(work / "posts"), "preference_dataset": str(work / "pairs"), "tokenizer": tokenizer}
    module.main(module.Args(output_dir=str(work / "data"), num_proc=1, **raw, **widths))


def tokens(work: Path, patches, posts: list[dict], pairs: list[dict], news: list[dict], tokenizer) -> dict:
    """Return the token columns of raw posts, pairs, and pairs about news."""
    module = load("tldr_dataset.py", work, patches)
    args = module.Args()
    rows = {"posts": [module.process_sft_row(module.post_fields(row), tokenizer, args) for row in posts]}
    for name, part in (("pairs", pairs), ("CNN/DM pairs", news)):
        rows[name] = [module.process_preference_row(module.pair_fields(row), tokenizer, args) for row in part]
    return {
        f"{column} of {len(part)} {name}": torch.tensor([row[column] for row in part])
        for name, part in rows.items()
        for column in part[0]
        if column.endswith(("_token", "_label"))
    }


# ---- SFT, reward model, DPO ---------------------------------------------------------------------------------------


def train(module, folder: Path, metrics: dict[str, str], **arguments) -> dict:
    """Run SFT, reward model or DPO for four updates. `metrics` maps further quantities to their keys in the log."""

    def gradient(accelerator, model, *_):
        parameters = accelerator.unwrap_model(model).named_parameters()
        return vector({key: x.grad for key, x in parameters if x.grad is not None})

    gradients = record(module, "optimizer_step", gradient)
    arguments |= {"batch_size": BATCH, "micro_batch_size": BATCH, "total_episodes": 4 * BATCH}
    lines = [line for line in run(module, folder, **arguments) if "learning_rate" in line]
    metrics = metrics | {"loss": "loss/train", "learning rate": "learning_rate"}
    quantities = {name: numbers([line[key] for line in lines]) for name, key in metrics.items()}
    quantities["gradient of the first update"] = gradients[0]
    quantities["weights after the last update"] = vector(load_file(folder / "model/model.safetensors"))
    return quantities


def sft(work: Path, patches) -> dict:
    module = load("sft.py", work, patches)
    return train(module, work / "run_sft", {}, model=str(work / "policy"), dataset=str(work / "data/sft"))


def reward(work: Path, patches, head: torch.Tensor, references: torch.Tensor) -> dict:
    """Train a reward model whose new head gets the weights `head` once it has been drawn, and convert theirs."""
    module = load("reward.py", work, patches)
    new_reward_model, quantities = module.new_reward_model, {}

    def with_head(*arguments):
        with mock.patch.object(torch.nn.init, "normal_", wraps=torch.nn.init.normal_) as normal:
            model = new_reward_model(*arguments)
        quantities["standard deviation of a new head"] = numbers(normal.call_args.kwargs["std"])
        model.model.score.weight.data.copy_(head)
        return model

    module.new_reward_model = with_head
    metrics = {"accuracy": "accuracy/train", "margin of the rewards": "rewards/margin"}
    arguments = {"sft_model_path": str(work / "policy"), "dataset": str(work / "data/sft")}
    arguments["preference_dataset"] = str(work / "data/preference")
    quantities |= train(module, work / "run_reward", metrics, **arguments)
    quantities["centred rewards of the references"] = rewards(work, work / "run_reward/model", references)
    shutil.rmtree(work / "converted", ignore_errors=True)
    command = [sys.executable, str(ROOT / "benchmark/convert_released.py"), "--source", str(work / "their_reward")]
    subprocess.run([*command, "--output-dir", str(work / "converted")], check=True)
    quantities["rewards of their released format, converted"] = rewards(work, work / "converted", references)
    return quantities


@torch.no_grad()
def rewards(work: Path, folder: Path, references: torch.Tensor) -> torch.Tensor:
    """Return the rewards of right-padded rows by a checkpoint folder, as ppo.py loads it."""
    module = load("ppo.py", work)
    tokenizer = module.load_tokenizer(str(folder))
    model = module.load_reward_model(str(folder), tokenizer).eval()
    return torch.stack([model(row[row != tokenizer.pad_token_id][None])[0, -1] for row in references])


def dpo(work: Path, patches) -> dict:
    metrics = {"log-probability of chosen": "logprobs/chosen", "log-probability of rejected": "logprobs/rejected"}
    metrics["implicit reward of chosen"] = "rewards/chosen"
    arguments = {"sft_model_path": str(work / "policy"), "preference_dataset": str(work / "data/preference")}
    return train(load("dpo.py", work, patches), work / "run_dpo", metrics, **arguments)


# ---- PPO ----------------------------------------------------------------------------------------------------------


LOGGED = {  # quantity: key of metrics.jsonl
    "objective/kl": "objective/kl",
    "objective/score": "objective/score",
    "RLHF reward": "objective/rlhf_reward",
    "policy loss": "loss/policy",
    "value loss": "loss/value",
    "policy clip fraction": "policy/clip_fraction",
    "value clip fraction": "value/clip_fraction",
    "approximate KL to the old policy": "policy/approx_kl",
    "learning rate": "learning_rate",
}


def ppo_order(work: Path, mini_batches: int) -> list[torch.Tensor]:
    """Return the order of the rows in each of the four epochs of three updates."""
    module = load("ppo.py", work)
    args = module.Args(seed=1, batch_size=PPO_BATCH, num_mini_batches=mini_batches)
    return [torch.cat(module.mini_batches(args, update, epoch, "cpu")) for update in range(1, 4) for epoch in range(4)]


def ppo(work: Path, patches, responses: list[torch.Tensor], settings: dict) -> dict:
    """Run PPO for three updates, in which the sampler draws the tokens of `responses`, one (B, R) per update."""
    module = load("ppo.py", work, patches)
    # Where ppo.py passes on the keys of a position's noise, it now passes on the token that is to be drawn there.
    module.noise_keys = lambda seed, update, episodes, length: responses[update - 1][: len(episodes)]
    module.sample_tokens = lambda logits, keys, temperature: (keys, torch.zeros(len(keys)))
    calls = [record(module, name) for name in ("token_rewards", "gae", "diagnostics")]
    arguments = {"sft_model_path": str(work / "policy"), "reward_model_path": str(work / "converted")}
    arguments |= {"dataset": str(work / "data/sft"), "sample_every": 0, "eval_rows": 1}
    arguments |= {"batch_size": PPO_BATCH, "micro_batch_size": PPO_BATCH // settings["num_mini_batches"]}
    arguments |= {"total_episodes": 3 * PPO_BATCH, "response_length": responses[0].shape[1]}
    lines = run(module, work / "run_ppo", **arguments, **settings)
    quantities = {}
    for update, (line, *calls_of_update) in enumerate(zip(lines, *calls, strict=True), 1):
        (scores, *_), (rewards, *_), (batch, _) = calls_of_update
        measured = {
            "responses after truncation": batch["responses"],
            "log-probabilities": batch["logprobs"],
            "log-probabilities of the reference": batch["ref_logprobs"],
            "values": batch["values"],
            "scores": scores,
            "token rewards": rewards,
            "returns": batch["returns"] * batch["value_mask"],
            "advantages": batch["advantages"],
        } | {name: numbers(line[key]) for name, key in LOGGED.items()}
        quantities |= {f"update {update}: {name}": value for name, value in measured.items()}
    for name, folder in (("policy", "model"), ("value model", "value_model")):
        weights = load_file(work / "run_ppo" / folder / "model.safetensors")
        quantities[f"weights of the {name} after the last update"] = vector(weights)
    mean = json.loads((work / "run_ppo/value_model/config.json").read_text())["reward_mean"]
    quantities["bias of the value model after the last update"] = numbers(-mean)
    return quantities
