"""What docs/findings.md says can be seen with the scripts and the saved cases in docs/findings, where the packages are
installed; what was worked out by hand on the cases is what the oracles answer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from pagefuzz.fuzz.arena import CpuArena
from pagefuzz.fuzz.known import entries_of
from pagefuzz.fuzz.run import Runner
from pagefuzz.fuzz.saved import SavedCase, read
from pagefuzz.fuzz.session import adapter_of, load_known
from pagefuzz.fuzz.verdict import KNOWN, UNSUPPORTED, VIOLATION, Judge
from pagefuzz.kernels.peers import PEERS, Peer
from pagefuzz.kernels.registry import Declaration, registered
from pagefuzz.oracles.answers import LOOP, check_oracles
from pagefuzz.strategies.case import Case
from pagefuzz.strategies.reshape_and_cache import ReshapeAndCacheCase
from pagefuzz.tests.commands import pytest_in

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "findings.md").read_text()
SCRIPTS = sorted((DOCS / "findings").glob("*.py"))
CASES = sorted((DOCS / "findings").glob("*.json"))
LONGEST = 40
LARGEST = 4096  # bytes of a saved case
PACKAGES = {
    "flashinfer": "flashinfer",
    "sglang": "sglang",
    "flag-gems": "flag_gems",
    "vllm": "vllm",
    "pytorch": "torch",
}
SECTIONS = dict(re.findall(r"^### (\S+)\n(.*?)(?=^##|\Z)", PAGE, re.DOTALL | re.MULTILINE))


def _peer(script: Path) -> Peer:
    package = next(package for prefix, package in PACKAGES.items() if script.stem.startswith(f"{prefix}-"))
    return next(peer for peer in PEERS if peer.package == package)


def _device(peer: Peer) -> str:
    return "cuda" if peer.module == "flashinfer_cuda" else "cpu"


def _skip_without(peer: Peer) -> None:
    if not peer.is_installed():
        pytest.skip(f"{peer.package} is not installed: {peer.command}")
    if _device(peer) == "cuda" and not torch.cuda.is_available():
        pytest.skip(f"{peer.title} need a GPU")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_finding_shows(script: Path) -> None:
    peer = _peer(script)
    _skip_without(peer)
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, env=environment)
    said = run.stdout + run.stderr
    assert run.returncode == 1, f"no longer so? exit status {run.returncode}:\n{said}"
    assert "Traceback" not in said, f"the script itself fails:\n{said}"


def test_scripts_are_short_and_use_nothing_of_this_project() -> None:
    for script in SCRIPTS:
        text = script.read_text()
        assert len(text.splitlines()) <= LONGEST, script.name
        assert "pagefuzz" not in text, script.name


def test_every_section_has_its_script_and_its_case_and_each_of_them_its_section() -> None:
    assert sorted(SECTIONS) == [script.stem for script in SCRIPTS] and len(SECTIONS) >= 11
    assert sorted(SECTIONS) == [case.stem for case in CASES]
    for name, text in SECTIONS.items():
        assert f"(findings/{name}.py)" in text
        for word in ("smallest case", "what happens", "why", "contract:", "reported:", "by hand:"):
            assert word in text.lower(), (name, word)
        assert f"[{name}](#{name})" in PAGE, f"{name} is missing in the table"


def test_links_lead_to_anchors() -> None:
    for anchor in re.findall(r"\]\(#([^)]+)\)", PAGE):
        assert anchor in SECTIONS
    for file in sorted((DOCS.parent / "kernels/peers").glob("*.known.toml")):
        for anchor in re.findall(r"docs/findings\.md#([\w-]+)", file.read_text()):
            assert anchor in SECTIONS, f"{file.name}: docs/findings.md#{anchor}"


# ------------------------------------------------------------------------------------------------------ the saved cases


@dataclass(frozen=True)
class Worked:
    """What was worked out by hand on the case of a finding.

    right: the numbers, as the page writes them, and which number of the loop oracle's answer each is. seen: a part of
    what the saved case says was seen, and of the section.
    """

    kernel: str
    invariant: str
    right: dict[str, Callable[[Any], float]]
    seen: str


def _element_0(out: Any) -> float:
    return float(out[0][0][0])


def _largest(out: Any) -> float:
    return float(max(map(abs, out[0][0])))


def _elements(out: Any) -> float:
    return len(out[0][0])


def _key_0(written: Any) -> float:
    return int(written["k_cache"][0][0])


def _key_1(written: Any) -> float:
    return int(written["k_cache"][0][1])


BY_HAND = {
    "vllm-chunked-prefill-block-sizes": Worked(
        "vllm_triton_chunked_prefill_paged_decode", "I2", {"-0.855522": _element_0}, "16 lanes"
    ),
    "vllm-unified-3d-empty": Worked(
        "vllm_triton_unified_attention_3d", "I13", {"0 in all 32 elements": _largest, "32 elements": _elements}, "nan"
    ),
    "vllm-cpu-tail": Worked("vllm_cpu_attention", "I8", {"-0.22393798828125": _element_0}, "nan"),
    "vllm-cpu-bfloat16": Worked("vllm_cpu_attention", "I4", {"0.781019": lambda out: out[0][0][1]}, "0.77734375"),
    "pytorch-flex-pool": Worked("pytorch_flex_paged_attention", "I8", {"-0.22393798828125": _element_0}, "nan"),
    "flashinfer-low-scores": Worked(
        "flashinfer_batch_decode_fa2", "I4", {"-0.224609375": _element_0}, "out[0, 0, 0] = 0"
    ),
    "flashinfer-misaligned-rows": Worked(
        "flashinfer_batch_decode_any_stride",
        "I0",
        {"0 in all 64 elements": _largest, "64 elements": _elements},
        "misaligned address",
    ),
    "flashinfer-nothing-to-do": Worked(
        "flashinfer_append_paged_kv_cache",
        "I13",
        {"0 rows": lambda written: len(written["k_cache"])},
        "AppendPagedKVCache failed with error: invalid argument",
    ),
    "sglang-int32-slots": Worked(
        "sglang_reshape_and_cache_flash", "I9", {"0x3fa48800": _key_0, "0x3fab8400": _key_1}, "-2147483604"
    ),
    "flag-gems-int32-slots": Worked("flag_gems_reshape_and_cache_flash", "I9", {"0x3fa48800": _key_0}, "-2147483496"),
    "vllm-unified-narrow-table": Worked(
        "vllm_triton_unified_attention_narrow_table", "I2", {"-0.22393798828125": _element_0}, "16 lanes"
    ),
    "vllm-decode-16-bit-scores": Worked(
        "vllm_triton_decode_attention_normal", "I4", {"0.231440": _element_0}, "0.231201"
    ),
    "vllm-cpu-empty": Worked(
        "vllm_cpu_attention", "I13", {"0 in all 32 elements": _largest, "32 elements": _elements}, "nan"
    ),
    "pytorch-flex-empty-batch": Worked(
        "pytorch_flex_paged_attention", "I13", {"0 rows": len}, "cannot reshape tensor of 0 elements into shape [0, -1]"
    ),
}
# Its adapter declares since that lengths of 0 are never passed, so the case is seen with the default declaration only.
NOT_DECLARED = "vllm-cpu-empty"


def _saved(name: str) -> tuple[SavedCase, Case]:
    return read(DOCS / "findings" / f"{name}.json")


def _by_hand(name: str) -> str:
    """The words of the section on what was worked out by hand, in one line."""
    found = re.search(r"^- By hand: (.*?)(?=^- )", SECTIONS[name], re.DOTALL | re.MULTILINE)
    assert found, name
    return " ".join(found[1].split())


@pytest.mark.parametrize("name", SECTIONS)
def test_a_case_is_what_its_section_tells_of(name: str) -> None:
    """As pagefuzz writes it, small, without a path of the machine where it was found."""
    text = (DOCS / "findings" / f"{name}.json").read_bytes()
    saved, _ = _saved(name)
    assert (saved.kernel, saved.invariant) == (BY_HAND[name].kernel, BY_HAND[name].invariant)
    device = _device(_peer(DOCS / "findings" / f"{name}.py"))
    assert (saved.kind, saved.device, saved.passes) == ("failure", device, 0) and saved.found_as
    assert msgspec.json.format(msgspec.json.encode(saved), indent=1) + b"\n" == text
    assert len(text) <= LARGEST and b"/" not in text
    row = re.search(rf"^\| \[{name}\]\(#{name}\) \|[^|]+\|([^|]+)\|", PAGE, re.MULTILINE)
    assert row and saved.invariant in row[1].strip().split(", ")


@pytest.mark.parametrize("name", SECTIONS)
def test_the_oracles_answer_what_was_worked_out_by_hand(name: str) -> None:
    saved, case = _saved(name)
    check_oracles(case, Declaration())
    answer, text, worked = LOOP[case.operation](case), _by_hand(name), BY_HAND[name]
    assert worked.right
    for words, which in worked.right.items():
        number = words.split()[0]
        decimals = len(number.partition(".")[2])
        right = int(number, 16) if number.startswith("0x") else float(number)
        assert abs(which(answer) - right) <= 0.5 * 10.0**-decimals * (decimals > 0), f"{words}: {which(answer)}"
        assert re.search(rf"(?<![\w.-]){re.escape(words)}(?![\w]|\.\w)", text), words
    assert worked.seen in saved.seen and worked.seen in " ".join(SECTIONS[name].split())


@pytest.mark.parametrize("name", [name for name in BY_HAND if name.endswith("int32-slots")])
def test_the_product_of_a_slot_wraps_to_where_the_store_was_seen(name: str) -> None:
    saved, case = _saved(name)
    assert isinstance(case, ReshapeAndCacheCase) and case.cache_kind() == "contiguous"
    (slot,) = case.slots
    block, offset = divmod(slot, case.block_size)
    element = (block * case.block_size + offset) * case.num_kv_heads * case.head_dim
    wrapped = (element + 2**31) % 2**32 - 2**31
    assert f"slot {slot} is block {block}, offset {offset}." in _by_hand(name)
    assert f"{element} = 2^31 + {element - 2**31}, which in int32 is {wrapped}:" in _by_hand(name)
    assert f"wild store at element {wrapped} of k_cache" in saved.seen


@pytest.mark.parametrize("module", list(dict.fromkeys(p.module for p in PEERS if _device(p) == "cpu")))
def test_a_replay_fails_as_it_was_saved(module: str) -> None:
    """As the named invariant; and as a known failure only where the known failures tell of this finding."""
    peer = next(peer for peer in PEERS if peer.module == module)
    names = [name for name in BY_HAND if BY_HAND[name].kernel in peer.kernels]
    assert names
    _skip_without(peer)
    peer.load()
    runner, known = Runner(CpuArena(), interpreted=True), load_known([adapter_of(peer)], "cpu")
    for name in names:
        saved, case = _saved(name)
        kernel = registered()[saved.kernel]
        entries = entries_of(known, kernel.name)
        if name == NOT_DECLARED:
            assert Judge(kernel, runner, entries).verdict(case).kind == UNSUPPORTED
            kernel = replace(kernel, declared=replace(kernel.declared, empty="zeros"))
        else:
            verdict = Judge(kernel, runner, entries).verdict(case)
            assert (verdict.kind, verdict.named) == (KNOWN, saved.invariant), name
        others = [entry for entry in entries if not entry.reason.endswith(f"#{name}")]  # a case may show two findings
        verdict = Judge(kernel, runner, others).verdict(case)
        assert (verdict.kind, verdict.named) == (VIOLATION, saved.invariant), name
        assert verdict.violation and BY_HAND[name].seen in verdict.violation.seen


@pytest.mark.parametrize("name", [name for name in BY_HAND if name.startswith("flashinfer-")])
def test_a_replay_on_a_gpu_fails_as_it_was_saved(name: str, tmp_path: Path) -> None:
    """In a process of its own: some of these end it."""
    _skip_without(_peer(DOCS / "findings" / f"{name}.py"))
    done = pytest_in(tmp_path, "--device", "cuda", "--replay", str(DOCS / "findings" / f"{name}.json"))
    assert done.code == 1 and f"docs/findings.md#{name}" in done.line("known failure: "), done.text
    assert f"still fails: {BY_HAND[name].invariant} violated by {BY_HAND[name].kernel}" in done.text
