"""Prompts from files of every kind, and what a tokenizer makes of them. No model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlmsub.runtime.errors import StageError
from mlmsub.runtime.generation import prompts

USER, SYSTEM = {"role": "user", "content": "Why?"}, {"role": "system", "content": "Be brief."}
REPLY = {"role": "assistant", "content": "Because."}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<assistant>{% endif %}"


class Tokenizer:
    """A character is a token; plain text gets a first token of its own."""

    eos_token_id = 7

    def __init__(self, template: str | None = TEMPLATE) -> None:
        self.chat_template = template

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict:
        return {"input_ids": [1] * add_special_tokens + [ord(letter) for letter in text]}

    def apply_chat_template(self, messages: list, tokenize: bool, add_generation_prompt: bool) -> str:
        import jinja2

        assert not tokenize
        return jinja2.Template(self.chat_template).render(
            messages=messages, add_generation_prompt=add_generation_prompt
        )


def read(tmp_path: Path, *records: object) -> list[prompts.Prompt]:
    file = tmp_path / "some.jsonl"
    file.write_text("".join(record if isinstance(record, str) else json.dumps(record) + "\n" for record in records))
    return prompts.read(file)


def text_of(prompt: prompts.Prompt, *answers: str, template: str | None = TEMPLATE) -> str:
    return prompts.render(prompt, list(answers), Tokenizer(template))[0]


def test_a_text_file_has_a_prompt_a_line(tmp_path: Path) -> None:
    (tmp_path / "some.txt").write_text("one\n\n  two words  \n")
    found = prompts.read(tmp_path / "some.txt")
    assert [(prompt.index, prompt.text, prompt.turns) for prompt in found] == [(0, "one", 1), (1, "two words", 1)]


@pytest.mark.parametrize("key", ["text", "prompt"])
def test_plain_text_is_continued_as_it_is(tmp_path: Path, key: str) -> None:
    (found,) = read(tmp_path, {key: "The sky", "id": 3})
    assert prompts.render(found, [], Tokenizer()) == ("The sky", [1, *map(ord, "The sky")])
    assert text_of(prompts.as_chat(found)) == "<user>The sky<assistant>"


@pytest.mark.parametrize(
    "record",
    [
        {"question_id": 81, "category": "writing", "turns": ["Why?", "Why not?"]},
        {"prompt": ["Why?", "Why not?"], "reference": []},
        {"messages": [USER, {"role": "user", "content": "Why not?"}]},
        {"conversations": [{"from": "human", "value": "Why?"}, {"from": "human", "value": "Why not?"}]},
    ],
)
def test_turns_are_answered_one_by_one(tmp_path: Path, record: dict) -> None:
    (found,) = read(tmp_path, record)
    assert found.turns == 2
    assert text_of(found) == "<user>Why?<assistant>"
    assert text_of(found, "So.") == "<user>Why?<assistant>So.<user>Why not?<assistant>"


def test_answers_that_are_given_stay_and_a_last_one_is_a_reference(tmp_path: Path) -> None:
    (found,) = read(tmp_path, {"messages": [SYSTEM, USER, REPLY, USER, REPLY]})
    assert found.turns == 1
    assert text_of(found) == "<system>Be brief.<user>Why?<assistant>Because.<user>Why?<assistant>"


def test_a_conversation_gets_no_second_first_token(tmp_path: Path) -> None:
    (found,) = read(tmp_path, {"messages": [USER]})
    assert prompts.render(found, [], Tokenizer())[1] == [*map(ord, "<user>Why?<assistant>")]


def test_without_a_template_a_conversation_is_lines(tmp_path: Path) -> None:
    (found,) = read(tmp_path, {"turns": ["Why?", "And?"]})
    assert text_of(found, "So.", template=None) == "Why?\nSo.\nAnd?\n"


def test_a_refusing_template_is_the_prompts_problem(tmp_path: Path) -> None:
    (found,) = read(tmp_path, {"messages": [USER]})
    with pytest.raises(ValueError, match="the chat template refuses it"):
        text_of(found, template="{{ messages[9].role.x }}")


def test_bad_records_keep_their_place_and_say_why(tmp_path: Path) -> None:
    found = read(
        tmp_path, {"text": "fine"}, "{broken\n", {"title": "x"}, {"messages": [SYSTEM]}, {"messages": ["hello"]}, 5,
        {"text": "  "},
    )  # fmt: skip
    assert [prompt.index for prompt in found] == list(range(7))
    said = [prompt.problem for prompt in found]
    assert said[0] == ""
    assert "line 2 is not JSON" in said[1]
    assert "['title']" in said[2] and "messages" in said[2]
    assert "no message to answer" in said[3]
    assert "'hello'" in said[4]
    assert said[5] and said[6]


def test_parquet(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"prompt": [["a", "b"], ["c"]]}), tmp_path / "some.parquet")
    assert [text_of(prompt) for prompt in prompts.read(tmp_path / "some.parquet")] == [
        "<user>a<assistant>",
        "<user>c<assistant>",
    ]


def test_a_missing_file_and_another_kind_are_named(tmp_path: Path) -> None:
    (tmp_path / "some.csv").write_text("a\n")
    for path in (tmp_path / "some.csv", tmp_path / "none.txt"):
        with pytest.raises(StageError, match="PROMPTS_PATH"):
            prompts.check_file(str(path), "PROMPTS_PATH")


def test_the_built_in_prompts_travel_with_the_runtime() -> None:
    from mlmsub.app import resources

    found = prompts.read(prompts.BUILT_IN)
    assert len(found) == 8 and all(prompt.turns == 2 for prompt in found)
    assert "mlmsub/runtime/generation/prompts.jsonl" in resources.for_bundle()


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({"generation_config.json": {"eos_token_id": [5, 6]}, "config.json": {"eos_token_id": 9}}, [5, 6, 7]),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 9}}, [7, 9]),
        ({"config.json": {"text_config": {"eos_token_id": 3}}}, [3, 7]),
        ({}, [7]),
    ],
)
def test_end_tokens(tmp_path: Path, files: dict, ids: list[int]) -> None:
    for name, data in files.items():
        (tmp_path / name).write_text(json.dumps(data))
    assert prompts.end_tokens(tmp_path, Tokenizer()) == ids
