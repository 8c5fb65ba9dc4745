//! The configuration of a process's own host, which bounds what the process does for a manager.
//!
//! A unit gets its configuration from the manager. On a rank of a job, the manager's address comes over the network, and the
//! configuration names programs to run, files to read and write, and devices to open. So the unit of a rank compares these
//! fields with the configuration that its own command line names.

use super::ProcessError;
use super::card::CardProcess;
use crate::config::{InputConfig, LandingTarget, RunConfig};

/// The configuration of a process's own host.
#[derive(Debug)]
pub struct OwnConfig(RunConfig);

impl OwnConfig {
    /// Bounds a process by a checked configuration.
    pub fn new(config: RunConfig) -> OwnConfig {
        OwnConfig(config)
    }

    /// Refuses a manager's configuration by which this process would run, open, read or write anything else.
    pub(super) fn check(&self, managers: &RunConfig) -> Result<(), ProcessError> {
        let own = &self.0;
        // All fields are listed, so that a new one is decided on.
        let RunConfig {
            name,
            instance,
            started: _,
            spin: _,
            starts_paused,
            device,
            listen: _,
            plan: _,
            layout: _,
            file_first: _,
            file_events: _,
            readouts,
            builders,
            output,
            checksums: _,
            max_corrupt: _,
            source_timeout: _,
            security,
            reference_decisions,
        } = managers;
        differs("run.name", *name != own.name)?;
        differs("the run's instance", !self.is_instance(instance))?;
        differs("the start of the run", *starts_paused != own.starts_paused)?;
        differs("run.device", *device != own.device)?;
        differs("the number of readout units", readouts.len() != own.readouts.len())?;
        for (unit, own) in readouts.iter().zip(&own.readouts) {
            differs(&format!("the input of readout {}", own.name), opens(&unit.input) != opens(&own.input))?;
        }
        differs("the number of builder units", builders.len() != own.builders.len())?;
        for (unit, own) in builders.iter().zip(&own.builders) {
            let field = |name: &str| format!("{name} of builder {}", own.name);
            differs(&field("name"), unit.name != own.name)?;
            differs(&field("trigger"), unit.trigger != own.trigger)?;
            differs(&field("landing"), unit.landing != own.landing)?;
        }
        differs("output", *output != own.output)?;
        differs("security", *security != own.security)?;
        differs("run.reference_decisions", *reference_decisions != own.reference_decisions)
    }

    /// Refuses to serve a card that is not in the configuration.
    pub(super) fn check_card(&self, card: &CardProcess) -> Result<(), ProcessError> {
        let is_ours = |landing: &LandingTarget| match landing {
            LandingTarget::Host => false,
            LandingTarget::Card(own) => {
                let instance = card.name.as_str().strip_suffix(&format!(".{}", own.name));
                instance.is_some_and(|instance| self.is_instance(instance))
                    && (card.memory, &card.kind) == (own.memory, &own.kind)
            }
        };
        differs("card", !self.0.builders.iter().any(|unit| is_ours(&unit.landing)))
    }

    /// Whether a launcher names an instance of the run so: by the run's name and its process id.
    fn is_instance(&self, instance: &str) -> bool {
        let number = instance.strip_prefix(&self.0.name).and_then(|rest| rest.strip_prefix('-'));
        instance == self.0.name
            || number
                .is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
    }
}

fn differs(field: &str, differs: bool) -> Result<(), ProcessError> {
    if differs { Err(ProcessError::NotOwn { field: field.to_owned() }) } else { Ok(()) }
}

/// What an input opens: its kind, with the file, the name in shared memory or the address.
fn opens(input: &InputConfig) -> (&'static str, String) {
    match input {
        InputConfig::File(path) => ("file", path.display().to_string()),
        InputConfig::Generator(_) => ("generator", String::new()),
        InputConfig::Udp(udp) => ("udp", udp.listen.clone()),
        InputConfig::Ring(ring) => ("ring", ring.name.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ConfigFile;
    use crate::core::Bytes;
    use std::time::{Duration, SystemTime};

    fn config(text: &str) -> RunConfig {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.toml");
        std::fs::write(&path, text).unwrap();
        let mut config = ConfigFile::load(&path).unwrap().check().unwrap();
        // The folder of each test is another one.
        if let Some(output) = &mut config.output {
            output.directory = output.directory.file_name().unwrap().into();
        }
        config
    }

    const TEXT: &str = r#"
        [run]
        name = "camera"
        batch = 8
        events = 100
        [[readout]]
        name = "ru0"
        [readout.generator]
        first_source = 1
        sources = 2
        size = "1KiB"
        [[card]]
        name = "card0"
        memory = "64MiB"
        kernel = "none"
        [[builder]]
        name = "bu0"
        card = "card0"
        slots = 8
        [builder.trigger]
        program = "sh"
        arguments = ["--fast"]
        [output]
        directory = "events"
    "#;

    #[test]
    fn a_process_runs_its_own_configuration_as_the_launcher_completes_it() {
        let own = OwnConfig::new(config(TEXT));
        let launched = RunConfig {
            instance: "camera-4711".to_owned(),
            started: Some(SystemTime::now()),
            listen: "10.0.0.1:0".to_owned(),
            ..config(TEXT)
        };
        own.check(&launched).unwrap();
    }

    #[test]
    fn another_program_file_or_device_is_refused_and_named() {
        let own = OwnConfig::new(config(TEXT));
        for (from, to, field) in [
            ("\"sh\"", "\"/bin/sh\"", "trigger of builder bu0"),
            ("--fast", "--exec", "trigger of builder bu0"),
            ("directory = \"events\"", "directory = \"elsewhere\"", "output"),
            ("\"camera\"", "\"other\"", "run.name"),
            ("\"bu0\"", "\"bu1\"", "name of builder bu0"),
            ("64MiB", "65MiB", "landing of builder bu0"),
            ("batch = 8", "batch = 8\ndevice = \"soft\"", "run.device"),
        ] {
            assert!(TEXT.contains(from), "{from}");
            let error = own.check(&config(&TEXT.replacen(from, to, 1))).unwrap_err().to_string();
            assert!(error.contains(&format!("in {field}")), "{from}: {error}");
        }
        for instance in ["camera-", "camera-4x", "other-1", "camera-1.card0"] {
            let managers = RunConfig { instance: instance.to_owned(), ..config(TEXT) };
            assert!(own.check(&managers).is_err(), "{instance}");
        }
        let mut reading = config(TEXT);
        reading.readouts[0].input = InputConfig::File("/etc/passwd".into());
        assert!(own.check(&reading).unwrap_err().to_string().contains("the input of readout ru0"));
        let comparing = RunConfig { reference_decisions: Some("/etc/passwd".into()), ..config(TEXT) };
        assert!(own.check(&comparing).unwrap_err().to_string().contains("reference_decisions"));
    }

    #[test]
    fn a_card_is_one_of_the_configuration() {
        let own = OwnConfig::new(config(TEXT));
        let card = |name: &str, memory: u64, kind: &str| CardProcess {
            name: name.parse().unwrap(),
            memory: Bytes(memory),
            kind: kind.to_owned(),
            spin: Duration::ZERO,
        };
        let size = 64 << 20;
        own.check_card(&card("camera-12.card0", size, "emulated")).unwrap();
        for other in [
            card("camera-12.card1", size, "emulated"),
            card("other-12.card0", size, "emulated"),
            card("camera-12.card0", size + 1, "emulated"),
            card("camera-12.card0", size, "pci:0000:01:00.0/bar4"),
        ] {
            assert!(own.check_card(&other).is_err(), "{other:?}");
        }
    }
}
