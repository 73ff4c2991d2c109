"""Acceptance length of an EAGLE3 draft: tokens that one pass of the base yields when the draft proposes the next ones.

Greedy, as modelopt's ``AcceptanceRateValidation.validate`` counts it, and equal to it token for token. modelopt reads
all that came before for every token; here base and draft keep their keys and values, and prompts run in batches.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from mlmsub.runtime import distributed
from mlmsub.runtime.errors import StageError
from mlmsub.runtime.generation import prompts
from mlmsub.runtime.generation.decoding import Decoder, RotaryAtPositions, give_cache, on_any_rank
from mlmsub.runtime.generation.kv_cache import CacheCursor
from mlmsub.runtime.progress import warn

NO_CATEGORY = "all"


@dataclass(frozen=True)
class Question:
    """A prompt as token ids. ``index`` is its record's place in the file."""

    index: int
    category: str
    text: str
    tokens: list[int]


@dataclass(frozen=True)
class Settings:
    """``steps`` of the draft before each pass of the base, ``most`` tokens of an answer, the ids that ``ends`` one.

    ``rows`` prompts share a batch.
    """

    steps: int
    most: int
    ends: list[int]
    rows: int = 32


@dataclass
class Answer:
    """The base's greedy completion, and the passes of the base that it took; the first pass is the prompt's."""

    tokens: list[int] = field(default_factory=list)
    passes: int = 0

    @property
    def acceptance_length(self) -> float:
        return len(self.tokens) / self.passes


def questions(file: Path | None, tokenizer: Any, room: int, count: int | None = None) -> list[Question]:
    """The first user message of each record of ``file`` (None: the built-in ones), of the first ``count`` records.

    ``room``: tokens that a prompt may have. Records that cannot be used are told and left out. Raises StageError if
    none is left.
    """
    made: list[Question] = []
    bad: list[str] = []
    found = prompts.read(file or prompts.BUILT_IN)[:count]
    for prompt in found:
        problem = prompt.problem
        if not problem:
            try:
                text, ids = prompts.render(prompt, [], tokenizer)
                problem = "" if 0 < len(ids) <= room else f"it has {len(ids)} tokens, and there is room for {room}."
            except ValueError as error:
                problem = str(error)
        if problem:
            bad.append(f"record {prompt.index}: {problem}")
        else:
            made.append(Question(prompt.index, prompt.category or NO_CATEGORY, text, ids))
    if not made:
        raise StageError("prompts", f"none of {len(found)} records can be used. {bad[0] if bad else ''}".strip())
    if bad:
        warn(f"{len(bad)} of {len(found)} prompts are left out; {bad[0]}")
    return made


def evaluate(model: Any, asked: Sequence[Question], settings: Settings) -> dict[str, Any]:
    """``summary`` of ``answers``: what a training loop asks for. All ranks call it; the model is as it was after."""
    return summary(asked, answers(model, asked, settings))


def summary(asked: Sequence[Question], given: Sequence[Answer]) -> dict[str, Any]:
    """``acceptance_length``: the mean over prompts, as the reference has it; with counts, and so by category."""

    def of(pairs: list[tuple[Question, Answer]]) -> dict[str, Any]:
        return {
            "acceptance_length": sum(answer.acceptance_length for _, answer in pairs) / len(pairs),
            "prompts": len(pairs),
            "tokens": sum(len(answer.tokens) for _, answer in pairs),
            "passes": sum(answer.passes for _, answer in pairs),
        }

    pairs = list(zip(asked, given, strict=True))
    names = dict.fromkeys(question.category for question in asked)
    categories = {name: of([pair for pair in pairs if pair[0].category == name]) for name in names}
    return {**of(pairs), "categories": categories}


def table(result: dict[str, Any]) -> list[str]:
    """The lines of ``summary``'s result for a log."""
    rows = {**result["categories"], "mean": result}
    width = max(len("category"), *map(len, rows))
    lines = [f"{'category':{width}}  acceptance length  prompts  tokens  passes of the base"]
    for name, row in rows.items():
        counts = f"{row['prompts']:>7}  {row['tokens']:>6}  {row['passes']:>6}"
        lines.append(f"{name:{width}}  {row['acceptance_length']:>17.3f}  {counts}")
    return lines


def answers(model: Any, asked: Sequence[Question], settings: Settings) -> list[Answer]:
    """The answer to each question, on every rank. All ranks call it with the same questions.

    Replicas of the model (data parallelism) share the questions out. ``model`` is left in the state in which it came.
    Raises StageError where it has no draft, or is on pipeline stages.
    """
    _require_draft(model)
    replicas, replica = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    lockstep = model.config.num_moe_experts is not None and replicas > 1
    order = sorted(range(len(asked)), key=lambda place: -len(asked[place].tokens))
    proposed = settings.steps + model.eagle_config.parallel_draft_step - 1
    capacity = len(asked[order[0]].tokens) + settings.most + proposed
    capacity += -capacity % 8  # what the attention kernels want of a mask
    mine: dict[int, Answer] = {}
    for begin in range(0, len(order), settings.rows * replicas):
        part = order[begin : begin + settings.rows * replicas]
        rows = -(-len(part) // replicas)
        own = part[replica::replicas]
        batch = [asked[place].tokens for place in own]
        # rows without a question have ended at once; with experts on other ranks, all batches have one shape
        batch += [[0]] * (rows - len(batch))
        length = len(asked[part[0]].tokens)
        with ExitStack() as stack:
            decoder = stack.enter_context(Decoder(model, capacity))
            draft = stack.enter_context(Draft(model, capacity, settings.steps))
            made = _Batch(decoder, draft, settings, batch, length, len(own)).run(lockstep)
        mine |= dict(zip(own, made, strict=False))
    tells = parallel_state.get_tensor_model_parallel_rank() == 0
    told = {place: answer for part in distributed.gather(mine if tells else {}) for place, answer in part.items()}
    return [told[place] for place in range(len(asked))]


class Draft:
    """The draft of a model with a key/value cache of its own, as a context manager inside a ``Decoder``'s."""

    def __init__(self, model: Any, capacity: int, steps: int) -> None:
        self.model, self.module, self.steps = model, model.eagle_module, steps
        self._cursor = CacheCursor(capacity)
        self._angles = RotaryAtPositions(self.module.rotary_pos_emb, self._cursor)
        self._undo = ExitStack()

    def __enter__(self) -> "Draft":
        for layer in self.module.decoder.modules():
            if hasattr(layer, "core_attention"):
                give_cache(self._undo, layer, self._cursor)
        return self

    def __exit__(self, *_error: object) -> None:
        self._undo.close()

    @torch.no_grad()
    def propose(
        self, following: torch.Tensor, states: list[torch.Tensor], positions: torch.Tensor, last: torch.Tensor
    ) -> torch.Tensor:
        """The tokens [batch, proposed] that come after the one that follows each row's ``last`` position.

        ``states``: what the base's layers said [new, batch, hidden] at ``positions`` [batch, new]; ``following``
        [batch, new]: the token after each. Beyond ``last`` [batch] they may hold anything: the draft goes back there
        and writes over it, as it does over its own guesses when it is told what the base says.
        """
        hidden = self.module.fc(torch.cat(states, dim=-1))[0]
        rows = torch.arange(following.shape[0], device=following.device)
        found: list[torch.Tensor] = []
        for _ in range(self.steps):
            self._cursor.move(positions)
            embedded = self.model.embedding(input_ids=following, position_ids=positions)
            out, own = self.module(embedded, hidden, None, self._angles(positions.shape[1]))
            out, hidden = out[last, rows][None], own[last, rows][None]
            found.append(self._token(self._logits(out)))
            following, positions = found[-1][:, None], positions[rows, last][:, None] + 1
            last = torch.zeros_like(last)
        if self.module.config.parallel_draft_step > 1:
            from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region as whole

            found += [self._token(whole(logits)) for logits in self.module.parallel_draft_heads(out)]
        return torch.stack(found, dim=1)

    def _logits(self, out: torch.Tensor) -> torch.Tensor:
        """[1, batch, draft vocabulary], whole on every rank; without an output layer of its own, by the base's."""
        layer, weight = getattr(self.module, "eagle_output_layer", None), None
        if layer is None:
            layer = self.model.output_layer
            if self.model.share_embeddings_and_output_weights:
                weight = self.model.shared_embedding_or_output_weight()
        logits: torch.Tensor = layer(out, weight=weight, runtime_gather_output=True)[0]
        return logits

    def _token(self, logits: torch.Tensor) -> torch.Tensor:
        token = logits[0].argmax(dim=-1)
        return token + self.module.d2t[token] if hasattr(self.module, "d2t") else token


class _Batch:
    """Some prompts that are completed together, each until its own end."""

    def __init__(
        self, decoder: Decoder, draft: Draft, settings: Settings, batch: list[list[int]], length: int, count: int
    ) -> None:
        """``batch``: prompts, padded to ``length`` here; only the first ``count`` are real."""
        device = decoder.device
        self.decoder, self.draft, self.settings = decoder, draft, settings
        self.made = [Answer() for _ in range(count)]
        self.ended = [row >= count for row in range(len(batch))]
        self.tokens = torch.tensor([ids + [0] * (length - len(ids)) for ids in batch], device=device)
        self.lengths = torch.tensor([len(ids) for ids in batch], device=device)
        self.rows = torch.arange(len(batch), device=device)

    def run(self, lockstep: bool) -> list[Answer]:
        """``lockstep``: experts lie on ranks with other prompts, which take each pass together."""
        token = _whole(self.decoder.prefill(self.tokens, self.lengths))
        following, last = self.tokens.roll(-1, 1), self.lengths - 1
        following[self.rows, last] = token
        positions = torch.arange(self.tokens.shape[1], device=self.tokens.device).expand_as(self.tokens)
        self._note(token[:, None].tolist())
        while self._open(lockstep):
            drafted = self.draft.propose(following, self.decoder.hidden_states, positions, last)
            read = torch.cat((token[:, None], drafted), dim=1)
            positions = self.lengths[:, None] + torch.arange(read.shape[1], device=read.device)
            # what the base says after each of them: right as far as the draft was
            following = _whole(self.decoder.step(read, positions))
            last = (drafted == following[:, :-1]).long().cumprod(dim=1).sum(dim=1)
            token = following[self.rows, last]
            accepted = last.tolist()
            self._note([said[: accepted[row] + 1] for row, said in enumerate(following.tolist())])
            # a row that has ended stays where it is, within the cache
            going = torch.tensor([not ended for ended in self.ended], device=read.device)
            self.lengths = torch.where(going, self.lengths + last + 1, self.lengths)
        return self.made

    def _note(self, said: list[list[int]]) -> None:
        """Count one pass of the base for each open row, and keep what it gave up to the row's end."""
        for row, answer in enumerate(self.made):
            if self.ended[row]:
                continue
            answer.passes += 1
            for token in said[row]:
                answer.tokens.append(token)
                if token in self.settings.ends or len(answer.tokens) == self.settings.most:
                    self.ended[row] = True
                    break

    def _open(self, lockstep: bool) -> bool:
        going = not all(self.ended)
        if not lockstep:
            return going
        return on_any_rank(going, parallel_state.get_data_parallel_group(), self.tokens.device)


def _whole(logits: torch.Tensor | None) -> torch.Tensor:
    """The most likely tokens; logits are there on every rank, since there is one pipeline stage."""
    assert logits is not None
    return logits.argmax(dim=-1)


def _require_draft(model: Any) -> None:
    if model.config.pipeline_model_parallel_size > 1:
        raise StageError("PP", "an EAGLE3 draft reads layers of the whole base.", "set PP=1; use TP and EP.")
    if getattr(model, "eagle_module", None) is None or not model.eagle_config.use_aux_hidden_state:
        raise StageError("MLM_MODEL_CKPT", "the model has no EAGLE3 draft.", "give a checkpoint that eagle3 has made.")
