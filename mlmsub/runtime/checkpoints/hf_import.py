"""Take the weights of a Hugging Face checkpoint into a Megatron model."""

import re
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

from mlmsub.runtime import distributed
from mlmsub.runtime.checkpoints import hf, hf_agreement
from mlmsub.runtime.errors import CheckFailed, StageError
from mlmsub.runtime.modelconf import ModelConf
from mlmsub.runtime.progress import Steps, peak_memory, say

LAYER = re.compile(r"(.*?\blayers\.)(\d+)\.")
# what quantized checkpoints keep for activations, and an old buffer: no weights
NO_WEIGHTS = ("_scale", "_scale_inv", ".inv_freq")


def import_weights(model: Any, folder: Path, conf: ModelConf, dtype: Any, steps: Steps | None = None) -> None:
    """Fill a Megatron model from a Hugging Face folder; all ranks call it, and all raise if one has to.

    StageError: the folder is damaged or another model. CheckFailed: a parameter got no finite weights. What was
    read is said, and is the event ``import`` of ``steps``.
    """
    import torch

    from mlmsub.runtime.checkpoints.hf_importer import Importer
    from mlmsub.runtime.checkpoints.hf_reader import Reader

    config = hf.config(folder)
    hf_agreement.check(model, config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    problem: StageError | None = None
    try:
        with Reader(folder) as reader, redirect_stderr(StringIO()):  # progress bars that no flag turns off
            importer = Importer(model, reader, conf, dtype)
            importer.run()
            importer.check_tied(config)
    except StageError as error:
        problem = error
    except (RuntimeError, KeyError, ValueError, OSError) as error:
        reason = f"{type(error).__name__}: {error}".replace("\n", " ")[:400]
        problem = StageError(
            "HF_MODEL_CKPT", f"{folder} does not fit the model conf of {conf.model}: {reason}",
            "check that both are the same model, and that the checkpoint is whole.",
        )  # fmt: skip
    distributed.agree(problem)
    importer.resync()
    empty = [name for name, parameter in model.named_parameters() if not bool(torch.isfinite(parameter).all())]
    distributed.agree(
        CheckFailed("HF_MODEL_CKPT", f"{folder} left {len(empty)} parameters without finite weights: {empty[:3]}.")
        if empty
        else None
    )
    left = _refuse_unread(reader, config)
    _tell(reader, left, steps)


def _refuse_unread(reader: Any, config: dict[str, Any]) -> list[str]:
    """Raise StageError if the source has weights of the decoder's layers that no rank took; the rest is returned.

    The rest lies outside of the layers that config.json counts: multi-token prediction, a vision tower.
    """
    import torch

    names = sorted(reader.files)
    taken = torch.tensor([name in reader.names_read for name in names], dtype=torch.uint8)
    torch.distributed.all_reduce(taken, torch.distributed.ReduceOp.MAX)
    layers = [LAYER.match(name) for name in names]
    stacks = {layer[1] for layer, was in zip(layers, taken.tolist(), strict=True) if layer and was}
    left = [
        (name, layer)
        for name, layer, was in zip(names, layers, taken.tolist(), strict=True)
        if not was and not name.endswith(NO_WEIGHTS)
    ]
    predicts = bool(config.get("num_nextn_predict_layers"))  # its layers follow the decoder's, under the same name
    wrong = [
        name for name, layer in left
        if layer and layer[1] in stacks and (int(layer[2]) < config["num_hidden_layers"] or not predicts)
    ]  # fmt: skip
    if wrong:
        raise StageError(
            "HF_MODEL_CKPT",
            f"{reader.where(wrong[0])} has {len(wrong)} tensors that the model conf has no place for: {wrong[:3]}.",
            "check that both are the same model.",
        )
    return [name for name, _ in left]


def _tell(reader: Any, left: list[str], steps: Steps | None) -> None:
    """Say and note what was read: the most of any rank, since the slowest counts."""
    mine = {
        "files_opened": reader.opens,
        "jumps_back": reader.jumps_back,
        "tensors": len(reader.names_read),
        "bytes": reader.bytes_read,
        "peak_host_gib": peak_memory()["host"],
    }
    ranks = distributed.gather(mine)
    most = {name: max(rank[name] for rank in ranks) for name in mine}
    say(
        f"read at most {most['bytes'] / 2**30:.2f} GiB per process: {most['tensors']} tensors,"
        f" {most['files_opened']} files opened once each, {most['jumps_back']} jumps back between files;"
        f" peak host memory {most['peak_host_gib']} GiB"
    )
    if left:
        groups = sorted({(LAYER.match(name) or re.match(r"[^.]*\.?[^.]*", name))[0] for name in left})  # type: ignore[index]
        say(f"not part of the model: {len(left)} tensors of the source ({', '.join(groups[:4])})")
    if steps is not None:
        steps.event("import", **most, left=len(left))
