//! WebAssembly modules as kernels: imports, limits, faults, and the examples of examples/kernels.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use millstream_card_abi::command::{Cause, FLAG_VERIFY, Fault};
use millstream_card_abi::events::{EventSummary, FunctionArgs, PacketBuffer};
use millstream_card_abi::registers::KernelWords;
use millstream_card_server::Memory;
use millstream_card_server::kernel::{
    GrantedBanks, Kernel, KernelLoader as _, KernelRun, RunControl, StandaloneControl,
};
use millstream_fragment::mfp::{Repr, assemble};
use millstream_fragment::{Alignment, Fragment, SourceId, SourceKind};
use millstream_wasm::{Compiler, ImageError, MAX_IMAGE_BYTES, MAX_TABLE_ELEMENTS, MAX_TABLES, Wasm};

const BANK: u64 = 1 << 20;

fn kernel(text: &str) -> Box<dyn Kernel> {
    assert!(Wasm::default().recognises(text.as_bytes()));
    Wasm::default().load(text.as_bytes()).expect(text).kernel
}

/// A module with one page of memory and this body of `run`.
fn module(body: &str) -> String {
    format!(
        r#"(module $test
            (import "millstream_1" "argument" (func $argument (param i32) (result i64)))
            (import "millstream_1" "address" (func $address (param i64 i64) (result i32)))
            (import "millstream_1" "result" (func $result (param i32 i64)))
            (import "millstream_1" "progress" (func $progress (param i64)))
            (import "millstream_1" "traffic" (func $traffic (param i64 i64)))
            (import "millstream_1" "safe_point" (func $safe_point (param i32)))
            (import "millstream_1" "refuse" (func $refuse (param i32)))
            (memory (export "memory") 1)
            (data (i32.const 8) "own")
            (func $deep (call $deep) (call $deep))
            (func (export "run") {body}))"#
    )
}

fn arguments(words: &[u64]) -> KernelWords {
    std::array::from_fn(|index| words.get(index).copied().unwrap_or(0))
}

/// Runs a kernel on banks 1 and 3 of four.
fn run(kernel: &mut dyn Kernel, memory: &Memory, words: &[u64]) -> Result<KernelWords, Fault> {
    let control = StandaloneControl::default();
    let mut run = KernelRun::new(GrantedBanks::new(memory, BANK, 0b1010), arguments(words), &control);
    kernel.run(&mut run)?;
    Ok(*run.results())
}

fn cause(body: &str) -> Cause {
    let memory = Memory::anonymous(4 * BANK).unwrap();
    run(&mut *kernel(&module(body)), &memory, &[]).unwrap_err().cause
}

#[test]
fn a_kernel_reads_and_writes_its_banks_in_place() {
    let memory = Memory::anonymous(4 * BANK).unwrap();
    // Adds 1 to the word at argument 0 and leaves it in result 2.
    let mut kernel = kernel(&module(
        "(local $at i32)
         (local.set $at (call $address (call $argument (i32.const 0)) (i64.const 8)))
         (i64.store (local.get $at) (i64.add (i64.load (local.get $at)) (i64.const 1)))
         (call $result (i32.const 2) (i64.load (local.get $at)))",
    ));
    for offset in [BANK, 2 * BANK - 8, 3 * BANK, 4 * BANK - 8] {
        for value in [41u64, 42] {
            if value == 41 {
                memory.write(offset, &value.to_le_bytes()).unwrap();
            }
            assert_eq!(run(&mut *kernel, &memory, &[offset]).unwrap()[2], value + 1);
        }
        assert_eq!(memory.read_array(offset).unwrap(), 43u64.to_le_bytes());
    }
    for offset in [0, BANK - 8, BANK - 1, 2 * BANK - 7, 2 * BANK, 4 * BANK, u64::MAX] {
        let refused = run(&mut *kernel, &memory, &[offset]).unwrap_err();
        assert_eq!(refused, Fault::new(Cause::AccessViolation, offset));
    }
}

#[test]
fn a_range_over_two_banks_is_in_one_piece() {
    let memory = Memory::anonymous(4 * BANK).unwrap();
    let mut kernel = kernel(&module(
        "(memory.fill (call $address (i64.const 1048570) (i64.const 12)) (i32.const 7) (i32.const 12))",
    ));
    let control = StandaloneControl::default();
    let mut run = KernelRun::new(GrantedBanks::new(&memory, BANK, 0b0011), arguments(&[]), &control);
    kernel.run(&mut run).unwrap();
    assert_eq!(memory.read_array::<14>(BANK - 7).unwrap(), [0, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 0]);
}

#[test]
fn every_run_starts_from_the_module_as_it_was_made() {
    let memory = Memory::anonymous(4 * BANK).unwrap();
    let mut kernel = kernel(&module(
        "(call $result (i32.const 0) (i64.load (i32.const 8)))
         (call $result (i32.const 1) (i64.load (i32.const 4096)))
         (i64.store (i32.const 8) (i64.const -1))
         (i64.store (i32.const 4096) (i64.const -1))",
    ));
    for _ in 0..3 {
        let results = run(&mut *kernel, &memory, &[]).unwrap();
        assert_eq!(results[..2], [u64::from_le_bytes(*b"own\0\0\0\0\0"), 0]);
    }
}

#[test]
fn traps_end_the_run_and_say_which() {
    let memory = Memory::anonymous(4 * BANK).unwrap();
    let trapping = |body: &str| run(&mut *kernel(&module(body)), &memory, &[]).unwrap_err();
    let trap = |number| Fault::new(Cause::KernelTrapped, number);
    assert_eq!(trapping("(unreachable)"), trap(1));
    assert_eq!(trapping("(call $deep)"), trap(2));
    let by_zero = "(call $result (i32.const 0) (i64.div_u (i64.const 1) (i64.const 0)))";
    assert_eq!(trapping(by_zero), trap(3));
    assert_eq!(trapping("(call $refuse (i32.const 5))"), Fault::new(Cause::InvalidArgument, 5));
    assert_eq!(
        trapping("(call $result (i32.const 16) (i64.const 0))"),
        Fault::new(Cause::InvalidArgument, 16)
    );
}

#[test]
fn reaching_out_of_the_banks_ends_the_run() {
    // The module's page, two banks, and no memory after them.
    let end = 65536 + 2 * BANK;
    let load = |at: u64| format!("(drop (i32.load (i32.const {})))", at as u32 as i32);
    let memory = Memory::anonymous(4 * BANK).unwrap();
    run(&mut *kernel(&module(&load(end - 4))), &memory, &[]).unwrap();
    for at in [end - 3, end, 1 << 31, u64::from(u32::MAX)] {
        assert_eq!(cause(&load(at)), Cause::AccessViolation, "{at}");
    }
    assert_eq!(cause("(i32.store offset=4294967295 (i32.const -1) (i32.const 7))"), Cause::AccessViolation);
    assert_eq!(cause("(memory.fill (i32.const 0) (i32.const 7) (i32.const -1))"), Cause::AccessViolation);
    assert_eq!(cause("(call $safe_point (i32.const -8))"), Cause::AccessViolation);
    // Memory does not grow: `memory.grow` returns -1.
    run(
        &mut *kernel(&module("(if (i32.ne (memory.grow (i32.const 1)) (i32.const -1)) (then unreachable))")),
        &memory,
        &[],
    )
    .unwrap();
}

/// A control that requests an interrupt after some time.
#[derive(Default)]
struct InterruptRequested {
    interrupt_requested: AtomicBool,
    heartbeat: AtomicU64,
    progress: AtomicU64,
    points: AtomicU64,
    stop: AtomicBool,
}

impl RunControl for InterruptRequested {
    fn safe_point(&self, state: &KernelWords) -> Result<(), Fault> {
        self.points.fetch_add(1, Ordering::Relaxed);
        self.progress.store(state[0], Ordering::Relaxed);
        if self.stop.load(Ordering::Relaxed) { Err(Fault::new(Cause::Interrupted, 0)) } else { Ok(()) }
    }

    fn interrupt_requested(&self) -> &AtomicBool {
        &self.interrupt_requested
    }
    fn heartbeat(&self) -> &AtomicU64 {
        &self.heartbeat
    }

    fn progress(&self) -> &AtomicU64 {
        &self.progress
    }
}

#[test]
fn loops_are_ended_by_fuel_by_the_deadline_and_by_a_stop() {
    let memory = Memory::anonymous(4 * BANK).unwrap();
    let banks = GrantedBanks::new(&memory, BANK, 0b1010);
    let mut kernel = kernel(&module("(loop $for_ever (br $for_ever))"));
    let control = StandaloneControl::default();
    let mut run = KernelRun::new(banks, arguments(&[]), &control).bounded(Some(100_000), None);
    assert_eq!(kernel.run(&mut run), Err(Fault::new(Cause::FuelExhausted, 100_000)));
    assert_eq!(run.fuel_used(), 100_000);

    let deadline = Instant::now() + Duration::from_millis(30);
    let mut run = KernelRun::new(banks, arguments(&[]), &control).bounded(None, Some(deadline));
    assert_eq!(kernel.run(&mut run).unwrap_err().cause, Cause::DeadlineExceeded);

    let control = InterruptRequested::default();
    control.stop.store(true, Ordering::Relaxed);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(30));
            control.interrupt_requested.store(true, Ordering::Relaxed);
        });
        let mut run = KernelRun::new(banks, arguments(&[]), &control);
        assert_eq!(kernel.run(&mut run).unwrap_err().cause, Cause::Interrupted);
    });
    // The kernel can run again.
    let mut run = KernelRun::new(banks, arguments(&[]), &control).bounded(Some(10), None);
    assert_eq!(kernel.run(&mut run).unwrap_err().cause, Cause::FuelExhausted);
}

#[test]
fn images_that_are_no_kernels_are_refused_in_words_and_by_cause() {
    let refused = |image: &[u8]| {
        (
            Wasm::default().check(image).unwrap_err().to_string(),
            Wasm::default().load(image).unwrap_err().cause,
        )
    };
    for (image, words) in [
        ("(module)", "exports no memory"),
        ("(module (memory (export \"memory\") 1))", "no function `run`"),
        ("(module (memory (export \"memory\") 1 2) (func (export \"run\")))", "has a maximum"),
        ("(module (memory (export \"memory\") 1) (func (export \"run\") (param i32)))", "no function `run`"),
        (
            "(module (import \"env\" \"puts\" (func)) (memory (export \"memory\") 1) (func (export \"run\")))",
            "env::puts",
        ),
        (
            "(module (import \"millstream_1\" \"result\" (func)) (memory (export \"memory\") 1) \
             (func (export \"run\")))",
            "millstream_1::result",
        ),
        ("(module (func (export \"run\") (i32.add)))", "type mismatch"),
    ] {
        let (text, cause) = refused(image.as_bytes());
        assert!(text.contains(words), "{text}");
        assert_eq!(cause, Cause::KernelFormat, "{image}");
    }
    let (_, cause) = refused(b"\0asm and then something else");
    assert_eq!(cause, Cause::KernelFormat);
    let large = [b"\0asm".as_slice(), &vec![0; MAX_IMAGE_BYTES]].concat();
    assert_eq!(refused(&large).1, Cause::KernelTooLarge);
    let (text, cause) = refused(b"(module (memory (export \"memory\") 2000) (func (export \"run\")))");
    assert_eq!(cause, Cause::KernelTooLarge, "{text}");
    assert!(!Wasm::default().recognises(b"\x7fELF"));
    assert!(Wasm::default().recognises(b";; my trigger\n\t(; of (; two ;) parts ;) (module)"));
    for other in [&b";; (module)"[..], b"(; (module)", b"(; (; ;) (module)", b""] {
        assert!(!Wasm::default().recognises(other), "{other:?}");
    }
}

#[test]
fn banks_beyond_what_a_module_can_address_are_refused() {
    // Sparse: no page of it is accessed.
    let memory = Memory::anonymous(8 << 30).unwrap();
    let control = StandaloneControl::default();
    let mut kernel = kernel(&module("(drop (call $address (i64.const 0) (i64.const 1)))"));
    let mut with = |mask| {
        let mut run = KernelRun::new(GrantedBanks::new(&memory, 256 << 20, mask), arguments(&[]), &control);
        kernel.run(&mut run)
    };
    assert_eq!(with(0x7fff), Ok(()));
    assert_eq!(with(0xffff), Err(Fault::new(Cause::KernelTooLarge, 4 << 30)));
    assert_eq!(with(1 << 32), Err(Fault::new(Cause::NoSuchBank, 1 << 32)));
    assert_eq!(with(0), Err(Fault::new(Cause::AccessViolation, 0)));
}

#[test]
fn tables_are_bounded() {
    let memory = Memory::anonymous(4 * BANK).unwrap();
    let grow = |tables: usize, elements: u32| {
        let table = "(table 1 funcref)".repeat(tables);
        let image = format!(
            r#"(module
                (import "millstream_1" "result" (func $result (param i32 i64)))
                (memory (export "memory") 1)
                {table}
                (func (export "run")
                    (call $result (i32.const 0)
                        (i64.extend_i32_s (table.grow 0 (ref.null func) (i32.const {elements}))))
                    (call $result (i32.const 1) (i64.extend_i32_u (table.size 0)))))"#
        );
        run(&mut *kernel(&image), &memory, &[]).unwrap()
    };
    // 564 MiB of elements with eight bytes each.
    let refused = grow(1, 564 << 17);
    assert_eq!(refused[..2], [u64::MAX, 1], "table.grow fails and leaves the table as it was");
    let granted = grow(MAX_TABLES, MAX_TABLE_ELEMENTS as u32 - 1);
    assert_eq!(granted[..2], [1, MAX_TABLE_ELEMENTS as u64], "tables grow to the limit");
    let image = |tables: &str| {
        let image = format!("(module (memory (export \"memory\") 1) {tables} (func (export \"run\")))");
        let refused = Wasm::default().check(image.as_bytes()).unwrap_err().to_string();
        (refused, Wasm::default().load(image.as_bytes()).unwrap_err())
    };
    let (text, fault) = image("(table 73924608 funcref)");
    assert!(text.contains("table with 73924608 elements"), "{text}");
    assert_eq!(fault, Fault::new(Cause::KernelTooLarge, 73_924_608));
    let (text, fault) = image(&"(table 1 funcref)".repeat(MAX_TABLES + 1));
    assert!(text.contains("5 tables"), "{text}");
    assert_eq!(fault, Fault::new(Cause::KernelTooLarge, 5));
}

/// Writes the packets of two events of two sources, and runs a kernel on them. Source 2 lacks the second event; the
/// payload of source 1 is corrupt there.
fn run_on_events(image: &[u8], arguments: [u64; 8]) -> Result<Vec<EventSummary>, Fault> {
    let memory = Memory::anonymous(4 * BANK).unwrap();
    let mut packets = Vec::new();
    for (source, fragments) in [
        (1, vec![Fragment::new(50, &[7, 0, 0, 0]), Fragment { crc: 1, ..Fragment::new(51, &[9, 0]) }]),
        (2, vec![Fragment::new(50, &[0, 1, 2, 3, 4, 5])]),
    ] {
        let mut bytes = vec![0; 4096];
        let repr = Repr {
            source: SourceId(source),
            kind: SourceKind(5),
            first_event: 50,
            n_events: 2,
            n_fragments: fragments.len() as u32,
            alignment: Alignment::CACHE_LINE,
        };
        let len = assemble(&mut bytes, repr, &fragments).unwrap();
        let offset = BANK + u64::from(source) * 4096;
        memory.write(offset, &bytes[..len as usize]).unwrap();
        packets.push(PacketBuffer { offset, capacity: 4096, source, reserved: 0 });
    }
    let mut args = Vec::new();
    FunctionArgs { first_event: 50, n_events: 2, n_sources: 0, arguments }.append_to(&packets, &mut args);
    memory.write(0, &args).unwrap();
    let control = StandaloneControl::default();
    let words = self::arguments(&[0, args.len() as u64, 2 * BANK, 64, FLAG_VERIFY.into()]);
    let mut run = KernelRun::new(GrantedBanks::new(&memory, BANK, 0b1111), words, &control);
    Wasm::default().load(image).unwrap().kernel.run(&mut run)?;
    assert_eq!(run.results()[..3], [2, 3, 1]);
    let summary = |at| EventSummary::from_bytes(&memory.read_array(2 * BANK + at).unwrap());
    Ok(vec![summary(0), summary(32)])
}

/// A module with this body of `event`: parameters `$event`, `$table`, `$count`.
fn event_module(body: &str) -> String {
    format!(
        r#"(module $filter
            (import "millstream_1" "argument" (func $argument (param i32) (result i64)))
            (memory (export "memory") 1)
            (func (export "event") (param $event i64) (param $table i32) (param $count i32) (result i32) {body}))"#
    )
}

#[test]
fn a_function_for_events_sees_every_event_with_a_map_of_what_is_there() {
    // Decisions: 16 bits of the status of each source, so that the summary counts them.
    let statuses = event_module(
        "(i32.or (i32.load offset=8 (local.get $table)) (i32.shl (i32.load offset=32 (local.get $table)) (i32.const 16)))",
    );
    let summaries = run_on_events(statuses.as_bytes(), [0; 8]).unwrap();
    assert_eq!((summaries[0].event, summaries[0].accepted, summaries[0].status), (50, 0, 0));
    // Bit 2 of source 1: corrupt; bit 0 of source 2: missing.
    assert_eq!((summaries[1].accepted, summaries[1].decisions_set), (1, 2));
    assert_eq!((summaries[1].missing, summaries[1].corrupt), (1, 1));

    // Payload in place: the first byte of source 1 is 7, the last word of source 2 is 5·256 + 4.
    let payload = event_module(
        "(i32.and
            (i32.eq (i32.load8_u (i32.load offset=12 (local.get $table))) (i32.const 7))
            (i32.and
                (i32.eq (i32.load16_u offset=4 (i32.load offset=36 (local.get $table))) (i32.const 1284))
                (i64.eq (call $argument (i32.const 7)) (i64.const 11))))",
    );
    let summaries = run_on_events(payload.as_bytes(), [0, 0, 0, 0, 0, 0, 0, 11]).unwrap();
    assert_eq!((summaries[0].accepted, summaries[1].accepted), (1, 0));
    assert_eq!(Wasm::default().check_for_events(payload.as_bytes()).unwrap(), "filter");
}

#[test]
fn the_multiplicity_trigger_in_rust_decides() {
    let image = example("multiplicity.rs");
    let decide = |arguments: &[u64]| {
        let words: [u64; 8] = std::array::from_fn(|at| arguments.get(at).copied().unwrap_or(0));
        let summaries = run_on_events(&image, words).unwrap();
        summaries.iter().map(|summary| summary.decisions_set).collect::<Vec<_>>()
    };
    // The samples of event 50 are 7 and 0 in source 1, up to 1284 in source 2.
    assert_eq!(decide(&[6, 2]), [1, 0]);
    assert_eq!(decide(&[7, 2]), [0, 0]);
    assert_eq!(decide(&[7, 1]), [1, 0]);
    // Event 51 has no fragment that is there and intact.
    assert_eq!(decide(&[0, 0, 1]), [1, 2]);
}

#[test]
fn faults_of_a_function_for_events_end_its_run() {
    let fault = |body: &str| run_on_events(event_module(body).as_bytes(), [0; 8]).unwrap_err();
    assert_eq!(fault("unreachable"), Fault::new(Cause::KernelTrapped, 1));
    assert_eq!(fault("(i32.load (i32.const -4))").cause, Cause::AccessViolation);
    let refused = |text: &str| Wasm::default().check_for_events(text.as_bytes()).unwrap_err().to_string();
    assert!(refused(&module("")).contains("no function `event`"));
    let wrong = r#"(module (memory (export "memory") 1) (func (export "event")))"#;
    assert!(refused(wrong).contains("(i64, i32, i32) -> i32"));
    let changes = event_module("(i32.const 0)").replace("\"argument\"", "\"result\"");
    assert!(refused(&changes).contains("result"), "{}", refused(&changes));
}

fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/kernels")
}

/// Compiles an example by the command in its first lines.
fn example(name: &str) -> Vec<u8> {
    let source = examples().join(name);
    let text = std::fs::read_to_string(&source).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let comment = |line: &str| line.trim_start_matches("//!").trim_start_matches(" *").trim().to_owned();
    let mut words = Vec::new();
    for line in text.lines().map(comment) {
        let command = line.starts_with("rustc ") || line.starts_with("clang ") || !words.is_empty();
        if command {
            let more = line.ends_with('\\');
            words.extend(line.trim_end_matches('\\').split_whitespace().map(str::to_owned));
            if !more {
                break;
            }
        }
    }
    let output = words.iter().position(|word| word == "-o").unwrap() + 1;
    let image = folder.path().join(&words[output]);
    words[output] = image.display().to_string();
    let ran = Command::new(&words[0]).args(&words[1..]).current_dir(examples()).output();
    let ran = ran.unwrap_or_else(|error| panic!("{}: {error}; `make setup` installs it", words[0]));
    let errors = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{words:?} (`make setup` installs what it needs): {errors}");
    std::fs::read(image).unwrap()
}

#[test]
fn the_template_in_rust_adds_a_number() {
    let memory = Memory::anonymous(4 * BANK).unwrap();
    memory.write(BANK + 64, &[1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0]).unwrap();
    let mut kernel = Wasm::default().load(&example("template.rs")).unwrap().kernel;
    assert_eq!(run(&mut *kernel, &memory, &[BANK + 64, 2, 5]).unwrap()[0], 2);
    assert_eq!(memory.read_array(BANK + 64).unwrap(), [6, 0, 0, 0, 7, 0, 0, 0, 3, 0, 0, 0]);
    let too_much = run(&mut *kernel, &memory, &[BANK, 2, 1 << 32]);
    assert_eq!(too_much, Err(Fault::new(Cause::InvalidArgument, 2)));
    let foreign = run(&mut *kernel, &memory, &[0, 2, 5]);
    assert_eq!(foreign, Err(Fault::new(Cause::AccessViolation, 0)));
}

#[test]
fn the_histogram_in_c_counts() {
    let memory = Memory::anonymous(4 * BANK).unwrap();
    let samples: Vec<u16> = (0..50_000u32).map(|at| (at * at % 977) as u16).collect();
    let bytes: Vec<u8> = samples.iter().flat_map(|sample| sample.to_le_bytes()).collect();
    memory.write(BANK, &bytes).unwrap();
    let mut kernel = Wasm::default().load(&example("histogram.c")).unwrap().kernel;
    let results = run(&mut *kernel, &memory, &[BANK, 50_000, 3 * BANK]).unwrap();
    let count = |value: u16| samples.iter().filter(|&&sample| sample == value).count() as u32;
    let most = results[1] as u16;
    assert_eq!(results[0], 50_000);
    for value in [0, 1, 976, most] {
        let counted = memory.read_array(3 * BANK + 4 * u64::from(value)).unwrap();
        assert_eq!(u32::from_le_bytes(counted), count(value));
        assert!(count(value) <= count(most));
    }
}

/// Ends the run at some safe point, and keeps its state.
struct InterruptAfter {
    left: AtomicU64,
    state: std::sync::Mutex<KernelWords>,
    inner: StandaloneControl,
}

impl RunControl for InterruptAfter {
    fn safe_point(&self, state: &KernelWords) -> Result<(), Fault> {
        *self.state.lock().unwrap() = *state;
        match self.left.fetch_sub(1, Ordering::Relaxed) {
            0 => Err(Fault::new(Cause::Interrupted, 0)),
            _ => Ok(()),
        }
    }

    fn interrupt_requested(&self) -> &AtomicBool {
        self.inner.interrupt_requested()
    }

    fn progress(&self) -> &AtomicU64 {
        self.inner.progress()
    }

    fn heartbeat(&self) -> &AtomicU64 {
        self.inner.heartbeat()
    }
}

#[test]
fn the_sweeps_in_rust_go_on_elsewhere_from_any_safe_point() {
    let (rows, columns, sweeps) = (200u64, 70u64, 9u64);
    let cells: Vec<f32> = (0..rows * columns).map(|at| (at * at % 1009) as f32 / 7.0).collect();
    let expected = millstream_stencil::reference(&cells, rows as usize, columns as usize, sweeps as usize);
    let bytes: Vec<u8> = cells.iter().flat_map(|cell| cell.to_le_bytes()).collect();
    let words = arguments(&[rows, columns, BANK, 3 * BANK, sweeps]);
    let image = example("jacobi.rs");
    for points in [0, 1, 3, 4, 17, 38] {
        let memory = Memory::anonymous(4 * BANK).unwrap();
        memory.write(BANK, &bytes).unwrap();
        let control = InterruptAfter {
            left: points.into(),
            state: Default::default(),
            inner: StandaloneControl::default(),
        };
        let mut run = KernelRun::new(GrantedBanks::new(&memory, BANK, 0b1010), words, &control);
        let mut kernel = Wasm::default().load(&image).unwrap().kernel;
        assert_eq!(kernel.run(&mut run).unwrap_err().cause, Cause::Interrupted);

        let elsewhere = Memory::anonymous(4 * BANK).unwrap();
        let mut all = vec![0; 4 * BANK as usize];
        memory.read(0, &mut all).unwrap();
        elsewhere.write(0, &all).unwrap();
        let state = *control.state.lock().unwrap();
        let control = StandaloneControl::default();
        let mut run =
            KernelRun::new(GrantedBanks::new(&elsewhere, BANK, 0b1010), words, &control).resuming(state);
        Wasm::default().load(&image).unwrap().kernel.run(&mut run).unwrap();
        let mut result = vec![0; bytes.len()];
        elsewhere.read(run.results()[0], &mut result).unwrap();
        let (result, _) = result.as_chunks::<4>();
        let result: Vec<f32> = result.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        assert!(result == expected, "stopped after {points} safe points");
    }
    let memory = Memory::anonymous(4 * BANK).unwrap();
    let control = StandaloneControl::default();
    let mut run =
        KernelRun::new(GrantedBanks::new(&memory, BANK, 2), arguments(&[]), &control).resuming([1; 16]);
    let plain = kernel(&module("")).run(&mut run);
    assert_eq!(plain, Err(Fault::new(Cause::KernelNotResumable, 1)));
}

/// A loader whose compiler has these limits.
fn bounded(seconds: u64, bytes: u64) -> Wasm {
    let test = std::env::current_exe().unwrap();
    let program = test.parent().and_then(Path::parent).unwrap().join("examples/compile-module");
    assert!(program.is_file(), "{} is missing: run cargo build --examples", program.display());
    let arguments = [seconds, bytes].map(|limit| limit.to_string().into()).into();
    Wasm::with_compiler(Compiler::Process { program, arguments })
}

/// A module of a few kilobytes whose compilation takes minutes: every local lives through every loop.
fn costly() -> String {
    let (locals, loops) = (2000, 200);
    let mut body = "(local ".to_owned() + &"i32 ".repeat(locals) + ")" + &"(loop ".repeat(loops);
    for local in 0..locals {
        body += &format!("(local.set {local} (i32.add (local.get {local}) (i32.const 1)))");
    }
    body += &"(br_if 0 (local.get 0)))".repeat(loops);
    format!("(module (memory (export \"memory\") 1) (func (export \"run\") {body}))")
}

#[test]
fn the_compiler_is_bounded_in_time_and_memory() {
    for (seconds, bytes) in [(1, 2 << 30), (1000, 256 << 20)] {
        let loader = bounded(seconds, bytes);
        let error = loader.check(costly().as_bytes()).unwrap_err();
        assert!(matches!(error, ImageError::TooCostly(_)), "{error}");
        let image = costly();
        let fault = loader.load(image.as_bytes()).map(|loaded| loaded.name).unwrap_err();
        assert_eq!(fault, Fault::new(Cause::KernelTooLarge, image.len() as u64));
    }
}

#[test]
fn a_module_of_a_compiler_process_runs_with_and_without_fuel() {
    let loader = bounded(60, 2 << 30);
    let memory = Memory::anonymous(4 * BANK).unwrap();
    let image = module("(call $result (i32.const 3) (i64.const 7))");
    let mut kernel = loader.load(image.as_bytes()).unwrap().kernel;
    assert_eq!(run(&mut *kernel, &memory, &[]).unwrap()[3], 7);
    let control = StandaloneControl::default();
    let banks = GrantedBanks::new(&memory, BANK, 0b1010);
    let mut limited = KernelRun::new(banks, arguments(&[]), &control).bounded(Some(10), None);
    let mut endless = loader.load(module("(loop $again (br $again))").as_bytes()).unwrap().kernel;
    assert_eq!(endless.run(&mut limited).unwrap_err().cause, Cause::FuelExhausted);
    // Its words are those of a compiler in this process.
    let wrong = b"(module (func (export \"run\") (i32.add)))";
    assert_eq!(
        loader.check(wrong).unwrap_err().to_string(),
        Wasm::default().check(wrong).unwrap_err().to_string()
    );
    // Messages that quote the module are longer than a pipe.
    let name = "a".repeat(90_000);
    for image in [
        format!("(module (bad) (;{name}{name};))"),
        format!("(module (func) (export \"{name}\" (func 0)) (export \"{name}\" (func 0)))"),
    ] {
        let error = loader.check(image.as_bytes()).unwrap_err().to_string();
        assert!((10..5000).contains(&error.len()), "{} bytes", error.len());
        assert_eq!(error, Wasm::default().check(image.as_bytes()).unwrap_err().to_string());
    }
    let absent = Compiler::Process { program: "/nonexistent".into(), arguments: Vec::new() };
    let error = Wasm::with_compiler(absent).check(wrong).unwrap_err().to_string();
    assert!(error.starts_with("/nonexistent: the compiler failed: "), "{error}");
}
