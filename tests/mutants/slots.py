"""Mutants of slot_mapping."""

from __future__ import annotations

from pagefuzz.tests.mutants.mutant import Mutant
from pagefuzz.tests.mutants.smallest import Smallest

TORCH, TILED = "torch_slot_mapping", "tiled_slot_mapping"

SLOTS = (
    Mutant(
        "padding_mapped_to_slot_zero",
        TORCH,
        (("torch.full_like(positions, -1, dtype=torch.int64)", "torch.full_like(positions, 0, dtype=torch.int64)"),),
        "vllm#39444: a padded token keeps slot 0",
        "I4",
        Smallest(tokens=0),
    ),
    Mutant(
        "padding_keeps_a_stale_slot",
        TORCH,
        (("torch.full_like(positions, -1, dtype=torch.int64)", "torch.empty_like(positions, dtype=torch.int64)"),),
        "vllm#36580, vllm#37728: what is padded keeps the slot of the step before",
        "I4",
        Smallest(tokens=0),
    ),
    Mutant(
        "padding_mapped_like_a_token",
        TORCH,
        (
            (
                "(positions >= 0).nonzero().squeeze(1)",
                "(positions == positions).nonzero().squeeze(1)",
            ),
        ),
        "vllm#53982: a negative position reads the end of the row, or of the row before",
        "I4",
        Smallest(tokens=0),
        also=("I0", "I2"),
    ),
    Mutant(
        "only_position_minus_one_is_padding",
        TORCH,
        (("(positions >= 0).nonzero()", "(positions != -1).nonzero()"),),
        "vllm#35431: any negative position is padding",
        "I0",
        Smallest(tokens=0),
        also=("I2", "I4"),
    ),
    Mutant(
        "position_masked_by_block_size",
        TORCH,
        (("position % block_size", "(position & (block_size - 1))"),),
        "vllm#41363, vllm#31380: a mask for a block size that is no power of two",
        "I4",
        Smallest(tokens=2, block_size=3),
    ),
    Mutant(
        "block_size_of_another_group",
        TORCH,
        (("block * block_size + position", "block * 16 + position"),),
        "vllm#31540: the slot mapping uses another group's block size",
        "I4",
        Smallest(tokens=2),
        also=("I9",),
    ),
    Mutant(
        "seq_ids_counted",
        TORCH,
        (("seq_ids[tokens].long()", "seq_ids[tokens].unique(return_inverse=True)[1]"),),
        "attention-gym#189: right as long as the batch holds the sequences 0 to n",
        "I2",
        Smallest(sequences=2),
        also=(
            "I4",
            "I9",
        ),
    ),
    Mutant(
        "page_boundary_off_by_one",
        TORCH,
        (("position // block_size]", "(position - (position > 0).long()) // block_size]"),),
        "nano-vllm#207: the first token of a page is looked up in the page before",
        "I4",
        Smallest(tokens=2),
        also=("I9",),
    ),
    Mutant(
        "table_sorted",
        TORCH,
        (("block_tables[seq_ids", "block_tables.sort(dim=1).values[seq_ids"),),
        "seeds: the order of the table is the order of the tokens; it is not sorted",
        "I2",
        Smallest(tokens=3),
        also=("I4", "I9"),
    ),
    Mutant(
        "table_width_for_its_stride",
        TORCH,
        (
            (
                "block_tables[seq_ids[tokens].long(), position // block_size].long()",
                "block_tables.as_strided((len(block_tables) * sizes['M'],), (1,))"
                "[seq_ids[tokens].long() * sizes['M'] + position // block_size].long()",
            ),
        ),
        "vllm#55109: a narrowed view of a wide table",
        "I4",
        Smallest(sequences=2, other=("table_padding",)),
        also=("I2", "I9"),
    ),
    Mutant(
        "block_id_in_16_bits",
        TORCH,
        (("position // block_size].long()", "position // block_size].to(torch.int16).long()"),),
        "tpu-inference#2756: 16-bit arithmetic; wrong only above some block id",
        "I9",
        Smallest(far=True),
        also=("I4",),
    ),
    Mutant(
        "tiled_int32_slots",
        TILED,
        (
            ("mask=real, other=0).to(tl.int64)\n    slot", "mask=real, other=0).to(tl.int32)\n    slot"),
            (
                "slot = block * BLOCK_SIZE + position % BLOCK_SIZE",
                "slot = block * BLOCK_SIZE + (position % BLOCK_SIZE).to(tl.int32)",
            ),
        ),
        "vllm#1514: the slot itself in int32",
        "I9",
        Smallest(far=True),
    ),
    Mutant(
        "tiled_padding_loads_its_entry",
        TILED,
        (("tl.load(entry_ptr, mask=real, other=0)", "tl.load(entry_ptr, mask=inside, other=0)"),),
        "vllm#53982: padding is masked out of the result, not out of the load",
        "I2",
        Smallest(tokens=0),
    ),
    Mutant(
        "tiled_next_entry_loaded",
        TILED,
        (
            (
                "    slot = block",
                "    ahead = tl.load(entry_ptr + 1, mask=real, other=0)\n"
                "    block = tl.where(real, block, ahead)\n"
                "    slot = block",
            ),
        ),
        "vllm#53982, FlagGems#922: the next entry is fetched too, and masked",
        "I2",
        Smallest(),
    ),
    Mutant(
        "tiled_remainder_lost",
        TILED,
        (("slot_mapping_kernel[(triton.cdiv(tokens, TILE),)]", "slot_mapping_kernel[(max(tokens // TILE, 1),)]"),),
        "FlagGems#943: what is left over after whole tiles is never mapped",
        "I4",
        Smallest(sequences=2, new_tokens=5),
    ),
    Mutant(
        "tiled_table_width_for_its_stride",
        TILED,
        (("block_tables.stride(0)", "block_tables.shape[1]"),),
        "vllm#55109: a narrowed view of a wide table",
        "I2",
        Smallest(sequences=2, other=("table_padding",)),
        also=("I9", "I4"),
    ),
    Mutant(
        "tiled_tokens_unmasked",
        TILED,
        (
            (
                "tl.store(slots_ptr + token, tl.where(real, slot, -1), mask=inside)",
                "tl.store(slots_ptr + token, tl.where(real, slot, -1))",
            ),
        ),
        "vllm#53982: the last tile stores past the end of the slots",
        "I6",
        Smallest(),
        also=("I0", "I13"),
    ),
    Mutant(
        "tiled_length_read_as_int32",
        TILED,
        (
            (
                "            positions,\n            tokens,",
                "            positions.view(torch.int32),\n            tokens,",
            ),
        ),
        "flashinfer#697, flashinfer#2255: int64 numbers read as int32",
        "I14",
        Smallest(tokens=2, new_tokens=2),
        also=("I9", "I2"),
    ),
)
