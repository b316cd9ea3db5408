"""The compiled decoder stack against the torch kernels, on shapes that fit nothing evenly."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from cpu_cases import (
    NAN,
    Model,
    causal_rows,
    in_chunks,
    kernels,
    make_weight,
    normal,
    page_table,
    slots_of,
)

from truespec.kernels.api import ContextRows, DecoderStack
from truespec.kernels.reference import ReferenceKernels

REFERENCE = ReferenceKernels()
MODELS = {
    "gqa3": Model(64, 3, 1, 16, 96),
    "smollm": Model(576, 9, 3, 64, 200, 1),
    "gqa4": Model(200, 4, 1, 32, 100, biases=True),
    "mha": Model(130, 4, 4, 96, 70, 1, head_norms=True),
    "wide_heads": Model(256, 2, 2, 128, 300, 1, "BF16", biases=True, head_norms=True),
    "many_queries": Model(96, 30, 1, 16, 64, 1),
    "quantised": Model(256, 8, 2, 64, 512, 1, "Q4_1"),
}
CLOSE = {"rtol": 2e-5, "atol": 2e-5}
# K/V of the two sets differ by rounding, so some round to neighbouring bf16 numbers.
CLOSE_BF16 = {"rtol": 2e-2, "atol": 2e-2}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_requests_in_chunks_equal_the_torch_kernels(name, dtype):
    model, page_size = MODELS[name], 32
    table = page_table(2, 3)
    ours, theirs = (k.decoder_stack(model.weights(), model.shape()) for k in (kernels(), REFERENCE))
    pools = [model.pool(6, page_size, dtype) for _ in range(2)]
    for first, second in zip(in_chunks(57, [19, 1, 37]), in_chunks(33, [7, 25, 1]), strict=True):
        rows = causal_rows(table, [(1, *first), (0, *second)], page_size)
        x = normal(rows.positions.numel(), model.hidden, seed=first[0])
        y, captured = ours.forward(x, rows, pools[0], capture=(-1, model.layers - 1))
        expected, _ = theirs.forward(x, rows, pools[1])
        close = CLOSE if dtype == torch.float32 else CLOSE_BF16
        torch.testing.assert_close(y, expected, **close)
        assert torch.equal(captured, torch.cat([x, y], dim=1))
        assert not y.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_contexts_longer_than_a_softmax_span_equal_the_torch_kernels(dtype):
    model, table, total = Model(layers=1), page_table(1, 70), 1100
    ours, theirs = (k.decoder_stack(model.weights(), model.shape()) for k in (kernels(), REFERENCE))
    pools = [model.pool(70, 16, dtype) for _ in range(2)]
    x = normal(total, model.hidden)
    for start, end in in_chunks(total, [300, 11, 512]):
        rows = causal_rows(table, [(0, start, end)], 16)
        y, _ = ours.forward(x[start:end], rows, pools[0])
        expected, _ = theirs.forward(x[start:end], rows, pools[1])
        close = CLOSE if dtype == torch.float32 else CLOSE_BF16
        torch.testing.assert_close(y, expected, **close)


@pytest.mark.parametrize("name", ["smollm", "gqa4", "mha", "quantised"])
def test_a_final_norm_is_that_of_the_returned_rows(name):
    model, table = MODELS[name], page_table(1, 1)
    rows, x, norm = (
        causal_rows(table, [(0, 0, 9)], 16),
        normal(9, model.hidden),
        normal(model.hidden),
    )
    stack = kernels().decoder_stack(model.weights(), model.shape())
    plain, captured = stack.forward(x, rows, model.pool(1), capture=(-1, 0))
    normed, same = stack.forward(x, rows, model.pool(1), capture=(-1, 0), final_norm=norm)
    assert torch.equal(normed, kernels().rms_norm(plain, norm, model.shape().rms_norm_eps))
    assert torch.equal(captured, same)
    theirs = REFERENCE.decoder_stack(model.weights(), model.shape())
    expected, _ = theirs.forward(x, rows, model.pool(1), final_norm=norm)
    torch.testing.assert_close(normed, expected, rtol=1e-4, atol=1e-4)


def test_captured_layers_are_the_residual_stream_after_them():
    model = Model(layers=3)
    table, x = page_table(1, 1), normal(5, model.hidden)
    rows = causal_rows(table, [(0, 0, 5)], 16)
    stack = kernels().decoder_stack(model.weights(), model.shape())
    _, captured = stack.forward(x, rows, model.pool(1), capture=(0, 1))
    for layers, column in ((1, 0), (2, 1)):
        shorter = replace(model, layers=layers)
        part = kernels().decoder_stack(shorter.weights(), shorter.shape())
        y, _ = part.forward(x, rows, shorter.pool(1))
        assert torch.equal(captured[:, column * 64 : (column + 1) * 64], y)


def test_a_given_first_input_replaces_the_norm_of_layer_0():
    model, table = Model(hidden=60), page_table(1, 1)
    rows = causal_rows(table, [(0, 0, 7)], 16)
    x, first = normal(7, 60), normal(7, 121, seed=1)
    outputs = []
    for k in (kernels(), REFERENCE):
        stack = k.decoder_stack(model.weights(qkv_inputs=121), model.shape())
        outputs.append(stack.forward(x, rows, model.pool(1), first_input=first)[0])
    torch.testing.assert_close(*outputs, **CLOSE)


def test_a_layer_without_input_norm_takes_its_input_as_it_is():
    model, table = Model(), page_table(1, 1)
    rows = causal_rows(table, [(0, 0, 7)], 16)
    layers = model.weights(qkv_inputs=64)
    outputs = [
        k.decoder_stack(layers, model.shape()).forward(normal(7, 64), rows, model.pool(1))[0]
        for k in (kernels(), REFERENCE)
    ]
    torch.testing.assert_close(*outputs, **CLOSE)


@pytest.mark.parametrize("type_name", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", ["gqa4", "wide_heads"])
def test_context_injection_fills_every_layer(name, type_name):
    model, table = MODELS[name], page_table(1, 3)
    positions = torch.arange(3, 36)
    slots = slots_of(table, torch.zeros(33, dtype=torch.long), positions, 16)
    features, norm = normal(33, 80), normal(model.hidden, seed=1)
    projection = make_weight(type_name, model.hidden, 80 if type_name == "F32" else 64)
    features = features[:, : projection.shape[1]]
    pools = []
    for k in (kernels(), REFERENCE):
        pools.append(model.pool(3))
        stack = k.decoder_stack(model.weights(), model.shape())
        linear = k.linear(projection)
        context = ContextRows(features, linear, norm, positions.int(), slots)
        stack.write_context(context, pools[-1])
    for ours, theirs in ((pools[0].k, pools[1].k), (pools[0].v, pools[1].v)):
        torch.testing.assert_close(ours, theirs, equal_nan=True, **CLOSE)


@pytest.mark.parametrize("head_type", ["F32", "Q8_0"])
@pytest.mark.parametrize("num_context", [0, 5, 40])
@pytest.mark.parametrize("name", ["wide_heads", "smollm", "quantised"])
def test_context_layers_and_head_in_one_call_are_those_of_three(name, num_context, head_type):
    model, table, start = MODELS[name], page_table(1, 4), 7
    k = kernels()
    stack = k.decoder_stack(model.weights(), model.shape())
    end = start + num_context
    rows = causal_rows(table, [(0, end, end + 4)], 16)
    rows = replace(rows, kv_lens=torch.full((4,), end + 4, dtype=torch.int32))
    x, norm = normal(4, model.hidden), normal(model.hidden, seed=1)
    head = k.linear(make_weight(head_type, 70, model.hidden))
    before = causal_rows(table, [(0, start, end)], 16)
    context = ContextRows(
        normal(num_context, 96, seed=2),
        k.linear(make_weight("Q8_0", model.hidden, 96)),
        norm,
        before.positions,
        before.out_slots,
    )
    outputs, pools = [], []
    for run in (stack.forward_to_logits, partial(DecoderStack.forward_to_logits, stack)):
        pools.append(model.pool(4))
        stack.forward(
            normal(start, model.hidden), causal_rows(table, [(0, 0, start)], 16), pools[-1]
        )
        outputs.append(run(x, rows, pools[-1], final_norm=norm, head=head, context=context))
    for ours, composed in zip(*outputs, strict=True):
        assert torch.equal(ours, composed)
    assert outputs[0][1].shape == (4, 70)
    for part in ("k", "v"):
        ours, composed = (getattr(pool, part) for pool in pools)
        assert torch.equal(ours.isnan(), composed.isnan())
        assert torch.equal(ours.nan_to_num(), composed.nan_to_num())


def test_rows_of_a_non_causal_block_see_the_whole_block():
    model, table, total = MODELS["gqa3"], page_table(1, 3), 39
    outputs = []
    for k in (kernels(), REFERENCE):
        stack, pool = k.decoder_stack(model.weights(), model.shape()), model.pool(3)
        stack.forward(normal(30, 64), causal_rows(table, [(0, 0, 30)], 16), pool)
        rows = causal_rows(table, [(0, 30, total)], 16)
        rows = replace(rows, kv_lens=torch.full((9,), total, dtype=torch.int32))
        outputs.append(stack.forward(normal(9, 64, seed=1), rows, pool)[0])
    torch.testing.assert_close(*outputs, **CLOSE)


def test_stale_nan_beyond_a_row_never_leaks():
    model, table = MODELS["gqa3"], page_table(1, 3)
    stack = kernels().decoder_stack(model.weights(), model.shape())
    clean, stale = model.pool(3), model.pool(3)
    clean.k.zero_()
    clean.v.zero_()
    rows = causal_rows(table, [(0, 0, 21)], 16)
    x = normal(21, 64)
    assert torch.equal(stack.forward(x, rows, clean)[0], stack.forward(x, rows, stale)[0])


def test_a_nan_in_a_key_reaches_the_rows_that_see_it_and_no_other():
    model, table = MODELS["gqa3"], page_table(1, 3)
    stack = kernels().decoder_stack(model.weights(), model.shape())
    x = normal(20, 64)
    clean, _ = stack.forward(x, causal_rows(table, [(0, 0, 20)], 16), model.pool(3))
    x[9, 3] = NAN
    y, _ = stack.forward(x, causal_rows(table, [(0, 0, 20)], 16), model.pool(3))
    assert torch.equal(y[:9], clean[:9])
    assert y[9:].isnan().all(dim=1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moved_slots_equal_the_torch_kernels_in_order(dtype):
    model = MODELS["gqa4"]
    pools = [model.pool(4, 32, dtype) for _ in range(2)]
    for pool in pools:
        pool.k.copy_(normal(*pool.k.shape))
        pool.v.copy_(normal(*pool.v.shape))
    src, dst = torch.tensor([3, 70, 5, 90]), torch.tensor([70, 71, 3, 5])
    kernels().move_kv(pools[0], src, dst)
    REFERENCE.move_kv(pools[1], src, dst)
    assert torch.equal(pools[0].k, pools[1].k)
    assert torch.equal(pools[0].v, pools[1].v)


def test_head_sizes_that_are_not_multiples_of_16_are_refused():
    model = Model(head_dim=24)
    with pytest.raises(ValueError, match="head_dim is 24"):
        kernels().decoder_stack(model.weights(), model.shape())


def test_rows_that_point_outside_the_tables_are_stopped_before_compiled_code():
    model, table = Model(max_positions=32), page_table(1, 4)
    stack = kernels().decoder_stack(model.weights(), model.shape())
    with pytest.raises(AssertionError, match="position 32 of 32"):
        stack.forward(normal(1, 64), causal_rows(table, [(0, 32, 33)], 16), model.pool(4))
    with pytest.raises(AssertionError, match="slot"):
        stack.forward(normal(1, 64), causal_rows(table + 4, [(0, 3, 4)], 16), model.pool(4))
