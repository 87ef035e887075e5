//! Loading an attention layer, and checks of what it is made of.

use candle_core::{DType, Result, Tensor, bail};
use candle_nn::VarBuilder;
use moe_kernels::names::AttentionNames;
use moe_kernels::quant::QuantUse;
use moe_kernels::{QuantScheme, Weight};
use moe_layer::{BlockContext, load_packed, load_weight};
use tracing::warn;

use super::config::{AttentionConfig, AttentionWeights};
use super::layer::{Attention, Held};
use crate::projection::Projection;

impl Attention {
    /// From weights whose shapes match the config.
    pub fn new(config: AttentionConfig, weights: AttentionWeights) -> Result<Self> {
        config.check()?;
        let AttentionWeights { qkv, qkv_bias, o, o_bias, qk_norm } = weights;
        let heads = config.query_key_heads();
        let weights = Held {
            qkv: Projection {
                weight: Weight::new(config.in_rotated_order(qkv, heads)?)?,
                bias: qkv_bias.map(|bias| config.in_rotated_order(bias, heads)).transpose()?,
            },
            o: Projection { weight: Weight::new(o)?, bias: o_bias },
            qk_norm: qk_norm.map(|norms| config.norms_in_rotated_order(norms)).transpose()?,
        };
        Self::of(config, weights)
    }

    fn of(config: AttentionConfig, weights: Held) -> Result<Self> {
        config.check()?;
        let h = config.hidden_size;
        let n = config.qkv_rows();
        let q = config.num_heads * config.head_dim;
        let Held { qkv, o, qk_norm } = &weights;
        let dtype = qkv.weight.dtype();
        let check_of = |name: &str, got: (&[usize], DType), dims: &[usize]| -> Result<()> {
            if got != (dims, dtype) {
                bail!(
                    "attention: expected {name} {dims:?} of dtype {}, got {:?} of {}",
                    dtype.as_str(),
                    got.0,
                    got.1.as_str()
                )
            }
            Ok(())
        };
        let check = |name: &str, tensor: &Tensor, dims: &[usize]| {
            check_of(name, (tensor.dims(), tensor.dtype()), dims)
        };
        check_of("qkv", (qkv.weight.dims(), dtype), &[n, h])?;
        check_of("o", (o.weight.dims(), o.weight.dtype()), &[h, q])?;
        for (name, wanted, bias, rows) in
            [("qkv_bias", config.qkv_bias, &qkv.bias, n), ("o_bias", config.o_bias, &o.bias, h)]
        {
            match bias {
                Some(bias) if wanted => check(name, bias, &[rows])?,
                None if !wanted => {}
                _ => bail!("attention: expected {name} to be present: {wanted}, got {}", bias.is_some()),
            }
        }
        match (qk_norm, config.norm_widths()) {
            (Some((q_norm, k_norm)), Some([q, k])) => {
                check("the norm of q", q_norm, &[q])?;
                check("the norm of k", k_norm, &[k])?;
            }
            (None, None) => {}
            (got, wanted) => bail!(
                "attention: expected qk_norm to be present: {}, got {}",
                wanted.is_some(),
                got.is_some()
            ),
        }
        let scale = config.softmax_scale.unwrap_or((config.head_dim as f64).powf(-0.5)) as f32;
        Ok(Self { config, weights, scale, ranks: None })
    }

    /// Loads the tensors of a layer; q, k and v go straight into their pack.
    pub fn load(config: AttentionConfig, names: AttentionNames, vb: VarBuilder) -> Result<Self> {
        Self::load_on(config, names, vb, &BlockContext::default())
    }

    /// [`load`](Self::load) on a rank, where projections may be quantised.
    ///
    /// # Errors
    /// Missing or wrongly shaped tensors; quantised ones that are not what the header says; tensors that `config` does not
    /// ask for and that would change the results, by name: biases, norms of q and k, `sinks`.
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
        let modules = [(names.q, q), (names.k, kv), (names.v, kv)];
        let biases = modules.map(|(name, rows)| (format!("{name}.bias"), rows));
        let norm = |name: &str, width: usize| vb.get(width, &format!("{name}.weight"));
        let heads = config.query_key_heads();
        let in_order = |tensor: Tensor| config.in_rotated_order(tensor, heads);
        let qkv = match config.is_in_rotated_order() {
            false => Weight::new(in_order(load_floats(&vb, &modules, h, context)?)?)?,
            true => load_weight(&vb, &modules, h, QuantUse::Linear, context)?,
        };
        let qkv_bias = config.qkv_bias.then(|| in_order(load_packed(&vb, &biases, &[])?)).transpose()?;
        let output = context.row_parallel_use(q);
        let weights = Held {
            qkv: Projection { weight: qkv, bias: qkv_bias }.packed(context.cpu_isa)?,
            o: Projection::load([h, q], config.o_bias, vb.pp(names.o), output, context)?,
            qk_norm: match config.norm_widths() {
                Some([q, k]) => {
                    Some(config.norms_in_rotated_order((norm(names.q_norm, q)?, norm(names.k_norm, k)?))?)
                }
                None => None,
            },
        };
        Self::of(config, weights)
    }
}

/// The rows of `modules` under each other as floats: where their order changes, quantised rows are not kept as they are.
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
                warn!(
                    "{name} is loaded as floats: kernels rotate heads in another order, so its rows change their places"
                );
            }
        }
    }
    let parts: Vec<_> = modules.iter().map(|(module, rows)| (format!("{module}.weight"), *rows)).collect();
    load_packed(vb, &parts, &[columns])
}
