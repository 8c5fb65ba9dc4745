//! WebAssembly kernels for the regions of cards.
//!
//! A user's kernel is a WebAssembly module; `docs/kernels.md` documents its imports and exports. Its linear memory
//! contains the granted banks, mapped in place (`window`). It has no access to the rest of the card, the process or
//! the system. Limits on the compiler's process bound a load (`compiler`). Fuel, a deadline and interrupts (`ticker`) bound a
//! run. A trap or an invalid access ends it with a cause
//! in the region's registers.
//!
//! ```
//! use std::sync::Arc;
//!
//! use millstream_card_server::kernel::KernelLoader;
//! use millstream_wasm::Wasm;
//!
//! let module = r#"(module $nothing
//!     (import "millstream_1" "result" (func $result (param i32 i64)))
//!     (memory (export "memory") 1)
//!     (func (export "run") (call $result (i32.const 0) (i64.const 7))))"#;
//! let loader: Arc<dyn KernelLoader> = Arc::new(Wasm::default());
//! assert!(loader.recognises(module.as_bytes()));
//! assert_eq!(loader.load(module.as_bytes()).unwrap().name, "nothing");
//! ```

mod compiler;
mod event;
mod host;
mod kernel;
mod ticker;
mod window;

use millstream_card_abi::command::{Cause, Fault};
use millstream_card_server::kernel::{KernelLoader, LoadedKernel};

pub use crate::compiler::{Compiler, MAX_COMPILE_SECONDS, MAX_COMPILER_BYTES, compile_for_parent};
use crate::kernel::WasmKernel;

/// Largest image (bytes).
pub const MAX_IMAGE_BYTES: usize = 1 << 20;

/// Largest own memory of a module (bytes), without banks.
pub const MAX_OWN_BYTES: usize = 64 << 20;

/// Largest addressable memory of a module (bytes): its own and its banks.
pub const ADDRESSABLE_BYTES: usize = 4 << 30;

/// Most tables of a module.
pub const MAX_TABLES: usize = 4;

/// Most elements of a table. An element takes eight bytes of the card process.
pub const MAX_TABLE_ELEMENTS: usize = 1 << 16;

/// The loader of WebAssembly modules, binary or text.
#[derive(Clone, Debug, Default)]
pub struct Wasm {
    compiler: Compiler,
}

/// Why an image is not a kernel.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The image is too large.
    #[error("image has {0} bytes, more than {MAX_IMAGE_BYTES}")]
    TooLarge(usize),
    /// The own memory of the module is too large.
    #[error("module asks for {0} bytes of memory of its own, more than {MAX_OWN_BYTES}")]
    MemoryTooLarge(u64),
    /// The module has too many tables.
    #[error("module has {0} tables, more than {MAX_TABLES}")]
    TooManyTables(u32),
    /// A table of the module is too large.
    #[error("module asks for a table with {0} elements, more than {MAX_TABLE_ELEMENTS}")]
    TableTooLarge(u64),
    /// The module takes more than the compiler may.
    #[error(
        "module of {0} bytes takes more than {MAX_COMPILE_SECONDS} s of processor time or {MAX_COMPILER_BYTES} bytes of \
         memory to compile"
    )]
    TooCostly(usize),
    /// The compiler's process failed.
    #[error("{}: the compiler failed: {cause}", program.display())]
    Compiler {
        /// The program.
        program: std::path::PathBuf,
        /// What it said, or the system's error.
        cause: std::io::Error,
    },
    /// The image is not a module, or does not have the imports and exports of a kernel.
    #[error("{0}")]
    Module(String),
}

impl ImageError {
    fn fault(&self, image: &[u8]) -> Fault {
        match self {
            ImageError::TooLarge(bytes) | ImageError::TooCostly(bytes) => {
                Fault::new(Cause::KernelTooLarge, *bytes as u64)
            }
            ImageError::MemoryTooLarge(size) | ImageError::TableTooLarge(size) => {
                Fault::new(Cause::KernelTooLarge, *size)
            }
            ImageError::TooManyTables(tables) => Fault::new(Cause::KernelTooLarge, u64::from(*tables)),
            ImageError::Module(_) | ImageError::Compiler { .. } => {
                let first = image.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
                Fault::new(Cause::KernelFormat, first)
            }
        }
    }
}

impl Wasm {
    /// A loader with a compiler.
    #[must_use]
    pub fn with_compiler(compiler: Compiler) -> Wasm {
        Wasm { compiler }
    }

    /// Checks an image as a card does when it loads it. Returns the name of the module.
    ///
    /// # Errors
    /// [`ImageError`].
    pub fn check(&self, image: &[u8]) -> Result<String, ImageError> {
        WasmKernel::new(image, &self.compiler).map(|kernel| kernel.name().to_owned())
    }

    /// Checks the image of a module with a function for events. Returns the name of the module.
    ///
    /// # Errors
    /// [`ImageError`], also for a module without the export `event`.
    pub fn check_for_events(&self, image: &[u8]) -> Result<String, ImageError> {
        let kernel = WasmKernel::new(image, &self.compiler)?;
        if kernel.is_for_events() {
            return Ok(kernel.name().to_owned());
        }
        Err(ImageError::Module("module exports no function `event` (i64, i32, i32) -> i32".to_owned()))
    }
}

/// Text from its first word on: white space, line comments and nested block comments may precede it.
fn without_comments(mut text: &[u8]) -> &[u8] {
    loop {
        text = text.trim_ascii_start();
        if text.starts_with(b";;") {
            let end = text.iter().position(|byte| *byte == b'\n').unwrap_or(text.len());
            text = &text[end..];
            continue;
        }
        if !text.starts_with(b"(;") {
            return text;
        }
        let mut depth = 0;
        loop {
            match text {
                [b'(', b';', ..] => depth += 1,
                [b';', b')', ..] => depth -= 1,
                [] => return text,
                _ => {
                    text = &text[1..];
                    continue;
                }
            }
            text = &text[2..];
            if depth == 0 {
                break;
            }
        }
    }
}

impl KernelLoader for Wasm {
    fn format(&self) -> &'static str {
        "WebAssembly module, binary or text"
    }

    fn recognises(&self, image: &[u8]) -> bool {
        image.starts_with(b"\0asm") || without_comments(image).starts_with(b"(module")
    }

    fn load(&self, image: &[u8]) -> Result<LoadedKernel, Fault> {
        let kernel = WasmKernel::new(image, &self.compiler).map_err(|error| {
            if let ImageError::Compiler { .. } = error {
                eprintln!("millstream: {error}");
            }
            error.fault(image)
        })?;
        Ok(LoadedKernel { name: kernel.name().to_owned(), kernel: Box::new(kernel) })
    }
}
