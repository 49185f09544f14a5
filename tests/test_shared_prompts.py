"""Rows with the same prompt compute it once: attention, layout, packing, and the update, against one row at a time."""

import random
import weakref
from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, FalconConfig, MixtralConfig, OPTConfig

from dash_trl import DASHTrainer
from dash_trl.monitoring import packing_metrics
from dash_trl.rollout import Survivors
from dash_trl.update import (
    MicroBatch,
    ModelPasses,
    PackedLayout,
    TreeShape,
    has_dropout,
    packed_log_probs,
    plan_segment,
    tree_attention,
)
from dash_trl.update.padding_free import enable_padding_free
from dash_trl.update.trees import PADDED_TOKENS, attention_batches, flash_arguments
from tests.test_padding_free import ARCHITECTURES
from tests.tiny import assert_same_update, parameters, run, save_tiny_model, with_flash_stand_in

TREES = (TreeShape(7, (3, 1, 5)), TreeShape(4), TreeShape(1, (2, 2)), TreeShape(40, (30, 17)))
MIXTRAL = dict(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, num_key_value_heads=2, vocab_size=9)
OPT = dict(num_hidden_layers=1, hidden_size=8, ffn_dim=8, num_attention_heads=2, vocab_size=9, word_embed_proj_dim=8)
DTYPES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 3e-2}


def states(dtype: torch.dtype, heads: tuple[int, ...] = (4, 2, 2)) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    length = sum(map(len, TREES))
    return [
        torch.randn(1, count, length, 8, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for count in heads
    ]


def one_row_at_a_time(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """[1, L, H, D], by plain causal attention over prefix and branch."""
    outputs, start = [], 0
    for tree in TREES:
        trunk = list(range(start, start + tree.trunk))
        for first, last in pairwise([0, *accumulate((tree.trunk, *tree.branches))]):
            own = list(range(start + first, start + last))
            row = own if first == 0 else trunk + own
            q, k, v = query[:, :, row], key[:, :, row], value[:, :, row]
            row_output = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=scale)
            outputs.append(row_output[:, :, -len(own) :])
        start += len(tree)
    return torch.cat(outputs, dim=2).transpose(1, 2)


@pytest.fixture
def in_batches(monkeypatch):
    """Returns a function after whose call attention is computed in batches, as on a GPU."""

    def begin(padded_tokens: int = PADDED_TOKENS) -> None:
        monkeypatch.setattr("dash_trl.update.trees.flash_cpu", None)
        monkeypatch.setattr("dash_trl.update.trees.PADDED_TOKENS", padded_tokens)
        attention_batches.cache_clear()

    yield begin
    attention_batches.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("padded", [None, PADDED_TOKENS, 0])
def test_attention_and_its_gradients(dtype, padded, in_batches):
    """By the kernel of the CPU, by few batches, and by a batch for each length."""
    if padded is not None:
        in_batches(padded)
    found, expected = states(dtype), states(torch.float64)
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    output, _ = tree_attention(module, *found, None, trees=TREES, scaling=0.5)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    reference = one_row_at_a_time(*expected, scale=0.5)
    (output * weights).sum().backward()
    (reference * weights).sum().backward()
    close = {"atol": DTYPES[dtype], "rtol": DTYPES[dtype]}
    torch.testing.assert_close(output.double(), reference, **close)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cpu_kernel_is_there(dtype, monkeypatch):
    """Else the tests above compare batches with batches."""
    monkeypatch.setattr("dash_trl.update.trees.batched_attention", None)
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    tree_attention(module, *states(dtype), None, trees=TREES)


@pytest.mark.parametrize("kernel", ["of the CPU", "in batches"])
def test_branches_keep_no_more_for_the_backward_pass_than_rows_do(kernel, in_batches):
    """No copies of the trunk's keys and values, neither one per branch nor one per head of the queries (GQA)."""
    if kernel == "in batches":
        in_batches(0)  # without padding, which rows have, too
    module = torch.nn.Module()
    module.num_key_value_groups = 2

    def kept(trees: tuple[TreeShape, ...]) -> int:
        sizes: dict[int, int] = {}

        def note(saved: torch.Tensor) -> torch.Tensor:
            storage = saved.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes() * saved.is_floating_point()  # all layers share the indices
            return saved

        with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
            output, _ = tree_attention(module, *states(torch.float32), None, trees=trees)
        return sum(sizes.values()) if output.requires_grad else 0

    copies = sum(tree.trunk for tree in TREES) * (4 + 2 + 2) * 8 * 4  # bytes; a batch of trunks keeps one of each
    rows = kept(tuple(TreeShape(len(tree)) for tree in TREES))
    assert 0 < kept(TREES) <= 1.01 * rows + copies * (kernel == "in batches")


def test_a_checkpointed_layer_keeps_no_states_of_branches(in_batches):
    in_batches()
    module, states_of_layer = torch.nn.Module(), []
    module.num_key_value_groups = 2

    def layer(*inputs: torch.Tensor) -> torch.Tensor:
        made = [one * 2 for one in inputs]
        states_of_layer.extend(map(weakref.ref, made))
        return tree_attention(module, *made, None, trees=TREES)[0]

    output = checkpoint(layer, *states(torch.float32), use_reentrant=False)
    assert output.requires_grad and [one() for one in states_of_layer] == [None] * 3


def test_batches_have_sequences_of_similar_lengths():
    """A sequence of over 256 tokens is padded by a third at most, and a batch has at most twice the tokens."""
    own = (
        *map(TreeShape, (1000, 700, 3, 750)),
        TreeShape(200, (20, 10)),
        TreeShape(200, (15, 2)),
        TreeShape(90, (9, 9)),
    )
    few = (TreeShape(100, (30,) * 8),)
    for trees, expected in (
        (own, [(4, 20, 200), (2, 9, 90), (2, 1000, 0), (1, 700, 0), (4, 200, 0)]),
        (few, [(5, 30, 100), (3, 30, 100), (1, 100, 0)]),  # 5 * 130 ≤ 2 * 340 < 6 * 130
    ):
        batches, restored = attention_batches(trees, torch.device("cpu"))
        assert [(*one.queries.shape, one.keys.shape[1] - one.queries.shape[1]) for one in batches] == expected
        queries = torch.cat([one.queries.flatten() for one in batches])
        assert queries[restored].tolist() == list(range(sum(map(len, trees))))


@pytest.mark.parametrize("kernel", ["of the CPU", "in batches"])
def test_attention_under_autocast(kernel, in_batches):
    """Rotary embeddings leave queries and keys in float32, beside values in bfloat16; autocast makes them equal."""
    if kernel == "in batches":
        in_batches()
    query, key, value = states(torch.float32)
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = tree_attention(module, query, key, value.bfloat16(), None, trees=TREES)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), one_row_at_a_time(query, key, value), atol=3e-2, rtol=3e-2)


def test_attention_with_values_of_another_size():
    """As in DeepSeek's."""
    query, key, value = states(torch.float32)
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    output, _ = tree_attention(module, query, key, value[..., :4], None, trees=TREES)
    torch.testing.assert_close(output, one_row_at_a_time(query, key, value)[..., :4], atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(
    ("config", "drawn"),
    [
        (OPTConfig(dropout=0.1, **OPT), True),  # a float, not a module
        (OPTConfig(dropout=0.0, **OPT), False),
        (MixtralConfig(router_jitter_noise=0.1, **MIXTRAL), True),
        (FalconConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=9), False),  # Dropout(0.0)
    ],
)
def test_dropout_is_seen(config, drawn):
    assert has_dropout(AutoModelForCausalLM.from_config(config)) == drawn


def passes(**settings) -> ModelPasses:
    flags = (
        "virtual_tokens",
        "invoked_adapter",
        "continuous_batching",
        "noisy_embeddings",
        "compiled",
        "router_losses",
    )
    defaults = {"share_prompts": None, **dict.fromkeys(flags, False)}
    torch.manual_seed(0)
    models = settings.pop("models", None) or [ARCHITECTURES["qwen2"]()]
    return ModelPasses(models, **{**defaults, **settings})


@pytest.mark.parametrize(
    ("settings", "least"),
    [
        ({}, 15),
        ({"share_prompts": True}, 1),
        ({"share_prompts": False}, None),
        ({"share_prompts": True, "router_losses": True}, None),
        ({"share_prompts": True, "virtual_tokens": True}, None),
    ],
)
def test_which_prompts_are_shared(settings, least):
    assert passes(**settings).min_shared == least


def test_a_model_with_dropout_shares_none():
    model = ARCHITECTURES["qwen2"]()
    model.lora_dropout = torch.nn.Dropout(0.1)
    assert passes(share_prompts=True, models=[model]).min_shared is None


def test_a_prompt_is_shared_if_all_of_its_tokens_are_the_same():
    """Not if padding completes it: 0 is a token, and stands in the padding."""
    prompts = [[0, 5, 6], [5, 6], [5, 6], [7, 6], [5, 6]]
    rollouts = Survivors.of_tokens(prompts, [[8, 9]] * 5, pad_token_id=0)
    inputs = passes(share_prompts=True).inputs(rollouts, [0, 1, 2, 3, 4], size=6, pad_token_id=0)
    assert [one.branches for one in inputs["layout"].trees] == [(), (3, 3), (), ()]
    sums = rollouts.lengths()[:, 3].tolist()
    assert sums[1] == sums[2] == sums[4] != sums[3]
    rollouts = Survivors.of_tokens([[5] * 15] * 2, [[8, 9]] * 2, pad_token_id=0)
    inputs = passes().inputs(rollouts, [0, 1], size=2, pad_token_id=0)
    assert [one.branches for one in inputs["layout"].trees] == [(), ()], "too short by default"


def test_figures_of_packing():
    """Two rows share 33 of 34 tokens, two have 32 tokens each; the planner keeps its budget by what is computed."""
    table = torch.tensor([[[34, 10, 10, 1], [34, 20, 20, 1], [32, 10, 10, 2], [32, 20, 20, 2]]])
    found = packing_metrics([MicroBatch(((0, 1, 2, 3),))], table, padding_free=True, min_shared=32)
    assert found["packing/max_tokens"] == 192 - 33 and found["packing/shared_tokens"] == pytest.approx(33 / 192)
    assert found["packing/padding_share"] == 0
    (micro_batches,) = plan_segment(table[:, :2], 1, max_rows=1, max_tokens=34 + 10 + 21, min_shared=32)
    assert [one.rows for one in micro_batches] == [((0, 1),)]


def test_flash_attention_shares_prompts(tmp_path):
    path = save_tiny_model(tmp_path / "model")
    plain, shared = (
        run(DASHTrainer, path, tmp_path, loaded=with_flash_stand_in(path), constant=0.2, share_prompts=share)
        for share in (False, True)
    )
    assert shared.state.log_history[0]["packing/shared_tokens"] > 0.25, "groups are kept together"
    assert_same_update(parameters(path), parameters(plain.model), parameters(shared.model))


def test_flash_attention_gets_the_keys_of_each_branch():
    """Its varlen kernels, by their definition: queries i of a sequence see its keys up to i + (keys − queries)."""
    query, key, value = states(torch.float64)
    arguments = flash_arguments(TREES)
    assert arguments["max_length_q"] == 40 and arguments["max_length_k"] == 70
    tokens = arguments["key_tokens"]
    ends = zip(*(pairwise(arguments[name].tolist()) for name in ("cu_seq_lens_q", "cu_seq_lens_k")), strict=True)
    outputs = []
    for (q_first, q_end), (k_first, k_end) in ends:
        seen = torch.ones(q_end - q_first, k_end - k_first, dtype=torch.bool).tril(k_end - k_first - q_end + q_first)
        k, v = (one[:, :, tokens[k_first:k_end]] for one in (key, value))
        outputs.append(scaled_dot_product_attention(query[:, :, q_first:q_end], k, v, attn_mask=seen, enable_gqa=True))
    torch.testing.assert_close(torch.cat(outputs, dim=2).transpose(1, 2), one_row_at_a_time(query, key, value))


def group_batch(generator: random.Random, groups: int) -> tuple[torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """(ids, mask, completion columns, same_prompt) of groups of 1 to 4 rows, a dummy row at the end."""
    prompts, completions, same = [], [], []
    for _ in range(groups):
        prompt = [generator.randrange(1, 97) for _ in range(generator.randint(2, 9))]
        for row in range(generator.randint(1, 4)):
            prompts.append(prompt)
            completions.append([generator.randrange(1, 97) for _ in range(generator.randint(1, 8))])
            same.append(row > 0 and len(prompt) > 2)
    ids, mask = torch.zeros(2, len(same) + 1, 9 + 8, dtype=torch.long)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids[row, 9 - len(prompt) : 9 + len(completion)] = torch.tensor(prompt + completion)
        mask[row, 9 - len(prompt) : 9 + len(completion)] = 1
    return ids, mask, 8, torch.tensor([*same, False])


def in_float64(model: torch.nn.Module) -> Callable[..., SimpleNamespace]:
    """A pass of the model whose every operation is: transformers' norms and TRL's LM head have parts in float32."""
    for module in model.double().modules():
        if type(module).__name__.endswith("RMSNorm"):
            norm = torch.nn.functional.rms_norm
            module.forward = partial(norm, normalized_shape=module.weight.shape, weight=module.weight, eps=1e-6)

    def one_pass(labels: torch.Tensor, fused_lm_head: bool, **inputs: torch.Tensor) -> SimpleNamespace:
        every = model(**inputs, use_cache=False).logits[:, :-1].log_softmax(dim=-1)
        return SimpleNamespace(log_probs=every.gather(2, inputs["input_ids"][:, 1:, None])[..., 0], aux_loss=None)

    return one_pass


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), name=st.sampled_from(sorted(ARCHITECTURES)), groups=st.integers(1, 4))
def test_log_probs_and_gradients_are_those_of_one_row_at_a_time(seed, name, groups):
    """In float64, of every parameter."""
    torch.manual_seed(0)
    model = ARCHITECTURES[name]().eval()
    one_pass = in_float64(model)
    assert enable_padding_free(model) is None
    ids, mask, keep, same = group_batch(random.Random(seed), groups)
    weights = torch.randn(len(ids), keep, dtype=torch.float64) * mask[:, -keep:]

    def gradients(rows: list[tuple[torch.Tensor, torch.Tensor]], **kwargs) -> list[torch.Tensor]:
        model.zero_grad()
        found = torch.cat([packed_log_probs(one_pass, *row, keep, flash=False, **kwargs)[0] for row in rows])
        (found * weights[: len(found)]).sum().backward()
        return [found.detach(), *(parameter.grad.clone() for parameter in model.parameters())]

    alone = gradients([(ids[row : row + 1], mask[row : row + 1]) for row in range(len(ids) - 1)])
    together = gradients([(ids, mask)], same_prompt=same)
    assert not together[0][-1].any()
    for one, other in zip([together[0][:-1], *together[1:]], alone, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)
    layout = PackedLayout.of(mask, keep, same)
    assert len(layout.tokens) == mask.sum() - ((mask[:, :-keep].sum(dim=1) - 1) * same).sum()


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    ranks=st.integers(1, 3),
    steps=st.integers(1, 4),
    rows=st.integers(1, 8),
    group=st.integers(1, 8),
    tokens=st.sampled_from([None, 1, 60, 300]),
)
def test_a_plan_loses_nothing_and_keeps_its_budget(seed, ranks, steps, rows, group, tokens):
    generator = random.Random(seed)
    table = torch.zeros(ranks, steps * rows, 4, dtype=torch.long)
    for rank in range(ranks):
        for row in range(steps * rows):
            if row % group == 0:
                prompt = generator.randint(1, 90)
            if generator.random() < 0.7:
                table[rank, row] = torch.tensor([prompt, length := generator.randint(1, 60), length, row // group])
    plan = plan_segment(table, steps, max_rows=rows, max_tokens=tokens, min_shared=32)
    plain = plan_segment(table, steps, max_rows=rows, max_tokens=tokens)
    flat = [micro_batch for step in plan for micro_batch in step]
    for rank in range(ranks):
        seen = sorted(row for micro_batch in flat for row in micro_batch.rows[rank])
        assert seen == [row for row in range(steps * rows) if table[rank, row, 1] > 0]
        for micro_batch in flat:
            held = micro_batch.rows[rank]
            families = [row // group if table[rank, row, 0] > 32 else -row - 1 for row in held]
            assert len({one for one, _ in zip(families, [None, *families], strict=False) if one != _}) == len(
                set(families)
            ), "rows that share a prompt are adjacent"
            size = sum(
                int(table[rank, row, 0]) for row in {f: row for f, row in zip(families, held, strict=True)}.values()
            )
            size += sum(int(table[rank, row, 1]) for row in held) + len(held) - len(set(families))
            assert len(held) <= rows if tokens is None else size <= tokens or len(held) <= 1
    counts = [sum(map(len, one)) for one in (plan, plain)]
    assert counts[0] == counts[1] if tokens is None else counts[0] <= counts[1] + len(plan)


def test_groups_stay_together_where_they_fit():
    """Three groups of four survivors, two passes of six rows: one group is split."""
    row = [100, 10, 10]
    table = torch.tensor([[[*row, place % 3] for place in range(12)]])
    (micro_batches,) = plan_segment(table, 1, max_rows=6, min_shared=32)
    prompts = [len({row % 3 for row in one.rows[0]}) for one in micro_batches]
    assert [len(one.rows[0]) for one in micro_batches] == [6, 6] and prompts == [2, 2]
    (apart,) = plan_segment(table, 1, max_rows=6)
    assert [len({row % 3 for row in one.rows[0]}) for one in apart] == [3, 3]


def test_a_group_goes_where_it_fits():
    """Four rows per pass: a long row, two groups of three, a short row. The lighter pass has no room for a group."""
    rows = [[33, 99, 99, 0], *[[33, 5, 5, 1]] * 3, *[[33, 3, 3, 2]] * 3, [33, 1, 1, 3]]
    (micro_batches,) = plan_segment(torch.tensor([rows]), 1, max_rows=4, min_shared=32)
    assert [one.rows[0] for one in micro_batches] == [(0, 4, 5, 6), (1, 2, 3, 7)]


def test_parts_of_a_group_that_meet_again_are_adjacent():
    """A group of four in three parts, of which two fit into one pass, where another row has come between them."""
    rows = [[33, length, length, 0] for length in (78, 109, 58, 20)] + [[5, 50, 50, 1]]
    (micro_batches,) = plan_segment(torch.tensor([rows]), 1, max_rows=4, max_tokens=220, min_shared=32)
    assert [one.rows[0] for one in micro_batches] == [(1, 2), (0, 3, 4)]


def test_long_prompts_only_are_kept_together():
    table = torch.tensor([[[32, 10, 10, 0], [33, 10, 10, 1], [32, 10, 10, 0], [33, 10, 10, 1]]])
    (micro_batches,) = plan_segment(table, 1, max_rows=4, max_tokens=60, min_shared=32)
    assert sorted(one.rows[0] for one in micro_batches) == [(0,), (1, 3), (2,)]
