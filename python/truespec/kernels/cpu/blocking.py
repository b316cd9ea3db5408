"""How many rows and outputs a kernel keeps in registers, by CPU. Speed only: bits never differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Blocking:
    """Register blocks.

    Attributes:
        rows, vectors: rows times (16-lane vectors of outputs) of a linear kernel; `vectors`
            divides 2.
        panels: by number of rows, panels at once where one would leave FMAs waiting for each other.
        coded_rows, coded_panels: the same of a linear kernel on codes.
        vnni: products of bytes are summed by one instruction (AVX-512 VNNI).
        query_rows, key_blocks: rows times blocks of 16 keys (1 or 2) of a score kernel.
        value_rows, value_vectors: rows times (16-lane vectors of head_dim) of a P.V kernel.
    """

    rows: int
    vectors: int
    panels: Mapping[int, int]
    coded_rows: int
    coded_panels: Mapping[int, int]
    vnni: bool
    query_rows: int
    key_blocks: int
    value_rows: int
    value_vectors: int


WIDE = Blocking(  # 32 x 512 bits
    rows=10,
    vectors=2,
    panels={1: 2, 2: 2, 3: 2},
    coded_rows=4,
    coded_panels={1: 2},
    vnni=False,
    query_rows=8,
    key_blocks=2,
    value_rows=4,
    value_vectors=4,
)
NARROW = Blocking(  # 16 x 256 bits
    rows=4,
    vectors=1,
    panels={},
    coded_rows=2,
    coded_panels={},
    vnni=False,
    query_rows=4,
    key_blocks=1,
    value_rows=2,
    value_vectors=2,
)


def choose_blocking(features: str) -> Blocking:
    """Blocks for LLVM's feature string ("+avx2,-avx512f,..." )."""
    known = features.split(",")
    if "+avx512f" not in known:
        return NARROW
    return replace(WIDE, vnni="+avx512vnni" in known)
