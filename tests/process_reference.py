"""Credit estimators once more, with Python floats and loops. Imports nothing from dash_trl.

A row is a dict: `utilities` [(last token, U)], `length`, `outcome`, `advantage` (the outcome's), `valued`, and for gae
`values`, one per token. A group is a list of rows; a batch a list of groups. Results: one list of floats per row.
"""

from __future__ import annotations

import math


def token_rewards(row):
    rewards = [0.0] * row["length"]
    for last, utility in row["utilities"]:
        rewards[last] = utility
    return rewards


def to_go(rewards):
    return [sum(rewards[t:]) for t in range(len(rewards))]


def mean(values):
    return sum(values) / len(values) if values else 0.0


def deviation(values):
    """Unbiased."""
    if len(values) < 2:
        return 0.0
    centre = mean(values)
    return math.sqrt(sum((v - centre) ** 2 for v in values) / (len(values) - 1))


def outcome_only(row, s):
    return [s["outcome"] * row["advantage"]] * row["length"]


def grpo(batch, s):
    return [[row["advantage"]] * row["length"] for group in batch for row in group]


def centered_return(batch, s):
    results = []
    for group in batch:
        scale = max(deviation([sum(u for _, u in row["utilities"]) for row in group if row["valued"]]), s["floor"])
        for row in group:
            if not row["valued"]:
                results.append(outcome_only(row, s))
                continue
            others = [to_go(token_rewards(other)) for other in group if other is not row and other["valued"]]
            credit = []
            for t, value in enumerate(to_go(token_rewards(row))):
                baseline = mean([other[t] if t < len(other) else 0.0 for other in others])
                credit.append(s["outcome"] * row["advantage"] + s["process"] * (value - baseline) / scale)
            results.append(credit)
    return results


def episode(batch, s):
    results = []
    for group in batch:
        pool = [u for row in group if row["valued"] for _, u in row["utilities"]]
        scale = max(math.sqrt(mean([u * u for u in pool])), s["floor"])
        for row in group:
            credit = outcome_only(row, s)
            start = 0
            for last, utility in row["utilities"] if row["valued"] else []:
                for t in range(start, last + 1):
                    credit[t] += s["process"] * utility / scale
                start = last + 1
            results.append(credit)
    return results


def grpo_process(batch, s):
    results = []
    for group in batch:
        pool = [u for row in group if row["valued"] for _, u in row["utilities"]]
        centre, scale = mean(pool), max(deviation(pool), s["floor"])
        for row in group:
            normalised = [0.0] * row["length"]
            for last, utility in row["utilities"] if row["valued"] else []:
                normalised[last] = (utility - centre) / scale
            results.append([s["outcome"] * row["advantage"] + s["process"] * value for value in to_go(normalised)])
    return results


def combined(row, s):
    rewards = [s["process"] * value for value in token_rewards(row)]
    if rewards:
        rewards[-1] += s["outcome"] * row["outcome"]
    return rewards


def deepseek_process(batch, s):
    results = []
    for group in batch:
        pool = [value for row in group if row["valued"] for value in combined(row, s)]
        centre, scale = mean(pool), deviation(pool) + 1e-6
        for row in group:
            normalised = [(value - centre) / scale for value in combined(row, s)]
            results.append(to_go(normalised) if row["valued"] else outcome_only(row, s))
    return results


def whitened(rows, batch, s):
    """verl's: (x - mean) / sqrt(variance + 1e-8) over all tokens."""
    flat = [row for group in batch for row in group]
    pool = [value for values, row in zip(rows, flat, strict=True) if row["valued"] for value in values]
    if len(pool) < 2:
        return [values if row["valued"] else outcome_only(row, s) for values, row in zip(rows, flat, strict=True)]
    centre, scale = mean(pool), math.sqrt(deviation(pool) ** 2 + 1e-8)
    return [
        [(value - centre) / scale for value in values] if row["valued"] else outcome_only(row, s)
        for values, row in zip(rows, flat, strict=True)
    ]


def prime_rloo(batch, s):
    rows = []
    for group in batch:
        sources = []  # per source: per row {token: reward}
        sources.append((s["outcome"], [{row["length"] - 1: row["outcome"]} if row["length"] else {} for row in group]))
        sources.append((s["process"], [dict(row["utilities"]) for row in group]))
        totals = [[0.0] * row["length"] for row in group]
        for weight, places in sources:
            used = [p if row["valued"] else {} for p, row in zip(places, group, strict=True)]
            n = sum(bool(p) for p in used)
            if not n:
                continue
            baseline = sum(mean(list(p.values())) for p in used) / max(n - 1, 1)
            for total, place in zip(totals, used, strict=True):
                for token, reward in place.items():
                    total[token] += weight * (reward * n / max(n - 1, 1) - baseline)
        rows += [to_go(total) for total in totals]
    return whitened(rows, batch, s)


def rloo(batch, s):
    results = []
    for group in batch:
        for row in group:
            if not row["valued"]:
                results.append(outcome_only(row, s))
                continue
            others = [sum(combined(other, s)) for other in group if other is not row and other["valued"]]
            results.append([sum(combined(row, s)) - mean(others)] * row["length"])
    return results


def discounted(rewards, s):
    return [sum(s["gamma"] ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))]


def reinforce_plus_plus(batch, s):
    return whitened([discounted(combined(row, s), s) for group in batch for row in group], batch, s)


def reinforce_plus_plus_baseline(batch, s):
    rows = []
    for group in batch:
        baseline = mean([sum(combined(row, s)) for row in group if row["valued"]])
        for row in group:
            rewards = combined(row, s)
            if rewards:
                rewards[-1] -= baseline
            rows.append(discounted(rewards, s))
    return whitened(rows, batch, s)


def gae(batch, s):
    results = []
    for group in batch:
        for row in group:
            if not row["valued"]:
                results.append([row["advantage"]] * row["length"])
                continue
            advantages, later = [], 0.0
            for t in reversed(range(row["length"])):
                ended = t == row["length"] - 1
                after = 0.0 if ended else row["values"][t + 1]
                delta = (row["outcome"] if ended else 0.0) + s["gamma"] * after - row["values"][t]
                later = delta + s["gamma"] * s["lambda"] * later
                advantages.insert(0, later)
            results.append(advantages)
    return results


def figures(rows):
    """name → (mean, standard deviation) of a batch's rows, which have `boundaries`, V at them, `skipped`, `credit`."""
    asked = [row for row in rows if not row["skipped"]]
    valued = [row for row in rows if row["valued"]]
    several = [row for row in valued if len(row["utilities"]) > 1]
    ends = [(last / row["length"], utility) for row in valued for last, utility in row["utilities"]]
    samples = {
        "process/episodes": [len(row["boundaries"]) - 1 for row in asked],
        "process/missing_values": [math.isnan(value) for row in asked for value in row["at_boundaries"]],
        "process/valued_rows": [row["valued"] for row in rows],
        "process/value_first": [row["at_boundaries"][0] for row in asked if not math.isnan(row["at_boundaries"][0])],
        "process/value_last": [row["at_boundaries"][-1] for row in asked if not math.isnan(row["at_boundaries"][-1])],
        "process/structured_rows": [bends(row["credit"]) for row in valued],
        "process/utility_first_half": [utility for at, utility in ends if at < 0.5],
        "process/utility_second_half": [utility for at, utility in ends if at >= 0.5],
        "advantage/mean": [value for row in rows for value in row["credit"]],
        "advantage/mean_outcome_only": [row["advantage"] for row in rows for _ in row["credit"]],
        "asked": [not row["skipped"] for row in rows],
        "structured where several": [bends(row["credit"]) for row in several],
        "added": [value - row["advantage"] for row in rows for value in row["credit"]],
        "outcome": [row["advantage"] for row in valued],
    }
    return {
        name: (mean(sample) if sample else math.nan, deviation(sample) if len(sample) > 1 else math.nan)
        for name, sample in samples.items()
    }


def bends(values):
    return bool(values) and max(values) - min(values) > 1e-6
