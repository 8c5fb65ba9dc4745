//! Clients whose cases run in another environment, such as a network namespace with virtual machines.
//!
//! The wrapper command of the client starts this program again, which then runs the cases.

use std::error::Error;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::Arguments;
use crate::case::{CaseResult, Outcome};
use crate::client::Client;
use crate::packages;
use crate::verdict::{self, Record};

/// Runs the client's cases through its wrapper command. If that fails, the cases have not run.
pub(crate) fn run(
    client: &Client,
    command: &str,
    millstream: &Path,
    arguments: &Arguments,
) -> Result<Vec<Record>, Box<dyn Error>> {
    let results = crate::file(client, arguments);
    fs::create_dir_all(crate::results(&arguments.out, arguments.path))?;
    if results.exists() {
        fs::remove_file(&results)?;
    }
    let log = arguments.out.join(format!("{}.wrapper.log", client.name));
    let why = match packages::ensure(&client.packages) {
        Ok(()) => {
            let programs = millstream.parent().unwrap_or(Path::new("")).display().to_string();
            let words = command.replace("{bin}", &programs);
            let words = words.replace("{client}", &client.folder.display().to_string());
            let mut words = words.split_whitespace();
            let mut outer = Command::new(words.next().ok_or("`wrapper` is empty")?);
            outer.args(words).arg(std::env::current_exe()?).args(["--wrapped", &client.name]);
            outer.arg("--folder").arg(&arguments.folder).arg("--out").arg(&arguments.out);
            outer.arg("--millstream").arg(millstream).args(["--path", arguments.path.name()]);
            if let Some(text) = &arguments.only {
                outer.args(["--only", text]);
            }
            // Results appear on standard error; the log has the output of the command.
            let end = outer.stdin(Stdio::null()).stdout(File::create(&log)?).status();
            match end {
                Ok(_) if results.exists() => return verdict::load(&results),
                Ok(end) => format!("`{command}` did not run the cases: {end}"),
                Err(cause) => format!("`{command}`: {cause}"),
            }
        }
        Err(missing) => missing,
    };
    let not_run = |case: &crate::client::Case| {
        let result = CaseResult { name: case.name.clone(), outcome: Outcome::NotRun(why.clone()) };
        verdict::judge(client, case, result, 0.0, &log)
    };
    let records: Vec<Record> = client.cases().iter().map(not_run).collect();
    verdict::save(&records, &results)?;
    Ok(records)
}
