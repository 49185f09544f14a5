"""Packed passes give the log-probs of one row at a time, for every architecture that claims to run them."""

import copy
import pickle
import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainerCallback,
)
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from dash_trl import DASHTrainer
from dash_trl.update import ModelPasses, PackedLayout, packed_log_probs
from tests.tiny import run

SIZES = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.2,
)
GPT2: dict[str, Any] = {"vocab_size": 97, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
GPT2 |= {"initializer_range": 0.2, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
ARCHITECTURES = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "learned positions": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
}


def batch() -> tuple[torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Left-padded prompts, right-padded completions, three rows of one prompt, an empty row, one completion token.

    Returns:
        ids, mask, completion columns, same_prompt.
    """
    prompt, completion = torch.tensor([5, 5, 5, 0, 3]), torch.tensor([9, 1, 4, 0, 2])
    ids = torch.randint(1, 97, (5, 7 + 9), generator=torch.Generator().manual_seed(0))
    ids[1:3, :7] = ids[0, :7]
    columns = torch.arange(16)
    mask = ((columns >= 7 - prompt[:, None]) & (columns < 7 + completion[:, None])).long()
    return ids * mask, mask, 9, torch.tensor([False, True, True, False, False])


def passes_of(*models: Any, **settings: Any) -> ModelPasses:
    """Those of a run without options that rule out packing."""
    flags = ("virtual_tokens", "invoked_adapter", "continuous_batching", "noisy_embeddings", "compiled")
    return ModelPasses(
        models, **{"share_prompts": None, "router_losses": False, **dict.fromkeys(flags, False), **settings}
    )


def packable(model: torch.nn.Module) -> torch.nn.Module:
    """A model that is ready for packed passes."""
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    assert passes_of(model).padding_free
    return model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_equals_one_row_at_a_time(name):
    """Log-probs, where rows share their prompt and where they do not; those of a padded pass are the same."""
    torch.manual_seed(0)
    model = packable(ARCHITECTURES[name]().eval())
    ids, mask, keep, same = batch()
    expected = torch.zeros(5, keep)
    for row in (0, 1, 2, 4):
        tokens, length = ids[row][mask[row].bool()], int(mask[row, 7:].sum())
        found = model(input_ids=tokens[None]).logits[0, -length - 1 : -1].log_softmax(dim=-1)
        expected[row, :length] = found.gather(1, tokens[-length:, None])[:, 0]

    for shared in (None, same):
        options = {"flash": False, "same_prompt": shared, "compute_entropy": True}
        logps, entropies, _ = packed_log_probs(model, ids, mask, keep, **options)
        torch.testing.assert_close(logps, expected, atol=1e-5, rtol=1e-5)
        assert entropies.shape == (5, keep) and (entropies[0] > 0).all() and (entropies[3] == 0).all()
        assert len(PackedLayout.of(mask, keep, shared).tokens) == 34 - 2 * 4 * (shared is not None)
    model.set_attn_implementation("eager")
    this, real = SimpleNamespace(accelerator=Accelerator(cpu=True)), [0, 1, 2, 4]
    padded = passes_of(model).padded(partial(GRPOTrainer._get_per_token_logps_and_entropies, this))
    logps = padded(model, ids[real], mask[real], keep)[0]
    torch.testing.assert_close(logps, expected[real], atol=1e-5, rtol=1e-5)


def test_a_micro_batch_of_dummies_has_a_gradient_of_zeros():
    model = packable(ARCHITECTURES["qwen2"]())
    mask = torch.zeros(2, 3, dtype=torch.long)
    mask[0, :2] = 1
    packed_log_probs(model, torch.ones(2, 3, dtype=torch.long), mask, 1, flash=False)[0].sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def in_float64(model: torch.nn.Module) -> Callable[..., SimpleNamespace]:
    """A pass of the model in float64 throughout: Transformers' norms and TRL's LM head have parts in float32."""
    for module in model.double().modules():
        if type(module).__name__.endswith("RMSNorm"):
            norm = torch.nn.functional.rms_norm
            module.forward = partial(norm, normalized_shape=module.weight.shape, weight=module.weight, eps=1e-6)

    def one_pass(labels: torch.Tensor, fused_lm_head: bool, **inputs: torch.Tensor) -> SimpleNamespace:
        every = model(**inputs, use_cache=False).logits[:, :-1].log_softmax(dim=-1)
        return SimpleNamespace(log_probs=every.gather(2, inputs["input_ids"][:, 1:, None])[..., 0], aux_loss=None)

    return one_pass


def random_groups(seed: int, groups: int) -> tuple[torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Groups of 1 to 4 rows with prompts of 2 to 9 tokens and completions of 1 to 8, and an empty row at the end."""
    generator = random.Random(seed)
    sizes = [(generator.randint(2, 9), generator.randint(1, 4)) for _ in range(groups)]
    prompts = torch.tensor([*(prompt for prompt, rows in sizes for _ in range(rows)), 0])
    same = torch.tensor([*(row > 0 and prompt > 2 for prompt, rows in sizes for row in range(rows)), False])
    completions = torch.tensor([*(generator.randint(1, 8) for _ in same[1:]), 0])
    ids = torch.randint(1, 97, (len(same), 9 + 8), generator=torch.Generator().manual_seed(seed))
    for row in same.nonzero()[:, 0].tolist():
        ids[row, :9] = ids[row - 1, :9]
    columns = torch.arange(9 + 8)
    mask = ((columns >= 9 - prompts[:, None]) & (columns < 9 + completions[:, None])).long()
    return ids * mask, mask, 8, same


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), name=st.sampled_from(sorted(ARCHITECTURES)), groups=st.integers(1, 4))
def test_shared_prompts_give_the_gradients_of_one_row_at_a_time_in_float64(seed, name, groups):
    """Log-probs and the gradients of all parameters, to 1e-9."""
    torch.manual_seed(0)
    model = ARCHITECTURES[name]().eval()
    assert passes_of(model).padding_free
    one_pass = in_float64(model)
    ids, mask, keep, same = random_groups(seed, groups)
    weights = torch.randn(len(ids), keep, dtype=torch.float64) * mask[:, -keep:]

    def gradients(rows: list[tuple[torch.Tensor, torch.Tensor]], **kwargs: Any) -> list[torch.Tensor]:
        model.zero_grad()
        found = torch.cat([packed_log_probs(one_pass, *row, keep, flash=False, **kwargs)[0] for row in rows])
        (found * weights[: len(found)]).sum().backward()
        return [found.detach(), *(parameter.grad.clone() for parameter in model.parameters())]

    alone = gradients([(ids[row : row + 1], mask[row : row + 1]) for row in range(len(ids) - 1)])
    together = gradients([(ids, mask)], same_prompt=same)
    assert not together[0][-1].any()
    torch.testing.assert_close([together[0][:-1], *together[1:]], alone, atol=1e-9, rtol=1e-9)
    saved = ((mask[:, :-keep].sum(dim=1) - 1) * same).sum()  # the last token of a shared prompt is computed per row
    assert len(PackedLayout.of(mask, keep, same).tokens) == mask.sum() - saved


def test_flash_attention_gets_its_arguments():
    """The prompt's first 4 tokens are computed once; the queries of the three rows that share it see them as keys."""
    ids, mask, keep, same = batch()
    inputs: dict[str, Any] = {}

    def model(**given):
        inputs.clear()
        inputs.update(given)
        return SimpleNamespace(log_probs=torch.zeros(1, given["input_ids"].shape[1] - 1), aux_loss=None)

    packed_log_probs(model, ids, mask, keep, flash=True)
    assert inputs["cu_seq_lens_q"].tolist() == [0, 14, 20, 29, 34] and inputs["cu_seq_lens_q"].dtype == torch.int32
    assert inputs["max_length_q"] == 14 and not {"attention_mask", "key_tokens", "trees"} & inputs.keys()
    assert inputs["position_ids"][0].tolist() == [*range(14), *range(6), *range(9), *range(5)]
    packed_log_probs(model, ids, mask, keep, flash=True, same_prompt=same)
    assert inputs["cu_seq_lens_q"].tolist() == [0, 4, 14, 16, 21, 26] and inputs["max_length_q"] == 10
    assert inputs["cu_seq_lens_k"].tolist() == [0, 4, 18, 24, 33, 38] and inputs["max_length_k"] == 14
    prompt = [*range(4)]
    keys = [*prompt, *range(14), *prompt, 14, 15, *prompt, *range(16, 21), *range(21, 26)]
    assert inputs["key_tokens"].tolist() == keys
    assert inputs["position_ids"][0].tolist() == [*range(14), *range(4, 6), *range(4, 9), *range(5)]


def test_models_that_mix_samples_are_padded():
    windowed = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4))
    eager = ARCHITECTURES["llama"]()
    eager.set_attn_implementation("eager")
    part = Qwen2ForCausalLM(Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=1))
    for model, said in ((windowed, "plain causal"), (eager, "'eager'"), (part, "plain causal")):
        assert said in passes_of(ARCHITECTURES["qwen2"](), model).padded_because  # a reference model
    assert windowed.config._attn_implementation == "sdpa"
    assert passes_of(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None))).padding_free


class WithoutUs(pickle.Unpickler):
    """As in a process where there is no `dash_trl`."""

    def find_class(self, module, name):
        assert not module.startswith("dash_trl"), f"{module}.{name}"
        return super().find_class(module, name)


def test_what_leaves_the_process_needs_nothing_of_ours(tiny_model, tmp_path):
    """A pickle, and a copy."""

    class Keep(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            torch.save(model, tmp_path / "while training")

    model = run(DASHTrainer, tiny_model, tmp_path / "out", callbacks=[Keep()]).model
    torch.save(copy.deepcopy(model), tmp_path / "copy")
    unpickling = SimpleNamespace(**{**vars(pickle), "Unpickler": WithoutUs})
    ids = torch.arange(1, 7).unsqueeze(0)
    for name in ("while training", "copy"):
        loaded = torch.load(tmp_path / name, weights_only=False, pickle_module=unpickling)
        assert loaded.config._attn_implementation == "sdpa"
        torch.testing.assert_close(loaded.cpu()(input_ids=ids).logits, model.cpu()(input_ids=ids).logits)
