//! Kernels of users in PTX.
//!
//! The image is the text of a PTX module; its first `.entry` is the kernel. It takes four parameters of eight bytes: the
//! address of card memory, its size (bytes), and the addresses of sixteen argument words and of sixteen result words, which are
//! zero before. It is launched with as many blocks of 256 threads as fill the GPU, needs all banks, runs to its end and cannot
//! resume. An entry with the name [`EVENT_FUNCTION`] decides on events instead: see [`PtxEventKernel`].

use std::ffi::CString;

use millstream_card_abi::command::{Cause, Fault};
use millstream_card_abi::registers::KERNEL_WORDS;
use millstream_gpu::{CudaMemory, Gpu, Module, Parameter};
use millstream_shm::PAGE;

use super::{failed, wait};
use crate::kernel::events::{EVENT_FUNCTION, PtxEventKernel};
use crate::kernel::{Kernel, KernelLoader, KernelRun, LoadedKernel};

/// Bytes of the argument words, and of the result words.
const WORDS: usize = 8 * KERNEL_WORDS;

/// Loads images of PTX on the GPU of the card's memory.
#[derive(Debug)]
pub(crate) struct PtxLoader {
    gpu: Gpu,
}

impl PtxLoader {
    pub(crate) fn new(gpu: Gpu) -> PtxLoader {
        PtxLoader { gpu }
    }
}

impl KernelLoader for PtxLoader {
    fn format(&self) -> &'static str {
        "PTX"
    }

    fn recognises(&self, image: &[u8]) -> bool {
        let text = image.trim_ascii_start();
        text.starts_with(b".version") || text.starts_with(b"//")
    }

    fn load(&self, image: &[u8]) -> Result<LoadedKernel, Fault> {
        let first = image.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let unknown = || Fault::new(Cause::KernelFormat, first);
        let name = std::str::from_utf8(image).ok().and_then(entry_name).ok_or_else(unknown)?;
        let text = CString::new(image).map_err(|_| unknown())?;
        let entry = CString::new(name).map_err(|_| unknown())?;
        let module = Module::load(&self.gpu, &text).map_err(|error| failed(&error))?;
        module.function(&entry).map_err(|error| failed(&error))?;
        if name == EVENT_FUNCTION {
            return Ok(LoadedKernel { name: name.to_owned(), kernel: Box::new(PtxEventKernel::new(module)) });
        }
        let words = CudaMemory::allocate(&self.gpu, PAGE).map_err(|error| failed(&error))?;
        Ok(LoadedKernel { name: name.to_owned(), kernel: Box::new(PtxKernel { module, entry, words }) })
    }
}

/// Checks that PTX has a function for events as its first entry.
///
/// # Errors
/// What is wrong.
pub fn check_ptx_for_events(image: &[u8]) -> Result<(), String> {
    match std::str::from_utf8(image).ok().and_then(entry_name) {
        Some(EVENT_FUNCTION) => Ok(()),
        Some(other) => Err(format!("its first .entry is {other}, expected {EVENT_FUNCTION}")),
        None => Err("is no PTX with an .entry".to_owned()),
    }
}

/// Name of the first entry of a module.
fn entry_name(text: &str) -> Option<&str> {
    let code = text.lines().map(|line| line.split("//").next().unwrap_or_default());
    let line = code.into_iter().find(|line| line.split_whitespace().any(|word| word == ".entry"))?;
    let (_, name) = line.split_once(".entry")?;
    let name = name.trim_start();
    let end = name.find(|letter: char| !(letter.is_ascii_alphanumeric() || "_$%".contains(letter)));
    Some(&name[..end.unwrap_or(name.len())]).filter(|name| !name.is_empty())
}

struct PtxKernel {
    module: Module,
    entry: CString,
    /// The argument words, then the result words.
    words: CudaMemory,
}

impl Kernel for PtxKernel {
    fn run(&mut self, run: &mut KernelRun<'_>) -> Result<(), Fault> {
        let banks = run.banks();
        // The GPU does not confine a kernel to banks.
        let memory = banks.whole().ok_or(Fault::new(Cause::BanksNotGranted, banks.mask()))?;
        let memory = memory.gpu_memory().ok_or(Fault::new(Cause::MemoryNotMapped, banks.mask()))?;
        if let Some(state) = run.resume() {
            return Err(Fault::new(Cause::KernelNotResumable, state[0]));
        }
        let mut words = [0; 2 * WORDS];
        for (bytes, word) in words.as_chunks_mut().0.iter_mut().zip(run.arguments()) {
            *bytes = word.to_le_bytes();
        }
        let launched = self.words.write(0, &words).and_then(|()| {
            let function = self.module.function(&self.entry)?;
            let parameters = [
                Parameter::Address(memory, 0),
                Parameter::Word(memory.len() as u64),
                Parameter::Address(&self.words, 0),
                Parameter::Address(&self.words, WORDS as u64),
            ];
            // SAFETY: the memory lives until the launch has ended: see `wait`. A user's kernel that leaves card memory, or takes
            // other parameters, acts with the rights of this process, which its author has (SECURITY.md).
            unsafe { self.module.launch(function, u32::MAX, &parameters) }
        });
        launched.map_err(|error| failed(&error))?;
        wait(&self.module, run)?;
        self.words.read(0, &mut words).map_err(|error| failed(&error))?;
        for (index, word) in words[WORDS..].as_chunks().0.iter().enumerate() {
            run.set_result(index, u64::from_le_bytes(*word));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_entry_names_the_kernel() {
        let text = "//\n// .entry no(\n.version 7.0\n.target sm_70\n.visible .entry sum_1(\n\t.param .u64 a\n)\n.entry b()";
        assert_eq!(entry_name(text), Some("sum_1"));
        assert_eq!(entry_name(".version 7.0\n.entry\n"), None);
        assert_eq!(entry_name(""), None);
    }
}
