"""MMLU (Hendrycks et al., 2021): its files, its subjects, and its prompts as tokens."""

import csv
import difflib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlmsub.runtime.checkpoints import prefetch
from mlmsub.runtime.env import Env
from mlmsub.runtime.errors import StageError

FIELD, HUB = "--mmlu-data", "cais/mmlu"
MANY = 1000  # more files than a split has
LETTERS = "ABCD"
QUESTIONS = 14042  # in the test split of all 57 subjects
CATEGORIES = {
    "humanities": (
        "formal_logic", "high_school_european_history", "high_school_us_history", "high_school_world_history",
        "international_law", "jurisprudence", "logical_fallacies", "moral_disputes", "moral_scenarios", "philosophy",
        "prehistory", "professional_law", "world_religions",
    ),
    "social sciences": (
        "econometrics", "high_school_geography", "high_school_government_and_politics", "high_school_macroeconomics",
        "high_school_microeconomics", "high_school_psychology", "human_sexuality", "professional_psychology",
        "public_relations", "security_studies", "sociology", "us_foreign_policy",
    ),
    "STEM": (
        "abstract_algebra", "astronomy", "college_biology", "college_chemistry",
        "college_computer_science", "college_mathematics", "college_physics", "computer_security",
        "conceptual_physics", "electrical_engineering", "elementary_mathematics", "high_school_biology",
        "high_school_chemistry", "high_school_computer_science", "high_school_mathematics", "high_school_physics",
        "high_school_statistics", "machine_learning",
    ),
    "other": (
        "anatomy", "business_ethics", "clinical_knowledge", "college_medicine", "global_facts", "human_aging",
        "management", "marketing", "medical_genetics", "miscellaneous", "nutrition", "professional_accounting",
        "professional_medicine", "virology",
    ),
}  # fmt: skip
CATEGORY_OF = {subject: category for category, subjects in CATEGORIES.items() for subject in subjects}
# how an example tells its answer: as published, and as modelopt 0.47's megatron_mmlu writes it (no line break)
FORMATS = {"hendrycks": "\nAnswer: {}\n\n", "modelopt": "Answer: {}\n\n"}


@dataclass(frozen=True)
class Question:
    text: str
    choices: tuple[str, ...]  # four
    answer: int  # index of the right choice


@dataclass(frozen=True)
class Subject:
    """``questions`` of the test split that are asked, out of ``available``; ``examples`` of the dev split."""

    questions: list[Question]
    examples: list[Question]
    available: int


def check_folder(value: str | None) -> Path | None:
    """The local folder that ``value`` names; None if it is unset or the id of a hub repository. Light."""
    if value is None or (value.count("/") == 1 and not value.startswith((".", "/", "~")) and not Path(value).exists()):
        return None
    folder = Path(value)
    if not folder.is_dir():
        raise StageError(FIELD, f"{value} is not a folder here.", "check the path and the container's mounts.")
    if not _parquet_files(folder, "test") and not _csv_files(folder, "test"):
        inner = folder / "data"  # the published archive has everything below data/
        fix = f"did you mean {inner}?" if inner.is_dir() else "see docs/mmlu.md for the two layouts."
        raise StageError(FIELD, f"{folder} has neither <subject>/test-*.parquet nor test/<subject>_test.csv.", fix)
    return folder


def load(folder: Path, wanted: Sequence[str], few_shots: int, fraction: float) -> dict[str, Subject]:
    """The subjects ``wanted`` (empty: all there are) of a folder in one of the two layouts, by name.

    The first ``fraction`` of each subject's questions, rounded up, as modelopt takes them.
    """
    files = _parquet_files(folder, "test") or _csv_files(folder, "test")
    # "all" is one table whose rows name their subjects
    tests: dict[str, list[Question]] = _grouped(files["all"]) if "all" in files else {name: [] for name in files}
    for name in wanted:
        if name not in tests:
            near = difflib.get_close_matches(name, tests, 1, cutoff=0.4) or sorted(tests)[:5]
            raise StageError("--subjects", f"{folder} has no subject {name!r}.", f"nearest: {', '.join(near)}.")
    names = sorted(set(wanted)) if wanted else sorted(tests)
    if "all" not in files:
        tests = {name: [question for _, question in _rows(files[name])] for name in names}
    examples = _examples(folder, names, few_shots) if few_shots else {}
    made = {}
    for name in names:
        count = math.ceil(round(fraction * len(tests[name]), 6))  # 0.1 x 30 is a little more than 3
        made[name] = Subject(tests[name][:count], examples.get(name, []), len(tests[name]))
    if not any(subject.questions for subject in made.values()):
        raise StageError(FIELD, f"{folder} has no questions.")
    return made


def _examples(folder: Path, names: list[str], few_shots: int) -> dict[str, list[Question]]:
    files = _parquet_files(folder, "dev") or _csv_files(folder, "dev")
    if "all" in files:
        found = _grouped(files["all"])
    else:
        found = {name: [question for _, question in _rows(files[name])] for name in names if name in files}
    for name in names:
        if len(found.get(name, [])) < few_shots:
            raise StageError(
                "--few-shots",
                f"{folder} has {len(found.get(name, []))} examples (dev split) of {name}, fewer than {few_shots}.",
                "ask for fewer, or add the dev split to the folder.",
            )
    return {name: found[name][:few_shots] for name in names}


def _parquet_files(folder: Path, split: str) -> dict[str, list[Path]]:
    """Files by subject in the layout of the hub's cais/mmlu. Its table of all subjects is the fewest files."""
    whole = sorted(folder.glob(f"all/{split}-*.parquet"))
    if whole:
        return {"all": whole}
    found: dict[str, list[Path]] = {}
    for file in sorted(folder.glob(f"*/{split}-*.parquet")):
        found.setdefault(file.parent.name, []).append(file)
    return found


def _csv_files(folder: Path, split: str) -> dict[str, list[Path]]:
    """Files by subject in the layout of the archive that the authors published."""
    end = f"_{split}.csv"
    return {file.name.removesuffix(end): [file] for file in sorted(folder.glob(f"{split}/*{end}"))}


def hub_folder(repository: str, env: Env, few_shots: int) -> Path:
    """Where the Hugging Face cache has the data set; it is fetched if it is not there. All ranks call it."""
    try:
        for split in ("test", "dev") if few_shots else ("test",):
            files = prefetch.dataset(repository, env, split=split, files=MANY, field=FIELD)
    except StageError as error:
        raise StageError(FIELD, error.problem, "set MMLU_DATA to a local folder with it, see docs/mmlu.md.") from error
    return files[0].parents[1]


def _grouped(files: list[Path]) -> dict[str, list[Question]]:
    found: dict[str, list[Question]] = {}
    for subject, question in _rows(files):
        found.setdefault(subject, []).append(question)
    return found


def _rows(files: Iterable[Path]) -> Iterator[tuple[str, Question]]:
    for file in files:
        yield from (_csv_rows if file.suffix == ".csv" else _parquet_rows)(file)


def _csv_rows(file: Path) -> Iterator[tuple[str, Question]]:
    """No header; question, four choices, letter. The subject is in the file's name, so none is given here."""
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            reader = csv.reader(lines)
            for row in reader:
                place = f"{file}, line {reader.line_num}"
                if row and len(row) != 6:
                    raise StageError(FIELD, f"{place}: {len(row)} columns.", "question, four choices, and a letter.")
                if row:
                    yield "", _question(row[0], row[1:5], row[5].strip(), place)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise StageError(FIELD, f"{file} cannot be read: {error}") from error


def _parquet_rows(file: Path) -> Iterator[tuple[str, Question]]:
    from pyarrow import ArrowException
    from pyarrow.parquet import read_table

    try:
        rows = read_table(file).to_pylist()
    except (OSError, ArrowException) as error:
        raise StageError(FIELD, f"{file} cannot be read: {str(error).partition(chr(10))[0]}") from error
    for number, row in enumerate(rows, 1):
        place = f"{file}, row {number}"
        yield (
            str(row.get("subject", "")),
            _question(row.get("question"), row.get("choices"), row.get("answer"), place),
        )


def _question(text: Any, choices: Any, answer: Any, place: str) -> Question:
    if not isinstance(text, str) or not isinstance(choices, list) or len(choices) != len(LETTERS):
        raise StageError(FIELD, f"{place}: not a question with four choices.")
    index = LETTERS.find(answer) if isinstance(answer, str) and len(answer) == 1 else answer
    if not isinstance(index, int) or not 0 <= index < len(LETTERS):
        raise StageError(FIELD, f"{place}: answer {answer!r} is none of {LETTERS}.")
    return Question(text, tuple(str(choice) for choice in choices), index)


def prompt(subject: str, question: Question, examples: Sequence[Question], form: str) -> str:
    """The text before the answer: a sentence that names the subject, solved examples, the question."""
    header = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"
    solved = "".join(_asked(example) + FORMATS[form].format(LETTERS[example.answer]) for example in examples)
    return f"{header}{solved}{_asked(question)}\nAnswer:"


def _asked(question: Question) -> str:
    choices = zip(LETTERS, question.choices, strict=True)
    return "\n".join([question.text, *(f"{letter}. {choice}" for letter, choice in choices)])


@dataclass(frozen=True)
class Exam:
    """Prompts as token ids, in the order of their subjects' questions, and the tokens of the four letters."""

    prompts: list[list[int]]
    letters: list[int]
    shortened: int  # prompts that had to do with fewer examples
    dropped: int  # examples that they lack, together


def encode(subjects: dict[str, Subject], tokenizer: Any, form: str, limit: int) -> Exam:
    """Tokenize; a prompt of more than ``limit`` tokens loses examples, the last first, until it fits."""
    lead, letters = letter_tokens(tokenizer, form)
    whole, bare = (tokenizer("A", add_special_tokens=special)["input_ids"] for special in (True, False))
    # what the tokenizer puts before a text, without what it may put after it: the answer comes there
    start = whole[: next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)]

    def tokens(texts: list[str]) -> list[list[int]]:
        return [start + ids + lead for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]]

    asked = [(name, at, question) for name, at in subjects.items() for question in at.questions]
    prompts = tokens([prompt(name, question, at.examples, form) for name, at, question in asked])
    shortened = dropped = 0
    for index, (name, at, question) in enumerate(asked):
        examples = at.examples
        while len(prompts[index]) > limit:
            if not examples:
                problem = f"a question of {name} has {len(prompts[index])} tokens, and the model takes {limit}"
                raise StageError("--max-position-embeddings", f"{problem}: {question.text[:60]!r}.")
            examples = examples[:-1]
            (prompts[index],) = tokens([prompt(name, question, examples, form)])
        shortened += len(examples) < len(at.examples)
        dropped += len(at.examples) - len(examples)
    return Exam(prompts, letters, shortened, dropped)


def letter_tokens(tokenizer: Any, form: str) -> tuple[list[int], list[int]]:
    """Tokens to add to a prompt that ends in "Answer:", and then the token of each letter.

    Most tokenizers have " A" as one token and need nothing added; where the blank is a token of its own, it goes
    to the prompt, and the bare letter is the answer. modelopt takes the last token of " A" in either case.
    """
    if form == "modelopt":
        return [], [tokenizer(f" {letter}", add_special_tokens=False)["input_ids"][-1] for letter in LETTERS]
    stem, *told = (
        tokenizer(f"\nAnswer:{answer}", add_special_tokens=False)["input_ids"]
        for answer in ("", *(f" {letter}" for letter in LETTERS))
    )
    common, last = told[0][:-1], [ids[-1] for ids in told]
    if common[: len(stem)] != stem or any(ids[:-1] != common for ids in told) or len(set(last)) < len(LETTERS):
        raise StageError(
            "tokenizer", f"does not end 'Answer: A' to 'Answer: D' in one token that differs: {told}.",
            "MMLU is scored by one token per letter; use the tokenizer of a language model.",
        )  # fmt: skip
    return common[len(stem) :], last
