//! Runs an unmodified benchmark program as a server and a client process, and reads its result rows.

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use millstream_shm::ports;

/// A run of a tool failed.
#[derive(Debug, thiserror::Error)]
pub enum ToolError {
    /// The program is not installed or does not start.
    #[error("cannot start {program}: {cause}; apt-get install {package}")]
    Missing {
        /// The tool.
        program: String,
        /// The Debian package with it.
        package: &'static str,
        /// The operating system's error.
        cause: std::io::Error,
    },
    /// A side exited with an error, or ran into the time limit.
    #[error("{program} ({side}) {end}:\n{output}")]
    Failed {
        /// The tool with its arguments.
        program: String,
        /// `server` or `client`.
        side: &'static str,
        /// Its exit status, or the time limit.
        end: String,
        /// Its output.
        output: String,
    },
    /// The client printed no row of results, or one without the value.
    #[error("{program} printed no result:\n{output}")]
    NoResult {
        /// The tool with its arguments.
        program: String,
        /// Its output.
        output: String,
    },
}

/// Runs a perftest program up to six times while it fails to calibrate the processor's clock.
///
/// On a loaded machine perftest rejects its own calibration (correlation coefficient below 0.9) before it measures.
///
/// # Errors
/// The error of the last run.
pub fn retry_clock_calibration<T, E: std::fmt::Display>(run: impl FnMut() -> Result<T, E>) -> Result<T, E> {
    retry_faults(&["Correlation coefficient r^2"], run)
}

/// Runs programs again, five times at most, that fail by faults of their own: those whose output contains one of these texts.
///
/// # Errors
/// The error of the last run.
pub fn retry_faults<T, E: std::fmt::Display>(
    faults: &[&str],
    mut run: impl FnMut() -> Result<T, E>,
) -> Result<T, E> {
    for _ in 0..5 {
        match run() {
            Err(error) if faults.iter().any(|fault| error.to_string().contains(fault)) => {}
            ended => return ended,
        }
    }
    run()
}

/// A tool with the arguments and the environment of its server and its client.
#[derive(Clone, Debug)]
pub struct ToolPair {
    /// The program, for example `ib_write_bw`.
    pub program: String,
    /// The Debian package that contains it.
    pub package: &'static str,
    /// Arguments of both sides.
    pub arguments: Vec<String>,
    /// Arguments that only the client gets, after the others.
    pub client_arguments: Vec<String>,
    /// Environment variables of both sides.
    pub environment: Vec<(&'static str, String)>,
    /// The longest time that a side may run.
    pub limit: Duration,
}

/// A row of numbers that a tool printed.
#[derive(Clone, Debug, PartialEq)]
pub struct Row(pub Vec<f64>);

impl ToolPair {
    /// A perftest program over the verbs library in `library_dir`.
    #[must_use]
    pub fn perftest(program: &str, arguments: &[&str], library_dir: Option<&Path>) -> Self {
        let mut pair = Self::new(program, "perftest", arguments, &[]);
        pair.environment.extend(library_dir.map(|dir| ("LD_LIBRARY_PATH", dir.display().to_string())));
        pair
    }

    /// A test of `ucx_perftest` over UCX's shared-memory transport.
    #[must_use]
    pub fn ucx_shared_memory(arguments: &[&str]) -> Self {
        let mut pair = Self::new("ucx_perftest", "ucx-utils", &[], arguments);
        pair.environment.push(("UCX_TLS", "posix,self".to_owned()));
        pair
    }

    /// A test of `ucx_perftest` over RC queue pairs of the soft device in `library_dir`.
    #[must_use]
    pub fn ucx_verbs(arguments: &[&str], library_dir: &Path) -> Self {
        let mut pair = Self::new("ucx_perftest", "ucx-utils", &[], arguments);
        pair.environment = vec![
            ("UCX_TLS", "rc_verbs,ud_verbs:aux,self".to_owned()),
            ("LD_LIBRARY_PATH", library_dir.display().to_string()),
            ("LD_PRELOAD", library_dir.join("libmillstream_preload.so").display().to_string()),
        ];
        pair
    }

    /// `millstream bench raw-verbs` ([`raw_verbs`](crate::verbs::raw_verbs)) over the soft device in `library_dir`;
    /// `program` is the path of `millstream`.
    #[must_use]
    pub fn raw_verbs(program: &Path, arguments: &[&str], library_dir: &Path) -> Self {
        let words = [&["bench", "raw-verbs"], arguments].concat();
        let mut pair = Self::new(&program.display().to_string(), "millstream", &words, &[]);
        pair.environment = vec![
            ("MILLSTREAM_DEVICE", "soft".to_owned()),
            ("MILLSTREAM_LIB", library_dir.display().to_string()),
        ];
        pair
    }

    fn new(program: &str, package: &'static str, arguments: &[&str], client: &[&str]) -> Self {
        let owned = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect();
        Self {
            program: program.to_owned(),
            package,
            arguments: owned(arguments),
            client_arguments: owned(client),
            environment: Vec::new(),
            limit: Duration::from_secs(60),
        }
    }

    /// The command of one side, pinned to a separate core if there are two. Latency depends on the pair of
    /// cores, and the scheduler would choose another pair for each run.
    fn command(&self, port: u16, server: Option<&str>) -> Command {
        let cores = cores();
        let mut command = match cores.get(usize::from(server.is_some())) {
            Some(core) if cores.len() > 1 => {
                let mut command = Command::new("taskset");
                command.arg("-c").arg(core.to_string()).arg(&self.program);
                command
            }
            _ => Command::new(&self.program),
        };
        command.args(&self.arguments);
        if server.is_some() {
            command.args(&self.client_arguments);
        }
        command.arg("-p").arg(port.to_string()).args(server);
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs server and client. Returns the client's rows of results.
    ///
    /// # Errors
    /// [`ToolError`] if a side does not start, fails or hangs, or if the client prints no result.
    pub fn run(&self) -> Result<Vec<Row>, ToolError> {
        retry_clock_calibration(|| self.run_once())
    }

    /// Runs server and client. Returns one column of the client's first row of results.
    ///
    /// # Errors
    /// As [`run`](Self::run), or if the row is too short.
    pub fn value(&self, column: usize) -> Result<f64, ToolError> {
        let rows = self.run()?;
        let row = &rows[0].0;
        let short = || ToolError::NoResult { program: self.name(), output: format!("{row:?}") };
        row.get(column).copied().ok_or_else(short)
    }

    fn run_once(&self) -> Result<Vec<Row>, ToolError> {
        let missing =
            |cause| ToolError::Missing { program: self.program.clone(), package: self.package, cause };
        if !is_installed(&self.program) {
            return Err(missing(std::io::ErrorKind::NotFound.into()));
        }
        let port = ports::unused().map_err(missing)?;
        let mut server = self.command(port, None).spawn().map_err(missing)?;
        // A server that exits before it listens is reported after the client.
        let _ = ports::wait_for_listener(port, Duration::from_secs(10));
        let client = self.command(port, Some("localhost")).spawn().map_err(missing)?;
        let client = self.finish(client, "client");
        if client.is_err() {
            // A server without its client would wait forever.
            let _ = server.kill();
        }
        let server = self.finish(server, "server");
        let client = client?;
        server?;
        let output = text(&client);
        let rows = rows(&output);
        if rows.is_empty() {
            return Err(ToolError::NoResult { program: self.name(), output });
        }
        Ok(rows)
    }

    fn name(&self) -> String {
        format!("{} {} {}", self.program, self.arguments.join(" "), self.client_arguments.join(" "))
    }

    fn finish(&self, mut child: std::process::Child, side: &'static str) -> Result<Output, ToolError> {
        let deadline = Instant::now() + self.limit;
        let failed =
            |end: String, output: String| ToolError::Failed { program: self.name(), side, end, output };
        loop {
            match child.try_wait() {
                Ok(Some(_)) => break,
                Ok(None) if Instant::now() > deadline => {
                    let _ = child.kill();
                    let output = child.wait_with_output().map(|o| text(&o)).unwrap_or_default();
                    return Err(failed(format!("did not exit within {:?}", self.limit), output));
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

/// Rows of at least four numbers: those below a header that starts with `#bytes`, or all if there is no header.
pub(crate) fn rows(output: &str) -> Vec<Row> {
    let table = |line: &&str| line.trim_start().starts_with("#bytes");
    let headed = output.lines().any(|line| table(&line));
    output
        .lines()
        .skip_while(|line| headed && !table(line))
        .filter_map(|line| {
            let numbers: Option<Vec<f64>> = line.split_whitespace().map(|word| word.parse().ok()).collect();
            numbers.filter(|numbers| numbers.len() >= 4).map(Row)
        })
        .collect()
}

pub(crate) fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// The logical processors that this process may use.
fn cores() -> Vec<usize> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap_or_default();
    let number = |text: &str| text.trim().parse::<usize>().ok();
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(number(first)?..=number(last)?)
    };
    list.split(',').filter_map(range).flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn result_rows_of_perftest_and_ucx_are_read() {
        let bandwidth = " local address: LID 0000\n #bytes     #iterations    BW peak[MB/sec]\n \
             65536      5000             36512.54            35497.80\t\t   0.567965\n----\n";
        assert_eq!(rows(bandwidth), [Row(vec![65536.0, 5000.0, 36512.54, 35497.80, 0.567_965])]);
        let latency =
            " #bytes #iterations    t_min[usec]\n 8       20000          0.17           41.44        0.18\n";
        assert_eq!(rows(latency)[0].0[4], 0.18);
        assert!(rows("nothing here 1 2 3 4").is_empty());
        let ucx = "   1000000   0.045  0.046  0.046  165.90  165.90  21745271  21745271\n";
        assert_eq!(rows(ucx)[0].0[2], 0.046);
    }

    #[test]
    fn only_a_failed_clock_calibration_is_retried_five_times() {
        let runs = |message: &'static str, succeeds_from: usize| {
            let mut runs = 0;
            let ended = retry_clock_calibration(|| {
                runs += 1;
                if runs < succeeds_from { Err(message) } else { Ok(()) }
            });
            (ended, runs)
        };
        let uncalibrated = "Correlation coefficient r^2: 0.884724 < 0.9";
        assert_eq!(runs(uncalibrated, 6), (Ok(()), 6));
        assert_eq!(runs(uncalibrated, 7), (Err(uncalibrated), 6));
        assert_eq!(runs("another", 2), (Err("another"), 1));
    }

    #[test]
    fn the_affinity_mask_is_read() {
        let most = std::thread::available_parallelism().unwrap().get();
        assert!(cores().len() >= most, "{:?}", cores());
    }

    #[test]
    fn the_error_for_a_missing_tool_names_the_package() {
        let error = ToolPair::perftest("ib_no_such_tool", &[], None).run().unwrap_err();
        assert!(error.to_string().contains("apt-get install perftest"), "{error}");
    }
}
