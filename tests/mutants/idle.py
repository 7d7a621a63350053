"""What could be switched off: how many mutants live without each invariant, oracle and feature of the cases.

A mutant lives without a feature if every case that kills it has that feature, and lives without an invariant if no
case that kills it is seen by another one. A few failures may share what many cases have by chance, so a feature counts
only if that is unlikely (CHANCE).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pagefuzz.oracles.invariant import invariants
from pagefuzz.tests.mutants.report import in_words, markdown_table

CHANCE = 0.001
SHOWN = 6  # names of mutants in a line


@dataclass
class Idle:
    """What --idle found; `mutants` is by name what jobs.idle gives."""

    about: dict[str, Any]
    mutants: dict[str, dict[str, Any]]

    def judged(self) -> dict[str, dict[str, Any]]:
        return {name: found for name, found in self.mutants.items() if found.get("failures")}

    def unjudged(self) -> list[str]:
        """Mutants without a failure among the examples, with why."""
        found = []
        for name, result in self.mutants.items():
            if not result.get("failures"):
                why = next((f"{how}: {result[how]}" for how in ("crashed", "hung", "error") if how in result), "")
                found.append(f"{name} ({' '.join(why.split())[-200:] or 'no failure'})")
        return found

    def without_feature(self) -> dict[str, list[str]]:
        """By feature, the mutants that live without it."""
        judged = self.judged().values()
        known = {word for found in judged for word in found["drawn"]}
        return {word: [name for name, found in self.judged().items() if _needs(found, word)] for word in sorted(known)}

    def without_invariant(self) -> dict[str, list[str]]:
        """By invariant, or group of them, the mutants that live without it."""
        ids = [item.id for item in invariants()]
        groups = {name: {name} for name in ids}
        groups["all relations"] = {item.id for item in invariants() if item.relation}
        groups["all that need one run only"] = set(ids) - groups["all relations"]
        return {
            group: [
                name
                for name, found in self.judged().items()
                if all(set(failure["invariants"]) <= members for failure in found["failures"])
            ]
            for group, members in groups.items()
        }

    def without_dense_oracle(self) -> list[str]:
        return [name for name, found in self.judged().items() if found["lives without the dense oracle"]]

    def drawn_in(self, word: str) -> float:
        """The share of the cases that have a feature, in the operations that know it."""
        cases = sum(found["cases"] for found in self.judged().values() if word in found["drawn"])
        return sum(found["drawn"].get(word, 0) for found in self.judged().values()) / max(cases, 1)

    def idle(self) -> tuple[list[str], list[str]]:
        """The invariants and the features without which no mutant lives."""
        return (
            [name for name, lives in self.without_invariant().items() if not lives],
            [word for word, lives in self.without_feature().items() if not lives],
        )

    # ---- writing

    def parts(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """(title, headings, cells) of each table."""
        oracles = [["dense", *_listed(self.without_dense_oracle())]]
        by_count = sorted(self.without_feature().items(), key=lambda item: (-len(item[1]), item[0]))
        return [
            ("Invariants", ["without", "live", "mutants"], _lines(self.without_invariant().items())),
            ("Oracles", ["without", "live", "mutants"], oracles),
            (
                "Features of the cases",
                ["without", "drawn in", "live", "mutants"],
                [[word, f"{100 * self.drawn_in(word):.0f} %", *_listed(lives)] for word, lives in by_count if lives],
            ),
        ]

    def summary(self) -> list[str]:
        quiet, words = self.idle()
        said = [
            f"No mutant lives without, of the invariants: {', '.join(quiet) or 'none'}.",
            f"No mutant lives without, of the features: {', '.join(words) or 'none'}.",
            "The loop oracle judges no kernel: it guards the dense one, whose planted faults it finds in "
            "tests/test_oracles.py (test_a_fault_of_one_oracle_shows).",
        ]
        if missing := self.unjudged():
            said.append(f"Not judged: {', '.join(missing)}.")
        return said

    def text(self) -> str:
        lines = []
        for title, headings, cells in self.parts():
            widths = [max(len(line[column]) for line in [headings, *cells]) for column in range(len(headings) - 1)]
            lines += ["", title]
            for line in [headings, *cells]:
                padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=False))
                lines.append("  ".join(("", *padded, line[-1])))
        return "\n".join([*lines, "", *self.summary()])

    def markdown(self) -> str:
        parts = [
            "# What could be switched off",
            "How many mutants would live without each invariant, oracle and feature: those that every failing case "
            f"shows only with it. {len(self.judged())} mutants are judged.",
            "\n".join(f"- {name}: {in_words(value)}" for name, value in self.about.items()),
        ]
        for title, headings, cells in self.parts():
            parts += [f"## {title}", markdown_table(headings, cells)]
        return "\n\n".join([*parts, "## Idle", *self.summary()]) + "\n"

    def plain(self) -> dict[str, Any]:
        """What the JSON holds."""
        return {
            "about": self.about,
            "invariants": self.without_invariant(),
            "without the dense oracle": self.without_dense_oracle(),
            "features": self.without_feature(),
            "mutants": self.mutants,
        }


def _needs(found: dict[str, Any], word: str) -> bool:
    """Whether all failing cases have a feature, and not by chance."""
    failures = found["failures"]
    share = found["drawn"].get(word, 0) / found["cases"]
    return all(word in failure["features"] for failure in failures) and share ** len(failures) < CHANCE


def _listed(names: list[str]) -> list[str]:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return [str(len(names)), ", ".join(names[:SHOWN]) + more]


def _lines(items: Iterable[tuple[str, list[str]]]) -> list[list[str]]:
    return [[name, *_listed(lives)] for name, lives in items]
