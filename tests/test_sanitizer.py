"""--sanitize: what compute-sanitizer says is a finding of the case that was run, and names the tensor."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch

from pagefuzz.fuzz.drawing import each_case
from pagefuzz.fuzz.plain_arena import PlainArena
from pagefuzz.fuzz.run import Runner
from pagefuzz.fuzz.sanitizer import Log, NoSanitizer, Sanitizer, found, said
from pagefuzz.fuzz.saved import from_token, read
from pagefuzz.fuzz.session import NotJudged, Session, load_adapter, load_own
from pagefuzz.kernels.operations import OPERATIONS
from pagefuzz.kernels.registry import Declaration, Kernel, registered
from pagefuzz.oracles.invariant import InvariantViolated
from pagefuzz.strategies import STRATEGIES
from pagefuzz.strategies.case import Case, InvalidCase, Limits, arguments_of
from pagefuzz.strategies.reshape_and_cache import ReshapeAndCacheCase
from pagefuzz.tests.commands import failures, pytest_in
from pagefuzz.tests.killing import runner
from pagefuzz.tests.test_isolation import one_token, same

PLACES = (("block_tables", 0x7F0000000000, 16, 4), ("k_cache", 0x7F0000000200, 1024, 2))

# In the forms of several versions of the tool.
SAID = {
    "behind a tensor": (
        "memcheck",
        """
        ========= COMPUTE-SANITIZER
        ========= Invalid __global__ read of size 2 bytes
        =========     at decode_kernel+0xec0 in my_kernel.py:33
        =========     by thread (18,0,0) in block (1,2,0)
        =========     Access to 0x7f000000060e is out of bounds
        =========     and is 15 bytes after the nearest allocation at 0x7f0000000200 of size 1,024 bytes
        =========
        ========= ERROR SUMMARY: 1 error
        """,
        "memcheck: Invalid __global__ read of size 2 bytes at decode_kernel (my_kernel.py:33), block (1,2,0), "
        "thread (18,0,0): 14 bytes after the end of k_cache",
    ),
    "an older form": (
        "memcheck",
        """
        ========= Invalid __global__ write of size 4 bytes
        =========     at 0xda0 in /some where/fused.py:175:fused_kernel
        =========     by thread (0,0,0) in block (0,0,0)
        =========     Address 0x7effffffffff is out of bounds
        =========     and is 1 bytes before the nearest allocation at 0x7f0000000000 of size 16 bytes
        =========     Saved host backtrace up to driver entry point at kernel launch time
        =========     Host Frame: [0x2f26f0]
        =========                in /usr/lib/x86_64-linux-gnu/libcuda.so.1
        =========
        ========= Invalid __global__ write of size 4 bytes
        =========     at 0xda0 in /some where/fused.py:175:fused_kernel
        =========     by thread (1,0,0) in block (0,0,0)
        =========     Address 0x7f0000000010 is out of bounds
        """,
        "memcheck: Invalid __global__ write of size 4 bytes at fused_kernel (fused.py:175), block (0,0,0), "
        "thread (0,0,0): 1 bytes before the start of block_tables (2 reports)",
    ),
    "the oldest form, without an allocation": (
        "memcheck",
        """
        ========= Invalid __global__ read of size 8
        =========     at 0x000000c8 in vector_projection(double*, int)
        =========     by thread (9,0,0) in block (0,0,0)
        =========     Address 0x7f0000000018 is out of bounds
        """,
        "memcheck: Invalid __global__ read of size 8 at vector_projection, block (0,0,0), thread (9,0,0): "
        "8 bytes after the end of block_tables",
    ),
    "far away": (
        "memcheck",
        """
        ========= Invalid __global__ read of size 4 bytes
        =========     at void gather<float>(float const *, int)+0x70
        =========     by thread (9,0,0) in block (0,0,0)
        =========     Access to 0x10 is out of bounds
        =========     and is 139,637,976,727,536 bytes before the nearest allocation at 0x7f0000000000 of size 16 bytes
        """,
        "memcheck: Invalid __global__ read of size 4 bytes at gather<float>, block (0,0,0), thread (9,0,0): "
        "139637976727536 bytes before the start of block_tables",
    ),
    "behind memory of the kernel's own": (
        "memcheck",
        """
        ========= Invalid __global__ write of size 4 bytes
        =========     at kernel+0x70 in a.py:4
        =========     by thread (9,0,0) in block (0,0,0)
        =========     Access to 0x7f0000002400 is out of bounds
        =========     and is 1 bytes after the nearest allocation at 0x7f0000002000 of size 1,024 bytes
        """,
        "memcheck: Invalid __global__ write of size 4 bytes at kernel (a.py:4), block (0,0,0), thread (9,0,0): "
        "0 bytes after the end of 1024 bytes that the kernel allocated",
    ),
    "misaligned": (
        "memcheck",
        """
        ========= Invalid __global__ read of size 16 bytes
        =========     at kernel+0x70 in a.py:4
        =========     by thread (9,0,0) in block (0,0,0)
        =========     Address 0x7f0000000208 is misaligned
        """,
        "memcheck: Invalid __global__ read of size 16 bytes at kernel (a.py:4), block (0,0,0), thread (9,0,0): "
        "element 4 of k_cache, misaligned",
    ),
    "shared memory": (
        "memcheck",
        """
        ========= Invalid __shared__ write of size 4 bytes
        =========     at kernel+0x70 in a.py:4
        =========     by thread (9,0,0) in block (0,0,0)
        =========     Address 0x1bc20 is out of bounds
        """,
        "memcheck: Invalid __shared__ write of size 4 bytes at kernel (a.py:4), block (0,0,0), thread (9,0,0): "
        "address 0x1bc20 is out of bounds",
    ),
    "never written": (
        "initcheck",
        """
        ========= Uninitialized __global__ memory read of size 2 bytes
        =========     at kernel(float *)+0x70 in /home/a/b.cu:41
        =========     by thread (31,0,0) in block (1,0,0)
        =========     Address 0x7f0000000206
        """,
        "initcheck: Uninitialized __global__ memory read of size 2 bytes at kernel (b.cu:41), block (1,0,0), "
        "thread (31,0,0): element 3 of k_cache",
    ),
    "never written, of its own": (
        "initcheck",
        """
        ========= Uninitialized __global__ memory read of size 2 bytes
        =========     at kernel+0x70 in b.py:41
        =========     by thread (31,0,0) in block (1,0,0)
        =========     Address 0x7f1000000000
        """,
        "initcheck: Uninitialized __global__ memory read of size 2 bytes at kernel (b.py:41), block (1,0,0), "
        "thread (31,0,0): memory that the kernel allocated",
    ),
    "a race": (
        "racecheck",
        """
        ========= COMPUTE-SANITIZER
        ========= Warning: Race reported between Read access at a+0x10 in k.cu:1
        =========     and Write access at a+0x20 in k.cu:2 [4 hazards]
        =========
        ========= Error: Race reported between Write access at sum(int *)+0x90 in probe.cu:13
        =========     and Read access at sum(int *)+0xa0 in probe.cu:14 [2048 hazards]
        =========     and Read access at sum(int *)+0xb0 in probe.cu:15 [2 hazards]
        =========
        ========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
        """,
        "racecheck: in shared memory, a write at sum (probe.cu:13) races with a read at sum (probe.cu:14) and a read "
        "at sum (probe.cu:15) (2050 hazards)",
    ),
    "a race, in an older form": (
        "racecheck",
        """
        ========= ERROR: Race reported between Read access at 0x6360 in /home/n/convolution.cu:123:convolve(int, int*)
        =========     and Write access at 0x1fe0 in /home/n/convolution.cu:63:convolve(int, int*) [1088 hazards]
        """,
        "racecheck: in shared memory, a read at convolve (convolution.cu:123) races with a write at convolve "
        "(convolution.cu:63) (1088 hazards)",
    ),
    "a barrier": (
        "synccheck",
        """
        ========= Barrier error detected. Divergent thread(s) in block.
        =========     at kernel(int *)+0x15520 in a.cu:7
        =========     by thread (128,0,0) in block (0,0,0)
        """,
        "synccheck: Barrier error detected. Divergent thread(s) in block at kernel (a.cu:7), block (0,0,0), "
        "thread (128,0,0)",
    ),
    "a form that nobody knows": (
        "memcheck",
        """
        ========= Something new has happened
        =========     somewhere
        =========     Host Frame: [0x2f26f0]
        """,
        "memcheck: Something new has happened; somewhere",
    ),
    "another form of a race": (
        "racecheck",
        """
        ========= Error: Potential WAW hazard detected at __shared__ 0x1800 in block (0,1,1) :
        =========     Write Thread (64,0,0) at a+0x990 in k.cu:3
        """,
        "racecheck: Error: Potential WAW hazard detected at __shared__ 0x1800 in block (0,1,1) :; "
        "Write Thread (64,0,0) at a+0x990 in k.cu:3",
    ),
    "nothing": (
        "memcheck",
        """
        ========= COMPUTE-SANITIZER
        ========= Program hit cudaErrorLaunchFailure (error 719) due to "unspecified launch failure"
        =========     Host Frame: [0x123456] in libcuda.so
        ========= Warning: something is slow
        =========     for a reason
        ========= Target application returned an error
        ========= ERROR SUMMARY: 0 errors
        """,
        "",
    ),
}


@pytest.mark.parametrize("what", SAID)
def test_a_report_becomes_one_sentence(what: str) -> None:
    tool, text, sentence = SAID[what]
    assert said(dedent(text), tool, PLACES) == sentence


def test_without_places_the_rest_is_said() -> None:
    tool, text, sentence = SAID["behind a tensor"]
    assert said(dedent(text), tool) == sentence.replace("k_cache", "1024 bytes that the kernel allocated")


# ---- the log


def test_what_comes_late_is_said_to_be_late_and_waited_for_longer(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("old\n")
    log = Log(str(path), at=4)
    log.begin()
    assert (log.new(), log.late) == ("", False)
    waited = log.settled
    with open(path, "a") as file:
        file.write("late\n")
    log.begin()
    assert (log.settled > waited, log.new(), log.late) == (True, "late\n", True)
    log.begin()
    assert (log.new(), log.late) == ("", False)
    tool, text, sentence = SAID["behind a tensor"]
    assert said(dedent(text), tool, PLACES, late=True).startswith(f"{sentence}; said late")


def test_a_log_is_read_when_nothing_more_comes(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch()
    log = Log(str(path), settled=0.2)
    pid = os.fork()
    if pid == 0:
        for _ in range(4):
            time.sleep(0.05)
            with open(path, "a") as file:
                file.write("x")
        os._exit(0)
    log.begin()
    assert log.new() == "xxxx"
    os.waitpid(pid, 0)


# ---- where it is, and where not


def program_in(folder: Path, text: str = "#!/bin/sh\n") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "compute-sanitizer"
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_it_is_found_on_the_path_and_in_the_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = program_in(tmp_path / "one"), program_in(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(tmp_path / "one"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert found("memcheck", "cuda", None) == Sanitizer(str(first), "memcheck")
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert found("initcheck", "cuda:1", True) == Sanitizer(str(second), "initcheck")


@pytest.mark.parametrize(
    ("tool", "device", "isolate", "sentence"),
    [
        ("memchek", "cuda", None, "there is no such tool; choose memcheck, racecheck, initcheck, synccheck."),
        ("memcheck", "cpu", None, "watches CUDA kernels, and the device is cpu"),
        ("memcheck", "cuda", False, "leave out --no-isolate"),
        ("memcheck", "cuda", None, "comes with the CUDA toolkit"),
    ],
)
def test_where_it_cannot_be_used_one_sentence_says_so(
    tool: str, device: str, isolate: bool | None, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagefuzz.fuzz.sanitizer.shutil.which", lambda *_, **__: None)
    with pytest.raises(NoSanitizer, match=sentence.replace(".", r"\.")):
        found(tool, device, isolate)


def test_the_command_line_says_so_too(tmp_path: Path) -> None:
    done = pytest_in(tmp_path, "--sanitize", "memcheck", "--device", "cpu")
    assert done.code == pytest.ExitCode.USAGE_ERROR
    assert done.text.strip().startswith("ERROR: --sanitize memcheck: compute-sanitizer watches CUDA kernels"), done.text


# ---- the arena


@pytest.mark.parametrize("name", ["torch_slot_mapping", "torch_reshape_and_cache", "torch_paged_decode_attention"])
def test_a_run_is_observed_there_as_in_the_other_arena(name: str) -> None:
    load_own()
    kernel = registered()[name]
    plain = Runner(PlainArena(torch.device("cpu")), interpreted=True)
    assert plain.limits.cache_bytes == 1 << 26
    seen: list[Case] = []

    def look(case: Case) -> None:
        found, expected = plain.observe(kernel, case), runner().observe(kernel, case)
        assert same(found.output, expected.output) and same(found.watched, expected.watched), case.one_line()
        assert same(found.changes, expected.changes) and found.touched == {}, case.one_line()
        seen.append(case)

    each_case(STRATEGIES[kernel.operation.name](kernel.declared, plain.limits, ()), 40, 5, look)
    assert len(seen) == 40


def test_every_buffer_is_an_allocation_of_its_size_and_a_write_shows() -> None:
    arena = PlainArena(torch.device("cpu"))
    case = ReshapeAndCacheCase(num_kv_heads=1, head_dim=4, block_size=2, num_blocks=2, slots=(0, 3))
    placed = dict(zip(arguments_of(case).values, arena.place(arguments_of(case)), strict=True))
    sizes = {name: (address, count, itemsize) for name, address, count, itemsize in arena.addresses}
    for name in ("k_cache", "slot_mapping"):
        tensor = placed[name]
        assert isinstance(tensor, torch.Tensor)
        assert sizes[name] == (tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor.element_size())
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    assert not arena.changes()
    assert isinstance(placed["k_cache"], torch.Tensor)
    placed["k_cache"].view(-1)[5] = 1
    changes = arena.changes()
    assert list(changes) == ["k_cache"] and np.array_equal(changes["k_cache"].elements, [5])
    arena.forget()
    assert not arena.memory


def test_a_case_with_far_offsets_does_not_fit() -> None:
    arena = PlainArena(torch.device("cpu"))
    case = ReshapeAndCacheCase(num_kv_heads=1, head_dim=1, block_size=1, num_blocks=1 << 31, slots=(0,))
    with pytest.raises(InvalidCase, match="k_cache takes 8589934592 bytes, more than the 67108864 that there are here"):
        arena.place(arguments_of(case))
    assert not arena.places and not arena.memory


@pytest.mark.parametrize("poisoned", [True, False])
def test_for_initcheck_nothing_is_written_that_the_case_does_not_write(
    poisoned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled: list[bool] = []
    fill = torch.Tensor.fill_

    def noted(*given: Any) -> torch.Tensor:
        filled.append(True)
        return fill(*given)

    monkeypatch.setattr(torch.Tensor, "fill_", noted)

    def slots(block_tables: torch.Tensor, seq_ids: object, positions: torch.Tensor, block_size: int) -> torch.Tensor:
        torch.empty(8)
        return positions.long()

    run = Runner(PlainArena(torch.device("cpu"), filled=poisoned), interpreted=True, poisoned=poisoned)
    run.observe(Kernel("under test", OPERATIONS["slot_mapping"], slots, Declaration()), one_token(1))
    assert bool(filled) == poisoned


# ---- the whole of it, with a tool that says what the kernel wants it to

TOOL = """\
#!{python}
import os, subprocess, sys
words = sys.argv[1:]
given = {{}}
while words[0].startswith("--"):
    given[words[0]] = words[1]
    del words[:2]
assert given["--tool"] == "memcheck" and given["--print-limit"] == "0", given
assert os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
with open(given["--log-file"], "w") as log:
    log.write("========= COMPUTE-SANITIZER\\n")
done = subprocess.run(words, close_fds=False, env={{**os.environ, "THE_LOG": given["--log-file"]}})
with open(given["--log-file"], "a") as log:
    log.write("========= ERROR SUMMARY: 0 errors\\n")
sys.exit(done.returncode)
"""
ADAPTER = '''
import os
import time
from pagefuzz import kernel
from pagefuzz.kernels.torch_slot_mapping import torch_slot_mapping

REPORT = """\\
========= Invalid __global__ read of size 4 bytes
=========     at slots_kernel+0xec0 in adapter.py:33
=========     by thread (5,0,0) in block (0,0,0)
=========     Access to {at:#x} is out of bounds
=========     and is 1 bytes after the nearest allocation at {first:#x} of size {size:,} bytes
=========
"""

def report(table):
    size = table.untyped_storage().nbytes()
    first = table.untyped_storage().data_ptr()
    with open(os.environ["THE_LOG"], "a") as log:
        log.write(REPORT.format(at=first + size, first=first, size=size))

def planted(name, act):
    @kernel("slot_mapping", name=name)
    def slots(block_tables, seq_ids, positions, block_size):
        if (positions >= 2).any():
            act(block_tables)
        return torch_slot_mapping(block_tables, seq_ids, positions, block_size)

def die(table):
    report(table)
    os.abort()

planted("{prefix}reads", report)
planted("{prefix}dies", die)
planted("{prefix}aborts", lambda table: os.abort())
planted("{prefix}good", lambda table: None)
'''
LINE = (
    "memcheck: Invalid __global__ read of size 4 bytes at slots_kernel (adapter.py:33), block (0,0,0), thread (5,0,0): "
)


@pytest.fixture
def sessions(tmp_path: Path) -> Iterator[Callable[..., Session]]:
    """Makes sessions on the CPU under the planted tool; their processes end with the test."""
    prefix = f"{tmp_path.name}_"  # kernels are registered once a process
    adapter = tmp_path / "adapter.py"
    adapter.write_text(ADAPTER.replace("{prefix}", prefix))
    load_adapter(str(adapter))
    program = program_in(tmp_path / "bin", TOOL.format(python=sys.executable))
    made: list[Session] = []

    def make(sanitized: bool = True) -> Session:
        tool = Sanitizer(str(program), "memcheck") if sanitized else None
        kernels = {name.removeprefix(prefix): kernel for name, kernel in registered().items() if prefix in name}
        made.append(Session("cpu", 80, 1, kernels, tmp_path, adapters=(str(adapter),), sanitizer=tool))
        return made[-1]

    yield make
    for session in made:
        session.close()


def test_a_report_is_a_finding_of_its_case_and_the_process_stays(sessions: Callable[..., Session]) -> None:
    session = sessions()
    runs = session.runner_for(session.kernels["reads"])
    assert runs.limits == Limits(1 << 26)
    worker = None
    for _ in range(2):
        assert runs.observe(session.kernels["reads"], one_token(1)).finished
        seen = runs.observe(session.kernels["reads"], one_token(2))
        assert seen.ended == f"{LINE}0 bytes after the end of block_tables" and seen.output is None
        assert worker in (None, runs.worker)  # type: ignore[attr-defined]
        worker = runs.worker  # type: ignore[attr-defined]
    log = runs.log  # type: ignore[attr-defined]
    assert Path(log).exists()
    session.close()
    assert not Path(log).exists()


def test_a_process_that_dies_says_what_was_reported_before(sessions: Callable[..., Session]) -> None:
    session = sessions()
    runs = session.runner_for(session.kernels["dies"])
    assert runs.observe(session.kernels["dies"], one_token(1)).finished
    ended = runs.observe(session.kernels["dies"], one_token(2)).ended
    assert ended.startswith(f"{LINE}0 bytes after the end of "), ended
    assert runs.observe(session.kernels["aborts"], one_token(2)).ended.startswith("crashed: ")
    assert runs.observe(session.kernels["dies"], one_token(3)).ended.startswith("memcheck: ")
    assert runs.observe(session.kernels["good"], one_token(3)).finished


def test_it_is_shrunk_saved_and_replayed(sessions: Callable[..., Session]) -> None:
    session = sessions()
    assert session.examples == 2  # of 80
    kernel = session.kernels["reads"]
    with pytest.raises(InvariantViolated) as failure:
        session.fuzz(kernel, 0, 60)
    text = str(failure.value)
    assert f"I0 violated by {kernel.name}: a case inside the declaration runs" in text and LINE in text
    (path,) = failures(session.home)
    saved, case = read(path)
    assert saved.invariant == "I0" and saved.seen.startswith(LINE)
    assert [token.position for token in case.tokens] == [2]  # type: ignore[attr-defined]
    with pytest.raises(InvariantViolated, match="still fails: I0 violated by"):
        session.replay(saved, case, "FILE")
    with pytest.raises(NotJudged, match=r"^unsupported: memcheck has seen it, and nothing else does; add --sanitize m"):
        sessions(sanitized=False).replay(saved, case, "FILE")
    assert session.fuzz(session.kernels["good"], 0, 10).cases == 10


def test_a_saved_case_that_does_not_fit_is_unsupported(sessions: Callable[..., Session]) -> None:
    from pagefuzz.fuzz.saved import token

    session = sessions()
    load_own()
    far = ReshapeAndCacheCase(num_kv_heads=1, head_dim=1, block_size=1, num_blocks=1 << 31, slots=(0,))
    saved, case = from_token(token("torch_reshape_and_cache", "I9", far))
    with pytest.raises(NotJudged, match=r"^unsupported: k_cache takes 8589934592 bytes, .* \(under --sanitize\)\.$"):
        session.replay(saved, case, "TOKEN")


def test_a_tool_that_does_not_start_says_why(sessions: Callable[..., Session], tmp_path: Path) -> None:
    session = sessions()
    program_in(tmp_path / "bin", "#!/bin/sh\necho '========= Error: no device supported' > $4\nexit 3\n")
    with pytest.raises(RuntimeError, match=r"did not start: exit status 3 ========= Error: no device supported"):
        session.runner_for(session.kernels["good"]).limits  # noqa: B018  # starts it


def test_what_it_asks_for() -> None:
    words = Sanitizer("/bin/compute-sanitizer", "initcheck").command("LOG")
    assert words[:5] == ["/bin/compute-sanitizer", "--tool", "initcheck", "--log-file", "LOG"]
    assert words[-2:] == ["--check-api-memory-access", "no"]
    assert "--padding" in Sanitizer("x", "memcheck").command("LOG")


def test_the_command_line_finds_shrinks_and_replays_it(tmp_path: Path) -> None:
    program = program_in(tmp_path / "bin", TOOL.format(python=sys.executable))
    on_the_cpu = f"""
from hypothesis import settings
from pagefuzz.fuzz import sanitizer

settings.register_profile("tiny", max_examples=1600, deadline=None)
sanitizer.found = lambda tool, device, isolate: sanitizer.Sanitizer({str(program)!r}, tool)
"""
    (tmp_path / "adapter.py").write_text(on_the_cpu + ADAPTER.replace("{prefix}", ""))
    options = ("--adapter", "adapter.py", "--sanitize", "memcheck", "--hypothesis-profile", "tiny")
    done = pytest_in(tmp_path, *options, "--kernel", "reads", "--kernel", "good")
    assert done.code == 1 and "1 failed, 1 passed" in done.text, done.text
    assert "profile tiny: 40 cases a kernel" in done.text and "(10 times that under memcheck)" in done.text
    assert done.command("seen").startswith(LINE)
    assert done.command("again").endswith("--adapter adapter.py --sanitize memcheck")
    again = pytest_in(tmp_path, *options, "--replay", ".pagefuzz/failures")
    assert again.code == 1 and "still fails: I0 violated by reads" in again.text, again.text
    without = pytest_in(tmp_path, *options[:2], "--replay", ".pagefuzz/failures")
    assert without.code == 3 and "add --sanitize memcheck" in without.text, without.text
