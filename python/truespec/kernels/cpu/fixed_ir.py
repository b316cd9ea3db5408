"""Fixed-point rows: fp32 inputs of a product with coded weights, as integers of 22 bits.

32 consecutive values share a power of two; each becomes three digits of 7 bits (the highest has 8
and the sign), so that products with codes of up to 8 bits are sums of byte products. Integer sums
are exact, hence equal in any order; what is lost is 2^-21 of the largest of the 32 values, about
what a chain of fp32 additions loses.

Rows of one digit are the lossy alternative (W8A8): integers of 8 bits, with a scale that makes the
largest 127.
"""

from __future__ import annotations

import llvmlite.ir as ir

from .emit import F32, I16, I32, LANES, Emit, splat, vector

BLOCK = 32  # values that share a scale
BLOCK_BYTES = 4 * BLOCK  # as many as the fp32 values take
DIGITS = 3
DIGIT_BITS = 7
HALF = 16  # values of half a block, the group of some formats
SCALE, SUM = 96, 100  # byte offsets in a block: fp32 2^-t; fp32 sum of the values
HIGH_SUMS, LOW_SUMS = 104, 112  # int32 per half: sums of value >> 7 and of value & 127
VALUE_BITS = 21  # and a sign
MOST_BYTE = 127.0
_LEAST_EXPONENT = 40  # biased: smaller values count as zeros beside it
_BYTE = ir.IntType(8)


def emit_to_fixed(e: Emit, x: ir.Value, out: ir.Value, blocks: ir.Value) -> None:
    """Write `blocks` blocks of fixed point for as many times 32 floats.

    A NaN or an infinity makes the block's scale a NaN, and with it every product.
    """
    with e.loop(blocks) as block:
        offset = e.times(block, BLOCK_BYTES)
        source, target = e.address(x, offset), e.address(out, offset)
        halves = [e.load_f32x16(e.address(source, 4 * HALF * half)) for half in range(2)]
        exponent = e.b.lshr(_largest_bits(e, halves), ir.Constant(I32, 23))
        is_finite = e.b.icmp_unsigned("<", exponent, ir.Constant(I32, 255))
        low = ir.Constant(I32, _LEAST_EXPONENT)
        exponent = e.b.select(e.b.icmp_unsigned(">", exponent, low), exponent, low)
        # |x| < 2^(exponent - 126), so x * 2^(VALUE_BITS + 126 - exponent) has VALUE_BITS bits.
        up = e.b.sub(ir.Constant(I32, VALUE_BITS + 126 + 127), exponent)
        factor = e.broadcast(_power(e, up))
        down = _power(e, e.b.sub(exponent, ir.Constant(I32, VALUE_BITS + 126 - 127)))
        scale = e.b.select(is_finite, down, ir.Constant(F32, float("nan")))
        high_sums: list[ir.Value] = []
        low_sums: list[ir.Value] = []
        for half, values in enumerate(halves):
            scaled = e.b.select(is_finite, e.b.fmul(values, factor), splat(F32, 0.0))
            integers = _rounded(e, scaled)
            high = e.b.ashr(integers, splat(I32, DIGIT_BITS))
            low_digit = e.b.and_(integers, splat(I32, 127))
            digits = e.b.ashr(high, splat(I32, DIGIT_BITS)), e.b.and_(high, splat(I32, 127))
            for place, digit in enumerate((*digits, low_digit)):
                at = e.address(target, BLOCK * place + HALF * half)
                e.store(e.b.trunc(digit, vector(_BYTE)), at)
            for sums, parts, at in ((high_sums, high, HIGH_SUMS), (low_sums, low_digit, LOW_SUMS)):
                sums.append(e.intrinsic("llvm.vector.reduce.add.v16i32", I32, [parts]))
                e.store(sums[-1], e.address(target, at + 4 * half))
        total = e.b.shl(e.b.add(*high_sums), ir.Constant(I32, DIGIT_BITS))
        total = e.b.sitofp(e.b.add(total, e.b.add(*low_sums)), F32)
        e.store(scale, e.address(target, SCALE))
        e.store(e.b.fmul(total, scale), e.address(target, SUM))


def emit_to_bytes(e: Emit, x: ir.Value, out: ir.Value, blocks: ir.Value) -> None:
    """As `emit_to_fixed`, with the highest digit only: x / scale to the nearest integer."""
    with e.loop(blocks) as block:
        offset = e.times(block, BLOCK_BYTES)
        source, target = e.address(x, offset), e.address(out, offset)
        halves = [e.load_f32x16(e.address(source, 4 * HALF * half)) for half in range(2)]
        bits = _largest_bits(e, halves)
        exponent, largest = e.b.lshr(bits, ir.Constant(I32, 23)), e.b.bitcast(bits, F32)
        is_finite = e.b.icmp_unsigned("<", exponent, ir.Constant(I32, 255))
        is_large = e.b.icmp_unsigned(">", exponent, ir.Constant(I32, _LEAST_EXPONENT))
        most, zero = ir.Constant(F32, MOST_BYTE), ir.Constant(F32, 0.0)
        factor = e.broadcast(e.b.select(is_large, e.b.fdiv(most, largest), zero))
        scale = e.b.select(is_finite, e.b.fdiv(largest, most), ir.Constant(F32, float("nan")))
        sums: list[ir.Value] = []
        for half, values in enumerate(halves):
            scaled = e.b.select(is_finite, e.b.fmul(values, factor), splat(F32, 0.0))
            rounded = e.intrinsic("llvm.rint.v16f32", vector(F32), [scaled])
            digits = e.b.fptosi(rounded, vector(I32))
            e.store(e.b.trunc(digits, vector(_BYTE)), e.address(target, HALF * half))
            sums.append(e.intrinsic("llvm.vector.reduce.add.v16i32", I32, [digits]))
            e.store(sums[-1], e.address(target, HIGH_SUMS + 4 * half))
        e.store(scale, e.address(target, SCALE))
        total = e.b.sitofp(e.b.add(*sums), F32)
        e.store(e.b.fmul(total, scale), e.address(target, SUM))


def emit_dot4(e: Emit, total: ir.Value, codes: ir.Value, digits: ir.Value, vnni: bool) -> ir.Value:
    """total + the products of 4 bytes each: <16 x i32>, codes unsigned, digits signed."""
    if vnni:
        kind = vector(_BYTE, 64)
        args = [total, e.b.bitcast(codes, kind), e.b.bitcast(digits, kind)]
        return e.intrinsic("llvm.x86.avx512.vpdpbusd.512", vector(I32), args)
    shorts, eight = vector(I16, 2 * LANES), splat(I16, 8, 2 * LANES)
    a, b = e.b.bitcast(codes, shorts), e.b.bitcast(digits, shorts)
    low = e.b.and_(a, splat(I16, 255, 2 * LANES)), e.b.ashr(e.b.shl(b, eight), eight)
    high = e.b.lshr(a, eight), e.b.ashr(b, eight)
    return e.b.add(e.b.add(total, _dot2(e, *low)), _dot2(e, *high))


def _dot2(e: Emit, a: ir.Value, b: ir.Value) -> ir.Value:
    """Sums of two neighbouring products of 16-bit numbers; LLVM knows an instruction for it."""
    wide = vector(I32, 2 * LANES)
    products = e.b.mul(e.b.sext(a, wide), e.b.sext(b, wide))
    even, odd = (
        e.b.shuffle_vector(
            products, products, ir.Constant(vector(I32), list(range(first, 2 * LANES, 2)))
        )
        for first in range(2)
    )
    return e.b.add(even, odd)


def _largest_bits(e: Emit, halves: list[ir.Value]) -> ir.Value:
    """The bits of the largest magnitude, i32; their exponent is 255 if a value is not finite."""
    bits = [e.b.and_(e.b.bitcast(x, vector(I32)), splat(I32, 0x7FFFFFFF)) for x in halves]
    larger = e.b.select(e.b.icmp_unsigned(">", bits[0], bits[1]), bits[0], bits[1])
    return e.intrinsic("llvm.vector.reduce.umax.v16i32", I32, [larger])


def _power(e: Emit, biased: ir.Value) -> ir.Value:
    """2^(biased - 127)."""
    return e.b.bitcast(e.b.shl(biased, ir.Constant(I32, 23)), F32)


def _rounded(e: Emit, scaled: ir.Value) -> ir.Value:
    """To the nearest integer, below 2^VALUE_BITS."""
    integers = e.b.fptosi(e.intrinsic("llvm.rint.v16f32", vector(F32), [scaled]), vector(I32))
    most = splat(I32, 2**VALUE_BITS - 1)
    return e.b.select(e.b.icmp_signed("<", integers, most), integers, most)
