"""What the tests share: the scripts as importable modules and one small generated world per test session."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")
REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "quickstart")]

import pytest  # noqa: E402
import torch  # noqa: E402
from filelock import FileLock  # noqa: E402

torch.set_num_threads(1)
SHARED = REPOSITORY.parent / "shared" / "data"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real posts, comparisons and the Pythia tokenizer; skips where it is not beside the checkout."""
    if not SHARED.exists():
        pytest.skip("no ../shared/data beside the checkout")
    return SHARED


@pytest.fixture(scope="session")
def world(tmp_path_factory, worker_id) -> SimpleNamespace:
    """Generated posts, their tokenizer, pre-tokenised data and a nano model, made once for all test processes:
    .raw .tokenizer .dataset .preference_dataset .model (folders)."""
    root = tmp_path_factory.getbasetemp()
    root = (root if worker_id == "master" else root.parent) / "world"
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
