# shellcheck shell=sh disable=SC2154,SC2015  # parameters come as assignments in front; `a && b || c` is meant

# Submit one run: runs on the cluster under /bin/sh, with the run directory as a tar on standard input. The client
# puts in front: environment.sh, run_dir scheduler clusters pass_env twin_dir twin_job image sources script cluster_setup ntasks job_name stamp
# parents unpack (the program that undoes the compression).
# Answers with lines `key value`; the exit code is 0 whenever there is an answer.
users_umask=$(umask)
umask 077
say() { printf '%s %s\n' "$1" "$2"; }
refuse() { say refused "$1"; say at "$2"; exit 0; }

root=${run_dir%/*/*}

# --- a run that is there already -------------------------------------------------
find_job() { # the job of this run directory, by what Slurm keeps of every job: its working directory
    [ "$scheduler" != local ] || return 0
    queue=$(squeue ${clusters:+-M "$clusters"} -h -t all -u "$(id -un)" -o '%i|%T|%Z' 2>&1 </dev/null) || return
    printf '%s\n' "$queue" | while IFS='|' read -r job state dir; do
        [ "$dir" = "$run_dir" ] || continue
        # of a job that it refuses Slurm may keep a record too: failed, and never started
        [ "$state" != FAILED ] || [ -L "$run_dir/state/job" ] || continue
        echo "$job"
    done | head -n 1
}
# the same command again, while the run that it made is queued or at work: that run is the answer
if [ -n "$twin_job" ] && [ -d "$twin_dir" ] && [ ! -s "$twin_dir/state/end" ]; then
    if [ "$scheduler" = local ]; then
        kill -0 "$twin_job" 2>/dev/null && { say twin "$twin_job"; exit 0; }
    else
        case $(squeue ${clusters:+-M "$clusters"} -h -j "$twin_job" -o %T 2>/dev/null </dev/null | tail -n 1) in
            PENDING | CONFIGURING | RUNNING | SUSPENDED | REQUEUED) say twin "$twin_job"; exit 0 ;;
        esac
    fi
fi
if [ -d "$run_dir" ]; then
    job=$(readlink "$run_dir/state/job") || job=$(cat "$run_dir/state/submitted" 2>/dev/null) || job=$(find_job) ||
        refuse no-queue "$(squeue 2>&1 >/dev/null </dev/null | tail -n 1)"
    [ -z "$job" ] || { say existing "$job"; exit 0; }
fi
[ "$scheduler" = local ] || command -v sbatch >/dev/null || refuse no-sbatch "$PATH"

# --- what the job will need --------------------------------------------------------
mkdir -p "${run_dir%/*}" 2>/dev/null && [ -w "${run_dir%/*}" ] || refuse not-writable "$root"
free() { df -P "$1" "${run_dir%/*}" 2>/dev/null | awk 'NR == 2 { print $4 }'; }
[ "$(free -k)" -ge 10240 ] || refuse no-space "$root"
inodes=$(free -i)
case $inodes in '' | - | *[!0-9]*) ;; *) [ "$inodes" -eq 0 ] || [ "$inodes" -ge 1000 ] || refuse no-inodes "$root" ;; esac
if [ -n "$image" ] && [ ! -r "$image" ]; then refuse no-image "$image"; fi
printf '%s' "$sources" | while IFS= read -r source; do
    [ -e "$source" ] || { echo "$source"; break; }
done >"${run_dir%/*}/.missing.$$"
missing=$(cat "${run_dir%/*}/.missing.$$") && rm -f "${run_dir%/*}/.missing.$$"
[ -z "$missing" ] || refuse no-mount-source "$missing"

failed=$(printf '%s' "$parents" | while IFS= read -r parent; do
    read -r code _ 2>/dev/null <"$parent/state/end" && [ "$code" != 0 ] && echo "${parent##*/}"
done | head -n 1)
[ -z "$failed" ] || refuse parent-failed "$failed"
[ -z "$script" ] || [ -r "$script" ] || refuse no-script "$script"

# --- unpack: whole or not at all -----------------------------------------------------
part=$run_dir.part.$$
attempt=$(uname -n)-$$
undo() {
    rm -rf "$part"
    # a later attempt may have taken the run up, while this one, whose connection broke, still waited for sbatch
    [ "$(cat "$run_dir/state/attempt" 2>/dev/null)" != "$attempt" ] || rm -rf "$run_dir"
    rmdir "${run_dir%/*}" 2>/dev/null
}
if [ -d "$run_dir" ]; then
    cat >/dev/null # unpacked before a connection broke; another sbatch does no harm, since one job alone can claim the run
else
    rm -rf "$run_dir".part.* # of an attempt whose connection broke
    mkdir "$part" || refuse not-writable "$root"
    if ! error=$( (${unpack:-cat} | tar -xf - --no-same-owner -C "$part" && cd "$part" && sha256sum --quiet -c manifest.sha256) 2>&1); then
        undo
        refuse not-unpacked "$error"
    fi
    if [ -n "$cluster_setup" ]; then # an env setup that lies on the cluster
        cp "$cluster_setup" "$part/env/setup.sh" 2>/dev/null || { undo; refuse no-setup "$cluster_setup"; }
    fi
    mkdir -p "$part/logs" "$part/state"
    mv -T "$part" "$run_dir" 2>/dev/null || { # an earlier attempt, thought dead, may have been first
        rm -rf "$part"
        [ -d "$run_dir" ] || refuse not-writable "$root"
    }
fi
cd "$run_dir" && echo "$attempt" >state/attempt || exit 1

# --- submit ----------------------------------------------------------------------------
umask "$users_umask"  # Slurm hands it on to the job, whose outputs are the user's
# A clean environment: the submitting shell's tokens would end in slurmctld's state, and SBATCH_* would override
# the script's lines. The names that pass are those that sbatch itself needs, and the profile's `pass_env`.
set --
for name in PATH HOME USER LOGNAME SHELL LANG SLURM_CONF SLURM_CLUSTERS $pass_env; do
    eval "value=\${$name-} given=\${$name+1}"
    [ -z "$given" ] || set -- "$@" "$name=$value"
done
if [ "$scheduler" = local ]; then
    env -i "$@" setsid /bin/bash local/start.sh "$ntasks" "$job_name" "$stamp" "$parents" </dev/null >/dev/null 2>&1 &
    echo $! >state/submitted
    say job $!
    exit 0
fi
out=$(env -i "$@" sbatch --parsable job.sbatch 2>state/sbatch.err </dev/null)
code=$?
job=$(printf '%s\n' "$out" | sed -n 's/^\([0-9][0-9]*\)\(;.*\)\{0,1\}$/\1/p' | tail -n 1)
if [ "$code" -eq 0 ] && [ -n "$job" ]; then
    echo "$job" >state/submitted
    # Slurm may accept what its partition will never start (EnforcePartLimits=NO)
    reason=$(squeue ${clusters:+-M "$clusters"} -h -j "$job" -o %r 2>/dev/null </dev/null | tail -n 1)
    case $reason in
        PartitionTimeLimit | PartitionNodeLimit)
            scancel ${clusters:+-M "$clusters"} "$job" </dev/null
            cd / && undo
            refuse "$reason" "$job"
            ;;
    esac
    say job "$job"
else
    error=$(cat state/sbatch.err)
    job=
    # after a time-out the job may exist; and it does where sbatch ended well but its words could not be read
    case $code:$error in 0:* | *[Tt]imed\ out*) job=$(find_job) ;; *) cd / && undo ;; esac
    if [ -n "$job" ]; then
        echo "$job" >state/submitted
        say existing "$job"
    else
        say code "$code"
        say refused sbatch
        printf '%s\n' "$error" | while IFS= read -r line; do say stderr "$line"; done
    fi
fi
