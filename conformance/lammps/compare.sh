#!/bin/sh
# compare.sh CLIENT SCRATCH mpirun.openmpi -n RANKS lmp CASE: runs CASE.in over the transports of UCX_TLS, then over UCX's shared memory, with the
# same number of ranks. Positions and velocities of all atoms must be equal bit for bit. Prints both communication times.
set -eu
client=$1 scratch=$2 ranks=$5 case=$7
run() {
    mkdir -p "$scratch/$case-$ranks-$1"
    cd "$scratch/$case-$ranks-$1"
    mpirun.openmpi -n "$ranks" lmp -in "$client/$case.in" -log none >out 2>&1 || { cat out; exit 1; }
    # "Comm    | min | avg | max | …" in seconds.
    awk -F'|' -v way="$1" '/^Comm /{printf "%s: communication time %s s\n", way, $3}' out
}
run device
grep -h "rc_verbs/mill0:1\|ud_verbs/mill0:1" out | head -n 1
export UCX_TLS=posix,self
unset UCX_NET_DEVICES
run reference
cmp "$scratch/$case-$ranks-device/atoms.bin" "$scratch/$case-$ranks-reference/atoms.bin"
echo "$case: atoms equal bit for bit on $ranks ranks"
