# shellcheck shell=bash disable=SC1090,SC1091,SC2034,SC2086,SC2154  # it behaves as the original does
MODEL_ARGS=" --num-layers 61 --moe-layer-freq [0]*1+[1]*60 "
