"""The decoder stack as compiled Python: one call per step and thread, all layers inside.

Every function takes addresses and integers (see layout.py). Work is split by outputs, heads or
rows, with a barrier between phases; how it is split never changes a result. Arithmetic is done by
the kernels only.
"""

from __future__ import annotations

from .attention_step import attend_rows
from .layout import (
    ADD_ROWS,
    ATTENDED,
    ATTENDED_FIXED,
    ATTENDED_STRIDE,
    BAD_POSITION,
    BAD_SLOT,
    BEFORE,
    CAPTURE_INDEX,
    CAPTURE_STRIDE,
    CAPTURED,
    CHAINS,
    CONTEXT,
    CONTEXT_FIXED,
    CONTEXT_NORM,
    CONTEXT_STRIDE,
    DONE,
    DOWN,
    EPS_BITS,
    FINAL_NORM,
    FIRST_FIXED,
    FIRST_INPUT,
    FIRST_STRIDE,
    GATE,
    GATES,
    GATES_FIXED,
    GROUP_ROWS,
    GROUP_STARTS,
    HEAD,
    HEAD_DIM,
    HEAD_FIXED,
    HIDDEN,
    HIDDEN_STRIDE,
    INPUT,
    INPUT_NORM,
    K_COLUMN,
    K_NORM,
    KEYS,
    L_BIAS,
    L_CODED,
    L_PANELS,
    LAYER_FIELDS,
    LAYERS,
    LINEAR_OUT,
    LOGITS,
    LOGITS_STRIDE,
    MLP_STRIDE,
    MOVE_KEY,
    MOVE_VALUE,
    NORMED,
    NORMED_FIXED,
    NUM_BLOCKS,
    NUM_GROUPS,
    NUM_HEADS,
    NUM_KV_HEADS,
    NUM_LAYERS,
    NUM_POSITIONS,
    NUM_ROWS,
    ONE_BITS,
    OUT_SLOTS,
    OUTPUT,
    POSITIONS,
    POST_NORM,
    PROJECTION,
    Q_NORM,
    QKV,
    QKV_STRIDE,
    ROPE_COS,
    ROPE_SIN,
    ROTATE_HEAD,
    ROW_TO_REQ,
    SCALE_BITS,
    SILU_MUL,
    STORE_KEY,
    STORE_VALUE,
    TAIL_SLOTS,
    TO_FIXED,
    UNIT_COUNTERS,
    UP,
    UPS,
    V_COLUMN,
    VALUES_POOL,
    K,
    O,
    Q,
    V,
    X,
)
from .native import Ints, call, compiled, int32s, int64s
from .phases import (
    BLOCK,
    FLOAT,
    add_linear,
    barrier,
    copy_rows,
    fix_rows,
    linear,
    norm_rows,
    pool_block,
    share,
    split_linear,
)


def forward(thread: int, num_threads: int, record: int) -> int:
    """All layers for the rows of a step record; if a row is out of reach, nothing but saying so."""
    r = int64s(record)
    problem = out_of_reach(r)
    if problem == DONE and r[BEFORE] != 0:
        problem = out_of_reach(int64s(r[BEFORE]))
    if problem != DONE:  # every thread finds the same
        return problem
    hidden, stride = r[HIDDEN], r[HIDDEN_STRIDE]
    if thread == 0:  # read after the first barrier
        r[NUM_GROUPS] = group_rows(r, num_threads)
        for index in range(r[NUM_LAYERS]):
            int64s(r[UNIT_COUNTERS])[index] = 0
    barriers = 0
    if r[BEFORE] != 0:
        barriers = fill_context(int64s(r[BEFORE]), thread, num_threads, barriers)
    copy_rows(r, thread, num_threads, r[INPUT], hidden, r[X], stride)
    capture(r, thread, num_threads, -1)
    for index in range(r[NUM_LAYERS]):
        layer = r[LAYERS] + index * LAYER_FIELDS * 8
        barriers = attention_half(r, thread, num_threads, index, layer, barriers)
        barriers = mlp_half(r, thread, num_threads, layer, barriers)
        capture(r, thread, num_threads, index)
    result = r[X]
    if r[FINAL_NORM] != 0:
        result = r[NORMED]
        norm_rows(r, thread, num_threads, r[X], r[FINAL_NORM])
    copy_rows(r, thread, num_threads, result, stride, r[OUTPUT], hidden)
    if r[HEAD] != 0:
        barriers = head_rows(r, thread, num_threads, result, barriers)
    if r[CHAINS] != 0:
        barriers = barrier(r, num_threads, barriers)
        call(r[CHAINS], (thread, num_threads, record, barriers))
    return DONE


def write_context(thread: int, num_threads: int, record: int) -> int:
    """K and V of every layer from one shared input, the normed projection of CONTEXT."""
    r = int64s(record)
    problem = out_of_reach(r)
    if problem != DONE:
        return problem
    fill_context(r, thread, num_threads, 0)
    return DONE


def project(thread: int, num_threads: int, record: int) -> int:
    """LINEAR_OUT = CONTEXT W^T + bias for the one weight at LAYERS."""
    r = int64s(record)
    project_rows(r, thread, num_threads, r[LAYERS], 0)
    return 0


def normalise(thread: int, num_threads: int, record: int) -> int:
    """NORMED = norm(X) with the weight at LAYERS."""
    r = int64s(record)
    norm_rows(r, thread, num_threads, r[X], r[LAYERS])
    return 0


def move_slots(thread: int, num_threads: int, record: int) -> int:
    """Copy K and V of NUM_ROWS slots from TAIL_SLOTS to OUT_SLOTS, in order, in every layer."""
    r = int64s(record)
    first, last = share(r[NUM_LAYERS] * r[NUM_KV_HEADS], thread, num_threads)
    sources, targets = int64s(r[TAIL_SLOTS]), int64s(r[OUT_SLOTS])
    for unit in range(first, last):
        index, head = unit // r[NUM_KV_HEADS], unit % r[NUM_KV_HEADS]
        for i in range(r[NUM_ROWS]):
            source = pool_block(r, index, sources[i], head)
            target = pool_block(r, index, targets[i], head)
            offset, new_offset = sources[i] % BLOCK, targets[i] % BLOCK
            keys, values, dim = r[KEYS], r[VALUES_POOL], r[HEAD_DIM]
            call(r[MOVE_KEY], (keys + source, offset, keys + target, new_offset, dim))
            call(r[MOVE_VALUE], (values + source, offset, values + target, new_offset, dim))
    return 0


@compiled
def out_of_reach(r: Ints) -> int:
    """Rotation and storage stay inside their tables: nothing else checks positions and slots."""
    positions, slots = int32s(r[POSITIONS]), int64s(r[OUT_SLOTS])
    for row in range(r[NUM_ROWS]):
        if not 0 <= positions[row] < r[NUM_POSITIONS]:
            return BAD_POSITION
        if not 0 <= slots[row] < r[NUM_BLOCKS] * BLOCK:
            return BAD_SLOT
    return DONE


@compiled
def fill_context(r: Ints, thread: int, num_threads: int, barriers: int) -> int:
    """K and V of a context's rows into the pool, for every thread; returns the barriers passed."""
    barriers = project_rows(r, thread, num_threads, r[PROJECTION], barriers)
    barriers = barrier(r, num_threads, barriers)
    source, fixed, stride = r[NORMED], r[NORMED_FIXED], r[HIDDEN_STRIDE]
    norm_rows(r, thread, num_threads, r[LINEAR_OUT], r[CONTEXT_NORM])
    if r[NORMED_FIXED] != 0:
        fix_rows(r, thread, num_threads, source, fixed, stride)
    barriers = barrier(r, num_threads, barriers)
    for index in range(r[NUM_LAYERS]):
        layer = r[LAYERS] + index * LAYER_FIELDS * 8
        split_linear(r, thread, num_threads, layer + K * 8, source, fixed, stride, r[K_COLUMN])
        split_linear(r, thread, num_threads, layer + V * 8, source, fixed, stride, r[V_COLUMN])
        barriers = barrier(r, num_threads, barriers)
        store_heads(r, thread, num_threads, index, layer, r[NUM_HEADS])
        barriers = barrier(r, num_threads, barriers)
    return barriers


@compiled
def head_rows(r: Ints, thread: int, num_threads: int, x: int, barriers: int) -> int:
    """A thread's columns of LOGITS = x W^T for the weight at HEAD; a thread has its rows of x.

    Returns the barriers passed.
    """
    w, stride = int64s(r[HEAD]), r[HIDDEN_STRIDE]
    if w[L_CODED] != 0:
        fix_rows(r, thread, num_threads, x, r[HEAD_FIXED], stride)
    barriers = barrier(r, num_threads, barriers)
    first, last = share(w[L_PANELS], thread, num_threads)
    out, out_ld = r[LOGITS], r[LOGITS_STRIDE]
    linear(r, thread, r[HEAD], x, r[HEAD_FIXED], stride, out, out_ld, first, last)
    return barriers


@compiled
def project_rows(r: Ints, thread: int, num_threads: int, weight: int, barriers: int) -> int:
    """A thread's columns of LINEAR_OUT = CONTEXT W^T + bias; returns the barriers passed."""
    w = int64s(weight)
    first, last = share(w[L_PANELS], thread, num_threads)
    out, stride = r[LINEAR_OUT], r[HIDDEN_STRIDE]
    source, fixed, ldx = r[CONTEXT], r[CONTEXT_FIXED], r[CONTEXT_STRIDE]
    if w[L_CODED] != 0:
        fix_rows(r, thread, num_threads, source, fixed, ldx)
        barriers = barrier(r, num_threads, barriers)
    linear(r, thread, weight, source, fixed, ldx, out, stride, first, last)
    if w[L_BIAS] != 0 and first < last:
        column = 32 * first * FLOAT
        for row in range(r[NUM_ROWS]):
            target = out + row * stride * FLOAT + column
            call(r[ADD_ROWS], (target, w[L_BIAS] + column, 0, 32 * (last - first)))
    return barriers


@compiled
def attention_half(
    r: Ints, thread: int, num_threads: int, index: int, layer: int, barriers: int
) -> int:
    """X += attention(norm(X)); returns the barriers passed."""
    fields = int64s(layer)
    source, fixed, stride = r[NORMED], r[NORMED_FIXED], r[HIDDEN_STRIDE]
    if index == 0 and r[FIRST_INPUT] != 0:
        source, fixed, stride = r[FIRST_INPUT], r[FIRST_FIXED], r[FIRST_STRIDE]
    elif fields[INPUT_NORM] != 0:
        norm_rows(r, thread, num_threads, r[X], fields[INPUT_NORM])
    else:
        copy_rows(r, thread, num_threads, r[X], stride, r[NORMED], stride)
    if (fields[Q + L_CODED] | fields[K + L_CODED] | fields[V + L_CODED]) != 0:
        fix_rows(r, thread, num_threads, source, fixed, stride)
    barriers = barrier(r, num_threads, barriers)
    split_linear(r, thread, num_threads, layer + Q * 8, source, fixed, stride, 0)
    split_linear(r, thread, num_threads, layer + K * 8, source, fixed, stride, r[K_COLUMN])
    split_linear(r, thread, num_threads, layer + V * 8, source, fixed, stride, r[V_COLUMN])
    barriers = barrier(r, num_threads, barriers)
    store_heads(r, thread, num_threads, index, layer, 0)
    barriers = barrier(r, num_threads, barriers)
    attend_rows(r, thread, index)
    barriers = barrier(r, num_threads, barriers)
    source, fixed, stride = r[ATTENDED], r[ATTENDED_FIXED], r[ATTENDED_STRIDE]
    if fields[O + L_CODED] != 0:
        fix_rows(r, thread, num_threads, source, fixed, stride)
        barriers = barrier(r, num_threads, barriers)
    add_linear(r, thread, num_threads, layer + O * 8, source, fixed, stride)
    return barrier(r, num_threads, barriers)


@compiled
def mlp_half(r: Ints, thread: int, num_threads: int, layer: int, barriers: int) -> int:
    """X += mlp(norm(X)); returns the barriers passed."""
    fields = int64s(layer)
    source, fixed, ld, out_ld = r[NORMED], r[NORMED_FIXED], r[HIDDEN_STRIDE], r[MLP_STRIDE]
    norm_rows(r, thread, num_threads, r[X], fields[POST_NORM])
    if (fields[GATE + L_CODED] | fields[UP + L_CODED]) != 0:
        fix_rows(r, thread, num_threads, source, fixed, ld)
    barriers = barrier(r, num_threads, barriers)
    first, last = share(fields[GATE + L_PANELS], thread, num_threads)
    linear(r, thread, layer + GATE * 8, source, fixed, ld, r[GATES], out_ld, first, last)
    linear(r, thread, layer + UP * 8, source, fixed, ld, r[UPS], out_ld, first, last)
    if first < last:
        for row in range(r[NUM_ROWS]):
            at = (row * out_ld + 32 * first) * FLOAT
            gate = r[GATES] + at
            call(r[SILU_MUL], (gate, r[UPS] + at, gate, 32 * (last - first)))
            if fields[DOWN + L_CODED] != 0:
                call(r[TO_FIXED], (gate, r[GATES_FIXED] + at, last - first))
    barriers = barrier(r, num_threads, barriers)
    add_linear(r, thread, num_threads, layer + DOWN * 8, r[GATES], r[GATES_FIXED], out_ld)
    return barrier(r, num_threads, barriers)


@compiled
def store_heads(
    r: Ints, thread: int, num_threads: int, index: int, layer: int, first_head: int
) -> None:
    """Bias, norm and rotate q and k heads; put k and v into the pool. By (head, row).

    Rows of one head share cache lines of a block of keys, so that they stay with one thread.
    """
    heads, kv_heads, rows = r[NUM_HEADS], r[NUM_KV_HEADS], r[NUM_ROWS]
    first, last = share(rows * (heads + 2 * kv_heads - first_head), thread, num_threads)
    for unit in range(first, last):
        head = unit // rows + first_head
        row = unit % rows
        if head < heads:
            prepare_head(r, layer, row, head * r[HEAD_DIM], Q, Q_NORM, head, r[SCALE_BITS])
        elif head < heads + kv_heads:
            store_key(r, index, layer, row, head - heads)
        else:
            store_value(r, index, layer, row, head - heads - kv_heads)


@compiled
def prepare_head(
    r: Ints, layer: int, row: int, column: int, part: int, norm: int, head: int, scale: int
) -> int:
    """Bias, norm, rotate and scale one q or k head in place; returns its address."""
    fields = int64s(layer)
    head_dim = r[HEAD_DIM]
    x = r[QKV] + (row * r[QKV_STRIDE] + column) * FLOAT
    bias = fields[part + L_BIAS]
    if bias != 0:
        bias += head * head_dim * FLOAT
    turn = int32s(r[POSITIONS])[row] * (head_dim // 2) * FLOAT
    cos, sin = r[ROPE_COS] + turn, r[ROPE_SIN] + turn
    call(r[ROTATE_HEAD], (x, bias, fields[norm], cos, sin, head_dim, r[EPS_BITS], scale))
    return x


@compiled
def store_key(r: Ints, index: int, layer: int, row: int, head: int) -> None:
    """One head's key into the pool."""
    head_dim = r[HEAD_DIM]
    column = r[K_COLUMN] + head * head_dim
    x = prepare_head(r, layer, row, column, K, K_NORM, head, r[ONE_BITS])
    slot = int64s(r[OUT_SLOTS])[row]
    block = r[KEYS] + pool_block(r, index, slot, head)
    call(r[STORE_KEY], (x, block, slot & (BLOCK - 1), head_dim))


@compiled
def store_value(r: Ints, index: int, layer: int, row: int, head: int) -> None:
    """One head's value into the pool."""
    head_dim = r[HEAD_DIM]
    x = r[QKV] + (row * r[QKV_STRIDE] + r[V_COLUMN] + head * head_dim) * FLOAT
    bias = int64s(layer)[V + L_BIAS]
    if bias != 0:
        call(r[ADD_ROWS], (x, bias + head * head_dim * FLOAT, 0, head_dim))
    slot = int64s(r[OUT_SLOTS])[row]
    block = r[VALUES_POOL] + pool_block(r, index, slot, head)
    call(r[STORE_VALUE], (x, block, slot & (BLOCK - 1), head_dim))


@compiled
def capture(r: Ints, thread: int, num_threads: int, index: int) -> None:
    """Copy a thread's rows of X to the output of layer `index`, if it is captured."""
    column = int64s(r[CAPTURE_INDEX])[index + 1]
    if column >= 0:
        target = r[CAPTURED] + column * r[HIDDEN] * FLOAT
        copy_rows(r, thread, num_threads, r[X], r[HIDDEN_STRIDE], target, r[CAPTURE_STRIDE])


@compiled
def group_rows(r: Ints, num_threads: int) -> int:
    """Cut rows into groups of one request that share loads of K and V; returns their number.

    What would be one group is cut in two where its heads do not fill the threads evenly.
    """
    requests, starts = int32s(r[ROW_TO_REQ]), int32s(r[GROUP_STARTS])
    limit = r[GROUP_ROWS]
    if limit // 2 < r[NUM_ROWS] <= limit and r[NUM_KV_HEADS] % num_threads != 0:
        limit = (r[NUM_ROWS] + 1) // 2
    groups = 0
    for row in range(r[NUM_ROWS]):
        full = groups > 0 and row - starts[groups - 1] == limit
        if row == 0 or full or requests[row] != requests[row - 1]:
            starts[groups] = row
            groups += 1
    starts[groups] = r[NUM_ROWS]
    return groups
