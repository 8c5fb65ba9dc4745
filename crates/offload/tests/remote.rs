//! Jobs on leased cards in separate processes.

use std::io::Write as _;
use std::num::NonZeroU64;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use millstream_card_server::{CardConfig, Lifetime, NetworkConfig, serve_with};
use millstream_offload::card::StencilCard as _;
use millstream_offload::grid::{Grid, Shape};
use millstream_offload::leased::{CardAddress, LeaseTerms, LeasedCards};
use millstream_offload::plan::Plan;
use millstream_offload::recovery::{self, CardGroup as _, JobOptions};
use millstream_offload::timeline::JobReport;
use millstream_offload::{OffloadError, job};
use millstream_rdma::{Device, DeviceSelector, device};

const TIMEOUT: Duration = Duration::from_secs(20);
const BANK: u64 = 8 << 20;

/// Environment variable that makes a test binary serve a card: the file for its address.
const SERVE_CARD: &str = "MILLSTREAM_TEST_OFFLOAD_CARD";

fn device() -> Device {
    device::open(&DeviceSelector::from_environment())
        .unwrap_or_else(|error| panic!("run `make lib` first: {error}"))
}

/// Not a test: serves a card if this process was started for that.
#[test]
fn serve_card() {
    let Ok(file) = std::env::var(SERVE_CARD) else { return };
    let name = format!("offload-{}", std::process::id()).parse().unwrap();
    let mut config = CardConfig::new(name, BANK);
    config.bank_count = 2;
    config.network = Some(NetworkConfig { device: device(), address: "127.0.0.1:0".to_owned() });
    let stdin = std::os::fd::AsFd::as_fd(&std::io::stdin()).try_clone_to_owned().unwrap();
    config.lifetime = Lifetime::Launcher(stdin);
    serve_with(config, |address| {
        let partial = format!("{file}.partial");
        let mut out = std::fs::File::create(&partial).unwrap();
        out.write_all(address.unwrap().to_string().as_bytes()).unwrap();
        std::fs::rename(partial, &file).unwrap();
    })
    .expect("card");
    std::process::exit(0);
}

/// A card process; dropping this value kills it.
struct Card {
    process: Child,
    address: String,
}

impl Card {
    fn start() -> Card {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("address");
        let process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "serve_card"])
            .env(SERVE_CARD, &file)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let until = Instant::now() + TIMEOUT;
        while !file.exists() {
            assert!(Instant::now() < until, "card does not come up");
            std::thread::sleep(Duration::from_millis(2));
        }
        Card { process, address: std::fs::read_to_string(&file).unwrap() }
    }
}

impl Drop for Card {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn cards(count: usize) -> (Vec<Card>, Vec<String>) {
    let cards: Vec<_> = (0..count).map(|_| Card::start()).collect();
    let addresses = cards.iter().map(|card| card.address.clone()).collect();
    (cards, addresses)
}

const TERMS: LeaseTerms =
    LeaseTerms { duration: Duration::from_secs(2), acquire_timeout: Duration::from_millis(300) };

fn card_addresses(addresses: &[String]) -> Vec<CardAddress> {
    addresses.iter().map(|address| CardAddress::from(address.as_str())).collect()
}

fn row(device: &Device, addresses: &[String]) -> Result<LeasedCards, OffloadError> {
    LeasedCards::acquire(device, &card_addresses(addresses), &[], TERMS)
}

#[test]
fn the_result_is_the_reference_and_the_leases_are_released() {
    let device = device();
    let (_processes, addresses) = cards(3);
    for (double, iterations) in [(false, 100), (true, 7)] {
        let mut row = self::row(&device, &addresses).unwrap();
        let shape = Shape { rows: 1500, columns: 200, double };
        let mut grid = Grid::zeros(shape, Some(&device)).unwrap();
        grid.generate(3);
        let reference = grid.reference(iterations);
        let memories: Vec<_> = row.cards().iter().map(|card| card.memory_bytes()).collect();
        let plan = Plan::new(shape, iterations, &memories, None).unwrap();
        let never = AtomicBool::new(false);
        let report = job::run(&plan, &mut grid, None, row.cards_mut(), &|_| {}, &never).unwrap();
        grid.compare(&reference).unwrap();
        assert_eq!((report.cards, report.bytes[2]), (addresses.clone(), shape.bytes()));
        assert!(iterations < 17 || report.bytes[1] > 0);
        // Another client cannot lease them meanwhile.
        let refused = self::row(&device, &addresses[..1]).unwrap_err().to_string();
        assert!(refused.contains(&addresses[0]) && refused.contains("is leased to client"), "{refused}");
        row.release().unwrap();
    }
}

/// Runs a job on three cards; `when` may kill cards. Returns the report and the result.
fn with_losses(
    spares: usize,
    options: JobOptions,
    shape: Shape,
    when: impl Fn(u64, &mut Vec<Card>) + Send + Sync,
) -> Result<(JobReport, Grid), OffloadError> {
    let device = device();
    let (processes, addresses) = cards(3 + spares);
    let processes = Mutex::new(processes);
    let (first, spares) = (card_addresses(&addresses[..3]), card_addresses(&addresses[3..]));
    let mut row = LeasedCards::acquire(&device, &first, &spares, TERMS)?;
    let [mut grid, mut spare] = [(), ()].map(|()| Grid::zeros(shape, Some(&device)).unwrap());
    grid.generate(5);
    let progress = |sweeps| when(sweeps, &mut processes.lock().unwrap());
    let report =
        recovery::run(&mut row, &mut grid, &mut spare, &options, &progress, &AtomicBool::new(false))?;
    spare.generate(5);
    grid.compare(&spare.reference(options.iterations))?;
    assert_eq!(report.iterations, options.iterations);
    row.release()?;
    Ok((report, grid))
}

#[test]
fn the_other_cards_recompute_the_tiles_of_killed_cards() {
    let shape = Shape { rows: 900, columns: 300, double: false };
    let options = JobOptions { iterations: 600, depth: Some(10), checkpoint_interval: NonZeroU64::new(100) };
    // One card dies after 150 sweeps, another after 350: both between two checkpoints.
    let left = AtomicUsize::new(3);
    let kill = |sweeps, cards: &mut Vec<Card>| {
        let alive = if sweeps < 150 {
            3
        } else if sweeps < 350 {
            2
        } else {
            1
        };
        if left.fetch_min(alive, Ordering::Relaxed) > alive {
            cards[alive].process.kill().unwrap();
        }
    };
    let (report, _) = with_losses(0, options, shape, kill).unwrap();
    assert_eq!(report.cards.len(), 1);
    let from: Vec<_> = report.losses.iter().map(|loss| (loss.cards.len(), loss.sweeps)).collect();
    assert_eq!(from, [(1, 100), (1, 300)], "{:?}", report.losses);
    assert!(report.losses[0].cause.starts_with("card 127.0.0.1:"), "{:?}", report.losses);
}

#[test]
fn a_spare_card_replaces_a_killed_one_and_without_checkpoints_the_job_restarts() {
    let shape = Shape { rows: 500, columns: 300, double: true };
    let options = JobOptions { iterations: 300, depth: Some(10), checkpoint_interval: None };
    let left = AtomicUsize::new(3);
    let kill = |sweeps, cards: &mut Vec<Card>| {
        if sweeps > 100 && left.swap(2, Ordering::Relaxed) == 3 {
            cards[1].process.kill().unwrap();
        }
    };
    let (report, _) = with_losses(1, options, shape, kill).unwrap();
    assert_eq!((report.cards.len(), report.losses.len(), report.losses[0].sweeps), (3, 1, 0));
    assert!(!report.cards.contains(&report.losses[0].cards[0]));
}

#[test]
fn the_error_names_all_cards_when_all_are_killed() {
    let shape = Shape { rows: 300, columns: 100, double: false };
    let options =
        JobOptions { iterations: 1_000_000, depth: Some(10), checkpoint_interval: NonZeroU64::new(100) };
    let kill = |sweeps, cards: &mut Vec<Card>| {
        if sweeps > 200 {
            cards.drain(..).for_each(drop);
        }
    };
    let lost = with_losses(0, options, shape, kill).unwrap_err();
    assert!(matches!(&lost, OffloadError::NoCardsLeft { lost, .. } if lost.len() == 3), "{lost}");
    assert!(lost.to_string().contains("there are no cards"), "{lost}");
}

#[test]
fn the_error_names_an_address_without_a_card() {
    let device = device();
    let nobody = row(&device, &["127.0.0.1:9".to_owned()]).unwrap_err().to_string();
    assert!(nobody.starts_with("card 127.0.0.1:9, connecting"), "{nobody}");
}
