# shellcheck shell=bash disable=SC2034  # variables for who sources this
# An env setup: sourced in the container by every rank. Copy it, edit it, and give it by --env-setup.
HF_MODEL_CKPT=/workspace/scratch/meta-llama/Llama-3.2-1B-Instruct
TP=1
ETP=1
EP=1
PP=1
