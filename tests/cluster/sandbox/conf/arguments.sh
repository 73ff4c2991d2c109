# shellcheck shell=bash disable=SC1090,SC1091,SC2034,SC2086,SC2154  # it behaves as the original does
# Behaves as Megatron-LM's conf/arguments.sh of examples/post_training/modelopt does, in the points that matter to who
# submits: it sources the env setup again, fills in defaults, installs unless told not to, and exports five names anew.
MLM_MODEL_CFG=$1
if [ -z ${SANDBOX_ENV_SETUP} ]; then
    echo "SANDBOX_ENV_SETUP is not set"
else
    source ${SANDBOX_ENV_SETUP}
fi
if [ -z ${MLM_WORK_DIR} ]; then MLM_WORK_DIR=/tmp/megatron_workspace; fi
for name in TP EP PP DP; do
    if [ -z ${!name} ]; then declare "$name=1"; fi
done
if [ -z ${LAUNCH_SCRIPT} ]; then LAUNCH_SCRIPT="torchrun --nproc_per_node=$((TP * EP * PP * DP))"; fi
if [ -z ${MLM_SKIP_INSTALL} ]; then
    echo "would install ${SCRIPT_DIR}/requirements.txt"
    exit 99
fi
export TOKENIZERS_PARALLELISM=False
export OMP_NUM_THREADS=1
export NCCL_IB_SL=1
export NCCL_IB_TIMEOUT=22
export CUDA_DEVICE_MAX_CONNECTIONS=1
source "${SCRIPT_DIR}/conf/${MLM_MODEL_CFG}.sh"
