"""What V is worth: evidence and intervals by loops, `process_weight="auto"` in real runs."""

import math
import random
from itertools import permutations
from statistics import fmean

import pytest
import torch
from transformers import TrainerCallback

from dash_trl import DASHTrainer
from dash_trl.process_rewards import ESTIMATORS, CreditSettings
from tests.test_outcome_value import callback, logged, train
from tests.tiny import ScriptedReward, parameters, run, said

AUTO = CreditSettings(process_weight="auto")
KNOWN = {"reward": ScriptedReward(constant=0.0), "learning_rate": 0.0}


class Knows:
    """A value estimator that uses the reward of the whole completion: V is this reward, and 0.5 at b_0."""

    space = "probability"
    needs_answers = False

    def __init__(self, noise=0.0):
        self.reward, self.noise = ScriptedReward(constant=0.0), noise

    def __call__(self, requests, trainer):
        return [self.values(request) for request in requests]

    def values(self, request):
        (reward,) = self.reward(prompts=[request.example["prompt"]], completion_ids=[list(request.completion_ids)])
        draw = random.Random(f"{request.completion_ids}")
        return [reward + self.noise * draw.gauss(0, 1) if boundary else 0.5 for boundary in request.boundaries]


class Guesses(Knows):
    """It knows something; now and then, it says nothing."""

    def values(self, request):
        draw = random.Random(f"missing {request.completion_ids}")
        return [math.nan if at and draw.random() < 0.05 else one for at, one in enumerate(super().values(request))]


class Chance(Knows):
    needs_log_probs = True

    def values(self, request):
        draw = random.Random(f"{request.completion_ids}")
        return [draw.random() for _ in request.boundaries]


def by_hand(group):
    """(won, pairs) and (ΣΔV², ΣΔVΔy) of a group: [(values, outcome)]; only inner boundaries count."""
    used = [([v for v in values[1:-1] if not math.isnan(v)], y) for values, y in group]
    used = [(inner, y) for inner, y in used if inner]
    pairs = [(fmean(one[0]), fmean(other[0])) for one, other in permutations(used, 2) if one[1] > other[1]]
    if not pairs:
        return None
    v_mean, y_mean = fmean(fmean(inner) for inner, _ in used), fmean(y for _, y in used)
    vv, vy = (
        sum(fmean((v - v_mean) * factor(v, y) for v in inner) for inner, y in used)
        for factor in (lambda v, y: v - v_mean, lambda v, y: y - y_mean)
    )
    return (sum((v > w) + (v == w) / 2 for v, w in pairs), len(pairs)), (vv, vy)


def low(sums, figure):
    """The lower end of the 95 % interval of a figure of sums over groups, by the jackknife and Student's t."""
    count = len(sums)
    without = [figure(*map(sum, zip(*sums[:i], *sums[i + 1 :], strict=True))) for i in range(count)]
    error = math.sqrt((count - 1) / count * sum((one - fmean(without)) ** 2 for one in without))
    x = torch.linspace(0, 60, 600_001, dtype=torch.double)
    area = torch.cumulative_trapezoid((1 + x**2 / (count - 1)) ** (-count / 2), x)
    return figure(*map(sum, zip(*sums, strict=True))) - float(x[int((area < 0.95 * area[-1]).sum())]) * error


@pytest.fixture(scope="module")
def weighed(tiny_model, tmp_path_factory):
    """A run whose V knows something: callback, trainer, windows, the weights that the estimator got."""
    given = []

    def asked(rewards, settings):
        given.append((settings.outcome_weight, settings.process_weight))
        return ESTIMATORS["centered_return"](rewards, settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ESTIMATORS, "asked", asked)
        process = callback(Guesses(noise=0.6), estimator="asked", settings=AUTO)
        folder = tmp_path_factory.mktemp("weighed")
        trained = train(tiny_model, folder, process, **KNOWN, max_steps=12, rollout_seed=1)
    return process, *trained, given


def test_the_figures_and_the_weight_are_their_definitions_over_the_last_8_windows(weighed):
    _, trainer, windows, given = weighed
    evidence, lows, weights = [], [], [0.0]
    for values, rollouts in zip(windows.values, windows.rollouts, strict=True):
        rows = list(zip(values, rollouts.rewards[:, 0].tolist(), strict=True))
        evidence = [*evidence, [by_hand(rows[i : i + 4]) for i in range(0, 16, 4)]][-8:]
        won_of_pairs, products = zip(*[group for window in evidence for group in window if group], strict=True)
        share = sum(won for won, _ in won_of_pairs) / sum(pairs for _, pairs in won_of_pairs)
        assert logged(trainer, "process/concordance")[len(weights) - 1] == pytest.approx(share)
        weights.append(0.0)
        if len(won_of_pairs) >= 8:
            odds = low(won_of_pairs, lambda won, pairs: math.log((won + 0.5) / (pairs - won + 0.5)))
            lows.append(1 / (1 + math.exp(-odds)))
            weight = low(products, lambda vv, vy: vy / vv)
            weights[-1] = min(weight, 1.0) if weight >= 0.02 else 0.0
    assert logged(trainer, "process/concordance_low") == pytest.approx(lows, abs=2e-3)
    found = logged(trainer, "process/weight")
    assert found == pytest.approx(weights[:-1], abs=5e-3) and found[0] == 0 < found[-1] < 1
    assert given == [(1 - weight, weight) for weight in found if weight], "of the windows before"


def test_a_run_goes_on_with_the_worth_of_its_value_and_of_no_other(weighed, tiny_model, tmp_path):
    state, weights = weighed[0].state_dict(), []
    for value, loaded in ((Guesses(noise=0.6), state), (Guesses(), {}), (Knows(), state)):
        process = callback(value, settings=AUTO)
        process.load_state_dict(loaded)
        trainer, _ = train(tiny_model, tmp_path, process, **KNOWN, max_steps=1)
        weights += logged(trainer, "process/weight")
    assert weights[0] > 0 == weights[1] == weights[2]


def test_a_v_that_is_worth_nothing_leaves_the_run_as_it_is_to_the_bit(tiny_model, tmp_path, caplog):
    """Also with an estimator that changes the advantages where U is 0."""
    settings = {**KNOWN, "max_steps": 3, "learning_rate": 0.1}
    plain = run(DASHTrainer, tiny_model, tmp_path, **settings)
    process = callback(Chance(), settings=AUTO, estimator="prime_rloo")
    trainer, windows = train(tiny_model, tmp_path, process, **settings)
    assert logged(trainer, "process/weight") == [0.0] * 3 and min(logged(trainer, "process/valued_rows")[1:]) > 0.5
    for name in ("filter/kept_rows", "filter/dropped_constant", "loss", "grad_norm"):
        assert logged(trainer, name) == logged(plain, name)
    expected, found = parameters(plain.model), parameters(trainer.model)
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    assert all(rollouts.advantages.dim() == 1 for rollouts in windows.rollouts)
    assert "loses the structure" not in caplog.text and "almost no effect" not in caplog.text


def test_a_v_that_orders_by_chance_and_a_policy_that_has_stopped_to_try_are_warned_of(tiny_model, tmp_path, caplog):
    class Sure(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            if state.global_step == 5:
                model.lm_head.weight.data *= 100

    train(tiny_model, tmp_path, callback(Chance()), **KNOWN, max_steps=12, callbacks=[Sure()])
    assert said(caplog).count("no better than chance") == said(caplog).count("entropy per token has fallen to") == 1
