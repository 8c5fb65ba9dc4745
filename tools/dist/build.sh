#!/usr/bin/env bash
# Builds the packages of `make dist`. Arguments: the build directory, the archives of `make lib` for libibverbs.so.1 and
# libmillstream_preload.so, their flags for the linker, and the machine: this one, or `aarch64` for a wheel and a tarball
# from the cross compiler. DIST_PROFILE names another profile of Cargo than `dist`: `quick` builds in half the time.
#
# Programs and libraries are linked for glibc 2.28 with zig, whose stubs of the C library have the symbol versions of
# that release: the packages work on distributions from 2018 on.
set -euo pipefail
cd "$(dirname "$0")/../.."

build=$(realpath "$1") verbs_archive=$2 preload_archive=$3 link_flags=$4
glibc=2.28
machine=${5:-$(uname -m)}
packages=$build/packages tools=$build/tools/dist/bin
# Prefix of binutils' and gcc's names, and what runs programs for `machine`.
cross='' runner=()
if [ "$machine" != "$(uname -m)" ]; then
    packages=$build/packages-$machine
    cross=$machine-linux-gnu-
    runner=("qemu-$machine" -L "/usr/$machine-linux-gnu")
fi
stage=$packages/stage
profile=${DIST_PROFILE:-dist}
triple=$machine-unknown-linux-gnu
version=$(sed -n '/^\[workspace.package\]/,/^\[/ s/^version = "\(.*\)"/\1/p' Cargo.toml)
export PATH=$tools:$PATH
# Times in archives: that of the commit, so that the same sources give the same packages.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || stat -c %Y CHANGELOG.md)}
export SOURCE_DATE_EPOCH
# bindgen reads this machine's headers of C. zig's are for its own compiler.
BINDGEN_EXTRA_CLANG_ARGS="-I/usr/include -I/usr/include/$machine-linux-gnu -I$(clang -print-resource-dir)/include"
if [ -n "$cross" ]; then
    # The C library's headers for `machine` come first. Those of verbs and libfabric are the same on all machines.
    BINDGEN_EXTRA_CLANG_ARGS="-I/usr/$machine-linux-gnu/include -idirafter /usr/include -I$(clang -print-resource-dir)/include"
    # CMake runs HDF5's test programs of the compiler.
    export CMAKE_CROSSCOMPILING_EMULATOR=${runner[0]} QEMU_LD_PREFIX=${runner[2]}
fi
export BINDGEN_EXTRA_CLANG_ARGS

say() { printf 'dist: %s\n' "$*"; }

program() {
    say "the program, with its own HDF5 and zlib, libmillstream_fabric.so and the libfabric provider"
    # zlib is found by pkg-config unless its build from source is asked for.
    LIBZ_SYS_STATIC=1 cargo-zigbuild zigbuild --profile "$profile" --target "$triple.$glibc" -p millstream -p millstream-fabric-capi \
        -p millstream-libfabric --features millstream/static-hdf5
    local built=$CARGO_TARGET_DIR/$triple/$profile
    install -D -m 755 "$built/millstream" "$stage/bin/millstream"
    install -D -m 755 "$built/libmillstream_fabric_capi.so" "$stage/lib/millstream/c/libmillstream_fabric.so"
    install -D -m 755 "$built/libmillstream_libfabric.so" "$stage/lib/millstream/libmillstream-fi.so"
    say "libmillstream_memory.so.1"
    cargo-zigbuild rustc --profile "$profile" --target "$triple.$glibc" -p millstream-card-capi --lib --crate-type cdylib -- \
        -C link-arg=-Wl,-soname=libmillstream_memory.so.1
    install -D -m 755 "$built/libmillstream_memory.so" "$stage/lib/millstream/c/libmillstream_memory.so.1"
    ln -s libmillstream_memory.so.1 "$stage/lib/millstream/c/libmillstream_memory.so"
}

# link OUT SONAME MAP ARCHIVE. gcc's libgcc_s.so.1, not the unwinder of zig: the C library loads it, too, to cancel threads, and
# their frames have one unwinder.
link() {
    # shellcheck disable=SC2086 # the flags are words
    python3 -m ziglang cc -target "$machine-linux-gnu.$glibc" -o "$1" -Wl,--whole-archive "$4" -Wl,--no-whole-archive $link_flags \
        -Wl,-soname="$2" -Wl,--version-script="$3" "$("${cross}gcc" -print-file-name=libgcc_s.so.1)" -lpthread -ldl -lm -lc
    "${cross}strip" --strip-unneeded "$1"
}

libraries() {
    say "libibverbs.so.1 and libmillstream_preload.so"
    mkdir -p "$stage/lib/millstream"
    link "$stage/lib/millstream/libibverbs.so.1" libibverbs.so.1 crates/capi/libibverbs.map "$verbs_archive"
    link "$stage/lib/millstream/libmillstream_preload.so" libmillstream_preload.so crates/cm/preload.map "$preload_archive"
}

shared_files() {
    say "man pages, completions, headers, data"
    local share=$stage/share
    mkdir -p "$share/man" "$share/millstream/data" "$stage/include/millstream"
    "${runner[@]}" "$stage/bin/millstream" manual --out "$share/man/man1"
    completion bash "$share/bash-completion/completions/millstream"
    completion zsh "$share/zsh/site-functions/_millstream"
    completion fish "$share/fish/vendor_completions.d/millstream.fish"
    mkdir -p "$share/doc/millstream"
    tools/dist/licenses.py "$share/doc/millstream/third-party-licenses.txt"
    cp -r data/sst1m "$share/millstream/data/"
    cp -r sites "$share/millstream/"
    install -D -m 755 tools/slurm/*.sh -t "$share/millstream/slurm"
    cp crates/*/include/*.h examples/kernels/millstream.h "$stage/include/millstream/"
    install -D -m 644 LICENSE-APACHE LICENSE-MIT README.md CHANGELOG.md -t "$share/doc/millstream"
    # Man pages refer to them.
    install -D -m 644 docs/*.md docs/*.json docs/*.svg -t "$share/doc/millstream/docs"
    mkdir -p "$share/pkgconfig"
    for name in millstream millstream-memory; do
        sed -e "s/@VERSION@/$version/" -e 's,^prefix=.*,prefix=${pcfiledir}/../..,' "tools/dist/debian/$name.pc" > "$share/pkgconfig/$name.pc"
    done
}

completion() {
    mkdir -p "$(dirname "$2")"
    "${runner[@]}" "$stage/bin/millstream" completions "$1" > "$2"
}

wheel() {
    say "the Python wheel"
    local bundle=python/millstream/_bundle
    rm -rf "$bundle"
    # shellcheck disable=SC2064 # the path of now
    trap "rm -rf '$PWD/$bundle'" EXIT
    mkdir -p "$bundle/lib"
    cp -r "$stage/bin" "$stage/share" "$bundle/"
    rm -rf "$bundle/share/doc/millstream/"{README.md,CHANGELOG.md,docs} "$bundle/share/pkgconfig"
    cp "$stage"/lib/millstream/lib{ibverbs.so.1,millstream_preload.so} "$bundle/lib/"
    maturin build --quiet --profile "$profile" --strip --manifest-path python/Cargo.toml --target "$triple" --zig \
        --compatibility "manylinux_${glibc/./_}" --out "$packages"
    rm -rf "$bundle"
    local file
    file=$(ls "$packages"/millstream-"$version"-*.whl)
    auditwheel show "$file" | tee "$packages/auditwheel.txt"
    tr '\n' ' ' < "$packages/auditwheel.txt" | grep -q "consistent with the following platform tag: *\"manylinux_${glibc/./_}_$machine\"" ||
        { echo "dist: auditwheel finds another platform tag than manylinux_${glibc/./_}_$machine" >&2; exit 1; }
}

tarball() {
    say "the tarball"
    local name=millstream-$version-$machine-linux
    tar --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" -C "$stage" \
        --transform "s,^\.,$name," -cf - . | gzip -9n > "$packages/$name.tar.gz"
}

export CARGO_TARGET_DIR=$build
rm -rf "$packages"
mkdir -p "$stage"
program
libraries
shared_files
wheel
tarball
if [ -z "$cross" ]; then tools/dist/deb.sh "$stage" "$packages" "$version"; fi
rm -rf "$stage"
say "in $packages:"
find "$packages" \( -name '*.whl' -o -name '*.deb' -o -name '*.tar.gz' \) -exec ls -l --human-readable {} +
