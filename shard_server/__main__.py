"""`python -m shard_server`: one rank of a model, until a signal, its parent's end or a fatal error."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from shard_server import logs
from shard_server.config import load_config
from shard_server.errors import StartError
from shard_server.server import EXIT_REFUSED, ShardServer


def main() -> int:
    """Returns the process's exit code."""
    rank = None
    try:
        config = load_config(sys.argv[1:])
        rank = config.rank
        logs.configure(config.log_level, config.log_format, rank)
        logging.getLogger("shard_server").info("configuration: %s", config)

        async def run() -> int:
            return await ShardServer(config).run()

        return asyncio.run(run())
    except StartError as error:
        logs.fatal(rank, str(error))
        return EXIT_REFUSED


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    # Not sys.exit: a step that never ends, such as one that waits for a dead rank, must not keep the process.
    os._exit(code)
