"""Saved failures: what a file and a token hold, and that nothing in one can do harm."""

from __future__ import annotations

import base64
import itertools
import json
import os
import pickle
import signal
import time
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pagefuzz.fuzz import saved as saving
from pagefuzz.fuzz.saved import OtherVersion, Unreadable
from pagefuzz.oracles.invariant import Violation
from pagefuzz.strategies import CASES
from pagefuzz.strategies.cache_layouts import ORDERS, CacheLayout
from pagefuzz.strategies.case import Case, Sequence
from pagefuzz.strategies.paged_decode_attention import PagedDecodeAttentionCase
from pagefuzz.strategies.reshape_and_cache import ReshapeAndCacheCase
from pagefuzz.strategies.slot_mapping import SlotMappingCase, Token
from pagefuzz.strategies.write_then_decode import WriteThenDecodeCase

SLOTS = SlotMappingCase(
    block_size=4, num_blocks=2, sequences=(Sequence((1,), (99999,), 3),), tokens=(Token(0, 2), Token(7, -1))
)
EXAMPLES: tuple[Case, ...] = (
    SLOTS,
    ReshapeAndCacheCase(block_size=2, num_blocks=2**35, slots=(-1, 2**36 - 1), num_kv_heads=3, dtype="float16"),
    PagedDecodeAttentionCase(
        block_size=4, num_blocks=3, sequences=(Sequence((2, 0), (-1,), 5), Sequence((), (0, 1, 2), 0)), scale=1 / 3
    ),
    WriteThenDecodeCase(
        block_size=2,
        num_blocks=2,
        sequences=(Sequence((1,), (-1,), 2), Sequence((1,), (0,), 2)),
        k_layout=CacheLayout("N2SHD", (0, 1, 0, 3, 0)),
        v_layout=CacheLayout("N2SHD", (0, 1, 0, 3, 0)),
        tokens_of=((4,), (4,)),
        queries_of=(1, 0),
        new_tokens=3,
        order=7,
        fresh="tenant",
    ),
)
SEEN = Violation("slot 1", "slot 0", "token 0")


def save(folder: Path, case: Case = SLOTS) -> Path:
    return saving.save(folder, "my kernel", "failure", "I4", case, case, SEEN, "cpu")[0]


def plain(**changes: Any) -> dict[str, Any]:
    """A good file's content, with changes; None drops a field."""
    case = json.loads(json.dumps(asdict(SLOTS)))
    good = {"pagefuzz": 1, "operation": "slot_mapping", "kernel": "k", "invariant": "I4", "case": case}
    return {name: value for name, value in {**good, **changes}.items() if value is not None}


def with_case(**changes: Any) -> dict[str, Any]:
    return plain(case={**plain()["case"], **changes})


def decode_with(operation: str = "paged_decode_attention", **changes: Any) -> dict[str, Any]:
    """A good file of two sequences, with changes to its case."""
    rows = [{"blocks": [block], "context_len": 1} for block in range(2)]
    return plain(operation=operation, case={"block_size": 1, "num_blocks": 2, "sequences": rows, **changes})


def with_layout(order: str, operation: str, **changes: Any) -> dict[str, Any]:
    """A file whose caches have the widest gaps that there may be."""
    layout = {"order": order, "padding": [65536] * len(order)}
    return plain(operation=operation, case={"num_blocks": 4, "k_layout": layout, "v_layout": layout, **changes})


def decode(content: Any) -> tuple[saving.SavedCase, Case]:
    return saving.decode(content if isinstance(content, bytes) else json.dumps(content).encode(), "file.json")


def packed(content: bytes) -> str:
    return saving.TOKEN_PREFIX + base64.urlsafe_b64encode(zlib.compress(content, 9)).decode().rstrip("=")


# ---- what is written is what is read


@pytest.mark.parametrize("case", EXAMPLES, ids=lambda case: case.operation)
def test_a_case_comes_back_from_its_file_and_from_its_token(case: Case, tmp_path: Path) -> None:
    saved, read = saving.read(save(tmp_path, case))
    assert read == case
    assert (saved.kind, saved.operation, saved.kernel, saved.invariant) == (
        "failure",
        case.operation,
        "my kernel",
        "I4",
    )
    again, told = saving.from_token(saving.token("my kernel", "I4", case))
    assert told == case
    assert (again.operation, again.kernel, again.invariant) == (case.operation, "my kernel", "I4")


def test_a_file_is_json_for_a_person_to_read(tmp_path: Path) -> None:
    path = save(tmp_path)
    content = json.loads(path.read_text())
    assert {"kind", "operation", "kernel", "invariant", "case", "versions"} <= set(content)
    assert content["seen"] == "slot 1" and content["right"] == "slot 0" and content["where"] == "token 0"
    assert {"pagefuzz", "torch", "triton", "numpy", "hypothesis", "python"} == set(content["versions"])
    assert len(path.read_text().splitlines()) > 20
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_the_same_case_has_one_file_and_a_damaged_one_is_written_anew(tmp_path: Path) -> None:
    arguments = ("k", "failure", "I4", SLOTS, SLOTS, SEEN, "cpu")
    path, known = saving.save(tmp_path, *arguments)  # type: ignore[arg-type]
    assert not known
    assert saving.save(tmp_path, *arguments) == (path, True)  # type: ignore[arg-type]
    path.write_bytes(path.read_bytes()[:100])
    assert saving.save(tmp_path, *arguments) == (path, False)  # type: ignore[arg-type]
    assert saving.read(path)[1] == SLOTS


@pytest.mark.parametrize("name", ["../../up", "/etc/passwd", "a b;rm -rf", "k" * 500, "\x1b[2J\n", "noël/ÿ"])
def test_a_kernel_s_name_cannot_lead_out_of_the_folder(name: str, tmp_path: Path) -> None:
    path, _ = saving.save(tmp_path / "in", name, "failure", "I4", SLOTS, SLOTS, SEEN, "cpu")
    assert path.parent == tmp_path / "in" and path.name.isascii() and " " not in path.name
    assert [file.name for file in tmp_path.iterdir()] == ["in"]


# ---- what is refused

DEEP = b'{"pagefuzz": 1, "found_as": {"x": ' + b"[" * 100_000
WRONG: dict[str, tuple[Any, str]] = {
    "empty": (b"", "is not JSON, or damaged"),
    "truncated": (json.dumps(plain()).encode()[:-20], "is not JSON, or damaged"),
    "invalid UTF-8": (json.dumps(plain()).encode().replace(b'"k"', b'"\xff\xfe"'), "damaged"),
    "UTF-16": (json.dumps(plain()).encode("utf-16"), "is not JSON"),
    "pickle": (pickle.dumps(plain()), "is not JSON"),
    "NaN": (b'{"pagefuzz": NaN}', "is not JSON"),
    "deep nesting": (DEEP, "is not JSON, or damaged"),
    "deep and closed": (b"[" * 500_000 + b"]" * 500_000, "is not JSON, or damaged"),
    "long number": (b'{"pagefuzz": ' + b"9" * 900_000 + b"}", "damaged|no format version|update"),
    "list": ([1, 2], "it has no format version"),
    "foreign": ({"name": "package", "version": 3}, "it has no format version"),
    "format as text": (plain(pagefuzz="1"), "it has no format version"),
    "format true": (plain(pagefuzz=True), "it has no format version"),
    "format 0": (plain(pagefuzz=0), "it has no format version"),
    "unknown field": (plain(exec="import os"), "damaged: .*exec"),
    "unknown kind": (plain(kind="surprise"), "damaged: .*surprise"),
    "unknown operation": (plain(operation="os.system"), "unknown operation 'os.system'; known are slot_mapping"),
    "no operation": (plain(operation=None), "damaged: .*operation"),
    "kernel is a number": (plain(kernel=7), "damaged: .*kernel"),
    "long name": (plain(kernel="k" * 300_000), "damaged: .*kernel"),
    "negative passes": (plain(passes=-(10**9)), "damaged: .*passes"),
    "case is a list": (plain(case=[]), "damaged: .*case"),
    "found as nonsense": (plain(found_as={"block_size": 1}), "damaged: .*num_blocks"),
    "found as huge": (plain(found_as={"x": 10**40}), "damaged"),
    "case with an unknown field": (with_case(head=1), "a case of slot_mapping has no field 'head'"),
    "row with an unknown field": (
        with_case(sequences=[{"blocks": [1], "tail": [0], "context_len": 3, "os": 1}]),
        "has no field 'os'",
    ),
    "missing field": (plain(case={"block_size": 4}), "damaged: .*num_blocks"),
    "size is text": (with_case(block_size="4"), "damaged: .*block_size"),
    "size is true": (with_case(block_size=True), "damaged: .*block_size"),
    "size is a fraction": (with_case(block_size=4.5), "damaged: .*block_size"),
    "negative size": (with_case(block_size=-4), "damaged: .*block_size"),
    "huge size": (with_case(block_size=10**12), "damaged: .*block_size"),
    "huge pool": (with_case(num_blocks=10**18), "damaged: .*num_blocks"),
    "huge seed": (with_case(seed=10**30), "damaged: .*seed"),
    "huge length": (with_case(sequences=[{"context_len": 10**9}]), "damaged: .*context_len"),
    "too many tokens": (with_case(tokens=[{"position": -1}] * 20_000), "20000 tokens are more than"),
    "wide gaps": (with_case(sequences=[{"tail": [0]}] * 9000, tokens=[], table_padding=65536), "is more than a case"),
    "blocks missing": (
        with_case(sequences=[{"blocks": [1], "context_len": 5}]),
        "contradicts itself: sequence 0 has 1",
    ),
    "unknown dtype": (with_case(index_dtype="int8"), "contradicts itself: index_dtype='int8'"),
    "unknown fault": (with_case(fault="__import__"), "contradicts itself: fault='__import__'"),
    "escape codes": (with_case(**{"\x1b[2J\x07": 1}), r"has no field '\\+x1b\[2J\\+x07'"),
    "head dim of 10^12": (
        plain(operation="paged_decode_attention", case={"block_size": 1, "num_blocks": 1, "head_dim": 10**12}),
        "damaged: .*head_dim",
    ),
    "scale of text": (
        plain(operation="paged_decode_attention", case={"block_size": 1, "num_blocks": 1, "scale": "nan"}),
        "damaged: .*scale",
    ),
    "scale of 1e300": (
        plain(operation="paged_decode_attention", case={"block_size": 1, "num_blocks": 1, "scale": 1e300}),
        "contradicts itself: scale",
    ),
    "unknown order": (
        decode_with(k_layout={"order": "SHND"}),
        "contradicts itself: k_layout: order 'SHND' is not one of",
    ),
    "long order": (decode_with(k_layout={"order": "N" * 65}), "damaged: .*k_layout.order"),
    "order is a list": (decode_with(v_layout={"order": ["N", "S"]}), "damaged: .*v_layout.order"),
    "layout is text": (decode_with(k_layout="NHSD"), "damaged: .*k_layout"),
    "layout with an unknown field": (decode_with(k_layout={"strides": [0, 0, 0, 0]}), "has no field 'strides'"),
    "one layout packed": (
        decode_with(k_layout={"order": "N2SHD"}),
        "contradicts itself: k_layout and v_layout must be",
    ),
    "padding too short": (decode_with(k_layout={"padding": [1]}), "k_layout: padding must name every dim"),
    "padding too long": (decode_with(v_layout={"padding": [0] * 100_000}), "v_layout: padding must name every dim"),
    "negative padding": (decode_with(k_layout={"padding": [0, 0, -2, 0]}), "damaged: .*k_layout.padding"),
    "huge padding": (decode_with(k_layout={"padding": [0, 0, 65537, 0]}), "damaged: .*k_layout.padding"),
    "padding is a fraction": (decode_with(k_layout={"padding": [0, 0, 0.5, 0]}), "damaged: .*k_layout.padding"),
    **{
        f"gigabytes of gaps, {order}, {operation}": (
            with_layout(order, operation, block_size=64, num_kv_heads=64, **changes),
            r"contradicts itself: \d+ elements are more than a case may hold",
        )
        for order in ORDERS
        for operation, changes in (
            ("paged_decode_attention", {"sequences": [{"blocks": [3], "context_len": 1}]}),
            ("write_then_decode", {"sequences": [{"blocks": [3], "context_len": 1}]}),
            ("reshape_and_cache", {"slots": [5]}),
        )
    },
    "tokens of too few rows": (decode_with(tokens_of=[[0]]), "tokens_of does not name the pages of each sequence"),
    "tokens of too many pages": (decode_with(tokens_of=[[0, 0], [1]]), "tokens_of does not name the pages"),
    "tokens of two at once": (
        decode_with(sequences=[{"blocks": [0], "context_len": 1}] * 2, tokens_of=[[0], [1]]),
        "contradicts itself: tokens_of gives block 0 the tokens of sequences 0 and 1",
    ),
    "tokens of nobody": (decode_with(tokens_of=[[-1], [0]]), "damaged: .*tokens_of"),
    "tokens of a huge number": (decode_with(tokens_of=[[10**30], [0]]), "damaged: .*tokens_of"),
    "tokens of text": (decode_with(tokens_of=["0", "1"]), "damaged: .*tokens_of"),
    "queries of too few": (decode_with(queries_of=[0]), "queries_of does not name each row"),
    "queries of nobody": (decode_with(queries_of=[-1, 0]), "damaged: .*queries_of"),
    "queries of a huge number": (decode_with(queries_of=[4097, 0]), "damaged: .*queries_of"),
    "needles that are not exact": (decode_with(values="needles", scale=1e-9), "values='needles' is not exact"),
    "unknown fresh memory": (decode_with(fresh="seven"), "contradicts itself: fresh='seven' is not one of nan"),
    "negative order": (decode_with(order=-1), "damaged: .*order"),
    "order past its bound": (decode_with(order=2**32), "damaged: .*order"),
    "far too many new tokens": (decode_with("write_then_decode", new_tokens=10**9), "damaged: .*new_tokens"),
    "negative new tokens": (decode_with("write_then_decode", new_tokens=-1), "damaged: .*new_tokens"),
    "new tokens of a decode": (decode_with(new_tokens=1), "has no field 'new_tokens'"),
    "slots that do not fit": (
        decode_with(
            "write_then_decode",
            block_size=4096,
            num_blocks=2**31,
            index_dtype="int32",
            sequences=[{"blocks": [2**30], "context_len": 1}],
        ),
        "contradicts itself: slots of block 1073741824 do not fit int32",
    ),
    "every element": (
        plain(
            operation="reshape_and_cache",
            case={"block_size": 4096, "num_blocks": 9, "slots": [5], "num_kv_heads": 4096, "head_dim": 4096},
        ),
        "elements are more than a case may hold",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_file_gets_one_sentence_and_little_time_and_memory(what: str) -> None:
    content, pattern = WRONG[what]
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(Unreadable, match=pattern) as raised:
            saving.decode(data, "file.json")
        taken, (_, peak) = time.process_time() - started, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    sentence = str(raised.value)
    assert sentence.startswith("file.json") and sentence.isprintable() and len(sentence) < 500
    assert taken < 5 and peak < 100 << 20


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("operation", ["paged_decode_attention", "write_then_decode", "reshape_and_cache"])
def test_the_widest_gaps_that_are_accepted_take_no_gigabyte(operation: str, order: str) -> None:
    """Of one block with one row of the widest gap, and as many such blocks as pass."""
    accepted = 0
    for dim, gap, block in itertools.product(range(1, len(order)), (65536, 30000), (1, 40)):
        padding = [gap if place == dim else 0 for place in range(len(order))]
        layout = {"order": order, "padding": padding}
        sizes = {"block_size": 4, "num_kv_heads": 4, "num_blocks": 2**40, "dtype": "float16"}
        rows = [{"blocks": [3 * b], "context_len": 1} for b in range(block)]
        content = {"slots": [12 * b for b in range(block)]} if operation == "reshape_and_cache" else {"sequences": rows}
        case = {**sizes, "k_layout": layout, "v_layout": layout, "poison": "tenant", **content}
        try:
            _, read = decode(plain(operation=operation, case=case))
        except Unreadable:  # its sentence is looked at above
            continue
        tracemalloc.start()
        started = time.process_time()
        read.arguments()
        taken, (_, peak) = time.process_time() - started, tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 700 << 20 and taken < 10, (peak >> 20, taken)
        accepted += 1
    assert accepted > 1


def test_a_file_of_a_newer_pagefuzz_says_so() -> None:
    with pytest.raises(OtherVersion, match=r"file\.json has format 2, and pagefuzz .* reads up to 1: update pagefuzz"):
        decode(plain(pagefuzz=2, what_we_do_not_know_yet=[1]))


@pytest.mark.parametrize("operation", CASES)
def test_no_prefix_of_a_file_and_no_changed_byte_does_more_than_be_refused(operation: str, tmp_path: Path) -> None:
    case = next(case for case in EXAMPLES if case.operation == operation)
    data = save(tmp_path, case).read_bytes()
    refused = 0
    for place in range(len(data)):
        for changed in (data[:place], data[:place] + bytes([data[place] ^ 0x15]) + data[place + 1 :]):
            try:
                saving.decode(changed, "file.json")
            except Unreadable:
                refused += 1
    assert refused > len(data)


# ---- what is no ordinary file


def symlink_loop(path: Path) -> None:
    path.symlink_to(path)


def hundred_megabytes(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(100 << 20)


SPECIAL: dict[str, tuple[Callable[[Path], None], str]] = {
    "pipe": (os.mkfifo, "not a regular file"),
    "folder": (lambda path: path.mkdir(), "not a regular file|cannot be read"),
    "loop": (symlink_loop, "cannot be read: "),
    "dangling": (lambda path: path.symlink_to("nowhere"), "cannot be read: "),
    "zeros without end": (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    "terminal": (lambda path: path.symlink_to("/dev/tty"), "not a regular file|cannot be read"),
    "100 MB": (hundred_megabytes, "has more than 1048576 bytes"),
    "of the kernel, without a size": (
        lambda path: path.symlink_to("/proc/self/pagemap"),
        "cannot be read|more than|JSON",
    ),
}


@pytest.mark.parametrize("what", SPECIAL)
def test_what_is_no_ordinary_file_is_refused_at_once(what: str, tmp_path: Path) -> None:
    make, pattern = SPECIAL[what]
    path = tmp_path / "saved.json"
    make(path)

    def too_long(*_: object) -> None:
        raise AssertionError(f"reading a {what} takes too long")

    alarm = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, 10)
    tracemalloc.start()
    try:
        with pytest.raises(Unreadable, match=pattern):
            saving.read(path)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)
    assert saving.kernel_of(path) is None


# ---- tokens

TOKEN = saving.token("k", "I4", SLOTS)
BOMB = packed(b'["slot_mapping","k","I4",{"x":"' + b"0" * (64 << 20) + b'"}]')


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        (TOKEN[:-7], "is cut short, or too long|damaged"),
        (TOKEN[:9] + "AAAA" + TOKEN[13:], "damaged"),
        (TOKEN + "!", "damaged"),
        ("pf1.", "cut short|damaged"),
        ("pf1.é", "damaged"),
        ("pf1." + "A" * 100_000, "damaged|cut short"),
        (BOMB, "is cut short, or too long"),
        (packed(b"[" * 100_000), "damaged"),
        (packed(b'["slot_mapping","k","I4"]'), "damaged"),
        (packed(json.dumps(["slot_mapping", "k", "I4", {"block_size": -1, "num_blocks": 1}]).encode()), "block_size"),
        (packed(json.dumps(["os.system", "k", "I4", {}]).encode()), "unknown operation 'os.system'"),
        (packed(pickle.dumps("x")), "damaged"),
    ],
    ids=[
        "cut", "changed", "appended", "empty", "not ASCII", "long", "bomb", "deep", "short list", "negative size",
        "operation", "pickle",
    ],
)  # fmt: skip
def test_a_wrong_token_gets_one_sentence(text: str, pattern: str) -> None:
    assert saving.is_token(text)
    tracemalloc.start()
    try:
        with pytest.raises(Unreadable, match=pattern) as raised:
            saving.from_token(text)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()
    assert str(raised.value).startswith("token pf1.") and str(raised.value).isprintable()
    assert len(str(raised.value)) < 400


def test_a_token_of_a_newer_pagefuzz_says_so() -> None:
    assert saving.is_token("pf2.abc") and not saving.is_token("pf.json") and not saving.is_token("pf1x")
    with pytest.raises(OtherVersion, match=r"token pf2\.abc has format 2, and pagefuzz .* reads up to 1"):
        saving.from_token("pf2.abc")


def test_every_length_of_a_token_is_read() -> None:
    lengths = set()
    for size in range(1, 40):
        case = SlotMappingCase(block_size=size, num_blocks=size * 7, sequences=(Sequence((), (size,) * size, 0),))
        text = saving.token("k", "I4", case)
        lengths.add(len(text) % 4)
        assert saving.from_token(text)[1] == case
    assert len(lengths) >= 3
