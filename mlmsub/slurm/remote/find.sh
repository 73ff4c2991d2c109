# shellcheck shell=sh disable=SC2154,SC2015,SC2034  # parameters come as assignments in front; `a && b || c` is meant

# The jobs of runs whose submission was cut off before it was answered: runs on the cluster under /bin/sh. The client puts
# in front: environment.sh, clusters and runs (a line `- directory` each). Answers with lines `jobs|directory`; a chain
# that lacks links has none, since only the same command again can complete it.
queue=$(ask_all -t all)
printf '%s' "$runs" | while read -r _ dir; do
    jobs=$(cat "$dir/state/submitted" 2>/dev/null) || [ -e "$dir/state/links" ] || jobs=$(readlink "$dir/state/job") ||
        jobs=$(jobs_of "$dir" | while read -r id state _; do [ "$state" = FAILED ] || echo "$id"; done | head -n 1)
    printf '%s|%s\n' "$jobs" "$dir"
done
