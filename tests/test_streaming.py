"""Rewards begin with the group that the servers finish first, on fake servers; what they are does not change."""

from functools import partial
from threading import Lock
from typing import Any

import pytest
from datasets import Dataset

from dash_trl import DASHTrainer, RewardRunner
from tests.doubles import SavesBetween
from tests.fake_server import GROUPS, Varied, Watch, asynchronous, factory, is_idle, settle
from tests.tiny import assert_same_update, prompts, refusal, refused
from tests.vllm_run import wait_until

ROWS = 4 * GROUPS  # of a window


server = factory(Varied)


class Reward:
    """A reward that records its arguments in order."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def compute_score(self, **row: Any) -> float:
        self.rows.append(row)
        return float(sum(row["completion_ids"]) % 2)


class Unstreamed(DASHTrainer):
    """Rewards begin when all rows are there, decoded by TRL. `sampled`: what TRL made of them."""

    sampled: tuple[Any, ...] = ()

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        self.sampled += tuple(zip(prompts, completions, completion_ids_list, strict=True))
        return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)


def trained(model: str, output: Any, servers: list[Any], level: int = 0, **settings: Any) -> Any:
    """Trains; returns the trainer and the reward."""
    reward = settings.pop("reward", None) or Reward()
    runner = RewardRunner(reward, max_concurrency=settings.pop("max_concurrency", 256))
    return asynchronous(model, output, servers, level, reward=runner, **settings)[0], reward


def test_rewards_begin_before_the_last_group_is_sampled(tiny_model, tmp_path, server):
    """Its generation waits for the first reward call: for ever, where rewards begin when all rows are there."""
    reward = Reward()
    fake = server()
    waited = []
    fake.before = lambda number: waited.append(wait_until(lambda: reward.rows)) if number == GROUPS else None
    trainer, _ = trained(tiny_model, tmp_path, [fake], reward=reward)
    assert trainer.state.log_history[0]["async/staleness_max"] == 0
    assert len(waited) == 1 and len(reward.rows) == ROWS


class NextIsSampled(Watch):
    """When a window's rewards have come, the next one's rows have, too."""

    def on_rewards(self, args, state, control, rollouts, trainer, **kwargs):
        wait_until(lambda: is_idle(trainer.vllm_generation.pool))
        settle(trainer.vllm_generation.pool)


def test_the_next_window_s_rewards_begin_while_this_one_is_trained_on(tiny_model, tmp_path, server):
    """An optimizer step does not end before they are there."""
    reward = Reward()
    watch = NextIsSampled()
    watch.wait = lambda window: wait_until(lambda: len(reward.rows) >= 2 * ROWS)
    trained(tiny_model, tmp_path, [server()], 1, reward=reward, watch=watch, max_steps=2)
    assert len(reward.rows) == 2 * ROWS


class Counted(DASHTrainer):
    def _compute_loss(self, model, inputs):
        self.passes.append(model)
        return super()._compute_loss(model, inputs)


def test_passes_run_before_the_last_group_is_sampled(tiny_model, tmp_path, server):
    """Its generation waits for the first pass: for ever, where a window is sampled before it is trained on."""
    fake = server()
    waited = []
    Counted.passes = []
    fake.before = lambda number: waited.append(wait_until(lambda: Counted.passes)) if number == GROUPS else None
    trained(tiny_model, tmp_path, [fake], reward_pipeline=True, trainer_class=Counted)
    assert len(waited) == 1 and len(Counted.passes) > 1


def test_a_group_that_is_never_sampled_ends_the_run(tiny_model, tmp_path, server):
    fake = server(fault="400", spared=GROUPS - 1)
    assert "told to" in refusal(trained, tiny_model, tmp_path, [fake], reward_pipeline=True)


def test_rewards_that_cannot_begin_end_the_run(tiny_model, tmp_path, server):
    lock = Lock()
    runner = RewardRunner(lambda completion: float(lock.locked()), backend="process")
    settings = {"reward": runner, "reward_pipeline": True}
    said = refusal(asynchronous, tiny_model, tmp_path, [server()], 0, **settings)
    assert "cannot be sent to another process" in said


def test_a_checkpoint_between_micro_steps_loses_no_row(tiny_model, tmp_path, server):
    plain, saved = (
        trained(
            tiny_model,
            tmp_path,
            [server()],
            watch=watch,
            reward_pipeline=True,
            prepare=partial(setattr, watch, "trainer"),
        )[0]
        for watch in (Watch(), SavesBetween())
    )
    assert_same_update(tiny_model, plain, saved)
    assert (tmp_path / "checkpoint-0").exists()


SETTINGS: list[dict[str, Any]] = [
    {"level": 2},
    {"level": 1, "reward_pipeline": True, "servers": ({"fault": "500", "times": 3}, {})},
    *({"reward_pipeline": True, "loss_type": one, "beta": 0.1} for one in ("dapo", "grpo", "bnpo", "cispo")),
    {"reward_pipeline": True, "max_grad_norm": 0.1},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_rewards_and_updates_are_what_they_were(settings, tiny_model, tmp_path, server):
    """Bit for bit, or to rounding, where the pipeline makes other passes; prompts come in equal pairs."""
    settings = {"max_steps": 2, "shuffle_dataset": False, **settings}
    texts = [text for text in prompts(8)["prompt"] for _ in range(2)]
    settings["dataset"] = Dataset.from_dict({"prompt": texts, "answer": list(range(16))})
    options = settings.pop("servers", ({},))
    together = {**settings, "reward_pipeline": False}
    plain, _ = trained(tiny_model, tmp_path, [server()], trainer_class=Unstreamed, **together)
    streamed, reward = trained(tiny_model, tmp_path, [server(**one) for one in options], **settings)

    asked = [(row["prompt"], row["completion"], row["completion_ids"]) for row in reward.rows]
    assert sorted(map(repr, asked)) == sorted(map(repr, plain.sampled)) and len(asked) == 2 * ROWS
    assert all(texts[row["answer"]] == row["prompt"] for row in reward.rows)
    assert (streamed.vllm_generation.pool.retried > 0) == (len(options) > 1)
    assert list(streamed._logs["rewards"]["Reward"]) == list(plain._logs["rewards"]["Reward"])
    assert list(streamed._logs["completion"]) == list(plain._logs["completion"])
    tolerance = 1e-5 if "reward_pipeline" in settings else 0.0
    assert_same_update(tiny_model, plain, streamed, tolerance=tolerance, least=1e-2)


def test_what_cannot_be_decoded_is_raised_where_its_window_is_collected(tiny_model, tmp_path, server):
    """Window 1 is decoded while window 0 is trained on. No work is left."""
    trainers = []
    watch = NextIsSampled()
    fake = server()

    def prepare(trainer: Any) -> None:
        trainers.append(trainer)
        first = trainer.processing_class([*prompts(GROUPS)["prompt"]])["input_ids"]
        fake.before = lambda number: fake.requests[number - 1]["prompt"] in first or wait_until(lambda: watch.windows)
        trainer.vllm_generation.pool.fleet.most_sequences = ROWS  # so that window 0 is asked for first
        decode = trainer.processing_class.batch_decode
        rows = []

        def breaks(sequences, **settings):
            rows.extend(sequences)
            if len(rows) > ROWS + 4:
                raise ValueError("no such token")
            return decode(sequences, **settings)

        trainer.processing_class.batch_decode = breaks

    assert "no such token" in refusal(
        trained, tiny_model, tmp_path, [fake], 1, watch=watch, prepare=prepare, max_steps=4, shuffle_dataset=False
    )
    assert trainers[0].state.global_step == 1 and len(watch.windows) == 1
    assert is_idle(trainers[0].vllm_generation.pool)


def test_rows_that_a_subclass_changes_are_asked_of_as_they_are(tiny_model, tmp_path, server):
    class Marked(DASHTrainer):
        def _calculate_rewards(self, inputs, *known):
            return super()._calculate_rewards([{**example, "answer": -1} for example in inputs], *known)

    class Unused(DASHTrainer):
        def _generate_single_turn(self, *args):
            raise NotImplementedError

    servers = [server()]
    refused(
        "Unused._generate_single_turn would not be called", trained, tiny_model, tmp_path, servers, trainer_class=Unused
    )
    _, reward = trained(tiny_model, tmp_path, servers, trainer_class=Marked, max_steps=2)
    assert [row["answer"] for row in reward.rows] == [-1] * 2 * ROWS
