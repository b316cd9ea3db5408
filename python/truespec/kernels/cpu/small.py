"""The small calls beside the stack: embedding, RMS norm of rows, copying slots of the K/V pool."""

from __future__ import annotations

import struct

import torch
import torch.nn.functional as F
from torch import Tensor

from truespec.kernels.api import KVBuffers, Weight

from . import layout as at
from .attention_ir import KVType
from .runtime import Runtime

KV_TYPES: dict[torch.dtype, KVType] = {torch.float32: "f32", torch.bfloat16: "bf16"}
LANES = 16

Fields = memoryview  # of the integers of a record; setting one takes half of numpy's time


def embed_q8_0(runtime: Runtime, weight: Weight, token_ids: Tensor) -> Tensor:
    """Rows `token_ids` [m] of a Q8_0 weight, widened: [m, k] fp32."""
    n, k = weight.shape
    data, ids = weight.data, token_ids.long().contiguous()
    assert data.is_contiguous(), "blocks must be contiguous"
    out = torch.empty(ids.numel(), k)
    addresses = data.data_ptr(), ids.data_ptr(), out.data_ptr()
    args = addresses[0], n, addresses[1], ids.numel(), k // 32, addresses[2]
    strangers = runtime.embed_q8_0(*args)
    assert strangers == 0, f"{strangers} token ids are not below {n}"
    return out


def rms_norm(runtime: Runtime, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight per row, [m, k] fp32."""
    m, k = x.shape
    x, weight = padded(x, LANES), padded(weight.float(), LANES)
    out = torch.empty_like(x)
    record = runtime.record
    f = record.numpy()
    f[at.RMS_NORM], f[at.EPS_BITS] = runtime.rows["rms_norm"], float_bits(eps)
    f[at.X], f[at.NORMED], f[at.LAYERS] = x.data_ptr(), out.data_ptr(), weight.data_ptr()
    f[at.NUM_ROWS], f[at.HIDDEN], f[at.HIDDEN_STRIDE] = m, k, x.shape[1]
    runtime.run("normalise", record, m * k)
    return out if out.shape[1] == k else out[:, :k].contiguous()


def padded(x: Tensor, multiple: int) -> Tensor:
    """`x`, contiguous, its last dimension padded with zeros to a multiple; no copy if it is so."""
    missing = -x.shape[-1] % multiple
    return F.pad(x, (0, missing)) if missing else x.contiguous()


def move_slots(runtime: Runtime, kv: KVBuffers, src_slots: Tensor, dst_slots: Tensor) -> None:
    """Copy K/V of every layer slot by slot, in order ([n] int64 each)."""
    src_slots, dst_slots = src_slots.long().contiguous(), dst_slots.long().contiguous()
    assert src_slots.shape == dst_slots.shape, (src_slots.shape, dst_slots.shape)
    record = runtime.record
    f = record.numpy()
    fill_pool(runtime, record, kv)
    f[at.NUM_LAYERS], f[at.NUM_KV_HEADS], f[at.HEAD_DIM] = kv.k.shape[0], *kv.k.shape[3:5]
    f[at.TAIL_SLOTS], f[at.OUT_SLOTS] = src_slots.data_ptr(), dst_slots.data_ptr()
    f[at.NUM_ROWS] = src_slots.numel()
    runtime.run("move_slots", record, 0)


def fill_pool(runtime: Runtime, record: Tensor, kv: KVBuffers) -> None:
    """Write the pool's addresses, sizes and the kernels of its type into a record."""
    assert kv.k.is_contiguous(), "the pool of keys must be contiguous"
    assert kv.v.is_contiguous(), "the pool of values must be contiguous"
    _, pages, blocks_per_page, _, head_dim, _ = kv.k.shape
    f = record.numpy()
    for name, address in runtime.attention_functions(KV_TYPES[kv.k.dtype]).items():
        f[getattr(at, name.upper())] = address
    f[at.KEYS], f[at.VALUES_POOL] = kv.k.data_ptr(), kv.v.data_ptr()
    f[at.NUM_BLOCKS], f[at.BLOCKS_PER_PAGE] = pages * blocks_per_page, blocks_per_page
    f[at.BLOCK_BYTES] = head_dim * 16 * kv.k.element_size()


def fields_of(record: Tensor) -> Fields:
    """The integers of a record."""
    return record.numpy().data


def address_of(tensor: Tensor, dtype: torch.dtype) -> int:
    """Of a tensor as compiled code reads it."""
    assert tensor.dtype == dtype, (tensor.dtype, dtype)
    assert tensor.is_contiguous(), tensor.stride()
    return tensor.data_ptr()


def float_bits(value: float) -> int:
    """The bits of a number in fp32."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits
