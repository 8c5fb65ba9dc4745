# `make help` lists the targets. Build products go to CARGO_TARGET_DIR, or target/ if it is not set.

TARGET_DIR := $(or $(CARGO_TARGET_DIR),target)
CARGO      ?= cargo
CC         ?= cc

ifneq ($(words $(CURDIR) $(TARGET_DIR)),2)
$(error make cannot use paths with spaces: $(CURDIR), $(TARGET_DIR))
endif

CAPI_ARCHIVE := $(TARGET_DIR)/device/libmillstream_capi.a
CAPI_MAP     := crates/capi/libibverbs.map
LIBIBVERBS   := $(TARGET_DIR)/lib/libibverbs.so.1

# Intel's Skylake to Cascade Lake processors do not cache decoded jumps that touch a 32-byte boundary (Intel, "Mitigations
# for Jump Conditional Code Erratum", 2019). The data path has many jumps, so they are aligned. This step compiles all
# crates (LTO).
JUMPS := $(if $(filter x86_64,$(shell uname -m)),-C llvm-args=-x86-align-branch-boundary=32 -C llvm-args=-x86-align-branch=fused+jcc+jmp)

PRELOAD_ARCHIVE := $(TARGET_DIR)/preload/libmillstream_cm.a
PRELOAD_MAP     := crates/cm/preload.map
PRELOAD         := $(TARGET_DIR)/lib/libmillstream_preload.so

FABRIC  := $(TARGET_DIR)/lib/libmillstream_fabric.so
FI      := $(TARGET_DIR)/lib/libmillstream-fi.so

# The C API of cards: a library for programs, which rustc links with the exported functions only.
MEMORY_BUILT := $(TARGET_DIR)/release/libmillstream_memory.so
MEMORY       := $(TARGET_DIR)/lib/libmillstream_memory.so.1
HEADERS      := $(wildcard crates/card-abi/include/*.h crates/card-capi/include/*.h)

# Symbols are bound at load time. The libraries stay loaded, because their threads outlive a dlclose. A program cannot
# interpose calls inside a library.
LIB_LDFLAGS := -shared -Wl,--gc-sections -Wl,--no-undefined-version \
	-Wl,-z,defs -Wl,-z,now -Wl,-z,relro -Wl,-z,noexecstack -Wl,-z,nodelete -Wl,-Bsymbolic-functions

# $(call link_verbs,OUTPUT,ARCHIVE)
define link_verbs
$(CC) -o $(1) -Wl,--whole-archive $(2) -Wl,--no-whole-archive $(LIB_LDFLAGS) -Wl,-soname=libibverbs.so.1 \
	-Wl,--version-script=$(CAPI_MAP) -lgcc_s -lpthread -ldl -lm -lc
endef

# $(call link_preload,OUTPUT,ARCHIVE)
define link_preload
$(CC) -o $(1) -Wl,--whole-archive $(2) -Wl,--no-whole-archive $(LIB_LDFLAGS) -Wl,-soname=libmillstream_preload.so \
	-Wl,--version-script=$(PRELOAD_MAP) -lgcc_s -lpthread -ldl -lm -lc
endef

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: gpu-kernels help setup build-setup demo quick crates oldest semver aarch64 aarch64-setup dist dist-aarch64 test-dist test-dist-aarch64 test test-python test-slurm test-opensm loom tsan miri soak bench bench-report bench-verbs bench-evb bench-faults bench-endurance bench-apps bench-card bench-mpi bench-torus bench-scale bench-wire bench-model conformance conformance-wire \
	conformance-rxe bench-proto proto-long proto-mutants conformance-asan fuzz lint rustdoc docs deny build runner lib FORCE

# Debian packages that `make demo` needs, those that `make build` and `make lib` need, and those of the other targets: further
# build dependencies, then the programs of tests and benchmarks.
DEMO_PACKAGES := gcc libc6-dev pkg-config cmake libclang-dev libibverbs-dev libhdf5-dev
BUILD_PACKAGES := $(DEMO_PACKAGES) g++ libfabric-dev
PACKAGES := $(BUILD_PACKAGES) binutils clang lld \
	perftest ibverbs-utils ucx-utils rdmacm-utils python3 python3-h5py python3-numpy python3-pytest python3-venv \
	tshark qemu-system-x86 cpio kmod xz-utils tcpdump iproute2 strace iperf3 libfabric-bin openmpi-bin libopenmpi-dev libsimgrid-dev \
	lammps lammps-data hpcc

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "%-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: quick ## build recorded camera events in the memory of emulated cards, and check every byte
	$(QUICK)/millstream demo

# The fast way from sources to a program: no LTO, and only the Cargo features of the demo (docs/install.md). The program
# finds the libraries beside itself.
QUICK := $(TARGET_DIR)/quick

quick: ## build target/quick/millstream and its libraries in minutes, with fewer commands
	@$(MAKE) --no-print-directory setup PACKAGES="$(DEMO_PACKAGES)"
	$(CARGO) build --profile quick --no-default-features -p millstream
	$(CARGO) rustc --profile quick -p millstream-capi --lib --crate-type staticlib
	$(CARGO) rustc --profile quick -p millstream-cm --features interpose --crate-type staticlib
	$(call link_verbs,$(QUICK)/libibverbs.so.1,$(QUICK)/libmillstream_capi.a)
	$(call link_preload,$(QUICK)/libmillstream_preload.so,$(QUICK)/libmillstream_cm.a)

# All crates but the one that only build scripts use and that has no tests: its dependencies are compiled for the host alone.
WORKSPACE := --workspace --exclude millstream-bindings
# With examples, `cargo build` uses the features that `cargo test` has compiled.
AS_TESTS := --lib --bins --examples

test: SHELL := /bin/bash
test: setup lib ## run all tests
	@# What failed is printed once more, behind the output of all tests.
	set -o pipefail; $(CARGO) test $(WORKSPACE) --no-fail-fast 2>&1 | tee $(TARGET_DIR)/test.log || \
		{ awk -f tools/failures.awk $(TARGET_DIR)/test.log; exit 1; }
	$(CARGO) build $(WORKSPACE) $(AS_TESTS)
	@# A short test against the Linux kernel's rxe, and of this product on it; `make conformance-rxe` runs all cases.
	$(TARGET_DIR)/debug/millstream-conformance --out $(TARGET_DIR)/conformance/test --allow-not-run --only faults rxe
	$(TARGET_DIR)/debug/millstream-conformance --out $(TARGET_DIR)/conformance/test --allow-not-run millstream
	$(MAKE) --no-print-directory test-python

# The interpreter of the Debian packages above, which may not be the first one in PATH.
PYTHON         ?= /usr/bin/python3
PYTHON_PACKAGE := $(TARGET_DIR)/python/millstream

test-python: setup lib ## run the tests of the Python package
	$(CARGO) build $(WORKSPACE) $(AS_TESTS)
	@rm -rf $(PYTHON_PACKAGE) && mkdir -p $(dir $(PYTHON_PACKAGE)) && cp -r python/millstream $(PYTHON_PACKAGE)
	@cp $(TARGET_DIR)/debug/lib_millstream.so $(PYTHON_PACKAGE)/_millstream.abi3.so
	MILLSTREAM_PROGRAM=$(abspath $(TARGET_DIR))/debug/millstream MILLSTREAM_LIB=$(abspath $(TARGET_DIR))/lib \
		PYTHONPATH=$(abspath $(dir $(PYTHON_PACKAGE))) $(PYTHON) -m pytest -q -rs -p no:cacheprovider python/tests

test-slurm: setup lib ## run jobs under Slurm, whose daemons the test starts (as root; apt-get install slurmd slurmctld slurm-client munge)
	$(CARGO) test -p millstream --test slurm -- --ignored --nocapture

test-opensm: setup ## compare routes of the torus with OpenSM's torus-2QoS in ibsim, and the check for deadlock with ibdmchk (apt-get install ibsim-utils opensm ibutils)
	$(CARGO) test -p millstream-torus-core --test opensm -- --ignored --nocapture

loom: ## model-check the thread interleavings of lock-free code (docs/faults.md)
	CARGO_TARGET_DIR=$(TARGET_DIR)/loom RUSTFLAGS="--cfg loom" \
		$(CARGO) test --release -p millstream-lockfree --test loom

# The standard library is instrumented, too: its source is a component of the nightly compiler (rust-src). Here rustix
# calls the C library, whose functions the sanitizer intercepts.
TSAN_TESTS ?=
tsan: setup ## run the device's tests under ThreadSanitizer; TSAN_TESTS=object_churn selects tests (docs/faults.md)
	CARGO_TARGET_DIR=$(TARGET_DIR)/tsan RUSTFLAGS="-Zsanitizer=thread --cfg rustix_use_libc" \
		TSAN_OPTIONS="die_after_fork=0 handle_segv=0 history_size=4 suppressions=$(abspath crates/device/tests/tsan.supp)" \
		$(CARGO) +nightly test -Zbuild-std --target $(ASAN_TARGET) -p millstream-device --test device -- \
		--skip process_kills:: $(TSAN_TESTS)

# Unsafe code without system calls that Miri lacks: locks, copies, completion entries, the connection manager.
miri: setup ## detect undefined behaviour with Miri, a component of the nightly compiler (docs/faults.md)
	CARGO_TARGET_DIR=$(TARGET_DIR)/miri $(CARGO) +nightly miri test -p millstream-lockfree --lib -- spin:: biased:: copy:: cqe::
	CARGO_TARGET_DIR=$(TARGET_DIR)/miri $(CARGO) +nightly miri test -p millstream-cm --lib -- address:: message:: manager:: remote:: user_memory::

soak: setup ## run the long tests of process kills, connection churn, forks and a torus under kills (docs/faults.md)
	$(CARGO) test --release -p millstream-device --test device -- --ignored --exact --nocapture --test-threads 1 \
		process_kills::one_thousand_kills process_kills::stepping::no_event_is_lost_between_any_two_instructions object_churn::ten_thousand_connections_come_and_go \
		object_churn::threads_and_forks_on_one_context_for_long
	$(CARGO) build --workspace
	$(CARGO) test --workspace --test torus_processes -- --ignored --exact --nocapture soak_3x3x3_with_random_kills

bench: bench-verbs bench-evb ## measure the soft device and the event builder; results go to target/bench/NAME.jsonl

bench-report: build ## render docs/benchmarks.md from target/bench and the results of other machines in docs/benchmarks
	$(TARGET_DIR)/release/millstream bench report

bench-verbs: build ## measure the soft device on one host: perftest, UCX and raw verbs
	$(TARGET_DIR)/release/millstream bench verbs

bench-evb: build ## measure the event builder
	$(TARGET_DIR)/release/millstream bench evb
	$(TARGET_DIR)/release/millstream bench evb-load
	$(TARGET_DIR)/release/millstream bench evb-storage

bench-endurance: build ## run the event builder at full rate for ten minutes: rate, memory and descriptors at the end and at the start
	$(TARGET_DIR)/release/millstream bench evb-endurance

bench-faults: build ## break processes, sources, disks and links of the event builder, and print the fault matrix (as root; 20 minutes)
	$(TARGET_DIR)/release/millstream bench faults --document docs/faults.md

bench-card: build target/bench/venv/ready ## measure cards, the stencil kernel against C, numba and numpy, and stencil jobs
	$(TARGET_DIR)/release/millstream bench card
	$(TARGET_DIR)/release/millstream bench stencil
	$(TARGET_DIR)/release/millstream bench stencil-jobs

bench-apps: build target/bench/venv/ready-apps ## measure the torus' applications against C, NEST, Brian2 and libraries of graphs
	$(TARGET_DIR)/release/millstream bench spin
	$(TARGET_DIR)/release/millstream bench neurons
	$(TARGET_DIR)/release/millstream bench bfs

target/bench/venv/ready-apps: crates/bench/src/neurons/requirements.txt crates/bench/src/bfs/requirements.txt
	@mkdir -p $(@D)
	-python3 -m venv target/bench/venv && target/bench/venv/bin/pip install --quiet $(^:%=--requirement %) && touch $@

bench-torus: build ## measure the torus: puts and gets by hops, monitoring, simulated tori
	$(TARGET_DIR)/release/millstream bench torus

bench-mpi: build ## measure MPI between host and card memory, MPI_Alltoall, HPC Challenge and LAMMPS (Open MPI over UCX)
	$(TARGET_DIR)/release/millstream bench mpi

# Without a package index the benchmark skips the Python programs and prints a note.
target/bench/venv/ready: crates/bench/src/stencil/requirements.txt
	@mkdir -p $(@D)
	-python3 -m venv target/bench/venv && target/bench/venv/bin/pip install --quiet --requirement $< && touch $@

runner: build ## build the conformance runner and the runner of Linux guests
	$(CARGO) build --release -p millstream-conformance -p millstream-guest

conformance: runner ## run third-party verbs programs; writes docs/conformance.md
	$(TARGET_DIR)/release/millstream-conformance --out $(TARGET_DIR)/conformance --document docs/conformance.md

conformance-wire: runner ## run third-party programs over RoCE v2 packets; the next `make conformance` adds the results to the page
	$(TARGET_DIR)/release/millstream-conformance --out $(TARGET_DIR)/conformance --path wire \
		ibverbs-utils perftest pyverbs rdmacm ucx

conformance-rxe: runner ## test the device and the programs of this repository with the kernel's RoCE adapter (rxe) in QEMU guests, Linux 6.12 and 6.1
	$(TARGET_DIR)/release/millstream-conformance --out $(TARGET_DIR)/conformance rxe millstream
	MILLSTREAM_GUEST_KERNEL=6.1 $(TARGET_DIR)/release/millstream-conformance --out $(TARGET_DIR)/conformance/linux-6.1 rxe millstream

# One client: conformance-perftest and so on.
conformance-%: runner
	$(TARGET_DIR)/release/millstream-conformance --out $(TARGET_DIR)/conformance $*

bench-proto: build ## measure building and handling of RoCEv2 packets against memcpy, without sockets
	$(TARGET_DIR)/release/millstream bench proto

proto-long: ## send millions of packets between two state machines over a faulty network (docs/wire.md)
	$(CARGO) test --release -p millstream-proto --test storm -- --ignored --nocapture

bench-wire: build ## measure the soft device between two network namespaces against raw UDP and TCP (as root; minutes)
	$(TARGET_DIR)/release/millstream bench wire

# AddressSanitizer is preloaded first in every process. Needs a nightly compiler and gcc's runtime.
ASAN_TARGET  := x86_64-unknown-linux-gnu
ASAN_DIR     := $(TARGET_DIR)/asan
ASAN_CLIENTS ?= ibverbs-utils perftest pyverbs

conformance-asan: runner ## run third-party programs with AddressSanitizer in the verbs library (docs/faults.md)
	CARGO_TARGET_DIR=$(ASAN_DIR) RUSTFLAGS="-Zsanitizer=address -Zexternal-clangrt" CARGO_PROFILE_DEVICE_LTO=off \
		CARGO_PROFILE_DEVICE_DEBUG=line-tables-only CARGO_PROFILE_DEVICE_CODEGEN_UNITS=16 \
		$(CARGO) +nightly build --target $(ASAN_TARGET) --profile device -p millstream-capi
	@mkdir -p $(ASAN_DIR)/lib
	gcc -o $(ASAN_DIR)/lib/libibverbs.so.1 -Wl,--whole-archive $(ASAN_DIR)/$(ASAN_TARGET)/device/libmillstream_capi.a \
		-Wl,--no-whole-archive $(LIB_LDFLAGS) -Wl,-soname=libibverbs.so.1 -Wl,--version-script=$(CAPI_MAP) \
		-lasan -lgcc_s -lpthread -ldl -lm -lc
	cp $(PRELOAD) $(ASAN_DIR)/lib/
	LD_PRELOAD=$$(gcc -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0:handle_segv=0 MILLSTREAM_LIB=$(abspath $(ASAN_DIR))/lib \
		$(TARGET_DIR)/release/millstream-conformance --out $(ASAN_DIR)/conformance $(ASAN_CLIENTS)

# Programs from crates.io, built once per version under the build directory. They work for seconds, so most of the optimisation
# of their release profiles is left out.
TOOLS_DIR   := $(abspath $(TARGET_DIR))/tools
MDBOOK      := $(TOOLS_DIR)/mdbook-0.5.4/bin/mdbook
CARGO_DENY  := $(TOOLS_DIR)/cargo-deny-0.20.2/bin/cargo-deny
CARGO_MUTANTS := $(TOOLS_DIR)/cargo-mutants-27.1.0/bin/cargo-mutants
CARGO_FUZZ  := $(TOOLS_DIR)/cargo-fuzz-0.13.2/bin/cargo-fuzz
CARGO_SEMVER := $(TOOLS_DIR)/cargo-semver-checks-0.51.0/bin/cargo-semver-checks

# Without the web server of `mdbook serve`.
TOOL_FLAGS_mdbook := --no-default-features --features search

$(TOOLS_DIR)/%: | setup
	CARGO_TARGET_DIR=$(TOOLS_DIR)/build CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 \
		CARGO_PROFILE_RELEASE_OPT_LEVEL=1 $(CARGO) install --quiet --locked $(TOOL_FLAGS_$(notdir $*)) \
		--root $(TOOLS_DIR)/$(firstword $(subst /, ,$*)) $(notdir $*)@$(lastword $(subst -, ,$(firstword $(subst /, ,$*))))

FUZZ_TARGETS ?= stream mfp raw packet cm connection device work_requests forged_peer torus
FUZZ_SECONDS ?= 300

fuzz: $(CARGO_FUZZ) ## run each of FUZZ_TARGETS for FUZZ_SECONDS (cargo-fuzz, a nightly compiler; fuzz/README.md)
	@for target in $(FUZZ_TARGETS); do \
		echo "fuzzing $$target for $(FUZZ_SECONDS) s"; \
		mkdir -p $(TARGET_DIR)/corpus/$$target; \
		ASAN_OPTIONS=detect_leaks=0:handle_segv=0 CARGO_TARGET_DIR=$(TARGET_DIR)/fuzz RUSTUP_TOOLCHAIN=nightly $(CARGO_FUZZ) run $$target \
			$(abspath $(TARGET_DIR))/corpus/$$target fuzz/seeds/$$target -- \
			-max_total_time=$(FUZZ_SECONDS) -max_len=600 -timeout=60 -print_final_stats=1 || exit 1; \
	done

bench-model: build ## measure the model: errors and coverage of rows left out, its event queue against heaps, its flow level against SimGrid
	$(TARGET_DIR)/release/millstream model calibrate --leave-one-out
	$(TARGET_DIR)/release/millstream bench model

bench-scale: build ## measure the soft device's costs by queue pairs and processes
	$(TARGET_DIR)/release/millstream bench scale

# Crates with `publish = false` are left out by cargo.
crates: setup oldest ## check that all crates can be published to crates.io, and that the oldest supported compiler accepts them
	$(CARGO) publish --workspace --dry-run

oldest: setup ## check all crates with the oldest supported compiler, `rust-version` in Cargo.toml
	$(CARGO) +$$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml) check --workspace --target-dir $(TARGET_DIR)/oldest

# A revision of git, because no crate is published. SEMVER_CRATES="-p millstream-fragment" selects crates.
BASELINE      ?=
SEMVER_CRATES ?= --workspace
semver: setup $(CARGO_SEMVER) ## compare the public interfaces of the crates with those of the git revision BASELINE (cargo-semver-checks)
	@[ -n "$(BASELINE)" ] || { echo "name a revision of git: make semver BASELINE=v0.1.0"; exit 1; }
	PATH=$(dir $(CARGO_SEMVER)):$$PATH CARGO_TARGET_DIR=$(abspath $(TARGET_DIR))/semver \
		$(CARGO) semver-checks $(SEMVER_CRATES) --baseline-rev $(BASELINE)

# Crates without libraries of C, whose tests run under qemu-user.
AARCH64          := aarch64-unknown-linux-gnu
AARCH64_PACKAGES := gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user
AARCH64_TESTS    ?= evb-core formats fragment health lockfree proto quantity stencil torus-core wire
AARCH64_CARGO    := CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu" $(CARGO)
aarch64: aarch64-setup ## check all crates for aarch64, and run the tests of AARCH64_TESTS under qemu-user
	$(AARCH64_CARGO) check --workspace --target $(AARCH64)
	$(AARCH64_CARGO) test --target $(AARCH64) $(addprefix -p millstream-,$(AARCH64_TESTS))

aarch64-setup: setup
	@$(MAKE) --no-print-directory setup PACKAGES="$(AARCH64_PACKAGES)"
	@[ -d "$$(rustc --print target-libdir --target $(AARCH64))" ] || rustup target add $(AARCH64)

lint: setup ## check formatting and run clippy, warnings denied
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	$(CARGO) clippy -p millstream --no-default-features --bins -- -D warnings

rustdoc: setup ## build the documentation of all crates, warnings denied
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps

docs: rustdoc $(MDBOOK) ## build the documentation site in target/book; dead links fail
	$(CARGO) test --quiet -p millstream-docs
	$(MDBOOK) build --dest-dir $(abspath $(TARGET_DIR))/book
	@rm -rf $(TARGET_DIR)/book/api && cp -r $(TARGET_DIR)/doc $(TARGET_DIR)/book/api
	@echo "$(TARGET_DIR)/book/index.html"

deny: $(CARGO_DENY) ## check licences, sources and advisories of all dependencies (deny.toml)
	$(CARGO_DENY) --all-features check bans licenses sources
	@if $(CARGO_DENY) --all-features fetch db; then $(CARGO_DENY) --all-features check advisories; \
	else echo "advisories: NOT CHECKED, the advisory database cannot be fetched from here"; fi

# A subset: make proto-mutants MUTANTS_FLAGS="--file sequence.rs" or MUTANTS_FLAGS="--shard 1/16".
proto-mutants: $(CARGO_MUTANTS) ## run mutation tests of the transport with cargo-mutants; MUTANTS_FLAGS selects a subset
	$(CARGO_MUTANTS) mutants --package millstream-proto --output $(TARGET_DIR) $(MUTANTS_FLAGS)

# The hash is that of `millstream_card_abi::image` of both sources.
GPU_KERNELS := crates/card-server/src/kernel/gpu
GPU_CLANG   := clang++ -x cuda --cuda-device-only --cuda-gpu-arch=sm_70 -nocudainc -nocudalib -Wno-unknown-cuda-version -Wall -O3 -S -I $(GPU_KERNELS)
gpu-kernels: setup ## compile the kernels of GPUs to PTX (clang; needs no GPU and no CUDA)
	@hash=$$(cat $(GPU_KERNELS)/gpu.h $(GPU_KERNELS)/events.cu | sha256sum | cut -c 1-16 | \
		sed 's/\(..\)\(..\)\(..\)\(..\)\(..\)\(..\)\(..\)\(..\)/\8\7\6\5\4\3\2\1/'); \
	$(GPU_CLANG) -o $(GPU_KERNELS)/events.tmp $(GPU_KERNELS)/events.cu && \
	{ echo "// Compiled by \`make gpu-kernels\` from gpu.h and events.cu with the hash $$hash."; cat $(GPU_KERNELS)/events.tmp; } \
		> $(GPU_KERNELS)/events.ptx && rm $(GPU_KERNELS)/events.tmp
	$(GPU_CLANG) -o examples/kernels/decide_events.ptx examples/kernels/decide_events.cu

build: build-setup lib ## build the millstream program and the verbs library, optimised
	$(CARGO) build --release -p millstream

build-setup:
	@$(MAKE) --no-print-directory setup PACKAGES="$(BUILD_PACKAGES)"

setup: ## install missing requirements: Debian packages (without root only listed), Rust for WebAssembly
	@missing=$$(for package in $(PACKAGES); do \
		dpkg-query -W -f '$${Status}' $$package 2>/dev/null | grep -q 'ok installed' || echo $$package; done); \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" != 0 ]; then \
		echo "These Debian packages are missing. As root: apt-get install --no-install-recommends" $$missing; exit 1; fi; \
	echo "installing" $$missing; \
	apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $$missing
	@[ -d "$$(rustc --print target-libdir --target wasm32-unknown-unknown)" ] || rustup target add wasm32-unknown-unknown || { \
		echo "Rust's target wasm32-unknown-unknown is missing, and 'rustup target add' cannot install it: kernels of cards" \
			"are built for it. Install the target's standard library for $$(rustc --version)." >&2; exit 1; }

lib: build-setup $(LIBIBVERBS) $(PRELOAD) $(FABRIC) $(FI) $(MEMORY) ## build libibverbs.so.1, libmillstream_preload.so, libmillstream_fabric.so, libmillstream-fi.so and libmillstream_memory.so in lib, headers in include

# Cargo decides whether an archive is out of date. An unchanged archive keeps its modification time, so nothing is linked.
$(CAPI_ARCHIVE): FORCE | build-setup
	$(CARGO) rustc --profile device -p millstream-capi --lib --crate-type staticlib -- $(JUMPS)

$(PRELOAD_ARCHIVE): FORCE | build-setup
	$(CARGO) rustc --profile preload -p millstream-cm --features interpose --crate-type staticlib

# The C interface of the torus, and the libfabric provider. Their symbols are those that the crates export.
$(FABRIC): FORCE | build-setup
	$(CARGO) build --release -p millstream-fabric-capi
	@mkdir -p $(@D)
	@cmp -s $(TARGET_DIR)/release/libmillstream_fabric_capi.so $@ || cp $(TARGET_DIR)/release/libmillstream_fabric_capi.so $@

$(FI): FORCE | build-setup
	$(CARGO) build --release -p millstream-libfabric
	@mkdir -p $(@D)
	@cmp -s $(TARGET_DIR)/release/libmillstream_libfabric.so $@ || cp $(TARGET_DIR)/release/libmillstream_libfabric.so $@

$(LIBIBVERBS): $(CAPI_ARCHIVE) $(CAPI_MAP) Makefile
	@mkdir -p $(@D)
	$(call link_verbs,$@,$(CAPI_ARCHIVE))

$(PRELOAD): $(PRELOAD_ARCHIVE) $(PRELOAD_MAP) Makefile
	@mkdir -p $(@D)
	$(call link_preload,$@,$(PRELOAD_ARCHIVE))

$(MEMORY_BUILT): FORCE | build-setup
	$(CARGO) rustc --release -p millstream-card-capi --lib --crate-type cdylib -- -C link-arg=-Wl,-soname=libmillstream_memory.so.1

$(MEMORY): $(MEMORY_BUILT) $(HEADERS)
	@mkdir -p $(@D) $(TARGET_DIR)/include
	cp $< $@
	@ln -sf $(@F) $(TARGET_DIR)/lib/libmillstream_memory.so
	@cp $(HEADERS) $(TARGET_DIR)/include/

# Packages of Python, Debian and a tarball (docs/install.md). DIST_PACKAGES are the Debian packages that only these targets
# need; tools/dist/requirements.txt lists the programs from the Python package index.
DIST_PACKAGES := lintian mmdebstrap
DIST_TOOLS    := $(TARGET_DIR)/tools/dist/ready

$(DIST_TOOLS): tools/dist/requirements.txt | setup
	rm -rf $(@D) && $(PYTHON) -m venv $(@D) && $(@D)/bin/pip install --quiet --requirement $< && touch $@

dist: setup $(DIST_TOOLS) $(CAPI_ARCHIVE) $(PRELOAD_ARCHIVE) ## build the Python wheel, Debian packages and a tarball in target/packages
	@$(MAKE) --no-print-directory setup PACKAGES="$(DIST_PACKAGES)"
	tools/dist/build.sh $(TARGET_DIR) $(CAPI_ARCHIVE) $(PRELOAD_ARCHIVE) "$(subst -functions,,$(LIB_LDFLAGS))"

# The same for aarch64, cross-compiled: a wheel and a tarball.
dist-aarch64: aarch64-setup $(DIST_TOOLS) ## build the Python wheel and a tarball for aarch64 in target/packages-aarch64
	$(AARCH64_CARGO) rustc --profile device --target $(AARCH64) -p millstream-capi --lib --crate-type staticlib
	$(AARCH64_CARGO) rustc --profile preload --target $(AARCH64) -p millstream-cm --features interpose --crate-type staticlib
	tools/dist/build.sh $(TARGET_DIR) $(TARGET_DIR)/$(AARCH64)/device/libmillstream_capi.a \
		$(TARGET_DIR)/$(AARCH64)/preload/libmillstream_cm.a "$(subst -functions,,$(LIB_LDFLAGS))" aarch64

test-dist-aarch64: $(DIST_TOOLS) ## install the packages of `make dist-aarch64` in a root file system of arm64, and test them under qemu-user (as root)
	@$(MAKE) --no-print-directory setup PACKAGES="binutils-aarch64-linux-gnu mmdebstrap qemu-user-static"
	PATH=$(abspath $(dir $(DIST_TOOLS)))/bin:$$PATH tools/dist/test-aarch64.sh $(TARGET_DIR)/packages-aarch64 $(TARGET_DIR)/dist-test-aarch64

test-dist: $(DIST_TOOLS) ## install the packages of `make dist` in bare root file systems, and test them there (as root)
	@$(MAKE) --no-print-directory setup PACKAGES="$(DIST_PACKAGES)"
	PATH=$(abspath $(dir $(DIST_TOOLS)))/bin:$$PATH tools/dist/test.sh $(TARGET_DIR)/packages $(TARGET_DIR)/dist-test
