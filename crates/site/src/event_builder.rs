//! Event builders of a site: their configurations and where run control listens.

use std::path::PathBuf;

use crate::error::SiteError;
use crate::network_card::is_address;
use crate::schema;
use crate::validate::Validator;

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

/// Validates an event builder whose name is checked.
pub(crate) fn validate(
    validator: &Validator<'_>,
    entry: &schema::EventBuilder,
) -> Result<EventBuilder, SiteError> {
    let (name, control) = (entry.name.get_ref(), entry.control.get_ref());
    if !is_address(control) {
        let message = format!("event builder {name:?}: control {control:?}: expected host:port");
        return validator.fail(&entry.control.span(), message);
    }
    Ok(EventBuilder {
        name: name.clone(),
        configuration: entry.configuration.clone(),
        control: control.clone(),
        ranks: entry.ranks.get(),
    })
}
