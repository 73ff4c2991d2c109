# shellcheck shell=sh disable=SC2154,SC2015  # parameters come as assignments in front; `a && b || c` is meant

# Cancel runs: runs on the cluster under /bin/sh. The client puts in front: environment.sh, clusters and
# runs (a line `job directory` each).
queue=$(squeue ${clusters:+-M "$clusters"} -h -u "$(id -un)" -o '%i|%Z' 2>/dev/null </dev/null)
doubles() { # JOB DIRECTORY: the run's other jobs, made by an sbatch whose answer was late
    printf '%s\n' "$queue" | while IFS='|' read -r id where; do
        [ "$where" != "$2" ] || [ "$id" = "$1" ] || echo "$id"
    done
}
printf '%s' "$runs" | while read -r job dir; do
    if [ -s "$dir/state/end" ] || { [ "$job" = none ] && [ ! -d "$dir" ]; }; then
        printf '%s|ended\n' "$job"
        continue
    elif [ -e "$dir/local" ]; then
        pkill -TERM -s "$job" 2>/dev/null
        for _ in 1 2 3 4 5 6 7 8 9 10; do # as Slurm does: first the signal, then the end
            pgrep -s "$job" >/dev/null && sleep 0.2 || break
        done
        pkill -KILL -s "$job" 2>/dev/null
        echo "143 $job 0" >"$dir/state/end"
    else
        # shellcheck disable=SC2046  # ids
        set -- $(doubles "$job" "$dir")
        [ "$job" = none ] || set -- "$job" "$@" # a submission that was cut off before there was a job
        error=$([ $# -eq 0 ] || scancel ${clusters:+-M "$clusters"} "$@" 2>&1 </dev/null) || {
            printf '%s|%s\n' "$job" "$error"
            continue
        }
        [ "$job" != none ] || echo "143 none 0" >"$dir/state/end"
        ln -sT "$job" "$dir/state/job" 2>/dev/null # claims the run: a job that arrives later ends at once
    fi
    rm -rf "$dir/secrets"
    printf '%s|\n' "$job"
done
