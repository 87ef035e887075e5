//! Quantised experts in packs, as gpt-oss's files have them (`quant_method: mxfp4`): where the matrix of one expert is.
//!
//! | tensor below `experts` | shape, dtype | what |
//! |---|---|---|
//! | `gate_up_proj_blocks` | [E, 2I, H / 32, 16] U8 | codes of gate and of up, two to a byte |
//! | `gate_up_proj_scales` | [E, 2I, H / 32] U8 | exponents of powers of two (E8M0) |
//! | `down_proj_blocks`, `down_proj_scales` | [E, H, I / 32, 16], [E, H, I / 32] | the same of down |
//!
//! The rows of gate and up alternate, gate first. An expert's part of a tensor is a range of its bytes: the tensors
//! `weight_packed` [N, K / 2] and `weight_scale` [N, K / 32] of a matrix in [`Format::Mxfp4`](crate::Format::Mxfp4).
//! Gate and up together are one such matrix: gate is its even rows, up its odd rows
//! ([`Reader::turns`](crate::Reader::turns)).

use std::ops::Range;

use moe_kernels::names::MlpNames;

/// Codes in a block, and bytes that hold them.
const BLOCK: (usize, usize) = (32, 16);
/// What follows the name of a pack.
const BLOCKS: &str = "blocks";
const SCALES: &str = "scales";

/// The matrix of one expert in a pack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedExpert {
    /// The pack's name, without `_blocks` or `_scales`.
    pack: String,
    expert: usize,
    /// The number of this matrix among the ones whose rows alternate.
    pub turn: usize,
    /// The number of matrices whose rows alternate; 1 for a matrix by itself.
    pub matrices: usize,
}

/// A range of bytes of a stored tensor, as a tensor by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertPart {
    /// The shape.
    pub shape: Vec<usize>,
    /// The range in the stored tensor's bytes.
    pub range: Range<usize>,
}

/// A stored tensor of a pack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackTensor {
    /// The name.
    pub name: String,
    /// The shape; the dtype is U8.
    pub shape: Vec<usize>,
}

impl PackedExpert {
    /// The place of a module of this name, if it is a matrix of an expert: `model.layers.0.mlp.experts.3.up_proj`.
    pub fn of(module: &str) -> Option<Self> {
        let names = MlpNames::USUAL;
        let (expert, matrix) = module.rsplit_once('.')?;
        let (prefix, expert) = expert.rsplit_once('.')?;
        let (pack, turn, matrices) = match matrix {
            matrix if matrix == names.gate => (names.packed_gate_up, 0, 2),
            matrix if matrix == names.up => (names.packed_gate_up, 1, 2),
            matrix if matrix == names.down => (names.packed_down, 0, 1),
            _ => return None,
        };
        Some(Self { pack: format!("{prefix}.{pack}"), expert: expert.parse().ok()?, turn, matrices })
    }

    /// The name of the stored tensor with the codes of all experts, which shows that there is a pack.
    pub fn codes(&self) -> String {
        format!("{}_{BLOCKS}", self.pack)
    }

    /// The name of the stored tensor that holds what a matrix in MXFP4 has under `suffix`, if there is one.
    pub fn stored(&self, suffix: &str) -> Option<String> {
        match suffix {
            "weight_packed" => Some(self.codes()),
            "weight_scale" => Some(format!("{}_{SCALES}", self.pack)),
            _ => None,
        }
    }

    /// The expert's part of that tensor, whose shape is `shape`; `None` if a pack has no such expert or shape.
    pub fn part(&self, suffix: &str, shape: &[usize]) -> Option<ExpertPart> {
        let tail = match suffix {
            "weight_packed" => &[BLOCK.1][..],
            "weight_scale" => &[][..],
            _ => return None,
        };
        let (&[experts, rows, blocks], true) = (shape.get(..3)?, shape.get(3..)? == tail) else {
            return None;
        };
        let width = blocks * tail.iter().product::<usize>();
        let len = rows * width;
        let start = self.expert * len;
        let part = ExpertPart { shape: vec![rows, width], range: start..start + len };
        (self.expert < experts).then_some(part)
    }

    /// The tensors that a file has for the packs of E experts to which this matrix \[n, k\] belongs. They are returned
    /// only for the gate and down matrices of the first expert, so that each is listed once.
    pub fn tensors(&self, [n, k]: [usize; 2], experts: usize) -> Vec<PackTensor> {
        if self.expert > 0 || self.turn > 0 {
            return Vec::new();
        }
        let scales = vec![experts, n * self.matrices, k / BLOCK.0];
        let blocks = [&scales[..], &[BLOCK.1]].concat();
        let tensor = |kind: &str, shape| PackTensor { name: format!("{}_{kind}", self.pack), shape };
        vec![tensor(BLOCKS, blocks), tensor(SCALES, scales)]
    }

    /// The name that the same matrix of another expert has.
    pub fn module(&self, expert: usize) -> Option<String> {
        let names = MlpNames::USUAL;
        let (prefix, pack) = self.pack.rsplit_once('.')?;
        let matrix = if pack == names.packed_down { names.down } else { names.matrices()[self.turn] };
        Some(format!("{prefix}.{expert}.{matrix}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_has_its_place_in_a_pack() {
        let place = PackedExpert::of("model.layers.1.mlp.experts.7.up_proj").unwrap();
        assert_eq!(
            (place.pack.as_str(), place.expert, place.turn, place.matrices),
            ("model.layers.1.mlp.experts.gate_up_proj", 7, 1, 2)
        );
        assert_eq!(place.module(2).as_deref(), Some("model.layers.1.mlp.experts.2.up_proj"));
        let down = PackedExpert::of("x.experts.0.down_proj").unwrap();
        assert_eq!((down.pack.as_str(), down.turn, down.matrices), ("x.experts.down_proj", 0, 1));
        assert_eq!(down.module(5).as_deref(), Some("x.experts.5.down_proj"));
        for other in ["model.layers.1.mlp.router", "x.experts.a.down_proj", "down_proj"] {
            assert!(PackedExpert::of(other).is_none(), "{other}");
        }
    }

    #[test]
    fn the_first_expert_answers_for_the_packs() {
        let tensors = |module: &str| PackedExpert::of(module).unwrap().tensors([64, 96], 5);
        let tensor =
            |name: &str, shape: &[usize]| PackTensor { name: name.to_string(), shape: shape.to_vec() };
        let gate = tensors("e.0.gate_proj");
        assert_eq!(gate[0], tensor("e.gate_up_proj_blocks", &[5, 128, 3, 16]));
        assert_eq!(gate[1], tensor("e.gate_up_proj_scales", &[5, 128, 3]));
        assert_eq!(tensors("e.0.down_proj")[0], tensor("e.down_proj_blocks", &[5, 64, 3, 16]));
        assert!(tensors("e.0.up_proj").is_empty() && tensors("e.1.gate_proj").is_empty());
    }

    #[test]
    fn an_expert_has_a_part_of_each_tensor() {
        let place = PackedExpert::of("e.2.up_proj").unwrap();
        let part = |suffix: &str, shape: &[usize]| place.part(suffix, shape);
        let codes = ExpertPart { shape: vec![6, 32], range: 384..576 };
        assert_eq!(part("weight_packed", &[3, 6, 2, 16]), Some(codes));
        assert_eq!(part("weight_scale", &[3, 6, 2]), Some(ExpertPart { shape: vec![6, 2], range: 24..36 }));
        for wrong in [&[2, 6, 2, 16][..], &[3, 6, 2], &[3, 6, 2, 8], &[3], &[3, 6, 2, 16, 1]] {
            assert_eq!(part("weight_packed", wrong), None, "{wrong:?}");
        }
        assert_eq!(part("weight", &[3, 6, 2]), None);
    }
}
