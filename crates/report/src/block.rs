//! Generated parts of a Markdown page, between `<!-- NAME: begin -->` and `<!-- NAME: end -->`.

use std::ops::Range;

/// The page with the block's content replaced, or `None` if the page has no such block.
pub fn replace(page: &str, name: &str, content: &str) -> Option<String> {
    let range = find(page, name)?;
    Some(format!("{}\n{}\n{}", &page[..range.start], content.trim_end(), &page[range.end..]))
}

/// The bytes after the begin marker's line end and before the end marker.
fn find(page: &str, name: &str) -> Option<Range<usize>> {
    let begin = format!("<!-- {name}: begin -->");
    let end = format!("<!-- {name}: end -->");
    let start = page.find(&begin)? + begin.len();
    let stop = start + page[start..].find(&end)?;
    Some(start..stop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_block_changes() {
        let page = "before\n<!-- a: begin -->\nold\n<!-- a: end -->\nafter\n";
        assert_eq!(
            replace(page, "a", "new\n").unwrap(),
            "before\n<!-- a: begin -->\nnew\n<!-- a: end -->\nafter\n"
        );
        assert_eq!(replace(page, "b", "new"), None);
    }
}
