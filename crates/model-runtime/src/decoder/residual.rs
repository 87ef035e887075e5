//! The residual stream of a step, and how sub-layers read and write it.
//!
//! A sub-layer reads the norm of the stream and adds to it. The norm may be computed by the launch that added last, by
//! a launch of its own, or inside the sub-layer; the same is true for the addition. The step's program determines
//! which.

use candle_core::{DType, Result};
use moe_comm::{AddNorm, Communicator, FusedCollective};
use moe_kernels::plan::Fusion;
use moe_kernels::{Exec, ProductRows, Scratch, View, embedding_into};

use super::program::Sums;
use crate::layers::RmsNorm;
use crate::mixer::{Mixer, MixerIo};

/// The residual stream [T, H] f32, with the arrays that sub-layers pass to each other.
pub(super) struct Residual<'a> {
    pub stream: Scratch,
    /// Output of a sub-layer that is to be added, [T, H] f32.
    delta: Scratch,
    /// Norm of the stream, [T, H] as the next sub-layer reads it.
    x: ProductRows,
    /// The model dtype.
    dtype: DType,
    /// The ranks that share each token, if norms add their sums.
    ranks: Option<&'a dyn Communicator>,
}

/// The norms before and after a sub-layer.
#[derive(Clone, Copy)]
pub(super) struct Norms<'a> {
    pub own: &'a RmsNorm,
    pub next: &'a RmsNorm,
    /// The mixer that reads the next norm, which determines its form; `None`: it is read in the model dtype.
    pub reader: Option<&'a dyn Mixer>,
}

impl<'a> Residual<'a> {
    /// A stream of unspecified rows.
    pub fn new(dims: &[usize], dtype: DType, ranks: Option<&'a dyn Communicator>, ex: &Exec) -> Result<Self> {
        let stream = ex.scratch(DType::F32, dims)?;
        let delta = ex.scratch(DType::F32, dims)?;
        let x = ProductRows::Floats(ex.scratch(dtype, dims)?);
        Ok(Self { stream, delta, x, dtype, ranks })
    }

    /// The stream's norm, [T, H] in the model dtype, when it has been computed.
    pub fn normed(&self) -> Result<View<'_>> {
        self.x.rows().floats("norm")
    }

    /// Converts `x` to the model dtype, if the last norm was written as FP8.
    fn make_floats(&mut self, ex: &Exec) -> Result<()> {
        if let ProductRows::Fp8(_) = self.x {
            self.x = ProductRows::Floats(ex.scratch(self.dtype, self.stream.dims())?);
        }
        Ok(())
    }

    /// Keeps only these rows; `normed`: with their norm.
    pub fn keep(&mut self, rows: View<'_>, normed: bool, ex: &mut Exec) -> Result<()> {
        let dims = [rows.elem_count(), self.stream.dims()[1]];
        let mut stream = ex.scratch(DType::F32, &dims)?;
        embedding_into(self.stream.view(), rows, stream.view_mut(), ex)?;
        let mut x = ex.scratch(self.dtype, &dims)?;
        if normed {
            embedding_into(self.normed()?, rows, x.view_mut(), ex)?;
        }
        self.stream = stream;
        self.delta = ex.scratch(DType::F32, &dims)?;
        self.x = ProductRows::Floats(x);
        Ok(())
    }

    /// Computes a norm of the stream.
    pub fn norm(&mut self, norm: &RmsNorm, ex: &mut Exec) -> Result<()> {
        self.make_floats(ex)?;
        norm.forward_into(self.stream.view(), self.x.rows_mut().floats("norm")?, ex)
    }

    /// Adds the results of a sub-layer, of which ranks may hold parts, and computes the next norm.
    pub fn add_norm(&mut self, next: &RmsNorm, sums: Sums, ex: &mut Exec) -> Result<()> {
        self.make_floats(ex)?;
        let Self { stream, delta, .. } = self;
        let x = self.x.rows_mut().floats("norm")?;
        let Some(ranks) = self.ranks.filter(|_| sums != Sums::Own) else {
            return next.add_forward_into(delta.view(), stream.view_mut(), x, ex);
        };
        let _sums = ex.launched_as_one(|| sums.kernel(ranks));
        next.with_pre_norm(|norm| {
            let partial = delta.view_mut();
            let end = AddNorm { residual: stream.view_mut(), norm, out: x };
            let call = match sums {
                Sums::Shared => FusedCollective::ShareAddNorm { partial, end },
                Sums::Own | Sums::OfRanks => FusedCollective::AllReduceAddNorm { partial, end },
            };
            call.run(ranks, ex)
        })
    }

    /// Runs a sub-layer whose launches contain `fusion`.
    pub fn sublayer(
        &mut self,
        fusion: Fusion,
        norms: Norms<'_>,
        ex: &mut Exec,
        run: impl FnOnce(MixerIo<'_>, &mut Exec) -> Result<()>,
    ) -> Result<()> {
        let x = self.x.rows();
        let residual = self.stream.view_mut();
        match fusion {
            Fusion::Nothing => run(MixerIo::Store { x, out: self.delta.view_mut() }, ex),
            Fusion::Add => run(MixerIo::Add { x, residual }, ex),
            Fusion::NormAdd => norms.own.with_pre_norm(|norm| run(MixerIo::NormAdd { norm, residual }, ex)),
            Fusion::AddNorm => {
                let mut next = match norms.reader {
                    Some(mixer) => mixer.input_rows(residual.dims(), self.dtype, ex)?,
                    None => ProductRows::Floats(ex.scratch(self.dtype, residual.dims())?),
                };
                let out = next.rows_mut();
                norms.next.with_pre_norm(|norm| run(MixerIo::AddNorm { x, residual, norm, out }, ex))?;
                self.x = next;
                Ok(())
            }
        }
    }
}
