#!/usr/bin/env bash
# Tests the packages of `make dist` in bare root file systems: no compiler, no development packages, no network.
# Arguments: the folder of packages, a folder for the root file systems. Runs as root.
set -euo pipefail
cd "$(dirname "$0")/../.."

packages=$(realpath "$1")
mkdir -p "$2"
roots=$(realpath "$2")
release=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)
# Verbs programs to run, and the Python of the release. Nothing of Millstream needs more than python3 and python3-numpy.
programs=perftest,ibverbs-utils,libfabric-bin,python3-venv,python3-numpy,python3-pytest

[ "$(id -u)" = 0 ] || { echo "test-dist: root is needed, to make root file systems and to enter them" >&2; exit 1; }
ls "$packages"/*.whl > /dev/null 2>&1 || { echo "test-dist: $packages has no packages; \`make dist\` builds them" >&2; exit 1; }

# bare NAME OPTIONS: the archive of a root file system of this machine's release, with the package sources of this machine.
bare() {
    local name=$1
    shift
    if [ ! -f "$roots/$name.tar" ]; then
        echo "test-dist: making the root file system $name"
        cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources 2> /dev/null > "$roots/sources" || true
        mmdebstrap --quiet --variant=minbase "$@" "$release" "$roots/$name.partial.tar" ||
            mmdebstrap --quiet --variant=minbase "$@" "$release" "$roots/$name.partial.tar" "$roots/sources"
        mv "$roots/$name.partial.tar" "$roots/$name.tar"
    fi
}

# inside NAME TEST: runs a test of tools/dist/inside.sh in a fresh copy of the root file system.
inside() {
    local root=$roots/root
    rm -rf "$root"
    mkdir -p "$root"
    tar -C "$root" -xf "$roots/$1.tar" --exclude=./dev/\*
    mkdir -p "$root/packages" "$root/test"
    cp "$packages"/*.{whl,deb,tar.gz} "$root/packages/"
    cp -r "$roots/wheels" "$root/packages/wheels"
    cp tools/dist/inside.sh python/README.md "$root/test/"
    # A bare root has no file of host names.
    echo "127.0.0.1 localhost" > "$root/etc/hosts"
    echo "test-dist: $2 in $1"
    # Own processes and mounts, which end with the test; an own network without interfaces other than `lo`.
    unshare --mount --pid --net --ipc --fork --kill-child sh -c '
        set -e
        root=$1
        mount --make-rprivate /
        mount -t proc proc "$root/proc"
        mount -t tmpfs tmpfs "$root/dev"
        mkdir "$root/dev/shm"
        mount -t tmpfs tmpfs "$root/dev/shm"
        for device in null zero full random urandom; do
            touch "$root/dev/$device"
            mount --bind "/dev/$device" "$root/dev/$device"
        done
        ln -s /proc/self/fd "$root/dev/fd"
        ip link set lo up
        exec chroot "$root" /usr/bin/env -i PATH=/usr/bin:/bin:/usr/sbin:/sbin HOME=/root LC_ALL=C.UTF-8 bash /test/inside.sh "$2"
    ' sh "$root" "$2"
    rm -rf "$root"
}

lint() {
    echo "test-dist: lintian"
    lintian --fail-on error,warning --suppress-tags initial-upload-closes-no-bugs "$packages"/*.deb
}

# Wheels that the tests install beside ours, for the Python of the release.
wheels() {
    [ -d "$roots/wheels" ] && return
    python3 -m pip download --quiet --only-binary :all: --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 \
        --python-version "$(apt-cache show python3 | sed -n 's/^Version: \([0-9]*\.[0-9]*\).*/\1/p' | head -1)" \
        --dest "$roots/wheels.partial" numpy pytest
    mv "$roots/wheels.partial" "$roots/wheels"
}

size=$(stat -c %s "$packages"/*.whl)
[ "$size" -le 25000000 ] || { echo "test-dist: the wheel has $size bytes, more than 25 MB" >&2; exit 1; }
lint
wheels
bare minimal
bare programs --include="$programs"
inside minimal tarball
inside minimal debian
inside programs debian-programs
inside programs wheel
echo "test-dist: all packages pass"
