//! The reference page of the register map and the command format, written by the lists in the code.

use std::fmt::Write as _;

use crate::command::{CAPABILITIES, CAUSES, Code, STATUSES};
use crate::registers::{
    BAR0_BYTES, KERNEL_DIRECTORY, KERNEL_ENTRY_BYTES, MAX_KERNELS, REGISTERS, VERSION, Width, Writer,
};

const HEAD: &str = "\
<!-- Generated from crates/card: run `MILLSTREAM_WRITE_DOCS=1 cargo test -p millstream-card reference`. -->

# Registers and commands of a card
";

/// The page as Markdown; `docs/registers.md` is this string.
pub fn markdown() -> String {
    let mut page = String::from(HEAD);
    // Writing to a string cannot fail.
    let _ = write_page(&mut page);
    page
}

fn write_page(page: &mut String) -> std::fmt::Result {
    write!(
        page,
        "
Version {VERSION}. BAR0 has {BAR0_BYTES} bytes. Registers are little-endian words, read and written
whole. *Writer* is the side that writes a register; the other side reads it. A card keeps its state
privately and publishes it: what a user writes into a register of the card misleads only users.
"
    )?;
    for group in REGISTERS {
        write!(
            page,
            "
## {}

| offset | register | bits | writer | meaning |
|---|---|---|---|---|
",
            group.title
        )?;
        for register in group.registers {
            writeln!(
                page,
                "| {:#05x} | `{}` | {} | {} | {} |",
                register.offset,
                register.name,
                match register.width {
                    Width::U32 => 32,
                    Width::U64 => 64,
                },
                match register.writer {
                    Writer::Card => "card",
                    Writer::User => "user",
                    Writer::Both => "both",
                },
                register.doc,
            )?;
        }
    }
    write!(
        page,
        "
## Kernel directory

From {KERNEL_DIRECTORY:#x}: `kernel_count` entries, at most {MAX_KERNELS}, of {KERNEL_ENTRY_BYTES} bytes: the
kernel's number (u32), then its name, padded with zeros.
"
    )?;
    codes(page, "Status", "value", STATUSES)?;
    codes(page, "Capabilities", "bit mask", CAPABILITIES)?;
    codes(page, "Causes", "value", CAUSES)?;
    page.push_str(COMMANDS);
    Ok(())
}

fn codes(page: &mut String, title: &str, column: &str, codes: &[Code]) -> std::fmt::Result {
    write!(page, "\n## {title}\n\n| {column} | name | meaning |\n|---|---|---|\n")?;
    for code in codes {
        writeln!(page, "| {} | {} | {} |", code.code, code.name, code.doc)?;
    }
    Ok(())
}

const COMMANDS: &str = "
## Commands

The user writes descriptors of 64 bytes into the command ring, then `producer`, then rings the
doorbell. The card runs them in order and writes an entry of 64 bytes into the same slot of the
completion ring, then `completed`, then `interrupt`. A slot is free again once its completion was
taken. Every descriptor gets a completion, whatever it says.

| offset | descriptor | bits | | offset | completion | bits |
|---|---|---|---|---|---|---|
| 0 | kernel | 32 | | 0 | cookie | 64 |
| 4 | flags | 32 | | 8 | index of the command | 64 |
| 8 | arguments: offset | 64 | | 16 | cause, 0 if the kernel ran to its end | 32 |
| 16 | arguments: length | 64 | | 20 | kernel | 32 |
| 24 | result: offset | 64 | | 24 | detail: the offending value | 64 |
| 32 | result: length | 64 | | 32 | events | 32 |
| 40 | cookie | 64 | | 36 | fragments | 32 |
| 48 | reserved, zero | 128 | | 40 | corrupt fragments | 32 |
| | | | | 44 | decision bits set | 32 |
| | | | | 48 | payload bytes | 64 |
| | | | | 56 | kernel time [ns] | 64 |

Offsets are bytes from the start of card memory. The arguments of each kernel are described in its
module, `crates/card/src/kernel`.
";

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn the_page_in_docs_is_current() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/registers.md");
        if std::env::var_os("MILLSTREAM_WRITE_DOCS").is_some() {
            std::fs::write(&path, markdown()).unwrap();
        }
        let written = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            written == markdown(),
            "docs/registers.md is not what the register map says; its first line tells how to \
             write it anew"
        );
    }

    #[test]
    fn every_register_and_cause_is_on_the_page() {
        let page = markdown();
        for register in crate::registers::all() {
            assert!(page.contains(&format!("`{}`", register.name)));
        }
        for cause in CAUSES {
            assert!(page.contains(cause.name) && page.contains(cause.doc));
        }
    }
}
