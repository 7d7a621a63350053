"""Makes Triton's interpreter fast enough to fuzz with and honest about bfloat16."""

from __future__ import annotations

import dataclasses
import os
import warnings

from pagefuzz.fuzz.interpreter.bfloat16 import corrections
from pagefuzz.fuzz.interpreter.handles import handles
from pagefuzz.fuzz.interpreter.launch import launching, patching
from pagefuzz.fuzz.interpreter.memo import memoising

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
        patches = corrections(interpreter, tl)
        if fast:
            patches += [*memoising(interpreter, tl), *launching(interpreter, tl), *handles(interpreter)]
            builder = interpreter.interpreter_builder
            if not builder.options.debug:  # else the verdict of this check is thrown away
                patches.append((builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False)))
        else:
            patches += patching(interpreter, tl)
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
