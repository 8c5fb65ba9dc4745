//! A client: the programs of one package and their cases, from its `cases.toml`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use regex::Regex;
use serde::Deserialize;

use crate::suite::Suite;

/// An invalid `cases.toml`.
#[derive(Debug, thiserror::Error)]
#[error("{}: {what}", path.display())]
pub(crate) struct ClientError {
    path: PathBuf,
    what: String,
}

/// The programs of one package.
#[derive(Debug)]
pub(crate) struct Client {
    /// Name of the folder.
    pub(crate) name: String,
    /// The folder.
    pub(crate) folder: PathBuf,
    pub(crate) title: String,
    /// Description for the document.
    pub(crate) about: String,
    /// Debian packages and their versions.
    pub(crate) packages: BTreeMap<String, String>,
    /// Command that starts this runner for the client, in another environment.
    pub(crate) wrapper: Option<String>,
    /// Commands to run once before the first case.
    pub(crate) build: Vec<String>,
    pub(crate) exceptions: Vec<Exception>,
    retries: Vec<RetryRule>,
    cases: Vec<Case>,
}

/// Cases that are expected not to pass, with the reason.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Exception {
    pub(crate) result: ExpectedResult,
    pub(crate) reason: String,
    pub(crate) cases: Vec<String>,
    /// The path of the exception; both without one.
    path: Option<DataPath>,
    /// Required start of the failure's description.
    #[serde(default)]
    pub(crate) failure_starts_with: String,
}

/// A failure of the program that does not depend on the device: the case is retried.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RetryRule {
    /// Text in the output of either side.
    output_contains: String,
    pub(crate) reason: String,
}

/// Path between the two sides of a case.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum DataPath {
    /// Through shared memory.
    #[default]
    Shm,
    /// RoCEv2 packets.
    Wire,
}

impl DataPath {
    /// Value of `millstream run --path`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Wire => "wire",
        }
    }
}

/// Expected result of a case with an exception.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ExpectedResult {
    Fail,
    Skip,
    /// It passes or fails: the program has a race condition.
    Flaky,
}

/// One case.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    /// The command line, without ports and hosts. Unique within the client.
    pub(crate) name: String,
    pub(crate) program: String,
    pub(crate) transport: String,
    pub(crate) template: Template,
    /// Program and arguments, for `{case}` in the template.
    pub(crate) command_line: String,
    /// Variables in addition to those of the template.
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) expect_output: Vec<Regex>,
    pub(crate) forbid_output: Vec<Regex>,
    pub(crate) timeout_s: u64,
    pub(crate) suite: Option<Suite>,
}

/// Command lines of a case. `{case}` is the program with its arguments and `{port}` an unused TCP port.
/// `{scratch}` is a folder for the client's files, `{client}` the folder of the client.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Template {
    /// Started first.
    server: Option<String>,
    client: String,
    /// Condition for starting the client.
    #[serde(default)]
    pub(crate) ready: Ready,
    /// The server does not end after the client.
    #[serde(default)]
    pub(crate) server_keeps_running: bool,
    /// The client's exit status on success.
    #[serde(default)]
    pub(crate) client_exit: i32,
    #[serde(default)]
    pub(crate) env: BTreeMap<String, String>,
    /// Patterns that the client's output must match.
    #[serde(default)]
    expect_output: Vec<String>,
    /// Patterns that no output may match.
    #[serde(default)]
    forbid_output: Vec<String>,
}

impl Template {
    pub(crate) fn server(&self) -> Option<&str> {
        self.server.as_deref()
    }

    pub(crate) fn client(&self) -> &str {
        &self.client
    }
}

/// Condition for a server to be ready.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Ready {
    /// It listens on its TCP port.
    #[default]
    TcpListening,
    /// It listens on its rdma_cm port.
    RdmacmListening,
    /// This command succeeds.
    Command(String),
    /// This time has passed, for servers that listen elsewhere.
    Milliseconds(u64),
}

/// A `cases.toml`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ClientFile {
    title: String,
    about: String,
    packages: BTreeMap<String, String>,
    wrapper: Option<String>,
    #[serde(default)]
    build: Vec<String>,
    template: BTreeMap<String, Template>,
    group: Vec<CaseGroup>,
    #[serde(default)]
    exception: Vec<Exception>,
    #[serde(default)]
    retry: Vec<RetryRule>,
}

/// Cases with common settings: each program with each of the arguments.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct CaseGroup {
    template: String,
    programs: Vec<String>,
    transport: String,
    #[serde(default = "no_arguments")]
    arguments: Vec<String>,
    #[serde(default)]
    env: BTreeMap<String, String>,
    #[serde(default)]
    expect_output: Vec<String>,
    #[serde(default = "timeout_s")]
    timeout_s: u64,
    suite: Option<Suite>,
}

fn no_arguments() -> Vec<String> {
    vec![String::new()]
}

/// Default time limit, for shared machines.
fn timeout_s() -> u64 {
    240
}

impl Client {
    pub(crate) fn cases(&self) -> Vec<Case> {
        self.cases.clone()
    }

    pub(crate) fn exception(&self, case: &str) -> Option<&Exception> {
        self.exceptions.iter().find(|exception| exception.cases.iter().any(|name| name == case))
    }

    /// The retry rule that one of these outputs matches.
    pub(crate) fn retry(&self, outputs: &[&str]) -> Option<&RetryRule> {
        self.retries.iter().find(|retry| outputs.iter().any(|output| output.contains(&retry.output_contains)))
    }

    fn parse(name: &str, folder: &Path, text: &str, path: DataPath) -> Result<Self, String> {
        let mut file: ClientFile = toml::from_str(text).map_err(|error| error.to_string())?;
        file.exception.retain(|exception| exception.path.is_none_or(|required| required == path));
        let mut cases: Vec<Case> = Vec::new();
        for group in &file.group {
            let template = file
                .template
                .get(&group.template)
                .ok_or_else(|| format!("no [template.{}]", group.template))?;
            for program in &group.programs {
                for arguments in &group.arguments {
                    let case = group.case(program, arguments, template)?;
                    if cases.iter().any(|other| other.name == case.name) {
                        return Err(format!("duplicate case {:?}", case.name));
                    }
                    cases.push(case);
                }
            }
        }
        for exception in &file.exception {
            for case in &exception.cases {
                // The cases of a suite are known only after its run.
                let known = cases.iter().any(|other| other.name == *case || other.suite.is_some());
                let count = file.exception.iter().flat_map(|e| &e.cases).filter(|name| *name == case).count();
                if !known {
                    return Err(format!("exception {:?}: no case {case:?}", exception.reason));
                }
                if count > 1 {
                    return Err(format!("the case {case:?} has two exceptions"));
                }
            }
        }
        Ok(Self {
            name: name.to_owned(),
            folder: folder.to_owned(),
            title: file.title,
            about: file.about,
            packages: file.packages,
            wrapper: file.wrapper,
            build: file.build,
            exceptions: file.exception,
            retries: file.retry,
            cases,
        })
    }
}

impl CaseGroup {
    fn case(&self, program: &str, arguments: &str, template: &Template) -> Result<Case, String> {
        let words = format!("{program} {arguments}").trim().to_owned();
        let env = self.env.iter().map(|(name, value)| format!("{name}={value} "));
        let patterns = |patterns: &mut dyn Iterator<Item = &String>| {
            patterns
                .map(|text| Regex::new(text).map_err(|error| error.to_string()))
                .collect::<Result<Vec<Regex>, String>>()
        };
        Ok(Case {
            name: env.chain([words.clone()]).collect(),
            program: program.to_owned(),
            transport: self.transport.clone(),
            command_line: words,
            env: self.env.clone(),
            expect_output: patterns(&mut template.expect_output.iter().chain(&self.expect_output))?,
            forbid_output: patterns(&mut template.forbid_output.iter())?,
            template: template.clone(),
            timeout_s: self.timeout_s,
            suite: self.suite,
        })
    }
}

/// The clients in a folder, by name, with the exceptions of one path.
pub(crate) fn all(folder: &Path, path: DataPath) -> Result<Vec<Client>, ClientError> {
    let failed = |path: &Path, what: String| ClientError { path: path.to_owned(), what };
    let entries = fs::read_dir(folder).map_err(|cause| failed(folder, cause.to_string()))?;
    let mut clients = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|cause| failed(folder, cause.to_string()))?;
        let file = entry.path().join("cases.toml");
        if !file.exists() {
            continue;
        }
        let text = fs::read_to_string(&file).map_err(|cause| failed(&file, cause.to_string()))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        // Programs run in another folder, so paths must be absolute.
        let folder = entry.path().canonicalize().map_err(|cause| failed(&file, cause.to_string()))?;
        clients.push(Client::parse(&name, &folder, &text, path).map_err(|what| failed(&file, what))?);
    }
    clients.sort_by(|a, b| a.name.cmp(&b.name));
    if clients.is_empty() {
        return Err(failed(folder, "no client in this folder".into()));
    }
    Ok(clients)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_clients_are_valid() {
        let clients = all(Path::new(env!("CARGO_MANIFEST_DIR")), DataPath::Shm).unwrap();
        for client in &clients {
            assert!(!client.cases().is_empty() && !client.packages.is_empty(), "{}", client.name);
        }
        assert!(clients.iter().any(|client| client.name == "perftest"));
    }

    const FILE: &str = r#"
        title = "Some programs"
        about = ""
        packages = { some = "1" }
        [template.single]
        client = "{case}"
        [[group]]
        template = "single"
        programs = ["a", "b"]
        transport = "RC"
        arguments = ["", "-x 1"]
        env = { E = "2" }
    "#;

    #[test]
    fn group_is_the_product_of_programs_and_arguments() {
        let client = Client::parse("some", Path::new("/"), FILE, DataPath::Shm).unwrap();
        let names: Vec<String> = client.cases().into_iter().map(|case| case.name).collect();
        assert_eq!(names, ["E=2 a", "E=2 a -x 1", "E=2 b", "E=2 b -x 1"]);
    }

    #[test]
    fn retry_rule_matches_either_output() {
        let text = format!("{FILE}\n[[retry]]\noutput_contains = 'I gave up'\nreason = 'it gives up'");
        let client = Client::parse("some", Path::new("/"), &text, DataPath::Shm).unwrap();
        assert_eq!(client.retry(&["", "so I gave up."]).map(|retry| &retry.reason[..]), Some("it gives up"));
        assert!(client.retry(&["I did not", "give up"]).is_none());
    }

    #[test]
    fn exception_can_be_limited_to_one_path() {
        let text = format!(
            "{FILE}\n[[exception]]\nresult = 'fail'\nreason = 'why'\npath = 'wire'\ncases = ['E=2 a']"
        );
        let excepted =
            |path| Client::parse("some", Path::new("/"), &text, path).unwrap().exception("E=2 a").is_some();
        assert!(excepted(DataPath::Wire) && !excepted(DataPath::Shm));
    }

    #[test]
    fn exceptions_name_existing_cases_once() {
        let with = |cases: &str| {
            let text = format!("{FILE}\n[[exception]]\nresult = 'fail'\nreason = 'why'\ncases = {cases}");
            Client::parse("some", Path::new("/"), &text, DataPath::Shm)
        };
        assert!(with("['E=2 a']").is_ok());
        assert!(with("['E=2 c']").unwrap_err().contains("no case \"E=2 c\""));
        assert!(with("['E=2 a', 'E=2 a']").unwrap_err().contains("two exceptions"));
    }
}
