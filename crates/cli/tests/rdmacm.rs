//! Debian's unmodified librdmacm with its programs on the soft device, started by `millstream run`.
//!
//! These tests run one program of each kind, and failures; `conformance/rdmacm` runs all programs with all
//! options. The tests need the packages rdmacm-utils and perftest and fail without them.

mod common;

use std::io::{BufRead as _, BufReader};
use std::process::Command;
use std::time::{Duration, Instant};

use common::{both, finish, finish_both, free_port, start};
use millstream_shm::socket;

fn succeeds(words: &[&str]) -> String {
    finish(start(words)).unwrap_or_else(|error| panic!("{words:?}: {error}"))
}

/// Waits until a process listens on the port; the name of its socket shows that (docs/rdma-cm.md).
fn wait_for_listener(port: &str) {
    let name = format!("/{port}/");
    let listens = || {
        let names = socket::listening_names("millstream/").unwrap();
        names.iter().any(|held| held.contains("/cm/") && held.contains(&name))
    };
    let deadline = Instant::now() + Duration::from_secs(60);
    while !listens() {
        assert!(Instant::now() < deadline, "nobody listens on port {port}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The output of both sides of a program, which must both succeed.
fn pair(server: &[&str], client: &[&str]) -> [String; 2] {
    both(&format!("{client:?} (of rdmacm-utils or perftest)"), || {
        let port = free_port();
        let run = |words: &[&str]| {
            let words: Vec<_> = words.iter().map(|word| word.replace("PORT", &port)).collect();
            start(&words.iter().map(String::as_str).collect::<Vec<_>>())
        };
        let serving = run(server);
        wait_for_listener(&port);
        finish_both(serving, run(client))
    })
}

#[test]
fn rping_validates_what_it_reads_and_writes() {
    let [server, client] = pair(
        &["rping", "-s", "-a", "127.0.0.1", "-p", "PORT", "-C", "10", "-v", "-V"],
        &["rping", "-c", "-a", "127.0.0.1", "-p", "PORT", "-C", "10", "-v", "-V"],
    );
    assert_eq!(client.matches("ping data: rdma-ping-").count(), 10, "{client}");
    assert!(server.contains("rdma-ping-9"), "{server}");
}

#[test]
fn many_connections_at_once() {
    let [server, client] = pair(
        &["ucmatose", "-p", "PORT", "-c", "20", "-C", "10"],
        &["ucmatose", "-p", "PORT", "-c", "20", "-C", "10", "-s", "127.0.0.1"],
    );
    for output in [server, client] {
        assert!(output.contains("test complete") && output.contains("return status 0"), "{output}");
    }
}

#[test]
fn perftest_connects_by_rdma_cm() {
    for tool in ["ib_write_bw", "ib_read_lat", "ib_send_bw"] {
        let [_, client] = pair(
            &[tool, "-R", "-p", "PORT", "-n", "1000"],
            &[tool, "-R", "-p", "PORT", "-n", "1000", "127.0.0.1"],
        );
        let rows = client.lines().skip_while(|line| !line.trim_start().starts_with("#bytes")).skip(1);
        let counts: Vec<_> =
            rows.filter_map(|row| row.split_whitespace().nth(1)?.parse::<u32>().ok()).collect();
        assert_eq!(counts, [1000], "{tool}:\n{client}");
    }
}

/// An XRC connection: the private data holds the number of the shared receive queue.
#[test]
fn extended_connections_carry_messages() {
    let [server, client] = pair(
        &["rdma_xserver", "-c", "x", "-p", "PORT"],
        &["rdma_xclient", "-c", "x", "-s", "127.0.0.1", "-p", "PORT"],
    );
    assert!(server.contains("rdma_xserver: end 0"), "{server}");
    assert!(client.contains("rdma_xclient: end 0"), "{client}");
}

#[test]
fn a_connection_without_a_listener_is_rejected() {
    let port = free_port();
    let output = finish(start(&["rping", "-c", "-a", "127.0.0.1", "-p", &port, "-C", "1"]));
    let output = output.expect_err("nobody serves");
    assert!(output.contains("REJECTED") || output.contains("connect error"), "{output}");
}

#[test]
fn a_port_has_one_owner() {
    let port = free_port();
    let mut server = start(&["rping", "-s", "-a", "127.0.0.1", "-p", &port]);
    wait_for_listener(&port);
    let second = finish(start(&["rping", "-s", "-a", "127.0.0.1", "-p", &port])).expect_err("taken");
    assert!(second.contains("Address already in use"), "{second}");
    server.kill().unwrap();
    server.wait().unwrap();
    // The port of a killed process is free.
    both("rping", || {
        let third = start(&["rping", "-s", "-a", "127.0.0.1", "-p", &port, "-C", "1"]);
        wait_for_listener(&port);
        finish_both(third, start(&["rping", "-c", "-a", "127.0.0.1", "-p", &port, "-C", "1"]))
    });
}

/// The other side of a killed program ends at once.
#[test]
fn the_other_side_of_a_killed_program_ends() {
    let port = free_port();
    let server = start(&["rping", "-s", "-a", "127.0.0.1", "-p", &port, "-S", "4096"]);
    wait_for_listener(&port);
    let mut client = start(&["rping", "-c", "-a", "127.0.0.1", "-p", &port, "-S", "4096", "-v"]);
    let mut printed = BufReader::new(client.stdout.take().expect("piped"));
    let mut line = String::new();
    while !line.contains("ping data") {
        line.clear();
        assert!(printed.read_line(&mut line).expect("text") > 0, "the client ended early");
    }
    let began = Instant::now();
    client.kill().unwrap();
    client.wait().unwrap();
    // It reports DISCONNECT, or the failure of its last request.
    let end = finish(server);
    assert!(began.elapsed() < Duration::from_secs(20), "it took {:?}: {end:?}", began.elapsed());
}

#[test]
fn programs_find_the_devices_files() {
    let device = "/sys/class/infiniband/mill0";
    assert_eq!(succeeds(&["cat", "/sys/class/misc/rdma_cm/abi_version"]), "4\n");
    assert_eq!(succeeds(&["ls", "/sys/class/infiniband"]), "mill0\n");
    assert_eq!(succeeds(&["cat", &format!("{device}/ports/1/state")]), "4: ACTIVE\n");
    assert_eq!(succeeds(&["realpath", &format!("{device}/ports")]), format!("{device}/ports\n"));
    assert!(succeeds(&["ls", "-l", "/dev/infiniband/uverbs0"]).starts_with("crw-rw-rw-"));
    let globbed = succeeds(&["bash", "-c", &format!("echo {device}/ports/1/gid_attrs/types/0*")]);
    assert!(globbed.ends_with("types/0\n"), "{globbed}");
    let written = finish(start(&["bash", "-c", &format!("echo x > {device}/node_guid")]));
    assert!(written.is_err_and(|error| error.contains("Permission denied")));
    // The verbs library and the files in sysfs describe the same device.
    let guid = succeeds(&["cat", &format!("{device}/node_guid")]);
    assert!(succeeds(&["ibv_devinfo"]).contains(guid.trim()), "{guid}");
}

#[test]
fn without_the_preload_there_are_no_files() {
    let shown = Command::new(env!("CARGO_BIN_EXE_millstream"))
        .args(["--device", "soft", "run", "--no-preload", "--", "sh", "-c", "echo $LD_PRELOAD"])
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&shown.stdout), "\n");
    assert!(succeeds(&["sh", "-c", "echo $LD_PRELOAD"]).trim().ends_with("libmillstream_preload.so"));
}
