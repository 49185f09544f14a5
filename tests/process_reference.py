"""Credit estimators once more, with Python floats and loops. Imports nothing from dash_trl.

A row is a dict: `utilities` [(last token, U)], `length`, `outcome`, `advantage` (the outcome's), `valued`, and for gae
`values`, one per token. A group is a list of rows; a batch a list of groups. Results: one list of floats per row.
"""

import math
import statistics


def to_go(rewards, discount=1.0):
    return [sum(discount ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))]


def mean(values):
    return statistics.fmean(values) if values else 0.0


def deviation(values):
    """Unbiased; infinite if it is unknown, so that what is divided by it is 0."""
    return statistics.stdev(values) if len(values) > 1 else math.inf


def credit(estimator, batch, s):
    """Computes credit by one of the estimators below; a row that is not valued gets its outcome advantage."""
    return [
        values if row["valued"] else [row["advantage"]] * row["length"]
        for row, values in zip(flat(batch), estimator(batch, s), strict=True)
    ]


def flat(batch):
    return [row for group in batch for row in group]


def pooled(group):
    return [utility for row in group if row["valued"] for _, utility in row["utilities"]]


def grpo(batch, s):
    return [[row["advantage"]] * row["length"] for row in flat(batch)]


def grpo_process(batch, s):
    results = []
    for group in batch:
        centre = mean(pooled(group))
        divisor = max(deviation(pooled(group)), s["floor"])
        for row in group:
            normalised = [0.0] * row["length"]
            for last, utility in row["utilities"]:
                normalised[last] = (utility - centre) / divisor
            results.append([row["advantage"] + s["process"] * value for value in to_go(normalised)])
    return results


def combined(row, s):
    rewards = [0.0] * row["length"]
    for last, utility in row["utilities"]:
        rewards[last] = s["process"] * utility
    if rewards:
        rewards[-1] += row["outcome"]
    return rewards


def deepseek_process(batch, s):
    results = []
    for group in batch:
        pool = [value for row in group if row["valued"] for value in combined(row, s)]
        centre = mean(pool)
        scale = deviation(pool) + 1e-6
        results += [to_go([(value - centre) / scale for value in combined(row, s)]) for row in group]
    return results


def reinforce(batch, s):
    return [to_go(combined(row, s)) for row in flat(batch)]


def gae(batch, s):
    """Token by token, with the outcome as the reward of the last one."""
    results = []
    for row in flat(batch):
        values = [*row["values"], 0.0]
        rewards = combined(row, {"process": 0.0})
        errors = [reward + values[t + 1] - values[t] for t, reward in enumerate(rewards)]
        results.append(to_go(errors, s["lambda"]))
    return results


def vineppo(batch, s):
    """V where the token's episode ends, minus V where it begins. After the final answer comes the outcome."""

    def after(row, t):
        end = min([last for last, _ in row["utilities"] if last >= t], default=row["length"] - 1) + 1
        return row["values"][end] if end < row["length"] else row["outcome"]

    return [[after(row, t) - row["values"][t] for t in range(row["length"])] for row in flat(batch)]


def figures(rows):
    """name → figure of a batch's rows, which have `boundaries`, V at them, `skipped`, `credit`."""
    asked = [row for row in rows if not row["skipped"]]
    valued = [row for row in rows if row["valued"]]
    samples = {
        "process/episodes": [len(row["boundaries"]) - 1 for row in asked],
        "process/missing_values": [math.isnan(value) for row in asked for value in row["at_boundaries"]],
        "process/valued_rows": [row["valued"] for row in rows],
        "process/value_first": [row["at_boundaries"][0] for row in asked if not math.isnan(row["at_boundaries"][0])],
        "process/value_last": [row["at_boundaries"][-1] for row in asked if not math.isnan(row["at_boundaries"][-1])],
        "process/structured_rows": [len(row["utilities"]) > 1 and bends(row["credit"]) for row in valued],
    }
    return {name: mean(sample) for name, sample in samples.items() if sample}


def bends(values):
    return bool(values) and max(values) - min(values) > 1e-6
