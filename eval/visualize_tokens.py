"""What alignment changed, token by token: summaries coloured by the base model's rank of each token, given the query
and the tokens before it (section 7.2, tables 8 and 10 to 20), with reward logits (figure 6), values and KL (figure 9).

    python eval/visualize_tokens.py --base EleutherAI/pythia-1b-deduped --sft runs/sft/1b/44413 \
        --ppo runs/ppo/1b/44413 --dpo runs/dpo/1b/44413 --reward-model runs/reward/6.9b/44413 --output runs/tokens/1b

Rank 1 is unshifted (blue), 2 and 3 are marginal (yellow), and all others shifted (red). A rank is 1 + the number of
tokens with a larger logit. Base, SFT, PPO and DPO answer greedily, the reference is shown beside them, and one reward
model scores all of them. Prints the coloured summaries and writes

    OUTPUT.html           the coloured summaries
    OUTPUT.md             per model: length, share with EOS, score; shares at the first token, at EOS and between
    OUTPUT_tokens.csv     a row per example shown, model and response token

The numbers of the PPO response are those of ppo.py: `value` belongs to the state before the token, `logratio` is
log pi - log pi_SFT at the training temperature (KL per token), and `token_reward` is -kl_coef x logratio. The reward
model's score (without EOS: the penalty) is added one position past EOS, in a row of its own ([PAD], without rank), or
at the last position.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pandas
import torch
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text
from transformers import GenerationConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval_helpers import fail, markdown, or_fail  # noqa: E402

from ppo import (  # noqa: E402
    checkpoint_folder,
    load_policy,
    load_reward_model,
    load_splits,
    load_tokenizer,
    response_logits,
    token_logprobs,
    token_rewards,
)

COLUMNS = ["id", "query", "query_token", "reference_response", "reference_response_token"]
TITLES = {"base": "Base", "sft": "SFT", "ppo": "PPO", "dpo": "DPO", "reference": "Reference"}  # in the order shown
# colour is never the only sign
KINDS = {"unshifted": "blue", "marginal": "yellow underline", "shifted": "bold red underline2"}
TRAINING = {"temperature": 0.7, "kl_coef": 0.05, "penalty_reward_value": -1.0}  # table 7 and Detail 23
NUMBERS = ["reward_logit", "value", "logratio", "token_reward"]  # of a token


@dataclass
class Args:
    base: str
    """pre-trained model whose ranks colour the tokens: Hub id[@revision] or checkpoint folder"""
    sft: str | None = None
    """SFT model: run folder, checkpoint folder or Hub id[@revision]; of sft, ppo and dpo at least one is needed"""
    ppo: str | None = None
    """PPO policy, likewise; with sft, its KL per token and token rewards are shown"""
    dpo: str | None = None
    """DPO policy, likewise"""
    reward_model: str | None = None
    """reward model that scores all of them, of any size and the same tokenizer; default: no scores"""
    dataset: str = "data/tldr/sft"
    """SFT data whose posts are summarised: folder or Hub id[@revision]"""
    rows: int = 3
    """examples shown: the first of the validation split"""
    counted: int = 64
    """examples for the shares by position and the means, which include those shown"""
    response_length: int = 53
    """tokens generated at most (Detail 23)"""
    output: str = "runs/tokens"
    """path that the names of all files begin with"""


# ---- models ------------------------------------------------------------------------------------------------------


def greedy(model, queries: torch.Tensor, tokenizer, response_length: int) -> torch.Tensor:
    """Return greedy responses (b, response_length) to left-padded queries (b, Q), with [PAD] after the first EOS, which
    equals truncating there (Detail 23). Queries go one at a time, because padding would need a mask."""
    pad_id = tokenizer.pad_token_id
    model.generation_config = GenerationConfig(  # otherwise generate() takes settings from the checkpoint
        max_new_tokens=response_length,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=pad_id,
        suppress_tokens=model.banned.nonzero().flatten().tolist(),
    )
    responses = torch.full((len(queries), response_length), pad_id, device=queries.device)
    for i, query in enumerate(track(queries, "responses", console=Console(stderr=True))):
        query = query[query != pad_id]
        tokens = model.generate(query[None])[0, len(query) :]
        responses[i, : len(tokens)] = tokens
    return responses


def each(compute: Callable, model, queries: torch.Tensor, responses: torch.Tensor, pad_id: int) -> torch.Tensor:
    """Return compute(model, row, start) (n, R + 1) for left-padded queries (n, Q) and responses (n, R), 0 past a
    response's values. A row (1, T) is a query and its response without padding; start is the query's length."""
    found = torch.zeros(len(responses), responses.shape[1] + 1, device=responses.device)
    for i in track(range(len(responses)), compute.__name__, console=Console(stderr=True)):
        query, response = queries[i][queries[i] != pad_id], responses[i][responses[i] != pad_id]
        values = compute(model, torch.cat([query, response])[None], len(query))
        found[i, : len(values)] = values
    return found


def logits_of(model, row: torch.Tensor, start: int) -> torch.Tensor:
    """Return the logits (1, L, V) that predict the L tokens from `start` on, -1e9 for [PAD] and unused ids."""
    return response_logits(model, row, torch.arange(start - 1, row.shape[1] - 1, device=row.device)[None])


def token_ranks(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return 1 + the number of tokens with a larger logit (b, R), for logits (b, R, V) and tokens (b, R)."""
    return 1 + (logits > logits.gather(2, tokens[:, :, None])).sum(2)


def ranks_of(model, row: torch.Tensor, start: int) -> torch.Tensor:
    """Return the rank (L,) of each token of the response."""
    return token_ranks(logits_of(model, row, start), row[:, start:])[0]


def scalars(model, row: torch.Tensor, start: int) -> torch.Tensor:
    """Return a reward or value model's output (L + 1,) at the query's last token and at each token of the response."""
    return model(row)[0, start - 1 :]


# ---- tables ------------------------------------------------------------------------------------------------------


def kind(rank: int) -> str:
    """Return the paper's (and Lin et al.'s) name for a rank."""
    return "unshifted" if rank == 1 else "marginal" if rank <= 3 else "shifted"


def place_shares(ranks: list[list[int]], ended: list[bool]) -> dict[str, str]:
    """Return the shares of the three kinds over all tokens, at the first token, at EOS and at the others in between."""
    places = {"all": [], "first": [], "between": [], "EOS": []}
    for row, end in zip(ranks, ended, strict=True):
        for position, rank in enumerate(row):
            place = "EOS" if end and position == len(row) - 1 else "between" if position else "first"
            places[place].append(kind(rank))
            places["all"].append(kind(rank))
    return {
        place: " / ".join(f"{found.count(name) / len(found):.3f}" for name in KINDS) if found else ""
        for place, found in places.items()
    }


def token_rows(seen: dict[str, torch.Tensor], i: int, tokenizer) -> list[dict]:
    """Return the rows of response i for the CSV file, with one past EOS where it has a value or a token reward."""
    tokens, (_, R) = seen["tokens"][i], seen["tokens"].shape
    length = int((tokens != tokenizer.pad_token_id).sum())
    # decoded together: a character can have several tokens, and a word its space
    texts = [tokenizer.decode(tokens[:t], clean_up_tokenization_spaces=False) for t in range(length + 1)]
    texts = [*(after[len(before) :] for before, after in pairwise(texts)), tokenizer.pad_token]
    rows = []
    for t in range(min(length + 1, R) if {"value", "token_reward"} & set(seen) else length):
        rank = int(seen["ranks"][i, t]) if t < length else ""
        row = {"position": t, "token_id": int(tokens[t]), "token": texts[t], "rank": rank}
        row["kind"] = kind(rank) if rank else ""
        empty = [name for name in NUMBERS if name not in seen or (name == "reward_logit" and t == length)]
        rows.append(row | {name: "" if name in empty else seen[name][i, t].item() for name in NUMBERS})
    return rows


@torch.no_grad()
def main(args: Args):
    # ---- input -----------------------------------------------------------------------------------
    policies = {name: path for name in ("sft", "ppo", "dpo", "base") if (path := getattr(args, name))}
    if len(policies) == 1:
        fail("no aligned model: give at least one of --sft, --ppo and --dpo")
    if not 1 <= args.rows <= args.counted or args.response_length < 1:
        fail(f"--rows {args.rows} and --counted {args.counted}: 1 <= rows <= counted, and --response-length at least 1")
    training = TRAINING
    if args.ppo and (file := Path(args.ppo) / "args.json").exists():
        with or_fail(f"{file} cannot be read"):
            training = TRAINING | {name: x for name, x in json.loads(file.read_text()).items() if name in TRAINING}
    scorers = {"reward_model": args.reward_model} if args.reward_model else {}
    if args.ppo and (Path(args.ppo) / "value_model").exists():
        scorers["value_model"] = str(Path(args.ppo) / "value_model")
    flags = {name: f"--{name.replace('_', '-')}" for name in [*policies, *scorers]}
    folders = {name: checkpoint_folder(flags[name], path) for name, path in (policies | scorers).items()}
    first = next(iter(policies))  # SFT where it is there
    tokenizer = load_tokenizer(folders[first])
    for name, folder in folders.items():
        if load_tokenizer(folder).get_vocab() != tokenizer.get_vocab():
            fail(f"{flags[name]} {folder} has another vocabulary than {flags[first]} {folders[first]}")
    data = load_splits("--dataset", args.dataset, COLUMNS, tokenizer)
    if "validation" not in data or len(data["validation"]) < args.counted:
        fail(f"--counted {args.counted}: {args.dataset} has no split validation with so many rows")
    with or_fail(f"--output {args.output}: its folder cannot be made"):
        Path(f"{args.output}.html").parent.mkdir(parents=True, exist_ok=True)

    # ---- responses, log-probabilities, ranks: one model in memory at a time ----------------------
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    # cuDNN's attention builds a plan for every new shape, and its backward pass has given NaN under a mask
    torch.backends.cuda.enable_cudnn_sdp(False)
    pad_id = tokenizer.pad_token_id
    rows, n = data["validation"][: args.counted], args.counted
    queries = rows["query_token"].to(device)  # (n, Q)
    seen = {"reference": {"tokens": rows["reference_response_token"].to(device)}}  # {model: {name: (n, R)}}
    logprobs = {}  # of the PPO responses

    def logprob(model, row, start):
        return token_logprobs(logits_of(model, row, start), row[:, start:], training["temperature"])[0]

    for name in sorted(policies, key=["ppo", "sft", "dpo", "base"].index):  # SFT and base read other models' responses
        model = load_policy(folders[name], tokenizer).to(device).eval()
        seen[name] = {"tokens": greedy(model, queries, tokenizer, args.response_length)}
        if name in ("ppo", "sft") and {"ppo", "sft"} <= set(policies):
            logprobs[name] = each(logprob, model, queries, seen["ppo"]["tokens"], pad_id)[:, :-1]
        for other in seen if name == "base" else ():
            seen[other]["ranks"] = each(ranks_of, model, queries, seen[other]["tokens"], pad_id)[:, :-1].long()
        del model
    seen = {name: seen[name] for name in TITLES if name in seen}
    lengths = {name: (found["tokens"] != pad_id).sum(1) for name, found in seen.items()}  # (n,)
    ended = {name: (found["tokens"] == tokenizer.eos_token_id).any(1) for name, found in seen.items()}

    # ---- scores, values, token rewards -----------------------------------------------------------
    scores = {}
    for which in scorers:
        model = load_reward_model(folders[which], tokenizer).to(device).eval()
        for name in seen if which == "reward_model" else ["ppo"]:
            found = each(scalars, model, queries, seen[name]["tokens"], pad_id)
            if which == "value_model":
                seen[name]["value"] = found[:, :-1]  # of the states before the tokens
            else:
                seen[name]["reward_logit"] = found[:, 1:]
                scores[name] = found.gather(1, lengths[name][:, None]).squeeze(1)  # at EOS (Detail 12)
        del model
    if logprobs:
        seen["ppo"]["logratio"] = logprobs["ppo"] - logprobs["sft"]
        if scores:
            score, penalty = scores["ppo"], training["penalty_reward_value"]
            if penalty is not None:
                score = torch.where(ended["ppo"], score, float(penalty))
            logratio = seen["ppo"]["logratio"]
            seen["ppo"]["token_reward"] = token_rewards(score, logratio, lengths["ppo"], training["kl_coef"])

    # ---- tables, coloured summaries --------------------------------------------------------------
    overview, places = [], []
    for name, found in seen.items():
        ranks = [row[:length] for row, length in zip(found["ranks"].tolist(), lengths[name].tolist(), strict=True)]
        row = {"model": name, "responses": n, "mean tokens": lengths[name].float().mean().item()}
        row["share with EOS"] = ended[name].float().mean().item()
        if scores:
            deviation = scores[name].std().item() if n > 1 else ""
            row |= {"mean score": scores[name].mean().item(), "standard deviation": deviation}
        overview.append(row)
        places.append({"model": name} | place_shares(ranks, ended[name].tolist()))
    tokens, console = [], Console(record=True)
    for i in range(args.rows):
        table = Table("model", "response", "score", title=Text(str(rows["id"][i])), show_lines=True)
        for name, found in seen.items():
            shown = token_rows(found, i, tokenizer)
            tokens += [{"id": rows["id"][i], "model": name} | row for row in shown]
            text = [(row["token"], KINDS[row["kind"]]) for row in shown if row["kind"]]
            score = f"{scores[name][i]:.3f}" if scores else ""
            table.add_row(TITLES[name], Text.assemble(*text), score + ("" if ended[name][i] else " (no EOS)"))
        console.print(Text(rows["query"][i], style="dim"), table)
    console.print("rank in the base model:", Text.assemble(*((f" {name} ", style) for name, style in KINDS.items())))
    console.save_html(f"{args.output}.html")
    pandas.DataFrame(tokens).to_csv(f"{args.output}_tokens.csv", index=False)
    tables = {"Responses": overview, "Shares of tokens: unshifted / marginal / shifted": places}
    text = f"# What alignment changed in {args.base}\n"
    text += "".join(f"\n## {heading}\n\n{markdown(found)}" for heading, found in tables.items())
    Path(f"{args.output}.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    main(tyro.cli(Args))
