# shellcheck shell=sh disable=SC2154,SC2015  # parameters come as assignments in front; `a && b || c` is meant

# The state of any number of runs in one go: runs on the cluster under /bin/sh. The client puts in front: slurm_bin,
# clusters, jobs (ids joined by commas) and runs (a line `job directory` each). Three sources, each with its own word:
# the queue, accounting, and what the runs wrote themselves.
PATH=${slurm_bin:+$slurm_bin:}$PATH
say() { printf '%s|%s\n' "$1" "$2"; }
if command -v squeue >/dev/null; then
    if queue=$(squeue ${clusters:+-M "$clusters"} -h -t all -u "$(id -un)" -o '%i|%T|%r|%M|%D|%S' 2>/dev/null </dev/null); then
        say queue-answers yes
        printf '%s\n' "$queue" | while IFS= read -r line; do
            case ",$jobs," in *",${line%%|*},"*) say queue "$line" ;; esac
        done
    fi
    if [ -n "$jobs" ]; then
        sacct ${clusters:+-M "$clusters"} -n -X -P -j "$jobs" -o JobID,State,ExitCode,Elapsed,NNodes,Start 2>/dev/null </dev/null |
            while IFS= read -r line; do say account "$line"; done
    fi
fi
printf '%s' "$runs" | while read -r job dir; do
    [ -d "$dir" ] || { say gone "$job"; continue; }
    [ ! -s "$dir/state/end" ] || say end "$job|$(cat "$dir/state/end")"
    if [ -e "$dir/local" ] && kill -0 "$job" 2>/dev/null; then say alive "$job|$(ps -o etime= -p "$job" | tr -d ' ')"; fi
    # secrets are removed by the job at its end; a job that was cancelled or killed could not
    if [ -d "$dir/secrets" ]; then
        if [ -s "$dir/state/end" ]; then rm -rf "$dir/secrets"; else say secrets "$job"; fi
    fi
done
