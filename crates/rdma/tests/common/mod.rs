//! Helpers of the integration tests: a device (a test without one fails), and two connected peers.
#![allow(dead_code, reason = "each test uses a part")]

use std::net::TcpStream;
use std::time::Duration;

use millstream_rdma::{
    CompletionQueue, Deadline, Device, DeviceSelector, PreparedQueuePair, QueuePair, RcOptions, connect,
    device,
};

pub(crate) fn device() -> Device {
    device::open(&DeviceSelector::from_environment())
        .unwrap_or_else(|error| panic!("run `make lib` first: {error}"))
}

pub(crate) fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(10))
}

/// The two ends of a TCP stream.
pub(crate) fn streams() -> (TcpStream, TcpStream) {
    let listener = connect::listen("127.0.0.1:0").unwrap();
    let dialled = connect::dial(&listener.address().to_string(), soon()).unwrap();
    (dialled, listener.accept(soon()).unwrap().0)
}

/// Runs the two sides of a connection setup concurrently, and returns their results.
pub(crate) fn both<A: Send, B: Send>(
    a: impl FnOnce(TcpStream) -> A + Send,
    b: impl FnOnce(TcpStream) -> B + Send,
) -> (A, B) {
    let (one, other) = streams();
    std::thread::scope(|scope| {
        let other = scope.spawn(move || b(other));
        (a(one), other.join().unwrap())
    })
}

/// One end of a connection, with its own device context and one completion queue.
pub(crate) struct End {
    pub(crate) device: Device,
    pub(crate) queue: CompletionQueue,
    pub(crate) pair: QueuePair,
    pub(crate) stream: TcpStream,
    pub(crate) private_data: Vec<u8>,
}

impl End {
    /// Connects. `prepare` makes the private data and may post receives.
    pub(crate) fn connect(
        mut stream: TcpStream,
        options: RcOptions,
        prepare: impl FnOnce(&Device, &PreparedQueuePair) -> Vec<u8>,
    ) -> End {
        let device = device();
        let queue = CompletionQueue::new(&device, options.send_depth + options.recv_depth).unwrap();
        let prepared = PreparedQueuePair::new(&device, &queue, &queue, &options).unwrap();
        let private_data = prepare(&device, &prepared);
        let connected = prepared.connect(&mut stream, &private_data, soon()).unwrap();
        End { device, queue, pair: connected.pair, stream, private_data: connected.private_data }
    }

    /// Polls until one completion is available.
    pub(crate) fn completion(&self) -> millstream_rdma::Completion {
        let deadline = soon();
        let mut buffer = [millstream_rdma::Completion::EMPTY];
        loop {
            if let [completion] = self.queue.poll(&mut buffer).unwrap() {
                return *completion;
            }
            assert!(!deadline.passed(), "no completion in time");
            std::thread::yield_now();
        }
    }
}
