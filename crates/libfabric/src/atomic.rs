//! Atomic operations on values of the application's memory.

use crate::sys;

/// What an atomic operation returns: `fi_atomic`, `fi_fetch_atomic` or `fi_compare_atomic`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicKind {
    /// Nothing.
    Write,
    /// The previous values.
    Fetch,
    /// The previous values, and it compares first.
    Compare,
}

/// Size of a value of a type (bytes); `None` for types that are not supported.
#[must_use]
pub fn size_of(datatype: u32) -> Option<usize> {
    match datatype {
        sys::FI_INT8 | sys::FI_UINT8 => Some(1),
        sys::FI_INT16 | sys::FI_UINT16 => Some(2),
        sys::FI_INT32 | sys::FI_UINT32 | sys::FI_FLOAT => Some(4),
        sys::FI_INT64 | sys::FI_UINT64 | sys::FI_DOUBLE => Some(8),
        _ => None,
    }
}

/// Whether an operation exists for a type.
#[must_use]
pub fn is_supported(datatype: u32, operation: u32, kind: AtomicKind) -> bool {
    let is_compare = (sys::FI_CSWAP..=sys::FI_MSWAP).contains(&operation);
    let fits = match kind {
        AtomicKind::Compare => is_compare,
        AtomicKind::Write => !is_compare && operation != sys::FI_ATOMIC_READ,
        AtomicKind::Fetch => !is_compare,
    };
    let mut value = [0; 8];
    fits && size_of(datatype).is_some_and(|size| {
        apply(datatype, operation, &mut value[..size], &[0; 8][..size], &[0; 8][..size]).is_some()
    })
}

/// Changes one value. `None` if the operation does not exist for the type.
pub fn apply(datatype: u32, operation: u32, value: &mut [u8], operand: &[u8], compare: &[u8]) -> Option<()> {
    macro_rules! of {
        ($type:ty, $change:ident) => {{
            let read = |bytes: &[u8]| bytes.try_into().map(<$type>::from_ne_bytes).ok();
            let new = $change!($type, operation, read(value)?, read(operand)?, read(compare)?);
            value.copy_from_slice(&new.to_ne_bytes());
            Some(())
        }};
    }
    macro_rules! common {
        ($type:ty, $operation:expr, $old:expr, $operand:expr, $compare:expr, $other:expr) => {
            match $operation {
                sys::FI_MIN if $operand < $old => $operand,
                sys::FI_MAX if $operand > $old => $operand,
                sys::FI_MIN | sys::FI_MAX | sys::FI_ATOMIC_READ => $old,
                sys::FI_ATOMIC_WRITE => $operand,
                sys::FI_CSWAP if $compare == $old => $operand,
                sys::FI_CSWAP_NE if $compare != $old => $operand,
                sys::FI_CSWAP_LE if $compare <= $old => $operand,
                sys::FI_CSWAP_LT if $compare < $old => $operand,
                sys::FI_CSWAP_GE if $compare >= $old => $operand,
                sys::FI_CSWAP_GT if $compare > $old => $operand,
                sys::FI_CSWAP..=sys::FI_CSWAP_GT => $old,
                _ => $other,
            }
        };
    }
    macro_rules! integer {
        ($type:ty, $operation:expr, $old:expr, $operand:expr, $compare:expr) => {{
            let (old, operand, compare): ($type, $type, $type) = ($old, $operand, $compare);
            let logical = |holds: bool| <$type>::from(holds);
            common!(
                $type,
                $operation,
                old,
                operand,
                compare,
                match $operation {
                    sys::FI_SUM => old.wrapping_add(operand),
                    sys::FI_PROD => old.wrapping_mul(operand),
                    sys::FI_LOR => logical(old != 0 || operand != 0),
                    sys::FI_LAND => logical(old != 0 && operand != 0),
                    sys::FI_LXOR => logical((old != 0) != (operand != 0)),
                    sys::FI_BOR => old | operand,
                    sys::FI_BAND => old & operand,
                    sys::FI_BXOR => old ^ operand,
                    sys::FI_MSWAP => (old & !compare) | (operand & compare),
                    _ => return None,
                }
            )
        }};
    }
    macro_rules! float {
        ($type:ty, $operation:expr, $old:expr, $operand:expr, $compare:expr) => {{
            let (old, operand, compare): ($type, $type, $type) = ($old, $operand, $compare);
            let logical = |holds: bool| if holds { 1.0 } else { 0.0 };
            common!(
                $type,
                $operation,
                old,
                operand,
                compare,
                match $operation {
                    sys::FI_SUM => old + operand,
                    sys::FI_PROD => old * operand,
                    sys::FI_LOR => logical(old != 0.0 || operand != 0.0),
                    sys::FI_LAND => logical(old != 0.0 && operand != 0.0),
                    sys::FI_LXOR => logical((old != 0.0) != (operand != 0.0)),
                    _ => return None,
                }
            )
        }};
    }
    match datatype {
        sys::FI_INT8 => of!(i8, integer),
        sys::FI_UINT8 => of!(u8, integer),
        sys::FI_INT16 => of!(i16, integer),
        sys::FI_UINT16 => of!(u16, integer),
        sys::FI_INT32 => of!(i32, integer),
        sys::FI_UINT32 => of!(u32, integer),
        sys::FI_INT64 => of!(i64, integer),
        sys::FI_UINT64 => of!(u64, integer),
        sys::FI_FLOAT => of!(f32, float),
        sys::FI_DOUBLE => of!(f64, float),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn i32s(operation: u32, value: i32, operand: i32, compare: i32) -> Option<i32> {
        let mut bytes = value.to_ne_bytes();
        apply(sys::FI_INT32, operation, &mut bytes, &operand.to_ne_bytes(), &compare.to_ne_bytes())?;
        Some(i32::from_ne_bytes(bytes))
    }

    #[test]
    fn each_operation_has_the_value_of_its_definition() {
        let expected = [
            (sys::FI_MIN, 3),
            (sys::FI_MAX, 6),
            (sys::FI_SUM, 9),
            (sys::FI_PROD, 18),
            (sys::FI_LOR, 1),
            (sys::FI_LAND, 1),
            (sys::FI_LXOR, 0),
            (sys::FI_BOR, 7),
            (sys::FI_BAND, 2),
            (sys::FI_BXOR, 5),
            (sys::FI_ATOMIC_READ, 6),
            (sys::FI_ATOMIC_WRITE, 3),
            (sys::FI_MSWAP, 3),
        ];
        for (operation, value) in expected {
            assert_eq!(i32s(operation, 6, 3, 5), Some(value), "{operation}");
        }
        // The comparison is of the given value with the one in memory.
        let swaps = [
            (sys::FI_CSWAP, [6, 3, 6]),
            (sys::FI_CSWAP_NE, [3, 6, 3]),
            (sys::FI_CSWAP_LE, [3, 3, 6]),
            (sys::FI_CSWAP_LT, [3, 6, 6]),
            (sys::FI_CSWAP_GE, [6, 3, 3]),
            (sys::FI_CSWAP_GT, [6, 6, 3]),
        ];
        for (operation, values) in swaps {
            let found = [5, 6, 7].map(|compare| i32s(operation, 6, 3, compare).unwrap());
            assert_eq!(found, values, "{operation}");
        }
    }

    #[test]
    fn floating_point_values_have_no_bits() {
        assert!(is_supported(sys::FI_DOUBLE, sys::FI_SUM, AtomicKind::Write));
        assert!(!is_supported(sys::FI_DOUBLE, sys::FI_BXOR, AtomicKind::Write));
        assert!(!is_supported(sys::FI_UINT64, sys::FI_CSWAP, AtomicKind::Fetch));
        assert!(is_supported(sys::FI_UINT64, sys::FI_MSWAP, AtomicKind::Compare));
        assert!(!is_supported(99, sys::FI_SUM, AtomicKind::Write));
    }
}
