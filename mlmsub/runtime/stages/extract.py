"""extract: what a base says of every row of the training data, stored, so that an EAGLE3 draft trains without the base.

The source is the Megatron checkpoint MLM_MODEL_CKPT, with a draft or without, or the Hugging Face checkpoint
HF_MODEL_CKPT where that is unset.
"""

import shutil
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlmsub.runtime import distributed
from mlmsub.runtime.checkpoints import hf, identity
from mlmsub.runtime.data import dataset, hidden_states
from mlmsub.runtime.data.hidden_states import Plan, Writer
from mlmsub.runtime.data.packing import INDEX, PackedDataset
from mlmsub.runtime.env import Env
from mlmsub.runtime.errors import CheckFailed, StageError
from mlmsub.runtime.megatron_args import positive
from mlmsub.runtime.models import eagle
from mlmsub.runtime.models.eagle_config import LAYERS
from mlmsub.runtime.outputs import Growing
from mlmsub.runtime.progress import say
from mlmsub.runtime.quantization import extensions, formats
from mlmsub.runtime.session import Job, Session
from mlmsub.runtime.stage import BaseStage
from mlmsub.runtime.training import arguments, record, stopping

VARIABLE = "EXTRACT_DIR"
GIB = 2**30


class Folder(Growing):
    """EXTRACT_DIR: it grows shard by shard, and any run with the same plan goes on with it."""

    def __init__(self, env: Env, target: Path) -> None:
        super().__init__(env, VARIABLE, target, INDEX)

    def goes_on(self) -> bool:
        return any((self.target / name).is_file() for name in (INDEX, hidden_states.PLAN))


class Stage(BaseStage):
    """``extract MODEL [FLAG...]``; the data's flags may stand in MLM_DATA_ARGS, as for eagle3."""

    makes = VARIABLE
    takes_live = gives_live = True

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        eagle.check_layout(self.layout.pp, self.layout.cp)
        group = "MLM_DATA_ARGS"
        self.defaults = job.env.arguments(group) or arguments.DEFAULTS[group].split()
        target = job.env.work_path(VARIABLE, "_features", job.model)
        self.folder = Folder(job.env, target)
        self.folder.check(MLM_MODEL_CKPT=self.ckpt, HF_MODEL_CKPT=hf.check_source(job.env.text("HF_MODEL_CKPT")))
        self.outputs[VARIABLE] = target
        self.stop = stopping.StopFile(job.env)

    def run(self, session: Session, model: Any = None) -> Any:
        args, steps = session.args, self.job.steps
        _refuse(args)
        layers = distributed.on_main(lambda: eagle.architecture(args, eagle.given(args))[LAYERS])
        data = dataset.of(self.job, session)
        model = self.model(session, model)
        extensions.prepare_evaluation(self.env, model)
        if getattr(model, "eagle_offline", False):
            raise StageError("MLM_MODEL_CKPT", "the base of an offline draft has no layers.", "give the whole model.")
        if getattr(model, "eagle_module", None) is not None:
            layers = sorted(model.eagle_config.eagle_aux_hidden_state_layer_ids)
        plan = hidden_states.plan(
            data, self.origin(session), self._identity(session, model), layers, args.hidden_size, args.rows_per_shard
        )
        writer = Writer(self.folder.target, plan)
        missing = distributed.on_main(lambda: self._begin(writer, args.verify))
        with steps("extract", f"{len(missing)} of {len(plan.shards)} shards, layers {plan.layers}"):
            self._make(model, data, writer, missing)
        distributed.on_main(lambda: writer.finish(data.counts))
        distributed.on_main(lambda: hidden_states.Dataset(self.folder.target) and None)
        steps.event("extract", rows=plan.rows, layers=plan.layers, made=len(missing), shards=len(plan.shards))
        return model

    def _identity(self, session: Session, model: Any) -> dict[str, Any]:
        """What the base is, so that a draft trains on the states of its own; all ranks call it."""
        source = distributed.on_main(lambda: record.source(self, session))
        quantized = any(distributed.gather(any(True for _ in formats.quantizers(model))))
        known = source and identity.of_base(str(source["is"]))
        return {"source": known, "ends": identity.of_ends(model), "quantized": quantized}

    def _begin(self, writer: Writer, verify: bool) -> list[int]:
        """The shards to make, when there is room for them."""
        plan = writer.plan
        self.folder.begin()
        writer.begin()
        missing = writer.missing(verify)
        needed = sum(len(plan.shards[number]) for number in missing) * plan.row_bytes
        free = shutil.disk_usage(writer.folder).free
        say(
            f"hidden states: {plan.rows} rows x {plan.length} tokens x ({len(plan.layers)} + 1) layers x"
            f" {plan.hidden_size} x 2 bytes = {plan.rows * plan.row_bytes / GIB:.2f} GiB in {len(plan.shards)} shards;"
            f" {needed / GIB:.2f} GiB of it to write, {free / GIB:.2f} GiB free; {writer.folder}"
        )
        if needed > free:
            raise StageError(
                VARIABLE,
                f"{writer.folder} has {free / GIB:.2f} GiB free of {needed / GIB:.2f} GiB that are needed.",
                "give a folder on another disk, or less data.",
            )
        return missing

    def _make(self, model: Any, data: PackedDataset, writer: Writer, missing: list[int]) -> None:
        """Make shards, a round of one for each replica at a time."""
        import torch
        from megatron.core import parallel_state

        replicas, replica = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        writes = parallel_state.get_tensor_model_parallel_rank() == 0
        lockstep = model.config.num_moe_experts is not None and replicas > 1
        tokens = 16384 if torch.cuda.is_available() else 2048
        begin = told = time.monotonic()
        with reading(model, writer.plan.layers) as read:
            for done in range(0, len(missing), replicas):
                mine = missing[done : done + replicas][replica : replica + 1]
                rows = [row for number in mine for row in writer.plan.shards[number]]
                problem: StageError | None = None
                try:
                    states = _states(read, data, rows, writer.plan, tokens, lockstep)
                    if mine and writes:
                        writer.write(mine[0], data.batch(rows), *states)
                except StageError as error:
                    problem = error
                distributed.agree(problem)
                count = min(done + replicas, len(missing))
                if time.monotonic() - told > 30:
                    told = time.monotonic()
                    say(f"extract: {count} of {len(missing)} shards, {count / (told - begin):.2f} per second")
                if count < len(missing) and distributed.on_main(self.stop.asked):
                    self.stop.end(len(writer.plan.shards) - len(missing) + count)

    def add_arguments(self, parser: ArgumentParser) -> None:
        eagle.add_arguments(parser.add_argument_group("draft"))
        dataset.add_arguments(parser)
        group = parser.add_argument_group("extract")
        group.add_argument("--rows-per-shard", type=positive, help="default: as many as make 512 MiB")
        group.add_argument(
            "--verify", action="store_true", help="compare the shards that are there with their checksums"
        )


@dataclass(frozen=True)
class Document:
    """A document of a shard: its row there, where it begins in it, and its tokens."""

    row: int
    start: int
    tokens: Any


def batches(documents: list[Document], tokens: int) -> list[list[Document]]:
    """Documents of close lengths together, the longest first, in batches of at most ``tokens`` with the padding."""
    made: list[list[Document]] = []
    for document in sorted(documents, key=lambda one: -len(one.tokens)):
        if made and (len(made[-1]) + 1) * len(made[-1][0].tokens) <= tokens:
            made[-1].append(document)
        else:
            made.append([document])
    return made


def _states(
    read: Any, data: PackedDataset, rows: list[int], plan: Plan, tokens: int, lockstep: bool
) -> tuple[Any, Any]:
    """The states [rows, length, ...] of the layers side by side and after the final norm, in bfloat16 on the CPU.

    Each document is read by itself, from position 0, as a server would: no mask is needed, whatever the attention is.
    ``lockstep``: experts lie on ranks with other documents; all then read equally many batches, of equal shapes.
    """
    import torch

    documents = []
    for place, row in enumerate(rows):
        start = 0
        for ids, _mask in data.row(row):
            documents.append(Document(place, start, ids))
            start += len(ids)
    plans = batches(documents, tokens)
    shapes = [(len(batch), len(batch[0].tokens)) for batch in plans]
    if lockstep:
        shapes = _largest(distributed.gather(shapes))
    shape, width = (len(rows), plan.length), plan.hidden_size
    aux = torch.zeros(*shape, width * len(plan.layers), dtype=torch.bfloat16)
    last = torch.zeros(*shape, width, dtype=torch.bfloat16)
    for number, (count, length) in enumerate(shapes):
        batch = plans[number] if number < len(plans) else []
        ids = torch.zeros(count, length, dtype=torch.long)
        for place, document in enumerate(batch):
            ids[place, : len(document.tokens)] = torch.from_numpy(document.tokens.astype("int64"))
        found = [state.to(torch.bfloat16).cpu() for state in read(ids)]
        for place, document in enumerate(batch):
            size = len(document.tokens)
            spot = (document.row, slice(document.start, document.start + size))
            aux[spot], last[spot] = (state[:size, place] for state in found)
    if not (torch.isfinite(last).all() and torch.isfinite(aux).all()):
        raise CheckFailed(
            "extract", "the base's hidden states are not finite.", "check the checkpoint that was loaded."
        )
    return aux, last


def _largest(shapes: list[list[tuple[int, int]]]) -> list[tuple[int, int]]:
    """The shapes that hold each rank's n-th batch, for as many as the busiest rank has."""
    longest = max(map(len, shapes))
    filled = [own + [(1, 1)] * (longest - len(own)) for own in shapes]
    return [(max(count for count, _ in at), max(length for _, length in at)) for at in zip(*filled, strict=True)]


@contextmanager
def reading(model: Any, layers: list[int]) -> Iterator[Any]:
    """A function of tokens [batch, seq]: the layers' outputs side by side, and the states after the final norm.

    Both are [seq, batch, width], whole on each rank; right padding influences nothing before it.
    """
    import torch
    from megatron.core.models.gpt import GPTModel

    from mlmsub.runtime.generation.decoding import whole_sequences

    device = next(model.parameters()).device
    seen: list[Any] = []

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        seen.append(output if isinstance(output, torch.Tensor) else output[0])

    @torch.no_grad()
    def read(ids: Any) -> tuple[Any, Any]:
        ids = ids.to(device)
        positions = torch.arange(ids.shape[1], device=device).expand_as(ids)
        # GPTModel's own forward: that of a model with a draft runs the draft too
        last = GPTModel.forward(model, ids, positions, None, output_processor=_hidden_states)
        getattr(model, "_aux_hidden_states", []).clear()  # what a draft's own hooks gathered
        aux = torch.cat(seen, dim=-1)
        seen.clear()
        return aux, last

    chosen = [layer for layer in model.decoder.layers if layer.layer_number - 1 in layers]
    hooks = [layer.register_forward_hook(keep) for layer in chosen]
    try:
        with whole_sequences(model):
            yield read
    finally:
        for hook in hooks:
            hook.remove()


def _hidden_states(*, hidden_states: Any, **_unused: Any) -> Any:
    return hidden_states


def _refuse(args: Namespace) -> None:
    eagle.check_layout(args.pipeline_model_parallel_size, args.context_parallel_size)
    if args.hybrid_layer_pattern is not None:
        raise StageError("model conf", "EAGLE3 drafts are for Megatron's GPTModel, not for hybrid models.")
    args.export_offline_model = False  # it is for the eagle3 of the same run or env setup: extract reads a whole base
    if args.moe_expert_capacity_factor is not None:
        raise StageError(
            "--moe-expert-capacity-factor", "drops tokens, so states would depend on others.", "leave it out."
        )
