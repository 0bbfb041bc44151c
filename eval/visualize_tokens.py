"""What alignment changed, token by token: summaries coloured by the base model's rank of each token, given the query
and the tokens before it (section 7.2, tables 8 and 10 to 20), with reward logits (figure 6), values and KL (figure 9).

    python eval/visualize_tokens.py --base EleutherAI/pythia-1b-deduped --sft runs/sft/1b/44413 \
        --ppo runs/ppo/1b/44413 --dpo runs/dpo/1b/44413 --reward-model runs/reward/6.9b/44413 --output runs/tokens/1b

The rank is 1 + the number of tokens with a larger logit. Base, SFT, PPO and DPO answer greedily, the reference is shown
beside them, and one reward model scores all of them. Writes

    OUTPUT.html           the coloured summaries
    OUTPUT.md             per model: length, share with EOS, score; shares at the first token, at EOS and between;
                          reward logits before the last token (Detail 13); PPO's values and the score (Detail 22)
    OUTPUT_tokens.csv     a row per example shown, model and response token

The numbers of the PPO response follow ppo.py: `value` belongs to the state before the token, `logratio` is
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

import pandas
import torch
import torch.nn.functional as F
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text
from transformers import GenerationConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval_helpers import fail, markdown, same_tokenizer  # noqa: E402

import ppo  # noqa: E402

COLUMNS = ["id", "query", "query_token", "reference_response", "reference_response_token"]
# colour is never the only sign
KINDS = {"unshifted": "blue", "marginal": "yellow underline", "shifted": "bold red underline2"}


@dataclass
class Args:
    base: str
    """pre-trained model whose ranks colour the tokens: Hub id[@revision] or checkpoint folder"""
    sft: str
    """SFT model: run folder, checkpoint folder or Hub id[@revision]"""
    reward_model: str
    """reward model that scores all responses, likewise; of any size, but with the same tokenizer"""
    ppo: str | None = None
    """run folder of ppo.py, whose settings and value model are used"""
    dpo: str | None = None
    """DPO policy: run folder, checkpoint folder or Hub id[@revision]"""
    dataset: str = "data/tldr/sft"
    """SFT data whose posts are summarised: folder or Hub id[@revision]"""
    rows: int = 3
    """examples shown: the first of the validation split"""
    counted: int = 64
    """examples for the tables, which include those shown"""
    response_length: int | None = None
    """tokens generated at most; default: those of the PPO run, or 53 (Detail 23)"""
    output: str = "runs/tokens"
    """path that the names of all files begin with"""


def find_models(args: Args) -> dict[str, str]:
    """Return {name: checkpoint folder} of all models, which must have the vocabulary and the EOS of the base."""
    paths = {name: getattr(args, name) for name in ("base", "sft", "ppo", "dpo", "reward_model") if getattr(args, name)}
    if args.ppo:
        paths["value_model"] = f"{args.ppo}/value_model"
    folders, tokenizers = {}, {}
    for name, path in paths.items():
        flag = f"--{name.replace('_', '-')}"
        folders[name] = ppo.local_checkpoint(flag, path)
        tokenizers[name] = ppo.load_tokenizer(folders[name])
        if not same_tokenizer(tokenizers[name], tokenizers["base"]):
            fail(f"{flag} {folders[name]} has another tokenizer or EOS than --base {folders['base']}")
    return folders


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


def token_logits(model, row: torch.Tensor, start: int) -> torch.Tensor:
    """Return the logits (1, L, V) that predict the L tokens of a row (1, T) from `start` on."""
    return ppo.response_logits(model, row, torch.arange(start - 1, row.shape[1] - 1, device=row.device)[None])


def ranks(model, row: torch.Tensor, start: int) -> torch.Tensor:
    """Return the rank (L,) of each token of a row (1, T) from `start` on."""
    logits = token_logits(model, row, start)[0]
    return 1 + (logits > logits.gather(1, row[0, start:, None])).sum(1)


def outputs(model, row: torch.Tensor, start: int) -> torch.Tensor:
    """Return a reward or value model's output (L + 1,) for a row (1, T) at each token from `start` - 1 on."""
    return model(row)[0, start - 1 :]


def each(compute: Callable, model, queries: list[torch.Tensor], responses: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return compute(model, row, start) for each query and its response. The row (1, T) holds both, and the response
    begins at `start`. Rows go one at a time, because padding would need a mask."""
    pairs = track(list(zip(queries, responses, strict=True)), compute.__name__, console=Console(stderr=True))
    return [compute(model, torch.cat([query, response])[None], len(query)) for query, response in pairs]


def ppo_numbers(
    load: Callable, queries: list, responses: list, scores: list, length: int, settings: dict
) -> dict[str, list]:
    """Return {column: n tensors} for n PPO responses (L,) of up to `length` tokens and their scores (scalars, after the
    penalty for a missing EOS). The tensors have a number per token, and one past EOS if there is room."""

    def logprobs(model, row, start):
        return ppo.token_logprobs(token_logits(model, row, start), row[:, start:], settings["temperature"])[0]

    values = each(outputs, load("value_model"), queries, responses)
    policy, sft = (each(logprobs, load(name), queries, responses) for name in ("ppo", "sft"))
    logratios = [F.pad(x - y, (0, 1))[:length] for x, y in zip(policy, sft, strict=True)]
    rewards = []
    for response, score, logratio in zip(responses, scores, logratios, strict=True):
        tokens = torch.tensor([len(response)], device=response.device)
        rewards.append(ppo.token_rewards(score[None], logratio[None], tokens, settings["kl_coef"])[0])
    return {"value": [x[:length] for x in values], "logratio": logratios, "token_reward": rewards}


def token_texts(response: torch.Tensor, tokenizer) -> list[str]:
    """Return the text of each token of a response (L,). A character of several tokens is the text of the last one."""
    # decoded together, because the space before a word can depend on the token before it
    texts = [tokenizer.decode(response[:t], clean_up_tokenization_spaces=False) for t in range(len(response) + 1)]
    texts[:-1] = [text.rstrip("\N{REPLACEMENT CHARACTER}") for text in texts[:-1]]  # of a character's first tokens
    return [after[len(before) :] for before, after in pairwise(texts)]


def token_table(response: torch.Tensor, numbers: dict[str, torch.Tensor], tokenizer) -> pandas.DataFrame:
    """Return a row per token of a response (L,), and one past EOS where `numbers` has columns of L + 1."""
    columns = {"token_id": response.tolist(), "token": token_texts(response, tokenizer), "rank": [], "kind": []}
    columns |= {"reward_logit": [], "value": [], "logratio": [], "token_reward": []}
    columns |= {name: values.tolist() for name, values in numbers.items()}
    columns["kind"] = ["unshifted" if rank == 1 else "marginal" if rank <= 3 else "shifted" for rank in columns["rank"]]
    table = pandas.DataFrame({name: pandas.Series(values, dtype=object) for name, values in columns.items()})
    table.insert(0, "position", range(len(table)))
    return table.fillna({"token_id": tokenizer.pad_token_id, "token": tokenizer.pad_token})


def overview(tokens: pandas.DataFrame, eos_id: int) -> list[dict]:
    """Return a row per model: mean length and score of its responses, and the share of them that ends with EOS."""
    last = tokens.groupby(["model", "row"], sort=False).tail(1)
    last = last.assign(length=last["position"] + 1, has_eos=last["token_id"] == eos_id)
    models = last.astype({"reward_logit": float}).groupby("model", sort=False)
    table = models[["row", "length", "has_eos", "reward_logit"]].mean()
    table["row"], table["sd"] = models.size(), models["reward_logit"].std()
    table.columns = ["responses", "mean tokens", "share with EOS", "mean score", "standard deviation"]
    return table.reset_index().to_dict("records")


def place_shares(tokens: pandas.DataFrame, eos_id: int) -> list[dict]:
    """Return a row per model: the shares of the three kinds over all tokens, at the first token, at EOS and at the
    others in between. Reads the columns model, position, token_id and kind."""
    place = pandas.Series("between", tokens.index).mask(tokens["position"] == 0, "first")
    place = place.mask(tokens["token_id"] == eos_id, "EOS")

    def shares(kinds: pandas.Series) -> str:
        return " / ".join(f"{(kinds == kind).mean():.3f}" for kind in KINDS)

    tokens = pandas.concat([tokens.assign(place="all"), tokens.assign(place=place)])
    table = tokens.pivot_table("kind", "model", "place", shares, sort=False)
    table = table.reindex(columns=["all", "first", "between", "EOS"]).astype(object)
    return table.fillna("").reset_index().to_dict("records")


def logits_before_the_last(tokens: pandas.DataFrame) -> list[dict]:
    """Return a row per model: how many reward logits its responses have before their last token, their mean, and the
    share of them that is negative (Detail 13)."""
    before = tokens[tokens.duplicated(["model", "row"], keep="last")]
    logits = before["reward_logit"].astype(float).groupby(before["model"], sort=False)
    table = pandas.DataFrame({"logits": logits.size(), "mean": logits.mean()})
    table["share negative"] = logits.apply(lambda x: (x < 0).mean())
    return table.reset_index().to_dict("records")


def values_and_scores(tokens: pandas.DataFrame) -> list[dict]:
    """Return the correlation over PPO's responses of its value with the reward model's score, before the first token,
    in the middle and before the last token (Detail 22: does the value model become a reward model per token?)."""
    responses = [response for _, response in tokens[tokens["model"] == "ppo"].groupby("row", sort=False)]
    scores = pandas.Series([float(response["reward_logit"].iloc[-1]) for response in responses])
    rows = []
    for place, share in {"before the first token": 0.0, "in the middle": 0.5, "before the last token": 1.0}.items():
        values = [float(response["value"].iloc[round(share * (len(response) - 1))]) for response in responses]
        rows.append({"value": place, "correlation with the score": scores.corr(pandas.Series(values))})
    return rows


def write_html(path: str, queries: list[str], tokens: pandas.DataFrame, eos_id: int):
    """Write queries, each with a table of the responses of all models and their scores."""
    console = Console(record=True, file=io.StringIO(), width=120)
    for row, query in enumerate(queries):
        of_row = tokens[tokens["row"] == row]
        page = Table("model", "response", "score", title=Text(str(of_row["id"].iloc[0])), show_lines=True)
        for name, response in of_row.groupby("model", sort=False):
            text = Text.assemble(*zip(response["token"], response["kind"].map(KINDS), strict=True))
            ending = "" if response["token_id"].iloc[-1] == eos_id else " (no EOS)"
            page.add_row(name, text, f"{response['reward_logit'].iloc[-1]:.3f}{ending}")
        console.print(Text(query, style="dim"), page)
    console.print("rank in the base model:", Text.assemble(*((f" {kind} ", style) for kind, style in KINDS.items())))
    console.save_html(path)


def measure(folders: dict[str, str], rows: dict, tokenizer, length: int, settings: dict) -> pandas.DataFrame:
    """Return token_table() of all responses, of up to `length` tokens, to rows of the data, with their row, id and
    model. `settings` are those of the PPO run. Only one model is in memory at a time."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    width = rows["query_token"].shape[1] + max(length, rows["reference_response_token"].shape[1])

    def load(name: str):
        load_model = ppo.load_reward_model if name.endswith("_model") else ppo.load_policy
        return load_model(folders[name], tokenizer, width).to(device).eval()

    def without_padding(name: str) -> list[torch.Tensor]:
        return [tokens[tokens != tokenizer.pad_token_id] for tokens in rows[name].to(device)]

    def each_response(compute: Callable, model) -> dict[str, list[torch.Tensor]]:
        return {name: each(compute, model, queries, responses[name]) for name in responses}

    queries, responses = without_padding("query_token"), {}
    for name in [name for name in folders if not name.endswith("_model")]:
        model, shown = load(name), track(queries, f"responses of {name}", console=Console(stderr=True))
        responses[name] = [greedy(model, query, tokenizer, length) for query in shown]
        del model
    responses["reference"] = without_padding("reference_response_token")
    ranked, scored = each_response(ranks, load("base")), each_response(outputs, load("reward_model"))
    numbers = {name: {"rank": ranked[name], "reward_logit": [x[1:] for x in scored[name]]} for name in responses}
    if "ppo" in folders:
        scores, penalty = [x[-1] for x in scored["ppo"]], settings["penalty_reward_value"]
        for i, response in enumerate(responses["ppo"]):
            if penalty is not None and response[-1] != tokenizer.eos_token_id:
                scores[i] = torch.full_like(scores[i], penalty)
        numbers["ppo"] |= ppo_numbers(load, queries, responses["ppo"], scores, length, settings)
    tables = []
    for row, identity in enumerate(rows["id"]):
        for name in responses:
            columns = {column: values[row] for column, values in numbers[name].items()}
            table = token_table(responses[name][row], columns, tokenizer)
            tables.append(table.assign(row=row, id=identity, model=name))
    return pandas.concat(tables)


@torch.no_grad()
def main(args: Args):
    folders = find_models(args)
    tokenizer = ppo.load_tokenizer(folders["base"])
    data = ppo.load_splits("--dataset", args.dataset, COLUMNS, tokenizer)
    if not 1 <= args.rows <= args.counted <= len(data["validation"]):
        fail(f"--rows {args.rows}, --counted {args.counted}: 1 <= rows <= counted <= {len(data['validation'])} posts")
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    # cuDNN's attention builds a plan for every new shape, and its backward pass has given NaN under a mask
    torch.backends.cuda.enable_cudnn_sdp(False)
    rows = data["validation"][: args.counted]
    settings = json.loads(Path(args.ppo, "args.json").read_text()) if args.ppo else {}
    length = args.response_length or settings.get("response_length", 53)
    tokens = measure(folders, rows, tokenizer, length, settings)
    shown = tokens[tokens["row"] < args.rows].drop(columns="row").set_index(["id", "model"])
    shown.to_csv(f"{args.output}_tokens.csv")
    tokens = tokens.dropna(subset="kind").reset_index(drop=True)  # without the rows past EOS
    write_html(f"{args.output}.html", rows["query"][: args.rows], tokens, tokenizer.eos_token_id)
    text = f"# What alignment changed in {args.base}\n\n## Responses\n\n"
    text += markdown(overview(tokens, tokenizer.eos_token_id))
    text += "\n## Shares of tokens: unshifted / marginal / shifted\n\n"
    text += markdown(place_shares(tokens, tokenizer.eos_token_id))
    text += "\n## Reward logits before the last token\n\n" + markdown(logits_before_the_last(tokens))
    if args.ppo:
        text += "\n## PPO's values and the score\n\n" + markdown(values_and_scores(tokens))
    Path(f"{args.output}.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    main(tyro.cli(Args))
