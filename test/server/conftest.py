"""One live server for all tests of this folder that need no options of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from live import Live, live_server


@pytest.fixture(scope="session")
def live() -> Iterator[Live]:
    with live_server() as server:
        yield server
