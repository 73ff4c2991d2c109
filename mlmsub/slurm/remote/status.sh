# shellcheck shell=sh disable=SC2154,SC2015  # parameters come as assignments in front; `a && b || c` is meant

# The state of any number of runs in one go: runs on the cluster under /bin/sh. The client puts in front: environment.sh,
# clusters, jobs (ids joined by commas) and runs (a line `job directory` each). Three sources, each with its own word:
# the queue, accounting, and what the runs wrote themselves.
say() { printf '%s|%s\n' "$1" "$2"; }
over() { # JOB DIRECTORY: the job will not run again, as far as anybody knows
    [ ! -s "$2/state/end" ] || return 0
    if [ -e "$2/local" ]; then ! kill -0 "$1" 2>/dev/null; return; fi
    [ -n "$answers" ] || return 1
    case $(printf '%s\n' "$queue" | sed -n "s/^$1|\([A-Z_]*\)|.*/\1/p") in
        '' | CANCELLED | COMPLETED | FAILED | TIMEOUT | NODE_FAIL | OUT_OF_MEMORY | DEADLINE | BOOT_FAIL) return 0 ;;
    esac
    return 1
}
answers='' queue=''
if command -v squeue >/dev/null; then
    if queue=$(squeue ${clusters:+-M "$clusters"} -h -t all -u "$(id -un)" -o '%i|%T|%r|%M|%D|%S' 2>/dev/null </dev/null); then
        answers=1
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
    [ ! -L "$dir/state/job" ] || say claim "$job|$(readlink "$dir/state/job")"
    [ ! -s "$dir/state/end" ] || say end "$job|$(cat "$dir/state/end")"
    if [ -e "$dir/local" ] && kill -0 "$job" 2>/dev/null; then say alive "$job|$(ps -o etime= -p "$job" | tr -d ' ')"; fi
    # a job removes its secrets at its end; one that was cancelled or killed could not
    if [ -d "$dir/secrets" ] && over "$job" "$dir"; then rm -rf "$dir/secrets"; fi
done
