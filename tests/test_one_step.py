"""`async_level=1` without servers: the next window is sampled while the rewards of this one are awaited."""

import threading

import pytest
import torch

from dash_trl import DASHCallback, DASHTrainer, RewardRunner
from tests import reference
from tests.doubles import odd
from tests.tiny import Snapshots, assert_same_update, load, noting, refused


class Scored(DASHCallback):
    """Tells by the number of a prompt that its rewards have come."""

    per_group = True

    def __init__(self):
        self.prompts = [threading.Event() for _ in range(64)]

    def on_rewards(self, args, state, control, rollouts, **kwargs):
        for example in rollouts.examples:
            self.prompts[example["answer"]].set()


@pytest.fixture
def trained(train):
    def trained(*trainer_class, reward=odd, **settings):
        torch.manual_seed(0)
        shapes = {
            "gradient_accumulation_steps": 2,
            "max_completion_length": 6,
            "max_steps": 4,
            "in_process": True,
            "async_level": 1,
            **settings,
        }
        return train(*trainer_class, reward=RewardRunner(reward), **shapes)

    return trained


def test_each_window_but_the_first_is_sampled_one_step_ahead(trained):
    """Its log-probs are those of the weights before the last step."""
    sampled = noting("on_rollouts_sampled")
    ends = Snapshots()
    trainer = trained(learning_rate=0.5, callbacks=[sampled, ends])
    assert [window.policy_version.unique().tolist() for window in sampled.noted] == [[0], [0], [1], [2]]
    logged = [line for line in trainer.state.log_history if "async/staleness_max" in line]
    assert [line["async/staleness_max"] for line in logged] == [0, 1, 1, 1]
    assert all(line["completions/mean_length"] > 0 for line in logged)
    model = trainer.accelerator.unwrap_model(trainer.model)
    compared = []
    weights = [ends.start, *ends.steps]
    for window in sampled.noted[1:]:
        step = int(window.policy_version[0, 0])
        for other in (step, step + 1):
            model.load_state_dict(weights[other], strict=False)
            expected = reference.distributions(model, window).log_prob(window.completion_ids)
            far = (window.sampling_per_token_logps - expected)[window.completion_mask.bool()].abs().max()
            compared.append((other == step, far.item()))
    assert max(far for own, far in compared if own) < 1e-4
    assert max(far for own, far in compared if not own) > 1e-2


def test_the_next_window_s_rewards_begin_before_this_one_s_are_there(trained):
    """Those of the first window wait for the first of the second, which has been sampled then: else for ever."""
    calls = []
    second = threading.Event()
    waited = []

    def gated(completion, completion_ids):
        calls.append(completion)
        if len(calls) > 8:  # rows of a window
            second.set()
        else:
            waited.append(second.wait(60))
        return odd(completion, completion_ids)

    trained(reward=gated, max_steps=2)
    assert waited == [True] * 8 and len(calls) == 16


@pytest.mark.parametrize("settings", [{"vllm_importance_sampling_mode": "token_truncate"}, {"loss_type": "aipo"}])
def test_with_the_pipeline_the_update_is_the_same(trained, start, settings):
    """With the figures of the sampler: of the window, though its second group comes when the first is trained on."""
    ends = []
    figures = []
    for pipe in (False, True):
        scored = Scored()

        def in_turn(completion, completion_ids, answer, pipe=pipe, scored=scored):
            assert not pipe or answer % 2 == 0 or scored.prompts[answer - 1].wait(60)
            return odd(completion, completion_ids)

        one = {"reward_pipeline": pipe, "callbacks": [scored], "shuffle_dataset": False, "max_steps": 2, **settings}
        trainer = trained(reward=in_turn, **one)
        ends.append(trainer)
        figures.append([(name, value) for line in trainer.state.log_history for name, value in line.items()])
    assert_same_update(start, *ends)
    names = {"off_policy/clipped_share", "async/staleness_max"}
    own = [[(name, value) for name, value in one if name in names or name.startswith("sampling/")] for one in figures]
    assert [name for name, _ in own[0]] == [name for name, _ in own[1]] and len(own[0]) >= 4
    assert [value for _, value in own[0]] == pytest.approx([value for _, value in own[1]], rel=1e-4, abs=1e-6)


class Built(DASHTrainer):
    def train(self, **kwargs):
        pass


def test_a_sampler_with_another_distribution_is_refused(trained, tiny_model):
    """transformers takes what the trainer leaves out from the model's generation config."""
    other = "from another distribution than the model's"
    for of_model, settings, said in (
        ({"no_repeat_ngram_size": 2}, {"top_p": 0.9}, f"{other}.*NoRepeatNGram.*TopP"),
        ({}, {"top_k": None}, f"{other}.*TopK"),  # transformers takes 50
        ({"min_p": 0.1, "top_k": 20, "repetition_penalty": 1.1}, {"min_p": 0.0, "temperature": 0.9}, "^$"),
        ({"renormalize_logits": True, "remove_invalid_values": True}, {}, "^$"),
    ):
        model = load(tiny_model)
        model.generation_config.update(**of_model)
        refused(said, trained, Built, loaded=model, **settings)
    refused("async_level=2 lets servers sample", trained, async_level=2)


def test_a_pass_has_as_many_tokens_as_one_of_trls_with_dropped_rows(train):
    """4 rows as wide as the longest row, which is dropped; the 12 rows that are left fit into one pass."""

    def rollouts(prompts, trainer):
        return {"prompt_ids": [[6] * 8] * 16, "completion_ids": [[5] * 30] * 4 + [[5]] * 12, "logprobs": None}

    settings = {"reward": lambda prompts, **columns: [0.0] * 4 + [0.0, 1.0] * 6, "share_prompts": False}
    (log, *_) = train(rollouts=rollouts, **settings).state.log_history
    assert log["filter/kept_rows"] == 0.75 and log["packing/max_tokens"] == 12 * (8 + 1)
