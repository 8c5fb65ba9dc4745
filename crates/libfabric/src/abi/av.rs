//! Address vectors: a number for each address.

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void};
use std::sync::{Arc, Mutex};

use millstream_torus_core::NodeNumber;

use super::{error, fid, give, lock, no_bind, no_control, object, table};
use crate::ring::Address;
use crate::sys;

/// The addresses.
#[derive(Debug, Default)]
pub(super) struct Addresses {
    all: Vec<Option<Address>>,
    numbers: HashMap<NodeNumber, u64>,
}

impl Addresses {
    fn insert(&mut self, address: Address) -> u64 {
        let known = self.all.iter().position(|&other| other == Some(address));
        let number = known.unwrap_or_else(|| {
            self.all.push(Some(address));
            self.all.len() - 1
        }) as u64;
        self.numbers.insert(address.node, number);
        number
    }

    /// The address of a number.
    pub(super) fn get(&self, number: u64) -> Option<Address> {
        *self.all.get(usize::try_from(number).ok()?)?
    }

    /// The number of a node's address.
    pub(super) fn number(&self, node: NodeNumber) -> Option<u64> {
        self.numbers.get(&node).copied()
    }
}

#[repr(C)]
pub(super) struct AddressVector {
    fid: sys::fid_av,
    addresses: Arc<Mutex<Addresses>>,
}

impl AddressVector {
    pub(super) fn addresses(&self) -> &Arc<Mutex<Addresses>> {
        &self.addresses
    }
}

static AV: sys::fi_ops = sys::fi_ops {
    size: size_of::<sys::fi_ops>(),
    close: Some(super::close::<AddressVector>),
    bind: Some(no_bind),
    control: Some(no_control),
    ops_open: None,
    tostr: None,
    ops_set: None,
};
static AV_OPS: sys::fi_ops_av = sys::fi_ops_av {
    size: size_of::<sys::fi_ops_av>(),
    insert: Some(insert),
    insertsvc: Some(no_service),
    insertsym: Some(no_services),
    remove: Some(remove),
    lookup: Some(look_up),
    straddr: Some(describe),
    av_set: None,
};

pub(super) unsafe extern "C" fn open(
    _: *mut sys::fid_domain,
    attributes: *mut sys::fi_av_attr,
    av: *mut *mut sys::fid_av,
    context: *mut c_void,
) -> c_int {
    if attributes.is_null() || av.is_null() {
        return error(sys::FI_EINVAL);
    }
    // SAFETY: checked above. Shared vectors have a name; insertion with events has a flag: neither exists here.
    unsafe {
        if !(*attributes).name.is_null() || (*attributes).flags != 0 {
            return error(sys::FI_ENOSYS);
        }
        if (*attributes).type_ == sys::FI_AV_UNSPEC {
            (*attributes).type_ = sys::FI_AV_TABLE;
        }
        let fid = fid(sys::FI_CLASS_AV, context, &AV);
        let fid = sys::fid_av { fid, ops: table(&AV_OPS) };
        give(AddressVector { fid, addresses: Arc::default() }, av)
    }
}

unsafe extern "C" fn insert(
    av: *mut sys::fid_av,
    addresses: *const c_void,
    count: usize,
    numbers: *mut sys::fi_addr_t,
    _flags: u64,
    _context: *mut c_void,
) -> c_int {
    let mut inserted = 0;
    // SAFETY: `count` addresses, and as many places for numbers or none.
    unsafe {
        let mut known = lock(&object::<AddressVector, _>(av).addresses);
        for at in 0..count {
            let bytes = addresses.cast::<[u8; Address::BYTES]>().add(at).read();
            let number = Address::decode(&bytes).map(|address| known.insert(address));
            inserted += c_int::from(number.is_some());
            if !numbers.is_null() {
                numbers.add(at).write(number.unwrap_or(u64::MAX));
            }
        }
    }
    inserted
}

unsafe extern "C" fn no_service(
    _: *mut sys::fid_av,
    _: *const c_char,
    _: *const c_char,
    _: *mut sys::fi_addr_t,
    _: u64,
    _: *mut c_void,
) -> c_int {
    error(sys::FI_ENOSYS)
}

unsafe extern "C" fn no_services(
    _: *mut sys::fid_av,
    _: *const c_char,
    _: usize,
    _: *const c_char,
    _: usize,
    _: *mut sys::fi_addr_t,
    _: u64,
    _: *mut c_void,
) -> c_int {
    error(sys::FI_ENOSYS)
}

unsafe extern "C" fn remove(
    av: *mut sys::fid_av,
    numbers: *mut sys::fi_addr_t,
    count: usize,
    _flags: u64,
) -> c_int {
    // SAFETY: `count` numbers.
    unsafe {
        let mut known = lock(&object::<AddressVector, _>(av).addresses);
        for at in 0..count {
            if let Some(place) = known.all.get_mut(numbers.add(at).read() as usize) {
                *place = None;
            }
        }
    }
    0
}

unsafe extern "C" fn look_up(
    av: *mut sys::fid_av,
    number: sys::fi_addr_t,
    address: *mut c_void,
    length: *mut usize,
) -> c_int {
    // SAFETY: the caller's place of `length` bytes.
    unsafe {
        let Some(found) = lock(&object::<AddressVector, _>(av).addresses).get(number) else {
            return error(sys::FI_EINVAL);
        };
        copy_address(found, address, length);
    }
    0
}

/// Copies as much of an address as fits, and sets the whole length. Returns whether it fits.
///
/// # Safety
/// `to` is a place of `length` bytes.
pub(super) unsafe fn copy_address(address: Address, to: *mut c_void, length: *mut usize) -> bool {
    let bytes = address.encode();
    // SAFETY: the caller's place.
    unsafe {
        let place = length.read();
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.cast(), place.min(bytes.len()));
        length.write(bytes.len());
        place >= bytes.len()
    }
}

unsafe extern "C" fn describe(
    _: *mut sys::fid_av,
    address: *const c_void,
    text: *mut c_char,
    length: *mut usize,
) -> *const c_char {
    // SAFETY: an address, and a place of `length` bytes for its text.
    unsafe {
        let node = Address::decode(&address.cast::<[u8; Address::BYTES]>().read());
        let name = node.map_or("no address".to_owned(), |address| format!("torus node {}", address.node.0));
        let place = length.read();
        if place > 0 {
            let copied = name.len().min(place - 1);
            std::ptr::copy_nonoverlapping(name.as_ptr(), text.cast(), copied);
            text.add(copied).write(0);
        }
        length.write(name.len() + 1);
    }
    text
}
