"""The decoder stack: packs layers, fills a step's record, runs it as one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from truespec.kernels.api import (
    AttentionRows,
    ContextRows,
    DecoderStack,
    KVBuffers,
    LayerWeights,
    PackedLinear,
    StackShape,
)
from truespec.kernels.draft_chain import ChainRule, Chains

from . import layout as at
from .attention_step import attention_scratch_bytes
from .buffers import StepBuffers, pad
from .chains import fill_chains
from .formats import PANEL
from .linear import CpuLinear, describe, padded_vector
from .pack import PackedWeight, pack
from .runtime import Runtime
from .small import Fields, address_of, fields_of, fill_pool, float_bits, padded

_Part = tuple[Fields, AttentionRows | ContextRows]  # a record and the rows it is about


class CpuStack(DecoderStack):
    """Layers in an arena and the buffers of their steps."""

    def __init__(self, layers: list[LayerWeights], shape: StackShape, runtime: Runtime) -> None:
        """Pack `layers`."""
        _check_shape(shape)
        self._shape = shape
        self._runtime = runtime
        self._kept: list[Tensor | PackedWeight] = []  # what the table points at
        self._layers = torch.tensor([self._describe_layer(layer) for layer in layers])
        self._work_per_row = sum(_work(layer) for layer in layers)
        self._cos, self._sin = shape.rope_cos.contiguous(), shape.rope_sin.contiguous()
        per_kv = shape.num_heads // shape.num_kv_heads
        runtime.reserve_scratch(attention_scratch_bytes(shape.head_dim, per_kv))
        self._is_coded = any(
            isinstance(kept, PackedWeight) and kept.format.is_coded for kept in self._kept
        )
        self._buffers = StepBuffers(shape, len(layers), is_coded=self._is_coded)
        self._record, self._context_record = (
            torch.zeros(at.STEP_FIELDS, dtype=torch.int64) for _ in range(2)
        )
        self._fields, self._context_fields = (
            fields_of(record) for record in (self._record, self._context_record)
        )
        self._pool: tuple[int, int, torch.Size, torch.dtype] | None = None
        self._kv: KVBuffers | None = None  # the last one seen
        self._norms: dict[int, tuple[Tensor, Tensor]] = {}  # by id: as given, as code reads it
        self._columns: dict[tuple[int, ...], Tensor] = {}
        self._fill_constants()
        self._context_record.copy_(self._record)

    def forward(
        self,
        x: Tensor,
        rows: AttentionRows,
        kv: KVBuffers,
        *,
        capture: tuple[int, ...] = (),
        first_input: Tensor | None = None,
        final_norm: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """See `DecoderStack`."""
        m, hidden = x.shape
        captured = torch.empty(m, len(capture) * hidden) if capture else None
        kept = self._fill_first_input(first_input)
        self._fill_captured(capture, captured)
        self._fields[at.HEAD] = self._fields[at.CHAINS] = 0
        out = self._forward(x, rows, kv, final_norm)
        del kept  # NOTE: everything the record points at lives until here
        return out, captured

    def write_context(self, context: ContextRows, kv: KVBuffers) -> None:
        """See `DecoderStack`."""
        if context.features.shape[0] == 0:
            return
        self._fill_pool(kv)
        kept = self._fill_context(context)
        self._run("write_context", self._context_record, [(self._context_fields, context)])
        del kept

    def forward_to_logits(
        self,
        x: Tensor,
        rows: AttentionRows,
        kv: KVBuffers,
        *,
        final_norm: Tensor,
        head: PackedLinear,
        context: ContextRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `DecoderStack`."""
        assert isinstance(head, CpuLinear), type(head)
        self._fields[at.CHAINS] = 0
        hidden, logits = self._with_head(x, rows, kv, final_norm, head, context)
        return hidden, head.without_padding(logits)

    def draft_chains(
        self,
        x: Tensor,
        rows: AttentionRows,
        kv: KVBuffers,
        *,
        final_norm: Tensor,
        head: PackedLinear,
        rule: ChainRule,
        first_row: int,
        num_steps: int,
        context: ContextRows | None = None,
    ) -> Chains:
        """See `DecoderStack`."""
        assert isinstance(head, CpuLinear), type(head)
        f, num_ids = self._fields, head.shape[0]
        num_chains = rule.previous.shape[0]
        size = x.shape[0] // max(num_chains, 1)
        f[at.CHAINS] = self._runtime.chains_function
        f[at.BLOCK_ROWS], f[at.FIRST_DRAFT_ROW], f[at.NUM_STEPS] = size, first_row, num_steps
        f[at.NUM_DRAFT_IDS] = num_ids
        last, made = fill_chains(f, rule, num_steps)
        _, logits = self._with_head(x, rows, kv, final_norm, head, context)
        del last
        if not rule.keeps_logits:
            return Chains(None, *made)
        rows_of_chains = logits.view(num_chains, size, -1)
        return Chains(rows_of_chains[:, first_row : first_row + num_steps, :num_ids], *made)

    def _with_head(
        self,
        x: Tensor,
        rows: AttentionRows,
        kv: KVBuffers,
        final_norm: Tensor,
        head: CpuLinear,
        context: ContextRows | None,
    ) -> tuple[Tensor, Tensor]:
        """Normed rows, and logits with the padding of the head."""
        f, m = self._fields, x.shape[0]
        self._fill_first_input(None)
        self._fill_captured((), None)
        logits = torch.empty(m, head.padded_n)
        fixed = torch.empty(m, f[at.HIDDEN_STRIDE]) if head.is_coded else logits
        f[at.HEAD], f[at.HEAD_FIXED] = head.fields.data_ptr(), fixed.data_ptr()
        f[at.LOGITS], f[at.LOGITS_STRIDE] = logits.data_ptr(), head.padded_n
        hidden = self._forward(x, rows, kv, final_norm, context)
        del fixed
        return hidden, logits

    def _forward(
        self,
        x: Tensor,
        rows: AttentionRows,
        kv: KVBuffers,
        final_norm: Tensor | None,
        context: ContextRows | None = None,
    ) -> Tensor:
        """Fill in the rest of the record and run it."""
        m, hidden = x.shape
        assert hidden == self._shape.hidden_size, (hidden, self._shape.hidden_size)
        out = torch.empty(m, hidden)
        if m == 0:
            return out
        x = x.contiguous()
        self._fill_pool(kv)
        self._fill_rows(rows)
        f = self._fields
        f[at.INPUT], f[at.OUTPUT], f[at.BEFORE] = x.data_ptr(), out.data_ptr(), 0
        f[at.FINAL_NORM] = 0 if final_norm is None else self._norm_address(final_norm)
        parts: list[_Part] = [(f, rows)]
        kept = None
        if context is not None and context.features.shape[0]:
            kept = self._fill_context(context)
            f[at.BEFORE] = self._context_record.data_ptr()
            parts.append((self._context_fields, context))
        self._run("forward", self._record, parts)
        del kept
        return out

    def _run(self, entry: str, record: Tensor, parts: list[_Part]) -> None:
        """Point records at their rows and at big enough buffers; run one."""
        runtime, num_rows = self._runtime, [part.positions.shape[0] for _, part in parts]
        self._buffers.reserve(max(num_rows))
        scratch = runtime.scratch()
        for (f, part), m in zip(parts, num_rows, strict=True):
            f[at.NUM_ROWS], f[at.POSITIONS] = m, address_of(part.positions, torch.int32)
            f[at.OUT_SLOTS] = address_of(part.out_slots, torch.int64)
            f[at.SCRATCH], f[at.SCRATCH_BYTES] = scratch
            self._buffers.fill(f)
        if runtime.run(entry, record, sum(num_rows) * self._work_per_row) != at.DONE:
            self._explain(parts)

    def _explain(self, parts: list[_Part]) -> None:
        """Fail for rows that are out of reach."""
        most, num_slots = self._cos.shape[0], self._fields[at.NUM_BLOCKS] * 16
        for _, part in parts:
            positions, slots = part.positions, part.out_slots
            last = int(positions.max())
            assert 0 <= int(positions.min()) <= last < most, (
                f"position {last} of {most} rope positions"
            )
            is_inside = 0 <= int(slots.min()) <= int(slots.max()) < num_slots
            assert is_inside, f"slots {slots.tolist()} of {num_slots}"
        raise AssertionError("the rows are within reach")

    def _describe_layer(self, layer: LayerWeights) -> list[int]:
        """A layer's row of the table."""
        s = self._shape
        stride = pad(s.hidden_size, PANEL)
        biases: Sequence[Tensor | None] = [None, None, None]
        if layer.qkv_bias is not None:
            biases = torch.split(layer.qkv_bias.float(), [w.shape[0] for w in layer.qkv])
        o_bias = None if layer.o_bias is None else padded_vector(layer.o_bias, stride)
        weights = [*layer.qkv, layer.o, layer.gate, layer.up, layer.down]
        fields: list[int] = []
        for weight, bias in zip(weights, [*biases, o_bias, None, None, None], strict=True):
            packed = pack(weight, self._runtime.arena)
            own_bias = None if bias is None else bias.contiguous()
            self._kept.extend(part for part in (packed, own_bias) if part is not None)
            fields += describe(packed, own_bias, self._runtime)
        norms = (layer.input_norm, layer.q_norm, layer.k_norm, layer.post_norm)
        lengths = (stride, s.head_dim, s.head_dim, stride)
        return fields + [self._keep_norm(n, k) for n, k in zip(norms, lengths, strict=True)]

    def _keep_norm(self, norm: Tensor | None, length: int) -> int:
        """Address of a padded norm vector, 0 for none."""
        if norm is None:
            return 0
        padded = padded_vector(norm, length)
        self._kept.append(padded)
        return padded.data_ptr()

    def _fill_constants(self) -> None:
        """Fields that no step changes."""
        f, s, runtime = self._fields, self._shape, self._runtime
        for name in ("rms_norm", "rotate_head", "add_rows", "silu_mul"):
            f[getattr(at, name.upper())] = runtime.rows[name]
        f[at.TO_FIXED] = runtime.to_fixed
        f[at.BARRIER], f[at.FETCH_ADD] = runtime.sync["barrier"], runtime.sync["fetch_add"]
        f[at.BARRIER_COUNTER], f[at.GIVE_WAY] = runtime.pool.barrier_address, runtime.give_way
        f[at.LAYERS], f[at.NUM_LAYERS] = self._layers.data_ptr(), len(self._layers)
        f[at.HIDDEN], f[at.HIDDEN_STRIDE] = s.hidden_size, pad(s.hidden_size, PANEL)
        f[at.NUM_HEADS], f[at.NUM_KV_HEADS], f[at.HEAD_DIM] = (
            s.num_heads,
            s.num_kv_heads,
            s.head_dim,
        )
        f[at.GROUP_ROWS] = max(1, at.MAX_QUERIES * s.num_kv_heads // s.num_heads)
        f[at.EPS_BITS], f[at.ONE_BITS] = float_bits(s.rms_norm_eps), float_bits(1.0)
        f[at.SCALE_BITS] = float_bits(s.attention_scale)
        f[at.ROPE_COS], f[at.ROPE_SIN] = self._cos.data_ptr(), self._sin.data_ptr()
        f[at.NUM_POSITIONS] = self._cos.shape[0]

    def _fill_pool(self, kv: KVBuffers) -> None:
        """The K/V pool of this step."""
        if kv is self._kv:
            return
        layers, _, _, kv_heads, head_dim, _ = kv.k.shape
        expected = (len(self._layers), self._shape.num_kv_heads, self._shape.head_dim)
        assert (layers, kv_heads, head_dim) == expected, (tuple(kv.k.shape), expected)
        pool = kv.k.data_ptr(), kv.v.data_ptr(), kv.k.shape, kv.k.dtype
        if pool != self._pool:
            fill_pool(self._runtime, self._record, kv)
            fill_pool(self._runtime, self._context_record, kv)
            self._pool = pool
        self._kv = kv

    def _fill_rows(self, rows: AttentionRows) -> None:
        """Whose rows they are, what they see and where it lies."""
        f = self._fields
        f[at.ROW_TO_REQ] = address_of(rows.row_to_req, torch.int32)
        f[at.KV_LENS] = address_of(rows.kv_lens, torch.int32)
        f[at.PAGE_TABLE] = address_of(rows.page_table, torch.int32)
        f[at.PAGE_TABLE_STRIDE] = rows.page_table.shape[1]
        f[at.TAIL_STARTS] = f[at.TAIL_SLOTS] = f[at.TAIL_STRIDE] = 0
        if rows.tail_starts is not None and rows.tail_slots is not None:
            f[at.TAIL_STARTS] = address_of(rows.tail_starts, torch.int32)
            f[at.TAIL_SLOTS] = address_of(rows.tail_slots, torch.int64)
            f[at.TAIL_STRIDE] = rows.tail_slots.shape[1]

    def _fill_first_input(self, first_input: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """The given input of layer 0's qkv and its fixed point; the caller keeps them alive."""
        self._fields[at.FIRST_INPUT] = 0
        if first_input is None:
            return None
        first_input = padded(first_input, PANEL)
        fixed = torch.empty_like(first_input)
        self._fields[at.FIRST_INPUT] = first_input.data_ptr()
        self._fields[at.FIRST_FIXED] = fixed.data_ptr()
        self._fields[at.FIRST_STRIDE] = first_input.shape[1]
        return first_input, fixed

    def _fill_captured(self, capture: tuple[int, ...], captured: Tensor | None) -> None:
        """Which layers' outputs go to which columns of `captured`; shared tables by `capture`."""
        if capture not in self._columns:
            columns = torch.full((len(self._layers) + 1,), -1)
            for column, layer in enumerate(capture):
                columns[layer + 1] = column
            self._columns[capture] = columns
        f = self._fields
        f[at.CAPTURED] = 0 if captured is None else captured.data_ptr()
        f[at.CAPTURE_INDEX] = self._columns[capture].data_ptr()
        f[at.CAPTURE_STRIDE] = len(capture) * self._shape.hidden_size

    def _norm_address(self, norm: Tensor) -> int:
        """Of a norm's weight with its padding, which is kept."""
        known = self._norms.get(id(norm))
        if known is None:
            known = self._norms[id(norm)] = norm, padded(norm.float(), PANEL)
        return known[1].data_ptr()

    def _fill_context(self, context: ContextRows) -> tuple[Tensor, Tensor]:
        """The context's own input; the caller keeps what is returned alive."""
        projection, f = context.projection, self._context_fields
        assert isinstance(projection, CpuLinear), type(projection)
        features = padded(context.features, PANEL)
        fixed = torch.empty_like(features) if projection.is_coded else features
        f[at.CONTEXT], f[at.CONTEXT_STRIDE] = features.data_ptr(), features.shape[1]
        f[at.CONTEXT_FIXED] = fixed.data_ptr()
        f[at.PROJECTION] = projection.fields.data_ptr()
        f[at.CONTEXT_NORM] = self._norm_address(context.norm)
        return features, fixed


def _check_shape(shape: StackShape) -> None:
    """Raises ValueError for a shape the kernels cannot compute."""
    if shape.head_dim % 16:
        raise ValueError(
            f"head_dim is {shape.head_dim}, the compiled kernels need a multiple of 16 "
            "(TRUESPEC_CPU_KERNELS=torch runs any)"
        )
    if shape.num_heads % shape.num_kv_heads:
        raise ValueError(f"{shape.num_heads} heads cannot share {shape.num_kv_heads} KV heads")


def _work(layer: LayerWeights) -> int:
    """Multiply-adds of a row."""
    weights = [*layer.qkv, layer.o, layer.gate, layer.up, layer.down]
    return sum(w.shape[0] * w.shape[1] for w in weights)
