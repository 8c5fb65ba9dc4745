# From the output of `cargo test --no-fail-fast`: the program and the messages of each test that failed.
/^ +Running / || /^ +Doc-tests / { program = $0 }
/^failures:$/ { if (!failing) print program; failing = 1 }
/t exit successfully: / { print program }
failing || /t exit successfully: / { print }
/^test result: FAILED/ { failing = 0 }
