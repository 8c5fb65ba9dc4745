//! What a grid is made of, and the one expression that everything here computes.

/// A floating-point type that a grid can have.
pub trait Element: Copy + Default + PartialEq + Send + Sync + std::fmt::Debug + 'static {
    /// Size [bytes].
    const BYTES: usize = size_of::<Self>();

    /// The new value of a point from its four neighbours: `((north + south) + (west + east)) / 4`, added in
    /// this order, each sum rounded. No variant of the kernel adds in another order or fuses a multiplication
    /// with an addition, so all of them agree in every bit. Dividing by four is exact except for subnormal
    /// results, where it rounds as the multiplication does that all variants use.
    #[must_use]
    fn average(north: Self, south: Self, west: Self, east: Self) -> Self;

    /// The kernels of this type for this processor.
    #[doc(hidden)]
    fn rows(unit: crate::Unit) -> crate::rows::Rows<Self>;
}

macro_rules! element {
    ($type:ty, $rows:ident) => {
        impl Element for $type {
            #[inline(always)]
            fn average(north: Self, south: Self, west: Self, east: Self) -> Self {
                ((north + south) + (west + east)) * 0.25
            }

            fn rows(unit: crate::Unit) -> crate::rows::Rows<Self> {
                crate::rows::$rows(unit)
            }
        }
    };
}

element!(f32, of_f32);
element!(f64, of_f64);
