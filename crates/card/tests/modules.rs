//! WebAssembly modules that commands of the queue start, on a card of this process.

use std::sync::Arc;
use std::time::Duration;

use millstream_card::{Card, Ring, RingLayout};
use millstream_card_abi::command::Descriptor;
use millstream_card_abi::{CardName, MemoryRange};
use millstream_card_server::{CardConfig, ExitReason, Lifetime, serve};
use millstream_wasm::Wasm;

const TIMEOUT: Duration = Duration::from_secs(20);

/// Adds 1 to the word at its first argument.
const MODULE: &str = r#"(module $add
    (import "millstream_1" "argument" (func $argument (param i32) (result i64)))
    (import "millstream_1" "address" (func $address (param i64 i64) (result i32)))
    (memory (export "memory") 1)
    (func (export "run") (local $at i32)
        (local.set $at (call $address (call $argument (i32.const 0)) (i64.const 8)))
        (i64.store (local.get $at) (i64.add (i64.load (local.get $at)) (i64.const 1)))))"#;

#[test]
fn a_command_runs_a_module_on_all_banks_of_the_card() {
    const BANK: u64 = 1 << 20;
    for bank_count in [1, 2, 64] {
        let name: CardName = format!("test-{}-modules-{bank_count}", std::process::id()).parse().unwrap();
        let mut config = CardConfig::new(name.clone(), BANK);
        (config.bank_bytes, config.bank_count) = (BANK, bank_count);
        config.loaders = vec![Arc::new(Wasm::default())];
        let (lifetime, launcher) = std::io::pipe().unwrap();
        config.lifetime = Lifetime::Launcher(lifetime.into());
        let serving = std::thread::spawn(move || serve(config));

        let card = Card::open(&name, TIMEOUT).unwrap();
        card.load_image(0, MODULE.as_bytes(), 64 << 10).unwrap();
        let mut ring = Ring::open(&card, RingLayout::at(0, 8)).unwrap();
        // A word of the first bank and one of the last.
        for offset in [128 << 10, u64::from(bank_count) * BANK - 8] {
            card.memory().write(offset, &41_u64.to_le_bytes()).unwrap();
            let args = MemoryRange::new(offset, 8);
            let command =
                Descriptor { region: 0, flags: 0, args, result: MemoryRange::new(0, 0), cookie: offset };
            ring.submit(&command).unwrap();
            let completion = ring.wait(TIMEOUT).unwrap();
            assert_eq!((completion.cookie, completion.outcome), (offset, Ok(())), "{bank_count} banks");
            assert_eq!(card.memory().read_array(offset).unwrap(), 42_u64.to_le_bytes());
        }
        drop((ring, card, launcher));
        assert_eq!(serving.join().unwrap().unwrap(), ExitReason::LauncherExited);
    }
}
