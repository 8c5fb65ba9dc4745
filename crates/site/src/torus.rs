//! Tori: nodes, links to both neighbours in each dimension, addresses of the nodes' processes.

use crate::error::SiteError;
use crate::schema::{self, Protocol, data_rate};
use crate::validate::{LinkEnd, NetworkLink, Site, Torus, Validator};
use crate::{DeviceId, HostId};
use toml::Spanned;

impl Validator<'_> {
    /// A torus with its links.
    pub(crate) fn torus(
        &self,
        torus: &Spanned<schema::Torus>,
        site: &Site,
    ) -> Result<(Torus, Vec<NetworkLink>), SiteError> {
        let torus = torus.get_ref();
        let dimensions: Vec<u32> = torus.dimensions.get_ref().iter().map(|d| d.get()).collect();
        if dimensions.is_empty() || dimensions.len() > 3 {
            return self.fail(&torus.dimensions.span(), "a torus has one to three dimensions");
        }
        let nodes: Vec<(HostId, DeviceId)> = (self
            .ends("torus.adapters", &torus.adapters, site)?
            .into_iter())
        .filter_map(|end| if let LinkEnd::Adapter(host, device) = end { Some((host, device)) } else { None })
        .collect();
        let product: u64 = dimensions.iter().map(|&d| u64::from(d)).product();
        if nodes.len() as u64 != product {
            return self.fail(
                &torus.dimensions.span(),
                format!(
                    "dimensions {dimensions:?} need {product} adapters, {:?} has {}",
                    torus.adapters.get_ref(),
                    nodes.len()
                ),
            );
        }
        let rate = data_rate(torus.rate, torus.encoding, torus.lanes);
        if torus.buffer.0 < u64::from(torus.mtu.0) * 2 {
            return self.fail(
                &torus.name.span(),
                format!(
                    "torus {:?}: buffer of {} B must hold two packets of {} B",
                    torus.name.get_ref(),
                    torus.buffer.0,
                    torus.mtu.0
                ),
            );
        }
        let addresses = self.torus_addresses(torus, nodes.len())?;
        let mut links = Vec::new();
        let mut stride = 1usize;
        for (d, &length) in dimensions.iter().enumerate() {
            let length = length as usize;
            for node in 0..nodes.len() {
                let place = node / stride % length;
                let next = node - place * stride + (place + 1) % length * stride;
                // A ring of two nodes has one link, a ring of one node none.
                if next == node || (length == 2 && place == 1) {
                    continue;
                }
                links.push(NetworkLink {
                    from: LinkEnd::Adapter(nodes[node].0, nodes[node].1),
                    to: LinkEnd::Adapter(nodes[next].0, nodes[next].1),
                    rate,
                    mtu: torus.mtu,
                    length: None,
                    protocol: Protocol::InfiniBand,
                    buffer: Some(torus.buffer),
                    dimension: Some(d as u8),
                    loss: 0.0,
                    failed: false,
                });
            }
            stride *= length;
        }
        Ok((Torus { name: torus.name.get_ref().clone(), dimensions, nodes, addresses, rate }, links))
    }

    /// Addresses of the nodes' processes: none, or a different one for each node.
    fn torus_addresses(&self, torus: &schema::Torus, nodes: usize) -> Result<Vec<String>, SiteError> {
        if torus.addresses.is_empty() {
            return Ok(Vec::new());
        }
        if torus.addresses.len() != nodes {
            let given = torus.addresses.len();
            let name = torus.name.get_ref();
            return self.fail(
                &torus.name.span(),
                format!("torus {name:?} has {nodes} nodes, but {given} addresses"),
            );
        }
        let mut addresses = Vec::new();
        for address in &torus.addresses {
            let text = address.get_ref();
            let port = text.rsplit_once(':').map(|(host, port)| (host.is_empty(), port.parse::<u16>()));
            if !matches!(port, Some((false, Ok(1..)))) {
                return self.fail(&address.span(), format!("{text:?} is not an address, host:port"));
            }
            if addresses.contains(text) {
                return self.fail(&address.span(), format!("two nodes have the address {text:?}"));
            }
            addresses.push(text.clone());
        }
        Ok(addresses)
    }
}
