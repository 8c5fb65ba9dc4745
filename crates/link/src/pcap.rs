//! A link that writes its packets into a capture file.
//!
//! A UDP socket hides the lower layers, so Ethernet, IP and UDP headers are synthesised. Addresses, ports,
//! type of service and the IPv4 identification are correct; the identification of a received packet follows
//! from its ICRC. MAC addresses, time to live and flow label are placeholders, and UDP checksums are omitted.
//! Each packet is a separate record, even if the kernel coalesced several.
//!
//! The format is pcap with nanoseconds (draft-ietf-opsawg-pcap), link type Ethernet.

use std::fs::File;
use std::io::{self, Write as _};
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::SystemTime;

use millstream_shm::fork::CloseOnForkFd;
use millstream_wire::{UDP_PORT, gid};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::datagram::{Outgoing, RxBuffers};
use crate::{Counts, Link, icrc};

const MAGIC: u32 = 0xa1b2_3c4d;
const LINKTYPE_ETHERNET: u32 = 1;
/// Time to live of synthesised headers.
const HOPS: u8 = 64;

/// A capture file. Forked children do not keep it: its lock ends with the last descriptor.
#[derive(Debug)]
struct CaptureFile(CloseOnForkFd);

impl CaptureFile {
    fn open(path: &Path) -> io::Result<Self> {
        // Named pipes, which the call would wait for, cannot be truncated anyway.
        let mut options = File::options();
        // Packets have keys of memory.
        options.write(true).create(true).truncate(false).mode(0o600).custom_flags(libc::O_NONBLOCK);
        CloseOnForkFd::open(|| options.open(path).map(Into::into)).map(Self)
    }
}

impl io::Write for CaptureFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::io::write(&self.0, bytes)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for CaptureFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Captures the packets of another link.
#[derive(Debug)]
pub(crate) struct Pcap<L> {
    inner: L,
    /// `None` after a write error.
    file: Mutex<Option<CaptureFile>>,
    path: PathBuf,
}

/// Whether the process ID is part of the name.
fn has_process_id(path: &Path) -> bool {
    path.to_str().is_some_and(|text| text.contains("%p"))
}

/// Replaces `%p` in the name by the process ID. A process may have several members on the port, in the device
/// and in the connection manager: `-2` follows the ID in the file of the second one, and so on. Without an ID it
/// precedes the extension.
fn expand(path: &Path, nth: u32) -> PathBuf {
    let suffix = if nth == 1 { String::new() } else { format!("-{nth}") };
    if let Some(text) = path.to_str().filter(|_| has_process_id(path)) {
        return text.replace("%p", &format!("{}{suffix}", std::process::id())).into();
    }
    let mut name = path.file_stem().unwrap_or_default().to_owned();
    name.push(suffix);
    if let Some(extension) = path.extension() {
        name.push(".");
        name.push(extension);
    }
    path.with_file_name(name)
}

/// Whether this process has opened the file a second time. Device and connection manager are two libraries, so
/// they share no variable.
fn is_open_twice(file: &CaptureFile) -> bool {
    let Ok(Ok(descriptors)) = rustix::fs::fstat(file).map(|own| {
        std::fs::read_dir("/proc/thread-self/fd").map(|all| {
            let files = all.flatten().filter_map(|fd| std::fs::metadata(fd.path()).ok());
            files.filter(|other| (other.dev(), other.ino()) == (own.st_dev, own.st_ino)).count()
        })
    }) else {
        return false;
    };
    descriptors > 1
}

/// Most members of one process.
const MEMBERS: u32 = 8;

/// Opens the capture file of this member of the port.
fn open(given: &Path) -> io::Result<(CaptureFile, PathBuf)> {
    for nth in 1..=MEMBERS {
        let path = expand(given, nth);
        let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        let file = CaptureFile::open(&path).map_err(named)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {
                rustix::fs::ftruncate(&file, 0).map_err(|error| named(error.into()))?;
                return Ok((file, path));
            }
            Err(Errno::WOULDBLOCK) if has_process_id(given) || is_open_twice(&file) => {}
            Err(Errno::WOULDBLOCK) => {
                let message =
                    "another process writes to it; put %p into the name, which becomes the process id";
                return Err(named(io::Error::new(io::ErrorKind::ResourceBusy, message)));
            }
            Err(error) => return Err(named(error.into())),
        }
    }
    let message = format!("{}: {MEMBERS} captures of this process are being written", given.display());
    Err(io::Error::new(io::ErrorKind::ResourceBusy, message))
}

impl<L: Link> Pcap<L> {
    /// Starts a capture. Each process needs its own file: `%p` in the name keeps them apart.
    pub(crate) fn new(inner: L, path: &Path) -> io::Result<Self> {
        let (mut file, path) = open(path)?;
        let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        let mut header = Vec::with_capacity(24);
        for word in [MAGIC, 2 | 4 << 16, 0, 0, 1 << 18, LINKTYPE_ETHERNET] {
            header.extend(word.to_ne_bytes());
        }
        file.write_all(&header).map_err(named)?;
        Ok(Self { inner, file: Mutex::new(Some(file)), path })
    }

    fn write(&self, records: &[u8]) {
        let mut file = self.file.lock().expect("no panic under this lock");
        if let Some(Err(error)) = file.as_mut().map(|file| file.write_all(records)) {
            // The program continues without its capture.
            tracing::warn!("capture ends: {}: {error}", self.path.display());
            *file = None;
        }
    }
}

/// Fields of the synthesised headers.
struct Frame {
    source: (IpAddr, u16),
    destination: IpAddr,
    tos: u8,
    identification: u16,
}

/// Appends a record with one packet and its headers.
fn record(to: &mut Vec<u8>, frame: &Frame, packet: &[u8]) {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let udp = 8 + packet.len();
    let ip = if frame.destination.is_ipv4() { 20 } else { 40 };
    let len = (14 + ip + udp) as u32;
    for word in [now.as_secs() as u32, now.subsec_nanos(), len, len] {
        to.extend(word.to_ne_bytes());
    }
    to.extend(hardware_address(frame.destination));
    to.extend(hardware_address(frame.source.0));
    match (frame.source.0, frame.destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            to.extend([0x08, 0x00]);
            let start = to.len();
            to.extend([0x45, frame.tos]);
            to.extend(((20 + udp) as u16).to_be_bytes());
            to.extend(frame.identification.to_be_bytes());
            to.extend([0x40, 0, HOPS, libc::IPPROTO_UDP as u8, 0, 0]);
            to.extend(source.octets());
            to.extend(destination.octets());
            let checksum = checksum(&to[start..]);
            to[start + 10..start + 12].copy_from_slice(&checksum.to_be_bytes());
        }
        (source, destination) => {
            to.extend([0x86, 0xdd, 0x60 | frame.tos >> 4, frame.tos << 4, 0, 0]);
            to.extend((udp as u16).to_be_bytes());
            to.extend([libc::IPPROTO_UDP as u8, HOPS]);
            to.extend(gid(source).octets());
            to.extend(gid(destination).octets());
        }
    }
    to.extend(frame.source.1.to_be_bytes());
    to.extend(UDP_PORT.to_be_bytes());
    to.extend((udp as u16).to_be_bytes());
    to.extend([0, 0]);
    to.extend_from_slice(packet);
}

/// A locally administered MAC address from the last four bytes of the IP address.
fn hardware_address(address: IpAddr) -> [u8; 6] {
    let last = match address {
        IpAddr::V4(address) => address.octets(),
        IpAddr::V6(address) => *address.octets().last_chunk().expect("sixteen bytes"),
    };
    [2, 0, last[0], last[1], last[2], last[3]]
}

/// The Internet checksum (RFC 1071).
fn checksum(header: &[u8]) -> u16 {
    let sum: u32 = header.chunks_exact(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    !((sum & 0xffff) + (sum >> 16)) as u16
}

impl<L: Link> Link for Pcap<L> {
    fn send(&self, batches: &mut [Outgoing<'_>]) -> io::Result<usize> {
        let sent = self.inner.send(batches)?;
        let mut records = Vec::new();
        for batch in &batches[..sent] {
            let several = batch.count() > 1;
            for (i, packet) in batch.bytes.chunks(batch.segment.max(1)).enumerate() {
                let frame = Frame {
                    source: (batch.source, self.source_port()),
                    destination: batch.destination,
                    tos: batch.tos,
                    identification: if several { self.identification(i) } else { 0 },
                };
                record(&mut records, &frame, packet);
            }
        }
        self.write(&records);
        Ok(sent)
    }

    fn receive(&self, inbox: &mut RxBuffers) -> io::Result<usize> {
        let received = self.inner.receive(inbox)?;
        let mut records = Vec::new();
        for received in inbox.received() {
            let info = received.info;
            let flow = icrc::flow(info.source, info.source_port, info.destination);
            for (i, packet) in received.packets() {
                let identification = flow.and_then(|flow| icrc::identification(&flow, i as u16, packet));
                let frame = Frame {
                    source: (info.source, info.source_port),
                    destination: info.destination,
                    tos: info.tos,
                    identification: identification.unwrap_or(0),
                };
                record(&mut records, &frame, packet);
            }
        }
        if !records.is_empty() {
            self.write(&records);
        }
        Ok(received)
    }

    fn source_port(&self) -> u16 {
        self.inner.source_port()
    }

    fn identification(&self, index: usize) -> u16 {
        self.inner.identification(index)
    }

    fn counts(&self) -> Counts {
        self.inner.counts()
    }

    fn release_timer(&self) -> Option<BorrowedFd<'_>> {
        self.inner.release_timer()
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::memory::{Memory, batch, send};

    #[test]
    fn each_member_has_its_capture_file() {
        let folder = std::env::temp_dir().join(format!("millstream-pcap-{}", millstream_shm::random_u64()));
        std::fs::create_dir(&folder).unwrap();
        for (name, stem, extension) in [
            ("wire-%p.pcap", format!("wire-{}", std::process::id()), ".pcap"),
            ("wire.1.pcap", "wire.1".to_owned(), ".pcap"),
            ("wire", "wire".to_owned(), ""),
        ] {
            let members = [(); 3].map(|()| Pcap::new(Memory::default(), &folder.join(name)).unwrap());
            for (i, member) in members.iter().enumerate() {
                (0..=i).for_each(|_| send(member, &mut batch(0, 1)));
            }
            let len = |suffix| {
                let file = folder.join(format!("{stem}{suffix}{extension}"));
                let metadata = std::fs::metadata(file).unwrap();
                assert_eq!(metadata.mode() & 0o777, 0o600);
                metadata.len() as usize
            };
            // File header, record headers, Ethernet, IPv4 and UDP headers, 40 bytes of packet.
            let of = |packets: usize| 24 + packets * (16 + 14 + 20 + 8 + 40);
            assert_eq!(["", "-2", "-3"].map(len), [of(1), of(2), of(3)], "{name}");
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_file_of_another_process_is_refused() {
        let path = std::env::temp_dir().join(format!("millstream-{}.pcap", millstream_shm::random_u64()));
        // It holds the lock until its input ends.
        let mut other = std::process::Command::new("flock")
            .arg(&path)
            .args(["sh", "-c", "echo locked; cat"])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .expect("flock runs (Debian package util-linux)");
        let mut line = [0; 7];
        io::Read::read_exact(other.stdout.as_mut().unwrap(), &mut line).unwrap();
        let error = Pcap::new(Memory::default(), &path).unwrap_err().to_string();
        assert!(error.contains("another process") && error.contains("%p"), "{error}");
        drop(other.stdin.take());
        assert!(other.wait().unwrap().success());
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_forked_child_does_not_keep_the_file() {
        let path = std::env::temp_dir().join(format!("millstream-{}.pcap", millstream_shm::random_u64()));
        let link = Pcap::new(Memory::default(), &path).unwrap();
        // SAFETY: the child waits for its end.
        let child = unsafe { libc::fork() };
        if child == 0 {
            loop {
                // SAFETY: as above.
                unsafe { libc::pause() };
            }
        }
        assert!(child > 0);
        drop(link);
        // The child has closed it when it runs.
        let deadline = Instant::now() + Duration::from_secs(20);
        let again = loop {
            match Pcap::new(Memory::default(), &path) {
                Err(_) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(1)),
                opened => break opened,
            }
        };
        // SAFETY: our own child.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, std::ptr::null_mut(), 0);
        }
        std::fs::remove_file(&path).unwrap();
        assert!(again.is_ok(), "{again:?}");
    }

    #[test]
    fn tshark_reads_the_capture() {
        let path = std::env::temp_dir().join(format!("millstream-{}.pcap", millstream_shm::random_u64()));
        let link = Pcap::new(Memory::default(), &path).unwrap();
        send(&link, &mut batch(0, 2));
        link.inner.coming.lock().unwrap().push_back((40, batch(2, 3)));
        assert_eq!(link.receive(&mut RxBuffers::new(1)).unwrap(), 1);
        let fields = ["ip.src", "ip.dst", "ip.id", "ip.checksum.status", "ip.dsfield.ecn", "udp.dstport"];
        let roce = ["infiniband.bth.opcode", "infiniband.bth.destqp", "infiniband.invariant.crc"];
        let output = std::process::Command::new("tshark")
            .args(["-o", "ip.check_checksum:TRUE", "-T", "fields", "-r"])
            .arg(&path)
            .args(fields.iter().chain(&roce).flat_map(|field| ["-e", field]))
            .output()
            .expect("tshark runs (Debian package tshark)");
        std::fs::remove_file(&path).unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split('\t').collect()).collect();
        assert_eq!(lines.len(), 5, "{text}{}", String::from_utf8_lossy(&output.stderr));
        let packets = batch(0, 2).into_iter().chain(batch(2, 3)).collect::<Vec<_>>();
        for (i, (line, packet)) in lines.iter().zip(packets.chunks(40)).enumerate() {
            let identification = format!("0x{:04x}", if i < 2 { i } else { i - 2 });
            let ecn = if i < 2 { "2" } else { "0" };
            assert_eq!(line[..6], ["10.0.0.1", "10.0.0.2", &identification, "1", ecn, "4791"]);
            let icrc = u32::from_be_bytes(packet[36..].try_into().unwrap());
            assert_eq!(line[6..], ["4", "0x456789", &format!("0x{icrc:08x}")]);
        }
    }
}
