//! `millstream model`.

use std::error::Error;
use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;

use millstream_model::calibrate::{Report, fit, residuals};
use millstream_model::explain::{Flow, explain};
use millstream_model::predict::{predict, to_csv};
use millstream_model::{Parameters, table};

use crate::args::{ModelCommand, Settings};

mod event_builder;

fn parameters(settings: &Settings) -> Result<Parameters, Box<dyn Error>> {
    let mut parameters = Parameters::shipped();
    for setting in &settings.set {
        parameters.set(setting)?;
    }
    Ok(parameters)
}

pub(crate) fn run(command: &ModelCommand) -> Result<ExitCode, Box<dyn Error>> {
    match command {
        ModelCommand::Calibrate { settings, fit: anew } => {
            let rows = table::calibration();
            let mut parameters = parameters(settings)?;
            if *anew {
                let terminal = std::io::stderr().is_terminal();
                parameters = fit(&parameters, &rows, 2, |step| {
                    if terminal {
                        eprint!("\r\x1b[K{step}");
                        let _ = std::io::stderr().flush();
                    }
                });
                if terminal {
                    eprintln!();
                }
            }
            print!("{}", Report { parameters: &parameters, residuals: &residuals(&rows, &parameters) });
        }
        ModelCommand::Predict { questions, out, samples, settings } => {
            let rows = table::load(questions)?;
            let answers = predict(&rows, &parameters(settings)?, *samples);
            let silent = answers.iter().filter(|answer| answer.values.is_empty()).count();
            millstream_report::save(out, &to_csv(&answers))?;
            println!("{} questions, {silent} without an answer: {}", answers.len(), out.display());
        }
        ModelCommand::Figures { out, settings } => {
            let parameters = parameters(settings)?;
            std::fs::create_dir_all(out)?;
            for (name, chart) in millstream_model::figures::all(&parameters, |name| println!("{name}")) {
                millstream_report::save(&out.join(name).with_extension("svg"), &chart.svg())?;
                millstream_report::save(&out.join(name).with_extension("csv"), &chart.csv())?;
            }
            println!("written to {}", out.display());
        }
        ModelCommand::EventBuilder(options) => {
            return event_builder::run(options, &parameters(&options.settings)?);
        }
        ModelCommand::Explain { site, flow, settings } => {
            let site = millstream_site::load(site)?;
            let flow: Flow = flow.parse()?;
            print!("{}", explain(&site, &parameters(settings)?, &flow)?);
        }
    }
    Ok(ExitCode::SUCCESS)
}
