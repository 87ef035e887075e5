//! An attention layer from tensors or from a checkpoint.

use candle_core::{DType, Result, Tensor};
use candle_nn::VarBuilder;
use moe_kernels::names::AttentionNames;
use moe_kernels::quant::QuantUse;
use moe_kernels::{QuantScheme, Weight};
use moe_layer::{BlockContext, load_packed, load_weight};
use tracing::warn;

use super::config::{AttentionConfig, AttentionWeights};
use super::layer::{Attention, LayerWeights};
use crate::projection::Projection;

impl Attention {
    /// Makes a layer from weights.
    ///
    /// # Errors
    /// A config whose sizes do not fit together; weights of other dims or dtypes than the config implies, present
    /// where the config does not ask for them, or absent where it does. The error names the field.
    pub fn new(config: AttentionConfig, weights: AttentionWeights) -> Result<Self> {
        config.check()?;
        weights.check(&config)?;
        let AttentionWeights { qkv, qkv_bias, o, o_bias, qk_norm, sinks } = weights;
        let weights = LayerWeights {
            qkv: config.projection(qkv, qkv_bias)?,
            o: Projection { weight: Weight::new(o)?, bias: o_bias },
            qk_norm: qk_norm.map(|norms| config.norms_in_rotated_order(norms)).transpose()?,
            sinks: sinks.map(|sinks| sinks.to_dtype(DType::F32)).transpose()?,
        };
        Ok(Self::of(config, weights))
    }

    /// A layer of weights that fit the config.
    fn of(config: AttentionConfig, weights: LayerWeights) -> Self {
        let scale = config.softmax_scale.unwrap_or((config.head_dim as f64).powf(-0.5)) as f32;
        Self { config, weights, scale, ranks: None }
    }

    /// Loads the tensors of a layer; q, k and v go straight into their pack.
    pub fn load(config: AttentionConfig, names: AttentionNames, vb: VarBuilder) -> Result<Self> {
        Self::load_on(config, names, vb, &BlockContext::default())
    }

    /// [`load`](Self::load) on a rank, where projections may be quantised.
    ///
    /// # Errors
    /// Missing or wrongly shaped tensors; quantised ones that are not what the header says; tensors that `config` does
    /// not ask for and that would change the results, by name: biases, norms of q and k, `sinks`.
    pub fn load_on(
        config: AttentionConfig,
        names: AttentionNames,
        vb: VarBuilder,
        context: &BlockContext,
    ) -> Result<Self> {
        config.check()?;
        config.refuse_unread(&names, &vb)?;
        let h = config.hidden_size;
        let d = config.head_dim;
        let q = config.num_heads * d;
        let kv = config.num_kv_heads * d;
        let modules = [(names.q, config.stored_query_rows()), (names.k, kv), (names.v, kv)];
        let biases = modules.map(|(name, rows)| (format!("{name}.bias"), rows));
        let norm = |name: &str, width: usize| {
            let name = format!("{name}.weight");
            match config.zero_centred_norms {
                true => vb.to_dtype(DType::F32).get(width, &name)? + 1.0,
                false => vb.get(width, &name),
            }
        };
        let qkv_bias = config.qkv_bias.then(|| load_packed(&vb, &biases, &[])).transpose()?;
        let qkv = match config.is_in_stored_order() {
            false => config.projection(load_floats(&vb, &modules, h, context)?, qkv_bias)?,
            true => {
                let weight = load_weight(&vb, &modules, h, QuantUse::Linear, context)?;
                Projection { weight, bias: qkv_bias }
            }
        };
        let output = context.row_parallel_use(q);
        let weights = LayerWeights {
            qkv: qkv.packed(context.cpu_isa)?,
            o: Projection::load([h, q], config.o_bias, vb.pp(names.o), output, context)?,
            qk_norm: match config.norm_widths() {
                Some([q, k]) => {
                    Some(config.norms_in_rotated_order((norm(names.q_norm, q)?, norm(names.k_norm, k)?))?)
                }
                None => None,
            },
            sinks: match config.sinks {
                true => Some(vb.get_with_hints_dtype(
                    config.num_heads,
                    names.sinks,
                    Default::default(),
                    DType::F32,
                )?),
                false => None,
            },
        };
        Ok(Self::of(config, weights))
    }
}

impl AttentionConfig {
    /// Whether kernels read the rows of q, k and v in the order in which they are stored.
    pub(super) fn is_in_stored_order(&self) -> bool {
        self.is_in_rotated_order() && !self.output_gate
    }

    /// The product of q, k and v, in the order in which kernels rotate heads, and of the output gate, from the stored
    /// rows.
    fn projection(&self, rows: Tensor, bias: Option<Tensor>) -> Result<Projection> {
        let heads = self.query_key_heads();
        let ordered = |rows: Tensor| self.in_rotated_order(self.with_gate_last(rows)?, heads);
        Ok(Projection { weight: Weight::new(ordered(rows)?)?, bias: bias.map(ordered).transpose()? })
    }
}

/// The rows of `modules`, one after the other, as floats: if their order changes, quantised rows cannot be kept.
fn load_floats(
    vb: &VarBuilder,
    modules: &[(&str, usize)],
    columns: usize,
    context: &BlockContext,
) -> Result<Tensor> {
    if let Some(source) = &context.quant {
        for (module, _) in modules {
            let name = format!("{}.{module}", vb.prefix());
            if source.scheme(&name)? != QuantScheme::NONE {
                warn!("{name} is loaded as floats: kernels take the rows of its heads in another order");
            }
        }
    }
    let parts: Vec<_> = modules.iter().map(|(module, rows)| (format!("{module}.weight"), *rows)).collect();
    load_packed(vb, &parts, &[columns])
}
