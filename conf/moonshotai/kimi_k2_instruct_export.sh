# shellcheck shell=bash disable=SC2034  # variables for who sources this
# Env setup: export of Kimi-K2-Instruct on 2 nodes of 8 GPUs. Export knows pipeline parallelism only.
#   mlmsub submit export moonshotai/Kimi-K2-Instruct --nodes 2 --env-setup conf/moonshotai/kimi_k2_instruct_export.sh
# The draft alone (--export-extra-modules in MLM_EXTRA_ARGS) is read by one process, whatever PP is. As Megatron-LM's example:
#   mlmsub submit script --nodes 2 --env-setup conf/moonshotai/kimi_k2_instruct_export.sh -- export.sh moonshotai/Kimi-K2-Instruct
HF_MODEL_CKPT=/workspace/scratch/moonshotai/Kimi-K2-Instruct
MLM_MODEL_CKPT=/workspace/scratch/megatron_workspace/moonshotai/Kimi-K2-Instruct-Eagle3

# 61 layers on 16 pipeline stages: 3, then 14 times 4, then 2
PP=16
MLM_EXTRA_ARGS=" \
    --decoder-first-pipeline-num-layers 3 \
    --decoder-last-pipeline-num-layers 2 \
    --init-model-with-meta-device \
    --use-cpu-initialization \
"
