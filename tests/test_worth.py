"""What V is worth: the evidence by loops, intervals by simulation, `process_weight="auto"` in real runs."""

import math
import random
from itertools import permutations
from statistics import fmean

import pytest
import torch

from dash_trl import DASHTrainer, ProcessRewardCallback
from dash_trl.process_rewards import ESTIMATORS, AnswerLogProbValue
from dash_trl.process_rewards.diagnostics import Diagnostics
from dash_trl.process_rewards.worth import LEAST_GROUPS, WINDOWS, Evidence, Watch, evidence_of, interval, student
from dash_trl.rollout import joined
from dash_trl.update import group_advantages
from tests.test_credit import as_tables
from tests.test_outcome_value import AUTO, Knows, callback, logged, train
from tests.tiny import ScriptedReward, parameters, run

NAN = math.nan


def rollouts(seed, groups=16, size=4, *, signal=1.0, missing=0.0, outcomes=(0.0, 1.0)):
    """[(boundaries, values, outcome)], a group after the other; V is the outcome times `signal`, and noise.

    Noise of the rollout and of the group, as much as of the boundary; the signal is another one in each group.
    """
    draw = random.Random(seed)
    rows = []
    for _ in range(groups):
        hard, level, gain = draw.random(), draw.gauss(0, 1), signal * draw.uniform(0.2, 1.8)
        for _ in range(size):
            outcome = outcomes[draw.random() < hard] if draw.random() >= missing else NAN
            boundaries = [0, *sorted(draw.sample(range(1, 60), draw.randrange(1, 9)))]
            own = level + draw.gauss(0, 0.5) + gain * (0 if math.isnan(outcome) else outcome)
            values = [NAN if draw.random() < missing else own + draw.gauss(0, 0.5) for _ in boundaries]
            rows.append((boundaries, values, outcome))
    return rows


def evidence(rows, size=4) -> Evidence:
    """With three times the outcome for an advantage."""
    boundaries, values, _ = as_tables([{"boundaries": b, "values": v, "length": 60} for b, v, _ in rows])
    outcomes = torch.tensor([row[2] for row in rows]).double()
    return evidence_of(boundaries, values, outcomes, 3 * outcomes.nan_to_num(), group_size=size)


def watch(*windows) -> Watch:
    found = Watch()
    for window in windows:
        found.add(window if isinstance(window, Evidence) else evidence(window))
    return found


# ---------------------------------------------------------------------------------------------------------- by loops


def inner(row):
    """V at b_1 … b_{n−1}, as far as it is known and the row is scored."""
    return [v for v in row[1][1:-1] if not (math.isnan(v) or math.isnan(row[2]))]


def by_hand(group):
    pairs, won, products = 0.0, 0.0, [0.0, 0.0, 0.0]
    used = [row for row in group if inner(row)]
    for one, other in permutations(used, 2):
        if one[2] > other[2]:
            v, w = fmean(inner(one)), fmean(inner(other))
            pairs += 1
            won += 1.0 if v > w else 0.5 if v == w else 0.0
    if pairs:
        v_mean, y_mean = fmean(fmean(inner(row)) for row in used), fmean(row[2] for row in used)
        for row in used:
            for v in inner(row):
                d, e = v - v_mean, row[2] - y_mean
                for i, product in enumerate((d * d, d * e, e * e)):
                    products[i] += product / len(inner(row))
    return pairs, won, products


@pytest.mark.parametrize(
    ("size", "missing", "outcomes"), [(2, 0.0, (0.0, 1.0)), (5, 0.25, (0.0, 1.0)), (5, 0.0, (-3.0, 7.5))]
)
def test_the_evidence_is_its_definition(size, missing, outcomes):
    rows = rollouts(size, 20, size, missing=missing, outcomes=outcomes)
    rows[0] = (rows[0][0], [0.5] * len(rows[0][1]), rows[0][2])  # ties
    rows[1] = (rows[1][0], [0.5] * len(rows[1][1]), rows[1][2])
    found = evidence(rows, size)
    for g in range(20):
        expected = by_hand(rows[g * size : (g + 1) * size])
        for name, numbers in zip(("pairs", "won", "products"), expected, strict=True):
            assert getattr(found, name)[g].tolist() == pytest.approx(numbers, abs=1e-9), (name, g)


def test_the_figures_are_pooled_over_groups_and_windows():
    windows = [rollouts(seed) for seed in range(3)]
    groups = [by_hand(window[i : i + 4]) for window in windows for i in range(0, 64, 4)]
    share = sum(group[1] for group in groups) / sum(group[0] for group in groups)
    assert watch(*windows).figures()["process/concordance"] == pytest.approx(share, abs=1e-12)


def test_the_interval_is_the_jackknife_s():
    sums = [[random.Random(i).random(), 1 + random.Random(-i).random()] for i in range(9)]

    def ratio(of):
        return sum(one for one, _ in of) / sum(two for _, two in of)

    without = [ratio(sums[:i] + sums[i + 1 :]) for i in range(9)]
    error = math.sqrt(8 / 9 * sum((one - fmean(without)) ** 2 for one in without))
    found = interval(torch.tensor(sums, dtype=torch.double), lambda sums: sums[..., 0] / sums[..., 1])
    assert found == pytest.approx((ratio(sums), 2.306 * error), rel=5e-3)


@pytest.mark.parametrize(("degrees", "quantile"), [(7, 2.3646), (10, 2.2281), (30, 2.0423), (1000, 1.9623)])
def test_student_s_quantiles(degrees, quantile):
    assert student(degrees) == pytest.approx(quantile, rel=5e-3)


@pytest.mark.parametrize("signal", [0.0, 0.3])
def test_the_intervals_hold_the_truth_as_often_as_they_say(signal):
    """Lower ends are to lie above the truth in 2.5 % of the cases."""
    many = joined([evidence(rollouts(seed, 400, signal=signal)) for seed in range(2)])
    mixed = many.of_groups(many.pairs.nonzero().flatten())
    share = float(mixed.won.sum() / mixed.pairs.sum())
    vv, vy, _ = mixed.products.sum(dim=0).tolist()
    draws, above = torch.Generator().manual_seed(0), [0, 0]
    for _ in range(400):
        one = watch(mixed.of_groups(torch.randint(len(mixed.pairs), (20,), generator=draws)))
        above[0] += one.figures()["process/concordance_low"] > share
        above[1] += one.weight() > max(vy / vv, 0)
    assert 2 <= above[0] <= 16 and above[1] <= 16
    assert above[1] >= 4 or not signal


# ----------------------------------------------------------------------------------------------------- the weight

CERTAIN = [([0, 3, 6], [0.5, float(i % 2), 0.5], float(i % 2)) for i in range(4 * LEAST_GROUPS)]


def with_values(*values):
    return [(row[0], [0.5, values[i % len(values)], 0.5], row[2]) for i, row in enumerate(CERTAIN)]


def with_outcomes(*outcomes):
    return [(*row[:2], outcomes[i % len(outcomes)]) for i, row in enumerate(CERTAIN)]


@pytest.mark.parametrize(
    ("rows", "weight"),
    [
        (CERTAIN, 1.0),
        (with_values(0.3, 0.4), 1.0),  # order and distance count, not the level
        (with_outcomes(-5.0, 20.0), 1.0),
        (CERTAIN[4:], 0.0),  # a group too few
        (with_values(1.0, 0.0), 0.0),  # the other way round
        (with_values(0.5), 0.0),
        (with_values(0.1), 0.0),
        (with_values(NAN), 0.0),
        (with_values(math.inf, -math.inf), 0.0),
        (with_outcomes(1.0), 0.0),
        (with_outcomes(0.1), 0.0),
        (with_outcomes(NAN), 0.0),
        (with_outcomes(NAN, 1.0), 0.0),  # nothing to compare it with
        ([(row[0][:2], row[1][:2], row[2]) for row in CERTAIN], 0.0),  # no inner boundary
        (rollouts(0, 40, signal=0.0), 0.0),
        (rollouts(1, 400, signal=0.1), 0.0),  # something, but under 0.02
    ],
)
def test_the_weight_of_what_v_is_worth(rows, weight):
    assert watch(rows).weight() == pytest.approx(weight, abs=1e-9)
    assert weight or watch(rows).weight() == 0.0, "exactly"
    figures = watch(rows).figures()
    assert not any(math.isnan(one) for one in figures.values())
    assert ("process/concordance_low" in figures) == (evidence(rows).pairs.count_nonzero() >= LEAST_GROUPS)


def test_old_windows_are_forgotten_though_nothing_new_is_known():
    found = watch(CERTAIN, *[with_outcomes(1.0)] * (WINDOWS - 1))
    assert found.full and found.weight() > 0.99
    found.add(evidence(with_outcomes(1.0)))
    assert found.weight() == watch().weight() == 0.0 and found.figures() == {}


def test_the_unit_is_what_an_outcome_was_paid_in_groups_of_different_ones():
    """Three times the outcome, in each window; and 0 where no group has different ones."""
    assert watch(rollouts(0), rollouts(1, missing=0.3)).unit() == pytest.approx(3)
    assert watch().unit() == watch(with_outcomes(1.0)).unit() == watch(with_outcomes(0.1, 0.1 + 1e-8)).unit() == 0


# --------------------------------------------------------------------------------------------------------- warnings


@pytest.mark.parametrize(
    ("lows", "full", "said"),
    [
        ([0.5] * 5, True, 1),
        ([0.5] * 2, True, 0),
        ([0.4, 0.4, 0.6, 0.4, 0.4], True, 0),
        ([0.51] * 5, True, 0),
        ([0.4] * 5, False, 0),
        ([None] * 5, True, 0),
    ],
)
def test_a_v_that_orders_no_better_than_chance_is_warned_of(lows, full, said, caplog):
    diagnostics = Diagnostics()
    for low in lows:
        figures = {} if low is None else {"process/concordance": 0.55, "process/concordance_low": low}
        diagnostics.watch(figures, full=full, entropy=None)
    assert caplog.text.count("no better than chance") == said
    assert "larger V in 55.0% of the pairs" in caplog.text or not said


@pytest.mark.parametrize(
    ("entropies", "said"),
    [
        ([1.0, 2.0, 3.0, 0.19, 0.19, 0.19, 0.19], 1),
        ([1.0, 2.0, 3.0, 0.19, 0.19, 0.21, 0.19], 0),
        ([1.0, 2.0, 3.0, 0.19, 0.19], 0),
        ([0.1, 0.1, 0.1, 0.02, 0.02, 0.02], 0),
        ([None] * 9, 0),
    ],
)
def test_a_policy_that_has_stopped_to_try_is_warned_of(entropies, said, caplog):
    diagnostics = Diagnostics()
    for entropy in entropies:
        diagnostics.watch({}, full=True, entropy=entropy)
    assert caplog.text.count("entropy per token has fallen to 0.19, from 2 in the first windows") == said


# ---------------------------------------------------------------------------------------------------------- in runs


class Chance(Knows):
    def values(self, request):
        draw = random.Random(f"{request.completion_ids}")
        return [draw.random() for _ in request.boundaries]


SILENT = {"max_steps": 3, "reward": ScriptedReward(constant=0.0), "learning_rate": 0.1}


def test_a_v_that_is_worth_nothing_leaves_the_run_as_it_is_to_the_bit(tiny_model, tmp_path, caplog):
    """Also with an estimator that changes the advantages where U is 0."""
    plain = run(DASHTrainer, tiny_model, tmp_path, **SILENT)
    process = callback(Chance(), settings=AUTO, estimator="prime_rloo")
    trainer, windows = train(tiny_model, tmp_path, process, **SILENT)
    assert logged(trainer, "process/weight") == [0.0] * 3 and min(logged(trainer, "process/valued_rows")[1:]) > 0.5
    for name in ("filter/kept_rows", "filter/dropped_constant", "loss", "grad_norm"):
        assert logged(trainer, name) == logged(plain, name)
    expected, found = parameters(plain.model), parameters(trainer.model)
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    assert all(advantages.dim() == 1 for advantages in windows.advantages)
    assert "loses the structure" not in caplog.text and "almost no effect" not in caplog.text


def test_the_weight_is_that_of_the_windows_before(tiny_model, tmp_path, monkeypatch):
    given = []

    def asked(rewards, settings):
        given.append(settings.process_weight)
        return ESTIMATORS["centered_return"](rewards, settings)

    monkeypatch.setitem(ESTIMATORS, "asked", asked)
    process = callback(Knows(noise=0.3), estimator="asked", settings=AUTO)
    trainer, windows = train(tiny_model, tmp_path, process, **{**SILENT, "max_steps": 5})
    weights = logged(trainer, "process/weight")
    assert weights == [0.0, *windows.weights[:-1]] and 0 < weights[-1] < 1
    assert given == [weight for weight in weights if weight]
    assert [advantages.dim() for advantages in windows.advantages] == [1 + (weight > 0) for weight in weights]
    assert logged(trainer, "process/concordance")[-1] > 0.8 > 0.5 < logged(trainer, "process/concordance_low")[-1]
    assert process._diagnostics.entropies == [], "a value that is not made of the policy's confidence"


def test_rows_whose_v_is_lost_keep_their_outcome_advantage(tiny_model, tmp_path):
    """As where too few rollouts fail for a fit, though the windows before have given V a weight."""

    class Lost(Knows):
        calls = 0

        def __call__(self, requests, trainer):
            self.calls += 1
            values = super().__call__(requests, trainer)
            return values if self.calls < 5 else [[NAN] * len(row) for row in values]

    process = callback(Lost(), settings=AUTO)
    trainer, windows = train(tiny_model, tmp_path, process, **{**SILENT, "max_steps": 5})
    assert logged(trainer, "process/weight")[-1] > 0 == logged(trainer, "process/valued_rows")[-1]
    last = windows.rollouts[-1]
    outcome = group_advantages(last.rewards, torch.ones(1), 4).unsqueeze(1) * last.completion_mask
    assert outcome.any() and torch.equal(windows.advantages[-1], outcome)


def mine(requests, trainer):
    """Two functions are two values."""


def yours(requests, trainer):
    """Another one."""


@pytest.mark.parametrize(
    ("value", "another"),
    [(AnswerLogProbValue(), AnswerLogProbValue(space="probability")), (mine, yours)],
    ids=["of another space", "another function"],
)
def test_the_worth_of_another_value_is_not_this_one_s(value, another):
    first = ProcessRewardCallback(value)
    first._watch.add(evidence(CERTAIN))
    weights = []
    for one in (value, another):
        process = ProcessRewardCallback(one)
        process.load_state_dict(first.state_dict())
        weights.append(process._watch.weight())
    assert weights[0] > 0.99 and weights[1] == 0


def test_states_of_earlier_versions_and_of_other_values(caplog):
    process = callback()
    process._watch.add(evidence(CERTAIN))
    process._diagnostics.entropies.append(1.5)
    state, of_value = process.state_dict(), process.value.state_dict()
    assert state.keys() == {"worth", "OutcomeValue"}
    again, before, other = callback(), callback(), callback(Knows(), settings=AUTO)
    caplog.clear()
    again.load_state_dict(state)
    assert again._watch.weight() > 0.99 and again._diagnostics.entropies == [1.5]
    before.load_state_dict({"OutcomeValue": of_value})
    other.load_state_dict(state)
    assert before._watch.weight() == other._watch.weight() == 0.0 == len(other._diagnostics.entropies)
    assert not caplog.records
    again.load_state_dict({"worth": {**process._watched, "windows": [{"bins": torch.zeros(1)}], "entropies": []}})
    assert again._watch.weight() == 0.0
    assert "holds nothing that OutcomeValue has learned" in caplog.text
