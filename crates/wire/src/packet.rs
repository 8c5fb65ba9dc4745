//! A whole packet: base transport header, extended headers, payload, padding, invariant CRC.

use crate::opcode::{Headers, Opcode, Service};
use crate::{
    Error, ICRC_LEN, Result, aeth, atomic_ack_eth, atomic_eth, bth, deth, ieth, imm_dt, reth, xrceth,
};

/// Reserved bytes of a congestion notification packet between BTH and ICRC.
pub const CNP_PADDING: usize = 16;

/// A view of a packet, the payload of a UDP datagram. Accessors do not panic after [`Packet::new_checked`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet<T: AsRef<[u8]>> {
    buffer: T,
    opcode: Opcode,
}

impl<T: AsRef<[u8]>> Packet<T> {
    /// Checks version, opcode, and the lengths of headers, padding and ICRC, in this order. The value of the
    /// ICRC is not checked; see [`icrc`](crate::icrc).
    ///
    /// # Errors
    /// The first check that fails.
    #[inline]
    pub fn new_checked(buffer: T) -> Result<Self> {
        let bytes = buffer.as_ref();
        let bth = bth::Packet::new_checked(bytes)?;
        if bth.version() != 0 {
            return Err(Error::Version(bth.version()));
        }
        let opcode = Opcode::from_byte(bth.opcode()).ok_or(Error::Opcode(bth.opcode()))?;
        let fixed = bth::LEN + opcode.headers_len() + ICRC_LEN;
        let Some(payload) = bytes.len().checked_sub(fixed) else {
            return Err(Error::Truncated { header: "packet", needed: fixed, available: bytes.len() });
        };
        let pad = bth.pad();
        let fits = match opcode.service() {
            Service::Cnp => pad == 0 && payload == CNP_PADDING,
            // The payload is padded to a multiple of four bytes (9.4.1, "pad count").
            _ if opcode.has_payload() => payload >= usize::from(pad) && payload.is_multiple_of(4),
            _ => payload == 0 && pad == 0,
        };
        if !fits {
            return Err(Error::Payload { opcode: opcode.to_byte(), payload, pad });
        }
        Ok(Self { buffer, opcode })
    }

    /// The opcode.
    #[inline]
    pub fn opcode(&self) -> Opcode {
        self.opcode
    }

    /// The base transport header.
    #[inline]
    pub fn bth(&self) -> bth::Packet<&[u8]> {
        bth::Packet::new_unchecked(self.buffer.as_ref())
    }

    #[inline]
    fn extension(&self, header: Headers) -> Option<&[u8]> {
        let offset = self.opcode.headers().offset_of(header)?;
        Some(&self.buffer.as_ref()[bth::LEN + offset..])
    }

    /// The XRC extended transport header, if the opcode has one.
    #[inline]
    pub fn xrceth(&self) -> Option<xrceth::Packet<&[u8]>> {
        self.extension(Headers::XRCETH).map(xrceth::Packet::new_unchecked)
    }

    /// The datagram extended transport header, if the opcode has one.
    #[inline]
    pub fn deth(&self) -> Option<deth::Packet<&[u8]>> {
        self.extension(Headers::DETH).map(deth::Packet::new_unchecked)
    }

    /// The RDMA extended transport header, if the opcode has one.
    #[inline]
    pub fn reth(&self) -> Option<reth::Packet<&[u8]>> {
        self.extension(Headers::RETH).map(reth::Packet::new_unchecked)
    }

    /// The atomic extended transport header, if the opcode has one.
    #[inline]
    pub fn atomic_eth(&self) -> Option<atomic_eth::Packet<&[u8]>> {
        self.extension(Headers::ATOMIC_ETH).map(atomic_eth::Packet::new_unchecked)
    }

    /// The acknowledge extended transport header, if the opcode has one.
    #[inline]
    pub fn aeth(&self) -> Option<aeth::Packet<&[u8]>> {
        self.extension(Headers::AETH).map(aeth::Packet::new_unchecked)
    }

    /// The atomic acknowledge extended transport header, if the opcode has one.
    #[inline]
    pub fn atomic_ack_eth(&self) -> Option<atomic_ack_eth::Packet<&[u8]>> {
        self.extension(Headers::ATOMIC_ACK_ETH).map(atomic_ack_eth::Packet::new_unchecked)
    }

    /// The immediate data, if the opcode has any.
    #[inline]
    pub fn imm_dt(&self) -> Option<imm_dt::Packet<&[u8]>> {
        self.extension(Headers::IMM_DT).map(imm_dt::Packet::new_unchecked)
    }

    /// The invalidate extended transport header, if the opcode has one.
    #[inline]
    pub fn ieth(&self) -> Option<ieth::Packet<&[u8]>> {
        self.extension(Headers::IETH).map(ieth::Packet::new_unchecked)
    }

    /// The payload, without padding.
    #[inline]
    pub fn payload(&self) -> &[u8] {
        let bytes = self.buffer.as_ref();
        let end = bytes.len() - ICRC_LEN - usize::from(self.bth().pad());
        &bytes[bth::LEN + self.opcode.headers_len()..end]
    }

    /// The invariant CRC.
    #[inline]
    pub fn icrc(&self) -> [u8; ICRC_LEN] {
        let bytes = self.buffer.as_ref();
        let mut icrc = [0; ICRC_LEN];
        icrc.copy_from_slice(&bytes[bytes.len() - ICRC_LEN..]);
        icrc
    }

    /// The bytes that the invariant CRC covers within the packet: all bytes before it.
    #[inline]
    pub fn covered(&self) -> &[u8] {
        let bytes = self.buffer.as_ref();
        &bytes[..bytes.len() - ICRC_LEN]
    }
}

/// A packet as a value. Only the extended headers of its opcode are emitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr<'a> {
    /// Base transport header; `emit` computes its pad count from the payload.
    pub bth: bth::Repr,
    /// XRC extended transport header.
    pub xrceth: Option<xrceth::Repr>,
    /// Datagram extended transport header.
    pub deth: Option<deth::Repr>,
    /// RDMA extended transport header.
    pub reth: Option<reth::Repr>,
    /// Atomic extended transport header.
    pub atomic_eth: Option<atomic_eth::Repr>,
    /// Acknowledge extended transport header.
    pub aeth: Option<aeth::Repr>,
    /// Atomic acknowledge extended transport header.
    pub atomic_ack_eth: Option<atomic_ack_eth::Repr>,
    /// Immediate data.
    pub imm_dt: Option<imm_dt::Repr>,
    /// Invalidate extended transport header.
    pub ieth: Option<ieth::Repr>,
    /// Payload without padding.
    pub payload: &'a [u8],
}

impl<'a> Repr<'a> {
    /// A packet without extended headers.
    #[must_use]
    pub const fn new(bth: bth::Repr, payload: &'a [u8]) -> Self {
        Self {
            bth,
            xrceth: None,
            deth: None,
            reth: None,
            atomic_eth: None,
            aeth: None,
            atomic_ack_eth: None,
            imm_dt: None,
            ieth: None,
            payload,
        }
    }

    /// Parses a view.
    ///
    /// # Errors
    /// None after [`Packet::new_checked`] succeeded.
    pub fn parse<T: AsRef<[u8]>>(packet: &'a Packet<T>) -> Result<Self> {
        Ok(Self {
            bth: bth::Repr::parse(&packet.bth())?,
            xrceth: packet.xrceth().map(|h| xrceth::Repr::parse(&h)).transpose()?,
            deth: packet.deth().map(|h| deth::Repr::parse(&h)).transpose()?,
            reth: packet.reth().map(|h| reth::Repr::parse(&h)).transpose()?,
            atomic_eth: packet.atomic_eth().map(|h| atomic_eth::Repr::parse(&h)).transpose()?,
            aeth: packet.aeth().map(|h| aeth::Repr::parse(&h)).transpose()?,
            atomic_ack_eth: packet.atomic_ack_eth().map(|h| atomic_ack_eth::Repr::parse(&h)).transpose()?,
            imm_dt: packet.imm_dt().map(|h| imm_dt::Repr::parse(&h)).transpose()?,
            ieth: packet.ieth().map(|h| ieth::Repr::parse(&h)).transpose()?,
            payload: packet.payload(),
        })
    }

    /// Length of the packet in bytes, with padding and ICRC.
    #[must_use]
    pub const fn buffer_len(&self) -> usize {
        bth::LEN + self.bth.opcode.headers_len() + self.payload.len().next_multiple_of(4) + ICRC_LEN
    }

    /// Writes the packet, with an ICRC of zero, into the first [`buffer_len`](Self::buffer_len) bytes.
    /// Extended headers of the opcode that are `None` become zero.
    ///
    /// # Panics
    /// If the buffer is shorter.
    pub fn emit(&self, buffer: &mut [u8]) {
        let buffer = &mut buffer[..self.buffer_len()];
        buffer.fill(0);
        let pad = (self.payload.len().next_multiple_of(4) - self.payload.len()) as u8;
        bth::Repr { pad, ..self.bth }.emit(&mut bth::Packet::new_unchecked(&mut *buffer));
        let headers = self.bth.opcode.headers();
        macro_rules! emit {
            ($($field:ident $set:ident;)*) => {$(
                if let (Some(at), Some(repr)) = (headers.offset_of(Headers::$set), &self.$field) {
                    repr.emit(&mut $field::Packet::new_unchecked(&mut buffer[bth::LEN + at..]));
                }
            )*};
        }
        emit! {
            xrceth XRCETH;
            deth DETH;
            reth RETH;
            atomic_eth ATOMIC_ETH;
            aeth AETH;
            atomic_ack_eth ATOMIC_ACK_ETH;
            imm_dt IMM_DT;
            ieth IETH;
        }
        let start = bth::LEN + self.bth.opcode.headers_len();
        buffer[start..start + self.payload.len()].copy_from_slice(self.payload);
    }
}
