//! The common part of families with multi-head latent attention. Only their configs differ.

use candle_nn::VarBuilder;
use model_runtime::{
    Config, ConfigError, Decoder, DecoderConfig, DecoderOptions, Geometry, GeometryError, LayerStates,
    MlaAttention, MlaConfig, MlaForm, MlaNames, TensorLayout,
};
use moe_engine::{AttentionSpec, DeviceChoice, LoadOptions, LoadedModel, ModelSpec};
use moe_layer::candle::{self, DType};
use moe_layer::{BackendSelection, MoePath};
use tracing::warn;

/// The name in errors of the reduced size of o_proj.
const OUTPUT: &str = "the width of all value heads";

/// The largest number of tensors of a layer, without its experts.
const LAYER_TENSORS: usize = 20;

const LOOP_OVER_GPUS: &str = "`moe_path` legacy runs on one GPU, not on several; leave `tp` and `dp` out with `device` cuda, or choose fused";

/// A model of such a family.
#[derive(Clone, Debug)]
pub struct LatentSpec {
    /// The decoder around the attention.
    pub decoder: DecoderConfig,
    /// Attention, in the absorbed form and with the heads of all ranks.
    pub attention: MlaConfig,
    /// The dtype in the config.
    pub dtype: Option<DType>,
    /// Options that the config sets and that transformers ignores. Results differ from transformers' if a checkpoint
    /// has them.
    pub ignored_by_transformers: Vec<String>,
}

impl LatentSpec {
    /// Makes a model of these parts, after checking that its sizes together are plausible.
    ///
    /// # Errors
    /// An unknown dtype; the first product of sizes that exceeds its limit.
    pub(crate) fn new(
        config: &Config,
        decoder: DecoderConfig,
        attention: MlaConfig,
    ) -> Result<Self, ConfigError> {
        let head = attention.qk_nope_head_dim + attention.qk_rope_head_dim + attention.v_head_dim;
        let reads = attention.hidden_size.max(attention.kv_lora_rank).max(attention.q_lora_rank.unwrap_or(0));
        decoder.check_sizes(config, LAYER_TENSORS, &[attention.num_heads, head, reads, 2])?;
        Ok(Self { decoder, attention, dtype: config.dtype()?, ignored_by_transformers: Vec::new() })
    }

    /// The attention in a form.
    pub fn mla(&self, form: MlaForm) -> MlaConfig {
        MlaConfig { form, ..self.attention.clone() }
    }

    /// Loads the model, or one rank's part of it, with its attention in a form. `vb` is at the root of the checkpoint,
    /// has the model dtype and provides the rank's slices. Also returns the oracle's choice of expert backend, if it
    /// made one.
    ///
    /// # Errors
    /// Tensors that are missing or have a wrong shape; sizes that the ranks cannot divide.
    pub fn build(
        &self,
        mla: MlaForm,
        options: &DecoderOptions,
        vb: VarBuilder,
    ) -> candle::Result<(Decoder, Option<BackendSelection>)> {
        let context = options.context;
        let whole = self.mla(mla);
        let heads = context.geometry.attention_heads(whole.num_heads, whole.num_heads)?.heads;
        let ranks = context.row_parallel(OUTPUT, whole.num_heads * whole.v_head_dim)?;
        let part = whole.with_heads(heads.len());
        Decoder::load(&self.decoder, options, vb, |_, vb| {
            let vb = vb.pp(self.decoder.names.attention);
            let attention = MlaAttention::load_on(part.clone(), self.decoder.names.latent, vb, context)?;
            Ok(Box::new(attention.with_row_parallel(ranks.clone())))
        })
    }
}

impl ModelSpec for LatentSpec {
    fn decoder(&self) -> &DecoderConfig {
        &self.decoder
    }

    fn attention(&self) -> AttentionSpec<'_> {
        AttentionSpec::Latent(&self.attention)
    }

    fn refuse(&self, options: &LoadOptions, device: DeviceChoice) -> Option<&'static str> {
        let several = options.context.geometry.world_size > 1 && device != DeviceChoice::Cpu;
        (several && options.moe_path == Some(MoePath::Legacy)).then_some(LOOP_OVER_GPUS)
    }

    fn layout(&self, geometry: &Geometry, has: &dyn Fn(&str) -> bool) -> Result<TensorLayout, GeometryError> {
        let names = &self.decoder.names;
        self.decoder.layout(geometry, has, |_, prefix, list| {
            let prefix = format!("{prefix}.{}", names.attention);
            let has = |name: &str| has(&format!("{prefix}.{name}.weight"));
            let is_split = has(names.latent.k_b) && !has(names.latent.kv_b);
            projections(&self.attention, &names.latent, &prefix, is_split, list)
        })
    }

    fn states(
        &self,
        geometry: &Geometry,
        mla: Option<MlaForm>,
        dtype: DType,
    ) -> Result<LayerStates, GeometryError> {
        let whole = self.mla(mla.unwrap_or_default());
        let heads = geometry.attention_heads(whole.num_heads, whole.num_heads)?.heads;
        Ok(whole.with_heads(heads.len()).kv_layout(dtype).layers(self.decoder.num_layers()))
    }

    fn load(&self, options: &LoadOptions, vb: VarBuilder) -> candle::Result<LoadedModel> {
        // Only one rank writes these messages.
        if options.context.geometry.rank == 0 {
            for option in &self.ignored_by_transformers {
                warn!("config.json: {option} is honoured here, but transformers 5.17 ignores it");
            }
        }
        let mla = options.mla.unwrap_or_default();
        let options = options.decoder(MoePath::Fused);
        let (model, selection) = self.build(mla, &options, vb)?;
        LoadedModel::new(Box::new(model), options.path, selection)
    }
}

/// Adds the projections. Up-projections have the rows of this rank's heads, and o_proj has their columns.
/// Down-projections and norms are whole, because all heads read the latents. `is_split` says whether keys and values
/// have an up-projection each.
fn projections(
    config: &MlaConfig,
    names: &MlaNames,
    prefix: &str,
    is_split: bool,
    list: &mut TensorLayout,
) -> Result<(), GeometryError> {
    let MlaConfig { hidden_size: h, num_heads, kv_lora_rank: l, v_head_dim: v, bias, .. } = *config;
    let query = config.qk_nope_head_dim + config.qk_rope_head_dim;
    let up = config.qk_nope_head_dim + v;
    let heads = list.geometry.attention_heads(num_heads, num_heads)?.heads;
    let output = list.geometry.row_shard(OUTPUT, num_heads * v)?.range;
    let weight = |name: &str| format!("{prefix}.{name}.weight");
    let by_head = |list: &mut TensorLayout, name: &str, width: usize, columns: usize| {
        list.rows(weight(name), [num_heads * width, columns], heads.start * width..heads.end * width);
    };
    let biases = |list: &mut TensorLayout, name: &str, rows: usize| {
        if bias {
            list.whole(format!("{prefix}.{name}.bias"), &[rows]);
        }
    };
    match config.q_lora_rank {
        None => by_head(list, names.q, query, h),
        Some(rank) => {
            list.whole(weight(names.q_a), &[rank, h]);
            biases(list, names.q_a, rank);
            list.whole(weight(names.q_a_norm), &[rank]);
            by_head(list, names.q_b, query, rank);
        }
    }
    let latent = l + config.qk_rope_head_dim;
    list.whole(weight(names.kv_a), &[latent, h]);
    biases(list, names.kv_a, latent);
    list.whole(weight(names.kv_a_norm), &[l]);
    match is_split {
        true => {
            by_head(list, names.k_b, l, config.qk_nope_head_dim);
            by_head(list, names.v_b, v, l);
        }
        false => by_head(list, names.kv_b, up, l),
    }
    list.columns(weight(names.o), [h, num_heads * v], output);
    biases(list, names.o, h);
    Ok(())
}
