//! Comparison of a kernel's trigger decisions with recorded ones.

use crate::config::RunConfig;
use crate::process::ProcessError;
use millstream_fragment::packetize::Replay;
use millstream_fragment::stream::Stream;
use serde::{Deserialize, Serialize};
use std::ops::AddAssign;

/// Result of the comparison.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecisionComparison {
    /// Decision bits compared.
    pub compared: u64,
    /// Decision bits that are equal.
    pub equal: u64,
}

impl DecisionComparison {
    /// Whether all compared bits are equal.
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

/// The recorded decisions.
pub(super) struct ReferenceDecisions {
    stream: Stream,
    replay: Replay,
    pub(super) comparison: DecisionComparison,
}

impl ReferenceDecisions {
    /// Opens the run's reference decisions, if it has any.
    pub(super) fn open(config: &RunConfig) -> Result<Option<ReferenceDecisions>, ProcessError> {
        let Some(path) = &config.reference_decisions else { return Ok(None) };
        let stream = Stream::open(path)?;
        let replay = Replay::new(stream.events(), config.plan.first_event.0);
        let replay = replay.ok_or_else(|| ProcessError::InputChanged {
            input: path.display().to_string(),
            what: "no events".to_owned(),
        })?;
        Ok(Some(ReferenceDecisions { stream, replay, comparison: DecisionComparison::default() }))
    }

    /// Compares the decisions on an event. For an event without reference decisions, all bits count as different.
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
