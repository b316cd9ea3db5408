"""The torch kernel set against dense float64 arithmetic, and its independence of the batch."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor

from truespec.kernels import kernel_set
from truespec.kernels.api import (
    AttentionRows,
    ContextRows,
    KVBuffers,
    LayerWeights,
    PackedLinear,
    StackShape,
    Weight,
)
from truespec.kernels.reference import ReferenceKernels, rms_norm, silu
from truespec.kernels.reference_attention import attention, store_kv
from truespec.kernels.reference_selftest import self_test_row_invariance
from truespec.kernels.reference_weights import NARROWED_AT_ONCE, narrow, widen
from truespec.layers.rope import RopeParameters, rope_tables

KERNELS = ReferenceKernels()


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed + sum(size)))


def fp32_weight(n: int, k: int, seed: int = 0) -> Weight:
    return Weight(random(n, k, seed=seed) * k**-0.5, "F32", (n, k))


def make_shape(
    hidden: int = 24, heads: int = 6, kv_heads: int = 2, head_dim: int = 10
) -> StackShape:
    cos, sin = rope_tables(RopeParameters(theta=100.0), head_dim, 64)
    return StackShape(hidden, heads, kv_heads, head_dim, 37, 1e-5, head_dim**-0.5, cos, sin)


def make_layer(shape: StackShape, seed: int, *, qkv_inputs: int | None = None) -> LayerWeights:
    hidden, inner, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    wide = qkv_inputs or hidden
    q_size, kv_size = shape.num_heads * dim, shape.num_kv_heads * dim
    return LayerWeights(
        input_norm=None if qkv_inputs else 1 + 0.1 * random(hidden, seed=seed),
        qkv=(
            fp32_weight(q_size, wide, seed),
            fp32_weight(kv_size, wide, seed + 1),
            fp32_weight(kv_size, wide, seed + 2),
        ),
        qkv_bias=random(q_size + 2 * kv_size, seed=seed),
        q_norm=1 + 0.1 * random(dim, seed=seed),
        k_norm=1 + 0.1 * random(dim, seed=seed + 1),
        o=fp32_weight(hidden, q_size, seed),
        o_bias=random(hidden, seed=seed + 3),
        post_norm=1 + 0.1 * random(hidden, seed=seed + 4),
        gate=fp32_weight(inner, hidden, seed),
        up=fp32_weight(inner, hidden, seed + 5),
        down=fp32_weight(hidden, inner, seed),
    )


def nan_pool(shape: StackShape, num_layers: int, num_pages: int, page_size: int = 16) -> KVBuffers:
    head = (num_layers, num_pages, page_size // 16, shape.num_kv_heads)
    return KVBuffers(
        torch.full((*head, shape.head_dim, 16), math.nan),
        torch.full((*head, 16, shape.head_dim), math.nan),
    )


def chain(start: int, end: int, pages: list[int]) -> AttentionRows:
    """Rows start .. end - 1 of one request whose pages hold 16 positions each."""
    positions = torch.arange(start, end)
    table = torch.tensor([pages], dtype=torch.int32)
    return AttentionRows(
        positions=positions.int(),
        row_to_req=torch.zeros(end - start, dtype=torch.int32),
        out_slots=table[0, positions // 16].long() * 16 + positions % 16,
        page_table=table,
        kv_lens=positions.int() + 1,
    )


# ---- dense float64 oracle ------------------------------------------------------------------


def dense_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return x
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def dense_rope(x: Tensor, shape: StackShape, positions: Tensor) -> Tensor:
    """Complex rotation of pairs (i, i + d/2); x [m, heads, d]."""
    half = x.shape[-1] // 2
    angle = torch.complex(
        shape.rope_cos[positions].double(), shape.rope_sin[positions].double()
    ).unsqueeze(1)
    turned = torch.complex(x[..., :half], x[..., half:]) * angle
    return torch.cat([turned.real, turned.imag], -1)


def dense_layer(
    x: Tensor, layer: LayerWeights, shape: StackShape, visible: Tensor, given: Tensor | None = None
) -> Tensor:
    """One block over a whole sequence; visible [m, m] says which keys a row sees."""
    m, dim, eps = x.shape[0], shape.head_dim, shape.rms_norm_eps
    normed = dense_norm(x, layer.input_norm, eps) if given is None else given
    assert layer.qkv_bias is not None
    assert layer.o_bias is not None
    flat = normed @ torch.cat([w.data for w in layer.qkv]).double().T + layer.qkv_bias.double()
    heads = flat.view(m, -1, dim)
    q, k, v = heads.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
    positions = torch.arange(m)
    q = dense_rope(dense_norm(q, layer.q_norm, eps), shape, positions)
    k = dense_rope(dense_norm(k, layer.k_norm, eps), shape, positions)
    group = shape.num_heads // shape.num_kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * shape.attention_scale
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
    attended = torch.einsum("hij,jhd->ihd", weights, v).reshape(m, -1)
    x = x + attended @ layer.o.data.double().T + layer.o_bias.double()
    normed = dense_norm(x, layer.post_norm, eps)
    gate = normed @ layer.gate.data.double().T
    inner = gate * torch.sigmoid(gate) * (normed @ layer.up.data.double().T)
    return x + inner @ layer.down.data.double().T


def dense_stack(
    x: Tensor, layers: list[LayerWeights], shape: StackShape, visible: Tensor
) -> Tensor:
    y = x.double()
    for layer in layers:
        y = dense_layer(y, layer, shape, visible)
    return y


# ---- tests ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 10), (3, 1, 16), (4, 4, 2)])
def test_a_stack_equals_dense_arithmetic(heads: int, kv_heads: int, head_dim: int) -> None:
    shape = make_shape(24, heads, kv_heads, head_dim)
    layers = [make_layer(shape, seed) for seed in (1, 2)]
    stack, kv = KERNELS.decoder_stack(layers, shape), nan_pool(shape, 2, 4)
    x = random(37, 24)
    parts = [
        stack.forward(x[start:end], chain(start, end, [2, 0, 3]), kv, capture=(-1, 0))
        for start, end in ((0, 20), (20, 21), (21, 37))
    ]
    causal = torch.ones(37, 37).tril().bool()
    output = torch.cat([y for y, _ in parts])
    captured = torch.cat([c for _, c in parts if c is not None])
    expected = dense_stack(x, layers, shape, causal)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=2e-5)
    first = dense_stack(x, layers[:1], shape, causal)
    assert torch.equal(captured[:, :24], x)
    torch.testing.assert_close(captured[:, 24:].double(), first, rtol=0, atol=2e-5)


def test_rows_may_see_keys_behind_them() -> None:
    shape = make_shape()
    layer = make_layer(shape, 3)
    x = random(9, 24)
    rows = replace(chain(0, 9, [1]), kv_lens=torch.tensor([4] * 4 + [9] * 5, dtype=torch.int32))
    output, _ = KERNELS.decoder_stack([layer], shape).forward(x, rows, nan_pool(shape, 1, 2))
    visible = torch.arange(9).unsqueeze(0) < rows.kv_lens.unsqueeze(1)
    expected = dense_stack(x, [layer], shape, visible)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=2e-5)


def test_the_first_layer_may_take_a_wider_input_of_its_own() -> None:
    shape = make_shape()
    layer = make_layer(shape, 4, qkv_inputs=48)
    x, given = random(5, 24), random(5, 48)
    stack = KERNELS.decoder_stack([layer], shape)
    output, _ = stack.forward(x, chain(0, 5, [0]), nan_pool(shape, 1, 1), first_input=given)
    causal = torch.ones(5, 5).tril().bool()
    expected = dense_layer(x.double(), layer, shape, causal, given.double())
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=2e-5)


def test_context_written_for_all_layers_is_what_each_would_have_stored() -> None:
    shape = make_shape()
    layers = [replace(make_layer(shape, seed), input_norm=None) for seed in (5, 6)]
    features, norm, rows = random(4, 40), random(24), chain(13, 17, [1, 0])
    projection = KERNELS.linear(Weight(random(24, 40), "F32", (24, 40)))
    c = rms_norm(projection(features), norm, shape.rms_norm_eps)
    written, stack = nan_pool(shape, 2, 2), KERNELS.decoder_stack(layers, shape)
    stack.write_context(
        ContextRows(features, projection, norm, rows.positions, rows.out_slots), written
    )
    for index, layer in enumerate(layers):
        alone = nan_pool(shape, 1, 2)
        single = KERNELS.decoder_stack([layer], shape)
        single.forward(c, replace(rows, kv_lens=torch.ones_like(rows.kv_lens) * 0), alone)
        torch.testing.assert_close(written.k[index], alone.k[0], equal_nan=True, rtol=0, atol=0)
        torch.testing.assert_close(written.v[index], alone.v[0], equal_nan=True, rtol=0, atol=0)


def test_a_tree_row_gives_the_bits_of_the_chain_it_stands_for() -> None:
    shape = make_shape()
    layer = make_layer(shape, 7)
    stack, x = KERNELS.decoder_stack([layer], shape), random(24, 24)
    plain = nan_pool(shape, 1, 3)
    stack.forward(x[:20], chain(0, 20, [0, 1]), plain)
    expected, _ = stack.forward(x[20:23], chain(20, 23, [0, 1]), plain)

    pool = nan_pool(shape, 1, 3)
    stack.forward(x[:20], chain(0, 20, [0, 1]), pool)
    # rows: the chain 20, 21, 22 with a sibling of 21 between; drafts live in page 2
    order, slots = torch.tensor([20, 21, 23, 22]), torch.tensor([20, 33, 34, 35])
    tree = AttentionRows(
        positions=torch.tensor([20, 21, 21, 22], dtype=torch.int32),
        row_to_req=torch.zeros(4, dtype=torch.int32),
        out_slots=slots,
        page_table=torch.tensor([[0, 1]], dtype=torch.int32),
        kv_lens=torch.tensor([21, 22, 22, 23], dtype=torch.int32),
        tail_starts=torch.full((4,), 20, dtype=torch.int32),
        tail_slots=torch.tensor([[20, -1, -1], [20, 33, -1], [20, 34, -1], [20, 33, 35]]),
    )
    output, _ = stack.forward(x[order], tree, pool)
    assert torch.equal(output[[0, 1, 3]], expected)
    assert not torch.equal(output[2], expected[1])


def test_requests_of_one_batch_do_not_see_each_other() -> None:
    shape = make_shape()
    layer = make_layer(shape, 8)
    stack, x = KERNELS.decoder_stack([layer], shape), random(7, 24)
    alone = [
        stack.forward(x[a:b], chain(0, b - a, [0]), nan_pool(shape, 1, 1))[0]
        for a, b in ((0, 3), (3, 7))
    ]
    rows = AttentionRows(
        positions=torch.tensor([0, 1, 2, 0, 1, 2, 3], dtype=torch.int32),
        row_to_req=torch.tensor([0, 0, 0, 1, 1, 1, 1], dtype=torch.int32),
        out_slots=torch.tensor([32, 33, 34, 0, 1, 2, 3]),
        page_table=torch.tensor([[2], [0]], dtype=torch.int32),
        kv_lens=torch.tensor([1, 2, 3, 1, 2, 3, 4], dtype=torch.int32),
    )
    together, _ = stack.forward(x, rows, nan_pool(shape, 1, 3))
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_attention_does_not_depend_on_the_page_size(page_size: int) -> None:
    shape = make_shape()
    k, v, q = random(70, 2, 10), random(70, 2, 10, seed=1), random(1, 6, 10)
    kv = nan_pool(shape, 1, 8 * 16 // page_size, page_size)
    pages = torch.randperm(kv.k.shape[1], generator=torch.Generator().manual_seed(1)).int()
    at = torch.arange(70)
    slots = pages[at // page_size].long() * page_size + at % page_size
    store_kv(kv, 0, slots, k, v)
    rows = AttentionRows(
        positions=torch.tensor([69], dtype=torch.int32),
        row_to_req=torch.zeros(1, dtype=torch.int32),
        out_slots=slots[-1:],
        page_table=pages.unsqueeze(0),
        kv_lens=torch.tensor([70], dtype=torch.int32),
    )
    scores = torch.einsum("hd,jhd->hj", q[0].double(), k.double().repeat_interleave(3, 1)) * 0.3
    expected = torch.einsum("hj,jhd->hd", scores.softmax(-1), v.double().repeat_interleave(3, 1))
    out = attention(q, rows, kv, 0, 0.3).view(6, 10).double()
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


def test_moved_slots_take_their_keys_and_values_along_in_order() -> None:
    shape = make_shape()
    kv = nan_pool(shape, 2, 2)
    for layer in (0, 1):
        store_kv(kv, layer, torch.arange(32), random(32, 2, 10, seed=layer), random(32, 2, 10))
    before_k, before_v = kv.k.clone(), kv.v.clone()
    KERNELS.move_kv(kv, torch.tensor([20, 4]), torch.tensor([4, 5]))
    assert torch.equal(kv.k[:, 0, 0, :, :, 4], before_k[:, 1, 0, :, :, 4])
    assert torch.equal(kv.v[:, 0, 0, :, 5], before_v[:, 1, 0, :, 4])  # 4 was overwritten first
    untouched = [slot for slot in range(16) if slot not in (4, 5)]
    assert torch.equal(kv.k[:, 0, ..., untouched], before_k[:, 0, ..., untouched])


@pytest.mark.parametrize("m", [0, 1, 7, 8, 9, 33])
def test_a_linear_equals_float64(m: int) -> None:
    weight, bias, x = fp32_weight(45, 77), random(45), random(m, 77)
    y = KERNELS.linear(weight, bias)(x)
    expected = x.double() @ weight.data.double().T + bias.double()
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
def test_an_embedding_row_is_the_widened_row(type_name: str) -> None:
    kind = gguf.GGMLQuantizationType[type_name]
    if type_name in ("F32", "F16", "BF16"):
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[type_name]
        data = random(11, 64).to(dtype)
    else:
        data = torch.from_numpy(gguf.quants.quantize(random(11, 64).numpy(), kind))
    weight = Weight(data, type_name, (11, 64))
    ids = torch.tensor([10, 0, 0, 3])
    assert torch.equal(KERNELS.embedding(weight, ids), widen(weight)[ids])
    torch.testing.assert_close(widen(weight), random(11, 64), rtol=0, atol=0.25)


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_narrowed_weight_has_the_values_of_the_library(
    dtype: torch.dtype, type_name: str
) -> None:
    n, kind = NARROWED_AT_ONCE + 37, gguf.GGMLQuantizationType[type_name]
    data = random(n, 96).to(dtype)
    stored = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    narrowed = narrow(Weight(data, stored, (n, 96)), type_name)
    assert (narrowed.type, narrowed.shape) == (type_name, (n, 96))
    expected = gguf.quants.quantize(data.float().numpy(), kind)
    assert torch.equal(narrowed.data, torch.from_numpy(expected))


def test_blocks_are_narrowed_to_fewer_bits_only() -> None:
    eight = narrow(fp32_weight(5, 64), "Q8_0")
    assert narrow(eight, "Q8_0") is eight
    four = narrow(eight, "Q4_1")
    assert four.type == "Q4_1"
    assert torch.equal(four.data, narrow(Weight(widen(eight), "F32", (5, 64)), "Q4_1").data)
    assert narrow(four, "Q8_0") is four
    assert narrow(eight, None) is eight


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e6])
def test_a_weight_that_blocks_cannot_hold_stays_as_it_is(bad: float) -> None:
    whole = fp32_weight(5, 64)
    whole.data[3, 7] = bad
    assert narrow(whole, "Q4_1") is whole
    partial = fp32_weight(5, 48)
    assert narrow(partial, "Q4_1") is partial


def test_a_weight_of_an_unknown_type_is_refused() -> None:
    with pytest.raises(ValueError, match="IQ4_NL"):
        KERNELS.linear(Weight(torch.zeros(2, 18, dtype=torch.uint8), "IQ4_NL", (2, 32)))


def test_norm_and_silu_equal_float64() -> None:
    x, weight = random(9, 37) * 3, random(37)
    expected = dense_norm(x.double(), weight, 1e-3)
    torch.testing.assert_close(rms_norm(x, weight, 1e-3).double(), expected, rtol=0, atol=2e-6)
    wide = x.double() * torch.sigmoid(x.double())
    torch.testing.assert_close(silu(x).double(), wide, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("hidden", "heads", "kv_heads", "head_dim"), [(64, 4, 2, 16), (60, 6, 2, 10), (96, 3, 1, 32)]
)
def test_the_self_test_passes(hidden: int, heads: int, kv_heads: int, head_dim: int) -> None:
    self_test_row_invariance(KERNELS, make_shape(hidden, heads, kv_heads, head_dim), 301)


class _BatchSensitive(ReferenceKernels):
    """A set whose linears let a little of the batch's first row into every row."""

    def linear(self, weight: Weight, bias: Tensor | None = None) -> PackedLinear:
        inner = super().linear(weight, bias)

        class Leaking(PackedLinear):
            shape = weight.shape

            def __call__(self, x: Tensor) -> Tensor:
                return inner(x) + 1e-6 * x[0, 0]

        return Leaking()


def test_the_self_test_notices_rows_that_depend_on_their_batch() -> None:
    with pytest.raises(RuntimeError, match="not row-invariant"):
        self_test_row_invariance(_BatchSensitive(), make_shape(), 50)


def test_kernels_are_chosen_by_name_and_an_unknown_name_is_refused(tmp_path: Path) -> None:
    assert kernel_set("torch", "cpu", cache_dir=tmp_path).name == "torch"
    with pytest.raises(ValueError, match="cuda-graphs"):
        kernel_set("cuda-graphs", "cpu", cache_dir=tmp_path)
    with pytest.raises(ValueError, match="--lossy-int8-activations: only the compiled"):
        kernel_set("torch", "cpu", cache_dir=tmp_path, lossy_int8_activations=True)


def test_without_compiled_kernels_auto_warns_and_takes_torch_but_numba_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "truespec.kernels.cpu", None)  # makes its import fail
    with pytest.warns(UserWarning, match="compiled kernels are not available"):
        assert kernel_set("auto", "cpu", cache_dir=tmp_path).name == "torch"
    with pytest.raises(ImportError):
        kernel_set("numba", "cpu", cache_dir=tmp_path)
