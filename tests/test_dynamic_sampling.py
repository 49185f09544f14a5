"""Dynamic sampling: how many prompts a window takes, which of them make it, and the update on these.

The reference of updates is TRL's trainer on a dataset of the prompts that a window should be made of.
"""

import pytest
import torch
from trl import GRPOTrainer

from dash_trl import DASHCallback, DASHTrainer
from dash_trl.collect import DynamicSampling
from tests.by_prompt import GROUP, ROOM, ByPrompt, completion, expected_windows
from tests.tiny import ScriptedReward, assert_same_update, prompts, refused


@pytest.mark.parametrize(
    ("most", "constant", "settings"),
    [
        (8, 0.5, {"gradient_accumulation_steps": 2, "steps_per_generation": 4}),  # Mini
        (2, 0.9, {}),  # not filled: silent groups are in the normaliser
        (8, 0.5, {"num_iterations": 2, "loss_type": "grpo"}),  # Multi: one window of two optimizer steps, as Mini
    ],
)
def test_the_update_is_trls_on_the_groups_of_the_window(tiny_model, train, most, constant, settings):
    reward = ScriptedReward(constant=constant)
    dataset = prompts(64)
    settings = {"max_steps": 2, "shuffle_dataset": False, "reward": reward, **settings}
    rollouts = ByPrompt()
    found = train(rollouts=rollouts, max_num_gen_batches=most, **settings)
    windows = expected_windows(dataset, reward, most, 2)
    assert windows[0] != list(range(ROOM))  # more was sampled
    chosen = dataset.select([row for window in windows for row in window])
    expected = train(GRPOTrainer, rollouts=ByPrompt(), dataset=chosen, **settings)
    assert_same_update(tiny_model, expected, found)
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


def test_the_figures_of_all_rounds_and_callbacks_see_each(train):
    """TRL's are of all sampled rows; those of dynamic sampling count groups in those of a window.

    The callback gives credit per token, in rounds of other widths.
    """
    rollouts = ByPrompt()
    seen = Seen()
    settings = {"rollouts": rollouts, "max_num_gen_batches": 8, "shuffle_dataset": False}
    ours = train(callbacks=[seen], **settings)
    assert seen.rows == [GROUP * len(one) for one in rollouts.rounds]
    groups = sum(map(len, rollouts.rounds))
    of_trl = {"dataset": prompts(groups), "gradient_accumulation_steps": groups, "shuffle_dataset": False}
    trls = train(GRPOTrainer, rollouts=ByPrompt(), **of_trl)
    expected, log = (one.state.log_history[0] for one in (trls, ours))
    names = ("reward", "reward_std", "completions/mean_length", "num_tokens", "frac_reward_zero_std")
    assert [log[name] for name in names] == pytest.approx([expected[name] for name in names])
    tables = ((one._logs["prompt"], one._logs["completion"], one._logs["rewards"]["scripted"]) for one in (trls, ours))
    shown = [sorted(zip(*columns, strict=True)) for columns in tables]
    assert shown[0] == shown[1] and len(ours._logs["advantages"]) == GROUP * groups
    signal = 1 - expected["frac_reward_zero_std"]
    assert len(rollouts.rounds) > 1 and log["grad_norm"] > 0
    assert log["filter/kept_rows"] == pytest.approx(signal)
    assert log["dynamic_sampling/rounds"] == len(rollouts.rounds)
    assert log["dynamic_sampling/sampled"] == groups / ROOM
    assert log["dynamic_sampling/filled"] == pytest.approx(signal * groups / ROOM)
    refused(
        "max_num_gen_batches=8 passes on some groups.*SeesAll does not say", train, callbacks=[SeesAll()], **settings
    )


class OfOneRound(DASHCallback):
    """In one round, takes the first token of each row out of the loss, and logs a column."""

    def __init__(self, number: int):
        self.left = number

    def on_rollouts_sampled(self, args, state, control, rollouts, log_extra, **kwargs):
        if self.left == 0:
            rollouts.tool_mask = rollouts.completion_mask.clone()
            rollouts.tool_mask[:, 0] = 0
            log_extra("length", rollouts.completion_mask.sum(dim=1).tolist())
        self.left -= 1


class Trained(DASHTrainer):
    """Notes whether the first token of a row is trained on."""

    def _compute_loss(self, model, inputs):
        mask = inputs["completion_mask"].bool()
        firsts = (mask * inputs.get("tool_mask", 1))[:, 0].tolist()
        rows = (tuple(ids[real].tolist()) for ids, real in zip(inputs["completion_ids"], mask, strict=True))
        self.noted = getattr(self, "noted", {}) | dict(zip(rows, map(bool, firsts), strict=True))
        return super()._compute_loss(model, inputs)


@pytest.mark.parametrize("number", [0, 1])
def test_what_only_one_round_has_is_kept(train, number):
    """A mask, and a column of the table of completions."""
    settings = {
        "max_num_gen_batches": 8,
        "log_completions": True,
        "shuffle_dataset": False,
        "rollouts": (rollouts := ByPrompt()),
        "callbacks": [OfOneRound(number)],
    }
    trainer = train(Trained, **settings)
    rounds = [[completion(prompt, i) for prompt in one for i in range(GROUP)] for one in rollouts.rounds]
    lengths = [len(row) if at == number else None for at, one in enumerate(rounds) for row in one]
    assert list(trainer._logs["extra"]["length"]) == lengths and None in lengths
    assert {*trainer.noted.values()} == {True, False}
    assert all(first == (list(row) not in rounds[number]) for row, first in trainer.noted.items())


def test_a_column_of_an_earlier_window_is_dropped(train):
    """It has the rows of that window, and TRL would fail to write a table of columns of other lengths."""
    reward = ScriptedReward()
    once = iter([True])

    def noted(prompts, completion_ids, log_extra, **kwargs):
        if next(once, False):
            log_extra("note", [str(len(row)) for row in completion_ids])
        return reward(prompts=prompts, completion_ids=completion_ids)

    settings = {"max_num_gen_batches": 8, "max_steps": 2, "log_completions": True}
    assert not train(rollouts=ByPrompt(), reward=noted, **settings)._logs["extra"]


# ---------------------------------------------------------------------------------------------- which groups, how many


def test_ahead_of_training_the_first_round_has_what_it_will_take():
    dynamic = DynamicSampling(8, 1, 4, ahead=True)
    assert dynamic.first() == 8
    for _ in range(50):
        dynamic.note(torch.arange(16).view(1, 16) % 2 == 0, 1)
    assert dynamic.first() == 16
    for _ in range(50):
        dynamic.note(torch.zeros(1, 16, dtype=torch.bool), 1)
    assert dynamic.first() == 32  # no more than the bound
    assert DynamicSampling(8, 1, 4, ahead=False, share=0.5).first() == 8
