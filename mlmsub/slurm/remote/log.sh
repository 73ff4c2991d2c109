# shellcheck shell=sh disable=SC2154,SC2015  # parameters come as assignments in front; `a && b || c` is meant

# Print a run's log, from byte `offset` on: runs on the cluster under /bin/sh. The client puts in front:
# environment.sh, clusters, run_dir, job, follow (1 or empty) and offset. Following ends when the run has ended and all
# of its log is printed.
ended() {
    job=$(readlink "$run_dir/state/job") || job=$submitted # an sbatch that was late may have made the job that runs
    [ ! -s "$run_dir/state/end" ] || return 0
    if [ -e "$run_dir/local" ]; then ! kill -0 "$job" 2>/dev/null; return; fi
    # done also where all its jobs ended without a last word: cancelled, out of time, their nodes lost
    links=
    read -r _ links 2>/dev/null <"$run_dir/state/submitted"
    for id in "$job" $links; do
        state=$(squeue ${clusters:+-M "$clusters"} -h -t all -j "$id" -o %T 2>&1 </dev/null | tail -n 1)
        case $state in '' | *Invalid\ job\ id*) ;; *) is_final "$state" || return ;; esac
    done
}
set -- "$run_dir"/logs/*.log
submitted=$job
[ -d "$run_dir" ] || { echo "no run directory $run_dir" >&2; exit 3; }
told=
while :; do
    if [ -n "$follow" ] && [ -z "$told" ] && ! [ -f "$1" ]; then
        echo "waiting for job $job to start: $(ask_queue -j "$job" -o '%T (%r)')" >&2
        told=1
    fi
    if ended; then last=1; else last=; fi
    set -- "$run_dir"/logs/*_"$job"_*.log
    [ -f "$1" ] || set -- "$run_dir"/logs/*.log
    if [ -f "$1" ]; then
        size=$(wc -c <"$1")
        if [ "$size" -gt "$offset" ]; then
            tail -c +$((offset + 1)) "$1" | head -c $((size - offset))
            offset=$size
        fi
    fi
    [ -n "$follow" ] && [ -z "$last" ] || break
    sleep 0.5
done
