"""`OutcomeValue`: what it learns, no leak of a window's outcomes or of later tokens; in real and in resumed runs."""

import math
import random
import re
from dataclasses import replace
from itertools import combinations_with_replacement, pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM

from dash_trl import DASHCallback, DASHTrainer, ProcessRewardCallback
from dash_trl.process_rewards import CreditSettings, MonteCarloValue, OutcomeValue, ValueRequest
from examples.value_quality.candidates import stage
from tests.test_tensor_arguments import refusal
from tests.tiny import ScriptedReward, ScriptedRollouts, parameters, prompts, run

# -------------------------------------------------------------------------------------------------------- the estimator

STAGE = stage(None, None)


def rollouts(seed: int, count: int = 24, entropies: bool = True, wrong: float = 0.5):
    """Returns (requests, outcomes); a failing rollout has an unlikely token in its second episode."""
    generator = random.Random(seed)
    requests, outcomes = [], []
    for row in range(count):
        outcomes.append(float(generator.random() >= wrong))
        likely = [-generator.random() / 10 for _ in range(9)]
        if not outcomes[-1]:
            likely[generator.randrange(3, 6)] = -4.0 - generator.random()
        completion = tuple(generator.randrange(4, 260) for _ in likely)
        disorder = tuple(generator.random() for _ in likely) if entropies else None
        requests.append(
            ValueRequest((row // 4, seed), completion, (0, 3, 6, 9), log_probs=tuple(likely), entropies=disorder)
        )
    return requests, outcomes


def taught(*windows, **settings) -> OutcomeValue:
    value = OutcomeValue(**{"min_rollouts": 4, "min_problems": 2, **settings})
    for requests, outcomes in windows:
        value(requests, STAGE)
        value.learn(requests, outcomes, STAGE)
    return value


def features(request: ValueRequest) -> list[list[float]]:
    rows = []
    for start, end in pairwise(request.boundaries):
        before, own = request.log_probs[:end], request.log_probs[start:end]
        rows.append([sum(before), min(before), sum(own), min(own), end])
        if request.entropies:
            rows[-1] += [sum(request.entropies[:end]), max(request.entropies[:end])]
    return rows


@pytest.mark.parametrize(("space", "entropies", "ridge"), [("probability", True, 1.0), ("reward", False, 2.0)])
def test_a_fit_is_the_minimum_of_its_objective(space, entropies, ridge):
    """Which is convex: its gradient is 0 there. The coefficients follow from the values."""
    requests, outcomes = rollouts(0, count=80, entropies=entropies)
    value = taught((requests, outcomes), space=space, ridge=ridge)
    found = value(requests, STAGE)
    assert {row[0] for row in found} == {sum(outcomes) / 80}
    x = torch.tensor(sum(map(features, requests), []), dtype=torch.double)
    x = (x - x.mean(dim=0)) / x.std(dim=0, correction=0)
    products = [x[:, a] * x[:, b] for a, b in combinations_with_replacement(range(x.shape[1]), 2)]
    columns = torch.stack([torch.ones(len(x)).double(), *x.T, *products], dim=1)
    v = torch.tensor([one for row in found for one in row[1:]], dtype=torch.double)
    y = torch.tensor(outcomes).double().repeat_interleave(3)
    scores = v.logit() if space == "probability" else v
    weights = torch.linalg.pinv(columns) @ scores
    assert columns @ weights == pytest.approx(scores, abs=1e-6)
    gradient = columns.T @ (v - y) / 3 + ridge * weights * (torch.arange(len(weights)) > 0)
    assert gradient.abs().max() < 1e-6
    tiny, tinier = (replace(requests[0], log_probs=(-surprise,) * 9) for surprise in (1e6, 1e9))
    assert value([tiny], STAGE) == value([tinier], STAGE), "nothing is guessed beyond what was seen"


def test_later_tokens_other_rows_a_tool_and_a_window_s_own_outcomes_leave_a_value_bitwise():
    value, (requests, outcomes) = taught(rollouts(0), rollouts(1)), rollouts(2)
    together = value(requests, STAGE)
    assert [value([request], STAGE)[0] for request in requests] == together
    request, before = requests[0], together[0]
    for at in (3, 6, 8):
        changed = replace(request, log_probs=(*request.log_probs[:at], *(-7.0 for _ in request.log_probs[at:])))
        found, known = value([changed], STAGE)[0], sum(boundary <= at for boundary in request.boundaries)
        assert found[:known] == before[:known] and found[known:] != before[known:]

    def spread(numbers: tuple) -> tuple:
        return tuple(one for number in numbers for one in (number, 0, 0, 0))

    spaced = {name: spread(getattr(request, name)) for name in ("completion_ids", "log_probs", "entropies")}
    spaced |= {"own": spread((1,) * 9), "boundaries": tuple(4 * boundary for boundary in request.boundaries)}
    assert value([replace(request, **spaced)], STAGE)[0] == before
    unknown = replace(request, log_probs=(*request.log_probs[:4], math.nan, *request.log_probs[5:]))
    assert [math.isnan(one) for one in value([unknown], STAGE)[0]] == [False, False, True, True]
    value.learn(requests, outcomes, STAGE)
    assert value(requests, STAGE) != together


def test_values_are_missing_until_there_is_enough_of_both_kinds(caplog):
    for settings, windows, ready in [
        ({}, [rollouts(0)], True),
        ({"min_rollouts": 13}, [rollouts(0)], False),
        ({"min_rollouts": 13}, [rollouts(0), rollouts(1)], True),
        ({"min_rollouts": 13, "num_windows": 1}, [rollouts(0), rollouts(1)], False),
        ({"min_problems": 7}, [rollouts(0), rollouts(0)], False),  # the same problems again
        ({"min_problems": 7}, [rollouts(0), rollouts(1)], True),
        ({"num_windows": 3}, [rollouts(seed, wrong=0.0) for seed in range(7)], False),
        ({}, [([], [])], False),
    ]:
        value = taught(*windows, **settings)
        values = [one for row in value(rollouts(2)[0], STAGE) for one in row]
        assert value.ready == ready and all(math.isnan(one) != ready for one in values), (settings, ready)
    said = "of the 72 rollouts of the last 3 generation windows, 0 rollouts from 0 problems have a reward above"
    assert caplog.text.count(said) == 1


def test_what_cannot_be_fitted_is_refused():
    requests, outcomes = rollouts(0)
    tripled = (requests, [3 * one for one in outcomes])
    said = r"weighted reward 3, which is not a probability. Pass OutcomeValue\(space='reward'"
    assert re.search(said, refusal(taught, tripled))
    rewards, without = taught(tripled, space="reward"), taught(rollouts(0, entropies=False))
    assert re.search(said, refusal(OutcomeValue().load_state_dict, rewards.state_dict()))
    other = taught()
    other.load_state_dict(without.state_dict())
    for call, given in ((other, (requests, STAGE)), (other.learn, (requests, outcomes, STAGE))):
        assert "rollouts with 5 features per prefix, and others with 7" in refusal(call, *given)
    rounded = taught((requests, [one * 1.0000001 for one in outcomes]))  # sums of rewards are float32
    assert rounded.state_dict()["windows"][0]["outcome"].unique().tolist() == [0.0, 1.0]


def test_a_value_that_learns_is_anchored_and_pays_what_it_is_worth(caplog):
    auto, half = CreditSettings(process_weight="auto"), CreditSettings(process_weight=0.5)
    for value, arguments, anchored, weight, warning in [
        (OutcomeValue(), {}, True, "auto", ""),
        (OutcomeValue(), {"anchored": False, "settings": half}, False, 0.5, "anchored=False with OutcomeValue"),
        (OutcomeValue(), {"estimator": "episode"}, True, "auto", "an episode is paid for the change of V alone"),
        (OutcomeValue(), {"estimator": "grpo"}, False, 1.0, ""),
        (OutcomeValue(), {"estimator": "gae"}, False, 1.0, "uses OutcomeValue as its critic"),
        (MonteCarloValue(2), {"settings": auto}, True, "auto", ""),
        (MonteCarloValue(2), {}, False, 1.0, ""),
    ]:
        caplog.clear()
        process = ProcessRewardCallback(value, **arguments)
        assert (process.anchored, process.settings.process_weight) == (anchored, weight), arguments
        assert len(caplog.records) == bool(warning) and warning in caplog.text, arguments


# -------------------------------------------------------------------------------------------------------------- in runs


class Windows(DASHCallback):
    """Callback after the process rewards that keeps each window's values and rollouts."""

    per_group = True

    def __init__(self, process: ProcessRewardCallback):
        self.process, self.values, self.rollouts = process, [], []

    def on_advantages(self, args, state, control, rollouts, **kwargs):
        self.values.append([values for _, values in self.process.last])
        self.rollouts.append(rollouts)


def callback(value=None, **settings) -> ProcessRewardCallback:
    episodes = {"markers": lambda text: range(0, len(text), 3), "min_episode_tokens": 2, "max_episode_tokens": 8}
    value = OutcomeValue(min_rollouts=4, min_problems=2) if value is None else value
    return ProcessRewardCallback(value, **{"settings": CreditSettings(), **episodes, **settings})


def train(model, output, process, **settings):
    settings = {"reward": ScriptedReward(constant=0.2), "max_steps": 3, "learning_rate": 0.1, **settings}
    windows = Windows(process)
    settings["callbacks"] = [process, windows, *settings.get("callbacks", [])]
    return run(DASHTrainer, model, output, **settings), windows


def logged(trainer, name):
    return [line[name] for line in trainer.state.log_history if name in line]


class Recording(OutcomeValue):
    def __init__(self):
        super().__init__(min_rollouts=4, min_problems=2)
        self.calls, self.lessons = [], []

    def __call__(self, requests, trainer):
        self.calls.append("valued")
        return super().__call__(requests, trainer)

    def learn(self, requests, outcomes, trainer):
        self.calls.append("taught")
        self.lessons += requests
        super().learn(requests, outcomes, trainer)


class EveryOther(ScriptedRollouts):
    """Rollouts in which every other token is a tool's."""

    def __call__(self, prompts, trainer):
        sampled = super().__call__(prompts, trainer)
        return {**sampled, "env_mask": [[(i + 1) % 2 for i in range(len(ids))] for ids in sampled["completion_ids"]]}


def test_it_trains_without_answers_and_on_what_the_policy_wrote(tiny_model, tmp_path, caplog):
    """A window is valued before V learns its outcomes. Solved groups teach and are not paid for, unscored rows do not.

    What the first window's rows say is what the model does, row by row, before its first step.
    """

    def reward(completion_ids, **kwargs):
        return [1.0] * 8 + [math.nan, 1.0, 0.0, 1.0] + [0.0, 1.0] * 2

    process, dataset = callback(Recording()), prompts(64).remove_columns("answer")
    trainer, windows = train(tiny_model, tmp_path, process, dataset=dataset, rollouts=EveryOther(), reward=reward)
    assert process.value.calls == ["valued", "taught"] * 3
    assert [share > 0 for share in logged(trainer, "process/valued_rows")] == [False, False, True]  # too few failed
    assert logged(trainer, "process/learned_rollouts") == [15.0, 30.0, 45.0]
    assert logged(trainer, "process/unknown_prefixes") == [0.0] * 3 and "No row has a value" not in caplog.text
    outcomes = [window["outcome"].sum() for window in process.value.state_dict()["windows"]]
    assert outcomes == [12.0] * 3 and len(logged(trainer, "process/entropy")) == 3
    assert [len(one) for one in windows.values[-1][:9]] == [1] * 9 and max(map(len, windows.values[-1][9:])) > 2
    outcome = windows.rollouts[0].advantages
    assert torch.equal(outcome, outcome[:, :1] * windows.rollouts[0].loss_mask), "by outcome alone, the first"
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    for request in process.value.lessons[:15]:
        with torch.no_grad():
            logits = model(torch.tensor([request.prompt_ids + request.completion_ids])).logits[0]
        policy = torch.distributions.Categorical(logits=logits[len(request.prompt_ids) - 1 : -1])
        own = torch.tensor(request.own)
        expected = policy.log_prob(torch.tensor(request.completion_ids)) * own
        assert request.log_probs == pytest.approx(expected.tolist(), abs=1e-5)
        assert request.entropies == pytest.approx((policy.entropy() * own).tolist(), abs=1e-5)


# --------------------------------------------------------------------------------------------------------- resumed runs


class Seeded(ScriptedRollouts):
    """Completions that depend on torch's random state, which a checkpoint holds."""

    def __call__(self, prompts, trainer):
        self.random = random.Random(int(torch.randint(2**30, ())))
        return super().__call__(prompts, trainer)


def test_a_resumed_run_is_the_uninterrupted_one(tiny_model, tmp_path):
    """From within a window: what V has learned is in the checkpoint."""
    settings = {"optimizer": "adamw_torch", "steps_per_generation": 8, "reward": ScriptedReward(constant=0.0)}
    settings |= {"max_steps": 9, "save_steps": 7, "save_strategy": "steps", "rollouts": Seeded(noise=0.1)}
    whole, _ = train(tiny_model, tmp_path, callback(), **settings)
    settings |= {"resume": str(tmp_path / "checkpoint-7"), "save_strategy": "no"}
    again, windows = train(tiny_model, tmp_path / "again", callback(), **settings)
    assert not any(math.isnan(values[0]) for values in windows.values[0] if len(values) > 1)
    for (name, value), found in zip(parameters(whole.model).items(), parameters(again.model).values(), strict=True):
        assert torch.equal(value, found), name
