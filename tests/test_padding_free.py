"""Packed passes give the log-probs of one row at a time, and compute the prompt of several rows once."""

import copy
import random
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import cloudpickle
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainerCallback,
)

from dash_trl.update import TreeShape, has_dropout, varlen_arguments, varlen_flaw
from tests.models import SIZES, passes_of
from tests.tiny import on_varlen, rows_of, save_tiny_model

GPT2 = {**SIZES, "intermediate_size": None, "n_positions": 64, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
ARCHITECTURES = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)),
    "learned positions": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
}


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
    rows = [*range(len(prompts))]  # and an empty one
    inputs = passes.inputs(rows_of(prompts, completions), rows, size=len(prompts) + 1, pad_token_id=0)
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


def test_few_graphs_for_all_trees(monkeypatch):
    """The real `varlen_attn`, on tensors without numbers, which autocast does not know."""
    monkeypatch.setattr("torch.is_autocast_enabled", lambda kind: False)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with torch.device("meta"):
        model = ARCHITECTURES["qwen2"]().bfloat16()
    assert passes_of(model).padding_free
    torch.compiler.reset()
    model.model.compile(backend=backend, fullgraph=True)
    for count in range(1, 13):
        trees = [TreeShape(5 + count, (3, 4), (5 + count,) * 2) if count % 3 else TreeShape(5 + count)] * count
        ids = torch.zeros(1, sum(map(len, trees)), dtype=torch.int64, device="meta")
        attention = varlen_arguments(trees, ids.device) | {"attention_mask": ids[None, None], "trees": trees}
        model.model(ids, position_ids=ids, use_cache=False, **attention).last_hidden_state.sum().backward()
    assert len(graphs) <= 4  # torch.compile gives up after 8


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


def test_what_leaves_the_process_needs_nothing_of_ours(train):
    """A pickle, and a copy."""
    kept = []

    class Keep(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            kept.append(cloudpickle.dumps(model))

    model = train(callbacks=[Keep()]).model
    ids = torch.arange(1, 7).unsqueeze(0)
    for pickled in (*kept, cloudpickle.dumps(copy.deepcopy(model))):
        loaded = cloudpickle.loads(pickled)
        assert b"dash_trl" not in pickled and loaded.config._attn_implementation == "sdpa"
        torch.testing.assert_close(loaded.cpu()(input_ids=ids).logits, model.cpu()(input_ids=ids).logits)


# ------------------------------------------------------------------------------------------------ shared prompts


SMALL = dict(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, num_key_value_heads=2, vocab_size=9)


def test_dropout_is_seen():
    for config, drawn in (
        (OPTConfig(dropout=0.1, word_embed_proj_dim=8, **SMALL), True),  # a float, not a module
        (OPTConfig(dropout=0.0, word_embed_proj_dim=8, **SMALL), False),
        (MixtralConfig(router_jitter_noise=0.1, **SMALL), True),
        (FalconConfig(**SMALL), False),  # Dropout(0.0)
    ):
        assert has_dropout(AutoModelForCausalLM.from_config(config)) == drawn, config


def test_which_prompts_are_shared():
    for options, least in (
        ({}, 15),
        ({"share_prompts": True}, 1),
        ({"share_prompts": False}, None),
        ({"share_prompts": True, "router_losses": True}, None),
    ):
        assert passes_of(ARCHITECTURES["qwen2"](), **options).min_shared == least, options
    with_dropout = ARCHITECTURES["qwen2"]()
    with_dropout.lora_dropout = torch.nn.Dropout(0.1)
    assert passes_of(with_dropout, share_prompts=True).min_shared is None


def test_a_prompt_is_shared_if_all_of_its_tokens_are_the_same():
    """Not if padding completes it: 0 is a token, and stands in the padding."""
    prompts = [[0, 5, 6], [5, 6], [5, 6], [7, 6], [5, 6]]
    rollouts = rows_of(prompts, [[8, 9]] * 5)
    sharing, by_default = (passes_of(ARCHITECTURES["qwen2"](), share_prompts=share) for share in (True, None))
    inputs = sharing.inputs(rollouts, [0, 1, 2, 3, 4], size=6, pad_token_id=0)
    assert [one.branches for one in inputs["layout"].trees] == [(), (3, 3), (), ()]
    sums = rollouts.lengths()[:, 3].tolist()
    assert sums[1] == sums[2] == sums[4] != sums[3]
    rollouts = rows_of([[5] * 15] * 2, [[8, 9]] * 2)
    inputs = by_default.inputs(rollouts, [0, 1], size=2, pad_token_id=0)
    assert [one.branches for one in inputs["layout"].trees] == [(), ()], "too short by default"


def test_kernels_that_cannot_share_or_pack(train, tmp_path, caplog):
    """One that is blind to trunks, and one for bfloat16 alone."""
    path = save_tiny_model(tmp_path / "model")
    questions = Dataset.from_dict({"prompt": [f"{number} + 1 = " * 20 for number in range(16)]})
    figures = []
    for dtype, fault in ((torch.float32, "alone"), (torch.bfloat16, "")):
        with on_varlen(dtype, fault=fault):
            trainer = train(model=path, constant=0.2, dataset=questions)
        figures += [trainer.state.log_history[0][f"packing/{name}"] for name in ("padding_free", "shared_tokens")]
    assert figures == [1, 0, 0, 0]
    assert "do not share it, because another prompt changes the log-probs of a sample by 0 instead" in caplog.text
    assert "not padding-free, because SDPA has no varlen kernel for torch.float32 on cpu" in caplog.text
