//! Streams between two ends with and without keys.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, SystemTime};

use millstream_rdma::Deadline;
use millstream_rdma::connect::{ConnectError, dial, listen};
use millstream_tls::authority::{Authority, AuthorityError, Validity};
use millstream_tls::{KeyFiles, Keys, KeysError, Security, SecurityError, Stream};

const DAY: Duration = Duration::from_secs(24 * 3600);

fn year() -> Validity {
    Validity::starting_now(365 * DAY)
}

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(10))
}

/// An authority in a folder.
fn created(folder: &Path, name: &str) -> Result<Authority, AuthorityError> {
    let authority = Authority::new(name, year())?;
    authority.save(folder).map(|()| authority)
}

/// A site in a folder.
struct Site {
    folder: tempfile::TempDir,
    authority: Authority,
}

impl Site {
    fn new() -> Site {
        Site { folder: tempfile::tempdir().unwrap(), authority: Authority::new("site", year()).unwrap() }
    }

    fn files(&self, node: &str, validity: Validity) -> KeyFiles {
        self.authority.issue(node, &[], validity).unwrap().create(&self.folder.path().join(node)).unwrap()
    }

    fn node(&self, node: &str) -> Security {
        Security::new(Keys::load(&self.files(node, year())).unwrap())
    }
}

/// Connects both ends; `host` is the name that the client dials.
fn connect(
    server: &Security,
    client: &Security,
    host: &str,
) -> (Result<Stream, ConnectError>, Result<Stream, ConnectError>) {
    let listener = listen("127.0.0.1:0").unwrap();
    let address = listener.address().to_string();
    std::thread::scope(|scope| {
        let accepted = scope.spawn(move || {
            let (tcp, _) = listener.accept(soon()).unwrap();
            let mut stream = server.accept(tcp, soon())?;
            // Without TLS the first message comes with the first read.
            let mut first = [0; 4];
            stream.tcp().set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            stream
                .read_exact(&mut first)
                .map_err(|cause| ConnectError::stream(stream.tcp().peer_addr().unwrap(), "reading", cause))?;
            Ok(stream)
        });
        let port = address.rsplit_once(':').unwrap().1;
        let dialled = client.connect(dial(&address, soon()).unwrap(), &format!("{host}:{port}"), soon());
        let dialled = dialled.and_then(|mut stream| match stream.write_all(b"MsRC") {
            Ok(()) => Ok(stream),
            Err(cause) => Err(ConnectError::stream(&address, "writing", cause)),
        });
        (accepted.join().unwrap(), dialled)
    })
}

#[test]
fn nodes_of_a_site_exchange_messages() {
    let site = Site::new();
    for host in ["127.0.0.1", "server", "localhost"] {
        let (server, client) = connect(&site.node("server"), &site.node("client"), host);
        let (mut server, mut client) = (server.unwrap(), client.unwrap());
        assert_eq!(server.peer_subject(), Some("client"));
        assert_eq!(client.peer_subject(), Some("server"));
        // Larger than a record, in both directions.
        let long: Vec<u8> = (0..200_000_u32).map(|at| at as u8).collect();
        std::thread::scope(|scope| {
            scope.spawn(|| server.write_all(&long).unwrap());
            let mut read = vec![0; long.len()];
            client.read_exact(&mut read).unwrap();
            assert!(read == long);
        });
        client.write_all(b"bye").unwrap();
        drop(client);
        let mut rest = Vec::new();
        server.read_to_end(&mut rest).unwrap();
        assert_eq!(rest, b"bye");
        std::fs::remove_dir_all(site.folder.path().join("server")).unwrap();
        std::fs::remove_dir_all(site.folder.path().join("client")).unwrap();
    }
}

#[test]
fn a_stream_of_a_non_blocking_server_shows_each_message_at_its_descriptor() {
    let site = Site::new();
    let (server_keys, client_keys) = (site.node("server"), site.node("client"));
    let listener = listen("127.0.0.1:0").unwrap();
    let address = listener.address().to_string();
    let client = std::thread::spawn(move || {
        let mut stream = client_keys.dial(&address, soon()).unwrap();
        // Two messages at once: the second stays in the kernel until the first is read.
        stream.write_all(b"one").unwrap();
        stream.write_all(b"two").unwrap();
        stream
    });
    let mut stream = server_keys.accept_later(listener.accept(soon()).unwrap().0).unwrap();
    stream.set_nonblocking(true).unwrap();
    let readable = |stream: &Stream| {
        let mut polled = [rustix::event::PollFd::new(stream, rustix::event::PollFlags::IN)];
        let timeout = rustix::event::Timespec { tv_sec: 10, tv_nsec: 0 };
        assert_eq!(rustix::event::poll(&mut polled, Some(&timeout)).unwrap(), 1);
    };
    let mut message = [0; 16];
    for expected in [b"one", b"two"] {
        let read = loop {
            readable(&stream);
            match stream.read(&mut message) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                other => break other.unwrap(),
            }
        };
        assert_eq!(&message[..read], expected);
    }
    let error = stream.read(&mut message).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    drop(client.join().unwrap());
    readable(&stream);
    assert_eq!(stream.read(&mut message).unwrap(), 0);
}

/// Both ends fail; returns their errors.
#[track_caller]
fn refusal(server: &Security, client: &Security, host: &str) -> (String, String) {
    let (server, client) = connect(server, client, host);
    (server.unwrap_err().to_string(), client.unwrap_err().to_string())
}

#[test]
fn a_certificate_of_another_authority_is_refused() {
    let (site, other) = (Site::new(), Site::new());
    let (server, client) = refusal(&site.node("server"), &other.node("stranger"), "127.0.0.1");
    assert!(client.contains("certificate of \"server\" is refused: the authority of this site"), "{client}");
    assert!(server.contains("peer 127.0.0.1:"), "{server}");
    // A client that trusts anyone: the server refuses it.
    let trusting = other.authority.issue("stranger", &[], year()).unwrap();
    let files = trusting.create(&other.folder.path().join("trusting")).unwrap();
    std::fs::copy(&site.files("copied", year()).authority, &files.authority).unwrap();
    let trusting = Security::new(Keys::load(&files).unwrap());
    let (server, client) = refusal(&site.node("second"), &trusting, "127.0.0.1");
    assert!(
        server.contains("certificate of \"stranger\" is refused: the authority of this site"),
        "{server}"
    );
    assert!(client.contains("refused this program's certificate of \"stranger\""), "{client}");
}

#[test]
fn an_expired_certificate_is_refused() {
    let site = Site::new();
    let now = SystemTime::now();
    let past = Validity { from: now - 3 * DAY, until: now - DAY };
    let late = Security::new(Keys::load(&site.files("late", past)).unwrap());
    let (server, client) = refusal(&site.node("server"), &late, "127.0.0.1");
    assert!(server.contains("certificate of \"late\" is refused: it has expired"), "{server}");
    assert!(client.contains("certificate of \"late\": it has expired"), "{client}");
    let (server, client) = refusal(&late, &site.node("client"), "127.0.0.1");
    assert!(client.contains("certificate of \"late\" is refused: it has expired"), "{client}");
    assert!(server.contains("certificate of \"late\": it has expired"), "{server}");
}

#[test]
fn another_node_of_the_site_is_refused_where_a_node_is_named() {
    let site = Site::new();
    let (node7, node8) = (site.node("node7"), site.node("node8"));
    // The client dials a name.
    let (_, client) = refusal(&node8, &node7, "node7");
    assert!(client.contains("certificate of \"node8\" is refused: it is of another node"), "{client}");
    // The server has a list.
    let listed = node8.clone().for_nodes(&["node1".to_owned(), "node2".to_owned()]).unwrap();
    let (server, client) = refusal(&listed, &node7, "node8");
    assert!(server.contains("\"node7\" is refused: its node is not on the list"), "{server}");
    assert!(client.contains("its node is not on the peer's list"), "{client}");
    let listed = node8.clone().for_nodes(&["node7".to_owned()]).unwrap();
    let (server, client) = connect(&listed, &node7, "node8");
    server.unwrap();
    client.unwrap();
    assert!(matches!(node8.for_nodes(&["a b".to_owned()]), Err(KeysError::Node { .. })));
}

#[test]
fn a_list_of_nodes_has_no_name_that_all_nodes_have() {
    let site = Site::new();
    let node8 = site.node("node8");
    let mut names = site.files("node7", year()).names().unwrap();
    names.retain(|name| name != "node7");
    assert_eq!(names.len(), 3, "{names:?}");
    names.extend(["LocalHost", "localhost.", "0:0:0:0:0:0:0:1", "127.0.0.2"].map(str::to_owned));
    for name in names {
        let error = node8.clone().for_nodes(&["node1".to_owned(), name.clone()]).unwrap_err();
        assert!(
            matches!(&error, KeysError::LocalNode { name: refused } if *refused == name),
            "{name}: {error}"
        );
    }
    assert!(node8.for_nodes(&["[::1]".to_owned()]).is_err());
}

#[test]
fn one_end_without_keys_is_an_error_at_both() {
    let site = Site::new();
    let node = site.node("node");
    let listener = listen("127.0.0.1:0").unwrap();
    let address = listener.address().to_string();
    // A client without keys.
    let mut plain = dial(&address, soon()).unwrap();
    plain.write_all(b"MsRC and a record of a queue pair").unwrap();
    let error = node.accept(listener.accept(soon()).unwrap().0, soon()).unwrap_err().to_string();
    assert!(error.contains("does not use TLS: it has no keys"), "{error}");
    let mut answer = [0; 4];
    plain.read_exact(&mut answer).unwrap();
    assert!(millstream_rdma::connect::is_tls(&answer), "{answer:02x?}");
    // A server without keys, which answers, or closes the connection.
    for answer in [&b"MsRC and a record of a queue pair"[..], b""] {
        let server = std::thread::scope(|scope| {
            let client = scope.spawn(|| node.dial(&address, soon()));
            let (mut tcp, _) = listener.accept(soon()).unwrap();
            tcp.write_all(answer).unwrap();
            tcp.shutdown(std::net::Shutdown::Write).unwrap();
            client.join().unwrap()
        });
        let error = server.unwrap_err().to_string();
        assert!(error.contains("no keys"), "{error}");
    }
}

#[test]
fn a_silent_peer_ends_the_handshake_at_the_deadline() {
    let site = Site::new();
    let node = site.node("node");
    let listener = listen("127.0.0.1:0").unwrap();
    let _silent = TcpStream::connect(listener.address()).unwrap();
    let soon = Deadline::after(Duration::from_millis(50));
    let error = node.accept(listener.accept(self::soon()).unwrap().0, soon).unwrap_err().to_string();
    assert!(error.contains("timed out while making the TLS connection"), "{error}");
    let error = node.dial(&listener.address().to_string(), Deadline::after(Duration::from_secs(2)));
    assert!(error.unwrap_err().to_string().contains("timed out while making the TLS connection"));
}

#[test]
fn keys_that_cannot_be_used_are_named() {
    use std::os::unix::fs::PermissionsExt;
    let site = Site::new();
    let (files, other) = (site.files("node", year()), site.files("other", year()));
    let load = |files: &KeyFiles| Keys::load(files).unwrap_err().to_string();
    let mixed = KeyFiles { key: other.key.clone(), ..files.clone() };
    assert!(load(&mixed).contains("does not belong to the certificate"), "{}", load(&mixed));
    let missing = KeyFiles { authority: Path::new("/nonexistent/a.pem").into(), ..files.clone() };
    assert!(load(&missing).contains("authority /nonexistent/a.pem"), "{}", load(&missing));
    let wrong = KeyFiles { certificate: files.key.clone(), ..files.clone() };
    assert!(load(&wrong).contains("has no certificate in PEM"), "{}", load(&wrong));
    std::fs::set_permissions(&files.key, std::fs::Permissions::from_mode(0o640)).unwrap();
    assert!(load(&files).contains("mode 0640"), "{}", load(&files));
}

#[test]
fn an_authority_in_a_folder_issues_and_renews_keys() {
    let long = "y".repeat(60);
    for site in ["Amsterdam", "Karlsruhe's pit", "a \"site\" \\ a line\n", "Gro\u{df}-Gerau", &long] {
        issue_and_renew(&format!("Millstream authority of {site}"));
    }
}

fn issue_and_renew(name: &str) {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("keys");
    let authority = created(&out, name).unwrap();
    let old = authority.issue("node0", &["10.0.0.7".to_owned()], year()).unwrap();
    let files = old.create(&out.join("node0")).unwrap();
    for file in [&files.certificate, &files.key, &files.authority, &out.join("authority/key.pem")] {
        let mode = std::fs::metadata(file).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o600, "{}", file.display());
    }
    assert!(old.create(&out.join("node0")).unwrap_err().to_string().contains("--renew"));
    assert!(created(&out, "another").unwrap_err().to_string().contains("--renew"));
    let before = std::fs::read(&files.certificate).unwrap();
    let server = Security::new(Keys::load(&files).unwrap());

    let again = Authority::load(&out).unwrap();
    again.issue("node0", &[], year()).unwrap().replace(&out.join("node0")).unwrap();
    assert_ne!(std::fs::read(&files.certificate).unwrap(), before);
    assert_eq!(std::fs::read_dir(out.join("node0")).unwrap().count(), 3);
    let renewed = Security::new(Keys::load(&files).unwrap());
    // Nodes with keys of before and after trust each other.
    let (accepted, dialled) = connect(&server, &renewed, "node0");
    accepted.unwrap_or_else(|error| panic!("{name}: {error}"));
    dialled.unwrap_or_else(|error| panic!("{name}: {error}"));
    assert!(Authority::load(folder.path()).unwrap_err().to_string().contains("has no authority"));
    assert!(again.issue("authority", &[], year()).is_err());
    assert!(again.issue("../node0", &[], year()).is_err());
}

#[test]
fn an_authority_whose_keys_nobody_would_accept_issues_none() {
    let folder = tempfile::tempdir().unwrap();
    let (one, other) = (folder.path().join("one"), folder.path().join("other"));
    created(&one, "site").unwrap();
    created(&other, "site").unwrap();
    // A key that does not belong to the certificate, as after a backup of half the folder.
    std::fs::copy(other.join("authority/key.pem"), one.join("authority/key.pem")).unwrap();
    let error = Authority::load(&one).unwrap().issue("node0", &[], year()).unwrap_err().to_string();
    assert!(error.contains("node0: nodes would refuse the new certificate"), "{error}");
}

#[test]
fn the_cause_of_a_stream_error_is_found() {
    let site = Site::new();
    let listener = listen("127.0.0.1:0").unwrap();
    let mut plain = TcpStream::connect(listener.address()).unwrap();
    plain.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let mut stream = site.node("node").accept_later(listener.accept(soon()).unwrap().0).unwrap();
    let error = stream.handshake().unwrap_err();
    assert!(matches!(SecurityError::of(&error), Some(SecurityError::Plain)), "{error}");
}
