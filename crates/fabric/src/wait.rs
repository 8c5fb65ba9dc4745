//! Waits of operations in which all nodes take part.

use std::time::{Duration, Instant};

use millstream_torus_core::NodeNumber;

use crate::{Fabric, FabricError};

/// Interval of looks for lost nodes while an operation waits.
const LOOK_FOR_LOST: Duration = Duration::from_millis(100);
/// A wait for a node that lives goes on for so long without progress after another one was lost: that one may have ended in
/// order, behind its part of the operation.
const GRACE: Duration = Duration::from_secs(2);

/// Nodes to which an operation of all nodes puts, and the puts to each that were lost before. Once a later one is lost, the nodes
/// have come to different points, also if the node is back.
#[derive(Debug, Default)]
pub struct LossWatch {
    lost_before: Vec<(NodeNumber, u64)>,
}

impl LossWatch {
    /// Watches puts to these nodes from here on.
    pub fn new<F: Fabric>(fabric: &mut F, targets: impl IntoIterator<Item = NodeNumber>) -> LossWatch {
        let lost = |node| (node, fabric.lost_puts(node).map_or(0, |lost| lost.count));
        LossWatch { lost_before: targets.into_iter().map(lost).collect() }
    }

    /// Checks that no put to a node was lost. If one was, the node would take the next one for it.
    ///
    /// # Errors
    /// The cause of a loss: [`FabricError::NodeLost`] or [`FabricError::NoRoute`].
    pub fn check<F: Fabric>(&self, fabric: &mut F, to: NodeNumber) -> Result<(), FabricError> {
        self.find(fabric, |node| node == to)
    }

    fn find<F: Fabric>(
        &self,
        fabric: &mut F,
        is_checked: impl Fn(NodeNumber) -> bool,
    ) -> Result<(), FabricError> {
        for &(node, before) in self.lost_before.iter().filter(|&&(node, _)| is_checked(node)) {
            if let Some(lost) = fabric.lost_puts(node).filter(|lost| lost.count != before) {
                return Err(lost.cause);
            }
        }
        Ok(())
    }

    /// Waits until `from` has raised a counter to `value`. A node that lives may wait for a lost one in turn, so any lost node
    /// ends a wait that makes no progress; so does a lost put.
    ///
    /// # Errors
    /// [`FabricError::NodeLost`], [`FabricError::NoRoute`], or [`FabricError::TimedOut`] after `timeout`.
    pub fn wait_counter<F: Fabric>(
        &self,
        fabric: &mut F,
        counter: u16,
        value: u64,
        from: NodeNumber,
        timeout: Duration,
    ) -> Result<(), FabricError> {
        let start = Instant::now();
        // Since when a node is lost and the counter has this value.
        let mut stalled: Option<(Instant, u64)> = None;
        loop {
            let left = timeout.saturating_sub(start.elapsed());
            match fabric.wait_counter(counter, value, from, left.min(LOOK_FOR_LOST)) {
                Err(FabricError::TimedOut { .. }) => self.find(fabric, |_| true)?,
                other => return other,
            }
            if left <= LOOK_FOR_LOST {
                return Err(FabricError::TimedOut { waited: timeout });
            }
            let Some(node) = fabric.lost_node() else {
                stalled = None;
                continue;
            };
            let now = fabric.counter(counter)?;
            match stalled {
                Some((since, seen)) if seen == now => {
                    if since.elapsed() >= GRACE {
                        return Err(FabricError::NodeLost { node });
                    }
                }
                _ => stalled = Some((Instant::now(), now)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{LocalNode, Notification};

    const TIMEOUT: Duration = Duration::from_secs(30);

    fn three_nodes() -> [LocalNode; 3] {
        LocalNode::all("3x1x1".parse().unwrap()).try_into().expect("three nodes")
    }

    /// Node 0 has done its part and ended; the last block comes from node 2, which is late.
    #[test]
    fn a_node_that_ends_in_order_fails_no_wait_for_another() {
        let [first, mut waiting, mut late] = three_nodes();
        let region = waiting.register(8);
        let target = waiting.here();
        drop(first);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let one = Notification::Counter { index: 3, add: 1 };
                for pause in [300, 600, 600, 600, 600] {
                    std::thread::sleep(Duration::from_millis(pause));
                    late.put(target, region, 0, &[1; 8], one).unwrap();
                }
                // Lives until it is no longer waited for.
                std::thread::sleep(Duration::from_millis(500));
            });
            assert_eq!(LossWatch::default().wait_counter(&mut waiting, 3, 5, NodeNumber(2), TIMEOUT), Ok(()));
        });
    }

    #[test]
    fn a_lost_node_ends_a_wait_for_another_that_makes_no_progress() {
        let [first, mut waiting, _silent] = three_nodes();
        drop(first);
        let start = Instant::now();
        let lost = Err(FabricError::NodeLost { node: NodeNumber(0) });
        assert_eq!(LossWatch::default().wait_counter(&mut waiting, 3, 1, NodeNumber(2), TIMEOUT), lost);
        assert!((GRACE..5 * GRACE).contains(&start.elapsed()), "{:?}", start.elapsed());
    }
}
