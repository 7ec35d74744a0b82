"""`adapters`: loads, unloads and lists the adapters of a running server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cohort.v1 import adapter_pb2 as pb
from cohort.v1 import adapter_pb2_grpc

from router.commands.client import add_server_flags, channel

COLUMNS = ("name", "tier", "rank", "requests", "pinned", "version", "path")
VERSION_DIGITS = 12  # enough to tell versions apart by eye


def main(argv: Sequence[str]) -> int:
    """0. Raises StartupError with the server's reason if it refuses."""
    args = _parser().parse_args(argv)
    with channel(args) as opened:
        stub = adapter_pb2_grpc.AdapterServiceStub(opened)
        if args.action == "load":
            request = pb.LoadAdapterRequest(name=args.name, path=args.path, pin=args.pin)
            adapters = [stub.LoadAdapter(request, timeout=args.timeout).adapter]
        elif args.action == "unload":
            stub.UnloadAdapter(pb.UnloadAdapterRequest(name=args.name, wait=args.wait), timeout=args.timeout)
            return 0
        else:
            adapters = list(stub.ListAdapters(pb.ListAdaptersRequest(), timeout=args.timeout).adapters)
    sys.stdout.write(_table(adapters))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m router adapters", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    load = actions.add_parser("load", help="make an adapter available; the same name again is a new version")
    load.add_argument("name", help="name that requests use")
    load.add_argument("path", nargs="?", default="", help="its folder in the server's --adapter-dirs (default: NAME)")
    load.add_argument("--pin", action="store_true", help="never put it out of memory")
    unload = actions.add_parser("unload", help="take an adapter away; one in use is refused")
    unload.add_argument("name", help="the adapter's name")
    unload.add_argument("--wait", action="store_true", help="wait for requests that use it")
    for action in (load, unload, actions.add_parser("list", help="list the adapters")):
        add_server_flags(action)
    return parser


def _table(adapters: Sequence[pb.Adapter]) -> str:
    rows = [COLUMNS, *(_row(adapter) for adapter in adapters)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "".join(f"{line}\n" for line in lines)


def _row(adapter: pb.Adapter) -> tuple[str, ...]:
    tier = pb.AdapterTier.Name(adapter.tier).removeprefix("ADAPTER_TIER_").lower()
    rank = str(adapter.rank) if adapter.rank else "-"
    pinned = "yes" if adapter.is_pinned else "no"
    version = adapter.version[:VERSION_DIGITS] or "-"
    return adapter.name, tier, rank, str(adapter.num_requests), pinned, version, adapter.path
