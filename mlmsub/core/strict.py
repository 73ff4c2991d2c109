"""Dataclasses from YAML mappings, strictly: an unknown key is an error that names the nearest one.

The YAML is loaded with all scalars as strings (`yaml.BaseLoader`), since YAML 1.1 reads `4:00:00` as 14400,
`no` as false and `007` as 7; the field's type decides here.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from mlmsub.core.errors import UsageError
from mlmsub.core.values import number

T = TypeVar("T")
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def build(cls: type[T], data: object, where: str) -> T:
    """An instance of the dataclass `cls` from a mapping; `where` names the file in messages.

    Raises UsageError naming the file and the key, also for a value that the class refuses (ValueError).
    """
    if not isinstance(data, Mapping):
        raise UsageError(f"{where}: expected a mapping of keys, not {_kind(data)}")
    hints = typing.get_type_hints(cls)
    known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key in data:
        if key not in known:
            raise UsageError(
                f"{where}: unknown key {key!r}{nearest(str(key), known)}",
                fix=f"the keys are: {', '.join(known)}",
            )
    values = {key: _convert(value, hints[key], f"{where}: {key}") for key, value in data.items()}
    missing = [
        field.name
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and field.name not in values
    ]
    if missing:
        raise UsageError(f"{where}: the key {missing[0]!r} is missing")
    try:
        return cls(**values)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None


def _convert(value: object, hint: Any, where: str) -> Any:
    if hint is object:  # its reader knows what it may be
        return value
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value in ("", "null", "~", None):
            return None
        return _convert(value, next(a for a in arguments if a is not type(None)), where)
    if origin is typing.Literal:
        if value not in arguments:
            raise UsageError(f"{where}: must be one of {', '.join(arguments)}, not {value!r}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise UsageError(f"{where}: expected a list, not {_kind(value)}")
        return tuple(_convert(item, arguments[0], f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict or hint is dict:
        if not isinstance(value, Mapping):
            if value == "":
                return {}
            raise UsageError(f"{where}: expected a mapping, not {_kind(value)}")
        return {str(k): _convert(v, arguments[1], f"{where}.{k}") for k, v in value.items()}
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, where)
    if not isinstance(value, str):
        raise UsageError(f"{where}: expected a single value, not {_kind(value)}")
    if hint is bool:
        if value.lower() not in _BOOLEANS:
            raise UsageError(f"{where}: must be true or false, not {value!r}")
        return _BOOLEANS[value.lower()]
    if hint is int:
        if (said := number(value)) is None:
            raise UsageError(f"{where}: must be a whole number, not {value!r}")
        return said
    return value


def _kind(value: object) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    return "a list" if isinstance(value, list) else repr(value)
