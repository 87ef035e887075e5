//! `ORG/NAME[:TAG][@REVISION]`: the name of a model on the hub.

/// A model on the hub at a revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelName {
    /// `ORG/NAME`.
    pub id: String,
    /// A branch, a tag or a commit; `main` if none was given.
    pub revision: String,
    /// The GGUF file of the repository, if it has several: how it is quantised, or its file name.
    pub tag: Option<String>,
}

/// The limit of the hub.
const LONGEST_ID: usize = 96;

impl ModelName {
    /// Parses a name. The error says what a name looks like.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (id, revision) = text.split_once('@').unwrap_or((text, "main"));
        let (id, tag) = id.split_once(':').map_or((id, None), |(id, tag)| (id, Some(tag)));
        if let Some(tag) = tag.filter(|tag| !is_name(tag)) {
            return Err(format!("`{tag}` names no GGUF file; expected ORG/NAME:TAG, as in ORG/NAME:Q4_K_M"));
        }
        let parts: Vec<&str> = id.split('/').collect();
        if parts.len() != 2 || !parts.iter().all(|part| is_name(part)) || id.len() > LONGEST_ID {
            return Err(format!(
                "no such folder, and not a name on the hub; expected a checkpoint folder or \
                 ORG/NAME[:TAG][@REVISION], with letters, digits, `-`, `_` and `.`, at most {LONGEST_ID}"
            ));
        }
        if !is_revision(revision) {
            return Err(format!(
                "`{revision}` is not a revision; expected a branch, a tag or a commit after the @"
            ));
        }
        Ok(Self { id: id.to_string(), revision: revision.to_string(), tag: tag.map(str::to_string) })
    }

    /// Whether the revision is a commit, which never changes.
    pub fn is_pinned(&self) -> bool {
        is_commit(&self.revision)
    }
}

impl std::fmt::Display for ModelName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.tag {
            Some(tag) => write!(f, "{}:{tag}@{}", self.id, self.revision),
            None => write!(f, "{}@{}", self.id, self.revision),
        }
    }
}

/// Whether a text is a full commit id.
pub fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

fn is_name(part: &str) -> bool {
    let inner = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    let edge = |b: Option<u8>| b.is_some_and(|b| b.is_ascii_alphanumeric() || b == b'_');
    part.bytes().all(inner)
        && edge(part.bytes().next())
        && edge(part.bytes().last())
        && !part.contains("--")
        && !part.contains("..")
}

/// Whether a text can be a branch or a tag. The rule is close to git's. The name is also the name of a file in the
/// cache.
fn is_revision(text: &str) -> bool {
    let inner = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b'+' | b'@' | b'/');
    text.len() <= 255
        && text.bytes().all(inner)
        && text.split('/').all(|part| !part.is_empty() && !part.starts_with('.') && !part.contains(".."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_an_organisation_and_perhaps_a_revision() {
        let name = ModelName::parse("Qwen/Qwen3-30B-A3B").unwrap();
        assert_eq!((name.id.as_str(), name.revision.as_str()), ("Qwen/Qwen3-30B-A3B", "main"));
        let name = ModelName::parse("o_1/m.2@refs/pr/3").unwrap();
        assert_eq!((name.id.as_str(), name.revision.as_str()), ("o_1/m.2", "refs/pr/3"));
        assert!(!name.is_pinned());
        let name = ModelName::parse("o/m-GGUF:Q4_K_M@v1").unwrap();
        assert_eq!((name.id.as_str(), name.tag.as_deref()), ("o/m-GGUF", Some("Q4_K_M")));
        assert_eq!(name.to_string(), "o/m-GGUF:Q4_K_M@v1");
        assert!(ModelName::parse("o/m:").unwrap_err().contains("ORG/NAME:TAG"));
        assert!(ModelName::parse(&format!("o/m@{}", "0a".repeat(20))).unwrap().is_pinned());
    }

    #[test]
    fn what_could_leave_the_cache_or_the_url_is_refused() {
        let long = format!("o/{}", "x".repeat(95));
        for id in
            ["", "gpt2", "/no/such", "./x", "a/b/c", "a/", "/b", "../b", "a/..", "a/b--c", "a/-b", &long]
        {
            let error = ModelName::parse(id).unwrap_err();
            assert!(error.contains("no such folder") && error.contains("ORG/NAME"), "{id}: {error}");
        }
        for revision in ["", "..", "a/../b", "/a", "a/", "a b", "a?b", "a%2e", ".lock", "a\\b", "a\nb"] {
            let error = ModelName::parse(&format!("o/m@{revision}")).unwrap_err();
            assert!(error.contains("not a revision"), "{revision:?}: {error}");
        }
    }
}
