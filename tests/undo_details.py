"""Do the tests notice when a detail of the paper is undone? Two patches a detail, and some for other tests.

    python tests/undo_details.py                    # all of them, half an hour on two free cores
    python tests/undo_details.py 11 20 --jobs 4     # these two details, four at a time

Each patch is applied to a copy of the repository in a temporary folder, where the tests that it names are run: those
of a detail (its number) or others (file::test). They have to pass without a patch and to fail with it. Exit code 1 if a
test still passes, cannot run, or a patch no longer fits the script: patches name short pieces of source text, which
must occur exactly once in their file.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from multiprocessing.pool import ThreadPool
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# one block per patch: detail or test, files (one after the other), what is undone; "- " the text, "+ " what replaces it
PATCHES = r"""
01 tldr_dataset.py: a CNN/DM batch is not known
- "cnndm0", "cnndm2")
+ "cnndm0")
01 tldr_dataset.py: the choice is read the wrong way round
- chosen = columns["summaries"][columns["choice"]]
-     rejected = columns["summaries"][1 - columns["choice"]]
+ rejected = columns["summaries"][columns["choice"]]
+     chosen = columns["summaries"][1 - columns["choice"]]
02 tldr_dataset.py: a space after TL;DR:
- POST: {post}\n\nTL;DR:"
+ POST: {post}\n\nTL;DR: "
02 tldr_dataset.py: newlines are no place to cut
- body.rfind("\n")
+ -1
03 tldr_dataset.py: no EOS
- joined_tokens[shared:], pad_id
+ joined_tokens[shared:-1], pad_id
03 sft.py: [PAD] is EOS
- tokenizer.add_special_tokens({"pad_token": "[PAD]"})
+ tokenizer.pad_token = tokenizer.eos_token
04 tldr_dataset.py: 63 tokens
- max_sft_response_length: int = 53
+ max_sft_response_length: int = 63
04 tldr_dataset.py: longer rows are let through
- if longest > width:
+ if False:
05 tldr_dataset.py: queries padded on the right
- "query_token": padding + tokens
+ "query_token": tokens + padding
05 tldr_dataset.py: 565 columns
- (512, 53): 562
+ (512, 53): 565
06 tldr_dataset.py: groups of pairs are not counted
- "value": value, "pairs": count})
+ "value": value, "pairs": 1})
06 tldr_dataset.py: (a, b) and (b, a) are two pairs
- "--".join(sorted(
+ "--".join(list(
07 ppo.py: dropout stays
-     return model
- 
- 
- def check_model
+     return model.train()
+ 
+ 
+ def check_model
07 ppo.py: the value model's dropout stays
- return RewardModel(model)
+ return RewardModel(model.train())
test_gradients.py::test_sft sft.py: epsilon 1e-8 by default
- eps=1e-5
+ eps=1e-8
test_details.py::test_tables_3 sft.py: two epochs
- num_train_epochs: float = 1
+ num_train_epochs: float = 2
test_gradients.py::test_reward reward.py: a linear schedule
- 0.5 * (1 + cos(pi * (update - 1) / num_updates))
+ (1 - (update - 1) / num_updates)
11 reward.py: 1 / sqrt(d)
- std=1 / (model.score.in_features + 1) ** 0.5
+ std=1 / model.score.in_features**0.5
11 reward.py: the bias stays random
- nn.Parameter(torch.zeros(1))
+ nn.Parameter(torch.rand(1))
12 reward.py: the last token that is no pad
- last = (tokens != pad_id).long().cumprod(1).sum(1, keepdim=True) - 1
+ last = tokens.shape[1] - 1 - (tokens != pad_id).int().flip(1).argmax(1, keepdim=True)
test_gradients.py::test_reward reward.py: the reward's own position is logged as another
-  & (t != rejected_last)
+ 
14 ppo.py: rewards of left-padded rows
- "tokens": joined.gather(1, real_first),
+ "tokens": joined,
14 reward.py: rewards are read in the last column
- return model(tokens).gather(1, last).squeeze(1)
+ return model(tokens)[:, -1]
15 reward.py: not centred
- reward_mean = rewards.mean().item()
+ reward_mean = 0.0
15 reward.py: statistics are those after centring
- "max": rewards.max()
+ "max": rewards.max() - rewards.mean()
16 reward.py: accuracy of the rejected
- columns["hit"] = ((rewards[:, 0] > rewards[:, 1])
+ columns["hit"] = ((rewards[:, 0] < rewards[:, 1])
16 reward.py: rounding decides a tie
- & ~tie).tolist()
+ ).tolist()
test_judge.py::test_the_places eval/judge.py: A is B in the prompt
- (row.summary, row.other) if row.summary_is_a else (row.other, row.summary)
+ (row.other, row.summary) if row.summary_is_a else (row.summary, row.other)
17 eval/rm_report.py: ties count
- .isin([0.0, 1.0])
+ .isin([0.0, 0.5, 1.0])
18 eval/rm_report.py: chances of differences twice as large
- 1 / (1 + numpy.exp(-size)), numpy.argsort
+ 1 / (1 + numpy.exp(-2 * size)), numpy.argsort
18 eval/rm_report.py: too sure and not sure enough cancel out
- abs(row["accuracy"] - row["chance"])
+ (row["accuracy"] - row["chance"])
test_details.py::test_tables_3 dpo.py: beta 0.1
- beta: float = 0.05
+ beta: float = 0.1
19 dpo.py: the evaluation forgets the reference
- args.beta * (logprobs - ref_logprobs[split])
+ args.beta * logprobs
20 ppo.py: sampling at temperature 1
- scaled = logits.float() / (temperature + TEMPERATURE_EPS)
-     tokens =
+ scaled = logits.float()
+     tokens =
20 ppo.py: the alarm looks at the first micro-batch alone
- if not grad_norms:
+ if not deviations:
test_gradients.py::test_ppo ppo.py: drawn with replacement
- torch.randperm(n, generator
+ torch.randint(n, (n,), generator
test_gradients.py::test_ppo ppo.py: what does not fill a batch is dropped
- data_order(len(train), args.seed,
+ data_order(len(train) // args.batch_size * args.batch_size, args.seed,
test_gradients.py::test_ppo ppo.py: the head starts at 0
-     model, optimizer = prepare(accelerator, PolicyAndValue(policy, value_model), args)
+     nn.init.zeros_(value_model.model.score.weight)
+     model, optimizer = prepare(accelerator, PolicyAndValue(policy, value_model), args)
test_gradients.py::test_ppo ppo.py: shares the policy's backbone
-     model, optimizer = prepare(accelerator, PolicyAndValue(policy, value_model), args)
+     value_model.model.gpt_neox = policy.gpt_neox
+     model, optimizer = prepare(accelerator, PolicyAndValue(policy, value_model), args)
test_gradients.py::test_ppo ppo.py: the score lies at EOS
- score_position = lengths.clamp(max=kl.shape[1] - 1)
+ score_position = lengths - 1
test_details.py::test_whitening ppo.py: no epsilon
- torch.rsqrt(variance + 1e-8)
+ torch.rsqrt(variance)
test_details.py::test_whitening ppo.py: unbiased variance
- * mask).sum() / count
-     whitened
+ * mask).sum() / (count - 1)
+     whitened
test_gradients.py::test_sft sft.py: EOS is not in the loss
- tokens == pad_id, -100)
+ (tokens == pad_id) | (tokens == 0), -100)
test_gradients.py::test_sft sft.py: the schedule is not applied
- group["lr"] = learning_rate
+ group["lr"] = args.learning_rate
test_gradients.py::test_ppo ppo.py: one position early
- last = mb["row_lengths"] - 1
+ last = mb["row_lengths"] - 2
test_gradients.py::test_reward reward.py: the mean over the response is the reward
- chosen = logits.gather(1, chosen_last).squeeze(1)
+ chosen = logits.mean(1)
test_gradients.py::test_reward reward.py: the share of positive ones is logged
- (other_logits < 0)
+ (other_logits > 0)
test_gradients.py::test_dpo dpo.py: logged rewards know no beta
- chosen_reward = args.beta * (chosen.detach() - mb["ref_chosen"])  # equation 5
-             rejected_reward = args.beta * (
+ chosen_reward = (chosen.detach() - mb["ref_chosen"])
+             rejected_reward = (
test_gradients.py::test_dpo dpo.py: the reference's part goes to other rows
- ref_logprobs["train"][rows].unbind(1)
+ ref_logprobs["train"][: len(rows)].unbind(1)
test_gradients.py::test_ppo ppo.py: all log-probabilities at temperature 1
- scaled = logits.float() / (temperature + TEMPERATURE_EPS)
-     return -F
+ scaled = logits.float()
+     return -F
test_gradients.py::test_rloo variants/rloo.py: the baseline holds the response itself
- others = (groups.sum(1, keepdim=True) - groups) / (k - 1)
+ others = groups.mean(1, keepdim=True)
test_gradients.py::test_grpo variants/grpo.py: one clip range for both sides
- 1 + args.cliprange_high
+ 1 + args.cliprange
test_gradients.py::test_grpo variants/grpo.py: the upper clip range does not follow the lower one
- args.cliprange_high = args.cliprange
+ args.cliprange_high = 0.2
test_gradients.py::test_online_dpo variants/online_dpo.py: a count for each process and micro-batch
- loss = (losses * mb["weights"]).sum()
+ loss = (losses * mb["weights"]).sum() / mb["weights"].sum().clamp(min=1e-9) / len(mbs)
test_gradients.py::test_online_dpo variants/online_dpo.py: the pair is chosen before the penalty
- best_and_worst(scores, batch
+ best_and_worst(batch["raw_scores"], batch
test_gradients.py::test_ppo_function ablations/function.diff: the value model's head is random
- nn.init.zeros_(model.score.weight)
+ nn.init.normal_(model.score.weight)
test_gradients.py::test_dpo ablations/simpo.diff: the margin is the rejected one's
- beta * (chosen - rejected) - gamma
+ beta * (chosen - rejected) + gamma
test_sampling.py::test_noise_in_the_rollouts ppo.py: old log-probabilities in other micro-batches
- mbs += micro_batches(batch, own_share(accelerator, mini_batch), args.micro_batch_size)
+ mbs += micro_batches(batch, own_share(accelerator, mini_batch), args.micro_batch_size + 3)
test_sampling.py::test_it_is_exactly_1 ppo.py: a frozen model all in bfloat16
- if (everything or isinstance(module, nn.Linear)) and
+ if (True or isinstance(module, nn.Linear)) and
test_sampling.py::test_the_tokens_are ppo.py: padding is seen
- may_attend = F.pad(is_query[:, -width:], (0
+ may_attend = F.pad(is_query[:, -width:] | True, (0
test_launch.py::test_what_a_run sft.py: cuDNN's attention stays on
- torch.backends.cuda.enable_cudnn_sdp(False)
+ pass
test_launch.py::test_frozen_models_are_of ppo.py: biases are cast at every call
- if weight not in kept:
+ if weight not in kept and weight.ndim == 2:
test_launch.py::test_a_frozen_model_in ppo.py: a tied head takes the embedding along
- if weight not in kept:
+ if True:
test_ensembles.py::test_members_are_standardised_by ensembles/ppo.py: the standard deviation over n - 1
- sd = scores[:, k].std(unbiased=False)
+ sd = scores[:, k].std()
test_gradients.py::test_ensembles_ppo ensembles/ppo.py: the mean is not taken off
- (model.reward_mean + mean) / sd
+ model.reward_mean / sd
test_gradients.py::test_ensembles_ppo ensembles/ppo.py: the new head is not zero
- nn.init.zeros_(value_model.model.score.weight)
+ pass
test_ensembles.py::test_a_resumed_run_keeps_the_scale ensembles/ppo.py: measured anew at every start
- if args.resume and kept.exists() else {}
+ if False else {}
test_ensembles.py::test_a_member_that_says_one_thing ensembles/ppo.py: a standard deviation of 0 is taken
- if sd < 1e-6 * max(1, abs(mean)):
+ if sd < 0:
test_average.py::test_weights_and_accuracies ensembles/average.py: the median of the weights
- .mean(0).float() for name
+ .median(0).values.float() for name
test_average.py::test_what_cannot_be_averaged ensembles/average.py: any base will do
- ONE_BASE = 0.5
+ ONE_BASE = -2.0
test_gradients.py::test_llama2_reward llama2/reward.py: a tie's safety labels weigh as much as others
- (mb["weight"] * safety).sum()
+ safety.sum()
test_gradients.py::test_llama2_reward llama2/reward.py: a literal in place of --safety-coef
- loss = loss + args.safety_coef * safety_sum
+ loss = loss + 0.2 * safety_sum
test_gradients.py::test_ppo_value ablations/value.diff: the policy decays in the warm-up
- parameter.grad = None
+ parameter.grad.zero_()
test_gradients.py::test_ppo_lora ablations/lora.diff: the value model's head is frozen
- score).requires_grad_(True)
+ score).requires_grad_(False)
test_gradients.py::test_ppo_value ablations/value.diff: returns with PPO's lambda
- args.gamma, args.lam_value)
+ args.gamma, args.lam)
test_faults.py::test_resume_refuses sft.py: --resume takes whatever it is given
- if key in old and key not in MAY_CHANGE | {"wandb_id"}:
+ if False:
test_faults.py::test_resume_takes sft.py: no other micro-batch on --resume
- MAY_CHANGE = {"micro_batch_size", 
+ MAY_CHANGE = {
test_faults.py::test_accumulation sft.py: accelerate's accumulation is not looked at
- os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "1"
+ pass
test_invariance.py::test_two_processes ppo.py: gradients are exchanged with another micro-batch than the last
- is_last = number == len(mbs)
+ is_last = number == 1
test_invariance.py::test_the_model_is ppo.py: the value model comes last
-     save_model(accelerator, args, "value_model", value_model.to_transformers(), tokenizer)
-     save_model(accelerator, args, "model", policy, tokenizer)
+     save_model(accelerator, args, "model", policy, tokenizer)
+     save_model(accelerator, args, "value_model", value_model.to_transformers(), tokenizer)
test_faults.py::test_resume_without sft.py: a run begins anew in silence
-     if args.resume:
-         accelerator.print(
+     if args.resume and finished:
+         accelerator.print(
test_faults.py::test_resume_compares sft.py: data are compared by their size
- content.update(file.read(4096))
+ content.update(str(size).encode())
test_faults.py::test_a_score ppo.py: a score may be no number
- if not batch["raw_scores"].isfinite().all():
+ if False:
"""


def read_patches(text: str) -> list[tuple[str, str, str, str, str]]:
    """(detail or test, file, what is undone, old text, new text) of every patch and file."""
    patches = []
    for block in re.findall(r"^(?:\d\d|test_\w+\.py::\w+) .*\n(?:[-+] .*\n)+", text, re.MULTILINE):
        header, *lines = block.splitlines()
        names, _, what = header.partition(": ")
        test, *files = names.split()
        old, new = ("\n".join(line[2:] for line in lines if line[0] == sign) for sign in "-+")
        patches += [(test, file, what, old, new) for file in files]
    return patches


def run_test(test: str, file: str = "", old: str = "", new: str = "") -> tuple[int, str]:
    """Return pytest's exit code in a copy of the repository in which a file has new text for old, and why it failed."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "main")
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in listed.split("\0")[:-1]:
            if (ROOT / name).exists():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, copy / name)
        if (ROOT.parent / "shared").exists():
            Path(folder, "shared").symlink_to(ROOT.parent / "shared")
        if file:
            text = (copy / file).read_text()
            if text.count(old) != 1:
                return -1, f"PATCH DOES NOT APPLY, its text occurs {text.count(old)} times"
            (copy / file).write_text(text.replace(old, new))
        where, _, name = test.rpartition("::") if "::" in test else ("test_details.py", "", f"test_detail_{test}")
        command = [sys.executable, "-m", "pytest", "-qx", f"tests/{where}", "-k", name, "-p", "no:cacheprovider"]
        command += ["--tb=short", "--show-capture=no", f"--basetemp={folder}/pytest"]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("E  ")] or [done.stdout[-200:]]
    return done.returncode, lines[0].removeprefix("E").strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", help="numbers of details or file::test; default: all of them")
    parser.add_argument("--jobs", type=int, default=2, help="tests that run at the same time")
    args = parser.parse_args()
    wanted = [f"{int(x):02}" if x.isdigit() else x for x in args.tests]
    patches = [patch for patch in read_patches(PATCHES) if not wanted or patch[0] in wanted]
    if not patches:
        parser.error(f"there are patches for {sorted({test for test, *_ in read_patches(PATCHES)})} only")

    def row(patch) -> tuple[bool, str]:
        test, file, what, old, new = patch
        code, why = run_test(test, file, old, new)
        result = {0: "STILL PASSES", 1: "fails as it should"}.get(code, f"CANNOT RUN (pytest ends with {code})")
        return code == 1, f"{test.rpartition('::')[2]:>3}  {file:15}  {what:45}  {result}: {why:.160}"

    wrong = 0
    with ThreadPool(args.jobs) as pool:
        tests = sorted({test for test, *_ in patches})
        for test, (code, why) in zip(tests, pool.imap(run_test, tests), strict=True):
            wrong += code != 0
            print(f"{test}: {f'DOES NOT PASS: {why:.160}' if code else 'passes as it should'}", flush=True)
        for is_noticed, line in pool.imap(row, patches):
            wrong += not is_noticed
            print(line, flush=True)
    print(f"{len(patches)} patches; {wrong} tests or patches are not as they should be")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
