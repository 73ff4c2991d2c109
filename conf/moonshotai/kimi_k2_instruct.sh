# shellcheck shell=bash disable=SC2034  # variables for who sources this
# Env setup: EAGLE3 training of Kimi-K2-Instruct on 8 nodes of 8 GPUs.
#   mlmsub submit eagle3 moonshotai/Kimi-K2-Instruct --nodes 8 --env-setup conf/moonshotai/kimi_k2_instruct.sh
# or, as Megatron-LM's own example:
#   mlmsub submit script --nodes 8 --env-setup conf/moonshotai/kimi_k2_instruct.sh -- eagle3.sh moonshotai/Kimi-K2-Instruct
# TP=8 with EP=64: 64 ranks hold 6 of the 384 experts each. ETP=1 must be said, since it defaults to TP.
HF_MODEL_CKPT=/workspace/scratch/moonshotai/Kimi-K2-Instruct
TP=8
ETP=1
EP=64
