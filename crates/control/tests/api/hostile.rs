//! Clients that flood, stall or send garbage harm neither the run nor other clients.

use crate::backend::{BOUND, Test};
use millstream_control::http::ServerLimits;
use millstream_control::machine::State;
use std::io::{Read, Write};
use std::time::{Duration, Instant};

fn running(limits: &ServerLimits) -> Test {
    let test = Test::with(limits);
    test.control.configure().unwrap();
    let request = millstream_control::Request::default();
    test.control.command(millstream_control::machine::Command::Start, &request).unwrap();
    let until = Instant::now() + BOUND;
    while test.control.status().state != State::Running {
        assert!(Instant::now() < until);
        std::thread::yield_now();
    }
    test
}

fn assert_undisturbed(test: &Test) {
    let status = test.status();
    assert_eq!(status.state, State::Running);
    let events = status.run.unwrap().progress.events_built;
    test.wait(|status| status.run.as_ref().is_some_and(|run| run.progress.events_built > events));
    assert!(status.faults.is_empty());
}

#[test]
fn garbage_is_refused() {
    let test = running(&ServerLimits::default());
    let mut random = 1u32;
    for length in [1, 10, 1000, 100_000] {
        let bytes: Vec<u8> = std::iter::repeat_with(|| {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (random >> 24) as u8
        })
        .take(length)
        .chain(*b"\r\n\r\n")
        .collect();
        let answer = test.raw(&bytes);
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 400"), "{answer:?}");
    }
    for text in [
        "GET / HTTP/9.9\r\n\r\n",
        "GET /\r\n\r\n",
        "POST /api/v1/stop HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        "POST /api/v1/stop HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        "\u{16}\u{3}\u{1}\u{2}\u{0}",
    ] {
        let answer = test.raw(text.as_bytes());
        assert!(answer.is_empty() || answer.starts_with("HTTP/1."), "{answer:?}");
        assert!(!answer.contains(" 200 "), "{answer:?}");
    }
    assert_undisturbed(&test);
}

#[test]
fn giant_headers_and_bodies_are_refused() {
    let test = running(&ServerLimits::default());
    let header = format!("GET / HTTP/1.1\r\nHost: x\r\nX: {}\r\n\r\n", "x".repeat(1 << 20));
    let answer = test.raw(header.as_bytes());
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431"), "{answer:?}");
    let answer = test.command("comment", &format!("{{\"comment\": \"{}\"}}", "x".repeat(70 << 10)));
    assert_eq!(answer.code, 413, "{answer:?}");
    // The length alone is enough to refuse it, and without the token the body is not read.
    let announced = "POST /api/v1/comment HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n";
    let answer = test.raw(announced.as_bytes());
    assert!(answer.starts_with("HTTP/1.1 401"), "{answer:?}");
    assert_undisturbed(&test);
}

#[test]
fn silent_clients_lose_their_connections() {
    let limits = ServerLimits {
        connections: 8,
        header_timeout: Duration::from_millis(300),
        body_timeout: Duration::from_millis(300),
        ..ServerLimits::default()
    };
    let test = running(&limits);
    // More than the server takes at a time: one byte and silence, or nothing at all.
    let mut stalled: Vec<_> = (0..24)
        .map(|index| {
            let mut stream = test.connect();
            stream.write_all(&b"GET / HT"[..index % 2]).unwrap();
            stream
        })
        .collect();
    assert_undisturbed(&test);
    for stream in &mut stalled {
        // The end of the stream, or its reset.
        let _ = stream.read_to_end(&mut Vec::new());
    }
    // A body that does not come is not waited for.
    let head = format!(
        "POST /api/v1/comment HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {}\r\nContent-Length: 10\r\n\r\n{{",
        test.token.as_str()
    );
    let answer = test.raw(head.as_bytes());
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 408"), "{answer:?}");
}

#[test]
fn clients_that_never_read_lose_their_connections() {
    let send_timeout = Duration::from_secs(1);
    let test = running(&ServerLimits { connections: 8, send_timeout, ..ServerLimits::default() });
    // All places: each client asks for more than the buffers of both ends take, and reads nothing.
    let requests = b"GET /app.js HTTP/1.1\r\nHost: x\r\n\r\n".repeat(10_000);
    let deaf: Vec<_> = (0..8)
        .map(|_| {
            let stream = test.connect();
            rustix::net::sockopt::set_socket_recv_buffer_size(&stream, 4096).unwrap();
            stream.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
            stream
        })
        .collect();
    std::thread::scope(|scope| {
        for mut stream in &deaf {
            let requests = &requests;
            scope.spawn(move || _ = stream.write_all(requests));
        }
    });
    let mut stream = test.connect();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.write_all(b"GET /api/v1/status HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut start = [0; 12];
    stream.read_exact(&mut start).unwrap();
    assert_eq!(&start, b"HTTP/1.1 200");
    assert_undisturbed(&test);
    drop(deaf);
}

#[test]
fn a_flood_is_served_in_turn() {
    let test = running(&ServerLimits { connections: 16, ..ServerLimits::default() });
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..50 {
                    assert_eq!(test.get("/api/v1/status").code, 200);
                }
            });
        }
    });
    assert_undisturbed(&test);
}

#[test]
fn event_streams_are_bounded_and_show_changes() {
    let test = running(&ServerLimits::default());
    let open = || {
        let mut stream = test.connect();
        stream.write_all(b"GET /api/v1/events HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        stream
    };
    let mut text = String::new();
    let mut first = open();
    let mut chunk = [0; 4096];
    while text.matches("event: status").count() < 3 {
        let length = first.read(&mut chunk).unwrap();
        assert!(length > 0, "{text}");
        text.push_str(&String::from_utf8_lossy(&chunk[..length]));
    }
    assert!(text.contains("text/event-stream") && text.contains("\"state\":\"running\""), "{text}");
    let mut streams: Vec<_> = (0..64).map(|_| open()).collect();
    let refused = |stream: &mut std::net::TcpStream| {
        let mut start = [0; 12];
        stream.read_exact(&mut start).unwrap();
        &start == b"HTTP/1.1 503"
    };
    assert_eq!(streams.iter_mut().map(refused).filter(|refused| *refused).count(), 1);
    drop((first, streams));
    assert_undisturbed(&test);
}
