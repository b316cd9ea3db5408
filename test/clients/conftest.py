"""One running server per worker, shared by all tests of this folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the clients under test shall not look for updates
sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from processes import started  # needs the path above
from workers import WORKERS, Servers

from api_client import ApiClient


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(tmp_path_factory.mktemp("clients"), stack)


@pytest.fixture(params=list(WORKERS))
def worker(request: pytest.FixtureRequest, servers: Servers) -> ApiClient:
    """The server of each worker in turn."""
    return servers[request.param]


@pytest.fixture(params=[name for name in WORKERS if name != "plain"])
def drafting(request: pytest.FixtureRequest, servers: Servers) -> ApiClient:
    """The server of each worker that drafts."""
    return servers[request.param]


@pytest.fixture(scope="session")
def plain(servers: Servers) -> ApiClient:
    """What every other worker must equal."""
    return servers["plain"]


@pytest.fixture(scope="session")
def dspark(servers: Servers) -> ApiClient:
    return servers["dspark"]


@pytest.fixture(scope="session")
def default_model() -> Iterator[ApiClient]:
    """The packaged model with the drafter that is shipped for it, as the pages start it."""
    # Fixed draft lengths: on a busy machine measured costs may tell that no draft pays.
    flags = ("--speculative-algorithm", "DSPARK", "--no-speculative-adaptive")
    with (
        started(Path("smollm2"), *flags) as server,
        httpx.Client(base_url=server.url, timeout=120) as http,
    ):
        yield ApiClient(server.url, http)
