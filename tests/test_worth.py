"""What V is worth: the evidence by loops, intervals by simulation, `process_weight="auto"` in real and resumed runs."""

from __future__ import annotations

import io
import math
import random
from itertools import permutations
from statistics import fmean

import pytest
import torch

from dash_trl import DASHTrainer, ProcessRewardCallback
from dash_trl.process_rewards import ESTIMATORS, AnswerLogProbValue, CreditSettings, calibration_error
from dash_trl.process_rewards.diagnostics import Diagnostics
from dash_trl.process_rewards.worth import LEAST_GROUPS, WINDOWS, Evidence, Watch, evidence_of, interval, student
from tests.test_outcome_value import RESUMED, Seeded, Windows, callback, small, train
from tests.tiny import ScriptedReward, parameters, run

NAN = math.nan


def rollouts(seed, groups=16, size=4, *, signal=1.0, missing=0.0, outcomes=(0.0, 1.0)):
    """[(boundaries, values, length, outcome)], a group after the other; V is the outcome times `signal`, and noise.

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
            rows.append((boundaries, values, boundaries[-1] + draw.randrange(3), outcome))
    return rows


def tables(rows):
    widest = max(len(row[0]) for row in rows)
    boundaries = torch.tensor([[*row[0], *[-1] * (widest - len(row[0]))] for row in rows])
    values = torch.tensor([[*row[1], *[NAN] * (widest - len(row[1]))] for row in rows], dtype=torch.double)
    lengths, outcomes = (torch.tensor([row[i] for row in rows]) for i in (2, 3))
    return boundaries, values, lengths, outcomes.double()


def evidence(rows, size=4) -> Evidence:
    return evidence_of(*tables(rows), group_size=size)


def watch(*windows) -> Watch:
    found = Watch()
    for window in windows:
        found.add(window if isinstance(window, Evidence) else evidence(window))
    return found


# ---------------------------------------------------------------------------------------------------------- by loops


def inner(row):
    """(third, b, V) at b_1 … b_{n−1}, as far as V is known and the row is scored."""
    boundaries, values, length, outcome = row
    places = list(zip(boundaries, values, strict=True))[1:-1]
    return [(min(2, int(3 * b / length)), b, v) for b, v in places if not (math.isnan(v) or math.isnan(outcome))]


def by_hand(group):
    pairs, won, shorter = [0.0] * 3, [0.0] * 3, [0.0] * 3
    for one, other in permutations(group, 2):
        for third in range(3):
            here, there = ([cell[1:] for cell in inner(row) if cell[0] == third] for row in (one, other))
            if here and there and one[3] > other[3]:
                (b, v), (c, w) = ([fmean(cell[i] for cell in side) for i in (0, 1)] for side in (here, there))
                pairs[third] += 1
                won[third] += 1.0 if v > w else 0.5 if v == w else 0.0
                shorter[third] += 1.0 if b < c else 0.5 if b == c else 0.0
    used = [row for row in group if inner(row)]
    products = [0.0, 0.0, 0.0]
    if len({row[3] for row in used}) > 1:
        v_mean, y_mean = fmean(fmean(v for *_, v in inner(row)) for row in used), fmean(row[3] for row in used)
        for row in used:
            for *_, v in inner(row):
                d, e = v - v_mean, row[3] - y_mean
                for i, product in enumerate((d * d, d * e, e * e)):
                    products[i] += product / len(inner(row))
    errors, rollouts = [0.0, 0.0], 0
    for row in used:
        others = [other[3] for other in group if other is not row and not math.isnan(other[3])]
        if others:
            rollouts += 1
            errors[0] += fmean((v - row[3]) ** 2 for *_, v in inner(row))
            errors[1] += (fmean(others) - row[3]) ** 2
    return pairs, won, shorter, products, errors, rollouts


@pytest.mark.parametrize("outcomes", [(0.0, 1.0), (-3.0, 7.5)], ids=["probabilities", "rewards"])
@pytest.mark.parametrize("missing", [0.0, 0.25])
@pytest.mark.parametrize("size", [2, 5])
def test_the_evidence_is_its_definition(size, missing, outcomes):
    rows = rollouts(size, 20, size, missing=missing, outcomes=outcomes)
    rows[0] = (rows[0][0], [0.5] * len(rows[0][1]), *rows[0][2:])  # ties
    rows[1] = (rows[1][0], [0.5] * len(rows[1][1]), *rows[1][2:])
    found = evidence(rows, size)
    for g in range(20):
        expected = by_hand(rows[g * size : (g + 1) * size])
        for name, numbers in zip(("pairs", "won", "shorter", "products", "errors", "rollouts"), expected, strict=True):
            assert getattr(found, name)[g].tolist() == pytest.approx(numbers, abs=1e-9), (name, g)


def test_the_figures_are_pooled_over_groups_and_windows():
    windows = [rollouts(seed) for seed in range(3)]
    groups = [by_hand(window[i : i + 4]) for window in windows for i in range(0, 64, 4)]
    total = {name: [sum(group[i][k] for group in groups) for k in range(3)] for i, name in enumerate("pws")}
    figures = watch(*windows).figures(probability=True)
    assert figures["process/concordance"] == pytest.approx(sum(total["w"]) / sum(total["p"]), abs=1e-12)
    assert figures["process/concordance_position"] == pytest.approx(sum(total["s"]) / sum(total["p"]), abs=1e-12)
    for third, name in enumerate(("first", "second", "last")):
        share = total["w"][third] / total["p"][third]
        assert figures[f"process/concordance_{name}_third"] == pytest.approx(share, abs=1e-12)
    count = sum(group[5] for group in groups)
    for name, i in (("brier", 0), ("brier_siblings", 1)):
        assert figures[f"process/{name}"] == pytest.approx(sum(group[4][i] for group in groups) / count, abs=1e-9)


def test_one_boundary_per_rollout_is_calibrated_as_elsewhere():
    draw = random.Random(0)
    rows = [([0, 4, 9], [0.5, draw.random(), 0.5], 9, float(draw.random() < 0.5)) for _ in range(80)]
    expected = calibration_error([row[1][1] for row in rows], [row[3] for row in rows])
    assert watch(rows).figures(probability=True)["process/calibration_error"] == pytest.approx(expected, abs=1e-12)


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


@pytest.mark.parametrize(("signal", "most"), [(0.0, 0.035), (1.0, 0.06)])
def test_the_intervals_hold_the_truth_as_often_as_they_say(signal, most):
    """Lower ends are to lie above the truth in 2.5 % of the cases; with 20 groups and a large r it is up to 5 %."""
    many = Evidence.joined([evidence(rollouts(seed, 400, signal=signal)) for seed in range(4)])
    mixed = many.groups((many.products[:, 2] > 0).nonzero().flatten())
    share = float(mixed.won.sum() / mixed.pairs.sum())
    vv, vy, yy = mixed.products.sum(dim=0).tolist()
    draws, above = torch.Generator().manual_seed(0), [0, 0]
    for _ in range(2000):
        one = watch(mixed.groups(torch.randint(len(mixed), (20,), generator=draws)))
        above[0] += one.figures(probability=False)["process/concordance_low"] > share
        above[1] += one.weight() > max(vy, 0) ** 2 / (vv * yy)
    assert 0.003 * 2000 <= above[0] <= most * 2000 and above[1] <= most * 2000
    assert above[1] >= 0.01 * 2000 or not signal


# ----------------------------------------------------------------------------------------------------- the weight

CERTAIN = [([0, 3, 6], [0.5, float(i % 2), 0.5], 6, float(i % 2)) for i in range(4 * LEAST_GROUPS)]


def with_values(*values):
    return [(row[0], [0.5, values[i % len(values)], 0.5], *row[2:]) for i, row in enumerate(CERTAIN)]


def with_outcomes(*outcomes):
    return [(*row[:3], outcomes[i % len(outcomes)]) for i, row in enumerate(CERTAIN)]


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
        ([(row[0][:2], row[1][:2], *row[2:]) for row in CERTAIN], 0.0),  # no inner boundary
        (rollouts(0, 40, signal=0.0), 0.0),
        (rollouts(0, 400, signal=0.12), 0.0),  # something, but under 0.02
    ],
)
def test_the_weight_of_what_v_is_worth(rows, weight):
    assert watch(rows).weight() == pytest.approx(weight, abs=1e-9)
    assert weight or watch(rows).weight() == 0.0, "exactly"
    assert not any(math.isnan(one) for one in watch(rows).figures(probability=True).values())


def test_a_small_worth_is_none():
    groups = Evidence.joined([evidence(rollouts(seed, 400, signal=0.12)) for seed in range(4)])
    vv, vy, yy = groups.products.sum(dim=0).tolist()
    assert 0 < vy**2 / (vv * yy) < 0.02 and watch(groups).figures(probability=False)["process/concordance_low"] > 0.5
    assert watch(groups).weight() == 0.0 == watch().weight()


def test_old_windows_are_forgotten_though_nothing_new_is_known():
    found = watch(CERTAIN, *[with_outcomes(1.0)] * (WINDOWS - 1))
    assert found.full and found.weight() > 0.99
    found.add(evidence(with_outcomes(1.0)))
    assert found.weight() == 0.0 and "process/concordance" not in found.figures(probability=True)


def test_a_state_is_the_whole_of_it_and_no_random_numbers_are_drawn():
    torch.manual_seed(0)
    torchs, pythons = torch.get_rng_state(), random.getstate()
    one, buffer = watch(*[rollouts(seed) for seed in range(WINDOWS + 1)]), io.BytesIO()
    torch.save(one.state_dict(), buffer)
    buffer.seek(0)
    other = Watch()
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert other.figures(probability=True) == one.figures(probability=True) and other.weight() == one.weight() > 0
    assert torch.equal(torch.get_rng_state(), torchs) and random.getstate() == pythons


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

AUTO = CreditSettings(process_weight="auto")


class Knows:
    """A value that has seen how each completion ends: V is its reward at inner boundaries, and 0.5 before."""

    space = "probability"
    needs_answers = False

    def __init__(self, reward=None, noise=0.0):
        self.reward, self.noise = reward or ScriptedReward(constant=0.0), noise

    def __call__(self, requests, trainer):
        return [self.values(request) for request in requests]

    def values(self, request):
        (reward,) = self.reward(prompts=[request.example["prompt"]], completion_ids=[list(request.completion_ids)])
        draw = random.Random(f"{request.completion_ids}")
        return [0.5] * (request.boundaries != ()) + [
            reward + self.noise * draw.gauss(0, 1) for _ in request.boundaries[1:]
        ]


class Chance(Knows):
    def values(self, request):
        draw = random.Random(f"{request.completion_ids}")
        return [draw.random() for _ in request.boundaries]


def logged(trainer, name):
    return [line[name] for line in trainer.state.log_history if name in line]


SILENT = {"max_steps": 3, "reward": ScriptedReward(constant=0.0), "learning_rate": 0.1}


@pytest.mark.parametrize(
    ("value", "settings"),
    [
        (small, {}),
        (Chance, {"estimator": "episode", "unproductive_penalty": 0.5, "unproductive_below": 1e9}),
        (Chance, {"estimator": "rloo"}),
        (Chance, {"estimator": "prime_rloo"}),
    ],
)
def test_a_v_that_is_worth_nothing_leaves_the_run_as_it_is_to_the_bit(tiny_model, tmp_path, value, settings, caplog):
    process = callback(value(), settings=AUTO, **settings)
    trainer, windows = train(tiny_model, tmp_path, process, **SILENT)
    assert logged(trainer, "process/weight") == [0.0] * 3 and min(logged(trainer, "process/valued_rows")[1:]) > 0.5
    plain = run(DASHTrainer, tiny_model, tmp_path, **SILENT)
    for name in ("filter/kept_rows", "filter/dropped_constant", "loss", "grad_norm"):
        assert logged(trainer, name) == logged(plain, name)
    expected, found = parameters(plain.model), parameters(trainer.model)
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    assert all(advantages.dim() == 1 for advantages in windows.advantages)
    assert "loses the structure" not in caplog.text and "drowned" not in caplog.text


def test_the_weight_is_that_of_the_windows_before(tiny_model, tmp_path, monkeypatch):
    given = []

    def asked(rewards, settings):
        given.append(settings.process_weight)
        return ESTIMATORS["centered_return"](rewards, settings)

    monkeypatch.setitem(ESTIMATORS, "asked", asked)
    process = callback(Knows(noise=0.3), estimator="asked", settings=AUTO)
    expected = []

    class Before(Windows):
        def on_advantages(self, args, state, control, rollouts, **kwargs):
            super().on_advantages(args, state, control, rollouts, **kwargs)
            expected.append(self.process._watch.weight())

    trainer, windows = train(
        tiny_model, tmp_path, process, **{**SILENT, "max_steps": 5, "callbacks": [Before(process)]}
    )
    weights = logged(trainer, "process/weight")
    assert weights == [0.0, *expected[:-1]] and 0 < weights[-1] < 1
    assert given == [weight for weight in weights if weight]
    assert [advantages.dim() for advantages in windows.advantages] == [1 + (weight > 0) for weight in weights]
    assert logged(trainer, "process/concordance")[-1] > 0.8 > 0.5 < logged(trainer, "process/concordance_low")[-1]


def test_figures_of_the_worth_are_logged(tiny_model, tmp_path):
    trainer, _ = train(tiny_model, tmp_path, callback(Knows()), **SILENT)
    log = [line for line in trainer.state.log_history if "process/valued_rows" in line][-1]
    shares = [f"process/concordance{which}" for which in ("", "_first_third", "_second_third", "_last_third")]
    assert [log[name] for name in shares] == [1.0] * 4
    assert log["process/brier"] == log["process/calibration_error"] == 0.0 < 0.25 < log["process/brier_siblings"]
    assert 0.2 < log["process/concordance_position"] < 0.8 and "process/weight" not in log


@pytest.mark.parametrize("space", ["log", "reward"])
def test_what_is_no_probability_has_no_brier_score(tiny_model, tmp_path, space):
    class Double(ScriptedReward):
        def __call__(self, **kwargs):
            return [5 * one - 2 for one in super().__call__(**kwargs)]

    value = Knows(Double(constant=0.0))
    value.space = space
    trainer, _ = train(tiny_model, tmp_path, callback(value, settings=AUTO), **{**SILENT, "reward": value.reward})
    assert logged(trainer, "process/concordance")[-1] == 1.0 and not logged(trainer, "process/brier")
    train(tiny_model, tmp_path, process := callback(value, settings=AUTO), **{**SILENT, "reward": value.reward})
    assert process._watch.weight() > 0.99


def test_solved_groups_are_watched_where_they_teach_anyway(tiny_model, tmp_path):
    """Else errors would be those of rollouts that were chosen by their outcome."""

    def half(completion_ids, **kwargs):
        return [1.0] * 8 + [0.0, 1.0] * 4

    process = callback()
    train(tiny_model, tmp_path, process, reward=half)
    rows = [window["rollouts"].tolist() for window in process.state_dict()["worth"]["windows"]]
    assert not any(rows[0]) and min(rows[1]) > 0
    train(tiny_model, tmp_path, process := callback(Knows()), reward=half)
    rows = [window["rollouts"].tolist() for window in process.state_dict()["worth"]["windows"]]
    assert not any(rows[0][:2]) and min(rows[0][2:]) > 0


def test_constant_outcomes_give_no_evidence(tiny_model, tmp_path):
    process = callback(Chance(), settings=AUTO)
    trainer, windows = train(tiny_model, tmp_path, process, **{**SILENT, "reward": lambda prompts, **_: [0.0] * 16})
    assert logged(trainer, "process/weight") == [0.0] * 3 and not logged(trainer, "process/concordance")
    assert all(advantages.dim() == 1 and not advantages.any() for advantages in windows.advantages)


@pytest.mark.parametrize("sampler", [True, False], ids=["the sampler's log-probs", "a pass"])
def test_the_entropy_is_watched(tiny_model, tmp_path, sampler):
    process = callback()
    trainer, _ = train(tiny_model, tmp_path, process, logprobs=sampler, max_steps=5)
    mine, trls = logged(trainer, "process/entropy"), logged(trainer, "entropy")
    assert len(trls) == 5 and len(mine) == (0 if sampler else 5)
    # The first window has no V; TRL's entropy of a window is known when it has been trained on.
    assert process._diagnostics.entropies == pytest.approx(trls[:3] if sampler else mine[1:4])
    process = callback(Knows())
    train(tiny_model, tmp_path, process, max_steps=5)
    assert process._diagnostics.entropies == [], "a value that is not made of the policy's confidence"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            dict(process_weight="Auto"),
            "process_weight='Auto' cannot weigh .* process_weight='auto' weighs it by what V",
        ),
        (dict(outcome_weight="auto"), "outcome_weight='auto' cannot weigh"),
        (dict(process_weight="auto", outcome_weight=0.5), "outcome_weight=0.5 beside process_weight='auto'"),
    ],
)
def test_mistakes_of_weights(settings, said):
    with pytest.raises(ValueError, match=said):
        CreditSettings(**settings)


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_estimators_without_a_weight_refuse_auto(estimator):
    with pytest.raises(ValueError, match=f"process_weight='auto' does nothing with estimator='{estimator}'"):
        ProcessRewardCallback(small(), estimator=estimator, settings=AUTO)


@pytest.mark.parametrize("name", ["centered_return", "rloo", "prime_rloo"])
def test_auto_is_no_number_outside_of_a_run(name):
    from tests.test_credit import as_rewards, make_rows

    with pytest.raises(ValueError, match=r"another number in each window.* dataclasses.replace\(settings"):
        ESTIMATORS[name](as_rewards(make_rows(0, 4), 4), AUTO)


@pytest.mark.parametrize("shapes", [{}, {"steps_per_generation": 8}], ids=["between windows", "within one"])
def test_a_resumed_run_with_auto_is_the_uninterrupted_one(tiny_model, tmp_path, shapes):
    settings = {**RESUMED, **shapes, "reward": ScriptedReward(constant=0.0), "max_steps": 8, "save_steps": 5}
    one, other = (callback(Knows(noise=0.3), settings=AUTO) for _ in range(2))
    whole, _ = train(tiny_model, tmp_path, one, rollouts=Seeded(), **settings)
    checkpoint = str(tmp_path / "checkpoint-5")
    again, _ = train(tiny_model, tmp_path / "again", other, rollouts=Seeded(), resume=checkpoint, **settings)
    weights = logged(whole, "process/weight")
    assert 0 < weights[-1] < 1 and logged(again, "process/weight") == weights
    assert logged(again, "process/concordance") == logged(whole, "process/concordance")
    for (name, value), found in zip(parameters(whole.model).items(), parameters(again.model).values(), strict=True):
        assert torch.equal(value, found), name


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


def test_a_value_that_finds_another_one_s_state_only_says_so(caplog):
    callback().load_state_dict(ProcessRewardCallback(AnswerLogProbValue()).state_dict())
    assert "holds nothing that OutcomeValue has learned" in caplog.text


def test_states_of_earlier_versions_and_of_other_values():
    process = callback()
    process._watch.add(evidence(CERTAIN))
    process._diagnostics.entropies.append(1.5)
    state, of_value = process.state_dict(), process.value.state_dict()
    assert state.keys() == {"worth", "OutcomeValue"}
    again, before, other = callback(), callback(), callback(Knows(), settings=AUTO)
    again.load_state_dict(state)
    assert again._watch.weight() > 0.99 and again._diagnostics.entropies == [1.5]
    before.load_state_dict({"OutcomeValue": of_value})
    other.load_state_dict(state)
    assert before._watch.weight() == other._watch.weight() == 0.0 == len(other._diagnostics.entropies)


def test_a_window_that_comes_in_parts_has_one_weight(tiny_model, tmp_path):
    from dash_trl import RewardAgent

    class Score:
        __name__ = "score"

        def compute_score(self, prompt, completion_ids):
            return ScriptedReward(constant=0.0)(prompts=[prompt], completion_ids=[completion_ids])[0]

    found = []
    for pipe in (False, True):
        process = callback(Knows(noise=0.3), settings=AUTO)
        settings = {"reward": RewardAgent(Score()), "reward_pipeline": pipe, "learning_rate": 0.0, "max_steps": 5}
        trainer, _ = train(tiny_model, tmp_path, process, **settings)
        found.append((logged(trainer, "process/weight"), process.state_dict()["worth"]["windows"]))
    (weights, windows), (piped, parts) = found
    assert weights == piped and weights[-1] > 0
    for one, other in zip(windows, parts, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
