"""A tiny random Llama with a tokenizer of its own, and a way to run stages on it.

Stages of one process run inside pytest (their imports take seconds), those of two processes as real
processes over gloo.
"""

import contextlib
import io
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import yaml

torch = pytest.importorskip("torch")
pytest.importorskip("modelopt")
pytest.importorskip("megatron.core")

from mlmsub.runtime import __main__ as runtime  # noqa: E402

ROOT = Path(__file__).parents[2]
MODEL = "test/tiny-llama"
LAYERS, HIDDEN, HEADS, GROUPS, FFN = 4, 64, 4, 2, 128
ENOUGH = "--calib-size 8 --calib-max-sequence-length 64"


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    run_dir: Path

    @property
    def done(self) -> dict:
        return json.loads((self.run_dir / "state" / "0" / "done.json").read_text())


class Runner:
    """Runs stages with run directories under one folder."""

    def __init__(self, folder: Path, conf: Path, model: str = MODEL) -> None:
        self.folder, self.conf, self.model, self.count = folder, conf, model, 0

    def run_dir(self, conf: Path | None = None) -> Path:
        self.count += 1
        made = self.folder / f"run{self.count}"
        (made / "conf").mkdir(parents=True)
        shutil.copy(conf or self.conf, made / "conf" / "model.yaml")
        return made

    def environment(self, run_dir: Path, variables: dict[str, object]) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "LD_LIBRARY_PATH", "TMPDIR")}
        given = {key: str(value) for key, value in variables.items()}
        return {**kept, "MLMSUB_RUN_DIR": str(run_dir), "MLM_EXTRA_ARGS": ENOUGH, **given}

    def __call__(self, *words: str, run_dir: Path | None = None, **variables: object) -> Result:
        """Run ``STAGE [ARG...]`` on the tiny model in this process."""
        run_dir = run_dir or self.run_dir()
        if words[0] == "export":
            variables = {"MLM_EXTRA_ARGS": "", **variables}
        out = io.StringIO()
        with (
            mock.patch.dict(os.environ, self.environment(run_dir, variables), clear=True),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(out),
        ):
            code = runtime.main([words[0], self.model, *words[1:]])
        return Result(code, out.getvalue(), run_dir)

    def ranks(self, *words: str, **variables: object) -> Result:
        """Run it as two processes."""
        run_dir = self.run_dir()
        if words[0] == "export":
            variables = {"MLM_EXTRA_ARGS": "", **variables}
        environment = self.environment(run_dir, variables)
        environment |= {
            "PYTHONPATH": str(ROOT),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        command = [sys.executable, "-m", "mlmsub.runtime", words[0], self.model, *words[1:]]
        processes = [
            subprocess.Popen(
                command,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        outs = [process.communicate(timeout=300)[0] for process in processes]
        return Result(max(process.returncode for process in processes), "".join(outs), run_dir)


def result_of_pair(run_dir: Path) -> Result:
    """What two processes left in their run directory: each its exit code and its log."""
    ended = [run_dir / f"code{rank}" for rank in range(2)]
    code = max(int(file.read_text()) for file in ended) if all(file.exists() for file in ended) else -1
    logs = [run_dir / f"rank{rank}" for rank in range(2)]
    return Result(code, "".join(log.read_text() for log in logs if log.exists()), run_dir)


def wait(processes: list[subprocess.Popen]) -> None:
    """Until both have ended; one that fails leaves the other in a collective, which is then ended too."""
    end = time.monotonic() + 300
    while any(process.poll() is None for process in processes):
        if time.monotonic() > end or any(process.poll() for process in processes):
            for process in processes:
                process.kill()
        time.sleep(0.1)


def free_port() -> int:
    """A port below those that the kernel gives to connections, which may take one before the ranks come to it."""
    while True:
        port = random.randrange(10000, 27000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def make_tokenizer(folder: Path) -> int:
    """A small byte-level BPE tokenizer, trained on the built-in calibration text; returns its size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train([str(ROOT / "mlmsub" / "runtime" / "quantization" / "calibration.txt")], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    fast.save_pretrained(folder)
    return len(fast)


def make_llama(folder: Path, tied: bool) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True)
    vocabulary = make_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HIDDEN // HEADS,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.15,  # the default's logits are too flat for a comparison to mean much
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(11)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def make_conf(file: Path) -> Path:
    arguments = {
        "num-layers": LAYERS, "hidden-size": HIDDEN, "ffn-hidden-size": FFN, "num-attention-heads": HEADS,
        "group-query-attention": True, "num-query-groups": GROUPS, "kv-channels": HIDDEN // HEADS,
        "normalization": "RMSNorm", "norm-epsilon": 1e-6, "swiglu": True, "disable-bias-linear": True,
        "position-embedding-type": "rope", "rotary-base": 10000, "seq-length": 512, "max-position-embeddings": 512,
        "attention-dropout": 0.0, "hidden-dropout": 0.0,
    }  # fmt: skip
    file.write_text(yaml.safe_dump({"model": MODEL, "megatron_args": arguments}))
    return file


def make_latent(folder: Path) -> Path:
    """A tiny DeepseekV3 (Kimi's architecture): latent attention, one dense layer, then experts."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    folder.mkdir(parents=True)
    config = DeepseekV3Config(
        vocab_size=make_tokenizer(folder), hidden_size=64, intermediate_size=128, moe_intermediate_size=32,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=4,
        num_experts_per_tok=2, routed_scaling_factor=2.5, first_k_dense_replace=1, n_group=1, topk_group=1,
        kv_lora_rank=32, q_lora_rank=48, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=24,
        max_position_embeddings=512, rope_theta=50000.0, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(11)
    DeepseekV3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def make_latent_conf(file: Path) -> Path:
    arguments = {
        "num-layers": 3, "hidden-size": 64, "ffn-hidden-size": 128, "num-attention-heads": 4, "kv-channels": 24,
        "normalization": "RMSNorm", "norm-epsilon": 1e-6, "swiglu": True, "disable-bias-linear": True,
        "position-embedding-type": "rope", "rotary-base": 50000, "seq-length": 512, "max-position-embeddings": 512,
        "attention-dropout": 0.0, "hidden-dropout": 0.0, "multi-latent-attention": True, "qk-layernorm": True,
        "q-lora-rank": 48, "kv-lora-rank": 32, "qk-head-dim": 16, "qk-pos-emb-head-dim": 16, "v-head-dim": 24,
        "rope-type": "rope", "num-experts": 4, "moe-layer-freq": "[0]*1+[1]*2", "moe-ffn-hidden-size": 32,
        "moe-shared-expert-intermediate-size": 32, "moe-router-topk": 2, "moe-router-score-function": "sigmoid",
        "moe-router-enable-expert-bias": True, "moe-router-topk-scaling-factor": 2.5, "moe-router-dtype": "fp32",
        "moe-router-load-balancing-type": "none", "moe-token-dispatcher-type": "allgather",
    }  # fmt: skip
    file.write_text(yaml.safe_dump({"model": MODEL, "megatron_args": arguments}))
    return file


@contextlib.contextmanager
def session(stage: Runner, source: Path, **given: object) -> Iterator:
    """The session that a stage works in, for tests of the rooms below the stages."""
    from mlmsub.runtime.env import Env
    from mlmsub.runtime.progress import Steps
    from mlmsub.runtime.session import Job, start
    from mlmsub.runtime.stages import quantize

    variables = stage.environment(stage.run_dir(), {"HF_MODEL_CKPT": source, **given})
    with mock.patch.dict(os.environ, variables, clear=True):
        job = Job("quantize", stage.model, [], Env(), Steps())
        with start(job, job.conf(), job.env.layout(), quantize._add_arguments, []) as opened:
            yield opened


def tensors(folder: Path) -> dict:
    """All tensors of a Hugging Face checkpoint folder."""
    from safetensors.torch import load_file

    found: dict = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def rewrite(folder: Path, change: Callable[[dict], dict]) -> None:
    """Give a Hugging Face checkpoint folder other tensors, in one file."""
    from safetensors.torch import save_file

    made = {name: tensor.contiguous().clone() for name, tensor in change(tensors(folder)).items()}
    for file in [*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")]:
        file.unlink()
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})


def in_bf16(folder: Path) -> Path:
    """The checkpoint as published ones are: bf16, but for the router's correction bias."""
    rewrite(
        folder,
        lambda found: {
            name: t if name.endswith("e_score_correction_bias") else t.bfloat16() for name, t in found.items()
        },
    )
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"float32"', '"bfloat16"'))
    return folder


def logits(model: object, ids: object) -> object:
    """Megatron logits [batch, seq, vocabulary] in fp32."""
    positions = torch.arange(ids.shape[1]).expand(ids.shape[0], -1)
    with torch.no_grad():
        return model(ids, positions, None, runtime_gather_output=True).float()
