//! Where a flow's bottleneck is, and what would come next.

use crate::calibrate::spread;
use crate::engine::Rate;
use crate::parameters::Parameters;
use crate::setup::{SetupError, setup};
use crate::sheet::{Cell, Sheet};
use crate::tool::verbs::{Setup, Verb, bandwidth};
use crate::whatif::case;
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

fn measure(setup: &Setup, flow: &Flow) -> (Rate, Vec<Station>) {
    let result = bandwidth(setup, flow.verb, flow.size, 128, false);
    let rate = result.rate;
    let mut stations: Vec<Station> = (result.lines.into_iter())
        .filter(|line| line.packets > 0 && line.span.0 > 0)
        .map(|line| {
            let busy = line.busy.seconds() / line.span.seconds();
            let blocked = line.blocked.seconds() / line.span.seconds();
            let ceiling = if busy > 0.0 { Rate(rate.0 / busy) } else { Rate(f64::INFINITY) };
            Station { name: line.name, busy, blocked, ceiling }
        })
        .collect();
    // Lines without a time of their own say nothing.
    stations.retain(|station| station.busy > 0.001 || station.blocked > 0.001);
    stations.sort_by(|a, b| b.busy.total_cmp(&a.busy));
    (rate, stations)
}

/// Explains a flow.
///
/// # Errors
/// [`SetupError`] if the site cannot carry it.
pub fn explain(site: &Site, p: &Parameters, flow: &Flow) -> Result<Explanation, SetupError> {
    let setup = |p: &Parameters| setup(site, p, &flow.client, &flow.server);
    let here = setup(p)?;
    let (rate, stations) = measure(&here, flow);
    // What may take part in a flow; the others stand for other things.
    let of_flow = ["adapter.", "apenet.", "cpu.", "extoll.", "gpu.", "hbm.", "ib.", "pcie.", "u280."];
    let names: Vec<&str> = p
        .iter()
        .map(|(name, _)| name)
        .filter(|name| of_flow.iter().any(|first| name.starts_with(first)))
        .collect();
    let mut effects: Vec<Effect> = spread(&names, |name| {
        let gain = |factor: f64| match setup(&p.with(name, p.get(name) * factor)) {
            // Most parameters are of other parts: what is the same need not be simulated again.
            Ok(changed) if changed != here => measure(&changed, flow).0.0 / rate.0 - 1.0,
            _ => 0.0,
        };
        Effect { name: (*name).to_owned(), gain: gain(1.1).max(gain(1.0 / 1.1)) }
    });
    effects.retain(|effect| effect.gain > 0.002);
    effects.sort_by(|a, b| b.gain.total_cmp(&a.gain));
    Ok(Explanation { rate, stations, effects })
}

impl Explanation {
    /// What limits the flow: the busiest line if it is full, else the parameter that matters most.
    #[must_use]
    pub fn bottleneck(&self) -> String {
        match self.stations.first() {
            Some(first) if first.busy > FULL => first.name.clone(),
            _ => {
                let what = self.effects.first().map_or("latency", |effect| effect.name.as_str());
                format!("what is in flight at once, or latency: {what}")
            }
        }
    }

    /// The lines that come next when the bottleneck goes, with what they would allow: where no line is full,
    /// the busiest is the first of them.
    pub fn following(&self) -> impl Iterator<Item = &Station> {
        let full = self.stations.first().is_some_and(|first| first.busy > FULL);
        // A line of no time of its own limits nothing.
        self.stations.iter().skip(usize::from(full)).filter(|station| station.busy > 0.05)
    }
}

/// A line that is busy for more than this part of the time is full: the rest are gaps between messages.
const FULL: f64 = 0.9;

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:.3} GB/s ({:.2} Gb/s)", self.rate.as_gigabytes(), self.rate.as_gigabits())?;
        match self.stations.first() {
            Some(first) if first.busy > FULL => {
                writeln!(f, "bottleneck: {}, busy {:.0} % of the time", first.name, first.busy * 100.0)?;
            }
            _ => writeln!(f, "bottleneck: no line is full; {}", self.bottleneck())?,
        }
        let next: Vec<String> = (self.following().take(3))
            .map(|s| format!("{} ({:.2} GB/s)", s.name, s.ceiling.as_gigabytes()))
            .collect();
        writeln!(f, "next: {}", if next.is_empty() { "none near".to_owned() } else { next.join(", ") })?;
        writeln!(f, "\n  {:<36}   busy   blocked   alone it would allow", "line")?;
        for s in &self.stations {
            let ceiling = match s.ceiling.as_gigabytes() {
                ceiling if ceiling.is_finite() => format!("{ceiling:.2} GB/s"),
                _ => "no limit".to_owned(),
            };
            writeln!(
                f,
                "  {:<36}  {:>4.0} %    {:>4.0} %   {ceiling:>12}",
                s.name,
                s.busy * 100.0,
                s.blocked * 100.0
            )?;
        }
        writeln!(f, "\n  {:<36}  bandwidth", "parameter, 10 % better")?;
        for e in self.effects.iter().take(8) {
            writeln!(f, "  {:<36}  {:>+6.1} %", e.name, e.gain * 100.0)?;
        }
        Ok(())
    }
}

/// One flow over all combinations of settings: a row each, with the bottleneck and what comes next.
///
/// # Errors
/// [`WhatIfError`] if a setting cannot be, [`SetupError`] if a site cannot carry the flow.
pub fn sweep(
    (name, text): (&str, &str),
    points: &[Vec<(&str, &str)>],
    flow: &Flow,
) -> Result<Sheet, Box<dyn std::error::Error>> {
    let mut columns: Vec<String> =
        points.first().into_iter().flatten().map(|(name, _)| (*name).to_owned()).collect();
    columns.extend(["GB/s", "bottleneck", "busy", "next", "it allows [GB/s]"].map(str::to_owned));
    let mut rows = Vec::new();
    for point in points {
        let (site, p) = case(name, text, point)?;
        let e = explain(&site, &p, flow)?;
        let mut row: Vec<Cell> = point.iter().map(|(_, value)| Cell::Text((*value).to_owned())).collect();
        let busy = e.stations.first().map_or(0.0, |station| station.busy);
        row.push(Cell::Number(e.rate.as_gigabytes()));
        row.push(Cell::Text(e.bottleneck()));
        row.push(Cell::Number((busy * 100.0).round() / 100.0));
        let next = e.following().next();
        row.push(Cell::Text(next.map_or("none near".to_owned(), |station| station.name.clone())));
        row.push(
            next.map_or(Cell::Text("-".to_owned()), |station| Cell::Number(station.ceiling.as_gigabytes())),
        );
        rows.push(row);
    }
    Ok(Sheet { title: format!("{flow} on {name}"), columns, rows })
}

impl fmt::Display for Flow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = match self.verb {
            Verb::Write => "write",
            Verb::Read => "read",
            Verb::Send => "send",
        };
        write!(f, "{verb} {} {} {}", self.client, self.server, self.size)
    }
}
