#!/usr/bin/env bash
# Tests the packages of `make dist-aarch64` in a root file system of Debian arm64 under qemu-user: no compiler, no network.
# Arguments: the folder of packages, a folder for the root file system. Runs as root.
#
# The kernel starts qemu for programs of aarch64 in a user namespace of the test only (binfmt_misc, Linux 6.7).
set -euo pipefail
cd "$(dirname "$0")/../.."

packages=$(realpath "$1")
mkdir -p "$2"
roots=$(realpath "$2")
release=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)
qemu=${QEMU_AARCH64:-/usr/bin/qemu-aarch64-static}
glibc=2.28
programs=bash,coreutils,findutils,grep,gzip,ibverbs-utils,libc-bin,libfabric-bin,libgcc-s1,libstdc++6,perftest,python3,python3-venv,sed,tar

fail() {
    echo "test-dist-aarch64: $*" >&2
    exit 1
}

[ "$(id -u)" = 0 ] || fail "root is needed, to make a root file system and to enter it"
ls "$packages"/*.whl > /dev/null 2>&1 || fail "$packages has no packages; \`make dist-aarch64\` builds them"

# Only unpacked: programs of arm64 do not run while it is made.
bare() {
    [ -f "$roots/arm64.tar" ] && return
    echo "test-dist-aarch64: making the root file system"
    cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources 2> /dev/null > "$roots/sources" || true
    local options=(--quiet --variant=extract --architectures=arm64 "--include=$programs")
    mmdebstrap "${options[@]}" "$release" "$roots/arm64.partial.tar" ||
        mmdebstrap "${options[@]}" "$release" "$roots/arm64.partial.tar" "$roots/sources"
    mv "$roots/arm64.partial.tar" "$roots/arm64.tar"
}

# The wheel of numpy, which the test installs beside ours, for the Python of the release.
wheels() {
    [ -d "$roots/wheels" ] && return
    python3 -m pip download --quiet --only-binary :all: --platform manylinux2014_aarch64 --platform manylinux_2_28_aarch64 \
        --python-version "$(apt-cache show python3 | sed -n 's/^Version: \([0-9]*\.[0-9]*\).*/\1/p' | head -1)" \
        --dest "$roots/wheels.partial" numpy
    mv "$roots/wheels.partial" "$roots/wheels"
}

# Every program and library of the packages is for aarch64, and needs no symbol of a later C library.
symbols() {
    local files=$roots/files file latest
    rm -rf "$files"
    mkdir -p "$files/tarball" "$files/wheel"
    tar -C "$files/tarball" -xf "$packages"/millstream-*-aarch64-linux.tar.gz
    python3 -m zipfile -e "$packages"/millstream-*_aarch64.whl "$files/wheel"
    find "$files" -type f \( -path '*/bin/*' -o -name '*.so' -o -name '*.so.*' \) | sort > "$roots/list"
    while read -r file; do
        aarch64-linux-gnu-readelf --file-header "$file" | grep -q 'Machine: *AArch64' || fail "$file is not for aarch64"
        latest=$(aarch64-linux-gnu-readelf --version-info --wide "$file" | grep -o 'GLIBC_[0-9.]*' | sed 's/GLIBC_//' | sort -Vu | tail -1)
        printf '  glibc %-5s %9d bytes  %s\n' "$latest" "$(stat -c %s "$file")" "${file#"$files"/}"
        [ "$(printf '%s\n' "$latest" "$glibc" | sort -V | tail -1)" = "$glibc" ] || fail "$file needs glibc $latest"
    done < "$roots/list"
    rm -rf "$files"
}

# enter ROOT COMMAND...: runs a command in a root file system, with own processes, mounts and network.
enter() {
    unshare --user --map-root-user --mount --pid --net --ipc --fork --kill-child sh -c '
        set -e
        qemu=$1 root=$2
        shift 2
        mount --make-rprivate /
        mount -t proc proc "$root/proc"
        mount -t binfmt_misc binfmt_misc "$root/proc/sys/fs/binfmt_misc"
        # The header of an ELF file: 64-bit, little-endian, a program or a shared object, for aarch64 (183).
        elf="\\x7fELF\\x02\\x01\\x01\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x02\\x00\\xb7\\x00"
        mask="\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\x00\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\xfe\\xff\\xff\\xff"
        printf "%s" ":aarch64:M::$elf:$mask:$qemu:F" > "$root/proc/sys/fs/binfmt_misc/register"
        mount -t tmpfs tmpfs "$root/dev"
        mkdir "$root/dev/shm"
        mount -t tmpfs tmpfs "$root/dev/shm"
        for device in null zero full random urandom; do
            touch "$root/dev/$device"
            mount --bind "/dev/$device" "$root/dev/$device"
        done
        ln -s /proc/self/fd "$root/dev/fd"
        ip link set lo up
        exec chroot "$root" /usr/bin/env -i PATH=/usr/bin:/bin:/usr/sbin:/sbin HOME=/root LC_ALL=C.UTF-8 "$@"
    ' sh "$qemu" "$@"
}

# inside TEST: runs a test of tools/dist/inside.sh in a fresh copy of the root file system.
inside() {
    local root=$roots/root
    rm -rf "$root"
    mkdir -p "$root"
    tar -C "$root" -xf "$roots/arm64.tar" --exclude=./dev/\*
    mkdir -p "$root/packages" "$root/test" "$root/opt" "$root/root"
    cp "$packages"/*.{whl,tar.gz} "$root/packages/"
    cp -r "$roots/wheels" "$root/packages/wheels"
    cp tools/dist/inside.sh python/README.md "$root/test/"
    echo "127.0.0.1 localhost" > "$root/etc/hosts"
    echo "root:x:0:0:root:/root:/bin/bash" > "$root/etc/passwd"
    enter "$root" true || fail "NOT RUN: programs of aarch64 cannot be run here. That needs $qemu and a kernel" \
        "whose user namespaces have their own binfmt_misc (Linux 6.7 with CONFIG_BINFMT_MISC); this is Linux $(uname -r)"
    echo "test-dist-aarch64: $1"
    enter "$root" bash /test/inside.sh "$1"
    rm -rf "$root"
}

bare
wheels
echo "test-dist-aarch64: symbols"
symbols
inside tarball-emulated
inside wheel-emulated
echo "test-dist-aarch64: all packages pass"
