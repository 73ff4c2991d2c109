# shellcheck shell=sh disable=SC2154,SC2015  # parameters come as assignments in front; `a && b || c` is meant

# The newest runs below runs_root, whatever machine submitted them: a line `job ids|record` each, the record as it lies
# in the run directory, its lines joined. The client puts in front: runs_root and limit.
cd "$runs_root" 2>/dev/null || exit 0
find . -mindepth 2 -maxdepth 2 -type d -user "$(id -un)" -name '*-*-*-*' 2>/dev/null | sort -t/ -k3 -r | head -n "$limit" |
    while IFS= read -r dir; do
        jobs=$(cat "$dir/state/submitted" 2>/dev/null) && [ -s "$dir/record.json" ] || continue
        printf '%s|' "$jobs"
        tr -d '\n' <"$dir/record.json"
        echo
    done
