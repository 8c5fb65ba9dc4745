//! IP addresses and ports in the private data of connection requests (annex A11).

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::layout::addresses as header;
use crate::{Error, Result};

/// A port space of rdma_cm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortSpace {
    /// Connections (`RDMA_PS_TCP`).
    Tcp,
    /// Datagrams (`RDMA_PS_UDP`).
    Udp,
    /// IPoIB (`RDMA_PS_IPOIB`).
    Ipoib,
    /// InfiniBand service IDs (`RDMA_PS_IB`).
    Ib,
}

impl PortSpace {
    /// The value of the constant in `rdma/rdma_cma.h`.
    #[must_use]
    pub const fn number(self) -> u16 {
        match self {
            Self::Tcp => 0x0106,
            Self::Udp => 0x0111,
            Self::Ipoib => 0x0002,
            Self::Ib => 0x013f,
        }
    }
}

/// The service ID of a port (annex A11, 11.3): port space and port number.
#[must_use]
pub const fn service_id(space: PortSpace, port: u16) -> u64 {
    (space.number() as u64) << 16 | port as u64
}

/// The IP addresses of a connection request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addresses {
    /// Address of the requester.
    pub source: IpAddr,
    /// Port of the requester.
    pub source_port: u16,
    /// Address of the listener, of the same family.
    pub destination: IpAddr,
}

impl Addresses {
    /// Length in front of the private data, in bytes.
    pub const LEN: usize = header::LEN;

    /// Parses the private data of a REQ or SIDR_REQ; also returns the bytes behind the addresses.
    ///
    /// # Errors
    /// [`Error::Truncated`], or [`Error::Field`] for another version or family.
    pub fn parse(private: &[u8]) -> Result<(Self, &[u8])> {
        let header = header::Repr::parse(&header::Packet::new_checked(private)?)?;
        let wrong = |field, value: u8| Error::Field { header: "IP CM header", field, value: value.into() };
        if header.version != 0 {
            return Err(wrong("version", header.version));
        }
        let address = match header.byte_1 >> 4 {
            4 => |bits: u128| IpAddr::V4(Ipv4Addr::from_bits(bits as u32)),
            6 => |bits: u128| IpAddr::V6(Ipv6Addr::from_bits(bits)),
            version => return Err(wrong("IP version", version)),
        };
        let addresses = Self {
            source: address(header.source),
            source_port: header.port,
            destination: address(header.destination),
        };
        Ok((addresses, &private[header::LEN..]))
    }

    /// Emits into the first [`LEN`](Self::LEN) bytes of private data.
    ///
    /// # Panics
    /// If the buffer is shorter.
    pub fn emit(&self, private: &mut [u8]) {
        let bits = |address: IpAddr| match address {
            IpAddr::V4(v4) => v4.to_bits().into(),
            IpAddr::V6(v6) => v6.to_bits(),
        };
        let header = header::Repr {
            version: 0,
            byte_1: if self.source.is_ipv4() { 0x40 } else { 0x60 },
            port: self.source_port,
            source: bits(self.source),
            destination: bits(self.destination),
        };
        header.emit(&mut header::Packet::new_unchecked(private));
    }
}
