"""A packed weight as a callable, and its description for compiled code."""

from __future__ import annotations

import torch
from torch import Tensor

from truespec.kernels.api import PackedLinear, Weight

from .formats import PANEL
from .layout import (
    ADD_ROWS,
    CONTEXT,
    CONTEXT_STRIDE,
    HIDDEN_STRIDE,
    LAYERS,
    LINEAR_OUT,
    NUM_ROWS,
    SCRATCH,
    SCRATCH_BYTES,
    STEP_FIELDS,
)
from .pack import PackedWeight, pack
from .runtime import Runtime, aligned_zeros, widening_bytes
from .small import padded


def describe(packed: PackedWeight, bias: Tensor | None, runtime: Runtime) -> list[int]:
    """The fields of a weight in a record (layout.py); reserves the scratch it needs.

    Args:
        bias: fp32, as long as compiled code reads it (padded where it adds whole panels).
    """
    runtime.reserve_scratch(widening_bytes(packed.padded_k))
    function = runtime.linear_function(packed.format)
    bias_address = 0 if bias is None else bias.data_ptr()
    address = packed.words.data_ptr()
    groups = packed.num_groups
    return [function, address, packed.panel_bytes, groups, packed.num_panels, bias_address]


def padded_vector(vector: Tensor, length: int) -> Tensor:
    """A copy of a vector with zeros up to `length`, fp32, aligned."""
    padded = aligned_zeros(length)
    padded[: vector.numel()] = vector
    return padded


class CpuLinear(PackedLinear):
    """y = x W^T + bias on all threads."""

    def __init__(self, weight: Weight, bias: Tensor | None, runtime: Runtime) -> None:
        """Pack `weight`; `bias` is [n] fp32."""
        self.shape = weight.shape
        self._runtime = runtime
        self._packed = pack(weight, runtime.arena)
        self._padded_n = self._packed.num_panels * PANEL
        self._bias = None if bias is None else padded_vector(bias, self._padded_n)
        self._fields = torch.tensor(describe(self._packed, self._bias, runtime))
        self._record = torch.zeros(STEP_FIELDS, dtype=torch.int64)

    def __call__(self, x: Tensor) -> Tensor:
        """See `PackedLinear`."""
        m, k = x.shape
        n = self.shape[0]
        assert k == self.shape[1], (tuple(x.shape), self.shape)
        out = torch.empty(m, self._padded_n)
        if m == 0:
            return out[:, :n]
        x = padded(x, self._packed.format.group)
        fields = self._record.numpy()
        fields[SCRATCH], fields[SCRATCH_BYTES] = self._runtime.scratch()
        fields[LAYERS], fields[ADD_ROWS] = self._fields.data_ptr(), self._runtime.rows["add_rows"]
        fields[CONTEXT], fields[CONTEXT_STRIDE], fields[NUM_ROWS] = x.data_ptr(), x.shape[1], m
        fields[LINEAR_OUT], fields[HIDDEN_STRIDE] = out.data_ptr(), self._padded_n
        self._runtime.run("project", self._record, m * n * k)
        return out if self._padded_n == n else out[:, :n].contiguous()
