//! Comparing a kernel's decisions with those that the camera made.

use crate::config::Setup;
use crate::process::ProcessError;
use millstream_fragment::packetize::Replay;
use millstream_fragment::stream::Stream;
use serde::{Deserialize, Serialize};
use std::ops::AddAssign;

/// How far decisions agree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecisionComparison {
    /// Decision bits compared.
    pub compared: u64,
    /// Those that are as they have to be.
    pub equal: u64,
}

impl DecisionComparison {
    /// Whether no compared bit differs.
    pub fn is_full(&self) -> bool {
        self.compared == self.equal
    }
}

impl AddAssign for DecisionComparison {
    fn add_assign(&mut self, other: DecisionComparison) {
        self.compared += other.compared;
        self.equal += other.equal;
    }
}

/// The decisions that the kernels have to reproduce.
pub(super) struct ReferenceDecisions {
    stream: Stream,
    replay: Replay,
    pub(super) comparison: DecisionComparison,
}

impl ReferenceDecisions {
    /// Opens the run's reference, if it has one.
    pub(super) fn open(setup: &Setup) -> Result<Option<ReferenceDecisions>, ProcessError> {
        let Some(path) = &setup.reference_decisions else { return Ok(None) };
        let stream = Stream::open(path)?;
        let replay = Replay::new(stream.events(), setup.plan.first_event.0);
        let replay = replay.ok_or_else(|| ProcessError::InputChanged {
            input: path.display().to_string(),
            what: "no events".to_owned(),
        })?;
        Ok(Some(ReferenceDecisions { stream, replay, comparison: DecisionComparison::default() }))
    }

    /// Compares the decisions on an event. An event that the reference does not have counts as all wrong.
    pub(super) fn compare(&mut self, event: u64, decisions: &[u8]) {
        let file_event = self.replay.file_event(event);
        let source = self.stream.sources().next();
        let fragment = source
            .zip(file_event)
            .and_then(|(source, event)| source.find(event).and_then(|position| source.fragment(position)));
        let compared = 8 * decisions.len() as u64;
        self.comparison.compared += compared;
        let Some(reference) = fragment.filter(|fragment| fragment.payload.len() == decisions.len()) else {
            return;
        };
        self.comparison.equal += if reference.payload == decisions {
            compared
        } else {
            let pairs = reference.payload.iter().zip(decisions);
            compared - pairs.map(|(a, b)| u64::from((a ^ b).count_ones())).sum::<u64>()
        };
    }
}
