#!/usr/bin/env bash
# A real multi-node Slurm cluster on one Debian 12 machine, for tests.
#
#   slurm-cluster.sh start [N]    install what is missing, start N nodes (default 2); harmless when they run
#   slurm-cluster.sh stop         stop every daemon by its pid; the state stays
#   slurm-cluster.sh status       what runs, and what sinfo says
#   slurm-cluster.sh env          shell lines to eval: SLURM_CONF and the login node's address
#
# Each node is a slurmd with its own host name (UTS namespace) and its own
# /etc/hosts and $SLURM_LAB_DIR/local, its local disk (mount namespace); all else
# is shared, as on a cluster's network file system. By default all talk over
# loopback: node3 is 127.0.10.3. With SLURM_LAB_NET=netns each node also has
# its own network namespace on a bridge, as 10.213.0.3.
# To run all of it inside a network namespace, enter that by nsenter --net=...:
# ip netns exec would hide the host's /sys.
#
# srun has the options of Pyxis that mlmsub uses, by pyxis_standin.c next to this file; image.sh builds an image.
#
# Two clusters can run at the same time if they differ in SLURM_LAB_DIR, SLURM_LAB_CTLD_PORT (by 200 or more) and
# SLURM_LAB_SSH_PORT, and at most one has SLURM_LAB_NET=netns.
#
# Settings, all by environment:
#   SLURM_LAB_DIR=/tmp/slurm-lab  everything this script writes, apart from packages and the user; all must be able
#                                 to read there
#   SLURM_LAB_NET=loopback        or netns
#   SLURM_LAB_ACCOUNTING=1        0: no MariaDB and slurmdbd, so no sacct
#   SLURM_LAB_SSH_PORT=22022      the login node's sshd; 0: none
#   SLURM_LAB_SSH_ADDR=127.0.0.1  where it listens
#   SLURM_LAB_CTLD_PORT=26817     slurmctld; +1 is slurmdbd, +100+i the slurmd of node i
#   SLURM_LAB_USER=labuser        the ordinary user who logs in there; made if missing
#   SLURM_LAB_GPUS=8  SLURM_LAB_CPUS=64  SLURM_LAB_MEM_MB=65536   per node, pretended
#   SLURM_LAB_GPU_TYPE=h100
#   SLURM_LAB_GPU_FILES=          real GPUs, as "/dev/nvidia0 /dev/nvidia1", dealt out to the nodes in equal
#                                 shares in place of pretended ones; a node cannot open those of the others
#   SLURM_LAB_PACKAGES=1          0: all programs are there already, install nothing
#   SLURM_LAB_PYXIS=              a compiled pyxis_standin.c, for a machine without Slurm's headers
set -euo pipefail

DIR=${SLURM_LAB_DIR:-/tmp/slurm-lab}
NET=${SLURM_LAB_NET:-loopback}
ACCOUNTING=${SLURM_LAB_ACCOUNTING:-1}
SSH_PORT=${SLURM_LAB_SSH_PORT:-22022}
SSH_ADDR=${SLURM_LAB_SSH_ADDR:-127.0.0.1}
LOGIN_USER=${SLURM_LAB_USER:-labuser}
GPUS=${SLURM_LAB_GPUS:-8}
CPUS=${SLURM_LAB_CPUS:-64}
MEM_MB=${SLURM_LAB_MEM_MB:-65536}
GPU_TYPE=${SLURM_LAB_GPU_TYPE:-h100}
read -ra GPU_FILES <<<"${SLURM_LAB_GPU_FILES:-}"
PACKAGES=${SLURM_LAB_PACKAGES:-1}
PYXIS=${SLURM_LAB_PYXIS:-}
PYXIS_SOURCE=$(dirname "$(readlink -f "$0")")/pyxis_standin.c
CTLD_PORT=${SLURM_LAB_CTLD_PORT:-26817}
DBD_PORT=$((CTLD_PORT + 1))
BRIDGE=slurmlab0

RUN=$DIR/run                     # pid files, munge socket, mysql socket
export SLURM_CONF=$DIR/etc/slurm.conf

say() { printf 'slurm-cluster: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }
unavailable() { say "$*"; exit 77; } # not here, rather than broken: tests are skipped

# --- processes ---------------------------------------------------------------

# alive NAME COMM: the pid in run/NAME.pid is a running COMM, not another process and not a zombie
alive() {
    local comm state
    [[ -s $RUN/$1.pid ]] || return 1
    read -r _ comm state _ 2>/dev/null <"/proc/$(<"$RUN/$1.pid")/stat" || return 1
    [[ $comm == "($2)" && $state != Z ]]
}

stop_one() {
    local i
    if alive "$1" "$2"; then
        kill "$(<"$RUN/$1.pid")"
        for ((i = 0; i < 200; i++)); do
            alive "$1" "$2" || break
            sleep 0.05
        done
        if alive "$1" "$2"; then kill -9 "$(<"$RUN/$1.pid")"; fi
    fi
    rm -f "$RUN/$1.pid"
}

# wait_for SECONDS COMMAND...: until the command succeeds
wait_for() {
    local end=$((SECONDS + $1))
    shift
    while ((SECONDS < end)); do
        "$@" >/dev/null 2>&1 && return 0
        sleep 0.1
    done
    return 1
}

# --- packages and configuration ----------------------------------------------

install_packages() {
    # libpmix-dev: Slurm's PMIx plugin opens .../pmix2/lib/libpmix.so, which only it ships
    local missing want=(munge slurmctld slurmd slurm-client slurm-wlm-basic-plugins libpmix-dev iproute2)
    ((ACCOUNTING)) && want+=(slurmdbd slurm-wlm-mysql-plugin mariadb-server)
    ((SSH_PORT)) && want+=(openssh-server)
    want+=(squashfs-tools mmdebstrap) # the container images
    [[ -n $PYXIS ]] || want+=(gcc libc6-dev libslurm-dev)
    mapfile -t missing < <(dpkg-query -W -f '${db:Status-Status} ${Package}\n' "${want[@]}" 2>&1 |
        sed -n -e 's/^not-installed //p' -e 's/^config-files //p' -e 's/.*no packages found matching //p')
    ((${#missing[@]})) || return 0
    say "installing ${missing[*]}"
    # no daemon of the packages' own is to start
    [[ -e /usr/sbin/policy-rc.d ]] || {
        printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
        chmod +x /usr/sbin/policy-rc.d
        trap 'rm -f /usr/sbin/policy-rc.d' EXIT
    }
    {
        command -v apt-get && apt-get update -qq &&
            DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
    } >"$DIR/log/apt.log" 2>&1 || unavailable "cannot install ${missing[*]}: see $DIR/log/apt.log"
}

node_addr() { # node_addr INDEX
    if [[ $NET == netns ]]; then echo "10.213.0.$1"; else echo "127.0.10.$1"; fi
}
ctld_addr() { if [[ $NET == netns ]]; then echo 10.213.0.254; else echo 127.0.0.1; fi; }

configure() { # configure N
    local n=$1 i host
    host=$(hostname -s)
    mkdir -p "$DIR"/{etc,run,log,ssh,dev,state,spool,scratch,local}
    chmod 755 "$DIR" "$RUN"

    { cat /etc/hosts; for ((i = 1; i <= n; i++)); do echo "$(node_addr "$i") node$i"; done; } >"$DIR/etc/hosts"

    if ((${#GPU_FILES[@]})); then
        [[ -c $DIR/dev/none ]] || mknod -m 666 "$DIR/dev/none" c 0 0 # no driver: open fails
        ((${#GPU_FILES[@]} % n == 0)) || die "${#GPU_FILES[@]} GPUs cannot be dealt out to $n nodes"
        GPUS=$((${#GPU_FILES[@]} / n))
        for ((i = 1; i <= n; i++)); do
            printf "NodeName=node$i Name=gpu Type=$GPU_TYPE File=%s\n" "${GPU_FILES[@]:(i - 1) * GPUS:GPUS}"
        done >"$DIR/etc/gres.conf"
    else
        # gres/gpu drops a GPU that has no device file; these are copies of /dev/null
        for ((i = 0; i < GPUS; i++)); do
            [[ -c $DIR/dev/nvidia$i ]] || mknod -m 666 "$DIR/dev/nvidia$i" c 1 3
        done
        echo "NodeName=node[1-$n] Name=gpu Type=$GPU_TYPE File=$DIR/dev/nvidia[0-$((GPUS - 1))]" >"$DIR/etc/gres.conf"
    fi
    # no cgroup is used; named here, since looking for it fails where none is mounted on /sys/fs/cgroup
    echo CgroupPlugin=cgroup/v1 >"$DIR/etc/cgroup.conf"
    # PMIx names its directories by user, job and step alone: in a shared /tmp two nodes would clash
    echo "PMIxCliTmpDirBase=$DIR/local" >"$DIR/etc/mpi.conf"
    [[ -e $DIR/etc/plugstack.conf ]] || echo "include $DIR/etc/plugstack.conf.d/*" >"$DIR/etc/plugstack.conf"
    mkdir -p "$DIR/etc/plugstack.conf.d"

    cat >"$SLURM_CONF" <<CONF
ClusterName=lab
SlurmctldHost=$host($(ctld_addr))
SlurmctldPort=$CTLD_PORT
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
# cred_expire also sets how long a requeued job waits before it may start (default 120)
AuthInfo=socket=$RUN/munge/socket,cred_expire=5
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
SlurmctldPidFile=$RUN/slurmctld.pid
SlurmdPidFile=$RUN/%n.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=5
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=512
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=100000,bf_interval=5
ReturnToService=2
KillWait=5
MpiDefault=none
GresTypes=gpu
CONF
    if ((ACCOUNTING)); then
        cat >>"$SLURM_CONF" <<CONF
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$DBD_PORT
# for this connection the munge socket is named here, not in AuthInfo
AccountingStoragePass=$RUN/munge/socket
AccountingStorageTRES=gres/gpu
AccountingStoreFlags=job_comment,job_env,job_script
CONF
        cat >"$DIR/etc/slurmdbd.conf" <<CONF
DbdHost=localhost
DbdPort=$DBD_PORT
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$RUN/munge/socket
PidFile=$RUN/slurmdbd.pid
LogFile=$DIR/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct_db
CONF
        chmod 600 "$DIR/etc/slurmdbd.conf"
    fi
    for ((i = 1; i <= n; i++)); do
        mkdir -p "$DIR/spool/node$i" "$DIR/scratch/node$i"
        chmod 1777 "$DIR/scratch/node$i"
        echo "NodeName=node$i NodeAddr=$(node_addr "$i") Port=$((CTLD_PORT + 100 + i)) CPUs=$CPUS" \
            "RealMemory=$MEM_MB Gres=gpu:$GPU_TYPE:$GPUS" >>"$SLURM_CONF"
    done
    cat >>"$SLURM_CONF" <<CONF
PartitionName=batch Nodes=ALL Default=YES State=UP DefaultTime=00:10:00 MaxTime=04:00:00
PartitionName=interactive Nodes=ALL State=UP DefaultTime=00:10:00 MaxTime=02:00:00
CONF
}

# Slurm looks for the plugins anew at each step, so the daemons need no restart
install_pyxis() {
    local plugin=$DIR/lib/spank_pyxis.so
    mkdir -p "$DIR/lib"
    if [[ -n $PYXIS ]]; then
        cp "$PYXIS" "$plugin.part"
        mv "$plugin.part" "$plugin"
    elif [[ ! $plugin -nt $PYXIS_SOURCE ]]; then
        gcc -std=gnu11 -O2 -Wall -Wextra -Werror -fPIC -shared -o "$plugin.part" "$PYXIS_SOURCE" ||
            die "pyxis_standin.c does not compile"
        mv "$plugin.part" "$plugin"
    fi
    echo "required $plugin local=$DIR/local" >"$DIR/etc/plugstack.conf.d/pyxis.conf"
}

# --- daemons -------------------------------------------------------------------

start_munged() {
    alive munged munged && return
    mkdir -p "$RUN/munge" "$DIR/munge"
    [[ -s $DIR/munge/key ]] || head -c 128 /dev/urandom >"$DIR/munge/key"
    chown -R munge: "$RUN/munge" "$DIR/munge"
    chmod 755 "$RUN/munge" && chmod 700 "$DIR/munge" && chmod 400 "$DIR/munge/key"
    setpriv --reuid munge --regid munge --clear-groups munged \
        --key-file="$DIR/munge/key" --seed-file="$DIR/munge/seed" --socket="$RUN/munge/socket" --pid-file="$RUN/munge/pid" --log-file="$DIR/munge/log"
    cp "$RUN/munge/pid" "$RUN/munged.pid"
}

start_accounting() {
    local sock=$RUN/mysql/socket
    if ! alive mariadbd mariadbd; then
        mkdir -p "$RUN/mysql" && chown mysql: "$RUN/mysql"
        [[ -d $DIR/mysql/mysql ]] || mariadb-install-db --no-defaults --user=mysql --datadir="$DIR/mysql" \
            --auth-root-authentication-method=socket --skip-test-db >"$DIR/log/mysql-install.log" 2>&1
        mariadbd --no-defaults --user=mysql --datadir="$DIR/mysql" --socket="$sock" --skip-networking \
            --pid-file="$RUN/mysql/pid" --innodb-lock-wait-timeout=900 >"$DIR/log/mariadbd.log" 2>&1 &
        echo $! >"$RUN/mariadbd.pid"
        wait_for 30 mariadb-admin --no-defaults --socket="$sock" ping ||
            die "MariaDB did not start: see $DIR/log/mariadbd.log"
    fi
    # slurmdbd.conf has no setting for the socket; the client library reads this variable
    alive slurmdbd slurmdbd || SLURM_CONF=$SLURM_CONF MYSQL_UNIX_PORT=$sock slurmdbd
    wait_for 30 sacctmgr -n show cluster || die "slurmdbd did not start: see $DIR/log/slurmdbd.log"
    # slurmctld must find its cluster registered, or it exits
    [[ -n $(sacctmgr -n show cluster lab) ]] || sacctmgr -i -Q add cluster lab >/dev/null
}

start_node() { # start_node INDEX
    local name=node$1 enter=() hide=() i
    alive "$name" slurmd && return
    if [[ $NET == netns ]]; then
        [[ -e /run/netns/$BRIDGE-$name ]] || {
            ip netns add "$BRIDGE-$name"
            ip link add "slurmlab-$1" type veth peer name eth0 netns "$BRIDGE-$name"
            ip link set "slurmlab-$1" master "$BRIDGE" up
            ip -n "$BRIDGE-$name" link set lo up
            ip -n "$BRIDGE-$name" link set eth0 up
            ip -n "$BRIDGE-$name" addr add "$(node_addr "$1")/24" dev eth0
        }
        enter=(nsenter "--net=/run/netns/$BRIDGE-$name")
    fi
    # CUDA_VISIBLE_DEVICES counts from 0 on every node, so a node must see its own GPUs alone
    for ((i = 0; i < ${#GPU_FILES[@]}; i++)); do
        ((i / GPUS == $1 - 1)) || hide+=("${GPU_FILES[i]}")
    done
    # shellcheck disable=SC2016  # the inner shell is to expand these
    "${enter[@]}" unshare --uts --mount sh -ec '
        name=$1 dir=$2; shift 2
        hostname "$name"
        mount --bind "$dir/etc/hosts" /etc/hosts
        mount --bind "$dir/scratch/$name" "$dir/local"
        for file; do mount --bind "$dir/dev/none" "$file"; done
        exec slurmd -N "$name"' sh "$name" "$DIR" "${hide[@]}"
}

start_sshd() {
    alive sshd sshd && return
    id "$LOGIN_USER" >/dev/null 2>&1 || useradd -m -s /bin/bash -p '*' "$LOGIN_USER"
    [[ -e $DIR/ssh/host_ed25519 ]] || ssh-keygen -q -t ed25519 -N '' -f "$DIR/ssh/host_ed25519"
    [[ -e $DIR/ssh/id_ed25519 ]] || ssh-keygen -q -t ed25519 -N '' -C slurm-lab -f "$DIR/ssh/id_ed25519"
    cp "$DIR/ssh/id_ed25519.pub" "$DIR/ssh/authorized_keys"
    echo "[$SSH_ADDR]:$SSH_PORT $(cut -d' ' -f1,2 "$DIR/ssh/host_ed25519.pub")" >"$DIR/ssh/known_hosts"
    cat >"$DIR/ssh/sshd_config" <<CONF
Port $SSH_PORT
ListenAddress $SSH_ADDR
HostKey $DIR/ssh/host_ed25519
PidFile $RUN/sshd.pid
AuthorizedKeysFile $DIR/ssh/authorized_keys
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
AllowUsers $LOGIN_USER
SetEnv SLURM_CONF=$SLURM_CONF
Subsystem sftp internal-sftp
CONF
    mkdir -p /run/sshd
    /usr/sbin/sshd -f "$DIR/ssh/sshd_config" -E "$DIR/log/sshd.log"
}

all_idle() { [[ $(sinfo -h -N -p batch -o '%T' | grep -cx -e idle -e mixed -e allocated) == "$1" ]]; }

# --- commands -------------------------------------------------------------------

start() {
    local n=${1:-2} i
    [[ $n =~ ^[1-9][0-9]?$ ]] || die "the number of nodes must be 1 to 99, not '$n'"
    [[ $EUID == 0 ]] || unavailable "must be run as root"
    mkdir -p "$DIR/log"
    if alive slurmctld slurmctld; then
        [[ $(<"$DIR/nodes") == "$n" ]] || die "runs with $(<"$DIR/nodes") nodes already: stop it first"
    fi
    ((!PACKAGES)) || install_packages
    configure "$n"
    install_pyxis
    echo "$n" >"$DIR/nodes"
    start_munged
    if [[ $NET == netns ]] && ! ip link show "$BRIDGE" >/dev/null 2>&1; then
        ip link add "$BRIDGE" type bridge
        ip addr add "$(ctld_addr)/24" dev "$BRIDGE"
        ip link set "$BRIDGE" up
    fi
    ((ACCOUNTING)) && start_accounting
    alive slurmctld slurmctld || slurmctld
    for ((i = 1; i <= n; i++)); do start_node "$i"; done
    ((SSH_PORT)) && start_sshd
    # a node that Slurm took out of service, as after a process that could not be killed, would stay so
    sinfo -h -N -p batch -t drain -o %N | xargs -r -I{} scontrol update NodeName={} State=RESUME
    wait_for 30 all_idle "$n" || die "not all nodes came up: see $DIR/log"
    say "$n nodes are up; eval \"\$($0 env)\" to use them"
}

stop() {
    local n i
    n=$(cat "$DIR/nodes" 2>/dev/null || echo 0)
    # end the jobs first, else their slurmstepd would stay behind
    if alive slurmctld slurmctld; then
        squeue -h -o %A | sort -u | xargs -r scancel 2>/dev/null || true
        wait_for 15 sh -c '! squeue -h | grep -q .' || say "some jobs did not end"
    fi
    stop_one sshd sshd
    for ((i = 1; i <= n; i++)); do
        stop_one "node$i" slurmd
        if [[ -e /run/netns/$BRIDGE-node$i ]]; then ip netns del "$BRIDGE-node$i"; fi
    done
    if ip link show "$BRIDGE" >/dev/null 2>&1; then ip link del "$BRIDGE"; fi
    stop_one slurmctld slurmctld
    stop_one slurmdbd slurmdbd
    stop_one mariadbd mariadbd
    stop_one munged munged
}

status() {
    local n i d rc=0
    n=$(cat "$DIR/nodes" 2>/dev/null || echo 0)
    for d in munged mariadbd slurmdbd slurmctld sshd; do
        [[ $d == sshd && $SSH_PORT == 0 ]] && continue
        [[ $d == mariadbd || $d == slurmdbd ]] && ((!ACCOUNTING)) && continue
        if alive "$d" "$d"; then echo "$d: pid $(<"$RUN/$d.pid")"; else echo "$d: not running"; rc=3; fi
    done
    for ((i = 1; i <= n; i++)); do
        if alive "node$i" slurmd; then echo "node$i: pid $(<"$RUN/node$i.pid")"; else echo "node$i: not running"; rc=3; fi
    done
    alive slurmctld slurmctld && sinfo
    return $rc
}

env_lines() {
    echo "export SLURM_CONF=$SLURM_CONF"
    ((SSH_PORT)) || return 0
    echo "export SLURM_LAB_LOGIN=$LOGIN_USER@$SSH_ADDR SLURM_LAB_PORT=$SSH_PORT"
    echo "export SLURM_LAB_KEY=$DIR/ssh/id_ed25519 SLURM_LAB_KNOWN_HOSTS=$DIR/ssh/known_hosts"
}

case ${1:-} in
    start) start "${2:-2}" ;;
    stop) stop ;;
    status) status ;;
    env) env_lines ;;
    *) sed -n '2,/^set -/p' "$0" | sed -e '$d' -e 's/^# \?//' >&2; exit 2 ;;
esac
