//! The part of a card that decides: who holds the lease, which windows are open, whether regions run.
//!
//! One thread. It sleeps until a doorbell with immediate data, a node or its own wake-up comes, and at least
//! every [`TICK`]; commands that come without any of these are seen then.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use millstream_rdma::{Access, Deadline, Region};
use millstream_shm::{EventFd, futex, poll_readable};

use crate::command::{Cause, Fault, nanos};
use crate::engine::show_stuck;
use crate::hardware::Hardware;
use crate::lease::{Action, Inputs, Lease};
use crate::net::copies::CopyDesk;
use crate::net::crowd::Crowd;
use crate::net::port::{Port, PortError};
use crate::net::{IMM_CONTROL, IMM_COPIES};
use crate::region::codes::{CardCommand, CardState, LeaseState, MessageKind, RegionCommand, RegionState};
use crate::region::desk::{Desk, Phase};
use crate::region::worker::{News, Outlet, Shop};
use crate::registers::{CONTROL_WINDOW, MAX_BANKS, MAX_REGIONS};
use crate::sensors::Sensors;

/// Longest time between two looks at the registers.
const TICK: Duration = Duration::from_millis(100);

/// Time between two looks while something is on its way: a pause, the end of a lease, a deadline.
const SOON: Duration = Duration::from_millis(1);

/// Time between two looks at the sensors.
const SENSE: Duration = Duration::from_secs(1);

/// What the holder of a lease has keys for. They end when this is dropped.
struct Windows {
    control: Region,
    dma: Region,
    memory: Region,
}

/// A lease that has ended and whose traces are being removed.
struct Ending {
    node: u32,
    epoch: u32,
    cause: Option<Fault>,
    since: Instant,
}

/// See the module.
pub(crate) struct Warden {
    pub(crate) parts: Parts,
    lease: Lease,
    started: Instant,
    windows: Option<Windows>,
    ending: Option<Ending>,
    state: CardState,
    taken: u64,
    /// The pause that is under way.
    pausing: Option<u64>,
    reported: [[u64; MAX_BANKS as usize]; 2],
    reported_dma: [u64; 2],
    sensors: Sensors,
    sensed: Option<Instant>,
    regions: Vec<Watched>,
}

/// What a warden works with.
pub(crate) struct Parts {
    pub(crate) hardware: Arc<Hardware>,
    pub(crate) shop: Arc<Shop>,
    pub(crate) crowd: Arc<Crowd>,
    pub(crate) copies: Arc<CopyDesk>,
    pub(crate) port: Option<Port>,
    pub(crate) wake: Arc<EventFd>,
    pub(crate) stop: Arc<AtomicBool>,
    /// Time from a heartbeat to the end of a lease, unless its holder asks for another.
    pub(crate) lease: Duration,
    /// Time for a kernel that has to end to reach a safe point.
    pub(crate) grace: Duration,
}

/// What the warden remembers of a region.
#[derive(Clone, Copy, Default)]
struct Watched {
    /// Since when its kernel has been wanted at a safe point.
    since: Option<Instant>,
    /// Its kernel was given up and card memory replaced, so what it writes is its own.
    apart: bool,
}

impl Warden {
    pub(crate) fn new(parts: Parts) -> Warden {
        let regions = vec![Watched::default(); parts.shop.desks.len()];
        let warden = Warden {
            lease: Lease::new(parts.lease),
            parts,
            started: Instant::now(),
            windows: None,
            ending: None,
            state: CardState::Running,
            taken: 0,
            pausing: None,
            reported: [[0; MAX_BANKS as usize]; 2],
            reported_dma: [0; 2],
            sensors: Sensors::find(),
            sensed: None,
            regions,
        };
        let registers = &warden.parts.hardware.registers;
        registers.lease_default_ns().store(nanos(warden.parts.lease), Ordering::Relaxed);
        registers.lease_word().store(warden.lease.word(), Ordering::Release);
        warden.publish();
        warden
    }

    /// Serves until the card stops.
    pub(crate) fn serve(&mut self) -> Result<(), PortError> {
        while !self.parts.stop.load(Ordering::Relaxed) {
            self.look();
            let patience = self.patience();
            let Parts { port, crowd, .. } = &mut self.parts;
            match port {
                Some(port) => {
                    let rung = port.wait(crowd, Deadline::after(patience))?;
                    rung.into_iter().for_each(|imm| self.answer(imm));
                }
                None => {
                    // Whatever is the matter with the descriptor, the next look comes in time.
                    let _ = poll_readable(&[std::os::fd::AsFd::as_fd(&*self.parts.wake)], Some(patience));
                    self.parts.wake.clear();
                }
            }
        }
        // Nodes learn that the card is gone by the end of their connections.
        self.windows = None;
        Ok(())
    }

    fn answer(&mut self, imm: u32) {
        let count = self.parts.hardware.registers.doorbells_by_message();
        count.fetch_add(1, Ordering::Relaxed);
        match imm {
            IMM_CONTROL => {}
            IMM_COPIES => self.parts.copies.nudge(),
            region => {
                if let Some(desk) = self.parts.shop.desks.get(region as usize) {
                    desk.nudge();
                }
            }
        }
    }

    fn patience(&self) -> Duration {
        let deadline_set =
            self.parts.shop.desks.iter().any(|desk| desk.deadline_ns.load(Ordering::Relaxed) != 0);
        let watched = self.regions.iter().any(|region| region.since.is_some())
            || self.parts.shop.desks.iter().any(|desk| matches!(desk.phase(), Phase::Lost | Phase::Back));
        let parting = !self.parts.hardware.is_parted();
        if self.ending.is_some() || self.pausing.is_some() || deadline_set || watched || parting {
            return SOON;
        }
        match self.lease.expires() {
            Some(expires) => expires.saturating_sub(self.started.elapsed()).clamp(SOON, TICK),
            None => TICK,
        }
    }

    /// Looks at everything that nodes write, and at the time.
    fn look(&mut self) {
        let registers = self.parts.hardware.registers.clone();
        let now = self.started.elapsed();
        registers.clock_ns().store(nanos(now), Ordering::Relaxed);
        let get = Ordering::Acquire;
        let inputs = Inputs {
            word: registers.lease_word().load(get),
            revoke: registers.lease_revoke().load(get),
            heartbeat: registers.lease_heartbeat().load(get),
            duration_ns: registers.lease_duration_ns().load(get),
            release: registers.lease_release().load(get),
            hand_over: registers.lease_hand_over().load(get),
            detached: registers.lease_detached().load(get),
            alive: self
                .lease
                .holder()
                .is_some_and(|node| node >= crate::net::crowd::FIRST_LOCAL && self.parts.crowd.is_node(node)),
        };
        let crowd = self.parts.crowd.clone();
        let (_, node) = crate::lease::unpack(inputs.word);
        if node != 0 && self.lease.is_free() {
            self.leave_memory_of_lost_command();
        }
        // Its connection will be complete, or end, in a moment; then this is judged.
        let action = if crowd.is_arriving(node) || !self.parts.hardware.is_parted() {
            None
        } else {
            self.lease.look(now, inputs, |node| crowd.is_node(node))
        };
        match action {
            Some(Action::Grant { node, epoch }) => self.grant(node, epoch),
            Some(Action::End { node, epoch, cause }) => self.end(node, epoch, cause),
            Some(Action::HandOver { node, epoch, seen }) => {
                self.parts.crowd.set_holder(Some((node, epoch)));
                let word = crate::lease::word(epoch, node);
                // A word that somebody scribbles at this moment is put right at the next look.
                let _ =
                    registers.lease_word().compare_exchange(seen, word, Ordering::SeqCst, Ordering::Relaxed);
            }
            Some(Action::Restore { seen, to }) => {
                let swapped =
                    registers.lease_word().compare_exchange(seen, to, Ordering::SeqCst, Ordering::Relaxed);
                if swapped.is_ok() {
                    registers.lease_refusals().fetch_add(1, Ordering::Relaxed);
                }
            }
            None => {}
        }
        if self.ending.is_some() {
            self.finish_ending();
        }
        self.attend_regions(nanos(now));
        if self.parts.shop.rings.attend(self.parts.grace) {
            registers.regions_lost().fetch_add(1, Ordering::Relaxed);
            show_stuck(&registers, &self.parts.hardware.interrupt_fd);
        }
        if self.lease.holder().is_some() {
            self.obey();
            self.add_reports();
        }
        self.finish_pausing();
        if self.sensed.is_none_or(|at| at.elapsed() >= SENSE) {
            self.sensed = Some(Instant::now());
            self.sensors.publish(&registers);
        }
        self.publish();
    }

    fn publish(&self) {
        let registers = &self.parts.hardware.registers;
        let state = match (&self.ending, self.lease.holder()) {
            (Some(_), _) => LeaseState::Clearing,
            (None, Some(_)) => LeaseState::Held,
            (None, None) => LeaseState::Free,
        };
        registers.lease_epoch().store(self.lease.epoch().into(), Ordering::Relaxed);
        registers.lease_holder().store(self.lease.holder().unwrap_or(0), Ordering::Relaxed);
        let expires = self.lease.expires().map_or(0, nanos);
        registers.lease_expires_ns().store(expires, Ordering::Relaxed);
        registers.card_state().store(self.state as u32, Ordering::Relaxed);
        registers.lease_state().store(state as u32, Ordering::Release);
    }

    /// A command that was given up while nobody held the card still writes to its memory, which so is nothing for a
    /// holder; nor is one who has mapped it.
    fn leave_memory_of_lost_command(&self) {
        let hardware = &self.parts.hardware;
        if self.parts.shop.rings.is_lost_on(hardware.generation()) {
            hardware.replace_memory();
        }
    }

    fn grant(&mut self, node: u32, epoch: u32) {
        let hardware = &self.parts.hardware;
        let opened = match &self.parts.port {
            // There is no other memory.
            _ if self.parts.shop.rings.is_lost_on(hardware.generation()) => {
                Err(Fault::new(Cause::KernelStuck, 0))
            }
            Some(port) if node < crate::net::crowd::FIRST_LOCAL => {
                let refused = |error: io::Error| {
                    Fault::new(Cause::WindowRefused, error.raw_os_error().unwrap_or(0) as u64)
                };
                Windows::open(&port.device, hardware).map(Some).map_err(refused)
            }
            // Local nodes map BAR0 and memory.
            _ => Ok(None),
        };
        let registers = self.parts.hardware.registers.clone();
        registers.leases().fetch_add(1, Ordering::Relaxed);
        match opened {
            Ok(windows) => {
                let left = nanos(self.lease.duration().unwrap_or_default());
                let values = windows.as_ref().map_or([left, 0, 0, 0], |windows| windows.values(left));
                self.windows = windows;
                self.parts.crowd.set_holder(Some((node, epoch)));
                self.publish();
                self.parts.crowd.send(
                    node,
                    epoch,
                    News::of_card(MessageKind::LeaseGranted, epoch.into(), values),
                );
            }
            Err(fault) => {
                registers.lease_revoke().store(epoch.into(), Ordering::Release);
                registers.card_cause().store(fault.cause.code(), Ordering::Relaxed);
            }
        }
    }

    /// Keys first: from here on nothing of the former holder arrives any more.
    fn end(&mut self, node: u32, epoch: u32, cause: Option<Fault>) {
        self.windows = None;
        self.parts.crowd.set_holder(None);
        self.add_reports();
        for bank in 0..MAX_BANKS as usize {
            let registers = &self.parts.hardware.registers;
            self.reported[0][bank] += registers.report_written(bank).load(Ordering::Relaxed);
            self.reported[1][bank] += registers.report_read(bank).load(Ordering::Relaxed);
        }
        let registers = &self.parts.hardware.registers;
        self.reported_dma[0] += registers.report_dma_written().load(Ordering::Relaxed);
        self.reported_dma[1] += registers.report_dma_read().load(Ordering::Relaxed);
        for desk in &self.parts.shop.desks {
            desk.start_reset();
        }
        self.parts.shop.rings.close();
        self.parts.copies.start_reset();
        self.ending = Some(Ending { node, epoch, cause, since: Instant::now() });
    }

    /// Frees the card when nothing of the lease that has ended runs any more.
    fn finish_ending(&mut self) {
        let desks = &self.parts.shop.desks;
        let lost = |desk: &Desk| desk.phase() == Phase::Lost;
        let generation = self.parts.hardware.generation();
        let in_rings = self.parts.shop.rings.is_busy_on(generation);
        let counted = self.parts.shop.rings.is_lost_on(generation);
        let patient =
            !counted && self.ending.as_ref().is_some_and(|ending| ending.since.elapsed() < self.parts.grace);
        let quiet = desks.iter().all(|desk| desk.is_reset() || lost(desk))
            && self.parts.copies.is_reset()
            && !(in_rings && patient);
        if !quiet {
            return;
        }
        let registers = self.parts.hardware.registers.clone();
        let mut writers = self.regions.iter().zip(desks).filter(|(region, desk)| lost(desk) && !region.apart);
        let in_use = in_rings || writers.next().is_some();
        if in_use && !self.parts.hardware.replace_memory() {
            // Memory that a former holder's kernel still writes to is nobody's: the card stays as it is.
            registers.card_cause().store(Cause::KernelStuck.code(), Ordering::Relaxed);
            return;
        }
        if let Err(fault) = self.parts.hardware.clear() {
            // What a former holder has left there must not be seen.
            registers.card_cause().store(fault.cause.code(), Ordering::Relaxed);
            return;
        }
        for (region, desk) in self.regions.iter_mut().zip(desks) {
            region.apart = lost(desk);
        }
        if in_rings && !counted {
            registers.regions_lost().fetch_add(1, Ordering::Relaxed);
        }
        let Some(Ending { node, epoch, cause, .. }) = self.ending.take() else { return };
        for at in CONTROL_WINDOW.step_by(8) {
            registers.word64(at).store(0, Ordering::Relaxed);
        }
        for (index, desk) in self.parts.shop.desks.iter().enumerate() {
            desk.set_hold(false);
            registers.region(index).taken().store(0, Ordering::Relaxed);
            desk.go_on();
        }
        self.parts.shop.rings.open();
        futex::wake_all(registers.doorbell());
        self.parts.copies.go_on();
        (self.state, self.taken, self.pausing) = (CardState::Running, 0, None);
        registers.card_taken().store(0, Ordering::Relaxed);
        registers.card_cause().store(0, Ordering::Relaxed);
        registers.lease_end_cause().store(cause.map_or(0, |fault| fault.cause.code()), Ordering::Relaxed);
        let word = self.lease.cleared();
        self.publish();
        // Released last: who takes the card finds it clear.
        registers.lease_word().store(word, Ordering::SeqCst);
        let news = News::of_card(MessageKind::LeaseEnded, epoch.into(), [0; 4]);
        self.parts.crowd.send(node, epoch, News { cause: cause.map(|fault| fault.cause), ..news });
    }

    /// Interrupts kernels that are to stop or have run for too long, and gives up those that do not.
    fn attend_regions(&mut self, now: u64) {
        for index in 0..self.regions.len() {
            let desk = &self.parts.shop.desks[index];
            match desk.phase() {
                Phase::Lost => self.refuse_for(index),
                Phase::Back => {
                    desk.take_back();
                    self.regions[index] = Watched::default();
                }
                Phase::Idle => self.regions[index].since = None,
                Phase::Running => {
                    let region = self.parts.hardware.registers.region(index);
                    let deadline = desk.deadline_ns.load(Ordering::Relaxed);
                    let late = deadline != 0 && now > deadline;
                    let doorbell = region.doorbell().load(Ordering::Acquire);
                    let stop = doorbell & 0xff == RegionCommand::Stop as u64
                        && doorbell != region.taken().load(Ordering::Acquire);
                    if late || stop {
                        desk.want();
                    }
                    // At a safe point, held by a pause, it is where it should be.
                    if desk.is_held() || !(late || stop || desk.is_awaited()) {
                        self.regions[index].since = None;
                        continue;
                    }
                    let since = *self.regions[index].since.get_or_insert_with(Instant::now);
                    if since.elapsed() >= self.parts.grace && desk.give_up() {
                        self.regions[index].since = None;
                        self.give_up(index, since.elapsed());
                    }
                }
            }
        }
    }

    /// Says that a region is out of service.
    fn give_up(&self, index: usize, waited: Duration) {
        let registers = &self.parts.hardware.registers;
        let region = registers.region(index);
        let run = region.taken().load(Ordering::Acquire);
        region.cause().store(Cause::KernelStuck.code(), Ordering::Relaxed);
        region.detail().store(nanos(waited), Ordering::Relaxed);
        region.status().store(RegionState::Lost as u32, Ordering::Release);
        registers.regions_lost().fetch_add(1, Ordering::Relaxed);
        self.tell_stuck(index, run);
        self.refuse_for(index);
    }

    /// Answers what is rung at a region that cannot answer.
    fn refuse_for(&self, index: usize) {
        let region = self.parts.hardware.registers.region(index);
        let doorbell = region.doorbell().load(Ordering::Acquire);
        if doorbell == 0 || doorbell == region.taken().load(Ordering::Acquire) {
            return;
        }
        region.taken().store(doorbell, Ordering::Release);
        if doorbell & 0xff != RegionCommand::Stop as u64 {
            self.tell_stuck(index, doorbell);
        }
    }

    /// Tells that a region that is out of service does not do what was rung for.
    fn tell_stuck(&self, index: usize, sequence: u64) {
        let detail = self.parts.hardware.registers.region(index).detail().load(Ordering::Relaxed);
        self.parts.crowd.tell(News {
            kind: MessageKind::RegionFault,
            region: index as u32,
            cause: Some(Cause::KernelStuck),
            sequence,
            values: [detail, 0, 0, 0],
        });
    }

    /// Carries out a command for the card as a whole.
    fn obey(&mut self) {
        let registers = self.parts.hardware.registers.clone();
        let command = registers.card_command().load(Ordering::Acquire);
        if command == self.taken || self.pausing == Some(command) {
            return;
        }
        match CardCommand::from_code(command as u32 & 0xff) {
            Some(CardCommand::Pause) => {
                self.state = CardState::Pausing;
                self.pausing = Some(command);
                self.parts.shop.desks.iter().for_each(|desk| desk.set_hold(true));
            }
            Some(CardCommand::Resume) => {
                self.parts.shop.desks.iter().for_each(|desk| desk.set_hold(false));
                self.state = CardState::Running;
                self.settle(command, None);
            }
            Some(CardCommand::Clear) => {
                let cleared = self.parts.hardware.clear();
                self.settle(command, cleared.err());
            }
            None => self.settle(command, Some(Fault::new(Cause::UnknownCommand, command))),
        }
    }

    fn settle(&mut self, command: u64, fault: Option<Fault>) {
        let registers = &self.parts.hardware.registers;
        self.taken = command;
        self.pausing = None;
        registers.card_cause().store(fault.map_or(0, |fault| fault.cause.code()), Ordering::Relaxed);
        registers.card_state().store(self.state as u32, Ordering::Relaxed);
        registers.card_taken().store(command, Ordering::Release);
        if let Some(fault) = fault {
            let news = News::of_card(MessageKind::CardFault, command, [fault.detail, 0, 0, 0]);
            self.parts.crowd.tell(News { cause: Some(fault.cause), ..news });
        }
    }

    fn finish_pausing(&mut self) {
        let Some(command) = self.pausing else { return };
        if self.parts.shop.desks.iter().any(|desk| desk.phase() == Phase::Lost) {
            // There is no safe point to be had.
            self.parts.shop.desks.iter().for_each(|desk| desk.set_hold(false));
            self.state = CardState::Running;
            return self.settle(command, Some(Fault::new(Cause::KernelStuck, 0)));
        }
        if !self.parts.shop.desks.iter().all(|desk| desk.is_held()) {
            return;
        }
        let bytes = self.parts.hardware.show_written();
        self.state = CardState::Paused;
        self.settle(command, None);
        self.parts.crowd.tell(News::of_card(MessageKind::CardPaused, command, [bytes, 0, 0, 0]));
    }

    /// Adds what the holder reports to what its predecessors did.
    fn add_reports(&self) {
        let registers = &self.parts.hardware.registers;
        let banks = registers.bank_count().load(Ordering::Relaxed).min(MAX_BANKS) as usize;
        for bank in 0..banks {
            let written = registers.report_written(bank).load(Ordering::Relaxed);
            let read = registers.report_read(bank).load(Ordering::Relaxed);
            let before = (self.reported[0][bank], self.reported[1][bank]);
            registers.window_written(bank).store(before.0.wrapping_add(written), Ordering::Relaxed);
            registers.window_read(bank).store(before.1.wrapping_add(read), Ordering::Relaxed);
        }
        let [written, read] = self.reported_dma;
        for (shown, reported, before) in [
            (registers.dma_window_written(), registers.report_dma_written(), written),
            (registers.dma_window_read(), registers.report_dma_read(), read),
        ] {
            shown.store(before.wrapping_add(reported.load(Ordering::Relaxed)), Ordering::Relaxed);
        }
    }
}

impl Windows {
    fn open(device: &millstream_rdma::Device, hardware: &Hardware) -> io::Result<Windows> {
        let refused = |error: millstream_rdma::memory::MemoryError| match error {
            millstream_rdma::memory::MemoryError::Register { cause, .. } => cause,
            other => io::Error::other(other),
        };
        let rights = Access::REMOTE | Access::REMOTE_ATOMIC;
        let (start, len) = (CONTROL_WINDOW.start as u64, CONTROL_WINDOW.len());
        let control = hardware.bar0.register_part(device, start, len, Access::REMOTE).map_err(refused)?;
        let dma = hardware.dma.backing().register(device, rights).map_err(refused)?;
        let memory = hardware.memory().backing().register(device, rights).map_err(refused)?;
        Ok(Windows { control, dma, memory })
    }

    /// As they travel in the message to the new holder.
    fn values(&self, left: u64) -> [u64; 4] {
        let keys = u64::from(self.control.rkey().get()) | u64::from(self.dma.rkey().get()) << 32;
        [left, keys, self.memory.rkey().get().into(), self.memory.remote().addr]
    }
}

const _: () = assert!(MAX_REGIONS as u32 <= IMM_COPIES);
