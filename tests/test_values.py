"""V(prefix): tree-packed against one pass per prefix, LoRA, floor, spaces, thoughts. Families: `test_families.py`."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer

from dash_trl.process_rewards import AnswerLogProbValue, ValueRequest
from tests.prefix_values import by_prefix, check_values, random_requests
from tests.tiny import load, on_varlen, said


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def model(request, tiny_model):
    return load(tiny_model, attn_implementation=request.param)


def test_the_tree_gives_what_a_pass_per_prefix_gives(model, tokenizer, caplog):
    """In a pass of one tree each, of several, of all, and as on a GPU; trees are not given up for a loop."""
    requests = random_requests()
    before = model.config._attn_implementation
    for max_tokens, *dtypes in ((1,), (100,), (10_000,), (10_000, torch.float32)):
        with on_varlen(*dtypes):
            values = AnswerLogProbValue(" = ", max_tokens_per_pass=max_tokens).score(requests, model, tokenizer)
        assert model.config._attn_implementation == before
        check_values(values, model, tokenizer, requests)
    assert not said(caplog)


def test_a_trainer_s_model_with_an_adapter(train, tokenizer):
    from peft import LoraConfig

    adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    trainer = train(peft_config=adapter, learning_rate=0.0)
    estimator = AnswerLogProbValue(" = ")
    requests = random_requests()
    with trainer.accelerator.autocast():
        values = estimator(requests, trainer)
        check_values(values, trainer.model, tokenizer, requests)
    with trainer.model.disable_adapter():
        assert estimator(requests, trainer) != values


@pytest.fixture(scope="module")
def qwen(tiny_model):
    return load(tiny_model)


@pytest.fixture
def no_tree(tiny_model):
    """A model that is valued in a loop, a pass per boundary and answer."""
    model = load(tiny_model)
    model.model.sinks = torch.nn.Parameter(torch.zeros(1))
    return model


REQUEST = ValueRequest((5, 6), (7, 8, 9), (0, 2, 3), ("12",))


def score(estimator, model, tokenizer, request=REQUEST):
    return estimator.score([request], model, tokenizer)[0]


def test_spaces_floor_and_closing(qwen, tokenizer):
    log = score(AnswerLogProbValue(" = "), qwen, tokenizer)
    probabilities = score(AnswerLogProbValue(" = ", space="probability"), qwen, tokenizer)
    assert probabilities == pytest.approx(list(map(math.exp, log)))
    assert score(AnswerLogProbValue(" = ", closing="<|im_end|>"), qwen, tokenizer) != pytest.approx(log)
    sure = load(qwen.name_or_path)
    sure.lm_head.weight.data *= 3  # log P below −10 counts as −10
    floored = score(AnswerLogProbValue(" = "), sure, tokenizer)
    assert floored == pytest.approx(by_prefix(sure, tokenizer, REQUEST, " = ", -10.0), abs=1e-5)
    assert floored != pytest.approx(by_prefix(sure, tokenizer, REQUEST, " = ", -math.inf), abs=0.1)


def test_a_token_that_straddles_the_prompt_is_the_answer_s(qwen, tokenizer):
    """ "the" is one token: tokenised apart, the model would never be asked for its own token."""
    assert tokenizer("= the")["input_ids"] != tokenizer("= th")["input_ids"] + tokenizer("e")["input_ids"]
    request = ValueRequest((5, 6), (7,), (0, 1), ("e",))
    check_values([score(AnswerLogProbValue("= th"), qwen, tokenizer, request)], qwen, tokenizer, [request], "= th")


def test_missing_is_not_zero(qwen, tokenizer):
    broken = load(qwen.name_or_path)
    broken.lm_head.weight.data[:] = math.nan
    for model, answers in (qwen, ()), (qwen, ("",)), (broken, ("12",)):
        assert all(map(math.isnan, score(AnswerLogProbValue(), model, tokenizer, replace(REQUEST, answers=answers))))
    assert AnswerLogProbValue().score([], qwen, tokenizer) == []


# ----------------------------------------------------------------------------------------- what is forced, and where

CLOSED = "\nThe answer is 9"
OPEN = "</think>\n\nThe answer is 9"
CHAT = "<|im_start|>assistant\n"
THOUGHTS = [  # prompt, completion; as these models write them
    ("4 + 5 = ", "the sum is 9<|im_end|>"),  # no thought
    (CHAT, "<think>\nthe 4 + 5\n</think>\n\n9<|im_end|>"),  # Qwen3: the model opens it
    (CHAT + "<think>\n", "the 4 + 5\n</think>\n\n9<|im_end|>"),  # R1 distills: the prompt opens it
    (CHAT + "<think>\n\n</think>\n\n", "the 4 + 5 = 9<|im_end|>"),  # Qwen3 without thinking: the prompt closes it
    (CHAT, "<think>\nthe 4 < 5 > 3"),  # truncated
    (CHAT + "<think>", "4.</think>9? <think>4 + 5.</think>9<think>"),  # a second thought
]


def asked(request: ValueRequest, tokenizer, model, value: AnswerLogProbValue) -> list[str]:
    """The texts whose answer a model is asked for, one pass for each."""
    texts = []
    hook = model.register_forward_pre_hook(
        lambda module, given, named: texts.append(tokenizer.decode(named["input_ids"][0])), with_kwargs=True
    )
    assert len(score(value, model, tokenizer, request)) == len(request.boundaries)
    hook.remove()
    return texts


def expected_text(text: str, end: int) -> str:
    """Character by character; then what is forced there. Half a tag is none."""
    is_open = False
    for i in range(end):
        for tag in ("<think>", "</think>"):
            if text.startswith(tag, i) and i + len(tag) <= end:
                is_open = tag == "<think>"
    return text[:end] + (OPEN if is_open else CLOSED)


@pytest.fixture(scope="module", params=["tags are several tokens", "tags are tokens"])
def thinking_tokenizer(request, tokenizer):
    if request.param == "tags are several tokens":
        return tokenizer
    special = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    special.add_tokens(["<think>", "</think>"])
    return special


def test_a_thought_is_closed_where_it_is_open_and_nowhere_else(thinking_tokenizer, no_tree):
    """A force prompt of the user's is taken as it is."""
    for texts in THOUGHTS:
        prompt, completion = (tuple(thinking_tokenizer(text)["input_ids"]) for text in texts)
        boundaries = tuple(range(len(completion) + 1))
        ends = [len(thinking_tokenizer.decode(prompt + completion[:boundary])) for boundary in boundaries]
        request = ValueRequest(prompt, completion, boundaries, ("9",))
        found = asked(request, thinking_tokenizer, no_tree, AnswerLogProbValue())
        assert found == [expected_text("".join(texts), end) for end in ends], texts
        found = asked(request, thinking_tokenizer, no_tree, AnswerLogProbValue("</think>="))
        assert found == ["".join(texts)[:end] + "</think>=9" for end in ends], texts
