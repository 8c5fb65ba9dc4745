//! Selects the `libibverbs.so.1` of this process.
//!
//! `sideway` opens verbs with `dlopen("libibverbs.so.1")` in a constructor before `main`. glibc returns the
//! library that was first loaded under that SONAME. An earlier constructor of this module loads the soft
//! device by its path. It does not if an RDMA adapter is present or the environment selects another device:
//!
//! | `MILLSTREAM_DEVICE` | library |
//! |---|---|
//! | unset or `auto` | the system's if `/sys/class/infiniband` has entries and `/dev/infiniband` their files, else the soft device |
//! | `hardware` | the system's |
//! | `soft` | the soft device |
//! | a name | the system's if `/sys/class/infiniband` has that name, else the soft device |
//!
//! The soft device is searched at `MILLSTREAM_LIB` (file or directory), then relative to the executable (see
//! [`search_path`]). A constructor must not end the process. A library that is missing or does not load is reported
//! later, by [`devices`](crate::device::devices) and [`open`](crate::device::open).

use std::ffi::{CStr, CString, OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr::NonNull;
use std::sync::OnceLock;

use crate::device::DeviceSelector;

/// File name and SONAME of the verbs library.
pub const SONAME: &str = "libibverbs.so.1";
/// Environment variable that selects a device.
pub const ENV_DEVICE: &str = "MILLSTREAM_DEVICE";
/// Environment variable with the soft device's library or its directory.
pub const ENV_LIBRARY: &str = "MILLSTREAM_LIB";
/// Environment variable that selects the soft device's path to peers: `wire`, for example (docs/soft-device.md).
pub const ENV_PATH: &str = "MILLSTREAM_PATH";
/// The process id that [`reexec_with`] restarted. It prevents endless restarts: the id stays the same over `exec` and
/// differs in child processes.
const ENV_REEXEC: &str = "MILLSTREAM_REEXEC";

const THIS_PROGRAM: &str = "/proc/self/exe";
const SYSFS: &str = "/sys/class/infiniband";
const DEVICE_FILES: &str = "/dev/infiniband";
/// The entry of the soft device in sysfs (docs/rdma-cm.md).
const SOFT: &str = "mill0";
/// Search directories relative to the executable: beside it, `target/lib` from `target/<profile>` and from
/// `target/<profile>/{deps,examples}`, and the private directory of an installation.
const RELATIVE: [&str; 4] = ["", "../lib", "../../lib", "../lib/millstream"];
/// Search directories relative to the library that has this code, if a program links or loads one: beside it, and above the
/// directory of the C libraries of an installation.
const RELATIVE_TO_LIBRARY: [&str; 2] = ["", ".."];

/// The verbs library of this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VerbsLibrary {
    /// The soft device, from this file.
    Soft(PathBuf),
    /// Another `libibverbs.so.1`: rdma-core's.
    System(PathBuf),
    /// No verbs library could be loaded.
    None,
}

impl std::fmt::Display for VerbsLibrary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            VerbsLibrary::Soft(path) => write!(f, "the soft device ({})", path.display()),
            VerbsLibrary::System(path) => write!(f, "the system's verbs library ({})", path.display()),
            VerbsLibrary::None => write!(f, "no verbs library"),
        }
    }
}

/// Why the other verbs library cannot be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoaderError {
    /// The process was restarted and still has the wrong library.
    #[error("device {selector} is not available: after a restart this process still uses {loaded}")]
    WrongLibrary {
        /// The selected device.
        selector: DeviceSelector,
        /// The library that is loaded.
        loaded: VerbsLibrary,
    },
    /// The restart failed.
    #[error("cannot restart this program with {variables}: {cause}")]
    Restart {
        /// The environment variables that are set for it.
        variables: String,
        /// The cause.
        cause: std::io::Error,
    },
}

/// Result of the constructor, for error messages.
#[derive(Debug)]
struct LoadAttempt {
    /// The soft device's library, if the constructor loaded it.
    soft: Option<PathBuf>,
    /// Why the soft device's library did not load.
    failure: Option<String>,
}

static ATTEMPT: OnceLock<LoadAttempt> = OnceLock::new();

/// Runs before the constructor of `rdma-mummy-sys`, which has no priority and runs last. Sections up to
/// `.init_array.00100` are reserved for the C library and Rust's runtime (arguments and environment).
// SAFETY: the section holds pointers to functions of this signature, called once each before `main`; the
// function does not unwind and needs nothing that is initialised later than libc and the allocator.
#[used]
#[unsafe(link_section = ".init_array.00101")]
static LOAD_BEFORE_SIDEWAY: extern "C" fn() = load_before_sideway;

extern "C" fn load_before_sideway() {
    let mut attempt = LoadAttempt { soft: None, failure: None };
    if selected_library() == LibraryKind::Soft
        && open_library(OsStr::new(SONAME), libc::RTLD_NOLOAD).is_none()
        && let Some(path) = find_library()
    {
        match open_library(path.as_os_str(), 0) {
            Some(_) => attempt.soft = Some(path),
            None => attempt.failure = Some(format!("{} does not load: {}", path.display(), last_dl_error())),
        }
    }
    // The constructor is the first to get here, so the cell is empty.
    let _ = ATTEMPT.set(attempt);
}

/// The selected library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LibraryKind {
    Soft,
    System,
}

fn selected_library() -> LibraryKind {
    let selector = std::env::var_os(ENV_DEVICE).unwrap_or_default();
    library_for(&DeviceSelector::from_os(&selector), &hardware_devices())
}

fn library_for(selector: &DeviceSelector, hardware: &[String]) -> LibraryKind {
    let system = match selector {
        DeviceSelector::Auto => !hardware.is_empty(),
        DeviceSelector::Hardware => true,
        DeviceSelector::Soft => false,
        DeviceSelector::Named(name) => hardware.contains(name),
    };
    if system { LibraryKind::System } else { LibraryKind::Soft }
}

/// Names of the RDMA adapters in sysfs, sorted; none if `/dev/infiniband` has no device files for them. A container sees its
/// host's sysfs, also without the right to use an adapter.
pub fn hardware_devices() -> Vec<String> {
    let is_verbs = |entry: std::fs::DirEntry| entry.file_name().as_bytes().starts_with(b"uverbs");
    if !std::fs::read_dir(DEVICE_FILES).is_ok_and(|entries| entries.flatten().any(is_verbs)) {
        return Vec::new();
    }
    let Ok(entries) = std::fs::read_dir(SYSFS) else { return Vec::new() };
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| !name.starts_with('.') && name != SOFT)
        .collect();
    names.sort();
    names
}

/// Candidate files for the soft device's library, in order.
///
/// If `MILLSTREAM_LIB` is set, only its value, so that a wrong value is noticed. Otherwise `./`, `../lib/`, `../../lib/`
/// and `../lib/millstream/` from the executable's directory, and `./` and `../` from that of the library that has this code.
pub fn search_path() -> Vec<PathBuf> {
    let program = std::env::current_exe().ok();
    let library = library_of(search_path as *const libc::c_void).filter(|path| path.is_absolute());
    let directories = [program, library].map(|file| Some(file?.parent()?.to_owned()));
    candidates(std::env::var_os(ENV_LIBRARY), directories)
}

fn candidates(environment: Option<OsString>, [program, library]: [Option<PathBuf>; 2]) -> Vec<PathBuf> {
    if let Some(given) = environment.filter(|value| !value.is_empty()) {
        let given = PathBuf::from(given);
        return vec![if given.is_dir() { given.join(SONAME) } else { given }];
    }
    let library = library.filter(|library| Some(library) != program.as_ref());
    let beside = |directory: Option<PathBuf>, relative: &'static [&str]| {
        directory
            .into_iter()
            .flat_map(|directory| relative.iter().map(move |each| directory.join(each).join(SONAME)))
    };
    beside(program, &RELATIVE).chain(beside(library, &RELATIVE_TO_LIBRARY)).collect()
}

/// The soft device's library on the [`search_path`].
pub fn find_library() -> Option<PathBuf> {
    let found = search_path().into_iter().find(|path| path.is_file() && is_soft_device(path))?;
    // Only the directory is resolved: a symbolic link must keep the name that the loader searches.
    let directory = found.parent()?.canonicalize().ok()?;
    Some(directory.join(found.file_name()?))
}

/// A function that rdma-core exports for drivers of before 2007, and the soft device does not (`libibverbs.map` of the
/// crate `millstream-capi`).
const RDMA_CORE_ONLY: &CStr = c"ibv_register_driver";

/// Whether a file is the soft device's library: rdma-core's has the same name and SONAME, and may lie beside a program.
fn is_soft_device(path: &Path) -> bool {
    let name = RDMA_CORE_ONLY.to_bytes_with_nul();
    std::fs::read(path).is_ok_and(|bytes| !bytes.windows(name.len()).any(|window| window == name))
}

/// The directory for `LD_LIBRARY_PATH`, so that any verbs program uses the soft device.
pub fn library_dir() -> Option<PathBuf> {
    find_library()?.parent().filter(|directory| directory.join(SONAME).is_file()).map(Path::to_owned)
}

/// The verbs library of this process.
pub fn loaded() -> VerbsLibrary {
    let Some(path) = loaded_path() else { return VerbsLibrary::None };
    if is_rdma_core() { VerbsLibrary::System(path) } else { VerbsLibrary::Soft(path) }
}

/// Why the soft device is not used, for error messages.
pub(crate) fn soft_device_unused_reason() -> String {
    if let Some(failure) = ATTEMPT.get().and_then(|attempt| attempt.failure.clone()) {
        return failure;
    }
    if let Some(path) = find_library() {
        return format!(
            "the soft device ({}) was not selected when this process started; --device soft or {ENV_DEVICE}=soft selects it",
            path.display()
        );
    }
    let tried: Vec<String> = search_path().iter().map(|path| path.display().to_string()).collect();
    format!(
        "the soft device was not found; build it with `make lib` or set {ENV_LIBRARY}; searched {}",
        tried.join(", ")
    )
}

/// Loads the verbs library of the selected device, by restarting the program if necessary.
///
/// Returns if the right library is loaded. Call it first in `main`.
///
/// # Errors
/// [`LoaderError`] if a restart fails or does not help.
pub fn ensure(selector: &DeviceSelector) -> Result<(), LoaderError> {
    let loaded = loaded();
    let right = match library_for(selector, &hardware_devices()) {
        LibraryKind::Soft => matches!(loaded, VerbsLibrary::Soft(_)),
        LibraryKind::System => matches!(loaded, VerbsLibrary::System(_)),
    };
    if right {
        return Ok(());
    }
    if matches!(selector, DeviceSelector::Auto) {
        // A missing device is reported when one is opened.
        return Ok(());
    }
    Err(reexec_with(selector))
}

/// Restarts this program with the same arguments and with `MILLSTREAM_DEVICE` set to `selector`.
///
/// Returns only on failure: success replaces the process image.
pub fn reexec_with(selector: &DeviceSelector) -> LoaderError {
    let myself = std::process::id().to_string();
    if std::env::var_os(ENV_REEXEC).is_some_and(|process| process == *myself) {
        return LoaderError::WrongLibrary { selector: selector.clone(), loaded: loaded() };
    }
    let mut command = Command::new(THIS_PROGRAM);
    command.env(ENV_REEXEC, myself);
    if library_for(selector, &hardware_devices()) == LibraryKind::System {
        // Otherwise the search by SONAME finds the soft device again.
        command.env_remove("LD_PRELOAD");
        match (std::env::var_os("LD_LIBRARY_PATH"), library_dir()) {
            (Some(path), Some(ours)) => command.env("LD_LIBRARY_PATH", without_directory(&path, &ours)),
            _ => &mut command,
        };
    }
    exec(command, &[(ENV_DEVICE, &selector.to_string())])
}

/// Restarts this program with the same arguments and with these environment variables set, which the soft device reads once.
///
/// Returns only on failure: success replaces the process image.
pub fn restart(variables: &[(&str, &str)]) -> LoaderError {
    exec(Command::new(THIS_PROGRAM), variables)
}

/// Replaces this process by `command` with the arguments of this process and with `variables`. Returns only on failure.
fn exec(mut command: Command, variables: &[(&str, &str)]) -> LoaderError {
    let mut arguments = std::env::args_os();
    if let Some(name) = arguments.next() {
        command.arg0(name);
    }
    let cause = command.args(arguments).envs(variables.iter().copied()).exec();
    let variables: Vec<_> = variables.iter().map(|(name, value)| format!("{name}={value}")).collect();
    LoaderError::Restart { variables: variables.join(" "), cause }
}

fn without_directory(path: &OsStr, directory: &Path) -> OsString {
    let kept =
        std::env::split_paths(path).filter(|entry| entry.canonicalize().ok().as_deref() != Some(directory));
    // The entries come from `split_paths`, so none contains the separator.
    std::env::join_paths(kept).unwrap_or_default()
}

/// Opens a library. The handle is never closed, because verbs objects point into the library.
fn open_library(name: &OsStr, extra_flags: libc::c_int) -> Option<*mut libc::c_void> {
    let name = CString::new(name.as_bytes()).ok()?;
    // SAFETY: `name` is a C string; the libraries concerned have no constructors with preconditions.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL | extra_flags) };
    (!handle.is_null()).then_some(handle)
}

/// Whether the verbs library of this process is rdma-core's.
fn is_rdma_core() -> bool {
    // An old version of a symbol is found by its version only.
    open_library(OsStr::new(SONAME), libc::RTLD_NOLOAD).is_some_and(|handle| {
        // SAFETY: a live handle and C strings.
        !unsafe { libc::dlvsym(handle, RDMA_CORE_ONLY.as_ptr(), c"IBVERBS_1.1".as_ptr()) }.is_null()
    })
}

/// A function of the verbs library.
pub(crate) fn symbol(name: &CStr) -> Option<NonNull<libc::c_void>> {
    let handle = open_library(OsStr::new(SONAME), libc::RTLD_NOLOAD)?;
    // SAFETY: a live handle and a C string.
    NonNull::new(unsafe { libc::dlsym(handle, name.as_ptr()) })
}

fn last_dl_error() -> String {
    // SAFETY: the string is valid until the next dl* call of this thread, and is copied at once.
    unsafe {
        let text = libc::dlerror();
        if text.is_null() {
            "unknown error".to_owned()
        } else {
            CStr::from_ptr(text).to_string_lossy().into_owned()
        }
    }
}

fn loaded_path() -> Option<PathBuf> {
    let handle = open_library(OsStr::new(SONAME), libc::RTLD_NOLOAD)?;
    // SAFETY: the handle is live.
    let symbol = unsafe { libc::dlsym(handle, c"ibv_get_device_list".as_ptr()) };
    if symbol.is_null() { None } else { library_of(symbol) }
}

/// The file that has the code at an address.
fn library_of(code: *const libc::c_void) -> Option<PathBuf> {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: `dladdr` takes any address, and fills the structure when it returns non-zero; the name it points to belongs to
    // a library that is never unloaded, or to this one.
    unsafe {
        if libc::dladdr(code, info.as_mut_ptr()) == 0 {
            return None;
        }
        let name = info.assume_init().dli_fname;
        (!name.is_null()).then(|| PathBuf::from(OsStr::from_bytes(CStr::from_ptr(name).to_bytes())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str) -> DeviceSelector {
        DeviceSelector::Named(name.to_owned())
    }

    #[test]
    fn a_library_of_rdma_core_is_not_taken_for_the_soft_device() {
        let folder = tempfile::tempdir().unwrap();
        let library = folder.path().join(SONAME);
        std::fs::write(&library, b"\x7fELF ibv_open_device\0ibv_register_driver\0").unwrap();
        assert!(!is_soft_device(&library));
        std::fs::write(&library, b"\x7fELF ibv_open_device\0").unwrap();
        assert!(is_soft_device(&library));
        assert!(!is_soft_device(&folder.path().join("absent")));
    }

    #[test]
    fn hardware_is_preferred_unless_selected_otherwise() {
        let none: &[String] = &[];
        let two = ["mlx5_0".to_owned(), "rxe0".to_owned()];
        for (selector, without, with) in [
            (DeviceSelector::Auto, LibraryKind::Soft, LibraryKind::System),
            (DeviceSelector::Hardware, LibraryKind::System, LibraryKind::System),
            (DeviceSelector::Soft, LibraryKind::Soft, LibraryKind::Soft),
            (named("rxe0"), LibraryKind::Soft, LibraryKind::System),
            (named("soft0"), LibraryKind::Soft, LibraryKind::Soft),
        ] {
            assert_eq!(library_for(&selector, none), without, "{selector} without hardware");
            assert_eq!(library_for(&selector, &two), with, "{selector} with hardware");
        }
    }

    #[test]
    fn the_environment_variable_excludes_other_candidates() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("another-name.so");
        let program = || Some(PathBuf::from("/opt/bin"));
        assert_eq!(candidates(Some(file.clone().into()), [program(), None]), [file]);
        assert_eq!(candidates(Some(directory.path().into()), [None, None]), [directory.path().join(SONAME)]);
        // A static library is in the program.
        let relative = candidates(Some(OsString::new()), [program(), program()]);
        assert_eq!(relative[0], Path::new("/opt/bin/libibverbs.so.1"));
        assert_eq!(relative[1], Path::new("/opt/bin/../lib/libibverbs.so.1"));
        assert_eq!(relative.len(), RELATIVE.len());
        assert!(candidates(None, [None, None]).is_empty());
        let library = candidates(None, [program(), Some("/usr/lib/millstream/c".into())]);
        assert_eq!(library[RELATIVE.len() + 1], Path::new("/usr/lib/millstream/c/../libibverbs.so.1"));
    }

    #[test]
    fn a_directory_is_removed_from_a_library_path() {
        let ours = tempfile::tempdir().unwrap();
        let ours = ours.path().canonicalize().unwrap();
        let path = OsString::from(format!("/a:{}/.:/b", ours.display()));
        assert_eq!(without_directory(&path, &ours), OsString::from("/a:/b"));
    }

    #[test]
    fn the_constructor_ran_before_main() {
        assert!(ATTEMPT.get().is_some());
    }
}
