"""How packed weights lie in memory, and how what a group holds becomes fp32 lanes.

A weight [n, k] is cut into panels of 32 outputs. Within a panel every output is a sequence of
32-bit words, stored transposed: [panel][word][32 outputs]. A group of consecutive k of one output
takes a fixed number of words: a header (scale, minimum) and codes. value = fma(code, scale,
minimum), which is the value GGUF defines (there code * scale is exact in fp32, see quants.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import llvmlite.ir as ir

from .emit import F16, F32, I16, I32, Emit, i64, splat, vector

PANEL = 32  # outputs per panel
WORD_BYTES = 4
ROW_BYTES = PANEL * WORD_BYTES  # one word of every output of a panel

Codes = Literal["f32", "bf16", "f16", "int8", "uint4"]
Header = Literal["none", "half_pair", "scale", "pair"]


@dataclass(frozen=True, slots=True)
class Format:
    """A panel format.

    Attributes:
        name: also names the compiled function.
        codes: how weights are coded; "uint4": byte i of word w holds k = 4w + i below and
            k = 16 + 4w + i above (GGUF's order).
        header: words before the codes: none; fp16 scale | fp16 minimum in one word; fp32 scale;
            fp32 scale and fp32 minimum.
        group: consecutive k that share a header; k is padded to a multiple of it.
    """

    name: str
    codes: Codes
    header: Header
    group: int

    @property
    def header_words(self) -> int:
        """Words before the codes of a group."""
        return {"none": 0, "half_pair": 1, "scale": 1, "pair": 2}[self.header]

    @property
    def is_coded(self) -> bool:
        """Codes with scales, which are multiplied as integers (coded_ir.py)."""
        return self.header != "none"

    @property
    def words(self) -> int:
        """Words of a group of one output."""
        bits = {"f32": 32, "bf16": 16, "f16": 16, "int8": 8, "uint4": 4}[self.codes]
        return self.header_words + self.group * bits // 32


FORMATS = {
    f.name: f
    for f in (
        Format("f32", "f32", "none", 8),
        Format("bf16", "bf16", "none", 8),
        Format("f16", "f16", "none", 8),
        Format("uint4", "uint4", "half_pair", 32),
        Format("int8", "int8", "half_pair", 32),
        Format("uint4_pair", "uint4", "pair", 32),
        Format("int8_pair", "int8", "pair", 32),
        Format("int8_scale", "int8", "scale", 16),
    )
}


def emit_floats(
    e: Emit,
    f: Format,
    bases: Sequence[ir.Value],
    use: Callable[[ir.Value, list[ir.Value]], None],
) -> None:
    """Emit code that widens one group of a format without codes, k ascending.

    Args:
        bases: addresses of the group's first word, one for every 16 outputs.
        use: emits what is done with the weights of one k: (k within the group, one <16 x float>
            per base).
    """
    for w in range(f.words):
        words = [e.load(e.address(base, w * ROW_BYTES), vector(I32)) for base in bases]
        if f.codes == "f32":
            use(i64(w), [e.b.bitcast(word, vector(F32)) for word in words])
        else:
            use(i64(2 * w), [_half_of_word(e, f.codes, x, high=False) for x in words])
            use(i64(2 * w + 1), [_half_of_word(e, f.codes, x, high=True) for x in words])


def emit_header(e: Emit, f: Format, base: ir.Value) -> tuple[ir.Value, ir.Value | None]:
    """(scale, minimum) of the group at `base`, for 16 outputs, fp32."""
    words = [e.load(e.address(base, w * ROW_BYTES), vector(I32)) for w in range(f.header_words)]
    if f.header == "half_pair":
        low, high = (_half_of_word(e, "f16", words[0], high=h) for h in (False, True))
        return low, high
    floats = [e.b.bitcast(w, vector(F32)) for w in words]
    return (floats[0], floats[1]) if f.header == "pair" else (floats[0], None)


def _half_of_word(e: Emit, codes: Codes, word: ir.Value, *, high: bool) -> ir.Value:
    """The lower or upper 16-bit float of every lane, widened."""
    if codes == "f16":
        moved = e.b.lshr(word, splat(I32, 16)) if high else word
        return e.b.fpext(e.b.bitcast(e.b.trunc(moved, vector(I16)), vector(F16)), vector(F32))
    bits = e.b.and_(word, splat(I32, -65536)) if high else e.b.shl(word, splat(I32, 16))
    return e.b.bitcast(bits, vector(F32))
