"""What all compiled calls of one kernel set share: code, threads, weight memory, scratch.

Knows names and addresses of kernels; knows nothing of layers.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numba
import torch
from numba import types
from numba.core import config as numba_config
from numba.core.ccallback import CFunc
from numba.core.typing.templates import Signature
from torch import Tensor

from . import step
from .arena import Arena
from .attention_ir import ATTENTION_FUNCTIONS, KVType, attention_module
from .blocking import choose_blocking
from .chain_step import draft_chains
from .coded_ir import coded_module
from .compile import Compiler, Cpu, Progress
from .fixed_ir import DIGITS
from .formats import PANEL, WORD_BYTES, Format
from .layout import STEP_FIELDS
from .linear_ir import linear_module
from .rows_ir import ROW_FUNCTIONS, rows_module
from .sync_ir import SYNC_FUNCTIONS, sync_module
from .threads import ThreadPool, callable_of

ENTRIES = {
    "forward": step.forward,
    "write_context": step.write_context,
    "project": step.project,
    "normalise": step.normalise,
    "move_slots": step.move_slots,
}
ENTRY_TYPE = types.int64(*[types.int64] * 3)
CHAINS_TYPE = types.int64(*[types.int64] * 4)
WORK_PER_THREAD = 1_000_000  # multiply-adds: below, waking a thread costs more than it saves


class Runtime:
    """Compiled code and the memory it needs. One thread at a time may use it."""

    def __init__(
        self,
        cpu: Cpu,
        cache_dir: Path,
        num_threads: int,
        progress: Progress | None,
        *,
        lossy_int8_activations: bool,
    ) -> None:
        """Compile (or load) what every model needs; the rest follows on first use."""
        self._digits = 1 if lossy_int8_activations else DIGITS
        self._blocking = choose_blocking(cpu.features)
        self._compiler = Compiler(cpu, cache_dir, progress)
        self._linears: dict[str, int] = {}
        self.is_lossy = False  # inputs of some weight are rounded to 8 bits
        self._attention: dict[KVType, dict[str, int]] = {}
        self.rows = self._compiler.load("rows", rows_module, list(ROW_FUNCTIONS))
        self.sync = self._compiler.load("sync", sync_module, list(SYNC_FUNCTIONS))
        self._compiled = [self._entry(name) for name in ENTRIES]  # keeps the code
        self._chains: CFunc | None = None
        self._entries = dict(zip(ENTRIES, map(_address, self._compiled), strict=True))
        self.to_fixed = self.rows["to_bytes" if lossy_int8_activations else "to_fixed"]
        self.give_way = _sched_yield()
        self.arena = Arena()
        self.pool = ThreadPool(self.sync, self._compiler, self.give_way, num_threads)
        self.record = torch.zeros(STEP_FIELDS, dtype=torch.int64)  # of calls outside a stack
        self.embed_q8_0 = callable_of(self.rows["embed_q8_0"], ROW_FUNCTIONS["embed_q8_0"])
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._scratch_bytes = 0

    def linear_function(self, f: Format) -> int:
        """Address of the linear kernel of a format."""
        if f.name not in self._linears:
            name = f"linear_{f.name}"
            build = partial(linear_module, f, self._blocking)
            if f.is_coded:
                self.is_lossy = self._digits < DIGITS
                build = partial(coded_module, f, self._blocking, self._digits)
            kept = name if self._digits == DIGITS else f"{name}_int8"
            self._linears[f.name] = self._compiler.load(kept, build, [name])[name]
        return self._linears[f.name]

    def attention_functions(self, kv: KVType) -> dict[str, int]:
        """Addresses of the attention kernels for a type of K and V."""
        if kv not in self._attention:
            build = partial(attention_module, kv, self._blocking)
            functions = list(ATTENTION_FUNCTIONS)
            self._attention[kv] = self._compiler.load(f"attention_{kv}", build, functions)
        return self._attention[kv]

    @property
    def chains_function(self) -> int:
        """Address of what chooses chains of drafts; it takes its time to compile."""
        if self._chains is None:
            self._chains = self._compiled_python("draft_chains", draft_chains, CHAINS_TYPE)
        return _address(self._chains)

    def reserve_scratch(self, num_bytes: int) -> None:
        """Make sure that every thread has at least `num_bytes` of scratch."""
        self._scratch_bytes = max(self._scratch_bytes, -(-num_bytes // 4096) * 4096)

    def scratch(self) -> tuple[int, int]:
        """(address, bytes per thread) of the scratch of all threads."""
        needed = self._scratch_bytes * self.pool.num_threads + 64
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        return -(-self._scratch.data_ptr() // 64) * 64, self._scratch_bytes

    def run(self, entry: str, record: Tensor, work: int) -> int:
        """Run an entry of step.py on as many threads as `work` multiply-adds are worth.

        Returns what it returns.
        """
        return self.pool.run(
            self._entries[entry], record.data_ptr(), max(1, work // WORK_PER_THREAD)
        )

    def _entry(self, name: str) -> CFunc:
        return self._compiled_python(name, ENTRIES[name], ENTRY_TYPE)

    def _compiled_python(self, name: str, function: Callable[..., int], kind: Signature) -> CFunc:
        """Compile a function or load it from disk."""
        configured = numba_config.CACHE_DIR  # type: ignore[attr-defined]  # set at import
        numba_config.CACHE_DIR = str(self._compiler.directory)  # type: ignore[attr-defined]
        try:
            if not any(self._compiler.directory.glob(f"*/*.{name}-*.nbc")):
                self._compiler.progress(f"compiling {name}, once per machine")
            compiled: CFunc = numba.cfunc(kind, cache=True, error_model="numpy")(function)
        finally:
            numba_config.CACHE_DIR = configured  # type: ignore[attr-defined]
        return compiled


def _address(compiled: CFunc) -> int:
    assert compiled.address is not None, compiled
    return compiled.address


def widening_bytes(padded_k: int) -> int:
    """Scratch of a linear kernel: one panel in fp32."""
    return padded_k * PANEL * WORD_BYTES


def aligned_zeros(*shape: int) -> Tensor:
    """fp32 zeros at a multiple of 64 bytes."""
    count = 1
    for size in shape:
        count *= size
    raw = torch.zeros(count + 16, dtype=torch.float32)
    start = (-raw.data_ptr() // 4) % 16
    return raw[start : start + count].view(shape)


def _sched_yield() -> int:
    """Address of the C library's sched_yield."""
    function = ctypes.CDLL(None).sched_yield
    return ctypes.cast(function, ctypes.c_void_p).value or 0
