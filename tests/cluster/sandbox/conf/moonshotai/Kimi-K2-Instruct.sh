MODEL_ARGS=" --num-layers 61 --moe-layer-freq [0]*1+[1]*60 "
