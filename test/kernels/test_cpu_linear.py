"""Packed linears: exact values, products against float64, one result per row."""

from __future__ import annotations

import pytest
import torch
from cpu_cases import dequantised, kernels, make_weight, normal

from truespec.kernels.api import Weight
from truespec.kernels.cpu.compile import Cpu, host_cpu
from truespec.kernels.cpu.linear_ir import SPAN

FLOATS = ["F32", "BF16", "F16"]
QUANTISED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
AVX2 = Cpu("x86-64-v3", "")
NO_VNNI = Cpu("skylake-avx512", "+avx512f")
has_avx512 = "+avx512vnni" in host_cpu().features


def sizes(type_name: str) -> tuple[int, int]:
    """(n, k): n never a multiple of a panel, k odd where the type allows."""
    if type_name in FLOATS:
        return 77, 203
    return 77, 512 if type_name.endswith("K") else 224


@pytest.mark.parametrize("type_name", FLOATS + QUANTISED)
def test_packed_values_are_exactly_the_dequantised_ones(type_name):
    n, k = sizes(type_name)
    weight = make_weight(type_name, n, k)
    linear = kernels().linear(weight)
    columns = linear(torch.eye(k))
    assert torch.equal(columns.T, dequantised(weight))


@pytest.mark.parametrize("type_name", FLOATS + QUANTISED)
@pytest.mark.parametrize("m", [1, 2, 7, 9, 33])
def test_products_are_within_the_rounding_of_short_fp32_chains(type_name, m):
    n, k = sizes(type_name)
    weight, bias, x = make_weight(type_name, n, k, 1), normal(n, seed=2), normal(m, k, seed=3)
    y = kernels().linear(weight, bias)(x)
    w = dequantised(weight).double()
    expected = x.double() @ w.T + bias
    roundings = SPAN + -(-k // SPAN) + 1  # along the longest path of an addend
    allowed = 2.0**-24 * roundings * (x.double().abs() @ w.abs().T + bias.abs())
    assert y.shape == (m, n)
    assert ((y - expected).abs() <= allowed).all()


@pytest.mark.parametrize("type_name", QUANTISED)
def test_errors_of_products_with_codes_are_of_the_size_of_fp32_ones(type_name):
    n, k = 64, 1536
    weight, x = make_weight(type_name, n, k, 1), normal(40, k, seed=3)
    y, w = kernels().linear(weight)(x), dequantised(weight)
    exact = x.double() @ w.double().T
    assert (y - exact).norm() <= 4 * (x @ w.T - exact).norm()


@pytest.mark.parametrize("scale", [1e-24, 1e-12, 1.0, 1e20, 1e36])
def test_inputs_of_any_size_keep_their_bits_in_products_with_codes(scale):
    weight, x = make_weight("Q4_1", 32, 64), normal(3, 64)
    y, scaled = kernels().linear(weight)(x), kernels().linear(weight)(x * scale)
    torch.testing.assert_close(scaled.double() / scale, y.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("type_name", ["Q4_1", "Q8_0", "Q6_K"])
def test_a_block_with_a_single_input_gives_exact_products_with_codes(type_name):
    weight = make_weight(type_name, 32, 256)
    x = torch.zeros(3, 256)
    x[1, 37], x[2, 200] = 3.0e35, -1.5
    y = kernels().linear(weight)(x)
    w = dequantised(weight)
    assert (y[0] == 0).all()
    assert torch.equal(y[2], w[:, 200] * -1.5)
    torch.testing.assert_close(y[1].double(), w[:, 37].double() * 3.0e35, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("type_name", ["Q4_1", "Q8_0", "Q6_K"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_an_input_that_is_no_number_makes_its_row_nan(type_name, bad):
    linear = kernels().linear(make_weight(type_name, 32, 256))
    x = normal(6, 256)
    clean = linear(x)
    x[3, 129] = bad
    y = linear(x)
    assert y[3].isnan().all()
    assert torch.equal(y[[0, 1, 2, 4, 5]], clean[[0, 1, 2, 4, 5]])


@pytest.mark.parametrize("type_name", ["F32", "BF16", "F16", "Q4_1", "Q8_0", "Q6_K"])
def test_a_row_alone_has_the_bits_it_has_in_any_batch(type_name):
    n, k = 96, 256
    linear = kernels().linear(make_weight(type_name, n, k), normal(n, seed=1))
    x = normal(67, k, seed=2)
    alone = torch.cat([linear(row.unsqueeze(0)) for row in x])
    for m in [*range(1, 34), 40, 67]:
        assert torch.equal(linear(x[67 - m :]), alone[67 - m :]), m


@pytest.mark.parametrize("type_name", ["F32", "Q4_1", "Q8_0"])
def test_threads_do_not_change_bits(type_name):
    weight, x = make_weight(type_name, 1000, 512), normal(19, 512)
    one, two, three = (kernels(threads).linear(weight)(x) for threads in (1, 2, 3))
    assert torch.equal(one, two)
    assert torch.equal(one, three)


@pytest.mark.parametrize("type_name", ["BF16", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("m", [1, 3, 8, 40])
def test_avx2_and_avx512_code_give_equal_bits(type_name, m):
    n, k = sizes(type_name)
    weight, x = make_weight(type_name, n, k), normal(m, k)
    assert torch.equal(kernels().linear(weight)(x), kernels(cpu=AVX2).linear(weight)(x))


@pytest.mark.skipif(not has_avx512, reason="the CPU has no AVX-512 VNNI")
@pytest.mark.parametrize("type_name", ["Q4_1", "Q8_0", "Q6_K"])
@pytest.mark.parametrize("m", [1, 3, 9])
def test_codes_give_equal_bits_without_the_instruction_for_byte_products(type_name, m):
    n, k = sizes(type_name)
    weight, x = make_weight(type_name, n, k), normal(m, k)
    assert torch.equal(kernels().linear(weight)(x), kernels(cpu=NO_VNNI).linear(weight)(x))


def in_8_bits(x: torch.Tensor) -> torch.Tensor:
    """Rounded to 127 steps of the largest of 32 neighbours; float64."""
    blocks = x.unflatten(1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    factor = torch.where(largest > 0, 127.0 / largest, 0.0)
    return ((blocks * factor).round().double() * (largest / 127.0)).flatten(1)


@pytest.mark.parametrize("type_name", QUANTISED)
@pytest.mark.parametrize("m", [1, 2, 5, 33])
def test_lossy_products_are_those_of_inputs_in_8_bits(type_name, m):
    n, k = sizes(type_name)
    weight, bias, x = make_weight(type_name, n, k, 1), normal(n, seed=2), normal(m, k, seed=3)
    x[0, 32:64] = 0.0
    linear, exact = (kernels(is_lossy=lossy).linear(weight, bias) for lossy in (True, False))
    w = dequantised(weight).double()
    x_8 = in_8_bits(x)
    allowed = 2.0**-24 * (k // 16 + 4) * (x_8.abs() @ w.abs().T + bias.abs())
    assert ((linear(x) - (x_8 @ w.T + bias)).abs() <= allowed).all()
    error = (linear(x) - exact(x)).norm() / exact(x).norm()
    assert 1e-4 < error < 0.02
    assert torch.equal(linear(x), torch.cat([linear(row.unsqueeze(0)) for row in x]))
    for cpu in (AVX2, NO_VNNI) if has_avx512 else (AVX2,):
        assert torch.equal(linear(x), kernels(cpu=cpu, is_lossy=True).linear(weight, bias)(x))


def test_lossy_kernels_leave_weights_without_codes_alone_and_bad_rows_bad():
    x = normal(4, 64)
    floats = make_weight("F32", 40, 64)
    assert torch.equal(kernels(is_lossy=True).linear(floats)(x), kernels().linear(floats)(x))
    linear = kernels(is_lossy=True).linear(make_weight("Q8_0", 40, 64))
    clean = linear(x)
    x[1, 40] = float("inf")
    y = linear(x)
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2, 3]], clean[[0, 2, 3]])


def test_q4_0_scales_too_large_for_an_fp16_minimum_stay_exact():
    weight = make_weight("Q4_0", 5, 64)
    weight.data[:, 1] = 0x7A  # the upper byte of the first scale: about 50,000
    assert torch.equal(kernels().linear(weight)(torch.eye(64)).T, dequantised(weight))


def test_a_nan_row_leaves_other_rows_alone():
    linear = kernels().linear(make_weight("Q4_1", 64, 64))
    x = normal(9, 64)
    clean = linear(x)
    x[4, 10] = float("nan")
    y = linear(x)
    assert y[4].isnan().all()
    assert torch.equal(y[[0, 1, 2, 3, 5, 6, 7, 8]], clean[[0, 1, 2, 3, 5, 6, 7, 8]])


def test_no_rows_give_no_rows():
    assert kernels().linear(make_weight("F32", 40, 24))(torch.empty(0, 24)).shape == (0, 40)


def test_rows_of_a_wider_tensor_are_read_as_they_are():
    linear = kernels().linear(make_weight("F32", 40, 24))
    wide = normal(5, 48)
    assert torch.equal(linear(wide[:, :24]), linear(wide[:, :24].contiguous()))


def test_an_unknown_type_is_refused_by_name():
    with pytest.raises(ValueError, match="IQ2_XS"):
        kernels().linear(Weight(torch.zeros(4, 8, dtype=torch.uint8), "IQ2_XS", (4, 32)))


def test_blocks_that_do_not_fit_the_shape_are_refused():
    weight = make_weight("Q8_0", 4, 64)
    with pytest.raises(ValueError, match="Q8_0"):
        kernels().linear(Weight(weight.data, "Q8_0", (4, 96)))


@pytest.mark.parametrize("type_name", ["F32", "BF16", "F16", "Q4_1", "Q8_0", "Q6_K"])
def test_embedding_rows_are_the_dequantised_ones(type_name):
    weight = make_weight(type_name, 50, 256)
    ids = torch.tensor([3, 49, 3, 0])
    assert torch.equal(kernels().embedding(weight, ids), dequantised(weight)[ids])


def test_an_id_beyond_the_vocabulary_is_our_own_mistake():
    for stranger in (50, -1):
        with pytest.raises(AssertionError, match="1 token ids"):
            kernels().embedding(make_weight("Q8_0", 50, 256), torch.tensor([3, stranger]))


@pytest.mark.parametrize("k", [1, 16, 100, 576])
def test_rms_norm_is_within_rounding_of_float64(k):
    x, weight = normal(5, k, seed=1), normal(k, seed=2)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(
        kernels().rms_norm(x, weight, 1e-5), expected.float(), rtol=1e-6, atol=1e-7
    )
    one = torch.cat([kernels().rms_norm(row.unsqueeze(0), weight, 1e-5) for row in x])
    assert torch.equal(one, kernels().rms_norm(x, weight, 1e-5))
