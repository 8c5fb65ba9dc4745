//! The document: program × transport × result of all clients.

use std::error::Error;
use std::path::Path;

use crate::client::{Client, Way};
use crate::verdict::{self, Record, Verdict, counts};

const HEAD: &str = "\
# Other people's programs on the soft device

`make conformance` runs them and writes this page; `make conformance-CLIENT` runs one client. They are Debian's
packages, unmodified, started by `millstream run`, server and client in processes of their own on one host. A
cell is how many cases passed of how many there are; what does not pass is listed with its reason. A case that
fails, passes against its exception, or cannot be run makes the command fail.
`conformance/CLIENT/cases.toml` has the cases, each as it would be typed. *Wire*: the same cases over RoCE v2 packets
between the two processes (`make conformance-wire`) instead of shared memory.
";

/// Writes the latest results of all clients into the file.
pub(crate) fn write(path: &Path, clients: &[Client], results: &Path) -> Result<(), Box<dyn Error>> {
    let mut text = HEAD.to_owned();
    let mut sections = String::new();
    text += "\n| client | Debian package | cases | wire |\n|---|---|---|---|\n";
    for client in clients {
        let file = results.join(format!("{}.jsonl", client.name));
        let records = verdict::load(&file)
            .map_err(|cause| format!("{}: {cause}; run the client {} first", file.display(), client.name))?;
        let wire =
            verdict::load(&crate::results(results, Way::Wire).join(format!("{}.jsonl", client.name))).ok();
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
        sections += &wire.map_or(String::new(), |records| over_the_wire(&records));
    }
    text += &sections;
    Ok(millstream_report::save(path, &text)?)
}

/// What does not pass over the wire.
fn over_the_wire(records: &[Record]) -> String {
    let mut reasons: Vec<(&str, Vec<&str>)> = Vec::new();
    for record in records.iter().filter(|record| record.verdict == Verdict::Excepted) {
        match reasons.iter_mut().find(|(reason, _)| *reason == record.reason) {
            Some((_, cases)) => cases.push(&record.case),
            None => reasons.push((&record.reason, vec![&record.case])),
        }
    }
    let mut text = String::new();
    for (reason, cases) in reasons {
        text += &format!("\nNot over the wire: {reason} (`{}`)\n", cases.join("`, `"));
    }
    for record in records.iter().filter(|record| !record.good(false)) {
        text += &format!("\n**Wrong over the wire**: `{}`: {}\n", record.case, record.what);
    }
    text
}

/// What the title's link is called.
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
        let here =
            |case: &&String| records.iter().any(|r| r.case == **case && r.verdict == Verdict::Excepted);
        let cases: Vec<String> =
            exception.cases.iter().filter(here).map(|case| format!("`{case}`")).collect();
        if !cases.is_empty() {
            let word = match exception.result {
                crate::client::Excepted::Fail => "Fails",
                crate::client::Excepted::Skip => "Skipped",
                crate::client::Excepted::Races => "Failed this time",
            };
            text += &format!("\n{word}: {} ({})\n", exception.reason, cases.join(", "));
        }
    }
    for record in records.iter().filter(|record| !record.good(false)) {
        text += &format!("\n**Wrong**: `{}`: {}\n", record.case, record.what);
    }
    text
}
