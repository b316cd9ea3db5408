"""Working memory of a stack's steps: grows with the most rows seen, then stays.

NOTE: columns beyond a row's width are zero and stay zero, since packed weights are padded with
zeros; kernels read whole vectors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from truespec.kernels.api import StackShape

from . import layout as at
from .formats import PANEL
from .runtime import aligned_zeros
from .small import Fields


class StepBuffers:
    """Buffers that the phases of a step pass on."""

    def __init__(self, shape: StackShape, num_layers: int, *, is_coded: bool) -> None:
        """Start for a few rows; fixed-point rows only where a weight is coded."""
        heads = shape.num_heads * shape.head_dim
        kv = pad(shape.num_kv_heads * shape.head_dim, PANEL)
        self._hidden = pad(shape.hidden_size, PANEL)
        self._attended = pad(heads, PANEL)
        self._k_column = pad(heads, PANEL)
        self._v_column = self._k_column + kv
        self._qkv = self._v_column + kv
        self._mlp = pad(shape.intermediate_size, PANEL)
        self._is_coded = is_coded
        self._counters = torch.zeros(num_layers, dtype=torch.int64)
        self._num_rows, self._version = 0, 0
        self._allocate(8)

    def reserve(self, num_rows: int) -> None:
        """Make room."""
        if num_rows > self._num_rows:
            self._allocate(max(num_rows, 2 * self._num_rows))

    def fill(self, fields: Fields) -> None:
        """Write addresses and strides into a record, for the rows reserved by now."""
        if fields[at.BUFFERS] == self._version:
            return
        fields[at.BUFFERS] = self._version
        fields[at.X], fields[at.NORMED] = self._x.data_ptr(), self._normed.data_ptr()
        fields[at.QKV], fields[at.QKV_STRIDE] = self._qkv_rows.data_ptr(), self._qkv
        fields[at.K_COLUMN], fields[at.V_COLUMN] = self._k_column, self._v_column
        fields[at.ATTENDED] = self._attended_rows.data_ptr()
        fields[at.ATTENDED_STRIDE] = self._attended
        fields[at.GATES], fields[at.UPS] = self._gates.data_ptr(), self._ups.data_ptr()
        fields[at.MLP_STRIDE], fields[at.LINEAR_OUT] = self._mlp, self._linear_out.data_ptr()
        if self._is_coded:
            fields[at.NORMED_FIXED] = self._normed_fixed.data_ptr()
            fields[at.ATTENDED_FIXED] = self._attended_fixed.data_ptr()
            fields[at.GATES_FIXED] = self._gates_fixed.data_ptr()
        fields[at.UNIT_COUNTERS] = self._counters.data_ptr()
        fields[at.GROUP_STARTS] = self._group_starts.data_ptr()

    def _allocate(self, num_rows: int) -> None:
        """Room for `num_rows`."""
        self._num_rows = num_rows
        self._version += 1
        self._x: Tensor = aligned_zeros(num_rows, self._hidden)
        self._normed = aligned_zeros(num_rows, self._hidden)
        self._linear_out = aligned_zeros(num_rows, self._hidden)
        self._qkv_rows = aligned_zeros(num_rows, self._qkv)
        self._attended_rows = aligned_zeros(num_rows, self._attended)
        self._gates = aligned_zeros(num_rows, self._mlp)
        self._ups = aligned_zeros(num_rows, self._mlp)
        fixed_rows = num_rows if self._is_coded else 0
        self._normed_fixed = aligned_zeros(fixed_rows, self._hidden)
        self._attended_fixed = aligned_zeros(fixed_rows, self._attended)
        self._gates_fixed = aligned_zeros(fixed_rows, self._mlp)
        self._group_starts = torch.zeros(num_rows + 1, dtype=torch.int32)


def pad(size: int, multiple: int) -> int:
    """`size` rounded up to a multiple."""
    return -(-size // multiple) * multiple
