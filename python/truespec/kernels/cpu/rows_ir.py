"""Row-wise kernels: embedding, norm, head preparation (bias, norm, rotation), gated activation,
addition, fixed point.

Rows are padded to a multiple of 16 floats; sums run over 16 fixed lanes, so they do not depend on
the CPU's vector length.
"""

from __future__ import annotations

import llvmlite.ir as ir

from .emit import BYTE, F16, F32, I32, I64, LANES, Emit, i64, new_function, splat, vector
from .fixed_ir import emit_to_bytes, emit_to_fixed

# name -> number of arguments; what they are is said where the function is built.
ROW_FUNCTIONS = {
    "rms_norm": 6,
    "rotate_head": 8,
    "add_rows": 4,
    "silu_mul": 4,
    "embed_q8_0": 6,
    "to_fixed": 3,
    "to_bytes": 3,
}
Q8_0_BYTES, Q8_0_GROUP = 34, 32
HALF_LANES = 8


def rows_module() -> ir.Module:
    """A module with the functions of `ROW_FUNCTIONS`."""
    module = ir.Module("rows")
    norm = _rms_norm(module)
    _rotate_head(module, norm)
    _add_rows(module)
    _silu_mul(module)
    _embed_q8_0(module)
    _to_fixed(module)
    _to_bytes(module)
    return module


def _rms_norm(module: ir.Module) -> ir.Function:
    """rms_norm(x, weight, out, n, padded n, eps bits): x / sqrt(mean(x^2) + eps) * weight."""
    e = new_function(module, "rms_norm", ROW_FUNCTIONS["rms_norm"])
    x, weight, out, n, padded, eps_bits = e.args
    total = e.variable(splat(F32, 0.0))
    with e.loop(padded, step=LANES) as i:
        lanes = e.load_f32x16(e.address(x, e.times(i, 4)))
        e.set(total, e.fma(lanes, lanes, e.get(total)))
    mean = e.b.fdiv(e.sum_lanes(e.get(total)), e.b.sitofp(n, F32))
    root = e.intrinsic("llvm.sqrt.f32", F32, [e.b.fadd(mean, e.f32_from_bits(eps_bits))])
    inverse = e.broadcast(e.b.fdiv(ir.Constant(F32, 1.0), root))
    with e.loop(padded, step=LANES) as i:
        offset = e.times(i, 4)
        lanes = e.b.fmul(e.load_f32x16(e.address(x, offset)), inverse)
        scaled = e.b.fmul(lanes, e.load_f32x16(e.address(weight, offset)))
        e.store(scaled, e.address(out, offset))
    e.b.ret(i64(0))
    return e.b.function


def _rotate_head(module: ir.Module, norm: ir.Function) -> None:
    """rotate_head(x, bias, weight, cos, sin, head_dim, eps bits, scale bits), in place.

    x + bias (unless its address is 0), normed with `weight` (unless 0), rotated, times scale.
    """
    e = new_function(module, "rotate_head", ROW_FUNCTIONS["rotate_head"])
    x, bias, weight, cos, sin, head_dim, eps_bits, scale_bits = e.args
    with e.b.if_then(e.b.icmp_signed("!=", bias, i64(0))):
        _add_to(e, x, bias, head_dim)
    with e.b.if_then(e.b.icmp_signed("!=", weight, i64(0))):
        e.b.call(norm, [x, weight, x, head_dim, head_dim, eps_bits])
    half = e.b.lshr(head_dim, i64(1))
    scale = e.broadcast(e.f32_from_bits(scale_bits), HALF_LANES)
    kind = vector(F32, HALF_LANES)
    with e.loop(half, step=HALF_LANES) as i:
        low, high = e.address(x, e.times(i, 4)), e.address(x, e.times(e.b.add(i, half), 4))
        a, b = e.load(low, kind), e.load(high, kind)
        c, s = (e.load(e.address(table, e.times(i, 4)), kind) for table in (cos, sin))
        first = e.b.fsub(e.b.fmul(a, c), e.b.fmul(b, s))
        second = e.b.fadd(e.b.fmul(b, c), e.b.fmul(a, s))
        e.store(e.b.fmul(first, scale), low)
        e.store(e.b.fmul(second, scale), high)
    e.b.ret(i64(0))


def _add_rows(module: ir.Module) -> None:
    """add_rows(x, y, bias, n): x += y (+ bias unless its address is 0); n a multiple of 16."""
    e = new_function(module, "add_rows", ROW_FUNCTIONS["add_rows"])
    x, y, bias, n = e.args
    with e.b.if_then(e.b.icmp_signed("!=", bias, i64(0))):
        _add_to(e, y, bias, n)
    _add_to(e, x, y, n)
    e.b.ret(i64(0))


def _silu_mul(module: ir.Module) -> None:
    """silu_mul(gate, up, out, n): gate / (1 + exp(-gate)) * up; n a multiple of 16."""
    e = new_function(module, "silu_mul", ROW_FUNCTIONS["silu_mul"])
    gate, up, out, n = e.args
    with e.loop(n, step=LANES) as i:
        offset = e.times(i, 4)
        g, u = (e.load_f32x16(e.address(base, offset)) for base in (gate, up))
        sigmoid_inverse = e.b.fadd(e.exp(e.b.fneg(g)), splat(F32, 1.0))
        e.store(e.b.fmul(e.b.fdiv(g, sigmoid_inverse), u), e.address(out, offset))
    e.b.ret(i64(0))


def _embed_q8_0(module: ir.Module) -> None:
    """embed_q8_0(rows of a weight, number of them, ids, m, groups, out [m, 32 * groups]).

    Returns how many ids (int64) name no row; those are left out.
    """
    e = new_function(module, "embed_q8_0", ROW_FUNCTIONS["embed_q8_0"])
    data, num_rows, ids, m, groups, out = e.args
    strangers = e.variable(i64(0))
    with e.loop(m) as i:
        row = e.load(e.address(ids, e.times(i, 8)), I64, 8)
        known = e.b.icmp_unsigned("<", row, num_rows)
        with e.b.if_else(known) as (then, otherwise):
            with then, e.loop(groups) as g:
                index = e.b.add(e.b.mul(row, groups), g)
                block = e.address(data, e.times(index, Q8_0_BYTES))
                scale = e.broadcast(e.b.fpext(e.load(block, F16, 2), F32))
                target = e.b.add(e.b.mul(i, groups), g)
                for lane in range(0, Q8_0_GROUP, LANES):
                    codes = e.load(e.address(block, 2 + lane), vector(BYTE), 1)
                    values = e.b.sitofp(e.b.sext(codes, vector(I32)), vector(F32))
                    at = e.address(out, e.times(target, 4 * Q8_0_GROUP), 4 * lane)
                    e.store(e.b.fmul(values, scale), at)
            with otherwise:
                e.set(strangers, e.b.add(e.get(strangers), i64(1)))
    e.b.ret(e.get(strangers))


def _to_fixed(module: ir.Module) -> None:
    """to_fixed(x, out, blocks): 32 * blocks floats as fixed point, see fixed_ir.py."""
    e = new_function(module, "to_fixed", ROW_FUNCTIONS["to_fixed"])
    emit_to_fixed(e, *e.args)
    e.b.ret(i64(0))


def _to_bytes(module: ir.Module) -> None:
    """to_bytes(x, out, blocks): the same in 8 bits."""
    e = new_function(module, "to_bytes", ROW_FUNCTIONS["to_bytes"])
    emit_to_bytes(e, *e.args)
    e.b.ret(i64(0))


def _add_to(e: Emit, x: ir.Value, y: ir.Value, n: ir.Value) -> None:
    """x += y."""
    with e.loop(n, step=LANES) as i:
        offset = e.times(i, 4)
        total = e.b.fadd(e.load_f32x16(e.address(x, offset)), e.load_f32x16(e.address(y, offset)))
        e.store(total, e.address(x, offset))
