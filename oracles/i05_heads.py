"""I5: query head h uses kv head h // (H / KVH)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from pagefuzz.kernels.registry import Declaration
from pagefuzz.oracles.answers import answer, unfinished
from pagefuzz.oracles.invariant import Invariant, Violation
from pagefuzz.oracles.observation import Observation
from pagefuzz.strategies.number_formats import decode

VAGUE = 91  # the rank of weights that point at no head: after I4


class HeadGroups(Invariant):
    """V constant per kv head names the head of V that each query head read; K that points at another position per kv
    head shows a wrong head of K. `repeat` in place of `repeat_interleave` is right for one kv head and for as many kv
    heads as query heads (seeds, I5; tvm#17074, TensorRT-LLM#6573)."""

    id = "I5"
    statement = "query head h uses kv head h // (H / KVH)"
    operations = ("paged_decode_attention",)
    relation = True
    rank = 45

    def applies(self, case: Any, declared: Declaration) -> bool:
        return case.num_kv_heads > 1 and any(case.context_lens)

    def twins(self, case: Any, declared: Declaration) -> Mapping[str, Any]:
        return {
            "V names its kv head": replace(case, values="heads_by_value"),
            "K points by kv head": replace(case, values="heads_by_key"),
        }

    def judge(self, case: Any, observations: Mapping[str, Observation], declared: Declaration) -> Violation | None:
        for name, twin in self.twins(case, declared).items():
            run = observations[name]
            if not run.finished:
                return (
                    unfinished(run, "with other values in the same tensors") if observations["case"].finished else None
                )
            assert run.output is not None
            seen = decode(run.output.bits, run.output.dtype)
            right = answer(twin, declared)
            wrong = ~(np.abs(seen - right.exact) <= np.maximum(right.bound, 0.25))
            for b, n in enumerate(case.context_lens):
                if n and wrong[b].any():
                    h, d = (int(i) for i in np.argwhere(wrong[b])[0])
                    value = seen[b, h, d]
                    head, rank = h // case.group_size, None
                    if name == "V names its kv head":
                        exactly = np.isfinite(value) and abs(value - round(value)) < 0.25
                        said = f"read V of kv head {round(value) - 1}" if exactly else f"gives {value:.6g}"
                    else:
                        said = f"weighed the keys of another kv head (out[{b}, {h}, {d}] = {value:.6g})"
                        places = {other % case.key_places() + 1.0 for other in range(case.num_kv_heads)}
                        if not any(abs(value - place) < 0.25 for place in places - {right.exact[b, h, d]}):
                            # Where nobody's keys point: keys are wrong in a way that has nothing to do with heads.
                            said, rank = f"weighed no kv head's keys (out[{b}, {h}, {d}] = {value:.6g})", VAGUE
                    return Violation(
                        f"query head {h} {said}",
                        f"kv head {head} = {h} // {case.group_size}",
                        f"sequence {b}, H = {case.num_heads}, KVH = {case.num_kv_heads}",
                        rank,
                    )
        return None
