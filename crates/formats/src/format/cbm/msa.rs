//! Microslice archives (`.msa`) of CBM.
//!
//! Fragment: a microslice, its descriptor and its content. Source: subsystem, format of the content and equipment. Event:
//! [`microslice::events`].

use std::ops::Range;

use millstream_fragment::stream::Malformed;

use super::archive::{self, ArchiveType};
use super::microslice::{self, DESCRIPTOR, Descriptor};
use crate::cursor::malformed;
use crate::{FileIndexer, Format, FormatOption};

pub(in crate::format) struct Msa;

impl Format for Msa {
    fn name(&self) -> &'static str {
        "msa"
    }

    fn title(&self) -> &'static str {
        "Microslice archives (CBM)"
    }

    fn recognises(&self, file: &[u8]) -> bool {
        archive::recognises(file, ArchiveType::Microslices)
    }

    fn scan(&self, file: &[u8], indexer: &mut FileIndexer) -> Result<(), Malformed> {
        let (headers, microslices) = read(file)?;
        indexer.structure("archive header", headers);
        let events = microslice::events(microslices.iter().map(|(descriptor, _)| descriptor), indexer)?;
        for (event, (descriptor, content)) in events.into_iter().zip(microslices) {
            let end = descriptor.at + DESCRIPTOR;
            indexer.fragment(event, descriptor.source, descriptor.at..end);
            indexer.structure("size of the content", end..content.start);
            indexer.fragment(event, descriptor.source, content);
        }
        Ok(())
    }

    fn source_name(&self, source: u32) -> String {
        microslice::source_name(source)
    }

    fn options(&self) -> &'static [FormatOption] {
        &[FormatOption::IndexDivisor]
    }

    fn kind(&self, source: u32) -> u32 {
        microslice::kind(source)
    }

    /// Descriptor and content; the scan refuses a second microslice of an index.
    fn joins_pieces(&self, _source: u32) -> bool {
        true
    }
}

/// A descriptor and the range of its content.
type Microslice = (Descriptor, Range<usize>);

/// The range of the headers, with the class information of the first microslice, and all microslices.
fn read(file: &[u8]) -> Result<(Range<usize>, Vec<Microslice>), Malformed> {
    let mut cursor = archive::open(file, ArchiveType::Microslices)?;
    if !cursor.is_at_end() {
        archive::class_version(&mut cursor, "StorableMicroslice", 0)?;
        archive::class_version(&mut cursor, "MicrosliceDescriptor", 0)?;
    }
    let headers = 0..cursor.at();
    let mut microslices = Vec::new();
    while !cursor.is_at_end() {
        let descriptor = Descriptor::read(&mut cursor)?;
        let at = cursor.at();
        let len = archive::length(&mut cursor, "size of the content")?;
        if len != descriptor.size {
            return Err(malformed(
                at,
                "size of the content",
                len,
                format!("the size in the descriptor, {}", descriptor.size),
            ));
        }
        let content = cursor.take(len, "content")?;
        descriptor.check_content(file, content.clone())?;
        microslices.push((descriptor, content));
    }
    Ok((headers, microslices))
}
