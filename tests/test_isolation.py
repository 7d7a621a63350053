"""Kernels that crash, hang, leave or eat the memory: each is a finding like another, and harms nobody else."""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from pagefuzz.fuzz import plugin
from pagefuzz.fuzz.arena import EVERY, CpuArena
from pagefuzz.fuzz.device_arena import DeviceArena
from pagefuzz.fuzz.drawing import each_case
from pagefuzz.fuzz.isolation import messages
from pagefuzz.fuzz.isolation.endings import last_line
from pagefuzz.fuzz.isolation.forks import channels, in_a_fork, of_adapters
from pagefuzz.fuzz.isolation.messages import Recipe
from pagefuzz.fuzz.isolation.parent import Isolated, is_checked_first
from pagefuzz.fuzz.run import Runner
from pagefuzz.fuzz.saved import read
from pagefuzz.fuzz.session import Session, load_adapter, load_own, runner_on
from pagefuzz.fuzz.shrink import shrink
from pagefuzz.fuzz.verdict import VIOLATION, Judge
from pagefuzz.kernels.operations import OPERATIONS
from pagefuzz.kernels.pairs import with_pairs
from pagefuzz.kernels.registry import Declaration, Kernel, registered
from pagefuzz.kernels.torch_slot_mapping import torch_slot_mapping
from pagefuzz.oracles.observation import Observation
from pagefuzz.strategies import STRATEGIES
from pagefuzz.strategies.case import Case, InvalidCase, Sequence, arguments_of
from pagefuzz.strategies.number_formats import ITEMSIZE
from pagefuzz.strategies.reshape_and_cache import ReshapeAndCacheCase
from pagefuzz.strategies.slot_mapping import SlotMappingCase, Token
from pagefuzz.tests.commands import TREE, counts, environ, failures, group, pytest_in
from pagefuzz.tests.killing import runner

LIBC = ctypes.CDLL(None)


def one_token(position: int, blocks: int = 4) -> SlotMappingCase:
    sequence = Sequence(tuple(range(blocks)), (), blocks)
    return SlotMappingCase(block_size=1, num_blocks=blocks, sequences=(sequence,), tokens=(Token(0, position),))


def isolated(call: Callable[..., Any], **more: Any) -> Isolated:
    kernel = Kernel("under test", OPERATIONS["slot_mapping"], call, Declaration())
    return Isolated([kernel], lambda: Runner(CpuArena(), interpreted=True), **more)


def observe(runs: Isolated, case: Case) -> Observation:
    (kernel,) = runs.kernels.values()
    return runs.observe(kernel, case)


@pytest.fixture
def started() -> Iterator[Callable[..., Isolated]]:
    """Makes isolated kernels, whose processes end with the test."""
    made: list[Isolated] = []

    def make(call: Callable[..., Any], **more: Any) -> Isolated:
        made.append(isolated(call, **more))
        return made[-1]

    yield make
    for each in made:
        each.close()


def at(position: int, act: Callable[[], object]) -> Callable[..., torch.Tensor]:
    """The right slot mapping, but for a token at `position`."""

    def slots(block_tables: Any, seq_ids: Any, positions: Any, block_size: int) -> torch.Tensor:
        if (positions == position).any():
            act()
        return torch_slot_mapping(block_tables, seq_ids, positions, block_size)

    return slots


def _raise(error: BaseException, *arguments: object) -> NoReturn:
    raise error


def _spin() -> None:
    while True:
        pass


FATAL: dict[str, tuple[Callable[[], object], str]] = {
    "reads": (lambda: ctypes.string_at(8, 4), r"crashed: signal 11, SIGSEGV \(at test_isolation\.py, line \d+\)$"),
    "writes": (lambda: ctypes.memset(8, 1, 4), r"crashed: signal 11, SIGSEGV \(at test_isolation\.py, line \d+\)$"),
    "aborts": (os.abort, r"crashed: signal 6, SIGABRT \(at test_isolation\.py, line \d+\)$"),
    "leaves": (lambda: os._exit(0), r"crashed: exit status 0$"),
    "is killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), r"crashed: signal 9, SIGKILL$"),
    "says why": (
        lambda: (os.write(2, b"free(): invalid pointer\n"), os.abort()),
        r"crashed: signal 6, SIGABRT \(at test_isolation\.py, line \d+\): free\(\): invalid pointer$",
    ),
    "closes all": (lambda: os.closerange(3, 4096), r"crashed: exit status 70$"),
    "gives way": (
        lambda: os.execv("/bin/sleep", ["sleep", "1000"]),
        r"crashed: it closed the files of pagefuzz and went on$",
    ),
    "spins": (_spin, r"hung: no result within 0\.5 s \(at test_isolation\.py, line \d+\)$"),
    "pauses": (lambda: LIBC.pause(), r"hung: no result within 0\.5 s \(at test_isolation\.py, line \d+\)$"),
    "pauses, deaf": (
        lambda: (signal.signal(signal.SIGABRT, signal.SIG_IGN), LIBC.pause()),
        r"hung: no result within 0\.5 s$",
    ),
}


@pytest.mark.parametrize("what", FATAL)
def test_what_ends_the_process_is_observed_and_the_next_case_runs(what: str, started: Callable[..., Isolated]) -> None:
    act, said = FATAL[what]
    runs = started(at(2, act), limit=0.5)
    for _ in range(3):
        assert observe(runs, one_token(1)).finished
        assert runs.worker is not None
        before = runs.worker.pid
        seen = observe(runs, one_token(2))
        assert not seen.finished and re.search(said, seen.ended), seen.ended
        assert not Path(f"/proc/{before}").exists()
    assert observe(runs, one_token(3)).finished


def test_a_kernel_that_hangs_at_once_has_the_time_of_a_warm_up_once(started: Callable[..., Isolated]) -> None:
    runs = started(at(2, _spin), limit=0.2)
    assert observe(runs, one_token(2)).ended.startswith("hung: no result within 0.6 s")
    assert observe(runs, one_token(2)).ended.startswith("hung: no result within 0.2 s")


def test_shrinking_has_less_patience_and_an_end(started: Callable[..., Isolated]) -> None:
    runs = started(at(2, _spin), limit=30.0)
    assert observe(runs, one_token(1)).finished
    with runs.hurried() as tired:
        assert observe(runs, one_token(2)).ended.startswith("hung: no result within 1 s")
        assert not tired()
        runs.lost += 60.0
        assert tired()
    with runs.hurried() as tired:
        assert not tired()


def same(mine: Any, theirs: Any) -> bool:
    if type(mine) is not type(theirs):
        return False
    if isinstance(mine, np.ndarray):
        return mine.dtype == theirs.dtype and np.array_equal(mine, theirs)
    if is_dataclass(mine):
        return all(same(getattr(mine, item.name), getattr(theirs, item.name)) for item in fields(mine))
    if isinstance(mine, dict):
        return mine.keys() == theirs.keys() and all(same(mine[key], theirs[key]) for key in mine)
    if isinstance(mine, list | tuple):
        return len(mine) == len(theirs) and all(map(same, mine, theirs))
    return bool(mine == theirs)


@pytest.mark.parametrize("name", ["torch_slot_mapping", "triton_reshape_and_cache", "torch_paged_decode_attention"])
def test_an_isolated_run_is_observed_as_any_other(name: str) -> None:
    load_own()
    torch.set_num_threads(1)  # as a run does: a fork has no threads that a matrix product could be shared with
    kernel = registered()[name]
    runs = Isolated([kernel], lambda: Runner(CpuArena(), interpreted=True))
    seen: list[Case] = []

    def look(case: Case) -> None:
        seen.append(case)
        try:
            expected = runner().observe(kernel, case)
        except InvalidCase as invalid:
            with pytest.raises(InvalidCase, match=re.escape(str(invalid))):
                runs.observe(kernel, case)
            return
        found = runs.observe(kernel, case)
        assert same(found, expected), case.one_line()

    try:
        assert runs.limits == runner().limits
        each_case(STRATEGIES[kernel.operation.name](kernel.declared, runner().limits, ()), 40, 5, look)
        assert runs.worker is not None and len(seen) == 40
    finally:
        runs.close()


def test_a_case_that_does_not_fit_is_invalid_there_too(started: Callable[..., Isolated]) -> None:
    runs = started(lambda *arguments: None)
    many = ReshapeAndCacheCase(num_kv_heads=1, head_dim=1, block_size=1, num_blocks=2**60, slots=(0,))
    with pytest.raises(InvalidCase, match="more than the"):
        observe(runs, many)


def test_memory_has_a_limit_and_raises(started: Callable[..., Isolated]) -> None:
    def eat() -> None:
        kept = []
        while True:
            kept.append(bytearray(1 << 24))

    runs = started(at(2, eat), memory=1 << 28)
    assert observe(runs, one_token(1)).finished
    raised = observe(runs, one_token(2)).raised
    assert raised is not None and raised.type == "MemoryError"
    assert observe(runs, one_token(3)).finished


def test_memory_that_an_earlier_case_kept_accuses_no_later_one(started: Callable[..., Isolated]) -> None:
    kept: list[bytearray] = []

    def eat() -> None:
        for size in (1 << 24, 1 << 16, 1 << 8):
            while True:
                try:
                    kept.append(bytearray(size))
                except MemoryError:
                    break

    runs = started(at(2, eat), memory=1 << 28)
    assert observe(runs, one_token(1)).finished
    observe(runs, one_token(2))
    assert observe(runs, one_token(3)).finished


def test_a_child_of_the_kernel_that_comes_back_answers_nothing(started: Callable[..., Isolated]) -> None:
    runs = started(at(2, os.fork))
    for _ in range(3):
        assert observe(runs, one_token(2)).finished
        assert observe(runs, one_token(1)).finished


def test_what_a_kernel_prints_is_not_lost(started: Callable[..., Isolated], capfd: pytest.CaptureFixture[str]) -> None:
    runs = started(at(2, lambda: (print("from Python"), os.write(2, b"from C\n"))))
    assert observe(runs, one_token(2)).finished
    assert capfd.readouterr() == ("from Python\n", "from C\n")


def test_memory_that_an_earlier_case_kept_fails_no_later_one(started: Callable[..., Isolated]) -> None:
    kept: list[bytearray] = []

    def slots(block_tables: Any, seq_ids: Any, positions: Any, block_size: int) -> torch.Tensor:
        wanted = bytearray(1 << 27)
        if (positions == 2).any():
            kept.append(wanted)
        return torch_slot_mapping(block_tables, seq_ids, positions, block_size)

    runs = started(slots, memory=(1 << 28) + (1 << 26))
    for position in (2, 2, 2, 1):
        assert observe(runs, one_token(position)).finished


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit, SystemExit, StopIteration])
def test_whatever_a_kernel_raises_is_observed(error: type[BaseException], started: Callable[..., Isolated]) -> None:
    runs = started(at(2, partial(_raise, error("no"))))
    for _ in range(2):
        raised = observe(runs, one_token(2)).raised
        assert raised is not None and raised.type == error.__name__
        assert observe(runs, one_token(1)).finished


@pytest.mark.parametrize("starts", ["fork", "another program"])
@pytest.mark.parametrize("dies", [True, False])
def test_what_a_kernel_starts_ends_with_its_process(
    starts: str, dies: bool, started: Callable[..., Isolated], tmp_path: Path
) -> None:
    def act() -> None:
        if starts == "fork":
            pid = os.fork()
            if pid == 0:
                time.sleep(1000)
        else:
            pid = subprocess.Popen(["sleep", "1000"]).pid
        (tmp_path / "pid").write_text(str(pid))
        if dies:
            os.abort()

    runs = started(at(2, act))
    assert observe(runs, one_token(2)).finished is not dies
    pid = int((tmp_path / "pid").read_text())
    assert dies or _lives(pid)
    runs.close()
    for _ in range(100):
        if not _lives(pid):
            break
        time.sleep(0.05)
    assert not _lives(pid)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_kernel_that_kills_its_group_kills_itself_alone(started: Callable[..., Isolated]) -> None:
    runs = started(at(2, lambda: os.killpg(0, signal.SIGKILL)))
    assert observe(runs, one_token(2)).ended == "crashed: signal 9, SIGKILL"


def _write_everywhere() -> None:
    for file in channels():
        with suppress(OSError):
            os.write(file, b"garbage" * 10)


def test_a_kernel_reaches_no_socket_but_its_own(started: Callable[..., Isolated]) -> None:
    reading, writing = os.pipe()
    other = started(at(9, lambda: None))
    assert observe(other, one_token(1)).finished
    runs = started(at(2, _write_everywhere))
    said = "crashed: what it left behind could not be looked at: it wrote to a socket of pagefuzz"
    for turn in range(2):
        assert observe(runs, one_token(2)).ended == said
        assert observe(runs, one_token(1)).finished
        assert observe(other, one_token(1)).finished and other.served == ["under test"] * (2 + turn)
    os.close(writing)
    assert os.read(reading, 100) == b""
    os.close(reading)


def test_what_an_adapter_opened_is_left_to_its_kernel(started: Callable[..., Isolated], tmp_path: Path) -> None:
    (tmp_path / "adapter.py").write_text(
        "import os\nfrom pagefuzz import kernel\n"
        "PIPE = os.pipe()\nkernel('slot_mapping', name='opens')(lambda *arguments: None)\n"
    )
    before = set(of_adapters)
    load_adapter(str(tmp_path / "adapter.py"))
    reading, writing = sorted(of_adapters - before)
    runs = started(at(2, lambda: os.write(writing, b"seen")))
    assert observe(runs, one_token(2)).finished
    os.close(writing)
    assert os.read(reading, 100) == b"seen"
    os.close(reading)
    of_adapters.difference_update((reading, writing))


def test_a_file_that_has_the_number_of_a_closed_one_of_ours_is_not_touched(
    started: Callable[..., Isolated], tmp_path: Path
) -> None:
    (tmp_path / "precious").write_text("precious")

    def act() -> None:
        os.closerange(3, 4096)
        for _ in range(40):
            os.open(tmp_path / "precious", os.O_RDWR)

    runs = started(at(2, act))
    assert observe(runs, one_token(2)).ended == "crashed: exit status 70"
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_kernel_that_breaks_what_observes_it_is_accused(started: Callable[..., Isolated]) -> None:
    def act() -> None:
        os.pread = partial(_raise, ValueError("not any more"))

    runs = started(at(2, act))
    said = "crashed: what it left behind could not be looked at: ValueError: not any more"
    for _ in range(2):
        assert observe(runs, one_token(2)).ended == said
        assert observe(runs, one_token(1)).finished


def test_a_fault_of_pagefuzz_is_no_kernels(monkeypatch: pytest.MonkeyPatch, started: Callable[..., Isolated]) -> None:
    monkeypatch.setattr(CpuArena, "changes", partial(_raise, ValueError("ours")))
    runs = started(at(2, lambda: None))
    with pytest.raises(
        RuntimeError, match=r"(?s)^while a kernel in a process of its own was observed:.*ValueError: ours$"
    ):
        observe(runs, one_token(1))


def test_a_kernel_does_not_die_of_what_another_destroyed_in_their_process() -> None:
    destroyed: list[bool] = []

    def dies(block_tables: Any, seq_ids: Any, positions: Any, block_size: int) -> torch.Tensor:
        if destroyed:
            os.abort()
        return torch_slot_mapping(block_tables, seq_ids, positions, block_size)

    calls = {"destroys": at(2, lambda: destroyed.append(True)), "dies": dies, "aborts": at(2, os.abort)}
    kernels = [Kernel(name, OPERATIONS["slot_mapping"], call, Declaration()) for name, call in calls.items()]
    runs = Isolated(kernels, lambda: Runner(CpuArena(), interpreted=True))
    try:
        assert runs.observe(kernels[0], one_token(2)).finished
        assert runs.observe(kernels[1], one_token(2)).finished
        assert runs.served == ["dies"]  # in a fresh process
        assert runs.observe(kernels[2], one_token(2)).ended.startswith("crashed: signal 6")
    finally:
        runs.close()


@pytest.mark.parametrize("message", ["CUDA out of memory. Tried", "[enforce fail] can't allocate memory: you tried"])
def test_a_process_that_ran_out_keeps_nothing(message: str, started: Callable[..., Isolated]) -> None:
    runs = started(at(2, partial(_raise, RuntimeError(message))))
    assert observe(runs, one_token(1)).finished
    raised = observe(runs, one_token(2)).raised
    assert raised is not None and raised.message == message
    assert runs.worker is None


def test_the_arena_of_the_run_is_out_of_reach(started: Callable[..., Isolated]) -> None:
    arena = runner().arena
    assert isinstance(arena, CpuArena) and not arena._populated()
    runs = started(at(2, lambda: ctypes.memset(arena.base + arena.size // 2, 1, 1)))
    observe(runs, one_token(2))
    assert not arena._populated()


def test_a_process_may_take_its_share_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    module = SimpleNamespace(set_per_process_memory_fraction=shares.append)
    monkeypatch.setattr("pagefuzz.fuzz.session.device_module", lambda device: module)
    monkeypatch.setattr("pagefuzz.fuzz.device_arena.arena_bytes", lambda free, workers: 1 << 20)
    assert isinstance(runner_on("meta", 4).arena, DeviceArena)
    assert shares == [0.225]


@pytest.mark.parametrize("end", ["appended to", "read by nobody"])
def test_where_standard_error_leads_is_no_fault_of_a_kernel(
    end: str, started: Callable[..., Isolated], tmp_path: Path
) -> None:
    reading, writing = os.pipe()
    appending = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.close(reading)
    kept = os.dup(2)
    os.dup2(appending if end == "appended to" else writing, 2)
    try:
        runs = started(at(2, lambda: os.write(2, b"from C\n" * 20_000)))
        for _ in range(2):
            assert observe(runs, one_token(2)).finished
    finally:
        os.dup2(kept, 2)
        for file in (kept, appending, writing):
            os.close(file)
    assert (tmp_path / "log").read_text() == ("from C\n" * 40_000 if end == "appended to" else "")


def _log() -> None:
    try:
        _raise(ValueError("nothing grave"))
    except ValueError:
        os.write(2, traceback.format_exc().encode())


def _wait_beside() -> None:
    threading.Thread(target=_wait, daemon=True).start()
    time.sleep(0.1)


def _wait() -> None:
    time.sleep(1000)


@pytest.mark.parametrize("before", [_log, _wait_beside])
def test_the_line_that_is_named_is_where_it_crashed(
    before: Callable[[], None], started: Callable[..., Isolated]
) -> None:
    def act() -> None:
        before()
        os.abort()

    line = act.__code__.co_firstlineno + 2
    ended = observe(started(at(2, act)), one_token(2)).ended
    assert ended.startswith(f"crashed: signal 6, SIGABRT (at test_isolation.py, line {line})"), ended


def test_a_file_whose_name_begins_like_a_folder_of_ours_is_the_authors(started: Callable[..., Isolated]) -> None:
    named: dict[str, Any] = {"os": os}
    text = "def crash():\n    os.abort()\ndef fail():\n    raise ValueError('no')\n"
    exec(compile(text, str(TREE / "fuzz_mine.py"), "exec"), named)
    assert observe(started(at(2, named["crash"])), one_token(2)).ended.endswith("(at fuzz_mine.py, line 2)")
    raised = observe(started(at(2, named["fail"])), one_token(2)).raised
    assert raised is not None and raised.where == "fuzz_mine.py, line 4"


def test_no_memory_left_to_answer_with_accuses_no_later_case(started: Callable[..., Isolated]) -> None:
    ran = []

    def tight() -> None:
        ran.append(1)
        if len(ran) > 1:  # in this process
            full = SimpleNamespace(dumps=once, loads=pickle.loads, HIGHEST_PROTOCOL=pickle.HIGHEST_PROTOCOL)
            vars(messages).update(pickle=full)

    def once(*arguments: Any) -> NoReturn:
        vars(messages).update(pickle=pickle)
        raise MemoryError

    runs = started(at(2, tight))
    for _ in range(3):
        assert observe(runs, one_token(2)).finished


def test_an_interrupted_start_leaves_nothing_half_begun() -> None:
    heard: list[int] = []

    def hear(number: int, frame: object) -> None:
        heard.append(number)
        raise KeyboardInterrupt

    def make() -> Runner:
        if not heard:
            os.kill(os.getppid(), signal.SIGUSR1)
            time.sleep(60)
        return Runner(CpuArena(), interpreted=True)

    kernel = Kernel("under test", OPERATIONS["slot_mapping"], torch_slot_mapping, Declaration())
    runs = Isolated([kernel], make)
    before = signal.signal(signal.SIGUSR1, hear)
    try:
        with pytest.raises(KeyboardInterrupt):
            assert runs.limits
        assert heard and runs.limits
        assert observe(runs, one_token(2)).finished
    finally:
        signal.signal(signal.SIGUSR1, before)
        runs.close()


# ---- guard pages


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("blocks", [4, 8])
def test_an_access_right_behind_a_block_table_is_a_crash_that_names_it(
    blocks: int, reads: bool, started: Callable[..., Isolated]
) -> None:
    def slots(block_tables: Any, seq_ids: Any, positions: Any, block_size: int) -> torch.Tensor:
        if (positions == 2).any():
            behind = block_tables.data_ptr() + block_tables.numel() * block_tables.element_size()
            ctypes.string_at(behind, 4) if reads else ctypes.memset(behind, 1, 1)
        return torch_slot_mapping(block_tables, seq_ids, positions, block_size)

    runs = started(slots)
    assert observe(runs, one_token(1, blocks)).finished
    ended = observe(runs, one_token(2, blocks)).ended
    assert re.fullmatch(
        r"crashed: signal 11, SIGSEGV \(at test_isolation\.py, line \d+\), at what lies right behind block_tables",
        ended,
    )
    with runs.hurried():
        assert observe(runs, one_token(2, blocks)).ended.endswith(")")
    assert observe(runs, one_token(3, blocks)).finished


def test_ends_are_as_near_to_the_guard_pages_as_alignment_allows() -> None:
    load_own()
    arena = CpuArena()
    arena.guarded = EVERY
    gaps: dict[str, set[int]] = {}

    def look(case: Case) -> None:
        try:
            arguments = arguments_of(case)
            placed = arena.place(arguments)
        except InvalidCase:
            assert not arena.guards
            return
        starts = {buffer.name: start for start, buffer in arena.places}
        guarded = [buffer for buffer in arguments.buffers if not buffer.is_cache and buffer.size]
        assert len(arena.guards) == len(guarded)
        for buffer in guarded:
            end = starts[buffer.name] + buffer.size * ITEMSIZE[buffer.dtype]
            guard = min(guard for guard in arena.guards if guard >= end)
            gaps.setdefault(buffer.dtype, set()).add(guard - end)
            assert starts[buffer.name] % (16 if "int" in buffer.dtype else 64) == 0
        assert not arena.changes() and not arena.touched() and len(placed) == len(arguments.values)
        arena.forget()
        assert not arena._populated() and not arena.guards

    kernel = registered()["torch_paged_decode_attention"]
    each_case(STRATEGIES[kernel.operation.name](kernel.declared, arena.limits, ()), 60, 5, look)
    assert {"int32", "int64", "float32", "float16", "bfloat16"} <= gaps.keys()
    assert all(0 in found and max(found) < (16 if "int" in dtype else 64) for dtype, found in gaps.items()), gaps


# ---- verdicts


def judge_of(call: Callable[..., Any], **more: Any) -> Judge:
    runs = isolated(call, **more)
    (kernel,) = runs.kernels.values()
    return Judge(kernel, runs)


def test_a_crash_is_named_alone_and_shrinks_to_a_crash() -> None:
    def slots(block_tables: Any, seq_ids: Any, positions: Any, block_size: int) -> torch.Tensor:
        if (positions >= 2).any():
            os.abort()
        return torch_slot_mapping(block_tables, seq_ids, positions, block_size) + 1  # I4, in any smaller case

    judge = judge_of(slots)
    verdict = judge.verdict(one_token(3, blocks=6))
    assert (verdict.kind, verdict.named, verdict.also, verdict.ended) == (VIOLATION, "I0", (), "crashed")
    assert verdict.judged == ("I0",) and verdict.runs == 1
    case, final = shrink(judge, one_token(3, blocks=6), verdict)
    assert isinstance(case, SlotMappingCase)
    assert final.ended == "crashed" and [token.position for token in case.tokens] == [2]
    assert final.violation is not None and final.violation.seen.startswith("crashed: signal 6, SIGABRT")
    assert isinstance(judge.runner, Isolated)
    judge.runner.close()


def test_wrong_numbers_do_not_shrink_to_a_crash() -> None:
    def slots(block_tables: Any, seq_ids: Any, positions: Any, block_size: int) -> torch.Tensor:
        if (positions < 2).any():
            os.abort()
        return torch_slot_mapping(block_tables, seq_ids, positions, block_size) + 1

    judge = judge_of(slots)
    verdict = judge.verdict(one_token(3, blocks=6))
    assert verdict.named == "I4" and not verdict.ended
    case, final = shrink(judge, one_token(3, blocks=6), verdict)
    assert isinstance(case, SlotMappingCase)
    assert final.named == "I4" and [token.position for token in case.tokens] == [2]
    assert isinstance(judge.runner, Isolated)
    judge.runner.close()


# ---- which kernels


def test_what_is_checked_before_it_happens_stays_in_the_process_and_nothing_else_does(tmp_path: Path) -> None:
    load_own()
    own = with_pairs(registered())
    assert [name for name, kernel in own.items() if is_checked_first(kernel)] == [
        "triton_reshape_and_cache",
        "triton_paged_decode_attention",
        "triton_reshape_and_cache+triton_paged_decode_attention",
    ]
    other = Kernel("other", OPERATIONS["slot_mapping"], at(2, os.abort), Declaration())
    assert not is_checked_first(other)
    write = registered()["triton_reshape_and_cache"]
    session = Session("cpu", 1, 0, own, tmp_path)
    assert not session.is_isolated(write) and session.is_isolated(other)
    assert Session("cpu", 1, 0, own, tmp_path, isolate=True).is_isolated(write)
    assert not Session("cpu", 1, 0, own, tmp_path, isolate=False).is_isolated(other)
    assert Session("cuda", 1, 0, own, tmp_path).is_isolated(write)  # compiled, nothing is checked


ADAPTER = """
import ctypes, os, time
from hypothesis import settings
from pagefuzz import kernel
from pagefuzz.kernels.torch_slot_mapping import torch_slot_mapping

settings.register_profile("tiny", max_examples=20, deadline=None)
settings.register_profile("more", max_examples=100, deadline=None)
LIBC = ctypes.CDLL(None)
LIBC.malloc.restype = ctypes.c_void_p

def eat_in_c():
    while True:
        ctypes.memset(LIBC.malloc(ctypes.c_size_t(1 << 24)), 1, 4096)

def planted(name, act):
    def slots(block_tables, seq_ids, positions, block_size):
        if (positions >= 2).any():
            act()
        return torch_slot_mapping(block_tables, seq_ids, positions, block_size)
    kernel("slot_mapping", name=name)(slots)

planted("reads", lambda: ctypes.string_at(8, 4))
planted("leaves", lambda: os._exit(0))
planted("eats_in_c", eat_in_c)
planted("good", lambda: None)

@kernel("slot_mapping")
def wrong(block_tables, seq_ids, positions, block_size):
    return torch_slot_mapping(block_tables, seq_ids, positions, block_size) + 1

@kernel("slot_mapping")
def says_who(block_tables, seq_ids, positions, block_size):
    with open("who", "w") as file:
        file.write(str(os.getpid() == int(os.environ["THE_RUN"])))
    return torch_slot_mapping(block_tables, seq_ids, positions, block_size)

@kernel("slot_mapping")
def waits(block_tables, seq_ids, positions, block_size):
    with open(f"waits-{os.getpid()}", "w"):
        pass
    if len(positions):
        os.fork()
        time.sleep(1000)
    return torch_slot_mapping(block_tables, seq_ids, positions, block_size)

os.environ["THE_RUN"] = str(os.getpid())
"""
PLANTED = {
    "reads": r"crashed: signal 11, SIGSEGV \(at adapter\.py, line \d+\)",
    "leaves": r"crashed: exit status 0",
    "eats_in_c": r"crashed: signal 11, SIGSEGV \(at adapter\.py, line \d+\)",
}
LIMITS = ("--case-limit", "1", "--memory-limit", "0.25", "--hypothesis-profile", "tiny")


def test_planted_ends_are_shrunk_saved_and_replayed_without_workers_too(tmp_path: Path) -> None:
    planted, workers = tuple(PLANTED), "0"
    (tmp_path / "adapter.py").write_text(dedent(ADAPTER))
    chosen = [part for name in (*planted, "good", "wrong") for part in ("--kernel", name)]
    options = ("--adapter", "adapter.py", *LIMITS, *chosen, "-n", workers)
    done = pytest_in(tmp_path, *options)
    assert done.code == 1 and counts(done.text) == {"failed": len(planted) + 1, "passed": 1}, done.text
    assert "I4 violated by wrong: " in done.text and "Fatal Python error" not in done.text
    saved = {read(path)[0].kernel: read(path) for path in failures(tmp_path)}
    assert saved.keys() == {*planted, "wrong"}
    for name in planted:
        said = PLANTED[name]
        report = done.text[done.text.index(f"I0 violated by {name}: a case inside the declaration runs") :]
        assert re.match(said, re.split(r"\n  seen +", report)[1]), report
        kept, case = saved[name]
        assert kept.invariant == "I0" and re.match(said, kept.seen)
        assert isinstance(case, SlotMappingCase) and case.block_size == 1 and len(case.sequences) == 1
        assert [token.position for token in case.tokens] == [2], name
    again = pytest_in(tmp_path, "--replay", ".pagefuzz/failures", "--adapter", "adapter.py", *LIMITS, "-n", workers)
    assert again.code == 1 and counts(again.text) == {"failed": len(planted) + 1}, again.text
    for name in planted:
        assert f"still fails: I0 violated by {name}" in again.text


@pytest.mark.parametrize(("option", "here"), [("--isolate", "False"), ("--no-isolate", "True"), ("", "False")])
def test_the_options_choose(option: str, here: str, tmp_path: Path) -> None:
    (tmp_path / "adapter.py").write_text(dedent(ADAPTER))
    options = ("--adapter", "adapter.py", *LIMITS, "--kernel", "says_who", *filter(None, [option]))
    done = pytest_in(tmp_path, *options)
    assert done.code == 0, done.text
    assert (tmp_path / "who").read_text() == here
    assert f"in processes of their own: {'none' if here == 'True' else 'all'}" in done.text


def test_the_command_of_a_report_has_the_options_that_it_needs(tmp_path: Path) -> None:
    (tmp_path / "adapter.py").write_text(dedent(ADAPTER))
    done = pytest_in(tmp_path, "--adapter", "adapter.py", *LIMITS, "--isolate", "--kernel", "wrong")
    assert done.command("again").endswith("--adapter adapter.py --isolate --case-limit 1 --memory-limit 0.25")


@pytest.mark.parametrize("option", ["--case-limit=soon", "--case-limit=0", "--memory-limit=nan"])
def test_a_wrong_limit_gets_one_sentence(option: str, tmp_path: Path) -> None:
    done = pytest_in(tmp_path, option)
    assert done.code == pytest.ExitCode.USAGE_ERROR
    name, _, value = option.partition("=")
    assert done.text.strip() == f"ERROR: {name} {value}: should be a number above 0."


def test_a_crash_that_does_not_come_back_is_not_repeatable(tmp_path: Path) -> None:
    once = """
    @kernel("slot_mapping")
    def once(block_tables, seq_ids, positions, block_size):
        if not os.path.exists("died"):
            open("died", "w").close()
            os.kill(os.getpid(), 9)
        return torch_slot_mapping(block_tables, seq_ids, positions, block_size)
    """
    (tmp_path / "adapter.py").write_text(dedent(ADAPTER) + dedent(once))
    done = pytest_in(tmp_path, "--adapter", "adapter.py", *LIMITS, "--kernel", "once")
    assert done.code == 1 and "not repeatable: once broke I0 once" in done.text, done.text
    assert done.command("seen") == "crashed: signal 9, SIGKILL"


def test_a_device_is_looked_for_in_a_fork_where_kernels_are_isolated(tmp_path: Path) -> None:
    done = pytest_in(tmp_path, "--isolate", "--device", "meta")
    assert done.code == pytest.ExitCode.USAGE_ERROR and done.text.startswith("ERROR: --device meta: "), done.text
    in_a_fork(lambda: None)
    with pytest.raises(RuntimeError, match=r"^no such device$"):
        in_a_fork(partial(_raise, ValueError("no such device")))
    with pytest.raises(RuntimeError, match=r"^NotImplementedError$"):
        in_a_fork(partial(_raise, NotImplementedError()))
    with pytest.raises(RuntimeError, match=r"^the check ended with -6$"):
        in_a_fork(os.abort)


# ---- interrupted runs


def run_that_waits(folder: Path, *options: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A run that has saved a failure of `wrong` and now waits for a kernel; and the processes that wait."""
    (folder / "adapter.py").write_text(dedent(ADAPTER))
    chosen = ("--adapter", "adapter.py", "--kernel", "waits", "--kernel", "wrong", "--hypothesis-profile", "tiny")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(TREE / "fuzz"), "--case-limit", "500"]
    run = subprocess.Popen(
        [*command, *chosen, *options],
        cwd=folder,
        env=environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    for _ in range(600):
        if list(folder.glob("waits-*")) and failures(folder):
            break
        time.sleep(0.1)
    waiting = [int(path.name.partition("-")[2]) for path in folder.glob("waits-*")]
    assert waiting and failures(folder)
    return run, waiting


def all_gone(run: subprocess.Popen[str], waiting: list[int]) -> str:
    """What the run printed. Neither its group nor the processes of its kernels may be there soon after."""
    try:
        text, _ = run.communicate(timeout=60)
        for _ in range(50):
            left = [pid for pid in {*waiting, *group(run.pid)} if Path(f"/proc/{pid}").exists()]
            if not left:
                return text
            time.sleep(0.1)
        raise AssertionError(f"left processes {left} behind:\n{text}")
    finally:
        for pid in group(run.pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_leaves_no_process_and_keeps_what_was_saved(
    workers: str, how: signal.Signals, tmp_path: Path
) -> None:
    run, waiting = run_that_waits(tmp_path, "-n", workers)
    os.kill(run.pid, how)  # the run alone: at a terminal all of its group is interrupted
    all_gone(run, waiting)
    assert run.returncode == (pytest.ExitCode.INTERRUPTED if how == signal.SIGINT else -how)
    assert [read(path)[0].kernel for path in failures(tmp_path)] == ["wrong"]


def test_a_killed_worker_of_xdist_takes_its_kernel_along(tmp_path: Path) -> None:
    run, waiting = run_that_waits(tmp_path, "-n", "2")
    parent = int(Path(f"/proc/{waiting[0]}/stat").read_text().rpartition(")")[2].split()[1])
    assert parent != run.pid
    os.kill(parent, signal.SIGKILL)
    for _ in range(100):
        if not Path(f"/proc/{waiting[0]}").exists():
            break
        time.sleep(0.1)
    assert not Path(f"/proc/{waiting[0]}").exists()
    os.killpg(run.pid, signal.SIGINT)
    all_gone(run, [*waiting, *(int(path.name.partition("-")[2]) for path in tmp_path.glob("waits-*"))])
    assert [read(path)[0].kernel for path in failures(tmp_path)] == ["wrong"]


THREADED = """
import queue, threading
from hypothesis import settings
from pagefuzz import kernel
from pagefuzz.kernels.torch_slot_mapping import torch_slot_mapping

settings.register_profile("tiny", max_examples=20, deadline=None)
asked, answers = queue.Queue(), queue.Queue()

def work():
    while True:
        answers.put(torch_slot_mapping(*asked.get()))

threading.Thread(target=work, daemon=True).start()

@kernel("slot_mapping")
def threaded(*arguments):
    asked.put(arguments)
    return answers.get()

@kernel("slot_mapping")
def threaded_and_wrong(*arguments):
    return threaded(*arguments) + 1
"""


def test_a_kernel_that_needs_the_threads_of_its_import_has_them(tmp_path: Path) -> None:
    (tmp_path / "adapter.py").write_text(dedent(THREADED))
    done = pytest_in(tmp_path, "--adapter", "adapter.py", *LIMITS)
    assert done.code == 1 and counts(done.text) == {"failed": 1, "passed": 1}, done.text
    assert "I4 violated by threaded_and_wrong: " in done.text


def fresh(adapter: Path, device: str = "cpu") -> Recipe:
    path = (str(adapter.parent), *sys.path)
    return Recipe(device, (str(adapter),), path, workers=1, memory=None, parent=os.getpid())


def test_a_fresh_process_runs_what_the_adapters_register(tmp_path: Path) -> None:
    adapter = tmp_path / "named.py"
    adapter.write_text(
        "import os\nfrom pagefuzz import kernel\n"
        "@kernel('slot_mapping')\ndef named(tables, ids, positions, size):\n"
        "    if (positions == 2).any():\n        os.abort()\n    return (positions + os.getppid()).long()\n"
    )
    kernel = Kernel("named", OPERATIONS["slot_mapping"], lambda *arguments: None, Declaration())
    runs = Isolated([kernel], lambda: Runner(CpuArena(), interpreted=True), fresh=lambda: fresh(adapter))
    try:
        for _ in range(2):
            output = observe(runs, one_token(1)).output
            assert output is not None and output.bits.tolist() == [1 + os.getpid()]
            assert observe(runs, one_token(2)).ended == "crashed: signal 6, SIGABRT (at named.py, line 6)"
    finally:
        runs.close()


def test_a_fresh_process_that_cannot_load_an_adapter_says_why(tmp_path: Path) -> None:
    adapter = tmp_path / "broken.py"
    adapter.write_text("raise ValueError('only once')\n")
    runs = isolated(lambda *arguments: None, fresh=lambda: fresh(adapter))
    with pytest.raises(RuntimeError, match=r"could not begin:\n.*broken\.py, line 1: ValueError: only once"):
        observe(runs, one_token(1))


def test_a_shortage_counts_only_in_a_fresh_process(started: Callable[..., Isolated]) -> None:
    ran = []

    def tight() -> None:
        ran.append(1)
        if len(ran) > 1:  # in this process
            _raise(RuntimeError("CUDA error: too many resources requested for launch"))

    runs = started(at(2, tight))
    assert observe(runs, one_token(2)).finished and observe(runs, one_token(2)).finished
    short = started(at(2, lambda: _raise(RuntimeError("CUDA error: out of memory"))))
    assert observe(short, one_token(1)).finished
    assert str(observe(short, one_token(2)).raised).startswith("RuntimeError: CUDA error: out of memory (at ")


def test_a_kernel_that_is_registered_later_runs_on_a_device_too(tmp_path: Path) -> None:
    first, later = (Kernel(name, OPERATIONS["slot_mapping"], at(2, os.abort), Declaration()) for name in ("a", "b"))
    session = Session("cuda", 1, 0, {"a": first}, tmp_path)
    runs = session.runner_for(first)
    assert session.runner_for(first) is runs
    session.kernels["b"] = later
    found = session.runner_for(later)
    assert isinstance(found, Isolated) and {"a", "b"} <= found.kernels.keys()


def test_devices_are_dealt_round_robin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, found in (("device_count", 2), ("is_initialized", False)):
        monkeypatch.setattr(torch.cuda, name, lambda found=found: found)

    def places(device: str, workers: int) -> list[tuple[str, int]]:
        return [Session(device, 1, 0, {}, tmp_path, worker=w, workers=workers)._place() for w in range(workers)]

    assert places("cuda", 3) == [("cuda:0", 2), ("cuda:1", 2), ("cuda:0", 2)]
    assert places("cuda:1", 3) == [("cuda:1", 3)] * 3
    assert places("cpu", 2) == [("cpu", 2)] * 2
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert places("cuda", 2) == [("cuda", 2)] * 2


def test_n_auto_starts_no_more_workers_than_take_turns_well(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = SimpleNamespace(getoption=lambda name: "cuda")
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)
    monkeypatch.setattr(plugin, "_device", lambda asked, apart: asked)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    for count in (1, 2, 8):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert plugin.pytest_xdist_auto_num_workers(config) == 8 * count if count < 8 else 64
    config.getoption = lambda name: "cuda:1"
    assert plugin.pytest_xdist_auto_num_workers(config) == 8
    config.getoption = lambda name: "cpu"
    assert plugin.pytest_xdist_auto_num_workers(config) is None  # xdist counts the cores
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "3")
    config.getoption = lambda name: "cuda"
    assert plugin.pytest_xdist_auto_num_workers(config) is None


def test_the_last_line_of_a_device_s_error_is_the_error_and_not_torch_s_advice() -> None:
    said = (
        'Traceback (most recent call last):\n  File "arena.py", line 1, in look\n'
        "torch.AcceleratorError: CUDA error: misaligned address\n"
        "Search for `cudaErrorMisalignedAddress' in the manual.\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
    )
    assert last_line(said) == "torch.AcceleratorError: CUDA error: misaligned address"
