//! The projections of latent attention.

use candle_core::{DType, Result, Tensor};
use candle_nn::VarBuilder;
use moe_kernels::names::MlaNames;
use moe_kernels::quant::QuantUse;
use moe_kernels::{CpuIsa, Exec, Unread, View, ViewMut, Weight, linear_into};
use moe_layer::{BlockContext, load_weight};

use super::{MlaConfig, MlaForm};
use crate::attention::Lock;
use crate::layers::RmsNorm;

/// A projection, perhaps with a bias.
#[derive(Clone, Debug)]
pub(super) struct Projection {
    pub(super) weight: Weight,
    pub(super) bias: Option<Tensor>,
}

impl Projection {
    pub(super) fn load(
        [rows, columns]: [usize; 2],
        bias: bool,
        vb: VarBuilder,
        usage: QuantUse,
        context: &BlockContext,
    ) -> Result<Self> {
        let weight = load_weight(&vb, &[("", rows)], columns, usage, context)?;
        Ok(Self { weight, bias: bias.then(|| vb.get(rows, "bias")).transpose()? })
    }

    pub(super) fn packed(self, isa: Option<CpuIsa>) -> Result<Self> {
        let rows = self.weight.dims()[0];
        Ok(Self { weight: self.weight.packed(isa, rows)?, ..self })
    }

    pub(super) fn forward_into(&self, x: View, out: ViewMut, ex: &mut Exec) -> Result<()> {
        let bias = Lock::new(&self.bias)?;
        linear_into(x, self.weight.read()?.view()?, bias.view()?, out, ex)
    }
}

impl MlaConfig {
    /// Fails if the checkpoint has tensors of a layer that this config does not ask for and that change its results.
    pub(super) fn refuse_unread(&self, names: &MlaNames, vb: &VarBuilder) -> Result<()> {
        let mut unread = Unread::under(vb);
        let biased = [names.q_a, names.kv_a, names.o];
        for name in [names.q, names.q_a, names.q_b, names.kv_a, names.kv_b, names.o] {
            if !self.bias || !biased.contains(&name) {
                unread.bias(&format!("{name}.bias"));
            }
            unread.scales(&format!("{name}.weight"));
        }
        // Queries of the other kind beside the wanted ones; alone they are no layer of this config.
        let (wanted, others) = match self.q_lora_rank {
            Some(_) => (names.q_a, vec![names.q]),
            None => (names.q, vec![names.q_a, names.q_a_norm, names.q_b]),
        };
        if vb.contains_tensor(&format!("{wanted}.weight")) {
            others.iter().for_each(|name| unread.tensor(&format!("{name}.weight")));
        }
        unread.refuse(
            "MLA",
            "biases of the down-projections and of the output are read with `bias`, others not at all",
        )
    }
}

/// How queries and latents come from hidden states.
#[derive(Clone, Debug)]
pub(super) enum Down {
    /// One product after the other.
    Apart { query: Query, kv_a: Projection },
    /// Both in one product, queries first: what is read of them next is strided, which one kernel does on a GPU.
    Packed(Projection),
}

impl Down {
    pub(super) fn load(
        config: &MlaConfig,
        names: &MlaNames,
        vb: &VarBuilder,
        context: &BlockContext,
    ) -> Result<Self> {
        let (h, latent) = (config.hidden_size, config.kv_lora_rank + config.qk_rope_head_dim);
        let packs = config.q_lora_rank.is_none() && !config.bias && config.form == MlaForm::Absorbed;
        if packs && !vb.device().is_cpu() {
            let modules = [(names.q, config.query_rows()), (names.kv_a, latent)];
            let weight = load_weight(vb, &modules, h, QuantUse::Linear, context)?;
            return Ok(Self::Packed(Projection { weight, bias: None }));
        }
        let kv_a = Projection::load([latent, h], config.bias, vb.pp(names.kv_a), QuantUse::Linear, context)?;
        Ok(Self::Apart { query: Query::load(config, names, vb, context)?, kv_a })
    }

    pub(super) fn packed(self, isa: Option<CpuIsa>) -> Result<Self> {
        Ok(match self {
            Self::Apart { query, kv_a } => Self::Apart { query: query.packed(isa)?, kv_a: kv_a.packed(isa)? },
            Self::Packed(projection) => Self::Packed(projection.packed(isa)?),
        })
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

    pub(super) fn packed(self, isa: Option<CpuIsa>) -> Result<Self> {
        Ok(match self {
            Self::Direct(projection) => Self::Direct(projection.packed(isa)?),
            Self::Low { a, norm, b } => Self::Low { a: a.packed(isa)?, norm, b: b.packed(isa)? },
        })
    }

    /// `out` [T, Hq*(N+R)] f32.
    pub(super) fn forward_into(&self, x: View, out: ViewMut, ex: &mut Exec) -> Result<()> {
        let (a, norm, b) = match self {
            Self::Direct(projection) => return projection.forward_into(x, out, ex),
            Self::Low { a, norm, b } => (a, norm, b),
        };
        let dims = [x.rows(), norm.weight().elem_count()];
        let mut down = ex.scratch(DType::F32, &dims)?;
        a.forward_into(x, down.view_mut(), ex)?;
        let mut normed = ex.scratch(x.dtype(), &dims)?;
        norm.forward_into(down.view(), normed.view_mut(), ex)?;
        b.forward_into(normed.view(), out, ex)
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
    pub(super) fn load(config: &MlaConfig, vb: VarBuilder, context: &BlockContext) -> Result<Self> {
        let (heads, l) = (config.num_heads, config.kv_lora_rank);
        let (n, v) = (config.qk_nope_head_dim, config.v_head_dim);
        if config.form == MlaForm::Naive {
            let dims = [heads * (n + v), l];
            return Ok(Self::Naive(Projection::load(dims, false, vb, QuantUse::Linear, context)?));
        }
        // Absorbed into queries and outputs, it is read by heads and in both directions: in floats.
        let by_head = vb.get((heads * (n + v), l), "weight")?.reshape((heads, n + v, l))?;
        let w_uk = by_head.narrow(1, 0, n)?.transpose(1, 2)?.contiguous()?;
        Ok(Self::Absorbed { w_uk, w_uv: by_head.narrow(1, n, v)?.contiguous()? })
    }
}
