//! Watching a peer by its register: the adapter watches the host, the host watches the adapter.

/// What is known of the peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PeerState {
    /// It has not been seen yet.
    #[default]
    Unknown,
    /// Its register moves.
    Alive,
    /// Its register stood still at this many reads.
    Suspect(u32),
    /// Its register stood still too long.
    Failed,
    /// It announced its end: no fault.
    Left,
}

/// Reads one register in a fixed period.
#[derive(Clone, Debug)]
pub struct PeerWatch {
    misses: u32,
    /// Reads before a peer that has not been seen counts as failed.
    unseen: u32,
    state: PeerState,
    last: Option<u32>,
    /// Reads with a change since the peer failed.
    moved: u32,
    stalls: u64,
    recovered: u64,
}

impl PeerWatch {
    /// Calls a peer failed after `misses` reads without a change.
    #[must_use]
    pub fn new(misses: u32) -> PeerWatch {
        PeerWatch {
            misses: misses.max(1),
            unseen: misses.max(1),
            state: PeerState::Unknown,
            last: None,
            moved: 0,
            stalls: 0,
            recovered: 0,
        }
    }

    /// A peer that has not been seen yet has so many reads more: it may start later.
    #[must_use]
    pub fn with_start(self, reads: u32) -> PeerWatch {
        PeerWatch { unseen: self.misses.saturating_add(reads), ..self }
    }

    /// What is known of the peer.
    #[must_use]
    pub fn state(&self) -> PeerState {
        self.state
    }

    /// Times when the register stood still and moved again before the peer counted as failed.
    #[must_use]
    pub fn stalls(&self) -> u64 {
        self.stalls
    }

    /// Times when a failed peer came back.
    #[must_use]
    pub fn recovered(&self) -> u64 {
        self.recovered
    }

    /// A read of the register: its sequence, and whether the peer announces its end. Returns the state if it changed.
    pub fn handle_read(&mut self, sequence: u32, stopping: bool) -> Option<PeerState> {
        let before = self.state;
        let moved = self.last.replace(sequence).map(|last| last != sequence);
        self.state = match (moved, self.state) {
            // The first read has nothing to compare with.
            (None, state) => state,
            (Some(true), _) if stopping => PeerState::Left,
            (Some(true), PeerState::Failed) => {
                self.moved += 1;
                if self.moved >= 2 {
                    self.recovered += 1;
                    PeerState::Alive
                } else {
                    PeerState::Failed
                }
            }
            (Some(true), PeerState::Suspect(_)) => {
                self.stalls += 1;
                PeerState::Alive
            }
            (Some(true), _) => PeerState::Alive,
            (Some(false), PeerState::Alive) => self.missed(1),
            (Some(false), PeerState::Suspect(count)) => self.missed(count + 1),
            (Some(false), PeerState::Failed) => {
                self.moved = 0;
                PeerState::Failed
            }
            (Some(false), PeerState::Unknown) => {
                self.unseen = self.unseen.saturating_sub(1);
                if self.unseen == 0 { PeerState::Failed } else { PeerState::Unknown }
            }
            (Some(false), PeerState::Left) => PeerState::Left,
        };
        (self.state != before).then_some(self.state)
    }

    fn missed(&mut self, count: u32) -> PeerState {
        if count < self.misses {
            return PeerState::Suspect(count);
        }
        self.moved = 0;
        PeerState::Failed
    }
}
