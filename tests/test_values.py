"""V(prefix): tree-packed against one pass per prefix, for Qwen2, Qwen3, Llama, LoRA; floor, spaces, answers."""

from __future__ import annotations

import math
import random

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dash_trl.process_rewards import AnswerLogProbValue, ValueRequest
from dash_trl.process_rewards.tree import Branch, Tree, branch_mask, loop_log_probs, tree_log_probs
from dash_trl.process_rewards.values import default_force_prompt
from tests.tiny import VOCABULARY, save_tiny_model

SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2, "head_dim": 8}
MODELS = {"qwen3": (Qwen3ForCausalLM, Qwen3Config), "llama": (LlamaForCausalLM, LlamaConfig)}


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module", params=["qwen2", "qwen2 eager", *MODELS])
def model(request, tiny_model, tmp_path_factory):
    if request.param.startswith("qwen2"):
        attention = "eager" if "eager" in request.param else "sdpa"
        return AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation=attention)
    model_class, config = MODELS[request.param]
    path = save_tiny_model(tmp_path_factory.mktemp(request.param), model_class, config(**SHAPE))
    return AutoModelForCausalLM.from_pretrained(path)


def random_requests(count: int = 5, longest: int = 40) -> list[ValueRequest]:
    generator = random.Random(0)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(generator.randrange(4, 260) for _ in range(length))

    requests = []
    for _ in range(count):
        completion = ids(generator.randint(1, longest))
        inner = generator.sample(range(1, len(completion) + 1), min(4, len(completion)))
        answers = (str(generator.randrange(100)), "1 + 2")[: generator.randint(1, 2)]
        requests.append(ValueRequest(ids(generator.randint(1, 9)), completion, (0, *sorted(inner)), answers))
    return requests


@torch.no_grad()
def by_prefix(model, tokenizer, request: ValueRequest, force_prompt: str, floor: float) -> list[float]:
    """One plain pass per prefix and answer, by the definition."""
    values = []
    for boundary in request.boundaries:
        means = []
        for answer in request.answers:
            branch = tokenizer(force_prompt + answer)["input_ids"]
            offsets = tokenizer(force_prompt + answer, return_offsets_mapping=True)["offset_mapping"]
            ids = [*request.prompt_ids, *request.completion_ids[:boundary], *branch]
            log_probs = model(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
            start = len(ids) - len(branch)
            scored = [i for i, (_, end) in enumerate(offsets) if end > len(force_prompt)]
            each = [max(log_probs[start + i - 1, branch[i]].item(), floor) for i in scored]
            means.append(sum(each) / len(each))
        values.append(min(0.0, math.log(sum(math.exp(mean) for mean in means))))
    return values


@pytest.mark.parametrize("max_tokens", [1, 100, 10_000])
def test_the_tree_gives_what_a_pass_per_prefix_gives(model, tokenizer, max_tokens):
    requests = random_requests()
    before = model.config._attn_implementation
    values = AnswerLogProbValue(" = ", max_tokens_per_pass=max_tokens).score(requests, model, tokenizer)
    assert model.config._attn_implementation == before
    for request, row in zip(requests, values, strict=True):
        assert row == pytest.approx(by_prefix(model, tokenizer, request, " = ", -10.0), abs=1e-5)


def test_lora(tiny_model, tokenizer):
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    plain = AnswerLogProbValue(" = ").score(random_requests(), model, tokenizer)
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    requests = random_requests()
    values = AnswerLogProbValue(" = ").score(requests, wrapped.get_base_model(), tokenizer, call=wrapped)
    assert values != plain
    for request, row in zip(requests, values, strict=True):
        assert row == pytest.approx(by_prefix(wrapped, tokenizer, request, " = ", -10.0), abs=1e-5)


@pytest.fixture
def no_tree(tiny_model):
    """A model that is valued in a loop, a pass per boundary and answer."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model._supports_attention_backend = False
    return model


def test_models_that_mix_a_row_are_valued_in_a_loop(no_tree, tokenizer, caplog):
    requests = random_requests()
    values = AnswerLogProbValue(" = ").score(requests, no_tree, tokenizer)
    assert "one pass per boundary" in caplog.text
    for request, row in zip(requests, values, strict=True):
        assert row == pytest.approx(by_prefix(no_tree, tokenizer, request, " = ", -10.0), abs=1e-5)


@pytest.mark.parametrize("kind", ["qwen", "no_tree"])
@pytest.mark.parametrize("requests", [[], random_requests()])
def test_ranks_agree_on_the_passes_before_the_first_and_run_as_many(kind, requests, request, tokenizer):
    """Under ZeRO-3 a pass is a collective: one more or less, or an agreement between two passes, is a hang."""
    model, order, here = request.getfixturevalue(kind), [], []

    def agree(passes: int) -> int:
        order.append("agreement")
        here.append(passes)
        return passes + 2

    hook = model.register_forward_pre_hook(lambda *_: order.append("pass"))
    estimator = AnswerLogProbValue(" = ", max_tokens_per_pass=40)
    values = estimator.score(requests, model, tokenizer, passes_on_all_ranks=agree)
    hook.remove()
    assert order == ["agreement", *["pass"] * (sum(here) + 2)]
    assert (sum(here) > 1) == bool(requests)
    assert values == estimator.score(requests, model, tokenizer)


def test_branch_tokens_see_their_prefix_and_their_own_branch():
    tree = Tree((5, 6, 7), (Branch(1, (8, 9), 1), Branch(3, (4,), 0)))
    assert branch_mask(tree)[0, 0].int().tolist() == [
        [1, 0, 0, 1, 0, 0],
        [1, 0, 0, 1, 1, 0],
        [1, 1, 1, 0, 0, 1],
    ]


def test_the_first_token_of_a_branch_is_predicted_by_the_trunk(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    trees = [Tree((5, 6, 7), (Branch(1, (8, 9), 0), Branch(3, (4,), 0))), Tree((9,), (Branch(1, (9, 9), 1),))]
    with torch.no_grad():
        packed, loop = tree_log_probs(model, model, trees), loop_log_probs(model, trees)
    assert [len(branch) for tree in packed for branch in tree] == [2, 1, 1]
    for one, other in zip(packed, loop, strict=True):
        for a, b in zip(one, other, strict=True):
            assert a == pytest.approx(b, abs=1e-5)


@pytest.fixture(scope="module")
def qwen(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model)


REQUEST = ValueRequest((5, 6), (7, 8, 9), (0, 2, 3), ("12",))


def score(estimator, model, tokenizer, request=REQUEST):
    return estimator.score([request], model, tokenizer)[0]


def test_spaces_floor_and_closing(qwen, tokenizer):
    log = score(AnswerLogProbValue(" = "), qwen, tokenizer)
    assert score(AnswerLogProbValue(" = ", space="probability"), qwen, tokenizer) == pytest.approx(
        list(map(math.exp, log))
    )
    assert score(AnswerLogProbValue(" = ", floor=-0.5), qwen, tokenizer) == [
        pytest.approx(max(v, -0.5), abs=0.5) for v in log
    ]
    assert min(score(AnswerLogProbValue(" = ", floor=-0.5), qwen, tokenizer)) >= -0.5
    assert score(AnswerLogProbValue(" = ", closing="<|im_end|>"), qwen, tokenizer) != pytest.approx(log)


def test_a_token_that_straddles_the_prompt_is_the_answer_s(qwen, tokenizer):
    """ "the" is one token: tokenised apart, the model would never be asked for its own token."""
    assert tokenizer("= the")["input_ids"] != tokenizer("= th")["input_ids"] + tokenizer("e")["input_ids"]
    request = ValueRequest((5, 6), (7,), (0, 1), ("e",))
    assert score(AnswerLogProbValue("= th"), qwen, tokenizer, request) == pytest.approx(
        by_prefix(qwen, tokenizer, request, "= th", -10.0), abs=1e-5
    )


def test_missing_is_not_zero(qwen, tokenizer):
    assert all(map(math.isnan, score(AnswerLogProbValue(), qwen, tokenizer, ValueRequest((5,), (6,), (0, 1), ()))))
    assert all(map(math.isnan, score(AnswerLogProbValue(), qwen, tokenizer, ValueRequest((5,), (6,), (0, 1), ("",)))))
    assert AnswerLogProbValue().score([], qwen, tokenizer) == []
    broken = AutoModelForCausalLM.from_pretrained(qwen.name_or_path)
    broken.lm_head.weight.data[:] = math.nan
    assert all(map(math.isnan, score(AnswerLogProbValue(), broken, tokenizer)))


def test_the_model_is_left_as_it_was(qwen, tokenizer):
    qwen.train()
    qwen.model.layers[0].eval()
    score(AnswerLogProbValue(), qwen, tokenizer)
    assert qwen.training and not qwen.model.layers[0].training and qwen.model.layers[1].training
    assert all(parameter.grad is None for parameter in qwen.parameters())


def test_the_force_prompt_fits_the_template(tokenizer):
    assert default_force_prompt(tokenizer) == "\nThe answer is "
    thinking = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    thinking.chat_template = "<think>{{ messages }}</think>"
    assert default_force_prompt(thinking) == "</think>\n\nThe answer is "


@pytest.mark.parametrize("arguments", [{"force_prompt": ""}, {"space": "logit"}, {"floor": 0.0}])
def test_impossible_settings_are_refused(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        AnswerLogProbValue(**arguments)
