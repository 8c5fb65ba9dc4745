//! Every node of a torus gives its neighbours its number, and all nodes add up what they got. See README.md.

use std::error::Error;
use std::time::Duration;

use millstream_fabric::{Collectives, Fabric, Notification, RegionId};
use millstream_torus::TorusNode;
use millstream_torus_core::Direction;

const TIMEOUT: Duration = Duration::from_secs(30);
/// The counter that a neighbour raises.
const ARRIVED: u16 = 0;

fn main() -> Result<(), Box<dyn Error>> {
    let mut node = TorusNode::from_environment()?;
    let (torus, here) = (node.dimensions(), node.here());

    // One word for each direction. All nodes learn the regions of all others.
    let inbox = node.register(6 * 8);
    let regions = node.exchange(&inbox.0.to_le_bytes(), TIMEOUT)?;

    // A put needs no help of the neighbour's program; the counter grows after the word is there.
    let mut neighbours = 0;
    for direction in Direction::ALL {
        let Some(neighbour) = torus.neighbour(here, direction) else { continue };
        let region = RegionId(u64::from_le_bytes(regions[neighbour.index()][..].try_into()?));
        let at = 8 * direction.reversed().index() as u64;
        let one = Notification::Counter { index: ARRIVED, add: 1 };
        node.put(neighbour, region, at, &u64::from(here.0).to_le_bytes(), one)?;
        neighbours += 1;
    }
    node.wait_counter(ARRIVED, neighbours, here, TIMEOUT)?;

    let mut words = [0; 6 * 8];
    node.load(inbox, 0, &mut words)?;
    let mut sum = 0.0;
    for word in words.chunks_exact(8) {
        sum += u64::from_le_bytes(word.try_into()?) as f64;
    }

    // Sums over all nodes go ring by ring, so only neighbours talk.
    let mut collectives = Collectives::new(&mut node, 16, TIMEOUT)?;
    let totals = collectives.sum(&mut node, &[neighbours as f64, sum])?;
    if here.0 == 0 {
        println!("{torus}: {} links, numbers of all neighbours add up to {}", totals[0] / 2.0, totals[1]);
    }
    collectives.barrier(&mut node)?;
    Ok(())
}
