"""Makes Triton's interpreter fast enough to fuzz with and honest about bfloat16."""

from __future__ import annotations

import os
import warnings

from pagefuzz.fuzz.interpreter.bfloat16 import corrections
from pagefuzz.fuzz.interpreter.launch import corrected_patching, patching_once

SWITCH = "PAGEFUZZ_STOCK_INTERPRETER"
_KNOWN = ("3.6.", "3.7.", "3.8.", "3.9.")
_installed = False


def install() -> None:
    """Patch `triton.runtime.interpreter` of this process; later calls do nothing.

    On a triton whose interpreter lacks the private names that this needs, it warns once (RuntimeWarning) and leaves
    the interpreter as it is.
    """
    global _installed
    if _installed:
        return
    _installed = True
    import triton
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    fast = os.environ.get(SWITCH, "") in ("", "0")
    try:
        patches = [*(patching_once if fast else corrected_patching)(interpreter, tl), *corrections(interpreter, tl)]
    except AttributeError as missing:
        warnings.warn(
            f"pagefuzz does not know the interpreter of triton {triton.__version__} ({missing}): interpreted kernels "
            "run slower, and arithmetic on bfloat16 tensors is wrong. Use triton 3.6 to 3.9, or update pagefuzz.",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    for owner, name, value in patches:
        setattr(owner, name, value)
