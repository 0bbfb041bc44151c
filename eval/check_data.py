"""Check every row of a pre-tokenised data set: would the stage scripts train on what its texts say?

    python eval/check_data.py data/tldr/sft                                # made with Pythia's tokenizer
    python eval/check_data.py me/tldr-sft EleutherAI/pythia-6.9b-deduped   # folder or Hub id, and the tokenizer's

Each column of tokens must have one width, ids of the tokenizer, [PAD] on one side alone, EOS at the end of a response,
and its length beside it. Decoded, it must be its text, and query and response together must be those of the row; spaces
do not count, because the published texts were cleaned of some. A label must repeat the response's tokens. The first
damaged row of a split is printed, and ends the script with exit code 1.
"""

import os
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro
from datasets import load_dataset, load_from_disk
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval_helpers import cores  # noqa: E402

from tldr_dataset import fail, or_fail  # noqa: E402


@dataclass
class Args:
    data: Annotated[str, tyro.conf.Positional]
    """folder of one data set, or a Hub id[@revision]"""
    tokenizer: Annotated[str, tyro.conf.Positional] = "EleutherAI/pythia-1b-deduped"
    """tokenizer that the data were made with: a folder or a Hub id"""


def find_damage(row: dict, tokenizer, widths: dict[str, int]) -> dict[str, str]:
    """Return {"damage": what is wrong with a row, "" if nothing}. widths: {column of tokens: its width}."""
    pad_id, eos_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    texts, tokens = {}, {}
    for column, width in widths.items():
        name = column.removesuffix("_token")
        ids = row[column] or []
        tokens[name] = real = [token for token in ids if token != pad_id]
        padding = [pad_id] * (len(ids) - len(real))
        if len(ids) != width or ids != (padding + real if name == "query" else real + padding):
            return {"damage": f"{column} needs {width} ids with [PAD] on one side alone; it has {len(ids)}"}
        if wrong := [token for token in real if token is None or not 0 <= token < len(tokenizer)]:
            return {"damage": f"{column} has the id {wrong[0]}, and the tokenizer {len(tokenizer)} ids"}
        if name != "query" and real[-1:] != [eos_id]:
            return {"damage": f"{column} does not end with EOS ({eos_id})"}
        decoded = tokenizer.decode(real, clean_up_tokenization_spaces=False)
        texts[name], text = ("".join(x.replace(tokenizer.eos_token, "").split()) for x in (decoded, str(row[name])))
        if texts[name] != text:
            return {"damage": f"{column} is not what the tokenizer makes of {name}"}
        if name != "query" and row[f"{column}_len"] != len(real):
            return {"damage": f"{column}_len is {row[f'{column}_len']}, not {len(real)}"}
    for name in texts.keys() - {"query"}:
        if name.startswith("query_"):
            if texts[name] != texts["query"] + texts[name.removeprefix("query_")]:
                return {"damage": f"{name} is not query and {name.removeprefix('query_')}"}
            # ours hides what query and query + response share, the authors' as many tokens as the query has
            hidden = {len(os.path.commonprefix([tokens["query"], tokens[name]])), len(tokens["query"])}
            ids = row[f"{name}_token"]
            if row[f"{name}_token_response_label"] not in [[pad_id] * n + ids[n:] for n in hidden]:
                return {"damage": f"{name}_token_response_label is not {name}_token with [PAD] over the query"}
    return {"damage": ""}


def main(args: Args):
    with or_fail(f"{args.tokenizer} has no tokenizer that can be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer, trust_remote_code=False)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    name, _, revision = args.data.partition("@")
    with or_fail(f"{args.data} has no data set. Make it with tldr_dataset.py"):
        data = load_from_disk(args.data) if Path(args.data).exists() else load_dataset(name, revision=revision or None)
        splits = dict(data.items())
    for split, rows in splits.items():
        with or_fail(f"{args.data}: {split} cannot be read. Make it again"), tempfile.TemporaryDirectory() as folder:
            widths = {column: len(rows[0][column]) for column in rows.column_names if column.endswith("_token")}
            if not widths:
                columns = f"the columns {', '.join(rows.column_names)}, but no tokens (query_token, chosen_token, ...)"
                fail(f"{args.data}: {split} has {columns}. Make the data with tldr_dataset.py")
            settings = {"num_proc": cores() if len(rows) > 1000 else None, "new_fingerprint": "damage"}
            settings |= {"cache_file_name": f"{folder}/rows.arrow", "remove_columns": rows.column_names}
            found = rows.map(partial(find_damage, tokenizer=tokenizer, widths=widths), desc=split, **settings)
            damages = {i: damage for i, damage in enumerate(found["damage"]) if damage}
        if damages:
            i, damage = next(iter(damages.items()))
            remedy = f"If it was made with another tokenizer than {args.tokenizer}, name that; else make it again"
            fail(f"{args.data}: {split}, row {i}: {damage} ({len(damages)} of {len(rows)} rows are damaged). {remedy}")
        print(f"{args.data}: {split}: {len(rows)} rows, no damage")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    main(tyro.cli(Args))
