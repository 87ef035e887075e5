//! Finds the GGUF file that `ORG/NAME:TAG` means, and reads its header before the weights are downloaded.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use anyhow::{Result, bail};

use super::files::Names;

/// The tag that is used if none is given, as in llama.cpp.
const DEFAULT: &str = "Q4_K_M";
/// Words in the names of files that are not models: projectors of images, and statistics of quantisation.
const NO_MODELS: [&str; 2] = ["mmproj", "imatrix"];

/// Whether the weights of a repository are only in GGUF files.
pub fn are_the_weights(names: &Names) -> bool {
    !names.iter().any(|name| name.ends_with(".safetensors")) && names.iter().any(|name| is_model(name))
}

fn is_model(name: &str) -> bool {
    let lower = name.to_lowercase();
    lower.ends_with(".gguf") && !NO_MODELS.iter().any(|part| lower.contains(part))
}

/// Returns a file name without its folder, the number of its part and its ending.
fn stem(name: &str) -> &str {
    let stem = &name[..name.len() - ".gguf".len()];
    let Some((rest, count)) = stem.rsplit_once("-of-") else { return stem };
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    match rest.rsplit_once('-') {
        Some((model, part)) if is_number(part) && is_number(count) => model,
        _ => stem,
    }
}

/// Returns the end of a model's name after the last `-` or `.`, which says how it is quantised.
fn tag(stem: &str) -> &str {
    stem.rsplit(['-', '.', '/']).next().unwrap_or(stem)
}

/// Returns the files of the model that a tag means, the first part first. Without a tag it is the only model, or else
/// the one with [`DEFAULT`]. `what` is the name of the repository in errors.
///
/// # Errors
/// No model has this tag, or several models have it.
pub fn files(what: &str, names: &Names, wanted: Option<&str>) -> Result<Vec<String>> {
    let mut models: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for name in names.iter().filter(|name| is_model(name)) {
        models.entry(stem(name)).or_default().push(name.clone());
    }
    let fits = |stem: &str, wanted: &str| {
        let file = stem.rsplit('/').next().unwrap_or(stem);
        let is_end = |text: &str| {
            text.len() > wanted.len()
                && text.to_lowercase().ends_with(&wanted.to_lowercase())
                && text[..text.len() - wanted.len()].ends_with(['-', '.'])
        };
        file.eq_ignore_ascii_case(wanted.trim_end_matches(".gguf")) || is_end(file)
    };
    let of = |wanted: &str| models.iter().filter(|(stem, _)| fits(stem, wanted)).collect::<Vec<_>>();
    let found = match wanted {
        Some(wanted) => of(wanted),
        None if models.len() == 1 => models.iter().collect(),
        None => of(DEFAULT),
    };
    let tags = models.keys().map(|stem| tag(stem)).collect::<Vec<_>>().join(", ");
    match found.as_slice() {
        [(_, files)] => Ok((*files).clone()),
        [] => match wanted {
            Some(wanted) => bail!("{what} has no GGUF file {wanted}; it has {tags}"),
            None => bail!(
                "{what} has several GGUF files and none of {DEFAULT}; choose one, as in ORG/NAME:TAG: {tags}"
            ),
        },
        several => {
            let names = several.iter().map(|(stem, _)| **stem).collect::<Vec<_>>().join(", ");
            bail!(
                "{what} has several such GGUF files; name one as a whole, as in ORG/NAME:FILE.gguf: {names}"
            )
        }
    }
}

/// The headers of a model whose weights are on the hub. They are in files of the full size with holes in place of the
/// weights. The folder of these files is deleted when this value is dropped.
pub struct HeaderOnly {
    /// The folder.
    pub(super) dir: PathBuf,
}

impl Drop for HeaderOnly {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

impl HeaderOnly {
    /// The path of the first part.
    pub fn first(&self, files: &[String]) -> PathBuf {
        self.dir.join(base(files.first().map_or("", String::as_str)))
    }
}

/// Returns a file's name without its folders.
pub(super) fn base(file: &str) -> &str {
    file.rsplit('/').next().unwrap_or(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(names: &[&str], wanted: Option<&str>) -> Result<Vec<String>> {
        files("o/m", &names.iter().map(|name| name.to_string()).collect(), wanted)
    }

    #[test]
    fn a_tag_means_one_model() {
        let names = [
            "README.md",
            "m-Q4_K_M.gguf",
            "m-UD-Q4_K_XL.gguf",
            "m-IQ4_XS.gguf",
            "mmproj-F16.gguf",
            "BF16/m-BF16-00001-of-00002.gguf",
            "BF16/m-BF16-00002-of-00002.gguf",
        ];
        assert_eq!(chosen(&names, None).unwrap(), ["m-Q4_K_M.gguf"]);
        assert_eq!(chosen(&names, Some("q4_k_m")).unwrap(), ["m-Q4_K_M.gguf"]);
        assert_eq!(chosen(&names, Some("Q4_K_XL")).unwrap(), ["m-UD-Q4_K_XL.gguf"]);
        assert_eq!(chosen(&names, Some("m-IQ4_XS.gguf")).unwrap(), ["m-IQ4_XS.gguf"]);
        assert_eq!(chosen(&names, Some("BF16")).unwrap(), names[5..]);
        let error = chosen(&names, Some("Q8_0")).unwrap_err().to_string();
        assert!(error.contains("no GGUF file Q8_0; it has BF16, IQ4_XS, Q4_K_M, Q4_K_XL"), "{error}");
    }

    #[test]
    fn what_is_not_one_model_is_an_error() {
        assert_eq!(chosen(&["only.gguf"], None).unwrap(), ["only.gguf"]);
        let error = chosen(&["a-Q8_0.gguf", "a-Q6_K.gguf"], None).unwrap_err().to_string();
        assert!(error.contains("none of Q4_K_M; choose one") && error.contains("Q6_K, Q8_0"), "{error}");
        let error = chosen(&["a-Q8_0.gguf", "b-Q8_0.gguf"], Some("Q8_0")).unwrap_err().to_string();
        assert!(error.contains("several such GGUF files") && error.contains("a-Q8_0, b-Q8_0"), "{error}");
        assert!(are_the_weights(&["a.gguf".to_string()].into()));
        assert!(!are_the_weights(&["a.gguf".to_string(), "model.safetensors".to_string()].into()));
        assert!(!are_the_weights(&["mmproj.gguf".to_string()].into()));
    }
}
