//! Base transport header (9.2): the first header of every packet.
//!
//! ```text
//!  0        1                     2        4          5         8   9        12
//! ├────────┼─────────────────────┼────────┼──────────┼─────────┼───┼────────┤
//! │ opcode │ S │ M │ pad │ tver  │ P_Key  │ F │ B │0 │ dest QP │A│S│0│  PSN   │
//! ```

use crate::field::Field;
use crate::opcode::Opcode;
use crate::{Error, Result};
use millstream_quantity::{Pkey, Psn, Qpn};

/// Header length in bytes.
pub const LEN: usize = 12;

mod at {
    use core::ops::Range;

    pub(super) const OPCODE: usize = 0;
    pub(super) const FLAGS: usize = 1;
    pub(super) const PKEY: Range<usize> = 2..4;
    pub(super) const CONGESTION: usize = 4;
    pub(super) const DEST_QP: Range<usize> = 5..8;
    pub(super) const ACK_REQ: usize = 8;
    pub(super) const PSN: Range<usize> = 9..12;
}

/// The byte with the congestion bits, which a switch may change; the ICRC counts it as all ones (annex A17,
/// 17.3).
pub(crate) const VARIANT: usize = at::CONGESTION;

/// A view of the header at the start of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet<T: AsRef<[u8]>> {
    buffer: T,
}

impl<T: AsRef<[u8]>> Packet<T> {
    /// A view of a buffer; accessors panic if the buffer is too short.
    #[inline]
    pub const fn new_unchecked(buffer: T) -> Self {
        Self { buffer }
    }

    /// A view of a buffer that is long enough.
    ///
    /// # Errors
    /// [`Error::Truncated`] if the buffer is shorter than the header.
    #[inline]
    pub fn new_checked(buffer: T) -> Result<Self> {
        let packet = Self { buffer };
        packet.check_len()?;
        Ok(packet)
    }

    /// Checks that the buffer holds the header, so that no accessor panics.
    ///
    /// # Errors
    /// [`Error::Truncated`] if it does not.
    #[inline]
    pub fn check_len(&self) -> Result<()> {
        match self.buffer.as_ref().len() {
            available if available < LEN => Err(Error::Truncated { header: "BTH", needed: LEN, available }),
            _ => Ok(()),
        }
    }

    #[inline]
    fn byte(&self, at: usize) -> u8 {
        self.buffer.as_ref()[at]
    }

    /// The opcode byte, supported or not.
    #[inline]
    pub fn opcode(&self) -> u8 {
        self.byte(at::OPCODE)
    }

    /// Solicited event: the completion raises an event on a completion queue armed for solicited events.
    #[inline]
    pub fn solicited(&self) -> bool {
        self.byte(at::FLAGS) & 0x80 != 0
    }

    /// Migration state: ignored without alternate paths. Adapters set it, rxe does not.
    #[inline]
    pub fn migrated(&self) -> bool {
        self.byte(at::FLAGS) & 0x40 != 0
    }

    /// Pad count: bytes that fill the payload up to a multiple of four.
    #[inline]
    pub fn pad(&self) -> u8 {
        (self.byte(at::FLAGS) >> 4) & 3
    }

    /// Transport header version.
    #[inline]
    pub fn version(&self) -> u8 {
        self.byte(at::FLAGS) & 15
    }

    /// Partition key.
    #[inline]
    pub fn pkey(&self) -> Pkey {
        Field::get(&self.buffer.as_ref()[at::PKEY])
    }

    /// Forward explicit congestion notification.
    #[inline]
    pub fn fecn(&self) -> bool {
        self.byte(at::CONGESTION) & 0x80 != 0
    }

    /// Backward explicit congestion notification.
    #[inline]
    pub fn becn(&self) -> bool {
        self.byte(at::CONGESTION) & 0x40 != 0
    }

    /// Destination queue pair.
    #[inline]
    pub fn dest_qp(&self) -> Qpn {
        Field::get(&self.buffer.as_ref()[at::DEST_QP])
    }

    /// Acknowledge request: the responder shall acknowledge without delay.
    #[inline]
    pub fn ack_req(&self) -> bool {
        self.byte(at::ACK_REQ) & 0x80 != 0
    }

    /// The requester takes selective acknowledgements. The bit is reserved in IBTA: receivers ignore it.
    #[inline]
    pub fn selective_ack(&self) -> bool {
        self.byte(at::ACK_REQ) & 0x40 != 0
    }

    /// The packet sequence number.
    #[inline]
    pub fn psn(&self) -> Psn {
        Field::get(&self.buffer.as_ref()[at::PSN])
    }
}

/// The header as a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repr {
    /// The operation.
    pub opcode: Opcode,
    /// Solicited event.
    pub solicited: bool,
    /// Migration state; both values are accepted.
    pub migrated: bool,
    /// Pad count: bytes that fill the payload up to a multiple of four, 0 to 3.
    pub pad: u8,
    /// Partition key.
    pub pkey: Pkey,
    /// Forward explicit congestion notification.
    pub fecn: bool,
    /// Backward explicit congestion notification.
    pub becn: bool,
    /// Destination queue pair.
    pub dest_qp: Qpn,
    /// Acknowledge request: the responder shall acknowledge without delay.
    pub ack_req: bool,
    /// The requester takes selective acknowledgements. The bit is reserved in IBTA.
    pub selective_ack: bool,
    /// The packet sequence number.
    pub psn: Psn,
}

impl Repr {
    /// A header in the default partition, with the migration state set and every other flag clear.
    #[inline]
    #[must_use]
    pub const fn new(opcode: Opcode, dest_qp: Qpn, psn: Psn) -> Self {
        Self {
            opcode,
            solicited: false,
            migrated: true,
            pad: 0,
            pkey: Pkey::DEFAULT,
            fecn: false,
            becn: false,
            dest_qp,
            ack_req: false,
            selective_ack: false,
            psn,
        }
    }

    /// Parses a view.
    ///
    /// # Errors
    /// [`Error::Truncated`], [`Error::Version`] or [`Error::Opcode`].
    #[inline]
    pub fn parse<T: AsRef<[u8]>>(packet: &Packet<T>) -> Result<Self> {
        packet.check_len()?;
        if packet.version() != 0 {
            return Err(Error::Version(packet.version()));
        }
        Ok(Self {
            opcode: Opcode::from_byte(packet.opcode()).ok_or(Error::Opcode(packet.opcode()))?,
            solicited: packet.solicited(),
            migrated: packet.migrated(),
            pad: packet.pad(),
            pkey: packet.pkey(),
            fecn: packet.fecn(),
            becn: packet.becn(),
            dest_qp: packet.dest_qp(),
            ack_req: packet.ack_req(),
            selective_ack: packet.selective_ack(),
            psn: packet.psn(),
        })
    }

    /// Length of the emitted header in bytes.
    #[inline]
    #[must_use]
    pub const fn buffer_len(&self) -> usize {
        LEN
    }

    /// Emits into a view whose buffer is long enough; reserved bits become zero.
    #[inline]
    pub fn emit<T: AsRef<[u8]> + AsMut<[u8]>>(&self, packet: &mut Packet<T>) {
        let bit = |set: bool, bit: u8| if set { bit } else { 0 };
        let to = &mut packet.buffer.as_mut()[..LEN];
        to[at::OPCODE] = self.opcode.to_byte();
        to[at::FLAGS] = bit(self.solicited, 0x80) | bit(self.migrated, 0x40) | (self.pad & 3) << 4;
        self.pkey.put(&mut to[at::PKEY]);
        to[at::CONGESTION] = bit(self.fecn, 0x80) | bit(self.becn, 0x40);
        self.dest_qp.put(&mut to[at::DEST_QP]);
        to[at::ACK_REQ] = bit(self.ack_req, 0x80) | bit(self.selective_ack, 0x40);
        self.psn.put(&mut to[at::PSN]);
    }
}
