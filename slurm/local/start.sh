#!/bin/bash
# Starts a run under the profile `local`: waits for its parents, then runs the job script with the variables that
# Slurm would set. Its process id is the job id, and the id of its session, by which `mlmsub cancel` ends all of it.
# usage: start.sh NTASKS JOB_NAME STAMP PARENTS, the last one a line `CONDITION RUN_DIRECTORY` each
run=$(builtin cd "${BASH_SOURCE[0]%/*}/.." && pwd) || exit 1
export SLURM_JOB_ID=$$ SLURM_NTASKS=$1 SLURM_NNODES=1 SLURM_JOB_NUM_NODES=1 SLURM_JOB_NODELIST=127.0.0.1 PATH=$run/local:$PATH
exec >>"$run/logs/$2_$$_$3.log" 2>&1 </dev/null
while read -r _ parent; do
    [[ $parent ]] || continue
    until [[ -s $parent/state/end ]]; do
        if ! kill -0 "$(<"$parent/state/submitted")" 2>/dev/null; then
            break # it was killed, or has just written its end
        fi
        sleep 0.2
    done
done <<<"$4"
exec bash "$run/job.sbatch"
