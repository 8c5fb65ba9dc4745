#!/bin/sh
# Slurm epilog of a node with cards: releases the leases of the job. Each card stops its kernels and clears its memory.
set -u
# Slurm gives no search path: the program of this installation, the usual folders, and a usual one of Slurm.
PATH=${PATH:+$PATH:}${0%/*}/../../../bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/slurm/bin
export PATH
group=${SLURM_JOB_GID:-$(id -g "$SLURM_JOB_UID" 2>/dev/null)}
job=${MILLSTREAM_JOBS:-/run/millstream/jobs}/$SLURM_JOB_ID
[ -r "$job/cards" ] || exit 0
tr ',' '\n' <"$job/cards" | while read -r address; do
    [ -n "$address" ] || continue
    # A job may have released its card itself. A card that cannot be reached ends the lease when it expires.
    setpriv --reuid "$SLURM_JOB_UID" --regid "${group:-$SLURM_JOB_UID}" --clear-groups env XDG_STATE_HOME="$job/state" \
        millstream card lease "$address" --release </dev/null >&2 || true
done
rm -rf "$job"
