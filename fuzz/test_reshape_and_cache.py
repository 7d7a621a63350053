"""Fuzzes every chosen kernel of reshape_and_cache; one item a kernel and shard."""

from collections.abc import Callable


def test_reshape_and_cache(shard: Callable[[], None]) -> None:
    shard()
