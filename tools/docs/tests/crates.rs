//! The public crates have what crates.io and docs.rs need.

use cargo_metadata::{DependencyKind, MetadataCommand, Package};
use millstream_docs::workspace_root;

fn public_crates() -> Vec<Package> {
    let metadata =
        MetadataCommand::new().manifest_path(workspace_root().join("Cargo.toml")).no_deps().exec().unwrap();
    // `publish = false` is an empty list of registries.
    let public: Vec<_> =
        metadata.packages.into_iter().filter(|package| package.publish.as_deref() != Some(&[])).collect();
    assert!(public.len() > 40, "{} public crates", public.len());
    public
}

#[test]
fn public_crates_have_the_fields_of_a_package() {
    for package in public_crates() {
        let name = &package.name;
        assert!(package.license.is_some(), "{name}: license");
        assert!(package.rust_version.is_some(), "{name}: rust-version");
        assert!(package.description.is_some_and(|text| text.len() <= 200), "{name}: description");
        assert!((1..=5).contains(&package.keywords.len()), "{name}: keywords {:?}", package.keywords);
        assert!((1..=5).contains(&package.categories.len()), "{name}: categories {:?}", package.categories);
        let readme = package.readme.unwrap_or_else(|| panic!("{name}: readme"));
        let path = package.manifest_path.parent().expect("a manifest has a folder").join(&readme);
        assert!(path.exists(), "{name}: readme {readme} does not exist");
    }
}

#[test]
fn docs_rs_documents_public_crates_for_a_target_that_they_support() {
    for package in public_crates() {
        let targets = &package.metadata["docs"]["rs"]["targets"];
        assert_eq!(
            targets,
            &serde_json::json!(["x86_64-unknown-linux-gnu"]),
            "{}: Cargo.toml needs [package.metadata.docs.rs] with this target",
            package.name
        );
    }
}

/// crates.io refuses dependencies without a version. Cargo removes test dependencies without one from the package.
#[test]
fn dependencies_of_public_crates_have_versions() {
    for package in public_crates() {
        for dependency in &package.dependencies {
            assert!(
                dependency.req.to_string() != "*" || dependency.kind == DependencyKind::Development,
                "{}: {} has no version",
                package.name,
                dependency.name
            );
        }
    }
}
