//! Who may do what, and the documents of the API.

use crate::backend::Test;
use millstream_control::http::openapi;
use serde_json::Value;

#[test]
fn commands_need_the_token_and_reading_does_not() {
    let test = Test::new();
    for path in ["/", "/app.js", "/style.css", "/metrics", "/api/v1/status", "/api/v1/log", "/api/v1/power"] {
        let answer = test.get(path);
        assert_eq!(answer.code, 200, "{path}: {answer:?}");
        assert!(answer.head.contains("content-security-policy: default-src 'none'"), "{answer:?}");
    }
    for name in ["configure", "set", "prepare", "start", "pause", "resume", "stop", "reset", "comment"] {
        let path = format!("/api/v1/{name}");
        let answer = test.request("POST", &path, "", "");
        assert_eq!(answer.code, 401, "{name}: {answer:?}");
        assert!(answer.head.contains("www-authenticate: Bearer"), "{answer:?}");
        for wrong in ["Bearer x", "Bearer ", "Basic dmVyYTp4", "Bearer \u{e9}"] {
            let answer = test.request("POST", &path, &format!("Authorization: {wrong}\r\n"), "");
            assert_eq!(answer.code, 403, "{name} {wrong}: {answer:?}");
        }
    }
    assert!(test.status().configuration.is_none());
}

/// Every resource of the document answers, with the documented method only; no other resource exists.
#[test]
fn the_openapi_document_lists_the_routes() {
    let test = Test::new();
    let served: Value = serde_json::from_str(&test.get("/api/v1/openapi.json").body).unwrap();
    assert_eq!(served, openapi());
    let paths = served["paths"].as_object().unwrap();
    assert_eq!(paths.len(), 19);
    for (path, operations) in
        paths.iter().filter(|(path, _)| !["/api/v1/events", "/api/v1/display"].contains(&path.as_str()))
    {
        let (get, post) = (test.get(path).code, test.request("POST", path, "", "").code);
        match (operations.get("get"), operations.get("post")) {
            (Some(_), None) => assert_eq!((get, post), (200, 405), "{path}"),
            (None, Some(operation)) => {
                assert_eq!((get, post), (405, 401), "{path}");
                assert_eq!(operation["security"][0]["token"], Value::Array(Vec::new()), "{path}");
            }
            other => panic!("{path}: {other:?}"),
        }
    }
    // Each command of the state machine has a resource.
    for command in millstream_control::machine::Command::ALL {
        assert!(paths.contains_key(&format!("/api/v1/{command}")), "{command}");
    }
    let answer = test.get("/api/v1/unknown");
    assert_eq!(answer.code, 404);
    assert!(answer.body.contains("no resource /api/v1/unknown"), "{answer:?}");
}

#[test]
fn malformed_bodies_and_queries_are_named() {
    let test = Test::new();
    for (name, body, problem) in [
        ("start", "{", "body: EOF"),
        ("start", "[]", "body: "),
        ("start", r#"{"operatr": "x"}"#, "unknown field `operatr`"),
        ("start", r#"{"operator": 1}"#, "expected a string"),
        ("set", r#"{"settings": 1}"#, "settings"),
        ("set", "\u{0}", "body: "),
    ] {
        let answer = test.command(name, body);
        assert!((400..=422).contains(&answer.code) && answer.code != 409, "{name} {body}: {answer:?}");
        assert!(answer.body.contains(problem), "{name} {body}: {answer:?}");
    }
    for (query, problem) in
        [("last=1001", "last: 1001 is out of range"), ("last=x", "query: "), ("x=1", "query: ")]
    {
        let answer = test.get(&format!("/api/v1/log?{query}"));
        assert_eq!(answer.code, 400, "{answer:?}");
        assert!(answer.body.contains(problem), "{answer:?}");
    }
}
