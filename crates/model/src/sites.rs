//! Site files that are compiled into the program.

use millstream_site::{Site, edit};

macro_rules! sites {
    ($($name:literal),+ $(,)?) => {
        /// Names and texts of the shipped site files.
        pub const SHIPPED: &[(&str, &str)] =
            &[$(($name, include_str!(concat!("../sites/", $name, ".toml")))),+];
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
    "event-builder-disks",
    "edr-pair",
    "hdr-gpu-pair",
    "pcie-bench",
    "qdr-cx3",
    "qdr-cx2",
    "edr-ivb",
    "hdr-cx6",
    "hdr-cx6-icelake",
    "edr-cx6",
    "edr-fat-tree",
    "hdr-fat-tree",
    "roce100-cx5",
    "roce40-cx3",
    "roce200-gb10",
    "fdr-snb",
    "ndr-fat-tree",
    "cxl-memory",
    "cxl-switch",
    "roce800-cx8",
    "soft-device-wire",
    "xdma",
    "xdma-kintex",
    "polarfire",
    "fpga-peers",
    "hdr-a100",
    "ndr-h100",
    "roce25-geforce",
    "h100-disks",
    "p3700-disks",
);

/// A shipped site.
///
/// # Panics
/// If no site of that name ships.
#[must_use]
pub fn shipped(name: &str) -> Site {
    shipped_with(name, &[])
}

/// A shipped site with other values for some fields, by path ([`millstream_site::edit`]).
///
/// # Panics
/// If no site of that name ships, or it cannot have such a value.
#[must_use]
pub fn shipped_with(name: &str, settings: &[(&str, &str)]) -> Site {
    let text = SHIPPED.iter().find(|(known, _)| *known == name).map(|(_, text)| *text);
    let text = text.unwrap_or_else(|| panic!("no site {name} ships"));
    let edited = settings.iter().fold(text.to_owned(), |text, (path, value)| {
        edit::set(&text, path, value).unwrap_or_else(|error| panic!("site {name}: {error}"))
    });
    millstream_site::parse(name, &edited).unwrap_or_else(|error| panic!("{error}"))
}
