//! The queue engine with descriptors that are nearly valid, random, or overwritten concurrently.

use millstream_camera::format::TRACE_BYTES;
use millstream_card_abi::events::{CLUSTER7, Cluster7Args, PacketBuffer, VERIFY, VerifyArgs};
use millstream_fragment::mfp::{self, Repr};
use millstream_fragment::{Alignment, Fragment, SourceId, SourceKind};
use proptest::prelude::*;

use super::*;
use crate::hardware::Hardware;
use crate::kernel::Kernel;
use crate::kernel::builtin::BUILTINS;
use crate::region::control::RegionControl;
use crate::region::slot::KernelSlot;

const MEMORY: u64 = 256 << 10;
const SLOTS: u32 = 8;
const COMMANDS: u64 = 0;
const COMPLETIONS: u64 = 4096;
const ARGS: u64 = 8192;
const RESULT: u64 = 12 << 10;
const GEOMETRY: u64 = 16 << 10;
const DECISIONS: u64 = 32 << 10;
const PACKETS: u64 = 64 << 10;
/// Length of the buffer for a packet of three trace fragments.
const PACKET: u64 = 32 << 10;
const FIRST_EVENT: u64 = 500;
const N_EVENTS: u64 = 3;

/// An engine with `verify` in region 0 and `cluster7` in region 1.
fn engine() -> QueueEngine {
    let hardware = Hardware::emulated(MEMORY);
    let interrupt_fd = hardware.interrupt_fd.clone();
    let kernels = [VERIFY, CLUSTER7].map(|name| {
        let slot = KernelSlot::default();
        let kernel = BUILTINS.iter().find(|kernel| kernel.name == name).expect("a kernel of every card");
        slot.load((kernel.make)());
        slot
    });
    let context = RegionContext {
        registers: hardware.registers.clone(),
        hardware,
        started: Instant::now(),
        bank_bytes: MEMORY,
        bank_count: 1,
        builtin_kernels: Vec::new(),
        loaders: Vec::new(),
        stop: Arc::default(),
        regions: (0..2).map(|_| RegionControl::default()).collect(),
        kernels: kernels.into(),
        queue: QueueControl::default(),
        command_timeout: Duration::MAX,
        polling: PollPolicy { spin: Duration::ZERO, heartbeat: Duration::from_millis(100) },
        controller_wake: Arc::new(EventFd::latch().unwrap()),
    };
    QueueEngine::new(Arc::new(context), interrupt_fd, Box::new(|| {}))
}

fn open_rings(engine: &mut QueueEngine, generation: u32) {
    let registers = &engine.context.registers.clone();
    registers.command_base().store(COMMANDS, Ordering::Relaxed);
    registers.completion_base().store(COMPLETIONS, Ordering::Relaxed);
    registers.ring_slots().store(SLOTS, Ordering::Relaxed);
    registers.producer().store(0, Ordering::Relaxed);
    registers.ring_generation().store(generation, Ordering::Relaxed);
    assert!(engine.step());
    assert_eq!(engine.registers().ring_active().load(Ordering::Relaxed), generation);
    assert_eq!(engine.registers().ring_fault().load(Ordering::Relaxed), 0);
}

/// `good`, or sometimes another number: small, about the size of memory, or any.
fn nearly(good: u64) -> impl Strategy<Value = u64> {
    prop_oneof![
        40 => Just(good),
        1 => 0u64..20,
        1 => (0u64..MEMORY / 8).prop_map(|n| 8 * n),
        1 => MEMORY - 70..MEMORY + 70,
        1 => any::<u64>(),
    ]
}

/// Arguments of the event kernels, nearly valid.
fn args(region: u64) -> impl Strategy<Value = Vec<u8>> {
    let packet = |source: u64| {
        (nearly(PACKETS + source * PACKET), nearly(PACKET), nearly(source)).prop_map(
            |(offset, capacity, source)| PacketBuffer {
                offset,
                capacity,
                source: source as u32,
                reserved: 0,
            },
        )
    };
    let numbers = [nearly(FIRST_EVENT), nearly(N_EVENTS), nearly(GEOMETRY), nearly(DECISIONS)];
    (numbers, nearly(300), [packet(0), packet(1), packet(2)], 2usize..40).prop_map(
        move |([first_event, n_events, geometry, decisions], threshold, packets, n_packets)| {
            let n_events = n_events as u32;
            let packets = &packets[..n_packets.min(3)];
            let mut bytes = Vec::new();
            match region {
                0 => VerifyArgs { first_event, n_events, n_sources: 0 }.append_to(packets, &mut bytes),
                _ => Cluster7Args {
                    first_event,
                    n_events,
                    trace_sources: [0, 1, 2],
                    threshold: threshold as u32,
                    geometry,
                    decisions,
                    ..Cluster7Args::default()
                }
                .append_to(packets, &mut bytes),
            }
            bytes
        },
    )
}

/// Writes an intact packet of each source.
fn write_packets(memory: &Memory) {
    for source in 0..3 {
        let payload = vec![source as u8 * 20; TRACE_BYTES];
        let fragments: Vec<_> =
            (0..N_EVENTS).map(|event| Fragment::new(FIRST_EVENT + event, &payload)).collect();
        let repr = Repr {
            source: SourceId(source),
            kind: SourceKind(2),
            first_event: FIRST_EVENT,
            n_events: N_EVENTS as u32,
            n_fragments: N_EVENTS as u32,
            alignment: Alignment::CACHE_LINE,
        };
        let mut packet = vec![0; PACKET as usize];
        mfp::assemble(&mut packet, repr, &fragments).unwrap();
        memory.write(PACKETS + u64::from(source) * PACKET, &packet).unwrap();
    }
}

#[derive(Clone, Debug)]
enum Step {
    /// Submits these bytes as a descriptor.
    Bytes([u8; ENTRY_BYTES]),
    /// Submits a descriptor with these fields, with arguments in memory.
    Fields { region: u64, flags: u32, exact: bool, args: Vec<u8>, numbers: [u64; 4] },
    /// Overwrites memory after the rings.
    OverwriteMemory { offset: u64, bytes: Vec<u8> },
    /// Overwrites registers of the card.
    OverwriteRegisters { value: u64 },
    /// Sets the producer to any value, then opens the rings again.
    Overrun { producer: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    let fields = (nearly(0), any::<bool>()).prop_flat_map(|(region, one_more)| {
        let region = region.wrapping_add(one_more.into());
        let numbers = [nearly(ARGS), nearly(0), nearly(RESULT), nearly(32 * N_EVENTS)];
        let flags = prop_oneof![10 => 0..=region.min(1) as u32, 1 => any::<u32>()];
        (Just(region), flags, prop::bool::weighted(0.9), args(region), numbers)
    });
    prop_oneof![
        1 => proptest::array::uniform32(any::<[u8; 2]>())
            .prop_map(|pairs| Step::Bytes(pairs.as_flattened().try_into().unwrap())),
        12 => fields.prop_map(|(region, flags, exact, args, numbers)| {
            Step::Fields { region, flags, exact, args, numbers }
        }),
        1 => (ARGS..MEMORY - 64, proptest::collection::vec(any::<u8>(), 0..64))
            .prop_map(|(offset, bytes)| Step::OverwriteMemory { offset, bytes }),
        1 => any::<u64>().prop_map(|value| Step::OverwriteRegisters { value }),
        1 => any::<u64>().prop_map(|producer| Step::Overrun { producer }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn every_descriptor_gets_a_completion(
        steps in proptest::collection::vec(step(), 1..60),
    ) {
        let mut engine = engine();
        let memory = engine.memory.clone();
        let mut generation = 1;
        let mut submitted = 0u64;
        open_rings(&mut engine, generation);
        write_packets(&memory);
        for (at, step) in steps.into_iter().enumerate() {
            let descriptor = match step {
                Step::Bytes(bytes) => bytes,
                Step::Fields { region, flags, exact, args, numbers } => {
                    memory.write(ARGS, &args).unwrap();
                    let [args_offset, args_len, result_offset, result_len] = numbers;
                    let args = if exact {
                        MemoryRange::new(ARGS, args.len() as u64)
                    } else {
                        MemoryRange::new(args_offset, args_len)
                    };
                    Descriptor {
                        region: region as u32,
                        flags,
                        args,
                        result: MemoryRange::new(result_offset, result_len),
                        cookie: at as u64,
                    }
                    .to_bytes()
                }
                Step::OverwriteMemory { offset, bytes } => {
                    memory.write(offset, &bytes).unwrap();
                    continue;
                }
                Step::OverwriteRegisters { value } => {
                    let registers = &engine.context.registers.clone();
                    registers.consumer().store(value, Ordering::Relaxed);
                    registers.completed().store(value, Ordering::Relaxed);
                    registers.commands().store(value, Ordering::Relaxed);
                    registers.heartbeat().store(value, Ordering::Relaxed);
                    registers.doorbell().store(value as u32, Ordering::Relaxed);
                    registers.interrupt_arm().store(value as u32, Ordering::Relaxed);
                    continue;
                }
                Step::Overrun { producer } => {
                    engine.registers().producer().store(producer, Ordering::Relaxed);
                    for _ in 0..=SLOTS {
                        engine.step();
                    }
                    generation += 1;
                    submitted = 0;
                    open_rings(&mut engine, generation);
                    continue;
                }
            };
            let slot = submitted % u64::from(SLOTS) * ENTRY_BYTES as u64;
            memory.write(COMMANDS + slot, &descriptor).unwrap();
            submitted += 1;
            engine.registers().producer().store(submitted, Ordering::Release);
            prop_assert!(engine.step());
            prop_assert!(!engine.step(), "one command, one step");
            prop_assert_eq!(engine.registers().completed().load(Ordering::Acquire), submitted);
            // A result may have overwritten the completion ring, but not after the completion.
            let entry = memory.read_array(COMPLETIONS + slot).unwrap();
            let completion = Completion::from_bytes(&entry);
            prop_assert_eq!(completion.index, submitted - 1);
            prop_assert_eq!(&completion.cookie.to_le_bytes(), &descriptor[40..48]);
            if let Err(fault) = completion.outcome {
                prop_assert_ne!(fault.cause, Cause::KernelFailed, "a kernel panicked");
                prop_assert!(!matches!(fault.cause, Cause::Unknown(_)));
            }
        }
    }
}

#[test]
fn counters_add_up_and_survive_new_rings() {
    let mut engine = engine();
    for generation in 1..=3 {
        open_rings(&mut engine, generation);
        let bad = Descriptor {
            region: 77,
            flags: 0,
            args: MemoryRange::default(),
            result: MemoryRange::default(),
            cookie: 9,
        };
        engine.memory.write(COMMANDS, &bad.to_bytes()).unwrap();
        engine.registers().producer().store(1, Ordering::Release);
        engine.registers().doorbell().fetch_add(1, Ordering::SeqCst);
        assert!(engine.step());
        let registers = &engine.context.registers.clone();
        let times = u64::from(generation);
        assert_eq!(registers.commands().load(Ordering::Relaxed), times);
        assert_eq!(registers.failed_commands().load(Ordering::Relaxed), times);
        assert_eq!(registers.errors().load(Ordering::Relaxed), times);
        assert_eq!(registers.doorbells().load(Ordering::Relaxed), times);
        assert_eq!(registers.consumer().load(Ordering::Relaxed), 1);
    }
}

/// Fails unless it was granted the only bank of the card, and no other.
struct OneBank;

impl Kernel for OneBank {
    fn run(&mut self, run: &mut KernelRun<'_>) -> Result<(), Fault> {
        match run.banks().mask() {
            1 => Ok(()),
            mask => Err(Fault::new(Cause::NoSuchBank, mask)),
        }
    }
}

#[test]
fn a_command_is_granted_the_banks_that_exist() {
    let mut engine = engine();
    engine.context.kernels[0].load(Box::new(OneBank));
    open_rings(&mut engine, 1);
    engine.memory.write(COMMANDS, &[0; ENTRY_BYTES]).unwrap();
    engine.registers().producer().store(1, Ordering::Release);
    assert!(engine.step());
    let completion = Completion::from_bytes(&engine.memory.read_array(COMPLETIONS).unwrap());
    assert_eq!(completion.outcome, Ok(()));
}

/// Reports the largest numbers.
struct LargestResults;

impl Kernel for LargestResults {
    fn run(&mut self, run: &mut KernelRun<'_>) -> Result<(), Fault> {
        (0..KERNEL_WORDS).for_each(|index| run.set_result(index, u64::MAX));
        Ok(())
    }
}

#[test]
fn counters_may_overflow() {
    let mut engine = engine();
    engine.context.kernels[0].load(Box::new(LargestResults));
    open_rings(&mut engine, 1);
    engine.memory.write(COMMANDS, &[0; ENTRY_BYTES]).unwrap();
    for command in 1..=3u64 {
        engine.registers().producer().store(command, Ordering::Release);
        assert!(engine.step());
        assert_eq!(engine.registers().payload_bytes().load(Ordering::Relaxed), command.wrapping_neg());
    }
}

/// A killed holder leaves commands behind. Its memory is cleared, and a descriptor of zeros is a valid one.
#[test]
fn commands_of_a_lease_that_has_ended_do_not_run() {
    let mut engine = engine();
    engine.context.kernels[0].load(Box::new(OneBank));
    open_rings(&mut engine, 1);
    engine.registers().producer().store(3, Ordering::Release);
    engine.context.queue.close();
    assert!(!engine.step(), "no command begins between two leases");
    engine.context.hardware.clear().unwrap();
    engine.context.queue.open();
    assert!(engine.step());
    assert!(!engine.step(), "the rings are closed");
    let mut bytes = vec![0xff; MEMORY as usize];
    engine.memory.read(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0), "the next holder finds the card clear");
    assert_eq!(engine.registers().ring_fault().load(Ordering::Relaxed), Cause::Interrupted.code());

    // The next holder's rings, and those of a user who has nothing to run at the end of a lease, go on.
    open_rings(&mut engine, 2);
    engine.context.queue.close();
    assert!(!engine.step());
    engine.context.queue.open();
    assert!(!engine.step());
    engine.registers().producer().store(1, Ordering::Release);
    assert!(engine.step());
    let completion = Completion::from_bytes(&engine.memory.read_array(COMPLETIONS).unwrap());
    assert_eq!((completion.index, completion.outcome), (0, Ok(())));
}

/// A holder whose lease was revoked still has the rings in its process.
#[test]
fn rings_of_a_lease_end_with_it_also_without_commands() {
    let mut engine = engine();
    engine.context.kernels[0].load(Box::new(OneBank));
    engine.context.queue.begin_lease();
    open_rings(&mut engine, 1);
    assert!(!engine.step());
    engine.context.queue.close();
    assert!(!engine.step());
    engine.context.queue.open();
    engine.context.queue.begin_lease();
    assert!(engine.step());
    assert_eq!(engine.registers().ring_fault().load(Ordering::Relaxed), Cause::Interrupted.code());
    engine.registers().producer().store(1, Ordering::Release);
    assert!(!engine.step(), "the rings are closed");
    assert_eq!(engine.registers().consumer().load(Ordering::Relaxed), 0);
    open_rings(&mut engine, 2);
    assert!(!engine.step(), "the rings of the next lease are open");
}
