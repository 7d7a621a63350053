"""The slot of each token, read from the block table."""

from __future__ import annotations

from pagefuzz.oracles.loop.memory import Memory
from pagefuzz.strategies.case import arguments_of
from pagefuzz.strategies.slot_mapping import SlotMappingCase


def right_answer(case: SlotMappingCase) -> list[int]:
    """T slots"""
    tensors = arguments_of(case).tensors
    table, seq_ids, positions = (Memory(tensors[name]) for name in ("block_tables", "seq_ids", "positions"))
    slots = []
    for t in range(len(case.tokens)):
        position = int(positions.at(t))
        if position < 0:
            slots.append(-1)
            continue
        page, offset = divmod(position, case.block_size)
        slots.append(int(table.at(int(seq_ids.at(t)), page)) * case.block_size + offset)
    return slots
