"""Fixtures for tests of RDMA programs, on any machine. pytest finds them when this package is installed.

    def test_pingpong(soft_rdma):
        server = soft_rdma.popen(["ibv_rc_pingpong", "-g", "0"], listens=18515)
        soft_rdma.run(["ibv_rc_pingpong", "-g", "0", "localhost"])
        assert server.wait(timeout=10) == 0

| fixture | what it gives |
|---|---|
| `soft_rdma` | :class:`millstream.soft_rdma.SoftDevice`: programs of this host, over shared memory |
| `soft_rdma_wire` | the same over RoCE v2 packets |
| `soft_rdma_hosts` | a function that makes :class:`millstream.soft_rdma.TwoHosts`; skips without the right to make namespaces |
| `soft_rdma_capture` | a soft device over packets; `captures()` lists its capture files |
| `emulated_card` | address of an emulated card |
"""

import subprocess

import pytest

from . import soft_rdma as soft


@pytest.fixture
def soft_rdma():
    """Programs of this host on the soft device, over shared memory. They are killed at the end of the test."""
    with soft.SoftDevice() as device:
        yield device


@pytest.fixture
def soft_rdma_wire():
    """Programs of this host on the soft device, over RoCE v2 packets."""
    with soft.SoftDevice(path="wire") as device:
        yield device


@pytest.fixture
def soft_rdma_capture(tmp_path):
    """Programs over RoCE v2 packets. `captures()` lists their capture files, one a process."""
    with soft.SoftDevice(path="wire", pcap=tmp_path / "%p.pcapng") as device:
        device.captures = lambda: sorted(tmp_path.glob("*.pcapng"))
        yield device


@pytest.fixture
def soft_rdma_hosts():
    """A function that makes two hosts on this machine: `soft_rdma_hosts(loss=0.01)`. Skips without the right to make namespaces."""
    probe = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, text=True, check=False)
    if probe.returncode != 0:
        pytest.skip(f"two hosts on one machine are network namespaces, which need root: {probe.stderr.strip()}")
    made = []

    def make(**options):
        made.append(soft.TwoHosts(**options))
        return made[-1]

    yield make
    for hosts in made:
        hosts.close()


@pytest.fixture
def emulated_card():
    """Address of an emulated card of 256 MiB."""
    from .cards import EmulatedCard

    with EmulatedCard() as address:
        yield address
