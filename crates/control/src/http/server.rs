//! The server: one thread, bounded connections, bounded time for a TLS handshake, for a request's header, and for
//! a client that reads no answer.

use super::router;
use crate::control::RunControl;
use crate::error::ControlError;
use crate::token::Token;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use millstream_tls::{HANDSHAKE, HttpsConnection, Security};
use rustix::net::sockopt::set_tcp_user_timeout;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, oneshot};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// What clients can take together and each.
#[derive(Clone, Copy, Debug)]
pub struct ServerLimits {
    /// Connections at one time; further ones wait in the kernel.
    pub connections: usize,
    /// Time for the header of a request, also of a first one that never comes.
    pub header_timeout: Duration,
    /// Time for the body of a command.
    pub body_timeout: Duration,
    /// Time in which a client takes some bytes of an answer. Without it, clients that never read would hold their places for ever.
    pub send_timeout: Duration,
}

impl Default for ServerLimits {
    fn default() -> ServerLimits {
        ServerLimits {
            connections: 256,
            header_timeout: Duration::from_secs(5),
            body_timeout: Duration::from_secs(10),
            send_timeout: Duration::from_secs(30),
        }
    }
}

/// Answer to a client without TLS.
const PLAIN_ANSWER: &[u8] = b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\n\
    Content-Length: 95\r\n\r\n{\"error\": \"run control uses TLS: use https, with a certificate of the site (MILLSTREAM_KEYS)\"}\n";

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
    /// Serves run control on an address; with keys over TLS to clients with a certificate of the site.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub fn start(
        control: RunControl,
        (token, security): (Token, Security),
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
                        () = accept(listener, control, (token, security), limits) => {}
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

async fn accept(
    listener: TcpListener,
    control: RunControl,
    (token, security): (Token, Security),
    limits: ServerLimits,
) {
    let service =
        TowerToHyperService::new(router(control.clone(), (token, security.is_on()), limits.body_timeout));
    let places = Arc::new(Semaphore::new(limits.connections));
    loop {
        // The semaphore is never closed.
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                // No descriptor is left, for example.
                tracing::warn!("a connection was not accepted: {error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        // The kernel closes the connection: the time also ends those of hosts that are gone (tcp(7), TCP_USER_TIMEOUT).
        let milliseconds = u32::try_from(limits.send_timeout.as_millis()).unwrap_or(u32::MAX);
        if let Err(error) = set_tcp_user_timeout(&stream, milliseconds) {
            tracing::warn!(%peer, "a connection without a send timeout was closed: {error}");
            continue;
        }
        let tls = match HttpsConnection::new(&security) {
            Ok(tls) => tls,
            Err(error) => {
                tracing::error!("no connection is accepted: {error}");
                continue;
            }
        };
        let (service, control) = (service.clone(), control.clone());
        tokio::spawn(async move {
            match tls {
                None => serve(TokioIo::new(stream), service, limits).await,
                Some(tls) => {
                    let secured = tokio::time::timeout(limits.header_timeout, secure(stream, &tls)).await;
                    let secured = secured.unwrap_or_else(|_| Err("no TLS handshake in time".to_owned()));
                    match secured {
                        Ok(stream) => serve(TokioIo::new(stream), service, limits).await,
                        Err(reason) => {
                            let refused = control.count_refused_client();
                            tracing::warn!(%peer, reason, refused, "a client was refused");
                        }
                    }
                }
            }
            drop(place);
        });
    }
}

async fn serve<S>(stream: TokioIo<S>, service: TowerToHyperService<axum::Router>, limits: ServerLimits)
where
    TokioIo<S>: hyper::rt::Read + hyper::rt::Write + Unpin,
{
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(limits.header_timeout).max_buf_size(MAX_HEADER);
    // Errors are the client's: a closed connection or a malformed request.
    let _ = builder.serve_connection(stream, service).await;
}

/// Makes the TLS connection, or tells a client without TLS what to do. Returns why the client is refused.
async fn secure(mut stream: TcpStream, tls: &HttpsConnection) -> Result<TlsStream<TcpStream>, String> {
    let mut first = [0];
    let read = stream.peek(&mut first).await.map_err(|error| error.to_string())?;
    if read == 1 && first != [HANDSHAKE] {
        // The client may have gone. What it sent is read, so that the answer is not lost with a reset.
        let _ = stream.write_all(PLAIN_ANSWER).await;
        let _ = stream.shutdown().await;
        let mut rest = [0; 1024];
        for _ in 0..MAX_HEADER / rest.len() {
            if !matches!(stream.read(&mut rest).await, Ok(1..)) {
                break;
            }
        }
        return Err("it does not use TLS".to_owned());
    }
    TlsAcceptor::from(tls.config()).accept(stream).await.map_err(|error| tls.explain(&error))
}
