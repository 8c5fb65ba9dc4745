//! The macro that defines structures of card memory. One list of fields generates the Rust struct, its
//! encoding, and its table in `docs/registers.md`.
//!
//! All numbers are little-endian. Fields follow each other without gaps; unused bytes are a reserved field,
//! which is zero.

/// One field of a structure.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Offset in the structure (bytes).
    pub offset: usize,
    /// Length (bytes).
    pub bytes: usize,
    /// Name.
    pub name: &'static str,
    /// Its meaning.
    pub doc: &'static str,
}

/// A number, or an array of numbers, as card memory holds it.
pub trait Wire: Copy {
    /// Its size (bytes).
    const BYTES: usize;

    /// Writes the value to `bytes`, which has [`Wire::BYTES`] bytes.
    fn put(self, bytes: &mut [u8]);

    /// Reads the value from `bytes`, which has [`Wire::BYTES`] bytes.
    fn get(bytes: &[u8]) -> Self;
}

macro_rules! wire_numbers {
    ($($number:ident)+) => {$(
        impl Wire for $number {
            const BYTES: usize = size_of::<$number>();

            #[inline]
            fn put(self, bytes: &mut [u8]) {
                bytes.copy_from_slice(&self.to_le_bytes());
            }

            #[inline]
            fn get(bytes: &[u8]) -> Self {
                Self::from_le_bytes(bytes.try_into().expect("the caller passes BYTES bytes"))
            }
        }
    )+};
}

wire_numbers!(u8 u16 u32 u64 i16);

impl<T: Wire, const N: usize> Wire for [T; N] {
    const BYTES: usize = N * T::BYTES;

    #[inline]
    fn put(self, bytes: &mut [u8]) {
        for (value, bytes) in self.into_iter().zip(bytes.chunks_exact_mut(T::BYTES)) {
            value.put(bytes);
        }
    }

    #[inline]
    fn get(bytes: &[u8]) -> Self {
        std::array::from_fn(|index| T::get(&bytes[index * T::BYTES..][..T::BYTES]))
    }
}

/// Defines a structure of card memory or of a message: `offset name: type = "meaning";` per field.
#[macro_export]
macro_rules! layout {
    (
        $(#[$meta:meta])*
        $vis:vis struct $name:ident[$size:literal] {
            $($offset:literal $field:ident: $type:ty = $doc:literal;)+
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        $vis struct $name {
            $(#[doc = $doc] $vis $field: $type,)+
        }

        impl $name {
            /// Size in card memory (bytes).
            $vis const BYTES: usize = $size;

            /// The fields, by offset.
            $vis const FIELDS: &[$crate::layout::Field] = &[$($crate::layout::Field {
                offset: $offset,
                bytes: <$type as $crate::layout::Wire>::BYTES,
                name: stringify!($field),
                doc: $doc,
            }),+];

            /// Encodes the structure.
            #[inline]
            $vis fn to_bytes(self) -> [u8; $size] {
                let mut bytes = [0; $size];
                $($crate::layout::Wire::put(
                    self.$field,
                    &mut bytes[$offset..$offset + <$type as $crate::layout::Wire>::BYTES],
                );)+
                bytes
            }

            /// Decodes the structure; every value of every field is accepted.
            #[inline]
            $vis fn from_bytes(bytes: &[u8; $size]) -> $name {
                $name {
                    $($field: $crate::layout::Wire::get(
                        &bytes[$offset..$offset + <$type as $crate::layout::Wire>::BYTES],
                    ),)+
                }
            }
        }

        const _: () = $crate::layout::check($name::FIELDS, $size);
    };
}

/// Fails to compile if the fields leave gaps, overlap, or do not fill the structure.
pub const fn check(fields: &[Field], size: usize) {
    let mut end = 0;
    let mut index = 0;
    while index < fields.len() {
        assert!(fields[index].offset == end, "a field does not start where the one before it ends");
        end += fields[index].bytes;
        index += 1;
    }
    assert!(end == size, "the fields do not fill the structure");
}

#[cfg(test)]
mod tests {
    crate::layout! {
        /// An example.
        struct Example[16] {
            0 number: u64 = "a number";
            8 pair: [u16; 2] = "two numbers";
            12 signed: i16 = "one with a sign";
            14 reserved: u16 = "zero";
        }
    }

    #[test]
    fn fields_are_little_endian_at_their_offsets() {
        let example = Example { number: 0x0102, pair: [3, 0x0405], signed: -2, reserved: 0 };
        let bytes = [2, 1, 0, 0, 0, 0, 0, 0, 3, 0, 5, 4, 0xfe, 0xff, 0, 0];
        assert_eq!(example.to_bytes(), bytes);
        assert_eq!(Example::from_bytes(&bytes), example);
        assert_eq!(Example::BYTES, bytes.len());
        let fields: Vec<_> = Example::FIELDS.iter().map(|field| (field.offset, field.bytes)).collect();
        assert_eq!(fields, [(0, 8), (8, 4), (12, 2), (14, 2)]);
    }
}
