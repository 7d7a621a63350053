"""Replaying: what is said of a saved case, the exit codes, and saved failures first in every later run."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from pagefuzz.fuzz import saved as saving
from pagefuzz.oracles.invariant import Violation
from pagefuzz.strategies.case import Sequence
from pagefuzz.strategies.reshape_and_cache import ReshapeAndCacheCase
from pagefuzz.strategies.slot_mapping import SlotMappingCase, Token
from pagefuzz.tests.commands import TREE, Done, counts, failures, pytest_in

# MODE says what each kernel does, so that one adapter serves every test: it is read at every call.
ADAPTER = """
import json, os, torch
from hypothesis import settings
from pagefuzz import kernel

settings.register_profile("tiny", max_examples=8, deadline=None)

def right(block_tables, seq_ids, positions, block_size):
    rows = torch.where(positions >= 0, seq_ids, 0).long()
    kept = positions.clamp(min=0).long()
    if not len(rows) or not len(block_tables):
        return torch.full(positions.shape, -1)
    slots = block_tables[rows, kept // block_size].long() * block_size + kept % block_size
    return torch.where(positions >= 0, slots, -1)

def behave(name, *arguments):
    with open("calls.log", "a") as log:
        log.write(f"{os.environ.get('PYTEST_XDIST_WORKER', 'gw')} {os.environ['PYTEST_CURRENT_TEST']}\\n")
    mode = json.loads(os.environ.get("MODE", "{}")).get(name, "right")
    if mode == "raises":
        raise RuntimeError("no such luck")
    return right(*arguments) + (mode == "wrong")

@kernel("slot_mapping")
def one(block_tables, seq_ids, positions, block_size):
    return behave("one", block_tables, seq_ids, positions, block_size)

@kernel("slot_mapping", index_dtypes=["int64"])
def two(block_tables, seq_ids, positions, block_size):
    return behave("two", block_tables, seq_ids, positions, block_size)
"""
WRONG = json.dumps({"one": "wrong", "two": "wrong"})
CASE = SlotMappingCase(block_size=1, num_blocks=1, sequences=(Sequence((0,), (), 1),), tokens=(Token(0, 0),))
INT32 = SlotMappingCase(
    block_size=1, num_blocks=1, sequences=(Sequence((0,), (), 1),), tokens=(Token(0, 0),), index_dtype="int32"
)
SAVED = ".pagefuzz/failures"
FIXED = ".pagefuzz/fixed"


def save(folder: Path, kernel: str = "one", case: SlotMappingCase = CASE, invariant: str = "I4") -> Path:
    seen = Violation("slot 1", "slot 0", "token 0")
    return saving.save(folder, kernel, "failure", invariant, case, case, seen, "cpu")[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "adapter.py").write_text(ADAPTER)
    return tmp_path


def replay(folder: Path, *options: str | Path, mode: str = "{}", adapter: str = "adapter.py", cwd: str = ".") -> Done:
    words = [part for option in options for part in (("--replay", option) if option not in OTHERS else (option,))]
    return pytest_in(folder / cwd, "--adapter", adapter, *words, MODE=mode)


OTHERS = ("--kernel=two", "--kernel=one", "--kernel=t*", "--kernel=torch*", "-n2", "--kernel=torch_reshape_and_cache")


def fuzz(folder: Path, *options: str, mode: str = "{}") -> Done:
    seeded = ("--hypothesis-profile", "tiny", "--hypothesis-seed", "3")  # whose failures shrink to CASE
    return pytest_in(folder, "--adapter", "adapter.py", *seeded, *options, MODE=mode)


# ---- what is said, and the exit codes


def test_each_status_is_said_with_its_exit_code(folder: Path) -> None:
    path = save(folder / "some saved").relative_to(folder)
    fails = replay(folder, path, mode=WRONG)
    assert fails.code == 1
    assert fails.line(f"{path}: still fails: I4 violated by one")
    assert f"--replay '{path}' " in fails.command("again")
    otherwise = replay(folder, path, mode=json.dumps({"one": "raises"}))
    assert otherwise.code == 1
    assert otherwise.line(f"{path}: fails otherwise ('I4' when it was saved): I0 violated by one")
    assert otherwise.command("seen").startswith("raised RuntimeError: no such luck")
    passes = replay(folder, path)
    assert passes.code == 0
    assert passes.line(f"{path}: passes on one")
    assert path.name in [each.name for each in (folder / "some saved").iterdir()]  # --replay moves nothing


def test_what_cannot_be_judged_gives_exit_code_3(folder: Path) -> None:
    path = save(folder, "two", INT32)
    undeclared = replay(folder, path.name)
    assert undeclared.code == 3
    assert undeclared.line(f"{path.name}: unsupported: two does not declare to support int32 block tables.")
    unknown = replay(folder, save(folder, "gone").name)
    assert unknown.code == 3
    assert unknown.line("unsupported: no kernel 'gone' of slot_mapping is registered; name its adapter with --adapter")
    other = replay(folder, path.name, "--kernel=torch_reshape_and_cache")
    assert other.code == 3
    assert other.line("unsupported: --kernel must name one kernel of slot_mapping; it names none.")
    content = json.loads(path.read_text())
    (folder / "newer.json").write_text(json.dumps({**content, "pagefuzz": 9}))
    newer = replay(folder, "newer.json", "pf7.xyz")
    assert newer.code == 3
    assert newer.line("newer.json: other version: newer.json has format 9, and pagefuzz ")
    assert newer.line("pf7.xyz: other version: token pf7.xyz has format 7, and pagefuzz ")
    (folder / "damaged.json").write_bytes(path.read_bytes()[:-50])
    damaged = replay(folder, "damaged.json")
    assert damaged.code == 3
    assert damaged.line("damaged.json: unreadable: damaged.json is not JSON, or damaged: ")
    for done in (undeclared, unknown, other, newer, damaged):
        assert "Traceback" not in done.text


def test_a_kernel_of_another_device_is_not_run_and_not_accused(folder: Path) -> None:
    elsewhere = ADAPTER.replace('index_dtypes=["int64"]', 'devices=["cuda", "xpu"]')
    (folder / "adapter.py").write_text(elsewhere)
    path = save(folder, "two")
    done = replay(folder, path.name, mode=json.dumps({"two": "raises"}))
    assert done.code == 3, done.text
    said = "unsupported: two declares to run on cuda, xpu and not on cpu; choose another with --device."
    assert done.line(f"{path.name}: {said}")
    assert not (folder / "calls.log").exists()


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with saved cases of every kind, one of them no file at all."""
    folder = tmp_path_factory.mktemp("mixed")
    (folder / "adapter.py").write_text(ADAPTER)
    (folder / "below").mkdir()
    save(folder / "saved", "one")
    save(folder / "saved", "two")
    save(folder / "saved", "two", INT32)
    (folder / "saved" / "damaged.json").write_text("{")
    os.mkfifo(folder / "saved" / "pipe.json")
    (folder / "saved" / "notes.txt").write_text("not a saved case")
    (folder / "saved" / "strange\n\x1b[31m\udcff.json").write_text("[]")
    return folder


@pytest.mark.parametrize("workers", [(), ("-n2",)], ids=["alone", "two workers"])
def test_a_folder_and_a_token_are_replayed_together(workers: tuple[str, ...], mixed: Path) -> None:
    token = saving.token("one", "I4", CASE)
    some = replay(mixed, "saved", token, *workers, mode=json.dumps({"two": "wrong"}))
    assert some.code == 1, some.text
    assert counts(some.text)["passed"] == 2 and counts(some.text)["failed"] == 5
    said = some.text[some.text.index("= saved failures =") :]
    assert sorted(re.findall(r"^(.{6}).*?: (still fails|passes|unsupported|unreadable)", said, re.MULTILINE)) == [
        ("pf1.eN", "passes"),
        ("saved/", "passes"),
        ("saved/", "still fails"),
        ("saved/", "unreadable"),
        ("saved/", "unreadable"),
        ("saved/", "unreadable"),
        ("saved/", "unsupported"),
    ]
    assert r"saved/strange\n\x1b[31m\udcff.json: unreadable" in said
    assert "\x1b" not in some.text and "Traceback" not in some.text and "INTERNALERROR" not in some.text


def test_none_fails_but_some_cannot_be_judged(mixed: Path) -> None:
    done = replay(Path(mixed), "../saved", cwd="below", adapter="../adapter.py")  # from another folder
    assert done.code == 3, done.text
    assert counts(done.text)["passed"] == 2
    assert done.line("../saved/damaged.json: unreadable")
    assert not (mixed / "below/.pagefuzz").exists()


def test_the_kernel_can_be_another_one(folder: Path) -> None:
    path = save(folder, "one")
    mode = json.dumps({"one": "wrong"})
    assert replay(folder, path.name, mode=mode).code == 1
    two = replay(folder, path.name, "--kernel=two", mode=mode)
    assert two.code == 0 and two.line("passes on two")
    ours = replay(folder, path.name, "--kernel=torch*", mode=mode)
    assert ours.code == 0 and ours.line("passes on torch_slot_mapping")
    both = replay(folder, path.name, "--kernel=two", "--kernel=one", mode=mode)
    assert both.code == 1 and both.line("still fails: I4 violated by one")
    unclear = replay(folder, save(folder, "gone").name, "--kernel=two", "--kernel=one")
    assert unclear.code == 3
    assert unclear.line("unsupported: --kernel must name one kernel of slot_mapping; it names one, two.")


def test_a_replay_that_reaches_no_case_does_not_look_like_success(folder: Path) -> None:
    path = save(folder)
    done = pytest_in(folder, "--replay", path.name, tests=[str(TREE / "fuzz/test_slot_mapping.py")])
    assert done.code == pytest.ExitCode.NO_TESTS_COLLECTED, done.text


def test_a_failure_that_does_not_come_back_is_no_violation(folder: Path) -> None:
    once = """
@kernel("slot_mapping")
def once(block_tables, seq_ids, positions, block_size):
    if len(positions) and not os.path.exists("failed"):
        open("failed", "w").close()
        return positions.long() - 7
    return right(block_tables, seq_ids, positions, block_size)
"""
    (folder / "adapter.py").write_text(ADAPTER + once)
    done = fuzz(folder, "--kernel", "once")
    assert done.code == 1
    assert re.match(r"not repeatable: once broke I\d+ once, and passed the same case", done.line("not repeatable: "))
    assert done.command("seen") and done.command("case") and "Traceback" not in done.text
    (path,) = failures(folder)
    assert saving.read(path)[0].kind == "not repeatable"
    again = replay(folder, path.relative_to(folder))
    assert again.code == 0 and again.line("passes on once")


# ---- saved failures in later runs


@dataclass(frozen=True)
class Calls:
    """The items that called a kernel, in order, by worker."""

    items: dict[str, list[str]]


def calls(folder: Path) -> Calls:
    items: dict[str, list[str]] = {}
    for line in (folder / "calls.log").read_text().splitlines():
        worker, _, item = line.partition(" ")
        items.setdefault(worker, []).append(item)
    (folder / "calls.log").unlink()
    return Calls(items)


@pytest.mark.parametrize("workers", ["-n0", "-n1", "-n2"])
def test_saved_failures_run_first_and_move_when_they_pass_twice(workers: str, folder: Path) -> None:
    fixed_soon, unlucky = save(folder / SAVED, "one"), save(folder / SAVED, "two", CASE)
    (folder / SAVED / "damaged.json").write_text("{")
    stranger = save(folder / SAVED, "torch_slot_mapping")
    unchanged = stranger.read_bytes()

    first = fuzz(folder, workers, mode=json.dumps({"two": "wrong"}))
    assert first.code == 1, first.text
    for items in calls(folder).items.values():
        saved = ["test_saved_failures" in item for item in items]
        assert saved == sorted(saved, reverse=True), items  # whatever a worker has of them comes first
    assert first.line(f"{SAVED}/{fixed_soon.name}: passes on one: once more, and it moves to {FIXED}/")
    assert first.line(f"{SAVED}/{unlucky.name}: still fails: I4 violated by two")
    assert first.line(f"{SAVED}/damaged.json: unreadable: ")
    # Reported once, by the saved failure; the shard that finds the same shrunk case does not repeat it.
    assert counts(first.text)["failed"] == 1
    assert counts(first.text)["skipped"] == 2

    second = fuzz(folder, workers)
    assert second.code == 0, second.text
    assert second.line(f"{SAVED}/{fixed_soon.name}: passes on one: the second time in a row, so it moved to {FIXED}/")
    assert second.line(f"{SAVED}/{unlucky.name}: passes on two: once more")
    assert [path.name for path in (folder / FIXED).iterdir()] == [fixed_soon.name]
    assert saving.read(folder / FIXED / fixed_soon.name)[1] == CASE
    assert stranger.name not in first.text + second.text and stranger.read_bytes() == unchanged
    assert {path.name for path in failures(folder)} == {unlucky.name, "damaged.json", stranger.name}


def test_a_failure_in_between_starts_the_count_anew(folder: Path) -> None:
    path = save(folder / SAVED, "one")
    options = ("--kernel", "one", "--deselect", f"{TREE}/fuzz/test_slot_mapping.py")
    for mode, code, passes in (("{}", 0, 1), (WRONG, 1, 0), ("{}", 0, 1), ("{}", 0, None)):
        done = fuzz(folder, *options, mode=mode)
        assert done.code == code, done.text
        assert (saving.read(path)[0].passes if path.exists() else None) == passes
    assert (folder / FIXED / path.name).exists()


def test_saved_failures_run_whatever_chose_the_kernels(folder: Path) -> None:
    """A pattern that names several kernels of an operation is no reason not to judge a case on its own one."""
    save(folder / SAVED, "one")
    save(folder / SAVED, "two")
    done = fuzz(folder, "--kernel", "*", "-k", "test_saved_failures", mode=json.dumps({"one": "wrong"}))
    assert done.code == 1
    assert counts(done.text)["failed"] == 1 and counts(done.text)["passed"] == 1
    alone = fuzz(folder, "--kernel", "two", "-k", "test_saved_failures", mode=json.dumps({"one": "wrong"}))
    assert alone.code == 0 and counts(alone.text)["passed"] == 1
    assert "on one" not in alone.text


def test_a_case_that_this_machine_cannot_hold_does_not_stop_a_run(folder: Path) -> None:
    case = ReshapeAndCacheCase(block_size=4096, num_blocks=2**40, slots=(0,), dtype="float32")
    path = saving.save(
        folder / SAVED, "torch_reshape_and_cache", "failure", "I6", case, case, Violation("", ""), "cpu"
    )[0]
    before = path.read_bytes()
    done = pytest_in(folder, "--kernel", "torch_reshape_and_cache", "-k", "test_saved_failures")
    assert done.code == 0, done.text
    assert done.line(f"{SAVED}/{path.name}: unsupported: k_cache takes ")
    assert path.read_bytes() == before


def test_a_disk_that_takes_nothing_does_not_stop_a_run(folder: Path) -> None:
    path = save(folder / SAVED, "one")
    (folder / FIXED).write_text("in the way")
    options = ("--kernel", "one", "-k", "test_saved_failures")
    assert fuzz(folder, *options).code == 0
    done = fuzz(folder, *options)
    assert done.code == 0, done.text
    assert done.line("passes on one: this could not be noted: File exists")
    assert path.exists()


def test_a_pipe_in_place_of_the_folder_does_not_hold_a_run_up(folder: Path) -> None:
    (folder / ".pagefuzz").mkdir()
    os.mkfifo(folder / SAVED)
    done = fuzz(folder, "--kernel", "one", "-k", "test_saved_failures")
    assert done.code == 0, done.text
    assert done.line(f"{SAVED}: unreadable: {SAVED} is not a regular file.")
