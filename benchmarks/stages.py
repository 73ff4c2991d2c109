"""mlmsub's stages beside the reference's example scripts, in one run on one GPU.

    python benchmarks/stages.py --reference MEGATRON_LM --tokenizer FOLDER [--out FOLDER] [--only PART...]

Parts, in this order unless --only names some; each prints and saves its rows at its end:
    smollm2-chain        first save, quantize -> export: two processes of the reference, one of mlmsub
    smollm2-start        process start to the first data or weights read, the median of three
    smollm2-composed     mlmsub alone: quantize, export and generate as three processes, and as one
    llama-8b-4096        FP8 calibration on the shape of an 8B, 4096 tokens
    jit                  the FP8 kernel: compiled by a node's first process, found by its second
    smollm2-calibration  FP8 and NVFP4, 512 tokens
    llama-8b-512         FP8 on the shape of an 8B, 512 tokens

MEGATRON_LM is a tree of Megatron-LM at branch core_r0.19.0: its examples/post_training/modelopt, megatron/training,
megatron/post_training and the files beside megatron/ are used; megatron.core is the installed one. The scripts run
from a scratch copy with what they need to start: --no-gradient-accumulation-fusion, no `make` in a wheel without
Makefile, MLM_SKIP_INSTALL=1, a conf for SmolLM2, Transformer Engine. mlmsub runs in the same Python. All weights are
random. Python's bytecode is made before anything is measured, as it is in an image that pip has filled.

What is counted, alike on both sides: the whole call of modelopt's quantize with its warm-up, whole processes from their
start, the save as the stage does it. The GPU is idle at both ends of a step.

MFU = (2 x P x T + 2 x L x S x H x T) / seconds / 989e12: P the weights of the decoder's linear layers, T tokens, S the
length, L the layers, H heads x their width; attention's two products cost 4 x S x H for each token and layer, and half
of them are masked. 989e12 is the dense bf16 rate of an H100 or H200 (SXM). Logits are not computed, and not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import models

ROOT = Path(__file__).resolve().parents[1]
CONFS = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct", "llama-8b": "meta-llama/Llama-3.1-8B-Instruct"}
# samples of mlmsub and of the reference, whose rate does not depend on their number
MANY, FEW = {512: 1024, 4096: 64}, {512: 128, 4096: 24}
STARTING = "--no-gradient-accumulation-fusion"
PEAK = 989e12
STARTS = 3
WARM_UP = """
import contextlib, torch, modelopt.torch.quantization, modelopt.torch.export, modelopt.torch.speculative
import megatron.training.checkpointing, megatron.training.models.gpt, modelopt.torch.utils.plugins, modelopt.recipe
from transformers import AutoTokenizer, LlamaForCausalLM
with contextlib.suppress(ImportError):
    import transformer_engine.pytorch
"""


@dataclass
class Run:
    """One process: when it was started and ended, and its steps' begin, end and peak memory."""

    start: float
    end: float = 0.0
    steps: dict[str, tuple[float, float, float]] = field(default_factory=dict)

    def seconds(self, step: str) -> float:
        begin, end, _ = self.steps[step]
        return end - begin

    def until(self, step: str) -> float:
        """Seconds from the start of the process to the beginning of a step."""
        return self.steps[step][0] - self.start

    @property
    def whole(self) -> float:
        return self.end - self.start


@dataclass
class Bench:
    """Where everything lies: the scratch copy of the reference, models, texts, logs."""

    work: Path
    out: Path
    reference: Path
    tokenizer: Path
    rows: list[dict[str, Any]] = field(default_factory=list)

    def prepare(self) -> None:
        self.work.mkdir(parents=True)
        self.out.mkdir(parents=True, exist_ok=True)
        copy_reference(self.reference, self.work / "reference", "reference_hooks", ("quantize.py", "export.py"))
        own = [str(ROOT / "mlmsub"), str(self.work / "reference")]
        folders = [*filter(None, path().split(":")), sysconfig.get_path("purelib"), *own]
        compile_all = [sys.executable, "-m", "compileall", "-qq", "-j0", *folders]
        subprocess.call(compile_all, stdout=subprocess.DEVNULL)  # not 0 where a package holds another Python's file
        # nor is either side to be the one that reads a cold disk
        self._process("warm-up", [sys.executable, "-c", WARM_UP], {**os.environ, "PYTHONPATH": f"{ROOT}:{path()}"})

    def model(self, name: str) -> Path:
        """The folder of a checkpoint with random weights, made when it is first asked for."""
        folder = self.work / name
        if not folder.exists():
            models.write(name, folder, self.tokenizer)
            (self.scripts / "conf" / f"{name}.sh").write_text(shell_conf(name))
        return folder

    @property
    def scripts(self) -> Path:
        return self.work / "reference" / "examples" / "post_training" / "modelopt"

    def text(self, length: int) -> Path:
        """A file of texts, each of at least so many tokens."""
        file = self.work / f"{length}.jsonl"
        if not file.exists():
            models.write_text(file, MANY[length], length)
        return file

    def theirs(
        self, label: str, script: str, model: str, qformat: str = "", length: int = 512, **variables: object
    ) -> Run:
        """Run one of the reference's shell scripts."""
        log = self.out / f"reference-{label}.jsonl"
        log.unlink(missing_ok=True)
        flags = STARTING
        if script == "quantize.sh":
            flags += f" --calib-dataset-path-or-name {self.text(length)} --calib-max-sequence-length {length}"
            flags += f" --calib-size {FEW[length]}"
        environment = {
            **os.environ, "MLM_SKIP_INSTALL": "1", "MLM_WORK_DIR": str(self.work), "BENCH_LOG": str(log),
            "HF_MODEL_CKPT": str(self.model(model)), "PYTHONPATH": f"{self.work / 'reference'}:{path()}",
            "HF_HUB_OFFLINE": "1", "HF_TOKEN": "none", "TORCH_EXTENSIONS_DIR": str(self.work / "reference-ext"),
            **{name: str(value) for name, value in variables.items()},
        }  # fmt: skip
        environment["MLM_EXTRA_ARGS"] = f"{flags} {variables.get('MLM_EXTRA_ARGS', '')}"
        run = self._process(f"reference-{label}", ["bash", str(self.scripts / script), model, qformat], environment)
        for line in log.read_text().splitlines():
            note = json.loads(line)
            first = run.steps.get(note["step"], (note["begin"],))[0]  # generate has two calls
            run.steps[note["step"]] = (first, note["end"], note["peak"])
        return run

    def ours(self, label: str, stage: str, model: str, *words: str, **variables: object) -> Run:
        """Run one of mlmsub's stages, or several joined by +, as the entrypoint would."""
        run_dir = self.work / f"run-{label}"
        (run_dir / "conf").mkdir(parents=True)
        (run_dir / "conf" / "model.yaml").write_text(conf(model))
        environment = {
            **os.environ, "PYTHONPATH": f"{ROOT}:{path()}", "MLMSUB_RUN_DIR": str(run_dir), "HF_HUB_OFFLINE": "1",
            "HF_MODEL_CKPT": str(self.model(model)), "TORCH_EXTENSIONS_DIR": str(self.work / "ext"),
            **{name: str(value) for name, value in variables.items()},
        }  # fmt: skip
        command = [sys.executable, "-m", "mlmsub.runtime", stage, CONFS[model], *words]
        run = self._process(f"mlmsub-{label}", command, environment)
        for line in (run_dir / "state" / "events.jsonl").read_text().splitlines():
            event = json.loads(line)
            if event["event"] == "step":
                peak = event["peak_gib"].get("GPU", 0.0)
                run.steps[event["name"]] = (event["time"] - event["seconds"], event["time"], peak)
        return run

    def calibrate(
        self, label: str, model: str, qformat: str, length: int, size: int, stage: str = "quantize", more: str = ""
    ) -> Run:
        flags = f"--calib-data {self.text(length)} --calib-max-sequence-length {length} --calib-size {size} {more}"
        folders = {"MLM_MODEL_SAVE": self.work / f"mlmsub-{label}", "EXPORT_DIR": self.work / f"mlmsub-{label}-hf"}
        run = self.ours(label, stage, model, qformat, MLM_EXTRA_ARGS=flags, **folders)
        shutil.rmtree(folders["MLM_MODEL_SAVE"])
        return run

    def _process(self, label: str, command: list[str], environment: dict[str, str]) -> Run:
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        with (self.out / f"{label}.log").open("w") as log:
            run = Run(time.time())
            code = subprocess.call(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            run.end = time.time()
        print(f"[{label}] exit code {code} after {run.whole:.1f} s", flush=True)
        if code:
            print((self.out / f"{label}.log").read_text()[-3000:])
            raise RuntimeError(f"{label} failed")
        return run

    def row(self, what: str, unit: str, theirs: float, ours: float, wanted: str, more: str = "") -> None:
        """Note one comparison; the ratio says how many times better mlmsub is."""
        ratio = ours / theirs if unit == "samples/s" else theirs / ours
        self.rows.append(
            {"what": what, "unit": unit, "reference": theirs, "mlmsub": ours, "ratio": ratio, "wanted": wanted}
            | {"more": more}
        )
        print(f"  {what}: {theirs:.2f} against {ours:.2f} {unit}, {ratio:.1f}x (wanted {wanted}) {more}", flush=True)

    def table(self) -> str:
        lines = [
            "| what | unit | reference | mlmsub | ratio | wanted | |",
            "| --- | --- | ---: | ---: | ---: | ---: | --- |",
        ]
        for row in self.rows:
            numbers = f"{row['reference']:.2f} | {row['mlmsub']:.2f} | {row['ratio']:.1f}x"
            lines.append(f"| {row['what']} | {row['unit']} | {numbers} | {row['wanted']} | {row['more']} |")
        return "\n".join(lines)


def copy_reference(tree: Path, scratch: Path, hooks: str, hooked: tuple[str, ...]) -> None:
    """Copy Megatron-LM without megatron.core: the installed one goes with its other packages. The scripts ``hooked``
    of its modelopt examples call ``install`` of ``hooks``, a module beside this one, before all else."""
    shutil.copytree(tree, scratch, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", ".git"))
    shutil.rmtree(scratch / "megatron" / "core", ignore_errors=True)
    scripts = scratch / "examples" / "post_training" / "modelopt"
    shutil.copy(ROOT / "benchmarks" / f"{hooks}.py", scripts)
    main = 'if __name__ == "__main__":\n'
    for script in hooked:
        text = (scripts / script).read_text()
        assert text.count(main) == 1, f"{script} is not that of core_r0.19.0"
        # below the guard: the save's spawned child imports the script again
        install = f"{main}    import {hooks}\n\n    {hooks}.install(globals())\n"
        (scripts / script).write_text(text.replace(main, install))


def path() -> str:
    return os.environ.get("PYTHONPATH", "")


def conf(model: str) -> str:
    """mlmsub's conf of the model, without its vocabulary, which is the tokenizer's here."""
    text = (ROOT / "conf" / f"{CONFS[model]}.yaml").read_text()
    return "".join(line for line in text.splitlines(keepends=True) if "padded-vocab-size" not in line)


def shell_conf(model: str) -> str:
    """The same architecture as a conf of the reference's kind."""
    import yaml

    words = ["--micro-batch-size 1", "--tokenizer-type HuggingFaceTokenizer", "--make-vocab-size-divisible-by 1"]
    words += ["--use-mcore-models", "--no-masked-softmax-fusion", "--no-rope-fusion", "--save-interval 100000"]
    for name, value in yaml.safe_load(conf(model))["megatron_args"].items():
        if name != "make-vocab-size-divisible-by" and value is not False:
            words.append(f"--{name}" if value is True else f"--{name} {value}")
    return f'TOKENIZER_MODEL=${{HF_MODEL_CKPT}}\nMODEL_ARGS="{" ".join(words)}"\n'


def mfu(model: str, length: int, tokens_per_second: float) -> float:
    """Share of the GPU's dense bf16 rate; the formula is in the module's docstring."""
    shape = models.COMMON | models.SHAPES[model]
    heads, groups = (shape[f"num_{kind}_heads"] * shape["head_dim"] for kind in ("attention", "key_value"))
    hidden = shape["hidden_size"]
    layer = hidden * (2 * heads + 2 * groups + 3 * shape["intermediate_size"])
    token = shape["num_hidden_layers"] * (2 * layer + 2 * length * heads)
    return token * tokens_per_second / PEAK


def smollm2_chain(bench: Bench) -> None:
    """quantize, then export, on SmolLM2's shape, with the same samples on both sides."""
    ref = bench.theirs("fp8", "quantize.sh", "smollm2", "FP8_DEFAULT_CFG", MLM_MODEL_SAVE=bench.work / "ref-fp8")
    ref_export = bench.theirs(
        "export", "export.sh", "smollm2", MLM_MODEL_CKPT=bench.work / "ref-fp8", EXPORT_DIR=bench.work / "ref-hf"
    )
    own = bench.calibrate("chain", "smollm2", "FP8_DEFAULT_CFG", 512, FEW[512], "quantize+export")
    bench.row("SmolLM2: first checkpoint save", "s", ref.seconds("save"), own.seconds("save"), "20x")
    theirs, trial = ref.whole + ref_export.whole, ref.seconds("generate")
    samples = f"{FEW[512]} samples"
    bench.row("SmolLM2: quantize FP8, export", "s", theirs, own.whole, "5x", samples)
    jit = f"its JIT {ref.seconds('jit'):.1f} s" if "jit" in ref.steps else "its JIT was done"
    bench.row("the same without the reference's trial text", "s", theirs - trial, own.whole, "", f"{samples}; {jit}")


def smollm2_start(bench: Bench) -> None:
    """From the start of the process (the reference's: of its shell script) to its first work.

    That is the weights; mlmsub reads the calibration data before them, the reference after.
    """
    theirs, own, weights = [], [], []
    for turn in range(STARTS):
        run = bench.theirs(f"start-{turn}", "quantize.sh", "smollm2", "FP8_DEFAULT_CFG", BENCH_STOP="import")
        theirs.append(run.until("import"))
        run = bench.calibrate(f"start-{turn}", "smollm2", "FP8_DEFAULT_CFG", 512, 32, more="--no-perplexity")
        own.append(run.until("data"))
        weights.append(run.until("import"))
    for what, side in (("the data", own), ("the weights", weights)):
        spread = "; ".join(" ".join(f"{seconds:.1f}" for seconds in times) for times in (theirs, side))
        medians = statistics.median(theirs), statistics.median(side)
        bench.row(f"SmolLM2: process start to first useful work, {what}", "s", *medians, "2x", f"of {spread}")


def smollm2_composed(bench: Bench) -> None:
    """quantize, export and generate: one process each, and all in one, which saves no checkpoint for the others."""
    save, hf, flags = bench.work / "mlmsub-one", bench.work / "mlmsub-one-hf", "--calib-size 128"
    words = ["smollm2", "FP8_DEFAULT_CFG", "The capital of France is"]
    runs = [
        bench.ours("one-quantize", "quantize", *words[:2], MLM_EXTRA_ARGS=flags, MLM_MODEL_SAVE=save),
        bench.ours("one-export", "export", words[0], MLM_MODEL_CKPT=save, EXPORT_DIR=hf),
        bench.ours("one-generate", "generate", words[0], words[2], MLM_MODEL_CKPT=save, MLM_WORK_DIR=bench.work),
    ]
    folders = {"EXPORT_DIR": bench.work / "mlmsub-all-hf", "MLM_WORK_DIR": bench.work / "all"}
    whole = bench.ours("one-all", "quantize+export+generate", *words, MLM_EXTRA_ARGS=flags, **folders)
    apart = " + ".join(f"{run.whole:.1f}" for run in runs)
    bench.row(
        "SmolLM2: quantize, export, generate, of mlmsub", "s", sum(run.whole for run in runs), whole.whole, "2x", apart
    )


def smollm2_calibration(bench: Bench) -> None:
    """Calibration at 512 tokens on SmolLM2's shape."""
    for name, wanted in (("FP8", "15x"), ("NVFP4", "10x")):
        calibration(bench, "smollm2", f"SmolLM2: {name}", name, 512, wanted)


def calibration(bench: Bench, model: str, title: str, name: str, length: int, wanted: str) -> None:
    """Samples per second of both sides."""
    label, qformat = f"{model}-{name.lower()}-{length}", f"{name}_DEFAULT_CFG"
    ref = bench.theirs(
        label, "quantize.sh", model, qformat, length, BENCH_NO_SAVE=1, MLM_EXTRA_ARGS="--skip-generate"
    )  # fmt: skip
    own = bench.calibrate(label, model, qformat, length, MANY[length])
    rates = FEW[length] / ref.seconds("calibrate"), MANY[length] / own.seconds("calibrate")
    shares = [100 * mfu(model, length, rate * length) for rate in rates]
    peaks = f"peak {ref.steps['calibrate'][2]:.1f} and {own.steps['calibrate'][2]:.1f} GiB"
    told = f"MFU {shares[0]:.1f} and {shares[1]:.1f} %; {peaks}"
    bench.row(f"{title} calibration, {length} tokens", "samples/s", *rates, wanted, told)
    print(f"  import {own.seconds('import'):.1f} s, save {own.seconds('save'):.1f} s; reference's import "
          f"{ref.seconds('import'):.1f} s", flush=True)  # fmt: skip


def llama_8b_512(bench: Bench) -> None:
    calibration(bench, "llama-8b", "8B: FP8", "FP8", 512, "3x")


def llama_8b_4096(bench: Bench) -> None:
    calibration(bench, "llama-8b", "8B: FP8", "FP8", 4096, "1.3x")


JIT = """
import time, torch, modelopt.torch.quantization as mtq
from mlmsub.runtime import distributed
from mlmsub.runtime.quantization import extensions
from mlmsub.runtime.env import Env
distributed.gather = lambda value: [value]
x = torch.randn(8, 64, device="cuda")
linear = torch.nn.Linear(64, 64, device="cuda")
model = mtq.quantize(linear, mtq.FP8_DEFAULT_CFG, lambda module: module(x))
start = time.time()
extensions.prepare(Env(), model)
model(x)
torch.cuda.synchronize()
print("SECONDS", time.time() - start)
"""


def jit(bench: Bench) -> None:
    """The FP8 kernel: compiled by the first process of a node, found by the second."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{path()}", "MLMSUB_EXTENSIONS_DIR": str(bench.work / "jit")}
    took = []
    for label in ("jit-first", "jit-second"):
        bench._process(label, [sys.executable, "-c", JIT], environment)
        said = (bench.out / f"{label}.log").read_text()
        took.append(float(said.rpartition("SECONDS")[2].split()[0]))
    bench.row("first FP8 forward: compiling, and a second process", "s", *took, "no JIT")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder with SmolLM2's tokenizer.json")
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/mlmsub-bench"), help="scratch, 50 GB")
    parser.add_argument("--out", type=Path, default=Path("stages-bench"), help="logs, results.json, table.md")
    parts = {
        "smollm2-chain": smollm2_chain, "smollm2-start": smollm2_start, "smollm2-composed": smollm2_composed,
        "llama-8b-4096": llama_8b_4096, "jit": jit, "smollm2-calibration": smollm2_calibration,
        "llama-8b-512": llama_8b_512,
    }  # fmt: skip
    parser.add_argument("--only", choices=parts, nargs="+", default=list(parts), metavar="PART")
    given = parser.parse_args()
    bench = Bench(given.work, given.out, given.reference, given.tokenizer)
    start = time.time()
    failed = []
    try:
        bench.prepare()
        for name in given.only:
            try:
                parts[name](bench)
            except (RuntimeError, KeyError, OSError) as error:  # the other parts are worth having
                failed.append(f"{name}: {type(error).__name__}: {error}")
            (given.out / "results.json").write_text(json.dumps(bench.rows, indent=1))
            (given.out / "table.md").write_text(bench.table() + "\n")
    finally:
        shutil.rmtree(given.work, ignore_errors=True)
    print(bench.table(), f"\n{time.time() - start:.0f} s", *failed, sep="\n")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
