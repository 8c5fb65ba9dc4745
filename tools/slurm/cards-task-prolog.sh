#!/bin/sh
# Slurm task prolog: gives each task of a job with cards their addresses (MILLSTREAM_CARDS, separated by commas), and the
# folder with the keys of their leases (XDG_STATE_HOME).
job=${MILLSTREAM_JOBS:-/run/millstream/jobs}/$SLURM_JOB_ID
[ -r "$job/cards" ] || exit 0
echo "export MILLSTREAM_CARDS=$(cat "$job/cards")"
echo "export XDG_STATE_HOME=$job/state"
