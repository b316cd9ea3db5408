"""The linear kernel of a format without codes: y[m, n] = x[m, k] W^T over a range of panels.

Every output is a sum of chains of fp32 FMAs, one chain per 128 consecutive k, k ascending: the
short chains keep rounding below that of a library's product, and a row's result depends neither on
the number of rows nor on how they are blocked. Few rows: weights are widened on the fly, for so
many panels at once that their chains hide the latency of an FMA. More rows: a panel is widened
once into scratch and read by every block of rows.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import llvmlite.ir as ir

from .blocking import Blocking
from .emit import F32, Emit, i64, new_function, splat
from .formats import FORMATS, PANEL, ROW_BYTES, Format, emit_floats

PREFETCH_BYTES = 3072
FAR_PREFETCH_BYTES = 8192  # one stream of 16-bit or wider weights; others gain nothing from more
SPAN = 128  # consecutive k of one chain; a multiple of every format's group
VECTOR_BYTES = 64
PANEL_VECTORS = PANEL // 16
DIRECT_BLOCKS = 4  # of rows, up to which widening on the fly, once per block, is the faster way
NUM_ARGS = 11

Blocks = dict[int, ir.Function]  # by number of rows


class Operands(NamedTuple):
    """What a block of rows works on: addresses, strides in bytes, groups of weights."""

    x: ir.Value
    ldx: ir.Value
    w: ir.Value
    panel_stride: ir.Value
    groups: ir.Value
    y: ir.Value
    y_panel_stride: ir.Value
    ldy: ir.Value


def linear_module(f: Format, blocking: Blocking) -> ir.Module:
    """A module with the function `linear_<format>`.

    Its arguments: x, bytes per row of x, m, packed weight, first panel, last panel (exclusive),
    bytes per panel, groups per row, y, bytes per row of y, scratch [32 * padded k] fp32.
    Rows of x are readable up to the padded k; rows of y are writable up to the padded n.
    """
    module = ir.Module(f"linear_{f.name}")
    singles = _blocks(module, f, blocking, ahead=True)
    few = _few_rows(module, f, blocking, singles)
    several = _several_rows(module, blocking, singles)
    many = _many_rows(module, f, blocking)
    e = new_function(module, f"linear_{f.name}", NUM_ARGS)
    m = e.args[2]
    with e.b.if_else(e.b.icmp_signed("<=", m, i64(blocking.rows))) as (one_block, more):
        with one_block:
            e.b.call(few, e.args)
        with more:
            limit = i64(blocking.rows * DIRECT_BLOCKS)
            with e.b.if_else(e.b.icmp_signed("<=", m, limit)) as (some, lots):
                with some:
                    e.b.call(several, e.args)
                with lots:
                    e.b.call(many, e.args)
    e.b.ret(i64(0))
    return module


def _few_rows(module: ir.Module, f: Format, blocking: Blocking, singles: Blocks) -> ir.Function:
    """One block of rows: runs of neighbouring panels side by side, then what is left of them."""
    e = new_function(module, "few_rows", NUM_ARGS, private=True)
    x, ldx, m, w, first, last, panel_bytes, groups, y, ldy, _ = e.args

    def walk(blocks: Blocks, rows: int, start: ir.Value, runs: int, run: ir.Value) -> ir.Value:
        strides = e.b.mul(run, panel_bytes), e.times(run, ROW_BYTES)
        stop = e.b.add(start, run)
        with e.loop(stop, start=start) as p:
            panel, out = e.address(w, e.b.mul(p, panel_bytes)), e.address(y, e.times(p, ROW_BYTES))
            a = Operands(x, ldx, panel, strides[0], groups, out, strides[1], ldy)
            if runs > 1:
                e.b.call(blocks[rows], a)
            else:
                _panel(e, blocking, blocks[rows], a)
        return e.b.add(start, e.times(run, runs))

    wide = {
        r: _block(module, f, blocking, r, n * PANEL_VECTORS) for r, n in blocking.panels.items()
    }

    def case(rows: int) -> None:
        start = first
        if rows in wide:
            runs = blocking.panels[rows]
            start = walk(wide, rows, first, runs, e.b.sdiv(e.b.sub(last, first), i64(runs)))
        walk(singles, rows, start, 1, e.b.sub(last, start))

    e.switch(m, {r: partial(case, r) for r in singles})
    e.b.ret(i64(0))
    return e.b.function


def _several_rows(module: ir.Module, blocking: Blocking, singles: Blocks) -> ir.Function:
    """A few blocks of rows, each widening a panel on the fly."""
    e = new_function(module, "several_rows", NUM_ARGS, private=True)
    x, ldx, m, w, first, last, panel_bytes, groups, y, ldy, _ = e.args
    with e.loop(last, start=first) as p:
        panel, out = e.address(w, e.b.mul(p, panel_bytes)), e.address(y, e.times(p, ROW_BYTES))
        a = Operands(x, ldx, panel, i64(0), groups, out, i64(0), ldy)
        _row_blocks(e, blocking, singles, m, a)
    e.b.ret(i64(0))
    return e.b.function


def _many_rows(module: ir.Module, f: Format, blocking: Blocking) -> ir.Function:
    """A panel is widened, then all blocks of rows read it."""
    f32 = FORMATS["f32"]
    blocks = _blocks(module, f32, blocking, ahead=f == f32, name="many")
    widen = None if f == f32 else _widen(module, f)
    e = new_function(module, "many_rows", NUM_ARGS, private=True)
    x, ldx, m, w, first, last, panel_bytes, groups, y, ldy, scratch = e.args
    count = e.times(groups, f.group // f32.group)
    with e.loop(last, start=first) as p:
        source, out = e.address(w, e.b.mul(p, panel_bytes)), e.address(y, e.times(p, ROW_BYTES))
        if widen is not None:
            e.b.call(widen, [source, groups, scratch])
            source = scratch
        a = Operands(x, ldx, source, i64(0), count, out, i64(0), ldy)
        _row_blocks(e, blocking, blocks, m, a)
    e.b.ret(i64(0))
    return e.b.function


def _row_blocks(e: Emit, blocking: Blocking, blocks: Blocks, m: ir.Value, a: Operands) -> None:
    """All rows of a panel in as few blocks as possible, of nearly equal size."""
    num = e.b.sdiv(e.b.add(m, i64(blocking.rows - 1)), i64(blocking.rows))
    first_row = e.variable(i64(0))
    with e.loop(num) as done:
        row, left = e.get(first_row), e.b.sub(num, done)
        rows = e.b.sdiv(e.b.add(e.b.sub(m, row), e.b.sub(left, i64(1))), left)
        x, y = e.address(a.x, e.b.mul(row, a.ldx)), e.address(a.y, e.b.mul(row, a.ldy))
        moved = a._replace(x=x, y=y)
        e.switch(rows, {r: partial(_panel, e, blocking, b, moved) for r, b in blocks.items()})
        e.set(first_row, e.b.add(row, rows))


def _panel(e: Emit, blocking: Blocking, block: ir.Function, a: Operands) -> None:
    """Call a block for all outputs of a panel."""
    for offset in range(0, ROW_BYTES, blocking.vectors * VECTOR_BYTES):
        e.b.call(block, a._replace(w=e.address(a.w, offset), y=e.address(a.y, offset)))


def _blocks(
    module: ir.Module, f: Format, blocking: Blocking, *, ahead: bool, name: str = "few"
) -> Blocks:
    """The blocks of one panel or a part of it."""
    return {
        r: _block(module, f, blocking, r, blocking.vectors, ahead=ahead, name=name)
        for r in range(1, blocking.rows + 1)
    }


def _block(
    module: ir.Module,
    f: Format,
    blocking: Blocking,
    rows: int,
    vectors: int,
    *,
    ahead: bool = True,
    name: str = "few",
) -> ir.Function:
    """block(*Operands): `rows` rows times 16 * `vectors` outputs, two vectors to a panel."""
    name = f"{name}_{rows}_{vectors}"
    span = _span(module, f, rows, vectors, ahead=ahead, name=f"{name}_span")
    e = new_function(module, name, len(Operands._fields), private=True)
    a = Operands(*e.args)
    groups_per_span = SPAN // f.group
    for r in range(rows):
        for address in vectors_of(e, e.address(a.y, e.times(a.ldy, r)), a.y_panel_stride, vectors):
            e.store(splat(F32, 0.0), address)
    with e.loop(a.groups, step=groups_per_span) as first:
        inputs = e.address(a.x, e.times(first, f.group * 4))
        weights = e.address(a.w, e.times(first, f.words * ROW_BYTES))
        left = e.b.sub(a.groups, first)
        enough = e.b.icmp_signed("<", left, i64(groups_per_span))
        count = e.b.select(enough, left, i64(groups_per_span))
        e.b.call(span, a._replace(x=inputs, w=weights, groups=count))
    e.b.ret(i64(0))
    return e.b.function


def _span(
    module: ir.Module,
    f: Format,
    rows: int,
    vectors: int,
    *,
    ahead: bool,
    name: str,
) -> ir.Function:
    """span(*Operands): y += one chain per output over some groups."""
    e = new_function(module, name, len(Operands._fields), private=True)
    a = Operands(*e.args)
    sums = [[e.variable(splat(F32, 0.0)) for _ in range(vectors)] for _ in range(rows)]
    with e.loop(a.groups) as g:
        start = e.address(a.w, e.times(g, f.words * ROW_BYTES))
        bases = vectors_of(e, start, a.panel_stride, vectors)
        inputs = e.address(a.x, e.times(g, f.group * 4))
        if ahead:
            far = vectors <= PANEL_VECTORS
            prefetch(e, f, bases, FAR_PREFETCH_BYTES if far else PREFETCH_BYTES)

        def add_products(k: ir.Value, weights: list[ir.Value], inputs: ir.Value = inputs) -> None:
            for r in range(rows):
                value = e.load_broadcast(e.address(inputs, e.times(a.ldx, r), e.times(k, 4)))
                for slot, weight in zip(sums[r], weights, strict=True):
                    e.set(slot, e.fma(value, weight, e.get(slot)))

        emit_floats(e, f, bases, add_products)
    for r in range(rows):
        targets = vectors_of(e, e.address(a.y, e.times(a.ldy, r)), a.y_panel_stride, vectors)
        for target, slot in zip(targets, sums[r], strict=True):
            e.store(e.b.fadd(e.load_f32x16(target), e.get(slot)), target)
    e.b.ret(i64(0))
    return e.b.function


def _widen(module: ir.Module, f: Format) -> ir.Function:
    """widen(w, groups, out): a panel as fp32 [k][32]."""
    e = new_function(module, "widen", 3, private=True)
    w, groups, out = e.args
    with e.loop(groups) as g:
        start = e.address(w, e.times(g, f.words * ROW_BYTES))
        bases = vectors_of(e, start, i64(0), PANEL_VECTORS)
        target = e.address(out, e.times(g, f.group * ROW_BYTES))
        prefetch(e, f, bases, PREFETCH_BYTES)

        def store(k: ir.Value, weights: list[ir.Value], target: ir.Value = target) -> None:
            for v, weight in enumerate(weights):
                e.store(weight, e.address(target, e.times(k, ROW_BYTES), VECTOR_BYTES * v))

        emit_floats(e, f, bases, store)
    e.b.ret(i64(0))
    return e.b.function


def vectors_of(e: Emit, first: ir.Value, panel_stride: ir.Value, count: int) -> list[ir.Value]:
    """Addresses of `count` vectors, those beyond the second in panels a stride apart."""
    places = (divmod(v, PANEL_VECTORS) for v in range(count))
    return [e.address(first, e.times(panel_stride, p), VECTOR_BYTES * v) for p, v in places]


def prefetch(e: Emit, f: Format, bases: list[ir.Value], ahead: int) -> None:
    """Ask for the words of a group that comes soon, so many bytes ahead.

    A step reads wide weights in a circle larger than any cache: kept, they only drive others out.
    """
    once = not f.is_coded
    for line in range(f.words):
        for base in bases:
            e.prefetch(e.address(base, ahead + line * ROW_BYTES), once=once)
