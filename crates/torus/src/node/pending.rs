//! Connections at the node's socket that have not sent their request yet. None of them delays packets.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millstream_shm::socket::Connection;

use crate::attach::{AttachRequest, receive};

/// A client that sends no request for so long is disconnected.
const REQUEST_LIMIT: Duration = Duration::from_secs(5);
/// Clients without a request. A further one replaces the oldest, so that silent ones keep nobody out.
const MAX_PENDING: usize = 64;

/// Clients in the order of their arrival.
#[derive(Debug, Default)]
pub(super) struct PendingConnections {
    clients: VecDeque<(Arc<Connection>, Instant)>,
}

impl PendingConnections {
    /// A client has connected. It blocks no later send or receive.
    pub(super) fn add(&mut self, connection: Connection) -> io::Result<()> {
        connection.set_nonblocking()?;
        if self.clients.len() == MAX_PENDING {
            self.clients.pop_front();
            tracing::warn!("the oldest of {MAX_PENDING} clients without a request is disconnected");
        }
        self.clients.push_back((Arc::new(connection), Instant::now()));
        Ok(())
    }

    /// The clients: readable when a request or an end of the connection can be taken.
    pub(super) fn connections(&self) -> Vec<Arc<Connection>> {
        self.clients.iter().map(|(connection, _)| Arc::clone(connection)).collect()
    }

    /// The request of a client, which is no longer pending; `None` if it has sent none yet.
    pub(super) fn take(&mut self, connection: &Arc<Connection>) -> io::Result<Option<AttachRequest>> {
        let request = match receive(connection) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            other => other.map(|(request, _)| Some(request)),
        };
        self.clients.retain(|(pending, _)| !Arc::ptr_eq(pending, connection));
        request
    }

    /// Disconnects clients that sent no request in time.
    pub(super) fn expire(&mut self) {
        while self.clients.front().is_some_and(|(_, since)| since.elapsed() > REQUEST_LIMIT) {
            self.clients.pop_front();
            tracing::warn!("a client sent no request for {} s and is disconnected", REQUEST_LIMIT.as_secs());
        }
    }
}
