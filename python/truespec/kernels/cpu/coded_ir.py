"""The linear kernel of a coded format: y[m, n] = x[m, k] W^T over a range of panels.

x comes as fixed-point rows (fixed_ir.py), codes are multiplied as they are stored. Of each group of
weights the products are summed as integers, exactly; then y takes scale * sum, and minimum * sum of
inputs, in fp32, groups ascending. So a row's result depends neither on the number of rows nor on
how they are blocked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import llvmlite.ir as ir

from .blocking import Blocking
from .emit import F32, I32, Emit, i64, new_function, splat, vector
from .fixed_ir import (
    BLOCK,
    BLOCK_BYTES,
    DIGIT_BITS,
    HALF,
    HIGH_SUMS,
    LOW_SUMS,
    SCALE,
    SUM,
    emit_dot4,
)
from .formats import ROW_BYTES, Format, emit_header
from .linear_ir import (
    NUM_ARGS,
    PANEL_VECTORS,
    PREFETCH_BYTES,
    Blocks,
    Operands,
    prefetch,
    vectors_of,
)

Vectors = list[list[ir.Value]]  # by row and vector of outputs
BIAS_BITS = 7  # 8-bit codes are signed; 128 more makes them the unsigned factor of a product


def coded_module(f: Format, blocking: Blocking, digits: int) -> ir.Module:
    """A module with the function `linear_<format>`; arguments as in linear_ir.py.

    x is the address of fixed-point rows of so many digits, which take as many bytes as their fp32
    rows.
    """
    module = ir.Module(f"linear_{f.name}")
    counts = range(1, blocking.coded_rows + 1)
    repeated = {
        r: _block(module, f, blocking, r, blocking.vectors, digits, ahead=True) for r in counts
    }
    # NOTE: reading 8-bit weights takes longer than multiplying a few rows, and a block that waits
    # for memory is slower when it asks for more of it, by up to a fifth.
    single = repeated
    if f.codes == "int8":
        single = {
            r: _block(module, f, blocking, r, blocking.vectors, digits, ahead=False) for r in counts
        }
    wide = {
        r: _block(module, f, blocking, r, n * PANEL_VECTORS, digits, ahead=False)
        for r, n in blocking.coded_panels.items()
    }
    e = new_function(module, f"linear_{f.name}", NUM_ARGS)
    x, ldx, m, w, first, last, panel_bytes, groups, y, ldy, _ = e.args

    def walk(blocks: Blocks, rows: int, start: ir.Value, runs: int) -> ir.Value:
        """All whole runs of neighbouring panels side by side; returns the first panel left."""
        run = e.b.sdiv(e.b.sub(last, start), i64(runs))
        strides = e.b.mul(run, panel_bytes), e.times(run, ROW_BYTES)
        with e.loop(e.b.add(start, run), start=start) as p:
            panel, out = e.address(w, e.b.mul(p, panel_bytes)), e.address(y, e.times(p, ROW_BYTES))
            a = Operands(x, ldx, panel, strides[0], groups, out, strides[1], ldy)
            _outputs(e, blocks[rows], a, runs * PANEL_VECTORS, blocking)
        return e.b.add(start, e.times(run, runs))

    def one_block(rows: int) -> None:
        start = first
        if rows in wide:
            start = walk(wide, rows, start, blocking.coded_panels[rows])
        walk(single, rows, start, 1)

    with e.b.if_else(e.b.icmp_signed("<=", m, i64(blocking.coded_rows))) as (few, many):
        with few:
            e.switch(m, {r: partial(one_block, r) for r in single})
        with many, e.loop(last, start=first) as p:
            panel, out = e.address(w, e.b.mul(p, panel_bytes)), e.address(y, e.times(p, ROW_BYTES))
            a = Operands(x, ldx, panel, i64(0), groups, out, i64(0), ldy)
            _row_blocks(e, blocking, repeated, m, a)
    e.b.ret(i64(0))
    return module


def _row_blocks(e: Emit, blocking: Blocking, blocks: Blocks, m: ir.Value, a: Operands) -> None:
    """All rows of a panel, the last block being what is left."""
    size = blocking.coded_rows
    whole = e.times(e.b.sdiv(m, i64(size)), size)

    def moved(row: ir.Value) -> Operands:
        x, y = e.address(a.x, e.b.mul(row, a.ldx)), e.address(a.y, e.b.mul(row, a.ldy))
        return a._replace(x=x, y=y)

    with e.loop(whole, step=size) as row:
        _outputs(e, blocks[size], moved(row), PANEL_VECTORS, blocking)
    rest = moved(whole)
    cases: dict[int, Callable[[], None]] = {
        r: partial(_outputs, e, blocks[r], rest, PANEL_VECTORS, blocking) for r in range(1, size)
    }
    e.switch(e.b.sub(m, whole), cases)


def _outputs(e: Emit, block: ir.Function, a: Operands, count: int, blocking: Blocking) -> None:
    """Call a block for `count` vectors of outputs; more than one panel takes a single call."""
    step = count if count > PANEL_VECTORS else blocking.vectors
    for first in range(0, count, step):
        offset = 64 * first
        e.b.call(block, a._replace(w=e.address(a.w, offset), y=e.address(a.y, offset)))


def _block(
    module: ir.Module,
    f: Format,
    blocking: Blocking,
    rows: int,
    vectors: int,
    digits: int,
    *,
    ahead: bool,
) -> ir.Function:
    """block(*Operands): `rows` rows times 16 * `vectors` outputs; `ahead`: with prefetching."""
    name = f"coded_{rows}_{vectors}{'_ahead' if ahead else ''}"
    e = new_function(module, name, len(Operands._fields), private=True)
    a = Operands(*e.args)
    outputs = [
        vectors_of(e, e.address(a.y, e.times(a.ldy, r)), a.y_panel_stride, vectors)
        for r in range(rows)
    ]
    for address in (address for row in outputs for address in row):
        e.store(splat(F32, 0.0), address)
    with e.loop(a.groups) as g:
        start = e.address(a.w, e.times(g, f.words * ROW_BYTES))
        bases = vectors_of(e, start, a.panel_stride, vectors)
        if ahead:
            prefetch(e, f, bases, PREFETCH_BYTES)
        block, half = _place(e, f, g)
        inputs = [
            e.address(a.x, e.times(a.ldx, r), e.times(block, BLOCK_BYTES)) for r in range(rows)
        ]
        # Headers that are read first take registers, and spare a block that waits for memory time.
        headers = [] if ahead else [emit_header(e, f, base) for base in bases]
        wholes = _products(e, f, blocking, bases, inputs, half, digits)
        headers = headers or [emit_header(e, f, base) for base in bases]
        for r in range(rows):
            for v, header in enumerate(headers):
                _add_group(e, wholes[r][v], header, inputs[r], outputs[r][v])
    e.b.ret(i64(0))
    return e.b.function


def _place(e: Emit, f: Format, group: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The block of inputs that a group meets, and which half of it where it is half a block."""
    if f.group == BLOCK:
        return group, i64(0)
    return e.b.ashr(group, i64(1)), e.b.and_(group, i64(1))


def _products(
    e: Emit,
    f: Format,
    blocking: Blocking,
    bases: list[ir.Value],
    inputs: list[ir.Value],
    half: ir.Value,
    num_digits: int,
) -> Vectors:
    """Codes times inputs of a group in units of the block's scale, fp32, by row and output."""
    sums = [[[e.variable(splat(I32, 0)) for _ in range(num_digits)] for _ in bases] for _ in inputs]
    for slot in (slot for row in sums for lanes in row for slot in lanes):
        e.set(slot, splat(I32, 0))

    def add(word: ir.Value) -> None:
        for codes, place in _codes(e, f, bases, word):
            offset = e.b.add(place, e.times(half, HALF))
            for row, source in zip(sums, inputs, strict=True):
                for d in range(num_digits):
                    digits = e.broadcast(e.load(e.address(source, offset, BLOCK * d), I32))
                    for lanes, values in zip(row, codes, strict=True):
                        total = emit_dot4(e, e.get(lanes[d]), values, digits, blocking.vnni)
                        e.set(lanes[d], total)

    num_words = f.words - f.header_words
    if f.codes == "uint4":  # more arithmetic than reading: a loop's own work shows
        for word in range(num_words):
            add(i64(word))
    else:
        with e.loop(num_words) as word_index:
            add(word_index)
    return [
        [_whole(e, f, [e.get(slot) for slot in lanes], source, half) for lanes in row]
        for row, source in zip(sums, inputs, strict=True)
    ]


def _codes(
    e: Emit, f: Format, bases: list[ir.Value], word: ir.Value
) -> list[tuple[list[ir.Value], ir.Value]]:
    """The codes of a word of every lane, unsigned bytes, with the place of the inputs they meet."""
    row = e.times(e.b.add(word, i64(f.header_words)), ROW_BYTES)
    words = [e.load(e.address(base, row), vector(I32)) for base in bases]
    place = e.times(word, 4)
    if f.codes == "uint4":
        low_bits = splat(I32, 0x0F0F0F0F)
        low = [e.b.and_(x, low_bits) for x in words]
        high = [e.b.and_(e.b.lshr(x, splat(I32, 4)), low_bits) for x in words]
        return [(low, place), (high, e.address(place, HALF))]
    return [([e.b.xor(x, splat(I32, -0x7F7F7F80)) for x in words], place)]


def _whole(e: Emit, f: Format, sums: list[ir.Value], source: ir.Value, half: ir.Value) -> ir.Value:
    """codes times inputs of a group in units of the block's scale, fp32.

    Args:
        sums: one per digit.
    """

    def times_bias(offset: int) -> ir.Value:
        """128 times the sum of the inputs' digits at `offset`."""
        at = e.address(source, offset, e.times(half, 4))
        total = e.load(at, I32)
        if f.group == BLOCK:
            total = e.b.add(total, e.load(e.address(at, 4), I32))
        return e.broadcast(e.b.shl(total, ir.Constant(I32, BIAS_BITS)))

    if len(sums) == 1:
        whole = sums[0] if f.codes == "uint4" else e.b.sub(sums[0], times_bias(HIGH_SUMS))
        return e.b.sitofp(whole, vector(F32))
    shift = splat(I32, DIGIT_BITS)
    high = e.b.add(e.b.shl(sums[0], shift), sums[1])
    if f.codes == "uint4":  # 15 * 32 inputs of 22 bits fit 31
        return e.b.sitofp(e.b.add(e.b.shl(high, shift), sums[2]), vector(F32))

    high = e.b.sitofp(e.b.sub(high, times_bias(HIGH_SUMS)), vector(F32))
    low = e.b.sitofp(e.b.sub(sums[2], times_bias(LOW_SUMS)), vector(F32))
    return e.fma(high, splat(F32, 2.0**DIGIT_BITS), low)


def _add_group(
    e: Emit,
    whole: ir.Value,
    header: tuple[ir.Value, ir.Value | None],
    source: ir.Value,
    output: ir.Value,
) -> None:
    """y += scale * codes times inputs (+ minimum * sum of inputs)."""
    scale, minimum = header
    unit = e.load_broadcast(e.address(source, SCALE))
    # In this order nothing overflows that does not do so in the end.
    y = e.fma(e.b.fmul(scale, unit), whole, e.load_f32x16(output))
    if minimum is not None:
        y = e.fma(minimum, e.load_broadcast(e.address(source, SUM)), y)
    e.store(y, output)
