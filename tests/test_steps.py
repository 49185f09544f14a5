"""`StepValue` and `ProcessRewardModel`: scores of episodes become values, and the credit of their tokens."""

import math
import re
from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForTokenClassification

from dash_trl import DASHCallback, DASHTrainer
from dash_trl.process_rewards import ProcessRewardCallback, ProcessRewardModel, StepValue, ValueRequest
from tests.test_tensor_arguments import refusal
from tests.tiny import run


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def trained(tiny_model, tmp_path_factory):
    """A run in which a step is worth its length: trainer, callback, advantages."""

    def longer(prompts, steps, **columns):
        return [[float(len(step)) for step in row] for row in steps]

    class Look(DASHCallback):
        def on_advantages(self, args, state, control, rollouts, **kwargs):
            self.advantages = rollouts.advantages.clone()

    settings = {"estimator": "episode", "min_episode_tokens": 1, "max_episode_tokens": 4, "skip_solved": False}
    look, callback = Look(), ProcessRewardCallback(StepValue(longer), **settings)
    folder = tmp_path_factory.mktemp("steps")
    trainer = run(DASHTrainer, tiny_model, folder, callbacks=[callback, look], constant=1.0)  # outcomes say nothing
    return trainer, callback, look.advantages


def request(tokenizer, prompt: str, *steps: str, **example) -> ValueRequest:
    """With a boundary behind each step, and an answer behind the last."""
    ids = [tuple(tokenizer(text)["input_ids"]) for text in steps]
    ends = [sum(map(len, ids[:n])) for n in range(len(ids) + 1)]
    answer = tuple(tokenizer("9")["input_ids"])
    return ValueRequest(
        tuple(tokenizer(prompt)["input_ids"]), sum(ids, ()) + answer, tuple(ends), example={"prompt": prompt, **example}
    )


def test_sums_of_scores_have_not_the_unit_of_the_outcome():
    """With them, gae and anchored values would take from a right completion what its good steps have earned."""
    for settings in ({"estimator": "gae"}, {"anchored": True}):
        for rewards in (True, False):
            said = refusal(ProcessRewardCallback, StepValue(lambda **given: [], rewards=rewards), **settings)
            assert ("unit" in said) == rewards and bool(said) == rewards, settings


def test_scores_are_rewards_of_episodes_or_values_behind_them(tokenizer, trained):
    trainer = trained[0]
    seen = []

    def score(prompts, steps, **columns):
        seen.append((prompts, steps, columns))
        return [[0.5, -1.0, 2.0], None, [math.nan], [0.25]]

    requests = [
        request(tokenizer, "1+1", "a\n", "bb\n", "c\n", level=1),
        request(tokenizer, "2+2", "a\n", "b\n", level=2),
        request(tokenizer, "3+3", "a\n", level=3),
        ValueRequest((5,), (6,), (0,)),  # not an episode
        ValueRequest((5,), (6,), ()),  # not asked for
        request(tokenizer, "4+4", "a\n", level=4),
    ]
    found = StepValue(score)(requests, trainer)
    assert found[0] == [0.0, 0.5, -0.5, 1.5] and found[5] == [0.0, 0.25]
    assert [len(row) for row in found] == [4, 3, 2, 1, 0, 2]
    assert all(map(math.isnan, found[1] + found[2] + found[3]))
    assert StepValue(score, rewards=False)(requests, trainer)[0] == [0.5, 0.5, -1.0, 2.0]
    same = [replace(requests[n], prompt_ids=requests[0].prompt_ids) for n in (0, 5, 3)]
    found = StepValue(lambda *texts, **columns: [[0.5, 1, 1], [0.25]], rewards=False)(same, trainer)
    assert found[:2] == [[0.375, 0.5, 1, 1], [0.375, 0.25]]  # V_0 is that of the prompt
    assert list(map(math.isnan, found[2])) == [True]  # without an episode, no score
    prompts, steps, columns = seen[0]
    assert prompts == ["1+1", "2+2", "3+3", "4+4"] and columns == {"level": [1, 2, 3, 4]}
    assert steps == [["a\n", "bb\n", "c\n"], ["a\n", "b\n"], ["a\n"], ["a\n"]]


def test_a_function_that_scores_other_steps_is_named(tokenizer, trained):
    asked = [request(tokenizer, "1", "a", "b", "c")]
    for scores in ([[0.5]], [[0.5, 1.0, 2.0, 3.0]], [], [[]], [[0.5] * 3, [0.5] * 3]):

        def mine(prompts, steps, scores=scores, **columns):
            return scores

        found = refusal(StepValue(mine), asked, trained[0])
        assert re.search(r"mine returned .* scores for completions of \[3\] steps", found), scores
    for score in (None, ProcessRewardModel):
        assert "cannot score episodes" in refusal(StepValue, score)


def test_a_reward_for_a_step_reaches_its_tokens(trained):
    """By the estimator whose credit of an episode is its own reward over the spread of the group."""
    _, callback, advantages = trained
    scales = []
    for row, (boundaries, worth) in enumerate(callback.last):
        episodes = list(zip(boundaries[:-1], boundaries[1:], worth[:-1], worth[1:], strict=True))
        scales.append([float(advantages[row, t]) / (v - u) for s, e, u, v in episodes for t in range(s, e)])
    for group in range(0, 16, 4):  # one spread for the rows of a group
        found = sum(scales[group : group + 4], [])
        assert found[0] > 0 and found == pytest.approx([found[0]] * len(found))
    assert max(map(len, scales)) > 8


def test_a_process_reward_model_is_read_at_the_end_of_each_step(tokenizer):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, num_labels=2,
    )  # fmt: skip
    model = Qwen2ForTokenClassification(config).train()
    scores = ProcessRewardModel(model, tokenizer, batch_size=2)
    model.train()  # a callback of the user's may leave it so
    prompts, steps = ["1+1=", "2", "3"], [["one \n", "two"], ["three"], [" a", "b", "c"]]
    found = scores(prompts, steps, level=[1, 2, 3])
    model.eval()
    for prompt, row, of_row in zip(prompts, steps, found, strict=True):
        for n, score in enumerate(of_row):
            text = prompt + "".join(f"{step.strip()}\n" for step in row[: n + 1])
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).logits[0, -1]
            assert score == pytest.approx(logits.softmax(-1)[1].item(), abs=1e-6)
    with pytest.raises(ValueError, match="takes 64"):
        scores(["1"], [["a" * 100]])
    other = AutoTokenizer.from_pretrained(tokenizer.name_or_path, bos_token="1")
    begun = ProcessRewardModel(model, other)  # TRL's former PRMTrainer trained with the token
    assert begun(["2"], [["b"]]) == scores(["12"], [["b"]]) == begun(["12"], [["b"]]) != scores(["2"], [["b"]])
    with pytest.raises(ValueError, match="label=2.*cannot score steps"):
        ProcessRewardModel(model, tokenizer, label=2)
    model.config.num_labels = 1  # the softmax over one label is 1
    with pytest.raises(ValueError, match="1 labels"):
        ProcessRewardModel(model, tokenizer, label=0)
