//! A full mesh of nodes of one process.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use millstream_fabric::{Fabric as _, FabricError, Notification};
use millstream_rdma::{Deadline, DeviceSelector, device};
use millstream_torus::direct::{DirectNode, DirectOptions, Rendezvous};
use millstream_torus_core::{Dimensions, NodeNumber};

const LONG: Duration = Duration::from_secs(60);
const ROUNDS: usize = 300;

/// A node whose region ends while another one puts to it: the put is done or refused, and their connection
/// stays.
#[test]
fn puts_race_with_the_end_of_their_region() {
    let dimensions: Dimensions = "2x1x1".parse().unwrap();
    let rendezvous = Rendezvous::listen(dimensions, 1).unwrap();
    let address = rendezvous.address();
    let connect = |node: u16| {
        let options =
            DirectOptions { dimensions, node: NodeNumber(node), key: 1, rendezvous: address.clone() };
        DirectNode::connect(&options, &device::open(&DeviceSelector::from_environment()).unwrap()).unwrap()
    };
    let (regions, targets) = mpsc::channel();
    let (steps, done) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(|| rendezvous.run(Deadline::after(LONG)).unwrap());
        scope.spawn(move || {
            let mut node = connect(0);
            for region in targets {
                let puts =
                    |node: &mut DirectNode| node.put(NodeNumber(1), region, 0, &[1; 8], Notification::None);
                // The first ones fill the queue.
                (0..200).for_each(|_| puts(&mut node).unwrap());
                steps.send(()).unwrap();
                let refused = loop {
                    if let Err(error) = puts(&mut node) {
                        break error;
                    }
                };
                assert_eq!(refused, FabricError::NoRegion { node: NodeNumber(1), region: region.0 });
                steps.send(()).unwrap();
            }
        });
        let mut node = connect(1);
        for _ in 0..ROUNDS {
            let region = node.register(8);
            regions.send(region).unwrap();
            for is_over in [false, true] {
                while done.try_recv().is_err_and(|error| error == mpsc::TryRecvError::Empty) {
                    // It takes messages.
                    node.counter(0).unwrap();
                    assert_eq!(node.lost_node(), None);
                }
                if !is_over {
                    node.deregister(region).unwrap();
                }
            }
        }
        drop(regions);
    });
}

/// Each of them would keep the nodes waiting for seconds, and together longer than a start may take.
#[test]
fn connections_without_the_key_keep_no_node_of_a_mesh_waiting() {
    let dimensions: Dimensions = "2x1x1".parse().unwrap();
    let rendezvous = Rendezvous::listen(dimensions, 1).unwrap();
    let address = rendezvous.address();
    let _silent: Vec<_> = (0..20).map(|_| std::net::TcpStream::connect(&address).unwrap()).collect();
    let connect = |node: u16, key| {
        let options = DirectOptions { dimensions, node: NodeNumber(node), key, rendezvous: address.clone() };
        DirectNode::connect(&options, &device::open(&DeviceSelector::from_environment()).unwrap())
    };
    thread::scope(|scope| {
        scope.spawn(|| rendezvous.run(Deadline::after(LONG)).unwrap());
        assert!(connect(0, 2).is_err(), "another key");
        let other = scope.spawn(|| drop(connect(0, 1).unwrap()));
        drop(connect(1, 1).unwrap());
        other.join().unwrap();
    });
}
