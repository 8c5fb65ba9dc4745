//! Slurm's prolog and epilog of nodes with cards, with a `scontrol` and a `millstream` of this test: what a job's user, and a
//! controller that does not respond, can do to them. `slurm.rs` runs them under Slurm.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::process::{Command, Output};

/// The user of the job.
const USER: u32 = 65_534;
const SCONTROL: &str = r#"#!/bin/sh
[ ! -e "$BROKEN" ] || { echo "Unable to contact slurm controller" >&2; exit 1; }
case $2 in
job) echo "     Nodes=n1 CPU_IDs=0 Mem=0 GRES=card(CNT:1)" ;;
hostnames) echo "$3" ;;
esac
"#;
/// In the name of the job's user: tries to put a link to root's file in the place of files of the scripts.
const PROGRAM: &str = r#"#!/bin/sh
echo "$(id -u) $*" >>"$CALLS"
[ "$(id -u)" != 0 ] || exit 1
touch "$XDG_STATE_HOME/lease" || exit 1
for place in "$XDG_STATE_HOME" "$XDG_STATE_HOME/.."; do
    ln -sfn "$SECRET" "$place/cards"
done
exit 0
"#;

struct Node<'a>(&'a Path);

impl Node<'_> {
    fn new(folder: &Path) -> Node<'_> {
        let open = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        open(folder, 0o755);
        fs::create_dir(folder.join("bin")).unwrap();
        for (name, text) in [("scontrol", SCONTROL), ("millstream", PROGRAM)] {
            fs::write(folder.join("bin").join(name), text).unwrap();
            open(&folder.join("bin").join(name), 0o755);
        }
        fs::write(folder.join("calls"), "").unwrap();
        open(&folder.join("calls"), 0o666);
        fs::write(folder.join("addresses"), "# of this node\nn1:7480\n").unwrap();
        fs::write(folder.join("secret"), "root's\n").unwrap();
        open(&folder.join("secret"), 0o600);
        Node(folder)
    }

    fn run(&self, script: &str) -> Output {
        let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/slurm");
        let path = std::env::var("PATH").unwrap();
        let own = |name: &str| self.0.join(name);
        Command::new("sh")
            .arg(scripts.join(script))
            .env("PATH", format!("{}:{path}", own("bin").display()))
            .envs([("CALLS", own("calls")), ("SECRET", own("secret")), ("BROKEN", own("broken"))])
            .envs([("MILLSTREAM_CARDS", own("addresses")), ("MILLSTREAM_JOBS", own("jobs"))])
            .envs([("SLURM_JOB_ID", "17"), ("SLURMD_NODENAME", "n1"), ("SLURM_JOB_UID", &USER.to_string())])
            .output()
            .unwrap()
    }

    fn calls(&self) -> String {
        fs::read_to_string(self.0.join("calls")).unwrap()
    }
}

#[test]
fn a_jobs_user_changes_no_file_of_root() {
    if !rustix::process::geteuid().is_root() {
        println!("not run: the scripts are Slurm's, which runs them as root");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let node = Node::new(folder.path());
    let prolog = node.run("cards-prolog.sh");
    assert!(prolog.status.success(), "{prolog:?}");
    assert_eq!(node.calls(), "65534 card lease n1:7480 --for 86400 --wait 0\n");
    assert_eq!(fs::read_to_string(folder.path().join("jobs/17/cards")).unwrap(), "n1:7480\n");
    let lease = fs::metadata(folder.path().join("jobs/17/state")).unwrap();
    assert_eq!((lease.uid(), lease.mode() & 0o777), (USER, 0o700));

    let task = node.run("cards-task-prolog.sh");
    let state = folder.path().join("jobs/17/state");
    let wanted = format!("export MILLSTREAM_CARDS=n1:7480\nexport XDG_STATE_HOME={}\n", state.display());
    assert_eq!(String::from_utf8_lossy(&task.stdout), wanted);

    let epilog = node.run("cards-epilog.sh");
    assert!(epilog.status.success(), "{epilog:?}");
    assert!(node.calls().ends_with("65534 card lease n1:7480 --release\n"), "{}", node.calls());
    assert!(!folder.path().join("jobs/17").exists());
    let secret = folder.path().join("secret");
    assert_eq!(fs::metadata(&secret).unwrap().uid(), 0);
    assert_eq!(fs::read_to_string(secret).unwrap(), "root's\n");
}

#[test]
fn a_controller_that_does_not_respond_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let node = Node::new(folder.path());
    fs::write(folder.path().join("broken"), "").unwrap();
    let prolog = node.run("cards-prolog.sh");
    assert!(!prolog.status.success());
    let said = String::from_utf8_lossy(&prolog.stderr);
    assert!(said.contains("job 17: scontrol does not show the job"), "{said}");
    assert_eq!(node.calls(), "", "no card was leased");
}
