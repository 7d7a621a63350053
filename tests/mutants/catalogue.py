"""The mutants. Each dies in the quick profile by the invariant that it names."""

from __future__ import annotations

from typing import Any

from pagefuzz.tests.mutants.mutant import Mutant


def one_token(case: Any) -> bool:
    """One token, one head, one dim, in the first block of a pool."""
    return len(case.slots) == 1 and case.num_kv_heads == case.head_dim == case.block_size == 1 and not case.extra_rows


def one_sequence(case: Any, tokens: int = 1, heads: int = 1, block_size: int = 1) -> bool:
    """One sequence of so many tokens, so many query heads on one kv head or one on each, one dim."""
    return (
        case.context_lens == (tokens,)
        and case.num_heads <= heads
        and case.head_dim == 1
        and case.block_size <= block_size
        and case.width <= len(case.sequences[0].blocks) + 1
        and (case.dtype, case.q_padding, case.table_padding) == ("float32", 0, 0)
    )


WRITES = (
    Mutant(
        "torch_padding_not_skipped",
        "torch_reshape_and_cache",
        (("(slot_mapping >= 0).nonzero().squeeze(1)", 'torch.arange(sizes["T"], device=slot_mapping.device)'),),
        "seeds: slot -1 is the last slot of the pool; flashinfer#2792",
        "I1",
        lambda case: one_token(case) and case.slots == (-1,),
    ),
    Mutant(
        "triton_padding_not_skipped",
        "triton_reshape_and_cache",
        (("tl.where(slot >= 0, SIZE, 0)", "SIZE"),),
        "seeds: slot -1 lies before the start of the cache",
        "I1",
        lambda case: one_token(case) and case.slots == (-1,),
    ),
    Mutant(
        "int32_slot_product",
        "triton_reshape_and_cache",
        (("tl.load(slot_mapping_ptr + token).to(tl.int64)", "tl.load(slot_mapping_ptr + token).to(tl.int32)"),),
        "vllm#1514, lightllm#907",
        "I9",
        lambda case: len(case.slots) == 1 and case.is_far() and not (case.extra_rows or case.fused),
    ),
    Mutant(
        "sign_of_zero_lost",
        "torch_reshape_and_cache",
        (("k_cache[blocks, offsets] = key[tokens]", "k_cache[blocks, offsets] = key[tokens] + 0"),),
        "a copy through arithmetic",
        "I6",
        lambda case: one_token(case) and case.slots == (0,),
    ),
    Mutant(
        "tokens_and_slots_out_of_step",
        "torch_reshape_and_cache",
        (("slots = slot_mapping[tokens].long()", "slots = slot_mapping[tokens.flip(0)].long()"),),
        "vllm#31540: tokens and slots out of step",
        "I6",
        lambda case: len(case.slots) == 2 and case.num_kv_heads == case.head_dim == 1,
    ),
    Mutant(
        "empty_batch_launches",
        "triton_reshape_and_cache",
        (
            (
                '    if sizes["T\'"] < sizes["T"]:',
                '    if sizes["T"] == 0:\n        raise ValueError(\'T\')\n    if sizes["T\'"] < sizes["T"]:',
            ),
        ),
        "flashinfer#353: nothing to do is an error",
        "I13",
        lambda case: case.slots == () and case.num_kv_heads == case.head_dim == 1,
    ),
    Mutant(
        "shapes_not_compared",
        "torch_reshape_and_cache",
        (
            ("            if size != sizes.setdefault(dim, size):", "            if sizes.setdefault(dim, size) < 0:"),
            ('    if sizes["T\'"] < sizes["T"]:', '    if sizes["T\'"] < 0:'),
        ),
        "flashinfer#320, flashinfer#4044",
        "I16",
        lambda case: len(case.slots) <= 2 and case.num_kv_heads == 1,
    ),
    Mutant(
        "token_written_by_two_programs",
        "triton_reshape_and_cache",
        (('reshape_and_cache_kernel[(sizes["T"],)](', 'reshape_and_cache_kernel[(sizes["T"], 2)]('),),
        "a grid of more programs than there is work for: the right token, written twice",
        "I17",
        lambda case: one_token(case) and case.slots == (0,) and case.order == 0,
    ),
    Mutant(
        "key_put_back",
        "triton_reshape_and_cache",
        (
            (
                "    k = tl.load(key_ptr + token * key_stride + offs, mask=mask)\n",
                "    k = tl.load(key_ptr + token * key_stride + offs, mask=mask)\n"
                "    tl.store(key_ptr + token * key_stride + offs, k, mask=mask)\n",
            ),
        ),
        "a store to an input, of the bits that lie there, which races with whoever reads it",
        "I6",
        lambda case: one_token(case) and case.slots == (0,),
    ),
    Mutant(
        "head_stride_ignored",
        "triton_reshape_and_cache",
        (
            ("head * k_head_stride + dim", "offs"),
            ("head * v_head_stride + dim", "offs"),
        ),
        "contiguous inside a slot is taken for granted: right until a cache is a view of [N, KVH, bs, D]",
        "I10",
        lambda case: len(case.slots) == 1 and case.num_kv_heads == 2 and case.head_dim == 1,
    ),
)
SLOTS = (
    Mutant(
        "position_taken_as_batch_index",
        "torch_slot_mapping",
        (("position = positions[tokens].long()", "position = tokens"),),
        "seeds: a position counts within its own sequence",
        "I4",
        lambda case: len(case.tokens) <= 2 and len(case.sequences) == 1 and case.sequences[0].context_len <= 2,
    ),
    Mutant(
        "int32_slots",
        "torch_slot_mapping",
        (
            (
                "block * block_size + position % block_size",
                "(block.int() * block_size + position.int() % block_size).long()",
            ),
        ),
        "vllm#1514: slot_mapping itself in int32",
        "I9",
        lambda case: len(case.tokens) == 1 and case.is_far(),
    ),
)
DECODES = (
    Mutant(
        "torch_last_partial_page_dropped",
        "torch_paged_decode_attention",
        ((": -(-n // block_size)].long()", ": n // block_size].long()"),),
        "seeds: n // bs in place of ceil(n / bs)",
        "I3",
        lambda case: one_sequence(case, block_size=2),
    ),
    Mutant(
        "triton_last_partial_page_dropped",
        "triton_paged_decode_attention",
        (("live = pos < n", "live = pos < n // BLOCK_SIZE * BLOCK_SIZE"),),
        "seeds: n // bs in place of ceil(n / bs)",
        "I3",
        lambda case: one_sequence(case, block_size=2),
    ),
    Mutant(
        "whole_table_row_read",
        "torch_paged_decode_attention",
        (("block_tables[b, : -(-n // block_size)].long()", "block_tables[b].long()"),),
        "seeds: IndexError, or somebody else's page; vllm#42494",
        "I2",
        lambda case: one_sequence(case) and len(case.sequences[0].tail) == 1,
    ),
    Mutant(
        "table_load_unmasked",
        "triton_paged_decode_attention",
        (("pos // BLOCK_SIZE, mask=live, other=0).to(tl.int64)", "pos // BLOCK_SIZE).to(tl.int64)"),),
        "FlagGems#922, vllm#12848: reads past the row",
        "I2",
        lambda case: one_sequence(case),
    ),
    Mutant(
        "last_page_not_cut",
        "torch_paged_decode_attention",
        ((".flatten(0, 1)[:n].float()", ".flatten(0, 1).float()"),),
        "seeds: a row of zeros still weighs exp(0)",
        "I3",
        lambda case: one_sequence(case, block_size=2),
        times=2,
    ),
    Mutant(
        "heads_repeated_in_turn",
        "torch_paged_decode_attention",
        ((".repeat_interleave(group, dim=1)", ".repeat(1, group, 1)"),),
        "seeds: repeat in place of repeat_interleave",
        "I5",
        lambda case: one_sequence(case, tokens=case.context_lens[0], heads=4) and case.context_lens[0] <= 2,
        times=2,
    ),
    Mutant(
        "softmax_in_bfloat16",
        "torch_paged_decode_attention",
        (
            (
                'torch.softmax(torch.einsum("hd,nhd->hn", query, k) * scale, dim=1)',
                'torch.softmax((torch.einsum("hd,nhd->hn", query, k) * scale).bfloat16(), dim=1).float()',
            ),
        ),
        "seeds: 1e-2 away from float32",
        "I4",
        lambda case: one_sequence(case, tokens=case.context_lens[0], block_size=2) and case.context_lens[0] <= 3,
    ),
    Mutant(
        "tail_weighs_zero",
        "torch_paged_decode_attention",
        (
            (
                "k = k_cache[pages].flatten(0, 1)[:n].float().repeat_interleave(group, dim=1)",
                "k = k_cache[pages].flatten(0, 1).float().repeat_interleave(group, dim=1)\n        k[n:] = 0",
            ),
            (
                "v = v_cache[pages].flatten(0, 1)[:n].float().repeat_interleave(group, dim=1)",
                "v = v_cache[pages].flatten(0, 1).float().repeat_interleave(group, dim=1)",
            ),
            (
                'torch.softmax(torch.einsum("hd,nhd->hn", query, k) * scale, dim=1)',
                'torch.softmax((torch.einsum("hd,nhd->hn", query, k) * scale).masked_fill('
                'torch.arange(len(k)) >= n, float("-inf")), dim=1)',
            ),
        ),
        "vllm#641, flashinfer#941, jax 11cf85deb0: NaN * 0",
        "I8",
        lambda case: one_sequence(case, block_size=2),
    ),
    Mutant(
        "torch_one_page_too_many",
        "torch_paged_decode_attention",
        (
            (
                "block_tables[b, : -(-n // block_size)].long()",
                "block_tables[b, : -(-n // block_size) + 1].long().clamp(0, sizes['N'] - 1)",
            ),
        ),
        "vllm#42494: stale entries are dereferenced, the result is masked",
        "I2",
        lambda case: one_sequence(case) and len(case.sequences[0].tail) == 1,
    ),
    Mutant(
        "triton_one_page_too_many",
        "triton_paged_decode_attention",
        (("pos // BLOCK_SIZE, mask=live, other=0)", "pos // BLOCK_SIZE, mask=pos < n + BLOCK_SIZE, other=0)"),),
        "FlagGems#922: one entry past the row",
        "I2",
        lambda case: one_sequence(case),
    ),
    Mutant(
        "empty_row_unwritten",
        "triton_paged_decode_attention",
        (
            (
                "    n = tl.load(context_lens_ptr + b)\n",
                "    n = tl.load(context_lens_ptr + b)\n    if n == 0:\n        return\n",
            ),
        ),
        "vllm#37442: the output of empty rows stays unwritten",
        "I13",
        lambda case: case.context_lens == (0,) and case.num_heads == case.head_dim == 1,
    ),
    Mutant(
        "rescale_lost",
        "triton_paged_decode_attention",
        (("acc * rescale[:, None], input_precision", "acc, input_precision"),),
        "wrong only from the second step of the online softmax on",
        "I4",
        lambda case: len(case.sequences) == 1 and case.context_lens[0] <= 80,  # the kernel takes 64 keys a step
    ),
    Mutant(
        "block_id_breaks_ties",
        "torch_paged_decode_attention",
        (
            (
                "v_cache[pages]",
                "(v_cache[pages] * (1 + (pages[:1] > pages[-1:]) * 2.0**-12).view(1, 1, 1, 1))",
            ),
        ),
        "attention-gym#189: a physical id takes part in the arithmetic",
        "I7",
        lambda case: len(case.sequences) == 1 and case.head_dim == 1,
    ),
    Mutant(
        "kv_head_of_the_group",
        "triton_paged_decode_attention",
        (
            ("kv_head * K_HEAD_STRIDE", "(kv_head * GROUP % KVH) * K_HEAD_STRIDE"),
            ("kv_head * V_HEAD_STRIDE", "(kv_head * GROUP % KVH) * V_HEAD_STRIDE"),
        ),
        "flashinfer#2380: the kv head computed twice",
        "I5",
        lambda case: len(case.sequences) == 1 and case.head_dim == 1 and case.num_heads <= 4,
    ),
    Mutant(
        "strides_of_keys_for_values",
        "triton_paged_decode_attention",
        (("block * V_BLOCK_STRIDE + place * V_SLOT_STRIDE", "block * K_BLOCK_STRIDE + place * K_SLOT_STRIDE"),),
        "one set of strides for two caches: right until they lie differently",
        "I10",
        lambda case: len(case.sequences) == 1 and case.num_heads == case.head_dim == 1,
    ),
    Mutant(
        "counts_its_calls",
        "torch_paged_decode_attention",
        (
            ("    block_size, group = ", "    CALLS.append(1)\n    block_size, group = "),
            ("FLOATS = (", "CALLS: list[int] = []\nFLOATS = ("),
            ("* scale, dim=1)", "* scale * (1 + 2.0**-18 * (len(CALLS) % 61)), dim=1)"),
        ),
        "flashinfer#1912: state that survives a call",
        "I17",
        lambda case: len(case.sequences) == 1,
    ),
    Mutant(
        "output_written_by_two_programs",
        "triton_paged_decode_attention",
        (('[(sizes["B"], sizes["KVH"])](', '[(sizes["B"], sizes["KVH"], 2)]('),),
        "a grid of more programs than there is work for: the right output, written twice",
        "I17",
        lambda case: case.context_lens in ((0,), (1,)) and case.num_heads == case.head_dim == 1,
    ),
    Mutant(
        "length_left_by_another_program",
        "triton_paged_decode_attention",
        (
            ("    out_ptr,\n    q_ptr,\n", "    out_ptr,\n    n_ptr,\n    q_ptr,\n"),
            ("        out,\n        q,\n", "        out,\n        torch.zeros_like(context_lens),\n        q,\n"),
            (
                "    n = tl.load(context_lens_ptr + b)\n",
                "    if kv_head == 0:\n        tl.store(n_ptr + b, tl.load(context_lens_ptr + b))\n"
                "    n = tl.load(n_ptr + b)\n",
            ),
        ),
        "one program prepares what all others of its sequence read, and nothing makes them wait",
        "I17",
        lambda case: case.context_lens in ((0,), (1,)) and case.num_heads == 2 and case.head_dim == 1,
    ),
    Mutant(
        "number_drawn_in_turn",
        "triton_paged_decode_attention",
        (
            ("    out_ptr,\n    q_ptr,\n", "    out_ptr,\n    turn_ptr,\n    q_ptr,\n"),
            ("        out,\n        q,\n", "        out,\n        torch.zeros_like(context_lens[:1]),\n        q,\n"),
            (
                "other=0.0).to(tl.float32) * scale",
                "other=0.0).to(tl.float32) * (scale * (1 + 2.0**-18 * tl.atomic_add(turn_ptr, 1)))",
            ),
        ),
        "what an atomic counter hands out depends on who comes first, and reaches the result",
        "I17",
        lambda case: len(case.sequences) * case.num_kv_heads == 2 and case.group_size == case.head_dim == 1,
    ),
    Mutant(
        "bfloat16_refused",
        "torch_paged_decode_attention",
        (("FLOATS = (torch.float32, torch.float16, torch.bfloat16)", "FLOATS = (torch.float32, torch.float16)"),),
        "vllm#6373: a dtype that is declared and not there",
        "I0",
        lambda case: case.dtype == "bfloat16" and case.context_lens in ((), (0,)),
    ),
)
MUTANTS = (*WRITES, *SLOTS, *DECODES)
