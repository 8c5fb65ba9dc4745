//! Streams of CBM microslices: descriptor and content of each, one after the other, without a header.
//!
//! Fragment: a microslice, its descriptor and its content. Source: subsystem, format of the content and equipment. Event:
//! [`microslice::events`].

use millstream_fragment::stream::Malformed;

use super::microslice::{self, Descriptor};
use crate::cursor::{ByteOrder, Cursor};
use crate::{FileIndexer, Format, FormatOption};

pub(in crate::format) struct Microslices;

impl Format for Microslices {
    fn name(&self) -> &'static str {
        "microslices"
    }

    fn title(&self) -> &'static str {
        "Streams of microslices (CBM)"
    }

    /// The first content ends with the file, or a second descriptor follows.
    fn recognises(&self, file: &[u8]) -> bool {
        let mut cursor = Cursor::new(file, ByteOrder::Little);
        let Ok(content) = Descriptor::read(&mut cursor).and_then(|first| cursor.take(first.size, "content"))
        else {
            return false;
        };
        file[content.end..].iter().zip(microslice::START).all(|(byte, start)| *byte == start)
    }

    fn scan(&self, file: &[u8], indexer: &mut FileIndexer) -> Result<(), Malformed> {
        let mut cursor = Cursor::new(file, ByteOrder::Little);
        let mut microslices = Vec::new();
        while !cursor.is_at_end() {
            let descriptor = Descriptor::read(&mut cursor)?;
            let content = cursor.take(descriptor.size, "content")?;
            descriptor.check_content(file, content.clone())?;
            microslices.push((descriptor, descriptor.at..content.end));
        }
        let events = microslice::events(microslices.iter().map(|(descriptor, _)| descriptor), indexer)?;
        for (event, (descriptor, range)) in events.into_iter().zip(microslices) {
            indexer.fragment(event, descriptor.source, range);
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
}
