"""pagefuzz: a differential fuzzer and invariant checker for paged KV-cache kernels.

Importing this package imports neither torch nor triton, because ``TRITON_INTERPRET`` must be in the environment before
triton is first imported, and only a fuzz run knows whether it is wanted.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["__version__", "kernel"]

if TYPE_CHECKING:
    from pagefuzz.kernels.registry import kernel
else:

    def __getattr__(name: str) -> object:
        if name == "kernel":
            from pagefuzz.kernels.registry import kernel

            return kernel
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
