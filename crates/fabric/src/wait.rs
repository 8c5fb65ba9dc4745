//! Waits of operations in which all nodes take part.

use std::time::{Duration, Instant};

use millstream_torus_core::NodeNumber;

use crate::{Fabric, FabricError};

/// Interval of looks for lost nodes while an operation waits.
const LOOK_FOR_LOST: Duration = Duration::from_millis(100);

/// Waits until `from` has raised a counter to `value`. A node that lives may wait for a lost one in turn, so any lost node
/// ends the wait.
pub(crate) fn wait_for_all<F: Fabric>(
    fabric: &mut F,
    counter: u16,
    value: u64,
    from: NodeNumber,
    timeout: Duration,
) -> Result<(), FabricError> {
    let start = Instant::now();
    loop {
        let left = timeout.saturating_sub(start.elapsed());
        match fabric.wait_counter(counter, value, from, left.min(LOOK_FOR_LOST)) {
            Err(FabricError::TimedOut { .. }) if left > LOOK_FOR_LOST => {}
            Err(FabricError::TimedOut { .. }) => return Err(FabricError::TimedOut { waited: timeout }),
            other => return other,
        }
        if let Some(node) = fabric.lost_node() {
            return Err(FabricError::NodeLost { node });
        }
    }
}
