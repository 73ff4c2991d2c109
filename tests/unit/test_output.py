"""What a person reads of a log that many ranks wrote."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlmsub.cli.output import LogPrinter, print_error, print_table
from mlmsub.core.errors import ChecksFailed
from mlmsub.core.issues import error, warning


def shown(capsys: pytest.CaptureFixture[str], *chunks: bytes, rank: int | None = None) -> str:
    printer = LogPrinter(rank)
    for chunk in chunks:
        printer.feed(chunk)
    printer.close()
    return capsys.readouterr().out


def test_what_all_ranks_say_stands_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, b"0: loading\n1: loading\n 2: loading\n0: done\n") == "3 ranks: loading\n0: done\n"


def test_what_one_rank_says_twice_stands_twice(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, b"0: a\n0: a\n") == "0: a\n0: a\n"


def test_order_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    log = b"=== begin\n0: a\n1: b\n0: b\nsrun: error\n0: c\n1: a\n1: c\n"
    assert shown(capsys, log) == "=== begin\n0: a\n2 ranks: b\nsrun: error\n0: c\n1: a\n1: c\n"


def test_a_line_may_come_in_pieces(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        shown(capsys, b"0: lo", b"ading \xc3", b"\xa4\n1: loading \xc3\xa4\n", b"0: e") == "2 ranks: loading ä\n0: e\n"
    )


def test_a_progress_bar_shows_its_last_state(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, b"0: 1%\r0: 50%\r100%\n") == "0: 100%\n"


def test_one_rank_alone_comes_without_its_label(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, b"=== x\n 0: a\n 1: b\n10: c\n1: d: e\n", rank=1) == "b\nd: e\n"


def test_bytes_that_are_not_utf8_do_not_end_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, b"0: \xff\n0: b\n") == "0: \ufffd\n0: b\n"


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("ab")), max_size=12))
def test_no_line_is_lost(lines: list[tuple[int, str]]) -> None:
    """As many lines of each text are counted as were said, and with one rank only their order stays too."""
    printed: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda text: printed.append(text))
        printer = LogPrinter()
        printer.feed("".join(f"{rank}: {text}\n" for rank, text in lines).encode())
        printer.close()
    counts = [int(line.split()[0]) if "ranks:" in line else 1 for line in printed]
    texts = [line[-1] for line, count in zip(printed, counts, strict=True) for _ in range(count)]
    assert sorted(texts) == sorted(text for _, text in lines)
    if len({rank for rank, _ in lines}) == 1:
        assert texts == [text for _, text in lines]


def test_a_table_has_columns(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("run", "state"), [("a", "failed"), ("bcd", "x")], ["failed", "x"])
    assert capsys.readouterr().out == "run  state\na    failed\nbcd  x\n"


def test_failed_checks_are_shown_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(ChecksFailed([error("a", "TP", "is wrong", "do x"), warning("b", "PP", "is odd")]))
    assert capsys.readouterr().err == (
        "error: TP: is wrong  [a]\n    fix: do x\nwarning: PP: is odd  [b]\nerror: 1 error; nothing was submitted\n"
    )
