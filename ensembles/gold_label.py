"""A preference data set without human labels: a policy answers each prompt twice, and a gold reward labels the pair.

    python ensembles/gold_label.py --policy runs/sft/base/1 --dataset data/alpaca/pref --gold runs/gold \
        --response-length 256 --output-dir data/alpaca/labelled
    python reward.py --preference-dataset data/alpaca/labelled/noise_25 --dataset data/alpaca/sft ...

The better answer becomes the chosen one. Sampling noise depends on (seed, prompt, answer), so the batch size does not
change the answers. Pairs are left out if the answers are equal, if their rewards are (rounding aside), or if an answer
did not reach EOS.
Labels that are flipped at a lower share are also flipped at a higher one, so the data sets differ in nothing else.

OUTPUT_DIR/noise_N, one for each value of --label-noise (N in percent), holds train and validation in the columns of
tldr_dataset.py's preference data, with `gold_chosen` and `gold_rejected`. `batch` is kept or flipped, so reward.py and
dpo.py --run-eval group their accuracies by it.
"""

import re
import sys
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from datasets import Dataset, DatasetDict, Features, Value, disable_progress_bars
from rich.console import Console
from rich.progress import Progress
from transformers import GenerationConfig, LogitsProcessor

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in (".", "eval")]

from eval_helpers import at_least, fail, load_function, nucleus, or_fail, tied  # noqa: E402

from ppo import (  # noqa: E402
    RewardModel,
    gumbel_noise,
    load_policy,
    load_reward_model,
    load_splits,
    load_tokenizer,
    local_checkpoint,
    noise_keys,
)
from tldr_dataset import column_types, padded_columns, unfinished_folder  # noqa: E402

COLUMNS = ["id", "query", "query_token"]


@dataclass
class Args:
    policy: str
    """model that answers: run folder, checkpoint folder or Hub id[@revision]"""
    gold: str
    """gold reward: a reward model of the same tokenizer, or path.py:function of the texts (post, summary)"""
    dataset: str = "data/tldr/sft"
    """SFT data whose queries are the prompts: folder or Hub id[@revision]; train and validation"""
    output_dir: str = "data/gold_labelled"
    """folder to write; it must not hold anything yet"""
    label_noise: tuple[float, ...] = (0.0, 0.25, 0.35)
    """shares of flipped labels, a data set for each (section 4.3: 0 and 0.25, appendix F.6: 0.35)"""
    prompts: int | None = None
    """the first so many of train; default: all"""
    seed: int = 1
    """seed of the sampled answers and of the flipped labels"""
    temperature: float = 1.0
    """sampling temperature of the answers (table 4)"""
    top_p: float = 0.9
    """the smallest set of tokens with this probability is sampled from (table 4); 1: all"""
    response_length: int = 53
    """tokens sampled at most (table 4: 256)"""
    micro_batch_size: int = 64
    """prompts of one length that are answered at a time, at most: memory and speed only"""


# ---- answers ---------------------------------------------------------------------------------------------------------


def equal_lengths(lengths: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Return row indices in groups of at most `size` rows of equal length, which need no padding, and so no mask. The
    longest rows come first. lengths: (b,)."""
    groups = []
    for length in lengths.unique().flip(0):
        groups += (lengths == length).nonzero().squeeze(1).split(size)
    return groups


class NucleusGumbel(LogitsProcessor):
    """Makes generate()'s arg max sample the top_p tokens: it returns what nucleus leaves of the scaled logits, plus
    keyed Gumbel noise. The policy's head bans [PAD] and ids beyond the tokenizer."""

    def __init__(self, keys: torch.Tensor, query_width: int, args):
        self.keys, self.query_width, self.args = keys, query_width, args

    def __call__(self, input_ids, scores):
        position = input_ids.shape[1] - self.query_width
        noise = gumbel_noise(self.keys[:, position], scores.shape[1])
        scaled = scores.float() / self.args.temperature
        return nucleus(scaled, self.args.top_p) + noise


@torch.no_grad()
def answers(model, queries: torch.Tensor, tokenizer, keys: torch.Tensor, args) -> torch.Tensor:
    """Return responses (b, R) to queries (b, Q) of one length, with [PAD] after the first EOS and the noise of keys
    (b, R, 2)."""
    pad_id = tokenizer.pad_token_id
    model.generation_config = GenerationConfig(  # so that the checkpoint's own settings do not apply
        max_new_tokens=args.response_length, do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=pad_id
    )
    sampler = NucleusGumbel(keys, queries.shape[1], args)
    tokens = model.generate(queries, logits_processor=[sampler])[:, queries.shape[1] :]
    return F.pad(tokens, (0, args.response_length - tokens.shape[1]), value=pad_id)


@torch.no_grad()
def gold_score(gold, query: dict, tokens: torch.Tensor, tokenizer, device) -> float:
    """Return the gold reward of a response without padding (R,) to a row of the prompts, without padding as well."""
    if not isinstance(gold, RewardModel):
        return float(gold(query["query"], tokenizer.decode(tokens, skip_special_tokens=True)))
    return gold(torch.cat([query["tokens"], tokens])[None].to(device))[0, -1].item()


# ---- labels ----------------------------------------------------------------------------------------------------------


def flipped(n: int, share: float, seed: int, split: str) -> list[bool]:
    """Return which of n labels are flipped: exactly round(share x n), the first of an order drawn from the seed."""
    generator = torch.Generator().manual_seed(noise_keys(seed, 0, [split], 1)[0, 0, 0].item())
    order = torch.randperm(n, generator=generator)
    chosen = torch.zeros(n, dtype=torch.bool)
    chosen[order[: int(share * n + 0.5)]] = True
    return chosen.tolist()


def pair_columns(prompt: dict, pair: list[dict], flip: bool, split: str, args, tokenizer) -> dict:
    """Return the columns of a pair. `prompt` has id, query, query_token and `tokens` (query_token without padding), and
    `pair` has the tokens and the gold reward of both answers."""
    query, width = prompt["tokens"].tolist(), len(prompt["query_token"])
    widths = (width, args.response_length, width + args.response_length)
    choice = int(pair[1]["gold"] > pair[0]["gold"]) ^ flip
    columns = {"id": prompt["id"], "query": prompt["query"], "query_token": prompt["query_token"].tolist()}
    columns |= {"query_token_len": len(query), "choice": choice, "batch": "flipped" if flip else "kept"}
    columns |= {"split": split, "extra": {"confidence": None}, "policies": "sample_0--sample_1"}
    for name, which in (("chosen", choice), ("rejected", 1 - choice)):
        tokens = pair[which]["tokens"]
        text = tokenizer.decode(tokens)
        columns |= padded_columns(name, (text, prompt["query"] + text), query, tokens, tokenizer.pad_token_id, widths)
        columns |= {f"{name}_policy": f"sample_{which}", f"gold_{name}": pair[which]["gold"]}
    return columns


def main(args: Args):
    disable_progress_bars()  # of `datasets`
    # ---- input -----------------------------------------------------------------------------------
    output_dir = Path(args.output_dir).expanduser()
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        fail(f"{output_dir} already holds data: remove it, or choose another --output-dir")
    if not args.label_noise or not all(0 <= share <= 1 for share in args.label_noise):
        fail(f"--label-noise {args.label_noise}: shares of flipped labels, from 0 to 1")
    at_least(1, args, "prompts", "response_length", "micro_batch_size")
    if not (args.temperature > 0 and 0 < args.top_p <= 1):
        fail(f"--temperature {args.temperature} --top-p {args.top_p}: above 0, and in (0, 1]")
    folder = local_checkpoint("--policy", args.policy)
    tokenizer = load_tokenizer(folder)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    # cuDNN's attention builds a plan for every new shape, and its backward pass has given NaN under a mask
    torch.backends.cuda.enable_cudnn_sdp(False)
    data = load_splits("--dataset", args.dataset, COLUMNS, tokenizer)
    width = max(len(data[split][0]["query_token"]) for split in ("train", "validation")) + args.response_length
    if re.fullmatch(r".+\.py:\w+", args.gold):
        gold = load_function("--gold", args.gold)
    else:
        path = local_checkpoint("--gold", args.gold)
        if load_tokenizer(path).get_vocab() != tokenizer.get_vocab():
            fail(f"--gold {args.gold} has another tokenizer than {folder}: it cannot score that model's tokens")
        gold = load_reward_model(path, tokenizer, width).to(device).eval()
    policy = load_policy(folder, tokenizer, width).to(device).eval()
    pad_id = tokenizer.pad_token_id

    # ---- two answers to each prompt --------------------------------------------------------------
    made = {share: DatasetDict() for share in args.label_noise}
    with Progress(console=Console(stderr=True)) as bar:
        for split in ("train", "validation"):
            rows = data[split].select_columns(COLUMNS)
            prompts = [rows[i] for i in range(min(args.prompts or len(rows), len(rows)))]
            for prompt in prompts:
                prompt["tokens"] = prompt["query_token"][prompt["query_token"] != pad_id]
            task = bar.add_task(split, total=len(prompts))
            pairs = [[] for _ in prompts]
            lengths = torch.tensor([len(prompt["tokens"]) for prompt in prompts])
            for index in equal_lengths(lengths, args.micro_batch_size):
                batch = torch.stack([prompts[i]["tokens"] for i in index]).to(device)
                for which in (0, 1):
                    names = [f"{split} {i}" for i in index.tolist()]
                    keys = noise_keys(args.seed, which, names, args.response_length).to(device)
                    for i, response in zip(index, answers(policy, batch, tokenizer, keys, args).cpu(), strict=True):
                        tokens = response[response != pad_id]
                        where = f"{split}, prompt {i} ({prompts[i]['id']}): --gold {args.gold}"
                        with or_fail(f"{where} failed to score an answer"):
                            score = gold_score(gold, prompts[i], tokens, tokenizer, device)
                        if not isfinite(score):
                            fail(f"{where} gives an answer the score {score}")
                        pairs[i].append({"tokens": tokens.tolist(), "gold": score})
                bar.advance(task, len(index))

            # ---- labels --------------------------------------------------------------------------
            kept = []
            for prompt, pair in zip(prompts, pairs, strict=True):
                ended = all(answer["tokens"][-1] == tokenizer.eos_token_id for answer in pair)
                if ended and pair[0]["tokens"] != pair[1]["tokens"] and not tied(pair[0]["gold"], pair[1]["gold"]):
                    kept.append((prompt, pair))
            print(f"{split}: {len(kept)} pairs of {len(pairs)} prompts")
            if not kept:
                fail(f"{args.dataset}, {split}: no pair is left; try a larger --response-length")
            for share, splits in made.items():
                flips = flipped(len(kept), share, args.seed, split)
                pairs = [pair_columns(*x, flip, split, args, tokenizer) for x, flip in zip(kept, flips, strict=True)]
                types = {name: kind for name, kind in column_types("preference").items() if name in pairs[0]}
                types |= dict.fromkeys(("gold_chosen", "gold_rejected"), Value("float64"))
                splits[split] = Dataset.from_list(pairs, features=Features(types))

    # ---- save ------------------------------------------------------------------------------------
    with unfinished_folder(output_dir) as folder:
        for share, splits in made.items():
            splits.save_to_disk(folder / "finished" / f"noise_{100 * share:g}")
    print(f"wrote {', '.join(f'{output_dir}/noise_{100 * share:g}' for share in made)}")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    main(tyro.cli(Args))
