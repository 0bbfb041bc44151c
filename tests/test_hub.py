"""The whole chain through a Hub, which is on the loopback (loopback_hub.py): data and every run are pushed, and what is
pushed is what the next stage loads. The last run is of a copy of a stage script with a STAGE of its own."""

import importlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import loopback_hub
import push
import pytest
import tyro
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
RUN = "--batch-size 8 --total-episodes 16 --seed 3".split()
BRANCHES = {"sft": "first"} | {stage: f"{stage}__nano-xs__3" for stage in ("reward", "ppo", "slic")}


@pytest.fixture(scope="module")
def hub(world, tmp_path_factory):
    """.root, in which the chain was run, .said, .file(repository, revision, name), .store and .environment."""
    root = tmp_path_factory.mktemp("hub")
    server = loopback_hub.serve(str(root / "hub"))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
    environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}", "HF_TOKEN": "any"}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HOME": str(root / "home"), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT / "benchmark", ROOT, root)))
    copy = (ROOT / "dpo.py").read_text().replace('STAGE = "dpo"', 'STAGE = "slic"').replace('"runs/dpo/', '"runs/slic/')
    (root / "slic.py").write_text(copy)
    jobs, raw = [], ["--sft-dataset", world.raw / "posts", "--preference-dataset", world.raw / "comparisons"]
    jobs.append(["tldr_dataset.py", *raw, "--tokenizer", world.tokenizer, "--push-to-hub", "--output-dir", "tldr",
                 "--hub-id-sft", "me/tldr", "--hub-id-preference", "me/tldr-preference"])  # fmt: skip
    jobs[0] += ["--hub-revision", "v1"]
    data, pairs = ["--dataset", "me/tldr@v1"], ["--preference-dataset", "me/tldr-preference@v1"]
    sft = ["--model", "nano-xs", "--sft-model-path", "me/nano-sft@first"]
    scores = ["--reward-model-path", "me/nano-reward@reward__nano-xs__3", "--response-length", 8]
    flags = {"sft": ["--model", world.model, *data], "reward": [*sft, *data, *pairs, "--run-eval"]}
    flags |= {"ppo": [*sft, *scores, *data], "slic": [*sft, *pairs]}
    for stage in flags:
        revision = ["--hub-revision", "first"] if stage == "sft" else []
        jobs.append([f"{stage}.py", *flags[stage], *RUN])
        jobs.append(["push.py", f"runs/{stage}/nano-xs/3", "--hub-id", f"me/nano-{stage}", *revision])
    (root / "jobs.json").write_text(json.dumps([[*map(str, job)] for job in jobs]))
    command = [sys.executable, __file__, "jobs.json"]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    store = json.loads((root / "hub" / "repos.json").read_text())

    def file(repository: str, revision: str, name: str) -> bytes:
        found = store[repository]
        entry = found["commits"][found["refs"][revision]]["files"][name]
        return (root / "hub" / "blobs" / entry["sha256"]).read_bytes()

    yield SimpleNamespace(root=root, said=done.stdout, file=file, store=store, environment=environment)
    server.shutdown()


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
    assert f"pushed runs/{stage}/nano-xs/3 to me/nano-{stage}@{BRANCHES[stage]}" in hub.said
    assert pushed["commits"][pushed["refs"]["main"]]["files"] == {}  # a run is a branch


@pytest.mark.parametrize("stage", BRANCHES)
def test_the_card_says_how_the_model_was_made(hub, stage):
    card = hub.file(f"models/me/nano-{stage}", BRANCHES[stage], "README.md").decode()
    assert f"\npython {stage}.py --model" in card and "--batch-size 8 --total-episodes 16" in card  # the command
    last = json.loads((hub.root / "runs" / stage / "nano-xs" / "3" / "metrics.jsonl").read_text().splitlines()[-1])
    key = "loss/policy" if stage == "ppo" else "loss/train"
    assert f"| {key} | {last[key]:.4g} |" in card and "| `learning_rate` | `3e-06` |" in card
    kind = "SequenceClassification" if stage == "reward" else "CausalLM"
    assert f'AutoModelFor{kind}.from_pretrained("me/nano-{stage}", revision="{BRANCHES[stage]}")' in card


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


@pytest.mark.parametrize(
    ("kind", "load"),
    [
        ("GPTNeoXForCausalLM", "AutoModelForCausalLM"),
        ("GPT2LMHeadModel", "AutoModelForCausalLM"),
        ("GPT2ForSequenceClassification", "AutoModelForSequenceClassification"),
    ],
)
def test_the_class_that_loads_it(kind, load):
    assert push.loading_class({"architectures": [kind]}) == load


def test_what_cannot_be_pushed_is_one_message(hub, tmp_path):
    run = hub.root / "runs" / "sft" / "nano-xs" / "3"
    with pytest.raises(SystemExit) as error:  # HF_HUB_OFFLINE: as without a network
        push.main(push.Args(str(run), "me/x"))
    assert str(error.value).startswith("error: the push to me/x failed (") and "\n" not in str(error.value)
    assert f"{run} is complete, run this again" in str(error.value)
    (tmp_path / "args.json").write_text("{}")
    with pytest.raises(SystemExit, match="error: .*: no model/config.json there; name the folder of a run that has"):
        push.main(push.Args(str(tmp_path), "me/x"))


if __name__ == "__main__":  # the jobs of a list, one after another: command lines of our scripts
    for job in json.loads(Path(sys.argv[1]).read_text()):
        module, sys.argv = importlib.import_module(job[0].removesuffix(".py")), job
        AcceleratorState._reset_state(True)  # accelerate keeps one state a process
        module.main(tyro.cli(module.Args, args=job[1:]))
