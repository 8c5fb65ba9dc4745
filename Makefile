# `make help` lists the targets. Build products go to CARGO_TARGET_DIR, or target/ if it is not set.

TARGET_DIR := $(or $(CARGO_TARGET_DIR),target)
CARGO      ?= cargo
CC         ?= cc

CAPI_ARCHIVE := $(TARGET_DIR)/device/libmillstream_capi.a
CAPI_MAP     := crates/capi/libibverbs.map
LIBIBVERBS   := $(TARGET_DIR)/lib/libibverbs.so.1

# The library is bound at load time and stays loaded: its threads outlive a dlclose. Calls inside it do
# not go through symbols that a program could replace.
LIB_LDFLAGS := -shared -Wl,--whole-archive $(CAPI_ARCHIVE) -Wl,--no-whole-archive -Wl,--gc-sections \
	-Wl,-z,defs -Wl,-z,now -Wl,-z,relro -Wl,-z,noexecstack -Wl,-z,nodelete -Wl,-Bsymbolic-functions

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help lib FORCE

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

lib: $(LIBIBVERBS) ## build the verbs library, lib/libibverbs.so.1 under the build directory

# Cargo knows whether the archive is out of date; an archive that it leaves alone keeps its time, and
# then nothing is linked.
$(CAPI_ARCHIVE): FORCE
	$(CARGO) build --profile device -p millstream-capi

$(LIBIBVERBS): $(CAPI_ARCHIVE) $(CAPI_MAP) Makefile
	@mkdir -p $(@D)
	$(CC) -o $@ $(LIB_LDFLAGS) -Wl,-soname=libibverbs.so.1 -Wl,--version-script=$(CAPI_MAP) \
		-lgcc_s -lpthread -ldl -lm -lc
