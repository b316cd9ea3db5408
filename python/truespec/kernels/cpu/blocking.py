"""How many rows and outputs a kernel keeps in registers, by CPU. Speed only: bits never differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Blocking:
    """Register blocks.

    Attributes:
        rows, vectors: rows times (16-lane vectors of outputs) of a linear kernel; `vectors`
            divides 2.
        panels: by number of rows, panels at once where one would leave FMAs waiting for each other.
        lookup_rows: rows up to which 4-bit codes are looked up in a register.
        query_rows, key_blocks: rows times blocks of 16 keys (1 or 2) of a score kernel.
        value_rows, value_vectors: rows times (16-lane vectors of head_dim) of a P.V kernel.
    """

    rows: int
    vectors: int
    panels: Mapping[int, int]
    lookup_rows: int
    query_rows: int
    key_blocks: int
    value_rows: int
    value_vectors: int


WIDE = Blocking(  # 32 x 512 bits
    rows=10,
    vectors=2,
    panels={1: 2, 2: 2, 3: 2},
    lookup_rows=1,
    query_rows=8,
    key_blocks=2,
    value_rows=4,
    value_vectors=4,
)
NARROW = Blocking(  # 16 x 256 bits
    rows=4,
    vectors=1,
    panels={},
    lookup_rows=0,
    query_rows=4,
    key_blocks=1,
    value_rows=2,
    value_vectors=2,
)


def choose_blocking(features: str) -> Blocking:
    """Blocks for LLVM's feature string ("+avx2,-avx512f,..." )."""
    return WIDE if "+avx512f" in features.split(",") else NARROW
