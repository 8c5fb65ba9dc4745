//! A card with keys of its site: clients of the site use it, others are refused and do no harm.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use millstream_card::{RemoteCard, RemoteOptions};
use millstream_card_abi::registers::at;
use millstream_tls::authority::{Authority, Validity};
use millstream_tls::{KeyFiles, Keys, Security};

use crate::cards::{NetworkCard, device};
use crate::host::TIMEOUT;

const DAY: Duration = Duration::from_secs(24 * 3600);

/// Keys of `node` in a folder of their own, issued by an authority.
fn keys(folder: &Path, authority: &Authority, node: &str, validity: Validity) -> KeyFiles {
    authority.issue(node, &[], validity).unwrap().create(&folder.join(node)).unwrap()
}

fn security(files: &KeyFiles) -> Security {
    Security::new(Keys::load(files).unwrap())
}

fn error(card: &NetworkCard, security: &Security) -> String {
    let options = RemoteOptions { timeout: Duration::from_secs(5), ..RemoteOptions::default() };
    let begin = Instant::now();
    let error = RemoteCard::connect_with(&device(), &card.address, options, security).unwrap_err();
    assert!(begin.elapsed() < TIMEOUT, "{error} after {:?}", begin.elapsed());
    let error = error.to_string();
    assert!(error.contains(&card.address), "{error}");
    error
}

#[test]
fn a_card_with_keys_serves_nodes_of_its_site_only() {
    let folder = tempfile::tempdir().unwrap();
    let year = Validity::starting_now(365 * DAY);
    let authority = Authority::new("site", year).unwrap();
    let card = NetworkCard::with_keys(&keys(folder.path(), &authority, "card-host", year));
    let node = security(&keys(folder.path(), &authority, "node0", year));

    let client = RemoteCard::connect_with(&device(), &card.address, RemoteOptions::default(), &node).unwrap();
    client.acquire(Duration::from_secs(20), TIMEOUT).unwrap();
    client.write(0, b"unharmed").unwrap();

    // Without keys.
    let plain = error(&card, &Security::NONE);
    assert!(plain.contains("uses TLS") && plain.contains("MILLSTREAM_KEYS"), "{plain}");
    // Of another authority.
    let other = Authority::new("other site", year).unwrap();
    let stranger = security(&keys(folder.path(), &other, "stranger", year));
    let foreign = error(&card, &stranger);
    assert!(foreign.contains("\"card-host\"") && foreign.contains("did not issue it"), "{foreign}");
    // Expired.
    let now = SystemTime::now();
    let past = Validity { from: now - 3 * DAY, until: now - DAY };
    let late = error(&card, &security(&keys(folder.path(), &authority, "late", past)));
    assert!(late.contains("refused this program's certificate of \"late\": it has expired"), "{late}");
    // No TLS at all.
    let mut garbage = TcpStream::connect(&card.address).unwrap();
    garbage.set_read_timeout(Some(TIMEOUT)).unwrap();
    garbage.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    // An alert at most, then the end of the stream.
    let mut answer = Vec::new();
    if let Err(error) = garbage.read_to_end(&mut answer) {
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}");
    }
    assert!(answer.len() < 16, "{answer:02x?}");

    let until = Instant::now() + TIMEOUT;
    while client.register(at::clients_refused).unwrap() < 4 {
        assert!(Instant::now() < until, "{} refused", client.register(at::clients_refused).unwrap());
    }
    assert_eq!(client.register(at::clients_refused).unwrap(), 4);
    assert_eq!(client.register(at::client_count).unwrap(), 1);
    let mut bytes = [0; 8];
    client.read(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"unharmed");
}

#[test]
fn a_client_with_keys_does_not_use_a_card_without() {
    let folder = tempfile::tempdir().unwrap();
    let year = Validity::starting_now(365 * DAY);
    let authority = Authority::new("site", year).unwrap();
    let card = NetworkCard::start();
    let client = card.connect();
    let error = error(&card, &security(&keys(folder.path(), &authority, "node0", year)));
    assert!(error.contains("does not use TLS: it has no keys"), "{error}");
    assert!(client.register(at::client_count).unwrap() == 1);
}
