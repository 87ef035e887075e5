//! Which type each tensor of a GGUF file gets: the rules of llama.cpp's quantiser without an importance matrix.

use moe_quant::GgmlType;

/// The types of a GGUF file's tensors, by the name that llama.cpp gives to the whole file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum GgufMix {
    Q8_0,
    Q4_0,
    Q4KM,
    Q6K,
}

/// How a tensor of a GGUF file is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stored {
    F32,
    F16,
    Blocks(GgmlType),
}

/// What the types of a model's tensors depend on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Model {
    pub layers: usize,
    pub experts: usize,
    /// Whether the embedding is the vocabulary projection.
    pub is_tied: bool,
}

/// llama.cpp gives more bits to the attention of models with this number of experts.
const FEW_EXPERTS: usize = 8;

impl GgufMix {
    /// Returns the name that llama.cpp gives to such files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Q8_0 => "Q8_0",
            Self::Q4_0 => "Q4_0",
            Self::Q4KM => "Q4_K_M",
            Self::Q6K => "Q6_K",
        }
    }

    /// Returns the `general.file_type`.
    pub(super) fn file_type(self) -> u32 {
        match self {
            Self::Q4_0 => 2,
            Self::Q8_0 => 7,
            Self::Q4KM => 15,
            Self::Q6K => 18,
        }
    }

    /// Returns the type of most matrices.
    fn usual(self) -> GgmlType {
        match self {
            Self::Q8_0 => GgmlType::Q8_0,
            Self::Q4_0 => GgmlType::Q4_0,
            Self::Q4KM => GgmlType::Q4K,
            Self::Q6K => GgmlType::Q6K,
        }
    }

    /// Returns how the tensor `name` of the file, with these dimensions (rows before columns), is stored.
    pub(super) fn stored(self, name: &str, shape: &[usize], model: Model) -> Stored {
        let is_matrix = shape.len() > 1 && name.ends_with(".weight");
        let module = name.rsplit('.').nth(1).unwrap_or_default();
        if !is_matrix || module.ends_with("_norm") || module.starts_with("ffn_gate_inp") {
            return Stored::F32;
        }
        let columns = shape.last().copied().unwrap_or_default();
        narrower(self.preferred(name, module, model), columns)
    }

    /// Returns the type of a matrix if its blocks divide the rows.
    fn preferred(self, name: &str, module: &str, model: Model) -> GgmlType {
        let layer = name.strip_prefix("blk.").and_then(|rest| rest.split('.').next());
        let layer = layer.and_then(|layer| layer.parse().ok()).unwrap_or_default();
        let is_mixed = self == Self::Q4KM;
        let has_more_bits = is_mixed && has_more_bits(layer, model.layers);
        let has_few_experts = model.experts == FEW_EXPERTS;
        match module {
            "output" if self != Self::Q8_0 => GgmlType::Q6K,
            "token_embd" if model.is_tied && self != Self::Q8_0 => GgmlType::Q6K,
            "attn_v" | "attn_k" if has_few_experts => GgmlType::Q8_0,
            "attn_v" if has_more_bits => GgmlType::Q6K,
            "attn_output" if has_few_experts && is_mixed => GgmlType::Q5K,
            "ffn_down" | "ffn_down_exps" | "ffn_down_shexp" if has_more_bits => GgmlType::Q6K,
            _ => self.usual(),
        }
    }
}

/// Returns whether a layer of a mixture has more bits: the first and the last eighth of the layers, and every third one
/// between them.
fn has_more_bits(layer: usize, layers: usize) -> bool {
    let eighth = layers / 8;
    layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2
}

/// Returns the type, or the next wider one with shorter blocks if blocks do not divide rows of `columns`, or F16.
fn narrower(ggml: GgmlType, columns: usize) -> Stored {
    let instead = match ggml {
        _ if columns.is_multiple_of(ggml.columns()) => ggml,
        GgmlType::Q4K => GgmlType::Q5_0,
        GgmlType::Q5K => GgmlType::Q5_1,
        _ => GgmlType::Q8_0,
    };
    if columns.is_multiple_of(instead.columns()) { Stored::Blocks(instead) } else { Stored::F16 }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: Model = Model { layers: 16, experts: 64, is_tied: false };

    #[test]
    fn types_are_those_of_llama_cpp() {
        use GgmlType::{Q4_0, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
        let blocks = Stored::Blocks;
        let square: &[usize] = &[512, 512];
        let odd: &[usize] = &[512, 96];
        let tied = Model { is_tied: true, ..MODEL };
        let eight = Model { experts: 8, ..MODEL };
        for (mix, name, shape, model, expected) in [
            (GgufMix::Q4KM, "output.weight", square, MODEL, blocks(Q6K)),
            (GgufMix::Q4KM, "token_embd.weight", square, MODEL, blocks(Q4K)),
            (GgufMix::Q4KM, "token_embd.weight", square, tied, blocks(Q6K)),
            (GgufMix::Q4_0, "output.weight", square, MODEL, blocks(Q6K)),
            (GgufMix::Q8_0, "output.weight", square, MODEL, blocks(Q8_0)),
            (GgufMix::Q4KM, "blk.1.attn_v.weight", square, MODEL, blocks(Q6K)),
            (GgufMix::Q4KM, "blk.2.attn_v.weight", square, MODEL, blocks(Q4K)),
            (GgufMix::Q4KM, "blk.4.ffn_down_exps.weight", &[8, 512, 512], MODEL, blocks(Q6K)),
            (GgufMix::Q4KM, "blk.4.ffn_up_exps.weight", &[8, 512, 512], MODEL, blocks(Q4K)),
            (GgufMix::Q4_0, "blk.4.ffn_down_exps.weight", &[8, 512, 512], MODEL, blocks(Q4_0)),
            (GgufMix::Q4KM, "blk.2.attn_k.weight", square, eight, blocks(Q8_0)),
            (GgufMix::Q4KM, "blk.2.attn_output.weight", square, eight, blocks(Q5K)),
            (GgufMix::Q4KM, "blk.2.attn_output.weight", odd, eight, blocks(Q5_1)),
            (GgufMix::Q4KM, "blk.2.attn_q.weight", odd, MODEL, blocks(Q5_0)),
            (GgufMix::Q6K, "blk.2.attn_q.weight", odd, MODEL, blocks(Q8_0)),
            (GgufMix::Q4KM, "blk.2.attn_q.weight", &[512, 72], MODEL, Stored::F16),
            (GgufMix::Q4_0, "blk.2.attn_q.weight", &[512, 72], MODEL, Stored::F16),
            (GgufMix::Q4KM, "blk.2.ffn_gate_inp.weight", square, MODEL, Stored::F32),
            (GgufMix::Q4KM, "blk.2.ffn_gate_inp_shexp.weight", &[512], MODEL, Stored::F32),
            (GgufMix::Q4KM, "blk.2.attn_norm.weight", &[512], MODEL, Stored::F32),
            (GgufMix::Q4KM, "blk.2.attn_q.bias", &[512], MODEL, Stored::F32),
        ] {
            assert_eq!(mix.stored(name, shape, model), expected, "{mix:?} {name} {shape:?}");
        }
    }

    #[test]
    fn layers_at_both_ends_have_more_bits() {
        let more: Vec<_> = (0..16).filter(|layer| has_more_bits(*layer, 16)).collect();
        assert_eq!(more, [0, 1, 4, 7, 10, 13, 14, 15]);
        assert_eq!((0..2).filter(|layer| has_more_bits(*layer, 2)).count(), 1);
    }
}
