//! Links between two cards of a host beside its PCIe tree.

use crate::DeviceId;
use crate::error::SiteError;
use crate::schema;
use crate::validate::{CardLink, Device, DeviceKind, Validator};
use millstream_quantity::BytesPerSecond;
use toml::Spanned;

impl Validator<'_> {
    /// The host's links between cards.
    pub(crate) fn card_links(
        &self,
        host: &schema::Host,
        devices: &[Device],
    ) -> Result<Vec<CardLink>, SiteError> {
        let mut found: Vec<CardLink> = Vec::new();
        for link in &host.card_link {
            let card = |field: &str, name: &Spanned<String>| {
                let is_card = |d: &Device| matches!(d.kind, DeviceKind::Card(_));
                let text = name.get_ref();
                let place = devices.iter().position(|d| d.name == *text && is_card(d));
                place.map(DeviceId).map_or_else(
                    || {
                        let cards = devices.iter().filter(|d| is_card(d)).map(|d| d.name.as_str());
                        let cards = cards.collect::<Vec<_>>().join(", ");
                        let host = host.name.get_ref();
                        let message = format!("card-link.{field} {text:?}: cards of host {host:?}: {cards}");
                        self.fail(&name.span(), message)
                    },
                    Ok,
                )
            };
            let ends = [card("from", &link.from)?, card("to", &link.to)?];
            if ends[0] == ends[1] {
                return self
                    .fail(&link.to.span(), format!("card-link from {:?} to itself", link.to.get_ref()));
            }
            let links = link.links.get_ref().get();
            if links > 72 {
                return self.fail(&link.links.span(), format!("card-link.links = {links}: must be 1 to 72"));
            }
            let is_known = |known: &CardLink| known.ends == ends || known.ends == [ends[1], ends[0]];
            if found.iter().any(is_known) {
                let (from, to) = (link.from.get_ref(), link.to.get_ref());
                let message = format!("two card-links between {from:?} and {to:?}: give one with more links");
                return self.fail(&link.from.span(), message);
            }
            let rate = BytesPerSecond(link.kind.rate().0 * link.kind.payload_share() * f64::from(links));
            let what = format!("{links} links NVLink{}", link.kind.nvlink);
            found.push(CardLink { ends, rate, what });
        }
        Ok(found)
    }
}
