/*
 * A test double for NVIDIA's Pyxis, so that containerised jobs can be tested on any machine with Slurm.
 *
 * It imitates Pyxis 0.24 on enroot 4.1.2 as far as mlmsub uses and diagnoses them:
 *   - the options --container-image, --container-mounts, --container-workdir, --container-env and
 *     --no-container-mount-home; srun refuses any other --container-* option by itself;
 *   - one container per node and step, built as the job's user in a user namespace that maps this user alone, so
 *     file permissions are those of the user; every task of the node joins it, so they share /tmp;
 *   - a read-only root; fresh /tmp and /run; the host's /proc, /sys, /dev, /etc/hosts, /etc/resolv.conf and PMIx
 *     directory; no home, but HOME exists on the root file system and is where tasks start;
 *   - the image's /etc/environment wins over the job's variables, unless --container-env names them;
 *     RANK and LOCAL_RANK are set if the image has PYTORCH_VERSION;
 *   - the texts and exit codes of the errors.
 * It does not imitate: registries (every import fails as it does without a network), named, saved or writable
 * containers, batch scripts in a container, entrypoints, the mount source "umount", mount flags other than ro and
 * rw, enroot's configuration.
 * Beyond Pyxis: an image may be a directory, which needs no unpacking.
 *
 * A squashfs is unpacked into memory: on a disk its thousands of files take ten times as long.
 *
 * Plugin argument: local=DIR, a directory that no two nodes share, writable by every user.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/openat2.h>
#include <pwd.h>
#include <sched.h>
#include <slurm/spank.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

SPANK_PLUGIN(pyxis, 1)

enum { MAX_MOUNTS = 256, SYSTEM_MOUNTS = 8, POLL_US = 2000, POLLS_PER_S = 1000000 / POLL_US, BUILD_S = 600, JOIN_S = 30 };

struct mount_entry {
    const char *source, *target;
    bool read_only;
    int tree; /* the source as a detached mount, -1 for a tmpfs */
};

/* what the tasks of one node and step agree on; in shared memory */
struct shared {
    atomic_int claimed;
    atomic_int state;
    atomic_uint joined;
    pid_t leader;
};
enum { BUILDING, READY, FAILED };

static struct {
    const char *image, *workdir, *env;
    struct mount_entry mounts[MAX_MOUNTS];
    int mount_count;
} args;
static const char *local_dir;
static char work_dir[PATH_MAX]; /* this step's directory in local_dir; in the container's namespace a tmpfs */
static struct shared *shared;

__attribute__((format(printf, 1, 2))) static int fail(const char *format, ...)
{
    char text[2 * PATH_MAX];
    va_list list;

    va_start(list, format);
    vsnprintf(text, sizeof(text), format, list);
    va_end(list);
    slurm_error("pyxis: %s", text);
    return -1;
}

/* --- options ------------------------------------------------------------------------------------------------ */

static bool is_path(const char *text)
{
    return text[0] == '/' || strncmp(text, "./", 2) == 0;
}

/* SRC[:DST[:FLAG[+FLAG]...]]; the text is cut up in place and kept */
static int add_mount(char *text)
{
    char *entry = strdup(text);
    char *source = strsep(&text, ":"), *target = strsep(&text, ":"), *flags = text, *flag;
    const char *problem = NULL;
    bool read_only = false;

    if (!entry)
        return -1;
    while ((flag = strsep(&flags, "+")))
        if (strcmp(flag, "ro") == 0)
            read_only = true; /* an unknown flag passes in silence, as in Pyxis */
    if (!is_path(source) && strcmp(source, "tmpfs") != 0)
        problem = "mount source must be a relative path, an absolute path, \"tmpfs\" or \"umount\"";
    else if (!is_path(target ? target : source))
        problem = "mount target must be a relative path or an absolute path";
    else if (args.mount_count == MAX_MOUNTS)
        problem = "too many mounts";
    if (problem) {
        slurm_error("pyxis: %s", problem);
        slurm_error("pyxis: could not add mount entry: %s", entry);
    } else {
        target = target ? target : source;
        /* the root is what a relative target is relative to */
        args.mounts[args.mount_count++] = (struct mount_entry){source, target + (*target == '.'), read_only, -1};
    }
    free(entry);
    return problem ? -1 : 0;
}

static int add_mounts(char *rest)
{
    char *entry;

    while ((entry = strsep(&rest, ","))) {
        if (!*entry)
            return fail("--container-mounts: invalid format: %s", entry);
        if (add_mount(entry) < 0)
            return -1;
    }
    return 0;
}

enum { IMAGE, MOUNTS, WORKDIR, ENV, NO_HOME };
static int take_option(int which, const char *value, int remote);

static struct spank_option options[] = {
    [IMAGE] = {"container-image", "PATH", "[pyxis] a squashfs file or a directory", 1, IMAGE, take_option},
    [MOUNTS] = {"container-mounts", "SRC[:DST[:FLAGS]][,...]", "[pyxis] bind mounts", 1, MOUNTS, take_option},
    [WORKDIR] = {"container-workdir", "PATH", "[pyxis] where the tasks start", 1, WORKDIR, take_option},
    [ENV] = {"container-env", "NAME[,...]", "[pyxis] variables that the image may not override", 1, ENV, take_option},
    [NO_HOME] = {"no-container-mount-home", NULL, "[pyxis] no home (the default)", 0, NO_HOME, take_option},
};

/* Slurm calls it in sbatch and srun, where a failure refuses the option, and again in slurmstepd */
static int take_option(int which, const char *value, int remote)
{
    const char **const single[] = {[IMAGE] = &args.image, [WORKDIR] = &args.workdir, [ENV] = &args.env};
    char *copy;
    (void)remote;

    if (which == NO_HOME)
        return 0;
    if (!value || !*value)
        return fail("--%s: argument required", options[which].name);
    if (which != MOUNTS && *single[which] && strcmp(*single[which], value) != 0)
        return fail("--%s specified multiple times", options[which].name);
    if (!(copy = strdup(value)))
        return -1;
    if (which == MOUNTS)
        return add_mounts(copy);
    *single[which] = copy;
    return 0;
}

/* --- small tools -------------------------------------------------------------------------------------------- */

/* join A and B into a buffer of PATH_MAX; a path that is too long fails later, as a missing file */
static char *join(char *buffer, const char *a, const char *b)
{
    if (snprintf(buffer, PATH_MAX, "%s/%s", a, b) >= PATH_MAX)
        buffer[0] = '\0';
    return buffer;
}

/* make the parents of PATH and, if wanted, PATH itself, as a directory; whoever uses PATH reports the failures */
static void make_dirs(const char *path, bool itself)
{
    char copy[3 * PATH_MAX];

    snprintf(copy, sizeof(copy), "%s", path);
    for (char *slash = strchr(copy + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        mkdir(copy, 0755);
        *slash = '/';
    }
    if (itself)
        mkdir(copy, 0755);
}

static void make_target(const char *path, bool directory)
{
    make_dirs(path, directory);
    if (!directory) {
        int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
        if (fd >= 0)
            close(fd);
    }
}

static int write_file(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    bool done = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);

    if (fd >= 0)
        close(fd);
    return done ? 0 : fail("couldn't write %s: %s", path, strerror(errno));
}

static bool is_directory(int fd)
{
    struct stat st;
    return fstat(fd, &st) == 0 && S_ISDIR(st.st_mode);
}

/* --- the image ---------------------------------------------------------------------------------------------- */

/* every failure of enroot: the child's code, what Pyxis wanted of it, what enroot wrote */
static int enroot_failed(pid_t child, int code, const char *wanted, const char *image)
{
    slurm_error("pyxis: child %d failed with error code: %d", child, code);
    slurm_error("pyxis: failed to %s: %s", wanted, image);
    return fail("printing enroot log file:");
}

static int import_registry_image(const char *image)
{
    const char *name = strncmp(image, "docker://", 9) == 0 ? image + 9 : image;
    size_t host = strcspn(name, "#/");
    bool has_host = name[host] == '#' || (name[host] == '/' && memchr(name, '.', host));

    slurm_spank_log("pyxis: importing docker image: %s", name);
    if (strncmp(image, "dockerd://", 10) == 0) {
        enroot_failed(getpid(), 1, "import docker image", image);
        return fail("    Cannot connect to the Docker daemon at unix:///var/run/docker.sock. "
                    "Is the docker daemon running?");
    }
    enroot_failed(getpid(), 6, "import docker image", name);
    slurm_error("pyxis:     [INFO] Querying registry for permission grant");
    return fail("    curl: (6) Could not resolve host: %.*s", has_host ? (int)host : 20,
                has_host ? name : "registry-1.docker.io");
}

static int unpack(const char *image, const char *rootfs)
{
    char log_path[PATH_MAX], line[1024];
    int status;
    pid_t child = fork();

    join(log_path, work_dir, "log");
    if (child == 0) {
        int log = open(log_path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        dup2(log, STDOUT_FILENO);
        dup2(log, STDERR_FILENO);
        execlp("unsquashfs", "unsquashfs", "-no-progress", "-quiet", "-no-xattrs", "-processors", "1", "-dest",
               rootfs, image, (char *)NULL);
        fprintf(stderr, "unsquashfs: %s\n", strerror(errno));
        _exit(127);
    }
    if (child < 0 || waitpid(child, &status, 0) != child)
        return fail("couldn't run unsquashfs: %s", strerror(errno));
    /* 2: only what is beyond a user failed, as device nodes and foreign owners */
    if (WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 2))
        return 0;
    enroot_failed(child, WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status),
                  "create container filesystem for image", image);
    FILE *log = fopen(log_path, "re");
    while (log && fgets(line, sizeof(line), log))
        slurm_error("pyxis:     %.*s", (int)strcspn(line, "\n"), line);
    if (log)
        fclose(log);
    return -1;
}

/* leaves in ROOTFS (PATH_MAX) the directory that is to be the container's root */
static int prepare_image(char *rootfs)
{
    char magic[4] = "";
    struct stat st;
    int fd;

    if (!is_path(args.image))
        return import_registry_image(args.image);
    if (stat(args.image, &st) < 0 || (fd = open(args.image, O_RDONLY | O_CLOEXEC)) < 0) {
        int error = errno;
        enroot_failed(getpid(), 1, "create container filesystem for image", args.image);
        return fail("    [ERROR] %s: %s", strerror(error), args.image);
    }
    bool squashfs = read(fd, magic, sizeof(magic)) == sizeof(magic) && memcmp(magic, "hsqs", 4) == 0;
    close(fd);
    if (S_ISDIR(st.st_mode))
        return realpath(args.image, rootfs) ? 0 : -1;
    if (squashfs)
        return unpack(args.image, join(rootfs, work_dir, "rootfs"));
    enroot_failed(getpid(), 1, "create container filesystem for image", args.image);
    return fail("    [ERROR] Invalid image format: %s", args.image);
}

/* --- the container ------------------------------------------------------------------------------------------ */

/*
 * Make a mount target in UPPER, the writable layer over the image: in the overlay itself the user may not write to
 * directories that belong to root. The image's symbolic links are followed, within the image.
 */
static void make_target_in_layer(const char *rootfs, const char *upper, const char *target, bool directory)
{
    struct open_how how = {.flags = O_PATH | O_CLOEXEC, .resolve = RESOLVE_IN_ROOT};
    char there[PATH_MAX], link[64], real[PATH_MAX], layered[3 * PATH_MAX], *end;
    int root = open(rootfs, O_PATH | O_DIRECTORY | O_CLOEXEC), fd;

    /* cut from the end until what is left exists in the image */
    snprintf(there, sizeof(there), "%s", target);
    while ((fd = (int)syscall(SYS_openat2, root, *there ? there : "/", &how, sizeof(how))) < 0 &&
           (end = strrchr(there, '/')))
        *end = '\0';
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, real, sizeof(real) - 1);
    real[length > 0 ? length : 0] = '\0';
    close(root);
    close(fd);
    if (strncmp(real, rootfs, strlen(rootfs)) != 0)
        return;
    snprintf(layered, sizeof(layered), "%s%s%s", upper, real + strlen(rootfs), target + strlen(there));
    make_target(layered, directory);
}

/* the image knows the user, as after enroot's own hook */
static void add_user(const char *rootfs, const char *upper)
{
    char from[PATH_MAX], to[PATH_MAX], line[1024];
    const struct passwd *user = getpwuid(getuid());
    FILE *in = fopen(join(from, rootfs, "etc/passwd"), "re"), *out;

    make_dirs(join(to, upper, "etc/passwd"), false);
    out = fopen(to, "we");
    while (in && out && fgets(line, sizeof(line), in))
        fputs(line, out);
    if (user && user->pw_uid != 0 && out)
        fprintf(out, "%s:x:%u:%u:%s:%s:/bin/sh\n", user->pw_name, user->pw_uid, user->pw_gid, user->pw_gecos,
                user->pw_dir);
    if (in)
        fclose(in);
    if (out)
        fclose(out);
}

static int enter_new_namespaces(void)
{
    char map[64];
    uid_t uid = geteuid();
    gid_t gid = getegid();

    if (unshare(CLONE_NEWUSER | CLONE_NEWNS) < 0)
        return fail("couldn't create user and mount namespaces: %s", strerror(errno));
    /* after a change of user the files of /proc/self belong to root, for this user to write none of them */
    prctl(PR_SET_DUMPABLE, 1);
    if (write_file("/proc/self/setgroups", "deny") < 0)
        return -1;
    snprintf(map, sizeof(map), "%u %u 1", uid, uid);
    if (write_file("/proc/self/uid_map", map) < 0)
        return -1;
    snprintf(map, sizeof(map), "%u %u 1", gid, gid);
    if (write_file("/proc/self/gid_map", map) < 0)
        return -1;
    return mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL);
}

static int mount_failed(const struct mount_entry *entry, int error)
{
    slurm_error("pyxis: container start failed with error code: 1");
    slurm_error("pyxis: printing enroot log file:");
    return fail("    enroot-mount: failed to mount: %s at %s/rootfs%s: %s", entry->source, work_dir, entry->target,
                strerror(error));
}

/* take hold of the sources while the host's paths are still there */
static int open_sources(struct mount_entry *mounts, int count)
{
    for (int i = 0; i < count; i++) {
        if (strcmp(mounts[i].source, "tmpfs") == 0)
            continue;
        mounts[i].tree = open_tree(AT_FDCWD, mounts[i].source, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_RECURSIVE);
        if (mounts[i].tree >= 0)
            continue;
        if (mounts[i].source[0] == '/' && errno == ENOENT) {
            slurm_error("pyxis: --container-mounts: source path does not exist: %s", mounts[i].source);
            return fail("couldn't create enroot start configuration script");
        }
        return mount_failed(&mounts[i], errno);
    }
    return 0;
}

static int attach(const struct mount_entry *entry)
{
    struct mount_attr read_only = {.attr_set = MOUNT_ATTR_RDONLY};
    const char *target = entry->target;
    int rc;

    /* also here, not in the layer alone: the target may lie in an earlier mount */
    make_target(target, entry->tree < 0 || is_directory(entry->tree));
    if (entry->tree < 0) {
        rc = mount("tmpfs", target, "tmpfs", MS_NOSUID | MS_NODEV, NULL);
    } else {
        rc = move_mount(entry->tree, "", AT_FDCWD, target, MOVE_MOUNT_F_EMPTY_PATH);
        close(entry->tree);
    }
    if (rc == 0 && entry->read_only)
        rc = mount_setattr(AT_FDCWD, target, AT_RECURSIVE, &read_only, sizeof(read_only));
    return rc == 0 ? 0 : mount_failed(entry, errno);
}

/* make the image, under the writable layer UPPER, this process's root */
static int change_root(const char *rootfs, const char *upper)
{
    char work[PATH_MAX], root[PATH_MAX], data[4 * PATH_MAX];

    if (mkdir(join(work, work_dir, "work"), 0755) < 0 || mkdir(join(root, work_dir, "root"), 0755) < 0)
        return fail("couldn't create %s: %s", root, strerror(errno));
    snprintf(data, sizeof(data), "userxattr,lowerdir=%s,upperdir=%s,workdir=%s", rootfs, upper, work);
    if (mount("overlay", root, "overlay", 0, data) < 0)
        return fail("couldn't mount an overlay on %s: %s", rootfs, strerror(errno));
    /* the old root comes to lie on the new one, and is taken away */
    if (chdir(root) < 0 || syscall(SYS_pivot_root, ".", ".") < 0 || umount2(".", MNT_DETACH) < 0 || chdir("/") < 0)
        return fail("couldn't change the root to %s: %s", rootfs, strerror(errno));
    return 0;
}

static int system_mounts(spank_t sp, struct mount_entry *mounts)
{
    static const char *const bound[] = {"/proc", "/sys", "/dev", "/etc/hosts", "/etc/resolv.conf"};
    static char pmix[PATH_MAX];
    int count = 0;

    mounts[count++] = (struct mount_entry){"tmpfs", "/tmp", false, -1};
    mounts[count++] = (struct mount_entry){"tmpfs", "/run", false, -1};
    for (size_t i = 0; i < sizeof(bound) / sizeof(*bound); i++)
        if (access(bound[i], F_OK) == 0)
            mounts[count++] = (struct mount_entry){bound[i], bound[i], false, -1};
    if (spank_getenv(sp, "PMIX_SERVER_TMPDIR", pmix, sizeof(pmix)) == ESPANK_SUCCESS && access(pmix, F_OK) == 0)
        mounts[count++] = (struct mount_entry){pmix, pmix, false, -1};
    return count;
}

/* everything that happens once per node and step; leaves this process inside */
static int build_container(spank_t sp, const char *home)
{
    struct mount_attr read_only = {.attr_set = MOUNT_ATTR_RDONLY};
    struct mount_entry system[SYSTEM_MOUNTS], *all[SYSTEM_MOUNTS + MAX_MOUNTS];
    char rootfs[PATH_MAX], upper[PATH_MAX];
    int count = 0, system_count = system_mounts(sp, system);

    mkdir(work_dir, 0700);
    if (enter_new_namespaces() < 0)
        return -1;
    if (mount("tmpfs", work_dir, "tmpfs", 0, "mode=755") < 0 || mkdir(join(upper, work_dir, "upper"), 0755) < 0)
        return fail("couldn't mount a tmpfs on %s: %s", work_dir, strerror(errno));
    if (prepare_image(rootfs) < 0)
        return -1;
    if (open_sources(system, system_count) < 0 || open_sources(args.mounts, args.mount_count) < 0)
        return -1;
    for (int i = 0; i < system_count; i++)
        all[count++] = &system[i];
    for (int i = 0; i < args.mount_count; i++)
        all[count++] = &args.mounts[i];

    for (int i = 0; i < count; i++)
        make_target_in_layer(rootfs, upper, all[i]->target, all[i]->tree < 0 || is_directory(all[i]->tree));
    make_target_in_layer(rootfs, upper, home, true);
    add_user(rootfs, upper);
    if (change_root(rootfs, upper) < 0)
        return -1;
    for (int i = 0; i < count; i++)
        if (attach(all[i]) < 0)
            return -1;
    if (mount_setattr(AT_FDCWD, "/", 0, &read_only, sizeof(read_only)) < 0)
        return fail("couldn't make the root read-only: %s", strerror(errno));
    return 0;
}

/* a task that waits does not outlive slurmstepd */
static bool pause_for(int poll, int limit_s, pid_t parent)
{
    usleep(POLL_US);
    return poll < limit_s * POLLS_PER_S && getppid() == parent;
}

/* the leader's namespaces live as long as the leader, which waits until all have joined */
static int join_container(void)
{
    char path[64];
    const char *const names[] = {"user", "mnt"};
    pid_t parent = getppid();
    int fds[2], polls = 0;

    while (atomic_load(&shared->state) == BUILDING && pause_for(polls++, BUILD_S, parent))
        ;
    if (atomic_load(&shared->state) != READY)
        return fail("container was not started successfully by another task");
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof(path), "/proc/%d/ns/%s", shared->leader, names[i]);
        if ((fds[i] = open(path, O_RDONLY | O_CLOEXEC)) < 0)
            return fail("couldn't open %s: %s", path, strerror(errno));
    }
    for (int i = 0; i < 2; i++) {
        if (setns(fds[i], 0) < 0)
            return fail("couldn't join the %s namespace: %s", names[i], strerror(errno));
        close(fds[i]);
    }
    atomic_fetch_add(&shared->joined, 1);
    return 0;
}

static int lead_container(spank_t sp, const char *home)
{
    uint32_t tasks = 1;
    pid_t parent = getppid();
    int polls = 0, rc = build_container(sp, home);

    spank_get_item(sp, S_JOB_LOCAL_TASK_COUNT, &tasks);
    shared->leader = getpid();
    atomic_store(&shared->state, rc == 0 ? READY : FAILED);
    while (rc == 0 && atomic_load(&shared->joined) < tasks - 1 && pause_for(polls++, JOIN_S, parent))
        ;
    return rc;
}

/* --- the environment ---------------------------------------------------------------------------------------- */

static bool in_list(const char *list, const char *name)
{
    size_t length = strlen(name);

    for (; list; list = strchr(list, ',') ? strchr(list, ',') + 1 : NULL)
        if (strncmp(list, name, length) == 0 && (list[length] == ',' || !list[length]))
            return true;
    return false;
}

/* NAME=VALUE lines of the image; returns whether it is an image of PyTorch */
static bool apply_image_environment(spank_t sp)
{
    char *line = NULL, *value, unused[1];
    size_t size = 0;
    bool pytorch = false;
    FILE *file = fopen("/etc/environment", "re");

    while (file && getline(&line, &size, file) > 0) {
        line[strcspn(line, "\n")] = '\0';
        if (line[0] == '#' || !(value = strchr(line, '=')))
            continue;
        *value++ = '\0';
        pytorch |= strcmp(line, "PYTORCH_VERSION") == 0;
        bool host_has = spank_getenv(sp, line, unused, sizeof(unused)) != ESPANK_ENV_NOEXIST;
        if (!(host_has && in_list(args.env, line)))
            spank_setenv(sp, line, value, 1);
    }
    free(line);
    if (file)
        fclose(file);
    return pytorch;
}

static void set_number(spank_t sp, const char *name, spank_item_t item)
{
    char text[16];
    uint32_t number = 0; /* both items are 32 bits wide */

    spank_get_item(sp, item, &number);
    snprintf(text, sizeof(text), "%u", number);
    spank_setenv(sp, name, text, 1);
}

static void set_environment(spank_t sp)
{
    char pmix[PATH_MAX];

    if (apply_image_environment(sp)) {
        set_number(sp, "RANK", S_TASK_GLOBAL_ID);
        set_number(sp, "LOCAL_RANK", S_TASK_ID);
    }
    if (spank_getenv(sp, "PMIX_SERVER_TMPDIR", pmix, sizeof(pmix)) == ESPANK_SUCCESS) {
        spank_setenv(sp, "PMIX_MCA_gds", "hash", 0);
        spank_setenv(sp, "PMIX_MCA_psec", "native", 0);
    }
}

/* --- Slurm calls these -------------------------------------------------------------------------------------- */

int slurm_spank_init(spank_t sp, int ac, char **av)
{
    spank_context_t context = spank_context();

    if (context != S_CTX_LOCAL && context != S_CTX_ALLOCATOR && context != S_CTX_REMOTE)
        return 0;
    for (int i = 0; i < ac; i++)
        if (strncmp(av[i], "local=", 6) == 0)
            local_dir = av[i] + 6;
    for (size_t i = 0; i < sizeof(options) / sizeof(*options); i++)
        if (spank_option_register(sp, &options[i]) != ESPANK_SUCCESS)
            return -1;
    return 0;
}

/* in slurmstepd, before it forks the tasks */
int slurm_spank_user_init(spank_t sp, int ac, char **av)
{
    uint32_t job = 0, step = 0;
    (void)ac, (void)av;

    if (!args.image)
        return 0;
    if (!local_dir)
        return fail("no local=DIR in the plugin's configuration");
    spank_get_item(sp, S_JOB_ID, &job);
    spank_get_item(sp, S_JOB_STEPID, &step);
    snprintf(work_dir, sizeof(work_dir), "%s/pyxis_%u.%u", local_dir, job, step);
    shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return shared == MAP_FAILED ? fail("mmap: %s", strerror(errno)) : 0;
}

/* in each task, as the job's user, before Slurm looks for the program to run */
int slurm_spank_task_init(spank_t sp, int ac, char **av)
{
    char home[PATH_MAX] = "";
    mode_t mask;
    int rc;
    (void)ac, (void)av;

    if (!args.image)
        return 0;
    /* proctrack/linuxproc spares what is named slurmstepd, so a cancel would wait for the start to end */
    prctl(PR_SET_NAME, "pyxis");
    const struct passwd *user = getpwuid(getuid());
    if (spank_getenv(sp, "HOME", home, sizeof(home)) != ESPANK_SUCCESS || home[0] != '/')
        snprintf(home, sizeof(home), "%s", user && user->pw_dir[0] == '/' ? user->pw_dir : "/");
    mask = umask(022);
    rc = atomic_exchange(&shared->claimed, 1) == 0 ? lead_container(sp, home) : join_container();
    umask(mask);
    if (rc < 0)
        return -1;
    if (chdir(home) < 0 && chdir("/") < 0)
        return fail("couldn't chdir to /: %s", strerror(errno));
    if (args.workdir && chdir(args.workdir) < 0)
        return fail("couldn't chdir to %s: %s", args.workdir, strerror(errno));
    set_environment(sp);
    return 0;
}

/* in slurmstepd, after the last task; what lay in the directory went with the container */
int slurm_spank_exit(spank_t sp, int ac, char **av)
{
    (void)sp, (void)ac, (void)av;
    if (shared)
        rmdir(work_dir);
    return 0;
}
