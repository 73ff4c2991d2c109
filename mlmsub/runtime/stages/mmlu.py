"""mmlu: the share of MMLU's multiple-choice questions that a model answers rightly, quantized or not.

The model is the Megatron checkpoint MLM_MODEL_CKPT, or the Hugging Face checkpoint HF_MODEL_CKPT where that is unset.
"""

import json
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace
from typing import Any

from mlmsub.runtime import distributed, outputs
from mlmsub.runtime.checkpoints import checkpoint, hf
from mlmsub.runtime.env import Env
from mlmsub.runtime.errors import CheckFailed, StageError, writing
from mlmsub.runtime.evaluation import mmlu, mmlu_score
from mlmsub.runtime.evaluation.mmlu import LETTERS, Exam, Subject
from mlmsub.runtime.megatron_args import positive
from mlmsub.runtime.progress import say, warn
from mlmsub.runtime.quantization import extensions
from mlmsub.runtime.session import Job, Session
from mlmsub.runtime.stage import BaseStage

RESULT, ANSWERS = "mmlu.json", "answers.jsonl"


class Stage(BaseStage):
    """``mmlu MODEL``"""

    makes = "MMLU_OUT"
    takes_live = gives_live = True

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        mmlu.check_folder(self.env.text("MMLU_DATA"))
        self.bound = _bound(self.env)
        self.target = self.output("_mmlu", RESULT, MMLU_DATA=self.env.path("MMLU_DATA"))
        if self.target.target.suffix == ".json":
            problem = f"{self.target.target} names a file."
            raise StageError("MMLU_OUT", problem, f"give a folder; {RESULT} is written in it.")

    def add_arguments(self, parser: ArgumentParser) -> None:
        _add_arguments(parser)

    def run(self, session: Session, model: Any = None) -> Any:
        """Score the model, and fail below the bound; the model is as it was."""
        args, env, job = session.args, self.env, self.job
        _refuse(args)
        self.begin(self.target)
        with job.steps("questions", args.mmlu_data or env.text("MMLU_DATA") or f"{mmlu.HUB} (Hugging Face cache)"):
            subjects, exam = _questions(env, session)
        model = self.model(session, model)
        origin = self.origin(session)
        result, answers = _result(subjects, _score(job, session, model, origin, exam).tolist())
        head = {"model": job.model, "source": origin, "format": args.mmlu_format}
        head |= {"few_shots": args.few_shots, "fraction": args.fraction}
        head |= {"shortened_prompts": exam.shortened, "dropped_examples": exam.dropped}
        result = head | result
        distributed.on_main(lambda: self._write(result, answers))
        self.publish(self.target)
        _tell(job, result)
        bound = args.lower_bound if args.lower_bound is not None else self.bound
        if bound is not None and result["accuracy"] < bound:
            problem = f"the score {result['accuracy']:.4f} is below {bound} (see {self.target.target})."
            raise CheckFailed("MLM_LOWER_BOUND", problem)
        return model

    def _write(self, result: dict[str, Any], answers: list[dict[str, Any]]) -> None:
        with writing(self.makes, self.target.part):
            (self.target.part / ANSWERS).write_text("".join(json.dumps(answer) + "\n" for answer in answers))
            outputs.write_json(self.target.part / RESULT, result)


def _refuse(args: Namespace) -> None:
    if args.context_parallel_size > 1:
        raise StageError("CP", "mmlu needs CP=1: its prompts are short.", "set CP=1, and use DP to go faster.")
    if args.moe_expert_capacity_factor is not None:
        raise StageError(
            "--moe-expert-capacity-factor",
            "drops tokens, so that a score would depend on what shares a batch.",
            "leave it out.",
        )


def _questions(env: Env, session: Session) -> tuple[dict[str, Subject], Exam]:
    """Rank 0 alone reads and tokenizes, so that all ranks have the same questions and meet the same error."""
    args = session.args
    value = args.mmlu_data or env.text("MMLU_DATA")
    wanted = [name.strip() for name in (args.subjects or "").split(",") if name.strip()]
    folder = distributed.on_main(lambda: mmlu.check_folder(value))
    if folder is None:
        folder = mmlu.hub_folder(value or mmlu.HUB, env, args.few_shots)

    def make() -> tuple[dict[str, Subject], Exam]:
        subjects = mmlu.load(folder, wanted, args.few_shots, args.fraction)
        tokenizer = hf.tokenizer(session.source, session.conf)
        return subjects, mmlu.encode(subjects, tokenizer, args.mmlu_format, args.max_position_embeddings)

    subjects, exam = distributed.on_main(make)
    count = sum(len(ids) for ids in exam.prompts)
    say(f"{len(exam.prompts)} prompts of {count / len(exam.prompts):.0f} tokens on average, {args.few_shots} examples")
    if exam.shortened:
        warn(f"{exam.shortened} prompts were too long and lost {exam.dropped} of their examples together")
    return subjects, exam


def _score(job: Job, session: Session, model: Any, origin: str, exam: Exam) -> Any:
    """The letters' logits [prompts, 4]."""
    from modelopt.torch.export.quant_utils import get_quantization_format

    args = session.args
    if getattr(model, "eagle_module", None) is not None:
        raise StageError(checkpoint.FIELD, f"{origin} has a draft.", "score the checkpoint that it was made from.")
    device = next(model.parameters()).device.type
    extensions.prepare_evaluation(job.env, model)
    names = distributed.gather(str(get_quantization_format(model)))
    if device == "cpu" and any("nvfp4" in name for name in names):
        raise StageError(checkpoint.FIELD, f"{origin} is in NVFP4, which modelopt computes on GPUs only.")
    tokens = args.mmlu_tokens_per_batch or (16384 if device == "cuda" else 2048)
    with job.steps("score", f"batches of at most {tokens} tokens per rank"):
        return mmlu_score.scores(model, exam, tokens, args.mmlu_batch_size)


def _result(subjects: dict[str, Subject], logits: list[list[float]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What mmlu.json holds of the score, and the lines of answers.jsonl. Of equal logits the first letter counts."""
    answers = []
    table = {}
    rows = iter(logits)
    for name, subject in subjects.items():
        correct = 0
        for number, question in enumerate(subject.questions):
            values = next(rows)
            chosen = values.index(max(values))
            correct += chosen == question.answer
            answers.append(
                {
                    "subject": name, "question": number, "answer": LETTERS[question.answer],
                    "chosen": LETTERS[chosen], "logits": values,
                }
            )  # fmt: skip
        category = mmlu.CATEGORY_OF.get(name, "not in MMLU")
        table[name] = {"category": category, **_counts(len(subject.questions), subject.available, correct)}
    categories = {}
    for category in (*mmlu.CATEGORIES, "not in MMLU"):
        part = [row for row in table.values() if row["category"] == category]
        if part:
            categories[category] = _sum(part)
    total = _sum(list(table.values()))
    every = set(table) == set(mmlu.CATEGORY_OF) and total["questions"] == mmlu.QUESTIONS
    macro = sum(row["accuracy"] for row in table.values()) / len(table)
    ties = sum(sorted(values)[-1] == sorted(values)[-2] for values in logits)
    score = {**total, "macro_accuracy": macro, "all_of_mmlu": every, "ties": ties}
    return {**score, "categories": categories, "subjects": table}, answers


def _counts(questions: int, available: int, correct: int) -> dict[str, Any]:
    return {
        "questions": questions, "available": available, "correct": correct, "accuracy": correct / max(questions, 1),
    }  # fmt: skip


def _sum(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return _counts(*(sum(row[name] for row in rows) for name in ("questions", "available", "correct")))


def _tell(job: Job, result: dict[str, Any]) -> None:
    """The table in the log, and the event."""
    subjects, categories = result["subjects"], result["categories"]
    width = max(len(name) for name in (*subjects, "weighted average")) + 2

    def line(name: str, row: dict[str, Any]) -> None:
        count = f"{row['correct']} of {row['questions']}"
        part = f"   ({row['questions']} of {row['available']} questions)" if row["questions"] < row["available"] else ""
        say(f"{name:{width}}  {row['accuracy']:7.2%}  {count:>15}{part}")

    for category, row in categories.items():
        line(category, row)
        for name, part in subjects.items():
            if part["category"] == category:
                line(f"  {name}", part)
    line("weighted average", result)
    say(f"{'macro average':{width}}  {result['macro_accuracy']:7.2%}  {len(subjects):>6} subjects")
    known = sum(name in mmlu.CATEGORY_OF for name in subjects)
    whole = "all of MMLU" if result["all_of_mmlu"] else "a part, which is not an MMLU score"
    say(
        f"{result['questions']} of {result['available']} questions in {known} of MMLU's {len(mmlu.CATEGORY_OF)} "
        f"subjects: {whole}"
    )
    if result["ties"]:
        say(f"{result['ties']} questions have two letters of equal logits; the first one counts")
    names = ("accuracy", "macro_accuracy", "correct", "questions", "available", "all_of_mmlu")
    job.steps.event("mmlu", few_shots=result["few_shots"], **{name: result[name] for name in names})


def _bound(env: Env) -> float | None:
    value = env.text("MLM_LOWER_BOUND")
    try:
        return None if value is None else _share(value)
    except ArgumentTypeError as error:
        raise StageError("MLM_LOWER_BOUND", f"{error}.", "give the least share of right answers, e.g. 0.36.") from error


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value


def _fraction(text: str) -> float:
    value = _share(text)
    if value == 0:
        raise ArgumentTypeError("0 would leave no question")
    return value


def _add_arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("mmlu")
    group.add_argument("--few-shots", type=int, choices=range(6), default=0, help="solved examples in a prompt")
    group.add_argument("--subjects", help="names with commas between; default: all that the data has")
    group.add_argument("--fraction", type=_fraction, default=1.0, help="of each subject's questions, the first ones")
    group.add_argument("--mmlu-data", "--mmlu-dataset", help="a local folder, or a data set of the Hugging Face Hub")
    group.add_argument("--format", dest="mmlu_format", choices=sorted(mmlu.FORMATS), default="hendrycks")
    group.add_argument("--mmlu-batch-size", type=positive, help="at most so many prompts in a batch of a rank")
    group.add_argument("--mmlu-tokens-per-batch", type=positive, help="default: 16384 on a GPU, 2048 on a CPU")
    group.add_argument("--lower-bound", type=_share, help="fail below this share of right answers")
    group.add_argument("--disable-tqdm", action="store_true", help=SUPPRESS)  # existing env setups have it
