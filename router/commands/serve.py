"""`serve`: checks what can be checked at once, starts the shards, then serves."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import threading
from collections.abc import Sequence

from router import logs
from router.adapter_settings import AdapterSettings
from router.chat import ChatTemplates
from router.config import RouterConfig, effective, load_config
from router.launcher import ShardGroup
from router.model_folder import ModelFacts, read_model_facts, resolve_model
from router.ports import check_ports
from router.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

LEAVE_S = 5.0


def main(argv: Sequence[str]) -> int:
    """Serves until a signal; 0 after an orderly end, 1 if a shard failed. Raises StartupError if it cannot start."""
    config = load_config(argv, os.environ)
    logs.configure(config.log_level, config.log_format)
    logs.event(logger, "configuration", **effective(config))
    check_ports(config)
    AdapterSettings.from_config(config)  # Before a model is read, which may take minutes.
    folder = resolve_model(config.model)
    facts = read_model_facts(folder, is_dummy=config.load_format == "dummy")
    tokenizer = Tokenizer.from_dir(folder)
    templates = ChatTemplates.from_dir(folder, tokenizer)
    config = dataclasses.replace(config, model=str(folder.resolve()), served_model_name=config.model_name)
    # gRPC comes into the process only after the children were started: it must not be there when a process forks.
    shards = None if config.shard_addresses else ShardGroup.start(config)
    try:
        return _serve(config, facts, tokenizer, templates, shards)
    finally:
        if shards is not None:
            shards.stop()


def _serve(
    config: RouterConfig,
    facts: ModelFacts,
    tokenizer: Tokenizer,
    templates: ChatTemplates,
    shards: ShardGroup | None,
) -> int:
    from router.server import Server, ShardFailure

    async def run() -> int:
        code = 1
        try:
            await Server(config, facts, tokenizer, templates, shards).run()
            code = 0
        except ShardFailure as failure:
            logger.error("%s", failure)
        finally:
            _leave_within(LEAVE_S, code)
        return code

    return asyncio.run(run())


def _leave_within(seconds: float, code: int) -> None:
    """Ends the process when what is left of it, gRPC's threads and prompts being encoded, does not end by itself."""
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()
