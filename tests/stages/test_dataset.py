"""Training data: which tokens are learned, what is packed, who makes it, and how it is read."""

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from rig import ROOT, free_port, make_tokenizer

from mlmsub.runtime.data import dataset, documents, packing
from mlmsub.runtime.data.dataset import DataSpec
from mlmsub.runtime.data.packing import PackedDataset
from mlmsub.runtime.env import Env
from mlmsub.runtime.errors import CheckFailed, StageError
from mlmsub.runtime.progress import Steps
from mlmsub.runtime.session import Job

LENGTH = 64
SPECIALS = [
    "<|im_start|>", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|bos|>", "<|eot_id|>",
    "<|start_header_id|>", "<|end_header_id|>", "[INST]", "[/INST]", "<|User|>", "<|Assistant|>", "<|return|>",
    "<|message|>",
]  # fmt: skip

# Each is written as the family's own template works: the marks, and what it does to the past.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (  # the end of turn stands outside of the marks
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_PROMPT = CHATML.partition("{% if add_generation_prompt")[0]
LLAMA3 = (
    "<|bos|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (  # the system prompt moves to the last question, and roles must alternate
    "{% set ns = namespace(system='') %}{% if messages[0].role == 'system' %}{% set ns.system = messages[0].content %}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}<|bos|>{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {% if ns.system and loop.index0 >= rest|length - 2 %}{{ ns.system }}\n\n"
    "{% endif %}{{ m.content }} [/INST]{% else %} {{ m.content }}<|end|>{% endif %}{% endfor %}"
)
DEEPSEEK = (  # drops the thinking of all answers, and begins one with a <think>
    "<|bos|>{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}"
    "<|User|>{{ m.content }}{% else %}<|Assistant|>{{ m.content.split('</think>')[-1] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
KIMI = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_middle|>You are helpful<|im_end|>{% endif %}"
    "{% if m.role == 'user' %}<|im_user|>{% elif m.role == 'assistant' %}<|im_assistant|>{% else %}<|im_start|>"
    "{% endif %}{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
QWEN3 = (  # keeps the thinking of the last answer only, and gives it an empty one where it has none
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% set plain = "
    "m.content.split('</think>')[-1].lstrip('\n') %}{% if loop.last %}{% if '</think>' in m.content %}{{ m.content }}"
    "{% else %}<think>\n\n</think>\n\n{{ plain }}{% endif %}{% else %}{{ plain }}{% endif %}{% else %}{{ m.content }}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HARMONY = (  # the last answer ends differently from earlier ones
    "{% for m in messages %}<|im_start|>{{ m.role }}<|message|>{{ m.content }}"
    "{% if loop.last and m.role == 'assistant' %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)

SYSTEM = {"role": "system", "content": "Be brief."}
TALK = [
    {"role": "user", "content": "Say yes"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "yes or no?"},
    {"role": "assistant", "content": "no, not at all"},
]
THOUGHT = [*TALK[:1], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}, *TALK[2:]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with the special tokens of all families and no template."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIALS})
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(plain: Path) -> object:
    return documents.load_tokenizer(plain, False)


@pytest.fixture(scope="module")
def chat(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with ChatML's template, as a folder."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("chat")
    made = AutoTokenizer.from_pretrained(plain)
    made.chat_template = CHATML
    made.save_pretrained(folder)
    return folder


class ByParts:
    """The tokenizer as one that is written in Python: without offsets."""

    is_fast = False

    def __init__(self, tokenizer: object) -> None:
        self.shipped = tokenizer

    def __getattr__(self, name: str) -> object:
        return getattr(self.shipped, name)

    def __call__(self, text: str, **options: object) -> dict:
        return {"input_ids": self.shipped(text, **options)["input_ids"]}


def learned(tokenizer: object, record: object, template: str | None, answers_only: bool = True) -> list[str]:
    """The texts of the runs of learned tokens."""
    with mock.patch.object(getattr(tokenizer, "shipped", tokenizer), "chat_template", template):
        ids, mask = documents.tokenize(record, tokenizer, answers_only)
    assert len(ids) == len(mask)
    runs: list[list[int]] = []
    for at, (token, on) in enumerate(zip(ids, mask, strict=True)):
        if on:
            if not at or not mask[at - 1]:
                runs.append([])
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


FAMILIES = {
    "chatml": (CHATML, ["yes<|im_end|>", "no, not at all<|im_end|>"]),
    "generation marks": (MARKED, ["yes<|im_end|>", "no, not at all<|im_end|>"]),
    "no generation prompt": (NO_PROMPT, ["yes<|im_end|>", "no, not at all<|im_end|>"]),
    "llama 3": (LLAMA3, ["yes<|eot_id|>", "no, not at all<|eot_id|>"]),
    "mistral": (MISTRAL, [" yes<|end|>", " no, not at all<|end|>"]),
    "deepseek": (DEEPSEEK, ["yes<|end|>", "no, not at all<|end|>"]),
    "kimi": (KIMI, ["yes<|im_end|>", "no, not at all<|im_end|>"]),
    "qwen 3": (QWEN3, ["yes<|im_end|>", "<think>\n\n</think>\n\nno, not at all<|im_end|>"]),
    "gpt-oss": (HARMONY, ["<|message|>yes<|end|>", "<|message|>no, not at all<|return|>"]),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("start", [[], [SYSTEM]], ids=["", "system"])
@pytest.mark.parametrize("fast", [True, False], ids=["fast", "python"])
def test_answers_and_their_ends_are_learned(tokenizer: object, family: str, start: list, fast: bool) -> None:
    template, want = FAMILIES[family]
    used = tokenizer if fast else ByParts(tokenizer)
    found = learned(used, {"messages": start + TALK}, template)
    # whether the blank before an answer is a token of its own is the tokenizer's affair
    assert [text.lstrip() for text in found] == [text.lstrip() for text in want]


@pytest.mark.parametrize("family", ["deepseek", "qwen 3"])
def test_thinking_that_the_template_drops_is_no_obstacle(tokenizer: object, family: str) -> None:
    template, want = FAMILIES[family]
    assert [text.lstrip() for text in learned(tokenizer, {"messages": THOUGHT}, template)] == want


def test_an_answer_that_begins_like_the_prompt_is_learned_whole(tokenizer: object) -> None:
    """DeepSeek's template begins an answer with <think>."""
    talk = [TALK[0], {"role": "assistant", "content": "<b>yes</b>"}]
    assert learned(tokenizer, {"messages": talk}, DEEPSEEK) == ["<b>yes</b><|end|>"]


def test_thinking_that_the_template_keeps_is_learned(tokenizer: object) -> None:
    assert learned(tokenizer, {"messages": THOUGHT[:2]}, QWEN3) == ["<think>\nhm\n</think>\n\nyes<|im_end|>"]


def test_loss_on_all(tokenizer: object) -> None:
    (text,) = learned(tokenizer, {"messages": TALK}, CHATML, answers_only=False)
    assert text.startswith("<|im_start|>user\nSay yes<|im_end|>") and text.endswith("all<|im_end|>\n")


@pytest.mark.parametrize(
    "record",
    [
        {"conversations": [{"from": "human", "value": "Say yes"}, {"from": "gpt", "value": "yes"}]},
        {"conversations": [{"from": "User", "value": "Say yes"}, {"from": "Assistant", "value": "yes"}]},
        {"prompt": "Say yes", "completion": "yes"},
        {"prompt": TALK[:1], "completion": TALK[1:2]},
        {"question": "Say yes", "response": "yes", "id": 3},
    ],
)
def test_shapes_of_a_conversation(tokenizer: object, record: dict) -> None:
    assert learned(tokenizer, record, CHATML) == ["yes<|im_end|>"]


def test_texts_end_with_the_end_of_text(tokenizer: object) -> None:
    assert learned(tokenizer, {"text": "some words"}, CHATML) == ["some words<|end|>"]
    assert learned(tokenizer, {"prompt": "a question:", "completion": " an answer"}, None) == [" an answer<|end|>"]


@pytest.mark.parametrize(
    ("record", "template", "reason"),
    [
        ({"messages": TALK}, None, "no chat template"),
        ({"messages": TALK[:1]}, CHATML, "no message of the assistant"),
        ({"messages": []}, CHATML, "empty"),
        ({"messages": [{"role": "user", "content": ""}]}, CHATML, "empty"),
        ({"messages": [{"content": "who?"}]}, CHATML, "no role"),
        ({"messages": TALK[1:]}, MISTRAL, "roles must alternate"),
        (
            {"messages": TALK},
            "{% for m in messages | reverse %}{{ m.content | upper }}{% endfor %}",
            "in an unknown way",
        ),
        ({"title": "x"}, CHATML, "has .'title'.; wanted"),
        ({"text": " "}, CHATML, "empty"),
        (["text"], CHATML, "not an object"),
    ],
)
def test_a_record_that_cannot_be_used_says_why(tokenizer: object, record: object, template: str, reason: str) -> None:
    with pytest.raises(documents.Unusable, match=reason):
        learned(tokenizer, record, template)


# --- the folder ------------------------------------------------------------------------------------------------------


def job(folder: Path) -> Job:
    return Job("finetune", "m", [], Env({}), Steps(folder / "events.jsonl"))


def events(folder: Path) -> list[dict]:
    found = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in found if event["event"] == "data"]


def prepare(folder: Path, tokenizer: Path, data: Path, root: str = "data", **options: object) -> PackedDataset:
    processes = options.pop("processes", 1)
    return dataset.prepare(
        job(folder), tokenizer, False, DataSpec(str(data), **{"length": LENGTH, **options}), folder / root, processes
    )


def talk(number: int) -> dict:
    question, answer = f"What is {number} and {number}?", f"It is {number + number}. " * (1 + number % 4)
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """40 conversations of different lengths, in lines."""
    file = tmp_path / "talks.jsonl"
    file.write_text("".join(json.dumps(talk(number)) + "\n" for number in range(40)))
    return file


def test_rows_hold_every_document_whole(tmp_path: Path, chat: Path, data: Path) -> None:
    made = prepare(tmp_path, chat, data)
    tokenizer = documents.load_tokenizer(chat, False)
    want = Counter()
    for number in range(40):
        ids, mask = documents.tokenize(talk(number), tokenizer, True)
        want[tuple(ids[:LENGTH]), tuple(mask[:LENGTH])] += 1
    found = Counter()
    for row in made.rows("train"):
        parts = made.row(row)
        assert sum(len(ids) for ids, _ in parts) <= LENGTH
        found.update((tuple(ids.tolist()), tuple(mask.tolist())) for ids, mask in parts)
    assert found == want
    assert made.index["dtype"] == "uint16" and made.index["documents"] == 40
    assert made.index["too_long"] == sum(
        len(documents.tokenize(talk(n), tokenizer, True)[0]) > LENGTH for n in range(40)
    )
    (event,) = events(tmp_path)
    assert event["tokens"] == sum(len(ids) for ids, _ in want.elements()) and event["bad"] == 0
    assert event["rows"] == {"train": len(made.rows("train")), "valid": 0, "test": 0}


def test_a_batch_keeps_documents_apart(tmp_path: Path, chat: Path, data: Path) -> None:
    made = prepare(tmp_path, chat, data)
    rows = list(made.rows("train"))[:3]
    batch = made.batch(rows)
    forbidden = packing.attention_mask(batch.document_ids)
    assert forbidden.shape == (3, 1, LENGTH, LENGTH) and forbidden.dtype == torch.bool
    bounds = []
    for number, row in enumerate(rows):
        start = 0
        for ids, mask in made.row(row):
            end = start + len(ids)
            bounds.append(number * LENGTH + start)
            assert batch.tokens[number, start:end].tolist() == ids.tolist()
            assert batch.labels[number, start : end - 1].tolist() == ids[1:].tolist()
            assert batch.loss_mask[number, start:end].tolist() == [*map(float, mask[1:]), 0.0]
            assert batch.position_ids[number, start:end].tolist() == list(range(len(ids)))
            allowed = ~forbidden[number, 0, start:end]
            assert allowed[:, start:end].equal(torch.ones(len(ids), len(ids), dtype=torch.bool).tril())
            assert not allowed[:, :start].any() and not allowed[:, end:].any()
            start = end
        assert not batch.loss_mask[number, start:].any()
        if start < LENGTH:
            bounds.append(number * LENGTH + start)
    assert packing.cu_seqlens(batch.document_ids).tolist() == [*bounds, 3 * LENGTH]
    assert not forbidden.all(dim=-1).any(), "a query without any key gives NaN"


@pytest.mark.parametrize("loss_on", ["answers", "all"])
def test_counts_are_of_the_labels_with_loss(tmp_path: Path, chat: Path, data: Path, loss_on: str) -> None:
    made = prepare(tmp_path, chat, data, loss_on=loss_on)
    batch = made.batch(list(made.rows("train")))
    want = torch.bincount(batch.labels[batch.loss_mask > 0], minlength=len(made.counts))
    assert made.counts.tolist() == want.tolist() and made.index["learned"] == int(want.sum()) > 0
    d2t, t2d, coverage = packing.draft_vocabulary(made.counts, 16, vocabulary=len(made.counts) + 8)
    known = np.arange(16) + d2t
    assert t2d.sum() == 16 and t2d[known].all() and len(t2d) == len(made.counts) + 8
    assert coverage == sum(sorted(made.counts)[-16:]) / made.counts.sum()


@pytest.mark.parametrize("change", ["data", "length", "loss_on", "long_documents", "split", "template"])
def test_what_changes_the_data_changes_the_folder(tmp_path: Path, chat: Path, data: Path, change: str) -> None:
    first = prepare(tmp_path, chat, data)
    options = {"length": 32, "loss_on": "all", "long_documents": "chunk", "split": "50,50"}
    if change == "data":  # same size, and the same time: only the bytes tell
        times = data.stat()
        data.write_text(data.read_text().replace("What", "Whut", 1))
        os.utime(data, ns=(times.st_atime_ns, times.st_mtime_ns))
    if change == "template":
        tokenizer = documents.load_tokenizer(chat, False)
        with mock.patch.object(tokenizer, "chat_template", MARKED):
            second = prepare(tmp_path, chat, data)
    else:
        second = prepare(tmp_path, chat, data, **{name: value for name, value in options.items() if name == change})
    assert first.folder != second.folder


def test_a_second_job_finds_it(tmp_path: Path, chat: Path, data: Path) -> None:
    first = prepare(tmp_path, chat, data)
    moved = data.rename(tmp_path / "moved.jsonl")
    with mock.patch.object(documents, "encode", side_effect=AssertionError("tokenized again")):
        second = prepare(tmp_path, chat, moved)
    assert second.folder == first.folder
    assert sorted(path.name for path in first.folder.parent.iterdir()) == [first.folder.name]


def test_a_damaged_folder_is_refused(tmp_path: Path, chat: Path, data: Path) -> None:
    tokens = prepare(tmp_path, chat, data).folder / packing.TOKENS
    content = bytearray(tokens.read_bytes())
    content[100] ^= 1
    tokens.write_bytes(content)
    with pytest.raises(StageError, match=r"tokens.bin is damaged"):
        prepare(tmp_path, chat, data)


def test_what_a_killed_job_left_is_removed(tmp_path: Path, chat: Path, data: Path) -> None:
    name = prepare(tmp_path, chat, data, root="other").folder.name
    old, new = (tmp_path / "data" / f".{name}.{suffix}" for suffix in ("old", "new"))
    for part in (old, new):
        part.mkdir(parents=True)
    os.utime(old, (1, 1))
    prepare(tmp_path, chat, data)
    assert not old.exists() and new.exists(), "a job that still works on it must not lose it"


def test_several_processes_make_the_same(tmp_path: Path, chat: Path, data: Path) -> None:
    data.write_text(data.read_text() * 20)  # several chunks
    alone = prepare(tmp_path, chat, data)
    together = prepare(tmp_path, chat, data, root="other", processes=2)
    assert alone.folder.name == together.folder.name
    assert alone.index == together.index and not multiprocessing.active_children()


def test_long_documents(tmp_path: Path, chat: Path) -> None:
    data = tmp_path / "long.jsonl"
    data.write_text(json.dumps({"text": "word " * 500}) + "\n" + json.dumps(talk(1)) + "\n")
    ids, _ = documents.tokenize({"text": "word " * 500}, documents.load_tokenizer(chat, False), True)
    assert len(ids) > 2 * LENGTH
    cut, chunked = (prepare(tmp_path, chat, data, long_documents=how) for how in ("cut", "chunk"))
    assert cut.index["too_long"] == chunked.index["too_long"] == 1
    assert cut.index["documents"] == 2
    rows = [made for row in chunked.rows("train") for made, _ in chunked.row(row)]
    assert sum(map(len, rows)) == chunked.index["tokens"] >= len(ids)
    one_over = prepare(tmp_path, chat, data, long_documents="chunk", length=len(ids) - 1)
    assert one_over.index["documents"] == 2 and one_over.index["without_loss"] == 1, "nothing precedes a single token"


def test_an_answer_beyond_the_cut_leaves_nothing(tmp_path: Path, chat: Path) -> None:
    data = tmp_path / "late.jsonl"
    late = {"prompt": "why? " * 200, "completion": "because"}
    data.write_text("".join(json.dumps(record) + "\n" for record in (late, talk(1))))
    made = prepare(tmp_path, chat, data)
    assert made.index["without_loss"] == 1 and made.index["documents"] == 1
    data.write_text(json.dumps(late))
    with pytest.raises(StageError, match="nothing to train on"):
        prepare(tmp_path, chat, data)


def test_bad_records_are_counted_and_named(
    tmp_path: Path, chat: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = data.read_text()
    data.write_text('{"text": \n\n{"title": "x"}\n' + good)
    made = prepare(tmp_path, chat, data)
    out = capsys.readouterr().out
    assert "WARNING: data: talks.jsonl:1: not JSON" in out and "WARNING: data: talks.jsonl:3: has ['title']" in out
    assert "42 records" in out and "2 bad records" in out
    assert made.index["bad"] == 2 and made.index["documents"] == 40
    data.write_text('{"title": "x"}\n' * 41 + good)
    with pytest.raises(StageError, match=r"41 of 81 records cannot be used:\n  talks.jsonl:1: has") as failed:
        prepare(tmp_path, chat, data)
    assert str(failed.value).count("\n") == dataset.NAMED
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [made.folder.name]


def test_a_folder_of_parquet(tmp_path: Path, chat: Path, data: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    want = prepare(tmp_path, chat, data)
    folder = tmp_path / "set" / "data"
    folder.mkdir(parents=True)
    records = [json.loads(line) for line in data.read_text().splitlines()]
    for number, some in enumerate((records[:30], records[30:])):
        parquet.write_table(pyarrow.Table.from_pylist(some), folder / f"train-0000{number}.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(records[:5]), folder / "test-00000.parquet")
    made = prepare(tmp_path, chat, tmp_path / "set")
    for key in ("records", "documents", "tokens", "learned", "rows"):
        assert made.index[key] == want.index[key]
    assert made.counts.tolist() == want.counts.tolist()
    assert prepare(tmp_path, chat, tmp_path / "set", data_split="test").index["records"] == 5
    with pytest.raises(StageError, match="no valid among its files"):
        prepare(tmp_path, chat, tmp_path / "set", data_split="valid")


@pytest.mark.parametrize("name", ["./no.jsonl", "/no/where", "talks.parquet", "a/b.jsonl"])
def test_data_that_is_not_there(tmp_path: Path, chat: Path, name: str) -> None:
    with pytest.raises(StageError, match=r"--finetune-hf-dataset: .*does not exist here"):
        dataset.prepare(job(tmp_path), chat, False, DataSpec(name, LENGTH), tmp_path / "data")


def test_a_folder_without_data(tmp_path: Path, chat: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(StageError, match=r"no .jsonl or .parquet"):
        prepare(tmp_path, chat, tmp_path / "empty")


def test_an_error_that_nobody_foresaw_fails_the_stage(tmp_path: Path, chat: Path, data: Path) -> None:
    with (
        mock.patch.object(packing, "write_rows", side_effect=OSError(28, "No space left on device")),
        pytest.raises(CheckFailed, match="No space left"),
    ):
        prepare(tmp_path, chat, data)
    assert not list((tmp_path / "data").iterdir())


def test_split_by_documents(tmp_path: Path, chat: Path, data: Path) -> None:
    made = prepare(tmp_path, chat, data, split="80,20,0")
    texts = {
        name: {tuple(ids.tolist()) for row in made.rows(name) for ids, _ in made.row(row)}
        for name in ("train", "valid")
    }
    assert len(texts["train"]) == 32 and len(texts["valid"]) == 8 and not texts["train"] & texts["valid"]
    assert made.counts.sum() == made.batch(list(made.rows("train"))).loss_mask.sum()
    with pytest.raises(StageError, match="the test part of the data has no rows"):
        next(made.batches("test", 1))
    with pytest.raises(StageError, match="none to train on"):
        prepare(tmp_path, chat, data, split="0,100,0")
    with pytest.raises(StageError, match="--split: 'most' is not"):
        prepare(tmp_path, chat, data, split="most")


def test_batches_go_on_where_a_job_was_cut_off(tmp_path: Path, chat: Path, data: Path) -> None:
    made = prepare(tmp_path, chat, data)
    whole = made.batches("train", 2, seed=7)
    tokens = torch.cat([next(whole).tokens for _ in range(20)])
    assert len(tokens) > len(made.rows("train")), "more than an epoch"
    resumed = made.batches("train", 2, consumed=13, seed=7)
    assert torch.cat([next(resumed).tokens for _ in range(10)]).equal(tokens[13:33])


def test_the_arguments_fit_into_megatrons(tmp_path: Path) -> None:
    from megatron.training.arguments import parse_args

    words = "--finetune-hf-dataset talks.jsonl --split 99,1,0 --seq-length 128 --loss-on all --long-documents chunk"
    with mock.patch.object(sys, "argv", ["finetune", *words.split()]):
        args = parse_args(lambda parser: dataset.add_arguments(parser) or parser)
    assert dataset.spec(args) == DataSpec("talks.jsonl", 128, "train", "99,1,0", "all", "chunk")
    env = {"MLMSUB_RUN_DIR": str(tmp_path)}
    assert dataset.cache_folder(args, Env(env)) == tmp_path / "data"
    assert dataset.cache_folder(args, Env({**env, "MLM_WORK_DIR": "/models"})) == Path("/models/data")
    args.data_cache_path = "/cache"
    assert dataset.cache_folder(args, Env(env)) == Path("/cache")
    args.finetune_hf_dataset = None
    with pytest.raises(StageError, match="MLM_DATA_ARGS"):
        dataset.spec(args)


# --- several processes -----------------------------------------------------------------------------------------------

RANKS = """
import sys
from pathlib import Path
import torch.distributed as dist
from mlmsub.runtime.data import dataset, documents
from mlmsub.runtime.env import Env
from mlmsub.runtime.errors import StageError
from mlmsub.runtime.progress import Steps
from mlmsub.runtime.session import Job

tokenizer, talks, root = sys.argv[1:]
rank = Env().rank
dist.init_process_group("gloo", rank=rank, world_size=2)
encode, made = documents.encode, []
documents.encode = lambda *args: made.append(1) or encode(*args)

def prepare(name, root, local_rank, split, data=talks):
    made.clear()
    job = Job("finetune", "m", [], Env({"RANK": str(rank), "LOCAL_RANK": str(local_rank)}), Steps())
    try:
        spec = dataset.DataSpec(data, 64, split=split)
        found = dataset.prepare(job, Path(tokenizer), False, spec, Path(root), 1)
        tokens = next(found.batches("train", 2, rank=rank, ranks=2, seed=1)).tokens
        print("RESULT", name, rank, found.folder.name, bool(made), tokens.sum().item(), flush=True)
    except StageError as error:
        print("RESULT", name, rank, error, flush=True)

prepare("shared", root + "/shared", rank, "100")
prepare("apart", root + "/node" + str(rank), 0, "100")
prepare("error", root + "/error", rank, "0,100")
prepare("hub", root + "/hub", rank, "100", "someone/talks")
prepare("no-hub", root + "/hub", rank, "100", "someone/else")
dist.destroy_process_group()
"""


def test_two_processes(tmp_path: Path, chat: Path, data: Path) -> None:
    """One makes the data and both read it; each of two nodes makes its own; an error is everyone's.

    So it is with a data set of the hub, here from the cache of a machine without a network.
    """
    place = tmp_path / "cache" / "datasets--someone--talks"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("1" * 40)
    (place / "snapshots" / ("1" * 40)).mkdir(parents=True)
    shutil.copy(data, place / "snapshots" / ("1" * 40) / "train.jsonl")
    port = free_port()
    common = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    common |= {"HF_HUB_CACHE": str(place.parent), "HF_HUB_OFFLINE": "1"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS, str(chat), str(data), str(tmp_path)],
            env={**common, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outs = [process.communicate(timeout=300)[0] for process in processes]
    assert not any(process.returncode for process in processes), outs
    told = {}
    for line in "".join(outs).splitlines():
        if line.startswith("RESULT"):
            _, name, rank, rest = line.split(maxsplit=3)
            told[name, int(rank)] = rest
    first, second = (told["shared", rank].split() for rank in range(2))
    assert first[0] == second[0] and (first[1], second[1]) == ("True", "False")
    batch = next(PackedDataset(tmp_path / "shared" / first[0]).batches("train", 4, seed=1))
    assert batch.tokens.sum().item() == int(first[2]) + int(second[2]), "the ranks share the samples of a step"
    first, second = (told["apart", rank].split() for rank in range(2))
    assert (first[1], second[1]) == ("True", "True")
    assert (tmp_path / "node0" / first[0]).is_dir() and (tmp_path / "node1" / second[0]).is_dir()
    assert told["hub", 0].split()[0] == told["shared", 0].split()[0], "the same content"
    assert told["error", 0] == told["error", 1] and told["no-hub", 0] == told["no-hub", 1]
    assert "--finetune-hf-dataset: someone/else cannot be fetched" in told["no-hub", 0]
    assert "--split: 0,100 of 40 documents leaves none to train on" in told["error", 0]
