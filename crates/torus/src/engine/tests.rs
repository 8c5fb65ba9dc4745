//! Memory that ends while packets of it wait to be sent.

use std::sync::Arc;
use std::time::Duration;

use millstream_fabric::Notification;
use millstream_quantity::Instant;
use millstream_torus_core::{NodeNumber, Port};

use super::{EngineOptions, Event, Failure, Operation, Request, Span};
use crate::in_process::InProcessTorus;
use crate::memory::Memory;

const LENGTH: u32 = 1 << 20;

fn memory() -> Arc<Memory> {
    memory_of(LENGTH)
}

fn memory_of(length: u32) -> Arc<Memory> {
    Arc::new(Memory::allocate("test", length as usize, None).expect("memory").0)
}

/// Node 0 gets from node 1, which puts to node 0: both are the first operations of their nodes. The lease of the memory that
/// is read ends: the get fails, and the put does not.
#[test]
fn a_lease_that_ends_fails_no_operation_of_the_same_number() {
    let mut torus =
        InProcessTorus::new("2x1x1".parse().expect("valid"), EngineOptions::default()).expect("memory");
    let (leased, other) = (memory(), memory());
    leased.store(0, &[1]).expect("inside");
    let into = memory();
    let regions = [torus.nodes[0].regions.add(other), torus.nodes[1].regions.add(Arc::clone(&leased))];
    let post = |torus: &mut InProcessTorus, node: u16, request| {
        let operation = Operation { target: NodeNumber(1 - node), request, cookie: 7 };
        torus.nodes[usize::from(node)].post(Port::Local, operation);
    };
    let span = |memory: &Arc<Memory>| Span { memory: Arc::clone(memory), offset: 0 };
    let get = Request::Get { region: regions[1], offset: 0, into: span(&into), length: LENGTH };
    post(&mut torus, 0, get);
    let notification = Notification::None;
    let put =
        Request::Put { region: regions[0], offset: 0, source: span(&memory()), length: LENGTH, notification };
    post(&mut torus, 1, put);
    let mut now = Instant::default();
    let mut step = |torus: &mut InProcessTorus| {
        now = now + Duration::from_micros(10);
        torus.step(now)
    };
    let mut first = [0];
    while first == [0] {
        assert!(step(&mut torus), "no data arrive");
        into.load(0, &mut first).expect("inside");
    }
    leased.end();
    // The rest of the reply leaves without data before the node process learns that the lease has ended.
    while step(&mut torus) {}
    torus.nodes[1].handle_lost_memory();
    while step(&mut torus) {}
    for (node, failure) in [(0, Some(Failure::Gone)), (1, None)] {
        let events: Vec<_> = std::iter::from_fn(|| torus.nodes[node].poll_event(Port::Local)).collect();
        assert_eq!(events, [Event::Completed { cookie: 7, value: 0, failure }], "node {node}");
        assert!(torus.nodes[node].is_idle());
    }
}

/// A put from leased memory and a get from it end in the node that has it: each fails, and neither is complete before.
#[test]
fn operations_of_a_node_on_its_own_memory_end_with_the_lease() {
    // More than moves in one step.
    const LENGTH: u32 = 24 << 20;
    for is_put in [true, false] {
        let (leased, target) = (memory_of(LENGTH), memory_of(LENGTH));
        let options = EngineOptions::default();
        let mut torus = InProcessTorus::new("1x1x1".parse().expect("valid"), options).expect("memory");
        let span = |memory: &Arc<Memory>| Span { memory: Arc::clone(memory), offset: 0 };
        let (length, notification) = (LENGTH, Notification::Event { tag: 1 });
        let request = if is_put {
            let region = torus.nodes[0].regions.add(Arc::clone(&target));
            Request::Put { region, offset: 0, source: span(&leased), length, notification }
        } else {
            let region = torus.nodes[0].regions.add(Arc::clone(&leased));
            Request::Get { region, offset: 0, into: span(&target), length }
        };
        torus.nodes[0].post(Port::Local, Operation { target: NodeNumber(0), request, cookie: 7 });
        leased.store(0, &[1]).expect("inside");
        let (mut first, mut now) = ([0], Instant::default());
        let mut step = |torus: &mut InProcessTorus| {
            now = now + Duration::from_micros(10);
            torus.step(now)
        };
        while first == [0] {
            assert!(step(&mut torus), "no data arrive");
            target.load(0, &mut first).expect("inside");
        }
        leased.end();
        while step(&mut torus) {}
        torus.nodes[0].handle_lost_memory();
        while step(&mut torus) {}
        let events: Vec<_> = std::iter::from_fn(|| torus.nodes[0].poll_event(Port::Local)).collect();
        let failure = Some(Failure::Gone);
        assert_eq!(events, [Event::Completed { cookie: 7, value: 0, failure }], "put: {is_put}");
        assert!(torus.nodes[0].is_idle());
    }
}
