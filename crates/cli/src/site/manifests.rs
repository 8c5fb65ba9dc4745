//! `millstream site manifests`: a site as objects of Kubernetes.
//!
//! Event builders and tori are indexed Jobs, whose ranks are the completion indexes and meet at the pod of index 0. Cards
//! are StatefulSets of one pod. The output is one List in JSON, which is also YAML.

use std::collections::BTreeMap;
use std::error::Error;

use millstream_site::{NetworkCard, Site, load};
use serde_json::{Value, json};

use crate::args::SiteManifestsOptions;

/// Port at which the ranks of a job meet.
const RENDEZVOUS_PORT: u16 = 7500;
/// Where pods mount the shared volume; configurations, inputs and outputs are there.
const DATA: &str = "/data";
/// The index of a pod, which the Job sets.
const INDEX: &str = "metadata.annotations['batch.kubernetes.io/job-completion-index']";

pub(super) fn run(options: &SiteManifestsOptions) -> Result<(), Box<dyn Error>> {
    let site = load(&options.file)?;
    let list = manifests(&site, options)?;
    println!("{}", serde_json::to_string_pretty(&list)?);
    Ok(())
}

pub(crate) fn manifests(site: &Site, options: &SiteManifestsOptions) -> Result<Value, String> {
    let parts = (site.cards.iter().map(|card| &card.name))
        .chain(site.tori.iter().map(|torus| &torus.name))
        .chain(site.event_builders.iter().map(|builder| &builder.name));
    let mut labels = BTreeMap::new();
    for name in parts {
        let label = label(name)?;
        if let Some(other) = labels.insert(label.clone(), name) {
            return Err(format!("{other:?} and {name:?} have the same name for Kubernetes, {label:?}"));
        }
    }
    let mut items = Vec::new();
    for card in &site.cards {
        items.extend(card_set(card, options)?);
    }
    for torus in &site.tori {
        let nodes = torus.nodes.len() as u32;
        let axis = |index: usize| torus.dimensions.get(index).copied().unwrap_or(1).to_string();
        let shape = [axis(0), axis(1), axis(2)].join("x");
        let mut words = ["torus", "join", "--dimensions", &shape].map(str::to_owned).to_vec();
        let application = options.application.iter().cloned();
        items.extend(job(&torus.name, nodes, &mut words, application.collect(), options)?);
    }
    for builder in &site.event_builders {
        let configuration = format!("{DATA}/{}", builder.configuration.display());
        let mut words = vec!["evb".to_owned(), "join".to_owned(), configuration];
        items.extend(job(&builder.name, builder.ranks, &mut words, Vec::new(), options)?);
    }
    Ok(json!({"apiVersion": "v1", "kind": "List", "items": items}))
}

/// Name of an object: a DNS label that begins with a letter (RFC 1035), as Services need it.
fn label(name: &str) -> Result<String, String> {
    let label = name.to_lowercase().replace(['_', '.'], "-");
    let inside = label.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
    let begins = label.starts_with(|first: char| first.is_ascii_lowercase());
    if inside && begins && !label.ends_with('-') && label.len() <= 50 {
        return Ok(label);
    }
    Err(format!(
        "{name:?} is no name for Kubernetes: at most 50 letters, digits and dashes, a letter first and no dash last"
    ))
}

/// A Service without address: it gives pods names.
fn service(name: &str, port: u16) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/name": name}},
        "spec": {
            "clusterIP": "None",
            // Ranks look for each other before they are ready.
            "publishNotReadyAddresses": true,
            "selector": {"app.kubernetes.io/name": name},
            "ports": [{"name": "control", "port": port}],
        },
    })
}

/// An indexed Job of `ranks` pods, and the Service that names them.
fn job(
    name: &str,
    ranks: u32,
    words: &mut Vec<String>,
    application: Vec<String>,
    options: &SiteManifestsOptions,
) -> Result<[Value; 2], String> {
    let name = label(name)?;
    let at = format!("{name}-0.{name}:{RENDEZVOUS_PORT}");
    words.extend(["--rank", "$(RANK)", "--ranks", &ranks.to_string(), "--at", &at].map(str::to_owned));
    if !application.is_empty() {
        words.push("--".to_owned());
        words.extend(application);
    }
    let labels = json!({"app.kubernetes.io/name": name});
    let job = json!({
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "completionMode": "Indexed",
            "completions": ranks,
            "parallelism": ranks,
            // A lost rank ends the run with its account; it is not repeated in part.
            "backoffLimit": 0,
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "subdomain": name,
                    "restartPolicy": "Never",
                    "terminationGracePeriodSeconds": 30,
                    "containers": [{
                        "name": "rank",
                        "image": options.image,
                        "command": ["millstream"],
                        "args": words,
                        "env": [{"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}}],
                        "ports": [{"name": "control", "containerPort": RENDEZVOUS_PORT}],
                        "volumeMounts": [
                            {"name": "data", "mountPath": DATA},
                            {"name": "shm", "mountPath": "/dev/shm"},
                        ],
                    }],
                    "volumes": [
                        {"name": "data", "persistentVolumeClaim": {"claimName": options.claim}},
                        {"name": "shm", "emptyDir": {"medium": "Memory"}},
                    ],
                },
            },
        },
    });
    Ok([service(&name, RENDEZVOUS_PORT), job])
}

/// The pod of an emulated card, reachable as `NAME-0.NAME:PORT`.
fn card_set(card: &NetworkCard, options: &SiteManifestsOptions) -> Result<[Value; 2], String> {
    let name = label(&card.name)?;
    let port: u16 = card.address.rsplit_once(':').and_then(|(_, port)| port.parse().ok()).unwrap_or(7480);
    let (memory, banks) = (card.memory.map_or(1 << 30, |memory| memory.0), card.banks.unwrap_or(1));
    let labels = json!({"app.kubernetes.io/name": name});
    let words = [
        "card",
        "serve",
        &card.name,
        "--listen",
        &format!("[::]:{port}"),
        "--memory",
        &memory.to_string(),
        "--banks",
        &banks.to_string(),
    ]
    .map(str::to_owned);
    let set = json!({
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "serviceName": name,
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "containers": [{
                        "name": "card",
                        "image": options.image,
                        "command": ["millstream"],
                        "args": words,
                        "ports": [{"name": "control", "containerPort": port}],
                        "readinessProbe": {"tcpSocket": {"port": port}},
                        // Memory of the card is a memfd, which counts as memory of the pod.
                        "resources": {"limits": {"memory": (memory + (1 << 28)).to_string()}},
                    }],
                },
            },
        },
    });
    Ok([service(&name, port), set])
}

#[cfg(test)]
mod tests {
    use super::*;

    const SITE: &str = r#"
name = "test"
[[card]]
name = "u280_0"
address = "node3:7480"
memory = "2GiB"
banks = 4
[[event-builder]]
name = "camera"
configuration = "camera.toml"
control = "node1:8080"
ranks = 6
"#;

    fn render(site: &str) -> Result<Vec<Value>, String> {
        let site = millstream_site::parse("test.toml", site).unwrap();
        let options = SiteManifestsOptions {
            file: "test.toml".into(),
            image: "registry.example/millstream:1".to_owned(),
            claim: "data".to_owned(),
            application: vec!["sleep".to_owned(), "infinity".to_owned()],
        };
        Ok(manifests(&site, &options)?["items"].as_array().unwrap().clone())
    }

    fn rendered() -> Vec<Value> {
        render(SITE).unwrap()
    }

    /// The rules of the API that objects of this kind are refused by, as far as they concern these objects.
    #[test]
    fn selectors_names_and_required_fields_are_consistent() {
        let items = rendered();
        assert_eq!(items.len(), 4);
        let names: Vec<&str> = items.iter().map(|item| item["metadata"]["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["u280-0", "u280-0", "camera", "camera"]);
        for item in &items {
            assert!(item["apiVersion"].is_string() && item["kind"].is_string());
            if item["kind"] == "Service" {
                assert_eq!(item["spec"]["selector"], item["metadata"]["labels"]);
                continue;
            }
            let pod = &item["spec"]["template"];
            assert_eq!(pod["metadata"]["labels"], item["metadata"]["labels"]);
            let container = &pod["spec"]["containers"][0];
            for field in ["name", "image", "command", "args"] {
                assert!(!container[field].is_null(), "{field}: {container}");
            }
            let mounts = container["volumeMounts"].as_array().cloned().unwrap_or_default();
            let volumes = pod["spec"]["volumes"].as_array().cloned().unwrap_or_default();
            for mount in mounts {
                assert!(volumes.iter().any(|volume| volume["name"] == mount["name"]), "{mount}");
            }
        }
        assert_eq!(
            items[1]["spec"]["selector"]["matchLabels"],
            items[1]["spec"]["template"]["metadata"]["labels"]
        );
    }

    #[test]
    fn ranks_of_an_indexed_job_meet_at_index_zero() {
        let job = &rendered()[3];
        let spec = &job["spec"];
        assert_eq!(
            (&spec["completionMode"], &spec["completions"], &spec["parallelism"]),
            (&json!("Indexed"), &json!(6), &json!(6))
        );
        assert_eq!(spec["template"]["spec"]["subdomain"], "camera");
        assert_eq!(spec["template"]["spec"]["restartPolicy"], "Never");
        let words = &spec["template"]["spec"]["containers"][0]["args"];
        let expected = [
            "evb",
            "join",
            "/data/camera.toml",
            "--rank",
            "$(RANK)",
            "--ranks",
            "6",
            "--at",
            "camera-0.camera:7500",
        ];
        assert_eq!(*words, json!(expected));
    }

    #[test]
    fn names_that_kubernetes_does_not_tell_apart_are_an_error() {
        let error = render(&SITE.replace("\"camera\"", "\"U280-0\"")).unwrap_err();
        assert_eq!(error, r#""u280_0" and "U280-0" have the same name for Kubernetes, "u280-0""#);
    }

    #[test]
    fn a_name_that_kubernetes_refuses_is_an_error() {
        assert_eq!(label("U280_0").unwrap(), "u280-0");
        assert!(label("-card").is_err() && label("kärtchen").is_err() && label(&"x".repeat(51)).is_err());
    }
}
