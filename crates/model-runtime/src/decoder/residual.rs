//! The residual stream of a step, and how sub-layers read and write it.
//!
//! A sub-layer reads the norm of the stream and adds to it. The norm may be taken by the launch that added last, by one of
//! its own, or inside the sub-layer; likewise the addition. This is the one place where all of these meet.

use candle_core::{DType, Result};
use moe_comm::Communicator;
use moe_kernels::plan::Fusion;
use moe_kernels::{Exec, MonolithicIo, Scratch, StepContext, View};
use moe_layer::AddNorm;
use tracing::trace_span;

use super::plan::LayerForm;
use super::{DecoderLayer, Mlp, SelfAttention};
use crate::kv_cache::KvLayer;
use crate::layers::RmsNorm;
use crate::rope::RopeRows;
use crate::step::StepViews;

/// The residual stream [T, H] f32 with what sub-layers hand each other.
pub(super) struct Residual<'a> {
    pub stream: Scratch,
    /// Output of a sub-layer that is to be added, [T, H] f32.
    delta: Scratch,
    /// Norm of the stream, [T, H] in the model dtype, if `normed`.
    x: Scratch,
    /// Whether `x` is the norm that the next sub-layer reads.
    normed: bool,
    /// The ranks that share each token, where norms add their sums.
    ranks: Option<&'a dyn Communicator>,
    /// Whether each of these ranks keeps the stream of some rows alone: then only additions with their sums keep it right.
    shared: bool,
}

impl<'a> Residual<'a> {
    /// A stream of unspecified rows.
    pub fn new(
        dims: &[usize],
        dtype: DType,
        ranks: Option<&'a dyn Communicator>,
        shared: bool,
        ex: &Exec,
    ) -> Result<Self> {
        let stream = ex.scratch(DType::F32, dims)?;
        let (delta, x) = (ex.scratch(DType::F32, dims)?, ex.scratch(dtype, dims)?);
        Ok(Self { stream, delta, x, normed: false, ranks, shared })
    }

    /// The stream's norm, [T, H] in the model dtype.
    pub fn normed(&mut self, norm: &RmsNorm, ex: &mut Exec) -> Result<View<'_>> {
        if !self.normed {
            norm.forward_into(self.stream.view(), self.x.view_mut(), ex)?;
            self.normed = true;
        }
        Ok(self.x.view())
    }

    /// Adds `delta`, of which ranks may hold parts, and takes the norm that comes next.
    fn add(&mut self, next: &RmsNorm, deferred: bool, ex: &mut Exec) -> Result<()> {
        let Self { stream, delta, x, .. } = self;
        self.normed = true;
        match self.ranks {
            Some(ranks) if self.shared => {
                next.add_shared_into(ranks, delta.view_mut(), stream.view_mut(), x.view_mut(), ex)
            }
            Some(ranks) if deferred => {
                next.add_parts_into(ranks, delta.view_mut(), stream.view_mut(), x.view_mut(), ex)
            }
            _ => next.add_forward_into(delta.view(), stream.view_mut(), x.view_mut(), ex),
        }
    }

    /// The attention of a layer.
    pub fn attention<A: SelfAttention>(
        &mut self,
        layer: &DecoderLayer<A>,
        form: LayerForm,
        (step, rope): (&StepViews, &RopeRows),
        kv: &mut KvLayer,
        ex: &mut Exec,
    ) -> Result<()> {
        if form.fused_attention {
            self.normed = false;
            let stream = self.stream.view_mut();
            return layer
                .input_norm
                .with_pre_norm(|norm| layer.attention.add_normed_into(&norm, stream, step, rope, kv, ex));
        }
        self.normed(&layer.input_norm, ex)?;
        let (x, out) = (self.x.view(), self.delta.view_mut());
        layer.attention.forward_into(x, step, rope, kv, out, ex)?;
        if form.mlp.fusion() == Fusion::AddNorms {
            self.normed = false; // the experts' launches add `delta`
            return Ok(());
        }
        self.add(&layer.post_attention_norm, layer.deferred[0], ex)
    }

    /// The MLP or the experts of a layer; `next` is the norm behind them. `observe` sees the router logits of experts that
    /// show them.
    pub fn mlp<A>(
        &mut self,
        layer: &DecoderLayer<A>,
        form: LayerForm,
        next: &RmsNorm,
        observe: &mut dyn FnMut(View<'_>) -> Result<()>,
        context: &mut StepContext,
        ex: &mut Exec,
    ) -> Result<()> {
        let norm = &layer.post_attention_norm;
        match (&layer.mlp, form.mlp.fusion()) {
            (Mlp::Sparse(sparse), Fusion::NormAdd) => {
                self.normed = false;
                let residual = self.stream.view_mut();
                norm.with_pre_norm(|norm| {
                    sparse.fused_into(form.mlp, MonolithicIo::NormAdd { norm, residual }, context, ex)
                })
            }
            (Mlp::Sparse(sparse), Fusion::AddNorm) => {
                self.normed(norm, ex)?;
                let mut out = ex.scratch(self.x.dtype(), self.x.dims())?;
                let (x, residual, to) = (self.x.view(), self.stream.view_mut(), out.view_mut());
                next.with_pre_norm(|norm| {
                    sparse.fused_into(
                        form.mlp,
                        MonolithicIo::AddNorm { x, residual, norm, out: to },
                        context,
                        ex,
                    )
                })?;
                self.x = out;
                Ok(())
            }
            (Mlp::Sparse(sparse), Fusion::AddNorms) => {
                let (delta, residual, out) = (self.delta.view(), self.stream.view_mut(), self.x.view_mut());
                norm.with_pre_norm(|before| {
                    next.with_pre_norm(|norm| {
                        let io = MonolithicIo::AddNorms { delta, residual, before, norm, out };
                        sparse.fused_into(form.mlp, io, context, ex)
                    })
                })?;
                self.normed = true;
                Ok(())
            }
            (Mlp::Sparse(sparse), _) if sparse.adds_norm(form.mlp) => {
                self.normed(norm, ex)?;
                let mut out = ex.scratch(self.x.dtype(), self.x.dims())?;
                let (x, residual, to) = (self.x.view(), self.stream.view_mut(), out.view_mut());
                next.with_pre_norm(|norm| {
                    let end = AddNorm { residual, norm, out: to };
                    sparse.forward_add_norm_into(x, end, observe, context, ex)
                })?;
                self.x = out;
                Ok(())
            }
            (mlp, _) => {
                self.normed(norm, ex)?;
                let (x, out) = (self.x.view(), self.delta.view_mut());
                match mlp {
                    Mlp::Dense(mlp) => trace_span!("mlp").in_scope(|| mlp.forward_into(x, out, ex))?,
                    Mlp::Sparse(sparse) => sparse.forward_as_into(form.mlp, x, out, observe, context, ex)?,
                }
                self.add(next, layer.deferred[1], ex)
            }
        }
    }
}
