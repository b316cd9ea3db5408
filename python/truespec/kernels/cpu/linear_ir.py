"""The linear kernel of a panel format: y[m, n] = x[m, k] W^T over a range of panels.

Every output is a sum of chains of fp32 FMAs, one chain per 128 consecutive k, k ascending: the
short chains keep rounding below that of a library's product, and a row's result depends neither on
the number of rows nor on how they are blocked. Few rows: weights are widened on the fly. More
rows: a panel is widened once into scratch and read by every block of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import llvmlite.ir as ir

from .blocking import Blocking
from .emit import F32, Emit, i64, new_function, splat
from .formats import FORMATS, PANEL, ROW_BYTES, Format, emit_group

PREFETCH_BYTES = 3072
SPAN = 128  # consecutive k of one chain; a multiple of every format's group
NUM_ARGS = 11


def linear_module(f: Format, blocking: Blocking) -> ir.Module:
    """A module with the function `linear_<format>`.

    Its arguments: x, bytes per row of x, m, packed weight, first panel, last panel (exclusive),
    bytes per panel, groups per row, y, bytes per row of y, scratch [32 * padded k] fp32.
    Rows of x are readable up to the padded k; rows of y are writable up to the padded n.
    """
    module = ir.Module(f"linear_{f.name}")
    rows = range(1, blocking.rows + 1)
    direct = {r: _row_block(module, f, r, blocking.vectors, prefetch=True) for r in rows}
    if f.name == "f32":
        widened, widen = direct, None
    else:
        f32 = FORMATS["f32"]
        widened = {r: _row_block(module, f32, r, blocking.vectors, prefetch=False) for r in rows}
        widen = _widen_panel(module, f)
    _linear(module, f, blocking, direct, widened, widen)
    return module


def _row_block(
    module: ir.Module, f: Format, rows: int, vectors: int, *, prefetch: bool
) -> ir.Function:
    """block(x, ldx, w, groups, y, ldy): `rows` rows times 16 * `vectors` outputs."""
    name = f"{f.name}_{rows}{'p' * prefetch}"
    span = _span(module, f, rows, vectors, prefetch=prefetch, name=f"{name}_span")
    e = new_function(module, name, 6, private=True)
    x, ldx, w, groups, y, ldy = e.args
    groups_per_span = SPAN // f.group
    for r in range(rows):
        for v in range(vectors):
            e.store(splat(F32, 0.0), e.address(y, e.times(ldy, r), 64 * v))
    with e.loop(groups, step=groups_per_span) as first:
        inputs = e.address(x, e.times(first, f.group * 4))
        weights = e.address(w, e.times(first, f.words * ROW_BYTES))
        left = e.b.sub(groups, first)
        enough = e.b.icmp_signed("<", left, i64(groups_per_span))
        count = e.b.select(enough, left, i64(groups_per_span))
        e.b.call(span, [inputs, ldx, weights, count, y, ldy])
    e.b.ret(i64(0))
    return e.b.function


def _span(
    module: ir.Module, f: Format, rows: int, vectors: int, *, prefetch: bool, name: str
) -> ir.Function:
    """span(x, ldx, w, groups, y, ldy): y += one chain per output over some groups."""
    e = new_function(module, name, 6, private=True)
    x, ldx, w, groups, y, ldy = e.args
    sums = [[e.variable(splat(F32, 0.0)) for _ in range(vectors)] for _ in range(rows)]
    with e.loop(groups) as g:
        base = e.address(w, e.times(g, f.words * ROW_BYTES))
        inputs = e.address(x, e.times(g, f.group * 4))
        if prefetch:
            for line in range(f.words):
                for v in range(vectors):
                    e.prefetch(e.address(base, PREFETCH_BYTES + line * ROW_BYTES + 64 * v))

        def add_products(k: ir.Value, weights: list[ir.Value], inputs: ir.Value = inputs) -> None:
            for r in range(rows):
                value = e.load_broadcast(e.address(inputs, e.times(ldx, r), e.times(k, 4)))
                for slot, weight in zip(sums[r], weights, strict=True):
                    e.set(slot, e.fma(value, weight, e.get(slot)))

        emit_group(e, f, base, vectors, add_products)
    for r in range(rows):
        for v, slot in enumerate(sums[r]):
            target = e.address(y, e.times(ldy, r), 64 * v)
            e.store(e.b.fadd(e.load_f32x16(target), e.get(slot)), target)
    e.b.ret(i64(0))
    return e.b.function


def _widen_panel(module: ir.Module, f: Format) -> ir.Function:
    """widen(w, groups, out): a panel as fp32 [k][32]."""
    e = new_function(module, f"{f.name}_widen", 3, private=True)
    w, groups, out = e.args
    vectors = 2
    with e.loop(groups) as g:
        base = e.address(w, e.times(g, f.words * ROW_BYTES))
        target = e.address(out, e.times(g, f.group * ROW_BYTES))
        for line in range(f.words):
            for v in range(vectors):
                e.prefetch(e.address(base, PREFETCH_BYTES + line * ROW_BYTES + 64 * v))

        def store(k: ir.Value, weights: list[ir.Value], target: ir.Value = target) -> None:
            for v, weight in enumerate(weights):
                e.store(weight, e.address(target, e.times(k, ROW_BYTES), 64 * v))

        emit_group(e, f, base, vectors, store)
    e.b.ret(i64(0))
    return e.b.function


def _linear(
    module: ir.Module,
    f: Format,
    blocking: Blocking,
    direct: dict[int, ir.Function],
    widened: dict[int, ir.Function],
    widen: ir.Function | None,
) -> None:
    """The public function: panels, then blocks of rows."""
    e = new_function(module, f"linear_{f.name}", NUM_ARGS)
    x, ldx, m, w, first, last, panel_bytes, groups, y, ldy, scratch = e.args
    few = e.b.icmp_signed("<=", m, i64(blocking.rows * _direct_blocks(f)))
    f32_groups = e.times(groups, f.group // FORMATS["f32"].group)
    with e.loop(last, start=first) as p:
        panel = e.address(w, e.b.mul(p, panel_bytes))
        out = e.address(y, e.times(p, PANEL * 4))
        with e.b.if_else(few) as (then, otherwise):
            with then:
                _all_rows(e, blocking, direct, m, (x, ldx, panel, groups, out, ldy))
            with otherwise:
                if widen is None:
                    source = panel
                else:
                    e.b.call(widen, [panel, groups, scratch])
                    source = scratch
                _all_rows(e, blocking, widened, m, (x, ldx, source, f32_groups, out, ldy))
    e.b.ret(i64(0))


def _direct_blocks(f: Format) -> int:
    """Blocks of rows up to which widening on the fly, once per block, is the faster way."""
    return 4 if f.codes in ("bf16", "f16") else 2


Operands = tuple[ir.Value, ir.Value, ir.Value, ir.Value, ir.Value, ir.Value]


def _rows(
    e: Emit, blocking: Blocking, blocks: dict[int, ir.Function], count: ir.Value, a: Operands
) -> None:
    """Call the block of `count` rows (at most `blocking.rows`) for all outputs of a panel."""
    x, ldx, panel, groups, out, ldy = a
    width = 16 * blocking.vectors

    def call(block: ir.Function) -> None:
        for offset in range(0, PANEL * 4, width * 4):
            e.b.call(block, [x, ldx, e.address(panel, offset), groups, e.address(out, offset), ldy])

    cases: dict[int, Callable[[], None]] = {r: partial(call, f) for r, f in blocks.items()}
    e.switch(count, cases)


def _all_rows(
    e: Emit, blocking: Blocking, blocks: dict[int, ir.Function], m: ir.Value, a: Operands
) -> None:
    """Blocks of `blocking.rows` rows, then the rest."""
    x, ldx, panel, groups, out, ldy = a
    full = e.b.sdiv(m, i64(blocking.rows))
    whole = {blocking.rows: blocks[blocking.rows]}

    def operands(row: ir.Value) -> Operands:
        moved_x = e.address(x, e.b.mul(row, ldx))
        return (moved_x, ldx, panel, groups, e.address(out, e.b.mul(row, ldy)), ldy)

    with e.loop(full) as block:
        row = e.times(block, blocking.rows)
        _rows(e, blocking, whole, i64(blocking.rows), operands(row))
    done = e.times(full, blocking.rows)
    _rows(e, blocking, blocks, e.b.sub(m, done), operands(done))
