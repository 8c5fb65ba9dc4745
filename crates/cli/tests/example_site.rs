//! Runs the commands of `examples/5-model-your-site/README.md`, and compares their output with it.

use std::path::Path;
use std::process::Command;

/// The contents of the fenced blocks of a language, in order.
fn blocks(text: &str, language: &str) -> Vec<String> {
    let fence = format!("```{language}\n");
    text.split(&fence).skip(1).filter_map(|rest| Some(rest.split_once("```")?.0.to_owned())).collect()
}

/// The words of a command line with double quotes.
fn words(line: &str) -> Vec<String> {
    let quoted = line.split('"').enumerate();
    quoted
        .flat_map(|(i, part)| match i % 2 {
            0 => part.split_whitespace().map(str::to_owned).collect(),
            _ => vec![part.to_owned()],
        })
        .collect()
}

#[test]
fn commands_print_what_the_readme_says() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let readme = std::fs::read_to_string(root.join("examples/5-model-your-site/README.md")).unwrap();
    let (commands, outputs) = (blocks(&readme, "sh"), blocks(&readme, "text"));
    assert_eq!((commands.len(), outputs.len()), (3, 3));
    for (command, expected) in commands.iter().zip(&outputs) {
        let words = words(command);
        assert_eq!(words[0], "millstream");
        let mut run = Command::new(env!("CARGO_BIN_EXE_millstream"));
        let output = run.current_dir(&root).args(&words[1..]).output().expect("the program starts");
        let shown = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
        // A line with an ellipsis stands for the rest.
        let (beginning, rest) = match expected.strip_suffix("…\n") {
            Some(beginning) => (beginning, true),
            None => (expected.as_str(), false),
        };
        let same = if rest { shown.starts_with(beginning) } else { shown == beginning };
        assert!(same, "{command}: printed\n{shown}\nexpected\n{expected}");
    }
}
