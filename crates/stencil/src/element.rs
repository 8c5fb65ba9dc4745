//! Element types of a grid, and the expression that computes a point.

/// A floating-point type that a grid can have.
pub trait Element: Copy + Default + PartialEq + Send + Sync + std::fmt::Debug + 'static {
    /// Size (bytes).
    const BYTES: usize = size_of::<Self>();

    /// The new value of a point from its four neighbours.
    ///
    /// `((north + south) + (west + east)) * 0.25`, each operation rounded. All variants of the kernel use this order and fuse no
    /// operations, so that they agree in every bit.
    #[must_use]
    fn average(north: Self, south: Self, west: Self, east: Self) -> Self;

    /// The inner loops of this type for a vector unit.
    #[doc(hidden)]
    fn rows(unit: crate::VectorUnit) -> crate::rows::RowLoops<Self>;
}

macro_rules! element {
    ($type:ty, $rows:ident) => {
        impl Element for $type {
            #[inline(always)]
            fn average(north: Self, south: Self, west: Self, east: Self) -> Self {
                ((north + south) + (west + east)) * 0.25
            }

            fn rows(unit: crate::VectorUnit) -> crate::rows::RowLoops<Self> {
                crate::rows::$rows(unit)
            }
        }
    };
}

element!(f32, of_f32);
element!(f64, of_f64);
