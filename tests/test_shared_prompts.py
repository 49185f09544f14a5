"""Rows with the same prompt compute it once: attention, layout, packing, and the update, against one row at a time."""

import pytest
import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    MixtralConfig,
    OPTConfig,
)

from dash_trl import DASHTrainer
from dash_trl.monitoring import packing_metrics
from dash_trl.rollout import Survivors
from dash_trl.update import (
    MicroBatch,
    has_dropout,
    plan_share,
)
from tests.test_padding_free import ARCHITECTURES, passes_of
from tests.tiny import on_varlen, run, save_tiny_model

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
    rollouts = Survivors.of_tokens(prompts, [[8, 9]] * 5, pad_token_id=0)
    sharing, by_default = (passes_of(ARCHITECTURES["qwen2"](), share_prompts=share) for share in (True, None))
    inputs = sharing.inputs(rollouts, [0, 1, 2, 3, 4], size=6, pad_token_id=0)
    assert [one.branches for one in inputs["layout"].trees] == [(), (3, 3), (), ()]
    sums = rollouts.lengths()[:, 3].tolist()
    assert sums[1] == sums[2] == sums[4] != sums[3]
    rollouts = Survivors.of_tokens([[5] * 15] * 2, [[8, 9]] * 2, pad_token_id=0)
    inputs = by_default.inputs(rollouts, [0, 1], size=2, pad_token_id=0)
    assert [one.branches for one in inputs["layout"].trees] == [(), ()], "too short by default"


def test_figures_of_packing():
    """Two rows share 33 of 34 tokens, two have 32 tokens each; the planner keeps its budget by what is computed."""
    table = torch.tensor([[[34, 10, 10, 1], [34, 20, 20, 1], [32, 10, 10, 2], [32, 20, 20, 2]]])
    found = packing_metrics([MicroBatch(((0, 1, 2, 3),))], table, padding_free=True, min_shared=32)
    assert found["packing/max_tokens"] == 192 - 33 and found["packing/shared_tokens"] == pytest.approx(33 / 192)
    assert found["packing/padding_share"] == 0
    micro_batches = plan_share(table[:, :2], max_rows=1, max_tokens=34 + 10 + 21, min_shared=32)
    assert [one.rows for one in micro_batches] == [((0, 1),)]


def test_kernels_that_cannot_share_or_pack(tmp_path, caplog):
    """One that is blind to trunks, and one for bfloat16 alone."""
    path = save_tiny_model(tmp_path / "model")
    questions = Dataset.from_dict({"prompt": [f"{number} + 1 = " * 20 for number in range(16)]})
    figures = []
    for dtype, fault in ((torch.float32, "alone"), (torch.bfloat16, "")):
        with on_varlen(dtype, fault=fault):
            trainer = run(DASHTrainer, path, tmp_path, constant=0.2, dataset=questions)
        figures += [trainer.state.log_history[0][f"packing/{name}"] for name in ("padding_free", "shared_tokens")]
    assert figures == [1, 0, 0, 0]
    assert "do not share it, because another prompt changes the log-probs of a sample by 0 instead" in caplog.text
    assert "not padding-free, because SDPA has no varlen kernel for torch.float32 on cpu" in caplog.text


def test_where_rows_of_a_group_go():
    short, long = [32, 10, 10], [33, 10, 10]
    for rows, budget, passes in (
        # Four groups of three rows of the longest length. A pass has room for one, so rows are taken in their order.
        ([[33, 99, 99, number // 3] for number in range(12)], None, [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]),
        # A group of four in three parts, of which two fit into one pass, where another row has come between them.
        ([[33, tokens, tokens, 0] for tokens in (78, 109, 58, 20)] + [[5, 50, 50, 1]], 220, [(1, 2), (0, 3, 4)]),
        # Only prompts of more than 32 tokens are kept together.
        ([[*short, 0], [*long, 1], [*short, 0], [*long, 1]], 60, [(1, 3), (0,), (2,)]),
    ):
        found = plan_share(torch.tensor([rows]), max_rows=4, max_tokens=budget, width=100, min_shared=32)
        assert [one.rows[0] for one in found] == passes, rows
