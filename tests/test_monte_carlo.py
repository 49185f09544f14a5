"""`MonteCarloValue`: what it samples, in which batches, by whom; which rewards count; what it leaves behind."""

import math
import random
from statistics import fmean
from types import SimpleNamespace

import pytest

from dash_trl import DASHConfig, DASHTrainer, ProcessRewardCallback
from dash_trl.process_rewards import MonteCarloValue, ValueRequest
from tests.contract import check_logs
from tests.scripted_turns import add, save_tool_model
from tests.tiny import conversations, prompts, refused, run

LONGEST = 24  # of the trainer's completions
ROWS = 16  # of its generation batch
EXAMPLE = {"prompt": "1 + 2 = ", "answer": "3"}


def random_requests() -> list[ValueRequest]:
    """Distinct completions, each asked for at every second token and at its end; one is not asked for.

    Of the last two, one is as long as the trainer's completions may be, and one is longer.
    """
    generator = random.Random(0)
    requests = []
    for row in range(7):
        completion = (4 + row, *(generator.randrange(4, 260) for _ in range(generator.randint(0, LONGEST - 1))))
        boundaries = () if row == 3 else (*range(1, len(completion), 2), len(completion))
        requests.append(ValueRequest((7, 8, 9)[: 1 + row % 3], completion, boundaries, example=EXAMPLE))
    full = ValueRequest((5,), tuple(range(4, 4 + LONGEST)), (1, 11, LONGEST), example=EXAMPLE)
    longer = ValueRequest((6,), tuple(range(40, 45 + LONGEST)), (2, LONGEST, LONGEST + 5), example=EXAMPLE)
    return [*requests, full, longer]


def rest(prefix: list[int], number: int) -> list[int]:
    """What rollout `number` of a prefix goes on with if nothing ends it."""
    generator = random.Random(f"{prefix}{number}")
    return [generator.randrange(4, 260) for _ in range(generator.randint(1, LONGEST))]


def even(completion_ids: list[list[int]], **kwargs) -> list[float]:
    return [float(sum(ids) % 2 == 0) for ids in completion_ids]


def third(completion_ids: list[list[int]], **kwargs) -> list[float]:
    return [float(len(ids) % 3) for ids in completion_ids]


def weighted(ids: list[int]) -> float:
    return (sum(ids) % 2 == 0) + 0.5 * (len(ids) % 3)


def check(
    values: list[list[float]], requests: list[ValueRequest], k: int, reward=weighted, context: int = 10**6
) -> None:
    """Against the definition, prefix by prefix and rollout by rollout."""
    for request, row in zip(requests, values, strict=True):
        assert len(row) == len(request.boundaries)
        for boundary, value in zip(request.boundaries, row, strict=True):
            prefix = list(request.completion_ids[:boundary])
            ids = [*request.prompt_ids, *prefix]
            room = max(0, min(LONGEST - boundary, context - len(ids)))
            rewards = [reward(prefix + rest(ids, number)[:room]) for number in range(k)]
            known = [one for one in rewards if one is not None]
            assert value == pytest.approx(fmean(known) if known else math.nan, abs=1e-6, nan_ok=True)


@pytest.fixture(scope="module")
def trained(tiny_model, tmp_path_factory):
    rewards = {"reward": [even, third], "reward_weights": [1.0, 0.5]}
    return run(DASHTrainer, tiny_model, tmp_path_factory.mktemp("run"), max_completion_length=LONGEST, **rewards)


@pytest.fixture
def trainer(trained, monkeypatch):
    """Its sampler is `rest`; `trainer.sampled` holds the (rows, longest rest) of each batch."""
    trained.sampled = []

    def sample(prompt_ids, images, fields, num_generations):
        most = trained.generation_config.max_new_tokens
        trained.sampled.append((prompt_ids, most))
        return [rest(ids, i % num_generations)[:most] for i, ids in enumerate(prompt_ids)], None

    monkeypatch.setattr(trained, "_generate_single_turn", sample)
    return trained


def test_a_value_is_the_mean_reward_of_k_rollouts_and_batches_are_no_larger_than_the_trainer_s(trainer, monkeypatch):
    """Those of rewards, too: a reward model runs on the trainer's device."""
    requests = random_requests()
    seen = []

    def counting(completion_ids, **kwargs):
        seen.append(len(completion_ids))
        return even(completion_ids)

    monkeypatch.setattr(trainer.reward_funcs[0], "func", counting)
    for k in (1, 3, 20):
        seen.clear()
        trainer.sampled.clear()
        check(MonteCarloValue(k)(requests, trainer), requests, k)
        assert MonteCarloValue(k)([ValueRequest((5,), (6,), (), example=EXAMPLE)], trainer) == [[]]
        assert sum(len(ids) for ids, _ in trainer.sampled) % k == 0, k
        assert trainer.generation_config.max_new_tokens == LONGEST
        largest = max(ROWS // k * k, k)  # a prefix's rollouts stay together
        assert max(len(ids) for ids, _ in trainer.sampled) == max(seen) == largest, k


def test_rollouts_end_with_the_context(trainer, monkeypatch):
    context = 14
    requests = random_requests()
    for owner, name in ((trainer.model.config, "max_position_embeddings"), (trainer.args, "vllm_max_model_length")):
        trainer.sampled.clear()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, context)
            check(MonteCarloValue(2)(requests, trainer), requests, 2, context=context)
        assert all(len(ids) < context for batch, _ in trainer.sampled for ids in batch), name


def test_vllm_is_told_how_long_the_rest_may_be(trainer, monkeypatch):
    told = []

    def sample(prompt_ids, *others):
        told.append(trainer.vllm_generation.max_completion_length)
        return [[9]] * len(prompt_ids), None

    monkeypatch.setattr(trainer, "vllm_generation", SimpleNamespace(max_completion_length=LONGEST), raising=False)
    monkeypatch.setattr(trainer, "use_vllm", True)
    monkeypatch.setattr(trainer, "_generate_single_turn", sample)
    MonteCarloValue(2)([ValueRequest((5,), (6, 7, 8), (2, 3), example=EXAMPLE)], trainer)
    assert told == [LONGEST - 2] and trainer.vllm_generation.max_completion_length == LONGEST


def test_completions_of_several_turns_are_refused(trainer, monkeypatch, tmp_path):
    data = conversations(prompts(16))
    config = DASHConfig(str(tmp_path), use_cpu=True, bf16=False)
    with_tools = DASHTrainer(save_tool_model(tmp_path / "model"), even, config, data, tools=[add])
    monkeypatch.setattr(trainer, "rollout_func", even)
    for one in (with_tools, trainer):
        refused(
            "MonteCarloValue with tools, an environment or env_mask would finish each prefix in one turn",
            MonteCarloValue(2),
            [ValueRequest((5,), (6, 7), (0, 2), example=EXAMPLE, own=(1, 0))],
            one,
        )


def test_a_failed_reward_leaves_its_rollout_out_though_another_function_scored_it(trainer, monkeypatch, caplog):
    def failing(completion_ids, **kwargs):
        return [math.nan if ids[0] == 4 or sum(ids) % 3 == 0 else 1.0 for ids in completion_ids]

    def inapplicable(completion_ids, **kwargs):
        return [None if len(ids) % 2 else 2.0 for ids in completion_ids]

    for watched, function in zip(trainer.reward_funcs, (failing, inapplicable), strict=True):
        monkeypatch.setattr(watched, "func", function)

    def reward(ids):
        return None if ids[0] == 4 or sum(ids) % 3 == 0 else 1.0 + (0.0 if len(ids) % 2 else 0.5 * 2.0)

    requests = random_requests()
    for _ in range(2):
        values = MonteCarloValue(3)(requests, trainer)
        check(values, requests, 3, reward)
        assert all(map(math.isnan, values[0])) and not all(map(math.isnan, values[1]))
    assert caplog.text.count("The reward function 'even' failed on") == 1


def test_metrics_and_the_table_of_completions_are_those_without_it(train):
    """Two windows: what a reward function logs of the rollouts of the first would appear in the second."""
    rollouts = []

    class Talking:
        __name__ = "talking"

        def __call__(self, completion_ids, log_extra, log_metric, **kwargs):
            rollouts.append(completion_ids)
            log_extra("length", [len(ids) for ids in completion_ids])
            log_metric("shortest", min(map(len, completion_ids)))
            return [math.nan if len(ids) == 7 else float(len(ids) % 2) for ids in completion_ids]

    episodes = {"markers": lambda text: range(0, len(text), 3), "skip_silent": False}
    every = ProcessRewardCallback(MonteCarloValue(2), estimator="grpo", **episodes)  # so that credit is the outcome's
    own = {"reward": Talking(), "dataset": prompts(64).remove_columns("answer"), "max_steps": 2}
    plain, valued = (train(callbacks=callbacks, max_completion_length=LONGEST, **own) for callbacks in ([], [every]))
    check_logs([plain, valued])
    for name in ("prompt", "completion"):
        assert plain._logs[name] == valued._logs[name]
    assert plain._logs["extra"]["length"] == valued._logs["extra"]["length"]
    rewards = [repr({**one._logs["rewards"]}) for one in (plain, valued)]  # NaN is not equal to itself
    assert rewards[0] == rewards[1]
    assert {"reward", "shortest", "num_tokens"} <= plain.state.log_history[0].keys()
    assert len(rollouts) > 6 and max(map(len, rollouts)) <= ROWS
    assert max(len(ids) for batch in rollouts for ids in batch) <= LONGEST
