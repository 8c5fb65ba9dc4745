//! Control streams: plain TCP, or TLS over it.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use millstream_rdma::connect::ControlStream;
use rustls::{Connection, Error};

use crate::error::SecurityError;
use crate::record::RecordReader;
use crate::verify::Presented;

/// The first byte from the accepting end: it has verified the peer's certificate. Without it, the connecting end would
/// see the refusal only when it reads an answer.
const ACCEPTED: u8 = 0x4d;

/// Most bytes that are encrypted at a time: one record.
const MAX_WRITE: usize = 16 << 10;

/// Most bytes of a refused peer that are read.
const MAX_DISCARDED: usize = 64 << 10;

/// A control stream. Its descriptor is readable when a message or the end of the stream can be read.
#[derive(Debug)]
pub struct Stream {
    tcp: TcpStream,
    tls: Option<Box<Tls>>,
}

/// State of TLS.
pub(crate) struct Tls {
    pub(crate) connection: Connection,
    pub(crate) presented: Presented,
    /// The subject of this program's certificate.
    pub(crate) own_subject: String,
    record: RecordReader,
    is_open: bool,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls").field("peer", &self.presented.get()).field("is_open", &self.is_open).finish()
    }
}

impl Tls {
    pub(crate) fn new(connection: Connection, presented: Presented, own_subject: String) -> Tls {
        Tls { connection, presented, own_subject, record: RecordReader::default(), is_open: false }
    }

    /// Continues the handshake, to its end in blocking mode.
    fn open(&mut self, tcp: &TcpStream) -> io::Result<()> {
        while !self.is_open {
            self.flush(tcp)?;
            if self.connection.is_handshaking() {
                if self.receive(tcp)? == 0 {
                    return Err(SecurityError::Closed.into());
                }
                continue;
            }
            match self.connection {
                Connection::Server(_) => {
                    self.connection.writer().write_all(&[ACCEPTED])?;
                    self.is_open = true;
                    self.flush(tcp)?;
                }
                Connection::Client(_) => {
                    let mut byte = [0];
                    match self.connection.reader().read(&mut byte) {
                        Ok(1) if byte == [ACCEPTED] => self.is_open = true,
                        Ok(1) => return Err(SecurityError::Protocol("no confirmation".to_owned()).into()),
                        Ok(_) => return Err(SecurityError::Closed.into()),
                        Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => {
                            if self.receive(tcp)? == 0 {
                                return Err(SecurityError::Closed.into());
                            }
                        }
                        Err(cause) => return Err(cause),
                    }
                }
            }
        }
        Ok(())
    }

    /// Sends what is encrypted.
    fn flush(&mut self, tcp: &TcpStream) -> io::Result<()> {
        while self.connection.wants_write() {
            match self.connection.write_tls(&mut &*tcp) {
                Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
                Err(cause) => return Err(cause),
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(_) => {}
            }
        }
        Ok(())
    }

    /// Reads a piece of a record. Returns 0 at the end of the stream.
    fn receive(&mut self, tcp: &TcpStream) -> io::Result<usize> {
        let read = loop {
            match self.connection.read_tls(&mut self.record.of(tcp)) {
                Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
                other => break other?,
            }
        };
        if let Err(error) = self.connection.process_new_packets() {
            // The alert; the peer may be gone.
            let _ = self.flush(tcp);
            discard(tcp);
            return Err(self.describe(&error).into());
        }
        Ok(read)
    }

    fn describe(&self, error: &Error) -> SecurityError {
        let theirs = self.presented.get().map(String::as_str);
        SecurityError::new(error, theirs, &self.own_subject)
    }

    fn read(&mut self, tcp: &TcpStream, buffer: &mut [u8]) -> io::Result<usize> {
        self.open(tcp)?;
        loop {
            match self.connection.reader().read(buffer) {
                // An end without notice is an end, too: each message has its length.
                Err(cause) if cause.kind() == io::ErrorKind::UnexpectedEof => return Ok(0),
                Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => {}
                other => return other,
            }
            if self.receive(tcp)? == 0 {
                return Ok(0);
            }
        }
    }

    fn write(&mut self, tcp: &TcpStream, bytes: &[u8]) -> io::Result<usize> {
        self.open(tcp)?;
        let written = self.connection.writer().write(&bytes[..bytes.len().min(MAX_WRITE)])?;
        self.flush(tcp)?;
        Ok(written)
    }
}

/// Reads what has arrived: a stream that is closed with unread bytes is reset, and the peer may lose the alert.
fn discard(mut tcp: &TcpStream) {
    let mut buffer = [0; 4096];
    if tcp.set_nonblocking(true).is_ok() {
        for _ in 0..MAX_DISCARDED / buffer.len() {
            match tcp.read(&mut buffer) {
                Ok(1..) => {}
                _ => break,
            }
        }
    }
}

impl Stream {
    /// A stream without TLS.
    #[must_use]
    pub fn plain(tcp: TcpStream) -> Stream {
        Stream { tcp, tls: None }
    }

    pub(crate) fn tls(tcp: TcpStream, tls: Tls) -> Stream {
        Stream { tcp, tls: Some(Box::new(tls)) }
    }

    /// The TCP stream, for its options and its shutdown.
    #[must_use]
    pub fn tcp(&self) -> &TcpStream {
        &self.tcp
    }

    /// Sets or clears non-blocking mode.
    ///
    /// # Errors
    /// Of the system.
    pub fn set_nonblocking(&self, is_set: bool) -> io::Result<()> {
        self.tcp.set_nonblocking(is_set)
    }

    /// Continues the TLS handshake; in non-blocking mode without waiting ([`io::ErrorKind::WouldBlock`]). Reading and
    /// writing do so, too.
    ///
    /// # Errors
    /// [`SecurityError`] as cause if a certificate is refused; errors of the TCP stream.
    pub fn handshake(&mut self) -> io::Result<()> {
        match &mut self.tls {
            Some(tls) => tls.open(&self.tcp),
            None => Ok(()),
        }
    }

    /// The subject of the peer's certificate; `None` without TLS or before it was presented.
    #[must_use]
    pub fn peer_subject(&self) -> Option<&str> {
        self.tls.as_ref()?.presented.get().map(String::as_str)
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match &mut self.tls {
            Some(tls) => tls.read(&self.tcp, buffer),
            None => self.tcp.read(buffer),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.tls {
            Some(tls) => tls.write(&self.tcp, bytes),
            None => self.tcp.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut self.tls {
            Some(tls) => tls.flush(&self.tcp),
            None => self.tcp.flush(),
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.tcp.as_fd()
    }
}

impl ControlStream for Stream {
    fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.tcp.peer_addr()
    }

    fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.tcp.set_read_timeout(timeout)
    }

    fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.tcp.set_write_timeout(timeout)
    }
}
