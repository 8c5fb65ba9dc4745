#!/bin/sh
# with-cards.sh BIN COMMAND…: starts two emulated cards, runs the command with their names at the end, and ends the cards.
set -eu
bin=$1
shift
names="mpi-$$-a mpi-$$-b"
pids=
trap 'kill $pids 2>/dev/null; wait' EXIT
for name in $names; do
    "$bin/millstream" card serve "$name" --memory 256MiB --listen 127.0.0.1:0 >/dev/null &
    pids="$pids $!"
done
"$@" --cards "$(echo $names | tr ' ' ,)"
