"""The numba kernel set: fast on a CPU, row-invariant by construction.

Every output is a fixed chain of IEEE operations and exact integer sums, whatever the other rows,
threads or CPU type.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from truespec.kernels.api import (
    DecoderStack,
    KernelSet,
    KVBuffers,
    LayerWeights,
    PackedLinear,
    StackShape,
    Weight,
)
from truespec.kernels.reference_weights import widen_rows

from .compile import Cpu, Progress, host_cpu
from .linear import CpuLinear
from .runtime import Runtime
from .small import embed_q8_0, move_slots, rms_norm
from .stack import CpuStack


class CpuKernels(KernelSet):
    """Compiled kernels for this machine's CPU. One thread at a time may use a set.

    Sets torch's own number of threads to 1, for the whole process.
    """

    name = "numba"

    def __init__(
        self,
        cache_dir: Path,
        *,
        num_threads: int | None = None,
        progress: Progress | None = None,
        cpu: Cpu | None = None,
        lossy_int8_activations: bool = False,
    ) -> None:
        """Load compiled code, or compile it the first time (about 10 seconds).

        Args:
            cache_dir: where compiled code is kept.
            num_threads: compute threads; `None` takes one per usable core.
            progress: told what is being compiled.
            cpu: what to compile for; `None` takes this machine's CPU.
            lossy_int8_activations: round what quantized weights are multiplied with to 8 bits, each
                32 values with a scale of their own (W8A8, as llama.cpp does). A row still does not
                depend on others.

        Raises:
            RuntimeError: the CPU lacks what the kernels need (AVX2, FMA and F16C on x86).
        """
        threads = num_threads or len(os.sched_getaffinity(0))
        # NOTE: torch's OpenMP threads spin for milliseconds after every operation they share, on
        # the cores that compute threads need (a verify of 5 rows took twice as long).
        torch.set_num_threads(1)
        self._runtime = Runtime(
            cpu or host_cpu(),
            cache_dir,
            threads,
            progress,
            lossy_int8_activations=lossy_int8_activations,
        )

    @property
    def is_lossy(self) -> bool:
        """See `KernelSet`."""
        return self._runtime.is_lossy

    def set_num_threads(self, num_threads: int) -> None:
        """Compute on this many threads from the next call on; results do not change."""
        self._runtime.pool.set_num_threads(num_threads)

    def close(self) -> None:
        """Stop the compute threads; a later call starts them again."""
        self._runtime.pool.close()

    def linear(self, weight: Weight, bias: Tensor | None = None) -> PackedLinear:
        """See `KernelSet`."""
        return CpuLinear(weight, bias, self._runtime)

    def decoder_stack(self, layers: list[LayerWeights], shape: StackShape) -> DecoderStack:
        """See `KernelSet`."""
        return CpuStack(layers, shape, self._runtime)

    def embedding(self, weight: Weight, token_ids: Tensor) -> Tensor:
        """See `KernelSet`."""
        if weight.type == "Q8_0":  # a generic widening takes as long as a layer of the model
            return embed_q8_0(self._runtime, weight, token_ids)
        return widen_rows(weight.data[token_ids], weight.type)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `KernelSet`."""
        return rms_norm(self._runtime, x, weight, eps)

    def move_kv(self, kv: KVBuffers, src_slots: Tensor, dst_slots: Tensor) -> None:
        """See `KernelSet`."""
        move_slots(self._runtime, kv, src_slots, dst_slots)
