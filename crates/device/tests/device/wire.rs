//! Over the wire, by UDP packets on the loopback interface: what holds in shared memory holds here, too, also when the
//! network misbehaves.
//!
//! Whether a process uses the wire is said by its environment. So the tests here start this program again, with
//! `MILLSTREAM_PATH=wire`, either to run the tests of the other modules once more, or in a role.

use std::process::Command;

/// Modules whose tests say nothing of how a request travels.
const MODULES: [&str; 8] = [
    "errors::",
    "events::",
    "queues::",
    "semantics::",
    "shared::",
    "transfers::",
    "unreliable::",
    "windows::",
];

/// Tests that are about something that the wire does not have, with the reason.
const OTHERWISE: [(&str, &str); 12] = [
    (
        "a_destroyed_completion_queue_leaves_no_signal",
        "requests complete when they are answered, not when posted",
    ),
    ("a_fault_of_a_held_back_request", "as above"),
    ("a_full_completion_queue_of", "as above, and what was acknowledged is not taken back"),
    ("an_unreliable_connection_carries", "as above: a WRITE is complete when it has left"),
    ("destruction_takes_completions_along", "as above"),
    ("reset_forgets_everything", "numbers begin again at zero: packets of the former life fit the new one"),
    ("a_request_that_a_dead_sender_took", "packets take no receive before they are here"),
    (
        "an_atomic_operation_on_no_word",
        "no packet is made for a misaligned word: the other side does not fail",
    ),
    ("local_memory_that_is_not_there", "a READ finds that when it is answered: what is behind it has left"),
    ("memory_of_another_protection_domain", "as above"),
    (
        "what_the_far_end_cannot_take_is_dropped",
        "too long for a receive is found when it has begun to be used",
    ),
    (
        "only_windows_of_type_2_can_be_invalidated",
        "a key is invalidated in its turn, after what waits for answers",
    ),
];

/// Runs the modules' tests with these variables set.
fn once_more(modules: &[&str], variables: &[(&str, &str)]) {
    let mut command = Command::new(std::env::current_exe().expect("a test program has a path"));
    command.args(modules).args(["--test-threads", "3"]);
    for (test, reason) in OTHERWISE {
        println!("not over the wire: {test}: {reason}");
        command.args(["--skip", test]);
    }
    let output = command.env("MILLSTREAM_PATH", "wire").envs(variables.iter().copied()).output();
    let output = output.expect("this program starts again");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    let passed = text.lines().filter(|line| line.starts_with("test ") && line.ends_with(" ok")).count();
    assert!(passed >= 10 * modules.len().min(4), "only {passed} tests ran:\n{text}");
}

#[test]
fn what_holds_in_shared_memory_holds_over_the_wire() {
    once_more(&MODULES, &[]);
}
