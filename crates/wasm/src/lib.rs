//! WebAssembly kernels for the regions of cards.
//!
//! A user's kernel is a WebAssembly module; `docs/kernels.md` says what it imports and exports. It sees the
//! banks that its run was given in its own linear memory, in place ([`window`]), and nothing else of the card,
//! the process or the system. It is bounded by fuel, by a deadline and by the wish to stop ([`ticker`]); a
//! trap, a loop or a reach for other memory ends it with a cause that the region shows.
//!
//! ```
//! use std::sync::Arc;
//!
//! use millstream_card::region::kernel::Loader;
//! use millstream_wasm::Wasm;
//!
//! let module = r#"(module $nothing
//!     (import "millstream_1" "result" (func $result (param i32 i64)))
//!     (memory (export "memory") 1)
//!     (func (export "run") (call $result (i32.const 0) (i64.const 7))))"#;
//! let loader: Arc<dyn Loader> = Arc::new(Wasm);
//! assert!(loader.recognises(module.as_bytes()));
//! assert_eq!(loader.load(module.as_bytes()).unwrap().name, "nothing");
//! ```

mod host;
mod kernel;
mod ticker;
mod window;

use millstream_card::command::{Cause, Fault};
use millstream_card::region::kernel::{LoadedKernel, Loader};

use crate::kernel::WasmKernel;

/// Largest image [bytes]. Compiling takes time in proportion.
pub const MAX_IMAGE_BYTES: usize = 1 << 20;

/// Most memory of a module's own [bytes]; banks come on top of it.
pub const MAX_OWN_BYTES: usize = 64 << 20;

/// Most memory that a module can address, its own and its banks together [bytes].
pub const ADDRESSABLE_BYTES: usize = 4 << 30;

/// The loader of WebAssembly modules, binary or text.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wasm;

/// Why an image is no kernel, for people.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// It is too large.
    #[error("image has {0} bytes, more than {MAX_IMAGE_BYTES}")]
    TooLarge(usize),
    /// Its own memory is too large.
    #[error("module asks for {0} bytes of memory of its own, more than {MAX_OWN_BYTES}")]
    MemoryTooLarge(u64),
    /// It is no module, or none with the imports and exports of a kernel.
    #[error("{0}")]
    Module(String),
}

impl ImageError {
    fn fault(&self, image: &[u8]) -> Fault {
        match self {
            ImageError::TooLarge(bytes) => Fault::new(Cause::KernelTooLarge, *bytes as u64),
            ImageError::MemoryTooLarge(bytes) => Fault::new(Cause::KernelTooLarge, *bytes),
            ImageError::Module(_) => {
                let first = image.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
                Fault::new(Cause::KernelFormat, first)
            }
        }
    }
}

/// Checks an image as a card would that is to load it, and says in words what is wrong; its name if nothing is.
///
/// # Errors
/// [`ImageError`].
pub fn check(image: &[u8]) -> Result<String, ImageError> {
    WasmKernel::new(image).map(|kernel| kernel.name().to_owned())
}

impl Loader for Wasm {
    fn format(&self) -> &'static str {
        "WebAssembly module, binary or text"
    }

    fn recognises(&self, image: &[u8]) -> bool {
        image.starts_with(b"\0asm") || image.trim_ascii_start().starts_with(b"(module")
    }

    fn load(&self, image: &[u8]) -> Result<LoadedKernel, Fault> {
        let kernel = WasmKernel::new(image).map_err(|error| error.fault(image))?;
        Ok(LoadedKernel { name: kernel.name().to_owned(), kernel: Box::new(kernel) })
    }
}
