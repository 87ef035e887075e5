//! The candle door of this crate's modules: rows of any leading shape in, the same shape out.

use moe_kernels::candle::{Result, Tensor, bail};
use moe_kernels::{Buffer, Exec, TensorView, View, ViewMut, Workspace};

/// Runs `f` on `x` [.., H] seen as [T, H] and returns its output in the shape of `x`.
pub(crate) fn forward_rows(
    x: &Tensor,
    workspace: &Workspace,
    f: impl FnOnce(View<'_>, ViewMut<'_>, &mut Exec) -> Result<()>,
) -> Result<Tensor> {
    let Some(&hidden) = x.dims().last() else { bail!("expected hidden states [.., H], got a scalar") };
    let rows = x.elem_count().checked_div(hidden).unwrap_or(0);
    let mut ex = Exec::for_tensor(x, workspace)?;
    let guard = TensorView::new(x)?;
    let mut out = Buffer::zeros(x.dtype(), &[rows, hidden])?;
    f(guard.view()?.reshape(&[rows, hidden])?, out.view_mut(), &mut ex)?;
    out.into_tensor()?.reshape(x.dims())
}
