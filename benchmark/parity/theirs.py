"""The authors' side of parity.py: executes their functions and training loops as they stand in their files. parity.py
starts it in a process of its own, on the libraries that they pinned:

    PYTHONPATH=OLD_LIBRARIES python benchmark/parity/theirs.py FOLDER    # reads FOLDER/job.pt, writes FOLDER/theirs.pt

Nothing of theirs is copied here: definitions and loops are cut out of their files by the syntax tree. Three things are
replaced: accelerate and DeepSpeed (one process, plain torch, one micro-batch per mini-batch), logging, and the
responses that generate() samples, which the job gives. A job is run once for each order of the rows that it holds. The
quantities of a run are tensors with the same names as in ours.py.
"""

import ast
import copy
import sys
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Dict, Literal, Optional  # noqa: UP035 (their code uses them)
from unittest import mock

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GPTNeoXConfig,
    PretrainedConfig,
    PreTrainedModel,
    get_scheduler,
)

IMPORTS = dict(  # what their files import, as far as the definitions below need it
    copy=copy, defaultdict=defaultdict, dataclass=dataclass, field=field, nullcontext=nullcontext, np=np,
    SimpleNamespace=SimpleNamespace, Dict=Dict, Literal=Literal, Optional=Optional, torch=torch, nn=nn, F=F,  # noqa: UP006
    optim=optim, AutoConfig=AutoConfig, AutoModel=AutoModel, PretrainedConfig=PretrainedConfig,
    PreTrainedModel=PreTrainedModel, GenerationConfig=GenerationConfig,
)  # fmt: skip
SCALAR_MODEL = ["layer_init", "ScalarModelConfig", "ScalarModel", "first_true_indices", "get_reward", "disable_dropout"]
ADAM_EPS = 1e-5


# ---- their files --------------------------------------------------------------------------------------------------


def tree(job: dict, name: str) -> ast.Module:
    """Return the syntax tree of a file of theirs. The one default argument that asks the Hub becomes None."""
    text = Path(job["authors"], "summarize_from_feedback_details", f"{name}.py").read_text()
    return ast.parse(text.replace('AutoConfig.from_pretrained("EleutherAI/pythia-160m")', "None"))


def execute(nodes: list, name: str, namespace: dict):
    """Execute nodes of a file of theirs in a namespace."""
    module = ast.fix_missing_locations(ast.Module(nodes, []))
    exec(compile(module, f"their {name}.py", "exec"), namespace)


def definitions(job: dict, name: str, wanted: list[str]) -> dict:
    """Return a namespace in which these definitions of a file of theirs have been executed, in this order."""
    namespace, definitions_of = dict(IMPORTS), {}
    for node in ast.walk(tree(job, name)):  # breadth first: a function before a method of the same name
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            definitions_of.setdefault(node.name, node)
    execute([definitions_of[definition] for definition in wanted], name, namespace)
    return namespace


def training_loop(job: dict, name: str, target: str) -> ast.For:
    """Return their loop `for target in …` that trains."""
    for node in ast.walk(tree(job, name)):
        if isinstance(node, ast.For) and ast.unparse(node.target) == target:
            if "accelerator.backward" in ast.unparse(node):
                return node
    raise LookupError(f"{name}.py has no loop over {target} that trains")


class Accelerator:
    """As much of an Accelerator as their loops need in one process. backward keeps the first gradient of `model`."""

    is_main_process = False
    device = torch.device("cpu")
    num_processes = 1
    process_index = 0

    def __init__(self, model=None):
        self.model = model
        self.first_gradient = None

    def accumulate(self, model):
        return nullcontext()

    def backward(self, loss):
        loss.mean().backward()  # DPO's loss has one number per pair, because theirs has one pair per micro-batch
        if self.first_gradient is None and self.model is not None:
            self.first_gradient = vector({key: x.grad for key, x in self.model.named_parameters()})

    def gather(self, x):
        return x

    def unwrap_model(self, model):
        return model

    def print(self, *args):
        pass


# ---- models and data ----------------------------------------------------------------------------------------------


def vector(state: dict) -> torch.Tensor:
    """Return a state as one vector, in the order of our names. Left out are buffers and the bias of a reward model's
    head, whose gradient is 0 except for rounding."""
    ours = {}
    for key, value in state.items():
        is_buffer = "rotary_emb" in key or key.endswith((".attention.bias", ".attention.masked_bias"))
        if is_buffer or key.endswith("scalar_head.bias"):
            continue
        for theirs, our in (("embed_out.", "lm_head."), ("lm_backbone.", "gpt_neox."), ("scalar_head.", "score.")):
            key = key.replace(theirs, our)
        ours[key] = value
    return torch.cat([ours[key].detach().double().flatten() for key in sorted(ours)])


def load_tokenizer(path: str):
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    return tokenizer


def make_model(job: dict) -> dict:
    """Save a small random GPT-NeoX model with the tokenizer as the folder `policy`. [PAD] and the ids beyond the
    tokenizer get a logit of -30, as training would give them."""
    tokenizer = load_tokenizer(job["tokenizer"])
    torch.manual_seed(7)
    config = GPTNeoXConfig(
        vocab_size=-(-len(tokenizer) // 64) * 64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, rotary_pct=0.25, max_position_embeddings=2048, initializer_range=0.15,
        bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_(std=0.1)
            elif "layer" in key and "norm" in key:
                parameter.normal_(1, 0.2)
        norm = model.gpt_neox.final_layer_norm
        norm.weight[0] = 0  # the first number of every last hidden state is 1
        norm.bias[0] = 1
        model.embed_out.weight.normal_(std=0.35)
        model.embed_out.weight[tokenizer.pad_token_id :] = 0
        model.embed_out.weight[tokenizer.pad_token_id :, 0] = -30
    model.save_pretrained(Path(job["work"], "policy"))
    AutoTokenizer.from_pretrained(job["tokenizer"]).save_pretrained(Path(job["work"], "policy"))
    return {}


def tokens(job: dict) -> dict:
    """Return the token columns of raw posts, pairs, and pairs about news."""
    wanted = ["TaskQueryHParams", "Args", "_ensure_length", "_get_query_padding_for_task", "process_query"]
    names = definitions(job, "tldr_dataset", [*wanted, "process_query_data", "process_response_data"])
    names["tokenizer"] = load_tokenizer(job["tokenizer"])
    names["args"] = args = names["Args"]()
    names["cnndm_batches"] = ["batch0_cnndm", "cnndm0", "cnndm2"]
    for settings in (args.tldr_params, args.cnndm_params):
        settings.pad_token = [names["tokenizer"].pad_token_id]
    rows = {"posts": [names["process_query_data"](row) for row in job["posts"]]}
    rows["pairs"] = [names["process_response_data"](row) for row in job["pairs"]]
    rows["CNN/DM pairs"] = [names["process_response_data"](row) for row in job["news"]]
    return {
        f"{column} of {len(part)} {name}": torch.tensor([row[column] for row in part])
        for name, part in rows.items()
        for column in part[0]
        if column.endswith(("_token", "_label"))
    }


# ---- SFT, reward model, DPO ---------------------------------------------------------------------------------------


def train(job: dict, orders: list, name: str, model, names: dict, starts: tuple[str, ...], logged) -> dict:
    """Train on the job's batches, their rows in these orders, with AdamW and a cosine schedule. A step is what their
    loop over `data` holds from the statements that begin with `starts`. After each step, logged(names) returns what to
    record of their variables."""
    optimizer = optim.AdamW(model.parameters(), lr=job["learning_rate"], eps=ADAM_EPS)
    scheduler = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=0, num_training_steps=len(orders))
    accelerator = Accelerator(model)
    names |= {"model": model, "optimizer": optimizer, "accelerator": accelerator}
    step = [node for node in training_loop(job, name, "data").body if ast.unparse(node).startswith(starts)]
    recorded = defaultdict(list)
    names["disable_dropout"](model)
    model.train()
    for batch, order in zip(job["batches"], orders, strict=True):
        names["data"] = {key: rows[order] for key, rows in batch.items()}
        recorded["learning rate"].append(optimizer.param_groups[0]["lr"])
        execute(step, name, names)
        for key, value in logged(names).items():
            recorded[key].append(float(value))
        scheduler.step()
    quantities = {key: torch.tensor(values, dtype=torch.float64) for key, values in recorded.items()}
    quantities["gradient of the first update"] = accelerator.first_gradient
    quantities["weights after the last update"] = vector(model.state_dict())
    return quantities


STEP = ("query_responses", "labels", "with torch.no_grad():\n    ref_", "with accelerator.accumulate")


def sft(job: dict, orders: list) -> dict:
    names = definitions(job, "sft", ["forward", "disable_dropout"])
    names["tokenizer"] = load_tokenizer(job["model"])
    model = AutoModelForCausalLM.from_pretrained(job["model"])
    return train(job, orders, "sft", model, names, STEP, lambda names: {"loss": names["loss"]})


def reward(job: dict, orders: list) -> dict:
    """Train a reward model whose new head gets the weights job["head"] once it has been drawn. The first one is saved,
    in the format of their released models, as the folder `their_reward`."""
    names = definitions(job, "reward", SCALAR_MODEL)
    names["tokenizer"] = tokenizer = load_tokenizer(job["model"])
    config = AutoConfig.from_pretrained(job["model"])
    config = names["ScalarModelConfig"](base_model=job["model"], base_config=config, hidden_size=config.hidden_size)
    with mock.patch.object(nn.init, "normal_", wraps=nn.init.normal_) as normal:
        model = names["ScalarModel"](config)
    model.scalar_head.weight.data.copy_(job["head"])

    def logged(names: dict) -> dict:
        margin = names["chosen_rewards"] - names["rejected_rewards"]
        return {"loss": names["loss"], "accuracy": names["accuracy"], "margin of the rewards": margin.mean()}

    def rewards() -> torch.Tensor:
        with torch.no_grad():
            rewards = [names["get_reward"](model, row[None], tokenizer).item() for row in job["references"]]
        return torch.tensor(rewards, dtype=torch.float64)

    quantities = train(job, orders, "reward", model, names, STEP, logged)
    model.eval()
    model.config.bias = rewards().mean().item()  # centring, as at the end of their file
    quantities["standard deviation of a new head"] = torch.tensor(float(normal.call_args.kwargs["std"])).double()
    quantities["centred rewards of the references"] = rewards()
    quantities["rewards of their released format, converted"] = quantities["centred rewards of the references"]
    if orders is job["orders"][0]:
        model.save_pretrained(Path(job["work"], "their_reward"), safe_serialization=False)
        tokenizer.save_pretrained(Path(job["work"], "their_reward"))
    return quantities


def dpo(job: dict, orders: list) -> dict:
    names = definitions(job, "dpo", ["forward", "disable_dropout"])
    names["tokenizer"] = load_tokenizer(job["model"])
    names["ref_model"] = AutoModelForCausalLM.from_pretrained(job["model"])
    names["args"] = SimpleNamespace(ipo=False, beta=0.05, label_smoothing=0.0)

    def logged(names: dict) -> dict:
        return {
            "loss": names["loss"].mean(),
            "log-probability of chosen": names["chosen_logps"].mean(),
            "log-probability of rejected": names["rejected_logps"].mean(),
            "implicit reward of chosen": 0.05 * (names["chosen_logps"] - names["ref_chosen_logps"]).mean(),
        }

    model = AutoModelForCausalLM.from_pretrained(job["model"])
    return train(job, orders, "dpo", model, names, STEP, logged)


# ---- PPO ----------------------------------------------------------------------------------------------------------

LOGGED = {
    "objective/kl": "objective/kl",
    "objective/scores": "objective/score",
    "objective/score_total": "RLHF reward",
    "ppo/loss/policy_avg": "policy loss",
    "ppo/loss/value_avg": "value loss",
    "ppo/policy/clipfrac_avg": "policy clip fraction",
    "ppo/val/clipfrac_avg": "value clip fraction",
    "ppo/policy/approxkl_avg": "approximate KL to the old policy",
    "ppo/lr": "learning rate",
}
ROLLOUT = {  # quantity: their variable, and the mask outside of which it is not compared
    "log-probabilities": ("logprobs", "padding_mask"),
    "log-probabilities of the reference": ("ref_logprobs", "padding_mask"),
    "advantages": ("advantages", "padding_mask"),
    "values": ("values", "padding_mask_p1"),
    "returns": ("returns", "padding_mask_p1"),
    "token rewards": ("rewards", "padding_mask_p1"),
}


def ppo(job: dict, orders: list) -> dict:
    """Execute their whole loop over updates, on the job's queries and responses and with these orders of the rows, one
    per epoch of an update."""
    wanted = ["truncate_response", "forward", "masked_mean", "masked_var", "masked_whiten", "exact_div"]
    names = definitions(job, "ppo", [*SCALAR_MODEL, *wanted, "PolicyAndValueWrapper", "PpoHParams"])
    tokenizer = load_tokenizer(job["model"])
    policy, ref_policy = (AutoModelForCausalLM.from_pretrained(job["model"]) for _ in range(2))
    critic, reward_model = (names["ScalarModel"].from_pretrained(Path(job["work"], "their_reward")) for _ in range(2))
    for model in (policy, ref_policy, critic, reward_model):
        names["disable_dropout"](model)
    model = names["PolicyAndValueWrapper"](policy, critic)
    size, mini_batches = len(job["queries"][0]), job["num_mini_batches"]
    args = SimpleNamespace(
        num_updates=len(job["queries"]), batch_size=size, local_batch_size=size, nminibatches=mini_batches,
        local_mini_batch_size=size // mini_batches, local_micro_batch_size=size // mini_batches,
        gradient_accumulation_steps=1, lr=job["learning_rate"], temperature=0.7, non_eos_penalty=True,
        truncate_token_id=tokenizer.eos_token_id, penalty_reward_value=-1, print_sample_output_freq=0,
        local_rollout_forward_batch_size=size, ppo=names["PpoHParams"](whiten_rewards=job["whiten_rewards"]),
    )  # fmt: skip
    quantities = {}

    def generate(lm_backbone, queries, tokenizer, generation_config):
        """Return what sampling would: the job's responses, and the logits that their generate() has for them."""
        query_responses = torch.cat((queries, job["responses"][names["update"] - 1]), 1)
        logits = names["forward"](lm_backbone, query_responses, tokenizer).logits
        return query_responses, logits[:, queries.shape[1] - 1 : -1] / (args.temperature + 1e-7)

    class Watching(Accelerator):
        def print(self, *printed):
            if printed[0] == "values====":  # they print this at the end of the rollout
                prefix = f"update {names['update']}: "
                for key, (name, mask) in ROLLOUT.items():
                    quantities[prefix + key] = (names[name] * ~names[mask]).double()
                quantities[prefix + "scores"] = names["scores"].double()
                quantities[prefix + "responses after truncation"] = names["postprocessed_responses"]

    def add_scalar(key, value, update):
        if key in LOGGED:
            quantities[f"update {update}: {LOGGED[key]}"] = torch.tensor(value, dtype=torch.float64)

    epochs = iter(orders)
    shape = (args.ppo.noptepochs, mini_batches, 1)
    names |= {f"{name}_stats": torch.zeros(shape) for name in ("approxkl", "entropy", "ratio")}
    names |= {f"{name}_stats": torch.zeros(shape) for name in ("pg_clipfrac", "pg_loss", "vf_loss", "vf_clipfrac")}
    names |= {
        "args": args, "accelerator": Watching(), "tokenizer": tokenizer, "model": model, "policy": policy,
        "ref_policy": ref_policy, "reward_model": reward_model, "device": torch.device("cpu"), "generate": generate,
        "np": SimpleNamespace(random=SimpleNamespace(permutation=lambda n: next(epochs).numpy())),
        "optimizer": optim.AdamW(model.parameters(), lr=job["learning_rate"], eps=ADAM_EPS), "generation_config": None,
        "INVALID_LOGPROB": 1.0, "global_step": 0, "start_time": 0.0, "validation_score": torch.zeros(1),
        "iter_dataloader": iter([{"query_token": queries} for queries in job["queries"]]),
        "time": SimpleNamespace(time=lambda: 1.0), "console": SimpleNamespace(print=lambda *printed: None),
        "writer": SimpleNamespace(add_scalar=add_scalar),
    }  # fmt: skip
    loop = training_loop(job, "ppo", "update")
    for node in loop.body:  # their rollout begins with a validation batch, which is left out
        if isinstance(node, ast.With) and "queries = data" in ast.unparse(node):
            starts = [ast.unparse(inner).startswith("queries = data") for inner in node.body]
            node.body = node.body[starts.index(True) :]
    model.train()
    execute([loop], "ppo", names)
    quantities["weights of the policy after the last update"] = vector(policy.state_dict())
    quantities["weights of the value model after the last update"] = vector(critic.state_dict())
    bias = critic.scalar_head.bias.detach().double() - critic.config.bias
    quantities["bias of the value model after the last update"] = bias.squeeze()
    return quantities


if __name__ == "__main__":
    torch.set_num_threads(1)
    job = torch.load(Path(sys.argv[1], "job.pt"), weights_only=False)
    function = globals()[job["kind"]]
    runs = [function(job, orders) for orders in job["orders"]] if "orders" in job else [function(job)]
    torch.save(runs, Path(sys.argv[1], "theirs.pt"))
