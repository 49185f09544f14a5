"""Configurations of tiny models of many families, and their passes, for several files of tests."""

from typing import Any

from transformers import AutoConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from dash_trl.update import ModelPasses
from tests.tiny import VOCABULARY

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
        v_head_dim=8,
    ),
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    "falcon_h1": dict(
        mamba_d_ssm=64, mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=8
    ),
    "nemotron_h": dict(
        layer_types=["linear_attention", "full_attention"],
        mamba_num_heads=8,
        mamba_head_dim=8,
        n_groups=1,
        chunk_size=8,
        ssm_state_size=8,
    ),
}


def fla(states, q, k, v, g, beta, initial_state=None, cu_seqlens=None, of=torch_chunk_gated_delta_rule, **settings):
    """The gated delta rule with FLA's signature. It notes the initial states."""
    states.append(initial_state)
    assert cu_seqlens is None
    return of(q, k, v, g=g, beta=beta, initial_state=initial_state, **settings)


MULTIMODAL = ("gemma3", "qwen3_5", "mistral3")


def config_of(name: str):
    """Return the configuration of a tiny model."""
    if name not in MULTIMODAL:
        return AutoConfig.for_model(name, **SIZES | FAMILIES[name])
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28)
    if name == "qwen3_5":
        vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=64)
        wide = dict(hidden_size=64, head_dim=64, linear_key_head_dim=64, linear_value_head_dim=64)  # for vLLM's kernels
        # Not too sharp: vLLM rounds to bf16.
        text = SIZES | DELTA | wide | dict(num_attention_heads=2, num_key_value_heads=1, initializer_range=0.05)
        ids = dict(image_token_id=296, video_token_id=297, vision_start_token_id=298, vision_end_token_id=299)
        return AutoConfig.for_model(name, text_config=text, vision_config=vision, **ids)
    text = SIZES | dict(head_dim=8)
    text |= WINDOW if name == "gemma3" else dict(model_type="mistral", sliding_window=5)
    return AutoConfig.for_model(name, text_config=text, vision_config=vision, image_token_id=299)


MOE = AutoConfig.for_model("qwen2_moe", **SIZES, **EXPERTS | dict(num_experts=8))


def passes_of(*models, **settings) -> ModelPasses:
    """Those of a run without options that rule out packing."""
    flags = ("invoked_adapter", "continuous_batching", "noisy_embeddings", "compiled")
    return ModelPasses(
        models, **{"share_prompts": None, "router_losses": False, **dict.fromkeys(flags, False), **settings}
    )
