//! The torus for a host outside of it: [`Fabric`](millstream_fabric::Fabric) through a gateway.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millstream_fabric::{FabricError, RegionId};
use millstream_rdma::device::DeviceSelector;
use millstream_rdma::wait::{CompletionWaiter, WaitError, WaitOptions};
use millstream_rdma::{Completion as WorkCompletion, CompletionQueue, Deadline, WaitFd};
use millstream_shm::polling::{DEFAULT_POLLING, Polling};
use millstream_torus_core::{Dimensions, NodeNumber};

use super::channel::{COMPLETIONS, Channel, WorkId};
use super::directory::{self, PublishedRegion};
use super::handshake::{self, GatewayOptions, HostError};
use super::message::{FromGateway, MAX_COMMANDS, encode_command};
use crate::control::Command;
use crate::initiator::{Initiator, NEVER};
use crate::key;
use crate::memory::Memory;
use crate::outstanding::{Outstanding, Pending};

/// Environment variable with the address of a node's seventh port.
pub const ENV_GATEWAY: &str = "MILLSTREAM_TORUS_GATEWAY";
/// Environment variable with the key of the seventh port, 16 hexadecimal digits.
pub const ENV_GATEWAY_KEY: &str = "MILLSTREAM_TORUS_GATEWAY_KEY";

/// How long a gateway may take to admit this host.
const CONNECT: Duration = Duration::from_secs(30);
/// How long this host at its end waits for its last puts.
const END: Duration = Duration::from_secs(10);

/// A host outside of the torus.
#[derive(Debug)]
pub struct OutsideHost {
    pub(super) torus: Dimensions,
    pub(super) gateway: NodeNumber,
    // The connection before its queue, and that before the waiter.
    pub(super) channel: Channel,
    queue: CompletionQueue,
    waiter: Option<CompletionWaiter>,
    pub(super) outstanding: Outstanding,
    /// Memory of this host for operations between regions; no node reaches it.
    pub(super) regions: BTreeMap<RegionId, Memory>,
    polling: Polling,
    ready: bool,
    broken: bool,
}

impl OutsideHost {
    /// Connects to the gateway that the environment names.
    ///
    /// # Errors
    /// [`HostError`].
    pub fn from_environment(device: DeviceSelector) -> Result<OutsideHost, HostError> {
        let variable = |name| std::env::var(name).map_err(|_| HostError::Environment { name });
        let (address, key) = (variable(ENV_GATEWAY)?, variable(ENV_GATEWAY_KEY)?);
        let key = key::parse(&key).ok_or(HostError::Environment { name: ENV_GATEWAY_KEY })?;
        OutsideHost::connect(&GatewayOptions { address, key, device })
    }

    /// Connects to a gateway.
    ///
    /// # Errors
    /// [`HostError`].
    pub fn connect(options: &GatewayOptions) -> Result<OutsideHost, HostError> {
        let device = millstream_rdma::device::open(&options.device)?;
        // The host polls before it waits.
        let wait = WaitOptions { spin: Duration::ZERO, ..WaitOptions::default() };
        let waiter = CompletionWaiter::new(&device, wait)?;
        let queue = waiter.completion_queue(COMPLETIONS)?;
        let deadline = Deadline::after(CONNECT);
        let (channel, torus, gateway) = handshake::join(options, &device, &queue, deadline)?;
        let mut host = OutsideHost {
            torus,
            gateway,
            channel,
            queue,
            waiter: Some(waiter),
            outstanding: Outstanding::new(),
            regions: BTreeMap::new(),
            polling: Polling::new(DEFAULT_POLLING),
            ready: false,
            broken: false,
        };
        host.wait(CONNECT, |host| host.ready.then_some(Ok(()))).map_err(|cause| HostError::Io {
            address: options.address.clone(),
            cause: std::io::Error::other(format!("it takes no commands: {cause}")),
        })?;
        Ok(host)
    }

    /// The node through which this host reaches the torus.
    #[must_use]
    pub fn gateway(&self) -> NodeNumber {
        self.gateway
    }

    /// The regions that a node's application published.
    ///
    /// # Errors
    /// [`FabricError`] of the read.
    pub fn published(&mut self, node: NodeNumber) -> Result<Vec<PublishedRegion>, FabricError> {
        directory::published(self, node)
    }

    /// The region that a node's application published by this name.
    ///
    /// # Errors
    /// [`FabricError`] of the read.
    pub fn find(&mut self, node: NodeNumber, name: &str) -> Result<Option<PublishedRegion>, FabricError> {
        directory::find(self, node, name)
    }

    /// Registers zero bytes of this host, for operations between regions. No node reaches them.
    ///
    /// # Errors
    /// The system has no memory.
    pub fn register_memory(&mut self, size: usize) -> std::io::Result<RegionId> {
        let (memory, _) = Memory::allocate("millstream-torus-region", size.max(1), None)?;
        let region = RegionId(millstream_shm::random_u64());
        self.regions.insert(region, memory);
        Ok(region)
    }

    /// Memory of a region of this host.
    #[must_use]
    pub fn region_memory(&self, region: RegionId) -> Option<&Memory> {
        self.regions.get(&region)
    }

    /// Whether the gateway is known to be lost.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.broken
    }

    fn lose(&mut self, cause: &str) {
        if !std::mem::replace(&mut self.broken, true) {
            tracing::warn!("the gateway, {}, is lost: {cause}", self.gateway);
        }
    }

    /// Takes all completions.
    pub(super) fn progress(&mut self) {
        let mut buffer = [WorkCompletion::EMPTY; 32];
        loop {
            let taken = match self.queue.poll(&mut buffer) {
                Ok(taken) => taken.len(),
                Err(error) => return self.lose(&error.to_string()),
            };
            buffer[..taken].iter().for_each(|completion| self.complete(completion));
            if taken < buffer.len() {
                return;
            }
        }
    }

    fn complete(&mut self, completion: &WorkCompletion) {
        let id = WorkId::decode(completion.wr_id());
        if !completion.is_success() {
            return self.lose("the queue pair failed");
        }
        if !id.receive {
            return self.channel.sent(id);
        }
        let message = match self.channel.received(id, completion.len()) {
            Ok(bytes) => FromGateway::decode(&bytes),
            Err(error) => return self.lose(&error.to_string()),
        };
        match message {
            Some(FromGateway::Ready) => self.ready = true,
            Some(FromGateway::Completed(done)) => self.outstanding.finish(done),
            None => self.lose("it sent a malformed message"),
        }
    }

    /// Blocks until there is a completion, the gateway ends, or `timeout` has passed.
    fn sleep(&mut self, timeout: Duration) {
        let Some(mut waiter) = self.waiter.take() else { return };
        let stream = Arc::clone(self.channel.stream());
        let mut descriptors = [WaitFd::readable(&*stream)];
        let queue = self.queue.clone();
        let deadline = Deadline::after(timeout);
        let mut buffer = [WorkCompletion::EMPTY; 32];
        let mut taken = Vec::new();
        let waited = waiter.wait(&[&queue], &mut descriptors, deadline, || -> Result<bool, WaitError> {
            // A failure of the queue is seen again by `progress`.
            taken.extend_from_slice(queue.poll(&mut buffer).unwrap_or_default());
            Ok(!taken.is_empty())
        });
        let has_ended = descriptors[0].is_ready();
        self.waiter = Some(waiter);
        taken.iter().for_each(|completion| self.complete(completion));
        if let Err(error) = waited {
            self.lose(&error.to_string());
        }
        if has_ended {
            // What it sent before its end counts.
            self.progress();
            self.lose("its process ended, or it disconnected this host");
        }
    }
}

impl Drop for OutsideHost {
    /// The gateway ends what is under way when this host leaves it, so that waits.
    fn drop(&mut self) {
        let _ = self.wait(END, |host| (host.outstanding.count() == 0).then_some(Ok(())));
    }
}

impl Initiator for OutsideHost {
    fn outstanding(&mut self) -> &mut Outstanding {
        &mut self.outstanding
    }

    fn store_staged(&self, at: u64, data: &[u8]) {
        // The place is inside the staging memory.
        let _ = self.channel.staging().store(at, data);
    }

    fn load_staged(&self, at: u64, into: &mut [u8]) {
        let _ = self.channel.staging().load(at, into);
    }

    fn post(&mut self, command: Command, pending: Pending) -> Result<u32, FabricError> {
        self.wait(NEVER, |host| {
            (host.outstanding.count() < MAX_COMMANDS && host.channel.is_ready()).then_some(Ok(()))
        })?;
        let lost = FabricError::NodeLost { node: self.gateway };
        if self.broken {
            return Err(lost);
        }
        let data = pending.staged.map(|at| (at, pending.length as u32));
        let cookie = self.outstanding.begin(pending);
        let message = encode_command(&Command { cookie, ..command });
        if let Err(error) = self.channel.send(data, &message) {
            self.lose(&error.to_string());
            return Err(lost);
        }
        Ok(cookie)
    }

    fn wait<R>(
        &mut self,
        timeout: Duration,
        mut check: impl FnMut(&mut OutsideHost) -> Option<Result<R, FabricError>>,
    ) -> Result<R, FabricError> {
        let start = Instant::now();
        self.polling.begin();
        loop {
            self.progress();
            if let Some(result) = check(self) {
                return result;
            }
            if self.broken {
                return Err(FabricError::NodeLost { node: self.gateway });
            }
            if self.polling.pause() {
                continue;
            }
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Err(FabricError::TimedOut { waited: timeout });
            }
            self.sleep(left);
        }
    }
}
