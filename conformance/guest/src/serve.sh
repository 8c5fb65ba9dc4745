#!/bin/sh
# Serves one connection: a line with a command comes in, its output goes out, then a NUL and its exit status.
# When the other side is gone, the command is killed.
read -r line
exec 3<&0
setsid sh -c "$line" </dev/null 2>&1 &
command=$!
{ cat >/dev/null <&3; kill -9 -$command 2>/dev/null; } &
wait $command
printf '\000%d\n' $?
kill $! 2>/dev/null
