# shellcheck shell=sh disable=SC2154  # parameters come as assignments in front

# Finds Slurm's commands, and asks the queue; goes in front of each script that calls them. The client puts in front: slurm_bin, prelude
# and, to submit, pass_env. The prelude is bash, as in the job script. It may print and exit, and does not get the run's
# stdin; what it leaves in the variables below is taken over. Without --norc bash would read the start-up file once more,
# since it believes that sshd started it, and what that prints would stand among the settings.
if [ -n "${prelude-}" ]; then
    # shellcheck disable=SC2016,SC2086  # bash is to expand this; names are words
    eval "$(bash --norc -c '
        __mlm_names=("${@:2}")
        __mlm_tell() {
            local name
            for name in "${__mlm_names[@]}"; do
                [[ -z ${!name+1} ]] || printf "export %s=%q\n" "$name" "${!name}"
            done
        }
        exec 3>&1 >&2
        trap "__mlm_tell >&3" EXIT
        eval "$1"' bash "$prelude" PATH LD_LIBRARY_PATH SLURM_CONF SLURM_CLUSTERS ${pass_env-} </dev/null)"
fi
PATH=${slurm_bin:+$slurm_bin:}$PATH
# The user's own filters and formats would hide jobs, and SCANCEL_INTERACTIVE would ask.
for name in $(env | sed -nE 's/^((SQUEUE|SACCT|SCANCEL)_[A-Z0-9_]+)=.*/\1/p'); do unset "$name"; done

ask_queue() { squeue ${clusters:+-M "$clusters"} -h "$@" 2>/dev/null </dev/null; }
ask_all() { ask_queue -u "$(id -un)" -o '%i|%T|%Z|%o' "$@"; } # what jobs_of reads
jobs_of() { # RUN_DIRECTORY: of what ask_all said, $queue, a line `ID STATE LINKS` for each of the run's jobs
    # by what Slurm keeps of every job: its working directory and command, whose arguments are the links before it
    printf '%s\n' "$queue" | while IFS='|' read -r id state where command; do
        is_same "$where" "$1" || continue # the user may have started other jobs there
        before=${command##*job.sbatch}
        [ "$before" != "$command" ] || continue
        case $before in *[!0-9\ ]*) continue ;; esac
        script=${command%"job.sbatch$before"}
        [ -z "$script" ] || is_same "${script%/}" "$1" || continue
        echo "$id $state$before"
    done
}
is_same() { # DIRECTORY DIRECTORY; sbatch has resolved links
    # shellcheck disable=SC3013  # -ef: each sh of a Linux has it
    [ "$1" = "$2" ] || [ "$1" -ef "$2" ]
}
is_final() { # STATE of Slurm, after which it does not start the job again by itself
    case $1 in
        CANCELLED | COMPLETED | FAILED | TIMEOUT | NODE_FAIL | OUT_OF_MEMORY | PREEMPTED | DEADLINE | BOOT_FAIL | REVOKED) ;;
        *) return 1 ;;
    esac
}
