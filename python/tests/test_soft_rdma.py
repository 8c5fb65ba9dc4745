"""The pytest fixtures on third-party programs, as the documentation shows them."""

import subprocess
import sys

import pytest
from millstream import program
from millstream.soft_rdma import SoftDevice, environment, free_port


@pytest.fixture
def port():
    return free_port()


def measure(server, client, command, address, port):
    """The output of perftest's client. perftest calibrates its clock after the measurement; if other load disturbs that, it
    fails, and is run again."""
    for attempt in range(6):
        serving = server.popen(command, listens=port)
        done = client.run([*command, address], check=False)
        ended = serving.wait(timeout=60)
        printed = f"{done.stdout}{done.stderr}{serving.stdout.read()}"
        if (done.returncode, ended) == (0, 0):
            return done.stdout
        assert attempt < 5 and "Correlation coefficient r^2" in printed, printed
    return None


def test_write_bandwidth(soft_rdma, port):
    assert "65536" in measure(soft_rdma, soft_rdma, ["ib_write_bw", "-n", 100, "-p", port], "localhost", port)


def test_packets_are_captured(soft_rdma_capture, port):
    command = ["ib_send_bw", "-n", 200, "-s", 64, "-p", port]
    measure(soft_rdma_capture, soft_rdma_capture, command, "localhost", port)
    captures = soft_rdma_capture.captures()
    # Of each run, both sides.
    assert len(captures) in range(2, 13, 2)
    for capture in captures:
        shown = subprocess.run(
            ["tshark", "-r", capture, "-Y", "infiniband.bth.opcode == 4"], capture_output=True, text=True, check=True
        )
        assert len(shown.stdout.splitlines()) >= 200, "each message of 64 bytes is one packet, RC SEND Only"


def test_two_hosts_with_loss(soft_rdma_hosts):
    hosts = soft_rdma_hosts(loss=0.01)
    assert "65536" in measure(*hosts.hosts, ["ib_write_bw", "-n", "200"], hosts.addresses[0], 18515)


def test_a_program_that_is_missing(monkeypatch):
    monkeypatch.setenv("MILLSTREAM_PROGRAM", "/no/such/program")
    with pytest.raises(FileNotFoundError, match="MILLSTREAM_PROGRAM=/no/such/program"):
        program()


def test_the_environment_is_that_of_millstream_env():
    env = environment("--drop", "0.5")
    assert "libmillstream_preload.so" in env["LD_PRELOAD"]
    assert env["MILLSTREAM_LINK"] == "drop=0.5"
    assert subprocess.run(["ibv_devinfo"], env=env, capture_output=True, check=True).stdout


def test_faults_and_captures_imply_packets():
    words = SoftDevice(drop=0.01).command(["program"])
    assert words[words.index("--path") + 1] == "wire"
    words = SoftDevice(pcap="capture.pcapng", path="auto").command(["program"])
    assert words[words.index("--path") + 1] == "auto" and words.count("--path") == 1
    assert "--path" not in SoftDevice(spin=10).command(["program"])


def test_an_option_without_a_value_is_a_boolean():
    assert SoftDevice(no_preload=True).command(["program"])[2:] == ["--no-preload", "--", "program"]
    assert SoftDevice(no_preload=False).command(["program"])[2:] == ["--", "program"]


def test_a_program_that_ends_before_it_listens_is_named(soft_rdma, port):
    with pytest.raises(RuntimeError, match="^false ended with status 1"):
        soft_rdma.popen(["false", "last argument"], listens=port)


def test_a_program_with_much_output_ends_and_its_output_is_kept(soft_rdma):
    program = soft_rdma.popen([sys.executable, "-c", "print('x' * 300_000)"])
    assert program.wait(timeout=60) == 0
    assert program.stdout.read() == "x" * 300_000 + "\n"
    done = soft_rdma.run([sys.executable, "-c", "print(1)"], stdout=subprocess.DEVNULL)
    assert done.returncode == 0
