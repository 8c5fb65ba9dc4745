//! What interrupts modules that compute: every millisecond each of them looks whether it may go on.

use std::sync::{Condvar, Mutex, Once, PoisonError};
use std::time::Duration;

use wasmtime::Engine;

/// Time between two looks.
const PERIOD: Duration = Duration::from_millis(1);

/// Engines with a module that runs.
static ENGINES: Mutex<Vec<Engine>> = Mutex::new(Vec::new());
static STARTED: Condvar = Condvar::new();

/// One run; as long as it lives, its engine's epochs go on.
pub(crate) struct Ticking {
    engine: Engine,
}

impl Ticking {
    pub(crate) fn start(engine: &Engine) -> Ticking {
        static THREAD: Once = Once::new();
        THREAD.call_once(|| {
            let thread = std::thread::Builder::new().name("wasm-ticker".to_owned());
            thread.spawn(tick).expect("the process can have one more thread");
        });
        ENGINES.lock().unwrap_or_else(PoisonError::into_inner).push(engine.clone());
        STARTED.notify_one();
        Ticking { engine: engine.clone() }
    }
}

impl Drop for Ticking {
    fn drop(&mut self) {
        let mut engines = ENGINES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = engines.iter().position(|engine| Engine::same(engine, &self.engine)) {
            engines.swap_remove(at);
        }
    }
}

/// Sleeps while nothing runs.
fn tick() {
    loop {
        let engines = ENGINES.lock().unwrap_or_else(PoisonError::into_inner);
        let engines = STARTED.wait_while(engines, |engines| engines.is_empty());
        engines.unwrap_or_else(PoisonError::into_inner).iter().for_each(Engine::increment_epoch);
        std::thread::sleep(PERIOD);
    }
}
