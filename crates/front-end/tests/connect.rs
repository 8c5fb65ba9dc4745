//! Front ends whose readout unit does not answer.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use millstream_front_end::{ConnectError, FrontEnd, RingListener, RingOptions};
use rustix::io::Errno;

const OPTIONS: RingOptions =
    RingOptions { first_source: 1, sources: 1, max_len: 64, capacity: 4096, high: 0.75, low: 0.5 };

/// Exit code: the error of the connection. With a third word, signals come meanwhile.
const PROGRAM: &str = "#define _GNU_SOURCE\n#include <signal.h>\n#include <sys/time.h>\n#include \"millstream_front_end.h\"\n\
    static void handler(int signal) { (void)signal; }\n\
    int main(int n, char **words) { struct msfe ring; signal(SIGALRM, handler);\n\
    if (n > 2) setitimer(ITIMER_REAL, &(struct itimerval){{0, 5000}, {0, 5000}}, NULL);\n\
    return msfe_connect(&ring, words[1], 10) ? errno : 0; }\n";

#[test]
fn a_readout_unit_that_does_not_answer_is_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let (source, program) = (folder.path().join("connect.c"), folder.path().join("connect"));
    std::fs::write(&source, PROGRAM).unwrap();
    let mut cc = Command::new("cc");
    cc.args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-I"])
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("include"))
        .arg(&source);
    assert!(cc.arg("-o").arg(&program).status().expect("cc starts").success());
    let connect_in_c = |name: &str| Command::new(&program).arg(name).status().unwrap().code();

    let name = format!("silent-{}", std::process::id());
    let timeout = Duration::from_millis(10);
    assert!(matches!(FrontEnd::connect(&name, timeout), Err(ConnectError::NotFound(_))));
    assert_eq!(connect_in_c(&name), Some(Errno::CONNREFUSED.raw_os_error()));
    let _silent = RingListener::bind(&name, OPTIONS).unwrap();
    assert!(matches!(FrontEnd::connect(&name, timeout), Err(ConnectError::TimedOut(_))));
    assert_eq!(connect_in_c(&name), Some(Errno::TIMEDOUT.raw_os_error()));
    let mut with_signals = Command::new("timeout");
    with_signals.arg("60").arg(&program).args([&name, "signals"]);
    let with_signals = with_signals.status().unwrap().code();
    assert_eq!(with_signals, Some(Errno::TIMEDOUT.raw_os_error()));
}
