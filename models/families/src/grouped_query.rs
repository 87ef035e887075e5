//! What families with grouped-query attention have in common: their configs differ, and the rest is one model.

use candle_core::DType;
use candle_nn::VarBuilder;
use model_runtime::config::limits;
use model_runtime::{
    AttentionConfig, Config, ConfigError, DecoderConfig, Geometry, GeometryError, GroupedQueryModel,
    LayerStates, MlaForm, QkNorm, RotatedPairs, TensorLayout,
};
use moe_engine::{AttentionSpec, DeviceChoice, LoadOptions, LoadedModel, ModelSpec};
use moe_layer::MoePath;

/// Tensors of a layer without its experts, at most.
const LAYER_TENSORS: usize = 16;

/// A model of such a family.
#[derive(Clone, Debug)]
pub struct GroupedQuerySpec {
    /// The decoder and its attention.
    pub model: GroupedQueryModel,
    /// What the family answers to `--mla`.
    pub(crate) no_mla: &'static str,
}

impl GroupedQuerySpec {
    /// A model whose layers all have this attention, with sizes that are not absurd together.
    pub(crate) fn new(
        config: &Config,
        decoder: DecoderConfig,
        attention: AttentionConfig,
        no_mla: &'static str,
    ) -> Result<Self, ConfigError> {
        config.dtype()?;
        let AttentionConfig { num_heads, head_dim, hidden_size, .. } = attention;
        decoder.check_sizes(config, LAYER_TENSORS, &[num_heads, head_dim, hidden_size, 4])?;
        Ok(Self { model: GroupedQueryModel::alike(decoder, attention), no_mla })
    }
}

impl ModelSpec for GroupedQuerySpec {
    fn decoder(&self) -> &DecoderConfig {
        &self.model.decoder
    }

    fn attention(&self) -> AttentionSpec<'_> {
        AttentionSpec::GroupedQuery(&self.model.attention)
    }

    fn refuse(&self, options: &LoadOptions, _: DeviceChoice) -> Option<&'static str> {
        options.mla.map(|_| self.no_mla)
    }

    fn layout(&self, geometry: &Geometry, has: &dyn Fn(&str) -> bool) -> Result<TensorLayout, GeometryError> {
        self.model.layout(geometry, has)
    }

    fn states(
        &self,
        geometry: &Geometry,
        _: Option<MlaForm>,
        dtype: DType,
    ) -> Result<LayerStates, GeometryError> {
        self.model.states(geometry, dtype)
    }

    fn load(&self, options: &LoadOptions, vb: VarBuilder) -> candle_core::Result<LoadedModel> {
        if options.mla.is_some() {
            candle_core::bail!("{}", self.no_mla)
        }
        let options = options.decoder(MoePath::Fused);
        let (model, selection) = self.model.load(&options, vb)?;
        LoadedModel::new(Box::new(model), options.path, selection)
    }
}

/// Which layers see a window of positions alone, by `layer_types`; `None` without that list.
///
/// # Errors
/// A list of another length than `layers`, or of other types.
pub(crate) fn sliding_layers(config: &Config, layers: usize) -> Result<Option<Vec<bool>>, ConfigError> {
    if !config.has("layer_types") {
        return Ok(None);
    }
    let types = config.strings(&["layer_types"])?;
    if types.len() != layers {
        return Err(config.invalid(
            "layer_types",
            &format!("a type for each of {layers} layers"),
            types.len(),
        ));
    }
    let is_sliding = |kind: &str| match kind {
        "sliding_attention" => Ok(true),
        "full_attention" => Ok(false),
        other => Err(config.unsupported(
            format!("a layer of type {other:?}"),
            "; supported are full_attention and sliding_attention",
        )),
    };
    types.into_iter().map(is_sliding).collect::<Result<_, _>>().map(Some)
}

/// Defaults of a family's sizes.
pub(crate) struct Sizes {
    pub hidden_size: usize,
    pub num_heads: usize,
    /// `None`: as many as query heads.
    pub num_kv_heads: Option<usize>,
    pub rms_norm_eps: f64,
}

/// Attention of the config's sizes, without biases, norms or a window, whose heads are rotated as a whole; the size of a
/// head is the hidden size over the number of heads where the config does not say it.
///
/// # Errors
/// Sizes that do not divide; an odd size of a head.
pub(crate) fn attention(config: &Config, defaults: &Sizes) -> Result<AttentionConfig, ConfigError> {
    let hidden_size = config.size_or(&["hidden_size"], defaults.hidden_size, limits::WIDTH)?;
    let num_heads = config.size_or(&["num_attention_heads"], defaults.num_heads, limits::HEADS)?;
    // An explicit null means as many as query heads, too.
    let given = config.object().contains_key("num_key_value_heads");
    let default = defaults.num_kv_heads.filter(|_| !given).unwrap_or(num_heads);
    let num_kv_heads = config.size_or(&["num_key_value_heads"], default, limits::HEADS)?;
    if num_heads % num_kv_heads != 0 {
        let expected = format!("a divisor of num_attention_heads = {num_heads}");
        return Err(config.invalid("num_key_value_heads", &expected, num_kv_heads));
    }
    let head_dim = config.size_or(&["head_dim"], hidden_size.div_euclid(num_heads), limits::HEAD_DIM)?;
    if head_dim == 0 || head_dim % 2 != 0 {
        return Err(config.invalid("head_dim", "an even number above 0, for rotary embedding", head_dim));
    }
    Ok(AttentionConfig {
        hidden_size,
        num_heads,
        num_kv_heads,
        head_dim,
        rotary_dim: head_dim,
        rotated_pairs: RotatedPairs::Halves,
        qkv_bias: false,
        o_bias: false,
        qk_norm: QkNorm::None,
        rms_norm_eps: config.rms_norm_eps_or(defaults.rms_norm_eps)?,
        sliding_window: None,
        softmax_scale: None,
    })
}
