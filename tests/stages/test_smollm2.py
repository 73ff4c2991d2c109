"""A real model: SmolLM2-135M-Instruct through quantize and export, as a person would run them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import smollm2
import torch
from rig import ROOT, tensors

pytest.importorskip("gguf")

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
CONF = ROOT / "conf" / f"{NAME}.yaml"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("smollm2")


@pytest.fixture(scope="module")
def source() -> Path:
    return smollm2.checkpoint()


def run(work: Path, source: Path, *words: str, **variables: object) -> str:
    """One stage in a process of its own; returns its log."""
    run_dir = work / f"run-{words[0]}"
    (run_dir / "conf").mkdir(parents=True)
    shutil.copy(CONF, run_dir / "conf" / "model.yaml")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MLMSUB_RUN_DIR": str(run_dir)}
    environment |= {"MLM_WORK_DIR": str(work), "HF_MODEL_CKPT": str(source)}
    environment |= {key: str(value) for key, value in variables.items()}
    command = [sys.executable, "-m", "mlmsub.runtime", words[0], NAME, *words[1:]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_fp8_keeps_the_model(work: Path, source: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    log = run(work, source, "quantize", "FP8_DEFAULT_CFG")
    assert "240 quantizers calibrated" in log
    log = run(work, source, "export", MLM_MODEL_CKPT=work / f"{NAME}_quant")
    assert "FP8: 692 tensors" in log and "210 F8_E4M3" in log

    made = tensors(work / f"{NAME}_export")
    restored = {name: _plain(name, tensor, made) for name, tensor in made.items() if not name.endswith("_scale")}
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    quantized = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    quantized.load_state_dict({**restored, "lm_head.weight": restored["model.embed_tokens.weight"]})

    tokenizer = AutoTokenizer.from_pretrained(work / f"{NAME}_export")
    text = (ROOT / "mlmsub" / "runtime" / "quantization" / "calibration.txt").read_text()[:1500]
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        want, got = reference(ids, labels=ids), quantized(ids, labels=ids)
    ratio = float(torch.exp(got.loss - want.loss))
    assert 0.95 < ratio < 1.05, f"perplexity {torch.exp(want.loss):.2f} -> {torch.exp(got.loss):.2f}"
    assert torch.nn.functional.cosine_similarity(got.logits.flatten(), want.logits.flatten(), dim=0) > 0.99

    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = quantized.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])


def _plain(name: str, tensor: torch.Tensor, made: dict) -> torch.Tensor:
    scale = made.get(name.replace(".weight", ".weight_scale"))
    return tensor.float() if scale is None else tensor.float() * scale.float()


def test_logits_of_the_imported_model(work: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the conf's ``checked`` says: Megatron's logits against transformers'."""
    from rig import logits
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from mlmsub.runtime.checkpoints import hf_import
    from mlmsub.runtime.env import Env
    from mlmsub.runtime.models import model
    from mlmsub.runtime.progress import Steps
    from mlmsub.runtime.session import Job, start

    (work / "run-logits" / "conf").mkdir(parents=True)
    shutil.copy(CONF, work / "run-logits" / "conf" / "model.yaml")
    env = Env({"MLMSUB_RUN_DIR": str(work / "run-logits"), "HF_MODEL_CKPT": str(source)})
    job = Job("quantize", NAME, [], env, Steps())
    text = "The capital of France is Paris, and the capital of Japan is Tokyo. Water boils at 100 degrees."
    ids = AutoTokenizer.from_pretrained(source)(text, return_tensors="pt").input_ids
    with start(job, job.conf(), env.layout(), lambda parser: None, []) as opened:
        ours = model.build(opened.args, opened.conf, "cpu")
        hf_import.import_weights(ours, source, opened.conf, torch.bfloat16)
        got = logits(ours, ids)
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, attn_implementation="eager").eval()
    with torch.no_grad():
        want = reference(ids).logits.float()
    assert torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), dim=0) > 0.999
    assert torch.equal(got.argmax(-1), want.argmax(-1))
