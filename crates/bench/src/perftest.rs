//! Debian's unmodified perftest over the soft device: two processes, one measurement.

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A measurement could not be made.
#[derive(Debug, thiserror::Error)]
pub enum PerftestError {
    /// The program is not there.
    #[error("cannot start {program}: {cause}; apt-get install perftest")]
    Missing {
        /// The tool.
        program: String,
        /// Why.
        cause: std::io::Error,
    },
    /// It ended with an error, or did not end.
    #[error("{program} ({side}) {what}:\n{output}")]
    Failed {
        /// The tool with its arguments.
        program: String,
        /// `server` or `client`.
        side: &'static str,
        /// How it ended.
        what: String,
        /// What it printed.
        output: String,
    },
    /// It printed no result.
    #[error("{program} printed no row of results:\n{output}")]
    NoResult {
        /// The tool with its arguments.
        program: String,
        /// What it printed.
        output: String,
    },
}

/// How to run a tool.
#[derive(Clone, Debug)]
pub struct Perftest {
    /// For example `ib_write_bw`.
    pub program: String,
    /// Its arguments, the same on both sides.
    pub arguments: Vec<String>,
    /// Where the verbs library is; None for the system's.
    pub library_dir: Option<PathBuf>,
    /// For how long at most.
    pub limit: Duration,
}

/// One row that perftest printed, as numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct Row(pub Vec<f64>);

impl Perftest {
    /// A tool with its arguments, over the verbs library in `library_dir`.
    #[must_use]
    pub fn new(program: &str, arguments: &[&str], library_dir: Option<PathBuf>) -> Self {
        Self {
            program: program.to_owned(),
            arguments: arguments.iter().map(|&a| a.to_owned()).collect(),
            library_dir,
            limit: Duration::from_secs(60),
        }
    }

    fn command(&self, port: u16, server: Option<&str>) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments).arg("-p").arg(port.to_string()).args(server);
        if let Some(dir) = &self.library_dir {
            command.env("LD_LIBRARY_PATH", dir);
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs server and client; the client's rows of results.
    ///
    /// # Errors
    /// [`PerftestError`] if a side does not start, fails, hangs or prints nothing.
    pub fn run(&self) -> Result<Vec<Row>, PerftestError> {
        let missing = |cause| PerftestError::Missing { program: self.program.clone(), cause };
        let port = free_port().map_err(missing)?;
        let mut server = self.command(port, None).spawn().map_err(missing)?;
        wait_for_listener(port);
        let client = self.command(port, Some("localhost")).spawn().map_err(missing)?;
        let client = self.finish(client, "client");
        if client.is_err() {
            // Without its client the server would wait for ever.
            let _ = server.kill();
        }
        let server = self.finish(server, "server");
        let client = client?;
        server?;
        let output = text(&client);
        let rows = rows(&output);
        if rows.is_empty() {
            return Err(PerftestError::NoResult { program: self.name(), output });
        }
        Ok(rows)
    }

    fn name(&self) -> String {
        format!("{} {}", self.program, self.arguments.join(" "))
    }

    fn finish(&self, mut child: std::process::Child, side: &'static str) -> Result<Output, PerftestError> {
        let deadline = Instant::now() + self.limit;
        let failed =
            |what: String, output: String| PerftestError::Failed { program: self.name(), side, what, output };
        loop {
            match child.try_wait() {
                Ok(Some(_)) => break,
                Ok(None) if Instant::now() > deadline => {
                    let _ = child.kill();
                    let output = child.wait_with_output().map(|o| text(&o)).unwrap_or_default();
                    return Err(failed(format!("did not end within {:?}", self.limit), output));
                }
                Ok(None) => std::thread::sleep(Duration::from_millis(20)),
                Err(error) => return Err(failed(error.to_string(), String::new())),
            }
        }
        let output = child.wait_with_output().map_err(|error| failed(error.to_string(), String::new()))?;
        if output.status.success() {
            Ok(output)
        } else {
            Err(failed(output.status.to_string(), text(&output)))
        }
    }
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Rows of numbers below the header that starts with `#bytes`.
fn rows(output: &str) -> Vec<Row> {
    output
        .lines()
        .skip_while(|line| !line.trim_start().starts_with("#bytes"))
        .filter_map(|line| {
            let numbers: Option<Vec<f64>> = line.split_whitespace().map(|word| word.parse().ok()).collect();
            numbers.filter(|numbers| numbers.len() >= 4).map(Row)
        })
        .collect()
}

fn free_port() -> std::io::Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// Waits until somebody listens on the port, without connecting: perftest takes its first
/// connection for the client.
fn wait_for_listener(port: u16) {
    let needle = format!(":{port:04X} 00000000");
    let deadline = Instant::now() + Duration::from_secs(10);
    while Instant::now() < deadline {
        let listening = ["/proc/net/tcp", "/proc/net/tcp6"].iter().any(|table| {
            std::fs::read_to_string(table).is_ok_and(|text| {
                text.lines()
                    .any(|line| line.contains(&needle) && line.split_whitespace().nth(3) == Some("0A"))
            })
        });
        if listening {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_both_kinds_of_tools_are_read() {
        let bandwidth = " local address: LID 0000\n #bytes     #iterations    BW peak[MB/sec]\n \
             65536      5000             36512.54            35497.80\t\t   0.567965\n----\n";
        assert_eq!(rows(bandwidth), [Row(vec![65536.0, 5000.0, 36512.54, 35497.80, 0.567_965])]);
        let latency =
            " #bytes #iterations    t_min[usec]\n 8       20000          0.17           41.44        0.18\n";
        assert_eq!(rows(latency)[0].0[4], 0.18);
        assert!(rows("nothing here 1 2 3 4").is_empty());
    }

    #[test]
    fn a_missing_tool_says_what_to_install() {
        let error = Perftest::new("ib_no_such_tool", &[], None).run().unwrap_err();
        assert!(error.to_string().contains("apt-get install perftest"), "{error}");
    }
}
