//! Checks whether the templates of special tokens in a tokenizer's post-processor can be applied. The library reads any
//! template, and panics on the first text if the template is wrong.

use serde_json::Value;

use crate::error::{Result, ensure};

/// The largest number of tokens that templates put around a text.
const MAX_TOKENS: usize = 1024;

/// Checks the templates for a single text. The templates for pairs of texts are never used.
///
/// # Errors
/// A template names a token that it does not define, or does not place the text exactly once.
pub(super) fn check(tokenizer: &tokenizers::Tokenizer) -> Result<()> {
    match tokenizer.get_post_processor() {
        Some(processor) => check_processor(&serde_json::to_value(processor)?, &mut 0),
        None => Ok(()),
    }
}

/// Checks a post-processor, or a sequence of them. `added` counts the tokens of all templates together.
fn check_processor(processor: &Value, added: &mut usize) -> Result<()> {
    if let Some(processors) = processor["processors"].as_array() {
        return processors.iter().try_for_each(|processor| check_processor(processor, added));
    }
    let Some(pieces) = processor["single"].as_array().filter(|_| processor["type"] == "TemplateProcessing")
    else {
        return Ok(());
    };
    let defined = processor["special_tokens"].as_object();
    for token in pieces.iter().filter_map(|piece| piece["SpecialToken"]["id"].as_str()) {
        ensure!(
            defined.is_some_and(|tokens| tokens.contains_key(token)),
            "post_processor: the template \"single\" has the special token {token:?}, which \"special_tokens\" does not \
             define; add it there, or take it out of the template"
        );
        *added += defined.and_then(|tokens| tokens[token]["ids"].as_array()).map_or(0, Vec::len);
        ensure!(
            *added <= MAX_TOKENS,
            "post_processor: its templates put more than {MAX_TOKENS} tokens around a text"
        );
    }
    let texts: Vec<&str> = pieces.iter().filter_map(|piece| piece["Sequence"]["id"].as_str()).collect();
    ensure!(
        texts == ["A"],
        "post_processor: expected the template \"single\" to place the text, sequence A, once; it places {texts:?}"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_the_library_would_panic_on_is_an_error() {
        let text = json!({"Sequence": {"id": "A", "type_id": 0}});
        let cls = json!({"SpecialToken": {"id": "[CLS]", "type_id": 0}});
        let template = |single: Value, tokens: Value| {
            let processor =
                json!({"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": tokens});
            json!({"type": "Sequence", "processors": [{"type": "ByteLevel"}, processor]})
        };
        let defined = json!({"[CLS]": {"id": "[CLS]", "ids": [0], "tokens": ["[CLS]"]}});
        assert!(check_processor(&template(json!([cls, text]), defined.clone()), &mut 0).is_ok());
        let error =
            check_processor(&template(json!([cls, text]), json!({})), &mut 0).unwrap_err().to_string();
        assert!(error.contains("\"[CLS]\"") && error.contains("take it out"), "{error}");
        let second = json!({"Sequence": {"id": "B", "type_id": 0}});
        for single in [json!([cls]), json!([second]), json!([text, text])] {
            assert!(check_processor(&template(single.clone(), defined.clone()), &mut 0).is_err(), "{single}");
        }
    }
}
