"""Accuracy, pass@k and their intervals: against enumerated distributions; samples of a model, which leave no trace."""

import asyncio
import itertools
import math
from functools import partial

import pytest
import torch
from transformers import AutoTokenizer

from dash_trl.evaluation import (
    LocalSampler,
    bootstrap_interval,
    differences,
    evaluate,
    figures_of,
    pass_at_k,
)
from dash_trl.rewards import RewardRunner
from tests.tiny import load, refused, user

PROMPTS = ["1 + 2 = ", "the answer is ", "3"]


@pytest.fixture(scope="module")
def model(tiny_model):
    return load(tiny_model)


def test_pass_at_k_is_the_share_of_lucky_subsets():
    for n, c, k in itertools.product(range(1, 7), range(7), range(1, 7)):
        if max(c, k) > n:
            continue
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


async def of_batch(completions, answer, trainer_state, log_extra, log_metric, **_):
    log_extra("seen", answer)
    log_metric("step", trainer_state.global_step)
    return list(map(float, answer))


async def later(answer, **columns):
    return [float(one) for one in answer]


def of_one(completion, answer):
    return float(answer), {"note": 1.0}


class Stateful:
    closed = 0

    def compute_score(self, solution_str, ground_truth):
        return float(ground_truth)

    def close(self):
        self.closed += 1


def test_every_reward_that_a_trainer_takes(model, tokenizer):
    """A runner that is given is not closed: a trainer may have calls of its own in it."""
    dataset = [{"prompt": prompt, "answer": i % 2} for i, prompt in enumerate(PROMPTS)]
    own = Stateful()
    lent = Stateful()
    with RewardRunner(lent) as runner:
        for reward in (of_batch, later, of_one, [of_one], RewardRunner(of_one).rewards, own, runner):

            async def cell(reward=reward):  # a notebook runs cells in a loop
                return evaluate(model, tokenizer, dataset, reward, num_samples=2, max_completion_length=1)

            figures = asyncio.run(cell())
            assert figures["accuracy"] == pytest.approx(1 / 3), reward
        assert (own.closed, lent.closed) == (1, 0)


def test_other_rewards_are_refused_before_anything_is_sampled(tokenizer):
    for reward, message, *settings in (
        ([of_one, of_batch], "needs one reward function, .* but there are 2"),
        (RewardRunner([of_one, of_one]), "but there are 2"),
        ("a/reward-model", "is a reward model"),
        (Stateful, "but it can get only"),
        (of_one, "numbers of 1 or more", ("batch_size", 0)),
    ):
        refused(message, evaluate, None, tokenizer, [{"prompt": "1"}], reward, **dict(settings))


def sample_completions(model, tokenizer, prompts, batch_size=64, **sampling) -> list[list[str]]:
    drawn = LocalSampler(model, tokenizer, batch_size).sample(prompts, **sampling)
    return [[one.text for one in samples] for _, samples in drawn]


def test_greedy_is_the_argmax_whatever_the_neighbours(model, tokenizer, tiny_model):
    # As some models' generation configs ask for; it is off here.
    model.generation_config.update(repetition_penalty=5.0, no_repeat_ngram_size=1)
    for one in (tokenizer, AutoTokenizer.from_pretrained(tiny_model, pad_token=None)):  # pads with an end token
        (texts,) = zip(*sample_completions(model, one, PROMPTS, temperature=0, max_completion_length=8), strict=True)
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
    model.generation_config.update(top_k=1, top_p=0.1, typical_p=0.1)
    count = 4000
    (texts,) = sample_completions(
        model, tokenizer, ["7"], num_samples=count, max_completion_length=1, temperature=0.5, batch_size=count
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
    drawn = partial(sample_completions, model, tokenizer, PROMPTS, num_samples=3, max_completion_length=8)
    one = drawn(seed=1)
    assert torch.equal(state, torch.get_rng_state())
    assert model.training and not model.model.layers[0].training and model.model.layers[1].training
    assert one == drawn(seed=1) != drawn(seed=2)


# ------------------------------------------------------------ figures


def test_an_interval_is_the_middle_95_percent_of_all_resamples():
    error = 4 * math.sqrt(0.025 * 0.975 / 10_000)  # of a share that is measured on 10,000 resamples
    for values in ([0.0, 1.0, 0.25, 0.5, 0.0], [0.0, 1.0], [0.5, 0.5, 0.25]):
        means = [sum(drawn) / len(values) for drawn in itertools.product(values, repeat=len(values))]
        for end, share in zip(bootstrap_interval(values), (0.025, 0.975), strict=True):
            below = sum(mean < end - 1e-12 for mean in means) / len(means)
            up_to = sum(mean <= end + 1e-12 for mean in means) / len(means)
            assert below - error <= share <= up_to + error, values


def samples(*rewards, tokens=10, truncated=False):
    return [{"reward": reward, "tokens": tokens, "truncated": truncated} for reward in rewards]


def test_figures():
    rows = [samples(1.0, 0.0, None, 0.6), samples(None, None, None, 1.0, tokens=30), samples(0.0, 0.0, 0.5, 0.0)]
    rows[2][0]["truncated"] = True
    figures = figures_of(rows, [1, 2, 4])
    assert figures["accuracy"] == pytest.approx((2 / 3 + 1 + 0) / 3)  # of the scored ones; 0.5 is not more than 0.5
    low, high = figures["accuracy_interval"]
    assert low <= figures["accuracy"] <= high
    pass_at = {k: value for k, (value, _, _) in figures["pass_at"].items()}
    lucky = sum(map(any, itertools.combinations([1, 0, 1], 2))) / 3
    assert pass_at == {"1": pytest.approx((2 / 3 + 1 + 0) / 3), "2": pytest.approx((lucky + 0) / 2), "4": 0.0}
    assert (figures["problems"], figures["samples"]) == (3, 12)
    assert figures["failed"] == pytest.approx(4 / 12)
    assert [figures[name] for name in ("truncated", "mean_length")] == pytest.approx([1 / 12, 200 / 12])


def test_models_are_compared_problem_by_problem():
    """A problem of which one of the models has too few scored samples is left out."""
    better = [samples(1.0, 1.0), samples(0.0, 1.0), samples(0.0, 0.0), samples(1.0), samples(None)]
    worse = [samples(0.0, 1.0), samples(0.0, 0.0), samples(1.0, 0.0), samples(0.0, 1.0), samples(1.0)]
    paired = [0.25, *bootstrap_interval([0.5, 0.5, -0.5, 0.5])]
    assert differences(better, worse, [1, 2, 3]) == {
        "accuracy": paired,
        "pass@1": paired,
        "pass@2": [0.0, *bootstrap_interval([0.0, 1.0, -1.0])],
        "pass@3": [None] * 3,
    }


def test_the_chat_template_gets_the_arguments_of_training(model, tiny_model):
    """And a text for each content, whose parts it could not add to another text."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = "{{ messages[0]['content'] + '=' }}{% if enable_thinking is false %}<|im_end|>{% endif %}"
    prompt = user([{"type": "text", "text": "1 +"}, {"type": "text", "text": " 1"}])
    sample = partial(LocalSampler(model, tokenizer).sample, [prompt])
    sample()
    refused("ends with an end token", sample, chat_template_kwargs={"enable_thinking": False})
