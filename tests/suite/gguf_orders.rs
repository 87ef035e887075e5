//! llama.cpp's converter changes values and their order. These functions do the same, or undo it, apart from the
//! library.

use std::collections::HashMap;

use serde_json::Value;

/// Returns what a file has for a value of a tensor in floats, which is called `name` there.
pub fn in_file(architecture: &str, name: &str, value: f32) -> f32 {
    let is_linear = architecture == "qwen3next" || architecture == "qwen35moe";
    match name {
        name if name.ends_with(".ssm_a") => -value.exp(),
        name if is_linear && name.ends_with("norm.weight") && !name.ends_with("ssm_norm.weight") => {
            value + 1.0
        }
        _ => value,
    }
}

/// Returns the values of a tensor of a file, which has the dimensions `shape`, in the order of the checkpoint.
pub fn in_checkpoint(
    architecture: &str,
    name: &str,
    config: &Value,
    values: &[f32],
    shape: &[usize],
) -> Vec<f32> {
    let size = |key: &str| config[key].as_u64().unwrap() as usize;
    let module = name.split('.').nth(2).unwrap_or_default();
    match (architecture, module) {
        ("llama", "attn_q") => halves(values, shape, size("num_attention_heads")),
        ("llama", "attn_k") => halves(values, shape, size("num_key_value_heads")),
        ("qwen35moe", _) => {
            let keys = size("linear_num_key_heads");
            let shared = size("linear_num_value_heads") / keys;
            let width = size("linear_value_head_dim");
            let key_rows = 2 * keys * size("linear_key_head_dim");
            let row: usize = shape.iter().skip(1).product();
            match module {
                "attn_qkv" | "ssm_conv1d" => {
                    let (first, rest) = values.split_at(key_rows * row);
                    [first, &grouped(rest, [keys, shared], width * row)].concat()
                }
                "attn_gate" => grouped(values, [keys, shared], width * row),
                "ssm_beta" | "ssm_alpha" => grouped(values, [keys, shared], row),
                "ssm_a" | "ssm_dt" => grouped(values, [keys, shared], 1),
                "ssm_out" => values.chunks(row).flat_map(|row| grouped(row, [keys, shared], width)).collect(),
                _ => values.to_vec(),
            }
        }
        _ => values.to_vec(),
    }
}

/// Returns value heads of `width` elements, which are in turns, so that the value heads of a key head are together.
fn grouped(values: &[f32], [keys, shared]: [usize; 2], width: usize) -> Vec<f32> {
    let heads = (0..keys).flat_map(|key| (0..shared).map(move |turn| turn * keys + key));
    heads.flat_map(|head| values[head * width..(head + 1) * width].to_vec()).collect()
}

/// Rows of heads whose neighbours are rotated together, in the order of halves.
fn halves(values: &[f32], shape: &[usize], heads: usize) -> Vec<f32> {
    let (width, columns) = (shape[0] / heads, shape.get(1).copied().unwrap_or(1));
    let row = |head: usize, at: usize| {
        let from = head * width + at % (width / 2) * 2 + at / (width / 2);
        &values[from * columns..][..columns]
    };
    (0..heads).flat_map(|head| (0..width).flat_map(move |at| row(head, at).to_vec())).collect()
}

/// The up-projections of keys, [heads, L, N], and values, [heads, V, L], as the one matrix of the published
/// checkpoints.
pub fn join_up_projections(tensors: &mut HashMap<String, (Vec<usize>, Vec<u8>)>, heads: usize) {
    let names: Vec<_> = tensors.keys().filter(|name| name.ends_with("k_b_proj.weight")).cloned().collect();
    for name in names {
        let (of_keys, keys) = tensors.remove(&name).unwrap();
        let (of_values, values) = tensors.remove(&name.replace("k_b_proj", "v_b_proj")).unwrap();
        let (latent, plain, width) = (of_keys[0] / heads, of_keys[1], of_values[0] / heads);
        let float = |from: &[u8], at: usize| from[4 * at..4 * at + 4].to_vec();
        let mut joined = Vec::new();
        for head in 0..heads {
            for row in 0..plain {
                joined.extend((0..latent).flat_map(|l| float(&keys, (head * latent + l) * plain + row)));
            }
            joined.extend_from_slice(&values[4 * head * width * latent..4 * (head + 1) * width * latent]);
        }
        let shape = vec![heads * (plain + width), latent];
        tensors.insert(name.replace("k_b_proj", "kv_b_proj"), (shape, joined));
    }
}
