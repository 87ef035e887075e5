//! The projections of latent attention.

use candle_core::{DType, Result, Tensor};
use candle_nn::VarBuilder;
use moe_kernels::names::MlaNames;
use moe_kernels::quant::QuantUse;
use moe_kernels::{Exec, ViewMut, Weight};
use moe_layer::{BlockContext, load_weight};

use super::config::{MlaConfig, MlaForm};
use crate::layers::RmsNorm;
use crate::mixer::MixerIo;
use crate::projection::Projection;

/// How queries and latents come from hidden states.
#[derive(Clone, Debug)]
pub(super) enum Down {
    /// Two products, one after the other.
    Apart { query: Query, kv_a: Projection },
    /// One product for both, with the queries first. The ops after it read strided rows, which one kernel on a GPU
    /// does.
    Packed(Projection),
}

impl Down {
    pub(super) fn load(
        config: &MlaConfig,
        names: &MlaNames,
        vb: &VarBuilder,
        context: &BlockContext,
    ) -> Result<Self> {
        let h = config.hidden_size;
        let latent = config.kv_lora_rank + config.qk_rope_head_dim;
        let packs = config.q_lora_rank.is_none() && !config.bias && config.form == MlaForm::Absorbed;
        if packs && !vb.device().is_cpu() {
            let modules = [(names.q, config.query_rows()), (names.kv_a, latent)];
            let weight = load_weight(vb, &modules, h, QuantUse::Linear, context)?;
            return Ok(Self::Packed(Projection { weight, bias: None }));
        }
        let kv_a = Projection::load([latent, h], config.bias, vb.pp(names.kv_a), QuantUse::Linear, context)?;
        Ok(Self::Apart { query: Query::load(config, names, vb, context)?, kv_a })
    }
}

/// How queries come from hidden states.
#[derive(Clone, Debug)]
pub(super) enum Query {
    Direct(Projection),
    Low { a: Projection, norm: RmsNorm, b: Projection },
}

impl Query {
    pub(super) fn load(
        config: &MlaConfig,
        names: &MlaNames,
        vb: &VarBuilder,
        context: &BlockContext,
    ) -> Result<Self> {
        let rows = config.query_rows();
        let (h, load) = (config.hidden_size, |dims: [usize; 2], bias: bool, name: &str| {
            Projection::load(dims, bias, vb.pp(name), QuantUse::Linear, context)
        });
        let Some(rank) = config.q_lora_rank else {
            return Ok(Self::Direct(load([rows, h], false, names.q)?));
        };
        Ok(Self::Low {
            a: load([rank, h], config.bias, names.q_a)?,
            norm: RmsNorm::load(rank, config.norm_eps, vb.pp(names.q_a_norm))?,
            b: load([rows, rank], false, names.q_b)?,
        })
    }

    /// The product that reads hidden states.
    pub(super) fn first(&self) -> &Projection {
        match self {
            Self::Direct(projection) => projection,
            Self::Low { a, .. } => a,
        }
    }

    /// `out` [T, Hq*(N+R)] f32.
    pub(super) fn forward_into(&self, io: &MixerIo, out: ViewMut, ex: &mut Exec) -> Result<()> {
        let (a, norm, b) = match self {
            Self::Direct(projection) => return projection.first_into(io, out, ex),
            Self::Low { a, norm, b } => (a, norm, b),
        };
        let mut down = ex.scratch(DType::F32, &[out.rows(), norm.weight().elem_count()])?;
        a.first_into(io, down.view_mut(), ex)?;
        norm.with_pre_norm(|norm| b.normed_into(down.view(), &norm, out, ex))
    }
}

/// The up-projection of latents, as its form needs it.
#[derive(Clone, Debug)]
pub(super) enum Up {
    /// W_UKᵀ [Hq, L, N] and W_UV [Hq, V, L].
    Absorbed { w_uk: Tensor, w_uv: Tensor },
    /// [Hq*(N+V), L].
    Naive(Projection),
}

impl Up {
    /// Loads the projection from one matrix, or from a matrix of keys and a matrix of values if the checkpoint has two.
    pub(super) fn load(
        config: &MlaConfig,
        names: &MlaNames,
        vb: &VarBuilder,
        context: &BlockContext,
    ) -> Result<Self> {
        let heads = config.num_heads;
        let l = config.kv_lora_rank;
        let n = config.qk_nope_head_dim;
        let v = config.v_head_dim;
        let is_split = !vb.contains_tensor(&format!("{}.weight", names.kv_b))
            && vb.contains_tensor(&format!("{}.weight", names.k_b));
        if is_split {
            // Queries and outputs read both matrices by heads, and in floats.
            let w_uk = vb.pp(names.k_b).get((heads * l, n), "weight")?.reshape((heads, l, n))?;
            let w_uv = vb.pp(names.v_b).get((heads * v, l), "weight")?.reshape((heads, v, l))?;
            if config.form == MlaForm::Absorbed {
                return Ok(Self::Absorbed { w_uk, w_uv });
            }
            let by_head = Tensor::cat(&[w_uk.transpose(1, 2)?.contiguous()?, w_uv], 1)?;
            let weight = Weight::new(by_head.reshape((heads * (n + v), l))?)?;
            return Ok(Self::Naive(Projection { weight, bias: None }));
        }
        let vb = vb.pp(names.kv_b);
        if config.form == MlaForm::Naive {
            let weight = load_weight(&vb, &[("", heads * (n + v))], l, QuantUse::Linear, context)?;
            return Ok(Self::Naive(Projection { weight, bias: None }));
        }
        // This matrix is read by heads and in floats, too.
        let by_head = vb.get((heads * (n + v), l), "weight")?.reshape((heads, n + v, l))?;
        let w_uk = by_head.narrow(1, 0, n)?.transpose(1, 2)?.contiguous()?;
        Ok(Self::Absorbed { w_uk, w_uv: by_head.narrow(1, n, v)?.contiguous()? })
    }
}
