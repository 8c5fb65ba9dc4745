//! The reference page of the register map and the command format, written by the lists in the code.

use std::fmt::Write as _;

use crate::command::{CAPABILITIES, CAUSES, Code, RawCompletion, RawDescriptor, STATUSES};
use crate::handshake::{Answer, Request};
use crate::kernel::cluster7::Cluster7Args;
use crate::kernel::slot::{EVENT_STATUSES, Place, Summary};
use crate::kernel::verify::VerifyArgs;
use crate::layout::Field;
use crate::region::codes::{
    CARD_COMMANDS, CARD_STATES, LEASE_STATES, MEMORY_KINDS, MESSAGE_KINDS, PEER_STATES, REGION_COMMANDS,
    REGION_STATES, SENSORS,
};
use crate::region::copy::{COPY_OPERATIONS, RawCopy};
use crate::region::message::RawMessage;
use crate::registers::{
    BAR0_BYTES, BLOCKS, CONTROL_WINDOW, COPY_BYTES, COPY_RING, COPY_SLOTS, KERNEL_DIRECTORY,
    KERNEL_ENTRY_BYTES, LEASE_PAGE, MAGIC, MAX_KERNELS, MAX_PEERS, PEER_BYTES, PEER_TABLE, VERSION, Writer,
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
    for block in BLOCKS {
        for group in block.groups {
            write!(page, "\n## {}\n", group.title)?;
            if block.count > 1 {
                write!(
                    page,
                    "\nOf {name} `i`: offsets count from {:#x} + `i` × {:#x}, `i` < {}.\n",
                    block.base,
                    block.stride,
                    block.count,
                    name = block.name,
                )?;
            }
            page.push_str("\n| offset | register | bits | writer | meaning |\n|---|---|---|---|---|\n");
            for register in group.registers {
                let times =
                    if register.count > 1 { format!(" × {}", register.count) } else { String::new() };
                writeln!(
                    page,
                    "| {:#05x} | `{}` | {}{times} | {} | {} |",
                    register.offset,
                    register.name,
                    8 * register.width.bytes(),
                    match register.writer {
                        Writer::Card => "card",
                        Writer::User => "user",
                        Writer::Both => "both",
                    },
                    register.doc,
                )?;
            }
        }
    }
    write!(
        page,
        "
## Tables in BAR0

From {KERNEL_DIRECTORY:#x}, the kernel directory: `kernel_count` entries, at most {MAX_KERNELS}, of
{KERNEL_ENTRY_BYTES} bytes: the kernel's number (u32), then its name, padded with zeros.

From {PEER_TABLE:#x}, the peers: {MAX_PEERS} entries of {PEER_BYTES} bytes: the address of another card as text,
`host:port`, padded with zeros.

From {COPY_RING:#x}, the ring of copy descriptors: {COPY_SLOTS} entries of {COPY_BYTES} bytes.

## Who may write

The lease words, {:#x} to {:#x}, are open to atomic operations of every connected node. What the holder of the
lease may write by RDMA is {:#x} to {:#x}; its key ends with the lease. All of BAR0 can be read by every
connected node.
",
        LEASE_PAGE.start, LEASE_PAGE.end, CONTROL_WINDOW.start, CONTROL_WINDOW.end,
    )?;
    codes(page, "Status", "value", STATUSES)?;
    codes(page, "Capabilities", "bit mask", CAPABILITIES)?;
    codes(page, "Causes", "value", CAUSES)?;
    codes(page, "Kinds of memory", "value", MEMORY_KINDS)?;
    codes(page, "Lease states", "value", LEASE_STATES)?;
    codes(page, "Card states", "value", CARD_STATES)?;
    codes(page, "Card commands", "value", CARD_COMMANDS)?;
    codes(page, "Region states", "value", REGION_STATES)?;
    codes(page, "Region commands", "value", REGION_COMMANDS)?;
    codes(page, "Peer states", "value", PEER_STATES)?;
    codes(page, "Sensors", "bit mask", SENSORS)?;
    page.push_str(NETWORK);
    codes(page, "Kinds of messages", "value", MESSAGE_KINDS)?;
    structure(page, "Message", RawMessage::BYTES, RawMessage::FIELDS)?;
    codes(page, "Copy operations", "value", COPY_OPERATIONS)?;
    structure(page, "Copy descriptor", RawCopy::BYTES, RawCopy::FIELDS)?;
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

/// The C header; `include/millstream_card.h` is this string.
pub fn c_header() -> String {
    let mut header = String::from(
        "/* Generated from crates/card, like docs/registers.md; see there for what everything means. */\n\
         #ifndef MILLSTREAM_CARD_H\n#define MILLSTREAM_CARD_H\n\n#include <stdint.h>\n\n",
    );
    // Writing to a string cannot fail.
    let _ = write_header(&mut header);
    header
}

fn write_header(header: &mut String) -> std::fmt::Result {
    let mut define =
        |name: &str, value: u64| writeln!(header, "#define MSC_{} UINT64_C({value:#x})", name.to_uppercase());
    for (name, value) in [
        ("magic", MAGIC),
        ("version", VERSION.into()),
        ("bar0_bytes", BAR0_BYTES as u64),
        ("kernel_directory", KERNEL_DIRECTORY as u64),
        ("kernel_entry_bytes", KERNEL_ENTRY_BYTES as u64),
        ("peer_table", PEER_TABLE as u64),
        ("peer_bytes", PEER_BYTES as u64),
        ("copy_ring", COPY_RING as u64),
        ("copy_slots", COPY_SLOTS as u64),
        ("copy_bytes", COPY_BYTES as u64),
        ("lease_page", LEASE_PAGE.start as u64),
        ("control_window", CONTROL_WINDOW.start as u64),
        ("control_window_bytes", CONTROL_WINDOW.len() as u64),
    ] {
        define(name, value)?;
    }
    for block in BLOCKS {
        for register in block.groups.iter().flat_map(|group| group.registers) {
            if block.count > 1 {
                let at = block.base + register.offset;
                writeln!(
                    header,
                    "#define MSC_REG_{}_{}(i) (UINT64_C({at:#x}) + {:#x} * (uint64_t)(i))",
                    block.name.to_uppercase(),
                    register.name.to_uppercase(),
                    block.stride,
                )?;
            } else {
                writeln!(
                    header,
                    "#define MSC_REG_{} UINT64_C({:#x})",
                    register.name.to_uppercase(),
                    register.offset
                )?;
            }
        }
    }
    for (prefix, codes) in [
        ("CAUSE", CAUSES),
        ("STATUS", STATUSES),
        ("MEMORY", MEMORY_KINDS),
        ("LEASE", LEASE_STATES),
        ("CARD", CARD_STATES),
        ("CARD_COMMAND", CARD_COMMANDS),
        ("REGION", REGION_STATES),
        ("REGION_COMMAND", REGION_COMMANDS),
        ("PEER", PEER_STATES),
        ("MESSAGE", MESSAGE_KINDS),
        ("COPY", COPY_OPERATIONS),
        ("", CAPABILITIES),
        ("", SENSORS),
    ] {
        writeln!(header)?;
        for code in codes {
            let separator = if prefix.is_empty() { "" } else { "_" };
            writeln!(header, "#define MSC_{prefix}{separator}{} {}", shout(code.name), code.code)?;
        }
    }
    for (name, fields) in [
        ("descriptor", RawDescriptor::FIELDS),
        ("completion", RawCompletion::FIELDS),
        ("message", RawMessage::FIELDS),
        ("copy", RawCopy::FIELDS),
    ] {
        writeln!(header, "\nstruct msc_{name} {{")?;
        for Field { bytes, name, .. } in fields {
            match bytes {
                1 | 2 | 4 | 8 => writeln!(header, "\tuint{}_t {name};", 8 * bytes)?,
                bytes => writeln!(header, "\tuint64_t {name}[{}];", bytes / 8)?,
            }
        }
        writeln!(header, "}};")?;
    }
    writeln!(header, "\n#endif")
}

/// `BadRingSlots` as `BAD_RING_SLOTS`.
fn shout(name: &str) -> String {
    let mut out = String::new();
    for (index, letter) in name.char_indices() {
        let before = name[..index].chars().last();
        if letter.is_uppercase() && before.is_some_and(char::is_lowercase) {
            out.push('_');
        }
        out.extend(letter.to_uppercase());
    }
    out
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

const NETWORK: &str = "
## Messages and copies

A card sends messages (SEND) of fixed length to nodes: interrupts, and what a new holder of the lease needs.
`docs/cards.md` tells when. Copy descriptors stand in the ring in BAR0; the holder writes them, then
`copy_producer`, then reads `copy_watching`: if that is zero it rings, by a write with immediate data.
";

const COMMANDS: &str = "
## Commands of local users

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

    fn check(file: &str, expected: &str) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
        if std::env::var_os("MILLSTREAM_WRITE_DOCS").is_some() {
            std::fs::write(&path, expected).unwrap();
        }
        let written = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            written == expected,
            "{file} is not what the register map says; the first line of docs/registers.md tells how to write \
             it anew"
        );
    }

    #[test]
    fn the_page_and_the_header_are_current() {
        check("../../docs/registers.md", &markdown());
        check("include/millstream_card.h", &c_header());
    }

    #[test]
    fn a_c_compiler_agrees_about_the_structures() {
        let text = format!(
            "#include \"millstream_card.h\"\n\
             _Static_assert(sizeof(struct msc_descriptor) == 64, \"descriptor\");\n\
             _Static_assert(sizeof(struct msc_copy) == MSC_COPY_BYTES, \"copy\");\n\
             _Static_assert(sizeof(struct msc_message) == {}, \"message\");\n\
             _Static_assert(MSC_REG_REGION_DOORBELL(1) == {}, \"doorbell\");\n",
            RawMessage::BYTES,
            crate::registers::REGION_CONTROL
                + crate::registers::REGION_STRIDE
                + crate::registers::region_at::doorbell,
        );
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("check.c");
        std::fs::write(&source, text).unwrap();
        let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
        let compiled = std::process::Command::new("cc")
            .args(["-std=c11", "-Wall", "-Werror", "-fsyntax-only", "-I"])
            .args([&include, &source])
            .output()
            .unwrap();
        assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
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
