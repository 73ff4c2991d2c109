# shellcheck shell=sh disable=SC2154,SC2015  # parameters come as assignments in front; `a && b || c` is meant

# The state of any number of runs in one go: runs on the cluster under /bin/sh. The client puts in front: environment.sh,
# clusters, jobs (ids of Slurm, joined by commas) and runs (a line `job directory` each). Three sources, each with its own
# word: the queue, accounting, and what the runs wrote themselves. What the first two say is of the job that the run is
# at, which `job` names where it is another than the one that was asked for.
say() { printf '%s|%s\n' "$1" "$2"; }
is_over() { # JOB, as far as the queue knows; sets `state`
    [ -n "$answers" ] || return 1
    state=$(printf '%s\n' "$queue" | sed -n "s/^$1|\([A-Z_]*\)|.*/\1/p")
    [ -z "$state" ] || is_final "$state"
}
now_at() { # JOB DIRECTORY: the job of the run's last word; else the last that began, or the next of its chain
    at=$1
    [ ! -L "$2/state/job" ] || at=$(readlink "$2/state/job") # an sbatch that was late may have made it
    link=1
    while [ -L "$2/state/job.$link" ]; do at=$(readlink "$2/state/job.$link") link=$((link + 1)); done
    if read -r _ last _ 2>/dev/null <"$2/state/end"; then
        [ "$last" = none ] || at=$last
    elif is_over "$at" && read -r _ links 2>/dev/null <"$2/state/submitted"; then
        for next in $links; do
            [ "$next" -le "$at" ] || is_over "$next" || { at=$next; break; }
        done
    fi
    echo "$at"
}
over() { # JOB DIRECTORY: the job will not run again, as far as anybody knows
    [ ! -s "$2/state/end" ] || return 0
    if [ -e "$2/local" ]; then ! kill -0 "$1" 2>/dev/null; return; fi
    is_over "$1" && [ "$state" != PREEMPTED ] # after which Slurm may requeue it
}
last_words() { # JOB DIRECTORY: how far the latest attempt came, and what the rank that failed first said last
    n=0
    while [ -d "$2/state/$((n + 1))" ]; do n=$((n + 1)); done
    if [ -d "$2/state/$n" ]; then
        reached=$(tail -n 500 "$2/state/events.jsonl" 2>/dev/null | sed -n 's/.*"event": "iteration", "iteration": \([0-9]*\).*/\1/p' | tail -n 1)
        why=$(tail -n 1 "$2/state/attempts.jsonl" 2>/dev/null | sed -n 's/.*"cause": "\([^"]*\)".*/\1/p')
        say attempt "$1|$n|$reached|$why"
    fi
    [ ! -s "$2/state/advice" ] || say advice "$1|$(cat "$2/state/advice")"
    newest=$(stat -c %Y "$2"/logs/*.log "$2/state/events.jsonl" "$2/state" 2>/dev/null | sort -n | tail -n 1)
    [ -z "$newest" ] || say age "$1|$(($(date +%s) - newest))"
    if failure=$(readlink "$2/state/$n/first_failure"); then
        say failure "$1|$failure"
        rank=${failure#* by rank }
        tail -q -n 5000 "$2"/logs/*.log 2>/dev/null | sed -n "s/^ *${rank%% *}: //p" | tail -n 3 |
            while IFS= read -r line; do say said "$1|$line"; done
    fi
}
answers='' queue=''
if command -v squeue >/dev/null; then
    if queue=$(ask_queue -t all -u "$(id -un)" -o '%i|%T|%r|%M|%D|%S'); then
        answers=1
        say queue-answers yes
    fi
fi
runs=$(printf '%s' "$runs" | while read -r job dir; do echo "$job $(now_at "$job" "$dir") $dir"; done)
if [ -n "$jobs" ]; then
    at=$(printf '%s\n' "$runs" | while read -r job at _; do
        case ",$jobs," in *",$job,"*) printf '%s,' "$at" ;; esac
    done)
    printf '%s\n' "$queue" | while IFS= read -r line; do
        case ",$at" in *",${line%%|*},"*) say queue "$line" ;; esac
    done
    if command -v sacct >/dev/null; then
        sacct ${clusters:+-M "$clusters"} -n -X -P -j "${at%,}" -o JobID,State,ExitCode,Elapsed,NNodes,Start 2>/dev/null </dev/null |
            while IFS= read -r line; do say account "$line"; done
    fi
fi
printf '%s\n' "$runs" | while read -r job at dir; do
    [ -d "$dir" ] || { say gone "$job"; continue; }
    [ "$at" = "$job" ] || say job "$job|$at"
    [ ! -s "$dir/state/end" ] || say end "$job|$(cat "$dir/state/end")"
    [ ! -e "$dir/state/cancelled" ] || say cancelled "$job|by mlmsub"
    if [ -e "$dir/local" ] && kill -0 "$job" 2>/dev/null; then say alive "$job|$(ps -o etime= -p "$job" | tr -d ' ')"; fi
    last_words "$job" "$dir"
    # a job removes its secrets at its end; one that was cancelled or killed could not
    if [ -d "$dir/secrets" ] && over "$at" "$dir"; then rm -rf "$dir/secrets"; fi
done
