//! Site files: hosts with sockets and PCIe trees, adapters, cards, CXL memory, network links, fat trees, dragonflies and tori.
//!
//! The model predicts the performance of a site, and nodes find network cards by their names in it. A site file describes
//! hardware and the event builders that run on it; model parameters are elsewhere. `docs/site.md` is the format reference.
//!
//! ```text
//!   text ──[schema]──► SiteFile ──[validate]──► Site, indices instead of names ──[draw]──► SVG
//!            │                      │
//!            └── units, ranges      └── undefined names, cycles, port counts
//! ```
//!
//! [`device`] has the library of devices that sites name.
//! Every error names the file, the line and the value. Read [`schema`] first, then [`validate`].
#![forbid(unsafe_code)]

mod card_link;
pub mod cxl;
pub mod device;
mod disk;
pub mod draw;
pub mod edit;
mod error;
mod event_builder;
mod fabric;
pub mod iommu;
mod lanes;
pub mod network_card;
pub mod schema;
mod torus;
mod unit;
pub mod validate;

pub use error::SiteError;
pub use event_builder::EventBuilder;
pub use network_card::{NetworkCard, UnknownCard};
pub use validate::{
    Device, DeviceId, DeviceKind, Fabric, Host, HostId, NetworkLink, NetworkSwitch, Site, SocketId,
};

use std::path::Path;

/// Reads and validates a site file.
///
/// # Errors
/// [`SiteError`] names the line and the error.
pub fn load(path: &Path) -> Result<Site, SiteError> {
    let text = std::fs::read_to_string(path).map_err(|cause| SiteError::unreadable(path, &cause))?;
    parse(&path.display().to_string(), &text)
}

/// Validates the text of a site file; errors call it `name`.
///
/// # Errors
/// [`SiteError`] names the line and the error.
pub fn parse(name: &str, text: &str) -> Result<Site, SiteError> {
    let file: schema::SiteFile =
        toml::from_str(text).map_err(|error| SiteError::syntax(name, text, &error))?;
    validate::validate(name, text, &file)
}
