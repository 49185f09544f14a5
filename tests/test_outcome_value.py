"""`OutcomeValue`: what it learns, no leak of a window's outcomes or of later tokens; in real and in resumed runs."""

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, TrainerCallback

from dash_trl import DASHCallback, DASHTrainer, ProcessRewardCallback
from dash_trl.distributed import Ranks
from dash_trl.process_rewards import CreditSettings, MonteCarloValue, OutcomeValue, ValueRequest
from tests.test_resume import WIDER
from tests.tiny import ON_GPU, ScriptedReward, ScriptedRollouts, parameters, prompts, run

# -------------------------------------------------------------------------------------------------------- the estimator


def stage() -> SimpleNamespace:
    """Returns a stand-in with the attributes of a trainer that `OutcomeValue` uses."""
    logged = []
    recorder = SimpleNamespace(log=logged.append)
    return SimpleNamespace(ranks=Ranks(Accelerator(cpu=not ON_GPU)), logged=logged, recorder=recorder)


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


def small(**settings) -> OutcomeValue:
    return OutcomeValue(**{"min_rollouts": 4, "min_problems": 2, **settings})


def taught(*windows, **settings) -> tuple[OutcomeValue, SimpleNamespace]:
    value, trainer = small(**settings), stage()
    for requests, outcomes in windows:
        value(requests, trainer)
        value.learn(requests, outcomes, trainer)
    return value, trainer


def test_it_learns_what_ends_badly():
    value, trainer = taught(rollouts(0), rollouts(1))
    requests, outcomes = rollouts(2)
    values = value(requests, trainer)
    ends = sorted((row[-1], outcome) for row, outcome in zip(values, outcomes, strict=True))
    assert [outcome for _, outcome in ends] == sorted(outcomes) and ends[0][0] < 0.1 < 0.9 < ends[-1][0]
    base = sum(rollouts(0)[1] + rollouts(1)[1]) / 48
    assert all(row[0] == pytest.approx(base, abs=1e-12) for row in values)
    assert all(0 < v < 1 for row in values for v in row)


def test_later_tokens_and_other_rows_leave_a_value_bitwise():
    value, trainer = taught(rollouts(0), rollouts(1))
    requests, _ = rollouts(2)
    together = value(requests, trainer)
    assert [value([request], trainer)[0] for request in requests] == together
    request, before = requests[0], together[0]
    for at in (3, 6, 8):
        changed = replace(
            request,
            completion_ids=(*request.completion_ids[:at], *(9 for _ in request.completion_ids[at:])),
            log_probs=(*request.log_probs[:at], *(-7.0 for _ in request.log_probs[at:])),
            entropies=(*request.entropies[:at], *(3.0 for _ in request.entropies[at:])),
        )
        found = value([changed], trainer)[0]
        known = sum(boundary <= at for boundary in request.boundaries)
        assert found[:known] == before[:known] and found[known:] != before[known:]


def test_a_tool_s_tokens_leave_a_value_as_it_is():
    """Three of them behind each token of the policy."""
    value, trainer = taught(rollouts(0))
    alone, _ = rollouts(2)

    def among_others(numbers: tuple) -> tuple:
        return tuple(one for number in numbers for one in (number, 0, 0, 0))

    with_tools = [
        replace(
            one,
            completion_ids=among_others(one.completion_ids),
            boundaries=tuple(4 * boundary for boundary in one.boundaries),
            log_probs=among_others(one.log_probs),
            entropies=among_others(one.entropies),
            own=among_others((1,) * len(one.completion_ids)),
        )
        for one in alone
    ]
    assert value(with_tools, trainer) == value(alone, trainer)


def test_a_window_is_valued_without_its_outcomes():
    (first, outcomes), (second, others) = rollouts(0), rollouts(1)
    value, trainer = taught((first, outcomes))
    flipped, _ = taught((first, outcomes))
    assert value(second, trainer) == flipped(second, trainer)
    value.learn(second, others, trainer)
    flipped.learn(second, [1 - one for one in others], trainer)
    assert value(second, trainer) != flipped(second, trainer)


@pytest.mark.parametrize(
    ("settings", "windows", "ready"),
    [
        ({}, [rollouts(0)], True),
        ({"min_rollouts": 13}, [rollouts(0)], False),
        ({"min_rollouts": 13}, [rollouts(0), rollouts(1)], True),
        ({"min_rollouts": 13, "num_windows": 1}, [rollouts(0), rollouts(1)], False),
        ({"min_problems": 7}, [rollouts(0)], False),
        ({"min_problems": 7}, [rollouts(0), rollouts(0)], False),  # the same problems again
        ({"min_problems": 7}, [rollouts(0), rollouts(1)], True),
        ({}, [rollouts(0, wrong=0.0)], False),
        ({}, [rollouts(0, wrong=1.0)], False),
        ({}, [([], [])], False),
    ],
)
def test_values_are_missing_until_there_is_enough_of_both_kinds(settings, windows, ready):
    value, trainer = taught(*windows, **settings)
    values = [one for row in value(rollouts(2)[0], trainer) for one in row]
    assert value.ready == ready and all(math.isnan(one) != ready for one in values)


def test_without_both_kinds_it_is_said_once(caplog):
    taught(*[rollouts(seed, wrong=0.0) for seed in range(7)], num_windows=3)
    assert caplog.text.count("cannot tell good prefixes from bad ones yet") == 1
    assert (
        "of the 72 rollouts of the last 3 generation windows, 0 rollouts from 0 problems have a reward above"
        in caplog.text
    )


def test_unknown_prefixes_are_missing_and_counted_and_a_row_that_is_not_asked_for_has_no_values():
    requests, outcomes = rollouts(1)
    requests[0] = replace(requests[0], log_probs=(math.nan, *requests[0].log_probs[1:]))
    value, trainer = taught(rollouts(0))
    not_asked, *values = value([ValueRequest((1,), (2,), (), log_probs=(0.0,)), *requests], trainer)
    assert not_asked == []
    assert [math.isnan(one) for one in values[0]] == [False, True, True, True]
    assert not any(math.isnan(one) for row in values[1:] for one in row)
    value.learn(requests, outcomes, trainer)
    assert trainer.logged[-1] == {"process/learned_rollouts": 48.0, "process/unknown_prefixes": 3 / 72}
    assert not any(math.isnan(one) for row in value(rollouts(2)[0], trainer) for one in row)


@pytest.mark.parametrize("reward", [1.5, -0.2, 3.0])
def test_rewards_that_are_no_probabilities(reward):
    requests, outcomes = rollouts(0)
    outcomes[5] = reward
    said = rf"weighted reward {reward:g}, which is not a probability. Pass OutcomeValue\(space='reward'"
    with pytest.raises(ValueError, match=said):
        taught((requests, outcomes))
    value, trainer = taught((requests, outcomes), rollouts(1), space="reward")
    assert value(rollouts(2)[0], trainer)[0][0] == pytest.approx(sum(outcomes + rollouts(1)[1]) / 48)


def test_float32_sums_of_rewards_are_probabilities():
    requests, outcomes = rollouts(0)
    value, _ = taught((requests, [one * 1.0000001 for one in outcomes]))
    assert value.state_dict()["windows"][0]["outcome"].unique().tolist() == [0.0, 1.0]


def test_a_state_of_other_features_is_refused():
    value, trainer = taught(rollouts(0, entropies=False))
    other = small()
    other.load_state_dict(value.state_dict())
    for call in (lambda: other(rollouts(1)[0], trainer), lambda: other.learn(*rollouts(1), trainer)):
        with pytest.raises(ValueError, match="rollouts with 5 features per prefix, and others with 7"):
            call()


def test_a_state_of_rewards_is_refused_where_probabilities_are_fitted():
    value, _ = taught((rollouts(0)[0], [3.0 * one for one in rollouts(0)[1]]), space="reward")
    with pytest.raises(ValueError, match="weighted reward 3, which is not a probability"):
        small().load_state_dict(value.state_dict())


CRITIC = "estimator='gae' uses OutcomeValue as its critic from the beginning"
EPISODE = ("an episode is paid for the change of V alone",)
AUTO = CreditSettings(process_weight="auto")
FREE = ("anchored=False with OutcomeValue, which learns during the run",)
FREELY = {"anchored": False, "settings": CreditSettings(process_weight=0.5)}


@pytest.mark.parametrize(
    ("value", "arguments", "anchored", "weight", "warned"),
    [
        (OutcomeValue(), {}, True, "auto", ()),
        (OutcomeValue(), FREELY, False, 0.5, FREE),
        (OutcomeValue(), {"settings": CreditSettings(process_weight=1)}, True, 1, ()),
        (OutcomeValue(), {"estimator": "episode"}, True, "auto", EPISODE),
        (MonteCarloValue(2), {"estimator": "episode", "settings": AUTO}, True, "auto", EPISODE),
        (MonteCarloValue(2), {"settings": AUTO}, True, "auto", ()),
        (OutcomeValue(), {"estimator": "grpo"}, False, 1.0, ()),
        (OutcomeValue(), {"estimator": "gae"}, False, 1.0, (CRITIC,)),
        (MonteCarloValue(2), {}, False, 1.0, ()),
    ],
)
def test_a_value_that_learns_is_anchored_and_pays_what_it_is_worth(value, arguments, anchored, weight, warned, caplog):
    process = ProcessRewardCallback(value, **arguments)
    assert (process.anchored, process.settings.process_weight) == (anchored, weight)
    assert len(caplog.records) == len(warned) and all(one in caplog.text for one in warned)


# -------------------------------------------------------------------------------------------------------------- in runs


class Windows(DASHCallback):
    """Callback after the process rewards that records each window's values, advantages, rollouts and weight of V."""

    per_group = True

    def __init__(self, process: ProcessRewardCallback):
        self.process, self.values, self.advantages, self.rollouts, self.weights = process, [], [], [], []

    def on_advantages(self, args, state, control, rollouts, **kwargs):
        self.values.append([values for _, values in self.process.last])
        self.advantages.append(rollouts.advantages.clone())
        self.rollouts.append(rollouts)
        self.weights.append(self.process._watch.weight())


def callback(value=None, **settings) -> ProcessRewardCallback:
    episodes = {"markers": lambda text: range(0, len(text), 3), "min_episode_tokens": 2, "max_episode_tokens": 8}
    settings = {"settings": CreditSettings(), **episodes, **settings}
    return ProcessRewardCallback(small() if value is None else value, **settings)


def train(model, output, process, **settings):
    settings = {"reward": ScriptedReward(constant=0.2), "max_steps": 3, "learning_rate": 0.1, **settings}
    windows = Windows(process)
    settings["callbacks"] = [process, windows, *settings.get("callbacks", [])]
    return run(DASHTrainer, model, output, **settings), windows


def logged(trainer, name):
    return [line[name] for line in trainer.state.log_history if name in line]


# Number of windows in an optimizer step.
ONE_WINDOW_OR_TWO = pytest.mark.parametrize(
    "shapes", [pytest.param({}, marks=pytest.mark.exhaustive), {"steps_per_generation": 2}], ids=["one", "two"]
)


class Knows:
    """A value estimator that uses the reward of the whole completion: V is this reward, and 0.5 at b_0."""

    space = "probability"
    needs_answers = False

    def __init__(self, reward=None, noise=0.0):
        self.reward, self.noise = reward or ScriptedReward(constant=0.0), noise

    def __call__(self, requests, trainer):
        return [self.values(request) for request in requests]

    def values(self, request):
        (reward,) = self.reward(prompts=[request.example["prompt"]], completion_ids=[list(request.completion_ids)])
        draw = random.Random(f"{request.completion_ids}")
        return [reward + self.noise * draw.gauss(0, 1) if boundary else 0.5 for boundary in request.boundaries]


class FittedAndKnown(OutcomeValue):
    """A fitted value that predicts outcomes: the mean of the fitted V and of the V of `Knows`."""

    def __init__(self):
        super().__init__(min_rollouts=4, min_problems=2)
        self.knows, self.calls, self.lessons = Knows(noise=0.6), [], []

    def __call__(self, requests, trainer):
        self.calls.append("valued")
        pairs = zip(super().__call__(requests, trainer), self.knows(requests, trainer), strict=True)
        return [[(one + other) / 2 for one, other in zip(*rows, strict=True)] for rows in pairs]

    def learn(self, requests, outcomes, trainer):
        self.calls.append("taught")
        self.lessons += requests
        super().learn(requests, outcomes, trainer)


class Tools(ScriptedRollouts):
    """Rollouts in which every other token is not the policy's; `own_first`: the first token is the policy's."""

    def __init__(self, own_first: bool = True, **arguments):
        super().__init__(**arguments)
        self.own_first = own_first

    def __call__(self, prompts, trainer):
        sampled = super().__call__(prompts, trainer)
        return {
            **sampled,
            "env_mask": [[(i + self.own_first) % 2 for i in range(len(ids))] for ids in sampled["completion_ids"]],
        }


@pytest.mark.parametrize("sampler", [True, False], ids=["the sampler's log-probs", "a pass"])
def test_it_trains_without_answers_and_on_what_the_policy_wrote(tiny_model, tmp_path, sampler, caplog):
    """A window is valued before V learns its outcomes; its entropy is known by a pass, or by TRL's log."""
    process, dataset = callback(FittedAndKnown()), prompts(64).remove_columns("answer")
    settings = {"dataset": dataset, "rollouts": Tools(noise=0.1 if sampler else None), "max_steps": 5}
    trainer, windows = train(tiny_model, tmp_path, process, **settings)
    assert process.value.calls == ["valued", "taught"] * 5
    logs = [line for line in trainer.state.log_history if "process/valued_rows" in line]
    assert [line["process/valued_rows"] > 0 for line in logs] == [False, True, True, True, True]
    assert [line["process/learned_rollouts"] for line in logs] == [16.0, 32.0, 48.0, 64.0, 80.0]
    assert logs[-1]["process/missing_values"] == logs[-1]["process/unknown_prefixes"] == 0.0
    assert logs[-1]["process/structured_rows"] > 0.5 and logs[-1]["time/values"] > 0
    outcome = windows.advantages[0]
    assert torch.equal(outcome, outcome[:, :1] * windows.rollouts[0].loss_mask), "by outcome alone, the first"
    assert process.value.state_dict()["windows"][0]["features"].shape[1] == (5 if sampler else 7)
    assert "No row has a value" not in caplog.text
    assert len(process.value.lessons) == 80
    for request in process.value.lessons:
        assert len(request.log_probs) == len(request.completion_ids)
        assert not any(request.log_probs[1::2]) and all(one < 0 for one in request.log_probs[::2])
    mine, trls = logged(trainer, "process/entropy"), logged(trainer, "entropy")
    assert len(trls) == 5 and len(mine) == (0 if sampler else 5)
    # The first window has no V; TRL's entropy of a window is known when it has been trained on.
    assert process._diagnostics.entropies == pytest.approx(trls[:3] if sampler else mine[1:4])


def test_solved_groups_teach_and_are_not_paid_for_and_unscored_rows_do_not_teach(tiny_model, tmp_path):
    def reward(completion_ids, **kwargs):
        return [1.0] * 8 + [math.nan, 1.0, 0.0, 1.0] + [0.0, 1.0] * 2

    process = callback(FittedAndKnown())
    _, windows = train(tiny_model, tmp_path, process, reward=reward)
    taught = [window["outcome"] for window in process.value.state_dict()["windows"]]
    assert [len(outcomes) for outcomes in taught] == [15] * 3 and [sum(outcomes) for outcomes in taught] == [12.0] * 3
    assert [len(one) for one in windows.values[-1][:9]] == [1] * 9 and max(map(len, windows.values[-1][9:])) > 2
    # What the first window's rows say is what the model does, row by row, before its first step.
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    for request in process.value.lessons[:15]:
        with torch.no_grad():
            logits = model(torch.tensor([request.prompt_ids + request.completion_ids])).logits[0]
        policy = torch.distributions.Categorical(logits=logits[len(request.prompt_ids) - 1 : -1])
        expected = policy.log_prob(torch.tensor(request.completion_ids))
        assert request.log_probs == pytest.approx(expected.tolist(), abs=1e-5)
        assert request.entropies == pytest.approx(policy.entropy().tolist(), abs=1e-5)


@pytest.mark.parametrize(
    "settings",
    [{"mask_truncated_completions": True}, {"rollouts": Tools(own_first=False, longest=4)}],
    ids=["truncated ones", "nothing is the policy's"],
)
def test_masked_completions_do_not_teach(tiny_model, tmp_path, settings):
    """Their prefixes are unknown: their outcomes would be in V_0, the mean outcome, and in no V behind it."""
    process = callback(FittedAndKnown(), skip_solved=False)
    trainer, windows = train(tiny_model, tmp_path, process, max_steps=2, **settings)
    written = [rollouts.loss_mask.any(dim=1) for rollouts in windows.rollouts]
    outcomes = torch.cat([rollouts.rewards[rows, 0] for rollouts, rows in zip(windows.rollouts, written, strict=True)])
    taught = torch.cat([window["outcome"] for window in process.value.state_dict()["windows"]])
    assert torch.equal(taught.float(), outcomes) and len(taught) < 32
    (base,) = {values[0] for values, row in zip(windows.values[1], written[1], strict=True) if row}
    masked = [values for values, row in zip(windows.values[1], written[1], strict=True) if not row]
    assert base == pytest.approx((float(taught[: int(written[0].sum())].mean()) + 0.5) / 2)  # half is `Knows`'
    assert masked and all(len(one) == 1 and math.isnan(one[0]) for one in masked)


@ONE_WINDOW_OR_TWO
def test_a_window_that_comes_in_parts_teaches_once(tiny_model, tmp_path, shapes):
    from dash_trl import RewardRunner

    class Score:
        __name__ = "score"

        def compute_score(self, prompt, completion_ids):
            return ScriptedReward(constant=0.0)(prompts=[prompt], completion_ids=[completion_ids])[0]

    runs = []
    for pipe in (False, True):
        process = callback(FittedAndKnown(), settings=AUTO)
        settings = {"reward": RewardRunner(Score()), "reward_pipeline": pipe, "learning_rate": 0.0, "max_steps": 5}
        trainer, _ = train(tiny_model, tmp_path, process, **settings, **shapes)
        runs.append((process.state_dict(), logged(trainer, "process/weight")))
    (whole, weights), (parts, piped) = runs
    assert weights == pytest.approx(piped, abs=1e-3) and weights[-1] > 0
    assert len(whole["FittedAndKnown"]["windows"]) == len(parts["FittedAndKnown"]["windows"]) > 1
    for one, other in zip(whole["FittedAndKnown"]["windows"], parts["FittedAndKnown"]["windows"], strict=True):
        assert torch.equal(one["outcome"], other["outcome"]) and torch.equal(one["problem"], other["problem"])
        assert torch.allclose(one["features"], other["features"], atol=1e-4)
    for one, other in zip(whole["worth"]["evidence"], parts["worth"]["evidence"], strict=True):
        assert torch.equal(one["pairs"], other["pairs"]) and torch.allclose(
            one["products"], other["products"], atol=1e-3
        )


# --------------------------------------------------------------------------------------------------------- resumed runs


SAVING = {"save_strategy": "steps", "optimizer": "adamw_torch"}


class Seeded(ScriptedRollouts):
    """Completions that depend on torch's random state, which a checkpoint holds."""

    def __call__(self, prompts, trainer):
        self.random = random.Random(int(torch.randint(2**30, ())))
        return super().__call__(prompts, trainer)


@pytest.mark.parametrize(
    ("shapes", "sampler", "saved"),
    [({}, True, 5), ({"steps_per_generation": 8}, False, 7)],
    ids=["between windows, the sampler's log-probs", "within one, a pass"],
)
def test_a_resumed_run_is_the_uninterrupted_one(tiny_model, tmp_path, shapes, sampler, saved):
    """What V has learned, and what it was worth, are in the checkpoint."""
    settings = {**SAVING, **shapes, "reward": ScriptedReward(constant=0.0), "max_steps": saved + 2, "save_steps": saved}
    one, other = (callback(FittedAndKnown(), settings=AUTO) for _ in range(2))
    whole, _ = train(tiny_model, tmp_path, one, rollouts=Seeded(noise=0.1 if sampler else None), **settings)
    settings |= {"resume": str(tmp_path / f"checkpoint-{saved}"), "save_strategy": "no"}
    again, windows = train(
        tiny_model, tmp_path / "again", other, rollouts=Seeded(noise=0.1 if sampler else None), **settings
    )
    assert not any(math.isnan(values[0]) for values in windows.values[0] if len(values) > 1)
    weights = logged(whole, "process/weight")
    assert 0 < weights[-1] < 1 and logged(again, "process/weight") == weights
    assert logged(again, "process/concordance") == logged(whole, "process/concordance")
    for (name, value), found in zip(parameters(whole.model).items(), parameters(again.model).values(), strict=True):
        assert torch.equal(value, found), name


@ONE_WINDOW_OR_TWO
def test_a_checkpoint_from_within_a_step_has_not_learned_what_is_repeated(tiny_model, tmp_path, shapes):
    trainers = []

    class SaveEarly(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            if state.global_step == 2:
                trainers[-1]._save_checkpoint(trainers[-1].model, trial=None)

    settings = {"max_steps": 4, "rollouts": Seeded(), **shapes}
    process, again = callback(), callback()
    train(tiny_model, tmp_path, process, callbacks=[SaveEarly()], prepare=trainers.append, **settings)
    train(tiny_model, tmp_path / "again", again, resume=str(tmp_path / "checkpoint-2"), **settings)
    whole, resumed = (one.value.state_dict()["windows"] for one in (process, again))
    count = 4 * (1 + len(shapes))
    assert len(whole) == len(resumed) == count
    for one, other in zip(whole[: count // 2], resumed[: count // 2], strict=True):
        assert torch.equal(one["features"], other["features"])


class Stateful(DASHCallback):
    def state_dict(self):
        return {"count": 1}


def test_a_checkpoint_of_other_shapes_and_one_that_lacks_a_state(tiny_model, tmp_path, caplog):
    """What was learned goes on with other shapes, as with another number of ranks; and it is said where it is gone."""
    train(tiny_model, tmp_path, callback(), **SAVING, save_steps=3)
    process, wider = callback(), {**WIDER, "steps_per_generation": 2, "max_steps": 4}
    settings = {"resume": str(tmp_path / "checkpoint-3"), "optimizer": "adamw_torch", "callbacks": [Stateful()]}
    train(tiny_model, tmp_path / "on", process, **settings, **wider)
    assert "training goes on with a new generation window" in caplog.text
    assert "holds no state of Stateful," in caplog.text
    assert "holds no state of ProcessRewardCallback," not in caplog.text
    assert len(process.value.state_dict()["windows"]) == 4
