"""Running a model over one sequence through a paged cache, the way the engine does."""

from __future__ import annotations

import torch
from torch import Tensor

from truespec.batch import ForwardBatch
from truespec.kernels.api import KVBuffers, StackShape
from truespec.models.llama import CausalLM


def kv_buffers(
    num_layers: int,
    shape: StackShape,
    num_pages: int,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> KVBuffers:
    """A pool whose every slot holds NaN until it is written."""
    head = (num_layers, num_pages, page_size // 16, shape.num_kv_heads)
    return KVBuffers(
        torch.full((*head, shape.head_dim, 16), float("nan"), dtype=dtype),
        torch.full((*head, 16, shape.head_dim), float("nan"), dtype=dtype),
    )


def shuffled_pages(num_pages: int) -> Tensor:
    """[1, num_pages] int32 page table of one request, in no order."""
    generator = torch.Generator().manual_seed(num_pages)
    return torch.randperm(num_pages, generator=generator).int().unsqueeze(0)


def extend_batch(
    token_ids: Tensor, start: int, end: int, page_table: Tensor, page_size: int = 16
) -> ForwardBatch:
    """Rows for positions start .. end - 1 of the one request in `page_table`."""
    positions = torch.arange(start, end)
    pages = page_table[0, positions // page_size].long()
    return ForwardBatch(
        token_ids=token_ids[start:end],
        positions=positions.int(),
        row_to_req=torch.zeros(end - start, dtype=torch.int32),
        out_slots=pages * page_size + positions % page_size,
        page_table=page_table,
        kv_lens=positions.int() + 1,
    )


def logits_in_chunks(
    model: CausalLM,
    token_ids: Tensor,
    chunk_sizes: list[int],
    *,
    page_size: int = 16,
    kv_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """[len(token_ids), vocab] logits of a sequence that is run chunk by chunk."""
    assert sum(chunk_sizes) == len(token_ids), (chunk_sizes, len(token_ids))
    num_pages = -(-len(token_ids) // page_size) + 1
    kv = kv_buffers(model.num_layers, model.shape, num_pages, page_size, kv_dtype)
    page_table = shuffled_pages(num_pages)
    logits, start = [], 0
    for size in chunk_sizes:
        batch = extend_batch(token_ids, start, start + size, page_table, page_size)
        logits.append(model.logits(model.forward(batch, kv).hidden))
        start += size
    return torch.cat(logits)
