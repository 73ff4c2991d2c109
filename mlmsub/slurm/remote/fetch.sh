# shellcheck shell=sh disable=SC2154,SC2015  # parameters come as assignments in front; `a && b || c` is meant

# Send files as a tar on standard output, after a line with their bytes. The client puts in front: folder and patterns
# (one a line, relative to it). Secrets are never among them.
cd "$folder" 2>/dev/null || { echo "no such folder: $folder" >&2; exit 3; }
list=$(printf '%s\n' "$patterns" | while IFS= read -r pattern; do
    find . -path ./secrets -prune -o -type f -path "./$pattern" -print 2>/dev/null
done | sort -u)
[ -n "$list" ] || { echo "nothing matches" >&2; exit 4; }
printf '%s\n' "$list" | tr '\n' '\0' | du -cb --files0-from=- 2>/dev/null | tail -n 1 | cut -f 1
printf '%s\n' "$list" | tar -cf - --no-recursion -T -
