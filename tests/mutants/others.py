"""Mutants of decodes by other algorithms: split-KV with a merge, and all sequences at once in PyTorch."""

from __future__ import annotations

from pagefuzz.tests.mutants.mutant import Mutant
from pagefuzz.tests.mutants.smallest import Smallest

SPLIT, BATCHED = "split_paged_decode_attention", "batched_paged_decode_attention"

OTHERS = (
    Mutant(
        "merge_of_equal_weights",
        SPLIT,
        (
            (
                "weight = tl.exp(tl.load(lse_ptr + part + split, mask=row_mask, other=0.0) - m)",
                "lse = tl.load(lse_ptr + part + split, mask=row_mask, other=0.0)\n"
                '        weight = tl.where(lse > -float("inf"), 1.0, 0.0)',
            ),
        ),
        "flashinfer#50, flash-attention#1647: the parts are averaged, whatever they weigh",
        "I4",
        Smallest(tokens=2),
        also=("I12",),
    ),
    Mutant(
        "merge_in_another_base",
        SPLIT,
        (("weight = tl.exp(tl.load(lse_ptr", "weight = tl.exp2(tl.load(lse_ptr"),),
        "vllm#28840, vllm#47079: a natural logarithm is merged in base 2",
        "I4",
        Smallest(tokens=2),
        also=("I12",),
    ),
    Mutant(
        "merge_of_empty_parts",
        SPLIT,
        (("    m = tl.where(n > 0, m, 0.0)  # every part is empty: -inf - -inf would be NaN\n", ""),),
        "vllm#28181, flashinfer#4051, vllm#48366: exp(-inf - -inf)",
        "I13",
        Smallest(tokens=0),
    ),
    Mutant(
        "log_of_an_empty_sum_is_zero",
        SPLIT,
        (
            (
                "tl.store(lse_ptr + part, m + tl.log(total)",
                "tl.store(lse_ptr + part, tl.maximum(m, -50.0) + tl.log(total)",
            ),
        ),
        "flashinfer#4401: a finite sentinel for a part without keys; right until all scores lie below it",
        "I4",
        Smallest(tokens=2, head_dim=2, other=("values",)),
        also=("I12", "I11"),
    ),
    Mutant(
        "lse_of_an_empty_part_is_infinite",
        SPLIT,
        (
            (
                "m + tl.log(total), mask=row_mask)",
                'tl.where(first < last, m + tl.log(total), float("inf")), mask=row_mask)',
            ),
        ),
        "vllm#15492, flash-attention#978, FlashMLA#77: +inf for a part without keys",
        "I13",
        Smallest(),
        also=(
            "I3",
            "I4",
        ),
    ),
    Mutant(
        "empty_part_unwritten",
        SPLIT,
        (
            (
                "    rows = tl.arange(0, ROWS)\n    cols = tl.arange(0, COLS)\n    row_mask = rows < GROUP",
                "    if (first >= last) & (n > 0):\n"
                "        return\n"
                "    rows = tl.arange(0, ROWS)\n"
                "    cols = tl.arange(0, COLS)\n"
                "    row_mask = rows < GROUP",
            ),
        ),
        "flashinfer#1912, flash-attention#2550: the merge reads parts that nobody wrote",
        "I3",
        Smallest(),
        also=("I8", "I13"),
    ),
    Mutant(
        "part_starts_at_zero",
        SPLIT,
        (
            ("first = split * chunk", "first = 0 * split"),
            ("last = tl.minimum(first + chunk, n)", "last = tl.minimum(split * chunk + chunk, n)"),
        ),
        "flashinfer#3890: the offset of the part is not added",
        "I3",
        Smallest(tokens=2, head_dim=2),
        also=("I12", "I4"),
    ),
    Mutant(
        "remainder_of_the_parts_dropped",
        SPLIT,
        (("chunk = tl.cdiv(n, SPLITS)", "chunk = n // SPLITS"),),
        "vllm-project/flash-attention#42: what does not divide by the number of parts is lost",
        "I3",
        Smallest(),
        also=("I12", "I13"),
    ),
    Mutant(
        "parts_of_the_first_sequence",
        SPLIT,
        (("chunk = tl.cdiv(n, SPLITS)", "chunk = tl.cdiv(tl.load(context_lens_ptr), SPLITS)"),),
        "flashinfer#941, nano-vllm#213: the plan of the first sequence for all",
        "I13",
        Smallest(sequences=2, tokens=4),
        also=("I3", "I11", "I4"),
    ),
    Mutant(
        "parts_share_a_workspace_row",
        SPLIT,
        (("part = (b * H + heads) * SPLITS + split", "part = (b * H + rows) * SPLITS + split"),),
        "vllm#17438: scratch sized and indexed without the kv head",
        "I17",
        Smallest(heads=2, kv_heads=2, tokens=0),
        also=("I3", "I5"),
    ),
    Mutant(
        "lse_transposed",
        SPLIT,
        (("tl.store(lse_ptr + part, m", "tl.store(lse_ptr + (b * SPLITS + split) * H + heads, m"),),
        "vllm-project/flash-attention#87: one kernel writes [B, SPLITS, H] and the other reads [B, H, SPLITS]",
        "I3",
        Smallest(heads=2, tokens=1),
        also=("I4", "I13", "I8"),
    ),
    Mutant(
        "parts_in_the_dtype_of_q",
        SPLIT,
        (
            (
                "parts = torch.empty((sequences, heads, SPLITS, dim), dtype=torch.float32",
                "parts = torch.empty((sequences, heads, SPLITS, dim), dtype=q.dtype",
            ),
            (
                "mask=mask, other=0.0)\n        total += weight",
                "mask=mask, other=0.0).to(tl.float32)\n        total += weight",
            ),
            ("acc / total[:, None], mask=mask)", "(acc / total[:, None]).to(part_ptr.dtype.element_ty), mask=mask)"),
        ),
        "flash-attention#1578: partial sums kept in half precision",
        "I4",
        Smallest(tokens=8, block_size=2, other=("dtype", "values", "scale")),
        also=("I12",),
    ),
    Mutant(
        "part_not_normalised",
        SPLIT,
        (("acc / total[:, None], mask=mask)", "acc, mask=mask)"),),
        "flashinfer#58: a part is stored before it is divided by its sum",
        "I3",
        Smallest(tokens=4),
        also=("I12", "I4"),
    ),
    Mutant(
        "merge_reads_the_stride_of_another_tensor",
        SPLIT,
        (
            (
                "(part + split)[:, None] * D + cols[None, :], mask=mask, other=0.0)\n        total",
                "(part + split)[:, None] * COLS + cols[None, :], mask=mask, other=0.0)\n        total",
            ),
        ),
        "vllm#42642: the merge reads with another tensor's head stride; right while D is its padded size",
        "I0",
        Smallest(tokens=2),
        also=(
            "I3",
            "I8",
            "I13",
            "I17",
            "I4",
        ),
    ),
    Mutant(
        "split_int32_block_product",
        SPLIT,
        (("v_offs = block * v_block_stride", "v_offs = block.to(tl.int32) * v_block_stride"),),
        "fairinternal#1462 (xformers), syv-ai/qwen38-27b-rtx3090#86: int32 block times stride in a new split-KV kernel",
        "I9",
        Smallest(far=True, other=("layouts",)),
    ),
    # ---- all sequences at once
    Mutant(
        "batched_mask_left_out",
        BATCHED,
        (('    scores = scores.masked_fill(~live[:, None, None, :], float("-inf"))\n', ""),),
        "seeds: rows past the context weigh exp(0) each",
        "I3",
        Smallest(sequences=2, tokens=2),
        also=(
            "I13",
            "I11",
            "I4",
        ),
    ),
    Mutant(
        "batched_values_weigh_zero",
        BATCHED,
        (
            (
                "v = v_cache[blocks, places].float().masked_fill(~live[:, :, None, None], 0.0)",
                "v = v_cache[blocks, places].float()",
            ),
        ),
        "vllm#641, flash-attention#1745: NaN * 0 where the mask left V as it was",
        "I13",
        Smallest(sequences=2, tokens=2, block_size=2),
        also=("I8", "I11"),
    ),
    Mutant(
        "batched_empty_row_is_nan",
        BATCHED,
        (("    weights = weights.masked_fill((lengths == 0)[:, None, None, None], 0.0)  # all -inf: NaN\n", ""),),
        "xformers#1185: the softmax of a wholly masked row",
        "I13",
        Smallest(sequences=2),
    ),
    Mutant(
        "batched_finite_sentinel",
        BATCHED,
        (('masked_fill(~live[:, None, None, :], float("-inf"))', "masked_fill(~live[:, None, None, :], -5e4)"),),
        "flashinfer#4401, flashinfer#4450: -5e4 for the mask; right until a score lies below it",
        "I11",
        Smallest(sequences=2, tokens=2, other=("values",)),
        also=("I4", "I12", "I13"),
    ),
    Mutant(
        "batched_length_of_the_first",
        BATCHED,
        (
            ("live = position < lengths[:, None]", "live = position < lengths[:1, None]"),
            (
                "blocks = torch.where(live, pages, 0)",
                "live = live.expand(sequences, -1)\n"
                "    blocks = torch.where(live, pages, 0).clamp(0, k_cache.shape[0] - 1)",
            ),
        ),
        "jax 10dbfcf747: one sequence's length for all",
        "I13",
        Smallest(sequences=2, tokens=2),
        also=(
            "I11",
            "I3",
            "I8",
            "I2",
        ),
    ),
    Mutant(
        "batched_groups_in_turn",
        BATCHED,
        (
            (
                "q.float().reshape(sequences, kv_heads, heads // kv_heads, dim)",
                "q.float().reshape(sequences, heads // kv_heads, kv_heads, dim).transpose(1, 2)",
            ),
            (".reshape(sequences, heads, dim)", ".transpose(1, 2).reshape(sequences, heads, dim)"),
        ),
        "seeds: h % KVH; right for one kv head and for one query head on each",
        "I5",
        Smallest(heads=4, kv_heads=2),
    ),
    Mutant(
        "batched_table_row_clamped",
        BATCHED,
        (("    blocks = torch.where(live, pages, 0)\n", "    blocks = torch.where(live, pages, 0).clamp(max=63)\n"),),
        "tpu-inference#2366: garbage ids are clamped, and right ids with them",
        "I9",
        Smallest(far=None),
        also=(
            "I3",
            "I12",
        ),
    ),
    Mutant(
        "batched_tail_looked_up",
        BATCHED,
        (("    blocks = torch.where(live, pages, 0)\n", "    blocks = pages\n"),),
        "seeds: the whole row is read: IndexError, or somebody else's page; tpu-inference#2366",
        "I2",
        Smallest(sequences=2, tokens=2),
        also=("I13", "I11"),
    ),
    Mutant(
        "batched_whole_pages_wide",
        BATCHED,
        (("    longest = int(lengths.max())\n", "    longest = int(lengths.max()) // block_size * block_size\n"),),
        "seeds: n // bs for the longest of the batch",
        "I3",
        Smallest(block_size=2),
        also=("I11", "I13"),
    ),
)
