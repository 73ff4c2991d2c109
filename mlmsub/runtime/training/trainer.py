"""One iteration for every stage that trains, on megatron.core: gradients, optimizer, schedule.

Losses are sums over tokens, divided by the number of tokens of the whole global batch: however a batch is cut into
micro-batches and data-parallel shares, the gradient is the same. An iteration does not wait for the device: what it
has found stays there as tensors, until someone reads it.
"""

import logging
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from mlmsub.runtime import distributed, megatron_refusals
from mlmsub.runtime.errors import CheckFailed, StageError

# (model, micro-batch) -> (output, function of the output that gives (loss sum, tokens, {name: (sum, tokens)}))
Forward = Callable[[Any, Any], tuple[Any, Callable[[Any], tuple[Any, Any, dict[str, Any]]]]]

# what megatron-core says about every bucket and optimizer group
_LOUD = (
    "distributed.distributed_data_parallel", "distributed.param_and_grad_buffer", "optimizer",
    "optimizer_param_scheduler", "rerun_state_machine",
)  # fmt: skip


@dataclass
class Trainer:
    """A model under training: wrapped for data parallelism, with its optimizer and its schedule.

    ``shape``: tokens of a row and rows, as pipeline stages hand them on; None: sequence length and micro batch.
    ``adjust_shapes``: Megatron's hook for what they hand on besides.
    """

    module: Any
    wrapped: Any
    optimizer: Any
    schedule: Any
    args: Namespace
    iteration: int = 0
    shape: tuple[int, int] | None = None
    adjust_shapes: Any = None

    @property
    def consumed(self) -> int:
        """Samples that the optimizer has seen: the position in the data."""
        return int(self.iteration * self.args.global_batch_size)

    def step(self, batches: Iterator[Any], forward: Forward) -> dict[str, Any]:
        """One iteration over this rank's micro-batches. Returns ``lr``, ``grad_norm`` and, on the last pipeline stage,
        means per token: numbers, or tensors that nothing has waited for (``read``).
        """
        args = self.args
        self.module.train()
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        reports = self._pass(batches, forward, microbatches(args), forward_only=False)
        updated, norm, _zeros = self.optimizer.step()
        if not updated:
            raise CheckFailed("training", f"iteration {self.iteration + 1}: the optimizer did not step.")
        rate = self.optimizer.param_groups[0]["lr"]
        self.schedule.step(increment=args.global_batch_size)
        self.iteration += 1
        return {**means(reports), "lr": rate, **({} if norm is None else {"grad_norm": norm})}

    def evaluate(self, batches: Iterator[Any], forward: Forward, iterations: int) -> dict[str, float]:
        """Means per token over ``iterations`` global batches, without gradients."""
        import torch

        self.module.eval()
        with torch.no_grad():
            reports = self._pass(batches, forward, microbatches(self.args) * iterations, forward_only=True)
        return read(means(reports))

    def check_weights(self) -> None:
        """Raise CheckFailed on every rank if a weight that trains is not finite on one of them. It waits for all work.

        What makes such a weight shows in the gradient's norm, unless Megatron is told not to clip and makes none.
        """
        import torch

        named = [(name, value) for name, value in self.module.named_parameters() if value.requires_grad]
        good = torch.stack([value.detach().isfinite().all() for _, value in named]).tolist()
        bad = [name for (name, _), finite in zip(named, good, strict=True) if not finite]
        problem = f"after iteration {self.iteration} {len(bad)} weights are not finite, such as {bad[:1]}: not saved."
        distributed.agree(CheckFailed("training", problem) if bad else None)

    def _pass(self, batches: Iterator[Any], forward: Forward, count: int, forward_only: bool) -> list[dict[str, Any]]:
        """``count`` micro-batches through all pipeline stages; the reports of the last."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        tokens, rows = self.shape or (self.args.seq_length, self.args.micro_batch_size)
        reports: list[dict[str, Any]] = get_forward_backward_func()(
            forward_step_func=lambda data, _model: forward(self.module, next(data)),
            data_iterator=batches,
            model=[self.wrapped],
            num_microbatches=count,
            seq_length=tokens,
            micro_batch_size=rows,
            forward_only=forward_only,
            adjust_tensor_shapes_fn=self.adjust_shapes,
        )
        return reports


def prepare(module: Any, args: Namespace) -> Trainer:
    """Wrap ``module`` (in its final form: every parameter that trains has requires_grad) and make its optimizer."""
    from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.training.training import get_megatron_ddp_config, get_megatron_optimizer_config

    check(args)
    trained = any(parameter.requires_grad for parameter in module.parameters())
    distributed.agree(
        None if trained else StageError("model", "no parameter of a rank is trained.", "use fewer pipeline stages.")
    )
    config = module.config
    config.calculate_per_token_loss = True
    ddp_config = get_megatron_ddp_config(args)
    ddp_config.check_for_nan_in_grad = False  # it waits for every bucket, and raises on one rank; see loop
    wrapped = DistributedDataParallel(config, ddp_config, module)
    wrapped.broadcast_params()
    with megatron_refusals.refusing("MLM_OPTIM_ARGS"):
        optimizer_config, overrides = get_megatron_optimizer_config(args)
        optimizer = get_megatron_optimizer(optimizer_config, [wrapped], config_overrides=overrides)
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    config.timers = None
    return Trainer(module, wrapped, optimizer, _schedule(optimizer, args), args)


def check(args: Namespace) -> None:
    """Raise StageError where the arguments alone forbid a training; puts ``--train-samples`` into iterations."""
    from megatron.training.training import get_megatron_optimizer_config

    for name in _LOUD:
        logging.getLogger(f"megatron.core.{name}").setLevel(logging.ERROR)
    microbatches(args)
    _iterations(args)
    with megatron_refusals.refusing("MLM_OPTIM_ARGS", RuntimeError):
        get_megatron_optimizer_config(args)
        _schedule(SimpleNamespace(param_groups=[]), args)


def microbatches(args: Namespace) -> int:
    """Micro-batches of one rank in one iteration."""
    share = args.micro_batch_size * args.data_parallel_size
    if args.global_batch_size % share:
        raise StageError(
            "--global-batch-size",
            f"{args.global_batch_size} is no multiple of micro-batch size {args.micro_batch_size} x DP "
            f"{args.data_parallel_size}.",
            "change one of them in MLM_TRAIN_ARGS.",
        )
    return int(args.global_batch_size // share)


def means(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """On the last pipeline stage: sums over all micro-batches and data-parallel ranks, divided, on their device."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    if not parallel_state.is_pipeline_last_stage():
        return {}
    names = sorted(reports[0])
    totals = torch.stack(
        [
            torch.stack([torch.stack([part.double() for part in report[name]]) for report in reports]).sum(0)
            for name in names
        ]
    )
    dist.all_reduce(totals, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return dict(zip(names, totals[:, 0] / totals[:, 1].clamp(min=1), strict=True))


def read(values: Mapping[str, Any]) -> dict[str, float]:
    """What the last pipeline stage knows, as numbers on every rank; this waits for the device."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    told: list[dict[str, float]] = [{}]
    if parallel_state.is_pipeline_last_stage() and values:
        device = next((value.device for value in values.values() if torch.is_tensor(value)), None)
        found = [torch.as_tensor(value, dtype=torch.float64, device=device).view(()) for value in values.values()]
        told = [dict(zip(values, torch.stack(found).tolist(), strict=True))]
    group = parallel_state.get_pipeline_model_parallel_group()
    dist.broadcast_object_list(told, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return told[0]


def _iterations(args: Namespace) -> None:
    """Put ``--train-samples`` into iterations, which all else counts in."""
    if not args.train_iters:
        args.train_iters = (args.train_samples or 0) // args.global_batch_size
    if not args.train_iters:
        raise StageError(
            "--train-samples", f"{args.train_samples} are less than one global batch of {args.global_batch_size}.",
            "give --train-samples or --train-iters in MLM_DATA_ARGS.",
        )  # fmt: skip


def _schedule(optimizer: Any, args: Namespace) -> Any:
    """Learning rate and weight decay as Megatron's arguments say, counted in samples (as megatron.training does)."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    size = args.global_batch_size
    if args.train_samples:
        total, decay = args.train_samples, args.lr_decay_samples or args.train_samples
        warmup, wsd = args.lr_warmup_samples, args.lr_wsd_decay_samples
    else:
        total, decay = args.train_iters * size, (args.lr_decay_iters or args.train_iters) * size
        warmup = args.lr_warmup_iters * size
        wsd = None if args.lr_wsd_decay_iters is None else args.lr_wsd_decay_iters * size
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=warmup if args.lr_warmup_fraction is None else args.lr_warmup_fraction * decay,
        lr_decay_steps=decay,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay,
        wd_incr_steps=total,
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
        wsd_decay_steps=wsd,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )
