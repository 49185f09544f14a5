"""Packed passes give the log-probs of one row at a time, for every architecture that claims to run them."""

import copy
import random
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import cloudpickle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainerCallback,
)
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from dash_trl import DASHTrainer
from dash_trl.rollout import Survivors
from dash_trl.update import ModelPasses, packed_log_probs, varlen_flaw
from tests.tiny import on_varlen, run

SIZES = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.2,
)
GPT2 = {**SIZES, "intermediate_size": None, "n_positions": 64, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
ARCHITECTURES = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "learned positions": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
}


def passes_of(*models: Any, **settings: Any) -> ModelPasses:
    """Those of a run without options that rule out packing."""
    flags = ("invoked_adapter", "continuous_batching", "noisy_embeddings", "compiled")
    return ModelPasses(
        models, **{"share_prompts": None, "router_losses": False, **dict.fromkeys(flags, False), **settings}
    )


def packable(model: torch.nn.Module) -> torch.nn.Module:
    """A model that is ready for packed passes."""
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    assert passes_of(model).padding_free
    return model


def test_a_micro_batch_of_dummies_has_a_gradient_of_zeros():
    model = packable(ARCHITECTURES["qwen2"]())
    mask = torch.zeros(2, 3, dtype=torch.long)
    mask[0, :2] = 1
    packed_log_probs(model, torch.ones(2, 3, dtype=torch.long), mask, 1, flash=False)[0].sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def in_float64(model: torch.nn.Module) -> None:
    """Lets the model compute in float64 throughout: Transformers' norms and TRL's LM head have parts in float32."""
    for module in model.double().modules():
        if type(module).__name__.endswith("RMSNorm"):
            norm = torch.nn.functional.rms_norm
            module.forward = partial(norm, normalized_shape=module.weight.shape, weight=module.weight, eps=1e-6)

    def forward(shift_labels: torch.Tensor, fused_lm_head: bool = False, **inputs: torch.Tensor) -> SimpleNamespace:
        states = model.base_model(**inputs, use_cache=False).last_hidden_state[:, : shift_labels.shape[1]]
        every = model.get_output_embeddings()(states).log_softmax(dim=-1)
        return SimpleNamespace(log_probs=every.gather(2, shift_labels[..., None])[..., 0], aux_loss=None)

    model.forward = forward


def random_groups(seed: int, groups: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts of 2 to 9 tokens, each of 1 to 4 rows, and their completions of 1 to 8 tokens."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(97) for _ in range(draw.randint(2, 9))] for _ in range(groups)]
    prompts = [prompt for prompt in prompts for _ in range(draw.randint(1, 4))]
    return prompts, [[draw.randrange(97) for _ in range(draw.randint(1, 8))] for _ in prompts]


def inputs_of(passes: ModelPasses, prompts: list[list[int]], completions: list[list[int]]) -> dict[str, Any]:
    """A pass over all rows, with an empty row at the end."""
    rollouts = Survivors.of_tokens(prompts, completions, pad_token_id=0)
    return passes.inputs(rollouts, [*range(len(prompts))], size=len(prompts) + 1, pad_token_id=0)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_padded_pass_gives_what_a_packed_pass_gives(name):
    torch.manual_seed(0)
    model = packable(ARCHITECTURES[name]().eval())
    packing = passes_of(model)
    inputs = inputs_of(packing, *random_groups(0, 2))
    packed, entropies, _ = packing.run(partial(packing.log_probs, None), model, inputs, compute_entropy=True)
    assert torch.equal(entropies > 0, inputs["completion_mask"].bool())
    model.set_attn_implementation("eager")
    this, padding = SimpleNamespace(accelerator=MagicMock()), passes_of(model)  # not in the dtype of an earlier trainer
    trls = partial(GRPOTrainer._get_per_token_logps_and_entropies, this)
    trial = {"vocabulary": 97, "pad_token_id": 0, "device": torch.device("cpu")}
    padding.prepare(model, [model], trls, **trial, ranks=SimpleNamespace(rank=1, largest=int), gradients=False)
    trls = padding.padded(trls)
    padded, *_ = padding.run(partial(padding.log_probs, trls), model, inputs)
    torch.testing.assert_close(packed, padded, atol=1e-5, rtol=1e-5)


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    name=st.sampled_from(sorted(ARCHITECTURES)),
    groups=st.integers(1, 4),
    shared=st.booleans(),
    on_gpu=st.booleans(),
)
def test_packed_rows_have_the_gradients_of_one_row_at_a_time_in_float64(seed, name, groups, shared, on_gpu):
    """Log-probs and the gradients of all parameters, to 1e-9: prompts are shared or not, on a CPU or as on a GPU."""
    torch.manual_seed(0)
    model = ARCHITECTURES[name]().eval()
    passes = passes_of(model, share_prompts=shared)
    in_float64(model)
    prompts, completions = random_groups(seed, groups)
    inputs = inputs_of(passes, prompts, completions)
    counted = inputs["completion_mask"].bool()
    weights = torch.randn(int(counted.sum()), dtype=torch.float64)

    def gradients(found: torch.Tensor) -> list[torch.Tensor]:
        model.zero_grad()
        (found * weights).sum().backward()
        return [found.detach(), *(parameter.grad.clone() for parameter in model.parameters())]

    rows = [(torch.tensor([[*prompt, *own]]), len(own)) for prompt, own in zip(prompts, completions, strict=True)]
    alone = gradients(torch.cat([model(row[:, 1:], input_ids=row).log_probs[0, -length:] for row, length in rows]))
    with on_varlen(torch.float64) if on_gpu else nullcontext():
        found, *_ = passes.run(partial(passes.log_probs, None), model, inputs)
        together = gradients(found[counted])
    assert not found[~counted].any()
    torch.testing.assert_close(together, alone, atol=1e-9, rtol=1e-9)
    assert len(inputs["layout"].tokens) == sum(row.numel() for row, _ in rows) - shared * sum(
        len(one) - 1  # the last token is computed per row
        for one, other in pairwise(prompts)
        if one == other
    )


def test_varlen_flaws():
    for config, dtype, said in (
        (LlamaConfig(**SIZES), torch.bfloat16, None),
        (LlamaConfig(**SIZES), torch.float32, "no varlen kernel for torch.float32 on cpu (use bf16=True)"),
        (LlamaConfig(**SIZES, head_dim=12), torch.bfloat16, "a multiple of 8, not 12"),
        (LlamaConfig(**SIZES, head_dim=264), torch.bfloat16, "at most 256 numbers"),
        (LlamaConfig(**SIZES, attention_dropout=0.1), torch.bfloat16, "no dropout"),
        (GPT2Config(**{**GPT2, "attn_pdrop": 0.1}), torch.bfloat16, "no dropout"),
        (GPT2Config(**{**GPT2, "embd_pdrop": 0.1}), torch.bfloat16, None),
        (LlamaConfig(**SIZES, v_head_dim=16), torch.bfloat16, "values of the keys' size"),
    ):
        model = AutoModelForCausalLM.from_config(config).to(dtype)
        with on_varlen(torch.bfloat16):
            flaw = varlen_flaw(model, torch.device("cpu"))
        assert flaw is None if said is None else said in flaw, (config, flaw)


def test_models_that_mix_samples_are_padded():
    for config, said in (
        (MistralConfig(**SIZES, sliding_window=4), None),
        (Qwen2Config(**SIZES, layer_types=["full_attention", "chunked_attention"]), "type chunked_attention"),
        (LlamaConfig(**SIZES, attn_implementation="eager"), "'eager'"),
        (GptOssConfig(**SIZES, head_dim=8, num_local_experts=2), "sinks"),
    ):
        reference = AutoModelForCausalLM.from_config(config)
        reason = passes_of(ARCHITECTURES["qwen2"](), reference).padded_because
        assert reason is None if said is None else said in reason, config


def test_what_leaves_the_process_needs_nothing_of_ours(tiny_model, tmp_path):
    """A pickle, and a copy."""
    kept = []

    class Keep(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            kept.append(cloudpickle.dumps(model))

    model = run(DASHTrainer, tiny_model, tmp_path, callbacks=[Keep()]).model
    ids = torch.arange(1, 7).unsqueeze(0)
    for pickled in (*kept, cloudpickle.dumps(copy.deepcopy(model))):
        loaded = cloudpickle.loads(pickled)
        assert b"dash_trl" not in pickled and loaded.config._attn_implementation == "sdpa"
        torch.testing.assert_close(loaded.cpu()(input_ids=ids).logits, model.cpu()(input_ids=ids).logits)
