//! The page: static files in the program.

use axum::http::header;
use axum::response::{IntoResponse, Response};

fn file(content_type: &'static str, text: &'static str) -> Response {
    ([(header::CONTENT_TYPE, content_type)], text).into_response()
}

pub(super) async fn index() -> Response {
    file("text/html; charset=utf-8", include_str!("page/index.html"))
}

pub(super) async fn script() -> Response {
    file("text/javascript; charset=utf-8", include_str!("page/app.js"))
}

pub(super) async fn style() -> Response {
    file("text/css; charset=utf-8", include_str!("page/style.css"))
}
