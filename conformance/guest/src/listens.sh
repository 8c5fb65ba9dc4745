#!/bin/sh
# Succeeds if a program listens on the TCP port.
grep -q "$(printf ':%04X 0*:0000 0A' "$1")" /proc/net/tcp /proc/net/tcp6
