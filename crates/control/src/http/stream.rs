//! The status as server-sent events.

use super::Context;
use super::api;
use crate::control::RunControl;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse as _, Response};
use futures_util::stream;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Most open streams.
const MAX_STREAMS: usize = 64;
/// Shortest time between two events.
const INTERVAL: Duration = Duration::from_millis(250);

/// One open stream.
struct Open(Arc<AtomicUsize>);

impl Open {
    fn take(streams: &Arc<AtomicUsize>) -> Option<Open> {
        let before = streams.fetch_add(1, Ordering::Relaxed);
        let open = Open(Arc::clone(streams));
        (before < MAX_STREAMS).then_some(open)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Sends the status at once and after changes.
pub(super) async fn events(State(context): State<Context>) -> Response {
    let Some(open) = Open::take(&context.streams) else {
        return api::error(
            StatusCode::SERVICE_UNAVAILABLE,
            "too many event streams; close one or poll the status",
        );
    };
    let mut changes = context.control.changes();
    changes.mark_changed();
    let stream = stream::unfold((context, changes, open), |(context, mut changes, open)| async move {
        changes.changed().await.ok()?;
        let status = api::read(&context.control, RunControl::status).await?;
        let event = Event::default().event("status").json_data(status).unwrap_or_default();
        tokio::time::sleep(INTERVAL).await;
        Some((Ok::<_, Infallible>(event), (context, changes, open)))
    });
    Sse::new(stream).keep_alive(KeepAlive::default()).into_response()
}
