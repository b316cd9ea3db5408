"""Paged attention in plain torch: one row at a time over exactly the row's keys.

Knows the block layout of `KVBuffers` and how a row finds its slots; knows no weights. It is the
definition that the compiled kernels are tested against.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .api import AttentionRows, KVBuffers

BLOCK = 16  # positions per KV block


def store_kv(kv: KVBuffers, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Write K and V of rows to their slots, rounded to the pool's type.

    Args:
        slots: [m] int64.
        k, v: [m, kv_heads, head_dim] fp32.
    """
    blocks, offsets = slots // BLOCK, slots % BLOCK
    _k_blocks(kv, layer)[blocks, :, :, offsets] = k.to(kv.k.dtype)
    _v_blocks(kv, layer)[blocks, :, offsets] = v.to(kv.v.dtype)


def move_slots(kv: KVBuffers, src_slots: Tensor, dst_slots: Tensor) -> None:
    """Copy K and V of every layer slot by slot, in order ([n] int64 each)."""
    num_blocks = kv.k.shape[1] * kv.k.shape[2]
    k = kv.k.view(kv.k.shape[0], num_blocks, *kv.k.shape[3:])
    v = kv.v.view(kv.v.shape[0], num_blocks, *kv.v.shape[3:])
    for src, dst in zip(src_slots.tolist(), dst_slots.tolist(), strict=True):
        k[:, dst // BLOCK, :, :, dst % BLOCK] = k[:, src // BLOCK, :, :, src % BLOCK]
        v[:, dst // BLOCK, :, dst % BLOCK] = v[:, src // BLOCK, :, src % BLOCK]


def attention(q: Tensor, rows: AttentionRows, kv: KVBuffers, layer: int, scale: float) -> Tensor:
    """Attention of every row over its own keys, read from the pool.

    Keys and values are gathered, so a slot that does not belong to the row is never multiplied.

    Args:
        q: [m, heads, head_dim] fp32, rotated.
        scale: factor of q.k.

    Returns:
        [m, heads * head_dim] fp32.
    """
    out = torch.empty_like(q)
    kv_lens, reqs = rows.kv_lens.tolist(), rows.row_to_req.tolist()
    starts = kv_lens if rows.tail_starts is None else rows.tail_starts.tolist()
    for first, last in _runs(reqs):
        # Prefixes of one request share a gather: a row reads a leading part of it.
        longest = max(min(kv_lens[i], starts[i]) for i in range(first, last))
        slots = _slots(rows.page_table[reqs[first]], longest, kv.page_size)
        k, v = _gather(kv, layer, slots)
        for i in range(first, last):
            num_paged = min(kv_lens[i], starts[i])
            row_k, row_v = k[:num_paged], v[:num_paged]
            if rows.tail_slots is not None and kv_lens[i] > num_paged:
                tail = _gather(kv, layer, rows.tail_slots[i, : kv_lens[i] - num_paged])
                row_k, row_v = torch.cat([row_k, tail[0]]), torch.cat([row_v, tail[1]])
            out[i] = _attend(q[i], row_k, row_v, scale)
    return out.flatten(1)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [heads, head_dim], k and v [n, kv_heads, head_dim] -> [heads, head_dim]."""
    num_kv_heads = k.shape[1]
    grouped = q.view(num_kv_heads, -1, q.shape[-1])
    scores = torch.matmul(grouped, k.permute(1, 2, 0)) * scale
    return torch.matmul(torch.softmax(scores, dim=-1), v.transpose(0, 1)).view_as(q)


def _runs(reqs: list[int]) -> list[tuple[int, int]]:
    """[first, last) of every run of equal values."""
    cuts = [i for i in range(len(reqs)) if i == 0 or reqs[i] != reqs[i - 1]]
    return list(zip(cuts, [*cuts[1:], len(reqs)], strict=True))


def _slots(page_row: Tensor, num: int, page_size: int) -> Tensor:
    """Slots of positions 0 .. num - 1 of one request: [num] int64."""
    positions = torch.arange(num, device=page_row.device)
    return page_row[positions // page_size].long() * page_size + positions % page_size


def _gather(kv: KVBuffers, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
    """K and V at `slots`: two [n, kv_heads, head_dim] fp32, contiguous."""
    blocks, offsets = slots // BLOCK, slots % BLOCK
    k = _k_blocks(kv, layer)[blocks, :, :, offsets]
    v = _v_blocks(kv, layer)[blocks, :, offsets]
    return k.float().contiguous(), v.float().contiguous()


def _k_blocks(kv: KVBuffers, layer: int) -> Tensor:
    """[num_blocks, kv_heads, head_dim, 16] view of one layer's keys."""
    return kv.k[layer].flatten(0, 1)


def _v_blocks(kv: KVBuffers, layer: int) -> Tensor:
    """[num_blocks, kv_heads, 16, head_dim] view of one layer's values."""
    return kv.v[layer].flatten(0, 1)
