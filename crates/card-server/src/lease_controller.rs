//! The control thread of a card: lease, windows, pause, timeouts of kernels, sensors.
//!
//! The thread sleeps until a doorbell with immediate data, a new client or its wake descriptor, and at most
//! for [`TICK`]. It sees commands without a doorbell at its next poll.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use millstream_card_abi::codes::{
    CardCommand, CardState, LeaseState, MessageKind, RegionCommand, RegionState,
};
use millstream_card_abi::command::{Cause, Fault, nanos};
use millstream_card_abi::hello::{IMM_CONTROL, IMM_DMA};
use millstream_card_abi::lease::{pack, unpack};
use millstream_card_abi::registers::{CONTROL_WINDOW, MAX_BANKS, MAX_REGIONS};
use millstream_rdma::{Deadline, VerbsError};
use millstream_shm::{futex, poll_readable};

use crate::hardware::Hardware;
use crate::lease::{Action, Inputs, Lease};
use crate::net::clients::{ClientRegistry, FIRST_LOCAL_ID};
use crate::net::dma::DmaControl;
use crate::net::port::NetworkPort;
use crate::notification::{Notification, NotificationSink as _};
use crate::queue::interrupt::publish_hung;
use crate::region::context::RegionContext;
use crate::region::control::{RegionControl, RunPhase};
use crate::sensors::Sensors;
use crate::windows::{WindowControl, Windows};

/// Longest time between two polls of the registers.
const TICK: Duration = Duration::from_millis(100);

/// Time between two polls while a pause, the end of a lease or a deadline is pending.
const PENDING_TICK: Duration = Duration::from_millis(1);

/// Time between two readings of the sensors.
const SENSOR_PERIOD: Duration = Duration::from_secs(1);

/// A lease that has ended, until its traces are removed.
struct EndedLease {
    client: u32,
    epoch: u32,
    cause: Option<Fault>,
    since: Instant,
}

/// Grants and ends leases, and controls regions, queue and DMA engine accordingly.
pub(crate) struct LeaseController {
    pub(crate) resources: Resources,
    lease: Lease,
    windows: Option<Windows>,
    ended_lease: Option<EndedLease>,
    state: CardState,
    /// The latest card command that was executed.
    acked: u64,
    /// The pause command that is pending.
    pausing: Option<u64>,
    /// Traffic that earlier holders have reported: written and read, by bank.
    reported: [[u64; MAX_BANKS as usize]; 2],
    reported_bar2: [u64; 2],
    sensors: Sensors,
    sensors_read: Option<Instant>,
    regions: Vec<RegionRecord>,
}

/// The parts of the card that the controller uses.
pub(crate) struct Resources {
    pub(crate) hardware: Arc<Hardware>,
    pub(crate) context: Arc<RegionContext>,
    pub(crate) clients: Arc<ClientRegistry>,
    pub(crate) dma: Arc<DmaControl>,
    pub(crate) window_control: WindowControl,
    pub(crate) port: Option<NetworkPort>,
    /// Time from a heartbeat to the expiry of a lease, unless its holder sets another one.
    pub(crate) lease_duration: Duration,
    /// Time for an interrupted kernel to reach a safe point.
    pub(crate) grace: Duration,
}

/// The controller's record of a region.
#[derive(Clone, Copy, Default)]
struct RegionRecord {
    /// Start of an interrupt to which its kernel has not responded with a safe point.
    interrupted_since: Option<Instant>,
    /// Its hung kernel writes to memory that the card has replaced.
    is_detached: bool,
}

impl LeaseController {
    pub(crate) fn new(resources: Resources) -> LeaseController {
        let regions = vec![RegionRecord::default(); resources.context.regions.len()];
        let controller = LeaseController {
            lease: Lease::new(resources.lease_duration),
            resources,
            windows: None,
            ended_lease: None,
            state: CardState::Running,
            acked: 0,
            pausing: None,
            reported: [[0; MAX_BANKS as usize]; 2],
            reported_bar2: [0; 2],
            sensors: Sensors::find(),
            sensors_read: None,
            regions,
        };
        let registers = &controller.resources.hardware.registers;
        registers.lease_default_ns().store(nanos(controller.resources.lease_duration), Ordering::Relaxed);
        registers.lease_word().store(controller.lease.word(), Ordering::Release);
        controller.publish();
        controller
    }

    /// Serves until the card stops.
    pub(crate) fn serve(&mut self) -> Result<(), VerbsError> {
        while !self.resources.context.stop.load(Ordering::Relaxed) {
            self.poll();
            let timeout = self.poll_interval();
            let Resources { port, clients, context, .. } = &mut self.resources;
            match port {
                Some(port) => {
                    let doorbells = port.wait(clients, Deadline::after(timeout))?;
                    doorbells.into_iter().for_each(|imm| self.forward_doorbell(imm));
                }
                None => {
                    let wake = &*context.controller_wake;
                    // If the poll fails, the next one is still in time.
                    let _ = poll_readable(&[std::os::fd::AsFd::as_fd(wake)], Some(timeout));
                    wake.clear();
                }
            }
        }
        // Clients notice the end of the card by the end of their connections.
        self.windows = None;
        Ok(())
    }

    fn forward_doorbell(&mut self, imm: u32) {
        let count = self.resources.hardware.registers.immediate_doorbells();
        count.fetch_add(1, Ordering::Relaxed);
        match imm {
            IMM_CONTROL => {}
            IMM_DMA => self.resources.dma.notify(),
            region => {
                if let Some(region) = self.resources.context.regions.get(region as usize) {
                    region.notify();
                }
            }
        }
    }

    fn poll_interval(&self) -> Duration {
        let regions = &self.resources.context.regions;
        let deadline_set = regions.iter().any(|region| region.deadline_ns.load(Ordering::Relaxed) != 0);
        let interrupted = self.regions.iter().any(|region| region.interrupted_since.is_some())
            || regions.iter().any(|region| matches!(region.phase(), RunPhase::Hung | RunPhase::Recovered));
        let disconnecting = !self.resources.hardware.users_are_disconnected();
        let ending = self.ended_lease.is_some();
        if ending || self.pausing.is_some() || deadline_set || interrupted || disconnecting {
            return PENDING_TICK;
        }
        match self.lease.expires() {
            Some(expires) => {
                expires.saturating_sub(self.resources.context.started.elapsed()).clamp(PENDING_TICK, TICK)
            }
            None => TICK,
        }
    }

    /// Reads all registers that clients write, and the clock, and acts on them.
    fn poll(&mut self) {
        let registers = self.resources.hardware.registers.clone();
        let now = self.resources.context.started.elapsed();
        registers.clock_ns().store(nanos(now), Ordering::Relaxed);
        let get = Ordering::Acquire;
        let inputs = Inputs {
            word: registers.lease_word().load(get),
            revoke: registers.lease_revoke().load(get),
            heartbeat: registers.lease_heartbeat().load(get),
            duration_ns: registers.lease_duration_ns().load(get),
            release: registers.lease_release().load(get),
            transfer: registers.lease_transfer().load(get),
            detached: registers.lease_detached().load(get),
            is_local: self
                .lease
                .holder()
                .is_some_and(|client| client >= FIRST_LOCAL_ID && self.resources.clients.contains(client)),
        };
        let clients = self.resources.clients.clone();
        let (_, client) = unpack(inputs.word);
        let is_free = self.lease.is_free();
        if client != 0 && is_free {
            self.detach_hung_command();
        }
        // A connecting client is judged once its connection is established or has failed.
        let is_undecided = is_free && clients.is_connecting(client);
        let action = if is_undecided || !self.resources.hardware.users_are_disconnected() {
            None
        } else {
            self.lease.poll(now, inputs, |client| clients.contains(client))
        };
        match action {
            Some(Action::Grant { client, epoch }) => self.grant(client, epoch),
            Some(Action::End { client, epoch, cause }) => self.end(client, epoch, cause),
            Some(Action::Transfer { client, epoch, seen }) => {
                self.resources.clients.set_holder(Some((client, epoch)));
                let word = pack(epoch, client);
                // If a client overwrites the word at this moment, the next poll restores it.
                let _ =
                    registers.lease_word().compare_exchange(seen, word, Ordering::SeqCst, Ordering::Relaxed);
            }
            Some(Action::Restore { seen, to }) => {
                let swapped =
                    registers.lease_word().compare_exchange(seen, to, Ordering::SeqCst, Ordering::Relaxed);
                if swapped.is_ok() {
                    registers.lease_rejects().fetch_add(1, Ordering::Relaxed);
                }
            }
            None => {}
        }
        if self.ended_lease.is_some() {
            self.finish_end();
        }
        self.check_regions(nanos(now));
        if self.resources.context.queue.check_timeout(self.resources.grace) {
            registers.hung_kernels().fetch_add(1, Ordering::Relaxed);
            publish_hung(&registers, &self.resources.hardware.interrupt_fd);
        }
        if self.lease.holder().is_some() {
            self.dispatch_card_command();
            self.add_reports();
        }
        self.finish_pause();
        if self.sensors_read.is_none_or(|at| at.elapsed() >= SENSOR_PERIOD) {
            self.sensors_read = Some(Instant::now());
            self.sensors.publish(&registers);
        }
        self.publish();
    }

    fn publish(&self) {
        let registers = &self.resources.hardware.registers;
        let state = match (&self.ended_lease, self.lease.holder()) {
            (Some(_), _) => LeaseState::Clearing,
            (None, Some(_)) => LeaseState::Held,
            (None, None) => LeaseState::Free,
        };
        registers.lease_epoch().store(self.lease.epoch().into(), Ordering::Relaxed);
        registers.lease_holder().store(self.lease.holder().unwrap_or(0), Ordering::Release);
        let expires = self.lease.expires().map_or(0, nanos);
        registers.lease_expires_ns().store(expires, Ordering::Relaxed);
        registers.card_state().store(self.state as u32, Ordering::Relaxed);
        registers.lease_state().store(state as u32, Ordering::Release);
    }

    /// Replaces memory to which a hung command of the queue still writes, before a client gets the lease.
    fn detach_hung_command(&self) {
        let hardware = &self.resources.hardware;
        if self.resources.context.queue.is_hung_on(hardware.generation()) {
            hardware.replace_memory();
        }
    }

    fn grant(&mut self, client: u32, epoch: u32) {
        let hardware = &self.resources.hardware;
        let opened = match &self.resources.port {
            // The memory could not be replaced.
            _ if self.resources.context.queue.is_hung_on(hardware.generation()) => {
                Err(Fault::new(Cause::KernelHung, 0))
            }
            Some(port) if client < FIRST_LOCAL_ID => {
                let refused = |error: io::Error| {
                    Fault::new(Cause::WindowRegistration, error.raw_os_error().unwrap_or(0) as u64)
                };
                Windows::open(&port.device, hardware).map(Some).map_err(refused)
            }
            // Local clients map BAR0 and memory.
            _ => Ok(None),
        };
        let registers = self.resources.hardware.registers.clone();
        registers.lease_grants().fetch_add(1, Ordering::Relaxed);
        match opened {
            Ok(windows) => {
                let left = nanos(self.lease.duration().unwrap_or_default());
                let values = windows.as_ref().map_or([left, 0, 0, 0], |windows| windows.values(left));
                self.windows = windows;
                self.resources.clients.set_holder(Some((client, epoch)));
                self.resources.context.queue.begin_lease();
                self.publish();
                let granted = Notification::of_card(MessageKind::LeaseGranted, epoch.into(), values);
                self.resources.clients.send(client, epoch, granted);
            }
            Err(fault) => {
                registers.lease_revoke().store(epoch.into(), Ordering::Release);
                registers.card_command_cause().store(fault.cause.code(), Ordering::Relaxed);
            }
        }
    }

    /// Ends the keys, kernels and transfers of the former holder.
    fn end(&mut self, client: u32, epoch: u32, cause: Option<Fault>) {
        if let Some(windows) = self.windows.take() {
            self.resources.window_control.close(windows);
        }
        self.resources.clients.set_holder(None);
        for region in &self.resources.context.regions {
            region.close_epoch();
        }
        self.resources.context.queue.close();
        self.resources.dma.start_reset();
        self.ended_lease = Some(EndedLease { client, epoch, cause, since: Instant::now() });
        // A process that has mapped the memory either finds this state, or `finish_end` finds its access.
        self.publish();
        fence(Ordering::SeqCst);
    }

    /// Frees the card once nothing of the ended lease runs any more, and no access of its holder arrives.
    fn finish_end(&mut self) {
        if let Some(closing) = self.resources.window_control.closing_for() {
            if closing >= self.resources.grace {
                let cause = self.resources.hardware.registers.card_command_cause();
                cause.store(Cause::WindowInUse.code(), Ordering::Relaxed);
            }
            return;
        }
        let (hardware, context) = (self.resources.hardware.clone(), self.resources.context.clone());
        let regions = &context.regions;
        let is_hung = |region: &RegionControl| region.phase() == RunPhase::Hung;
        let generation = hardware.generation();
        let queue_busy = context.queue.is_busy_on(generation);
        let queue_hung = context.queue.is_hung_on(generation);
        let in_grace =
            self.ended_lease.as_ref().is_some_and(|ended| ended.since.elapsed() < self.resources.grace);
        let is_accessed = hardware.registers.lease_accesses().load(Ordering::SeqCst) != 0;
        let is_waited_for = in_grace && (is_accessed || (queue_busy && !queue_hung));
        let is_quiet = regions.iter().all(|region| region.is_reset() || is_hung(region))
            && self.resources.dma.is_reset()
            && !is_waited_for;
        if !is_quiet {
            return;
        }
        let registers = hardware.registers.clone();
        let mut writers = self
            .regions
            .iter()
            .zip(regions)
            .filter(|(record, region)| is_hung(region) && !record.is_detached);
        let memory_in_use = queue_busy || writers.next().is_some();
        if memory_in_use && !hardware.replace_memory() {
            // A kernel of the former holder still writes to the memory: the card stays in the state `Clearing`.
            registers.card_command_cause().store(Cause::KernelHung.code(), Ordering::Relaxed);
            return;
        }
        if let Err(fault) = hardware.clear() {
            // The next holder must not see data of the former one.
            registers.card_command_cause().store(fault.cause.code(), Ordering::Relaxed);
            return;
        }
        for (record, region) in self.regions.iter_mut().zip(regions) {
            record.is_detached = is_hung(region);
        }
        if queue_busy && !queue_hung {
            registers.hung_kernels().fetch_add(1, Ordering::Relaxed);
        }
        let Some(EndedLease { client, epoch, cause, .. }) = self.ended_lease.take() else { return };
        self.keep_reports();
        for at in CONTROL_WINDOW.step_by(8) {
            registers.word64(at).store(0, Ordering::Relaxed);
        }
        for (index, region) in regions.iter().enumerate() {
            region.set_pause(false);
            registers.region(index).doorbell_ack().store(0, Ordering::Relaxed);
            region.open_epoch();
        }
        context.queue.open();
        futex::wake_all(registers.doorbell());
        self.resources.dma.reopen();
        (self.state, self.acked, self.pausing) = (CardState::Running, 0, None);
        registers.card_command_ack().store(0, Ordering::Relaxed);
        registers.card_command_cause().store(0, Ordering::Relaxed);
        registers.lease_end_cause().store(cause.map_or(0, |fault| fault.cause.code()), Ordering::Relaxed);
        let word = self.lease.cleared();
        self.publish();
        // Stored last: the next holder finds the card clear.
        registers.lease_word().store(word, Ordering::SeqCst);
        let ended = Notification::of_card(MessageKind::LeaseEnded, epoch.into(), [0; 4]);
        let ended = Notification { cause: cause.map(|fault| fault.cause), ..ended };
        self.resources.clients.send(client, epoch, ended);
    }

    /// Interrupts kernels that were stopped or have passed their deadline, and declares them hung after the
    /// grace period.
    fn check_regions(&mut self, now: u64) {
        for index in 0..self.regions.len() {
            let control = &self.resources.context.regions[index];
            match control.phase() {
                RunPhase::Hung => self.reject_doorbell(index),
                RunPhase::Recovered => {
                    control.recover();
                    self.regions[index] = RegionRecord::default();
                }
                RunPhase::Idle => self.regions[index].interrupted_since = None,
                RunPhase::Running => {
                    let region = self.resources.hardware.registers.region(index);
                    let deadline = control.deadline_ns.load(Ordering::Relaxed);
                    let late = deadline != 0 && now > deadline;
                    let doorbell = region.doorbell().load(Ordering::Acquire);
                    let stop = doorbell & 0xff == RegionCommand::Stop as u64
                        && doorbell != region.doorbell_ack().load(Ordering::Acquire);
                    if late || stop {
                        control.request_interrupt();
                    }
                    // A paused kernel is at a safe point.
                    if control.is_paused() || !(late || stop || control.is_request_pending()) {
                        self.regions[index].interrupted_since = None;
                        continue;
                    }
                    let since = *self.regions[index].interrupted_since.get_or_insert_with(Instant::now);
                    if since.elapsed() >= self.resources.grace && control.declare_hung() {
                        self.regions[index].interrupted_since = None;
                        self.publish_hung_region(index, since.elapsed());
                    }
                }
            }
        }
    }

    /// Publishes that a region is out of service.
    fn publish_hung_region(&self, index: usize, waited: Duration) {
        let registers = &self.resources.hardware.registers;
        let region = registers.region(index);
        let run = region.doorbell_ack().load(Ordering::Acquire);
        region.cause().store(Cause::KernelHung.code(), Ordering::Relaxed);
        region.detail().store(nanos(waited), Ordering::Relaxed);
        region.status().store(RegionState::Hung as u32, Ordering::Release);
        registers.hung_kernels().fetch_add(1, Ordering::Relaxed);
        self.notify_hung(index, run);
        self.reject_doorbell(index);
    }

    /// Answers a doorbell in place of a hung region.
    fn reject_doorbell(&self, index: usize) {
        let region = self.resources.hardware.registers.region(index);
        let doorbell = region.doorbell().load(Ordering::Acquire);
        if doorbell == 0 || doorbell == region.doorbell_ack().load(Ordering::Acquire) {
            return;
        }
        region.doorbell_ack().store(doorbell, Ordering::Release);
        if doorbell & 0xff != RegionCommand::Stop as u64 {
            self.notify_hung(index, doorbell);
        }
    }

    /// Notifies the holder that a hung region does not execute a doorbell.
    fn notify_hung(&self, index: usize, sequence: u64) {
        let detail = self.resources.hardware.registers.region(index).detail().load(Ordering::Relaxed);
        self.resources.clients.notify(Notification {
            kind: MessageKind::RegionFault,
            region: index as u32,
            cause: Some(Cause::KernelHung),
            sequence,
            values: [detail, 0, 0, 0],
        });
    }

    /// Executes a command for the card as a whole.
    fn dispatch_card_command(&mut self) {
        let registers = self.resources.hardware.registers.clone();
        let command = registers.card_command().load(Ordering::Acquire);
        if command == self.acked || self.pausing == Some(command) {
            return;
        }
        match CardCommand::from_code(command as u32 & 0xff) {
            Some(CardCommand::Pause) => {
                self.state = CardState::Pausing;
                self.pausing = Some(command);
                self.set_pause(true);
            }
            Some(CardCommand::Resume) => {
                self.set_pause(false);
                self.state = CardState::Running;
                self.complete(command, None);
            }
            Some(CardCommand::Clear) => {
                let cleared = self.resources.hardware.clear();
                self.complete(command, cleared.err());
            }
            None => self.complete(command, Some(Fault::new(Cause::UnknownCommand, command))),
        }
    }

    fn set_pause(&self, pause: bool) {
        self.resources.context.regions.iter().for_each(|region| region.set_pause(pause));
    }

    /// Publishes the end of a card command.
    fn complete(&mut self, command: u64, fault: Option<Fault>) {
        let registers = &self.resources.hardware.registers;
        self.acked = command;
        self.pausing = None;
        let cause = fault.map_or(0, |fault| fault.cause.code());
        registers.card_command_cause().store(cause, Ordering::Relaxed);
        registers.card_state().store(self.state as u32, Ordering::Relaxed);
        registers.card_command_ack().store(command, Ordering::Release);
        if let Some(fault) = fault {
            let failed = Notification::of_card(MessageKind::CardFault, command, [fault.detail, 0, 0, 0]);
            self.resources.clients.notify(Notification { cause: Some(fault.cause), ..failed });
        }
    }

    fn finish_pause(&mut self) {
        let Some(command) = self.pausing else { return };
        let regions = &self.resources.context.regions;
        if regions.iter().any(|region| region.phase() == RunPhase::Hung) {
            // The hung kernel reaches no safe point.
            self.set_pause(false);
            self.state = CardState::Running;
            return self.complete(command, Some(Fault::new(Cause::KernelHung, 0)));
        }
        if !regions.iter().all(RegionControl::is_paused) {
            return;
        }
        let bytes = self.resources.hardware.publish_dirty();
        self.state = CardState::Paused;
        self.complete(command, None);
        let paused = Notification::of_card(MessageKind::CardPaused, command, [bytes, 0, 0, 0]);
        self.resources.clients.notify(paused);
    }

    /// Keeps the traffic that the former holder has reported.
    fn keep_reports(&mut self) {
        self.add_reports();
        let registers = &self.resources.hardware.registers;
        let add = |total: &mut u64, report: &AtomicU64| {
            *total = total.wrapping_add(report.load(Ordering::Relaxed));
        };
        for bank in 0..MAX_BANKS as usize {
            add(&mut self.reported[0][bank], registers.report_written(bank));
            add(&mut self.reported[1][bank], registers.report_read(bank));
        }
        add(&mut self.reported_bar2[0], registers.report_bar2_written());
        add(&mut self.reported_bar2[1], registers.report_bar2_read());
    }

    /// Publishes the traffic of earlier holders plus that of the current one.
    fn add_reports(&self) {
        let registers = &self.resources.hardware.registers;
        let banks = registers.bank_count().load(Ordering::Relaxed).min(MAX_BANKS) as usize;
        for bank in 0..banks {
            let written = registers.report_written(bank).load(Ordering::Relaxed);
            let read = registers.report_read(bank).load(Ordering::Relaxed);
            let before = (self.reported[0][bank], self.reported[1][bank]);
            registers.bank_rdma_written(bank).store(before.0.wrapping_add(written), Ordering::Relaxed);
            registers.bank_rdma_read(bank).store(before.1.wrapping_add(read), Ordering::Relaxed);
        }
        let [written, read] = self.reported_bar2;
        for (total, report, before) in [
            (registers.bar2_rdma_written(), registers.report_bar2_written(), written),
            (registers.bar2_rdma_read(), registers.report_bar2_read(), read),
        ] {
            total.store(before.wrapping_add(report.load(Ordering::Relaxed)), Ordering::Relaxed);
        }
    }
}

const _: () = assert!(MAX_REGIONS as u32 <= IMM_DMA);
