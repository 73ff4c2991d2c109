# shellcheck shell=sh disable=SC2154,SC2015  # parameters come as assignments in front; `a && b || c` is meant

# Cancel runs: runs on the cluster under /bin/sh. The client puts in front: slurm_bin, clusters and runs (a line
# `job directory` each).
PATH=${slurm_bin:+$slurm_bin:}$PATH
printf '%s' "$runs" | while read -r job dir; do
    if [ -e "$dir/local" ]; then
        if [ ! -s "$dir/state/end" ]; then
            pkill -TERM -s "$job" 2>/dev/null
            echo "143 $job 0" >"$dir/state/end"
        fi
    else
        error=$(scancel ${clusters:+-M "$clusters"} "$job" 2>&1 </dev/null) || { printf '%s|%s\n' "$job" "$error"; continue; }
    fi
    rm -rf "$dir/secrets"
    printf '%s|\n' "$job"
done
