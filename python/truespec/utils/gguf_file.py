"""Opening GGUF files fast: the gguf library's reader with bulk reading of arrays.

The library reads an array element by element, which takes seconds for a vocabulary. Everything
else, the tensors above all, is the library's.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Literal

import gguf
import numpy as np
from numpy.typing import NDArray

Scalar = str | int | float | bool
FieldParts = tuple[int, list[NDArray[np.generic]], list[int], list[gguf.GGUFValueType]]


class GGUFFile(gguf.GGUFReader):
    """A GGUF file: `tensors` as the library gives them, metadata as Python values.

    The file is mapped copy-on-write, so that torch takes its arrays without a copy.

    Raises:
        ValueError: the file is not GGUF or of an unknown version.
        FileNotFoundError: there is no such file.
    """

    def __init__(self, path: str | Path) -> None:
        """Map `path` and read its metadata."""
        super().__init__(path, "c")

    def get(self, key: str) -> Scalar | list[Scalar] | None:
        """The value of a metadata key, `None` where there is none."""
        field = self.fields.get(key)
        return None if field is None else field.contents()

    def keys(self, prefix: str = "") -> list[str]:
        """Metadata keys that start with `prefix`."""
        return [key for key in self.fields if key.startswith(prefix)]

    def drop_pages(self) -> None:
        """Give back the memory of what was read; what is used again is read from the file again."""
        mapping = self.data._mmap  # type: ignore[attr-defined]  # numpy names it nowhere else
        if hasattr(mmap, "MADV_DONTNEED"):
            mapping.madvise(mmap.MADV_DONTNEED)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> FieldParts:
        """Read one value; the library's method, with arrays read in bulk.

        NOTE: overrides a private method. Were it renamed, reading would be slow, not wrong.
        """
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        item_type = gguf.GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        start = orig_offs + 12
        types = [gguf.GGUFValueType.ARRAY, item_type] if count else [gguf.GGUFValueType.ARRAY]
        if item_type == gguf.GGUFValueType.STRING:
            size, parts = self._strings(start, count)
            return 12 + size, parts, list(range(count)), types
        numpy_type = self.gguf_scalar_to_np.get(item_type)
        if numpy_type is None:
            return super()._get_field_parts(orig_offs, raw_type)
        values = self._get(start, numpy_type, count)
        return 12 + int(values.nbytes), [values], [0], types

    def _strings(self, start: int, count: int) -> tuple[int, list[NDArray[np.generic]]]:
        """Bytes taken by `count` strings from `start` on, and one byte array per string."""
        raw = self.data.view(np.ndarray)[start:]
        order: Literal["big", "little"] = (
            "big" if self.endianess == gguf.GGUFEndian.BIG else "little"
        )
        parts, at = [], 0
        for _ in range(count):
            length = int.from_bytes(raw[at : at + 8].tobytes(), order)
            parts.append(raw[at + 8 : at + 8 + length])
            at += 8 + length
        return at, parts
