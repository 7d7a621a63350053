"""The slots of all tokens at once, from the sequences' blocks."""

from __future__ import annotations

import numpy as np

from pagefuzz.strategies.slot_mapping import SlotMappingCase


def right_answer(case: SlotMappingCase) -> np.ndarray:
    """int64[T]"""
    slots_of = [
        np.array(row.blocks, dtype=np.int64).repeat(case.block_size) * case.block_size
        + np.tile(np.arange(case.block_size), len(row.blocks))
        for row in case.sequences
    ]
    return np.array(
        [slots_of[token.seq_id][token.position] if token.position >= 0 else -1 for token in case.tokens],
        dtype=np.int64,
    )
