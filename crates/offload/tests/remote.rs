//! Jobs on cards in processes of their own, over the network.

use std::io::Write as _;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use millstream_card::kernel::Registry;
use millstream_card::{Config, Lifetime, Network, serve_with};
use millstream_offload::grid::{Grid, Shape};
use millstream_offload::plan::Plan;
use millstream_offload::remote::LeasedCard;
use millstream_offload::worker::Worker as _;
use millstream_offload::{OffloadError, job};
use millstream_rdma::{Choice, Device, device};

const PATIENCE: Duration = Duration::from_secs(20);
const BANK: u64 = 8 << 20;

/// Environment of a test binary that is to be a card: where to write its address.
const BE_A_CARD: &str = "MILLSTREAM_TEST_OFFLOAD_CARD";

fn device() -> Device {
    device::open(&Choice::from_environment()).unwrap_or_else(|error| panic!("run `make lib` first: {error}"))
}

/// Not a test of its own: serves a card if this process was started for that.
#[test]
fn be_a_card() {
    let Ok(file) = std::env::var(BE_A_CARD) else { return };
    let name = format!("offload-{}", std::process::id()).parse().unwrap();
    let mut config = Config::new(name, BANK, Registry::empty());
    config.bank_count = 2;
    config.network = Some(Network { device: device(), address: "127.0.0.1:0".to_owned() });
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

/// A card that ends with this.
struct Card {
    process: Child,
    address: String,
}

impl Card {
    fn start() -> Card {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("address");
        let process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "be_a_card"])
            .env(BE_A_CARD, &file)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let until = Instant::now() + PATIENCE;
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

fn row(device: &Device, addresses: &[String]) -> Result<Vec<LeasedCard>, OffloadError> {
    LeasedCard::row(device, addresses, Duration::from_secs(2), Duration::from_millis(300))
}

#[test]
fn the_result_is_the_reference_and_the_cards_are_free_afterwards() {
    let device = device();
    let (_processes, addresses) = cards(3);
    for (double, iterations) in [(false, 100), (true, 7)] {
        let mut workers = row(&device, &addresses).unwrap();
        let shape = Shape { rows: 1500, columns: 200, double };
        let mut grid = Grid::zeros(shape, Some(&device)).unwrap();
        grid.generate(3);
        let reference = grid.reference(iterations);
        let memories: Vec<_> = workers.iter().map(|worker| worker.memory_bytes()).collect();
        let plan = Plan::new(shape, iterations, &memories, None).unwrap();
        let report = job::run(&plan, &mut grid, &mut workers, &|_| {}, &AtomicBool::new(false)).unwrap();
        grid.compare(&reference).unwrap();
        assert_eq!((report.cards, report.bytes[2]), (addresses.clone(), shape.bytes()));
        assert!(iterations < 17 || report.bytes[1] > 0);
        // Another node cannot have them meanwhile.
        let refused = row(&device, &addresses[..1]).unwrap_err().to_string();
        assert!(refused.contains(&addresses[0]) && refused.contains("is leased to node"), "{refused}");
        for worker in workers {
            worker.release().unwrap();
        }
    }
}

#[test]
fn a_card_that_is_killed_ends_the_job_with_its_name() {
    let device = device();
    let (mut processes, addresses) = cards(2);
    let mut workers = row(&device, &addresses).unwrap();
    let shape = Shape { rows: 1000, columns: 500, double: false };
    let mut grid = Grid::zeros(shape, Some(&device)).unwrap();
    let plan = Plan::new(shape, 1_000_000, &[2 * BANK; 2], None).unwrap();
    let outcome = std::thread::scope(|scope| {
        let job = scope.spawn(|| job::run(&plan, &mut grid, &mut workers, &|_| {}, &AtomicBool::new(false)));
        std::thread::sleep(Duration::from_millis(400));
        processes[1].process.kill().unwrap();
        job.join().unwrap()
    });
    match outcome {
        // The one that died, or its neighbour that could not send to it any more.
        Err(OffloadError::Card { card, .. }) => assert!(addresses.contains(&card)),
        other => panic!("{other:?}"),
    }
    // The other card is free, or will be as soon as its lease ends.
    drop(workers);
    let again = LeasedCard::row(&device, &addresses[..1], Duration::from_secs(2), PATIENCE).unwrap();
    again.into_iter().for_each(|card| card.release().unwrap());
}

#[test]
fn addresses_without_a_card_are_said() {
    let device = device();
    let nobody = row(&device, &["127.0.0.1:9".to_owned()]).unwrap_err().to_string();
    assert!(nobody.starts_with("card 127.0.0.1:9, connecting"), "{nobody}");
}
