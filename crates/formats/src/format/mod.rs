//! The formats.

use millstream_fragment::stream::Malformed;

use crate::{FileIndexer, FormatOption};

mod cbm;
mod evio;
mod frd;
mod hld;
mod mdf;
mod midas;
pub(crate) mod pcapng;
mod rdh;

/// A raw data format: how a file is cut into fragments.
pub trait Format: Send + Sync {
    /// Name on the command line, in lower case.
    fn name(&self) -> &'static str;

    /// Name for humans, with the experiments.
    fn title(&self) -> &'static str;

    /// Whether a file starts as one of this format. It gets the whole file.
    fn recognises(&self, file: &[u8]) -> bool;

    /// Passes the parts of a file to the indexer; they cover all bytes in order.
    ///
    /// # Errors
    /// The first field that breaks the format.
    fn scan(&self, file: &[u8], indexer: &mut FileIndexer) -> Result<(), Malformed>;

    /// Name of a source for humans: at most 16 bytes, without `/`, since it names a group of the output.
    fn source_name(&self, source: u32) -> String;

    /// Layout of a source's payload, where the format numbers layouts.
    fn kind(&self, _source: u32) -> u32 {
        0
    }

    /// The options that the scan obeys.
    fn options(&self) -> &'static [FormatOption] {
        &[]
    }

    /// Whether a fragment of a source may be in several pieces, which are joined in the order of the file.
    fn joins_pieces(&self, _source: u32) -> bool {
        false
    }
}

/// All formats.
pub fn all() -> &'static [&'static dyn Format] {
    &[
        &evio::Evio,
        &frd::Frd,
        &hld::Hld,
        &mdf::Mdf,
        &cbm::Microslices,
        &midas::Midas,
        &cbm::Msa,
        &pcapng::Pcapng,
        &rdh::Rdh,
        &cbm::Tsa,
    ]
}

/// The format with a name.
pub fn by_name(name: &str) -> Option<&'static dyn Format> {
    all().iter().copied().find(|format| format.name() == name)
}

/// The format of a file, if its start shows it.
pub fn recognise(file: &[u8]) -> Option<&'static dyn Format> {
    all().iter().copied().find(|format| format.recognises(file))
}
