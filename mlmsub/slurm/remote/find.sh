# shellcheck shell=sh disable=SC2154,SC2015  # parameters come as assignments in front; `a && b || c` is meant

# The jobs of runs whose submission was cut off before it was answered: runs on the cluster under /bin/sh. The client puts
# in front: environment.sh, clusters and runs (a line `- directory` each). Answers with lines `job|directory`.
queue=$(squeue ${clusters:+-M "$clusters"} -h -t all -u "$(id -un)" -o '%i|%T|%Z' 2>/dev/null </dev/null)
printf '%s' "$runs" | while read -r _ dir; do
    job=$(readlink "$dir/state/job") || job=$(cat "$dir/state/submitted" 2>/dev/null) ||
        job=$(printf '%s\n' "$queue" | while IFS='|' read -r id state where; do
            [ "$where" = "$dir" ] && [ "$state" != FAILED ] && echo "$id"
        done | head -n 1)
    printf '%s|%s\n' "$job" "$dir"
done
