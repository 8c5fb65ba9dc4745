//! Client of the HTTP API, for `millstream evb ctl`.

use crate::status::Status;
use crate::token::Token;
use serde_json::Value;
use std::time::{Duration, Instant};

/// Time for one request.
const TIMEOUT: Duration = Duration::from_secs(15);
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
    agent: ureq::Agent,
}

impl Client {
    /// A client for `HOST:PORT`. Without a token it can only read.
    pub fn new(address: &str, token: Option<Token>) -> Client {
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(TIMEOUT))
            .http_status_as_error(false)
            .proxy(None)
            .max_redirects(0)
            .build();
        Client { address: address.to_owned(), token, agent: config.into() }
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
        let value = self.answer(request.send_json(body))?;
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
        format!("http://{}{path}", self.address)
    }

    fn answer(
        &self,
        response: Result<ureq::http::Response<ureq::Body>, ureq::Error>,
    ) -> Result<Value, ClientError> {
        let mut response = response.map_err(|error| ClientError::Unreachable {
            address: self.address.clone(),
            cause: error.to_string(),
        })?;
        let body: Value =
            response.body_mut().read_json().map_err(|error| self.unexpected(error.to_string()))?;
        if response.status().is_success() {
            return Ok(body);
        }
        let problem = body.get("error").and_then(Value::as_str).map(str::to_owned);
        Err(ClientError::Refused(problem.unwrap_or_else(|| response.status().to_string())))
    }

    fn unexpected(&self, cause: String) -> ClientError {
        ClientError::Unexpected { address: self.address.clone(), cause }
    }
}
