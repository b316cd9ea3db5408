"""Attention of a step as compiled Python: units of (group of rows, KV head), taken dynamically.

Rows of a group belong to one request. Whole blocks that all of them see are loaded once for all;
the blocks at a row's end, and those with slots of its own (tree rows), are visited row by row with
the same kernels. Keys come in position order in both cases.
"""

from __future__ import annotations

from .layout import (
    ATTENDED,
    ATTENDED_STRIDE,
    BLOCK_BYTES,
    BLOCKS_PER_PAGE,
    FETCH_ADD,
    FINISH,
    GROUP_STARTS,
    HEAD_DIM,
    KEYS,
    KV_LENS,
    MAX_QUERIES,
    MOVE_KEY,
    MOVE_VALUE,
    NUM_BLOCKS,
    NUM_GROUPS,
    NUM_HEADS,
    NUM_KV_HEADS,
    PAGE_TABLE,
    PAGE_TABLE_STRIDE,
    QKV,
    QKV_STRIDE,
    ROW_TO_REQ,
    SCORE_STRIDE,
    SCORES,
    SCRATCH,
    SCRATCH_BYTES,
    SOFTMAX,
    SPAN,
    TAIL_SLOTS,
    TAIL_STARTS,
    TAIL_STRIDE,
    UNIT_COUNTERS,
    VALUES,
    VALUES_POOL,
)
from .native import Ints, call, compiled, int32s, int64s

BLOCK = 16
FLOAT = 4
SPAN_BLOCKS = SPAN // BLOCK
AHEAD = 4  # blocks between use and prefetch: a load from memory takes as long as several blocks
LIST_BYTES = -(-(2 * SPAN_BLOCKS + AHEAD + 1) * 8 // 64) * 64


@compiled
def attend_rows(r: Ints, thread: int, index: int) -> None:
    """Units of one layer until none is left; the longest (last) rows first."""
    counter = r[UNIT_COUNTERS] + index * 8
    kv_heads = r[NUM_KV_HEADS]
    units = r[NUM_GROUPS] * kv_heads
    starts = int32s(r[GROUP_STARTS])
    scratch = r[SCRATCH] + thread * r[SCRATCH_BYTES]
    unit = call(r[FETCH_ADD], (counter,))
    while unit < units:
        group = r[NUM_GROUPS] - 1 - unit // kv_heads
        attend_group(r, index, starts[group], starts[group + 1], unit % kv_heads, scratch)
        unit = call(r[FETCH_ADD], (counter,))


@compiled
def attend_group(r: Ints, index: int, first: int, last: int, head: int, scratch: int) -> None:
    """Rows [first, last) of one request for one KV head."""
    head_dim, per_kv = r[HEAD_DIM], r[NUM_HEADS] // r[NUM_KV_HEADS]
    num = (last - first) * per_kv
    ld, ld_out = SCORE_STRIDE * FLOAT, head_dim * FLOAT
    blocks = scratch
    queries = blocks + LIST_BYTES
    acc = queries + num * head_dim * FLOAT
    states = acc + num * head_dim * FLOAT
    scores = states + num * 64
    own_block = scores + num * SCORE_STRIDE * FLOAT
    gather_queries(r, first, last, head * per_kv, per_kv, queries)
    common, end = common_blocks(r, first, last)
    for span in range(0, end, SPAN_BLOCKS):
        stop = min(span + SPAN_BLOCKS, end)
        shared = max(0, min(stop, common) - span)
        list_blocks(r, index, first, head, span, shared, blocks)
        call(r[SCORES], (queries, num, blocks, shared, head_dim, scores, ld, AHEAD))
        for row in range(first, last):
            at = (row - first) * per_kv
            q, s = queries + at * head_dim * FLOAT, scores + at * SCORE_STRIDE * FLOAT
            for block in range(span + shared, min(stop, row_blocks(r, row))):
                int64s(own_list(blocks))[0] = row_block(r, index, row, head, block, own_block, True)
                target = s + (block - span) * BLOCK * FLOAT
                call(r[SCORES], (q, per_kv, own_list(blocks), 1, head_dim, target, ld, 0))
            softmax_row(r, row, at, per_kv, span, s, states, acc)
        values, keys = blocks + shared * 8, shared * BLOCK
        call(r[VALUES], (scores, ld, num, values, keys, head_dim, acc, ld_out, AHEAD))
        for row in range(first, last):
            at = (row - first) * per_kv
            p, out = scores + at * SCORE_STRIDE * FLOAT, acc + at * head_dim * FLOAT
            for block in range(span + shared, min(stop, row_blocks(r, row))):
                own = row_block(r, index, row, head, block, own_block, False)
                int64s(own_list(blocks))[0] = own
                count = min(BLOCK, int64s_of_32(r[KV_LENS], row) - block * BLOCK)
                weights = p + (block - span) * BLOCK * FLOAT
                args = (weights, ld, per_kv, own_list(blocks), count, head_dim, out, ld_out, 0)
                call(r[VALUES], args)
    finish_rows(r, first, last, head * per_kv, per_kv, acc, states)


@compiled
def own_list(blocks: int) -> int:
    """The list of the one block that belongs to a row alone."""
    return blocks + LIST_BYTES - 8


@compiled
def list_blocks(
    r: Ints, index: int, row: int, head: int, first: int, num: int, blocks: int
) -> None:
    """Addresses of `num` blocks of keys from block `first` on, of their values, and some more.

    They are read in this order, each being prefetched AHEAD entries before.
    """
    entries = int64s(blocks)
    per_page = r[BLOCKS_PER_PAGE]
    request = int64s_of_32(r[ROW_TO_REQ], row)
    page = request * r[PAGE_TABLE_STRIDE] + first // per_page
    within = first % per_page
    for i in range(num):
        block = int64s_of_32(r[PAGE_TABLE], page) * per_page + within
        offset = ((index * r[NUM_BLOCKS] + block) * r[NUM_KV_HEADS] + head) * r[BLOCK_BYTES]
        entries[i] = r[KEYS] + offset
        entries[num + i] = r[VALUES_POOL] + offset
        within += 1
        if within == per_page:
            within = 0
            page += 1
    for i in range(AHEAD if num > 0 else 0):
        entries[2 * num + i] = entries[2 * num - 1]


@compiled
def gather_queries(r: Ints, first: int, last: int, column: int, per_kv: int, queries: int) -> None:
    """Copy the queries of a unit into [rows * per_kv, head_dim]."""
    size = per_kv * r[HEAD_DIM]
    for row in range(first, last):
        at = row * r[QKV_STRIDE] + column * r[HEAD_DIM]
        source = int32s(r[QKV] + at * FLOAT)
        target = int32s(queries + (row - first) * size * FLOAT)
        for i in range(size):
            target[i] = source[i]


@compiled
def common_blocks(r: Ints, first: int, last: int) -> tuple[int, int]:
    """(whole blocks that every row reads from its pages, blocks of the longest row)."""
    common, end = paged_len(r, first) // BLOCK, 0
    for row in range(first, last):
        common = min(common, paged_len(r, row) // BLOCK)
        end = max(end, row_blocks(r, row))
    return common, end


@compiled
def paged_len(r: Ints, row: int) -> int:
    """Positions of a row that are read through the page table."""
    length = int64s_of_32(r[KV_LENS], row)
    if r[TAIL_STARTS] != 0:
        length = min(length, int64s_of_32(r[TAIL_STARTS], row))
    return length


@compiled
def row_blocks(r: Ints, row: int) -> int:
    """Blocks that a row sees, the last one perhaps in part."""
    return (int64s_of_32(r[KV_LENS], row) + BLOCK - 1) // BLOCK


@compiled
def int64s_of_32(address: int, i: int) -> int:
    """Element i of an int32 array, widened."""
    return int(int32s(address)[i])


@compiled
def page_slot(r: Ints, row: int, position: int) -> int:
    """Pool slot of a position of the row's request."""
    page_size = r[BLOCKS_PER_PAGE] * BLOCK
    request = int64s_of_32(r[ROW_TO_REQ], row)
    page = int64s_of_32(r[PAGE_TABLE], request * r[PAGE_TABLE_STRIDE] + position // page_size)
    return page * page_size + position % page_size


@compiled
def pool_address(r: Ints, index: int, head: int, slot: int, keys: bool) -> int:
    """Address of the K or V block of one head that holds `slot`."""
    base = r[KEYS] if keys else r[VALUES_POOL]
    block = (index * r[NUM_BLOCKS] + slot // BLOCK) * r[NUM_KV_HEADS] + head
    return base + block * r[BLOCK_BYTES]


@compiled
def row_block(
    r: Ints, index: int, row: int, head: int, block: int, own_block: int, keys: bool
) -> int:
    """Address of a block of keys or values of one row, gathered if it has slots of its own."""
    start = block * BLOCK
    stop = min(start + BLOCK, int64s_of_32(r[KV_LENS], row))
    paged = paged_len(r, row)
    if stop <= paged:
        return pool_address(r, index, head, page_slot(r, row, start), keys)
    tail = int64s(r[TAIL_SLOTS] + row * r[TAIL_STRIDE] * 8)
    move = r[MOVE_KEY] if keys else r[MOVE_VALUE]
    for position in range(start, stop):
        slot = tail[position - paged] if position >= paged else page_slot(r, row, position)
        source = pool_address(r, index, head, slot, keys)
        call(move, (source, slot % BLOCK, own_block, position - start, r[HEAD_DIM]))
    return own_block


@compiled
def softmax_row(
    r: Ints, row: int, at: int, per_kv: int, span: int, scores: int, states: int, acc: int
) -> None:
    """Softmax of a span for the queries `at` .. of one row, over exactly its keys."""
    length = min(int64s_of_32(r[KV_LENS], row) - span * BLOCK, SPAN)
    if length > 0:
        for i in range(per_kv):
            out = acc + (at + i) * r[HEAD_DIM] * FLOAT
            state = states + (at + i) * 64
            values = scores + i * SCORE_STRIDE * FLOAT
            call(r[SOFTMAX], (values, length, state, out, r[HEAD_DIM], int(span == 0)))


@compiled
def finish_rows(
    r: Ints, first: int, last: int, column: int, per_kv: int, acc: int, states: int
) -> None:
    """Divide by the sums and write the unit's columns of ATTENDED."""
    head_dim = r[HEAD_DIM]
    for row in range(first, last):
        for i in range(per_kv):
            at = (row - first) * per_kv + i
            target = r[ATTENDED] + (row * r[ATTENDED_STRIDE] + (column + i) * head_dim) * FLOAT
            call(r[FINISH], (acc + at * head_dim * FLOAT, states + at * 64, head_dim, target))


def attention_scratch_bytes(head_dim: int, queries_per_kv: int) -> int:
    """Scratch that `attend_group` needs on one thread."""
    num = max(MAX_QUERIES, queries_per_kv)
    floats = num * (2 * head_dim + SCORE_STRIDE) + head_dim * BLOCK
    return LIST_BYTES + floats * FLOAT + num * 64
