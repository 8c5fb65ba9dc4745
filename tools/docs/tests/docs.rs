//! The documentation agrees with the workspace.

use std::fs;

use millstream_docs::graph::Graph;
use millstream_docs::{links, workspace_root};
use millstream_report::block;

const UPDATE: &str = "`cargo run -p millstream-docs` writes it anew";

#[test]
fn the_architecture_page_has_the_crates_of_cargo_metadata() {
    let root = workspace_root();
    let graph = Graph::read(&root).unwrap();
    let page = fs::read_to_string(root.join("docs/architecture.md")).unwrap();
    let expected = block::replace(&page, "crates", &graph.table()).expect("the page has a block `crates`");
    assert!(
        page == expected,
        "docs/architecture.md: the table of crates differs from cargo metadata; {UPDATE}"
    );
    let picture = fs::read_to_string(root.join("docs/crates.svg")).unwrap();
    assert!(picture == graph.picture(), "docs/crates.svg differs from cargo metadata; {UPDATE}");
}

#[test]
fn every_crate_says_its_purpose() {
    let graph = Graph::read(&workspace_root()).unwrap();
    let silent: Vec<_> =
        graph.0.iter().filter(|(_, each)| each.description.is_empty()).map(|(name, _)| name).collect();
    assert!(silent.is_empty(), "no description in Cargo.toml: {silent:?}");
}

#[test]
fn no_link_is_dead() {
    let root = workspace_root();
    let files = links::markdown_files(&root).unwrap();
    assert!(files.iter().any(|file| file.ends_with("README.md")), "no README among {files:?}");
    let dead = links::dead(&root, &files).unwrap();
    assert!(dead.is_empty(), "dead links: {dead:#?}");
}

#[test]
fn the_table_of_contents_lists_every_page() {
    let root = workspace_root();
    let contents = fs::read_to_string(root.join("docs/SUMMARY.md")).unwrap();
    let missing: Vec<_> = fs::read_dir(root.join("docs"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| {
            name.ends_with(".md") && name != "SUMMARY.md" && !contents.contains(&format!("({name})"))
        })
        .collect();
    assert!(missing.is_empty(), "docs/SUMMARY.md does not list {missing:?}");
}

#[test]
fn pages_of_the_site_link_to_nothing_outside_of_it() {
    let root = workspace_root();
    let files = links::markdown_files(&root).unwrap();
    let outside: Vec<_> = files
        .iter()
        .filter(|file| file.parent() == Some("docs".as_ref()))
        .flat_map(|file| {
            let text = fs::read_to_string(root.join(file)).unwrap();
            links::links(&text).into_iter().map(move |(line, target)| (file, line, target))
        })
        .filter(|(_, _, target)| target.starts_with("../") || target.starts_with('/'))
        .collect();
    assert!(outside.is_empty(), "name the file as code instead: {outside:#?}");
}

#[test]
fn promises_of_the_threat_model_have_tests() {
    let root = workspace_root();
    let page = std::fs::read_to_string(root.join("SECURITY.md")).unwrap();
    let mut promises = 0;
    for test in page.split('`').filter(|text| text.starts_with("crates/") && text.contains("::")) {
        let (file, name) = test.split_once("::").unwrap();
        let source =
            std::fs::read_to_string(root.join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
        let at =
            source.find(&format!("fn {name}()")).unwrap_or_else(|| panic!("SECURITY.md: no test {test}"));
        // The name as text: an entry of the list of a test program with its own main.
        let is_listed = source.contains(&format!("\"{name}\""));
        assert!(
            source[..at].trim_end().ends_with("#[test]") || is_listed,
            "SECURITY.md: {test} is no test that always runs"
        );
        promises += 1;
    }
    assert!(promises > 10, "{promises} promises");
}
