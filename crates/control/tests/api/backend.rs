//! Run control with a backend without processes, and a client over plain TCP.

use millstream_control::directory::Directory;
use millstream_control::http::{Server, ServerLimits};
use millstream_control::machine::State;
use millstream_control::power::PowerMeter;
use millstream_control::status::Status;
use millstream_control::token::Token;
use millstream_control::{Backend, FinishedRun, RunControl};
use millstream_evb::config::{ConfigFile, RunConfig};
use millstream_evb::core::{BuIndex, RuIndex, Unit};
use millstream_evb::process::launcher::{CommandReceiver, RunCommand, RunEvent, RunObserver, RunProcess};
use millstream_evb::process::manager::ProgressSample;
use millstream_fragment::stream::StreamWriter;
use millstream_fragment::{Alignment, SourceId, SourceKind};
use millstream_report::{Bytes, RunReport};
use millstream_tls::Security;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Bound of every wait.
pub(crate) const BOUND: Duration = Duration::from_secs(60);

pub(crate) const CONFIGURATION: &str = "\
[run]
name = \"test\"
batch = 4 # events
replay = 1000

[[readout]]
name = \"crate1\"
input = \"crate1.mfs\"

[[builder]]
name = \"bu.0\"
landing = \"host\"
slots = 4

[output]
directory = \"out\"
events = \"built\"
";

/// Connections that the manager of a simulated run refuses at its start.
pub(crate) const REFUSED: u64 = 3;

/// Builds events until it is stopped; fails with batches of 13 events, panics with 14, and fails with 15 after 100 events. With
/// batches of 16 the report has fewer events than the progress. With batches of 17 a readout unit is lost, and no event is built.
struct Simulated {
    /// Whether the run has a process for each unit.
    has_units: bool,
}

impl Backend for Simulated {
    /// This host has no device `absent`.
    fn check(&self, file: ConfigFile) -> Result<RunConfig, String> {
        let config = file.check().map_err(|error| error.to_string())?;
        match config.device.as_str() {
            "absent" => Err("this host has no device absent".to_owned()),
            _ => Ok(config),
        }
    }

    fn run(
        &self,
        config: &RunConfig,
        commands: CommandReceiver,
        observe: &mut RunObserver<'_>,
    ) -> Result<FinishedRun, String> {
        assert!(config.starts_paused);
        let units = [Unit::Manager, Unit::Readout(RuIndex(0)), Unit::Builder(BuIndex(0))];
        for unit in units.into_iter().filter(|_| self.has_units) {
            let (process, pid) = (RunProcess::Unit(unit), std::process::id());
            let _ = observe(&RunEvent::Spawned { process, pid });
        }
        for connections in 1..=REFUSED {
            let process = RunProcess::Unit(Unit::Manager);
            let _ = observe(&RunEvent::Refused { process, connections });
        }
        let _ = observe(&RunEvent::Started);
        let mut sample = ProgressSample::default();
        let mut paused = true;
        loop {
            match commands.receive(Duration::from_millis(20)) {
                Some(RunCommand::Stop) => break,
                Some(command) => {
                    paused = command == RunCommand::Pause;
                    let _ = observe(&RunEvent::Paused(paused));
                }
                None => {}
            }
            sample.elapsed += Duration::from_millis(20);
            if !paused {
                match config.plan.batch.get() {
                    17 => sample.done.readout_lost.events += 10,
                    _ => sample.done.built.events += 10,
                }
                sample.done.accepted += 5;
                sample.assigned += 1;
                sample.done.batches += 1;
            }
            let _ = observe(&RunEvent::Progress(sample));
            match config.plan.batch.get() {
                13 => return Err("the simulated run failed".to_owned()),
                14 => panic!("the simulated backend has a fault"),
                15 if sample.done.built.events >= 100 => {
                    return Err("the simulated run failed late".to_owned());
                }
                _ => {}
            }
        }
        let built = sample.done.built.events;
        let report = RunReport {
            events: if config.plan.batch.get() == 16 { built / 2 } else { built },
            error: Some("stopped".to_owned()),
            ..RunReport::default()
        };
        Ok(FinishedRun { report, stopped_cleanly: true })
    }

    fn payload_per_event(&self, _: &RunConfig) -> Bytes {
        Bytes(1000)
    }
}

/// A run control process in this process.
pub(crate) struct Test {
    pub(crate) folder: TempDir,
    pub(crate) control: RunControl,
    pub(crate) server: Server,
    pub(crate) token: Token,
}

/// An answer: status code, headers and body.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) code: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Test {
    pub(crate) fn new() -> Test {
        Test::with(&ServerLimits::default())
    }

    /// Its runs have units.
    pub(crate) fn with_units() -> Test {
        Test::start(&ServerLimits::default(), true)
    }

    pub(crate) fn with(limits: &ServerLimits) -> Test {
        Test::start(limits, false)
    }

    fn start(limits: &ServerLimits, has_units: bool) -> Test {
        Test::secured(limits, has_units, Security::NONE)
    }

    pub(crate) fn secured(limits: &ServerLimits, has_units: bool, security: Security) -> Test {
        let folder = tempfile::tempdir().unwrap();
        let mut writer =
            StreamWriter::create(folder.path().join("crate1.mfs"), 0..8, Alignment::CACHE_LINE).unwrap();
        let mut source = writer.source(SourceId(1), SourceKind(1), "").unwrap();
        (0..8).for_each(|event| source.push(event, &[7; 100]).unwrap());
        writer.finish().unwrap();
        std::fs::write(folder.path().join("run.toml"), CONFIGURATION).unwrap();
        Test::serve(folder, limits, has_units, security)
    }

    fn serve(folder: TempDir, limits: &ServerLimits, has_units: bool, security: Security) -> Test {
        let (control, token) = open_with(folder.path(), has_units);
        let server =
            Server::start(control.clone(), (token.clone(), security), "127.0.0.1:0", *limits).unwrap();
        Test { folder, control, server, token }
    }

    /// The next run control on the same folder.
    pub(crate) fn restarted(self) -> Test {
        let Test { folder, control, server, .. } = self;
        drop((server, control));
        Test::serve(folder, &ServerLimits::default(), false, Security::NONE)
    }

    pub(crate) fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.server.address()).unwrap();
        stream.set_read_timeout(Some(BOUND)).unwrap();
        stream
    }

    /// Sends bytes on a connection of their own, and reads to its end.
    pub(crate) fn raw(&self, bytes: &[u8]) -> String {
        let mut stream = self.connect();
        // The server may close before it has read all.
        let _ = stream.write_all(bytes);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    }

    pub(crate) fn request(&self, method: &str, path: &str, headers: &str, body: &str) -> Answer {
        let length = body.len();
        let text = format!(
            "{method} {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n{body}"
        );
        let answer = self.raw(text.as_bytes());
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {answer:?}"));
        let code = head.split(' ').nth(1).and_then(|code| code.parse().ok());
        Answer {
            code: code.unwrap_or_else(|| panic!("{head}")),
            head: head.to_owned(),
            body: body.to_owned(),
        }
    }

    pub(crate) fn get(&self, path: &str) -> Answer {
        self.request("GET", path, "", "")
    }

    /// A command with the token.
    pub(crate) fn command(&self, name: &str, body: &str) -> Answer {
        let headers =
            format!("Authorization: Bearer {}\r\nContent-Type: application/json\r\n", self.token.as_str());
        self.request("POST", &format!("/api/v1/{name}"), &headers, body)
    }

    /// A command that must succeed.
    pub(crate) fn succeed(&self, name: &str, body: &str) -> Status {
        let answer = self.command(name, body);
        assert_eq!(answer.code, 200, "{name}: {answer:?}");
        serde_json::from_str(&answer.body).unwrap_or_else(|error| panic!("{error}: {answer:?}"))
    }

    /// Starts a run; the simulated backend does by the number of events in a batch what it is asked to.
    pub(crate) fn start_with_batch(&self, events: u32) {
        self.succeed("set", &format!(r#"{{"settings": {{"run.batch": {events}}}}}"#));
        self.succeed("start", "");
    }

    pub(crate) fn status(&self) -> Status {
        serde_json::from_str(&self.get("/api/v1/status").body).unwrap()
    }

    /// Waits for a state and more.
    pub(crate) fn wait(&self, is_reached: impl Fn(&Status) -> bool) -> Status {
        let until = Instant::now() + BOUND;
        loop {
            let status = self.status();
            if is_reached(&status) {
                return status;
            }
            assert!(Instant::now() < until, "{status:#?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub(crate) fn wait_for(&self, state: State) -> Status {
        self.wait(|status| status.state == state)
    }
}

/// Run control in a folder with a configuration.
pub(crate) fn open(folder: &Path) -> (RunControl, Token) {
    open_with(folder, false)
}

fn open_with(folder: &Path, has_units: bool) -> (RunControl, Token) {
    let directory = Directory::open(&folder.join("control")).unwrap();
    let token = Token::load_or_create(&folder.join("control/token")).unwrap();
    let power = PowerMeter::at(&folder.join("sys"));
    (RunControl::new(&folder.join("run.toml"), directory, power, Simulated { has_units }), token)
}
