//! The rules by which byte-level tokenizers split a text into words, by their names in `tokenizer.ggml.pre`. They are
//! the same rules as in the `tokenizer.json` files of the model families.

use serde_json::Value;

use crate::error::{Context, Result, bail, ensure};

/// A rule for words.
pub(super) struct Words {
    names: &'static [&'static str],
    /// The patterns that are applied one after the other.
    pub patterns: &'static [&'static str],
    /// Whether letters and their marks are composed to one letter first.
    pub composes: bool,
    /// Whether a word that is a token becomes that token, even if the merges give another result.
    pub ignores_merges: bool,
    /// Whether texts begin with the first token if the file does not say so.
    pub adds_first: bool,
}

/// The words of GPT-2.
const GPT2: &[&str] = &[r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"];
/// The words of GPT-4, with numbers of up to three digits.
const THREE_DIGITS: &[&str] = &[
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];
/// The words of GPT-4, with single digits.
const ONE_DIGIT: &[&str] = &[
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];

/// The words of GPT-4, with single digits and marks that belong to letters.
const MARKS: &[&str] = &[
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];
/// The words of GPT-4o, which end where a small letter is followed by a capital one.
const CASES: &[&str] = &[concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)];
/// The words of DeepSeek-V3: numbers of up to three digits, Chinese and Japanese by themselves.
const DEEPSEEK_V3: &[&str] = &[
    r"\p{N}{1,3}",
    r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+",
    concat!(
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"##,
        r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
];
/// The words of DeepSeek-LLM and V2: letters with a small and a capital form, punctuation, Chinese, digits.
const DEEPSEEK_LLM: &[&str] = &[
    r"[\r\n]",
    concat!(
        r"\s?[",
        "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅ",
        "ὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇ",
        "Ꞌ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃",
        "]+",
    ),
    r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+",
    r"\s+$",
    r"[\x{4e00}-\x{9fa5}\x{0800}-\x{4e00}\x{ac00}-\x{d7ff}]+",
    r"\p{N}",
];
/// The words of files that name no rule: GPT-2's, cut at punctuation, with numbers of three digits.
const DEFAULT: &[&str] = &[
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
];

const USUAL: Words =
    Words { names: &[], patterns: GPT2, composes: false, ignores_merges: false, adds_first: false };

const TABLE: &[Words] = &[
    Words { names: &["gpt-2", "gpt2"], ..USUAL },
    Words { names: &["olmo"], composes: true, ..USUAL },
    Words { names: &["qwen2", "deepseek-r1-qwen"], patterns: ONE_DIGIT, composes: true, ..USUAL },
    Words {
        names: &["llama3", "llama-v3", "llama-bpe"],
        patterns: THREE_DIGITS,
        ignores_merges: true,
        adds_first: true,
        ..USUAL
    },
    Words { names: &["glm4", "chatglm-bpe"], patterns: THREE_DIGITS, ..USUAL },
    Words { names: &["qwen35"], patterns: MARKS, composes: true, ..USUAL },
    Words { names: &["gpt-4o"], patterns: CASES, ..USUAL },
    Words { names: &["deepseek-v3"], patterns: DEEPSEEK_V3, ..USUAL },
    Words { names: &["deepseek-llm"], patterns: DEEPSEEK_LLM, ..USUAL },
    Words { names: &["default"], patterns: DEFAULT, ..USUAL },
];

impl Words {
    /// Returns the rule with a name.
    ///
    /// # Errors
    /// The name is unknown. The error lists the known names.
    pub fn find(name: &str) -> Result<&'static Self> {
        let names = || TABLE.iter().flat_map(|row| row.names).copied().collect::<Vec<_>>().join(", ");
        match TABLE.iter().find(|row| row.names.contains(&name)) {
            Some(row) => Ok(row),
            None => bail!(
                "`tokenizer.ggml.pre` {name:?} is not known; known are {} (a run over token ids needs no tokenizer)",
                names()
            ),
        }
    }
}

/// Returns the name in `tokenizer.ggml.pre` of the rule by which a `tokenizer.json` splits texts into words.
///
/// # Errors
/// The tokenizer is no byte-level BPE, or GGUF files have no name for its rule.
pub fn gguf_rule(tokenizer: &Value) -> Result<&'static str> {
    let model = &tokenizer["model"];
    let is_bpe = model["type"] == "BPE" || model["type"].is_null() && model["merges"].is_array();
    let kind = model["type"].as_str().unwrap_or("without a type");
    ensure!(is_bpe, "the tokenizer is {kind}; expected a byte-level BPE");
    let falls_back = model["byte_fallback"].as_bool().unwrap_or(false);
    ensure!(
        !falls_back,
        "the tokenizer is a BPE of characters, as SentencePiece makes it; expected a byte-level BPE"
    );
    let mut patterns = Vec::new();
    let is_byte_level = add_patterns(&tokenizer["pre_tokenizer"], &mut patterns)?;
    ensure!(is_byte_level, "the tokenizer has no step `ByteLevel`; expected a byte-level BPE");
    let composes = composes(&tokenizer["normalizer"])?;
    let ignores_merges = model["ignore_merges"].as_bool().unwrap_or(false);
    let wanted: Vec<String> = patterns.iter().map(|pattern| plain(pattern)).collect();
    let is_same = |row: &&Words| {
        let same = row.patterns.iter().map(|pattern| plain(pattern)).eq(wanted.iter().cloned());
        same && row.composes == composes && row.ignores_merges == ignores_merges
    };
    let row = TABLE.iter().find(is_same).with_context(|| {
        format!(
            "GGUF files have no name for the rule by which the tokenizer splits texts: {patterns:?}, NFC {composes}, \
             ignore_merges {ignores_merges}"
        )
    })?;
    row.names.first().copied().context("the rule has no name")
}

/// Adds the patterns of a step, and returns whether the step ends with the byte alphabet.
fn add_patterns(step: &Value, patterns: &mut Vec<String>) -> Result<bool> {
    match step["type"].as_str().unwrap_or_default() {
        "Sequence" => {
            let mut is_byte_level = false;
            for step in step["pretokenizers"].as_array().into_iter().flatten() {
                is_byte_level |= add_patterns(step, patterns)?;
            }
            Ok(is_byte_level)
        }
        "Split" if step["behavior"] == "Isolated" && step["invert"] != true => {
            let pattern =
                step["pattern"]["Regex"].as_str().context("a step `Split` has no regular expression")?;
            patterns.push(pattern.to_string());
            Ok(false)
        }
        "Digits" if step["individual_digits"] == true => {
            patterns.push(r"\p{N}".to_string());
            Ok(false)
        }
        "ByteLevel" if step["add_prefix_space"] != true => {
            if step["use_regex"] != false {
                patterns.extend(GPT2.iter().map(|pattern| (*pattern).to_string()));
            }
            Ok(true)
        }
        _ => bail!("GGUF files have no name for a tokenizer with the step {step}"),
    }
}

/// Returns whether a normalizer composes letters and marks.
fn composes(normalizer: &Value) -> Result<bool> {
    let steps = normalizer["normalizers"].as_array();
    match (normalizer["type"].as_str(), steps.map(Vec::as_slice)) {
        (None, _) | (Some("Sequence"), Some([])) => Ok(false),
        (Some("NFC"), _) => Ok(true),
        (Some("Sequence"), Some([step])) => composes(step),
        _ => bail!("GGUF files have no name for a tokenizer with the normalizer {normalizer}"),
    }
}

/// Returns a pattern with characters in the place of their numbers, `\x{4e00}`.
fn plain(pattern: &str) -> String {
    let mut parts = pattern.split(r"\x{");
    let mut out = parts.next().unwrap_or_default().to_string();
    for part in parts {
        let character = part.split_once('}').and_then(|(number, rest)| {
            let character = u32::from_str_radix(number, 16).ok().and_then(char::from_u32)?;
            Some((character, rest))
        });
        match character {
            Some((character, rest)) => {
                out.push(character);
                out.push_str(rest);
            }
            None => {
                out.push_str(r"\x{");
                out.push_str(part);
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use fancy_regex::Regex;
    use serde_json::json;

    use super::*;

    /// The pieces of a text: matches of each pattern are cut out of the pieces of the one before.
    fn pieces(name: &str, text: &str) -> Vec<String> {
        let words = Words::find(name).unwrap();
        words.patterns.iter().fold(vec![text.to_string()], |pieces, pattern| {
            let pattern = Regex::new(pattern).unwrap();
            pieces.iter().flat_map(|piece| cut(&pattern, piece)).collect()
        })
    }

    fn cut(pattern: &Regex, piece: &str) -> Vec<String> {
        let mut cut = Vec::new();
        let mut at = 0;
        for found in pattern.find_iter(piece).map(|found| found.unwrap()) {
            cut.extend([&piece[at..found.start()], found.as_str()]);
            at = found.end();
        }
        cut.push(&piece[at..]);
        cut.into_iter().filter(|piece| !piece.is_empty()).map(String::from).collect()
    }

    /// A `tokenizer.json` as the reader of GGUF files makes it of a rule.
    fn tokenizer(words: &Words) -> Value {
        let mut steps: Vec<Value> = words.patterns.iter().map(|pattern| {
            json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
        }).collect();
        steps.push(json!({"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}));
        json!({
            "normalizer": words.composes.then(|| json!({"type": "NFC"})),
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
            "model": {"type": "BPE", "byte_fallback": false, "ignore_merges": words.ignores_merges, "merges": []},
        })
    }

    #[test]
    fn every_rule_is_found_by_its_patterns() {
        for row in TABLE {
            assert_eq!(gguf_rule(&tokenizer(row)).unwrap(), row.names[0]);
        }
        let mut usual = tokenizer(&TABLE[0]);
        usual["pre_tokenizer"] = json!({"type": "ByteLevel", "add_prefix_space": false});
        assert_eq!(gguf_rule(&usual).unwrap(), "gpt-2");
        assert_eq!(plain(r"[\x{41}-\x{4e00}]\x{zz}"), "[A-\u{4e00}]\\x{zz}");
    }

    #[test]
    fn other_tokenizers_have_no_rule() {
        let changed = |key: &str, value: Value| {
            let mut json = tokenizer(&TABLE[0]);
            *json.pointer_mut(key).unwrap() = value;
            gguf_rule(&json).unwrap_err().to_string()
        };
        for (key, value, problem) in [
            ("/model/type", json!("Unigram"), "is Unigram; expected a byte-level BPE"),
            ("/model/byte_fallback", json!(true), "as SentencePiece makes it"),
            ("/model/ignore_merges", json!(true), "no name for the rule"),
            ("/normalizer", json!({"type": "Lowercase"}), "with the normalizer"),
            ("/pre_tokenizer", json!({"type": "Metaspace"}), "with the step"),
            (
                "/pre_tokenizer/pretokenizers/1",
                json!({"type": "Digits", "individual_digits": true}),
                "no step `ByteLevel`",
            ),
        ] {
            let error = changed(key, value);
            assert!(error.contains(problem), "{error}");
        }
    }

    #[test]
    fn texts_are_cut_by_the_rule_of_their_model() {
        for (name, text, expected) in [
            ("gpt-4o", "HelloWorld don't 12345//\n x", "Hello|World| don't| |123|45|//\n| x"),
            ("deepseek-v3", "a1234 \u{4e2d}\u{6587}(ok)  b", "a|123|4| |\u{4e2d}\u{6587}|(ok|)| | b"),
            ("deepseek-llm", "Two words,\n\u{4e2d}12", "Two| words|,|\n|\u{4e2d}|1|2"),
            ("default", "x = 12345, don't", "x| |=| |123|45|,| don|'|t"),
            ("qwen35", "n\u{61}\u{308}h 12", "n\u{61}\u{308}h| |1|2"),
            ("qwen2", "it's 12", "it|'s| |1|2"),
        ] {
            assert_eq!(pieces(name, text).join("|"), expected, "{name}");
        }
        for row in TABLE {
            assert_eq!(pieces(row.names[0], " a\u{301}B  1\n\n\t?").concat(), " a\u{301}B  1\n\n\t?");
        }
        assert!(Words::find("other").is_err());
    }
}
