//! The shipped sites, as parts of the program.

use millstream_site::Site;

macro_rules! sites {
    ($($name:literal),+ $(,)?) => {
        /// Names and texts of the shipped sites.
        pub const SHIPPED: &[(&str, &str)] =
            &[$(($name, include_str!(concat!("../../../sites/", $name, ".toml")))),+];
    };
}

sites!(
    "recipe-baseline",
    "recipe-backplane",
    "apenet-torus",
    "extoll-booster",
    "lhcb-pair-fdr-e5",
    "lhcb-pair-fdr-d",
    "lhcb-pair-qdr-e5",
    "lhcb-pair-qdr-c",
    "event-builder-500",
    "edr-pair",
    "hdr-gpu-pair",
    "pcie-bench",
);

/// A shipped site.
///
/// # Panics
/// If there is none of that name: names are words of this program, and a test reads all sites.
#[must_use]
pub fn shipped(name: &str) -> Site {
    shipped_with(name, "", "")
}

/// A shipped site with a word of its text replaced: the same place with another clock or MTU.
///
/// # Panics
/// As [`shipped`].
#[must_use]
pub fn shipped_with(name: &str, from: &str, to: &str) -> Site {
    let text = SHIPPED.iter().find(|(known, _)| *known == name).map(|(_, text)| *text);
    let text = text.unwrap_or_else(|| panic!("site {name} ships"));
    let text = if from.is_empty() { text.to_owned() } else { text.replace(from, to) };
    millstream_site::parse(name, &text).unwrap_or_else(|error| panic!("the shipped sites are sound: {error}"))
}
