//! Handlers of the API.

use super::Context;
use crate::control::RunControl;
use crate::error::ControlError;
use crate::machine::Command;
use crate::request::Request;
use axum::Json;
use axum::extract::rejection::JsonRejection;
use axum::extract::{Query, State};
use axum::http::{StatusCode, Uri, header};
use axum::response::{IntoResponse as _, Response};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Most entries of one answer of the log book.
const MAX_ENTRIES: usize = 1000;

/// Body of most commands; all fields are optional, and so is the body.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Parameters {
    operator: String,
    comment: String,
}

/// Body of `set`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Settings {
    settings: BTreeMap<String, Value>,
}

/// An answer with an error.
pub(super) fn error(status: StatusCode, problem: &str) -> Response {
    (status, Json(json!({ "error": problem }))).into_response()
}

fn refused(error: &ControlError) -> Response {
    let status = match error {
        ControlError::NotAllowed(_) => StatusCode::CONFLICT,
        ControlError::Ending => StatusCode::SERVICE_UNAVAILABLE,
        ControlError::Configuration(_) | ControlError::Setting { .. } | ControlError::Text { .. } => {
            StatusCode::UNPROCESSABLE_ENTITY
        }
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    };
    self::error(status, &error.to_string())
}

/// Carries out a command on a thread that may block, and answers with the status after it.
async fn carry_out(
    context: Context,
    command: impl FnOnce(&RunControl) -> Result<(), ControlError> + Send + 'static,
) -> Response {
    let control = context.control.clone();
    let done = tokio::task::spawn_blocking(move || command(&control).map(|()| control.status())).await;
    match done {
        Ok(Ok(status)) => Json(status).into_response(),
        Ok(Err(error)) => refused(&error),
        Err(_) => error(StatusCode::INTERNAL_SERVER_ERROR, "the command failed; see the log of run control"),
    }
}

async fn simple(context: Context, body: axum::body::Bytes, command: Command) -> Response {
    match parameters(&body) {
        Ok(request) => carry_out(context, move |control| control.command(command, &request)).await,
        Err(response) => *response,
    }
}

fn parameters(body: &[u8]) -> Result<Request, Box<Response>> {
    if body.is_empty() {
        return Ok(Request::default());
    }
    // A map first: serde would take an array for a struct.
    let parsed = serde_json::from_slice::<serde_json::Map<String, Value>>(body)
        .and_then(|fields| serde_json::from_value::<Parameters>(Value::Object(fields)));
    let refuse = |problem: serde_json::Error| {
        let problem = format!("body: {problem}; send {{\"operator\": TEXT, \"comment\": TEXT}}");
        Box::new(error(StatusCode::BAD_REQUEST, &problem))
    };
    parsed.map(|Parameters { operator, comment }| Request { operator, comment }).map_err(refuse)
}

macro_rules! commands {
    ($($name:ident = $command:ident),*) => {
        $(pub(super) async fn $name(State(context): State<Context>, body: axum::body::Bytes) -> Response {
            simple(context, body, Command::$command).await
        })*
    };
}

commands!(
    configure = Configure,
    prepare = Prepare,
    start = Start,
    pause = Pause,
    resume = Resume,
    stop = Stop,
    reset = Reset
);

pub(super) async fn set(
    State(context): State<Context>,
    body: Result<Json<Settings>, JsonRejection>,
) -> Response {
    match body {
        Ok(Json(Settings { settings })) => carry_out(context, move |control| control.set(&settings)).await,
        Err(rejection) => error(rejection.status(), &format!("body: {}", rejection.body_text())),
    }
}

pub(super) async fn comment(State(context): State<Context>, body: axum::body::Bytes) -> Response {
    match parameters(&body) {
        Ok(request) => carry_out(context, move |control| control.comment(&request)).await,
        Err(response) => *response,
    }
}

/// Reads on a thread that may block: a command holds the state while an entry of the log book goes to the disk.
pub(super) async fn read<T: Send + 'static>(
    control: &RunControl,
    read: impl FnOnce(&RunControl) -> T + Send + 'static,
) -> Option<T> {
    let control = control.clone();
    tokio::task::spawn_blocking(move || read(&control)).await.ok()
}

fn unreadable() -> Response {
    error(StatusCode::INTERNAL_SERVER_ERROR, "reading failed; see the log of run control")
}

pub(super) async fn status(State(context): State<Context>) -> Response {
    match read(&context.control, RunControl::status).await {
        Some(status) => Json(status).into_response(),
        None => unreadable(),
    }
}

/// Query of the log book.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LogQuery {
    #[serde(default = "default_entries")]
    last: usize,
}

fn default_entries() -> usize {
    50
}

pub(super) async fn log(
    State(context): State<Context>,
    query: Result<Query<LogQuery>, axum::extract::rejection::QueryRejection>,
) -> Response {
    match query {
        Ok(Query(LogQuery { last })) if last <= MAX_ENTRIES => {
            match read(&context.control, move |control| control.log(last)).await {
                Some(entries) => Json(json!({ "entries": entries })).into_response(),
                None => unreadable(),
            }
        }
        Ok(Query(LogQuery { last })) => {
            let problem = format!("last: {last} is out of range: must be 0 to {MAX_ENTRIES}");
            error(StatusCode::BAD_REQUEST, &problem)
        }
        Err(rejection) => error(StatusCode::BAD_REQUEST, &format!("query: {}", rejection.body_text())),
    }
}

pub(super) async fn power(State(context): State<Context>) -> Response {
    Json(context.control.power()).into_response()
}

pub(super) async fn display(State(context): State<Context>) -> Response {
    match read(&context.control, RunControl::picture).await.flatten() {
        Some(svg) => ([(header::CONTENT_TYPE, "image/svg+xml")], svg).into_response(),
        None => {
            error(StatusCode::NOT_FOUND, "no event is shown yet: a run with [output] shows its stored events")
        }
    }
}

pub(super) async fn metrics(State(context): State<Context>) -> Response {
    match read(&context.control, crate::metrics::render).await {
        Some(text) => {
            ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
        }
        None => unreadable(),
    }
}

pub(super) async fn not_found(uri: Uri) -> Response {
    let problem = format!("no resource {}; /api/v1/openapi.json lists all", uri.path());
    error(StatusCode::NOT_FOUND, &problem)
}

pub(super) async fn method_not_allowed() -> Response {
    let problem = "this resource has another method; /api/v1/openapi.json lists all";
    error(StatusCode::METHOD_NOT_ALLOWED, problem)
}
