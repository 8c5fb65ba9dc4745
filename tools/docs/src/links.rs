//! Links in Markdown files: each local target must exist, with its heading if the link names one.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use pulldown_cmark::{Event, Parser, Tag, TagEnd};

/// A link whose target does not exist.
#[derive(Debug, PartialEq, Eq)]
pub struct DeadLink {
    /// The file with the link, from the root.
    pub file: PathBuf,
    /// The line, from 1.
    pub line: usize,
    /// The target as written.
    pub target: String,
    /// The part that is missing.
    pub missing: &'static str,
}

/// The Markdown files under version control, and those that git does not ignore.
pub fn markdown_files(root: &Path) -> io::Result<Vec<PathBuf>> {
    let arguments = ["ls-files", "--cached", "--others", "--exclude-standard", "*.md"];
    let output = Command::new("git").args(arguments).current_dir(root).output()?;
    if !output.status.success() {
        return Err(io::Error::other(format!("git ls-files: {}", output.status)));
    }
    let list = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(list.lines().map(PathBuf::from).filter(|file| root.join(file).exists()).collect())
}

/// The dead links of all `files`. Links to other sites are not followed.
pub fn dead(root: &Path, files: &[PathBuf]) -> io::Result<Vec<DeadLink>> {
    let mut headings = BTreeMap::new();
    let mut found = Vec::new();
    for file in files {
        let text = fs::read_to_string(root.join(file))?;
        for (line, target) in links(&text) {
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            if let Some(missing) = missing(root, file, &target, &mut headings)? {
                found.push(DeadLink { file: file.clone(), line, target, missing });
            }
        }
    }
    Ok(found)
}

fn missing(
    root: &Path,
    file: &Path,
    target: &str,
    headings: &mut BTreeMap<PathBuf, BTreeSet<String>>,
) -> io::Result<Option<&'static str>> {
    let (path, heading) =
        target.split_once('#').map_or((target, None), |(path, heading)| (path, Some(heading)));
    let folder = root.join(file).parent().expect("a file lies in a folder").to_owned();
    let page = if path.is_empty() { root.join(file) } else { folder.join(path) };
    if !page.exists() {
        return Ok(Some("file"));
    }
    let Some(heading) = heading.filter(|_| page.extension().is_some_and(|extension| extension == "md"))
    else {
        return Ok(None);
    };
    if !headings.contains_key(&page) {
        headings.insert(page.clone(), anchors(&fs::read_to_string(&page)?));
    }
    Ok(if headings[&page].contains(heading) { None } else { Some("heading") })
}

/// The links and images of a page with their lines.
pub fn links(text: &str) -> Vec<(usize, String)> {
    Parser::new(text)
        .into_offset_iter()
        .filter_map(|(event, range)| match event {
            Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                Some((text[..range.start].matches('\n').count() + 1, dest_url.into_string()))
            }
            _ => None,
        })
        .collect()
}

/// The anchors of a page's headings, as mdBook and GitHub make them.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    let mut heading: Option<String> = None;
    for event in Parser::new(text) {
        match event {
            Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
            Event::End(TagEnd::Heading(_)) => {
                let words = heading.take().unwrap_or_default();
                let kept = words.to_lowercase();
                let kept = kept.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
                anchors.insert(kept.collect::<String>().replace(' ', "-"));
            }
            Event::Text(words) | Event::Code(words) => {
                if let Some(heading) = &mut heading {
                    heading.push_str(&words);
                }
            }
            _ => {}
        }
    }
    anchors
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_file_and_a_missing_heading_are_found_with_their_lines() {
        let root = std::env::temp_dir().join(format!("millstream-docs-{}", std::process::id()));
        fs::create_dir_all(&root).unwrap();
        fs::write(
            root.join("a.md"),
            "# One two\n\n[ok](b.md#the-end)\n[no](c.md) [no](b.md#start) [ok](#one-two)\n",
        )
        .unwrap();
        fs::write(root.join("b.md"), "## The `end`\n\n[out](https://example.org)\n").unwrap();
        let files = [PathBuf::from("a.md"), PathBuf::from("b.md")];
        let dead = dead(&root, &files).unwrap();
        fs::remove_dir_all(&root).unwrap();
        let found: Vec<_> = dead.iter().map(|link| (link.line, link.target.as_str(), link.missing)).collect();
        assert_eq!(found, [(4, "c.md", "file"), (4, "b.md#start", "heading")]);
    }
}
