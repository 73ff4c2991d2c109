# shellcheck shell=bash disable=SC2154,SC2034  # job.sbatch sets what is read here, and reads what is set here
#
# The attempts of a run: one for each start of a job of it, each with a folder state/<restart>. job.sbatch sources this.
# state/attempts.jsonl has a line for each attempt that is over; it bounds them, whoever starts a job again. `state/end`
# is the run's last word: it exists once nothing will start the run again by itself.
#
# A run with --chain has several jobs, its links: number `link` of 0 to `chain`. Each waits in the queue until those
# `before` it are over, and works where Slurm has cut the run off; `follow` decides that.

link=$(wc -w <<<"$before")
attempts=$run/state/attempts.jsonl

# The first job that comes for a link is the link. A symbolic link is made whole or not at all, also on a network file
# system, so a second job (an sbatch that arrived late) finds another id here and ends.
claim() {
    local job mine=$run/state/job
    ((link == 0)) || mine+=.$link
    ln -sT "$SLURM_JOB_ID" "$mine" 2>/dev/null
    job=$(readlink "$mine") || no_room
    [[ $job != "$SLURM_JOB_ID" ]] || return 0
    tell "the run ${run##*/} is job $job; job $SLURM_JOB_ID does nothing"
    exit 3
}

# Sets `restart`, the number of attempts so far, and makes its folder `state`; ends here where the run has to stop.
begin() {
    restart=0
    while [[ -d $run/state/$restart ]]; do ((restart += 1)); done
    local previous=$run/state/$((restart - 1)) why
    if ((restart)) && [[ -s $previous/begun ]] && ! grep -qs "\"restart\": $((restart - 1))," "$attempts"; then
        note_cut "$previous"
    fi
    ((link == 0)) || follow
    ((restart)) || look_at_parents
    { mkdir "$run/state/$restart" && echo "$EPOCHSECONDS $SLURM_JOB_ID ${SLURM_RESTART_COUNT:-0}" >"$run/state/$restart/begun"; } || no_room
    rm -f "$run/state/end" # somebody requeued a run that was over
    state=$run/state/$restart
    if [[ -e $run/state/cancelled ]]; then
        tell "the run was cancelled, so restart $restart does nothing"
        finish 143
    elif ((restart)) && why=$(bound "$restart"); then
        tell "the run is not started again: $why"
        finish 75 noted
    fi
    [[ ! $asked ]] || ask_ranks
}

# A later link goes on where Slurm cut the run off: at its time limit, preempted, or with its node. Where the run is over,
# or was cancelled before it began, it takes the others that wait out of the queue, and says what was said before it.
follow() {
    local code=143 job=none cause=cancelled id
    local last='"job": ([0-9]+), "cause": "([^"]*)", "code": ([0-9]+)'
    if ! read -r code job _ 2>/dev/null <"$run/state/end" && ((restart)) && [[ $(tail -n 1 "$attempts") =~ $last ]]; then
        job=${BASH_REMATCH[1]} cause=${BASH_REMATCH[2]} code=${BASH_REMATCH[3]}
    fi
    if [[ ! -e $run/state/end ]]; then
        for id in $before; do # of those that never began Slurm alone knows
            grep -qs "^[0-9]* $id\( \|$\)" "$run"/state/*/begun || case $(state_of "$id") in
                CANCELLED) job=none cause=cancelled code=143 ;;
                NODE_FAIL | BOOT_FAIL) [[ $job != none ]] || cause='node failure' ;;
                PREEMPTED) [[ $job != none ]] || cause=preempted ;;
                TIMEOUT) [[ $job != none ]] || cause='time limit' ;;
                FAILED | OUT_OF_MEMORY) [[ $job != none ]] || job=$id cause=failed code=1 ;; # in the site's prelude
            esac
        done
    fi
    case $cause in 'time limit' | preempted | 'node failure') return ;; esac
    [[ $job != "$SLURM_JOB_ID" ]] || return 0 # somebody requeued this link
    tell "the run is over ($code by job $job); job $SLURM_JOB_ID of its chain does nothing"
    [[ -e $run/state/end ]] || last_word "$code" "$job" "$restart"
    cancel_later
    [[ $code != never ]] || code=1
    exit "$code"
}

# Ends here where a run that this one waits for has not ended as it must. Slurm has looked at most of them already; of a
# chain it knows only that all its links are over.
look_at_parents() {
    local condition parent code
    while read -r condition parent; do
        [[ $parent && $condition != afterany ]] || continue
        for _ in 1 2 3 4 5; do # until a network file system shows what another node wrote
            code=none
            read -r code _ 2>/dev/null <"$parent/state/end" && break
            ls "$parent/state" >/dev/null 2>&1
            sleep 1
        done
        case $condition-$code in
            afterok-0) continue ;;
            afterok-*) tell "not started: the run ${parent##*/} has failed" ;;
            afternotok-0) tell "not started: the run ${parent##*/} has succeeded" ;;
            *) continue ;;
        esac
        last_word never "$SLURM_JOB_ID" 0
        cancel_later
        exit 1
    done <<<"$parents"
}

# Tells the ranks that the time limit is near: a file is seen by all of them, and never too early, unlike a signal.
ask_ranks() {
    asked_at=$SECONDS
    : >"$state/stop"
    [[ ! $script_signal ]] || scancel --signal="$script_signal" "$SLURM_JOB_ID" # its steps alone
}

# Whether the ranks, whose exit code is $1, were asked to stop, saved, and left the rest to the next attempt.
saved_early() {
    [[ ! -s $state/done.json ]] && (($1 == 0 || $1 == 143)) || return
    [[ -s $state/saved || ($script_signal && -e $state/stop && $1 == 0) ]]
}

# Ends this attempt, whose ranks have saved before the time limit, and leaves the rest to the chain's next link, or has
# Slurm start this job again.
start_again() {
    local why saved
    saved="all is saved (iteration $(saved_iteration))" # asked now: a requeue ends this shell's children
    check_margin "saving took $((SECONDS - asked_at)) s" $((SECONDS - asked_at + 120))
    note 'time limit' 0 "$SECONDS" || why='state/attempts.jsonl cannot be written (is the file system full?)'
    if [[ ${why-} ]] || why=$(bound $((restart + 1))); then
        tell "the time limit is near, $saved, and the run is not started again: $why"
    elif [[ ! $ended ]] && later >/dev/null; then
        tell "the time limit is near and $saved: the chain's next job goes on"
        exit 75
    elif [[ ! $ended ]] && why=$(scontrol requeue "$SLURM_JOB_ID" 2>&1); then # after SIGTERM it would undo an scancel
        tell "the time limit is near and $saved: requeued"
        sleep 300 # Slurm ends this shell; what it does at that is not the run's last word
        exit 75
    else
        tell "the time limit is near, $saved, and Slurm does not requeue this job (${why:-it was cancelled})." \
            "To go on, submit the same again; with --requeue or --chain it does so by itself"
    fi
    finish 75 noted
}

# Says so where --stop-before leaves a save too little time: 120 s are for Slurm, whose signal may be late by a minute.
check_margin() { # WHAT SECONDS, those that --stop-before should have
    ((stop_before && stop_before < $2)) || return 0
    local advice="$1: --stop-before should be $2 or more, not $stop_before"
    tell "$advice"
    echo "$advice" >"$run/state/advice"
}

# The ranks were told to end by Slurm alone, saved and left: in the grace time of a preemption the job itself is not
# told before its end. Were this shell to end now, the job would count as done.
await_preemption() {
    if scontrol show job -o "$SLURM_JOB_ID" 2>/dev/null | grep -q 'PreemptTime=[0-9]'; then
        tell "preempted; all is saved (iteration $(saved_iteration))"
        until [[ $ended ]]; do sleep 1; done
    fi
    finish 143
}

# The run's last word, its exit code. Where Slurm has ended the job and starts it again (preempted, a node lost, requeued
# by somebody) there is none. That is Slurm's decision, and known by now. A second argument: the attempt has its line.
finish() {
    local shown='' restarts=0
    for _ in 1 2 3; do # Slurm's SIGTERM may end the question itself
        [[ $shown =~ \ Restarts=([0-9]+) ]] || shown=" $(scontrol show job -o "$SLURM_JOB_ID" 2>/dev/null)"
    done
    [[ ! $shown =~ \ Restarts=([0-9]+) ]] || restarts=${BASH_REMATCH[1]}
    if [[ $asked && $ended && ! -s $state/saved && $shown == *' Reason=TimeLimit '* ]]; then
        check_margin "the time limit came before all was saved" $((stop_before + 120))
    fi
    if (($1 && restarts > ${SLURM_RESTART_COUNT:-0})); then
        tell "Slurm has ended this attempt, and will start the run again (saved: iteration $(saved_iteration))"
        exit 143
    fi
    if [[ -e $run/state/$((restart + 1)) ]]; then # taken for lost by Slurm, this attempt came back
        tell "restart $((restart + 1)) goes on in place of this one"
        exit 143
    fi
    if (($1)) && [[ ! ${2-} && ! -L $state/first_failure ]] && cut_off "$shown" >"$state/cut" && later >/dev/null; then
        tell "Slurm has ended this job (saved: iteration $(saved_iteration)); the chain's next one asks why"
        exit "$1"
    fi
    [[ ${2-} ]] || note "$(cause_of "$1")" "$1" "$SECONDS"
    echo "=== $(date -u +%Y-%m-%dT%H:%M:%SZ)  exit code $1 ===" # first: who follows the log reads until there is an end
    last_word "$1" "$SLURM_JOB_ID" "$restart"
    cancel_later
    exit "$1"
}

# Whether Slurm may have ended the job for another reason than scancel, and which. What it says of a job that is
# completing is not all that it will say of it; so the next link, which hears that, has to judge, and believes this only
# where Slurm has forgotten the job by then.
cut_off() {
    [[ ! -e $run/state/cancelled ]] || return
    case $1 in
        *\ PreemptTime=[0-9]*) echo preempted ;;
        *\ Reason=TimeLimit\ *) echo 'time limit' ;;
        *\ Reason=NodeDown\ *) echo 'node failure' ;;
        *\ Restarts=*) return 1 ;;
    esac
}

# Slurm's state of a job that is not this one, or nothing. Accounting may hear of an end a little later.
state_of() {
    local known
    known=$(scontrol show job -o "$1" 2>/dev/null | sed -n 's/.* JobState=\([A-Z_]*\).*/\1/p')
    if [[ $known ]]; then echo "$known"; else sacct -n -X -P -j "$1" -o State 2>/dev/null | tail -n 1 | cut -d ' ' -f 1; fi
}

# CODE JOB RESTART. Not in a trap: that would also fire at a requeue, which needs the secrets.
last_word() {
    rm -rf "$run/secrets"
    echo "$@" >"$run/state/.end" && mv "$run/state/.end" "$run/state/end"
}

# --- the rest of a chain ---------------------------------------------------------

# The links behind this one that are in the queue, the last one first; failure where there are none.
later() {
    local queue job dir command
    ((link < chain)) || return
    queue=$(squeue -h -u "$(id -un)" -o '%i|%Z|%o' 2>/dev/null </dev/null) || return 0 # nobody knows
    while IFS='|' read -r job dir command; do # the user may have started other jobs there
        [[ $dir -ef $run && $command =~ ^(.*/)?job\.sbatch( [0-9 ]+)?$ ]] || continue
        [[ ! ${BASH_REMATCH[1]} || ${BASH_REMATCH[1]} -ef $run ]] || continue
        ((job <= SLURM_JOB_ID)) || echo "$job"
    done <<<"$queue" | sort -rn | grep .
}

cancel_later() {
    local job
    for job in $(later); do scancel "$job"; done
}

# --- what is known of attempts ---------------------------------------------------

# Why there may be no attempt number $1, or failure.
bound() {
    local used=0 idle=0 newest=-1 seconds iteration
    while read -r seconds iteration; do
        ((used += seconds))
        if ((iteration > newest)); then idle=0 newest=$iteration; else ((idle += 1)); fi
    done < <(sed -n 's/.*"seconds": \([0-9]*\), "iteration": \(-\{0,1\}[0-9]*\)}$/\1 \2/p' "$attempts" 2>/dev/null)
    if (($1 > max_restarts)); then
        echo "it has been started again $max_restarts times, the most allowed (max_restarts)"
    elif ((max_total_time && used >= max_total_time)); then
        echo "it has used $used s of the $max_total_time s allowed (max_total_time)"
    elif ((idle >= 2)) && { ((newest >= 0)) || [[ $trains ]]; }; then
        echo "two attempts in a row have saved nothing newer ($(iteration_text "$newest")), so a third would not either"
    else
        return 1
    fi
}

# Appends CAUSE CODE SECONDS of this attempt.
note() { write_note "$restart" "$SLURM_JOB_ID" "$@"; }

write_note() { # RESTART JOB CAUSE CODE SECONDS
    printf '{"restart": %d, "job": %d, "cause": "%s", "code": %d, "seconds": %d, "iteration": %d}\n' \
        "$@" "$(saved_number)" >>"$attempts"
}

# The line of an attempt that Slurm cut off, before this one prints anything: its last sign is the log's.
note_cut() { # its folder
    local begun job count seen cause code=143
    read -r begun job count <"$1/begun"
    { seen=$(stat -Lc %Y /dev/fd/3 "$1" "$run/state/events.jsonl" 2>/dev/null | sort -n | tail -n 1); } 3>&2
    if [[ $job/$count == "$SLURM_JOB_ID/${SLURM_RESTART_COUNT:-0}" ]]; then
        cause=RUNNING # a slurmctld that lost its state starts a job a second time, and does not know it
    elif [[ $job == "$SLURM_JOB_ID" ]]; then # the last line is this attempt's own
        cause=$(sacct -D -n -X -P -j "$job" -o State 2>/dev/null | tail -n 2 | head -n 1)
        [[ $cause != RUNNING ]] || cause='' # accounting lags behind
    else
        cause=$(state_of "$job")
        [[ $cause ]] || cause=$(cat "$1/cut" 2>/dev/null)
    fi
    case $cause in
        'time limit' | preempted | 'node failure') ;;
        PREEMPTED) cause=preempted ;;
        NODE_FAIL) cause='node failure' ;;
        TIMEOUT) cause='time limit' ;;
        REQUEUED) cause=requeued ;;
        COMPLETED) cause=finished code=0 ;;
        RUNNING | PENDING | COMPLETING | SUSPENDED)
            tell "job $job of this run is not over; job $SLURM_JOB_ID does nothing"
            exit 3
            ;;
        *) cause='cut off' ;;
    esac
    ((seen = ${seen:-0} > begun ? seen - begun : 0))
    write_note $((restart - 1)) "$job" "$cause" "$code" "$seen"
}

cause_of() { # exit code
    case $1 in 0) echo finished ;; 143) echo ended ;; *) echo failed ;; esac
}

# The newest iteration that the run has saved, or -1: what the ranks answered to a stop, or Megatron's line in the log.
saved_number() {
    {
        sed -n 's/^[^0-9]*\([0-9][0-9]*\).*/\1/p' "$run"/state/*/saved
        grep -haoE 'successfully saved checkpoint from iteration +[0-9]+' "$run"/logs/*
        echo -1
    } 2>/dev/null | grep -oE -- '-?[0-9]+' | sort -n | tail -n 1
}

saved_iteration() { iteration_text "$(saved_number)"; }

iteration_text() { if (($1 < 0)); then echo none; else echo "$1"; fi; }

no_room() {
    tell "cannot write to the run directory $run (is the file system full?)"
    exit 73
}

tell() { echo "mlmsub: $*" >&2; }
