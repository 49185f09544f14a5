"""Dynamic sampling: how many prompts a window takes, which of them make it, and the update on these.

The reference of updates is TRL's trainer on a dataset of the prompts that a window should be made of.
"""

import random
from typing import Any

import pytest
import torch
from trl import GRPOTrainer

from dash_trl import DASHCallback, DASHTrainer
from dash_trl.collect import DynamicSampling, rows_of_window
from tests.tiny import EOS, ScriptedReward, assert_same_update, parameters, prompts, refused, run

GROUP, ROOM = 4, 4  # rows of a group, groups of a window


def completion(prompt: str, number: int) -> list[int]:
    chance = random.Random(f"{prompt} {number}")
    tokens = [chance.randrange(4, 260) for _ in range(chance.randint(1, 20))]
    return [*tokens, EOS if chance.random() < 0.7 else 77]


class ByPrompt:
    """A `rollout_func` whose completions depend on prompt and position in the group; `rounds`: prompts of each call."""

    def __init__(self) -> None:
        self.rounds: list[list[str]] = []

    def __call__(self, rows: list[str], trainer: Any) -> dict[str, list]:
        self.rounds.append(rows[::GROUP])
        torch.manual_seed(0)  # the shuffle of a window follows
        return {
            "prompt_ids": trainer.processing_class(text=rows)["input_ids"],
            "completion_ids": [completion(prompt, i % GROUP) for i, prompt in enumerate(rows)],
            "logprobs": None,
        }


def has_signal(prompt: str, reward: ScriptedReward) -> bool:
    rewards = reward(prompts=[prompt] * GROUP, completion_ids=[completion(prompt, i) for i in range(GROUP)])
    return len(set(rewards)) > 1


def expected_windows(dataset: Any, reward: ScriptedReward, most: int, count: int) -> list[list[int]]:
    """Returns the dataset rows of each window, if a round samples what is missing, by the share of signal so far."""
    windows, first = [], 0
    for _ in range(count):
        size, signal, silent = ROOM, list[int](), list[int]()
        sampled = 0
        while size:
            for row in range(first, first + size):
                (signal if has_signal(dataset[row]["prompt"], reward) else silent).append(row)
            first, sampled = first + size, sampled + size
            missing = max(ROOM - len(signal), 0)
            size = min(-(-missing * (sampled + 2) // (len(signal) + 1)), ROOM, most * ROOM - sampled)
        windows.append(signal[:ROOM] + silent[: max(ROOM - len(signal), 0)])
    return windows


@pytest.mark.parametrize(
    ("most", "constant", "settings"),
    [
        (8, 0.5, {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "loss_type": "dapo"}),  # Mini
        (8, 0.5, {"loss_type": "grpo", "max_tokens_per_microbatch": 60}),
        (2, 0.9, {"loss_type": "dapo"}),  # not filled: silent groups are in the normaliser
        (2, 0.9, {"loss_type": "bnpo", "filter_denominator": "kept"}),
        (8, 0.5, {"num_iterations": 2, "loss_type": "grpo"}),  # Multi: one window of two optimizer steps, as Mini
    ],
)
def test_the_update_is_trls_on_the_groups_of_the_window(tiny_model, tmp_path, most, constant, settings):
    reward, dataset = ScriptedReward(constant=constant), prompts(64)
    settings = {"max_steps": 2, "shuffle_dataset": False, "reward": reward, **settings}
    rollouts = ByPrompt()
    found = run(DASHTrainer, tiny_model, tmp_path, rollouts=rollouts, max_num_gen_batches=most, **settings)
    windows = expected_windows(dataset, reward, most, 2)
    assert windows[0] != list(range(ROOM))  # more was sampled
    own = {name: settings.pop(name) for name in ("max_tokens_per_microbatch", "filter_denominator") if name in settings}
    chosen = dataset.select([row for window in windows for row in window])
    kind, settings = (DASHTrainer, settings | own) if "filter_denominator" in own else (GRPOTrainer, settings)
    expected = run(kind, tiny_model, tmp_path, rollouts=ByPrompt(), dataset=chosen, **settings)
    assert_same_update(parameters(tiny_model), parameters(expected.model), parameters(found.model))
    handed = [row for one in rollouts.rounds for row in one]
    assert handed == dataset["prompt"][: len(handed)]


class Seen(DASHCallback):
    per_group = True

    def __init__(self) -> None:
        self.rows: list[int] = []

    def on_advantages(self, args, state, control, rollouts, **kwargs) -> None:
        self.rows.append(len(rollouts))
        rollouts.advantages = rollouts.advantages.unsqueeze(1) * torch.linspace(0.5, 1.5, rollouts.loss_mask.shape[1])


class SeesAll(Seen):
    per_group = False


def test_the_figures_of_all_rounds_and_callbacks_see_each(tiny_model, tmp_path):
    """TRL's are of all sampled rows; those of dynamic sampling count groups in those of a window.

    The callback gives credit per token, in rounds of other widths.
    """
    reward, rollouts, seen = ScriptedReward(constant=0.5), ByPrompt(), Seen()
    settings = {"rollouts": rollouts, "max_num_gen_batches": 8, "shuffle_dataset": False}
    trainer = run(DASHTrainer, tiny_model, tmp_path, callbacks=[seen], **settings)
    assert seen.rows == [GROUP * len(one) for one in rollouts.rounds]
    log = trainer.state.log_history[0]
    sampled = [prompt for one in rollouts.rounds for prompt in one]
    rewards = [
        reward(prompts=[prompt] * GROUP, completion_ids=[completion(prompt, i) for i in range(GROUP)])
        for prompt in sampled
    ]
    signal = sum(has_signal(prompt, reward) for prompt in sampled)
    lengths = [len(completion(prompt, i)) for prompt in sampled for i in range(GROUP)]
    assert len(rollouts.rounds) > 1 and log["grad_norm"] > 0
    assert log["reward"] == pytest.approx(torch.tensor(rewards).mean().item())
    assert log["completions/mean_length"] == pytest.approx(sum(lengths) / len(lengths))
    assert log["filter/kept_rows"] == pytest.approx(signal / len(sampled))
    assert log["frac_reward_zero_std"] == pytest.approx(1 - signal / len(sampled))
    assert log["dynamic_sampling/rounds"] == len(rollouts.rounds)
    assert log["dynamic_sampling/sampled"] == len(sampled) / ROOM
    assert log["dynamic_sampling/filled"] == 1.0
    assert log["dynamic_sampling/surplus"] == signal / ROOM - 1
    assert len(trainer._logs["prompt"]) == GROUP * len(sampled) == len(trainer._logs["advantages"])
    shown = dict(zip(trainer._logs["completion"], trainer._logs["rewards"]["scripted"], strict=True))
    texts = trainer.processing_class.batch_decode(
        [completion(prompt, i) for prompt in sampled for i in range(GROUP)], skip_special_tokens=True
    )
    assert shown == dict(zip(texts, [one for group in rewards for one in group], strict=True))
    refused(
        "max_num_gen_batches=8 passes on some groups.*SeesAll does not say",
        run,
        DASHTrainer,
        tiny_model,
        tmp_path,
        callbacks=[SeesAll()],
        **settings,
    )


class SometimesMasked(DASHCallback):
    """Takes a token out of the loss, and makes a mask only in rounds in which it stands."""

    def __init__(self, token: int):
        self.token, self.made = token, list[bool]()

    def on_rollouts_sampled(self, args, state, control, rollouts, **kwargs):
        found = rollouts.completion_ids == self.token
        self.made.append(bool(found.any()))
        if found.any():
            rollouts.tool_mask = (~found).long()


class Lengths(DASHCallback):
    """Logs a column, as `ProcessRewardCallback` logs the credit of each row."""

    per_group = True

    def on_advantages(self, args, state, control, rollouts, trainer=None, **kwargs):
        trainer._log_completion_extra("length", rollouts.completion_mask.sum(dim=1).tolist())


class Trained(DASHTrainer):
    """Notes the tokens that are trained on."""

    def _compute_loss(self, model, inputs):
        own = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        self.tokens = getattr(self, "tokens", set()) | set(inputs["completion_ids"][own.bool()].tolist())
        return super()._compute_loss(model, inputs)


def test_what_only_some_rounds_have_is_kept(tiny_model, tmp_path):
    """A mask and a column of the table of completions: in the first round only, or in a later one."""
    settings = {"max_num_gen_batches": 8, "log_completions": True, "shuffle_dataset": False}
    trainer = run(Trained, tiny_model, tmp_path, rollouts=(rollouts := ByPrompt()), **settings)
    tokens = [
        {token for prompt in one for i in range(GROUP) for token in completion(prompt, i)} for one in rollouts.rounds
    ]
    later = set().union(*tokens[1:])
    for only in (tokens[0] - later, later - tokens[0]):
        token = min(only & trainer.tokens)
        masked = SometimesMasked(token)

        def noted(completion_ids, log_extra, token=token, **columns):
            notes = [str(row.count(token)) if token in row else None for row in completion_ids]
            if any(notes):
                log_extra("note", notes)
            return ScriptedReward(constant=0.5)(completion_ids=completion_ids, **columns)

        callbacks = [masked, Lengths()]
        found = run(Trained, tiny_model, tmp_path, rollouts=ByPrompt(), reward=noted, callbacks=callbacks, **settings)
        rows = [completion(prompt, i) for one in rollouts.rounds for prompt in one for i in range(GROUP)]
        assert masked.made == [token in one for one in tokens]
        assert list(found._logs["extra"]["note"]) == [str(row.count(token)) if token in row else None for row in rows]
        assert list(found._logs["extra"]["length"]) == list(map(len, rows))
        assert token not in found.tokens and found.tokens


def test_a_column_of_an_earlier_window_is_dropped(tiny_model, tmp_path):
    """It has the rows of that window, and TRL would fail to write a table of columns of other lengths."""
    reward, once = ScriptedReward(constant=0.5), iter([True])

    def noted(prompts, completion_ids, log_extra, **kwargs):
        if next(once, False):
            log_extra("note", [str(len(row)) for row in completion_ids])
        return reward(prompts=prompts, completion_ids=completion_ids)

    settings = {"max_num_gen_batches": 8, "max_steps": 2, "log_completions": True}
    assert not run(DASHTrainer, tiny_model, tmp_path, rollouts=ByPrompt(), reward=noted, **settings)._logs["extra"]


# ---------------------------------------------------------------------------------------------- which groups, how many


def test_ahead_of_training_the_first_round_has_what_it_will_take():
    dynamic = DynamicSampling(8, 1, 4, ahead=True)
    assert dynamic.first() == 8
    for _ in range(50):
        dynamic.note([torch.arange(16).view(1, 16) % 2 == 0])
    assert dynamic.first() == 16
    for _ in range(50):
        dynamic.note([torch.zeros(1, 16, dtype=torch.bool)])
    assert dynamic.first() == 32  # no more than the bound


def test_the_groups_of_a_window_are_those_of_the_drawn_example():
    """Two ranks with two groups each in two rounds; if F is silent, the first silent group has its room."""
    for f, chosen, trained in (
        (True, [[1, 0, 1, 1], [0, 1, 0, 0]], [[1, 0, 1, 1], [0, 1, 0, 0]]),
        (False, [[1, 0, 1, 0], [1, 1, 0, 0]], [[1, 0, 1, 0], [0, 1, 0, 0]]),
    ):
        signal = [torch.tensor([[True, False], [False, True]]), torch.tensor([[True, f], [False, False]])]
        for rank in (0, 1):
            found = rows_of_window(signal, 4, rank, group_size=1)
            assert [one.long().tolist() for one in found] == [chosen[rank], trained[rank]]
