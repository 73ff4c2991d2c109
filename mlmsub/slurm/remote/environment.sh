# shellcheck shell=sh disable=SC2154  # parameters come as assignments in front

# Finds Slurm's commands; goes in front of each script that calls them. The client puts in front: slurm_bin, prelude
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
