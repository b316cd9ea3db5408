"""A packed weight as a callable, and its description for compiled code."""

from __future__ import annotations

import torch
from torch import Tensor

from truespec.kernels.api import PackedLinear, Weight

from .formats import PANEL
from .layout import (
    ADD_ROWS,
    BARRIER,
    BARRIER_COUNTER,
    CONTEXT,
    CONTEXT_FIXED,
    CONTEXT_STRIDE,
    GIVE_WAY,
    HIDDEN_STRIDE,
    LAYERS,
    LINEAR_OUT,
    NUM_ROWS,
    SCRATCH,
    SCRATCH_BYTES,
    STEP_FIELDS,
    TO_FIXED,
)
from .pack import PackedWeight, pack
from .runtime import Runtime, aligned_zeros, widening_bytes
from .small import fields_of, padded


def describe(packed: PackedWeight, bias: Tensor | None, runtime: Runtime) -> list[int]:
    """The fields of a weight in a record (layout.py); reserves the scratch it needs.

    Args:
        bias: fp32, as long as compiled code reads it (padded where it adds whole panels).
    """
    if not packed.format.is_coded:
        runtime.reserve_scratch(widening_bytes(packed.padded_k))
    function = runtime.linear_function(packed.format)
    bias_address = 0 if bias is None else bias.data_ptr()
    address = packed.words.data_ptr()
    groups = packed.num_groups
    sizes = [packed.panel_bytes, groups, packed.num_panels]
    return [function, address, *sizes, bias_address, int(packed.format.is_coded)]


def padded_vector(vector: Tensor, length: int) -> Tensor:
    """A copy of a vector with zeros up to `length`, fp32, aligned."""
    padded = aligned_zeros(length)
    padded[: vector.numel()] = vector
    return padded


class CpuLinear(PackedLinear):
    """y = x W^T + bias on all threads.

    Attributes:
        fields: its description for compiled code (layout.py).
        padded_n: outputs that compiled code writes.
        is_coded: it takes its input in fixed point too.
    """

    def __init__(self, weight: Weight, bias: Tensor | None, runtime: Runtime) -> None:
        """Pack `weight`; `bias` is [n] fp32."""
        self.shape = weight.shape
        self._runtime = runtime
        self._packed = pack(weight, runtime.arena)
        self.padded_n = self._packed.num_panels * PANEL
        self.is_coded = self._packed.format.is_coded
        self._bias = None if bias is None else padded_vector(bias, self.padded_n)
        self.fields = torch.tensor(describe(self._packed, self._bias, runtime))
        self._record = torch.zeros(STEP_FIELDS, dtype=torch.int64)
        fields = self._fields = fields_of(self._record)
        fields[LAYERS], fields[ADD_ROWS] = self.fields.data_ptr(), runtime.rows["add_rows"]
        fields[TO_FIXED], fields[BARRIER] = runtime.to_fixed, runtime.sync["barrier"]
        fields[BARRIER_COUNTER] = runtime.pool.barrier_address
        fields[GIVE_WAY] = runtime.give_way

    def __call__(self, x: Tensor) -> Tensor:
        """See `PackedLinear`."""
        m, k = x.shape
        assert k == self.shape[1], (tuple(x.shape), self.shape)
        out = torch.empty(m, self.padded_n)
        if m == 0:
            return self.without_padding(out)
        x = padded(x, PANEL)
        fixed = torch.empty_like(x) if self.is_coded else x
        fields = self._fields
        fields[SCRATCH], fields[SCRATCH_BYTES] = self._runtime.scratch()
        fields[CONTEXT_FIXED] = fixed.data_ptr()
        fields[CONTEXT], fields[CONTEXT_STRIDE], fields[NUM_ROWS] = x.data_ptr(), x.shape[1], m
        fields[LINEAR_OUT], fields[HIDDEN_STRIDE] = out.data_ptr(), self.padded_n
        self._runtime.run("project", self._record, m * self.shape[0] * k)
        return self.without_padding(out)

    def without_padding(self, out: Tensor) -> Tensor:
        """[m, padded_n] as compiled code wrote it -> [m, n], contiguous."""
        n = self.shape[0]
        return out if self.padded_n == n else out[:, :n].contiguous()
