//! Element types of spins and couplings.

use crate::rows::RowUpdate;
use crate::vectors::VectorUnit;

/// A floating-point type that spins can have.
pub trait Real: Copy + Default + PartialEq + Send + Sync + std::fmt::Debug + 'static {
    /// Size (bytes).
    const BYTES: usize;
    /// Name in reports and files.
    const NAME: &'static str;

    /// The nearest value.
    fn from_f64(value: f64) -> Self;
    /// The same value.
    fn to_f64(self) -> f64;
    /// The bits, in the low part.
    fn bits(self) -> u64;
    /// Appends the bytes, little-endian.
    fn append(values: &[Self], to: &mut Vec<u8>);
    /// Reads values from little-endian bytes.
    fn read(bytes: &[u8], into: &mut [Self]);
    /// The update of a row on a vector unit; portable if this processor lacks it.
    #[doc(hidden)]
    fn row_update(unit: VectorUnit) -> RowUpdate<Self>;
}

macro_rules! real {
    ($type:ty, $bytes:literal, $name:literal, $choose:ident) => {
        impl Real for $type {
            const BYTES: usize = $bytes;
            const NAME: &'static str = $name;

            fn from_f64(value: f64) -> Self {
                value as $type
            }

            fn to_f64(self) -> f64 {
                f64::from(self)
            }

            fn bits(self) -> u64 {
                self.to_bits().into()
            }

            fn append(values: &[Self], to: &mut Vec<u8>) {
                let start = to.len();
                to.resize(start + values.len() * $bytes, 0);
                // Fixed sizes make one copy of this.
                for (word, value) in to[start..].as_chunks_mut().0.iter_mut().zip(values) {
                    *word = value.to_le_bytes();
                }
            }

            fn read(bytes: &[u8], into: &mut [Self]) {
                for (value, &word) in into.iter_mut().zip(bytes.as_chunks().0) {
                    *value = <$type>::from_le_bytes(word);
                }
            }

            fn row_update(unit: VectorUnit) -> RowUpdate<Self> {
                crate::vectors::$choose(unit)
            }
        }
    };
}

real!(f32, 4, "float32", update_f32);
real!(f64, 8, "float64", update_f64);
