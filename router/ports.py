"""Finds out before anything else starts whether the ports can be had."""

from __future__ import annotations

import errno
import socket

from router.config import RouterConfig
from router.errors import StartupError


def check_ports(config: RouterConfig) -> None:
    """Raises StartupError if a port is taken, forbidden, or used twice, or the host is not this machine's."""
    if config.port and config.port == config.metrics_port:
        raise StartupError(f"--port and --metrics-port are both {config.port}; give them different ports")
    for flag, port in (("--port", config.port), ("--metrics-port", config.metrics_port)):
        if port >= 0:
            _probe(config.host, port, flag)


def join(host: str, port: int) -> str:
    """`host:port`, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _probe(host: str, port: int, flag: str) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As the servers do: a port whose last connections are just closing is free, one that is listened on is not.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        raise StartupError(bind_error(host, port, flag, error)) from error


def bind_error(host: str, port: int, flag: str, error: OSError) -> str:
    """One sentence on why `host:port` cannot be listened on."""
    where = join(host, port)
    if error.errno == errno.EADDRINUSE:
        return f"{where} is in use by another process; stop it or choose another port with {flag}"
    if error.errno == errno.EACCES:
        return f"{where} needs rights that this process lacks; choose a port above 1023 with {flag}"
    return f"cannot listen on {where}: {error.strerror or error}; check --host and {flag}"
