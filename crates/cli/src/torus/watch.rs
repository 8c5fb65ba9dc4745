//! `millstream torus watch`.

use std::error::Error;
use std::ops::ControlFlow;
use std::process::ExitCode;

use millstream_torus::service::watcher::watch;
use millstream_torus::service::{TorusState, picture};

use super::TorusWatchOptions;

pub(super) fn run(options: &TorusWatchOptions) -> Result<ExitCode, Box<dyn Error>> {
    let mut shown: Option<TorusState> = None;
    let mut failure = None;
    watch(&options.supervisors, options.key.find()?, |state| {
        if shown.as_ref() != Some(state) {
            if let Err(error) = show(state, options) {
                failure = Some(error);
                return ControlFlow::Break(());
            }
            shown = Some(state.clone());
        }
        if options.once { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    failure.map_or(Ok(ExitCode::SUCCESS), Err)
}

fn show(state: &TorusState, options: &TorusWatchOptions) -> Result<(), Box<dyn Error>> {
    if options.json {
        println!("{}", serde_json::to_string(state)?);
    } else {
        println!("{}", picture::text(state));
    }
    if let Some(file) = &options.svg {
        millstream_report::save(file, &picture::svg(state))?;
    }
    Ok(())
}
