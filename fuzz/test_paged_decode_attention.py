"""Fuzzes every chosen kernel of paged_decode_attention; one item a kernel and shard."""

from collections.abc import Callable


def test_paged_decode_attention(shard: Callable[[], None]) -> None:
    shard()
