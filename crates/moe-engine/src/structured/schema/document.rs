//! References within a schema.

use std::collections::HashMap;

use super::json::Json;

/// A schema with the names of its parts.
pub(super) struct Document<'d> {
    root: &'d Json,
    /// The parts by their `$anchor`.
    anchors: HashMap<&'d str, &'d Json>,
    /// The parts by their `$id`.
    ids: HashMap<&'d str, &'d Json>,
}

impl<'d> Document<'d> {
    pub fn new(root: &'d Json) -> Self {
        let mut document = Self { root, anchors: HashMap::new(), ids: HashMap::new() };
        let mut left = vec![root];
        while let Some(part) = left.pop() {
            if let Some(anchor) = part.get("$anchor").and_then(Json::str) {
                document.anchors.entry(anchor).or_insert(part);
            }
            for id in ["$id", "id"].iter().filter_map(|name| part.get(name)).filter_map(Json::str) {
                match id.strip_prefix('#') {
                    Some(anchor) => document.anchors.entry(anchor).or_insert(part),
                    None => document.ids.entry(id.trim_end_matches('#')).or_insert(part),
                };
            }
            left.extend(part.array().into_iter().flatten());
            left.extend(part.object().into_iter().flatten().map(|(_, member)| member));
        }
        document
    }

    /// Returns the part of the document that a reference names.
    ///
    /// # Errors
    /// The document has no such part.
    pub fn resolve(&self, reference: &str) -> Result<&'d Json, String> {
        let (address, fragment) = reference.split_once('#').unwrap_or((reference, ""));
        let base = match address {
            "" => self.root,
            _ => self.of_address(address).ok_or_else(|| {
                format!("the reference {reference:?} leads out of the schema: only references within it are followed")
            })?,
        };
        let fragment = percent_decoded(fragment);
        let found = match fragment.strip_prefix('/') {
            Some(pointer) => pointer.split('/').try_fold(base, |part, step| member(part, step)),
            None if fragment.is_empty() => Some(base),
            None => self.anchors.get(&fragment[..]).copied(),
        };
        found.ok_or_else(|| format!("the reference {reference:?} was not found"))
    }

    /// Returns the part whose `$id` is this address or ends with it.
    fn of_address(&self, address: &str) -> Option<&'d Json> {
        let relative = || {
            let name = address.trim_start_matches("./");
            let base = self.root.get("$id").and_then(Json::str)?;
            let (folder, _) = base.rsplit_once('/')?;
            self.ids.get(&format!("{folder}/{name}")[..])
        };
        self.ids.get(address).or_else(relative).copied()
    }
}

/// Returns a member of an object, or an item of a list.
fn member<'d>(part: &'d Json, step: &str) -> Option<&'d Json> {
    match part {
        Json::Array(items) => items.get(step.parse::<usize>().ok()?),
        _ => part.get(&step.replace("~1", "/").replace("~0", "~")),
    }
}

/// Returns the text with its percent escapes, such as `%20`, decoded. A text that is not an escape stays unchanged.
fn percent_decoded(text: &str) -> String {
    let hex = |pair: Option<&[u8]>| u8::from_str_radix(std::str::from_utf8(pair?).ok()?, 16).ok();
    let bytes = text.as_bytes();
    let mut out = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        match hex(bytes.get(at + 1..at + 3)).filter(|_| bytes[at] == b'%') {
            Some(byte) => {
                out.push(byte);
                at += 3;
            }
            None => {
                out.push(bytes[at]);
                at += 1;
            }
        }
    }
    String::from_utf8(out).unwrap_or_else(|_| text.to_string())
}
