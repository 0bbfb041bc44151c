"""Direct preference optimisation, the RL-free comparison of "The N+ Implementation Details of RLHF with PPO" (equations
4 and 5, Detail 19, table 6).

One process:    python dpo.py --model nano-xs --batch-size 32 --learning-rate 3e-4 --run-eval
N processes:    torchrun --nproc_per_node 8 dpo.py --model 1b --seed 44413 --run-eval
Paper scale:    accelerate launch --config_file benchmark/accelerate/zero2.yaml dpo.py --model 6.9b --seed 44413
Samples, ROUGE: python eval/samples.py runs/dpo/nano-xs/44413
No training:    python dpo.py --policy-path runs/dpo/nano-xs/44413 --total-episodes 0 --run-eval --output-dir runs/again

Starts from the SFT model of the same name and seed, which stays as the reference. The run folder (default
runs/dpo/{model}/{seed}) holds model/ (a plain transformers checkpoint), metrics.jsonl, args.json, TensorBoard files,
eval/ (table 5 for the implicit reward) and, with --save-every, checkpoints/. The file goes from the algorithm outwards:
arguments, loss, log-probabilities of a pair, main, evaluation, padding, models, plumbing.

Deviations from the paper and its code, each on purpose:
- a pair is one row `query + chosen + rejected` in which `rejected` does not see `chosen` and its positions restart
  after the query: the same log-probabilities for nearly half the work.
- an epoch shows every pair once; the released runs shuffled differently on every rank, and showed 65.8 % of them.
- the rows left over after the last whole batch are not trained on, as in reward.py, whose data order this is.
- samples (eval/samples.py) have up to 53 tokens as those of the other stages; the authors' DPO samples had up to 128.
"""

import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import cos, pi
from pathlib import Path
from typing import Literal

import pandas
import pyarrow.compute as pc
import torch
import torch.nn.functional as F
import tyro
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.tracking import WandBTracker
from accelerate.utils import gather_object, set_seed
from datasets import DatasetDict, load_dataset, load_from_disk
from huggingface_hub import snapshot_download
from rich.console import Console
from rich.progress import Progress, TextColumn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache

STAGE = "dpo"
PRESETS = {"1b": 8, "2.8b": 4, "6.9b": 1}  # Pythia's sizes: pairs of a micro-batch that fit one 80 GB device
PREFERENCE_DATASET = "vwxyzjn/summarize_from_feedback_oai_preprocessing_1706381144"
PAIR_COLUMNS = [f"query_{side}_token{suffix}" for side in ("chosen", "rejected") for suffix in ("", "_response_label")]
PREFERENCE_COLUMNS = ["query", "query_token", *PAIR_COLUMNS]


@dataclass
class Args:
    model: str = "1b"
    """name of the run: 1b, 2.8b, 6.9b or any other; the weights come from --sft-model-path"""
    seed: int = 44413
    """seed of the data order (paper: 44413, 55513, 66613, 77713)"""
    sft_model_path: str = "runs/sft/{model}/{seed}"
    """SFT model, the reference: run folder, checkpoint folder or Hub id[@revision]"""
    policy_path: str | None = None
    """where the policy starts, if not as the SFT model; --total-episodes 0 --run-eval evaluates it as it is"""
    preference_dataset: str = "data/tldr/preference" if Path("data/tldr/preference").exists() else PREFERENCE_DATASET
    """preference data: folder or Hub id[@revision]"""
    output_dir: str = "runs/dpo/{model}/{seed}"
    """run folder"""

    beta: float = 0.05
    """scale of the implicit reward, the strength of the KL penalty it stands for (table 6)"""
    loss_type: Literal["sigmoid", "ipo"] = "sigmoid"
    """DPO's loss (equation 4), or the squared loss of IPO (Azar et al., 2023)"""
    label_smoothing: float = 0.0
    """share of labels believed to be flipped (conservative DPO); 0 in the paper; sigmoid loss only"""
    num_train_epochs: float = 1
    """passes over the train split (table 6)"""
    total_episodes: int | None = None
    """pairs to train on; default num_train_epochs passes (table 6: 92,858)"""
    batch_size: int = 64
    """pairs per optimiser step over all devices (table 6)"""
    learning_rate: float = 3e-6
    """peak learning rate, cosine to 0 over the run (table 6)"""
    adam_eps: float = 1e-5
    """AdamW's epsilon (table 6)"""
    weight_decay: float = 0.01
    """AdamW's weight decay (torch's default, as in the paper's code)"""
    max_grad_norm: float = 0.0
    """gradient norm to clip at; 0: no clipping (paper)"""

    eval_every: int = 0
    """updates between validation accuracies; 0: after the last update only"""
    run_eval: bool = False
    """after training, write table 5 for the implicit reward of every validation split (figure 8)"""
    micro_batch_size: int | None = None
    """pairs per device and forward/backward pass: memory only, never the result; default: what fits 80 GB, or 8"""
    forward_batch_size: int | None = None
    """pairs per device in passes without gradient (reference, evaluation); default: four micro-batches"""
    mixed_precision: Literal["no", "bf16"] | None = None
    """autocast over float32 weights; default bf16 on a GPU (Detail 8), none on a CPU"""
    save_every: int = 0
    """updates between checkpoints for --resume; 0: none"""
    keep_checkpoints: int = 2
    """newest checkpoints kept"""
    resume: bool = False
    """continue the run in output_dir from its newest checkpoint"""
    track: bool = False
    """log to Weights & Biases as well (WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE in the environment apply)"""


# ==== the algorithm ===============================================================================


def dpo_loss(
    policy_chosen: torch.Tensor,
    policy_rejected: torch.Tensor,
    ref_chosen: torch.Tensor,
    ref_rejected: torch.Tensor,
    beta: float,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Loss per pair (b,) from the summed log-probabilities (b,) of the responses under policy and reference.

    sigmoid: equation 4, -log sigmoid(beta h) with h = log-ratio of chosen minus log-ratio of rejected; with label
    smoothing e, (1 - e) times that plus e times the loss of the flipped pair. ipo: (h - 1 / (2 beta))^2."""
    h = (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)
    if loss_type == "ipo":
        return (h - 1 / (2 * beta)) ** 2
    return -(1 - label_smoothing) * F.logsigmoid(beta * h) - label_smoothing * F.logsigmoid(-beta * h)


def pair_logprobs(model, pairs: dict, pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed log-probabilities (b,) of the chosen and of the rejected response, EOS included; `pairs` as made by
    pair_rows, whose query is run once."""
    query, responses = pairs["query"], (pairs["chosen"], pairs["rejected"])
    prefix, inputs, columns = pair_inputs(query, *responses, pad_id)
    cache = DynamicCache()
    if prefix.shape[1]:
        model(prefix, past_key_values=cache, use_cache=True, logits_to_keep=1)
    logits = model(**inputs, past_key_values=cache, use_cache=True).logits.float()  # (b, S, V)
    sums, total, row = [], logits.logsumexp(2), torch.arange(len(query))[:, None]
    for response, at, name in zip(responses, columns, ("chosen_start", "rejected_start"), strict=True):
        before = at[:, :-1]  # the column whose logits predict a response token is that of the token before it
        logprobs = logits[row, before, response] - total.gather(1, before)
        place = torch.arange(response.shape[1]).to(response.device)
        logprobs = logprobs.masked_fill((response == pad_id) | (place < pairs[name][:, None]), 0.0)
        sums.append(logprobs.sum(1))
    return sums[0], sums[1]


@torch.no_grad()
def split_logprobs(accelerator: Accelerator, model, data, args, pad_id: int, name: str) -> torch.Tensor:
    """Log-probabilities (n, 2) of chosen and rejected of every pair of a split, in order, without gradient."""
    found, size = [], args.forward_batch_size
    for _, batch in shares(accelerator, data, 8 * size, f"log-probabilities: {name}"):  # eight, to pair like lengths
        logprobs = torch.empty(len(batch[PAIR_COLUMNS[0]]), 2)
        for index, pairs in pair_micro_batches(batch, size, pad_id, accelerator.device):
            with accelerator.autocast():
                logprobs[index] = torch.stack(pair_logprobs(model, pairs, pad_id), 1).cpu()
        found += logprobs.tolist()
    return torch.tensor(gather_object(found)).reshape(-1, 2)


def data_order(n: int, seed: int, start: int, stop: int) -> torch.Tensor:
    """Rows (stop - start,) at the positions start..stop-1 of an endless stream over n rows: each pass is a new shuffle
    without replacement (Detail 21). A function of (seed, position) alone: every process can name every batch."""
    passes = []
    for epoch in range(start // n, (stop - 1) // n + 1):
        shuffled = torch.randperm(n, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
        passes.append(shuffled[max(start - epoch * n, 0) : stop - epoch * n])
    return torch.cat(passes)


# ==== main ========================================================================================


def main(args: Args):
    # ---- data and models -------------------------------------------------------------------------
    accelerator = make_accelerator(args)
    args.micro_batch_size = args.micro_batch_size or PRESETS.get(args.model, 8)
    args.forward_batch_size = args.forward_batch_size or 4 * args.micro_batch_size
    world, per_rank = accelerator.num_processes, args.batch_size // accelerator.num_processes
    sft_folder = checkpoint_folder("--sft-model-path", args.sft_model_path)
    policy_folder = checkpoint_folder("--policy-path", args.policy_path) if args.policy_path else sft_folder
    tokenizer = load_tokenizer(sft_folder)
    if load_tokenizer(policy_folder).get_vocab() != tokenizer.get_vocab():
        fail(f"--policy-path {policy_folder}: a model of another tokenizer than {sft_folder}")
    pad_id = tokenizer.pad_token_id
    data = load_splits("--preference-dataset", args.preference_dataset, PREFERENCE_COLUMNS, tokenizer)
    if "weight" in data["train"].column_names and data["train"].unique("weight") != [1.0]:
        fail(f"--preference-dataset {args.preference_dataset}: pairs of other weights than 1 are for llama2/reward.py")
    train = data["train"].select_columns(PAIR_COLUMNS)
    if args.total_episodes is None:
        args.total_episodes = int(args.num_train_epochs * len(train))
    num_updates = args.total_episodes // args.batch_size
    if (num_updates == 0 and args.total_episodes) or args.batch_size % world:
        fail(f"--batch-size {args.batch_size}: above {args.total_episodes} pairs, or no multiple of {world} processes")
    # the reference's part is done before training: of the pairs that it will see, and of those to be evaluated
    start, order = time.time(), data_order(len(train), args.seed, 0, max(num_updates, 1) * args.batch_size)
    used = order[: num_updates * args.batch_size].unique()  # (n,) rows
    ref_policy = frozen(accelerator, load_policy(sft_folder, tokenizer))
    reference = {"train": torch.full((len(train), 2), torch.nan)}
    seen = train.select(used.tolist())
    reference["train"][used] = split_logprobs(accelerator, ref_policy, seen, args, pad_id, "reference, train")
    for split in [split for split in data if split == "validation" or (args.run_eval and split != "train")]:
        reference[split] = split_logprobs(accelerator, ref_policy, data[split], args, pad_id, f"reference, {split}")
    del ref_policy
    reference_seconds = time.time() - start
    policy = load_policy(policy_folder, tokenizer)
    model, optimizer = prepare(accelerator, policy, args)
    # state that an edit carries from update to update: accelerator.register_for_checkpointing(it) before this line
    first = begin_run(accelerator, args)

    # ---- train -----------------------------------------------------------------------------------
    begin = time.time()
    if first == 0:
        write_metrics(accelerator, args, {"time/reference": reference_seconds}, 0, num_updates)
    for update in updates(accelerator, args, first, num_updates):
        start = time.time()
        learning_rate = args.learning_rate * 0.5 * (1 + cos(pi * (update - 1) / num_updates))  # cosine to 0 (table 6)
        for group in optimizer.param_groups:  # a resumed optimiser has those of its checkpoint
            group |= {"lr": learning_rate, "eps": args.adam_eps, "weight_decay": args.weight_decay}
        # Detail 19: the reward model's order for the same seed
        mine = order[(update - 1) * args.batch_size + accelerator.process_index * per_rank :][:per_rank]  # rows
        groups = pair_micro_batches(train[mine.tolist()], args.micro_batch_size, pad_id, accelerator.device)
        sums = defaultdict(float)
        for i, (index, pairs) in enumerate(groups):
            accelerator.sync_gradients = model.require_backward_grad_sync = i == len(groups) - 1  # exchange gradients
            ref_chosen, ref_rejected = reference["train"][mine[index]].to(accelerator.device).unbind(1)
            logprobs = pair_logprobs(model, pairs, pad_id)
            loss = dpo_loss(*logprobs, ref_chosen, ref_rejected, args.beta, args.loss_type, args.label_smoothing).sum()
            accelerator.backward(loss * world / args.batch_size)  # x world: DDP and DeepSpeed average over devices
            policy_chosen, policy_rejected = (x.detach() for x in logprobs)
            chosen, rejected = args.beta * (policy_chosen - ref_chosen), args.beta * (policy_rejected - ref_rejected)
            sums["loss/train"] += loss.detach()
            # at the first update both are 0 but for rounding, which depends on the micro-batches: no hit
            sums["accuracy/train"] += (chosen > rejected + 1e-5).float().sum()
            sums["rewards/chosen"] += chosen.sum()
            sums["rewards/rejected"] += rejected.sum()
            sums["logprobs/chosen"] += policy_chosen.sum()
            sums["logprobs/rejected"] += policy_rejected.sum()
        grad_norm = optimizer_step(accelerator, model, optimizer, args.max_grad_norm, f"update {update}")

        # ---- log ---------------------------------------------------------------------------------
        metrics = {key: (accelerator.reduce(x, "sum") / args.batch_size).item() for key, x in sums.items()}
        metrics["rewards/margin"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        metrics |= {"grad_norm": grad_norm, "learning_rate": learning_rate, "episode": update * args.batch_size}
        metrics |= {"time/update": time.time() - start, "time/total": time.time() - begin}
        if update == num_updates or (args.eval_every and update % args.eval_every == 0):
            rows = implicit_rewards(accelerator, policy, reference, data, args, pad_id, "validation")
            metrics["eval/accuracy"] = accuracy_table("validation", rows)[0]["accuracy"]
        write_metrics(accelerator, args, metrics, update, num_updates)

    # ---- save, evaluate (table 5 for the implicit reward) ----------------------------------------
    save_model(accelerator, args, "model", policy, accelerator.get_state_dict(model), "", tokenizer)
    table = []
    for split in [split for split in data if split != "train" and args.run_eval]:
        rows = implicit_rewards(accelerator, policy, reference, data, args, pad_id, split)
        table += accuracy_table(split, rows)
        write_table(accelerator, args, f"pairs_{split}", rows)
    if args.run_eval:
        write_table(accelerator, args, "accuracy", table, "accuracy of the implicit reward (figure 8)")
    accelerator.print(f"done in {time.time() - begin:.0f} s: {args.output_dir}", flush=True)
    accelerator.end_training()


# ==== evaluation ==================================================================================


def pair_groups(batch: dict, i: int) -> dict:
    """What table 5 groups pair i of a batch by: batch, split, policies, confidence (None where unknown)."""
    groups = {key: batch[key][i] for key in ("batch", "split", "policies") if key in batch}
    confidence = batch["extra"][i]["confidence"] if "extra" in batch else None
    return groups | {"confidence": None if confidence is None else int(confidence)}


def implicit_rewards(
    accelerator: Accelerator, model, reference: dict, data, args, pad_id: int, split: str
) -> list[dict]:
    """Both implicit rewards (equation 5) of every pair of a split, in order, with what table 5 groups the pair by
    (Detail 19); reference {split: (n, 2)}, log-probabilities."""
    logprobs = split_logprobs(accelerator, model, data[split], args, pad_id, split)
    rewards, rows = args.beta * (logprobs - reference[split]), data[split].with_format(None)
    columns = [key for key in ("batch", "split", "policies", "extra") if key in rows.column_names]
    groups = rows.select_columns(columns)[:]
    found = [{"chosen_reward": chosen, "rejected_reward": rejected} for chosen, rejected in rewards.tolist()]
    return [pair_groups(groups, i) | row for i, row in enumerate(found)]


def accuracy_table(name: str, rows: list[dict]) -> list[dict]:
    """Table 5's rows of one split: the share of pairs whose chosen reward is the higher one, over all and per batch,
    confidence, split and policy pair (Detail 16). Null values are a group of their own."""
    frame = pandas.DataFrame(rows)
    frame["hit"] = frame["chosen_reward"] > frame["rejected_reward"]
    frame["overall"], table = "all", []
    for group in [key for key in ("overall", "batch", "confidence", "split", "policies") if key in frame]:
        for value, pairs in frame.groupby(frame[group].astype(object), dropna=False):
            value = "null" if pandas.isna(value) else int(value) if group == "confidence" else value
            row = {"data": name, "group": group, "value": value, "pairs": len(pairs)}
            table.append(row | {"accuracy": pairs["hit"].mean()})
    return table


def write_table(accelerator: Accelerator, args, name: str, rows: list[dict], title: str = ""):
    """Write rows as a CSV file in eval/, called by all processes; print them too where there is a title."""
    frame = pandas.DataFrame(rows)
    with writing(accelerator, Path(args.output_dir, "eval", f"{name}.csv")) as partial:
        if accelerator.is_main_process:
            frame.to_csv(partial, index=False)
    if title:
        accelerator.print(f"\n{title}\n{frame.to_string(index=False)}\n")


def shares(accelerator: Accelerator, data, size: int, description: str):
    """Yield (row indices, rows) of this process's share of a split, up to `size` rows at a time; gather_object puts
    what the processes find into the order of the rows."""
    first, last = (len(data) * (accelerator.process_index + i) // accelerator.num_processes for i in (0, 1))
    for start in progress(accelerator, range(first, last, size), description):
        index = list(range(start, min(start + size, last)))
        yield index, data[index]


# ==== padding and shared queries ==================================================================


def trim(tokens: torch.Tensor, pad_id: int, side: Literal["left", "right"]) -> torch.Tensor:
    """Cut the columns that are padding in every row, but for a width of a multiple of 16 (or all): widths that differ
    at every call leave the heap in pieces, so that memory grows with the run. (b, T) -> (b, up to T)."""
    columns = (tokens != pad_id).any(0).nonzero().flatten()
    if len(columns) == 0:
        return tokens[:, :0]
    used = int(tokens.shape[1] - columns[0] if side == "left" else columns[-1] + 1)
    width = -(-used // 16) * 16
    return tokens[:, -width:] if side == "left" else tokens[:, :width]


def pair_rows(batch: dict, pad_id: int) -> dict:
    """Split stored pairs, the PAIR_COLUMNS (b, T), into what both sides share and what they do not: query (b, Q)
    left-padded, chosen (b, C) and rejected (b, R) right-padded, and chosen_start, rejected_start (b,): how many of
    their first tokens still belong to the query (0 but for templates whose last token joins with the response)."""
    chosen, chosen_label, rejected, rejected_label = (batch[column] for column in PAIR_COLUMNS)
    query = (chosen == rejected) & (chosen != pad_id) & (chosen_label == pad_id) & (rejected_label == pad_id)
    shared = query.long().cumprod(1).sum(1)  # (b,) tokens of both
    queries = [row[:length] for row, length in zip(chosen, shared, strict=True)]
    found = {"query": pad_sequence(queries, batch_first=True, padding_value=pad_id, padding_side="left")}
    for name, tokens, label in (("chosen", chosen, chosen_label), ("rejected", rejected, rejected_label)):
        lengths = (tokens != pad_id).sum(1)
        rows = [row[start:end] for row, start, end in zip(tokens, shared, lengths, strict=True)]
        found[name] = pad_sequence(rows, batch_first=True, padding_value=pad_id)
        found[f"{name}_start"] = lengths - (label != pad_id).sum(1) - shared
    return found


def pair_micro_batches(batch: dict, size: int, pad_id: int, device) -> list[tuple[torch.Tensor, dict]]:
    """Stored pairs in groups of `size` of similar length: row indices, and what pair_rows makes of the rows."""
    lengths = sum((batch[column] != pad_id).sum(1) for column in (PAIR_COLUMNS[0], PAIR_COLUMNS[3]))  # query, both once
    groups = []
    for index in lengths.argsort(descending=True, stable=True).split(size):
        pairs = pair_rows({column: batch[column][index] for column in PAIR_COLUMNS}, pad_id)
        groups.append((index, {key: value.to(device) for key, value in pairs.items()}))
    return groups


def pair_inputs(query, chosen, rejected, pad_id: int) -> tuple[torch.Tensor, dict, list[torch.Tensor]]:
    """A pair as one row `query + chosen + rejected`, all padding on the right, for two passes. Returns (b, P): the
    columns that are query in every row but for its last token, to be run first and cached; the inputs of a second pass
    on that cache: tokens (b, S) of the other columns, a mask (b, 1, S, P + S) in which rejected does not see chosen,
    position ids (b, S) that go on from the query in both; and where in S stand the query's last token and those of
    chosen (b, 1 + C), the query's last token and those of rejected (b, 1 + R). P and P + S are multiples of 16 if
    there is room, as in trim."""
    parts = (query, chosen, rejected)
    tokens = torch.cat(parts, 1)
    part = torch.cat([torch.full((x.shape[1],), i) for i, x in enumerate(parts)]).to(tokens.device).expand_as(tokens)
    lengths = [(x != pad_id).sum(1, keepdim=True) for x in parts]  # 3 x (b, 1)
    split = max(int(lengths[0].min()) - 1, 0)
    split = split // 16 * 16 or split
    real_first = (tokens == pad_id).int().argsort(dim=1, stable=True)
    tokens = trim(tokens.gather(1, real_first), pad_id, "right")
    width = tokens.shape[1]
    part, place = part.gather(1, real_first)[:, :width], torch.arange(width).to(query.device)
    visible = (part[:, None] == 0) | (part[:, split:, None] == part[:, None])  # (b, S, T)
    positions = place - (part == 2) * lengths[1]
    inputs = {"input_ids": tokens[:, split:], "position_ids": positions[:, split:]}
    inputs["attention_mask"] = ((place[split:, None] >= place) & visible)[:, None]
    last = lengths[0] - 1 - split  # (b, 1), the query's last token, which comes before either response
    columns = [last + 1 + torch.arange(x.shape[1]).to(x.device) for x in parts[1:]]
    columns = [torch.cat([last, x], 1).clamp(max=width - split - 1) for x in (columns[0], columns[1] + lengths[1])]
    return tokens[:, :split], inputs, columns


# ==== models ======================================================================================


def load_policy(path: str, tokenizer):
    """A causal language model in float32, without dropout, whose embeddings hold every id of the tokenizer."""
    settings = {"dtype": torch.float32, "attn_implementation": "sdpa", "trust_remote_code": False}
    with or_fail(f"the model in {path} cannot be read"):
        config = without_dropout(AutoConfig.from_pretrained(path, trust_remote_code=False))
        model = AutoModelForCausalLM.from_pretrained(path, config=config, **settings)
    rows = model.get_input_embeddings().num_embeddings
    if rows < len(tokenizer) - 1:
        fail(f"{path}: {rows} embeddings do not fit its tokenizer of {len(tokenizer) - 1} ids and [PAD]: not a pair")
    if rows < len(tokenizer):
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    return model


def without_dropout(config):
    """The config with every dropout at 0 (Detail 7), attention dropout included, which is no nn.Dropout."""
    config.update({k: 0.0 for k, v in config.to_dict().items() if "drop" in k and isinstance(v, int | float)})
    return config


def frozen(accelerator: Accelerator, model, offload: bool = False):
    """A model that is never trained, on the device (offload: in the machine's memory), with weights as those of the
    trained model: under DeepSpeed's bf16 in bfloat16, but for a reward's head; else in float32 (under autocast)."""
    model.to("cpu" if offload else accelerator.device).eval().requires_grad_(False)
    if accelerator.state.deepspeed_plugin and accelerator.mixed_precision == "bf16":
        for name, parameter in model.named_parameters():  # and no buffer: rotary frequencies need their digits
            parameter.data = parameter.data if "score." in name else parameter.data.bfloat16()
    return model


# ==== plumbing: one text in every stage script; read it once, then skip it ========================
# launch, loading, run folder, checkpoints, trackers, optimiser. Nothing here changes a loss or a sample.


def fail(message: str):
    """End the process with one clear message on standard error and exit code 1."""
    raise SystemExit(f"error: {message}")


@contextmanager
def or_fail(message: str):
    """Around what goes wrong outside of the script (a damaged file, a full disk): the run ends with one message."""
    try:
        yield
    except Exception as error:  # of as many kinds as there are formats
        fail(f"{message} ({error!r:.300})")


def make_accelerator(args) -> Accelerator:
    """Fill {model} and {seed} into the arguments' templates. Returns the Accelerator that the launcher asked for, or an
    error where accelerate would silently run something else."""
    for key, value in vars(args).items():
        if isinstance(value, str):
            name = Path(args.model.partition("@")[0]).name
            setattr(args, key, value.replace("{model}", name).replace("{seed}", str(args.seed)))
    if Path(args.output_dir, "args.json").exists() and not args.resume:
        fail(f"{args.output_dir} already holds a run: another --output-dir, delete it, or continue it with --resume")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    gloo = world > 1 and not torch.accelerator.is_available()  # what accelerate must be told, in one of two ways
    accelerator = Accelerator(
        cpu=gloo and not deepspeed,
        mixed_precision=args.mixed_precision or ("bf16" if torch.cuda.is_available() else "no"),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] if gloo and deepspeed else [],
        log_with="tensorboard",
        project_dir=args.output_dir,
    )
    if (accelerator.num_processes, accelerator.state.deepspeed_plugin is not None) != (world, deepspeed):
        fail(f"accelerate does not run {world} processes, DeepSpeed {deepspeed}: launch by benchmark/accelerate/*.yaml")
    set_seed(args.seed)
    return accelerator


def checkpoint_folder(flag: str, path: str) -> str:
    """The local folder of a checkpoint given as run folder, checkpoint folder or Hub id[@revision] (downloaded)."""
    for folder in (Path(path) / "model", Path(path)):
        if (folder / "config.json").exists():
            return str(folder)
    name, _, revision = path.partition("@")
    if name.count("/") != 1 or name.startswith((".", "/")):
        stage, model, seed = ["sft", "MODEL", "SEED", *path.split("/") * path.startswith("runs/")][-3:]
        fail(f"{flag} {path}: no checkpoint there. Train it first: python {stage}.py --model {model} --seed {seed}")
    wanted = {"repo_id": name, "revision": revision or None, "ignore_patterns": "*/*"}  # no value_model/ of PPO's
    with or_fail(f"{flag} {path}: no checkpoint folder, and not on the Hub"):
        folder = snapshot_download(**wanted, allow_patterns=["*.json", "*.safetensors", "*.txt"])
        return folder if [*Path(folder).glob("*.safetensors")] else snapshot_download(**wanted)


def load_tokenizer(path: str):
    """The tokenizer of a checkpoint folder, with `[PAD]` added (Detail 3: never EOS)."""
    with or_fail(f"the tokenizer in {path} cannot be read"):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    return tokenizer


def load_splits(flag: str, path: str, columns: list[str], tokenizer) -> DatasetDict:
    """The DatasetDict in a folder written by tldr_dataset.py, or of a Hub id[@revision]. An error where a split or a
    column is missing, an id is too large, or most of 16 rows are another tokenizer's (tldr_dataset.py --check: all)."""
    name, _, revision = path.partition("@")
    with or_fail(f"{flag} {path}: no data set with train, validation and the columns {columns}; see tldr_dataset.py"):
        data = load_from_disk(path) if Path(path).exists() else load_dataset(name, revision=revision or None)
        for split in ("train", "validation", *data):
            data[split].select_columns(columns)[0]
    keys, eos_id = [column for column in columns if "_token" in column], tokenizer.eos_token_id
    for split, rows in data.items():
        same, largest = [], max(pc.max(pc.list_flatten(rows.data.column(key))).as_py() for key in keys)
        for row in rows.select(range(0, len(rows), -(-len(rows) // 16))):
            query = tokenizer(row["query"], add_special_tokens=False).input_ids
            real = {key: [x for x in row[key] if x != tokenizer.pad_token_id] for key in keys}
            same.append(all(x == query if key == "query_token" else x[-1:] == [eos_id] for key, x in real.items()))
        if 2 * sum(same) <= len(same) or largest >= len(tokenizer):
            found = f"{sum(same)} of {len(same)} rows are as the model's tokenizer makes them; largest id {largest}"
            fail(f"{flag} {path}: {split}: {found}. Make it with tldr_dataset.py --tokenizer MODEL; --check finds more")
    return data.with_format("torch")


@contextmanager
def writing(accelerator: Accelerator, path: Path):
    """Yield a name beside `path` for its new content, a file or folder; then that is synced to disk and renamed: `path`
    is whole or not there. Where this fails what is half-written goes. Called by all processes."""
    partial = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        accelerator.wait_for_everyone()
        yield partial
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            os.sync()
            shutil.rmtree(path, ignore_errors=True)
            os.replace(partial, path)
        accelerator.wait_for_everyone()
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        partial.unlink(missing_ok=True)
        fail(f"{path} could not be written ({error!r:.300}): make room, then continue with --resume")


def begin_run(accelerator: Accelerator, args) -> int:
    """Make the run folder or, with --resume, load its newest checkpoint that can be loaded, and start the trackers.
    Returns the update to go on from. Comes last before the training: a bad command leaves nothing behind."""
    folder, first, lines, old = Path(args.output_dir), 0, "", {}
    if (folder / "args.json").exists():
        old = json.loads((folder / "args.json").read_text())
        changed = [f"{key} {old.get(key)} -> {value}" for key, value in vars(args).items() if value != old.get(key)]
        accelerator.print(f"--resume {folder}, changed: {', '.join(changed) or 'nothing'}")
    for checkpoint in sorted(folder.glob("checkpoints/update_??????"), reverse=True):
        try:
            lines, problem = (checkpoint / "metrics.jsonl").read_text(), None
            accelerator.load_state(str(checkpoint))
        except Exception as error:
            problem = f"{error!r:.300}"
        problems = [problem for problem in gather_object([problem]) if problem]
        accelerator.print(f"--resume: {checkpoint} {f'cannot be loaded: {problems}' if problems else 'is loaded'}")
        if not problems:
            first = int(checkpoint.name.removeprefix("update_"))
            break
    if lines and not first:
        fail(f"--resume: no checkpoint in {folder} can be loaded; launch it as before, or delete it")
    about = {"stage": STAGE, "command": shlex.join(["python", *sys.argv]), "processes": accelerator.num_processes}
    about["wandb_id"] = old.get("wandb_id", os.urandom(8).hex())
    if args.track:
        run = {"dir": args.output_dir, "name": "__".join(folder.parts[-3:]), "id": about["wandb_id"], "resume": "allow"}
        run["settings"] = {"finish_timeout": float(os.environ.get("WANDB_FINISH_TIMEOUT", 300))}  # seconds
        accelerator.log_with.append(WandBTracker(None, config=asdict(args), **run))
    with or_fail("the trackers do not start (WANDB_MODE=offline keeps what W&B gets in the run folder)"):
        accelerator.init_trackers("tensorboard", init_kwargs={"tensorboard": {"purge_step": first + 1 if first else 0}})
    for name, text in (("args.json", json.dumps(about | asdict(args), indent=2) + "\n"), ("metrics.jsonl", lines)):
        with writing(accelerator, folder / name) as partial:
            if accelerator.is_main_process:
                partial.write_text(text)
    return first


def updates(accelerator: Accelerator, args, first: int, last: int):
    """Yield the updates first + 1 to last under a progress bar. After each comes a checkpoint where one is due, or
    where SIGTERM or SIGUSR1, a scheduler's notice, has come: then the run ends there, with exit code 75."""
    caught, folder, left_over = [], Path(args.output_dir), args.total_episodes - last * args.batch_size
    accelerator.print(f"{STAGE}: {last:,} updates of {args.batch_size}, {left_over} left over, on {accelerator.device}")
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: caught.append(number))  # and no more: it ends between two updates
    for update in progress(accelerator, range(first + 1, last + 1), STAGE):
        yield update
        stop = accelerator.reduce(torch.tensor(len(caught), device=accelerator.device), "sum") > 0
        if stop or (args.save_every and update % args.save_every == 0):
            path = folder / "checkpoints" / f"update_{update:06d}"
            with writing(accelerator, path) as partial:
                accelerator.save_state(str(partial))
                if accelerator.is_main_process:
                    shutil.copy(folder / "metrics.jsonl", partial)
            written = sorted(old for old in path.parent.glob("update_??????") if old <= path)
            for old in written[: -max(args.keep_checkpoints, 1)]:
                shutil.rmtree(old, ignore_errors=True)  # every process may
        if stop:
            accelerator.print(f"stopped by a signal after update {update}; {folder} continues with --resume")
            accelerator.end_training()
            raise SystemExit(75)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)


def progress(accelerator: Accelerator, items, description: str):
    """Yield `items` under a rich progress bar with the rate and the time left, shown by the main process only."""
    columns = *Progress.get_default_columns(), TextColumn("{task.completed:.0f}/{task.total:.0f}, {task.speed!s:.4}/s")
    with Progress(*columns, console=Console(stderr=True), disable=not accelerator.is_main_process) as bar:
        yield from bar.track(items, len(items), description=description)


def write_metrics(accelerator: Accelerator, args, metrics: dict, update: int, last: int):
    """One line of metrics.jsonl, the same to the trackers; at each twentieth of the run the first five are printed."""
    metrics = {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in metrics.items()}
    if accelerator.is_main_process:
        with or_fail("metrics.jsonl could not be written"), Path(args.output_dir, "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"update": update, **metrics}) + "\n")
    accelerator.log(metrics, step=update)
    if update % max(1, last // 20) == 0:
        accelerator.print(f"update {update}/{last}", *(f" {key} {metrics[key]:.4g}" for key in list(metrics)[:5]))


def save_model(accelerator: Accelerator, args, name: str, model, state: dict, prefix: str, tokenizer):
    """Write a transformers checkpoint into the run folder: the weights in `state` whose names begin with `prefix`."""
    with writing(accelerator, Path(args.output_dir, name)) as partial:
        if accelerator.is_main_process:
            own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            model.save_pretrained(partial, state_dict=own)
            tokenizer.save_pretrained(partial)


def prepare(accelerator: Accelerator, model, args):
    """Model and AdamW as the launcher asked for them (plain, DDP, DeepSpeed)."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    settings = {"lr": args.learning_rate, "eps": args.adam_eps, "weight_decay": args.weight_decay, "fused": True}
    if accelerator.state.deepspeed_plugin:  # what DeepSpeed would else default to, or take from a data loader
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        config |= {"train_micro_batch_size_per_gpu": args.micro_batch_size, "gradient_clipping": args.max_grad_norm}
        config |= {"gradient_accumulation_steps": 1, "zero_force_ds_cpu_optimizer": False}  # offloaded, it is torch's
        config["data_types"] = {"grad_accum_dtype": "fp32"}  # else the micro-batches' gradients are summed in bfloat16
        if config["zero_optimization"]["stage"] == 3:
            fail("ZeRO-3 is not supported: benchmark/accelerate/zero2_offload.yaml takes every size")
    return accelerator.prepare(model, torch.optim.AdamW(parameters, **settings))


def optimizer_step(accelerator: Accelerator, model, optimizer, max_grad_norm: float, where: str) -> float:
    """One step from the gradients summed so far; returns their global norm before clipping, an error if not finite."""
    norm = float(accelerator.clip_grad_norm_(model.parameters(), max_grad_norm or float("inf")))
    if not norm < float("inf"):  # or nan
        fail(f"{where}: the gradient norm is {norm}; nothing of this update was saved")
    optimizer.step()
    optimizer.zero_grad()
    return norm


if __name__ == "__main__":
    main(tyro.cli(Args))
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":  # it leaves threads that can abort the interpreter's end
        os._exit(0)  # all is written
