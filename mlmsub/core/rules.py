"""The rules: what cannot work, or works otherwise than it looks, known before the job queues.

One table; docs/rules.md shows it, and a test keeps the two equal. Sources name the assertion in megatron-core 0.19
(`core/...`, `training/...`) or nvidia-modelopt 0.47 (`modelopt/...`), or public reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from mlmsub.core import layout_rules as sizes
from mlmsub.core import prune_rules as pruning
from mlmsub.core import quantize_rules as quantizing
from mlmsub.core import stage_rules as kinds
from mlmsub.core import stages
from mlmsub.core.facts import Facts
from mlmsub.core.issues import Issue, Severity

ALL = ("convert", "quantize", "eagle3", "finetune", "train", "prune", "generate", "mmlu", "validate", "extract")
EVERY = (*ALL, "export")


@dataclass(frozen=True)
class Rule:
    """`check` yields (field, message, fix); it is asked for these stages only."""

    code: str
    severity: Severity
    stages: tuple[str, ...]
    check: Callable[[Facts], Iterator[tuple[str, str, str]]]
    summary: str
    source: str
    layout: bool = True  # whether it depends on the layout alone, so that `plan --suggest` asks it

    @property
    def applies_to(self) -> str:
        if self.stages == EVERY:
            return "all stages"
        return "all but export" if self.stages == ALL else ", ".join(self.stages)


RULES = (
    # --- groups of ranks
    Rule("world-size", "error", EVERY, sizes.world,
         "nodes x GPUs is a multiple of TP\\*PP\\*CP; export: at least PP", "core/parallel_state.py: world_size"),
    Rule("expert-world-size", "error", ALL, sizes.expert_world,
         "nodes x GPUs is a multiple of ETP\\*EP\\*PP", "core/parallel_state.py; Megatron-Bridge#546"),
    Rule("etp-is-tp", "info", ALL, sizes.etp_default,
         "an unset ETP is TP: TP=8 EP=64 without ETP=1 is ETP 8", "core/model_parallel_config.py: __post_init__"),
    Rule("tp-across-nodes", "warning", ALL, sizes.tp_in_a_node,
         "TP fits into a node", "Megatron-LM's parallelism guide"),
    # --- what is divided
    Rule("experts", "error", ALL, sizes.experts,
         "EP divides the number of experts", "training/arguments.py; core/transformer/moe/moe_layer.py; slime#2077"),
    Rule("no-experts", "error", ALL, sizes.no_experts,
         "EP > 1 needs a model with experts", "core/transformer/transformer_config.py: num_moe_experts"),
    Rule("heads", "error", ALL, sizes.heads,
         "TP divides the attention heads", "core/transformer/transformer_config.py: num_attention_heads"),
    Rule("query-groups", "error", ALL, sizes.query_groups,
         "TP divides the query groups where a Hugging Face checkpoint is imported",
         "modelopt/torch/export/plugins/megatron_importer.py; core/transformer/transformer_config.py"),
    Rule("vocabulary", "error", ALL, sizes.vocabulary,
         "TP divides the embedding's rows, and no padding adds rows that the checkpoint has not",
         "core/tensor_parallel/layers.py; training/vocab_utils.py"),
    Rule("mlp", "error", ALL, sizes.dense_ffn,
         "TP divides ffn-hidden-size", "core/tensor_parallel/layers.py: divide"),
    Rule("expert-mlp", "error", ALL, sizes.moe_ffn,
         "ETP divides moe-ffn-hidden-size", "core/tensor_parallel/layers.py: divide"),
    Rule("shared-expert", "error", ALL, sizes.shared_ffn,
         "TP divides moe-shared-expert-intermediate-size", "core/tensor_parallel/layers.py: divide"),
    Rule("mamba", "error", ALL, sizes.mamba,
         "TP divides the Mamba heads and groups", "core/ssm/mamba_mixer.py"),
    Rule("fp8-blocks", "error", ALL, sizes.fp8_blocks,
         "a rank's slice of an FP8-block source is a multiple of 128",
         "modelopt's importer dequantizes whole blocks of 128 x 128 (measured)"),
    # --- the pipeline
    Rule("layers", "error", EVERY, sizes.pipeline,
         "layers divide over PP, or what first and last stages leave divides over the rest; hybrid models by letters",
         "core/transformer/transformer_block.py: get_num_layers_to_build; Megatron-LM#1304; ms-swift#5737"),
    Rule("virtual-pipeline", "error", EVERY, kinds.virtual_pipeline,
         "no interleaved pipeline stages, least of all with distillation", "modelopt/torch/nas/plugins/megatron.py",
         layout=False),
    Rule("single-pipeline", "error", ("eagle3", "extract", "validate"), kinds.single_pipeline,
         "PP is 1", "modelopt/torch/speculative/plugins/megatron_eagle.py: aux hidden states"),
    # --- parallelism and the stage
    Rule("sequence-parallel-needed", "error", stages.TRAINING, sizes.sequence_parallel_needed,
         "experts trained with TP > 1 need sequence parallelism", "core/transformer/moe/moe_layer.py: forward"),
    Rule("sequence-parallel-off", "info", EVERY, sizes.sequence_parallel_off,
         "sequence parallelism at TP=1 is switched off", "training/arguments.py"),
    Rule("context-length", "error", ALL, sizes.context_length,
         "seq-length is a multiple of 2\\*CP", "training/arguments.py: seq-length"),
    Rule("context-parallel", "warning", ALL, kinds.context_parallel,
         "CP > 1 needs Transformer Engine", "core/transformer/dot_product_attention.py"),
    Rule("quantize-experts", "error", ("quantize",), kinds.quantize_experts,
         "quantizing experts needs TP=1 or EP=1",
         "modelopt/torch/quantization/plugins/megatron.py: QuantSequentialMLP"),
    Rule("auto-quantize", "error", ("quantize",), quantizing.search_layout,
         "automatic quantization needs PP=1", "Megatron-LM's quantize.py"),
    Rule("quantize-format", "error", ("quantize",), quantizing.formats,
         "ModelOpt has the format, those of a search and that of the KV cache, and a search has its bits; recipes are "
         "looked at in the job", "modelopt/torch/quantization/config.py: choices", layout=False),
    Rule("export-tp", "warning", ("export",), kinds.export_tp,
         "export splits by PP only; TP is forced to 1", "Megatron-LM's export.sh; Speech#14375; Model-Optimizer#1589"),
    Rule("export-layout", "info", ("export",), kinds.export_others,
         "export takes CP, EP and ETP as 1", "Megatron-LM's export.sh"),
    Rule("export-idle", "info", ("export", "prune"), sizes.idle_data_parallel,
         "export and prune use PP ranks, and the others have nothing to do", "mlmsub's export and prune"),
    Rule("prune-tp", "error", ("prune",), pruning.layout,
         "prune needs TP=1, CP=1 and EP=1", "Megatron-LM's prune.sh; Model-Optimizer#1209"),
    Rule("prune-targets", "error", ("prune",), pruning.targets,
         "something is to be pruned, to less than the model has; LAYERS_TO_DROP stands alone", "Megatron-LM's prune.py",
         layout=False),
    Rule("prune-widths", "error", ("prune",), pruning.widths,
         "query groups divide the heads that are left, a token's experts are there, and a Llama's heads divide its "
         "hidden size", "modelopt/torch/nas/plugins/megatron.py; transformers' LlamaConfig", layout=False),
    Rule("prune-layers", "error", ("prune",), pruning.layers,
         "the layers that are left divide over PP; no hybrid models", "core/transformer/transformer_block.py"),
    Rule("prune-engine", "info", ("prune",), pruning.transformer_engine,
         "pruning width needs Transformer Engine", "modelopt/torch/nas/plugins/megatron.py", layout=False),
    Rule("gpt-oss-etp", "error", ("convert", "quantize", "eagle3", "prune"), kinds.gpt_oss,
         "gpt-oss needs ETP=1", "modelopt/torch/export/plugins/megatron_importer.py"),
    Rule("llama-4-experts", "error", ("convert", "quantize", "eagle3", "prune"), kinds.llama4,
         "Llama 4 takes EP or ETP, not both", "modelopt/torch/export/plugins/megatron_importer.py"),
    # --- the model and the values
    Rule("stage-unsupported", "error", EVERY, kinds.unsupported,
         "the model conf's `unsupported` does not name the stage", "Megatron-LM's support matrix; conf/", layout=False),
    Rule("kv-format", "error", ("quantize", "export"), kinds.kv_format,
         "no KV cache format for models with multi-head latent attention",
         "modelopt's export has no rule for their attention", layout=False),
    Rule("nvfp4-simulated", "info", ("quantize", "finetune", "generate", "mmlu"), kinds.simulated_nvfp4,
         "NVFP4 before Blackwell is simulated", "modelopt/torch/quantization", layout=False),
    Rule("resume-layout", "info", ("finetune", "train"), kinds.resume,
         "a distributed optimizer's state takes no other TP, PP, EP or ETP", "core/optimizer/distrib_optimizer.py: "
         "dp_reshardable", layout=False),
    Rule("layout-overridden", "warning", EVERY, kinds.layout_overruled,
         "TP, PP, CP, EP, ETP and the arguments say the same", "the later argument wins", layout=False),
    Rule("checkpoint-mismatch", "warning", EVERY, kinds.checkpoint_matches,
         "the checkpoint's name agrees with the model's", "Megatron-LM's gpt-oss-120b.sh", layout=False),
    Rule("unknown-variable", "warning", EVERY, kinds.unknown_names,
         "no name in the env setup is nearly one that is read", "public reports", layout=False),
    Rule("unread-arguments", "warning", EVERY, kinds.unread_arguments,
         "the stage reads the argument variables that are set", "Megatron-LM's examples", layout=False),
    # --- memory
    Rule("weights-memory", "error", ALL, sizes.state_fits,
         "the weights fit the GPU, and in training their gradients and optimizer state too",
         "docs/rules.md and benchmarks/memory.md"),
    Rule("memory", "warning", ALL, sizes.memory,
         "the estimate fits the GPU", "benchmarks/memory.md"),
)  # fmt: skip
CODES = frozenset(rule.code for rule in RULES)


def check(facts: Facts, *, unsure: bool = False) -> Iterator[Issue]:
    """The issues of a run. Where values are `unsure`, what would be an error is a warning."""
    for rule in RULES:
        if facts.stage in rule.stages:
            for field, message, fix in rule.check(facts):
                issue = Issue(rule.code, rule.severity, field, message, fix)
                yield replace(issue, severity="warning") if unsure and rule.severity == "error" else issue


LAYOUT_CODES = frozenset(rule.code for rule in RULES if rule.layout)


def legal(facts: Facts) -> bool:
    """Whether no rule on layouts has an error; memory is judged apart."""
    return not any(
        rule.severity == "error" and rule.layout and facts.stage in rule.stages and any(rule.check(facts))
        for rule in RULES
        if rule.code != "weights-memory"
    )


def markdown() -> str:
    """The table as docs/rules.md has it."""
    lines = ["| code | severity | stages | rule | source |", "| --- | --- | --- | --- | --- |"]
    lines += [
        f"| `{rule.code}` | {rule.severity} | {rule.applies_to} | {rule.summary} | {rule.source} |" for rule in RULES
    ]
    return "\n".join(lines)
