//! Families whose layers have grouped-query attention or linear attention: their configs differ, and the rest is one
//! model.

use std::sync::Arc;

use candle_core::{DType, Device};
use candle_nn::VarBuilder;
use model_runtime::{
    AttentionConfig, BlockContext, CausalLm, Checkpoint, Config, ConfigError, Decoder, DecoderConfig,
    DecoderModel, Geometry, GeometryError, LayerStates, MixerConfig, MlaForm, MtpConfig, MtpHead,
    TensorLayout,
};
use moe_engine::{AttentionSpec, DeviceChoice, LoadOptions, LoadedModel, ModelSpec};
use moe_layer::MoePath;

/// Tensors of a layer without its experts, at most.
const LAYER_TENSORS: usize = 24;

const NO_MTP: &str = "multi-token prediction: of this family no such head is known; its models run without";

/// A model of such a family.
#[derive(Clone, Debug)]
pub struct DecoderSpec {
    /// The decoder and the mixers of its layers.
    pub model: DecoderModel,
    /// The head for multi-token prediction, or why there is none.
    pub mtp: Result<MtpConfig, String>,
    /// What the family answers to the setting `mla`.
    pub(crate) no_mla: &'static str,
}

impl DecoderSpec {
    /// A model whose layers all have this attention, with sizes that are not absurd together.
    pub(crate) fn new(
        config: &Config,
        decoder: DecoderConfig,
        attention: AttentionConfig,
        no_mla: &'static str,
    ) -> Result<Self, ConfigError> {
        let mixers = vec![MixerConfig::Attention(attention); decoder.num_layers()];
        Self::of_layers(config, decoder, mixers, no_mla)
    }

    /// A model with a mixer for each layer, with sizes that are not absurd together.
    pub(crate) fn of_layers(
        config: &Config,
        decoder: DecoderConfig,
        mixers: Vec<MixerConfig>,
        no_mla: &'static str,
    ) -> Result<Self, ConfigError> {
        config.dtype()?;
        for mixer in &mixers {
            let weights = match mixer {
                MixerConfig::Attention(attention) => {
                    let AttentionConfig { num_heads, head_dim, hidden_size, output_gate, .. } = *attention;
                    [num_heads * head_dim, hidden_size, if output_gate { 6 } else { 4 }]
                }
                MixerConfig::Linear(linear) => [linear.heads.projected(), linear.hidden_size, 2],
            };
            decoder.check_sizes(config, LAYER_TENSORS, &weights)?;
        }
        let mtp = Err(NO_MTP.to_string());
        Ok(Self { model: DecoderModel { decoder, mixers }, mtp, no_mla })
    }

    /// Loads the head for multi-token prediction of a checkpoint, for the decoder that was loaded from it on one rank
    /// of the CPU. A run leaves the head out:
    ///
    /// ```no_run
    /// # use candle_core::{Result, Tensor};
    /// # use model_families::spec::DecoderSpec;
    /// # use model_runtime::{Checkpoint, Decoder, Exec, KvCache, Step, StepContext, run_step};
    /// /// `hidden` [T, H]: the last hidden states of a step; `next`: the step with the tokens that follow its rows.
    /// fn draft(
    ///     spec: &DecoderSpec, checkpoint: &Checkpoint, decoder: &Decoder, hidden: &Tensor, next: &Step,
    /// ) -> Result<Vec<f32>> {
    ///     let head = spec.load_mtp(checkpoint, decoder, &Default::default())?;
    ///     let mut kv = KvCache::new(&head.info().states, 64, 16)?;
    ///     let context = &mut StepContext::default();
    ///     let logits = run_step(&head.after(hidden), next, &mut kv, None, context, &mut Exec::cpu())?;
    ///     Ok(logits.view().cpu::<f32>()?.to_vec())
    /// }
    /// ```
    ///
    /// # Errors
    /// A family or a config without such a head; a checkpoint without its tensors, or with others than the config says.
    pub fn load_mtp(
        &self,
        checkpoint: &Checkpoint,
        decoder: &Decoder,
        options: &LoadOptions,
    ) -> candle_core::Result<MtpHead> {
        let mtp = self.mtp.as_ref().map_err(|why| candle_core::Error::msg(why.clone()))?;
        let has = |name: &str| checkpoint.has(name);
        let layout = mtp.layout(&Geometry::default(), &has).map_err(candle_core::Error::wrap)?;
        let expected = layout.tensors.clone();
        if !expected.iter().any(|tensor| has(&tensor.name)) {
            candle_core::bail!(
                "{}: it has no head for multi-token prediction (expected `{}.weight` and {} tensors more); take the \
                 checkpoint as its authors published it",
                checkpoint.tensors.origin(),
                mtp.names.fc,
                expected.len() - 1
            )
        }
        checkpoint.verify(&expected, &["*"]).map_err(candle_core::Error::wrap)?;
        let device = Device::Cpu;
        let tensors = checkpoint.rank_view(&expected, layout.slices_for(&device));
        let context = BlockContext { quant: Some(Arc::new(tensors.clone())), ..options.context.clone() };
        let options = LoadOptions { context, ..options.clone() };
        let vb = tensors.var_builder(decoder.info().dtype, &device);
        mtp.load(decoder, &options.decoder(MoePath::Fused), vb)
    }
}

impl ModelSpec for DecoderSpec {
    fn decoder(&self) -> &DecoderConfig {
        &self.model.decoder
    }

    fn attention(&self) -> AttentionSpec<'_> {
        AttentionSpec::Layers(&self.model.mixers)
    }

    fn refuse(&self, options: &LoadOptions, _: DeviceChoice) -> Option<&'static str> {
        options.mla.map(|_| self.no_mla)
    }

    fn layout(&self, geometry: &Geometry, has: &dyn Fn(&str) -> bool) -> Result<TensorLayout, GeometryError> {
        self.model.layout(geometry, has)
    }

    fn mtp(&self) -> Option<&MtpConfig> {
        self.mtp.as_ref().ok()
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
        let device = if vb.device().is_cpu() { DeviceChoice::Cpu } else { DeviceChoice::Cuda(None) };
        if let Some(reason) = self.refuse(options, device) {
            candle_core::bail!("{reason}")
        }
        let options = options.decoder(MoePath::Fused);
        let (model, selection) = self.model.load(&options, vb)?;
        LoadedModel::new(Box::new(model), options.path, selection)
    }
}
