"""Summaries of a checkpoint: sampled, with their ROUGE, with a reward model its scores, and with a reference the KL to
it. Of any stage's policy.

    python eval/samples.py runs/sft/1b/44413
    python eval/samples.py runs/ppo/1b/44413 --reward-model-path runs/reward/1b/44413 --splits validation
    python eval/samples.py runs/dpo/1b/44413 --reference runs/sft/1b/44413 --temperature 0.7 --output-dir runs/kl/dpo
    torchrun --nproc_per_node 8 eval/samples.py EleutherAI/pythia-1b-deduped --output-dir runs/samples/1b

A checkpoint is a run folder, a checkpoint folder or a Hub id[@revision]. Of a run folder (or the model/ in it) seed,
data and response length are the run's, and the tables go into its eval/: samples_{split}.csv, a row a post in the order
of the data, and rouge.csv, their means. Before the first sample, an earlier call's rouge.csv is removed, and its
samples of splits that this call leaves out, because rouge.csv will not have them. Nothing else of a run is touched.
Sampling is Gumbel-max with noise keyed by (seed, row, position) at temperature 0.01, as in the authors' code: the
number of processes and the batch size change nothing.
"""

import csv
import json
import os
import re
import sys
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Annotated, Literal

import pandas
import torch
import tyro
from accelerate import Accelerator
from accelerate.tracking import WandBTracker
from accelerate.utils import gather_object
from rouge_score.rouge_scorer import RougeScorer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval_helpers import at_least, last_rewards, log_ratios, same_tokenizer, wins  # noqa: E402

from ppo import (  # noqa: E402
    fail,
    generate,
    load_policy,
    load_reward_model,
    load_splits,
    load_tokenizer,
    local_checkpoint,
    make_batch,
    noise_keys,
    or_fail,
    writing,
)
from reward import own_batches  # noqa: E402

DATASET = "vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144"
COLUMNS = ["id", "query", "query_token", "reference_response", "reference_response_token"]


@dataclass
class Args:
    checkpoint: Annotated[str, tyro.conf.Positional]
    """policy: run folder, checkpoint folder or Hub id[@revision]"""
    reward_model_path: str | None = None
    """reward model that scores the samples and the references, likewise"""
    reference: str | None = None
    """policy, likewise: the column kl is the sum of log pi - log pi_reference over a response, at --temperature"""
    splits: tuple[str, ...] = ("validation", "test")
    """splits whose posts are summarised; one that the data lack is left out"""
    dataset: str | None = None
    """SFT data: folder or Hub id[@revision]; default the run's or its SFT model's, for a checkpoint that is no run
    data/tldr/sft if there, else the published set"""
    output_dir: str | None = None
    """folder in which eval/ is written; default the run folder, else runs/samples/{its name[@revision]}/{seed}"""
    seed: int | None = None
    """seed of the sampling noise; default the run's, else 44413"""
    response_length: int | None = None
    """tokens sampled at most; default the run's, else 53 (Detail 4)"""
    temperature: float = 0.01
    """sampling temperature (the paper's code)"""
    batch_size: int = 32
    """rows per device at a time: memory and speed, and rounding"""
    mixed_precision: Literal["no", "bf16"] | None = None
    """bf16: bfloat16 weights but for a reward's head; default bf16 on a GPU (Detail 8), no on a CPU"""
    track: bool = False
    """give the first 64 samples of a split to the W&B run of the run folder, as a table"""


@torch.no_grad()
def sampled(accelerator: Accelerator, policy, reward_model, reference, data, tokenizer, args, split: str) -> list[dict]:
    """Return a sampled summary of every row of a split, in order: dicts of id, query, response, reference,
    response_tokens (EOS counted), has_eos, with a reward model score (whether there is an EOS or not) and
    reference_score, with a reference policy kl, and the F-measures rouge1, rouge2, rougeL (no stemming, as the
    authors). A score or kl that is not finite is an error. The last columns are the tokens of query, response and
    reference, without [PAD]."""
    pad_id = tokenizer.pad_token_id
    rouge = RougeScorer(["rouge1", "rouge2", "rougeL"])
    samples = []
    for index, posts in own_batches(accelerator, data, args.batch_size, f"sampling {split}"):
        queries = posts["query_token"].to(accelerator.device)
        keys = noise_keys(args.seed, 0, index, args.response_length).to(accelerator.device)
        with accelerator.autocast():
            responses, _ = generate(policy, queries, tokenizer, args.response_length, args.temperature, keys)
        ids = {"query": posts["query_token"], "response": responses, "reference": posts["reference_response_token"]}
        batch, scores = make_batch(queries, responses, pad_id), {}
        with accelerator.autocast():
            if reward_model:
                references = make_batch(queries, ids["reference"].to(accelerator.device), pad_id)
                for name, rows in (("score", batch), ("reference_score", references)):
                    scores[name] = last_rewards(reward_model, rows["tokens"], pad_id).tolist()
            if reference:
                scores["kl"] = log_ratios(policy, reference, batch, args.temperature, args.batch_size).tolist()
        for i, tokens in enumerate(responses.tolist()):
            row = {"id": posts["id"][i], "query": posts["query"][i]}
            row["response"] = tokenizer.decode(tokens, skip_special_tokens=True)
            row["reference"] = posts["reference_response"][i].removesuffix(tokenizer.eos_token)
            row["response_tokens"] = sum(token != pad_id for token in tokens)
            row["has_eos"] = tokenizer.eos_token_id in tokens
            for name, values in scores.items():
                row[name] = values[i]
                if not isfinite(values[i]):
                    where = f"{split}, row {index[i]}, id {row['id']}"
                    model = f"--reward-model-path {args.reward_model_path}"
                    model = f"--reference {args.reference}" if name == "kl" else model
                    fail(f"{where}: {model} gives the {name} {values[i]}, which is not finite. Choose another model")
            for name, measure in rouge.score(row["reference"], row["response"]).items():
                row[name] = measure.fmeasure
            row |= {f"{name}_token": [x for x in rows[i].tolist() if x != pad_id] for name, rows in ids.items()}
            samples.append(row)
    return gather_object(samples)


def sample_summary(split: str, rows: list[dict]) -> dict:
    """Return means over the rows of a split: ROUGE, length in tokens (EOS counted), share that ended with EOS, scores
    and kl, and the share that scores above the reference (ties half)."""
    keys = ("rouge1", "rouge2", "rougeL", "response_tokens", "has_eos", "score", "reference_score", "kl")
    means = {key: sum(float(row[key]) for row in rows) / len(rows) for key in keys if key in rows[0]}
    if "score" in means:
        means["score_above_reference"] = sum(wins(row["score"], row["reference_score"]) for row in rows) / len(rows)
    return {"split": split, "rows": len(rows)} | means


def settings_of(folder: Path) -> dict:
    """Return the arguments of a run, from its args.json; {} for a folder that is no run."""
    file = folder / "args.json"
    with or_fail(f"{file} cannot be read"):
        return json.loads(file.read_text()) if file.exists() else {}


def dataset_of(checkpoint: str, known: dict) -> str:
    """Return the data set of a run with the arguments `known`: its own or, because DPO and SimPO have only pairs, its
    SFT model's. A checkpoint that is no run ({}) has the default one; a run whose data set is not known is an error."""
    if not known:
        return "data/tldr/sft" if Path("data/tldr/sft").exists() else DATASET
    dataset, sft_model = known.get("dataset"), known.get("sft_model_path")
    if sft_model and not dataset:
        folder = Path(sft_model)  # the run folder, or model/ in it
        dataset = (settings_of(folder) or settings_of(folder.parent)).get("dataset")
    if not dataset:
        fail(
            f"{checkpoint}/args.json names no SFT data, and its SFT model, {sft_model}, is no run folder that does. "
            "Pass the posts to summarise with --dataset"
        )
    return dataset


def placed(model, accelerator):
    """Return a model on the device. Under bf16, weights but a reward's head are bfloat16 before they come there, which
    takes half the memory; autocast would keep a copy of them beside float32."""
    if accelerator.mixed_precision == "bf16":
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data if "score." in name else parameter.data.bfloat16()
    return model.to(accelerator.device).eval()


def main(args: Args):
    checkpoint = Path(args.checkpoint)
    if checkpoint.name == "model" and (checkpoint.parent / "args.json").exists():
        args.checkpoint = str(checkpoint.parent)  # the run
    known = settings_of(Path(args.checkpoint))
    args.seed = known.get("seed", 44413) if args.seed is None else args.seed
    if args.response_length is None:
        args.response_length = known.get("response_length", 53)
    at_least(1, args, "response_length", "batch_size")
    at_least(0, args, "temperature")
    args.dataset = args.dataset or dataset_of(args.checkpoint, known)
    repository, at, revision = args.checkpoint.partition("@")
    name = checkpoint.name if checkpoint.exists() else Path(repository).name + at + revision.replace("/", "-")
    args.output_dir = args.output_dir or (args.checkpoint if known else f"runs/samples/{name}/{args.seed}")
    if args.track and "wandb_id" not in known:
        fail(f"--track: {args.checkpoint} is no run folder that knows its W&B run")
    # cuDNN's attention builds a plan for every new shape, and its backward pass has given NaN under a mask
    torch.backends.cuda.enable_cudnn_sdp(False)
    world, precision = int(os.environ.get("WORLD_SIZE", "1")), "bf16" if torch.cuda.is_available() else "no"
    accelerator = Accelerator(
        cpu=world > 1 and not torch.accelerator.is_available(), mixed_precision=args.mixed_precision or precision
    )
    if accelerator.num_processes != world:
        fail(
            f"{world} processes were launched, accelerate sees {accelerator.num_processes}: benchmark/accelerate/*.yaml"
        )
    folder = local_checkpoint("checkpoint", args.checkpoint)
    tokenizer = load_tokenizer(folder)
    data = load_splits("--dataset", args.dataset, COLUMNS, tokenizer)
    if not [split for split in args.splits if split in data]:
        fail(f"--splits {' '.join(args.splits)}: {args.dataset} has {', '.join(data)}")
    first = next(iter(data.values()))[0]
    longest = max(args.response_length, len(first["reference_response_token"]))
    width = max(len(rows[0]["query_token"]) for rows in data.values()) + longest
    policy, reward_model = placed(load_policy(folder, tokenizer, width), accelerator), None
    if args.reward_model_path:
        reward_folder = local_checkpoint("--reward-model-path", args.reward_model_path)
        if not same_tokenizer(load_tokenizer(reward_folder), tokenizer):
            fail(f"--reward-model-path {reward_folder}: a reward model of another tokenizer or EOS than {folder}")
        reward_model = placed(load_reward_model(reward_folder, tokenizer, width), accelerator)
    reference = None
    if args.reference:
        reference_folder = local_checkpoint("--reference", args.reference)
        if not same_tokenizer(load_tokenizer(reference_folder), tokenizer):
            fail(f"--reference {reference_folder}: a policy of another tokenizer or EOS than {folder}")
        reference = placed(load_policy(reference_folder, tokenizer, width), accelerator)
    tracker = WandBTracker(None, dir=args.output_dir, id=known.get("wandb_id"), resume="allow")
    if args.track and accelerator.is_main_process:
        tracker.start()
    tables = Path(args.output_dir, "eval")
    if accelerator.is_main_process:
        described = pandas.read_csv(tables / "rouge.csv")["split"] if (tables / "rouge.csv").exists() else []
        for split in {*described, *data} - {*args.splits}:
            (tables / f"samples_{split}.csv").unlink(missing_ok=True)
        (tables / "rouge.csv").unlink(missing_ok=True)
    table = []
    for split in [split for split in args.splits if split in data]:
        rows = sampled(accelerator, policy, reward_model, reference, data[split], tokenizer, args, split)
        table.append(sample_summary(split, rows))
        unread = sum(re.search("[a-z0-9]", row["reference"].lower()) is None for row in rows)
        if unread:
            what = f"{unread} of {len(rows)} references have no Latin letter or digit"
            accelerator.print(f"{split}: {what}; rouge-score reads nothing else, so their ROUGE is always 0")
        write_quoted(accelerator, args, f"samples_{split}", rows)
        if args.track and accelerator.is_main_process:
            tracker.log_table(f"samples/{split}", dataframe=pandas.DataFrame(rows[:64]))
    write_quoted(accelerator, args, "rouge", table, f"samples of {folder}")
    if args.track and accelerator.is_main_process:
        tracker.finish()
    accelerator.end_training()


def write_quoted(accelerator: Accelerator, args, name: str, rows: list[dict], title: str = ""):
    """Write rows as a CSV file in eval/, called by all processes; print them too where there is a title. Texts are
    quoted: one that is not may hold no carriage return, which a model can sample."""
    frame = pandas.DataFrame(rows)
    with writing(accelerator, Path(args.output_dir, "eval", f"{name}.csv")) as partial:
        if accelerator.is_main_process:
            frame.to_csv(partial, index=False, quoting=csv.QUOTE_NONNUMERIC)
    if title:
        accelerator.print(f"\n{title}\n{frame.to_string(index=False)}\n")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    main(tyro.cli(Args))
