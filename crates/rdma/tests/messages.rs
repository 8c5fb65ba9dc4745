//! Messages between two message channels.

mod common;

use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{both, device, soon};
use millstream_rdma::message::{
    MessageChannel, MessageChannelOptions, MessageError, PrepareError, PreparedMessageChannel,
};
use millstream_rdma::{Completion, CompletionQueue, Deadline, RcOptions, Status, connect};

const ADDRESS: &str = "MILLSTREAM_TEST_DIAL";

/// Small sizes, so that every limit is reached. No RNR retries: a frame sent without a credit fails the connection.
fn tight() -> MessageChannelOptions {
    MessageChannelOptions {
        frame_bytes: 128,
        send_frames: 3,
        recv_frames: 4,
        connection: RcOptions { rnr_retries: 0, ..RcOptions::default() },
    }
}

fn connect_messages(mut stream: TcpStream, options: MessageChannelOptions) -> MessageChannel {
    let device = device();
    let queue = CompletionQueue::new(&device, options.completions()).unwrap();
    let prepared = PreparedMessageChannel::new(&device, &queue, &options).unwrap();
    let (messages, private_data) = prepared.connect(&mut stream, b"private_data", soon()).unwrap();
    assert_eq!(private_data, b"private_data");
    messages
}

fn pair(options: MessageChannelOptions) -> (MessageChannel, MessageChannel) {
    both(|stream| connect_messages(stream, options), |stream| connect_messages(stream, options))
}

/// Message `number`: its number, followed by derived bytes, up to the maximum length.
fn message(number: u32, max: usize) -> Vec<u8> {
    let len = 4 + (number.wrapping_mul(2_654_435_761) >> 16) as usize % (max - 3);
    let mut bytes = number.to_be_bytes().to_vec();
    bytes.resize(len, number as u8);
    bytes
}

/// Sends and receives `count` messages concurrently, with a flush every few messages.
fn exchange(messages: &mut MessageChannel, count: u32, flush_every: u32) {
    let max = messages.max_message();
    let (mut sent, mut received) = (0, 0);
    let mut last_progress = Instant::now();
    while sent < count || received < count || !messages.is_idle() {
        let mut progress = messages.progress().unwrap();
        while let Some(bytes) = messages.receive().unwrap() {
            assert_eq!(bytes, message(received, max));
            received += 1;
            progress = true;
        }
        while sent < count {
            match messages.send(&message(sent, max)) {
                Ok(()) => sent += 1,
                Err(MessageError::Full { .. }) => break,
                Err(error) => panic!("{error}"),
            }
            progress = true;
            if sent % flush_every == 0 || sent == count {
                messages.flush().unwrap();
            }
        }
        match progress {
            true => last_progress = Instant::now(),
            false => std::thread::yield_now(),
        }
        assert!(last_progress.elapsed() < Duration::from_secs(10), "stuck: {sent} {received} {messages:?}");
    }
}

#[test]
fn everything_arrives_in_order_through_the_smallest_window() {
    for flush_every in [1, 7, 1000] {
        let (mut a, mut b) = pair(tight());
        std::thread::scope(|scope| {
            let other = scope.spawn(|| exchange(&mut b, 5000, flush_every));
            exchange(&mut a, 5000, flush_every);
            other.join().unwrap();
        });
    }
}

#[test]
fn sides_of_different_sizes_agree() {
    let small = tight();
    let large = MessageChannelOptions { connection: small.connection, ..MessageChannelOptions::default() };
    let (mut a, mut b) =
        both(|stream| connect_messages(stream, small), |stream| connect_messages(stream, large));
    assert_eq!(a.max_message(), b.max_message());
    std::thread::scope(|scope| {
        scope.spawn(|| exchange(&mut b, 3000, 5));
        exchange(&mut a, 3000, 5);
    });
}

#[test]
fn messages_flushed_together_are_one_transfer() {
    let options = MessageChannelOptions::default();
    let device = device();
    let queue = CompletionQueue::new(&device, options.completions()).unwrap();
    let (mut a, mut b) = both(
        |stream| connect_messages(stream, options),
        |mut stream| {
            let prepared = PreparedMessageChannel::new(&device, &queue, &options).unwrap();
            prepared.connect(&mut stream, b"private_data", soon()).unwrap().0
        },
    );
    for number in 0..100u32 {
        a.send(&number.to_be_bytes()).unwrap();
    }
    assert!(!a.is_idle());
    a.flush().unwrap();
    // The queue's owner polls it and passes the completions on.
    let mut buffer = [Completion::EMPTY; 8];
    let mut taken = Vec::new();
    let deadline = soon();
    while taken.is_empty() && !deadline.passed() {
        taken.extend_from_slice(queue.poll(&mut buffer).unwrap());
    }
    assert_eq!(taken.len(), 1, "100 messages in one frame");
    assert_eq!(taken[0].qpn(), b.qpn());
    b.handle(&taken[0]).unwrap();
    b.advance().unwrap();
    for number in 0..100u32 {
        assert_eq!(b.receive().unwrap(), Some(&number.to_be_bytes()[..]));
    }
    assert_eq!(b.receive().unwrap(), None);
}

#[test]
fn memory_is_bounded_without_a_reader() {
    let (mut a, mut b) = pair(tight());
    let long = vec![1; a.max_message()];
    // The peer's window without its reserved credit, and the send frames.
    let room = 3 + 3;
    let mut sent = 0;
    let (deadline, mut full) = (soon(), None);
    while sent < room && !deadline.passed()
        || full.get_or_insert_with(Instant::now).elapsed() < Duration::from_millis(200)
    {
        match a.send(&long) {
            Ok(()) => sent += 1,
            Err(MessageError::Full { peer }) => assert_eq!(peer, a.peer()),
            Err(error) => panic!("{error}"),
        }
        a.flush().unwrap();
        a.progress().unwrap();
    }
    assert_eq!(sent, room);
    let mut got = 0;
    let deadline = soon();
    while got < sent && !deadline.passed() {
        b.progress().unwrap();
        while b.receive().unwrap().is_some() {
            got += 1;
        }
        b.flush().unwrap();
        a.progress().unwrap();
    }
    assert_eq!(got, sent);
    a.send(&long).unwrap();
}

#[test]
fn a_message_longer_than_a_frame_is_refused() {
    let (mut a, mut b) = pair(MessageChannelOptions::default());
    let max = a.max_message();
    assert_eq!(max, 4096 - 12);
    let error = a.send(&vec![0; max + 1]).unwrap_err();
    assert!(matches!(error, MessageError::TooLong { len, max: most } if len == max + 1 && most == max));
    a.send(&[]).unwrap();
    a.send(&vec![9; max]).unwrap();
    a.flush().unwrap();
    let mut lengths = Vec::new();
    let deadline = soon();
    while lengths.len() < 2 && !deadline.passed() {
        b.progress().unwrap();
        while let Some(message) = b.receive().unwrap() {
            lengths.push(message.len());
        }
    }
    assert_eq!(lengths, [0, max]);
}

#[test]
fn messages_before_the_end_are_received_before_the_error() {
    let (mut a, mut b) = pair(MessageChannelOptions::default());
    a.send(b"last words").unwrap();
    a.flush().unwrap();
    while !a.is_idle() {
        a.progress().unwrap();
    }
    b.shut_down().unwrap();
    let error = b.progress().unwrap_err();
    assert_eq!(error.lost_with(), Some(Status::WorkRequestFlushedError), "{error}");
    assert_eq!(b.receive().unwrap(), Some(&b"last words"[..]));
    let error = b.receive().unwrap_err();
    assert!(matches!(&error, MessageError::Lost { peer, .. } if peer == b.peer()), "{error}");
    assert!(b.send(b"more").is_err() && b.flush().is_err());
}

#[test]
fn a_killed_peer_fails_the_next_message() {
    let listener = connect::listen("127.0.0.1:0").unwrap();
    let mut victim = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "waits_to_be_killed", "--ignored"])
        .env(ADDRESS, listener.address().to_string())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let (stream, _) = listener.accept(Deadline::after(Duration::from_secs(10))).unwrap();
    let mut survivor = connect_messages(stream, MessageChannelOptions::default());
    survivor.send(b"are you there?").unwrap();
    survivor.flush().unwrap();
    while !survivor.is_idle() {
        survivor.progress().unwrap();
    }
    victim.kill().unwrap();
    victim.wait().unwrap();

    let start = Instant::now();
    let error = loop {
        let step = survivor.send(b"still there?").and_then(|()| survivor.flush());
        match step.and_then(|()| survivor.progress()) {
            Err(MessageError::Full { .. }) => drop(survivor.progress()),
            Err(error) => break error,
            Ok(_) => std::thread::sleep(Duration::from_millis(5)),
        }
        assert!(start.elapsed() < Duration::from_secs(10), "nothing noticed");
    };
    let status = error.lost_with().unwrap_or_else(|| panic!("{error}"));
    assert!(status.is_peer_lost(), "{error}");
    assert!(start.elapsed() < Duration::from_secs(5));
}

#[test]
#[ignore = "the victim of a_killed_peer_is_noticed_by_the_next_message"]
fn waits_to_be_killed() {
    let address = std::env::var(ADDRESS).unwrap();
    let stream = connect::dial(&address, Deadline::after(Duration::from_secs(10))).unwrap();
    let _messages = connect_messages(stream, MessageChannelOptions::default());
    std::thread::sleep(Duration::from_secs(30));
}

#[test]
fn invalid_options_are_named() {
    let device = device();
    let queue = CompletionQueue::new(&device, 8).unwrap();
    let good = MessageChannelOptions { send_frames: 2, recv_frames: 4, ..MessageChannelOptions::default() };
    for (field, options) in [
        ("frame_bytes = 10", MessageChannelOptions { frame_bytes: 10, ..good }),
        ("send_frames = 1", MessageChannelOptions { send_frames: 1, ..good }),
        ("recv_frames = 3", MessageChannelOptions { recv_frames: 3, ..good }),
        ("completion queue depth = ", MessageChannelOptions { recv_frames: 1000, ..good }),
    ] {
        let error = PreparedMessageChannel::new(&device, &queue, &options).unwrap_err();
        assert!(matches!(error, PrepareError::Option { .. }), "{error}");
        assert!(error.to_string().contains(field), "{error}");
    }
}
