# shellcheck shell=sh disable=SC2154  # parameters come as assignments in front

# Submit runs one after the other, each by submit.sh and so with all that it promises: runs on the cluster under /bin/sh.
# The client puts in front: environment.sh, runs_root and order (run ids, each after those that it waits for). On standard
# input comes a compressed tar: submit.sh, common.tar with the files that all runs have, and for each run RUN.sh, its
# parameters, and RUN.tar, its own files.
# Answers with a line `run ID` and what submit.sh said, for each run up to the first that is refused. What a run needs of
# the cluster is looked at for all of them first: where something is missing, none is submitted.
umask_before=$(umask)
umask 077
mkdir -p "$runs_root" 2>/dev/null
find "$runs_root" -maxdepth 1 -name '.workflow.*' -mmin +60 -exec rm -rf {} + 2>/dev/null # of a process that was killed
if ! folder=$(mktemp -d "$runs_root/.workflow.XXXXXX" 2>/dev/null); then
    printf 'run %s\nrefused not-writable\nat %s\n' "${order%% *}" "$runs_root"
    exit 0
fi
trap 'rm -rf "$folder"' EXIT # it holds secrets
trap 'exit 1' HUP INT TERM PIPE
if ! error=$( (gzip -dc | tar -xf - -C "$folder") 2>&1); then
    printf 'run %s\nrefused not-unpacked\nat %s\n' "${order%% *}" "$(echo "$error" | tail -n 1)"
    exit 0
fi
umask "$umask_before"
submit() { # RUN [only_check]
    # shellcheck disable=SC1090,SC1091,SC2034  # what submit.sh reads
    . "$folder/$1.sh" && only_check=${2-} && { [ -z "$only_check" ] || parents=''; }
    # shellcheck disable=SC1091
    . "$folder/submit.sh"
}
for run in $order; do
    answer=$(submit "$run" only_check </dev/null)
    case $answer in *'refused '*) printf 'run %s\n%s\n' "$run" "$answer"; exit 0 ;; esac
done
for run in $order; do
    printf 'run %s\n' "$run"
    answer=$(cat "$folder/common.tar" "$folder/$run.tar" | submit "$run")
    printf '%s\n' "$answer"
    case $answer in *'refused '*) break ;; esac
done
