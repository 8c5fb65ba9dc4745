//! The log book on a full disk.

use millstream_control::directory::RunNumber;
use millstream_control::logbook::{Entry, EntryKind, Logbook};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::path::Path;
use std::process::Command;

/// The log book that the child process of the test writes.
const BOOK: &str = "MILLSTREAM_TEST_LOGBOOK";
const NAME: &str = "logbook::an_entry_that_a_full_disk_cut_does_not_spoil_the_next";

fn comment(text: &str) -> Entry {
    let kind = EntryKind::Comment { operator: "vera".to_owned(), text: text.to_owned() };
    Entry::now(RunNumber(1), kind)
}

/// Writes until the limit of a file's size cuts an entry, as a full disk does; then the limit is gone.
fn write(path: &Path) {
    let mut book = Logbook::open(path).unwrap();
    let (before, after) = (comment(&"x".repeat(500)), comment("the disk has space again"));
    setrlimit(Resource::Fsize, Rlimit { current: Some(1000), ..getrlimit(Resource::Fsize) }).unwrap();
    book.append(&before).unwrap();
    let error = book.append(&before).unwrap_err().to_string();
    assert!(error.contains("logbook.jsonl: cannot write"), "{error}");
    let unlimited = getrlimit(Resource::Fsize).maximum;
    setrlimit(Resource::Fsize, Rlimit { current: unlimited, maximum: unlimited }).unwrap();
    book.append(&after).unwrap();
    drop(book);
    assert_eq!(Logbook::open(path).unwrap().recent(10), [before, after]);
}

#[test]
fn an_entry_that_a_full_disk_cut_does_not_spoil_the_next() {
    if let Some(path) = std::env::var_os(BOOK) {
        return write(Path::new(&path));
    }
    let folder = tempfile::tempdir().unwrap();
    // The limit is one of the whole process. Its signal would end the process; the shell's children ignore it.
    let child = Command::new("sh")
        .args(["-c", "trap '' XFSZ; exec \"$0\" \"$@\""])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", NAME])
        .env(BOOK, folder.path().join("logbook.jsonl"))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success() && text.contains("1 passed"), "{text}");
}
