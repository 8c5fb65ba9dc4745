//! A loader of functions for events that are part of this program, in place of WebAssembly: the event builder treats them
//! alike, and the tests need no compiler for modules. `crates/wasm/tests` tests WebAssembly functions.

use millstream_card_abi::command::Fault;
use millstream_card_abi::registers::KernelWords;
use millstream_card_server::kernel::events::function::{EventLoop, EventView, FLAGS, FunctionForEvents};
use millstream_card_server::kernel::events::run_on_events;
use millstream_card_server::kernel::{Kernel, KernelLoader, KernelRun, LoadedKernel};
use millstream_card_server::{CardConfig, serve};
use millstream_evb::process::card::CardProcess;
use std::error::Error;
use std::sync::Arc;

/// Image of a function that accepts every event that argument 0 divides, and those in which a fragment is missing or
/// corrupt.
pub(crate) const IMAGE: &str = "(test-function modulus)";

/// Serves a card that loads [`IMAGE`].
pub(crate) fn serve_card(card: &CardProcess) -> Result<(), Box<dyn Error>> {
    let mut config = CardConfig::for_launcher(card.name.clone(), card.memory.0, card.spin)?;
    config.memory_kind = card.kind.parse()?;
    config.loaders = vec![Arc::new(Loader)];
    serve(config)?;
    Ok(())
}

struct Loader;

impl KernelLoader for Loader {
    fn format(&self) -> &'static str {
        "name of a function of the tests"
    }

    fn recognises(&self, image: &[u8]) -> bool {
        image == IMAGE.as_bytes()
    }

    fn load(&self, _image: &[u8]) -> Result<LoadedKernel, Fault> {
        Ok(LoadedKernel { name: "modulus".to_owned(), kernel: Box::new(Modulus::default()) })
    }
}

#[derive(Default)]
struct Modulus {
    events: EventLoop,
}

struct Function {
    modulus: u64,
}

impl Kernel for Modulus {
    fn run(&mut self, run: &mut KernelRun<'_>) -> Result<(), Fault> {
        run_on_events(run, FLAGS, |events| self.events.run(events, &mut Function { modulus: 1 }))
    }
}

impl FunctionForEvents for Function {
    fn begin(&mut self, arguments: &KernelWords) -> Result<(), Fault> {
        self.modulus = arguments[0];
        Ok(())
    }

    fn call(&mut self, event: &EventView<'_>) -> Result<u32, Fault> {
        let is_damaged = event.fragments.iter().any(|fragment| fragment.status != 0);
        Ok(u32::from(is_damaged || event.event.is_multiple_of(self.modulus)))
    }
}
