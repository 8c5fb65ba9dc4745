//! Periodic interruption of running modules: each module checks every millisecond whether it may continue.

use std::sync::{Condvar, Mutex, Once, PoisonError};
use std::time::Duration;

use wasmtime::Engine;

/// Time between two checks.
const PERIOD: Duration = Duration::from_millis(1);

/// Engines with a running module.
static ENGINES: Mutex<Vec<Engine>> = Mutex::new(Vec::new());
static STARTED: Condvar = Condvar::new();

/// One run: its engine's epoch advances while this value lives.
pub(crate) struct EpochGuard {
    engine: Engine,
}

impl EpochGuard {
    pub(crate) fn start(engine: &Engine) -> EpochGuard {
        static THREAD: Once = Once::new();
        THREAD.call_once(|| {
            let thread = std::thread::Builder::new().name("wasm-ticker".to_owned());
            thread.spawn(tick).expect("a thread can be started");
        });
        ENGINES.lock().unwrap_or_else(PoisonError::into_inner).push(engine.clone());
        STARTED.notify_one();
        EpochGuard { engine: engine.clone() }
    }
}

impl Drop for EpochGuard {
    fn drop(&mut self) {
        let mut engines = ENGINES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = engines.iter().position(|engine| Engine::same(engine, &self.engine)) {
            engines.swap_remove(at);
        }
    }
}

/// Advances the epochs; sleeps while no module runs.
fn tick() {
    loop {
        let engines = ENGINES.lock().unwrap_or_else(PoisonError::into_inner);
        let engines = STARTED.wait_while(engines, |engines| engines.is_empty());
        engines.unwrap_or_else(PoisonError::into_inner).iter().for_each(Engine::increment_epoch);
        std::thread::sleep(PERIOD);
    }
}
