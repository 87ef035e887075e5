//! A layer of latent attention as it is held, and how it is loaded.

use candle_core::{Result, Tensor};
use candle_nn::VarBuilder;
use moe_comm::RowParallel;
use moe_kernels::names::MlaNames;
use moe_layer::BlockContext;

use super::config::MlaConfig;
use super::projections::{Down, Up};
use crate::projection::Projection;

/// An MLA layer.
#[derive(Clone, Debug)]
pub struct MlaAttention {
    pub(super) config: MlaConfig,
    pub(super) down: Down,
    pub(super) kv_a_norm: Tensor,
    pub(super) up: Up,
    pub(super) o: Projection,
    /// The ranks that cut the heads, if these are a part of them.
    pub(super) ranks: Option<RowParallel>,
}

impl MlaAttention {
    /// Loads the tensors of a layer, in the model dtype.
    ///
    /// # Errors
    /// Sizes of zero; an odd rotated part; missing or wrongly shaped tensors; tensors that `config` does not ask for
    /// and that would change the results, by name.
    pub fn load(config: MlaConfig, names: MlaNames, vb: VarBuilder) -> Result<Self> {
        Self::load_on(config, names, vb, &BlockContext::default())
    }

    /// [`load`](Self::load) on a rank, where projections may be quantised.
    ///
    /// # Errors
    /// The errors of `load`; quantised tensors that are not what the header says.
    pub fn load_on(
        config: MlaConfig,
        names: MlaNames,
        vb: VarBuilder,
        context: &BlockContext,
    ) -> Result<Self> {
        config.check()?;
        config.refuse_unread(&names, &vb)?;
        let h = config.hidden_size;
        let l = config.kv_lora_rank;
        let out = config.num_heads * config.v_head_dim;
        Ok(Self {
            down: Down::load(&config, &names, &vb, context)?,
            kv_a_norm: vb.pp(names.kv_a_norm).get(l, "weight")?,
            up: Up::load(&config, &names, &vb, context)?,
            o: Projection::load(
                [h, out],
                config.bias,
                vb.pp(names.o),
                context.row_parallel_use(out),
                context,
            )?,
            ranks: None,
            config,
        })
    }

    /// Makes this a part of a layer whose heads are divided among ranks. The config counts this rank's heads, `q_b` (or
    /// `q`) and `kv_b` have the rows of these heads, `o` has their columns, and all other tensors are whole. In the
    /// absorbed form every rank caches the same latent rows.
    #[must_use]
    pub fn with_row_parallel(self, ranks: impl Into<Option<RowParallel>>) -> Self {
        Self { ranks: ranks.into(), ..self }
    }

    /// The config.
    pub fn config(&self) -> &MlaConfig {
        &self.config
    }
}
