//! Emulated cards in separate processes, started for one job.

use std::io::{self, BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::plan::Plan;

/// A card process that was started for a job. Dropping this value ends the process.
#[derive(Debug)]
pub struct CardProcess {
    process: Child,
    address: String,
}

impl CardProcess {
    /// Starts `millstream stencil --serve-card BYTES`; `program` is the path of `millstream`.
    ///
    /// # Errors
    /// The error of starting the process; `UnexpectedEof` if it ends before it prints its address.
    pub fn start(program: &Path, memory_bytes: u64) -> io::Result<CardProcess> {
        let mut process = Command::new(program)
            .args(["stencil", "--serve-card", &memory_bytes.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let out = process.stdout.take().expect("it was piped");
        let mut card = CardProcess { process, address: String::new() };
        BufReader::new(out).read_line(&mut card.address)?;
        card.address.truncate(card.address.trim_end().len());
        if card.address.is_empty() {
            let message = "an emulated card ended before it printed its address";
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, message));
        }
        Ok(card)
    }

    /// Where the card listens: `host:port`.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }
}

impl Drop for CardProcess {
    fn drop(&mut self) {
        // The card ends when its standard input ends.
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}

/// Starts a card for each tile of the plan, with as much memory as the tile takes.
///
/// # Errors
/// As for [`CardProcess::start`].
pub fn start_cards(program: &Path, plan: &Plan) -> io::Result<Vec<CardProcess>> {
    plan.tiles.iter().map(|tile| CardProcess::start(program, plan.tile_bytes(tile))).collect()
}
