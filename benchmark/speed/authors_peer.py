"""One run of the authors' SFT or reward-model loop for speed.py, on the libraries that they pinned:

    PYTHONPATH=old_libraries python benchmark/speed/authors_peer.py SETTINGS.json

The loop is theirs as it stands, by benchmark/parity/theirs.py. Their accelerate is replaced by what it does in one
process: gradients of --batch-size rows add up over micro-batches before a step.
"""

import ast
import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

sys.path.append(str(Path(__file__).resolve().parents[1] / "parity"))

import theirs  # noqa: E402
import torch  # noqa: E402


class Accumulating:
    """An Accelerator and its optimizer, which steps after every `count` micro-batches. Then the time and the mean loss
    of the micro-batches are noted."""

    def __init__(self, optimizer, count: int):
        self.optimizer, self.count, self.done = optimizer, count, 0
        self.ends, self.losses, self.sum = [time.time()], [], 0.0

    def accumulate(self, model):
        self.done += 1
        return nullcontext()

    def backward(self, loss):
        (loss / self.count).backward()
        self.sum += loss.item() / self.count

    def step(self):
        if self.done % self.count == 0:
            self.optimizer.step()

    def zero_grad(self):
        if self.done % self.count == 0:
            self.optimizer.zero_grad()
            self.ends.append(time.time())
            self.losses.append(self.sum)
            self.sum = 0.0


def main(settings: dict):
    stage, work, rows = settings["stage"], settings["work"], torch.load(settings["rows_of"])
    job = {"authors": settings["authors"]}
    config = theirs.AutoConfig.from_pretrained(f"{work}/model")
    if stage == "sft":
        names = theirs.definitions(job, "sft", ["forward", "disable_dropout"])
        model = theirs.AutoModelForCausalLM.from_pretrained(f"{work}/model")
    else:
        names = theirs.definitions(job, "reward", theirs.SCALAR_MODEL)
        scalar = {"base_model": f"{work}/model", "base_config": config, "hidden_size": config.hidden_size}
        model = names["ScalarModel"](names["ScalarModelConfig"](**scalar))
        if settings["head"]:
            model.scalar_head.weight.data.copy_(torch.load(settings["head"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["learning_rate"], eps=theirs.ADAM_EPS)
    tokenizer = SimpleNamespace(pad_token_id=settings["pad"])
    names["disable_dropout"](model)
    model.train()
    loop = theirs.training_loop(job, stage, "data").body
    step = [node for node in loop if ast.unparse(node).startswith(("query_responses", "with accelerator.accumulate"))]
    both = Accumulating(optimizer, settings["batch"] // settings["micro"])
    names |= {"model": model, "optimizer": both, "accelerator": both, "tokenizer": tokenizer}
    for micro_batch in zip(*(column.split(settings["micro"]) for column in rows.values()), strict=True):
        names["data"] = dict(zip(rows, micro_batch, strict=True))
        theirs.execute(step, stage, names)
    measured = {"ends": both.ends, "losses": both.losses, "arguments": {}}
    Path(settings["output"]).write_text(json.dumps(measured))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
