//! The OpenAPI document; a test compares it with the routes.

use axum::Json;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

/// Method, path, summary, and the body's schema of each resource.
const RESOURCES: &[(&str, &str, &str, Option<&str>)] = &[
    ("get", "/", "The page", None),
    ("get", "/app.js", "The page's script", None),
    ("get", "/style.css", "The page's style", None),
    ("get", "/metrics", "Metrics in the text format of Prometheus", None),
    ("get", "/api/v1/status", "The status", None),
    ("get", "/api/v1/log", "The last entries of the log book", None),
    ("get", "/api/v1/power", "The host's power state, with reasons for missing values", None),
    ("get", "/api/v1/display", "The latest stored event as SVG; 404 if there is none", None),
    ("get", "/api/v1/events", "The status as server-sent events of type `status`", None),
    ("get", "/api/v1/openapi.json", "This document", None),
    ("post", "/api/v1/configure", "Read and check the configuration file", Some("Parameters")),
    ("post", "/api/v1/set", "Change settings of the next runs", Some("Settings")),
    ("post", "/api/v1/prepare", "Start the processes of a run, and no event", Some("Parameters")),
    ("post", "/api/v1/start", "Start a run", Some("Parameters")),
    ("post", "/api/v1/pause", "Assign no further event", Some("Parameters")),
    ("post", "/api/v1/resume", "Assign events again", Some("Parameters")),
    ("post", "/api/v1/stop", "End the run", Some("Parameters")),
    ("post", "/api/v1/reset", "Acknowledge an error, or drop the configuration", Some("Parameters")),
    ("post", "/api/v1/comment", "Write a comment into the log book", Some("Parameters")),
];

/// The document.
pub fn document() -> Value {
    let mut paths = Map::new();
    for (method, path, summary, body) in RESOURCES {
        let operation = operation(path, summary, *body);
        paths.insert((*path).to_owned(), json!({ *method: operation }));
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Millstream run control",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "Reading needs no token; commands need the bearer token of run control's token file. With keys, run control serves HTTPS, and a client certificate of the site replaces the token.",
        },
        "paths": paths,
        "components": {
            "securitySchemes": { "token": { "type": "http", "scheme": "bearer" } },
            "schemas": schemas(),
        },
    })
}

fn operation(path: &str, summary: &str, body: Option<&str>) -> Value {
    let mut operation = json!({
        "summary": summary,
        "responses": { "200": { "description": "Done; commands answer with the status" } },
    });
    if path == "/api/v1/log" {
        operation["parameters"] = json!([{
            "name": "last", "in": "query", "schema": { "type": "integer", "minimum": 0, "maximum": 1000, "default": 50 },
        }]);
    }
    let Some(schema) = body else { return operation };
    operation["security"] = json!([{ "token": [] }]);
    let schema = json!({ "$ref": format!("#/components/schemas/{schema}") });
    operation["requestBody"] = json!({ "content": { "application/json": { "schema": schema } } });
    for (code, description) in [
        ("400", "The body is malformed"),
        ("401", "The token is missing"),
        ("403", "The token is wrong, or a page of another site sent the command"),
        ("409", "The state does not allow the command"),
        ("413", "The body is too large"),
        ("422", "A value or the configuration is refused; the error names the field"),
        ("503", "Run control is ending, so no run starts"),
    ] {
        operation["responses"][code] = json!({
            "description": description,
            "content": { "application/json": { "schema": { "$ref": "#/components/schemas/Error" } } },
        });
    }
    operation
}

fn schemas() -> Value {
    json!({
        "Parameters": {
            "type": "object", "additionalProperties": false,
            "properties": {
                "operator": { "type": "string", "maxLength": 100 },
                "comment": { "type": "string", "maxLength": 2000 },
            },
        },
        "Settings": {
            "type": "object", "additionalProperties": false, "required": ["settings"],
            "properties": {
                "settings": {
                    "type": "object",
                    "description": "run.FIELD, output.FIELD, check.FIELD, recovery.FIELD, readout.NAME.FIELD, builder.NAME.FIELD or card.NAME.FIELD, with its value",
                    "additionalProperties": { "type": ["boolean", "number", "string"] },
                },
            },
        },
        "Error": {
            "type": "object", "required": ["error"], "properties": { "error": { "type": "string" } },
        },
    })
}

pub(super) async fn serve() -> Response {
    Json(document()).into_response()
}
