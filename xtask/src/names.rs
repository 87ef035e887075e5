//! `cargo xtask tidy`: no library contains the name of a tensor.
//!
//! A family of models passes the names of its tensors to the libraries, so that another family needs no change below
//! `models/`. One file contains the names that many families share.

/// The only file that may contain names.
const HOME: &str = "crates/moe-kernels/src/names.rs";

/// Parts of tensor names that no library may contain.
const NAMES: &[&str] = &[
    "gate_proj",
    "up_proj",
    "down_proj",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "self_attn",
    "mlp.gate",
    "mlp.experts",
    "mlp.shared_expert",
    "block_sparse_moe",
    "lm_head",
    "embed_tokens",
    "input_layernorm",
    "attention_layernorm",
    "model.layers",
    "model.norm",
];

/// The first string in product code of a library that is, or contains, the name of a tensor. A text with spaces is a
/// message.
pub fn fault(file: &str, text: &str) -> Option<String> {
    let is_library =
        file.starts_with("crates/") && file.split('/').nth(2) == Some("src") && file.ends_with(".rs");
    let is_test = file.ends_with("tests.rs") || file.contains("/tests/");
    if !is_library || is_test || file == HOME {
        return None;
    }
    let product = text.lines().take_while(|line| line.trim() != "#[cfg(test)]");
    let (line, name) = product.enumerate().find_map(|(at, line)| Some((at + 1, spelled_out(line)?)))?;
    Some(format!(
        "{file}:{line}: spells out the tensor name {name:?}; take it from the family's `TensorNames`, whose usual values are in \
         {HOME}"
    ))
}

/// A string of a line of code that contains a tensor's name.
fn spelled_out(line: &str) -> Option<&str> {
    if line.trim_start().starts_with("//") {
        return None;
    }
    // A string is the text between an odd quotation mark and the next one.
    let strings = line.split('"').skip(1).step_by(2);
    strings.filter(|text| !text.contains(' ')).find(|text| NAMES.iter().any(|name| text.contains(name)))
}

#[cfg(test)]
mod tests {
    use super::{HOME, fault};

    #[test]
    fn a_library_spells_out_no_tensor_name() {
        let code = "//! x\nlet x = vb.pp(\"experts.0.gate_proj\");\n";
        let found = fault("crates/a/src/b.rs", code).unwrap();
        assert!(
            found.starts_with("crates/a/src/b.rs:2: ") && found.contains("experts.0.gate_proj"),
            "{found}"
        );
        for file in
            [HOME, "crates/a/tests/b.rs", "crates/a/src/b/tests.rs", "models/a/src/b.rs", "xtask/src/b.rs"]
        {
            assert_eq!(fault(file, code), None, "{file}");
        }
        for allowed in [
            "/// Loads \"gate_proj.weight\".\n",
            "let message = \"rows of gate_proj are cut\";\n",
            "let x = vb.pp(names.gate);\n#[cfg(test)]\nmod tests { const A: &str = \"lm_head\"; }\n",
        ] {
            assert_eq!(fault("crates/a/src/b.rs", allowed), None, "{allowed}");
        }
    }
}
