"""A finding of the checks. Checks collect issues into a list; they never raise one at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True)
class Issue:
    """What is wrong (`message`), where (`field`) and what to do about it (`fix`); `code` is stable."""

    code: str
    severity: Severity
    field: str
    message: str
    fix: str = ""


def error(code: str, field: str, message: str, fix: str = "") -> Issue:
    return Issue(code, "error", field, message, fix)


def warning(code: str, field: str, message: str, fix: str = "") -> Issue:
    return Issue(code, "warning", field, message, fix)


def info(code: str, field: str, message: str, fix: str = "") -> Issue:
    return Issue(code, "info", field, message, fix)
