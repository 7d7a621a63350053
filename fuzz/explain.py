"""What a failure says to a person."""

from __future__ import annotations

from pathlib import Path

from pagefuzz.fuzz.known import told
from pagefuzz.fuzz.verdict import Verdict
from pagefuzz.oracles.invariant import Violation
from pagefuzz.strategies.case import Case


def failure_text(
    kernel: str, case: Case, found_as: Case | None, verdict: Verdict, command: str, token_command: str
) -> str:
    """The whole report of one failure. `found_as`: the case before it was shrunk, where that happened just now."""
    invariant, violation = verdict.invariant, verdict.violation
    assert invariant is not None and violation is not None
    lines = [
        f"{invariant.id} violated by {kernel}: {invariant.statement}",
        "",
        *_rows(("seen", violation.seen), ("right", violation.right), ("where", violation.where)),
        "",
        *_rows(("sizes", case.shapes()), ("layout", "\n".join(case.lines()))),
        "",
        *_rows(
            ("also broken", ", ".join(verdict.also)),
            ("known", "\n".join(told(verdict.known))),
            ("found as", found_as.one_line() if found_as else ""),
            ("shrunk to" if found_as else "case", case.one_line()),
            ("again", command),
            ("or anywhere", token_command),
        ),
    ]
    return "\n".join(lines)


def not_repeatable_text(kernel: str, case: Case, verdict: Verdict, command: str) -> str:
    """The report of a failure that did not come back."""
    violation = verdict.violation or Violation("", "")
    return "\n".join(
        [
            f"not repeatable: {kernel} broke {verdict.named} once, and passed the same case when it was run again",
            "",
            *_rows(("seen", violation.seen), ("right", violation.right), ("where", violation.where)),
            "",
            "A kernel that reads memory which nobody wrote, or that depends on timing, looks like this.",
            *_rows(("case", case.one_line()), ("layout", "\n".join(case.lines())), ("again", command)),
        ]
    )


def _rows(*rows: tuple[str, str]) -> list[str]:
    out = []
    for name, text in rows:
        for index, line in enumerate(text.splitlines()):
            out.append(f"  {name if index == 0 else '':<12}{line}")
    return out


def shown(path: Path, start: Path) -> str:
    """A path as one would type it in `start`."""
    try:
        return str(path.relative_to(start))
    except ValueError:
        return str(path)
