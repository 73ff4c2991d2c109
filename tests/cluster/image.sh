#!/usr/bin/env bash
# Build the container image of the cluster tests: a small Debian 12 without compilers.
#
#   image.sh            build it unless it is there, and print its folder
#
# The folder holds the image twice: rootfs/ (a directory) and image.sqsh (what `enroot import` would write).
# It has bash, coreutils, procps, python3 and the shared libraries that a CPython of uv or pyenv and torch on the
# CPU need, so these can be bind mounted into it. It is built from this machine's own Debian package sources,
# once for each version of this script, and is readable by everyone.
#
# Needs root, mmdebstrap and squashfs-tools. Setting, by environment:
#   MLMSUB_TEST_CACHE=/var/tmp/mlmsub-tests   where images are kept
set -euo pipefail

CACHE=${MLMSUB_TEST_CACHE:-/var/tmp/mlmsub-tests}
PACKAGES=bash,coreutils,procps,python3
PACKAGES+=,libssl3,libffi8,libsqlite3-0,zlib1g,libbz2-1.0,liblzma5,libreadline8,libncursesw6,libuuid1,libexpat1
PACKAGES+=,libgomp1,libstdc++6,libnuma1

die() { printf 'image: %s\n' "$*" >&2; exit 1; }
unavailable() { printf 'image: %s\n' "$*" >&2; exit 77; } # not here, rather than broken: tests are skipped

# this machine's own sources of Debian 12 packages; where there are none mmdebstrap takes its default
sources() { grep -ls '^[^#]*\bbookworm\b' /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list || true; }

build() { # build FOLDER
    local files=() paths=() path
    mapfile -t files < <(sources)
    for path in /usr/share/{doc,man,info,locale}; do paths+=("--dpkgopt=path-exclude=$path/*"); done
    # the result is thrown away if the machine stops halfway, so dpkg need not wait for the disk
    mmdebstrap --mode=root --variant=essential --include="$PACKAGES" "${paths[@]}" --dpkgopt=force-unsafe-io \
        --aptopt='Acquire::Check-Valid-Until "false"' bookworm "$1/rootfs" "${files[@]}" >"$1/log" 2>&1 ||
        unavailable "mmdebstrap failed: $(tail -n 3 "$1/log")"
    # the container gets the host's devices, and an ordinary user could not unpack device nodes
    rm -rf "$1/rootfs/dev" && mkdir "$1/rootfs/dev"
    # the image's own variables, where enroot keeps them
    cat >"$1/rootfs/etc/environment" <<ENV
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
IMAGE_SAYS=image
FOO=from-image
ENV
    mksquashfs "$1/rootfs" "$1/image.sqsh" -comp zstd -Xcompression-level 3 -all-root -no-progress -quiet \
        >>"$1/log" 2>&1 || die "mksquashfs failed: $(tail -n 3 "$1/log")"
    chmod 755 "$1"
    chmod 644 "$1/image.sqsh"
}

main() {
    local folder part start=$SECONDS
    folder=$CACHE/image-$(sha256sum "$0" | cut -c -12)
    if [[ ! -d $folder ]]; then
        [[ $EUID == 0 ]] || unavailable "must be run as root"
        mkdir -p "$CACHE"
        part=$(mktemp -d "$folder.XXXXXX")
        # shellcheck disable=SC2064  # the folder of now
        trap "rm -rf '$part'" EXIT
        build "$part"
        # whoever comes first wins; the other's is removed by the trap
        mv -T "$part" "$folder" 2>/dev/null || [[ -d $folder ]] || die "cannot write to $CACHE"
        printf 'image: built in %d s: %s as a directory, %s packed\n' $((SECONDS - start)) \
            "$(du -sh "$folder/rootfs" | cut -f 1)" "$(du -h "$folder/image.sqsh" | cut -f 1)" >&2
    fi
    echo "$folder"
}

main
