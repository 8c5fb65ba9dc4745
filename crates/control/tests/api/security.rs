//! Run control with keys of its site.

use crate::backend::{BOUND, Test};
use millstream_control::client::{Client, ClientError};
use millstream_control::http::ServerLimits;
use millstream_tls::authority::{Authority, Validity};
use millstream_tls::{Keys, Security};
use serde_json::json;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};
use ureq::tls::{Certificate, ClientCert, PrivateKey, RootCerts, TlsConfig, TlsProvider};

const DAY: Duration = Duration::from_secs(24 * 3600);

fn year() -> Validity {
    Validity::starting_now(365 * DAY)
}

fn keys(folder: &Path, authority: &Authority, node: &str, validity: Validity) -> Security {
    let files = authority.issue(node, &[], validity).unwrap().create(&folder.join(node)).unwrap();
    Security::new(Keys::load(&files).unwrap())
}

fn unreachable(client: &Client) -> String {
    match client.status() {
        Err(ClientError::Unreachable { cause, .. }) => cause,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_certificate_of_the_site_permits_commands_and_others_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new("site", year()).unwrap();
    let server = keys(folder.path(), &authority, "daq", year());
    let test = Test::secured(&ServerLimits::default(), false, server);
    let address = test.server.address().to_string();

    let operator = keys(folder.path(), &authority, "operator", year());
    let client = Client::new(&address, None, &operator);
    assert!(client.status().unwrap().configuration.is_none());
    let status = client.command("configure", &json!({ "operator": "x", "comment": "" })).unwrap();
    assert!(status.configuration.is_some());

    // Of another authority; it accepts run control's certificate, so that run control has to refuse it.
    let other = Authority::new("another site", year()).unwrap();
    let files = other.issue("stranger", &[], year()).unwrap();
    let files = files.create(&folder.path().join("stranger")).unwrap();
    std::fs::copy(folder.path().join("daq/authority.pem"), &files.authority).unwrap();
    let stranger = Security::new(Keys::load(&files).unwrap());
    let refused = unreachable(&Client::new(&address, Some(test.token.clone()), &stranger));
    assert!(refused.contains("refused this program's certificate of \"stranger\""), "{refused}");
    // Expired.
    let now = SystemTime::now();
    let past = Validity { from: now - 3 * DAY, until: now - DAY };
    let late = keys(folder.path(), &authority, "late", past);
    let refused = unreachable(&Client::new(&address, None, &late));
    assert!(refused.contains("certificate of \"late\": it has expired"), "{refused}");
    // Another authority is expected.
    let mistrusting = keys(folder.path(), &other, "mistrusting", year());
    let refused = unreachable(&Client::new(&address, None, &mistrusting));
    assert!(refused.contains("the authority of this site did not issue it"), "{refused}");
    // Without TLS.
    match Client::new(&address, Some(test.token.clone()), &Security::NONE).status() {
        Err(ClientError::Refused(problem)) => {
            assert!(
                problem.contains("run control uses TLS") && problem.contains("MILLSTREAM_KEYS"),
                "{problem}"
            );
        }
        other => panic!("{other:?}"),
    }
    // Each of them is counted once.
    let count = || {
        let text = millstream_control::metrics::render(&test.control);
        let line =
            text.lines().find_map(|line| line.strip_prefix("millstream_control_clients_refused_total "));
        line.unwrap().parse::<u64>().unwrap()
    };
    let begin = Instant::now();
    while count() < 4 && begin.elapsed() < BOUND {
        std::thread::sleep(Duration::from_millis(5));
    }
    // None of them harms.
    assert!(client.status().unwrap().configuration.is_some());
    assert_eq!(count(), 4);
}

#[test]
fn a_client_with_keys_does_not_use_run_control_without() {
    let folder = tempfile::tempdir().unwrap();
    let test = Test::new();
    let authority = Authority::new("site", year()).unwrap();
    let operator = keys(folder.path(), &authority, "operator", year());
    let refused = unreachable(&Client::new(&test.server.address().to_string(), None, &operator));
    assert!(refused.contains("does not use TLS: it has no keys"), "{refused}");
    assert_eq!(test.get("/api/v1/status").code, 200);
}

#[test]
fn a_wrong_token_is_wrong_with_a_certificate_as_well() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new("site", year()).unwrap();
    let test = Test::secured(&ServerLimits::default(), false, keys(folder.path(), &authority, "daq", year()));
    let other = crate::backend::open(folder.path()).1;
    let operator = keys(folder.path(), &authority, "operator", year());
    let client = Client::new(&test.server.address().to_string(), Some(other), &operator);
    match client.command("configure", &json!({ "operator": "x", "comment": "" })) {
        Err(ClientError::Refused(problem)) => assert!(problem.contains("the token is wrong"), "{problem}"),
        other => panic!("{other:?}"),
    }
}

/// A browser with the operator's certificate: it can send any header.
fn browser(keys: &Keys) -> ureq::Agent {
    let certificates = |all: &[millstream_tls::CertificateDer<'static>]| -> Vec<Certificate<'static>> {
        all.iter().map(|certificate| Certificate::from_der(certificate).to_owned()).collect()
    };
    let key = PrivateKey::from_pem(keys.private_key()).unwrap();
    let tls = TlsConfig::builder()
        .provider(TlsProvider::Rustls)
        .unversioned_rustls_crypto_provider(keys.provider())
        .client_cert(Some(ClientCert::new_with_certs(&certificates(keys.chain()), key)))
        .root_certs(RootCerts::new_with_certs(&certificates(keys.authorities())))
        .build();
    let config = ureq::Agent::config_builder().timeout_global(Some(BOUND)).http_status_as_error(false);
    config.proxy(None).tls_config(tls).build().into()
}

#[test]
fn a_page_of_another_site_commands_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new("site", year()).unwrap();
    let test = Test::secured(&ServerLimits::default(), false, keys(folder.path(), &authority, "daq", year()));
    let address = test.server.address().to_string();
    let operator = keys(folder.path(), &authority, "operator", year());
    let browser = browser(operator.keys().unwrap());
    let post = |name: &str, headers: &[(&str, &str)]| {
        let mut request = browser.post(format!("https://{address}/api/v1/{name}"));
        for (header, value) in headers {
            request = request.header(*header, *value);
        }
        let mut answer = request.send("").unwrap();
        (answer.status().as_u16(), answer.body_mut().read_to_string().unwrap())
    };
    let own = format!("https://{address}");
    let plain = format!("http://{address}");
    let elsewhere = "https://elsewhere.example";
    for headers in [
        &[("Origin", elsewhere), ("Sec-Fetch-Site", "cross-site")][..],
        &[("Sec-Fetch-Site", "cross-site")],
        // Another port or name of the same site.
        &[("Sec-Fetch-Site", "same-site")],
        // An old browser, a sandboxed page, a page without TLS.
        &[("Origin", elsewhere)],
        &[("Origin", "null")],
        &[("Origin", plain.as_str()), ("Sec-Fetch-Site", "same-origin")],
    ] {
        for name in ["configure", "stop", "comment"] {
            let (code, body) = post(name, headers);
            assert!(code == 403 && body.contains("a page of another site"), "{headers:?}: {code} {body}");
        }
    }
    assert!(test.control.status().configuration.is_none());
    // The token permits commands to any page that knows it.
    let bearer = format!("Bearer {}", test.token.as_str());
    assert_eq!(post("configure", &[("Origin", elsewhere), ("Authorization", bearer.as_str())]).0, 200);
    // Run control's own page, and programs.
    let page = [("Origin", own.as_str()), ("Sec-Fetch-Site", "same-origin")];
    for headers in [&page[..], &[("Sec-Fetch-Site", "none")], &[]] {
        let (code, body) = post("configure", headers);
        assert_eq!(code, 200, "{headers:?}: {body}");
    }
}
