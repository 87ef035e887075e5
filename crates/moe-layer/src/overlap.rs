//! Shared experts computed around dispatch against the integrated form, checked when a layer is loaded.
//!
//! Which of the two orders a step runs depends on the transport alone. Both are sums of the same
//! terms, so they must agree bit for bit; a backend whose halves lend a buffer too early would
//! otherwise show as text that changes with the machine.

use moe_kernels::candle::{DType, Device, Result, Tensor, bail};
use moe_kernels::{Exec, StepContext, TensorView, Workspace};
use tracing::trace_span;

use crate::block::SparseMoeBlock;
use crate::chunked::SharedOrder;

/// Rows that go through the block.
const ROWS: usize = 4;

impl SparseMoeBlock {
    /// Runs a few fixed rows through the block with its shared experts computed between the halves of
    /// dispatch and again after the routed experts, on every path that it has. On several ranks a
    /// collective. A block without shared experts has one order only.
    ///
    /// # Errors
    /// A difference, by the number of the MoE layer; those of a forward pass.
    pub fn check_shared_experts(&self) -> Result<()> {
        if !self.has_shared_experts() {
            return Ok(());
        }
        let _span = trace_span!("check_shared_experts").entered();
        let x = rows_beside(self.gate())?;
        let x = TensorView::new(&x)?;
        let x = x.view()?;
        let mut ex = Exec::for_tensor(self.gate(), &Workspace::new())?;
        let token_ids = Some(vec![0; ROWS].into());
        let context = &mut StepContext { token_ids, ..StepContext::default() };
        for path in self.paths() {
            let mut run = |order| {
                let mut out = ex.scratch(DType::F32, x.dims())?;
                self.modular((path, order), x, out.view_mut(), &mut |_| Ok(()), context, &mut ex)?;
                ex.to_host(out.view())?.view().to_f32_vec()
            };
            let (around, integrated) = (run(SharedOrder::AroundDispatch)?, run(SharedOrder::Integrated)?);
            let mut rows = around.iter().zip(&integrated).enumerate();
            if let Some((at, (got, want))) = rows.find(|(_, (a, b))| a.to_bits() != b.to_bits()) {
                let width = x.dims()[1];
                bail!(
                    "MoE layer {}: shared experts computed around dispatch ({}) differ from the integrated form in \
                     row {}, column {}: expected {want}, got {got}",
                    self.layer(),
                    path.prepare.name(),
                    at / width,
                    at % width
                )
            }
        }
        Ok(())
    }
}

/// Rows with values of both signs, of the width, dtype and device of a gate [E, H].
fn rows_beside(gate: &Tensor) -> Result<Tensor> {
    let hidden = gate.dims2()?.1;
    let values: Vec<f32> = (0..ROWS * hidden).map(|i| (i * 7919 % 2003) as f32 / 1001.5 - 1.).collect();
    Tensor::from_vec(values, (ROWS, hidden), &Device::Cpu)?.to_dtype(gate.dtype())?.to_device(gate.device())
}
