//! Searches for tags in a text that arrives in pieces.

/// The result of a search for tags.
pub(super) enum Found {
    /// The index of the tag that comes first, and the byte at which it begins.
    Tag(usize, usize),
    /// There is no tag. From this byte on, the text may become one.
    None(usize),
}

/// Finds the first tag in `text`. If two tags begin at the same place, the first in the list counts.
pub(super) fn find(text: &str, tags: &[&str]) -> Found {
    let places = tags.iter().enumerate().filter_map(|(i, tag)| Some((text.find(tag)?, i)));
    match places.min() {
        Some((at, tag)) => Found::Tag(tag, at),
        None => Found::None(text.len() - tags.iter().map(|tag| begun(text, tag)).max().unwrap_or(0)),
    }
}

/// Returns the number of bytes at the end of a text with which a tag begins.
fn begun(text: &str, tag: &str) -> usize {
    let longest = tag.len().saturating_sub(1).min(text.len());
    let ends_with = |n: &usize| text.as_bytes().ends_with(&tag.as_bytes()[..*n]);
    // Both texts are UTF-8, so a match that begins at a character of the tag also begins at a character of the text.
    (1..=longest).rev().find(ends_with).unwrap_or(0)
}
