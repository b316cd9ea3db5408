"""Reading tensors by their Hugging Face names, with shapes checked and nothing left over.

`Checkpoint` is what models read from; the safetensors directory is here, GGUF in its own file.
Tensors are mapped, not copied: bytes are read when a kernel set packs them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from truespec.kernels.api import Weight
from truespec.kernels.reference_weights import FLOAT_TYPES, widen_rows

from .fields import CheckpointError, Fields

TYPE_NAMES = {dtype: name for name, dtype in FLOAT_TYPES.items()}
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the file holds it.

    Attributes:
        data: of `shape`, or [n, bytes per row] uint8 for blocks.
        type: as `Weight.type`.
        shape: in elements.
    """

    data: Tensor
    type: str
    shape: tuple[int, ...]


class Checkpoint(ABC):
    """Named tensors."""

    def __init__(self, source: str, dtype: str) -> None:
        """`source` names the checkpoint in errors; `dtype` is a key of `DTYPES` or "auto"."""
        if dtype != "auto" and dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype!r}, expected auto, {', '.join(DTYPES)}")
        self._source = source
        self._type = DTYPES.get(dtype)
        self._used: set[str] = set()

    def weight(self, name: str, shape: tuple[int, int]) -> Weight:
        """A matrix in its stored type, or in the type that was asked for.

        Raises:
            CheckpointError: missing, of another shape, or of a type that is not built.
        """
        stored = self._read(name, shape)
        if self._type is None or self._type == stored.type:
            return Weight(stored.data, stored.type, shape)
        values = widen_rows(stored.data, stored.type).to(FLOAT_TYPES[self._type])
        return Weight(values, self._type, shape)

    def vector(self, name: str, size: int) -> Tensor:
        """[size] fp32 parameter (a norm or a bias); errors as `weight`."""
        stored = self._read(name, (size,))
        return widen_rows(stored.data, stored.type).contiguous()

    def drop_pages(self) -> None:  # noqa: B027  most kinds of checkpoint keep none
        """Give back the memory of what was read, once it is packed."""

    def check_all_used(self) -> None:
        """Raise `CheckpointError` if a tensor was never read: the model is another one."""
        unused = sorted(self._names() - self._used)
        if unused:
            more = ", ..." if len(unused) > 5 else ""
            listed = ", ".join(map(self._own_name, unused[:5])) + more
            raise CheckpointError(
                f"{self._source}: {len(unused)} tensors have no place in the model: {listed}"
            )

    def _read(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """Look a tensor up, check its shape, note its use."""
        if not self.has(name):
            raise CheckpointError(f"{self._source}: tensor {self._own_name(name)} is missing")
        stored = self._load(name)
        if stored.shape != shape:
            raise CheckpointError(
                f"{self._source}: tensor {self._own_name(name)} has shape "
                f"{list(stored.shape)}, expected {list(shape)}"
            )
        self._used.add(name)
        return stored

    def _own_name(self, name: str) -> str:
        """The file's spelling of a Hugging Face name."""
        return name

    @abstractmethod
    def has(self, name: str) -> bool:
        """A tensor of this Hugging Face name is there."""

    @abstractmethod
    def _names(self) -> set[str]:
        """All names that a model must read, in Hugging Face spelling where there is one."""

    @abstractmethod
    def _load(self, name: str) -> StoredTensor:
        """The tensor as stored."""


class SafetensorsCheckpoint(Checkpoint):
    """The safetensors files of a Hugging Face directory, sharded or not."""

    def __init__(self, directory: Path, dtype: str = "auto") -> None:
        """Open the files of `directory`.

        Raises:
            CheckpointError: a file is missing or unreadable.
        """
        super().__init__(directory.name, dtype)
        self._handles, self._files = {}, {}
        for path in _tensor_files(directory):
            try:
                self._handles[path] = safe_open(path, framework="pt")
            except (FileNotFoundError, SafetensorError) as error:
                raise CheckpointError(f"{path}: {error}") from None
            names = self._handles[path].keys()
            self._files.update(dict.fromkeys(names, path))

    def has(self, name: str) -> bool:
        """See `Checkpoint`."""
        return name in self._files

    def _names(self) -> set[str]:
        # NOTE: old checkpoints store this constant of the rotary embedding.
        return {name for name in self._files if not name.endswith("rotary_emb.inv_freq")}

    def _load(self, name: str) -> StoredTensor:
        handle = self._handles[self._files[name]]
        data: Tensor = handle.get_tensor(name)
        if data.dtype not in TYPE_NAMES:
            raise CheckpointError(
                f"{self._source}: tensor {name} has type {data.dtype}, "
                f"expected one of {', '.join(map(str, TYPE_NAMES))}"
            )
        return StoredTensor(data, TYPE_NAMES[data.dtype], tuple(data.shape))


def _tensor_files(directory: Path) -> list[Path]:
    """The safetensors files of a directory: one, or those of the index."""
    if (directory / SINGLE_FILE).exists():
        return [directory / SINGLE_FILE]
    if not (directory / INDEX_FILE).exists():
        raise CheckpointError(
            f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE} "
            "(weights in other formats are not built)"
        )
    shards = Fields.read(directory / INDEX_FILE)
    weight_map = shards.get("weight_map")
    if not isinstance(weight_map, dict):
        raise shards.error("weight_map", "an object from tensors to files")
    return [directory / str(name) for name in sorted(set(weight_map.values()))]
