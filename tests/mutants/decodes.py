"""Mutants of paged_decode_attention: the kernels that walk the pages of one sequence after the other."""

from __future__ import annotations

from dataclasses import replace

from pagefuzz.kernels.registry import CACHE_LAYOUTS
from pagefuzz.tests.mutants.mutant import Mutant
from pagefuzz.tests.mutants.smallest import Smallest

TORCH, TRITON = "torch_paged_decode_attention", "triton_paged_decode_attention"
N = "    n = tl.load(context_lens_ptr + b)\n"
LOOP = "    for b, n in enumerate(context_lens.tolist()):\n        if n == 0:\n"
BLOCK = "pos // BLOCK_SIZE, mask=live, other=0).to(tl.int64)\n"
V_LOAD = "v = tl.load(v_head_ptr + v_offs[:, None] + cols[None, :], mask=kv_mask,"
K_LOAD = "k = tl.load(k_head_ptr + k_offs[:, None] + cols[None, :], mask=kv_mask,"

PLANTED = (
    # ---- which rows take part
    Mutant(
        "mask_one_too_many",
        TRITON,
        (("live = pos < n", "live = pos <= n"),),
        "vllm#47305, vllm#641: off by one at the end of the context (j <= n)",
        "I2",
        Smallest(block_size=2),
        also=(
            "I3",
            "I8",
            "I13",
        ),
    ),
    Mutant(
        "mask_one_too_few",
        TRITON,
        (("live = pos < n", "live = pos < n - 1"),),
        "sglang#32087: the last key of the context is dropped",
        "I3",
        Smallest(),
    ),
    Mutant(
        "last_of_whole_pages_dropped",
        TORCH,
        (
            (
                "[:n].float().repeat_interleave(group, dim=1)",
                "[: n - (n % block_size == 0)].float().repeat_interleave(group, dim=1)",
            ),
        ),
        "nano-vllm#213, pytorch#159247: a context that ends with its page loses a token",
        "I3",
        Smallest(),
        times=2,
    ),
    Mutant(
        "whole_last_page_of_values",
        TRITON,
        (
            (BLOCK, BLOCK.replace("mask=live", "mask=pos < (n + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE")),
            (
                V_LOAD,
                V_LOAD.replace(
                    "mask=kv_mask",
                    "mask=(pos < (n + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE)[:, None] & (cols < D)[None, :]",
                ),
            ),
        ),
        "flashinfer#941, aiter#5401, flash-attention#1745: the tail of the last page, of V only, weighs 0 * NaN",
        "I8",
        Smallest(block_size=2),
    ),
    Mutant(
        "values_unmasked",
        TRITON,
        ((V_LOAD, V_LOAD.replace("mask=kv_mask", "mask=(cols < D)[None, :]")),),
        "aiter#5401, FlagGems#1457: K is masked and V is not",
        "I2",
        Smallest(block_size=2),
        also=("I8",),
    ),
    Mutant(
        "scores_unmasked",
        TRITON,
        (('        scores = tl.where(live[None, :], scores, float("-inf"))\n', ""),),
        "jax 11cf85deb0: keys past the context count as zeros, each with weight exp(0)",
        "I3",
        Smallest(),
    ),
    Mutant(
        "zero_scores_masked",
        TRITON,
        (("tl.where(live[None, :], scores,", "tl.where(live[None, :] & (scores != 0), scores,"),),
        "flashinfer#350: a value of the data stands for the mask",
        "I3",
        Smallest(),
        also=("I10", "I11", "I12", "I5"),
    ),
    Mutant(
        "block_zero_skipped",
        TRITON,
        ((BLOCK, BLOCK + "        live = live & (block != 0)\n"),),
        "vllm#35431: block 0 is taken for the null block of padded tables",
        "I3",
        Smallest(),
        also=("I9",),
    ),
    Mutant(
        "table_row_sorted",
        TORCH,
        ((": -(-n // block_size)].long()", ": -(-n // block_size)].long().sort().values"),),
        "seeds: the table is sorted first; right while all pages are full",
        "I3",
        Smallest(tokens=3, block_size=2),
        also=("I12",),
    ),
    Mutant(
        "pages_taken_for_adjacent",
        TRITON,
        (
            (
                "b * table_stride + " + BLOCK,
                "b * table_stride + 0 * pos, mask=live, other=0).to(tl.int64) + pos // BLOCK_SIZE\n",
            ),
        ),
        "sglang#38187, flashinfer#3022: the next page is the next block; right with an allocator that has just started",
        "I2",
        Smallest(tokens=2),
        also=(
            "I3",
            "I9",
        ),
    ),
    Mutant(
        "first_page_again",
        TRITON,
        ((BLOCK, BLOCK.replace("pos // BLOCK_SIZE", "start // BLOCK_SIZE + 0 * pos")),),
        "flashinfer#3022, flashinfer#810: one lookup for a tile of keys; wrong from the second page of a tile on",
        "I3",
        Smallest(tokens=2),
        also=("I9",),
    ),
    Mutant(
        "block_size_rounded_up_for_reads",
        TRITON,
        (('        BLOCK_SIZE=sizes["bs"],\n', '        BLOCK_SIZE=triton.next_power_of_2(sizes["bs"]),\n'),),
        "vllm#41363, vllm#38502: the block size is taken for a power of two",
        "I2",
        Smallest(tokens=6, block_size=5, other=("layouts",)),
        also=(
            "I10",
            "I3",
            "I12",
            "I9",
        ),
    ),
    # ---- tables
    Mutant(
        "table_width_taken_for_its_stride",
        TRITON,
        (("        block_tables.stride(0),\n", "        block_tables.shape[1],\n"),),
        "vllm#55109: a narrowed view of a wide table gives another request's blocks",
        "I10",
        Smallest(sequences=2, other=("table_padding",)),
        also=("I2", "I9", "I11", "I13"),
    ),
    Mutant(
        "next_entry_fetched",
        TRITON,
        (
            (
                "        block = tl.load(block_tables_ptr",
                "        next_ptr = block_tables_ptr + b * table_stride + pos // BLOCK_SIZE + 1\n"
                "        ahead = tl.load(next_ptr, mask=live, other=0)\n"
                "        live = live & (ahead == ahead)\n"
                "        block = tl.load(block_tables_ptr",
            ),
        ),
        "vllm#12848, vllm#14597: one table entry too many is loaded, and thrown away",
        "I2",
        Smallest(),
    ),
    Mutant(
        "table_loaded_in_fours",
        TRITON,
        (
            (
                "        block = tl.load(block_tables_ptr",
                "        last_ptr = block_tables_ptr + b * table_stride + pos // BLOCK_SIZE // 4 * 4 + 3\n"
                "        ahead = tl.load(last_ptr, mask=live, other=0)\n"
                "        live = live & (ahead == ahead)\n"
                "        block = tl.load(block_tables_ptr",
            ),
        ),
        "vllm#39324, vllm#14597: the width of a table is taken for a multiple of the entries that a load takes",
        "I2",
        Smallest(),
    ),
    Mutant(
        "next_page_loaded_and_masked",
        TORCH,
        (
            (": -(-n // block_size)].long()", ": -(-n // block_size) + 1].long()"),
            (
                "        # [pages, bs, KVH, D]",
                "        pages = torch.where((pages >= 0) & (pages < sizes['N']), pages, 0)\n"
                "        # [pages, bs, KVH, D]",
            ),
        ),
        "vllm#42494, vllm#42273: a page that nobody owns is loaded, and cut off later",
        "I2",
        Smallest(),
    ),
    Mutant(
        "tables_read_as_int32",
        TRITON,
        (
            (
                "        block_tables,\n        context_lens,\n        q.stride(0)",
                "        block_tables.view(torch.int32),\n        context_lens,\n        q.stride(0)",
            ),
        ),
        "flashinfer#697: an int64 table is read as int32",
        "I14",
        Smallest(tokens=2),
        also=("I9", "I2"),
    ),
    Mutant(
        "lengths_read_as_int32",
        TORCH,
        ((LOOP, LOOP.replace("context_lens", "context_lens.view(torch.int32)[: len(context_lens)]")),),
        "flashinfer#697, flashinfer#2255: int64 lengths are read as int32, so every second one is 0",
        "I14",
        Smallest(sequences=2),
        also=("I11",),  # one length alone is right, and two of them are wrong
    ),
    # ---- block ids and addresses
    Mutant(
        "int32_block_product_of_keys",
        TRITON,
        (("k_offs = block * K_BLOCK_STRIDE", "k_offs = block.to(tl.int32) * K_BLOCK_STRIDE"),),
        "vllm#47671, sglang#9344, lmdeploy#4494: int32 block times stride",
        "I9",
        Smallest(far=True, other=("layouts",)),
    ),
    Mutant(
        "block_id_in_8_bits",
        TRITON,
        ((BLOCK, BLOCK.replace("to(tl.int64)", "to(tl.uint8).to(tl.int64)")),),
        "tpu-inference#2756: narrow arithmetic; wrong only above block 255",
        "I9",
        Smallest(far=True),
        also=("I3", "I2"),
    ),
    Mutant(
        "blocks_past_64_wrap",
        TORCH,
        ((": -(-n // block_size)].long()", ": -(-n // block_size)].long() % 64"),),
        "flashinfer#3130: an id that does not fit; wrong only above block 63",
        "I3",
        Smallest(far=None),
        also=("I9",),
    ),
    # ---- heads
    Mutant(
        "values_of_kv_head_zero",
        TRITON,
        (("v_head_ptr = v_cache_ptr + kv_head * V_HEAD_STRIDE", "v_head_ptr = v_cache_ptr"),),
        "flashinfer#2380: works for one kv head only",
        "I5",
        Smallest(heads=2, kv_heads=2),
    ),
    Mutant(
        "keys_of_kv_head_zero",
        TRITON,
        (("k_head_ptr = k_cache_ptr + kv_head * K_HEAD_STRIDE", "k_head_ptr = k_cache_ptr"),),
        "flashinfer#4095: the kv head of the keys is left out, that of the values is right",
        "I5",
        Smallest(tokens=2, heads=2, kv_heads=2),
        also=("I4",),
    ),
    Mutant(
        "heads_read_in_turn",
        TRITON,
        (("(kv_head * GROUP + rows)[:, None] * D", "(rows * KVH + kv_head)[:, None] * D"),),
        "vllm-project/flash-attention#87, seeds: head h reads kv head h % KVH",
        "I5",
        Smallest(heads=4, kv_heads=2),
    ),
    Mutant(
        "odd_group_loses_its_last_head",
        TRITON,
        (("head_mask = (rows < GROUP)", "head_mask = (rows < tl.maximum(GROUP // 2 * 2, 1))"),),
        "tvm#17074, pytorch#151359: heads taken in twos; only an odd group shows it",
        "I13",
        Smallest(heads=3),
        also=(
            "I3",
            "I8",
            "I17",
        ),
    ),
    Mutant(
        "group_rounded_down_to_a_power_of_two",
        TRITON,
        (("rows, cols = triton.next_power_of_2(group), ", "rows, cols = 1 << (group.bit_length() - 1), "),),
        "lmdeploy#1761, tvm#17074: a group that is no power of two",
        "I13",
        Smallest(heads=3),
        also=(
            "I3",
            "I8",
            "I17",
        ),
    ),
    Mutant(
        "group_tile_of_four",
        TRITON,
        (("rows, cols = triton.next_power_of_2(group), ", "rows, cols = min(4, triton.next_power_of_2(group)), "),),
        "lmdeploy#2688, flashinfer#3563: a tile of heads smaller than the group",
        "I13",
        Smallest(heads=5),
        also=(
            "I3",
            "I8",
            "I17",
        ),
    ),
    Mutant(
        "group_tile_of_eight",
        TRITON,
        (("rows, cols = triton.next_power_of_2(group), ", "rows, cols = min(8, triton.next_power_of_2(group)), "),),
        "TensorRT-LLM#6573: groups of more than 8",
        "I13",
        Smallest(heads=9),
        also=(
            "I3",
            "I8",
            "I17",
        ),
    ),
    Mutant(
        "grid_axes_swapped",
        TRITON,
        (
            ("b = tl.program_id(0).to(tl.int64)", "b = tl.program_id(1).to(tl.int64)"),
            ("kv_head = tl.program_id(1).to(tl.int64)", "kv_head = tl.program_id(0).to(tl.int64)"),
        ),
        "flashinfer#4382: right where there are as many sequences as kv heads",
        "I0",
        Smallest(sequences=2),
        also=(
            "I2",
            "I3",
            "I8",
            "I9",
            "I10",
            "I11",
            "I13",
            "I5",
            "I17",
        ),
    ),
    Mutant(
        "softmax_over_heads",
        TORCH,
        (("* scale, dim=1)", "* scale, dim=0)"),),
        "seeds: the head dim taken for the token dim",
        "I3",
        Smallest(tokens=2, heads=2),
    ),
    Mutant(
        "one_maximum_for_the_group",
        TRITON,
        (("tl.maximum(m, tl.max(scores, 1))", "tl.maximum(m, tl.max(tl.max(scores, 1), 0))"),),
        "the maximum over the wrong axis: right until one head's scores lie far below another's",
        "I4",
        Smallest(heads=3, other=("values",)),
        also=("I11", "I12"),
    ),
    # ---- head dim
    Mutant(
        "keys_read_past_head_dim",
        TRITON,
        ((K_LOAD, K_LOAD.replace("mask=kv_mask", "mask=live[:, None]")),),
        "vllm#46548, FlagGems#951: lanes past the head dim are not masked; times a query of 0 they do not count",
        "I2",
        Smallest(),
        also=("I8",),
    ),
    Mutant(
        "queries_read_past_head_dim",
        TRITON,
        (
            (
                "q = tl.load(q_ptr + b * q_stride + head_offs, mask=head_mask,",
                "q = tl.load(q_ptr + b * q_stride + head_offs, mask=(rows < GROUP)[:, None],",
            ),
        ),
        "vllm#46548: q is read past HEAD_SIZE; times a key of 0 it does not count",
        "I0",
        Smallest(),
        also=("I8", "I13"),
    ),
    Mutant(
        "odd_head_dim_loses_its_last",
        TRITON,
        ((K_LOAD, K_LOAD.replace("mask=kv_mask", "mask=live[:, None] & (cols < D // 2 * 2)[None, :]")),),
        "FlagGems#951, vllm#4573: keys are loaded in twos",
        "I4",
        Smallest(tokens=2, heads=2, kv_heads=2),
        also=(
            "I5",
            "I12",
            "I11",
            "I10",
        ),
    ),
    Mutant(
        "head_dim_cut_at_64",
        TRITON,
        (('max(16, triton.next_power_of_2(sizes["D"]))', 'max(16, min(64, triton.next_power_of_2(sizes["D"])))'),),
        "FlagGems#951, flashinfer#3022: one tile for the head dim",
        "I13",
        Smallest(head_dim=80),
        also=(
            "I3",
            "I8",
        ),
    ),
    Mutant(
        "half_of_the_head_dim",
        TORCH,
        (
            (
                'torch.einsum("hd,nhd->hn", query, k)',
                'torch.einsum("hd,nhd->hn", query[:, : -(-query.shape[1] // 2)], k[..., : -(-k.shape[2] // 2)])',
            ),
        ),
        "vllm#4127: half of the dims take part in the scores",
        "I4",
        Smallest(tokens=2, head_dim=2),
    ),
    # ---- strides of q
    Mutant(
        "row_stride_of_q_ignored",
        TRITON,
        (("q_ptr + b * q_stride + head_offs", "q_ptr + b * (KVH * GROUP * D) + head_offs"),),
        "flashinfer#527: q is a view of a fused QKV projection",
        "I10",
        Smallest(sequences=2, tokens=2, other=("q_padding",)),
    ),
    # ---- values and arithmetic
    Mutant(
        "values_of_the_key_cache",
        TRITON,
        (("v_head_ptr = v_cache_ptr", "v_head_ptr = k_cache_ptr"),),
        "FlagGems#3410: the two caches of one tensor are taken for each other",
        "I3",
        Smallest(),
    ),
    Mutant(
        "running_maximum_starts_at_zero",
        TRITON,
        (("tl.full([ROWS], -3.4028234663852886e38, tl.float32)", "tl.zeros([ROWS], tl.float32)"),),
        "flashinfer#4401: right until all scores lie far below 0",
        "I4",
        Smallest(other=("values",)),
        also=("I11", "I12"),
    ),
    Mutant(
        "maximum_left_out",
        TORCH,
        (
            (
                'torch.softmax(torch.einsum("hd,nhd->hn", query, k) * scale, dim=1)',
                '(torch.einsum("hd,nhd->hn", query, k) * scale).exp()\n'
                "        weights = weights / weights.sum(1, keepdim=True)",
            ),
        ),
        "vllm#56578: exp of a large score overflows",
        "I4",
        Smallest(head_dim=4, other=("values",)),
        also=("I11", "I12"),
    ),
    Mutant(
        "exp2_without_log2e",
        TRITON,
        (
            ("weights = tl.exp(scores - m_new[:, None])", "weights = tl.exp2(scores - m_new[:, None])"),
            ("rescale = tl.exp(m - m_new)", "rescale = tl.exp2(m - m_new)"),
        ),
        "flashinfer#787, lmdeploy#2842: base 2 and no log2(e)",
        "I4",
        Smallest(tokens=2),
        also=("I12",),
    ),
    Mutant(
        "rescale_in_another_base",
        TRITON,
        (("rescale = tl.exp(m - m_new)", "rescale = tl.exp2(m - m_new)"),),
        "vllm#28840: base 2 and base e mixed; wrong from the second step on, where the maximum grows",
        "I4",
        Smallest(tokens=80, heads=8, head_dim=128, block_size=2, other=("values",)),
        also=("I12", "I11"),
    ),
    Mutant(
        "denominator_not_rescaled",
        TRITON,
        (("total = total * rescale + tl.sum(weights, 1)", "total = total + tl.sum(weights, 1)"),),
        "flashinfer#50: wrong from the second step on, where the maximum grows",
        "I4",
        Smallest(tokens=80, heads=8, head_dim=128, block_size=2, other=("values",)),
        also=("I12", "I11"),
    ),
    Mutant(
        "scale_left_out",
        TRITON,
        (("other=0.0).to(tl.float32) * scale", "other=0.0).to(tl.float32)"),),
        "flashinfer#1254: an argument that is not handed on",
        "I4",
        Smallest(tokens=2, other=("scale",)),
        also=("I12",),
    ),
    Mutant(
        "scale_applied_twice",
        TRITON,
        (
            (
                'scores = tl.dot(q, tl.trans(k), input_precision="ieee")',
                'scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale',
            ),
        ),
        "sglang#28144: a factor twice; right for a scale of 1",
        "I4",
        Smallest(tokens=2, other=("scale",)),
        also=("I12",),
    ),
    Mutant(
        "scale_after_softmax",
        TORCH,
        (("* scale, dim=1)", ", dim=1) * scale"),),
        "seeds: the scale is applied after the softmax",
        "I3",
        Smallest(tokens=2, other=("scale",)),
    ),
    Mutant(
        "softmax_in_the_dtype_of_q",
        TORCH,
        (("* scale, dim=1)", "* scale, dim=1).to(q.dtype).float()"),),
        "seeds: the weights in half precision, which nobody declared",
        "I4",
        Smallest(tokens=8, block_size=2, other=("dtype", "values")),
    ),
    Mutant(
        "accumulator_in_the_dtype_of_out",
        TRITON,
        (
            (
                'acc = tl.dot(weights, v, acc * rescale[:, None], input_precision="ieee")',
                'acc = tl.dot(weights, v, acc * rescale[:, None], input_precision="ieee")\n'
                "        acc = acc.to(out_ptr.dtype.element_ty).to(tl.float32)",
            ),
        ),
        "seeds: sums in half precision",
        "I4",
        Smallest(tokens=8, block_size=2, other=("dtype", "values")),
        also=("I12",),
    ),
    Mutant(
        "scores_in_float16",
        TORCH,
        (
            (
                'torch.einsum("hd,nhd->hn", query, k) * scale',
                'torch.einsum("hd,nhd->hn", query, k).half().float() * scale',
            ),
        ),
        "seeds: scores in float16, which large ones overflow",
        "I4",
        Smallest(tokens=8, block_size=2, other=("dtype", "values")),
    ),
    Mutant(
        "output_left_in_float32",
        TORCH,
        (("out = torch.zeros(q.shape, dtype=q.dtype,", "out = torch.zeros(q.shape, dtype=torch.float32,"),),
        "seeds: the result is not brought back to the dtype of q",
        "I0",
        Smallest(tokens=0, other=("dtype",)),
        also=("I13",),
    ),
    # ---- empty contexts, neighbours, fresh memory
    Mutant(
        "empty_context_divides_by_zero",
        TRITON,
        (("tl.where(n > 0, total, 1.0)", "total"),),
        "vllm#57017: 0 / 0",
        "I13",
        Smallest(tokens=0),
    ),
    Mutant(
        "empty_context_sees_one_token",
        TORCH,
        ((LOOP, LOOP.replace("context_lens", "context_lens.clamp(min=1)")),),
        "vllm#7018: a row without a context attends to block 0",
        "I2",
        Smallest(tokens=0),
        also=(
            "I13",
            "I0",
        ),
    ),
    Mutant(
        "row_after_an_empty_one",
        TORCH,
        (
            (LOOP, "    row = -1\n" + LOOP),
            ("            continue\n", "            continue\n        row += 1\n"),
            ("block_tables[b, : -(-n // block_size)].long()", "block_tables[row, : -(-n // block_size)].long()"),
        ),
        "vllm#43982, flashinfer#353: rows are counted without the empty ones",
        "I2",
        Smallest(sequences=2),
        also=("I13", "I9"),
    ),
    Mutant(
        "length_of_the_first_sequence",
        TRITON,
        ((N, "    n = tl.load(context_lens_ptr)\n"),),
        "jax 10dbfcf747, flashinfer#1930: the wrong sequence's length; right in a batch of equal lengths",
        "I13",
        Smallest(sequences=2),
        also=(
            "I11",
            "I2",
            "I3",
            "I8",
        ),
    ),
    Mutant(
        "length_of_the_longest_neighbour",
        TORCH,
        (
            ("k_cache[pages].flatten(0, 1)[:n]", "k_cache[pages].flatten(0, 1)[:most]"),
            ("v_cache[pages].flatten(0, 1)[:n]", "v_cache[pages].flatten(0, 1)[:most]"),
            ("            continue\n", "            continue\n        most = max(context_lens.tolist()[: b + 1])\n"),
        ),
        "flashinfer#1930: one maximum for a batch; its rest of the last page takes part",
        "I3",
        Smallest(sequences=2, tokens=2, block_size=2),
        also=(
            "I11",
            "I8",
        ),
    ),
    Mutant(
        "output_read_before_it_is_written",
        TRITON,
        (
            (
                "    tl.store(out_ptr + b",
                "    out += 0.0 * tl.load(out_ptr + b * (KVH * GROUP * D) + head_offs, mask=head_mask, other=0.0)\n"
                "    tl.store(out_ptr + b",
            ),
        ),
        "flashinfer#1912: 0 times what lay in the output; a NaN in fresh memory shows it",
        "I13",
        Smallest(tokens=0),
        also=(
            "I8",
            "I17",
        ),
    ),
    Mutant(
        "output_left_to_zeros",
        TORCH,
        (("torch.zeros(q.shape,", "torch.empty(q.shape,"),),
        "vllm#37442, flashinfer#4975: nobody writes the rows of empty contexts",
        "I13",
        Smallest(tokens=0),
    ),
    Mutant(
        "query_of_the_next_program",
        TRITON,
        (
            (
                "q = tl.load(q_ptr + b * q_stride",
                "q = tl.load(q_ptr + tl.minimum(b, tl.num_programs(0) // 2) * q_stride",
            ),
        ),
        "flashinfer#3871: only the first rows of q are right",
        "I13",
        Smallest(sequences=3, tokens=2),
        also=("I11",),
    ),
)
# They declare what the good kernels do.
DECODES = tuple(
    replace(mutant, declares={"cache_layouts": CACHE_LAYOUTS, "batch_invariant": mutant.kernel == TRITON})
    for mutant in PLANTED
)
