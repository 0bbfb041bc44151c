"""One run of TRL's trainer for speed.py, in an environment that has TRL:  trl_peer.py SETTINGS.json

TRL removed PPO in September 2026 (trl#7020): 1.11 is the last version whose PPO can be compared.

Settings that are not TRL's defaults are those of the work (batch, no clipping, the paper's PPO numbers) and those that
make it fastest on these rows: no gradient checkpointing, rows of similar length together, no evaluation, no reports.
"""

import json
import os
import sys
import time

import torch
from datasets import Dataset, load_from_disk
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback

settings = json.loads(open(sys.argv[1]).read())
stage, work = settings["stage"], settings["work"]
ends, losses = [], []


class Clock(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        ends.append(time.time())

    def on_step_end(self, args, state, control, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        ends.append(time.time())

    def on_log(self, args, state, control, logs=None, **kwargs):
        losses.append(logs.get("loss"))  # the last call's is none


tokenizer = AutoTokenizer.from_pretrained(f"{work}/model")
tokenizer.add_special_tokens({"pad_token": "[PAD]"})
pad = tokenizer.pad_token_id


def without_pad(ids: list[int]) -> list[int]:
    return [i for i in ids if i != pad]


source = load_from_disk(f"{work}/{'preference' if stage in ('reward', 'dpo') else 'sft'}")["train"]
source = source.select(settings["rows"])
if stage == "sft":
    columns = {"input_ids": [without_pad(ids) for ids in source["query_reference_response_token"]]}
elif stage == "ppo":
    columns = {"input_ids": [without_pad(ids) for ids in source["query_token"]]}
elif stage == "reward":
    columns = {f"{x}_ids": [without_pad(ids) for ids in source[f"query_{x}_token"]] for x in ("chosen", "rejected")}
    columns["length"] = [max(map(len, pair)) for pair in zip(*columns.values(), strict=True)]
else:  # takes text alone
    own = {"prompt": "query_token"} | {x: f"query_{x}_token_response_label" for x in ("chosen", "rejected")}
    columns = {name: [tokenizer.decode(without_pad(ids)) for ids in source[column]] for name, column in own.items()}
    for x in ("chosen", "rejected"):  # a tokenizer of whole words decodes to a text without the space before it
        columns[x] = [" " + text.removeprefix(" ") for text in columns[x]]
    columns["length"] = [
        max(sum(i != pad for i in ids) for ids in pair)
        for pair in zip(source["query_chosen_token"], source["query_rejected_token"], strict=True)
    ]
data = Dataset.from_dict(columns)

common = {
    "output_dir": f"{work}/runs/{stage}_trl",
    "per_device_train_batch_size": settings["micro"],
    "gradient_accumulation_steps": settings["batch"] // settings["micro"],
    "learning_rate": settings["learning_rate"],
    "adam_epsilon": 1e-5,
    "weight_decay": 0.01,
    "bf16": settings["device"] == "cuda",
    "use_cpu": settings["device"] == "cpu",
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "seed": 44413,
}
if stage != "ppo":
    common |= {"max_steps": settings["updates"], "logging_steps": 1, "max_grad_norm": 0.0, "max_length": None}
    common |= {"lr_scheduler_type": "cosine"}
    sampling = "sequential" if "sequential" in settings["flags"] else "group_by_length"
    common |= {"train_sampling_strategy": sampling, "remove_unused_columns": stage == "sft"}  # else it drops "length"
model_type = AutoModelForSequenceClassification if stage == "reward" else AutoModelForCausalLM
model = model_type.from_pretrained(settings["reward"] if stage == "reward" else f"{work}/model", dtype=torch.float32)
model.config.pad_token_id = pad
if stage == "sft":
    from trl import SFTConfig, SFTTrainer

    arguments = common
    trainer = SFTTrainer(
        model, SFTConfig(**arguments), train_dataset=data, processing_class=tokenizer, callbacks=[Clock()]
    )
elif stage == "reward":
    from trl import RewardConfig, RewardTrainer

    arguments = common
    trainer = RewardTrainer(
        model, RewardConfig(**arguments), train_dataset=data, processing_class=tokenizer, callbacks=[Clock()]
    )
elif stage == "dpo":
    from trl import DPOConfig, DPOTrainer

    arguments = common | {"beta": 0.05, "precompute_ref_log_probs": "precompute" in settings["flags"]}
    reference = AutoModelForCausalLM.from_pretrained(f"{work}/model", dtype=torch.float32)
    trainer = DPOTrainer(
        model,
        ref_model=reference,
        args=DPOConfig(**arguments),
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
else:
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    tokenizer.padding_side = "left"
    arguments = common | {
        "total_episodes": settings["batch"] * settings["updates"],
        "num_ppo_epochs": 4,
        "num_mini_batches": 1,
        "response_length": 53,
        "stop_token": "eos",
        "missing_eos_penalty": 1.0,
        "local_rollout_forward_batch_size": settings["forward"],
        "num_sample_generations": 0,
        "logging_steps": 1,
    }
    scores = {}
    for name in ("reward", "value"):
        scores[name] = AutoModelForSequenceClassification.from_pretrained(f"{work}/reward", dtype=torch.float32)
    trainer = PPOTrainer(
        args=PPOConfig(**arguments),
        processing_class=tokenizer,
        model=model,
        ref_model=AutoModelForCausalLM.from_pretrained(f"{work}/model", dtype=torch.float32),
        reward_model=scores["reward"],
        value_model=scores["value"],
        train_dataset=data,
        eval_dataset=data.select(range(8)),
        callbacks=[Clock()],
    )
trainer.train()
if settings["device"] == "cuda":  # as speed.py reads it
    print(f"peak of the GPU's memory: {torch.cuda.max_memory_allocated() / 2**30:.3f} GiB", flush=True)
with open(settings["output"], "w") as file:
    json.dump(
        {"ends": ends, "losses": losses, "arguments": arguments, "threads": os.environ.get("OMP_NUM_THREADS")}, file
    )
