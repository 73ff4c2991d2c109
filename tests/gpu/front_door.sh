#!/bin/bash
# Through the front door: runs of `mlmsub submit` that wait for one another, by a real Slurm of one node, in containers of
# the Pyxis stand-in, on random models: one of SmolLM2's shape, and a small twin of Kimi-K2.
#
#   tests/gpu/front_door.sh FOLDER [PART...]     FOLDER is made anew; run as root
#
# Parts, all unless some are named; a job that waits for its second attempt leaves the node to the others:
#   drafts   eagle3 with a time limit that comes in the middle: it saves, is requeued, goes on, and measures the acceptance
#            length; export of the draft; both for the twin too, without an interruption. 5 minutes
#   stages   convert, quantize, export, then quantize+export+generate as one job
#   tools    generate, mmlu on questions of our own, prune, convert+validate, extract
#
# The image is this machine's own root, so the job has this machine's Python, torch and driver. Settings, by environment:
#   SLURM_LAB        the script that starts the cluster: `LAB start 1`, `LAB stop`, `LAB env`
#   SLURM_LAB_DIR    its files, not below /tmp: Slurm starts its TaskProlog inside the container, which has its own /tmp
#   PYXIS            the compiled tests/cluster/pyxis_standin.c
#   TOKENIZER        a folder with SmolLM2's tokenizer
#   PYTHON=python3   has torch; PYTHONPATH names the rest, and is the job's too
#   MLMSUB_EXTENSIONS_DIR   compiled kernels, if there are any
#   FLAGS            more arguments of quantize, as one MLM_EXTRA_ARGS
#   SHAPE=smollm2    of the first model, as benchmarks/models.py names it: tiny for a machine without a GPU
#   ITERATIONS=450 ROWS=8   of the draft, and rows of each: so many that the signal comes before the last
#   TIME=3 BEFORE=60         the time limit in minutes, and the seconds before it at which Slurm signals, or a minute earlier
set -euo pipefail
folder=$(realpath -m "${1:?which folder?}")
python=$(command -v "${PYTHON:-python3}")
root=$(realpath "${BASH_SOURCE[0]%/*}/../..")
model=HuggingFaceTB/SmolLM2-135M-Instruct
(($# > 1)) && parts=("${@:2}") || parts=(drafts stages tools)
libraries=${PYTHONPATH-}
kernels=${MLMSUB_EXTENSIONS_DIR-}
export PYTHONPATH=$root${libraries:+:$libraries}
export SLURM_LAB_DIR=${SLURM_LAB_DIR:-/opt/mlmsub-front-door} SLURM_LAB_ACCOUNTING=0 SLURM_LAB_SSH_PORT=0
export XDG_CONFIG_HOME=$folder/config XDG_STATE_HOME=$folder/state
unset USER_FSW SANDBOX_DIR SANDBOX_ENV_SETUP CONTAINER_IMAGE LAUNCH_SCRIPT HF_MODEL_CKPT

run() { printf '$ mlmsub %s\n' "$*" && "$python" -m mlmsub.cli.main "$@"; }
ids=()
submit() { # submit STAGE ARG...: sets $id
    printf '$ mlmsub submit %s\n' "$*"
    "$python" -m mlmsub.cli.main submit "$@" --profile gpu --json >"$folder/submitted.json" || { cat "$folder/submitted.json"; return 1; }
    id=$("$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["run_id"])' "$folder/submitted.json")
    ids+=("$id")
}
finish() {
    "$SLURM_LAB" stop || true
    umount "$folder/image" || true
}

rm -rf "$folder" "$SLURM_LAB_DIR"
mkdir -p "$folder"/{scratch,image,config/mlmsub/profiles} "$SLURM_LAB_DIR"
trap finish EXIT
mount --bind / "$folder/image"
"$SLURM_LAB" start 1 </dev/null
eval "$("$SLURM_LAB" env)"
# the stand-in is looked for anew at each step
mkdir -p "$SLURM_LAB_DIR/lib" "$SLURM_LAB_DIR/local"
cp "$PYXIS" "$SLURM_LAB_DIR/lib/spank_pyxis.so"
echo "required $SLURM_LAB_DIR/lib/spank_pyxis.so local=$SLURM_LAB_DIR/local" >"$SLURM_LAB_DIR/etc/plugstack.conf.d/pyxis.conf"
sinfo --format='%n %G %T'

"$python" "$root/benchmarks/models.py" "${SHAPE:=smollm2}" "$folder/model" --tokenizer "$TOKENIZER"
[[ $SHAPE == smollm2 ]] || { model=$folder/model.yaml && run conf from-hf "$folder/model" -o "$model" --name test/"$SHAPE"; }
"$python" - "$root/tests" "$folder" <<'PY'
import random, json, sys
from pathlib import Path
tests, folder = Path(sys.argv[1]), Path(sys.argv[2])
sys.path[:0] = [str(tests / "stages"), str(tests / "gpu")]
import gpurig, test_mmlu
gpurig.make_model(folder / "twin", *gpurig.FAMILIES["kimi-k2"])
words = (tests.parent / "mlmsub" / "runtime" / "quantization" / "calibration.txt").read_text().split()
draw = random.Random(3)
(folder / "twin" / "draft.json").write_text('{"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}')
(folder / "data").mkdir()
with (folder / "data" / "train.jsonl").open("w") as lines:
    for _ in range(4000):
        lines.write(json.dumps({"text": " ".join(draw.choices(words, k=draw.randrange(10, 80)))}) + "\n")
(folder / "ask").mkdir()
(folder / "ask" / "prompts.txt").write_text("".join(" ".join(draw.choices(words, k=20)) + "\n" for _ in range(40)))
test_mmlu.write_csv(folder / "ask" / "mmlu")
PY
run conf from-hf "$folder/twin" -o "$folder/twin.yaml" --name test/twin
{
    cat <<YAML
image: $folder/image
scratch: $folder/scratch
gpus_per_node: 1
time: 10
launch_script: $python
env:
  HF_MODEL_CKPT: $folder/model
  PYTHONPATH: "$libraries"
  PATH: "$PATH"
${kernels:+  MLMSUB_EXTENSIONS_DIR: $kernels}
mounts:
  - $folder/model:$folder/model:ro
  - $folder/twin:$folder/twin:ro
  - $folder/data:$folder/data:ro
  - $folder/ask:$folder/ask:ro
YAML
    # what lies under the container's own /tmp, or on another file system than the root's
    { tr : '\n' <<<"$libraries" && echo "$kernels" && "$python" -c 'import sys; print(sys.prefix)'; } | sed -n 's/..*/  - &:&:ro/p'
    findmnt -rno TARGET | grep -Ev "^/(proc|sys|dev|run|tmp|etc)(/|\$)|^/\$|^$folder" | sed 's/.*/  - &:&/' || true
} >"$XDG_CONFIG_HOME/mlmsub/profiles/gpu.yaml"

part_stages() {
    submit convert "$model"
    submit quantize "$model" FP8_DEFAULT_CFG --set "MLM_EXTRA_ARGS=${FLAGS:-}" --after "$id"
    submit export "$model" --after "$id"
    submit quantize+export+generate "$model" FP8_DEFAULT_CFG \
        --set "MLM_EXTRA_ARGS=${FLAGS:-} --max-new-tokens 16" --set MLM_WORK_DIR=/workspace/scratch/composed --after "$id"
    ((expected += 4))
}
part_tools() {
    local to=/workspace/scratch/tools layers=24
    [[ $SHAPE == smollm2 ]] || layers=3
    submit generate "$model" --set "PROMPTS_PATH=$folder/ask/prompts.txt" --set MLM_EXTRA_ARGS="--osl 16"
    submit mmlu "$model" --set "MMLU_DATA=$folder/ask/mmlu" --set MLM_EXTRA_ARGS="--few-shots 2"
    submit prune "$model" --set "TARGET_NUM_LAYERS=$layers" --set "MLM_MODEL_SAVE=$to/pruned" \
        --set "MLM_EXTRA_ARGS=--calib-size 16 --calib-max-sequence-length 128"
    submit convert+validate "$model" --set "MLM_MODEL_SAVE=$to/drafted" --set "PROMPTS_PATH=$folder/ask/prompts.txt" \
        --set MLM_WORK_DIR=$to --set "MLM_EXTRA_ARGS=--algorithm eagle3 --osl 16 --steps 2"
    submit extract "$model" --set "EXTRACT_DIR=$to/states" --set MLM_WORK_DIR=$to --set MLM_EXTRA_ARGS="--seq-length 512" \
        --set "MLM_DATA_ARGS=--finetune-hf-dataset $folder/data --train-samples 16 --split 100,0,0"
    ((expected += 5))
}
# train MODEL SOURCE NAME ITERATIONS [ARG...]: a draft in the scratch's folder NAME, then its export
train() {
    local save=/workspace/scratch/drafts/$3 flags="--seq-length 512 --draft-vocab-size 512"
    [[ $3 != twin ]] || flags+=" --eagle-config $2/draft.json"
    [[ $SHAPE == smollm2 || $3 != twin ]] || flags+=" --moe-token-dispatcher-type allgather" # the other one needs a GPU
    submit eagle3 "$1" --set "HF_MODEL_CKPT=$2" --set "MLM_MODEL_SAVE=$save" --set MLM_WORK_DIR=/workspace/scratch/drafts \
        --set "MLM_EXTRA_ARGS=$flags" \
        --set "MLM_DATA_ARGS=--finetune-hf-dataset $folder/data --train-samples $(($4 * ROWS)) --split 95,5,0" \
        --set "MLM_TRAIN_ARGS=--micro-batch-size $ROWS --global-batch-size $ROWS --attention-dropout 0 --hidden-dropout 0" \
        --set "MLM_EVAL_ARGS=--eval-iters 1 --eval-interval 1000000 --save-interval 1000000 --log-interval 20" "${@:5}"
    runs[$3]=$id
    submit export "$1" --set "HF_MODEL_CKPT=$2" --set "MLM_MODEL_CKPT=$save" --set "EXPORT_DIR=$save-hf" \
        --set MLM_EXTRA_ARGS=--export-extra-modules --after "$id"
    ((expected += 2))
}
part_drafts() {
    train "$model" "$folder/model" smollm2 "${ITERATIONS:-450}" \
        --time "${TIME:-3}" --stop-before "${BEFORE:-60}" --allow stop-before --requeue
    train "$folder/twin.yaml" "$folder/twin" twin 20
}
# What the events of the drafts' runs say: where each attempt began and ended, and the acceptance length.
check_drafts() {
    "$python" - "$folder/scratch" "${runs[smollm2]}" "${runs[twin]}" <<'PY'
import json, sys
from pathlib import Path
scratch = Path(sys.argv[1])
for name, run, stops in (("smollm2", sys.argv[2], True), ("twin", sys.argv[3], False)):
    state = next((scratch / ".mlmsub").rglob(run)) / "state"
    events = [json.loads(line) for line in (state / "events.jsonl").read_text().splitlines()]
    saved = [json.loads(file.read_text())["iteration"] for file in sorted(state.glob("[0-9]/saved"))]
    resumed = [event["iteration"] for event in events if event["event"] == "resume"]
    told = [event for event in events if event["event"] == "iteration"]
    lengths = [event["acceptance_length"] for event in events if event["event"] == "evaluation"]
    print(f"{name}: stopped after {saved}, went on after {resumed}, {told[0]['iteration']} to {told[-1]['iteration']}, "
          f"loss {told[0]['lm_loss']:.3f} to {told[-1]['lm_loss']:.3f}, acceptance length {lengths}")
    assert saved == resumed and bool(saved) == stops and 0 not in saved, "stopped in the middle, and gone on with there"
    assert len(lengths) == 1 and lengths[0] >= 1, "measured once, at the end"
    hf = scratch / "drafts" / f"{name}-hf"
    assert {"config.json", "model.safetensors"} <= {file.name for file in hf.iterdir()}, hf
PY
}

start=$SECONDS expected=0 code=0
declare -A runs=()
ROWS=${ROWS:-8}
for part in "${parts[@]}"; do "part_$part"; done
for id in "${ids[@]}"; do run logs --follow "$id" >/dev/null || code=$?; done # not in the order in which they end
for id in "${ids[@]}"; do
    printf '\n--- %s\n' "$id"
    run logs "$id" | tail -n "${LINES_SHOWN:-14}" || code=1
done
printf '\n'
run list
find "$folder/scratch/.mlmsub" -name done.json | sort | while read -r file; do
    "$python" -c 'import json, sys; print(json.dumps(json.load(open(sys.argv[1]))))' "$file"
done
count=$(find "$folder/scratch/.mlmsub" -name done.json | wc -l)
[[ ! ${runs[twin]-} ]] || check_drafts || code=1
echo "front door: $count of $expected jobs done, $((SECONDS - start)) s from the first submit"
((count == expected && code == 0))
