"""Cards on the network (docs/cards.md).

    from millstream import Card

    with Card("node3:7480") as card:           # connects and acquires the lease
        card.put(0, np.arange(1000, dtype="f4"))
        card.load(0, "histogram.wasm")
        results = card.run(0, [0, 1000])
        out = card.get(0, 1000, "f4")
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import queue
import subprocess
import threading
import time
import weakref

import numpy as np

from . import _millstream
from ._buffer import bytes_of
from ._millstream import CardError
from .program import ProgramFailed, program

__all__ = ["Card", "CardError", "EmulatedCard", "Message"]

#: Images of kernels are written from this offset below the end of card memory, one area per region.
IMAGE_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class Message:
    """A message of a card: its interrupt."""

    #: Kind as in docs/registers.md, such as `RegionDone`.
    kind: str
    #: Region, DMA ring slot or peer.
    region: int
    #: Why it failed; none if it did not.
    cause: str | None
    #: The doorbell that the message answers.
    sequence: int
    #: Depend on the kind; for the end of a run the first results.
    values: tuple[int, int, int, int]


class Card:
    """A card on the network, with its lease.

    `address` is `host:port`. The lease expires `lease` seconds after the connection dies; a thread renews it while the
    connection lives. `acquire=False` connects without a lease, to read the state only.

    Methods raise :class:`CardError`; `ConnectionError` if the card cannot be reached; `TimeoutError` if it does not
    answer in time; `ValueError` for arguments outside of the card's memory, regions and kernels.
    """

    def __init__(
        self,
        address: str,
        *,
        acquire: bool = True,
        lease: float = 10.0,
        timeout: float = 10.0,
        staging_bytes: int = 4 << 20,
    ):
        self._connection = _millstream.Connection(address, timeout, staging_bytes)
        self._timeout = timeout
        self._threads = concurrent.futures.ThreadPoolExecutor(max_workers=8, thread_name_prefix="card")
        if acquire:
            self.acquire(lease, timeout)

    def __enter__(self) -> Card:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Releases the lease and waits until the card is free."""
        if self._connection is None:
            return
        connection, self._connection = self._connection, None
        try:
            if connection.epoch is not None:
                connection.release()
        finally:
            self._threads.shutdown(wait=False)

    @property
    def _card(self):
        if self._connection is None:
            error = CardError("the connection to the card is closed")
            error.fatal = True
            raise error
        return self._connection

    def __repr__(self) -> str:
        if self._connection is None:
            return "<Card, closed>"
        return f"<Card {self.address}, {self.memory_bytes} bytes, lease epoch {self.epoch}>"

    @property
    def address(self) -> str:
        """Address of the card."""
        return self._card.address

    @property
    def memory_bytes(self) -> int:
        """Size of card memory (bytes)."""
        return self._card.memory_bytes

    @property
    def epoch(self) -> int | None:
        """Epoch of the lease that this process holds."""
        return self._card.epoch

    # Lease

    def acquire(self, lease: float = 10.0, timeout: float = 10.0) -> int:
        """Acquires the lease and returns its epoch. Waits up to `timeout` seconds while another client holds it."""
        return self._card.acquire(lease, timeout)

    def release(self) -> None:
        """Releases the lease. The card ends its keys and clears its memory."""
        self._card.release()

    def revoke(self) -> int | None:
        """Revokes the lease of the current holder and returns its epoch."""
        return self._card.revoke()

    def detach(self) -> str:
        """Detaches the lease from this connection, which has none from then on. Returns its token, which is secret."""
        return self._card.detach()

    def attach(self, token: str) -> int:
        """Continues a detached lease and returns its epoch."""
        return self._card.attach(token)

    # Memory

    def put(self, offset: int, data) -> int:
        """Writes an array, a bytes-like object, or an object with `__dlpack__` to card memory. Returns its bytes."""
        array = bytes_of(data)
        self._card.write(offset, array)
        return len(array)

    def get(self, offset: int, shape, dtype=np.uint8) -> np.ndarray:
        """Reads a new array from card memory."""
        out = np.empty(shape, dtype)
        self.get_into(offset, out)
        return out

    def get_into(self, offset: int, out: np.ndarray) -> None:
        """Reads into a contiguous array."""
        if not out.flags.c_contiguous or not out.flags.writeable:
            raise ValueError("the array must be contiguous and writable")
        if out.nbytes:
            self._card.read(offset, out.reshape(-1).view(np.uint8))

    def clear(self) -> None:
        """Clears card memory."""
        self._card.clear()

    # Kernels

    def load(self, region: int, kernel, *, image_offset: int | None = None) -> int:
        """Loads a kernel into a region and returns its hash.

        `kernel` is the name of a built-in kernel, a path that ends in `.wasm` or `.wat`, or the bytes of an image. An
        image is kept in card memory at `image_offset`; the default is the area of the region at the end of the memory.
        """
        if isinstance(kernel, str) and not kernel.endswith((".wasm", ".wat")):
            return self._card.load_builtin(region, kernel)
        if isinstance(kernel, (str, os.PathLike)):
            with open(kernel, "rb") as file:
                kernel = file.read()
        if image_offset is None:
            if len(kernel) > IMAGE_BYTES:
                raise ValueError(f"an image of {len(kernel)} bytes exceeds {IMAGE_BYTES}: give its image_offset")
            image_offset = self.memory_bytes - (region + 1) * IMAGE_BYTES
            if image_offset < 0:
                raise ValueError(f"card memory of {self.memory_bytes} bytes has no area for images: give image_offset")
        return self._card.load_image(region, bytes(kernel), image_offset)

    def unload(self, region: int) -> None:
        """Unloads the kernel of a region."""
        self._card.unload(region)

    def start(
        self, region: int, arguments=(), *, banks: int = 0, fuel: int | None = None, timeout: float | None = None
    ) -> int:
        """Starts the kernel of a region. Returns the doorbell, for :meth:`wait`.

        `banks` has one bit for each bank that the kernel may use, 0 for all. `fuel` and `timeout` (seconds) end the run.
        """
        return self._card.start(region, list(arguments), banks, fuel, timeout, False)

    def _start_awaited(self, region, arguments, *, banks: int = 0, fuel: int | None = None) -> int:
        """Starts the kernel of a region; the message at its end is kept for :meth:`wait`."""
        return self._card.start(region, list(arguments), banks, fuel, None, True)

    def wait(self, doorbell: int, timeout: float = 60.0) -> list[int]:
        """Waits for the end of a run. Returns its first four results."""
        return self._card.wait(doorbell, timeout)

    def run(self, region: int, arguments=(), *, timeout: float = 60.0, **limits) -> list[int]:
        """Starts the kernel of a region and waits for its end. Returns its first four results."""
        return self.wait(self._start_awaited(region, arguments, **limits), timeout)

    def submit(self, region: int, arguments=(), *, timeout: float = 60.0, **limits) -> concurrent.futures.Future:
        """Starts the kernel of a region. The future has the results when the card's interrupt arrives.

        Other methods, such as :meth:`stop` and :meth:`put`, work meanwhile.
        """
        doorbell = self._start_awaited(region, arguments, **limits)
        return self._threads.submit(self.wait, doorbell, timeout)

    async def run_async(self, region: int, arguments=(), *, timeout: float = 60.0, **limits) -> list[int]:
        """As :meth:`run`, for asyncio."""
        run = functools.partial(self.run, region, arguments, timeout=timeout, **limits)
        return await asyncio.get_running_loop().run_in_executor(self._threads, run)

    def stop(self, region: int) -> bool:
        """Stops the run of a region at its next safe point. Returns whether a kernel was running."""
        return self._card.stop(region)

    def message(self, timeout: float = 1.0) -> Message | None:
        """The next message of the card, none within `timeout` seconds.

        Without those at the end of runs that :meth:`run`, :meth:`submit` or :meth:`wait` wait for.
        """
        fields = self._card.message(timeout)
        return None if fields is None else Message(*fields[:4], tuple(fields[4]))

    # State

    def info(self) -> dict:
        """The state of the card: memory, lease, regions, counters, sensors, as `millstream card info --json`."""
        return json.loads(self._card.info())

    def watch(self, interval: float = 1.0):
        """Yields the state of the card every `interval` seconds."""
        while True:
            yield self.info()
            time.sleep(interval)

    def save(self, file: str | os.PathLike) -> dict:
        """Saves memory and kernels to a checkpoint. Returns its content."""
        return json.loads(self._card.save(os.fspath(file)))

    def restore(self, file: str | os.PathLike) -> dict:
        """Restores a checkpoint. Returns its content."""
        return json.loads(self._card.restore(os.fspath(file)))


class EmulatedCard:
    """An emulated card of this host: a process that ends with this object, or with the interpreter if that is killed.

        with EmulatedCard(memory="256MiB") as address, Card(address) as card: ...
    """

    def __init__(self, name: str | None = None, *, memory: str | int = "256MiB", banks: int | None = None, timeout: float = 30.0):
        command = [program(), "card", "--json", "serve", name or f"py{os.getpid()}-{id(self) & 0xFFFF:x}"]
        command += ["--memory", str(memory), "--listen", "127.0.0.1:0", "--end-with-input"]
        if banks is not None:
            command += ["--banks", str(banks)]
        # Ctrl-C in a terminal or a notebook is for Python, not for the card.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._end = weakref.finalize(self, _end, self._process)
        self._lines: queue.Queue = queue.Queue()
        threading.Thread(target=_read, args=(self._process.stdout, self._lines), daemon=True).start()
        #: Address of the card.
        self.address = self._wait_for_address(command, time.monotonic() + timeout)

    def _wait_for_address(self, command, deadline):
        printed = []
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                self.close()
                raise TimeoutError(f"the card did not start in time: {''.join(printed)}") from None
            if line is None:
                raise ProgramFailed(command, self._process.wait(), "".join(printed))
            printed.append(line)
            with contextlib.suppress(json.JSONDecodeError, KeyError, TypeError):
                return json.loads(line)["address"]

    def __enter__(self) -> str:
        return self.address

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Ends the card."""
        self._end()


def _read(output, lines: queue.Queue) -> None:
    for line in output:
        lines.put(line)
    lines.put(None)


def _end(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdin.close()
