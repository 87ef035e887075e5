//! Which tensors a decoder has, and which parts of them a rank holds.
//!
//! Attention heads, dense MLPs, shared experts and the vocabulary are cut over the tensor-parallel
//! group. Experts are cut along their intermediate size or, with expert parallelism, whole on one
//! rank each. Norms and router gates are on every rank.

use moe_comm::{Geometry, GeometryError};

use super::config::{DecoderConfig, MoeConfig};
use crate::checkpoint::{BiasStorage, SharedPacks, StoredExperts, TensorLayout};

/// What errors call the width of dense layers.
pub(super) const DENSE: &str = "intermediate_size";
/// What errors call the width of shared experts.
pub(super) const SHARED: &str = "the shared experts' intermediate size";
/// Prefix, below the MLP, of packs in which shared experts follow the routed ones.
pub(super) const WITH_SHARED: &str = "experts_with_shared_experts";

impl DecoderConfig {
    /// The tensors of a checkpoint, and the parts that the rank of `geometry` holds. `has` tells which names are
    /// present, for layouts that differ in them; `mixer` lists the tensors of the mixer of a layer, by its number, with
    /// the layer's prefix.
    pub fn layout(
        &self,
        geometry: &Geometry,
        has: &dyn Fn(&str) -> bool,
        mixer: impl Fn(usize, &str, &mut TensorLayout) -> Result<(), GeometryError>,
    ) -> Result<TensorLayout, GeometryError> {
        let h = self.hidden_size;
        let names = &self.names;
        let mut list = TensorLayout::new(geometry);
        list.vocabulary(format!("{}.weight", names.embedding), self.vocab_size, h);
        self.layers_layout(has, mixer, &mut list)?;
        if !self.tie_word_embeddings {
            list.vocabulary(format!("{}.weight", names.lm_head), self.vocab_size, h);
        }
        Ok(list)
    }

    /// Adds the tensors of the layers and of the last norm.
    pub(super) fn layers_layout(
        &self,
        has: &dyn Fn(&str) -> bool,
        mixer: impl Fn(usize, &str, &mut TensorLayout) -> Result<(), GeometryError>,
        list: &mut TensorLayout,
    ) -> Result<(), GeometryError> {
        let h = self.hidden_size;
        let names = &self.names;
        for (layer, &sparse) in self.is_sparse.iter().enumerate() {
            let prefix = format!("{}.{layer}", names.layers);
            mixer(layer, &prefix, list)?;
            for norm in [names.input_norm, names.post_attention_norm] {
                list.whole(format!("{prefix}.{norm}.weight"), &[h]);
            }
            match self.moe.as_ref().filter(|_| sparse) {
                Some(moe) => {
                    let mlp =
                        format!("{prefix}.{}", names.sparse_mlp(|name| has(&format!("{prefix}.{name}"))));
                    self.sparse_layout(moe, &mlp, has, list)?;
                }
                None => {
                    let mlp = format!("{prefix}.{}", names.mlp);
                    list.gated_mlp(&mlp, &names.matrices, DENSE, [h, self.intermediate_size])?;
                }
            }
        }
        list.whole(format!("{}.weight", names.norm), &[h]);
        Ok(())
    }

    fn sparse_layout(
        &self,
        moe: &MoeConfig,
        mlp: &str,
        has: &dyn Fn(&str) -> bool,
        list: &mut TensorLayout,
    ) -> Result<(), GeometryError> {
        let e = moe.router.num_experts;
        let h = self.hidden_size;
        let names = &self.names;
        let gate = format!("{mlp}.{}.weight", names.gate);
        if moe.router.f32_gate {
            list.exact.insert(gate.clone());
        }
        list.whole(gate, &[e, h]);
        if moe.router.gate_bias {
            list.whole(format!("{mlp}.{}.bias", names.gate), &[e]);
        }
        if moe.router.correction_bias {
            let bias = &names.correction_bias;
            let stored = bias.stored(|name| has(&format!("{mlp}.{name}")));
            list.whole(format!("{mlp}.{stored}"), &bias.dims(e));
        }
        let width = moe.shared_intermediate_size;
        let shared = names.shared_experts.map(|name| format!("{mlp}.{name}"));
        // Without shared experts, transformers 5 writes their tensors with a width of 0.
        let is_there =
            |shared: &String| width > 0 || has(&format!("{shared}.{}.weight", names.matrices.down));
        if let Some(shared) = shared.as_ref().filter(|shared| is_there(shared)) {
            list.gated_mlp(shared, &names.matrices, SHARED, [h, width])?;
            if let Some(gate) = names.shared_expert_gate {
                list.whole(format!("{mlp}.{gate}.weight"), &[1, h]);
            }
        }
        let experts = format!("{mlp}.{}", names.experts);
        let packs = format!("{mlp}.{WITH_SHARED}");
        let packed = has(&format!("{experts}.{}", names.matrices.packed_gate_up));
        let count = moe.shared_experts().filter(|count| *count > 0 && names.shared_expert_gate.is_none());
        let shared = shared.as_deref().zip(count);
        let shared = shared.map(|(stored, count)| SharedPacks { count, stored, packs: &packs });
        let biases = match has(&format!("{experts}.{}_bias", names.matrices.packed_gate_up)) {
            true => BiasStorage::Packed,
            false => BiasStorage::Single,
        };
        let stored = StoredExperts {
            prefix: &experts,
            names: &names.matrices,
            packed,
            biases: moe.expert_bias.then_some(biases),
            sizes: [e, h, moe.intermediate_size],
        };
        list.experts(&stored, shared)
    }
}
