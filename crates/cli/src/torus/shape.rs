//! Dimensions and addresses, given or from a site file.

use std::error::Error;

use millstream_torus_core::Dimensions;

use super::TorusShape;

impl TorusShape {
    /// Dimensions, and the addresses of all nodes if a site file has them.
    pub(super) fn resolve(&self) -> Result<(Dimensions, Vec<String>), Box<dyn Error>> {
        let Some(file) = &self.site else {
            let dimensions = self.dimensions.ok_or("--dimensions or --site is required")?;
            return Ok((dimensions, Vec::new()));
        };
        let site = millstream_site::load(file)?;
        let torus =
            site.tori.first().ok_or_else(|| format!("{}: the site has no [[torus]]", file.display()))?;
        if torus.addresses.is_empty() {
            let name = &torus.name;
            let missing = format!("{}: torus {name:?} has no addresses = [\"host:port\", …]", file.display());
            return Err(missing.into());
        }
        let mut sizes = torus.dimensions.iter().map(u32::to_string).collect::<Vec<_>>();
        sizes.resize(3, "1".to_owned());
        let dimensions = sizes.join("x").parse().map_err(|error| format!("{}: {error}", file.display()))?;
        Ok((dimensions, torus.addresses.clone()))
    }
}
