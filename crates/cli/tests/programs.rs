//! Debian's unmodified verbs programs on the soft device, started by `millstream run`.
//!
//! Each runs as two processes, server and client. They need the packages perftest and ibverbs-utils;
//! without them the tests fail and say so.

mod common;

use std::time::{Duration, Instant};

use common::{both, finish, finish_both, free_port, start};
use millstream_shm::ports;

/// Waits until a process listens on the port.
fn wait_for_listener(port: &str) {
    let port = port.parse().expect("a port");
    assert!(ports::wait_for_listener(port, Duration::from_secs(20)), "nobody listens on port {port}");
}

/// Waits until a client is connected with the port.
fn wait_for_connection(port: &str) {
    let port = port.parse().expect("a port");
    assert!(ports::wait_for_connection(port, Duration::from_secs(20)), "nobody connects to port {port}");
}

/// Runs server and client of a program. Returns the client's output.
fn pair(program: &[&str]) -> String {
    let [_, client] = both(&format!("{program:?} (of perftest or ibverbs-utils)"), || {
        let port = free_port();
        let with_port = [program, &["-p", &port]].concat();
        let server = start(&with_port);
        wait_for_listener(&port);
        finish_both(server, start(&[&with_port[..], &["localhost"]].concat()))
    });
    client
}

/// Perftest's rows of results.
fn rows(output: &str) -> Vec<Vec<f64>> {
    let below = output.lines().skip_while(|line| !line.trim_start().starts_with("#bytes"));
    below
        .filter_map(|line| line.split_whitespace().map(|word| word.parse().ok()).collect())
        .filter(|row: &Vec<f64>| row.len() >= 4)
        .collect()
}

#[test]
fn ibv_devinfo_lists_the_device() {
    let shown = finish(start(&["ibv_devinfo", "-v"])).unwrap_or_else(|error| panic!("{error}"));
    for words in ["hca_id:\tmill0", "PORT_ACTIVE (4)", "Ethernet", "GID[  0]"] {
        assert!(shown.contains(words), "{words:?} is missing:\n{shown}");
    }
}

/// The program finds the device and runs until it is killed.
#[test]
fn ibv_asyncwatch_waits_for_events() {
    let mut watch = start(&["stdbuf", "-oL", "ibv_asyncwatch"]);
    let mut first = String::new();
    let output = watch.stdout.take().expect("piped");
    std::io::BufRead::read_line(&mut std::io::BufReader::new(output), &mut first).expect("a line");
    std::thread::sleep(Duration::from_millis(200));
    let running = watch.try_wait().expect("our own child").is_none();
    watch.kill().expect("our own child");
    watch.wait().expect("our own child");
    assert!(first.starts_with("mill0: async event FD"), "{first:?}");
    assert!(running);
}

#[test]
fn pingpongs_run_and_validate_what_they_receive() {
    for program in [
        &["ibv_rc_pingpong", "-g", "1", "-c"][..],
        &["ibv_rc_pingpong", "-g", "1", "-c", "-e", "-n", "500"],
        &["ibv_rc_pingpong", "-g", "1", "-c", "-t"],
        &["ibv_rc_pingpong", "-g", "1", "-c", "-N"],
        &["ibv_rc_pingpong", "-g", "1", "-c", "-N", "-t", "-n", "5000"],
        &["ibv_rc_pingpong", "-g", "3", "-c", "-s", "1000000", "-n", "200"],
        &["ibv_uc_pingpong", "-g", "1", "-c"],
        &["ibv_ud_pingpong", "-g", "1", "-c", "-s", "1024"],
        &["ibv_srq_pingpong", "-g", "1", "-c"],
    ] {
        let shown = pair(program);
        assert!(shown.contains("usec/iter"), "{program:?}:\n{shown}");
    }
}

/// The server serves two clients; all of them check the data that they receive.
#[test]
fn ibv_xsrq_pingpong_serves_several_clients() {
    let port = free_port();
    let server = start(&["ibv_xsrq_pingpong", "-g", "1", "-c", "2", "-p", &port]);
    wait_for_listener(&port);
    let client = ["ibv_xsrq_pingpong", "-g", "1", "-p", &port, "localhost"];
    let clients = [start(&client), start(&client)].map(finish);
    let server = finish(server);
    for end in [server].iter().chain(&clients) {
        assert!(end.as_ref().is_ok_and(|shown| shown.contains("success")), "{end:?}");
    }
}

#[test]
fn perftest_moves_every_size_by_every_operation() {
    for tool in ["ib_write_bw", "ib_read_bw", "ib_send_bw"] {
        let all = rows(&pair(&[tool, "-a", "-n", "100"]));
        let sizes: Vec<f64> = all.iter().map(|row| row[0]).collect();
        let expected: Vec<f64> = (1..=23).map(|power| f64::from(1 << power)).collect();
        assert_eq!(sizes, expected, "{tool}");
        // The peak rate: the average of a process that waited for a core can be printed as zero.
        assert!(all.iter().all(|row| row[2] > 0.0), "{tool}: {all:?}");
    }
    for tool in ["ib_write_lat", "ib_read_lat", "ib_send_lat", "ib_atomic_lat"] {
        let row = rows(&pair(&[tool, "-n", "1000"]));
        assert_eq!((row.len(), row[0][1]), (1, 1000.0), "{tool}");
    }
}

#[test]
fn perftest_runs_with_its_options() {
    for program in [
        &["ib_write_bw", "-q", "16", "-n", "200"][..],
        &["ib_write_bw", "-b", "-s", "4096"],
        &["ib_send_bw", "-b", "-s", "4096"],
        &["ib_send_bw", "-e", "-s", "4096"],
        &["ib_read_bw", "-e", "-s", "65536", "-n", "500"],
        &["ib_write_bw", "-I", "220", "-s", "128"],
        &["ib_send_bw", "-c", "UD", "-s", "1024"],
        &["ib_send_bw", "-c", "UD", "-g", "-x", "0"],
        &["ib_send_bw", "-c", "XRC", "-q", "2", "-n", "500"],
        &["ib_write_bw", "-c", "XRC", "-n", "500"],
        &["ib_read_bw", "-c", "XRC", "-n", "500"],
        &["ib_atomic_bw", "-c", "XRC", "-n", "500"],
        &["ib_write_bw", "-c", "UC"],
        &["ib_send_bw", "-r", "256", "--use-srq"],
        &["ib_atomic_bw", "-A", "CMP_AND_SWAP"],
        &["ib_atomic_bw", "-A", "FETCH_AND_ADD"],
    ] {
        let shown = pair(program);
        assert_eq!(rows(&shown).len(), 1, "{program:?}:\n{shown}");
    }
}

/// One side is killed: the other one fails within the retry time.
#[test]
fn the_other_side_of_a_killed_program_ends() {
    for kill_server in [true, false] {
        let port = free_port();
        let program = ["ib_write_bw", "-s", "65536", "-D", "30", "-p", &port];
        let mut server = start(&program);
        wait_for_listener(&port);
        let mut client = start(&[&program[..], &["localhost"]].concat());
        wait_for_connection(&port);
        // In the middle of the measurement, or before it begins.
        std::thread::sleep(Duration::from_secs(2));
        let began = Instant::now();
        let (mut killed, survivor) = if kill_server { (server, client) } else { (client, server) };
        killed.kill().unwrap();
        killed.wait().unwrap();
        let end = finish(survivor);
        assert!(end.is_err(), "kill_server = {kill_server}: {end:?}");
        assert!(began.elapsed() < Duration::from_secs(20), "it took {:?}", began.elapsed());
        // Both programs have ended; the next round assigns the variables again.
        server = start(&["true"]);
        client = start(&["true"]);
        assert!(finish(server).is_ok() && finish(client).is_ok());
    }
}
