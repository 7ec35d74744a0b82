"""What the shards are asked about adapters beside the steps: to stage one in host memory, and to drop it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

import grpc
import grpc.aio
from cohort.shard.v1 import shard_pb2, shard_pb2_grpc

if TYPE_CHECKING:
    Stub: TypeAlias = shard_pb2_grpc.ShardServiceAsyncStub

LOAD_TIMEOUT_S = 600.0
NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
UNLOAD_TIMEOUT_S = 600.0  # A load under way has to end first.


class AdapterRefused(Exception):
    """A shard cannot apply the adapter; the text says why and is fit for the caller."""


class AdapterLinkBroken(Exception):
    """A shard did not answer; the adapter may be as good as any."""


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterSource:
    """A private copy of an adapter folder and the hash of its files, which every shard checks."""

    path: str
    sha256: str
    weight: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterRecipe:
    """What a version is made of. `combination` is empty for an adapter as it is, else PEFT's name of a merge."""

    version: str
    sources: tuple[AdapterSource, ...]
    combination: str = ""
    density: float = 1.0
    seed: int = 0


class AdapterLink(Protocol):
    """The shards' side of adapters; tests put scripted ones here.

    `staged` is what every shard had staged when the link was made, `strays` what only some had.
    """

    staged: frozenset[str]
    strays: frozenset[str]

    async def load(self, recipe: AdapterRecipe) -> int:
        """Stages it on every shard; its rank. Raises AdapterRefused or AdapterLinkBroken at the first shard's no."""

    async def unload(self, version: str) -> None:
        """Drops it on every shard, after a load of it that is under way. Raises AdapterLinkBroken."""


class GrpcAdapterLink:
    """AdapterLink over the channels of a shard link, which closes them."""

    def __init__(self, channels: Sequence[grpc.aio.Channel], staged_by_rank: Sequence[frozenset[str]]) -> None:
        self._stubs = [cast("Stub", shard_pb2_grpc.ShardServiceStub(channel)) for channel in channels]
        self.staged: frozenset[str] = frozenset.intersection(*staged_by_rank) if staged_by_rank else frozenset()
        self.strays: frozenset[str] = frozenset().union(*staged_by_rank) - self.staged

    async def load(self, recipe: AdapterRecipe) -> int:
        """See AdapterLink."""
        request = shard_pb2.LoadAdapterRequest(
            version=recipe.version,
            sources=[
                shard_pb2.AdapterSource(path=source.path, sha256=source.sha256, weight=source.weight)
                for source in recipe.sources
            ],
            combination_type=recipe.combination,
            density=recipe.density,
            seed=recipe.seed,
        )
        try:
            answers = await asyncio.gather(*(stub.LoadAdapter(request, timeout=LOAD_TIMEOUT_S) for stub in self._stubs))
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                raise AdapterRefused(error.details()) from error
            if error.code() in NO_ANSWER:
                raise AdapterLinkBroken(f"{error.code().name}: {error.details()}") from error
            raise
        return max(answer.rank for answer in answers)

    async def unload(self, version: str) -> None:
        """See AdapterLink."""
        request = shard_pb2.UnloadAdapterRequest(version=version)
        try:
            await asyncio.gather(*(stub.UnloadAdapter(request, timeout=UNLOAD_TIMEOUT_S) for stub in self._stubs))
        except grpc.aio.AioRpcError as error:
            raise AdapterLinkBroken(f"{error.code().name}: {error.details()}") from error
