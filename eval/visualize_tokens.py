"""What alignment changed, token by token: summaries coloured by the base model's rank of each token, given the query
and the tokens before it (section 7.2, tables 8 and 10 to 20), with reward logits (figure 6), values and KL (figure 9).

    python eval/visualize_tokens.py --base EleutherAI/pythia-1b-deduped --sft runs/sft/1b/44413 \
        --ppo runs/ppo/1b/44413 --dpo runs/dpo/1b/44413 --reward-model runs/reward/6.9b/44413 --output runs/tokens/1b

Rank 1 is unshifted (blue), 2 and 3 are marginal (yellow), and all others shifted (red). A rank is 1 + the number of
tokens with a larger logit. Base, SFT, PPO and DPO answer greedily, the reference is shown beside them, and one reward
model scores all of them. Writes

    OUTPUT.html           the coloured summaries
    OUTPUT.md             per model: length, share with EOS, score; shares at the first token, at EOS and between
    OUTPUT_tokens.csv     a row per example shown, model and response token

The numbers of the PPO response are by ppo.py's rules: `value` belongs to the state before the token, `logratio` is
log pi - log pi_SFT at the training temperature (KL per token), and `token_reward` is -kl_coef x logratio. The reward
model's score (without EOS: the penalty) is added one position past EOS, in a row of its own ([PAD], without rank), or
at the last position.
"""

import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean

import pandas
import torch
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text
from transformers import GenerationConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval_helpers import fail, markdown  # noqa: E402

import ppo  # noqa: E402

COLUMNS = ["id", "query", "query_token", "reference_response", "reference_response_token"]
MODELS = ["base", "sft", "ppo", "dpo", "reference"]  # in the order shown
# colour is never the only sign
KINDS = {"unshifted": "blue", "marginal": "yellow underline", "shifted": "bold red underline2"}
TRAINING = {"temperature": 0.7, "kl_coef": 0.05, "penalty_reward_value": -1.0, "response_length": 53}  # table 7
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
    response_length: int | None = None
    """tokens generated at most; default: those of the PPO run, or 53 (Detail 23)"""
    output: str = "runs/tokens"
    """path that the names of all files begin with"""


# ---- models ------------------------------------------------------------------------------------------------------


def greedy(model, query: torch.Tensor, tokenizer, response_length: int) -> torch.Tensor:
    """Return the greedy response (L,) to a query (Q,) without padding, with at most response_length tokens. It ends at
    the first EOS, which equals truncating there (Detail 23)."""
    model.generation_config = GenerationConfig(  # otherwise generate() takes settings from the checkpoint
        max_new_tokens=response_length,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        suppress_tokens=model.get_output_embeddings().banned.nonzero().flatten().tolist(),
    )
    return model.generate(query[None])[0, len(query) :]


def each(compute: Callable, model, queries: list[torch.Tensor], responses: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return compute(model, row, start) for each query and its response. The row (1, T) holds both, and the response
    begins at `start`. Rows go one at a time, because padding would need a mask."""
    pairs = list(zip(queries, responses, strict=True))
    shown = track(pairs, compute.__name__, console=Console(stderr=True))
    return [compute(model, torch.cat([query, response])[None], len(query)) for query, response in shown]


def logits_of(model, row: torch.Tensor, start: int) -> torch.Tensor:
    """Return the logits (1, L, V) that predict the L tokens from `start` on, -1e9 for [PAD] and unused ids."""
    return ppo.response_logits(model, row, torch.arange(start - 1, row.shape[1] - 1, device=row.device)[None])


def ranks_of(model, row: torch.Tensor, start: int) -> torch.Tensor:
    """Return the rank (L,) of each token of the response: 1 + the number of tokens with a larger logit."""
    logits = logits_of(model, row, start)[0]
    return 1 + (logits > logits.gather(1, row[0, start:, None])).sum(1)


def scalars(model, row: torch.Tensor, start: int) -> torch.Tensor:
    """Return a reward or value model's output (L + 1,) at the query's last token and at each token of the response."""
    return model(row)[0, start - 1 :]


# ---- tables ------------------------------------------------------------------------------------------------------


def kind(rank: int) -> str:
    """Return the paper's (and Lin et al.'s) name for a rank."""
    return "unshifted" if rank == 1 else "marginal" if rank <= 3 else "shifted"


def place_shares(tokens: pandas.DataFrame, eos_id: int) -> list[dict]:
    """Return a row per model: the shares of the three kinds over all tokens, at the first token, at EOS and at the
    others in between. Reads the columns model, position, token_id and kind."""
    place = pandas.Series("between", tokens.index).mask(tokens["position"] == 0, "first")
    place = place.mask(tokens["token_id"] == eos_id, "EOS")

    def shares(kinds: pandas.Series) -> str:
        found = kinds.value_counts(normalize=True).reindex(list(KINDS), fill_value=0)
        return " / ".join(f"{share:.3f}" for share in found)

    both = pandas.concat([tokens.assign(place="all"), tokens.assign(place=place)])
    table = both.pivot_table("kind", "model", "place", shares, sort=False)
    table = table.reindex(columns=["all", "first", "between", "EOS"]).astype(object)
    return table.fillna("").reset_index().to_dict("records")


def token_table(response: torch.Tensor, numbers: dict[str, torch.Tensor], tokenizer) -> pandas.DataFrame:
    """Return a row per token of a response (L,), and one past EOS where `numbers` has columns of L + 1."""
    # decoded together: a character can have several tokens, and a word its space
    texts = [tokenizer.decode(response[:t], clean_up_tokenization_spaces=False) for t in range(len(response) + 1)]
    columns = {"token_id": response.tolist(), "token": [after[len(before) :] for before, after in pairwise(texts)]}
    columns |= {name: numbers[name].tolist() if name in numbers else [] for name in ["rank", *NUMBERS]}
    table = pandas.DataFrame({name: pandas.Series(x, dtype=object) for name, x in columns.items()})
    table = table.fillna({"token_id": tokenizer.pad_token_id, "token": tokenizer.pad_token})
    table.insert(0, "position", range(len(table)))
    table.insert(4, "kind", table["rank"].map(kind, na_action="ignore"))
    return table


# ---- main --------------------------------------------------------------------------------------------------------


def find_models(args: Args) -> tuple[dict[str, str], dict]:
    """Return the folders {name: folder} of all models, which must have one vocabulary, and the PPO run's settings."""
    paths = {name: getattr(args, name) for name in ("sft", "ppo", "dpo", "base", "reward_model")}
    settings = {}
    if args.ppo and (file := Path(args.ppo) / "args.json").exists():
        settings = json.loads(file.read_text())
    if args.ppo and (Path(args.ppo) / "value_model").exists():
        paths["value_model"] = str(Path(args.ppo) / "value_model")
    paths = {name: path for name, path in paths.items() if path}
    first = next(iter(paths))  # SFT where it is there
    if first == "base":
        fail("no aligned model: give at least one of --sft, --ppo and --dpo")
    flags = {name: f"--{name.replace('_', '-')}" for name in paths}
    folders = {name: ppo.local_checkpoint(flags[name], path) for name, path in paths.items()}
    vocabulary = ppo.load_tokenizer(folders[first]).get_vocab()
    for name, folder in folders.items():
        if ppo.load_tokenizer(folder).get_vocab() != vocabulary:
            fail(f"{flags[name]} {folder} has another vocabulary than {flags[first]} {folders[first]}")
    return folders, TRAINING | {name: settings[name] for name in TRAINING if name in settings}


def respond(folders: dict[str, str], queries: list, reference: list, tokenizer, training: dict, length: int):
    """Return the responses {model: n tensors (L,)}, their ranks in the base model, likewise, and log pi - log pi_SFT of
    the PPO responses: n tensors (L,), or None without these two models. One model is in memory at a time."""
    responses, ranks, logprobs = {"reference": reference}, {}, {}

    def logprob(model, row, start):
        return ppo.token_logprobs(logits_of(model, row, start), row[:, start:], training["temperature"])[0]

    # SFT and base also read other models' responses
    for name in [name for name in ("ppo", "sft", "dpo", "base") if name in folders]:
        model = ppo.load_policy(folders[name], tokenizer).to(queries[0].device).eval()
        shown = track(queries, f"responses of {name}", console=Console(stderr=True))
        responses[name] = [greedy(model, query, tokenizer, length) for query in shown]
        if name in ("ppo", "sft") and {"ppo", "sft"} <= set(folders):
            logprobs[name] = each(logprob, model, queries, responses["ppo"])
        if name == "base":
            ranks = {other: each(ranks_of, model, queries, responses[other]) for other in responses}
        del model
    logratios = (
        [policy - sft for policy, sft in zip(logprobs["ppo"], logprobs["sft"], strict=True)] if logprobs else None
    )
    return {name: responses[name] for name in MODELS if name in responses}, ranks, logratios


def score_responses(folders: dict[str, str], queries: list, responses: dict[str, list], tokenizer) -> tuple[dict, list]:
    """Return the reward model's logits {model: n tensors (L,)}, {} without one, and the value model's outputs before
    and at each token of the PPO responses: n tensors (L + 1,), or None."""
    logits, values = {}, None
    if "reward_model" in folders:
        model = ppo.load_reward_model(folders["reward_model"], tokenizer).to(queries[0].device).eval()
        for name in responses:
            logits[name] = [scores[1:] for scores in each(scalars, model, queries, responses[name])]
        del model
    if "value_model" in folders:
        model = ppo.load_reward_model(folders["value_model"], tokenizer).to(queries[0].device).eval()
        values = each(scalars, model, queries, responses["ppo"])
    return logits, values


def ppo_rewards(responses: list, scores: list, logratios: list, training: dict, eos_id: int) -> list[torch.Tensor]:
    """Return the rewards of the tokens of the PPO responses, as ppo.py makes them: n tensors as long as logratios."""
    rewards = []
    for response, score, logratio in zip(responses, scores, logratios, strict=True):
        penalty = training["penalty_reward_value"]
        if penalty is not None and response[-1] != eos_id:
            score = torch.tensor(float(penalty), device=response.device)
        length = torch.tensor([len(response)], device=response.device)
        rewards.append(ppo.token_rewards(score[None], logratio[None], length, training["kl_coef"])[0])
    return rewards


def write_tables(args: Args, rows: dict, responses: dict[str, list], scores: dict[str, list], numbers: dict, tokenizer):
    """Write the coloured summaries, the overview and the table of tokens."""
    eos_id = tokenizer.eos_token_id
    overview, tokens, console = [], [], Console(record=True, file=io.StringIO(), width=120)
    for name, own in responses.items():
        row = {"model": name, "responses": len(own), "mean tokens": mean(len(response) for response in own)}
        row["share with EOS"] = mean(float(response[-1] == eos_id) for response in own)
        if scores:
            of_model = torch.stack(scores[name])
            row |= {"mean score": of_model.mean().item(), "standard deviation": of_model.std().item()}
        overview.append(row)
    for i, identity in enumerate(rows["id"]):
        page = Table("model", "response", "score", title=Text(str(identity)), show_lines=True)
        for name, own in responses.items():
            table = token_table(own[i], {key: values[i] for key, values in numbers[name].items()}, tokenizer)
            tokens.append(table.assign(id=identity, model=name))
            words = table.dropna(subset="kind")
            text = Text.assemble(*zip(words["token"], words["kind"].map(KINDS), strict=True))
            score = f"{scores[name][i]:.3f}" if scores else ""
            page.add_row(name, text, score + ("" if own[i][-1] == eos_id else " (no EOS)"))
        if i < args.rows:
            console.print(Text(rows["query"][i], style="dim"), page)
    console.print("rank in the base model:", Text.assemble(*((f" {name} ", style) for name, style in KINDS.items())))
    console.save_html(f"{args.output}.html")
    tokens = pandas.concat(tokens).set_index(["id", "model"])
    tokens.loc[rows["id"][: args.rows]].to_csv(f"{args.output}_tokens.csv")
    places = place_shares(tokens.dropna(subset="kind").reset_index(), eos_id)
    tables = {"Responses": overview, "Shares of tokens: unshifted / marginal / shifted": places}
    text = f"# What alignment changed in {args.base}\n"
    text += "".join(f"\n## {heading}\n\n{markdown(table)}" for heading, table in tables.items())
    Path(f"{args.output}.md").write_text(text, encoding="utf-8")
    print(text)


@torch.no_grad()
def main(args: Args):
    folders, training = find_models(args)
    tokenizer = ppo.load_tokenizer(next(iter(folders.values())))
    data = ppo.load_splits("--dataset", args.dataset, COLUMNS, tokenizer)
    if not 1 <= args.rows <= args.counted <= len(data["validation"]):
        fail(f"--rows {args.rows}, --counted {args.counted}: 1 <= rows <= counted <= {len(data['validation'])} posts")
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)

    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    # cuDNN's attention builds a plan for every new shape, and its backward pass has given NaN under a mask
    torch.backends.cuda.enable_cudnn_sdp(False)
    pad_id = tokenizer.pad_token_id
    rows, length = data["validation"][: args.counted], args.response_length or training["response_length"]
    queries = [tokens[tokens != pad_id] for tokens in rows["query_token"].to(device)]
    reference = [tokens[tokens != pad_id] for tokens in rows["reference_response_token"].to(device)]
    responses, ranks, logratios = respond(folders, queries, reference, tokenizer, training, length)
    logits, values = score_responses(folders, queries, responses, tokenizer)
    scores = {name: [of_tokens[-1] for of_tokens in logits[name]] for name in logits}  # at the last token (Detail 12)

    # {model: {column: n tensors (L,) or, with a row past EOS, (L + 1,)}}
    numbers = {name: {"rank": ranks[name]} for name in responses}
    for name in logits:
        numbers[name]["reward_logit"] = logits[name]
    if values:
        numbers["ppo"]["value"] = [of_tokens[:length] for of_tokens in values]  # of the states before the tokens
    if logratios:
        logratios = [torch.nn.functional.pad(of_tokens, (0, 1))[:length] for of_tokens in logratios]
        numbers["ppo"]["logratio"] = logratios
    if logratios and scores:
        rewards = ppo_rewards(responses["ppo"], scores["ppo"], logratios, training, tokenizer.eos_token_id)
        numbers["ppo"]["token_reward"] = rewards
    write_tables(args, rows, responses, scores, numbers, tokenizer)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    main(tyro.cli(Args))
