"""mlmsub's training beside the reference's example scripts, in one run on one GPU.

    python benchmarks/training.py --reference MEGATRON_LM --tokenizer FOLDER [--out FOLDER] [--only ROW...]
    python benchmarks/training.py ... --only tiny-eagle3 tiny-finetune    # minutes on a CPU: do both sides still start?

Rows, in this order unless --only names some; each prints and saves its numbers at its end:
    eagle3-smollm2     an EAGLE3 draft beside its base, SmolLM2's shape
    finetune-smollm2   all weights, SmolLM2's shape
    finetune-8b-half   all weights of 16 layers of an 8B; mlmsub alone: the share of the GPU's rate (MFU)
    eagle3-8b          an EAGLE3 draft beside its base, the shape of an 8B

MEGATRON_LM is a tree of Megatron-LM at branch core_r0.19.0; megatron.core is the installed one. eagle3.sh and
finetune.sh run from a scratch copy with what they need to start: --no-gradient-accumulation-fusion (they give it to
finetune.py, not to convert_model.py), a conf of the shape, MLM_SKIP_INSTALL=1, LAUNCH_SCRIPT=python, Transformer Engine
on the path, and training_hooks.py. finetune.sh finds no checkpoint and starts from Megatron's random weights. mlmsub
runs in the same Python. All weights are random, the vocabulary is SmolLM2's in every shape.

Both sides train on the same conversations, on every token of them, with the same rows in an iteration; the reference
refuses micro batches above 1 and adds up gradients instead. The draft is the one that the reference makes: 32 heads of
128 in 8 groups, an MLP of 14336, the whole vocabulary; mlmsub gets it by --eagle-config. Both print Megatron's line at
every other iteration. The first two lines are left out, the next four counted, then the process is ended. A side that
has not got that far when its time is up is judged by the lines that it has, if they are at least 2.

tokens/s = rows x S x fill / mean seconds of an iteration: S the tokens of a row, fill the share of mlmsub's rows that
is not padding (it packs whole documents; the reference cuts them, and its rows are full).

MFU = tokens/s x (6 x P + 6 x L x H x D) / rate: P the weights of the decoder's linear layers and the output layer, each
used in a forward and two backward products; L the layers, H heads x their width, D the sum of the documents' squared
lengths over the sum of their lengths. A token of a document of d tokens attends to d / 2 on average: the forward pass
of attention's two products costs 4 x H x d / 2, the backward pass twice that. Padding, the embedding, norms and the
optimizer count nothing. The rate is 989e12, dense bf16 of an H100 or H200 (SXM), and beside it 790e12, what a large
matrix product was seen to reach on an H200.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import models
from stages import PEAK, ROOT, copy_reference, path

sys.path.insert(0, str(ROOT))

from mlmsub.core import hf_config, modelconf

MATMUL = 790e12
LINE = re.compile(r"iteration +(\d+)/ *\d+ \|.*?elapsed time per iteration \(ms\): ([\d.]+) \|.*?lm loss: ([\d.E+-]+)")
FEWEST = 2  # counted lines that make a number
EVERY = 2  # iterations of a line
DRAFT = {"intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
# finetune.sh's and eagle3.sh's own, on both sides
OPTIMIZER = (
    "--lr 5.0e-5 --min-lr 1.0e-7 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.0 --adam-beta1 0.9"
    " --adam-beta2 0.95 --init-method-std 0.010"
)
INTERVALS = f"--eval-iters 1 --eval-interval 1000000 --save-interval 1000000 --log-interval {EVERY}"
ON_CPU = (
    "--distributed-backend gloo --use-cpu-initialization --export-force-local-attention --transformer-impl local"
    " --no-persist-layer-norm"
)


@dataclass(frozen=True)
class Row:
    """What is trained. ``batch``: rows of an iteration; ``micro``: mlmsub's micro batch; ``seconds``: for all of it."""

    what: str
    stage: str
    shape: str
    length: int
    batch: int
    micro: int
    wanted: str
    seconds: float
    reference: bool = True
    warm: int = 4
    counted: int = 8

    @property
    def last(self) -> int:
        return self.warm + self.counted


ROWS = {
    "eagle3-smollm2": Row("SmolLM2: EAGLE3 online", "eagle3", "smollm2", 1024, 16, 16, "8x", 210),
    "finetune-smollm2": Row("SmolLM2: finetune", "finetune", "smollm2", 1024, 16, 16, "5x", 150),
    "finetune-8b-half": Row(
        "8B, 16 of 32 layers: finetune", "finetune", "llama-8b-half", 4096, 8, 2, "MFU 40 %", 180, False
    ),
    "eagle3-8b": Row("8B: EAGLE3 online", "eagle3", "llama-8b", 4096, 4, 2, "1.5x", 420),
    "tiny-eagle3": Row("tiny: EAGLE3 online", "eagle3", "tiny", 128, 2, 2, "", 900),
    "tiny-finetune": Row("tiny: finetune", "finetune", "tiny", 128, 2, 2, "", 600),
}


@dataclass(frozen=True)
class Speed:
    """The counted lines of one process: milliseconds of an iteration; the losses of its first and last line."""

    ms: list[float]
    losses: tuple[float, float]

    def tokens(self, row: Row, fill: float = 1.0) -> float:
        """Tokens per second."""
        return row.batch * row.length * fill * 1000 * len(self.ms) / sum(self.ms)

    def told(self) -> str:
        return f"iterations of {min(self.ms):.1f} to {max(self.ms):.1f} ms in {len(self.ms)} lines"


@dataclass
class Bench:
    """Where everything lies, and the rows that are done."""

    work: Path
    out: Path
    reference: Path
    tokenizer: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    gpu: bool = True

    def prepare(self) -> None:
        self.work.mkdir(parents=True)
        self.out.mkdir(parents=True, exist_ok=True)
        scratch = self.work / "reference"
        copy_reference(self.reference, scratch, "training_hooks", ("convert_model.py", "finetune.py"))
        look = "import torch; print(torch.cuda.is_available())"  # in another process: this one takes no GPU memory
        self.gpu = "True" in subprocess.check_output([sys.executable, "-c", look], text=True)
        folders = [*filter(None, path().split(":")), str(ROOT / "mlmsub"), str(scratch)]
        subprocess.call([sys.executable, "-m", "compileall", "-qq", "-j0", *folders], stdout=subprocess.DEVNULL)

    @property
    def scripts(self) -> Path:
        return self.work / "reference" / "examples" / "post_training" / "modelopt"

    def run(self, name: str, row: Row) -> None:
        """One row: both sides, one after the other, within its seconds."""
        end = time.monotonic() + row.seconds
        folder = self.work / name
        try:
            conf = self._inputs(folder, row)
            theirs, failure = None, None
            if row.reference:
                try:
                    theirs = self._theirs(name, folder, row, conf, time.monotonic() + 0.65 * row.seconds)
                except RuntimeError as error:  # mlmsub's number is worth having
                    failure = error
            ours, events = self._ours(name, folder, row, conf, end)
            self._add(name, row, theirs, ours, next(event for event in events if event["event"] == "data"))
            if failure:
                raise failure
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _inputs(self, folder: Path, row: Row) -> modelconf.ModelConf:
        """The random checkpoint, the conversations and the draft's architecture; the model conf."""
        (folder / "data").mkdir(parents=True)
        write_conversations(folder / "data" / "train.jsonl", row)
        (folder / "draft.json").write_text(json.dumps(DRAFT))
        # as a process: it leaves no memory of the GPU taken
        command = [sys.executable, str(ROOT / "benchmarks" / "models.py"), row.shape, str(folder / "model")]
        subprocess.check_call([*command, "--tokenizer", str(self.tokenizer)], stdout=subprocess.DEVNULL)
        return hf_config.convert(json.loads((folder / "model" / "config.json").read_text()), f"bench/{row.shape}")

    def _theirs(self, name: str, folder: Path, row: Row, conf: modelconf.ModelConf, end: float) -> Speed:
        """The reference's eagle3.sh or finetune.sh, with its own MLM_TRAIN_ARGS: a micro batch of one row."""
        arguments = shell_conf(conf) + ("" if self.gpu else f" {ON_CPU}")
        text = f'TOKENIZER_MODEL=${{HF_MODEL_CKPT}}\nMODEL_ARGS="{arguments}"\n'
        (self.scripts / "conf" / f"{row.shape}.sh").write_text(text)
        made = folder / "reference"
        environment = {
            "MLM_SKIP_INSTALL": "1", "MLM_WORK_DIR": str(folder / "reference-work"), "MLM_MODEL_SAVE": str(made),
            "MLM_MODEL_CKPT": str(folder / "none"), "MLM_DATA_ARGS": data_arguments(folder, row),
            "MLM_EVAL_ARGS": INTERVALS, "LAUNCH_SCRIPT": sys.executable,
            "MLM_EXTRA_ARGS": f"--seq-length {row.length} --global-batch-size {row.batch}",
            "PYTHONPATH": f"{self.work / 'reference'}:{ROOT}:{path()}", "RANK": "0", "LOCAL_RANK": "0",
            "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "HF_TOKEN": "none",
            "HF_MODEL_CKPT": str(folder / "model"),
        }  # fmt: skip
        command = ["bash", str(self.scripts / f"{row.stage}.sh"), row.shape]
        speed = self._watched(f"{name}-reference", command, environment, row, end)
        shutil.rmtree(made, ignore_errors=True)
        return speed

    def _ours(
        self, name: str, folder: Path, row: Row, conf: modelconf.ModelConf, end: float
    ) -> tuple[Speed, list[dict[str, Any]]]:
        """mlmsub's stage, and its events."""
        run_dir = folder / "run"
        (run_dir / "conf").mkdir(parents=True)
        (run_dir / "conf" / "model.yaml").write_text(modelconf.render(conf))
        extra = f"--seq-length {row.length} --loss-on all"
        if row.stage == "eagle3":
            extra += f" --no-eval --eagle-config {folder / 'draft.json'}"
        distributed = " --use-distributed-optimizer" if row.stage == "finetune" else ""
        environment = {
            "MLMSUB_RUN_DIR": str(run_dir), "MLM_WORK_DIR": str(folder / "work"), "MLM_MODEL_SAVE": str(folder / "out"),
            "MLM_DATA_ARGS": data_arguments(folder, row), "MLM_OPTIM_ARGS": OPTIMIZER + distributed,
            "MLM_TRAIN_ARGS": f"--micro-batch-size {row.micro} --global-batch-size {row.batch} --attention-dropout 0.0"
            " --hidden-dropout 0.0",
            "MLM_EVAL_ARGS": INTERVALS, "MLM_EXTRA_ARGS": extra, "HF_MODEL_CKPT": str(folder / "model"),
            "PYTHONPATH": f"{ROOT}:{path()}",
        }  # fmt: skip
        command = [sys.executable, "-m", "mlmsub.runtime", row.stage, conf.model]
        speed = self._watched(f"{name}-mlmsub", command, environment, row, end)
        return speed, [json.loads(line) for line in (run_dir / "state" / "events.jsonl").read_text().splitlines()]

    def _watched(self, label: str, command: list[str], environment: dict[str, str], row: Row, end: float) -> Speed:
        """Run it until its last counted line, or until ``end`` if it has lines enough by then."""
        file = self.out / f"{label}.log"
        ours = ("MLM_", "MLMSUB_", "PYTHONDONTWRITEBYTECODE")
        whole = {name: value for name, value in os.environ.items() if not name.startswith(ours)} | environment
        whole |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        start = time.monotonic()
        with file.open("w") as log:
            process = subprocess.Popen(
                command, env=whole, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
            try:
                while process.poll() is None and time.monotonic() < end and seen(file) < row.last:
                    time.sleep(0.2)
            finally:
                code = process.poll()
                stop(process)
        lines = [(int(at), float(ms), float(loss)) for at, ms, loss in LINE.findall(file.read_text(errors="replace"))]
        counted = [ms for at, ms, _ in lines if row.warm < at <= row.last]
        print(f"[{label}] {len(lines)} lines, {time.monotonic() - start:.1f} s", flush=True)
        if len(counted) < FEWEST:
            print(file.read_text(errors="replace")[-4000:])
            how = "its time is up" if code is None else f"it ended with exit code {code}"
            raise RuntimeError(f"{label}: {how} after {len(lines)} lines")
        return Speed(counted, (lines[0][2], lines[-1][2]))

    def _add(self, name: str, row: Row, theirs: Speed | None, ours: Speed, data: dict[str, Any]) -> None:
        rate = ours.tokens(row, data["fill"])
        found: dict[str, Any] = {
            "row": name, "what": row.what, "unit": "tokens/s", "wanted": row.wanted, "mlmsub": rate,
            "micro_batch": row.micro, "batch": row.batch, "length": row.length, "fill": data["fill"],
            "mlmsub_ms": ours.ms, "mlmsub_losses": ours.losses,
        }  # fmt: skip
        more = f"{row.batch} x {row.length}, micro batch 1 and {row.micro}; {data['fill']:.1%} full"
        if theirs is not None:
            their_rate = theirs.tokens(row)
            found |= {"reference": their_rate, "ratio": rate / their_rate, "reference_ms": theirs.ms}
            found |= {"reference_losses": theirs.losses}
            print(f"  reference: {theirs.told()}, loss {theirs.losses[0]:.4g} to {theirs.losses[1]:.4g}", flush=True)
        print(f"  mlmsub: {ours.told()}, loss {ours.losses[0]:.4g} to {ours.losses[1]:.4g}", flush=True)
        if row.stage == "finetune":
            done = rate * flops(row.shape, document_length(Path(data["folder"])))
            te = importlib.util.find_spec("transformer_engine") is not None
            found |= {"tflops": done / 1e12, "mfu": done / PEAK, "mfu_of_matmul": done / MATMUL, "te": te}
            more += f"; MFU {done / PEAK:.1%} of {PEAK / 1e12:.0f} TFLOP/s, {done / MATMUL:.1%} of {MATMUL / 1e12:.0f}"
            more += "" if te else "; without Transformer Engine"
        found["more"] = more
        self.rows.append(found)
        print("  " + line(found), flush=True)

    def save(self) -> None:
        (self.out / "training.json").write_text(json.dumps(self.rows, indent=1) + "\n")
        head = [
            "| what | reference tokens/s | mlmsub | ratio | wanted | |",
            "| --- | ---: | ---: | ---: | ---: | --- |",
        ]
        (self.out / "training.table.md").write_text("\n".join([*head, *map(line, self.rows)]) + "\n")


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    theirs, ratio = (f"{row['reference']:.0f}", f"{row['ratio']:.1f}x") if "ratio" in row else ("", "")
    return f"| {row['what']} | {theirs} | {row['mlmsub']:.0f} | {ratio} | {row['wanted']} | {row['more']} |"


def seen(log: Path) -> int:
    """The last iteration that a log tells of."""
    found = LINE.findall(log.read_text(errors="replace"))
    return int(found[-1][0]) if found else 0


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the process and all that it started, and wait until they are gone: the next one wants the GPU alone."""
    for which in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, which)
            for _ in range(40):
                process.poll()  # else its entry stays, and the group with it
                os.killpg(process.pid, 0)
                time.sleep(0.25)
        except ProcessLookupError:
            return


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def data_arguments(folder: Path, row: Row) -> str:
    samples = 1000 * row.batch
    return (
        f"--train-samples {samples} --lr-decay-samples {samples} --lr-warmup-samples 0 --split 100,0,0"
        f" --finetune-hf-dataset {folder / 'data'}"
    )


def write_conversations(file: Path, row: Row) -> None:
    """Conversations of random words, enough for all iterations: each a sixty-fourth to a sixth of a row of words."""
    known = (ROOT / "mlmsub" / "runtime" / "quantization" / "calibration.txt").read_text().split()
    draw = random.Random(7)
    words = 0
    with file.open("w") as lines:
        while words < (row.last + 5) * row.batch * row.length:
            count = draw.randrange(row.length // 64, row.length // 6)
            text = draw.choices(known, k=count)
            asked = 1 + count // 4
            turns = [{"role": "user", "content": " ".join(text[:asked])}]
            turns.append({"role": "assistant", "content": " ".join(text[asked:] or text)})
            lines.write(json.dumps({"messages": turns}) + "\n")
            words += count


def shell_conf(conf: modelconf.ModelConf) -> str:
    """A model conf as MODEL_ARGS of the reference's kind; the vocabulary is the tokenizer's."""
    words = ["--micro-batch-size 1", "--tokenizer-type HuggingFaceTokenizer", "--use-mcore-models"]
    words += ["--no-masked-softmax-fusion", "--no-rope-fusion", "--save-interval 100000"]
    words += ["--no-gradient-accumulation-fusion"]
    for name, value in conf.megatron_args.items():
        if name != "padded-vocab-size":
            words.append(f"--{name}" if value == "true" else f"--{name} {value}")
    return " ".join(words)


def flops(shape: str, document: float) -> float:
    """Floating-point operations of training on one token; the formula is in the module's docstring."""
    sizes: dict[str, Any] = {**models.COMMON, **models.SHAPES[shape]}
    heads, groups = (sizes[f"num_{kind}_heads"] * sizes["head_dim"] for kind in ("attention", "key_value"))
    hidden, layers = sizes["hidden_size"], sizes["num_hidden_layers"]
    weights = layers * hidden * (2 * heads + 2 * groups + 3 * sizes["intermediate_size"]) + hidden * models.VOCABULARY
    return float(6 * weights + 6 * layers * heads * document)


def document_length(folder: Path) -> float:
    """Of mlmsub's prepared data: the sum of the documents' squared lengths over the sum of their lengths."""
    import numpy as np

    lengths = np.diff(np.load(folder / "offsets.npy")).astype(float)
    return float((lengths**2).sum() / lengths.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder with SmolLM2's tokenizer.json")
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/mlmsub-training"), help="scratch, 50 GB")
    parser.add_argument("--out", type=Path, default=Path("training-bench"), help="logs, training.json, the table")
    parser.add_argument("--only", choices=ROWS, nargs="+", default=[*ROWS][:4], metavar="ROW")
    parser.add_argument("--micro", type=int, help="mlmsub's micro batch, where another than the row's is to be tried")
    parser.add_argument("--length", type=int, help="tokens of a row, likewise")
    given = parser.parse_args()
    bench = Bench(given.work, given.out, given.reference, given.tokenizer)
    changes = {name: value for name in ("micro", "length") if (value := getattr(given, name))}
    start, failed = time.monotonic(), []
    try:
        bench.prepare()
        for name in given.only:
            try:
                bench.run(name, replace(ROWS[name], **changes))
            except (RuntimeError, KeyError, OSError, subprocess.CalledProcessError) as error:  # the others are worth it
                failed.append(f"{name}: {type(error).__name__}: {error}")
            bench.save()
    finally:
        shutil.rmtree(given.work, ignore_errors=True)
    print((given.out / "training.table.md").read_text(), f"{time.monotonic() - start:.0f} s", *failed, sep="\n")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
