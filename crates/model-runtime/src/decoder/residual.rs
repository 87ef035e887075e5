//! The residual stream of a step, and how sub-layers read and write it.
//!
//! A sub-layer reads the norm of the stream and adds to it. The norm may be taken by the launch that added last, by a
//! launch of its own, or inside the sub-layer; likewise the addition. This is the one place where all of these meet.

use candle_core::{DType, Result};
use moe_comm::Communicator;
use moe_kernels::plan::Fusion;
use moe_kernels::{Exec, MonolithicIo, ProductRows, Scratch, StepContext, View, embedding_into};
use moe_layer::{AddNorm, MoeForm};
use tracing::trace_span;

use super::plan::{AroundAttention, LayerForm, sum_norm};
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
    /// Norm of the stream, [T, H] as the next sub-layer reads it, if `normed`.
    x: ProductRows,
    /// The model dtype.
    dtype: DType,
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
        let (delta, x) = (ex.scratch(DType::F32, dims)?, ProductRows::Floats(ex.scratch(dtype, dims)?));
        Ok(Self { stream, delta, x, dtype, normed: false, ranks, shared })
    }

    /// Makes `x` rows in the model dtype, where the last norm was written as FP8.
    fn make_floats(&mut self, ex: &Exec) -> Result<()> {
        if let ProductRows::Fp8(_) = self.x {
            self.x = ProductRows::Floats(ex.scratch(self.dtype, self.stream.dims())?);
        }
        Ok(())
    }

    /// Keeps these rows alone, once what attention gave is added.
    pub fn keep(&mut self, rows: View<'_>, ex: &mut Exec) -> Result<()> {
        let dims = [rows.elem_count(), self.stream.dims()[1]];
        let mut stream = ex.scratch(DType::F32, &dims)?;
        embedding_into(self.stream.view(), rows, stream.view_mut(), ex)?;
        let mut x = ex.scratch(self.dtype, &dims)?;
        if self.normed {
            embedding_into(self.x.rows().floats("norm")?, rows, x.view_mut(), ex)?;
        }
        (self.stream, self.delta, self.x) = (stream, ex.scratch(DType::F32, &dims)?, ProductRows::Floats(x));
        Ok(())
    }

    /// Memory for the norm that `reader` reads.
    fn next_rows<A: SelfAttention>(&self, reader: Option<&A>, ex: &Exec) -> Result<ProductRows> {
        match reader {
            Some(attention) => attention.input_rows(self.stream.dims(), self.dtype, ex),
            None => ex.scratch(self.dtype, self.stream.dims()).map(ProductRows::Floats),
        }
    }

    /// The stream's norm, [T, H] in the model dtype.
    pub fn normed(&mut self, norm: &RmsNorm, ex: &mut Exec) -> Result<View<'_>> {
        if !self.normed {
            self.make_floats(ex)?;
            let x = self.x.rows_mut().floats("norm")?;
            norm.forward_into(self.stream.view(), x, ex)?;
            self.normed = true;
        }
        self.x.rows().floats("norm")
    }

    /// Adds `delta`, of which ranks may hold parts, and takes the norm that comes next.
    fn add(&mut self, next: &RmsNorm, deferred: bool, ex: &mut Exec) -> Result<()> {
        self.make_floats(ex)?;
        self.normed = true;
        let Self { stream, delta, .. } = self;
        let x = self.x.rows_mut().floats("norm")?;
        let _sums = match self.ranks.filter(|_| deferred || self.shared) {
            Some(ranks) => ex.launched_as_one(|| sum_norm(ranks, self.shared)),
            None => None,
        };
        match self.ranks {
            Some(ranks) if self.shared => {
                next.add_shared_into(ranks, delta.view_mut(), stream.view_mut(), x, ex)
            }
            Some(ranks) if deferred => next.add_parts_into(ranks, delta.view_mut(), stream.view_mut(), x, ex),
            _ => next.add_forward_into(delta.view(), stream.view_mut(), x, ex),
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
        if form.attention == AroundAttention::NormAdd {
            self.normed = false;
            let stream = self.stream.view_mut();
            return layer
                .input_norm
                .with_pre_norm(|norm| layer.attention.add_normed_into(&norm, stream, step, rope, kv, ex));
        }
        if !self.normed {
            self.normed(&layer.input_norm, ex)?;
        }
        if form.attention == AroundAttention::Add {
            self.normed = false;
            let (x, stream) = (self.x.rows(), self.stream.view_mut());
            return layer.attention.add_into(x, step, rope, kv, stream, ex);
        }
        let (x, out) = (self.x.rows(), self.delta.view_mut());
        layer.attention.forward_into(x, step, rope, kv, out, ex)?;
        self.add(&layer.post_attention_norm, layer.deferred[0], ex)
    }

    /// The MLP or the experts of a layer; `next` is the norm behind them and what reads it. `observe` sees the router logits of experts that
    /// show them.
    pub fn mlp<A: SelfAttention>(
        &mut self,
        layer: &DecoderLayer<A>,
        form: LayerForm,
        (next, reader): (&RmsNorm, Option<&A>),
        observe: &mut dyn FnMut(View<'_>) -> Result<()>,
        context: &mut StepContext,
        ex: &mut Exec,
    ) -> Result<()> {
        let norm = &layer.post_attention_norm;
        match (&layer.mlp, form.mlp) {
            (Mlp::Sparse(sparse), form @ MoeForm::Monolithic { fusion: Fusion::NormAdd, .. }) => {
                self.normed = false;
                let residual = self.stream.view_mut();
                norm.with_pre_norm(|norm| {
                    sparse.fused_into(form, MonolithicIo::NormAdd { norm, residual }, context, ex)
                })
            }
            (Mlp::Sparse(sparse), form @ MoeForm::Monolithic { fusion: Fusion::AddNorm, .. }) => {
                self.normed(norm, ex)?;
                let mut next_x = self.next_rows(reader, ex)?;
                let (x, residual) = (self.x.rows().floats("experts")?, self.stream.view_mut());
                let out = next_x.rows_mut();
                next.with_pre_norm(|norm| {
                    sparse.fused_into(form, MonolithicIo::AddNorm { x, residual, norm, out }, context, ex)
                })?;
                self.x = next_x;
                Ok(())
            }
            (Mlp::Sparse(sparse), MoeForm::Modular(Fusion::AddNorm)) => {
                self.normed(norm, ex)?;
                let mut out = ex.scratch(self.dtype, self.stream.dims())?;
                let (x, residual, to) =
                    (self.x.rows().floats("experts")?, self.stream.view_mut(), out.view_mut());
                next.with_pre_norm(|norm| {
                    let end = AddNorm { residual, norm, out: to };
                    sparse.forward_add_norm_into(x, end, observe, context, ex)
                })?;
                self.x = ProductRows::Floats(out);
                Ok(())
            }
            (mlp, form) => {
                self.normed(norm, ex)?;
                let (x, out) = (self.x.rows().floats("mlp")?, self.delta.view_mut());
                match mlp {
                    Mlp::Dense(mlp) => trace_span!("mlp").in_scope(|| mlp.forward_into(x, out, ex))?,
                    Mlp::Sparse(sparse) => sparse.forward_as_into(form, x, out, observe, context, ex)?,
                }
                self.add(next, layer.deferred[1], ex)
            }
        }
    }
}
