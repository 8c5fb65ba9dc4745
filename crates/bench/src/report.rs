//! `docs/benchmarks.md`: one document from the results files of all machines.
//!
//! The repository keeps results files in `docs/benchmarks/MACHINE/NAME.jsonl`. The document is a function of these files
//! and of [`BENCHMARKS`] alone. The README shows the figures of [`HIGHLIGHTS`] on the machine with the most of them.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use millstream_report::{block, save};

use crate::results::{Header, Machine, Results, ResultsError};
use crate::{BENCHMARKS, Figure};

/// The figures that the README shows: benchmark, figure, and the baseline in words.
pub const HIGHLIGHTS: [(&str, &str, &str); 9] = [
    ("verbs", "WRITE 64 KiB, raw verbs", "memcpy"),
    ("verbs", "READ 64 KiB, raw verbs", "memcpy"),
    ("verbs", "SEND 64 KiB, raw verbs", "memcpy"),
    ("verbs", "WRITE rate 8 B inline, raw verbs", "UCX put over its own shared memory"),
    ("evb", "3 readout → 2 builder, batch 256, no kernel", "memcpy of one thread"),
    ("evb", "3 readout → 2 builder, batch 256, cluster7", "memcpy of one thread"),
    ("card", "node to card, WRITE 1 MiB", "memcpy"),
    ("card", "card to card, queued 1 MiB", "memcpy"),
    ("card", "doorbell to interrupt, polling card, median", "target"),
];

/// The name of the README's generated block.
const README_BLOCK: &str = "measured";

/// Copies the results files in `from` into the folders of their machines under `kept`. Then renders `document` and the
/// block of figures in `readme` from all files under `kept`. Returns the files written.
///
/// # Errors
/// [`ResultsError`] if a file cannot be read or written, or if results lack figures that the kept ones have. In that case
/// nothing is written.
pub fn update(
    from: &Path,
    kept: &Path,
    document: &Path,
    readme: &Path,
) -> Result<Vec<PathBuf>, ResultsError> {
    let mut new = Vec::new();
    for path in results_files(from)? {
        let results = Results::read(&path)?;
        let Header { benchmark, machine, .. } = &results.header;
        let to = kept.join(machine.folder()).join(format!("{benchmark}.jsonl"));
        let missing = if to.exists() { results.lacks(&Results::read(&to)?) } else { Vec::new() };
        if !missing.is_empty() {
            return Err(ResultsError::Partial { path, kept: to, missing });
        }
        new.push((to, results));
    }
    let mut written = Vec::new();
    for (to, results) in new {
        results.write(&to)?;
        written.push(to);
    }
    let results = load(kept)?;
    save(document, &render(&results))?;
    written.push(document.to_owned());
    let page = std::fs::read_to_string(readme)
        .map_err(|cause| ResultsError::Io { path: readme.to_owned(), cause })?;
    if let Some(page) = block::replace(&page, README_BLOCK, &highlights(&results)) {
        save(readme, &page)?;
        written.push(readme.to_owned());
    }
    Ok(written)
}

/// The figures of the README, from the machine with the most of them; of several such machines, the one measured last.
#[must_use]
pub fn highlights(results: &[Results]) -> String {
    let shown =
        results.iter().filter(|each| HIGHLIGHTS.iter().any(|(name, ..)| each.header.benchmark == *name));
    let best = shown.max_by_key(|each| {
        let Header { machine, date, .. } = &each.header;
        (highlights_of(results, machine).count(), date, machine)
    });
    let Some(Results { header: Header { machine, date, .. }, .. }) = best else {
        return "No machine has results yet.".to_owned();
    };
    let mut out = String::new();
    let mut commits = Vec::new();
    for (header, figure, baseline) in highlights_of(results, machine) {
        let short = figure.name.split(", vs ").next().unwrap_or(&figure.name);
        let [value, against, ratio] = figure.cells();
        // Writing to a string does not fail.
        let _ = writeln!(out, "| {short} | {value} {} | {baseline}: {against} | {ratio} |", figure.unit);
        if !commits.contains(&header.commit.as_str()) {
            commits.push(&header.commit);
        }
    }
    let Machine { cpu, cores, .. } = machine;
    format!(
        "{cpu}, {cores} cores; commit {}; {date}.\n\n| figure | value | baseline, same run | ratio |\n|---|--:|---|--:|\n{out}",
        commits.join(", "),
    )
}

/// The figures of [`HIGHLIGHTS`] that a machine has, each with the header of its results and its baseline in words.
fn highlights_of<'a>(
    results: &'a [Results],
    machine: &Machine,
) -> impl Iterator<Item = (&'a Header, &'a Figure, &'static str)> {
    HIGHLIGHTS.iter().filter_map(move |&(benchmark, name, baseline)| {
        let run = results
            .iter()
            .find(|each| each.header.benchmark == benchmark && each.header.machine == *machine)?;
        let figure = run.figures.iter().find(|figure| figure.name == name)?;
        Some((&run.header, figure, baseline))
    })
}

/// All results files under `kept`, one folder a machine.
///
/// # Errors
/// [`ResultsError`].
pub fn load(kept: &Path) -> Result<Vec<Results>, ResultsError> {
    let mut all = Vec::new();
    for folder in entries(kept)?.into_iter().filter(|path| path.is_dir()) {
        for path in results_files(&folder)? {
            all.push(Results::read(&path)?);
        }
    }
    Ok(all)
}

/// The results files in a folder, in order of their names; none if there is no such folder.
fn results_files(folder: &Path) -> Result<Vec<PathBuf>, ResultsError> {
    let mut paths = entries(folder)?;
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "jsonl"));
    Ok(paths)
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>, ResultsError> {
    let fail = |cause| ResultsError::Io { path: folder.to_owned(), cause };
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(fail)?,
    };
    let paths = entries.map(|entry| entry.map(|entry| entry.path()));
    let mut paths = paths.collect::<Result<Vec<_>, _>>().map_err(fail)?;
    paths.sort();
    Ok(paths)
}

/// The document.
#[must_use]
pub fn render(results: &[Results]) -> String {
    let mut out = String::from(
        "# Benchmarks\n\n\
         <!-- Written by `make bench-report` from docs/benchmarks/*/*.jsonl. Do not edit. -->\n\n\
         Each figure stands beside a baseline of the same run. The ratio is the figure \
         divided by its baseline. Each benchmark below says how its values follow from the rounds that stand above each \
         table.\n\n\
         To add this machine, run the benchmarks and then `make bench-report`.\n\n\
         ## What is measured\n",
    );
    // Writing to a string does not fail.
    for benchmark in &BENCHMARKS {
        let _ = write!(
            out,
            "\n### {}\n\n{}\n\n- Baseline: {}\n- Values: {}\n- Command: `{}`\n",
            benchmark.title, benchmark.measures, benchmark.baseline, benchmark.values, benchmark.command
        );
    }
    let mut machines: BTreeMap<&Machine, Vec<&Results>> = BTreeMap::new();
    for each in results {
        machines.entry(&each.header.machine).or_default().push(each);
    }
    if machines.is_empty() {
        out.push_str("\n## Results\n\nNo machine has results yet.\n");
    }
    for (machine, results) in machines {
        let plural = if machine.cores == 1 { "" } else { "s" };
        let kind = if machine.virtual_machine { ", virtual machine" } else { "" };
        let Machine { cpu, cpu_model, cores, .. } = machine;
        let _ = writeln!(out, "\n## {cpu} ({cpu_model}), {cores} core{plural}{kind}");
        for benchmark in &BENCHMARKS {
            for each in results.iter().filter(|each| each.header.benchmark == benchmark.name) {
                let _ = writeln!(out, "\n### {}: {}", machine.folder(), benchmark.name);
                section(&mut out, each);
            }
        }
    }
    out
}

/// A cell of a table, or an item of a list.
fn escaped(text: &str) -> String {
    text.replace('|', "\\|").replace('<', "&lt;")
}

fn section(out: &mut String, Results { header, figures }: &Results) {
    let plural = if header.rounds == 1 { "" } else { "s" };
    let _ = writeln!(
        out,
        "\nCommit {}, {}, Linux {}, {} round{plural}.{}\n",
        header.commit,
        header.date,
        header.kernel,
        header.rounds,
        match &header.only[..] {
            [] => String::new(),
            words => format!(" Figures whose names contain {} only.", words.join(" or ")),
        }
    );
    if !header.arguments.is_empty() {
        let profile = header.profile.as_deref().map(|profile| format!(", profile {profile}"));
        let built_from = header.built_from.as_deref().map(|commit| format!(", built from {commit}"));
        let _ = writeln!(
            out,
            "Command: `millstream {}`{}{}.\n",
            header.arguments.join(" "),
            profile.unwrap_or_default(),
            built_from.unwrap_or_default()
        );
    }
    out.push_str("| figure | value | unit | baseline | ratio |\n|---|--:|---|--:|--:|\n");
    for figure in figures {
        let [value, baseline, ratio] = figure.cells();
        let name = escaped(&figure.name);
        let _ = writeln!(out, "| {name} | {value} | {} | {baseline} | {ratio} |", figure.unit);
    }
    if !header.not_measured.is_empty() {
        out.push_str("\nNot measured in all rounds:\n\n");
        header.not_measured.iter().for_each(|figure| {
            let _ = writeln!(out, "- {}", escaped(&figure.to_string()));
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Figure;

    fn results(cpu: &str, benchmark: &str, commit: &str) -> Results {
        let machine =
            Machine { cpu: cpu.to_owned(), cpu_model: "6-85".to_owned(), cores: 2, virtual_machine: true };
        let header = Header {
            benchmark: benchmark.to_owned(),
            machine,
            kernel: "6.12.0".to_owned(),
            commit: commit.to_owned(),
            date: "2026-01-31".to_owned(),
            rounds: 5,
            only: Vec::new(),
            arguments: Vec::new(),
            profile: None,
            built_from: None,
            not_measured: Vec::new(),
        };
        let figures = vec![
            Figure::with_baseline("WRITE 64 KiB, raw verbs", 36.0, "GB/s", 40.0),
            Figure::without_baseline("latency", 0.18, "µs"),
        ];
        Results { header, figures }
    }

    #[test]
    fn a_section_a_machine_with_its_tables() {
        let text = render(&[
            results("Xeon", "wire", "b"),
            results("EPYC", "verbs", "c"),
            results("Xeon", "verbs", "a"),
        ]);
        let order = [
            "## What is measured",
            "## EPYC (6-85), 2 cores, virtual machine",
            "### epyc-6-85-2-cores: verbs",
            "Commit c, 2026-01-31, Linux 6.12.0, 5 rounds.",
            "## Xeon (6-85), 2 cores, virtual machine",
            "### xeon-6-85-2-cores: verbs",
            "Commit a,",
            "| WRITE 64 KiB, raw verbs | 36.0 | GB/s | 40.0 | 0.90 |",
            "| latency | 0.180 | µs |  |  |",
            "### xeon-6-85-2-cores: wire",
            "Commit b,",
        ];
        let mut rest = &text[..];
        for line in order {
            let (_, after) = rest.split_once(line).unwrap_or_else(|| panic!("{line} is missing in {rest}"));
            rest = after;
        }
    }

    #[test]
    fn a_section_names_its_command_and_what_is_not_measured() {
        let mut results = results("Xeon", "verbs", "a");
        let header = &mut results.header;
        header.arguments = ["bench", "verbs"].map(str::to_owned).into();
        (header.profile, header.built_from) = (Some("release".to_owned()), Some("b".to_owned()));
        let [name, reason] = ["rate", "no <device>"].map(str::to_owned);
        header.not_measured.push(crate::NotMeasured { name, reason });
        let text = render(&[results]);
        assert!(
            text.contains("Command: `millstream bench verbs`, profile release, built from b.\n"),
            "{text}"
        );
        assert!(text.contains("rounds:\n\n- rate: no &lt;device>\n"), "{text}");
    }

    #[test]
    fn every_benchmark_is_explained() {
        let text = render(&[]);
        for benchmark in &BENCHMARKS {
            assert!(
                text.contains(benchmark.measures) && text.contains(benchmark.baseline),
                "{}",
                benchmark.name
            );
        }
        assert!(text.ends_with("No machine has results yet.\n"));
    }

    #[test]
    fn new_results_replace_those_of_their_machine_and_keep_the_others() {
        let folder = tempfile::tempdir().unwrap();
        let [from, kept, document, readme] =
            ["new", "kept", "benchmarks.md", "README.md"].map(|name| folder.path().join(name));
        std::fs::write(&readme, "# Name\n<!-- measured: begin -->\n<!-- measured: end -->\n").unwrap();
        for old in [results("EPYC", "verbs", "old-epyc"), results("Xeon", "verbs", "old-xeon")] {
            let path = kept.join(old.header.machine.folder()).join("verbs.jsonl");
            old.write(&path).unwrap();
        }
        results("Xeon", "verbs", "new-xeon").write(&from.join("verbs.jsonl")).unwrap();
        let written = update(&from, &kept, &document, &readme).unwrap();
        assert_eq!(written, [kept.join("xeon-6-85-2-cores/verbs.jsonl"), document.clone(), readme.clone()]);
        let page = std::fs::read_to_string(&readme).unwrap();
        let row = "Xeon, 2 cores; commit new-xeon; 2026-01-31.";
        assert!(
            page.contains(row)
                && page.contains("| WRITE 64 KiB, raw verbs | 36.0 GB/s | memcpy: 40.0 | 0.90 |"),
            "{page}"
        );
        let text = std::fs::read_to_string(&document).unwrap();
        assert!(
            text.contains("old-epyc") && text.contains("new-xeon") && !text.contains("old-xeon"),
            "{text}"
        );
        assert_eq!(text, render(&load(&kept).unwrap()));
    }

    #[test]
    fn results_that_lack_kept_figures_are_refused_and_nothing_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let [from, kept, document, readme] =
            ["new", "kept", "benchmarks.md", "README.md"].map(|name| folder.path().join(name));
        let old = results("Xeon", "verbs", "old");
        let place = kept.join(old.header.machine.folder()).join("verbs.jsonl");
        old.write(&place).unwrap();
        let mut partial = results("Xeon", "verbs", "new");
        partial.figures.remove(1);
        partial.write(&from.join("verbs.jsonl")).unwrap();
        results("Xeon", "card", "new").write(&from.join("card.jsonl")).unwrap();
        let error = update(&from, &kept, &document, &readme).unwrap_err().to_string();
        assert!(error.contains("new/verbs.jsonl lacks 1 figure of") && error.contains("latency"), "{error}");
        assert_eq!(Results::read(&place).unwrap(), old);
        assert!(!document.exists() && !place.with_file_name("card.jsonl").exists());
    }

    #[test]
    fn the_readme_shows_the_machine_with_the_most_figures() {
        let machine = |cpu: &str, names: &[&str], date: &str| {
            let mut results = results(cpu, "verbs", cpu);
            results.figures =
                names.iter().map(|&name| Figure::with_baseline(name, 1.0, "GB/s", 1.0)).collect();
            date.clone_into(&mut results.header.date);
            results
        };
        let [write, read] = [HIGHLIGHTS[0].1, HIGHLIGHTS[1].1];
        let whole = machine("whole", &[write, read], "2026-01-30");
        let earlier = machine("earlier", &[write, read], "2026-01-29");
        let partial = machine("partial", &[write], "2026-01-31");
        let text = highlights(&[earlier, whole, partial]);
        assert!(
            text.starts_with("whole, 2 cores; commit whole; 2026-01-30.") && text.contains(read),
            "{text}"
        );
    }

    #[test]
    fn the_documents_in_the_repository_are_the_rendered_ones() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let docs = root.join("docs");
        let results = load(&docs.join("benchmarks")).unwrap();
        let readme = std::fs::read_to_string(root.join("README.md")).unwrap();
        let page =
            block::replace(&readme, README_BLOCK, &highlights(&results)).expect("the README has the block");
        assert!(readme == page, "README.md differs from the results; `make bench-report` writes it");
        let shown = HIGHLIGHTS.iter().filter(|(_, name, _)| page.contains(&format!("| {name} |"))).count();
        assert_eq!(shown, HIGHLIGHTS.len(), "README.md lacks rows: {page}");
        let expected = render(&results);
        let document = std::fs::read_to_string(docs.join("benchmarks.md")).unwrap();
        assert!(
            document == expected,
            "docs/benchmarks.md differs from the results; `make bench-report` writes it"
        );
    }
}
