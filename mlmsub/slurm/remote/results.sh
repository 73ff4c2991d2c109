# shellcheck shell=sh disable=SC2154,SC2015  # parameters come as assignments in front; `a && b || c` is meant

# What runs found out and made: runs on the cluster under /bin/sh. The client puts in front: runs (a line `RUN DIRECTORY`
# each) and outputs (a line `RUN VARIABLE PATH` each). Answers with lines `event|RUN|JSON` and `bytes|RUN|VARIABLE|NUMBER`.
printf '%s' "$runs" | while read -r run dir; do
    grep -v '"event": "iteration"' "$dir/state/events.jsonl" 2>/dev/null | tail -n 1000 | sed "s/^/event|$run|/"
done
printf '%s' "$outputs" | while read -r run variable path; do
    [ -e "$path" ] || continue
    printf 'bytes|%s|%s|%s\n' "$run" "$variable" "$(du -sb "$path" 2>/dev/null | cut -f 1)"
done
