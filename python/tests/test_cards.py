"""Cards, each an emulated one."""

import asyncio
import os
import pathlib
import select
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from millstream import Card, CardError, FormatError
from millstream.cards import EmulatedCard
from millstream.program import call

KERNELS = pathlib.Path(__file__).parents[2] / "examples" / "kernels"


@pytest.fixture
def card(emulated_card):
    with Card(emulated_card) as card:
        yield card


@pytest.mark.parametrize("dtype", ["u1", "<f4", "<c16"])
def test_an_array_goes_into_card_memory_and_back(card, dtype):
    data = (np.arange(300_000) % 251).astype(dtype).reshape(3, -1)
    assert card.put(4096, data) == data.nbytes
    np.testing.assert_array_equal(card.get(4096, data.shape, dtype), data)
    out = np.zeros_like(data)
    card.get_into(4096, out)
    np.testing.assert_array_equal(out, data)


def test_bytes_and_strided_arrays_are_written(card):
    data = np.arange(1000, dtype="u4").reshape(10, 100)
    card.put(0, data[:, ::2])
    np.testing.assert_array_equal(card.get(0, (10, 50), "u4"), data[:, ::2])
    card.put(0, b"bytes")
    assert bytes(card.get(0, 5)) == b"bytes"
    with pytest.raises(ValueError, match="contiguous"):
        card.get_into(0, data[:, ::2])
    with pytest.raises(TypeError, match="object"):
        card.put(0, np.array([object()]))


def test_a_range_outside_of_card_memory_is_refused(card):
    with pytest.raises(ValueError, match="outside the card's memory"):
        card.put(card.memory_bytes - 1, b"ab")
    card.put(card.memory_bytes - 1, b"a")
    for call in (lambda: card.put(-1, b"a"), lambda: card.load(-1, "null"), lambda: card.start(0, [1 << 64])):
        with pytest.raises(ValueError, match="is not an unsigned number of (32|64) bits"):
            call()


def test_a_built_in_kernel_runs_and_interrupts(card):
    kernel = card.info()["kernels"][0]
    assert card.load(0, kernel) != 0
    assert card.info()["regions"][0]["kernel"] == kernel
    with pytest.raises(ValueError, match="no-such-kernel"):
        card.load(0, "no-such-kernel")
    with pytest.raises(ValueError, match="at most 16"):
        card.start(0, range(17))


@pytest.fixture
def histogram(tmp_path):
    """The kernel examples/kernels/histogram.c, compiled as its first lines say."""
    image = tmp_path / "histogram.wasm"
    flags = ["--target=wasm32", "-mbulk-memory", "-O2", "-nostdlib", "-Wl,--no-entry", "-Wl,--export=run"]
    subprocess.run(["clang", *flags, "-o", image, KERNELS / "histogram.c"], check=True)
    return image


def test_a_webassembly_kernel_runs_as_future_and_in_asyncio(card, histogram):
    samples = np.random.default_rng(7).integers(0, 1 << 12, 100_000, dtype="<u2")
    counters = 1 << 20
    card.put(0, samples)
    card.load(1, histogram)
    expected = np.bincount(samples, minlength=1 << 16)

    results = card.submit(1, [0, len(samples), counters]).result(timeout=60)
    assert results[:2] == [len(samples), expected.argmax()]
    np.testing.assert_array_equal(card.get(counters, 1 << 16, "<u4"), expected)

    # The kernel adds to its counters.
    asyncio.run(card.run_async(1, [0, len(samples), counters]))
    np.testing.assert_array_equal(card.get(counters, 1 << 16, "<u4"), 2 * expected)


def test_the_end_of_a_run_is_a_message(card, histogram):
    card.load(0, histogram)
    doorbell = card.start(0, [0, 10, 4096])
    message = card.message(timeout=10)
    assert (message.region, message.cause, message.sequence, message.values[0]) == (0, None, doorbell, 10)
    assert card.message(timeout=0.01) is None


@pytest.fixture
def endless(tmp_path):
    """A kernel that does not end by itself."""
    module = tmp_path / "endless.wat"
    module.write_text('(module (memory (export "memory") 1) (func (export "run") (loop $again (br $again))))')
    return module


def test_a_pending_run_delays_no_other_call_and_keeps_its_message(card, endless):
    for region in (0, 1):
        card.load(region, endless)
    pending = card.submit(0, timeout=60)

    async def stop_while_waiting():
        run = asyncio.ensure_future(card.run_async(1, timeout=60))
        deadline = time.monotonic() + 60
        while card.info()["regions"][1]["state"] != "Running":
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert card.message(timeout=0.05) is None
        assert card.stop(1)
        with pytest.raises(CardError, match="stopped"):
            await run

    asyncio.run(stop_while_waiting())
    card.put(0, b"meanwhile")
    assert bytes(card.get(0, 9)) == b"meanwhile"
    assert not pending.done()
    assert card.stop(0)
    with pytest.raises(CardError, match="stopped"):
        pending.result(timeout=60)
    assert card.message(timeout=0.05) is None


def test_ctrl_c_ends_a_wait(card, endless):
    card.load(0, endless)
    doorbell = card.start(0)
    interrupt = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        interrupt.start()
        card.wait(doorbell, timeout=60)
    assert card.stop(0)
    assert card.message().sequence == doorbell, "the message is for anyone, as nobody waits for it"


def test_a_stop_ends_a_run_and_the_start_that_waits_for_its_end(card, endless):
    card.load(0, endless)
    runs = [card.submit(0), card.submit(0)]
    assert card.stop(0)
    for run in runs:
        with pytest.raises(CardError, match="stopped"):
            run.result(timeout=10)


def test_one_client_at_a_time_holds_the_lease(emulated_card):
    with Card(emulated_card) as first:
        first.put(0, b"secret")
        with Card(emulated_card, acquire=False) as second:
            assert second.info()["lease"]["epoch"] == first.epoch
            with pytest.raises(CardError, match="leased to client"):
                second.acquire(timeout=0.2)
            with pytest.raises(CardError, match="no lease") as failure:
                second.get(0, 6)
            assert failure.value.fatal is False
    with Card(emulated_card) as third:
        assert bytes(third.get(0, 6)) == bytes(6), "the card clears its memory between leases"


def test_a_detached_lease_is_continued(emulated_card):
    with Card(emulated_card) as first:
        first.put(0, b"kept")
        epoch = first.epoch
        token = first.detach()
        assert first.epoch is None
    with Card(emulated_card, acquire=False) as second, Card(emulated_card, acquire=False) as third:
        assert second.attach(token) == epoch
        assert bytes(second.get(0, 4)) == b"kept"
        token = second.detach()
        assert third.attach(token) == epoch
        second.close()
        assert bytes(third.get(0, 4)) == b"kept"


def test_a_checkpoint_restores_memory(card, tmp_path):
    data = np.random.default_rng(1).integers(0, 256, 1 << 20, dtype=np.uint8)
    card.put(12345, data)
    card.save(tmp_path / "card.checkpoint")
    card.clear()
    assert not card.get(12345, 1 << 20).any()
    card.restore(tmp_path / "card.checkpoint")
    np.testing.assert_array_equal(card.get(12345, 1 << 20), data)
    with pytest.raises(FileNotFoundError):
        card.restore(tmp_path / "missing")
    short = tmp_path / "short"
    for length in (0, 50, 300):
        short.write_bytes((tmp_path / "card.checkpoint").read_bytes()[:length])
        with pytest.raises(FormatError, match="short: .*the file ends after"):
            card.restore(short)


def test_a_card_that_is_not_there(emulated_card):
    with pytest.raises(ConnectionError):
        Card("127.0.0.1:1", timeout=1)
    with pytest.raises(ValueError, match="seconds"):
        Card(emulated_card, timeout=-1)
    card = Card(emulated_card)
    card.close()
    card.close()
    with pytest.raises(CardError, match="closed") as failure:
        card.get(0, 1)
    assert failure.value.fatal is True


def wait_for_end(process):
    """Waits until the process of this pidfd has ended."""
    assert select.select([process], [], [], 60)[0], "the card did not end"
    os.close(process)


def test_an_emulated_card_ends_with_the_interpreter_that_is_killed():
    script = (
        "import sys; from millstream.cards import EmulatedCard; card = EmulatedCard(memory='16MiB');"
        "print(card._process.pid, flush=True); sys.stdin.read()"
    )
    python = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with python:
        card = os.pidfd_open(int(python.stdout.readline()))
        python.kill()
    wait_for_end(card)


def test_an_emulated_card_outlives_ctrl_c():
    code = """if True:
        import os, signal, time
        from millstream import Card
        from millstream.cards import EmulatedCard
        with EmulatedCard(memory="4MiB") as address:
            try:
                os.killpg(0, signal.SIGINT)
                time.sleep(60)
            except KeyboardInterrupt:
                pass
            with Card(address) as card:
                print(card.memory_bytes)
    """
    python = [sys.executable, "-c", code]
    done = subprocess.run(python, capture_output=True, text=True, timeout=60, check=True, start_new_session=True)
    assert done.stdout == f"{4 << 20}\n"


def test_an_emulated_card_ends_with_its_object():
    card = EmulatedCard(memory="16MiB")
    process = os.pidfd_open(card._process.pid)
    del card
    wait_for_end(process)


@pytest.fixture
def keys(tmp_path):
    """Folders with the keys of two nodes of a site."""
    (tmp_path / "site.toml").write_text(
        'name = "lab"\n[[host]]\nname = "node"\ncount = 2\n[[host.socket]]\nprocessor = "Genoa"\n'
        'cores = 2\nclock = "2 GHz"\nmemory = "1 GiB"\nmemory-bandwidth = "10 GB/s"\n'
    )
    call("site", "keys", tmp_path / "site.toml", "--out", tmp_path / "keys")
    return [tmp_path / "keys" / node for node in ("node0", "node1")]


def test_a_card_with_keys_serves_clients_with_keys(keys, tmp_path, monkeypatch):
    server, client = keys
    monkeypatch.setenv("MILLSTREAM_KEYS", str(server))
    with EmulatedCard() as address:
        monkeypatch.setenv("MILLSTREAM_KEYS", str(client))
        with Card(address) as card:
            card.put(4096, b"over TLS")
            assert bytes(card.get(4096, 8)) == b"over TLS"
            card.load(0, card.info()["kernels"][0])
        monkeypatch.delenv("MILLSTREAM_KEYS")
        with pytest.raises(ConnectionError, match="MILLSTREAM_KEYS"):
            Card(address)
        monkeypatch.setenv("MILLSTREAM_KEYS", str(tmp_path / "nowhere"))
        with pytest.raises(CardError, match="nowhere/certificate.pem"):
            Card(address)


def test_a_client_with_keys_uses_no_card_without(keys, emulated_card, monkeypatch):
    monkeypatch.setenv("MILLSTREAM_KEYS", str(keys[0]))
    with pytest.raises(ConnectionError, match="does not use TLS"):
        Card(emulated_card)
