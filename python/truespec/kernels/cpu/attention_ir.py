"""Attention over blocks of 16 keys: scores, softmax, weighted values, and moving single slots.

K blocks are [head_dim, 16], V blocks [16, head_dim], fp32 or bf16. Per output the order of all
operations is fixed by key positions alone; how many queries share a load changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import llvmlite.ir as ir

from .blocking import Blocking
from .emit import F32, I16, I32, I64, LANES, Emit, i64, new_function, splat, vector

KVType = Literal["f32", "bf16"]
BLOCK = 16
BITS = {"f32": I32, "bf16": I16}
# name -> number of arguments
ATTENTION_FUNCTIONS = {
    "scores": 8,
    "softmax": 6,
    "values": 9,
    "finish": 4,
    "store_key": 4,
    "store_value": 4,
    "move_key": 5,
    "move_value": 5,
}


def attention_module(kv: KVType, blocking: Blocking) -> ir.Module:
    """A module with the functions of `ATTENTION_FUNCTIONS` for one type of K and V."""
    module = ir.Module(f"attention_{kv}")
    _scores(module, kv, blocking)
    _softmax(module)
    _values(module, kv, blocking)
    _finish(module)
    _store_slot(module, kv, "store_key")
    _store_slot(module, kv, "store_value")
    _move_slot(module, kv, "move_key")
    _move_slot(module, kv, "move_value")
    return module


def _scores(module: ir.Module, kv: KVType, blocking: Blocking) -> None:
    """scores(q, num, blocks, count, head_dim, out, bytes per row of out, ahead).

    q is [num, head_dim], `blocks` the addresses of `count` blocks of keys: out[i, 16 * j + t] =
    q_i . key t of block j. The block `ahead` entries later is prefetched, which may be garbage.
    """
    rows = range(1, blocking.query_rows + 1)
    single = {r: _score_block(module, kv, r, 1) for r in rows}
    several = {r: _score_block(module, kv, r, blocking.key_blocks) for r in rows}
    e = new_function(module, "scores", ATTENTION_FUNCTIONS["scores"])
    q, num, blocks, count, head_dim, out, ld_out, ahead = e.args
    ld_q = e.times(head_dim, 4)

    def run(functions: dict[int, ir.Function], first: ir.Value, at_once: int) -> None:
        entries = [e.address(blocks, e.times(first, 8), 8 * j) for j in range(at_once)]
        keys = [e.load(entry, I64, 8) for entry in entries]
        later = [e.load(e.address(entry, e.times(ahead, 8)), I64, 8) for entry in entries]

        def call(block: ir.Function, row: ir.Value) -> None:
            target = e.address(out, e.b.mul(row, ld_out), e.times(first, 4 * BLOCK))
            queries = e.address(q, e.b.mul(row, ld_q))
            e.b.call(block, [queries, ld_q, head_dim, target, ld_out, *keys, *later])

        _by_rows(e, num, blocking.query_rows, {r: partial(call, f) for r, f in functions.items()})

    whole = e.b.sub(count, e.b.srem(count, i64(blocking.key_blocks)))
    with e.loop(whole, step=blocking.key_blocks) as first:
        run(several, first, blocking.key_blocks)
    if blocking.key_blocks > 1:
        with e.loop(count, start=whole) as first:
            run(single, first, 1)
    e.b.ret(i64(0))


def _score_block(module: ir.Module, kv: KVType, rows: int, blocks: int) -> ir.Function:
    """block(q, ldq, head_dim, out, ld_out, keys ..., prefetched ...): chains over head_dim."""
    name = f"scores_{rows}_{blocks}"
    if name in module.globals:
        return module.globals[name]
    e = new_function(module, name, 5 + 2 * blocks, private=True)
    q, ld_q, head_dim, out, ld_out = e.args[:5]
    keys, ahead = e.args[5 : 5 + blocks], e.args[5 + blocks :]
    sums = [[e.variable(splat(F32, 0.0)) for _ in keys] for _ in range(rows)]
    unroll = 4
    with e.loop(head_dim, step=unroll) as d:
        for block in ahead:
            for line in range(0, unroll * BLOCK * _size(kv), 64):
                e.prefetch(e.address(block, e.times(d, BLOCK * _size(kv)), line))
        for u in range(unroll):
            at = e.b.add(d, i64(u))
            lanes = [_load_kv(e, kv, e.address(k, e.times(at, BLOCK * _size(kv)))) for k in keys]
            for r in range(rows):
                value = e.load_broadcast(e.address(q, e.times(ld_q, r), e.times(at, 4)))
                for slot, key in zip(sums[r], lanes, strict=True):
                    e.set(slot, e.fma(value, key, e.get(slot)))
    for r in range(rows):
        for j, slot in enumerate(sums[r]):
            e.store(e.get(slot), e.address(out, e.times(ld_out, r), 64 * j))
    e.b.ret(i64(0))
    return e.b.function


def _softmax(module: ir.Module) -> None:
    """softmax(scores, n, state, out, head_dim, first): one span of keys of one query, in place.

    Scores become exp(score - max so far), 0 beyond the first n. `state` is (max, sum) fp32 of the
    spans before (none if `first`); sum and out [head_dim] are rescaled to the new maximum. `out`
    is zeroed if `first`.
    """
    e = new_function(module, "softmax", ATTENTION_FUNCTIONS["softmax"])
    scores, n, state, out, head_dim, first = e.args
    is_first = e.b.icmp_signed("!=", first, i64(0))
    lowest = ir.Constant(F32, float("-inf"))
    old = e.b.select(is_first, lowest, e.load(state, F32))
    top = e.variable(e.broadcast(old))
    with e.loop(n, step=LANES) as i:
        lanes = e.load_f32x16(e.address(scores, e.times(i, 4)))
        masked = e.b.select(_valid(e, i, n), lanes, splat(F32, float("-inf")))
        e.set(top, e.larger(masked, e.get(top)))
    new = _max_lanes(e, e.get(top))
    new_lanes, total = e.broadcast(new), e.variable(splat(F32, 0.0))
    with e.loop(n, step=LANES) as i:
        at = e.address(scores, e.times(i, 4))
        weights = e.exp(e.b.fsub(e.load_f32x16(at), new_lanes))
        # NOTE: exp clamps, so a masked slot must be set to zero, not to a low score.
        weights = e.b.select(_valid(e, i, n), weights, splat(F32, 0.0))
        e.store(weights, at)
        e.set(total, e.b.fadd(e.get(total), weights))
    span_sum = e.sum_lanes(e.get(total))
    e.store(new, state)
    with e.b.if_else(is_first) as (start, go_on):
        with start:
            e.store(span_sum, e.address(state, 4))
            with e.loop(head_dim, step=LANES) as i:
                e.store(splat(F32, 0.0), e.address(out, e.times(i, 4)))
        with go_on:
            factor = e.exp(e.b.fsub(e.broadcast(old), new_lanes))
            _scale(e, out, head_dim, factor)
            scalar = e.b.extract_element(factor, ir.Constant(I32, 0))
            before = e.b.fmul(e.load(e.address(state, 4), F32), scalar)
            e.store(e.b.fadd(before, span_sum), e.address(state, 4))
    e.b.ret(i64(0))


def _values(module: ir.Module, kv: KVType, blocking: Blocking) -> None:
    """values(p, bytes per row of p, num, blocks, keys, head_dim, out, bytes per row, ahead).

    out[i] += sum over `keys` keys of p[i, key] * v[key], keys ascending, from the blocks of values
    whose addresses `blocks` lists. Later slots are not read. The block `ahead` entries later is
    prefetched, which may be garbage.
    """
    widths = [w for w in (4, 2, 1) if w <= blocking.value_vectors]
    rows = range(1, blocking.value_rows + 1)
    functions = {w: {r: _value_block(module, kv, r, w) for r in rows} for w in widths}
    e = new_function(module, "values", ATTENTION_FUNCTIONS["values"])
    p, ld_p, num, blocks, keys, head_dim, out, ld_out, ahead = e.args
    with e.loop(keys, step=BLOCK) as key:
        left = e.b.sub(keys, key)
        count = e.b.select(e.b.icmp_signed("<", left, i64(BLOCK)), left, i64(BLOCK))
        entry = e.address(blocks, e.times(e.b.lshr(key, i64(4)), 8))
        v, next_v = e.load(entry, I64, 8), e.load(e.address(entry, e.times(ahead, 8)), I64, 8)
        done = e.variable(i64(0))
        for width in widths:
            span = width * LANES
            start = e.get(done)
            stop = e.b.add(start, e.times(e.b.sdiv(e.b.sub(head_dim, start), i64(span)), span))
            with e.loop(stop, start=start, step=span) as d:

                def call(
                    block: ir.Function,
                    row: ir.Value,
                    d: ir.Value = d,
                    values: tuple[ir.Value, ...] = (v, next_v),
                    start: tuple[ir.Value, ir.Value] = (key, count),
                ) -> None:
                    weights = e.address(p, e.b.mul(row, ld_p), e.times(start[0], 4))
                    target = e.address(out, e.b.mul(row, ld_out), e.times(d, 4))
                    lanes, later = (e.address(x, e.times(d, _size(kv))) for x in values)
                    args = [weights, ld_p, lanes, start[1], head_dim, target, ld_out, later]
                    e.b.call(block, args)

                calls = {r: partial(call, block) for r, block in functions[width].items()}
                _by_rows(e, num, blocking.value_rows, calls)
            e.set(done, stop)
    e.b.ret(i64(0))


def _value_block(module: ir.Module, kv: KVType, rows: int, width: int) -> ir.Function:
    """block(p, ld_p, v, count, head_dim, out, ld_out, next v): rows times 16 * `width` columns."""
    e = new_function(module, f"values_{rows}_{width}", 8, private=True)
    p, ld_p, v, count, head_dim, out, ld_out, ahead = e.args

    def target(r: int, w: int) -> ir.Value:
        return e.address(out, e.times(ld_out, r), 64 * w)

    cells = [(r, w) for r in range(rows) for w in range(width)]
    sums = {(r, w): e.variable(e.load_f32x16(target(r, w))) for r, w in cells}
    with e.loop(count) as t:
        offset = e.b.mul(t, e.times(head_dim, _size(kv)))
        base = e.address(v, offset)
        for line in range(0, width * LANES * _size(kv), 64):
            e.prefetch(e.address(ahead, offset, line))
        lanes = [_load_kv(e, kv, e.address(base, w * LANES * _size(kv))) for w in range(width)]
        for r in range(rows):
            weight = e.load_broadcast(e.address(p, e.times(ld_p, r), e.times(t, 4)))
            for w in range(width):
                e.set(sums[r, w], e.fma(weight, lanes[w], e.get(sums[r, w])))
    for r, w in cells:
        e.store(e.get(sums[r, w]), target(r, w))
    e.b.ret(i64(0))
    return e.b.function


def _finish(module: ir.Module) -> None:
    """finish(acc, state, head_dim, out): out = acc / sum."""
    e = new_function(module, "finish", ATTENTION_FUNCTIONS["finish"])
    acc, state, head_dim, out = e.args
    total = e.load(e.address(state, 4), F32)
    inverse = e.broadcast(e.b.fdiv(ir.Constant(F32, 1.0), total))
    with e.loop(head_dim, step=LANES) as i:
        offset = e.times(i, 4)
        e.store(e.b.fmul(e.load_f32x16(e.address(acc, offset)), inverse), e.address(out, offset))
    e.b.ret(i64(0))


def _store_slot(module: ir.Module, kv: KVType, name: str) -> None:
    """store_key|value(x, block, offset, head_dim): one head's fp32 vector into a slot, rounded."""
    e = new_function(module, name, ATTENTION_FUNCTIONS[name])
    x, block, offset, head_dim = e.args
    with e.loop(head_dim) as d:
        bits = e.load(e.address(x, e.times(d, 4)), I32)
        if kv == "bf16":
            bits = _round_to_bf16(e, bits)
        e.store(bits, _element(e, name, kv, block, offset, d, head_dim), align=_size(kv))
    e.b.ret(i64(0))


def _move_slot(module: ir.Module, kv: KVType, name: str) -> None:
    """move_key|value(from block, from offset, to block, to offset, head_dim): copy one slot."""
    e = new_function(module, name, ATTENTION_FUNCTIONS[name])
    source, source_offset, block, offset, head_dim = e.args
    with e.loop(head_dim) as d:
        at = _element(e, name, kv, source, source_offset, d, head_dim)
        bits = e.load(at, BITS[kv], align=_size(kv))
        e.store(bits, _element(e, name, kv, block, offset, d, head_dim), align=_size(kv))
    e.b.ret(i64(0))


def _element(
    e: Emit, name: str, kv: KVType, block: ir.Value, offset: ir.Value, d: ir.Value, dim: ir.Value
) -> ir.Value:
    """Address of element d of the slot `offset` of a K or V block."""
    if name.endswith("key"):
        index = e.b.add(e.times(d, BLOCK), offset)
    else:
        index = e.b.add(e.b.mul(offset, dim), d)
    return e.address(block, e.times(index, _size(kv)))


def _by_rows(
    e: Emit, num: ir.Value, step: int, calls: Mapping[int, Callable[[ir.Value], None]]
) -> None:
    """Call `calls[step]` for whole blocks of rows and the fitting one for the rest."""
    whole = e.b.sub(num, e.b.srem(num, i64(step)))
    with e.loop(whole, step=step) as row:
        calls[step](row)
    e.switch(e.b.sub(num, whole), {r: partial(call, whole) for r, call in calls.items()})


def _load_kv(e: Emit, kv: KVType, address: ir.Value) -> ir.Value:
    """16 elements of the cache, widened."""
    if kv == "f32":
        return e.load_f32x16(address)
    wide = e.b.zext(e.load(address, vector(I16), align=2), vector(I32))
    return e.b.bitcast(e.b.shl(wide, splat(I32, 16)), vector(F32))


def _size(kv: KVType) -> int:
    """Bytes per element."""
    return 4 if kv == "f32" else 2


def _valid(e: Emit, start: ir.Value, n: ir.Value) -> ir.Value:
    """Mask of the lanes start + 0 .. 15 that lie below n."""
    left = e.broadcast(e.b.trunc(e.b.sub(n, start), I32))
    return e.b.icmp_signed("<", ir.Constant(vector(I32), list(range(LANES))), left)


def _max_lanes(e: Emit, lanes: ir.Value) -> ir.Value:
    """Largest of 16 lanes."""
    width = LANES
    while width > 1:
        width //= 2
        low = ir.Constant(vector(I32, width), list(range(width)))
        high = ir.Constant(vector(I32, width), list(range(width, 2 * width)))
        lanes = e.larger(
            e.b.shuffle_vector(lanes, lanes, low), e.b.shuffle_vector(lanes, lanes, high)
        )
    return e.b.extract_element(lanes, ir.Constant(I32, 0))


def _scale(e: Emit, x: ir.Value, n: ir.Value, factor: ir.Value) -> None:
    """x *= factor."""
    with e.loop(n, step=LANES) as i:
        at = e.address(x, e.times(i, 4))
        e.store(e.b.fmul(e.load_f32x16(at), factor), at)


def _round_to_bf16(e: Emit, bits: ir.Value) -> ir.Value:
    """fp32 bits to bf16 bits, to nearest even; a NaN stays one."""
    magnitude = e.b.and_(bits, ir.Constant(I32, 0x7FFFFFFF))
    is_nan = e.b.icmp_unsigned(">", magnitude, ir.Constant(I32, 0x7F800000))
    odd = e.b.and_(e.b.lshr(bits, ir.Constant(I32, 16)), ir.Constant(I32, 1))
    rounded = e.b.add(bits, e.b.add(odd, ir.Constant(I32, 0x7FFF)))
    quiet = e.b.or_(bits, ir.Constant(I32, 0x00400000))
    return e.b.trunc(e.b.lshr(e.b.select(is_nan, quiet, rounded), ir.Constant(I32, 16)), I16)
