//! `millstream model`: calibration, predictions, bottleneck analysis and simulated benchmarks.

use std::error::Error;
use std::io::{IsTerminal as _, Write as _};
use std::path::Path;
use std::process::ExitCode;

use millstream_model::calibrate::{CalibrationReport, fit, residuals};
use millstream_model::compare::{Candidate, compare};
use millstream_model::congestion;
use millstream_model::engine::Picos;
use millstream_model::explain::{Flow, explain_sweep, sweep_table};
use millstream_model::flows::{self, concurrent_with_intervals};
use millstream_model::interval::leave_out::{LeaveOutReport, leave_out};
use millstream_model::measure::{Benchmark, measure, measure_with_intervals};
use millstream_model::predict::{predict, to_csv};
use millstream_model::result_table::{ResultTable, TableValue};
use millstream_model::{Parameters, rows, sweep};
use millstream_report::{eprint, eprint_line};
use millstream_site::Site;

use crate::args::model::{ModelCommand, Settings};

mod calibrate_site;
mod event_builder;
mod output;

use output::Output;

/// More flows are summed up by what limits them.
const MOST_FLOWS_SHOWN: usize = 40;

fn parameters(settings: &Settings) -> Result<Parameters, sweep::SweepError> {
    sweep::parameters(&sweep::settings(&settings.set)?)
}

/// Parameters with the devices of a site.
fn parameters_of(settings: &Settings, site: &Site) -> Result<Parameters, sweep::SweepError> {
    let [parameters] = sweep::parameters_of(&sweep::settings(&settings.set)?, [&site.devices])?;
    Ok(parameters)
}

pub(crate) fn run(command: &ModelCommand) -> Result<ExitCode, Box<dyn Error>> {
    match command {
        ModelCommand::Calibrate {
            settings,
            measurements,
            site: Some(site),
            client,
            server,
            disk,
            out,
            ..
        } if !measurements.is_empty() => {
            let places = (client.as_deref(), server.as_deref(), disk.as_deref());
            calibrate_site::run(settings, measurements, site, places, out.as_deref())?;
        }
        ModelCommand::Calibrate { settings, fit: fit_again, leave_one_out, .. } => {
            let rows = rows::calibration();
            let mut parameters = parameters(settings)?;
            if *fit_again {
                let terminal = std::io::stderr().is_terminal();
                parameters = fit(&parameters, &rows, 2, |step| {
                    if terminal {
                        eprint(format_args!("\r\x1b[K{step}"));
                        let _ = std::io::stderr().flush();
                    }
                });
                if terminal {
                    eprint_line!("");
                }
            }
            if let Some(samples) = leave_one_out {
                let rows = leave_out(&parameters, *samples, |_| ());
                print!("{}", LeaveOutReport(&rows));
                return Ok(ExitCode::SUCCESS);
            }
            print!(
                "{}",
                CalibrationReport { parameters: &parameters, residuals: &residuals(&rows, &parameters) }
            );
        }
        ModelCommand::Predict { questions, out, samples, settings } => {
            let rows = rows::load(questions)?;
            let answers = predict(&rows, &parameters(settings)?, *samples);
            let unanswered = answers.iter().filter(|answer| answer.values.is_empty()).count();
            output::save(out, &to_csv(&answers))?;
            if !output::takes_standard_output(Some(out)) {
                println!("{} questions, {unanswered} unanswered: {}", answers.len(), out.display());
            }
        }
        ModelCommand::Figures { out, settings } => {
            let parameters = parameters(settings)?;
            std::fs::create_dir_all(out)?;
            for (name, chart) in millstream_model::figures::all(&parameters, |name| println!("{name}")) {
                millstream_report::save(&out.join(name).with_extension("svg"), &chart.svg())?;
                millstream_report::save(&out.join(name).with_extension("csv"), &chart.csv())?;
            }
            println!("figures are in {}", out.display());
        }
        ModelCommand::EventBuilder(options) => {
            return event_builder::run(options);
        }
        ModelCommand::Explain { site, flow, samples, settings, output } => {
            let output = Output::new(output)?;
            let (name, text) = read(site)?;
            let flow: Flow = flow.parse()?;
            let settings = sweep::settings(&settings.set)?;
            let points = sweep::combinations(&settings)?;
            let explanations = explain_sweep((&name, &text), &points, &flow, *samples)?;
            if let [explanation] = explanations.as_slice() {
                output.text(explanation);
            }
            if points.len() > 1 || output.has_documents() {
                let table = sweep_table(&name, &flow, &points, &explanations);
                if points.len() > 1 {
                    output.text(&table);
                }
                // The first setting with several values is the x axis; the others form series.
                let x = settings.iter().position(|setting| setting.values.len() > 1).unwrap_or(0);
                let series_columns: Vec<usize> =
                    (0..settings.len()).filter(|&i| i != x && settings[i].values.len() > 1).collect();
                if output.has_picture() && points.len() < 2 {
                    return Err(
                        "--svg draws a sweep: give --set several values, for example u280.reads=1..16".into(),
                    );
                }
                output.documents(&table, (x, settings.len()), &series_columns)?;
            }
        }
        ModelCommand::Flows { site, flows, pattern, bytes, routing, samples, settings, tables } => {
            let output = Output::of_tables(tables)?;
            let (name, text) = read(site)?;
            let settings = sweep::settings(&settings.set)?;
            let points = sweep::combinations(&settings)?;
            let [point] = points.as_slice() else {
                return Err("`model flows` takes one value per --set".into());
            };
            let (site, parameters) = sweep::apply(&name, &text, point)?;
            let mut all = flows.iter().map(|flow| flow.parse()).collect::<Result<Vec<Flow>, String>>()?;
            if let Some(pattern) = pattern {
                all.extend(pattern.flows(&site, *bytes)?);
            }
            let rates = concurrent_with_intervals(&site, &parameters, &all, *routing, *samples)?;
            let table = flows::table(&name, &rates);
            if rates.len() <= MOST_FLOWS_SHOWN {
                output.text(&table);
            }
            if rates.len() > 1 {
                output.text(&flows::summary(&name, &rates));
            }
            output.documents(&table, (0, 2), &[])?;
        }
        ModelCommand::Congestion { site, to, from, milliseconds, pause_above, settings } => {
            if !(0.1..=10_000.0).contains(milliseconds) {
                return Err(format!("--milliseconds {milliseconds}: must be 0.1 to 10000").into());
            }
            let site = millstream_site::load(site)?;
            let mut incast = congestion::incast_of(&site, &parameters_of(settings, &site)?, to, from)?;
            incast.duration = Picos::from_seconds(milliseconds * 1e-3);
            if let Some(above) = pause_above {
                incast.pause = [*above, above.saturating_sub(2 * u64::from(incast.mtu))];
            }
            print!("{}", congestion::table(to, &incast));
        }
        ModelCommand::Compare { first, second, client, server, load, samples, settings } => {
            let sites = [millstream_site::load(first)?, millstream_site::load(second)?];
            let of_sites = sweep::parameters_of(
                &sweep::settings(&settings.set)?,
                sites.each_ref().map(|site| &site.devices),
            )?;
            let ([site, other_site], [parameters, other_parameters]) = (sites, of_sites);
            let places = [client.as_deref(), server.as_deref()];
            let first = candidate(first, site, parameters, places)?;
            let second = candidate(second, other_site, other_parameters, places)?;
            print!("{}", compare([&first, &second], load.load()?, *samples)?);
        }
        ModelCommand::Measure { benchmark, site, client, server, sizes, samples, settings, output } => {
            let output = Output::new(output)?;
            let settings = sweep::settings(&settings.set)?;
            let table = measured(*benchmark, site, (client, server), sizes, &settings, *samples)?;
            output.text(&table);
            let x = settings.len();
            let series_columns: Vec<usize> = (0..x).filter(|&i| settings[i].values.len() > 1).collect();
            output.documents(&table, (x, x + 1 + benchmark.main_column()), &series_columns)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// A site with two places, by default its first two hosts.
fn candidate(
    file: &Path,
    site: Site,
    parameters: Parameters,
    [client, server]: [Option<&str>; 2],
) -> Result<Candidate, Box<dyn Error>> {
    let name = file.file_stem().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    let place = |given: Option<&str>, i: usize| {
        given.map(str::to_owned).or_else(|| site.hosts.get(i).map(|host| host.name.clone()))
    };
    let (Some(client), Some(server)) = (place(client, 0), place(server, 1)) else {
        return Err(
            format!("{}: has fewer than two hosts; name --client and --server", file.display()).into()
        );
    };
    Ok(Candidate { name, site, client, server, parameters })
}

/// Name and text of a site file.
fn read(site: &Path) -> Result<(String, String), Box<dyn Error>> {
    // Reports errors of the unedited file, with their lines.
    millstream_site::load(site)?;
    Ok((site.display().to_string(), std::fs::read_to_string(site)?))
}

/// Results of a benchmark for every combination of settings.
fn measured(
    benchmark: Benchmark,
    site: &Path,
    (client, server): (&str, &str),
    sizes: &[u64],
    settings: &[sweep::Setting],
    samples: u64,
) -> Result<ResultTable, Box<dyn Error>> {
    let (name, text) = read(site)?;
    let info = benchmark.info();
    let main = info.columns[benchmark.main_column()];
    let ends = if samples > 0 { vec![format!("{main}, low"), format!("{main}, high")] } else { Vec::new() };
    let sizes = if sizes.is_empty() { benchmark.sizes() } else { sizes.to_vec() };
    let columns = (settings.iter().map(|setting| setting.name.clone()))
        .chain(["bytes".to_owned()])
        .chain(info.columns.iter().map(|&column| column.to_owned()))
        .chain(ends);
    let mut table = ResultTable {
        title: format!("{} {client} {server}, {name}: {}", info.name, info.definition),
        columns: columns.collect(),
        rows: Vec::new(),
    };
    for point in sweep::combinations(settings)? {
        let (site, parameters) = sweep::apply(&name, &text, &point)?;
        let set: Vec<TableValue> =
            point.iter().map(|(_, value)| TableValue::Text((*value).to_owned())).collect();
        let between = (client, server);
        let rows = match samples {
            0 => measure(&site, &parameters, benchmark, between, &sizes)?,
            _ => measure_with_intervals(&site, &parameters, benchmark, between, &sizes, samples)?,
        };
        table.rows.extend(rows.into_iter().map(|row| [set.clone(), row].concat()));
    }
    Ok(table)
}
