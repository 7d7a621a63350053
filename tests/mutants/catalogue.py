"""The mutants. Each dies in the quick profile by the invariant that it names."""

from __future__ import annotations

from pagefuzz.tests.mutants import decodes, others, slots, writes
from pagefuzz.tests.mutants.mutant import Mutant
from pagefuzz.tests.mutants.smallest import Smallest

HND, PACKED, STRIDED = ({"cache_layouts": ("contiguous", kind)} for kind in ("hnd", "packed", "strided"))

WRITES = (
    Mutant(
        "torch_padding_not_skipped",
        "torch_reshape_and_cache",
        (("(slot_mapping >= 0).nonzero().squeeze(1)", 'torch.arange(sizes["T"], device=slot_mapping.device)'),),
        "seeds: slot -1 is the last slot of the pool; flashinfer#2792",
        "I1",
        Smallest(),
    ),
    Mutant(
        "triton_padding_not_skipped",
        "triton_reshape_and_cache",
        (("tl.where(slot >= 0, SIZE, 0)", "SIZE"),),
        "seeds: slot -1 lies before the start of the cache",
        "I1",
        Smallest(),
    ),
    Mutant(
        "int32_slot_product",
        "triton_reshape_and_cache",
        (("tl.load(slot_mapping_ptr + token).to(tl.int64)", "tl.load(slot_mapping_ptr + token).to(tl.int32)"),),
        "vllm#1514, lightllm#907",
        "I9",
        Smallest(far=True),
    ),
    Mutant(
        "sign_of_zero_lost",
        "torch_reshape_and_cache",
        (("k_cache[blocks, offsets] = key[tokens]", "k_cache[blocks, offsets] = key[tokens] + 0"),),
        "a copy through arithmetic",
        "I6",
        Smallest(other=("values",)),
    ),
    Mutant(
        "tokens_and_slots_out_of_step",
        "torch_reshape_and_cache",
        (("slots = slot_mapping[tokens].long()", "slots = slot_mapping[tokens.flip(0)].long()"),),
        "vllm#31540: tokens and slots out of step",
        "I6",
        Smallest(tokens=2),
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
        Smallest(tokens=0),
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
        Smallest(),
    ),
    Mutant(
        "token_written_by_two_programs",
        "triton_reshape_and_cache",
        (('reshape_and_cache_kernel[(sizes["T"],)](', 'reshape_and_cache_kernel[(sizes["T"], 2)]('),),
        "a grid of more programs than there is work for: the right token, written twice",
        "I17",
        Smallest(),
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
        Smallest(),
    ),
    Mutant(
        "written_into_a_contiguous_copy",
        "torch_reshape_and_cache",
        (
            (
                "    v_cache[blocks, offsets] = value[tokens]\n",
                "    for block, offset, token in zip(blocks, offsets, tokens):\n"
                "        v_cache[block, offset].contiguous().copy_(value[token])\n",
            ),
        ),
        "flashinfer#527: contiguous() is a view of one layout and a copy of another",
        "I10",
        Smallest(kv_heads=2, block_size=2, other=("layouts",)),
        declares=HND,
    ),
    Mutant(
        "slots_read_as_int32",
        "torch_reshape_and_cache",
        (("slot_mapping[tokens].long()", "slot_mapping.view(torch.int32)[tokens].long()"),),
        "flashinfer#697: int64 accepted, then read as int32",
        "I14",
        Smallest(tokens=2),
    ),
    Mutant(
        "strided_heads_of_the_source_accepted",
        "triton_reshape_and_cache",
        (
            (
                'if contiguous == "rows" and tensor.numel() and not tensor[0].is_contiguous():',
                'if contiguous == "rows" and not tensor.numel() and tensor.stride(-1) > 1:',
            ),
        ),
        "flashinfer#4044: strides of a source are neither used nor looked at",
        "I16",
        Smallest(kv_heads=2, head_dim=2),
    ),
    Mutant(
        "slots_with_a_stride_accepted",
        "triton_reshape_and_cache",
        (('if contiguous == "whole" and not tensor', 'if contiguous == "all" and not tensor'),),
        "flashinfer#4044: the same of an index tensor",
        "I16",
        Smallest(tokens=2),
    ),
    Mutant(
        "cache_layout_taken_for_granted",
        "triton_reshape_and_cache",
        (
            ("        *k_cache.stride()[:3],", "        *(sizes['bs'] * size, size, sizes['D']),"),
            ("        *v_cache.stride()[:3],", "        *(sizes['bs'] * size, size, sizes['D']),"),
        ),
        "flashinfer#527, FlagGems#3410: a layout that is not supported is not refused either",
        "I16",
        Smallest(),
    ),
    Mutant(
        "head_stride_ignored",
        "triton_reshape_and_cache",
        (
            ("head * k_head_stride + dim", "offs"),
            ("head * v_head_stride + dim", "offs"),
        ),
        "flashinfer#527: contiguous inside a slot is taken for granted: right until a cache has its heads outside",
        "I10",
        Smallest(kv_heads=2, block_size=2, other=("layouts",)),
        declares=HND,
    ),
)
SLOTS = (
    Mutant(
        "position_taken_as_batch_index",
        "torch_slot_mapping",
        (("position = positions[tokens].long()", "position = tokens"),),
        "seeds: a position counts within its own sequence",
        "I4",
        Smallest(tokens=2),
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
        Smallest(far=True),
    ),
    Mutant(
        "table_read_as_int32",
        "torch_slot_mapping",
        (("block_tables[", "block_tables.view(torch.int32)["),),
        "flashinfer#697: int64 accepted, then read as int32",
        "I14",
        Smallest(tokens=2),
    ),
)
DECODES = (
    Mutant(
        "torch_last_partial_page_dropped",
        "torch_paged_decode_attention",
        ((": -(-n // block_size)].long()", ": n // block_size].long()"),),
        "seeds: n // bs in place of ceil(n / bs)",
        "I3",
        Smallest(block_size=2),
    ),
    Mutant(
        "triton_last_partial_page_dropped",
        "triton_paged_decode_attention",
        (("live = pos < n", "live = pos < n // BLOCK_SIZE * BLOCK_SIZE"),),
        "seeds: n // bs in place of ceil(n / bs)",
        "I3",
        Smallest(block_size=2),
    ),
    Mutant(
        "whole_table_row_read",
        "torch_paged_decode_attention",
        (("block_tables[b, : -(-n // block_size)].long()", "block_tables[b].long()"),),
        "seeds: IndexError, or somebody else's page; vllm#42494",
        "I2",
        Smallest(),
    ),
    Mutant(
        "table_load_unmasked",
        "triton_paged_decode_attention",
        (("pos // BLOCK_SIZE, mask=live, other=0).to(tl.int64)", "pos // BLOCK_SIZE).to(tl.int64)"),),
        "FlagGems#922, vllm#12848: reads past the row",
        "I2",
        Smallest(),
    ),
    Mutant(
        "last_page_not_cut",
        "torch_paged_decode_attention",
        ((".flatten(0, 1)[:n].float()", ".flatten(0, 1).float()"),),
        "seeds: a row of zeros still weighs exp(0)",
        "I3",
        Smallest(block_size=2),
        times=2,
    ),
    Mutant(
        "heads_repeated_in_turn",
        "torch_paged_decode_attention",
        ((".repeat_interleave(group, dim=1)", ".repeat(1, group, 1)"),),
        "seeds: repeat in place of repeat_interleave",
        "I5",
        Smallest(heads=4, kv_heads=2),
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
        Smallest(tokens=2),
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
                'torch.arange(len(k), device=q.device) >= n, float("-inf")), dim=1)',
            ),
        ),
        "vllm#641, flashinfer#941, jax 11cf85deb0: NaN * 0",
        "I8",
        Smallest(block_size=2),
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
        Smallest(),
    ),
    Mutant(
        "triton_one_page_too_many",
        "triton_paged_decode_attention",
        (("pos // BLOCK_SIZE, mask=live, other=0)", "pos // BLOCK_SIZE, mask=pos < n + BLOCK_SIZE, other=0)"),),
        "FlagGems#922: one entry past the row",
        "I2",
        Smallest(),
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
        Smallest(tokens=0),
    ),
    Mutant(
        "rescale_lost",
        "triton_paged_decode_attention",
        (("acc * rescale[:, None], input_precision", "acc, input_precision"),),
        "wrong only from the second step of the online softmax on",
        "I4",
        Smallest(tokens=68, heads=5, head_dim=128, other=("values",)),  # the kernel takes 64 keys a step
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
        Smallest(tokens=2),
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
        Smallest(heads=4, kv_heads=2),
    ),
    Mutant(
        "strides_of_keys_for_values",
        "triton_paged_decode_attention",
        (("block * V_BLOCK_STRIDE + place * V_SLOT_STRIDE", "block * K_BLOCK_STRIDE + place * K_SLOT_STRIDE"),),
        "one set of strides for two caches: right until they lie differently; vllm#42642",
        "I10",
        Smallest(other=("layouts",)),
        declares=STRIDED,
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
        Smallest(tokens=2),
    ),
    Mutant(
        "output_written_by_two_programs",
        "triton_paged_decode_attention",
        (('[(sizes["B"], sizes["KVH"])](', '[(sizes["B"], sizes["KVH"], 2)]('),),
        "a grid of more programs than there is work for: the right output, written twice",
        "I17",
        Smallest(tokens=0),
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
        Smallest(tokens=0, kv_heads=2),
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
        Smallest(sequences=2, tokens=2, kv_heads=2),
    ),
    Mutant(
        "bfloat16_refused",
        "torch_paged_decode_attention",
        (("FLOATS = (torch.float32, torch.float16, torch.bfloat16)", "FLOATS = (torch.float32, torch.float16)"),),
        "vllm#6373: a dtype that is declared and not there",
        "I0",
        Smallest(tokens=0, other=("dtype",)),
    ),
    Mutant(
        "block_stride_computed",
        "triton_paged_decode_attention",
        (
            ("block * K_BLOCK_STRIDE", "block * (BLOCK_SIZE * K_SLOT_STRIDE)"),
            ("block * V_BLOCK_STRIDE", "block * (BLOCK_SIZE * V_SLOT_STRIDE)"),
        ),
        "FlagGems#3410, aiter#3498, vllm#45111: pages are taken to lie side by side",
        "I10",
        Smallest(other=("layouts",)),
        declares=PACKED,
    ),
    Mutant(
        "stride_of_a_single_dim_compared",
        "torch_paged_decode_attention",
        ((" and tensor.shape[-1] > 1 and tensor.numel()", " and tensor.numel()"),),
        "the stride of a dim of size 1 means nothing; vllm#45111",
        "I10",
        Smallest(tokens=0, other=("layouts",)),
        declares=STRIDED,
    ),
    Mutant(
        "shared_page_counted_once",
        "torch_paged_decode_attention",
        (
            ("    out = torch.zeros(", "    seen: set[int] = set()\n    out = torch.zeros("),
            (
                "        # [pages, bs, KVH, D] -> ",
                "        mine = torch.tensor([page not in seen for page in pages.tolist()], device=q.device)\n"
                "        mine = mine.repeat_interleave(block_size)[:n]\n"
                "        seen.update(pages.tolist())\n"
                "        # [pages, bs, KVH, D] -> ",
            ),
            ("k = k_cache[pages].flatten(0, 1)[:n].float()", "k = k_cache[pages].flatten(0, 1)[:n][mine].float()"),
            ("v = v_cache[pages].flatten(0, 1)[:n].float()", "v = v_cache[pages].flatten(0, 1)[:n][mine].float()"),
        ),
        "seeds: one sheet in two binders; vllm#7018: prefix hits",
        "I7",
        Smallest(sequences=2),
    ),
    Mutant(
        "workspace_not_cleared",
        "torch_paged_decode_attention",
        (
            (
                'out[b] = torch.einsum("hn,nhd->hd", weights, v).to(q.dtype)',
                "sums = torch.empty(query.shape, device=q.device)\n"
                '        sums += torch.einsum("hn,nhd->hd", weights, v)\n'
                "        out[b] = sums.to(q.dtype)",
            ),
        ),
        "flashinfer#1912, flashinfer#2002: uninitialised workspace",
        "I8",
        Smallest(),
    ),
    Mutant(
        "output_cleared_by_a_product",
        "torch_paged_decode_attention",
        (
            ("out = torch.zeros(q.shape,", "out = 0 * torch.empty(q.shape,"),
            ("        out[b] = ", "        out[b] += "),
        ),
        "vllm#641: 0 * NaN, of the output itself",
        "I8",
        Smallest(),
        declares={"empty": "never"},
    ),
    Mutant(
        "odd_head_of_a_group_not_stored",
        "triton_paged_decode_attention",
        (
            (
                "out.to(out_ptr.dtype.element_ty), mask=head_mask)",
                "out.to(out_ptr.dtype.element_ty), mask=head_mask & (rows < GROUP - GROUP % 2 * (GROUP > 1))[:, None])",
            ),
        ),
        "lmdeploy#1761, flashinfer#4975: groups that are no power of two; output that stays as it came",
        "I8",
        Smallest(heads=3),
        declares={"empty": "never"},
    ),
    Mutant(
        "maximum_kept_for_the_next_sequence",
        "torch_paged_decode_attention",
        (
            (
                "    out = torch.zeros(",
                '    m = torch.full((sizes["H"], 1), -torch.inf, device=q.device)\n    out = torch.zeros(',
            ),
            (
                'weights = torch.softmax(torch.einsum("hd,nhd->hn", query, k) * scale, dim=1)',
                'scores = torch.einsum("hd,nhd->hn", query, k) * scale\n'
                "        m = torch.maximum(m, scores.amax(1, keepdim=True))\n"
                "        weights = torch.exp(scores - m)\n"
                "        weights /= weights.sum(1, keepdim=True)",
            ),
        ),
        "flashinfer#1930: a maximum over the batch; right as long as the neighbours score alike",
        "I11",
        Smallest(sequences=2, heads=2, head_dim=3, other=("values",)),
    ),
    Mutant(
        "rows_put_back_in_the_wrong_order",
        "torch_paged_decode_attention",
        (
            (
                "    for b, n in enumerate(context_lens.tolist()):\n        if n == 0",
                "    order = torch.argsort(context_lens, stable=True)\n"
                "    for place, b in enumerate(order.tolist()):\n        n = int(context_lens[b])\n        if n == 0",
            ),
            ("        out[b] = ", "        out[place] = "),
            ("    return out\n", "    return out[order]\n"),
        ),
        "flashinfer#4382: a permutation in place of its inverse, which is the same up to two sequences",
        "I11",
        Smallest(sequences=3, tokens=2),
        declares={"empty": "never"},
    ),
    Mutant(
        "steps_chosen_by_the_batch",
        "triton_paged_decode_attention",
        (("        STEP=step,", '        STEP=step if sizes["B"] == 1 else 16,'),),
        "declared batch_invariant, and the order of the sums depends on the batch",
        "I11",
        Smallest(tokens=24),
        declares={"batch_invariant": True},
    ),
    Mutant(
        "keys_past_16_slots_of_a_page",
        "triton_paged_decode_attention",
        (("place * K_SLOT_STRIDE", "place % 16 * K_SLOT_STRIDE"),),
        "flashinfer#810, flashinfer#4347: right up to the page size that was tested",
        "I12",
        Smallest(tokens=25, block_size=24),
    ),
    Mutant(
        "masked_slots_weigh_a_little",
        "torch_paged_decode_attention",
        (
            (
                "k = k_cache[pages].flatten(0, 1)[:n].float().repeat_interleave(group, dim=1)",
                "k = k_cache[pages].flatten(0, 1).float().repeat_interleave(group, dim=1)",
            ),
            (
                "v = v_cache[pages].flatten(0, 1)[:n].float().repeat_interleave(group, dim=1)",
                "v = v_cache[pages].flatten(0, 1).float().repeat_interleave(group, dim=1)\n        v[n:] = 0",
            ),
            (
                'weights = torch.softmax(torch.einsum("hd,nhd->hn", query, k) * scale, dim=1)',
                'scores = torch.einsum("hd,nhd->hn", query, k) * scale\n'
                "        lowest = scores[:, :n].amax(1, keepdim=True) - 18\n"
                "        live = torch.arange(len(k), device=q.device) < n\n"
                "        weights = torch.softmax(torch.where(live, scores, lowest), dim=1)",
            ),
        ),
        "flashinfer#4401: a finite fill that is not low enough; how many slots are masked depends on the page size",
        "I12",
        Smallest(),
    ),
    Mutant(
        "table_read_as_pairs_of_int32",
        "torch_paged_decode_attention",
        (("= block_tables[b, : ", "= block_tables.view(torch.int32)[b, : "),),
        "flashinfer#697, flashinfer#2255: int64 accepted, then read as int32",
        "I14",
        Smallest(tokens=2),
    ),
    Mutant(
        "table_with_strided_columns_accepted",
        "triton_paged_decode_attention",
        (
            (
                'if contiguous == "rows" and tensor.numel() and not tensor[0].is_contiguous():',
                'if contiguous == "rows" and not tensor.numel() and tensor.stride(-1) > 1:',
            ),
        ),
        "flashinfer#4044: strides are neither used nor looked at",
        "I16",
        Smallest(tokens=2, head_dim=2),
    ),
)
PAIRS = (
    Mutant(
        "keys_and_values_exchanged",
        "torch_reshape_and_cache",
        (
            ("k_cache[blocks, offsets] = key[tokens]", "k_cache[blocks, offsets] = value[tokens]"),
            ("v_cache[blocks, offsets] = value[tokens]", "v_cache[blocks, offsets] = key[tokens]"),
        ),
        "lmdeploy#4229: what is written is not what is read",
        "I18",
        Smallest(),
        partner="torch_paged_decode_attention",
    ),
    Mutant(
        "token_written_one_slot_further",
        "torch_reshape_and_cache",
        (('slots // sizes["bs"], slots % sizes["bs"]', 'slots // sizes["bs"], (slots + 1) % sizes["bs"]'),),
        "sglang#11985: places that agree for pages of one slot only",
        "I18",
        Smallest(block_size=2),
        partner="torch_paged_decode_attention",
    ),
    Mutant(
        "read_before_written",
        "pairs",
        (
            (
                "        write.call(key, value, k_cache, v_cache, slot_mapping)\n        return decode.call("
                "q, k_cache, v_cache, block_tables, context_lens, scale)",
                "        out = decode.call(q, k_cache, v_cache, block_tables, context_lens, scale)\n"
                "        write.call(key, value, k_cache, v_cache, slot_mapping)\n        return out",
            ),
        ),
        "two kernels that are right, on two streams, and nothing makes the second one wait",
        "I18",
        Smallest(),
        partner="torch_reshape_and_cache",
    ),
)
MUTANTS = (
    *(*WRITES, *SLOTS, *DECODES, *PAIRS),
    *(*writes.WRITES, *slots.SLOTS, *decodes.DECODES, *others.OTHERS),
)
