"""Faults planted in adapters: each is found, shrunk, saved and replayed, by the program that does so twenty times."""

from __future__ import annotations

import pytest

from pagefuzz.strategies.slot_mapping import SlotMappingCase, Token
from pagefuzz.tests.planted import __main__ as program
from pagefuzz.tests.planted.faults import FAULTS, Fault
from pagefuzz.tests.test_isolation import one_token


def test_each_fault_on_the_cpu_is_right_once(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = program.faults("*", "cpu")
    assert len(chosen) == 10 and {fault.device for fault in FAULTS} == {"cpu", "cuda"}
    wrong = program.plant(chosen, "cpu", times=1, workers=1)
    said = capsys.readouterr().out
    assert wrong == 0 and said.count(" 1 of 1 ") == len(chosen) + 1, said


def test_what_is_not_right_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    leaves = """
    import subprocess
    def fault(positions):
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        os.abort()
    """
    chosen = [
        Fault("harmless", "def fault(positions): pass", "crashed"),
        Fault("leaves", leaves, "crashed: signal 11"),
    ]
    assert program.plant(chosen, "cpu", times=1, workers=1) == 3
    said = capsys.readouterr().out
    assert said.count(" 0 of 1 ") == 3, said
    for part in (
        "seed 1: 0 of 2 faults right, the rest of the run harmed",
        "seed 1: its item: PASSED",
        "seed 1: 0 failures were saved",
        "seed 1: the report says 'crashed: signal 6, SIGABRT",
        "seed 1: the replay says 'crashed: signal 6, SIGABRT",
        "seed 1: saved was I0, 'crashed: signal 6, SIGABRT",
        "seed 1: the run left processes behind: ",
        " sleep 1000",
    ):
        assert part in said, said


def test_only_the_one_token_that_goes_wrong_is_the_smallest() -> None:
    assert program.is_smallest(one_token(3))
    smaller: list[SlotMappingCase] = [one_token(2), one_token(3, blocks=5)]
    assert not any(map(program.is_smallest, smaller))
    assert Token(0, 3) in one_token(3).tokens


@pytest.mark.parametrize("options", [("--times", "0"), ("-n", "0"), ("--fault", "none")])
def test_nothing_to_do_is_refused(
    options: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["planted", *options])
    monkeypatch.setattr(program, "_import_pagefuzz", lambda: None)
    with pytest.raises(SystemExit) as ended:
        program.main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and ("must be above 0" in said or "there are wild_read, wild_write, " in said)
