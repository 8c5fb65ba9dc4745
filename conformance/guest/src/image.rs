//! A guest's kernel and initramfs, built once for each set of packages.
//!
//! The initramfs has the programs with their libraries, and the kernel modules for virtio-net and rxe in load order.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempPath;

use crate::cpio::Archive;
use crate::error::{Error, output};
use crate::packages::{Kernel, Packages};

/// Kernel and initramfs of a guest.
#[derive(Debug)]
pub(crate) struct Image {
    pub(crate) kernel: PathBuf,
    pub(crate) initramfs: PathBuf,
}

impl Image {
    /// The image with the files of a folder at its root, in a temporary file.
    pub(crate) fn with_files(&self, root: &Path, cache: &Path) -> Result<(Image, TempPath), Error> {
        // The kernel unpacks one archive after the other.
        let mut initramfs = fs::read(&self.initramfs).map_err(Error::file(&self.initramfs))?;
        let mut archive = Archive::default();
        add_folder(root, "", &mut archive)?;
        initramfs.extend(archive.finish());
        let file = tempfile::NamedTempFile::new_in(cache).map_err(Error::file(cache))?.into_temp_path();
        fs::write(&file, initramfs).map_err(Error::file(&*file))?;
        Ok((Image { kernel: self.kernel.clone(), initramfs: file.to_path_buf() }, file))
    }
}

/// Adds all files below a folder to the archive. Names begin with `prefix`.
fn add_folder(folder: &Path, prefix: &str, archive: &mut Archive) -> Result<(), Error> {
    for path in entries(folder)? {
        let name = format!("{prefix}{}", path.file_name().unwrap_or_default().to_string_lossy());
        if path.is_dir() {
            archive.folder(&name);
            add_folder(&path, &format!("{name}/"), archive)?;
        } else {
            archive.file(&name, &fs::read(&path).map_err(Error::file(&path))?);
        }
    }
    Ok(())
}

/// Init and the command server of a guest.
const INIT: &str = include_str!("init.sh");
const SERVE: &str = include_str!("serve.sh");
/// Script that checks for a listener on a TCP port.
const LISTENS: &str = include_str!("listens.sh");

/// Modules in load order, after their dependencies. Built-in modules are skipped.
const MODULES: &[&str] =
    &["virtio_pci", "virtio_net", "crc32_generic", "crc32-pclmul", "ib_uverbs", "rdma_ucm", "rdma_rxe"];

/// Folders that init expects; it links busybox's programs into some of them.
const FOLDERS: [&str; 9] = ["bin", "dev", "modules", "proc", "sbin", "sys", "tmp", "usr", "usr/sbin"];
/// Programs of a guest: all files of these folders, and these files. Their libraries are added.
const PROGRAMS: &[&str] = &[
    "bin/busybox",
    "usr/bin",
    "etc/libibverbs.d/rxe.driver",
    "usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so",
];
/// Library that glibc loads at run time, to end a thread.
const RUNTIME_LIBRARY: &str = "libgcc_s.so.1";
/// Library folders of the packages.
const LIBRARIES: &[&str] = &["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"];

/// The image, from the cache or newly built.
pub(crate) fn load_or_build(kernel: Kernel, cache: &Path) -> Result<Image, Error> {
    let packages = Packages::find(kernel)?;
    let rules = [INIT, SERVE, LISTENS, &MODULES.join(" "), &PROGRAMS.join(" "), RUNTIME_LIBRARY].concat();
    let folder = cache.join(packages.key(&rules));
    let image = Image { kernel: folder.join("vmlinuz"), initramfs: folder.join("initramfs") };
    if folder.exists() {
        return Ok(image);
    }
    eprintln!("building the guest in {}", folder.display());
    fs::create_dir_all(cache).map_err(Error::file(cache))?;
    let work = tempfile::tempdir_in(cache).map_err(Error::file(cache))?;
    let (kernel_root, root) = (work.path().join("kernel"), work.path().join("root"));
    packages.unpack_kernel(&kernel_root)?;
    packages.unpack_userland(&root)?;

    let made = work.path().join("made");
    fs::create_dir(&made).map_err(Error::file(&made))?;
    let mut archive = Archive::default();
    for name in FOLDERS {
        archive.folder(name);
    }
    archive.file("init", INIT.as_bytes());
    archive.file("serve", SERVE.as_bytes());
    archive.file("listens", LISTENS.as_bytes());
    programs(&root, &mut archive)?;
    let vmlinuz = modules(&kernel_root, &mut archive)?;
    fs::copy(&vmlinuz, made.join("vmlinuz")).map_err(Error::file(vmlinuz))?;
    let plain = made.join("initramfs");
    fs::write(&plain, archive.finish()).map_err(Error::file(&plain))?;
    // The rename is atomic; another process may have built the image meanwhile.
    match fs::rename(&made, &folder) {
        Err(cause) if !folder.exists() => Err(Error::file(&folder)(cause)),
        _ => Ok(image),
    }
}

/// Adds the programs, their libraries and the dynamic loader to the archive.
fn programs(root: &Path, archive: &mut Archive) -> Result<(), Error> {
    let mut folders = FOLDERS.map(str::to_owned).to_vec();
    let mut needed = vec![(PathBuf::from("pthread_exit"), RUNTIME_LIBRARY.to_owned())];
    for name in PROGRAMS {
        let path = root.join(name);
        let files = match path.is_dir() {
            true => entries(&path)?.into_iter().filter(|path| path.is_file()).collect(),
            false => vec![path],
        };
        for file in files {
            let name = file.strip_prefix(root).expect("it was found below it").to_string_lossy();
            add(&file, &name, &mut folders, archive, &mut needed)?;
        }
    }
    let mut added = Vec::new();
    while let Some((file, library)) = needed.pop() {
        if added.contains(&library) {
            continue;
        }
        let found =
            LIBRARIES.iter().map(|folder| root.join(folder).join(&library)).find(|path| path.exists());
        let Some(found) = found else { return Err(Error::NoLibrary { file, library }) };
        // Programs name the loader by its path; libraries are found in /lib.
        let folder = if library.starts_with("ld-linux") { "lib64" } else { "lib" };
        add(&found, &format!("{folder}/{library}"), &mut folders, archive, &mut needed)?;
        added.push(library);
    }
    Ok(())
}

/// Adds a file and its parent folders to the archive, and its libraries to `needed`.
fn add(
    path: &Path,
    name: &str,
    folders: &mut Vec<String>,
    archive: &mut Archive,
    needed: &mut Vec<(PathBuf, String)>,
) -> Result<(), Error> {
    for (end, _) in name.match_indices('/') {
        let folder = &name[..end];
        if !folders.iter().any(|known| known == folder) {
            archive.folder(folder);
            folders.push(folder.to_owned());
        }
    }
    let contents = fs::read(path).map_err(Error::file(path))?;
    if contents.starts_with(b"\x7fELF") {
        needed.extend(libraries(path)?.into_iter().map(|library| (path.to_owned(), library)));
    }
    archive.file(name, &contents);
    Ok(())
}

/// The files and folders of a folder, in order.
fn entries(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let read = fs::read_dir(folder).and_then(Iterator::collect::<io::Result<Vec<_>>>);
    let mut paths: Vec<PathBuf> = read.map_err(Error::file(folder))?.iter().map(fs::DirEntry::path).collect();
    paths.sort();
    Ok(paths)
}

/// The libraries required by a program or library (`DT_NEEDED`).
fn libraries(path: &Path) -> Result<Vec<String>, Error> {
    let shown = output(Command::new("readelf").arg("-d").arg(path))?;
    let names = shown.lines().filter(|line| line.contains("(NEEDED)"));
    Ok(names.filter_map(|line| Some(line.split_once('[')?.1.trim_end_matches(']').to_owned())).collect())
}

/// Adds the modules to the archive in load order; returns the path of the kernel.
fn modules(root: &Path, archive: &mut Archive) -> Result<PathBuf, Error> {
    let all = root.join("lib/modules");
    let first = fs::read_dir(&all).and_then(|mut folders| folders.next().ok_or(io::ErrorKind::NotFound)?);
    let folder = first.map_err(Error::file(&all))?.path();
    let version = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    output(Command::new("depmod").arg("-b").args([root.as_os_str(), OsStr::from_bytes(version.as_bytes())]))?;
    let read = |name: &str| {
        let path = folder.join(name);
        fs::read_to_string(&path).map_err(Error::file(path))
    };
    // Lines `module: dependency dependency …`, with the dependency to load first at the end.
    let dependencies = read("modules.dep")?;
    let mut known = HashMap::new();
    for (path, needs) in dependencies.lines().filter_map(|line| line.split_once(':')) {
        known.insert(module_name(path), (path, needs));
    }
    let built_in = read("modules.builtin")?;
    let mut order: Vec<&str> = Vec::new();
    for module in MODULES {
        let Some((path, needs)) = known.get(*module) else {
            if built_in.lines().any(|path| module_name(path) == *module) {
                continue;
            }
            return Err(Error::NoModule { version, module: (*module).to_owned() });
        };
        for path in needs.split_whitespace().rev().chain([*path]) {
            if !order.contains(&path) {
                order.push(path);
            }
        }
    }
    let mut names = String::new();
    for path in order {
        let source = folder.join(path);
        if path.ends_with(".xz") {
            output(Command::new("xz").arg("-d").arg(&source))?;
        }
        let source = source.with_file_name(format!("{}.ko", module_name(path)));
        let contents = fs::read(&source).map_err(Error::file(&source))?;
        archive.file(&format!("modules/{}.ko", module_name(path)), &contents);
        names += &format!("{}.ko\n", module_name(path));
    }
    archive.file("modules/order", names.as_bytes());
    Ok(root.join("boot").join(format!("vmlinuz-{version}")))
}

/// `rdma_rxe` of `kernel/drivers/…/rdma_rxe.ko.xz`.
fn module_name(path: &str) -> &str {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split(".ko").next().unwrap_or(file)
}
