//! The Debian packages of a client, at pinned versions.

use std::collections::BTreeMap;
use std::process::Command;

use rustix::process::geteuid;

/// Installs missing packages, as root.
pub(crate) fn ensure(packages: &BTreeMap<String, String>) -> Result<(), String> {
    let missing = not_installed(packages);
    if missing.is_empty() {
        return Ok(());
    }
    let wanted: Vec<String> = missing.iter().map(|name| format!("{name}={}", packages[*name])).collect();
    let command = format!("apt-get install --no-install-recommends {}", wanted.join(" "));
    if !geteuid().is_root() {
        return Err(format!("missing packages; run as root: {command}"));
    }
    eprintln!("{command}");
    for words in [&["update", "-qq"][..], &["install", "-qq", "-y", "--no-install-recommends"]] {
        let mut apt = Command::new("apt-get");
        apt.args(words).env("DEBIAN_FRONTEND", "noninteractive");
        if words[0] == "install" {
            apt.args(&wanted);
        }
        match apt.output() {
            Ok(output) if output.status.success() => {}
            Ok(output) => {
                let text = String::from_utf8_lossy(&output.stderr);
                return Err(format!("{command}: {}", text.trim().replace('\n', "; ")));
            }
            Err(cause) => return Err(format!("{command}: {cause}")),
        }
    }
    let missing = not_installed(packages);
    if missing.is_empty() { Ok(()) } else { Err(format!("{command} did not install {}", missing.join(", "))) }
}

/// The packages that are not installed at their pinned version.
fn not_installed(packages: &BTreeMap<String, String>) -> Vec<&str> {
    let is_installed = |(name, version): &(&String, &String)| {
        let format = "${Version} ${db:Status-Status}";
        let shown = Command::new("dpkg-query").args(["-W", "-f", format, name.as_str()]).output();
        shown.is_ok_and(|shown| shown.stdout == format!("{version} installed").as_bytes())
    };
    packages.iter().filter(|package| !is_installed(package)).map(|(name, _)| name.as_str()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_version_counts_as_missing() {
        let _alone = crate::process::tests::CHILDREN.lock();
        let packages = |version: &str| BTreeMap::from([("libc6".to_owned(), version.to_owned())]);
        let here = Command::new("dpkg-query").args(["-W", "-f", "${Version}", "libc6"]).output().unwrap();
        assert_eq!(not_installed(&packages(std::str::from_utf8(&here.stdout).unwrap())), [""; 0]);
        assert_eq!(not_installed(&packages("0")), ["libc6"]);
    }
}
