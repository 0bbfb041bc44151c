"""What differences between runs on the same seeds can show: intervals, the noise floor, and a verdict in words."""

from math import sqrt

import pandas
from scipy import stats


def noise_pairs(rows: pandas.DataFrame, baseline: pandas.Series, of: str) -> list[float]:
    """Return the differences between A/A runs and their baseline, of all beds: same command or version, same size.
    Equal runs are left out: their micro-batches were the same, or too few updates followed."""
    is_same = (rows["candidate"] == baseline["candidate"]) | (rows["version"] == baseline["version"])
    rows = rows[is_same & (rows["size"] == baseline["size"])]
    run = ["bed", "version", "seed"]
    plain = rows[rows["note"] == ""].drop_duplicates(run)
    both = rows[rows["note"].str.startswith("A/A")].merge(plain, on=run, suffixes=("", " before"))
    return [x for x in (both[of] - both[f"{of} before"]).dropna() if x]


def holm(p: pandas.Series, tries: int) -> pandas.Series:
    """Return p values corrected for their number, or for `tries` if that is larger."""
    ranks = p.rank(method="first")  # the smallest times m, the next times m - 1, and never decreasing
    corrected = (p * (max(tries, len(p)) + 1 - ranks)).clip(upper=1)
    return corrected[p.sort_values().index].cummax()[p.index]


def summarise(differences: pandas.DataFrame, noise: list[float], tries: int, level: float = 0.95) -> dict[str, dict]:
    """Return {candidate: count, mean, low, high, p, holm, floor, power} of its differences to the baseline, a column of
    seeds each; none for a single seed. noise: the differences of A/A runs. tries: the number that p is corrected for.
    level: that of the interval.

    The standard deviation is at least that pooled over the candidates whose own is below three times the noise's, so
    that few seeds that happen to lie together do not count as certainty. floor is the largest mean difference that
    rounding alone would give (95 %), and power the smallest effect that so many seeds would show with 80 %."""
    if differences.empty:
        return {}
    table = differences.agg(["count", "mean", "std"]).T
    table = table[table["count"] > 1]
    noise_sd = pandas.Series(noise, dtype=float).std()
    is_alike = table["std"].gt(0) & table["std"].lt(3 * noise_sd)  # a copy that changes nothing has 0
    freedom = table["count"] - 1
    pooled = sqrt((freedom * table["std"] ** 2)[is_alike].sum() / max(freedom[is_alike].sum(), 1))
    is_pooled = is_alike & table["std"].lt(pooled)
    error = table["std"].mask(is_pooled, pooled) / table["count"] ** 0.5
    freedom = freedom.mask(is_pooled, freedom[is_alike].sum())
    wide = stats.t.ppf((1 + level) / 2, freedom)
    table["low"], table["high"] = table["mean"] - wide * error, table["mean"] + wide * error
    table["p"] = 2 * stats.t.sf((table["mean"].abs() / error).fillna(0), freedom)
    table["holm"] = holm(table["p"], tries)
    table["floor"] = stats.t.ppf(0.975, len(noise) - 1) * noise_sd / table["count"] ** 0.5 if len(noise) > 1 else 0.0
    table["power"] = (stats.t.ppf(0.975, freedom) + stats.t.ppf(0.8, freedom)) * error
    return table.to_dict("index")


def verdict(summary: dict, confirm: int) -> str:
    """Return what can be said of a candidate in words. confirm: the number of seeds that a confirmation needs, or 0."""
    if not summary["floor"]:
        return "cannot be told: no A/A runs, which a call without --confirm makes"
    if summary["count"] < confirm:
        return f"cannot be told: {summary['count']:.0f} of {confirm} seeds"
    if abs(summary["mean"]) <= summary["floor"]:
        return "cannot be told: below the noise floor"
    if summary["holm"] >= 0.05:
        return f"cannot be told: an effect of {summary['power']:.3f} would have shown"
    if summary["mean"] < 0:
        return "worse"
    return "better" if confirm else "promising: now --confirm"
