//! `millstream card selftest`: tests a card.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use millstream_card::control::{KernelSource, RunRequest};
use millstream_card::info::CardInfo;
use millstream_card::{RemoteCard, RemoteError};
use millstream_card_abi::MemoryRange;
use millstream_card_abi::dma::{BAR2_OFFSET, DmaDescriptor, DmaOperation};
use millstream_rdma::{Access, Region};
use serde_json::json;

use super::args::CardName;
use super::{CommandContext, Outcome};

const TIMEOUT: Duration = Duration::from_secs(10);

/// Bytes transferred to and from each bank.
const SAMPLE: usize = 256 << 10;

type Step = (&'static str, fn(&RemoteCard) -> Result<String, String>);

const STEPS: &[Step] = &[
    ("lease", |card| {
        let held = card.acquire(Duration::from_secs(10), TIMEOUT).map_err(text)?;
        Ok(format!("epoch {}", held.epoch))
    }),
    ("write and read of every bank", banks),
    ("bandwidth of bank 0", bandwidth),
    ("rejection of a range outside memory", |card| match card.write(card.memory_bytes() - 4, &[0; 8]) {
        Err(error) if !error.is_fatal() => Ok(error.to_string()),
        other => Err(format!("{other:?}")),
    }),
    ("BAR2 by DMA of the card", |card| {
        let len = 4096.min(card.hello().bar2_bytes);
        let sample = pattern(7, len as usize);
        card.write(0, &sample).map_err(text)?;
        let there = copy(MemoryRange::new(0, len), BAR2_OFFSET);
        let back = copy(MemoryRange::new(BAR2_OFFSET, len), 8192);
        card.run_dma(&[there, back], TIMEOUT).map_err(text)?;
        check(card, 8192, &sample)
    }),
    ("a kernel and its interrupt in each region", |card| {
        for region in 0..card.hello().region_count {
            card.load(region, KernelSource::Builtin("null")).map_err(text)?;
            let results =
                card.run(region, &RunRequest::new(&[1, 2, 3, u64::from(region)]), TIMEOUT).map_err(text)?;
            if results != [1, 2, 3, u64::from(region)] {
                return Err(format!("region {region}: results {results:?}"));
            }
        }
        Ok(format!("{} regions", card.hello().region_count))
    }),
    ("latency from doorbell to interrupt", |card| {
        let mut times: Vec<_> = (0..200)
            .map(|_| {
                let started = Instant::now();
                card.run(0, &RunRequest::new(&[]), TIMEOUT).map(|_| started.elapsed())
            })
            .collect::<Result<_, _>>()
            .map_err(text)?;
        times.sort();
        Ok(format!("median {:.1} µs", times[times.len() / 2].as_secs_f64() * 1e6))
    }),
    ("stop at a safe point", |card| {
        card.load(0, KernelSource::Builtin("mix")).map_err(text)?;
        card.start(0, &RunRequest::new(&[0, 65536, u64::MAX])).map_err(text)?;
        if card.stop(0).map_err(text)? { Ok(String::new()) } else { Err("no kernel was running".to_owned()) }
    }),
    ("rejection of an access outside the banks", |card| {
        if card.hello().bank_count < 2 {
            return Ok("not tested: the card has one bank".to_owned());
        }
        let start = RunRequest { banks: 2, ..RunRequest::new(&[0, 8, 1]) };
        match card.run(0, &start, TIMEOUT) {
            Err(error) if !error.is_fatal() => Ok(error.to_string()),
            other => Err(format!("{other:?}")),
        }
    }),
    ("a kernel of the GPU", |card| {
        if kind_of(card)? != "Cuda" {
            return Ok("not tested: the card has no GPU".to_owned());
        }
        let at = card.hello().bank_bytes / 2;
        let words: Vec<u8> = (1..=1000u64).flat_map(u64::to_le_bytes).collect();
        card.write(at, &words).map_err(text)?;
        let image = include_str!("double_words.ptx").as_bytes();
        card.load(0, KernelSource::Image { image, at: 0 }).map_err(text)?;
        let results = card.run(0, &RunRequest::new(&[at, 1000]), TIMEOUT).map_err(text)?;
        let doubled: Vec<u8> = (1..=1000u64).flat_map(|word| (2 * word).to_le_bytes()).collect();
        match results[0] {
            1_001_000 => check(card, at, &doubled),
            sum => Err(format!("sum {sum}, expected 1001000")),
        }
    }),
    ("cleared memory for the next holder", |card| {
        card.release().map_err(text)?;
        card.acquire(Duration::from_secs(10), TIMEOUT).map_err(text)?;
        let (bank, sample) = (card.hello().bank_bytes, sample_of(card));
        for start in (0..u64::from(card.hello().bank_count)).map(|index| index * bank) {
            // An earlier step has written to the end.
            for at in [start, start + bank - sample as u64] {
                check(card, at, &vec![0; sample])?;
            }
        }
        card.release().map_err(text)?;
        Ok(String::new())
    }),
];

/// Kind of the card's memory.
fn kind_of(card: &RemoteCard) -> Result<String, String> {
    Ok(CardInfo::of(&card.snapshot().map_err(text)?).memory_kind)
}

pub(super) fn run(name: &CardName, context: &CommandContext) -> Outcome {
    let card = context.connect(&name.card)?;
    let kind = kind_of(&card)?.to_lowercase();
    if !context.json {
        println!("card {}: {kind} memory, device {}", name.card, card.device().name());
    }
    let mut steps = Vec::new();
    let mut failed = 0;
    for (what, step) in STEPS {
        // Steps after a failure are not run.
        let outcome = if failed > 0 { None } else { Some(step(&card)) };
        let (mark, detail) = match &outcome {
            Some(Ok(detail)) => ("ok", detail.as_str()),
            Some(Err(error)) => ("FAILED", error.as_str()),
            None => ("not run", ""),
        };
        failed += u32::from(matches!(outcome, Some(Err(_))));
        if context.json {
            steps.push(json!({ "step": what, "outcome": mark, "detail": detail }));
        } else {
            println!("{mark:<8} {what}{}{detail}", if detail.is_empty() { "" } else { ": " });
        }
    }
    if context.json {
        println!("{}", json!({ "card": name.card, "kind": kind, "passed": failed == 0, "steps": steps }));
    }
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Size of a transfer (bytes), and time of a measurement in each direction.
const TRANSFER: usize = 16 << 20;
const TRANSFERS: Duration = Duration::from_millis(200);

fn bandwidth(card: &RemoteCard) -> Result<String, String> {
    let len = TRANSFER.min(card.hello().bank_bytes as usize);
    let region = Region::landing(card.device(), c"millstream-selftest", len, Access::LOCAL_WRITE)
        .map_err(|error| error.to_string())?;
    region.populate().map_err(|error| error.to_string())?;
    region.copy_from_slice(0, &pattern(5, len)).map_err(|error| error.to_string())?;
    let span = MemoryRange::new(0, len as u64);
    let rate = |transfer: &dyn Fn() -> Result<(), RemoteError>| {
        // The first transfer allocates the pages.
        transfer().map_err(text)?;
        let (started, mut moved) = (Instant::now(), 0u64);
        while started.elapsed() < TRANSFERS {
            transfer().map_err(text)?;
            moved += span.len;
        }
        Ok::<_, String>(moved as f64 / started.elapsed().as_secs_f64() / 1e9)
    };
    let written = rate(&|| card.write_from(&region, 0, span))?;
    region.copy_from_slice(0, &vec![0; len]).map_err(|error| error.to_string())?;
    let read = rate(&|| card.read_into(&region, 0, span))?;
    let mut found = vec![0; len];
    region.copy_to_slice(0, &mut found).map_err(|error| error.to_string())?;
    if found != pattern(5, len) {
        return Err("the bytes read differ from the bytes written".to_owned());
    }
    Ok(format!("{written:.2} GB/s written, {read:.2} GB/s read, {len} bytes at a time"))
}

fn text(error: RemoteError) -> String {
    error.to_string()
}

fn sample_of(card: &RemoteCard) -> usize {
    SAMPLE.min(card.hello().bank_bytes as usize)
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| ((at ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

fn copy(local: MemoryRange, remote: u64) -> DmaDescriptor {
    DmaDescriptor { operation: DmaOperation::Local, peer: 0, local, remote, key: 0, notify: true }
}

fn check(card: &RemoteCard, offset: u64, expected: &[u8]) -> Result<String, String> {
    let mut found = vec![0; expected.len()];
    card.read(offset, &mut found).map_err(text)?;
    match found.iter().zip(expected).position(|(found, expected)| found != expected) {
        None => Ok(String::new()),
        Some(at) => {
            Err(format!("byte {:#x} is {:#x} instead of {:#x}", offset + at as u64, found[at], expected[at]))
        }
    }
}

fn banks(card: &RemoteCard) -> Result<String, String> {
    let hello = *card.hello();
    let place = |bank: u64| bank * hello.bank_bytes + hello.bank_bytes - sample_of(card) as u64;
    for bank in 0..hello.bank_count.into() {
        card.write(place(bank), &pattern(bank, sample_of(card))).map_err(text)?;
    }
    for bank in 0..hello.bank_count.into() {
        check(card, place(bank), &pattern(bank, sample_of(card)))
            .map_err(|error| format!("bank {bank}: {error}"))?;
    }
    Ok(format!("{} banks", hello.bank_count))
}
