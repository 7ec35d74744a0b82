"""One pool of processes per world size for all tests of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.model.rank_pool import RankPool


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[Callable[[int], RankPool]]:
    pools: dict[int, RankPool] = {}

    def get(world_size: int) -> RankPool:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size)
        return pools[world_size]

    yield get
    for pool in pools.values():
        pool.close()
