r"""Reading an env-setup file: the bash program that sources it, and what it prints.

The file is a program, so only bash can say what it means. It runs with a clean environment, an empty folder as
PATH and the file's folder as working directory (the caller also sets a time limit). A command that is missing
there may exist in the container: the values are then *unsure*, and checks on them may only warn.

`set -a` stands around the source, as in the job: a bare `TP=8` must reach Python.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field

# Sourced at top level, not in a function, where `declare` would make its variables local. The DEBUG trap notes
# which files are sourced in turn and where the shell is, so that an `exit` (or `set -e`) can be named by line.
# Results go to descriptor 3 as NUL-terminated fields: nothing that the file prints can be taken for one.
READER = r"""
((BASH_VERSINFO[0] * 10 + BASH_VERSINFO[1] >= 43)) || exit 97
exec 3>&1 1>&2
__mlm_dir=$PWD __mlm_at=
dirname() {
    while [[ $1 == -* ]]; do shift; done
    local p=${1%"${1##*[!/]}"}
    case $p in */*) p=${p%/*}; echo "${p:-/}" ;; *) echo "${p:+.}" ;; esac
}
basename() {
    while [[ $1 == -* ]]; do shift; done
    local p=${1%"${1##*[!/]}"}
    p=${p##*/}; echo "${p%"${2-}"}"
}
realpath() {
    while [[ $1 == -* ]]; do shift; done
    case $1 in /*) echo "$1" ;; *) echo "$PWD/${1#./}" ;; esac
}
readlink() { realpath "$@"; }
command_not_found_handle() { printf 'missing\0%s\0' "$1" >&3; return 127; }
declare -A __mlm_files=()
trap 'builtin printf "ended\0%s\0" "$__mlm_was" >&3' EXIT  # itself fires DEBUG once more
set -T
trap '__mlm_files[.${BASH_SOURCE[0]:-}]=1 __mlm_was=$__mlm_at __mlm_at="${BASH_SOURCE[0]:-} line $LINENO"' DEBUG
set -a
source "$__mlm_setup"
builtin set +a
builtin unset -f builtin set trap unset declare printf compgen cd dirname basename realpath readlink
IFS=$' \t\n'
trap - DEBUG EXIT
set +eufT
cd "$__mlm_dir"
for __mlm in "${!__mlm_files[@]}"; do printf 'file\0%s\0' "${__mlm#.}" >&3; done
for __mlm in $(compgen -A arrayvar); do
    case $__mlm in BASH*|DIRSTACK|FUNCNAME|GROUPS|PIPESTATUS|__mlm*) continue;; esac
    declare -n __mlm_ref=$__mlm
    printf 'array\0%s\0%s\0' "$__mlm" "${#__mlm_ref[@]}" >&3
    ((${#__mlm_ref[@]})) && printf '%s\0' "${__mlm_ref[@]}" >&3
    declare +n __mlm_ref
    unset __mlm_ref
done
for __mlm in $(compgen -A export); do printf 'value\0%s\0%s\0' "$__mlm" "${!__mlm}" >&3; done
printf 'done\0' >&3
"""
_SHELLS_OWN = ("_", "OLDPWD", "PWD", "SHLVL", "__mlm_at", "__mlm_was", "__mlm_setup")
TOO_OLD = 97  # READER's exit code under a bash before 4.3, such as macOS's 3.2


@dataclass(frozen=True)
class Reading:
    """What sourcing an env setup gave. `values` holds strings, `arrays` the elements of bash arrays."""

    values: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, tuple[str, ...]] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()  # commands that were not found: all values are unsure
    ended_at: str = ""  # where the file ended the shell before its own end
    complete: bool = False

    @property
    def unsure(self) -> bool:
        return bool(self.missing)

    def text(self, name: str) -> str:
        """The value as one string, also of an array; "" when unset."""
        return self.values.get(name, " ".join(self.arrays.get(name, ())))


def parse(output: bytes, given: dict[str, str]) -> Reading:
    """Read what READER printed. `given` are the variables that it started with: unchanged ones are left out."""
    fields = iter(output.decode(errors="surrogateescape").split("\0")[:-1])
    values: dict[str, str] = {}
    arrays: dict[str, tuple[str, ...]] = {}
    files: list[str] = []
    missing: list[str] = []
    ended_at, complete = "", False
    for kind in fields:
        if kind == "value":
            name, value = next(fields), next(fields)
            if given.get(name) != value and name not in _SHELLS_OWN:
                values[name] = value
        elif kind == "array":
            name, count = next(fields), int(next(fields))
            arrays[name] = tuple(next(fields) for _ in range(count))
        elif kind == "file":
            files.extend(filter(None, [next(fields)]))
        elif kind == "missing":
            missing.append(next(fields))
        elif kind == "ended":
            ended_at = next(fields)
        elif kind == "done":
            complete = True
    return Reading(values, arrays, tuple(files), tuple(dict.fromkeys(missing)), ended_at, complete)


def read_static(text: str) -> Reading:
    """Plain `NAME=value` and `NAME=(...)` lines, without running anything (`--static`, or no bash); always unsure."""
    values: dict[str, str] = {}
    arrays: dict[str, tuple[str, ...]] = {}
    for line in re.sub(r"\\\n", "", text).splitlines():
        match = re.match(r"\s*(?:export\s+)?([A-Za-z_]\w*)=(.*)", line)
        if not match or re.search(r"[$`]", match[2]):
            continue
        array = re.fullmatch(r"\((.*)\)\s*(?:#.*)?", match[2])
        try:
            words = shlex.split(array[1] if array else match[2], comments=True)
        except ValueError:  # a quote that ends on a later line
            continue
        if array:
            arrays[match[1]] = tuple(words)
        elif not match[2].startswith("("):
            values[match[1]] = words[0] if words else ""
    return Reading(values, arrays, missing=("it was read without running it",), complete=True)


def doubts(content: bytes) -> str:
    """Why a file cannot be sourced as it is: DOS line ends or a byte order mark; "" if it can."""
    if content.startswith(b"\xef\xbb\xbf"):
        return "it starts with a byte order mark, which bash takes for part of the first command"
    if b"\r\n" in content:
        return "it has DOS line ends, and each value would end in a carriage return"
    return ""
