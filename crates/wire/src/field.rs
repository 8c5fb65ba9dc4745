//! Header fields of whole bytes in network byte order.

use millstream_quantity::{Msn, Pkey, Psn, Qkey, Qpn, Rkey, Srqn};

/// A value with a fixed encoded length. Callers pass slices of exactly that length.
pub(crate) trait Field: Sized {
    /// Length in bytes.
    const LEN: usize;
    fn get(from: &[u8]) -> Self;
    fn put(self, to: &mut [u8]);
}

macro_rules! integers {
    ($($int:ty)*) => {$(
        impl Field for $int {
            const LEN: usize = size_of::<$int>();

            #[inline]
            fn get(from: &[u8]) -> Self {
                let mut bytes = [0; size_of::<$int>()];
                bytes.copy_from_slice(from);
                <$int>::from_be_bytes(bytes)
            }

            #[inline]
            fn put(self, to: &mut [u8]) {
                to.copy_from_slice(&self.to_be_bytes());
            }
        }
    )*};
}
integers!(u8 u16 u32 u64 u128);

impl<const N: usize> Field for [u8; N] {
    const LEN: usize = N;

    #[inline]
    fn get(from: &[u8]) -> Self {
        let mut bytes = [0; N];
        bytes.copy_from_slice(from);
        bytes
    }

    #[inline]
    fn put(self, to: &mut [u8]) {
        to.copy_from_slice(&self);
    }
}

/// Implements [`Field`] for 24-bit numbers.
macro_rules! three_bytes {
    ($($name:ty)*) => {$(
        impl Field for $name {
            const LEN: usize = 3;

            #[inline]
            fn get(from: &[u8]) -> Self {
                Self::new(u32::from_be_bytes([0, from[0], from[1], from[2]]))
            }

            #[inline]
            fn put(self, to: &mut [u8]) {
                to.copy_from_slice(&self.get().to_be_bytes()[1..]);
            }
        }
    )*};
}
three_bytes!(Psn Qpn Msn Srqn);

macro_rules! wrapped {
    ($($name:ty: $int:ty),*) => {$(
        impl Field for $name {
            const LEN: usize = size_of::<$int>();

            #[inline]
            fn get(from: &[u8]) -> Self {
                Self::new(<$int as Field>::get(from))
            }

            #[inline]
            fn put(self, to: &mut [u8]) {
                self.get().put(to);
            }
        }
    )*};
}
wrapped!(Qkey: u32, Rkey: u32, Pkey: u16);

/// Declares a header of whole-byte fields: `Packet`, a view of a buffer, and `Repr`, the header as a value.
macro_rules! header {
    (
        $(#[$meta:meta])*
        mod $name:ident, $long:literal, $len:literal bytes {
            $($(#[$field_meta:meta])* $field:ident / $set:ident: $ty:ty = $at:literal,)+
        }
    ) => {
        $(#[$meta])*
        pub mod $name {
            #[allow(unused_imports)]
            use super::*;
            use $crate::field::Field;
            use $crate::{Error, Result};

            /// Header length in bytes.
            pub const LEN: usize = $len;

            /// A view of the header at the start of a buffer.
            #[derive(Clone, Copy, Debug, PartialEq, Eq)]
            pub struct Packet<T: AsRef<[u8]>> {
                buffer: T,
            }

            impl<T: AsRef<[u8]>> Packet<T> {
                /// A view of a buffer; accessors panic if the buffer is too short.
                #[inline]
                pub const fn new_unchecked(buffer: T) -> Self {
                    Self { buffer }
                }

                /// A view of a buffer that is long enough.
                ///
                /// # Errors
                /// [`Error::Truncated`] if the buffer is shorter than the header.
                #[inline]
                pub fn new_checked(buffer: T) -> Result<Self> {
                    let packet = Self { buffer };
                    packet.check_len()?;
                    Ok(packet)
                }

                /// Checks that the buffer holds the header, so that no accessor panics.
                ///
                /// # Errors
                /// [`Error::Truncated`] if it does not.
                #[inline]
                pub fn check_len(&self) -> Result<()> {
                    match self.buffer.as_ref().len() {
                        available if available < LEN => {
                Err(Error::Truncated { header: $long, needed: LEN, available })
            },
                        _ => Ok(()),
                    }
                }

                /// The bytes that follow the header.
                #[inline]
                pub fn rest(&self) -> &[u8] {
                    &self.buffer.as_ref()[LEN..]
                }

                $(
                    $(#[$field_meta])*
                    #[inline]
                    pub fn $field(&self) -> $ty {
                        Field::get(&self.buffer.as_ref()[$at..$at + <$ty as Field>::LEN])
                    }
                )+
            }

            impl<T: AsRef<[u8]> + AsMut<[u8]>> Packet<T> {
                $(
                    /// Sets the field.
                    #[inline]
                    pub fn $set(&mut self, value: $ty) {
                        value.put(&mut self.buffer.as_mut()[$at..$at + <$ty as Field>::LEN]);
                    }
                )+
            }

            /// The header's value.
            #[derive(Clone, Copy, Debug, PartialEq, Eq)]
            pub struct Repr {
                $($(#[$field_meta])* pub $field: $ty,)+
            }

            impl Repr {
                /// Parses a view.
                ///
                /// # Errors
                /// [`Error::Truncated`] if the view's buffer is too short.
                #[inline]
                pub fn parse<T: AsRef<[u8]>>(packet: &Packet<T>) -> Result<Self> {
                    packet.check_len()?;
                    Ok(Self { $($field: packet.$field(),)+ })
                }

                /// Length of the emitted header in bytes.
                #[inline]
                #[must_use]
                pub const fn buffer_len(&self) -> usize {
                    LEN
                }

                /// Emits into a view whose buffer is long enough; reserved bits become zero.
                #[inline]
                pub fn emit<T: AsRef<[u8]> + AsMut<[u8]>>(&self, packet: &mut Packet<T>) {
                    packet.buffer.as_mut()[..LEN].fill(0);
                    $(packet.$set(self.$field);)+
                }
            }
        }
    };
}
