//! Where packets enter the network at a node.

/// A port of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Port {
    /// The node's applications and card.
    #[default]
    Local,
    /// Hosts outside of the torus. It is never a transit port.
    Seventh,
}

/// Number of [`Port`]s.
pub const INJECTION_PORTS: usize = 2;

impl Port {
    /// All ports.
    pub const ALL: [Port; INJECTION_PORTS] = [Port::Local, Port::Seventh];

    /// Its place in [`Port::ALL`].
    #[must_use]
    pub fn index(self) -> usize {
        self as usize
    }
}
