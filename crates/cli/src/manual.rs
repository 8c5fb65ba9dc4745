//! `millstream manual` and `millstream completions`: man pages and shell completions from the command line's definition.

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;

use clap::CommandFactory as _;
use clap_complete::Shell;
use millstream_report::save;

use crate::args::Arguments;

/// Prints the completion script of a shell.
pub(crate) fn print_completions(shell: Shell) -> ExitCode {
    clap_complete::generate(shell, &mut Arguments::command(), "millstream", &mut std::io::stdout());
    ExitCode::SUCCESS
}

/// Writes a man page for each command, such as `millstream-card-serve.1`.
pub(crate) fn write_pages(folder: &Path) -> Result<ExitCode, Box<dyn Error>> {
    std::fs::create_dir_all(folder)
        .map_err(|error| format!("cannot create {}: {error}", folder.display()))?;
    let mut command = Arguments::command().disable_help_subcommand(true);
    command.build();
    let count = write_page(&command, "millstream", folder)?;
    println!("{count} man pages in {}", folder.display());
    Ok(ExitCode::SUCCESS)
}

fn write_page(command: &clap::Command, name: &str, folder: &Path) -> Result<usize, Box<dyn Error>> {
    // `Command::build` has set the names for title and synopsis.
    let page = command.clone().version(env!("CARGO_PKG_VERSION"));
    let mut text = Vec::new();
    clap_mangen::Man::new(page).render(&mut text)?;
    save(&folder.join(format!("{name}.1")), &String::from_utf8(text)?)?;
    let mut count = 1;
    for subcommand in command.get_subcommands().filter(|subcommand| !subcommand.is_hide_set()) {
        count += write_page(subcommand, &format!("{name}-{}", subcommand.get_name()), folder)?;
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_visible_command_has_a_page() {
        let folder = tempfile::tempdir().unwrap();
        write_pages(folder.path()).unwrap();
        let page = std::fs::read_to_string(folder.path().join("millstream-evb-run.1")).unwrap();
        assert!(page.contains(".TH millstream-evb-run 1") && page.contains("millstream evb run"), "{page}");
        assert!(!folder.path().join("millstream-evb-unit.1").exists(), "hidden commands have no page");
    }
}
