"""What the slots of the new tokens hold after the call; its output is that of decode attention over all tokens."""

from __future__ import annotations

import numpy as np

from pagefuzz.strategies.number_formats import encode
from pagefuzz.strategies.write_then_decode import WriteThenDecodeCase


def written(case: WriteThenDecodeCase) -> dict[str, np.ndarray]:
    """k_cache, v_cache: [new tokens, KVH * D] bits, in token order."""
    tokens = case.new_token_ids()
    return {
        name: encode(values(tokens), case.dtype).reshape(len(tokens), case.row)
        for name, values in (("k_cache", case.key_values), ("v_cache", case.value_values))
    }
