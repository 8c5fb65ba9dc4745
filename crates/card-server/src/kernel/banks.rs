//! The banks of card memory that a run may use.

use millstream_card_abi::MemoryRange;
use millstream_card_abi::command::{Cause, Fault};

use crate::kernel::outside;
use crate::memory::Memory;

/// The banks of card memory that were granted to a run. Offsets are those of card memory.
#[derive(Clone, Copy, Debug)]
pub struct GrantedBanks<'a> {
    memory: &'a Memory,
    bank_bytes: u64,
    mask: u64,
}

impl<'a> GrantedBanks<'a> {
    /// Banks of a memory: bit `i` of `mask` grants the bytes from `i` × `bank_bytes` on.
    pub fn new(memory: &'a Memory, bank_bytes: u64, mask: u64) -> GrantedBanks<'a> {
        GrantedBanks { memory, bank_bytes, mask }
    }

    /// The granted banks, one bit each.
    pub fn mask(&self) -> u64 {
        self.mask
    }

    /// Size of a bank (bytes).
    pub fn bank_bytes(&self) -> u64 {
        self.bank_bytes
    }

    /// All of card memory, if every bank was granted.
    pub fn whole(&self) -> Option<&'a Memory> {
        let banks = self.memory.size() / self.bank_bytes;
        let all = if banks >= 64 { u64::MAX } else { (1 << banks) - 1 };
        (self.mask & all == all).then_some(self.memory)
    }

    /// Checks that a range lies in granted banks.
    pub fn check(&self, span: MemoryRange) -> Result<(), Fault> {
        let foreign = Fault::new(Cause::AccessViolation, span.offset);
        self.memory.check(span).map_err(|_| foreign)?;
        if span.len == 0 {
            return Ok(());
        }
        let (first, last) = (span.offset / self.bank_bytes, (span.offset + span.len - 1) / self.bank_bytes);
        match (first..=last).all(|bank| bank < 64 && self.mask >> bank & 1 == 1) {
            true => Ok(()),
            false => Err(foreign),
        }
    }

    /// Copies bytes out of the banks. A concurrent write can tear them.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Fault> {
        let span = MemoryRange::new(offset, out.len() as u64);
        self.check(span)?;
        self.memory.read(offset, out).map_err(outside(Cause::AccessViolation))
    }

    /// Copies bytes into the banks.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        let span = MemoryRange::new(offset, bytes.len() as u64);
        self.check(span)?;
        self.memory.write(offset, bytes).map_err(outside(Cause::AccessViolation))
    }

    /// The address of a range, for native kernels. It is valid for the whole range as long as the memory lives.
    ///
    /// Other processes and adapters write to the memory at any time. Create a reference to it only if the user
    /// guarantees exclusive access. Memory that is not mapped has no address (`MemoryNotMapped`).
    pub fn as_ptr(&self, span: MemoryRange) -> Result<*mut u8, Fault> {
        self.check(span)?;
        let base = self.memory.as_ptr().ok_or(Fault::new(Cause::MemoryNotMapped, self.mask))?;
        Ok(base.wrapping_add(span.offset as usize))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_outside_the_granted_banks_is_refused() {
        let memory = Memory::anonymous(4 * 4096).unwrap();
        let banks = GrantedBanks::new(&memory, 4096, 0b0110);
        banks.write(4096, &[7; 8192]).unwrap();
        let mut bytes = [0; 2];
        banks.read(3 * 4096 - 2, &mut bytes).unwrap();
        assert_eq!(bytes, [7; 2]);
        for (offset, len) in [(0, 1), (4095, 2), (3 * 4096 - 1, 2), (u64::MAX, 1), (4096, u64::MAX)] {
            let refused = banks.check(MemoryRange::new(offset, len)).unwrap_err();
            assert_eq!(refused, Fault::new(Cause::AccessViolation, offset));
        }
        assert!(banks.as_ptr(MemoryRange::new(4096, 8192)).is_ok());
        assert!(banks.as_ptr(MemoryRange::new(4096, 8193)).is_err());
    }
}
