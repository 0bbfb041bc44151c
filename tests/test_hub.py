"""The whole chain through a Hub, which is a folder here: data and every run are pushed, and what is pushed is what the
next stage loads. The calls have to fit the signatures of huggingface_hub."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import create_autospec

import push
import pytest
import tyro
from accelerate.state import AcceleratorState
from conftest import files, read_metrics
from datasets import DatasetDict, load_from_disk
from huggingface_hub import HfApi, hf_hub_download, snapshot_download

import dpo
import ppo
import reward
import sft
import tldr_dataset

RUN = "--batch-size 8 --total-episodes 16 --seed 3".split()
BRANCHES = {"sft": "first"} | {stage: f"{stage}__nano-xs__3" for stage in ("reward", "ppo", "dpo")}


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

    def commit(repo_id, operations, *, revision, **_):
        for operation in operations:
            write(operation.path_or_fileobj, operation.path_in_repo, repo_id, revision)

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
        AcceleratorState._reset_state(True)  # accelerate keeps one state a process
        module.main(tyro.cli(module.Args, args=sys.argv[1:]))

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        api = create_autospec(HfApi)
        api.return_value.create_commit.side_effect, api.return_value.upload_file.side_effect = commit, upload
        for module in (push, tldr_dataset):
            patch.setattr(module, "HfApi", api)
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
            branch = ["--hub-revision", "first"] if stage == "sft" else []
            run(push, f"runs/{stage}/nano-xs/3", "--hub-id", f"me/nano-{stage}", *branch)
    return SimpleNamespace(root=root, place=place, asked=asked)


def test_each_stage_loads_what_was_pushed(hub):
    data, pairs, start = "me/tldr@v1", "me/tldr-preference@v1", "me/nano-sft@first"
    scores = "me/nano-reward@reward__nano-xs__3"
    assert sorted(hub.asked) == sorted([data, start, data, pairs, start, scores, data, start, pairs])
    assert "tldr_dataset.py" in (hub.place("me/tldr", "v1") / "README.md").read_text()


@pytest.mark.parametrize("stage", BRANCHES)
def test_what_was_pushed_is_what_the_run_left(hub, stage):
    run, pushed = hub.root / "runs" / stage / "nano-xs" / "3", files(hub.place(f"me/nano-{stage}", BRANCHES[stage]))
    card = pushed.pop("README.md").decode()
    assert pushed.pop("curves.png").startswith(b"\x89PNG")
    left = {name: content for name, content in files(run).items() if name.startswith(("eval/", "value_model/"))}
    left |= files(run / "model") | {name: (run / name).read_bytes() for name in ("args.json", "metrics.jsonl")}
    assert pushed == left and ("value_model/model.safetensors" in left) == (stage == "ppo")
    # the card says how the model was made, what it came to, and how to load it
    last, key = read_metrics(run)[-1], "loss/policy" if stage == "ppo" else "loss/train"
    assert f"Made by `{stage}.py`" in card and f"| {key} | {last[key]:.4g} |" in card
    kind = "SequenceClassification" if stage == "reward" else "CausalLM"
    assert f'AutoModelFor{kind}.from_pretrained("me/nano-{stage}", revision="{BRANCHES[stage]}")' in card


def test_what_cannot_be_pushed_is_one_message(hub, tmp_path):
    run = hub.root / "runs" / "sft" / "nano-xs" / "3"
    with pytest.raises(SystemExit) as error:  # HF_HUB_OFFLINE: as without a network
        push.main(push.Args(str(run), "me/x"))
    assert str(error.value).startswith("error: the push to me/x failed (") and "\n" not in str(error.value)
    (tmp_path / "args.json").write_text(json.dumps({}))
    with pytest.raises(SystemExit, match="^error: .*no model/config.json"):
        push.main(push.Args(str(tmp_path), "me/x"))


def test_the_class_that_loads_gpt2():
    assert push.loading_class({"architectures": ["GPT2LMHeadModel"]}) == "AutoModelForCausalLM"
