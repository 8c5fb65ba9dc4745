//! Two sites beside each other: bandwidth, latency, power, energy and price.

use crate::benchmarks::perftest::{bandwidth, bandwidth_at, latency};
use crate::explain::slowest_link;
use crate::interval::{Interval, Level, factors::factors, leave_out, response};
use crate::parameters::Parameters;
use crate::path::{DataPath, PathError, Verb, data_path};
use crate::power::{Inventory, Load};
use crate::precision::Precision;
use crate::result_table::{ResultTable, TableValue};
use crate::rows::Category;
use millstream_site::Site;

/// A site with the two places to compare.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// Name in the table.
    pub name: String,
    /// The site.
    pub site: Site,
    /// Client: host or `host.card`.
    pub client: String,
    /// Server: host or `host.card`.
    pub server: String,
    /// Parameters with the site's own devices.
    pub parameters: Parameters,
}

/// Message sizes of bandwidth and latency.
const LONG: u32 = 1 << 20;
const SHORT: u32 = 8;

/// What is measured between the two places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Quantity {
    Bandwidth(Verb),
    Latency,
}

const QUANTITIES: [(&str, Quantity); 3] = [
    ("WRITE of 1 MiB [GB/s]", Quantity::Bandwidth(Verb::Write)),
    ("READ of 1 MiB [GB/s]", Quantity::Bandwidth(Verb::Read)),
    ("latency of a WRITE of 8 B [us]", Quantity::Latency),
];

impl Quantity {
    fn of(self, path: &DataPath, precision: Precision) -> f64 {
        match self {
            Quantity::Bandwidth(verb) => match precision {
                Precision::Full => bandwidth(path, verb, LONG, 128, false).rate.as_gigabytes(),
                Precision::Sample => {
                    bandwidth_at(precision, path, verb, LONG, 128, false).rate.as_gigabytes()
                }
            },
            Quantity::Latency => latency(path, Verb::Write, SHORT).nanos() * 1e-3,
        }
    }

    fn category(self, path: &DataPath) -> Category {
        match self {
            Quantity::Latency => Category::VerbsLatency,
            Quantity::Bandwidth(_) => Category::of_bandwidth(path.is_to_peer(), LONG),
        }
    }
}

impl Candidate {
    fn path(&self, p: &Parameters) -> Result<DataPath, PathError> {
        data_path(&self.site, p, &self.client, &self.server)
    }

    fn interval(&self, quantity: Quantity, samples: u64) -> Result<Interval, PathError> {
        let path = self.path(&self.parameters)?;
        let spreads = response::spreads(&self.parameters, samples, |p| {
            Some(vec![quantity.of(&self.path(p).ok()?, Precision::Sample)])
        });
        let factors = factors(leave_out::shipped(), Level::System, quantity.category(&path));
        let spread = spreads.first().copied().unwrap_or_default();
        let interval = Interval::new(quantity.of(&path, Precision::Full), spread, factors);
        Ok(match quantity {
            Quantity::Bandwidth(_) => interval.below(slowest_link(&path).as_gigabytes()),
            Quantity::Latency => interval,
        })
    }
}

fn number(value: f64) -> String {
    TableValue::Number(value).to_string()
}

/// A row of two intervals; the last field says which site has the larger value.
fn compared(name: &str, sites: [&Candidate; 2], [a, b]: [Interval; 2]) -> Vec<TableValue> {
    let text = |i: Interval| format!("{} ({} to {})", number(i.value), number(i.low), number(i.high));
    let larger = match () {
        () if a.low > b.high => sites[0].name.as_str(),
        () if b.low > a.high => sites[1].name.as_str(),
        () => "not certain: the intervals overlap",
    };
    [name.to_owned(), text(a), text(b), larger.to_owned()].map(TableValue::Text).to_vec()
}

/// Power, energy and price.
fn sums(sites: [&Candidate; 2], load: Option<Load>, rates: [f64; 2]) -> Vec<Vec<TableValue>> {
    let all = sites.map(|candidate| Inventory::new(&candidate.site, &candidate.parameters));
    let power = |inventory: &Inventory, value: f64| match inventory.without_power.len() {
        0 => number(value),
        _ => format!("{} without {}", number(value), list(&inventory.without_power)),
    };
    let price = |inventory: &Inventory, value: f64| match inventory.without_price.len() {
        0 => number(value),
        _ if inventory.price > 0.0 => format!("{} without {}", number(value), list(&inventory.without_price)),
        _ => format!("no prices; add them to {}", list(&inventory.without_price)),
    };
    let texts = |name: &str, [a, b]: [String; 2]| {
        [name.to_owned(), a, b, String::new()].map(TableValue::Text).to_vec()
    };
    let row = |name: &str, show: &dyn Fn(&Inventory, f64) -> String| {
        texts(name, [show(&all[0], rates[0]), show(&all[1], rates[1])])
    };
    let mut rows = vec![
        row("power without work [W]", &|i, _| power(i, i.idle.0)),
        row("power at full load [W]", &|i, _| power(i, i.active.0)),
    ];
    if let Some(load) = load {
        let at_load =
            |i: usize| power(&all[i], Inventory::power_of(&sites[i].site, &sites[i].parameters, load).0);
        rows.push(texts("power at this load [W]", [at_load(0), at_load(1)]));
    }
    rows.extend([
        row("energy of a WRITE [J/GB]", &|i, rate| power(i, i.active.0 / rate)),
        row("price", &|i, _| price(i, i.price)),
        row("price per GB/s of WRITE", &|i, rate| price(i, i.price / rate)),
    ]);
    rows
}

fn list(names: &std::collections::BTreeSet<String>) -> String {
    names.iter().map(String::as_str).collect::<Vec<_>>().join(", ")
}

/// Compares two sites; `samples` samples of the parameters give the intervals. A `load` adds a row with its power.
///
/// # Errors
/// [`PathError`] if a site has no path between its two places.
pub fn compare(sites: [&Candidate; 2], load: Option<Load>, samples: u64) -> Result<ResultTable, PathError> {
    let mut rows = Vec::new();
    let mut writes = [f64::NAN; 2];
    for (name, quantity) in QUANTITIES {
        let [a, b] = sites.map(|candidate| candidate.interval(quantity, samples));
        let pair = [a?, b?];
        if quantity == Quantity::Bandwidth(Verb::Write) {
            writes = pair.map(|interval| interval.value);
        }
        rows.push(compared(name, sites, pair));
    }
    rows.extend(sums(sites, load, writes));
    let columns = ["", &sites[0].name, &sites[1].name, "larger"].map(str::to_owned).to_vec();
    Ok(ResultTable { title: format!("{} and {}", sites[0].name, sites[1].name), columns, rows })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sites::shipped;

    fn candidate(name: &str) -> Candidate {
        let (client, server) = ("node0".to_owned(), "node1".to_owned());
        let site = shipped(name);
        let parameters = Parameters::shipped().with_devices(&site.devices).into_owned();
        Candidate { name: name.to_owned(), site, client, server, parameters }
    }

    #[test]
    fn a_faster_site_is_named_and_a_doubt_is_said() {
        let (edr, hdr) = (candidate("edr-pair"), candidate("hdr-fat-tree"));
        let table = compare([&edr, &hdr], None, 20).unwrap();
        let last = |row: usize| table.rows[row].last().unwrap().to_string();
        assert_eq!((table.rows.len(), last(0).as_str()), (8, "hdr-fat-tree"));
        let same = compare([&edr, &edr], Some(Load { cores: 0.5, ..Load::FULL }), 5).unwrap();
        let watts = |row: usize| same.rows[row][1].to_string().parse::<f64>().unwrap();
        assert!(same.rows[5][0].to_string().contains("this load"), "{same:?}");
        assert!(watts(3) < watts(5) && watts(5) < watts(4), "{same:?}");
        assert!(same.rows[0].last().unwrap().to_string().contains("overlap"));
        let energy = table.rows[5][1].to_string().parse::<f64>().unwrap();
        let power = table.rows[4][1].to_string().parse::<f64>().unwrap();
        assert!(energy > 0.05 * power && energy < power, "{energy} J/GB of {power} W");
    }
}
