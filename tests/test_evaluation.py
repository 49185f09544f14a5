"""Accuracy and pass@k: against brute force and scripted models, without a trace in the model or the random state."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dash_trl.evaluation import Evaluation, accuracy, evaluate, pass_at_k, sample_completions

PROMPTS = ["1 + 2 = ", "the answer is ", "3"]


@pytest.fixture(scope="module")
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_share_of_lucky_subsets(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize("arguments", [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)])
def test_impossible_counts_are_refused(arguments):
    with pytest.raises(ValueError, match="pass_at_k"):
        pass_at_k(*arguments)


def test_failed_rewards_count_neither_way():
    result = Evaluation(completions=[["a", "b", "c"], ["d", "e", "f"]], rewards=[[1.0, None, 0.0], [None, None, 1.0]])
    assert result.failed == 3
    assert result.accuracy == pytest.approx(2 / 3)
    assert result.pass_at(1) == pytest.approx((0.5 + 1.0) / 2)
    assert result.pass_at(2) == 1.0  # the second prompt has one scored sample only
    assert math.isnan(result.pass_at(3))
    assert math.isnan(Evaluation([["a"]], [[None]]).accuracy)


def test_rewards_are_scored_with_their_columns(model, tokenizer):
    dataset = [{"prompt": prompt, "answer": str(i)} for i, prompt in enumerate(PROMPTS)]
    calls = []

    def reward(prompts, completions, completion_ids, answer):
        calls.append((prompts, completions, answer))
        assert [tokenizer.decode(ids, skip_special_tokens=True) for ids in completion_ids] == completions
        return [1.0, 0.0, None, math.nan, math.inf, 0.4]

    result = evaluate(model, tokenizer, dataset, reward, num_samples=2, max_new_tokens=4)
    assert result.rewards == [[1.0, 0.0], [None, None], [None, 0.4]]
    (call,) = calls
    assert call[0] == [prompt for prompt in PROMPTS for _ in range(2)] and call[2] == ["0", "0", "1", "1", "2", "2"]
    assert [text for row in result.completions for text in row] == call[1]


def test_failures_are_reported(model, tokenizer, caplog):
    rewards = iter([1.0, None])
    dataset = [{"prompt": prompt} for prompt in PROMPTS[:2]]
    assert accuracy(model, tokenizer, dataset, lambda **kwargs: list(rewards), max_new_tokens=2) == 1.0
    assert "1 of 2 rewards failed" in caplog.text


def test_a_wrong_number_of_rewards_is_an_error(model, tokenizer):
    with pytest.raises(ValueError, match="2 rewards for 1"):
        evaluate(model, tokenizer, [{"prompt": "1"}], lambda **kwargs: [1.0, 1.0], max_new_tokens=2)


def test_greedy_is_the_argmax_whatever_the_neighbours(model, tokenizer):
    model.generation_config.repetition_penalty = 5.0  # as some models' generation config asks for; it is off here
    (texts,) = zip(*sample_completions(model, tokenizer, PROMPTS, temperature=0, max_new_tokens=8), strict=True)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        ids = tokenizer(prompt)["input_ids"]
        start = len(ids)
        for _ in range(8):
            ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
            if ids[-1] == tokenizer.eos_token_id:
                break
        assert text == tokenizer.decode(ids[start:], skip_special_tokens=True)


def test_samples_are_the_model_s_own_distribution(model, tokenizer):
    """Top-k, top-p and penalties of the model's generation config are off; the frequencies are the probabilities."""
    model.generation_config.top_k, model.generation_config.top_p = 1, 0.1
    count = 4000
    (texts,) = sample_completions(
        model, tokenizer, ["7"], num_samples=count, max_new_tokens=1, temperature=0.5, batch_size=count
    )
    probabilities = (model(torch.tensor([tokenizer("7")["input_ids"]])).logits[0, -1] / 0.5).softmax(dim=-1)
    expected: dict[str, float] = {}  # several tokens are no text of their own, bytes of one character
    for token, probability in enumerate(probabilities.tolist()):
        text = tokenizer.decode([token], skip_special_tokens=True)
        expected[text] = expected.get(text, 0.0) + probability
    for text in sorted(expected, key=expected.get)[-5:]:
        assert texts.count(text) / count == pytest.approx(expected[text], abs=4 * math.sqrt(0.25 / count))


def test_model_and_random_state_are_left_as_they_were(model, tokenizer):
    model.train()
    model.model.layers[0].eval()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    one = sample_completions(model, tokenizer, PROMPTS, num_samples=3, max_new_tokens=8, seed=1)
    assert torch.equal(state, torch.get_rng_state())
    assert model.training and not model.model.layers[0].training and model.model.layers[1].training
    assert one == sample_completions(model, tokenizer, PROMPTS, num_samples=3, max_new_tokens=8, seed=1)
    assert one != sample_completions(model, tokenizer, PROMPTS, num_samples=3, max_new_tokens=8, seed=2)


@pytest.mark.parametrize("arguments", [{"temperature": -1.0}, {"temperature": 0, "num_samples": 2}, {"num_samples": 0}])
def test_impossible_sampling_is_refused(arguments, model, tokenizer):
    with pytest.raises(ValueError, match="num_samples"):
        sample_completions(model, tokenizer, PROMPTS, **arguments)
