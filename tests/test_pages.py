"""What the pages say is there: their links lead somewhere, and their tables list what the program has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from pagefuzz.fuzz.plugin import PROFILES
from pagefuzz.kernels.registry import Declaration
from pagefuzz.oracles.invariant import invariants

TREE = Path(__file__).resolve().parents[1]
README = (TREE / "README.md").read_text()
PAGES = sorted([*TREE.glob("*.md"), *TREE.glob("docs/*.md"), *TREE.glob("bench/*.md")])
# What names pages in messages and comments.
SOURCES = [
    TREE / "Makefile",
    *PAGES,
    *(
        file
        for folder in ("bench", "docs", "fuzz", "kernels", "oracles", "strategies", "tests")
        for suffix in ("py", "toml", "json")
        for file in sorted((TREE / folder).rglob(f"*.{suffix}"))
    ),
]


@cache
def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them. A fenced line that begins with # is no heading."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead(target: str, folder: Path) -> bool:
    name, _, anchor = target.partition("#")
    page = folder / name
    return not page.exists() or bool(anchor and anchor not in anchors(page))


def links(page: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("#"):
            yield page.name + target
        elif not re.match(r"https?://", target):
            yield target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(TREE)))
def test_links_lead_somewhere(page: Path) -> None:
    assert [target for target in links(page) if dead(target, page.parent)] == []


def test_every_page_is_linked_from_the_readme_or_from_a_page_that_is() -> None:
    seen, todo = set[Path](), [TREE / "README.md"]
    while todo:
        page = todo.pop()
        seen.add(page)
        found = {(page.parent / target.partition("#")[0]).resolve() for target in links(page)}
        todo += [other for other in found - seen if other.suffix == ".md"]
    assert set(PAGES) <= seen


def test_what_messages_and_comments_name_is_there() -> None:
    pages, sections = 0, 0
    for file in SOURCES:
        text = file.read_text()
        for target in re.findall(r"\b(?:docs|bench)/[\w-]+\.md(?:#[\w-]+)?", text):
            assert not dead(target, TREE), f"{file.relative_to(TREE)}: {target}"
            pages += 1
        for title in re.findall(r"README(?:\.md)?, ['\"]([^'\"]+)['\"]", text):
            assert f"\n## {title}\n" in README, f"{file.relative_to(TREE)}: README, {title!r}"
            sections += 1
    assert pages > 30 and sections >= 2  # the patterns still find what they are for


def rows(page: Path, heading: str) -> dict[str, str]:
    """A table below a heading: the first cell of each row, and the rest."""
    section = page.read_text().split(f"# {heading}\n", 1)[1].split("\n## ", 1)[0]
    table = re.findall(r"^\| (.+?) \|(.*) \|$", section, re.MULTILINE)
    return {first: rest.strip(" |") for first, rest in table}


def test_the_table_of_declarations_has_all() -> None:
    table = rows(TREE / "docs/declarations.md", "Declarations, and what is drawn")
    listed = [name for first in table for name in re.findall(r"`(\w+)`", first)]
    assert sorted(listed) == sorted(item.name for item in fields(Declaration))


def test_the_table_of_options_has_all() -> None:
    known = re.findall(r"addoption\(\s*\"(--[\w-]+)\"", (TREE / "fuzz/plugin.py").read_text())
    listed = {name for first in rows(TREE / "README.md", "Options") for name in re.findall(r"--[\w-]+", first)}
    assert "--sanitize" in known
    assert listed == {*known, "--no-isolate", "--hypothesis-profile", "--hypothesis-seed"}


def test_the_table_of_profiles_has_all() -> None:
    known = [(name, profile["max_examples"]) for name, profile in PROFILES.items()]
    table = {first.split("`")[1]: rest for first, rest in rows(TREE / "README.md", "Profiles").items() if "`" in first}
    table.pop("--hypothesis-profile")
    assert known and set(table) == {name for name, _ in known}
    for name, examples in known:
        assert re.match(rf"{int(examples):,}\b", table[name]), name


def test_the_table_of_invariants_says_what_they_say() -> None:
    """A new one needs no row to be tried out, so it may be missing here."""
    statements = {invariant.id: invariant.statement for invariant in invariants()}
    table = rows(TREE / "README.md", "What is checked")
    assert table.pop("id") == "statement" and len(table) >= 18
    for name, said in table.items():
        assert said.replace("`", "").startswith(statements[name]), name
