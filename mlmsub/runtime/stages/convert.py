"""convert: make a Megatron checkpoint at this run's layout, with a draft of speculative decoding if asked for.

The source is the Hugging Face checkpoint HF_MODEL_CKPT, or the Megatron checkpoint MLM_MODEL_CKPT if set: that one
is laid out anew, and keeps its quantizers and its draft.
"""

from argparse import ArgumentParser
from typing import Any

from mlmsub.runtime import distributed
from mlmsub.runtime.checkpoints import checkpoint
from mlmsub.runtime.models import eagle
from mlmsub.runtime.progress import say
from mlmsub.runtime.quantization import formats
from mlmsub.runtime.session import Job, Session
from mlmsub.runtime.stage import CHECKPOINT, BaseStage


class Stage(BaseStage):
    """``convert MODEL [FLAG...]``; the same flags may stand in MLM_EXTRA_ARGS."""

    makes = CHECKPOINT
    takes_live = gives_live = may_skip_save = True

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.target = self.output("_mlm", checkpoint.TRACKER)

    def add_arguments(self, parser: ArgumentParser) -> None:
        eagle.add_arguments(parser.add_argument_group("convert"))

    def run(self, session: Session, model: Any = None) -> Any:
        """Lay the model out, add the draft, and save both."""
        draft = distributed.on_main(lambda: eagle.asked(session.args, self.conf, from_hf=self.start_from is None))
        self.begin(self.target)
        model = self.model(session, model)
        quantizers = formats.check_calibrated(model)
        if quantizers:
            say(f"{quantizers} quantizers are kept")
        if draft is not None:
            with self.job.steps("draft", draft.describe()):
                say(f"draft: {eagle.add(model, session.args, draft):,} parameters")
        self.save(session, model, self.target)
        return model
