"""One server per set of flags, shared by the tests of a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.serving import ROOT, Server, Servers


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    servers = Servers()
    yield servers
    servers.stop()


@pytest.fixture(scope="session")
def server(servers: Servers) -> Server:
    """The first demo model on two shards."""
    return servers.get("--model", str(ROOT / "demo/cohere"), "--tensor-parallel-size", "2", "--run-ahead", "1")
