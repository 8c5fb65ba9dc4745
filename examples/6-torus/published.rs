//! Every node squares the numbers that hosts outside of the torus send it. See README.md.

use std::error::Error;
use std::time::Duration;

use millstream_fabric::Fabric;
use millstream_torus::TorusNode;
use millstream_torus::engine::OutsideAccess;

/// A person at another terminal may take a while.
const TIMEOUT: Duration = Duration::from_secs(3600);
/// The counter that a host raises behind its number.
const ARRIVED: u16 = 0;

fn main() -> Result<(), Box<dyn Error>> {
    let mut node = TorusNode::from_environment()?;
    let here = node.here();

    // Hosts find these by node and name.
    let input = node.register(8);
    let output = node.register(8);
    node.publish(input, "number", OutsideAccess::ReadWrite)?;
    node.publish(output, "square", OutsideAccess::Read)?;

    for numbers in 1.. {
        node.wait_counter(ARRIVED, numbers, here, TIMEOUT)?;
        let mut word = [0; 8];
        node.load(input, 0, &mut word)?;
        let number = u64::from_le_bytes(word);
        if number == 0 {
            break;
        }
        node.store(output, 0, &number.wrapping_mul(number).to_le_bytes())?;
    }
    Ok(())
}
