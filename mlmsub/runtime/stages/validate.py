"""validate: the acceptance length of an EAGLE3 draft, by prompt, category and over all.

The source is the Megatron checkpoint MLM_MODEL_CKPT, which holds base and draft.
"""

import json
from argparse import ArgumentParser, ArgumentTypeError
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlmsub.runtime import distributed, outputs
from mlmsub.runtime.checkpoints import checkpoint, hf, source
from mlmsub.runtime.errors import CheckFailed, StageError, writing
from mlmsub.runtime.generation import prompts
from mlmsub.runtime.megatron_args import positive
from mlmsub.runtime.progress import say, warn
from mlmsub.runtime.quantization import extensions
from mlmsub.runtime.session import Job, Session
from mlmsub.runtime.stage import BaseStage
from mlmsub.runtime.training import record

if TYPE_CHECKING:
    from mlmsub.runtime.generation.acceptance import Answer, Question

RESULT, ANSWERS = "acceptance.json", "answers.jsonl"
# what the reference's validate.sh reads
VARIABLES = {"STEPS": "--steps", "OSL": "--osl", "GT_PATH": "--ground-truth-path",
             "SAVE_GT_PATH": "--save-ground-truth-path"}  # fmt: skip


class Stage(BaseStage):
    """``validate MODEL``"""

    makes = "VALIDATE_OUT"
    takes_live = gives_live = True

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        if self.ckpt is None:
            raise StageError(checkpoint.FIELD, "is not set.", "give the checkpoint that eagle3 has made.")
        if self.layout.pp > 1:
            raise StageError("PP", "an EAGLE3 draft reads layers of the whole base.", "set PP=1; use TP and EP.")
        prompts.check_file(job.env.text("PROMPTS_PATH"), "PROMPTS_PATH")
        bound = job.env.text("MLM_LOWER_BOUND")
        try:
            self.bound = None if bound is None else _length(bound)
        except ArgumentTypeError as error:
            raise StageError("MLM_LOWER_BOUND", f"{error}.", "give the least acceptance length, e.g. 2.1.") from error
        for name, flag in VARIABLES.items():
            value = job.env.text(name)
            self.defaults += [flag, value] if value is not None else []
        self.result = self.output("_validate", RESULT)

    def run(self, session: Session, model: Any = None) -> Any:
        from mlmsub.runtime.generation import acceptance

        args = session.args
        asked, truth = distributed.on_main(lambda: self._inputs(session))
        self.begin(self.result)
        model = self.model(session, model) if self.job.live else self._whole(session)
        extensions.prepare_evaluation(self.env, model)
        ends = prompts.end_tokens(session.source, hf.tokenizer(session.source, session.conf))
        settings = acceptance.Settings(args.steps, args.osl, ends, args.validate_batch_size)
        with self.job.steps("validate", f"{len(asked)} prompts, {args.steps} draft steps, up to {args.osl} tokens"):
            given = acceptance.answers(model, asked, settings)
        result = {"model": self.job.model, "source": self.origin(session), "steps": args.steps, "osl": args.osl}
        result |= acceptance.summary(asked, given)
        if truth is not None:
            result["ground_truth"] = _compare(asked, given, truth) | {"file": args.ground_truth_path}
        distributed.on_main(lambda: self._write(session, result, asked, given))
        self._tell(result, acceptance.table(result))
        bound = args.lower_bound if args.lower_bound is not None else self.bound
        if bound is not None and result["acceptance_length"] < bound:
            raise CheckFailed(
                "MLM_LOWER_BOUND",
                f"the acceptance length {result['acceptance_length']:.4f} is below {bound} (see {self.result.target}).",
            )
        return model

    def _whole(self, session: Session) -> Any:
        """The model with its draft; of one that was trained offline the base is where the training had it from."""
        here = checkpoint.folder(Path(str(self.ckpt)))
        if not (distributed.on_main(lambda: checkpoint.draft(here)) or {}).get("eagle_offline"):
            return self.model(session, None)
        base = distributed.on_main(lambda: record.base(here, session.source))
        return source.joined(self.job, session, here, base)

    def _inputs(self, session: Session) -> tuple[list["Question"], dict[str, list[int]] | None]:
        """The prompts, and the tokens of an earlier run by prompt."""
        from mlmsub.runtime.generation import acceptance

        args = session.args
        file = prompts.check_file(args.prompts, "--prompts")
        file = file or prompts.check_file(self.env.text("PROMPTS_PATH"), "PROMPTS_PATH")
        tokenizer = hf.tokenizer(session.source, session.conf)
        asked = acceptance.questions(file, tokenizer, args.max_position_embeddings - args.osl)
        truth = _read(Path(args.ground_truth_path)) if args.ground_truth_path else None
        for question in asked:
            if truth is not None and question.text not in truth:
                raise StageError(
                    "--ground-truth-path",
                    f"{args.ground_truth_path} has no answer to prompt {question.index}.",
                    "give the file of a run with the same prompts and chat template.",
                )
        return asked, truth

    def _write(self, session: Session, result: dict[str, Any], asked: list["Question"], given: list["Answer"]) -> None:
        tokenizer = hf.tokenizer(session.source, session.conf)
        lines = [
            {
                "index": question.index, "category": question.category, "prompt": question.text,
                "completion": tokenizer.decode(answer.tokens, skip_special_tokens=True), "tokens": answer.tokens,
                "passes": answer.passes, "acceptance_length": answer.acceptance_length,
            }
            for question, answer in zip(asked, given, strict=True)
        ]  # fmt: skip
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        with writing(self.makes, self.result.part):
            (self.result.part / ANSWERS).write_text(text)
            outputs.write_json(self.result.part / RESULT, result)
        self.result.publish()
        if session.args.save_ground_truth_path:
            copy = Path(session.args.save_ground_truth_path)
            try:
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_text(text)
            except OSError as error:
                raise StageError("--save-ground-truth-path", f"{copy} cannot be written: {error.strerror}.") from error

    def _tell(self, result: dict[str, Any], table: list[str]) -> None:
        for line in table:
            say(line)
        truth = result.get("ground_truth")
        if truth is not None:
            text = f"{truth['same']} of {result['prompts']} answers are those of {truth['file']}"
            if truth["same"] == result["prompts"]:
                say(text)
            else:
                warn(f"{text}; the first that differs: prompt {truth['first_different']}")
        names = ("steps", "osl", "acceptance_length", "prompts", "tokens", "passes")
        categories = {name: part["acceptance_length"] for name, part in result["categories"].items()}
        self.job.steps.event("acceptance", **{name: result[name] for name in names}, categories=categories)

    def add_arguments(self, parser: ArgumentParser) -> None:
        group = parser.add_argument_group("validate")
        group.add_argument("--prompts", "--prompts-path", help="a local .txt, .jsonl or .parquet")
        group.add_argument("--osl", type=positive, default=64, help="tokens of an answer at most")
        group.add_argument("--steps", "--draft-length", type=positive, default=1, help="tokens that the draft proposes")
        group.add_argument("--ground-truth-path", help=f"{ANSWERS} of an earlier run, to compare with")
        group.add_argument("--save-ground-truth-path", help=f"a copy of {ANSWERS}")
        group.add_argument("--lower-bound", type=_length, help="fail below this acceptance length")
        group.add_argument(
            "--validate-batch-size", type=positive, default=16, help="prompts of a batch on each replica"
        )


def _read(file: Path) -> dict[str, list[int]]:
    """The answers' tokens by prompt, of an earlier run's file."""
    try:
        lines = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
        return {line["prompt"]: line["tokens"] for line in lines}
    except OSError as error:
        raise StageError("--ground-truth-path", f"{file} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise StageError(
            "--ground-truth-path", f"{file} holds no answers ({error}).", f"give the {ANSWERS} of an earlier run."
        ) from error


def _compare(asked: list["Question"], given: list["Answer"], truth: dict[str, list[int]]) -> dict[str, Any]:
    """How many answers are the same, as far as both go."""
    different = []
    for question, answer in zip(asked, given, strict=True):
        before = truth[question.text]
        common = min(len(before), len(answer.tokens))
        if before[:common] != answer.tokens[:common]:
            different.append(question.index)
    return {"same": len(asked) - len(different), "first_different": different[0] if different else None}


def _length(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value < float("inf"):
        raise ArgumentTypeError(f"{text!r} is no acceptance length: a number from 1 on")
    return value
