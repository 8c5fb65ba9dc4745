//! One rank of a job, for the tests: `job-rank RANK RANKS AT`, or `job-rank relay HUB KEY-FILE WORDS…`.
//!
//! Rank 0 starts two relays: `echo` at the last rank, `wait` at rank 1, or what `JOB_RANK_WAITS` names. It prints their outputs
//! and statuses.

use std::io::Write as _;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use millstream_job::{Hub, Job, StartRequest, agent, relay};

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let code = match words[..] {
        ["relay", hub, key, ref arguments @ ..] => {
            let arguments = arguments.iter().map(|&word| word.to_owned()).collect();
            let key = std::fs::read(key).expect("the key of relays");
            relay::run(hub, &key, StartRequest { arguments, environment: Vec::new() })
                .expect("the hub answers")
        }
        [rank, ranks, at] => {
            let (rank, ranks) = (rank.parse().ok(), ranks.parse().ok());
            let job = Job::from_environment(rank, ranks, Some(at)).expect("a job");
            if job.rank == 0 { first(&job) } else { other(&job) }
        }
        _ => panic!("{words:?}"),
    };
    std::process::exit(code);
}

/// `echo` copies its input and exits with 3, and a child of it keeps its outputs open; `wait` lives until its input ends, `hold` longer.
fn make(request: &StartRequest, _: agent::RankAddress) -> Option<Command> {
    let mut command = Command::new("sh");
    match request.arguments[0].as_str() {
        "echo" => command.args(["-c", "sleep 40 & cat; echo error >&2; exit 3"]),
        "wait" => command.args(["-c", "echo $$; cat >/dev/null; echo end"]),
        "hold" => command.args(["-c", "exec sleep 1000"]),
        _ => return None,
    };
    Some(command)
}

fn other(job: &Job) -> i32 {
    match agent::serve(job, Arc::new(make)) {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("rank {}: {error}", job.rank);
            1
        }
    }
}

fn first(job: &Job) -> i32 {
    let last = job.ranks - 1;
    let hub = Hub::open(
        job,
        move |request| if ["wait", "hold"].contains(&&*request.arguments[0]) { 1 } else { last },
    )
    .expect("opens");
    let of_agent = job.clone();
    let here = std::thread::spawn(move || agent::serve_beside_hub(&of_agent, Arc::new(make)));
    if let Err(error) = hub.wait_for_ranks(Duration::from_secs(8)) {
        eprintln!("{error}");
        return 1;
    }
    let start = |words: &[&str]| {
        let mut command = Command::new(std::env::current_exe().expect("own path"));
        command.args(["relay", &hub.address().to_string()]).arg(hub.relay_key()).args(words);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("a relay")
    };
    let mut echo = start(&["echo"]);
    echo.stdin.take().expect("piped").write_all(&[b'x'; 200_000]).expect("the relay reads");
    let waiting = start(&[&std::env::var("JOB_RANK_WAITS").unwrap_or_else(|_| "wait".to_owned())]);
    let refused = start(&["reboot"]).wait_with_output().expect("ends");
    let echo = echo.wait_with_output().expect("ends");
    println!("echo {} {} {:?}", echo.stdout.len(), echo.stderr.len(), echo.status.code());
    println!("refused {:?} {}", refused.status.code(), String::from_utf8_lossy(&refused.stderr).trim());
    std::io::stdout().flush().expect("printed");
    // Its input has been open all the time, and ends here.
    let waited = waiting.wait_with_output().expect("ends");
    println!("wait {:?} {}", waited.status.code(), String::from_utf8_lossy(&waited.stderr).trim());
    hub.finish();
    here.join().expect("no panic").expect("the agent ends well");
    0
}
