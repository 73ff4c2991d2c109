"""generate: complete prompts with a model, quantized or not, and write the completions as JSON lines.

The source is the Megatron checkpoint MLM_MODEL_CKPT if set, else the Hugging Face checkpoint HF_MODEL_CKPT.
"""

import json
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlmsub.runtime import distributed
from mlmsub.runtime.checkpoints import hf
from mlmsub.runtime.env import Env
from mlmsub.runtime.errors import StageError, writing
from mlmsub.runtime.generation import prompts
from mlmsub.runtime.generation.prompts import Prompt
from mlmsub.runtime.progress import say, warn
from mlmsub.runtime.quantization import extensions
from mlmsub.runtime.session import Job, Session
from mlmsub.runtime.stage import BaseStage

RESULT = "completions.jsonl"
SHOWN = 3  # completions in the log
BATCH = 32
# of the free GPU memory: what a step needs beside the caches, and the allocator's rounding, take the rest
CACHE_SHARE = 0.7
# flags of the reference's generate.py that mean something and are not done here
NOT_DONE = dict.fromkeys(
    ("--draft-length", "--draft-topk", "--finetune-hf-dataset", "--finetune-data-split"), "leave it out."
)


class Stage(BaseStage):
    """``generate MODEL [PROMPT...] [FLAG...]``; the same flags may stand in MLM_EXTRA_ARGS."""

    words = None
    makes = "GENERATE_OUT"
    takes_live = gives_live = True
    not_taken = NOT_DONE

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        prompts.check_file(self.env.text("PROMPTS_PATH"), "PROMPTS_PATH")
        self.target = self.output("_generate", RESULT)

    def add_arguments(self, parser: ArgumentParser) -> None:
        _add_arguments(parser)

    def run(self, session: Session, model: Any = None) -> Any:
        """Answer the prompts; the model is as it was."""
        asked = _prompts(self.env, session, self.job.words)
        self.begin(self.target)
        model = self.model(session, model)
        extensions.prepare_evaluation(self.env, model)
        complete(self.job, session, model, asked, self.target.part)
        self.publish(self.target)
        return model


def complete(job: Job, session: Session, model: Any, asked: list[Prompt], folder: Path) -> None:
    """Answer all turns of all prompts; ``folder`` gets one JSON line an answer or unusable record, in their order.

    The lines are appended as answers end; the file is put in order when all have.
    """
    book = _Book(asked, hf.tokenizer(session.source, session.conf), folder / RESULT, job.env.rank == 0)
    for turn in range(max(prompt.turns for prompt in asked)):
        _complete_turn(job, session, model, book, turn)
    skipped = [prompt for prompt in book.prompts if prompt.problem]
    for prompt in skipped[:SHOWN]:
        warn(f"record {prompt.index} is left out: {prompt.problem}")
    if len(skipped) == len(asked):
        raise StageError("prompts", f"none of the {len(asked)} records can be used; the first: {skipped[0].problem}")
    if skipped:
        warn(f"{len(skipped)} of {len(asked)} records were left out; each has a line with its error in {RESULT}")
    book.write_in_order()
    for line in book.lines()[:SHOWN]:
        say(f"--- {line['index']}.{line.get('turn', 0)}: {line.get('completion', '')[:400]!r}")


@dataclass
class _Book:
    """The prompts, what was answered so far, and the file of the answers."""

    prompts: list[Prompt]
    tokenizer: Any
    file: Path
    writes: bool
    answers: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)  # by place and turn

    def add(self, place: int, turn: int, line: dict[str, Any]) -> None:
        if (place, turn) not in self.answers:
            self.answers[place, turn] = line
            if self.writes:
                with writing("GENERATE_OUT", self.file), self.file.open("a") as file:
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def texts(self, place: int, turn: int) -> list[str]:
        """The answers of one prompt before ``turn``."""
        return [self.answers[place, earlier]["completion"] for earlier in range(turn)]

    def lines(self) -> list[dict[str, Any]]:
        errors = {
            (place, len(self.prompts)): {"index": prompt.index, "error": prompt.problem}
            for place, prompt in enumerate(self.prompts)
            if prompt.problem
        }
        return [line for _, line in sorted({**self.answers, **errors}.items())]

    def write_in_order(self) -> None:
        if self.writes:
            scratch = self.file.with_suffix(".tmp")
            with writing("GENERATE_OUT", self.file):
                scratch.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in self.lines()))
                scratch.replace(self.file)


def _complete_turn(job: Job, session: Session, model: Any, book: _Book, turn: int) -> None:
    """One answer to every prompt that has such a turn, longest prompts first."""
    from mlmsub.runtime.generation.batches import Generator, Task
    from mlmsub.runtime.generation.decoding import Decoder

    args = session.args
    texts: dict[int, str] = {}
    tasks: dict[int, Task] = {}
    for place, prompt in enumerate(book.prompts):
        if prompt.problem or turn >= prompt.turns:
            continue
        try:
            texts[place], ids = prompts.render(prompt, book.texts(place, turn), book.tokenizer)
            limit = min(args.max_new_tokens, args.max_position_embeddings - len(ids))
            if not ids or limit < 1:
                raise ValueError(f"it has {len(ids)} tokens, and the model reads {args.max_position_embeddings}.")
            tasks[place] = Task(f"{prompt.index} {turn}", ids, limit)
        except ValueError as error:
            book.prompts[place] = Prompt(prompt.index, problem=f"turn {turn}: {error}")
    if not tasks:
        return
    order = sorted(tasks, key=lambda place: -len(tasks[place].prompt))
    capacity = max(len(task.prompt) + task.limit for task in tasks.values())
    capacity += -capacity % 8  # what the attention kernels want of a mask
    rows = _rows(session, model, len(tasks), capacity, len(tasks[order[0]].prompt))
    ends = [] if args.ignore_eos else prompts.end_tokens(session.source, book.tokenizer)
    with Decoder(model, capacity) as decoder:
        most = max(task.limit for task in tasks.values())
        maker = Generator(decoder, rows, most, ends, _sampling(args), _lockstep(model), _graphs(model))

        def keep(places: list[int]) -> Callable[[int, Any], None]:
            def on_end(row: int, done: Any) -> None:
                place = places[row]
                text = book.tokenizer.decode(done.tokens, skip_special_tokens=True)
                line = {
                    "index": book.prompts[place].index, "turn": turn, "prompt": texts[place], "completion": text,
                    "finish_reason": done.reason, "prompt_tokens": len(tasks[place].prompt), "tokens": done.tokens,
                }  # fmt: skip
                book.add(place, turn, line)

            return on_end

        detail = f"{len(tasks)} prompts, batches of {rows}, up to {maker.most} tokens, {maker.sampling.describe()}"
        with job.steps("generate", detail):
            for places, mine, length in _batches(order, tasks, rows):
                maker.run([tasks[place] for place in mine], length, keep(mine))
                _share(book, turn, places)
    _tell(job, maker.speed, turn)


def _batches(order: list[int], tasks: dict[int, Any], rows: int) -> Any:
    """(places of all replicas, of this one, length) of each batch: replicas of the model answer different prompts.

    Every replica has equally many batches, of one length, since experts may be spread over them.
    """
    from megatron.core import parallel_state

    replicas, replica = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    for begin in range(0, len(order), rows * replicas):
        places = order[begin : begin + rows * replicas]
        yield places, places[replica::replicas], len(tasks[places[0]].prompt)


def _share(book: _Book, turn: int, places: list[int]) -> None:
    """Bring the answers of all replicas to every rank."""
    from megatron.core import parallel_state

    if parallel_state.get_data_parallel_world_size() == 1:
        return
    first = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_pipeline_model_parallel_rank() == 0
    own = {place: book.answers[place, turn] for place in places if first and (place, turn) in book.answers}
    for part in distributed.gather(own):
        for place, line in part.items():
            book.add(place, turn, line)


def _lockstep(model: Any) -> bool:
    """Whether experts are spread over the replicas, which then take each step together."""
    from megatron.core import parallel_state

    return model.config.num_moe_experts is not None and parallel_state.get_data_parallel_world_size() > 1


def _graphs(model: Any) -> bool:
    """Whether a decode step can be a CUDA graph."""
    import torch
    from megatron.core import parallel_state

    if not torch.cuda.is_available():
        return False
    reason = ""
    if model.config.num_moe_experts is not None:
        reason = "the experts' dispatcher asks the GPU for counts"
    elif parallel_state.get_pipeline_model_parallel_world_size() > 1:
        reason = "the pipeline's stages talk in each"
    say(f"INFO: decode steps are {f'eager: {reason}' if reason else 'a CUDA graph'}")
    return not reason


def _rows(session: Session, model: Any, count: int, capacity: int, longest: int) -> int:
    """Rows of a batch: what was asked for, or up to 32 as the memory allows; the same on every rank."""
    import torch
    from megatron.core import parallel_state

    from mlmsub.runtime.generation.decoding import cache_bytes

    fits = BATCH
    if session.args.generate_batch_size:
        fits = session.args.generate_batch_size
    elif torch.cuda.is_available():
        config = model.config
        logits = 16 * session.args.padded_vocab_size  # bf16, fp32, sorted with ids
        # about 20 tensors as wide as the hidden state are alive in a layer that reads the prompt
        row = cache_bytes(model) * capacity + logits + 40 * config.hidden_size * longest
        torch.cuda.empty_cache()
        fits = int(CACHE_SHARE * torch.cuda.mem_get_info()[0] // row)
    rows = min(distributed.gather(fits))
    if rows < 1:
        raise StageError(
            "GPU memory",
            f"the key/value cache of one row of {capacity} tokens does not fit.",
            "lower --max-new-tokens, leave out the longest prompts, or use more GPUs (TP, PP).",
        )
    asked = session.args.generate_batch_size or BATCH
    return int(min(rows, asked, -(-count // parallel_state.get_data_parallel_world_size())))


def _sampling(args: Any) -> Any:
    from mlmsub.runtime.generation.sampling import Sampling

    drawn = args.top_k is not None or args.top_p is not None
    temperature = (1.0 if drawn else 0.0) if args.temperature is None else args.temperature
    return Sampling(temperature, args.top_k or 0, args.top_p or 1.0, args.seed)


def _prompts(env: Env, session: Session, texts: list[str]) -> list[Prompt]:
    """The prompts of this run: words, --prompts, PROMPTS_PATH, else the few that are built in."""
    args = session.args
    file = prompts.check_file(args.prompts, "--prompts") or prompts.check_file(env.text("PROMPTS_PATH"), "PROMPTS_PATH")
    if texts:
        found = prompts.words(texts)
    else:
        if file is None:
            say("no prompts were given (PROMPTS_PATH, --prompts or words): using the few that are built in")
        found = prompts.read(file or prompts.BUILT_IN)
    if not found:
        raise StageError("prompts", f"{file} has no prompt.")
    found = found[: max(1, round(len(found) * args.fraction))]
    tokenizer = hf.tokenizer(session.source, session.conf)
    if args.chat:
        if not tokenizer.chat_template:
            raise StageError("--chat", f"the tokenizer of {session.source} has no chat template.", "leave --chat out.")
        found = [prompts.as_chat(prompt) for prompt in found]
    if not tokenizer.chat_template and any(prompt.messages for prompt in found):
        warn("the tokenizer has no chat template: the messages of a conversation are given as lines of text")
    return found


def _tell(job: Job, speed: Any, turn: int) -> None:
    total = speed.prefill + speed.decode
    rate = speed.tokens / total if total else 0.0
    say(
        f"turn {turn}: {speed.tokens} tokens in {total:.2f} s ({rate:.0f}/s on each replica;"
        f" prompts {speed.prefill:.2f} s, decode {speed.decode:.2f} s)"
    )
    job.steps.event("generated", turn=turn, tokens_per_second=round(rate, 1), **asdict(speed))


def _number(kind: type, low: float, high: float = float("inf")) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        value = kind(text)
        if not low <= value <= high:
            raise ValueError(text)
        return value

    read.__name__ = f"{kind.__name__} of at least {low}" + ("" if high == float("inf") else f", at most {high}")
    return read


def _add_arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("generate")
    group.add_argument("--prompts", help="a local .txt, .jsonl or .parquet")
    group.add_argument("--max-new-tokens", "--osl", type=_number(int, 1), default=128)
    group.add_argument("--temperature", type=_number(float, 0), help="default: greedy")
    group.add_argument("--top-k", type=_number(int, 1))
    group.add_argument("--top-p", type=_number(float, 1e-6, 1))
    group.add_argument("--generate-batch-size", type=_number(int, 1), help="default: 32, or what the memory allows")
    group.add_argument("--chat", action="store_true", help="plain text is a user's message")
    group.add_argument("--fraction", type=_number(float, 0, 1), default=1.0, help="of the prompts, from the first on")
    group.add_argument("--ignore-eos", action="store_true", help="always make --max-new-tokens tokens")
