"""Weight-averaged reward models: one reward model whose weights are the mean of several members' weights.

    python ensembles/average.py --reward-model-paths runs/reward/1b/{1,2,3,4,5} \
        --preference-dataset data/labelled/noise_25 --output-dir runs/reward/1b/average

After "WARM: On the Benefits of Weight Averaged Reward Models" (Rame et al. 2024), equation 2: the weights are
1/k x (theta_1 + ... + theta_k), so that you train against one model in place of k. Only models that were fine-tuned
from one base can be averaged, because they stay linearly connected. WARM also trains all members from one head, whereas
reward.py draws a new head for each seed (Detail 11), to which a member's body adapts. The script therefore prints the
validation accuracy of the average beside those of its members, and warns where it is below the worst of them.

OUTPUT_DIR/ model/, a folder like reward.py's; args.json; and accuracy.csv: for each member and the average, the share
            of the validation pairs whose chosen response scores higher (ties half), of all pairs and of each value of
            their column `batch` (kept and flipped labels of gold_label.py), if they have one. A batch that has the name
            of another column, such as all, is called "batch all"
"""

import json
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import pandas
import torch
import torch.nn.functional as F
import tyro
from rich.console import Console
from rich.progress import track

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in (".", "eval")]

from eval_helpers import at_least, last_rewards, same_tokenizer, save_checkpoint, wins  # noqa: E402

from ppo import fail, load_reward_model, load_splits, load_tokenizer, local_checkpoint, or_fail  # noqa: E402
from tldr_dataset import unfinished_folder  # noqa: E402

COLUMNS = ["query", "query_token", "query_chosen_token", "query_rejected_token"]
TAKEN = ("model", "pairs", "all")  # columns of accuracy.csv that are no batch
ONE_BASE = 0.5  # cosine of two members' weights: above 0.9 after training from one base, about 0 between two bases


@dataclass
class Args:
    reward_model_paths: list[str]
    """two or more reward models that were trained from one SFT model: run folders, checkpoint folders or Hub
    ids[@revision]"""
    output_dir: str
    """run folder to write; it must not exist yet"""
    preference_dataset: str = "data/tldr/preference"
    """pairs whose validation split tells the accuracies: folder or Hub id[@revision]"""
    micro_batch_size: int = 32
    """pairs in a forward pass: memory and speed, and rounding"""


# ---- the average ---------------------------------------------------------------------------------------------------


def mean_weights(states: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the mean of k models' weights, summed in float64: {name: float32 tensor}."""
    return {name: torch.stack([state[name].double() for state in states]).mean(0).float() for name in states[0]}


def same_base(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the cosine of two models' weight matrices, all as one vector, without the head."""
    names = [name for name, tensor in one.items() if tensor.dim() > 1 and not name.startswith("score.")]
    flat = [torch.cat([state[name].flatten().double() for name in names]) for state in (one, other)]
    return F.cosine_similarity(*flat, dim=0).item()


@torch.no_grad()
def accuracies(model, pairs, pad_id: int, size: int, name: str) -> dict[str, float]:
    """Return {"all" or a value of the column `batch`: share of the pairs whose chosen response scores higher, ties
    half}. A pair without batch (None) counts in all alone."""
    won, everything, device = defaultdict(list), [], next(model.parameters()).device
    for start in track(range(0, len(pairs), size), name, console=Console(stderr=True), transient=True):
        batch = pairs[start : start + size]
        chosen = last_rewards(model, batch["query_chosen_token"].to(device), pad_id)
        rejected = last_rewards(model, batch["query_rejected_token"].to(device), pad_id)
        same = (batch["query_chosen_token"] == batch["query_rejected_token"]).all(1).to(device)
        hits = torch.where(same, 0.5, wins(chosen, rejected)).tolist()
        for label, hit in zip(batch.get("batch", []), hits, strict=False):
            if label is not None:
                won[f"batch {label}" if label in TAKEN else label].append(hit)
        everything += hits
    return {"all": fmean(everything)} | {label: fmean(won[label]) for label in sorted(won)}


def main(args: Args):
    # ---- input -----------------------------------------------------------------------------------
    at_least(1, args, "micro_batch_size")
    output_dir = Path(args.output_dir)
    if output_dir.exists():
        fail(f"{output_dir} exists; remove it (rm -r {output_dir}) or name another --output-dir")
    folders = {path: local_checkpoint("--reward-model-paths", path) for path in args.reward_model_paths}
    members = {Path(folder).resolve() for folder in folders.values()}  # X and X/model are one
    if len(members) < max(2, len(args.reward_model_paths)):
        fail(f"--reward-model-paths {' '.join(args.reward_model_paths)}: two or more, each once, make an average")
    first = args.reward_model_paths[0]
    tokenizer = load_tokenizer(folders[first])
    for path, folder in folders.items():
        if not same_tokenizer(load_tokenizer(folder), tokenizer):
            fail(f"{path} has another tokenizer or EOS than {first}: their weights do not mean the same")
    pairs = load_splits("--preference-dataset", args.preference_dataset, COLUMNS, tokenizer)["validation"]
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    width = max(len(pairs[0][key]) for key in COLUMNS[2:])
    models = {path: load_reward_model(folder, tokenizer, width).eval() for path, folder in folders.items()}
    states = {path: model.model.state_dict() for path, model in models.items()}
    for path, state in states.items():
        shapes, wanted = ({name: tensor.shape for name, tensor in x.items()} for x in (state, states[first]))
        cosine = same_base(state, states[first]) if shapes == wanted else float("nan")
        if not cosine > ONE_BASE:
            why = "other shapes" if shapes != wanted else f"a cosine of {cosine:.2f} of their weights"
            fail(f"{path} is of another base than {first} ({why}): their average is nothing; an ensemble takes both")

    # ---- average, accuracies ---------------------------------------------------------------------
    mean = load_reward_model(folders[first], tokenizer).eval()
    mean.model.load_state_dict(mean_weights(list(states.values())))
    mean.reward_mean = fmean(model.reward_mean for model in models.values())
    rows = []
    for path, model in [*models.items(), ("average", mean)]:
        shares = accuracies(model.to(device), pairs, tokenizer.pad_token_id, args.micro_batch_size, path)
        model.to("cpu")
        rows.append({"model": path, "pairs": len(pairs)} | shares)
        print(f"{path}: accuracy", ", ".join(f"{label} {share:.4f}" for label, share in shares.items()), flush=True)
    worst = min(rows[:-1], key=lambda row: row["all"])
    if rows[-1]["all"] < worst["all"]:
        print(f"warning: the average is below its worst member, {worst['model']}: were all trained from one head?")

    with or_fail(f"{output_dir} could not be written"), unfinished_folder(output_dir) as folder:
        finished = folder / "finished"
        save_checkpoint(mean.to_transformers(), tokenizer, finished / "model")
        pandas.DataFrame(rows).to_csv(finished / "accuracy.csv", index=False)
        settings = {"stage": "average"} | asdict(args)
        (finished / "args.json").write_text(json.dumps(settings, indent=2) + "\n")
    print(f"wrote {output_dir}")


if __name__ == "__main__":
    main(tyro.cli(Args))
