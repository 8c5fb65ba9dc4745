//! Client of the HTTP API, for `millstream evb ctl`.

use crate::status::Status;
use crate::token::Token;
use millstream_tls::{CertificateDer, Keys, Security};
use serde_json::Value;
use std::time::{Duration, Instant};
use ureq::tls::{Certificate, ClientCert, PrivateKey, RootCerts, TlsConfig, TlsProvider};

/// Time for reading a resource.
const TIMEOUT: Duration = Duration::from_secs(15);
/// Time for a command: `configure` checks all inputs.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(120);
/// Interval of reading the status while a state changes.
const POLL: Duration = Duration::from_millis(100);

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// Run control refused the request.
    #[error("{0}")]
    Refused(String),
    /// Run control cannot be reached.
    #[error("{address}: {cause}; is `millstream evb control` running there?")]
    Unreachable {
        /// Its address.
        address: String,
        /// The cause.
        cause: String,
    },
    /// A command was not answered in time.
    #[error(
        "{address}: {command} was not answered in {COMMAND_TIMEOUT:?}, and may still take effect: see `millstream evb ctl status`"
    )]
    NoAnswer {
        /// The address.
        address: String,
        /// The command.
        command: String,
    },
    /// The answer is not one of run control.
    #[error("{address}: the answer is not one of run control: {cause}")]
    Unexpected {
        /// The address.
        address: String,
        /// The cause.
        cause: String,
    },
}

/// A client of one run control process.
#[derive(Debug)]
pub struct Client {
    address: String,
    token: Option<Token>,
    security: Security,
    agent: ureq::Agent,
}

/// Presents the program's certificate, and accepts certificates of the same authority.
fn tls_config(keys: &Keys) -> TlsConfig {
    let certificates = |chain: &[CertificateDer<'static>]| -> Vec<Certificate<'static>> {
        chain.iter().map(|certificate| Certificate::from_der(certificate).to_owned()).collect()
    };
    // The key was read from the same text before.
    let key = PrivateKey::from_pem(keys.private_key()).ok();
    let certificate = key.map(|key| ClientCert::new_with_certs(&certificates(keys.chain()), key));
    TlsConfig::builder()
        .provider(TlsProvider::Rustls)
        .unversioned_rustls_crypto_provider(keys.provider())
        .client_cert(certificate)
        .root_certs(RootCerts::new_with_certs(&certificates(keys.authorities())))
        .build()
}

impl Client {
    /// A client for `HOST:PORT`. With keys it uses TLS. With neither keys nor a token it can only read.
    pub fn new(address: &str, token: Option<Token>, security: &Security) -> Client {
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(TIMEOUT))
            .http_status_as_error(false)
            .proxy(None)
            .max_redirects(0);
        let config = match security.keys() {
            Some(keys) => config.tls_config(tls_config(keys)),
            None => config,
        };
        let agent = config.build().into();
        Client { address: address.to_owned(), token, security: security.clone(), agent }
    }

    /// The status.
    ///
    /// # Errors
    /// Run control cannot be reached.
    pub fn status(&self) -> Result<Status, ClientError> {
        let value = self.get("/api/v1/status")?;
        serde_json::from_value(value).map_err(|error| self.unexpected(error.to_string()))
    }

    /// Reads a resource.
    ///
    /// # Errors
    /// Run control cannot be reached, or refuses.
    pub fn get(&self, path: &str) -> Result<Value, ClientError> {
        self.answer(self.agent.get(self.url(path)).call())
    }

    /// Gives a command: `start`, for example. Returns the status after it.
    ///
    /// # Errors
    /// Run control cannot be reached, or refuses.
    pub fn command(&self, command: &str, body: &Value) -> Result<Status, ClientError> {
        let mut request = self.agent.post(self.url(&format!("/api/v1/{command}")));
        if let Some(token) = &self.token {
            request = request.header("Authorization", format!("Bearer {}", token.as_str()));
        }
        let sent = request.config().timeout_global(Some(COMMAND_TIMEOUT)).build().send_json(body);
        if matches!(sent, Err(ureq::Error::Timeout(_))) {
            let (address, command) = (self.address.clone(), command.to_owned());
            return Err(ClientError::NoAnswer { address, command });
        }
        let value = self.answer(sent)?;
        serde_json::from_value(value).map_err(|error| self.unexpected(error.to_string()))
    }

    /// Waits until `is_reached` accepts the status. Returns the last status if the time is up.
    ///
    /// # Errors
    /// Run control cannot be reached.
    pub fn wait(
        &self,
        timeout: Duration,
        is_reached: impl Fn(&Status) -> bool,
    ) -> Result<Status, ClientError> {
        let until = Instant::now() + timeout;
        loop {
            let status = self.status()?;
            if is_reached(&status) || Instant::now() >= until {
                return Ok(status);
            }
            std::thread::sleep(POLL);
        }
    }

    fn url(&self, path: &str) -> String {
        let scheme = if self.security.is_on() { "https" } else { "http" };
        format!("{scheme}://{}{path}", self.address)
    }

    fn answer(
        &self,
        response: Result<ureq::http::Response<ureq::Body>, ureq::Error>,
    ) -> Result<Value, ClientError> {
        let mut response = response.map_err(|error| ClientError::Unreachable {
            address: self.address.clone(),
            cause: self.explain(&error),
        })?;
        let body: Value =
            response.body_mut().read_json().map_err(|error| self.unexpected(error.to_string()))?;
        if response.status().is_success() {
            return Ok(body);
        }
        let problem = body.get("error").and_then(Value::as_str).map(str::to_owned);
        Err(ClientError::Refused(problem.unwrap_or_else(|| response.status().to_string())))
    }

    /// The cause of a failed request; of a refused certificate with its subject and the reason.
    fn explain(&self, error: &ureq::Error) -> String {
        let explained = self.security.keys().and_then(|keys| match error {
            ureq::Error::Io(cause) => keys.explain(cause),
            ureq::Error::Rustls(cause) => keys.explain(cause),
            _ => None,
        });
        explained.unwrap_or_else(|| error.to_string())
    }

    fn unexpected(&self, cause: String) -> ClientError {
        ClientError::Unexpected { address: self.address.clone(), cause }
    }
}
