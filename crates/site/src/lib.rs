//! Site files: hosts with their sockets and PCIe trees, adapters, cards, networks, links and tori.
//!
//! A site is described once. The model predicts what it will reach, and nodes find cards on the network by the
//! names that it gives them; so it holds what a person can read off an order, a data sheet or `lspci`, and
//! nothing that only a model needs. `docs/site.md` is the reference of the format.
//!
//! ```text
//!   text ──[schema]──► File ──[check]──► Site, indices instead of names ──[draw]──► SVG
//!            │                   │
//!            └── units, widths   └── dangling names, cycles, what does not fit
//! ```
//!
//! Every error names the file, the line and the value. Read [`schema`] first, then [`check`].
#![forbid(unsafe_code)]

pub mod draw;
pub mod edit;
mod error;
pub mod network_card;
pub mod schema;
pub mod unit;
pub mod validate;

pub use error::SiteError;
pub use network_card::{NetworkCard, UnknownCard};
pub use validate::{Device, DeviceId, DeviceKind, Host, HostId, NetworkLink, NetworkSwitch, Site, SocketId};

use std::path::Path;

/// Reads and checks a site file.
///
/// # Errors
/// [`SiteError`] says in which line what is wrong.
pub fn load(path: &Path) -> Result<Site, SiteError> {
    let text = std::fs::read_to_string(path).map_err(|cause| SiteError::unreadable(path, &cause))?;
    parse(&path.display().to_string(), &text)
}

/// Checks the text of a site file; `name` is what errors call it.
///
/// # Errors
/// [`SiteError`] says in which line what is wrong.
pub fn parse(name: &str, text: &str) -> Result<Site, SiteError> {
    let file: schema::SiteFile =
        toml::from_str(text).map_err(|error| SiteError::syntax(name, text, &error))?;
    validate::validate(name, text, &file)
}
