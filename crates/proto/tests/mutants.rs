//! Breaks one rule at a time in a copy of the crate, and expects a test to notice: `make proto-mutants`.
//!
//! A text that is not in the source exactly once fails too, in every run of the tests, so the list cannot go stale.
//! `ONLY=requester` takes the rules whose file or description contains that text.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The rule, where it is, and what becomes of it.
struct Mutant {
    rule: &'static str,
    file: &'static str,
    from: &'static str,
    to: &'static str,
}

macro_rules! mutants {
    ($($rule:literal in $file:literal: $from:literal => $to:literal;)*) => {
        const MUTANTS: &[Mutant] = &[$(Mutant { rule: $rule, file: $file, from: $from, to: $to }),*];
    };
}

mutants! {
    "packet numbers wrap at 24 bits" in "sequence.rs":
        "psn.ahead_of(self.psn()) as i64" => "psn.get() as i64 - self.psn().get() as i64";
    "a gap is told once" in "responder/mod.rs":
        "self.early.is_none_or(|last| at <= last)" => "true";
    "a packet lost again is told again" in "responder/mod.rs":
        "self.early.is_none_or(|last| at <= last)" => "self.early.is_none()";
    "an RNR NAK is no gap" in "responder/mod.rs":
        "self.early = Some(at);\n        self.answer_refused" => "self.answer_refused";
    "what was lost is all that is missing" in "responder/mod.rs":
        "self.keep_for_later(at, packet);" => "";
    "what came early ends nothing" in "responder/kept.rs":
        "Err(Stop::Refused(Refused { receive: None, .. })) => {" => "Err(Stop::Refused(Refused { receive: None, .. })) if false => {";
    "kept messages take a receive request each" in "responder/kept.rs":
        "Ok(()) => return Ok(true)," => "Ok(()) => return self.handle_kept(memory, events),";
    "what is kept is bounded" in "early.rs":
        "at.since(expected) >= PACKETS" => "at.since(expected) >= 1 << 20";
    "what was kept is acknowledged at once" in "responder/kept.rs":
        "            self.acknowledge(last);" => "            let _ = last;";
    "the next gap is told when it was lost again" in "responder/kept.rs":
        "self.early = self.kept.last();" => "";
    "a lost packet is not timed" in "requester/patience.rs":
        "        self.timed = None;\n" => "";
    "a refusal is said again" in "responder/mod.rs":
        "if is_about && self.answers.is_empty()" => "if false && is_about";
    "packets have the length of their place" in "responder/mod.rs":
        "if follows && fits {" => "if follows {";
    "packets follow each other in their message" in "responder/mod.rs":
        "if follows && fits {" => "if fits {";
    "a duplicate is acknowledged without naming a READ" in "responder/duplicate.rs":
        "self.acknowledge(last);" => "self.acknowledge(self.expected.before().max(last));";
    "a duplicate READ does not reset the responder" in "responder/duplicate.rs":
        "if !waits && self.has_room() {" => "self.expected = at;\n        if !waits && self.has_room() {";
    "a READ again asks for a part of the first one" in "responder/duplicate.rs":
        "u64::from(reth.length()) <= left" => "true";
    "an answer that waits is not said twice" in "responder/duplicate.rs":
        "is_same && !waits && self.has_room()" => "is_same";
    "a late double ends nothing" in "responder/answer.rs":
        "Err(nak) if again => {" => "Err(nak) if again && false => {";
    "answers do not pile up" in "responder/answer.rs":
        "self.answers.len() < 2 * usize::from(self.config.max_dest_rd_atomic) + 16" => "true";
    "acknowledgements are put together" in "responder/answer.rs":
        "*last = answer;" => "let _ = last;\n            self.answers.push_back(answer);";
    "operations that are remembered are bounded" in "responder/execute.rs":
        "self.resources.len() >= usize::from(self.config.max_dest_rd_atomic).max(1)" => "self.resources.len() >= 1000";
    "operations at a time are limited" in "responder/execute.rs":
        "if under_way < most {" => "if under_way < most + 1000 {";
    "a WRITE is as long as announced" in "responder/execute.rs":
        "if (rest == 0) != ends {" => "if false && ends {";
    "an atomic write has eight bytes" in "responder/execute.rs":
        "reth.length() != 8 || " => "";
    "a transfer of nothing checks no key" in "responder/execute.rs":
        "if len > 0 {\n                    memory.check" => "{\n                    memory.check";
    "only wanted acknowledgements are sent" in "responder/execute.rs":
        "if packet.bth().ack_req() {" => "{";
    "seven retries are seven" in "requester/mod.rs":
        "if self.retries_left == 0 {" => "if self.retries_left == 0 && self.config.retry_count != 7 {";
    "progress brings retries back" in "requester/mod.rs":
        "self.retries_left = self.config.retry_count;" => "";
    "completions are in order" in "requester/mod.rs":
        "for posted in self.queue.drain(..) {" => "for posted in self.queue.drain(..).rev() {";
    "timers die with the queue pair" in "requester/mod.rs":
        "self.timers = Timers::default();\n        self.stopped" => "self.stopped";
    "local work is done in its turn" in "requester/mod.rs":
        "posted.end <= at && !is_undone" => "posted.end <= at && (!is_undone || true)";
    "a drained queue begins nothing" in "requester/send.rs":
        "if self.draining && begins && posted.start >= self.max {" => "if false {";
    "a fence waits" in "requester/send.rs":
        "if posted.fence && begins" => "if posted.fence && !begins";
    "READs under way are limited" in "requester/send.rs":
        "self.outstanding.len() >= usize::from(self.config.max_rd_atomic)" => "self.outstanding.len() >= 1000";
    "the window is kept" in "requester/send.rs":
        "in_flight + plan.span <= window" => "in_flight + plan.span <= u32::MAX";
    "what may be kept is not sent again at once" in "requester/mod.rs":
        "recovery.room.min(window)" => "recovery.room.max(window)";
    "data that came early is not asked for again" in "requester/receive.rs":
        "if !self.kept.keep(expected, at, packet) {" => "{";
    "of a READ only what is missing is asked for again" in "requester/send.rs":
        "map_or(end, |kept| end.min(kept))" => "map_or(end, |_| end)";
    "data that has come is passed over" in "requester/mod.rs":
        "posted.work.awaits_response() && self.kept.has(self.next)" => "false";
    "each gap is told at once" in "requester/receive.rs":
        "self.mend(last.plus(1), at)," => "{}";
    "what is lost again is asked for again" in "requester/receive.rs":
        "Some(_) if self.went_back != Some(expected) => {" => "Some(_) if false => {";
    "what is on its way is not asked for again" in "requester/receive.rs":
        "self.leave_the_rest();" => "";
    "a fence sent again waits for nothing" in "requester/send.rs":
        "begins && posted.start >= self.max && !self.outstanding" => "begins && !self.outstanding";
    "an operation asked for again is no further one" in "requester/send.rs":
        "posted.work.awaits_response() && self.next > self.max {" => "posted.work.awaits_response() {";
    "an operation asked for again need not wait" in "requester/send.rs":
        "let is_new = self.next >= self.max;" => "let is_new = true;";
    "no more is under way than a slow peer answers" in "requester/pace.rs":
        "answers.clamp(fallen, risen)" => "answers.max(risen)";
    "retries wait longer" in "requester/mod.rs":
        "MOST_TIMEOUTS.min(1 << retries)" => "MOST_TIMEOUTS.min(1)";
    "recovery ends" in "requester/mod.rs":
        "self.recovery = None;\n        } else {" => "} else {";
    "credits are obeyed" in "requester/send.rs":
        "if ahead <= 0 {" => "if ahead <= 1000 {";
    "a READ again ends where the first one did" in "requester/send.rs":
        "(index / self.read_packets + 1) * self.read_packets" => "index + self.read_packets";
    "seven RNR retries are for ever" in "requester/receive.rs":
        "            7 => {}\n" => "";
    "the retransmit timer does not end an RNR wait" in "requester/receive.rs":
        "self.timers.retransmit = None;" => "";
    "an acknowledgement stops at a READ without data" in "requester/receive.rs":
        "until.min(expected)" => "{ let _ = expected; until }";
    "a NAK acknowledges only what is before it" in "requester/receive.rs":
        "Syndrome::Nak(NakCode::SequenceError) => {\n                if self.settle(at," => "Syndrome::Nak(NakCode::SequenceError) => {\n                if self.settle(at.plus(1),";
    "data is exactly what was asked for" in "requester/receive.rs":
        "if packet.payload().len() as u64 != due {" => "if packet.payload().len() as u64 > due {";
    "only what was sent is answered" in "requester/receive.rs":
        "if at >= self.max {" => "if false && at >= self.max {";
    "packets come from the peer" in "connection.rs":
        "if from.to_canonical() != self.config.flow.destination() {" => "if false {";
    "packets are for this queue pair" in "connection.rs":
        "bth.dest_qp() != self.config.local_qp || " => "";
    "an unreliable message with a gap is lost" in "responder/unreliable.rs":
        "if at > self.expected || begins {" => "if begins {";
    "a datagram shows the key" in "datagrams.rs":
        "is_some_and(|deth| deth.qkey() == self.config.qkey)" => "is_some()";
    "a datagram that does not fit costs no receive request" in "datagrams.rs":
        "self.held = Some(id);" => "";
}

/// The workspace, with nothing in it but what is tested.
fn copy(from: &Path, to: &Path) {
    let manifest = std::fs::read_to_string(from.join("Cargo.toml")).unwrap();
    let members = manifest.lines().find(|line| line.starts_with("members")).expect("a list of members");
    let manifest = manifest.replace(members, r#"members = ["crates/wire", "crates/proto"]"#);
    std::fs::write(to.join("Cargo.toml"), manifest).unwrap();
    std::fs::copy(from.join("Cargo.lock"), to.join("Cargo.lock")).unwrap();
    std::fs::create_dir_all(to.join("crates")).unwrap();
    // Tests play the fuzzers' seeds.
    std::fs::create_dir_all(to.join("fuzz")).unwrap();
    for name in ["crates/wire", "crates/proto", "fuzz/seeds"] {
        let (from, to) = (from.join(name), to.join(name));
        assert!(Command::new("cp").arg("-r").arg(from).arg(to).status().unwrap().success());
    }
}

/// Whether cargo was content with that. A broken rule may also make a test run for ever; building takes as long as the
/// machine needs.
fn cargo(folder: &Path, target: &Path, arguments: &[&str]) -> bool {
    let mut command = Command::new("timeout");
    let limit = if arguments.contains(&"--no-run") { "1800" } else { "120" };
    command.arg(limit).arg(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["test", "--offline", "--quiet", "-p", "millstream-proto"]).args(arguments);
    command.current_dir(folder).env("CARGO_TARGET_DIR", target).env("RUST_BACKTRACE", "0");
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap().success()
}

impl Mutant {
    /// Its file, and the text there; an error if the rule is not in it exactly once.
    fn source(&self, sources: &Path) -> Result<(PathBuf, String), String> {
        let path = sources.join(self.file);
        let source = std::fs::read_to_string(&path).unwrap();
        match source.matches(self.from).count() {
            1 => Ok((path, source)),
            times => Err(format!("{}: the text is {times} times in {}, not once", self.rule, self.file)),
        }
    }
}

#[test]
fn every_rule_is_in_the_source_once() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let stale: Vec<_> = MUTANTS.iter().filter_map(|mutant| mutant.source(&sources).err()).collect();
    assert!(stale.is_empty(), "{stale:#?}");
}

#[test]
#[ignore = "minutes: builds the crate once for each rule"]
fn every_broken_rule_is_noticed() {
    let root: PathBuf = [env!("CARGO_MANIFEST_DIR"), "..", ".."].iter().collect();
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("target");
    copy(&root, folder.path());
    let passes = cargo(folder.path(), &target, &["--no-run"]) && cargo(folder.path(), &target, &[]);
    assert!(passes, "the tests pass without a broken rule");
    let only = std::env::var("ONLY").unwrap_or_default();
    let chosen = |mutant: &&Mutant| mutant.file.contains(&only) || mutant.rule.contains(&only);
    let mutants: Vec<_> = MUTANTS.iter().filter(chosen).collect();
    assert!(!mutants.is_empty(), "ONLY={only}: no rule is called so");
    let sources = folder.path().join("crates/proto/src");
    let mut wrong = Vec::new();
    for mutant in &mutants {
        let (path, source) = match mutant.source(&sources) {
            Ok(found) => found,
            Err(stale) => {
                wrong.push(stale);
                continue;
            }
        };
        std::fs::write(&path, source.replace(mutant.from, mutant.to)).unwrap();
        let outcome = match cargo(folder.path(), &target, &["--no-run"]) {
            false => "does not compile",
            true if cargo(folder.path(), &target, &[]) => "is not noticed",
            true => "",
        };
        println!("{:<60} {}", mutant.rule, if outcome.is_empty() { "noticed" } else { outcome });
        if !outcome.is_empty() {
            wrong.push(format!("{}: {outcome}", mutant.rule));
        }
        std::fs::write(&path, source).unwrap();
    }
    println!("{} of {} rules broken, {} noticed", mutants.len(), MUTANTS.len(), mutants.len() - wrong.len());
    assert!(wrong.is_empty(), "{wrong:#?}");
}
