//! Commands that a program built with fewer Cargo features does not have.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory as _, FromArgMatches as _};
use millstream_report::eprint_line;

use crate::args::Arguments;

/// Commands that need a feature: command, feature, whether this program has it.
const COMMANDS: [(&str, &str, bool); 9] = [
    ("bench", "bench", cfg!(feature = "bench")),
    ("evb control", "control", cfg!(feature = "control")),
    ("evb ctl", "control", cfg!(feature = "control")),
    ("completions", "manual", cfg!(feature = "manual")),
    ("manual", "manual", cfg!(feature = "manual")),
    ("model", "model", cfg!(feature = "model")),
    ("site up", "torus", cfg!(feature = "torus")),
    ("stencil", "stencil", cfg!(feature = "stencil")),
    ("torus", "torus", cfg!(feature = "torus")),
];

/// What builds a program with all features.
const COMPLETE: &str =
    "`make build` builds the complete program, target/release/millstream (docs/install.md)";

/// Parses the command line. A command that this program lacks ends it with the feature to build with.
pub(crate) fn parse() -> Arguments {
    let parsed = Arguments::command().try_get_matches().and_then(|matches| {
        Arguments::from_arg_matches(&matches).map_err(|error| error.format(&mut Arguments::command()))
    });
    parsed.unwrap_or_else(|error| {
        if let Some(missing) = missing_command(&error) {
            eprint_line!("millstream: {missing}");
            std::process::exit(2);
        }
        error.exit()
    })
}

/// The message for a command that this program lacks.
fn missing_command(error: &clap::Error) -> Option<String> {
    if error.kind() != ErrorKind::InvalidSubcommand {
        return None;
    }
    let Some(ContextValue::String(given)) = error.get(ContextKind::InvalidSubcommand) else { return None };
    message(&COMMANDS, given)
}

/// The message for a subcommand among these commands. Names of subcommands are unique.
fn message(commands: &[(&str, &str, bool)], given: &str) -> Option<String> {
    let (command, feature, _) =
        commands.iter().find(|(command, _, has)| !has && command.rsplit(' ').next() == Some(given))?;
    Some(format!(
        "this program was built without the feature `{feature}`, which `millstream {command}` needs; {COMPLETE}"
    ))
}

/// The end of `millstream --help`: the commands that this program lacks.
pub(crate) fn missing_commands() -> String {
    let missing: Vec<_> = COMMANDS.iter().filter(|(_, _, has)| !has).map(|(command, ..)| *command).collect();
    if missing.is_empty() {
        String::new()
    } else {
        format!("Not in this program: {}; {COMPLETE}.", missing.join(", "))
    }
}

/// Recognises WebAssembly modules in a program without their compiler, to refuse them with the cause.
#[cfg(not(feature = "wasm"))]
pub(crate) struct NoWasm;

#[cfg(not(feature = "wasm"))]
impl millstream_card_server::kernel::KernelLoader for NoWasm {
    fn format(&self) -> &'static str {
        "WebAssembly module (not in this program)"
    }

    fn recognises(&self, image: &[u8]) -> bool {
        image.starts_with(b"\0asm") || image.trim_ascii_start().starts_with(b"(module")
    }

    fn load(
        &self,
        image: &[u8],
    ) -> Result<millstream_card_server::kernel::LoadedKernel, millstream_card_abi::command::Fault> {
        use millstream_card_abi::command::{Cause, Fault};
        eprint_line!(
            "millstream: a WebAssembly kernel is refused: this program was built without the feature `wasm`; {COMPLETE}"
        );
        let first = image.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        Err(Fault::new(Cause::KernelFormat, first))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The subcommand that a command's words name.
    fn find<'a>(command: &'a clap::Command, words: &str) -> Option<&'a clap::Command> {
        words.split(' ').try_fold(command, |command, word| command.find_subcommand(word))
    }

    #[test]
    fn the_program_has_a_command_exactly_if_it_has_its_feature() {
        let program = Arguments::command();
        for (command, feature, has) in COMMANDS {
            assert_eq!(find(&program, command).is_some(), has, "`{command}` of the feature {feature}");
        }
    }

    #[test]
    fn a_missing_command_names_its_feature() {
        let commands = [("evb ctl", "control", false), ("model", "model", true)];
        let text = message(&commands, "ctl").unwrap();
        assert!(text.contains("`control`") && text.contains("`millstream evb ctl`"), "{text}");
        assert_eq!(message(&commands, "model"), None, "the program has it");
        assert_eq!(message(&commands, "modle"), None, "there is no such command");
    }
}
