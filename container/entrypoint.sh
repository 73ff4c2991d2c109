#!/bin/bash
# What each Slurm task runs inside the container: source the user's values, say who this rank is, start the work.
#
# env/order lists the files of values, later ones win: profile.sh, setup.sh (the user's env setup), overrides.sh
# (--set), and those of them that hold secrets from another folder; then defaults.sh fills what is still unset.
# They are sourced at top level: within a function, `declare` in the env setup would make its variables local.

__mlm_rank=${SLURM_PROCID:?mlmsub: SLURM_PROCID is not set; start this by srun}
__mlm_state=$MLMSUB_RUN_DIR/state/$MLMSUB_RESTART
__mlm_env=$MLMSUB_RUN_DIR/env

__mlm_die() { # CODE MESSAGE...
    builtin echo "mlmsub: rank $__mlm_rank on ${SLURMD_NODENAME:-$HOSTNAME}: ${*:2}" >&2
    builtin exit "$1"
}

# Runs at every end of this shell. The first rank to fail by itself makes the link and so names the job's exit code:
# that one is atomic, and needs no clocks to agree. 143 is a rank that was ended because of another's failure.
__mlm_record() {
    local code=$1
    builtin printf '%s\n' "$code" >"$__mlm_state/rank-$__mlm_rank"
    ((code == 0 || code == 143)) ||
        ln -sT "$code by rank $__mlm_rank on ${SLURMD_NODENAME:-$HOSTNAME}" "$__mlm_state/first_failure" 2>/dev/null
    rm -rf "${MLMSUB_ARRAYS:-}"
}
trap '__mlm_record $?' EXIT

# --- the user's values ---------------------------------------------------------

# An image may define these for its own purposes; only what the user or the profile says counts.
unset TP PP CP EP ETP HF_MODEL_CKPT MLM_MODEL_CKPT MLM_MODEL_SAVE MLM_WORK_DIR EXPORT_DIR LAUNCH_SCRIPT
unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT
unset HF_HOME HF_MODULES_CACHE TRITON_CACHE_DIR TORCH_EXTENSIONS_DIR XDG_CACHE_HOME PYTHONNOUSERSITE

__mlm_ended() { # WHERE
    trap - DEBUG EXIT
    __mlm_record 78
    __mlm_die 78 "the env setup ended the shell at $1; an env setup only sets variables"
}
__mlm_options=$(set +o; shopt -p)
__mlm_at='' __mlm_was='' __mlm_where=''
while read -r __mlm_file <&9; do
    builtin cd "$MLMSUB_RUN_DIR/${__mlm_file%/*}" || 
        __mlm_die 73 "cannot enter $MLMSUB_RUN_DIR/${__mlm_file%/*} (secrets are gone once a run has ended)"
    trap '__mlm_where=$__mlm_was; __mlm_ended "$__mlm_where"' EXIT # its first command fires DEBUG once more
    trap '__mlm_was=$__mlm_at __mlm_at="${BASH_SOURCE[0]:-} line $LINENO"' DEBUG
    set -aT
    # shellcheck disable=SC1090  # the user's file
    source "./${__mlm_file##*/}"
    builtin set +aT
    builtin trap - DEBUG
    IFS=$' \t\n'
    # Functions are not values: `set -a` has exported them, and one called `read` or `cd` would be in the way here.
    for __mlm_name in $(builtin compgen -A function); do
        [[ $__mlm_name == __mlm_* ]] || builtin unset -f "$__mlm_name"
    done
    eval "$__mlm_options"
    trap '__mlm_record $?' EXIT
done 9<"$__mlm_env/order"
unset __mlm_at __mlm_was __mlm_where

# A Megatron-LM style conf sets MODEL_ARGS and TOKENIZER_MODEL, and looks at the user's values; where it changes one
# of them, the user's value wins all the same.
if [[ -f $MLMSUB_RUN_DIR/conf/model.sh ]]; then
    __mlm_users=$(declare -p)
    set -a
    # shellcheck disable=SC1091
    source "$MLMSUB_RUN_DIR/conf/model.sh" || __mlm_die 78 "the model conf conf/model.sh failed"
    set +a
    eval "$__mlm_users" 2>/dev/null
    unset __mlm_users
fi

# Arrays cannot be exported: their elements go to files, each ended by NUL.
MLMSUB_ARRAYS=/tmp/mlmsub-${SLURM_JOB_ID:-0}-$MLMSUB_RESTART-$__mlm_rank
mkdir -p "$MLMSUB_ARRAYS" || __mlm_die 73 "cannot make $MLMSUB_ARRAYS"
for __mlm_name in $(compgen -A arrayvar); do
    case $__mlm_name in BASH* | DIRSTACK | FUNCNAME | GROUPS | PIPESTATUS | __mlm*) continue ;; esac
    declare -n __mlm_ref=$__mlm_name
    if ((${#__mlm_ref[@]})); then printf '%s\0' "${__mlm_ref[@]}"; fi >"$MLMSUB_ARRAYS/$__mlm_name"
    unset -n __mlm_ref
done

# --- who this rank is ----------------------------------------------------------

# From Slurm's own variables, after the env setup: neither an image nor Enroot's hooks, which set some of these on
# some clusters, have a say.
declare -A __mlm_identity=([MASTER_ADDR]=$MLMSUB_MASTER_ADDR [MASTER_PORT]=$MLMSUB_MASTER_PORT)
if [[ $MLMSUB_LAUNCHER == python ]]; then
    __mlm_identity+=([RANK]=$SLURM_PROCID [WORLD_SIZE]=$SLURM_NTASKS [LOCAL_RANK]=$SLURM_LOCALID)
fi
for __mlm_name in RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT; do
    if [[ -v $__mlm_name && ${!__mlm_name} != "${__mlm_identity[$__mlm_name]-}" && $__mlm_rank == 0 ]]; then
        echo "mlmsub: the env setup sets $__mlm_name=${!__mlm_name}; mlmsub decides it: ${__mlm_identity[$__mlm_name]-torchrun sets it}" >&2
    fi
    unset "$__mlm_name"
    [[ -z ${__mlm_identity[$__mlm_name]-} ]] || export "$__mlm_name=${__mlm_identity[$__mlm_name]}"
done

# --- defaults for what is still unset --------------------------------------------

# Home is on the container's read-only root. What must be written goes to the node's own /tmp, by job.
__mlm_cache=/tmp/mlmsub-${SLURM_JOB_ID:-0}-cache
export MLMSUB_ARRAYS \
    PYTHONNOUSERSITE="${PYTHONNOUSERSITE-1}" \
    HF_MODULES_CACHE="${HF_MODULES_CACHE-$__mlm_cache/hf_modules}" \
    TRITON_CACHE_DIR="${TRITON_CACHE_DIR-$__mlm_cache/triton}" \
    TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR-$__mlm_cache/torch_extensions}" \
    XDG_CACHE_HOME="${XDG_CACHE_HOME-$__mlm_cache/xdg}"
# shellcheck disable=SC1091
source "$__mlm_env/defaults.sh"

# --- the work --------------------------------------------------------------------

__mlm_kind='' __mlm_install='' __mlm_command=()
# shellcheck disable=SC1091
source "$__mlm_env/command.sh"
builtin cd "$MLMSUB_WORKDIR" || __mlm_die 73 "cannot enter the working directory $MLMSUB_WORKDIR"

read -ra __mlm_launch <<<"$LAUNCH_SCRIPT"
case "${__mlm_launch[0]##*/} ${__mlm_launch[*]:1} " in
    torchrun* | *" torch.distributed.run "*) __mlm_launcher=torchrun ;;
    *) __mlm_launcher=python ;;
esac
if [[ $__mlm_launcher != "$MLMSUB_LAUNCHER" ]]; then
    __mlm_die 78 "LAUNCH_SCRIPT is '$LAUNCH_SCRIPT' here, but the job was laid out for $MLMSUB_LAUNCHER;" \
        "give it by --set LAUNCH_SCRIPT=... or in the profile"
fi
if [[ $__mlm_launcher == torchrun ]]; then
    ((SLURM_NTASKS == SLURM_NNODES)) ||
        __mlm_die 78 "torchrun starts the ranks of a node, so Slurm must start one task per node, not $SLURM_NTASKS on $SLURM_NNODES nodes"
    # without what the user's own LAUNCH_SCRIPT says already
    for __mlm_option in "--nnodes=$SLURM_NNODES" "--nproc-per-node=$MLMSUB_GPUS_PER_NODE" "--node-rank=$SLURM_NODEID" \
        "--master-addr=$MASTER_ADDR" "--master-port=$MASTER_PORT"; do
        __mlm_name=${__mlm_option%%=*}
        [[ " ${LAUNCH_SCRIPT//_/-}" == *" $__mlm_name"[=\ ]* ]] || __mlm_launch+=("$__mlm_option")
    done
fi
export LAUNCH_SCRIPT="${__mlm_launch[*]}"

if [[ -n $__mlm_install ]]; then # once per node and restart; the marker is written after success only
    __mlm_site=$__mlm_state/site-${SLURMD_NODENAME:-$HOSTNAME}
    if ((SLURM_LOCALID == 0)); then
        "${__mlm_launch[0]/torchrun/python}" -m pip install --quiet --target "$__mlm_site.part" -r "$__mlm_install" ||
            __mlm_die 69 "pip could not install $__mlm_install"
        mv -T "$__mlm_site.part" "$__mlm_site"
    fi
    until [[ -d $__mlm_site ]]; do
        [[ ! -L $__mlm_state/first_failure ]] || builtin exit 143
        sleep 1
    done
    PYTHONPATH=$__mlm_site${PYTHONPATH:+:$PYTHONPATH}
fi

if [[ $__mlm_kind == stage ]]; then
    PYTHONPATH=$MLMSUB_RUN_DIR/runtime${PYTHONPATH:+:$PYTHONPATH}
    __mlm_command=("${__mlm_launch[@]}" "${__mlm_command[@]}")
else
    # The reference's arguments.sh sources this again in every stage script: give it the overrides too.
    export SANDBOX_ENV_SETUP=$__mlm_env/merged.sh
    export MLM_SKIP_INSTALL=${MLM_SKIP_INSTALL-1}
fi
export PYTHONPATH=${PYTHONPATH-}

# The command gets SIGTERM too. What it then leaves is its own only if it is 0, for all is saved: the rest follows from
# another rank's failure, or from Slurm. A script whose ranks get a signal before the time limit lives through it, as
# it has to, shells of its own included; the program that acts on the signal sets its own handler.
__mlm_term=''
trap '__mlm_term=1' TERM
[[ -z ${MLMSUB_SCRIPT_SIGNAL-} ]] || trap '' "$MLMSUB_SCRIPT_SIGNAL"
"${__mlm_command[@]}"
__mlm_code=$?
[[ -z $__mlm_term || $__mlm_code == 0 ]] || exit 143
(builtin exit "$__mlm_code")
