//! Where a flow's bottleneck is, and what would come next.

use crate::calibrate::spread;
use crate::engine::Rate;
use crate::parameters::Parameters;
use crate::setup::{SetupError, setup};
use crate::tool::verbs::{Verb, bandwidth};
use millstream_site::Site;
use std::fmt;
use std::str::FromStr;

/// A flow: `write client server.u280`, with a size after it if not 1 MiB.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flow {
    /// The verb.
    pub verb: Verb,
    /// Who starts it, and where its own memory is.
    pub client: String,
    /// The other side.
    pub server: String,
    /// Bytes of a message.
    pub size: u32,
}

impl FromStr for Flow {
    type Err = String;

    fn from_str(text: &str) -> Result<Flow, String> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let (verb, client, server, size) = match words.as_slice() {
            [verb, client, server] => (verb, client, server, "1048576"),
            [verb, client, server, size] => (verb, client, server, *size),
            _ => {
                return Err(format!(
                    "{text:?}: a flow is VERB CLIENT SERVER [BYTES], as \"write client server.u280\""
                ));
            }
        };
        let verb = match *verb {
            "write" => Verb::Write,
            "read" => Verb::Read,
            "send" => Verb::Send,
            other => return Err(format!("verb {other:?}: write, read or send")),
        };
        let size = size.parse().ok().filter(|size| (1..=1 << 30).contains(size));
        let size = size.ok_or_else(|| format!("{text:?}: a message has 1 to 1073741824 bytes"))?;
        Ok(Flow { verb, client: (*client).to_owned(), server: (*server).to_owned(), size })
    }
}

/// One line of the way.
#[derive(Clone, Debug, PartialEq)]
pub struct Station {
    /// Its name.
    pub name: String,
    /// Part of the time in which it carried something.
    pub busy: f64,
    /// Part of the time in which it waited for room behind it.
    pub blocked: f64,
    /// What the flow could reach if this line were all that limits it.
    pub ceiling: Rate,
}

/// One parameter's effect.
#[derive(Clone, Debug, PartialEq)]
pub struct Effect {
    /// The parameter.
    pub name: String,
    /// Relative change of the bandwidth when it gets 10 % better, whichever way that is.
    pub gain: f64,
}

/// An explanation.
#[derive(Clone, Debug, PartialEq)]
pub struct Explanation {
    /// What the flow reaches.
    pub rate: Rate,
    /// The lines, busiest first.
    pub stations: Vec<Station>,
    /// Parameters that matter, most first.
    pub effects: Vec<Effect>,
}

fn measure(site: &Site, p: &Parameters, flow: &Flow) -> Result<(Rate, Vec<Station>), SetupError> {
    let setup = setup(site, p, &flow.client, &flow.server)?;
    let result = bandwidth(&setup, flow.verb, flow.size, 128, false);
    let rate = result.rate;
    let mut stations: Vec<Station> = (result.lines.into_iter())
        .filter(|line| line.payload > 0 && line.span.0 > 0)
        .map(|line| {
            let busy = line.busy.seconds() / line.span.seconds();
            let blocked = line.blocked.seconds() / line.span.seconds();
            let ceiling = if busy > 0.0 { Rate(rate.0 / busy) } else { Rate(f64::INFINITY) };
            Station { name: line.name, busy, blocked, ceiling }
        })
        .collect();
    stations.sort_by(|a, b| b.busy.total_cmp(&a.busy));
    Ok((rate, stations))
}

/// Explains a flow.
///
/// # Errors
/// [`SetupError`] if the site cannot carry it.
pub fn explain(site: &Site, p: &Parameters, flow: &Flow) -> Result<Explanation, SetupError> {
    let (rate, stations) = measure(site, p, flow)?;
    let of_flow = ["adapter.", "cpu.", "gpu.", "hbm.", "ib.", "pcie.", "u280."];
    let names: Vec<&str> = p
        .iter()
        .map(|(name, _)| name)
        .filter(|name| of_flow.iter().any(|first| name.starts_with(first)))
        .collect();
    let mut effects: Vec<Effect> = spread(&names, |name| {
        let gain = [1.1, 1.0 / 1.1].map(|factor| {
            let changed = p.with(name, p.get(name) * factor);
            measure(site, &changed, flow).map_or(0.0, |(other, _)| other.0 / rate.0 - 1.0)
        });
        Effect { name: (*name).to_owned(), gain: gain[0].max(gain[1]) }
    });
    effects.retain(|effect| effect.gain > 0.002);
    effects.sort_by(|a, b| b.gain.total_cmp(&a.gain));
    Ok(Explanation { rate, stations, effects })
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:.3} GB/s ({:.2} Gb/s)", self.rate.as_gigabytes(), self.rate.as_gigabits())?;
        match self.stations.first() {
            Some(first) if first.busy > 0.9 => {
                writeln!(f, "bottleneck: {}, busy {:.0} % of the time", first.name, first.busy * 100.0)?;
            }
            _ => {
                let what = self.effects.first().map_or("latency", |effect| effect.name.as_str());
                writeln!(f, "bottleneck: no line is full; what is in flight at once, or latency: {what}")?;
            }
        }
        writeln!(f, "\n  line                                   busy   blocked   alone it would allow")?;
        for s in &self.stations {
            let ceiling = format!("{:.2} GB/s", s.ceiling.as_gigabytes());
            writeln!(
                f,
                "  {:<36}  {:>4.0} %    {:>4.0} %   {ceiling:>12}",
                s.name,
                s.busy * 100.0,
                s.blocked * 100.0
            )?;
        }
        writeln!(f, "\n  parameter, 10 % better                 bandwidth")?;
        for e in self.effects.iter().take(8) {
            writeln!(f, "  {:<36}  {:>+6.1} %", e.name, e.gain * 100.0)?;
        }
        Ok(())
    }
}
