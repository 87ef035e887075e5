//! The products of a mixer with its weights. The launch of the first product may contain the norm before it, and the
//! launch of the last one the addition after it.

use candle_core::{Result, Tensor, bail};
use candle_nn::VarBuilder;
use moe_comm::RowParallel;
use moe_kernels::names::AttentionNames;
use moe_kernels::plan::{Form, FusedLinearForm, Fusion, LinearCall, LinearForm, Machine, Reason, Stage};
use moe_kernels::quant::QuantUse;
use moe_kernels::{
    CpuIsa, Exec, PreNorm, RowsView, TensorView, View, ViewMut, Weight, linear_add_into, linear_into,
    linear_row_parallel_into, norm_linear_into,
};
use moe_layer::{BlockContext, load_weight};

use crate::mixer::MixerIo;

/// A projection, perhaps with a bias.
#[derive(Clone, Debug)]
pub(crate) struct Projection {
    pub weight: Weight,
    pub bias: Option<Tensor>,
}

impl Projection {
    /// Loads the projection at `vb`, for the path of the CPU that the context names.
    pub fn load(
        [rows, columns]: [usize; 2],
        bias: bool,
        vb: VarBuilder,
        usage: QuantUse,
        context: &BlockContext,
    ) -> Result<Self> {
        let weight = load_weight(&vb, &[("", rows)], columns, usage, context)?;
        Self { weight, bias: bias.then(|| vb.get(rows, "bias")).transpose()? }.packed(context.cpu_isa)
    }

    /// This projection with its weight in the order that a path of the CPU reads best, see [`Weight::packed`].
    pub fn packed(self, isa: Option<CpuIsa>) -> Result<Self> {
        let rows = self.weight.dims()[0];
        Ok(Self { weight: self.weight.packed(isa, rows)?, ..self })
    }

    /// The product of `rows` rows.
    pub fn call(&self, rows: usize) -> LinearCall {
        let (n, k) = match *self.weight.dims() {
            [n, k] => (n, k),
            _ => (0, 0),
        };
        LinearCall {
            rows,
            n,
            k,
            dtype: self.weight.dtype(),
            quant: self.weight.quantisation(),
            bias: self.bias.is_some(),
            aligned: true,
        }
    }

    /// `out` [T, N] = `x` [T, K] · weight + bias.
    pub fn forward_into<'x>(&self, x: impl Into<RowsView<'x>>, out: ViewMut, ex: &mut Exec) -> Result<()> {
        let bias = Lock::new(self.bias.as_ref())?;
        linear_into(x, self.weight.read()?.view()?, bias.view()?, out, ex)
    }

    /// [`forward_into`](Self::forward_into) for the inputs of a mixer, with the norm before it if `io` has one.
    pub fn first_into(&self, io: &MixerIo, out: ViewMut, ex: &mut Exec) -> Result<()> {
        match io {
            MixerIo::NormAdd { norm, residual } => self.normed_into(residual.as_view(), norm, out, ex),
            _ => self.forward_into(io.x("the first product of attention")?, out, ex),
        }
    }

    /// Computes the norm of `x` [T, K] f32, followed by [`forward_into`](Self::forward_into).
    pub fn normed_into(&self, x: View, norm: &PreNorm, out: ViewMut, ex: &mut Exec) -> Result<()> {
        let bias = Lock::new(self.bias.as_ref())?;
        norm_linear_into(x, norm, self.weight.read()?.view()?, bias.view()?, out, ex)
    }

    /// What [`normed_into`](Self::normed_into) launches. `norm` and `product` are the names of its parts, `both` is the
    /// name of a launch that computes both.
    pub fn normed_stages(
        &self,
        [norm, product, both]: [&'static [&'static str]; 3],
        rows: usize,
        machine: &Machine,
    ) -> Vec<Stage> {
        let call = self.call(rows);
        let fused = FusedLinearForm::stage(both, &call, machine);
        match FusedLinearForm::Stream.fits(&call, machine) {
            Ok(()) => vec![fused],
            Err(_) => {
                vec![
                    Stage::new(norm, "rms_norm").after(fused.rejected),
                    LinearForm::stage(product, &call, machine),
                ]
            }
        }
    }

    /// What [`first_into`](Self::first_into) launches.
    pub fn stage(
        &self,
        computes: &'static [&'static str],
        fusion: Fusion,
        rows: usize,
        machine: &Machine,
    ) -> Stage {
        match fusion {
            Fusion::NormAdd => FusedLinearForm::stage(computes, &self.call(rows), machine),
            _ => LinearForm::stage(computes, &self.call(rows), machine),
        }
    }

    /// Computes the last product of a mixer, of rows `x` [T, K], and writes it to the place that `io` gives. `ranks`:
    /// the ranks that each have some of the columns.
    pub fn last_into(
        &self,
        x: RowsView,
        io: MixerIo,
        ranks: Option<&RowParallel>,
        ex: &mut Exec,
    ) -> Result<()> {
        let weight = self.weight.read()?;
        let bias = Lock::new(self.bias.as_ref())?;
        let weight = weight.view()?;
        let bias = bias.view()?;
        match (io, ranks) {
            (MixerIo::Store { out, .. }, None) => linear_row_parallel_into(x, weight, bias, out, ex),
            (MixerIo::Store { out, .. }, Some(ranks)) => ranks.linear_into(x, weight, bias, out, ex),
            (MixerIo::Add { residual, .. } | MixerIo::NormAdd { residual, .. }, None) => {
                linear_add_into(x, weight, bias, residual, ex)
            }
            (io, ranks) => {
                let over = if ranks.is_some() { " over ranks" } else { "" };
                bail!("the last product of attention{over} has no form{}", io.fusion().suffix())
            }
        }
    }

    /// What [`last_into`](Self::last_into) launches.
    pub fn last_stages(
        &self,
        fusion: Fusion,
        rows: usize,
        ranks: Option<&RowParallel>,
        machine: &Machine,
    ) -> Vec<Stage> {
        let computes: &[&str] = match fusion {
            Fusion::Nothing => &[AttentionNames::USUAL.o],
            _ => &[AttentionNames::USUAL.o, "add"],
        };
        let mut stages = vec![self.stage(computes, fusion, rows, machine)];
        stages.extend(ranks.and_then(RowParallel::sum_stage));
        stages
    }
}

/// Whether the first and the last product of a mixer support this fusion in their launches.
///
/// # Errors
/// The first reason why not.
pub(crate) fn fits_products(
    fusion: Fusion,
    [first, last]: [&Projection; 2],
    ranks: Option<&RowParallel>,
    rows: usize,
    machine: &Machine,
) -> std::result::Result<(), Reason> {
    if fusion != Fusion::Nothing && ranks.is_some() {
        return Err(Reason::Part { part: "the sum over ranks after its output product" });
    }
    match fusion {
        Fusion::Nothing => Ok(()),
        Fusion::NormAdd => {
            FusedLinearForm::Stream.fits(&first.call(rows), machine)?;
            FusedLinearForm::Stream.fits(&last.call(rows), machine)
        }
        Fusion::Add => match LinearForm::choose(&last.call(rows), machine) {
            Some(form) => form.adds(rows),
            None => Err(Reason::NoGain("no kernel multiplies these")),
        },
        Fusion::AddNorm => Err(Reason::Part { part: "the norm after its output product" }),
    }
}

/// An optional tensor under its read guard.
pub(crate) struct Lock<'a>(Option<TensorView<'a>>);

impl<'a> Lock<'a> {
    pub(crate) fn new(tensor: Option<&'a Tensor>) -> Result<Self> {
        Ok(Self(tensor.map(TensorView::new).transpose()?))
    }

    pub(crate) fn view(&self) -> Result<Option<View<'_>>> {
        self.0.as_ref().map(|t| t.view()).transpose()
    }
}
