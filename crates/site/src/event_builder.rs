//! Event builders of a site: their configurations and where run control listens.

use std::path::PathBuf;

use toml::Spanned;

use crate::error::SiteError;
use crate::network_card::is_address;
use crate::schema;

/// An event builder of the site.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventBuilder {
    /// Its name.
    pub name: String,
    /// Its configuration, relative to the site file.
    pub configuration: PathBuf,
    /// Address of run control: `host:port`.
    pub control: String,
    /// Ranks as a job.
    pub ranks: u32,
}

/// Validates an event builder against those before it.
pub(crate) fn validate(
    entry: &schema::EventBuilder,
    before: &[EventBuilder],
    fail: impl Fn(&Spanned<String>, String) -> SiteError,
) -> Result<EventBuilder, SiteError> {
    let (name, control) = (entry.name.get_ref(), entry.control.get_ref());
    if before.iter().any(|other| other.name == *name) {
        return Err(fail(&entry.name, format!("two event builders are named {name:?}")));
    }
    if !is_address(control) {
        return Err(fail(
            &entry.control,
            format!("event builder {name:?}: control {control:?}: expected host:port"),
        ));
    }
    Ok(EventBuilder {
        name: name.clone(),
        configuration: entry.configuration.clone(),
        control: control.clone(),
        ranks: entry.ranks.get(),
    })
}
