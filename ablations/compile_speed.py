"""What compile.diff does to the passes of PPO's training, with random weights in Pythia's architecture.

    python ablations/compile_speed.py                                   # a CPU: 16 layers of width 512
    python ablations/compile_speed.py --width 2048 --rows 16            # a GPU: Pythia 1B's shape

Prints the median seconds of a forward and backward pass of policy and value model over one micro-batch, as ppo.py runs
it and compiled, in turn. On a CPU it takes the seconds of the process, which other processes disturb little. Then it
prints how far from 1 the ratio of the compiled passes of rollout and training is, with the rollout run with gradients,
as in ppo_compile.py, and without; and the same for a compiled reference.
"""

import copy
import statistics
import time
from dataclasses import dataclass

import torch
import tyro
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GPTNeoXConfig
from transformers.modeling_layers import GradientCheckpointingLayer


@dataclass
class Args:
    width: int = 512
    layers: int = 16
    rows: int = 8
    columns: int = 400
    repeats: int = 5
    """measurements of each kind"""


def compiled(model):
    """Return a copy of a model whose layers compile.diff would compile."""
    model = copy.deepcopy(model)
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.compile(dynamic=True)
    return model


def main(args: Args):
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.manual_seed(1)
    shape = {"hidden_size": args.width, "num_hidden_layers": args.layers, "intermediate_size": 4 * args.width}
    config = GPTNeoXConfig(**shape, num_attention_heads=8, vocab_size=50304, num_labels=1, pad_token_id=0)
    policy = AutoModelForCausalLM.from_config(config).to(device).eval()
    value_model = AutoModelForSequenceClassification.from_config(config).to(device).eval()
    tokens = torch.randint(1, 50304, (args.rows, args.columns), device=device)

    def logits_and_values(models):
        with torch.autocast(device.type, torch.bfloat16):
            hidden = models[0].base_model(tokens, use_cache=False).last_hidden_state[:, -54:-1]
            values = models[1].score(models[1].base_model(tokens, use_cache=False).last_hidden_state)
            return models[0].get_output_embeddings()(hidden), values

    def logprobs_of(models):
        return -torch.nn.functional.cross_entropy(
            logits_and_values(models)[0].float().transpose(1, 2), tokens[:, -53:], reduction="none"
        )

    def seconds(models) -> float:
        synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        clock = time.perf_counter if device.type == "cuda" else time.process_time
        synchronize()
        start = clock()
        logits, values = logits_and_values(models)
        (logits.float().logsumexp(2).sum() + values.float().square().sum()).backward()
        synchronize()
        return clock() - start

    both = {"ppo.py": (policy, value_model), "compiled": (compiled(policy), compiled(value_model))}
    for models in both.values():
        seconds(models)  # compiles
    found = [(name, seconds(models)) for _ in range(args.repeats) for name, models in both.items()]
    for name in both:
        print(f"{name}: {statistics.median(x for key, x in found if key == name):.2f} s")
    with torch.no_grad():
        without = logprobs_of(both["compiled"])
        reference = logprobs_of((compiled(policy).requires_grad_(False), both["compiled"][1]))
    training = logprobs_of(both["compiled"]).detach()
    rollout = logprobs_of(both["compiled"]).detach()
    for name, logprobs in {"with gradients": rollout, "without": without, "reference": reference}.items():
        print(f"rollout {name}: ratio {((training - logprobs).exp() - 1).abs().max().item():.1e} off")


if __name__ == "__main__":
    main(tyro.cli(Args))
