"""Shared by the tests: the scripts as modules, helpers, and one small generated world per test session."""

import atexit
import copy
import csv
import functools
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")
ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("", "quickstart", "benchmark", "benchmark/speed", "benchmark/parity", "eval", "ensembles", "ablations")
sys.path[:0] = [str(ROOT / folder) for folder in FOLDERS]

import pytest  # noqa: E402
import torch  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from filelock import FileLock  # noqa: E402
from tqdm import tqdm  # noqa: E402

torch.set_num_threads(1)
# tqdm's own lock is shared with forked processes: a child killed while holding it would leave all others waiting
tqdm.set_lock(threading.RLock())
tqdm.monitor_interval = 0
SHARED = ROOT.parent / "shared" / "data"
make_accelerator = Accelerator.__init__


def make_accelerator_anew(self, *args, **kwargs):
    AcceleratorState._reset_state(True)  # accelerate keeps one state a process: here that of an earlier run
    make_accelerator(self, *args, **kwargs)


Accelerator.__init__ = make_accelerator_anew


@functools.cache
def ablations() -> Path:
    """A folder with the scripts that ablations/*.diff make."""
    folder = Path(tempfile.mkdtemp(prefix="ablations-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name in ("ppo.py", "dpo.py"):
        shutil.copy(ROOT / name, folder)
    for diff in sorted((ROOT / "ablations").glob("*.diff")):
        subprocess.run(["git", "apply", diff], cwd=folder, check=True)
    return folder


def script_path(path: str) -> Path:
    """A script of ours, or one that a diff in ablations/ makes."""
    return ROOT / path if (ROOT / path).exists() else ablations() / path


def script(path: str):
    """A script of ours as a module: of two with one name (ensembles/ppo.py) `import` finds the top-level one."""
    name = path.removesuffix(".py").replace("/", "_")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, script_path(path))
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def read_csv(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_metrics(folder: Path) -> list[dict]:
    return read_jsonl(folder / "metrics.jsonl")


def write_jsonl(path: Path, rows: list) -> Path:
    """Rows, or lines as they are; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def write_csv(path: Path, rows: list[dict]):
    """As the stages write their tables."""
    import pandas

    path.parent.mkdir(parents=True, exist_ok=True)
    pandas.DataFrame(rows).to_csv(path, index=False)


def write_program(path: Path, text: str):
    """An executable file, which stands in for a program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def files(folder: Path) -> dict[str, bytes]:
    """Relative path -> bytes of every file in a folder, in order."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def record(monkeypatch, module, name: str) -> list[SimpleNamespace]:
    """Let module.name go on as before, and keep its calls: .args, .kwargs, .result."""
    original, calls = getattr(module, name), []

    def recorded(*args, **kwargs):
        result = original(*args, **kwargs)
        calls.append(SimpleNamespace(args=args, kwargs=kwargs, result=result))
        return result

    monkeypatch.setattr(module, name, recorded)
    return calls


def close(found, expected, tolerance: float = 1e-5) -> bool:
    """Are both (tensors, or lists of numbers, of one shape) equal within an absolute and relative tolerance?"""
    found, expected = (torch.as_tensor(x, dtype=torch.float64) for x in (found, expected))
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=tolerance, atol=tolerance)


def give_other_tokenizer(world, folder: Path):
    """Put a smaller tokenizer into a model's folder in place of its own."""
    import posts
    from datasets import load_from_disk

    for file in folder.glob("tokenizer*"):
        file.unlink()
    texts = load_from_disk(str(world.dataset))["validation"]["query"][:10]
    posts.train_tokenizer(texts, 300).save_pretrained(folder)


def give_other_eos(folder: Path) -> Path:
    """Let a tokenizer end with another token of the same vocabulary; returns the folder."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    vocabulary = tokenizer.get_vocab()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id + 5)
    assert tokenizer.get_vocab() == vocabulary
    tokenizer.save_pretrained(folder)
    return folder


def without_pad(rows: torch.Tensor, pad: int) -> list[list[int]]:
    return [[token for token in row if token != pad] for row in rows.tolist()]


def edit_config(folder: Path, **fields):
    """Set fields of a checkpoint's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def random_model(config, tokenizer, eos: int | None = None):
    """A random model whose vocabulary is exactly the tokenizer's; `eos` (default: the tokenizer's) is its BOS, too."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    config.vocab_size = len(tokenizer)
    config.bos_token_id = config.eos_token_id = tokenizer.eos_token_id if eos is None else eos
    config.pad_token_id = None
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config)


def random_base(config, world, folder: Path) -> Path:
    """The folder of a random model and its tokenizer, the world's."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(world.tokenizer)
    random_model(config, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_reward_model(source: Path, folder: Path, bias: float = 0.0) -> Path:
    """A reward model with a random head on the base in `source`, and minus `bias` as its `reward_mean`."""
    import reward

    tokenizer = reward.load_tokenizer(str(source))
    model = reward.new_reward_model(str(source), tokenizer)
    torch.nn.init.constant_(model.bias, bias)
    model.to_transformers().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def head_of(folder: Path) -> tuple[torch.Tensor, float]:
    """Weight (1, D) of a saved reward model's head, and the constant that is added to it."""
    from safetensors.torch import load_file

    weight = load_file(Path(folder, "model.safetensors"))["score.weight"]
    return weight, -json.loads(Path(folder, "config.json").read_text()).get("reward_mean", 0.0)


def changed_weights(source: Path, folder: Path, change) -> Path:
    """A copy of a checkpoint with other weights."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder)
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    return folder


def make_constant(source: Path, folder: Path) -> Path:
    """A copy of a reward model that gives everything the same reward, minus its `reward_mean`."""
    return changed_weights(source, folder, lambda x: x | {"score.weight": torch.zeros_like(x["score.weight"])})


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real posts, comparisons and the Pythia tokenizer; skips where it is not beside the checkout."""
    if not SHARED.exists():
        pytest.skip("no ../shared/data beside the checkout")
    return SHARED


def make_world(root: Path) -> SimpleNamespace:
    """Generated posts, their tokenizer, pre-tokenised data and a nano model in `root`, made where they are not there
    yet, by one process at a time: .raw .tokenizer .dataset .preference_dataset .model (folders)."""
    found = SimpleNamespace(
        raw=root / "raw",
        tokenizer=root / "raw" / "tokenizer",
        dataset=root / "tldr" / "sft",
        preference_dataset=root / "tldr" / "preference",
        model=root / "nano-xs",
    )
    with FileLock(str(root) + ".lock"):
        if not found.model.exists():
            import nano
            import posts

            import tldr_dataset

            counts = {"num_train": 64, "num_validation": 16, "num_test": 8, "num_comparisons": 64}
            counts |= {"num_validation_comparisons": 24, "num_cnndm_comparisons": 12, "vocab_size": 512}
            posts.main(posts.Args(output_dir=str(found.raw), **counts))
            tldr_dataset.main(
                tldr_dataset.Args(
                    sft_dataset=str(found.raw / "posts"),
                    preference_dataset=str(found.raw / "comparisons"),
                    tokenizer=str(found.tokenizer),
                    output_dir=str(root / "tldr"),
                )
            )
            nano.main(nano.Args(tokenizer=str(found.tokenizer), size="xs", output_dir=str(found.model)))
    return found


@pytest.fixture(scope="session")
def world(tmp_path_factory, worker_id) -> SimpleNamespace:
    """The folders of make_world, made once for all test processes."""
    root = tmp_path_factory.getbasetemp()
    return make_world((root if worker_id == "master" else root.parent) / "world")


def make_talker(world, folder: Path, eos: float) -> Path:
    """A random policy that is far from uniform and, the more the larger `eos` is, ends its responses with EOS."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(world.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(world.model)
    with torch.no_grad():
        output = model.get_output_embeddings().weight
        output *= 8
        model.gpt_neox.final_layer_norm.bias += 0.5
        output[tokenizer.eos_token_id] += eos
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def single_process(**others) -> SimpleNamespace:
    """What the scripts' helpers need of an Accelerator: one process on the CPU, without autocast."""
    settings = {"device": torch.device("cpu"), "autocast": nullcontext, "process_index": 0, "num_processes": 1}
    settings |= {"reduce": lambda tensors, _: tensors, "unwrap_model": lambda model: model}
    return SimpleNamespace(**settings | others)


@torch.no_grad()
def sample_by_hand(model, query, tokenizer, keys, length: int, temperature: float = 1.0, top_p: float = 1.0) -> list:
    """The tokens of a response, each by a full forward pass without padding: softmax, the fewest tokens of top_p, and
    the noise of the keys (length, 2). [PAD] and ids beyond the tokenizer are never drawn."""
    import ppo

    said = []
    while len(said) < length and tokenizer.eos_token_id not in said:
        logits = model(torch.tensor([query + said])).logits[0, -1].double() / temperature
        logits[len(tokenizer) :] = logits[tokenizer.pad_token_id] = -torch.inf
        noisy = (logits + ppo.gumbel_noise(keys[None, len(said)], len(logits))[0]).tolist()
        probs, order = logits.softmax(0), logits.argsort(descending=True)
        before = probs[order].cumsum(0) - probs[order]  # the mass of what is likelier
        said.append(max(order[before < top_p].tolist(), key=noisy.__getitem__))
    return said


def pytest_configure(config):
    config.addinivalue_line("markers", "long: minutes of its own; runs with -m long only")
    config.addinivalue_line("markers", "slurm: needs Slurm, and minutes; runs with -m slurm only")
    config.addinivalue_line("markers", "gpu: for a GPU, but passes on a CPU, too; runs with -m gpu only")


def pytest_collection_modifyitems(config, items):
    if not config.option.markexpr:
        long = [item for item in items if {"long", "slurm", "gpu"} & {mark.name for mark in item.iter_markers()}]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


def pytest_terminal_summary(terminalreporter):
    """Print tables of what some tests record, collected from all processes."""
    headers = {
        "invariance": ["run", "split", "lines of metrics", "largest relative difference", "where"],
        "deepspeed": ["stage", "engine", "mixed precision", "largest difference to float32", "of a loss of"],
        "gradients": ["run", "optimiser steps", "of these clipped", "largest relative error", "where"],
        "sampling": [],  # these record {column: value}
        "generate": [],
        "rewards": [],
        "parity": ["break", "quantities above their bounds", "the first"],
    }
    titles = {
        "gradients": "gradients of whole runs against float64 by hand",
        "parity": "breaks of ours beside the authors' code",
        "sampling": "sampling beside generate()",
        "generate": "saved policies: our sampler at temperature 1e-6 beside generate()",
        "rewards": "saved reward models: our rewards beside plain transformers'",
    }
    reports = terminalreporter.getreports("passed")
    for name, header in headers.items():
        rows = [value for report in reports for key, value in report.user_properties if key == name]
        if rows and isinstance(rows[0], dict):
            header, rows = list(rows[0]), [list(row.values()) for row in rows]
        if rows:
            terminalreporter.section(titles.get(name, f"{name}: against 1 process in float32"))
            for row in [header, ["---"] * len(header), *sorted(rows)]:
                terminalreporter.write_line(f"| {' | '.join(map(str, row))} |")
