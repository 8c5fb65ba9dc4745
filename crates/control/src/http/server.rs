//! The server: one thread, bounded connections, bounded time for a request's header.

use super::router;
use crate::control::RunControl;
use crate::error::ControlError;
use crate::token::Token;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, oneshot};

/// What clients can take together and each.
#[derive(Clone, Copy, Debug)]
pub struct ServerLimits {
    /// Connections at one time; further ones wait in the kernel.
    pub connections: usize,
    /// Time for the header of a request, also of a first one that never comes.
    pub header_timeout: Duration,
}

impl Default for ServerLimits {
    fn default() -> ServerLimits {
        ServerLimits { connections: 256, header_timeout: Duration::from_secs(5) }
    }
}

/// Largest header of a request, in bytes.
const MAX_HEADER: usize = 16 << 10;

/// A running server; dropping it closes all connections.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Server {
    /// Serves run control on an address.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub fn start(
        control: RunControl,
        token: Token,
        address: &str,
        limits: ServerLimits,
    ) -> Result<Server, ControlError> {
        let fail = |cause| ControlError::Listen { address: address.to_owned(), cause };
        let listener = std::net::TcpListener::bind(address).map_err(fail)?;
        listener.set_nonblocking(true).map_err(fail)?;
        let bound = listener.local_addr().map_err(fail)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(fail)?;
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new().name("http".to_owned()).spawn(move || {
            runtime.block_on(async move {
                match TcpListener::from_std(listener) {
                    Ok(listener) => tokio::select! {
                        () = accept(listener, control, token, limits) => {}
                        _ = stopped => {}
                    },
                    Err(error) => tracing::error!("the HTTP server cannot start: {error}"),
                }
            });
            // A command that blocks must not delay the end.
            runtime.shutdown_background();
        });
        let thread = thread.map_err(fail)?;
        Ok(Server { address: bound, stop: Some(stop), thread: Some(thread) })
    }

    /// The address, with the port that was bound.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

async fn accept(listener: TcpListener, control: RunControl, token: Token, limits: ServerLimits) {
    let service = TowerToHyperService::new(router(control, token));
    let places = Arc::new(Semaphore::new(limits.connections));
    loop {
        // The semaphore is never closed.
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // No descriptor is left, for example.
                tracing::warn!("a connection was not accepted: {error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let service = service.clone();
        tokio::spawn(async move {
            let mut builder = http1::Builder::new();
            builder
                .timer(TokioTimer::new())
                .header_read_timeout(limits.header_timeout)
                .max_buf_size(MAX_HEADER);
            // Errors are the client's: a closed connection or a malformed request.
            let _ = builder.serve_connection(TokioIo::new(stream), service).await;
            drop(place);
        });
    }
}
