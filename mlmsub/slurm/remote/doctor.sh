# shellcheck shell=sh disable=SC2154,SC2015  # parameters come as assignments in front; `a && b || c` is meant

# What a cluster is like, asked in one go: runs on the cluster under /bin/sh. The client puts in front: environment.sh,
# runs_root, scratch and image (a path, or empty). Answers with lines `kind|value`; nothing is changed.
say() { printf '%s|%s\n' "$1" "$2"; }
ask() { # KIND COMMAND...: a line of answer each
    kind=$1
    shift
    "$@" 2>/dev/null </dev/null | while IFS= read -r line; do say "$kind" "$line"; done
}
command -v sbatch >/dev/null || { say no-sbatch "$PATH"; exit 0; }
if ! error=$(sinfo -h 2>&1 >/dev/null </dev/null); then say no-answer "$(printf '%s\n' "$error" | tail -n 1)"; exit 0; fi
ask version sbatch --version
ask partition sinfo -h -o '%P|%a|%l|%D|%G|%m|%c'
srun --mpi=list 2>&1 </dev/null | while IFS= read -r line; do say mpi "$line"; done
srun --help 2>/dev/null </dev/null | sed -n 's/.*--\(\(no-\)\{0,1\}container-[a-z-]*\).*/\1/p' | sort -u |
    while IFS= read -r option; do say pyxis "$option"; done
scontrol show config 2>/dev/null </dev/null |
    sed -n 's/^\(WaitTime\|KillWait\|KillOnBadExit\|EnforcePartLimits\|PreemptMode\|JobRequeue\|MaxArraySize\) *= */\1=/p' |
    while IFS= read -r line; do say config "$line"; done
scontrol show partition -o 2>/dev/null </dev/null |
    sed -n 's/^PartitionName=\([^ ]*\).* GraceTime=\([^ ]*\).* PreemptMode=\([^ ]*\).*/\1|\3|\2/p' |
    while IFS= read -r line; do say preempt "$line"; done
if sacct -n -X -S now >/dev/null 2>&1 </dev/null; then say sacct yes; else say sacct no; fi
ask account sacctmgr -n -P show user "$(id -un)" format=DefaultAccount
ask association sacctmgr -n -P show assoc user="$(id -un)" format=Account,Partition,QOS
for pair in "runs|$runs_root" "scratch|$scratch"; do
    folder=${pair#*|}
    [ -n "$folder" ] || continue
    # run directories are made below a scratch that is there
    while [ "${pair%%|*}" = runs ] && [ ! -e "$folder" ] && [ "$folder" != "$scratch" ]; do
        folder=${folder%/*}
        folder=${folder:-/}
    done
    if [ ! -d "$folder" ] || [ "$folder" = / ]; then say "${pair%%|*}" "missing|${pair#*|}"
    elif [ -w "$folder" ]; then say "${pair%%|*}" "writable|$(df -Pk "$folder" 2>/dev/null | awk 'NR == 2 { print $4 }')"
    else say "${pair%%|*}" "not-writable|$folder"; fi
done
if [ -n "$image" ]; then if [ -r "$image" ]; then say image "there"; else say image "missing"; fi; fi
command -v enroot >/dev/null && say enroot yes
for folder in "${ENROOT_SYSCONF_PATH:-/etc/enroot}/hooks.d" /usr/local/etc/enroot/hooks.d; do
    [ -d "$folder" ] && for hook in "$folder"/*; do [ -x "$hook" ] && say hook "${hook##*/}"; done
done
exit 0
