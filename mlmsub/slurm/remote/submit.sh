# shellcheck shell=sh disable=SC2154,SC2015  # parameters come as assignments in front; `a && b || c` is meant

# Submit one run: runs on the cluster under /bin/sh, with the run directory as a tar on standard input. The client
# puts in front: environment.sh, run_dir scheduler clusters pass_env twins image sources script cluster_setup ntasks
# job_name stamp chain parents unpack (the program that undoes the compression).
# Answers with lines `key value`; the exit code is 0 whenever there is an answer.
#
# A run is 1 + `chain` jobs, its links. Each waits for all before it, and has their ids as arguments of the job script.
# state/links holds the ids so far; it becomes state/submitted once all are there.
#
# `parents` has a line `CONDITION RUN_DIRECTORY` for each run to wait for; the condition is afterok, afterany or
# afternotok, as Slurm calls it. Slurm knows no "one of these has succeeded, and ...", so for a chain its links are
# waited for, and attempts.sh looks at what the parent itself says before the work begins.
users_umask=$(umask)
umask 077
say() { printf '%s %s\n' "$1" "$2"; }
refuse() { say refused "$1"; say at "$2"; exit 0; }

root=${run_dir%/*/*}

# --- a run that is there already -------------------------------------------------
why_no_queue() { squeue 2>&1 >/dev/null </dev/null | tail -n 1; }
find_link() { # IDS: the link that follows these
    [ "$scheduler" != local ] || return 0
    queue=$(ask_all -t all) || return
    jobs_of "$run_dir" | while read -r job state before; do
        [ "$before" = "$1" ] || continue
        # of a job that it refuses Slurm may keep a record too: failed, and never started
        case $state in FAILED | CANCELLED) [ -L "$run_dir/state/job" ] || continue ;; esac
        echo "$job"
    done | head -n 1
}
links=
if [ -e "$run_dir/state/withdrawn" ]; then # by an attempt whose connection broke, and which may still be at it
    for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do [ ! -d "$run_dir" ] || sleep 1; done
    rm -rf "$run_dir"
fi
if [ -d "$run_dir" ]; then
    links=$(cat "$run_dir/state/submitted" 2>/dev/null) && { say existing "$links"; exit 0; }
    links=$(cat "$run_dir/state/links" 2>/dev/null)
    [ -n "$links" ] || links=$(readlink "$run_dir/state/job") || links=$(find_link '') || refuse no-queue "$(why_no_queue)"
fi
existed=$links
[ "$scheduler" = local ] || command -v sbatch >/dev/null || refuse no-sbatch "$PATH"

# --- a run of the same content that may still be at work ----------------------------
dependency=
is_twin() { # DIRECTORY: whether that run is at work; one that was cancelled, and is not quite gone, is waited for
    [ -d "$1" ] || return
    if [ "$scheduler" = local ]; then
        [ ! -s "$1/state/end" ] && kill -0 "$(cat "$1/state/submitted")" 2>/dev/null
        return
    fi
    [ -n "${queue-}" ] || queue=$(ask_all -t all) || refuse twin-unknown "$(why_no_queue)"
    live=$(jobs_of "$1" | while read -r id state _; do
        # one that has had its last word completes, unless somebody has requeued it since
        is_final "$state" || { [ -s "$1/state/end" ] && [ "$state" = COMPLETING ]; } || printf ':%s' "$id"
    done)
    [ -n "$live" ] || return
    [ -e "$1/state/cancelled" ] || return 0
    dependency=${dependency:+$dependency,}afterany$live
    return 1
}
while read -r twin; do
    [ -z "$twin" ] || [ -d "$run_dir" ] || ! is_twin "$twin" || { say twin "$(cat "$twin/state/submitted")"; exit 0; }
done <<END
$twins
END

# --- the runs that it waits for -----------------------------------------------------
wait_for() { # CONDITION RUN_DIRECTORY
    if read -r code _ 2>/dev/null <"$2/state/end"; then
        case $1-$code in
            afterok-0 | afterany-*) return ;;
            afterok-*) refusal="parent-failed" ;;
            afternotok-0) refusal="parent-succeeded" ;;
            *) return ;;
        esac
    elif ! jobs=$(cat "$2/state/submitted" 2>/dev/null); then
        refusal="parent-unknown"
    else
        case $jobs in
            *' '*) term=afterany:$(echo "$jobs" | tr ' ' :) ;;
            *) term=$1:$(readlink "$2/state/job" || echo "$jobs") ;; # an sbatch that was late may have made its job
        esac
        dependency=${dependency:+$dependency,}$term
        return
    fi
    [ -n "$links" ] || refuse "$refusal" "${2##*/}"
}
while read -r condition parent; do
    [ -z "$parent" ] || wait_for "$condition" "$parent"
done <<END
$parents
END

# --- what the job will need --------------------------------------------------------
free() { df -P "$1" "${run_dir%/*}" 2>/dev/null | awk 'NR == 2 { print $4 }'; }
check_needs() {
    mkdir -p "${run_dir%/*}" 2>/dev/null && [ -w "${run_dir%/*}" ] || refuse not-writable "$root"
    [ "$(free -k)" -ge 10240 ] || refuse no-space "$root"
    inodes=$(free -i)
    case $inodes in '' | - | *[!0-9]*) ;; *) [ "$inodes" -eq 0 ] || [ "$inodes" -ge 1000 ] || refuse no-inodes "$root" ;; esac
    if [ -n "$image" ] && [ ! -r "$image" ]; then refuse no-image "$image"; fi
    printf '%s' "$sources" | while IFS= read -r source; do
        [ -e "$source" ] || { echo "$source"; break; }
    done >"${run_dir%/*}/.missing.$$"
    missing=$(cat "${run_dir%/*}/.missing.$$") && rm -f "${run_dir%/*}/.missing.$$"
    [ -z "$missing" ] || refuse no-mount-source "$missing"
    [ -z "$script" ] || [ -r "$script" ] || refuse no-script "$script"
}

# --- unpack: whole or not at all -----------------------------------------------------
part=$run_dir.part.$$
attempt=$(uname -n)-$$
newest() { [ "$(cat "$run_dir/state/attempt" 2>/dev/null)" = "$attempt" ]; }
undo() {
    rm -rf "$part"
    # a later attempt may have taken the run up, while this one, whose connection broke, still waited for sbatch
    ! newest || rm -rf "$run_dir"
    rmdir "${run_dir%/*}" 2>/dev/null
}
unpack_run() {
    rm -rf "$run_dir".part.* # of an attempt whose connection broke
    mkdir "$part" || refuse not-writable "$root"
    # -i: what the runs of a workflow share comes as an archive of its own before the run's
    if ! error=$( (${unpack:-cat} | tar -xif - --no-same-owner -C "$part" && cd "$part" && sha256sum --quiet -c manifest.sha256) 2>&1); then
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
}
[ -n "$links" ] || check_needs
[ -z "${only_check-}" ] || exit 0 # workflow.sh asks all runs before it submits the first
# One that is there was unpacked before a connection broke. Where its job may come late, another sbatch does no harm:
# one job alone can claim a link.
if [ -d "$run_dir" ]; then cat >/dev/null; else unpack_run; fi
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
withdraw() { # all that was submitted of the run, the last link first, and the run itself
    newest || return 0 # a later attempt goes on with them
    [ -z "$links" ] || touch state/withdrawn state/cancelled # a link that starts in spite of it ends at once
    for id in $(echo "$links" | tr ' ' '\n' | sort -rn); do
        scancel ${clusters:+-M "$clusters"} "$id" </dev/null
    done
    for _ in 1 2 3 4 5 6 7 8 9 10; do # one that has begun writes until it ends
        [ ! -L state/job ] || [ -z "$(ask_queue -j "${links%% *}" -o %i)" ] || sleep 1
    done
    cd / && undo
}
count() { echo "$#"; }
submit_link() { # NAME=VALUE...: one more link; where there is to be none, it does not come back
    # an sbatch of an attempt that was thought dead may have made a second job for a link
    others=$([ -z "$existed" ] || { queue=$(ask_all) && jobs_of "$run_dir" | cut -d ' ' -f 1; })
    waits=$(echo "$links $others" | tr -s ' \n' '\n' | grep . | sort -nu | tr '\n' : | sed 's/:$//')
    waits=$dependency${waits:+${dependency:+,}afterany:$waits}
    # shellcheck disable=SC2086  # ids
    out=$(env -i "$@" sbatch --parsable ${waits:+"--dependency=$waits" --kill-on-invalid-dep=yes} \
        ${links:+"--output=$run_dir/logs/${job_name}_${links%% *}_$stamp.log"} job.sbatch $links 2>state/sbatch.err </dev/null)
    code=$?
    error=$(cat state/sbatch.err)
    job=$(printf '%s\n' "$out" | sed -n 's/^\([0-9][0-9]*\)\(;.*\)\{0,1\}$/\1/p' | tail -n 1)
    # after a time-out the job may exist; and it does where sbatch ended well but its words could not be read
    case $code:$job:$error in
        0:[0-9]*) return ;;
        0:* | *[Tt]imed\ out*) job=$(find_link "$links") && existed=${existed:-$job} ;;
        *)
            job=''
            if [ -n "$existed" ]; then # links of an earlier submission may be at work: what they do stays
                # shellcheck disable=SC2086  # ids
                echo "Slurm refused job $(($(count $links) + 1)) of the chain: $error" >state/advice
                return
            fi
            withdraw
            ;;
    esac
    [ -z "$job" ] || return 0
    say code "$code"
    say refused sbatch
    printf '%s\n' "$error" | while IFS= read -r line; do say stderr "$line"; done
    exit 0
}
[ "$chain" -eq 0 ] || [ -e state/links ] || : >state/links
# shellcheck disable=SC2086  # ids
while [ "$(count $links)" -le "$chain" ]; do
    newest || exit 0 # nobody listens any more
    [ ! -s state/end ] || break # the run is over
    job=$([ -z "$existed" ] || find_link "$links")
    if [ -z "$job" ]; then
        submit_link "$@"
        [ -n "$job" ] || break # as many as Slurm takes
        # Slurm may accept what its partition will never start (EnforcePartLimits=NO)
        reason=$([ -n "$links" ] || ask_queue -j "$job" -o %r | tail -n 1)
        case $reason in
            PartitionTimeLimit | PartitionNodeLimit)
                links=$job
                withdraw
                refuse "$reason" "$job"
                ;;
        esac
    fi
    links=${links:+$links }$job
    echo "$links" >state/links
done
mv state/links state/submitted 2>/dev/null || echo "$links" >state/submitted
if [ -n "$existed" ]; then say existing "$links"; else say job "$links"; fi
