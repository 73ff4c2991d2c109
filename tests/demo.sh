#!/bin/bash
# The main job on this machine: SmolLM2-135M-Instruct, quantized to FP8 and exported by two runs of mlmsub, the second
# waiting for the first. Through a real Slurm with containers where this machine can have one, else as processes.
# Called by `make demo`, with the virtual environment's programs on PATH.
set -euo pipefail
cd "${BASH_SOURCE[0]%/*}/.."
cache=${MLMSUB_TEST_CACHE:?}
demo=$cache/demo
model=HuggingFaceTB/SmolLM2-135M-Instruct

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
run() { printf '\033[2m$ %s\033[0m\n' "$*" && "$@"; }
stop() { [[ ! -e $demo/cluster/etc/slurm.conf ]] || tests/cluster/slurm-cluster.sh stop; }

rm -rf "$demo/scratch" "$demo/state"
mkdir -p "$demo/scratch" "$demo/config/mlmsub/profiles"
export XDG_CONFIG_HOME=$demo/config XDG_STATE_HOME=$demo/state
unset USER_FSW SANDBOX_DIR SANDBOX_ENV_SETUP CONTAINER_IMAGE LAUNCH_SCRIPT HF_MODEL_CKPT
start=$SECONDS

say "1. The model: $model from a PyPI package"
[[ -e $demo/model/config.json ]] || python tests/stages/smollm2.py "$demo/model"

say "2. The cluster: two nodes of Debian's Slurm, and a container image"
export SLURM_LAB_DIR=$demo/cluster SLURM_LAB_CTLD_PORT=28417 SLURM_LAB_SSH_PORT=28419
if ((EUID == 0)) && tests/cluster/slurm-cluster.sh start 2 && image=$(tests/cluster/image.sh); then
    trap stop EXIT
    eval "$(tests/cluster/slurm-cluster.sh env)"
    run sinfo
    profile=demo
    prefix=$(python -c 'import sys; print(sys.base_prefix)')
    venv=$(python -c 'import sys; print(sys.prefix)')
    # The image has no torch: that of the virtual environment is mounted, at its own place.
    cat >"$demo/config/mlmsub/profiles/demo.yaml" <<YAML
image: $image/image.sqsh
scratch: $demo/scratch
gpus_per_node: 1  # pretended; the stages run on the CPU
time: 15
mounts:
  - $demo/model:/models/SmolLM2-135M-Instruct:ro
  - $prefix:$prefix:ro
  - $venv:$venv:ro
launch_script: $venv/bin/python
env:
  HF_MODEL_CKPT: /models/SmolLM2-135M-Instruct
YAML
else
    say "No Slurm on this machine (it needs root, apt and user namespaces): the same runs as processes, by the profile local"
    profile=local
    export USER_FSW=$demo/scratch HF_MODEL_CKPT=$demo/model LAUNCH_SCRIPT
    LAUNCH_SCRIPT=$(command -v python)
fi
prepared=$((SECONDS - start))

say "3. Submit: quantize to FP8, then export"
run mlmsub submit quantize "$model" FP8_DEFAULT_CFG --profile "$profile"
quantize=$(mlmsub list --json | python -c 'import json, sys; print(json.load(sys.stdin)[0]["run_id"])')
run mlmsub submit export "$model" --after "$quantize" --profile "$profile" --watch

say "4. The end of quantize's log"
mlmsub logs "$quantize" | tail -n 12

say "5. What was exported"
exported=$demo/scratch/megatron_workspace/${model}_export
run ls -sh "$exported" | sed -e '/model-000\(0[2-9]\|[12]\)/d' -e 's/^.*model-00001.*$/&\n      ... 28 more .../'
cat "$exported/hf_quant_config.json"
echo

say "6. How long it took"
run mlmsub list
python - "$demo/scratch" <<'PYTHON'
import json, pathlib, sys
for done in sorted(pathlib.Path(sys.argv[1]).glob(".mlmsub/runs/*/*/state/*/done.json")):
    data = json.loads(done.read_text())
    print(f"{data['stage']:>9}: " + ", ".join(f"{step} {seconds:.1f} s" for step, seconds in data["seconds"].items()))
PYTHON
echo "     demo: $prepared s to prepare, $((SECONDS - start)) s in all"
