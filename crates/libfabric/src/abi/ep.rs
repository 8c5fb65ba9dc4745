//! Endpoints: bindings, and the completions of an endpoint's operations.

use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use millstream_torus::TorusNode;
use millstream_torus_core::NodeNumber;

use super::av::{AddressVector, Addresses, copy_address};
use super::cntr::{Counter, Counts};
use super::cq::{CompletionQueue, Queue};
use super::domain::Domain;
use super::{atomic, error, error_size, fid, give, lock, msg, object, rma, table};
use crate::endpoint::{Completion, Endpoint, Side};
use crate::ring::{Address, Rings};
use crate::sys;

/// The endpoints that a completion queue or a counter is bound to. Reading it makes their progress.
#[derive(Debug, Default)]
pub(super) struct BoundEndpoints(Mutex<Vec<Weak<EndpointState>>>);

impl BoundEndpoints {
    pub(super) fn add(&self, endpoint: &Arc<EndpointState>) {
        lock(&self.0).push(Arc::downgrade(endpoint));
    }

    /// Returns whether any endpoint had something to do.
    pub(super) fn progress(&self) -> bool {
        let endpoints: Vec<_> = lock(&self.0).iter().filter_map(Weak::upgrade).collect();
        endpoints.iter().fold(false, |worked, endpoint| endpoint.progress() | worked)
    }
}

/// A queue, and whether it gets all completions or only those that ask for it.
type Bound = Option<(Arc<Queue>, bool)>;

/// What an endpoint is, without libfabric's struct. Queues refer to it.
#[derive(Debug)]
pub(super) struct EndpointState {
    core: Mutex<Core>,
}

#[derive(Debug)]
pub(super) struct Core {
    pub(super) endpoint: Endpoint<TorusNode>,
    addresses: Option<Arc<Mutex<Addresses>>>,
    transmit: Bound,
    receive: Bound,
    counters: Vec<(u64, Arc<Counts>)>,
    transmit_flags: u64,
    receive_flags: u64,
    /// Receives name their source.
    directed: bool,
}

impl EndpointState {
    pub(super) fn lock(&self) -> MutexGuard<'_, Core> {
        lock(&self.core)
    }

    /// Moves messages and reports completions. Returns whether there was anything.
    pub(super) fn progress(&self) -> bool {
        let mut core = self.lock();
        let worked = core.endpoint.progress();
        core.report();
        worked
    }
}

impl Core {
    /// Gives completions to the queues and counters.
    pub(super) fn report(&mut self) {
        while let Some(done) = self.endpoint.poll_completion() {
            for (events, counts) in &self.counters {
                if *events & done.flags != 0 {
                    let count = if done.error == 0 { &counts.done } else { &counts.failed };
                    // The data of the operation are in place for whoever reads the count.
                    count.fetch_add(1, Ordering::Release);
                }
            }
            let bound = if done.side == Side::Transmit { &self.transmit } else { &self.receive };
            if let Some((queue, _)) = bound.as_ref().filter(|_| done.signaled || done.error != 0) {
                let source = done.source.and_then(|node| self.number(node)).unwrap_or(u64::MAX);
                queue.push(done, source);
            }
        }
    }

    fn number(&self, node: NodeNumber) -> Option<u64> {
        lock(self.addresses.as_ref()?).number(node)
    }

    /// The address of a number.
    pub(super) fn address(&self, number: u64) -> Option<Address> {
        lock(self.addresses.as_ref()?).get(number)
    }

    /// The node of which a receive takes messages; `Err` if the number is unknown.
    pub(super) fn source(&self, number: u64) -> Result<Option<NodeNumber>, ()> {
        if !self.directed || number == u64::MAX {
            return Ok(None);
        }
        self.address(number).map(|address| Some(address.node)).ok_or(())
    }

    /// Whether an operation with these flags writes an entry to its queue.
    pub(super) fn is_signaled(&self, side: Side, flags: u64) -> bool {
        let bound = if side == Side::Transmit { &self.transmit } else { &self.receive };
        let selective = bound.as_ref().is_some_and(|&(_, selective)| selective);
        !selective || flags & sys::MS_FI_COMPLETION != 0
    }

    /// Flags of operations that have no flags of their own.
    pub(super) fn default_flags(&self, side: Side) -> u64 {
        if side == Side::Transmit { self.transmit_flags } else { self.receive_flags }
    }

    /// The completion of an operation that transmits.
    pub(super) fn completion(&self, context: *mut c_void, kind: u64, flags: CallFlags) -> Completion {
        let signaled =
            flags != CallFlags::Inject && self.is_signaled(Side::Transmit, flags.of(self, Side::Transmit));
        Completion { signaled, ..Completion::new(Side::Transmit, context as usize, kind) }
    }
}

/// The flags of an operation, by the form of its call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallFlags {
    /// A call without flags: the endpoint's default flags.
    Default,
    /// A call with a message struct and flags, which replace the default flags.
    Given(u64),
    /// An inject call: the data is copied, and nothing is written to the queue.
    Inject,
}

impl CallFlags {
    pub(super) fn of(self, core: &Core, side: Side) -> u64 {
        match self {
            CallFlags::Default => core.default_flags(side),
            CallFlags::Given(flags) => flags,
            CallFlags::Inject => sys::MS_FI_INJECT,
        }
    }
}

#[repr(C)]
pub(super) struct EndpointObject {
    fid: sys::fid_ep,
    state: Arc<EndpointState>,
}

/// The state of an endpoint.
///
/// # Safety
/// An open endpoint.
pub(super) unsafe fn state<'e, F>(ep: *const F) -> &'e Arc<EndpointState> {
    // SAFETY: the caller's.
    unsafe { &object::<EndpointObject, _>(ep).state }
}

static EP: sys::fi_ops = sys::fi_ops {
    size: size_of::<sys::fi_ops>(),
    close: Some(close),
    bind: Some(bind),
    control: Some(control),
    ops_open: None,
    tostr: None,
    ops_set: None,
};
static EP_OPS: sys::fi_ops_ep = sys::fi_ops_ep {
    size: size_of::<sys::fi_ops_ep>(),
    cancel: Some(cancel),
    getopt: Some(no_option),
    setopt: Some(no_set_option),
    tx_ctx: None,
    rx_ctx: None,
    rx_size_left: Some(size_left),
    tx_size_left: Some(size_left),
};
static CM_OPS: sys::fi_ops_cm = sys::fi_ops_cm {
    size: size_of::<sys::fi_ops_cm>(),
    setname: Some(no_set_name),
    getname: Some(name),
    getpeer: Some(no_peer),
    connect: None,
    listen: None,
    accept: None,
    reject: None,
    shutdown: None,
    join: None,
};

pub(super) unsafe extern "C" fn open(
    domain: *mut sys::fid_domain,
    info: *mut sys::fi_info,
    ep: *mut *mut sys::fid_ep,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the caller's info, domain and place.
    unsafe {
        let Some(info) = info.as_ref() else { return error(sys::FI_EINVAL) };
        let node = match TorusNode::from_environment() {
            Ok(node) => node,
            Err(cause) => {
                tracing::error!("endpoint: {cause}");
                return error(sys::FI_EBUSY);
            }
        };
        let rings = match Rings::new(node) {
            Ok(rings) => rings,
            Err(cause) => {
                tracing::error!("endpoint: {cause}");
                return error(sys::FI_ENOSPC);
            }
        };
        let core = Core {
            endpoint: Endpoint::new(rings, Arc::clone(Domain::regions(domain))),
            addresses: None,
            transmit: None,
            receive: None,
            counters: Vec::new(),
            transmit_flags: info.tx_attr.as_ref().map_or(0, |tx| tx.op_flags),
            receive_flags: info.rx_attr.as_ref().map_or(0, |rx| rx.op_flags),
            directed: info.caps & sys::MS_FI_DIRECTED_RECV != 0,
        };
        let fid = sys::fid_ep {
            fid: fid(sys::FI_CLASS_EP, context, &EP),
            ops: table(&EP_OPS),
            cm: table(&CM_OPS),
            msg: table(&msg::OPS),
            rma: table(&rma::OPS),
            tagged: table(&msg::TAGGED_OPS),
            atomic: table(&atomic::OPS),
            collective: std::ptr::null_mut(),
        };
        give(EndpointObject { fid, state: Arc::new(EndpointState { core: Mutex::new(core) }) }, ep)
    }
}

unsafe extern "C" fn close(fid: *mut sys::fid) -> c_int {
    // SAFETY: an open endpoint, which ends here.
    unsafe {
        let mut core = state(fid).lock();
        // What has completed must arrive, also if this process ends now.
        core.endpoint.progress();
        core.endpoint.flush();
        // Another thread may wait for the lock to make progress.
        core.endpoint.close();
        drop(core);
        super::close::<EndpointObject>(fid)
    }
}

unsafe extern "C" fn bind(fid: *mut sys::fid, other: *mut sys::fid, flags: u64) -> c_int {
    // SAFETY: open objects; the class says which one the other is.
    unsafe {
        let state = state(fid);
        let mut core = state.lock();
        match (*other).fclass as u32 {
            sys::FI_CLASS_AV => {
                core.addresses = Some(Arc::clone(object::<AddressVector, _>(other).addresses()));
            }
            sys::FI_CLASS_CQ => {
                let queue = object::<CompletionQueue, _>(other).queue();
                let bound = (Arc::clone(queue), flags & sys::MS_FI_SELECTIVE_COMPLETION != 0);
                if flags & sys::MS_FI_TRANSMIT != 0 {
                    core.transmit = Some(bound.clone());
                }
                if flags & sys::MS_FI_RECV != 0 {
                    core.receive = Some(bound);
                }
                queue.endpoints.add(state);
            }
            sys::FI_CLASS_CNTR => {
                let counts = object::<Counter, _>(other).counts();
                core.counters.push((flags, Arc::clone(counts)));
                counts.endpoints.add(state);
            }
            sys::FI_CLASS_EQ => {}
            _ => return error(sys::FI_EINVAL),
        }
    }
    0
}

unsafe extern "C" fn control(fid: *mut sys::fid, command: c_int, argument: *mut c_void) -> c_int {
    // SAFETY: an open endpoint; the argument's type follows from the command.
    unsafe {
        let mut core = state(fid).lock();
        match command as u32 {
            sys::FI_ENABLE if core.addresses.is_none() => error(sys::FI_ENOAV),
            sys::FI_ENABLE => 0,
            sys::FI_GETOPSFLAG => {
                let flags = &mut *argument.cast::<u64>();
                let side = if *flags & sys::MS_FI_TRANSMIT != 0 { Side::Transmit } else { Side::Receive };
                *flags = core.default_flags(side);
                0
            }
            sys::FI_SETOPSFLAG => {
                let flags = *argument.cast::<u64>();
                if flags & sys::MS_FI_TRANSMIT != 0 {
                    core.transmit_flags = flags & !sys::MS_FI_TRANSMIT;
                }
                if flags & sys::MS_FI_RECV != 0 {
                    core.receive_flags = flags & !sys::MS_FI_RECV;
                }
                0
            }
            _ => error(sys::FI_ENOSYS),
        }
    }
}

unsafe extern "C" fn cancel(fid: *mut sys::fid, context: *mut c_void) -> isize {
    // SAFETY: an open endpoint.
    let mut core = unsafe { state(fid) }.lock();
    core.endpoint.cancel(context as usize);
    core.report();
    0
}

unsafe extern "C" fn no_option(_: *mut sys::fid, _: c_int, _: c_int, _: *mut c_void, _: *mut usize) -> c_int {
    error(sys::FI_ENOPROTOOPT)
}

unsafe extern "C" fn no_set_option(
    _: *mut sys::fid,
    _: c_int,
    _: c_int,
    _: *const c_void,
    _: usize,
) -> c_int {
    error(sys::FI_ENOPROTOOPT)
}

/// Queues grow, so there is always room.
unsafe extern "C" fn size_left(_: *mut sys::fid_ep) -> isize {
    1024
}

unsafe extern "C" fn no_set_name(_: *mut sys::fid, _: *mut c_void, _: usize) -> c_int {
    error(sys::FI_ENOSYS)
}

unsafe extern "C" fn name(fid: *mut sys::fid, address: *mut c_void, length: *mut usize) -> c_int {
    // SAFETY: an open endpoint, and a place of `length` bytes.
    unsafe {
        let found = state(fid).lock().endpoint.address();
        if copy_address(found, address, length) { 0 } else { error(sys::FI_ETOOSMALL) }
    }
}

unsafe extern "C" fn no_peer(_: *mut sys::fid_ep, _: *mut c_void, _: *mut usize) -> c_int {
    error(sys::FI_ENOSYS)
}

/// Runs an operation, then reports what it completed.
///
/// # Safety
/// An open endpoint.
pub(super) unsafe fn operate(ep: *mut sys::fid_ep, work: impl FnOnce(&mut Core) -> Result<(), u32>) -> isize {
    // SAFETY: the caller's.
    let mut core = unsafe { state(ep) }.lock();
    let result = work(&mut core);
    core.report();
    match result {
        Ok(()) => 0,
        Err(code) => error_size(code),
    }
}
