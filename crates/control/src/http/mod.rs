//! The HTTP API, the metrics and the page.
//!
//! Reading needs no token. Commands need `Authorization: Bearer TOKEN`, or a certificate of the site. The server bounds what a client can take:
//! connections, time for a header and a body, and their sizes. A command whose body has arrived is answered when it has ended.

mod api;
mod openapi;
mod page;
mod server;
mod stream;

use crate::control::RunControl;
use crate::token::Token;
use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, FromRequest as _, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

pub use openapi::document as openapi;
pub use server::{Server, ServerLimits};

/// Limit of a request's body.
const MAX_BODY: usize = 64 << 10;

/// What the handlers share.
#[derive(Clone)]
struct Context {
    control: RunControl,
    token: Arc<Token>,
    /// Clients have presented a certificate of the site, which permits commands.
    has_certificates: bool,
    /// Open event streams.
    streams: Arc<AtomicUsize>,
}

fn router(control: RunControl, (token, has_certificates): (Token, bool), body_timeout: Duration) -> Router {
    let context = Context { control, token: Arc::new(token), has_certificates, streams: Arc::default() };
    let authorized = middleware::from_fn_with_state(context.clone(), require_token);
    let commands = Router::new()
        .route("/api/v1/configure", post(api::configure))
        .route("/api/v1/set", post(api::set))
        .route("/api/v1/prepare", post(api::prepare))
        .route("/api/v1/start", post(api::start))
        .route("/api/v1/pause", post(api::pause))
        .route("/api/v1/resume", post(api::resume))
        .route("/api/v1/stop", post(api::stop))
        .route("/api/v1/reset", post(api::reset))
        .route("/api/v1/comment", post(api::comment))
        .route_layer(middleware::from_fn_with_state(body_timeout, receive_body))
        .route_layer(authorized);
    Router::new()
        .route("/", get(page::index))
        .route("/app.js", get(page::script))
        .route("/style.css", get(page::style))
        .route("/metrics", get(api::metrics))
        .route("/api/v1/status", get(api::status))
        .route("/api/v1/log", get(api::log))
        .route("/api/v1/power", get(api::power))
        .route("/api/v1/display", get(api::display))
        .route("/api/v1/events", get(stream::events))
        .route("/api/v1/openapi.json", get(openapi::serve))
        .merge(commands)
        .fallback(api::not_found)
        .method_not_allowed_fallback(api::method_not_allowed)
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .layer(middleware::from_fn(add_headers))
        .with_state(context)
}

/// Checks the token before the body is read. A client that presented a certificate needs none, except for a page of another site:
/// that has no token.
async fn require_token(State(context): State<Context>, request: Request, next: Next) -> Response {
    let given = request.headers().get(header::AUTHORIZATION).map(|value| value.to_str().unwrap_or_default());
    let (status, problem) = match given.map(|given| given.strip_prefix("Bearer ")) {
        Some(Some(token)) if context.token.matches(token) => return next.run(request).await,
        Some(_) => (StatusCode::FORBIDDEN, "the token is wrong; use that of run control's token file"),
        None if context.has_certificates && is_of_another_site(request.headers()) => (
            StatusCode::FORBIDDEN,
            "a page of another site sent this command; give commands on run control's own page, or with the token",
        ),
        None if context.has_certificates => return next.run(request).await,
        None => (StatusCode::UNAUTHORIZED, "this command needs the header Authorization: Bearer TOKEN"),
    };
    let mut response = api::error(status, problem);
    response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    response
}

/// Whether a page of another site sent a request. Its browser presents the operator's certificate also for such a page, but it
/// names the page's origin (RFC 6454, section 7) and its relation to this server (Fetch Metadata Request Headers, section 2).
/// Programs send neither.
fn is_of_another_site(headers: &HeaderMap) -> bool {
    let relation = headers.get("sec-fetch-site").map(HeaderValue::as_bytes);
    if relation.is_some_and(|relation| ![&b"same-origin"[..], b"none"].contains(&relation)) {
        return true;
    }
    let Some(origin) = headers.get(header::ORIGIN).map(HeaderValue::as_bytes) else { return false };
    // The origin of a sandboxed page is `null`.
    let Some(authority) = origin.strip_prefix(b"https://") else { return true };
    headers.get(header::HOST).is_none_or(|host| !host.as_bytes().eq_ignore_ascii_case(authority))
}

/// Reads the body of a command, whose time and size are bounded.
async fn receive_body(State(timeout): State<Duration>, request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    let bytes = Bytes::from_request(Request::from_parts(parts.clone(), body), &());
    match tokio::time::timeout(timeout, bytes).await {
        Ok(Ok(bytes)) => next.run(Request::from_parts(parts, bytes.into())).await,
        Ok(Err(rejection)) => api::error(rejection.status(), &format!("body: {}", rejection.body_text())),
        Err(_) => api::error(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time"),
    }
}

/// Adds headers that keep browsers from misusing answers.
async fn add_headers(request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    let headers = [
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
        (
            header::CONTENT_SECURITY_POLICY,
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; \
             base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        ),
    ];
    for (name, value) in headers {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response.into_response()
}
