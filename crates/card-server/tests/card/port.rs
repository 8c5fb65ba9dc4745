//! The control port of a card on the network: silent clients, clients that send garbage, and too many of them.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use millstream_card_abi::registers::at;

use crate::cards::NetworkCard;
use crate::host::TIMEOUT;

/// Most connections in progress that a card keeps.
const CONNECTING: usize = 16;

fn threads(card: &NetworkCard) -> usize {
    std::fs::read_dir(format!("/proc/{}/task", card.process.id())).unwrap().count()
}

#[test]
fn silent_and_invalid_clients_are_bounded_and_keep_nobody_out() {
    const SILENT: usize = 100;
    let card = NetworkCard::start();
    let holder = card.connect();
    holder.acquire(Duration::from_secs(20), TIMEOUT).unwrap();
    let before = threads(&card);
    let mut silent: Vec<_> = (0..SILENT).map(|_| TcpStream::connect(&card.address).unwrap()).collect();
    for _ in 0..50 {
        let mut invalid = TcpStream::connect(&card.address).unwrap();
        // The card may have closed the connection already.
        let _ = invalid.write_all(b"GET / HTTP/1.1\r\nHost: card\r\nAccept: text/html, text/plain\r\n\r\n");
    }
    // A client connects while the silent ones wait.
    let client = card.connect();
    holder.write(0, b"unharmed").unwrap();
    let until = Instant::now() + TIMEOUT;
    while client.register(at::clients_refused).unwrap() < (SILENT + 50 - CONNECTING) as u64 {
        assert!(Instant::now() < until, "{} refused", client.register(at::clients_refused).unwrap());
    }
    while threads(&card) > before + CONNECTING {
        assert!(Instant::now() < until, "{} threads, {before} before", threads(&card));
    }
    silent.push(TcpStream::connect(&card.address).unwrap());
    // The last silent ones are disconnected at the end of their time.
    for stream in &mut silent {
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        // The card's record, if it was sent, then the end of the stream. A reset is an end, too.
        match stream.read_to_end(&mut Vec::new()) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}"),
        }
    }
    assert_eq!(client.register(at::client_count).unwrap(), 2);
    let mut bytes = [0; 8];
    holder.read(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"unharmed");
}
