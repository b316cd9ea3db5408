"""Says that a disk is full where the libraries that write tensors do not."""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

LITTLE = 1 << 20  # bytes


@contextmanager
def naming_a_full_disk(path: Path) -> Iterator[None]:
    """Around writing `path`: raises OSError (ENOSPC) for what a full disk made go wrong."""
    try:
        yield
    except (RuntimeError, SafetensorError) as error:
        is_full = shutil.disk_usage(path.parent).free < LITTLE
        if not is_full and "No space left" not in str(error):
            raise
        text = (
            "the disk is full; what was finished is kept, so make room and give the same command "
            "again"
        )
        raise OSError(errno.ENOSPC, text, str(path)) from error
