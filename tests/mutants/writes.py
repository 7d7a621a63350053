"""Mutants of reshape_and_cache."""

from __future__ import annotations

from dataclasses import replace

from pagefuzz.kernels.registry import CACHE_LAYOUTS
from pagefuzz.tests.mutants.mutant import Mutant
from pagefuzz.tests.mutants.smallest import Smallest

TORCH, TRITON = "torch_reshape_and_cache", "triton_reshape_and_cache"

PLANTED = (
    Mutant(
        "slot_zero_taken_as_padding",
        TRITON,
        (("tl.where(slot >= 0, SIZE, 0)", "tl.where(slot > 0, SIZE, 0)"),),
        "vllm#35431: 0 and -1 both stand for padding somewhere",
        "I6",
        Smallest(),
    ),
    Mutant(
        "only_minus_one_is_padding",
        TRITON,
        (("tl.where(slot >= 0, SIZE, 0)", "tl.where(slot != -1, SIZE, 0)"),),
        "vllm#35431, seeds: any negative slot is padding",
        "I1",
        Smallest(),
    ),
    Mutant(
        "negative_slots_clamped",
        TORCH,
        (
            ("(slot_mapping >= 0).nonzero().squeeze(1)", 'torch.arange(sizes["T"], device=slot_mapping.device)'),
            ("slots = slot_mapping[tokens].long()", "slots = slot_mapping[tokens].long().clamp(min=0)"),
        ),
        "vllm#39444: what is padded lands in slot 0",
        "I1",
        Smallest(),
    ),
    Mutant(
        "grid_of_padded_rows",
        TRITON,
        (('reshape_and_cache_kernel[(sizes["T"],)](', 'reshape_and_cache_kernel[(sizes["T\'"],)]('),),
        "vllm#13922: key.size(0) in place of slot_mapping.size(0)",
        "I0",
        Smallest(other=("extra_rows",)),
    ),
    Mutant(
        "last_rows_of_key",
        TORCH,
        (("key[tokens]", "key[len(key) - len(slot_mapping) :][tokens]"),),
        "vllm#21228: the rows that count are taken from the wrong end",
        "I6",
        Smallest(tokens=2, other=("extra_rows",)),
        also=("I1",),
    ),
    Mutant(
        "value_read_by_stride_of_key",
        TRITON,
        (("value_ptr + token * value_stride", "value_ptr + token * key_stride"),),
        "flashinfer#4044: one stride for two tensors",
        "I10",
        Smallest(tokens=2, other=("key_padding", "value_padding")),
    ),
    Mutant(
        "row_stride_of_key_ignored",
        TRITON,
        (("key_ptr + token * key_stride", "key_ptr + token * SIZE"),),
        "flashinfer#527: contiguous is taken for granted, so a view of a fused QKV projection is read askew",
        "I10",
        Smallest(tokens=2, other=("key_padding", "fused")),
    ),
    Mutant(
        "size_rounded_down_to_a_power_of_two",
        TRITON,
        (("PADDED_SIZE=triton.next_power_of_2(size)", "PADDED_SIZE=1 << (size.bit_length() - 1)"),),
        "vllm#4127: H * D is taken for a power of two, and the last head is cut where it is none",
        "I6",
        Smallest(kv_heads=3, head_dim=3),
    ),
    Mutant(
        "token_of_more_than_512_values",
        TRITON,
        (("PADDED_SIZE=triton.next_power_of_2(size)", "PADDED_SIZE=min(512, triton.next_power_of_2(size))"),),
        "vllm#18100: a block of threads for a token, and no loop over what is left",
        "I6",
        Smallest(kv_heads=8, head_dim=128),
    ),
    Mutant(
        "eight_values_at_a_time",
        TRITON,
        (("tl.where(slot >= 0, SIZE, 0)", "tl.where(slot >= 0, SIZE // 8 * 8, 0)"),),
        "vllm#6373: a vector of x = 8 values is hard-coded",
        "I6",
        Smallest(),
    ),
    Mutant(
        "vectors_past_the_token",
        TRITON,
        (
            (
                "dim, k, mask=mask)",
                "dim, k, mask=offs < tl.where(slot >= 0, (SIZE + 3) // 4 * 4, 0))",
            ),
        ),
        "FlagGems#943: the last vector store reaches into the next slot",
        "I6",
        Smallest(tokens=2, kv_heads=3, head_dim=3, block_size=3),
        also=("I17",),
    ),
    Mutant(
        "keys_into_the_value_cache",
        TRITON,
        (
            (
                "tl.store(v_slot_ptr + head * v_head_stride + dim, v,",
                "tl.store(v_slot_ptr + head * v_head_stride + dim, k,",
            ),
        ),
        "a copied line",
        "I6",
        Smallest(),
    ),
    Mutant(
        "values_in_slot_order_of_keys",
        TORCH,
        (("v_cache[blocks, offsets] = value[tokens]", "v_cache[blocks.sort().values, offsets] = value[tokens]"),),
        "flashinfer#588: one index for another, right while blocks come in ascending order",
        "I6",
        Smallest(tokens=2),
        also=("I10",),
    ),
    Mutant(
        "written_into_a_copy",
        TORCH,
        (
            (
                "k_cache[blocks, offsets] = key[tokens]",
                "k_cache[blocks][torch.arange(len(blocks), device=blocks.device), offsets] = key[tokens]",
            ),
        ),
        "seeds: k_cache[blk][off] copies first, so the cache stays as it was",
        "I6",
        Smallest(),
    ),
    Mutant(
        "int32_block_product_of_values",
        TRITON,
        (("block * v_block_stride", "block.to(tl.int32) * v_block_stride"),),
        "vllm#1514, vllm-xpu-kernels#445: int32 block times stride, in one of the two caches",
        "I9",
        Smallest(far=True, other=("layouts",)),
    ),
    Mutant(
        "nan_payload_lost",
        TORCH,
        (
            (
                "v_cache[blocks, offsets] = value[tokens]",
                "v_cache[blocks, offsets] = value[tokens].nan_to_num(torch.nan, torch.inf, -torch.inf)",
            ),
        ),
        "a copy that looks at its numbers: all NaNs become one",
        "I6",
        Smallest(other=("values",)),
    ),
    Mutant(
        "copied_through_float32",
        TORCH,
        (("= key[tokens]", "= (key[tokens].float() * 1.0).to(key.dtype)"),),
        "vllm#45361: a copy that converts; it quietens the NaNs of half precision only",
        "I6",
        Smallest(other=("values", "dtype")),
    ),
    Mutant(
        "subnormals_flushed",
        TORCH,
        (
            (
                "= key[tokens]",
                "= torch.where(key[tokens].abs() < torch.finfo(key.dtype).tiny, 0 * key[tokens], key[tokens])",
            ),
        ),
        "a copy on a unit that flushes subnormal numbers to zero",
        "I6",
        Smallest(tokens=2, kv_heads=8, head_dim=8, other=("values", "dtype")),
    ),
    Mutant(
        "fresh_page_cleared",
        TORCH,
        (
            (
                "    k_cache[blocks, offsets] = key[tokens]\n",
                "    k_cache[blocks[offsets == 0], 1:] = 0\n    k_cache[blocks, offsets] = key[tokens]\n",
            ),
        ),
        "vllm#43990, lmdeploy#4613: the rest of a page is cleared with its first token, by whom nobody asked",
        "I6",
        Smallest(block_size=2),
    ),
    Mutant(
        "wrong_block_cleared",
        TRITON,
        (
            (
                "    k = tl.load(key_ptr",
                "    tl.store(k_cache_ptr + block * BLOCK_SIZE, 0.0, mask=(place == 0) & (slot > 0))\n"
                "    k = tl.load(key_ptr",
            ),
        ),
        "vllm#50276: the page size is taken as the stride of a block, and somebody else's block is zeroed",
        "I6",
        Smallest(tokens=2, head_dim=2),
        also=("I17",),
    ),
    Mutant(
        "heads_and_dims_swapped",
        TRITON,
        (("head * k_head_stride + dim", "dim * (SIZE // D) + head"),),
        "vllm#47314: a cache viewed with the dims in another order",
        "I6",
        Smallest(kv_heads=2, head_dim=2),
        also=("I10", "I17"),
    ),
    Mutant(
        "block_size_rounded_up",
        TRITON,
        (
            (
                "block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE",
                "block, place = slot // triton.next_power_of_2(BLOCK_SIZE), slot % triton.next_power_of_2(BLOCK_SIZE)",
            ),
        ),
        "vllm#41363, vllm#31380: a shift and a mask for a block size of 544",
        "I6",
        Smallest(block_size=3),
        also=("I17", "I9"),
    ),
    Mutant(
        "four_tokens_at_a_time",
        TORCH,
        (
            (
                "    if tokens.numel() == 0:\n",
                "    tokens = tokens[: len(tokens) // 4 * 4 or None]\n    if tokens.numel() == 0:\n",
            ),
        ),
        "FlagGems#943: what is left over after whole tiles is never written",
        "I6",
        Smallest(tokens=17),
    ),
    Mutant(
        "sixteen_tokens_at_a_time",
        TRITON,
        (
            (
                'reshape_and_cache_kernel[(sizes["T"],)](',
                'reshape_and_cache_kernel[(sizes["T"] // 16 * 16 or sizes["T"],)](',
            ),
        ),
        "FlagGems#943: what is left over after whole tiles of 16 is never written",
        "I6",
        Smallest(tokens=17),
    ),
    Mutant(
        "previous_token_written_again",
        TRITON,
        (
            (
                "    v = tl.load(value_ptr",
                "    before = tl.load(slot_mapping_ptr + tl.maximum(token - 1, 0)).to(tl.int64)\n"
                "    again = tl.load(key_ptr + tl.maximum(token - 1, 0) * key_stride + offs, mask=mask)\n"
                "    tl.store(k_cache_ptr + before // BLOCK_SIZE * k_block_stride + before % BLOCK_SIZE * k_slot_stride"
                " + head * k_head_stride + dim, again, mask=offs < tl.where(before >= 0, SIZE, 0))\n"
                "    v = tl.load(value_ptr",
            ),
        ),
        "a tile that overlaps with the next program's: the right token, written twice",
        "I17",
        Smallest(tokens=2),
        also=("I6",),
    ),
)
# They declare what the good kernels do.
WRITES = tuple(replace(mutant, declares={"cache_layouts": CACHE_LAYOUTS}) for mutant in PLANTED)
