//! Sizes of a layer of linear attention: its tensors, and the parts of them that a rank holds.

use std::ops::Range;

use moe_comm::{Geometry, GeometryError};
use moe_kernels::DeltaHeads;
use moe_kernels::names::DeltaNames;

use crate::checkpoint::TensorLayout;
use crate::kv_cache::StateLayout;

/// What errors call the reduced size of the output product.
pub(super) const OUTPUT: &str = "the width of all value heads of linear attention";

/// Sizes and options of a layer of linear attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearAttentionConfig {
    /// Width of the residual stream H.
    pub hidden_size: usize,
    /// Key heads Hk, value heads Hv, and their dimensions.
    pub heads: DeltaHeads,
    /// Rows that the convolution sees, W: 1 to 8.
    pub conv_width: usize,
    /// Epsilon of the norm before the output product.
    pub rms_norm_eps: f64,
    /// Whether the checkpoint has the first value head of each key head, then the second of each, and so on, instead of
    /// the value heads of each key head together. Where the input product has rows that are grouped by key heads, they
    /// are together in any case.
    pub value_heads_in_turns: bool,
}

impl LinearAttentionConfig {
    /// What a layer with these heads keeps of a sequence.
    pub fn state_layout(&self) -> StateLayout {
        StateLayout { heads: self.heads, conv_width: self.conv_width }
    }

    /// This layer's part on the rank of `geometry`: some key heads, with the value heads that share them.
    ///
    /// # Errors
    /// Key heads that the geometry cannot cut.
    pub fn part(&self, geometry: &Geometry) -> Result<Self, GeometryError> {
        let (keys, values) = self.cut(geometry)?;
        let heads = DeltaHeads { key_heads: keys.len(), value_heads: values.len(), ..self.heads };
        Ok(Self { heads, ..*self })
    }

    /// The key heads and the value heads of a rank.
    pub(super) fn cut(&self, geometry: &Geometry) -> Result<(Range<usize>, Range<usize>), GeometryError> {
        let keys = geometry.linear_key_heads(self.heads.key_heads)?;
        let shared = self.values_per_key();
        Ok((keys.clone(), keys.start * shared..keys.end * shared))
    }

    /// Value heads that share a key head, R.
    pub(super) fn values_per_key(&self) -> usize {
        self.heads.value_heads / self.heads.key_heads.max(1)
    }

    /// Rows of a key head in the two matrices that are grouped by key heads.
    pub(super) fn grouped_rows(&self) -> [usize; 2] {
        let shared = self.values_per_key();
        [2 * self.heads.key_dim + 2 * shared * self.heads.value_dim, 2 * shared]
    }

    /// Adds the layer's tensors, which are under `prefix`, to a list; `has` tells in which ways the parts of the input
    /// product are stored.
    ///
    /// # Errors
    /// Key heads that the list's geometry cannot cut.
    pub fn layout(
        &self,
        names: &DeltaNames,
        prefix: &str,
        has: &dyn Fn(&str) -> bool,
        list: &mut TensorLayout,
    ) -> Result<(), GeometryError> {
        let Self { hidden_size: h, heads, .. } = *self;
        let (keys, values) = self.cut(&list.geometry)?;
        list.geometry.row_shard(OUTPUT, heads.value_width())?;
        let name = |module: &str| format!("{prefix}.{module}.weight");
        let stored = self.stored_value_heads(&keys);
        let wide = |heads: &Range<usize>, width: usize| heads.start * width..heads.end * width;
        let of_values: Vec<_> = stored.iter().map(|run| wide(run, heads.value_dim)).collect();
        let key_width = heads.key_width();
        let of_keys = wide(&keys, heads.key_dim);
        let shifted = |range: &Range<usize>, start: usize| range.start + start..range.end + start;
        let mut qkv = vec![of_keys.clone(), shifted(&of_keys, key_width)];
        qkv.extend(of_values.iter().map(|run| shifted(run, 2 * key_width)));
        let [qkvz, ba] = self.grouped_rows();
        // The input product is one matrix of several tensors.
        let input = [names.qkvz, names.ba, names.qkv, names.z, names.b, names.a];
        list.floats.extend(input.map(name));
        match has(&name(names.qkvz)) {
            true => list.rows(name(names.qkvz), [heads.key_heads * qkvz, h], wide(&keys, qkvz)),
            false => {
                list.runs(name(names.qkv), &[heads.channels(), h], &qkv);
                list.runs(name(names.z), &[heads.value_width(), h], &of_values);
            }
        }
        match has(&name(names.ba)) {
            true => list.rows(name(names.ba), [heads.key_heads * ba, h], wide(&keys, ba)),
            false => {
                for module in [names.b, names.a] {
                    list.runs(name(module), &[heads.value_heads, h], &stored);
                }
            }
        }
        list.runs(name(names.conv), &[heads.channels(), 1, self.conv_width], &qkv);
        for vector in [names.a_log, names.dt_bias] {
            list.runs(format!("{prefix}.{vector}"), &[heads.value_heads], &stored);
        }
        list.whole(name(names.norm), &[heads.value_dim]);
        match self.reorders_values() {
            // A rank takes its columns when it has the matrix in floats.
            true => {
                list.whole(name(names.o), &[h, heads.value_width()]);
                list.floats.insert(name(names.o));
            }
            false => list.columns(name(names.o), [h, heads.value_width()], wide(&values, heads.value_dim)),
        }
        Ok(())
    }
}
