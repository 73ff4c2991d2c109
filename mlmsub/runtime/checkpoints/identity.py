"""What the weights of a checkpoint are, by content: found elsewhere, or cut into other files, they are the same.

A checkpoint is told apart from another of the same sizes without being read as a whole.
"""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mlmsub.runtime.checkpoints import frozen_base, hf, hf_headers
from mlmsub.runtime.checkpoints.frozen_base import THREADS, Base
from mlmsub.runtime.errors import StageError

# Of a Hugging Face checkpoint so many bytes are read in all, an equal share from the end of each tensor, and never less
# than the second number: small models are read whole, of one with 140,000 tensors 2 KiB each
BYTES, LEAST = 256 * 2**20, 1024


def of_source(folder: Path) -> str | None:
    """Of a Hugging Face folder: names, types, shapes and bytes of its tensors; None: it has none."""
    places = []
    try:
        for file in sorted({folder / one.file for one in hf_headers.source_headers(folder).values()}):
            with file.open("rb") as stream:
                begin, header = hf_headers.entries(stream)
            for name, entry in header.items():
                start, end = (begin + offset for offset in entry["data_offsets"])
                places.append((name, (entry["dtype"], entry["shape"]), file, start, end))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StageError("HF_MODEL_CKPT", f"{folder} cannot be read: {error!r}.", hf.AGAIN) from error
    if not places:
        return None
    share = max(BYTES // len(places), LEAST)

    def end_of(place: tuple[str, Any, Path, int, int]) -> bytes:
        name, kind, file, start, end = place
        with file.open("rb") as stream:
            read = os.pread(stream.fileno(), min(share, end - start), max(start, end - share))
        return repr((name, *kind)).encode() + hashlib.sha256(read).digest()

    made = hashlib.sha256()
    with ThreadPoolExecutor(THREADS) as pool:
        for found in pool.map(end_of, sorted(places)):
            made.update(found)
    return f"hf:{made.hexdigest()}"


def of_checkpoint(here: Path) -> str:
    """Of one folder of a Megatron checkpoint, at its layout: weights and ranges of quantizers, then its draft."""
    base, draft = Base.of(here), frozen_base.digest(here, (frozen_base.PART,))
    known = frozen_base.digest(here) if base is None else base.sha256
    return f"megatron:{known}" + (f"+{draft}" if draft != hashlib.sha256().hexdigest() else "")


def of_base(known: str) -> str:
    """The part of an identity that is the base's: a draft says nothing of the states that it reads."""
    return known.partition("+")[0]


def of_ends(model: Any) -> str:
    """Of a model in memory: embedding, final norm and output layer, which an offline model has too; all ranks call it.

    The bits are summed up as integers, so every layout has the same.
    """
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    made = []
    for name, weight in sorted(model.named_parameters()):
        if not name.startswith(("embedding.", "decoder.final_layernorm.", "output_layer.")):
            continue
        bits = weight.detach().contiguous().view({2: torch.int16, 4: torch.int32}[weight.element_size()])
        total = bits.sum(dtype=torch.int64)
        if getattr(weight, "tensor_model_parallel", False):
            dist.all_reduce(total, group=group)
        made.append((name, str(weight.dtype), int(total)))
    return hashlib.sha256(repr(made).encode()).hexdigest()
