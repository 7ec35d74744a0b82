"""Serves the metrics over HTTP, from a thread of its own."""

from __future__ import annotations

import threading
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

from router.errors import StartupError
from router.ports import bind_error


class MetricsServer:
    """`GET /metrics` on `host:port` in Prometheus' text format; port 0 takes any free one, which `port` then tells."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        self._server: WSGIServer
        self._thread: threading.Thread
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise StartupError(bind_error(host, port, "--metrics-port", error)) from error
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
