//! A lease that several commands share. A file that only this user can read holds its token.

use std::error::Error;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use millstream_card::{LeaseToken, RemoteCard, RemoteErrorKind};

/// The lease of a card during one command.
pub(super) struct Session {
    card: RemoteCard,
    file: PathBuf,
}

impl Session {
    /// Acquires a lease that expires `duration` after the latest command.
    pub(super) fn acquire(
        card: RemoteCard,
        duration: Duration,
        timeout: Duration,
    ) -> Result<Session, Box<dyn Error>> {
        let file = file_of(&card)?;
        if let Ok(token) = read(&file)
            && card.attach(&token).is_ok()
        {
            return Err(format!(
                "card {}: you already hold lease {}; release it with --release",
                card.address(),
                token.epoch
            )
            .into());
        }
        card.acquire(duration, timeout)?;
        Ok(Session { card, file })
    }

    /// Continues the lease that an earlier command acquired.
    pub(super) fn resume(card: RemoteCard) -> Result<Session, Box<dyn Error>> {
        let file = file_of(&card)?;
        let first = || {
            format!(
                "card {address}: acquire its lease first: millstream card lease {address}",
                address = card.address()
            )
        };
        let token = read(&file).map_err(|_| first())?;
        if let Err(error) = card.attach(&token) {
            if !matches!(error.kind, RemoteErrorKind::NotLeased(_)) {
                // The lease may go on.
                return Err(error.into());
            }
            // The token of an ended lease is useless.
            let _ = fs::remove_file(&file);
            return Err(format!("{error}; {}", first()).into());
        }
        Ok(Session { card, file })
    }

    pub(super) fn card(&self) -> &RemoteCard {
        &self.card
    }

    /// Detaches the lease for the next command.
    pub(super) fn keep(&self) -> Result<ExitCode, Box<dyn Error>> {
        let token = self.card.detach()?;
        let failed = |cause: std::io::Error| format!("lease file {}: {cause}", self.file.display());
        let mut file = fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&self.file)
            .map_err(failed)?;
        file.write_all(serde_json::to_string(&token)?.as_bytes()).map_err(failed)?;
        Ok(ExitCode::SUCCESS)
    }

    /// Releases the lease. Returns its epoch.
    pub(super) fn release(&self) -> Result<u32, Box<dyn Error>> {
        let epoch = self.card.held().map_or(0, |held| held.epoch);
        self.card.release()?;
        let _ = fs::remove_file(&self.file);
        Ok(epoch)
    }
}

fn read(file: &PathBuf) -> Result<LeaseToken, Box<dyn Error>> {
    Ok(serde_json::from_str(&fs::read_to_string(file)?)?)
}

/// `$XDG_STATE_HOME/millstream/leases/CARD.json`.
fn file_of(card: &RemoteCard) -> Result<PathBuf, Box<dyn Error>> {
    let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".local/state"));
    let folder = state
        .or_else(home)
        .ok_or("neither XDG_STATE_HOME nor HOME is set; set one to keep a lease between commands")?
        .join("millstream/leases");
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&folder)
        .map_err(|cause| format!("{}: {cause}", folder.display()))?;
    Ok(folder.join(format!("{:016x}.json", card.hello().card)))
}
