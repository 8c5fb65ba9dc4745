//! The modules of the device form layers: no module depends, directly or indirectly, on one that depends on it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

type Graph = BTreeMap<String, BTreeSet<String>>;

/// The source text without comments and without unit tests, which may use higher modules.
fn code(path: &Path) -> String {
    let text = fs::read_to_string(path).expect("a source file");
    let text = text.split("\n#[cfg(test)]").next().expect("split yields a first part");
    text.lines().map(|line| line.split("//").next().expect("as above")).collect::<Vec<_>>().join("\n")
}

/// The top-level modules that `text` names as `crate::module`.
fn dependencies(text: &str) -> impl Iterator<Item = String> {
    text.split("crate::").skip(1).map(|rest| {
        rest.chars().take_while(|c| c.is_ascii_lowercase() || *c == '_' || c.is_ascii_digit()).collect()
    })
}

fn read(folder: &Path, module: Option<&str>, graph: &mut Graph) {
    for entry in fs::read_dir(folder).expect("a folder of the crate") {
        let path = entry.expect("an entry").path();
        let name = path.file_stem().expect("a name").to_str().expect("UTF-8").to_owned();
        let module = module.unwrap_or(&name);
        if path.is_dir() {
            read(&path, Some(module), graph);
        } else if module != "lib" && name != "tests" {
            let text = code(&path);
            let found = dependencies(&text).filter(|other| !other.is_empty() && other != module);
            graph.entry(module.to_owned()).or_default().extend(found);
        }
    }
}

/// The layers from the bottom up. Modules that remain in `graph` lie on a cycle or above one.
fn layers(graph: &mut Graph) -> Vec<Vec<String>> {
    let mut layers = Vec::new();
    loop {
        let free: Vec<String> =
            graph.iter().filter(|(_, below)| below.is_empty()).map(|(module, _)| module.clone()).collect();
        if free.is_empty() {
            return layers;
        }
        graph.retain(|module, _| !free.contains(module));
        graph.values_mut().for_each(|below| below.retain(|module| !free.contains(module)));
        layers.push(free);
    }
}

#[test]
fn modules_form_layers() {
    let mut graph = Graph::new();
    read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), None, &mut graph);
    assert!(graph.contains_key("qp") && graph.contains_key("errno"), "sources were found");
    let names: BTreeSet<String> = graph.keys().cloned().collect();
    graph.values_mut().for_each(|below| below.retain(|module| names.contains(module)));
    let layers = layers(&mut graph);
    assert!(
        graph.is_empty(),
        "modules on a cycle of imports, or above one: {graph:#?}\nlayers below: {layers:#?}"
    );
    // `cargo test -- --nocapture` prints the layers.
    layers.iter().enumerate().for_each(|(level, modules)| println!("{level}: {}", modules.join(", ")));
}
