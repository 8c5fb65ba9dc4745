//! Assignment of ports to identifiers.
//!
//! A process owns a port by holding the socket name, which the kernel releases at its exit. A wildcard
//! address excludes each address of its family. Each side first takes its own name and then looks for the
//! other, so of two simultaneous binds at most one succeeds.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::{Id, Manager, State};
use crate::address::Address;
use crate::system::{ClaimId, PortName, System};
use crate::{Errno, Result};

/// The ephemeral port range of the kernel.
const EPHEMERAL: std::ops::Range<u16> = 32768..61000;

/// The names of an identifier's port: two if both address families are bound.
#[derive(Clone, Debug)]
pub(super) struct Port(Vec<ClaimId>);

#[derive(Debug)]
struct Held {
    name: PortName,
    owners: u32,
    /// All owners allow reuse.
    shared: bool,
}

#[derive(Debug, Default)]
pub(super) struct Ports(HashMap<ClaimId, Held>);

impl Ports {
    fn find(&mut self, name: PortName) -> Option<(ClaimId, &mut Held)> {
        self.0.iter_mut().find(|(_, held)| held.name == name).map(|(claim, held)| (*claim, held))
    }

    fn is_claimed(&mut self, system: &mut dyn System, name: PortName, share: bool) -> bool {
        match self.find(name) {
            Some((_, held)) => !(share && held.shared),
            None => system.is_claimed(name),
        }
    }

    /// Takes `name`, or a share in it.
    fn take(&mut self, system: &mut dyn System, name: PortName, share: bool) -> Result<ClaimId> {
        if let Some((claim, held)) = self.find(name) {
            if !(share && held.shared) {
                return Err(Errno(libc::EADDRINUSE));
            }
            held.owners += 1;
            return Ok(claim);
        }
        let claim = system.claim(name)?;
        self.0.insert(claim, Held { name, owners: 1, shared: share });
        let against: Vec<PortName> = if name.ip.is_unspecified() {
            let family = system.addresses().into_iter().filter(|ip| ip.is_ipv4() == name.ip.is_ipv4());
            family.map(|ip| PortName { ip, ..name }).collect()
        } else {
            vec![name.wildcard()]
        };
        if against.into_iter().any(|other| self.is_claimed(system, other, share)) {
            self.give_back(system, claim);
            return Err(Errno(libc::EADDRNOTAVAIL));
        }
        Ok(claim)
    }

    fn give_back(&mut self, system: &mut dyn System, claim: ClaimId) {
        let Some(held) = self.0.get_mut(&claim) else { return };
        held.owners -= 1;
        if held.owners == 0 {
            self.0.remove(&claim);
            system.release(claim);
        }
    }

    fn take_all(&mut self, system: &mut dyn System, names: &[PortName], share: bool) -> Result<Port> {
        let mut port = Port(Vec::new());
        for name in names {
            match self.take(system, *name, share) {
                Ok(claim) => port.0.push(claim),
                Err(error) => {
                    self.release(system, port);
                    return Err(error);
                }
            }
        }
        Ok(port)
    }

    pub(super) fn release(&mut self, system: &mut dyn System, port: Port) {
        for claim in port.0 {
            self.give_back(system, claim);
        }
    }

    pub(super) fn listen(&self, system: &mut dyn System, port: &Port) -> Result<()> {
        port.0.iter().try_for_each(|claim| Ok(system.listen(*claim)?))
    }

    fn is_shared(&self, port: &Port) -> bool {
        port.0.iter().any(|claim| self.0.get(claim).is_some_and(|held| held.owners > 1))
    }
}

impl Port {
    pub(super) fn includes(&self, claim: ClaimId) -> bool {
        self.0.contains(&claim)
    }
}

/// The addresses that an identifier bound to `address` covers.
fn hosts(id: &Id, address: Address) -> Vec<IpAddr> {
    let both = address.is_wildcard() && address.ip.is_ipv6() && id.v6only != Some(true);
    if both { vec![Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()] } else { vec![address.ip] }
}

impl Manager {
    /// Binds the identifier to `address`; chooses a port if it is zero.
    pub(super) fn bind_port(
        &mut self,
        system: &mut dyn System,
        number: u32,
        mut address: Address,
    ) -> Result<()> {
        let id = self.ids.get(number).ok_or(Errno(libc::ENOENT))?;
        let (space, share, hosts) = (id.space, id.reuse, hosts(id, address));
        let names = |port| hosts.iter().map(|ip| PortName { space, ip: *ip, port }).collect::<Vec<_>>();
        let port = if address.port != 0 {
            self.ports.take_all(system, &names(address.port), share)?
        } else {
            let span = u32::from(EPHEMERAL.end - EPHEMERAL.start);
            let start = system.random() % span;
            let candidates = (0..span).map(|step| EPHEMERAL.start + ((start + step) % span) as u16);
            let mut last = Err(Errno(libc::EADDRNOTAVAIL));
            for candidate in candidates {
                last = self.ports.take_all(system, &names(candidate), false);
                match last {
                    Ok(_) => {
                        address.port = candidate;
                        break;
                    }
                    Err(Errno(libc::EADDRINUSE | libc::EADDRNOTAVAIL)) => {}
                    // Another port would fail alike, for example when descriptors are exhausted.
                    Err(error) => return Err(error),
                }
            }
            last?
        };
        let id = self.ids.get_mut(number).ok_or(Errno(libc::ENOENT))?;
        (id.src, id.port) = (Some(address), Some(port));
        Ok(())
    }

    /// Whether the identifier is the only owner of its port, as listening requires.
    pub(super) fn is_sole_owner(&self, number: u32) -> bool {
        let port = self.ids.get(number).and_then(|id| id.port.as_ref());
        port.is_some_and(|port| !self.ports.is_shared(port))
    }

    /// The listener of a port.
    pub(super) fn listener(&self, claim: ClaimId) -> Option<u32> {
        let listens = |id: &Id| {
            id.state == State::Listening && id.port.as_ref().is_some_and(|port| port.includes(claim))
        };
        self.ids.iter().find(|(_, id)| listens(id)).map(|(number, _)| number)
    }
}
