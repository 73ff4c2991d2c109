"""What a person reads: tables, issues, errors, and a log that 64 ranks wrote."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
from collections.abc import Iterable, Sequence

from mlmsub.core.errors import ChecksFailed, MlmsubError
from mlmsub.core.issues import Issue

_COLOURS = {
    "bold": 1, "dim": 2, "error": 31, "warning": 33, "info": 36,
    "succeeded": 32, "failed": 31, "out of memory": 31, "timeout": 31, "node failure": 31, "cancelled": 33,
    "preempted": 33, "running": 36, "pending": 34, "requeued": 34, "unknown": 35,
}  # fmt: skip


HIDDEN = "***"


def styled(text: str, style: str, *, stream: object = None) -> str:
    """The text in the style's colour where a terminal shows it."""
    isatty = getattr(stream or sys.stdout, "isatty", lambda: False)
    return f"\x1b[{_COLOURS[style]}m{text}\x1b[0m" if style in _COLOURS and isatty() else text


def count(number: int, what: str) -> str:
    """Such as `1 node`, `2 nodes`."""
    return f"{number} {what}{'' if number == 1 or what == 'info' else 's'}"


def printable(text: str) -> str:
    """What comes from elsewhere, without what could move the cursor."""
    return "".join(c if c.isprintable() else "?" for c in text)


def print_json(data: object) -> None:
    print(json.dumps(data, indent=2, default=str))


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]], styles: Sequence[str] = ()) -> None:
    """Columns as wide as they must be; `styles` colours the second column of each row."""
    rows = [list(map(str, row)) for row in rows]
    widths = [max(len(row[i]) for row in [list(header), *rows]) for i in range(len(header))]
    print(styled("  ".join(name.ljust(width) for name, width in zip(header, widths, strict=True)).rstrip(), "dim"))
    for index, row in enumerate(rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        if styles:
            cells[1] = styled(cells[1], styles[index])
        print("  ".join(cells).rstrip())


def print_issues(issues: Iterable[Issue]) -> None:
    for issue in issues:
        word = styled(issue.severity, issue.severity, stream=sys.stderr)
        print(f"{word}: {issue.field}: {issue.message}  [{issue.code}]", file=sys.stderr)
        if issue.fix:
            print(f"    fix: {issue.fix}", file=sys.stderr)


def print_error(error: MlmsubError) -> None:
    if isinstance(error, ChecksFailed):
        print_issues(error.issues)
    print(f"{styled('error', 'error', stream=sys.stderr)}: {error.message}", file=sys.stderr)
    if error.fix:
        print(f"    fix: {error.fix}", file=sys.stderr)


def note(text: bytes) -> None:
    """Something beside the log, on stderr."""
    print(text.decode(errors="replace").rstrip(), file=sys.stderr, flush=True)


class RawPrinter:
    """Prints a log's bytes as they are."""

    received = 0

    def feed(self, data: bytes) -> None:
        self.received += len(data)
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    def close(self) -> None:
        pass


class Progress:
    """A bar on stderr, where that is a terminal; called with the bytes so far and the bytes in all."""

    def __init__(self, title: str) -> None:
        self._title, self._shown = title, -1

    def __call__(self, done: int, total: int) -> None:
        percent = 100 * done // max(total, 1)
        if percent != self._shown and sys.stderr.isatty():
            bar = "#" * (percent * 30 // 100)
            print(f"\r{self._title} [{bar:30}] {percent:3} % of {total / 2**20:.1f} MiB", end="", file=sys.stderr)
            self._shown = percent

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown >= 0:
            print(file=sys.stderr)


class LogPrinter:
    """Prints a log for a person: what several ranks say alike stands once, with how many said it.

    srun labels each line `rank: text`. Equal lines of several ranks are gathered as long as each rank's own lines stay
    in order; a line waits for others of its kind at most HOLD seconds. `rank` keeps one rank's lines only, unlabelled.
    """

    HOLD = 0.7
    MOST = 200  # lines held back
    _LABELLED = re.compile(r" *(\d+): (.*)", re.DOTALL)

    def __init__(self, rank: int | None = None) -> None:
        self.received = 0  # bytes, to go on from after a lost connection
        self._rest, self._rank = b"", rank
        self._groups: list[tuple[str, list[str]]] = []  # text, ranks: what is held back
        self._last: dict[str, int] = {}  # rank -> the last group that it is in
        self._lock, self._timer = threading.Lock(), threading.Timer(0, lambda: None)

    def feed(self, data: bytes) -> None:
        """Print what is new; any cut of the log into pieces will do."""
        self.received += len(data)
        self._timer.cancel()
        with self._lock:
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._line(line.decode(errors="replace"))
            sys.stdout.flush()
        self._timer = threading.Timer(self.HOLD, self._let_go)
        self._timer.daemon = True
        self._timer.start()

    def close(self) -> None:
        """Print what was held back."""
        self._timer.cancel()
        if self._rest:
            self._line(self._rest.decode(errors="replace"))
        self._let_go()

    def _let_go(self) -> None:
        with self._lock, contextlib.suppress(BrokenPipeError):  # the main thread meets it too, and ends
            self._flush()
            sys.stdout.flush()

    def _line(self, line: str) -> None:
        match = self._LABELLED.fullmatch(line)
        if self._rank is not None:
            if match and int(match[1]) == self._rank:
                print(match[2])
            return
        if match:
            self._gather(match[1], match[2].rpartition("\r")[2])
        else:
            self._flush()
            print(styled(line, "bold") if line.startswith("===") else line)

    def _gather(self, rank: str, text: str) -> None:
        first = self._last.get(rank, -1) + 1
        index = next((i for i in range(first, len(self._groups)) if self._groups[i][0] == text), len(self._groups))
        if index == len(self._groups):
            if index >= self.MOST:
                self._flush()
                index = 0
            self._groups.append((text, []))
        self._groups[index][1].append(rank)
        self._last[rank] = index

    def _flush(self) -> None:
        for text, ranks in self._groups:
            who = ranks[0] if len(ranks) == 1 else f"{len(ranks)} ranks"
            print(f"{styled(f'{who}:', 'dim')} {text}")
        self._groups, self._last = [], {}
