"""What differences between runs on the same seeds can show: intervals, the noise floor, and a verdict in words."""

from math import sqrt

import numpy
import pandas
from scipy import stats


def noise_pairs(rows: pandas.DataFrame, baseline: pandas.Series, of: str) -> list[float]:
    """Return the differences between A/A runs and their baseline, of all beds: same command or version, same size."""
    is_same = (rows["candidate"] == baseline["candidate"]) | (rows["version"] == baseline["version"])
    rows = rows[is_same & (rows["size"] == baseline["size"])]
    run = ["bed", "version", "seed", "cpu"]
    plain = rows[rows["note"] == ""].drop_duplicates(run)
    both = rows[rows["note"].str.startswith("A/A")].merge(plain, on=run, suffixes=("", " before"))
    return (both[of] - both[f"{of} before"]).dropna().tolist()


def residual_spread(runs: pandas.DataFrame) -> tuple[float, int]:
    """Return the standard deviation of runs (a column of seeds for each candidate, some missing) that is left after
    the effects of candidate and seed, and its degrees of freedom."""
    table = runs.stack().dropna()
    seed, candidate = (table.index.get_level_values(level) for level in (0, 1))
    design = pandas.concat([pandas.get_dummies(candidate), pandas.get_dummies(seed).iloc[:, 1:]], axis=1).astype(float)
    effects, _, rank, _ = numpy.linalg.lstsq(design.to_numpy(), table.to_numpy(), rcond=None)
    freedom = len(table) - rank
    return sqrt(((table - design.to_numpy() @ effects) ** 2).sum() / max(freedom, 1)), freedom


def holm(p: pandas.Series, tries: int) -> pandas.Series:
    """Return p values corrected for their number, or for `tries` if that is larger."""
    ranks = p.rank(method="first")  # the smallest times m, the next times m - 1, and never decreasing
    corrected = (p * (max(tries, len(p)) + 1 - ranks)).clip(upper=1)
    return corrected[p.sort_values().index].cummax()[p.index]


def summarise(
    differences: pandas.DataFrame,
    noise: list[float],
    tries: int,
    level: float = 0.95,
    runs: pandas.DataFrame | None = None,
) -> dict[str, dict]:
    """Return {candidate: count, mean, low, high, p, holm, floor, noise_runs, power} of its differences to the baseline,
    a column of seeds each; none for a single seed. noise: the differences of A/A runs. tries: the number that p is
    corrected for. level: that of the interval. floor is the largest mean difference that rounding alone would give
    (95 %), and power the smallest effect that so many seeds would show with 80 %, before the correction.

    Intervals and p are those of the paired t test. With the runs themselves (candidates and their baselines), a study
    of many candidates takes one standard deviation for all: `residual_spread` of those whose differences have at most
    three times the median standard deviation. The others keep their own."""
    if differences.empty:
        return {}
    table = differences.agg(["count", "mean", "std"]).T
    table = table[table["count"] > 1]
    error, freedom = table["std"] / table["count"] ** 0.5, table["count"] - 1
    if runs is not None:
        is_wild = table["std"] > 3 * table["std"].median()
        spread, left = residual_spread(runs.drop(columns=table.index[is_wild]))
        error = error.where(is_wild, spread * (2 / table["count"]) ** 0.5)
        freedom = freedom.where(is_wild, left)
    wide = stats.t.ppf((1 + level) / 2, freedom)
    table["low"], table["high"] = table["mean"] - wide * error, table["mean"] + wide * error
    table["p"] = 2 * stats.t.sf((table["mean"].abs() / error).fillna(0), freedom)  # a copy that changes nothing: 0 / 0
    table["holm"] = holm(table["p"], tries)
    noise_sd = pandas.Series(noise, dtype=float).std()
    table["noise_runs"] = len(noise)
    table["floor"] = stats.t.ppf(0.975, len(noise) - 1) * noise_sd / table["count"] ** 0.5 if len(noise) > 1 else 0.0
    table["power"] = (stats.t.ppf(0.975, freedom) + stats.t.ppf(0.8, freedom)) * error
    return table.to_dict("index")


def verdict(summary: dict, confirm: int) -> str:
    """Return what can be said of a candidate in words. confirm: the number of seeds that a confirmation needs, or 0."""
    if summary["noise_runs"] < 2:
        return "cannot be told: fewer than two A/A runs, which a call without --confirm makes"
    if summary["count"] < confirm:
        return f"cannot be told: {summary['count']:.0f} of {confirm} seeds"
    if abs(summary["mean"]) <= summary["floor"]:
        return "cannot be told: below the noise floor"
    if summary["holm"] >= 0.05:
        return f"cannot be told: an effect of {summary['power']:.3f} would have shown"
    if summary["mean"] < 0:
        return "worse"
    return "better" if confirm else "promising: now --confirm"
