"""Verbs programs on the soft device (docs/soft-device.md).

    from millstream import soft_rdma

    device = soft_rdma.SoftDevice()
    server = device.popen(["ib_write_bw"], listens=18515)
    print(device.run(["ib_write_bw", "localhost"]).stdout)
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from .program import ProgramFailed, call, program

__all__ = ["SoftDevice", "TwoHosts", "environment", "free_port"]


def environment(*options) -> dict[str, str]:
    """The environment of this process, changed so that verbs programs use the soft device.

    `options` are those of `millstream env`, such as `--path wire` or `--drop 0.01`.
    """
    lines = call("env", *options).splitlines()
    result = dict(os.environ)
    for line in lines:
        name, _, value = line.removeprefix("export ").partition("=")
        result[name] = value[1:-1].replace("'\\''", "'")
    return result


#: Options that act on packets only.
_OF_PACKETS = {"drop", "duplicate", "reorder", "corrupt", "mark", "delay", "pcap"}


class SoftDevice:
    """Runs programs on the soft device. Keyword arguments are options of `millstream run`, such as `drop=0.01`.

    Injected faults and `pcap` imply `path="wire"`, unless another path is given. An option without a value is True.
    """

    def __init__(self, prefix: Sequence[str] = (), **options):
        self._command = [*prefix, str(program()), "run"]
        if _OF_PACKETS & options.keys():
            options.setdefault("path", "wire")
        for name, value in options.items():
            if value is False:
                continue
            flag = f"--{name.replace('_', '-')}"
            self._command += [flag] if value is True else [flag, str(value)]
        self._processes: list[subprocess.Popen] = []

    def command(self, words: Sequence) -> list[str]:
        """The command line that runs a program on the soft device."""
        return [*self._command, "--", *map(str, words)]

    def run(self, words: Sequence, **options) -> subprocess.CompletedProcess:
        """Runs a program to its end. `options` are those of `subprocess.run`; output is captured as text.

        Raises :class:`millstream.ProgramFailed` with the output if the exit status is not zero, unless `check=False`.
        """
        if not {"stdout", "stderr"} & options.keys():
            options.setdefault("capture_output", True)
        options = {"text": True, "timeout": 60, "check": True, **options}
        check = options.pop("check")
        done = subprocess.run(self.command(words), check=False, **options)
        if check and done.returncode != 0:
            raise ProgramFailed(done.args, done.returncode, f"{done.stdout or ''}{done.stderr or ''}")
        return done

    def popen(self, words: Sequence, *, listens: int | None = None, timeout: float = 30, **options) -> subprocess.Popen:
        """Starts a program, which ends with this object. `options` are those of `subprocess.Popen`.

        Standard output and standard error are one pipe. `wait` reads it to its end; `stdout` has that text afterwards.
        With `listens`, returns when the program's host has a listener at this TCP port, so that a client can connect.
        """
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, **options}
        process = _Process(self.command(words), **options)
        self._processes.append(process)
        if listens is not None:
            _wait_for_listener(process, words[0], listens, time.monotonic() + timeout)
        return process

    def close(self) -> None:
        """Ends the programs that still run."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            # First, so that `wait` does not read it: a child of the program may still have it.
            if process.stdout:
                process.stdout.close()
            process.wait()
        self._processes.clear()

    def __enter__(self) -> SoftDevice:
        return self

    def __exit__(self, *_) -> None:
        self.close()


class _Process(subprocess.Popen):
    """A process that does not stand still in `wait` because nobody reads its output."""

    #: `communicate` calls `wait` itself.
    _communicates = False

    def wait(self, timeout=None):
        is_piped = self.stdout is not None and not isinstance(self.stdout, (io.StringIO, io.BytesIO))
        if not is_piped or self.stdin is not None or self._communicates or self.stdout.closed:
            return super().wait(timeout)
        self.communicate(timeout=timeout)
        return self.returncode

    def communicate(self, input=None, timeout=None):
        if isinstance(self.stdout, (io.StringIO, io.BytesIO)):
            return self.stdout.read(), None
        self._communicates = True
        try:
            output, errors = super().communicate(input, timeout)
        finally:
            self._communicates = False
        if output is not None:
            self.stdout = io.StringIO(output) if isinstance(output, str) else io.BytesIO(output)
        return output, errors


def free_port() -> int:
    """A TCP port of this host that nobody uses at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _wait_for_listener(process: subprocess.Popen, name, port: int, deadline: float) -> None:
    while not _listens(process.pid, port):
        if process.poll() is not None:
            output = process.stdout.read() if process.stdout else ""
            raise RuntimeError(f"{name} ended with status {process.returncode} before it listened: {output}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing listens at TCP port {port}")
        time.sleep(0.01)


def _listens(pid: int, port: int) -> bool:
    """Whether a socket of the process's network namespace listens at the port."""
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                return True
    return False


class TwoHosts:
    """Two network namespaces joined by a virtual Ethernet link: two hosts on one machine. Needs root.

    `loss` is the probability that a packet is dropped.
    """

    #: Addresses of the hosts.
    addresses = ("10.78.0.1", "10.78.0.2")

    def __init__(self, *, loss: float = 0.0, mtu: int = 1500, faults: Mapping | None = None):
        mark = uuid.uuid4().hex[:6]
        self._names = [f"mill-{mark}-{side}" for side in "ab"]
        self._stack = contextlib.ExitStack()
        try:
            for name in self._names:
                _ip("netns", "add", name)
                self._stack.callback(_ip, "netns", "del", name)
            links = [f"m{mark}{side}" for side in "ab"]
            _ip("link", "add", links[0], "netns", self._names[0], "type", "veth", "peer", links[1], "netns", self._names[1])
            for name, link, address in zip(self._names, links, self.addresses):
                _ip("-n", name, "address", "add", f"{address}/24", "dev", link)
                _ip("-n", name, "link", "set", link, "mtu", mtu, "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except BaseException:
            self._stack.close()
            raise
        options = dict(faults or {})
        if loss:
            options["drop"] = loss
        #: The soft device on each host.
        self.hosts = tuple(SoftDevice(["ip", "netns", "exec", name], **options) for name in self._names)

    def close(self) -> None:
        """Ends the programs and removes the namespaces."""
        for host in self.hosts:
            host.close()
        self._stack.close()

    def __enter__(self) -> TwoHosts:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _ip(*words) -> None:
    done = subprocess.run(["ip", *map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(map(str, words))}: {done.stderr.strip()} (network namespaces need root)")

