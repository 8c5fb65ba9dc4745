//! Runs of kernels on the card of an application's node. The node process holds the lease; the application rings the
//! doorbell of a region, so a run costs the node process nothing.

use std::io;
use std::time::Duration;

use millstream_card::control::RunRequest;
use millstream_card::{Card, CommandError};
use millstream_card_abi::lease;
use millstream_fabric::{FabricError, KernelWords};
use millstream_torus_core::NodeNumber;

use super::TorusNode;
use crate::attach::{AttachReply, AttachRequest, receive, send};

/// How long the card may take to answer.
const OPEN: Duration = Duration::from_secs(10);
/// The region of applications' kernels.
const REGION: usize = 0;

/// The card of an application's node.
#[derive(Debug)]
pub(super) struct NodeCard {
    card: Card,
    /// Epoch of the node process's lease.
    epoch: u32,
    loaded: Option<&'static str>,
}

impl NodeCard {
    /// Whether the node process's lease lasts.
    fn is_leased(&self) -> bool {
        use std::sync::atomic::Ordering;
        let word = self.card.registers().lease_word().load(Ordering::Acquire);
        let (epoch, holder) = lease::unpack(word);
        holder != 0 && epoch == self.epoch
    }

    fn run(
        &mut self,
        here: NodeNumber,
        kernel: &'static str,
        arguments: &KernelWords,
    ) -> Result<KernelWords, FabricError> {
        let lost = FabricError::CardLost { node: here };
        if !self.is_leased() {
            return Err(lost);
        }
        if self.loaded != Some(kernel) {
            self.loaded = None;
            let loaded = self.card.load_while(REGION, kernel, || self.is_leased());
            loaded.map_err(|error| self.error(here, kernel, error))?;
            self.loaded = Some(kernel);
        }
        let word = self.card.start(REGION, &RunRequest::new(arguments));
        let results = self.card.wait(REGION, word, || self.is_leased());
        match results {
            // A run that ended with the lease left results of nothing.
            Ok(_) if !self.is_leased() => Err(lost),
            Ok(results) => Ok(results),
            Err(error) => Err(self.error(here, kernel, error)),
        }
    }

    fn error(&self, node: NodeNumber, kernel: &'static str, error: CommandError) -> FabricError {
        if !self.is_leased() || !self.card.is_alive() {
            return FabricError::CardLost { node };
        }
        match error {
            CommandError::NoSuchKernel(_) => FabricError::NoKernel { node, kernel },
            CommandError::Refused { fault, .. } => {
                let (cause, detail) = (fault.cause.text(), fault.detail);
                FabricError::KernelFailed { node, kernel, cause, detail }
            }
            _ => FabricError::CardLost { node },
        }
    }
}

impl TorusNode {
    /// Opens the card that the node process leases.
    fn open_card(&mut self) -> io::Result<Option<NodeCard>> {
        send(&self.connection, &AttachRequest::Card, &[])?;
        let AttachReply::Card { name, epoch } = receive::<AttachReply>(&self.connection)?.0 else {
            return Ok(None);
        };
        let name = name.parse().map_err(io::Error::other)?;
        let card = Card::open(&name, OPEN).map_err(io::Error::other)?;
        Ok(Some(NodeCard { card, epoch, loaded: None }))
    }

    /// Runs a kernel on the node's card.
    pub(super) fn run_on_card(
        &mut self,
        kernel: &'static str,
        arguments: &KernelWords,
    ) -> Result<KernelWords, FabricError> {
        let here = self.here;
        if self.control.card_is_gone() {
            return Err(FabricError::CardLost { node: here });
        }
        let mut card = match self.card.take() {
            Some(card) => card,
            None => match self.open_card() {
                Ok(Some(card)) => card,
                Ok(None) => return Err(FabricError::NoCard { node: here, offset: 0, length: 0 }),
                Err(error) => {
                    tracing::error!("{here}: cannot open the node's card: {error}");
                    return Err(FabricError::CardLost { node: here });
                }
            },
        };
        let result = card.run(here, kernel, arguments);
        self.card = Some(card);
        result
    }
}
