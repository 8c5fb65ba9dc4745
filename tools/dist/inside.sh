#!/bin/bash
# Runs in a bare root file system (tools/dist/test.sh): installs one package and uses it.
set -euo pipefail

say() { printf '  %s\n' "$*"; }

# The program needs no library beyond the C library and the compiler's runtime.
libraries_are_there() {
    local program=$1 missing
    missing=$(ldd "$program" | grep -v 'linux-vdso\|ld-linux\|libc\.so\|libm\.so\|libdl\.so\|libpthread\.so\|librt\.so\|libutil\.so\|libgcc_s\.so' || true)
    [ -z "$missing" ] || { echo "$program needs more than the C library: $missing" >&2; exit 1; }
}

smoke() {
    local program=$1 home=$2
    cd "$(mktemp -d)"
    "$program" --version
    say "demo"
    "$program" demo --replay 50 --out demo > demo.txt || { cat demo.txt; exit 1; }
    [ -s demo/camera.bu0.h5 ] && ls demo/event-*.svg > /dev/null
    say "stencil"
    "$program" stencil --grid 256x256 --iterations 20 --verify > stencil.txt || { cat stencil.txt; exit 1; }
    card "$program"
    no_device "$program" "$home"
}

# card PROGRAM [emulated]: the self-test of a card, and a WebAssembly kernel.
card() {
    local program=$1
    say "card with a WebAssembly kernel"
    "$program" card serve smoke --memory 64MiB --listen 127.0.0.1:7480 > serve.txt &
    local card=$!
    until grep -q listens serve.txt 2> /dev/null; do sleep 0.1; done
    printf '%s' '(module $nothing (import "millstream_1" "result" (func $result (param i32 i64))) (memory (export "memory") 1)
        (func (export "run") (call $result (i32.const 0) (i64.const 7))))' > nothing.wat
    "$program" card selftest 127.0.0.1:7480 > selftest.txt || { cat selftest.txt; exit 1; }
    "$program" card lease 127.0.0.1:7480 --for 60 > /dev/null
    "$program" card load 127.0.0.1:7480 0 nothing.wat > /dev/null
    "$program" card start 127.0.0.1:7480 0 --wait 30 > start.txt 2>&1 || true
    if [ "${2:-}" = emulated ] && grep -q 'memory, is too large (0x4000000)' start.txt; then
        say "NOT RUN: the kernel. It maps card memory twice (mremap of size 0), which this qemu-user refuses"
    else
        grep -q 'results \[7' start.txt || { cat start.txt; exit 1; }
    fi
    kill -INT $card
    wait $card
}

# Commands without a device.
no_device() {
    local program=$1 home=$2
    say "model"
    "$program" model explain "$home/share/millstream/sites/recipe-baseline.toml" "write client server.u280" > /dev/null
    say "torus"
    "$program" torus simulate --dimensions 2x2x1 > /dev/null
    say "completions"
    "$program" completions bash > completions.bash
    grep -q _millstream completions.bash
}

# emulated PROGRAM HOME: the same under qemu-user.
emulated() {
    local program=$1 home=$2
    cd "$(mktemp -d)"
    "$program" --version
    "$program" --help > /dev/null
    say "devices"
    "$program" devices > devices.txt
    grep -q 'mill0 .*soft device' devices.txt || { cat devices.txt; exit 1; }
    say "stream files"
    "$program" stream unpack "$home/share/millstream/data/sst1m" camera > /dev/null
    "$program" stream check camera/*.mfs > /dev/null
    say "demo"
    "$program" demo --replay 2 --out demo > demo.txt || { cat demo.txt; exit 1; }
    [ -s demo/camera.bu0.h5 ] && ls demo/event-*.svg > /dev/null
    say "stencil"
    "$program" stencil --grid 256x256 --iterations 20 --verify > stencil.txt || { cat stencil.txt; exit 1; }
    card "$program" emulated
    no_device "$program" "$home"
}

devinfo() {
    say "ibv_devinfo"
    "$1" run -- ibv_devinfo > devinfo.txt
    grep -q 'hca_id:.*mill0' devinfo.txt
}

verbs_programs() {
    local program=$1
    devinfo "$program"
    say "ib_write_bw"
    "$program" run -- ib_write_bw -n 200 > server.txt 2>&1 &
    local server=$!
    for _ in $(seq 100); do
        if "$program" run -- ib_write_bw -n 200 localhost > client.txt 2>&1; then break; fi
        sleep 0.2
    done
    wait $server || { cat server.txt client.txt; exit 1; }
    grep -q '65536 .* 200 ' client.txt || { cat client.txt; exit 1; }
}

# The C library of cards, by Python's ctypes: no compiler is here.
memory_library() {
    say "libmillstream_memory.so.1"
    millstream card serve ctypes --memory 64MiB > /dev/null &
    local card=$!
    python3 - "$1" <<'PYTHON'
import ctypes, sys
library = ctypes.CDLL(sys.argv[1] + "/libmillstream_memory.so.1")
library.millstream_error.restype = ctypes.c_char_p
for name in ("msm_open", "msm_alloc", "msm_base"):
    getattr(library, name).restype = ctypes.c_void_p
for name in ("msm_size", "msm_offset"):
    getattr(library, name).restype = ctypes.c_uint64
assert library.msm_open(b"none", 10) is None
assert b"none" in library.millstream_error(), library.millstream_error()
memory = ctypes.c_void_p(library.msm_open(b"ctypes", 10000))
assert memory.value, library.millstream_error()
assert library.msm_size(memory) == 64 << 20
block = library.msm_alloc(memory, ctypes.c_uint64(1 << 20), ctypes.c_uint64(4096))
assert library.msm_offset(memory, ctypes.c_void_p(block)) % 4096 == 0
ctypes.memset(block, 7, 1 << 20)
assert ctypes.string_at(block, 1 << 20) == b"\7" * (1 << 20)
assert library.msm_check(memory) == 0
library.msm_close(memory)
PYTHON
    kill -INT $card
    wait $card
}

# libfabric over a torus of two nodes.
libfabric_provider() {
    say "libfabric provider"
    FI_PROVIDER_PATH=$1 millstream torus run --dimensions 2x1x1 -- fi_info -p millstream > fi_info.txt 2>&1 || { cat fi_info.txt; exit 1; }
    [ "$(grep -c 'provider: millstream' fi_info.txt)" -ge 2 ] || { cat fi_info.txt; exit 1; }
}

manual() {
    local pages
    pages=$(find "$1/share/man" -name 'millstream*.1*' | wc -l)
    [ "$pages" -ge 30 ] || { echo "only $pages man pages" >&2; exit 1; }
}

# The examples of the wheel's README, which is the package's page.
examples() {
    say "the examples of the package's README"
    /opt/venv/bin/python - /test/README.md <<'PYTHON'
import re, sys
text = open(sys.argv[1]).read()
examples = re.findall(r"```python\n(.*?)```", text, re.S)
tests = [example for example in examples if "def test_" in example]
for example in examples:
    if example not in tests:
        exec(compile(example, "README.md", "exec"), {})
assert len(tests) == 1
open("test_readme.py", "w").write(tests[0])
PYTHON
}

case $1 in
tarball)
    mkdir /opt/millstream
    python3 --version > /dev/null 2>&1 && { echo "this root is not bare" >&2; exit 1; }
    tar -C /opt/millstream --strip-components 1 -xf /packages/*.tar.gz
    libraries_are_there /opt/millstream/bin/millstream
    manual /opt/millstream
    smoke /opt/millstream/bin/millstream /opt/millstream
    ;;
debian)
    dpkg -i /packages/millstream_*.deb /packages/millstream-dev_*.deb > /dev/null
    libraries_are_there /usr/bin/millstream
    smoke millstream /usr
    ! command -v gcc > /dev/null
    grep -q millstream_card /usr/include/millstream/millstream_card.h
    dpkg --purge millstream-dev millstream > /dev/null 2>&1
    [ ! -e /usr/lib/millstream ]
    ;;
debian-programs)
    dpkg -i /packages/millstream_*.deb /packages/python3-millstream_*.deb > /dev/null
    cd "$(mktemp -d)"
    verbs_programs millstream
    for library in /usr/lib/millstream/*.so* /usr/lib/millstream/c/*.so*; do libraries_are_there "$library"; done
    memory_library /usr/lib/millstream/c
    libfabric_provider /usr/lib/millstream
    say "the Python API of the Debian package"
    python3 - /test/README.md <<'PYTHON'
import re, sys
text = open(sys.argv[1]).read()
examples = re.findall(r"```python\n(.*?)```", text, re.S)
assert len(examples) >= 3
for example in examples:
    if "def test_" not in example:
        exec(compile(example, "README.md", "exec"), {})
PYTHON
    ;;
wheel)
    python3 -m venv /opt/venv
    /opt/venv/bin/pip install --quiet --no-index --find-links /packages/wheels /packages/millstream-*.whl pytest
    export PATH=/opt/venv/bin:$PATH
    cd "$(mktemp -d)"
    verbs_programs millstream
    smoke /opt/venv/bin/millstream "$(dirname /opt/venv/lib/python3*/site-packages/millstream/_bundle/bin)"
    examples
    say "the pytest fixture"
    pytest -q test_readme.py
    ;;
tarball-emulated)
    mkdir -p /opt/millstream
    tar -C /opt/millstream --strip-components 1 -xf /packages/*.tar.gz
    libraries_are_there /opt/millstream/bin/millstream
    for library in /opt/millstream/lib/millstream/*.so* /opt/millstream/lib/millstream/c/*.so*; do libraries_are_there "$library"; done
    manual /opt/millstream
    emulated /opt/millstream/bin/millstream /opt/millstream
    devinfo /opt/millstream/bin/millstream
    say "NOT RUN: ib_write_bw. Its memory is private: peers copy with process_vm_writev, which qemu-user lacks"
    export PATH=/opt/millstream/bin:$PATH
    memory_library /opt/millstream/lib/millstream/c
    libfabric_provider /opt/millstream/lib/millstream
    ;;
wheel-emulated)
    python3 -m venv /opt/venv
    /opt/venv/bin/pip install --quiet --no-index --find-links /packages/wheels /packages/millstream-*.whl
    export PATH=/opt/venv/bin:$PATH
    emulated /opt/venv/bin/millstream "$(dirname /opt/venv/lib/python3*/site-packages/millstream/_bundle/bin)"
    devinfo millstream
    examples
    say "NOT RUN: the pytest fixture, whose example is ib_write_bw. Peers copy with process_vm_writev, which qemu-user lacks"
    ;;
*) echo "no test $1" >&2; exit 2 ;;
esac
