//! The reference page of the register map and the command format, written by the lists in the code.

use std::fmt::Write as _;

use crate::command::{CAPABILITIES, CAUSES, Code, RawCompletion, RawDescriptor, STATUSES};
use crate::handshake::{Answer, Request};
use crate::kernel::cluster7::Cluster7Args;
use crate::kernel::slot::{EVENT_STATUSES, Place, Summary};
use crate::kernel::verify::VerifyArgs;
use crate::layout::Field;
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
    structure(page, "Descriptor", RawDescriptor::BYTES, RawDescriptor::FIELDS)?;
    structure(page, "Completion", RawCompletion::BYTES, RawCompletion::FIELDS)?;
    page.push_str(CONNECTIONS);
    structure(page, "Request", Request::BYTES, Request::FIELDS)?;
    structure(page, "Answer", Answer::BYTES, Answer::FIELDS)?;
    page.push_str(KERNELS);
    structure(page, "Arguments of `verify`", VerifyArgs::BYTES, VerifyArgs::FIELDS)?;
    structure(page, "Arguments of `cluster7`", Cluster7Args::BYTES, Cluster7Args::FIELDS)?;
    structure(page, "Place", Place::BYTES, Place::FIELDS)?;
    structure(page, "Summary", Summary::BYTES, Summary::FIELDS)?;
    codes(page, "Event status", "bit mask", EVENT_STATUSES)
}

fn codes(page: &mut String, title: &str, column: &str, codes: &[Code]) -> std::fmt::Result {
    write!(page, "\n## {title}\n\n| {column} | name | meaning |\n|---|---|---|\n")?;
    for code in codes {
        writeln!(page, "| {} | {} | {} |", code.code, code.name, code.doc)?;
    }
    Ok(())
}

fn structure(page: &mut String, title: &str, bytes: usize, fields: &[Field]) -> std::fmt::Result {
    write!(
        page,
        "\n### {title}, {bytes} bytes\n\n| offset | bytes | field | meaning |\n|---|---|---|---|\n"
    )?;
    for Field { offset, bytes, name, doc } in fields {
        writeln!(page, "| {offset} | {bytes} | `{name}` | {doc} |")?;
    }
    Ok(())
}

const COMMANDS: &str = "
## Commands

The user writes descriptors into the command ring, then `producer`, then rings the doorbell. The card
runs them in order and writes an entry into the same slot of the completion ring, then `completed`,
then `interrupt`. A slot is free again once its completion was taken. Every descriptor gets a
completion, whatever it says. Numbers are little-endian; offsets into card memory count from its
start.
";

const CONNECTIONS: &str = "
## Opening a card

An emulated card listens on a local socket (`SOCK_SEQPACKET`) at the abstract address
`millstream-card/UID/NAME`. A user sends one request; the answer carries three descriptors: BAR0, card
memory, interrupt. Afterwards neither side sends anything: the connection shows each side that the
other one lives. Both refuse a peer of another user id.
";

const KERNELS: &str = "
## Kernels for events

They work on a slot of card memory with the multi-fragment packets of one batch of events, one packet
per source, each in its place (`docs/formats.md`). The arguments are followed by the list of places;
the result is a list of summaries, one per event.

- `verify` compares each fragment with its checksum and counts what is missing.
- `cluster7` computes the trigger of the SST-1M camera from the traces of its three crates, and writes
  a map of 50 × 432 decision bits per event, sample by sample, by decision position, least significant
  bit first. With flag 1 it does the work of `verify` in the same pass and does not decide on corrupt
  traces; without it, it looks at the trace sources only.

The geometry table of `cluster7` has a row of 16 bytes for each of the 432 decision positions: the
seven trace positions to add (i16, −1: none) and the number of the patch (i16).
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
