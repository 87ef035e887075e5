//! Loading a decoder, or one rank's part of it.

use std::ops::Range;
use std::panic;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use candle_core::{DType, Error, Result, bail};
use candle_nn::VarBuilder;
use moe_kernels::QuantScheme;
use moe_layer::{
    BackendSelection, BlockContext, BlockOptions, ExpertOffload, GatedMlp, MoePath, Reason, SharedExperts,
    load_layer_on, shared_fit_slots,
};

use super::config::{DecoderConfig, MoeConfig};
use super::gate::router_gate;
use super::layer::{Decoder, DecoderLayer, Ends, Mlp};
use super::layout::{DENSE, SHARED, WITH_SHARED};
use crate::config::RopeConfig;
use crate::kv_cache::LayerStates;
use crate::layers::{Embedding, LmHead, RmsNorm};
use crate::mixer::Mixer;
use crate::model::{ModelInfo, MoeInfo};
use crate::rope::LayerRopes;
use crate::vocab::VocabParallel;

/// How a decoder is loaded.
#[derive(Clone, Copy, Debug)]
pub struct DecoderOptions<'a> {
    /// The path of its experts.
    pub path: MoePath,
    /// Name of the expert backend of the fused path; `None` lets the oracle choose.
    pub backend: Option<&'a str>,
    /// The rank's place, and how MoE layers cut their tokens.
    pub context: &'a BlockContext,
    /// Bytes of this rank's experts that are in host memory instead of its GPU's, for all layers together; `None`: all
    /// are on the device.
    pub expert_offload: Option<usize>,
}

impl DecoderOptions<'_> {
    /// How many experts of each layer are in host memory, for weights of `dtype`.
    fn offload(&self, config: &DecoderConfig, vb: &VarBuilder) -> Result<Option<ExpertOffload>> {
        let Some(bytes) = self.expert_offload else { return Ok(None) };
        if self.path == MoePath::Legacy {
            bail!(
                "`expert_offload`: experts one after the other are all on the device; drop `moe_path` legacy"
            )
        }
        let moe =
            config.moe.as_ref().map(|moe| (moe.router.num_experts, moe.router.top_k, moe.intermediate_size));
        let (experts, top_k, width) = moe.unwrap_or_default();
        // This rank's part of an expert's width.
        let width = self.context.geometry.expert_intermediate(width).map_err(Error::wrap)?.range.len();
        let layers = config.moe_layers();
        let names = &config.names;
        let dtype = vb.dtype();
        let first = format!("{}.{}", names.layers, layers.first().copied().unwrap_or(0));
        let mlp = names.sparse_mlp(|name| vb.contains_tensor(&format!("{first}.{name}")));
        let module = |name: &str| format!("{first}.{mlp}.{}.0.{name}", names.experts);
        let matrix = |name: &str, dims: (usize, usize)| -> Result<usize> {
            let scheme =
                self.context.quant.as_ref().map(|source| source.scheme(&module(name))).transpose()?;
            Ok(scheme.unwrap_or(QuantScheme::NONE).matrix_bytes(dims, dtype))
        };
        let expert = matrix(names.matrices.gate, (2 * width, config.hidden_size))?
            + matrix(names.matrices.down, (config.hidden_size, width))?;
        ExpertOffload::within(bytes, (experts, top_k), expert, layers.len()).map(Some)
    }
}

impl Decoder {
    /// Loads the tensors of a decoder. `vb` is at the root of the checkpoint, has the model dtype and contains this
    /// rank's slices ([`DecoderConfig::layout`]). `mixer` loads the mixer of a layer, by its number, from the tensors
    /// under the layer's prefix. Also returns the oracle's choice of expert backend, if there was a choice.
    ///
    /// # Errors
    /// No layers; rotary settings of another number of layers; missing or wrongly shaped tensors; sizes that the
    /// geometry cannot cut; any error of the expert path.
    pub fn load(
        config: &DecoderConfig,
        options: &DecoderOptions,
        vb: VarBuilder,
        mixer: impl Fn(usize, VarBuilder) -> Result<Box<dyn Mixer>> + Sync,
    ) -> Result<(Self, Option<BackendSelection>)> {
        Self::load_between(None, config, options, vb, mixer)
    }

    /// [`load`](Self::load) with the embedding and vocabulary projection of another decoder, or its own.
    pub(super) fn load_between(
        ends: Option<Ends>,
        config: &DecoderConfig,
        options: &DecoderOptions,
        vb: VarBuilder,
        mixer: impl Fn(usize, VarBuilder) -> Result<Box<dyn Mixer>> + Sync,
    ) -> Result<(Self, Option<BackendSelection>)> {
        if config.num_layers() == 0 {
            bail!("decoder: expected at least one layer, got none")
        }
        if config.rope.len() != config.num_layers() {
            bail!(
                "rotary embedding: expected settings for each of {} layers, got {}",
                config.num_layers(),
                config.rope.len()
            )
        }
        let names = &config.names;
        let offload = options.offload(config, &vb)?;
        let context = &BlockContext { offload, names: names.matrices, ..options.context.clone() };
        let options = &DecoderOptions { context, ..*options };
        let layers = config.moe_layers().len();
        let experts = config.num_experts();
        context.placements.check(layers, experts, &context.geometry)?;
        let ends = ends.map_or_else(|| Ends::load(config, context, &vb), Ok)?;
        let mlps = MlpLoader { config, options };
        // On devices the results of several ranks are not added after each product. The norms that follow add them,
        // unless their weights are in f32 next to a model in another dtype.
        let norms_add = !config.zero_centred_norms || vb.dtype() == DType::F32;
        let shares = context.geometry.tp_size > 1 && !vb.device().is_cpu() && norms_add;
        let sums = shares.then(|| context.groups.tp.clone());
        let load = |index: usize| -> Result<_> {
            let vb = vb.pp(names.layers).pp(index);
            let input_norm = config.norm(vb.pp(names.input_norm))?;
            let mixer = mixer(index, vb.clone())?;
            let post_attention_norm = config.norm(vb.pp(names.post_attention_norm))?;
            let (mlp, chosen) = mlps.load(index, &vb)?;
            let deferred = [false; 2];
            let mut layer = DecoderLayer { input_norm, mixer, post_attention_norm, mlp, deferred };
            if sums.is_some() {
                layer.deferred = [layer.mixer.defer_sum(), layer.mlp.defer_sum()];
            }
            Ok((layer, chosen))
        };
        // Layers are loaded together only onto a device. On the CPU every layer fills memory with all threads. A layer
        // with experts in host memory is first on the device as a whole, so only one of these is loaded at a time, and
        // the device needs room for only one.
        let together = !vb.device().is_cpu() && !context.agrees_while_loading() && context.offload.is_none();
        let loaded = each_layer(config.num_layers(), if together { LOADING } else { 1 }, load)?;
        let (layers, chosen): (Vec<DecoderLayer>, Vec<_>) = loaded.into_iter().unzip();
        let states = layers.iter().map(|layer| layer.mixer.state()).collect();
        let decoder = Self {
            info: config.info(vb.dtype(), states),
            ends,
            layers,
            norm: config.norm(vb.pp(names.norm))?,
            ropes: LayerRopes::new(&config.rope),
            sums,
            ends_few: context.geometry.world_size == 1 && vb.device().is_cpu(),
        };
        Ok((decoder, chosen.into_iter().flatten().next_back()))
    }
}

impl Ends {
    /// Loads both, or this rank's part of them.
    fn load(config: &DecoderConfig, context: &BlockContext, vb: &VarBuilder) -> Result<Self> {
        let h = config.hidden_size;
        let names = &config.names;
        let tp = &context.groups.tp;
        let vocab = (context.geometry.tp_size > 1).then(|| VocabParallel::new(config.vocab_size, tp.clone()));
        let held = context.geometry.vocab_shard(config.vocab_size).len();
        let mut embedding = Embedding::load_on(held, h, vb.pp(names.embedding), context)?;
        // GGUF files quantise the embedding. On devices rows are looked up as floats, and logits are products with
        // another copy of the matrix, as it is in the file.
        let source = context.quant.as_ref();
        let scheme = source.map(|source| source.scheme(names.embedding)).transpose()?;
        let is_as_stored = embedding.weight().scheme() == scheme.unwrap_or(QuantScheme::NONE);
        let shares = config.tie_word_embeddings && is_as_stored;
        if shares {
            embedding = embedding.packed(context.cpu_isa)?;
        }
        let head = if config.tie_word_embeddings { names.embedding } else { names.lm_head };
        let lm_head = match shares {
            true => LmHead::tied(&embedding),
            false => LmHead::load_on(held, h, vb.pp(head), context)?.packed(context.cpu_isa)?,
        };
        Ok(Self {
            embedding: embedding.with_vocab_parallel(vocab.clone()),
            lm_head: lm_head.with_vocab_parallel(vocab),
        })
    }
}

/// The number of threads that load layers onto a device: while some read, others look up names, allocate memory or wait
/// for the end of a layer.
const LOADING: usize = 4;

/// The results of `load` for each layer. Several threads load layers: while one waits for memory or for its last
/// copies, or looks up small tensors, the others keep the bus busy. They are not threads of the pool, because the first
/// layer may wait for other ranks.
fn each_layer<T: Send>(
    count: usize,
    threads: usize,
    load: impl Fn(usize) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let failed = AtomicBool::new(false);
    let run = |layers: Range<usize>| -> Result<Vec<T>> {
        let load = |layer| load(layer).inspect_err(|_| failed.store(true, Ordering::Relaxed));
        layers.take_while(|_| !failed.load(Ordering::Relaxed)).map(load).collect()
    };
    let part = |thread: usize| count * thread / threads..count * (thread + 1) / threads;
    thread::scope(|scope| {
        let run = &run;
        let part = &part;
        let spawned =
            (1..threads).map(|thread| thread::Builder::new().spawn_scoped(scope, move || run(part(thread))));
        let spawned = spawned.collect::<std::io::Result<Vec<_>>>()?;
        let mut parts = vec![run(part(0))];
        parts.extend(
            spawned
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|payload| panic::resume_unwind(payload))),
        );
        let parts = parts.into_iter().collect::<Result<Vec<_>>>()?;
        Ok(parts.into_iter().flatten().collect())
    })
}

/// Loads the MLPs of the layers.
struct MlpLoader<'a> {
    config: &'a DecoderConfig,
    options: &'a DecoderOptions<'a>,
}

impl MlpLoader<'_> {
    /// The MLP of the layer at `vb`, and the oracle's choice for its experts.
    fn load(&self, index: usize, vb: &VarBuilder) -> Result<(Mlp, Option<BackendSelection>)> {
        let config = self.config;
        let DecoderOptions { path, context, .. } = *self.options;
        let names = &config.names;
        let Some(moe) = config.moe.as_ref().filter(|_| config.is_sparse[index]) else {
            let mlp = self.gated_mlp(DENSE, config.intermediate_size, vb.pp(names.mlp))?;
            return Ok((Mlp::Dense(mlp), None));
        };
        let vb = vb.pp(names.sparse_mlp(|name| vb.contains_tensor(name)));
        let layer = config.is_sparse.iter().take(index).filter(|is_sparse| **is_sparse).count();
        let mut options = self.block(moe, layer);
        let gate = router_gate(names, &vb);
        let Some(name) = names.shared_experts.filter(|_| moe.shared_intermediate_size > 0) else {
            let (sparse, chosen) = load_layer_on(path, &options, context, gate, vb.pp(names.experts))?;
            return Ok((Mlp::Sparse(Box::new(sparse)), chosen));
        };
        let packs = vb.pp(WITH_SHARED);
        let quantised = self.is_quantised(&vb.pp(names.experts).pp(0))? || self.is_quantised(&vb.pp(name))?;
        let count = moe.shared_experts();
        let place = (vb.dtype(), quantised, vb.device());
        let fits = shared_fit_slots(count, path, self.options.backend, place, context);
        let part = |part| Err(Reason::Part { part });
        let shown = fits.and_then(|count| match names.shared_expert_gate {
            Some(_) => part("shared experts with a gate of their own"),
            None if packs.contains_tensor("w13") => Ok(count),
            None => part("shared experts that their source does not show in a pack"),
        });
        let apart = match shown {
            Ok(count) => {
                options.router.num_fused_shared_experts = count;
                let (sparse, chosen) = load_layer_on(path, &options, context, gate, packs)?;
                return Ok((Mlp::Sparse(Box::new(sparse)), chosen));
            }
            Err(apart) => apart,
        };
        let shared = self.gated_mlp(SHARED, moe.shared_intermediate_size, vb.pp(name))?;
        let shared = SharedExperts::load_gated(shared, names.shared_expert_gate.map(|gate| vb.pp(gate)))?
            .with_stream(context.shared_experts_stream, Some(apart));
        let (sparse, chosen) = load_layer_on(path, &options, context, gate, vb.pp(names.experts))?;
        Ok((Mlp::Sparse(Box::new(sparse.with_shared_experts(shared)?)), chosen))
    }

    /// Whether the checkpoint holds the matrices of an MLP quantised.
    fn is_quantised(&self, mlp: &VarBuilder) -> Result<bool> {
        let Some(source) = &self.options.context.quant else { return Ok(false) };
        Ok(source.scheme(&format!("{}.{}", mlp.prefix(), self.config.names.matrices.gate))?
            != QuantScheme::NONE)
    }

    /// This rank's part of a gated MLP.
    fn gated_mlp(&self, what: &'static str, intermediate: usize, vb: VarBuilder) -> Result<GatedMlp> {
        let config = self.config;
        let context = self.options.context;
        let ranks = context.row_parallel(what, intermediate)?;
        let width = intermediate / context.geometry.tp_size;
        let mlp = GatedMlp::load_on(config.hidden_size, width, config.activation, vb, context)?;
        Ok(mlp.packed(context.cpu_isa)?.with_row_parallel(ranks))
    }

    /// The settings of the sparse block of a layer. `layer` is its index among the MoE layers.
    fn block(&self, moe: &MoeConfig, layer: usize) -> BlockOptions {
        BlockOptions {
            router: moe.router.clone(),
            hidden_size: self.config.hidden_size,
            intermediate_size: moe.intermediate_size,
            activation: self.config.activation,
            expert_bias: moe.expert_bias,
            layer,
            backend: self.options.backend.map(str::to_string),
        }
    }
}

impl DecoderConfig {
    /// A norm between layers.
    pub(super) fn norm(&self, vb: VarBuilder) -> Result<RmsNorm> {
        let load = if self.zero_centred_norms { RmsNorm::load_zero_centred } else { RmsNorm::load };
        load(self.hidden_size, self.rms_norm_eps, vb)
    }

    fn info(&self, dtype: DType, states: LayerStates) -> ModelInfo {
        let moe = |moe: &MoeConfig| MoeInfo {
            layers: self.moe_layers(),
            num_experts: moe.router.num_experts,
            top_k: moe.router.top_k,
        };
        ModelInfo {
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            num_layers: self.num_layers(),
            max_context_len: self.max_context_len(),
            keys_depend_on_prompt_len: self.rope.iter().any(RopeConfig::depends_on_prompt_len),
            dtype,
            states,
            moe: self.moe.as_ref().filter(|_| self.is_sparse.contains(&true)).map(moe),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::time::Duration;

    use super::*;

    #[test]
    fn layers_come_in_their_order() {
        for count in 0..6 {
            for threads in [1, 2, 4] {
                let layers = each_layer(count, threads, |layer| Ok(layer * 10)).unwrap();
                assert_eq!(layers, (0..count).map(|layer| layer * 10).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn a_layer_that_fails_ends_both_halves() {
        for wrong in [0, 500] {
            let loaded = AtomicUsize::new(0);
            let load = |layer: usize| {
                if layer == wrong {
                    bail!("layer {layer}")
                }
                thread::sleep(Duration::from_millis(1));
                Ok(loaded.fetch_add(1, Ordering::Relaxed))
            };
            let e = each_layer(1000, 2, load).unwrap_err().to_string();
            assert!(e.contains(&format!("layer {wrong}")), "{e}");
            assert!(loaded.into_inner() < 500, "the other half went on");
        }
    }
}
