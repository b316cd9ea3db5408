"""Makes `tiny` importable from every test; fixtures that several rooms share."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# Tiny models lose more by waking threads than they gain; must be set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny random Llama with tokenizer and chat template."""
    from tiny import tiny_checkpoint  # here: most tests need no transformers

    return tiny_checkpoint(tmp_path_factory.mktemp("tiny_llama"), "llama")
