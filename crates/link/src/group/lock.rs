//! The mutex of processes that join the group: a socket name, which its holder listens on.
//!
//! Another user can hold any name. A process that waits connects to the name, and learns whose it is from the peer's
//! credentials. If it is another user's, the next of [`NAMES`] names is the mutex. A process that has taken a name
//! releases it if another process of this user holds one of the others: the first names may have become free meanwhile.

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use millstream_shm::socket::{Connection, Listener};
use millstream_shm::{poll_readable, random_u64};

use super::{JOIN_TIMEOUT, JoinError, name_prefix};

/// Names of the mutex.
const NAMES: u32 = 16;
/// A name whose holder cannot be connected to for this long counts as another user's.
const UNKNOWN_HOLDER_TIMEOUT: Duration = Duration::from_millis(10);
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// The holder of a name.
enum Holder {
    Nobody,
    /// A process of this user. The connection hangs up when it releases the name.
    OwnUser(Connection),
    OtherUser,
    /// It does not listen, or its queue is full.
    Unknown,
}

fn name(port: u16, number: u32) -> String {
    format!("{}join.{number}", name_prefix(port))
}

fn holder(name: &str) -> Holder {
    match Connection::open_at_once(name, JOIN_TIMEOUT) {
        Ok(connection) => Holder::OwnUser(connection),
        Err(error) => match error.kind() {
            io::ErrorKind::PermissionDenied => Holder::OtherUser,
            io::ErrorKind::ConnectionRefused => Holder::Nobody,
            _ => Holder::Unknown,
        },
    }
}

/// Takes the mutex. It is released on drop, or when this process exits.
pub(super) fn lock(port: u16) -> Result<Listener, JoinError> {
    lock_from(port, JOIN_TIMEOUT)
}

/// Takes the mutex; fails if one process holds it for longer than `longest`. Many may hold it one after the other.
fn lock_from(port: u16, longest: Duration) -> Result<Listener, JoinError> {
    let mut deadline = Instant::now() + longest;
    let mut number = 0;
    let mut unknown_since = None;
    loop {
        let own = name(port, number);
        match Listener::bind(&own) {
            Ok(listener) => {
                let others = (0..NAMES).filter(|other| *other != number);
                if others
                    .map(|other| holder(&name(port, other)))
                    .all(|held| !matches!(held, Holder::OwnUser(_)))
                {
                    return Ok(listener);
                }
                drop(listener);
                number = 0;
                // Two processes that meet here try again at different times.
                std::thread::sleep(POLL_INTERVAL + Duration::from_micros(random_u64() % 2000));
            }
            Err(error) if error.raw_os_error() == Some(libc::EADDRINUSE) => match holder(&own) {
                Holder::OwnUser(connection) => {
                    unknown_since = None;
                    // Readable when the holder releases the name.
                    let left = deadline.saturating_duration_since(Instant::now());
                    if poll_readable(&[connection.as_fd()], Some(left))? == [true] {
                        deadline = Instant::now() + longest;
                    }
                }
                // A bound name without a listener: its holder is about to listen, or is another user's.
                Holder::Nobody | Holder::Unknown
                    if unknown_since.get_or_insert_with(Instant::now).elapsed() < UNKNOWN_HOLDER_TIMEOUT =>
                {
                    std::thread::sleep(POLL_INTERVAL);
                }
                Holder::OtherUser | Holder::Nobody | Holder::Unknown => {
                    unknown_since = None;
                    number += 1;
                    if number == NAMES {
                        return Err(JoinError::NamesTaken { name: name(port, 0), count: NAMES });
                    }
                }
            },
            Err(error) => return Err(error.into()),
        }
        if Instant::now() > deadline {
            return Err(JoinError::Busy { name: own });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A port of which only the names of the mutex are used.
    fn port() -> u16 {
        random_u64() as u16
    }

    #[test]
    fn many_holders_one_after_the_other_are_waited_for() {
        let (port, longest) = (port(), Duration::from_millis(2200));
        std::thread::scope(|scope| {
            let joining: Vec<_> = (0..5)
                .map(|_| {
                    scope.spawn(move || {
                        let held = lock_from(port, longest)?;
                        std::thread::sleep(Duration::from_millis(600));
                        drop(held);
                        Ok::<(), JoinError>(())
                    })
                })
                .collect();
            joining.into_iter().for_each(|thread| thread.join().unwrap().unwrap());
        });
    }

    #[test]
    fn a_holder_that_does_not_release_is_an_error() {
        let port = port();
        let held = lock(port).unwrap();
        let error = lock_from(port, Duration::from_millis(50)).unwrap_err();
        assert!(matches!(&error, JoinError::Busy { name } if name.ends_with("/join.0")), "{error}");
        drop(held);
        drop(lock_from(port, Duration::from_millis(50)).unwrap());
    }
}
