#!/bin/sh
# Slurm prolog of a node with cards: leases a free card for each one that the job got by --gres=card:N on this node.
#
# /etc/millstream/cards has the address of each card of the node, one a line. The leases belong to the job: their keys are in
# /run/millstream/jobs/JOB/state, which only the job's user can read. Everything else of the job's folder is root's. If too few
# cards are free, the prolog fails and Slurm drains the node.
set -u
umask 022
# Slurm gives no search path: the program of this installation, the usual folders, and a usual one of Slurm.
PATH=${PATH:+$PATH:}${0%/*}/../../../bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/slurm/bin
export PATH
group=${SLURM_JOB_GID:-$(id -g "$SLURM_JOB_UID" 2>/dev/null)}
cards=${MILLSTREAM_CARDS:-/etc/millstream/cards}
jobs=${MILLSTREAM_JOBS:-/run/millstream/jobs}
job=$jobs/$SLURM_JOB_ID
# The lease ends this long after the job's latest command if no epilog comes.
duration=${MILLSTREAM_LEASE:-86400}

fail() {
    echo "cards-prolog: job $SLURM_JOB_ID: $*" >&2
    exit 1
}

# The controller may be restarting.
shown=$(scontrol show job --details "$SLURM_JOB_ID" || { sleep 2 && scontrol show job --details "$SLURM_JOB_ID"; }) ||
    fail "scontrol does not show the job, so the number of its cards is unknown"
# Its lines: "Nodes=n[1-2] CPU_IDs=0 Mem=0 GRES=card(CNT:2)"; with types or device files "card:u280:2(IDX:0-1)".
wanted=$(echo "$shown" |
    sed -n 's/^ *Nodes=\([^ ]*\) .*GRES=\(.*\)$/\1 \2/p' |
    while read -r nodes gres; do
        hosts=$(scontrol show hostnames "$nodes") || { echo unknown && break; }
        if echo "$hosts" | grep -qx "$SLURMD_NODENAME"; then
            echo "$gres" | tr ',' '\n' |
                sed -n -e 's/^card\(:[^(]*\)\{0,1\}(CNT:\([0-9]*\).*/\2/p;t' -e 's/^card:\([^:(]*:\)*\([0-9][0-9]*\).*/\2/p'
        fi
    done | awk '/unknown/ { unknown = 1 } { cards += $1; any = 1 } END { if (unknown) print "unknown"; else if (any) print cards }')
[ -n "$wanted" ] || exit 0
[ "$wanted" != unknown ] || fail "scontrol does not show the job's hosts"

[ -r "$cards" ] || fail "$cards: cannot be read; it lists the addresses of this node's cards"
mkdir -p "$jobs" && mkdir -p "$job" && mkdir -p -m 700 "$job/state" || fail "$job: cannot be created"
chown "$SLURM_JOB_UID" "$job/state" || fail "$job/state: cannot be given to user $SLURM_JOB_UID"

leased=
while read -r address; do
    case $address in '' | '#'*) continue ;; esac
    [ "$wanted" -gt 0 ] || break
    if setpriv --reuid "$SLURM_JOB_UID" --regid "${group:-$SLURM_JOB_UID}" --clear-groups env XDG_STATE_HOME="$job/state" \
        millstream card lease "$address" --for "$duration" --wait 0 </dev/null >&2; then
        leased="$leased${leased:+,}$address"
        wanted=$((wanted - 1))
    fi
done <"$cards"
echo "$leased" >"$job/cards" || fail "$job/cards: cannot be written"
[ "$wanted" = 0 ] || fail "$wanted more free card(s) needed; $cards has the addresses, leased: ${leased:-none}"
