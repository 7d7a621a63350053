"""Floating-point formats as bit patterns: everything that the suite stores and compares is bits, never a rounded copy.

Independent of torch's conversions on purpose: the harness must not inherit a fault of what it tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Format:
    """A format's storage and limits. `precision` counts the significand's bits, the hidden one included."""

    bits: type[np.unsignedinteger]
    precision: int
    nan: int
    infinity: int
    largest: int
    sign: int

    @property
    def unit_roundoff(self) -> float:
        return 2.0**-self.precision


FORMATS: dict[str, Format] = {
    "float32": Format(np.uint32, 24, nan=0x7FC00000, infinity=0x7F800000, largest=0x7F7FFFFF, sign=0x80000000),
    "float16": Format(np.uint16, 11, nan=0x7E00, infinity=0x7C00, largest=0x7BFF, sign=0x8000),
    "bfloat16": Format(np.uint16, 8, nan=0x7FC0, infinity=0x7F80, largest=0x7F7F, sign=0x8000),
}
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8}
STORAGE: dict[str, type] = {
    **{name: form.bits for name, form in FORMATS.items()},
    "int32": np.int32,
    "int64": np.int64,
}


def decode(bits: np.ndarray, dtype: str) -> np.ndarray:
    """The float64 values of bit patterns of `dtype` (exact)."""
    if dtype == "bfloat16":
        with np.errstate(invalid="ignore"):
            return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    native = np.float32 if dtype == "float32" else np.float16
    with np.errstate(invalid="ignore"):  # widening a signalling NaN says so; it stays a NaN
        return np.ascontiguousarray(bits).view(native).astype(np.float64)


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """The bit patterns in `dtype` of float64 values that it holds exactly; raises ValueError where one does not fit.

    Value recipes produce dyadic numbers with few bits, so that nothing is ever rounded here and the oracles compute on
    exactly what the kernel sees.
    """
    if dtype == "bfloat16":
        bits = (values.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    else:
        native = np.float32 if dtype == "float32" else np.float16
        bits = values.astype(native).view(FORMATS[dtype].bits)
    if not np.array_equal(decode(bits, dtype), values):
        raise ValueError(f"a value recipe made a number that {dtype} cannot hold exactly")
    return bits
