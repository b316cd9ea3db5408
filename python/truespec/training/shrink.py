"""A block drafter with fewer draft ids than it was trained with: no new training, cheaper drafts.

Rare tokens are seldom drafted right, while the head and the Markov head take time for each of them.
"""

import json
from pathlib import Path

import numpy as np

from .checkpoint_dir import stored_tensors, write_checkpoint
from .export import read_shape, read_tensors
from .start import W2, choose_draft_vocab


def shrink_block(checkpoint: Path, out: Path, counts: np.ndarray, size: int) -> None:
    """Write the drafter at `checkpoint` with the `size` of its ids that were generated most.

    Args:
        out: directory; an older checkpoint there is replaced.
        counts: [V] int64 how often each target id was generated.

    Raises ValueError for a drafter of another kind, or one without so many ids.
    """
    read_shape(checkpoint)
    tensors, ids = read_tensors(checkpoint)
    if not 0 < size <= len(ids):
        raise ValueError(f"--draft-vocab-size is {size}, the drafter has {len(ids)} ids")
    kept = choose_draft_vocab(counts[ids.numpy()], size)
    if W2 in tensors:
        tensors[W2] = tensors[W2][kept].contiguous()
    config = json.loads((checkpoint / "config.json").read_text())
    stored = stored_tensors(tensors, ids[kept])
    write_checkpoint(out, stored, config | {"draft_vocab_size": size})
