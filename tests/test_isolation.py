"""Models in which packed samples see each other are detected, and are trained and valued without packing."""

import copy
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    DogeConfig,
    DogeForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
)
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from dash_trl import DASHTrainer
from dash_trl.process_rewards import AnswerLogProbValue
from dash_trl.update import TreeShape, isolation_flaw, packed_log_probs, packing_flaw, tree_attention, varlen_arguments
from tests.models import MOE, SIZES, passes_of
from tests.prefix_values import check_values, random_requests
from tests.tiny import VOCABULARY, assert_same_update, load, on_varlen, refused, run, save_tiny_model

MODELS = {
    "nemotron": (NemotronForCausalLM, NemotronConfig(**SIZES)),
    # Its mask depends on the values of the keys; A is 0 at first, so that no log-prob shows it yet.
    "doge": (DogeForCausalLM, DogeConfig(**SIZES)),
    "roberta": (RobertaForCausalLM, RobertaConfig(**SIZES, is_decoder=True)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES)),
    "qwen2 moe": (Qwen2MoeForCausalLM, MOE),
}
BLIND = ("qwen2", "qwen2 moe")  # the others see packed samples before their own


def made(name: str, dtype: torch.dtype, scale: float) -> torch.nn.Module:
    torch.manual_seed(0)
    kind, config = MODELS[name]
    config = copy.deepcopy(config)
    config.initializer_range = scale
    return kind(config).to(dtype).eval()


def flaw_of(model: torch.nn.Module, *, shared: bool = False) -> str | None:
    add_fused_lm_head(model)
    assert passes_of(model).padding_free

    def padded(ids, mask, keep):
        outputs = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), fused_lm_head=True)
        return (outputs.log_probs[:, -keep:],)

    with torch.no_grad():
        packed = partial(packed_log_probs, model, flash=False, same_prompt=torch.tensor([False, shared, shared]))
        return packing_flaw(packed, padded, model, vocabulary=VOCABULARY, device=torch.device("cpu"), shared=shared)


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        (torch.float32, 0.2),  # sharp
        (torch.bfloat16, 0.02),  # untrained
    ],
)
def test_the_verdict(tokenizer, caplog, dtype, scale):
    """Of the update on packed rows, and of V(prefix) on trees: one that cannot do them computes prefix by prefix."""
    requests = random_requests(2)
    estimator = AnswerLogProbValue(" = ")
    for name in MODELS:
        model = made(name, dtype, scale)
        flaw = flaw_of(model)
        assert (flaw is None) == (name in BLIND), (name, flaw)
        caplog.clear()
        values = estimator.score(requests, model, tokenizer)
        assert ("cannot do tree passes" in caplog.text) == (name not in BLIND), name
        if name == "nemotron" and dtype == torch.float32:
            check_values(values, model, tokenizer, requests)
            caplog.clear()
            estimator.score(requests, model, tokenizer)
            assert not caplog.text, "it is said once"


def test_a_layer_that_ignores_its_window_is_found():
    """Though the window is longer than the samples of the test."""
    window = {"use_sliding_window": True, "sliding_window": 99, "max_window_layers": 0}
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, **window)).eval()
    assert flaw_of(model) is None
    model.model.layers[1].self_attn.sliding_window = None
    assert "differ" in str(flaw_of(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.02, 0.2])
def test_a_kernel_that_is_wrong_is_found(dtype, scale):
    """An upper-left causal mask is right where no sequence has more keys than queries."""
    model = made("qwen2", dtype, scale)
    for fault, flawed in (
        ("", [False, False]),
        ("upper-left", [False, True]),
        ("alone", [False, True]),
        ("leak", [True, True]),
        ("no gradient", [scale == 0.2] * 2),  # an untrained model hardly depends on the keys
    ):
        with on_varlen(dtype, fault=fault):
            found = [flaw_of(model, shared=shared) for shared in (False, True)]
        assert [one is not None for one in found] == flawed, (fault, found)


@pytest.mark.parametrize("name", ["nemotron", "qwen2 moe"])
def test_the_update_is_trls(name, tmp_path, caplog):
    """The proof is taken where the trainer begins, and its verdict is followed."""
    model = save_tiny_model(tmp_path / "model", *MODELS[name])
    settings = {"router_aux_loss_coef": 0.0} if "moe" in name else {}
    settings |= {"max_steps": 2, "learning_rate": 0.3, "beta": 0.04}
    trl = run(GRPOTrainer, model, tmp_path, **settings)
    dash = run(DASHTrainer, model, tmp_path, gradient_filter_threshold=None, **settings)
    assert_same_update(model, trl, dash)
    assert {log["packing/padding_free"] for log in dash.state.log_history[:2]} == {float(name in BLIND)}
    assert (f"{type(dash.model).__name__}: model passes are padded" in caplog.text) == (name not in BLIND)
    assert [one.config._attn_implementation for one in (dash.model, dash.ref_model)] == ["sdpa"] * 2


def test_a_reference_model_that_sees_more_is_padded_with_the_policy(train, caplog):
    def prepare(trainer):
        trainer.ref_model.set_attn_implementation("eager")

    trainer = train(beta=0.04, prepare=prepare)
    assert trainer.state.log_history[0]["packing/padding_free"] == 0
    assert "padding-free, because the log-probs of a sample differ" in caplog.text
    assert trainer.model.config._attn_implementation == "sdpa"


def test_a_rank_whose_model_takes_trees_follows_the_others(tiny_model, tokenizer):
    model = load(tiny_model).eval()
    asked = []

    def most(number: int) -> int:
        asked.append(number)
        return max(number, 1)  # another rank found a flaw

    requests = random_requests(2)
    ranks = SimpleNamespace(agree=lambda function, *arguments: function(*arguments), largest=most)
    autocast = SimpleNamespace(autocast=nullcontext)
    AnswerLogProbValue(" = ")(
        requests, SimpleNamespace(ranks=ranks, accelerator=autocast, model=model, _tokenizer=tokenizer)
    )
    assert asked == [0, sum(len(request.boundaries) * len(request.answers) for request in requests)]


def test_a_mask_of_the_models_own_is_not_dropped():
    """Nor is dropout."""
    states = torch.zeros(1, 1, 2, 8)
    kernel = varlen_arguments([TreeShape(2)], torch.device("cpu"))
    for mask, dropout, said in (
        (torch.zeros(1, 1, 2, 2), 0.0, "Module has an attention mask of its own"),
        (None, 0.1, "has no dropout"),
    ):
        refused(
            said, tree_attention, torch.nn.Module(), states, states, states, mask, trees=(), dropout=dropout, **kernel
        )


def packed(samples, *, leak: float = 0.0, regrouped: float = 0.0):
    """Log-probs that depend on a sample's own tokens, and a little on others.

    Args:
        samples: the token ids.
        leak: size of the effect of the sample before.
        regrouped: size of random changes by any other token of the row, as in a mixture of experts.
    """
    generator = torch.Generator().manual_seed(hash(tuple(map(tuple, samples))) % 2**31)
    found = [torch.tensor(sample).double() / 100 for sample in samples]
    for before, one in zip(samples, found[1:], strict=False):
        one += leak * (sum(before) % 1000) / 1000
    return [one + regrouped * torch.randn(one.shape, generator=generator) for one in found]


def test_what_other_tokens_change_everywhere_is_no_leak():
    for fault, leaks in (
        ({"leak": 1e-4}, True),
        ({"regrouped": 0.01}, False),
        ({"regrouped": 0.01, "leak": 0.5}, True),
    ):
        flaw = isolation_flaw(partial(packed, **fault), packed, vocabulary=VOCABULARY, dtype=torch.bfloat16)
        assert ("change the log-probs of the next" in str(flaw)) == leaks, (fault, flaw)
        assert leaks or flaw is None, flaw
