//! Generates `docs/registers.md` and the C header from the lists in this crate.

use std::fmt::Write as _;

use crate::codes::{
    CARD_COMMANDS, CARD_STATES, LEASE_STATES, MEMORY_KINDS, MESSAGE_KINDS, PEER_STATES, REGION_COMMANDS,
    REGION_STATES, SENSORS,
};
use crate::command::{CAPABILITIES, CAUSES, Code, RawCompletion, RawDescriptor, STATUSES};
use crate::dma::{DMA_OPERATIONS, RawDmaDescriptor};
use crate::events::Cluster7Args;
use crate::events::VerifyArgs;
use crate::events::{EVENT_STATUSES, EventSummary, PacketBuffer};
use crate::events::{EventFragment, FunctionArgs};
use crate::ipc::{OpenReply, OpenRequest};
use crate::layout::Field;
use crate::message::RawMessage;
use crate::registers::{
    BAR0_BYTES, BLOCKS, CONTROL_WINDOW, DMA_DESCRIPTOR_BYTES, DMA_RING, DMA_RING_SLOTS, KERNEL_DIRECTORY,
    KERNEL_ENTRY_BYTES, LEASE_PAGE, MAGIC, MAX_KERNELS, MAX_PEERS, PEER_BYTES, PEER_TABLE, VERSION, Writer,
};

const HEAD: &str = "\
<!-- Generated from crates/card-abi: run `MILLSTREAM_WRITE_DOCS=1 cargo test -p millstream-card-abi reference`. -->

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
Version {VERSION}. BAR0 has {BAR0_BYTES} bytes. Registers are little-endian words; access them with their full
width. *Writer* is the side that writes a register; the other side only reads it. A card keeps its state
privately and publishes copies: a user who overwrites a register of the card misleads users, not the card.
"
    )?;
    for block in BLOCKS {
        for group in block.groups {
            write!(page, "\n## {}\n", group.title)?;
            if block.count > 1 {
                write!(
                    page,
                    "\nOffsets for {name} `i` are relative to {:#x} + `i` × {:#x}, `i` < {}.\n",
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

At {KERNEL_DIRECTORY:#x}, the kernel directory: `kernel_count` entries (at most {MAX_KERNELS}) of
{KERNEL_ENTRY_BYTES} bytes. An entry holds the kernel's number (u32) and its name, padded with zeros.

At {PEER_TABLE:#x}, the peer table: {MAX_PEERS} entries of {PEER_BYTES} bytes. An entry holds the address of
another card as text, `host:port`, padded with zeros.

At {DMA_RING:#x}, the ring of DMA descriptors: {DMA_RING_SLOTS} entries of {DMA_DESCRIPTOR_BYTES} bytes.

## Remote access

Every connected client can read all of BAR0, and execute atomic operations on the lease words, {:#x} to {:#x}. The
holder of the lease can also write {:#x} to {:#x}; its key ends with the lease.
",
        LEASE_PAGE.start, LEASE_PAGE.end, CONTROL_WINDOW.start, CONTROL_WINDOW.end,
    )?;
    codes(page, "Status", "value", STATUSES)?;
    codes(page, "Capabilities", "bit mask", CAPABILITIES)?;
    codes(page, "Causes", "value", CAUSES)?;
    codes(page, "Memory kinds", "value", MEMORY_KINDS)?;
    codes(page, "Lease states", "value", LEASE_STATES)?;
    codes(page, "Card states", "value", CARD_STATES)?;
    codes(page, "Card commands", "value", CARD_COMMANDS)?;
    codes(page, "Region states", "value", REGION_STATES)?;
    codes(page, "Region commands", "value", REGION_COMMANDS)?;
    codes(page, "Peer states", "value", PEER_STATES)?;
    codes(page, "Sensors", "bit mask", SENSORS)?;
    page.push_str(NETWORK);
    codes(page, "Message kinds", "value", MESSAGE_KINDS)?;
    structure(page, "Message", RawMessage::BYTES, RawMessage::FIELDS)?;
    codes(page, "DMA operations", "value", DMA_OPERATIONS)?;
    structure(page, "DMA descriptor", RawDmaDescriptor::BYTES, RawDmaDescriptor::FIELDS)?;
    page.push_str(COMMANDS);
    structure(page, "Command descriptor", RawDescriptor::BYTES, RawDescriptor::FIELDS)?;
    structure(page, "Completion", RawCompletion::BYTES, RawCompletion::FIELDS)?;
    page.push_str(CONNECTIONS);
    structure(page, "Open request", OpenRequest::BYTES, OpenRequest::FIELDS)?;
    structure(page, "Open reply", OpenReply::BYTES, OpenReply::FIELDS)?;
    page.push_str(KERNELS);
    structure(page, "Arguments of `verify`", VerifyArgs::BYTES, VerifyArgs::FIELDS)?;
    structure(page, "Arguments of `cluster7`", Cluster7Args::BYTES, Cluster7Args::FIELDS)?;
    structure(page, "Arguments of a function for events", FunctionArgs::BYTES, FunctionArgs::FIELDS)?;
    structure(page, "Fragment of an event", EventFragment::BYTES, EventFragment::FIELDS)?;
    structure(page, "Packet buffer", PacketBuffer::BYTES, PacketBuffer::FIELDS)?;
    structure(page, "Event summary", EventSummary::BYTES, EventSummary::FIELDS)?;
    codes(page, "Event status", "bit mask", EVENT_STATUSES)
}

/// The C header; `include/millstream_card_registers.h` is this string.
pub fn c_header() -> String {
    let mut header = String::from(
        "/* Generated from crates/card-abi; docs/registers.md documents all definitions. */\n\
         #ifndef MILLSTREAM_CARD_REGISTERS_H\n#define MILLSTREAM_CARD_REGISTERS_H\n\n#include <stdint.h>\n\n",
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
        ("dma_ring", DMA_RING as u64),
        ("dma_ring_slots", DMA_RING_SLOTS as u64),
        ("dma_descriptor_bytes", DMA_DESCRIPTOR_BYTES as u64),
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
        ("DMA", DMA_OPERATIONS),
        ("", CAPABILITIES),
        ("", SENSORS),
    ] {
        writeln!(header)?;
        for code in codes {
            let separator = if prefix.is_empty() { "" } else { "_" };
            writeln!(
                header,
                "#define MSC_{prefix}{separator}{} {}",
                screaming_snake_case(code.name),
                code.code
            )?;
        }
    }
    for (name, fields) in [
        ("descriptor", RawDescriptor::FIELDS),
        ("completion", RawCompletion::FIELDS),
        ("message", RawMessage::FIELDS),
        ("dma_descriptor", RawDmaDescriptor::FIELDS),
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

/// Converts `BadRingSlots` to `BAD_RING_SLOTS`.
fn screaming_snake_case(name: &str) -> String {
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
## Messages and DMA

A card sends messages (SEND) of fixed length to clients: interrupts, and the keys of a new lease (`docs/cards.md`).
The holder writes DMA descriptors into the ring in BAR0, then `dma_producer`. It then reads `dma_polling` and, if
that is zero, rings by an RDMA write with immediate data.
";

const COMMANDS: &str = "
## Commands of local users

The user writes descriptors into the command ring, then `producer`, then rings the doorbell. A descriptor names a
region; the card runs the region's kernel on all banks. The kernel's first five argument words are `args_offset`,
`args_len`, `result_offset`, `result_len` and `flags`; its first five result words are the counters of the
completion.

The card executes the commands in order. It writes a completion into the same slot of the completion ring, then
`completed`, then `interrupt_sequence`. A slot is free once the user has read its completion. Every descriptor gets
a completion, whatever it contains. Numbers are little-endian; offsets are relative to the start of card memory.
";

const CONNECTIONS: &str = "
## Opening a card

An emulated card listens on a local socket (`SOCK_SEQPACKET`) at the abstract address `millstream-card/UID/NAME`. A
user sends one request; the reply carries three descriptors: BAR0, card memory, interrupt. Afterwards neither side
sends data; the connection shows each side that the other one is alive. Both refuse a peer of another user id.
";

const KERNELS: &str = "
## Event kernels

Event kernels work on the multi-fragment packets of one batch of events in card memory, one packet per source
(`docs/formats.md`). The arguments are followed by the list of packet buffers; the result is a list of summaries, one
per event.

- `verify` compares each fragment with its checksum and counts missing fragments.
- `cluster7` computes the trigger of the SST-1M camera from the traces of its three crates. It writes a map of
  50 × 432 decision bits per event: sample by sample, by decision position, least significant bit first. With flag 1
  it also checks all fragments as `verify` does, in the same pass, and does not decide on corrupt traces. Without
  the flag it reads the trace sources only.
- A function for events (`docs/kernels.md`) is an image. With flag 1 the card checks all fragments as `verify` does. The
  function gets one entry per source; each bit of its result is a decision for the event.

The geometry table of `cluster7` has a row of 16 bytes for each of the 432 decision positions: the seven trace
positions to add (i16, −1: none) and the number of the patch (i16).
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
            "{file} is out of date; the first line of docs/registers.md has the command that generates it"
        );
    }

    #[test]
    fn the_page_and_the_header_are_current() {
        check("../../docs/registers.md", &markdown());
        check("include/millstream_card_registers.h", &c_header());
    }

    #[test]
    fn the_c_header_has_the_same_layout() {
        let text = format!(
            "#include \"millstream_card_registers.h\"\n\
             _Static_assert(sizeof(struct msc_descriptor) == 64, \"descriptor\");\n\
             _Static_assert(sizeof(struct msc_dma_descriptor) == MSC_DMA_DESCRIPTOR_BYTES, \"DMA descriptor\");\n\
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
    fn every_register_and_cause_is_documented() {
        let page = markdown();
        for register in crate::registers::all() {
            assert!(page.contains(&format!("`{}`", register.name)));
        }
        for cause in CAUSES {
            assert!(page.contains(cause.name) && page.contains(cause.doc));
        }
    }
}
