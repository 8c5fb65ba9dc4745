//! A region at the end of a lease: what was rung in the one is not done in the next. And one that comes back: what is
//! rung then is done.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::*;
use crate::backing::{Kind, Roots};
use crate::hardware::Make;
use crate::region::builtin::BUILTINS;

const PATIENCE: Duration = Duration::from_secs(20);

/// Keeps what a region has to tell.
#[derive(Default)]
struct Heard(Mutex<Vec<(MessageKind, u64)>>);

impl Outlet for Heard {
    fn tell(&self, news: News) {
        self.0.lock().unwrap().push((news.kind, news.sequence));
    }
}

fn shop() -> Arc<Shop> {
    let make = Make {
        kind: &Kind::Emulated,
        roots: &Roots::default(),
        bank_bytes: 1 << 20,
        bank_count: 1,
        dma_bytes: 4096,
        prefault: false,
        huge_pages: false,
    };
    let hardware = Arc::new(Hardware::new(&make).unwrap());
    Arc::new(Shop {
        registers: hardware.registers.clone(),
        hardware,
        bank_bytes: 1 << 20,
        bank_count: 1,
        builtins: vec![(1, BUILTINS[0])],
        loaders: Vec::new(),
        stop: Arc::default(),
        desks: vec![Desk::default()],
        rings: RingDesk::default(),
        command_limit: PATIENCE,
        spin: Duration::ZERO,
        heartbeat: Duration::from_millis(100),
        wake: Arc::new(EventFd::latch().unwrap()),
    })
}

/// A load of the first kernel, with this number.
fn load(shop: &Shop, number: u64) -> u64 {
    let word = number << 8 | RegionCommand::Load as u64;
    let region = shop.registers.region(0);
    region.kernel().store(1, Ordering::Relaxed);
    region.doorbell().store(word, Ordering::Release);
    shop.desks[0].nudge();
    word
}

/// Ends a lease as the warden does.
fn end_lease(shop: &Shop) {
    shop.desks[0].start_reset();
    let until = Instant::now() + PATIENCE;
    while !shop.desks[0].is_reset() {
        assert!(Instant::now() < until, "the region does not end its work");
        std::hint::spin_loop();
    }
    let region = shop.registers.region(0);
    region.kernel().store(0, Ordering::Relaxed);
    region.doorbell().store(0, Ordering::Relaxed);
    region.taken().store(0, Ordering::Relaxed);
    shop.desks[0].go_on();
}

#[test]
fn a_doorbell_that_was_seen_before_a_lease_ended_is_not_obeyed_after_it() {
    let (shop, heard) = (shop(), Arc::new(Heard::default()));
    let mut worker = Worker::new(0, shop.clone(), heard.clone());
    let rung = load(&shop, 7);
    // Here the region has read the doorbell; nothing was begun, so that nobody waits for it.
    end_lease(&shop);
    worker.take_up(rung);
    assert!(heard.0.lock().unwrap().is_empty());
    assert!(worker.loaded.is_none());
    assert_eq!(shop.registers.region(0).taken().load(Ordering::Relaxed), 0);
}

#[test]
fn leases_end_while_regions_are_rung_and_every_doorbell_is_of_one_lease() {
    let (shop, heard) = (shop(), Arc::new(Heard::default()));
    let mut worker = Worker::new(0, shop.clone(), heard.clone());
    let serving = std::thread::spawn(move || worker.serve());
    let region = shop.registers.region(0);
    for lease in 0..3000u32 {
        // Every lease counts from the start, as nodes do.
        let word = load(&shop, 1);
        if lease % 3 == 0 {
            let until = Instant::now() + PATIENCE;
            while heard.0.lock().unwrap().is_empty() {
                assert!(Instant::now() < until, "lease {lease}: the doorbell is not obeyed");
                std::hint::spin_loop();
            }
            let told = heard.0.lock().unwrap().clone();
            assert!(
                matches!(told[..], [(MessageKind::RegionLoaded, sequence)] if sequence == word),
                "{told:?}"
            );
            assert_eq!(region.taken().load(Ordering::Relaxed), word);
            assert_eq!(region.loaded_kernel().load(Ordering::Relaxed), 1);
        } else {
            (0..lease % 400).for_each(|_| std::hint::spin_loop());
        }
        end_lease(&shop);
        heard.0.lock().unwrap().clear();
        (0..lease % 200).for_each(|_| std::hint::spin_loop());
        assert_eq!(region.loaded_kernel().load(Ordering::Relaxed), 0, "lease {lease}");
        assert!(heard.0.lock().unwrap().is_empty(), "lease {lease}");
    }
    shop.stop.store(true, Ordering::SeqCst);
    shop.desks[0].nudge();
    serving.join().unwrap();
}

#[test]
fn what_is_rung_while_a_lost_region_comes_back_is_answered() {
    for answered in [false, true] {
        let (shop, heard) = (shop(), Arc::new(Heard::default()));
        let desk = &shop.desks[0];
        let region = shop.registers.region(0);
        // Its kernel was given up; the card refused what was rung meanwhile, and then the kernel has ended.
        desk.phase.store(Phase::Lost as u32, Ordering::SeqCst);
        let refused = load(&shop, 1);
        region.taken().store(refused, Ordering::SeqCst);
        assert!(desk.turn(Phase::Lost, Phase::Back));
        let mut worker = Worker::new(0, shop.clone(), heard.clone());
        worker.taken = refused;
        // At this moment somebody rings, or not.
        let rung = if answered { refused } else { load(&shop, 2) };
        assert!(desk.take_back());
        let serving = std::thread::spawn(move || worker.serve());
        let until = Instant::now() + PATIENCE;
        let told = |heard: &Heard| heard.0.lock().unwrap().clone();
        while !desk.is_reset() || !answered && told(&heard).is_empty() {
            assert!(Instant::now() < until, "the doorbell is swallowed");
            std::thread::yield_now();
        }
        shop.stop.store(true, Ordering::SeqCst);
        desk.nudge();
        serving.join().unwrap();
        match answered {
            // What was refused is not done after all.
            true => assert_eq!(told(&heard), []),
            false => assert_eq!(told(&heard), [(MessageKind::RegionLoaded, rung)]),
        }
        assert_eq!(region.taken().load(Ordering::Relaxed), rung);
        assert_eq!(region.loaded_kernel().load(Ordering::Relaxed), u64::from(!answered));
    }
}
