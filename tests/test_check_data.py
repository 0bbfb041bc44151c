"""eval/check_data.py against data sets that tldr_dataset.py made, whole and damaged in one place each."""

import re

import check_data
import pytest
from conftest import files
from datasets import load_from_disk


def put(column: str, place: int, value):
    return lambda row: row[column].__setitem__(place, value)


def hide_one_more(row):
    """Move the border between the query and the response of a label by one token."""
    label = row["query_chosen_token_response_label"]
    label[next(i for i, token in enumerate(label) if token != label[0])] = label[0]


def swap_responses(row):
    """Text and tokens agree, but the response is the other one."""
    row.update({key: row[key.replace("chosen", "rejected")] for key in row if key.startswith("query_chosen")})


DAMAGE = {  # what is done to row 1 of the preference data's split validation, and the message
    "id too large": (put("chosen_token", 0, 99999), "chosen_token has the id 99999"),
    "one [PAD] more": (lambda row: row["chosen_token"].append(row["chosen_token"][-1]), "chosen_token needs"),
    "query padded on the right": (lambda row: row["query_token"].reverse(), "query_token needs .* on one side alone"),
    "no EOS": (lambda row: put("chosen_token", row["chosen_token_len"] - 1, 5)(row), "chosen_token does not end with"),
    "another token": (put("chosen_token", 0, 7), "chosen_token is not what the tokenizer makes of chosen"),
    "length": (lambda row: row.update(rejected_token_len=7), r"rejected_token_len is 7, not \d+"),
    "label hides the response": (hide_one_more, "query_chosen_token_response_label is not"),
    "response of another row": (swap_responses, "query_chosen is not query and chosen"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_it_finds_a_damaged_row(world, tmp_path, case):
    change, message = DAMAGE[case]
    data = load_from_disk(world.preference_dataset)
    rows = data["validation"].to_list()
    change(rows[1])
    data["validation"] = data["validation"].from_list(rows, features=data["validation"].features)
    data.save_to_disk(tmp_path / "data")
    with pytest.raises(SystemExit, match=f"data: validation, row 1: {message}.* \\(1 of {len(rows)} rows are damaged"):
        check_data.main(check_data.Args(str(tmp_path / "data"), str(world.tokenizer)))


def test_data_of_texts_alone_are_not_whole(world, tmp_path):
    data = load_from_disk(world.preference_dataset)
    data = data.remove_columns([x for x in data["train"].column_names if "_token" in x])
    data.save_to_disk(tmp_path / "data")
    with pytest.raises(SystemExit, match="^error: .*data: train has the columns .*query, .* no tokens"):
        check_data.main(check_data.Args(str(tmp_path / "data"), str(world.tokenizer)))


def test_it_passes_what_is_whole_and_cleaned_of_spaces_and_leaves_nothing_behind(world, tmp_path, capsys):
    data = load_from_disk(world.preference_dataset)
    data = data.map(lambda row: {"query": re.sub(r" ([.,?!])", r"\1", row["query"]).lstrip()})
    data.save_to_disk(tmp_path / "data")
    before = files(tmp_path)
    check_data.main(check_data.Args(str(tmp_path / "data"), str(world.tokenizer)))
    assert capsys.readouterr().out.count("no damage") == len(data) and files(tmp_path) == before
