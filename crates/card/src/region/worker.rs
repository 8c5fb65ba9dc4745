//! The inside of a region: a thread that takes up doorbells, loads and runs the kernel, and says what came
//! of it.
//!
//! Like the engine of the rings, a region keeps the truth privately, copies what nodes write before it looks
//! at it, and publishes. A run can be ended or held only at the kernel's safe points.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use millstream_shm::{EventFd, futex};

use crate::command::{Cause, Fault, nanos};
use crate::engine::desk::RingDesk;
use crate::hardware::Hardware;
use crate::kernel::{Pulse, outside};
use crate::memory::Span;
use crate::region::codes::{MessageKind, RegionCommand, RegionState};
use crate::region::desk::{Desk, Gate, Phase};
use crate::region::kernel::{Banks, Builtin, Control, LoadedKernel, Loader, RegionKernel, Run, Words};
use crate::registers::{REGION_CONTROL, REGION_STRIDE, Region, Registers, WORDS, region_at};

/// Largest image of a kernel [bytes].
pub const MAX_IMAGE_BYTES: u64 = 16 << 20;

/// How a message about a region finds its way out.
pub(crate) trait Outlet: Send + Sync {
    /// Tells the holder of the lease; must not block.
    fn tell(&self, news: News);
}

/// What a region has to tell.
#[derive(Clone, Copy, Debug)]
pub(crate) struct News {
    pub(crate) kind: MessageKind,
    pub(crate) region: u32,
    pub(crate) cause: Option<Cause>,
    pub(crate) sequence: u64,
    pub(crate) values: [u64; 4],
}

/// What all regions of a card share.
pub(crate) struct Shop {
    pub(crate) registers: Arc<Registers>,
    pub(crate) hardware: Arc<Hardware>,
    pub(crate) bank_bytes: u64,
    pub(crate) bank_count: u32,
    /// Kernels by their numbers in the directory.
    pub(crate) builtins: Vec<(u32, Builtin)>,
    pub(crate) loaders: Vec<Arc<dyn Loader>>,
    pub(crate) stop: Arc<AtomicBool>,
    /// What the card wants of each region.
    pub(crate) desks: Vec<Desk>,
    /// What it wants of the rings.
    pub(crate) rings: RingDesk,
    /// Longest time of one of their commands, unless their user says another.
    pub(crate) command_limit: Duration,
    pub(crate) spin: Duration,
    pub(crate) heartbeat: Duration,
    /// Wakes the warden.
    pub(crate) wake: Arc<EventFd>,
}

impl Shop {
    /// Whether a region has this kernel loaded.
    pub(crate) fn has_loaded(&self, kernel: u32) -> bool {
        self.desks.iter().any(|desk| desk.loaded.load(Ordering::Relaxed) == u64::from(kernel))
    }
}

impl std::fmt::Debug for Shop {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Shop({} regions)", self.desks.len())
    }
}

/// One region.
pub(crate) struct Worker {
    index: usize,
    shop: Arc<Shop>,
    outlet: Arc<dyn Outlet>,
    loaded: Option<Box<dyn RegionKernel>>,
    /// The gate as it was when the doorbell was last looked at.
    gate: Gate,
    taken: u64,
    runs: u64,
    failed: u64,
    busy_ns: u64,
}

impl Worker {
    pub(crate) fn new(index: usize, shop: Arc<Shop>, outlet: Arc<dyn Outlet>) -> Worker {
        Worker {
            index,
            shop,
            outlet,
            loaded: None,
            gate: Gate::default(),
            taken: 0,
            runs: 0,
            failed: 0,
            busy_ns: 0,
        }
    }

    fn desk(&self) -> &Desk {
        &self.shop.desks[self.index]
    }

    fn shown(&self) -> Region<'_> {
        self.shop.registers.region(self.index)
    }

    /// Serves the region until the card stops.
    pub(crate) fn serve(&mut self) {
        let shop = self.shop.clone();
        let desk = &shop.desks[self.index];
        let region = shop.registers.region(self.index);
        let doorbell = region.doorbell();
        let mut latest_work = Instant::now();
        let mut rounds = 0u32;
        while !shop.stop.load(Ordering::Relaxed) {
            let seen = desk.attention.load(Ordering::SeqCst);
            if desk.phase() == Phase::Back {
                let _ = futex::wait(&desk.attention, seen, shop.heartbeat);
                continue;
            }
            if desk.reset.load(Ordering::SeqCst) {
                self.reset();
            }
            let gate = desk.gate();
            if gate.is_closed() {
                let _ = futex::wait(&desk.attention, seen, shop.heartbeat);
                continue;
            }
            if gate != self.gate {
                // The doorbell is a new lease's, whose numbers may be those of the one before.
                (self.gate, self.taken) = (gate, 0);
            }
            // What was rung before the card is held, is begun before: a run then stands at its first safe point.
            let late = desk.held.load(Ordering::SeqCst) || doorbell.load(Ordering::Acquire) == self.taken;
            if desk.hold.load(Ordering::SeqCst) && late {
                if !desk.held.swap(true, Ordering::SeqCst) {
                    shop.wake.signal();
                }
                let seen = desk.attention.load(Ordering::SeqCst);
                if desk.hold.load(Ordering::SeqCst) && !desk.reset.load(Ordering::SeqCst) {
                    let _ = futex::wait(&desk.attention, seen, shop.heartbeat);
                }
                continue;
            }
            desk.held.store(false, Ordering::SeqCst);
            let rung = doorbell.load(Ordering::Acquire);
            if rung != self.taken {
                // A word of zero is what a cleared region has.
                if rung == 0 {
                    self.taken = 0;
                    continue;
                }
                self.take_up(rung);
                latest_work = Instant::now();
                continue;
            }
            // A region without a kernel has nothing to be quick about.
            if self.loaded.is_some() {
                rounds = rounds.wrapping_add(1);
                if !rounds.is_multiple_of(64) || latest_work.elapsed() < shop.spin {
                    std::hint::spin_loop();
                    continue;
                }
            }
            self.sleep();
        }
    }

    fn sleep(&mut self) {
        let desk = self.desk();
        let shown = self.shown();
        let sleeping = shown.region_sleeping();
        let seen = desk.attention.load(Ordering::SeqCst);
        sleeping.store(1, Ordering::SeqCst);
        // Who rings looks at `region_sleeping` afterwards; we do it the other way round.
        let quiet = self.shown().doorbell().load(Ordering::SeqCst) == self.taken
            && !desk.hold.load(Ordering::SeqCst)
            && !desk.reset.load(Ordering::SeqCst)
            && desk.gate() == self.gate
            && !self.shop.stop.load(Ordering::SeqCst);
        if quiet {
            let _ = futex::wait(&desk.attention, seen, self.shop.heartbeat);
        }
        sleeping.store(0, Ordering::Relaxed);
    }

    /// Carries out what was rung, unless the lease in which it was rung has ended.
    pub(super) fn take_up(&mut self, rung: u64) {
        if self.desk().begin(self.gate) {
            self.obey(rung);
        }
    }

    fn reset(&mut self) {
        self.loaded = None;
        let gate = self.desk().gate();
        let taken = if gate.is_closed() {
            // What was rung last is not to be obeyed any more; both registers are zeroed as soon as all regions are
            // quiet.
            self.shown().doorbell().load(Ordering::Acquire)
        } else {
            self.gate = gate;
            // The card has refused for the region up to here; what was rung since is for it to answer.
            self.shown().taken().load(Ordering::Acquire)
        };
        self.taken = taken;
        let shown = self.shown();
        let set = Ordering::Relaxed;
        for index in 0..WORDS {
            shown.results(index).store(0, set);
            shown.state(index).store(0, set);
        }
        for index in 0..4 {
            shown.name(index).store(0, set);
        }
        shown.loaded_kernel().store(0, set);
        shown.loaded_hash().store(0, set);
        shown.cause().store(0, set);
        shown.detail().store(0, set);
        shown.progress().store(0, set);
        shown.taken().store(taken, set);
        shown.status().store(RegionState::Empty as u32, Ordering::Release);
        let desk = self.desk();
        desk.loaded.store(0, set);
        desk.deadline_ns.store(0, set);
        desk.finish_reset();
        self.shop.wake.signal();
    }

    fn obey(&mut self, rung: u64) {
        self.taken = rung;
        match RegionCommand::from_code(rung as u32 & 0xff) {
            Some(RegionCommand::Load) => {
                let loaded = self.load();
                match loaded {
                    Ok(hash) => {
                        self.settle(rung, RegionState::Ready, None);
                        self.tell(MessageKind::RegionLoaded, rung, None, [hash, 0, 0, 0]);
                    }
                    Err(fault) => self.refuse(rung, fault),
                }
            }
            Some(RegionCommand::Start) => self.run(rung, false),
            Some(RegionCommand::Continue) => self.run(rung, true),
            // Nothing runs, or this would have been seen at a safe point.
            Some(RegionCommand::Stop) => {
                let state = if self.loaded.is_some() { RegionState::Ready } else { RegionState::Empty };
                self.settle(rung, state, None);
            }
            Some(RegionCommand::Unload) => {
                self.loaded = None;
                self.show_kernel(0, 0, "");
                self.settle(rung, RegionState::Empty, None);
            }
            None => self.refuse(rung, Fault::new(Cause::UnknownCommand, rung)),
        }
    }

    /// Loads what the control registers name and returns its hash.
    fn load(&mut self) -> Result<u64, Fault> {
        let shop = self.shop.clone();
        let control = shop.registers.region(self.index);
        let get = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let (number, base, bytes) =
            (get(control.kernel()), get(control.image_base()), get(control.image_bytes()));
        let wanted = get(control.image_hash());
        // Whatever was loaded goes, whether the new one is any good or not: a region never runs what nobody
        // asked for.
        self.loaded = None;
        self.show_kernel(0, 0, "");
        let (LoadedKernel { name, kernel }, hash) = if number == 0 {
            let span = Span::new(base, bytes);
            if bytes > MAX_IMAGE_BYTES {
                return Err(Fault::new(Cause::KernelTooLarge, bytes));
            }
            let memory = shop.hardware.memory();
            memory.check(span).map_err(outside(Cause::ImageOutsideMemory))?;
            let mut image = vec![0; bytes as usize];
            memory.read(base, &mut image).map_err(outside(Cause::ImageOutsideMemory))?;
            let hash = image_hash(&image);
            if wanted != 0 && wanted != hash {
                return Err(Fault::new(Cause::KernelHash, hash));
            }
            let first = image.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
            let loader = shop.loaders.iter().find(|loader| loader.recognises(&image));
            let loader = loader.ok_or(Fault::new(Cause::KernelFormat, first))?;
            let made = catch_unwind(AssertUnwindSafe(|| loader.load(&image)));
            (made.unwrap_or(Err(Fault::new(Cause::KernelFormat, first)))?, hash)
        } else {
            let unknown = Fault::new(Cause::UnknownKernel, number);
            let builtin = shop.builtins.iter().find(|(known, _)| u64::from(*known) == number);
            let (_, builtin) = builtin.ok_or(unknown)?;
            let hash = image_hash(builtin.name.as_bytes());
            if wanted != 0 && wanted != hash {
                return Err(Fault::new(Cause::KernelHash, hash));
            }
            (LoadedKernel { name: builtin.name.to_owned(), kernel: (builtin.make)() }, hash)
        };
        self.loaded = Some(kernel);
        self.show_kernel(number, hash, &name);
        Ok(hash)
    }

    fn show_kernel(&self, number: u64, hash: u64, name: &str) {
        let shown = self.shown();
        let mut text = [0; 32];
        let cut = name.len().min(text.len());
        text[..cut].copy_from_slice(&name.as_bytes()[..cut]);
        for (index, bytes) in text.as_chunks::<8>().0.iter().enumerate() {
            shown.name(index).store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
        }
        shown.loaded_kernel().store(number, Ordering::Relaxed);
        shown.loaded_hash().store(hash, Ordering::Relaxed);
        self.desk().loaded.store(number, Ordering::Relaxed);
    }

    fn run(&mut self, rung: u64, resuming: bool) {
        let Some(mut kernel) = self.loaded.take() else {
            return self.refuse(rung, Fault::new(Cause::RegionEmpty, 0));
        };
        let shop = self.shop.clone();
        let control = shop.registers.region(self.index);
        let get = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let banks = get(control.banks());
        if shop.bank_count < 64 && banks >> shop.bank_count != 0 {
            self.loaded = Some(kernel);
            return self.refuse(rung, Fault::new(Cause::NoSuchBank, banks));
        }
        let arguments: Words = std::array::from_fn(|index| get(control.arguments(index)));
        let resume: Words = std::array::from_fn(|index| get(control.resume(index)));
        let fuel = Some(get(control.fuel())).filter(|fuel| *fuel != 0);
        let limit = Some(get(control.deadline_ns())).filter(|limit| *limit != 0);
        let attendant = Attendant { shop: &shop, index: self.index, rung };
        // A run keeps the memory that it began with, even if the card goes on with another.
        let memory = shop.hardware.memory();
        let granted = Banks::new(&memory, shop.bank_bytes, banks);
        let started = Instant::now();
        let deadline = limit.and_then(|limit| started.checked_add(Duration::from_nanos(limit)));
        let mut run = Run::new(granted, arguments, &attendant).bounded(fuel, deadline);
        if resuming {
            run = run.resuming(resume);
        }
        let desk = &shop.desks[self.index];
        if let Some(limit) = limit {
            let now = shop.registers.clock_ns().load(Ordering::Relaxed);
            desk.deadline_ns.store(now.saturating_add(limit).max(1), Ordering::Relaxed);
        }
        control.cause().store(0, Ordering::Relaxed);
        control.detail().store(0, Ordering::Relaxed);
        control.progress().store(0, Ordering::Relaxed);
        control.status().store(RegionState::Running as u32, Ordering::Relaxed);
        control.taken().store(rung, Ordering::Release);
        desk.phase.store(Phase::Running as u32, Ordering::SeqCst);
        let outcome = catch_unwind(AssertUnwindSafe(|| kernel.run(&mut run)));
        memory.backing().flush();
        if !desk.turn(Phase::Running, Phase::Idle) {
            // Nobody waits for it any more; what it has left behind is nobody's.
            self.runs += 1;
            self.failed += 1;
            desk.turn(Phase::Lost, Phase::Back);
            shop.wake.signal();
            return;
        }
        let outcome = outcome.unwrap_or(Err(Fault::new(Cause::KernelFailed, get(control.loaded_kernel()))));
        // A deadline is told with what it was.
        let outcome = outcome.map_err(|fault| match fault.cause {
            Cause::DeadlineExceeded => Fault::new(fault.cause, limit.unwrap_or(0)),
            _ => fault,
        });
        self.loaded = Some(kernel);
        desk.deadline_ns.store(0, Ordering::Relaxed);
        if !desk.hold.load(Ordering::SeqCst) && !desk.reset.load(Ordering::SeqCst) {
            desk.wanted.store(false, Ordering::SeqCst);
        }
        for (index, value) in run.results().iter().enumerate() {
            control.results(index).store(*value, Ordering::Relaxed);
        }
        self.account(started.elapsed(), outcome.is_err(), &run);
        match outcome {
            Ok(()) => {
                let results = run.results();
                let values = [results[0], results[1], results[2], results[3]];
                self.settle(rung, RegionState::Done, None);
                self.tell(MessageKind::RegionDone, rung, None, values);
            }
            Err(fault) => {
                // A stop is carried out by now.
                let latest = control.doorbell().load(Ordering::Acquire);
                if is_stop(latest) {
                    self.taken = latest;
                }
                let stopped = fault.cause == Cause::Interrupted;
                let state = if stopped { RegionState::Ready } else { RegionState::Faulted };
                let answered = self.taken;
                self.settle(answered, state, Some(fault));
                self.tell(MessageKind::RegionFault, rung, Some(fault.cause), [fault.detail, 0, 0, 0]);
            }
        }
    }

    fn account(&mut self, busy: Duration, failed: bool, run: &Run<'_>) {
        self.runs += 1;
        self.failed += u64::from(failed);
        self.busy_ns = self.busy_ns.saturating_add(nanos(busy));
        let shown = self.shown();
        shown.runs().store(self.runs, Ordering::Relaxed);
        shown.failed_runs().store(self.failed, Ordering::Relaxed);
        shown.busy_ns().store(self.busy_ns, Ordering::Relaxed);
        shown.fuel_used().store(run.fuel_used(), Ordering::Relaxed);
        let (read, written) = run.traffic();
        let mask = run.banks().mask();
        let banks = u64::from(mask.count_ones());
        if banks == 0 || read | written == 0 {
            return;
        }
        for bank in (0..64).filter(|bank| mask >> bank & 1 == 1) {
            self.shop.registers.bank_read(bank).fetch_add(read / banks, Ordering::Relaxed);
            self.shop.registers.bank_written(bank).fetch_add(written / banks, Ordering::Relaxed);
        }
    }

    fn refuse(&mut self, rung: u64, fault: Fault) {
        self.settle(rung, RegionState::Faulted, Some(fault));
        self.tell(MessageKind::RegionFault, rung, Some(fault.cause), [fault.detail, 0, 0, 0]);
    }

    /// Publishes the end of a command.
    fn settle(&self, rung: u64, state: RegionState, fault: Option<Fault>) {
        let shown = self.shown();
        shown.cause().store(fault.map_or(0, |fault| fault.cause.code()), Ordering::Relaxed);
        shown.detail().store(fault.map_or(0, |fault| fault.detail), Ordering::Relaxed);
        shown.status().store(state as u32, Ordering::Release);
        shown.taken().store(rung, Ordering::Release);
    }

    fn tell(&self, kind: MessageKind, sequence: u64, cause: Option<Cause>, values: [u64; 4]) {
        self.outlet.tell(News { kind, region: self.index as u32, cause, sequence, values });
    }
}

/// First 8 bytes of the SHA-256 of an image.
pub fn image_hash(image: &[u8]) -> u64 {
    use sha2::Digest as _;
    let digest = sha2::Sha256::digest(image);
    u64::from_le_bytes(digest[..8].try_into().expect("a SHA-256 has 32 bytes"))
}

fn is_stop(doorbell: u64) -> bool {
    doorbell & 0xff == RegionCommand::Stop as u64
}

/// The region as its kernel's run sees it.
struct Attendant<'a> {
    shop: &'a Shop,
    index: usize,
    rung: u64,
}

impl Control for Attendant<'_> {
    fn safe_point(&self, state: &Words) -> Result<(), Fault> {
        let shown = self.shop.registers.region(self.index);
        let desk = &self.shop.desks[self.index];
        if desk.phase() == Phase::Lost {
            return Err(Fault::new(Cause::Interrupted, 0));
        }
        for (index, word) in state.iter().enumerate() {
            shown.state(index).store(*word, Ordering::Relaxed);
        }
        // Only this region writes it.
        let points = shown.safe_points().load(Ordering::Relaxed);
        shown.safe_points().store(points.wrapping_add(1), Ordering::Release);
        Pulse { heartbeat: self.shop.registers.heartbeat(), stop: &self.shop.stop }.beat();
        loop {
            let doorbell = shown.doorbell().load(Ordering::Acquire);
            let stopped = doorbell != self.rung && is_stop(doorbell);
            if stopped || desk.reset.load(Ordering::SeqCst) || self.shop.stop.load(Ordering::Relaxed) {
                return Err(Fault::new(Cause::Interrupted, 0));
            }
            if !desk.hold.load(Ordering::SeqCst) {
                if desk.held.swap(false, Ordering::SeqCst) {
                    shown.status().store(RegionState::Running as u32, Ordering::Release);
                }
                return Ok(());
            }
            shown.status().store(RegionState::Parked as u32, Ordering::Release);
            if !desk.held.swap(true, Ordering::SeqCst) {
                self.shop.wake.signal();
            }
            let seen = desk.attention.load(Ordering::SeqCst);
            if desk.hold.load(Ordering::SeqCst) && !desk.reset.load(Ordering::SeqCst) {
                let _ = futex::wait(&desk.attention, seen, self.shop.heartbeat);
            }
        }
    }

    fn wanted(&self) -> &AtomicBool {
        &self.shop.desks[self.index].wanted
    }

    fn progress(&self) -> &AtomicU64 {
        self.shop.registers.word64(REGION_CONTROL + self.index * REGION_STRIDE + region_at::progress)
    }
}

#[cfg(test)]
mod tests;
