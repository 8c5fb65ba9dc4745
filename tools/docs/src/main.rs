//! Writes the generated parts of the documentation: the table of crates in `docs/architecture.md`, and their picture.
#![forbid(unsafe_code)]

use std::error::Error;
use std::fs;

use millstream_docs::graph::Graph;
use millstream_docs::workspace_root;
use millstream_report::block;

fn main() -> Result<(), Box<dyn Error>> {
    let root = workspace_root();
    let graph = Graph::read(&root)?;
    let path = root.join("docs/architecture.md");
    let page = fs::read_to_string(&path)?;
    let page =
        block::replace(&page, "crates", &graph.table()).ok_or("docs/architecture.md: no block `crates`")?;
    fs::write(&path, page)?;
    fs::write(root.join("docs/crates.svg"), graph.picture())?;
    println!("docs/architecture.md: {} crates, {} arrows", graph.0.len(), graph.arrows());
    Ok(())
}
