"""The whole chain through a Hub, which is a folder here: the data and each run's model/ are uploaded, and each stage
loads what the one before has left there. The calls have to fit the signatures of huggingface_hub."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import create_autospec

import datasets
import pytest
import tyro
from datasets import Dataset, DatasetDict, load_from_disk
from huggingface_hub import HfApi, hf_hub_download, snapshot_download

import dpo
import ppo
import reward
import sft
import tldr_dataset

RUN = "--batch-size 8 --total-episodes 16 --seed 3".split()
BRANCHES = {"sft": "first", "reward": "reward__nano-xs__3", "ppo": "main", "dpo": "main"}


@pytest.fixture(scope="module")
def hub(world, tmp_path_factory) -> SimpleNamespace:
    """.root, in which the chain was run, .place(repository, revision), a folder, and .asked, what was downloaded."""
    root, asked = tmp_path_factory.mktemp("hub"), []
    runs = {"sft": sft, "reward": reward, "ppo": ppo, "dpo": dpo}

    def place(repository: str, revision: str) -> Path:
        return root / "hub" / repository / revision

    def write(content, path_in_repo: str, repo_id: str, revision: str):
        path = place(repo_id, revision) / path_in_repo
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else Path(content).read_bytes())

    def upload(*, path_or_fileobj, path_in_repo, repo_id, revision, **_):
        write(path_or_fileobj, path_in_repo, repo_id, revision)

    def push_data(data, repo_id, revision):
        data.save_to_disk(place(repo_id, revision))
        write(b"---\nlicense: mit\n---\n", "README.md", repo_id, revision)

    def download(repo_id, *, revision, **_) -> str:
        asked.append(f"{repo_id}@{revision}")
        return str(place(repo_id, revision))

    def load_data(repo_id, revision):
        return load_from_disk(download(repo_id, revision=revision))

    def run(module, *words):
        patch.setattr(sys, "argv", [f"{module.__name__}.py", *map(str, words)])
        module.main(tyro.cli(module.Args, args=sys.argv[1:]))

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        api = create_autospec(HfApi)
        api.return_value.upload_file.side_effect = upload
        patch.setattr(tldr_dataset, "HfApi", api)
        patch.setattr(DatasetDict, "push_to_hub", push_data)
        look_up = create_autospec(hf_hub_download, side_effect=lambda filename, **x: f"{download(**x)}/{filename}")
        patch.setattr(tldr_dataset, "hf_hub_download", look_up)
        for module in runs.values():
            patch.setattr(module, "load_dataset", load_data)
            patch.setattr(module, "snapshot_download", create_autospec(snapshot_download, side_effect=download), False)
        raw = ["--sft-dataset", world.raw / "posts", "--preference-dataset", world.raw / "comparisons"]
        raw += ["--tokenizer", world.tokenizer, "--output-dir", "tldr", "--push-to-hub", "--hub-revision", "v1"]
        run(tldr_dataset, *raw, "--hub-id-sft", "me/tldr", "--hub-id-preference", "me/tldr-preference")
        data, pairs = ["--dataset", "me/tldr@v1"], ["--preference-dataset", "me/tldr-preference@v1"]
        start = ["--model", "nano-xs", "--sft-model-path", "me/nano-sft@first"]
        scores = ["--reward-model-path", "me/nano-reward@reward__nano-xs__3", "--response-length", 8]
        flags = {"sft": ["--model", world.model, *data], "reward": [*start, *data, *pairs, "--run-eval"]}
        flags |= {"ppo": [*start, *scores, *data], "dpo": [*start, *pairs]}
        del asked[:]
        for stage, module in runs.items():
            run(module, *flags[stage], *RUN)
            shutil.copytree(f"runs/{stage}/nano-xs/3/model", place(f"me/nano-{stage}", BRANCHES[stage]))
    return SimpleNamespace(root=root, place=place, asked=asked)


def test_each_stage_loads_what_was_pushed(hub):
    data, pairs, start = "me/tldr@v1", "me/tldr-preference@v1", "me/nano-sft@first"
    scores = "me/nano-reward@reward__nano-xs__3"
    assert sorted(hub.asked) == sorted([data, start, data, pairs, start, scores, data, start, pairs])
    assert "tldr_dataset.py" in (hub.place("me/tldr", "v1") / "README.md").read_text()


def test_the_published_pairs_come_from_the_converted_branch(world, tmp_path, monkeypatch):
    """Its layout: a folder for each config, of which only the comparisons are pairs, and a folder for each split."""
    expected = tldr_dataset.read_raw(
        str(world.raw / "comparisons"), ["train", "validation"], tldr_dataset.PREFERENCE_COLUMNS
    )
    expected = {split: [row for _, row in rows] for split, rows in expected.items()}
    together = Dataset.from_list([row for rows in expected.values() for row in rows])
    count = len(expected["train"])
    for split, rows in {"train": range(count), "validation": range(count, len(together))}.items():
        together.select(rows).to_parquet(tmp_path / f"hub/comparisons/{split}/0000.parquet")
        Dataset.from_list([{"summary": {"text": "x"}}]).to_parquet(tmp_path / f"hub/axis/{split}/0000.parquet")
    load, asked, api = datasets.load_dataset, [], create_autospec(HfApi)

    def load_data(repository, data_dir, revision):
        asked.append((repository, revision))
        return load(str(tmp_path / "hub"), data_dir=data_dir)

    files = [str(file.relative_to(tmp_path / "hub")) for file in (tmp_path / "hub").rglob("*.*")]
    api.return_value.list_repo_files.return_value = files
    monkeypatch.setattr(tldr_dataset, "HfApi", api)
    monkeypatch.setattr(tldr_dataset, "load_dataset", load_data)
    default = tldr_dataset.Args().preference_dataset
    found = tldr_dataset.read_hub(default, ["train", "validation", "validation_cnndm"])
    for split, rows in expected.items():
        for row, (_, own) in zip(rows, found[split], strict=True):
            assert (own["summaries"][0]["text"], own["choice"]) == (row["summaries"][0]["text"], row["choice"])
    assert list(found) == list(expected)
    assert asked == [(default, "refs/convert/parquet")]
    assert api.return_value.list_repo_files.call_args.kwargs["revision"] == "refs/convert/parquet"
