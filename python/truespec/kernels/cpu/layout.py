"""Where things stand in the integer records that Python hands to compiled code.

A record is an int64 array: addresses, counts, function addresses and float bits. The constants are
indices into it. Python fills records (stack.py); step.py reads them.
"""

from __future__ import annotations

# A packed weight: function, words, bytes per panel, groups, panels, bias or 0, 1 if it is coded.
LINEAR_FIELDS = 7
L_FUNCTION, L_WORDS, L_PANEL_BYTES, L_GROUPS, L_PANELS, L_BIAS, L_CODED = range(LINEAR_FIELDS)

# A layer: its weights, then its norm vectors (0 where it has none).
Q, K, V, O, GATE, UP, DOWN = range(0, 7 * LINEAR_FIELDS, LINEAR_FIELDS)  # noqa: E741 - its name
INPUT_NORM, Q_NORM, K_NORM, POST_NORM = range(7 * LINEAR_FIELDS, 7 * LINEAR_FIELDS + 4)
LAYER_FIELDS = POST_NORM + 1

# One step of a stack. Row strides are in floats, "bytes" fields in bytes.
STEP_FIELDS = 110
(
    # functions
    BARRIER, FETCH_ADD, RMS_NORM, ROTATE_HEAD, ADD_ROWS, SILU_MUL, TO_FIXED,
    SCORES, SOFTMAX, VALUES, FINISH, STORE_KEY, STORE_VALUE, MOVE_KEY, MOVE_VALUE,
    # threads: barrier counter, sched_yield, attention counters [num_layers], group starts
    BARRIER_COUNTER, GIVE_WAY, UNIT_COUNTERS, GROUP_STARTS, NUM_GROUPS, GROUP_ROWS,
    # shape
    LAYERS, NUM_LAYERS, HIDDEN, HIDDEN_STRIDE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM,
    EPS_BITS, SCALE_BITS, ONE_BITS, ROPE_COS, ROPE_SIN, NUM_POSITIONS,
    # rows
    NUM_ROWS, POSITIONS, ROW_TO_REQ, OUT_SLOTS, KV_LENS, PAGE_TABLE, PAGE_TABLE_STRIDE,
    TAIL_STARTS, TAIL_SLOTS, TAIL_STRIDE,
    # pool
    KEYS, VALUES_POOL, NUM_BLOCKS, BLOCKS_PER_PAGE, BLOCK_BYTES,
    # input and output
    INPUT, FIRST_INPUT, FIRST_STRIDE, FINAL_NORM, OUTPUT, CAPTURED, CAPTURE_INDEX, CAPTURE_STRIDE,
    # shared buffers and their strides
    X, NORMED, QKV, QKV_STRIDE, K_COLUMN, V_COLUMN, ATTENDED, ATTENDED_STRIDE,
    GATES, UPS, MLP_STRIDE, LINEAR_OUT,
    # fixed-point rows of inputs, with the strides of these
    FIRST_FIXED, NORMED_FIXED, ATTENDED_FIXED, GATES_FIXED, CONTEXT_FIXED,
    # scratch of a thread
    SCRATCH, SCRATCH_BYTES,
    # input of one weight; of context injection: features, their projection, its norm
    CONTEXT, CONTEXT_STRIDE, PROJECTION, CONTEXT_NORM,
    # around a stack's layers, 0 for none: record of a context to write first, head and its output
    BEFORE, HEAD, HEAD_FIXED, LOGITS, LOGITS_STRIDE,
    # chains of drafts: their function or 0 and where logits are; sizes; what each draft depends on
    CHAINS, BLOCK_ROWS, FIRST_DRAFT_ROW, NUM_STEPS, NUM_DRAFT_IDS, NUM_TARGET_IDS,
    W1, W2, RANK, NUM_TILES, TILE_COLUMNS,
    LAST_IDS, TARGET_IDS, TEMPERATURES, SEEDS, DRAFT_POSITIONS, DOMAIN,
    CONFIDENCE, CONFIDENCE_SIZE, CONFIDENCE_BIAS, CONFIDENCE_TEMPERATURES,
    # their output
    DRAFT_IDS, LOGPROBS, CONFIDENCES,
    # which allocation of the shared buffers the record points at
    BUFFERS,
) = range(STEP_FIELDS)  # fmt: skip

# What `forward` and `write_context` return.
DONE, BAD_POSITION, BAD_SLOT = range(3)

# Attention scratch of a thread: offsets depend on the head size only.
SPAN = 512  # keys per softmax span: fixed, since the rescaling between spans rounds
SCORE_STRIDE = SPAN + 16  # floats; not a power of two, or rows would share cache sets
MAX_QUERIES = 24  # queries that share a load of K and V
