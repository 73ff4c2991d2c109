#!/bin/bash
# shellcheck shell=bash disable=SC1090,SC1091,SC2034,SC2086,SC2154  # it behaves as the original does
# Stands in for Megatron-LM's eagle3.sh: sources what that sources, then writes down what a rank sees.
SCRIPT_DIR="$(dirname "$(readlink -f "$0")")"
source "${SCRIPT_DIR}/conf/arguments.sh"
export TP EP PP ETP MLM_WORK_DIR MODEL_ARGS SCRIPT_DIR
${LAUNCH_SCRIPT} "${SCRIPT_DIR}/record.py" "$@"
