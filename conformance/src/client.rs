//! A client: the programs of one package with their cases, read from its `cases.toml`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use regex::Regex;
use serde::Deserialize;

use crate::suite::Suite;

/// A `cases.toml` that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{}: {what}", path.display())]
pub(crate) struct ClientError {
    path: PathBuf,
    what: String,
}

/// One package's programs.
#[derive(Debug)]
pub(crate) struct Client {
    /// The folder's name.
    pub(crate) name: String,
    /// The folder.
    pub(crate) folder: PathBuf,
    pub(crate) title: String,
    /// What is worth knowing of this client, for the document.
    pub(crate) about: String,
    /// Debian packages and their versions.
    pub(crate) packages: BTreeMap<String, String>,
    /// The command that this runner is run by for this client, if it is not to run where it is.
    pub(crate) within: Option<String>,
    /// Commands that are run once, before the first case.
    pub(crate) build: Vec<String>,
    pub(crate) exceptions: Vec<Exception>,
    flaws: Vec<Flaw>,
    cases: Vec<Case>,
}

/// Cases that do not pass, and why.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Exception {
    pub(crate) result: Excepted,
    pub(crate) reason: String,
    pub(crate) cases: Vec<String>,
    /// On one path only.
    path: Option<Way>,
    /// What the failure's description must begin with.
    #[serde(rename = "as", default)]
    pub(crate) like: String,
}

/// By what a program shows that it failed by itself, whatever the device did: it is run again.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Flaw {
    /// In the output of either side.
    shows: String,
    pub(crate) reason: String,
}

/// How the two sides of a case reach each other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Way {
    /// Through shared memory.
    #[default]
    Shm,
    /// By packets, over the loopback interface.
    Wire,
}

impl Way {
    /// As `millstream run --path` calls it.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Wire => "wire",
        }
    }
}

/// How a case of an exception ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Excepted {
    Fail,
    Skip,
    /// It fails or passes: the program has a race with itself.
    Races,
}

/// One thing to run, everything about it in one place.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    /// What a user would type, without ports and hosts. Unique within the client.
    pub(crate) name: String,
    pub(crate) program: String,
    pub(crate) transport: String,
    /// The words of the name, placed in the template.
    pub(crate) template: Template,
    pub(crate) words: String,
    /// In addition to the template's.
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) shows: Vec<Regex>,
    pub(crate) never: Vec<Regex>,
    pub(crate) limit_s: u64,
    pub(crate) suite: Option<Suite>,
}

/// How programs are started. In the commands `{case}` is the program with its arguments, `{port}` a free TCP
/// port, `{scratch}` a folder for the client's files and `{client}` the client's folder.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Template {
    /// Started first, if there is one.
    server: Option<String>,
    client: String,
    /// When the client may start.
    #[serde(default)]
    pub(crate) ready: Ready,
    /// The server does not end by itself when the client has.
    #[serde(default)]
    pub(crate) server_stays: bool,
    /// The client's exit status when all is well.
    #[serde(default)]
    pub(crate) client_exit: i32,
    #[serde(default)]
    pub(crate) env: BTreeMap<String, String>,
    /// What the output of the client must match, each of them, and what no output may.
    #[serde(default)]
    shows: Vec<String>,
    #[serde(default)]
    never: Vec<String>,
}

impl Template {
    pub(crate) fn server(&self) -> Option<&str> {
        self.server.as_deref()
    }

    pub(crate) fn client(&self) -> &str {
        &self.client
    }
}

/// When a server serves.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Ready {
    /// As soon as it listens on its TCP port.
    #[default]
    Listens,
    /// As soon as it listens on its port of rdma_cm.
    Manages,
    /// As soon as this command succeeds.
    Asked(String),
    /// After so many milliseconds, for servers that listen elsewhere.
    Milliseconds(u64),
}

/// The file's words.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    title: String,
    about: String,
    packages: BTreeMap<String, String>,
    within: Option<String>,
    #[serde(default)]
    build: Vec<String>,
    template: BTreeMap<String, Template>,
    group: Vec<Group>,
    #[serde(default)]
    exception: Vec<Exception>,
    #[serde(default)]
    flaw: Vec<Flaw>,
}

/// Cases that have much in common: each program with each of the arguments.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Group {
    template: String,
    programs: Vec<String>,
    transport: String,
    #[serde(default = "no_arguments")]
    arguments: Vec<String>,
    #[serde(default)]
    env: BTreeMap<String, String>,
    #[serde(default)]
    shows: Vec<String>,
    #[serde(default = "limit_s")]
    limit_s: u64,
    suite: Option<Suite>,
}

fn no_arguments() -> Vec<String> {
    vec![String::new()]
}

/// Generous: machines are shared.
fn limit_s() -> u64 {
    240
}

impl Client {
    pub(crate) fn cases(&self) -> Vec<Case> {
        self.cases.clone()
    }

    pub(crate) fn exception(&self, case: &str) -> Option<&Exception> {
        self.exceptions.iter().find(|exception| exception.cases.iter().any(|name| name == case))
    }

    /// The flaw that one of these outputs shows.
    pub(crate) fn flaw(&self, outputs: &[&str]) -> Option<&Flaw> {
        self.flaws.iter().find(|flaw| outputs.iter().any(|output| output.contains(&flaw.shows)))
    }

    fn parse(name: &str, folder: &Path, text: &str, way: Way) -> Result<Self, String> {
        let mut file: File = toml::from_str(text).map_err(|error| error.to_string())?;
        file.exception.retain(|exception| exception.path.is_none_or(|path| path == way));
        let mut cases: Vec<Case> = Vec::new();
        for group in &file.group {
            let template = file
                .template
                .get(&group.template)
                .ok_or_else(|| format!("there is no [template.{}]", group.template))?;
            for program in &group.programs {
                for arguments in &group.arguments {
                    let case = group.case(program, arguments, template)?;
                    if cases.iter().any(|other| other.name == case.name) {
                        return Err(format!("the case {:?} is there twice", case.name));
                    }
                    cases.push(case);
                }
            }
        }
        for exception in &file.exception {
            for case in &exception.cases {
                // The cases of a suite are known when it has run.
                let known = cases.iter().any(|other| other.name == *case || other.suite.is_some());
                let count = file.exception.iter().flat_map(|e| &e.cases).filter(|name| *name == case).count();
                if !known {
                    return Err(format!(
                        "there is no case {case:?} for the exception {:?}",
                        exception.reason
                    ));
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
            within: file.within,
            build: file.build,
            exceptions: file.exception,
            flaws: file.flaw,
            cases,
        })
    }
}

impl Group {
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
            words,
            env: self.env.clone(),
            shows: patterns(&mut template.shows.iter().chain(&self.shows))?,
            never: patterns(&mut template.never.iter())?,
            template: template.clone(),
            limit_s: self.limit_s,
            suite: self.suite,
        })
    }
}

/// The clients in this folder, by name, with the exceptions of one path.
pub(crate) fn all(folder: &Path, way: Way) -> Result<Vec<Client>, ClientError> {
    let failed = |path: &Path, what: String| ClientError { path: path.to_owned(), what };
    let entries = fs::read_dir(folder).map_err(|cause| failed(folder, cause.to_string()))?;
    let mut clients = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|cause| failed(folder, cause.to_string()))?;
        let path = entry.path().join("cases.toml");
        if !path.exists() {
            continue;
        }
        let text = fs::read_to_string(&path).map_err(|cause| failed(&path, cause.to_string()))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        // Programs are started elsewhere, so names of files have to be absolute.
        let folder = entry.path().canonicalize().map_err(|cause| failed(&path, cause.to_string()))?;
        clients.push(Client::parse(&name, &folder, &text, way).map_err(|what| failed(&path, what))?);
    }
    clients.sort_by(|a, b| a.name.cmp(&b.name));
    if clients.is_empty() {
        return Err(failed(folder, "no client is there".into()));
    }
    Ok(clients)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clients_of_this_folder_can_be_used() {
        let clients = all(Path::new(env!("CARGO_MANIFEST_DIR")), Way::Shm).unwrap();
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
    fn a_group_is_each_program_with_each_of_the_arguments() {
        let client = Client::parse("some", Path::new("/"), FILE, Way::Shm).unwrap();
        let names: Vec<String> = client.cases().into_iter().map(|case| case.name).collect();
        assert_eq!(names, ["E=2 a", "E=2 a -x 1", "E=2 b", "E=2 b -x 1"]);
    }

    #[test]
    fn a_flaw_is_known_by_what_either_side_shows() {
        let text = format!("{FILE}\n[[flaw]]\nshows = 'I gave up'\nreason = 'it gives up'");
        let client = Client::parse("some", Path::new("/"), &text, Way::Shm).unwrap();
        assert_eq!(client.flaw(&["", "so I gave up."]).map(|flaw| &flaw.reason[..]), Some("it gives up"));
        assert!(client.flaw(&["I did not", "give up"]).is_none());
    }

    #[test]
    fn an_exception_can_be_of_one_path() {
        let text = format!(
            "{FILE}\n[[exception]]\nresult = 'fail'\nreason = 'why'\npath = 'wire'\ncases = ['E=2 a']"
        );
        let excepted =
            |way| Client::parse("some", Path::new("/"), &text, way).unwrap().exception("E=2 a").is_some();
        assert!(excepted(Way::Wire) && !excepted(Way::Shm));
    }

    #[test]
    fn an_exception_names_a_case_that_is_there_and_once() {
        let with = |cases: &str| {
            let text = format!("{FILE}\n[[exception]]\nresult = 'fail'\nreason = 'why'\ncases = {cases}");
            Client::parse("some", Path::new("/"), &text, Way::Shm)
        };
        assert!(with("['E=2 a']").is_ok());
        assert!(with("['E=2 c']").unwrap_err().contains("no case \"E=2 c\""));
        assert!(with("['E=2 a', 'E=2 a']").unwrap_err().contains("two exceptions"));
    }
}
