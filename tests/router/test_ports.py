"""A port that cannot be had is found out before anything starts."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from router.config import RouterConfig
from router.errors import StartupError
from router.ports import check_ports, join


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        yield listener.getsockname()[1]


@pytest.mark.parametrize("flag", ["port", "metrics_port"])
def test_a_port_in_use_is_refused_with_its_flag(taken: int, flag: str) -> None:
    config = RouterConfig(host="127.0.0.1", **{"port": 0, "metrics_port": 0, flag: taken})
    with pytest.raises(StartupError) as refused:
        check_ports(config)
    text = str(refused.value)
    assert f"127.0.0.1:{taken} is in use" in text and f"--{flag.replace('_', '-')}" in text and "\n" not in text


def test_any_free_port_and_no_metrics_port_are_well() -> None:
    check_ports(RouterConfig(host="127.0.0.1", port=0, metrics_port=-1))
    check_ports(RouterConfig(host="127.0.0.1", port=0, metrics_port=0))


def test_a_port_whose_connections_just_closed_is_free() -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            connection, _ = listener.accept()
            connection.close()  # The side that closes first keeps the port for a while.
    check_ports(RouterConfig(host="127.0.0.1", port=port, metrics_port=-1))


def test_one_port_for_both_is_refused() -> None:
    with pytest.raises(StartupError, match="both 7"):
        check_ports(RouterConfig(port=7, metrics_port=7))


@pytest.mark.parametrize("host", ["198.51.100.1", "no such host"])
def test_a_host_that_is_not_ours_is_refused(host: str) -> None:
    with pytest.raises(StartupError, match="--host"):
        check_ports(RouterConfig(host=host, port=0, metrics_port=-1))


def test_an_ipv6_host_stands_in_brackets() -> None:
    assert join("::", 1) == "[::]:1"
    assert join("0.0.0.0", 1) == "0.0.0.0:1"
