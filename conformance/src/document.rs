//! The page with the results of all clients: program × transport.

use std::error::Error;
use std::path::Path;

use crate::client::{Client, DataPath};
use crate::verdict::{self, Record, Verdict, counts};

const HEAD: &str = "\
# Conformance: third-party programs on the soft device

`make conformance` runs these programs and writes this page; `make conformance-CLIENT` runs one client. The programs
are unmodified Debian packages, started by `millstream run`, server and client as two processes on one host. Cells
have the number of passed cases and of all cases. Waived cases are listed with the reason. The command fails if a case
fails unexpectedly, passes despite its exception, or cannot run. `conformance/CLIENT/cases.toml` has the command lines.
*Wire* is the same cases over RoCE v2 packets (`make conformance-wire`) instead of shared memory.
";

/// Writes the latest results of all clients into the file.
pub(crate) fn write(path: &Path, clients: &[Client], results: &Path) -> Result<(), Box<dyn Error>> {
    let mut text = HEAD.to_owned();
    let mut sections = String::new();
    text += "\n| client | Debian package | cases | wire |\n|---|---|---|---|\n";
    for client in clients {
        let file = results.join(format!("{}.jsonl", client.name));
        let records = verdict::load(&file).map_err(|cause| {
            format!("{}: {cause}; run `make conformance-{}` first", file.display(), client.name)
        })?;
        let wire =
            verdict::load(&crate::results(results, DataPath::Wire).join(format!("{}.jsonl", client.name)))
                .ok();
        let packages: Vec<String> =
            client.packages.iter().map(|(name, version)| format!("{name} {version}")).collect();
        text += &format!(
            "| [{}](#{}) | {} | {} | {} |\n",
            client.title,
            anchor(&client.title),
            packages.join(", "),
            counts(&records),
            wire.as_ref().map_or("–".to_owned(), |records| counts(records))
        );
        sections += &section(client, &records);
        sections += &wire.map_or(String::new(), |records| wire_section(&records));
    }
    text += &sections;
    Ok(millstream_report::save(path, &text)?)
}

/// Waived and failed cases over packets.
fn wire_section(records: &[Record]) -> String {
    let mut reasons: Vec<(&str, Vec<&str>)> = Vec::new();
    for record in records.iter().filter(|record| record.verdict == Verdict::Waived) {
        match reasons.iter_mut().find(|(reason, _)| *reason == record.reason) {
            Some((_, cases)) => cases.push(&record.case),
            None => reasons.push((&record.reason, vec![&record.case])),
        }
    }
    let mut text = String::new();
    for (reason, cases) in reasons {
        text += &format!("\nOver packets, waived: {reason} (`{}`)\n", cases.join("`, `"));
    }
    for record in records.iter().filter(|record| !record.is_ok(false)) {
        text += &format!("\n**Failed over packets**: `{}`: {}\n", record.case, record.what);
    }
    text
}

/// Link target of a title.
fn anchor(title: &str) -> String {
    let kept = |c: &char| c.is_alphanumeric() || [' ', '-'].contains(c);
    title.to_lowercase().chars().filter(kept).collect::<String>().replace(' ', "-")
}

fn section(client: &Client, records: &[Record]) -> String {
    let mut text = format!("\n## {}\n\n{}\n\n", client.title, client.about.trim());
    let mut transports: Vec<&str> = Vec::new();
    let mut programs: Vec<&str> = Vec::new();
    for record in records.iter().filter(|record| record.verdict != Verdict::Stale) {
        if !transports.contains(&record.transport.as_str()) {
            transports.push(&record.transport);
        }
        if !programs.contains(&record.program.as_str()) {
            programs.push(&record.program);
        }
    }
    text += &format!("| program | {} |\n|---|{}\n", transports.join(" | "), "--:|".repeat(transports.len()));
    for program in programs {
        text += &format!("| `{program}` |");
        for transport in &transports {
            let of_both = |record: &&Record| record.program == program && record.transport == *transport;
            let all = records.iter().filter(of_both).count();
            let passed = records.iter().filter(of_both).filter(|r| r.verdict == Verdict::Pass).count();
            let cell = if all == 0 { "–".to_owned() } else { format!("{passed} of {all}") };
            text += &format!(" {cell} |");
        }
        text.push('\n');
    }
    for exception in &client.exceptions {
        let here = |case: &&String| records.iter().any(|r| r.case == **case && r.verdict == Verdict::Waived);
        let cases: Vec<String> =
            exception.cases.iter().filter(here).map(|case| format!("`{case}`")).collect();
        if !cases.is_empty() {
            let word = match exception.result {
                crate::client::ExpectedResult::Fail => "Fails",
                crate::client::ExpectedResult::Skip => "Skipped",
                crate::client::ExpectedResult::Flaky => "Flaky, failed in this run",
            };
            text += &format!("\n{word}: {} ({})\n", exception.reason, cases.join(", "));
        }
    }
    for record in records.iter().filter(|record| !record.is_ok(false)) {
        text += &format!("\n**Failed**: `{}`: {}\n", record.case, record.what);
    }
    text
}
