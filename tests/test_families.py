"""Families of models with windows, with recurrent or convolutional layers, or with a vision tower, trained on text."""

from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM
from trl import GRPOTrainer

from dash_trl import DASHTrainer
from tests.tiny import VOCABULARY, assert_same_update, parameters, run, save_tiny_model

SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.2,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=1,
)
DELTA = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    layer_types=["linear_attention", "full_attention"],
)
MAMBA = dict(mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=8)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)
WINDOW = dict(sliding_window=6, layer_types=["sliding_attention", "full_attention"])
FAMILIES: dict[str, dict[str, Any]] = {
    # windows shorter than the prompts
    "mistral": dict(sliding_window=5),
    "qwen2": dict(use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "olmo3": WINDOW,
    "gemma2": dict(head_dim=8, **WINDOW),
    "gemma3_text": dict(head_dim=8, **WINDOW),
    "gemma4_text": dict(head_dim=8, **WINDOW),
    "ministral3": dict(head_dim=8, sliding_window=5),
    # layers with a state
    "qwen3_5_text": dict(head_dim=8, **DELTA),
    "qwen3_next": dict(head_dim=8, **DELTA, **EXPERTS),
    "olmo_hybrid": DELTA,
    "kimi_linear": dict(
        layer_types=["linear_attention", "full_attention"],
        num_key_value_heads=4,
        linear_head_dim=8,
        linear_num_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
    ),
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    "bamba": dict(**MAMBA, attn_layer_indices=[1]),
    "falcon_h1": dict(mamba_d_ssm=64, **MAMBA),
    "nemotron_h": dict(
        layer_types=["linear_attention", "full_attention"],
        mamba_num_heads=8,
        mamba_head_dim=8,
        n_groups=1,
        chunk_size=8,
        ssm_state_size=8,
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_update_is_trls(name, tmp_path):
    """In packed passes, in which the rows of a group share their prompt."""
    config = AutoConfig.for_model(name, **SIZES | FAMILIES[name])
    model = save_tiny_model(tmp_path / "model", config=config)
    settings: dict[str, Any] = {"router_aux_loss_coef": 0.0} if name in ("qwen3_next", "kimi_linear") else {}
    settings |= {"learning_rate": 0.1, "beta": 0.04, "gradient_checkpointing": True}
    trl = run(GRPOTrainer, model, tmp_path / "out", **settings)
    dash = run(DASHTrainer, model, tmp_path / "out", **settings, gradient_filter_threshold=None)
    start = parameters(AutoModelForCausalLM.from_pretrained(model))
    figures = dash.state.log_history[0]
    assert figures["packing/padding_free"] == 1 and figures["packing/shared_tokens"] > 0
    assert_same_update(start, parameters(trl.model), parameters(dash.model), tolerance=1e-4)
