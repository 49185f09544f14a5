"""Rows with the same prompt compute it once: attention, layout, packing, and the update, against one row at a time."""

import random
from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from dash_trl.update import packed_log_probs
from dash_trl.update.packing import plan_segment
from dash_trl.update.padding_free import PackedLayout, enable_padding_free
from dash_trl.update.trees import TreeShape, flash_arguments, tree_attention
from tests.test_padding_free import ARCHITECTURES

TREES = (TreeShape(7, (3, 1, 5)), TreeShape(4), TreeShape(1, (2, 2)), TreeShape(40, (30, 17)))
DTYPES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 3e-2}


def states(dtype: torch.dtype, heads: tuple[int, ...] = (4, 2, 2)) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    length = sum(map(len, TREES))
    return [
        torch.randn(1, count, length, 8, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for count in heads
    ]


def one_row_at_a_time(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """[1, L, H, D], by plain causal attention over prefix and branch."""
    outputs, start = [], 0
    for tree in TREES:
        trunk = list(range(start, start + tree.trunk))
        for first, last in pairwise([0, *accumulate((tree.trunk, *tree.branches))]):
            own = list(range(start + first, start + last))
            row = own if first == 0 else trunk + own
            q, k, v = query[:, :, row], key[:, :, row], value[:, :, row]
            outputs.append(scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[:, :, -len(own) :])
        start += len(tree)
    return torch.cat(outputs, dim=2).transpose(1, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", ["of the CPU", "with masks"])
def test_attention_and_its_gradients(dtype, kernel, monkeypatch):
    if kernel == "with masks":
        monkeypatch.setattr("dash_trl.update.trees.flash_cpu", None)
    found, expected = states(dtype), states(torch.float64)
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    output, _ = tree_attention(module, *found, None, trees=TREES)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    reference = one_row_at_a_time(*expected)
    (output * weights).sum().backward()
    (reference * weights).sum().backward()
    close = {"atol": DTYPES[dtype], "rtol": DTYPES[dtype]}
    torch.testing.assert_close(output.double(), reference, **close)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, **close)


def test_the_cpu_kernel_is_there(monkeypatch):
    """Else the tests above compare masks with masks."""
    monkeypatch.setattr("dash_trl.update.trees.masked_branch_attention", None)
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    tree_attention(module, *states(torch.float32), None, trees=TREES)


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


def test_long_prompts_only_are_kept_together():
    table = torch.tensor([[[32, 10, 10, 0], [33, 10, 10, 1], [32, 10, 10, 0], [33, 10, 10, 1]]])
    (micro_batches,) = plan_segment(table, 1, max_rows=4, max_tokens=60, min_shared=32)
    assert sorted(one.rows[0] for one in micro_batches) == [(0,), (1, 3), (2,)]
