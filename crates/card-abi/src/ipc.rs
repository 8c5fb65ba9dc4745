//! The two messages over a local socket that open a card: a request, and a reply with the card's descriptors.

use crate::layout;
use crate::registers::{MAGIC, VERSION};

layout! {
    /// The request of a user.
    pub struct OpenRequest[16] {
        0 magic: u64 = "as in the registers";
        8 version: u32 = "as in the registers";
        12 role: u32 = "0 user, 1 owner";
    }
}

layout! {
    /// The reply of the card. A reply without refusal carries three descriptors: BAR0, memory, interrupt.
    pub struct OpenReply[48] {
        0 magic: u64 = "as in the registers";
        8 version: u32 = "as in the registers";
        12 refusal: u32 = "cause of the rejection, 0: accepted";
        16 memory_bytes: u64 = "size of card memory (bytes)";
        24 client: u32 = "id of the client, for the lease word";
        28 reserved: u32 = "zero";
        32 gpu: [u64; 2] = "UUID of the GPU that the memory belongs to; zero: the descriptor can be mapped";
    }
}

/// Role of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Uses the card.
    User = 0,
    /// Uses the card; the card ends with this connection.
    Owner = 1,
}

/// Why a card refuses a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The client runs as another user than the card.
    #[error("card belongs to another user")]
    OtherUser,
    /// The peer has another version of the protocol.
    #[error(
        "card is not compatible with version {VERSION} of the protocol; use the same release on both sides"
    )]
    Version,
    /// The card takes no owner, or has one.
    #[error("card does not accept this connection as its owner")]
    OwnerRejected,
    /// The card has no free connection slot.
    #[error("card has too many connections; close one")]
    TooManyConnections,
    /// The card's memory belongs to a device.
    #[error("other processes cannot map this kind of card memory; use the card over the network")]
    NotMappable,
}

impl OpenRequest {
    /// A request of this role.
    pub fn new(role: Role) -> OpenRequest {
        OpenRequest { magic: MAGIC, version: VERSION, role: role as u32 }
    }

    /// The role of the sender, if it has the same version.
    pub fn role(&self) -> Result<Role, Refusal> {
        if (self.magic, self.version) != (MAGIC, VERSION) {
            return Err(Refusal::Version);
        }
        match self.role {
            0 => Ok(Role::User),
            1 => Ok(Role::Owner),
            _ => Err(Refusal::Version),
        }
    }
}

impl OpenReply {
    /// A reply that grants memory of this size (bytes), or refuses the connection.
    pub fn new(outcome: Result<u64, Refusal>) -> OpenReply {
        let (refusal, memory_bytes) = match outcome {
            Ok(memory_bytes) => (0, memory_bytes),
            Err(Refusal::OtherUser) => (1, 0),
            Err(Refusal::Version) => (2, 0),
            Err(Refusal::OwnerRejected) => (3, 0),
            Err(Refusal::TooManyConnections) => (4, 0),
            Err(Refusal::NotMappable) => (5, 0),
        };
        OpenReply {
            magic: MAGIC,
            version: VERSION,
            refusal,
            memory_bytes,
            client: 0,
            reserved: 0,
            gpu: [0; 2],
        }
    }

    /// UUID of the GPU that the memory belongs to, if its driver has to map it.
    pub fn gpu_uuid(&self) -> Option<[u8; 16]> {
        let [low, high] = self.gpu.map(u64::to_le_bytes);
        let mut uuid = [0; 16];
        uuid[..8].copy_from_slice(&low);
        uuid[8..].copy_from_slice(&high);
        (uuid != [0; 16]).then_some(uuid)
    }

    /// The same reply for memory of the GPU `uuid`.
    #[must_use]
    pub fn of_gpu(self, uuid: [u8; 16]) -> OpenReply {
        let word = |half: &[u8]| u64::from_le_bytes(half.try_into().expect("half of 16 bytes"));
        OpenReply { gpu: [word(&uuid[..8]), word(&uuid[8..])], ..self }
    }

    /// Size of card memory (bytes), or why the card refuses the connection.
    pub fn outcome(&self) -> Result<u64, Refusal> {
        if (self.magic, self.version) != (MAGIC, VERSION) {
            return Err(Refusal::Version);
        }
        match self.refusal {
            0 => Ok(self.memory_bytes),
            1 => Err(Refusal::OtherUser),
            3 => Err(Refusal::OwnerRejected),
            4 => Err(Refusal::TooManyConnections),
            5 => Err(Refusal::NotMappable),
            _ => Err(Refusal::Version),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_replies_round_trip() {
        for role in [Role::User, Role::Owner] {
            assert_eq!(OpenRequest::new(role).role(), Ok(role));
        }
        for outcome in [
            Ok(1 << 33),
            Err(Refusal::OtherUser),
            Err(Refusal::Version),
            Err(Refusal::OwnerRejected),
            Err(Refusal::TooManyConnections),
            Err(Refusal::NotMappable),
        ] {
            assert_eq!(OpenReply::new(outcome).outcome(), outcome);
        }
        let uuid = std::array::from_fn(|byte| byte as u8);
        assert_eq!(OpenReply::new(Ok(4096)).of_gpu(uuid).gpu_uuid(), Some(uuid));
        assert_eq!(OpenReply::new(Ok(4096)).gpu_uuid(), None);
    }

    #[test]
    fn other_versions_are_refused() {
        for at in [0, 7, 8, 11, 12, 15] {
            let mut bytes = OpenRequest::new(Role::User).to_bytes();
            bytes[at] ^= 0x80;
            assert_eq!(OpenRequest::from_bytes(&bytes).role(), Err(Refusal::Version));
            let mut bytes = OpenReply::new(Ok(4096)).to_bytes();
            bytes[at] ^= 0x80;
            assert_eq!(OpenReply::from_bytes(&bytes).outcome(), Err(Refusal::Version));
        }
    }
}
