#!/bin/sh
# Serves one connection: reads a line with a command, sends its output, then a NUL and its exit status.
# Kills the command when the peer disconnects.
read -r line
exec 3<&0
setsid sh -c "$line" </dev/null 2>&1 &
command=$!
{ cat >/dev/null <&3; kill -9 -$command 2>/dev/null; } &
wait $command
printf '\000%d\n' $?
kill $! 2>/dev/null
