"""The whole chain through a Hub, which is on the loopback (loopback_hub.py): data and every stage's model are pushed
from the command line, and what is pushed is what the next stage loads."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import loopback_hub
import pandas
import pytest
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
RUN = "--batch-size 8 --total-episodes 16 --response-length 8 --seed 3".split()


@pytest.fixture(scope="module")
def hub(world, tmp_path_factory):
    """The chain, run from the command line: .root, .folder[stage], .said[stage], .file(repository, revision, name)."""
    root = tmp_path_factory.mktemp("hub")
    server = loopback_hub.serve(str(root / "hub"), quiet=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
    environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}", "HF_TOKEN": "any"}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HOME": str(root / "home"), "OMP_NUM_THREADS": "1"}
    said = {}

    def run(stage: str, *flags):
        command = [sys.executable, str(ROOT / f"{stage}.py"), *map(str, flags)]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
        said[stage] = done.stdout

    def push(stage: str) -> list[str]:
        return ["--push-to-hub", "--hub-id", f"me/nano-{stage}"]

    raw = ["--sft-dataset", world.raw / "posts", "--preference-dataset", world.raw / "comparisons"]
    run("tldr_dataset", *raw, "--tokenizer", world.tokenizer, "--push-to-hub", "--output-dir", root / "tldr",
        "--hub-id-sft", "me/tldr", "--hub-id-preference", "me/tldr-preference", "--hub-revision", "v1")  # fmt: skip
    data, pairs = ["--dataset", "me/tldr@v1"], ["--preference-dataset", "me/tldr-preference@v1"]
    run("sft", "--model", world.model, *data, *RUN, "--run-eval", *push("sft"), "--hub-revision", "first")
    sft = ["--model", "nano-xs", "--sft-model-path", "me/nano-sft@first"]
    rows = [flag for flag in RUN if flag not in ("--response-length", "8")]
    rows.insert(1, "8")  # the batch size
    run("reward", *sft, *data, *pairs, *rows, "--run-eval", *push("reward"))
    models = [*sft, "--reward-model-paths", "me/nano-reward@reward__nano-xs__3"]
    run("ppo", *models, *data, *RUN, *push("ppo"))
    run("dpo", *sft, *data, *pairs, *RUN, *push("dpo"))
    store = json.loads((root / "hub" / "repos.json").read_text())

    def file(repository: str, revision: str, name: str) -> bytes:
        found = store[repository]
        entry = found["commits"][found["refs"][revision]]["files"][name]
        return (root / "hub" / "blobs" / entry["sha256"]).read_bytes()

    yield SimpleNamespace(root=root, said=said, file=file, store=store, environment=environment)
    server.shutdown()


BRANCHES = {"sft": "first"} | {stage: f"{stage}__nano-xs__3" for stage in ("reward", "ppo", "dpo")}


@pytest.mark.parametrize("stage", BRANCHES)
def test_what_was_pushed_is_what_the_run_left(hub, stage):
    run = hub.root / "runs" / stage / "nano-xs" / "3"
    pushed = hub.store[f"models/me/nano-{stage}"]
    names = set(pushed["commits"][pushed["refs"][BRANCHES[stage]]]["files"])
    left = {path.name: path for path in (run / "model").iterdir()}
    for folder in ("eval", "value_model"):
        left |= {f"{folder}/{path.name}": path for path in run.glob(f"{folder}/*")}
    left |= {name: run / name for name in ("args.json", "metrics.jsonl")}
    assert names == {*left, "README.md", "curves.png"} and "model.safetensors" in names
    assert ("value_model/model.safetensors" in names) == (stage == "ppo")
    for name, path in left.items():
        assert hub.file(f"models/me/nano-{stage}", BRANCHES[stage], name) == path.read_bytes(), name
    assert hub.file(f"models/me/nano-{stage}", BRANCHES[stage], "curves.png").startswith(b"\x89PNG")
    assert f"pushed runs/{stage}/nano-xs/3 to me/nano-{stage}@{BRANCHES[stage]}" in hub.said[stage]
    assert pushed["commits"][pushed["refs"]["main"]]["files"] == {}  # a run is a branch


@pytest.mark.parametrize("stage", BRANCHES)
def test_the_card_says_how_the_model_was_made(hub, stage):
    card = hub.file(f"models/me/nano-{stage}", BRANCHES[stage], "README.md").decode()
    head, _, text = card.removeprefix("---\n").partition("---\n")
    assert "license: other" in head and "- me/tldr\n" in head and f"- {stage}\n" in head
    assert f"# {stage} of " in text and "seed 3" in text
    assert f"\npython {stage}.py --model" in text and "--batch-size 8 --total-episodes 16" in text  # the command
    last = json.loads((hub.root / "runs" / stage / "nano-xs" / "3" / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"## Metrics of update {last['update']}" in text
    key = "loss/policy" if stage == "ppo" else "loss/train"
    assert f"| {key} | {last[key]:.4g} |" in text
    assert "| `learning_rate` | `3e-06` |" in text and "| `seed` | `3` |" in text
    assert f'from_pretrained("me/nano-{stage}", revision="{BRANCHES[stage]}")' in text
    if stage == "reward":
        accuracy = pandas.read_csv(hub.root / "runs" / "reward" / "nano-xs" / "3" / "eval" / "accuracy.csv")
        assert f"## accuracy\n\n| {' | '.join(accuracy.columns)} |" in text


def test_data_cards_keep_their_head_and_get_our_text(hub):
    for repository, name in (("me/tldr", "sft"), ("me/tldr-preference", "preference")):
        card = hub.file(f"datasets/{repository}", "v1", "README.md").decode()
        assert card.startswith("---\n") and "dataset_info" in card and "- split: validation" in card
        assert (hub.root / "tldr" / name / "README.md").read_text().strip() in card


def test_a_stage_started_from_the_pushed_weights(hub):
    """By the weights: PPO's policy and value model have moved by at most two updates from what they started as."""
    runs = hub.root / "runs"
    policy, start = (
        load_file(runs / stage / "nano-xs" / "3" / "model" / "model.safetensors") for stage in ("ppo", "sft")
    )
    value = load_file(runs / "ppo" / "nano-xs" / "3" / "value_model" / "model.safetensors")
    scalar = load_file(runs / "reward" / "nano-xs" / "3" / "model" / "model.safetensors")
    for found, expected in ((policy, start), (value, scalar)):
        steps = 8 * 3e-6 * 1.1  # two updates of four steps of Adam, each at most about the learning rate
        assert found.keys() == expected.keys()
        assert 0 < max((found[key] - expected[key]).abs().max().item() for key in found) <= steps


def test_a_repository_that_cannot_be_written_to_is_an_error_before_the_run(hub, world):
    flags = ["--model", world.model, "--dataset", "me/tldr@v1", "--output-dir", "refused", *RUN, "--push-to-hub"]
    command = [sys.executable, str(ROOT / "sft.py"), *map(str, flags)]
    told = {"cwd": hub.root, "capture_output": True, "text": True}
    done = subprocess.run(command, env=hub.environment, **told)
    assert done.returncode == 1 and "error: --push-to-hub needs --hub-id" in done.stderr
    anonymous = {key: value for key, value in hub.environment.items() if key != "HF_TOKEN"}
    done = subprocess.run([*command, "--hub-id", "me/x"], env=anonymous, **told)
    assert done.returncode == 1 and "error: --hub-id me/x: cannot be pushed to" in done.stderr
    assert not (hub.root / "refused").exists()
