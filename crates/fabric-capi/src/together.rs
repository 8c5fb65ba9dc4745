//! Operations of all nodes.

use std::ffi::{c_int, c_void};
use std::time::Duration;

use millstream_fabric::{Collectives, Fabric};

use crate::error::{Failure, call};
use crate::handle::{State, state};
use crate::sys;
use crate::transfer::{bytes, bytes_mut};

/// Bytes of a node that one step combines. Longer reductions have several steps.
const STEP: usize = 4096;

/// Gives every node the bytes of all nodes.
///
/// # Safety
/// `fabric` is a handle; `data` points to `length` bytes, `all` to `length` bytes of each node.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ms_fabric_exchange(
    fabric: *mut sys::ms_fabric,
    data: *const c_void,
    length: usize,
    all: *mut c_void,
    timeout_ms: u64,
) -> c_int {
    call(|| {
        // SAFETY: the caller's handle and data.
        let (mut state, data) = unsafe { (state(fabric)?, bytes(data, length)?) };
        let node = state.member.node()?;
        let nodes = node.dimensions().nodes();
        let total = length.checked_mul(nodes).ok_or_else(|| {
            Failure::invalid(format!("{length} bytes of {nodes} nodes do not fit into memory"))
        })?;
        // SAFETY: the caller's place for the bytes of all nodes.
        let all = unsafe { bytes_mut(all, total) }?;
        let gathered = node.exchange(data, Duration::from_millis(timeout_ms))?;
        for (number, found) in gathered.iter().enumerate() {
            if found.len() != length {
                let (found, here) = (found.len(), node.here());
                let message = format!("node {number} gave {found} bytes, but {here} gave {length}");
                return Err(Failure::invalid(message));
            }
            all[number * length..(number + 1) * length].copy_from_slice(found);
        }
        Ok(())
    })
}

/// The operations of all nodes, and the node.
fn collectives(
    state: &mut State,
    timeout_ms: u64,
) -> Result<(&mut Collectives, &mut millstream_torus::TorusNode), Failure> {
    let timeout = Duration::from_millis(timeout_ms);
    let node = state.member.node()?;
    let collectives = match state.collectives.take() {
        Some(collectives) => collectives,
        None => Collectives::new(node, STEP, timeout)?,
    };
    let collectives = state.collectives.insert(collectives);
    collectives.set_timeout(timeout);
    Ok((collectives, node))
}

/// Waits until all nodes are here.
///
/// # Safety
/// `fabric` is a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ms_fabric_barrier(fabric: *mut sys::ms_fabric, timeout_ms: u64) -> c_int {
    call(|| {
        // SAFETY: the caller's handle.
        let mut state = unsafe { state(fabric) }?;
        let (collectives, node) = collectives(&mut state, timeout_ms)?;
        Ok(collectives.barrier(node)?)
    })
}

type Combine = fn([u8; 8], [u8; 8]) -> [u8; 8];

/// Combines two values.
fn combine(kind: u32, operation: u32) -> Result<Combine, Failure> {
    macro_rules! of {
        ($type:ty, $sum:expr, $min:expr, $max:expr) => {
            match operation {
                sys::MS_FABRIC_SUM => {
                    |a, b| $sum(<$type>::from_ne_bytes(a), <$type>::from_ne_bytes(b)).to_ne_bytes()
                }
                sys::MS_FABRIC_MIN => {
                    |a, b| $min(<$type>::from_ne_bytes(a), <$type>::from_ne_bytes(b)).to_ne_bytes()
                }
                sys::MS_FABRIC_MAX => {
                    |a, b| $max(<$type>::from_ne_bytes(a), <$type>::from_ne_bytes(b)).to_ne_bytes()
                }
                _ => return Err(Failure::invalid(format!("operation {operation} is unknown"))),
            }
        };
    }
    let combine: Combine = match kind {
        sys::MS_FABRIC_F64 => of!(f64, |a: f64, b: f64| a + b, f64::min, f64::max),
        sys::MS_FABRIC_I64 => of!(i64, i64::wrapping_add, i64::min, i64::max),
        sys::MS_FABRIC_U64 => of!(u64, u64::wrapping_add, u64::min, u64::max),
        _ => return Err(Failure::invalid(format!("type {kind} is unknown"))),
    };
    Ok(combine)
}

/// Combines values of all nodes.
///
/// # Safety
/// `fabric` is a handle; `values` points to `count` values.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ms_fabric_allreduce(
    fabric: *mut sys::ms_fabric,
    values: *mut c_void,
    count: usize,
    kind: sys::ms_fabric_type,
    operation: sys::ms_fabric_operation,
    timeout_ms: u64,
) -> c_int {
    call(|| {
        let combine = combine(kind, operation)?;
        let length =
            count.checked_mul(8).ok_or_else(|| Failure::invalid(format!("{count} values are too many")))?;
        // SAFETY: the caller's handle and values.
        let (mut state, values) = unsafe { (state(fabric)?, bytes_mut(values, length)?) };
        let (collectives, node) = collectives(&mut state, timeout_ms)?;
        for part in values.chunks_mut(STEP) {
            let all = collectives.allgather(node, part)?;
            let mut blocks = all.chunks_exact(part.len());
            // The block of node 0; each later one is combined into it.
            part.copy_from_slice(blocks.next().unwrap_or_default());
            for block in blocks {
                for (sum, value) in part.as_chunks_mut::<8>().0.iter_mut().zip(block.as_chunks::<8>().0) {
                    *sum = combine(*sum, *value);
                }
            }
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_combined_by_type_and_operation() {
        let f64s = combine(sys::MS_FABRIC_F64, sys::MS_FABRIC_SUM).unwrap();
        assert_eq!(f64::from_ne_bytes(f64s(1.5_f64.to_ne_bytes(), 2.25_f64.to_ne_bytes())), 3.75);
        let least = combine(sys::MS_FABRIC_I64, sys::MS_FABRIC_MIN).unwrap();
        assert_eq!(i64::from_ne_bytes(least((-3_i64).to_ne_bytes(), 2_i64.to_ne_bytes())), -3);
        let most = combine(sys::MS_FABRIC_U64, sys::MS_FABRIC_MAX).unwrap();
        assert_eq!(u64::from_ne_bytes(most(u64::MAX.to_ne_bytes(), 2_u64.to_ne_bytes())), u64::MAX);
        assert!(combine(3, 0).is_err() && combine(0, 3).is_err());
    }
}
