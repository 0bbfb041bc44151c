"""The authors' side of parity.py: their functions and training loops, executed as they stand in a checkout of
vwxyzjn/summarize_from_feedback_details, on the libraries that they pinned. parity.py starts it in a process of its own:

    PYTHONPATH=OLD_LIBRARIES python benchmark/parity/theirs.py FOLDER NAME    # NAME.job.pt there -> NAME.theirs.pt

Nothing of theirs is copied here. Definitions and loops are cut out of their files by the syntax tree. What is replaced:
accelerate and DeepSpeed (one process, plain torch, batch = micro-batch), logging, and what generate() samples, which
the job gives. A job is a list of runs; a run's quantities are tensors by the names of ours.py.
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

THEIR_GLOBALS = dict(
    copy=copy, defaultdict=defaultdict, dataclass=dataclass, field=field, nullcontext=nullcontext, Dict=Dict,  # noqa: UP006
    np=np,
    SimpleNamespace=SimpleNamespace, Literal=Literal, Optional=Optional, torch=torch, nn=nn, F=F, optim=optim,
    AutoModel=AutoModel, AutoConfig=AutoConfig, PretrainedConfig=PretrainedConfig, PreTrainedModel=PreTrainedModel,
    GenerationConfig=GenerationConfig,
)  # fmt: skip
ADAM_EPS = 1e-5


# ---- their files --------------------------------------------------------------------------------------------------


def tree(authors: str, name: str) -> ast.Module:
    """The syntax tree of a file of theirs; the one default argument that asks the Hub is None."""
    text = Path(authors, "summarize_from_feedback_details", f"{name}.py").read_text()
    return ast.parse(text.replace('AutoConfig.from_pretrained("EleutherAI/pythia-160m")', "None"))


def cut(authors: str, name: str, wanted: list[str], namespace: dict) -> dict:
    """Execute these definitions of a file of theirs, in this order, in the namespace."""
    return definitions(tree(authors, name), name, wanted, namespace)


def definitions(module: ast.Module, name: str, wanted: list[str], namespace: dict) -> dict:
    """Execute these definitions of a syntax tree, in this order, in the namespace."""
    found = {}
    for node in ast.walk(module):  # breadth first: a function before a method of its name
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.setdefault(node.name, node)
    for definition in wanted:
        execute([found[definition]], name, namespace)
    return namespace


def execute(nodes: list, name: str, namespace: dict):
    """Execute nodes of a file of theirs."""
    module = ast.fix_missing_locations(ast.Module(nodes, []))
    exec(compile(module, f"their {name}.py", "exec"), namespace)


def training_loop(authors: str, name: str, target: str) -> ast.For:
    """Their `for target in …` that trains."""
    for node in ast.walk(tree(authors, name)):
        if isinstance(node, ast.For) and ast.unparse(node.target) == target:
            if "accelerator.backward" in ast.unparse(node):
                return node
    raise LookupError(f"{name}.py has no loop over {target} that trains")


class Accelerator:
    """As much of an Accelerator as their loops need in one process; backward keeps the first gradient of `model`."""

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
        loss.mean().backward()  # their DPO has a loss a pair, and one pair a micro-batch
        if self.first_gradient is None and self.model is not None:
            self.first_gradient = flat({key: x.grad for key, x in self.model.named_parameters()})

    def gather(self, x):
        return x

    def unwrap_model(self, model):
        return model

    def print(self, *args):
        pass


# ---- tensors ------------------------------------------------------------------------------------------------------


def flat(state: dict) -> torch.Tensor:
    """One vector of a state in the order of our names, without buffers and without the bias of a reward's head, whose
    gradient is 0 but for rounding."""
    ours = {}
    for key, value in state.items():
        is_buffer = "rotary_emb" in key or key.endswith((".attention.bias", ".attention.masked_bias"))
        if is_buffer or key == "scalar_head.bias" or key.endswith(".scalar_head.bias"):
            continue
        for theirs, our in (("embed_out.", "lm_head."), ("lm_backbone.", "gpt_neox."), ("scalar_head.", "score.")):
            key = key.replace(theirs, our)
        ours[key] = value
    return torch.cat([ours[key].detach().double().flatten() for key in sorted(ours)])


def tokenizer_of(path: str):
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    return tokenizer


# ---- models and tokens --------------------------------------------------------------------------------------------


def make_models(job: dict) -> dict:
    """Two small random GPT-NeoX models with the tokenizer, in job["folder"]/{policy,other}. [PAD] and ids beyond the
    tokenizer have a logit of -30, as training would give them."""
    tokenizer = tokenizer_of(job["tokenizer"])
    torch.manual_seed(7)
    config = GPTNeoXConfig(
        vocab_size=-(-len(tokenizer) // 64) * 64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, rotary_pct=0.25, max_position_embeddings=2048, initializer_range=0.15,
        bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    for name in ("policy", "other"):
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
        model.save_pretrained(Path(job["folder"], name))
        AutoTokenizer.from_pretrained(job["tokenizer"]).save_pretrained(Path(job["folder"], name))
    return {}


def tokenise(job: dict) -> dict:
    """Their columns of raw posts and pairs: {"sft": rows, "preference": rows}; None where their code ends in an error,
    as it does where a policy is null."""
    namespace = dict(THEIR_GLOBALS)
    namespace["tokenizer"] = tokenizer = tokenizer_of(job["tokenizer"])
    definitions = ["TaskQueryHParams", "Args", "_ensure_length", "_get_query_padding_for_task", "process_query"]
    cut(job["authors"], "tldr_dataset", [*definitions, "process_query_data", "process_response_data"], namespace)
    namespace["args"] = args = namespace["Args"]()
    namespace["cnndm_batches"] = ["batch0_cnndm", "cnndm0", "cnndm2"]
    for settings in (args.tldr_params, args.cnndm_params):
        settings.pad_token = [tokenizer.pad_token_id]
    rows = {"sft": [namespace["process_query_data"](row) for row in job["posts"]], "preference": []}
    for row in job["pairs"]:
        try:
            rows["preference"].append(namespace["process_response_data"](row))
        except TypeError:
            rows["preference"].append(None)
    return rows


# ---- SFT, reward model, DPO ---------------------------------------------------------------------------------------


def train(job: dict, name: str, model, namespace: dict, code: list, logged, batches: list) -> dict:
    """Execute their step `code` on every batch, with AdamW and their cosine schedule; quantities of ours.py.
    logged(namespace) -> {name: number or tensor} after each step."""
    optimizer = optim.AdamW(model.parameters(), lr=job["learning_rate"], eps=ADAM_EPS)
    scheduler = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=0, num_training_steps=len(batches))
    accelerator = Accelerator(model)
    namespace |= {"model": model, "optimizer": optimizer, "accelerator": accelerator}
    found = defaultdict(list)
    model.train()
    for batch in batches:
        namespace["data"] = batch
        found["learning rate"].append(optimizer.param_groups[0]["lr"])
        execute(code, name, namespace)
        for key, value in logged(namespace).items():
            found[key].append(float(value))
        scheduler.step()
    quantities = {key: torch.tensor(values, dtype=torch.float64) for key, values in found.items()}
    quantities["gradient of the first update"] = accelerator.first_gradient
    quantities["weights after the last update"] = flat(model.state_dict())
    return quantities


def sft(job: dict, batches: list) -> dict:
    namespace = cut(job["authors"], "sft", ["forward", "disable_dropout"], dict(THEIR_GLOBALS))
    namespace["tokenizer"] = tokenizer_of(job["model"])
    model = AutoModelForCausalLM.from_pretrained(job["model"])
    namespace["disable_dropout"](model)
    loop = training_loop(job["authors"], "sft", "data")
    code = [node for node in loop.body if ast.unparse(node).startswith("query_responses")]
    code += [node for node in ast.walk(loop) if isinstance(node, ast.With)][0].body
    return train(job, "sft", model, namespace, code, lambda names: {"loss": names["loss"]}, batches)


def scalar_model(authors: str, name: str, path: str, namespace: dict):
    """Their reward model's class in the namespace, and its configuration for the model in this folder."""
    definitions = [
        "layer_init",
        "ScalarModelConfig",
        "ScalarModel",
        "first_true_indices",
        "get_reward",
        "disable_dropout",
    ]
    cut(authors, name, definitions, namespace)
    config = AutoConfig.from_pretrained(path)
    return namespace["ScalarModelConfig"](base_model=path, base_config=config, hidden_size=config.hidden_size)


def reward(job: dict, batches: list, save: str | None) -> dict:
    namespace = dict(THEIR_GLOBALS)
    config = scalar_model(job["authors"], "reward", job["model"], namespace)
    namespace["tokenizer"] = tokenizer = tokenizer_of(job["model"])
    torch.manual_seed(3)
    model = namespace["ScalarModel"](config)
    namespace["disable_dropout"](model)
    with torch.no_grad():
        model.scalar_head.weight.copy_(job["head"])
    loop = training_loop(job["authors"], "reward", "data")
    code = [node for node in loop.body if ast.unparse(node).startswith("query_responses")]
    code += [node for node in ast.walk(loop) if isinstance(node, ast.With)][0].body

    def logged(names: dict) -> dict:
        margin = names["chosen_rewards"] - names["rejected_rewards"]
        return {"loss": names["loss"], "accuracy": names["accuracy"], "margin of the rewards": margin.mean()}

    quantities = train(job, "reward", model, namespace, code, logged, batches)
    model.eval()
    with torch.no_grad():  # centring, as at the end of their file
        rewards = [namespace["get_reward"](model, row[None], tokenizer).item() for row in job["references"]]
    model.config.bias = float(np.mean(rewards))
    with torch.no_grad():
        centred = [namespace["get_reward"](model, row[None], tokenizer).item() for row in job["references"]]
    quantities["centred rewards of the references"] = torch.tensor(centred, dtype=torch.float64)
    if save:  # in the format of their released models
        model.save_pretrained(save, safe_serialization=False)
        tokenizer.save_pretrained(save)
    return quantities


def head_initialisation(job: dict) -> dict:
    """The standard deviation that their head is drawn with."""
    namespace = dict(THEIR_GLOBALS)
    config = scalar_model(job["authors"], "reward", job["model"], namespace)
    found, normal = [], nn.init.normal_
    nn.init.normal_ = lambda tensor, mean=0.0, std=1.0, **more: found.append(std) or normal(tensor, mean, std, **more)
    namespace["ScalarModel"](config)
    nn.init.normal_ = normal
    return {"standard deviation of a new head": torch.tensor([found[-1]], dtype=torch.float64)}


def rewards_of_ours(job: dict) -> dict:
    """Rewards of the references by a reward model of ours, its weights under their names, by their class."""
    namespace = dict(THEIR_GLOBALS)
    config = scalar_model(job["authors"], "reward", job["model"], namespace)
    model = namespace["ScalarModel"](config).eval()
    state = {}
    for key, value in job["weights"].items():
        state[key.replace("gpt_neox.", "lm_backbone.").replace("score.", "scalar_head.")] = value
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and not [key for key in missing if "rotary" not in key and "attention" not in key], missing
    tokenizer = tokenizer_of(job["model"])
    with torch.no_grad():
        rewards = [namespace["get_reward"](model, row[None], tokenizer).item() for row in job["references"]]
    return {"rewards of a model of ours in their format": torch.tensor(rewards, dtype=torch.float64)}


def dpo(job: dict, batches: list) -> dict:
    namespace = cut(job["authors"], "dpo", ["forward", "disable_dropout"], dict(THEIR_GLOBALS))
    namespace["tokenizer"] = tokenizer_of(job["model"])
    model = AutoModelForCausalLM.from_pretrained(job["model"])
    namespace["disable_dropout"](model)
    namespace["ref_model"] = AutoModelForCausalLM.from_pretrained(job["model"])
    namespace["args"] = SimpleNamespace(ipo=job["ipo"], beta=0.05, label_smoothing=job["label_smoothing"])
    loop = training_loop(job["authors"], "dpo", "data")
    starts = ("query_responses", "labels", "with torch.no_grad():\n    ref_", "with accelerator.accumulate")
    code = [node for node in loop.body if ast.unparse(node).startswith(starts)]

    def logged(names: dict) -> dict:
        return {
            "loss": names["loss"].mean(),
            "log-probability of chosen": names["chosen_logps"].mean(),
            "log-probability of rejected": names["rejected_logps"].mean(),
            "implicit reward of chosen": 0.05 * (names["chosen_logps"] - names["ref_chosen_logps"]).mean(),
        }

    return train(job, "dpo", model, namespace, code, logged, batches)


# ---- PPO ----------------------------------------------------------------------------------------------------------


def ppo(job: dict, run: dict) -> dict:
    """Their whole loop over updates. run: queries and responses of each update, and the permutations of each pass."""
    namespace = dict(THEIR_GLOBALS)
    scalar_model(job["authors"], "ppo", job["model"], namespace)
    definitions = ["truncate_response", "forward", "masked_mean", "masked_var", "masked_whiten", "exact_div"]
    cut(job["authors"], "ppo", [*definitions, "PolicyAndValueWrapper", "PpoHParams"], namespace)
    tokenizer = tokenizer_of(job["model"])
    policy = AutoModelForCausalLM.from_pretrained(job["model"])
    ref_policy = AutoModelForCausalLM.from_pretrained(job["model"])
    critic = namespace["ScalarModel"].from_pretrained(job["reward_model"])
    reward_model = namespace["ScalarModel"].from_pretrained(job["reward_model"])
    for model in (policy, ref_policy, critic, reward_model):
        namespace["disable_dropout"](model)
    model = namespace["PolicyAndValueWrapper"](policy, critic)
    batch_size, length = run["responses"][0].shape
    mini_batches = job["num_mini_batches"]
    args = SimpleNamespace(
        num_updates=len(run["queries"]), batch_size=batch_size, local_batch_size=batch_size, nminibatches=mini_batches,
        local_mini_batch_size=batch_size // mini_batches, local_micro_batch_size=batch_size // mini_batches,
        gradient_accumulation_steps=1, lr=job["learning_rate"], temperature=0.7, non_eos_penalty=True,
        truncate_token_id=tokenizer.eos_token_id, penalty_reward_value=-1, print_sample_output_freq=0,
        local_rollout_forward_batch_size=batch_size, ppo=namespace["PpoHParams"](whiten_rewards=job["whiten_rewards"]),
    )  # fmt: skip
    quantities, scalars = {}, {}

    def generate(lm_backbone, queries, tokenizer, generation_config):
        """What sampling would give: the job's responses, and the logits that their generate() has for them."""
        query_responses = torch.cat((queries, run["responses"][namespace["update"] - 1]), 1)
        logits = namespace["forward"](lm_backbone, query_responses, tokenizer).logits
        return query_responses, logits[:, queries.shape[1] - 1 : -1] / (args.temperature + 1e-7)

    class Watching(Accelerator):
        def print(self, *args):
            if args and args[0] == "values====":  # the rollout is done
                update = namespace["update"]
                response, value = ~namespace["padding_mask"], ~namespace["padding_mask_p1"]
                names = {"log-probabilities": "logprobs", "log-probabilities of the reference": "ref_logprobs"}
                names |= {key: key for key in ("values", "returns", "advantages")} | {"token rewards": "rewards"}
                for key, name in names.items():
                    mask = response if name in ("logprobs", "ref_logprobs", "advantages") else value
                    quantities[f"update {update}: {key}"] = (namespace[name] * mask)[run["back"]].double()
                quantities[f"update {update}: scores"] = namespace["scores"][run["back"]].double()
                truncated = namespace["postprocessed_responses"]
                quantities[f"update {update}: responses after truncation"] = truncated[run["back"]].double()

    permutations = iter(run["permutations"])
    numbers = SimpleNamespace(random=SimpleNamespace(permutation=lambda n: next(permutations).numpy()))
    shape = (args.ppo.noptepochs, mini_batches, 1)
    stats = "approxkl pg_clipfrac pg_loss vf_loss vf_clipfrac entropy ratio".split()
    namespace |= {f"{name}_stats": torch.zeros(shape) for name in stats}
    namespace |= {
        "args": args, "accelerator": Watching(), "tokenizer": tokenizer, "model": model, "policy": policy,
        "np": numbers, "ref_policy": ref_policy, "reward_model": reward_model,
        "device": torch.device("cpu"), "generate": generate,
        "optimizer": optim.AdamW(model.parameters(), lr=job["learning_rate"], eps=ADAM_EPS), "generation_config": None,
        "INVALID_LOGPROB": 1.0, "global_step": 0, "start_time": 0.0, "validation_score": torch.zeros(1),
        "iter_dataloader": iter([{"query_token": queries} for queries in run["queries"]]),
        "time": SimpleNamespace(time=lambda: 1.0), "console": SimpleNamespace(print=lambda *args: None),
        "writer": SimpleNamespace(add_scalar=lambda key, value, update: scalars.update({(update, key): value})),
    }  # fmt: skip
    loop = training_loop(job["authors"], "ppo", "update")
    for node in loop.body:  # the validation batch at the head of the rollout goes
        if isinstance(node, ast.With) and "queries = data" in ast.unparse(node):
            starts = [ast.unparse(inner).startswith("queries = data") for inner in node.body]
            node.body = node.body[starts.index(True) :]
    model.train()
    execute([loop], "ppo", namespace)
    logged = {
        "objective/kl": "objective/kl", "objective/scores": "objective/score", "objective/score_total": "RLHF reward",
        "ppo/loss/policy_avg": "policy loss", "ppo/loss/value_avg": "value loss", "ppo/lr": "learning rate",
        "ppo/policy/clipfrac_avg": "policy clip fraction", "ppo/val/clipfrac_avg": "value clip fraction",
        "ppo/policy/approxkl_avg": "approximate KL to the old policy",
    }  # fmt: skip
    for update in range(1, args.num_updates + 1):
        for theirs, name in logged.items():
            quantities[f"update {update}: {name}"] = torch.tensor([scalars[update, theirs]], dtype=torch.float64)
    quantities["weights of the policy after the last update"] = flat(policy.state_dict())
    quantities["weights of the value model after the last update"] = flat(critic.state_dict())
    bias = critic.scalar_head.bias.detach().double() - critic.config.bias
    quantities["bias of the value model after the last update"] = bias
    return quantities


# ---- jobs ---------------------------------------------------------------------------------------------------------


def do(job: dict) -> list[dict]:
    """The quantities of each run of a job."""
    kind = job["kind"]
    if kind in ("make_models", "tokenise", "head_initialisation", "rewards_of_ours"):
        return [globals()[kind](job)]
    if kind == "reward":
        return [reward(job, run, job["save"] if i == 0 else None) for i, run in enumerate(job["runs"])]
    return [{"sft": sft, "dpo": dpo, "ppo": ppo}[kind](job, run) for run in job["runs"]]


if __name__ == "__main__":
    folder, name = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    torch.save(do(torch.load(folder / f"{name}.job.pt", weights_only=False)), folder / f"{name}.theirs.pt")
