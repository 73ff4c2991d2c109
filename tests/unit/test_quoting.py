"""Quoting: what bash and sbatch read is what was meant, byte for byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specs import BYTES_AS_TEXT, NAMES, TEXT, bash

from mlmsub.core.quoting import assignment, is_name, join, quote, sbatch_value

ANY = TEXT | BYTES_AS_TEXT


def sbatch_words(line: str) -> list[str]:
    """What sbatch makes of the rest of a `#SBATCH` line (after `_get_argument` of its opt.c).

    Blanks separate; both kinds of quotes group; a backslash escapes the next character, also within quotes of
    either kind; an unquoted # starts a comment.
    """
    words: list[str] = []
    i = 0
    while i < len(line):
        while i < len(line) and line[i] in " \t\v\f\r\n":
            i += 1
        word, quote_mark, started = "", "", False
        while i < len(line) and (quote_mark or line[i] not in " \t\v\f\r\n"):
            char = line[i]
            if char == "\\":
                i += 1
                word += line[i] if i < len(line) else ""
            elif quote_mark:
                quote_mark = "" if char == quote_mark else quote_mark
                word += char if quote_mark else ""
            elif char in "\"'":
                quote_mark = char
            elif char == "#":
                return [*words, word] if started else words
            else:
                word += char
            started = True
            i += 1
        if started:
            words.append(word)
    return words


@given(st.lists(ANY, max_size=8))
def test_bash_gets_each_word_byte_for_byte(words: list[str]) -> None:
    printed = bash(f"for w in {join(words)}; do printf '%s\\0' \"$w\"; done" if words else ":")
    assert printed == b"".join(word.encode(errors="surrogateescape") + b"\0" for word in words)


@given(st.dictionaries(NAMES, ANY, max_size=8))
def test_a_sourced_assignment_gives_the_value_byte_for_byte(values: dict[str, str]) -> None:
    program = "".join(f"{assignment(name, value)}\nprintf '%s\\0' \"${name}\"\n" for name, value in values.items())
    assert bash(program or ":") == b"".join(v.encode(errors="surrogateescape") + b"\0" for v in values.values())


@pytest.mark.parametrize(
    "text", ['it\'s $HOME `id` "x" \\', "a,b c", "two\nlines", "", "[0]*3+[1]*58", "#no", "~", "-n"]
)
def test_quoted_values_of_the_reports(text: str) -> None:
    assert bash(f"printf %s {quote(text)}", env={"HOME": "/wrong"}).decode() == text


def test_nul_cannot_be_quoted() -> None:
    with pytest.raises(ValueError, match="NUL"):
        quote("a\0b")


@pytest.mark.parametrize("name", ["", "1A", "A-B", "A B", "A=B", "Ä", "A;id", "A\n"])
def test_what_is_no_name_is_not_assigned(name: str) -> None:
    assert not is_name(name)
    with pytest.raises(ValueError, match="variable's name"):
        assignment(name, "x")


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1))
def test_sbatch_reads_one_option_with_its_value(value: str) -> None:
    assert sbatch_words(f" --comment={sbatch_value(value)}") == [f"--comment={value}"]


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1))
def test_sbatch_reads_a_whole_argument_as_one_word(value: str) -> None:
    assert sbatch_words(f" {sbatch_value('--comment=' + value)} ") == [f"--comment={value}"]


@pytest.mark.parametrize("char", ["\n", "\r", "\t", "\0", "\x1b", "\x7f"])
def test_a_control_character_cannot_stand_on_an_sbatch_line(char: str) -> None:
    with pytest.raises(ValueError, match="control"):
        sbatch_value(f"a{char}b")


def test_a_plain_value_stays_readable() -> None:
    assert sbatch_value("batch,gpu") == "batch,gpu"
