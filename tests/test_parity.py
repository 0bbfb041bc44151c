"""benchmark/parity: bounds, reasons and orders on made-up numbers. The long test runs the authors' code, and is skipped
without a checkout of theirs and their libraries:

    PARITY_AUTHORS=FOLDER PARITY_OLD_LIBRARIES=FOLDER python -m pytest -m long tests/test_parity.py

(last output: benchmark/results/parity_breaks.txt)
"""

import os

import ours as our_side
import parity
import pytest
import torch

AUTHORS, OLD_LIBRARIES = os.environ.get("PARITY_AUTHORS"), os.environ.get("PARITY_OLD_LIBRARIES")


def tensor(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def compare(ours: dict, runs: list[dict]) -> list[parity.Row]:
    return parity.compare("x", "ppo.py", lambda patches: ours, runs)


def test_a_bound_is_ten_times_the_floor_and_at_least_a_millionth_of_the_largest_value():
    runs = [{"a": tensor(1, -4), "b": tensor(3)}, {"a": tensor(1.001, -4), "b": tensor(3)}]
    runs.append({"a": tensor(1, -4.002), "b": tensor(3)})
    a, b = compare({"a": tensor(1.01, -4.02), "b": tensor(3.5)}, runs)
    assert (a.quantity, b.quantity) == ("x: a", "x: b")
    assert a.difference == pytest.approx(0.02) and a.bound == pytest.approx(0.02, rel=1e-9) and b.bound == 3e-6
    assert b.difference == 0.5 and not b.stands()
    assert compare({"a": tensor(1.01, -4.0199), "b": tensor(3)}, runs)[0].stands()
    with pytest.raises(SystemExit, match="quantities of one side alone: .*'b'"):
        compare({"a": tensor(1, 1)}, runs)
    with pytest.raises(SystemExit, match=r"a has shape \(1,\), theirs \(2,\)"):
        compare({"a": tensor(1), "b": tensor(3)}, runs)


def test_of_tokens_the_rows_that_differ_are_counted():
    [row] = compare({"a": torch.tensor([[1, 2], [3, 4]])}, [{"a": torch.tensor([[1, 2], [5, 6]])}])
    assert (row.difference, row.bound, row.stands()) == (1, 0, False)
    assert "| x: a |  |  | 1 rows | 0 rows | **NO REASON**" in parity.markdown([row], parity.Args("a", "b"), 60)


def test_a_reason_counts_only_where_the_difference_goes_without_it(monkeypatch):
    """Two deviations of made-up code: one moves `a`, one is said to move `b` and does not, none is said to move `c`,
    and both move `d`."""
    first = our_side.Deviation("x: [ad]", "ppo.py", "The policy loss is divided by", [("first", "")])
    second = our_side.Deviation("x: [bd]", "ppo.py", "The score is added one position", [("second", "")])
    monkeypatch.setattr(our_side, "DEVIATIONS", [first, second])

    def ours(patches) -> dict:
        undone = [old for old, _ in patches]
        off = {"a": 0.1 * ("first" not in undone), "b": 0.1, "c": 0.1 * (not undone)}
        off["d"] = 0.1 * ("first" not in undone) + 0.1 * ("second" not in undone)
        return {key: tensor(1.0 + x) for key, x in off.items()}

    rows = parity.compare("x", "ppo.py", ours, [{key: tensor(1.0) for key in "abcd"}])
    assert [row.stands() for row in rows] == [True, False, False, True]
    assert [row.undone for row in rows] == [0, pytest.approx(0.1), None, 0]
    assert rows[3].reason.count("](../../ppo.py#L") == 2 and rows[2].reason == ""
    assert parity.markdown(rows, parity.Args("a", "b"), 60).count("**NO REASON**") == 2


def test_deviations_are_named_by_the_docstrings_and_their_patches_fit(tmp_path):
    for deviation in our_side.DEVIATIONS:
        file, line = our_side.line_of(deviation).split("#L")
        assert file == deviation.script and int(line) < 75
        assert our_side.load(deviation.script, tmp_path, deviation.undone).Args
    with pytest.raises(SystemExit, match="sft.py does not hold this text once"):
        our_side.load("sft.py", tmp_path, [("no such text", "")])


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_other_orders_keep_each_row_in_its_mini_batch(mini_batches):
    order = [torch.randperm(16, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    first, *others = parity.with_other_orders(order, mini_batches, 2)
    assert first is order and len(others) == 2
    for mine, *theirs in zip(first, *others, strict=True):
        assert len({tuple(rows.tolist()) for rows in (mine, *theirs)}) == 3
        for part, *same in zip(*(rows.chunk(mini_batches) for rows in (mine, *theirs)), strict=True):
            assert all(sorted(rows.tolist()) == sorted(part.tolist()) for rows in same)


# ---- the authors' code beside errors of ours -------------------------------------------------------------------------

REFERENCE = """                logits = response_logits(ref_policy, mb["tokens"], mb["columns"])
            logprobs = token_logprobs(logits, mb["responses"], """
BREAKS = {  # a text of ppo.py, what replaces it, and a quantity that must be above its bound then
    "the score at EOS": (
        "score_position = lengths.clamp(max=kl.shape[1] - 1)",
        "score_position = lengths - 1",
        "token rewards",
    ),
    "unbiased variance": (".square() * mask).sum() / count", ".square() * mask).sum() / (count - 1)", "advantages"),
    "lambda left out": ("deltas[:, t] + gamma * lam * advantage", "deltas[:, t] + gamma * advantage", "returns"),
    "the reference without temperature": (
        REFERENCE + "args.temperature",
        REFERENCE + "1.0",
        "log-probabilities of the reference",
    ),
    "the value mask without the place after EOS": (
        '"value_mask": positions <= lengths[:, None]',
        '"value_mask": positions < lengths[:, None]',
        "values",
    ),
}


def test_each_break_is_of_today_s_script():
    text = (parity.our_side.ROOT / "ppo.py").read_text()
    assert {what: text.count(old) for what, (old, _, _) in BREAKS.items()} == dict.fromkeys(BREAKS, 1)


@pytest.mark.long
@pytest.mark.skipif(not (AUTHORS and OLD_LIBRARIES), reason="needs PARITY_AUTHORS and PARITY_OLD_LIBRARIES")
def test_each_error_of_ours_is_noticed(tmp_path, monkeypatch, record_property):
    args = parity.Args(authors=AUTHORS, old_libraries=OLD_LIBRARIES, work=str(tmp_path), orders=1)
    parity.prepare(args)
    assert all(row.stands() for row in parity.reward(args))
    ppo, theirs, found = our_side.ppo, parity.theirs, []

    def once(*inputs, **job):  # the authors' side of PPO is the same each time
        found.extend([] if found else theirs(*inputs, **job))
        return found

    monkeypatch.setattr(parity, "theirs", once)
    assert [row.quantity for row in parity.ppo_case(args, "PPO") if not row.stands()] == []
    for what, (old, new, quantity) in BREAKS.items():

        def broken(work, patches, *more, error=(old, new)):
            return ppo(work, [*patches, error], *more)

        monkeypatch.setattr(our_side, "ppo", broken)
        wrong = [row.quantity for row in parity.ppo_case(args, "PPO") if not row.stands()]
        assert any(name.endswith(f": {quantity}") for name in wrong), (what, wrong)
        record_property("parity", [what, str(len(wrong)), wrong[0]])
