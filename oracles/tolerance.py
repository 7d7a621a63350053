"""How far a correct attention kernel of the declared precision can be off, per output element.

With u the unit round-off of float32 and gamma(n) = n u / (1 - n u) (Higham, Accuracy and Stability of Numerical
Algorithms, ch. 3): an exponent s_j - m is off by at most e_j, so a weight by the factor expm1(e_j + sum_i p_i e_i), and
the weighted sum adds gamma(n). What the kernel declares that it rounds further comes on top.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagefuzz.kernels.registry import Declaration
from pagefuzz.strategies.number_formats import FORMATS

UNIT_ROUNDOFF = {
    "float32": 2.0**-24,
    "tf32": 2.0**-11,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4,
}
SMALLEST_SUBNORMAL = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}
# What a number can lose to underflow, by the precision that it is rounded to.
UNDERFLOW = {"float16": 2.0**-24, "float8_e4m3fn": 2.0**-9}
LOOSE = 0.05  # a bound above this share of max|v| says little


@dataclass(frozen=True)
class Precision:
    """Unit round-offs of scores, weights, products and sums; 0 for those that stay float32, but sums. Then what a
    weight, and a term of a sum, can lose to underflow."""

    scores: float
    weights: float
    products: float
    sums: float
    weight_underflow: float
    sum_underflow: float

    @classmethod
    def of(cls, declared: Declaration, dtype: str) -> Precision:
        """What a kernel declares, for caches of `dtype`."""
        names = {what: name if name != "input" else dtype for what, name in declared.unit_roundoff.items()}

        def beyond_float32(what: str) -> float:
            name = names.get(what, "float32")
            return 0.0 if name == "float32" else UNIT_ROUNDOFF[name]

        return cls(
            scores=beyond_float32("scores"),
            weights=beyond_float32("weights"),
            products=beyond_float32("products"),
            sums=UNIT_ROUNDOFF[names.get("sums", "float32")],
            weight_underflow=UNDERFLOW.get(names.get("weights", "float32"), 2.0**-126),
            sum_underflow=UNDERFLOW.get(names.get("sums", "float32"), 0.0),
        )


def gamma(n: int, u: float) -> float:
    """The error of n roundings in a row, relative to the sum of the absolute values; infinite once n u reaches 1."""
    return n * u / (1 - n * u) if n * u < 1 else float("inf")


def attention_bound(
    scores: np.ndarray,
    magnitudes: np.ndarray,
    values: np.ndarray,
    exact: np.ndarray,
    dim: int,
    scale: float,
    precision: Precision,
) -> np.ndarray:
    """The bound on |out - exact| before the output is rounded: float64 [H, D].

    scores: [H, n], scaled. magnitudes: [H, n], |scale| * sum_d |q_d k_jd|. values: [n, H, D]. exact: [H, D]. dim: D.
    """
    n = scores.shape[1]
    largest = scores.max(axis=1, keepdims=True)
    raw = np.exp(scores - largest)
    total = raw.sum(axis=1, keepdims=True)
    p = raw / total
    u = 2.0**-24
    with np.errstate(invalid="ignore"):  # a sum of zeros is zero in any precision, and however many there are
        off = np.where(magnitudes > 0, (gamma(dim + 2, precision.sums) + 2 * precision.products) * magnitudes, 0.0)
    e = off + 4 * u * (1 + largest - scores)
    e = e + precision.scores * np.abs(scores) + dim * abs(scale) * precision.sum_underflow
    with np.errstate(over="ignore", invalid="ignore"):
        w = np.expm1(e + (p * e).sum(axis=1, keepdims=True))
        relative = w + gamma(n, precision.sums) + 2 * precision.weights + 2 * precision.products
        sizes = np.abs(values)
        bound = np.einsum("hn,nhd->hd", p * relative, sizes)
        bound[np.isnan(bound)] = np.inf  # 0 times infinity: where a score may be off by anything, so may the result
        # Not divided by the sum of the weights: whether they are rounded before or after that is not declared.
        return bound + precision.weight_underflow * sizes.sum(axis=0) + n * precision.sum_underflow


def rounded_bound(bound: np.ndarray, exact: np.ndarray, dtype: str) -> np.ndarray:
    """`bound` and the rounding of the output to `dtype`."""
    return bound + FORMATS[dtype].unit_roundoff * (np.abs(exact) + bound) + SMALLEST_SUBNORMAL[dtype]
