//! A client whose cases run inside of something: a network namespace with virtual machines on it.
//!
//! The client names a command; it is given this very program to run, which then runs the cases.

use std::error::Error;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::Arguments;
use crate::case::{Outcome, Ran};
use crate::client::Client;
use crate::packages;
use crate::verdict::{self, Record};

/// Runs the client's cases by its command. If that does not come to run them, they were not run.
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
    let log = arguments.out.join(format!("{}.within.log", client.name));
    let why = match packages::ensure(&client.packages) {
        Ok(()) => {
            let programs = millstream.parent().unwrap_or(Path::new("")).display().to_string();
            let words = command.replace("{bin}", &programs);
            let mut words = words.split_whitespace();
            let mut outer = Command::new(words.next().ok_or("`within` is empty")?);
            outer.args(words).arg(std::env::current_exe()?).args(["--within", &client.name]);
            outer.arg("--folder").arg(&arguments.folder).arg("--out").arg(&arguments.out);
            outer.arg("--millstream").arg(millstream).args(["--path", arguments.path.word()]);
            if let Some(text) = &arguments.only {
                outer.args(["--only", text]);
            }
            // Cases are told of on stderr; the log has what the command itself prints.
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
        let ran = Ran { name: case.name.clone(), outcome: Outcome::NotRun(why.clone()) };
        verdict::judge(client, case, ran, 0.0, &log)
    };
    let records: Vec<Record> = client.cases().iter().map(not_run).collect();
    verdict::save(&records, &results)?;
    Ok(records)
}
