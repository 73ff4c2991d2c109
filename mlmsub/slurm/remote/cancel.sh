# shellcheck shell=sh disable=SC2154,SC2015  # parameters come as assignments in front; `a && b || c` is meant

# Cancel runs: runs on the cluster under /bin/sh. The client puts in front: environment.sh, clusters and
# runs (a line `job directory` each).
answers=yes
queue=$(ask_all) || answers=
end_all() { # ID...: one after the other, so that no link starts in the place of one that is gone
    for id in "$@"; do
        error=$(scancel ${clusters:+-M "$clusters"} "$id" 2>&1 </dev/null) ||
            case $error in *already\ complet* | *[Ii]nvalid\ job\ id*) ;; *) echo "$error"; return 1 ;; esac
    done
}
has_ended() { # is one that has had its last word requeued by somebody?
    [ -s "$dir/state/end" ] || return
    live=$(printf '%s\n' "$live" | grep -v ' COMPLETING')
    [ -z "$live" ]
}
printf '%s' "$runs" | while read -r key dir; do
    case $key in none*) job=none ;; *) job=$key ;; esac
    live=$(jobs_of "$dir" | sort -rn) # links of a chain, and what a late sbatch made
    if has_ended || { [ "$job" = none ] && [ ! -d "$dir" ]; }; then
        printf '%s|ended\n' "$key"
        continue
    elif [ -e "$dir/local" ]; then
        pkill -TERM -s "$job" 2>/dev/null
        for _ in 1 2 3 4 5 6 7 8 9 10; do # as Slurm does: first the signal, then the end
            pgrep -s "$job" >/dev/null && sleep 0.2 || break
        done
        pkill -KILL -s "$job" 2>/dev/null
        echo "143 $job 0" >"$dir/state/end"
    else
        ids=$(echo "$live" | cut -d ' ' -f 1)
        if [ -z "$ids" ]; then
            if [ -z "$answers" ]; then # all that there have been
                ids=$(cat "$dir/state/submitted" "$dir/state/links" 2>/dev/null)
                for link in "$dir"/state/job*; do ids="$ids $(readlink "$link")"; done
                [ "$job" = none ] || ids="$ids $job"
                ids=$(echo "$ids" | tr -s ' ' '\n' | sort -rnu)
            elif printf '%s\n' "$queue" | grep -q "^$job|"; then
                ids=$job
            fi
        fi
        # shellcheck disable=SC2086  # ids
        set -- $ids
        if [ $# -eq 0 ] && [ -z "$answers" ]; then
            printf '%s|squeue does not answer, so it is not known whether there is a job\n' "$key"
            continue
        elif [ $# -eq 0 ] && [ "$job" != none ]; then
            printf '%s|ended\n' "$key"
            rm -rf "$dir/secrets"
            continue
        fi
        next=none
        for next in "$@"; do :; done # of those that wait the first in line
        touch "$dir/state/cancelled" 2>/dev/null # an attempt that starts in spite of it ends at once
        error=$(end_all "$@") || {
            rm -f "$dir/state/cancelled"
            printf '%s|%s\n' "$key" "$error"
            continue
        }
        # one that works has the run's last word itself, and one that completes may still have it
        case $answers$live in
            *RUNNING* | *SUSPENDED* | '') ;;
            *) [ -s "$dir/state/end" ] || echo "143 $next 0" >"$dir/state/end" ;;
        esac
        mv "$dir/state/links" "$dir/state/submitted" 2>/dev/null # no link is to come any more
        ln -sT "$job" "$dir/state/job" 2>/dev/null # claims the run: a job that arrives later ends at once
    fi
    rm -rf "$dir/secrets"
    printf '%s|\n' "$key"
done
