"""Knowledge distillation with modelopt: a frozen teacher runs beside the student, whose loss is the distance to it.

The flags are those of Megatron-LM's post-training examples. With a quantized student this is quantization-aware
distillation (QAD). The teacher may be another model, with the student's vocabulary.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlmsub.runtime import modelconf
from mlmsub.runtime.checkpoints import checkpoint
from mlmsub.runtime.data.packing import Batch
from mlmsub.runtime.errors import StageError
from mlmsub.runtime.modelconf import ModelConf
from mlmsub.runtime.session import Session
from mlmsub.runtime.training import losses, record
from mlmsub.runtime.training.trainer import Forward, Trainer

TEACHER, SETTINGS = "--export-kd-teacher-load", "--export-kd-cfg"
CONF, BESIDE = "--export-kd-teacher-model-config", "model_config.yaml"  # the file's name in a teacher's folder
# TransformerConfig's names in such files, where the argument has another; and what the checkpoint says itself
RENAMED = {"num_moe_experts": "num-experts"}
KNOWN = ("share_embeddings_and_output_weights",)


def add_arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("distillation")
    group.add_argument(TEACHER, type=Path, help="the teacher's Megatron checkpoint")
    group.add_argument(CONF, type=Path, help="the teacher's model conf, or the Megatron arguments that differ, as YAML")
    group.add_argument("--export-kd-teacher-ckpt-format", help="taken for the reference's sake: it is found out")
    group.add_argument(SETTINGS, type=Path, help="modelopt's settings, a YAML file; without it: logits alone")


def asked(args: Namespace) -> bool:
    """Whether there is a teacher. Raises StageError if it cannot be used."""
    if args.export_kd_teacher_load is None:
        for flag, value in ((SETTINGS, args.export_kd_cfg), (CONF, args.export_kd_teacher_model_config)):
            if value is not None:
                raise StageError(flag, "is given without a teacher.", f"add {TEACHER}.")
        return False
    checkpoint.folder(args.export_kd_teacher_load, TEACHER)
    checkpoint.require_complete(args.export_kd_teacher_load, TEACHER)
    return True


def noted(args: Namespace) -> dict[str, Any]:
    """What a training notes of its teacher; one process only. StageError if that is a model with a draft."""
    if args.export_kd_teacher_load is None:
        return {"teacher": None, "distillation": None}
    here = checkpoint.folder(args.export_kd_teacher_load, TEACHER)
    if checkpoint.draft(here) is not None:
        raise StageError(TEACHER, f"{here} has a draft, which would run with it.", "give its base.")
    settings = None if args.export_kd_cfg is None else _mapping(SETTINGS, args.export_kd_cfg)
    return {"teacher": record.content(TEACHER, here), "distillation": settings}


def with_teacher(student: Any, session: Session, arguments: Callable[[ModelConf], Namespace]) -> Any:
    """The student with its teacher inside; what is saved of it is the student.

    ``arguments``: Megatron's for a model with another conf in this run.
    """
    import modelopt.torch.distill as mtd
    from modelopt.torch.distill.plugins import megatron

    args = session.args
    teacher = _teacher(session, arguments)
    settings = None if args.export_kd_cfg is None else str(args.export_kd_cfg)
    try:
        config = megatron.setup_distillation_config(settings, student.config, teacher.config)
        _check_widths(config.intermediate_layer_pairs, student.config.hidden_size, teacher.config.hidden_size)
        parts = {"teacher_model": teacher, "criterion": config.criterion, "loss_balancer": config.loss_balancer}
        made = mtd.convert(student, mode=[("kd_loss", parts)])
    except (AssertionError, AttributeError, OSError, TypeError, ValueError) as error:
        raise StageError(SETTINGS, f"{settings}: {checkpoint.last_line(error)}", "see modelopt's settings.") from error
    megatron.adjust_distillation_model_for_mcore(made, config)
    return made


def _teacher(session: Session, arguments: Callable[[ModelConf], Namespace]) -> Any:
    from megatron.core import dist_checkpointing

    from mlmsub.runtime.models.model import build, device

    args, here = session.args, checkpoint.folder(session.args.export_kd_teacher_load, TEACHER)
    was = dist_checkpointing.load_common_state_dict(str(here))["args"]
    if was.padded_vocab_size != args.padded_vocab_size:
        problem = f"{here} has {was.padded_vocab_size} tokens, and the student {args.padded_vocab_size}."
        raise StageError(TEACHER, problem, "give a teacher with the student's tokenizer: logits are compared by token.")
    conf = _conf(session)
    own = args if conf == session.conf else arguments(conf)
    own = Namespace(**vars(own) | {
        "seq_length": args.seq_length,
        "untie_embeddings_and_output_weights": was.untie_embeddings_and_output_weights,
    })  # fmt: skip
    teacher = build(own, conf, device(args))
    checkpoint.load(teacher, here)
    return teacher


def _conf(session: Session) -> ModelConf:
    """The teacher's: that of ``CONF``, or of a file in its folder, else the student's as it was before any pruning."""
    folder, file = session.args.export_kd_teacher_load, session.args.export_kd_teacher_model_config
    if file is None and (folder / BESIDE).is_file():
        file = folder / BESIDE
    pruned = modelconf.pruned_sizes(folder)
    if file is None:
        return replace(session.conf, pruned=pruned)
    data = _mapping(CONF, file)
    if "megatron_args" in data:
        return replace(modelconf.from_yaml(file), pruned=pruned)
    changed = {RENAMED.get(name, name.replace("_", "-")): value for name, value in data.items() if name not in KNOWN}
    return replace(session.conf, megatron_args=session.conf.megatron_args | changed, pruned=pruned)


def _mapping(flag: str, file: Path) -> dict[str, Any]:
    import yaml

    try:
        data = yaml.safe_load(file.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise StageError(flag, f"{file} cannot be read: {checkpoint.last_line(error)}") from error
    if not isinstance(data, dict):
        raise StageError(flag, f"{file} is not a mapping of keys.")
    return data


def _check_widths(pairs: list[Any], student: int, teacher: int) -> None:
    """modelopt would train a layer between two widths, which no checkpoint of the student has a place for."""
    if pairs and student != teacher:
        problem = f"intermediate_layer_pairs compare states of {student} and {teacher} values."
        raise StageError(SETTINGS, problem, "leave them out: logits can be compared at any size.")


def without_teacher(model: Any) -> Any:
    """The student alone."""
    import modelopt.torch.distill as mtd

    return mtd.export(model)


def distilled(trainer: Trainer) -> Forward:
    """The losses of ``losses.supervised`` with modelopt's balance of logits, intermediate layers and labels."""
    from modelopt.torch.distill.plugins.megatron import get_tensor_shapes_adjust_fn_for_distillation

    plain = losses.supervised(trainer, whole_logits=True)
    tokens, rows = trainer.shape or (trainer.args.seq_length, trainer.args.micro_batch_size)
    trainer.adjust_shapes = get_tensor_shapes_adjust_fn_for_distillation(
        trainer.module, seq_length=tokens, micro_batch_size=rows, decoder_seq_length=None
    )

    def forward(model: Any, batch: Batch) -> tuple[Any, Any]:
        output, _ = plain(model, batch)
        return output, lambda found: _loss(model, found, batch.loss_mask)

    return forward


def _loss(model: Any, found: Any, mask: Any) -> tuple[Any, Any, dict[str, Any]]:
    mask = mask.to(found.device, non_blocking=True).view_as(found)
    total, tokens, report = losses.summed(found, mask)
    parts = model.compute_kd_loss(student_loss=total, loss_reduction_fn=lambda loss: _summed(loss, mask))
    names = {"kd_loss": "kd loss", "logits_loss": "logits loss", "intermediate_loss": "intermediate loss"}
    kept = {} if model.training and model.loss_balancer._skip_original_loss else report  # else it was not computed
    told = {names[name]: (value.detach(), tokens) for name, value in parts.items()}
    return parts["kd_loss"], tokens.int(), {**told, **kept}


def _summed(loss: Any, mask: Any) -> Any:
    """Sum over the tokens that count. modelopt's losses say whether they are a share of a tensor-parallel rank's: of
    the vocabulary, or of the sequence."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    values, of_vocabulary, of_sequence = loss if isinstance(loss, tuple) else (loss, False, False)
    group = parallel_state.get_tensor_model_parallel_group()
    if of_sequence:
        mask = mask.tensor_split(group.size(), dim=1)[group.rank()]
    total = (values.float() * mask.view_as(values)).sum()
    if of_vocabulary or of_sequence:
        whole = total.detach().clone()
        dist.all_reduce(whole, group=group)
        total = total + (whole - total.detach())  # the value of all ranks, the gradient of this one's share
    return total
