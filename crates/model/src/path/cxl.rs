//! Memory behind CXL links: timing from the site and the device library.

use super::resolve::{ancestors, fact, host_completer};
use super::{CxlTarget, PathError, hops::cxl_hops};
use crate::component::cxl::{CxlHop, CxlTiming, HomeAgentTiming};
use crate::engine::{BytesPerSecond, Picos};
use crate::parameters::Parameters;
use crate::path::Hop;
use millstream_site::cxl::CxlMemory;
use millstream_site::{Device, DeviceId, DeviceKind, Host, Site, SocketId};

/// Cores of a host that access memory behind a CXL link with loads and stores.
#[derive(Clone, Debug, PartialEq)]
pub struct CoreAccess {
    /// Name of the memory: `host.memory`.
    pub name: String,
    /// The links and the device.
    pub timing: CxlTiming,
    /// Both ways between a core and the CXL port.
    pub core_latency: Picos,
    /// Lines in progress of all cores.
    pub lines: u32,
}

impl CoreAccess {
    /// Everything between the cores and the memory.
    #[must_use]
    pub fn hops(&self) -> Vec<Hop> {
        let host = self.name.split('.').next().unwrap_or_default();
        let name = format!("{host} cores, {} lines in progress", self.lines);
        let cores = Hop { name, rate: self.largest_rate(), latency: Picos(self.core_latency.0 / 2) };
        let links = cxl_hops(&self.name, &self.timing).into_iter().rev();
        std::iter::once(cores).chain(links).collect()
    }

    /// Payload rate of the lines in progress, without any load.
    fn largest_rate(&self) -> BytesPerSecond {
        let round = self.core_latency + self.timing.latency() * 2 + self.timing.read_latency;
        BytesPerSecond(f64::from(self.lines * crate::component::cxl::LINE) / round.seconds())
    }
}

/// Value of the processor above a device.
fn processor(p: &Parameters, host: &Host, device: &Device, value: &str) -> Result<f64, PathError> {
    let (_, socket) = ancestors(host, device.parent);
    let socket = host.sockets.get(socket.0).ok_or_else(|| no_value(host, device, value))?;
    p.device(&socket.id, value).ok_or_else(|| PathError::NoValue {
        device: format!("{}.{}", host.name, socket.id),
        model: socket.processor.clone(),
        value: value.to_owned(),
    })
}

fn no_value(host: &Host, device: &Device, value: &str) -> PathError {
    PathError::NoValue {
        device: format!("{}.{}", host.name, device.name),
        model: device.model.clone(),
        value: value.to_owned(),
    }
}

/// Latency of a CXL switch from port to port.
fn switch_latency(p: &Parameters, host: &Host, switch: DeviceId) -> Picos {
    let device = &host.devices[switch.0];
    match &device.kind {
        DeviceKind::CxlSwitch(switch) if switch.latency.is_some() => {
            Picos::from_seconds(switch.latency.map_or(0.0, |latency| latency.0))
        }
        _ => Picos::from_nanos(fact(p, &device.id, "cxl-switch", "latency")),
    }
}

/// Links from the root port to a memory device: the ports of socket and device are at the first and at the last.
fn links(
    p: &Parameters,
    host: &Host,
    (device, memory): (&Device, &CxlMemory),
    ports: [f64; 2],
) -> Vec<CxlHop> {
    let (switches, _) = ancestors(host, device.parent);
    let mut hops =
        vec![CxlHop { switch: String::new(), link: memory.link, latency: Picos::from_nanos(ports[1] / 2.0) }];
    for switch in switches {
        let device = &host.devices[switch.0];
        let DeviceKind::CxlSwitch(entry) = &device.kind else { continue };
        let latency = switch_latency(p, host, switch);
        hops.insert(0, CxlHop { switch: device.name.clone(), link: entry.link, latency });
    }
    hops[0].latency += Picos::from_nanos(ports[0] / 2.0);
    hops
}

/// The links of a memory and the memory itself.
pub(crate) fn timing(
    p: &Parameters,
    host: &Host,
    device: &Device,
    memory: &CxlMemory,
) -> Result<CxlTiming, PathError> {
    let of_device = |value: &str| fact(p, &device.id, "cxl-memory", value);
    let ports = [processor(p, host, device, millstream_site::cxl::PORT_LATENCY)?, of_device("port.latency")];
    let peak = memory.bandwidth.map_or_else(|| of_device("memory.rate") * 1e9, |rate| rate.0);
    Ok(CxlTiming {
        hops: links(p, host, (device, memory), ports),
        efficiency: p.get("cxl.efficiency"),
        read_latency: Picos::from_nanos(of_device("read.latency")),
        write_latency: Picos::from_nanos(of_device("write.latency")),
        memory_rate: BytesPerSecond(peak * of_device("memory.efficiency")),
    })
}

/// The memory as an adapter of the host accesses it.
pub(super) fn target(
    p: &Parameters,
    host: &Host,
    (device, memory): (&Device, &CxlMemory),
    adapter_socket: SocketId,
    max_completion: u32,
) -> Result<CxlTarget, PathError> {
    let local = host_completer(p, &host.sockets[adapter_socket.0].id);
    let dram = processor(p, host, device, "dram.latency")?;
    // A read of the other socket's memory takes the round trip between sockets, a write one way.
    let is_remote = ancestors(host, device.parent).1 != adapter_socket;
    let round =
        if is_remote { fact(p, &host.sockets[adapter_socket.0].id, "processor", "socket.hop") } else { 0.0 };
    let without_memory =
        |latency: Picos, hop: f64| Picos::from_nanos((latency.nanos() - dram + hop).max(0.0));
    Ok(CxlTarget {
        timing: timing(p, host, device, memory)?,
        home: HomeAgentTiming {
            read_latency: without_memory(local.read_latency, round),
            write_latency: without_memory(local.write_latency, round / 2.0),
            outstanding: processor(p, host, device, "cxl.lines")?.round().max(1.0) as u32,
            max_completion,
        },
    })
}

/// How cores of `client`, a host, access `server`, memory behind a CXL link of this host. None if they are something else.
///
/// # Errors
/// [`PathError`] if the processor lacks a value.
pub fn core_access(
    site: &Site,
    p: &Parameters,
    client: &str,
    server: &str,
) -> Result<Option<CoreAccess>, PathError> {
    let p = &*p.with_devices(&site.devices);
    let Some((host, device)) = site.device(server) else { return Ok(None) };
    let host = &site.hosts[host.0];
    let device = &host.devices[device.0];
    let DeviceKind::CxlMemory(memory) = &device.kind else { return Ok(None) };
    if host.name != client {
        return Ok(None);
    }
    let value = |value: &str| processor(p, host, device, value);
    let cores: u32 = host.sockets.iter().map(|socket| socket.cores).sum();
    let lines = (f64::from(cores) * value("fill.buffers")?).min(value("cxl.lines")?);
    Ok(Some(CoreAccess {
        name: server.to_owned(),
        timing: timing(p, host, device, memory)?,
        core_latency: Picos::from_nanos(value("core.latency")?),
        lines: lines.round().max(1.0) as u32,
    }))
}
