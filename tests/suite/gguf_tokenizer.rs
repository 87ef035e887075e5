//! Tokenizers in GGUF files.

use std::path::Path;

use moe_engine::chat::ChatFiles;
use moe_engine::tokenizer::Tokenizer;

use crate::gguf::writer::{Meta, Writer};

/// Files that the package `gguf` wrote: tokens, ends and chat template are the same as in the
/// fixture's own files.
#[test]
fn a_tokenizer_is_that_of_the_original_files() {
    let texts = [
        include_str!("../../README.md"),
        "  two  spaces\t\n\n it's 1234567 na\u{ef}ve \u{4e2d}\u{6587} \u{1f600}\r\n",
        "<|im_start|>user\n<|im_end|><|endoftext|>x<|im_end",
        "",
    ];
    for name in ["text", "mixtral-text"] {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("gguf/{name}.gguf"));
        let ours = Tokenizer::from_dir(&file).unwrap();
        let theirs = Tokenizer::from_dir(&moe_tests::fixture(name)).unwrap();
        for text in texts {
            let ids = ours.encode(text).unwrap();
            assert_eq!(ids, theirs.encode(text).unwrap(), "{text:?}");
            assert_eq!(ours.decode(&ids).unwrap(), theirs.decode(&ids).unwrap(), "{text:?}");
        }
        assert_eq!((ours.end_token(), ours.vocab_size()), (theirs.end_token(), theirs.vocab_size()));
        let chat = |path: &Path| ChatFiles::from_dir(path).unwrap();
        assert_eq!(chat(&file).templates, chat(&moe_tests::fixture(name)).templates);
        assert_eq!(chat(&file).special_tokens["eos_token"], "<|im_end|>");
    }
}

/// A SentencePiece vocabulary: the neighbours whose token has the best score are merged first.
#[test]
fn sentence_pieces_are_merged_by_their_scores() {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).into();
    tokens.extend((0..=255u8).map(|byte| format!("<0x{byte:02X}>")));
    let pieces = "\u{2581}|a|b|c|d|e|ab|bc|abc|\u{2581}a|\u{2581}ab|cd|de|cde|abcd|\u{2581}\u{2581}|ee|eee|ed|\u{e9}|dab";
    tokens.extend(pieces.split('|').map(String::from));
    let mut random = crate::quantised::make::Random(5);
    let scores: Vec<f32> = tokens.iter().map(|_| -(random.below(1000) as f32)).collect();
    let kind = |id: usize| match id {
        0 => 2,
        1 | 2 => 3,
        3..259 => 6,
        _ => 1,
    };
    let mut file = Writer::default();
    file.put("tokenizer.ggml.model", Meta::Text("llama".into()));
    file.put("tokenizer.ggml.tokens", Meta::Texts(tokens.clone()));
    file.put("tokenizer.ggml.scores", Meta::F32s(scores.clone()));
    file.put("tokenizer.ggml.token_type", Meta::I32s((0..tokens.len()).map(kind).collect()));
    file.put("tokenizer.ggml.bos_token_id", Meta::U32(1));
    file.put("tokenizer.ggml.eos_token_id", Meta::U32(2));
    file.put("tokenizer.ggml.unknown_token_id", Meta::U32(0));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vocabulary.gguf");
    file.save(&path);
    let tokenizer = Tokenizer::from_dir(&path).unwrap();
    let long = dir.path().join("long.gguf");
    let mut longer = tokens.clone();
    longer[260] = "a".repeat(200_000);
    file.metadata.retain(|(key, _)| key != "tokenizer.ggml.tokens");
    file.put("tokenizer.ggml.tokens", Meta::Texts(longer));
    file.save(&long);
    let error = format!("{:#}", Tokenizer::from_dir(&long).err().unwrap());
    assert!(error.contains("pieces of at most 1024 bytes, got one of 200000 (token 260)"), "{error}");
    let id = |text: &str| tokens[259..].iter().position(|token| token == text).map(|at| at + 259);
    let mut texts = vec!["".to_string(), "abcde".into(), "  ab ".into(), "x\u{e9}\u{4e2d}ab".into()];
    texts.extend((0..200).map(|_| {
        let letters = ["a", "b", "c", "d", "e", " ", "\u{e9}", "z"];
        (0..1 + random.below(24)).map(|_| letters[random.below(letters.len())]).collect()
    }));
    for text in texts {
        let mut parts: Vec<String> =
            format!(" {text}").replace(' ', "\u{2581}").chars().map(String::from).collect();
        if text.is_empty() {
            parts.clear();
        }
        loop {
            let merged = |at: usize| id(&format!("{}{}", parts[at], parts[at + 1]));
            let best = (0..parts.len().saturating_sub(1)).filter_map(|at| Some((at, scores[merged(at)?])));
            let best = best.reduce(|a, b| if b.1 > a.1 { b } else { a });
            let Some((at, _)) = best else { break };
            let right = parts.remove(at + 1);
            parts[at] += &right;
        }
        let of = |part: &String| match id(part) {
            Some(id) => vec![id as u32],
            None => part.bytes().map(|byte| u32::from(byte) + 3).collect(),
        };
        let want: Vec<u32> = std::iter::once(1).chain(parts.iter().flat_map(of)).collect();
        let got = tokenizer.encode(&text).unwrap();
        assert_eq!(got, want, "{text:?}");
        assert_eq!(tokenizer.decode(&got).unwrap(), text);
    }
    assert_eq!(tokenizer.end_token(), Some(2));
}
