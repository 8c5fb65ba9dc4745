//! Runs a WebAssembly kernel on a leased card: `card-kernel ADDRESS KERNEL`. See README.md.

use millstream_card::control::{KernelSource, RunRequest};
use millstream_card::{RemoteCard, RemoteOptions};
use millstream_rdma::{DeviceSelector, device, loader};
use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

/// The region that runs the kernel.
const REGION: u32 = 0;
/// Offset of the data in card memory.
const DATA: u64 = 0;
/// Offset of the kernel's image in card memory.
const IMAGE: u64 = 1 << 20;
/// Number of words in the data.
const WORDS: u32 = 1024;
/// The kernel adds this number to each word.
const ADDEND: u32 = 100;
/// The lease expires so long after the latest heartbeat; `RemoteCard` sends heartbeats.
const LEASE: Duration = Duration::from_secs(10);
/// Timeout of the lease, and of the run.
const TIMEOUT: Duration = Duration::from_secs(10);

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let result = match arguments.as_slice() {
        [address, kernel] => run(address, kernel),
        _ => Err("usage: card-kernel ADDRESS KERNEL".into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("card-kernel: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the kernel in the file `kernel` on the card that listens at `address`. An error ends the connection, and with
/// it the lease.
fn run(address: &str, kernel: &str) -> Result<(), Box<dyn Error>> {
    let image = std::fs::read(kernel).map_err(|error| format!("{kernel}: {error}"))?;
    let selector = DeviceSelector::from_environment();
    loader::ensure(&selector)?;
    let card = RemoteCard::connect(&device::open(&selector)?, address, RemoteOptions::default())?;
    println!("connected to a card with {} MiB of memory", card.memory_bytes() >> 20);

    card.acquire(LEASE, TIMEOUT)?;
    println!("lease acquired");
    card.load(REGION, KernelSource::Image { image: &image, at: IMAGE })?;
    println!("kernel loaded into region {REGION}");

    let input: Vec<u32> = (0..WORDS).collect();
    let mut bytes: Vec<u8> = input.iter().flat_map(|word| word.to_le_bytes()).collect();
    card.write(DATA, &bytes)?;
    let doorbell = card.start(REGION, &RunRequest::new(&[DATA, WORDS.into(), ADDEND.into()]))?;

    // The interrupt: the card sends a message at the end of the run.
    let message = card.message(TIMEOUT)?.ok_or("the card sent no message")?;
    if let Some(cause) = message.cause {
        return Err(format!("region {}: {cause} ({:#x})", message.region, message.values[0]).into());
    }
    if message.sequence != doorbell {
        return Err(format!("unexpected message: {message:?}").into());
    }
    println!("{:?} from region {}: {} words changed", message.kind, message.region, message.values[0]);

    card.read(DATA, &mut bytes)?;
    let output: Vec<u32> = bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
    for (index, (before, after)) in input.iter().zip(&output).enumerate() {
        if *after != before + ADDEND {
            return Err(format!("word {index} is {after}, expected {}", before + ADDEND).into());
        }
    }
    println!("{WORDS} words read back: {}, {}, … {}", output[0], output[1], output[WORDS as usize - 1]);

    card.release()?;
    println!("lease released");
    Ok(())
}
