"""Other people's kernels: the catalogue, loading single modules of engines, and what the command line makes of them."""

from __future__ import annotations

import ast
import fnmatch
import importlib
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest
import torch

from pagefuzz.fuzz.arena import CpuArena
from pagefuzz.fuzz.drawing import each_case
from pagefuzz.fuzz.known import SUFFIX, read
from pagefuzz.fuzz.run import Runner
from pagefuzz.fuzz.saved import token
from pagefuzz.fuzz.session import UsageError, load_peers
from pagefuzz.fuzz.verdict import PASS, UNSUPPORTED, VIOLATION, Judge, Verdict
from pagefuzz.kernels import peers, registry
from pagefuzz.kernels.operations import OPERATIONS
from pagefuzz.kernels.pairs import with_pairs
from pagefuzz.kernels.peers import PEERS, NotLoaded, Peer, leaf
from pagefuzz.kernels.registry import Declaration, Kernel, registered
from pagefuzz.strategies import STRATEGIES
from pagefuzz.strategies.reshape_and_cache import ReshapeAndCacheCase
from pagefuzz.tests.commands import TREE, pytest_in

BY_MODULE = {peer.module: peer for peer in PEERS}
USAGE = pytest.ExitCode.USAGE_ERROR


def loaded(module: str) -> dict[str, Kernel]:
    """The kernels of a peer; skips where it is not there, and says what brings it."""
    peer = BY_MODULE[module]
    if not peer.is_installed():
        pytest.skip(f"{peer.package} is not installed: {peer.command}")
    peer.load()
    return {name: registered()[name] for name in peer.kernels}


# -------------------------------------------------------------------------------------------------------- the catalogue


def test_every_adapter_is_in_the_catalogue_and_registers_what_that_says() -> None:
    folder = TREE / "kernels/peers"
    assert {path.stem for path in folder.glob("*.py")} == {"__init__", "leaf", *BY_MODULE}
    for module, peer in BY_MODULE.items():
        functions = [
            each.name
            for each in ast.parse((folder / f"{module}.py").read_text()).body
            if isinstance(each, ast.FunctionDef)
            and any(isinstance(one, ast.Call) and ast.unparse(one.func) == "kernel" for one in each.decorator_list)
        ]
        assert tuple(functions) == peer.kernels


KNOWN_FAILURES = sorted(path.name.removesuffix(SUFFIX) for path in (TREE / "kernels/peers").glob(f"*{SUFFIX}"))


def test_files_of_known_failures_stand_beside_adapters() -> None:
    assert KNOWN_FAILURES
    assert set(KNOWN_FAILURES) <= set(BY_MODULE)


@pytest.mark.parametrize("module", KNOWN_FAILURES)
def test_known_failures_are_valid(module: str) -> None:
    """Without the peer: its adapter's source says which operation each kernel is for."""
    peer, folder = BY_MODULE[module], TREE / "kernels/peers"
    operations = {
        each.name: ast.literal_eval(one.args[0])
        for each in ast.parse((folder / f"{module}.py").read_text()).body
        if isinstance(each, ast.FunctionDef)
        for one in each.decorator_list
        if isinstance(one, ast.Call) and ast.unparse(one.func) == "kernel"
    }
    kernels = {name: Kernel(name, OPERATIONS[what], never, Declaration()) for name, what in operations.items()}
    path = folder / f"{module}{SUFFIX}"
    read_for = {device: read(path, path.name, peer.kernels, with_pairs(kernels), device) for device in ("cpu", "cuda")}
    entries = list({entry.label: entry for each in read_for.values() for entry in each}.values())
    assert len(entries) == len(tomllib.loads(path.read_text())["known"])
    headings = re.findall(r"^### (.+)$", (TREE / "docs/findings.md").read_text(), re.MULTILINE)
    for entry in entries:
        place = re.search(r"docs/findings\.md#(\S+)$", entry.reason)
        assert place, f"{entry.label}: its reason should end in the place where docs/findings.md tells of it"
        assert place[1] in headings, entry.label


def never(*arguments: object) -> None:
    raise AssertionError("only read about, never run")


def test_names_are_the_peers_own() -> None:
    names = [name for peer in PEERS for name in peer.kernels]
    assert len(set(names)) == len(names)
    assert not [name for name in names if fnmatch.fnmatch(name, "torch*") or fnmatch.fnmatch(name, "triton*")]
    for peer in PEERS:
        assert all(name.startswith(peer.package.replace("torch", "pytorch").split("_")[0]) for name in peer.kernels)


def test_what_make_installs_is_what_the_messages_say() -> None:
    """All but what has no CPU kernels, and PyTorch, which is there anyway."""
    pins = [line for line in (TREE / "requirements-peers.txt").read_text().splitlines() if "==" in line]
    said = {peer.command.split()[-1] for peer in PEERS if peer.module != "flashinfer_cuda"}
    assert said == {*pins, *re.findall(r"^torch==.*", (TREE / "requirements.txt").read_text(), re.MULTILINE)}
    assert len({pin.split("==")[0] for pin in pins}) == len(pins)


def test_patterns_find_kernels_and_pairs() -> None:
    assert [peer.module for peer in peers.matching("vllm*")] == ["vllm_triton", "vllm_cpu"]
    assert [peer.module for peer in peers.matching("vllm_cpu_att*")] == ["vllm_cpu"]
    assert [peer.module for peer in peers.matching("sglang_resh*+sglang_decode*")] == ["sglang_triton"]
    assert peers.matching("nobody*") == []


def test_only_kernels_of_one_peer_make_a_pair() -> None:
    """Both of vLLM's would have the first word in common, but a cache of the one is none of the other."""

    def of(name: str, operation: str) -> Kernel:
        return Kernel(name, OPERATIONS[operation], print, registry.Declaration())

    kernels = [
        of("vllm_cpu_reshape_and_cache", "reshape_and_cache"),
        of("vllm_cpu_attention", "paged_decode_attention"),
        of("vllm_triton_unified_attention_2d", "paged_decode_attention"),
        of("vllm_mine", "paged_decode_attention"),
    ]
    found = with_pairs({kernel.name: kernel for kernel in kernels})
    assert [name for name in found if "+" in name] == ["vllm_cpu_reshape_and_cache+vllm_cpu_attention"]


# ------------------------------------------------------------------------------------------ single modules of an engine

ENGINE = {
    "__init__.py": "raise AssertionError('the engine itself was imported')",
    "ops/__init__.py": "raise AssertionError('a package of the engine was imported')",
    "ops/helpers.py": "HELPED = 3",
    "ops/leaf.py": """
        from fake_engine.config import SWITCH
        from .helpers import HELPED

        def answer():
            return SWITCH, HELPED
    """,
    "ops/uses_kernels.py": """
        import kernels

        WHERE = kernels.__file__
    """,
}


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with an engine whose packages must not be imported, on the path."""
    for name, text in ENGINE.items():
        path = tmp_path / "fake_engine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("fake_engine", "kernels"):
            del sys.modules[name]


def test_a_leaf_is_loaded_without_its_engine(engine: Path) -> None:
    module = leaf.load("fake_engine.ops.leaf", {"fake_engine.config": {"SWITCH": True}})
    assert module.answer() == (True, 3)
    assert module.__file__ == str(engine / "fake_engine/ops/leaf.py")
    assert leaf.directory("fake_engine") == engine / "fake_engine"
    again = leaf.load("fake_engine.ops.helpers", {})  # beside what is loaded already
    assert again.HELPED == 3


def test_a_bare_checkout_is_enough(engine: Path) -> None:
    """The one folder with the modules, and no `__init__.py` on the way."""
    for name in ("__init__.py", "ops/__init__.py"):
        (engine / "fake_engine" / name).unlink()
    importlib.invalidate_caches()
    assert leaf.load("fake_engine.ops.leaf", {"fake_engine.config": {"SWITCH": False}}).answer() == (False, 3)


def test_what_is_neither_stubbed_nor_there_fails_as_any_import(engine: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"fake_engine\.config"):
        leaf.load("fake_engine.ops.leaf", {})
    with pytest.raises(ModuleNotFoundError, match="no_such_engine is not installed"):
        leaf.load("no_such_engine.ops.leaf", {})


def test_an_engine_that_was_imported_is_left_alone(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ModuleType("fake_engine")
    whole.__file__ = "somewhere/fake_engine/__init__.py"
    monkeypatch.setitem(sys.modules, "fake_engine", whole)
    with pytest.raises(ImportError, match="fake_engine has been imported from somewhere"):
        leaf.load("fake_engine.ops.leaf", {"fake_engine.config": {"SWITCH": True}})


def test_a_leaf_that_imports_kernels_gets_that_package_or_none(engine: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named 'kernels'"):
        leaf.load("fake_engine.ops.uses_kernels", {})
    (engine / "kernels").mkdir()
    (engine / "kernels/__init__.py").touch()
    importlib.invalidate_caches()
    module = leaf.load("fake_engine.ops.uses_kernels", {})
    assert Path(module.WHERE) == engine / "kernels/__init__.py"


# ------------------------------------------------------------------------------------------------ what is not installed

ABSENT = Peer("absent", "Nobody's kernels", "no_such_one", "pip install nobody==1", ("nobody_writes", "nobody_reads"))
PRESENT = Peer("present", "Somebody's kernels", "torch", "pip install somebody==1", ("somebody_writes",))


@pytest.fixture
def one_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PEERS", (ABSENT, PRESENT))
    monkeypatch.setitem(sys.modules, "pagefuzz.kernels.peers.present", ModuleType("present"))  # it registers nothing


@pytest.mark.usefixtures("one_absent")
def test_a_peer_that_is_not_installed_is_named_with_its_command() -> None:
    said = "Nobody's kernels (nobody_writes, nobody_reads) not installed: pip install nobody==1"
    with pytest.raises(UsageError) as caught:
        load_peers(["nobody*"], [])
    assert str(caught.value) == f"--kernel nobody*: {said}"
    with pytest.raises(UsageError):
        load_peers(["nobody_writes+nobody_reads"], [])
    assert load_peers(["*body_*"], []) == ([PRESENT], [said])  # something else of the pattern is there


@pytest.mark.usefixtures("one_absent")
def test_a_pattern_that_means_other_kernels_brings_no_peer_in() -> None:
    for pattern in ("nobody*", "*"):
        assert load_peers([pattern], ["nobody_of_mine"]) == ([], [])
    assert load_peers([], []) == ([], [])


def test_a_version_that_does_not_fit_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotLoaded) as caught:
        Peer("no_such_adapter", "The kernels", "torch", "pip install torch==1", ()).load()
    assert str(caught.value).startswith("The kernels cannot be loaded (ModuleNotFoundError: No module named")
    assert str(caught.value).endswith("; what is known to work: pip install torch==1")


# ----------------------------------------------------------------------------------------------------- the command line

COLLECT = ("--collect-only", "-q")
GPU = BY_MODULE["flashinfer_cuda"]


def test_peers_run_only_where_they_are_named(tmp_path: Path) -> None:
    for options in ((), ("--kernel", "*")):
        done = pytest_in(tmp_path, *COLLECT, *options)
        assert done.code == 0 and "torch_reshape_and_cache-000" in done.text
        assert not [name for peer in PEERS for name in peer.kernels if name in done.text]
    done = pytest_in(tmp_path, *COLLECT, "--kernel", "pytorch*")
    assert set(re.findall(r"\[(\S+)-000\]", done.text)) == {
        "pytorch_flex_assign",
        "pytorch_flex_paged_attention",
        "pytorch_flex_assign+pytorch_flex_paged_attention",
    }


@pytest.mark.skipif(GPU.is_installed(), reason="FlashInfer is installed here; this is about where it is not")
def test_what_is_not_installed_is_listed(tmp_path: Path) -> None:
    done = pytest_in(tmp_path, "--collect-only", "--kernel", "[fp]*_[afb]*")
    assert done.code == 0, done.text
    assert done.line("left out: FlashInfer").endswith(f"not installed: {GPU.command}")
    assert "pytorch_flex_assign" in done.line("pagefuzz 0")
    done = pytest_in(tmp_path, "--kernel", "flashinfer*")
    assert done.code == USAGE, done.text
    assert f"--kernel flashinfer*: {GPU.title} ({', '.join(GPU.kernels)}) not installed: {GPU.command}" in done.text
    assert "Traceback" not in done.text
    done = pytest_in(tmp_path, "--replay", token("flashinfer_append_paged_kv_cache", "I6", WRITE))
    assert done.code == 3 and "unsupported: FlashInfer" in done.text and GPU.command in done.text


WRITE = ReshapeAndCacheCase(block_size=2, num_blocks=2, num_kv_heads=1, head_dim=2, slots=(1, 2))


def test_a_saved_case_brings_its_peer_in(tmp_path: Path) -> None:
    done = pytest_in(tmp_path, "--replay", token("pytorch_flex_assign", "I6", WRITE))
    assert done.code == 0 and "passes on pytorch_flex_assign" in done.text, done.text


def test_an_adapter_goes_before_a_peer_of_the_same_name(tmp_path: Path) -> None:
    text = "from pagefuzz import kernel\nkernel('slot_mapping', name='pytorch_mine')(print)\n"
    (tmp_path / "mine.py").write_text(text)
    done = pytest_in(tmp_path, *COLLECT, "--adapter", "mine.py", "--kernel", "pytorch*")
    assert done.code == 0 and set(re.findall(r"\[(\S+)-000\]", done.text)) == {"pytorch_mine"}, done.text


# --------------------------------------------------------------------------------------------------------- the adapters


@pytest.fixture(scope="module")
def runner() -> Runner:
    return Runner(CpuArena(), interpreted=True)


def verdicts(kernel: Kernel, runner: Runner, examples: int) -> list[Verdict]:
    judge = Judge(kernel, runner)
    found: list[Verdict] = []
    relations = tuple(item.id for item in judge.invariants if item.relation)
    drawn = STRATEGIES[kernel.operation.name](kernel.declared, runner.arena.limits, relations)
    each_case(drawn, examples, 1, lambda case: found.append(judge.verdict(case)))
    assert not {verdict.kind for verdict in found} - {PASS, VIOLATION, UNSUPPORTED}
    return found


# What a hundred cases of each showed nothing in; of the others, that they run at all.
SILENT = [
    ("vllm_triton", "vllm_triton_reshape_and_cache_flash"),
    ("vllm_triton", "vllm_triton_unified_attention_2d"),
    ("vllm_cpu", "vllm_cpu_reshape_and_cache"),
    ("sglang_triton", "sglang_decode_attention_normal"),
    ("sglang_triton", "sglang_decode_attention_grouped"),
    ("pytorch_flex", "pytorch_flex_assign"),
]


@pytest.mark.parametrize(("module", "name"), SILENT)
def test_a_right_kernel_is_not_accused(module: str, name: str, runner: Runner) -> None:
    assert [verdict.violation for verdict in verdicts(loaded(module)[name], runner, 25) if verdict.violation] == []


@pytest.mark.parametrize("module", [module for module in BY_MODULE if module != "flashinfer_cuda"])
def test_every_kernel_runs(module: str, runner: Runner) -> None:
    for name, kernel in loaded(module).items():
        found = verdicts(kernel, runner, 10)
        assert PASS in {verdict.kind for verdict in found}, name


def test_a_pool_that_the_kernel_cannot_have_is_not_drawn(runner: Runner) -> None:
    for kernel in loaded("pytorch_flex").values():
        most = kernel.declared.most_slots
        assert most is not None
        pools: list[int] = []
        drawn = STRATEGIES[kernel.operation.name](kernel.declared, runner.arena.limits, ())
        each_case(drawn, 200, 1, lambda case, pools=pools: pools.append(case.num_blocks * case.block_size))  # type: ignore[misc]
        assert max(pools) <= most


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_copies_into_vllm_s_cpu_cache_move_bits(dtype: torch.dtype) -> None:
    """There and back: every bit pattern, those of NaN too, and nothing but the blocks asked for."""
    loaded("vllm_cpu")
    from pagefuzz.kernels.peers.vllm_cpu import _BITS, _Native

    bits = torch.randint(-(2**15), 2**15, (2, 3, 32, 2, 32), dtype=torch.int32).to(_BITS[dtype.itemsize])
    caches = [each.view(dtype) for each in bits.clone()]
    native = _Native(*caches)
    try:
        native.lay_out(torch.tensor([0, 2]))
        for cache in caches:
            cache.view(_BITS[dtype.itemsize]).zero_()
        native.take_back(torch.tensor([2]))
    finally:
        native.forget()
    for cache, before in zip(caches, bits, strict=True):
        after = cache.view(before.dtype)
        assert torch.equal(after[2], before[2]) and not after[:2].any()


def test_vllm_s_cpu_cache_is_held_against_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded("vllm_cpu")
    from pagefuzz.kernels.peers import vllm_cpu

    vllm_cpu._check_layout.cache_clear()
    vllm_cpu._check_layout(torch.float16, 32, 32)
    vllm_cpu._check_layout.cache_clear()
    right = vllm_cpu._write
    monkeypatch.setattr(vllm_cpu, "_write", lambda native, key, value, *rest: right(native, value, key, *rest))
    with pytest.raises(RuntimeError, match="lays its cache out otherwise"):
        vllm_cpu._check_layout(torch.float16, 32, 32)


# FlashInfer as its documentation says, for what the adapter hands to it: it runs on GPUs only.
FLASHINFER = """
import torch

def append_paged_kv_cache(key, value, batch_indices, positions, cache, indices, indptr, last_page_len, kv_layout):
    assert kv_layout == "NHD"
    for each in (batch_indices, positions, indices, indptr, last_page_len):
        assert each.dtype == torch.int32
    page_size = cache[0].shape[1]
    for t, (b, position) in enumerate(zip(batch_indices.tolist(), positions.tolist())):
        first, last = indptr[b : b + 2].tolist()
        assert 0 <= position < (last - first - 1) * page_size + last_page_len[b]
        page = indices[first + position // page_size]
        for each, new in zip(cache, (key, value)):
            each[page, position % page_size] = new[t]

class BatchDecodeWithPagedKVCacheWrapper:
    def __init__(self, workspace, kv_layout, use_tensor_cores=False, backend="auto"):
        assert workspace.dtype == torch.uint8 and kv_layout == "NHD"
        assert (use_tensor_cores, backend) in ((False, "auto"), (True, "fa2"), (True, "fa3"))

    def plan(self, indptr, indices, last_page_len, heads, kv_heads, dim, page_size, *, sm_scale, **dtypes):
        assert set(dtypes) == {"q_data_type", "kv_data_type"}
        for each in (indptr, indices, last_page_len):
            assert each.dtype == torch.int32
        self.__dict__.update(locals())

    def run(self, q, cache):
        out = torch.zeros_like(q)
        for b in range(len(q)):
            pages = self.indices[self.indptr[b] : self.indptr[b + 1]].long()
            if not len(pages):
                continue
            n = (len(pages) - 1) * self.page_size + int(self.last_page_len[b])
            k, v = (each[pages].flatten(0, 1)[:n].double() for each in cache)
            k, v = (each.repeat_interleave(q.shape[1] // self.kv_heads, 1) for each in (k, v))
            weights = torch.einsum("hd,nhd->hn", q[b].double(), k).mul(self.sm_scale).softmax(1)
            out[b] = torch.einsum("hn,nhd->hd", weights, v).to(q.dtype)
        return out
"""


def test_what_flashinfer_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: Runner) -> None:
    if GPU.is_installed():
        pytest.skip("FlashInfer is installed here: it is fuzzed itself on a GPU")
    (tmp_path / "flashinfer.py").write_text(FLASHINFER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "_registry", {})
    try:
        importlib.import_module("pagefuzz.kernels.peers.flashinfer_cuda")
        assert tuple(registered()) == GPU.kernels
        for kernel in with_pairs(registered()).values():
            assert kernel.declared.devices in (("cuda",), ("cuda 9.0",))
            found = verdicts(kernel, runner, 15)
            assert [verdict.violation for verdict in found if verdict.violation] == []
    finally:
        for name in ("flashinfer", "pagefuzz.kernels.peers.flashinfer_cuda"):
            sys.modules.pop(name, None)
