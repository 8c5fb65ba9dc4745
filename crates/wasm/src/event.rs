//! The function for events of a module: export `event`.
//!
//! ```text
//!     0                declared        + host page       + banks
//!     │ module's memory │ EventFragment… │ bank │ bank │ nothing: access traps
//! ```
//!
//! The module gets the address of a table with one [`EventFragment`] per source, in a page that its host adds to its
//! memory. Payload stays in the banks.

use millstream_card_abi::command::Fault;
use millstream_card_abi::events::{EventFragment, MAX_SOURCES, STATUS_MISSING};
use millstream_card_abi::registers::KernelWords;
use millstream_card_server::kernel::GrantedBanks;
use millstream_card_server::kernel::events::function::{EventView, FunctionForEvents};
use wasmtime::{FuncType, Instance, Store, TypedFunc, ValType};

use crate::host::Host;
use crate::kernel::fault;
use crate::window::{WASM_PAGE, Window};

/// Name of the export.
pub(crate) const EXPORT: &str = "event";

/// Memory for the table of fragments.
pub(crate) const HOST_BYTES: usize = WASM_PAGE;

const _: () = assert!(MAX_SOURCES as usize * EventFragment::BYTES <= HOST_BYTES);

/// Whether a function takes the event, the table and its length, and returns decisions.
pub(crate) fn has_signature(function: &FuncType) -> bool {
    let mut parameters = function.params();
    let mut results = function.results();
    matches!(
        (parameters.next(), parameters.next(), parameters.next(), parameters.next()),
        (Some(ValType::I64), Some(ValType::I32), Some(ValType::I32), None)
    ) && matches!((results.next(), results.next()), (Some(ValType::I32), None))
}

/// The exported function of an instance.
pub(crate) struct WasmEventFunction<'s, 'a> {
    store: &'s mut Store<Host>,
    function: TypedFunc<(u64, u32, u32), u32>,
    window: &'s Window,
    /// Offset of the table in the module's memory.
    table: usize,
    banks: GrantedBanks<'a>,
    fuel: u64,
    bytes: Vec<u8>,
}

impl<'s, 'a> WasmEventFunction<'s, 'a> {
    /// The function of an instance whose table of fragments is at `table`.
    pub(crate) fn new(
        store: &'s mut Store<Host>,
        instance: &Instance,
        window: &'s Window,
        table: usize,
        banks: GrantedBanks<'a>,
    ) -> wasmtime::Result<WasmEventFunction<'s, 'a>> {
        let function = instance.get_typed_func(&mut *store, EXPORT)?;
        let fuel = store.get_fuel().unwrap_or(0);
        Ok(WasmEventFunction { store, function, window, table, banks, fuel, bytes: Vec::new() })
    }

    /// Writes the table of fragments into the module's memory.
    fn write_table(&mut self, event: &EventView<'_>) {
        self.bytes.clear();
        for (fragment, &offset) in event.fragments.iter().zip(event.offsets) {
            let is_missing = fragment.status & STATUS_MISSING != 0;
            // The window is addressable with 32 bits.
            let address = if !is_missing { self.window.address(&self.banks, offset) as u32 } else { 0 };
            self.bytes.extend(EventFragment { address, ..*fragment }.to_bytes());
        }
        let to = self.window.base().wrapping_add(self.table);
        debug_assert!(self.bytes.len() <= HOST_BYTES);
        // SAFETY: the table is in the window, and holds the most sources of a command. The module does not run.
        unsafe { to.copy_from_nonoverlapping(self.bytes.as_ptr(), self.bytes.len()) };
    }
}

impl FunctionForEvents for WasmEventFunction<'_, '_> {
    fn begin(&mut self, arguments: &KernelWords) -> Result<(), Fault> {
        self.store.data_mut().set_arguments(arguments);
        Ok(())
    }

    fn call(&mut self, event: &EventView<'_>) -> Result<u32, Fault> {
        self.write_table(event);
        // At most `MAX_SOURCES`.
        let (table, count) = (self.table as u32, event.fragments.len() as u32);
        let decisions = self.function.call(&mut *self.store, (event.event, table, count));
        decisions.map_err(|error| fault(&error, self.fuel))
    }
}
